"""The network between hosts: streams in order, delays, losses, resets, cuts of one way or both.

A stream is TCP's as a program sees it. What cannot pass is sent again later, as TCP does, until the
sender gives up; a program sees late bytes, partial reads, resets and silence, never bytes in
disorder. A host without power answers nothing; one whose process is gone answers with a reset.
"""

from __future__ import annotations

import errno
import random
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from tests.world.scheduler import Deadlock, Host, Scheduler, Task, world

IN, OUT, ERR, HUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR, select.EPOLLHUP
_ANY = IN | OUT | ERR | HUP
WINDOW_BYTES = 256 * 1024
FIRST_DESCRIPTOR = 1 << 20  # below are real ones, of files
GIVES_UP_S = 60.0  # TCP's own limit is a quarter of an hour
SYN_GIVES_UP_S = 20.0
RETRY_S, RETRY_S_MAX = 0.2, 3.0
Address = tuple[str, int]
T = TypeVar("T")


class Watcher(Protocol):
    """Who is told that the state of a descriptor may have changed: an epoll, or a thread."""

    def poke(self, changed: Pollable) -> None: ...


class Pollable(ABC):
    """What has a descriptor that can be waited for."""

    def __init__(self) -> None:
        network = of_world()
        network.descriptors += 1
        self.number = self.descriptor = network.descriptors  # the latter is -1 once it is closed
        network.table[self.descriptor] = self
        self.watchers: dict[Watcher, int] = {}  # with the events that they wait for

    @abstractmethod
    def events(self) -> int:
        """Return what could be done now, as bits of epoll."""

    def changed(self) -> None:
        """Tell those whose events are there now, as a kernel does: a thread that waits for bytes
        is not woken because there is room.
        """
        if self.watchers:
            events = self.events()
            for watcher, mask in list(self.watchers.items()):
                if events & mask:
                    watcher.poke(self)

    def forget(self) -> None:
        """Close the descriptor."""
        of_world().table.pop(self.descriptor, None)
        self.descriptor = -1
        for watcher in list(self.watchers):
            watcher.poke(self)

    def wait(self, mask: int, timeout_s: float | None) -> bool:
        """Let the running thread wait for an event; errors and ends count always."""
        mask |= ERR | HUP
        if self.events() & mask:
            return True
        active, watchers = world(), self.watchers
        end = None if timeout_s is None else active.now + timeout_s
        while True:
            left_s = None if end is None else end - active.now
            if left_s is not None and left_s <= 0:
                return False
            task = running(active)
            watchers[task] = mask
            active.park(left_s)
            watchers.pop(task, None)
            if self.events() & mask:
                return True


def running(active: Scheduler) -> Task:
    """Return the running thread; what runs between threads must not wait."""
    task = active.current
    if task is None:
        raise Deadlock("what runs between threads must not wait")
    return task


def wait_for_events(
    watched: Collection[Pollable], found: Callable[[], T], timeout_s: float | None
) -> T:
    """As `Scheduler.wait_for`: `found` is asked again when one of the watched has events."""
    active = world()

    def park(left_s: float | None) -> None:
        task = running(active)
        for one in watched:
            one.watchers[task] = _ANY
        active.park(left_s)
        for one in watched:
            one.watchers.pop(task, None)

    return active.wait_for(found, park, timeout_s)


