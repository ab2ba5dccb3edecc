"""What the clients need of their connections.

A link is the connection to one address, made anew whenever it breaks. A message is sent over it at
once or refused, never queued for a connection that does not stand, and what was not sent when a
connection broke is dropped: so the client above knows what may have been sent, and decides itself
what to send again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from hastore.protocol import api

MAX_REPLY_BYTES = 16 * 1024 * 1024
RECONNECT_MS = 50.0  # doubled at each failure
RECONNECT_MS_MAX = 1_000.0
PING_MS = 2_000.0  # of silence, then the peer is asked for a sign of life
PONG_MS = 4_000.0  # without any, then the connection is given up
UNSENT_BYTES_MAX = 32 * 1024 * 1024  # of one link: what the kernel has not taken yet


class Arrival(NamedTuple):
    """A reply, or with `reply` None the news that a link went up or down."""

    address: str
    reply: api.Reply | None
    payload: bytes = b""
    up: bool = True


class Transport(Protocol):
    """The links of one client; used by one thread at a time, but for `wake` and `sleep`."""

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a link."""
        ...

    def is_up(self, address: str) -> bool:
        """Whether the address is connected now."""
        ...

    def open(self, addresses: Iterable[str]) -> None:
        """Open a link to each address that has none; does not wait."""
        ...

    def reopen(self, address: str) -> None:
        """Replace a link, whose connection is dead or whose replies are no longer wanted."""
        ...

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request; False when the address is not connected or takes no more now."""
        ...

    def collect(self) -> list[Arrival]:
        """Return what has arrived; news of a link precedes what came over its new connection.

        Does not wait. Makes broken links anew when that is due.
        """
        ...

    def sleep(self, timeout_s: float) -> None:
        """Sleep until `collect` may have something, `wake` was called or the time is up.

        -1: the time is never up.

        Touches no link: a second thread may sleep here while the first uses the links.
        """
        ...

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived, sleeping once if that is nothing."""
        ...

    def wake(self) -> None:
        """Wake the thread that sleeps; any thread may call this."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when `collect` may have something; for asyncio."""
        ...

    def due_s(self) -> float:
        """Return in how many seconds `collect` has something to do by itself, -1 for never."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet, over all links, as far as that is known."""
        ...

    def abandon(self) -> None:
        """Close the descriptors in a forked child, where the connections are the parent's."""
        ...

    def close(self, linger_s: float = 1.0) -> None:
        """Close all links; what was sent and not yet taken by the kernel gets `linger_s` more."""
        ...
