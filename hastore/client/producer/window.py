"""What a producer has promised to settle: entries, frames in flight, and the window over them.

Entries are settled in any order, but the window moves with the oldest that is not: the sequence
numbers in use never span more than the nodes remember, so a retry is always recognised as one.

    admit --> incoming --take--> order --release, once settled--> gone
              (any thread)       (whoever turns alone)

Each arrow is one step, so that a signal's exception between any two loses no entry.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import msgspec

from hastore.client.producer.futures import Outcome
from hastore.client.results import SendResult, Status
from hastore.errors import ClientError


class Entry(msgspec.Struct, eq=False):
    """One message, or one piece of a batch. `unknown`: an attempt may have stored it."""

    first_seq: int
    count: int
    topic: str
    payload: bytes
    future: Outcome
    is_batch: bool
    queued_ms: float
    expires_ms: float
    unknown: bool = False
    status: Status = Status.TIMEOUT  # what was heard last; TIMEOUT: nothing yet
    reason: str = ""
    result: SendResult | None = None  # of an attempt that was stored, not confirmed

    @property
    def settled(self) -> bool:
        """Whether its Future has ended: there is no second word for it that could disagree."""
        return self.future.done()


class Frame(msgspec.Struct, eq=False):
    """One Put on its way."""

    rid: int
    address: str
    entries: list[Entry]
    count: int  # of records
    sent_ms: float


class Window:
    """Bound the span of unsettled sequence numbers.

    Callers number and admit entries, holding `lock`; whoever turns takes them and releases what is
    settled, and needs no lock for it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = threading.Lock()
        self.incoming: deque[Entry] = deque()
        self._order: deque[Entry] = deque()
        self.next_seq = 0
        self.base_seq = 0  # at most the oldest number that is not settled
        self.closed = False
        self.why_closed = "the producer is closed"

    def has_room(self, count: int) -> bool:
        """Whether `count` more numbers fit, the lock held; ClientError once closed."""
        self.check()
        if self.next_seq + count - self.base_seq <= self.limit:
            return True
        if self._is_empty():
            self.base_seq = self.next_seq  # an `admit` was cut off: its numbers are nobody's
        return self.next_seq + count - self.base_seq <= self.limit

    def admit(self, entry: Entry) -> None:
        """Take up an entry, the lock held; its numbers are used from now on."""
        self.next_seq = entry.first_seq + entry.count  # first: no number is ever used twice
        self.incoming.append(entry)

    def has_settled(self, seq: int) -> bool:
        """Whether every number below `seq` is settled; takes the lock when that may be."""
        if self.base_seq >= seq:
            return True
        if self._order:
            return False
        with self.lock:
            return self._is_empty()

    def take(self) -> list[Entry]:
        """Return what came in since; only whoever turns calls this and all below."""
        taken: list[Entry] = []
        incoming, order = self.incoming, self._order
        while incoming:
            entry = incoming[0]
            if not order or order[-1] is not entry:  # else the last call was cut off here
                order.append(entry)
            taken.append(entry)
            incoming.popleft()
        return taken

    @property
    def is_settled(self) -> bool:
        """Whether all that was taken is settled and released."""
        return not self._order

    def release(self) -> None:
        """Move on past what has been settled."""
        order = self._order
        if not order:
            return
        last = None
        while order and order[0].future.done():
            last = order.popleft()
        if order:
            self.base_seq = order[0].first_seq
        elif last is not None:
            self.base_seq = last.first_seq + last.count

    def oldest(self) -> Entry | None:
        """Return the entry that has waited longest, up to the last `release`."""
        return self._order[0] if self._order else None

    def expired(self, now_ms: float) -> list[Entry]:
        """Return the unsettled entries whose time is up."""
        oldest = self.oldest()
        if oldest is None or oldest.expires_ms > now_ms:
            return []
        return [e for e in self._order if not e.settled and e.expires_ms <= now_ms]

    def entries(self) -> list[Entry]:
        """Return all that was not released, by sequence number; in a finalizer too."""
        incoming = tuple(self.incoming)  # first: an entry on its way is in both, never in none
        return list(dict.fromkeys((*self._order, *incoming)))

    def check(self) -> None:
        """Raise ClientError once closed."""
        if self.closed:
            raise ClientError(self.why_closed)

    def close(self, why: str | None = None) -> None:
        """Let nobody in any more; `why` is what they are told, unless it is closed already."""
        with self.lock:
            if why is not None and not self.closed:
                self.why_closed = why
            self.closed = True

    def _is_empty(self) -> bool:
        """Whether nothing is under way, the lock held."""
        return not self.incoming and not self._order  # in this order: see `take`


def in_order(entries: Iterable[Entry]) -> deque[Entry]:
    """Return the entries that are not settled, by sequence number."""
    return deque(sorted((e for e in entries if not e.settled), key=lambda e: e.first_seq))
