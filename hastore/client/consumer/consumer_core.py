"""The core of hastore.Consumer and hastore.aio.Consumer: reads a topic in steps, never blocks."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeGuard

from hastore.client.arguments import (
    MAX_INT32,
    MAX_INT64,
    check_clock,
    integer,
    moment_ms,
    one_of,
    queue_ids,
    refusal,
    seconds,
    text,
    waiting_time,
)
from hastore.client.connections.calls import Core
from hastore.client.connections.requester import (
    ClosedMeanwhile,
    Requester,
    Result,
    Silence,
    Steps,
    expect,
)
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.fetcher import ON_LOST, Fetcher, QueueReader
from hastore.client.consumer.new_queues import NewQueues
from hastore.client.messages import Message, Position, SendResult, Status, failure_of
from hastore.clock import Clock
from hastore.errors import ClientError, NotStoredError, UnreachableError, UsageError
from hastore.heap import keep_freed
from hastore.protocol import api
from hastore.record.message_filter import MAX_EXPRESSION, make_filter

log = logging.getLogger(__name__)

Start = Literal["earliest", "latest"]
OnLost = Literal["raise", "earliest", "latest", "common"]
ReadFrom = Literal["slaves", "master"]
STARTS = ("earliest", "latest")
READ_FROM = ("slaves", "master")
MAX_GROUP = 255  # characters
COMMIT_QUEUES = 1_000  # in a request; a node takes 1,024 of a topic's up to 4,096
POLL_S = 1.0  # how often an iteration checks whether the client is closed
PAUSE_S = 0.05  # before the queues are looked for again
NAMED = 8  # queues in a text
NO_QUEUES_S = 1.0  # the same, if the topic has none for consumers


class ReadOptions(NamedTuple):
    """Those of a consumer's checked arguments that say how it reads; see `make_read_options`."""

    start: str
    on_lost: str
    read_from: str
    max_bytes: int
    prefetch_bytes: int
    timeout_s: float
    wanted: api.Filter | None = None


class Reading(NamedTuple):
    """A consumer's checked arguments; see `make_reading`."""

    topic: str
    group: str | None
    queues: tuple[int, ...] | None
    options: ReadOptions


