"""A named thread with an orderly life: start, stop, join."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

OnFailure = Callable[[str, BaseException], None]  # a service's name, and what ended its thread


def raise_failure(_name: str, failure: BaseException) -> None:
    """Raise the failure once more, in its thread, where `threading.excepthook` prints it: for who
    runs a service without a node around it.
    """
    raise failure


class Service:
    """Run `run()` in one daemon thread named after the service.

    A subclass implements `run()`, which returns soon after `stopping` is set, and `wake()` when
    its thread may sleep on something else than `stopping`. An exception that escapes `run()` is
    logged and handed to `on_failure`, which nobody can leave out: a service never dies in silence.
    A node's ends the node (docs/architecture.md, "When a thread fails").
    """

    def __init__(self, name: str, *, on_failure: OnFailure) -> None:
        self.name = name
        self.stopping = threading.Event()
        self.failure: BaseException | None = None
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; a second call is an error."""
        if self._thread is not None:
            raise RuntimeError(f"{self.name} was started twice")
        self._thread = threading.Thread(target=self._guarded, name=self.name, daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Do the work until `stopping` is set."""
        raise NotImplementedError

    def wake(self) -> None:
        """Wake the thread out of whatever it sleeps on, so that it sees `stopping`."""

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ask the thread to end and wait for it; False when it still runs after `timeout_s`
        seconds.
        """
        self.stopping.set()
        self.wake()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as failure:  # handed on below: a thread's death must be known
            self.failure = failure
            log.exception("%s died", self.name)
            self._on_failure(self.name, failure)
