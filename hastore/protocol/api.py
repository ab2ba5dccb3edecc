"""The client API's messages: a header frame and, where records travel, a payload frame. Pure.

    request   DEALER -> ROUTER   [header: msgpack array, tag first] [payload: Put]
    reply     ROUTER -> DEALER   [header: msgpack array, tag first]
                                 [payload: Pulled, Found, Checks, RangeBytes]

A payload is a sequence of commit log records (docs/formats.md): in a Put as the client built them,
in a reply as they are stored. That of a RangeBytes is a range of the log. `rid` is the client's
number for the request; the reply repeats it. A Notice is no reply.
Every request gets exactly one reply, with three exceptions. A Put with `acks` 0 gets none. A
malformed message ends its connection. So does a failure after which it is unknown whether a Put is
stored.

Runs keep the order of the puts of one connection, although many are in flight. Each put has the
number of its `run` and its place `at` in the run. A node takes the next place of the current run,
or place 0 of a run with a greater number; it refuses any other put as BUSY. So after a refused or
lost put, the rest of its run is refused too. The client then sends all unsettled puts again, in
order, as a new run. Puts of run 0 are not checked this way.

A node with identities refuses every request as UNAUTHENTICATED until the client has proved who it
is: Auth -> Challenge, Prove -> Welcome (SCRAM-SHA-256), or a client certificate over TLS. A
producer id (HS_PID) of the form `ownHHHHHHHHHHHH...`, with the first 12 hex digits of the SHA-256
of an identity's name, is that identity's: such a node takes it from no other. So who can read the
ids of another identity's producers cannot use them to have its messages taken for repeats. Every
node can check this without a memory. Other ids are anybody's.
"""

import hashlib
import re
from enum import Enum
from typing import Annotated, Any

import msgspec

from hastore.errors import ProtocolError
from hastore.errors import Status as Status

MAX_HEADER_BYTES = 64 * 1024
MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # of a message's body
MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + 128 * 1024  # a body with its topic, properties and hosts
MAX_WAIT_MS = 60_000
MAX_PULL_MESSAGES = 10_000
MAX_KEY_MESSAGES = 1_000
MAX_DIGEST_BYTES = 16 * 1024 * 1024  # of the log, in one AskDigest
MAX_RANGE_BYTES = 1024 * 1024  # of the log, in one AskBytes
POSITIONS_TOPIC = "HASTORE_POSITIONS"
POSITION_BEHIND = "POSITION_BEHIND"  # status of Failed: a commit would move its group back
FENCED = "FENCED"  # status of Failed: a member commits what another one, or nobody, has the lock of
MEMBER_EXISTS = "MEMBER_EXISTS"  # status of Failed: another connection has this member's id
MAX_SUBSCRIPTIONS = 1_000  # of a Join
MAX_LOCK_QUEUES = 1_000  # of a Lock or an Unlock
MAX_MEMBERS_LISTED = 10_000  # in one answer
MAX_OWNERS_LISTED = 10_000  # queues, in one answer
MAX_MEMBERS = 1_000  # of a MembersChange
FILE_CHANGED = "FILE_CHANGED"  # status of Failed: an administrator has seen another file
PRODUCER_ID = "HS_PID"
SEQUENCE = "HS_SEQ"
NO_REQUEST = "not a request of the client API"
WINDOW = 1024  # how many sequence numbers of a producer a node remembers


class PullStatus(Enum):
    """What a pull found."""

    FOUND = "FOUND"
    NO_NEW = "NO_NEW"  # nothing is readable at the position yet, or this node's log ends before it
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_TOO_LARGE = "OFFSET_TOO_LARGE"
    NO_SUCH_QUEUE = "NO_SUCH_QUEUE"
    HISTORY_DIFFERS = "HISTORY_DIFFERS"  # Pulled.common is the position at the last common point
    NO_MATCH = "NO_MATCH"  # only with a filter: records were looked at, and none of them matches


Int64 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
QueueId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=32767)]
Algorithm = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
Group = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
UniqueKey = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
ProducerId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
MemberId = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Expression = Annotated[str, msgspec.Meta(min_length=0, max_length=8192)]
QueuesByTopic = Annotated[
    dict[Name, list[QueueId]], msgspec.Meta(min_length=1, max_length=MAX_LOCK_QUEUES)
]
WaitMs = Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)]
Mechanism = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
ScramMessage = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
NodeNumber = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Endpoint = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Word = Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
FileVersion = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
RequestId = Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
Members = Annotated[list[NodeNumber], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]


