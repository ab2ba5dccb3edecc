"""hastore.Producer for asyncio: the producer's core, driven by an event loop without a thread.

    send --> queued --admit, once a master was found and if the window has room--> the core

Messages sent within one iteration of the loop are admitted and sent together after it. The loop
watches the transport's descriptor and one timer. Neither driver nor core refers to the Producer:
when the Producer is dropped, the driver goes on with the messages under way as long as the loop
runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hastore.aio.transactions import Beginning, Transaction, run_checks
from hastore.client.arguments import SendOptions, waiting_limit
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.transport_factory import make_transport
from hastore.client.lifecycle import AsyncClosable
from hastore.client.messages import SendResult, Status, failure_of_all
from hastore.client.producer.futures import results_of
from hastore.client.producer.io_driver import LINGER_S
from hastore.client.producer.master_calls import MasterCall
from hastore.client.producer.preparer import (
    NO_PROPERTIES,
    Body,
    Draft,
    OutgoingMessage,
    Preparer,
    Properties,
)
from hastore.client.producer.producer import ProducerClient
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.transactions import (
    Begun,
    TransactionOptions,
    begin,
    half_in,
)
from hastore.client.producer.window import NOT_SENT, Entry, Half, Window
from hastore.client.security import SecurityLike
from hastore.clock import Clock
from hastore.errors import (
    HastoreError,
    NotAuthenticatedError,
    NotStoredError,
    UnreachableError,
    UsageError,
)
from hastore.protocol.api import PutDone, Request

log = logging.getLogger(__name__)


class Delivery:
    """The outcome of a put, passed to the asyncio Future `waiter` unless that was cancelled."""

    __slots__ = ("_ended", "_failure", "_receipt", "_value", "waiter")

    def __init__(self, waiter: asyncio.Future[Any]) -> None:
        self.waiter = waiter
        self._ended = False
        self._receipt: tuple[str, PutDone, int, int | None] | None = None
        self._value: Any = None
        self._failure: BaseException | None = None

    def settle(self, topic: str, reply: PutDone, begin: int, end: int | None = None) -> bool:
        """End it with record `begin` of a reply; with `end`, with its records [begin, end)."""
        self._receipt = (topic, reply, begin, end)
        self._ended = True
        return True

    def succeed(self, value: Any) -> bool:
        """End it with a result."""
        self._value = value
        self._ended = True
        return True

    def fail(self, failure: BaseException) -> bool:
        """End it with an exception."""
        self._failure = failure
        self._ended = True
        return True

    def done(self) -> bool:
        """Whether it has ended; cancelling the waiter does not end it."""
        return self._ended

    def notify(self) -> None:
        """Pass the outcome on to the waiter."""
        if self.waiter.done():
            return
        if self._receipt is not None:
            self.waiter.set_result(results_of(*self._receipt))
        elif self._failure is not None:
            self.waiter.set_exception(self._failure)
        else:
            self.waiter.set_result(self._value)


class _Queued(msgspec.Struct, eq=False):
    """One call whose messages are not admitted yet; a call without drafts is a flush."""

    topic: str
    drafts: list[Draft]
    is_batch: bool
    waiter: asyncio.Future[Any]
    expires_ms: float  # when its messages fail, in the queue or under way
    begun: Begun | None = None  # of a half message


class LoopDriver:
    """Send on an event loop; all methods except `detach` and `abandon` are called on that loop."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        options: SendOptions,
        preparer: Preparer,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        security: SecurityLike = None,
    ) -> None:
        self._options = options
        self._preparer = preparer
        self._loop = loop
        self._clock = clock
        self._window = Window(options.max_in_flight)
        addresses, self._transport = make_transport(addresses, clock, security)
        self._transport.open(addresses)
        silence = self._transport.silence
        cluster = ClusterView(addresses, self._transport.source, why_silent=silence)
        self.core = SendCore(options, self._window, self._transport, cluster)
        self.ended = False
        self._detached = False
        self._queue: deque[_Queued] = deque()
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._send_handle: asyncio.Handle | None = None
        # And when it is due, by the loop's time: not all loops give a handle that can be asked.
        # uvloop calls `call_soon` for what is due at once, and gives its handle.
        self._timer: asyncio.Handle | None = None
        self._timer_s = 0.0
        self._descriptor = self._transport.fileno()
        loop.add_reader(self._descriptor, self._on_ready)
        loop.call_soon(self._on_ready)

    def send(
        self, topic: str, drafts: list[Draft], *, is_batch: bool, begun: Begun | None = None
    ) -> asyncio.Future[Any]:
        """Queue messages that fit in one frame.

        The Future gets the SendResult; for a batch, a list of SendResults. If it is cancelled while
        the messages are queued, they are not sent.
        """
        self._window.check_open()
        expires_ms = self._clock.monotonic_ms() + self._options.delivery_timeout_ms
        waiter: asyncio.Future[Any] = self._loop.create_future()
        self._queue.append(_Queued(topic, drafts, is_batch, waiter, expires_ms, begun))
        if self._send_handle is None:
            self._send_handle = self._loop.call_soon(self._send)
        return waiter

    @property
    def takes_polls(self) -> bool:
        """Whether `call` still takes polls."""
        return self.core.calls.takes_polls

    def call(self, make: Callable[[int], Request], *, is_poll: bool = False) -> asyncio.Future[Any]:
        """Send the master a request; see MasterCall. Raises ClientError once closed."""
        waiter: asyncio.Future[Any] = self._loop.create_future()
        expires_ms = self._clock.monotonic_ms() + self._options.delivery_timeout_ms
        call = MasterCall(make, Delivery(waiter), float("inf") if is_poll else expires_ms, is_poll)
        self.core.calls.admit(call)
        self._loop.call_soon(self._on_ready)
        return waiter

    def stop_polls(self) -> None:
        """Let polls end, and none begin any more."""
        self.core.calls.stop_polls()
        self._on_ready()

    def flush(self) -> asyncio.Future[None]:
        """Return a Future that ends when all earlier messages are settled."""
        self._window.check_open()
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._queue.append(_Queued("", [], False, waiter, float("inf")))
        if self._send_handle is None:
            self._send_handle = self._loop.call_soon(self._send)
        return waiter

    def end(self, linger_s: float = LINGER_S, failure: Exception | None = None) -> None:
        """Disconnect and end unsettled messages with an error, which names `failure` if given."""
        if self.ended:
            return
        self.ended = True
        self._loop.remove_reader(self._descriptor)
        for handle in (self._send_handle, self._timer):
            if handle is not None:
                handle.cancel()
        if failure is None:
            self.core.end("the producer was closed")
            why = "the producer was closed before the message was sent"
        else:
            self.core.fail(failure)
            why = f"the producer failed before the message was sent: {failure!r}"
        while self._queue:
            queued = self._queue.popleft()
            if not queued.drafts:
                _resolve(queued.waiter)
            else:
                _refuse(queued.waiter, why)
        self._notify()
        self._transport.close(linger_s)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the kernel has not taken yet.

        `close` needs this number for `acks` 0, where no answer shows that a put was sent.
        """
        return self._transport.unsent_bytes

    def detach(self) -> None:
        """Let the driver end once all is settled; a finalizer may call this."""
        if not self.ended:
            self._detached = True
            self.core.calls.stop_polls()
            self.core.flush_to = float("inf")
            self._transport.wake()
            if self._loop.is_closed():  # the loop will never run again
                self.ended = True
                self._transport.close(0.0)

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the event loop belongs to the parent."""
        self.ended = True
        self.core.abandon()
        self._transport.abandon()

    def _on_ready(self) -> None:
        """Handle arrivals and deadlines; called by the loop."""
        self._guarded(self._run_once)

    def _run_once(self) -> None:
        self._transport.sleep(0.0)
        now = self._clock.monotonic_ms()
        self.core.run_once(now)
        if self._admit(now):
            self.core.send_now(now)
        self._finish_step(now)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a step. If it raises, end the driver: all waiters get an error with the cause."""
        if self.ended:
            return
        try:
            step()
        except Exception as failure:
            log.exception("the producer has failed")
            self.end(0.0, failure)

    def _send(self) -> None:
        """Send the messages queued in this iteration of the loop; called by the loop."""
        self._send_handle = None
        self._guarded(self._send_queued)

    def _send_queued(self) -> None:
        now = self._clock.monotonic_ms()
        if self._admit(now):
            self.core.send_now(now)
        self._finish_step(now)

    def _finish_step(self, now: float) -> None:
        self._notify()
        if self._detached and not self._queue and self.core.is_idle():
            self.end(0.0)
            return
        sleep_s = self.core.sleep_s(now)
        if self._queue:  # its head has messages: no master was found, or the window is full
            expires_s = max(0.0, self._queue[0].expires_ms - now) / 1000.0
            sleep_s = expires_s if sleep_s < 0.0 else min(sleep_s, expires_s)
        due_s = self._transport.due_s()
        if due_s >= 0.0:
            sleep_s = due_s if sleep_s < 0.0 else min(sleep_s, due_s)
        if sleep_s < 0.0:
            return
        at = self._loop.time() + sleep_s
        if self._timer is not None:
            if self._timer_s <= at:
                return  # a call that comes too early costs less than a new timer
            self._timer.cancel()
        self._timer, self._timer_s = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer = None
        self._on_ready()

    def _notify(self) -> None:
        ended = self.core.ended
        while ended:
            ended.popleft().notify()
        if self._flushes:
            kept = []
            for seq, waiter in self._flushes:
                if self._window.has_settled(seq):
                    _resolve(waiter)
                else:
                    kept.append((seq, waiter))
            self._flushes = kept

    # -- from the queue to the core

    def _admit(self, now: float) -> bool:
        """Admit queued calls in order, as far as there is room; return whether any was admitted."""
        admitted = False
        while self._queue:
            queued = self._queue[0]
            if not queued.waiter.done():  # else the call was cancelled while it was queued
                if queued.drafts:
                    if now < queued.expires_ms and self._must_wait(queued):
                        break
                    self._admit_one(queued, now)
                    admitted = True
                else:
                    seq = self._window.next_seq
                    self.core.flush_to = max(self.core.flush_to, seq)
                    self._flushes.append((seq, queued.waiter))
                    admitted = True
            self._queue.popleft()
        return admitted

    def _must_wait(self, queued: _Queued) -> bool:
        """Whether no master or not its topic's queues are known yet, or the window has no room."""
        if self.core.master_found:
            if not self.core.cluster.knows_queues(queued.topic) and any(
                draft.queue is None for draft in queued.drafts
            ):
                self.core.want_queues(queued.topic)
                return True
            return not self._window.has_room(len(queued.drafts))
        return self.core.refused is None

    def _admit_one(self, queued: _Queued, now: float) -> None:
        """Admit a call's messages, or end it if its time is over or no node accepts the client."""
        cluster = self.core.cluster
        if not self.core.master_found:
            reason = cluster.reason()
            if self.core.refused is not None:
                queued.waiter.set_exception(NotAuthenticatedError(self.core.refused))
            elif any(draft.queue is None for draft in queued.drafts):
                queued.waiter.set_exception(UnreachableError(f"no master was found: {reason}"))
            else:
                _refuse(queued.waiter, f"no writable master: {reason}")
            return
        if now >= queued.expires_ms:
            _refuse(queued.waiter, NOT_SENT)
            return
        topic, drafts, preparer = queued.topic, queued.drafts, self._preparer
        seq, born_ms = self._window.next_seq, self._clock.wall_ms()
        records: list[bytes] = []
        half: Half | None = None
        try:
            for place, (body, key, pairs, named, flag) in enumerate(drafts, seq):
                queue = named
                if queue is None:
                    queue = preparer.choose_queue(topic, key, cluster.queues_of(topic))
                if queued.begun is not None:
                    half = half_in(queue, queued.begun, drafts[0], preparer, place, born_ms)
                    records.append(half.encode(queue))
                    continue
                records.append(
                    preparer.encoder.encode(topic, body, queue, pairs, place, born_ms, flag)
                )
        except HastoreError as failure:
            queued.waiter.set_exception(failure)
            return
        payload = records[0] if len(records) == 1 else b"".join(records)
        delivery, expires = Delivery(queued.waiter), queued.expires_ms
        first, is_batch = drafts[0], queued.is_batch
        self._window.admit(
            Entry(
                seq, len(records), topic, payload, delivery, is_batch, now, expires, key=first.key,
                chosen=first.queue is None and not is_batch, half=half,
            )
        )  # fmt: skip


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _refuse(waiter: asyncio.Future[Any], reason: str) -> None:
    if not waiter.done():
        status = Status.SERVICE_NOT_AVAILABLE
        waiter.set_exception(NotStoredError(f"{status}: {reason}", status))


