"""What a producer has promised to settle: entries, frames in flight, and the window over them.

Entries are settled in any order, but the window moves with the oldest that is not: the sequence
numbers in use never span more than the nodes remember, so a retry is always recognised as one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hastore.client.futures import SendFuture
from hastore.client.results import SendResult, Status
from hastore.errors import ClientError


@dataclass(frozen=True, slots=True)
class SendOptions:
    """How a producer sends; times in ms."""

    acks: int | None
    sync_flush: bool
    linger_ms: float
    batch_bytes: int
    delivery_timeout_ms: float
    idempotent: bool


@dataclass(slots=True, eq=False)
class Entry:
    """One message, or one piece of a batch. `unknown`: an attempt may have stored it."""

    first_seq: int
    count: int
    topic: str
    payload: bytes
    future: SendFuture[Any]
    is_batch: bool
    queued_ms: float
    expires_ms: float
    settled: bool = False
    unknown: bool = False
    status: Status = Status.TIMEOUT  # what was heard last; TIMEOUT: nothing yet
    reason: str = ""
    result: SendResult | None = None  # of an attempt that was stored, not confirmed


@dataclass(slots=True, eq=False)
class Frame:
    """One Put on its way."""

    rid: int
    address: str
    entries: list[Entry]
    count: int  # of records
    sent_ms: float


class Window:
    """Bound the span of unsettled sequence numbers; shared by callers and the sending thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lock = threading.Lock()
        self._room = threading.Condition(self.lock)
        self._order: deque[Entry] = deque()
        self._waiting = 0
        self.next_seq = 0
        self.base_seq = 0  # the oldest number that is not settled; the next one when all are
        self.closed = False

    def wait_room(self, count: int) -> int:
        """Wait, the lock held, until `count` more numbers fit; return the first of them.

        ClientError once closed.
        """
        if self.next_seq + count - self.base_seq > self.limit:
            self._waiting += 1  # before the look that counts: `release` moves on, then looks here
            try:
                while self.next_seq + count - self.base_seq > self.limit and not self.closed:
                    self._room.wait()
            finally:
                self._waiting -= 1
        if self.closed:
            raise ClientError("the producer is closed")
        return self.next_seq

    def admit(self, entry: Entry) -> None:
        """Take up an entry, the lock held; its numbers are used from now on."""
        self._order.append(entry)
        self.next_seq += entry.count

    def release(self) -> None:
        """Move on past what has been settled; only whoever turns the wheel calls this.

        It takes the lock, which every send needs, only when it must: nobody else pops.
        """
        order = self._order
        while order and order[0].settled:
            order.popleft()
        if order:
            self.base_seq = order[0].first_seq
        else:
            with self.lock:
                self.base_seq = order[0].first_seq if order else self.next_seq
        if self._waiting:
            with self.lock:
                self._room.notify_all()

    def wait_settled(self, seq: int, timeout_s: float | None) -> bool:
        """Wait until every number below `seq` is settled; False when the time is up first."""
        with self.lock:
            self._waiting += 1
            try:
                return self._room.wait_for(lambda: self.base_seq >= seq, timeout_s)
            finally:
                self._waiting -= 1

    def oldest(self) -> Entry | None:
        """Return the entry that has waited longest, up to the last `release`; takes no lock."""
        try:
            return self._order[0]
        except IndexError:
            return None

    def expired(self, now_ms: float) -> list[Entry]:
        """Return the unsettled entries whose time is up."""
        oldest = self.oldest()
        if oldest is None or oldest.expires_ms > now_ms:
            return []
        with self.lock:
            return [e for e in self._order if not e.settled and e.expires_ms <= now_ms]

    def unsettled(self) -> list[Entry]:
        """Return what has not ended, by sequence number, the lock held."""
        return [entry for entry in self._order if not entry.settled]

    def close(self) -> list[Entry]:
        """Let nobody in any more; return what is unsettled."""
        with self.lock:
            self.closed = True
            self._room.notify_all()
            return [entry for entry in self._order if not entry.settled]


def in_order(entries: Iterable[Entry]) -> deque[Entry]:
    """Return the entries that are not settled, by sequence number."""
    return deque(sorted((e for e in entries if not e.settled), key=lambda e: e.first_seq))
