"""Consume queues: units, tags codes, blanks, and records without a unit."""

import contextlib
import errno
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from hastore.fs.filesystem import REAL, Bytes, File, RealFile, RealFileSystem
from hastore.record.codec import Record
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.record.hashes import java_hash_code
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.store.derived.consume_queue import (
    ARRAYS_FROM_UNITS,
    UNIT,
    BatchConsumeQueue,
    ConsumeQueue,
    ConsumeQueueTable,
    TaggedSelection,
    Unit,
    UnitSelection,
    is_directory_name,
)
from hastore.store.derived.contract import Dispatched
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE, FileCache, UnitFiles
from hastore.store.offline.queue_files import QueueFiles
from tests.store.derived_files import UNITS, Derived
from tests.store.faulty import FaultyFileSystem
from tests.store.logs import START_MS, MemoryLog, fill

BLANK = struct.pack(">qiq", 0, 0x7FFFFFFF, 0)


def replayed(root: Path, log: MemoryLog) -> Derived:
    derived = Derived.over(root, log)
    derived.build.replay()
    return derived


def test_units_and_tags(tmp_path: Path) -> None:
    log = MemoryLog()
    first = log.append(properties=b"TAGS\x01red\x02", queue_offset=0)
    second = log.append(properties=b"XTAGS\x01no\x02TAGS\x01\xe4\xb8\xad", queue_offset=1)
    third = log.append(properties=b"ATAGS\x01no\x02", queue_offset=2)
    queues = replayed(tmp_path, log).queues
    assert queues.read("T", 0, 0, 10) == [
        Unit(0, first.physical_offset, first.size, java_hash_code("red")),
        Unit(1, second.physical_offset, second.size, java_hash_code("中")),
        Unit(2, third.physical_offset, third.size, 0),
    ]
    assert queues.read("T", 0, 2, 1)[0].queue_offset == 2
    assert queues.read("T", 0, 3, 1) == [] == queues.read("T", 9, 0, 1)


@pytest.mark.parametrize(
    ("level", "delay_ms"), [("1", 1000), ("3", 10_000), ("18", 7_200_000), ("99", 7_200_000)]
)
def test_a_delayed_message_has_its_time_as_tags_code(
    tmp_path: Path, level: str, delay_ms: int
) -> None:
    log = MemoryLog()
    raw = f"TAGS\x01a\x02DELAY\x01{level}\x02".encode()
    log.append(topic=SCHEDULE_TOPIC, properties=raw, store_timestamp_ms=START_MS)
    log.append(topic="T", properties=raw, store_timestamp_ms=START_MS)
    queues = replayed(tmp_path, log).queues
    assert queues.read(SCHEDULE_TOPIC, 0, 0, 1)[0].tags_code == START_MS + delay_ms
    assert queues.read("T", 0, 0, 1)[0].tags_code == java_hash_code("a")


def test_of_several_tags_the_last_one_is_compared(tmp_path: Path) -> None:
    """RocketMQ's broker and its consumers read the last; by another hash none would get it."""
    log = MemoryLog()
    record = log.append(properties=b"TAGS\x01own\x02KEYS\x01k\x02TAGS\x01batch\x02")
    assert record.tags == "batch"
    queues = replayed(tmp_path, log).queues
    assert queues.read("T", 0, 0, 1)[0].tags_code == java_hash_code("batch")


def test_prepared_and_rollback_get_no_unit(tmp_path: Path) -> None:
    log = MemoryLog()
    for flags in (0x4, 0xC, 0x8, 0):
        log.append(sys_flag=flags, queue_offset={0x8: 0, 0: 1}.get(flags, 0))
    queues = replayed(tmp_path, log).queues
    assert queues.topics() == {"T": {0: (0, 2)}}


