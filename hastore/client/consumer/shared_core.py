"""The core of consumers that share queues; `sharing` says which, `shared_fetcher` reads them.

A call's steps never call the listener: `poll` ends with an Event instead, the caller tells the
listener, which may use the consumer, and polls on. What it was told of is given back by the next
steps, after the positions are committed. What it was not told, because that was interrupted or
cancelled, is an Event of the next poll again.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hastore.client.arguments import (
    MAX_INT32,
    MAX_INT64,
    flag,
    integer,
    moment_ms,
    number,
    refusal,
    text,
    waiting_time,
)
from hastore.client.connections.calls import Core
from hastore.client.connections.requester import (
    ClosedMeanwhile,
    Requester,
    Silence,
    Steps,
    expect,
)
from hastore.client.consumer.beginnings import Beginnings
from hastore.client.consumer.consumer_core import (
    MAX_GROUP,
    ReadOptions,
    ask_until_taken,
    check_committed,
    check_stored,
    commit_parts,
    commit_wait_ms,
    find_time,
    place_of_time,
    position_of,
)
from hastore.client.consumer.fetcher import QueueReader
from hastore.client.consumer.shared_fetcher import SharedFetcher, SharedQueue
from hastore.client.consumer.sharing import REVOKED, Event, Sharing, first_names
from hastore.client.consumer.subscription import (
    RebalanceListener,
    TopicQueue,
    Wanted,
    wanted_of,
)
from hastore.client.messages import Message, Position
from hastore.clock import Clock
from hastore.errors import FencedError, HastoreError, OutcomeUnknown, UsageError
from hastore.heap import keep_freed
from hastore.protocol import api
from hastore.record.delays import MAX_LEVELS, RETRY_PREFIX

log = logging.getLogger(__name__)

AUTO_COMMIT_S = 1.0  # for a commit that nobody waits for
RETRY_S = 0.05

Moves = list[tuple[QueueReader, Position | Message]]
Places = dict[TopicQueue, Position]


class SharedReading(NamedTuple):
    """The checked arguments of a consumer that shares queues; see `make_shared_reading`."""

    wanted: Wanted
    group: str
    auto_commit_s: float | None
    options: ReadOptions


class Polling(NamedTuple):
    """The checked arguments of a `poll`, and when it is over."""

    max_messages: int
    deadline_ms: float


class SharedCore(Core):
    """Read the queues that are this member's, and commit positions.

    A `poll` or a seek moves positions; as with `ConsumerCore`, the caller makes the move final by
    setting `mover.undo` to None.
    """

    def __init__(self, requester: Requester, clock: Clock, reading: SharedReading) -> None:
        """Prepare to join the group."""
        super().__init__(requester)
        options = reading.options
        self.wanted = reading.wanted
        self.group = reading.group
        self.timeout_s = options.timeout_s
        self._auto_commit_s = reading.auto_commit_s
        # Not at once: whether a first poll has a master yet, and commits, is a matter of chance.
        self._next_commit_ms = clock.monotonic_ms() + (reading.auto_commit_s or 0.0) * 1000.0
        self._clock = clock
        token = secrets.randbits(63)
        self._beginnings: Beginnings | None = None
        if options.start == "latest":
            self._beginnings = Beginnings(requester, reading.group)
        self.sharing = Sharing(
            requester, clock, reading.wanted, reading.group, member_id(token), token, self._begin,
            self._beginnings,
        )  # fmt: skip
        self.mover = self.fetcher = self.sharing.fetcher = SharedFetcher(
            requester, clock, self.sharing.on_arrival,
            max_bytes=options.max_bytes, prefetch_bytes=options.prefetch_bytes,
            prefer_master=options.read_from == "master", on_lost=options.on_lost,
            wanted=options.wanted,
        )  # fmt: skip
        self._silence = Silence(requester, f"consumer of {reading.wanted}")
        # Of the last poll: what it has moved. A seek has moved those in `fetcher.sought` since.
        self._moves: Moves = []
        self._begun: Places = {}  # where it began, with start="latest": to be committed
        self._fails = False  # the last commit that nobody asked for
        self.calls = 0  # of the listener, under way; the caller counts them
        self._told: list[TopicQueue] = []  # revoked, and the listener was told
        self.stops = False  # `close` was called: a poll under way returns
        keep_freed(options.prefetch_bytes)

    # -- calls

    def begin_call(self) -> None:
        """Begin a call. If the last call was interrupted, its moves are undone."""
        if self.fetcher.undo is not None:
            self.recover()
        self.fetcher.settle()
        super().begin_call()

    def recover(self) -> None:
        """Return to the positions after the last completed call, and fetch from there."""
        self.fetcher.recover()
        self.sharing.recover()
        super().recover()

    def polling(self, max_messages: int, timeout_s: float) -> Polling:
        """Check the arguments of a `poll` that begins now."""
        max_messages = integer("max_messages", max_messages, 1, MAX_INT64)
        deadline = self.requester.deadline(waiting_time("timeout_s", timeout_s))
        return Polling(max_messages, deadline)

    def poll(self, asked: Polling, *, first: bool) -> Steps[list[Message] | Event]:
        """Take available messages, or return what the listener must be told first.

        It is called again after that and `told`, not as the `first` time. Returns [] if the time
        is over.
        """
        requester, fetcher, sharing = self.requester, self.fetcher, self.sharing
        try:
            self._hear_moves()
            yield from self._give_told()
            if first:
                self._moves = []  # what earlier polls have returned is processed by now
                yield from self._commit_sometimes()
            fetcher.pump()
            while not self.stops:
                wait_s = self._tend() / 1000.0
                event = sharing.take_event(self.calls)
                if event is not None:
                    return event
                if self._begun:
                    yield from self._commit_begun()
                if messages := fetcher.take_messages(asked.max_messages):
                    self._moves = fetcher.undo or []
                    fetcher.sought.clear()
                    return messages
                left_s = requester.left_s(asked.deadline_ms)
                if left_s <= 0.0:
                    break
                yield from fetcher.step(min(left_s, wait_s))
                self._silence.look()
        except ClosedMeanwhile:
            pass
        return []

    def told(self, event: Event) -> None:
        """Go on after the listener was told, or has raised an exception of its own."""
        if event.kind == REVOKED:
            self._told = [*self._told, *event.queues]
        self.sharing.told(event)

    @property
    def is_cut(self) -> bool:
        """Whether the last call was interrupted, so that the next one undoes what it has moved."""
        return self._in_call or self.fetcher.undo is not None

    def positions(self) -> Steps[Places]:
        """Return the position in each queue that is this member's."""
        self._tend()
        yield from ()
        return {name: queue.next for name, queue in self.fetcher.mine.items()}

    def position(self, name: object) -> Steps[Position]:
        """Return the position in a queue."""
        yield from ()
        return self._one(name).next

    def seek(self, name: object, position: int | Position) -> Steps[None]:
        """Continue at a queue offset, or at a Position that the caller has kept."""
        place = position_of("position", position)
        queue = self._one(name)
        yield from ()
        self._seek({queue.name: place})

    def seek_to_ends(self, which: int) -> Steps[None]:
        """Continue at the first message that exists (0) or after the last (1), in every queue."""
        ranges = yield from self._ranges()
        self._seek({name: Position(ends[which]) for name, ends in ranges.items()})

    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at the first message stored at or after a time."""
        at_ms = moment_ms("timestamp_ms", timestamp_ms, round_up=True)
        deadline = self.requester.deadline(self.timeout_s)
        places = {}
        for name in list(self.fetcher.mine):
            reply = yield from self._ask_master(find_time(*name, at_ms), deadline)
            places[name] = place_of_time(*name, reply)
        self._seek(places)

    def commit(self) -> Steps[None]:
        """Commit the positions of the queues that are this member's."""
        self._hear_moves()
        self._refuse_lost()
        deadline = self.requester.deadline(self.timeout_s)
        places = {name: queue.next for name, queue in self.fetcher.mine.items()}
        yield from self._commit(places, deadline)
        self._moves = []

    def send_back(
        self, message: object, delay_level: object, max_attempts: object, *, dead: object
    ) -> Steps[None]:
        """Have the master put a message again, for this group."""
        if not isinstance(message, Message):
            raise refusal("message", message, "a Message that a consumer has returned")
        level = 0 if delay_level is None else integer("delay_level", delay_level, 1, MAX_LEVELS)
        if flag("dead_letter", dead):
            if delay_level is not None:
                raise UsageError("delay_level: a dead letter is not delivered again; give only "
                                 "dead_letter=True")  # fmt: skip
            level = -1
        if max_attempts is not None:
            max_attempts = integer("max_attempts", max_attempts, 0, MAX_INT32)
        most, deadline = max_attempts, self.requester.deadline(self.timeout_s)
        topic = message.topic
        place = topic, message.queue_id, message.queue_offset, message.offset, message.epoch

        def make(rid: int) -> api.Request:
            # All of the time: what is not confirmed by then the caller would send once more.
            wait_ms = int(min(max(1.0, self.requester.left_s(deadline) * 1000.0), api.MAX_WAIT_MS))
            return api.SendBack(rid, self.group, *place, level, most, wait_ms)

        check_stored((yield from self._ask_master(make, deadline)), topic)

    def committed(self) -> Steps[Places]:
        """Return the group's committed positions in all topics that it reads."""
        deadline = self.requester.deadline(self.timeout_s)
        joined = self.sharing.joined
        retries = RETRY_PREFIX + self.group
        topics = {*self.wanted.names, retries} if joined is None else set(joined.topics)
        if self.wanted.has_patterns:  # the membership may not know yet what they match
            reply = yield from self._ask_master(api.AskConfigs, deadline)
            configs = expect(api.Configs, reply).topics
            topics.update(one.name for one in configs if self.wanted.matches(one.name))
        found = {}
        for topic in sorted(topics):
            reply = yield from self._ask_master(_fetch(self.group, topic), deadline)
            if topic == retries and isinstance(reply, api.Failed):
                if reply.status == api.Status.FORBIDDEN:  # nor does this member read them
                    continue
            for queue, place in expect(api.Positions, reply).positions.items():
                found[TopicQueue(topic, queue)] = place
        return found

    def end_offsets(self) -> Steps[dict[TopicQueue, int]]:
        """Return the end of each queue that is this member's."""
        ranges = yield from self._ranges()
        return {name: ends[1] for name, ends in ranges.items()}

    def lag(self) -> Steps[dict[TopicQueue, int]]:
        """Return how many messages are left in each queue that is this member's."""
        ranges = yield from self._ranges()
        mine = self.fetcher.mine
        return {
            name: max(0, ends[1] - mine[name].next.queue_offset)
            for name, ends in ranges.items()
            if name in mine
        }

    def pause(self, names: Iterable[object] | None, *, paused: bool) -> Steps[None]:
        """Return no messages of these queues, or of all; or return them again."""
        queues = list(self.fetcher.mine.values()) if names is None else [
            self._one(name) for name in _names(names)
        ]  # fmt: skip
        yield from ()
        for queue in queues:
            queue.is_paused = paused

    def stop(self) -> None:
        """Let polls return, since `close` was called."""
        self.stops = True
        self.requester.transport.wake()

    def leave(self, *, all_done: bool, deadline: float | None = None) -> Steps[None]:
        """Commit what was processed if that is wanted, and give all locks back.

        Unless `all_done`, the messages of the last poll were not processed. Ends at the deadline,
        without one after `timeout_s`.
        """
        if deadline is None:
            deadline = self.requester.deadline(self.timeout_s)
        self._hear_moves()
        names = self.sharing.revoke_all()
        if self._auto_commit_s is not None:
            yield from self._commit_quietly(self._processed(all_done), deadline)
        self.sharing.leave()
        self.sharing.give_back(names)
        while self.sharing.is_giving:
            self.sharing.advance()  # also at the deadline: locks are given back, or expire
            self.sharing.raise_failure()
            left_s = self.requester.left_s(deadline)
            if left_s <= 0.0:
                return
            yield from self.fetcher.step(min(RETRY_S, left_s))

    # -- internal

    def _tend(self) -> float:
        """Go on with the membership; return the ms until there is something to do for it."""
        wait_ms = self.sharing.advance()
        self.sharing.raise_failure()
        self._go_where_moved()
        return wait_ms

    def _go_where_moved(self) -> None:
        """Go on where an administrator has moved the group."""
        moved, self.sharing.moved = self.sharing.moved, {}
        for name, offset in moved.items():
            queue = self.fetcher.mine.get(name)
            if queue is not None:
                self.fetcher.sought.add(queue.key)
                queue.seek(Position(offset))
                queue.kept = offset

    def _hear_moves(self) -> None:
        """Take what has arrived: a commit must not undo what an administrator has moved."""
        self.requester.collect()
        self._go_where_moved()

    def _give_told(self) -> Steps[None]:
        """Commit, if that is wanted, and give back what the listener was told of."""
        if not self._told:
            return
        if self._auto_commit_s is not None:
            deadline = self.requester.deadline(self.timeout_s)
            wanted = {name: queue.next for name in self._told
                      if (queue := self.fetcher.mine.get(name)) is not None}  # fmt: skip
            yield from self._commit_quietly(wanted, deadline)
        self.sharing.give_back(self._told)
        self._told = []  # last: after an interrupt before it, it is done again

    def _begin(self, name: TopicQueue, place: api.Place) -> Position:
        """Return where to begin in a queue that was assigned."""
        if place.position is not None:
            return place.position
        if self._beginnings is None:
            return Position(place.first)
        self._begun[name] = Position(place.end if self._beginnings.is_at_end(name) else place.first)
        return self._begun[name]

    def _commit_begun(self) -> Steps[None]:
        """Commit where reading has begun with start="latest": a later owner skips nothing then."""
        deadline = self.requester.deadline(AUTO_COMMIT_S)
        self._drop_committed()  # by the caller, who is further on
        yield from self._commit_quietly(self._begun, deadline)
        self._drop_committed()  # what failed is tried again

    def _drop_committed(self) -> None:
        """Leave in `_begun` only queues in which the group has no position yet."""
        mine = self.fetcher.mine
        self._begun = {
            name: place for name, place in self._begun.items()
            if name in mine and mine[name].kept is None
        }  # fmt: skip

    def _commit_sometimes(self) -> Steps[None]:
        """Commit what earlier calls have returned, if it is time."""
        if self._auto_commit_s is None:
            return
        now = self._clock.monotonic_ms()
        if now < self._next_commit_ms or self.requester.cluster.master is None:
            return
        self._next_commit_ms = now + self._auto_commit_s * 1000.0
        deadline = self.requester.deadline(AUTO_COMMIT_S)
        yield from self._commit_quietly(self._processed(all_done=True), deadline)

    def _processed(self, all_done: bool) -> Places:
        """Return the positions up to which messages are processed.

        Unless `all_done`, those of the last poll are not, if nothing has moved the queue since.
        """
        places = {name: queue.next for name, queue in self.fetcher.mine.items()}
        if not all_done:
            for queue, stand in reversed(self._moves):
                assert isinstance(queue, SharedQueue)
                is_own = self.fetcher.mine.get(queue.name) is queue
                if is_own and queue.key not in self.fetcher.sought:
                    before = stand.next_position if isinstance(stand, Message) else stand
                    places[queue.name] = before
        return places

    def _refuse_lost(self) -> None:
        """Raise FencedError if queues were lost with what was read there, and nobody knows yet."""
        lost = self.sharing.lost_untold(self.calls)
        if lost:
            raise FencedError(
                f"in the group {self.group!r} {self.sharing.member} lost {first_names(lost)} before"
                " it had committed what it has read there: that comes again, perhaps to another"
                " member; nothing was committed; poll before the next commit"
            )

    def _commit_quietly(self, places: Places, deadline: float) -> Steps[None]:
        """Commit; a failure is logged, and what was not committed is consumed again."""
        try:
            yield from self._commit(places, deadline)
            self._fails = False
        except ClosedMeanwhile:
            raise
        except HastoreError as failure:
            if not self._fails:  # once, until a commit succeeds
                log.warning("group %s: not committed: %s", self.group, failure)
            self._fails = True

    def _commit(self, places: Places, deadline: float) -> Steps[None]:
        """Commit what differs from what the group has, topic by topic."""
        by_topic: dict[str, dict[int, Position]] = {}
        for name, place in places.items():
            queue = self.fetcher.mine.get(name)
            if queue is not None and (queue.is_unsure or queue.kept != place.queue_offset):
                by_topic.setdefault(name.topic, {})[name.queue_id] = place
        for topic, of_topic in sorted(by_topic.items()):
            for part in commit_parts(of_topic):
                yield from self._commit_one(topic, part, deadline)

    def _commit_one(self, topic: str, places: dict[int, Position], deadline: float) -> Steps[None]:
        group, member = self.group, self.sharing.member
        wait_ms = commit_wait_ms(self.requester.left_s(deadline))

        def make(rid: int) -> api.Request:
            # Its owner may move a group back: the lock says whose the queues are.
            return api.Commit(rid, group, topic, places, wait_ms, sorted(places), member)

        mine = self.fetcher.mine
        for queue_id in places:
            queue = mine.get(TopicQueue(topic, queue_id))
            if queue is not None:
                queue.is_unsure = True  # before it is sent: the call may end without an answer
        try:
            reply = yield from self._ask_master(make, deadline)
        except OutcomeUnknown:
            self.sharing.renew_now()  # the last attempt may have been fenced
            raise
        if isinstance(reply, api.Failed) and reply.status == api.FENCED:
            self.sharing.renew_now()
            raise FencedError(f"{reply.reason}; nothing was committed")
        check_committed(reply)
        for queue_id, place in places.items():
            name = TopicQueue(topic, queue_id)
            queue = mine.get(name)
            if queue is not None:
                queue.kept = place.queue_offset
                queue.is_unsure = name in self.sharing.moved  # before this commit, or after it?
            lost = self.sharing.lost.get(name)
            if lost is not None and lost.next.queue_offset == place.queue_offset:
                del self.sharing.lost[name]  # during this commit: the lock still counted

    def _ask_master(self, make: Callable[[int], api.Request], deadline: float) -> Steps[api.Reply]:
        """Ask the master, and again if it is too busy, until the deadline."""
        self.sharing.advance()
        return (yield from ask_until_taken(self.requester, make, deadline))

    def _ranges(self) -> Steps[dict[TopicQueue, tuple[int, int]]]:
        """Return the range of each queue that is this member's, as the master has it."""
        deadline = self.requester.deadline(self.timeout_s)
        found = {}
        for topic in sorted({name.topic for name in self.fetcher.mine}):
            reply = yield from self._ask_master(_ask_topic(topic), deadline)
            known = expect(api.Topics, reply).topics.get(topic, {})
            for name in list(self.fetcher.mine):
                if name.topic == topic:
                    found[name] = known.get(name.queue_id, (0, 0))
        return found

    def _seek(self, places: Mapping[TopicQueue, Position]) -> None:
        mine = self.fetcher.mine
        self.fetcher.seek({mine[name].handle: at for name, at in places.items() if name in mine})
        # Reading begins there now, not at the end: a later owner would skip what lies between.
        self._begun.update((name, at) for name, at in places.items() if name in self._begun)

    def _one(self, name: object) -> SharedQueue:
        """Return a queue that is this member's."""
        wanted = _name(name)
        queue = self.fetcher.mine.get(wanted)
        if queue is None:
            raise UsageError(
                f"queue {wanted.queue_id} of topic {wanted.topic} is not this member's now; "
                "`assignment` says which are"
            )
        return queue