class ConsumerCore(Core):
    """Read messages and commit positions.

    A `poll` or a seek moves positions. The caller makes the move final by setting `mover.undo` to
    None, as its last step before it returns. If a call is interrupted before that, the next call
    undoes the move.
    """

    def __init__(self, requester: Requester, clock: Clock, reading: Reading) -> None:
        """Prepare to read."""
        super().__init__(requester)
        options = reading.options
        self.topic = reading.topic
        self.group = reading.group
        self._start = options.start
        self._wanted = reading.queues
        self._timeout_s = options.timeout_s
        # The steps of `_prepare` while they are under way, how long they want to wait, and why the
        # last ones failed: a call that ends before them leaves the rest to the next call.
        self._preparing: Steps[None] | None = None
        self._preparing_wait_s = 0.0
        self._not_prepared: ClientError | None = None
        self._lacks_master = False  # and has said so
        self._silence = Silence(requester, f"consumer of {reading.topic}")
        self._new_queues: NewQueues | None = None  # once the queues are found: if it reads all
        self._clock = clock
        self._prepared_of: api.Topics | None = None  # the topic, until a poll has looked at it
        self.mover = self.fetcher = Fetcher(
            requester,
            reading.topic,
            clock,
            max_bytes=options.max_bytes,
            prefetch_bytes=options.prefetch_bytes,
            prefer_master=options.read_from == "master",
            on_lost=options.on_lost,
            wanted=options.wanted,
            first_on_arrival=self._on_arrival,
        )
        keep_freed(options.prefetch_bytes)

    def begin_call(self) -> None:
        """Begin a call. If the last call was interrupted, its moves are undone."""
        if self.fetcher.undo is not None:
            self.recover()
        if self.fetcher.seeking:
            self.fetcher.settle()
        super().begin_call()

    def recover(self) -> None:
        """Return to the positions after the last completed call, and fetch from there."""
        self._preparing = None
        self.fetcher.recover()
        super().recover()

    def poll(self, max_messages: int, timeout_s: float) -> Steps[list[Message]]:
        """Take available messages; return [] if the time is over first or the client is closed."""
        max_messages = integer("max_messages", max_messages, 1, MAX_INT64)
        timeout_s = waiting_time("timeout_s", timeout_s)
        found = yield from self._look(lambda: self.fetcher.take_messages(max_messages), timeout_s)
        return found or []

    def ready(self, timeout_s: float) -> Steps[QueueReader | None]:
        """Return a queue that has messages, without taking any; None if `poll` would return []."""
        return (yield from self._look(self.fetcher.find_ready, timeout_s))

    def positions(self) -> Steps[dict[int, Position]]:
        """Return the position in each queue."""
        yield from self._prepared(self._deadline())
        return self._positions()

    def position(self, queue_id: int) -> Steps[Position]:
        """Return the position in a queue."""
        return (yield from self._queue(integer("queue", queue_id, 0, MAX_INT32))).next

    def seek(self, queue_id: int, position: int | Position) -> Steps[None]:
        """Continue at a queue offset, or at a Position that the caller has kept."""
        place = position_of("position", position)
        queue_id = integer("queue", queue_id, 0, MAX_INT32)
        yield from self._queue(queue_id)
        self.fetcher.seek({queue_id: place})

    def seek_to_ends(self, which: int) -> Steps[None]:
        """Continue at the first message that exists (0) or after the last (1), in every queue."""
        deadline = self._deadline()
        yield from self._prepared(deadline)
        ranges = yield from self._ranges_now(deadline)
        self.fetcher.seek({queue_id: Position(ends[which]) for queue_id, ends in ranges.items()})

    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at the first message stored at or after a time.

        If the node has cut its search short, a message before that one, and a log line says so.
        """
        timestamp_ms = moment_ms("timestamp_ms", timestamp_ms, round_up=True)
        deadline = self._deadline()
        yield from self._prepared(deadline)
        order = yield from self._survey(deadline)
        places = {}
        for queue_id in self.fetcher.queues:
            find = partial(self._place_of_time, queue_id, timestamp_ms, order, deadline)
            places[queue_id] = yield from self._until_taken(find, deadline)
        self.fetcher.seek(places)

    def end_offsets(self) -> Steps[dict[int, int]]:
        """Return the end of each queue, as the master has it."""
        deadline = self._deadline()
        yield from self._prepared(deadline)
        ranges = yield from self._ranges_now(deadline)
        return {queue_id: ends[1] for queue_id, ends in ranges.items()}

    def lag(self) -> Steps[dict[int, int]]:
        """Return how many messages are left in each queue."""
        ends = yield from self.end_offsets()
        queues = self.fetcher.queues
        return {
            queue_id: max(0, end - queues[queue_id].next.queue_offset)
            for queue_id, end in ends.items()
            if queue_id in queues
        }

    def readers(self, given: Sequence[int] | None) -> Steps[list[QueueReader]]:
        """Return the readers of these queues, or of all; raises UsageError for a queue not read."""
        queue_list = queue_ids("queues", given)
        yield from self._prepared(self._deadline())
        queues = self.fetcher.queues
        for queue_id in queue_list or ():
            if queue_id not in queues:
                raise UsageError(f"this consumer does not read queue {queue_id}")
        return [queues[queue_id] for queue_id in (queues if queue_list is None else queue_list)]

    def pause(self, given: Sequence[int] | None, *, paused: bool) -> Steps[None]:
        """Give no messages of these queues, or of all; or give them again."""
        for queue in (yield from self.readers(given)):
            if paused and not queue.is_paused:
                queue.seek(queue.next)  # an iteration has none left either
            queue.is_paused = paused

    def commit(self) -> Steps[None]:
        """Commit the positions; only queues that a seek or `on_lost` has moved may go back."""
        group = self._group()
        deadline = self._deadline()
        yield from self._prepared(deadline)
        for places in commit_parts(self._positions()):
            back = self.fetcher.sought & places.keys()
            left_s = self.requester.left_s(deadline)
            yield from commit_positions(self.requester, group, self.topic, places, left_s, back)
            self.fetcher.sought -= back  # part by part: what is confirmed may not go back again

    def committed(self) -> Steps[dict[int, Position]]:
        """Return the group's committed positions."""
        group, deadline = self._group(), self._deadline()
        self._preparing = None  # its answers would come to the steps below
        order = yield from self._survey(deadline)
        ask = partial(self._committed, group, order, deadline)
        return (yield from self._until_taken(ask, deadline))

    @property
    def is_preparing(self) -> bool:
        """Whether a call has left the search for the queues to the next one, with its answers."""
        return self._preparing is not None

    def forget_preparing(self) -> None:
        """Let the next call begin the search anew: its answers went elsewhere."""
        self._preparing = None

    # -- internal

    def _deadline(self) -> float:
        """Return when a call that begins now must end, in monotonic ms."""
        return self.requester.deadline(self._timeout_s)

    def _look(self, look: Callable[[], Result], timeout_s: float) -> Steps[Result | None]:
        """Call `look` until its result is not empty or the time is over; return its last result.

        Returns None if the queues were not found by then, or if the client is closed meanwhile.
        """
        requester, fetcher = self.requester, self.fetcher
        deadline = requester.deadline(timeout_s)
        try:
            if not fetcher.queues and not (yield from self._prepare_until(deadline)):
                return None
            if self._new_queues is not None:
                self._new_queues.look()
            self._warn_of_missing()
            fetcher.pump()
            while not (found := look()):
                if self._new_queues is not None:
                    self._new_queues.look()
                left = requester.left_s(deadline)
                yield from fetcher.step(left)
                self._silence.look()
                if left <= 0.0:
                    return look()
            return found
        except ClosedMeanwhile:
            return None

    def _positions(self) -> dict[int, Position]:
        return {queue_id: queue.next for queue_id, queue in self.fetcher.queues.items()}

    def _group(self) -> str:
        if not self.group:
            raise UsageError("a commit needs a group's name: give the consumer a group")
        return self.group

    def _queue(self, queue_id: int) -> Steps[QueueReader]:
        yield from self._prepared(self._deadline())
        found = self.fetcher.queues.get(queue_id)
        if found is None:
            raise UsageError(f"this consumer does not read queue {queue_id}")
        return found

    def _prepared(self, deadline: float) -> Steps[None]:
        """Find the queues and positions if that is not done; raises UnreachableError if too late.

        The caller has computed `deadline` with `self._deadline`.
        """
        if not self.fetcher.queues and not (yield from self._prepare_until(deadline)):
            within = f"within {self._timeout_s:g} s"
            raise self._not_prepared or UnreachableError(self.requester.cluster.silence(within))

    def _prepare_until(self, deadline: float) -> Steps[bool]:
        """Go on with `_prepare` until it has ended or `deadline` is over; return whether it has.

        A short `poll` thus keeps its timeout, and a row of them gets as far as one long call. When
        the preparation fails because no node answers, or one is too busy, it begins again.
        """
        requester = self.requester
        arrivals: list[Arrival] = []
        while not self.fetcher.queues:
            left_s = requester.left_s(deadline)
            if self._preparing is None:
                self._preparing = self._prepare()
                self._preparing_wait_s = self._go_on(None)
                continue
            arrivals = yield min(self._preparing_wait_s, left_s, POLL_S)
            self._preparing_wait_s = self._go_on(arrivals)
            self._silence.look()
            if left_s <= 0.0:
                break
        return bool(self.fetcher.queues)

    def _go_on(self, arrivals: list[Arrival] | None) -> float:
        """Let `_prepare` take its next step; return the seconds that it wants to wait at most."""
        steps = self._preparing
        assert steps is not None
        try:
            return next(steps) if arrivals is None else steps.send(arrivals)
        except StopIteration:
            self._preparing = self._not_prepared = None
            return 0.0
        except BaseException as failure:
            self._preparing = None
            if not _is_for_now(failure):
                raise
            self._not_prepared = failure
        self._preparing = self._after_pause()
        return next(self._preparing)

    def _after_pause(self) -> Steps[None]:
        """Prepare again, a little later: nodes that are down refuse at once."""
        yield from self.requester.pause(PAUSE_S)
        yield from self._prepare()

    def _prepare(self) -> Steps[None]:
        """Before the first use, find the queues and the start position in each."""
        deadline = self._deadline()
        order = yield from self._survey(deadline)
        topics = yield from self._topics(order, deadline)
        ranges = self._ranges_of(topics)
        committed: dict[int, Position] = {}
        if self.group:
            committed = yield from self._committed(self.group, order, deadline)
            if self._start == "latest" and not (committed.keys() & ranges.keys()):
                committed = yield from self._committed_by_master(self.group, deadline)
        readers = {}
        # If the group has a position here, the queues without one have come after it.
        at_end = self._start == "latest" and not (committed.keys() & ranges.keys())
        for queue_id, (first, end) in ranges.items():
            place = committed.get(queue_id, Position(end if at_end else first))
            readers[queue_id] = QueueReader(queue_id, place, place)
        if not readers:
            yield from self._without_queues()
        self._prepared_of = topics
        if self._wanted is None:
            self._new_queues = NewQueues(
                self.requester, self._clock, self.topic, self.group,
                lambda: self.fetcher.queues, self._adopt,
            )  # fmt: skip
        self.fetcher.queues = readers  # in one step: a call may be interrupted anywhere

    def _without_queues(self) -> Steps[None]:
        """Say once that there is no queue to read; raises, after a pause, UnreachableError."""
        failure = UnreachableError(
            f"topic {self.topic} has no queues that consumers read; an administrator gives it some:"
            f" hastore topics set {self.topic} --read-queues N"
        )
        if str(self._not_prepared) != str(failure):
            log.warning("%s", failure)
        self._not_prepared = failure
        yield from self.requester.pause(NO_QUEUES_S)
        raise failure

    def _warn_of_missing(self) -> None:
        """Say once that the topic or a queue does not exist: its name may be wrong."""
        topics, self._prepared_of = self._prepared_of, None
        if topics is None:
            return
        known = topics.topics.get(self.topic)
        count = max(topics.default_queues, max(known or (), default=-1) + 1)
        missing = [queue for queue in self._wanted or () if queue >= count]
        if known is None:
            log.warning("topic %s does not exist yet; it is read once it does", self.topic)
        elif missing:
            names = ", ".join(map(str, missing[:NAMED]))
            log.warning(
                "topic %s has %d queues, not yet queue %s; that is read once it exists",
                self.topic, count, names,
            )  # fmt: skip

    def _on_arrival(self, arrival: Arrival) -> None:
        if self._new_queues is not None:
            self._new_queues.on_arrival(arrival)

    def _adopt(
        self, ranges: Mapping[int, tuple[int, int]], committed: Mapping[int, Position]
    ) -> None:
        """Read queues, too, that the topic got meanwhile, from where the group is, or the first."""
        queues = self.fetcher.queues
        new = sorted(ranges.keys() - queues.keys())
        if not new or not queues:
            return
        is_paused = all(queue.is_paused for queue in queues.values())
        more = {}
        for queue_id in new:
            place = committed.get(queue_id, Position(ranges[queue_id][0]))
            more[queue_id] = QueueReader(queue_id, place, place, is_paused=is_paused)
        self.fetcher.queues = queues | more  # another dict: a call may be in a loop over that one
        log.info("topic %s has %d more queues now; they are read, too", self.topic, len(new))

    def _topics(self, order: list[str], deadline: float) -> Steps[api.Topics]:
        reply, _ = yield from self.requester.ask_in_turn(
            order, lambda rid: api.AskTopics(rid, self.topic), deadline
        )
        return expect(api.Topics, reply)

    def _ranges_of(self, topics: api.Topics) -> dict[int, tuple[int, int]]:
        """Return the range of each queue that is wanted."""
        known = topics.topics.get(self.topic, {})
        wanted = self._wanted
        if wanted is None:
            wanted = tuple(range(max(topics.default_queues, max(known, default=-1) + 1)))
        return {queue_id: known.get(queue_id, (0, 0)) for queue_id in wanted}

    def _committed(
        self, group: str, order: list[str], deadline: float
    ) -> Steps[dict[int, Position]]:
        reply, _ = yield from self.requester.ask_in_turn(
            order, lambda rid: api.Fetch(rid, group, self.topic), deadline
        )
        return expect(api.Positions, reply).positions

    def _committed_by_master(self, group: str, deadline: float) -> Steps[dict[int, Position]]:
        """Return what the master knows: a slave that lags has no position of a group that has one.

        Reading would begin at the end then, and hide what lies before.
        """
        why = (
            f'start="latest": only the master can say that group {group} has no position yet in '
            f"topic {self.topic}"
        )
        if not self._lacks_master:
            self._not_prepared = UnreachableError(f"{why}, and no master has answered")
        try:
            reply, _ = yield from self.requester.ask_master(
                lambda rid: api.Fetch(rid, group, self.topic), self.requester.left_s(deadline)
            )
        except UnreachableError as failure:
            if not self._lacks_master:  # who polls hears nothing else
                self._lacks_master = True
                log.warning(
                    'start="latest" waits for the master, since only that can say that group %s '
                    "has no position yet in topic %s: %s",
                    group, self.topic, failure,
                )  # fmt: skip
            raise UnreachableError(f"{why}: {failure}") from failure
        self._lacks_master = False
        return expect(api.Positions, reply).positions

    def _ranges_now(self, deadline: float) -> Steps[dict[int, tuple[int, int]]]:
        order = yield from self._survey(deadline)
        ask = partial(self._topics, order, deadline)
        ranges = self._ranges_of((yield from self._until_taken(ask, deadline)))
        if self._wanted is None and ranges.keys() - self.fetcher.queues.keys():
            committed: dict[int, Position] = {}
            if self.group:
                get = partial(self._committed, self.group, order, deadline)
                committed = yield from self._until_taken(get, deadline)
            self._adopt(ranges, committed)
        return ranges

    def _place_of_time(
        self, queue_id: int, timestamp_ms: int, order: list[str], deadline: float
    ) -> Steps[Position]:
        reply, _ = yield from self.requester.ask_in_turn(
            order, find_time(self.topic, queue_id, timestamp_ms), deadline
        )
        return place_of_time(self.topic, queue_id, reply)

    def _until_taken(self, ask: Callable[[], Steps[Result]], deadline: float) -> Steps[Result]:
        """Ask, and again while the node is too busy, until the deadline."""
        while True:
            try:
                return (yield from ask())
            except NotStoredError as failure:
                if not _is_for_now(failure) or self.requester.left_s(deadline) <= 2.0 * PAUSE_S:
                    raise
            yield from self.requester.pause(PAUSE_S)

    def _survey(self, deadline: float) -> Steps[list[str]]:
        """Return the nodes to ask: the master, then those with the greatest readable offsets."""
        return (yield from self.requester.survey_in_order(deadline))


