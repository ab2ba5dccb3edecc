"""Leader: what a node does while it leads a term; ReadRounds: its heart beats, reads by them.

The Leader owns the EntryDispatchers, the counts of the QuorumAckChecker, the puts and reads that
wait, the change of members, the learners and the transfer of leadership. DLedgerCore begins and
ends it with the role. Learners have dispatchers and get heart beats; whatever counts answers goes
by the list of members, and leaves theirs out.

Heart beats go out in rounds. A read is answered with the committed index of its arrival once a
majority has answered a round of heart beats that began after it: until then no later leader was
elected, so nothing newer was committed elsewhere. Reads that arrive during a round share the next
one. A new leader knows what is committed only after its first entry is committed; reads wait for
that. No clock is trusted.
"""

from dataclasses import dataclass

from hastore.dledger.core.dispatcher import EntryDispatcher, LogBytes
from hastore.dledger.core.election import LeadershipTransfer
from hastore.dledger.core.events import (
    ChangeMembers,
    MemberList,
    OwnEntry,
    Propose,
    ReadIndex,
    Settings,
    Settled,
    Transfer,
    Update,
    listed,
)
from hastore.dledger.core.learners import Learners
from hastore.dledger.core.member_state import Membership, MemberState, PendingChange
from hastore.dledger.core.quorum import PendingAppends, QuorumAckChecker
from hastore.protocol.dledger import (
    NO_INDEX,
    NO_NODE,
    Code,
    HeartBeatRequest,
    HeartBeatResponse,
    MemberSet,
    PushResponse,
    PushType,
    TakeLeadership,
    VoteResponse,
    VoteResult,
)


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
        """Begin a round: send a heart beat to every peer and learner."""
        state = self._state
        self.round += 1
        request = HeartBeatRequest(state.term, self.round, state.committed_index, state.preferences)
        update.messages += [(peer, request) for peer in state.receivers if peer not in state.down]

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


