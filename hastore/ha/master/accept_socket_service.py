"""AcceptSocketService: the thread that accepts connections on the HA port, in every role."""

import logging
import socket
from collections.abc import Callable

from hastore.bounded_log import BoundedLines
from hastore.errors import HastoreError
from hastore.ha.hello.peer import split_address
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)


class AcceptSocketService(Service):
    """Accept connections and pass each to `accept`, which then owns the socket.

    If `accept` raises, this service closes the socket.
    """

    def __init__(
        self, accept: Callable[[socket.socket, str], None], *, on_failure: OnFailure
    ) -> None:
        super().__init__("AcceptSocketService", on_failure=on_failure)
        self._accept = accept
        self._warn = BoundedLines(log).write
        self._listener: socket.socket | None = None

    def bind(self, address: str) -> str:
        """Bind and listen; return the bound address. Raises OSError when that fails."""
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        listener.settimeout(0.5)
        self._listener = listener
        return f"{host}:{listener.getsockname()[1]}"

    def wake(self) -> None:
        """End the wait for a connection: a listener that is shut down accepts no more."""
        if self._listener is not None:
            try:
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                log.debug("shutdown of the HA port's listener: %s", error)

    def run(self) -> None:
        """Accept until stopped."""
        listener = self._listener
        assert listener is not None, "bind() comes first"
        with listener:
            while not self.stopping.is_set():
                try:
                    sock, peer = listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    if self.stopping.is_set():
                        return
                    self._warn("accepting on the HA port failed: %s", error)
                    self.stopping.wait(0.2)
                    continue
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self._accept(sock, f"{peer[0]}:{peer[1]}")
                except (HastoreError, OSError, RuntimeError) as error:
                    self._warn("connection of %s:%s failed: %s", peer[0], peer[1], error)
                    sock.close()
                except BaseException:
                    sock.close()
                    raise
