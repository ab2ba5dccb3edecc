"""The exception tree of hastore.

The type says where the cause lies; the text names the failure and the remedy.

    HastoreError
    |-- UsageError                 the caller's arguments are wrong (exit code 2)
    |   `-- MessageIllegalError    invalid message: MESSAGE_ILLEGAL, PROPERTIES_SIZE_EXCEEDED
    |-- ConfigError                a configuration file or key is wrong (exit code 2)
    |-- StoreError                 the store or its disk failed (exit code 3)
    |   |-- StoreInUseError        another process holds the store's lock
    |   |-- StoreBrokenError       damaged or missing bytes, or a failed sync
    |   |   |-- StoreUncertainError  bytes of a failed write may remain; a restart may find them
    |   |   `-- StoreMovedError    the store's folder is no longer where it was opened
    |   |-- SyncFailedError        a sync of derived files failed; a restart rebuilds them
    |   |-- StoreFullError         no room for the next file; nothing was appended
    |   |   `-- NoLogFileError     the next log file cannot be made for another reason
    |   `-- CorruptRecordError     the bytes are not a valid record
    |-- NotCachedError             the bytes are not in memory; only within a node
    |-- ProtocolError              the peer broke the protocol; the connection is closed
    |   |-- AuthenticationError    a wrong, replayed or reflected proof of the secret
    |   |   `-- TamperedError      bytes were changed on their way between two nodes
    |   `-- ClassicPeerError       the peer speaks the classic protocol, not HELLO
    |-- ReplicationError           replication or a promotion cannot continue
    |   |-- PromotionRefused       too few answers, a node ahead, or a higher epoch
    |   `-- GroupDisagrees         going on would cut confirmed records
    |-- RegistryError              ZooKeeper is out of reach, refuses, or holds something invalid
    |-- NodeFailedError            a thread of the node failed, so the node ended (exit code 1)
    `-- ClientError                a request to a node failed
        |-- NotAuthenticatedError  the node does not accept this client, or the client the node
        |-- ForbiddenError         the client's identity has no right to do this
        |-- NotStoredError         certainly not stored: no slave, not writable, BUSY
        |-- DurabilityError        stored, but not confirmed at the requested level
        |   |-- FlushDiskTimeout
        |   `-- FlushSlaveTimeout
        |-- OutcomeUnknown         TIMEOUT: no answer, or a failed disk; the message may be stored
        |-- TransactionError       it did not end as asked, and never will: cut, or ended otherwise
        |-- PositionBehindError    a commit would move its group back; nothing was committed
        |-- PositionLostError      the position was deleted, cut away, or is beyond the end
        `-- UnreachableError       no node answered

The commands end with exit code 1 for every error that has no other code here.
"""

import errno
from enum import StrEnum
from typing import Any

import msgspec

# What msgspec raises for bytes that are not what was expected: of another form or type, with text
# that is not UTF-8, or nested too deeply. Who decodes bytes of a peer or a disk catches all three.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
# What yaml.safe_load raises besides yaml.YAMLError: for lists nested too deeply, and for `!!int x`,
# `!!bool x`, `!!timestamp x`, or a date that does not exist.
UNREADABLE_YAML = (RecursionError, ValueError, LookupError, AttributeError)


class Status(StrEnum):
    """The outcome of a put, as it is written on the wire and in JSON."""

    PUT_OK = "PUT_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SERVICE_NOT_AVAILABLE = "SERVICE_NOT_AVAILABLE"
    MESSAGE_ILLEGAL = "MESSAGE_ILLEGAL"
    PROPERTIES_SIZE_EXCEEDED = "PROPERTIES_SIZE_EXCEEDED"
    BUSY = "BUSY"
    UNAUTHENTICATED = "UNAUTHENTICATED"  # the client has not proved who it is
    FORBIDDEN = "FORBIDDEN"  # the client's identity has no right to do this
    TIMEOUT = "TIMEOUT"  # outcome unknown: no answer came, or the disk failed during the write

    @property
    def is_stored(self) -> bool:
        """Whether the record is in the answering node's log."""
        return self in _STORED

    @property
    def is_refusal(self) -> bool:
        """Whether nothing was appended and a later attempt may succeed."""
        return self in _REFUSED


_STORED = frozenset({Status.PUT_OK, Status.FLUSH_DISK_TIMEOUT, Status.FLUSH_SLAVE_TIMEOUT})
_REFUSED = frozenset({Status.SLAVE_NOT_AVAILABLE, Status.SERVICE_NOT_AVAILABLE, Status.BUSY})


class HastoreError(Exception):
    """Base of every error that hastore raises on purpose.

    `cluster_group`: of a consumer of a whole cluster, the group in which it failed.
    """

    cluster_group: str | None = None

    def __reduce__(self) -> tuple[object, ...]:
        """Let a process make the error of another one, without the arguments of `__init__`."""
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[HastoreError], given: tuple[object, ...]) -> HastoreError:
    return kind.__new__(kind, *given)


class UsageError(HastoreError):
    """The caller's arguments are wrong."""


class MessageIllegalError(UsageError):
    """The message is invalid: no master accepts it."""


class ConfigError(HastoreError):
    """A configuration file or key is wrong; the text names file, line, key and remedy."""


class StoreError(HastoreError):
    """The store or its disk failed."""


