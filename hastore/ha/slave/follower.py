"""What a slave's two clients share: a thread that owns one link, which others may drop."""

import logging
import threading

from hastore.ha.node.member import Member
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.service import Service

log = logging.getLogger(__name__)


class Follower(Service):
    """The thread HAClient; `drop_link()` and `stop()` may come from any other."""

    def __init__(self, member: Member, problem: str) -> None:
        super().__init__("HAClient", on_failure=member.on_failure)
        self._member = member
        self._lock = threading.Lock()
        self._stream: SlaveStream | None = None
        self._retry_now = threading.Event()
        self.accept_loss = False
        self.notice: str | None = None  # what a person should look at although a stream flows
        self.problem: str | None = problem  # why no stream flows; None while it does
        self.master: int | None = None  # the linked master's node number; RocketMQ's has none
        self.known_master: tuple[int, int] | None = None  # (epoch, node) open in the last survey

    @property
    def linked(self) -> bool:
        """Whether the stream of a master flows."""
        return self._stream is not None

    def drop_link(self) -> None:
        """Close the link, if there is one, and look for a master anew at once (after a promise)."""
        with self._lock:
            stream = self._stream
        if stream is not None:
            stream.close()
        self._retry_now.set()

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        self.drop_link()

    def _run_stream(self, stream: SlaveStream, master: int | None, text: str) -> None:
        """Stream until the link ends, however it does."""
        with self._lock:
            self._stream = stream
        try:
            if self.stopping.is_set():  # whoever stops has not seen this stream
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
