"""Wait for something to come true, told by others who take no lock for it.

A Condition's methods are Python: a signal's exception inside of one may leave its lock taken for
good, and a finalizer that needs the lock may run in the very thread that holds it. Here each
sleeper has a SimpleQueue of its own, whose `put` is one step that never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from hastore.clock import SYSTEM_CLOCK


class LocklessCondition:
    """Ring after each change that somebody may wait for; `sleepers` is empty when nobody does."""

    __slots__ = ("sleepers",)

    def __init__(self) -> None:
        self.sleepers: list[SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Make all who wait look again; any thread, also in a finalizer or a signal's handler."""
        for sleeper in tuple(self.sleepers):
            if sleeper.empty():  # else it is about to look again anyway
                sleeper.put(None)

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_true`, at most `timeout_s` (None: without end); returns whether it is."""
        if is_true():
            return True
        deadline_ms = None
        if timeout_s is not None:
            deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000.0
        sleeper: SimpleQueue[None] = SimpleQueue()
        self.sleepers.append(sleeper)  # before the look that counts: who rings changes, then looks
        try:
            while not is_true():
                left_s = None
                if deadline_ms is not None:
                    left_s = (deadline_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0
                    if left_s <= 0.0:
                        return False
                try:
                    sleeper.get(timeout=left_s)
                except Empty:
                    return is_true()
            return True
        finally:
            self.sleepers.remove(sleeper)
