"""What the client API sends: replies, and a bound on the large ones that libzmq still holds."""

from __future__ import annotations

import zmq

from hastore.protocol import api
from hastore.server.api_connections import Connection, Connections

TRACKED_BYTES = 4_096  # larger payloads are followed until libzmq has sent them
UNSENT_OF_ONE_BYTES = 8 * 1024 * 1024
UNSENT_BYTES = 64 * 1024 * 1024
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Replies:
    """Send replies over the ROUTER; used by whoever holds the socket.

    `used`: something was sent since it was last set to False.
    """

    def __init__(self) -> None:
        self._router: zmq.Socket[bytes]
        self._connections: Connections
        self._unsent: dict[Connection, None] = {}
        self.unsent_bytes = 0
        self.used = False

    def open(self, router: zmq.Socket[bytes], connections: Connections) -> None:
        """Say where replies go to; once, before the first."""
        self._router = router
        self._connections = connections

    def send(self, connection: Connection, reply: api.Reply, payload: bytes | None = None) -> None:
        """Send a reply; one to a connection that has ended goes nowhere.

        A connection that does not read its replies is ended.
        """
        routing_id = connection.routing_id
        if connection.ended or routing_id is None:
            return
        router = self._router
        self.used = True
        try:
            router.send(routing_id, _MORE)
            if payload is None:
                router.send(api.encode(reply), _NOBLOCK)
                return
            router.send(api.encode(reply), _MORE)
            if len(payload) < TRACKED_BYTES:
                router.send(payload, _NOBLOCK)
                return
            frame = zmq.Frame(payload, track=True, copy=False, copy_threshold=0)
            tracker = router.send(frame, _NOBLOCK, copy=False, track=True)
            self._follow(connection, tracker, len(payload))
        except zmq.Again:
            self._connections.end(connection, "it does not read its replies")
        except zmq.ZMQError as failure:
            if failure.errno != zmq.EHOSTUNREACH:
                raise
            self._connections.lost(routing_id)

    def has_room(self, connection: Connection) -> bool:
        """Whether another large reply to this connection stays within the bounds."""
        self._settle(connection)
        if connection.unsent_bytes >= UNSENT_OF_ONE_BYTES:
            return False
        if self.unsent_bytes >= UNSENT_BYTES:
            for each in list(self._unsent):
                self._settle(each)
        return self.unsent_bytes < UNSENT_BYTES

    def _follow(self, connection: Connection, tracker: zmq.MessageTracker, size: int) -> None:
        connection.unsent.append((tracker, size))
        connection.unsent_bytes += size
        self._unsent[connection] = None
        self.unsent_bytes += size

    def _settle(self, connection: Connection) -> None:
        """Forget the replies that libzmq has sent, or dropped with their connection."""
        unsent = connection.unsent
        while unsent and unsent[0][0].done:
            size = unsent.popleft()[1]
            connection.unsent_bytes -= size
            self.unsent_bytes -= size
        if not unsent:
            self._unsent.pop(connection, None)
