"""The two clocks of a node: monotonic time for deadlines, wall time for timestamps.

Most code takes its clock as an argument, so that a simulation can pass its own.

The monotonic clock is Linux's CLOCK_BOOTTIME, which goes on while the machine is suspended: what
was granted for a time, such as the lock of a queue, must have ended when the machine wakes up.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic_ms(self) -> float:
        """Return a time in milliseconds that never goes back, for deadlines."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970 (UTC), for timestamps only."""
        ...


_MONOTONIC = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # other systems lack it


class SystemClock:
    """The machine's clocks."""

    def __repr__(self) -> str:
        """Return the name, so that a signature shows `clock=SYSTEM_CLOCK`."""
        return "SYSTEM_CLOCK"

    def monotonic_ms(self) -> float:
        """Return the monotonic clock in milliseconds; it counts the time of a suspend."""
        return time.clock_gettime(_MONOTONIC) * 1000.0

    def wall_ms(self) -> int:
        """Return the wall clock in whole milliseconds since 1970 (UTC)."""
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()


class AwakeClock(SystemClock):
    """The machine's clocks, of which the monotonic one stands still while it is suspended.

    Its times are those of other programs: Python's `time.monotonic`, Java's `System.nanoTime`.
    """

    def __repr__(self) -> str:
        """Return the name, as that of the other clock."""
        return "AWAKE_CLOCK"

    def monotonic_ms(self) -> float:
        """Return the monotonic clock in milliseconds, without the time of a suspend."""
        return time.monotonic() * 1000.0


AWAKE_CLOCK = AwakeClock()
