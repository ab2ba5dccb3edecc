"""The first step of a rebuild: read the records of one range of the log, and write its piece.

A piece: what the records of one range contribute to queues and key index, as columns in a file.

    the arrays, each at a multiple of 8 bytes   JSON   position of the JSON (8)   magic (8)

Queues are ordered by bucket, so that a task of the second step reads one part of each array. A
segment is a run of units whose queue offsets are consecutive; its units are stored as the consume
queue stores them. The file is written under another name and renamed, so it is whole if it exists,
unless the machine lost power.
"""

import contextlib
import json
import mmap
import uuid
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from hastore.errors import StoreError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.record.hashes import KeyHasher
from hastore.record.layout import (
    BLANK_MAGIC,
    FLAG_PREPARED,
    FLAG_ROLLBACK,
    V1_MAGIC,
    V2_MAGIC,
)
from hastore.record.log_format import ANY_ENTRIES, ENTRY_BLANK_MAGIC, PLAIN, LogFormat
from hastore.record.properties import keys_of
from hastore.store.derived.consume_queue import UNIT as UNIT_FORM
from hastore.store.derived.contract import (
    UNIT_FIELDS,
    Dispatched,
    RecordColumns,
    inner_batch_of,
    queue_ends_of,
)
from hastore.store.derived.scalar_walk import ScalarWalker, Stop
from hastore.store.derived.vector_walk import VectorWalker
from hastore.store.rebuild.layout import RangeResult, RangeTask, bucket_of, disk_errors

Array = npt.NDArray[Any]

UNIT = np.dtype(UNIT_FIELDS)
QUEUE = np.dtype([("topic", "<i4"), ("queue_id", "<i4")])
SEGMENT = np.dtype([("queue", "<i4"), ("first", "<i8"), ("unit", "<i8"), ("count", "<i8")])
BATCH = np.dtype(
    [
        ("queue", "<i4"), ("queue_offset", "<i8"), ("offset", "<i8"), ("size", "<i4"),
        ("tags_code", "<i8"), ("stored_ms", "<i8"), ("base", "<i8"), ("count", "<i4"),
    ]
)  # fmt: skip
# The ends of queues as the log states them, and where.
END = np.dtype([("queue", "<i4"), ("offset", "<i8"), ("next", "<i8")])
KEY = np.dtype([("hash", "<i4"), ("offset", "<i8"), ("stored_ms", "<i8")])
DTYPES = {
    "queues": QUEUE,
    "segments": SEGMENT,
    "units": UNIT,
    "batches": BATCH,
    "ends": END,
    "keys": KEY,
    "segment_ends": np.dtype("<i8"),  # for each bucket, after its last segment
    "batch_ends": np.dtype("<i8"),  # for each bucket, after its last batch
    "end_ends": np.dtype("<i8"),  # for each bucket, after its last row of "ends"
}
_ENDS_OF = {"segments": "segment_ends", "batches": "batch_ends", "ends": "end_ends"}
_MAGIC = b"HSPIECE2"
_TAIL_BYTES = 16


