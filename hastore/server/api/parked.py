"""Pulls that wait, found by what ends their wait: never by looking at all of them.

    a pull waits for                        it is found by
    a record in its queue                   its queue, once replay has written records there
    a record that is there, but that        the heap of offsets, once readers may see the log up
      readers must not see yet                to that record's end
    an epoch that this node does not know   another history
    the end of its wait                     the heap of deadlines
    nothing any more: its connection ended  its connection

So an event costs what it wakes, and the logarithm of what waits. Every pull is in one of the first
three, and in the heap of deadlines. The API's lock is held in every call; other threads only read
`next_offset` and `needs_history`.
"""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from hastore.protocol.api import Position, Pull
from hastore.server.api.connections import Connection

NEVER = float("inf")
_STALE_MAX = 64  # entries of ended waits that a heap may hold, beyond as many as it has live ones


class Found(NamedTuple):
    """The answer to a pull as of now; if it waits, until `needs_offset` (see ParkedPulls.add)."""

    reply: Any  # Pulled or Failed; of an OwnPull what its `respond` takes, or Failed
    records: bytes | None = None
    needs_offset: float | None = None
    may_wait: bool = False  # there is nothing to answer with yet


class OwnPull(ABC):
    """A pull by queue offset that the node makes for a client of another protocol."""

    __slots__ = ("position", "queue_id", "topic", "wait_ms")
    rid = 0

    def __init__(self, topic: str, queue_id: int, position: Position, wait_ms: int) -> None:
        """Prepare; `find` may move `position`, where the pull waits for records."""
        self.topic = topic
        self.queue_id = queue_id
        self.position = position
        self.wait_ms = wait_ms

    @abstractmethod
    def find(self) -> Found:
        """Return the answer as of now, without waiting for the disk if the thread must not.

        Any thread calls it, but one at a time; again if the epoch history changed meanwhile.
        """
        ...

    def find_plain(self) -> Any:
        """Return a reply, if that needs nothing but records at hand; None: `find` must look.

        The API's thread calls it before it calls `find`, and must not wait for the disk.
        """
        return None

    @abstractmethod
    def respond(self, reply: Any) -> None:
        """Answer the client; called at most once, by the API's thread with its lock."""
        ...


Asked = Pull | OwnPull


@dataclass(slots=True, eq=False)
class Parked:
    """A pull that waits. `waits` and `ticket` say where, unless an event has taken it out.

    `is_due` from then on until it is answered or waits again: its turn comes, or its read waits for
    the disk. `is_over` once its wait has ended.
    """

    connection: Connection
    request: Asked
    deadline_ms: float
    waits: Waits | None = None
    ticket: int = 0
    deadline_ticket: int = 0
    is_due: bool = False
    is_over: bool = False


class Waits:
    """Parked pulls by a number, the smallest first. A wait that is taken out leaves a stale entry.

    Stale entries go when they come to the top, or all at once when they are the majority.
    """

    __slots__ = ("_entries", "_parked")
    _tickets = itertools.count(1)  # 0: none

    def __init__(self) -> None:
        self._entries: list[tuple[float, int]] = []  # number, ticket
        self._parked: dict[int, Parked] = {}  # by ticket

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._parked.values())

    def add(self, number: float, parked: Parked) -> int:
        """Add a wait; return its ticket for `remove`."""
        ticket = next(self._tickets)
        self._parked[ticket] = parked
        heapq.heappush(self._entries, (number, ticket))
        return ticket

    def remove(self, ticket: int) -> None:
        """Take a wait out; nothing happens if it is out."""
        self._parked.pop(ticket, None)
        if len(self._entries) > 2 * len(self._parked) + _STALE_MAX:
            self._entries = [entry for entry in self._entries if entry[1] in self._parked]
            heapq.heapify(self._entries)

    @property
    def first(self) -> float:
        """The smallest number; infinity without any wait."""
        entries = self._entries
        while entries and entries[0][1] not in self._parked:
            heapq.heappop(entries)
        return entries[0][0] if entries else NEVER

    def take(self, limit: float) -> list[Parked]:
        """Take out and return the waits whose number is at most `limit`, in their order."""
        found = []
        while self._parked and self.first <= limit:
            _, ticket = heapq.heappop(self._entries)
            found.append(self._parked.pop(ticket))
        return found