@pytest.mark.parametrize("start", [1, 299, 300, 301, 1000])
def test_a_queue_that_starts_above_0_begins_with_blanks(tmp_path: Path, start: int) -> None:
    log = MemoryLog()
    records = [log.append(queue_offset=start + number) for number in range(5)]
    derived = replayed(tmp_path, log)
    raw = b"".join(data for name, data in sorted(derived.files().items()) if "consume" in name)
    before = start % UNITS
    assert raw[: 20 * before] == BLANK * before
    units = [struct.pack(">qiq", record.physical_offset, record.size, 0) for record in records]
    assert raw[20 * before :].rstrip(b"\0") == b"".join(units).rstrip(b"\0")
    names = [name for name in derived.files() if "consume" in name]
    assert names[0].endswith(f"{(start - before) * 20:020d}")
    assert derived.queues.queue_range("T", 0) == (start, start + 5)
    derived.build.close()
    again = Derived.over(tmp_path, log)
    assert again.queues.queue_range("T", 0) == (start, start + 5)


def test_a_gap_in_a_queue_becomes_blanks(tmp_path: Path) -> None:
    log = MemoryLog()
    for queue_offset in (0, 1, 5, 6, 290, 950):
        log.append(queue_offset=queue_offset)
    derived = replayed(tmp_path, log)
    queues = derived.queues
    assert queues.queue_range("T", 0) == (0, 951)
    assert [unit.queue_offset for unit in queues.read("T", 0, 0, 1000)] == [0, 1, 5, 6, 290]
    assert [unit.queue_offset for unit in queues.read("T", 0, 950, 1000)] == [950]
    derived.build.close()
    again = Derived.over(tmp_path, log)
    assert again.queues.queue_range("T", 0) == (0, 951)


@pytest.mark.parametrize("whole", [False, True])
def test_a_file_that_a_power_loss_took_leaves_no_gap(tmp_path: Path, *, whole: bool) -> None:
    """Its name was not synced, that of the file behind it is there: replay writes both again."""
    folder = tmp_path / "consumequeue" / "T" / "0"
    cache = FileCache(RealFileSystem())
    files = UnitFiles(cache, str(folder), UNIT.size, 16)
    files.append(b"".join(UNIT.pack(100 * number, 100, 0) for number in range(40)))
    assert files.starts == [0, 16, 32]
    (folder / f"{16 * UNIT.size:020d}").unlink()
    again = UnitFiles(FileCache(RealFileSystem()), str(folder), UNIT.size, 16)
    again.load(1_600, whole=whole)
    assert (again.starts, again.end) == ([0], 16), "it said 32, and replay wrote none below it"
    assert [path.name for path in folder.iterdir()] == [f"{0:020d}"]


@pytest.mark.parametrize("topic", ["..", ".", "a/b", "../../x", "x" * 300, "a\0b", ""])
def test_a_topic_that_cannot_name_a_directory_gets_no_queue(tmp_path: Path, topic: str) -> None:
    log = MemoryLog()
    log.append(topic=topic, magic=0xDAA320AB)
    log.append(topic="good")
    log.append(topic="good", queue_id=-1)
    log.append(topic="good", queue_id=1, queue_offset=-5)
    derived = replayed(tmp_path / "store", log)
    assert not is_directory_name(topic)
    assert derived.build.dispatched_offset == log.max_offset
    assert derived.queues.topics() == {"good": {0: (0, 1)}}
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_inner_batches_have_queues_of_their_own(tmp_path: Path) -> None:
    log = MemoryLog()
    records = [
        log.append(
            sys_flag=0x80,
            queue_offset=base,
            store_timestamp_ms=START_MS + base,
            properties=f"INNER_NUM\x01{count}\x02INNER_BASE\x01{base}\x02TAGS\x01a\x02".encode(),
        )
        for base, count in ((0, 3), (3, 1), (4, 10))
    ]
    derived = replayed(tmp_path, log)
    files = derived.files()
    raw = files["batchconsumequeue/T/0/00000000000000000000"]
    assert len(raw) == UNITS * 46
    assert not [name for name in files if name.startswith("consumequeue")]
    tags = java_hash_code("a")
    for number, (record, (base, count)) in enumerate(
        zip(records, ((0, 3), (3, 1), (4, 10)), strict=True)
    ):
        assert raw[number * 46 : number * 46 + 46] == struct.pack(
            ">qiqqqhii",
            record.physical_offset, record.size, tags, START_MS + base, base, count, -1, 0,
        )  # fmt: skip
    for queues in (derived.queues, Derived.over(tmp_path, log).queues):
        assert queues.topics() == {"T": {0: (0, 14)}}
        assert [unit.queue_offset for unit in queues.read("T", 0, 2, 9)] == [0, 3, 4]
        assert [unit.queue_offset for unit in queues.read("T", 0, 13, 9)] == [4]
        assert queues.find_by_time("T", 0, START_MS + 1, lambda offset: None) == 3
    begin, end = records[2].physical_offset, log.max_offset
    for hidden, ended in ((begin, 4), (end, 14)):  # a deletion hides them
        queues.hide_before("T", hidden)
        assert queues.ended("T", end + 1) == {0: ended}
        assert queues.queue_range("T", 0) == (ended, 14)
        on_disk = QueueFiles(str(tmp_path), REAL)
        assert on_disk.queue_range("T", 0, hidden, end) == (ended, 14)
    assert (queues.queues_of("T"), queues.emptied_of("T")) == ({}, {0: (14, 14)})
    derived.build.truncate(begin)
    assert derived.queues.topics() == {"T": {0: (0, 4)}}