class _Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A msgpack array. Later versions may add fields at its end; readers skip unknown ones."""


class Position(_Message, frozen=True):
    """The next queue offset, and the epoch and offset of the record before it (None: unknown)."""

    queue_offset: Int64
    epoch: Int64 | None = None
    offset: Int64 | None = None


# -- requests


class Put(_Message, frozen=True, tag="put"):
    """Append the payload's records.

    `acks`: None means the node's default; 0 asks for no reply; 1 waits for the master alone; -1
    waits for the slaves too.
    """

    rid: Int64
    acks: Annotated[int, msgspec.Meta(ge=-1, le=1)] | None = None
    sync_flush: bool = False
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000
    run: Int64 = 0
    at: Int64 = 0


class Filter(_Message, frozen=True):
    """Which messages are wanted; `kind` is "tags" or "sql" (record/message_filter.py)."""

    kind: Annotated[str, msgspec.Meta(min_length=1, max_length=32)]
    expression: Expression


class Pull(_Message, frozen=True, tag="pull"):
    """Read records of a queue from a position; wait up to `wait_ms` for the first.

    With `bulk` the reply has the sizes of the records, and the node leaves it to the client to
    compare the bodies with their CRCs. With a `filter` only records that match are returned; the
    reply's position is behind all that were looked at.
    """

    rid: Int64
    topic: Name
    queue_id: QueueId
    position: Position
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_MESSAGES)] = 1_000
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAME_BYTES)] = 1024 * 1024
    wait_ms: WaitMs = 0
    bulk: bool = False
    filter: Filter | None = None


class FindKey(_Message, frozen=True, tag="key"):
    """Find the records of a topic by a key."""

    rid: Int64
    topic: Name
    key: Name
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEY_MESSAGES)] = 32
    begin_ms: Int64 = 0
    end_ms: Int64 = 2**63 - 1
    before: Int64 = 2**63 - 1  # only records that lie below this offset of the log


class FindOffset(_Message, frozen=True, tag="at"):
    """Read the record at an offset of the log."""

    rid: Int64
    offset: Int64


class AskDigest(_Message, frozen=True, tag="digest"):
    """Ask for the digest of the bytes [start, end) of the node's log: at most MAX_DIGEST_BYTES."""

    rid: Int64
    start: Int64
    end: Int64
    algorithm: Algorithm = "xxh3-128"


class AskBytes(_Message, frozen=True, tag="bytes"):
    """Read the bytes [start, end) of the node's log, unchecked: at most MAX_RANGE_BYTES."""

    rid: Int64
    start: Int64
    end: Int64


class FindTime(_Message, frozen=True, tag="time"):
    """Find the queue offset of the first message stored at or after a time, in ms since 1970."""

    rid: Int64
    topic: Name
    queue_id: QueueId
    timestamp_ms: Int64


class AskMap(_Message, frozen=True, tag="map"):
    """Ask a node for its view of the group."""

    rid: Int64


class AskStatus(_Message, frozen=True, tag="status"):
    """Ask a node for the object that `hastore status --json` prints."""

    rid: Int64


class AskTopics(_Message, frozen=True, tag="topics"):
    """Ask for the readable range of each queue of a topic, or of all topics (None)."""

    rid: Int64
    topic: Name | None = None


class TopicInfo(_Message, frozen=True):
    """A topic's configuration: consumers read queues below `read_queues`, producers put to those
    below `write_queues`.

    `perm` is the sum of 4 (read) and 2 (write). Of a topic that is not `recorded` nobody has said
    anything: its numbers follow from its messages and `store.default_queues`.
    """

    name: Name
    read_queues: QueueId
    write_queues: QueueId
    perm: Annotated[int, msgspec.Meta(ge=0, le=7)] = 6
    order: bool = False
    sys_flag: QueueId = 0
    attributes: dict[str, str] = {}
    recorded: bool = True


class SetTopic(_Message, frozen=True, tag="topic.set"):
    """Create a topic, or change it."""

    rid: Int64
    topic: TopicInfo
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000


class DropTopic(_Message, frozen=True, tag="topic.drop"):
    """Delete a topic."""

    rid: Int64
    topic: Name
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000


class AskConfigs(_Message, frozen=True, tag="configs"):
    """Ask for the configuration of a topic, or of all topics (None)."""

    rid: Int64
    topic: Name | None = None


