"""A small ZMTP client for tests, after docs/client-protocol.md, without hastore's own code."""

from __future__ import annotations

import socket
from typing import NamedTuple

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
ANSWER_S = 60.0


class Frame(NamedTuple):
    """A frame: its flags and its body."""

    flags: int
    body: bytes


def greeting(mechanism: bytes = b"NULL", minor: int = 1) -> bytes:
    """Return a client's first 64 bytes."""
    return b"\xff" + bytes(8) + bytes((0x7F, 3, minor)) + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame, with LONG if its size needs it."""
    if len(body) > 255 or flags & LONG:
        return bytes((flags | LONG,)) + len(body).to_bytes(8) + body
    return bytes((flags, len(body))) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """Return a command."""
    return frame(bytes((len(name),)) + name + data, COMMAND)


def ready(kind: bytes = b"DEALER", name: bytes = b"Socket-Type", more: bytes = b"") -> bytes:
    """Return a READY command; `more` are the bytes of further properties."""
    return command(b"READY", bytes((len(name),)) + name + len(kind).to_bytes(4) + kind + more)


def read_frames(raw: bytes) -> list[Frame]:
    """Split bytes into frames; leave out an incomplete frame at the end."""
    frames: list[Frame] = []
    at = 0
    while at + 2 <= len(raw):
        width = 8 if raw[at] & LONG else 1
        size = int.from_bytes(raw[at + 1 : at + 1 + width])
        begin = at + 1 + width
        if begin + size > len(raw):
            break
        frames.append(Frame(raw[at], raw[begin : begin + size]))
        at = begin + size
    return frames


class Wire:
    """A connection to a node on which a test sends any bytes; a context manager."""

    def __init__(self, address: str, *, source: str = "") -> None:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        own = (source, 0) if source else None
        self._socket = socket.create_connection((host, int(port)), ANSWER_S, own)
        self._raw = b""
        self._taken = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._socket.close()

    def send(self, *parts: bytes) -> None:
        """Send bytes."""
        self._socket.sendall(b"".join(parts))

    def shake_hands(self, hello: bytes = b"", own: bytes = b"") -> None:
        """Send greeting and READY, and wait for the node's."""
        self.send(hello or greeting(), own or ready())
        assert self.frame().body.startswith(b"\x05READY")

    def greeting(self) -> bytes:
        """Wait for the node's first 64 bytes."""
        while len(self._raw) < GREETING_BYTES:
            assert self._receive(), f"closed after {self._raw!r}"
        return self._raw[:GREETING_BYTES]

    def frame(self) -> Frame:
        """Wait for the node's next frame."""
        while len(frames := read_frames(self._raw[GREETING_BYTES:])) <= self._taken:
            assert self._receive(), f"closed after {self._raw!r}"
        self._taken += 1
        return frames[self._taken - 1]

    def until_closed(self) -> list[Frame]:
        """Wait until the node closes the connection; return the remaining frames."""
        while self._receive():
            continue
        return read_frames(self._raw[GREETING_BYTES:])[self._taken :]

    def _receive(self) -> bool:
        try:
            piece = self._socket.recv(65536)
        except ConnectionError:  # the node closed it before it read all of our bytes
            return False
        self._raw += piece
        return bool(piece)