class Stream(Pollable):
    """One end of a connection."""

    def __init__(self, host: Host, local: Address, remote: Address) -> None:
        super().__init__()
        self.host, self.local, self.remote = host, local, remote
        self.inbox = bytearray()
        self.ended = False  # the other end sends no more
        self.error: int | None = None
        self.connected = False
        self.shut = False  # this end sends no more
        self.closed = False
        self.gone = False  # its process or its machine knows it no more
        self.peer: Stream | None = None
        self.outgoing: Flow | None = None
        self.limits: dict[int, float] = {}  # SO_RCVTIMEO and SO_SNDTIMEO, in seconds
        of_world().streams[self] = None

    def events(self) -> int:
        if self.error is not None:
            return _ANY
        found = IN if self.inbox or self.ended else 0
        if self.connected and (self.shut or self.room() > 0):
            found |= OUT
        if self.ended and self.shut:
            found |= HUP
        return found

    def room(self) -> int:
        flow, peer = self.outgoing, self.peer
        if flow is None or peer is None:
            return 0
        return WINDOW_BYTES - flow.waiting_bytes - len(peer.inbox)

    def took(self) -> None:
        """Note that bytes were read here: the other end may send more."""
        if self.peer is not None:
            self.peer.changed()

    def fail(self, number: int) -> None:
        """End the stream with an error, from outside."""
        if self.error is None and not self.closed:
            self.error = number
            self.changed()

    def end_sending(self) -> None:
        """Send the end of the stream after what was sent before."""
        if not self.shut:
            self.shut = True
            if self.outgoing is not None:
                self.outgoing.push(None)
            self.changed()

    def close(self, *, reset: bool = False) -> None:
        """Close, as the kernel does: with a reset if bytes were not read."""
        if self.closed:
            return
        self.closed = True
        of_world().streams.pop(self, None)
        if self.outgoing is not None and self.error is None:
            if reset or self.inbox:
                self.outgoing.reset()
            else:
                self.end_sending()
        self.gone = True
        self.inbox.clear()
        self.forget()


class Flow:
    """One direction of a connection: bytes, and the end as None, in order."""

    def __init__(self, source: Stream, target: Stream) -> None:
        self.source, self.target = source, target
        self.waiting: deque[bytes | None] = deque()
        self.waiting_bytes = 0
        self._under_way = False
        self._stalled_s: float | None = None  # since when nothing passes
        self._retry_s = RETRY_S
        source.outgoing = self

    def push(self, data: bytes | None) -> None:
        self.waiting.append(data)
        if data is not None:
            self.waiting_bytes += len(data)
        if not self._under_way:
            self._under_way = True
            world().after(of_world().delay_s(self.source.host, self.target.host), self._arrive)

    def _arrive(self) -> None:
        network, source, target = of_world(), self.source, self.target
        self._under_way = False
        if source.error is not None or not self.waiting or not source.host.powered:
            return
        if not network.passes(source.host, target.host):
            self._stall()
            return
        self._stalled_s, self._retry_s = None, RETRY_S
        if target.gone:
            network.refuse(source, target.host)
            return
        data = self.waiting.popleft()
        if data is None:
            target.ended = True
        else:
            self.waiting_bytes -= len(data)
            target.inbox += data
        target.changed()
        source.changed()
        if self.waiting:
            self._under_way = True
            world().after(network.delay_s(source.host, target.host) / 4, self._arrive)

    def _stall(self) -> None:
        active = world()
        if self._stalled_s is None:
            self._stalled_s = active.now
        if active.now - self._stalled_s > GIVES_UP_S:
            self.source.fail(errno.ETIMEDOUT)
            self.source.gone = True
            return
        self._under_way = True
        active.after(self._retry_s, self._arrive)
        self._retry_s = min(2 * self._retry_s, RETRY_S_MAX)

    def reset(self) -> None:
        """Drop what waits, and reset the other end."""
        self.waiting.clear()
        self.waiting_bytes = 0
        of_world().refuse(self.target, self.source.host)


class Listener(Pollable):
    """A listening socket."""

    def __init__(self, host: Host, local: Address) -> None:
        super().__init__()
        self.host, self.local = host, local
        self.backlog: deque[Stream] = deque()
        self.shut = False

    def events(self) -> int:
        return (IN if self.backlog or self.shut else 0) | (HUP if self.shut else 0)

    def close(self) -> None:
        if self.host.ports.get(self.local[1]) is self:
            del self.host.ports[self.local[1]]
        while self.backlog:
            self.backlog.popleft().close(reset=True)
        self.forget()