class AskProducer(_Message, frozen=True, tag="producer"):
    """Ask the master how far a producer came, by its HS_PID."""

    rid: Int64
    producer: ProducerId


class Commit(_Message, frozen=True, tag="commit"):
    """Store a group's positions in a topic's queues as a record of HASTORE_POSITIONS.

    `back` lists the queues whose position may move back. With `member` nothing is stored unless
    that member of the group has the lock of each queue.
    """

    rid: Int64
    group: Group
    topic: Name
    positions: Annotated[dict[QueueId, Position], msgspec.Meta(min_length=1, max_length=1024)]
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000
    back: list[QueueId] = []
    member: MemberId | None = None


class Fetch(_Message, frozen=True, tag="fetch"):
    """Ask for a group's committed positions in a topic."""

    rid: Int64
    group: Group
    topic: Name


class Subscription(_Message, frozen=True):
    """What a member wants of a topic: all messages, or those that an expression chooses.

    Of several subscriptions of a group to a topic that with the greatest version counts.
    """

    topic: Name
    expression: Expression = "*"
    kind: Name = "TAG"
    version: Int64 = 0


class Join(_Message, frozen=True, tag="join"):
    """Be a member of a group that shares queues, or go on being one; other members are told.

    `token` is the same for all connections of one member, and of no other member.
    """

    rid: Int64
    group: Group
    member: MemberId
    token: Int64
    topics: Annotated[list[Subscription], msgspec.Meta(min_length=0, max_length=MAX_SUBSCRIPTIONS)]


class Leave(_Message, frozen=True, tag="leave"):
    """End a membership."""

    rid: Int64
    group: Group
    member: MemberId


class Lock(_Message, frozen=True, tag="lock"):
    """Ask the master for the locks of queues, or renew them; with `places` also where to begin."""

    rid: Int64
    group: Group
    member: MemberId
    queues: QueuesByTopic
    places: bool = False


class Unlock(_Message, frozen=True, tag="unlock"):
    """Give the locks of queues back."""

    rid: Int64
    group: Group
    member: MemberId
    queues: QueuesByTopic


class SendBack(_Message, frozen=True, tag="back"):
    """Put a message that a member could not handle again, for its group, after a delay.

    `offset` and `epoch` say where the log has it, `topic`, `queue_id` and `queue_offset` which it
    is. `level` 0 is the usual delay, which grows with each attempt, and -1 no further attempt.
    After `attempts` of them, None for as many as the group's settings say, it is a dead letter.
    """

    rid: Int64
    group: Group
    topic: Name
    queue_id: QueueId
    queue_offset: Int64
    offset: Int64
    epoch: Int64 | None = None
    level: Annotated[int, msgspec.Meta(ge=-1, le=99)] = 0
    attempts: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000


class AskMembers(_Message, frozen=True, tag="members"):
    """Ask who is in a group, and at the master, who has the lock of which queue."""

    rid: Int64
    group: Group


class EndTransaction(_Message, frozen=True, tag="end"):
    """Commit a half message, or roll it back: append what ends its transaction.

    `offset` and `queue_offset` are those of the half message, `unique` its UNIQ_KEY or message id.
    """

    rid: Int64
    commit: bool
    offset: Int64
    queue_offset: Int64
    group: Group
    unique: UniqueKey
    acks: Annotated[int, msgspec.Meta(ge=-1, le=1)] | None = None
    sync_flush: bool = False
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAIT_MS)] = 3_000


class AskChecks(_Message, frozen=True, tag="checks"):
    """Ask for half messages that a producer group must decide; wait up to `wait_ms` for one."""

    rid: Int64
    group: Group
    wait_ms: WaitMs = 0


class Auth(_Message, frozen=True, tag="auth"):
    """Begin to prove an identity: `message` is SCRAM's client-first-message."""

    rid: Int64
    mechanism: Mechanism
    message: ScramMessage


class Prove(_Message, frozen=True, tag="prove"):
    """Prove the identity: `message` is SCRAM's client-final-message."""

    rid: Int64
    message: ScramMessage


class NodePlaces(_Message, frozen=True):
    """A node's addresses, as `nodes` in a configuration file has them."""

    api: Endpoint
    ha: Endpoint
    http: Endpoint


class NodesChange(_Message, frozen=True, tag="nodes"):
    """Change `nodes` in the node's own file: a node goes, one comes, or both."""

    gone: NodeNumber | None = None
    new: NodeNumber | None = None
    address: NodePlaces | None = None  # of the new node


