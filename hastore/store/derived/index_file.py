"""One file of the key index: header, slots, entries; all big-endian.

    header 40:  beginTimestamp (8)  endTimestamp (8)  beginPhyOffset (8)  endPhyOffset (8)
                slots in use (4)  indexCount = keys + 1 (4)
    slots:      n x 4, number of the slot's latest entry, 0 if it has none
    entries:    m x 20 (entry 0 is unused): keyHash (4)  physicalOffset (8)
                seconds since beginTimestamp (4)  number of the slot's previous entry (4)

Entries are written by pwrite, which raises OSError on a full disk. Header and slots are stored into
a memory map whose blocks were allocated when the file was created, so a full disk cannot cause a
SIGBUS.

Entries are written first, then slots, then the header. So after a kill every entry that a slot
names is in the file. Each entry has the slot's value from before it, so removing entries from the
end, the last first, restores the slots.
"""

import contextlib
import mmap
import struct
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from hastore.fs.filesystem import File, FileSystem
from hastore.store.derived.contract import TimeWindow

HEADER = struct.Struct(">qqqqii")
SLOT = struct.Struct(">i")
ENTRY = struct.Struct(">iqii")
NAME_DIGITS = 17
NAME_FORM = "%Y%m%d%H%M%S%f"
_CHUNK_ENTRIES = 4096
_NEAR_ENTRIES = 256  # entries of a slot that are closer together are read by one pread
_NEVER_MS = 2**63 - 1
_SCANNED_CHUNKS = 4  # are looked through for the newest entry before a time


def index_name(created: datetime) -> str:
    """Return the name of a file that was created at that local time, as in RocketMQ."""
    return created.strftime(NAME_FORM)[:NAME_DIGITS]


def index_file_bytes(slots: int, entries: int) -> int:
    """Return the size of a file with so many slots and entries."""
    return HEADER.size + SLOT.size * slots + ENTRY.size * entries


@dataclass(slots=True)
class IndexHeader:
    """The header's fields; `count` is indexCount."""

    begin_timestamp_ms: int = 0
    end_timestamp_ms: int = 0
    begin_offset: int = 0
    end_offset: int = 0
    slots_used: int = 0
    count: int = 1

    def pack(self) -> bytes:
        """Return the 40 bytes."""
        return HEADER.pack(
            self.begin_timestamp_ms, self.end_timestamp_ms, self.begin_offset, self.end_offset,
            self.slots_used, self.count,
        )  # fmt: skip


@dataclass(slots=True)
class Plan:
    """The changes of a batch to one file; the whole batch is planned before the first write."""

    file: "IndexFile"
    header: IndexHeader
    first: int  # number of the first new entry
    entries: bytearray = field(default_factory=bytearray)
    slots: dict[int, int] = field(default_factory=dict)

    def put(self, key_hash: int, offset: int, store_timestamp_ms: int) -> None:
        """Add one key; the caller ensures that the file has room."""
        header = self.header
        slot = key_hash % self.file.slots
        previous = self.slots.get(slot)
        if previous is None:
            previous = self.file.slot(slot)
            if not 0 < previous <= header.count:
                previous = 0
        seconds = 0
        if header.begin_timestamp_ms > 0:
            seconds = (store_timestamp_ms - header.begin_timestamp_ms) // 1000
            seconds = min(max(seconds, 0), 0x7FFFFFFF)
        self.entries += ENTRY.pack(key_hash, offset, seconds, previous)
        self.slots[slot] = header.count
        if header.count == 1:
            header.begin_offset = offset
            header.begin_timestamp_ms = store_timestamp_ms
        if previous == 0:
            header.slots_used += 1
        header.count += 1
        header.end_offset = offset
        header.end_timestamp_ms = store_timestamp_ms


