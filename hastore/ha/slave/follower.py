"""Follower: the base class of HAClient and ClassicHAClient; its thread owns a link to a master."""

import logging
import threading

from hastore.ha.node.member import Member
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.service import Service

log = logging.getLogger(__name__)


class Follower(Service):
    """Runs as the thread HAClient; other threads may call `drop_link()` and `stop()`."""

    def __init__(self, member: Member, problem: str) -> None:
        super().__init__("HAClient", on_failure=member.on_failure)
        self._member = member
        self._lock = threading.Lock()
        self._stream: SlaveStream | None = None
        self._retry_now = threading.Event()
        self.accept_loss = False
        # A problem that the operator should look at, although a stream flows.
        self.notice: str | None = None
        self.problem: str | None = problem  # why no stream flows; None while one does
        # The followed master's node number; a RocketMQ master has none.
        self.master: int | None = None
        # The newest master that the last survey found: (its epoch, its node number).
        self.known_master: tuple[int, int] | None = None

    @property
    def linked(self) -> bool:
        """Whether a stream flows."""
        return self._stream is not None

    def drop_link(self) -> None:
        """Close the link, if there is one, and look for a master at once.

        Called, for example, when the node has made a promise.
        """
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self._retry_now.set()

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self.drop_link()

    def _run_stream(self, stream: SlaveStream, master: int | None, text: str) -> None:
        """Stream until the link ends, with or without an error."""
        with self._lock:
            self._stream = stream
        try:
            if self.stopping.is_set():  # stop() may have come before the stream was set
                return
            self._retry_now.clear()
            self.master, self.problem = master, None
            log.info("%s", text)
            stream.run()
        finally:
            with self._lock:
                self._stream = None
            self.master = None

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem and not self.stopping.is_set():
            log.warning("%s", problem)
        self.problem = problem
