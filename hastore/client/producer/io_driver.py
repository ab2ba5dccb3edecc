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

from hastore.client.connections.transport import Links
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.lockless_condition import Bell
from hastore.client.producer.send_core import SendCore
from hastore.clock import Clock

REST_S = 0.05


class Wheel:
    """Turn the core, and ring the bell behind each turn.

    `stopped`: nobody is to turn any more; `left`: nor once all is settled. Both are plain
    words, an Event has a lock; `wake_all` follows.
    """

    def __init__(self, links: Links, core: SendCore, clock: Clock, bell: Bell) -> None:
        self.stopped = False
        self.left = False
        self.turning = threading.Lock()
        self._links = links
        self._core = core
        self._now_ms = clock.monotonic_ms
        self._bell = bell
        self._by_caller = False
        self._carrying = False  # a caller is at the wheel
        self._carried = 0  # puts of callers; tells the resting thread whether they still come
        self._rest = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.abandon = weakref.finalize(self, os.close, self._rest)  # in a forked child
        self._resting = select.poll()
        self._resting.register(self._rest, select.POLLIN)

    def wake(self) -> None:
        """Make whoever turns look again; any thread, after what there is to see is in place."""
        self._links.wake()
        if self._by_caller and not self._carrying:  # the thread rests, or is on its way to
            os.eventfd_write(self._rest, 1)

    def wake_all(self) -> None:
        """Wake all who sleep; takes no lock."""
        self._links.wake()
        os.eventfd_write(self._rest, 1)

    def run(self, notify: Callable[[], None]) -> None:
        """Turn until it is over; `notify` is called outside of turns."""
        seen = 0
        resting = False
        ended = self._core.ended
        while not self._is_over():
            if not self._by_caller:
                resting = False
                with self.turning:
                    if self._by_caller:
                        continue
                    sleep_s = self._turn()
                if ended:
                    notify()
                if not self._is_over():
                    self._links.sleep(sleep_s)
                continue
            if not resting:  # a wake-up that this thread took may have been the caller's
                self._links.wake()
            resting = True
            self._pause()
            if self.turning.acquire(blocking=False):
                try:
                    self._carrying = False  # its caller may have been cut off before saying so
                    cut_off = self._core.cut_off
                    self._turn()  # expiry, and news of the links
                    idle = self._carried == seen
                    seen = self._carried
                    if idle or cut_off or self._core.under_way():
                        self._by_caller = False
                finally:
                    self.turning.release()

    def carry(self, future: SendFuture[Any]) -> None:
        """Turn until the future has ended if nothing but its put is under way; else wake who turns.

        The put was admitted before. Returns early when it is over, and when others are to be told
        of their Futures. A signal's exception may end it at any point: then the thread mends what
        was left undone.
        """
        core = self._core
        if self.turning.locked():
            self.wake()
            return
        with self.turning:  # as a `with`: no signal comes between taking the lock and the block
            try:
                if not core.cut_off and core.under_way() <= 1:
                    self._carrying = self._by_caller = True
                    self._carried += 1
                    now = self._now_ms()
                    core.send_now(now)
                    while not future.done() and not core.ended and not self.stopped:
                        self._links.sleep(core.sleep_s(now))
                        now = self._now_ms()
                        core.turn(now)
                        if self._bell.sleepers:
                            self._bell.ring()
            finally:
                # In this order: who submits from here on sees that nobody carries.
                self._carrying = False
                if core.cut_off or core.under_way():
                    self._by_caller = False
        if not self._by_caller:
            self.wake_all()

    def _turn(self) -> float:
        now = self._now_ms()
        self._core.turn(now)
        if self._bell.sleepers:
            self._bell.ring()
        return self._core.sleep_s(now)

    def _is_over(self) -> bool:
        return self.stopped or (self.left and self._core.is_idle())

    def _pause(self) -> None:
        if self._resting.poll(REST_S * 1000.0):
            os.eventfd_read(self._rest)
