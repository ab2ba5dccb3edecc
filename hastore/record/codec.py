"""Encode, decode and check records, one at a time; the hosts and message ids that they hold.

layout.py draws the bytes. The functions here take any buffer. They are the reference for the fast
paths (bulk_check.py, the uniform batches of puts, the walks of replay): tests compare their results
with those of the fast paths.
"""

import ipaddress
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from hastore.errors import CorruptRecordError, MessageIllegalError, UsageError
from hastore.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    CRC_MASK,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_STORE_IPV6,
    HEADER_SIZE,
    HEADER_SIZES,
    HEADERS,
    IPV6_EXTRA,
    MAX_PROPERTIES_BYTES,
    MAX_RECORD_SIZE,
    MAX_TOPIC_BYTES,
    MIN_RECORD_SIZE,
    OFFSETS,
    OFFSETS_AT,
    PREFIX,
    SIZE_AND_MAGIC,
    STORE_IPV4,
    STORE_IPV6,
    TAIL_MIN,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    V2_MAGIC,
    header_struct,
    offset_of,
    store_at,
)
from hastore.record.properties import (
    decode_properties,
    encode_properties,
    stored_tags,
    without_crc,
)

_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class Host:
    """An address of 4 or 16 bytes and a port."""

    address: bytes
    port: int

    @classmethod
    def parse(cls, text: str) -> "Host":
        """Read "1.2.3.4:10911" or "[::1]:10911"; UsageError for anything else."""
        address, separator, port = text.rpartition(":")
        try:
            if not separator or not 0 <= int(port) <= 65535:
                raise ValueError("a port from 0 to 65535 is missing")
            if address.startswith("[") and address.endswith("]"):
                return cls(ipaddress.IPv6Address(address[1:-1]).packed, int(port))
            return cls(ipaddress.IPv4Address(address).packed, int(port))
        except ValueError as failure:
            raise UsageError(f"{text!r} is not ADDRESS:PORT ({failure})") from failure

    @property
    def text(self) -> str:
        """Return "1.2.3.4:10911", or "[::1]:10911" with IPv6."""
        if len(self.address) == 4:
            return f"{ipaddress.IPv4Address(self.address)}:{self.port}"
        return f"[{ipaddress.IPv6Address(self.address)}]:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the address has 16 bytes."""
        return len(self.address) == 16

    @property
    def packed(self) -> bytes:
        """Return address and port as bytes, as in records, message ids and replies."""
        return self.address + _INT.pack(self.port)


NO_HOST = Host(bytes(4), 0)


def message_id(host: Host, offset: int) -> str:
    """Return the upper-case hexadecimal id of the record that `host` stored at `offset`."""
    return (host.packed + _LONG.pack(offset)).hex().upper()


def parse_message_id(text: str) -> tuple[Host, int]:
    """Split a message id into the storing host and the physical offset. Raises UsageError."""
    try:
        raw = bytes.fromhex(text) if len(text) in (32, 56) else b""
    except ValueError:
        raw = b""
    if len(raw) * 2 != len(text) or not raw:
        raise UsageError(f"{text!r} is no message id of 32 (IPv6: 56) hexadecimal digits")
    size = len(raw) - 12
    host = Host(raw[:size], _INT.unpack_from(raw, size)[0])
    return host, _LONG.unpack_from(raw, size + 4)[0]


