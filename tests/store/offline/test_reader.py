"""The reader for other processes: limits, queue units, torn records, files that come and go."""

import shutil
import struct
from pathlib import Path

import pytest

from hastore.errors import CorruptRecordError, StoreError, UsageError
from hastore.fs.filesystem import REAL
from hastore.record.codec import encode_record
from hastore.store.derived.consume_queue import ConsumeQueueTable
from hastore.store.offline import reader as reading
from hastore.store.offline.reader import StoreReader
from hastore.store.state.limits import Limits, LimitsPage
from tests.store.derived_files import Derived
from tests.store.logs import GOLDEN, START_MS, MemoryLog, fill


def write_log(root: Path, log: MemoryLog) -> None:
    """Write the log's files at full size."""
    directory = root / "commitlog"
    directory.mkdir(parents=True, exist_ok=True)
    for at in range(0, max(len(log.data), 1), log.file_size):
        part = bytes(log.data[at : at + log.file_size])
        (directory / f"{log.base + at:020d}").write_bytes(part.ljust(log.file_size, b"\0"))


def store_of(root: Path, log: MemoryLog) -> StoreReader:
    write_log(root, log)
    derived = Derived.over(root, log)
    derived.build.replay()
    derived.build.close()
    return StoreReader(str(root))


def set_limits(root: Path, readable: int) -> LimitsPage:
    page = LimitsPage(REAL, str(root))
    (root / "hastore").mkdir(exist_ok=True)
    page.open(Limits(file_size=65536, readable_offset=readable))
    return page


@pytest.mark.parametrize(
    ("name", "end", "count"), [("three-files", 167944, 400), ("variants", 18770, 15)]
)
def test_golden_stores_are_read_whole(name: str, end: int, count: int) -> None:
    with StoreReader(str(GOLDEN / name)) as reader:
        assert not reader.is_hastore and reader.readable_offset is None
        assert (reader.min_offset, reader.limit_offset, reader.file_size) == (0, end, 65536)
        records = list(reader.records())
        assert len(records) == count
        raws = dict(reader.raw_records())
        assert all(encode_record(record) == raws[record.physical_offset] for record in records)
        for topic, queues in reader.topics().items():
            for queue_id, (low, high) in queues.items():
                found = list(reader.queue_records(topic, queue_id))
                assert [record.queue_offset for record in found] == list(range(low, high))


def test_reading_ends_at_the_nodes_limit_with_a_whole_record(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 400)
    reader = store_of(tmp_path, log)
    page = set_limits(tmp_path, records[100].physical_offset)
    assert reader.is_hastore and reader.readable_offset == reader.limit_offset
    assert len(list(reader.records())) == 100
    assert reader.topics() == {"Topic": {0: (0, 50), 1: (0, 50)}}
    page.update(readable=records[100].physical_offset + 50)
    assert len(list(reader.records())) == 100
    assert reader.queue_range("Topic", 0) == (0, 50)
    assert reader.record_at(records[100].physical_offset) is None
    page.update(readable=log.max_offset)
    assert len(list(reader.records())) == 400
    assert len(list(reader.queue_records("Topic", 1))) == 200
    page.update(readable=0)
    assert list(reader.records()) == []
    page.close()


def test_ranges_begin_at_a_record(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 700)
    reader = store_of(tmp_path, log)
    starts = [record.physical_offset for record in records]
    for cut in (1, starts[3], starts[3] + 1, 65000, 65536, 65537, starts[-1]):
        left = [offset for offset, _ in reader.raw_records(None, cut)]
        right = [offset for offset, _ in reader.raw_records(cut, None)]
        assert left + right == starts


def test_units_of_a_range(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 1400)
    reader = store_of(tmp_path, log)
    found = reader.queue_units("Topic", 1, 250, 650)
    assert list(found.queue_offsets) == list(range(250, 650))
    expected = [record.physical_offset for record in records if record.queue_id == 1][250:650]
    assert list(found.offsets) == expected
    assert len(found) == len(found.sizes) == len(found.tags_codes) == 400
    assert len(reader.queue_units("Topic", 7)) == 0
    assert reader.queue_range("Topic", 7) is None
    assert reader.queue_offset_by_time("Topic", 0, START_MS + 1000) == 5
    with pytest.raises(UsageError):
        reader.queue_units("../commitlog", 0)


