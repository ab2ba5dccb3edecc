"""A condition variable without a lock of its own.

The methods of threading.Condition are Python code: an exception from a signal handler may leave the
lock taken for good, and a finalizer that needs the lock may run in the thread that holds it. Here
each waiting thread has a SimpleQueue of its own, whose `put` is one step that never blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

from hastore.clock import SYSTEM_CLOCK


class LocklessCondition:
    """Lets threads wait for changes; call `notify_all` after each such change.

    `sleepers` is empty when no thread waits.
    """

    __slots__ = ("sleepers",)

    def __init__(self) -> None:
        self.sleepers: list[SimpleQueue[None]] = []

    def notify_all(self) -> None:
        """Make all waiting threads check again; finalizers and signal handlers may call it too."""
        for sleeper in tuple(self.sleepers):
            if sleeper.empty():  # else that thread is about to check again
                sleeper.put(None)

    def wait_for(self, is_true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_true()`, at most `timeout_s` (None: no limit); return its last result."""
        if is_true():
            return True
        deadline_ms = None
        if timeout_s is not None:
            deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000.0
        sleeper: SimpleQueue[None] = SimpleQueue()
        # Added before the check, so that no change is missed: a notifier makes its change first,
        # then looks for sleepers.
        self.sleepers.append(sleeper)
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
