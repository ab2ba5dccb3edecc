"""Who leads: LeaderElector, by votes; LeadershipTransfer, by order of the leader.

A node that has not heard of a leader for one to two election timeouts asks the members whether they
would vote for it (pre-vote). Only if a majority would does it raise its term, by one, vote for
itself, and ask for votes. So a node that was cut off raises no term, and a member that still hears
its leader refuses (REJECT_ALREADY_HAS_LEADER). A vote is in the hard state of the update that
carries it. A node that has lost its disk neither asks nor votes. A node whose replay has stopped
could take no puts as leader, so it asks BLOCKED_PATIENCE election timeouts later than the others:
only if none of them can win, as when it alone has what is committed. It then hands over to one that
can serve, once that has everything. A node whose syncs hang could not save a vote: it neither asks
nor votes until they return.

A transfer is begun by the operator, to the preferred leader, or away from a node whose disk is
full, whose replay has stopped, or whose syncs hang. The leader refuses puts (LEADER_TRANSFERRING)
until the transferee has every entry, then sends it TakeLeadership. The transferee starts an
election without a pre-vote; members vote for it although they hear the old leader. If that takes
longer than transfer_timeout_ms, or the transferee says that it cannot serve, the leader goes on.

The preferred leader is what each node has in its configuration, and they may contradict each other.
So a leader stays for TENURE election timeouts before it hands over to the preferred one, twice as
long each time that it soon leads again, up to TENURE_MOST; and it does not hand over to a node that
says that it prefers another one itself.
"""

from dataclasses import dataclass
from typing import Protocol

from hastore.dledger.core.dispatcher import EntryDispatcher
from hastore.dledger.core.events import Role, Settings, Settled, Update, listed
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import (
    NO_NODE,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
    VoteResult,
)

BLOCKED_PATIENCE = 2  # election timeouts


class Randomness(Protocol):
    """What the core needs of random.Random."""

    def uniform(self, a: float, b: float) -> float:
        """Return a number between `a` and `b`."""
        ...