def _is_for_now(failure: BaseException) -> TypeGuard[ClientError]:
    """Whether a question may be answered a little later."""
    is_busy = isinstance(failure, NotStoredError) and failure.status == Status.BUSY
    return is_busy or isinstance(failure, UnreachableError)


def make_reading(
    topic: object, group: str | None, queues: Sequence[int] | None, options: ReadOptions
) -> Reading:
    """Check the other arguments of a consumer and return all; raises UsageError."""
    return Reading(
        text("topic", topic),
        None if group is None else text("group", group, MAX_GROUP),
        queue_ids("queues", queues),
        options,
    )


def make_read_options(
    *,
    start: Start,
    on_lost: OnLost,
    read_from: ReadFrom,
    max_bytes: int,
    prefetch_bytes: int,
    timeout_s: float,
    clock: Clock,
    tags: str | None = None,
    sql: str | None = None,
) -> ReadOptions:
    """Check the arguments of any consumer that say how it reads; raises UsageError."""
    check_clock("clock", clock)
    return ReadOptions(
        one_of("start", start, STARTS),
        one_of("on_lost", on_lost, ON_LOST),
        one_of("read_from", read_from, READ_FROM),
        integer("max_bytes", max_bytes, 1, api.MAX_FRAME_BYTES),
        integer("prefetch_bytes", prefetch_bytes, 0, MAX_INT64),
        seconds("timeout_s", timeout_s),
        filter_of(tags, sql),
    )


