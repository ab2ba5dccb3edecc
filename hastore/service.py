"""Threads: a named one with a start and a stop, and a sleep that any code may end."""

import contextlib
import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

OnFailure = Callable[[str, BaseException], None]  # called with the service's name, the exception


def raise_failure(_name: str, failure: BaseException) -> None:
    """Raise the failure again in its thread, so that `threading.excepthook` prints it.

    A service that runs outside a node gets this as its `on_failure`.
    """
    raise failure


class Service:
    """Run `run()` in one daemon thread named after the service.

    A subclass implements `run()`, which returns soon after `stopping` is set, and `wake()` if its
    thread can block on anything but `stopping`. An exception that escapes `run()` is kept in
    `failure`, logged, and passed to `on_failure` from that thread. `on_failure` ends the node or,
    for a thread of one HA connection, that connection (docs/architecture.md, "If a thread fails").
    A `run()` that returns early is not reported.
    """

    def __init__(self, name: str, *, on_failure: OnFailure) -> None:
        self.name = name
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # `stop` must not meet a thread that is not started yet

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread. Raises RuntimeError at a second call."""
        with self._starting:
            if self._thread is not None:
                raise RuntimeError(f"{self.name} was started twice")
            self._thread = threading.Thread(target=self._guarded, name=self.name, daemon=True)
            self._thread.start()

    def run(self) -> None:
        """Do the work until `stopping` is set."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wake the thread from a blocking call, so that it sees `stopping`."""

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ask the thread to end and wait for it. Return False if it still runs after `timeout_s`.

        If called from the service's own thread, or before `start`, return True without waiting.
        """
        self.stopping.set()
        self.wake()
        with self._starting:
            thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as failure:  # every exception ends the thread, so each is reported
            self.failure = failure
            try:
                log.exception("%s died", self.name)
            finally:  # a log that fails must not hide it: the node would go on without this thread
                self._on_failure(self.name, failure)


class Sleeper:
    """The sleep of one thread, which other threads, finalizers and signal handlers may end.

    An Event does not serve here: a handler that runs in the thread that waits may need the lock
    that its own thread holds. SimpleQueue does not serve, either: in CPython, `get` with a timeout
    waits for ever if the thread is delayed past its deadline between two steps of `get`, and if a
    signal comes just after the deadline. A lock's `acquire` looks at the time that is left.
    """

    __slots__ = ("_awake",)

    def __init__(self) -> None:
        self._awake = threading.Lock()
        self._awake.acquire()

    def wake(self) -> None:
        """End the sleep, or the next one if the thread does not sleep; this never blocks."""
        with contextlib.suppress(RuntimeError):  # the lock is free: woken before
            self._awake.release()

    def sleep(self, timeout_s: float | None = None) -> bool:
        """Sleep until `wake`, at most `timeout_s` (None: no limit); return whether it was woken."""
        return self._awake.acquire(timeout=-1 if timeout_s is None else timeout_s)
