"""What the nodes of a DLedger group tell each other. Pure: bytes in, messages out.

The names are DLedger's. Every message has its sender's term, so that it can be put in order;
`index` is the number of an entry, from 0, and -1 where there is none. All travel over the `ha` port
after a HELLO of purpose DLEDGER, framed as the HA link is (docs/dledger.md).

`check_message` knows which numbers a message can have. A link closes if it receives another one
(dledger_link.py); the core ignores it. Where the bytes of an append lie is checked by the link
alone.
"""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

import msgspec

from hastore.errors import ProtocolError

NO_INDEX = -1
NO_TERM = -1
NO_NODE = 0


class Code(Enum):
    """The outcome of a push or a heart beat, with DLedger's numbers."""

    SUCCESS = 200
    EXPIRED_TERM = 403
    NOT_LEADER = 404
    INCONSISTENT_STATE = 406
    INCONSISTENT_LEADER = 409
    INDEX_OUT_OF_RANGE = 410
    DISK_FULL = 415
    FALL_BEHIND_TOO_MUCH = 417
    LEADER_PENDING_FULL = 503
    LEADER_TRANSFERRING = 506


class VoteResult(Enum):
    """The answer to a request for a vote, with DLedger's names."""

    ACCEPT = "ACCEPT"
    REJECT_UNKNOWN_LEADER = "REJECT_UNKNOWN_LEADER"
    REJECT_EXPIRED_VOTE_TERM = "REJECT_EXPIRED_VOTE_TERM"
    REJECT_ALREADY_VOTED = "REJECT_ALREADY_VOTED"
    REJECT_ALREADY_HAS_LEADER = "REJECT_ALREADY_HAS_LEADER"
    REJECT_TERM_NOT_READY = "REJECT_TERM_NOT_READY"
    REJECT_EXPIRED_LEDGER_TERM = "REJECT_EXPIRED_LEDGER_TERM"
    REJECT_SMALL_LEDGER_END_INDEX = "REJECT_SMALL_LEDGER_END_INDEX"
    REJECT_FORGOTTEN = "REJECT_FORGOTTEN"  # the voter does not remember its votes (a wiped disk)


class MemberSet(NamedTuple):
    """Who belongs to a group.

    `members` elect and count. `learners` get the log and do neither, until the leader makes them
    members. `leaving` is the member that a learner replaces: the leader removes it.
    """

    members: tuple[int, ...]
    learners: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


WireMembers = tuple[tuple[int, tuple[int, ...]], ...]
WireLearners = tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


def wire_lists(lists: Iterable[tuple[int, MemberSet]]) -> tuple[WireMembers, WireLearners]:
    """Return `members` and `learners` of an AppendRequest with these (index, member list)."""
    known = tuple(lists)
    return (
        tuple((index, group.members) for index, group in known),
        tuple(
            (index, group.learners, group.leaving)
            for index, group in known
            if group.learners or group.leaving
        ),
    )


class VoteRequest(msgspec.Struct, frozen=True, tag="vote"):
    """Ask for a vote in `term`; with `pre` only whether it would be given (pre-vote)."""

    term: int
    pre: bool
    ledger_end_index: int
    ledger_end_term: int
    transfer: bool = False  # the leader asked this candidate to take over: no lease protects it


class VoteResponse(msgspec.Struct, frozen=True, tag="voted"):
    """The answer to a VoteRequest of `request_term`."""

    term: int  # the voter's own
    request_term: int
    pre: bool
    result: VoteResult
    # (index, term, members) of the last list that the voter knows to be committed, if it leaves out
    # the receiver; also sent without a request, to the nodes that a change has removed.
    removed: tuple[int, int, tuple[int, ...]] | None = None


class HeartBeatRequest(msgspec.Struct, frozen=True, tag="beat"):
    """The leader is alive. `round` numbers the heart beats of a leader, for reads by quorum.

    If members prefer different leaders, `preferences` are (member, whom it prefers), else nothing.
    """

    term: int
    round: int
    committed_index: int
    preferences: tuple[tuple[int, int], ...] = ()


class HeartBeatResponse(msgspec.Struct, frozen=True, tag="beaten"):
    """The answer to a HeartBeatRequest."""

    term: int
    round: int
    code: Code
    remembers: bool = True  # False: the node has lost its disk; the answer counts for nothing
    able: bool = True  # False: it could not serve as leader, as its replay has stopped
    preferred: int = NO_NODE  # whom it prefers as leader, by its configuration


