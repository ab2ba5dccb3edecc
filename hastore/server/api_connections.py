"""The API's connections: who has spoken, who is silent, who floods; and how one of them is ended.

libzmq bounds a frame, but neither the frames of a message that never ends nor the connections that
never speak. Its monitor names the descriptor of each accepted connection, and each first message
carries the descriptor it came by, so this node can look at a connection and shut it down itself;
libzmq then sees its end and drops what it had kept of it.
"""

import logging
import select
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

import zmq

from hastore.clock import Clock
from hastore.protocol.api import MAX_FRAME_BYTES, MAX_HEADER_BYTES
from hastore.protocol.monitor_event import monitor_event

log = logging.getLogger(__name__)

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
CHECK_INTERVAL_MS = 50.0
UNFINISHED_LIMIT_BYTES = MAX_FRAME_BYTES + MAX_HEADER_BYTES + 1024 * 1024
_POLLIN = int(zmq.POLLIN)
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128  # in Linux' struct tcp_info


@dataclass(slots=True, eq=False)
class Connection:
    """One client's connection. `unsent` are the (tracker, bytes) of replies libzmq still holds."""

    descriptor: int
    address: tuple[str, int] | None
    routing_id: bytes | None = None  # None: it has not spoken
    messages: int = 0
    run: int = 0
    next_at: int | None = None  # None: an earlier put of the run was refused
    parked: int = 0
    ended: bool = False
    unsent: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    unsent_bytes: int = 0
    checked_messages: int = 0
    checked_bytes: int = 0
    warnings: int = 0