def mixed(log: MemoryLog, counts: list[int]) -> list[tuple[int, Record]]:
    """Append single records, and inner batches of so many messages; return their places too."""
    found, place = [], 0
    for number, count in enumerate(counts):
        properties = f"INNER_NUM\x01{count}\x02INNER_BASE\x01{place}\x02".encode()
        record = log.append(
            sys_flag=0 if count == 1 else FLAG_INNER_BATCH, queue_offset=place,
            store_timestamp_ms=START_MS + number, properties=b"" if count == 1 else properties,
        )  # fmt: skip
        found.append((place, record))
        place += count
    return found


def dispatched(record: Record, queue_offset: int) -> Dispatched:
    return Dispatched(
        record.physical_offset, record.size, "T", 0, queue_offset, record.sys_flag,
        record.store_timestamp_ms, 0, record.properties,
    )  # fmt: skip


@pytest.mark.parametrize(
    "counts",
    [[1, 5, 1, 3, 1], [5, 5, 1, 5, 1], [1, 3 * UNITS, 1, 1], [UNITS, 1, 2 * UNITS - 1, 1, 4, 1]],
)
def test_replay_goes_on_anywhere_in_a_queue_of_both_kinds(
    tmp_path: Path, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A cut leaves blanks for batches that were cut: as if their places were taken."""
    log = MemoryLog()
    records = mixed(log, counts)
    times = {record.physical_offset: record.store_timestamp_ms for _, record in records}
    replayed(tmp_path / "whole", log).queues.flush()
    for number, (_, at) in enumerate(records):
        for is_whole in (True, False):
            root = tmp_path / f"{number}{is_whole}"
            shutil.copytree(tmp_path / "whole", root)
            queues = ConsumeQueueTable(REAL, str(root), units_per_file=UNITS)
            begin = queues.load(at.physical_offset, is_whole)
            for place, record in records:
                if record.physical_offset >= begin:
                    queues.dispatch([dispatched(record, place)])
            for place, record in records:
                assert queues.read("T", 0, place, 1)[0].offset == record.physical_offset
                asked = record.store_timestamp_ms
                assert queues.find_by_time("T", 0, asked, times.__getitem__) == place
    assert "which an earlier record has" not in caplog.text


@pytest.mark.parametrize("cut", ["truncate", "load", "load unsynced"])
@pytest.mark.parametrize("after", [[1, 1], [2, 1, 1], [UNITS, 1, 2, 1], [3]])
@pytest.mark.parametrize(
    "counts", [[1, 5, 1], [2, 3 * UNITS, 1], [5, UNITS, 3 * UNITS, 1], [1, UNITS, 1, 1, 3, 1]]
)
def test_what_comes_behind_a_cut_instead_of_batches_has_its_places(
    tmp_path: Path, counts: list[int], after: list[int], cut: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The blanks for the batches stayed: single messages were in no queue, and its end too far."""
    log = MemoryLog()
    before = mixed(log, counts)
    replayed(tmp_path / "whole", log).queues.flush()
    for number, (_, at) in enumerate(before):
        root = str(shutil.copytree(tmp_path / "whole", tmp_path / str(number)))
        queues = ConsumeQueueTable(REAL, root, units_per_file=UNITS)
        begin = queues.load(at.physical_offset if cut != "truncate" else 1 << 40, "un" not in cut)
        if cut == "truncate":
            queues.truncate(at.physical_offset)
            begin = at.physical_offset
        records = mixed(MemoryLog(), counts[:number] + after)
        new = [dispatched(record, place) for place, record in records]
        queues.dispatch([one for one in new if one.offset >= begin])
        for place, record in records:
            assert queues.read("T", 0, place, 1)[0].offset == record.physical_offset
        assert queues.queue_range("T", 0) == (0, sum(counts[:number] + after))
        queues.flush()
        files = QueueFiles(root, REAL)
        for place, record in records:
            assert files.queue_range("T", 0, 0, record.physical_offset) == (0, place)
    assert "which an earlier record has" not in caplog.text


@pytest.mark.parametrize(
    "counts", [[1, 5, 1, 3, 1], [5, 1, 1, 5, 1], [1, 3 * UNITS, 1], [UNITS, 1, 2 * UNITS, 1]]
)
def test_the_files_of_both_kinds_end_with_the_last_record_below_a_limit(
    tmp_path: Path, counts: list[int]
) -> None:
    """And not behind batches beyond it, for which there are blanks: a reader would skip them."""
    log = MemoryLog()
    records = mixed(log, counts)
    queues = replayed(tmp_path, log).queues
    queues.flush()
    files = QueueFiles(str(tmp_path), REAL)
    for place, record in records:
        known = files.queue_range("T", 0, 0, record.physical_offset)
        assert known == (0, place), record.physical_offset
        assert queues.end_before("T", 0, record.physical_offset) == place


def test_readers_of_both_kinds_pass_over_nothing_while_replay_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MemoryLog()
    records = mixed(log, [1, 3, 1, 3, 1])
    queues = ConsumeQueueTable(REAL, str(tmp_path), units_per_file=UNITS)
    first, rest = records[:2], records[2:]
    queues.dispatch([dispatched(record, place) for place, record in first])
    seen: list[int] = []

    def look() -> None:
        """Look where the next message comes, as a consumer does that waits for it."""
        seen.extend(unit.queue_offset for unit in queues.read("T", 0, 4, 9))

    put, read_on = BatchConsumeQueue.put, ConsumeQueue.read_on

    def put_and_look(*args: Any) -> None:
        put(*args)
        look()

    def write_and_read(*args: Any) -> list[Unit]:
        monkeypatch.undo()
        monkeypatch.setattr(BatchConsumeQueue, "put", put_and_look)
        queues.dispatch([dispatched(record, place) for place, record in rest])
        return read_on(*args)

    monkeypatch.setattr(ConsumeQueue, "read_on", write_and_read)
    look()
    assert seen == [4]
    look()
    assert seen == [4, 4]


def test_where_a_queue_ended_before_a_place_of_the_log(tmp_path: Path) -> None:
    """By it positions beyond a broker's log are moved to its end, and not to what came since."""
    log = MemoryLog()
    for base in (0, 3):
        properties = b"INNER_NUM\x013\x02INNER_BASE\x01%d\x02" % base
        log.append(sys_flag=FLAG_INNER_BATCH, queue_offset=base, properties=properties)
        log.append(topic="plain", queue_offset=base // 3)
    end = log.max_offset
    for number in range(6, 9):
        log.append(queue_offset=number)
        log.append(topic="plain", queue_offset=number - 4)
    queues = replayed(tmp_path, log).queues
    assert queues.queue_range("T", 0) == (0, 9)
    assert queues.end_before("T", 0, end) == 6 and queues.end_before("T", 0, log.max_offset) == 9
    assert queues.end_before("plain", 0, end) == 2
    assert queues.end_before("none", 0, end) == 0


@pytest.mark.parametrize("batches_first", [True, False])
def test_a_search_by_time_looks_at_single_records_and_inner_batches(
    tmp_path: Path, *, batches_first: bool
) -> None:
    log, times, place = MemoryLog(), {}, 0
    for number in range(9):
        is_batch = (number // 3 % 2 == 0) is batches_first
        count = 4 if is_batch else 1
        properties = f"INNER_NUM\x01{count}\x02INNER_BASE\x01{place}\x02".encode()
        record = log.append(
            sys_flag=FLAG_INNER_BATCH if is_batch else 0, queue_offset=place,
            store_timestamp_ms=START_MS + 10 * number, properties=properties if is_batch else b"",
        )  # fmt: skip
        times[record.physical_offset] = record.store_timestamp_ms, place
        place += count
    queues = replayed(tmp_path, log).queues
    for stored_ms, wanted in times.values():
        for asked_ms in (stored_ms - 5, stored_ms):
            found = queues.find_by_time("T", 0, asked_ms, lambda offset: times[offset][0])
            assert found == wanted, asked_ms - START_MS
    late = START_MS + 1_000
    assert queues.find_by_time("T", 0, late, lambda offset: times[offset][0]) == place


def test_queue_offsets_by_time(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 40, queues=(0,))
    times = {record.physical_offset: record.store_timestamp_ms for record in records}
    queues = replayed(tmp_path, log).queues
    for number in range(40):
        stored = START_MS + number * 100
        assert queues.find_by_time("Topic", 0, stored, times.get) == number
        assert queues.find_by_time("Topic", 0, stored + 1, times.get) == number + 1
    assert queues.find_by_time("Topic", 3, 0, times.get) is None


def test_a_search_by_time_steps_over_no_message_because_another_does_not_say(
    tmp_path: Path,
) -> None:
    """Its header is damaged; the next one's time counts."""
    log = MemoryLog()
    records = fill(log, 40, queues=(0,))
    times = {record.physical_offset: record.store_timestamp_ms for record in records}
    queues = replayed(tmp_path, log).queues
    for bad in range(40):
        some = {**times, records[bad].physical_offset: None}
        found = [queues.find_by_time("Topic", 0, START_MS + n * 100, some.get) for n in range(40)]
        assert found == [n - (n == bad + 1) for n in range(40)]
    assert queues.find_by_time("Topic", 0, START_MS, lambda _offset: None) == 0


def test_retention_removes_whole_files_but_the_last(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 1000, queues=(0,))
    derived = replayed(tmp_path, log)
    log.min_offset = records[650].physical_offset
    derived.build.delete_before(log.min_offset)
    assert derived.queues.queue_range("Topic", 0) == (650, 1000)
    names = [name[-20:] for name in derived.files() if "consume" in name]
    assert names == [f"{20 * start:020d}" for start in (600, 900)]
    assert derived.queues.read("Topic", 0, 100, 5) == []


@pytest.mark.parametrize("change", ["retention", "cut"])
@pytest.mark.parametrize("flags", [0, FLAG_INNER_BATCH], ids=["single records", "inner batches"])
def test_hidden_records_do_not_show_while_others_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, flags: int
) -> None:
    """Clients ask at any moment: they must not find a deleted topic again for some milliseconds."""
    log = MemoryLog()
    names = ["A", "Deleted", "Z"]
    records = [
        log.append(
            topic=name, queue_offset=number, sys_flag=flags,
            properties=b"INNER_NUM\x011\x02INNER_BASE\x01%d\x02" % number,
        )
        for number in range(10)
        for name in names
    ]  # fmt: skip
    derived = replayed(tmp_path, log)
    queues = derived.queues
    queues.hide_before("Deleted", log.max_offset)
    seen: list[tuple[int, list[str]]] = []

    def watched(name: str) -> None:
        real = getattr(UnitFiles, name)

        def look(files: UnitFiles, offset: int) -> None:
            real(files, offset)
            seen.append((queues.topic_count, queues.shown_topics()))

        monkeypatch.setattr(UnitFiles, name, look)

    watched("delete_before")
    watched("cut")
    log.min_offset = records[5].physical_offset
    derived.build.delete_before(log.min_offset)
    if change == "cut":
        seen.clear()
        log.cut(records[-6].physical_offset)
        derived.build.truncate(log.max_offset)
    assert len(seen) >= len(names)
    assert {(count, tuple(shown)) for count, shown in seen} == {(2, ("A", "Z"))}
    assert {name: one[0][0] for name, one in queues.topics().items()} == {"A": 2, "Z": 1}


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of the queues' files that are read or zeroed from now on."""
    touched: list[str] = []
    for name in ("read", "zero"):
        real = getattr(FileCache, name)

        def note(
            cache: FileCache, path: str, *rest: int, real: Any = real, **named: bool
        ) -> object:
            touched.append(path)
            return real(cache, path, *rest, **named)

        monkeypatch.setattr(FileCache, name, note)
    return touched


@pytest.mark.parametrize("restart", [False, True])
def test_queues_that_need_nothing_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, restart: bool
) -> None:
    """With 40,000 queues each of these held replay, and a cut the log too, for seconds."""
    log = MemoryLog()
    for number in range(3):  # `Old` has only records from before `middle`, `New` only later ones
        log.append(topic="Old", queue_offset=number)
    middle = log.max_offset
    for number in range(3):
        log.append(topic="New", queue_offset=number)
    end = log.max_offset
    log.append(topic="Cut")
    derived = replayed(tmp_path, log)
    if restart:
        derived.build.close()
        derived = Derived.over(tmp_path, log)
    else:
        derived.build.delete_before(0)  # each queue's begin is read once
    touched = counted_reads(monkeypatch)
    log.min_offset = middle
    derived.build.delete_before(middle)
    derived.build.delete_before(middle)
    assert touched == []
    log.cut(end)
    derived.build.truncate(end)
    assert {path.split("/")[-3] for path in touched} == {"Cut"}
    assert derived.queues.topics() == {"Old": {0: (3, 3)}, "New": {0: (0, 3)}}
    assert derived.queues.last_offset() == end - (end - middle) // 3
    monkeypatch.undo()
    assert Derived.over(tmp_path, log).queues.topics() == derived.queues.topics()


def test_a_cut_zeroes_what_a_file_had_before_it_was_taken_again(tmp_path: Path) -> None:
    """It could not be removed when the queue began again; a start would count its old units."""
    first, again = (UnitFiles(FileCache(REAL), str(tmp_path / "q"), UNIT.size, 8) for _ in "12")
    first.append(b"".join(UNIT.pack(100 * number, 100, 7) for number in range(4)))
    again.append(UNIT.pack(0, 100, 7))
    again.cut(100)
    third = UnitFiles(FileCache(REAL), str(tmp_path / "q"), UNIT.size, 8)
    third.load(400, whole=True)
    assert third.end == again.end == 1


@pytest.mark.parametrize(("whole", "zeroed"), [(True, []), (False, ["a", "b"])])
def test_a_start_writes_only_queues_that_have_too_much(
    tmp_path: Path, *, whole: bool, zeroed: list[str]
) -> None:
    """Each start wrote each queue's file, and most of it was that: 5,000 queues took 3 s, not 1 s.

    After a power loss, or a failed sync, the disk may have other bytes than are read.
    """
    fs = FaultyFileSystem()
    for name in "ab":
        written = UnitFiles(FileCache(REAL), str(tmp_path / name), UNIT.size, 30_000)
        written.append(b"".join(UNIT.pack(100 * number, 100, 7) for number in range(500)))
    cache = FileCache(fs)
    for name in "ab":
        files = UnitFiles(cache, str(tmp_path / name), UNIT.size, 30_000)
        files.load(50_000, whole=whole)
        assert files.end == 500
    assert [path.split("/")[-2] for call, path in fs.calls if call == "zero"] == zeroed
    fs.calls.clear()
    files.cut(25_000, whole=whole)  # the file of before has 500 units
    assert [call for call, _ in fs.calls if call == "zero"] == ["zero"]
    again = UnitFiles(FileCache(REAL), str(tmp_path / "b"), UNIT.size, 30_000)
    again.load(50_000)
    assert again.end == 250


def test_a_start_zeroes_a_bad_sector_behind_a_queue_s_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look whether it is zeros already ended the start by EIO."""
    written = UnitFiles(FileCache(REAL), str(tmp_path), UNIT.size, 30_000)
    written.append(b"".join(UNIT.pack(100 * number, 100, 7) for number in range(500)))
    real = RealFile.pread

    def pread(file: RealFile, size: int, position: int) -> bytes:
        if position + size > 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO), file.path)
        return real(file, size, position)

    with monkeypatch.context() as bad:
        bad.setattr(RealFile, "pread", pread)
        UnitFiles(FileCache(REAL), str(tmp_path), UNIT.size, 30_000).load(10_000, whole=True)
    again = UnitFiles(FileCache(REAL), str(tmp_path), UNIT.size, 30_000)
    again.load(50_000)
    assert again.end == 100


class TornFileSystem(RealFileSystem):
    """Writes past `room` bytes fail half-way."""

    def __init__(self) -> None:
        self.room: int | None = None

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        system = self

        class TornFile(RealFile):
            def pwrite(self, data: Bytes, position: int) -> None:
                super().pwrite(data if system.room is None else data[: system.room], position)
                if system.room is not None and system.room < len(data):
                    raise OSError(errno.ENOSPC, "full")

        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        return TornFile(path, os.open(path, flags | os.O_CLOEXEC, 0o644))


class ForgetfulFiles(UnitFiles):
    """Files of which nothing is kept in memory, so that each question reads them."""

    def _note_tail(self, offset: int, size: int) -> None:
        del offset, size

    def begin_at(self, min_offset: int) -> int:
        return self.first_at(min_offset)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_a_queue_in_memory_is_what_its_files_hold(
    tmp_path: Path, seed: int
) -> None:
    """After appends, also torn ones, blanks, cuts, removals and starts, in any order."""
    chance = random.Random(seed)
    fs = TornFileSystem()

    def made(kind: type[UnitFiles], name: str) -> UnitFiles:
        return kind(FileCache(fs), str(tmp_path / name), UNIT.size, 8)

    two = [made(UnitFiles, "kept"), made(ForgetfulFiles, "read")]
    log_end = low = 0
    ahead: list[int] = []  # records that have no unit yet: the next append begins with them
    for _ in range(500):
        kinds = ("append", "append", "torn", "skip", "cut", "cut", "remove", "load", "clear")
        change, first = chance.choice(kinds), two[0].end
        if change in ("append", "torn"):
            for _ in range(chance.choice((1, 2, 3, 11))):
                log_end += chance.choice((0, 100, 1_000)) + 100
                ahead.append(log_end - 100)
            some = ahead[:1] if chance.random() < 0.3 else ahead  # a retry may bring fewer
            raw = b"".join(UNIT.pack(offset, 100, 7) for offset in some)
            fs.room = chance.randrange(2 * UNIT.size) if change == "torn" else None
            for files in two:
                with contextlib.suppress(OSError):
                    files.append(raw)
            fs.room = None
        elif change == "skip" and not ahead:
            unit = two[0].end + chance.choice((1, 5, 20))
            for files in two:
                files.skip_to(unit)
        elif change == "cut":
            log_end = max(low, log_end - chance.choice((0, 0, 100, 700, 5_000)))
            for files in two:
                files.cut(log_end)
        elif change == "remove":
            low = max(low, log_end - chance.choice((0, 1_000, 3_000)))
            for files in two:
                files.delete_before(low)
        elif change == "load":
            two = [made(UnitFiles, "kept"), made(ForgetfulFiles, "read")]
            whole = chance.random() < 0.5
            for files in two:
                files.load(log_end, whole=whole)
        elif change == "clear" and chance.random() < 0.2:
            ahead = []
            for files in two:
                files.clear()
        ahead = [offset for offset in ahead[max(0, two[0].end - first) :] if offset < log_end]
        places = [low, log_end, *(chance.randrange(low, log_end + 1) for _ in range(4))]
        kept, read = ([files.starts, files.end, files.last_offset(), files.last_place()]
                      + [files.begin_at(place) for place in places]
                      + [files.first_at(place) for place in places] for files in two)  # fmt: skip
        assert kept == read, change
        names = {path.name for name in ("kept", "read") for path in (tmp_path / name).glob("*")}
        for name in names:
            assert (tmp_path / "kept" / name).read_bytes() == (
                tmp_path / "read" / name
            ).read_bytes(), change


def test_many_dirty_files_are_synced_at_once(tmp_path: Path) -> None:
    synced: list[str] = []

    class Watched(RealFileSystem):
        def sync_all(self, path: str) -> None:
            synced.append(path)
            super().sync_all(path)

    log = MemoryLog(file_size=1 << 20)
    for queue_id in range(300):
        log.append(topic="Topic", queue_id=queue_id)
    derived = Derived.over(tmp_path, log, fs=Watched())
    derived.build.replay()
    derived.build.flush()
    assert len(synced) == 1 and synced[0].startswith(f"{tmp_path}/consumequeue/Topic/")
    log.append(topic="Topic", queue_id=7, queue_offset=1)
    derived.build.replay()
    derived.build.flush()
    assert len(synced) == 1
    assert derived.queues.queue_range("Topic", 7) == (0, 2)
    derived.build.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_pull_takes_many_units_at_a_time_as_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        units, offset = [], chance.randrange(1_000)
        kinds = chance.choice((("size",), ("size", "size", "size", "none", "blank")))
        for _ in range(chance.choice((1, 5, 33, 70, 300))):
            size = chance.choice((91, 200, 1_150))
            held = {"size": size, "none": 0, "blank": BLANK_UNIT_SIZE}[chance.choice(kinds)]
            units.append((offset, held, 7))
            offset += size + chance.choice((0, 0, 3_000))
        limit = chance.choice((offset, chance.randrange(offset), 0))
        bounds = chance.choice((5, 33, 1_000)), chance.choice((1, 10_000, 1 << 30)), limit
        many, each = UnitSelection(*bounds), UnitSelection(*bounds)
        at_once = chance.choice((33, 150))
        for begin in range(0, len(units), at_once):
            part = units[begin : begin + at_once]
            raw = b"".join(UNIT.pack(*unit) for unit in part)
            more = each.select_units(enumerate(part, begin))
            assert many.select_raw(raw, begin) == more, seed
            assert many.count == each.count == len(each.queue_offsets)
            for name in ("queue_offsets", "offsets", "sizes"):
                assert list(getattr(many, name)) == list(getattr(each, name)), seed
            assert (many.first, many.beyond) == (each.first, each.beyond), seed
            assert many.max_bytes == each.max_bytes, seed
            if not more:
                break


@pytest.mark.parametrize("count", [1, 2 * ARRAYS_FROM_UNITS])
def test_a_damaged_unit_at_the_end_of_all_offsets_lies_beyond_the_limit(count: int) -> None:
    raw = UNIT.pack(2**63 - 1, 91, 97) + UNIT.pack(0, 91, 97) * (count - 1)
    plain = UnitSelection(1_000, 1 << 20, 10_000)
    assert not plain.select_raw(raw, 5)
    tagged = TaggedSelection(1_000, 1 << 20, 10_000, frozenset({97}), 5)
    assert not tagged.select_raw(raw, 5)
    for found in (plain, tagged):
        assert (found.count, found.first, found.beyond) == (0, 5, 2**63 + 90)
