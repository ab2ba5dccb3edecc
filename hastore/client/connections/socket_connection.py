"""One address of a SocketTransport, its socket if it has one, and what goes over it."""

from __future__ import annotations

import os
import socket
import weakref
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from hastore.client.connections.addresses import host_and_port
from hastore.client.connections.proving import Exchange
from hastore.client.connections.resolver import Targets
from hastore.client.connections.transport import MAX_REPLY_BYTES, RECONNECT_MS
from hastore.protocol.zmtp import SocketType, ZmtpConnection

if TYPE_CHECKING:
    from hastore.security.tls_engine import TlsEngine

_LIMITS = (MAX_REPLY_BYTES, MAX_REPLY_BYTES)


class State(Enum):
    """The state of a connection; see SocketTransport."""

    WAITING = "waiting for the next attempt"
    RESOLVING = "looking up the name"
    CONNECTING = "connecting"
    HANDSHAKE = "handshake"
    PROVING = "proving the identity"
    UP = "up"


class Link:
    """One address, and its socket if it has one."""

    __slots__ = (
        "address", "attempts", "due_ms", "exchange", "heard_ms", "host", "pause_ms", "pinged_ms",
        "port", "sock", "state", "targets", "tls", "unsent", "unsent_bytes", "watched", "zmtp",
    )  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, self.port = host_and_port(address)
        self.state = State.WAITING
        self.sock: socket.socket | None = None
        self.zmtp = new_zmtp()
        self.tls: TlsEngine | None = None
        self.exchange: Exchange | None = None
        self.targets: Targets = []  # (family, address), in the resolver's order
        self.attempts = 0
        self.pause_ms = RECONNECT_MS
        self.due_ms = 0.0  # when the next attempt begins, or the current attempt times out
        self.heard_ms = 0.0
        self.pinged_ms: float | None = None  # when the unanswered PING was sent
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = 0
        self.watched = False  # whether epoll reports when the kernel takes more bytes


class Wakeup:
    """An eventfd that stays open as long as a thread may write to it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


def sealed(connection: Link, buffers: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the bytes for the socket."""
    tls = connection.tls
    if tls is None:
        return buffers
    return (tls.encrypt(buffers[0] if len(buffers) == 1 else b"".join(buffers)),)


def new_zmtp() -> ZmtpConnection:
    """Return the client's end of a connection."""
    return ZmtpConnection(SocketType.DEALER, _LIMITS)
