"""The core of hastore.Consumer and hastore.aio.Consumer: reads a topic in steps, never blocks."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

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
    Answer,
    ClosedMeanwhile,
    Requester,
    Result,
    Steps,
    expect,
)
from hastore.client.consumer.fetcher import ON_LOST, Fetcher, QueueReader
from hastore.client.messages import Message, Position, SendResult, Status, failure_of
from hastore.clock import Clock
from hastore.errors import UnreachableError, UsageError
from hastore.heap import keep_freed
from hastore.protocol import api

Start = Literal["earliest", "latest"]
OnLost = Literal["raise", "earliest", "latest", "common"]
ReadFrom = Literal["slaves", "master"]
STARTS = ("earliest", "latest")
READ_FROM = ("slaves", "master")
MAX_GROUP = 255  # characters
POLL_S = 1.0  # how often an iteration checks whether the client is closed


class Reading(NamedTuple):
    """A consumer's checked arguments; see `make_reading`."""

    topic: str
    group: str | None
    queues: tuple[int, ...] | None
    start: str
    on_lost: str
    read_from: str
    max_bytes: int
    prefetch_bytes: int
    timeout_s: float


class ConsumerCore(Core):
    """Read messages and commit positions.

    A `poll` or a seek moves positions. The caller makes the move final by setting `mover.undo` to
    None, as its last step before it returns. If a call is interrupted before that, the next call
    undoes the move.
    """

    def __init__(self, requester: Requester, clock: Clock, reading: Reading) -> None:
        """Prepare to read."""
        super().__init__(requester)
        self.topic = reading.topic
        self.group = reading.group
        self._start = reading.start
        self._wanted = reading.queues
        self._timeout_s = reading.timeout_s
        self.mover = self.fetcher = Fetcher(
            requester,
            reading.topic,
            clock,
            max_bytes=reading.max_bytes,
            prefetch_bytes=reading.prefetch_bytes,
            prefer_master=reading.read_from == "master",
            on_lost=reading.on_lost,
        )
        keep_freed(reading.prefetch_bytes)

    def begin_call(self) -> None:
        """Begin a call. If the last call was interrupted, its moves are undone."""
        if self.fetcher.undo is not None:
            self.recover()
        if self.fetcher.seeking:
            self.fetcher.settle()
        super().begin_call()

    def recover(self) -> None:
        """Return to the positions after the last completed call, and fetch from there."""
        self.fetcher.recover()
        super().recover()

    def poll(self, max_messages: int, timeout_s: float) -> Steps[list[Message]]:
        """Take available messages; return [] if the time is over first or the client is closed."""
        max_messages = integer("max_messages", max_messages, 1, MAX_INT64)
        timeout_s = waiting_time("timeout_s", timeout_s)
        try:
            yield from self._prepare(timeout_s)
            found = yield from self._find(
                lambda: self.fetcher.take_messages(max_messages), timeout_s
            )
        except ClosedMeanwhile:
            return []
        return found or []

    def ready(self, timeout_s: float) -> Steps[QueueReader | None]:
        """Return a queue that has messages, without taking any; None if `poll` would return []."""
        try:
            yield from self._prepare(self._timeout_s)
            return (yield from self._find(self.fetcher.find_ready, timeout_s))
        except ClosedMeanwhile:
            return None

    def positions(self) -> Steps[dict[int, Position]]:
        """Return the position in each queue."""
        yield from self._prepare(self._timeout_s)
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
        yield from self._prepare(self._timeout_s)
        ranges = yield from self._ranges(self._timeout_s)
        self.fetcher.seek({queue_id: Position(ends[which]) for queue_id, ends in ranges.items()})

    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at the first message stored at or after a time."""
        timestamp_ms = moment_ms("timestamp_ms", timestamp_ms, round_up=True)
        yield from self._prepare(self._timeout_s)
        places = {}
        for queue_id in self.fetcher.queues:
            reply, _ = yield from self._ask(_find_time(self.topic, queue_id, timestamp_ms))
            if isinstance(reply, api.Failed) and reply.status == "NO_SUCH_QUEUE":
                places[queue_id] = Position(0)
            else:
                places[queue_id] = Position(expect(api.TimeFound, reply).queue_offset)
        self.fetcher.seek(places)

    def commit(self) -> Steps[None]:
        """Commit the positions; only queues that a seek or `on_lost` has moved may go back."""
        group = self._group()
        yield from self._prepare(self._timeout_s)
        places = self._positions()
        back = self.fetcher.sought & places.keys()
        yield from commit_positions(
            self.requester, group, self.topic, places, self._timeout_s, back
        )
        self.fetcher.sought -= back

    def committed(self) -> Steps[dict[int, Position]]:
        """Return the group's committed positions."""
        return (yield from self._committed(self._group()))

    # -- internal

    def _find(self, look: Callable[[], Result], timeout_s: float) -> Steps[Result]:
        """Call `look` until its result is not empty or the time is over; return its last result."""
        requester, fetcher = self.requester, self.fetcher
        deadline = requester.deadline(timeout_s)
        fetcher.pump()
        while not (found := look()):
            left = requester.left_s(deadline)
            yield from fetcher.step(left)
            if left <= 0.0:
                return look()
        return found

    def _positions(self) -> dict[int, Position]:
        return {queue_id: queue.next for queue_id, queue in self.fetcher.queues.items()}

    def _group(self) -> str:
        if not self.group:
            raise UsageError("a commit needs a group's name: give the consumer a group")
        return self.group

    def _queue(self, queue_id: int) -> Steps[QueueReader]:
        yield from self._prepare(self._timeout_s)
        found = self.fetcher.queues.get(queue_id)
        if found is None:
            raise UsageError(f"this consumer does not read queue {queue_id}")
        return found

    def _prepare(self, timeout_s: float) -> Steps[None]:
        """Before the first use, find the queues and the start position in each."""
        if self.fetcher.queues:
            return
        ranges = yield from self._ranges(max(timeout_s, self._timeout_s))
        committed = (yield from self._committed(self.group)) if self.group else {}
        readers = {}
        for queue_id, (first, end) in ranges.items():
            start = Position(first if self._start == "earliest" else end)
            place = committed.get(queue_id, start)
            readers[queue_id] = QueueReader(queue_id, place, place)
        self.fetcher.queues = readers  # in one step: a call may be interrupted anywhere

    def _ranges(self, timeout_s: float) -> Steps[dict[int, tuple[int, int]]]:
        reply, _ = yield from self._ask(lambda rid: api.AskTopics(rid, self.topic), timeout_s)
        topics = expect(api.Topics, reply)
        known = topics.topics.get(self.topic, {})
        wanted = self._wanted
        if wanted is None:
            wanted = tuple(range(max(topics.default_queues, max(known, default=-1) + 1)))
        return {queue_id: known.get(queue_id, (0, 0)) for queue_id in wanted}

    def _committed(self, group: str) -> Steps[dict[int, Position]]:
        reply, _ = yield from self._ask(lambda rid: api.Fetch(rid, group, self.topic))
        return expect(api.Positions, reply).positions

    def _ask(
        self, make: Callable[[int], api.Request], timeout_s: float | None = None
    ) -> Steps[Answer]:
        """Ask the master first, then the other replicas, the greatest readable offset first."""
        limit = self._timeout_s if timeout_s is None else timeout_s
        requester = self.requester
        yield from requester.survey(limit)
        maps = requester.cluster.maps
        order = sorted(maps, key=lambda a: (maps[a].writable, maps[a].readable_offset))
        failure: UnreachableError | None = None
        for address in reversed(order):
            try:
                return (yield from requester.ask(address, make, limit))
            except UnreachableError as unreachable:
                failure = unreachable
        raise failure or UnreachableError(requester.cluster.silence())


def make_reading(
    topic: str,
    *,
    group: str | None,
    queues: Sequence[int] | None,
    start: Start,
    on_lost: OnLost,
    read_from: ReadFrom,
    max_bytes: int,
    prefetch_bytes: int,
    timeout_s: float,
    clock: Clock,
) -> Reading:
    """Check a consumer's arguments and return them; raises UsageError."""
    check_clock("clock", clock)
    return Reading(
        text("topic", topic),
        None if group is None else text("group", group, MAX_GROUP),
        queue_ids("queues", queues),
        one_of("start", start, STARTS),
        one_of("on_lost", on_lost, ON_LOST),
        one_of("read_from", read_from, READ_FROM),
        integer("max_bytes", max_bytes, 1, api.MAX_FRAME_BYTES),
        integer("prefetch_bytes", prefetch_bytes, 0, MAX_INT64),
        seconds("timeout_s", timeout_s),
    )


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
    wait_ms = int(min(max(1.0, timeout_s * 1000.0), 3_000.0))
    reply, _ = yield from requester.ask_master(
        lambda rid: api.Commit(rid, group, topic, positions, wait_ms, sorted(back)), timeout_s
    )
    done = expect(api.PutDone, reply)
    if done.status is not Status.PUT_OK:
        result = SendResult(done.status, api.POSITIONS_TOPIC, 0, done.level)
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


def _find_time(topic: str, queue_id: int, timestamp_ms: int) -> Callable[[int], api.Request]:
    return lambda rid: api.FindTime(rid, topic, queue_id, timestamp_ms)
