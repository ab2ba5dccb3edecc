"""ZMTP, the wire protocol of ZeroMQ (RFC 37). Pure: bytes in, messages out.

Versions 3.1 and 3.0, mechanism NULL, DEALER towards ROUTER. Both ends use the same class:

    AWAITING_GREETING --64 bytes--> AWAITING_READY --READY--> OPEN        any error: FAILED

    greeting   FF, 8 bytes padding, 7F | major, minor | mechanism, 20 bytes | as-server | 31 bytes 0
    frame      flags: 1 byte | size: 1 byte, or with LONG 8 bytes | body
    flags      0x01 MORE frames of this message follow   0x02 LONG   0x04 COMMAND
    command    a frame with COMMAND: name length: 1 byte | name | data
    READY      data is properties: name length: 1 byte | name | value length: 4 bytes | value
    PING       data is ttl: 2 bytes | context, at most 16 bytes;  PONG has the context
    ERROR      data is reason length: 1 byte | reason

The caller passes received bytes to `receive` and sends the bytes that `take_output` returns: the
greeting, READY, PONGs, and an ERROR with the reason when the connection failed. After it has sent
the ERROR, the caller closes the connection. `encode_front` encodes a message to send; it needs no
state. No message may be sent before `is_open` is true.

A frame's size is checked before any byte of its body is kept, and only received bytes take memory.
Messages and failure do not depend on how the received bytes are split.
"""

from __future__ import annotations

import struct
from enum import Enum

from hastore.errors import ProtocolError

Message = tuple[bytes, ...]  # the frames of a message, at least one

GREETING_BYTES = 64
MAX_COMMAND_BYTES = 512
# A longer frame body is collected in pieces. Received pieces up to this size are joined, larger
# ones stay separate.
PIECE_BYTES = 4 * 1024
MORE, LONG, COMMAND = 0x01, 0x02, 0x04
_KNOWN_FLAGS = MORE | LONG | COMMAND
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # the padding as libzmq writes it
_MECHANISM = b"NULL".ljust(20, b"\0")
_MAX_CONTEXT_BYTES = 16
_LONG_SIZE = struct.Struct(">Q")
_LONG_PREFIX = struct.Struct(">BQ")
_VALUE_SIZE = struct.Struct(">I")
_TTL_BYTES = 2
_TLS_HANDSHAKE = 0x16  # the first byte of a TLS client


class SocketType(Enum):
    """The supported socket types."""

    DEALER = b"DEALER"
    ROUTER = b"ROUTER"


_PEER = {SocketType.DEALER: SocketType.ROUTER, SocketType.ROUTER: SocketType.DEALER}


class State(Enum):
    """The state of a connection."""

    AWAITING_GREETING = "awaiting greeting"
    AWAITING_READY = "awaiting READY"
    OPEN = "open"
    FAILED = "failed"


def keep_piece(pieces: list[bytes | bytearray], data: bytes) -> None:
    """Keep a piece of a long frame; small pieces are joined, since each one costs memory."""
    if len(data) > PIECE_BYTES:
        pieces.append(data)
    elif pieces and isinstance(pieces[-1], bytearray):
        pieces[-1] += data
    else:
        pieces.append(bytearray(data))


