"""Reads for clients that must wait for the disk: in threads of their own, a turn for each client.

The API's thread tries every read first, and takes only what is in memory (`without_waiting`). A
read that would wait for the disk comes here. READERS threads read at once, and the API's thread
gives each of them one read at a time: so the reads that wait stay with it, and it can take a turn
of each connection. One that ends meanwhile costs no read, and no reader works ahead of what clients
take. The results come back to the API's thread, which answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from hastore.service import OnFailure, Service

READERS = 4
MAX_COLD = 10_000  # reads that wait, but one of each; about as many as pulls may be parked
MAX_COLD_OF_ONE = 1_024  # the same, of a connection
STOP_S = 4.0  # a disk that hangs holds up the end of the node for no longer
TOO_MANY = "too many reads wait for this node's disk"
_Item = TypeVar("_Item")


class Turns(Generic[_Item]):
    """Items that wait, by whom they are for: each of these in turn gives its oldest item."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[_Item]] = {}  # in the order of the turns
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of_one(self, whom: Hashable) -> int:
        """Return how many items wait for one."""
        return len(self._of.get(whom, ()))

    def add(self, whom: Hashable, item: _Item) -> None:
        """Add an item; who has none yet gets the last turn."""
        own = self._of.get(whom)
        if own is None:
            own = self._of[whom] = deque()
        own.append(item)
        self._count += 1

    def pop(self) -> _Item:
        """Take the next item. Raises IndexError if there is none."""
        if not self._of:
            raise IndexError("nothing waits")
        whom = next(iter(self._of))
        items = self._of.pop(whom)
        item = items.popleft()
        if items:
            self._of[whom] = items  # behind all others
        self._count -= 1
        return item


class _Job(NamedTuple):
    whom: Hashable
    read: Callable[[], Any]
    then: Callable[[Any], None]
    is_wanted: Callable[[], bool]


def _result_of(job: _Job) -> Any:
    try:
        return job.read()
    except Exception as failure:  # the failure of this read; the API answers with it
        return failure


class ColdReader(Service):
    """One of the threads: does what it is given, and says so."""

    def __init__(self, number: int, reads: ColdReads, on_failure: OnFailure) -> None:
        super().__init__(f"ColdReader-{number}", on_failure=on_failure)
        self._reads = reads

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._reads.given.put(None)

    def run(self) -> None:
        """Read until stopped."""
        reads = self._reads
        while not self.stopping.is_set():
            job = reads.given.get()
            if job is None:  # look at `stopping`
                continue
            reads.done.append((job, _result_of(job)))
            del job  # while this thread waits it keeps no result alive
            reads.on_done()


class ColdReads:
    """All such reads of the client API. Its thread calls every method, with its lock held."""

    def __init__(self, on_done: Callable[[], None], on_failure: OnFailure) -> None:
        """Prepare; `on_done` is called from a reader's thread after each read."""
        self.on_done = on_done
        self.given: SimpleQueue[_Job | None] = SimpleQueue()
        self.done: deque[tuple[_Job, Any]] = deque()
        self._turns: Turns[_Job] = Turns()
        self._free = READERS
        self._readers = [ColdReader(number + 1, self, on_failure) for number in range(READERS)]

    def start(self) -> None:
        """Start the threads."""
        for reader in self._readers:
            reader.start()

    def stop(self) -> None:
        """Stop the threads; reads that still wait are dropped."""
        for reader in self._readers:
            reader.stopping.set()
        for reader in self._readers:  # any of them may take what one of them is sent
            reader.wake()
        for reader in self._readers:
            reader.stop(STOP_S / READERS)

    @property
    def has_done(self) -> bool:
        """Whether `finish` has something to do."""
        return bool(self.done)

    def accept(
        self,
        whom: Hashable,
        read: Callable[[], Any],
        then: Callable[[Any], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Let a reader call `read`, in the turns of `whom`; False: too many wait already.

        One of `whom` always may: otherwise a few others, who ask again at once, would keep it out.
        `finish` then calls `then` with its result, or with the exception that it raised. A read
        that is not wanted any more when its turn comes is dropped.
        """
        own = self._turns.of_one(whom)
        if own and (own >= MAX_COLD_OF_ONE or len(self._turns) >= MAX_COLD):
            return False
        self._turns.add(whom, _Job(whom, read, then, is_wanted))
        self._give()
        return True

    def finish(self, on_failure: Callable[[Hashable, Exception], None]) -> None:
        """Take what the readers have read by now, and give them the next reads.

        What they read meanwhile is left for the next call: otherwise a disk that reads as fast as
        the API answers would keep its thread here, and puts would wait for all reads that wait.
        If a `then` fails, `on_failure` is called with whom it was for.
        """
        for _ in range(len(self.done)):
            job, result = self.done.popleft()
            self._free += 1
            self._give()
            try:
                job.then(result)
            except Exception as failure:
                on_failure(job.whom, failure)

    def _give(self) -> None:
        while self._free and self._turns:
            job = self._turns.pop()
            if job.is_wanted():
                self._free -= 1
                self.given.put(job)
