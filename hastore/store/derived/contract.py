"""The contract between replay and the parts that are derived from the log.

Replay reads a `ReplayableLog` and hands batches of `Dispatched` records to each `Dispatcher`:
consume queues, key index, deduplication window, queue offsets. A large batch is a `RecordColumns`,
so a dispatcher may read its columns instead of its single records. This module imports neither
numpy nor replay, so that every side of the contract can import it.
"""

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, overload

from hastore.record.delays import MARK_BYTES
from hastore.record.layout import FLAG_INNER_BATCH, FLAG_PREPARED, FLAG_ROLLBACK
from hastore.record.properties import find_property
from hastore.record.queue_ends import QueueEnds, queue_ends_in
from hastore.record.transactions import ASIDE_TOPIC, FLAG_COMMIT, HALF_TOPIC, OP_TOPIC

# Records that transactions are derived from, with those that have the commit bit; it is in the
# sysFlag of the records of HASTORE_CHECKS, too.
TRANSACTION_TOPICS = frozenset({HALF_TOPIC, OP_TOPIC, ASIDE_TOPIC})


class Dispatched(NamedTuple):
    """One record as replay hands it to dispatchers.

    Dispatchers unpack the tuple in one step, so the order of the fields is part of the contract.
    """

    offset: int  # physical, of the record's first byte
    size: int
    topic: str  # bytes that are not UTF-8 are decoded as surrogates
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp_ms: int
    tags_code: int  # as the consume queue stores it
    properties: bytes  # raw

    @property
    def end_offset(self) -> int:
        """Return the physical offset just after the record."""
        return self.offset + self.size

    @property
    def takes_unit(self) -> bool:
        """Whether the record has a queue offset; prepared and rollback records have none."""
        return not self.sys_flag & FLAG_PREPARED


def is_of_transaction(record: Dispatched) -> bool:
    """Whether a record is a half message, or tells what has become of some."""
    # A tuple's field by its number: this looks at every record of a small batch.
    return bool(record[5] & FLAG_COMMIT) or record[2] in TRANSACTION_TOPICS


def number_of_keys(batch: Sequence[Dispatched]) -> int:
    """Return how many keys the records of a batch have, or a little more."""
    if isinstance(batch, RecordColumns):
        return batch.number_of_keys()
    return sum([most_keys(record[8]) for record in batch])


def most_keys(properties: bytes) -> int:
    """Return how many keys a record has, or more; found without reading them."""
    return 1 + properties.count(b" ") if b"KEY" in properties else 0


def inner_batch_of(record: Dispatched) -> tuple[int, int] | None:
    """Return (INNER_BASE, INNER_NUM) of an inner batch; None for any other record."""
    if not record.sys_flag & FLAG_INNER_BATCH:
        return None
    base = find_property(record.properties, b"INNER_BASE")
    count = find_property(record.properties, b"INNER_NUM")
    if base is None or count is None or not base.isdigit() or not count.isdigit():
        return None
    if len(base) > 18 or len(count) > 5 or not 0 < int(count) < 1 << 15:
        return None
    return int(base), int(count)


def queue_ends_of(batch: Sequence[Dispatched]) -> Iterator[tuple[Dispatched, QueueEnds]]:
    """Yield the records of a batch that state the ends of queues, with what they state."""
    # A tuple's field by its number: this looks at every record of a small batch.
    rolled_back = (
        batch.rolled_back()
        if isinstance(batch, RecordColumns)
        else [record for record in batch if record[5] & FLAG_ROLLBACK == FLAG_ROLLBACK]
    )
    for record in rolled_back:
        found = queue_ends_in(record.topic, record.sys_flag, record.properties)
        if found is not None:
            yield record, found


# The fields of a consume queue's unit, as numpy names them.
UNIT_FIELDS = [("offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")]


