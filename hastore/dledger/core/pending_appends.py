"""Puts that wait for a majority: DLedger's pendingAppendResponsesByTerm.

Each put is settled exactly once: COMMITTED; WAIT_QUORUM_ACK_TIMEOUT, when its time is over; or
TERM_CHANGED, when this node stops leading. After the last two the entries may still be committed.
"""

from collections import deque
from dataclasses import dataclass

from hastore.dledger.core.events import Settled, Update


@dataclass(frozen=True, slots=True)
class PendingAppend:
    """A put of `count` entries that ends at `index`."""

    index: int
    count: int
    token: object
    deadline_ms: float


class PendingAppends:
    """The puts of the current term that wait, in the order of their indexes and deadlines."""

    def __init__(self, timeout_ms: float) -> None:
        self._timeout_ms = timeout_ms
        self.pending_append_responses_by_term: dict[int, deque[PendingAppend]] = {}
        self.entries = 0  # of all puts that wait

    def add(self, term: int, index: int, count: int, token: object, now_ms: float) -> None:
        """Let a put wait."""
        waiting = self.pending_append_responses_by_term.setdefault(term, deque())
        waiting.append(PendingAppend(index, count, token, now_ms + self._timeout_ms))
        self.entries += count

    def settle_committed(self, committed_index: int, update: Update) -> None:
        """Settle the puts that are committed. Only entries of the leader's own term wait here."""
        for waiting in self.pending_append_responses_by_term.values():
            while waiting and waiting[0].index <= committed_index:
                self._settle(waiting.popleft(), "COMMITTED", update)

    def settle_late(self, now_ms: float, update: Update) -> None:
        """Settle the puts whose time is over."""
        for waiting in self.pending_append_responses_by_term.values():
            while waiting and waiting[0].deadline_ms <= now_ms:
                self._settle(waiting.popleft(), "WAIT_QUORUM_ACK_TIMEOUT", update)

    def settle_all(self, update: Update) -> None:
        """Settle every put, as this node does not lead its term any more."""
        for waiting in self.pending_append_responses_by_term.values():
            while waiting:
                self._settle(waiting.popleft(), "TERM_CHANGED", update)
        self.pending_append_responses_by_term = {}

    def deadline_ms(self) -> float | None:
        """Return when the next put's time is over."""
        puts = self.pending_append_responses_by_term.values()
        return min((one[0].deadline_ms for one in puts if one), default=None)

    def _settle(self, put: PendingAppend, outcome: str, update: Update) -> None:
        self.entries -= put.count
        update.settled.append(Settled(put.token, outcome, put.index))
