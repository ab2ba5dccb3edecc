"""The interface between the data source and the places that it reads: a directory or nodes."""

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange


class Listing(Protocol):
    """A place that lists its queues."""

    where: str  # the path or the addresses, for error texts

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue that the client may know of, with its range of offsets."""
        ...

    def check_right(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic, whether it exists or not.

        Nodes list no such topic; without this it would be taken for one that does not exist.
        """
        ...


class Backend(Listing, Protocol):
    """List queues and read ranges of them.

    One thread uses a backend. It is opened and closed within one driver call or one task.
    """

    def __enter__(self) -> Self:
        """Open files or sockets; not in `__init__`, because Spark forks and reuses its workers."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what `__enter__` opened."""
        ...

    def limit_offset(self) -> int | None:
        """Return the physical offset at which the tasks stop reading; None for running nodes."""
        ...

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue with its range of offsets at this moment.

        A range from nodes may end beyond the readable offset: see `readable`.
        """
        ...

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, OffsetRange]:
        """Return ranges of `available` without the messages that are not readable yet."""
        ...

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None when all are older."""
        ...

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range, in order.

        With `failOnDataLoss`, raises PositionLostError when messages are gone. Without it, leaves
        them out. Raises CorruptRecordError for bytes that are not a record.
        """
        ...

    def log_range(self) -> tuple[int, int]:
        """Return the physical offsets `[start, end)` of the log that can be read now.

        Raises UsageError for running nodes: they give messages by queue only.
        """
        ...

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the records that begin in a range of the log, in order.

        Raises CorruptRecordError.
        """
        ...
