"""Records of the log: what one check accepts, the others read, and writing gives the same bytes."""

from __future__ import annotations

import zlib

import numpy as np

from hastore.errors import CorruptRecordError, MessageIllegalError, UsageError
from hastore.record import bulk_check, codec
from hastore.record.bulk_check import Places, count_valid
from hastore.record.codec import (
    Host,
    Record,
    check_blank,
    check_record,
    check_unreadable,
    decode_record,
    encode_record,
    find_parts,
    join_moved,
    message_id,
    pack_blank,
    parse_message_id,
    split_record,
)
from hastore.record.layout import (
    CRC_MASK,
    FLAG_IPV6,
    HEADER_SIZES,
    MAX_TOPIC_BYTES,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    V2_MAGIC,
)
from tests.fuzz import kit
from tests.random_records import random_record

REACHES = (
    check_record,
    find_parts,
    check_unreadable,
    check_blank,
    decode_record,
    split_record,
    join_moved,
    count_valid,
    bulk_check._count_plain,
    bulk_check._count_first,
    codec._check_lengths,
    parse_message_id,
)
LEAST = kit.Least(0.5, 2)
TOKENS = (
    V1_MAGIC.to_bytes(4),
    V2_MAGIC.to_bytes(4),
    b"\x01T\0\0",
    b"KEYS\x01a\x02",
    b"TAGS\x01t\x02",
)
IPV4 = Host(bytes((127, 0, 0, 1)), 10_911)


def record(**fields: object) -> bytes:
    """Return the bytes of a record."""
    body = fields.setdefault("body", b"body")
    assert isinstance(body, bytes)
    fields = {
        "topic": "T", "body_crc": zlib.crc32(body) & CRC_MASK, "born_host": IPV4,
        "store_host": IPV4, "properties": b"KEYS\x01a b\x02TAGS\x01t\x02", **fields,
    }  # fmt: skip
    return encode_record(Record(**fields))  # type: ignore[arg-type]


def seeds() -> list[bytes]:
    """Return records of RocketMQ's, of each version and family, and blanks."""
    real = kit.golden("variants/commitlog/00000000000000000000", 1 << 16)
    found, at = [], 0
    while parts := find_parts(real, at, len(real)):
        if parts[0] <= 1_000:
            found.append(real[at : at + parts[0]])
        at += parts[0]
    chance = kit.drawn(b"records")
    made = [encode_record(random_record(chance)) for _ in range(12)]
    wide = record(topic="é" * 100, magic=V2_MAGIC)
    # As RocketMQ 5 writes the topic of 100 characters: V1, its length modulo 256.
    unreadable = bytearray(wide[:4] + V1_MAGIC.to_bytes(4) + wide[8:])
    at = wide.index("é".encode() * 100)
    del unreadable[at - 2 : at]
    unreadable[at - 2 : at - 2] = bytes((200,))
    unreadable[:4] = len(unreadable).to_bytes(4)
    return [
        *found, *(one for one in made if len(one) < 1_500), record(), record(body=b"", topic=""),
        record() * 2, record(physical_offset=2**40), pack_blank(40) + bytes(32), bytes(unreadable),
        record(body_crc=1), record(properties=b"a\x01b\0"), record(topic="\0a"),
        b"0" * 32, message_id(IPV4, 5).encode(),
    ]  # fmt: skip


