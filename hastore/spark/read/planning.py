"""Open what a query names, and plan a batch read: its partitions, their offsets, its tasks."""

import difflib
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from pyspark.sql.datasource import InputPartition

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import CorruptRecordError, UnreachableError, UsageError
from hastore.record.delays import RETRY_PREFIX
from hastore.record.topic_records import OWN_PREFIX, RESERVED
from hastore.spark.options.filters import WantedMessages
from hastore.spark.options.offsets import OffsetByTime, OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, split_log, split_queues
from hastore.spark.options.source_options import (
    Assign,
    Patience,
    SourceOptions,
    Strategy,
    Subscribe,
)
from hastore.spark.read.backend import Backend, Head, Listing, spans_of

log = logging.getLogger(__name__)

EVERYTHING = WantedMessages()
CLOCK_STEP_MS = 60_000  # a queue's times run back by less
CHECK_S = 2.0  # the most that `load()` waits for a node; the planning waits longer
_LATEST_MS = 2**62  # for which nodes look
WARN_S = 30.0  # a wait for absent nodes that is so long is in the log
PAUSE_S = 0.1  # between two looks for them; doubled up to PAUSE_S_MAX
PAUSE_S_MAX = 2.0


def open_backend(options: SourceOptions) -> Backend:
    """Return what reads ranges; only what it needs is imported."""
    if options.path is not None:
        from hastore.spark.read.stores import PathBackend

        return PathBackend(options.path, options.limits.fail_on_data_loss, options.names)
    from hastore.client.connections.bootstrap import cluster_of

    fails, security = options.limits.fail_on_data_loss, options.security
    cluster = cluster_of(options.bootstrap)
    if cluster is not None:
        from hastore.spark.read.clusters import ClusterBackend

        return ClusterBackend(
            cluster, fails, security, options.patience, options.groups, options.names
        )
    from hastore.spark.read.servers import ServerBackend

    return ServerBackend(
        options.bootstrap, fails, security, options.patience, names=options.names
    )


def open_head(options: SourceOptions) -> Head:
    """Return what follows the ends of queues."""
    if options.path is not None:
        from hastore.spark.read.stores import PathHead

        return PathHead(options.path, options.names)
    from hastore.client.connections.bootstrap import cluster_of

    cluster = cluster_of(options.bootstrap)
    if cluster is not None:
        from hastore.spark.read.clusters import ClusterHead

        return ClusterHead(
            cluster, options.security, options.patience, options.groups, options.names
        )
    from hastore.spark.read.servers import ServerHead

    return ServerHead(
        options.bootstrap, options.security, options.patience, names=options.names
    )


def check_topics(options: SourceOptions) -> None:
    """Refuse a topic that does not exist, when `load()` is called, for batch reads and streams.

    Raises UsageError, ForbiddenError, and StoreError for a path that leads to no store. Says
    nothing if no node answers at once, or if the topic may come later.
    """
    if options.may_be_written or not options.limits.fail_on_data_loss:
        return
    match options.strategy:
        case Subscribe(topics):
            wanted = set(topics)
        case Assign(partitions):
            wanted = {key.topic for key in partitions}
        case _:
            return
    seconds = min(CHECK_S, options.patience.first_s)
    quick = replace(options, patience=replace(options.patience, first_s=seconds, later_s=seconds))
    try:
        with open_backend(quick) as backend:
            there = backend.available(wanted)
            if not wanted.issubset({key.topic for key in there}) or (
                isinstance(options.strategy, Assign)
                and not options.strategy.partitions.issubset(there)
            ):
                select(options.strategy, backend)
    except (UnreachableError, CorruptRecordError):
        return  # the planning says so, if it still is


