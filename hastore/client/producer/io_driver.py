"""Who turns the producer's wheel: its own thread, or the caller of a lone synchronous put.

A put that waits alone would wake the thread to be sent and be woken by it to return: two switches
of threads, a quarter of its time. So a caller that finds nothing under way turns the wheel itself
until its put has ended; the thread then rests on a descriptor of its own.

    by thread   the thread sleeps on the links; callers that send wake it there
    by caller   the thread rests; a caller sleeps on the links, or nobody does between two puts

The wheel goes over to a caller when that holds `turning`, and back to the thread when a caller
leaves something under way, when somebody else sends, and when no caller came for REST_S. Whoever
turns holds `turning`, a caller also while it sleeps; the thread only while it works. A caller
settles, the thread alone tells others of it: a signal's exception may end a caller anywhere.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable
from typing import Any

from hastore.client.connections.transport import Transport
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.lockless_condition import LocklessCondition
from hastore.client.producer.send_core import SendCore
from hastore.clock import Clock

IDLE_S = 0.05


class IoDriver:
    """Turn the core, and ring the bell behind each turn.

    `stopped`: nobody is to turn any more; `left`: nor once all is settled. Both are plain
    words, an Event has a lock; `wake_all` follows.
    """

    def __init__(
        self, transport: Transport, core: SendCore, clock: Clock, progress: LocklessCondition
    ) -> None:
        self.stopped = False
        self.detached = False
        self.driving = threading.Lock()
        self._transport = transport
        self._core = core
        self._now_ms = clock.monotonic_ms
        self._progress = progress
        self._callers_drive = False
        self._caller_is_driving = False  # a caller is at the wheel
        self._caller_puts = 0  # puts of callers; tells the resting thread whether they still come
        self._idle_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.abandon = weakref.finalize(self, os.close, self._idle_event)  # in a forked child
        self._idle_poll = select.poll()
        self._idle_poll.register(self._idle_event, select.POLLIN)

    def wake(self) -> None:
        """Make whoever turns look again; any thread, after what there is to see is in place."""
        self._transport.wake()
        if (
            self._callers_drive and not self._caller_is_driving
        ):  # the thread is idle, or soon will be
            os.eventfd_write(self._idle_event, 1)

    def wake_all(self) -> None:
        """Wake all who sleep; takes no lock."""
        self._transport.wake()
        os.eventfd_write(self._idle_event, 1)

    def run(self, notify: Callable[[], None]) -> None:
        """Turn until it is over; `notify` is called outside of turns."""
        seen = 0
        resting = False
        ended = self._core.ended
        while not self._is_finished():
            if not self._callers_drive:
                resting = False
                with self.driving:
                    if self._callers_drive:
                        continue
                    sleep_s = self._run_once()
                if ended:
                    notify()
                if not self._is_finished():
                    self._transport.sleep(sleep_s)
                continue
            if not resting:  # a wake-up that this thread took may have been the caller's
                self._transport.wake()
            resting = True
            self._wait_idle()
            if self.driving.acquire(blocking=False):
                try:
                    # An interrupted caller may not have reset it.
                    self._caller_is_driving = False
                    cut_off = self._core.interrupted
                    self._run_once()  # expiry, and news of the links
                    idle = self._caller_puts == seen
                    seen = self._caller_puts
                    if idle or cut_off or self._core.under_way():
                        self._callers_drive = False
                finally:
                    self.driving.release()

    def drive_from_caller(self, future: SendFuture[Any]) -> None:
        """Turn until the future has ended if nothing but its put is under way; else wake who turns.

        The put was admitted before. Returns early when it is over, and when others are to be told
        of their Futures. A signal's exception may end it at any point: then the thread mends what
        was left undone.
        """
        core = self._core
        if self.driving.locked():
            self.wake()
            return
        with self.driving:  # as a `with`: no signal comes between taking the lock and the block
            try:
                if not core.interrupted and core.under_way() <= 1:
                    self._caller_is_driving = self._callers_drive = True
                    self._caller_puts += 1
                    now = self._now_ms()
                    core.send_now(now)
                    while not future.done() and not core.ended and not self.stopped:
                        self._transport.sleep(core.sleep_s(now))
                        now = self._now_ms()
                        core.run_once(now)
                        if self._progress.sleepers:
                            self._progress.notify_all()
            finally:
                # In this order: who submits from here on sees that nobody carries.
                self._caller_is_driving = False
                if core.interrupted or core.under_way():
                    self._callers_drive = False
        if not self._callers_drive:
            self.wake_all()

    def _run_once(self) -> float:
        now = self._now_ms()
        self._core.run_once(now)
        if self._progress.sleepers:
            self._progress.notify_all()
        return self._core.sleep_s(now)

    def _is_finished(self) -> bool:
        return self.stopped or (self.detached and self._core.is_idle())

    def _wait_idle(self) -> None:
        if self._idle_poll.poll(IDLE_S * 1000.0):
            os.eventfd_read(self._idle_event)
