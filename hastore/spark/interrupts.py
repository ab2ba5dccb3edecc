"""Parts of a program in which Ctrl-C and the other signals that stop it wait, or have no effect.

Only the main thread handles signals; in another thread nothing is changed.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Handle the first signal that comes in the body when the body has ended; drop later ones."""
    came: list[int] = []
    try:
        with handled(lambda number, _frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let signals in the body have no effect. Child processes do not inherit this."""
    with handled(lambda _number, _frame: None):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `handler` handle the signals in the body, and the handlers from before afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
