"""Mistakes to plant into the core, one at a time; the simulation must catch each.

A few are mistakes of what is around the core: then the simulation's own part of it is patched.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.dispatcher import EntryDispatcher, PushState
from hastore.dledger.core.election import LeaderElector, LeadershipTransfer
from hastore.dledger.core.events import HardState, MemberList, Settled, Update
from hastore.dledger.core.handler import EntryHandler
from hastore.dledger.core.leader import Leader, ReadRounds
from hastore.dledger.core.learners import Learners, Round
from hastore.dledger.core.member_state import Membership, MemberState
from hastore.dledger.core.quorum import PendingAppends, QuorumAckChecker, quorum_index
from hastore.dledger.links.identity import Group, Stores
from hastore.protocol.dledger import (
    Code,
    MemberSet,
    PushResponse,
    PushType,
    VoteResponse,
    VoteResult,
)
from tests.dledger.simulation import SimNode

Patch = tuple[Any, str, Any]


# -- elections -------------------------------------------------------------------------------------


def vote_in_memory() -> list[Patch]:
    """A vote is sent that the hard state does not have."""

    def vote(self: MemberState, candidate: int, update: Update) -> None:
        self.voted_for = candidate

    return [(MemberState, "vote", vote)]


def vote_forgotten() -> list[Patch]:
    """A restart knows its term but not its vote."""
    init = MemberState.__init__

    def forget(self: MemberState, node: int, start: Any) -> None:
        init(self, node, start)
        self.voted_for = None

    return [(MemberState, "__init__", forget)]


def votes_twice() -> list[Patch]:
    """A second candidate of a term gets a vote too."""
    judge = LeaderElector.judge_vote

    def lax(self: LeaderElector, candidate: int, request: Any) -> VoteResult:
        result = judge(self, candidate, request)
        return VoteResult.ACCEPT if result is VoteResult.REJECT_ALREADY_VOTED else result

    return [(LeaderElector, "judge_vote", lax)]


def shorter_log_elected() -> list[Patch]:
    """The candidate's log is not looked at."""
    judge = LeaderElector.judge_vote
    short = (VoteResult.REJECT_EXPIRED_LEDGER_TERM, VoteResult.REJECT_SMALL_LEDGER_END_INDEX)

    def lax(self: LeaderElector, candidate: int, request: Any) -> VoteResult:
        result = judge(self, candidate, request)
        return VoteResult.ACCEPT if result in short else result

    return [(LeaderElector, "judge_vote", lax)]


def longer_log_elected() -> list[Patch]:
    """Logs are compared by their length alone, without terms."""
    judge = LeaderElector.judge_vote

    def lax(self: LeaderElector, candidate: int, request: Any) -> VoteResult:
        if request.ledger_end_index < self._state.ledger_end_index:
            return VoteResult.REJECT_SMALL_LEDGER_END_INDEX
        high = replace(request, ledger_end_term=1 << 40, ledger_end_index=1 << 40)
        return judge(self, candidate, high)

    return [(LeaderElector, "judge_vote", lax)]


def minority_elects() -> list[Patch]:
    """Half of the votes make a leader."""

    def half(self: LeaderElector) -> bool:
        members = self._state.members
        return 2 * len(self.accepted.intersection(members)) >= len(members)

    return [(LeaderElector, "_has_majority", half)]


def old_vote_counted() -> list[Patch]:
    """An answer to a request of an earlier term counts."""
    count = LeaderElector.count

    def lax(self: LeaderElector, peer: int, response: Any) -> bool:
        asked = self._state.term + 1 if self.pre else self._state.term
        return count(self, peer, replace(response, request_term=asked))

    return [(LeaderElector, "count", lax)]


def no_pre_vote() -> list[Patch]:
    """A candidate raises its term at once."""
    campaign = DLedgerCore._campaign

    def eager(self: DLedgerCore, update: Update, *, pre: bool, transfer: bool = False) -> None:
        campaign(self, update, pre=False, transfer=transfer)

    return [(DLedgerCore, "_campaign", eager)]


def leader_not_protected() -> list[Patch]:
    """A member that hears its leader votes for another."""
    return [(DLedgerCore, "_has_leader", lambda self: False)]


def no_check_quorum() -> list[Patch]:
    """A leader that hears no majority goes on."""
    return [(Leader, "is_cut_off", lambda self, now_ms: False)]