def repaired(data: bytes) -> bytes:
    """Return a record whose size, CRC and lengths fit, as far as there is room."""
    raw = bytearray(data)
    if len(raw) < 95:
        return data
    raw[:4] = len(raw).to_bytes(4)
    if raw[4:8] not in (V1_MAGIC.to_bytes(4), V2_MAGIC.to_bytes(4)):
        raw[4:8] = V1_MAGIC.to_bytes(4)
    wide = raw[4:8] == V2_MAGIC.to_bytes(4)
    body_at = HEADER_SIZES[int.from_bytes(raw[36:40]) & FLAG_IPV6]
    room = len(raw) - body_at - 3 - wide
    if room < 0:
        return bytes(raw)
    body = int.from_bytes(raw[body_at - 4 : body_at]) % (room + 1)
    raw[body_at - 4 : body_at] = body.to_bytes(4)
    raw[8:12] = (zlib.crc32(raw[body_at : body_at + body]) & CRC_MASK).to_bytes(4)
    topic_at = body_at + body + 1 + wide
    most = min(room - body, MAX_TOPIC_BYTES if wide else V1_MAX_TOPIC_BYTES)
    topic = int.from_bytes(raw[topic_at - 1 - wide : topic_at]) % (most + 1)
    raw[topic_at - 1 - wide : topic_at] = topic.to_bytes(1 + wide)
    properties = len(raw) - topic_at - topic - 2
    raw[topic_at + topic : topic_at + topic + 2] = properties.to_bytes(2)
    return bytes(raw)


def one(data: bytes) -> None:
    """Check the bytes in each way; decode and encode what is valid."""
    text = data.decode("latin-1")
    if len(data) in (32, 56) and "MESSAGE" not in text:
        _message_id(text)
    blank = check_blank(data, 0, len(data))
    assert blank in (0, len(data)) and (not blank or data.startswith(pack_blank(blank)))
    physical = int.from_bytes(data[28:36], signed=True)
    unreadable = check_unreadable(data, 0, len(data), physical)
    assert 0 <= unreadable <= len(data)
    parts = find_parts(data, 0, len(data))
    size = check_record(data, 0, len(data), physical)
    _same_in_bulk(data, physical, size)
    with kit.documented(CorruptRecordError):
        found = decode_record(data)
        split = split_record(data)
    assert parts is not None and size == parts[0] == found.size
    assert not check_record(data, 0, size - 1, physical)
    assert not check_record(data, 0, size, physical + 1)
    assert encode_record(found) == data[:size]
    assert (split.body, split.topic) == (found.body, found.topic.encode("utf-8", "surrogateescape"))
    assert found.born_host.text and found.message_id and (found.tags or True)
    assert all(key for key in found.keys) and len(found.property_pairs) <= len(found.properties)
    with kit.documented(MessageIllegalError):
        moved = join_moved(split, 3, prepared_transaction_offset=7)
    again = decode_record(moved)
    assert (again.queue_id, again.prepared_transaction_offset) == (3, 7)
    assert (again.body, again.topic, again.properties) == (
        found.body,
        found.topic,
        found.properties,
    )


def _message_id(text: str) -> None:
    try:
        host, offset = parse_message_id(text)
    except UsageError:
        return
    assert message_id(host, offset) == text.upper()


def _same_in_bulk(data: bytes, physical: int, size: int) -> None:
    """What the checks of many records say of copies of this one is what `check_record` says."""
    stated = int.from_bytes(data[:4])
    if not 0 < stated <= len(data) or stated > 4_096:
        return
    copies, record_ = 3, data[:stated]
    whole, offsets, sizes = record_ * copies, [physical] * copies, [stated] * copies
    expected = copies if size == stated else 0
    assert count_valid(whole, offsets, sizes) == expected
    arrays = np.array(offsets, np.int64), np.array(sizes, np.int64)
    assert count_valid(whole, *arrays) == expected
    without = count_valid(whole, offsets, sizes, bodies=False)
    assert without >= expected and count_valid(whole, *arrays, bodies=False) >= expected
    parts = find_parts(record_, 0, stated)
    topic = b"t" if parts is None else record_[parts[6] : parts[6] + parts[7]]
    queue_id, queue_offset = int.from_bytes(data[12:16], signed=True), data[20:28]
    places = Places(topic, queue_id, [int.from_bytes(queue_offset, signed=True)] * copies)
    assert count_valid(whole, offsets, sizes, places) == expected
    assert count_valid(whole, *arrays, places) == expected