class ZmtpConnection:
    """One end of one connection.

    `limits` has the greatest size of a message's first frame, of its second frame and so on. A
    message with more frames is an error.
    """

    def __init__(self, socket_type: SocketType, limits: tuple[int, ...]) -> None:
        self._type = socket_type
        self._limits = limits
        self._buffer = bytearray()  # received bytes of an incomplete frame
        self._needed = GREETING_BYTES  # bytes that the buffer must hold before it is parsed again
        self._pieces: list[bytes | bytearray] = []  # of the body of an incomplete long frame
        self._pieces_bytes = 0  # bytes received of that frame, its flags and size included
        self._pieces_missing = 0
        self._pieces_flags = 0
        self._frames: list[bytes] = []  # of an incomplete message
        self._frames_bytes = 0  # with flags and sizes, so that empty frames count too
        self._output = bytearray(_greeting() + _ready(socket_type))
        self.state = State.AWAITING_GREETING
        self.failure: str | None = None  # why the connection failed
        self.refused = False  # the peer has refused the handshake
        self.peer_minor = 0  # version 3.MINOR of the peer

    @property
    def is_open(self) -> bool:
        """Whether messages may be sent."""
        return self.state is State.OPEN

    def allow(self, limits: tuple[int, ...]) -> None:
        """Set other limits, for the messages of the next `receive`."""
        self._limits = limits

    @property
    def held_bytes(self) -> int:
        """The bytes kept of an incomplete greeting, command or message."""
        return len(self._buffer) + self._frames_bytes + self._pieces_bytes

    @property
    def missing_bytes(self) -> int:
        """A lower bound of the bytes that the incomplete frame lacks; 0 between frames."""
        if self._pieces_missing:
            return self._pieces_missing
        return max(0, self._needed - len(self._buffer)) if self._buffer else 0

    @property
    def has_output(self) -> bool:
        """Whether `take_output` has something to send."""
        return bool(self._output)

    def take_output(self) -> bytes:
        """Return, once, the bytes that the protocol itself has to send."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: bytes) -> list[Message]:
        """Take received bytes; return the messages that they complete.

        If the peer violates the protocol, `failure` says how. The messages before the violation are
        still returned. The caller then sends `take_output()` and closes the connection. Bytes
        received later are dropped.
        """
        messages: list[Message] = []
        if self.failure is not None:
            return messages
        at = 0
        if self._pieces_missing:
            at = min(self._pieces_missing, len(data))
            self._add_piece(data if at == len(data) else data[:at])
            if self._pieces_missing:
                return messages
        elif self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed and self.state is State.OPEN:
                return messages
            data = bytes(self._buffer)
            self._buffer.clear()
        try:
            if self._pieces:
                self._join_pieces(messages)
            elif not self.is_open:
                at = self._shake_hands(data)
            if self.is_open:
                self._read_frames(data, at, messages)
        except ProtocolError as failure:
            self.fail(str(failure))
        return messages

    def fail(self, reason: str) -> None:
        """Fail this connection; `take_output` then returns an ERROR with `reason`."""
        if self.failure is None:
            told = reason.encode("utf-8", "backslashreplace")[:255]
            self._output += _command(b"ERROR", _short(told))
            self.state, self.failure = State.FAILED, reason
            self._buffer.clear()
            self._pieces.clear()
            self._frames.clear()
            self._frames_bytes = self._pieces_bytes = self._pieces_missing = 0

    # -- the handshake

    def _shake_hands(self, data: bytes) -> int:
        """Process greeting and READY; return where the first frame after them begins."""
        at = 0
        if self.state is State.AWAITING_GREETING:
            self._check_greeting(data)
            if len(data) < GREETING_BYTES:
                self._keep(data, 0, GREETING_BYTES)
                return 0
            self.state, at = State.AWAITING_READY, GREETING_BYTES
        frame = self._next_frame(data, at, MAX_COMMAND_BYTES)
        if frame is None:
            return 0
        flags, begin, end = frame
        if not flags & COMMAND:
            raise ProtocolError("a message came before READY")
        name, rest = _read_command(data[begin:end])
        if name == b"ERROR":
            self.refused = True
            raise ProtocolError(f"the peer refused the connection: {_reason(rest)}")
        if name != b"READY":
            raise ProtocolError(f"the command {name!r} came before READY")
        self._check_peer(_read_properties(rest))
        self.state = State.OPEN
        return end

    def _check_greeting(self, data: bytes) -> None:
        """Check the received part of a greeting, so that a wrong one is refused early."""
        if data and data[0] == _TLS_HANDSHAKE:
            raise ProtocolError(
                "the client speaks TLS, and this port does not: the node's `security.api` is "
                "plain; set it to tls, or give the client no CA"
            )
        if data and data[0] != 0xFF or len(data) > 9 and data[9] != 0x7F:
            raise ProtocolError("not a ZMTP 3 greeting; the client API supports ZMTP 3.0 and 3.1")
        if len(data) > 10 and data[10] < 3:
            raise ProtocolError(f"ZMTP {data[10]} is not supported; 3.0 and 3.1 are")
        if len(data) > 11:
            self.peer_minor = data[11] if data[10] == 3 else 1
        if len(data) >= 32 and data[12:32] != _MECHANISM:
            named = data[12:32].rstrip(b"\0")
            raise ProtocolError(f"the mechanism {named!r} is not supported; NULL is")

    def _check_peer(self, properties: dict[bytes, bytes]) -> None:
        wanted = _PEER[self._type].value
        found = properties.get(b"socket-type")
        if found != wanted:
            here = self._type.value.decode()
            raise ProtocolError(
                f"a {here} socket needs a {wanted.decode()} socket as its peer, not {found!r}"
            )

    # -- frames

    def _read_frames(self, data: bytes, at: int, messages: list[Message]) -> None:
        frames = self._frames
        limits, most = self._limits, len(self._limits)
        end = len(data)
        while end - at >= 2:
            flags, size = data[at], data[at + 1]
            if flags > MORE:  # long, a command, or wrong
                frame = self._next_frame(data, at, limits[len(frames)])
                if frame is None:
                    return
                flags, begin, stop = frame
                if flags & COMMAND:
                    self._follow_command(data[begin:stop])
                    at = stop
                    continue
            else:
                begin = at + 2
                stop = begin + size
                if size > limits[len(frames)]:
                    raise _too_large(size, limits[len(frames)])
                if stop > end:
                    self._keep(data, at, 2 + size)
                    return
            if flags & MORE:
                frames.append(data[begin:stop])
                self._frames_bytes += stop - at
                if len(frames) >= most:
                    raise ProtocolError(f"a message of more than {most} frames")
            elif frames:
                messages.append((*frames, data[begin:stop]))
                frames.clear()
                self._frames_bytes = 0
            else:
                messages.append((data[begin:stop],))
            at = stop
        if at < end:
            self._keep(data, at, 2)

    def _add_piece(self, data: bytes) -> None:
        self._pieces_bytes += len(data)
        self._pieces_missing -= len(data)
        keep_piece(self._pieces, data)

    def _join_pieces(self, messages: list[Message]) -> None:
        """Take the long frame that is complete now; its bytes are copied once."""
        body = b"".join(self._pieces)
        size, self._pieces_bytes = self._pieces_bytes, 0
        self._pieces.clear()
        frames = self._frames
        frames.append(body)
        if not self._pieces_flags & MORE:
            messages.append(tuple(frames))
            frames.clear()
            self._frames_bytes = 0
            return
        self._frames_bytes += size
        if len(frames) >= len(self._limits):
            raise ProtocolError(f"a message of more than {len(self._limits)} frames")

    def _next_frame(self, data: bytes, at: int, limit: int) -> tuple[int, int, int] | None:
        """Return a frame's flags, and where its body begins and ends.

        Returns None for an incomplete frame, whose bytes are kept. Raises ProtocolError once the
        frame's first bytes show that it is invalid or too large.
        """
        left = len(data) - at
        if left < 2:
            self._keep(data, at, 2)
            return None
        flags = data[at]
        if flags & ~_KNOWN_FLAGS or flags & COMMAND and flags & MORE:
            raise ProtocolError(f"a frame with the flags {flags:#04x}")
        head = 9 if flags & LONG else 2
        if left < head:
            self._keep(data, at, head)
            return None
        size = _LONG_SIZE.unpack_from(data, at + 1)[0] if flags & LONG else data[at + 1]
        if flags & COMMAND:
            limit = MAX_COMMAND_BYTES
        if size > limit:
            raise _too_large(size, limit)
        if left < head + size:
            if size > PIECE_BYTES:
                self._pieces_flags, self._pieces_missing = flags, size
                self._pieces_bytes = head
                self._add_piece(data[at + head :])
            else:
                self._keep(data, at, head + size)
            return None
        return flags, at + head, at + head + size

    def _keep(self, data: bytes, at: int, needed: int) -> None:
        self._buffer += data[at:] if at else data
        self._needed = needed

    def _follow_command(self, body: bytes) -> None:
        name, rest = _read_command(body)
        if name == b"PING":
            context = rest[_TTL_BYTES:]
            if len(rest) < _TTL_BYTES or len(context) > _MAX_CONTEXT_BYTES:
                raise ProtocolError(f"a PING of {len(rest)} bytes")
            self._output += _command(b"PONG", context)
        elif name == b"ERROR":
            raise ProtocolError(f"the peer gave up: {_reason(rest)}")
        elif name == b"READY":
            raise ProtocolError("a second READY")
        # PONG needs no answer; a command of a later version is skipped, as RFC 37 asks.


class LandingConnection(ZmtpConnection):
    """A connection that receives large payloads in place, in memory that is used again.

    While `gap` is not empty, the next bytes of the socket belong there: the caller receives into it
    and calls `fill` instead of `receive`. The payload is then `landed`, and the message has b"" in
    its place; the next large payload overwrites it.
    """

    def __init__(self, socket_type: SocketType, limits: tuple[int, ...]) -> None:
        super().__init__(socket_type, limits)
        self._memory = bytearray()
        self._got = 0  # bytes of the incomplete long frame's body
        self.landed: memoryview | None = None

    @property
    def gap(self) -> memoryview:
        """Where the missing bytes of a long frame belong; empty between such frames."""
        return memoryview(self._memory)[self._got : self._got + self._pieces_missing]

    def fill(self, count: int) -> list[Message]:
        """Take `count` bytes that are in `gap` now; return the message that they complete."""
        messages: list[Message] = []
        self._got += count
        self._pieces_bytes += count
        self._pieces_missing -= count
        if not self._pieces_missing:
            try:
                self._join_pieces(messages)
            except ProtocolError as failure:
                self.fail(str(failure))
        return messages

    def _add_piece(self, data: bytes) -> None:
        """Copy the first bytes of a long frame's body, which came behind others."""
        if not self._got and len(self._memory) < self._pieces_missing:
            self._memory = bytearray(self._pieces_missing)
        self.gap[: len(data)] = data
        self._got += len(data)
        self._pieces_bytes += len(data)
        self._pieces_missing -= len(data)

    def _join_pieces(self, messages: list[Message]) -> None:
        """Take the long frame that is complete now: a payload stays where it is."""
        body = memoryview(self._memory)[: self._got]
        self._got = 0
        if self._frames and not self._pieces_flags & MORE:
            self.landed = body
            self._pieces = [b""]
        else:  # a header, which the payload would overwrite
            self._pieces = [bytes(body)]
        super()._join_pieces(messages)


