"""Leadership transfer: by the operator, to the preferred leader, or away from a full disk.

The leader refuses puts (LEADER_TRANSFERRING) until the transferee has every entry, then sends it
TakeLeadership. The transferee starts an election without a pre-vote; members vote for it although
they hear the old leader. If that takes longer than transfer_timeout_ms, or the
transferee says that its disk is full, the leader goes on.
"""

from dataclasses import dataclass

from hastore.dledger.core.dispatcher import EntryDispatcher
from hastore.dledger.core.events import Settings, Settled, Update
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import TakeLeadership

AGAIN_AFTER_MS = 10_000  # after a transfer that the core began by itself and that failed


@dataclass(slots=True)
class RunningTransfer:
    """A transfer under way. `term` is the term that the leader gives up."""

    to: int
    term: int
    token: object | None
    deadline_ms: float
    sent: bool = False


class LeadershipTransfer:
    """The transfers of one node, one at a time."""

    def __init__(self, state: MemberState, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.running: RunningTransfer | None = None
        self._not_before_ms = 0.0

    def refusal(self, to: int, follower: EntryDispatcher | None, now_ms: float) -> str | None:
        """Return why leadership cannot go to `to` now; None: it can."""
        state = self._state
        if to == state.node:
            return f"node {to} leads already"
        if follower is None or to not in state.members:
            return f"node {to} is no member of the group: {_names(state.members)}"
        if self.running is not None:
            return f"a transfer to node {self.running.to} is under way"
        if to in state.down:
            return f"there is no link to node {to}"
        if now_ms - follower.heard_ms > self._settings.election_timeout_ms:
            return f"node {to} does not answer"
        if follower.full:
            return f"the disk of node {to} is full"
        if follower.recall_index is not None:
            return f"node {to} has lost its disk and is still catching up"
        if not follower.is_sending() or follower.match_index < 0:
            return f"the log of node {to} is not yet compared with this one; try again"
        gap = state.ledger_end_index - follower.match_index
        if gap > self._settings.transfer_gap:
            return f"node {to} lacks {gap} entries; the most is {self._settings.transfer_gap}"
        return None

    def begin(self, to: int, token: object | None, now_ms: float) -> None:
        """Begin a transfer that nothing refuses."""
        deadline_ms = now_ms + self._settings.transfer_timeout_ms
        self.running = RunningTransfer(to, self._state.term, token, deadline_ms)

    def move(self, now_ms: float, followers: dict[int, EntryDispatcher], update: Update) -> None:
        """Tell the transferee when it has everything; begin what this node wants by itself."""
        if self.running is None and now_ms >= self._not_before_ms:
            self._begin_by_itself(now_ms, followers)
        running = self.running
        if running is None:
            return
        follower = followers.get(running.to)
        if follower is None or now_ms >= running.deadline_ms:
            self._give_up(now_ms, f"node {running.to} has not taken over in time", update)
        elif follower.full:
            self._give_up(now_ms, f"the disk of node {running.to} is full", update)
        elif not running.sent:
            if follower.match_index == self._state.ledger_end_index:
                running.sent = True
                update.messages.append((running.to, TakeLeadership(self._state.term)))

    def _begin_by_itself(self, now_ms: float, followers: dict[int, EntryDispatcher]) -> None:
        state, preferred = self._state, self._settings.preferred_leader
        if state.disk_full:
            able = [one for one in followers if self.refusal(one, followers[one], now_ms) is None]
            if able:
                self.begin(max(able, key=lambda one: followers[one].match_index), None, now_ms)
        elif preferred is not None and preferred != state.node and preferred in followers:
            if self.refusal(preferred, followers[preferred], now_ms) is None:
                self.begin(preferred, None, now_ms)

    def _give_up(self, now_ms: float, reason: str, update: Update) -> None:
        running = self.running
        assert running is not None
        self.running = None
        self._not_before_ms = now_ms + AGAIN_AFTER_MS
        if running.token is not None:
            update.settled.append(Settled(running.token, "WAIT_QUORUM_ACK_TIMEOUT", reason=reason))

    def stopped_leading(self, now_ms: float) -> None:
        """This node does not lead any more; the outcome shows with the next leader."""
        if self.running is not None and self.running.token is None:
            self.running = None
        self._not_before_ms = now_ms

    def settle(self, now_ms: float, update: Update) -> None:
        """Settle a transfer of a former leader when a later leader is known, or it is late."""
        running, state = self.running, self._state
        if running is None or (state.is_leader and state.term == running.term):
            return
        if state.leader is not None and state.term > running.term:
            done = state.leader == running.to
            outcome = "COMMITTED" if done else "TERM_CHANGED"
            reason = "" if done else f"node {state.leader} leads term {state.term}"
            update.settled.append(Settled(running.token, outcome, reason=reason))
            self.running = None
        elif now_ms >= running.deadline_ms:
            self._give_up(now_ms, f"node {running.to} has not taken over in time", update)

    def deadline_ms(self) -> float | None:
        """Return when a running transfer is late."""
        return self.running.deadline_ms if self.running is not None else None


def _names(members: tuple[int, ...]) -> str:
    return ", ".join(str(one) for one in members)
