"""The configuration of a node as frozen structs; sizes in bytes, times in milliseconds."""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
DAY_MS = 86_400_000


class Unit(Enum):
    """The unit of a number. In the file, sizes and times have a suffix such as MiB or ms."""

    ITEMS = "items"
    BYTES = "bytes"
    MILLISECONDS = "ms"


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a number, both ends included.

    `why` explains the upper end in the error for a larger number.
    """

    unit: Unit
    least: int
    most: int
    why: str = ""


Milliseconds = Annotated[int, Range(Unit.MILLISECONDS, 1, 30 * DAY_MS)]


class Mode(Enum):
    """How a group replicates: by a master that the operator names, or by an elected leader."""

    CLASSIC = "classic"
    DLEDGER = "dledger"


class Role(Enum):
    """The role that the operator gives a node in mode classic."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"

    @property
    def is_master(self) -> bool:
        """Whether a node of this role should take writes."""
        return self is not Role.SLAVE


class AckPoint(Enum):
    """What a slave's report states: the end of its written bytes, or of its synced bytes."""

    WRITTEN = "written"
    FLUSHED = "flushed"


class Flush(Enum):
    """Whether a put waits for the disk: the master's, or in mode dledger those of the majority."""

    ASYNC = "async"
    SYNC = "sync"


class StoreKind(Enum):
    """Where a node keeps its log."""

    FILE = "file"
    MEMORY = "memory"  # only in mode dledger; the node is empty after a restart


class SyncFrom(Enum):
    """Where the stream to a classic slave starts when the slave reports offset 0."""

    FIRST = "first"
    LAST = "last"


class LogFormat(Enum):
    """How the lines of the node's own log look."""

    TEXT = "text"
    JSON = "json"


class Wire(Enum):
    """What is spoken at an address of a node."""

    PLAIN = "plain"
    TLS = "tls"


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The three addresses at which others reach a node; port 0 binds a free port."""

    api: str  # "tcp://HOST:PORT"
    ha: str  # "HOST:PORT"
    http: str  # "HOST:PORT"


class BindConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What this node binds, where others reach it at another address; None: that in `nodes`."""

    api: str | None = None  # "tcp://HOST:PORT"
    ha: str | None = None  # "HOST:PORT"
    http: str | None = None  # "HOST:PORT"


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When whole commit log files are deleted, oldest first. None sets no limit."""

    max_age_ms: Annotated[int, Range(Unit.MILLISECONDS, 1, 36_500 * DAY_MS)] | None = None
    max_size_bytes: Annotated[int, Range(Unit.BYTES, 1, 2**62)] | None = None
    # After this time without progress, a slave or the confirmed offset no longer holds files.
    hold_ms: Annotated[int, Range(Unit.MILLISECONDS, 0, 3_650 * DAY_MS)] = 3_600_000
    check_interval_ms: Milliseconds = 10_000


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The store of a node."""

    root: str
    kind: StoreKind = StoreKind.FILE
    commitlog_file_size: Annotated[
        int, Range(Unit.BYTES, 4 * KIB, 2 * GIB - 1, "RocketMQ's positions in a file are 32-bit")
    ] = GIB
    group_read: bool = False  # let users of the node's group read the store's files
    # Bytes a second that are read to find damage; None: none. At 1 MiB, 84 GiB a day.
    scrub_rate: Annotated[int, Range(Unit.BYTES, 64 * KIB, 16 * GIB)] | None = MIB
    warm_files: bool = False  # load new commit log files into memory ahead of use
    flush: Flush = Flush.ASYNC  # in mode dledger a file without this key means SYNC
    flush_interval_ms: Milliseconds = 500
    flush_timeout_ms: Milliseconds = 5_000
    max_message_size: Annotated[int, Range(Unit.BYTES, 1, 4 * MIB)] = 4 * MIB  # of a body
    consume_queue_units: Annotated[int, Range(Unit.ITEMS, 1, 100_000_000)] = 300_000
    index_slots: Annotated[int, Range(Unit.ITEMS, 1, 100_000_000)] = 5_000_000
    index_entries: Annotated[int, Range(Unit.ITEMS, 2, 100_000_000)] = 20_000_000
    default_queues: Annotated[int, Range(Unit.ITEMS, 1, 1_024)] = 4
    # The delays of RocketMQ's clients by level, in RocketMQ's form; DEFAULT_LEVELS is the same.
    message_delay_level: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    retention: RetentionConfig = RetentionConfig()


class HAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replication: the HA link between nodes."""

    ack_point: AckPoint = AckPoint.WRITTEN
    allow_classic_peers: bool = False
    count_classic_peers: bool = False
    classic_master: str | None = None
    classic_broker: str | None = None  # the remoting address of that master; None: its port minus 1
    classic_key_file: str | None = None  # with the AccessKey and SecretKey that it asks for
    sync_from: SyncFrom = SyncFrom.FIRST
    heartbeat_interval_ms: Milliseconds = 5_000
    housekeeping_interval_ms: Milliseconds = 20_000
    hello_timeout_ms: Milliseconds = 5_000
    slave_timeout_ms: Milliseconds = 3_000
    # A frame is at most 4 MiB with its 12-byte header.
    transfer_batch_size: Annotated[int, Range(Unit.BYTES, 1, 4 * MIB - 12)] = MIB
    max_gap_not_in_sync: Annotated[int, Range(Unit.BYTES, 0, 2**62)] = 256 * MIB
    max_connections: Annotated[int, Range(Unit.ITEMS, 1, 65_535)] = 16
    secret_file: str | None = None
    allow_unauthenticated: bool = False  # allow the ha port beyond loopback without a secret


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The client API."""

    max_connections: Annotated[int, Range(Unit.ITEMS, 1, 65_535)] = 1_000
    # When all connections are in use:
    evict_idle_ms: Milliseconds = 5_000  # one that was not used for so long gives way
    max_connections_of_address: Annotated[int, Range(Unit.ITEMS, 1, 65_535)] | None = None
    max_connections_of_identity: Annotated[int, Range(Unit.ITEMS, 1, 65_535)] | None = None
    max_pending_puts: Annotated[int, Range(Unit.ITEMS, 1, 10_000_000)] = 10_000
    max_pending_bytes: Annotated[int, Range(Unit.BYTES, 4 * MIB, 64 * GIB)] = 64 * MIB
    allow_unauthenticated: bool = False  # allow the api and http ports beyond loopback


class RemotingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """RocketMQ's own clients on the client API's port."""

    enabled: bool | None = None  # None: where the API's address is loopback
    auto_create_topics: bool = True  # by a send to a topic that does not exist
    drop_retries: bool = False  # store what a client sends again by itself only once
    read_slaves: bool = True  # the master lets consumers pull from its slaves
    twins: bool = True  # each other node is also a broker of its own that forwards to the master
    name_servers: tuple[str, ...] = ()  # HOST:PORT of RocketMQ's, which are told of this group
    # While there is no master, a request waits for one so long; RocketMQ's clients wait for 3 s.
    hold_timeout_ms: Milliseconds = 2_500
    # Open transactions, as RocketMQ's transactionTimeOut, transactionCheckInterval and -CheckMax.
    transaction_timeout_ms: Milliseconds = 6_000  # until a producer is asked for the first time
    transaction_check_interval_ms: Milliseconds = 30_000
    transaction_check_max: Annotated[int, Range(Unit.ITEMS, 1, 1_000)] = 15  # then it is set aside


class DLedgerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Mode dledger: election and replication by majority."""

    election_timeout_ms: Milliseconds = 500
    heartbeat_interval_ms: Milliseconds = 100
    append_timeout_ms: Milliseconds = 2_500
    preferred_leader: Annotated[int, Range(Unit.ITEMS, 1, 65_535)] | None = None
    transfer_timeout_ms: Milliseconds = 2_000
    transfer_gap: Annotated[int, Range(Unit.ITEMS, 0, 10_000_000)] = 1_000
    max_pending_entries: Annotated[int, Range(Unit.ITEMS, 1, 10_000_000)] = 10_000
    max_in_flight_bytes: Annotated[int, Range(Unit.BYTES, 4 * MIB, GIB)] = 4 * MIB
    max_in_flight_pushes: Annotated[int, Range(Unit.ITEMS, 1, 10_000)] = 64
    # A data frame of the link is at most 4 MiB with its 12-byte header.
    push_batch_size: Annotated[int, Range(Unit.BYTES, 4 * KIB, 4 * MIB - 12)] = MIB
    resend_timeout_ms: Milliseconds = 1_000
    allow_async_flush: bool = False  # allow acknowledgements from memory, at level QUORUM_MEM


class SecurityConfig(msgspec.Struct, frozen=True, kw_only=True):
    """TLS, and who may use the node; the paths are those of files."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    api: Wire = Wire.PLAIN
    ha: Wire = Wire.PLAIN  # RocketMQ peers stay plain
    http: Wire = Wire.PLAIN
    identities: str | None = None
    audit_log: str | None = None  # None: <store.root>/hastore/audit.log
    allow_plain_keys: bool = False  # allow the api port beyond loopback with keys, without TLS

    @property
    def uses_tls(self) -> bool:
        """Whether any address speaks TLS."""
        return Wire.TLS in (self.api, self.ha, self.http)


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The node's own log; HASTORE_LOG sets its level."""

    format: LogFormat = LogFormat.TEXT
    file: str | None = None  # None: stderr
    slow_threshold_ms: Milliseconds | None = 500  # what takes longer is logged; None: nothing is


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration of a node."""

    cluster: str
    group: str
    node: Annotated[int, Range(Unit.ITEMS, 1, 65_535)]
    mode: Mode = Mode.CLASSIC
    role: Role | None = None  # None in mode dledger
    acks: Annotated[int, Range(Unit.ITEMS, 0, 65_535)] = 1
    registry: str | None = None  # zk://HOST:PORT[,HOST:PORT...]: the role is in ZooKeeper
    registry_acl_file: str | None = None  # a file with user:password of ZooKeeper's scheme digest
    registry_ca: str | None = None  # with it the registry is spoken to by TLS; paths of files
    registry_certificate: str | None = None
    registry_key: str | None = None
    registry_allow_unauthenticated: bool = False  # allow a registry beyond loopback without it
    registry_allow_plain_password: bool = False  # send it beyond loopback without TLS
    nodes: dict[int, NodeAddress]
    bind: BindConfig = BindConfig()
    store: StoreConfig
    ha: HAConfig = HAConfig()
    api: ApiConfig = ApiConfig()
    remoting: RemotingConfig = RemotingConfig()
    dledger: DLedgerConfig = DLedgerConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()

    @property
    def assigned_role(self) -> Role:
        """Return the role that the operator gives this node; only mode classic has one."""
        assert self.role is not None, "a node of mode dledger has no role in its file"
        return self.role

    @property
    def majority(self) -> int:
        """Return how many nodes are a majority of `nodes`."""
        return len(self.nodes) // 2 + 1

    def bound(self, name: str) -> str:
        """Return what this node binds as its `api`, `ha` or `http`, in the form of `nodes`."""
        return str(getattr(self.bind, name) or getattr(self.nodes[self.node], name))

    @property
    def effective_acks(self) -> int:
        """Return how many slaves must confirm a synchronous put; 0 in a group of one."""
        return self.acks if len(self.nodes) > 1 else 0
