"""The called end of the HA port, in both modes: accept connections, few, and admit callers.

AcceptSocketService accepts sockets. AcceptedConnections makes an AcceptedConnection of each and
bounds their number by their source (security/slots.py). Its ConnectionReader is the thread that
serves it: in the classic mode ReadSocketService, in the DLedger mode PeerReader. Anyone can reach
the port, so a defect that a caller meets ends its connection and not the node, and warnings are
bounded.

With a secret a link carries nothing before both ends have shown that they have it, and then only
frames with a MAC, or TLS. With `security.ha: tls` a link carries nothing before TLS has verified
both ends' certificates against the group's CA. Whether the certificate is that of the node that the
HELLO names is checked with the HELLO (`check_certificate` in peer.py, which also has the calling
end). A plain caller is refused, so an attacker on the network cannot downgrade a link. Only the
classic protocol of RocketMQ's peers stays plain, where the configuration allows it (ha_service.py,
classic_client.py).
"""

import itertools
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from hastore.addresses import address_text, plain_host
from hastore.bounded_log import BoundedLines
from hastore.errors import AuthenticationError, HastoreError, ProtocolError, TamperedError
from hastore.ha.hello.peer import Deadline, break_link, receive_exactly, split_address
from hastore.listeners import listen
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    CALL_MAGIC,
    MAGIC_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_ANSWER_MAGIC,
    SECRET_CALL_MAGIC,
    Opening,
    check_proof,
)
from hastore.security.sealed_socket import SealedSocket
from hastore.security.slots import KnownHosts, crowded_out, source_of
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import NOT_TLS_ALERT, TlsEngine, begins_tls
from hastore.security.tls_socket import LinkSocket, TlsSocket
from hastore.service import OnFailure, Service

log = logging.getLogger(__name__)


OnRefused = Callable[[str, str], None]  # told of a caller that was refused: its address, and why


class AcceptedConnection:
    """One connection that the HA port has accepted; its `reader` serves it to its end."""

    reader: "ConnectionReader[Any]"  # started once the connection is known

    def __init__(
        self,
        accepted: "AcceptedConnections[Any]",
        sock: socket.socket,
        address: str,
        connection_id: int,
        on_refused: OnRefused,
    ) -> None:
        self.accepted = accepted
        self.on_refused = on_refused
        self.plain = sock
        self.sock: LinkSocket = sock  # the reader puts TLS over it before anything else uses it
        self.address = address
        self.source = source_of(split_address(address)[0])
        self.proved = False  # both ends have shown the secret before HELLO
        self.known = False  # it has one of the slots of the group's own hosts
        # Unique in this process; it tells a node's latest connection from earlier ones.
        self.connection_id = connection_id
        self.spoken = False  # the peer has completed HELLO, or reported as a classic slave
        self._close_lock = threading.Lock()
        self._closed = False

    @property
    def streaming(self) -> bool:
        """Whether the peer was let in: what fails now is no refusal."""
        return False

    def identified(self, *, proved: bool) -> None:
        """Note that the peer has completed HELLO. `proved`: it has shown a secret or certificate.

        Its host then has slots of its own, so that no stranger can keep it out.
        """
        self.spoken = True
        if proved:
            self.known = True
            self.accepted.hosts.learn(self.source)

    def close(self, reason: str) -> None:
        """Break the connection, from any thread; later calls do nothing."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        break_link(self.plain, self.address)
        self.accepted.forget(self)
        self.ended(reason)

    def ended(self, reason: str) -> None:
        """Note, once, that the connection was closed."""
        log.debug("connection of %s is closed: %s", self.address, reason)

    def thread_failed(self, name: str, failure: BaseException) -> None:
        """End this connection, not the node, after a failure of one of its threads.

        The status shows the failure, and a peer connects again. An untrusted peer must not be able
        to end the node.
        """
        self.accepted.note_defect(f"{name} of {self.address}", failure)
        self.close(repr(failure))

    def release(self) -> None:
        """Free the descriptors; the reader calls it at its end."""
        self.plain.close()


C = TypeVar("C", bound=AcceptedConnection)


class NothingSaidError(ProtocolError):
    """A caller has ended the connection before its first byte, as health checks of TCP do."""


def receive_first(sock: socket.socket, deadline: Deadline) -> bytes:
    """Return the first 8 bytes of a caller. Raises NothingSaidError if it leaves without a byte."""
    sock.settimeout(deadline.left_s())
    try:
        begun = sock.recv(1, socket.MSG_PEEK)
    except ConnectionResetError:  # load balancers end their checks so
        begun = b""
    if not begun:
        raise NothingSaidError("the caller has closed the connection and said nothing")
    return receive_exactly(sock, MAGIC_BYTES, deadline)


class ConnectionReader(Service, Generic[C]):
    """The thread of a connection; a subclass gives it a name and implements `serve`."""

    def __init__(self, name: str, connection: C) -> None:
        super().__init__(name, on_failure=connection.thread_failed)
        self._connection = connection

    def run(self) -> None:
        """Serve the connection to its end. A peer's error closes it, and the reason is logged."""
        connection = self._connection
        try:
            connection.close(self.serve())
        except NothingSaidError as silence:  # a health check: nobody was refused
            connection.close(str(silence))
        except (HastoreError, OSError) as error:
            if not connection.streaming or isinstance(error, TamperedError):
                why = str(error)
                connection.accepted.warn("HA connection of %s closed: %s", connection.address, why)
                if isinstance(error, ProtocolError):
                    connection.on_refused(connection.address, why)
            connection.close(str(error))
        finally:
            connection.close("its thread has ended")
            connection.release()

    def serve(self) -> str:
        """Read what the peer begins with, and act on it; return why the connection ends."""
        raise NotImplementedError

    def wake(self) -> None:
        """Unblock the thread by closing the connection."""
        self._connection.close("the node stops")


KNOWN_TIMES = 8  # the group's own hosts have so many times the slots of all strangers together


class AcceptedConnections(Generic[C]):
    """Make a connection of each accepted socket; bound their number. Thread-safe.

    All hosts outside `hosts` have `limit` connections together, those in it KNOWN_TIMES as many, so
    that strangers take nothing away from the group. `make(sock, address, number)` returns the
    connection, which then owns the socket; the number is unique in this process.
    """

    def __init__(
        self,
        limit: int,
        make: Callable[[socket.socket, str, int], C],
        hosts: KnownHosts,
    ) -> None:
        # For warnings about callers: anyone can cause them.
        self.warn = BoundedLines(log).write
        self.failure: str | None = None  # the last defect of this node that ended a connection
        self.hosts = hosts
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

        If its hosts have no slot left, it replaces one that has neither completed HELLO nor sent a
        RocketMQ slave's report: one, drawn at random, of the source that has most of them. If there
        is none, the new one is refused.
        """
        source = source_of(split_address(address)[0])
        with self._lock:
            known = source in self.hosts
            limit = self._limit * KNOWN_TIMES if known else self._limit
            held = [c for c in self._connections if c.known == known]
            silent = [c for c in held if not c.spoken]
            if len(held) >= limit and not silent:
                self.warn("connection of %s refused: %d HA connections are open", address, limit)
                sock.close()
                return
            victim = crowded_out(silent, _source) if len(held) >= limit else None
            if victim is not None:
                # Its thread ends later; until then the next caller could drop the same one.
                self._connections.remove(victim)
            connection = self._make(sock, address, next(self._numbers))
            connection.known = known
            self._connections.append(connection)
        if victim is not None:
            victim.close("dropped for a new connection: it has not said HELLO")
        try:
            connection.reader.start()
        except RuntimeError:  # no more threads
            connection.close("no thread for it")
            raise

    def note_defect(self, name: str, failure: BaseException) -> None:
        """Keep, for the status, that a defect of this node ended a connection."""
        self.failure = (
            f"{name} failed: {failure!r}; the node continues, its log has the details: report it"
        )

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


def _source(connection: AcceptedConnection) -> str:
    return connection.source


LINGER_S = 0.5  # how long a refused caller may take to read why
_LINGER_BYTES = 64 * 1024


def is_call(first: bytes) -> bool:
    """Return whether the first 8 bytes are those of a node of hastore, by TLS or plain."""
    return first in (CALL_MAGIC, SECRET_CALL_MAGIC) or begins_tls(first)


class Admitted(NamedTuple):
    """The link on which a caller's HELLO arrives; with `proved` both ends have shown the secret."""

    sock: LinkSocket
    proved: bool