class Connections:
    """All connections of the ROUTER socket; used by whoever holds the socket."""

    def __init__(self, router: zmq.Socket[bytes], limit: int, clock: Clock) -> None:
        self._limit = limit
        self._clock = clock
        self._monitor = router.get_monitor_socket(EVENTS)
        self.monitor_descriptor = self._monitor.fileno()  # to poll for `take_events`
        self._by_descriptor: dict[int, Connection] = {}
        self._by_routing_id: dict[bytes, Connection] = {}
        self._activity = select.epoll()
        self._next_check_ms = 0.0
        self.refused = 0
        self.ended = 0

    @property
    def count(self) -> int:
        """The connections that are open."""
        return len(self._by_descriptor)

    @property
    def spoken(self) -> int:
        """The connections that have spoken."""
        return len(self._by_routing_id)

    def close(self) -> None:
        """Release the descriptors."""
        self._monitor.close(linger=0)
        self._activity.close()

    def take_events(self) -> None:
        """Follow what libzmq says about connections that came and went."""
        while has_message(self._monitor):
            event, descriptor = monitor_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor)
            else:
                self._gone(descriptor)

    def find(self, routing_id: bytes) -> Connection | None:
        """Return the connection that has spoken under this id."""
        return self._by_routing_id.get(routing_id)

    def first_words(self, routing_id: bytes, descriptor: int | None) -> Connection | None:
        """Note that a connection speaks for the first time; None: it is not one of ours.

        A message without a descriptor comes from a peer that speaks ZMTP 1 or 2, as random bytes
        may seem to do: it stays silent for us, and goes first when room is needed.
        """
        if descriptor is None:
            return None
        connection = self._by_descriptor.get(descriptor)
        if connection is None or connection.routing_id is not None:
            connection = self._accepted(descriptor)  # its event is still to come, or was overtaken
        if connection is None:
            return None
        connection.routing_id = routing_id
        if len(self._by_routing_id) >= self._limit:
            self.refused += 1
            self.end(connection, f"{self._limit} connections have spoken (api.max_connections)")
            return connection
        self._by_routing_id[routing_id] = connection
        return connection

    def lost(self, routing_id: bytes) -> None:
        """Forget a connection that libzmq no longer knows."""
        connection = self._by_routing_id.pop(routing_id, None)
        if connection is not None:
            connection.ended = True
            if self._by_descriptor.get(connection.descriptor) is connection:
                del self._by_descriptor[connection.descriptor]

    def end(self, connection: Connection, reason: str) -> None:
        """Shut a connection down; libzmq drops what it holds of it."""
        if connection.ended:
            return
        connection.ended = True
        self.ended += 1
        log.warning("api: connection from %s ended: %s", _shown(connection.address), reason)
        if connection.routing_id is not None:
            self._by_routing_id.pop(connection.routing_id, None)
        peer = _peer(connection.descriptor)
        if peer is None:
            return
        with peer:
            if _address(peer) == connection.address:  # the number may be another's by now
                try:
                    peer.shutdown(socket.SHUT_RDWR)
                except OSError as failure:  # gone by itself
                    log.debug("api: %s", failure)

    def wait_ms(self, now_ms: float) -> float:
        """Return how long the loop may sleep before `check`; infinity: as long as it likes."""
        return max(0.0, self._next_check_ms - now_ms) if self._by_descriptor else float("inf")

    def check(self, now_ms: float) -> None:
        """End those who keep sending without ever finishing a message.

        Called when no message is left to read: what a connection sent since its last one is
        then one unfinished message, or what the kernel has not handed over yet. Two looks in
        a row must agree.
        """
        if now_ms < self._next_check_ms:
            return
        self._next_check_ms = now_ms + CHECK_INTERVAL_MS
        for descriptor, _ in self._activity.poll(0):
            connection = self._by_descriptor.get(descriptor)
            if connection is not None:
                self._look_at(connection)

    def _look_at(self, connection: Connection) -> None:
        received = _bytes_received(connection)
        if received is None:
            return
        if connection.messages != connection.checked_messages:
            connection.checked_messages = connection.messages
            connection.checked_bytes = received
            connection.warnings = 0
        elif received - connection.checked_bytes > UNFINISHED_LIMIT_BYTES:
            connection.warnings += 1
            if connection.warnings > 1:
                self.end(connection, f"a message of more than {UNFINISHED_LIMIT_BYTES} bytes")

    def _accepted(self, descriptor: int) -> Connection | None:
        """Take up a connection; None when it is gone already."""
        known = self._by_descriptor.get(descriptor)
        peer = _peer(descriptor)
        address = None
        if peer is not None:
            with peer:
                address = _address(peer)
        if address is None:
            return None
        if known is not None and known.address == address and not known.ended:
            return known
        connection = Connection(descriptor, address)
        self._by_descriptor[descriptor] = connection
        self._watch(descriptor)
        if len(self._by_descriptor) > self._limit:
            self._make_room()
        return connection

    def _watch(self, descriptor: int) -> None:
        try:
            self._activity.register(descriptor, select.EPOLLIN | select.EPOLLET)
        except FileExistsError:
            self._activity.modify(descriptor, select.EPOLLIN | select.EPOLLET)
        except OSError as failure:  # gone already
            log.debug("api: %s", failure)

    def _make_room(self) -> None:
        """Silent connections go first, the oldest of them; then the one that came last."""
        self.refused += 1
        victim = next((c for c in self._by_descriptor.values() if c.routing_id is None), None)
        if victim is None:
            victim = next(reversed(self._by_descriptor.values()))
        self.end(victim, f"more than {self._limit} connections (api.max_connections)")
        del self._by_descriptor[victim.descriptor]

    def _gone(self, descriptor: int) -> None:
        connection = self._by_descriptor.get(descriptor)
        if connection is None:
            return
        peer = _peer(descriptor)
        if peer is not None:
            with peer:
                if _address(peer) == connection.address and not connection.ended:
                    return  # the news is of an earlier owner of this number
        connection.ended = True
        del self._by_descriptor[descriptor]
        if connection.routing_id is not None:
            self._by_routing_id.pop(connection.routing_id, None)


def descriptor_of(frame: zmq.Frame) -> int | None:
    """Return the descriptor a message came by; None when libzmq does not tell."""
    try:
        return int(frame.get("__fd"))
    except zmq.ZMQError:
        return None


def has_message(waiting: zmq.Socket[bytes]) -> bool:
    """Whether a socket has a message to read now; asking also lets libzmq do its chores."""
    return bool(zmq.zmq_poll([(waiting, _POLLIN)], 0))  # quicker than asking for EVENTS


def _peer(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a descriptor that is a TCP socket; None when it is none, or closed."""
    try:
        return socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return None


def _address(peer: socket.socket) -> tuple[str, int] | None:
    try:
        name = peer.getpeername()
    except OSError:
        return None
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None


def _bytes_received(connection: Connection) -> int | None:
    peer = _peer(connection.descriptor)
    if peer is None:
        return None
    with peer:
        if _address(peer) != connection.address:
            return None
        try:
            info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            return None
    if len(info) < _BYTES_RECEIVED_AT + _BYTES_RECEIVED.size:
        return None
    (received,) = _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)
    return int(received)


def _shown(address: tuple[str, int] | None) -> str:
    return f"{address[0]}:{address[1]}" if address else "an unknown peer"
