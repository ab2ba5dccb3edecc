"""Heart beats in rounds, and the linearizable reads that wait for a round.

A read is answered with the committed index of its arrival once a majority has answered a round of
heart beats that began after it: until then no later leader was elected, so nothing newer was
committed elsewhere. Reads that arrive during a round share the next one. A new leader knows what is
committed only after its first entry is committed; reads wait for that. No clock is trusted.
"""

from dataclasses import dataclass

from hastore.dledger.core.events import Settled, Update
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import HeartBeatRequest


@dataclass(slots=True)
class WaitingRead:
    """A read. `index` and `round` are set when a round for it begins."""

    token: object
    deadline_ms: float
    index: int = -1
    round: int | None = None


class ReadRounds:
    """The rounds of heart beats of a leader."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self.round = 0
        self.answered: dict[int, int] = {}  # peer -> the last round that it answered
        self.waiting: list[WaitingRead] = []

    def beat(self, update: Update) -> None:
        """Begin a round: send a heart beat to every peer."""
        state = self._state
        self.round += 1
        request = HeartBeatRequest(state.term, self.round, state.committed_index)
        update.messages += [(peer, request) for peer in state.peers if peer not in state.down]

    def begin(self, update: Update) -> None:
        """Begin a round for the reads that wait, unless one of them is under way."""
        state = self._state
        ready = state.log.term_at(state.committed_index) == state.term
        new = [one for one in self.waiting if one.round is None]
        if not new or not ready or len(new) < len(self.waiting):
            return
        self.beat(update)
        self._join(new)

    def join_beat(self) -> None:
        """Let the reads that wait count the round that has just begun."""
        state = self._state
        if state.log.term_at(state.committed_index) == state.term:
            self._join([one for one in self.waiting if one.round is None])

    def _join(self, reads: list[WaitingRead]) -> None:
        for read in reads:
            read.round, read.index = self.round, self._state.committed_index

    def answer(self, peer: int, round_: int) -> None:
        """Count a peer's answer to a round."""
        if 0 < round_ <= self.round:
            self.answered[peer] = max(round_, self.answered.get(peer, 0))

    def settle(self, update: Update) -> None:
        """Settle the reads whose round a majority has answered."""
        if not self.waiting:
            return
        state = self._state
        rounds = sorted(
            (self.round if one == state.node else self.answered.get(one, 0))
            for one in state.members
        )
        reached = rounds[(len(rounds) - 1) // 2]
        waiting = []
        for one in self.waiting:
            if one.round is not None and one.round <= reached:
                update.settled.append(Settled(one.token, "COMMITTED", one.index))
            else:
                waiting.append(one)
        self.waiting = waiting

    def settle_late(self, now_ms: float, update: Update) -> None:
        """Settle the reads whose time is over."""
        late = [one for one in self.waiting if one.deadline_ms <= now_ms]
        if late:
            self.waiting = [one for one in self.waiting if one.deadline_ms > now_ms]
            update.settled += [Settled(one.token, "WAIT_QUORUM_ACK_TIMEOUT") for one in late]

    def stop(self, update: Update) -> None:
        """Settle every read, as this node does not lead any more."""
        update.settled += [Settled(one.token, "TERM_CHANGED") for one in self.waiting]
        self.waiting = []
        self.answered = {}
