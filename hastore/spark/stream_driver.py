"""The driver's side of a stream: where it begins, where each micro-batch ends, and its tasks.

A batch is `[start, end)` in each queue, in the log that had the record before its end. If a
failover has cut that log, the batch is what the cut left of it. So a batch that Spark repeats after
a restart has the same messages as before, and no later batch reads a message again.

Spark passes the end of a batch as the start of the next one. If a batch found less than that, or
must begin elsewhere because messages are gone, the next batch's offset holds its real start.

`Ends` looks for the ends of the queues, not more often than is useful. How much a batch takes
follows the rules of Spark's Kafka source.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import PositionLostError, UnreachableError, UsageError
from hastore.ha.rules.epochs import Standing
from hastore.spark.options.offsets import Bound, OffsetRange, OffsetsByPartition, TopicPartition
from hastore.spark.options.partitions import QueueRange, split_queues
from hastore.spark.options.source_options import Assign, Strategy, StreamOptions, Subscribe
from hastore.spark.read.backend import Head, PlaceVerdict, QueuePlace
from hastore.spark.read.planning import AbsentNodes, matching, select
from hastore.spark.stream_offsets import Places, StreamOffset

log = logging.getLogger(__name__)

BEHIND_STEP_S = 0.05
WARN_S = 30.0  # a batch that waits so long for a store says so in the log
TOLD = 10_000  # losses that are remembered, because each is said once
_REMEDY = "set failOnDataLoss to false to continue with the messages that are available"


class StreamDriver:
    """Plan the batches of one run of a query. One thread uses it."""

    def __init__(self, head: Head, options: StreamOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        assert options.source.strategy is not None
        self._head = head
        self._options = options
        self._strategy: Strategy = options.source.strategy
        self._fails = options.source.limits.fail_on_data_loss
        self._clock = clock
        self._ends = Ends(head, self._strategy, clock)
        self._initial: StreamOffset | None = None
        self._target: Places | None = None
        # The end of the last batch, and how far its messages went, if a failover had cut some: the
        # next batch begins there, since another node may have those that this one did not have.
        self._cut_short: tuple[Places, Places] | None = None
        self._absent = AbsentNodes(head, options.source.patience, clock)
        self._unheard = ""  # what texts about removed messages add
        self._told: set[str] = set()
        self._delay = Delay(options.admission.min_offsets or 0, options.admission.max_delay_s)

    def initial_offset(self) -> StreamOffset:
        """Return where a new query begins; the same in each call, though the log goes on."""
        if self._initial is None:
            self._ends.look(now=True)
            self._refuse_missing()
            limits = self._options.source.limits
            unheard = ""
            if limits.removed(self._ends.ranges):
                unheard = self._await(lambda: limits.removed(self._ends.ranges))
            ends = self._ends.places
            there = {
                key: OffsetRange(span.start, max(span.start, ends[key].next))
                for key, span in self._ends.ranges.items()
            }
            found = limits.resolve(there, self._head.offset_by_time, unheard)
            starts = {key: span.start for key, span in found.items()}
            lows = {key: span.start for key, span in there.items()}
            at_end = {key: ends[key] for key in starts if starts[key] == ends[key].next}
            others = {key: start for key, start in starts.items() if key not in at_end}
            # A queue that a cut has emptied since is left out by `locate`: begin at its start.
            firsts = {key: QueuePlace(lows[key]) for key in others}
            places = {**at_end, **firsts, **self._head.locate(others, lows)}
            self._initial = StreamOffset(places, is_initial=True)
        return self._initial

    def prepare_available_now(self) -> None:
        """Fix the end of this run: the messages that are readable now."""
        self._target = dict(self._ends.look(now=True))

    def latest_offset(self, start: StreamOffset, *, limited: bool) -> StreamOffset:
        """Return where the next batch ends; `start` itself if there is nothing new.

        Raises PositionLostError if a failover has cut the log before `start`, and messages were
        lost, and failOnDataLoss is set.
        """
        self._ends.look()
        begins = self._begins(start)
        ends: Places = self._ends.places
        if self._target is not None:
            ends = self._target = {
                key: verdict.common for key, verdict in self._ends.verify(self._target).items()
            }
        ends = _not_before(begins, ends)
        if limited:
            ends = self._admit(begins, ends)
        elsewhere = begins != start.places
        if ends == start.places:
            if elsewhere:
                ends = begins  # an empty batch: Spark would take the same offset for no news
            elif not (start.is_initial and self._begins_late()):
                return start
        return StreamOffset(ends, begins if elsewhere or start.is_initial else None)

    def latest_ends(self) -> Places | None:
        """Return the ends as of the last look; None before it."""
        return self._ends.places or None

    def tasks(self, start: StreamOffset, end: StreamOffset) -> list[QueueRange]:
        """Cut a batch into tasks. Raises PositionLostError, as `latest_offset` does."""
        starts = start.places if end.origin is None else end.origin
        if starts == end.places:
            return []
        self._ends.look(now=True)
        starts = {**dict.fromkeys(end.places, QueuePlace(0)), **starts}
        gone = set(starts) - set(end.places)
        if gone:
            self._lose(f"{_names(gone)} are in the query's checkpoint, but not in this batch")
        first = self._verified({key: starts[key] for key in end.places}, also_new=False)
        last = self._caught_up(end.places, starts, first)
        planned, edges, cut_short = {}, {}, {}
        for key in sorted(end.places):
            begin = self._begin(key, starts[key], first[key])
            stop = last[key].common
            if last[key].standing is Standing.LOST:
                self._lose(f"a failover cut {key} from {stop.next} to {end.places[key].next}")
                cut_short[key] = stop if stop.next > begin.next else begin
            elif stop.next < begin.next:
                self._lose(f"the offset of {key} changed from {begin.next} to {stop.next}")
            low = min(starts[key].next, begin.next)
            planned[key] = OffsetRange(low, end.places[key].next)
            edges[key] = (begin, stop)
        self._cut_short = (end.places, {**end.places, **cut_short}) if cut_short else None
        # The tasks depend on the checkpoint alone, not on what is left: the sink knows a task that
        # is repeated by its place among the others. One whose messages are gone is empty.
        pieces = split_queues(
            planned.items(),
            min_partitions=self._options.source.min_partitions,
            max_records=self._options.source.max_records_per_partition,
        )
        limit = self._head.limit_offset()
        return [_placed(piece, limit, edges) for piece in pieces]

    def close(self) -> None:
        """Close files and sockets."""
        self._head.close()

    def _refuse_missing(self) -> None:
        """Raise UsageError for a topic or partition that the options name, but does not exist."""
        there = self._ends.ranges
        match self._strategy:
            case Subscribe(topics):
                missing = not {key.topic for key in there}.issuperset(topics)
            case Assign(partitions):
                missing = not partitions <= there.keys()
            case _:
                missing = False
        if missing:
            try:
                select(self._strategy, self._head)
            except UsageError as error:
                raise UsageError(
                    f"{error}; a stream with subscribePattern reads topics that appear later, and "
                    "one with subscribe new queues of its topics"
                ) from error

    # -- what a batch may take

    def _begins(self, start: StreamOffset) -> Places:
        """Return where the batch after `start` begins: elsewhere if messages are gone."""
        places = start.places
        if self._cut_short is not None and self._cut_short[0] == places:
            places = self._cut_short[1]
        starts = self._keep_selected(places)
        verdicts = self._verified(starts, also_new=True)
        begins = {key: self._begin(key, starts[key], verdicts[key]) for key in starts}
        return {**begins, **self._late_queues(starts)}

    def _admit(self, begins: Places, ends: Places) -> Places:
        """Apply the limits of the options; return `begins` if the batch must wait."""
        admission = self._options.admission
        firsts = {key: begins.get(key, QueuePlace(0)).next for key in ends}
        stops = {key: place.next for key, place in ends.items()}
        # In a run that ends by itself nothing would come later: such a batch does not wait.
        if admission.min_offsets is not None and self._target is None:
            if self._delay.holds(count_new(firsts, stops), self._clock.monotonic_ms() / 1_000.0):
                return begins
        if admission.max_offsets is None:
            return ends
        shared = share(admission.max_offsets, firsts, stops)
        moved = {key: stop for key, stop in shared.items() if stop != stops[key]}
        # Only of the queues that are asked for: the group of another may have left the cluster.
        return {**ends, **self._head.locate(moved, {key: firsts[key] for key in moved})}

    def _begins_late(self) -> bool:
        """Return whether the start depends on the moment at which the query began.

        Then the first batch is run even if it is empty: Spark stores its end, and so its start.
        """
        start = self._options.source.limits.start
        if isinstance(start, OffsetsByPartition):
            return Bound.LATEST in start.offsets.values()
        return start is not Bound.EARLIEST

    def _keep_selected(self, starts: Places) -> Places:
        """Leave out queues that the options no longer select."""
        # A queue that is selected may be missing for a while, on a replica that lags.
        kept = matching(self._strategy, dict.fromkeys(starts, OffsetRange(0, 0)))
        if len(kept) < len(starts):
            extra = _names(set(starts) - set(kept))
            self._lose(f"{extra} are in the query's checkpoint, but not selected any more")
        return {key: starts[key] for key in kept}

    # -- losses

    def _verified(self, starts: Places, *, also_new: bool) -> dict[TopicPartition, PlaceVerdict]:
        """Return how places relate to the log.

        If messages behind one, or of a new queue, are removed, waits for nodes that are absent:
        they may have them.
        """
        verdicts = self._ends.verify(starts)

        def removed() -> list[TopicPartition]:
            firsts = {key: verdict.common.next for key, verdict in verdicts.items()}
            firsts |= self._firsts_of_new(starts) if also_new else {}
            there = self._ends.ranges
            return [key for key, at in firsts.items() if key in there and at < there[key].start]

        self._unheard = ""
        if removed():
            self._unheard = self._await(removed)
            verdicts = self._ends.verify(starts)
        return verdicts

    def _await(self, removed: Callable[[], Collection[TopicPartition]]) -> str:
        """Wait for nodes that are absent while `removed` returns queues; see AbsentNodes."""

        def look() -> Collection[TopicPartition]:
            self._ends.look(now=True)
            return removed()

        return self._absent.wait(look)

    def _firsts_of_new(self, starts: Places) -> dict[TopicPartition, int]:
        """Return where queues that are not in `starts` begin, of those that do not begin at 0 now.

        The queues of a topic that was deleted, and is made again, go on where they ended: only what
        was put since then can be lost.
        """
        late = [key for key, span in self._ends.ranges.items() if key not in starts and span.start]
        ended = self._head.ended(late) if late else {}
        return {key: ended.get(key, 0) for key in late}

    def _begin(self, key: TopicPartition, start: QueuePlace, verdict: PlaceVerdict) -> QueuePlace:
        """Return where a batch begins that should begin at `start`."""
        if verdict.standing is Standing.LOST:
            if verdict.common.before is None:
                self._lose(
                    f"the record before offset {start.next} of {key} is not in this log: a "
                    "failover cut it away, or this is another log than the one that was read"
                )
            self._lose(
                f"offset {start.next} of {key} is after a record that a failover cut away; "
                f"{verdict.common.next} is the last offset that is still valid"
            )
            start = verdict.common
        there = self._ends.ranges.get(key)
        if there is not None and start.next < there.start:
            self._lose(
                f"offset {start.next} of {key} is before the first one kept, {there.start}: "
                f"retention removed the messages between them{self._unheard}"
            )
            return QueuePlace(there.start)
        if there is None and verdict.standing is Standing.AGREED and start.before is not None:
            ended = self._head.ended([key]).get(key)
            if ended is None or ended > start.next:  # else all was read that a deletion has ended
                self._lose(f"{key} is gone")
        return start

    def _late_queues(self, starts: Places) -> dict[TopicPartition, QueuePlace]:
        """Return where to begin in new queues that do not begin at 0."""
        late = {}
        for key, first in self._firsts_of_new(starts).items():
            begin = self._ends.ranges[key].start
            if begin > first:
                self._lose(
                    f"the new queue {key} begins at offset {begin} instead of {first}"
                    f"{self._unheard}"
                )
            late[key] = QueuePlace(begin)
        return late

    def _caught_up(
        self, ends: Places, starts: Places, first: Mapping[TopicPartition, PlaceVerdict]
    ) -> dict[TopicPartition, PlaceVerdict]:
        """Return how the ends relate to the log; waits for a store that is behind them.

        Only queues of which the batch has messages count, and no queue that a deletion has ended.
        Nodes need no wait here: a task waits until one of them has its messages.
        """
        patience = self._options.source.patience
        began_ms, warned = self._clock.monotonic_ms(), False
        has_any = {
            key
            for key, end in ends.items()
            if min(starts[key].next, first[key].common.next) < end.next
        }
        while True:
            verdicts = self._ends.verify(ends)
            if self._head.limit_offset() is None:
                return verdicts
            there = self._listed(ends)
            missing = [
                key
                for key, verdict in verdicts.items()
                if verdict.standing is not Standing.LOST
                and key in has_any
                and (key not in there or there[key].end < ends[key].next)
            ]
            if not missing:
                return verdicts
            deleted = self._deleted(missing, ends)
            if deleted:
                self._lose(f"messages of {_names(deleted)} are gone")
                has_any -= deleted
                continue
            waited_s = (self._clock.monotonic_ms() - began_ms) / 1_000.0
            if waited_s >= patience.later_s:
                if not any(verdicts[key].standing is Standing.BEHIND for key in missing):
                    self._lose(f"messages of {_names(missing)} are gone")
                    return verdicts
                raise UnreachableError(
                    f"{self._head.where} is behind the query's checkpoint in {_names(missing)}; it "
                    f"did not catch up within {patience.later_s:g} s: wait until its node has, "
                    f"or read from another replica{patience.or_raise}"
                )
            if waited_s >= WARN_S and not warned:
                warned = True
                log.warning(
                    "%s is behind the query's checkpoint in %s; waiting %.0f s more",
                    self._head.where, _names(missing), patience.later_s - waited_s,
                )  # fmt: skip
            time.sleep(BEHIND_STEP_S)
            self._ends.look(now=True)

    def _deleted(self, keys: Collection[TopicPartition], ends: Places) -> set[TopicPartition]:
        """Return the queues that are not there because a deletion ended them behind the batch."""
        absent = [key for key in keys if key not in self._ends.ranges]
        ended = self._head.ended(absent) if absent else {}
        return {key for key, end in ended.items() if end >= ends[key].next}

    def _listed(self, keys: Iterable[TopicPartition]) -> Mapping[TopicPartition, OffsetRange]:
        """Return the ranges of the queues that are there, also of those of a planned batch that the
        options no longer select: a batch that is repeated has their messages.
        """
        selected = matching(self._strategy, dict.fromkeys(keys, OffsetRange(0, 0)))
        others = {key.topic for key in keys if key not in selected}
        found = self._head.available(others) if others else {}
        return {**found, **self._ends.ranges}

    def _lose(self, what: str) -> None:
        if self._fails:
            raise PositionLostError(f"{what} ({self._head.where}); {_REMEDY}")
        if what not in self._told:  # Spark asks often, and once more for the tasks
            if len(self._told) >= TOLD:
                self._told.clear()
            self._told.add(what)
            log.warning("%s (%s); the query goes on without what is lost", what, self._head.where)


def _not_before(begins: Places, ends: Places) -> Places:
    """Return the ends, but nowhere before the begin: a replica that lags does not have it yet."""
    result = dict(ends)
    for key, begin in begins.items():
        if key not in ends or ends[key].next <= begin.next:
            result[key] = begin
    return result


def _placed(
    piece: QueueRange,
    limit: int | None,
    edges: Mapping[TopicPartition, tuple[QueuePlace, QueuePlace]],
) -> QueueRange:
    """Return the part of a piece that is between the edges of its queue; it may be empty."""
    begin, stop = edges[TopicPartition(piece.topic, piece.partition)]
    start = max(piece.start, begin.next)
    end = max(start, min(piece.end, stop.next))
    before = begin.before if start == begin.next else None
    return replace(piece, start=start, end=end, limit=limit, before=before, last=stop.before)


def _names(keys: Iterable[TopicPartition]) -> str:
    return ", ".join(str(key) for key in sorted(keys))


# -- how much a batch takes ------------------------------------------------------------------------


Offsets = Mapping[TopicPartition, int]


def count_new(starts: Offsets, ends: Offsets) -> int:
    """Return how many messages are between the starts and the ends."""
    return sum(max(0, end - starts[key]) for key, end in ends.items())


def share(limit: int, starts: Offsets, ends: Offsets) -> dict[TopicPartition, int]:
    """Move the ends back so that about `limit` messages remain, in proportion to each backlog.

    Every queue with new messages gets at least one, so that none starves behind larger ones. So
    the result may exceed the limit by as many messages as there are queues.
    """
    sizes = {key: max(0, end - starts[key]) for key, end in ends.items()}
    total = sum(sizes.values())
    if total <= limit:
        return dict(ends)
    result = {}
    for key, end in ends.items():
        exact = limit * sizes[key] / total
        part = math.ceil(exact) if exact < 1 else math.floor(exact)
        result[key] = min(end, starts[key] + part) if sizes[key] else end
    return result


class Delay:
    """Holds batches back until there are `least` messages, or `max_delay_s` after the last one."""

    def __init__(self, least: int, max_delay_s: float) -> None:
        self._least = least
        self._max_delay_s = max_delay_s
        self._last_s = float("-inf")

    def holds(self, new: int, now_s: float) -> bool:
        """Return whether a batch of `new` messages must wait; if not, it counts as begun now.

        The first batch of a run does not wait.
        """
        if new < self._least and now_s - self._last_s < self._max_delay_s:
            return True
        self._last_s = now_s
        return False


# -- the ends of the queues ------------------------------------------------------------------------

AGE_FACTOR = 20.0  # a look is repeated after 20 times its own duration: 5 % of the time
AGE_MAX_MS = 500.0


class Ends:
    """The places at which the selected queues end, as of the last look.

    Spark asks an idle query about 80 times a second.
    """

    def __init__(self, head: Head, strategy: Strategy, clock: Clock = SYSTEM_CLOCK) -> None:
        self._head = head
        self._strategy = strategy
        self._clock = clock
        self._looked_ms = float("-inf")
        self._took_ms: list[float] = []
        self._token: object = None
        # Places in the log under `_token`: the ends, and those that `verify` was asked for.
        self._valid: dict[TopicPartition, QueuePlace] = {}
        self._agreed: dict[TopicPartition, QueuePlace] = {}
        self.ranges: dict[TopicPartition, OffsetRange] = {}
        self.places: dict[TopicPartition, QueuePlace] = {}

    def look(self, *, now: bool = False) -> Places:
        """Return the readable ends; they are looked up again if they are too old, or if `now`."""
        began_ms = self._clock.monotonic_ms()
        # The first look connects and imports, so the shorter of the last two counts.
        age_ms = min(AGE_MAX_MS, AGE_FACTOR * min(self._took_ms[-2:], default=0.0))
        if not now and began_ms - self._looked_ms < age_ms:
            return self.places
        self.ranges = matching(self._strategy, self._head.available(_topics(self._strategy)))
        shorter = any(
            key in self._valid and span.end < self._valid[key].next
            for key, span in self.ranges.items()
        )
        if shorter or self._head.token() is None or self._head.token() != self._token:
            self._token = self._head.token()
            self._valid, self._agreed = {}, {}
            changed = {key: span.end for key, span in self.ranges.items()}
        else:
            changed = {
                key: span.end
                for key, span in self.ranges.items()
                if key not in self._valid or self._valid[key].next != span.end
            }
        lows = {
            key: self._valid[key].next
            if key in self._valid and self._valid[key].next < span.end
            else span.start
            for key, span in self.ranges.items()
        }
        found = self._head.locate(changed, lows)
        self.places = {
            key: found.get(key) or self._valid.get(key) or QueuePlace(span.start)
            for key, span in self.ranges.items()
        }
        self._valid = dict(self.places)
        self._looked_ms = self._clock.monotonic_ms()
        self._took_ms = [*self._took_ms[-1:], self._looked_ms - began_ms]
        return self.places

    def verify(self, places: Places) -> dict[TopicPartition, PlaceVerdict]:
        """Return how each place relates to the log; asks only for places that are not known."""
        asked = {
            key: place
            for key, place in places.items()
            if place not in (self._valid.get(key), self._agreed.get(key)) or self._token is None
        }
        verdicts = self._head.check(asked)
        self._agreed |= {
            key: verdict.common
            for key, verdict in verdicts.items()
            if verdict.standing is Standing.AGREED and not self._is_beyond(key, verdict.common)
        }
        return {
            key: verdicts.get(key) or PlaceVerdict(Standing.AGREED, place)
            for key, place in places.items()
        }

    def _is_beyond(self, key: TopicPartition, place: QueuePlace) -> bool:
        """Return whether a queue ends before a place: the record there is not compared yet."""
        there = self.ranges.get(key)
        return there is not None and there.end < place.next


def _topics(strategy: Strategy) -> Collection[str] | None:
    """Return the topics to ask for; None for all."""
    if isinstance(strategy, Subscribe):
        return strategy.topics
    if isinstance(strategy, Assign):
        return {key.topic for key in strategy.partitions}
    return None
