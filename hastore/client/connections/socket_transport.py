"""Links over plain non-blocking sockets that speak ZMTP; one epoll over them and an eventfd.

    WAITING --due--> RESOLVING --> CONNECTING --> SHAKING --READY--> UP
       ^ (names only: by a thread of their own)                       |
       +--------------------- any error, after a pause ---------------+

The owner calls `collect` and `send`; both end without waiting. Either may be cut off anywhere by a
signal's exception: the next call then finds `_inside` still set, tells that all links are down, and
makes them anew, since what was read, sent or told is not known.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Iterable
from enum import Enum

from hastore.client.connections.resolver import Targets, look_up, numeric_targets
from hastore.client.connections.transport import (
    MAX_REPLY_BYTES,
    PING_MS,
    PONG_MS,
    RECONNECT_MS,
    RECONNECT_MS_MAX,
    UNSENT_BYTES_MAX,
    Arrival,
)
from hastore.clock import Clock
from hastore.errors import ProtocolError
from hastore.protocol import api
from hastore.protocol.zmtp import SocketType, ZmtpConnection, encode_front, encode_ping

log = logging.getLogger(__name__)

CONNECT_MS = 5_000.0  # from the first packet to READY
RECEIVE_BYTES = 64 * 1024
RECEIVE_BYTES_MAX = 1024 * 1024  # when so much of one frame is still to come
CLOSING_READS_MAX = 64
JOIN_BYTES_MAX = 32 * 1024  # a payload up to here is copied behind its header
_LIMITS = (MAX_REPLY_BYTES, MAX_REPLY_BYTES)
_IN = select.EPOLLIN
_IN_OUT = select.EPOLLIN | select.EPOLLOUT
_NEVER = float("inf")


class _State(Enum):
    WAITING = "waiting for the next attempt"
    RESOLVING = "looking up the name"
    CONNECTING = "connecting"
    SHAKING = "shaking hands"
    UP = "up"


class _Link:
    """One address and its present connection, if any."""

    __slots__ = (
        "address", "attempts", "due_ms", "heard_ms", "host", "pause_ms", "pinged_ms", "port",
        "sock", "state", "targets", "unsent", "unsent_bytes", "watched", "zmtp",
    )  # fmt: skip

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.partition("://")[2].rpartition(":")
        self.host, self.port = host.strip("[]"), int(port)
        self.state = _State.WAITING
        self.sock: socket.socket | None = None
        self.zmtp = _new_zmtp()
        self.targets: Targets = []  # (family, address), in the resolver's order
        self.attempts = 0
        self.pause_ms = RECONNECT_MS
        self.due_ms = 0.0  # of the next attempt, or the end of this one
        self.heard_ms = 0.0
        self.pinged_ms: float | None = None  # a PING is out since
        self.unsent: deque[bytes | memoryview] = deque()
        self.unsent_bytes = 0
        self.watched = False  # the epoll tells when the kernel takes more


class _Wakeup:
    """An eventfd that lives as long as anybody may write to it."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)


