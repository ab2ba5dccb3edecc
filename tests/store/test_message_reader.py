"""Pulls of a store: damage, holes in a queue, inner batches."""

import os
import zlib
from pathlib import Path

import pytest

from hastore.client.messages import decode_messages
from hastore.errors import CorruptRecordError
from hastore.protocol.api import Position
from hastore.record.codec import Record, encode_record
from hastore.record.layout import FLAG_INNER_BATCH, MIN_RECORD_SIZE
from hastore.store.message_reader import PullStatus
from tests.store.kit import message, opened, put, read_log, scribble


def test_a_pull_returns_the_records_before_damage_and_refuses_the_damaged_one(
    tmp_path: Path,
) -> None:
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


def test_a_pull_skips_a_hole_of_whole_queue_files_but_no_record(tmp_path: Path) -> None:
    with opened(tmp_path, consume_queue_units=50) as store:
        offsets = [result.offset for result in put(store, *map(message, range(30)))]
        assert store.wait_dispatched(store.max_offset, 60)
        # RocketMQ leaves such a queue when its files were deleted but its queue offset continued.
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
    """Return a record that RocketMQ wrote for `count` messages from queue offset `base` on."""
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


def test_the_next_offset_after_an_inner_batch_is_that_of_the_next_one(tmp_path: Path) -> None:
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
