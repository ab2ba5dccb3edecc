"""What callers of the clients get: messages as a consumer reads them, and the results of calls.

Messages are checked when a reply is decoded. Rarely used fields are decoded when they are read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from zlib_ng.zlib_ng import crc32

from hastore.errors import (
    ClientError,
    CorruptRecordError,
    DurabilityError,
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
from hastore.record.codec import Host, Record, decode_record, find_parts, message_id
from hastore.record.compression import algorithm_of, decompress
from hastore.record.layout import (
    CRC_MASK,
    FLAG_COMPRESSED,
    FLAG_INNER_BATCH,
    FLAG_IPV6,
    FLAG_STORE_IPV6,
    HEADER_SIZE,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_SIZE,
    STORE_IPV4,
    STORE_IPV6,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    header_struct,
    store_at,
)
from hastore.record.properties import decode_properties, find_property, inner_count, stored_tags

__all__ = ["Message", "NodeInfo", "Position", "SendResult", "Status", "failure_of"]

_FRONT = header_struct(
    *("size", "magic", "body_crc", "queue_id", "queue_offset", "physical_offset", "sys_flag"),
    "body_length",
)  # between IPv4 hosts
_FLAGS_AND_BORN = header_struct("sys_flag", "born_timestamp_ms")
_NO_END = 1 << 63
_UNUSUAL = FLAG_IPV6 | FLAG_COMPRESSED


class Message(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A message as read from a replica: its body, queue and position.

    `queue_offset` is its index in the queue, and `offset` its place in the log, in bytes. `epoch`
    is None if the node did not state one. A message keeps only the bytes of its own record in
    memory.

    A body that its producer has compressed is decompressed when `body` is read for the first time;
    this raises CorruptRecordError if that fails. `raw_body` is the body as it is stored.
    """

    body: bytes
    queue_id: int
    queue_offset: int
    offset: int
    epoch: int | None
    _head: bytes  # the record's bytes before the body
    _tail: bytes  # the record's bytes after the body
    cluster_group: str | None = None  # set by a consumer of a whole cluster

    def __repr__(self) -> str:
        return (
            f"Message({self.topic!r}, queue {self.queue_id}, queue offset {self.queue_offset}, "
            f"offset {self.offset}, {len(self.raw_body)} bytes)"
        )

    @property
    def record(self) -> Record:
        """The whole record, decoded anew at each access."""
        return decode_record(self._head + self.raw_body + self._tail)

    @property
    def raw_body(self) -> bytes:
        """The body as it is stored, which may be compressed."""
        return self.body

    @property
    def compression(self) -> str | None:
        """How the body is stored: "lz4", "zstd", "zlib", None; "" if nobody knows how."""
        return algorithm_of(_FLAGS_AND_BORN.unpack_from(self._head)[0])

    @property
    def topic(self) -> str:
        """The topic."""
        begin, end = self._topic_place()
        return self._tail[begin:end].decode("utf-8", "surrogateescape")

    @property
    def message_id(self) -> str:
        """The message id."""
        _, address, port = self._stored()
        return message_id(Host(address, port), self.offset)

    @property
    def key(self) -> str | None:
        """The KEYS property; of several the first, which is the message's own.

        Java's `autoBatch` puts those of all messages of a batch behind them.
        """
        return self._property(b"KEYS")

    @property
    def tags(self) -> str | None:
        """The TAGS property; of several the last that is not empty counts."""
        raw = stored_tags(self._raw_properties())
        return None if raw is None else raw.decode("utf-8", "surrogateescape")

    @property
    def is_null(self) -> bool:
        """Whether the value is null, as of a row that Spark wrote; `body` is empty then."""
        return not self.raw_body and self._property(b"HS_NULL") is not None

    @property
    def properties(self) -> dict[str, str]:
        """All properties. A name that occurs twice has its last value."""
        return dict(decode_properties(self._raw_properties()))

    @property
    def born_timestamp_ms(self) -> int:
        """When the producer made the message, in ms since 1970."""
        born: int = _FLAGS_AND_BORN.unpack_from(self._head)[1]
        return born

    @property
    def store_timestamp_ms(self) -> int:
        """When the master stored the message, in ms since 1970."""
        return self._stored()[0]

    @property
    def reconsume_times(self) -> int:
        """How often consumers have sent the message back; 0 at its first delivery."""
        return self.record.reconsume_times

    @property
    def next_position(self) -> Position:
        """The position after this message; it has no epoch if the node did not state one."""
        next_offset = self.queue_offset + 1
        if _FLAGS_AND_BORN.unpack_from(self._head)[0] & FLAG_INNER_BATCH:
            # One record holds several messages of a producer.
            next_offset = self.queue_offset + inner_count(self._raw_properties())
        if self.epoch is None:
            return Position(next_offset)
        return Position(next_offset, self.epoch, self.offset)

    def _topic_place(self) -> tuple[int, int]:
        tail = self._tail
        if self._head[4:8] == _V1:
            return 1, 1 + tail[0]
        return 2, 2 + (tail[0] << 8 | tail[1])

    def _raw_properties(self) -> bytes:
        return self._tail[self._topic_place()[1] + 2 :]

    def _property(self, name: bytes) -> str | None:
        raw = find_property(self._raw_properties(), name)
        return None if raw is None else raw.decode("utf-8", "surrogateescape")

    def _stored(self) -> tuple[int, bytes, int]:
        """Return storeTimestamp, and the storeHost's address and port."""
        flags = _FLAGS_AND_BORN.unpack_from(self._head)[0]
        form = STORE_IPV6 if flags & FLAG_STORE_IPV6 else STORE_IPV4
        stored: tuple[int, bytes, int] = form.unpack_from(self._head, store_at(flags))
        return stored


