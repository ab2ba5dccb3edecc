"""What a client gets back: typed, frozen."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from hastore.errors import (
    ClientError,
    FlushDiskTimeout,
    FlushSlaveTimeout,
    HastoreError,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
)
from hastore.protocol.api import Position, Status
from hastore.store.host import Host, message_id
from hastore.store.properties import decode_properties, find_property
from hastore.store.record import Record

__all__ = ["Message", "NodeInfo", "Position", "SendResult", "Status", "failure_of"]
_PORT = struct.Struct(">i")


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored, and what is known of its copies.

    `level` states what was seen (MASTER_MEM, MASTER_DISK, SYNC_MEM(n), SYNC_DISK(n), CLASSIC), ""
    when nobody was asked (`acks` 0: offsets are None then). `offset` is in bytes of the log.
    """

    status: Status
    topic: str
    queue_id: int
    level: str = ""
    offset: int | None = None
    queue_offset: int | None = None
    epoch: int = 0
    host: bytes = b""

    @property
    def msg_id(self) -> str | None:
        """Return the message id, None when the offset is not known."""
        if self.offset is None or len(self.host) < 8:
            return None
        host = Host(self.host[:-4], _PORT.unpack_from(self.host, len(self.host) - 4)[0])
        return message_id(host, self.offset)


def failure_of(
    status: Status, reason: str, result: SendResult | None, *, unknown: bool
) -> HastoreError:
    """Return the exception for a put that did not end as PUT_OK.

    `unknown` says that an earlier attempt may have stored it: then a refusal is no certainty.
    """
    text = f"{status.value}: {reason}" if reason else status.value
    if status is Status.FLUSH_DISK_TIMEOUT:
        return FlushDiskTimeout(text, result)
    if status is Status.FLUSH_SLAVE_TIMEOUT:
        return FlushSlaveTimeout(text, result)
    if status is Status.TIMEOUT or unknown:
        return OutcomeUnknown(f"an attempt went unanswered, it may be stored; last heard: {text}")
    if status in (Status.MESSAGE_ILLEGAL, Status.PROPERTIES_SIZE_EXCEEDED):
        return MessageIllegalError(text)
    if status.is_refusal:
        return NotStoredError(text, status.value)
    return ClientError(text)


class Message:
    """A message as read from a replica: its record, its queue and its position."""

    __slots__ = ("record", "epoch")

    def __init__(self, record: Record, epoch: int | None) -> None:
        self.record = record
        self.epoch = epoch

    def __repr__(self) -> str:
        return (
            f"Message({self.topic!r}, queue {self.queue_id}, queue offset {self.queue_offset}, "
            f"offset {self.offset}, {len(self.body)} bytes)"
        )

    @property
    def body(self) -> bytes:
        """The payload: bytes, as they were sent."""
        return self.record.body

    @property
    def topic(self) -> str:
        """The topic."""
        return self.record.topic

    @property
    def queue_id(self) -> int:
        """The queue within the topic."""
        return self.record.queue_id

    @property
    def queue_offset(self) -> int:
        """The place within the queue."""
        return self.record.queue_offset

    @property
    def offset(self) -> int:
        """The place in the log, in bytes."""
        return self.record.physical_offset

    @property
    def message_id(self) -> str:
        """The message id."""
        return self.record.message_id

    @property
    def key(self) -> str | None:
        """The KEYS property."""
        raw = find_property(self.record.properties, b"KEYS")
        return None if raw is None else raw.decode("utf-8", "surrogateescape")

    @property
    def tags(self) -> str | None:
        """The TAGS property."""
        return self.record.tags

    @property
    def properties(self) -> dict[str, str]:
        """All properties; of a name that comes twice, the last."""
        return dict(decode_properties(self.record.properties))

    @property
    def born_timestamp_ms(self) -> int:
        """When the producer made it, in ms since 1970."""
        return self.record.born_timestamp_ms

    @property
    def store_timestamp_ms(self) -> int:
        """When the master stored it, in ms since 1970."""
        return self.record.store_timestamp_ms

    @property
    def next_position(self) -> Position:
        """The position behind this message; without its epoch when the node told none."""
        if self.epoch is None:
            return Position(self.queue_offset + 1)
        return Position(self.queue_offset + 1, self.epoch, self.offset)


class NodeInfo(msgspec.Struct, frozen=True):
    """What one node says of itself: `status` is the object of `hastore status --json`."""

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
