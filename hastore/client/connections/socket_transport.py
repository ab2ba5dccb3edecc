"""The transport over plain non-blocking sockets that speak ZMTP, with one epoll and one eventfd.

Each address has a `NodeConnection`, with a socket if it has one:

WAITING --due--> RESOLVING --> CONNECTING --> HANDSHAKE --READY--> PROVING --> UP
       ^            (names only, in another thread)      (with an identity only)   |
       +--------------------- any error, after a pause ----------------------------+

With TLS, its handshake comes before that of ZMTP, and `unsent` has ciphertext.

The owner calls `collect` and `send`, which do not wait. An exception from a signal handler may
interrupt either of them anywhere. After that, `send` refuses all messages until the next `collect`,
which finds `_in_call` still set. `collect` then reports all connections as down and opens new ones,
because it cannot know what was read, sent or reported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import struct
import termios
import weakref
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from hastore.client.connections.bootstrap import Targets, host_and_port, look_up, numeric_targets
from hastore.client.connections.proving import UNAUTHENTICATED, Exchange, Prover
from hastore.client.connections.transport import (
    CONNECT_MS,
    MAX_REPLY_BYTES,
    PING_MS,
    PONG_MS,
    RECONNECT_MS,
    RECONNECT_MS_MAX,
    UNSENT_BYTES_MAX,
    AddressSource,
    Arrival,
    NoAnswer,
    Quiet,
)
from hastore.client.lifecycle import CarefulLog
from hastore.clock import Clock
from hastore.errors import AuthenticationError, ConfigError, ProtocolError
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front, encode_ping

if TYPE_CHECKING:
    from hastore.security.tls_engine import TlsEngine

log = CarefulLog(logging.getLogger(__name__))

RECEIVE_BYTES = 64 * 1024
RECEIVE_BYTES_MAX = 1024 * 1024  # the largest read, while a frame is incomplete
CLOSING_READS_MAX = 64
LOOK_MS = 500.0  # how often it is looked whether the bytes before a PING still leave
JOIN_BYTES_MAX = 32 * 1024  # a payload up to this size is joined with its header
_LIMITS = (MAX_REPLY_BYTES, MAX_REPLY_BYTES)
_IN = select.EPOLLIN
_IN_OUT = select.EPOLLIN | select.EPOLLOUT
_NEVER = float("inf")
_SIOCOUTQ = termios.TIOCOUTQ  # its number on every processor: linux/sockios.h
_INT = struct.Struct("=i")
_NOTHING = "nothing answers there: its machine is off, or the network drops what is sent"
_SAYS_NOTHING = "it takes the connection and says nothing: it hangs, or is stopped"


class ConnectionState(Enum):
    """The state of a connection; see SocketTransport."""

    WAITING = "waiting for the next attempt"
    RESOLVING = "looking up the name"
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    PROVING = "proving the identity"
    UP = "up"


class NodeConnection:
    """One address, and its socket if it has one."""

    __slots__ = (
        "acked_bytes", "address", "attempts", "due_ms", "exchange", "heard_ms", "host", "pause_ms",
        "ping_end", "pinged_ms", "port", "sent_bytes", "silence", "sock", "state", "targets", "tls",
        "unsent", "unsent_bytes", "watched", "zmtp",
    )  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, self.port = host_and_port(address)
        self.state = ConnectionState.WAITING
        self.sock: socket.socket | None = None
        self.zmtp = new_zmtp()
        self.tls: TlsEngine | None = None
        self.exchange: Exchange | None = None
        self.targets: Targets = []  # (family, address), in the resolver's order
        self.attempts = 0
        self.silence: NoAnswer | None = None  # why the last attempt has failed
        self.pause_ms = RECONNECT_MS
        self.due_ms = 0.0  # when the next attempt begins, or the current attempt times out
        self.heard_ms = 0.0
        # When the unanswered PING was sent, or was last seen to wait for bytes that leave.
        self.pinged_ms: float | None = None
        self.ping_end: int | None = None  # that of `sent_bytes`, while it may wait for them
        self.acked_bytes = 0  # at the last look
        self.sent_bytes = 0  # all that were to be sent by this socket
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = 0  # of them, that the kernel has not taken
        self.watched = False  # whether epoll reports when the kernel takes more bytes


class Wakeup:
    """An eventfd that stays open as long as a thread may write to it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not at exit: its owner still lives, and the number may soon be that of another file.
        weakref.finalize(self, os.close, self.descriptor).atexit = False


