"""How a job reports what it does, and how a signal stops it.

How a job reports what it does; the commands show it as a bar or as lines.

Stop a job by a signal: it ends in order, which takes a few seconds.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from hastore.spark.worker import SIGNALS, handled


class Progress(Protocol):
    """What a job calls while it runs, from its own thread only."""

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Begin a step of `total` units (None: unknown), such as messages; it ends the one before.

        `text` names the step: "export 2 of 7".
        """
        ...

    def advance(self, amount: int) -> None:
        """Count units of the step as done."""
        ...

    def keep(self, text: str) -> None:
        """Say what remains when the job is stopped now, such as "1,200 messages are exported".

        The command prints the last text after Ctrl-C, followed by the advice to run it again.
        """
        ...


class NoProgress:
    """Shows nothing: for callers without a screen, such as notebooks and tests."""

    def begin(self, text: str, total: int | None, unit: str) -> None:
        """Do nothing."""

    def advance(self, amount: int) -> None:
        """Do nothing."""

    def keep(self, text: str) -> None:
        """Do nothing."""


class Stop:
    """Turns the first signal into a KeyboardInterrupt, and ignores the ones after it.

    If those interrupted the end of the job, processes would be left behind.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the first signal; None before it

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Handle signals in the body."""
        with handled(self._on_signal):
            yield

    def listen(self) -> None:
        """Handle signals again, after other code has set handlers of its own in the body."""
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt
