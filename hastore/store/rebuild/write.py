"""The second step of a rebuild: write queues, and files of the key index, from the pieces.

Index: as every file but the last is full, the keys of each file are known by their number as soon
as the pieces are: file n has the keys from n * (entries - 1) on. A task writes some of the files.

Queues: a task writes those of one bucket. The units go through ConsumeQueueTable, as in replay. So
gaps, repeated queue offsets and invalid names have the same effect here as there. What the log does
not hold any more is taken from the store's present queues: the units below the log's first offset.
They and what the log states itself (record/queue_ends.py) keep the next queue offset of a queue
whose records retention has removed.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hastore.fs.filesystem import REAL, FileSystem, is_file_name
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.store.derived.consume_queue import BATCH_UNIT, ConsumeQueueTable
from hastore.store.derived.consume_queue import UNIT as UNIT_FORM
from hastore.store.derived.contract import Dispatched, KeyedRecords, QueueRun, RecordColumns
from hastore.store.derived.index_arrays import WholeFile
from hastore.store.derived.index_file import IndexHeader
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE, PLACE, queue_ids
from hastore.store.rebuild.extract import KEY, Array, Piece
from hastore.store.rebuild.layout import (
    BATCH_QUEUES,
    QUEUES,
    RangeResult,
    Sizes,
    attempt,
    bucket_of,
    disk_errors,
)

_FILES_PER_TASK_KEYS = 1 << 20  # small files are built several to a task, up to so many keys


@dataclass(frozen=True)
class IndexTask:
    """Consecutive files of the key index."""

    first: int  # number of the first file
    files: int
    end_key: int  # number of the last key of the last file, plus 1
    pieces: tuple[tuple[str, int, int], ...]  # path; numbers of its first key and after its last
    slots: int
    entries: int
    folder: str  # where to write; the files are named by their numbers


@dataclass(frozen=True)
class IndexResult:
    """What a task has written; `full_ms` is the end time of its last full file, 0 without one."""

    folder: str
    files: int
    keys: int
    full_ms: int


def index_tasks(
    results: Sequence[RangeResult], paths: Sequence[str], sizes: Sizes, folder: str
) -> list[IndexTask]:
    """Divide the keys of all ranges into files, and the files into tasks."""
    per_file = sizes.entries - 1
    numbered: list[tuple[str, int, int]] = []
    total = 0
    for result, path in zip(results, paths, strict=True):
        if result.keys:
            numbered.append((path, total, total + result.keys))
        total += result.keys
    files = _file_count(results, total, per_file)
    step = max(1, _FILES_PER_TASK_KEYS // per_file)
    tasks = []
    at = 0
    for first in range(0, files, step):
        count = min(step, files - first)
        # The file before tells where an empty file begins, so its last key is needed too.
        start, end = max(0, first * per_file - 1), min((first + count) * per_file, total)
        while at < len(numbered) and numbered[at][2] <= start:
            at += 1
        stop = at
        while stop < len(numbered) and numbered[stop][1] < end:
            stop += 1
        tasks.append(
            IndexTask(
                first, count, end, tuple(numbered[at:stop]), sizes.slots, sizes.entries,
                f"{folder}/index-{first:06}",
            )
        )  # fmt: skip
    return tasks


def _file_count(results: Sequence[RangeResult], keys: int, per_file: int) -> int:
    """Return how many files replay would have created."""
    if not any(result.records for result in results):
        return 0
    files = max(1, -(-keys // per_file))
    if keys == files * per_file and _record_after_keys(results):
        files += 1  # as in RocketMQ, the first record after a full file opens the next one
    return files


def _record_after_keys(results: Sequence[RangeResult]) -> bool:
    """Whether a record follows the last record that has a key."""
    for result in reversed(results):
        if result.keys:
            return result.last_record > result.last_key_record
        if result.records:
            return True
    return False


@disk_errors()
def build_index(task: IndexTask, fs: FileSystem = REAL) -> IndexResult:
    """Write the files of a task to a folder of its own. Raises StoreError."""
    task = replace(task, folder=attempt(task.folder))
    fs.make_dirs(task.folder, sync=False)
    per_file = task.entries - 1
    keys = _Keys(fs, task.pieces)
    previous = IndexHeader()
    if task.first:
        for part in keys.read(task.first * per_file - 1, task.first * per_file):
            previous = IndexHeader(
                end_timestamp_ms=int(part["stored_ms"][0]), end_offset=int(part["offset"][0])
            )
    full_ms = written = 0
    for number in range(task.first, task.first + task.files):
        file = WholeFile(fs, f"{task.folder}/{number:06}", task.slots, task.entries, previous)
        try:
            end = min((number + 1) * per_file, task.end_key)
            for part in keys.read(number * per_file, end):
                file.add(part["hash"].astype(np.int64), part["offset"], part["stored_ms"])
                written += len(part)
            file.finish()
        finally:
            file.close()
        previous = file.header
        if previous.count == task.entries:
            full_ms = previous.end_timestamp_ms
    return IndexResult(task.folder, task.files, written, full_ms)


class _Keys:
    """The keys of some pieces, by number."""

    def __init__(self, fs: FileSystem, pieces: Sequence[tuple[str, int, int]]) -> None:
        self._fs = fs
        self._pieces = pieces

    def read(self, first: int, end: int) -> Iterator[Array]:
        """Yield the keys with the numbers [first, end), in parts."""
        for path, start, stop in self._pieces:
            if start < end and stop > first:
                keys = Piece(self._fs, path).array("keys")
                assert keys.dtype == KEY
                yield keys[max(first - start, 0) : min(end, stop) - start]


_UNIT_BYTES = {QUEUES: UNIT_FORM.size, BATCH_QUEUES: BATCH_UNIT.size}
_COPY_UNITS = 1 << 12
_INNER = b"INNER_BASE\x01%d\x02INNER_NUM\x01%d\x02"


@dataclass(frozen=True)
class BucketTask:
    """The queues of a bucket."""

    bucket: int
    buckets: int
    pieces: tuple[str, ...]  # those with data for the bucket, in the log's order
    store: str | None  # whose present queues give the units below min_offset; None: nobody's
    min_offset: int  # the log's first offset
    units: int  # of a queue file
    folder: str  # where to write


@dataclass(frozen=True)
class BucketResult:
    """What a bucket's task has written."""

    folder: str
    queues: int
    batch_queues: int
    units: int  # units of records, of both kinds of queue
    kept: int  # queues that begin with units that the log does not hold any more
    refused: tuple[str, ...]  # queues whose present units contradict the log