class SocketLinks:
    """A client's links; see `Links` for what each method promises."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._by_descriptor: dict[int, _Link] = {}
        self._epoll = select.epoll()
        self._wakeup = _Wakeup()
        self._epoll.register(self._wakeup.descriptor, _IN)
        self._woken = False
        self._closed = False
        self._inside = False  # a call is under way, or was cut off
        self._ready: list[tuple[int, int]] = []  # what `sleep` found
        self._resolved: deque[tuple[_Link, Targets]] = deque()
        self._next_chore_ms = _NEVER

    @property
    def addresses(self) -> list[str]:
        """The addresses that have a link."""
        return list(self._links)

    def is_up(self, address: str) -> bool:
        """Whether the address is connected now."""
        link = self._links.get(address)
        return link is not None and link.state is _State.UP

    def open(self, addresses: Iterable[str]) -> None:
        """Open a link to each address that has none."""
        for address in addresses:
            if address not in self._links:
                self._begin(address)

    def reopen(self, address: str) -> None:
        """Replace a link; nothing is told of it, but for its next way up."""
        self._begin(address)

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        """Send a request now; False when the address is not connected or takes no more."""
        link = self._links.get(address)
        if link is None or link.state is not _State.UP or link.unsent_bytes > UNSENT_BYTES_MAX:
            return False
        if self._inside:
            return False  # a call was cut off: `collect` sees to it
        if payload is None:
            buffers: tuple[bytes, ...] = (encode_front(api.encode(message)),)
        else:
            front = encode_front(api.encode(message), len(payload))
            joined = len(payload) <= JOIN_BYTES_MAX
            buffers = (front + payload,) if joined else (front, payload)
        self._inside = True  # a message that cannot be encoded has touched nothing
        sent = self._hand_over(link, buffers)
        self._inside = False
        return sent

    def wake(self) -> None:
        """Wake the thread that sleeps; any thread may call this."""
        if not self._woken:
            try:
                self._woken = True
                os.eventfd_write(self._wakeup.descriptor, 1)
            except BaseException:  # a signal's: perhaps nothing was written, so the next one does
                self._woken = False
                raise

    def wait(self, timeout_s: float) -> list[Arrival]:
        """Return what has arrived, sleeping once if that is nothing."""
        arrivals = self.collect()
        if arrivals or not timeout_s:
            return arrivals
        self.sleep(timeout_s)
        return self.collect()

    def sleep(self, timeout_s: float) -> None:
        """Sleep until something may have arrived or is to be done."""
        if self._next_chore_ms != _NEVER:
            due_s = self.due_s()
            timeout_s = due_s if timeout_s < 0.0 else min(timeout_s, due_s)
        events = self._epoll.poll(timeout_s)
        for descriptor, _ in events:
            if descriptor == self._wakeup.descriptor:
                try:
                    os.eventfd_read(descriptor)
                except BlockingIOError:
                    continue  # two may sleep here: the other was first
                finally:
                    # Behind the read: who came in between saw a wake-up under way, a turn follows.
                    # Whatever ends the read, a signal's exception too: else nobody wakes again.
                    self._woken = False
        self._ready = events  # an event that another thread's replaces is told again

    def fileno(self) -> int:
        """Return the epoll's descriptor, which is readable when `collect` may have something."""
        return self._epoll.fileno()

    def due_s(self) -> float:
        """Return in how many seconds a link is to be made anew or looked after, -1 for never."""
        if self._next_chore_ms == _NEVER:
            return -1.0
        return max(0.0, self._next_chore_ms - self._clock.monotonic_ms()) / 1000.0

    def collect(self) -> list[Arrival]:
        """Return what has arrived, and look after the links."""
        arrivals: list[Arrival] = []
        if self._closed:
            return arrivals
        self._woken = False  # a turn begins; a `sleep` that was cut off may have left it set
        if self._inside:
            self._begin_anew(arrivals)
        self._inside = True
        now = self._clock.monotonic_ms()
        events, self._ready = self._ready or self._epoll.poll(0), []
        for descriptor, mask in events:
            link = self._by_descriptor.get(descriptor)
            if link is not None:
                self._attend(link, mask, now, arrivals)
            elif descriptor != self._wakeup.descriptor:
                with contextlib.suppress(OSError):  # of a call that was cut off, still open
                    self._epoll.unregister(descriptor)
        while self._resolved:
            self._take_targets(*self._resolved.popleft(), now)
        if now >= self._next_chore_ms:
            self._do_chores(now, arrivals)
        self._inside = False
        return arrivals

    def close(self, linger_s: float = 1.0) -> None:
        """Close all links; what the kernel has not taken yet gets `linger_s` more."""
        if self._closed:
            return
        deadline = self._clock.monotonic_ms() + linger_s * 1000.0
        for link in self._links.values():
            sock = link.sock
            while sock is not None and link.unsent and link.state is _State.UP:
                left_ms = deadline - self._clock.monotonic_ms()
                if left_ms <= 0.0 or not _wait_writable(sock, left_ms) or not self._flush(link):
                    break
        self._closed = True
        for link in self._links.values():
            self._disconnect(link, in_order=True)
        self._links.clear()
        self._epoll.close()

    @property
    def unsent_bytes(self) -> int:
        """What the kernel has not taken yet, over all links."""
        return sum([link.unsent_bytes for link in self._links.values()])

    def abandon(self) -> None:
        """Close the descriptors in a forked child; the connections stay the parent's."""
        self._closed = True
        for link in self._links.values():
            if link.sock is not None:
                link.sock.close()  # no more: the epoll behind its descriptor is the parent's too
                link.sock = None
        self._links.clear()
        self._epoll.close()

    # -- what happens on a link

    def _attend(self, link: _Link, mask: int, now: float, arrivals: list[Arrival]) -> None:
        sock = link.sock
        if sock is None:
            return
        if link.state is _State.CONNECTING:
            failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                self._down(link, os.strerror(failure), now, arrivals)
                return
            link.state = _State.SHAKING
            self._hand_over(link, (link.zmtp.take_output(),))
            return
        if mask & ~select.EPOLLOUT:  # the end of a stream and errors are read too
            self._receive(link, now, arrivals)
        if mask & select.EPOLLOUT and link.sock is sock and not self._flush(link):
            self._receive(link, now, arrivals)  # says what is wrong with it

    def _receive(self, link: _Link, now: float, arrivals: list[Arrival]) -> None:
        sock, zmtp = link.sock, link.zmtp
        assert sock is not None
        size = max(RECEIVE_BYTES, min(zmtp.missing_bytes, RECEIVE_BYTES_MAX))
        try:
            data = sock.recv(size)
        except BlockingIOError:
            return
        except OSError as failure:
            self._down(link, str(failure), now, arrivals)
            return
        if not data:
            self._down(link, "closed by the node", now, arrivals)
            return
        link.heard_ms = now
        if link.pinged_ms is not None:  # the next PING is due before this one's PONG was
            link.pinged_ms = None
            self._next_chore_ms = min(self._next_chore_ms, now + PING_MS)
        messages = zmtp.receive(data)
        if link.state is _State.SHAKING and zmtp.is_open:
            link.state = _State.UP
            link.pause_ms = RECONNECT_MS
            link.due_ms = _NEVER
            self._next_chore_ms = min(self._next_chore_ms, now + PING_MS)
            arrivals.append(Arrival(link.address, None, up=True))
        if zmtp.has_output:
            self._hand_over(link, (zmtp.take_output(),))
        for message in messages:
            try:
                reply = api.decode_reply(message[0])
            except ProtocolError as failure:
                log.warning("client: %s sent no reply of the API: %s", link.address, failure)
                continue
            arrivals.append(Arrival(link.address, reply, message[1] if len(message) > 1 else b""))
        if zmtp.failure is not None:  # last: the replies before it are good
            log.warning("client: %s: %s", link.address, zmtp.failure)
            self._down(link, zmtp.failure, now, arrivals)

    def _hand_over(self, link: _Link, buffers: tuple[bytes, ...]) -> bool:
        """Give buffers to the kernel, the rest to `unsent`; False: the connection is broken.

        Then nothing of them was sent, and the epoll tells of it.
        """
        sock = link.sock
        assert sock is not None
        sent = 0
        if not link.unsent:
            try:
                sent = sock.send(buffers[0]) if len(buffers) == 1 else sock.sendmsg(buffers)
            except BlockingIOError:
                sent = 0
            except OSError as failure:
                log.debug("client: %s: %s", link.address, failure)
                return False
        for buffer in buffers:
            if sent >= len(buffer):
                sent -= len(buffer)
                continue
            rest = memoryview(buffer)[sent:]
            link.unsent.append(rest)
            link.unsent_bytes += len(rest)
            sent = 0
        self._watch_for_room(link)
        return True

    def _flush(self, link: _Link) -> bool:
        """Send what is unsent, as far as the kernel takes it; False: the connection is broken."""
        sock = link.sock
        assert sock is not None
        while link.unsent:
            buffer = link.unsent[0]
            try:
                sent = sock.send(buffer)
            except BlockingIOError:
                return True
            except OSError as failure:
                log.debug("client: %s: %s", link.address, failure)
                return False
            link.unsent_bytes -= sent
            if sent == len(buffer):
                link.unsent.popleft()
            else:
                link.unsent[0] = memoryview(buffer)[sent:]
        self._watch_for_room(link)
        return True

    def _watch_for_room(self, link: _Link) -> None:
        """Let the epoll tell when the kernel takes more, while something is unsent."""
        wanted = bool(link.unsent)
        if wanted is not link.watched:
            link.watched = wanted
            assert link.sock is not None
            self._epoll.modify(link.sock.fileno(), _IN_OUT if wanted else _IN)

    def _down(self, link: _Link, why: str, now: float, arrivals: list[Arrival]) -> None:
        """End a connection, or an attempt; the next attempt follows after a pause."""
        log.debug("client: %s: %s", link.address, why)
        was_up = link.state is _State.UP
        self._disconnect(link)
        link.due_ms = now + link.pause_ms
        link.pause_ms = min(2.0 * link.pause_ms, RECONNECT_MS_MAX)
        self._next_chore_ms = min(self._next_chore_ms, link.due_ms)
        if was_up:
            arrivals.append(Arrival(link.address, None, up=False))

    def _disconnect(self, link: _Link, *, in_order: bool = False) -> None:
        """Close a link's socket, if any; `in_order`: after what was sent, so that it arrives."""
        link.state = _State.WAITING
        link.unsent.clear()
        link.unsent_bytes = 0
        link.pinged_ms = None
        sock, link.sock = link.sock, None
        if sock is None:
            return
        self._by_descriptor.pop(sock.fileno(), None)
        if in_order:
            # A socket that is closed with something unread resets the connection.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                for _ in range(CLOSING_READS_MAX):
                    if not sock.recv(RECEIVE_BYTES):
                        break
        sock.close()

    # -- connecting

    def _begin(self, address: str) -> None:
        """Make a new link, in the place of one that there may be."""
        inside, self._inside = self._inside, True
        before = self._links.get(address)
        link = self._links[address] = _Link(address)
        if before is not None:
            self._disconnect(before)
        self._attempt(link, self._clock.monotonic_ms())
        self._inside = inside

    def _attempt(self, link: _Link, now: float) -> None:
        if not link.targets:
            link.targets = numeric_targets(link.host, link.port)
        if not link.targets:
            link.state, link.due_ms = _State.RESOLVING, _NEVER
            look_up(link.host, link.port, lambda found: self._found(link, found))
            return
        family, target = link.targets[link.attempts % len(link.targets)]
        link.attempts += 1
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            failure = sock.connect_ex(target)
            if failure not in (0, errno.EINPROGRESS):
                raise OSError(failure, os.strerror(failure))
        except OSError as error:  # no such family here, no descriptors, no route
            if sock is not None:
                sock.close()
            self._down(link, str(error), now, [])
            return
        link.sock, link.zmtp, link.watched = sock, _new_zmtp(), True
        link.state, link.due_ms = _State.CONNECTING, now + CONNECT_MS
        link.heard_ms = now
        self._by_descriptor[sock.fileno()] = link
        self._epoll.register(sock.fileno(), _IN_OUT)
        self._next_chore_ms = min(self._next_chore_ms, link.due_ms)

    def _found(self, link: _Link, targets: Targets) -> None:
        """Take what a look-up found; called by its thread."""
        self._resolved.append((link, targets))
        self.wake()

    def _take_targets(self, link: _Link, targets: Targets, now: float) -> None:
        if self._links.get(link.address) is not link or link.state is not _State.RESOLVING:
            return
        link.targets = targets
        if targets:
            self._attempt(link, now)
        else:
            self._down(link, f"no address is known for {link.host}", now, [])

    # -- time

    def _do_chores(self, now: float, arrivals: list[Arrival]) -> None:
        self._next_chore_ms = _NEVER
        for link in self._links.values():
            due_ms = self._look_after(link, now, arrivals)
            self._next_chore_ms = min(self._next_chore_ms, due_ms)

    def _look_after(self, link: _Link, now: float, arrivals: list[Arrival]) -> float:
        """Do what is due on a link; returns when the next thing is."""
        if link.state is _State.UP:
            return self._check_life(link, now, arrivals)
        if now < link.due_ms:
            return link.due_ms
        if link.state is _State.WAITING:
            if link.host and link.attempts >= len(link.targets):
                link.targets = []  # a name may mean another address by now
                link.attempts = 0
            self._attempt(link, now)
        else:
            self._down(link, f"no connection within {CONNECT_MS / 1000.0:g} s", now, arrivals)
        return link.due_ms

    def _check_life(self, link: _Link, now: float, arrivals: list[Arrival]) -> float:
        if link.pinged_ms is None:
            if now < link.heard_ms + PING_MS:
                return link.heard_ms + PING_MS
            link.pinged_ms = now
            self._hand_over(link, (encode_ping(int(PING_MS + PONG_MS)),))
        elif now >= link.pinged_ms + PONG_MS:
            self._receive(link, now, arrivals)  # nobody may have looked for long
            if link.state is _State.UP and link.pinged_ms is not None:
                self._down(link, "no sign of life", now, arrivals)
            return link.due_ms if link.state is not _State.UP else now + PING_MS
        return (link.pinged_ms or now) + PONG_MS

    def _begin_anew(self, arrivals: list[Arrival]) -> None:
        """Make all links anew: a call was cut off, where in their streams is not known."""
        log.debug("client: a call was interrupted, all links are made anew")
        self._ready = []
        now = self._clock.monotonic_ms()
        for link in self._links.values():
            self._disconnect(link)
            # Whether its last news was handed over is not known either: down can be told twice.
            arrivals.append(Arrival(link.address, None, up=False))
            link.pause_ms, link.due_ms = RECONNECT_MS, now
        for descriptor, link in list(self._by_descriptor.items()):  # cut off between two steps
            log.debug("client: %s: a descriptor was left open", link.address)
            del self._by_descriptor[descriptor]
        self._next_chore_ms = now


def _new_zmtp() -> ZmtpConnection:
    return ZmtpConnection(SocketType.DEALER, _LIMITS)


def _wait_writable(sock: socket.socket, timeout_ms: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLOUT)
    return bool(poller.poll(timeout_ms))
