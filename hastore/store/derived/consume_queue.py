"""Consume queues: the places of a queue's records in the log, by queue offset.

    unit n, at byte 20 n:   physicalOffset (8)  size (4)  tagsCode (8)

Replay's thread is the only writer; any thread reads. A batch of records costs one pwrite for each
queue, or one for each file if its units span several. Prepared and rollback records have no queue
offset.

RocketMQ's inner batches have queues of their own, `BatchConsumeQueue`. Each batch is one record and
has one unit, whose number is not a queue offset: a binary search finds the unit of a queue offset.
A topic and queue may have both: what a client of hastore puts to such a topic is a single record.
Then the queue offsets of both follow each other in the log's order.

    physicalOffset (8)  size (4)  tagsCode (8)  storeTimestamp (8)
    INNER_BASE (8): queue offset of the first message   INNER_NUM (2): messages   -1 (4)   0 (4)
"""

import logging
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from hastore.fs.filesystem import FileSystem
from hastore.record.layout import FLAG_INNER_BATCH, FLAG_PREPARED
from hastore.record.queue_ends import QueueNext, queue_ends_in
from hastore.store.derived.contract import (
    UNIT_FIELDS,
    Dispatched,
    RecordColumns,
    inner_batch_of,
    queue_ends_of,
)
from hastore.store.derived.unit_files import (
    BLANK_UNIT_SIZE,
    FileCache,
    UnitFiles,
    first_late,
    first_where,
    queue_ids,
)
from hastore.store.state.time_falls import NO_FALLS, Falls

if TYPE_CHECKING:
    import numpy.typing as npt


BATCH_UNIT = struct.Struct(">qiqqqhii")
_Unit = tuple[int, int, int, int, int, int, int, int]
_DAMAGED = 1_000  # records that a search by time looks at behind one that is damaged


