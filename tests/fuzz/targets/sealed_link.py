"""A plain link between two nodes whose frames have a MAC: nothing of a changed frame is used."""

from __future__ import annotations

import socket
from typing import Any

from hastore.errors import TamperedError
from hastore.security.sealed_socket import HEAD_BYTES, KEY_BYTES, SealedSocket
from tests.fuzz import kit

OWN, THEIRS = b"o" * KEY_BYTES, b"t" * KEY_BYTES
REACHES = (SealedSocket.recv_into, SealedSocket._check_frame, SealedSocket._make_room)
LEAST = kit.Least(0.2, 2)


class Wire:
    """A socket that receives these pieces, and keeps what is sent."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = [piece for piece in pieces if piece]
        self.sent = b""

    def recv_into(self, buffer: memoryview) -> int:
        """Give the next piece; b"" is the end."""
        if not self.pieces:
            return 0
        piece = self.pieces.pop(0)
        taken = piece[: len(buffer)]
        if taken != piece:
            self.pieces.insert(0, piece[len(taken) :])
        buffer[: len(taken)] = taken
        return len(taken)

    def sendall(self, data: bytes, _flags: int = 0) -> None:
        """Keep what is sent."""
        self.sent += bytes(data)

    def gettimeout(self) -> float:
        """Have a timeout of Python's: without one the kernel is asked what it has left."""
        return 60.0


def sealed(*payloads: bytes) -> bytes:
    """Return the frames that the other end sends."""
    wire: Any = Wire([])
    link = SealedSocket(wire, THEIRS, OWN)
    for payload in payloads:
        link.sendall(payload, socket.MSG_DONTWAIT)
    return bytes(wire.sent)


def seeds() -> list[bytes]:
    """Return whole links: their payloads, then what the wire made of them."""
    return [
        b"\x03" + b"abc" + sealed(b"abc"), b"\x00" + sealed(), b"\x00" + sealed(b"\x00" * 30),
        b"\x00" + sealed(b"one", b"two", b"x" * 300), b"\x00" + sealed(b"one", b"two")[3:],
        b"\x00" + sealed(b"one", b"two")[HEAD_BYTES + 3 :],
    ]  # fmt: skip


def payloads_of(data: bytes) -> bytes:
    """Return the payloads of frames as their lengths say, whatever their MACs are."""
    found, at = b"", 0
    while at + HEAD_BYTES <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if not size or at + HEAD_BYTES + size > len(data):
            break
        found += data[at + HEAD_BYTES : at + HEAD_BYTES + size]
        at += HEAD_BYTES + size
    return found


def repaired(data: bytes) -> bytes:
    """Return frames of the payloads with the right MACs, and what is behind them."""
    raw = data[1:]
    whole, at = [], 0
    while at + HEAD_BYTES < len(raw):
        size = max(1, int.from_bytes(raw[at : at + 4]) % 512)
        whole.append(raw[at + HEAD_BYTES : at + HEAD_BYTES + size])
        at += HEAD_BYTES + size
    return data[:1] + sealed(*(one for one in whole if one)) + raw[at:]


def received(pieces: list[bytes], size: int) -> tuple[bytes, str | None]:
    """Return what the link hands on, and why it refuses the rest."""
    wire: Any = Wire(pieces)
    link, out = SealedSocket(wire, OWN, THEIRS), b""
    try:
        while data := link.recv(size):
            out += data
    except TamperedError as refused:
        return out, str(refused)
    return out, None


def one(data: bytes) -> None:
    """Receive frames in one piece and in several: only whole frames with a right MAC count."""
    raw = data[1:]
    found = received([raw], 4_096)
    assert payloads_of(raw).startswith(found[0])
    assert not found[0] or raw.startswith(sealed(found[0][: int.from_bytes(raw[:4])]))
    for number, pieces in enumerate(kit.splits(raw)):
        again = received(pieces, (1, 7, 4_096)[number])
        # What a link refuses ends it: frames before it, in the same read, may be lost with it.
        assert again[1] == found[1] and (again[0] == found[0] or found[1] is not None)
        assert payloads_of(raw).startswith(again[0])
    if found[1] is not None:
        with kit.documented(TamperedError):
            wire: Any = Wire([raw])
            link = SealedSocket(wire, OWN, THEIRS)
            while link.recv(4_096):
                continue
    kit.refuse(found[0], "no whole frame")
