"""The interfaces between the data source and the places that it reads: a store's folder or nodes.

`Backend` reads ranges of queues. `Head` follows queues for a stream: where they end now, and
whether a position still holds. `stores.py` and `servers.py` implement both.
"""

from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from hastore.ha.rules.epochs import Standing
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange, Stored

if TYPE_CHECKING:
    import pyarrow as pa

    from hastore.spark.arrow.batch import BatchBuilder


class Listing(Protocol):
    """A place that lists its queues."""

    where: str  # the path or the addresses, for error texts

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue that the client may know of, with its range of offsets."""
        ...

    def check_unlisted(self, topic: str) -> None:
        """Say why a topic, or a queue of it, that is not listed may exist all the same.

        Raises ForbiddenError if the client has no right to the topic: nodes do not list it then.
        Raises ClientError if the topic has a queue without a message: a store's folder shows none.
        """
        ...

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return the nodes that cannot be asked for these queues now, and what they did not do.

        They may have kept messages that all others have removed. A store's folder has none.
        """
        ...


class ReadableRange(NamedTuple):
    """What is readable of a queue, and the last record of it; None if it is not known."""

    span: OffsetRange
    last: Stored | None = None


def spans_of(
    found: Mapping[TopicPartition, ReadableRange],
) -> dict[TopicPartition, OffsetRange]:
    """Return the ranges alone."""
    return {key: one.span for key, one in found.items()}


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

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges at this moment.

        A range from nodes may end beyond the readable offset: see `readable`.
        """
        ...

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues.

        Messages below that offset are no loss to who finds the queue later. Left out are queues of
        topics that were not deleted, and those of which it is not known any more.
        """
        ...

    @property
    def knows_deletions(self) -> bool:
        """Whether `ended` tells of the queues of topics that were deleted, and are not listed."""
        ...

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, ReadableRange]:
        """Return ranges of `available` without the messages that are not readable yet."""
        ...

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None when all are older."""
        ...

    def read_queue(self, span: QueueRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
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

    def read_log(self, span: LogRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
        """Yield the records that begin in a range of the log, in order.

        Raises CorruptRecordError.
        """
        ...


class QueuePlace(NamedTuple):
    """A position in a queue: the next offset to read, and the record before it.

    `before` is None if there is no such record, or if it is unknown.
    """

    next: int
    before: Stored | None = None


class PlaceVerdict(NamedTuple):
    """How a position relates to the log; `common` is where to continue if it is LOST."""

    standing: Standing
    common: QueuePlace


class Head(Protocol):
    """Follow the ends of queues. One thread uses it; its files and sockets stay open."""

    where: str  # the path or the addresses, for error texts

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges at this moment.

        A range from nodes may end beyond the readable offset; `locate` finds the readable end.
        """
        ...

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues.

        Messages below that offset are no loss to who finds the queue later. Left out are queues of
        topics that were not deleted, and those of which it is not known any more. Nodes tell as of
        the last call of `available`.
        """
        ...

    def check_unlisted(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic, as `Listing` says."""
        ...

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return the nodes that cannot be asked for these queues now, as `Listing` says.

        The next `available` has what those have kept that are there again.
        """
        ...

    def token(self) -> object:
        """Return a value that changes if a failover may have cut the log; None if unknown.

        It is the value as of the last call of `available`.
        """
        ...

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None when all are older."""
        ...

    def limit_offset(self) -> int | None:
        """Return the physical offset at which the tasks stop reading; None for running nodes."""
        ...

    def locate(
        self, ends: Mapping[TopicPartition, int], lows: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, QueuePlace]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it.

        An offset is left out if no message between the two is readable.
        """
        ...

    def check(
        self, places: Mapping[TopicPartition, QueuePlace]
    ) -> dict[TopicPartition, PlaceVerdict]:
        """Return whether the record before each place is still in the log."""
        ...

    def close(self) -> None:
        """Close files and sockets."""
        ...