def term_falls() -> list[Patch]:
    """A leader of an earlier term is followed."""
    on_message = DLedgerCore._on_leader_message

    def lax(self: DLedgerCore, peer: int, message: Any, update: Update) -> None:
        state = self._state
        if message.term < state.term and not state.is_leader:
            state.term, state.voted_for, state.leader = message.term, None, None
            update.hard_state = HardState(state.term, None, state.remembers)
        on_message(self, peer, message, update)

    return [(DLedgerCore, "_on_leader_message", lax)]


def term_not_saved() -> list[Patch]:
    """A later term is taken over in memory only."""

    def adopt(self: MemberState, term: int, update: Update) -> None:
        self.term, self.voted_for, self.leader = term, None, None

    return [(MemberState, "adopt_term", adopt)]


def blocked_node_leads() -> list[Patch]:
    """A node whose replay has stopped is elected and leads like any other."""
    return [(DLedgerCore, "_on_blocked", lambda self, event, update: None)]


def blocked_leader_stays() -> list[Patch]:
    """A leader whose replay has stopped does not hand over."""
    begin = LeadershipTransfer._begin_by_itself

    def stay(self: LeadershipTransfer, now_ms: float, followers: dict[int, Any]) -> None:
        if not self._state.blocked:
            begin(self, now_ms, followers)

    return [(LeadershipTransfer, "_begin_by_itself", stay)]


def blocked_node_never_asks() -> list[Patch]:
    """A node whose replay has stopped asks for no votes, also if nobody else can win."""
    may = LeaderElector.may_campaign

    def never(self: LeaderElector) -> bool:
        return may(self) and not self._state.blocked

    return [(LeaderElector, "may_campaign", never)]


def no_tenure() -> list[Patch]:
    """A leader hands over to the preferred one at once."""
    takes = LeadershipTransfer.takes_office

    def hurry(self: LeadershipTransfer, now_ms: float) -> None:
        takes(self, now_ms)
        self._stays_until_ms = now_ms

    return [(LeadershipTransfer, "takes_office", hurry)]


def tenure_never_grows() -> list[Patch]:
    """A leader stays as long as the first time, however often it leads again."""
    takes = LeadershipTransfer.takes_office

    def forget(self: LeadershipTransfer, now_ms: float) -> None:
        self._gave_way_ms = float("-inf")
        takes(self, now_ms)

    return [(LeadershipTransfer, "takes_office", forget)]


def preference_not_said() -> list[Patch]:
    """A follower does not say whom it prefers as leader."""
    beaten = DLedgerCore._beaten

    def silent(self: DLedgerCore, *args: Any) -> Any:
        return replace(beaten(self, *args), preferred=0)

    return [(DLedgerCore, "_beaten", silent)]


def removed_not_told() -> list[Patch]:
    """Nobody tells a node that it was removed."""
    return [(MemberState, "removal_of", lambda self, node: None)]


def removal_believed() -> list[Patch]:
    """A node believes that it was removed, though its log may know a later list."""

    def note(self: MemberState, told: Any, update: Update) -> bool:
        self.removed = MemberList(*told)
        update.removed = True
        return True

    return [(MemberState, "note_removal", note)]


# -- commits ---------------------------------------------------------------------------------------


def _counted(self: QuorumAckChecker, own: int, marks: dict[int, int]) -> int:
    state = self._state
    return quorum_index(own if one == state.node else marks.get(one, -1) for one in state.members)


def old_term_by_counting() -> list[Patch]:
    """An entry of an older term is committed because a majority has it (figure 8)."""

    def committable(self: QuorumAckChecker) -> int | None:
        state = self._state
        index = _counted(self, state.persisted_index, dict(self.water_marks))
        index = min(index, state.ledger_end_index)
        return index if index > state.committed_index else None

    return [(QuorumAckChecker, "committable", committable)]


def leader_counts_unsynced() -> list[Patch]:
    """The leader counts itself before its entries are persisted."""

    def committable(self: QuorumAckChecker) -> int | None:
        state = self._state
        index = _counted(self, state.ledger_end_index, dict(self.water_marks))
        old = index <= state.committed_index or state.log.term_at(index) != state.term
        return None if old else index

    return [(QuorumAckChecker, "committable", committable)]


