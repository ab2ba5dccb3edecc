"""The DEALER sockets of a client, one for each address, owned by one thread at a time.

Requests wait for no connection (ZMQ_IMMEDIATE and NOBLOCK): what cannot be handed to the kernel's
side now is refused here, and what was queued for a connection that broke is dropped with it. So the
client above knows what may have been sent, and decides itself what to send again.
"""

from __future__ import annotations

import logging
import os
import select
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from hastore.errors import ProtocolError
from hastore.protocol import api

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 16 * 1024 * 1024
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1_000
_MONITORED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(slots=True)
class Link:
    """One DEALER. `generation` counts its connections; `up` is whether the present one stands."""

    address: str
    dealer: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    up: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A reply, or with `reply` None the news that a link went up or down."""

    address: str
    reply: api.Reply | None
    payload: bytes = b""
    up: bool = True


class LinkSet:
    """A client's links, one epoll over them, and an eventfd by which others wake the owner."""

    def __init__(self) -> None:
        self._context = zmq.Context(1)
        self._links: dict[str, Link] = {}
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wakeup)
        self._woken = False
        self._closed = False
        self._epoll.register(self._wakeup, select.EPOLLIN)

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a link."""
        return list(self._links)

    def is_up(self, address: str) -> bool:
        """Whether the address is connected now."""
        link = self._links.get(address)
        return link is not None and link.up

    def open(self, addresses: Iterable[str]) -> None:
        """Open a link to each address that has none."""
        for address in addresses:
            if address not in self._links:
                self._links[address] = self._connect(address)

    def reopen(self, address: str) -> None:
        """Replace a link, whose connection is dead or whose replies are no longer wanted."""
        link = self._links.pop(address, None)
        if link is not None:
            self._disconnect(link)
        self._links[address] = self._connect(address)

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request; False when the address is not connected or takes no more now."""
        link = self._links.get(address)
        if link is None:
            return False
        try:
            if payload is None:
                link.dealer.send(api.encode(message), zmq.NOBLOCK)
            else:
                link.dealer.send(api.encode(message), zmq.NOBLOCK | zmq.SNDMORE)
                link.dealer.send(payload, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def wake(self) -> None:
        """Wake the thread that sleeps in `wait`; any thread may call this."""
        if not self._woken:
            self._woken = True
            os.eventfd_write(self._wakeup, 1)

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Sleep until something arrives, `wake` was called or the time is up; return what came.

        News of a link precedes the replies that came over its new connection.
        """
        arrivals = self._collect()
        if arrivals:
            return arrivals
        for descriptor, _ in self._epoll.poll(timeout_s):
            if descriptor == self._wakeup:
                os.eventfd_read(self._wakeup)
                self._woken = False
        return self._collect()

    def close(self) -> None:
        """Close all links; what was handed over but not sent gets 1 s more."""
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            self._disconnect(link, linger_ms=1_000)
        self._links.clear()
        self._epoll.close()
        self._context.term()

    def _collect(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for link in self._links.values():
            if _has_message(link.monitor):
                self._follow(link, arrivals)
            while _has_message(link.dealer):
                self._receive(link, arrivals)
        return arrivals

    def _follow(self, link: Link, arrivals: list[Arrival]) -> None:
        while _has_message(link.monitor):
            event = recv_monitor_message(link.monitor, zmq.NOBLOCK)
            link.up = event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            link.generation += link.up
            arrivals.append(Arrival(link.address, None, up=link.up))

    def _receive(self, link: Link, arrivals: list[Arrival]) -> None:
        frames = link.dealer.recv_multipart(zmq.NOBLOCK)
        try:
            reply = api.decode_reply(frames[0])
        except ProtocolError as failure:
            log.warning("client: %s sent no reply of the API: %s", link.address, failure)
            return
        arrivals.append(Arrival(link.address, reply, frames[1] if len(frames) > 1 else b""))

    def _connect(self, address: str) -> Link:
        dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.SNDHWM, 2_048)
        dealer.setsockopt(zmq.RCVHWM, 2_048)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
        dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)
        monitor = dealer.get_monitor_socket(_MONITORED)
        dealer.connect(address)
        self._epoll.register(dealer.fileno(), select.EPOLLIN)
        self._epoll.register(monitor.fileno(), select.EPOLLIN)
        return Link(address, dealer, monitor)

    def _disconnect(self, link: Link, linger_ms: int = 0) -> None:
        self._epoll.unregister(link.dealer.fileno())
        self._epoll.unregister(link.monitor.fileno())
        link.dealer.disable_monitor()
        link.dealer.close(linger_ms)
        link.monitor.close(0)


def _has_message(waiting: zmq.Socket[bytes]) -> bool:
    return bool(int(waiting.getsockopt(zmq.EVENTS)) & int(zmq.POLLIN))
