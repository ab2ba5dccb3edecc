"""Stop a job by a signal: it ends in order, which takes a few seconds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hastore.spark.interrupts import SIGNALS, handled


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