def member_id(token: int) -> str:
    """Return a member's id: of the form of RocketMQ's clients, and no other member's."""
    return f"{socket.gethostname()[:100]}@{os.getpid()}#{token:016x}"


def make_shared_reading(
    topic: object,
    group: object,
    queues: object,
    listener: object,
    auto_commit_s: object,
    options: ReadOptions,
) -> SharedReading:
    """Check the other arguments of a consumer that shares queues; raises UsageError."""
    if group is None:
        raise UsageError("share=True needs a group: its members share the queues")
    if queues is not None:
        raise UsageError("queues: with share=True the members' queues follow from who is in the "
                         "group; leave `queues` out, or `share`")  # fmt: skip
    if listener is not None and not isinstance(listener, RebalanceListener):
        raise refusal("listener", listener, "a RebalanceListener")
    return SharedReading(
        wanted_of(topic),
        text("group", group, MAX_GROUP),
        None if auto_commit_s is None else number("auto_commit_s", auto_commit_s),
        options,
    )


def _name(given: object) -> TopicQueue:
    if not isinstance(given, tuple) or len(given) != 2:
        raise refusal("queue", given, "a TopicQueue(topic, queue)")
    return TopicQueue(text("queue", given[0]), integer("queue", given[1], 0, MAX_INT32))


def _names(given: object) -> list[TopicQueue]:
    if isinstance(given, TopicQueue):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return [_name(one) for one in given]
    raise refusal("queues", given, "TopicQueues")


def _ask_topic(topic: str) -> Callable[[int], api.Request]:
    return lambda rid: api.AskTopics(rid, topic)


def _fetch(group: str, topic: str) -> Callable[[int], api.Request]:
    return lambda rid: api.Fetch(rid, group, topic)
