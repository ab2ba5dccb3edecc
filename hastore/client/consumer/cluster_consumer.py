"""Read a topic over all groups of a cluster: a Consumer for each group, in one thread's turns.

    with Consumer("orders", "zk://127.0.0.1:2181/shop", group="billing") as consumer:
        for message in consumer.poll():
            print(message.cluster_group, message.queue_id, message.body)
        consumer.commit()

The steps of all groups' cores go on together, and wait together: the descriptors of their
connections are in one epoll. So a group that is silent or slow holds up no other.
"""

from __future__ import annotations

import datetime
import itertools
import logging
import select
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from hastore.client.arguments import MAX_INT32, MAX_INT64, integer, refusal, waiting_time
from hastore.client.connections.bootstrap import cluster_of, parse_bootstrap
from hastore.client.connections.calls import Blocking, ClientCall, Core
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.cluster_groups import ClusterGroups
from hastore.client.connections.requester import ClosedMeanwhile, Requester, Result, Steps
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.consumer import Consumer, check_unshared
from hastore.client.consumer.consumer_core import (
    POLL_S,
    ConsumerCore,
    OnLost,
    ReadFrom,
    Reading,
    Start,
    make_read_options,
    make_reading,
    position_of,
)
from hastore.client.consumer.fetcher import QueueReader
from hastore.client.consumer.subscription import RebalanceListener, Topics
from hastore.client.lifecycle import describe
from hastore.client.messages import Message, Position
from hastore.client.security import Security, SecurityLike, as_security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import HastoreError, PositionLostError, UnreachableError, UsageError

log = logging.getLogger(__name__)

Key = tuple[str, int]  # a group of the cluster, and one of its queues
LOOK_S = 0.05  # so often it is looked for a first group
NONE_MS = 3_000.0  # without any group a warning comes after this time
_ONE_GROUP = "consumer.in_group(NAME)"


class GroupsTransport(SocketTransport):
    """No connection of its own: waits until one of those of the groups has something."""

    def add(self, descriptor: int) -> None:
        """Wait for a group's connections, too."""
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove(self, descriptor: int) -> None:
        """Wait for them no more."""
        self._epoll.unregister(descriptor)

    def collect(self) -> list[Arrival]:
        """Return nothing: each group collects what is its own."""
        self._woken = False
        self._ready = []
        return []


class GroupConsumer(Consumer):
    """The Consumer of one group of a cluster; what its cluster's consumer has moved counts."""

    _prepare_call: Callable[[], None]

    def __init__(
        self,
        *,
        cluster: str,
        name: str,
        addresses: list[str],
        reading: Reading,
        security: Security | None,
        clock: Clock,
    ) -> None:
        """Start to connect; the arguments were checked for the cluster's consumer."""
        self._begin(parse_bootstrap(addresses), reading, security, clock, (cluster, name))

    def close(self) -> None:
        """Do nothing: the cluster's consumer reads by it, too, and closes it."""

    def _run(self, steps: Steps[Result]) -> Result:
        self._prepare_call()
        return super()._run(steps)


class _Member:
    """A group of the cluster, and the Consumer that reads it."""

    def __init__(self, name: str, consumer: GroupConsumer, settle: Callable[[], None]) -> None:
        self.name = name
        self.consumer = consumer
        self._settle = settle
        consumer._prepare_call = self.prepare_call
        self.core: ConsumerCore = consumer._core
        self.requester: Requester = consumer._requester
        transport = consumer._requester.transport
        assert isinstance(transport, SocketTransport), "ZooKeeper names only tcp://"
        self.transport = transport
        self.arrivals: list[Arrival] = []  # collected, and not given to the core's steps yet
        self.stored: dict[int, Position] | None = None  # the positions of the last commit

    def places(self) -> dict[int, Position]:
        """Return the positions, none before they are known."""
        return {queue_id: queue.next for queue_id, queue in self.core.fetcher.queues.items()}

    def prepare_call(self) -> None:
        """Prepare a call of this consumer alone, whose steps do not get `arrivals`."""
        self._settle()
        self.stored = None  # the call may be a commit, of other positions
        if self.arrivals:
            self.arrivals = []
            self.core.forget_preparing()

    def close(self) -> None:
        """End it; takes no lock, since a finalizer may be the caller."""
        self.consumer._lifecycle.close()
        self.requester.close()


