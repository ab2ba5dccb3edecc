"""The configuration of a node as frozen structs; sizes in bytes, times in milliseconds."""

from enum import Enum

import msgspec

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


class Role(Enum):
    """The role that the operator gives a node."""

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"
    SLAVE = "SLAVE"

    @property
    def is_master(self) -> bool:
        """Whether a node of this role is to take writes."""
        return self is not Role.SLAVE


class AckPoint(Enum):
    """What a slave's report promises: bytes in the page cache, or bytes on the disk."""

    WRITTEN = "written"
    FLUSHED = "flushed"


class Flush(Enum):
    """Whether each put waits for the master's disk."""

    ASYNC = "async"
    SYNC = "sync"


class SyncFrom(Enum):
    """Where a classic slave's stream starts when it reports 0."""

    FIRST = "first"
    LAST = "last"


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The three addresses of a node; port 0 binds a free one."""

    api: str  # "tcp://HOST:PORT"
    ha: str  # "HOST:PORT"
    http: str  # "HOST:PORT"


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When whole commit log files are deleted, oldest first; None: never for that reason."""

    max_age_ms: int | None = None
    max_size_bytes: int | None = None
    hold_ms: int = 3_600_000  # a slave or confirmed offset without progress keeps files this long
    check_interval_ms: int = 10_000


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The store of a node."""

    root: str
    commitlog_file_size: int = GIB
    warm_files: bool = False  # read new commit log files ahead, so that they are in memory
    flush: Flush = Flush.ASYNC
    flush_interval_ms: int = 500
    flush_timeout_ms: int = 5_000
    max_message_size: int = 4 * MIB  # of a body
    consume_queue_units: int = 300_000
    index_slots: int = 5_000_000
    index_entries: int = 20_000_000
    default_queues: int = 4
    retention: RetentionConfig = RetentionConfig()


class HAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Replication: the HA link between nodes."""

    ack_point: AckPoint = AckPoint.WRITTEN
    allow_classic_peers: bool = False
    count_classic_peers: bool = False
    classic_master: str | None = None
    sync_from: SyncFrom = SyncFrom.FIRST
    heartbeat_interval_ms: int = 5_000
    housekeeping_interval_ms: int = 20_000
    hello_timeout_ms: int = 5_000
    slave_timeout_ms: int = 3_000
    transfer_batch_size: int = MIB
    max_gap_not_in_sync: int = 256 * MIB
    max_connections: int = 16
    secret_file: str | None = None
    allow_unauthenticated: bool = False  # allow the ha port beyond loopback without a secret


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The client API."""

    max_connections: int = 1_000
    max_pending_puts: int = 10_000
    max_pending_bytes: int = 64 * MIB
    allow_unauthenticated: bool = False  # allow the api and http ports beyond loopback


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration of a node."""

    cluster: str
    group: str
    node: int
    role: Role
    acks: int = 1
    nodes: dict[int, NodeAddress]
    store: StoreConfig
    ha: HAConfig = HAConfig()
    api: ApiConfig = ApiConfig()

    @property
    def effective_acks(self) -> int:
        """Return how many slaves must confirm a synchronous put; 0 in a group of one."""
        return self.acks if len(self.nodes) > 1 else 0