_POLL_S = 0.01  # the pause between two checks whether the kernel has taken all bytes


class Producer(ProducerClient, AsyncClosable):
    """Send messages from the coroutines of one event loop; see hastore.Producer.

    Messages are sent in the order of the calls. A `send` that is cancelled while its message is
    queued sends nothing; if it is cancelled later, the message is delivered all the same. The
    constructor raises UsageError if no event loop is running.
    """

    _kind = "asyncio Producer"
    _driver: LoopDriver
    _awaits = True

    def _make_driver(
        self, addresses: tuple[str, ...], options: SendOptions, security: SecurityLike
    ) -> LoopDriver:
        self._loop = _running_loop()
        return LoopDriver(addresses, options, self._preparer, self._loop, self._clock, security)

    def _begin(self) -> None:
        self._checks: asyncio.Task[None] | None = None
        if self._transactions is not None and self._transactions.check is not None:
            self._checks = self._loop.create_task(run_checks(self._driver, self._transactions))

    async def send(
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
        """Send a message and wait for its result; raises what hastore.Producer.send_sync does.

        To have many messages in flight, gather many sends: the sends of one iteration of the event
        loop share frames.
        """
        self._check()
        draft = self._preparer.draft(topic, body, key, tags, properties, queue, delay_level)
        draft = self._preparer.packed(draft)
        result: SendResult = await self._driver.send(topic, [draft], is_batch=False)
        return result

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
    ) -> Beginning:
        """Begin a transaction, by `await` or `async with`; see hastore.Producer.transaction.

            async with producer.transaction("orders", body, key="4711"):
                await database.commit()

        A block that is cancelled leaves its transaction open: then a producer of the group is
        asked. Wrong arguments raise UsageError at once.
        """
        self._check()
        draft, group = self._draft_half(topic, body, key, tags, properties, queue, check_after_s)
        return Beginning(lambda: self._begin_one(topic, draft, group))

    async def _begin_one(self, topic: str, draft: Draft, group: TransactionOptions) -> Transaction:
        self._check()
        begun = begin(topic, group)
        with group.running.sending(begun.unique):
            sent = await self._driver.send(topic, [draft], is_batch=False, begun=begun)
            return Transaction(begun.stored(sent), self, self._driver, group)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[OutgoingMessage | Body],
        *,
        queue: int | None = None,
    ) -> list[SendResult]:
        """Send messages in their order and wait for all results.

        A batch is not atomic: if this raises or is cancelled, some messages may be stored.
        """
        self._check()
        split = self._preparer.batches(topic, messages, queue)
        parts = [self._driver.send(topic, drafts, is_batch=True) for drafts in split]
        found: list[SendResult] = []
        failures: list[BaseException] = []
        for part in await asyncio.gather(*parts, return_exceptions=True):
            if isinstance(part, BaseException):
                failures.append(part)
            else:
                found += part
        if failures:
            raise failure_of_all(failures)
        return found

    async def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until all messages sent so far are settled; False if `timeout_s` is over first."""
        self._check()
        return await self._flush(waiting_limit("timeout_s", timeout_s))

    async def close(self, timeout_s: float | None = None) -> None:
        """Wait for unsettled messages, at most `timeout_s`, and then end the producer.

        Without `timeout_s` it waits at most 1 s longer than the delivery timeout. If `close` is
        cancelled, the producer ends at once. A message that is not settled by then fails with its
        last status, or with OutcomeUnknown. If another task's `close` still waits, that one ends
        the producer. Does nothing in a forked child.
        """
        if self._lifecycle.forked:
            return
        self._check_loop()
        limit_s = waiting_limit("timeout_s", timeout_s)
        if limit_s is None:
            limit_s = self._timeout_ms / 1000.0 + 1.0
        self._lifecycle.close()
        deadline = self._loop.time() + limit_s
        wait = self._lifecycle.new_wait()
        try:
            with wait:
                if not self._driver.ended:
                    self._driver.stop_polls()
                    await self._flush(limit_s)
                    until = min(self._loop.time() + LINGER_S, deadline)
                    while self._driver.unsent_bytes and self._loop.time() < until:
                        await asyncio.sleep(_POLL_S)  # here, because `end` would block the loop
        finally:
            if not self._lifecycle.close_waits:
                self._driver.end(0.0 if self._driver.unsent_bytes else LINGER_S)

    async def _flush(self, timeout_s: float | None) -> bool:
        waiter = self._driver.flush()
        try:
            done, _ = await asyncio.wait((waiter,), timeout=timeout_s)
            return bool(done)
        finally:
            waiter.cancel()

    def _check(self) -> None:
        self._lifecycle.check_usable()
        self._check_loop()

    def _check_loop(self) -> None:
        if _running_loop() is not self._loop:
            raise UsageError("an asyncio producer can be used only on its own event loop")


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError as failure:
        raise UsageError(
            "make and use an asyncio producer in coroutines: no event loop is running here"
        ) from failure
