"""EntryDispatcher: how the leader brings one follower's log in line with its own.

    COMPARE    looks for the last entry that is equal in both logs, first at the leader's end
    TRUNCATE   the follower has other entries behind that one: it must remove them
    INSTALL    the leader has removed what the follower lacks: it must begin an empty log
    APPEND     sends entries, many in flight
    COMMIT     the follower has all; only the committed index is sent

Every dispatcher begins with COMPARE: when the node becomes leader, when the link to the follower is
opened, when the follower answers INCONSISTENT_STATE, and when its log has become shorter. A refused
COMPARE names the term of the follower's entry and that term's first index. The leader's last entry
of at most this term is the next candidate, so each question skips a term, not an entry. After
QUESTIONS_BY_TERM questions the range that is left is halved instead: a match at one index is a
match at all before it.

Invariants: `match_index` < `write_index` <= the log's end + 1 in APPEND and COMMIT. What is in
`pending` is below `write_index`, in order. In COMPARE `_low` is equal in both logs (or is before
the leader's log), `_high` is not equal.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from hastore.dledger.core.events import Settings, Update
from hastore.dledger.core.member_state import MemberState
from hastore.protocol.dledger import (
    NO_INDEX,
    NO_NODE,
    NO_TERM,
    AppendRequest,
    Code,
    CommitRequest,
    CompareRequest,
    InstallRequest,
    PushResponse,
    PushType,
    TruncateRequest,
    wire_lists,
)

ENTRY_BYTES_ASSUMED = 1024  # without a function that knows
OWN_ENTRY_BYTES = 256  # of entries that the core has appended in this very step
RUNS_MAX = 512  # in one APPEND: its control frame has at most 64 KiB
# An idle follower learns the committed index this late, unless readers wait there; else APPEND
# tells it.
COMMIT_DELAY_MS = 10
QUESTIONS_BY_TERM = 6
COMPARES_AT_ONCE = 3  # without progress; then they wait, so that two nodes never spin

LogBytes = Callable[[int, int], int]


class PushState(Enum):
    """What a dispatcher does now."""

    COMPARE = "COMPARE"
    TRUNCATE = "TRUNCATE"
    INSTALL = "INSTALL"
    APPEND = "APPEND"
    COMMIT = "COMMIT"


@dataclass(slots=True)
class PendingPush:
    """An APPEND without an answer: its entries, its bytes, and when it was sent."""

    first: int
    last: int
    size: int
    sent_ms: float


class EntryDispatcher:
    """The leader's pushes to one follower."""

    def __init__(
        self, peer: int, state: MemberState, settings: Settings, log_bytes: LogBytes, now_ms: float
    ) -> None:
        self.peer = peer
        self._own = state
        self._settings = settings
        self._log_bytes = log_bytes
        self.heard_ms = now_ms  # of the last answer in this term, or of this object's begin
        self.answered_ms = now_ms  # the same, also of one that has lost its disk and copies the log
        self.answered = False  # in this term, with what it remembers
        self.match_index = NO_INDEX  # the last entry that the follower has durably
        self.full = False  # the follower's disk
        self.able = True  # False: the follower's replay has stopped, or its disk hangs
        self.readers = False  # readers wait at the follower
        self.preferred = NO_NODE  # whom the follower prefers as leader; it may be of a version
        # that does not say it
        self._follower_begin = 0
        self._follower_end: int | None = None
        self._compares = 0  # without progress
        self.state = PushState.COMPARE
        self.write_index = 0
        self.pending: deque[PendingPush] = deque()
        self._pending_bytes = 0
        self._probing = False
        self._wait_until_ms = now_ms
        self._told_committed = NO_INDEX
        self._commit_due_ms: float | None = None
        self._last_sent_ms = now_ms
        self._progress_ms = now_ms  # when the follower last had more
        self._behind_ms: float | None = None  # since when it lacks entries, and gets no further
        self.recall_index: int | None = None  # ends the quarantine of a node that lost its disk
        self._begin_compare(self._before_term(), now_ms)

    # -- COMPARE, TRUNCATE, INSTALL ----------------------------------------------------------------

    def restart(self, now_ms: float) -> None:
        """Begin with COMPARE: the link to the follower was opened anew."""
        self._compares = 0
        self._begin_compare(max(self.match_index, self._before_term()), now_ms)

    def _before_term(self) -> int:
        """Return the last entry before the leader's term: others can have no later one at first."""
        return self._own.log.first_of_term(self._own.ledger_end_index) - 1

    def _begin_compare(self, index: int, now_ms: float) -> None:
        log = self._own.log
        self.state = PushState.COMPARE
        self._drop_pending()
        self._asked_ms: float | None = None
        self._questions = 0
        self._low = NO_INDEX if log.begin_index == 0 else log.begin_index - 2
        self._high = log.end_index + 1
        self._compares += 1
        if self._compares > COMPARES_AT_ONCE:
            self._wait_until_ms = now_ms + self._settings.resend_ms
        self.compare_index = max(min(index, log.end_index), log.begin_index - 1)

    def _on_compare(self, response: PushResponse, now_ms: float) -> None:
        if self.state is not PushState.COMPARE or response.index != self.compare_index:
            return
        if self._asked_ms is None:
            return
        log = self._own.log
        asked, end = self.compare_index, response.end_index
        self._follower_begin, self._follower_end = response.begin_index, end
        if response.code is Code.SUCCESS:
            self._low = max(self._low, asked)
            candidate = min(log.end_index, end, self._high - 1)
        elif response.code is Code.INCONSISTENT_STATE:
            self._high = min(self._high, asked, end + 1)
            found = log.last_at_most(response.hint_term, self._high - 1)
            candidate = log.begin_index - 2 if found is None else found
            if log.term_at(candidate) != response.hint_term and response.hint_index >= 0:
                # From hint_index on the follower has a term that this log does not have.
                candidate = max(min(candidate, response.hint_index - 1), log.begin_index - 2)
            self._high = min(self._high, candidate + 1)
        else:
            self._begin_compare(end, now_ms)
            return
        if log.begin_index <= self._high <= self._low:  # an answer that contradicts an earlier one
            self._begin_compare(end, now_ms)
            return
        self._ask_next(candidate, now_ms)

    def _ask_next(self, candidate: int, now_ms: float) -> None:
        log = self._own.log
        if self._high < log.begin_index:
            self._go(PushState.INSTALL, log.begin_index, now_ms)
            return
        if candidate <= self._low:
            behind = self._follower_end is not None and self._follower_end > self._low
            state = PushState.TRUNCATE if behind else PushState.APPEND
            self._go(state, self._low + 1, now_ms)
            return
        self._questions += 1
        if self._questions > QUESTIONS_BY_TERM:
            middle = (self._low + candidate + 1) // 2
            candidate = min(max(middle, self._follower_begin - 1), candidate)
        self.compare_index = max(candidate, log.begin_index - 1)
        self._asked_ms = None

    def _go(self, state: PushState, write_index: int, now_ms: float) -> None:
        self.state = state
        self.write_index = write_index
        self._asked_ms = None
        self._probing = False
        self._drop_pending()
        if state is PushState.APPEND:
            self._commit_due_ms = now_ms

    def _request(self) -> CompareRequest | TruncateRequest | InstallRequest:
        term, log, index = self._own.term, self._own.log, self.write_index
        if self.state is PushState.COMPARE:
            compare_term = log.term_at(self.compare_index)
            return CompareRequest(term, self.compare_index, _or_none(compare_term))
        prev_term = _or_none(log.term_at(index - 1))
        if self.state is PushState.TRUNCATE:
            return TruncateRequest(term, index, prev_term, _or_none(log.term_at(index)))
        return InstallRequest(term, index, 0, prev_term, *self._own.group_at(index - 1))

    # -- APPEND and COMMIT -------------------------------------------------------------------------

    def is_silent(self, now_ms: float) -> bool:
        """Whether a put would wait for this follower in vain, though its link may be open.

        For append_timeout_ms it has not answered, or has got no further with what it lacks: its
        disk hangs, for example.
        """
        since_ms = self.answered_ms
        if self._behind_ms is not None:
            since_ms = min(since_ms, self._behind_ms)
        return now_ms - since_ms > self._settings.append_timeout_ms

    def takes(self, now_ms: float) -> bool:
        """Whether the follower's disk takes entries, as far as it is known."""
        return not self.full and not self.is_silent(now_ms)

    def pump(self, now_ms: float, stored_end: int, update: Update) -> None:
        """Send what is due. Entries behind `stored_end` get into the store after this step."""
        if self.match_index >= self._own.ledger_end_index:
            self._behind_ms = None
        elif self._behind_ms is None:
            self._behind_ms = now_ms
        if self.peer in self._own.down or now_ms < self._wait_until_ms:
            return
        if self.pending and now_ms >= self._resend_ms():
            self._go_back()
        if self._overtaken():
            self._begin_compare(self._own.ledger_end_index, now_ms)
        if self.state in (PushState.COMPARE, PushState.TRUNCATE, PushState.INSTALL):
            resend_ms = self._settings.resend_ms
            if self._asked_ms is None or now_ms >= self._asked_ms + resend_ms:
                self._asked_ms = now_ms
                self._send(self._request(), now_ms, update)
            return
        while self._has_room():
            self._append(now_ms, stored_end, update)
        idle = not self.pending
        self.state = PushState.COMMIT if idle else PushState.APPEND
        if idle:
            self._commit(now_ms, update)

    def _overtaken(self) -> bool:
        """Whether retention has removed what must be sent or asked next."""
        begin = self._own.log.begin_index
        if self.state is PushState.COMPARE:
            return self.compare_index < begin - 1
        if self.state is PushState.INSTALL:
            return self.write_index != begin
        return self.write_index < begin

    def _has_room(self) -> bool:
        if self.write_index > self._own.ledger_end_index:
            return False
        if self._probing:
            return not self.pending
        settings = self._settings
        few = len(self.pending) < settings.in_flight_pushes
        return few and self._pending_bytes < settings.in_flight_bytes

    def _append(self, now_ms: float, stored_end: int, update: Update) -> None:
        own, first = self._own, self.write_index
        last, size = self._batch(first, own.ledger_end_index, stored_end)
        runs = own.log.runs(first, last)
        if len(runs) > RUNS_MAX:
            runs = runs[:RUNS_MAX]
            last = first + sum(count for _, count in runs) - 1
        lists = [one for one in own.member_lists if first <= one.index <= last]
        prev_term = _or_none(own.log.term_at(first - 1))
        committed = own.committed_index
        request = AppendRequest(
            own.term, first - 1, prev_term, 0, 0, runs, committed,
            *wire_lists((one.index, one.group) for one in lists),
        )  # fmt: skip
        self.pending.append(PendingPush(first, last, size, now_ms))
        self._pending_bytes += size
        self.write_index = last + 1
        self._told(committed)
        self._send(request, now_ms, update)

    def _batch(self, first: int, end: int, stored_end: int) -> tuple[int, int]:
        """Return the last entry of a batch of at most batch_bytes, and its size; at least one."""
        limit = self._settings.batch_bytes
        size = self._size(first, end, stored_end)
        if size <= limit or first == end:
            return end, size
        low, high = first, end  # the last entry is in low..high-1; low fits, or is the only one
        while high - low > 1:
            middle = (low + high) // 2
            if self._size(first, middle, stored_end) <= limit:
                low = middle
            else:
                high = middle
        return low, self._size(first, low, stored_end)

    def _size(self, first: int, last: int, stored_end: int) -> int:
        stored = self._log_bytes(first, min(last, stored_end)) if first <= stored_end else 0
        return stored + max(last - max(stored_end, first - 1), 0) * OWN_ENTRY_BYTES

    def _commit(self, now_ms: float, update: Update) -> None:
        committed = self._own.committed_index
        if committed > self._told_committed:
            if self.readers:
                self._commit_due_ms = now_ms
            elif self._commit_due_ms is None:
                self._commit_due_ms = now_ms + COMMIT_DELAY_MS
        due = self._commit_due_ms is not None and now_ms >= self._commit_due_ms
        if due or now_ms >= self._last_sent_ms + self._settings.resend_ms:
            recall = NO_INDEX
            if self.recall_index is not None and self.recall_index <= committed:
                recall = self.recall_index
            self._told(committed)
            self._send(CommitRequest(self._own.term, committed, recall), now_ms, update)

    def _told(self, committed: int) -> None:
        self._told_committed = committed
        self._commit_due_ms = None

    def end_quarantine(self, update: Update) -> None:
        """Tell a follower that has everything up to `recall_index`, which is committed.

        At once: under load the follower never has everything, and gets no other CommitRequest.
        """
        recall = self.recall_index
        if recall is not None and self.peer not in self._own.down:
            update.messages.append((self.peer, CommitRequest(self._own.term, recall, recall)))

    def _send(
        self,
        request: CompareRequest | TruncateRequest | InstallRequest | AppendRequest | CommitRequest,
        now_ms: float,
        update: Update,
    ) -> None:
        self._last_sent_ms = now_ms
        update.messages.append((self.peer, request))

    def _drop_pending(self) -> None:
        self.pending.clear()
        self._pending_bytes = 0

    # -- answers -----------------------------------------------------------------------------------

    def on_response(self, response: PushResponse, now_ms: float) -> None:
        """Take an answer of this term to a push."""
        self.readers = response.readers
        if response.push is PushType.COMMIT:
            self._on_commit(response, now_ms)
        elif response.code is Code.DISK_FULL:
            self._on_disk_full(now_ms)
        elif response.push is PushType.COMPARE:
            self._on_compare(response, now_ms)
        elif response.push is PushType.APPEND:
            self._on_append(response, now_ms)
        else:
            self._on_cut(response, now_ms)

    def is_sending(self) -> bool:
        """Whether the logs are compared, and the follower takes entries."""
        return self.state in (PushState.APPEND, PushState.COMMIT)

    def _on_commit(self, response: PushResponse, now_ms: float) -> None:
        """Take the answer of a follower that was believed to have everything."""
        if response.code in (Code.SUCCESS, Code.DISK_FULL):
            self.full = response.code is Code.DISK_FULL and response.able
            lost = response.end_index < self.match_index
        else:
            lost = True
        if lost and self.is_sending():
            self._lost_entries(response, now_ms)

    def _on_disk_full(self, now_ms: float) -> None:
        self.full = True
        self._wait_until_ms = now_ms + self._settings.resend_ms
        if self.pending:
            self._go_back()

    def _go_back(self) -> None:
        """Send what has no answer again, one batch at a time until there is an answer."""
        self.write_index = self.pending[0].first
        self._drop_pending()
        self._probing = True

    def _on_append(self, response: PushResponse, now_ms: float) -> None:
        if response.code is Code.SUCCESS:
            index = response.index
            if index > self.match_index:
                self.match_index = index
                self._compares = 0
                self._progress_ms = now_ms
                self._behind_ms = None
            while self.pending and self.pending[0].last <= index:
                self._pending_bytes -= self.pending.popleft().size
                self._probing = False
                self.full = False
            if self.is_sending():
                self.write_index = max(self.write_index, index + 1)
        elif self.is_sending():
            self._lost_entries(response, now_ms)

    def _lost_entries(self, response: PushResponse, now_ms: float) -> None:
        self._follower_end = response.end_index
        self.match_index = min(self.match_index, response.end_index)
        self._begin_compare(response.end_index, now_ms)

    def _on_cut(self, response: PushResponse, now_ms: float) -> None:
        """Take the answer to TRUNCATE or INSTALL."""
        if response.push.name != self.state.name:
            return
        if self._asked_ms is None or response.index != self.write_index - 1:
            return
        self._follower_end = response.end_index
        if response.code is Code.SUCCESS:
            self._go(PushState.APPEND, self.write_index, now_ms)
        else:
            self._begin_compare(response.end_index, now_ms)

    def _resend_ms(self) -> float:
        return max(self.pending[0].sent_ms, self._progress_ms) + self._settings.resend_ms

    def deadline_ms(self) -> float | None:
        """Return when `pump` has something to do, unless something else happens before."""
        if self.peer in self._own.down:
            return None
        resend_ms = self._settings.resend_ms
        if not self.is_sending():
            due = self._wait_until_ms if self._asked_ms is None else self._asked_ms + resend_ms
        elif self.pending:
            due = self._resend_ms()
        else:
            due = self._last_sent_ms + resend_ms
            if self._commit_due_ms is not None:
                due = min(due, self._commit_due_ms)
        return max(due, self._wait_until_ms)


def _or_none(term: int | None) -> int:
    return NO_TERM if term is None else term


def split_append(request: AppendRequest, count: int) -> tuple[AppendRequest, AppendRequest]:
    """Return an APPEND of the first `count` entries, and one of the rest; both have some.

    For a driver whose messages must be smaller than what the core has put into one. `pos` and
    `size` are 0 in both.
    """
    first: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    left, prev_term = count, request.prev_term
    for term, number in request.runs:
        taken = min(left, number)
        if taken:
            first.append((term, taken))
            prev_term = term
        if number > taken:
            rest.append((term, number - taken))
        left -= taken
    if not first or not rest:
        raise ValueError(f"{count} of the entries {request.runs} leave no two parts")
    last = request.prev_index + count
    whole = replace(request, pos=0, size=0)
    return (
        replace(
            whole,
            runs=tuple(first),
            members=tuple(one for one in request.members if one[0] <= last),
            learners=tuple(one for one in request.learners if one[0] <= last),
        ),
        replace(
            whole,
            prev_index=last,
            prev_term=prev_term,
            runs=tuple(rest),
            members=tuple(one for one in request.members if one[0] > last),
            learners=tuple(one for one in request.learners if one[0] > last),
        ),
    )
