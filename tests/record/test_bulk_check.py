"""Many records are checked at once, with the verdict of `check_record` for each."""

import random
from zlib import crc32

import numpy as np
import pytest

from hastore.record.bulk_check import Places, count_valid, is_placed
from hastore.record.codec import Host, check_record, encode_record
from hastore.record.layout import (
    CRC_MASK,
    FLAG_BORN_IPV6,
    MIN_RECORD_SIZE,
    OFFSETS,
    OFFSETS_AT,
    V1_MAGIC,
)
from hastore.record.properties import encode_properties
from tests.random_records import random_record

SEEDS = range(12)
PROPERTIES = b"TAGS\x01a\x02"
V4 = Host(b"\x7f\0\0\1", 1)


def one_by_one(
    data: bytes, offsets: list[int], sizes: list[int], places: Places | None = None
) -> int:
    at = 0
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size > len(data) - at or check_record(data, at, at + size, offset) != size:
            return number
        if places is not None and not is_placed(data, at, at + size, places, number):
            return number
        at += size
    return len(offsets)


def both_ways(data: bytes, offsets: list[int], sizes: list[int], topic: bytes = b"t") -> int:
    """Return the verdict for lists, which must be that for arrays, and so with places."""
    found = count_valid(data, offsets, sizes)
    arrays = np.array(offsets, np.int64), np.array(sizes, np.int64)
    assert count_valid(data, *arrays) == found
    places = Places(topic, 3, range(len(sizes)))
    placed = one_by_one(data, offsets, sizes, places)
    assert count_valid(data, offsets, sizes, places) == placed
    assert count_valid(data, *arrays, places) == placed
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verdict_is_that_of_each_record_alone(seed: int) -> None:
    chance = random.Random(seed)
    plain = {
        "magic": V1_MAGIC, "sys_flag": 0, "topic": "t", "queue_id": 3, "born_host": V4,
        "store_host": V4,
    }  # fmt: skip
    fixed = plain if seed % 3 else {}
    count = chance.choice((1, 10, 32, 100))
    records = [encode_record(random_record(chance, **fixed)) for _ in range(count)]
    offsets, at = [], 0
    for number, record in enumerate(records):
        at += chance.choice((0, 0, 500)) + len(record)
        offsets.append(at)
        patched = bytearray(record)
        OFFSETS.pack_into(patched, OFFSETS_AT, number, at)
        records[number] = bytes(patched)
    sizes = [len(record) for record in records]
    data = b"".join(records)
    assert both_ways(data, offsets, sizes) == len(records) == one_by_one(data, offsets, sizes)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    for _ in range(100):
        damaged = bytearray(data)
        start = chance.choice(starts)
        # Mostly in the headers and at the ends, where the lengths are.
        places = (start + chance.randrange(MIN_RECORD_SIZE), chance.randrange(len(data)), start - 1)
        at = chance.choice(places)
        damaged[at] = chance.choice((0, 0xFF, damaged[at] ^ 1 << chance.randrange(8)))
        raw = bytes(damaged)
        expected = one_by_one(raw, offsets, sizes)
        assert both_ways(raw, offsets, sizes) == expected, (seed, at, raw[at])
    for short in (data[:-1], data[: len(data) // 2], b""):
        assert both_ways(short, offsets, sizes) == one_by_one(short, offsets, sizes)
    odd = sizes.copy()
    odd[chance.randrange(len(odd))] += chance.choice((-1, 1, 1 << 30))
    assert both_ways(data, offsets, odd) == one_by_one(data, offsets, odd)


def test_each_part_of_a_few_records_is_checked() -> None:
    chance = random.Random(3)
    plain = {
        "magic": V1_MAGIC, "sys_flag": 0, "topic": "topic", "queue_id": 3, "born_host": V4,
        "store_host": V4, "body": b"body", "body_crc": crc32(b"body") & CRC_MASK,
        "properties": PROPERTIES,
    }  # fmt: skip
    records = [bytearray(encode_record(random_record(chance, **plain))) for _ in range(3)]
    size = len(records[0])
    for number, record in enumerate(records):
        OFFSETS.pack_into(record, OFFSETS_AT, number, number * size)
    offsets, sizes = [0, size, 2 * size], [size] * 3
    whole = b"".join(records)
    assert both_ways(whole, offsets, sizes, b"topic") == 3
    topic_at = size + whole[size:].index(b"\x05topic")
    ends = {topic_at + 1, topic_at + 5, 2 * size - 1}  # zeros there show a torn write
    unchecked = {*range(size + 12, size + 28), *range(size + 40, size + 84)}  # of the header
    unchecked |= {*range(topic_at + 1, topic_at + 6), *range(topic_at + 8, 2 * size)}
    for at in range(size, 2 * size):
        for value in (0, whole[at] ^ 1, 0xFF):
            damaged = bytearray(whole)
            damaged[at] = value
            is_seen = value != whole[at] and (at not in unchecked or (at in ends and not value))
            count = both_ways(bytes(damaged), offsets, sizes, b"topic")
            assert count == one_by_one(bytes(damaged), offsets, sizes), (at, value)
            assert count == (1 if is_seen else 3) or at in range(size + 36, size + 40), (at, value)


def test_a_record_with_too_long_properties_is_not_valid() -> None:
    record = bytearray(encode_record(random_record(
        random.Random(3), magic=V1_MAGIC, sys_flag=0, topic="t", body=b"", body_crc=0,
        born_host=V4, store_host=V4, properties=b"p" * 32_767, queue_id=3,
    )))  # fmt: skip
    record += b"p"
    record[:4] = len(record).to_bytes(4)
    record[-32_770:-32_768] = (32_768).to_bytes(2)
    OFFSETS.pack_into(record, OFFSETS_AT, 0, 0)
    assert both_ways(bytes(record), [0], [len(record)]) == 0


def test_without_bodies_a_wrong_crc_is_accepted_and_nothing_else() -> None:
    chance = random.Random(7)
    plain = {"magic": V1_MAGIC, "sys_flag": 0, "topic": "t", "born_host": V4, "store_host": V4}
    records = [bytearray(encode_record(random_record(chance, **plain))) for _ in range(20)]
    sizes = np.array([len(record) for record in records], np.int64)
    offsets = sizes.cumsum() - sizes
    for number, record in enumerate(records):
        OFFSETS.pack_into(record, OFFSETS_AT, number, int(offsets[number]))
    records[12][8] ^= 1  # the CRC
    data = b"".join(records)
    assert count_valid(data, offsets, sizes) == 12
    assert count_valid(data, offsets, sizes, bodies=False) == 20
    records[15][4] ^= 1  # the magic
    assert count_valid(b"".join(records), offsets, sizes, bodies=False) <= 15


@pytest.mark.parametrize("fixed", [{}, {"magic": V1_MAGIC, "born_host": V4, "store_host": V4}])
def test_a_record_of_another_place_is_not_valid_there(fixed: dict[str, object]) -> None:
    """Unless RocketMQ has put it into a queue of another topic, too: it names that."""
    chance = random.Random(11)
    others = encode_properties([("INNER_MULTI_DISPATCH", "%LMQ%a,other,b"), ("k", "v")])
    alike = {"topic": "topic", "queue_id": 3, **fixed}
    strange = {5: {"topic": "t\u00f6pic"}, 6: {"queue_id": 4}, 7: {"topic": "topi"}}
    for bad in (*strange, 8, 9, None):
        pieces, at = [], 0
        for number in range(12):
            changes = dict(strange[number]) if number == bad and bad in strange else {}
            if number == bad == 9:
                changes = {"topic": "more", "properties": others}
            sys_flag = 0 if fixed else chance.choice((0, FLAG_BORN_IPV6))
            born = {} if fixed else {"born_host": Host(bytes(16 if sys_flag else 4), 1)}
            record = bytearray(encode_record(random_record(chance, **{
                **alike, "store_host": V4, "sys_flag": sys_flag, **born, **changes,
            })))  # fmt: skip
            OFFSETS.pack_into(record, OFFSETS_AT, 100 + number + (number == bad == 8), at)
            pieces.append(bytes(record))
            at += len(record)
        sizes = [len(one) for one in pieces]
        offsets = [sum(sizes[:number]) for number in range(12)]
        data, expected = b"".join(pieces), 12 if bad is None else bad
        for rows in (range(100, 112), list(range(100, 112)), np.arange(100, 112)):
            places = Places(b"topic", 3, rows)
            arrays = np.array(offsets, np.int64), np.array(sizes, np.int64)
            assert count_valid(data, offsets, sizes, places) == expected, bad
            assert count_valid(data, *arrays, places) == expected, bad
        assert count_valid(data, offsets, sizes) == 12
        batches = 12 if bad == 8 else expected  # an inner batch takes several queue offsets
        assert count_valid(data, offsets, sizes, Places(b"topic", 3, None)) == batches
        if bad == 9:
            for topic, count in ((b"other", 1), (b"%LMQ%a", 1), (b"othe", 0)):
                there = Places(topic, 0, [7])
                assert count_valid(pieces[9], [offsets[9]], [sizes[9]], there) == count