def filter_of(tags: object, sql: object) -> api.Filter | None:
    """Return the filter of a consumer's arguments; None: all messages. Raises UsageError."""
    found = make_filter(
        None if tags is None else text("tags", tags, MAX_EXPRESSION),
        None if sql is None else text("sql", sql, MAX_EXPRESSION),
    )
    return None if found is None else api.Filter(found.kind, found.expression)


def commit_parts(places: dict[int, Position]) -> list[dict[int, Position]]:
    """Return positions in the parts that one request each can commit."""
    queues = sorted(places)
    return [
        {queue: places[queue] for queue in queues[begin : begin + COMMIT_QUEUES]}
        for begin in range(0, len(queues), COMMIT_QUEUES)
    ]


def commit_positions(
    requester: Requester,
    group: str,
    topic: str,
    positions: dict[int, Position],
    timeout_s: float,
    back: Collection[int] = (),
) -> Steps[None]:
    """Commit positions, as durable as any message; raises what Producer.send_sync would.

    Raises PositionBehindError if the group's position is ahead in a queue that is not in `back`.
    """
    wait_ms = commit_wait_ms(timeout_s)
    reply = yield from ask_until_taken(
        requester,
        lambda rid: api.Commit(rid, group, topic, positions, wait_ms, sorted(back)),
        requester.deadline(timeout_s),
    )
    check_committed(reply)


