"""The two clocks of a node, as an argument: timers run on the monotonic one, stamps come from
the wall.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Tell the time; a simulation passes its own."""

    def monotonic_ms(self) -> float:
        """Return milliseconds that never go back; for deadlines."""
        ...

    def wall_ms(self) -> int:
        """Return milliseconds since 1970 (UTC); for stamps only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def __repr__(self) -> str:
        """Return how signatures show it: `clock=SYSTEM_CLOCK`."""
        return "SYSTEM_CLOCK"

    def monotonic_ms(self) -> float:
        """Return the monotonic clock in milliseconds."""
        return time.monotonic() * 1000.0

    def wall_ms(self) -> int:
        """Return the wall clock in whole milliseconds since 1970 (UTC)."""
        return time.time_ns() // 1_000_000


SYSTEM_CLOCK = SystemClock()