class OnceOptions(_Message, frozen=True):
    """The options of one `hastore promote` or `demote`: they are used once, in this epoch."""

    command: Word
    epoch: Int64
    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False
    needed_node: NodeNumber | None = None  # whose answer the promotion needs


class RoleChange(_Message, frozen=True, tag="role"):
    """Change `role` in the file of a node of mode classic, as `hastore promote` and `demote` do.

    A node that has done the change with this `id` does not do it again. It must have been looked
    at, by a request with this `id` and without a version, at most 60 s before.
    """

    id: RequestId
    role: Word
    once: OnceOptions | None = None


class MembersChange(_Message, frozen=True, tag="members"):
    """Ask the leader, in mode dledger, to hand over or to change the members.

    `command` is that of `hastore dledger`, `term` and `members` are as the administrator saw them.
    The outcome is in the leader's status, under this `id`.
    """

    id: RequestId
    command: Word
    node: NodeNumber
    term: Int64
    members: Members
    by: NodeNumber | None = None


class Administer(_Message, frozen=True, tag="administer"):
    """Change the node's own configuration file, or give the leader a request.

    `cluster`, `group` and `node` name the node that shall do it; another one refuses. A change of
    the file needs its `version`, as an earlier answer has it; without one nothing is changed, and
    the answer says what would be. It is harmless to repeat a request.
    """

    rid: Int64
    cluster: Group
    group: Group
    node: NodeNumber
    change: NodesChange | MembersChange | RoleChange
    version: FileVersion | None = None


RangeQuestion = AskDigest | AskBytes
Query = FindKey | FindOffset | FindTime
Reading = AskMap | AskStatus | AskTopics | AskConfigs | AskProducer
TopicChange = SetTopic | DropTopic
Sharing = Join | Leave | Lock | Unlock | SendBack | AskMembers
Transactional = EndTransaction | AskChecks
Question = (
    Pull | Query | Reading | Commit | Fetch | RangeQuestion | TopicChange | Sharing | Transactional
    | Administer
)  # fmt: skip
Proving = Auth | Prove
Request = Put | Question | Proving

# -- replies


class PutDone(_Message, frozen=True, tag="put."):
    """The outcome of a Put; `status` applies to all records, unless `statuses` has one for each.

    If no record of it was stored, `status` is the first record's. `offsets`, `queue_ids` and
    `queue_offsets` have one entry per record (0 for a record that was not stored); they are empty
    when the request was refused as a whole. A queue offset of -1 is not known: the record was
    stored before, and cannot be read now. `level` states only what was observed.
    """

    rid: int
    status: Status
    epoch: int
    level: str = ""
    offsets: list[int] = []
    queue_ids: list[int] = []
    queue_offsets: list[int] = []
    statuses: list[Status] | None = None
    host: bytes = b""  # the storing host, for message ids: address, then port as int32
    hosts: dict[int, bytes] = {}  # by record's index, for duplicates that another node stored
    reason: str = ""
    master: str | None = None  # the API address of the master, as the refusing node believes


class Pulled(_Message, frozen=True, tag="pull."):
    """What a Pull found; the payload holds `count` records.

    `epochs` are the (epoch, start offset) entries of the node's history that cover the records.
    `common` is set only with HISTORY_DIFFERS. `last_offset` is the log offset of the last record,
    with a filter of the last one that was looked at; with it the client can ask for the next
    records before it has read these. `sizes` has the size of each record, as 4 bytes big-endian, if
    the pull was a bulk one.
    """

    rid: int
    status: PullStatus
    next_queue_offset: int = 0
    min_queue_offset: int = 0
    max_queue_offset: int = 0  # the end of the queue's readable part on this node
    count: int = 0
    epochs: list[tuple[int, int]] = []
    common: Position | None = None
    last_offset: int | None = None
    sizes: bytes = b""

    @property
    def after(self) -> Position:
        """The position behind what was looked at; without an epoch if none is stated."""
        last = self.last_offset
        if last is not None:
            epochs = [epoch for epoch, start in self.epochs if start <= last]
            if epochs:
                return Position(self.next_queue_offset, epochs[-1], last)
        return Position(self.next_queue_offset)