def answer_unsynced() -> list[Patch]:
    """A follower answers an APPEND before its entries are persisted."""
    durable = property(lambda self: min(self._state.ledger_end_index, self.matched_index))
    return [(EntryHandler, "durable_index", durable)]


def counts_end() -> list[Patch]:
    """The leader takes a follower's end for what it has durably and equal."""
    on_answer = Leader.on_answer

    def eager(self: Leader, peer: int, message: Any, now_ms: float, update: Update) -> None:
        on_answer(self, peer, message, now_ms, update)
        if isinstance(message, PushResponse) and peer in self.dispatchers and message.remembers:
            self.checker.report(peer, message.end_index)

    return [(Leader, "on_answer", eager)]


def old_answer_counted() -> list[Patch]:
    """An answer to an APPEND of an earlier term counts in this one."""
    on_answer = DLedgerCore._on_answer

    def lax(self: DLedgerCore, peer: int, message: Any, update: Update) -> None:
        if isinstance(message, PushResponse) and message.term < self._state.term:
            message = replace(message, term=self._state.term)
        on_answer(self, peer, message, update)

    return [(DLedgerCore, "_on_answer", lax)]


def old_marks_kept() -> list[Patch]:
    """The counts of an earlier term go on in the next."""

    def start_term(self: QuorumAckChecker) -> None:
        old = self.peer_water_marks_by_term
        last = old[max(old)] if old else {}
        self.peer_water_marks_by_term = {self._state.term: last}

    return [
        (QuorumAckChecker, "start_term", start_term),
        (QuorumAckChecker, "stop", lambda self: None),
    ]


