"""QuorumAckChecker: which entries a majority has; PendingAppends: the puts that wait for it.

`peerWaterMarksByTerm` of DLedger: for each term that this node leads, each member's water mark, the
last entry that the member has durably and equal to the leader's. Sort them, take the middle: a
majority has that entry and all before it. It is committed only if it is of the current term. An
entry of an earlier term is committed together with a later one of this term, never by counting,
because a later leader may still replace it (figure 8 of the Raft paper).

The puts that wait are DLedger's `pendingAppendResponsesByTerm`. Each is settled exactly once:
COMMITTED; WAIT_QUORUM_ACK_TIMEOUT, when its time is over; or TERM_CHANGED, when this node stops
leading. After the last two the entries may still be committed.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hastore.dledger.core.events import Settled, Update
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import NO_INDEX


def quorum_index(water_marks: Iterable[int]) -> int:
    """Return the greatest index that a majority of the members has; one water mark for each."""
    ordered = sorted(water_marks, reverse=True)
    return ordered[len(ordered) // 2]


class QuorumAckChecker:
    """Counts what the members have, by term."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self.peer_water_marks_by_term: dict[int, dict[int, int]] = {}

    def start_term(self) -> None:
        """Begin to count for the current term; the counts of earlier terms are dropped."""
        self.peer_water_marks_by_term = {self._state.term: {}}

    def stop(self) -> None:
        """Drop all counts: this node does not lead any more."""
        self.peer_water_marks_by_term = {}

    @property
    def water_marks(self) -> Mapping[int, int]:
        """Each peer's water mark in the current term; a peer without an answer is not there."""
        return self.peer_water_marks_by_term.get(self._state.term, {})

    def report(self, peer: int, index: int) -> None:
        """Take a peer's answer to a push of this term; a water mark never falls."""
        marks = self.peer_water_marks_by_term[self._state.term]
        marks[peer] = max(index, marks.get(peer, NO_INDEX))

    def forget(self, peer: int) -> None:
        """Drop a peer's water mark: it is no member any more, or has lost its disk."""
        self.peer_water_marks_by_term.get(self._state.term, {}).pop(peer, None)

    def committable(self) -> int | None:
        """Return the index that may be committed now; None: nothing new."""
        state, marks = self._state, self.water_marks
        index = quorum_index(
            state.persisted_index if one == state.node else marks.get(one, NO_INDEX)
            for one in state.members
        )
        index = min(index, state.ledger_end_index)
        if index <= state.committed_index or state.log.term_at(index) != state.term:
            return None
        return index


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
