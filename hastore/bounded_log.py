"""Log lines that strangers can cause: BoundedLines bounds their rate, and LineFormatter keeps
what they say from looking like other lines.
"""

import logging
import threading

from hastore.clock import SYSTEM_CLOCK, Clock

BURST = 20  # lines at once
EVERY_MS = 1_000.0  # then one line in this time


class BoundedLines:
    """Log at most `burst` lines at once, and then one in `every_ms`. Any thread may call it.

    The next line that is logged says how many were left out.
    """

    def __init__(
        self,
        log: logging.Logger,
        *,
        level: int = logging.WARNING,
        clock: Clock = SYSTEM_CLOCK,
        burst: int = BURST,
        every_ms: float = EVERY_MS,
    ) -> None:
        self._log = log
        self._level = level
        self._clock = clock
        self._span_ms = (burst - 1) * every_ms
        self._every_ms = every_ms
        self._lock = threading.Lock()
        self._due_ms = float("-inf")  # when all lines so far are paid for
        self._left_out = 0

    def write(self, text: str, *arguments: object) -> None:
        """Log a line, or count it."""
        with self._lock:
            now = self._clock.monotonic_ms()
            if self._due_ms > now + self._span_ms:
                self._left_out += 1
                return
            self._due_ms = max(self._due_ms, now) + self._every_ms
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{text} (%d other such lines were not logged)"
            arguments = *arguments, left_out
        self._log.log(self._level, text, *arguments)


class LineFormatter(logging.Formatter):
    """Write each message in one line; what is not printable in it is escaped, as in Python's repr.

    A message may quote what a peer has sent. A traceback keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        record.message = one_line(record.message)
        return super().formatMessage(record)


def one_line(text: str) -> str:
    """Return a text in which everything that is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