def quorum_short() -> list[Patch]:
    """Half of an even group commits."""

    def committable(self: QuorumAckChecker) -> int | None:
        state, marks = self._state, self.water_marks
        have = sorted(
            state.persisted_index if one == state.node else marks.get(one, -1)
            for one in state.members
        )
        index = have[len(have) // 2]
        old = index <= state.committed_index or state.log.term_at(index) != state.term
        return None if old else index

    return [(QuorumAckChecker, "committable", committable)]


def commit_beyond_match() -> list[Patch]:
    """A follower commits what the leader has committed, equal or not."""

    def advance(self: EntryHandler, update: Update) -> None:
        state = self._state
        state.commit(min(self.leader_committed_index, state.ledger_end_index), update)

    return [(EntryHandler, "_advance", advance)]


def lost_puts_acknowledged() -> list[Patch]:
    """Puts that wait when leading ends are told success."""

    def settle_all(self: PendingAppends, update: Update) -> None:
        for waiting in self.pending_append_responses_by_term.values():
            while waiting:
                self._settle(waiting.popleft(), "COMMITTED", update)

    return [(PendingAppends, "settle_all", settle_all)]


def lost_puts_refused() -> list[Patch]:
    """Puts that wait when leading ends are told that nothing was done."""

    def settle_all(self: PendingAppends, update: Update) -> None:
        for waiting in self.pending_append_responses_by_term.values():
            while waiting:
                self._settle(waiting.popleft(), "REFUSED", update)

    return [(PendingAppends, "settle_all", settle_all)]


# -- logs ------------------------------------------------------------------------------------------


def compare_by_index() -> list[Patch]:
    """COMPARE takes entries with one index for equal, whatever their terms."""
    on_compare = EntryHandler.on_compare

    def lax(self: EntryHandler, request: Any, update: Update) -> list[PushResponse]:
        known = self._state.log.term_at(request.index)
        return on_compare(self, request if known is None else replace(request, index_term=known),
                          update)  # fmt: skip

    return [(EntryHandler, "on_compare", lax)]


def append_unchecked() -> list[Patch]:
    """The leader sends from its own end on without COMPARE; APPEND does not look before it."""
    on_append = EntryHandler.on_append

    def lax(self: EntryHandler, request: Any, update: Update) -> Any:
        known = self._state.log.term_at(request.prev_index)
        if known is not None:
            request = replace(request, prev_term=known)
        return on_append(self, request, update)

    begin = EntryDispatcher._begin_compare

    def no_compare(self: EntryDispatcher, index: int, now_ms: float) -> None:
        begin(self, index, now_ms)
        self._go(PushState.APPEND, self.compare_index + 1, now_ms)

    return [
        (EntryHandler, "on_append", lax),
        (EntryDispatcher, "_begin_compare", no_compare),
    ]


def cut_on_order() -> list[Patch]:
    """TRUNCATE is obeyed, whatever this node knows: an old one cuts committed entries."""

    def on_truncate(self: EntryHandler, request: Any, update: Update) -> PushResponse:
        state = self._state
        if state.log.begin_index <= request.index <= state.ledger_end_index:
            state.truncate(request.index, update)
        return self.answer(PushType.TRUNCATE, Code.SUCCESS, request.index - 1)

    return [(EntryHandler, "on_truncate", on_truncate)]


def aside_on_order() -> list[Patch]:
    """INSTALL is obeyed, whatever this node knows."""

    def on_install(self: EntryHandler, request: Any, update: Update) -> PushResponse:
        place = request.index, request.pos, request.prev_term
        group = MemberSet(request.members, request.learners, request.leaving)
        self._state.install(*place, group, update)
        return self.answer(PushType.INSTALL, Code.SUCCESS, request.index - 1)

    return [(EntryHandler, "on_install", on_install)]


def cut_still_persisted() -> list[Patch]:
    """What was cut still counts as persisted when other entries take its place."""
    truncate = MemberState.truncate

    def keep(self: MemberState, index: int, update: Update) -> None:
        persisted = self.persisted_index
        truncate(self, index, update)
        self.persisted_index = persisted

    return [(MemberState, "truncate", keep)]


def old_sync_counted() -> list[Patch]:
    """A sync that began before the log was cut counts for what was appended after."""
    on_persisted = DLedgerCore._on_persisted

    def lax(self: DLedgerCore, event: Any, update: Update) -> None:
        on_persisted(self, dataclasses.replace(event, cuts=None), update)

    return [(DLedgerCore, "_on_persisted", lax)]


def never_again() -> list[Patch]:
    """An APPEND that was lost is not sent again."""
    return [(EntryDispatcher, "_resend_ms", lambda self: 1e18)]


# -- members, wiped disks, reads -------------------------------------------------------------------


def two_changes() -> list[Patch]:
    """A change of members does not wait for the last one to be committed."""
    busy = Membership.busy

    def lax(self: Membership) -> str | None:
        why = busy(self)
        return None if why is not None and why.startswith("the last change") else why

    return [(Membership, "busy", lax)]


def two_nodes_changed() -> list[Patch]:
    """A member list may differ by more than one node."""
    refusal = Membership.refusal

    def lax(self: Membership, wanted: MemberSet) -> str | None:
        why = refusal(self, wanted)
        return None if why is not None and why.startswith("members change one") else why

    return [(Membership, "refusal", lax)]


def change_too_early() -> list[Patch]:
    """A new leader changes members before an entry of its term is committed."""
    busy = Membership.busy

    def lax(self: Membership) -> str | None:
        why = busy(self)
        return None if why is not None and why.startswith("the leader has committed") else why

    return [(Membership, "busy", lax)]


def unlogged_list_kept() -> list[Patch]:
    """A list that was saved and never came into the log stays among those that are saved."""
    start = DLedgerCore._on_start

    def keep(self: DLedgerCore, event: Any, update: Update) -> None:
        start(self, event, update)
        update.member_lists = None

    return [(DLedgerCore, "_on_start", keep)]


def install_drops_lists() -> list[Patch]:
    """With an INSTALL only its own list is saved, although the log is still the old one."""
    install = MemberState.install

    def drop(self: MemberState, index: int, *place: Any) -> None:
        install(self, index, *place)
        self.member_lists = place[-1].member_lists = self.member_lists[-1:]

    return [(MemberState, "install", drop)]


def added_as_member() -> list[Patch]:
    """A node that is added counts at once, as if it had everything."""
    change = Leader._change

    def eager(self: Leader, group: MemberSet, *rest: Any) -> None:
        members = tuple(sorted((*group.members, *group.learners)))
        change(self, MemberSet(members, (), group.leaving), *rest)

    return [(Leader, "_change", eager)]


def promoted_at_once() -> list[Patch]:
    """A learner becomes a member without a look at what it has."""
    return [(Learners, "_lacks", lambda self, learner, follower, now_ms: None)]


def slow_rounds_count() -> list[Patch]:
    """A learner keeps up however long its rounds take."""

    def note(self: Learners, followers: Any, now_ms: float) -> None:
        end = self._state.ledger_end_index
        self._rounds = {
            one: Round(end, now_ms, followers[one].match_index >= 0) for one in self._state.learners
        }

    return [(Learners, "note", note)]


def promoted_without_a_spare() -> list[Patch]:
    """A learner becomes a member although all members that answer are then needed, and it too."""
    return [(Learners, "_missing", lambda self, answering: set())]


def learner_counted() -> list[Patch]:
    """What a learner has counts for commits."""

    def committable(self: QuorumAckChecker) -> int | None:
        state, marks = self._state, self.water_marks
        have = sorted(
            (
                state.persisted_index if one == state.node else marks.get(one, -1)
                for one in (*state.members, *state.learners)
            ),
            reverse=True,
        )
        index = min(have[state.quorum - 1], state.ledger_end_index)
        old = index <= state.committed_index or state.log.term_at(index) != state.term
        return None if old else index

    return [(QuorumAckChecker, "committable", committable)]


def learner_elects() -> list[Patch]:
    """A candidate asks learners for their votes, and counts them."""
    count = LeaderElector.count

    def everyone(self: LeaderElector) -> bool:
        return len(self.accepted) >= self._state.quorum

    def lax(self: LeaderElector, peer: int, response: Any) -> bool:
        if response.result is VoteResult.ACCEPT and peer in self._state.learners:
            self.accepted.add(peer)
        return count(self, peer, response) or (self.pre is not None and self._has_majority())

    on_receive = DLedgerCore._on_receive

    def take(self: DLedgerCore, event: Any, update: Update) -> None:
        if isinstance(event.message, VoteResponse) and event.peer in self._state.learners:
            self._on_answer(event.peer, event.message, update)
        else:
            on_receive(self, event, update)

    peers = property(
        lambda self: tuple(n for n in (*self.members, *self.learners) if n != self.node)
    )
    return [
        (DLedgerCore, "_on_receive", take),
        (LeaderElector, "_has_majority", everyone),
        (LeaderElector, "count", lax),
        (MemberState, "peers", peers),
    ]


def learner_campaigns() -> list[Patch]:
    """A learner asks for votes."""
    may_campaign = LeaderElector.may_campaign

    def lax(self: LeaderElector) -> bool:
        return may_campaign(self) or self._state.node in self._state.learners

    return [(LeaderElector, "may_campaign", lax)]


def learner_keeps_leader() -> list[Patch]:
    """The answers of a learner are a part of the leader's majority."""

    def heard(self: Leader, now_ms: float) -> float:
        times = [now_ms, *(one.heard_ms for one in self.dispatchers.values())]
        return sorted(times, reverse=True)[self._state.quorum - 1]

    return [(Leader, "_quorum_heard_ms", heard)]


def learner_serves_reads() -> list[Patch]:
    """The answers of a learner count for a round of heart beats."""
    settle = ReadRounds.settle

    def lax(self: ReadRounds, update: Update) -> None:
        state = self._state
        answered = [self.answered.get(one, 0) for one in (*state.peers, *state.learners)]
        reached = sorted([self.round, *answered], reverse=True)[state.quorum - 1]
        for one in [each for each in self.waiting if each.round and each.round <= reached]:
            self.waiting.remove(one)
            update.settled.append(Settled(one.token, "COMMITTED", one.index))
        settle(self, update)

    return [(ReadRounds, "settle", lax)]


def replaced_in_one_step() -> list[Patch]:
    """A learner becomes a member in the list that leaves the other one out."""
    next_list = Learners.next_list

    def both(self: Learners, *place: Any) -> MemberSet | None:
        group = next_list(self, *place)
        if group is None or not group.leaving:
            return group
        members = set(group.members) - set(group.leaving)
        return MemberSet(tuple(sorted(members)), group.learners)

    return [(Learners, "next_list", both)]


def learners_forgotten() -> list[Patch]:
    """A restart knows the members, and not the learners."""
    init = MemberState.__init__

    def forget(self: MemberState, node: int, start: Any) -> None:
        init(self, node, start)
        self.member_lists = tuple(
            dataclasses.replace(one, learners=(), leaving=()) for one in self.member_lists
        )

    return [(MemberState, "__init__", forget)]


def wiped_node_votes() -> list[Patch]:
    """A node with an empty disk takes part as if it remembered."""
    init = MemberState.__init__

    def trust(self: MemberState, node: int, start: Any) -> None:
        init(self, node, start)
        self.remembers = True

    return [(MemberState, "__init__", trust)]


def cut_log_remembers() -> list[Patch]:
    """A node whose limits page is lost takes what it finds for all that it had."""
    lose = SimNode.lose_end

    def trust(self: SimNode, index: int) -> None:
        lose(self, index)
        self.disk.hard = dataclasses.replace(self.disk.hard, remembers=True)

    return [(SimNode, "lose_end", trust)]


def replaced_store_taken() -> list[Patch]:
    """A store that was replaced is taken when it comes back and says that its disk was lost."""

    def problem(self: Stores, node: int, store_id: str, *, lost: bool, **_: Any) -> str | None:
        return None if lost or self.known.get(node) in (None, store_id) else "another store"

    return [(Stores, "problem", problem)]


def first_members_not_compared() -> list[Patch]:
    """Nodes whose files list other first members begin one group."""
    return [(Group, "problem", lambda *_: None)]


def recalled_at_once() -> list[Patch]:
    """A wiped node counts again as soon as it hears a leader."""
    on_compare = EntryHandler.on_compare

    def eager(self: EntryHandler, request: Any, update: Update) -> list[PushResponse]:
        if not self._state.remembers:
            self._state.remembers = True
            self._state.save(update)
        return on_compare(self, request, update)

    return [(EntryHandler, "on_compare", eager)]


def stale_read() -> list[Patch]:
    """A leader answers a read at once, without asking anybody."""

    def settle(self: ReadRounds, update: Update) -> None:
        index = self._state.committed_index
        update.settled += [Settled(one.token, "COMMITTED", index) for one in self.waiting]
        self.waiting = []

    return [(ReadRounds, "settle", settle)]


def read_before_own_commit() -> list[Patch]:
    """A new leader answers reads before it knows what is committed."""

    def begin(self: ReadRounds, update: Update) -> None:
        new = [one for one in self.waiting if one.round is None]
        if new and len(new) == len(self.waiting):
            self.beat(update)
            self._join(new)

    def join_beat(self: ReadRounds) -> None:
        self._join([one for one in self.waiting if one.round is None])

    return [(ReadRounds, "begin", begin), (ReadRounds, "join_beat", join_beat)]


def old_round_counted() -> list[Patch]:
    """A read takes the answers to rounds that began before it."""

    def _join(self: ReadRounds, reads: list[Any]) -> None:
        for read in reads:
            read.round, read.index = max(1, self.round - 3), self._state.committed_index

    return [(ReadRounds, "_join", _join)]


BUGS: dict[str, Callable[[], list[Patch]]] = {
    bug.__name__: bug
    for bug in (
        vote_in_memory, vote_forgotten, votes_twice, shorter_log_elected, longer_log_elected,
        minority_elects, old_vote_counted, no_pre_vote, leader_not_protected, no_check_quorum,
        blocked_node_leads, blocked_leader_stays, blocked_node_never_asks,
        no_tenure, tenure_never_grows, preference_not_said, removed_not_told, removal_believed,
        term_falls, term_not_saved, old_term_by_counting, leader_counts_unsynced, answer_unsynced,
        counts_end, old_answer_counted, old_marks_kept, quorum_short, commit_beyond_match,
        lost_puts_acknowledged, lost_puts_refused, compare_by_index, append_unchecked,
        cut_on_order, aside_on_order, cut_still_persisted, old_sync_counted, never_again,
        two_changes, two_nodes_changed, change_too_early, unlogged_list_kept,
        install_drops_lists, added_as_member, promoted_at_once, slow_rounds_count,
        promoted_without_a_spare, learner_counted, learner_elects, learner_campaigns,
        learner_keeps_leader, learner_serves_reads, replaced_in_one_step, learners_forgotten,
        wiped_node_votes, cut_log_remembers, replaced_store_taken,
        first_members_not_compared,
        recalled_at_once,
        stale_read, read_before_own_commit, old_round_counted,
    )
}  # fmt: skip


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant one mistake."""
    patches = BUGS[name]()
    before = [(place, attribute, place.__dict__[attribute]) for place, attribute, _ in patches]
    for place, attribute, value in patches:
        setattr(place, attribute, value)
    try:
        yield
    finally:
        for place, attribute, value in before:
            setattr(place, attribute, value)
