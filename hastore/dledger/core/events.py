"""What goes into DLedgerCore.step and what comes out of it.

Times are milliseconds of a monotonic clock. Indexes number entries from 0; -1 is "none".
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from hastore.protocol.dledger import MemberSet, Message


def listed(nodes: Iterable[int]) -> str:
    """Return the numbers of nodes as text, in order; "none" without any."""
    return ", ".join(str(node) for node in sorted(nodes)) or "none"


class Role(Enum):
    """What a node is in its term."""

    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"


@dataclass(frozen=True, slots=True)
class HardState:
    """What must be durable before any message of the same update is sent.

    `remembers` is False from a start with a lost disk until a leader has ended the quarantine; a
    restart in between must pass it to Start again.
    """

    term: int
    voted_for: int | None
    remembers: bool = True


@dataclass(frozen=True, slots=True)
class MemberList:
    """The entry (index, term) of the log is this member list. It counts from its append on."""

    index: int
    term: int
    members: tuple[int, ...]
    learners: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()

    @property
    def group(self) -> MemberSet:
        """The list without its place."""
        return MemberSet(self.members, self.learners, self.leaving)


@dataclass(frozen=True, slots=True)
class Settings:
    """The group's times and limits (docs/dledger.md)."""

    election_timeout_ms: int = 500  # a follower without a leader waits 1 to 2 times as long
    heartbeat_interval_ms: int = 100
    append_timeout_ms: int = 2_500  # of a put that waits for a majority
    resend_ms: int = 1_000  # of a push without an answer
    pending_max: int = 10_000  # entries of puts that wait, in all; more: LEADER_PENDING_FULL
    in_flight_bytes: int = 4 << 20  # to one follower
    in_flight_pushes: int = 64
    batch_bytes: int = 1 << 20  # of one APPEND
    transfer_gap: int = 1_000  # entries that a transferee may lack when the transfer begins
    transfer_timeout_ms: int = 2_000
    preferred_leader: int | None = None


@dataclass(frozen=True, slots=True)
class LogState:
    """A node's log as its store has found it at the start.

    `terms` are (term, its first index), rising in both; the first may begin before `begin_index`.
    An empty log has `end_index` = `begin_index` - 1. Where an entry lies, only the store knows.
    """

    begin_index: int
    end_index: int
    terms: tuple[tuple[int, int], ...]
    prev_term: int = -1  # of the entry before begin_index


# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The node starts: all of `log` is durable. `remembers` is False after a wiped disk.

    `members` is the list of the configuration. It counts if no list of `member_lists`, the last
    ones that an Update has given, is in the log. `alone`: this node has never known another one, so
    nobody has what it may have forgotten, and as the only member it needs no leader to remember.
    `disk_full`: as DiskFull; there is no room for the vote with which a group of one begins.
    """

    now_ms: float
    hard_state: HardState
    log: LogState
    committed_index: int
    members: tuple[int, ...]
    remembers: bool = True
    member_lists: tuple[MemberList, ...] = ()
    removed: MemberList | None = None  # as the last Update with `removed` had it
    alone: bool = False
    disk_full: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; call it at `Update.deadline_ms` at the latest."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class Receive:
    """A message of a peer has arrived; for an AppendRequest with all its bytes."""

    now_ms: float
    peer: int
    message: Message


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to a peer was opened (what was sent before may be lost) or closed."""

    now_ms: float
    peer: int
    up: bool


@dataclass(frozen=True, slots=True)
class Propose:
    """This leader's store has appended `count` entries of the core's term, for one put.

    The driver first asks `DLedgerCore.refusal()`, appends, then proposes, all under one lock.
    `token` names the put in `Update.settled`; None: nobody waits.
    """

    now_ms: float
    count: int
    token: object | None = None


@dataclass(frozen=True, slots=True)
class Persisted:
    """All entries up to `index` are durable on this node (or written, with an async flush).

    `cuts` is `DLedgerCore.cuts` when the flush began. If the log was cut since, the core does not
    count the report, and asks for another flush. A driver that never flushes while it truncates
    may leave it out.
    """

    now_ms: float
    index: int
    cuts: int | None = None