@disk_errors()
def build_bucket(task: BucketTask, fs: FileSystem = REAL) -> BucketResult:
    """Write the queues of a bucket to a folder of its own. Raises StoreError."""
    task = replace(task, folder=attempt(task.folder))
    fs.make_dirs(task.folder, sync=False)
    pieces = [Piece(fs, path) for path in task.pieces]
    kept, refused = 0, []
    if task.store is not None and task.min_offset > 0:
        firsts = _first_queue_offsets(pieces, task.bucket)
        for kind, topic, queue_id in _present(fs, task):
            outcome = _keep(fs, task, kind, topic, queue_id, firsts.get((kind, topic, queue_id)))
            kept += outcome is True
            if outcome is None:
                refused.append(f"{topic}/{queue_id}")
    table = ConsumeQueueTable(fs, task.folder, units_per_file=task.units)
    table.load(task.min_offset, False)
    units = 0
    try:
        for piece in pieces:
            units += _feed(table, piece, task.bucket)
    finally:
        table.close()
    counts = [
        sum(len(fs.list_dir(f"{task.folder}/{kind}/{topic}")) for topic in fs.list_dir(folder))
        for kind in (QUEUES, BATCH_QUEUES)
        for folder in (f"{task.folder}/{kind}",)
    ]
    return BucketResult(task.folder, counts[0], counts[1], units, kept, tuple(refused))


# -- from the pieces -------------------------------------------------------------------------------


