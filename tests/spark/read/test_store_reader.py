"""Read a store's directory in place, without Spark."""

import os
import shutil
import zlib

import pytest

from hastore.errors import CorruptRecordError, PositionLostError, StoreError
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.record.properties import ROCKETMQ_PROPERTIES
from hastore.spark.arrow import batch
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import log_schema, project, source_schema
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange, split_log
from hastore.spark.read import stores
from hastore.spark.read.stores import PathBackend, PathHead
from hastore.store.derived.consume_queue import BATCH_UNIT
from hastore.store.offline.reader import StoreReader
from tests.spark.stores import GOLDEN, numbered, write_store

ALL = project(source_schema(include_headers=True, include_metadata=True))
LOG = project(log_schema())


def read(path, span, *, fail=True):
    with PathBackend(str(path), fail) as backend:
        span = QueueRange(span.topic, span.partition, span.start, span.end, backend.limit_offset())
        batches = list(backend.read_queue(span, BatchBuilder(ALL)))
    return [row for part in batches for row in part.to_pylist()]


def read_log(path, start, end, limit):
    with PathBackend(str(path), True) as backend:
        batches = list(backend.read_log(LogRange(start, end, limit), BatchBuilder(LOG)))
    return [row for part in batches for row in part.to_pylist()]


def test_the_golden_store_is_read_completely():
    path = GOLDEN / "three-files"
    with StoreReader(str(path)) as reader:
        expected = {r.physical_offset: r for r in reader.records()}
    rows = [row for q in range(4) for row in read(path, QueueRange("TopicA", q, 0, 100))]
    assert len(rows) == len(expected) == 400
    for row in rows:
        record = expected[row["physicalOffset"]]
        assert row["value"] == record.body
        assert row["key"].decode() == record.keys[-1]
        assert (row["partition"], row["offset"]) == (record.queue_id, record.queue_offset)
        users = [pair for pair in record.property_pairs if pair[0] not in ROCKETMQ_PROPERTIES]
        shown = [(h["key"], h["value"].decode()) for h in row["headers"] or ()]
        assert shown == users


def test_the_available_ranges_are_those_of_the_queues():
    with PathBackend(str(GOLDEN / "three-files"), True) as backend:
        available = backend.available()
        assert available == {TopicPartition("TopicA", q): OffsetRange(0, 100) for q in range(4)}
        assert backend.log_range() == (0, 167944)


def test_every_golden_variant_is_read_from_its_queue():
    path = GOLDEN / "variants"
    with StoreReader(str(path)) as reader:
        expected = {r.physical_offset: r.sys_flag for r in reader.records()}
    with PathBackend(str(path), True) as backend:
        available = backend.available()
    rows = [
        row
        for key, there in available.items()
        for row in read(path, QueueRange(*key, there.start, there.end))
    ]
    in_no_queue = sum(flag & 0xC in (0x4, 0xC) for flag in expected.values())
    assert len(rows) == len(expected) - in_no_queue
    assert all(row["sysFlag"] == expected[row["physicalOffset"]] for row in rows)
    assert {row["topic"] for row in rows} == {key.topic for key in available}


def test_ranges_cross_queue_files_log_files_and_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "UNITS_AT_ONCE", 64)
    placed = write_store(tmp_path, numbered(1_000, queues=2), file_size=4096)
    assert len(os.listdir(tmp_path / "commitlog")) > 20
    rows = read(tmp_path, QueueRange("t", 1, 37, 450))
    assert [row["offset"] for row in rows] == list(range(37, 450))
    expected = [r.body for r in placed if r.queue_id == 1][37:450]
    assert [row["value"] for row in rows] == expected