class ClusterRequester(Requester):
    """What runs the steps of a cluster's core; the groups' requesters send and receive."""

    def __init__(self, groups: ClusterGroups, clock: Clock) -> None:
        self._clock = clock
        self._rids = itertools.count(1)
        self._receiver = None
        self.transport: GroupsTransport = GroupsTransport(clock)
        self.cluster = ClusterView(())
        self.closing = False
        self.replies = 0
        self.groups = groups
        self.members: dict[str, _Member] = {}

    def close(self) -> None:
        """Close the connections of all groups, and follow ZooKeeper no more."""
        self._end(1.0)

    def drop(self) -> None:
        """Close all for a client that is dropped; waits for nothing."""
        self._end(0.0)

    def _end(self, timeout_s: float) -> None:
        super().close()
        for member in list(self.members.values()):
            member.close()
        self.groups.stop(timeout_s)


class _Moves:
    """The moves of all groups' cores in a call; see ClusterCore.settle."""

    undo: object = ()


class ClusterCore(Core):
    """The cores of all groups, whose steps go on together."""

    def __init__(
        self, requester: ClusterRequester, reading: Reading, make: Callable[..., GroupConsumer]
    ) -> None:
        """`make` returns the Consumer of a group, by its name, addresses and reading."""
        super().__init__(requester)
        self.topic = reading.topic
        self.group = reading.group
        self.members = requester.members
        self.mover = _Moves()
        self._transport = requester.transport
        self._groups = requester.groups
        self._reading = reading  # of the next group that is found
        self._timeout_s = reading.options.timeout_s
        self._make = make
        self._seen: object = None  # the groups that were looked at
        self._gone = False  # a group has gone from ZooKeeper, and still has connections
        self._turn = 0
        self._failures: dict[str, HastoreError] = {}  # by group, of calls that had messages
        self._none_ms: float | None = None  # since when no group is known; infinite: it is said

    def begin_call(self) -> None:
        """Begin a call; each core undoes what an interrupted one has moved."""
        self.settle()
        super().begin_call()
        for member in self.members.values():
            member.core.begin_call()

    def end_call(self) -> None:
        """End a call whose state is consistent."""
        for member in self.members.values():
            member.core.end_call()
        super().end_call()

    def settle(self) -> None:
        """Make the moves of the last call final in each core, if its caller has the result.

        The caller says so by one store, `mover.undo = None`: it cannot be interrupted half-way.
        """
        if self.mover.undo is None:
            for member in self.members.values():
                member.core.mover.undo = None
            self.mover.undo = ()

    def recover(self) -> None:
        """Forget what has arrived: the cores ask anew."""
        for member in self.members.values():
            member.arrivals = []

    # -- reading

    def poll(self, max_messages: int, timeout_s: float) -> Steps[list[Message]]:
        """Take what the groups have, beginning with another one each time."""
        most = integer("max_messages", max_messages, 1, MAX_INT64)
        timeout_s = waiting_time("timeout_s", timeout_s)
        try:
            yield from self._any_ready(timeout_s)
        except ClosedMeanwhile:
            return []
        taken: list[Message] = []
        for member in self._in_turn():
            try:
                part = member.core.fetcher.take_messages(most - len(taken))
            except HastoreError as failure:
                self._note_failure(member, failure)
                continue
            _name(part, member.name)
            taken = taken + part if taken else part
            if len(taken) >= most:
                break
        if not taken:
            self._raise_failure()
        return taken

    def ready(self, timeout_s: float) -> Steps[QueueReader | None]:
        """Return a queue that has messages, without taking any; None if `poll` would return []."""
        try:
            yield from self._any_ready(timeout_s)
        except ClosedMeanwhile:
            return None
        for member in self._in_turn():
            try:
                found = member.core.fetcher.find_ready()
            except HastoreError as failure:
                self._note_failure(member, failure)
                continue
            if found is not None:
                if found.ready[-1].cluster_group is None:  # once for all messages of a pull
                    _name(found.ready, member.name)
                return found
        self._raise_failure()
        return None

    # -- positions

    def positions(self) -> Steps[dict[Key, Position]]:
        """Return the positions."""
        return _joined((yield from self._each(ConsumerCore.positions)))

    def committed(self) -> Steps[dict[Key, Position]]:
        """Return the committed positions."""
        self._group()
        return _joined((yield from self._each(ConsumerCore.committed)))

    def end_offsets(self) -> Steps[dict[Key, int]]:
        """Return the ends."""
        return _joined((yield from self._each(ConsumerCore.end_offsets)))

    def lag(self) -> Steps[dict[Key, int]]:
        """Return how many messages are left."""
        return _joined((yield from self._each(ConsumerCore.lag)))

    def position(self, key: object) -> Steps[Position]:
        """Return the position in a queue of a group."""
        name, queue_id = _key("queue", key)
        found = yield from self._each(lambda core: core.position(queue_id), [name])
        position: Position = found[name]
        return position

    def seek(self, key: object, position: int | Position) -> Steps[None]:
        """Continue at a position in a queue of a group."""
        place = position_of("position", position)
        name, queue_id = _key("queue", key)
        yield from self._each(lambda core: core.seek(queue_id, place), [name])
        self._failures.pop(name, None)

    def seek_to_ends(self, which: int) -> Steps[None]:
        """Continue at the first message (0) or after the last (1), everywhere."""
        yield from self._each(lambda core: core.seek_to_ends(which))
        self._failures.clear()

    def seek_to_time(self, timestamp_ms: int | datetime.datetime) -> Steps[None]:
        """Continue at a time, everywhere."""
        yield from self._each(lambda core: core.seek_to_time(timestamp_ms))
        self._failures.clear()

    def pause(self, given: Iterable[object] | None, *, paused: bool) -> Steps[None]:
        """Give no messages of these queues, or of all; or give them again."""
        if given is None:
            yield from self._each(lambda core: core.pause(None, paused=paused))
            return
        queues: dict[str, list[int]] = {}
        for name, queue_id in _keys("queues", given):
            queues.setdefault(name, []).append(queue_id)
        for name, own in queues.items():  # a wrong one shall leave all as they are
            yield from self._each(partial(ConsumerCore.readers, given=own), [name])
        for name, own in queues.items():
            yield from self._each(partial(ConsumerCore.pause, given=own, paused=paused), [name])

    @property
    def paused(self) -> list[Key]:
        """The queues that are paused."""
        return sorted(
            (member.name, queue_id)
            for member in self.members.values()
            for queue_id in member.consumer.paused
        )

    def commit(self) -> Steps[None]:
        """Commit what has moved since the last commit, in each group; raises when all have ended.

        A group whose positions are not known yet has given no message.
        """
        self._group()
        due: dict[_Member, dict[int, Position]] = {}
        for member in (yield from self._known()):
            places = member.places()
            if places and (places != member.stored or member.core.fetcher.sought):
                due[member] = places
        ends = yield from self._together({member: member.core.commit() for member in due})
        failures = []
        for member, places in due.items():
            if isinstance(ends[member], HastoreError):
                failures.append(_of_group(ends[member], member.name))
            else:
                member.stored = places
        if failures:
            raise _first_of(failures, "the other groups are committed; commit again for these")

    def look_up(self, name: str) -> Steps[Consumer]:
        """Return the Consumer of a group."""
        yield from self._known()
        return self._member(name).consumer

    # -- the groups

    def names(self) -> tuple[str, ...]:
        """Return the groups that are read."""
        return tuple(sorted(self.members))

    def _follow(self) -> list[_Member]:
        """Return the groups that are read, as ZooKeeper has them now."""
        groups = self._groups.groups
        if groups is not self._seen or self._gone:
            for name in self._groups.holding(self.topic):
                if name in groups and name not in self.members:
                    addresses = list(groups[name].addresses)
                    made = self._make(name=name, addresses=addresses, reading=self._reading)
                    self._add(name, made)
            if groups:
                # What is sent to a later group before it is found has not been offered to anyone.
                options = self._reading.options._replace(start="earliest")
                self._reading = self._reading._replace(options=options)
            for member in list(self.members.values()):
                seen = groups.get(member.name)
                self._follow_group(member, None if seen is None else seen.addresses)
            self._gone = not groups.keys() >= self.members.keys()
            self._seen = groups  # last: an interrupted look is made again
        return list(self.members.values())

    def _add(self, name: str, consumer: GroupConsumer) -> None:
        member = _Member(name, consumer, self.settle)
        member.core.begin_call()
        self._transport.add(member.transport.fileno())
        self.members[name] = member

    def _follow_group(self, member: _Member, named: tuple[str, ...] | None) -> None:
        """Learn a group's addresses; one that has gone, and has no connection, is not read."""
        requester, transport = member.requester, member.transport
        if named is None:
            if not any(transport.is_up(address) for address in transport.addresses):
                del self.members[member.name]
                self._failures.pop(member.name, None)
                self._transport.remove(transport.fileno())
                member.close()
            return
        for address in transport.addresses:
            if address not in named and not transport.is_up(address):
                member.arrivals += requester.note([transport.forget(address)])
        for address in named:
            requester.cluster.add(address)
        transport.open(requester.cluster.addresses)

    def _known(self) -> Steps[list[_Member]]:
        """Return the groups; waits for a first one, raises UnreachableError without."""
        deadline = self.requester.deadline(self._timeout_s)
        while not (members := self._follow()):
            left_s = self.requester.left_s(deadline)
            if left_s <= 0.0:
                why = self._groups.problem or f"no group of the cluster has {self.topic}"
                raise UnreachableError(f"no group was found: {why}")
            yield min(left_s, LOOK_S)
        return members

    def _member(self, name: str) -> _Member:
        found = self.members.get(name)
        if found is None:
            raise UsageError(
                f"no group {name!r} is read; those that are: {', '.join(self.names())}"
            )
        return found

    def _group(self) -> None:
        if not self.group:
            raise UsageError("a commit needs a group's name: give the consumer a group")

    def _in_turn(self) -> Iterator[_Member]:
        members = list(self.members.values())
        self._turn += 1
        for index in range(len(members)):
            yield members[(self._turn + index) % len(members)]

    # -- steps of several groups

    def _each(
        self, make: Callable[[ConsumerCore], Steps[Any]], names: list[str] | None = None
    ) -> Steps[dict[str, Any]]:
        """Make a call in all groups, or in some; raises when all have ended, if one has failed."""
        members = yield from self._known()
        if names is not None:
            members = [self._member(name) for name in names]
        ends = yield from self._together({member: make(member.core) for member in members})
        failures = [
            _of_group(end, member.name)
            for member, end in ends.items()
            if isinstance(end, HastoreError)
        ]
        if failures:
            raise _first_of(failures, None if names else f"for one group alone use {_ONE_GROUP}")
        return {member.name: end for member, end in ends.items()}

    def _any_ready(self, timeout_s: float) -> Steps[None]:
        """Wait until a group has messages or has failed, at most `timeout_s`."""
        self._raise_failure()
        deadline = self.requester.deadline(timeout_s)
        while True:
            members = self._follow()
            left_s = self.requester.left_s(deadline)
            if members:
                slice_s = min(left_s, POLL_S)  # then it is looked for new groups
                calls = {member: member.core.ready(slice_s) for member in members}
                ends = yield from self._together(calls, first=True)
                for member, end in ends.items():
                    if isinstance(end, HastoreError):
                        self._note_failure(member, end)
                if any(end is not None for end in ends.values()):
                    return
            else:
                self._note_none()
                yield min(left_s, LOOK_S)
            if left_s <= 0.0:
                return

    def _together(
        self, calls: Mapping[_Member, Steps[Any]], *, first: bool = False
    ) -> Steps[dict[_Member, Any]]:
        """Let steps of several groups go on until all have ended, or `first` one with a result.

        Returns the result of each that has ended, or its HastoreError. Those that have not are
        closed where they wait: the next call begins from the state of their core.
        """
        ends: dict[_Member, Any] = {}
        left, until = dict(calls), dict.fromkeys(calls, 0.0)
        try:
            for member in calls:
                self._go_on(member, left, until, ends, begin=True)
            while left and not (first and any(end is not None for end in ends.values())):
                yield self._wait_s([until[member] for member in left])
                for member in self.members.values():
                    member.arrivals += member.requester.collect()
                    if member in left:
                        if member.arrivals or not self.requester.left_s(until[member]):
                            self._go_on(member, left, until, ends)
                    elif not member.core.is_preparing:  # else its next steps need them
                        member.arrivals = []
        finally:
            for steps in left.values():
                steps.close()
        return ends

    def _go_on(
        self,
        member: _Member,
        left: dict[_Member, Steps[Any]],
        until: dict[_Member, float],
        ends: dict[_Member, Any],
        *,
        begin: bool = False,
    ) -> None:
        """Let a group's steps go on to where they wait, or end."""
        steps = left[member]
        try:
            if begin:
                wait_s = next(steps)
            else:
                arrivals, member.arrivals = member.arrivals, []
                wait_s = steps.send(arrivals)
        except StopIteration as end:
            ends[member] = end.value
            del left[member]
        except HastoreError as failure:
            ends[member] = failure
            del left[member]
        else:
            until[member] = self.requester.deadline(0.0 if member.arrivals else wait_s)

    def _wait_s(self, until: list[float]) -> float:
        """Return how long nothing is due: no steps, and no timer of a connection."""
        wait_s = self.requester.left_s(min(until))
        due = [member.transport.due_s() for member in self.members.values()]
        return min([wait_s, *(one for one in due if one >= 0.0)])

    def _note_failure(self, member: _Member, failure: HastoreError) -> None:
        self._failures[member.name] = _of_group(failure, member.name)

    def _raise_failure(self) -> None:
        """Raise what a group has failed with while others had messages."""
        while self._failures:
            name = next(iter(self._failures))
            failure = self._failures.pop(name)
            if not self._is_over(name, failure):
                raise failure

    def _is_over(self, name: str, failure: HastoreError) -> bool:
        """Whether a lost position was left since, by a seek of the group's own consumer."""
        member = self.members.get(name)
        if member is None or not isinstance(failure, PositionLostError):
            return member is None
        return all(queue.lost is not failure for queue in member.core.fetcher.queues.values())

    def _note_none(self) -> None:
        """Warn once that there is no group."""
        now = self.requester.deadline(0.0)
        if self._none_ms is None:
            self._none_ms = now
        elif now - self._none_ms > NONE_MS:
            self._none_ms = float("inf")
            log.warning("consumer of %s: no group is known: %s", self.topic, self._groups.problem)


