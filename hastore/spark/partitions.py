"""How a read is cut into Spark tasks: Kafka's rules for queues, bytes for ranges of the log."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql.datasource import InputPartition

from hastore.spark.offsets import OffsetRange, TopicPartition

LOG_RANGE_BYTES = (
    128 * 1024 * 1024
)  # of one task in mode=log, unless minPartitions asks for more tasks


@dataclass(frozen=True)
class QueueRange(InputPartition):
    """The offsets `[start, end)` of one queue: what one task reads.

    `limit` is where in the log reading ended when the query was planned, None over nodes.
    """

    topic: str
    partition: int
    start: int
    end: int
    limit: int | None = None

    @property
    def name(self) -> str:
        """Return "topic-partition", for error texts."""
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class LogRange(InputPartition):
    """The records that begin in the bytes `[start, end)` of the commit log: what one task reads.

    `limit` is where reading ended when the query was planned; a record that crosses it is left out.
    """

    start: int
    end: int
    limit: int


@dataclass(frozen=True)
class NoRange(InputPartition):
    """Nothing to read.

    Spark puts a partition of its own, unknown to us, in an empty list's place.
    """

    reason: str


def _divide(key: TopicPartition, span: OffsetRange, parts: int) -> list[QueueRange]:
    """Cut a range into parts that differ by one at most; empty ones are left out."""
    result = []
    start, remaining = span.start, span.size
    for part in range(parts):
        size = remaining // (parts - part)
        if size:
            result.append(QueueRange(key.topic, key.partition, start, start + size))
        start += size
        remaining -= size
    return result


def split_queues(
    ranges: Iterable[tuple[TopicPartition, OffsetRange]],
    *,
    min_partitions: int | None,
    max_records: int | None,
) -> list[QueueRange]:
    """Cut the ranges into tasks.

    One for each partition, unless there shall be more or smaller ones.

    First none has more than `max_records`; if these are fewer than `min_partitions`, the large ones
    are cut in proportion, to about that number (KafkaOffsetRangeCalculator).
    """
    pieces: list[QueueRange] = []
    for key, span in ranges:
        if span.size > 0:
            parts = 1 if max_records is None else math.ceil(span.size / max_records)
            pieces.extend(_divide(key, span, parts))
    if min_partitions is None or len(pieces) >= min_partitions:
        return pieces
    return _split_large(pieces, min_partitions)


def _split_large(pieces: list[QueueRange], min_partitions: int) -> list[QueueRange]:
    def count(piece: QueueRange, total: int, least: int) -> int:
        return max(math.floor((piece.end - piece.start) / total * least + 0.5), 1)

    total = sum(p.end - p.start for p in pieces)
    large = [p for p in pieces if count(p, total, min_partitions) > 1]
    large_total = sum(p.end - p.start for p in large)
    large_least = max(min_partitions - (len(pieces) - len(large)), 1)
    result = []
    for piece in pieces:
        parts = count(piece, large_total, large_least) if piece in large else 1
        key = TopicPartition(piece.topic, piece.partition)
        result.extend(_divide(key, OffsetRange(piece.start, piece.end), parts))
    return result


def split_log(start: int, end: int, *, min_partitions: int | None) -> list[LogRange]:
    """Cut `[start, end)` into ranges of LOG_RANGE_BYTES, or into `min_partitions` if more."""
    parts = max(math.ceil((end - start) / LOG_RANGE_BYTES), min_partitions or 1)
    bounds = [start + (end - start) * part // parts for part in range(parts + 1)]
    return [LogRange(a, b, end) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
