"""Cut what is to be exported into tasks of about the same size in bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import QueueRange, split_queues
from hastore.spark.read.backend import Backend

TASK_BYTES = 128 * 1024 * 1024  # of records; by default the most of a task
LEAST_TASK_BYTES = 8 * 1024 * 1024
TASKS_PER_CORE = 3
_SAMPLES = 64  # records, at the start of a range, whose size is measured
_SAMPLED_QUEUES = 4  # of a topic


@dataclass(frozen=True)
class Piece:
    """The ranges of one task, and their number of messages."""

    ranges: tuple[QueueRange, ...]

    @property
    def messages(self) -> int:
        """Return the number of queue offsets in the ranges."""
        return sum(span.end - span.start for span in self.ranges)


def plan(
    backend: Backend,
    ranges: Mapping[TopicPartition, OffsetRange],
    cores: int,
    task_bytes: int = TASK_BYTES,
) -> list[Piece]:
    """Return the tasks. Each queue's ranges are in order, within a task and from task to task."""
    sizes = record_sizes(backend, ranges)
    total = sum(span.size * sizes[key.topic] for key, span in ranges.items())
    wanted = total / max(1, cores * TASKS_PER_CORE)
    most_bytes = min(max(wanted, LEAST_TASK_BYTES), task_bytes)
    limit = backend.limit_offset()
    pieces: list[Piece] = []
    room = 0.0
    for key in sorted(ranges):
        size = sizes[key.topic]
        for span in split_queues(
            [(key, ranges[key])],
            min_partitions=None,
            max_records=max(1, math.floor(most_bytes / size)),
        ):
            placed = QueueRange(span.topic, span.partition, span.start, span.end, limit)
            span_bytes = (span.end - span.start) * size
            if span_bytes > room:
                pieces.append(Piece((placed,)))
                room = most_bytes
            else:
                pieces[-1] = Piece((*pieces[-1].ranges, placed))
            room -= span_bytes
    return pieces


def record_sizes(
    backend: Backend, ranges: Mapping[TopicPartition, OffsetRange]
) -> dict[str, float]:
    """Return the mean size of a record by topic, from the first records of its largest ranges."""
    by_topic: dict[str, list[tuple[TopicPartition, OffsetRange]]] = {}
    for key, span in ranges.items():
        by_topic.setdefault(key.topic, []).append((key, span))
    result = {}
    for topic, spans in by_topic.items():
        spans.sort(key=lambda one: one[1].size, reverse=True)
        sizes: list[int] = []
        for key, span in spans[:_SAMPLED_QUEUES]:
            end = min(span.end, span.start + _SAMPLES)
            sample = QueueRange(topic, key.partition, span.start, end, backend.limit_offset())
            for batch in backend.read_queue(sample, BatchBuilder(projection_of([Column.SIZE]))):
                sizes += batch.column(0).to_pylist()
        result[topic] = sum(sizes) / len(sizes) if sizes else 1024.0
    return result