class ParkedPulls:
    """All parked pulls of the client API."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int], Waits] = {}  # by the position's queue offset
        self._offsets = Waits()  # by the offset that must become readable
        self._histories = Waits()
        self._deadlines = Waits()
        self._of_connection: dict[Connection, dict[Parked, None]] = {}
        self.next_offset = NEVER  # readable from here on: `readable` takes something out

    def __len__(self) -> int:
        return len(self._deadlines)

    @property
    def next_deadline_ms(self) -> float:
        """When the first wait ends; infinity if no pull is parked."""
        return self._deadlines.first

    def waits_in(self, topic: str, queue_id: int) -> bool:
        """Whether a pull waits for records in this queue."""
        return (topic, queue_id) in self._queues

    @property
    def needs_history(self) -> bool:
        """Whether a pull waits for another history."""
        return len(self._histories) > 0

    def add(self, parked: Parked, needs_offset: float | None) -> None:
        """Park a pull, or park it again after an event has taken it out.

        It waits until `needs_offset` is readable; None: until its queue has a record for it; NEVER:
        for another history.
        """
        parked.is_due = False
        if not parked.deadline_ticket:
            parked.deadline_ticket = self._deadlines.add(parked.deadline_ms, parked)
            self._of_connection.setdefault(parked.connection, {})[parked] = None
        if needs_offset is None:
            request = parked.request
            key = request.topic, request.queue_id
            parked.waits = self._queues.get(key)
            if parked.waits is None:
                parked.waits = self._queues[key] = Waits()
            parked.ticket = parked.waits.add(request.position.queue_offset, parked)
        elif needs_offset == NEVER:
            parked.waits = self._histories
            parked.ticket = self._histories.add(0, parked)
        else:
            parked.waits = self._offsets
            parked.ticket = self._offsets.add(needs_offset, parked)
            self.next_offset = self._offsets.first

    def end(self, parked: Parked) -> None:
        """Forget a pull, wherever it is."""
        self._take_out(parked)
        self._deadlines.remove(parked.deadline_ticket)
        own = self._of_connection[parked.connection]
        del own[parked]
        if not own:
            del self._of_connection[parked.connection]

    # -- events: each takes the pulls out that it concerns, and makes them due. The caller ends or
    #    adds each of them.

    def grown(self, topic: str, queue_id: int, end: float = NEVER) -> list[Parked]:
        """Take out the pulls of a queue whose position is below `end`, its next queue offset."""
        waits = self._queues.get((topic, queue_id))
        if waits is None:
            return []
        found = waits.take(end - 1)
        if not waits:
            del self._queues[topic, queue_id]
        return self._taken(found)

    def readable(self, offset: float = NEVER) -> list[Parked]:
        """Take out the pulls that waited until `offset`, or less, is readable."""
        if offset < self.next_offset:
            return []
        found = self._offsets.take(offset)
        self.next_offset = self._offsets.first
        return self._taken(found)

    def other_history(self) -> list[Parked]:
        """Take out the pulls that waited for another history."""
        return self._taken(self._histories.take(NEVER))

    def expired(self, now_ms: float) -> list[Parked]:
        """Take out the pulls whose wait has ended, without those that are due already."""
        over = self._deadlines.take(now_ms)
        for parked in over:
            parked.is_over = True
            self._take_out(parked)
        return self._taken([parked for parked in over if not parked.is_due])

    def of(self, connection: Connection) -> list[Parked]:
        """Return the pulls of a connection; nothing is taken out."""
        return list(self._of_connection.get(connection, ()))

    def _take_out(self, parked: Parked) -> None:
        waits, parked.waits = parked.waits, None
        if waits is None:
            return
        waits.remove(parked.ticket)
        if waits is self._offsets:
            self.next_offset = waits.first
        elif not waits and waits is not self._histories:
            del self._queues[parked.request.topic, parked.request.queue_id]

    @staticmethod
    def _taken(found: list[Parked]) -> list[Parked]:
        for parked in found:
            parked.waits = None
            parked.is_due = True
        return found
