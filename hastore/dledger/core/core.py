"""DLedgerCore: DLedger's rules as one state machine, `step(event) -> Update`. No clock, no I/O.

The driver owns the core. It calls `step` and `refusal` under one lock and does what each Update
says, in the order of its fields, before the next step. The first event is Start, once.

What the driver must know:

- **Sizes.** The core never sees bytes. It leaves `pos` and `size` of an AppendRequest, and `pos` of
  an InstallRequest, 0; the driver fills them in when it sends. To keep batches at batch_bytes and
  what is in flight at in_flight_bytes, the core calls `log_bytes(first, last)`: the bytes that
  entries of the store take in the log. It asks only for entries that were stored before this step,
  never raises for want of an answer, and takes any number; without the function it assumes
  ENTRY_BYTES_ASSUMED each. A driver may still send an AppendRequest as several
  (`dispatcher.split_append`), or drop one: answers are cumulative, and what is not answered is
  sent again.
- **Answers wait for the disk.** `Update.flush` asks for a sync; `Persisted` reports its end,
  whenever it comes. One report may stand for many flushes. If a flush may run while the log is
  cut, give `Persisted.cuts`.
- **Links.** Until LinkChanged says otherwise, every link is taken to be up. Nothing is sent to a
  peer whose link is closed. After `up` the core compares the logs anew. What was sent over an
  earlier link must not arrive after it.
- **Members.** Save `Update.member_lists` and give the last to Start. Peers to be linked are
  `members` without this node, and any node that calls. ChangeMembers adds learners; they become
  members without another event.
- **Transfer** settles as COMMITTED once this node knows the transferee as the leader of a later
  term, TERM_CHANGED if it is another node, WAIT_QUORUM_ACK_TIMEOUT if it took too long or
  the transferee's disk is full (then this node leads on), REFUSED with the reason.
- **Retention** gives Retained before it removes files, and removes only what is committed.
"""

from collections.abc import Callable, Mapping

from hastore.dledger.core.dispatcher import (
    ENTRY_BYTES_ASSUMED,
    LogBytes,
    PushState,
)
from hastore.dledger.core.election import LeaderElector, Randomness
from hastore.dledger.core.events import (
    ChangeMembers,
    DiskFull,
    Event,
    LinkChanged,
    MemberList,
    Persisted,
    Propose,
    ReadIndex,
    Receive,
    ReplayBlocked,
    Retained,
    Role,
    Settings,
    Start,
    SyncHangs,
    Tick,
    ToldRemoved,
    Transfer,
    Update,
)
from hastore.dledger.core.handler import EntryHandler
from hastore.dledger.core.leader import Leader
from hastore.dledger.core.member_state import MemberState
from hastore.errors import ProtocolError
from hastore.protocol.dledger import (
    NO_INDEX,
    NO_NODE,
    AppendRequest,
    Code,
    CommitRequest,
    CompareRequest,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallRequest,
    MemberSet,
    Message,
    PushResponse,
    PushType,
    TakeLeadership,
    TruncateRequest,
    VoteRequest,
    VoteResponse,
    VoteResult,
    check_message,
)

_PUSH_TYPES: dict[type, PushType] = {
    AppendRequest: PushType.APPEND,
    CommitRequest: PushType.COMMIT,
    CompareRequest: PushType.COMPARE,
    InstallRequest: PushType.INSTALL,
    TruncateRequest: PushType.TRUNCATE,
}
_FROM_LEADER = (*_PUSH_TYPES, HeartBeatRequest, TakeLeadership)
_SAVED_FIRST = (VoteRequest, TruncateRequest, InstallRequest)


def _assumed_bytes(first: int, last: int) -> int:
    return (last - first + 1) * ENTRY_BYTES_ASSUMED


