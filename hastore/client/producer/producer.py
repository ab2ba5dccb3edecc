"""Send messages to whichever node is the master.

with Producer(["tcp://127.0.0.1:10911", "tcp://127.0.0.1:10921"]) as producer:
    future = producer.send("flights", b"...", key="UA1545")
    print(future.result().offset)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from hastore.client.arguments import (
    BATCH_BYTES,
    COMPRESSION_THRESHOLD,
    MAX_INT32,
    Acks,
    Compression,
    SendOptions,
    check_clock,
    make_options,
    waiting_limit,
)
from hastore.client.connections.bootstrap import cluster_of, first_address, parse_bootstrap
from hastore.client.connections.transport import Transport
from hastore.client.lifecycle import Closable, Lifecycle, describe
from hastore.client.messages import SendResult, Status, failure_of, failure_of_all
from hastore.client.producer.checker import Checker, Transaction
from hastore.client.producer.futures import SendFuture, Unread
from hastore.client.producer.io_driver import LINGER_S, IoDriver
from hastore.client.producer.preparer import (
    NO_PROPERTIES,
    Body,
    Draft,
    OutgoingMessage,
    Preparer,
    Properties,
    pairs_of,
    queue_of,
)
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.transactions import (
    Begun,
    Check,
    TransactionOptions,
    begin,
    check_draft,
    half_in,
    immunity_of,
    make_transactions,
)
from hastore.client.producer.window import NOT_SENT, Entry, Window
from hastore.client.security import Security, SecurityLike, as_security
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import HastoreError, NotAuthenticatedError, UnreachableError, UsageError
from hastore.protocol.api import WINDOW

log = logging.getLogger(__name__)

_CLUSTER_MODULE = "hastore.client.producer.cluster_producer"
_NO_PAIRS: list[tuple[str, str]] = []

__all__ = ["Acks", "OutgoingMessage", "Producer", "Properties", "Transaction"]


class Driver(Protocol):
    """What both producers need of what drives the core."""

    core: SendCore

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        ...

    def detach(self) -> None:
        """End by itself once all is settled."""
        ...


class ProducerClient:
    """The constructor and properties of both producers; each has a driver of its own."""

    _kind: str  # its name in errors
    _driver: Driver
    _awaits = False  # whether `check` may be a coroutine function

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
        check: Check | None = None,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect and to send; raises UsageError, and ConfigError for the files of
        `security`.

        `acks`: which nodes confirm a message. 0: none; 1: the master; "all": the master and as many
        slaves as the group's `acks`; None: the default of the master's role ("all" for SYNC_MASTER,
        else 1). In mode dledger 1 and "all" both mean a majority. `sync_flush`: these nodes confirm
        after the sync to disk. `linger_ms`: how long a message may wait for others to share its
        frame. The messages of a full frame, with `batch_bytes` or 256 messages, do not wait.
        `compression`: "lz4", "zstd" or "zlib" compresses bodies of `compression_threshold` bytes
        and more where that makes them shorter, but none of `send_batch`; consumers, RocketMQ's
        too, decompress them.
        `transaction_group`: the producers that may decide each other's transactions. `check`: what
        returns the Decision of one, given its Message, when the group is asked; any producer of the
        group may be, also of RocketMQ. `security`: TLS, and who the client is; see
        hastore.Security.
        """
        options = make_options(
            acks, sync_flush, linger_ms, batch_bytes, max_in_flight, delivery_timeout_s, idempotent,
            compression, compression_threshold,
        )  # fmt: skip
        transactions = make_transactions(transaction_group, check, options, awaits=self._awaits)
        check_clock("clock", clock)
        self._open(bootstrap, options, transactions, as_security(security), clock)

    def _open(
        self,
        bootstrap: str | Sequence[str] | None,
        options: SendOptions,
        transactions: TransactionOptions | None,
        security: Security | None,
        clock: Clock,
    ) -> None:
        """Start to connect and to send; only `bootstrap` is not checked yet."""
        addresses = parse_bootstrap(bootstrap)
        self._transactions = transactions
        self._clock = clock
        self._timeout_ms = options.delivery_timeout_ms
        identity = security.identity if security is not None else None
        self._preparer = Preparer(first_address(addresses), options, identity)
        self._driver = self._make_driver(addresses, options, security)
        self._lifecycle = Lifecycle(describe(self._kind, addresses), self._driver.abandon)
        self._lifecycle.watch(self, self._driver.detach, self._lost())
        self._begin()

    def _make_driver(
        self, addresses: tuple[str, ...], options: SendOptions, security: SecurityLike
    ) -> Driver:
        """Return the driver; it may already connect."""
        raise NotImplementedError

    def _lost(self) -> Callable[[], str]:
        """Return what names the lost messages of a producer that was not closed."""
        return self._driver.core.unacknowledged

    def _begin(self) -> None:
        """Let the driver run, once the end of this producer is watched."""

    def _group(self) -> TransactionOptions:
        """Return how transactions are made; raises UsageError without a group."""
        if self._transactions is None:
            raise UsageError(
                "a transaction needs a group, whose producers are asked how it ends if this one is"
                " gone: give the producer transaction_group"
            )
        return self._transactions

    def _draft_half(
        self,
        topic: str,
        body: Body,
        key: str | bytes | None,
        tags: str | None,
        properties: Properties,
        queue: int | None,
        check_after_s: int | None,
    ) -> tuple[Draft, TransactionOptions]:
        """Return the checked message of a transaction, and how it is made; raises UsageError."""
        more = immunity_of(check_after_s)
        draft = self._preparer.draft(topic, body, key, tags, properties, queue)
        check_draft(draft)
        group = self._group()
        return self._preparer.packed(draft._replace(pairs=[*draft.pairs, *more])), group

    @property
    def producer_id(self) -> str:
        """The random id that this producer's messages carry."""
        return self._preparer.producer_id

    @property
    def epoch(self) -> int:
        """The greatest epoch that a writable node has stated; 0 before the first."""
        return self._driver.core.cluster.epoch

    @property
    def master(self) -> str | None:
        """The address of the master, None while the producer looks for it."""
        return self._driver.core.cluster.master


