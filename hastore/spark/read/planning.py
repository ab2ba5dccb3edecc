"""Plan a batch read: select the partitions, resolve their offsets, cut them into tasks."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from hastore.errors import UsageError
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import split_log, split_queues
from hastore.spark.options.source_options import Assign, SourceOptions, Strategy, Subscribe
from hastore.spark.read.backend import Backend

INTERNAL_TOPICS = frozenset({"HASTORE_POSITIONS"})  # a pattern never matches these


def plan(backend: Backend, options: SourceOptions) -> list[InputPartition]:
    """Return the tasks of a read. Raises the errors of `backend`, `select` and `Limits.resolve`."""
    if options.strategy is None:
        start, end = backend.log_range()
        return list(split_log(start, end, min_partitions=options.min_partitions))
    chosen = select(options.strategy, backend.available(), backend.where)
    ranges = options.limits.resolve(chosen, backend.offset_by_time)
    pieces = split_queues(
        ranges.items(),
        min_partitions=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    limit = backend.limit_offset()
    return [replace(piece, limit=limit) for piece in pieces]


def select(
    strategy: Strategy, available: Mapping[TopicPartition, OffsetRange], where: str
) -> dict[TopicPartition, OffsetRange]:
    """Return the partitions that the strategy selects.

    Raises UsageError for a topic or partition that does not exist. A pattern may match nothing.
    """
    topics = {key.topic for key in available}
    if isinstance(strategy, Subscribe):
        for topic in strategy.topics:
            if topic not in topics:
                raise UsageError(_no_topic(topic, topics, where))
    if isinstance(strategy, Assign):
        for key in sorted(strategy.partitions):
            if key.topic not in topics:
                raise UsageError(_no_topic(key.topic, topics, where))
            if key not in available:
                there = sorted(k.partition for k in available if k.topic == key.topic)
                raise UsageError(
                    f"topic {key.topic!r} at {where} has no partition {key.partition}; "
                    f"it has {there}"
                )
    return matching(strategy, available)


def matching(
    strategy: Strategy, available: Mapping[TopicPartition, OffsetRange]
) -> dict[TopicPartition, OffsetRange]:
    """Return the partitions that the strategy selects, as far as they exist."""
    if isinstance(strategy, Subscribe):
        return {key: span for key, span in available.items() if key.topic in strategy.topics}
    if isinstance(strategy, Assign):
        return {key: span for key, span in available.items() if key in strategy.partitions}
    pattern = re.compile(strategy.pattern)
    return {
        key: span
        for key, span in available.items()
        if pattern.fullmatch(key.topic) and key.topic not in INTERNAL_TOPICS
    }


def _no_topic(topic: str, topics: Iterable[str], where: str) -> str:
    names = sorted(topics)
    near = difflib.get_close_matches(topic, names, n=1)
    if near:
        return f"there is no topic {topic!r} at {where}; did you mean {near[0]!r}?"
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"there is no topic {topic!r} at {where}; topics there: {shown or 'none'}"
