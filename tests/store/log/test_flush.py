"""Syncs of the log: group commit, hooks, and failed syncs."""

import errno
import os
import threading
from pathlib import Path

import pytest

from hastore.config.model import Flush
from hastore.errors import StoreBrokenError, StoreError, StoreFullError
from hastore.fs.filesystem import File, RealFile, RealFileSystem
from hastore.store.log import flush
from hastore.store.message_store import MessageStore
from tests.process.harness import wait_until
from tests.store.kit import FILE_SIZE, HOST, bodies, config, crash_copy, message, opened, put


class FaultyFile(RealFile):
    """A file that fails to sync or write on demand."""

    fail_sync = False
    write_errno: int | None = None
    syncs = 0
    hung: threading.Event | None = None  # syncs return once it is set

    def sync(self) -> None:
        if "/commitlog/" in self.path:
            FaultyFile.syncs += 1
            if FaultyFile.hung is not None:
                assert FaultyFile.hung.wait(60)
            if FaultyFile.fail_sync:
                raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
        super().sync()

    def pwrite(self, data: object, position: int) -> None:
        if FaultyFile.write_errno is not None and "/commitlog/" in self.path:
            raise OSError(FaultyFile.write_errno, "told to", self.path)
        super().pwrite(data, position)  # type: ignore[arg-type]


class FaultyFileSystem(RealFileSystem):
    full_table = False  # whether the process may open no more files

    def sync_dir(self, path: str) -> None:
        if FaultyFileSystem.full_table:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        super().sync_dir(path)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return FaultyFile(path, os.open(path, flags, 0o644))


@pytest.fixture(autouse=True)
def _sound() -> None:
    FaultyFile.fail_sync = False
    FaultyFile.write_errno = None
    FaultyFile.syncs = 0
    FaultyFile.hung = None
    FaultyFileSystem.full_table = False


def faulty(root: Path, failures: list[str] | None = None, **changes: object) -> MessageStore:
    store = MessageStore(
        config(root, **changes),
        store_host=HOST,
        fs=FaultyFileSystem(),
        on_failure=lambda name, failure: (failures if failures is not None else []).append(name),
    )
    store.open()
    return store


def test_flushed_offset_moves_with_a_sync_and_on_flushed_is_called(tmp_path: Path) -> None:
    told: list[int] = []
    with opened(tmp_path) as store:
        store.hooks.on_flushed = told.append
        end = put(store, message(0))[0].end_offset
        assert (store.flushed_offset, told) == (0, [])
        assert store.flush() == end == store.flushed_offset
        assert store.flush() == end
        assert told == [end]
        assert store.flush_service.wait_flushed(end or 0, 0)
        put(store, message(1))
        assert store.flush_service.wait_flushed(store.max_offset, 60)
        assert told == [end, store.max_offset]