def test_an_inner_batch_is_in_the_one_range_that_has_its_first_message(tmp_path):
    whole = {"sys_flag": FLAG_INNER_BATCH}  # RocketMQ's consumers do not take them apart
    placed = write_store(tmp_path, [(*place, more | whole) for *place, more in numbered(10)])
    shutil.rmtree(tmp_path / "consumequeue")
    queue = tmp_path / "batchconsumequeue" / "t" / "0"
    queue.mkdir(parents=True)
    units = [
        BATCH_UNIT.pack(r.physical_offset, r.size, 0, r.store_timestamp_ms, 3 * n, 3, 0, 0)
        for n, r in enumerate(placed)
    ]
    (queue / f"{0:020}").write_bytes(b"".join(units).ljust(20 * BATCH_UNIT.size, b"\0"))
    for width in (1, 2, 4, 7, 30):
        spans = [QueueRange("t", 0, at, min(at + width, 30)) for at in range(0, 30, width)]
        rows = [row["offset"] for span in spans for row in read(tmp_path, span)]
        assert rows == list(range(0, 30, 3)), width


def test_ranges_of_the_log_return_each_record_once(tmp_path):
    placed = write_store(tmp_path, numbered(300, queues=3), file_size=4096)
    with PathBackend(str(tmp_path), True) as backend:
        start, end = backend.log_range()
    pieces = split_log(start, end, min_partitions=7)
    rows = [row for p in pieces for row in read_log(tmp_path, p.start, p.end, p.limit)]
    assert [row["physicalOffset"] for row in rows] == [r.physical_offset for r in placed]
    assert len(pieces) == 7


def test_the_log_is_read_up_to_a_limit_within_a_record(tmp_path):
    placed = write_store(tmp_path, numbered(20))
    cut = placed[12].physical_offset + 50
    rows = read_log(tmp_path, 0, cut, cut)
    assert [row["physicalOffset"] for row in rows] == [r.physical_offset for r in placed[:12]]


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, bytes(4)), (0, b"\x7f\0\0\0"), (0, (40_000).to_bytes(4)), (4, bytes(4))],
)
def test_damage_in_the_log_is_named(tmp_path, at, value):
    placed = write_store(tmp_path, numbered(20))
    bad = placed[7].physical_offset
    with open(next((tmp_path / "commitlog").iterdir()), "r+b") as file:
        file.seek(bad + at)
        file.write(value)
    end = placed[-1].physical_offset + placed[-1].size
    with pytest.raises(CorruptRecordError, match=f"offset {bad} "):
        read_log(tmp_path, 0, end, end)


def test_offsets_by_time(tmp_path):
    write_store(tmp_path, numbered(10))
    with PathBackend(str(tmp_path), True) as backend:
        times = (0, 1, 1_001, 9_000, 9_001)
        found = [backend.offset_by_time(TopicPartition("t", 0), ms) for ms in times]
    assert found == [0, 0, 2, 9, None], "zeros are no time: nobody knows how old the first one is"


def test_a_file_removed_by_retention_is_a_lost_position_not_damage(tmp_path):
    write_store(tmp_path, numbered(200), file_size=4096)
    files = sorted((tmp_path / "commitlog").iterdir())
    span = QueueRange("t", 0, 0, 200)
    whole = read(tmp_path, span)
    files[0].unlink()
    with pytest.raises(PositionLostError, match="failOnDataLoss"):
        read(tmp_path, span)
    rows = read(tmp_path, span, fail=False)
    assert rows == [row for row in whole if row["physicalOffset"] >= 4096]


def test_a_file_may_be_removed_after_its_queue_units_are_read(tmp_path, monkeypatch):
    write_store(tmp_path, numbered(200), file_size=4096)
    with PathBackend(str(tmp_path), False) as backend:
        found = backend._reader.queue_units("t", 0, 0, 200)
        monkeypatch.setattr(backend._reader, "queue_units", lambda *_, **__: found)
        (tmp_path / "commitlog" / f"{0:020}").unlink()
        batches = list(backend.read_queue(QueueRange("t", 0, 0, 200), BatchBuilder(ALL)))
    offsets = [row["physicalOffset"] for batch in batches for row in batch.to_pylist()]
    assert min(offsets) == 4096
    assert max(offsets) == found.offsets[-1]