class BatchConsumeQueue:
    """One queue of inner batches. Replay's thread writes; any thread reads."""

    def __init__(self, cache: FileCache, directory: str, units_per_file: int) -> None:
        self.files = UnitFiles(cache, directory, BATCH_UNIT.size, units_per_file)
        self.min_queue_offset = 0
        self.max_queue_offset = 0
        self.last_offset = -1  # the physical offset of the last batch; -1 without one

    @property
    def next(self) -> int:
        """The next queue offset."""
        return self.max_queue_offset

    def put(self, record: Dispatched, base: int, count: int) -> None:
        """Write the unit of a batch of `count` messages from queue offset `base`.

        Raises OSError.
        """
        first = self.files.end == 0
        self.files.append(
            BATCH_UNIT.pack(
                record.offset, record.size, record.tags_code, record.store_timestamp_ms,
                base, count, -1, 0,
            )
        )  # fmt: skip
        self.last_offset = record.offset
        if first:
            self.min_queue_offset = base
        self.max_queue_offset = base + count

    def read(self, queue_offset: int, max_units: int) -> list[tuple[int, int, int, int]]:
        """Return (first queue offset, offset, size, tagsCode) of batches.

        The first batch contains `queue_offset`. The list is empty if the queue does not contain it.
        """
        if not self.min_queue_offset <= queue_offset < self.max_queue_offset:
            return []
        first = self._first_where(lambda unit: unit[4] + unit[5] > queue_offset)
        raw = self.files.read(first, max_units)
        raw = raw[: len(raw) - len(raw) % BATCH_UNIT.size]
        return [
            (base, offset, size, tags)
            for offset, size, tags, _, base, _, _, _ in BATCH_UNIT.iter_unpack(raw)
            if size > 0
        ]

    def find_by_time(
        self,
        timestamp_ms: int,
        falls: Falls,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> int:
        """Return the first queue offset of the first batch stored at or after a time.

        Returns the queue's end if there is no such batch; `first_late` explains `is_spent`.
        """

        def is_late(number: int, _end: int, time_ms: int) -> bool:
            unit = self._unit(number)
            return unit is not None and unit[3] >= time_ms

        files = self.files
        low = files.starts[0] if files.starts else 0
        number = first_late(low, files.end, falls, timestamp_ms, files.first_at, is_late, is_spent)
        unit = self._unit(number)
        return self.max_queue_offset if unit is None else max(unit[4], self.min_queue_offset)

    def load(self, limit: int) -> None:
        """Find the files and cut them to `limit`."""
        self.files.load(limit)
        self._settle(0)

    def cut(self, limit: int, min_offset: int = 0) -> None:
        """Drop batches whose record ends beyond `limit`; ignore those below `min_offset`."""
        self.files.cut(limit)
        self._settle(min_offset)

    def begin_again(self) -> None:
        """Drop all units: the queue has got other records since. Raises OSError."""
        self.files.clear()
        self._settle(0)

    def show_from(self, offset: int) -> None:
        """Let the queue begin with the first batch at or beyond `offset` of the log."""
        self._settle(offset)

    def ended_before(self, offset: int) -> tuple[int, bool]:
        """Return what `ConsumeQueue.ended_before` does."""
        number = self.files.first_at(offset)
        last, first = self._unit(number - 1), self._unit(number)
        if last is not None:
            return last[4] + last[5], True
        end = self.max_queue_offset if first is None else first[4]
        return end, not end

    def first_at(self, offset: int) -> int:
        """Return what `ConsumeQueue.first_at` does."""
        unit = self._unit(self.files.first_at(offset))
        return self.max_queue_offset if unit is None else unit[4]

    def last_place(self) -> int | None:
        """Return the physical offset of the last batch; None without one."""
        return None if self.last_offset < 0 else self.last_offset

    def _settle(self, min_offset: int) -> None:
        last = self._unit(self.files.end - 1)
        first = self._unit(self.files.begin_at(min_offset))
        self.last_offset = -1 if last is None else last[0]
        self.max_queue_offset = 0 if last is None else last[4] + last[5]
        self.min_queue_offset = self.max_queue_offset if first is None else first[4]

    def _first_where(self, holds: Callable[[_Unit], bool]) -> int:
        """Return the number of the first unit for which `holds`; from it on it holds for all."""
        low = self.files.starts[0] if self.files.starts else 0
        return first_where(
            low, self.files.end, lambda n: (unit := self._unit(n)) is not None and holds(unit)
        )

    def _unit(self, number: int) -> _Unit | None:
        raw = self.files.read(number, 1) if number >= 0 else b""
        if len(raw) < BATCH_UNIT.size:
            return None
        unit: _Unit = BATCH_UNIT.unpack(raw)
        return unit


log = logging.getLogger(__name__)

_UNIT_FORM = "qiq"
UNIT = struct.Struct(">" + _UNIT_FORM)
UNIT_BYTES = UNIT.size
QUEUE_OFFSET_MAX = (1 << 62) // UNIT_BYTES
_NAME_BYTES_MAX = 255
ARRAYS_FROM_UNITS = 64  # numpy is faster from this many units on
TAGGED_UNITS_MAX = 8_192  # that one pull of records with certain tags looks at; about 0.2 ms
_BLANKS_AT_ONCE = 4_096
_DELETE_STEP = 256  # queues in one step of `delete_before`
_HALF = 0xFFFFFFFF
_NumberedUnit = tuple[int, tuple[int, int, int]]  # queue offset; offset, size, tags code


class Unit(NamedTuple):
    """A record of a queue: its place in the log."""

    queue_offset: int
    offset: int
    size: int
    tags_code: int


class ConsumeQueue:
    """One queue; `min_queue_offset` is the first queue offset with a record."""

    __slots__ = ("files", "min_queue_offset", "next", "pending")

    def __init__(self, cache: FileCache, directory: str, units_per_file: int) -> None:
        self.files = UnitFiles(cache, directory, UNIT_BYTES, units_per_file)
        self.min_queue_offset = 0
        self.next = 0  # the next queue offset, pending units included
        self.pending: list[int] = []  # offset, size, tags code of each unwritten unit

    @property
    def max_queue_offset(self) -> int:
        """Return the queue offset after the last unit written."""
        return self.files.end

    def read(self, queue_offset: int, max_units: int) -> list[Unit]:
        """Return up to `max_units` units from a queue offset, without blanks.

        All of them come from one file.
        """
        raw = self.files.read(queue_offset, max_units)
        raw = raw[: len(raw) - len(raw) % UNIT_BYTES]
        return [
            Unit(queue_offset + number, offset, size, tags)
            for number, (offset, size, tags) in enumerate(UNIT.iter_unpack(raw))
            if 0 < size != BLANK_UNIT_SIZE
        ]

    def read_on(self, queue_offset: int, max_units: int) -> list[Unit]:
        """Return units as `read` does, from the first one at or beyond a queue offset.

        The list is empty only if there is none.
        """
        at, end = queue_offset, self.max_queue_offset
        count = max_units
        while at < end:
            found = self.read(at, count)
            if found:
                return found[:max_units]
            passed = len(self.files.read(at, count)) // UNIT_BYTES
            # No file has them, or retention has removed it meanwhile: the next file may.
            at = at + passed if passed else next((s for s in self.files.starts if s > at), end)
            count = max(max_units, _BLANKS_AT_ONCE)
        return []

    def next_record(self, blank: int) -> int:
        """Return the queue offset of the first record behind a blank, or the end."""
        files, at = self.files, blank
        offset, size = files.place(at)
        if not size:  # whole files of blanks are not there
            at = next((start for start in files.starts if start > at), self.max_queue_offset)
            offset, size = files.place(at)
        if size != BLANK_UNIT_SIZE:
            return at
        # A blank has the place of the record before it, plus 1.
        return max(files.first_at(offset + 1), at)

    def is_blank_from(self, queue_offset: int) -> bool:
        """Whether the queue has nothing but blanks from a queue offset on.

        A cut leaves such blanks, which stood for inner batches before the next record.
        """
        if self.pending:
            return False
        _, size = self.files.place(queue_offset)
        is_blank = size in (0, BLANK_UNIT_SIZE)
        return is_blank and self.next_record(queue_offset) >= self.max_queue_offset

    def ended_before(self, offset: int) -> tuple[int, bool]:
        """Return the queue offset of the first record at or beyond `offset` of the log, or the end.

        And whether the queue has the record before it: else others may have been between the two.
        """
        first = self.files.first_at(offset)
        _, size = self.files.place(first - 1) if first else (0, 0)
        return first, not first or size not in (0, BLANK_UNIT_SIZE)

    def first_at(self, offset: int) -> int:
        """Return the queue offset of the first record from an offset of the log on, or the end."""
        return self.files.first_at(offset)

    def last_place(self) -> int | None:
        """Return the physical offset of the last unit's record; None if it is a blank."""
        offset, size = self.files.last_place()
        return None if size in (0, BLANK_UNIT_SIZE) else offset

    def commit(self) -> None:
        """Write the pending units; raises OSError."""
        values = self.pending
        self.files.append(struct.pack(f">{'qiq' * (len(values) // 3)}", *values))
        values.clear()

    def append(self, units: memoryview) -> None:
        """Write the units of records that continue the queue; raises OSError."""
        try:
            self.files.append(units)
        finally:
            self.next = self.files.end

    def drop_from(self, queue_offset: int) -> None:
        """Drop the blanks from a queue offset on; raises OSError."""
        try:
            self.files.drop_from(queue_offset)
        finally:
            self.next = self.files.end

    def rollback(self) -> None:
        """Forget the pending units."""
        self.pending.clear()
        self.next = self.files.end

    def skip_to(self, queue_offset: int) -> None:
        """Write the pending units, then blanks up to `queue_offset`; raises OSError."""
        if self.pending:
            self.commit()
        first = not self.files.starts
        self.files.skip_to(queue_offset)
        self.next = queue_offset
        if first:
            self.min_queue_offset = queue_offset

    @property
    def last_offset(self) -> int:
        """The physical offset of the last record, pending ones included; -1 without one."""
        return self.pending[-3] if self.pending else self.files.last_offset()

    def begin_again(self) -> None:
        """Drop all units: the queue has got other records since. Raises OSError."""
        self.files.clear()
        self.settle()

    def cut(self, limit: int, min_offset: int = 0) -> None:
        """Drop units whose record ends beyond `limit`; ignore records below `min_offset`."""
        self.files.cut(limit)
        self.settle(min_offset)

    def settle(self, min_offset: int = 0) -> None:
        """Set `next` and `min_queue_offset` from the files; ignore records below `min_offset`."""
        self.pending.clear()
        self.next = self.files.end
        self.min_queue_offset = self.files.begin_at(min_offset)


def few_units(raw: bytes) -> tuple[list[int], list[int]] | None:
    """Return offsets and sizes of few whole units; None if there is none, or one has no record."""
    count = len(raw) // UNIT_BYTES
    if not 0 < count < ARRAYS_FROM_UNITS:
        return None
    values = _units_struct(count).unpack_from(raw)
    sizes = list(values[1::3])
    if min(sizes) <= 0 or max(sizes) == BLANK_UNIT_SIZE:
        return None
    return list(values[0::3]), sizes


@cache  # of less than ARRAYS_FROM_UNITS
def _units_struct(count: int) -> struct.Struct:
    """Return the form of some units that follow each other."""
    return struct.Struct(">" + _UNIT_FORM * count)


class UnitSelection:
    """The units that one pull takes: records that fit and end at or below `limit`.

    The first record may be larger than `max_bytes`. The columns `queue_offsets`, `offsets` and
    `sizes` are lists for few units and numpy arrays for many.
    """

    __slots__ = (
        *("beyond", "count", "first", "limit", "max_bytes", "max_messages"),
        *("offsets", "queue_offsets", "sizes"),
    )

    def __init__(self, max_messages: int, max_bytes: int, limit: int) -> None:
        self.max_messages = max_messages
        self.max_bytes = max_bytes  # how many more bytes may be taken
        self.limit = limit
        self.first = -1  # queue offset of the first unit seen, taken or not
        self.beyond: int | None = None  # where the first record ends, if that is beyond `limit`
        self.count = 0
        self.queue_offsets: Any = []
        self.offsets: Any = []
        self.sizes: Any = []

    def select_raw(self, raw: bytes, at: int) -> bool:
        """Take from raw units that begin at queue offset `at`; False when the pull is complete."""
        if len(raw) < ARRAYS_FROM_UNITS * UNIT_BYTES:
            return self.select_units(enumerate(UNIT.iter_unpack(raw), at))
        import numpy as np  # imported late: a node starts faster without numpy

        units = np.frombuffer(raw, np.dtype(UNIT_FIELDS))
        offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
        queue_offsets = np.arange(at, at + len(units))
        real = (sizes > 0) & (sizes != BLANK_UNIT_SIZE)
        if not real.all():
            offsets, sizes, queue_offsets = offsets[real], sizes[real], queue_offsets[real]
        if not len(sizes):
            return True
        if self.first < 0:
            self.first = int(queue_offsets[0])
        beyond = offsets > self.limit - sizes  # a sum could overflow, in a damaged unit
        readable = int(beyond.argmax()) if beyond.any() else len(sizes)
        totals = np.cumsum(sizes)
        fitting = int(np.searchsorted(totals, self.max_bytes, side="right"))
        if not self.count:
            fitting = max(fitting, 1)
            if not readable:
                self.beyond = int(offsets[0]) + int(sizes[0])
        count = min(readable, fitting, self.max_messages - self.count)
        if count:
            self.max_bytes -= int(totals[count - 1])
            self._add(queue_offsets[:count], offsets[:count], sizes[:count])
        return count == len(sizes) and self.count < self.max_messages

    def select_units(self, units: Iterable[_NumberedUnit]) -> bool:
        """Take from units in their order; False when the pull is complete."""
        left, limit = self.max_bytes, self.limit
        room = self.max_messages - self.count
        queue_offsets: list[int] = []
        offsets: list[int] = []
        sizes: list[int] = []
        for queue_offset, (offset, size, _) in units:
            if size <= 0 or size == BLANK_UNIT_SIZE:
                continue
            if self.first < 0:
                self.first = queue_offset
            if not room or offset + size > limit or (size > left and (offsets or self.count)):
                if not offsets and not self.count:
                    self.beyond = offset + size
                room = 0
                break
            room -= 1
            left -= size
            queue_offsets.append(queue_offset)
            offsets.append(offset)
            sizes.append(size)
        self.max_bytes = left
        self._add(queue_offsets, offsets, sizes)
        return room > 0

    def runs(self) -> tuple[Sequence[int], Sequence[int]]:
        """Return the starts and the ends of the log ranges that the records form.

        If the columns are numpy arrays, records that are adjacent in the log become one range.
        """
        offsets, sizes = self.offsets, self.sizes
        if isinstance(offsets, list):
            return offsets, [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        import numpy as np

        ends = offsets + sizes
        breaks = np.flatnonzero(offsets[1:] != ends[:-1])
        begins = offsets[np.concatenate(([0], breaks + 1))]
        return begins.tolist(), ends[np.concatenate((breaks, [-1]))].tolist()

    def _add(self, *columns: "list[int] | npt.NDArray[Any]") -> None:
        if not len(columns[0]):
            return
        kept = (self.queue_offsets, self.offsets, self.sizes)
        if not self.count:
            joined = columns
        elif isinstance(kept[0], list) and isinstance(columns[0], list):
            joined = tuple(a + b for a, b in zip(kept, columns, strict=True))
        else:
            import numpy as np

            joined = tuple(np.concatenate(pair) for pair in zip(kept, columns, strict=True))
        self.queue_offsets, self.offsets, self.sizes = joined
        self.count += len(columns[0])


class TaggedSelection(UnitSelection):
    """The units whose tags code is one of `codes`; up to TAGGED_UNITS_MAX units are looked at.

    A code is the hash of a tag (record/hashes.py) without its sign: the lower half of a tags code.
    """

    __slots__ = ("_codes", "_left", "following")

    def __init__(
        self, max_messages: int, max_bytes: int, limit: int, codes: frozenset[int], at: int
    ) -> None:
        super().__init__(max_messages, max_bytes, limit)
        self._codes = codes
        self._left = TAGGED_UNITS_MAX  # how many more units may be looked at
        self.following = at  # queue offset of the first unit that is not done with

    def select_raw(self, raw: bytes, at: int) -> bool:
        """Take from raw units that begin at queue offset `at`; False when the pull is complete."""
        looks = min(len(raw) // UNIT_BYTES, self._left)
        self._left -= looks
        raw = raw[: looks * UNIT_BYTES]
        found = self._few(raw) if looks < ARRAYS_FROM_UNITS else self._many(raw)
        is_whole = self._take([(at + row, offset, size) for row, offset, size in found])
        if is_whole:
            self.following = at + looks
        return is_whole and self._left > 0 and self.count < self.max_messages

    def _few(self, raw: bytes) -> list[tuple[int, int, int]]:
        """Return (row, offset, size) of the units with one of the tags, and of those too new."""
        codes, limit = self._codes, self.limit
        return [
            (row, offset, size)
            for row, (offset, size, code) in enumerate(UNIT.iter_unpack(raw))
            if 0 < size != BLANK_UNIT_SIZE and (code & _HALF in codes or offset + size > limit)
        ]

    def _many(self, raw: bytes) -> list[tuple[int, int, int]]:
        """Do the same with numpy."""
        import numpy as np  # imported late: a node starts faster without numpy

        units = np.frombuffer(raw, np.dtype(UNIT_FIELDS))
        offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
        halves = units["tags_code"].astype(np.int64) & _HALF
        wanted = np.isin(halves, np.fromiter(self._codes, np.int64, len(self._codes)))
        wanted |= offsets > self.limit - sizes
        wanted &= (sizes > 0) & (sizes != BLANK_UNIT_SIZE)
        rows = np.flatnonzero(wanted)
        return list(zip(rows.tolist(), offsets[rows].tolist(), sizes[rows].tolist(), strict=True))

    def _take(self, units: list[tuple[int, int, int]]) -> bool:
        """Take what fits; False once one does not fit, or is too new: the pull ends before it."""
        if units and self.first < 0:
            self.first = units[0][0]
        for queue_offset, offset, size in units:
            is_new = offset + size > self.limit
            if is_new or self.count == self.max_messages or (self.count and size > self.max_bytes):
                if is_new and not self.count:
                    self.beyond = offset + size
                self.following = queue_offset
                return False
            self.max_bytes -= size
            self.count += 1
            self.queue_offsets.append(queue_offset)
            self.offsets.append(offset)
            self.sizes.append(size)
        return True


def is_directory_name(topic: str) -> bool:
    """Whether a topic is a safe directory name: one component of a path, inside the store."""
    raw = topic.encode("utf-8", "surrogateescape")
    return bool(
        0 < len(raw) <= _NAME_BYTES_MAX
        and topic not in (".", "..")
        and b"/" not in raw
        and b"\0" not in raw
    )


def _queues_in(batch: Sequence[Dispatched]) -> set[tuple[str, int]]:
    """Return topic and queue id of each record of a batch."""
    if isinstance(batch, RecordColumns) and not batch.has_inner_batches:
        return {(run.topic, run.queue_id) for run in batch.queue_runs()}
    return {(record[2], record[3]) for record in batch}


class GrownQueues:
    """Which queues got records, of those that readers wait for.

    Replay's thread notes a queue after its end has moved. The API's thread watches queues, and
    takes what was noted: it looks at a queue after it has taken the note, so it misses no record.
    """

    __slots__ = ("_noted", "_watched", "cuts", "since")

    def __init__(self) -> None:
        self._watched: set[tuple[str, int]] = set()
        self._noted: set[tuple[str, int]] = set()
        self.since = 0  # what was noted lies at or beyond this offset of the log
        self.cuts = 0  # how often queues were cut, or began again

    @property
    def has_any(self) -> bool:
        """Whether `take` has something."""
        return bool(self._noted)

    def watch(self, key: tuple[str, int]) -> None:
        """Note growth of a queue (topic, queue id) from now on, whether or not it exists."""
        self._watched.add(key)

    def unwatch(self, key: tuple[str, int]) -> None:
        """Note growth of a queue no more."""
        self._watched.discard(key)

    def note(self, batch: Sequence[Dispatched]) -> None:
        """Note the queues of a batch, after it was written or has failed."""
        if not self._watched or not batch:
            return
        grown = _queues_in(batch) & self._watched
        if grown:
            first = batch[0].offset
            self.since = min(self.since, first) if self._noted else first
            self._noted |= grown

    def take(self) -> Iterator[tuple[str, int]]:
        """Yield the queues that have grown, each after its note is taken away."""
        for key in list(self._noted):
            self._noted.discard(key)
            yield key


class ConsumeQueueTable:
    """All queues of a store: a Dispatcher. Reads come from any thread."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        *,
        units_per_file: int,
        on_batch: Callable[[Sequence[Dispatched]], None] = lambda _batch: None,
    ) -> None:
        """Take the store's root directory; `load` opens the files.

        Replay's thread calls `on_batch` with each batch, before readers see its records: it may
        hide records.
        """
        self._on_batch = on_batch
        self._fs = fs
        self._root = root
        self._units = units_per_file
        self._cache = FileCache(fs)
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._batch_queues: dict[tuple[str, int], BatchConsumeQueue] = {}
        self._ids: dict[str, set[int]] = {}  # of each topic: the queues in one of the two
        # Where the records of a topic begin to show. Any thread reads it, and some change it.
        self._begins: dict[str, int] = {}
        # What `ended_before` says of the queues of these topics, the later of both kinds.
        self._ended: dict[str, dict[int, tuple[int, bool]]] = {}
        self._hidden_end = 0  # no record at or beyond this offset of the log is hidden
        self._min_offset = 0  # of the log, at the last removal of files
        self._refused: set[str] = set()
        self.grown = GrownQueues()
        self.loaded_end = 0  # what `load` returned: every record below it was in the queues
        # storeTimestamp of the last record dispatched since the queues were loaded, or cut
        self.dispatched_timestamp_ms = 0
        self.flushed_timestamp_ms = 0  # its value at the last flush, for the checkpoint

    # -- reading -----------------------------------------------------------------------------------

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the queue of single records; None if there is none."""
        return self._queues.get((topic, queue_id))

    def single(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        """Return the queue of single records; None if there is none, or one of inner batches."""
        key = topic, queue_id
        return None if key in self._batch_queues else self._queues.get(key)

    def get_batch(self, topic: str, queue_id: int) -> BatchConsumeQueue | None:
        """Return the queue of inner batches; None if there is none."""
        return self._batch_queues.get((topic, queue_id))

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return (min, max) queue offsets over both kinds of queue; None if neither exists."""
        single = self.single(topic, queue_id)
        if single is not None:
            return single.min_queue_offset, single.max_queue_offset
        found = self._kinds(topic, queue_id)
        if not found:
            return None
        high = max(queue.max_queue_offset for queue in found)
        lows = [
            one.min_queue_offset for one in found if one.min_queue_offset < one.max_queue_offset
        ]
        return min(lows, default=high), high

    def _kinds(self, topic: str, queue_id: int) -> list[ConsumeQueue | BatchConsumeQueue]:
        """Return the queue of single records and that of inner batches, as far as they exist."""
        either = self.get(topic, queue_id), self.get_batch(topic, queue_id)
        return [queue for queue in either if queue is not None]

    def read(self, topic: str, queue_id: int, queue_offset: int, max_units: int) -> list[Unit]:
        """Return units from a queue offset on; an inner batch is one unit, at its first message.

        Of a queue with both kinds they are of the kind that comes next, up to the other one.
        """
        queue, batches = self.get(topic, queue_id), self.get_batch(topic, queue_id)
        if batches is None:
            return [] if queue is None else queue.read(queue_offset, max_units)
        # Asked first: replay goes on meanwhile, and both have all units below it.
        end = max(one.max_queue_offset for one in (queue, batches) if one is not None)
        begin = max(queue_offset, batches.min_queue_offset)
        found = [Unit(*unit) for unit in batches.read(begin, max_units)]
        singles = [] if queue is None else queue.read_on(queue_offset, max_units)
        first, second = sorted((found, singles), key=lambda units: units[0][0] if units else end)
        end = min(end, second[0].queue_offset) if second else end
        return [unit for unit in first if unit.queue_offset < end]

    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return (min, max) queue offsets of each queue of each topic."""
        found = {topic: self.queues_of(topic) for topic in sorted(self._ids)}
        return {topic: queues for topic, queues in found.items() if queues}

    @property
    def topic_count(self) -> int:
        """The number of topics."""
        begins = list(self._begins)
        hidden = sum(1 for topic in begins if topic in self._ids and not self.shown(topic))
        return len(self._ids) - hidden

    def queues_of(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return (min, max) queue offsets of each queue of a topic; without looking at others.

        A queue of which all records are hidden is left out.
        """
        found = self._ranges_of(topic)
        if topic in self._begins:
            return {queue_id: one for queue_id, one in found.items() if one[0] < one[1]}
        return found

    def emptied_of(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the queues that `queues_of` leaves out, which begin and end at one offset."""
        if topic not in self._begins:
            return {}
        return {queue: one for queue, one in self._ranges_of(topic).items() if one[0] >= one[1]}

    def _ranges_of(self, topic: str) -> dict[int, tuple[int, int]]:
        ranges = ((queue_id, self.queue_range(topic, queue_id))
                  for queue_id in sorted(self._ids.get(topic, ())))  # fmt: skip
        return {queue_id: limits for queue_id, limits in ranges if limits is not None}

    def next_offsets(self) -> Iterator[QueueNext]:
        """Yield the next queue offset of each queue, also of those whose records are hidden."""
        for topic, numbers in self._ids.items():
            for queue_id in numbers:
                known = self.queue_range(topic, queue_id)
                if known is not None:
                    yield topic, queue_id, known[1]

    # -- hidden records ----------------------------------------------------------------------------

    def show_from(self, begins: Mapping[str, int]) -> None:
        """Hide the records of these topics below these offsets of the log, and no others."""
        before, self._begins = self._begins, dict(begins)
        self._hidden_end = max(begins.values(), default=0)
        for topic in {*before, *begins}:
            if before.get(topic) != begins.get(topic):
                self._ended.pop(topic, None)
                self._settle_topic(topic)

    def hide_before(self, topic: str, begin: int) -> None:
        """Hide the records of a topic below this offset of the log; others stay as they are."""
        self._begins[topic] = begin
        self._hidden_end = max(self._hidden_end, begin)
        self._settle_topic(topic)

    def begin_of(self, topic: str) -> int:
        """Return the offset of the log below which the records of a topic are hidden.

        Whoever asks after it has chosen records reads none that was hidden before one of them was
        added.
        """
        return self._begins.get(topic, 0)

    def ended(self, topic: str, log_start: int) -> dict[int, int]:
        """Return at which queue offsets the last deletion of a topic ended its queues.

        `log_start` is where the log begins. Left out are queues of which it is not known any more:
        retention may have removed later records too.
        """
        is_whole = self._begins.get(topic, 0) >= log_start
        found = dict(self._ended.get(topic, ()))
        return {queue: end for queue, (end, known) in found.items() if known or is_whole}

    def end_before(self, topic: str, queue_id: int, offset: int) -> int:
        """Return at which queue offset a queue ended before this offset of the log."""
        kinds = self._kinds(topic, queue_id)
        firsts = ((one.first_at(offset), one.max_queue_offset) for one in kinds)
        end = max((one.max_queue_offset for one in kinds), default=0)
        return min((first for first, behind in firsts if first < behind), default=end)

    def has(self, topic: str) -> bool:
        """Whether a topic has queues, perhaps without records that show."""
        return topic in self._ids

    def shown(self, topic: str) -> Collection[int]:
        """Return the numbers of a topic's queues; of a topic with hidden records, those that show
        some.
        """
        if topic in self._begins:
            return self.queues_of(topic).keys()
        return self._ids.get(topic, ())

    def shown_topics(self) -> list[str]:
        """Return the topics with a record that is not hidden."""
        return [topic for topic in list(self._ids) if self.shown(topic)]

    def _settle_topic(self, topic: str) -> None:
        for queue_id in tuple(self._ids.get(topic, ())):
            self._settle_begin(topic, queue_id)

    def _settle_begin(self, topic: str, queue_id: int) -> None:
        """Let a queue begin with its first record that is in the log and not hidden."""
        begin = self._shown_from(topic)
        queue, batches = self.get(topic, queue_id), self.get_batch(topic, queue_id)
        if queue is not None:
            queue.min_queue_offset = queue.files.begin_at(begin)
        if batches is not None:
            batches.show_from(begin)
        deleted = self._begins.get(topic)
        if deleted is not None:
            both = [one.ended_before(deleted) for one in (queue, batches) if one is not None]
            if both:
                end, known = max(both)[0], all(known for _, known in both)
                self._ended.setdefault(topic, {})[queue_id] = end, known

    def _shown_from(self, topic: str) -> int:
        """Return the offset of the log below which a topic's records are gone or hidden."""
        return max(self._min_offset, self._begins.get(topic, 0))

    def quiet_since(self, offset: int) -> Iterator[QueueNext]:
        """Yield each queue without a record at or beyond `offset`, and its next queue offset."""
        for topic, queue_id in sorted({*self._queues, *self._batch_queues}):
            queue, batches = self.get(topic, queue_id), self.get_batch(topic, queue_id)
            last = max(
                -1 if queue is None else queue.files.last_offset(),
                -1 if batches is None else batches.files.last_offset(),
            )
            known = self.queue_range(topic, queue_id)
            if last < offset and known is not None and known[1]:
                yield topic, queue_id, known[1]

    def find_by_time(
        self,
        topic: str,
        queue_id: int,
        timestamp_ms: int,
        store_time: Callable[[int], int | None],
        falls: Falls = NO_FALLS,
        is_spent: Callable[[], bool] = lambda: False,
    ) -> int | None:
        """Return the queue offset of the first record stored at or after a time.

        Returns the queue's end if there is no such record, None if there is no such queue.
        `store_time(offset)` returns a record's storeTimestamp, or None if its header is damaged;
        then the next record's counts. `falls` are where the log's store times fall. `first_late`
        explains `is_spent`.
        """
        queue, batches = self.get(topic, queue_id), self.get_batch(topic, queue_id)
        if batches is None and queue is None:
            return None
        late = []  # of each kind of queue, if it has such a record
        if batches is not None:
            at = batches.find_by_time(timestamp_ms, falls, is_spent)
            late += [at] if at < batches.max_queue_offset else []
        if queue is not None:
            at = self._find_single(queue, timestamp_ms, store_time, falls, is_spent)
            late += [at] if at < queue.max_queue_offset else []
        return min(late, default=max(one.next for one in self._kinds(topic, queue_id)))

    @staticmethod
    def _find_single(
        queue: ConsumeQueue,
        timestamp_ms: int,
        store_time: Callable[[int], int | None],
        falls: Falls,
        is_spent: Callable[[], bool],
    ) -> int:
        """Return what `find_by_time` does for a queue of single records."""

        def is_late(queue_offset: int, end: int, time_ms: int) -> bool:
            units = queue.read(queue_offset, 1)
            if not units:  # a blank: what lies behind it counts
                queue_offset = queue.next_record(queue_offset)
                if queue_offset >= end:
                    return True
                units = queue.read(queue_offset, 1)
            if not units:
                return False
            stored = store_time(units[0].offset)
            if stored is None:
                # It must not count as an old one: all before it would be stepped over.
                others = queue.read(queue_offset + 1, min(end - queue_offset - 1, _DAMAGED))
                times = (store_time(one.offset) for one in others)
                stored = next((one for one in times if one is not None), None)
            return stored is None or stored >= time_ms

        at = first_late(
            queue.min_queue_offset, queue.max_queue_offset, falls, timestamp_ms,
            queue.files.first_at, is_late, is_spent,
        )  # fmt: skip
        return at if at >= queue.max_queue_offset or queue.read(at, 1) else queue.next_record(at)

    def last_offset(self) -> int | None:
        """Return the physical offset of the last record in any queue; None if there is none."""
        places = [queue.last_place() for queue in self._queues.values()]
        places += [batches.last_place() for batches in self._batch_queues.values()]
        return max((place for place in places if place is not None), default=None)

    # -- replay ------------------------------------------------------------------------------------

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Write a batch's units, except those written already; raises OSError."""
        self._on_batch(batch)
        try:
            self._dispatch(batch)
        finally:
            if self._hidden_end and batch and batch[0].offset < self._hidden_end:
                for topic in {topic for topic, _ in _queues_in(batch)}:
                    if topic in self._begins:
                        self._settle_topic(topic)
            self.grown.note(batch)

    def _dispatch(self, batch: Sequence[Dispatched]) -> None:
        if (
            isinstance(batch, RecordColumns)
            and not batch.has_inner_batches
            and next(queue_ends_of(batch), None) is None  # else the log's order matters
        ):
            for run in batch.queue_runs():
                key = run.topic, run.queue_id
                queue = self._queues.get(key)
                if queue is None:
                    queue = self._place(batch[run.rows[0]], None)
                is_next = queue is not None and run.first == queue.next and run.is_gapless
                if queue is not None and is_next and key not in self._batch_queues:
                    queue.append(run.units)
                else:
                    self._dispatch_each(batch.pick(run))
            last_ms = batch.last_store_timestamp_ms
        else:
            self._dispatch_each(batch)
            last_ms = batch[-1].store_timestamp_ms if batch else 0
        self.dispatched_timestamp_ms = last_ms or self.dispatched_timestamp_ms

    def _dispatch_each(self, batch: Sequence[Dispatched]) -> None:
        queues, batches = self._queues, self._batch_queues
        touched: dict[int, ConsumeQueue] = {}
        try:
            for record in batch:
                offset, size, topic, queue_id, queue_offset, flags, _, tags, _ = record
                if flags & (FLAG_PREPARED | FLAG_INNER_BATCH) and self._put_special(record):
                    continue
                key = topic, queue_id
                queue = queues.get(key)
                if queue is None or queue_offset != queue.next or (batches and key in batches):
                    queue = self._place(record, queue)
                    if queue is None:
                        continue
                pending = queue.pending
                if not pending:
                    touched[id(queue)] = queue
                pending += (offset, size, tags)
                queue.next = queue_offset + 1
            for queue in touched.values():
                queue.commit()
        except BaseException:
            for queue in touched.values():
                queue.rollback()
            raise

    def _put_special(self, record: Dispatched) -> bool:
        """Handle a prepared record or an inner batch; False when it needs an ordinary unit."""
        if record.sys_flag & FLAG_PREPARED:
            stated = queue_ends_in(record.topic, record.sys_flag, record.properties)
            if stated is not None:
                self.extend(stated.queues, record.offset)
            return True
        inner = inner_batch_of(record)
        if inner is None:
            return False
        key = record.topic, record.queue_id
        queue = self._batch_queues.get(key)
        if queue is not None and record.offset <= queue.last_offset:
            return True  # as in `_place`
        singles = self._queues.get(key)
        if singles is not None and singles.pending:
            singles.commit()  # readers see both kinds in the log's order
        if self._make_way(record) and self._may_store(record):
            if queue is None:
                directory = self._directory(*key, batch=True)
                queue = BatchConsumeQueue(self._cache, directory, self._units)
                self._keep(*key, queue)
            queue.put(record, *inner)
        return True

    def _place(self, record: Dispatched, queue: ConsumeQueue | None) -> ConsumeQueue | None:
        """Return the queue, ready for the record's unit; None when no unit is to be written."""
        if queue is not None and record.offset <= queue.last_offset:
            return None  # the record has its unit already, or had it before the queue began again
        if not self._make_way(record) or not self._may_store(record):
            return None
        if queue is None:
            directory = self._directory(record.topic, record.queue_id)
            queue = ConsumeQueue(self._cache, directory, self._units)
            if record.queue_offset:
                queue.skip_to(record.queue_offset)
            self._keep(record.topic, record.queue_id, queue)
        elif record.queue_offset > queue.next:
            queue.skip_to(record.queue_offset)
        return queue

    def _make_way(self, record: Dispatched) -> bool:
        """Whether a record may have a unit: its place in the queue is free.

        If the queue begins again with it, all units of before are dropped, of both kinds: a topic
        that is made again may get the other one. A kind with later records, as of a replay that
        goes over them once more, may have begun again since. Blanks for inner batches that a cut
        has taken make way, for as many messages as before, more or less.
        """
        place, before = record.queue_offset, []
        for queue in self._kinds(record.topic, record.queue_id):
            if queue.last_offset >= record.offset:
                if queue.first_at(record.offset) <= place:
                    return False
            else:
                before.append(queue)
        taken = [queue for queue in before if queue.next > place]
        if not taken:
            return True
        if (
            (record.sys_flag & FLAG_INNER_BATCH or len(before) > 1)
            and any(queue.min_queue_offset < queue.next for queue in before)
            and len(taken) == 1
            and isinstance(taken[0], ConsumeQueue)
            and taken[0].is_blank_from(place)
        ):
            taken[0].drop_from(place)
            self._settle_begin(record.topic, record.queue_id)
            self.grown.cuts += 1
            return True
        if not self._begins_again(record, before):
            return False
        for queue in before:
            queue.begin_again()
        self.grown.cuts += 1
        return True

    def _begins_again(
        self, record: Dispatched, queues: Sequence[ConsumeQueue | BatchConsumeQueue]
    ) -> bool:
        """Whether the log gives the places of a queue again, from this record on.

        A master did that which did not know the queue's next offset. If no record of the queue is
        left in the log, this node follows: otherwise the messages would be in no queue here. It
        follows also if the queue begins at 0: so it does under a RocketMQ master that has deleted
        the topic, which is in no record, and made it again. There the earlier messages are gone.
        """
        self._settle_begin(record.topic, record.queue_id)  # retention may not have come to it yet
        name = f"queue {record.queue_id} of topic {record.topic!r:.80}"
        end = max(queue.next for queue in queues)
        begins = [one.min_queue_offset for one in queues if one.min_queue_offset < one.next]
        left = end - min(begins, default=end)
        if left and record.queue_offset:
            if name not in self._refused and len(self._refused) < 1000:
                self._refused.add(name)
                log.error(
                    "%s: the record at offset %d has queue offset %d, which an earlier record has:"
                    " no consumer of this node sees it; `hastore log dump` shows it",
                    name, record.offset, record.queue_offset,
                )  # fmt: skip
            return False
        why = (
            f"a RocketMQ broker has deleted the topic and made it again, or has lost its queues;"
            f" {left} earlier messages are in no queue any more"
            if left
            else "a master did not know the messages that retention has removed"
        )
        log.warning(
            "%s begins again at queue offset %d, and not at %d: %s",
            name, record.queue_offset, end, why,
        )  # fmt: skip
        return True

    def extend(self, queues: Iterable[QueueNext], offset: int) -> None:
        """Let queues end where the log states it at `offset`, if they end before; raises OSError.

        The records before that place were removed from the log: blanks stand for them. If a queue
        has a later record, and ends before that place, it has begun again since: replay reads the
        statement once more.
        """
        for topic, queue_id, after in queues:
            batches = self.get_batch(topic, queue_id)
            queue = self._queues.get((topic, queue_id))
            known = max(
                0 if queue is None else queue.next,
                0 if batches is None else batches.max_queue_offset,
            )
            if after <= known or not self._is_queue(topic, queue_id, after):
                continue
            last = max(
                -1 if queue is None else queue.last_offset,
                -1 if batches is None else batches.files.last_offset(),
            )
            if last > offset:
                continue
            if queue is None:
                queue = ConsumeQueue(self._cache, self._directory(topic, queue_id), self._units)
            queue.skip_to(after)
            queue.files.hold_end()
            self._keep(topic, queue_id, queue)

    def _may_store(self, record: Dispatched) -> bool:
        return self._is_queue(record.topic, record.queue_id, record.queue_offset)

    def _is_queue(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        if queue_id >= 0 and 0 <= queue_offset < QUEUE_OFFSET_MAX and is_directory_name(topic):
            return True
        if topic not in self._refused and len(self._refused) < 1000:
            self._refused.add(topic)
            log.warning(
                "no consume queue for topic %.80r queue %d queue offset %d: invalid name or number",
                topic, queue_id, queue_offset,
            )  # fmt: skip
        return False

    # -- life --------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Open all queues and cut them to `offset`.

        If `synced` is false, a power loss may have left holes, so units are read one by one.
        Returns 0 if there is no queue at all, or no folder of the usual queues: it was lost or
        removed, and without the next queue offsets the node would give queue offsets to new records
        that old ones have already.
        """
        self.reset()
        for topic, queue_id, directory in self._directories("consumequeue"):
            queue = ConsumeQueue(self._cache, directory, self._units)
            queue.files.load(offset, whole=synced)
            queue.settle()
            if queue.max_queue_offset or queue.files.starts:
                self._keep(topic, queue_id, queue)
        for topic, queue_id, directory in self._directories("batchconsumequeue"):
            batches = BatchConsumeQueue(self._cache, directory, self._units)
            batches.load(offset)
            self._keep(topic, queue_id, batches)
        has_folder = self._fs.is_dir(f"{self._root}/consumequeue")
        whole = bool(self._queues or (self._batch_queues and has_folder))
        self.loaded_end = offset if whole else 0
        return self.loaded_end

    def truncate(self, log_end: int) -> None:
        """Cut all queues to a log that ends at `log_end`."""
        for key, queue in list(self._queues.items()):
            queue.cut(log_end, self._shown_from(key[0]))
            if not queue.files.starts:
                del self._queues[key]
                self._drop(*key)
        for key, batches in self._batch_queues.items():
            batches.cut(log_end, self._shown_from(key[0]))
        self._settle_begins()
        self.dispatched_timestamp_ms = self.flushed_timestamp_ms = 0
        self.grown.cuts += 1

    def delete_before(self, min_offset: int) -> Iterator[None]:
        """Remove whole files of records below `min_offset`; raise the min queue offsets.

        Yields after some queues each: with many, all of them take long.
        """
        self._min_offset = min_offset
        # Others read meanwhile, so each queue goes to its new begin in one step: what a deletion
        # has hidden never shows.
        known: list[tuple[tuple[str, int], ConsumeQueue | BatchConsumeQueue]]
        known = [*self._queues.items(), *self._batch_queues.items()]
        for number, (key, queue) in enumerate(known, 1):
            both = self._queues.get(key), self._batch_queues.get(key)
            if any(one is queue for one in both):  # else it was forgotten meanwhile
                queue.files.delete_before(min_offset)
                self._settle_begin(*key)
            if not number % _DELETE_STEP:
                yield

    def _settle_begins(self) -> None:
        for topic in list(self._begins):
            self._settle_topic(topic)

    def flush(self) -> None:
        """Sync all files written since the last flush; raises OSError, SyncFailedError."""
        timestamp_ms = self.dispatched_timestamp_ms
        if self._batch_queues and not self._queues:
            self._fs.make_dirs(f"{self._root}/consumequeue")  # `load` takes it for lost without
        self._cache.flush()
        self.flushed_timestamp_ms = timestamp_ms

    def reset(self) -> None:
        """Forget all queues and close their files."""
        self._queues.clear()
        self._batch_queues.clear()
        self._ids.clear()
        self._begins, self._hidden_end, self._min_offset = {}, 0, 0
        self._ended.clear()
        self.dispatched_timestamp_ms = self.flushed_timestamp_ms = 0
        self._cache.close()
        self.grown.cuts += 1

    def close(self) -> None:
        """Close all files."""
        self._cache.close()

    def _keep(self, topic: str, queue_id: int, queue: ConsumeQueue | BatchConsumeQueue) -> None:
        if isinstance(queue, ConsumeQueue):
            self._queues[topic, queue_id] = queue
        else:
            self._batch_queues[topic, queue_id] = queue
        self._ids.setdefault(topic, set()).add(queue_id)

    def _drop(self, topic: str, queue_id: int) -> None:
        """Note that a queue of single records is gone."""
        if (topic, queue_id) not in self._batch_queues:
            self._ids[topic].discard(queue_id)
            if not self._ids[topic]:
                del self._ids[topic]

    def _directory(self, topic: str, queue_id: int, *, batch: bool = False) -> str:
        kind = "batchconsumequeue" if batch else "consumequeue"
        return f"{self._root}/{kind}/{topic}/{queue_id}"

    def _directories(self, kind: str) -> list[tuple[str, int, str]]:
        return [
            (topic, queue_id, f"{self._root}/{kind}/{topic}/{queue_id}")
            for topic, queue_id in queue_ids(self._fs, self._root, kind)
        ]
