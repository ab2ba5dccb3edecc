"""The results of the clients' calls: typed and immutable."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from hastore.client.messages import Message
from hastore.errors import (
    ClientError,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    ForbiddenError,
    HastoreError,
    MessageIllegalError,
    NotAuthenticatedError,
    NotStoredError,
    OutcomeUnknown,
)
from hastore.protocol.api import Position, Status
from hastore.record.host import Host, message_id

__all__ = ["Message", "NodeInfo", "Position", "SendResult", "Status", "failure_of"]
_PORT = struct.Struct(">i")


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored, and which copies were confirmed.

    `level`: the confirmed copies (MASTER_MEM, MASTER_DISK, SYNC_MEM(n), SYNC_DISK(n), CLASSIC; in
    mode dledger QUORUM_DISK, QUORUM_MEM).
    `offset`: the place in the log, in bytes. With `acks` 0 no node answers: `level` is "", and the
    offsets are None.
    """

    status: Status
    topic: str
    queue_id: int
    level: str = ""
    offset: int | None = None
    queue_offset: int | None = None
    epoch: int = 0
    host: bytes = b""

    def __repr__(self) -> str:
        return (
            f"SendResult({self.status.value}, {self.topic!r}, queue {self.queue_id}, queue offset "
            f"{self.queue_offset}, offset {self.offset}, {self.level or 'no answer requested'}, "
            f"epoch {self.epoch}, msg_id {self.msg_id})"
        )

    @property
    def msg_id(self) -> str | None:
        """The message id, None if the offset is not known."""
        if self.offset is None or len(self.host) < 8:
            return None
        host = Host(self.host[:-4], _PORT.unpack_from(self.host, len(self.host) - 4)[0])
        return message_id(host, self.offset)


def failure_of(
    status: Status, reason: str, result: SendResult | None, *, unknown: bool
) -> HastoreError:
    """Return the exception for a put that did not end as PUT_OK.

    `unknown`: an earlier attempt may have stored the message, so a refusal of the last attempt does
    not prove that the message is not stored.
    """
    text = f"{status.value}: {reason}" if reason else status.value
    if status is Status.FLUSH_DISK_TIMEOUT:
        return FlushDiskTimeout(text, result)
    if status is Status.FLUSH_SLAVE_TIMEOUT:
        return FlushSlaveTimeout(text, result)
    if status is Status.FORBIDDEN and not unknown:
        return ForbiddenError(text)
    if status is Status.UNAUTHENTICATED and not unknown:
        return NotAuthenticatedError(text)
    if status is Status.TIMEOUT or unknown:
        return OutcomeUnknown(f"an attempt has no known outcome, it may be stored; last: {text}")
    if status in (Status.MESSAGE_ILLEGAL, Status.PROPERTIES_SIZE_EXCEEDED):
        return MessageIllegalError(text)
    if status.is_refusal:
        return NotStoredError(text, status)
    return ClientError(text)


class NodeInfo(msgspec.Struct, frozen=True):
    """The status of one node: `status` is the object of `hastore status --json`."""

    address: str
    status: dict[str, Any]

    @property
    def node(self) -> int:
        """The node's number."""
        return int(self.status.get("node", 0))

    @property
    def role(self) -> str:
        """The node's role."""
        return str(self.status.get("role", ""))

    @property
    def epoch(self) -> int:
        """The last epoch of the node's history."""
        return int(self.status.get("epoch", 0))

    @property
    def writable(self) -> bool:
        """Whether the node takes puts."""
        return bool(self.status.get("writable", False))