def test_a_damaged_record_is_an_error_with_its_offset_not_a_loss(tmp_path):
    placed = write_store(tmp_path, numbered(50))
    bad = placed[20].physical_offset
    with open(next((tmp_path / "commitlog").iterdir()), "r+b") as file:
        file.seek(bad + 4)
        file.write(b"\0\0\0\0")
    shutil.rmtree(tmp_path / "index", ignore_errors=True)
    with PathBackend(str(tmp_path), False) as backend:
        end = placed[-1].physical_offset + placed[-1].size
        span = QueueRange("t", 0, 0, 50, end)
        with pytest.raises(CorruptRecordError, match=f"offset {bad} has no record magic"):
            list(backend.read_queue(span, BatchBuilder(ALL)))


def test_a_folder_that_is_not_a_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match="is no store"), PathBackend(str(tmp_path), True):
        pass


def test_the_store_of_rocketmq_on_dledger_is_read_by_queue_and_by_log(tmp_path):
    path = GOLDEN / "dledger-rocketmq" / "store"
    with StoreReader(str(path)) as reader:
        expected = {r.physical_offset: r for r in reader.records()}
    with PathBackend(str(path), True) as backend:
        ranges = {TopicPartition("Orders", 0): OffsetRange(0, 38)}
        ranges[TopicPartition("Orders", 1)] = OffsetRange(0, 30)
        assert backend.available() == ranges
        assert backend.log_range() == (0, 39643)
    rows = [row for q in (0, 1) for row in read(path, QueueRange("Orders", q, 0, 38 - 8 * q))]
    assert {row["physicalOffset"]: row["value"] for row in rows} == {
        offset: record.body for offset, record in expected.items()
    }
    logged = read_log(path, 0, 1 << 40, 39643)
    assert [row["physicalOffset"] for row in logged] == sorted(expected)
    for start in (1, 550, 32_501, 32_768):
        part = [row["physicalOffset"] for row in read_log(path, start, start + 9_000, 39643)]
        assert part == [at for at in sorted(expected) if start <= at - 48 < start + 9_000]


@pytest.mark.parametrize("opened", [lambda path: PathBackend(path, True).__enter__(), PathHead])
def test_a_path_that_is_not_there_is_named_with_its_machine(opened, tmp_path, monkeypatch):
    """With Spark Connect a relative path begins at the server, and may exist where the user is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stores.socket, "gethostname", lambda: "driver-7")
    place = tmp_path / "data" / "node2"
    expected = (
        f"no directory {place} on driver-7 \\('data/node2' in Spark's working directory there"
    )
    with pytest.raises(StoreError, match=expected):
        opened("data/node2")
    with pytest.raises(StoreError, match=f"there is no directory {place} on driver-7; a path must"):
        opened(str(place))


def test_bodies_that_decompress_to_much_are_read_in_batches_of_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(batch, "MADE_BYTES_PER_BATCH", 1_000)
    sizes = [400, 500, 200, 5_000, 10, 990, 1, 1_000, 1_000]
    bodies = [bytes([65 + n]) * size for n, size in enumerate(sizes)]
    packed = [("t", 0, {"body": zlib.compress(body), "sys_flag": 1}) for body in bodies]
    write_store(tmp_path, [*packed, ("t", 0, {"body": b"plain"})])
    with PathBackend(str(tmp_path), True) as backend:
        span = QueueRange("t", 0, 0, 10, backend.limit_offset())
        found = list(backend.read_queue(span, BatchBuilder(ALL)))
        [whole] = backend.read_queue(span, BatchBuilder(ALL, decompress=False))
    assert [part.num_rows for part in found] == [2, 1, 1, 2, 1, 1, 2]
    rows = [row for part in found for row in part.to_pylist()]
    assert [row["value"] for row in rows] == [*bodies, b"plain"]
    assert [row["offset"] for row in rows] == list(range(10)) and whole.num_rows == 10
