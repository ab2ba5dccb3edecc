"""LogStore.mend: bytes written over damaged ones of an open log, or a failure that says so."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import StoreBrokenError, StoreError
from hastore.store.message_store import MessageStore
from tests.store import kit
from tests.store.faulty import BAD_DISK, FaultyFileSystem, fresh

COUNT = 400


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[MessageStore]:
    fs = FaultyFileSystem()
    store = MessageStore(kit.config(tmp_path), store_host=kit.HOST, fs=fs)
    store.open()
    kit.put(store, *(kit.message(number) for number in range(COUNT)))
    store.flush()
    yield store
    fs.heal()
    with contextlib.suppress(StoreBrokenError):  # where the test has closed it for good
        store.close()


def faulty(store: MessageStore) -> FaultyFileSystem:
    fs = store._fs
    assert isinstance(fs, FaultyFileSystem)
    return fs


def test_bytes_over_two_files_are_written_and_synced(store: MessageStore) -> None:
    root = pathlib.Path(store.config.root)
    whole = kit.read_log(root)
    start, end = kit.FILE_SIZE - 1000, kit.FILE_SIZE + 1000
    assert end < store.max_offset
    kit.scribble(kit.log_file(root), start, bytes(1000))
    kit.scribble(kit.log_file(root, kit.FILE_SIZE), 0, bytes(1000))
    faulty(store).calls.clear()
    store.mend([(start, whole[start:end])], store.times_cut)
    assert kit.read_log(root) == whole
    synced = [path for call, path in faulty(store).calls if call == "sync"]
    assert synced == [kit.log_file(root), kit.log_file(root, kit.FILE_SIZE)]
    assert len(kit.bodies(store)) == COUNT


def test_a_write_that_fails_leaves_the_store_open(store: MessageStore) -> None:
    faulty(store).torn["commitlog"] = (10, BAD_DISK)
    with pytest.raises(StoreError, match="bytes at 500 cannot be written") as failed:
        store.mend([(500, b"x" * 100)], store.times_cut)
    assert not isinstance(failed.value, StoreBrokenError)
    store.mend([(500, b"x" * 100)], store.times_cut, skip_unreadable=True)
    faulty(store).heal()
    kit.put(store, kit.message(COUNT))


def test_a_sync_that_fails_closes_the_store(store: MessageStore) -> None:
    def fail(call: str, path: str) -> None:
        if call == "sync" and "commitlog" in path:
            raise fresh(BAD_DISK, path)

    faulty(store).hook = fail
    with pytest.raises(StoreBrokenError, match="a sync of repaired bytes at 500 failed"):
        store.mend([(500, b"x" * 100)], store.times_cut)
    assert store.broken_reason is not None


def test_the_repaired_file_may_be_removed_before_its_sync(tmp_path: pathlib.Path) -> None:
    fs = FaultyFileSystem()
    kept = RetentionConfig(max_size_bytes=2 * kit.FILE_SIZE)
    store = MessageStore(kit.config(tmp_path, retention=kept), store_host=kit.HOST, fs=fs)
    store.open()
    for number in range(5):
        kit.put(store, kit.message(number, size=kit.FILE_SIZE - 3000))
    store.flush()
    assert store.wait_dispatched(store.max_offset, 60)
    first = kit.log_file(tmp_path)
    written = threading.Event()

    def note(call: str, path: str) -> None:
        if (call, path) == ("write", first):
            written.set()

    fs.hook = note
    with ThreadPoolExecutor(1) as threads:
        with store.flush_service.sync_lock:  # as during a slow sync of the last file
            mended = threads.submit(store.mend, [(500, b"x" * 100)], store.times_cut)
            assert written.wait(60)
            removed = store.retention.delete_expired(None)
        mended.result()
    assert removed == 3 and store.broken_reason is None
    kit.put(store, kit.message(5))
    store.close()


def test_nothing_is_written_after_a_cut_or_where_there_is_no_file(store: MessageStore) -> None:
    root = pathlib.Path(store.config.root)
    cuts = store.times_cut
    store.truncate(70_000)
    after = kit.read_log(root)
    with pytest.raises(StoreError, match="has changed at 500 meanwhile"):
        store.mend([(500, b"x")], cuts)
    with pytest.raises(StoreError, match="has changed"):
        store.mend([(10 * kit.FILE_SIZE, b"x")], store.times_cut)
    assert kit.read_log(root) == after
