"""Retention passes a bad sector, and ends when the store closes."""

import threading
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import StoreError
from hastore.store.message_store import MessageStore
from tests.store.faulty import FaultyFileSystem, NoticedLock
from tests.store.kit import (
    FILE_SIZE,
    HOST,
    bodies,
    config,
    log_file,
    message,
    opened,
    put,
    scribble,
)
from tests.store.test_cold_reads import Disk


class Clock:
    """The time, as the test sets it."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def wall_ms(self) -> int:
        return self.now

    def monotonic_ms(self) -> float:
        return float(self.now)


def fill(store: MessageStore, files: int) -> None:
    for number in range(files):
        put(store, message(number, size=FILE_SIZE - 3000))
    store.flush()
    assert len(bodies(store)) == files


@pytest.mark.parametrize("how", ["damaged", "unreadable"])
def test_a_bad_record_at_the_start_of_a_file_keeps_no_file_for_ever(
    tmp_path: Path, how: str
) -> None:
    clock, disk = Clock(), Disk()
    aged = RetentionConfig(max_age_ms=1000)
    settings = config(tmp_path, retention=aged)
    store = MessageStore(settings, store_host=HOST, clock=clock)
    store.open()
    fill(store, 3)
    clock.now += 600
    put(store, *[message(number, size=FILE_SIZE - 3000) for number in range(3, 5)])
    store.close()
    store = MessageStore(settings, store_host=HOST, clock=clock, fs=disk)
    store.open()
    try:
        assert store.wait_dispatched(store.max_offset, 10)
        if how == "damaged":
            scribble(log_file(tmp_path, FILE_SIZE), 4, b"\xff\xff\xff\xff")
        else:
            disk.bad.append((f"{FILE_SIZE:020d}", 0, 512))
        clock.now += 600
        assert store.retention.delete_expired(None) == 2  # the fourth file is too young
        clock.now += 600
        assert store.retention.delete_expired(None) == 2
    finally:
        disk.bad.clear()
        store.close()


def test_the_store_is_not_unlocked_while_retention_removes_files(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    settings = config(tmp_path, retention=RetentionConfig(max_size_bytes=2 * FILE_SIZE))
    store = MessageStore(settings, store_host=HOST, fs=fs)
    store.open()
    fill(store, 5)
    inside, waiting, closed = threading.Event(), threading.Event(), threading.Event()
    store.retention.removing = NoticedLock(waiting)  # type: ignore[assignment]
    refused: list[bool] = []

    def close() -> None:
        assert inside.wait(10)
        store.close()
        closed.set()
        waiting.set()

    closer = threading.Thread(target=close)

    def hook(call: str, path: str) -> None:
        if call == "remove" and "/commitlog/" in path and not inside.is_set():
            inside.set()
            assert waiting.wait(30)  # the close has ended, or waits for this thread
            refused.append(not closed.is_set())

    fs.hook = hook
    closer.start()
    try:
        removed = store.retention.delete_expired(None)
    finally:
        closer.join(30)
    assert refused == [True]
    assert removed == 3
    with opened(tmp_path) as again:  # it finds the files that are left
        assert len(bodies(again)) == 4


def test_a_closed_store_removes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, retention=RetentionConfig(max_size_bytes=2 * FILE_SIZE)) as store:
        fill(store, 5)
        store.close()
        with opened(tmp_path) as again:  # another process, say
            with pytest.raises(StoreError, match="closed"):
                store.retention.delete_expired(None)
            assert len(bodies(again)) == 5
