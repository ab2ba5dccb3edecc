"""Compare a store's queues and key index with new ones; find the first difference.

Queues are compared byte by byte. Index files are compared key by key, because their division into
files depends on where the log began when they were written; then each file's chains are checked.
If a node has the store open, its newer records are ignored, and so are those that its retention
removes meanwhile.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from hastore.clock import SYSTEM_CLOCK
from hastore.fs.filesystem import FileSystem, is_file_name, read_range, size_of
from hastore.store.derived.consume_queue import BATCH_UNIT, UNIT
from hastore.store.derived.index_arrays import ENTRY_ROW, chain
from hastore.store.derived.index_file import ENTRY, HEADER, SLOT, IndexHeader, index_file_bytes
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE
from hastore.store.rebuild.extract import Array
from hastore.store.rebuild.layout import BATCH_QUEUES, INDEX, QUEUES, Sizes
from hastore.store.rebuild.source import NO_LIMIT, Log, first_now

_CHUNK_UNITS = 1 << 16
_CHUNK_ENTRIES = 1 << 18
RETENTION_S = 30.0  # retention removes files of queues and index first, and then those of the log
_STEP_S = 0.1


@dataclass(frozen=True)
class WrongFile:
    """The first place where a file differs, what the log says, and what the store has."""

    path: str
    place: str
    expected: str
    found: str

    @property
    def text(self) -> str:
        """Return a line for people."""
        return f"{self.path}: {self.place}: {self.found} instead of {self.expected}"


def compare(
    fs: FileSystem, root: str, new: str, log: Log, end: int, sizes: Sizes, *, index: bool = True
) -> WrongFile | None:
    """Compare the folders `root` and `new`; return None if they agree up to offset `end`."""
    in_use = log.limit != NO_LIMIT
    retention = _Retention(fs, log, in_use)
    for kind, form in ((QUEUES, UNIT), (BATCH_QUEUES, BATCH_UNIT)):
        for queue in sorted({*_queues(fs, f"{new}/{kind}"), *_queues(fs, f"{root}/{kind}")}):
            folders = f"{root}/{kind}/{queue}", f"{new}/{kind}/{queue}"
            comparison = _QueueComparison(fs, *folders, form.size, retention)
            found = comparison.first_difference(end if in_use else None)
            if found is not None:
                return found
    if not index:
        return None
    limit = end if in_use else None
    return _compare_index(fs, f"{root}/{INDEX}", f"{new}/{INDEX}", retention, limit, sizes)


class _Retention:
    """What is missing because the node that has the store open has removed it meanwhile."""

    def __init__(self, fs: FileSystem, log: Log, in_use: bool) -> None:
        self._fs = fs
        self._log = log
        self._in_use = in_use

    def first(self) -> int:
        """Return where the log begins by now."""
        return first_now(self._fs, self._log.root) if self._in_use else self._log.first

    def explains(self, look: Callable[[int], bool]) -> bool:
        """Return whether all is well where the log begins by now; waits for retention's end."""
        end_ms = SYSTEM_CLOCK.monotonic_ms() + RETENTION_S * 1_000.0
        while not look(self.first()):
            if not self._in_use or SYSTEM_CLOCK.monotonic_ms() >= end_ms:
                return False
            _pause()
        return True


def _pause() -> None:
    threading.Event().wait(_STEP_S)


def _queues(fs: FileSystem, folder: str) -> Iterator[str]:
    for topic in fs.list_dir(folder):
        if fs.is_dir(f"{folder}/{topic}"):
            for queue in fs.list_dir(f"{folder}/{topic}"):
                if fs.is_dir(f"{folder}/{topic}/{queue}"):
                    yield f"{topic}/{queue}"


# -- queues ----------------------------------------------------------------------------------------


