"""The connections that a node's HA port has accepted, in every mode: few, and none without a use.

The threads of a mode serve the connections (HAService, or PeerLinks of the DLedger mode).
"""

import itertools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from hastore.bounded_log import BoundedLines
from hastore.service import Service

log = logging.getLogger(__name__)


class Accepted(Protocol):
    """An accepted connection, as this table needs it."""

    @property
    def spoken(self) -> bool:
        """Whether the peer has completed HELLO, or reported as a classic slave."""
        ...

    @property
    def reader(self) -> Service:
        """The thread that serves the connection; it is started after the connection is known."""
        ...

    def close(self, reason: str) -> None:
        """Tear the connection down, from any thread; later calls do nothing."""
        ...


C = TypeVar("C", bound=Accepted)


class AcceptedConnections(Generic[C]):
    """Make a connection of each accepted socket, at most `limit` at a time. Thread-safe.

    `make(sock, address, number)` returns the connection, which then owns the socket; the number is
    unique in this process.
    """

    def __init__(self, limit: int, make: Callable[[socket.socket, str, int], C]) -> None:
        # For warnings about callers: anyone can cause them.
        self.warn = BoundedLines(log).write
        self._limit = limit
        self._make = make
        self._lock = threading.Lock()
        self._connections: list[C] = []
        self._numbers = itertools.count(1)

    def all(self) -> list[C]:
        """Return the connections, oldest first."""
        with self._lock:
            return list(self._connections)

    def accept(self, sock: socket.socket, address: str) -> None:
        """Take a new connection.

        At the limit it replaces the oldest connection that has neither completed HELLO nor sent a
        RocketMQ slave's report. If there is no such connection, the new one is refused.
        """
        with self._lock:
            silent = [c for c in self._connections if not c.spoken]
            full = len(self._connections) >= self._limit
            victim = silent[0] if full and silent else None
            if full and victim is None:
                self.warn(
                    "connection of %s refused: %d HA connections are open", address, self._limit
                )
                sock.close()
                return
            if victim is not None:
                # Its thread ends later; until then the next caller would drop the same one.
                self._connections.remove(victim)
            connection = self._make(sock, address, next(self._numbers))
            self._connections.append(connection)
        if victim is not None:
            victim.close("dropped for a new connection: it has not said HELLO")
        try:
            connection.reader.start()
        except RuntimeError:  # no more threads
            connection.close("no thread for it")
            raise

    def forget(self, connection: C) -> None:
        """Drop a closed connection."""
        with self._lock:
            if connection in self._connections:
                self._connections.remove(connection)

    def stop(self) -> None:
        """Close all connections and wait for their threads."""
        connections = self.all()
        for connection in connections:
            connection.close("the node stops")
        for connection in connections:
            connection.reader.stop()
