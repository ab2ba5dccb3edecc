"""A full disk: appends are refused until there is room, nothing is lost, no process ends."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from hastore.errors import StoreError, StoreFullError
from hastore.store.message_store import MessageStore
from tests.store.kit import HOST, bodies, config, fill_up, message, opened, put

FILE = 1 << 20


def test_a_full_disk_refuses_puts_until_there_is_room(small_disk: Path) -> None:
    root = small_disk / "store"
    with opened(root, commitlog_file_size=FILE) as store:
        put(store, message(0, size=10_000))
        ballast = fill_up(small_disk)
        number = 1
        with pytest.raises(StoreFullError, match="room|space"):
            for number in range(1, 1000):
                put(store, message(number, size=10_000))
        end = store.max_offset
        with pytest.raises(StoreFullError):
            store.put_encoded([message(number, size=10_000)])
        assert store.max_offset == end
        assert store.problems
        assert store.put_encoded([message(5000, size=10)])[0][0].offset == end  # still fits
        ballast.unlink()
        deadline = time.monotonic() + 60
        while True:
            try:
                result = put(store, message(number, size=10_000))[0]
                break
            except StoreFullError:
                assert time.monotonic() < deadline, store.problems
                time.sleep(0.05)
        assert (result.offset or 0) % FILE == 0
        for more in range(number + 1, number + 50):
            put(store, message(more, size=10_000))
        assert len(bodies(store)) == number + 51
        store.flush()
    with opened(root, commitlog_file_size=FILE) as store:
        assert len(bodies(store)) == number + 51


def test_a_slave_on_a_full_disk_takes_nothing_and_goes_on(small_disk: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "m", commitlog_file_size=FILE) as master:
        for number in range(300):
            put(master, message(number, size=10_000))
        with opened(small_disk / "s", commitlog_file_size=FILE) as slave:
            ballast = None
            deadline = time.monotonic() + 60
            refused = 0
            while slave.max_offset < master.max_offset:
                offset = slave.max_offset
                try:
                    with master.view(offset, 50_000) as view:
                        slave.append_replica(offset, view)
                except StoreFullError:
                    assert slave.max_offset == offset
                    refused += 1
                    if refused == 3 and ballast is not None:
                        ballast.unlink()
                    assert time.monotonic() < deadline, slave.problems
                    time.sleep(0.05)
                if ballast is None and slave.max_offset > 300_000:
                    ballast = fill_up(small_disk)
            assert refused >= 3
            assert bodies(slave) == bodies(master)


def test_a_store_cannot_open_on_a_full_disk_but_says_so(small_disk: Path) -> None:
    fill_up(small_disk)
    store = MessageStore(config(small_disk / "s"), store_host=HOST)
    with pytest.raises(StoreError, match="[Nn]o (room|space)"):
        store.open()


def test_a_read_only_file_system(small_disk: Path) -> None:
    root = small_disk / "s"
    with opened(root) as store:
        put(store, message(0))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StoreError, match="mounted read-only"):
        MessageStore(config(root), store_host=HOST).open()
    assert os.path.exists(root / "commitlog")