class _QueueComparison:
    """The comparison of one queue."""

    def __init__(
        self, fs: FileSystem, present: str, new: str, unit_bytes: int, retention: _Retention
    ) -> None:
        self._fs = fs
        self._present = present
        self._new = new
        self._unit = unit_bytes
        self._retention = retention

    def first_difference(self, limit: int | None) -> WrongFile | None:
        """Compare all files; units of records from `limit` on are ignored in the present ones."""
        names = {*self._fs.list_dir(self._new), *self._fs.list_dir(self._present)}
        for name in sorted(filter(is_file_name, names)):
            found = self._file(name, limit)
            if found is not None:
                return found
        return None

    def _file(self, name: str, limit: int | None) -> WrongFile | None:
        new, present = f"{self._new}/{name}", f"{self._present}/{name}"
        sizes = [self._size(path) for path in (new, present)]
        if sizes[1] == 0 and sizes[0]:
            last = self._last_record(new, sizes[0])
            if self._retention.explains(lambda first: last < first):
                return None
            return WrongFile(present, "the file", f"{sizes[0]} bytes", "nothing")
        if sizes[0] and sizes[0] != sizes[1]:
            return WrongFile(present, "the file", f"{sizes[0]} bytes", f"{sizes[1]} bytes")
        step = _CHUNK_UNITS * self._unit
        for at in range(0, sizes[1], step):
            wanted, found = (self._read(path, step, at) for path in (new, present))
            wanted = wanted.ljust(len(found), b"\0")
            if wanted != found:
                place = self._differs(wanted, found, limit)
                if place is not None:
                    number = (int(name) + at + place) // self._unit
                    units = (part[place : place + self._unit] for part in (wanted, found))
                    return WrongFile(present, f"unit {number}", *map(_unit_text, units))
        return None

    def _differs(self, wanted: bytes, found: bytes, limit: int | None) -> int | None:
        """Return the position of the first unit that differs."""
        nothing = bytes(self._unit)
        for at in range(0, len(found), self._unit):
            unit = found[at : at + self._unit]
            if unit == wanted[at : at + self._unit]:
                continue
            if limit is not None and wanted[at : at + self._unit] == nothing:
                if int.from_bytes(unit[:8]) >= limit or unit == nothing:
                    continue
            return at
        return None

    def _last_record(self, path: str, size: int) -> int:
        """Return the greatest offset of a record that a file has a unit of."""
        offset = np.dtype({"names": ["offset"], "formats": [">i8"], "itemsize": self._unit})
        found = 0
        for at in range(0, size, _CHUNK_UNITS * self._unit):
            part = np.frombuffer(self._read(path, _CHUNK_UNITS * self._unit, at), offset)
            found = max(found, int(part["offset"].max()))
        return found

    def _size(self, path: str) -> int:
        try:
            return size_of(self._fs, path)
        except FileNotFoundError:
            return 0

    def _read(self, path: str, size: int, at: int) -> bytes:
        try:
            return read_range(self._fs, path, size, at)
        except FileNotFoundError:
            return b""


def _unit_text(raw: bytes) -> str:
    if not any(raw):
        return "no unit"
    if len(raw) == BATCH_UNIT.size:
        offset, size, tags, stored_ms, base, count, _, _ = BATCH_UNIT.unpack(raw)
        return (
            f"(offset {offset}, size {size}, tagsCode {tags}, stored {stored_ms},"
            f" {count} messages from queue offset {base})"
        )
    offset, size, tags = UNIT.unpack(raw) if len(raw) == UNIT.size else (0, 0, 0)
    if size == BLANK_UNIT_SIZE:
        return "a blank"
    return f"(offset {offset}, size {size}, tagsCode {tags})"


# -- index -----------------------------------------------------------------------------------------


def _compare_index(
    fs: FileSystem, present: str, new: str, retention: _Retention, limit: int | None, sizes: Sizes
) -> WrongFile | None:
    """Compare all index files; `limit` is the end of the comparison if a node has them open."""
    comparison = _IndexComparison(_Stream(_keys(fs, new, sizes)), retention, limit)
    names = [name for name in fs.list_dir(present) if name.isdigit()]
    for number, name in enumerate(names):
        is_open = limit is not None and number == len(names) - 1
        try:
            found = comparison.first_difference(_IndexFile(fs, f"{present}/{name}", sizes), is_open)
        except FileNotFoundError:
            if limit is None:
                raise
            continue  # the next file tells whether retention has removed it
        if found is not None:
            return found
    missing = comparison.next_missing()
    if len(missing):
        return WrongFile(present, "after its last entry", _key_text(missing[0]), "no entry")
    return None


