"""Retention while puts go on: they do not wait for its disk work; no failure leaves a gap."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import StoreError
from hastore.store.message_store import MessageStore
from tests.store.faulty import FaultyFileSystem
from tests.store.kit import FILE_SIZE, HOST, bodies, config, crash_copy, message, opened, put

KEPT = RetentionConfig(max_size_bytes=2 * FILE_SIZE)


@contextmanager
def five_files(root: Path) -> Iterator[tuple[MessageStore, FaultyFileSystem]]:
    """A store of five files, synced and replayed, of which retention may take three."""
    fs = FaultyFileSystem()
    store = MessageStore(config(root, retention=KEPT), store_host=HOST, fs=fs)
    store.open()
    try:
        for number in range(5):
            put(store, message(number, size=FILE_SIZE - 3000, producer="p"))
        store.flush()
        assert len(bodies(store)) == 5
        fs.calls.clear()
        yield store, fs
    finally:
        fs.heal()
        store.close()


def log_path(root: Path, number: int) -> str:
    return f"{root}/commitlog/{number * FILE_SIZE:020d}"


@pytest.mark.parametrize(
    ("call", "part"),
    [("remove", "/commitlog/"), ("sync_dir", "/commitlog"), ("sync", "idempotence.tmp")],
)
def test_a_put_does_not_wait_for_retention(tmp_path: Path, call: str, part: str) -> None:
    with five_files(tmp_path) as (store, fs):
        inside, go_on = threading.Event(), threading.Event()
        removed: list[int] = []
        delete = store.retention.delete_expired
        remover = threading.Thread(target=lambda: removed.append(delete(None)))

        def block(made: str, path: str) -> None:
            if threading.current_thread() is remover and made == call and part in path:
                inside.set()
                assert go_on.wait(60)

        fs.hook = block
        remover.start()
        writer = threading.Thread(
            target=lambda: put(store, message(5), message(6, size=FILE_SIZE - 3000))
        )
        try:
            assert inside.wait(60)
            writer.start()  # into the current file and into a new one
            writer.join(60)
            assert not writer.is_alive()
            assert not removed
        finally:
            go_on.set()
            remover.join()
            writer.join()
        assert removed == [3]
        assert len(bodies(store)) == 4


def test_each_file_is_durably_gone_before_the_next(tmp_path: Path) -> None:
    with five_files(tmp_path) as (store, fs):
        assert store.retention.delete_expired(None) == 3
        made = [(call, path) for call, path in fs.calls if call in ("remove", "sync_dir", "rename")]
        snapshot = made.index(("rename", f"{tmp_path}/hastore/idempotence"))
        made = [(call, path) for call, path in made[snapshot:] if "/commitlog" in path]
        synced = ("sync_dir", f"{tmp_path}/commitlog")
        assert made == [
            step for number in range(3) for step in (("remove", log_path(tmp_path, number)), synced)
        ]
        assert store.min_offset == 3 * FILE_SIZE
        assert store.retention.delete_expired(None) == 0
        removed = store.retention.removed_files, store.retention.removed_bytes
        assert removed == (3, 3 * FILE_SIZE)


@pytest.mark.parametrize("call", ["remove", "sync_dir"])
def test_a_file_that_could_not_be_removed_is_removed_first_the_next_time(
    tmp_path: Path, call: str
) -> None:
    with five_files(tmp_path / "a") as (store, fs):
        tries: list[str] = []

        def second(made: str, path: str) -> None:
            if made == call and "/commitlog" in path:
                tries.append(path)
                if len(tries) == 2:
                    raise OSError(5, "told to", path)

        fs.hook = second
        with pytest.raises(StoreError, match="told to"):
            store.retention.delete_expired(None)
        assert store.min_offset == 3 * FILE_SIZE  # readers are refused already
        starts_again(store, tmp_path / "b")
        fs.heal()
        for number in (5, 6):
            put(store, message(number, size=FILE_SIZE - 3000, producer="p"))
        store.flush()
        assert len(bodies(store)) == 4
        fs.calls.clear()
        assert store.retention.delete_expired(None) == 2
        first = next(path for made, path in fs.calls if made == "remove" and "/commitlog/" in path)
        assert first == log_path(tmp_path / "a", 1)
        starts_again(store, tmp_path / "c")
        left = sorted(path.name for path in (tmp_path / "a" / "commitlog").iterdir())
        assert left == [f"{number * FILE_SIZE:020d}" for number in (5, 6)]


def test_a_new_log_keeps_its_files_when_retention_had_some_left_to_remove(tmp_path: Path) -> None:
    """Its files may have the names of those that could not be removed."""
    with five_files(tmp_path / "a") as (store, fs):
        fs.fail("remove", "/commitlog/")
        with pytest.raises(StoreError):
            store.retention.delete_expired(None)
        fs.heal()
        store.set_aside("old")
        put(store, message(9))
        store.flush()
        assert len(bodies(store)) == 1
        store.retention.delete_expired(None)
        assert Path(log_path(tmp_path / "a", 0)).exists()
        starts_again(store, tmp_path / "b", 1)


def starts_again(store: MessageStore, target: Path, count: int | None = None) -> None:
    with opened(crash_copy(store, target)) as again:
        assert again.max_offset == store.max_offset
        if count is not None:
            assert len(bodies(again)) == count
