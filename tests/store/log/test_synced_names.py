"""Names of files are synced before anything relies on them, in both directories of a rename."""

import json
import threading
from pathlib import Path

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.server.role_source import OneShotFlags
from hastore.store.derived.unit_files import FileCache
from hastore.store.log.mapped_file_queue import MappedFileQueue
from hastore.store.message_store import MessageStore
from tests.store.derived_files import Derived
from tests.store.faulty import BAD_DISK, FaultyFileSystem
from tests.store.kit import FILE_SIZE, HOST, config, message, put
from tests.store.logs import MemoryLog


def opened_on(fs: FaultyFileSystem, root: Path) -> MessageStore:
    store = MessageStore(config(root), store_host=HOST, fs=fs)
    store.open()
    return store


def synced_dirs(fs: FaultyFileSystem) -> set[str]:
    return {path for call, path in fs.calls if call == "sync_dir"}


def new_queue(fs: FaultyFileSystem, root: Path) -> MappedFileQueue:
    (root / "commitlog").mkdir()
    return MappedFileQueue(fs, f"{root}/commitlog", 4096)


def make_file(path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(4096)


def test_a_concurrent_flush_does_not_skip_a_name_that_is_not_synced(
    tmp_path: Path,
) -> None:
    fs = FaultyFileSystem()
    queue = new_queue(fs, tmp_path)
    queue.add(0, make_file)
    inside, go_on = threading.Event(), threading.Event()
    first = threading.Thread(target=queue.sync, args=(0, 1))

    def block(call: str, _path: str) -> None:
        if call == "sync_dir" and threading.current_thread() is first:
            inside.set()
            assert go_on.wait(60)

    fs.hook = block
    first.start()
    try:
        assert inside.wait(60)
        queue.sync(0, 1)  # the other sync may still fail
        assert len(synced_dirs(fs)) == 1
        assert [call for call, _ in fs.calls].count("sync_dir") == 2
    finally:
        go_on.set()
        first.join()
    fs.calls.clear()
    queue.sync(0, 1)
    assert synced_dirs(fs) == set()


def test_a_name_added_during_a_sync_is_synced_by_the_next(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    queue = new_queue(fs, tmp_path)
    queue.add(0, make_file)
    added: list[int] = []

    def add_one(call: str, _path: str) -> None:
        if call == "sync_dir" and not added:
            added.append(1)
            queue.add(4096, make_file)

    fs.hook = add_one
    queue.sync(0, 1)
    fs.calls.clear()
    queue.sync(0, 1)
    assert synced_dirs(fs) == {f"{tmp_path}/commitlog"}


def test_a_new_log_file_is_synced_where_it_went_and_where_it_was(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    store = opened_on(fs, tmp_path)
    put(store, message(0, size=3000))
    store.flush()
    fs.calls.clear()
    put(store, message(1, size=FILE_SIZE - 2000))
    store.flush()
    assert ("rename", f"{tmp_path}/commitlog/{FILE_SIZE:020d}") in fs.calls
    assert {f"{tmp_path}/commitlog", f"{tmp_path}/hastore"} <= synced_dirs(fs)
    fs.calls.clear()
    put(store, message(2))
    store.flush()
    assert f"{tmp_path}/commitlog" not in synced_dirs(fs)  # housekeeping syncs the others
    store.close()


def test_a_spare_of_an_earlier_process_is_not_used(tmp_path: Path) -> None:
    """After a power loss it may be the last log file, under its old name."""
    store = opened_on(FaultyFileSystem(), tmp_path)
    put(store, message(0))
    store.close()
    spare, last = tmp_path / "hastore" / "spare", tmp_path / "commitlog" / f"{0:020d}"
    spare.hardlink_to(last)
    store = opened_on(FaultyFileSystem(), tmp_path)
    put(store, message(1, size=FILE_SIZE - 200))
    store.close()
    assert (tmp_path / "commitlog" / f"{FILE_SIZE:020d}").stat().st_ino != last.stat().st_ino


def test_every_new_directory_of_a_queue_is_synced_in_the_one_above(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    cache = FileCache(fs)
    cache.create(f"{tmp_path}/consumequeue/T/0/{0:020d}", 100)
    cache.flush()
    path, expected = Path(f"{tmp_path}/consumequeue/T/0"), set()
    while path != tmp_path.parent:
        expected.add(str(path))
        path = path.parent
    assert synced_dirs(fs) == expected
    fs.calls.clear()
    cache.create(f"{tmp_path}/consumequeue/T/1/{0:020d}", 100)
    cache.flush()
    assert synced_dirs(fs) == {f"{tmp_path}/consumequeue/T", f"{tmp_path}/consumequeue/T/1"}
    cache.close()


def test_unsynced_files_of_a_killed_process_are_synced_before_progress_says_so(
    tmp_path: Path,
) -> None:
    log = MemoryLog(file_size=1 << 20)
    for number in range(50):
        log.append(topic="Topic", queue_id=0, queue_offset=number)
    killed = Derived.over(tmp_path, log)
    killed.build.replay()  # it neither flushes nor closes
    log.append(topic="Topic", queue_id=0, queue_offset=50)
    fs = FaultyFileSystem()
    derived = Derived.over(tmp_path, log, fs=fs)
    derived.build.replay()
    derived.build.flush()
    assert [call for call, _ in fs.calls].count("sync_all") == 1
    log.append(topic="Topic", queue_id=0, queue_offset=51)
    derived.build.replay()
    derived.build.flush()
    assert [call for call, _ in fs.calls].count("sync_all") == 1
    derived.build.close()
    killed.build.close()


def once_file(root: Path, **changes: object) -> Path:
    fields = {"command": "demote", "epoch": 7, "wall_ms": SYSTEM_CLOCK.wall_ms()}
    path = root / "hastore" / "once.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**fields, "accept_loss": True, **changes}))
    return path


@pytest.mark.parametrize("content", ["good", "old", "torn"])
def test_a_one_shot_flag_is_removed_durably_before_it_is_used(tmp_path: Path, content: str) -> None:
    fs = FaultyFileSystem()
    path = once_file(tmp_path, **({"epoch": 6} if content == "old" else {}))
    if content == "torn":
        path.write_text("{")
    flags = OneShotFlags(fs, str(tmp_path), SYSTEM_CLOCK).take_flags("demote", 7)
    assert (flags is not None and flags.accept_loss) is (content == "good")
    assert [call for call, _ in fs.calls[-2:]] == ["remove", "sync_dir"]
    assert fs.calls[-1][1] == f"{tmp_path}/hastore"


def test_a_one_shot_flag_that_may_come_back_is_not_used(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    once_file(tmp_path)
    fs.fail("sync_dir", "hastore")
    with pytest.raises(OSError, match=BAD_DISK.strerror):
        OneShotFlags(fs, str(tmp_path), SYSTEM_CLOCK).take_flags("demote", 7)