def write_piece(
    fs: FileSystem,
    path: str,
    result: RangeResult,
    topics: Sequence[str],
    arrays: dict[str, Sequence[Array]],
) -> None:
    """Write a piece; each array is given in parts. Raises OSError, and then leaves no file."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    file = fs.open(temporary, create=True)
    try:
        places: dict[str, tuple[int, int]] = {}
        at = 0
        for name, parts in arrays.items():
            start = at
            for part in parts:
                if len(part):
                    data = np.ascontiguousarray(part, dtype=DTYPES[name])
                    file.pwrite(data.view(np.uint8).reshape(-1).data, at)
                    at += data.nbytes
            places[name] = start, (at - start) // DTYPES[name].itemsize
            at += -at % 8
        head = {"result": asdict(result), "topics": list(topics), "arrays": places}
        file.pwrite(json.dumps(head).encode() + at.to_bytes(8) + _MAGIC, at)
        file.close()
        fs.rename(temporary, path)
    except BaseException:
        file.close()
        if fs.exists(temporary):
            fs.remove(temporary)
        raise


class Piece:
    """A piece that is open for reading; its arrays are views of the mapped file."""

    def __init__(self, fs: FileSystem, path: str) -> None:
        """Open it; raises StoreError if it is damaged."""
        with contextlib.closing(fs.open(path, writable=False)) as file:
            self._map: mmap.mmap | None = file.map() if file.size > _TAIL_BYTES else None
        if self._map is None or self._map[-len(_MAGIC) :] != _MAGIC:
            raise StoreError(f"{path} is damaged; remove the folder that holds pieces/")
        at = int.from_bytes(self._map[-_TAIL_BYTES : -len(_MAGIC)])
        head = json.loads(self._map[at:-_TAIL_BYTES])
        self.topics: list[str] = head["topics"]
        fields = head["result"]
        self.result = RangeResult(**{**fields, "buckets": tuple(fields["buckets"])})
        self._places: dict[str, tuple[int, int]] = head["arrays"]

    def array(self, name: str) -> Array:
        """Return one of the arrays; drop it before the piece goes."""
        position, count = self._places[name]
        if not count:
            return np.empty(0, DTYPES[name])
        assert self._map is not None
        return np.frombuffer(self._map, DTYPES[name], count, position)

    def of_bucket(self, name: str, bucket: int) -> Array:
        """Return a bucket's part of "segments", "batches" or "ends"."""
        ends = self.array(_ENDS_OF[name])
        return self.array(name)[int(ends[bucket - 1]) if bucket else 0 : int(ends[bucket])]


_VIEW_BYTES = 1 << 20
_SEARCH_BYTES = 1 << 20
_MAGIC_AHEAD = 64  # an item's magic ends within so many bytes, also behind the header of an entry
_RECORDS = tuple(magic.to_bytes(4) for magic in (V1_MAGIC, V2_MAGIC))


@disk_errors()
def extract_range(task: RangeTask, fs: FileSystem = REAL) -> RangeResult:
    """Read a range, and write its piece if it has records.

    Raises StoreError if the disk fails; damage is in the result.
    """
    with contextlib.closing(fs.open(task.path, writable=False)) as file:
        mapped = file.map()
    with memoryview(mapped) as view:
        reading = _Reading(task)
        result = reading.read_range(view, mapped)
    if result.first is not None:
        reading.write(fs, result)
    return result