def admit(
    sock: socket.socket,
    first: bytes,
    deadline: Deadline,
    tls: TlsContexts | None,
    secret: bytes | None = None,
    *,
    may_be_old: bool = False,
) -> Admitted:
    """Do what comes before the caller's HELLO: TLS, the proofs; `first` are the first 8 bytes.

    `may_be_old`: the caller may be of the version before, which proves the secret after its HELLO.
    Raises AuthenticationError or ProtocolError when the caller is refused; it has then been told.
    """
    link: LinkSocket = sock
    if tls is not None:
        link = _admit_tls(sock, first, deadline, tls)
        first = receive_exactly(link, MAGIC_BYTES, deadline)
    elif begins_tls(first):
        _say(sock, ANSWER_MAGIC, deadline)
        raise ProtocolError(
            "the caller speaks TLS, but security.ha is plain here; set it to tls on every node"
        )
    if first == SECRET_CALL_MAGIC:
        if secret is None:
            _say(link, ANSWER_MAGIC, deadline)
            raise AuthenticationError(
                "the caller has a secret, this node has none; set ha.secret_file to the same "
                "bytes on every node"
            )
        return Admitted(_prove(link, secret, deadline), True)
    if first != CALL_MAGIC:
        raise ProtocolError(
            "the caller sent no HELLO of this version; run the same version on all nodes"
        )
    if secret is not None and not may_be_old:
        _say(link, SECRET_ANSWER_MAGIC, deadline)
        raise AuthenticationError(
            "the caller does not prove the secret before its HELLO: ha.secret_file must hold the "
            "same bytes on every node, and every node must have this version"
        )
    return Admitted(link, False)


def _admit_tls(
    sock: socket.socket, first: bytes, deadline: Deadline, tls: TlsContexts
) -> TlsSocket:
    if not begins_tls(first):
        _say(sock, NOT_TLS_ALERT, deadline)
        raise AuthenticationError(
            "the caller does not speak TLS, and nothing else is accepted here; set security.ha: "
            "tls on every node"
        )
    engine = TlsEngine(tls.server(require_certificate=True), server_side=True)
    try:
        return TlsSocket.over(sock, engine, deadline.left_s, received=first)
    except AuthenticationError:
        _say(sock, b"", deadline)  # TLS has said why
        raise
    except TimeoutError as error:
        raise TimeoutError(
            "the caller did not finish its TLS handshake in time (ha.hello_timeout); nothing to do "
            "unless it is a node of this group"
        ) from error


def _prove(link: LinkSocket, secret: bytes, deadline: Deadline) -> LinkSocket:
    """Prove the secret to each other; return the link with MACs, or the same one under TLS."""
    mine = secrets.token_bytes(NONCE_BYTES)
    link.sendall(SECRET_ANSWER_MAGIC + mine)
    theirs = receive_exactly(link, NONCE_BYTES, deadline)
    opening = Opening(secret, theirs, mine, tls=isinstance(link, TlsSocket))
    check_proof(opening.caller_proof, receive_exactly(link, PROOF_BYTES, deadline))
    link.sendall(opening.answerer_proof)
    if not isinstance(link, socket.socket):
        return link
    callers, answerers = opening.keys
    return SealedSocket(link, answerers, callers)


def _say(sock: LinkSocket, last: bytes, deadline: Deadline) -> None:
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
        # A RocketMQ slave, in Java, may take only the IPv4 address of a name.
        listener = listen(host, port, 128, ipv4_first=True)
        listener.settimeout(0.5)
        self._listener = listener
        return address_text(host, listener.getsockname()[1])

    def wake(self) -> None:
        """End the wait for a connection: a listener that is shut down accepts no more.

        If the thread never ran, free the port.
        """
        if self._listener is not None and self._thread is None:
            self._listener.close()
        elif self._listener is not None:
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
                    self._accept(sock, f"{plain_host(peer[0])}:{peer[1]}")
                except (HastoreError, OSError, RuntimeError) as error:
                    self._warn("connection of %s:%s failed: %s", peer[0], peer[1], error)
                    sock.close()
                except BaseException:
                    sock.close()
                    raise