class Found(_Message, frozen=True, tag="found."):
    """The payload holds `count` records, newest first.

    With `cut_ms` the search was cut short: records stored at or before about this time may be
    missing, and with `cut_offset` only those below this offset. `unreadable`: offsets of records
    that may have the key, but are damaged at this node.
    """

    rid: int
    count: int
    cut_ms: int | None = None
    unreadable: list[int] = []
    cut_offset: int | None = None


class TimeFound(_Message, frozen=True, tag="time."):
    """The answer to FindTime; with `cut_short` the message may lie after the offset."""

    rid: int
    queue_offset: int
    cut_short: bool = False


MAP_TOPICS = 1_000  # in `queues` of a map, of more the first by name; AskConfigs has the others


class MapInfo(_Message, frozen=True):
    """A node's view of its group: its own state, and the master that it knows."""

    node: int
    role: str
    epoch: int  # the last epoch of the node's history
    writable: bool
    readable_offset: int = 0
    master_node: int | None = None
    master_api: str | None = None
    nodes: dict[int, str] = {}  # the api addresses of the group
    reason: str | None = None  # why it is not writable
    default_queues: int = 4
    min_offset: int = 0
    cluster: str | None = None  # the names of the group, so that a client notices another one
    group: str | None = None
    queues: dict[str, int] = {}  # of topics whose producers use another number than default_queues


class Map(_Message, frozen=True, tag="map."):
    """The answer to AskMap."""

    rid: int
    map: MapInfo


class NodeStatus(_Message, frozen=True, tag="status."):
    """The answer to AskStatus."""

    rid: int
    status: dict[str, Any]


class Topics(_Message, frozen=True, tag="topics."):
    """Each topic's queues, each with its readable queue offsets: the first and the end."""

    rid: int
    topics: dict[str, dict[int, tuple[int, int]]]
    default_queues: int = 4
    # Of topics that were deleted and made again: the queue offsets at which the last deletion ended
    # their queues, as far as the node knows them.
    ended: dict[str, dict[int, int]] = {}


class Configs(_Message, frozen=True, tag="configs."):
    """The answer to AskConfigs."""

    rid: int
    topics: list[TopicInfo]


class Positions(_Message, frozen=True, tag="fetch."):
    """The answer to Fetch."""

    rid: int
    positions: dict[int, Position]


class Joined(_Message, frozen=True, tag="join."):
    """The answer to Join: who is in the group, as the node knows it.

    `generation` is another one after each change of `members`, at this node. `topics` has the
    number of queues that the members share of each topic, 0 if nobody may read it; the group's
    retries are among them, if there are any. `missing` are those that do not exist yet, `forbidden`
    those that the identity may not consume: they are not in `topics`. `refused` says why the group
    may not consume at all; all numbers in `topics` are 0 then. `more` are queues that are this
    member's beside its shares: they fall to members that do not read the topic.
    """

    rid: int
    generation: int
    members: list[str]
    topics: dict[str, int]
    missing: list[str] = []
    session_ms: int = 60_000
    forbidden: list[str] = []
    refused: str | None = None
    more: dict[str, list[int]] = {}


class Left(_Message, frozen=True, tag="leave."):
    """The answer to Leave."""

    rid: int


class Place(_Message, frozen=True):
    """Where a queue is: the group's position, None if it has none, and the queue's range."""

    position: Position | None
    first: int
    end: int


class Locked(_Message, frozen=True, tag="lock."):
    """The answer to Lock: the queues whose locks the member has, of those that it asked for.

    The master keeps them for the member for `lease_ms` from then on. `places`: as it was asked. The
    answer to Unlock has no queues.
    """

    rid: int
    lease_ms: int = 0
    queues: dict[str, list[int]] = {}
    places: dict[str, dict[int, Place]] = {}


class MemberInfo(_Message, frozen=True):
    """A member of a group: `client` is "hastore", or the language of one of RocketMQ's clients."""

    id: str
    address: str
    client: str


class MembersListed(_Message, frozen=True, tag="members."):
    """The answer to AskMembers: the members as the node knows them, at most MAX_MEMBERS_LISTED.

    `owners`: who has the locks of queues, by topic and queue, at most MAX_OWNERS_LISTED. None if
    the node is not the master, or cannot learn the locks of its epoch now. A consumer of
    RocketMQ's that does not read in order has no locks. `cut`: there are more of either.
    """

    rid: int
    members: list[MemberInfo]
    owners: dict[str, dict[int, str]] | None = None
    cut: bool = False


