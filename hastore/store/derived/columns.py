"""Many records at once, for dispatchers: the door between the array walk and what it feeds.

It imports nothing heavy, so that who only knows the door does not load numpy.
"""

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from hastore.store.derived.walk.scalar_walk import Dispatched


class QueueRun(NamedTuple):
    """The records of a batch that have a place in one queue, in the log's order."""

    topic: str
    queue_id: int
    first: int  # queue offset of the first record
    next: int  # behind the greatest queue offset
    units: memoryview  # as the consume queue stores them
    is_gapless: bool  # queue offsets follow each other
    rows: Any  # their numbers in the batch, as an array


class ProducerRun(NamedTuple):
    """The records of a batch by one producer, in the log's order."""

    producer: bytes
    sequences: "array[int]"
    offsets: "array[int]"


class KeyedRecords(NamedTuple):
    """Keys of a batch, as arrays of int64 of equal length: an entry for each key, in log order."""

    hashes: Any
    offsets: Any
    stored_ms: Any


class RecordColumns(Sequence[Dispatched]):
    """A batch of whole records as columns; as a sequence it is the records one by one."""

    start_offset: int  # physical, of the first record
    last_offset: int  # of the last one
    end_offset: int  # just behind the last one
    last_store_timestamp_ms: int  # of the last one
    has_inner_batches: bool  # then only the records one by one tell all

    @abstractmethod
    def queue_runs(self) -> Sequence[QueueRun]:
        """Return the records by topic and queue, without prepared and rollback records."""
        ...

    @abstractmethod
    def producer_runs(self) -> Sequence[ProducerRun]:
        """Return the records with producer and sequence number, by producer.

        The producer of the last such record comes last, and so on backwards.
        """
        ...

    @abstractmethod
    def keyed(self) -> KeyedRecords | None:
        """Return the keys of all records but rollbacks; None without any key."""
        ...

    def pick(self, run: QueueRun) -> list[Dispatched]:
        """Return a run's records one by one."""
        return [self[row] for row in run.rows.tolist()]
