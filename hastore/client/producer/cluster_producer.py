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
import queue as queues
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, NoReturn

from hastore.client.arguments import (
    BATCH_BYTES,
    COMPRESSION_THRESHOLD,
    Acks,
    Compression,
    check_clock,
    make_options,
    waiting_limit,
)
from hastore.client.connections.bootstrap import cluster_of
from hastore.client.connections.cluster_groups import ClusterGroups
from hastore.client.lifecycle import Lifecycle
from hastore.client.messages import SendResult
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.preparer import NO_PROPERTIES, OutgoingMessage, Properties
from hastore.client.producer.producer import Producer
from hastore.client.security import SecurityLike, as_security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    HastoreError,
    NotStoredError,
    UnreachableError,
    UsageError,
)
from hastore.protocol.api import WINDOW

log = logging.getLogger(__name__)

LEAVE_MS = 1_000.0
_ONE_GROUP = "a Producer of zk://.../CLUSTER/GROUP"
LOOK_S = 0.02  # so often it is looked for whether a group has a master


class GroupProducer(Producer):
    """The Producer of one group of a cluster: messages leave it for another group."""

    _leave_ms = LEAVE_MS


class _Message(NamedTuple):
    """A message, until a group has taken it."""

    future: SendFuture[SendResult]
    # Of Producer._send: topic, body, key, tags, properties.
    arguments: tuple[str, bytes, str | bytes | None, str | None, Properties]
    delay_level: int | None
    expires: float  # monotonic ms
    tried: frozenset[str]  # the groups that did not take it

    @property
    def topic(self) -> str:
        return self.arguments[0]

    @property
    def key(self) -> str | bytes | None:
        return self.arguments[2]


