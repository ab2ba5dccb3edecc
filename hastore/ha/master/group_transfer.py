"""GroupTransferService: synchronous puts that wait until enough slaves and disks hold them.

The thread that makes progress completes the waiting puts itself, in offset order. That is
ReadSocketService after a report, the flush thread after a sync, and with `acks: 0` the appending
thread. This service's own thread only ends the waits whose deadline has passed.
"""

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec

from hastore.clock import Clock
from hastore.service import OnFailure, Service


class Need(IntEnum):  # a dict key for each put: IntEnum hashes in C, Enum in Python
    """What a put waits for."""

    MASTER_DISK = 0
    SLAVES = 1
    SLAVE_DISKS = 2  # the slaves' disks and the master's


class Outcome(Enum):
    """How a wait ended."""

    CONFIRMED = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    # Of mode dledger, with DLedger's names. The entry may still be committed, or be cut.
    WAIT_QUORUM_ACK_TIMEOUT = "WAIT_QUORUM_ACK_TIMEOUT"
    TERM_CHANGED = "TERM_CHANGED"


Done = Callable[[Outcome, str], None]


class _Waiter(msgspec.Struct):
    end_offset: int
    deadline_ms: float
    done: Done


class PutProgress(NamedTuple):
    """The log offset up to which each need is met.

    Of two, the one with the greater `serial` is newer. `level(need, end_offset)` returns the level
    of a put that ends at `end_offset`. `by_classics(end_offset)` returns whether such a put is
    confirmed when RocketMQ slaves count; beyond `classics_to` none is.
    """

    serial: int
    limits: dict[Need, int]
    level: Callable[[Need, int], str]
    by_classics: Callable[[int], bool] | None = None
    epoch: int | None = None
    classics_to: int = 1 << 63


class GroupTransferService(Service):
    """Complete waiting puts, each exactly once, from any thread.

    A put's `done` is called while no lock is held. `after_done` is called once after each batch of
    puts that end together, but not for a put that ends within `add`.
    """

    def __init__(
        self,
        clock: Clock,
        request_flush: Callable[[], None],
        *,
        on_failure: OnFailure,
        always_flush: bool = False,
        late: Callable[[Need], Outcome] | None = None,
        over: Callable[[Need], Outcome] | None = None,
    ) -> None:
        """Prepare; `late` and `over` give the outcome after a deadline and after the epoch's end.

        Without them both are the timeouts of mode classic.
        """
        super().__init__("GroupTransferService", on_failure=on_failure)
        self.after_done: Callable[[], None] = lambda: None
        self._request_flush = request_flush  # asks for a sync, does not wait for it
        self._always_flush = always_flush  # `store.flush: sync`: every put also waits for the disk
        self._late = late or _timeout
        self._over = over or _timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._wakeup = threading.Condition(self._lock)
        self._queues: dict[Need, deque[_Waiter]] = {need: deque() for need in Need}
        self._progress: PutProgress | None = None  # None: no epoch is open
        self._serial = 0
        self._next_deadline_ms = float("inf")
        # How long puts wait, by one of them at a time: what it needs, its end, since when it waits.
        self._timed: tuple[Need, int, float] | None = None
        self.timed = 0  # waits that were timed
        self.timed_ms = 0.0  # how long they took, together

    @property
    def waiting(self) -> int:
        """The number of puts that wait now."""
        return sum([len(queue) for queue in self._queues.values()])

    def add(
        self,
        end_offset: int,
        deadline_ms: float,
        need: Need,
        done: Done,
        *,
        epoch: int | None = None,
    ) -> None:
        """Wait until `need` is met up to `end_offset` or the monotonic clock passes `deadline_ms`.

        `done(outcome, level)` may be called before this returns. `epoch` is that of the append. If
        that epoch has ended meanwhile, the put ends at once, unconfirmed, because progress of a
        later epoch must not confirm it.
        """
        waiter = _Waiter(end_offset, deadline_ms, done)
        with self._lock:
            progress = self._progress
            if progress is not None and epoch is not None and epoch != progress.epoch:
                progress = None
            if progress is not None and not _met(progress, need, end_offset):
                queue = self._queues[need]
                if queue and queue[-1].end_offset > end_offset:
                    _insert(queue, waiter)
                else:
                    queue.append(waiter)
                if self._timed is None:
                    self._timed = need, end_offset, self._clock.monotonic_ms()
                if self._always_flush or need is not Need.SLAVES:
                    self._request_flush()
                if deadline_ms < self._next_deadline_ms:
                    self._next_deadline_ms = deadline_ms
                    self._wakeup.notify()
                return
        if progress is None:
            done(self._over(need), "MASTER_MEM")
        else:
            done(Outcome.CONFIRMED, progress.level(need, end_offset))

    def advance(self, progress: PutProgress) -> None:
        """Complete the puts that the progress covers.

        Threads may call this in any order. Progress is ignored if newer progress has come, or if
        its epoch has ended.
        """
        ready: list[tuple[Need, list[_Waiter]]] = []
        with self._lock:
            if progress.serial < self._serial:
                return
            self._serial = progress.serial
            self._progress = progress
            for need, queue in self._queues.items():
                met = _take_met(progress, need, queue)
                if met:
                    ready.append((need, met))
            timed = self._timed
            if timed is not None and _met(progress, timed[0], timed[1]):
                self._timed = None
                self.timed += 1
                self.timed_ms += self._clock.monotonic_ms() - timed[2]
        for need, met in ready:
            _confirm(need, met, progress.level)
        if ready:
            self.after_done()

    def abandon(self, serial: int) -> int:
        """End every wait because the epoch has ended; return the number of waits.

        The records are stored, but not known to be confirmed. Progress of an earlier `serial` is
        ignored from now on.
        """
        with self._lock:
            self._serial = max(serial, self._serial)
            ended = [(need, waiter) for need, queue in self._queues.items() for waiter in queue]
            for queue in self._queues.values():
                queue.clear()
            self._progress = self._timed = None
        self._end(ended, self._over)
        return len(ended)

    def run(self) -> None:
        """End the waits whose deadline has passed, until stopped."""
        while not self.stopping.is_set():
            expired: list[tuple[Need, _Waiter]] = []
            with self._wakeup:
                now = self._clock.monotonic_ms()
                if now >= self._next_deadline_ms:
                    expired = self._expire(now)
                else:
                    wait_s = min(1.0, (self._next_deadline_ms - now) / 1000.0)
                    self._wakeup.wait(wait_s)
            self._end(expired, self._late)

    def _end(self, unmet: list[tuple[Need, _Waiter]], outcome: Callable[[Need], Outcome]) -> None:
        for need, waiter in unmet:
            waiter.done(outcome(need), "MASTER_MEM")
        if unmet:
            self.after_done()

    def wake(self) -> None:
        """Let the thread see `stopping`."""
        with self._wakeup:
            self._wakeup.notify()

    def _expire(self, now_ms: float) -> list[tuple[Need, _Waiter]]:
        expired: list[tuple[Need, _Waiter]] = []
        next_ms = float("inf")
        for need, queue in self._queues.items():
            kept: deque[_Waiter] = deque()
            for waiter in queue:
                if waiter.deadline_ms <= now_ms:
                    expired.append((need, waiter))
                else:
                    kept.append(waiter)
                    next_ms = min(next_ms, waiter.deadline_ms)
            self._queues[need] = kept
        self._next_deadline_ms = next_ms
        return expired


