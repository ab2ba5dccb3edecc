"""Log lines that others cause: BoundedLines bounds their rate, LineFormatter keeps what strangers
say from looking like other lines, SlowLines tells what was slow, and StartPhase knows which
problems a start brings with it.
"""

import logging
import threading
from dataclasses import dataclass
from datetime import UTC, datetime

from hastore.clock import SYSTEM_CLOCK, Clock

BURST = 20  # lines at once
EVERY_MS = 1_000.0  # then one line in this time
START_MS = 10_000.0  # the nodes of a group are started within this time


@dataclass(slots=True)
class _Kind:
    due_ms: float = float("-inf")  # when all lines so far are paid for
    left_out: int = 0


class BoundedLines:
    """Log at most `burst` lines of a kind at once, and then one in `every_ms`.

    Lines with the same text before the arguments are of a kind: a flood of refused callers does not
    hide that the node has no descriptors left. The next line of the kind says how many were left
    out. Any thread may call it.
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
        self._kinds: dict[str, _Kind] = {}

    def write(self, text: str, *arguments: object) -> None:
        """Log a line, or count it. `text` is a constant: what a peer has said is an argument."""
        with self._lock:
            now = self._clock.monotonic_ms()
            kind = self._kinds.setdefault(text, _Kind())
            if kind.due_ms > now + self._span_ms:
                kind.left_out += 1
                return
            kind.due_ms = max(kind.due_ms, now) + self._every_ms
            left_out, kind.left_out = kind.left_out, 0
        if left_out:
            text = f"{text} (%d other such lines were not logged)"
            arguments = *arguments, left_out
        self._log.log(self._level, text, *arguments)


class StartPhase:
    """The time after a start in which other nodes may be down because they start as well."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._end_ms = clock.monotonic_ms() + START_MS

    def level(self) -> int:
        """Return the level for "a node does not answer": INFO in the phase, WARNING after it."""
        return logging.INFO if self._clock.monotonic_ms() < self._end_ms else logging.WARNING

    def end(self) -> None:
        """End the phase: what happens now is no part of a start."""
        self._end_ms = float("-inf")


class SlowLines:
    """Log what took longer than a threshold, with bounds; `slow_ms` None: nothing does.

    Hot paths compare with `slow_ms` themselves, and call `write` only for what is slow.
    """

    def __init__(
        self, log: logging.Logger, slow_ms: float | None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.slow_ms = float("inf") if slow_ms is None else slow_ms
        self.write = BoundedLines(log, clock=clock, burst=10).write


class LineFormatter(logging.Formatter):
    """Write each message in one line; what is not printable in it is escaped, as in Python's repr.

    A message may quote what a peer has sent. A traceback keeps its lines.
    """

    def formatTime(  # noqa: N802 - logging's name
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        """Return the time in UTC."""
        return utc_time(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line."""
        record.message = one_line(record.message)
        return super().formatMessage(record)


def utc_time(created_s: float) -> str:
    """Return a time since 1970 as the logs write it: 2026-11-22T18:30:00.123Z."""
    at = datetime.fromtimestamp(created_s, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def one_line(text: str) -> str:
    """Return a text in which everything that is not printable is escaped."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