class LeaderElector:
    """The votes of one node, given and asked for."""

    def __init__(self, state: MemberState, settings: Settings, random: Randomness) -> None:
        self._state = state
        self._settings = settings
        self._random = random
        self.deadline_ms = 0.0  # when this node asks for votes, unless it hears of a leader
        self.heard_leader_ms: float | None = None  # None: nothing, or the leader's link was lost
        self.pre: bool | None = None  # what a candidate asks for now; None: not a candidate
        self.transfer = False
        self.accepted: set[int] = set()
        self._had_grace = False  # since a leader was heard

    def wait(self, now_ms: float) -> None:
        """Wait one to two election timeouts before this node asks for votes."""
        self.deadline_ms = self._after(now_ms, 1, 2)

    def _after(self, now_ms: float, least: float, most: float) -> float:
        """Return a time after so many election timeouts, later if replay has stopped."""
        timeouts = self._random.uniform(least, most)
        if self._state.blocked:
            timeouts += BLOCKED_PATIENCE
        return now_ms + self._settings.election_timeout_ms * timeouts

    def heard_leader(self, now_ms: float) -> None:
        """Take note of a valid message of the leader."""
        self.heard_leader_ms = now_ms
        self.pre = None
        self._had_grace = False
        self.wait(now_ms)

    def grant_grace(self, until_ms: float) -> None:
        """Ask no earlier than `until_ms`, once: this process paused, the leader may not have."""
        if not self._had_grace:
            self._had_grace = True
            self.deadline_ms = max(self.deadline_ms, until_ms)

    def lost_leader(self, now_ms: float) -> None:
        """Ask soon: the link to the leader has ended, which mostly means that its process has."""
        self.heard_leader_ms = None
        self.deadline_ms = min(self.deadline_ms, self._after(now_ms, 0.1, 0.5))

    def may_campaign(self) -> bool:
        """Whether this node may become leader: a member that remembers, with room on its disk.

        A node that was removed does not ask, though its own list, which is old, has it.

        A learner is none.

        A list without this node that is not committed leaves it a member: perhaps only it has the
        list, and nobody else can win.
        """
        state = self._state
        member = state.node in state.members or state.node in state.committed_members
        able = state.remembers and not state.disk_full and not state.hangs
        return member and able and state.removed is None

    def campaign(self, now_ms: float, update: Update, *, pre: bool, transfer: bool = False) -> bool:
        """Ask for votes, or with `pre` whether they would be given. Returns whether this node won.

        Only a group of one wins at once.
        """
        state = self._state
        self.pre, self.transfer = pre, transfer
        self.heard_leader_ms = None
        if not pre:
            state.adopt_term(state.term + 1, update)
            state.vote(state.node, update)
        state.become(Role.CANDIDATE, None, update)
        self.wait(now_ms)
        self.accepted = {state.node}
        for peer in state.peers:
            self.ask(peer, update)
        return self._has_majority()

    def _has_majority(self) -> bool:
        return len(self.accepted.intersection(self._state.members)) >= self._state.quorum

    def ask(self, peer: int, update: Update) -> None:
        """Send this candidate's request to a peer, again if its link was opened anew."""
        state = self._state
        if self.pre is not None and peer not in state.down and peer not in self.accepted:
            term = state.term + 1 if self.pre else state.term
            end = state.ledger_end_index
            request = VoteRequest(term, self.pre, end, state.ledger_end_term, self.transfer)
            update.messages.append((peer, request))

    def count(self, peer: int, response: VoteResponse) -> bool:
        """Count an answer to this candidate's request. Returns whether a majority accepts now."""
        state = self._state
        asked = state.term + 1 if self.pre else state.term
        if self.pre is None or response.pre != self.pre or response.request_term != asked:
            return False
        if response.result is not VoteResult.ACCEPT or peer not in state.members:
            return False
        self.accepted.add(peer)
        return self._has_majority()

    # -- the voter ---------------------------------------------------------------------------------

    def hears_leader(self, now_ms: float) -> bool:
        """Whether a leader was heard within the last election timeout."""
        heard = self.heard_leader_ms
        return heard is not None and now_ms - heard < self._settings.election_timeout_ms

    def judge_vote(self, candidate: int, request: VoteRequest) -> VoteResult:
        """Decide on a request, after the lease of a leader and after the request's term counts."""
        state = self._state
        if request.term < state.term:
            return VoteResult.REJECT_EXPIRED_VOTE_TERM
        if not state.remembers:
            return VoteResult.REJECT_FORGOTTEN
        if request.term == state.term:
            if state.leader is not None and state.leader != candidate:
                return VoteResult.REJECT_ALREADY_HAS_LEADER
            if state.voted_for not in (None, candidate):
                return VoteResult.REJECT_ALREADY_VOTED
        behind = (request.ledger_end_term, request.ledger_end_index) < (
            state.ledger_end_term,
            state.ledger_end_index,
        )
        if behind and candidate not in state.members:
            return VoteResult.REJECT_UNKNOWN_LEADER
        if request.ledger_end_term < state.ledger_end_term:
            return VoteResult.REJECT_EXPIRED_LEDGER_TERM
        if behind:
            return VoteResult.REJECT_SMALL_LEDGER_END_INDEX
        return VoteResult.ACCEPT


TENURE, TENURE_MOST = 4, 240  # election timeouts
SOON = 4  # times the tenure
AGAIN_AFTER_MS = 10_000  # after a transfer that the core began by itself and that failed


@dataclass(slots=True)
class RunningTransfer:
    """A transfer under way. `term` is the term that the leader gives up."""

    to: int
    term: int
    token: object | None
    deadline_ms: float
    sent: bool = False
    preferred: bool = False  # the leader has begun it by itself, for its preferred leader