_UNOPENED = {  # what helps, by the errno of an OSError
    errno.EROFS: "its disk is mounted read-only, as the kernel does after an error: look at the "
    "disk (`dmesg`), and mount it anew",
    errno.EIO: 'its disk fails: look at the disk (`dmesg`), and see "A dead disk" in '
    "docs/runbook.md",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space on its file system"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}


def unopened_store(root: str, failure: OSError) -> StoreError:
    """Return the error of a store whose files could not be opened or used, with what helps."""
    remedy = _UNOPENED.get(
        failure.errno or 0, "`store.root` must be a directory that this user may read and write"
    )
    return StoreError(f"{root}: the store cannot be opened: {failure}; {remedy}")


class NotCachedError(HastoreError):
    """The bytes must come from the disk, and this thread must not wait for it.

    It is no StoreError: nothing is wrong, and another thread can read them.
    """


class StoreInUseError(StoreError):
    """Another process holds the store's lock."""


class StoreBrokenError(StoreError):
    """Bytes of the store are damaged or missing, or a sync failed; the store takes no writes."""


STORE_CLOSED = "the store is closed: "  # how the reason of a node begins whose store has closed


class StoreUncertainError(StoreBrokenError):
    """A write failed and its bytes could not be cleared; the next start may find the record."""


class StoreMovedError(StoreBrokenError):
    """The store's folder is no longer where it was opened; the node ends."""


class SyncFailedError(StoreError):
    """A sync of consume queues or key index failed; entries may be lost, even if readable now."""


class StoreFullError(StoreError):
    """There is no room on the disk; nothing was appended, cut or changed.

    `needed_bytes` is the room that was missing, 0 if that is not known.
    """

    def __init__(self, text: str, *, needed_bytes: int = 0) -> None:
        super().__init__(text)
        self.needed_bytes = needed_bytes


class NoLogFileError(StoreFullError):
    """The next log file cannot be made although there is room, such as after an I/O error.

    Nothing was appended. The store tries again by itself, as after a full disk.
    """


class CorruptRecordError(StoreError):
    """The bytes are not a valid record."""


class ProtocolError(HastoreError):
    """The peer broke the protocol; its connection is closed."""


class AuthenticationError(ProtocolError):
    """The peer did not prove the secret."""


class TamperedError(AuthenticationError):
    """Bytes were changed, repeated, left out or reordered between two nodes; none were used."""


class ClassicPeerError(ProtocolError):
    """The peer speaks the classic protocol where HELLO was expected."""


class ReplicationError(HastoreError):
    """Replication or a promotion cannot continue."""


class PromotionRefused(ReplicationError):
    """A promotion found too few answers, a node ahead, or a higher epoch.

    If `final` is true, another attempt would be refused too.
    """

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class GroupDisagrees(ReplicationError):
    """Going on would cut records known to be confirmed; the operator must decide."""


class RegistryError(HastoreError):
    """The registry of roles, ZooKeeper, is out of reach, refuses, or holds something invalid."""


class NodeFailedError(HastoreError):
    """A thread of the node failed unexpectedly, so the node ended itself."""


class ClientError(HastoreError):
    """A request to a node failed."""


class NotAuthenticatedError(ClientError):
    """No node accepted this client's identity, or no node proved that it is the right one.

    Trying again is in vain until the identity, its key, the certificates or the nodes' files
    change. The text names the node, the identity and the remedy.
    """


class ForbiddenError(ClientError):
    """The client's identity has no right to do this; nothing was stored.

    The text names the identity, the missing right and the topic.
    """


class FencedError(ClientError):
    """A member of a group commits a queue that is not its own any more; nothing was committed.

    The text names the queue, the group and, if the master has refused it, who has the lock now.
    """


class NotStoredError(ClientError):
    """The message is certainly not stored; `status` says why.

    `final`: as the group is configured, it would refuse each later attempt, too.
    """

    final = False

    def __init__(self, message: str, status: Status | str) -> None:
        super().__init__(message)
        self.status = Status(status)


class DurabilityError(ClientError):
    """The message is stored but not confirmed at the requested level.

    `result`, a SendResult, says where it is.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class FlushDiskTimeout(DurabilityError):
    """The disk did not confirm in time."""


class FlushSlaveTimeout(DurabilityError):
    """The slaves did not confirm in time."""


class OutcomeUnknown(ClientError):
    """No answer came, or a disk failed during the write: the message may or may not be stored."""


class TransactionError(ClientError):
    """The transaction has not ended as asked, and never will; the text says why.

    Its half message was cut by a failover that it had not been confirmed for, or it was committed,
    rolled back or set aside before.
    """


class PositionBehindError(ClientError):
    """A commit without `allow_back` would move its group back; nothing was committed.

    The text names the group and both positions. Consumers of one group do not share its messages:
    each consumer reads them all.
    """


class PositionLostError(ClientError):
    """The position is below the minimum offset, beyond the end, or was cut away by a failover.

    `topic` and `queue_id` are the position's queue; `common` is the last valid Position. Each is
    None if unknown.
    """

    def __init__(
        self,
        message: str,
        queue_id: int | None = None,
        common: Any = None,
        topic: str | None = None,
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.queue_id = queue_id
        self.common = common


class UnreachableError(ClientError):
    """No node answered."""