def sealed(connection: NodeConnection, buffers: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the bytes for the socket."""
    tls = connection.tls
    if tls is None:
        return buffers
    return (tls.encrypt(buffers[0] if len(buffers) == 1 else b"".join(buffers)),)


def acked(connection: NodeConnection) -> int:
    """Return how many of `sent_bytes` the other end's system has taken; 0 if not known."""
    sock = connection.sock
    if sock is None:
        return 0
    try:
        (kept,) = _INT.unpack(fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(_INT.size)))
    except OSError as failure:  # the connection is broken; epoll reports it
        log.debug("client: %s: %s", connection.address, failure)
        return 0
    return connection.sent_bytes - connection.unsent_bytes - int(kept)


def new_zmtp() -> ZmtpConnection:
    """Return the client's end of a connection."""
    return ZmtpConnection(SocketType.DEALER, _LIMITS)


class SocketTransport:
    """A client's connections; see `Transport` for the contract of each method."""

    def __init__(self, clock: Clock, prover: Prover | None = None) -> None:
        """Prepare; `prover` proves who this client is, and checks the nodes."""
        self._clock = clock
        self._prover = prover
        self._connections: dict[str, NodeConnection] = {}
        self._by_descriptor: dict[int, NodeConnection] = {}
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.descriptor, _IN)
        self._woken = False
        self._closed = False
        self._in_call = False  # a call is under way, or was interrupted
        self._ready: list[tuple[int, int]] = []  # what `sleep` found
        self._resolved: deque[tuple[NodeConnection, Targets]] = deque()
        self._next_timer_ms = _NEVER
        self._news: list[Arrival] = []  # found outside of `collect`, which reports it

    @property
    def source(self) -> AddressSource | None:
        """None: the owner gives the addresses."""
        return None

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a connection, up or not."""
        return list(self._connections)

    def is_up(self, address: str) -> bool:
        """Whether the address is connected."""
        connection = self._connections.get(address)
        return connection is not None and connection.state is ConnectionState.UP

    def heard_ms(self, address: str) -> float:
        """Return when bytes last came from an address, in monotonic ms; 0 if not known."""
        connection = self._connections.get(address)
        return 0.0 if connection is None else connection.heard_ms

    def silence(self, address: str) -> NoAnswer | None:
        """Return why an address is not connected, as far as known; None if it is connected.

        The reason of a final failure stays while the next attempt is under way. A name with several
        addresses has none before all of them were tried.
        """
        connection = self._connections.get(address)
        if connection is None or connection.state is ConnectionState.UP:
            return None
        last, state = connection.silence, connection.state
        if last is not None and last.kind.is_final:
            tried = connection.attempts >= len(connection.targets)
            return last if tried or last.kind in (Quiet.TLS, Quiet.UNAUTHENTICATED) else None
        if state in (ConnectionState.HANDSHAKE, ConnectionState.PROVING):
            return NoAnswer(Quiet.TIMED_OUT, _SAYS_NOTHING)
        if state is ConnectionState.RESOLVING:
            text = f"the name {connection.host} is looked up, without an answer"
            return last or NoAnswer(Quiet.TIMED_OUT, text)
        return last or NoAnswer(Quiet.TIMED_OUT, _NOTHING)

    def open(self, addresses: Iterable[str]) -> None:
        """Start a connection to each address that has none."""
        for address in addresses:
            if address not in self._connections:
                self._open_new(address)

    def forget(self, address: str) -> Arrival:
        """Try an address no more that has no connection; returns what its owner has to learn."""
        self._disconnect(self._connections.pop(address))
        return Arrival(address, None, up=False, gone=True)

    def reopen(self, address: str) -> None:
        """Replace a connection; reports no "down", only the "up" of the new connection."""
        self._open_new(address)

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request; False if the address is not connected or its buffer is full."""
        connection = self._connections.get(address)
        if (
            connection is None
            or connection.state is not ConnectionState.UP
            or connection.unsent_bytes > UNSENT_BYTES_MAX
        ):
            return False
        if self._in_call:
            return False  # a call was interrupted; the next `collect` restarts the connections
        if payload is None:
            buffers: tuple[bytes, ...] = (encode_front(api.encode(message)),)
        else:
            front = encode_front(api.encode(message), len(payload))
            joined = len(payload) <= JOIN_BYTES_MAX
            buffers = (front + payload,) if joined else (front, payload)
        self._in_call = True  # set after encoding, because a failed encoding changes nothing
        sent = self._send_buffers(connection, sealed(connection, buffers))
        self._in_call = False
        return sent

    def wake(self) -> None:
        """Wake the thread that sleeps; any thread may call this."""
        if not self._woken:
            try:
                self._woken = True
                os.eventfd_write(self._wakeup.descriptor, 1)
            except BaseException:  # a signal handler raised it, perhaps before the write
                self._woken = False
                raise

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived; sleep once if there is nothing."""
        arrivals = self.collect()
        if arrivals or not timeout_s:
            return arrivals
        self.sleep(timeout_s)
        return self.collect()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until something may have arrived or a timer is due."""
        if self._next_timer_ms != _NEVER:
            due_s = self.due_s()
            timeout_s = due_s if timeout_s < 0.0 else min(timeout_s, due_s)
        events = self._epoll.poll(timeout_s)
        for descriptor, _ in events:
            if descriptor == self._wakeup.descriptor:
                try:
                    os.eventfd_read(descriptor)
                except BlockingIOError:
                    continue  # another sleeping thread has read it
                finally:
                    # Cleared after the read: a `wake` between the two need not write, because
                    # `collect` follows. Also cleared after an exception; otherwise later calls of
                    # `wake` would do nothing.
                    self._woken = False
        self._ready = events  # if another thread replaces them, epoll reports them again

    def fileno(self) -> int:
        """Return the epoll's descriptor, which is readable when `collect` may have something."""
        return self._epoll.fileno()

    def due_s(self) -> float:
        """Return the seconds until the next timer is due, -1 if there is none."""
        if self._next_timer_ms == _NEVER:
            return -1.0
        return max(0.0, self._next_timer_ms - self._clock.monotonic_ms()) / 1000.0

    def collect(self) -> list[Arrival]:
        """Return what has arrived, and run the timers that are due."""
        arrivals: list[Arrival] = []
        if self._closed:
            return arrivals
        self._woken = False  # an interrupted `sleep` may have left it set
        if self._in_call:
            self._restart(arrivals)
        self._in_call = True
        now = self._clock.monotonic_ms()
        events, self._ready = self._ready or self._epoll.poll(0), []
        for descriptor, mask in events:
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self._handle_event(connection, mask, now, arrivals)
            elif descriptor != self._wakeup.descriptor:
                with contextlib.suppress(OSError):  # left open by an interrupted call
                    self._epoll.unregister(descriptor)
        while self._resolved:
            self._apply_targets(*self._resolved.popleft(), now)
        if now >= self._next_timer_ms:
            self._run_timers(now, arrivals)
        news, self._news = self._news, []
        arrivals += news
        self._in_call = False
        return arrivals

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections; unsent bytes get `linger_s` more to reach the kernel."""
        if self._closed:
            return
        deadline = self._clock.monotonic_ms() + linger_s * 1000.0
        for connection in self._connections.values():
            sock = connection.sock
            while sock is not None and connection.unsent and connection.state is ConnectionState.UP:
                left_ms = deadline - self._clock.monotonic_ms()
                if (
                    left_ms <= 0.0
                    or not _wait_writable(sock, left_ms)
                    or not self._flush(connection)
                ):
                    break
        self._closed = True
        for connection in self._connections.values():
            self._disconnect(connection, in_order=True)
        self._connections.clear()
        self._epoll.close()

    def sent_bytes(self, address: str) -> int:
        """Return how many bytes `send` has taken for an address's connection."""
        connection = self._connections.get(address)
        return 0 if connection is None else connection.sent_bytes

    def acked_bytes(self, address: str) -> int:
        """Return how many of `sent_bytes` the other end's system has taken; 0 if not known."""
        connection = self._connections.get(address)
        return 0 if connection is None else acked(connection)

    @property
    def unsent_bytes(self) -> int:
        """The bytes of all connections that the kernel has not taken yet."""
        return sum([connection.unsent_bytes for connection in self._connections.values()])

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the parent keeps its connections."""
        self._closed = True
        for connection in self._connections.values():
            if connection.sock is not None:
                # The socket stays registered: the parent uses the same epoll instance.
                connection.sock.close()
                connection.sock = None
        self._connections.clear()
        self._epoll.close()

    # -- events of a connection

    def _handle_event(
        self, connection: NodeConnection, mask: int, now: float, arrivals: list[Arrival]
    ) -> None:
        sock = connection.sock
        if sock is None:
            return
        if connection.state is ConnectionState.CONNECTING:
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                silence = _silence_of(failure)
                self._fail(connection, silence.text, now, arrivals, silence.kind)
                return
            connection.state = ConnectionState.HANDSHAKE
            tls = connection.tls
            begin = connection.zmtp.take_output() if tls is None else tls.take_outgoing()
            self._send_buffers(connection, (begin,))
            return
        if mask & ~select.EPOLLOUT:  # a read finds errors and the end of the stream
            self._receive(connection, now, arrivals)
        if mask & select.EPOLLOUT and connection.sock is sock and not self._flush(connection):
            self._receive(connection, now, arrivals)  # the read finds the error

    def _receive(self, connection: NodeConnection, now: float, arrivals: list[Arrival]) -> None:
        sock, zmtp = connection.sock, connection.zmtp
        assert sock is not None
        size = max(RECEIVE_BYTES, min(zmtp.missing_bytes, RECEIVE_BYTES_MAX))
        try:
            data = sock.recv(size)
        except BlockingIOError:
            return
        except OSError as failure:
            self._fail(connection, str(failure), now, arrivals)
            return
        if not data:
            self._fail(connection, "closed by the node", now, arrivals)
            return
        connection.heard_ms = now
        if connection.pinged_ms is not None:  # the next PING is due before the PONG's timer
            connection.pinged_ms = None
            self._next_timer_ms = min(self._next_timer_ms, now + PING_MS)
        tls = connection.tls
        if tls is not None:
            data = tls.receive(data)
            last = tls.take_outgoing()
            if last:
                self._send_buffers(connection, (last,))
        messages = zmtp.receive(data) if data else []
        if zmtp.has_output and (tls is None or tls.open):
            self._send_buffers(connection, sealed(connection, (zmtp.take_output(),)))
        if connection.state is ConnectionState.HANDSHAKE and zmtp.is_open:
            self._begin_proof(connection, now, arrivals)
            if connection.sock is not sock:
                return
        for message in messages:
            try:
                reply = api.decode_reply(message[0])
            except ProtocolError as failure:
                log.warning("client: %s sent a malformed reply: %s", connection.address, failure)
                continue
            if connection.exchange is not None:
                self._follow_proof(connection, connection.exchange, reply, now, arrivals)
                if connection.sock is not sock:
                    return
            elif isinstance(reply, api.Failed) and reply.status == UNAUTHENTICATED:
                self._refuse(connection, reply.reason, now, arrivals)
                return
            else:
                arrivals.append(
                    Arrival(connection.address, reply, message[1] if len(message) > 1 else b"")
                )
        if tls is not None and tls.failure is not None:
            assert self._prover is not None
            why = self._prover.tls_text(tls.failure)
            self._refuse(connection, why, now, arrivals, Quiet.TLS)
        elif zmtp.failure is not None:  # checked last: replies before the failure are valid
            unknown = connection.state is ConnectionState.PROVING and api.NO_REQUEST in zmtp.failure
            if unknown:
                text = f"the node is too old to know identities; upgrade it ({zmtp.failure})"
                self._refuse(connection, text, now, arrivals)
            elif zmtp.refused:
                wire = Quiet.TLS if "TLS" in zmtp.failure else Quiet.UNAUTHENTICATED
                self._refuse(connection, zmtp.failure, now, arrivals, wire)
            else:
                log.warning("client: %s: %s", connection.address, zmtp.failure)
                self._fail(connection, zmtp.failure, now, arrivals)

    # -- who the client is

    def _begin_proof(self, connection: NodeConnection, now: float, arrivals: list[Arrival]) -> None:
        """Begin to prove the identity, if there is one; else the connection is up."""
        try:
            exchange = None if self._prover is None else self._prover.exchange()
        except ConfigError as failure:  # the key file has changed
            self._refuse(connection, str(failure), now, arrivals)
            return
        if exchange is None:
            self._come_up(connection, now, arrivals)
            return
        connection.state, connection.exchange = ConnectionState.PROVING, exchange
        self._send_request(connection, exchange.first())

    def _follow_proof(
        self,
        connection: NodeConnection,
        exchange: Exchange,
        reply: api.Reply,
        now: float,
        arrivals: list[Arrival],
    ) -> None:
        try:
            following = exchange.follow(reply)
        except AuthenticationError as failure:
            self._refuse(connection, str(failure), now, arrivals)
            return
        if following is not None:
            self._send_request(connection, following)
        else:
            connection.exchange = None
            self._come_up(connection, now, arrivals)

    def _come_up(self, connection: NodeConnection, now: float, arrivals: list[Arrival]) -> None:
        connection.state = ConnectionState.UP
        connection.pause_ms = RECONNECT_MS
        connection.due_ms = _NEVER
        self._next_timer_ms = min(self._next_timer_ms, now + PING_MS)
        arrivals.append(Arrival(connection.address, None, up=True))

    def _refuse(
        self,
        connection: NodeConnection,
        why: str,
        now: float,
        arrivals: list[Arrival],
        kind: Quiet = Quiet.UNAUTHENTICATED,
    ) -> None:
        """End a connection because one end does not accept the other; try again seldom."""
        log.info("client: %s: %s", connection.address, why)
        connection.pause_ms = RECONNECT_MS_MAX
        self._fail(connection, why, now, [], kind)
        arrivals.append(Arrival(connection.address, None, up=False, refused=why))

    def _send_request(self, connection: NodeConnection, request: api.Request) -> None:
        front = encode_front(api.encode(request))
        self._send_buffers(connection, sealed(connection, (front,)))

    # -- sending

    def _send_buffers(self, connection: NodeConnection, buffers: tuple[bytes, ...]) -> bool:
        """Give buffers to the kernel and keep the rest; False if the connection is broken.

        If it is broken, these bytes were not sent, and epoll reports the error.
        """
        sock = connection.sock
        assert sock is not None
        sent = 0
        if not connection.unsent:
            try:
                sent = sock.send(buffers[0]) if len(buffers) == 1 else sock.sendmsg(buffers)
            except BlockingIOError:
                sent = 0
            except OSError as failure:
                log.debug("client: %s: %s", connection.address, failure)
                return False
        for buffer in buffers:
            connection.sent_bytes += len(buffer)
            if sent >= len(buffer):
                sent -= len(buffer)
                continue
            rest = memoryview(buffer)[sent:]
            connection.unsent.append(rest)
            connection.unsent_bytes += len(rest)
            sent = 0
        self._watch_for_room(connection)
        return True

    def _flush(self, connection: NodeConnection) -> bool:
        """Send the unsent bytes that the kernel takes; False if the connection is broken."""
        sock = connection.sock
        assert sock is not None
        while connection.unsent:
            buffer = connection.unsent[0]
            try:
                sent = sock.send(buffer)
            except BlockingIOError:
                return True
            except OSError as failure:
                log.debug("client: %s: %s", connection.address, failure)
                return False
            connection.unsent_bytes -= sent
            if sent == len(buffer):
                connection.unsent.popleft()
            else:
                connection.unsent[0] = memoryview(buffer)[sent:]
        self._watch_for_room(connection)
        return True

    def _watch_for_room(self, connection: NodeConnection) -> None:
        """Let epoll report room in the kernel's buffer as long as bytes are unsent."""
        wanted = bool(connection.unsent)
        if wanted is not connection.watched:
            connection.watched = wanted
            assert connection.sock is not None
            self._epoll.modify(connection.sock.fileno(), _IN_OUT if wanted else _IN)

    def _fail(
        self,
        connection: NodeConnection,
        why: str,
        now: float,
        arrivals: list[Arrival],
        kind: Quiet = Quiet.CLOSED,
    ) -> None:
        """End a connection or an attempt; the next attempt follows after a pause."""
        log.debug("client: %s: %s", connection.address, why)
        connection.silence = NoAnswer(kind, why)
        was_up = connection.state is ConnectionState.UP
        self._disconnect(connection)
        connection.due_ms = now + connection.pause_ms
        connection.pause_ms = min(2.0 * connection.pause_ms, RECONNECT_MS_MAX)
        self._next_timer_ms = min(self._next_timer_ms, connection.due_ms)
        if was_up:
            arrivals.append(Arrival(connection.address, None, up=False))

    def _disconnect(self, connection: NodeConnection, *, in_order: bool = False) -> None:
        """Close the socket, if any. With `in_order`, bytes already sent still arrive."""
        connection.state = ConnectionState.WAITING
        connection.unsent.clear()
        connection.unsent_bytes = connection.sent_bytes = 0
        connection.pinged_ms = None
        connection.exchange = None
        tls, connection.tls = connection.tls, None
        sock, connection.sock = connection.sock, None
        if sock is None:
            return
        self._by_descriptor.pop(sock.fileno(), None)
        if in_order:
            # Closing a socket with unread input resets the connection.
            with contextlib.suppress(OSError):
                if tls is not None and tls.open:
                    sock.send(tls.close())
                sock.shutdown(socket.SHUT_WR)
                for _ in range(CLOSING_READS_MAX):
                    if not sock.recv(RECEIVE_BYTES):
                        break
        sock.close()

    # -- connecting

    def _open_new(self, address: str) -> None:
        """Open a connection, which replaces an existing one."""
        inside, self._in_call = self._in_call, True
        before = self._connections.get(address)
        connection = self._connections[address] = NodeConnection(address)
        if before is not None:
            self._disconnect(before)
        self._start_connecting(connection, self._clock.monotonic_ms())
        self._in_call = inside

    def _start_connecting(self, connection: NodeConnection, now: float) -> None:
        try:
            connection.tls = None
            if self._prover is not None:
                connection.tls = self._prover.engine(connection.address)
        except AuthenticationError as wrong:  # no certificate can carry this name
            self._refuse(connection, str(wrong), now, self._news)
            self._next_timer_ms = min(self._next_timer_ms, now)
            return
        if not connection.targets:
            connection.targets = numeric_targets(connection.host, connection.port)
        if not connection.targets:
            connection.state, connection.due_ms = ConnectionState.RESOLVING, _NEVER
            look_up(
                connection.host, connection.port, lambda found: self._on_resolved(connection, found)
            )
            return
        family, target = connection.targets[connection.attempts % len(connection.targets)]
        connection.attempts += 1
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failure = sock.connect_ex(target)
            if failure not in (0, errno.EINPROGRESS):
                raise OSError(failure, os.strerror(failure))
        except OSError as error:  # no descriptors, no route
            if sock is not None:
                sock.close()
            silence = _silence_of(error.errno or 0, str(error))
            self._fail(connection, silence.text, now, [], silence.kind)
            return
        connection.sock, connection.zmtp, connection.watched = sock, new_zmtp(), True
        connection.state, connection.due_ms = ConnectionState.CONNECTING, now + CONNECT_MS
        connection.heard_ms = now
        self._by_descriptor[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), _IN_OUT)
        self._next_timer_ms = min(self._next_timer_ms, connection.due_ms)

    def _on_resolved(self, connection: NodeConnection, targets: Targets) -> None:
        """Take the result of a look-up; the look-up's thread calls this."""
        self._resolved.append((connection, targets))
        self.wake()

    def _apply_targets(self, connection: NodeConnection, targets: Targets, now: float) -> None:
        if (
            self._connections.get(connection.address) is not connection
            or connection.state is not ConnectionState.RESOLVING
        ):
            return
        connection.targets = targets
        if targets:
            self._start_connecting(connection, now)
        else:
            why = f"no address is known for the name {connection.host}"
            self._fail(connection, why, now, [], Quiet.UNREACHABLE)

    # -- timers

    def _run_timers(self, now: float, arrivals: list[Arrival]) -> None:
        self._next_timer_ms = _NEVER
        for connection in self._connections.values():
            due_ms = self._check_timers(connection, now, arrivals)
            self._next_timer_ms = min(self._next_timer_ms, due_ms)

    def _check_timers(
        self, connection: NodeConnection, now: float, arrivals: list[Arrival]
    ) -> float:
        """Run a connection's timers that are due; return when the next timer is due."""
        if connection.state is ConnectionState.UP:
            return self._check_heartbeat(connection, now, arrivals)
        if now < connection.due_ms:
            return connection.due_ms
        if connection.state is ConnectionState.WAITING:
            if connection.host and connection.attempts >= len(connection.targets):
                connection.targets = []  # the name may have another address now
                connection.attempts = 0
            self._start_connecting(connection, now)
        else:
            self._fail_late(connection, now, arrivals)
        return connection.due_ms

    def _fail_late(self, connection: NodeConnection, now: float, arrivals: list[Arrival]) -> None:
        """End an attempt that has taken too long."""
        silent = self.silence(connection.address)
        why = _NOTHING if silent is None else silent.text
        text = f"no connection within {CONNECT_MS / 1000.0:g} s: {why}"
        self._fail(connection, text, now, arrivals, Quiet.TIMED_OUT)

    def _check_heartbeat(
        self, connection: NodeConnection, now: float, arrivals: list[Arrival]
    ) -> float:
        if connection.pinged_ms is None:
            if now < connection.heard_ms + PING_MS:
                return connection.heard_ms + PING_MS
            connection.pinged_ms, connection.acked_bytes = now, acked(connection)
            waits = connection.acked_bytes < connection.sent_bytes
            ping = encode_ping(int(PING_MS + PONG_MS))
            self._send_buffers(connection, sealed(connection, (ping,)))
            connection.ping_end = connection.sent_bytes if waits else None
        elif self._ping_waits(connection):
            connection.pinged_ms = now
        elif now >= connection.pinged_ms + PONG_MS:
            self._receive(connection, now, arrivals)  # the PONG may be there, but not read yet
            if connection.state is ConnectionState.UP and connection.pinged_ms is not None:
                self._fail(connection, "no answer to a PING", now, arrivals, Quiet.TIMED_OUT)
            return (
                connection.due_ms if connection.state is not ConnectionState.UP else now + PING_MS
            )
        due_ms = (connection.pinged_ms or now) + PONG_MS
        return due_ms if connection.ping_end is None else min(due_ms, now + LOOK_MS)

    def _ping_waits(self, connection: NodeConnection) -> bool:
        """Whether the PING waits for bytes that have left since the last look: the link is slow."""
        if connection.ping_end is None:
            return False
        before, connection.acked_bytes = connection.acked_bytes, acked(connection)
        if connection.acked_bytes >= connection.ping_end:
            connection.ping_end = None
            return False
        return connection.acked_bytes > before

    def _restart(self, arrivals: list[Arrival]) -> None:
        """Open all connections anew, because the effect of an interrupted call is not known."""
        log.debug("client: a call was interrupted, all connections are opened anew")
        self._ready = []
        now = self._clock.monotonic_ms()
        for connection in self._connections.values():
            self._disconnect(connection)
            # The owner may have missed the last report, so "down" may be reported twice.
            arrivals.append(Arrival(connection.address, None, up=False))
            connection.pause_ms, connection.due_ms = RECONNECT_MS, now
        for descriptor, connection in list(self._by_descriptor.items()):
            # An interrupted `_disconnect` or `_open_new` has left it open.
            log.debug("client: %s: a descriptor was left open", connection.address)
            del self._by_descriptor[descriptor]
        self._next_timer_ms = now


def _silence_of(error: int, text: str = "") -> NoAnswer:
    """Return what the failure of a connection attempt says, by its errno."""
    text = text or os.strerror(error)
    if error == errno.ECONNREFUSED:
        return NoAnswer(Quiet.REFUSED, f"{text}: no node listens there")
    if error == errno.ETIMEDOUT:
        return NoAnswer(Quiet.TIMED_OUT, f"{text}: {_NOTHING}")
    closed = error in (errno.ECONNRESET, errno.EPIPE, errno.EMFILE, errno.ENFILE)
    return NoAnswer(Quiet.CLOSED if closed else Quiet.UNREACHABLE, text)


def _wait_writable(sock: socket.socket, timeout_ms: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(timeout_ms))