class QueueRun(NamedTuple):
    """The records of a batch that belong to one queue, in the log's order."""

    topic: str
    queue_id: int
    first: int  # queue offset of the first record
    next: int  # the records' greatest queue offset, plus 1
    units: memoryview  # the records' units, as the consume queue stores them
    is_gapless: bool  # each queue offset is the previous one + 1
    rows: Any  # the records' numbers in the batch, as an array


class ProducerRun(NamedTuple):
    """The records of a batch by one producer, in the log's order."""

    producer: bytes
    sequences: "array[int]"
    offsets: "array[int]"


class KeyedRecords(NamedTuple):
    """The keys of a batch in the log's order: int64 arrays of equal length, a row for each key."""

    hashes: Any
    offsets: Any
    stored_ms: Any


REPEATED_MS = 10_000  # in the log a store time is at most so far below an earlier one, or it falls


class TimeWindow(NamedTuple):
    """The time in which the records that a search wants were stored, and where such records lie.

    The log consists of runs, between which store times fall because a clock was set back. In a run
    they rise, except that a record may be stored up to `slack_ms` before an earlier one.
    """

    begin_ms: int
    end_ms: int  # included
    floor: int  # offset: no record below it was stored at `begin_ms` or later, or is in the log
    run_end: int  # offset: where the run ends that has `floor`
    slack_ms: int
    falls: tuple[int, ...]  # the offsets at which store times fall, ascending
    end: int  # offset: of the records from there on it is not known where their times fall

    def is_over(self, offset: int, latest_ms: int) -> bool:
        """Whether all records before this one, stored by `latest_ms`, lie before the window."""
        early = offset < self.settled_end and latest_ms + self.slack_ms < self.begin_ms
        return offset < self.floor or early

    @property
    def settled_end(self) -> int:
        """Below this offset a record from before the window has only such records before it."""
        return min(self.run_end, self.end)

    def in_one_run(self, first: int, last: int) -> bool:
        """Whether it is known that no store time falls between the records at two offsets."""
        if first < self.floor or last >= self.end:  # where times fell below `floor` is forgotten
            return False
        return bisect_right(self.falls, first) == bisect_right(self.falls, last)


def time_window(
    begin_ms: int, end_ms: int, falls: Sequence[tuple[int, int]], min_offset: int, end_offset: int
) -> TimeWindow:
    """Return where records stored in [begin_ms, end_ms] lie in a log that begins at `min_offset`.

    `falls` are where its store times fall below `end_offset`: the offset of a record, and the
    greatest time before it.
    """
    start, run_end = 0, 2**63 - 1
    for offset, before_ms in falls:
        if before_ms >= begin_ms and offset > min_offset:
            run_end = offset
            break
        start = offset
    places = tuple(offset for offset, _ in falls)
    floor = max(start, min_offset)
    return TimeWindow(begin_ms, end_ms, floor, run_end, REPEATED_MS, places, end_offset)