@dataclass(frozen=True, slots=True)
class DiskFull:
    """The store takes no entries (`full`), or takes them again. A full leader yields."""

    now_ms: float
    full: bool


@dataclass(frozen=True, slots=True)
class ReplayBlocked:
    """Replay has stopped (`blocked`), or goes on: a leader whose replay has stopped serves nobody.

    Such a node still takes entries, acknowledges and votes. As a leader it yields to one that can
    serve; otherwise it is the last to ask for votes.
    """

    now_ms: float
    blocked: bool


@dataclass(frozen=True, slots=True)
class SyncHangs:
    """A sync of the log does not return (`hangs`), or has returned.

    Whatever else such a node wrote durably could not return either, and would hold up the node: it
    asks for no votes, and takes no part in a vote or in a later term, no member list and no cut. As
    a leader it changes no members, and yields, if a majority of the others can go on without it.
    """

    now_ms: float
    hangs: bool


@dataclass(frozen=True, slots=True)
class ToldRemoved:
    """A node refuses a link: a committed list (index, term, members) leaves out this node."""

    now_ms: float
    removed: tuple[int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Retained:
    """Retention has removed the entries below `begin_index`."""

    now_ms: float
    begin_index: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The operator wants `to` to lead; only a leader takes this."""

    now_ms: float
    to: int
    token: object | None = None


@dataclass(frozen=True, slots=True)
class ChangeMembers:
    """The operator wants one learner more, or one learner or member less; only a leader takes this.

    The list is the one that is wanted. A learner becomes a member by the leader's own decision.
    """

    now_ms: float
    members: tuple[int, ...]
    token: object | None = None
    learners: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadIndex:
    """A reader wants to know what is committed now: settled after a round of heart beats."""

    now_ms: float
    token: object


Event = (
    Start
    | Tick
    | Receive
    | LinkChanged
    | Propose
    | Persisted
    | DiskFull
    | ReplayBlocked
    | SyncHangs
    | ToldRemoved
    | Retained
    | Transfer
    | ChangeMembers
    | ReadIndex
)

# -- what the driver must do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnEntry:
    """An entry that the core itself appends as leader: the first of its term, or a member list.

    The store gives it a body that RocketMQ can step over: a whole RocketMQ record of a transaction
    that was rolled back (sysFlag 0xC), of topic HASTORE_DLEDGER, with `group`, if there is one, as
    the record's body. RocketMQ's readers would lose what follows an empty body.
    """

    index: int
    term: int
    group: MemberSet | None = None


@dataclass(frozen=True, slots=True)
class TakenEntries:
    """Entries of the AppendRequest just received: its bytes go to the log's end as they are.

    The first `skip` entries of the request are in the log already.
    """

    skip: int
    last_index: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The outcome of what the driver proposed under `token`.

    `index` is the last entry of a put, or the committed index of a read.
    """

    token: object
    outcome: str  # one of OUTCOMES
    index: int = -1
    reason: str = ""


OnSettled = Callable[[Settled], None]

OUTCOMES = (
    "COMMITTED",  # a majority has it
    "WAIT_QUORUM_ACK_TIMEOUT",  # not known: it may still be committed
    "TERM_CHANGED",  # not known: this node is not the leader of that term any more
    "REFUSED",  # nothing was done
)


@dataclass(slots=True)
class Update:
    """What the driver does after a step, in the order of these fields."""

    hard_state: HardState | None = None  # save it durably
    truncate_from: int | None = None  # remove the entries from this index on, durably
    member_lists: tuple[MemberList, ...] | None = None  # save them durably, for the next Start
    removed: bool = False  # `DLedgerCore.removed` has changed: save it durably, for the next Start
    install: tuple[int, int, int] | None = None  # give the log up; begin at (index, pos, term)
    append: list[OwnEntry | TakenEntries] = field(default_factory=list)
    flush: bool = False  # sync the log, then step(Persisted)
    messages: list[tuple[int, Message]] = field(default_factory=list)  # (peer, message)
    committed_index: int | None = None  # it has risen to this
    settled: list[Settled] = field(default_factory=list)
    role_changed: bool = False
    contradiction: str | None = None  # what cannot be unless a node has forgotten votes: tell it
    deadline_ms: float | None = None  # when the next Tick is due
