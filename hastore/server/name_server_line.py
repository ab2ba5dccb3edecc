"""A connection to a RocketMQ name server: one request at a time, each with a limit.

What comes from there is not trusted: its size is checked before it is kept, and whatever cannot be
an answer ends the connection.
"""

from __future__ import annotations

import socket
import struct
import threading

from hastore.addresses import parse_address
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import ProtocolError
from hastore.ha.hello.peer import connect
from hastore.protocol.remoting import Frame, decode_frame, encode_frame

CONNECT_S = 3.0
ANSWER_S = 6.0  # for a request in all, however slowly its answer comes
SLICE_S = 0.25  # so often it is looked for whether the node stops
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # as RocketMQ's own limit; the names of very many topics
_PIECE_BYTES = 256 * 1024
_SIZE = struct.Struct(">I")


class StoppedError(OSError):
    """The node stops, so nothing is waited for any more."""


class Line:
    """A connection; used by one thread. `stopping` ends every wait."""

    def __init__(
        self, address: str, stopping: threading.Event, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Prepare; nothing is connected yet."""
        endpoint = parse_address(address)
        assert endpoint is not None, "the configuration was checked"
        self._endpoint = endpoint
        self._stopping = stopping
        self._clock = clock
        self._socket: socket.socket | None = None
        self._opaque = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._socket is not None

    def open(self) -> None:
        """Connect; raises OSError."""
        self.close()
        made = connect(self._endpoint, CONNECT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = made

    def close(self) -> None:
        """End the connection."""
        made, self._socket = self._socket, None
        if made is not None:
            made.close()

    def ask(self, request: Frame, limit_s: float | None = None, *, ends: bool = False) -> Frame:
        """Send a request, and return its answer; raises OSError or ProtocolError, and closes then.

        It waits `limit_s` at most, or ANSWER_S; with `ends` even though the node stops.
        """
        assert self._socket is not None, "the line is open"
        self._opaque = self._opaque % 0x7FFFFFFF + 1
        request.opaque = self._opaque
        until_s = self._clock.monotonic_ms() / 1_000 + (ANSWER_S if limit_s is None else limit_s)
        try:
            self._send(self._socket, encode_frame(request), until_s, ends)
            while True:
                answer = self._receive(self._socket, until_s, ends)
                if answer.is_answer:
                    break  # a name server of RocketMQ 5 may tell a broker something in between
            if answer.opaque != request.opaque:
                raise ProtocolError(f"an answer to request {answer.opaque}, which nobody asked")
        except (OSError, ProtocolError):
            self.close()
            raise
        return answer

    def _send(self, made: socket.socket, data: bytes, until_s: float, ends: bool) -> None:
        left = memoryview(data)
        while left:
            self._limit(made, until_s, ends)
            try:
                left = left[made.send(left[:_PIECE_BYTES]) :]
            except TimeoutError:
                continue

    def _receive(self, made: socket.socket, until_s: float, ends: bool) -> Frame:
        size = _SIZE.unpack(self._read(made, _SIZE.size, until_s, ends))[0]
        if not 4 <= size <= MAX_ANSWER_BYTES:
            raise ProtocolError(f"an answer of {size} bytes; at most {MAX_ANSWER_BYTES}")
        return decode_frame(self._read(made, size, until_s, ends))

    def _read(self, made: socket.socket, size: int, until_s: float, ends: bool) -> bytes:
        pieces: list[bytes] = []
        while size:
            self._limit(made, until_s, ends)
            try:
                piece = made.recv(min(size, _PIECE_BYTES))
            except TimeoutError:
                continue
            if not piece:
                raise ConnectionError("it has ended the connection")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def _limit(self, made: socket.socket, until_s: float, ends: bool) -> None:
        if self._stopping.is_set() and not ends:
            raise StoppedError("the node stops")
        left_s = until_s - self._clock.monotonic_ms() / 1_000
        if left_s <= 0:
            raise TimeoutError("it takes too long to answer")
        made.settimeout(min(SLICE_S, left_s))