class CompareRequest(msgspec.Struct, frozen=True, tag="compare"):
    """Does the follower's entry `index` have the term `index_term`?

    `crc` is the CRC-32 of the leader's entry, None if it has none at `index`, or a damaged one: two
    entries of one index and term must be the same bytes.
    """

    term: int
    index: int
    index_term: int
    crc: int | None = None


class TruncateRequest(msgspec.Struct, frozen=True, tag="truncate"):
    """Remove the entries from `index` on; the entry before has `prev_term` on both sides.

    `index_term` is the term of the leader's entry at `index`. A follower whose entry there has the
    same term has the leader's entry, and keeps it: the request is an old one.
    """

    term: int
    index: int
    prev_term: int
    index_term: int = NO_TERM


class AppendRequest(msgspec.Struct, frozen=True, tag="append"):
    """Entries that follow `prev_index`. Their bytes, `size` of them from `pos` on, come after it.

    `runs` are (term, number of entries), in order; the sum of the numbers is at least 1.
    `members` are (index, members) of the entries among them that are member lists, and `learners`
    (index, learners, leaving) of those of them that have any: an earlier version does not know it,
    and refuses such an entry.
    """

    term: int
    prev_index: int
    prev_term: int
    pos: int
    size: int
    runs: tuple[tuple[int, int], ...]
    committed_index: int
    members: WireMembers = ()
    learners: WireLearners = ()

    def member_sets(self) -> list[tuple[int, MemberSet]]:
        """Return (index, member list) of the entries that are member lists."""
        more = {index: both for index, *both in self.learners}
        return [(index, MemberSet(one, *more.get(index, ()))) for index, one in self.members]


class CommitRequest(msgspec.Struct, frozen=True, tag="commit"):
    """What the leader has committed; also the heart beat of an idle EntryDispatcher.

    With `recall_index` it ends the quarantine of a node that has lost its disk, if the node has
    all entries up to this index (docs/dledger.md).
    """

    term: int
    committed_index: int
    recall_index: int = NO_INDEX


class InstallRequest(msgspec.Struct, frozen=True, tag="install"):
    """The leader has removed what this follower lacks: begin an empty log at `index`, `pos`.

    `prev_term` is the term of the entry before it; the member list that counts there is in
    `members`, `learners` and `leaving`.
    """

    term: int
    index: int
    pos: int
    prev_term: int
    members: tuple[int, ...]
    learners: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


class PushType(Enum):
    """Which push a PushResponse answers."""

    COMPARE = "compare"
    TRUNCATE = "truncate"
    APPEND = "append"
    COMMIT = "commit"
    INSTALL = "install"


class PushResponse(msgspec.Struct, frozen=True, tag="pushed"):
    """The answer to a push.

    `index` is, for APPEND, the last entry that is durable here and equal to the leader's; for
    COMPARE, the index that was asked for. A refused COMPARE names in `hint_term` the term of this
    node's entry at `index` (of its last entry, if its log is shorter), and in `hint_index` the
    first entry of that term: the leader goes back by a term, not by an entry.
    """

    term: int
    push: PushType
    code: Code
    index: int
    begin_index: int
    end_index: int
    hint_term: int = NO_TERM
    hint_index: int = NO_INDEX
    remembers: bool = True  # False: the node has lost its disk; what it has does not count yet
    able: bool = True  # as in HeartBeatResponse
    readers: bool = False  # readers wait for what is committed next


class TakeLeadership(msgspec.Struct, frozen=True, tag="take"):
    """The leader hands over: the receiver starts an election at once."""

    term: int


Message = (
    VoteRequest
    | VoteResponse
    | HeartBeatRequest
    | HeartBeatResponse
    | CompareRequest
    | TruncateRequest
    | AppendRequest
    | CommitRequest
    | InstallRequest
    | PushResponse
    | TakeLeadership
)


TERM_MAX = (1 << 62) - 1  # a term has 8 bytes on the disk, signed
INDEX_MAX = (1 << 58) - 1  # an entry's index unit lies at 32 times its index
INT64_MAX = (1 << 63) - 1
CRC_MAX = (1 << 32) - 1
MEMBERS_MAX = 1024
NODE_MAX = 65_535


