"""A repair of a store on a disk: what is checked, what is refused, and power losses in between."""

from __future__ import annotations

import errno
import os
import pathlib
import random
from typing import Any

import pytest

from hastore.errors import StoreBrokenError, StoreError, StoreInUseError
from hastore.fs.filesystem import file_name
from hastore.ha.node.node_state import NodeState
from hastore.repair.mending import Source
from hastore.repair.stopped import Report, opened, repair
from hastore.service import raise_failure
from hastore.store.message_store import MessageStore
from tests.dledger.store import kit as entry_kit
from tests.dledger.store.lossy import LossyFileSystem
from tests.repair.kit import Log, plain
from tests.store import kit
from tests.store.faulty import FaultyFileSystem
from tests.store.kernel import KernelFileSystem

ROOT = "/store"
COUNT = 300


def fill(fs: Any, root: str, mode: str, *, count: int = COUNT) -> Log:
    """Make a store that was closed cleanly; return its log as another node has it."""
    messages = [kit.message(number) for number in range(count)]
    if mode == "classic":
        store = MessageStore(kit.config(root), store_host=kit.HOST, fs=fs)
        store.open()
        places = [one.offset or 0 for one in kit.put(store, *messages)]
        end = store.max_offset
        store.close()
        folder = f"{root}/commitlog"
        state = NodeState(fs, root)
        state.load(1, "c", "g")
        state.save()
    else:
        of_entries = entry_kit.make(root, fs=fs)
        of_entries.open()
        entry_kit.put(of_entries, 1, *messages)
        places = [of_entries.position(number) for number in range(count)]
        end = of_entries.messages.max_offset
        of_entries.close()
        folder = f"{root}/dledger-n1/data"
    data = bytearray(entry_kit.folder_bytes(folder, fs))
    items = list(zip(places, [*places[1:], end], strict=True))
    form = plain(1).form if mode == "classic" else entry_kit_form()
    epochs = [(0, 0)] if mode == "classic" else None
    return Log(form, data, items, epochs, file_size=kit.FILE_SIZE)


def entry_kit_form() -> Any:
    from hastore.record.log_format import ENTRIES

    return ENTRIES


def folder_of(mode: str) -> str:
    return f"{ROOT}/commitlog" if mode == "classic" else f"{ROOT}/dledger-n1/data"


def scribble(fs: Any, mode: str, offset: int, data: bytes) -> None:
    start = offset - offset % kit.FILE_SIZE
    file = fs.open(f"{folder_of(mode)}/{file_name(start)}")
    file.pwrite(data, offset - start)
    file.sync()
    file.close()


def run(fs: Any, sources: list[Source], *, dry_run: bool = False) -> Report:
    report = Report(ROOT, dry_run)
    with opened(ROOT, node=1, cluster="c", group="g", fs=fs) as stopped:
        repair(stopped, sources, report)
    return report