class ClusterProducer(Producer):
    """A Producer over all groups of a cluster; safe to share between threads.

    `max_in_flight` is the number of unsettled messages in each group. `group(name)` returns the
    Producer of one group, for messages to a queue of it.
    """

    _kind = "Producer"

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        acks: Acks = None,
        sync_flush: bool = False,
        linger_ms: float = 0.0,
        batch_bytes: int = BATCH_BYTES,
        max_in_flight: int = WINDOW,
        delivery_timeout_s: float = 30.0,
        idempotent: bool = True,
        compression: Compression = None,
        compression_threshold: int = COMPRESSION_THRESHOLD,
        transaction_group: str | None = None,
        check: Any = None,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to follow the cluster; the arguments are those of Producer.

        Raises UsageError, also if kazoo is not installed, and ConfigError for the files of
        `security`.
        """
        cluster = cluster_of(bootstrap)
        assert cluster is not None, "Producer looks at it first"
        if transaction_group is not None or check is not None:
            name = "check" if transaction_group is None else "transaction_group"
            raise UsageError(f"{name}: a transaction is of one group; make {_ONE_GROUP}")
        check_clock("clock", clock)
        self._clock = clock
        self._security = as_security(security)
        self._timeout_ms = make_options(
            acks, sync_flush, linger_ms, batch_bytes, max_in_flight, delivery_timeout_s, idempotent,
            compression, compression_threshold,
        ).delivery_timeout_ms  # fmt: skip
        self._make = partial(
            GroupProducer, acks=acks, sync_flush=sync_flush, linger_ms=linger_ms,
            batch_bytes=batch_bytes, max_in_flight=max_in_flight,
            delivery_timeout_s=delivery_timeout_s, idempotent=idempotent, compression=compression,
            compression_threshold=compression_threshold, security=self._security, clock=clock,
        )  # fmt: skip
        self._groups = ClusterGroups(cluster, self._security, clock)
        self._lock = threading.Lock()
        self._producers: dict[str, GroupProducer] = {}
        self._built: dict[str, tuple[str, ...]] = {}  # the addresses that each began with
        self._turns: dict[str, itertools.count[int]] = {}
        self._down: dict[str, float] = {}  # since when a group is without a master
        self._ends = threading.Event()
        self._settled = threading.Condition()
        self._pending = 0
        self._left: queues.SimpleQueue[_Message | None] = queues.SimpleQueue()
        self._mover: threading.Thread | None = None
        self._lifecycle = Lifecycle(f"{self._kind}({str(cluster)!r})", _nothing)
        self._groups.start()

    # -- what the cluster has

    def group(self, name: str) -> Producer:
        """Return the Producer of one group, which this one closes. Raises UsageError without it."""
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

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
        delay_level: int | None = None,
    ) -> Future[SendResult]:
        """Send a message as Producer does, to one of the groups; `queue` is not for a cluster.

        Raises UnreachableError if no group with a master is found within the delivery timeout.
        """
        self._lifecycle.check_usable()
        if queue is not None:
            raise UsageError("queue: each group has its own; use producer.group(NAME).send(...)")
        expires = self._clock.monotonic_ms() + self._timeout_ms
        future: SendFuture[SendResult] = SendFuture()
        message = _Message(
            future, (topic, body, key, tags, properties), delay_level, expires, frozenset()
        )
        name = self._wait_group(message)
        with self._settled:
            self._pending += 1
        try:
            self._give(message, name)
        except BaseException:
            self._note_settled()
            raise
        return future

    def send_sync(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
        delay_level: int | None = None,
    ) -> SendResult:
        """Send a message and wait for its result; raises what the Future of `send` would."""
        return self.send(
            topic, body, key=key, tags=tags, properties=properties, queue=queue,
            delay_level=delay_level,
        ).result()  # fmt: skip

    def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | bytes],
        *,
        queue: int | None = None,
    ) -> Future[list[SendResult]]:
        """Send messages in order to one group; they do not move to another one."""
        self._lifecycle.check_usable()
        if queue is not None:
            raise UsageError("queue: each group has its own; use producer.group(NAME).send_batch")
        expires = self._clock.monotonic_ms() + self._timeout_ms
        place = _Message(SendFuture(), (topic, b"", None, None, ()), None, expires, frozenset())
        found = self._producer(self._wait_group(place))
        assert found is not None, "it was there a moment ago"
        with self._settled:
            self._pending += 1
        try:
            future = found.send_batch(topic, messages)
        except BaseException:
            self._note_settled()
            raise
        future.add_done_callback(lambda _: self._note_settled())
        return future

    def transaction(self, topic: str, body: bytes, **_options: Any) -> NoReturn:
        """Raise UsageError: a transaction is of one group."""
        raise UsageError(f"transaction: it is of one group; make {_ONE_GROUP}")

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all messages sent so far are settled; False if `timeout_s` is over first."""
        self._lifecycle.check_usable()
        return self._wait_settled(waiting_limit("timeout_s", timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for unsettled messages, at most `timeout_s`, and then end all producers."""
        limit_s = waiting_limit("timeout_s", timeout_s)
        first = self._lifecycle.close()
        if self._lifecycle.forked:
            return
        if limit_s is None:
            limit_s = self._timeout_ms / 1000.0 + 1.0
        until = SYSTEM_CLOCK.monotonic_ms() + limit_s * 1000.0
        if first:
            self._wait_settled(limit_s)
        self._ends.set()
        self._left.put(None)
        with self._lock:
            producers = list(self._producers.values())
        for one in producers:
            one.close(max(0.0, (until - SYSTEM_CLOCK.monotonic_ms()) / 1000.0))
        self._groups.stop(1.0)

    # -- internal

    def _give(self, message: _Message, name: str) -> None:
        """Let a group's producer take a message; raises if the message is none."""
        found = self._producer(name)
        if found is None:  # the group has gone meanwhile
            self._move(message._replace(tried=message.tried | {name}))
            return
        try:
            inner = found._send(*message.arguments, None, message.delay_level, message.expires)
        except (UnreachableError, NotStoredError):
            self._move(message._replace(tried=message.tried | {name}))
            return
        found._driver.wake()
        inner.add_done_callback(lambda done: self._ended(message, name, done))

    def _ended(self, message: _Message, name: str, done: Future[SendResult]) -> None:
        """Pass an outcome on; a message that is certainly not stored moves on."""
        failure = done.exception()
        if isinstance(failure, NotStoredError | UnreachableError) and not self._lifecycle.closed:
            if self._clock.monotonic_ms() < message.expires:
                self._move(message._replace(tried=message.tried | {name}))
                return
        if failure is None:
            message.future.set_result(done.result())
        else:
            message.future.set_exception(failure)
        self._note_settled()

    def _move(self, message: _Message) -> None:
        with self._lock:
            if self._mover is None:
                self._mover = threading.Thread(
                    target=self._run_mover, name="ClusterProducer", daemon=True
                )
                self._mover.start()
        self._left.put(message)

    def _run_mover(self) -> None:
        """Give messages to other groups; a Future's callback must not wait, this may."""
        while True:
            message = self._left.get()
            if message is None:
                return
            try:
                self._give(message, self._wait_group(message))
            except HastoreError as failure:
                message.future.set_exception(_not_stored(failure))
                self._note_settled()
            except BaseException as failure:  # it belongs to the message: others go on
                message.future.set_exception(failure)
                self._note_settled()

    def _wait_group(self, message: _Message) -> str:
        """Return the group for a message: one with a master; raises UnreachableError.

        When all groups have been tried, each may be tried again.
        """
        turn = self._turn(message.topic) if message.key is None else 0
        while True:
            names = self._order(message, turn)
            now = self._clock.monotonic_ms()
            for name in [one for one in names if one not in message.tried] or names:
                found = self._producer(name)
                if found is None:
                    continue
                if found.master is not None:
                    self._down.pop(name, None)
                    return name
                if now - self._down.setdefault(name, now) > LEAVE_MS:
                    continue
                # It may only just have begun, or its master moves: a key stays with its group.
                if message.key is not None and found._driver.core.master_found:
                    return name
                if message.key is not None:
                    break
            if now >= message.expires:
                why = f"none of the groups {', '.join(names)} has a master"
                raise UnreachableError(f"no master was found: {self._groups.problem or why}")
            self._lifecycle.check_usable()
            self._ends.wait(LOOK_S)

    def _turn(self, topic: str) -> int:
        with self._lock:
            return next(self._turns.setdefault(topic, itertools.count()))

    def _order(self, message: _Message, turn: int) -> list[str]:
        """Return the groups for a message, the one that should have it first."""
        names = self._groups.with_topic(message.topic)
        if not names:
            return []
        if message.key is None:
            place = turn % len(names)
            return names[place:] + names[:place]
        key = message.key.encode() if isinstance(message.key, str) else message.key
        # Rendezvous hashing: a group that goes moves no key of another one.
        return sorted(names, key=lambda name: zlib.crc32(key + b"\0" + name.encode()))

    def _producer(self, name: str) -> GroupProducer | None:
        """Return the producer of a group; made anew if the group has moved to other addresses."""
        seen = self._groups.groups.get(name)
        known = self._producers.get(name)
        if seen is None or (known is not None and not _has_moved(known, self._built[name], seen)):
            return known
        with self._lock:
            known = self._producers.get(name)
            if known is not None and not _has_moved(known, self._built[name], seen):
                return known
            made = self._make(list(seen.addresses))
            self._producers[name], self._built[name] = made, seen.addresses
        if known is not None:  # its messages end there
            threading.Thread(target=known.close, name="ClusterProducerEnd", daemon=True).start()
        return made

    def _note_settled(self) -> None:
        with self._settled:
            self._pending -= 1
            self._settled.notify_all()

    def _wait_settled(self, limit_s: float | None) -> bool:
        with self._settled:
            return self._settled.wait_for(lambda: not self._pending, limit_s)


def _has_moved(known: GroupProducer, built: tuple[str, ...], seen: Any) -> bool:
    """Whether no address is left that a producer without a master began with."""
    return known.master is None and not set(built) & set(seen.addresses)


def _not_stored(failure: HastoreError) -> HastoreError:
    if isinstance(failure, UnreachableError):
        return NotStoredError(str(failure), "SERVICE_NOT_AVAILABLE")
    return failure


def _nothing() -> None:
    """Each group's producer closes its own descriptors in a forked child."""