@pytest.mark.parametrize("damage", [(90, b"\xff"), (0, bytes(91))])
def test_a_search_by_time_steps_over_no_message_because_another_one_is_damaged(
    tmp_path: Path, damage: tuple[int, bytes]
) -> None:
    """In its body, or in its header, so that nobody knows its time."""
    at, data = damage
    log = MemoryLog()
    own = [record for record in fill(log, 40) if record.queue_id == 0]
    times = [record.store_timestamp_ms for record in own]
    with store_of(tmp_path, log) as reader:
        assert [reader.queue_offset_by_time("Topic", 0, ms) for ms in times] == [*range(20)]
    for bad, record in enumerate(own):
        damaged = MemoryLog()
        damaged.data = bytearray(log.data)
        damaged.data[record.physical_offset + at : record.physical_offset + at + len(data)] = data
        write_log(tmp_path, damaged)
        with StoreReader(str(tmp_path)) as opened:
            if opened.limit_offset < log.max_offset:
                continue  # the last record
            found = [opened.queue_offset_by_time("Topic", 0, ms) for ms in times]
        near = [number - (at == 0 and number == bad + 1) for number in range(20)]
        assert found == near, bad


def test_a_search_by_time_among_damaged_records_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "DAMAGED_MAX", 3)
    log = MemoryLog()
    own = [record for record in fill(log, 60) if record.queue_id == 0]
    store_of(tmp_path, log).close()
    for record in own[5:25]:
        log.data[record.physical_offset : record.physical_offset + 8] = bytes(8)
    write_log(tmp_path, log)
    with (
        StoreReader(str(tmp_path)) as reader,
        pytest.raises(CorruptRecordError, match="no record's header is at offset"),
    ):
        reader.queue_offset_by_time("Topic", 0, START_MS)


def test_queues_shorter_or_longer_than_the_log(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 300)
    reader = store_of(tmp_path, log)
    log.cut(records[200].physical_offset)
    write_log(tmp_path, log)
    assert reader.topics() == {"Topic": {0: (0, 100), 1: (0, 100)}}
    assert len(list(reader.queue_records("Topic", 0))) == 100
    shutil.rmtree(tmp_path / "consumequeue")
    assert reader.topics() == {}


def test_a_torn_end_is_hidden_and_growth_is_seen(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 100)
    whole = log.max_offset
    fill(log, 1)
    torn = log.data[: log.max_offset - 5]
    for size in range(whole + 1, len(torn), 7):
        part = MemoryLog()
        part.data = torn[:size]
        write_log(tmp_path, part)
        with StoreReader(str(tmp_path)) as reader:
            assert reader.limit_offset == whole
            assert len(list(reader.records())) == 100
    with StoreReader(str(tmp_path)) as reader:
        assert reader.limit_offset == whole
        fill(log, 900)
        write_log(tmp_path, log)
        assert reader.limit_offset == log.max_offset
        assert len(list(reader.records())) == 1001


def test_damage_below_the_limit_is_reported(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 100)
    reader = store_of(tmp_path, log)
    set_limits(tmp_path, log.max_offset).close()
    log.data[records[50].physical_offset + 89] ^= 1
    write_log(tmp_path, log)
    with pytest.raises(CorruptRecordError, match=f"offset {records[50].physical_offset}"):
        list(reader.records())
    with pytest.raises(CorruptRecordError):
        list(reader.queue_records("Topic", records[50].queue_id))