class Notice(_Message, frozen=True, tag="group!"):
    """Not an answer: news of the group that a connection has joined by the request `rid`.

    Its members have changed, or a lock was given back. With a `topic` an administrator has moved
    the group to `offsets`, by queue.
    """

    rid: int
    group: str
    topic: str | None = None
    offsets: dict[int, int] = {}


class RangeDigest(_Message, frozen=True, tag="digest."):
    """The answer to AskDigest; `digest` is None unless all of the range is readable.

    `epochs` are the (epoch, start offset) entries of the node's history that cover the range.
    """

    rid: int
    digest: bytes | None
    min_offset: int
    readable_offset: int
    epochs: list[tuple[int, int]] = []


class RangeBytes(_Message, frozen=True, tag="bytes."):
    """The answer to AskBytes; the payload has the range if `present`, if all of it is readable."""

    rid: int
    present: bool
    min_offset: int
    readable_offset: int
    epochs: list[tuple[int, int]] = []


class ProducerKnown(_Message, frozen=True, tag="producer."):
    """The answer to AskProducer; `last` and `forgotten` are None if the producer is not known.

    `last` is its greatest HS_SEQ in the log that the master remembers. Numbers up to `forgotten`
    are not remembered one by one: a put of them is refused.
    """

    rid: int
    epoch: int
    last: int | None = None
    forgotten: int | None = None


class Checks(_Message, frozen=True, tag="checks."):
    """The answer to AskChecks; the payload has the half messages, under their own topics.

    Each of `halves` has the offset of the half message, its queue offset, and how often its
    producers were asked, this time included.
    """

    rid: int
    halves: list[tuple[int, int, int]]


class Administered(_Message, frozen=True, tag="administer."):
    """The answer to Administer: whether the file was changed, or would be; or a request was given.

    `file` is the node's configuration file, `version` the SHA-256 of its bytes now, in hex, `nodes`
    what it lists now, and `role` its role; None in mode dledger, and with a registry. The answer to
    a MembersChange has none of them.
    """

    rid: int
    changed: bool
    file: str = ""
    version: str = ""
    nodes: dict[int, NodePlaces] = {}
    role: str | None = None


class Challenge(_Message, frozen=True, tag="challenge"):
    """The answer to Auth: `message` is SCRAM's server-first-message."""

    rid: int
    message: str


class Rights(_Message, frozen=True):
    """What an identity may do: the patterns of the topics that it may produce to and consume.

    `groups`: the patterns of the groups whose positions it may move; None: of every group.
    """

    produce: list[str]
    consume: list[str]
    admin: bool
    groups: list[str] | None = None


class Welcome(_Message, frozen=True, tag="welcome"):
    """The answer to Prove: `message` is SCRAM's server-final-message, the node's own proof."""

    rid: int
    message: str
    rights: Rights


class Failed(_Message, frozen=True, tag="failed"):
    """The request was refused; `status` is the name of a Status if one fits."""

    rid: int
    status: str
    reason: str
    master: str | None = None


RangeReply = RangeDigest | RangeBytes
Reply = (
    PutDone | Pulled | Found | TimeFound | Map | NodeStatus | Topics | Configs | Positions
    | ProducerKnown | Joined | Left | Locked | MembersListed | Notice | Checks | Administered
    | RangeReply | Challenge | Welcome | Failed
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """Return the header frame of a message."""
    return _encoder.encode(message)


def decode_request(header: bytes) -> Request:
    """Decode a client's header frame. Raises ProtocolError, also for a header over 64 KiB."""
    if len(header) > MAX_HEADER_BYTES:
        raise ProtocolError(f"a header of {len(header)} bytes; at most {MAX_HEADER_BYTES}")
    try:
        return _requests.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ProtocolError(f"{NO_REQUEST}: {failure}") from failure


def decode_reply(header: bytes) -> Reply:
    """Decode a node's header frame. Raises ProtocolError."""
    try:
        return _replies.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ProtocolError(f"not a reply of the client API: {failure}") from failure


# -- whose a producer id is

_OWN = "own"
_DIGITS = 12
_OWNED = re.compile(rb"own[0-9a-f]{12}")


def own_prefix(identity: str) -> str:
    """Return how the producer ids that belong to an identity begin: letters and digits."""
    return _OWN + hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def is_anothers(producer_id: bytes, own: bytes) -> bool:
    """Return whether a producer id belongs to another identity than that with the prefix `own`."""
    return not producer_id.startswith(own) and _OWNED.match(producer_id) is not None
