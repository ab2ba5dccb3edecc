"""Threads as greenlets on virtual time: of all that can run, a seeded random picks the next.

A thread of the product runs until it waits: for a lock, an event, a socket, a disk or time. If none
can run, the time jumps to the next deadline. So one OS thread runs whole nodes, and a seed repeats
a walk bit for bit. With `preempts` a thread may also lose its turn where it takes a lock, which
explores races.

A host is a machine, or a program of its own such as a client. Its threads are never resumed after
its end: not even their `finally` runs, as after a kill -9. They are kept until the process ends,
because a greenlet that is freed would run them.
"""

from __future__ import annotations

import heapq
import random
import struct
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import greenlet

SWITCH_S = 20e-6  # what a turn of a thread takes: a loop that only polls must not stop the time
LOOK_S = 1e-6  # what a look at a clock takes
EPOCH_S = 1_700_000_000.0  # the wall clock at the walk's begin
_TURN = struct.Struct("<dI")  # when, and which thread: for the digest of a walk
T = TypeVar("T")


class Host:
    """A machine with an address and clocks of its own; times are in seconds."""

    def __init__(self, world: Scheduler, name: str, address: str) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.process = 1  # threads of an earlier process of this host never run again
        self.paused = False  # as by SIGSTOP
        self.held: list[Task] = []  # could run, but for the pause
        self.wall_ahead_s = 0.0
        self.booted_s = 1_000.0 + world.chance.random() * 1e6
        self.ports: dict[int, Any] = {}
        self.powered = True

    def monotonic(self) -> float:
        return self.world.look() + self.booted_s

    def wall(self) -> float:
        return EPOCH_S + self.world.look() + self.wall_ahead_s


class Task:
    """A thread."""

    __slots__ = (
        "done", "greenlet", "host", "joiners", "locals", "name", "number", "parked", "process",
        "target", "ticket", "woken",
    )  # fmt: skip

    def __init__(self, host: Host, name: str, target: Callable[[], object], number: int) -> None:
        self.host = host
        self.process = host.process
        self.name = name
        self.number = number
        self.target = target
        self.done = False
        self.parked = False
        self.woken = False
        self.ticket = 0
        self.joiners: list[Task] = []
        self.locals: dict[Any, Any] = {}
        self.greenlet = greenlet.greenlet(self._main, host.world.hub)

    def _main(self) -> None:
        try:
            self.target()
        except Exception as failure:
            self.host.world.thread_failed(self, failure)
        self.done = True
        for one in self.joiners:
            self.host.world.wake(one)

    def poke(self, _changed: object) -> None:
        """Run again: what this thread waits for may have changed."""
        self.host.world.wake(self)


class Deadlock(AssertionError):
    """What is no thread, such as a timer, would have to wait: nothing would run meanwhile."""


