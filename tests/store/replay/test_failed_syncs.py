"""After a failed sync of queues or index the status says so, and `synced` does not move."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hastore.errors import StoreError, SyncFailedError
from hastore.store import log_store
from hastore.store.message_store import MessageStore
from tests.store.derived_files import Derived
from tests.store.faulty import BAD_DISK, NO_SPACE, FaultyFileSystem
from tests.store.kit import HOST, bodies, config, crash_copy, message, opened, put
from tests.store.logs import MemoryLog, fill

QUEUE, INDEX = "/consumequeue/", "/index/"


class Keeper:
    """Count the steps of housekeeping, so that a test can wait for the next."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._changed = threading.Condition()
        self.count = 0

    def __call__(self) -> None:
        try:
            self._step()
        finally:
            with self._changed:
                self.count += 1
                self._changed.notify_all()

    def wait(self, more: int = 2) -> None:
        """Wait for further steps; of two, the second began after this call."""
        with self._changed:
            wanted = self.count + more
            assert self._changed.wait_for(lambda: self.count >= wanted, 60)


@contextmanager
def kept(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[MessageStore, FaultyFileSystem, Keeper]]:
    """A store whose housekeeping runs every 5 ms."""
    fs = FaultyFileSystem()

    store = MessageStore(config(root), store_host=HOST, fs=fs)
    keeper = Keeper(store._housekeeping.keep)
    monkeypatch.setattr(store._housekeeping, "keep", keeper)
    monkeypatch.setattr(log_store, "HOUSEKEEPING_S", 0.005)
    store.open()
    try:
        yield store, fs, keeper
    finally:
        fs.heal()
        if store.is_open:
            store.close()


@pytest.mark.parametrize("part", [QUEUE, INDEX])
def test_a_failed_sync_is_shown_until_a_restart_has_rebuilt_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    root = tmp_path / "a"
    with kept(root, monkeypatch) as (store, fs, keeper):
        put(store, message(0))
        assert len(bodies(store)) == 1
        keeper.wait()
        before, synced = store._checkpoint.now, store.replay._state.synced
        assert store.problems == [] and before.queue_timestamp_ms and synced == store.max_offset
        fs.fail("sync", part)
        put(store, message(1), message(2))
        assert len(bodies(store)) == 3
        keeper.wait()
        assert any("restart the node" in problem for problem in store.problems), store.problems
        fs.heal()
        put(store, message(3))
        assert len(bodies(store)) == 4  # reads still work
        keeper.wait()
        assert any(f"from offset {synced} on" in problem for problem in store.problems)
        assert store.replay._state.synced == synced
        assert store._checkpoint.now == before
        copy = crash_copy(store, tmp_path / "b")
        lose_pages(Path(copy), kept_bytes=20 if part == QUEUE else 0)
        with pytest.raises(StoreError, match="did not stop cleanly"):
            store.close()
        assert (root / "abort").exists()
    for left in (copy, root):
        with opened(left) as again:  # same boot, but the page cache cannot be trusted
            assert len(bodies(again)) == 4
            assert [len(again.reader.query_key("TopicA", f"key{n}")) for n in range(4)] == [1] * 4


def lose_pages(root: Path, *, kept_bytes: int) -> None:
    """Drop the unsynced units of the queue, as a kernel may that drops dirty pages."""
    if kept_bytes:
        (path,) = (root / "consumequeue" / "TopicA" / "0").iterdir()
        size = path.stat().st_size
        os.truncate(path, kept_bytes)
        os.truncate(path, size)


def test_a_full_disk_at_the_snapshot_is_shown_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(tmp_path, monkeypatch) as (store, fs, keeper):
        monkeypatch.setattr(store._window, "_snapshot_step", 1)

        def full(call: str, path: str) -> None:
            if call == "write" and path.endswith("idempotence.tmp"):
                raise OSError(errno.ENOSPC, NO_SPACE.strerror, path)

        fs.hook = full
        put(store, message(0, producer="p"))
        assert len(bodies(store)) == 1
        keeper.wait()
        for _ in range(3):
            keeper.wait()
            assert any("No space left" in problem for problem in store.problems)
        assert store.replay._state.synced == 0
        fs.heal()
        keeper.wait()
        assert store.problems == []
        assert store.replay._state.synced == store.max_offset


@pytest.mark.parametrize("part", [QUEUE, INDEX])
def test_a_file_that_could_not_be_opened_is_synced_at_the_next_try(
    tmp_path: Path, part: str
) -> None:
    log, fs = MemoryLog(), FaultyFileSystem()
    fill(log, 30)
    derived = Derived.over(tmp_path, log, fs=fs)
    derived.build.replay()
    fs.fail("open", part, OSError(errno.EMFILE, "Too many open files"))
    with pytest.raises(OSError, match="Too many open files"):
        derived.build.flush()
    assert derived.build._state.synced == 0
    fs.heal()
    fs.calls.clear()
    derived.build.flush()
    assert [path for call, path in fs.calls if call == "sync" and part in path]
    assert derived.build._state.synced == log.max_offset
    derived.build.close()


@pytest.mark.parametrize("call", ["sync_dir", "sync_all"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_a_sync_that_found_no_free_descriptor_is_tried_again(
    tmp_path: Path, call: str, code: int
) -> None:
    """Nothing is lost: the directory could not be opened, so no sync began."""
    log, fs = MemoryLog(), FaultyFileSystem()
    fill(log, 30)
    derived = Derived.over(tmp_path, log, fs=fs)
    derived.build.replay()
    if call == "sync_all":  # the first flush of a process whose files may hold unsynced pages
        derived.build.close()
        derived = Derived.over(tmp_path, log, fs=fs)
        fill(log, 30)
        derived.build.replay()
    fs.fail(call, "", OSError(code, os.strerror(code)))
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(code)):
            derived.build.flush()
    assert derived.build._state.synced == 0
    fs.heal()
    fs.calls.clear()
    derived.build.flush()
    assert call in [made for made, _ in fs.calls]
    assert derived.build._state.synced == log.max_offset
    derived.build.close()


@pytest.mark.parametrize("call", ["sync", "sync_dir"])
def test_after_a_failed_sync_each_flush_says_so(tmp_path: Path, call: str) -> None:
    log, fs = MemoryLog(), FaultyFileSystem()
    fill(log, 30)
    derived = Derived.over(tmp_path, log, fs=fs)
    derived.build.replay()
    fs.fail(call, "/consumequeue/", BAD_DISK)
    for _ in range(3):
        with pytest.raises(SyncFailedError, match="from offset 0 on"):
            derived.build.flush()
        fs.heal()
    again = Derived.over(tmp_path, log, fs=fs)  # same boot
    assert again.build.dispatched_offset == 0
    again.build.close()
    with derived.build.paused():
        derived.build.reset(0)  # the files were moved away
    derived.build.flush()
    derived.build.close()
