"""The door between the data source and what it reads from: a store's directory or running nodes."""

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from hastore.spark.arrow_batch import BatchBuilder
from hastore.spark.offsets import OffsetRange, TopicPartition
from hastore.spark.partitions import LogRange, QueueRange


class Backend(Protocol):
    """Tell what is there and read it.

    Used by one thread, opened and closed within one driver call or one task.
    """

    def __enter__(self) -> Self:
        """Open files or sockets: here and not before, for workers are forked and reused."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close them."""
        ...

    where: str  # the path or the addresses, for error texts

    def limit_offset(self) -> int | None:
        """Return where in the log reading ends now, for the tasks; None where nodes know that."""
        ...

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue with the offsets that can be read now, up to the readable offset."""
        ...

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None when all are older."""
        ...

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range, in order.

        Raises PositionLostError when some are gone and `failOnDataLoss` holds, else leaves those
        out; CorruptRecordError for bytes that are no record.
        """
        ...

    def log_range(self) -> tuple[int, int]:
        """Return the physical offsets `[start, end)` of the log that can be read now.

        Raises UsageError over nodes.
        """
        ...

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the records that begin in a range of the log, in order.

        Raises CorruptRecordError.
        """
        ...