def check_message(message: Message) -> None:
    """Raise ProtocolError if a number is outside its range, or contradicts another."""
    check_range("term", message.term, 0, TERM_MAX)
    if isinstance(message, AppendRequest):
        _check_append(message)
    elif isinstance(message, PushResponse):
        _check_answer(message)
    elif isinstance(message, VoteRequest):
        check_range("term", message.term, 1, TERM_MAX)
        _check_index("ledger_end_index", message.ledger_end_index)
        check_range("ledger_end_term", message.ledger_end_term, NO_TERM, message.term)
    elif isinstance(message, VoteResponse):
        check_range("request_term", message.request_term, 0, TERM_MAX)
        if message.removed is not None:
            index, term, members = message.removed
            check_range("index", index, 0, INDEX_MAX)
            check_range("term", term, 0, TERM_MAX)
            _check_members(MemberSet(members))
    elif isinstance(message, HeartBeatRequest):
        check_range("round", message.round, 1, INT64_MAX)
        _check_index("committed_index", message.committed_index)
        check_range("number of preferences", len(message.preferences), 0, MEMBERS_MAX)
        for pair in message.preferences:
            for member in pair:
                check_range("member", member, 1, NODE_MAX)
    elif isinstance(message, HeartBeatResponse):
        check_range("round", message.round, 1, INT64_MAX)
        check_range("preferred", message.preferred, NO_NODE, NODE_MAX)
    elif isinstance(message, CommitRequest):
        _check_index("committed_index", message.committed_index)
        _check_index("recall_index", message.recall_index)
    elif isinstance(message, CompareRequest):
        _check_index("index", message.index)
        check_range("index_term", message.index_term, NO_TERM, message.term)
        check_range("crc", message.crc or 0, 0, CRC_MAX)
    elif isinstance(message, TruncateRequest):
        check_range("index", message.index, 0, INDEX_MAX)
        check_range("prev_term", message.prev_term, NO_TERM, message.term)
        check_range("index_term", message.index_term, NO_TERM, message.term)
    elif isinstance(message, InstallRequest):
        check_range("index", message.index, 0, INDEX_MAX)
        check_range("pos", message.pos, 0, INT64_MAX)
        check_range("prev_term", message.prev_term, NO_TERM, message.term)
        _check_members(MemberSet(message.members, message.learners, message.leaving))


def check_range(name: str, value: int, least: int, most: int) -> None:
    """Raise ProtocolError, which names the number, if it is outside `least`..`most`."""
    if not least <= value <= most:
        raise ProtocolError(f"{name} {value} is outside {least}..{most}")


def _check_index(name: str, index: int) -> None:
    check_range(name, index, NO_INDEX, INDEX_MAX)


def _check_append(request: AppendRequest) -> None:
    _check_index("prev_index", request.prev_index)
    _check_index("committed_index", request.committed_index)
    if not request.runs:
        raise ProtocolError("an append without entries")
    check_range("prev_term", request.prev_term, NO_TERM, request.term)
    last, entries = request.prev_term, 0
    for term, count in request.runs:
        check_range("count", count, 1, INDEX_MAX)
        rises = term > last if entries else term >= max(last, 0)
        if not rises or term > request.term:
            raise ProtocolError(
                f"an append of term {request.term} with entries of term {term} after {last}"
            )
        last, entries = term, entries + count
    check_range("index of the last entry", request.prev_index + entries, 0, INDEX_MAX)
    lists = {index for index, _ in request.members}
    if not lists.issuperset(one[0] for one in request.learners):
        raise ProtocolError("an append with learners of an entry that is no member list")
    for index, members in request.member_sets():
        check_range("index of a member list", index - request.prev_index, 1, entries)
        _check_members(members)


def _check_answer(response: PushResponse) -> None:
    _check_index("index", response.index)
    check_range("end_index", response.end_index, NO_INDEX, INDEX_MAX - 1)
    check_range("begin_index", response.begin_index, 0, response.end_index + 1)
    check_range("hint_term", response.hint_term, NO_TERM, TERM_MAX)
    _check_index("hint_index", response.hint_index)


def _check_members(group: MemberSet) -> None:
    check_range("number of members", len(group.members), 1, MEMBERS_MAX)
    check_range("number of learners", len(group.learners), 0, MEMBERS_MAX)
    nodes = (*group.members, *group.learners)
    for node in nodes:
        check_range("member", node, 1, NODE_MAX)
    if len(set(nodes)) != len(nodes) or len(set(group.leaving)) != len(group.leaving):
        raise ProtocolError("a member list names a node twice")
    if not set(group.members).issuperset(group.leaving):
        raise ProtocolError("a member list names a node as leaving that is no member")