class ClusterConsumer(Consumer):
    """A Consumer over all groups of a cluster; see Consumer. Its queues are (group, queue).

    `in_group(name)` returns the Consumer of one group, which this one closes.
    """

    _kind = "Consumer"
    _core: ClusterCore  # type: ignore[assignment]

    def __init__(
        self,
        topic: Topics,
        bootstrap: str | Sequence[str] | None = None,
        *,
        group: str | None = None,
        queues: Sequence[int] | None = None,
        tags: str | None = None,
        sql: str | None = None,
        start: Start = "earliest",
        on_lost: OnLost = "raise",
        read_from: ReadFrom = "slaves",
        max_bytes: int = 1024 * 1024,
        prefetch_bytes: int = 8 * 1024 * 1024,
        timeout_s: float = 10.0,
        share: bool = False,
        listener: RebalanceListener | None = None,
        auto_commit_s: float | None = None,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to follow the cluster; the arguments are those of Consumer.

        Raises UsageError, also if kazoo is not installed, and ConfigError for the files of
        `security`.
        """
        cluster = cluster_of(bootstrap)
        assert cluster is not None, "Consumer looks at it first"
        check_unshared(share, listener, auto_commit_s)
        if queues is not None:
            raise UsageError(
                "queues: each group of a cluster has its own; leave `queues` out, or make a "
                "Consumer of zk://.../CLUSTER/GROUP"
            )
        checked = as_security(security)
        options = make_read_options(
            start=start, on_lost=on_lost, read_from=read_from, max_bytes=max_bytes,
            prefetch_bytes=prefetch_bytes, timeout_s=timeout_s, clock=clock, tags=tags, sql=sql,
        )  # fmt: skip
        reading = make_reading(topic, group, None, options)
        make = partial(GroupConsumer, cluster=cluster.cluster, security=checked, clock=clock)
        groups = ClusterGroups(cluster, checked, clock)
        core = ClusterCore(ClusterRequester(groups, clock), reading, make)
        what = describe(self._kind, (str(cluster),), reading.topic)
        Blocking.__init__(self, core, what)
        groups.start()

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the groups that are read, as far as they are known."""
        return self._core.names()

    @property
    def source(self) -> str | None:
        """Raise UsageError: each group has a source of its own."""
        raise UsageError(f"source: each group has its own; ask {_ONE_GROUP}")

    @property
    def paused(self) -> list[Key]:  # type: ignore[override]
        """The queues that are paused."""
        return self._core.paused

    def in_group(self, name: str) -> Consumer:
        """Return the Consumer of one group, which this one closes; raises UsageError without it.

        Its own `close`, and the end of a `with` block, do nothing.
        """
        return self._run(self._core.look_up(name))

    @ClientCall
    def positions(self) -> Steps[dict[Key, Position]]:  # type: ignore[override]
        """Return the position in each queue of each group."""
        return self._core.positions()

    @ClientCall
    def position(self, queue: Key) -> Steps[Position]:  # type: ignore[override]
        """Return the position in a queue of a group."""
        return self._core.position(queue)

    @ClientCall
    def seek(self, queue: Key, position: int | Position) -> Steps[None]:  # type: ignore[override]
        """Continue at a queue offset or a Position, in a queue of a group."""
        return self._core.seek(queue, position)

    @ClientCall
    def end_offsets(self) -> Steps[dict[Key, int]]:  # type: ignore[override]
        """Return the end of each queue of each group."""
        return self._core.end_offsets()

    @ClientCall
    def lag(self) -> Steps[dict[Key, int]]:  # type: ignore[override]
        """Return how many messages are left in each queue of each group."""
        return self._core.lag()

    @ClientCall
    def pause(self, queues: Sequence[Key] | None = None) -> Steps[None]:  # type: ignore[override]
        """Return no messages of these queues until `resume`; None: of all that are read now."""
        return self._core.pause(queues, paused=True)

    @ClientCall
    def resume(self, queues: Sequence[Key] | None = None) -> Steps[None]:  # type: ignore[override]
        """Return messages of these queues again; None: of all."""
        return self._core.pause(queues, paused=False)

    @ClientCall
    def commit(self) -> Steps[None]:
        """Commit, in each group that has moved, the positions under the consumer group's name.

        If a group fails, the others are committed all the same; then its error is raised, which
        names it. Committing again is harmless.
        """
        return self._core.commit()

    @ClientCall
    def committed(self) -> Steps[dict[Key, Position]]:  # type: ignore[override]
        """Return the committed positions of the consumer group in each group."""
        return self._core.committed()


def _name(messages: list[Message], name: str) -> None:
    """Set which group messages are of."""
    for message in messages:
        if message.cluster_group is None:
            msgspec.structs.force_setattr(message, "cluster_group", name)


def _joined(found: Mapping[str, Mapping[int, Any]]) -> dict[Key, Any]:
    """Return the entries of all groups by group and queue."""
    return {(name, queue): value for name, own in found.items() for queue, value in own.items()}


def _key(argument: str, given: object) -> Key:
    """Return a group and a queue; raises UsageError for others."""
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str):
        return given[0], integer(argument, given[1], 0, MAX_INT32)
    raise UsageError(
        f"{argument}: each group has its own; give (group, queue) instead of {given!r}, or use "
        f"{_ONE_GROUP}"
    )


def _keys(argument: str, given: object) -> list[Key]:
    if isinstance(given, Iterable) and not isinstance(given, str | bytes):
        return [_key(argument, each) for each in given]
    raise refusal(argument, given, "a list of (group, queue)")


def _of_group(failure: HastoreError, name: str) -> HastoreError:
    """Name the group in an error; a lost position raises the same one several times."""
    if failure.cluster_group is None:
        failure.cluster_group = name
        failure.args = (f"group {name}: {failure}", *failure.args[1:])
    return failure


def _first_of(failures: list[HastoreError], remedy: str | None) -> HastoreError:
    """Return the first error, which then has the texts of all."""
    first = failures[0]
    texts = "; ".join(str(failure) for failure in failures)
    first.args = (f"{texts} ({remedy})" if remedy else texts, *first.args[1:])
    return first