_V1 = V1_MAGIC.to_bytes(4)
_stored_body = Message.__dict__["body"].__get__


class _PackedMessage(Message, frozen=True, gc=False, eq=False):
    """A message whose body is compressed. `_text` is the body once somebody has read it."""

    _text: bytes | None = None

    @property  # type: ignore[misc]  # it hides the field, whose value is `raw_body`
    def body(self) -> bytes:
        """The body, decompressed. Raises CorruptRecordError, and UsageError without the library."""
        if self._text is None:
            queue = f"queue {self.queue_id} of {self.topic}, queue offset {self.queue_offset}"
            where = f"the record at offset {self.offset} ({queue})"
            flags = _FLAGS_AND_BORN.unpack_from(self._head)[0]
            msgspec.structs.force_setattr(self, "_text", decompress(self.raw_body, flags, where))
        assert self._text is not None
        return self._text

    @property
    def raw_body(self) -> bytes:
        """The body as it is stored."""
        raw: bytes = _stored_body(self)
        return raw


def _unpacking(message: Message) -> Message:
    """Return a message that decompresses its body, if that is compressed."""
    if message.compression is None:
        return message
    return _PackedMessage(
        message.body, message.queue_id, message.queue_offset, message.offset, message.epoch,
        message._head, message._tail,
    )  # fmt: skip