def test_a_sync_that_does_not_return_is_told_while_it_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The histogram of syncs gets nothing then, and the end of what is synced stands still."""
    store = faulty(tmp_path, flush=Flush.SYNC)
    service, hung = store.flush_service, threading.Event()
    put(store, message(0))
    store.flush()
    assert (service.running_ms, service.sync_problem) == (0, None)
    FaultyFile.hung = hung
    put(store, message(1))
    service.request()
    wait_until(lambda: service.running_ms > 0, 60, "a sync runs")
    assert service.sync_problem is None, "it has only begun"
    monkeypatch.setattr(flush, "HANGS_MS", 0.1)
    wait_until(lambda: service.sync_problem is not None, 60, "it hangs")
    assert "look at the disk of this node" in str(service.sync_problem)
    assert not store.lacks_room, "no room would help"
    monkeypatch.setattr(flush, "SLOW_BYTES_PER_MS", 1e-9)
    assert service.sync_problem is None, "so many bytes take longer on a slow disk"
    hung.set()
    wait_until(lambda: service.running_ms == 0, 60, "it has returned")
    assert service.sync_problem is None
    FaultyFile.hung = None
    store.close()


def test_synchronous_puts_share_syncs(tmp_path: Path) -> None:
    store = faulty(tmp_path, flush=Flush.SYNC)
    before = FaultyFile.syncs

    def work() -> None:
        for number in range(20):
            end = put(store, message(number))[0].end_offset
            assert end is not None and store.flush_service.wait_flushed(end, 60)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.flushed_offset == store.max_offset
    assert 1 <= FaultyFile.syncs - before <= 160
    store.close()


def test_asynchronous_flush_by_interval(tmp_path: Path) -> None:
    with opened(tmp_path, flush_interval_ms=20) as store:
        moved = threading.Event()
        store.hooks.on_flushed = lambda offset: moved.set()
        put(store, message(0))
        assert moved.wait(60)
        assert store.flushed_offset == store.max_offset


def test_a_failed_sync_closes_the_store_for_good(tmp_path: Path) -> None:
    failures: list[str] = []
    store = faulty(tmp_path / "a", failures)
    put(store, message(0))
    store.flush()
    put(store, message(1))
    FaultyFile.fail_sync = True
    with pytest.raises(StoreBrokenError, match="restart"):
        store.flush()
    FaultyFile.fail_sync = False
    syncs = FaultyFile.syncs
    for action in (
        store.flush,
        lambda: put(store, message(2)),
        lambda: store.append_replica(store.max_offset, b"x"),
        lambda: store.flush_service.wait_flushed(store.max_offset, 60),
        lambda: store.truncate(0),
    ):
        with pytest.raises(StoreBrokenError):
            action()
    assert FaultyFile.syncs == syncs  # never tried again
    assert failures == ["store"]
    assert store.broken_reason is not None and store.problems
    assert store.flushed_offset < store.max_offset
    assert len(bodies(store)) == 2  # reads go on
    with pytest.raises(StoreBrokenError):
        store.close()
    assert os.path.exists(tmp_path / "a" / "abort")
    with opened(tmp_path / "a") as again:
        assert len(bodies(again)) == 2


def test_a_sync_without_a_free_descriptor_is_tried_again(tmp_path: Path) -> None:
    failures: list[str] = []
    store = faulty(tmp_path, failures, flush=Flush.SYNC)
    FaultyFileSystem.full_table = True
    end = put(store, message(0))[0].end_offset
    assert end is not None and not store.flush_service.wait_flushed(end, 0.05)
    with pytest.raises(StoreError, match="not synced yet.*raise the limit of open files"):
        store.flush()
    wait_until(lambda: any("not synced yet" in each for each in store.problems), 60, "no problem")
    FaultyFileSystem.full_table = False
    assert store.flush_service.wait_flushed(end, 30)
    wait_until(lambda: not store.problems, 60, "still a problem")
    assert failures == [] and store.broken_reason is None
    store.close()


def test_a_failed_background_sync_fails_the_waiting_threads(tmp_path: Path) -> None:
    failures: list[str] = []
    store = faulty(tmp_path, failures, flush=Flush.SYNC)
    FaultyFile.fail_sync = True
    end = store.put_encoded([message(0)])[0][0].end_offset
    assert end is not None
    with pytest.raises(StoreBrokenError):
        store.flush_service.wait_flushed(end, 60)
    assert failures == ["store"]
    with pytest.raises(StoreBrokenError):
        store.close()


def test_a_write_error_closes_the_store_a_full_disk_does_not(tmp_path: Path) -> None:
    store = faulty(tmp_path)
    end = put(store, message(0))[0].end_offset
    FaultyFile.write_errno = errno.ENOSPC
    with pytest.raises(StoreFullError):
        store.put_encoded([message(1)])
    FaultyFile.write_errno = None
    assert put(store, message(1))[0].offset == end
    FaultyFile.write_errno = errno.EIO
    with pytest.raises(StoreBrokenError):
        store.put_encoded([message(2)])
    FaultyFile.write_errno = None
    with pytest.raises(StoreBrokenError):
        store.put_encoded([message(2)])
    with pytest.raises(StoreBrokenError):
        store.close()


def test_limits_survive_kill_9_and_on_readable_is_called(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        put(store, message(0), message(1))
        told: list[int] = []
        store.hooks.on_readable = lambda: told.append(store.readable_offset)
        store.set_limits(confirmed=100, readable=150)
        assert told == [150]
        copy = crash_copy(store, tmp_path / "b")
    with opened(copy) as store:
        assert (store.confirmed_offset, store.readable_offset) == (100, 150)


def test_replica_bytes_by_append_and_by_splice(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as master:
        for number in range(100):
            put(master, message(number, size=1000))
        with opened(tmp_path / "s") as slave:
            while slave.max_offset < master.max_offset:
                offset = slave.max_offset
                source = master.file_range(offset, 7001)
                if offset % 3:
                    room = slave.replica_range(offset, source.size)
                    assert room.size == min(source.size, FILE_SIZE - offset % FILE_SIZE)
                    data = os.pread(source.fd, source.size, source.position)
                    os.pwrite(room.fd, data, room.position)
                    assert slave.commit_replica(offset, len(data)) == offset + len(data)
                else:
                    with master.view(offset, 7001) as view:
                        assert slave.append_replica(offset, view) == offset + source.size
                assert slave.whole_offset <= slave.max_offset
                assert slave.wait_beyond(offset, 0) == slave.max_offset
            assert slave.whole_offset == master.max_offset
            assert bodies(slave) == bodies(master)
            with slave.view(0, 1 << 20) as left, master.view(0, 1 << 20) as right:
                assert left == right
            assert slave.file_range(slave.max_offset, 10).size == 0
