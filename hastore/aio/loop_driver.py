"""Drives the producer's core on an event loop, without a thread and without blocking.

    send --> queued --admit, once a master was found and if the window has room--> the core

Messages sent within one iteration of the loop are admitted and sent together after it. The loop
watches the transport's descriptor and one timer. Nothing here refers to the Producer: when the
Producer is dropped, the driver goes on with the messages under way as long as the loop runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.transport_factory import make_transport
from hastore.client.producer.futures import results_of
from hastore.client.producer.options import SendOptions
from hastore.client.producer.preparer import Draft, Preparer
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.window import Entry, Window
from hastore.client.results import Status
from hastore.client.security import SecurityLike
from hastore.clock import Clock
from hastore.errors import (
    HastoreError,
    NotAuthenticatedError,
    NotStoredError,
    UnreachableError,
)
from hastore.protocol.api import PutDone

log = logging.getLogger(__name__)

LINGER_S = 1.0


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
    expires_ms: float  # when the call fails if no master was found


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
        cluster = ClusterView(addresses, self._transport.source)
        self.core = SendCore(options, self._window, self._transport, cluster)
        self.ended = False
        self._detached = False
        self._queue: deque[_Queued] = deque()
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._send_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = self._transport.fileno()
        loop.add_reader(self._descriptor, self._on_ready)
        loop.call_soon(self._on_ready)

    def send(self, topic: str, drafts: list[Draft], *, is_batch: bool) -> asyncio.Future[Any]:
        """Queue messages that fit in one frame.

        The Future gets the SendResult; for a batch, a list of SendResults. If it is cancelled while
        the messages are queued, they are not sent.
        """
        self._window.check()
        expires_ms = self._clock.monotonic_ms() + self._options.delivery_timeout_ms
        waiter: asyncio.Future[Any] = self._loop.create_future()
        self._queue.append(_Queued(topic, drafts, is_batch, waiter, expires_ms))
        if self._send_handle is None:
            self._send_handle = self._loop.call_soon(self._send)
        return waiter

    def flush(self) -> asyncio.Future[None]:
        """Return a Future that ends when all earlier messages are settled."""
        self._window.check()
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

    def detach(self) -> str:
        """Let the driver end once all is settled; return a text that names the unsettled messages.

        A finalizer may call this.
        """
        lost = self.core.unacknowledged()
        if not self.ended:
            self._detached = True
            self.core.flush_to = float("inf")
            self._transport.wake()
            if self._loop.is_closed():  # the loop will never run again
                self.ended = True
                self._transport.close(0.0)
        return lost

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
        if self._queue and not self.core.master_found:
            expires_s = max(0.0, self._queue[0].expires_ms - now) / 1000.0
            sleep_s = expires_s if sleep_s < 0.0 else min(sleep_s, expires_s)
        due_s = self._transport.due_s()
        if due_s >= 0.0:
            sleep_s = due_s if sleep_s < 0.0 else min(sleep_s, due_s)
        if sleep_s < 0.0:
            return
        at = self._loop.time() + sleep_s
        if self._timer is not None:
            if self._timer.when() <= at:
                return  # a call that comes too early costs less than a new timer
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._on_timer)

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
                    waits = not self.core.master_found and self.core.refused is None
                    if waits and now < queued.expires_ms:
                        break
                    if self.core.master_found and not self._window.has_room(len(queued.drafts)):
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

    def _admit_one(self, queued: _Queued, now: float) -> None:
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
        topic, drafts, preparer = queued.topic, queued.drafts, self._preparer
        seq, born_ms = self._window.next_seq, self._clock.wall_ms()
        records: list[bytes] = []
        try:
            for place, (body, key, pairs, named) in enumerate(drafts, seq):
                queue = named
                if queue is None:
                    queue = preparer.choose_queue(topic, key, cluster.default_queues)
                records.append(preparer.encode(topic, body, queue, pairs, place, born_ms))
        except HastoreError as failure:
            queued.waiter.set_exception(failure)
            return
        payload = records[0] if len(records) == 1 else b"".join(records)
        expires = now + self._options.delivery_timeout_ms
        delivery = Delivery(queued.waiter)
        self._window.admit(
            Entry(seq, len(records), topic, payload, delivery, queued.is_batch, now, expires)
        )


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _refuse(waiter: asyncio.Future[Any], reason: str) -> None:
    if not waiter.done():
        status = Status.SERVICE_NOT_AVAILABLE
        waiter.set_exception(NotStoredError(f"{status}: {reason}", status))