_BODY_LENGTH = struct.Struct(">i")  # the last 4 bytes before the body
_SHORT = struct.Struct(">h")
_SYS_FLAG = header_struct("sys_flag")
_QUEUE_ID_AT = offset_of("queue_id")
_PREPARED = header_struct(  # the last fields of each header
    "prepared_transaction_offset", "body_length", start=offset_of("prepared_transaction_offset")
)
_unpack_prefix = PREFIX.unpack_from  # bound once, because recovery checks every record

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log, as stored. Bytes of the topic that are not UTF-8 become surrogates."""

    body: bytes
    topic: str
    queue_id: int = 0
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    queue_offset: int = 0
    physical_offset: int = 0
    body_crc: int = 0
    born_timestamp_ms: int = 0
    born_host: Host = NO_HOST
    store_timestamp_ms: int = 0
    store_host: Host = NO_HOST
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    magic: int = V1_MAGIC

    @property
    def size(self) -> int:
        """Return the size of the encoded record in bytes."""
        hosts = IPV6_EXTRA * (self.born_host.is_ipv6 + self.store_host.is_ipv6)
        lengths = 0 if self.magic == V1_MAGIC else 1
        topic = len(self.topic.encode("utf-8", "surrogateescape"))
        return MIN_RECORD_SIZE + hosts + lengths + len(self.body) + topic + len(self.properties)

    @property
    def property_pairs(self) -> list[tuple[str, str]]:
        """Return the properties in the stored order."""
        return decode_properties(self.properties)

    @property
    def keys(self) -> list[str]:
        """Return UNIQ_KEY, then each word of KEYS; if a name occurs twice, its last value counts.

        The key index (`keys_of`) differs: there, the last value that is not empty counts.
        """
        found = dict(self.property_pairs)
        unique = found.get("UNIQ_KEY")
        keys = [key for key in found.get("KEYS", "").split(" ") if key]
        return [unique, *keys] if unique else keys

    @property
    def tags(self) -> str | None:
        """Return the TAGS value; of several the last that is not empty counts."""
        raw = stored_tags(self.properties)
        return None if raw is None else raw.decode("utf-8", "surrogateescape")

    @property
    def message_id(self) -> str:
        """Return the upper-case hexadecimal message id."""
        return message_id(self.store_host, self.physical_offset)


def _check_lengths(topic: bytes, topic_limit: int, properties: bytes) -> None:
    if len(topic) > topic_limit:
        raise MessageIllegalError(f"a topic of {len(topic)} bytes; at most {topic_limit}")
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(
            f"{len(properties)} bytes of properties; at most {MAX_PROPERTIES_BYTES}"
        )


def encode_record(record: Record) -> bytes:
    """Encode all fields as given.

    Raises MessageIllegalError if the topic or the properties are too long.
    """
    topic = record.topic.encode("utf-8", "surrogateescape")
    topic_limit = V1_MAX_TOPIC_BYTES if record.magic == V1_MAGIC else MAX_TOPIC_BYTES
    _check_lengths(topic, topic_limit, record.properties)
    length = len(topic)
    topic_length = bytes((length,)) if record.magic == V1_MAGIC else _SHORT.pack(length)
    flags = FLAG_BORN_IPV6 * record.born_host.is_ipv6 | FLAG_STORE_IPV6 * record.store_host.is_ipv6
    header = HEADERS[flags].pack(
        record.size, record.magic, record.body_crc, record.queue_id, record.flag,
        record.queue_offset, record.physical_offset, record.sys_flag, record.born_timestamp_ms,
        record.born_host.address, record.born_host.port, record.store_timestamp_ms,
        record.store_host.address, record.store_host.port, record.reconsume_times,
        record.prepared_transaction_offset, len(record.body),
    )  # fmt: skip
    properties_length = _SHORT.pack(len(record.properties))
    return b"".join(
        (header, record.body, topic_length, topic, properties_length, record.properties)
    )


RecordParts = tuple[int, int, int, int, int, int, int, int, int]


def find_parts(buffer: Buffer, at: int, end: int) -> RecordParts | None:
    """Find the parts of the record at `at`; reads nothing beyond `end`.

    Returns (size, stored bodyCRC, physicalOffset, sysFlag, start of the body, its length, start of
    the topic, its length, start of the properties). The properties end at `at + size`. Returns None
    if no whole record is there, or if its topic or properties show a torn write. Does not check
    bodyCRC.
    """
    if end - at < MIN_RECORD_SIZE:
        return None
    size, magic, crc, _, _, _, physical, flags = _unpack_prefix(buffer, at)
    if size > end - at or size < MIN_RECORD_SIZE:
        return None
    body_at = at + HEADER_SIZE
    if flags & FLAG_IPV6:
        body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
    stop: int = at + size
    if body_at > stop - TAIL_MIN:
        return None
    (body_length,) = _BODY_LENGTH.unpack_from(buffer, body_at - 4)
    topic_at = body_at + body_length
    if body_length < 0 or topic_at > stop - TAIL_MIN:
        return None
    if magic == V1_MAGIC:
        topic_length, limit = buffer[topic_at], V1_MAX_TOPIC_BYTES
        topic_at += 1
    elif magic == V2_MAGIC:
        topic_length, limit = buffer[topic_at] << 8 | buffer[topic_at + 1], MAX_TOPIC_BYTES
        topic_at += 2
    else:
        return None
    properties_at = topic_at + topic_length + 2
    if topic_length > limit or properties_at > stop:
        return None
    properties_length = buffer[properties_at - 2] << 8 | buffer[properties_at - 1]
    if properties_length > MAX_PROPERTIES_BYTES or properties_at + properties_length != stop:
        return None
    # The CRC covers only the body. A zero byte at either end of the topic, or at the end of the
    # properties, shows a torn write.
    if properties_length and not buffer[stop - 1]:
        return None
    if topic_length and (not buffer[topic_at] or not buffer[topic_at + topic_length - 1]):
        return None
    return (
        size, crc, physical, flags, body_at, body_length, topic_at, topic_length, properties_at
    )  # fmt: skip


def check_record(buffer: Buffer, at: int, end: int, physical_offset: int) -> int:
    """Return the size of the record at `at` if it is valid, else 0; raises nothing.

    A record is valid if its magic is known, its lengths add up, it ends at or before `end`, its
    bodyCRC is right, topic and properties show no torn write, and its physicalOffset is
    `physical_offset` (docs/formats.md).
    """
    parts = find_parts(buffer, at, end)
    if parts is None or parts[2] != physical_offset:
        return 0
    body_at = parts[4]
    if crc32(buffer[body_at : body_at + parts[5]]) & CRC_MASK != parts[1]:
        return 0
    return parts[0]


def check_wrong_crc(buffer: Buffer, at: int, end: int, physical_offset: int) -> int:
    """Return the size of the record at `at` if all but its bodyCRC is valid, else 0."""
    parts = find_parts(buffer, at, end)
    return 0 if parts is None or parts[2] != physical_offset else parts[0]


def stated_time_ms(buffer: Buffer, at: int, end: int, physical_offset: int) -> int | None:
    """Return when the record at `at` was stored, as its header states; raises nothing.

    Returns None if no header of a record is there that ends at or before `end`. Its body and its
    properties may be damaged.
    """
    if end - at < MIN_RECORD_SIZE:
        return None
    size, magic, _, _, _, _, physical, flags = _unpack_prefix(buffer, at)
    whole = MIN_RECORD_SIZE <= size <= min(end - at, MAX_RECORD_SIZE)
    if physical != physical_offset or not whole or magic not in (V1_MAGIC, V2_MAGIC):
        return None
    (stored,) = _LONG.unpack_from(buffer, at + store_at(flags))
    return int(stored)


def check_unreadable(buffer: Buffer, at: int, end: int, physical_offset: int) -> int:
    """Return the size of the record at `at` if it is undamaged but RocketMQ made it unreadable.

    RocketMQ writes V1 for a topic of up to 127 characters. If these take more than 127 bytes,
    topicLength holds only the number of bytes modulo 256 (docs/ha-link.md). Everything else,
    including bodyCRC, must be as in a valid record, so that a damaged record is not accepted.
    Returns 0 for all other bytes.
    """
    if end - at < MIN_RECORD_SIZE:
        return 0
    size, magic, crc, _, _, _, physical, flags = _unpack_prefix(buffer, at)
    if magic != V1_MAGIC or physical != physical_offset or not MIN_RECORD_SIZE <= size <= end - at:
        return 0
    body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
    stop: int = at + size
    if body_at > stop - TAIL_MIN:
        return 0
    (body_length,) = _BODY_LENGTH.unpack_from(buffer, body_at - 4)
    topic_at = body_at + body_length + 1
    if body_length < 0 or topic_at > stop - 2:
        return 0
    if crc32(buffer[body_at : topic_at - 1]) & CRC_MASK != crc:
        return 0
    for length in range(buffer[topic_at - 1], 4 * V1_MAX_TOPIC_BYTES, 256):
        properties_at = topic_at + length + 2
        if V1_MAX_TOPIC_BYTES < length and properties_at <= stop:
            properties = buffer[properties_at - 2] << 8 | buffer[properties_at - 1]
            topic = bytes(buffer[topic_at : topic_at + length])
            if properties_at + properties == stop and _is_short_text(topic):
                return int(size)
    return 0


def may_begin_record(buffer: Buffer, at: int, end: int, physical_offset: int) -> bool:
    """Whether [at, end) may be the beginning of a record that ends beyond `end`, as its size says.

    A damaged size says so too: then the lengths of body, topic and properties do not fit it. They
    are compared as far as they lie before `end`; the CRC is not.
    """
    if end - at < HEADER_SIZE:
        return True
    size, magic, _, _, _, _, physical, flags = _unpack_prefix(buffer, at)
    body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
    if physical != physical_offset or body_at > end:
        return bool(physical == physical_offset)
    (body_length,) = _BODY_LENGTH.unpack_from(buffer, body_at - 4)
    wide = magic == V2_MAGIC
    topic_at, stop = body_at + body_length + 1 + wide, at + size
    # RocketMQ's records of long topics, too: see check_unreadable.
    step, limit = (1 << 16, MAX_TOPIC_BYTES) if wide else (256, 4 * V1_MAX_TOPIC_BYTES)
    if body_length < 0 or not 2 <= stop - topic_at <= limit + 2 + MAX_PROPERTIES_BYTES:
        return False
    if topic_at > end:
        return True
    for length in range(int.from_bytes(buffer[topic_at - 1 - wide : topic_at]), limit + 1, step):
        properties_at = topic_at + length + 2
        if properties_at > end:
            return bool(properties_at <= stop)
        if properties_at + int.from_bytes(buffer[properties_at - 2 : properties_at]) == stop:
            return True
    return False


def _is_short_text(topic: bytes) -> bool:
    try:
        return len(topic.decode("utf-8")) <= V1_MAX_TOPIC_BYTES and b"\0" not in topic
    except UnicodeDecodeError:
        return False


def check_blank(buffer: Buffer, at: int, end: int) -> int:
    """Return the size of the blank at `at` if it ends exactly at `end`, else 0."""
    left = end - at
    if left < BLANK_SIZE or SIZE_AND_MAGIC.unpack_from(buffer, at) != (left, BLANK_MAGIC):
        return 0
    return left


def pack_blank(size: int) -> bytes:
    """Return the first 8 bytes of a blank of `size` bytes; its other bytes mean nothing."""
    return SIZE_AND_MAGIC.pack(size, BLANK_MAGIC)


def _parts_and_body(buffer: Buffer, at: int) -> tuple[RecordParts, bytes]:
    """Return the parts of the record at `at`, and its body. Raises CorruptRecordError."""
    parts = find_parts(buffer, at, len(buffer))
    if parts is None:
        raise CorruptRecordError(f"no record at byte {at} of {len(buffer)}")
    _, crc, _, _, body_at, body_length, _, _, _ = parts
    body = bytes(buffer[body_at : body_at + body_length])
    if crc32(body) & CRC_MASK != crc:
        raise CorruptRecordError(f"the body of the record at byte {at} has a wrong CRC")
    return parts, body


def decode_record(buffer: Buffer, at: int = 0) -> Record:
    """Read the record at `at`.

    Raises CorruptRecordError if no record is there or its bodyCRC is wrong. Does not check
    physicalOffset, because only the caller knows the record's offset.
    """
    parts, body = _parts_and_body(buffer, at)
    size, crc, physical, flags, _, _, topic_at, topic_length, properties_at = parts
    (
        _, magic, _, queue_id, flag, queue_offset, _, _, born_timestamp_ms, born_address, born_port,
        store_timestamp_ms, store_address, store_port, reconsume_times, prepared, _,
    ) = HEADERS[flags & FLAG_IPV6].unpack_from(buffer, at)  # fmt: skip
    return Record(
        body=body,
        topic=bytes(buffer[topic_at : topic_at + topic_length]).decode("utf-8", "surrogateescape"),
        queue_id=queue_id,
        properties=bytes(buffer[properties_at : at + size]),
        flag=flag,
        sys_flag=flags,
        queue_offset=queue_offset,
        physical_offset=physical,
        body_crc=crc,
        born_timestamp_ms=born_timestamp_ms,
        born_host=Host(born_address, born_port),
        store_timestamp_ms=store_timestamp_ms,
        store_host=Host(store_address, store_port),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared,
        magic=magic,
    )


def encode_moved(record: Record, topic: str, queue_id: int, **changes: Any) -> bytes:
    """Encode a record under another topic, as V2 if the topic has more than 127 bytes.

    RocketMQ's checksum of the whole old record is left out. Raises MessageIllegalError as
    `encode_record`.
    """
    changes["properties"] = without_crc(changes.get("properties", record.properties))
    wide = len(topic.encode("utf-8", "surrogateescape")) > V1_MAX_TOPIC_BYTES
    magic = V2_MAGIC if wide else V1_MAGIC
    return encode_record(replace(record, topic=topic, queue_id=queue_id, magic=magic, **changes))


class RawRecord(NamedTuple):
    """The bytes of one record: its header, and what follows it without the lengths."""

    header: bytes
    body: bytes
    topic: bytes
    properties: bytes


def split_record(raw: bytes) -> RawRecord:
    """Return the parts of the record at the begin of `raw`.

    Raises CorruptRecordError as `decode_record`.
    """
    parts, body = _parts_and_body(raw, 0)
    size, _, _, _, body_at, _, topic_at, topic_length, properties_at = parts
    topic = raw[topic_at : topic_at + topic_length]
    return RawRecord(raw[:body_at], body, topic, raw[properties_at:size])


def join_moved(record: RawRecord, queue_id: int, *, prepared_transaction_offset: int) -> bytes:
    """Encode a record whose topic or properties were replaced, as `encode_moved` does.

    Everything else in its header stays. It takes a third of the time: nothing is decoded.
    Raises MessageIllegalError as `encode_record`.
    """
    header, body, topic, properties = record
    length, properties = len(topic), without_crc(properties)
    _check_lengths(topic, MAX_TOPIC_BYTES, properties)
    wide = length > V1_MAX_TOPIC_BYTES
    magic = V2_MAGIC if wide else V1_MAGIC
    lengths = _SHORT.pack(length) if wide else bytes((length,))
    size = len(header) + len(body) + len(lengths) + length + _SHORT.size + len(properties)
    return b"".join(
        (
            SIZE_AND_MAGIC.pack(size, magic), header[SIZE_AND_MAGIC.size : _QUEUE_ID_AT],
            _INT.pack(queue_id), header[_QUEUE_ID_AT + _INT.size : -_PREPARED.size],
            _PREPARED.pack(prepared_transaction_offset, len(body)),
            body, lengths, topic, _SHORT.pack(len(properties)), properties,
        )
    )  # fmt: skip


def build_record(
    topic: str,
    body: bytes,
    *,
    queue_id: int,
    properties: Sequence[tuple[str, str]] = (),
    flag: int = 0,
    sys_flag: int = 0,
    born_timestamp_ms: int,
    born_host: Host,
) -> bytes:
    """Encode a new message as its producer sends it; the fields that the master fills in are 0.

    The record is V2 if the topic has more than 127 bytes. Raises MessageIllegalError for a topic,
    properties or a size that no record can have. `check_topic` has stricter rules for new topics.
    """
    name = topic.encode("utf-8")
    if not name or len(name) > MAX_TOPIC_BYTES or b"\0" in name:
        raise MessageIllegalError(f"a topic has 1 to {MAX_TOPIC_BYTES} bytes, none of them 0")
    raw = encode_properties(properties) if properties else b""
    if len(name) > V1_MAX_TOPIC_BYTES:
        magic, topic_length = V2_MAGIC, _SHORT.pack(len(name))
    else:
        magic, topic_length = V1_MAGIC, bytes((len(name),))
    sys_flag &= ~FLAG_IPV6
    if born_host.is_ipv6:
        sys_flag |= FLAG_BORN_IPV6
    header = HEADERS[sys_flag & FLAG_IPV6]
    size = header.size + len(body) + len(topic_length) + len(name) + _SHORT.size + len(raw)
    if size > MAX_RECORD_SIZE:
        raise MessageIllegalError(f"a record of {size} bytes does not fit any log")
    fixed = header.pack(
        size, magic, crc32(body) & CRC_MASK, queue_id, flag, 0, 0, sys_flag, born_timestamp_ms,
        born_host.address, born_host.port, 0, b"", 0, 0, 0, len(body),
    )  # fmt: skip
    return b"".join((fixed, body, topic_length, name, _SHORT.pack(len(raw)), raw))


def patch_for_store(
    buffer: bytearray,
    at: int,
    *,
    queue_offset: int,
    physical_offset: int,
    store_timestamp_ms: int,
    store_host: Host,
) -> None:
    """Fill in the fields that the master sets.

    Raises MessageIllegalError if the record has no room for the address family of `store_host`.
    """
    OFFSETS.pack_into(buffer, at + OFFSETS_AT, queue_offset, physical_offset)
    (flags,) = _SYS_FLAG.unpack_from(buffer, at)
    if bool(flags & FLAG_STORE_IPV6) != store_host.is_ipv6:
        raise MessageIllegalError("the record's storeHost is of another address family")
    form = STORE_IPV6 if store_host.is_ipv6 else STORE_IPV4
    form.pack_into(
        buffer, at + store_at(flags), store_timestamp_ms, store_host.address, store_host.port
    )
