"""The one exception tree of hastore.

The type says whose fault it is, the text names the thing and the remedy.

    HastoreError
    |-- UsageError                 the caller's arguments are wrong
    |   `-- MessageIllegalError    MESSAGE_ILLEGAL, PROPERTIES_SIZE_EXCEEDED: no master takes it
    |-- ConfigError                a configuration file or key is wrong (exit code 2)
    |-- StoreError                 the disk's side (exit code 3)
    |   |-- StoreInUseError        another process holds the store's lock
    |   |-- StoreBrokenError       rot, missing files, a failed sync: the range stays closed
    |   |   `-- StoreUncertainError  a failed write could not be undone: a restart may find it
    |   |-- SyncFailedError        a sync of derived files failed; a restart builds them anew
    |   |-- StoreFullError         no room for the next file; nothing was appended
    |   `-- CorruptRecordError     bytes that are no record
    |-- ProtocolError              the peer erred: the connection is closed
    |   |-- AuthenticationError    a wrong, replayed or reflected proof of the secret
    |   `-- ClassicPeerError       the peer speaks the classic protocol, not HELLO
    |-- ReplicationError           the HA side of a node cannot go on
    |   |-- PromotionRefused       too few answers, a node ahead, or superseded
    |   `-- GroupDisagrees         confirmed data would be cut, or are lacking at the master
    |-- NodeFailedError            a thread of the node failed, and the node ended (exit code 1)
    `-- ClientError                a request to a node failed
        |-- NotStoredError         certainly not stored: no slave, not writable, BUSY
        |-- DurabilityError        stored, but not confirmed at the asked level; carries the result
        |   |-- FlushDiskTimeout
        |   `-- FlushSlaveTimeout
        |-- OutcomeUnknown         TIMEOUT: no answer, or a disk failed: it may be stored
        |-- PositionBehindError    a commit that would take its group back; nothing was kept
        |-- PositionLostError      a position that is gone, beyond the end, or cut away
        `-- UnreachableError       no node answered
"""

from enum import StrEnum


class Status(StrEnum):
    """How a put ended; each is its own text, "PUT_OK" for one."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    BUSY = "BUSY"
    TIMEOUT = "TIMEOUT"  # nobody knows: no answer came, or the disk failed within the write

    @property
    def is_stored(self) -> bool:
        """Whether the record is in the answering node's log."""
        return self in _STORED

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was appended, and a later attempt may fare better."""
        return self in _REFUSED


_STORED = frozenset({Status.PUT_OK, Status.FLUSH_DISK_TIMEOUT, Status.FLUSH_SLAVE_TIMEOUT})
_REFUSED = frozenset({Status.SLAVE_NOT_AVAILABLE, Status.SERVICE_NOT_AVAILABLE, Status.BUSY})


class HastoreError(Exception):
    """The base of every error that hastore raises on purpose."""


class UsageError(HastoreError):
    """The caller's arguments are wrong."""


class MessageIllegalError(UsageError):
    """A message that no master would take."""


class ConfigError(HastoreError):
    """A configuration file or key is wrong; the text names file, line, key and remedy."""


class StoreError(HastoreError):
    """The disk's side of a failure."""


class StoreInUseError(StoreError):
    """Another process holds the store's lock."""


class StoreBrokenError(StoreError):
    """The store lacks or has damaged bytes, or a sync failed; the range stays closed."""


class StoreUncertainError(StoreBrokenError):
    """A write failed and what it left could not be cleared: the next start may take it."""


class StoreMovedError(StoreBrokenError):
    """The store's folder is not where it was opened any more; the node ends."""


class SyncFailedError(StoreError):
    """A sync of queues or index failed: what was written may be lost, though it is still read."""


class StoreFullError(StoreError):
    """There is no room for the next file; nothing was appended."""


class CorruptRecordError(StoreError):
    """The bytes are no record."""


class ProtocolError(HastoreError):
    """The peer erred; its connection is closed."""


class AuthenticationError(ProtocolError):
    """The peer did not prove the secret."""


class ClassicPeerError(ProtocolError):
    """The peer speaks the classic protocol where HELLO was expected."""


class ReplicationError(HastoreError):
    """The HA side of a node cannot go on."""


class PromotionRefused(ReplicationError):
    """A promotion found too few answers, a node ahead, or a higher epoch.

    `final`: trying again is no use.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class GroupDisagrees(ReplicationError):
    """Going on would cut what is known to be confirmed; the operator must decide."""


class NodeFailedError(HastoreError):
    """A thread of the node failed in a way that nothing provides for: the node has ended itself."""


class ClientError(HastoreError):
    """A request to a node failed."""


class NotStoredError(ClientError):
    """The message is certainly not stored; `status` says why."""

    def __init__(self, message: str, status: Status | str) -> None:
        super().__init__(message)
        self.status = Status(status)


class DurabilityError(ClientError):
    """The message is stored but not confirmed at the level asked for; `result` says where."""

    def __init__(self, message: str, result: object) -> None:
        super().__init__(message)
        self.result = result


class FlushDiskTimeout(DurabilityError):
    """The disk did not confirm in time."""


class FlushSlaveTimeout(DurabilityError):
    """The slaves did not confirm in time."""


class OutcomeUnknown(ClientError):
    """Nobody answered, or a disk failed within the write: it may or may not be stored."""


class PositionBehindError(ClientError):
    """A commit would take its group back, and nobody said so; nothing of it was kept.

    The text names the group and both positions. Consumers of one group do not share its messages.
    """


class PositionLostError(ClientError):
    """The position is below the minimum, beyond the end, or was cut away by a failover.

    `queue_id` says whose; `common` is the last position that still holds, where that is known.
    """

    def __init__(self, message: str, queue_id: int | None = None, common: object = None) -> None:
        super().__init__(message)
        self.queue_id = queue_id
        self.common = common


class UnreachableError(ClientError):
    """No node answered."""
