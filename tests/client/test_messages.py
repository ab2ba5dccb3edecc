"""Lazily decoded messages agree with decode_record, and none is damaged."""

from __future__ import annotations

import random

import pytest

from hastore.client.messages import Message, decode_messages
from hastore.errors import CorruptRecordError
from hastore.protocol.api import Position
from hastore.record.codec import (
    Host,
    Record,
    build_record,
    decode_record,
    encode_record,
    patch_for_store,
)
from hastore.record.layout import MIN_RECORD_SIZE
from tests.random_records import random_record

SEEDS = range(10)
HOST = Host.parse("127.0.0.1:1")


def agree(message: Message, record: Record) -> None:
    assert message.record == record
    assert message.raw_body == record.body
    assert message.topic == record.topic
    assert message.queue_id == record.queue_id
    assert message.queue_offset == record.queue_offset
    assert message.offset == record.physical_offset
    assert message.message_id == record.message_id
    assert message.tags == record.tags
    assert message.properties == dict(record.property_pairs)
    first_keys = next((value for name, value in record.property_pairs if name == "KEYS"), None)
    assert message.key == first_keys
    assert message.born_timestamp_ms == record.born_timestamp_ms
    assert message.store_timestamp_ms == record.store_timestamp_ms


def alone(payload: bytes) -> int:
    """Return how many consecutive records decode_record reads."""
    at = count = 0
    while at < len(payload):
        try:
            at += decode_record(payload, at).size
        except CorruptRecordError:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_says_what_the_decoded_record_says(seed: int) -> None:
    chance = random.Random(seed)
    offsets = sorted(chance.sample(range(2**40), 100))
    records = [random_record(chance, physical_offset=offset) for offset in offsets]
    epochs = [(3, offsets[20]), (5, offsets[50]), (9, offsets[50] + 1), (11, offsets[99] + 1)]
    messages, damage = decode_messages(b"".join(map(encode_record, records)), epochs)
    assert damage is None
    assert len(messages) == len(records)
    for message, record in zip(messages, records, strict=True):
        agree(message, record)
        epoch = max((e for e, start in epochs if start <= message.offset), default=None)
        assert message.epoch == epoch
        following = message.queue_offset + 1
        expected = Position(following, epoch, message.offset) if epoch else Position(following)
        assert message.next_position == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_damage_ends_the_messages_where_decode_record_refuses(seed: int) -> None:
    chance = random.Random(seed)
    raw = [encode_record(random_record(chance)) for _ in range(30)]
    payload = b"".join(raw)
    starts = [sum(map(len, raw[:number])) for number in range(len(raw))]
    for _ in range(150):
        damaged = bytearray(payload)
        start = chance.choice(starts)
        places = (start + chance.randrange(MIN_RECORD_SIZE), chance.randrange(len(raw)), start - 1)
        at = chance.choice(places)
        damaged[at] = chance.choice((0, 0xFF, damaged[at] ^ 1 << chance.randrange(8)))
        cut = chance.choice((len(payload), chance.randrange(len(payload))))
        part = bytes(damaged[:cut])
        messages, damage = decode_messages(part, [(1, 0)])
        assert len(messages) == alone(part), (seed, at, cut)
        given = b"".join(encode_record(message.record) for message in messages)
        assert part.startswith(given)
        assert (damage is None) == (len(given) == len(part)), (seed, at, cut)


def test_nothing_is_read_from_nothing() -> None:
    assert decode_messages(b"", []) == ([], None)
    messages, damage = decode_messages(b"\0" * 200, [])
    assert messages == []
    assert isinstance(damage, CorruptRecordError)


def test_a_message_keeps_its_own_record_alone() -> None:
    raw = encode_record(Record(b"b" * 2_000, "topic", body_crc=0x2A9C4D5C))
    chance = random.Random(1)
    payload = b"".join(encode_record(random_record(chance)) for _ in range(50))
    (*_, last), _ = decode_messages(payload, [])
    assert len(last._head) + len(last.raw_body) + len(last._tail) == last.record.size < len(payload)
    assert all(isinstance(part, bytes) for part in (last._head, last.raw_body, last._tail))
    assert decode_messages(raw, [])[0] == []  # a wrong CRC


@pytest.mark.parametrize("seed", SEEDS)
def test_records_of_equal_sizes_are_checked_like_any_others(seed: int) -> None:
    """Runs of equal size, body length and tail: the record after a run does not belong to it."""
    chance = random.Random(seed)
    records: list[bytes] = []
    while len(records) < 60:
        body, key = chance.randint(0, 40), "k" * chance.randint(0, 3)
        for _ in range(chance.randint(1, 12)):
            shift = chance.choice((0, 0, 0, 1)) if body else 0  # the same size, other field sizes
            given = [("KEYS", f"{key}{chance.randint(10, 99)}" + "x" * shift)]
            raw = bytearray(
                build_record(
                    "t", chance.randbytes(body - shift), queue_id=1, born_timestamp_ms=1,
                    born_host=HOST, properties=given if chance.random() < 0.9 else given * 2,
                )
            )  # fmt: skip
            patch_for_store(
                raw, 0, queue_offset=len(records), physical_offset=1_000 * len(records),
                store_timestamp_ms=2, store_host=HOST,
            )  # fmt: skip
            records.append(bytes(raw))
    payload = b"".join(records)
    epochs = [(3, 0), (5, 7_000), (9, 31_001)]
    messages, damage = decode_messages(payload, epochs)
    assert damage is None
    assert [message.record for message in messages] == [decode_record(raw) for raw in records]
    assert [message.epoch for message in messages] == [
        max(epoch for epoch, start in epochs if start <= message.offset) for message in messages
    ]
    for _ in range(300):
        torn = bytearray(payload)
        at = chance.randrange(len(torn))
        torn[at] = chance.choice((0, torn[at] ^ (1 << chance.randrange(8))))
        found, damage = decode_messages(bytes(torn), epochs)
        assert len(found) == alone(bytes(torn))
        assert (damage is None) == (sum(map(size_of, found)) == len(torn))


def size_of(message: Message) -> int:
    return len(message._head) + len(message.raw_body) + len(message._tail)