@pytest.mark.parametrize("back", [1, 80, 5000])
@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"\xff" * 4), (0, b"\x7f\xff\xff\xff"), (0, (65536).to_bytes(4)), (4, bytes(4))],
)
def test_a_damaged_size_near_the_limit_is_not_a_partial_record(
    tmp_path: Path, at: int, value: bytes, back: int
) -> None:
    log = MemoryLog()
    records = fill(log, 100)
    bad = records[-1].physical_offset
    # The last record ends at the limit, or the limit lies inside it, after its magic.
    limit = max(log.max_offset + 1 - back, bad + 8) if back < 5000 else log.max_offset + back
    log.data[bad + at : bad + at + 4] = value
    write_log(tmp_path, log)
    set_limits(tmp_path, limit).close()
    with StoreReader(str(tmp_path)) as reader:
        with pytest.raises(CorruptRecordError, match=f"offset {bad}"):
            list(reader.records())
        assert len(list(reader.raw_records(None, bad))) == 99


@pytest.mark.parametrize("more", [100, 1000, 20_000])
def test_a_damaged_size_does_not_end_the_reading_in_front_of_other_records(
    tmp_path: Path, more: int
) -> None:
    """The size fits the file, and points beyond the limit: it says nothing of the record's end."""
    log = MemoryLog()
    records = fill(log, 100)
    bad = records[50].physical_offset
    log.data[bad : bad + 4] = (log.max_offset - bad + more).to_bytes(4)
    write_log(tmp_path, log)
    set_limits(tmp_path, log.max_offset).close()
    with StoreReader(str(tmp_path)) as reader, pytest.raises(CorruptRecordError, match=f"{bad}"):
        list(reader.records())


@pytest.mark.parametrize("shown", [1, 4, 7, 8, 50])
def test_a_record_that_the_limit_cuts_ends_the_reading(tmp_path: Path, shown: int) -> None:
    log = MemoryLog()
    records = fill(log, 100)
    write_log(tmp_path, log)
    set_limits(tmp_path, records[-1].physical_offset + shown).close()
    with StoreReader(str(tmp_path)) as reader:
        assert len(list(reader.records())) == 99


def test_retention_while_reading(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 1400)
    reader = store_of(tmp_path, log)
    walk = reader.records()
    next(walk)
    files = sorted((tmp_path / "commitlog").iterdir())
    assert len(files) > 2
    files[0].unlink()
    files[1].unlink()
    with pytest.raises(StoreError, match="retention"):
        list(walk)
    low = reader.min_offset
    assert low == 2 * 65536
    assert next(reader.records()).physical_offset == low
    limits = reader.queue_range("Topic", 0)
    assert limits is not None and limits[0] > 0
    assert next(iter(reader.queue_records("Topic", 0))).physical_offset >= low


def test_views_stay_within_the_limit(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 700)
    reader = store_of(tmp_path, log)
    page = set_limits(tmp_path, 1000)
    with reader.view(900, 5000) as view:
        assert bytes(view) == log.data[900:1000]
    with reader.view(1000, 10) as view:
        assert len(view) == 0
    page.update(readable=log.max_offset)
    with reader.view(65000, 5000) as view:
        assert len(view) == 536
    file = reader.files()[0]
    assert bytes(reader.file_view(file)) == log.data[:65536]
    page.close()


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        StoreReader(str(tmp_path))
    (tmp_path / "commitlog").mkdir()
    with StoreReader(str(tmp_path)) as reader:
        assert (reader.min_offset, reader.limit_offset, list(reader.records())) == (0, 0, [])
        assert reader.topics() == {} and struct.calcsize(">q") == 8


def test_stray_files_beside_the_queues_are_left_alone(tmp_path: Path) -> None:
    """A desktop or an archiver leaves such files; RocketMQ does not mind them either."""
    root = tmp_path / "s"
    shutil.copytree(GOLDEN / "three-files", root)
    with StoreReader(str(root)) as reader:
        expected = reader.limit_offset, reader.topics()
    (root / "consumequeue" / ".DS_Store").write_bytes(b"x")
    (root / "consumequeue" / "TopicA" / ".DS_Store").write_bytes(b"x")
    with StoreReader(str(root)) as reader:
        assert (reader.limit_offset, reader.topics()) == expected
        assert reader.record_start_at(expected[0]) == expected[0]
    queues = ConsumeQueueTable(REAL, str(root), units_per_file=300_000)
    assert queues.load(expected[0], True) == expected[0]
    queues.close()