class Scheduler:
    """All threads of all hosts, and the time in seconds since the walk's begin."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"schedule {seed}")
        self._bits = self.chance.getrandbits
        self.product = random.Random(f"product {seed}")  # what the product draws
        self.now = 0.0
        self.preempts = 0.0  # the share of lock operations at which a thread loses its turn
        self.current: Task | None = None
        self.ready: list[Task] = []
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.tasks: list[Task] = []
        self.failures: list[str] = []
        self.switches = 0
        self.digest = 0
        self.trace: list[str] | None = None
        self.outside = Host(self, "outside", "10.9.9.9")  # what belongs to no machine
        self._numbers = 0
        self.hub = greenlet.getcurrent()

    # -- called by the hub: the walk itself, and timers

    def spawn(self, host: Host, name: str, target: Callable[[], object]) -> Task:
        """Start a thread of a host."""
        self._numbers += 1
        task = Task(host, name, target, self._numbers)
        self.tasks.append(task)
        task.parked = True
        self.wake(task)
        return task

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call` in the hub, where nothing may wait."""
        self._numbers += 1
        heapq.heappush(self.timers, (self.now + delay_s, self._numbers, call, args))

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Run until the condition holds; False if `limit_s` of virtual time pass before."""
        end = self.now + limit_s
        step = self._step
        while not until():
            if self.now >= end:
                return False
            step(end)
        return True

    def _step(self, end: float) -> None:
        timers = self.timers
        while timers and timers[0][0] <= self.now:
            _, _, call, args = heapq.heappop(timers)
            call(*args)
        ready = self.ready
        if not ready:
            self.now = min(timers[0][0], end) if timers else end
            return
        task = ready.pop()
        if ready:  # one of them at random
            at = self._below(len(ready) + 1)
            if at < len(ready):
                ready[at], task = task, ready[at]
        host = task.host
        if task.process != host.process:
            return
        if host.paused:
            host.held.append(task)
            return
        self.now += SWITCH_S
        self.switches += 1
        self.note(task)
        self.current = task
        task.greenlet.switch()
        self.current = None

    def _below(self, count: int) -> int:
        """As `randrange(count)`, which takes several times as long, of the same random bits."""
        bits = count.bit_length()
        while (found := self._bits(bits)) >= count:
            pass
        return found

    def note(self, task: Task) -> None:
        self.digest = zlib.crc32(_TURN.pack(self.now, task.number), self.digest)
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {task.number} {task.host.name} {task.name}")

    def end_process(self, host: Host) -> None:
        """End all threads of a host where they are."""
        host.process += 1
        host.held.clear()
        host.paused = False

    def resume(self, host: Host) -> None:
        """End a pause."""
        host.paused = False
        self.ready += host.held
        host.held.clear()

    def thread_failed(self, task: Task, failure: BaseException) -> None:
        text = "".join(traceback.format_exception(failure))
        self.failures.append(f"{task.host.name}: thread {task.name}: {text}")

    # -- called by threads

    def look(self) -> float:
        """Return the time; looking takes some, so that loops over a clock end."""
        self.now += LOOK_S
        return self.now

    @property
    def host(self) -> Host:
        """The host of the running thread."""
        return self.outside if self.current is None else self.current.host

    def park(self, timeout_s: float | None = None) -> bool:
        """Wait for a `wake`; False if the time is over first."""
        task = self.current
        if task is None:
            raise Deadlock("what runs between threads must not wait")
        task.ticket += 1
        task.parked, task.woken = True, False
        if timeout_s is not None:
            self._numbers += 1
            at = self.now + timeout_s if timeout_s > 0.0 else self.now
            heapq.heappush(self.timers, (at, self._numbers, self._expire, (task, task.ticket)))
        self.hub.switch()
        return task.woken

    def wait_for(
        self,
        found: Callable[[], T],
        park: Callable[[float | None], object],
        timeout_s: float | None,
    ) -> T:
        """Wait until `found` returns something true, by `park`, which gets the seconds left.

        Returns what `found` returned last: something false if the time is over first.
        """
        end = None if timeout_s is None else self.now + timeout_s
        while not (there := found()):
            left = None if end is None else end - self.now
            if left is not None and left <= 0:
                break
            park(left)
        return there

    def wait_in(
        self, line: list[Task] | deque[Task], found: Callable[[], T], timeout_s: float | None
    ) -> T:
        """As `wait_for`, in a line of threads from which others take and wake them."""

        def park(left_s: float | None) -> None:
            task = self.current
            assert task is not None, "what runs between threads must not wait"
            line.append(task)
            self.park(left_s)
            if task in line:
                line.remove(task)

        return self.wait_for(found, park, timeout_s)

    def wake(self, task: Task) -> None:
        """Let a waiting thread run; does nothing to one that does not wait."""
        if task.parked:
            task.parked, task.woken = False, True
            self.ready.append(task)

    def _expire(self, task: Task, ticket: int) -> None:
        if task.parked and task.ticket == ticket:
            task.parked = False
            self.ready.append(task)

    def sleep(self, seconds: float) -> None:
        """Let time pass for this thread."""
        self.park(max(0.0, seconds))

    def give_way(self) -> None:
        """Let others run first, in the share of calls that the walk has chosen."""
        if self.preempts and self.current is not None and self.chance.random() < self.preempts:
            self.park(0.0)


_active: Scheduler | None = None


def activate(scheduler: Scheduler | None) -> None:
    """Set the world whose clocks, threads and sockets hastore's modules use."""
    global _active
    _active = scheduler


def world() -> Scheduler:
    """Return the active world."""
    assert _active is not None, "no world runs"
    return _active
