"""Send messages to all groups of a cluster: a Producer for each group, and who gets which message.

    with Producer("zk://127.0.0.1:2181/shop") as producer:
        producer.send("orders", b"...")

A message goes to a group that has the topic (to any, if none has it), in turn or by its key. If
that group has no master for LEAVE_MS, or refuses it for so long, and it is certainly not stored
there, it goes to another group. One whose outcome is unknown stays: it is never stored twice.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from hastore.client.arguments import SendOptions, key_text, refusal, waiting_limit
from hastore.client.connections.bootstrap import cluster_of
from hastore.client.connections.cluster_groups import ClusterGroups, GroupNodes
from hastore.client.connections.following_transport import FollowingTransport
from hastore.client.connections.proving import make_prover
from hastore.client.lifecycle import Lifecycle, describe
from hastore.client.messages import SendResult, Status, failure_of
from hastore.client.producer.futures import LocklessCondition, SendFuture, Unread
from hastore.client.producer.preparer import (
    NO_PROPERTIES,
    Body,
    OutgoingMessage,
    Properties,
    body_of,
    pairs_of,
    too_large,
)
from hastore.client.producer.producer import Producer
from hastore.client.producer.transactions import TransactionOptions
from hastore.client.producer.window import INSIDE, owner_check
from hastore.client.security import Security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    ClientError,
    NotAuthenticatedError,
    NotStoredError,
    UnreachableError,
    UsageError,
)
from hastore.protocol.api import MAX_MESSAGE_BYTES
from hastore.record.properties import check_topic

log = logging.getLogger(__name__)

LEAVE_MS = 1_000.0
_ONE_GROUP = "a Producer of zk://.../CLUSTER/GROUP"
LOOK_S = 0.02  # so often it is looked for whether a group has a master


class GroupProducer(Producer):
    """The Producer of one group of a cluster, which its messages leave for another group."""

    def __init__(
        self,
        nodes: GroupNodes,
        *,
        options: SendOptions,
        security: Security | None,
        clock: Clock,
        refuse: Callable[[], Callable[[], None] | None],
    ) -> None:
        """Start to connect to the nodes, wherever they are; the arguments were checked.

        `refuse` refers to what raises ClientError in the threads of all groups' producers.
        """
        self.name = nodes.names[1]
        self._refuse = refuse
        prover = make_prover(security)
        self._transport = FollowingTransport(clock, nodes.names, nodes.addresses, prover)
        self._open(list(nodes.addresses()), options, None, security, clock)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for this group's unsettled messages, as Producer.close does.

        It goes on afterwards: others use it too, and the cluster's producer ends it.
        """
        limit_s = waiting_limit("timeout_s", timeout_s)
        if not (self._lifecycle.closed or self._lifecycle.forked):
            self._flush(self._timeout_ms / 1000.0 + 1.0 if limit_s is None else limit_s)

    def _refuse_waiting(self) -> None:
        """Raise ClientError in a callback, of whichever group: two would wait for each other."""
        refuse = self._refuse()
        if refuse is not None:
            refuse()

    def has_room(self) -> bool:
        """Whether a message would be taken at once. Raises ClientError once it is closed."""
        with self._window.lock:
            return self._window.has_room(1)

    def end(self, timeout_s: float | None = None) -> None:
        """Close it, for the cluster's producer."""
        super().close(timeout_s)


class _Message(NamedTuple):
    """A message, until a group has taken it."""

    future: SendFuture[SendResult]
    # Of Producer._send: topic, body, key, tags, properties, queue, delay_level.
    arguments: tuple[str, bytes, str | None, str | None, Properties, None, int | None]
    expires: float  # monotonic ms
    tried: frozenset[str] = frozenset()  # the groups that did not take it
    refused_by: frozenset[str] = frozenset()  # of these, those that never will


