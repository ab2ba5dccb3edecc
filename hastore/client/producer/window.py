"""The unsettled messages of a producer: entries, frames in flight, and the window over them.

Entries are settled in any order. The window starts at the oldest unsettled entry, and its size is
at most that of a node's deduplication window. So a node always recognises a retry.

    admit --> incoming --take_admitted--> order --release, once settled--> gone
              (any thread)       (only the driver)

Each arrow is one step: an exception from a signal handler between two steps loses no entry.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from hastore.client.messages import SendResult, Status
from hastore.client.producer.futures import Outcome
from hastore.errors import ClientError

NOT_SENT = (
    "the delivery timeout was over before the message could be sent: as many earlier ones as "
    "`max_in_flight` allows were unsettled, or the program kept the producer from running"
)
INSIDE = (
    "a finalizer (`__del__`), a signal handler, or what else runs in the middle of a call of this "
    "producer, must not use it"
)


def owner_check(lock: threading.RLock) -> Callable[[], bool]:
    """Return a function that says whether the calling thread holds the lock.

    threading.Condition asks its lock in the same way; there is no public name for it.
    """
    found: Callable[[], bool] = lock._is_owned  # type: ignore[attr-defined]
    return found


class Half(NamedTuple):
    """How a half message is encoded for another queue, which is one of its properties."""

    queue: int
    encode: Callable[[int], bytes]


class Entry(msgspec.Struct, eq=False):
    """One message, or one part of a batch.

    `may_move`: another group may get it if this one does not take it. `unknown`: an attempt may
    have stored it.
    """

    first_seq: int
    count: int
    topic: str
    payload: bytes
    future: Outcome
    is_batch: bool
    queued_ms: float
    expires_ms: float
    may_move: bool = False
    chosen: bool = False  # this client has chosen its queue, by `key` or in turn; not of a batch
    key: str | None = None
    # Of a batch whose queues were guessed: by place, whether the queue was chosen, and the key.
    guesses: tuple[tuple[bool, str | None], ...] = ()
    half: Half | None = None  # of a half message
    unknown: bool = False
    final: bool = False  # refused for good, as the group is configured
    status: Status = Status.TIMEOUT  # of the last answer; TIMEOUT also if none has come yet
    reason: str = ""
    result: SendResult | None = None  # of an attempt that stored it without confirmation
    doubted_epoch: int | None = None  # of a master that did so, and was replaced since

    @property
    def settled(self) -> bool:
        """Whether its Future has ended. A flag of its own could disagree with the Future."""
        return self.future.done()


class Frame(msgspec.Struct, eq=False):
    """One Put request in flight."""

    rid: int
    address: str
    entries: list[Entry]
    count: int  # of records
    sent_ms: float  # or when it was last seen to leave, over a slow link
    end_bytes: int = 0  # `Transport.sent_bytes` with it


class Window:
    """Bound the span of unsettled sequence numbers.

    Callers number and admit entries while they hold `lock`. The driver takes them and releases the
    settled ones without the lock. `is_owned` says whether the calling thread holds it: then this is
    a finalizer, or what else runs in the middle of a call, and must not number its own.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = threading.RLock()
        self.is_owned = owner_check(self.lock)
        self.incoming: deque[Entry] = deque()
        self._order: deque[Entry] = deque()
        self._latest_ms = 0.0  # when the last of the entries taken so far expires
        # Those that expire before an earlier one: their threads have waited longer for room.
        self._hasty: list[tuple[float, int, Entry]] = []  # a heap
        self.next_seq = 0
        self.base_seq = 0  # at most the oldest unsettled number
        self.closed = False
        self.why_closed = "the producer is closed"

    def has_room(self, count: int) -> bool:
        """Whether `count` more numbers fit; the caller holds the lock.

        Raises ClientError once the window is closed.
        """
        self.check_open()
        if self.next_seq + count - self.base_seq <= self.limit:
            return True
        if self._is_empty():
            self.base_seq = self.next_seq  # an interrupted `admit` left numbers without entries
        return self.next_seq + count - self.base_seq <= self.limit

    def admit(self, entry: Entry) -> None:
        """Add an entry and use up its numbers; the caller holds the lock."""
        self.next_seq = entry.first_seq + entry.count  # first, so that no number is used twice
        self.incoming.append(entry)

    def has_settled(self, seq: int) -> bool:
        """Whether every number below `seq` is settled; may take the lock."""
        if self.base_seq >= seq:
            return True
        if self._order:
            return False
        with self.lock:
            return self._is_empty()

    def take_admitted(self) -> list[Entry]:
        """Return the entries admitted since the last call; only the driver calls this."""
        taken: list[Entry] = []
        incoming, order = self.incoming, self._order
        while incoming:
            entry = incoming[0]
            if not order or order[-1] is not entry:  # an interrupted call may have added it
                expires_ms = entry.expires_ms
                if expires_ms < self._latest_ms:
                    heappush(self._hasty, (expires_ms, entry.first_seq, entry))
                else:
                    self._latest_ms = expires_ms
                order.append(entry)
            taken.append(entry)
            incoming.popleft()
        return taken

    @property
    def is_settled(self) -> bool:
        """Whether all entries taken so far are settled and released."""
        return not self._order

    def release(self) -> None:
        """Drop the oldest entries, up to the first unsettled one."""
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

    def expires_ms(self) -> float | None:
        """Return a time before which no unsettled entry expires; None if all are released."""
        if not self._order:
            return None
        hasty = self._hasty
        while hasty and hasty[0][2].settled:
            heappop(hasty)
        first_ms = self._order[0].expires_ms
        return min(first_ms, hasty[0][0]) if hasty else first_ms

    def expired(self, now_ms: float) -> list[Entry]:
        """Return the unsettled entries whose delivery timeout is over."""
        next_ms = self.expires_ms()
        if next_ms is None or next_ms > now_ms:
            return []
        return [e for e in self._order if not e.settled and e.expires_ms <= now_ms]

    def entries(self) -> list[Entry]:
        """Return all entries not yet released, by sequence number; a finalizer may call this."""
        # `incoming` is read before `_order`, because `take_admitted` adds an entry to `_order`
        # before it removes the entry from `incoming`.
        incoming = tuple(self.incoming)
        return list(dict.fromkeys((*self._order, *incoming)))

    def refuse_owner(self) -> None:
        """Raise ClientError in what runs in the middle of a call that holds the lock."""
        if self.is_owned():
            raise ClientError(INSIDE)

    def check_open(self) -> None:
        """Raise ClientError once closed."""
        if self.closed:
            raise ClientError(self.why_closed)

    def close(self, why: str | None = None) -> None:
        """Admit nothing any more. `why`: the text of later errors, if this is the first close."""
        with self.lock:
            if why is not None and not self.closed:
                self.why_closed = why
            self.closed = True

    def _is_empty(self) -> bool:
        """Whether there is no entry; the caller holds the lock."""
        # `incoming` is read before `_order`, because `take_admitted` adds an entry to `_order`
        # before it removes the entry from `incoming`.
        return not self.incoming and not self._order


def in_order(entries: Iterable[Entry]) -> deque[Entry]:
    """Return the unsettled entries by sequence number."""
    return deque(sorted((e for e in entries if not e.settled), key=lambda e: e.first_seq))
