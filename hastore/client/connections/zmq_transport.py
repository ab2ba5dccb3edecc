"""The transport through libzmq: a DEALER socket for each address, used by one thread at a time.

No request waits for a connection (ZMQ_IMMEDIATE and NOBLOCK): `send` refuses a request that libzmq
does not take at once, and libzmq drops the requests queued for a connection that breaks. So the
client knows which requests may have been sent, and decides which to send again.

An identity is proved in the clear, before a connection counts as up. libzmq cannot speak TLS.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import zmq

from hastore.client.connections.proving import UNAUTHENTICATED, Exchange, Prover
from hastore.client.connections.transport import (
    CONNECT_MS,
    MAX_REPLY_BYTES,
    RECONNECT_MS,
    RECONNECT_MS_MAX,
    AddressSource,
    Arrival,
    NoAnswer,
    Quiet,
)
from hastore.client.lifecycle import CarefulLog
from hastore.errors import AuthenticationError, ConfigError, ProtocolError
from hastore.protocol import api

log = CarefulLog(logging.getLogger(__name__))

_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_POLLIN = int(zmq.POLLIN)
# The first frame of a monitor's message: the event's number and its value. zmq.utils.monitor could
# read it, but imports asyncio.
_EVENT = struct.Struct("=Hi")
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(slots=True)
class _Connection:
    """One address's DEALER socket and the socket's monitor."""

    address: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False
    exchange: Exchange | None = None  # the proof of the identity, while it goes on
    refused: str | None = None  # why one end does not accept the other


class ZmqTransport:
    """A client's connections through libzmq, with libzmq's I/O thread; see `Transport`."""

    def __init__(self, prover: Prover | None = None) -> None:
        """Prepare; `prover` proves who this client is."""
        self._prover = prover
        self._context = zmq.Context(1)
        self._connections: dict[str, _Connection] = {}
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup).atexit = False  # see Wakeup
        self._woken = False
        self._closed = False
        self._signalled = True  # a socket may have something to read
        self._polled: list[tuple[zmq.Socket[bytes], int]] = []
        self._epoll.register(self._wakeup, select.EPOLLIN)

    @property
    def source(self) -> AddressSource | None:
        """None: the owner gives the addresses."""
        return None

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a connection, up or not."""
        return list(self._connections)

    def is_up(self, address: str) -> bool:
        """Whether the address is connected."""
        connection = self._connections.get(address)
        return connection is not None and connection.up

    def heard_ms(self, address: str) -> float:
        """Return 0: libzmq reads by itself, so `collect` has all that has come."""
        return 0.0

    def silence(self, address: str) -> NoAnswer | None:
        """Return why an address is not connected; libzmq says only whether it is."""
        if self.is_up(address):
            return None
        connection = self._connections.get(address)
        if connection is not None and connection.refused is not None:
            return NoAnswer(Quiet.UNAUTHENTICATED, connection.refused)
        return NoAnswer(Quiet.TIMED_OUT, "there is no connection")

    def open(self, addresses: Iterable[str]) -> None:
        """Start a connection to each address that has none."""
        for address in addresses:
            if address not in self._connections:
                self._connections[address] = self._connect(address)
                self._note_sockets()

    def reopen(self, address: str) -> None:
        """Replace a connection that is dead or whose replies are no longer wanted."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            self._disconnect(connection)
        self._connections[address] = self._connect(address)
        self._note_sockets()

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request; False when the address is not connected or its buffer is full."""
        connection = self._connections.get(address)
        if connection is None or (self._prover is not None and not connection.up):
            return False
        self._signalled = True
        try:
            if payload is None:
                connection.dealer.send(api.encode(message), _NOBLOCK)
            else:
                connection.dealer.send(api.encode(message), _MORE)
                connection.dealer.send(payload, _NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        """Wake the thread that sleeps in `wait`; any thread may call this."""
        if not self._woken:
            try:
                self._woken = True
                os.eventfd_write(self._wakeup, 1)
            except BaseException:  # a signal handler raised it, perhaps before the write
                self._woken = False
                raise

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived; sleep once if there is nothing."""
        arrivals = self.collect()
        if arrivals:
            return arrivals
        self.sleep(timeout_s)
        return self.collect()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until something may have arrived; uses no socket.

        libzmq signals an arrival once (its descriptor is edge-triggered), and any use of a socket
        may consume the signal. So after any use of a socket, `sleep` returns at once until
        `collect` is called.
        """
        for descriptor, _ in self._epoll.poll(0.0 if self._signalled else timeout_s):
            if descriptor == self._wakeup:
                try:
                    os.eventfd_read(self._wakeup)
                except BlockingIOError:
                    continue  # another sleeping thread has read it
                finally:
                    # Cleared after the read: a `wake` between the two need not write, because
                    # `collect` follows. Also cleared after an exception; otherwise later calls of
                    # `wake` would do nothing.
                    self._woken = False
            else:
                self._signalled = True

    def fileno(self) -> int:
        """Return the epoll's descriptor."""
        return self._epoll.fileno()

    def due_s(self) -> float:
        """Return 0 when the sockets were used since the last `collect`, else -1."""
        return 0.0 if self._signalled else -1.0

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections; unsent requests get `linger_s` more."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections.values():
            self._disconnect(connection, linger_ms=int(linger_s * 1000.0))
        self._connections.clear()
        self._polled.clear()
        self._epoll.close()
        self._context.term()

    def sent_bytes(self, address: str) -> int:
        """Return 0, because libzmq does not state the number."""
        return 0

    def acked_bytes(self, address: str) -> int:
        """Return 0, because libzmq does not state the number."""
        return 0

    @property
    def unsent_bytes(self) -> int:
        """Return 0, because libzmq does not state the number."""
        return 0

    def abandon(self) -> None:
        """Leave the sockets to pyzmq, which detects a fork by itself."""
        self._closed = True

    def collect(self) -> list[Arrival]:
        """Return what has arrived; a connection's "up" precedes its replies."""
        arrivals: list[Arrival] = []
        if not self._signalled:
            return arrivals
        self._signalled = False
        while ready := zmq.zmq_poll(self._polled, 0):
            readable = {waiting for waiting, _ in ready}
            for connection in self._connections.values():
                if connection.monitor in readable:
                    self._follow(connection, arrivals)
                if connection.dealer in readable:
                    self._receive(connection, arrivals)
        return arrivals

    def _follow(self, connection: _Connection, arrivals: list[Arrival]) -> None:
        event, _ = _EVENT.unpack(connection.monitor.recv_multipart(_NOBLOCK)[0])
        connection.exchange = None
        connection.up = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if connection.up and self._prover is not None:
            try:
                connection.exchange = self._prover.exchange()
            except ConfigError as failure:  # the key file has changed
                self._refuse(connection, str(failure), arrivals)
                return
        if connection.exchange is not None:
            connection.up = False
            self._send_request(connection, connection.exchange.first())
        else:
            arrivals.append(Arrival(connection.address, None, up=connection.up))

    def _follow_proof(
        self, connection: _Connection, exchange: Exchange, reply: api.Reply, arrivals: list[Arrival]
    ) -> None:
        try:
            following = exchange.follow(reply)
        except AuthenticationError as failure:
            self._refuse(connection, str(failure), arrivals)
            return
        if following is not None:
            self._send_request(connection, following)
        else:
            connection.exchange, connection.up = None, True
            arrivals.append(Arrival(connection.address, None, up=True))

    def _refuse(self, connection: _Connection, why: str, arrivals: list[Arrival]) -> None:
        """Report that one end does not accept the other; libzmq connects again by itself."""
        log.info("client: %s: %s", connection.address, why)
        connection.exchange, connection.up, connection.refused = None, False, why
        arrivals.append(Arrival(connection.address, None, up=False, refused=why))

    def _send_request(self, connection: _Connection, request: api.Request) -> None:
        try:
            connection.dealer.send(api.encode(request), _NOBLOCK)
        except zmq.Again:  # the connection has just broken; its end is reported
            log.debug("client: %s takes no proof", connection.address)

    def _receive(self, connection: _Connection, arrivals: list[Arrival]) -> None:
        frame = connection.dealer.recv(_NOBLOCK, copy=False)  # only a Frame has `more`
        header, payload = frame.bytes, b""
        if frame.more:
            frame = connection.dealer.recv(_NOBLOCK, copy=False)
            payload = frame.bytes
        while frame.more:
            frame = connection.dealer.recv(_NOBLOCK, copy=False)
        try:
            reply = api.decode_reply(header)
        except ProtocolError as failure:
            log.warning("client: %s sent a malformed reply: %s", connection.address, failure)
            return
        if connection.exchange is not None:
            self._follow_proof(connection, connection.exchange, reply, arrivals)
        elif isinstance(reply, api.Failed) and reply.status == UNAUTHENTICATED:
            self._refuse(connection, reply.reason, arrivals)
        else:
            arrivals.append(Arrival(connection.address, reply, payload))

    def _note_sockets(self) -> None:
        """List the sockets that `collect` polls: each connection's monitor and DEALER."""
        self._polled = [
            (waiting, _POLLIN)
            for connection in self._connections.values()
            for waiting in (connection.monitor, connection.dealer)
        ]
        self._signalled = True

    def _connect(self, address: str) -> _Connection:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        # With IPV6 set, libzmq uses only the IPv6 address of a name.
        dealer.setsockopt(zmq.IPV6, "[" in address)
        dealer.setsockopt(zmq.SNDHWM, 2_048)
        # No limit: libzmq 4.3.5 aborts the process if the peer goes away at that limit.
        dealer.setsockopt(zmq.RCVHWM, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        # Else an attempt that began while the network dropped everything lasts 127 s, in which the
        # kernel's next try may be a minute after the network is back.
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_MS))
        dealer.setsockopt(zmq.HANDSHAKE_IVL, int(CONNECT_MS))
        dealer.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_MS))
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MS_MAX))
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)
        monitor = dealer.get_monitor_socket(_MONITORED)
        dealer.connect(address)
        self._epoll.register(dealer.fileno(), select.EPOLLIN)
        self._epoll.register(monitor.fileno(), select.EPOLLIN)
        return _Connection(address, dealer, monitor)

    def _disconnect(self, connection: _Connection, linger_ms: int = 0) -> None:
        self._epoll.unregister(connection.dealer.fileno())
        self._epoll.unregister(connection.monitor.fileno())
        connection.dealer.disable_monitor()
        connection.dealer.close(linger_ms)
        connection.monitor.close(0)
