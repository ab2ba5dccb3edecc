"""Damage in a store that RocketMQ wrote: it is reported, and nothing after it is cut."""

import os
import shutil
from pathlib import Path

import pytest

from hastore.errors import StoreBrokenError
from hastore.store.message_store import MessageStore
from tests.process.stores import read_log
from tests.store.kit import HOST, config, message, opened, put


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A store of several files, cleanly closed, without the files of hastore's own."""
    with opened(tmp_path) as store:
        for number in range(200):
            put(store, message(number, size=1000))
    shutil.rmtree(tmp_path / "hastore")
    return tmp_path


def scribble(root: Path, offset: int, data: bytes) -> None:
    files = sorted((root / "commitlog").iterdir())
    file = next(f for f in reversed(files) if int(f.name) <= offset)
    with open(file, "r+b") as log:
        os.pwrite(log.fileno(), data, offset - int(file.name))


def contents(root: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((root / "commitlog").iterdir())]


def refused(root: Path) -> str:
    before = contents(root)
    with pytest.raises(StoreBrokenError) as no:
        MessageStore(config(root), store_host=HOST).open()
    assert contents(root) == before
    return str(no.value)


@pytest.mark.parametrize("how", ["a bit", "zeros", "the last of its file"])
def test_damage_is_refused_after_a_clean_stop_and_cut_if_abort_exists(
    foreign: Path, how: str
) -> None:
    records = read_log(foreign).records
    at = len(records) - 5
    if how == "the last of its file":
        base = int(sorted((foreign / "commitlog").iterdir())[-1].name)
        at = next(n for n, found in enumerate(records) if found.offset >= base) - 1
    victim = records[at]
    scribble(foreign, victim.offset + 200, b"\xff" if how != "zeros" else b"")
    if how == "zeros":
        scribble(foreign, victim.offset, bytes(victim.size))
    told = refused(foreign)
    assert f"the record at {victim.offset} is damaged" in told
    assert f"from {records[at + 1].offset} on" in told and "`abort`" in told
    (foreign / "abort").touch()
    with opened(foreign) as store:
        assert store.max_offset == victim.offset


def test_a_damaged_last_record_is_only_cut(foreign: Path) -> None:
    last = read_log(foreign).records[-1]
    scribble(foreign, last.offset + 200, b"\xff")
    with opened(foreign) as store:
        assert store.max_offset == last.offset


def test_older_records_after_the_end_are_left_from_a_cut(foreign: Path) -> None:
    """RocketMQ cuts by moving a pointer: the old bytes stay, and are no damage."""
    records = read_log(foreign).records
    newer = records[-3]
    stamp = newer.offset + 56  # storeTimestamp
    scribble(foreign, stamp, (newer.store_ms + 60_000).to_bytes(8))
    scribble(foreign, records[-2].offset + 200, b"\xff")
    with opened(foreign) as store:
        assert store.max_offset == records[-2].offset


def test_a_large_record_after_the_damage_is_found(tmp_path: Path) -> None:
    """A record larger than the window that is read."""
    settings = config(tmp_path, commitlog_file_size=16 << 20)
    store = MessageStore(settings, store_host=HOST)
    store.open()
    put(store, message(0, size=1000), message(1, size=1000))
    put(store, message(2, size=4 << 20))
    store.close()
    shutil.rmtree(tmp_path / "hastore")
    victim = read_log(tmp_path).records[1]
    scribble(tmp_path, victim.offset + 200, b"\xff")
    with pytest.raises(StoreBrokenError, match=f"at {victim.offset} is damaged"):
        MessageStore(settings, store_host=HOST).open()