def decode_messages(
    payload: bytes, epochs: Sequence[tuple[int, int]]
) -> tuple[list[Message], CorruptRecordError | None]:
    """Read consecutive records as far as they are complete and their CRCs match.

    Returns the messages before the first damaged bytes, and the error for those bytes or None.
    `epochs` lists (epoch, start offset), ascending. physicalOffset is not checked, because only the
    node knows the record's place.
    """
    found: list[Message] = []
    add, unpack, checksum = found.append, _FRONT.unpack_from, crc32
    following = iter(epochs)
    epoch: int | None = None
    next_epoch, epoch_end = next(following, (0, _NO_END))
    # These describe the last valid tail: its bytes before the properties, its length, and whether
    # it has properties. Most tails are alike, so comparing the next tail with them mostly suffices.
    start, tail_length, has_properties = b"", -1, False
    size_before, any_packed = 0, False
    at, length = 0, len(payload)
    while length - at >= MIN_RECORD_SIZE:
        size, magic, crc, queue_id, queue_offset, offset, flags, body_length = unpack(payload, at)
        stop = at + size
        if size < MIN_RECORD_SIZE or stop > length:
            break
        if magic == V1_MAGIC and not flags & _UNUSUAL:
            body_at = at + HEADER_SIZE
            topic_at = body_at + body_length
            tail = payload[topic_at:stop]
            if body_length < 0:
                break
            if len(tail) != tail_length or not tail.startswith(start):
                start, tail_length = _start_of(tail), len(tail)
                has_properties = tail_length > len(start)
                if not start:
                    break
            if has_properties and not tail[-1]:  # a torn write: its end is zeros
                break
        else:
            parts = find_parts(payload, at, stop)
            if parts is None:
                break
            any_packed |= flags & FLAG_COMPRESSED != 0
            body_at, topic_at = parts[4], parts[4] + parts[5]
            tail = payload[topic_at:stop]
        body = payload[body_at:topic_at]
        if checksum(body) & CRC_MASK != crc:
            break
        while offset >= epoch_end:
            epoch = next_epoch
            next_epoch, epoch_end = next(following, (0, _NO_END))
        add(Message(body, queue_id, queue_offset, offset, epoch, payload[at:body_at], tail))
        at = stop
        if size == size_before and magic == V1_MAGIC and not flags & _UNUSUAL:
            at = _take_alike(payload, at, (size, body_length), start, epoch, epoch_end, add)
        size_before = size
    if any_packed:
        found = list(map(_unpacking, found))
    if at == length:
        return found, None
    return found, CorruptRecordError(
        f"no valid record begins at byte {at} of a reply of {length} bytes"
    )


def _take_alike(
    payload: bytes,
    at: int,
    shape: tuple[int, int],
    start: bytes,
    epoch: int | None,
    epoch_end: int,
    add: Callable[[Message], None],
) -> int:
    """Add the records from `at` on, while their fields are as long as those of the last record.

    This halves the time per record. Returns the offset of the first record that differs or is
    damaged; the caller checks it. `start`: the first bytes that all their tails share.
    """
    size, body_length = shape
    tail_length = size - HEADER_SIZE - body_length
    has_properties = tail_length > len(start)
    cut = struct.Struct(f"{HEADER_SIZE}s{body_length}s{tail_length}s")
    alike = memoryview(payload)[at : len(payload) - (len(payload) - at) % size]
    unpack, checksum = _FRONT.unpack, crc32
    known = b""  # the last valid tail
    for head, body, tail in cut.iter_unpack(alike):
        own_size, magic, crc, queue_id, queue_offset, offset, flags, own_length = unpack(head)
        if tail != known:
            if not tail.startswith(start) or (has_properties and not tail[-1]):
                break
            known = tail
        if (
            checksum(body) & CRC_MASK != crc
            or own_size != size
            or own_length != body_length
            or magic != V1_MAGIC
            or flags & _UNUSUAL
            or offset >= epoch_end
        ):
            break
        add(Message(body, queue_id, queue_offset, offset, epoch, head, tail))
        at += size
    return at


def _start_of(tail: bytes) -> bytes:
    """Return a V1 tail up to its properties; b"" if its lengths are wrong or it is torn."""
    if len(tail) < 3 or tail[0] > V1_MAX_TOPIC_BYTES:
        return b""
    end = 3 + tail[0]
    if end > len(tail):
        return b""
    size = tail[end - 2] << 8 | tail[end - 1]
    if size > MAX_PROPERTIES_BYTES or end + size != len(tail):
        return b""
    if tail[0] and not (tail[1] and tail[end - 3]):
        return b""
    return tail[:end]


# -- results of calls

_PORT = struct.Struct(">i")


