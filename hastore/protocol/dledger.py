"""What the nodes of a DLedger group tell each other. Pure: bytes in, messages out.

The names are DLedger's. Every message has its sender's term, so that it can be put in order;
`index` is the number of an entry, from 0, and -1 where there is none. All travel over the `ha` port
after a HELLO of purpose DLEDGER, framed as the HA link is (docs/dledger.md).
"""

from enum import Enum

import msgspec

NO_INDEX = -1
NO_TERM = -1


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


class HeartBeatRequest(msgspec.Struct, frozen=True, tag="beat"):
    """The leader is alive. `round` numbers the heart beats of a leader, for reads by quorum."""

    term: int
    round: int
    committed_index: int


class HeartBeatResponse(msgspec.Struct, frozen=True, tag="beaten"):
    """The answer to a HeartBeatRequest."""

    term: int
    round: int
    code: Code
    remembers: bool = True  # False: the node has lost its disk; the answer counts for nothing


class CompareRequest(msgspec.Struct, frozen=True, tag="compare"):
    """Does the follower's entry `index` have the term `index_term`?"""

    term: int
    index: int
    index_term: int


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
    `members` are (index, member list) of the entries among them that are member lists.
    """

    term: int
    prev_index: int
    prev_term: int
    pos: int
    size: int
    runs: tuple[tuple[int, int], ...]
    committed_index: int
    members: tuple[tuple[int, tuple[int, ...]], ...] = ()


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

    `prev_term` is the term of the entry before it, `members` the member list that counts there.
    """

    term: int
    index: int
    pos: int
    prev_term: int
    members: tuple[int, ...]


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
