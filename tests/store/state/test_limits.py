"""The limits page, RocketMQ's checkpoint, and the abort file."""

import struct
from pathlib import Path

import pytest

from hastore.errors import StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.store.state.limits import (
    RECOVERY_STEP_BYTES,
    Limits,
    LimitsPage,
    limits_path,
    read_limits,
)
from hastore.store.state.marker_files import AbortFile, Checkpoint, CheckpointFile


def page(root: Path, limits: Limits | None = None) -> LimitsPage:
    REAL.make_dirs(f"{root}/hastore")
    opened = LimitsPage(REAL, str(root))
    opened.open(limits or Limits(boot_id=b"b" * 16, file_size=1024))
    return opened


def test_other_readers_see_every_update(tmp_path: Path) -> None:
    assert read_limits(REAL, str(tmp_path)) is None
    mine = page(tmp_path)
    for number in range(10):
        mine.update(
            flushed=number, record_end=number + 1, confirmed=number + 2, readable=number + 3
        )
        found = read_limits(REAL, str(tmp_path))
        assert found == mine.now
        assert found.flushed_offset == number and found.readable_offset == number + 3
    mine.update(confirmed=77)
    assert mine.now.readable_offset == 12
    mine.cut(9, recovery_start=4)
    found = read_limits(REAL, str(tmp_path))
    assert found is not None
    assert (found.confirmed_offset, found.readable_offset, found.record_end) == (9, 9, 9)
    assert (found.flushed_offset, found.first_offset, found.recovery_start) == (9, 0, 0)
    mine.restart(500)
    found = read_limits(REAL, str(tmp_path))
    assert found == Limits(found.sequence if found else 0, b"b" * 16, 1024, 500, 500, 500, 500, 500)
    mine.close()


def test_a_torn_slot_leaves_the_previous_slot_in_force(tmp_path: Path) -> None:
    mine = page(tmp_path)
    mine.update(confirmed=1)
    mine.update(confirmed=2)
    path = Path(limits_path(str(tmp_path)))
    raw = path.read_bytes()
    at = 2048 * (mine.now.sequence & 1)
    for place in range(100):
        torn = bytearray(raw)
        torn[at + place] ^= 0x40
        path.write_bytes(torn)
        found = read_limits(REAL, str(tmp_path))
        assert found is not None and found.confirmed_offset == 1
    path.write_bytes(b"")  # a crash before the first write
    assert read_limits(REAL, str(tmp_path)) is None
    path.write_bytes(b"\xff" * 4096)
    with pytest.raises(StoreBrokenError, match="remove it, and do not put back"):
        read_limits(REAL, str(tmp_path))
    path.write_bytes(bytes(4096))
    assert read_limits(REAL, str(tmp_path)) is None


def test_recovery_starts_follow_at_a_distance(tmp_path: Path) -> None:
    mine = page(tmp_path)
    for step in range(1, 6):
        mine.update(record_end=step * RECOVERY_STEP_BYTES // 2)
    assert mine.now.recovery_start == RECOVERY_STEP_BYTES
    assert mine.now.next_recovery_start == 2 * RECOVERY_STEP_BYTES
    mine.cut(RECOVERY_STEP_BYTES + 5, recovery_start=RECOVERY_STEP_BYTES + 2)
    assert mine.now.recovery_start == RECOVERY_STEP_BYTES
    assert mine.now.next_recovery_start == RECOVERY_STEP_BYTES + 2


def test_after_open_both_slots_are_of_this_process(tmp_path: Path) -> None:
    page(tmp_path, Limits(file_size=1024, confirmed_offset=5)).close()
    found = read_limits(REAL, str(tmp_path))
    assert found is not None
    page(tmp_path, found._replace(confirmed_offset=3, boot_id=b"c" * 16)).close()
    path = Path(limits_path(str(tmp_path)))
    for slot in (0, 2048):
        raw = bytearray(path.read_bytes())
        raw[slot : slot + 100] = bytes(100)
        other = tmp_path / f"other{slot}"
        (other / "hastore").mkdir(parents=True)
        Path(limits_path(str(other))).write_bytes(raw)
        left = read_limits(REAL, str(other))
        assert left is not None and left.confirmed_offset == 3


def test_the_checkpoint_is_rocketmqs(tmp_path: Path) -> None:
    golden = Path(__file__).parent.parent.parent / "golden" / "three-files" / "checkpoint"
    raw = golden.read_bytes()
    (tmp_path / "checkpoint").write_bytes(raw)
    file = CheckpointFile(REAL, str(tmp_path))
    found = file.load()
    assert found.log_timestamp_ms == struct.unpack_from(">q", raw)[0] > 0
    file.save(found, sync=True)
    assert (tmp_path / "checkpoint").read_bytes() == raw
    file.save(Checkpoint(1, 2, 3, 4, 5), sync=False)
    file.close()
    assert CheckpointFile(REAL, str(tmp_path)).load() == Checkpoint(1, 2, 3, 4, 5)
    assert (tmp_path / "checkpoint").read_bytes() == struct.pack(">5q", 1, 2, 3, 4, 5) + bytes(4056)


def test_a_torn_checkpoint_reads_as_zeros(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"short")
    assert CheckpointFile(REAL, str(tmp_path)).load() == Checkpoint()


def test_abort_is_made_and_removed(tmp_path: Path) -> None:
    abort = AbortFile(REAL, str(tmp_path))
    assert not abort.exists()
    abort.create()
    abort.create()
    assert (tmp_path / "abort").read_bytes().isdigit()
    abort.remove()
    abort.remove()
    assert not abort.exists()
