"""EntryHandler: how a follower takes the leader's pushes.

`matched_index` is the last entry that is known to be equal to the leader's in the current term; the
leader's log only grows during its term, so this never falls within a term and such an entry is
never cut. The follower answers an APPEND when its entries are durable, and names the last entry
that is both durable and matched. So duplicates, reordered and repeated pushes are harmless.
"""

from msgspec.structs import replace

from hastore.dledger.core.events import MemberList, TakenEntries, Update
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import (
    NO_INDEX,
    NO_TERM,
    AppendRequest,
    Code,
    CommitRequest,
    CompareRequest,
    InstallRequest,
    MemberSet,
    PushResponse,
    PushType,
    TruncateRequest,
)


class EntryHandler:
    """The follower's side of an EntryDispatcher."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self.matched_index = NO_INDEX
        self.leader_committed_index = NO_INDEX
        self._answered_index = NO_INDEX  # what the leader was told to be durable here
        self._unanswered = False  # entries were taken that were not durable at once
        self._term = NO_TERM

    def begin_term(self) -> None:
        """Forget what is known of the leader's log, if the term is another one.

        What is committed is in the log of every later leader. A last entry of this very term came
        from its leader, and all entries before it are equal too.
        """
        state = self._state
        if self._term != state.term:
            self._term = state.term
            same = state.ledger_end_term == state.term
            self.matched_index = state.ledger_end_index if same else state.committed_index
            self._answered_index = NO_INDEX
            self.leader_committed_index = NO_INDEX
            self._unanswered = False

    def answer(self, push: PushType, code: Code, index: int = NO_INDEX) -> PushResponse:
        """Return an answer with this log's begin and end."""
        state = self._state
        begin, end = state.log.begin_index, state.ledger_end_index
        if push is PushType.APPEND and code is Code.SUCCESS:
            self._answered_index = max(self._answered_index, index)
        return PushResponse(
            state.term, push, code, index, begin, end,
            remembers=state.remembers, able=state.able,
        )  # fmt: skip

    @property
    def durable_index(self) -> int:
        """The last entry that is durable here and equal to the leader's."""
        return min(self._state.persisted_index, self.matched_index)

    def on_compare(self, request: CompareRequest, update: Update) -> list[PushResponse]:
        """Say whether an entry is equal; if so, also what is durable."""
        log = self._state.log
        known = log.term_at(request.index)
        if known is None and request.index < log.begin_index:
            return [self.answer(PushType.COMPARE, Code.INDEX_OUT_OF_RANGE, request.index)]
        if known is not None and known == request.index_term:
            self._match(request.index, update)
            durable = self.answer(PushType.APPEND, Code.SUCCESS, self.durable_index)
            return [self.answer(PushType.COMPARE, Code.SUCCESS, request.index), durable]
        at = min(request.index, log.end_index)
        answer = self.answer(PushType.COMPARE, Code.INCONSISTENT_STATE, request.index)
        hint_term = log.term_at(at)
        hint = NO_TERM if hint_term is None else hint_term
        first = log.first_of_term(at)
        return [replace(answer, hint_term=hint, hint_index=first)]

    def on_truncate(self, request: TruncateRequest, update: Update) -> PushResponse:
        """Cut the log, unless that removes a committed entry or one that the leader has."""
        state = self._state
        log = state.log
        kept = max(state.committed_index, self.matched_index, log.begin_index - 1)
        same = request.index_term != NO_TERM and log.term_at(request.index) == request.index_term
        fits = log.term_at(request.index - 1) == request.prev_term
        if request.index > log.end_index and fits:
            self._match(request.index - 1, update)
            return self.answer(PushType.TRUNCATE, Code.SUCCESS, request.index - 1)
        if request.index <= kept or same or log.end_term == request.term or not fits:
            return self.answer(PushType.TRUNCATE, Code.INCONSISTENT_STATE, request.index - 1)
        state.truncate(request.index, update)
        self._match(request.index - 1, update)
        return self.answer(PushType.TRUNCATE, Code.SUCCESS, request.index - 1)

    def on_install(self, request: InstallRequest, update: Update) -> PushResponse:
        """Begin an empty log, unless this log has entries that the leader has."""
        state = self._state
        index = request.index
        if state.log.term_at(index - 1) == request.prev_term:
            self._match(index - 1, update)
            return self.answer(PushType.INSTALL, Code.SUCCESS, index - 1)
        if index - 1 <= max(state.committed_index, self.matched_index):
            return self.answer(PushType.INSTALL, Code.INCONSISTENT_STATE, index - 1)
        group = MemberSet(request.members, request.learners, request.leaving)
        state.install(index, request.pos, request.prev_term, group, update)
        self._match(index - 1, update)
        return self.answer(PushType.INSTALL, Code.SUCCESS, index - 1)

    def on_append(self, request: AppendRequest, update: Update) -> PushResponse | None:
        """Take what is new of a batch; the answer follows when it is durable (on_persisted)."""
        state = self._state
        log = state.log
        prev = log.term_at(request.prev_index)
        gone = request.prev_index < log.begin_index - 1  # committed and removed: equal
        if not gone and prev != request.prev_term:
            return self.answer(PushType.APPEND, Code.INCONSISTENT_STATE, request.prev_index)
        last = request.prev_index + sum(count for _, count in request.runs)
        new = max(request.prev_index, log.end_index) + 1
        first = max(request.prev_index + 1, log.begin_index)
        if first <= min(last, log.end_index):
            known = log.runs(first, min(last, log.end_index))
            if known != _part(request, first, min(last, log.end_index)):
                return self.answer(PushType.APPEND, Code.INCONSISTENT_STATE, request.prev_index)
        if new <= last:
            if state.disk_full:
                return self.answer(PushType.APPEND, Code.DISK_FULL, request.prev_index)
            self._append_taken(request, new, last, update)
            self._match(last, update)
            self.learn_committed(request.committed_index, update)
            return None
        self._match(last, update)
        self.learn_committed(request.committed_index, update)
        return self.answer(PushType.APPEND, Code.SUCCESS, self.durable_index)

    def _append_taken(self, request: AppendRequest, first: int, last: int, update: Update) -> None:
        state = self._state
        for term, count in _part(request, first, last):
            state.log.append(term, count)
        update.append.append(TakenEntries(first - request.prev_index - 1, last))
        update.flush = True
        self._unanswered = True
        for index, group in request.member_sets():
            term_at = state.log.term_at(index)
            if first <= index <= last and term_at is not None:
                state.add_member_list(MemberList(index, term_at, *group), update)

    def on_commit(self, request: CommitRequest, update: Update) -> PushResponse:
        """Learn what is committed, and perhaps that this node remembers again.

        DISK_FULL says that this node could not lead: without puts no APPEND tells it. A leader of a
        version without `able` takes it for a full disk, and so does not hand over to this node.
        """
        state = self._state
        self.learn_committed(request.committed_index, update)
        recall = request.recall_index
        if not state.remembers and recall != NO_INDEX and self.durable_index >= recall:
            # In this term it may have voted for its leader or another before it lost its disk. A
            # vote that it knows stays: it has lost other files only.
            state.remembers = True
            if state.voted_for is None:
                state.voted_for = state.leader
            state.save(update)
        # The leader sends this only to a follower that it believes to have everything.
        lacks = self.matched_index < request.committed_index
        room = Code.DISK_FULL if state.disk_full or not state.able else Code.SUCCESS
        code = Code.INCONSISTENT_STATE if lacks else room
        return self.answer(PushType.COMMIT, code, state.committed_index)

    def late_answer(self, update: Update) -> PushResponse | None:
        """Answer the APPENDs whose entries have become durable; None: nothing new."""
        self._advance(update)
        durable = self.durable_index
        if not self._unanswered or durable <= self._answered_index:
            return None
        self._unanswered = durable < self.matched_index
        return self.answer(PushType.APPEND, Code.SUCCESS, durable)

    def _match(self, index: int, update: Update) -> None:
        self.matched_index = max(self.matched_index, index)
        self._advance(update)

    def learn_committed(self, index: int, update: Update) -> None:
        """Take the leader's committed index; what is durable and equal here is committed."""
        self.leader_committed_index = max(self.leader_committed_index, index)
        self._advance(update)

    def _advance(self, update: Update) -> None:
        self._state.commit(min(self.leader_committed_index, self.durable_index), update)


def _part(request: AppendRequest, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of the entries `first` to `last` of a request."""
    part = []
    begin = request.prev_index + 1
    for term, count in request.runs:
        low, high = max(begin, first), min(begin + count - 1, last)
        if low <= high:
            part.append((term, high - low + 1))
        begin += count
    return tuple(part)