class Leader:
    """The leading part of a node. Between its terms only a transfer may be left in it."""

    def __init__(self, state: MemberState, settings: Settings, log_bytes: LogBytes) -> None:
        self._state = state
        self._settings = settings
        self._log_bytes = log_bytes
        self.checker = QuorumAckChecker(state)
        self.pending = PendingAppends(settings.append_timeout_ms)
        self.reads = ReadRounds(state)
        self.transfer = LeadershipTransfer(state, settings)
        self.membership = Membership(state)
        self.learners = Learners(state, settings, self.membership)
        self.dispatchers: dict[int, EntryDispatcher] = {}
        self._beat_due_ms = 0.0
        self._cut_off_ms = 0.0  # before this the leader is not cut off; 0: compute it
        self._grace_ms = 0.0  # until then the leader is not cut off
        self._grace_heard_ms: float | None = None  # what was heard last when it was granted

    def begin(self, now_ms: float, update: Update) -> None:
        """Begin to lead the current term: append its first entry, compare all logs, and beat."""
        self.checker.start_term()
        self.dispatchers = {}
        self._append_own(None, update)
        self._set_dispatchers(now_ms)
        self.transfer.takes_office(now_ms)
        self._beat(now_ms, update)

    def stop(self, now_ms: float, update: Update) -> None:
        """Stop leading; what waits is settled with an unknown outcome."""
        self.dispatchers = {}
        self.checker.stop()
        self.pending.settle_all(update)
        self.reads.stop(update)
        self.membership.stop(update)
        self.learners.stop()
        self.transfer.stopped_leading(now_ms)

    def refusal(self) -> str | None:
        """Return why a put is refused now: a name of Code. None: the driver may append."""
        state = self._state
        if not state.is_leader:
            return Code.NOT_LEADER.name
        if state.disk_full:
            return Code.DISK_FULL.name
        if self.transfer.running is not None or state.node not in state.members:
            return Code.LEADER_TRANSFERRING.name
        if self.pending.entries >= self._settings.pending_max:
            return Code.LEADER_PENDING_FULL.name
        return None

    # -- what the driver wants ---------------------------------------------------------------------

    def on_propose(self, event: Propose, now_ms: float, update: Update) -> None:
        """Take entries that the store has appended."""
        state = self._state
        state.log.append(state.term, event.count)
        update.flush = True
        if event.token is not None:
            index = state.ledger_end_index
            self.pending.add(state.term, index, event.count, event.token, now_ms)

    def on_transfer(self, event: Transfer, now_ms: float, update: Update) -> None:
        """Begin a transfer, or refuse it."""
        if not self._state.is_leader:
            refusal: str | None = Code.NOT_LEADER.name
        else:
            refusal = self.transfer.refusal(event.to, self.dispatchers.get(event.to), now_ms)
        if refusal is not None:
            update.settled.append(Settled(event.token, "REFUSED", reason=refusal))
        else:
            self.transfer.begin(event.to, event.token, now_ms)

    def on_change_members(self, event: ChangeMembers, now_ms: float, update: Update) -> None:
        """Append a member list, or refuse it."""
        state = self._state
        wanted = MemberSet(*(tuple(sorted(one)) for one in (
            event.members, event.learners, event.leaving)))  # fmt: skip
        if not state.is_leader or self.transfer.running is not None or state.disk_full:
            refusal = self.refusal()
        else:
            refusal = self.membership.refusal(wanted) or self._unheard(wanted.members, now_ms)
        if refusal is not None:
            update.settled.append(Settled(event.token, "REFUSED", reason=refusal))
            return
        self._change(wanted, event.token, now_ms, update)

    def _change(
        self, group: MemberSet, token: object | None, now_ms: float, update: Update
    ) -> None:
        self._append_own(group, update)
        self.membership.pending = PendingChange(self._state.ledger_end_index, token)
        self._set_dispatchers(now_ms)

    def _unheard(self, members: tuple[int, ...], now_ms: float) -> str | None:
        """Return why a list would end this leadership soon.

        The answers of a node that has lost its disk, or takes no entries, do not count.
        """
        if self._state.hangs:  # the list is saved before anyone gets it
            return f"the disk of node {self._state.node}, the leader, hangs: let another node lead"
        answering = self.learners.answering(self.dispatchers, now_ms)
        unheard = set(members) - answering
        if 2 * (len(members) - len(unheard)) > len(members):
            return None
        without = listed(unheard)
        return (
            "no majority of the new list answers and takes entries, without these nodes: "
            f"{without}; look at them, and try again"
        )

    def learner_waits(self, learner: int, now_ms: float) -> str | None:
        """Return why a learner is not made a member now; None: it is."""
        if learner not in self.dispatchers:
            return None
        return self.learners.waits(learner, self.dispatchers, now_ms)

    def on_read(self, event: ReadIndex, now_ms: float, update: Update) -> None:
        """Let a read wait for a round of heart beats, or refuse it."""
        refusal = None
        if not self._state.is_leader:
            refusal = Code.NOT_LEADER.name
        elif len(self.reads.waiting) >= self._settings.pending_max:
            refusal = Code.LEADER_PENDING_FULL.name
        if refusal is not None:
            update.settled.append(Settled(event.token, "REFUSED", reason=refusal))
            return
        deadline_ms = now_ms + self._settings.append_timeout_ms
        self.reads.waiting.append(WaitingRead(event.token, deadline_ms))

    # -- followers ---------------------------------------------------------------------------------

    def on_link_up(self, peer: int, now_ms: float, update: Update) -> None:
        """Compare the logs anew: what was on the way may be lost."""
        if peer in self.dispatchers:
            self.dispatchers[peer].recall_index = None
            self.dispatchers[peer].restart(now_ms)
            self._beat(now_ms, update)

    def on_answer(
        self, peer: int, message: PushResponse | HeartBeatResponse, now_ms: float, update: Update
    ) -> None:
        """Take a follower's answer in this node's term."""
        state, follower = self._state, self.dispatchers[peer]
        follower.able = message.able
        follower.answered_ms = now_ms
        if message.remembers:
            follower.heard_ms = now_ms
            follower.answered = True
            if follower.recall_index is not None:
                follower.recall_index = None
                self.checker.report(peer, follower.match_index)
        elif follower.recall_index is None and not state.disk_full:
            # Only an entry that comes after all that the peer may have forgotten, and that the
            # others have committed without it, ends its quarantine.
            self.checker.forget(peer)
            follower.match_index = NO_INDEX
            self._append_own(None, update)
            follower.recall_index = state.ledger_end_index
        if isinstance(message, HeartBeatResponse):
            follower.preferred = message.preferred
            if message.remembers and message.code is Code.SUCCESS:
                self.reads.answer(peer, message.round)
            return
        is_append = message.push is PushType.APPEND and message.code is Code.SUCCESS
        if is_append and message.index > state.ledger_end_index:
            return
        follower.on_response(message, now_ms)
        if is_append and message.remembers:
            self.checker.report(peer, message.index)
        elif is_append and follower.recall_index is not None:
            if follower.recall_index <= min(state.committed_index, message.index):
                follower.end_quarantine(update)

    def is_cut_off(self, now_ms: float) -> bool:
        """Whether no majority was heard for an election timeout (check-quorum)."""
        if now_ms < self._cut_off_ms:  # it was right when it was computed, and only moves later
            return False
        heard_ms = self._quorum_heard_ms(now_ms) + self._settings.election_timeout_ms
        self._cut_off_ms = max(heard_ms, self._grace_ms)
        return now_ms >= self._cut_off_ms

    def grant_grace(self, now_ms: float, until_ms: float) -> None:
        """Do not step down before `until_ms`, once: a pause of this process is no silence."""
        heard_ms = self._quorum_heard_ms(now_ms)
        if heard_ms != self._grace_heard_ms:
            self._grace_heard_ms, self._grace_ms = heard_ms, until_ms
            self._cut_off_ms = max(self._cut_off_ms, until_ms)

    def _quorum_heard_ms(self, now_ms: float) -> float:
        """Return when a majority was last heard, this node included."""
        state = self._state
        times = [
            now_ms if one == state.node else self.dispatchers[one].heard_ms for one in state.members
        ]
        return sorted(times, reverse=True)[state.quorum - 1]

    # -- after each event --------------------------------------------------------------------------

    def move(self, now_ms: float, stored_end: int, update: Update) -> bool:
        """Do what is due. Returns False if this node must stop leading."""
        if self.is_cut_off(now_ms):
            return False
        self._move_learners(now_ms, update)  # by what earlier steps have committed
        if not self._commit(now_ms, update):
            return False
        self.pending.settle_late(now_ms, update)
        self.reads.settle(update)
        self.reads.settle_late(now_ms, update)
        self.reads.begin(update)
        self.reads.settle(update)  # a group of one
        if now_ms >= self._beat_due_ms:
            self._beat(now_ms, update)
        self.transfer.move(now_ms, self.dispatchers, update)
        for dispatcher in self.dispatchers.values():
            dispatcher.pump(now_ms, stored_end, update)
        return True

    def _move_learners(self, now_ms: float, update: Update) -> None:
        """Make a learner a member, or remove the member that it replaces, if it is time."""
        state = self._state
        if not state.member_lists or state.group == MemberSet(state.members):
            self.learners.stop()
            return  # no learner, and nobody leaves
        if state.node not in state.members:
            return  # it hands over as soon as that is committed
        self.learners.note(self.dispatchers, now_ms)
        if state.disk_full or state.hangs or self.transfer.running is not None:
            return
        group = self.learners.next_list(self.dispatchers, now_ms)
        if group is not None:
            self._change(group, None, now_ms, update)

    def _commit(self, now_ms: float, update: Update) -> bool:
        """Commit what a majority has. Returns False if this node is no member any more."""
        index, before = self.checker.committable(), self._state.committed_list
        if index is None or not self._state.commit(index, update):
            return True
        self._tell_removed(before, update)
        self.pending.settle_committed(index, update)
        self.membership.settle(update)
        if self._state.node in self._state.members or self._state.changing:
            return True
        self._beat(now_ms, update)  # tells the committed index
        able = [
            one
            for one, follower in self.dispatchers.items()
            if one in self._state.members
            and one not in self._state.down
            and follower.recall_index is None
        ]
        if able:
            best = max(able, key=self._fitness)
            update.messages.append((best, TakeLeadership(self._state.term)))
        return False

    def _tell_removed(self, before: MemberList | None, update: Update) -> None:
        """Tell the nodes that a committed list leaves out; who asks for votes is told again."""
        state, last = self._state, self._state.committed_list
        if last is None or last == before:
            return
        old = MemberSet(state.first_members) if before is None else before.group
        for peer in sorted({*old.members, *old.learners} - {state.node}):
            removed = state.removal_of(peer)
            if removed is not None and peer not in state.down:
                result = VoteResult.REJECT_UNKNOWN_LEADER
                notice = VoteResponse(state.term, state.term, False, result, removed)
                update.messages.append((peer, notice))

    def _fitness(self, peer: int) -> tuple[bool, int]:
        """Return how well a follower could take over, for a comparison."""
        follower = self.dispatchers[peer]
        return follower.able and not follower.full, follower.match_index

    def refusals(self, now_ms: float) -> dict[int, str]:
        """Return why followers cannot take over now; who is not there can."""
        running = self.transfer.running
        found = {
            peer: self.transfer.refusal(peer, one, now_ms)
            for peer, one in self.dispatchers.items()
            if running is None or peer != running.to
        }
        return {peer: reason for peer, reason in found.items() if reason is not None}

    def _append_own(self, group: MemberSet | None, update: Update) -> None:
        """Append an entry of the core itself: a no-op, or a member list."""
        state = self._state
        state.log.append(state.term, 1)
        index = state.ledger_end_index
        update.append.append(OwnEntry(index, state.term, group))
        update.flush = True
        if group is not None:
            state.add_member_list(MemberList(index, state.term, *group), update)

    def _set_dispatchers(self, now_ms: float) -> None:
        """Let each peer and learner have an EntryDispatcher, and nobody else."""
        state = self._state
        self._cut_off_ms = 0.0  # another majority
        wanted = state.receivers
        for peer in set(self.dispatchers) - set(wanted):
            del self.dispatchers[peer]
            self.checker.forget(peer)
        for peer in wanted:
            if peer not in self.dispatchers:
                self.dispatchers[peer] = EntryDispatcher(
                    peer, state, self._settings, self._log_bytes, now_ms
                )

    def _preferences(self) -> tuple[tuple[int, int], ...]:
        """Return whom the members prefer as leader, if they contradict each other."""
        own = self._settings.preferred_leader
        known = {self._state.node: own} if own is not None else {}
        for peer, one in self.dispatchers.items():
            if one.preferred != NO_NODE:
                known[peer] = one.preferred
        return tuple(sorted(known.items())) if len(set(known.values())) > 1 else ()

    def _beat(self, now_ms: float, update: Update) -> None:
        self._state.preferences = self._preferences()
        self.reads.beat(update)
        self.reads.join_beat()
        self._beat_due_ms = now_ms + self._settings.heartbeat_interval_ms

    def deadline_ms(self, now_ms: float) -> float:
        """Return when `move` has something to do, unless something else happens before."""
        due = [self.pending.deadline_ms(), self.transfer.deadline_ms()]
        due += [one.deadline_ms for one in self.reads.waiting[:1]]
        due += [one.deadline_ms() for one in self.dispatchers.values()]
        if self._state.quorum > 1:
            due.append(self._cut_off_ms)
        return min([self._beat_due_ms, *(one for one in due if one is not None)])
