"""A blocking connection to one node, for readers that take millions of records.

Unlike a transport, it serves one thread that does nothing else meanwhile. So it needs no epoll, a
large payload is received by few system calls, and each payload lands in the same memory: new memory
for each would cost more than the copy from the kernel.
"""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

from hastore.client.connections.addresses import host_and_port
from hastore.client.connections.proving import Prover
from hastore.client.connections.transport import MAX_REPLY_BYTES
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    AuthenticationError,
    ConfigError,
    NotAuthenticatedError,
    ProtocolError,
    UnreachableError,
)
from hastore.protocol import api
from hastore.protocol.zmtp import COMMAND, LONG, MORE, SocketType, ZmtpConnection, encode_front

if TYPE_CHECKING:
    from hastore.security.tls_socket import TlsSocket

_STAGE_BYTES = 8 * 1024  # read ahead; payload bytes within it are copied once more
_LIMITS = (MAX_REPLY_BYTES, MAX_REPLY_BYTES)
_TIMEVAL = struct.Struct("@ll")
_LONG_SIZE = struct.Struct(">Q")
_NOTHING = memoryview(b"")


class BulkLink:
    """One connection; `receive` returns the replies in the order in which the node sends them."""

    def __init__(self, address: str, timeout_s: float, prover: Prover | None = None) -> None:
        """Connect. Raises UnreachableError if that takes longer than `timeout_s`, proof included.

        With `prover` the link may speak TLS, and proves who this client is. Raises
        NotAuthenticatedError if one end does not accept the other.

        `timeout_s` also bounds the time in which the node sends nothing while a reply is due.
        """
        self.address = address
        self._timeout_s = timeout_s
        # While the link opens: when it must be open. A peer may not gain time by single bytes.
        self._open_by_ms: float | None = SYSTEM_CLOCK.monotonic_ms() + timeout_s * 1000.0
        self._stage = bytearray(_STAGE_BYTES)
        self._begin = self._end = 0  # of the staged bytes that are not taken yet
        self._payload = bytearray()
        self._sock: socket.socket | TlsSocket
        try:
            self._sock = sock = socket.create_connection(host_and_port(address), timeout_s)
        except (OSError, UnicodeError) as failure:  # UnicodeError: it can be no host's name
            raise UnreachableError(f"{address}: {failure}") from failure
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            engine = None if prover is None else prover.engine(address)
            if engine is not None:
                from hastore.security.tls_socket import TlsSocket

                self._sock = TlsSocket.over(sock, engine, self._left_s)
            self._shake_hands()
            if prover is not None:
                self._prove(prover)
            self._open_by_ms = None
            # A timeout of the kernel's instead of Python's, so that one call waits for all bytes.
            self._sock.settimeout(None)
            seconds = int(timeout_s)
            limit = _TIMEVAL.pack(seconds, int((timeout_s - seconds) * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except (AuthenticationError, ConfigError) as failure:
            self.close()
            raise NotAuthenticatedError(f"{address}: {failure}") from failure
        except UnreachableError:  # while a reply of the proof was due
            self.close()
            raise
        except (OSError, ProtocolError) as failure:
            self.close()
            raise UnreachableError(f"{address}: {failure}") from failure

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()

    def send(self, request: api.Request) -> None:
        """Send a request without a payload. Raises UnreachableError."""
        try:
            self._limit_wait()
            self._sock.sendall(encode_front(api.encode(request)))
        except OSError as failure:
            raise UnreachableError(f"{self.address}: {failure}") from failure

    def receive(self) -> tuple[api.Reply, memoryview]:
        """Wait for the next reply; return it with its payload, which the next call overwrites.

        Raises UnreachableError if the connection breaks or the node sends nothing for too long.
        """
        try:
            more, size = self._next_frame()
            reply = api.decode_reply(bytes(self._take(size)))
            payload = _NOTHING
            while more:
                more, size = self._next_frame()
                payload = self._take_payload(size)
        except BlockingIOError as silence:
            raise UnreachableError(
                f"{self.address} sent nothing for {self._timeout_s:g} s"
            ) from silence
        except (OSError, ProtocolError) as failure:
            raise UnreachableError(f"{self.address}: {failure}") from failure
        return reply, payload

    def _left_s(self) -> float:
        """Return the seconds left to open the link; raises TimeoutError after the deadline."""
        assert self._open_by_ms is not None
        left_s = (self._open_by_ms - SYSTEM_CLOCK.monotonic_ms()) / 1000.0
        if left_s <= 0.0:
            raise TimeoutError(f"the node did not open the link within {self._timeout_s:g} s")
        return left_s

    def _limit_wait(self) -> None:
        """Let the next call of the socket wait as long as the opening may still take."""
        if self._open_by_ms is not None:
            self._sock.settimeout(self._left_s())

    def _shake_hands(self) -> None:
        zmtp = ZmtpConnection(SocketType.DEALER, _LIMITS)
        while not zmtp.is_open:
            if zmtp.has_output:
                self._limit_wait()
                self._sock.sendall(zmtp.take_output())
            self._limit_wait()
            data = self._sock.recv(_STAGE_BYTES)
            if not data:
                raise ProtocolError("closed by the node during the handshake")
            zmtp.receive(data)
            if zmtp.failure is not None:
                raise ProtocolError(zmtp.failure)
        if zmtp.held_bytes:
            raise ProtocolError("the node sent a message before any request")

    def _prove(self, prover: Prover) -> None:
        """Prove the identity, if there is one, and have the node prove itself."""
        exchange = prover.exchange()
        if exchange is None:
            return
        request: api.Auth | api.Prove | None = exchange.first()
        while request is not None:
            self.send(request)
            reply, _ = self.receive()
            request = exchange.follow(reply)

    def _next_frame(self) -> tuple[bool, int]:
        """Return whether another frame of the message follows, and the size of this frame."""
        while True:
            self._fill(2)
            flags = self._stage[self._begin]
            if flags & ~(MORE | LONG | COMMAND):
                raise ProtocolError(f"a frame with the flags {flags:#04x}")
            if flags & LONG:
                self._fill(9)
                (size,) = _LONG_SIZE.unpack_from(self._stage, self._begin + 1)
                self._begin += 9
            else:
                size = self._stage[self._begin + 1]
                self._begin += 2
            if size > MAX_REPLY_BYTES:
                raise ProtocolError(f"a frame of {size} bytes; at most {MAX_REPLY_BYTES}")
            if not flags & COMMAND:
                return bool(flags & MORE), size
            body = bytes(self._take(size))
            if body[1:6] == b"ERROR":  # other commands need no answer: this end sends no PING
                raise ProtocolError(f"the node gave up: {body[7:].decode('utf-8', 'replace')!r}")

    def _fill(self, wanted: int) -> None:
        """Have at least `wanted` bytes in the stage."""
        have = self._end - self._begin
        if have >= wanted:
            return
        self._stage[:have] = self._stage[self._begin : self._end]
        self._begin, self._end = 0, have
        while self._end < wanted:
            self._limit_wait()
            got = self._sock.recv_into(memoryview(self._stage)[self._end :])
            if not got:
                raise ProtocolError("closed by the node")
            self._end += got

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        self._take_into(memoryview(taken))
        return taken

    def _take_payload(self, size: int) -> memoryview:
        if len(self._payload) < size:
            self._payload = bytearray(size)
        view = memoryview(self._payload)[:size]
        self._take_into(view)
        return view

    def _take_into(self, view: memoryview) -> None:
        staged = min(len(view), self._end - self._begin)
        view[:staged] = memoryview(self._stage)[self._begin : self._begin + staged]
        self._begin += staged
        at = staged
        while at < len(view):
            self._limit_wait()
            if isinstance(self._sock, socket.socket):
                got = self._sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
            else:
                got = self._sock.recv_into(view[at:])
            if not got:
                raise ProtocolError("closed by the node within a reply")
            at += got