class DLedgerCore:
    """One node's part of a DLedger group."""

    def __init__(
        self,
        node: int,
        settings: Settings,
        random: Randomness,
        log_bytes: LogBytes = _assumed_bytes,
    ) -> None:
        self.node = node
        self.settings = settings
        self._random = random
        self._log_bytes = log_bytes
        self._now_ms = float("-inf")
        self._due_ms = float("inf")  # when the driver had to call again at the latest
        self._started = False
        self._steps: dict[type, Callable[..., None]] = {
            Tick: self._on_tick,
            Receive: self._on_receive,
            LinkChanged: self._on_link,
            Propose: self._on_propose,
            Persisted: self._on_persisted,
            DiskFull: self._on_disk_full,
            ReplayBlocked: self._on_blocked,
            SyncHangs: self._on_sync_hangs,
            ToldRemoved: self._on_told_removed,
            Retained: self._on_retained,
            Transfer: self._on_transfer,
            ChangeMembers: self._on_change_members,
            ReadIndex: self._on_read,
        }

    # -- status ------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """LEADER, FOLLOWER or CANDIDATE."""
        return self._state.role

    @property
    def term(self) -> int:
        """The current term."""
        return self._state.term

    @property
    def leader(self) -> int | None:
        """The leader of the term, if it is known here."""
        return self._state.leader

    @property
    def voted_for(self) -> int | None:
        """Whom this node has voted for in its term."""
        return self._state.voted_for

    @property
    def remembers(self) -> bool:
        """False from a start with a lost disk until a leader has ended the quarantine."""
        return self._state.remembers

    @property
    def ledger_begin_index(self) -> int:
        """The first entry of this node's log."""
        return self._state.log.begin_index

    @property
    def ledger_end_index(self) -> int:
        """The last entry of this node's log, durable or not; one before the begin: none."""
        return self._state.log.end_index

    @property
    def ledger_end_term(self) -> int:
        """The term of the last entry."""
        return self._state.log.end_term

    @property
    def persisted_index(self) -> int:
        """The last entry that is durable on this node."""
        return self._state.persisted_index

    @property
    def committed_index(self) -> int:
        """The last entry that this node knows to be committed."""
        return self._state.committed_index

    @property
    def members(self) -> tuple[int, ...]:
        """The nodes that elect and count, by the last member list of this log."""
        return self._state.members

    @property
    def group(self) -> MemberSet:
        """The last member list of this log, with its learners."""
        return self._state.group

    def learner_waits(self, learner: int) -> str | None:
        """Return, on a leader, why a learner is not made a member now; None: it is."""
        return self._leader.learner_waits(learner, self._now_ms)

    @property
    def member_lists(self) -> tuple[MemberList, ...]:
        """The member lists in this log."""
        return self._state.member_lists

    @property
    def terms(self) -> tuple[tuple[int, int], ...]:
        """The (term, first index) pairs of this log."""
        return self._state.log.pairs

    @property
    def cuts(self) -> int:
        """How often the log was truncated or given up since the start (Persisted.cuts)."""
        return self._state.cuts

    @property
    def water_marks(self) -> Mapping[int, int]:
        """On a leader: the last entry that each peer has durably, as counted for commits."""
        return self._leader.checker.water_marks

    @property
    def dispatcher_states(self) -> dict[int, PushState]:
        """On a leader: the state of each peer's EntryDispatcher."""
        return {peer: one.state for peer, one in self._leader.dispatchers.items()}

    @property
    def blocked(self) -> bool:
        """Whether replay has stopped, as the last ReplayBlocked said."""
        return self._state.blocked

    @property
    def hangs(self) -> bool:
        """Whether a sync does not return, as the last SyncHangs said."""
        return self._state.hangs

    @property
    def preferences(self) -> tuple[tuple[int, int], ...]:
        """(member, whom it prefers as leader) if they contradict each other; else nothing."""
        return self._state.preferences

    @property
    def removed(self) -> MemberList | None:
        """The committed list that has left out this node, until a leader serves it again."""
        return self._state.removed

    def removal_of(self, node: int) -> tuple[int, int, tuple[int, ...]] | None:
        """Return (index, term, members) of the committed list without a node; None: it has it."""
        return self._state.removal_of(node)

    @property
    def able_followers(self) -> set[int]:
        """On a leader: the followers that could serve as leader."""
        followers = self._leader.dispatchers
        able = {peer for peer, one in followers.items() if one.able and not one.full}
        return able - self.silent_followers

    @property
    def silent_followers(self) -> set[int]:
        """On a leader: the followers that do not answer, or get no further: a put waits in vain."""
        followers = self._leader.dispatchers
        return {peer for peer, one in followers.items() if one.is_silent(self._now_ms)}

    @property
    def full_nodes(self) -> set[int]:
        """On a leader: the nodes that take no entries, as their disks are full; perhaps itself."""
        found = {peer for peer, one in self._leader.dispatchers.items() if one.full}
        return found | {self.node} if self._state.disk_full else found

    @property
    def refusals_to_lead(self) -> dict[int, str]:
        """On a leader: why followers cannot take over now; who is not there can."""
        return self._leader.refusals(self._now_ms)

    @property
    def waiting_entries(self) -> int:
        """How many entries of puts wait for a majority."""
        return self._leader.pending.entries

    def term_at(self, index: int) -> int | None:
        """Return the term of an entry of this log; None if it is not in it."""
        return self._state.log.term_at(index)

    def refusal(self) -> str | None:
        """Return why a put is refused now: a name of Code. None: the driver may append."""
        return self._leader.refusal()

    def saves_first(self, message: Message) -> bool:
        """Whether this node may have to save what a message says: a vote, term, list or cut."""
        if message.term > self._state.term or isinstance(message, _SAVED_FIRST):
            return True
        if isinstance(message, CommitRequest):
            return message.recall_index != NO_INDEX
        return isinstance(message, AppendRequest) and bool(message.members)

    # -- events ------------------------------------------------------------------------------------

    def step(self, event: Event) -> Update:
        """Take an event; return what the driver must do.

        Raises ValueError if the driver breaks the order: Start not first or twice, or Propose on a
        node that does not lead. Nothing that a peer sends raises.
        """
        update = Update()
        self._now_ms = max(self._now_ms, event.now_ms)
        late_ms = self._now_ms - self._due_ms
        if isinstance(event, Start):
            if self._started:
                raise ValueError("Start comes once")
            self._on_start(event, update)
        elif not self._started:
            raise ValueError(f"{type(event).__name__} came before Start")
        else:
            self._stored_end = self._state.ledger_end_index
            if late_ms > self.settings.heartbeat_interval_ms:
                self._woke()
            self._steps[type(event)](event, update)
        self._move(update)
        self._due_ms = update.deadline_ms = self._deadline_ms()
        return update

    def _woke(self) -> None:
        """Give the others' messages, which may lie unread, a moment: this process was paused."""
        grace_ms = self._now_ms + self.settings.heartbeat_interval_ms
        if self._state.is_leader:
            self._leader.grant_grace(self._now_ms, grace_ms)
        else:
            self._elector.grant_grace(grace_ms)

    def _on_start(self, event: Start, update: Update) -> None:
        self._started = True
        state = self._state = MemberState(self.node, event)
        self._stored_end = state.ledger_end_index
        self._elector = LeaderElector(state, self.settings, self._random)
        self._handler = EntryHandler(state)
        self._handler.begin_term()
        self._leader = Leader(state, self.settings, self._log_bytes)
        if (state.term, state.voted_for, state.remembers) != (
            event.hard_state.term,
            event.hard_state.voted_for,
            event.hard_state.remembers,
        ):
            state.save(update)
        if state.member_lists != event.member_lists:
            # A list that never came into the log, or was cut off, must not count at a later start,
            # when retention has removed what shows that.
            update.member_lists = state.member_lists
        self._elector.wait(self._now_ms)
        if state.members == (self.node,) and self._elector.may_campaign():
            self._campaign(update, pre=False)

    def _on_tick(self, event: Tick, update: Update) -> None:
        if self._state.is_leader or self._now_ms < self._elector.deadline_ms:
            return
        if self._elector.may_campaign():
            self._campaign(update, pre=self._state.members != (self.node,))
        else:
            self._elector.wait(self._now_ms)
            self._state.become(Role.FOLLOWER, None, update)

    def _on_receive(self, event: Receive, update: Update) -> None:
        message, peer = event.message, event.peer
        if peer == self.node:
            return
        try:
            check_message(message)
        except ProtocolError:
            return  # the link has reported it, and closes; no message of a peer may end this node
        if self._state.hangs and self.saves_first(message):
            return  # the driver would stand still; the peer sends it again when the sync returns
        if isinstance(message, VoteRequest):
            self._on_vote_request(peer, message, update)
        elif isinstance(message, _FROM_LEADER):
            self._on_leader_message(peer, message, update)
        elif peer in self._state.members or peer in self._leader.dispatchers:
            self._on_answer(peer, message, update)

    def _on_link(self, event: LinkChanged, update: Update) -> None:
        state, peer = self._state, event.peer
        if not event.up:
            state.down.add(peer)
            if state.role is Role.FOLLOWER and peer == state.leader:
                self._elector.lost_leader(self._now_ms)
            return
        state.down.discard(peer)
        if state.role is Role.CANDIDATE and peer in state.members:
            self._elector.ask(peer, update)
        self._leader.on_link_up(peer, self._now_ms, update)

    def _on_propose(self, event: Propose, update: Update) -> None:
        state = self._state
        if not state.is_leader or event.count < 1:
            raise ValueError(f"{event.count} entries were proposed to a {state.role.value}")
        self._leader.on_propose(event, self._now_ms, update)
        self._stored_end = state.ledger_end_index

    def _on_persisted(self, event: Persisted, update: Update) -> None:
        state = self._state
        if event.cuts is not None and event.cuts != state.cuts:
            update.flush = state.persisted_index < state.ledger_end_index
            return
        index = min(event.index, state.ledger_end_index)
        if index <= state.persisted_index:
            return
        state.persisted_index = index
        self._answer_late(update)

    def _on_disk_full(self, event: DiskFull, update: Update) -> None:
        self._state.disk_full = event.full

    def _on_blocked(self, event: ReplayBlocked, update: Update) -> None:
        if self._state.blocked != event.blocked:
            self._state.blocked = event.blocked
            self._elector.wait(self._now_ms)

    def _on_sync_hangs(self, event: SyncHangs, update: Update) -> None:
        state = self._state
        if state.hangs == event.hangs:
            return
        state.hangs = event.hangs
        self._elector.wait(self._now_ms)
        if state.role is Role.CANDIDATE:  # with a majority for it, it would save the next term
            self._follow(state.term, None, update)

    def _on_told_removed(self, event: ToldRemoved, update: Update) -> None:
        self._note_removal(event.removed, update)

    def _note_removal(self, told: tuple[int, int, tuple[int, ...]], update: Update) -> bool:
        """Stop asking for votes if a committed list has left out this node."""
        state = self._state
        if state.is_leader or state.hangs:  # it is told again, and cannot save that now
            return False
        if not state.note_removal(told, update):
            return False
        self._follow(state.term, None, update)
        return True

    def _on_retained(self, event: Retained, update: Update) -> None:
        self._state.retain(event.begin_index)

    def _on_transfer(self, event: Transfer, update: Update) -> None:
        self._leader.on_transfer(event, self._now_ms, update)

    def _on_change_members(self, event: ChangeMembers, update: Update) -> None:
        self._leader.on_change_members(event, self._now_ms, update)

    def _on_read(self, event: ReadIndex, update: Update) -> None:
        self._leader.on_read(event, self._now_ms, update)

    # -- votes -------------------------------------------------------------------------------------

    def _campaign(self, update: Update, *, pre: bool, transfer: bool = False) -> None:
        won = self._elector.campaign(self._now_ms, update, pre=pre, transfer=transfer)
        if won:
            self._lead(update)

    def _on_vote_request(self, peer: int, request: VoteRequest, update: Update) -> None:
        state = self._state
        if request.term > state.term and not request.transfer and self._has_leader():
            result = VoteResult.REJECT_ALREADY_HAS_LEADER
        else:
            if request.term > state.term and not request.pre:
                self._follow(request.term, None, update)
            result = self._elector.judge_vote(peer, request)
            if result is VoteResult.ACCEPT and not request.pre:
                state.vote(peer, update)
                state.become(Role.FOLLOWER, None, update)
                self._elector.pre = None
                self._elector.wait(self._now_ms)
        removed = state.removal_of(peer)
        answer = VoteResponse(state.term, request.term, request.pre, result, removed)
        self._send(peer, answer, update)

    def _has_leader(self) -> bool:
        """Whether a leader serves this node: itself with a majority, or one heard lately."""
        if self._state.is_leader:
            return not self._leader.is_cut_off(self._now_ms)
        return self._elector.hears_leader(self._now_ms)

    def _on_vote_response(self, peer: int, response: VoteResponse, update: Update) -> None:
        if not self._elector.count(peer, response):
            return
        if self._elector.pre:
            self._campaign(update, pre=False)
        else:
            self._lead(update)

    # -- leading -----------------------------------------------------------------------------------

    def _lead(self, update: Update) -> None:
        state = self._state
        self._elector.pre = None
        state.become(Role.LEADER, state.node, update)
        self._leader.begin(self._now_ms, update)

    def _on_answer(self, peer: int, message: Message, update: Update) -> None:
        state = self._state
        would_elect = (
            isinstance(message, VoteResponse)
            and message.pre
            and message.result is VoteResult.ACCEPT
        )
        if message.term > state.term and not would_elect:
            self._follow(message.term, None, update)
        if isinstance(message, VoteResponse):
            told = message.removed
            if told is not None and self._note_removal(told, update):
                return
            if state.role is Role.CANDIDATE:
                self._on_vote_response(peer, message, update)
        elif state.is_leader and message.term == state.term and peer in self._leader.dispatchers:
            assert isinstance(message, PushResponse | HeartBeatResponse)
            if message.code is Code.INCONSISTENT_LEADER:
                update.contradiction = f"node {peer} has another leader in term {state.term}"
            self._leader.on_answer(peer, message, self._now_ms, update)

    # -- following ---------------------------------------------------------------------------------

    def _follow(self, term: int, leader: int | None, update: Update) -> None:
        """Become a follower of this term, of a leader if it is known."""
        state = self._state
        led = state.is_leader
        if term > state.term:
            state.adopt_term(term, update)
        elif leader == state.leader and state.role is Role.FOLLOWER:
            return
        state.become(Role.FOLLOWER, leader, update)
        self._elector.pre = None
        self._handler.begin_term()
        if led:
            self._leader.stop(self._now_ms, update)
            self._elector.heard_leader_ms = None
            self._elector.wait(self._now_ms)

    def _on_leader_message(self, peer: int, message: Message, update: Update) -> None:
        state = self._state
        if message.term < state.term:
            self._refuse(peer, message, Code.EXPIRED_TERM, update)
            return
        if message.term == state.term and state.leader not in (None, peer):
            update.contradiction = f"nodes {state.leader} and {peer} lead term {state.term}"
            self._refuse(peer, message, Code.INCONSISTENT_LEADER, update)
            return
        self._follow(message.term, peer, update)
        committed = NO_INDEX
        if isinstance(message, HeartBeatRequest | CommitRequest | AppendRequest):
            committed = message.committed_index
        state.note_return(message.term, committed, update)
        self._elector.heard_leader(self._now_ms)
        if isinstance(message, TakeLeadership):
            if self._elector.may_campaign() and state.able:
                self._campaign(update, pre=False, transfer=True)
            elif state.disk_full or not state.able:
                answer = self._handler.answer(PushType.COMMIT, Code.DISK_FULL)
                self._send(peer, answer, update)
        elif isinstance(message, HeartBeatRequest):
            state.preferences = message.preferences
            self._handler.learn_committed(message.committed_index, update)
            beaten = self._beaten(message, Code.SUCCESS)
            self._send(peer, beaten, update)
        else:
            self._on_push(peer, message, update)
        self._answer_late(update)

    def _on_push(self, peer: int, message: Message, update: Update) -> None:
        handler, answers = self._handler, []
        if isinstance(message, CompareRequest):
            answers = handler.on_compare(message, update)
        elif isinstance(message, TruncateRequest):
            answers = [handler.on_truncate(message, update)]
        elif isinstance(message, InstallRequest):
            answers = [handler.on_install(message, update)]
        elif isinstance(message, CommitRequest):
            answers = [handler.on_commit(message, update)]
        elif isinstance(message, AppendRequest):
            answer = handler.on_append(message, update)
            answers = [] if answer is None else [answer]
        for one in answers:
            self._send(peer, one, update)

    def _answer_late(self, update: Update) -> None:
        """Tell the leader what has become durable since its APPENDs came."""
        state = self._state
        if state.role is Role.FOLLOWER and state.leader is not None:
            answer = self._handler.late_answer(update)
            if answer is not None:
                self._send(state.leader, answer, update)

    def _refuse(self, peer: int, message: Message, code: Code, update: Update) -> None:
        """Answer a leader's message with a code, and with this node's term."""
        if isinstance(message, HeartBeatRequest):
            self._send(peer, self._beaten(message, code), update)
        elif type(message) in _PUSH_TYPES:
            self._send(peer, self._handler.answer(_PUSH_TYPES[type(message)], code), update)

    def _beaten(self, request: HeartBeatRequest, code: Code) -> HeartBeatResponse:
        state = self._state
        return HeartBeatResponse(
            state.term, request.round, code, state.remembers,
            able=state.able, preferred=self.settings.preferred_leader or NO_NODE,
        )  # fmt: skip

    # -- after each event --------------------------------------------------------------------------

    def _send(self, peer: int, message: Message, update: Update) -> None:
        if peer not in self._state.down:
            update.messages.append((peer, message))

    def _move(self, update: Update) -> None:
        """Do what is due, whichever event came."""
        state = self._state
        self._leader.transfer.settle(self._now_ms, update)
        if state.is_leader and not self._leader.move(self._now_ms, self._stored_end, update):
            self._follow(state.term, None, update)

    def _deadline_ms(self) -> float:
        if self._state.is_leader:
            return self._leader.deadline_ms(self._now_ms)
        transfer = self._leader.transfer.deadline_ms()
        due = self._elector.deadline_ms
        return due if transfer is None else min(due, transfer)