class _IndexComparison:
    """The comparison of the index files, in their order."""

    def __init__(self, expected: "_Stream", retention: _Retention, limit: int | None) -> None:
        self._expected = expected
        self._retention = retention
        self._limit = limit
        self._first = 0  # keys of records before it are ignored

    def first_difference(self, file: "_IndexFile", is_open: bool) -> WrongFile | None:
        """Compare a file; the chains of one that `is_open` may change meanwhile."""
        if file.problem is not None:
            what = f"{file.full_size} bytes, a header"
            return WrongFile(file.path, "the file", what, file.problem)
        at = 1
        for rows in file.entries():
            found = self._differs(rows, self._retention.first() if at == 1 else self._first)
            # Retention removes whole files: only the first entries of one may follow a gap.
            if found is not None and (
                at > 1 or not self._retention.explains(partial(self._agrees, rows))
            ):
                place, expected, present = found
                return WrongFile(file.path, f"entry {at + place}", expected, present)
            at += len(rows)
        return None if is_open else file.check_chains()

    def next_missing(self) -> Array:
        """Return the next entry that no file has, if there is one."""
        self._expected.drop_before(self._retention.first())
        return self._expected.next_rows(1)

    def _agrees(self, rows: Array, first: int) -> bool:
        return self._differs(rows, first) is None

    def _differs(self, rows: Array, first: int) -> tuple[int, str, str] | None:
        """Return which row differs, what is expected, and what is there; None if none does."""
        self._first = first
        self._expected.drop_before(first)
        keep = rows["offset"] >= first
        if self._limit is not None:
            keep &= rows["offset"] < self._limit
        numbers = np.flatnonzero(keep)
        wanted = self._expected.next_rows(len(numbers))
        mine = rows[numbers]
        count = min(len(wanted), len(mine))
        unlike = np.flatnonzero(
            (wanted["hash"] != mine["hash"][:count]) | (wanted["offset"] != mine["offset"][:count])
        )
        if not len(unlike) and count == len(mine):
            return None
        self._expected.put_back(wanted)
        place = int(unlike[0]) if len(unlike) else count
        text = _key_text(wanted[place]) if place < len(wanted) else "no entry"
        return int(numbers[place]), text, _key_text(mine[place])


def _key_text(row: Array) -> str:
    return f"(keyHash {int(row['hash'])}, offset {int(row['offset'])})"


def _keys(fs: FileSystem, folder: str, sizes: Sizes) -> Iterator[Array]:
    for name in fs.list_dir(folder):
        yield from _IndexFile(fs, f"{folder}/{name}", sizes).entries()


class _Stream:
    """Arrays as one sequence."""

    def __init__(self, parts: Iterator[Array]) -> None:
        self._parts = parts
        self._rest = np.empty(0, ENTRY_ROW)

    def next_rows(self, count: int) -> Array:
        """Return the next `count` rows, or as many as there are."""
        while len(self._rest) < count:
            part = next(self._parts, None)
            if part is None:
                break
            self._rest = np.concatenate((self._rest, part))
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def put_back(self, rows: Array) -> None:
        """Let rows that were taken be the next ones again."""
        self._rest = np.concatenate((rows, self._rest))

    def drop_before(self, first: int) -> None:
        """Leave out the next rows that are of records before an offset: the log's order is kept."""
        while True:
            kept = np.flatnonzero(self._rest["offset"] >= first)
            if len(kept):
                self._rest = self._rest[int(kept[0]) :]
                return
            part = next(self._parts, None)
            if part is None:
                self._rest = self._rest[:0]
                return
            self._rest = part


class _IndexFile:
    """An index file that is only read."""

    def __init__(self, fs: FileSystem, path: str, sizes: Sizes) -> None:
        self._fs = fs
        self.path = path
        self._sizes = sizes
        self._entries_at = HEADER.size + SLOT.size * sizes.slots
        self.full_size = index_file_bytes(sizes.slots, sizes.entries)
        self.header = IndexHeader()
        self.problem: str | None = None
        size = size_of(fs, path)
        if size != self.full_size:
            self.problem = f"{size} bytes"
            return
        self.header = IndexHeader(*HEADER.unpack(self._read(0, HEADER.size)))
        if not 0 <= self.header.count <= sizes.entries:
            self.problem = f"{self.header.count} entries in the header"

    def entries(self) -> Iterator[Array]:
        """Yield the entries, the unused first one left out, in parts."""
        for first in range(1, self.header.count, _CHUNK_ENTRIES):
            count = min(_CHUNK_ENTRIES, self.header.count - first)
            raw = self._read(self._entries_at + ENTRY.size * first, ENTRY.size * count)
            yield np.frombuffer(raw, ENTRY_ROW)

    def check_chains(self) -> WrongFile | None:
        """Compare slots and previous entries with what the keys' hashes say."""
        slots = np.zeros(self._sizes.slots, np.int32)
        number = 1
        for rows in self.entries():
            previous = chain(slots, rows["hash"].astype(np.int64) % self._sizes.slots, number)
            wrong = np.flatnonzero(previous != rows["previous"])
            if len(wrong):
                place = int(wrong[0])
                return WrongFile(
                    self.path, f"entry {number + place}",
                    f"previous entry {int(previous[place])}",
                    f"previous entry {int(rows['previous'][place])}",
                )  # fmt: skip
            number += len(rows)
        stored = np.frombuffer(self._read(HEADER.size, SLOT.size * len(slots)), ">i4")
        wrong = np.flatnonzero(stored != slots)
        if len(wrong):
            slot = int(wrong[0])
            return WrongFile(
                self.path, f"slot {slot}", f"entry {slots[slot]}", f"entry {stored[slot]}"
            )
        return None

    def _read(self, at: int, size: int) -> bytes:
        return read_range(self._fs, self.path, size, at)
