"""Pace: how long the driver's thread sleeps between two ticks, and when it is woken before."""

import threading

from hastore.clock import Clock

COARSE_MS = 10.0  # while puts come, the thread ticks this often and is not woken for each put
ACTIVE_MS = 100.0
LEAST_MS = 1.0  # also if the core is late with a deadline


class Pace:
    """The sleep of one thread; other threads move the deadline, and wake it."""

    def __init__(self, clock: Clock) -> None:
        self.deadline_ms = 0.0  # when the core wants its next tick
        self.last_put_ms = float("-inf")
        self._clock = clock
        self._wakeup = threading.Condition()
        # When the thread wakes up; 0: it does not sleep; inf: it falls asleep.
        self._until_ms = 0.0

    def sleep(self, until_ms: float, stopping: threading.Event) -> None:
        """Sleep until a time or the deadline, whichever is sooner, or until `wake`."""
        with self._wakeup:
            self._until_ms = float("inf")  # a deadline that moves from here on wakes the thread
            now = self._clock.monotonic_ms()
            until = min(self.deadline_ms, until_ms)
            if now - self.last_put_ms < ACTIVE_MS:
                until = min(until, now + COARSE_MS)
            until = max(until, now + LEAST_MS)
            self._until_ms = until
            if not stopping.is_set():
                self._wakeup.wait((until - now) / 1000)
            self._until_ms = 0.0

    def wake_if_sooner(self) -> None:
        """Wake the thread if it would sleep well beyond the deadline."""
        if self.deadline_ms < self._until_ms - COARSE_MS:
            self.wake()

    def wake(self) -> None:
        """Wake the thread."""
        with self._wakeup:
            self._wakeup.notify()