def _feed(table: ConsumeQueueTable, piece: Piece, bucket: int) -> int:
    """Hand a piece's units of a bucket to the queues; return their number."""
    queues, topics, units = piece.array("queues"), piece.topics, piece.array("units")
    total = 0
    stated: dict[int, list[tuple[int, int]]] = {}  # by queue: where, and the next queue offset
    for queue, offset, after in piece.of_bucket("ends", bucket).tolist():
        stated.setdefault(queue, []).append((offset, after))

    def extend(queue: int, before: int) -> None:
        """Let a queue end where the log states it before an offset."""
        ends = stated.get(queue, [])
        topic_number, queue_id = queues[queue].tolist()
        while ends and ends[0][0] < before:
            offset, after = ends.pop(0)
            write_batches(queue, offset)
            table.extend([(topics[topic_number], queue_id, after)], offset)

    inner: dict[int, deque[Dispatched]] = {}  # by queue: inner batches that are not written yet
    for queue, batch in _inner_batches(piece, piece.of_bucket("batches", bucket)):
        inner.setdefault(queue, deque()).append(batch)
    total += sum(map(len, inner.values()))

    def write_batches(queue: int, before: int) -> None:
        """Write a queue's inner batches before an offset: the log's order matters."""
        left, due = inner.get(queue), list[Dispatched]()
        while left and left[0].offset < before:
            due.append(left.popleft())
        if due:
            table.dispatch(due)

    for queue, first, start, count in piece.of_bucket("segments", bucket).tolist():
        topic_number, queue_id = queues[queue].tolist()
        topic = topics[topic_number]
        extend(queue, int(units[start]["offset"]))
        write_batches(queue, int(units[start]["offset"]))
        known = table.get(topic, queue_id)
        # The first unit alone creates the queue, or shows that units are missing before it.
        cuts = [0, 1, count] if known is None or known.next != first else [0, count]
        for begin, end in zip(cuts, cuts[1:], strict=False):
            if begin < end:
                part = units[start + begin : start + end]
                table.dispatch(_Segment(topic, queue_id, first + begin, part))
        total += count
    for queue in stated:
        extend(queue, 1 << 62)
    for queue in inner:
        write_batches(queue, 1 << 62)
    return total


def _inner_batches(piece: Piece, batches: Array) -> Iterator[tuple[int, Dispatched]]:
    """Yield the number of its queue and the record of each inner batch, in the log's order."""
    queues = piece.array("queues")
    for queue, queue_offset, offset, size, tags, stored_ms, base, count in batches.tolist():
        topic, queue_id = queues[queue].tolist()
        yield queue, Dispatched(
            offset, size, piece.topics[topic], queue_id, queue_offset, FLAG_INNER_BATCH,
            stored_ms, tags, _INNER % (base, count),
        )  # fmt: skip


class _Segment(RecordColumns):
    """Consecutive units of one queue, as ConsumeQueueTable takes them from replay."""

    has_inner_batches = False
    last_store_timestamp_ms = 0  # only the checkpoint of a running store needs it

    def __init__(self, topic: str, queue_id: int, first: int, units: Array) -> None:
        self._topic, self._queue_id, self._first = topic, queue_id, first
        self._units = units
        self.start_offset = int(units["offset"][0])
        self.last_offset = int(units["offset"][-1])
        self.end_offset = self.last_offset + int(units["size"][-1])

    def __len__(self) -> int:
        return len(self._units)

    def record(self, row: int) -> Dispatched:
        """Return a record without its flags, time and properties, which queues do not need."""
        offset, size, tags = self._units[row].tolist()
        return Dispatched(
            offset, size, self._topic, self._queue_id, self._first + row, 0, 0, tags, b""
        )

    def queue_runs(self) -> list[QueueRun]:
        """Return the segment as the batch's only run."""
        count = len(self._units)
        data = np.ascontiguousarray(self._units).view(np.uint8).data
        return [
            QueueRun(
                self._topic, self._queue_id, self._first, self._first + count, data, True,
                np.arange(count),
            )
        ]  # fmt: skip

    def producer_runs(self) -> list[None]:  # type: ignore[override]
        """Return nothing: a segment knows no producers."""
        return []

    def rolled_back(self) -> list[Dispatched]:
        """Return nothing: a segment has only records of its queue."""
        return []

    def keyed(self) -> KeyedRecords | None:
        """Return nothing: a segment knows no keys."""
        return None