class _UnitsOfQueue:
    """The units of one queue in the log's order."""

    __slots__ = ("next", "segments", "units")

    def __init__(self) -> None:
        self.next = -1
        self.segments: list[tuple[int, int]] = []  # first queue offset; number of the first unit
        self.units = bytearray()

    def add(self, first: int, units: bytes | memoryview) -> None:
        if first != self.next:
            self.segments.append((first, len(self.units) // UNIT.itemsize))
        self.units += units
        self.next = first + len(units) // UNIT.itemsize


class _Reading:
    def __init__(self, task: RangeTask) -> None:
        self._task = task
        self._queues: dict[tuple[str, int], _UnitsOfQueue] = {}
        self._batches: dict[tuple[str, int], list[tuple[int, ...]]] = {}
        self._ends: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._keys: list[Array] = []
        self._hasher = KeyHasher()
        self._records = 0
        self._last, self._last_ms = -1, 0

    def read_range(self, view: memoryview, mapped: mmap.mmap) -> RangeResult:
        """Walk the records that begin in the range."""
        task = self._task
        form: LogFormat = ANY_ENTRIES if task.entries else PLAIN
        walker = VectorWalker(ScalarWalker(form, task.delays_ms))
        base, size = task.file_start, len(view)
        limit, end = min(task.limit - base, size), min(task.end, task.limit) - base
        first = at = _find_first(form, view, mapped, task, min(end, limit))
        is_whole = True
        room = _VIEW_BYTES
        while at is not None and at < end:
            # The view ends with the range. A record across the end is then read alone, because
            # the walk says how many bytes it needs.
            room = max(room, min(_VIEW_BYTES, end - at))
            with view[at : min(at + room, limit)] as part:
                walk = walker.walk(part, base + at, size - at)
            if walk.batch:
                self._add_batch(walk.batch)
            at += walk.consumed
            room = 0
            if walk.stop is Stop.BLANK:
                at = size
            elif walk.stop is Stop.BAD:
                is_whole = False
                break
            elif at < end:
                if at + walk.wanted > limit:
                    # True if the limit lies inside a record.
                    is_whole = limit < size and form.may_begin(view, at, limit, base + at)
                    break
                room = walk.wanted
        used = {bucket_of(*queue, task.buckets) for queue in self._names()}
        return RangeResult(
            start=task.start,
            first=None if first is None else base + first,
            end=task.start if at is None else base + at,
            is_whole=is_whole,
            records=self._records,
            keys=sum(map(len, self._keys)),
            last_record=self._last,
            last_key_record=int(self._keys[-1]["offset"][-1]) if self._keys else -1,
            last_store_ms=self._last_ms,
            buckets=tuple(sorted(used)),
        )

    def write(self, fs: FileSystem, result: RangeResult) -> None:
        """Write the piece: queues ordered by bucket."""
        buckets = self._task.buckets
        names = sorted(
            self._names(),
            key=lambda name: (bucket_of(name[0], name[1], buckets), name),
        )
        topics: dict[str, int] = {}
        queues = np.empty(len(names), QUEUE)
        segments: list[tuple[int, int, int, int]] = []
        units: list[Array] = []
        batches: list[tuple[int, ...]] = []
        stated: list[tuple[int, int, int]] = []
        segment_numbers: list[int] = []  # the bucket of each segment
        batch_numbers: list[int] = []
        end_numbers: list[int] = []
        written = 0
        for number, (topic, queue_id) in enumerate(names):
            queues[number] = topics.setdefault(topic, len(topics)), queue_id
            bucket = bucket_of(topic, queue_id, buckets)
            queue = self._queues.get((topic, queue_id))
            if queue is not None:
                count = len(queue.units) // UNIT.itemsize
                ends = [*(start for _, start in queue.segments[1:]), count]
                for (first, start), end in zip(queue.segments, ends, strict=True):
                    segments.append((number, first, written + start, end - start))
                    segment_numbers.append(bucket)
                units.append(np.frombuffer(queue.units, UNIT))
                written += count
            for batch in self._batches.get((topic, queue_id), ()):
                batches.append((number, *batch))
                batch_numbers.append(bucket)
            for where, after in self._ends.get((topic, queue_id), ()):
                stated.append((number, where, after))
                end_numbers.append(bucket)
        write_piece(
            fs,
            self._task.piece,
            result,
            list(topics),
            {
                "queues": [queues],
                "segments": [np.array(segments, SEGMENT)],
                "units": units,
                "batches": [np.array(batches, BATCH)],
                "ends": [np.array(stated, END)],
                "keys": self._keys,
                "segment_ends": [_ends(segment_numbers, buckets)],
                "batch_ends": [_ends(batch_numbers, buckets)],
                "end_ends": [_ends(end_numbers, buckets)],
            },
        )

    def _add_batch(self, batch: Sequence[Dispatched]) -> None:
        self._records += len(batch)
        for record, stated in queue_ends_of(batch):
            for topic, queue_id, after in stated.queues:
                self._ends.setdefault((topic, queue_id), []).append((record.offset, after))
        if isinstance(batch, RecordColumns):
            self._last, self._last_ms = batch.last_offset, batch.last_store_timestamp_ms
            keys = batch.keyed() if self._task.keys else None
            if keys is not None:
                rows = np.empty(len(keys.hashes), KEY)
                rows["hash"], rows["offset"] = keys.hashes, keys.offsets
                rows["stored_ms"] = keys.stored_ms
                self._keys.append(rows)
            if not batch.has_inner_batches:
                for run in batch.queue_runs():
                    if run.is_gapless:
                        self._queue(run.topic, run.queue_id).add(run.first, run.units)
                    else:
                        self._add_units(batch.pick(run))
                return
        else:
            self._last, self._last_ms = batch[-1].offset, batch[-1].store_timestamp_ms
            if self._task.keys:
                self._add_keys(batch)
        self._add_units(batch)

    def _add_units(self, batch: Sequence[Dispatched]) -> None:
        for record in batch:
            offset, size, topic, queue_id, queue_offset, flags, stored_ms, tags, _ = record
            if flags & FLAG_PREPARED:
                continue
            inner = inner_batch_of(record)
            if inner is not None:
                row = queue_offset, offset, size, tags, stored_ms, *inner
                self._batches.setdefault((topic, queue_id), []).append(row)
                if (queue := self._queues.get((topic, queue_id))) is not None:
                    queue.next = -1  # another segment follows: the log's order matters
            else:
                self._queue(topic, queue_id).add(queue_offset, UNIT_FORM.pack(offset, size, tags))

    def _add_keys(self, batch: Sequence[Dispatched]) -> None:
        rows = [
            (self._hasher.key_hash(record.topic, key), record.offset, record.store_timestamp_ms)
            for record in batch
            if record.sys_flag & FLAG_ROLLBACK != FLAG_ROLLBACK
            for key in keys_of(record.properties)
        ]
        if rows:
            self._keys.append(np.array(rows, KEY))

    def _names(self) -> set[tuple[str, int]]:
        return {*self._queues, *self._batches, *self._ends}

    def _queue(self, topic: str, queue_id: int) -> _UnitsOfQueue:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            queue = self._queues[topic, queue_id] = _UnitsOfQueue()
        return queue


def _ends(numbers: list[int], buckets: int) -> Array:
    """Return, for each bucket, how many of the ascending bucket numbers lie up to it."""
    return np.array([bisect_right(numbers, bucket) for bucket in range(buckets)], np.int64)


def _find_first(
    form: LogFormat, view: memoryview, mapped: mmap.mmap, task: RangeTask, end: int
) -> int | None:
    """Return where the first record, or the file's blank, begins in the range; None without one.

    Bytes inside a body can look like a record. The caller notices, because the range before then
    ends elsewhere.
    """
    at = task.start - task.file_start
    if task.exact:
        return at if at < end else None
    size = len(view)
    while at < end:
        stop = min(at + _SEARCH_BYTES, end)
        # The rest of the last file is preallocated: to see that it is zeros takes a fifteenth of
        # the time of a search for three magics.
        if not np.frombuffer(view[at : stop + _MAGIC_AHEAD], np.uint8).any():
            at = stop
            continue
        found = [
            place
            for place in _places(form, mapped, at, stop)
            if form.check_item(view, place, size, task.file_start + place)
            or form.check_blank(view, place, size)
        ]
        if found:
            return found[0]
        at = stop
    return None


def _places(form: LogFormat, mapped: mmap.mmap, start: int, stop: int) -> list[int]:
    """Return the places in [start, stop) that have a magic where an item or a blank has it."""
    blank, blank_at = BLANK_MAGIC, 4
    if form.lead:
        blank, blank_at = ENTRY_BLANK_MAGIC, 0
    wanted = [(magic, form.lead + 4) for magic in _RECORDS] + [(blank.to_bytes(4), blank_at)]
    found: list[int] = []
    for magic, ahead in wanted:
        at = mapped.find(magic, start + ahead, stop + ahead + len(magic) - 1)
        while at >= 0:
            found.append(at - ahead)
            at = mapped.find(magic, at + 1, stop + ahead + len(magic) - 1)
    return sorted(found)
