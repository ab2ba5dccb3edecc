"""BoundedWarnings: log lines that strangers can cause, at a bounded rate."""

import logging
import threading

from hastore.clock import SYSTEM_CLOCK, Clock

BURST = 20  # lines at once
EVERY_MS = 1_000.0  # then one line in this time


class BoundedWarnings:
    """Log at most `burst` warnings at once, and then one in `every_ms`. Any thread may call it.

    The next warning that is logged says how many were left out.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        clock: Clock = SYSTEM_CLOCK,
        burst: int = BURST,
        every_ms: float = EVERY_MS,
    ) -> None:
        self._log = log
        self._clock = clock
        self._span_ms = (burst - 1) * every_ms
        self._every_ms = every_ms
        self._lock = threading.Lock()
        self._due_ms = float("-inf")  # when all lines so far are paid for
        self._left_out = 0

    def warn(self, text: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        with self._lock:
            now = self._clock.monotonic_ms()
            if self._due_ms > now + self._span_ms:
                self._left_out += 1
                return
            self._due_ms = max(self._due_ms, now) + self._every_ms
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, arguments = f"{text} (%d other warnings were not logged)", (*arguments, left_out)
        self._log.warning(text, *arguments)