def ask_until_taken(
    requester: Requester, make: Callable[[int], api.Request], deadline: float
) -> Steps[api.Reply]:
    """Ask the master, and again if it is too busy, until the deadline."""
    while True:
        reply, _ = yield from requester.ask_master(make, requester.left_s(deadline))
        is_busy = isinstance(reply, api.Failed) and reply.status == Status.BUSY
        if not is_busy or requester.left_s(deadline) <= 2.0 * PAUSE_S:
            return reply
        yield from requester.pause(PAUSE_S)


def commit_wait_ms(timeout_s: float) -> int:
    """Return how long a node may take to confirm a commit."""
    return int(min(max(1.0, timeout_s * 1000.0), 3_000.0))


def check_committed(reply: api.Reply) -> None:
    """Raise what Producer.send_sync would, unless a commit was confirmed."""
    check_stored(reply, api.POSITIONS_TOPIC)


def check_stored(reply: api.Reply, topic: str) -> None:
    """Raise what Producer.send_sync would, unless a record of this topic's was confirmed."""
    done = expect(api.PutDone, reply)
    if done.status is not Status.PUT_OK:
        result = SendResult(done.status, topic, 0, done.level)
        raise failure_of(done.status, done.reason, result, unknown=False)


def position_of(name: str, given: object) -> Position:
    """Return a Position for a Position or a queue offset; raises UsageError for others."""
    if not isinstance(given, Position):
        try:
            return Position(integer(name, given, 0, MAX_INT64))
        except UsageError as failure:
            raise refusal(name, given, "a queue offset (an int from 0), or a Position") from failure
    integer(f"{name}.queue_offset", given.queue_offset, 0, MAX_INT64)
    for part, value in (("epoch", given.epoch), ("offset", given.offset)):
        if value is not None:
            integer(f"{name}.{part}", value, 0, MAX_INT64)
    return given


def find_time(topic: str, queue_id: int, timestamp_ms: int) -> Callable[[int], api.Request]:
    """Return the request for the first message of a queue stored at or after a time."""
    return lambda rid: api.FindTime(rid, topic, queue_id, timestamp_ms)


def place_of_time(topic: str, queue_id: int, reply: api.Reply) -> Position:
    """Return the answer to `find_time`; a log line says if the node has cut its search short."""
    if isinstance(reply, api.Failed) and reply.status == "NO_SUCH_QUEUE":
        return Position(0)
    found = expect(api.TimeFound, reply)
    if found.cut_short:
        log.warning(
            "the node has cut short its search for a time: queue %d of topic %s is read"
            " from queue offset %d on, which may be earlier than wanted",
            queue_id, topic, found.queue_offset,
        )  # fmt: skip
    return Position(found.queue_offset)