@pytest.fixture(params=["classic", "dledger"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_first_and_the_last_item_of_a_log_and_a_start_afterwards(mode: str) -> None:
    fs = KernelFileSystem()
    other = fill(fs, ROOT, mode)
    assert run(fs, [other]).ok
    for start, _ in (other.items[0], other.items[-1]):
        scribble(fs, mode, start, b"\xff\xff\xff\xff")
    report = run(fs, [other], dry_run=True)
    assert not report.ok and report.left_bytes == 0 and len(report.ranges) == 2
    assert [one["repaired"] for one in report.as_dict()["ranges"]] == [False, False]
    assert not run(fs, []).ok
    report = run(fs, [other])
    assert report.ok and (report.min_offset, report.end_offset) == (0, other.end)
    assert bytes(entry_kit.folder_bytes(folder_of(mode), fs)) == other.data
    assert run(fs.after_power_loss(), []).ok, "it is on the disk"
    if mode == "classic":
        store = MessageStore(kit.config(ROOT), store_host=kit.HOST, fs=fs)
        store.open()
        assert len(kit.bodies(store)) == COUNT
        store.close()
    else:
        of_entries = entry_kit.make(ROOT, fs=fs)
        of_entries.open()
        assert of_entries.end_index == COUNT - 1
        of_entries.close()


# With the fixed one a body was written and its properties were not: the record looked valid.
@pytest.mark.parametrize("fixed", [1921114519, None])
def test_power_losses_in_the_middle_change_nothing_but_the_range(
    mode: str, fixed: int | None
) -> None:
    seed = random.randrange(1 << 32) if fixed is None else fixed
    print(f"seed {seed}")
    chance = random.Random(seed)
    fs = LossyFileSystem()
    other = fill(fs, ROOT, mode)
    first, last = other.items[100][0], other.items[160][1]
    for _ in range(4):
        at = chance.randrange(first, last)
        scribble(fs, mode, at, chance.randbytes(min(chance.choice((3, 700, 5000)), last - at)))
    damaged = bytes(entry_kit.folder_bytes(folder_of(mode), fs))
    snapshots = []
    fs.on_call = lambda number: snapshots.append(fs.snapshot(number))
    report = run(fs, [other])
    fs.on_call = lambda number: None
    assert report.ok and snapshots
    ranges = [(one.damage.start, one.damage.end) for one in report.ranges]
    for snapshot in chance.sample(snapshots, min(12, len(snapshots))):
        for crash in (chance, None):
            after = snapshot.restored(crash)
            found = bytes(entry_kit.folder_bytes(folder_of(mode), after))
            at = 0
            for start, end in (*ranges, (len(damaged), len(damaged))):
                assert found[at:start] == damaged[at:start]
                at = end
            assert run(after, [other]).ok
            for start, end in ranges:
                whole = bytes(entry_kit.folder_bytes(folder_of(mode), after))
                assert whole[start:end] == other.data[start:end]


def test_a_write_that_fails_or_does_not_stay_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = FaultyFileSystem()
    monkeypatch.setattr(f"{__name__}.ROOT", str(tmp_path))
    other = fill(fs, str(tmp_path), "classic")
    scribble(fs, "classic", other.items[50][0], b"\xff")
    fs.fail("sync", "commitlog")
    with pytest.raises(StoreBrokenError, match="could not be written.*replace the disk"):
        run(fs, [other])
    fs.heal()
    scribble(fs, "classic", other.items[50][0], b"\xff")

    def lose(call: str, path: str) -> None:
        if call == "sync":
            kit.scribble(path, other.items[50][0], b"\xff")

    fs.hook = lose
    with pytest.raises(StoreBrokenError, match="read back damaged"):
        run(fs, [other])


def test_only_what_was_synced_is_checked() -> None:
    fs = KernelFileSystem()
    other = fill(fs, ROOT, "classic")
    store = MessageStore(kit.config(ROOT), store_host=kit.HOST, fs=fs)
    store.open()
    kit.put(store, *(kit.message(number) for number in range(5)))
    end = store.max_offset
    crashed = fs.after_power_loss()  # the new records were not synced
    store.close()
    report = run(crashed, [other])
    assert report.ok and report.end_offset == other.end < end


def test_what_a_slave_has_synced_beyond_damage_is_repaired_so_that_it_starts() -> None:
    fs = KernelFileSystem()
    other = fill(fs, "/other", "classic")
    data, bad = bytearray(other.data[: other.end]), other.items[100][0]
    data[bad + 4 : bad + 8] = b"????"
    store = MessageStore(kit.config(ROOT), store_host=kit.HOST, fs=fs)
    store.open()
    for start in range(0, other.end, kit.FILE_SIZE):
        store.append_replica(start, bytes(data[start : min(other.end, start + kit.FILE_SIZE)]))
    while store.replay_problem is None:
        assert not store.wait_dispatched(other.end, 0.01)
    store.close()
    state = NodeState(fs, ROOT)
    state.load(1, "c", "g")
    state.save()
    again = MessageStore(kit.config(ROOT), store_host=kit.HOST, fs=fs)
    with pytest.raises(StoreBrokenError, match=f"record at {bad} is damaged"):
        again.open()
    assert not run(fs, []).ok
    report = run(fs, [other])
    assert report.ok and [one.damage.start for one in report.ranges] == [bad]
    assert report.end_offset == other.end
    again.open()
    assert again.max_offset == other.end and len(kit.bodies(again)) == COUNT
    again.close()


def test_a_store_that_is_in_use_or_of_another_node_or_lacks_files(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = KernelFileSystem()
    other = fill(fs, ROOT, "classic")
    with opened(ROOT, node=1, cluster="c", group="g", fs=fs):
        with pytest.raises(StoreInUseError):
            run(fs, [other])
    with pytest.raises(StoreBrokenError, match="belongs to node 1"):
        with opened(ROOT, node=2, cluster="c", group="g", fs=fs):
            pass
    remedies = {errno.EROFS: "look at the disk .*mount it anew", errno.EACCES: "read and write"}
    for code, remedy in remedies.items():
        refused = OSError(code, os.strerror(code), f"{ROOT}/lock")
        with monkeypatch.context() as patch, pytest.raises(StoreError, match=remedy):
            patch.setattr(fs, "lock", lambda _path, refused=refused: raise_failure("", refused))
            run(fs, [other])
    with pytest.raises(StoreError, match="no such folder"):
        with opened(str(tmp_path / "none"), node=1, cluster="c", group="g"):
            pass
    short = fs.open(f"{ROOT}/commitlog/{file_name(0)}")
    short.truncate(5000)
    with pytest.raises(StoreError, match="has 5000 bytes instead of 65536"):
        run(fs, [other])
    fs.remove(f"{ROOT}/commitlog/{file_name(0)}")
    with pytest.raises(StoreError):
        run(fs, [other])


def test_without_a_limits_page_damage_is_what_valid_items_follow(mode: str) -> None:
    fs = KernelFileSystem()
    other = fill(fs, ROOT, mode)
    fs.remove(f"{ROOT}/hastore/limits")
    scribble(fs, mode, other.items[10][0], b"\xff")
    report = run(fs, [other])
    assert report.ok and report.damaged_bytes == other.items[10][1] - other.items[10][0]
    assert report.end_offset == other.end
