"""OrderedCalls: calls that are made in the order in which they were added, without a lock held."""

import threading
from collections import deque
from collections.abc import Callable

Call = Callable[[], None]


class OrderedCalls:
    """A queue of calls. `add` is called under the owner's lock, `run` without it; thread-safe.

    One thread at a time makes calls. If another thread makes them already, `run` leaves its calls
    to that thread, also if a call leads to `run` again.
    """

    def __init__(self) -> None:
        self._calls: deque[Call] = deque()
        self._running = threading.Lock()

    def add(self, call: Call) -> None:
        """Add a call."""
        self._calls.append(call)

    def run(self) -> None:
        """Make the calls that were added, unless another thread does."""
        calls = self._calls
        # After a release the queue is looked at again: a call may have been added by a thread that
        # found the lock taken.
        while calls and self._running.acquire(blocking=False):
            try:
                while calls:
                    calls.popleft()()
            finally:
                self._running.release()
