"""The bytes of the three state files with magic, version and CRC-32: limits, replay, idempotence.

The expected bytes are those of the first version: later versions must read existing stores.
"""

import zlib
from pathlib import Path

import pytest

from hastore.errors import Status, StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.results import PutResult
from hastore.store.state.limits import Limits, LimitsPage, read_limits
from hastore.store.state.replay_progress import ReplayState, SavedOffsets

BOOT = bytes(range(16))
LIMITS = Limits(6, BOOT, 1 << 30, 1, 2, 3, 4, 5, 6, 7)
SLOT_0 = (
    "48534c4d000000010000000000000008000102030405060708090a0b0c0d0e0f0000000040000000"
    "00000000000000010000000000000002000000000000000300000000000000040000000000000005"
    "00000000000000060000000000000007"
    "9789103e"
)
SLOT_1 = (
    "48534c4d000000010000000000000007000102030405060708090a0b0c0d0e0f0000000040000000"
    "00000000000000010000000000000002000000000000000300000000000000040000000000000005"
    "00000000000000060000000000000007"
    "9551493c"
)
REPLAY = (
    "4853525000000001000102030405060708090a0b0c0d0e0f00000011223344550000001122330000000493e0"
    "0000006400000190fc688558"
)
IDEMPOTENCE = (
    "485349570000000100000000000001900000000200027031ffffffffffffffff000000020000000000000007"
    "0000000000000008000000000000006400000000000000c8000171ffffffffffffffff00000001"
    "0000000000000001000000000000012c533127db"
)
EXPECTED = {  # the frames of each file, and where they lie
    "limits": {0: SLOT_0, 2048: SLOT_1},
    "replay": {0: REPLAY},
    "idempotence": {0: IDEMPOTENCE},
}


def write_limits(root: Path) -> None:
    page = LimitsPage(REAL, str(root))
    page.open(LIMITS)
    page.close()


def replay_state(root: Path) -> ReplayState:
    path = f"{root}/hastore/replay"
    return ReplayState(REAL, path, units=300_000, slots=100, entries=400, boot_id=BOOT)


def write_replay(root: Path) -> None:
    state = replay_state(root)
    state.save(0x1122334455, 0x1122330000)
    state.close()


def write_idempotence(root: Path) -> None:
    window = DedupWindow(REAL, str(root))
    results = [PutResult(Status.PUT_OK, offset, offset + 100) for offset in (100, 200, 300)]
    window.add_all({(b"p1", 7): results[0], (b"p1", 8): results[1], (b"q", 1): results[2]}, 400)
    window.save()


WRITERS = {"limits": write_limits, "replay": write_replay, "idempotence": write_idempotence}


def written(root: Path, name: str) -> bytes:
    (root / "hastore").mkdir()
    WRITERS[name](root)
    return (root / "hastore" / name).read_bytes()


@pytest.mark.parametrize("name", WRITERS)
def test_the_bytes_are_those_of_the_first_version(tmp_path: Path, name: str) -> None:
    raw = written(tmp_path, name)
    expected = bytearray(len(raw) if name == "idempotence" else 4096)
    for at, frame in EXPECTED[name].items():
        expected[at : at + len(frame) // 2] = bytes.fromhex(frame)
    assert raw == expected


def is_refused(root: Path, name: str) -> bool:
    """Whether the file is ignored, or for the limits page, refused by an error."""
    if name == "limits":
        try:
            return read_limits(REAL, str(root)) is None
        except StoreBrokenError:
            return True
    if name == "replay":
        return replay_state(root).load() == SavedOffsets(0, 0, False)
    window = DedupWindow(REAL, str(root))
    return window.load(400, True) == 0 and len(window) == 0


@pytest.mark.parametrize("name", WRITERS)
def test_a_damaged_or_short_frame_is_refused(tmp_path: Path, name: str) -> None:
    raw = written(tmp_path, name)
    path = tmp_path / "hastore" / name
    assert not is_refused(tmp_path, name)
    size = len(next(iter(EXPECTED[name].values()))) // 2
    for place in range(size):
        damaged = bytearray(raw)
        for at in EXPECTED[name]:
            damaged[at + place] ^= 0x40
        path.write_bytes(damaged)
        assert is_refused(tmp_path, name), place
    path.write_bytes(raw[: size - 1])
    assert is_refused(tmp_path, name)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("place", [0, 7], ids=["magic", "version"])
def test_another_magic_or_version_is_refused_though_the_crc_is_right(
    tmp_path: Path, name: str, place: int
) -> None:
    raw = bytearray(written(tmp_path, name))
    for at, frame in EXPECTED[name].items():
        end = at + len(frame) // 2 - 4
        raw[at + place] += 1
        raw[end : end + 4] = zlib.crc32(raw[at:end]).to_bytes(4)
    (tmp_path / "hastore" / name).write_bytes(raw)
    assert is_refused(tmp_path, name)
