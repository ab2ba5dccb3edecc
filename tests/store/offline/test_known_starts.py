"""Records' starts from consume queues: near, right, and never from bytes inside a body."""

import random
import shutil
import struct
import zlib

import pytest

from hastore.fs.filesystem import REAL
from hastore.record.codec import Host, Record, encode_record
from hastore.record.log_format import PLAIN
from hastore.store.offline import log_files, queue_files
from hastore.store.offline.queue_files import known_start
from hastore.store.offline.reader import StoreReader
from tests.spark.stores import numbered, write_store


@pytest.fixture(autouse=True)
def near(monkeypatch):
    monkeypatch.setattr(queue_files, "NEAR_BYTES", 200)
    monkeypatch.setattr("hastore.store.offline.reader.NEAR_BYTES", 200)


@pytest.fixture
def checked(monkeypatch):
    """The offsets whose record was checked with its CRC, each time."""
    seen = []
    check = PLAIN.check_item

    def spied(data, at, end, physical_offset):
        seen.append(physical_offset)
        return check(data, at, end, physical_offset)

    monkeypatch.setattr(PLAIN, "check_item", spied)
    return seen


def test_the_nearest_unit_of_any_queue_is_found(tmp_path):
    placed = write_store(tmp_path, numbered(900, queues=3), file_size=1 << 15)
    starts = [record.physical_offset for record in placed]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for offset in [*rng.sample(range(starts[-1] + 500), 100), 0, starts[5], starts[5] - 1]:
        found = known_start(REAL, str(tmp_path), offset, 0)
        below = [start for start in starts if start <= offset]
        assert found in below[-4:], offset  # each queue has one of three records


def test_a_walk_starts_near(tmp_path, monkeypatch):
    placed = write_store(tmp_path, numbered(900, queues=3))
    starts = [record.physical_offset for record in placed]
    known = []
    find = log_files.LogFiles.record_start_at

    def spied(self, file, offset, start=None):
        known.append(start)
        return find(self, file, offset, start)

    monkeypatch.setattr(log_files.LogFiles, "record_start_at", spied)
    with StoreReader(str(tmp_path)) as reader:
        for offset in range(50_000, 60_000, 777):
            assert reader.record_start_at(offset) == min(s for s in starts if s >= offset)
            assert offset - 600 < known[-1] <= offset


def decoy(physical_offset, size):
    """A valid record for the bytes of a body at `physical_offset`, of `size` bytes."""
    body = b"f" * (size - 91 - 1)
    return encode_record(
        Record(
            body=body,
            topic="t",
            physical_offset=physical_offset,
            body_crc=zlib.crc32(body) & 0x7FFFFFFF,
            store_host=Host(b"\x7f\0\0\1", 10911),
        )
    )


@pytest.mark.parametrize("queues", [True, False])
def test_a_record_inside_a_body_is_not_taken_for_one(tmp_path, queues):
    """It is valid and has its own physical offset, and its end is that of the record around it."""
    messages = numbered(300, size=500)
    outer = write_store(tmp_path / "draft", messages)[200]
    begin = outer.physical_offset + 88 + 50
    fields = messages[200][2]
    fields["body"] = bytes(50) + decoy(begin, 450)
    placed = write_store(tmp_path / "store", messages)
    assert placed[200].physical_offset == outer.physical_offset
    if not queues:
        shutil.rmtree(tmp_path / "store" / "consumequeue")
    with StoreReader(str(tmp_path / "store")) as reader:
        files = log_files.LogFiles(str(tmp_path / "store"))
        assert files.find_record(files.list()[0], outer.physical_offset + 1) == begin
        for offset in range(outer.physical_offset + 1, placed[201].physical_offset + 1, 10):
            assert reader.record_start_at(offset) == placed[201].physical_offset


def test_units_that_do_not_fit_the_log_are_ignored(tmp_path):
    """As in a copy whose queues are of another time."""
    placed = write_store(tmp_path, numbered(300))
    path = tmp_path / "consumequeue" / "t" / "0" / f"{0:020}"
    wrong = b"".join(struct.pack(">qiq", 7 + 130 * n, 100, 0) for n in range(100))
    path.write_bytes(wrong)
    with StoreReader(str(tmp_path)) as reader:
        for record, following in zip(placed[20:60], placed[21:61], strict=True):
            assert reader.record_start_at(record.physical_offset + 1) == following.physical_offset


@pytest.mark.parametrize("empty_file", [True, False])
def test_the_end_of_a_rocketmq_store_is_found_near_its_last_unit(tmp_path, checked, empty_file):
    placed = write_store(tmp_path, numbered(1_000), file_size=1 << 18)
    end = placed[-1].physical_offset + placed[-1].size
    if empty_file:
        (tmp_path / "commitlog" / f"{1 << 18:020}").write_bytes(bytes(1 << 18))
    with StoreReader(str(tmp_path)) as reader:
        assert reader.limit_offset == end
    assert len(checked) < 10
    # Records that the broker has written, but not dispatched yet, count too.
    path = tmp_path / "consumequeue" / "t" / "0" / f"{900 * 20:020}"
    path.write_bytes(path.read_bytes()[: 50 * 20].ljust(100 * 20, b"\0"))
    with StoreReader(str(tmp_path)) as reader:
        assert reader.limit_offset == end
    # The last one is torn.
    with open(tmp_path / "commitlog" / f"{0:020}", "r+b") as file:
        file.seek(end - 5)
        file.write(bytes(5))
    with StoreReader(str(tmp_path)) as reader:
        assert reader.limit_offset == placed[-1].physical_offset
    shutil.rmtree(tmp_path / "consumequeue")
    checked.clear()
    with StoreReader(str(tmp_path)) as reader:
        assert reader.limit_offset == placed[-1].physical_offset
    assert len(checked) >= 1_000
