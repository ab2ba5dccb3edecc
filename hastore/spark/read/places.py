"""The interface for following queues: where they end now, and whether a position still holds."""

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

from hastore.ha.rules.history import Standing
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import Stored


class Place(NamedTuple):
    """A position in a queue: the next offset to read, and the record before it.

    `before` is None if there is no such record, or if it is unknown.
    """

    next: int
    before: Stored | None = None


class Verdict(NamedTuple):
    """How a position relates to the log; `common` is where to continue if it is LOST."""

    standing: Standing
    common: Place


class Head(Protocol):
    """Follow the ends of queues. One thread uses it; its files and sockets stay open."""

    where: str  # the path or the addresses, for error texts

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges at this moment.

        A range from nodes may end beyond the readable offset; `locate` finds the readable end.
        """
        ...

    def check_right(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic, as `Listing` says."""
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
    ) -> dict[TopicPartition, Place]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it.

        An offset is left out if no message between the two is readable.
        """
        ...

    def check(self, places: Mapping[TopicPartition, Place]) -> dict[TopicPartition, Verdict]:
        """Return whether the record before each place is still in the log."""
        ...

    def close(self) -> None:
        """Close files and sockets."""
        ...