class LeadershipTransfer:
    """The transfers of one node, one at a time."""

    def __init__(self, state: MemberState, settings: Settings) -> None:
        self._state = state
        self._settings = settings
        self.running: RunningTransfer | None = None
        self._failed_ms = float("-inf")  # when a transfer last failed, as this leader
        self._failed: int | None = None  # the last transferee that did not take over
        self._tenure_ms = 0.0
        self._stays_until_ms = 0.0
        self._gave_way_ms = float("-inf")  # when the preferred leader last took over from this one

    def refusal(self, to: int, follower: EntryDispatcher | None, now_ms: float) -> str | None:
        """Return why leadership cannot go to `to` now; None: it can."""
        state = self._state
        if to == state.node:
            return f"node {to} leads already"
        if to in state.learners:
            return f"node {to} is a learner: it becomes a member when it keeps up"
        if follower is None or to not in state.members:
            return f"node {to} is no member of the group: {listed(state.members)}"
        if self.running is not None:
            return f"a transfer to node {self.running.to} is under way"
        if to in state.down:
            return f"there is no link to node {to}"
        if now_ms - follower.heard_ms > self._settings.election_timeout_ms:
            return f"node {to} does not answer"
        if follower.full:
            return f"the disk of node {to} is full"
        if not follower.able:
            return (
                f"node {to} could not take puts: its replay has stopped, or its disk hangs, see its"
                " `problems`"
            )
        if follower.recall_index is not None:
            return f"node {to} has lost its disk and is still catching up"
        if follower.is_silent(now_ms):  # puts would be refused meanwhile, in vain
            return f"node {to} takes nothing of what it lacks: look at its disk"
        if not follower.is_sending() or follower.match_index < 0:
            return f"the log of node {to} is not yet compared with this one; try again"
        gap = state.ledger_end_index - follower.match_index
        if gap > self._settings.transfer_gap:
            return f"node {to} lacks {gap} entries; the most is {self._settings.transfer_gap}"
        return None

    def takes_office(self, now_ms: float) -> None:
        """This node begins to lead; see how long it stays if it prefers another leader."""
        self.stopped_leading(now_ms)
        election_ms = self._settings.election_timeout_ms
        if now_ms < self._gave_way_ms + SOON * self._tenure_ms:
            self._tenure_ms = min(2 * self._tenure_ms, TENURE_MOST * election_ms)
        else:
            self._tenure_ms = TENURE * election_ms
        self._stays_until_ms = now_ms + self._tenure_ms

    def begin(
        self, to: int, token: object | None, now_ms: float, *, preferred: bool = False
    ) -> None:
        """Begin a transfer that nothing refuses."""
        deadline_ms = now_ms + self._settings.transfer_timeout_ms
        self.running = RunningTransfer(
            to, self._state.term, token, deadline_ms, preferred=preferred
        )

    def move(self, now_ms: float, followers: dict[int, EntryDispatcher], update: Update) -> None:
        """Tell the transferee when it has everything; begin what this node wants by itself."""
        if self.running is None:
            self._begin_by_itself(now_ms, followers)
        running = self.running
        if running is None:
            return
        follower = followers.get(running.to)
        if follower is None or now_ms >= running.deadline_ms:
            self._give_up(now_ms, f"node {running.to} has not taken over in time", update)
        elif follower.full:
            self._give_up(now_ms, f"the disk of node {running.to} is full", update)
        elif not follower.able:
            why = f"the replay of node {running.to} has stopped, or its disk hangs"
            self._give_up(now_ms, why, update)
        elif not running.sent:
            if follower.match_index == self._state.ledger_end_index:
                running.sent = True
                update.messages.append((running.to, TakeLeadership(self._state.term)))

    def _begin_by_itself(self, now_ms: float, followers: dict[int, EntryDispatcher]) -> None:
        state, preferred = self._state, self._settings.preferred_leader
        unable = state.disk_full or not state.able
        # A leader that cannot serve has little to lose by another attempt.
        pause_ms = self._settings.transfer_timeout_ms if unable else AGAIN_AFTER_MS
        if now_ms < self._failed_ms + pause_ms:
            return
        if state.hangs and not self._goes_on_without_this(followers, now_ms):
            return
        if unable:
            able = [one for one in followers if self.refusal(one, followers[one], now_ms) is None]
            if able:  # not the same one again, if there are others

                def fitness(one: int) -> tuple[bool, int]:
                    return one != self._failed, followers[one].match_index

                self.begin(max(able, key=fitness), None, now_ms)
        elif preferred in followers and now_ms >= self._stays_until_ms:
            follower = followers[preferred]
            agrees = follower.preferred in (NO_NODE, preferred)
            if agrees and self.refusal(preferred, follower, now_ms) is None:
                self.begin(preferred, None, now_ms, preferred=True)

    def _goes_on_without_this(self, followers: dict[int, EntryDispatcher], now_ms: float) -> bool:
        """Whether a majority answers without this node, which cannot give its vote now."""
        state, since_ms = self._state, now_ms - self._settings.election_timeout_ms
        works = [
            one
            for one in state.peers
            if one not in state.down
            and followers[one].heard_ms > since_ms
            and not followers[one].is_silent(now_ms)
        ]
        return len(works) >= state.quorum

    def _give_up(self, now_ms: float, reason: str, update: Update) -> None:
        running = self.running
        assert running is not None
        self.running = None
        self._failed, self._failed_ms = running.to, now_ms
        if running.token is not None:
            update.settled.append(Settled(running.token, "WAIT_QUORUM_ACK_TIMEOUT", reason=reason))

    def stopped_leading(self, now_ms: float) -> None:
        """This node does not lead any more; the outcome shows with the next leader."""
        if self.running is not None and self.running.preferred:
            self._gave_way_ms = now_ms
        if self.running is not None and self.running.token is None:
            self.running = None
        self._failed_ms = float("-inf")

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