class Producer(ProducerClient, Closable):
    """Send messages; safe to share between threads.

    With `idempotent`, each message carries the producer's random id and a sequence number, so a
    message that is sent again is stored only once, even by another master. At most `max_in_flight`
    (1 to 1 024) messages may be unsettled at a time; further sends wait. A message that is not
    settled within `delivery_timeout_s` fails with its last status, or with OutcomeUnknown.

    A producer that is dropped without `close` warns (ResourceWarning); its thread goes on with the
    messages under way. In a forked child each call raises ClientError, and `close` does nothing. A
    producer cannot be pickled or copied.
    """

    _kind = "Producer"
    _driver: IoDriver
    _transport: Transport | None = None  # a subclass may have its own

    if TYPE_CHECKING:  # of a ClusterProducer, which a type checker takes for a Producer

        @property
        def groups(self) -> tuple[str, ...]: ...

        def group(self, name: str) -> Producer: ...

    def __new__(cls, bootstrap: str | Sequence[str] | None = None, **_options: object) -> Producer:
        """Make a ClusterProducer for `zk://HOST:PORT[,...]/CLUSTER`, which names no group."""
        if cls is Producer and cluster_of(bootstrap) is not None:
            # By name, because that module needs this one, and only such a client needs it.
            made: Producer = object.__new__(import_module(_CLUSTER_MODULE).ClusterProducer)
            return made
        return object.__new__(cls)

    def _make_driver(
        self, addresses: tuple[str, ...], options: SendOptions, security: SecurityLike
    ) -> IoDriver:
        self._unread = Unread()
        self._window = Window(options.max_in_flight)
        return IoDriver(
            addresses, options, self._window, self._clock, security, transport=self._transport
        )

    def _lost(self) -> Callable[[], str]:
        return partial(_lost, self._driver.core, self._unread)

    def _begin(self) -> None:
        # If `close` is interrupted, this second finalizer still ends the thread.
        weakref.finalize(self, self._driver.detach).atexit = False
        self._driver.start(self._lifecycle)
        self._checker: Checker | None = None
        options = self._transactions
        if options is not None and options.check is not None and not self._driver.alone:
            self._checker = Checker(self._driver, options)
            self._checker.start()

    def send(
        self,
        topic: str,
        body: Body,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
        delay_level: int | None = None,
    ) -> Future[SendResult]:
        """Send a message; its Future gets the SendResult or an exception of hastore.errors.

        The same key goes to the same queue, while the topic has as many; without `key` and `queue`,
        the queues take turns. With `delay_level` consumers get it later: level 1 is a second, 18
        two hours (`store.message_delay_level`); the SendResult then says where it waits.

        Raises MessageIllegalError at once for a message that no master would take. Without `queue`,
        raises UnreachableError if no master was found within the delivery timeout, because only a
        master states the number of queues.
        """
        future = self._send(topic, body, key, tags, properties, queue, delay_level)
        self._wake()
        return future

    def send_sync(
        self,
        topic: str,
        body: Body,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
        delay_level: int | None = None,
    ) -> SendResult:
        """Send a message and wait for its result; raises what the Future of `send` would."""
        self._refuse_callback()
        future = self._send(topic, body, key, tags, properties, queue, delay_level)
        self._drive(future)
        return future.result()

    def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | Body],
        *,
        queue: int | None = None,
    ) -> Future[list[SendResult]]:
        """Send messages in order, in as few frames as possible; the Future has all results.

        `queue` is for messages that name no queue. A batch is not atomic: if the Future ends
        with an exception, some of its messages may be stored. If this raises one, none was sent.
        """
        self._lifecycle.check_usable()
        return self._send_batch(topic, messages, queue, self._clock.monotonic_ms())

    def transaction(
        self,
        topic: str,
        body: Body,
        *,
        key: str | bytes | None = None,
        tags: str | None = None,
        properties: Properties = NO_PROPERTIES,
        queue: int | None = None,
        check_after_s: int | None = None,
    ) -> Transaction:
        """Begin a transaction: store a message that nobody gets before it is committed.

            with producer.transaction("orders", body, key="4711"):
                database.commit()

        Waits until the message is confirmed as any other; raises what `send_sync` does. If nobody
        ends the transaction, a producer of the group is asked: after `check_after_s`, or the
        node's `remoting.transaction_timeout`.

        Raises UsageError without a `transaction_group`.
        """
        draft, group = self._draft_half(topic, body, key, tags, properties, queue, check_after_s)
        self._refuse_callback()
        begun = begin(topic, group)
        with group.running.sending(begun.unique):
            future = self._send_half(begun, draft)
            self._drive(future)
            return Transaction(begun.stored(future.result()), self, self._driver, group)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all messages sent so far are settled; False if `timeout_s` is over first.

        Settled is stored or failed: only its Future says which.
        """
        self._lifecycle.check_usable()
        return self._flush(waiting_limit("timeout_s", timeout_s))

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for unsettled messages, at most `timeout_s`, and then end the producer.

        Without `timeout_s` it waits at most 1 s longer than the delivery timeout. A message that is
        not settled by then fails with its last status, or with OutcomeUnknown, but not before a
        Future's callback that is still running has ended. If another thread's `close` still waits,
        that one ends the producer. Logs a warning if sends have failed whose Futures nobody has
        asked. Raises ClientError in a Future's callback, and then changes nothing. Does nothing in
        a forked child.
        """
        limit_s = waiting_limit("timeout_s", timeout_s)
        life = self._lifecycle
        if not life.forked:
            self._refuse_callback()
        life.close()
        if life.forked:
            return
        if limit_s is None:
            limit_s = self._timeout_ms / 1000.0 + 1.0
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + limit_s * 1000.0  # the clock of `flush`
        wait = life.new_wait()
        try:
            with wait:
                self._settle(limit_s)
        finally:
            if not life.close_waits:
                self._end(max(0.0, (deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0))
                if text := self._unread.text():
                    self._unread.count = 0  # a second `close` need not say it again
                    log.warning("%s has ended; %s", life.what, text)

    # -- what a ClusterProducer does otherwise

    def _refuse_callback(self) -> None:
        """Raise ClientError in a Future's callback, before a message is sent that it waits for."""
        self._driver.refuse_own_thread()

    def _refuse_waiting(self) -> None:
        """Raise ClientError if a call must not wait here; the driver refuses its own thread."""

    def _flush(self, limit_s: float | None) -> bool:
        return self._driver.flush(limit_s)

    def _settle(self, limit_s: float) -> None:
        """Take no message any more, and wait for the unsettled ones."""
        self._driver.close_window()
        self._driver.flush(limit_s)

    def _end(self, left_s: float) -> None:
        """Give up what is unsettled, and end all; `left_s` is what is left of the time."""
        self._driver.stop(min(LINGER_S, left_s), left_s)
        if self._checker is not None:
            self._checker.join(LINGER_S)

    def _wake(self) -> None:
        """Let the driver look for what was admitted."""
        self._driver.wake()

    def _drive(self, future: SendFuture[Any]) -> None:
        """Run the driver for a Future of a message that was admitted; see IoDriver."""
        try:
            self._driver.drive_from_caller(future)
        except (OSError, ValueError):
            self._lifecycle.check_usable()  # raises if a signal handler has forked this process
            raise

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
        """Admit a message; then the caller calls `_wake` or `_drive`.

        `expires`, in monotonic ms: when one is given up that may move to another group.
        """
        window, preparer = self._window, self._preparer
        if window.closed:  # read without the lock, which may be taken for good in a forked child
            self._lifecycle.check_usable()
        now = self._clock.monotonic_ms()
        may_move = expires is not None
        if expires is None:
            expires = now + self._timeout_ms
        body, sys_flag = preparer.checked_body(topic, body), 0
        if len(body) >= preparer.packs_from:
            body, sys_flag = preparer.pack(body)
        pairs, text = _NO_PAIRS, None
        if (
            key is not None
            or tags is not None
            or properties is not NO_PROPERTIES
            or delay_level is not None
        ):
            pairs = pairs_of(key, tags, properties, delay_level)
            text = None if key is None else pairs[0][1]
        if queue is None:
            queue_id = self._choose_queue(topic, text, expires)
        elif type(queue) is int and 0 <= queue <= MAX_INT32:
            queue_id = queue
        else:
            queue_id = queue_of("queue", queue)
        future: SendFuture[SendResult] = SendFuture(self._unread)
        while True:
            if window.is_owned():  # asked here first: another call of Python would cost each send
                window.refuse_owner()
            with window.lock:  # so numbers rise in the order in which messages are admitted
                if window.has_room(1):
                    seq = window.next_seq
                    born_ms = self._clock.wall_ms()
                    payload = preparer.encoder.encode(
                        topic, body, queue_id, pairs, seq, born_ms, sys_flag
                    )
                    window.admit(
                        Entry(
                            seq, 1, topic, payload, future, False, now, expires, may_move,
                            queue is None, text,
                        )
                    )  # fmt: skip
                    return future
            now = self._wait_room(1, expires)
            if now >= expires:
                future.fail(_not_sent())
                return future

    def _send_batch(
        self, topic: str, messages: Iterable[OutgoingMessage | Body], queue: int | None, now: float
    ) -> Future[list[SendResult]]:
        """Send a batch whose caller was called at `now`."""
        parts: list[Future[list[SendResult]]] = []
        unread = self._unread
        for drafts in self._preparer.batches(topic, messages, queue):
            try:
                parts.append(self._send_part(topic, drafts, now))
            except HastoreError as failure:
                if not parts:
                    raise
                failed: SendFuture[list[SendResult]] = SendFuture(unread)
                failed.fail(failure)
                parts.append(failed)
                break
            self._driver.wake()
        return _joined(parts, unread)

    # -- internal

    def _send_half(self, begun: Begun, draft: Draft) -> SendFuture[SendResult]:
        """Admit a half message; its Future gets the place of that."""
        self._lifecycle.check_usable()
        now = self._clock.monotonic_ms()
        queue_id = draft.queue
        if queue_id is None:
            queue_id = self._choose_queue(begun.topic, draft.key, now + self._timeout_ms)

        def make(seq: int, future: SendFuture[Any], expires: float) -> Entry:
            half = half_in(queue_id, begun, draft, self._preparer, seq, self._clock.wall_ms())
            return Entry(
                seq, 1, begun.topic, half.encode(queue_id), future, False, now, expires,
                chosen=draft.queue is None, key=draft.key, half=half,
            )  # fmt: skip

        return self._admit(1, make, now)

    def _send_part(self, topic: str, drafts: list[Draft], now: float) -> Future[list[SendResult]]:
        """Admit a part of a batch; all parts have one delivery timeout, from `now` on."""
        encode, expires = self._preparer.encoder.encode, now + self._timeout_ms
        guesses: tuple[tuple[bool, str | None], ...] = ()
        if not self._driver.core.cluster.knows_queues(topic):
            guesses = tuple((draft.queue is None, draft.key) for draft in drafts)
        queues = [
            self._choose_queue(topic, draft.key, expires) if draft.queue is None else draft.queue
            for draft in drafts
        ]

        def make(seq: int, future: SendFuture[Any], expires: float) -> Entry:
            born_ms = self._clock.wall_ms()
            payload = b"".join([
                encode(topic, draft.body, queue_id, draft.pairs, seq + place, born_ms)
                for place, (draft, queue_id) in enumerate(zip(drafts, queues, strict=True))
            ])  # fmt: skip
            return Entry(
                seq, len(drafts), topic, payload, future, True, now, expires, guesses=guesses
            )

        return self._admit(len(drafts), make, now)

    def _admit(
        self, count: int, make: Callable[[int, SendFuture[Any], float], Entry], now: float
    ) -> SendFuture[Any]:
        """Admit an entry; `make` returns it, by its first number, and its Future and deadline.

        `now` is when the caller was called. `_send` has its own such loop, because a function made
        for each message would cost it time.
        """
        window = self._window
        expires = now + self._timeout_ms
        future: SendFuture[Any] = SendFuture(self._unread)
        while True:
            window.refuse_owner()
            with window.lock:
                if window.has_room(count):
                    window.admit(make(window.next_seq, future, expires))
                    return future
            now = self._wait_room(count, expires)
            if now >= expires:
                future.fail(_not_sent())
                return future

    def _wait_room(self, count: int, expires_ms: float) -> float:
        """Wait until the window has room, at most until `expires_ms`; return the time."""
        self._refuse_waiting()
        left_ms = expires_ms - self._clock.monotonic_ms()
        self._driver.wait_room(count, max(0.0, left_ms) / 1000.0)
        return self._clock.monotonic_ms()

    def _wait_found(self, expires_ms: float) -> bool:
        """Wait until a master was found, at most until `expires_ms`; return whether it was."""
        self._refuse_waiting()
        left_ms = expires_ms - self._clock.monotonic_ms()
        return self._driver.wait_found(max(0.0, left_ms) / 1000.0)

    def _choose_queue(self, topic: str, key: str | None, expires_ms: float) -> int:
        core = self._driver.core
        if not core.master_found and not self._wait_found(expires_ms):
            self._lifecycle.check_usable()
            self._window.check_open()
            if core.refused is not None:
                raise NotAuthenticatedError(core.refused)
            raise UnreachableError(f"no master was found: {core.cluster.reason()}")
        if not core.cluster.knows_queues(topic):
            left_ms = expires_ms - self._clock.monotonic_ms()
            self._driver.wait_queues(topic, max(0.0, left_ms) / 1000.0, self._refuse_waiting)
        return self._preparer.choose_queue(topic, key, core.cluster.queues_of(topic))


def _not_sent() -> Exception:
    return failure_of(Status.SERVICE_NOT_AVAILABLE, NOT_SENT, None, unknown=False)


def _lost(core: SendCore, unread: Unread) -> str:
    return "; ".join(text for text in (core.unacknowledged(), unread.text()) if text)


def _joined(parts: list[Future[list[SendResult]]], unread: Unread) -> Future[list[SendResult]]:
    """Return a Future of all parts' results in order, or of the failure that says least."""
    if len(parts) == 1:
        return parts[0]
    whole: SendFuture[list[SendResult]] = SendFuture(unread)

    def go_on(place: int) -> None:
        # It waits for one part at a time, so that the caller and the thread never run this
        # function at the same time.
        while place < len(parts) and parts[place].done():
            place += 1
        if place < len(parts):
            parts[place].add_done_callback(lambda _: go_on(place))
            return
        failures = [failure for part in parts if (failure := part.exception()) is not None]
        if failures:
            whole.set_exception(failure_of_all(failures))
        else:
            whole.set_result([result for part in parts for result in part.result()])

    go_on(0)
    return whole