class ClusterProducer(Producer):
    """A Producer over all groups of a cluster; safe to share between threads.

    `max_in_flight` is the number of unsettled messages in each group. `group(name)` returns the
    Producer of one group, for messages to a queue of it: here `queue` is refused. Sending raises
    UnreachableError if no group with a master is found within the delivery timeout.
    """

    def _open(
        self,
        bootstrap: str | Sequence[str] | None,
        options: SendOptions,
        transactions: TransactionOptions | None,
        security: Security | None,
        clock: Clock,
    ) -> None:
        """Start to follow the cluster. Raises UsageError, also if kazoo is not installed."""
        cluster = cluster_of(bootstrap)
        assert cluster is not None, "Producer looks at it first"
        if transactions is not None:
            raise UsageError(
                f"transaction_group: a transaction is of one group; make {_ONE_GROUP}"
            )
        self._clock = clock
        self._timeout_ms = options.delivery_timeout_ms
        self._make = partial(
            GroupProducer, options=replace(options, leave_ms=LEAVE_MS), security=security,
            clock=clock, refuse=weakref.WeakMethod(self._refuse_threads),
        )  # fmt: skip
        self._cluster = cluster.cluster
        self._groups = ClusterGroups(cluster, security, clock)
        self._lock = threading.RLock()
        self._is_owned = owner_check(self._lock)
        self._producers: dict[str, GroupProducer] = {}  # changed under the lock
        self._turns: dict[str, itertools.count[int]] = {}
        self._down: dict[str, float] = {}  # since when a group is without a master
        self._ends = threading.Event()  # set under the lock: then no producer is made
        self._unread = Unread()
        self._unsettled: set[Future[Any]] = set()
        self._settled = LocklessCondition()
        self._left: deque[_Message] = deque()  # messages for other groups
        self._mover: threading.Thread | None = None  # gives them away; ends when there is none
        self._lifecycle = Lifecycle(
            describe(self._kind, (str(cluster),)), partial(_abandon, self._unsettled)
        )
        self._lifecycle.watch(self, partial(_drop, self._groups), self._unread.text)
        self._groups.start()

    # -- what the cluster has

    def group(self, name: str) -> Producer:
        """Return the Producer of one group, which this one ends. Raises UsageError without it.

        Its `close`, and a `with` block, only wait for its messages.
        """
        self._lifecycle.check_usable()
        self._groups.wait_heard(self._timeout_ms / 1_000)
        found = self._producer(name)
        if found is None:
            known = ", ".join(sorted(self._groups.groups)) or self._groups.problem or "no group"
            raise UsageError(f"group: the cluster has no group {name!r}; it has {known}")
        return found

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of the cluster's groups, as far as they are known."""
        return tuple(sorted(self._groups.groups))

    @property
    def producer_id(self) -> str:
        """Raise UsageError: each group has a producer with an id of its own."""
        raise UsageError("producer_id: each group has its own; ask producer.group(NAME)")

    @property
    def epoch(self) -> int:
        """Raise UsageError: each group has an epoch of its own."""
        raise UsageError("epoch: each group has its own; ask producer.group(NAME)")

    @property
    def master(self) -> str | None:
        """Raise UsageError: each group has a master of its own."""
        raise UsageError("master: each group has its own; ask producer.group(NAME)")

    # -- sending

    def _send(
        self,
        topic: str,
        body: Body,
        key: str | bytes | None,
        tags: str | None,
        properties: Properties,
        queue: int | None,
        delay_level: int | None,
        expires: float | None = None,
    ) -> SendFuture[SendResult]:
        """Give a message to one of the groups."""
        self._check_place(topic, queue, "send(...)")
        # Another group may get it later: what the caller changes until then must not change it.
        body = body_of("body", body)
        if len(body) > MAX_MESSAGE_BYTES:
            raise too_large(body)
        name = None if key is None else key_text("key", key)
        if properties is not NO_PROPERTIES:
            properties = tuple(pairs_of(None, None, properties))
        if tags is not None or delay_level is not None:
            pairs_of(None, tags, NO_PROPERTIES, delay_level)  # checked before the wait for a group
        if expires is None:
            expires = self._clock.monotonic_ms() + self._timeout_ms
        future: SendFuture[SendResult] = SendFuture(self._unread)
        message = _Message(
            future, (topic, body, name, tags, properties, None, delay_level), expires
        )
        group = self._wait_group(topic, name, expires)
        self._unsettled.add(future)
        try:
            self._give(message, group)
        except BaseException:
            self._note_settled(future)
            raise
        return future

    def _wake(self) -> None:
        """Do nothing: `_give` has woken the group's driver."""

    def _drive(self, future: SendFuture[Any]) -> None:
        """Do nothing: a thread of the group's producer drives it."""

    def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | Body],
        *,
        queue: int | None = None,
    ) -> Future[list[SendResult]]:
        """Send messages in order to one group; they do not move to another one."""
        self._check_place(topic, queue, "send_batch")
        now = self._clock.monotonic_ms()
        expires = now + self._timeout_ms
        inner = self._wait_group(topic, None, expires)._send_batch(topic, messages, None, now)
        # One of its own, because the callback counts as somebody who has asked the inner one.
        future: SendFuture[list[SendResult]] = SendFuture(self._unread)
        self._unsettled.add(future)
        inner.add_done_callback(lambda done: self._pass_on(done, future))
        return future

    def transaction(self, topic: str, body: Body, **_options: Any) -> NoReturn:
        """Raise UsageError: a transaction is of one group."""
        raise UsageError(f"transaction: it is of one group; make {_ONE_GROUP}")

    def _refuse_callback(self) -> None:
        """Raise ClientError in the threads that call the callbacks of Futures."""
        self._refuse_threads()
        if threading.current_thread() is self._mover:
            raise ClientError("a Future's callback must not wait: the producer's thread runs it")

    def _refuse_threads(self) -> None:
        for one in list(self._producers.values()):
            one._refuse_callback()

    def _flush(self, limit_s: float | None) -> bool:
        for one in list(self._producers.values()):
            if not one._lifecycle.closed:
                one._driver.flush(0.0)  # its messages wait no longer for others to share a frame
        waited = {one for one in tuple(self._unsettled) if not one.done()}
        if waited:
            self._refuse_callback()
        return self._settled.wait_for(lambda: waited.isdisjoint(self._unsettled), limit_s)

    def _settle(self, limit_s: float) -> None:
        self._flush(limit_s)

    def _end(self, left_s: float) -> None:
        until = SYSTEM_CLOCK.monotonic_ms() + left_s * 1000.0
        with self._lock:
            self._ends.set()
            producers, mover = list(self._producers.values()), self._mover
        for one in producers:
            one.end(max(0.0, (until - SYSTEM_CLOCK.monotonic_ms()) / 1000.0))
        if mover is not None:
            mover.join(1.0)
        self._groups.stop(1.0)

    # -- internal

    def _check_place(self, topic: object, queue: object, call: str) -> None:
        self._lifecycle.check_usable()
        if self._is_owned():
            raise ClientError(INSIDE)
        if queue is not None:
            raise UsageError(f"queue: each group has its own; use producer.group(NAME).{call}")
        if not isinstance(topic, str):
            raise refusal("topic", topic, "a str")
        check_topic(topic)

    def _give(self, message: _Message, group: GroupProducer) -> None:
        """Let a group's producer take a message; raises if no group would take it."""
        try:
            inner = group._send(*message.arguments, message.expires)
        except ClientError as failure:
            may_move = isinstance(failure, UnreachableError | NotStoredError)
            if not may_move or self._clock.monotonic_ms() >= message.expires:
                raise
            self._move(message, group)
            return
        group._wake()
        inner.add_done_callback(lambda done: self._note_end(message, group, done))

    def _note_end(self, message: _Message, group: GroupProducer, done: Future[SendResult]) -> None:
        """Pass an outcome on; a message that is certainly not stored moves on."""
        failure = done.exception()
        may_move = isinstance(failure, NotStoredError | UnreachableError)
        if isinstance(failure, NotStoredError) and failure.final:
            message = message._replace(refused_by=message.refused_by | {group.name})
            topic = message.arguments[0]
            may_move = not message.refused_by.issuperset(self._groups.with_topic(topic))
        if (
            may_move
            and not self._ends.is_set()
            and self._clock.monotonic_ms() < message.expires
        ):
            self._move(message, group)
        else:
            self._pass_on(done, message.future)

    def _move(self, message: _Message, group: GroupProducer) -> None:
        """Give a message to another group, in a thread: a Future's callback must not wait."""
        lost: list[_Message] = []
        with self._lock:
            self._left.append(message._replace(tried=message.tried | {group.name}))
            if self._mover is None:
                self._mover = threading.Thread(
                    target=self._run_mover, name="ClusterProducer", daemon=True
                )
                try:
                    self._mover.start()
                except RuntimeError as failure:  # no more threads, or the interpreter ends
                    why = f"it cannot go to another group: {failure}"
                    self._mover = None
                    lost += self._left
                    self._left.clear()
        for one in lost:
            self._end_moved(one, NotStoredError(why, Status.SERVICE_NOT_AVAILABLE))

    def _run_mover(self) -> None:
        """Give away what has left a group, until there is nothing more.

        What no group takes now holds up no message of another topic, and those of a key keep their
        order.
        """
        waiting: list[_Message] = []
        while True:
            with self._lock:
                waiting += self._left
                self._left.clear()
                if not waiting:
                    self._mover = None
                    return
            kept: list[_Message] = []
            behind: set[tuple[str, str]] = set()  # the topics and keys of these
            for message in waiting:
                topic, _, key, *_ = message.arguments
                if key is None:
                    if not self._give_away(message):
                        kept.append(message)
                elif (topic, key) in behind or not self._give_away(message):
                    kept.append(message)
                    behind.add((topic, key))
            waiting = kept
            if waiting:
                self._ends.wait(LOOK_S)

    def _give_away(self, message: _Message) -> bool:
        """Give a message that has left a group to another one; False if none takes it now."""
        topic, _, key, *_ = message.arguments
        try:
            turn = self._turn(topic) if key is None else 0
            names = [
                one for one in self._order(topic, key, turn) if one not in message.refused_by
            ]
            group = self._look_for_group(names, key, message.tried)
            is_late = self._clock.monotonic_ms() >= message.expires
            if group is None and is_late:
                raise UnreachableError(self._why_none(names))
            if self._ends.is_set():  # `close` waits for a message that moves, as long as it waits
                self._lifecycle.check_usable()
            if group is None or not (group.has_room() or is_late):
                return False
            self._give(message, group)
        except BaseException as failure:  # it belongs to the message: others go on
            self._end_moved(message, failure)
        return True

    def _end_moved(self, message: _Message, failure: BaseException) -> None:
        """End a message that is certainly not stored, and that no group gets any more."""
        closed = self._ends.is_set() and isinstance(failure, ClientError)
        if closed or isinstance(failure, UnreachableError):
            failure = NotStoredError(str(failure), Status.SERVICE_NOT_AVAILABLE)
        message.future.set_exception(failure)
        self._note_settled(message.future)

    def _wait_group(self, topic: str, key: str | None, expires: float) -> GroupProducer:
        """Return the group for a message: one with a master, and room; raises UnreachableError.

        Who waits for room looks meanwhile whether the group is still the one.
        """
        turn = self._turn(topic) if key is None else 0
        while True:
            names = self._order(topic, key, turn)
            found = self._look_for_group(names, key, frozenset())
            is_late = self._clock.monotonic_ms() >= expires
            if found is not None and (found.has_room() or is_late):
                return found
            if is_late:
                raise UnreachableError(self._why_none(names))
            self._lifecycle.check_usable()
            self._refuse_callback()
            if found is None:
                self._ends.wait(LOOK_S)
            else:
                found._driver.wait_room(1, LOOK_S)

    def _look_for_group(
        self, names: list[str], key: str | None, tried: frozenset[str]
    ) -> GroupProducer | None:
        """Return the first of these groups that may have a message, None if none may now.

        When all have been tried, each may be tried again. Raises NotAuthenticatedError if none of
        them accepts this client.
        """
        now = self._clock.monotonic_ms()
        for name in [one for one in names if one not in tried] or names:
            found = self._producer(name)
            if found is None:
                continue
            if found.master is not None:
                self._down.pop(name, None)
                return found
            found._driver.look_for_master()  # a producer with nothing to send does not by itself
            if now - self._down.setdefault(name, now) > LEAVE_MS:
                continue
            # It may only just have begun, or its master moves: a key stays with its group.
            if key is not None and found._driver.core.master_found:
                return found
            if key is not None:
                break
        made = [self._producers.get(name) for name in names]
        refusals = [None if one is None else one._driver.core.refused for one in made]
        if refusals and all(refusals):
            raise NotAuthenticatedError(_of_groups(names, map(str, refusals)))
        return None

    def _why_none(self, names: list[str]) -> str:
        """Say why none of these groups can have a message."""
        made = [self._producers.get(name) for name in names]
        whys = ["" if one is None else one._driver.core.cluster.reason() for one in made]
        told = [self._groups.problem or "", _of_groups(names, whys)]
        why = "; ".join(filter(None, told)) or f"cluster {self._cluster} has no group"
        return f"no master was found: {why}"

    def _turn(self, topic: str) -> int:
        with self._lock:
            return next(self._turns.setdefault(topic, itertools.count()))

    def _order(self, topic: str, key: str | None, turn: int) -> list[str]:
        """Return the groups for a message, the one that should have it first."""
        names = self._groups.with_topic(topic)
        if not names:
            return []
        if key is None:
            place = turn % len(names)
            return names[place:] + names[:place]
        salt = key.encode("utf-8", "surrogateescape") + b"\0"
        # Rendezvous hashing: a group that goes moves no key of another one.
        return sorted(names, key=lambda name: zlib.crc32(salt + name.encode()))

    def _producer(self, name: str) -> GroupProducer | None:
        """Return the producer of a group, which follows the group's addresses by itself."""
        known = self._producers.get(name)
        groups = self._groups.groups
        if known is not None or name not in groups:
            return known
        with self._lock:
            known = self._producers.get(name)
            if known is not None:
                return known
            if self._ends.is_set():  # nobody would close it
                self._lifecycle.check_usable()
            nodes = GroupNodes(self._groups, self._cluster, name, groups[name].addresses)
            made = self._producers[name] = self._make(nodes)
            return made

    def _pass_on(self, done: Future[Any], future: SendFuture[Any]) -> None:
        """End the caller's Future as the one of a group's producer has ended."""
        failure = done.exception()
        if failure is None:
            future.set_result(done.result())
        else:
            future.set_exception(failure)
        self._note_settled(future)

    def _note_settled(self, future: Future[Any]) -> None:
        self._unsettled.discard(future)
        if self._settled.sleepers:
            self._settled.notify_all()


def _of_groups(names: Iterable[str], whys: Iterable[str]) -> str:
    """Return what is said of each group, for an error text."""
    told = zip(names, whys, strict=True)
    return "; ".join(f"group {name}: {why or 'it was not asked yet'}" for name, why in told)


def _abandon(unsettled: set[Future[Any]]) -> None:
    """End the Futures in a forked child; each group's producer closes its own descriptors."""
    for future in tuple(unsettled):
        if isinstance(future, SendFuture) and not future.done():
            reason = "the process was forked; the parent keeps the message"
            future.fail(failure_of(Status.TIMEOUT, reason, None, unknown=True))


def _drop(groups: ClusterGroups) -> None:
    """Follow the groups no more; the producer of each group says itself what is lost."""
    groups.stop(0.0)
