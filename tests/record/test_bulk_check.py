"""Records checked in a row: the same verdicts as one by one, and what a pull gives of them."""

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest

from hastore.client.messages import decode_messages
from hastore.errors import CorruptRecordError
from hastore.protocol.api import Position
from hastore.record.bulk_check import count_valid
from hastore.record.codec import Record, check_record, encode_record
from hastore.record.host import Host
from hastore.record.layout import FLAG_INNER_BATCH, MIN_RECORD_SIZE, OFFSETS, OFFSETS_AT, V1_MAGIC
from hastore.store.derived.queues.consume_queue import UNIT, UnitSelection
from hastore.store.derived.queues.unit_files import BLANK_UNIT_SIZE
from hastore.store.message_reader import PullStatus
from tests.random_records import random_record
from tests.store.kit import message, opened, put, read_log, scribble

SEEDS = range(12)
V4 = Host(b"\x7f\0\0\1", 1)


def one_by_one(data: bytes, offsets: list[int], sizes: list[int]) -> int:
    at = 0
    for number, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size > len(data) - at or check_record(data, at, at + size, offset) != size:
            return number
        at += size
    return len(offsets)


def both_ways(data: bytes, offsets: list[int], sizes: list[int]) -> int:
    """The verdict over lists, which is that over arrays."""
    found = count_valid(data, offsets, sizes)
    assert count_valid(data, np.array(offsets, np.int64), np.array(sizes, np.int64)) == found
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_the_verdict_is_that_of_each_record_alone(seed: int) -> None:
    chance = random.Random(seed)
    plain = {"magic": V1_MAGIC, "sys_flag": 0, "topic": "t", "born_host": V4, "store_host": V4}
    fixed = plain if seed % 3 else {}
    count = chance.choice((1, 10, 100))
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
        # Mostly in the heads and the ends, where the lengths are.
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


@pytest.mark.parametrize("seed", SEEDS)
def test_many_units_are_taken_as_each_alone(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        units, offset = [], chance.randrange(1_000)
        for _ in range(chance.choice((70, 300))):
            size = chance.choice((91, 200, 1_150))
            units.append((offset, chance.choice((size, size, size, 0, BLANK_UNIT_SIZE)), 7))
            offset += size + chance.choice((0, 0, 3_000))
        limit = chance.choice((offset, chance.randrange(offset), 0))
        bounds = chance.choice((5, 1_000)), chance.choice((1, 10_000, 1 << 30)), limit
        many, each = UnitSelection(*bounds), UnitSelection(*bounds)
        for begin in range(0, len(units), 150):
            part = units[begin : begin + 150]
            raw = b"".join(UNIT.pack(*unit) for unit in part)
            more = each.take_each(enumerate(part, begin))
            assert many.take(raw, begin) == more, seed
            assert many.count == each.count == len(each.queue_offsets)
            for name in ("queue_offsets", "offsets", "sizes"):
                assert list(getattr(many, name)) == list(getattr(each, name)), seed
            assert many.first == each.first
            if not more:
                break


def test_a_pull_gives_what_lies_before_damage_and_refuses_what_does_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        offsets = [result.offset for result in put(store, *map(message, range(20)))]
        assert store.wait_dispatched(store.max_offset, 60)

        def pull(at: int):  # type: ignore[no-untyped-def]
            return store.reader.pull(
                "TopicA", 0, at, max_messages=100, max_bytes=1 << 20,
                limit_offset=store.max_offset,
            )  # fmt: skip

        whole = pull(0)
        assert (whole.status, whole.count, whole.next_queue_offset) == (PullStatus.FOUND, 20, 20)
        assert whole.records == read_log(tmp_path)[: store.max_offset]
        assert whole.last_offset == offsets[-1]
        scribble(
            os.path.join(tmp_path, "commitlog", f"{0:020d}"), offsets[7] + MIN_RECORD_SIZE, b"?"
        )
        before = pull(0)
        assert (before.count, before.next_queue_offset, before.last_offset) == (7, 7, offsets[6])
        assert before.records == whole.records[: offsets[7]]
        with pytest.raises(CorruptRecordError, match=f"offset {offsets[7]} is damaged"):
            pull(7)
        assert pull(8).count == 12


def test_a_pull_passes_over_a_hole_of_whole_queue_files_and_over_no_record(tmp_path: Path) -> None:
    with opened(tmp_path, consume_queue_units=50) as store:
        offsets = [result.offset for result in put(store, *map(message, range(30)))]
        assert store.wait_dispatched(store.max_offset, 60)
        # As a queue lies that was deleted in RocketMQ while its position went on.
        queue = store.queues.get("TopicA", 0)
        assert queue is not None and offsets[0] is not None
        units = queue.files.read(0, 30)
        queue.files.skip_to(5_020)
        queue.files.append(units)
        queue.settle()
        found = store.reader.pull(
            "TopicA", 0, 31, max_messages=1_000, max_bytes=1 << 20, limit_offset=store.max_offset
        )
        assert (found.count, found.next_queue_offset) == (30, 5_050)


def inner_batch(base: int, count: int, offset: int) -> bytes:
    """A record that RocketMQ wrote for `count` messages of a queue from position `base` on."""
    body = b"%d messages" % count
    return encode_record(
        Record(
            body,
            "Batches",
            properties=b"INNER_BASE\x01%d\x02INNER_NUM\x01%d\x02" % (base, count),
            sys_flag=FLAG_INNER_BATCH,
            queue_offset=base,
            physical_offset=offset,
            body_crc=zlib.crc32(body) & 0x7FFFFFFF,
            store_timestamp_ms=1,
        )
    )


def test_behind_an_inner_batch_comes_the_next_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for base, count in ((0, 5), (5, 3), (8, 1)):
            store.append_replica(store.max_offset, inner_batch(base, count, store.max_offset))
        assert store.wait_dispatched(store.max_offset, 60)
        found = []
        for at in (0, 2, 5, 8):
            result = store.reader.pull(
                "Batches", 0, at, max_messages=1, max_bytes=9, limit_offset=store.max_offset
            )
            (message,), damage = decode_messages(result.records, [])
            assert (result.count, damage) == (1, None)
            assert message.next_position == Position(result.next_queue_offset)
            found.append((message.queue_offset, result.next_queue_offset))
        assert found == [(0, 5), (0, 5), (5, 8), (8, 9)]
        every = store.reader.pull(
            "Batches", 0, 0, max_messages=9, max_bytes=9_999, limit_offset=store.max_offset
        )
        assert (every.count, every.next_queue_offset) == (3, 9)