class FoundEntries(NamedTuple):
    """Where `IndexFile.walk` came: what it found, and where it goes on."""

    found: list[tuple[int, int]]  # offsets of records that may match, each with its latest time
    number: int  # the next entry; 0: there are no more in this file
    steps: int  # how many entries were looked at
    latest_ms: int  # the latest time at which the last of them was stored
    over: bool  # all records before it lie before the window


class IndexFile:
    """An index file; mapped only while it is open for writing.

    The file has room for `slots` slots and `entries` entries. Replay's thread writes; `walk` may
    run in any thread, under KeyIndex's lock.
    """

    def __init__(self, fs: FileSystem, path: str, slots: int, entries: int) -> None:
        self._fs = fs
        self.path = path
        self.slots = slots
        self.entries = entries
        self.header = IndexHeader()
        self._file: File | None = None
        self._map: mmap.mmap | None = None

    @property
    def full_size(self) -> int:
        """Return the size of the file in bytes."""
        return index_file_bytes(self.slots, self.entries)

    @property
    def is_full(self) -> bool:
        """Whether the file has no room for another key."""
        return self.header.count >= self.entries

    def create(self) -> None:
        """Create the file and allocate header and slots; raises StoreFullError, OSError."""
        file = self._fs.open(self.path, create=True)
        try:
            file.allocate(HEADER.size + SLOT.size * self.slots)
            file.truncate(self.full_size)
            self._map = file.map(writable=True)
        except BaseException:
            file.close()
            self._fs.remove(self.path)
            raise
        self._file = file

    def open(self) -> bool:
        """Open for writing and read the header; False when the size or the header is invalid."""
        if self._file is None:
            file = self._fs.open(self.path)
            self._file = file
            if file.size != self.full_size:
                return False
            file.allocate(HEADER.size + SLOT.size * self.slots)
            self._map = file.map(writable=True)
        return self._adopt_header(self._file.pread(HEADER.size, 0))

    def read_header(self) -> bool:
        """Read the header only, and leave the file closed; False when size or header is invalid."""
        with contextlib.closing(self._fs.open(self.path, writable=False)) as file:
            return file.size == self.full_size and self._adopt_header(file.pread(HEADER.size, 0))

    def slot(self, number: int) -> int:
        """Return the slot's latest entry number as stored."""
        assert self._map is not None
        value: int = SLOT.unpack_from(self._map, HEADER.size + SLOT.size * number)[0]
        return value

    def slots_view(self) -> memoryview:
        """Lend all slots as stored, writable; release the view before `close`."""
        assert self._map is not None
        return memoryview(self._map)[HEADER.size : HEADER.size + SLOT.size * self.slots]

    def write_entries(self, plan: Plan) -> None:
        """Write a plan's entries; they take effect once slots and header are stored.

        Raises OSError.
        """
        if plan.entries:
            assert self._file is not None
            self._file.pwrite(plan.entries, self._entry_at(plan.first))

    def store_slots(self, slots: dict[int, int]) -> None:
        """Store the latest entry number of each slot; the caller then stores the header."""
        assert self._map is not None
        target, pack = self._map, SLOT.pack_into
        for slot, number in slots.items():
            pack(target, HEADER.size + 4 * slot, number)

    def plan(self) -> Plan:
        """Return an empty plan for this file."""
        return Plan(self, replace(self.header), self.header.count)

    def cut(self, limit: int) -> int:
        """Leave out entries of records at or beyond `limit` and entries that the header omits.

        Returns the last written entry's number + 1. The caller saves the header and then calls
        `clear`, or removes the file. If the entries were cleared first, a kill in between would
        leave a header that counts cleared entries, and the next cut would take them for good ones.
        """
        assert self._file is not None and self._map is not None
        header = self.header
        known, last = header.count, self._written_end()
        number = last
        while number > 1:
            first = max(1, number - _CHUNK_ENTRIES)
            rows = list(ENTRY.iter_unpack(self._read_entries(first, number - first)))
            for key_hash, offset, _, previous in reversed(rows):
                if number <= known and offset < limit:
                    break
                number -= 1
                slot = key_hash % self.slots
                if self.slot(slot) == number:  # otherwise a kill came before the slot was stored
                    SLOT.pack_into(self._map, HEADER.size + SLOT.size * slot, previous)
                if number < known and previous == 0:
                    header.slots_used -= 1
            else:
                continue
            break
        header.count = number
        return last

    def clear(self, last: int) -> None:
        """Clear the entries that the header leaves out, up to number `last`."""
        assert self._file is not None
        number = self.header.count
        self._file.zero(self._entry_at(number), ENTRY.size * (last - number))

    def rebuild(self, limit: int, *, last_offset: int, zeros: bool) -> None:
        """Keep the leading entries of records below `limit`; rebuild the slots from them.

        An entry of zeros was not written; but with `zeros` the first one is that of a record at 0.
        A last entry was torn, where a sector ends inside it, if its offset is before that of the
        entry before it, or `last_offset` of the file before this: offsets never fall.
        """
        assert self._file is not None and self._map is not None
        self._file.zero(HEADER.size, SLOT.size * self.slots)
        latest: dict[int, int] = {}
        header = IndexHeader()
        number, whole = 1, True
        torn, newest = False, (0, 0)
        while whole and number < self.entries:
            count = min(_CHUNK_ENTRIES, self.entries - number)
            for key_hash, offset, _, previous in ENTRY.iter_unpack(
                self._read_entries(number, count)
            ):
                slot = key_hash % self.slots if key_hash >= 0 else -1
                lost = not key_hash and not offset and not (zeros and number == 1)
                if offset >= limit or lost or slot < 0 or previous != latest.get(slot, 0):
                    whole = False
                    break
                torn = offset < last_offset
                last_offset, newest = offset, (slot, previous)
                header.slots_used += previous == 0
                latest[slot] = number
                number += 1
        if torn:  # what follows it lies beyond the limit, so it is no entry that has rotted
            number -= 1
            slot, previous = newest
            latest[slot] = previous
            header.slots_used -= previous == 0
        for slot, last in latest.items():
            SLOT.pack_into(self._map, HEADER.size + 4 * slot, last)
        header.count = number
        rest = self._entry_at(number)
        self._file.zero(rest, self.full_size - rest)
        self.header = header

    def entry_offset(self, number: int) -> int:
        """Return the physical offset of an entry's record."""
        offset: int = ENTRY.unpack(self._read_entries(number, 1))[1]
        return offset

    def save_header(self) -> None:
        """Store the header as it is in memory."""
        assert self._map is not None
        self._map[: HEADER.size] = self.header.pack()

    def walk(
        self, key_hash: int, number: int | None, window: TimeWindow, most: int
    ) -> "FoundEntries":
        """Follow the entries of a hash, newest first, from entry `number` on (None: the newest).

        Looks at `most` entries at most. Their times are those of the index, exact to a second.
        Raises FileNotFoundError if an operator removed the file.
        """
        file = self._fs.open(self.path, writable=False) if self._file is None else self._file
        try:
            if number is None:
                number = self._newest(file, key_hash % self.slots, window)
            return self._walk(file, key_hash, number, window, most)
        finally:
            if file is not self._file:
                file.close()

    def _newest(self, file: File, slot: int, window: TimeWindow) -> int:
        """Return the entry at which a search of this slot begins; 0 if there is none.

        Of entries that are too new, those at the end of the file are left out if that is quick.
        """
        (number,) = SLOT.unpack(file.pread(SLOT.size, HEADER.size + SLOT.size * slot))
        header = self.header
        is_last_new = header.end_timestamp_ms - window.slack_ms > window.end_ms
        if not is_last_new or not window.in_one_run(header.begin_offset, header.end_offset):
            return int(number)

        def is_new(entry: int) -> bool:
            seconds = ENTRY.unpack(file.pread(ENTRY.size, self._entry_at(entry)))[2]
            earliest_ms = header.begin_timestamp_ms + 1000 * int(seconds)
            return bool(entry > 1 and seconds > 0 and earliest_ms - window.slack_ms > window.end_ms)

        end = 1 + bisect_left(range(1, header.count), True, key=is_new)
        for _ in range(_SCANNED_CHUNKS):
            first = max(1, end - _CHUNK_ENTRIES)
            rows = list(ENTRY.iter_unpack(file.pread(ENTRY.size * (end - first),
                                                     self._entry_at(first))))  # fmt: skip
            for back, row in enumerate(reversed(rows), 1):
                if row[0] >= 0 and row[0] % self.slots == slot:
                    return end - back
            end = first
            if first == 1:
                return 0
        return int(number)  # the slot has few entries: to walk them all is quicker

    def _walk(
        self, file: File, key_hash: int, number: int, window: TimeWindow, most: int
    ) -> "FoundEntries":
        begin_ms, count = self.header.begin_timestamp_ms, self.header.count
        floor, end, unpack, width = window.floor, window.settled_end, ENTRY.unpack_from, ENTRY.size
        # Entries with fewer seconds were stored before the window, and so were those before them.
        stop_s = -(-(window.begin_ms - window.slack_ms - 999 - begin_ms) // 1000)
        found: list[tuple[int, int]] = []
        block, first, steps, near, over = b"", 0, 0, False, False
        seconds = 0
        while 0 < number < count and steps < most and not over:
            if not 0 <= number - first < len(block) // width:
                # Entries of a busy key lie close together, and are read together.
                first = max(1, number - _CHUNK_ENTRIES + 1) if near else number
                block = file.pread(width * (number + 1 - first), self._entry_at(first))
            entry_hash, offset, seconds, previous = unpack(block, width * (number - first))
            steps += 1
            if number == 1:  # it states its time since the end of the file before
                seconds = 0
            if entry_hash == key_hash:
                # 0 seconds stand for every time up to the file's begin too.
                earliest_ms = begin_ms + 1000 * seconds if seconds > 0 else 0
                if earliest_ms <= window.end_ms:
                    found.append((offset, self._latest_ms(seconds)))
            over = offset < floor or (seconds < stop_s and offset < end and begin_ms > 0)
            if previous >= number:  # damaged: each entry's previous one has a lower number
                previous = 0
            near = previous > number - _NEAR_ENTRIES
            number = previous
        number = number if 0 < number < count else 0
        return FoundEntries(found, number, steps, self._latest_ms(seconds), over)

    def _latest_ms(self, seconds: int) -> int:
        """Return the latest time at which the record of an entry with these seconds was stored."""
        begin_ms = self.header.begin_timestamp_ms
        return begin_ms + 1000 * seconds + 999 if begin_ms > 0 else _NEVER_MS

    def sync(self) -> None:
        """Sync the file, its map included; raises OSError."""
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Unmap and close the file."""
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _adopt_header(self, raw: bytes) -> bool:
        if len(raw) < HEADER.size:
            return False
        self.header = IndexHeader(*HEADER.unpack(raw))
        return 0 <= self.header.count <= self.entries

    def _entry_at(self, number: int) -> int:
        return HEADER.size + SLOT.size * self.slots + ENTRY.size * number

    def _read_entries(self, first: int, count: int) -> bytes:
        assert self._file is not None
        return self._file.pread(ENTRY.size * count, self._entry_at(first))

    def _written_end(self) -> int:
        """Return the last written entry's number + 1; the header may not count that entry."""
        number = max(self.header.count, 1)
        while number < self.entries:
            raw = self._read_entries(number, min(_CHUNK_ENTRIES, self.entries - number))
            for at in range(0, len(raw), ENTRY.size):
                if not any(raw[at : at + ENTRY.size]):
                    return number
                number += 1
        return number
