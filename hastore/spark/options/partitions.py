"""Cut a read into Spark tasks: queues by the rules of Spark's Kafka source, the log by bytes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import InputPartition

from hastore.errors import UsageError
from hastore.record.layout import MIN_RECORD_SIZE
from hastore.spark.options.offsets import OffsetRange, TopicPartition

LOG_RANGE_BYTES = 128 * 1024 * 1024  # the most that one task reads in mode=log
MAX_TASKS = 1_000_000  # of one read: Spark's driver keeps a few KB for each


class Stored(NamedTuple):
    """Where a record is: equal (epoch, offset) means equal bytes on any node of a group.

    `offset` is physical. `epoch` is None in a store that keeps no epochs.
    """

    epoch: int | None
    offset: int


@dataclass(frozen=True)
class QueueRange(InputPartition):
    """The range of one task: the offsets `[start, end)` of one queue.

    `limit` is the readable end of the log, a physical offset, when the query was planned. It is
    None when the query reads from running nodes instead of a store's folder. `last` is the last
    record of the batch, or what was the last readable one when a batch read was planned; it may be
    behind the range. A failover may cut the log since: records that a later epoch wrote, after it
    had cut away `last`, are not in the range. A stream knows the record `before` the range too.
    """

    topic: str
    partition: int
    start: int
    end: int
    limit: int | None = None
    before: Stored | None = None
    last: Stored | None = None

    @property
    def name(self) -> str:
        """Return "topic-partition", for error texts."""
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True)
class LogRange(InputPartition):
    """The range of one task in mode=log: the records that begin in the bytes `[start, end)`.

    `limit` is the readable end of the log when the query was planned; a record that crosses it is
    left out.
    """

    start: int
    end: int
    limit: int


@dataclass(frozen=True)
class NoRange(InputPartition):
    """An empty range, returned instead of an empty list.

    Spark would replace an empty list by a partition of a type that our `read` does not know.
    """

    reason: str


def _divide(key: TopicPartition, span: OffsetRange, parts: int) -> list[QueueRange]:
    """Cut a range into parts whose sizes differ by at most one; leave out empty parts."""
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
    """Cut the ranges into tasks, by default one for each partition.

    First, ranges are cut into tasks of at most `max_records` messages. If that makes fewer
    than `min_partitions` tasks, large ranges are cut in proportion to their size, to about that
    number of tasks. The rule is that of Spark's KafkaOffsetRangeCalculator. No task is empty.

    Raises UsageError if that makes more than MAX_TASKS.
    """
    spans = [(key, span) for key, span in ranges if span.size > 0]
    most = math.inf if max_records is None else max_records
    counts = [1 if span.size <= most else -(-span.size // int(most)) for _, span in spans]
    _check_count("maxRecordsPerPartition", max_records, sum(counts))
    pieces: list[QueueRange] = []
    for (key, span), parts in zip(spans, counts, strict=True):
        pieces.extend(_divide(key, span, parts))
    if min_partitions is None or len(pieces) >= min_partitions:
        return pieces
    total = sum(piece.end - piece.start for piece in pieces)
    _check_count("minPartitions", min_partitions, min(min_partitions, total))
    return _split_large(pieces, min_partitions)


def _check_count(option: str, value: int | None, tasks: int) -> None:
    if tasks > MAX_TASKS:
        remedy = "raise it" if option == "maxRecordsPerPartition" else "lower it"
        raise UsageError(
            f"option {option!r} is {value}, which makes {tasks} tasks of this read; {remedy}, so "
            f"that there are at most {MAX_TASKS}"
        )


def _split_large(pieces: list[QueueRange], min_partitions: int) -> list[QueueRange]:
    def count(piece: QueueRange, total: int, least: int) -> int:
        return max(math.floor((piece.end - piece.start) / total * least + 0.5), 1)

    total = sum(p.end - p.start for p in pieces)
    large = {p for p in pieces if count(p, total, min_partitions) > 1}
    large_total = sum(p.end - p.start for p in large)
    large_least = max(min_partitions - (len(pieces) - len(large)), 1)
    result = []
    for piece in pieces:
        parts = count(piece, large_total, large_least) if piece in large else 1
        key = TopicPartition(piece.topic, piece.partition)
        span = OffsetRange(piece.start, piece.end)
        result.extend(_divide(key, span, min(parts, span.size)))
    return result


def split_log(start: int, end: int, *, min_partitions: int | None) -> list[LogRange]:
    """Cut `[start, end)` into at least `min_partitions` ranges, of LOG_RANGE_BYTES at most.

    There are fewer if not so many records fit in: no range is cut below the size of a record.
    Raises UsageError if `min_partitions` asks for more than MAX_TASKS.
    """
    least = min(min_partitions or 1, (end - start) // MIN_RECORD_SIZE)
    _check_count("minPartitions", min_partitions, least)
    parts = max(math.ceil((end - start) / LOG_RANGE_BYTES), least, 1)
    bounds = [start + (end - start) * part // parts for part in range(parts + 1)]
    return [LogRange(a, b, end) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
