"""Drives the producer's core: in a thread of its own, or in the caller of a single blocking put.

If a blocking put wakes the thread and waits for it, the two thread switches are 25 % of the put's
latency. So a caller that finds nothing else under way runs the core itself until its put has ended.
Meanwhile the thread sleeps on a descriptor of its own.

    driven by the thread    the thread sleeps on the transport; `wake` wakes it there
    driven by callers       the thread is idle; a caller sleeps on the transport during its put

A caller takes over by taking the lock `_driving`. The thread takes over again when a caller leaves
work unfinished, when another thread sends, or when no caller has come for IDLE_S. A driving caller
holds `_driving` even while it sleeps; the thread holds it only while it works.

Callers and the thread settle Futures and notify `_progress`. Only the thread notifies the waiters
of Futures: Python runs signal handlers in the main thread, so no handler's exception interrupts it.

An exception from a signal handler (KeyboardInterrupt) may interrupt a driving caller between any
two instructions. The caller's put stays admitted: within IDLE_S the thread takes over and restarts
the core (see `SendCore`). The restart drops the connection to the master; then the thread goes on
with the put. After an interrupt between `admit` and `wake`, the put is sent at the next wake-up. A
handler that calls the producer may wait for ever for a lock that the interrupted call holds.

At the exit of the interpreter there may be no thread: Python 3.12 begins none any more, as for a
producer that is made in an atexit handler (`_threadless`), and after the atexit handlers every
version stops all that there are, wherever they are; finalizers (`__del__`) still call. Then each
call that admits something, or waits, drives the core until all has ended, and notifies the Futures.

Other code may run inside a driving caller, too: a log handler, a finalizer. What it calls must not
wait for the core, which waits for it; `refuse_own_thread` tells it so, by `_caller`.

Neither this module nor the modules that it uses refer to the Producer, so that an unused Producer
can be freed. Its thread then goes on until all messages are settled, at most for the delivery
timeout, and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterator
from sys import is_finalizing
from typing import Any

from hastore.client.arguments import SendOptions
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.transport import Transport
from hastore.client.connections.transport_factory import check_threads, make_transport
from hastore.client.lifecycle import CarefulLog, Lifecycle
from hastore.client.producer.futures import LocklessCondition, Outcome, SendFuture
from hastore.client.producer.master_calls import MasterCall
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.window import Window
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ClientError
from hastore.protocol import api

log = CarefulLog(logging.getLogger(__name__))

IDLE_S = 0.05
LINGER_S = 1.0  # for bytes that the kernel has not taken when the producer ends
STOP_S, STOP_STEP_S = 5.0, 0.1  # for the thread to end; and until it is looked at what it does


class IoDriver:
    """Run the core until `stop` is called or, after `detach`, until all messages are settled.

    `_stopped` and `_detached` are plain attributes because an Event has a lock. A method that sets
    one of them then calls `_wake_all`, except in a forked child, which has no thread.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        options: SendOptions,
        window: Window,
        clock: Clock,
        security: SecurityLike = None,
        transport: Transport | None = None,
    ) -> None:
        """Start to connect; `transport` is used if there is one, instead of a new one.

        Raises UsageError if gevent has replaced the threads.
        """
        check_threads()
        self._window = window
        self._timeout_ms = options.delivery_timeout_ms
        self._now_ms = clock.monotonic_ms
        if transport is None:
            addresses, transport = make_transport(addresses, clock, security)
        self._transport = transport
        self._transport.open(addresses)
        silence = self._transport.silence
        cluster = ClusterView(addresses, self._transport.source, why_silent=silence)
        self.core = SendCore(options, window, self._transport, cluster)
        self._progress = LocklessCondition()  # notified after each `run_once`
        self._driving = threading.Lock()
        self._calling = threading.Lock()  # held by a driving caller, for `refuse_own_thread`
        self._caller = 0  # the last driving caller's thread; set under `_driving`
        self._stopped = False
        self._ended = False
        self._linger_s = LINGER_S
        self._detached = False
        self._forked = False
        self._threadless = False  # no thread could be started: the interpreter ends
        self._alone_in = 0  # the thread that drives the core, or calls a callback, without another
        self._callers_drive = False
        self._caller_is_driving = False
        self._caller_puts = 0  # shows the idle thread whether callers still come
        self._idle_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close_idle_event = weakref.finalize(self, os.close, self._idle_event)
        self._close_idle_event.atexit = False  # the thread and callers go on at exit
        self._idle_poll = select.poll()
        self._idle_poll.register(self._idle_event, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="ProducerSender", daemon=True)
        self._lifecycle: Lifecycle | None = None  # while the thread runs
        self._notifying: Outcome | None = None  # whose callbacks the thread calls now

    # -- called by the Producer, in any thread

    def start(self, lifecycle: Lifecycle) -> None:
        """Start the thread, which keeps `lifecycle` until it ends.

        So a fork is noticed also after the producer was dropped.
        """
        self._lifecycle = lifecycle
        try:
            self._thread.start()
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
            self._threadless = True
            self._lifecycle = None

    @property
    def alone(self) -> bool:
        """Whether the driver's thread is not there, or will never run again."""
        return self._threadless or is_finalizing()

    def wake(self) -> None:
        """Make the driver look for work; any thread calls this after something was admitted."""
        self._transport.wake()
        if self._callers_drive and not self._caller_is_driving:
            os.eventfd_write(self._idle_event, 1)
        if self.alone:
            self._drive_alone(self.core.is_idle)

    def look_for_master(self) -> None:
        """Let the nodes be asked for their master, if none is known; any thread may call this."""
        if not self.core.wants_master:
            self.core.wants_master = True
            self._wake_all()

    def drive_from_caller(self, future: SendFuture[Any]) -> None:
        """If no other put is under way, run the core until the future ends; else wake the driver.

        The caller has admitted the put. Returns early if the driver is stopped, or if other Futures
        have ended, because only the thread notifies their waiters.
        """
        core = self.core
        if self.alone:
            self._drive_alone(future.done)
        elif self._driving.locked():
            self.wake()
        else:
            # `with`: CPython runs no signal handler between taking the lock and the block.
            with self._driving:
                self._caller = threading.get_ident()
                with self._calling:
                    try:
                        if not core.interrupted and core.under_way() <= 1:
                            self._caller_is_driving = self._callers_drive = True
                            self._caller_puts += 1
                            now = self._now_ms()
                            core.send_now(now)
                            while not future.done() and not core.ended and not self._stopped:
                                self._transport.sleep(core.sleep_s(now))
                                now = self._now_ms()
                                core.run_once(now)
                                if self._progress.sleepers:
                                    self._progress.notify_all()
                    finally:
                        # Cleared first, so that `wake` wakes the idle thread from here on.
                        self._caller_is_driving = False
                        if core.interrupted or core.under_way():
                            self._callers_drive = False
            if not self._callers_drive:
                self._wake_all()
        if not future.done():
            self.refuse_own_thread()

    @property
    def takes_polls(self) -> bool:
        """Whether `call` still takes polls."""
        return self.core.calls.takes_polls

    def call(
        self, make: Callable[[int], api.Request], *, is_poll: bool = False
    ) -> SendFuture[Any]:
        """Send the master a request; see MasterCall. Raises ClientError once closed."""
        if not is_poll:
            self.refuse_own_thread()
        future: SendFuture[Any] = SendFuture()
        expires_ms = float("inf") if is_poll else self._now_ms() + self._timeout_ms
        self.core.calls.admit(MasterCall(make, future, expires_ms, is_poll))
        self.wake()
        return future

    def wait_room(self, count: int, timeout_s: float) -> None:
        """Wait until the window has room, is closed, or the time is over."""
        window = self._window

        def has_room() -> bool:
            with window.lock:
                return window.closed or window.has_room(count)

        self._wait_for(has_room, timeout_s)

    def wait_found(self, timeout_s: float) -> bool:
        """Wait until a master was found; return False if the time is over before that.

        Returns False at once if no node accepts this client.
        """
        core, window = self.core, self._window
        self._wait_for(
            lambda: core.master_found or window.closed or core.refused is not None, timeout_s
        )
        return core.master_found

    def wait_queues(self, topic: str, timeout_s: float, refuse: Callable[[], None]) -> None:
        """Wait until it is known how many queues a topic has, or the time is over.

        A Future's callback does not wait, as `refuse` says: the core then chooses the queue of its
        message.
        """
        core, window = self.core, self._window
        core.want_queues(topic)
        self._wake_all()
        with contextlib.suppress(ClientError):
            refuse()
            self._wait_for(
                lambda: core.cluster.knows_queues(topic) or window.closed or bool(core.refused),
                timeout_s,
            )

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until all entries admitted so far are settled; False if the time is over first."""
        seq = self._window.next_seq
        self.core.flush_to = max(self.core.flush_to, seq)
        self._wake_all()
        return self._wait_for(lambda: self._window.has_settled(seq), timeout_s)

    def close_window(self) -> None:
        """Admit nothing any more; threads that wait for room raise ClientError."""
        self._window.close()
        self.core.calls.stop_polls()
        self._wake_all()
        self._progress.notify_all()

    def stop(self, linger_s: float = LINGER_S, limit_s: float = STOP_S) -> None:
        """Give up unsettled entries, end the thread and wait for it, at most STOP_S.

        Bytes that the kernel has not taken yet get `linger_s`. A callback that the thread is at
        gets `limit_s`.
        """
        self._linger_s = linger_s
        self._stopped = True
        self._wake_all()
        if self._thread is threading.current_thread():
            return
        if self.alone:
            if not self._ended:
                self._end(None)
            return
        left_s, before = STOP_S, None
        while self._thread.is_alive() and left_s > 0.0:
            notifying = self._notifying
            if STOP_S - left_s >= limit_s and notifying is not None and notifying is before:
                return
            before = notifying
            self._thread.join(STOP_STEP_S)
            left_s -= STOP_STEP_S

    def detach(self) -> None:
        """Let the thread end once all is settled; takes no lock and does not wait."""
        if self._forked:
            return
        self._detached = True
        self.core.calls.stop_polls()
        self.core.flush_to = float("inf")
        self._wake_all()

    def abandon(self) -> None:
        """Close the descriptors in a forked child, which has no thread; takes no lock."""
        self._stopped = self._forked = True
        self._lifecycle = None
        self.core.abandon()
        self._transport.abandon()
        self._close_idle_event()

    def _wake_all(self) -> None:
        """Wake the thread and a driving caller; takes no lock."""
        self._transport.wake()
        os.eventfd_write(self._idle_event, 1)

    def _wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        if not is_true():
            self.refuse_own_thread()
        if self.alone:
            return self._drive_alone(is_true, timeout_s)
        return self._progress.wait_for(is_true, timeout_s)

    def _drive_alone(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Run the core in the caller until `is_true()`, at most `timeout_s`; return its result.

        In a callback that this calls itself it returns at once: the outer call goes on.
        """
        if self._alone_in == threading.get_ident():
            return is_true()
        limit_s = float("inf") if timeout_s is None else timeout_s
        end_ms = SYSTEM_CLOCK.monotonic_ms() + limit_s * 1000.0
        while not is_true() and not self._stopped:
            with self._sole():
                sleep_s = self._run_once()
                self._notify()
                left_s = (end_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0
                if is_true() or left_s <= 0.0:
                    break
                if left_s < float("inf"):
                    sleep_s = left_s if sleep_s < 0.0 else min(sleep_s, left_s)
                self._transport.sleep(sleep_s)
        return is_true()

    @contextlib.contextmanager
    def _sole(self) -> Iterator[None]:
        """Keep other callers from the core.

        Threads that were stopped for good may have been anywhere: they keep `_driving`, and the
        core begins anew after a call that they have not ended.
        """
        with contextlib.nullcontext() if is_finalizing() else self._driving:
            self._alone_in = threading.get_ident()
            try:
                yield
            finally:
                self._alone_in = 0

    def refuse_own_thread(self) -> None:
        """Raise ClientError in a Future's callback, and in what runs inside a call.

        None of them may wait: the core, or the call, waits for it.
        """
        if not self._forked:  # by a signal handler, perhaps in the middle of a call
            self._window.refuse_owner()
        if threading.current_thread() is self._thread:
            raise ClientError(
                "a Future's callback must not wait: the producer's thread runs it; nor a log "
                "handler there: use `send`"
            )
        # In this order: while `_calling` is held, `_caller` is who holds it.
        own = threading.get_ident()
        is_inside = self._alone_in == own or (self._calling.locked() and self._caller == own)
        if is_inside and not self._forked:
            raise ClientError(
                "a log handler, or what else runs inside a call of a producer, must not wait for "
                "the producer: use `send`"
            )

    # -- the thread

    def _run(self) -> None:
        """Drive the core until `_is_finished`; then end all unsettled messages."""
        try:
            self._drive()
        except BaseException as failure:  # waiting and later calls raise it, so none hangs
            try:
                log.exception("ProducerSender died")
            finally:  # a log handler may raise
                self._end(failure)
        else:
            self._end(None)
        finally:
            self._lifecycle = None  # it refers to this driver, which is freed at once without it

    def _drive(self) -> None:
        seen = 0
        idle = False
        ended = self.core.ended
        while not self._is_finished():
            if not self._callers_drive:
                idle = False
                with self._driving:
                    if self._callers_drive:
                        continue
                    sleep_s = self._run_once()
                if ended:
                    self._notify()
                if not self._is_finished():
                    self._transport.sleep(sleep_s)
                continue
            if not idle:  # this thread may have consumed a wake-up that was meant for the caller
                self._transport.wake()
            idle = True
            self._wait_idle()
            if self._driving.acquire(blocking=False):
                try:
                    self._caller_is_driving = False  # an interrupted caller may have left it set
                    interrupted = self.core.interrupted
                    self._run_once()  # for deadlines and changes of the connections
                    no_caller_came = self._caller_puts == seen
                    seen = self._caller_puts
                    if no_caller_came or interrupted or self.core.under_way():
                        self._callers_drive = False
                finally:
                    self._driving.release()

    def _run_once(self) -> float:
        now = self._now_ms()
        self.core.run_once(now)
        if self._progress.sleepers:
            self._progress.notify_all()
        return self.core.sleep_s(now)

    def _is_finished(self) -> bool:
        return self._stopped or (self._detached and self.core.is_idle())

    def _wait_idle(self) -> None:
        if self._idle_poll.poll(IDLE_S * 1000.0):
            os.eventfd_read(self._idle_event)

    def _end(self, failure: BaseException | None) -> None:
        """End all unsettled messages, with the thread's failure if there is one."""
        if failure is not None:
            self._stopped = True  # makes a driving caller release `_driving`
            self._wake_all()
        self._ended = True
        try:
            with self._sole() if self.alone else self._driving:
                if failure is None:
                    self.core.end("the producer was closed")
                else:
                    self.core.fail(failure)
                self._transport.close(self._linger_s)
        finally:
            self._notify()
            self._progress.notify_all()

    def _notify(self) -> None:
        """Notify the waiters of the Futures that have ended."""
        ended = self.core.ended
        while ended:
            try:
                self._notifying = outcome = ended.popleft()
                outcome.notify()
            except BaseException:  # from a caller's callback, which must not end the thread
                log.exception("a Future's callback failed")
        self._notifying = None