def _met(progress: PutProgress, need: Need, end_offset: int) -> bool:
    if end_offset <= progress.limits[need]:
        return True
    by_classics = progress.by_classics
    if need is not Need.SLAVES or by_classics is None or end_offset > progress.classics_to:
        return False
    return by_classics(end_offset)


def _take_met(progress: PutProgress, need: Need, queue: deque[_Waiter]) -> list[_Waiter]:
    """Take the puts whose need is met out of a queue, in offset order.

    A put that a RocketMQ slave got before its stream began is never met by its reports, and must
    not hold up those behind it.
    """
    limit, met = progress.limits[need], list[_Waiter]()
    while queue and queue[0].end_offset <= limit:
        met.append(queue.popleft())
    if need is Need.SLAVES and progress.by_classics is not None:
        unmet: list[_Waiter] = []
        while queue and queue[0].end_offset <= progress.classics_to:
            waiter = queue.popleft()
            (met if progress.by_classics(waiter.end_offset) else unmet).append(waiter)
        queue.extendleft(reversed(unmet))
    return met


def _confirm(need: Need, waiters: list[_Waiter], level: Callable[[Need, int], str]) -> None:
    """Confirm puts whose need is met, in offset order.

    A slave that holds a put holds all earlier ones. So if the first and the last put have the same
    level, all puts between them have it too.
    """
    last = level(need, waiters[-1].end_offset)
    alike = len(waiters) == 1 or level(need, waiters[0].end_offset) == last
    for waiter in waiters:
        waiter.done(Outcome.CONFIRMED, last if alike else level(need, waiter.end_offset))


def _timeout(need: Need) -> Outcome:
    return Outcome.FLUSH_DISK_TIMEOUT if need is Need.MASTER_DISK else Outcome.FLUSH_SLAVE_TIMEOUT


def _insert(queue: deque[_Waiter], waiter: _Waiter) -> None:
    """Insert in offset order. A duplicate put has the smaller end offset of its original."""
    place = len(queue)
    while place and queue[place - 1].end_offset > waiter.end_offset:
        place -= 1
    queue.insert(place, waiter)