class SendResult(msgspec.Struct, frozen=True, gc=False):
    """Where a message is stored, and which copies were confirmed.

    `level`: the confirmed copies (MASTER_MEM, MASTER_DISK, SYNC_MEM(n), SYNC_DISK(n), CLASSIC; in
    mode dledger QUORUM_DISK, QUORUM_MEM).
    `offset`: the place in the log, in bytes. With `acks` 0 no node answers: `level` is "", and the
    offsets are None. `queue_offset` is also None for a message that was stored by an earlier
    attempt, if the node cannot read it any more.
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


# Nodes send no reason with these.
_UNSAID = {
    Status.FLUSH_DISK_TIMEOUT: "stored, but not synced in time: a power loss may keep or lose it",
    Status.FLUSH_SLAVE_TIMEOUT: (
        "stored, but not confirmed by the slaves in time: a failover may keep or lose it"
    ),
}


def doubt_of(epoch: int) -> str:
    """Say, for an error text, that the master of an epoch has stored it, and was replaced since."""
    return (
        f"the master of epoch {epoch} had stored it, but not confirmed it as asked, and the one "
        "that replaced it may lack it"
    )


def failure_of(
    status: Status, reason: str, result: SendResult | None, *, unknown: bool
) -> HastoreError:
    """Return the exception for a put that did not end as PUT_OK.

    `unknown`: an earlier attempt may have stored the message, so a refusal of the last attempt does
    not prove that the message is not stored.
    """
    reason = reason or _UNSAID.get(status, "")
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


def failure_of_all(failures: Sequence[BaseException]) -> BaseException:
    """Return the failure of a batch of which so many parts have failed, of one or more.

    It says no more than is known of each part: not that all are stored if one may not be.
    """
    for unsaid in (OutcomeUnknown, HastoreError):
        for failure in failures:
            if isinstance(failure, unsaid) and not isinstance(failure, DurabilityError):
                return failure
    return failures[0]


class SilentNode(msgspec.Struct, frozen=True):
    """A node of a group that does not answer, and why."""

    address: str
    node: int | None  # its number; None if no node names this address
    kind: str  # "refused", "timed out", "TLS", "unauthenticated", "unreachable", "closed", "failed"
    why: str
    cluster: str | None = None  # of the group that names it; None if no node does
    group: str | None = None


class GroupMember(msgspec.Struct, frozen=True):
    """A member of a consumer group that is online."""

    member: str  # its id
    address: str  # as a node sees it
    client: str  # "hastore", or the language of one of RocketMQ's clients, such as "JAVA"


class GroupMembers(msgspec.Struct, frozen=True):
    """The members of a consumer group, and who reads which queue.

    `owners` has the member of each queue whose lock is held, by topic and queue; None if no node
    says it. A consumer of RocketMQ's that does not read in order has no locks. `cut`: a node has
    listed only a part, since there are too many.
    """

    members: list[GroupMember]
    owners: dict[str, dict[int, str]] | None
    cut: bool = False


class FoundMessages(list[Message]):
    """The messages that a search by key has found, the latest first.

    A node bounds each search. If it was cut short, `cut_ms` is about the time (ms since 1970) at or
    before which messages may be missing, and `cut_offset` the offset below which they lie: a search
    with `before` at that offset goes on there. It is None if the search has come to no message, or
    of an earlier version's node: then a search with `end_ms` at `cut_ms` goes on.
    `damaged` are offsets of messages that may have the key, and that no node could read.
    """

    def __init__(
        self,
        messages: Iterable[Message] = (),
        cut_ms: int | None = None,
        damaged: Iterable[int] = (),
        cut_offset: int | None = None,
    ) -> None:
        """Keep the messages."""
        super().__init__(messages)
        self.cut_ms = cut_ms
        self.damaged = list(damaged)
        self.cut_offset = cut_offset


def replay_stop(status: Mapping[str, Any]) -> str | None:
    """Return why a node cannot build its queues, as its status says; None if it can."""
    problems = status.get("problems", ())
    return next((one for one in problems if one.startswith("replay stopped")), None)


def next_file_lack(status: Mapping[str, Any]) -> str | None:
    """Return why a node cannot reserve its log's next file, as its status says; None if it can."""
    spare = f"{status.get('store')}/hastore/spare"
    problems = status.get("problems", ())
    return next((one for one in problems if one.startswith(spare)), None)


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