def encode_front(header: bytes, payload_bytes: int | None = None) -> bytes:
    """Return the wire bytes of a message of one frame, `header`.

    With `payload_bytes` the message has a second frame of that size. The returned bytes end where
    the second frame's body begins, and the caller sends this body next.
    """
    size = len(header)
    if payload_bytes is None:
        return (_prefix(0, size) if size > 255 else bytes((0, size))) + header
    first = _prefix(MORE, size) if size > 255 else bytes((MORE, size))
    return first + header + _prefix(0, payload_bytes)


def encode_ping(ttl_ms: int) -> bytes:
    """Return a PING: the peer closes after `ttl_ms` (at most 6,553 s) without received bytes."""
    return _command(b"PING", (ttl_ms // 100).to_bytes(_TTL_BYTES, "big"))


def encode_refusal(reason: str) -> bytes:
    """Return a greeting and an ERROR, for a peer that cannot be talked with otherwise."""
    return _greeting() + _command(b"ERROR", _short(reason.encode()[:255]))


def _prefix(flags: int, size: int) -> bytes:
    return bytes((flags, size)) if size < 256 else _LONG_PREFIX.pack(flags | LONG, size)


def _greeting() -> bytes:
    return (_SIGNATURE + b"\x03\x01" + _MECHANISM).ljust(GREETING_BYTES, b"\0")


def _ready(socket_type: SocketType) -> bytes:
    properties = {b"Socket-Type": socket_type.value}
    if socket_type is SocketType.DEALER:
        properties[b"Identity"] = b""
    data = b"".join(
        _short(name) + _VALUE_SIZE.pack(len(value)) + value for name, value in properties.items()
    )
    return _command(b"READY", data)


def _command(name: bytes, data: bytes) -> bytes:
    body = _short(name) + data
    return _prefix(COMMAND, len(body)) + body


def _short(value: bytes) -> bytes:
    return bytes((len(value),)) + value


def _too_large(size: int, limit: int) -> ProtocolError:
    return ProtocolError(f"a frame of {size} bytes; at most {limit}")


def _reason(data: bytes) -> str:
    """Return an ERROR's reason, escaped: it is untrusted text for a log."""
    return repr(data[1:].decode("utf-8", "replace"))


def _read_command(body: bytes) -> tuple[bytes, bytes]:
    """Return a command's name and data."""
    size = body[0] if body else 0
    if not 0 < size < len(body):
        raise ProtocolError("a command without a name")
    return body[1 : 1 + size], body[1 + size :]


def _read_properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties of READY, their names in lower case."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_at = name_end + _VALUE_SIZE.size
        if value_at > len(data) or name_end == at + 1:
            raise ProtocolError("a READY whose properties do not fit in it")
        value_end = value_at + _VALUE_SIZE.unpack_from(data, name_end)[0]
        if value_end > len(data):
            raise ProtocolError("a READY whose properties do not fit in it")
        found[data[at + 1 : name_end].lower()] = data[value_at:value_end]
        at = value_end
    return found
