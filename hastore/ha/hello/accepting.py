"""The called end of the HA port, in every mode: accept connections, bound them, open them.

The connections that a node's HA port has accepted, in every mode: few, and none without a use.

The threads of a mode serve the connections (HAService, or PeerLinks of the DLedger mode).

Begin a link at the called end: plain, or by TLS with the certificates of both ends.

With `security.ha: tls` a link carries nothing before TLS has verified both ends' certificates
against the group's CA. Whether the certificate is that of the node that the HELLO names is checked
with the HELLO (`check_certificate` in peer.py, which also has the calling end). A plain caller is
refused, so an attacker on the network cannot downgrade a link. Only the classic protocol of
RocketMQ's peers stays plain, where the configuration allows it (ha_connection.py,
classic_client.py).

AcceptSocketService: the thread that accepts connections on the HA port, in every role.
"""

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from hastore.bounded_log import BoundedLines
from hastore.errors import AuthenticationError, HastoreError, ProtocolError
from hastore.ha.hello.peer import Deadline, receive_exactly, split_address
from hastore.protocol.hello import ANSWER_MAGIC, CALL_MAGIC, MAGIC_BYTES
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import NOT_TLS_ALERT, TlsEngine, begins_tls
from hastore.security.tls_socket import LinkSocket, TlsSocket
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)


class Accepted(Protocol):
    """An accepted connection, as this table needs it."""

    @property
    def spoken(self) -> bool:
        """Whether the peer has completed HELLO, or reported as a classic slave."""
        ...

    @property
    def reader(self) -> Service:
        """The thread that serves the connection; it is started after the connection is known."""
        ...

    def close(self, reason: str) -> None:
        """Tear the connection down, from any thread; later calls do nothing."""
        ...


C = TypeVar("C", bound=Accepted)


class AcceptedConnections(Generic[C]):
    """Make a connection of each accepted socket, at most `limit` at a time. Thread-safe.

    `make(sock, address, number)` returns the connection, which then owns the socket; the number is
    unique in this process.
    """

    def __init__(self, limit: int, make: Callable[[socket.socket, str, int], C]) -> None:
        # For warnings about callers: anyone can cause them.
        self.warn = BoundedLines(log).write
        self._limit = limit
        self._make = make
        self._lock = threading.Lock()
        self._connections: list[C] = []
        self._numbers = itertools.count(1)

    def all(self) -> list[C]:
        """Return the connections, oldest first."""
        with self._lock:
            return list(self._connections)

    def accept(self, sock: socket.socket, address: str) -> None:
        """Take a new connection.

        At the limit it replaces the oldest connection that has neither completed HELLO nor sent a
        RocketMQ slave's report. If there is no such connection, the new one is refused.
        """
        with self._lock:
            silent = [c for c in self._connections if not c.spoken]
            full = len(self._connections) >= self._limit
            victim = silent[0] if full and silent else None
            if full and victim is None:
                self.warn(
                    "connection of %s refused: %d HA connections are open", address, self._limit
                )
                sock.close()
                return
            if victim is not None:
                # Its thread ends later; until then the next caller would drop the same one.
                self._connections.remove(victim)
            connection = self._make(sock, address, next(self._numbers))
            self._connections.append(connection)
        if victim is not None:
            victim.close("dropped for a new connection: it has not said HELLO")
        try:
            connection.reader.start()
        except RuntimeError:  # no more threads
            connection.close("no thread for it")
            raise

    def forget(self, connection: C) -> None:
        """Drop a closed connection."""
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)

    def stop(self) -> None:
        """Close all connections and wait for their threads."""
        connections = self.all()
        for connection in connections:
            connection.close("the node stops")
        for connection in connections:
            connection.reader.stop()


LINGER_S = 0.5  # how long a refused caller may take to read why
_LINGER_BYTES = 64 * 1024


def is_call(first: bytes) -> bool:
    """Return whether the first 8 bytes are those of a node of hastore, by TLS or plain."""
    return first == CALL_MAGIC or begins_tls(first)


def admit(
    sock: socket.socket, first: bytes, deadline: Deadline, tls: TlsContexts | None
) -> LinkSocket:
    """Return the link on which the caller's HELLO arrives; `first` are the first 8 bytes.

    Raises AuthenticationError or ProtocolError when the caller is refused; it has then been told.
    """
    if tls is None:
        if begins_tls(first):
            _say(sock, ANSWER_MAGIC, deadline)
            raise ProtocolError(
                "the caller speaks TLS, but security.ha is plain here; set it to tls on every node"
            )
        return sock
    if not begins_tls(first):
        _say(sock, NOT_TLS_ALERT, deadline)
        raise AuthenticationError(
            "the caller does not speak TLS, and nothing else is accepted here; set security.ha: "
            "tls on every node"
        )
    engine = TlsEngine(tls.server(require_certificate=True), server_side=True)
    try:
        link = TlsSocket.over(sock, engine, deadline.left_s, received=first)
    except AuthenticationError:
        _say(sock, b"", deadline)  # TLS has said why
        raise
    except TimeoutError as error:
        raise TimeoutError(
            "the caller did not finish its TLS handshake in time (ha.hello_timeout); nothing to do "
            "unless it is a node of this group"
        ) from error
    if receive_exactly(link, MAGIC_BYTES, deadline) != CALL_MAGIC:
        raise ProtocolError("the caller sent no HELLO of this version")
    return link


def _say(sock: socket.socket, last: bytes, deadline: Deadline) -> None:
    """Send the last bytes, and give the caller a moment to read them.

    If the socket were closed at once, while bytes of the caller wait to be read, the kernel would
    reset the connection, and the caller would not learn why.
    """
    try:
        begun_s = deadline.left_s()
        sock.settimeout(min(LINGER_S, begun_s))
        sock.sendall(last)
        sock.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES
        while left > 0:
            lingered_s = begun_s - deadline.left_s()
            if lingered_s >= LINGER_S:  # it sends byte by byte
                return
            sock.settimeout(LINGER_S - lingered_s)
            got = len(sock.recv(left))
            if not got:
                return
            left -= got
    except OSError as error:  # it has left, or is too slow; TimeoutError too
        log.debug("the caller did not wait for the reason: %s", error)


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