class RecordColumns(Sequence[Dispatched]):
    """A batch of whole records as columns; as a sequence it yields the records one by one."""

    start_offset: int  # physical, of the first record
    last_offset: int  # physical, of the last record
    end_offset: int  # just after the last record
    last_store_timestamp_ms: int  # of the last record
    has_inner_batches: bool  # if true, the columns are incomplete: take the records one by one

    @abstractmethod
    def queue_runs(self) -> Sequence[QueueRun]:
        """Return the records by topic and queue, without prepared and rollback records."""
        ...

    @abstractmethod
    def producer_runs(self) -> Sequence[ProducerRun]:
        """Return the records that have a producer and a sequence number, by producer.

        Producers are ordered by their last record, so the most recent producer comes last.
        """
        ...

    def rises_from(self, top_ms: int, slack_ms: int) -> int | None:
        """Return the greatest store time, at least `top_ms`.

        Returns None if a record may be more than `slack_ms` below that, or below an earlier one.
        """
        del top_ms, slack_ms
        return None

    @abstractmethod
    def rolled_back(self) -> Sequence[Dispatched]:
        """Return the rollback records one by one; some of them state the ends of queues."""
        ...

    @abstractmethod
    def keyed(self) -> KeyedRecords | None:
        """Return the keys of all records except rollback records; None if there are none."""
        ...

    def has_topic(self, topic: str) -> bool:
        """Whether a record has this topic."""
        return any(run.topic == topic for run in self.queue_runs())

    def deliveries(self) -> Sequence[Dispatched]:
        """Return the records that deliver a delayed message, one by one."""
        return [record for record in self if MARK_BYTES in record.properties]

    def of_transactions(self) -> Sequence[Dispatched]:
        """Return the half messages and what has become of some, one by one."""
        return [record for record in self if is_of_transaction(record)]

    def number_of_keys(self) -> int:
        """Return how many keys the records have, or a little more."""
        return sum([most_keys(record.properties) for record in self])

    @abstractmethod
    def record(self, row: int) -> Dispatched:
        """Return one record by its number, from 0 on."""
        ...

    def pick(self, run: QueueRun) -> list[Dispatched]:
        """Return a run's records one by one."""
        return [self.record(row) for row in run.rows.tolist()]

    def __iter__(self) -> Iterator[Dispatched]:
        return map(self.record, range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Dispatched: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Dispatched]: ...
    def __getitem__(self, index: int | slice) -> Dispatched | Sequence[Dispatched]:
        rows = range(len(self))[index]
        return self.record(rows) if isinstance(rows, int) else [self.record(row) for row in rows]


class LoadedQueues(Protocol):
    """The part of a ConsumeQueueTable that the table of next queue offsets starts from."""

    loaded_end: int  # every record below it was in the queues when they were loaded

    def next_offsets(self) -> Iterator[tuple[str, int, int]]:
        """Yield each queue as (topic, queue id, next queue offset)."""
        ...


class ReplayableLog(Protocol):
    """The part of a CommitLog that replay needs."""

    @property
    def min_offset(self) -> int:
        """Return the first offset that the log still holds."""
        ...

    @property
    def max_offset(self) -> int:
        """Return the end of the bytes written; on a slave it may lie inside a record."""
        ...

    @property
    def record_end(self) -> int:
        """Return the end of the last record known to be whole; at most `max_offset`."""
        ...

    @property
    def file_size(self) -> int:
        """Return the size of each commit log file in bytes."""
        ...

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend bytes from `offset`: at most `max_bytes`, of one file, never beyond `max_offset`."""
        ...


class Dispatcher(Protocol):
    """A part that replay feeds.

    Calls come one at a time, except that `flush` may run at the same time as `dispatch`.
    """

    def load(self, offset: int, synced: bool) -> int:
        """Open the files for a replay from `offset`; drop the data of records at or beyond it.

        If `synced` is false, the machine restarted: data that was not flushed when `offset` was
        saved as replay's progress may be missing. Returns the offset from which this dispatcher
        needs the log, at most `offset`.
        """
        ...

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Take whole records in the log's order; ignore those that were taken before.

        Raises OSError or StoreError; replay then dispatches the same batch again.
        """
        ...

    def truncate(self, log_end: int) -> None:
        """Forget every record that ends beyond `log_end`."""
        ...

    def flush(self) -> None:
        """Make durable what was dispatched before the call.

        Raises OSError if a later call may succeed, or SyncFailedError if no later call can succeed.
        """
        ...

    def reset(self) -> None:
        """Forget everything and close all files; the caller has moved the files away."""
        ...

    def delete_before(self, min_offset: int) -> Iterator[None] | None:
        """Remove whole files that cover only records below `min_offset` (retention).

        What takes long is done in steps: the caller takes all of them from the iterator. Between
        two steps there may be other calls.
        """
        ...

    def close(self) -> None:
        """Close all files."""
        ...
