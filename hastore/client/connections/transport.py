"""The interface of a client's connections, which both transports implement, and its types.

A transport has one connection for each address, and reconnects when the connection breaks. A
message is taken or refused at once, never queued for a connection that is down. Unsent bytes of a
broken connection are dropped. So the client knows which messages may have been sent, and decides
which to send again.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple, Protocol

from hastore.protocol import api

MAX_REPLY_BYTES = 16 * 1024 * 1024
RECONNECT_MS = 50.0  # the pause before a reconnect, doubled at each failure
RECONNECT_MS_MAX = 1_000.0
CONNECT_MS = 5_000.0  # from SYN to READY
PING_MS = 2_000.0  # a PING is sent after so long without received bytes
PONG_MS = 4_000.0  # a connection is dropped if a PING gets no answer for so long
UNSENT_BYTES_MAX = 32 * 1024 * 1024  # bytes of one connection that the kernel has not taken


class Arrival(NamedTuple):
    """A reply or, if `reply` is None, the news that a connection is up or down.

    `refused` says why one end does not accept the other. Later attempts are likely to end the same
    way, but are made. `gone` says that none will be made: no node has this address any more.
    """

    address: str
    reply: api.Reply | None
    payload: bytes = b""
    up: bool = True
    refused: str | None = None
    gone: bool = False


class Quiet(Enum):
    """Why an address is silent, in a word; the values are those of `silence` in the status."""

    REFUSED = "refused"  # no process listens there
    UNREACHABLE = "unreachable"  # no way there, or no such name
    TLS = "TLS"  # one end does not accept the other's, or one end does not speak it
    UNAUTHENTICATED = "unauthenticated"  # the node does not accept this client, or it not the node
    TIMED_OUT = "timed out"
    CLOSED = "closed"  # the node ended the connection
    FAILED = "failed"  # it answers, but not what was asked

    @property
    def is_final(self) -> bool:
        """Whether the next attempts are likely to end in the same way."""
        return self not in (Quiet.TIMED_OUT, Quiet.CLOSED)


class NoAnswer(NamedTuple):
    """Why there is no answer from an address, in a word and as a sentence."""

    kind: Quiet
    text: str


class AddressSource(Protocol):
    """What names the addresses of a group's nodes, if none were given: ZooKeeper."""

    @property
    def group_names(self) -> tuple[str, str]:
        """The names of the cluster and of the group."""
        ...

    @property
    def addresses(self) -> list[str]:
        """The addresses that are known now; none at first."""
        ...

    def problem(self) -> str:
        """Say why no address is known."""
        ...


class Transport(Protocol):
    """The connections of one client.

    One thread at a time calls the methods; meanwhile other threads may call `wake`, `sleep` and
    `silence`.
    """

    @property
    def source(self) -> AddressSource | None:
        """What names the addresses; None if the owner does, by `open`."""
        ...

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a connection, up or not."""
        ...

    def is_up(self, address: str) -> bool:
        """Whether the address is connected."""
        ...

    def heard_ms(self, address: str) -> float:
        """Return when bytes last came from an address, in monotonic ms; 0 if not known."""
        ...

    def silence(self, address: str) -> NoAnswer | None:
        """Return why an address is not connected, as far as known; None if it is connected."""
        ...

    def open(self, addresses: Iterable[str]) -> None:
        """Start a connection to each address that has none; does not wait."""
        ...

    def reopen(self, address: str) -> None:
        """Replace a connection that is dead or whose replies are no longer wanted."""
        ...

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request; False when the address is not connected or its buffer is full."""
        ...

    def collect(self) -> list[Arrival]:
        """Return what has arrived; a connection's "up" precedes its replies.

        Does not wait. Also reconnects if a reconnect is due.
        """
        ...

    def sleep(self, timeout_s: float) -> None:
        """Sleep until `collect` may have something, `wake` was called or the time is over.

        A timeout of -1 means no limit. `sleep` uses no connection, so one thread may sleep while
        another uses the transport.
        """
        ...

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived; sleep once if there is nothing."""
        ...

    def wake(self) -> None:
        """Wake the thread that sleeps; any thread may call this."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `collect` may have something; for asyncio."""
        ...

    def due_s(self) -> float:
        """Return the seconds until `collect` must be called even without an arrival; -1: never."""
        ...

    def sent_bytes(self, address: str) -> int:
        """Return how many bytes `send` has taken for an address's connection; 0 if not known."""
        ...

    def acked_bytes(self, address: str) -> int:
        """Return how many of `sent_bytes` the other end's system has taken; 0 if not known."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """The bytes of all connections that the kernel has not taken yet; 0 if not known."""
        ...

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the parent keeps its connections."""
        ...

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections; unsent bytes get `linger_s` more to reach the kernel."""
        ...