class Network:
    """All hosts by address, the connections, and what is wrong between whom."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.chance = random.Random(f"network {seed}")
        self.scheduler = scheduler
        self.hosts: dict[str, Host] = {}
        self.table: dict[int, Pollable] = {}
        self.streams: dict[Stream, None] = {}
        self.descriptors = FIRST_DESCRIPTOR
        self.cut: set[tuple[str, str]] = set()  # (from, to), by the hosts' names
        self.loss: dict[tuple[str, str], float] = {}
        self.slow_s: dict[tuple[str, str], float] = {}
        self.short_reads = 0.1
        self._ports = 40_000

    def join(self, host: Host) -> None:
        self.hosts[host.address] = host

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    # -- what is wrong

    def passes(self, source: Host, target: Host) -> bool:
        """Whether a packet sent now arrives."""
        way = (source.name, target.name)
        if way in self.cut or not target.powered:
            return False
        return not self.loss or self.chance.random() >= self.loss.get(way, 0.0)

    def delay_s(self, source: Host, target: Host) -> float:
        if source is target:
            return 20e-6
        usual = 0.0002 * (1.0 + self.chance.random())
        slow = self.slow_s.get((source.name, target.name), 0.0)
        return usual + slow * self.chance.random()

    def refuse(self, stream: Stream, by: Host) -> None:
        """Send a reset to a stream; a lost one is not sent again."""

        def arrive() -> None:
            if self.passes(by, stream.host):
                stream.fail(errno.ECONNRESET)

        self.scheduler.after(self.delay_s(by, stream.host), arrive)

    def reset_all(self, one: str, other: str) -> int:
        """Reset the connections between two hosts, as a firewall may; return how many."""
        found = [
            s for s in self.streams
            if s.host.name == one and s.peer is not None and s.peer.host.name == other
        ]  # fmt: skip
        for stream in found:
            peer = stream.peer
            stream.fail(errno.ECONNRESET)
            if peer is not None:
                peer.fail(errno.ECONNRESET)
        return len(found)

    def process_ends(self, host: Host) -> None:
        """Close what a killed process had open, as its kernel does."""
        self._drop(host, lambda stream: stream.close())

    def power_ends(self, host: Host) -> None:
        """Forget what a machine without power had open; nobody is told."""

        def forget(stream: Stream) -> None:
            stream.closed = stream.gone = True
            del self.streams[stream]

        self._drop(host, forget)

    def _drop(self, host: Host, end: Callable[[Stream], None]) -> None:
        for listener in list(host.ports.values()):
            listener.close()
        for stream in [one for one in self.streams if one.host is host]:
            end(stream)

    # -- connections

    def connect(self, stream: Stream) -> None:
        """Begin to connect; the stream becomes writable, or fails."""
        self._syn(stream, world().now, 1.0)

    def _syn(self, stream: Stream, begun_s: float, again_s: float) -> None:
        target = self.hosts.get(stream.remote[0])
        source = stream.host

        def arrive() -> None:
            if stream.closed or stream.error is not None:
                return
            if target is None or not (self.passes(source, target) and self.passes(target, source)):
                if world().now - begun_s > SYN_GIVES_UP_S:
                    stream.fail(errno.ETIMEDOUT)
                else:
                    world().after(again_s, lambda: self._syn(stream, begun_s, 2 * again_s))
                return
            listener = target.ports.get(stream.remote[1])
            if listener is None or listener.shut:
                stream.fail(errno.ECONNREFUSED)
                return
            peer = Stream(target, stream.remote, stream.local)
            join_ends(stream, peer)
            peer.connected = True
            listener.backlog.append(peer)
            listener.changed()
            world().after(self.delay_s(target, source), done)

        def done() -> None:
            if not stream.closed:
                stream.connected = True
                stream.changed()

        delay = 20e-6 if target is None else self.delay_s(source, target)
        world().after(delay, arrive)


def join_ends(one: Stream, other: Stream) -> None:
    """Connect two streams."""
    one.peer, other.peer = other, one
    Flow(one, other)
    Flow(other, one)


_network: Network | None = None


def activate(network: Network | None) -> None:
    """Set the network whose descriptors hastore's modules use."""
    global _network
    _network = network


def of_world() -> Network:
    """Return the active network."""
    assert _network is not None, "no world runs"
    return _network