def plan(
    backend: Backend, options: SourceOptions, wanted: WantedMessages = EVERYTHING
) -> list[InputPartition]:
    """Return the tasks of a read, without ranges in which nothing is wanted.

    Raises the errors of `backend`, `select` and `Limits.resolve`, whatever is wanted.
    """
    if options.strategy is None:
        start, end = backend.log_range()
        return list(_plan_log(start, end, options, wanted))
    strategy, limits = options.strategy, options.limits
    chosen = backend.readable(select(strategy, backend))

    def removed() -> Collection[TopicPartition]:
        nonlocal chosen
        chosen = backend.readable(select(strategy, backend))
        return limits.removed(spans_of(chosen))

    unheard = ""
    if limits.removed(spans_of(chosen)):
        unheard = AbsentNodes(backend, options.patience).wait(removed)
    ranges = limits.resolve(spans_of(chosen), backend.offset_by_time, unheard)
    if wanted != EVERYTHING:
        ranges = prune(ranges, wanted, backend.offset_by_time)
    pieces = split_queues(
        ranges.items(),
        min_partitions=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    limit = backend.limit_offset()
    last = {key: one.last for key, one in chosen.items()}
    return [
        replace(piece, limit=limit, last=last[TopicPartition(piece.topic, piece.partition)])
        for piece in pieces
    ]


class AbsentNodes:
    """The nodes that are waited for before messages count as removed.

    Each node removes its oldest files by itself, so one that is down, or does not follow the latest
    master yet, may be the only one that has kept a message. One that was waited for in vain is not
    waited for again until it was there.
    """

    def __init__(
        self, place: Backend | Head, patience: Patience, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._place = place
        self._wait_s = patience.later_s
        self._clock = clock
        self._given_up: set[str] = set()

    def wait(self, removed: Callable[[], Collection[TopicPartition]]) -> str:
        """Wait for absent nodes while messages are missing, as long as `retryTimeout` says.

        `removed` looks anew, and returns the queues that lack messages. Returns what texts about
        these add: "", or which nodes may still have them.
        """
        from hastore.client.consumer.range_reader import unheard_text

        began_ms, pause_s, warned = self._clock.monotonic_ms(), PAUSE_S, False
        missing = removed()
        while missing:
            absent = self._place.absent(missing)
            missing = removed()  # one that was absent before may have them
            self._given_up &= absent.keys()
            waited_s = (self._clock.monotonic_ms() - began_ms) / 1_000.0
            if missing and (waited_s >= self._wait_s or self._given_up.issuperset(absent)):
                self._given_up = set(absent)
                return unheard_text(absent, self._wait_s)
            if missing and waited_s >= WARN_S and not warned:
                warned = True
                log.warning(
                    "messages of %s are removed from the nodes that answer; waiting %.0f s more%s",
                    ", ".join(map(str, sorted(missing))), self._wait_s - waited_s,
                    unheard_text(absent, round(waited_s)),
                )  # fmt: skip
            if missing:
                time.sleep(min(pause_s, max(0.0, self._wait_s - waited_s)))
                pause_s = min(2.0 * pause_s, PAUSE_S_MAX)
        return ""


def _plan_log(
    start: int, end: int, options: SourceOptions, wanted: WantedMessages
) -> list[LogRange]:
    if wanted.nothing:
        return []
    low, high = wanted.physical_offsets.low, wanted.physical_offsets.high
    first = start if low is None else max(start, low)
    last = end if high is None else max(first, min(end, high))
    pieces = split_log(first, last, min_partitions=options.min_partitions)
    return [replace(piece, limit=end) for piece in pieces]


def prune(
    ranges: Mapping[TopicPartition, OffsetRange],
    wanted: WantedMessages,
    offset_by_time: OffsetByTime,
) -> dict[TopicPartition, OffsetRange]:
    """Return the parts of the ranges that can have wanted messages.

    Offsets are looked for by time as if the times of a queue rose. Where they do not, as after a
    step of a RocketMQ broker's clock, CLOCK_STEP_MS ensures that nothing is left out.
    """
    result: dict[TopicPartition, OffsetRange] = {}
    if wanted.nothing:
        return result
    for key, span in ranges.items():
        if not wanted.keeps(key.topic, key.partition):
            continue
        left = _cut(span, wanted.offsets.low, wanted.offsets.high)
        since, until = wanted.times_ms.low, wanted.times_ms.high
        if left.size and since is not None and since > CLOCK_STEP_MS:
            found = offset_by_time(key, min(since - CLOCK_STEP_MS, _LATEST_MS))
            left = _cut(left, left.end if found is None else found, None)
        if left.size and until is not None:
            found = offset_by_time(key, min(max(until + CLOCK_STEP_MS, 0), _LATEST_MS))
            left = _cut(left, None, found)
        if left.size:
            result[key] = left
    return result


def _cut(span: OffsetRange, low: int | None, high: int | None) -> OffsetRange:
    start = span.start if low is None else min(max(span.start, low), span.end)
    end = span.end if high is None else max(min(span.end, high), start)
    return OffsetRange(start, end)


def select(strategy: Strategy, backend: Listing) -> dict[TopicPartition, OffsetRange]:
    """Return the partitions that the strategy selects.

    Raises UsageError for a topic or partition that does not exist, ForbiddenError for a topic that
    the client has no right to, and ClientError for one that a path does not show yet. A pattern may
    match nothing.
    """
    available, where = backend.available(), backend.where
    topics = {key.topic for key in available}
    if isinstance(strategy, Subscribe):
        for topic in strategy.topics:
            if topic not in topics:
                backend.check_unlisted(topic)
                raise UsageError(_no_topic(topic, topics, where))
    if isinstance(strategy, Assign):
        for key in sorted(strategy.partitions):
            if key.topic not in topics:
                backend.check_unlisted(key.topic)
                raise UsageError(_no_topic(key.topic, topics, where))
            if key not in available:
                backend.check_unlisted(key.topic)
                there = sorted(k.partition for k in available if k.topic == key.topic)
                raise UsageError(
                    f"topic {key.topic!r} at {where} has no partition {key.partition}; "
                    f"it has {there}"
                )
    return matching(strategy, available)


def matching(
    strategy: Strategy, available: Mapping[TopicPartition, OffsetRange]
) -> dict[TopicPartition, OffsetRange]:
    """Return the partitions that the strategy selects, as far as they exist.

    A pattern never matches the topics of the group itself, such as HASTORE_POSITIONS.
    """
    if isinstance(strategy, Subscribe):
        return {key: span for key, span in available.items() if key.topic in strategy.topics}
    if isinstance(strategy, Assign):
        return {key: span for key, span in available.items() if key in strategy.partitions}
    pattern = re.compile(strategy.pattern)
    return {
        key: span
        for key, span in available.items()
        if pattern.fullmatch(key.topic) and not key.topic.startswith(OWN_PREFIX)
    }


def is_internal(topic: str) -> bool:
    """Return whether its messages are not what consumers of topics read, or are so once more.

    They wait there until they are due or their transaction is committed, which it may never be, or
    are repeated for the group that has sent them back.
    """
    return topic in RESERVED or topic.startswith(RETRY_PREFIX)


def without_internal(pattern: str) -> str:
    """Return a pattern that matches as another one does, but no internal topic.

    One that is no regular expression is returned as it is, for the error of whoever compiles it.
    """
    try:
        re.compile(pattern)
    except re.error:
        return pattern
    flags = re.match(r"(?:\(\?[aiLmsux]+\))*", pattern)
    assert flags is not None
    names = "|".join(re.escape(name) for name in sorted(RESERVED))
    # In a group of its own, where the pattern's flags do not change it.
    inner = rf"(?-i:(?!(?:{names})\Z|{re.escape(RETRY_PREFIX)}))"
    return f"{flags[0]}{inner}(?:{pattern[flags.end() :]})"


def _no_topic(topic: str, topics: Iterable[str], where: str) -> str:
    names = sorted(topics)
    dots = "; RocketMQ's topic names have no dots" if "." in topic else ""
    where += dots
    near = difflib.get_close_matches(topic, names, n=1)
    if near:
        return f"there is no topic {topic!r} at {where}; did you mean {near[0]!r}?"
    if not names:
        return (
            f"there is no topic {topic!r} at {where}; there are no topics at all: the store is "
            "empty, or lacks its consume queues, which `hastore pipeline index` builds anew"
        )
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"there is no topic {topic!r} at {where}; topics there: {shown}"