# -- from the present queues -----------------------------------------------------------------------


def _first_queue_offsets(pieces: Sequence[Piece], bucket: int) -> dict[tuple[str, str, int], int]:
    """Return the first queue offset that the log holds of each queue, by kind of queue."""
    found: dict[tuple[str, str, int], int] = {}
    for piece in pieces:
        queues = piece.array("queues")
        segments = piece.of_bucket("segments", bucket)
        batches = piece.of_bucket("batches", bucket)
        for kind, rows, field in ((QUEUES, segments, "first"), (BATCH_QUEUES, batches, "base")):
            pairs = zip(rows["queue"].tolist(), rows[field].tolist(), strict=True)
            for queue, first in pairs:
                topic, queue_id = queues[queue].tolist()
                found.setdefault((kind, piece.topics[topic], queue_id), first)
    return found


def _present(fs: FileSystem, task: BucketTask) -> Iterator[tuple[str, str, int]]:
    """Yield the queues of the bucket that the store has now: kind, topic, queue id."""
    assert task.store is not None
    for kind in (QUEUES, BATCH_QUEUES):
        for topic, queue_id in queue_ids(fs, task.store, kind):
            if bucket_of(topic, queue_id, task.buckets) == task.bucket:
                yield kind, topic, queue_id


def _keep(
    fs: FileSystem, task: BucketTask, kind: str, topic: str, queue_id: int, first: int | None
) -> bool | None:
    """Copy the leading units of a queue whose records lie before the log.

    `first` is the first queue offset in the log. Returns whether there are such units; None if they
    reach beyond `first`, so that they contradict the log: then nothing is copied.
    """
    size = _UNIT_BYTES[kind]
    source = f"{task.store}/{kind}/{topic}/{queue_id}"
    target = f"{task.folder}/{kind}/{topic}/{queue_id}"
    end, last = None, b""
    for name in filter(is_file_name, fs.list_dir(source)):
        copied, unit, more = _copy_units(fs, f"{source}/{name}", f"{target}/{name}", size, task)
        if copied:
            end, last = int(name) // size + copied, unit
        if not more:
            break
    if end is None:
        return False
    if kind == BATCH_QUEUES:
        *_, base, count, _, _ = BATCH_UNIT.unpack(last)
        end = base + count
    if first is not None and end > first:
        fs.remove_tree(target)
        return None
    return True


def _copy_units(
    fs: FileSystem, source: str, target: str, size: int, task: BucketTask
) -> tuple[int, bytes, bool]:
    """Copy a file's leading units of records that lie before the log.

    Returns their number, the last of them, and whether the file has no other units.
    """
    origin = fs.open(source, writable=False)
    copy = None
    count, last = 0, b""
    try:
        while True:
            raw = origin.pread(_COPY_UNITS * size, count * size)
            keep = 0
            for at in range(0, len(raw) - size + 1, size):
                offset, length = PLACE.unpack_from(raw, at)
                blank = length == BLANK_UNIT_SIZE and 0 <= offset <= task.min_offset
                if not blank and not (length > 0 and 0 <= offset <= task.min_offset - length):
                    break
                keep += 1
            if keep:
                if copy is None:
                    fs.make_dirs(target.rpartition("/")[0], sync=False)
                    copy = fs.open(target, create=True)
                copy.pwrite(raw[: keep * size], count * size)
                last = raw[(keep - 1) * size : keep * size]
                count += keep
            if keep < _COPY_UNITS:
                break
        if copy is not None:
            copy.truncate(origin.size)
    finally:
        origin.close()
        if copy is not None:
            copy.close()
    return count, last, count == origin.size // size
