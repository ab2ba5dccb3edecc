"""ZMTP, at both ends, and the receiver of large payloads: the same messages, however they come."""

from __future__ import annotations

from hastore.protocol import zmtp
from hastore.protocol.zmtp import (
    LandingConnection,
    Message,
    SocketType,
    State,
    ZmtpConnection,
    encode_front,
    encode_ping,
    encode_refusal,
)
from tests.fuzz import kit

LIMITS = (300, 6_000)
REACHES = (
    ZmtpConnection.receive, ZmtpConnection._check_greeting, ZmtpConnection._check_peer,
    ZmtpConnection._follow_command, ZmtpConnection._join_pieces, LandingConnection.fill,
    zmtp._read_properties,
)  # fmt: skip
LEAST = kit.Least(0.12, 12)
TOKENS = (
    b"READY",
    b"\x04\x05READY",
    b"ERROR",
    b"PING",
    b"Socket-Type",
    b"DEALER",
    b"ROUTER",
    b"\x01",
)


def opening(socket_type: SocketType) -> bytes:
    """Return the greeting and READY of a peer."""
    return ZmtpConnection(socket_type, LIMITS).take_output()


def seeds() -> list[bytes]:
    """Return what peers send; the first byte says which end this is."""
    client, node = opening(SocketType.DEALER), opening(SocketType.ROUTER)
    two = encode_front(b"header", 5) + b"large"
    long = encode_front(b"h" * 280, 5_500) + b"x" * 5_500
    return [
        b"\0" + client + encode_front(b"request") + two + encode_ping(30_000),
        b"\1" + node + two * 2 + zmtp._command(b"PONG", b""),
        b"\1" + node + long + encode_front(b"after"),
        b"\0" + client + long[:200],
        b"\0" + client[:70],
        b"\0" + client[:30],
        b"\1" + encode_refusal("not now"),
        b"\0" + client + zmtp._command(b"ERROR", b"\x03why"),
        b"\0" + client + client[64:],
        b"\0" + node,
        b"\0" + client[:64] + two,
        b"\0\x16\x03\x01\0",
        b"\0GET / HTTP/1.1\r\n\r\n",
        b"\0" + client[:10] + b"\x02" + client[11:],
        b"\0" + client[:12] + b"PLAIN" + client[17:],
        b"\0" + client + b"\x01\x01a\x01\x01b\0\1c",
        b"\0" + client + encode_front(b"x" * 301),
        b"\0" + client + b"\x08\0",
        b"\0" + client + zmtp._command(b"PING", bytes(19)),
        b"\0" + client + b"\x04\x01\x05",
        b"\0" + client[:64] + zmtp._command(b"READY", b"\x05abc"),
    ]


def outcome(
    connection: ZmtpConnection, pieces: list[bytes]
) -> tuple[list[Message], State, str | None, bytes]:
    """Return the messages, the state, why the connection failed, and what is sent to the peer."""
    found: list[Message] = []
    total = 0
    for piece in pieces:
        total += len(piece)
        found += connection.receive(piece)
        assert connection.held_bytes <= total
        assert connection.missing_bytes >= 0
    return found, connection.state, connection.failure, connection.take_output()


def landed(socket_type: SocketType, data: bytes, step: int) -> tuple[list[Message], str | None]:
    """Return the messages and why the connection failed, as a reader of large payloads has them."""
    connection, found, at = LandingConnection(socket_type, LIMITS), list[Message](), 0
    while at < len(data):
        gap = connection.gap
        if gap:
            taken = data[at : at + min(len(gap), step)]
            gap[: len(taken)] = taken
            del gap
            new = connection.fill(len(taken))
        else:
            taken = data[at : at + step]
            new = connection.receive(taken)
        at += len(taken)
        if connection.landed is not None:
            places = [n for n, message in enumerate(new) if message[-1] == b"" and len(message) > 1]
            assert places, "a payload that landed belongs to a message"
            new[places[0]] = (*new[places[0]][:-1], bytes(connection.landed))
            connection.landed = None
        found += new
    return found, connection.failure


def one(data: bytes) -> None:
    """Receive in one piece, in several, and in place; encode the messages again."""
    this = SocketType.DEALER if data[:1] == b"\1" else SocketType.ROUTER
    data = data[1:]
    whole = outcome(ZmtpConnection(this, LIMITS), [data])
    for pieces in kit.splits(data):
        assert outcome(ZmtpConnection(this, LIMITS), pieces) == whole
    # As its own caller does, a step has never two payloads.
    assert landed(this, data, 100) == (whole[0], whole[2])
    for message in whole[0]:
        assert 1 <= len(message) <= len(LIMITS)
        assert all(len(frame) <= most for frame, most in zip(message, LIMITS, strict=False))
        peer = SocketType.ROUTER if this is SocketType.DEALER else SocketType.DEALER
        raw = encode_front(message[0], len(message[1]) if len(message) > 1 else None)
        raw += b"".join(message[1:])
        again = outcome(ZmtpConnection(this, LIMITS), [opening(peer) + raw])
        assert again[0] == [message]
    kit.refuse(whole[2] is None, kit.without_details(whole[2] or ""))
    kit.refuse(whole[1] is State.OPEN, "not open yet")
