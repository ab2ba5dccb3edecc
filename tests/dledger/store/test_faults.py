"""Disks that fail or are full: what is refused, what closes the store, and what a restart finds."""

import contextlib
import errno
import os

import pytest

from hastore.dledger.core.events import HardState, OwnEntry
from hastore.errors import (
    Status,
    StoreBrokenError,
    StoreError,
    StoreFullError,
    StoreMovedError,
)
from tests.dledger.store.kit import copy_entries, data_of, make, no_op, opened, put, walk
from tests.ha.nodes import wait_for
from tests.store.faulty import BAD_DISK, NO_SPACE, FaultyFileSystem
from tests.store.kit import FILE_SIZE, bodies, message


@pytest.fixture
def broken(tmp_path):
    """An open store with 100 synced and 20 other entries, and its file system."""
    fs = FaultyFileSystem()
    store = make(tmp_path / "s", fs=fs)
    store.open()
    store.save_hard_state(HardState(1, 1), remembers=True)
    put(store, 1, *(message(number) for number in range(100)))
    store.flush()
    put(store, 1, *(message(number) for number in range(100, 120)))
    yield store, fs
    fs.heal()
    try:
        store.close()
    except StoreError:
        pass  # it was closed for good


def again(tmp_path):
    return opened(tmp_path / "s")


@pytest.mark.parametrize("arrived", [0, 20, 60, 400])
@pytest.mark.parametrize("error", [NO_SPACE, BAD_DISK], ids=["full", "bad"])
def test_a_failed_append_leaves_nothing(broken, tmp_path, arrived, error):
    store, fs = broken
    fs.torn["data"] = arrived, error
    kind = StoreFullError if error is NO_SPACE else StoreBrokenError
    for call in (
        lambda: store.put(1, [message(5), message(6)]),
        lambda: store.append_own(OwnEntry(120, 1)),
    ):
        with pytest.raises(kind):
            call()
        assert store.end_index == 119 and len(walk(data_of(store), FILE_SIZE)[0]) == 120
    fs.heal()
    if error is NO_SPACE:
        put(store, 1, message(7))
        assert store.end_index == 120
    else:
        with pytest.raises(StoreBrokenError):
            store.put(1, [message(7)])
        with pytest.raises(StoreError):
            store.close()
        with again(tmp_path) as reopened:
            assert reopened.end_index == 119


def test_a_follower_that_is_full_takes_nothing_and_goes_on_later(broken, tmp_path):
    store, fs = broken
    with opened(tmp_path / "leader") as leader:
        copy_entries(store, leader)
        put(leader, 1, *(message(number) for number in range(50)))
        fs.torn["data"] = 100, NO_SPACE
        with pytest.raises(StoreFullError):
            copy_entries(leader, store)
        assert store.end_index == 119
        fs.heal()
        copy_entries(leader, store)
        assert data_of(leader) == data_of(store)


def test_a_failed_sync_of_the_log_closes_the_store(broken, tmp_path):
    store, fs = broken
    seen = []
    store.on_persisted = seen.append
    fs.fail("sync", "/data/")
    with pytest.raises(StoreBrokenError):
        store.flush()
    assert store.persisted_index == 99 and not seen
    fs.heal()
    with pytest.raises(StoreBrokenError):
        store.flush()
    with pytest.raises(StoreError):
        store.close()
    with again(tmp_path) as reopened:
        assert reopened.end_index >= 99


def test_index_units_that_cannot_be_written_wait_and_are_named(broken):
    store, fs = broken
    put(store, 1, message(5))
    fs.fail("write", "dledger-n1/index", NO_SPACE)
    assert store.flush() == 120
    assert any("index units are not written" in one for one in store.messages.problems)
    assert store.position(120) > store.position(119)
    fs.heal()
    put(store, 1, message(6))
    store.flush()
    assert store.messages.problems == []
    assert store.messages.entries.read_unit(120) is not None


def test_no_vote_is_given_once_the_folder_was_moved_away(broken, tmp_path):
    """The folder was made anew with the vote; the old one, brought back, did not know it."""
    store, _ = broken
    (tmp_path / "s").rename(tmp_path / "away")
    with pytest.raises(StoreMovedError, match="bring the folder back"):
        store.save_hard_state(HardState(2, 3))
    assert not (tmp_path / "s").exists()
    with pytest.raises(StoreError):
        store.close()
    (tmp_path / "away").rename(tmp_path / "s")
    with again(tmp_path) as reopened:
        assert reopened.hard_state == HardState(1, 1)


def test_a_failed_sync_of_the_index_closes_the_store(broken):
    store, fs = broken
    fs.fail("sync", "dledger-n1/index")
    with contextlib.suppress(StoreBrokenError):  # or the store's own thread meets it first
        put(store, 1, message(5))
        store.messages._housekeeping.keep()
    wait_for(lambda: store.messages.broken_reason)
    assert "index" in store.messages.broken_reason
    with pytest.raises(StoreBrokenError):
        store.put(1, [message(1)])


def test_a_full_disk_that_has_no_room_for_a_note_of_the_index_closes_nothing(broken):
    store, fs = broken
    put(store, 1, message(5))
    fs.fail("write", "entries.json", NO_SPACE)
    for _ in range(2):
        with pytest.raises(StoreFullError, match="index"):
            store.messages._housekeeping.keep()
    assert store.messages.broken_reason is None
    fs.heal()
    store.messages._housekeeping.keep()
    assert store.messages.entries.state.now.synced_index == store.end_index + 1


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_full_disk_that_has_no_room_for_a_vote_closes_nothing(broken, call):
    store, fs = broken
    fs.fail(call, "currterm", NO_SPACE)
    with pytest.raises(StoreFullError, match="vote"):
        store.save_hard_state(HardState(4, 2))
    assert store.hard_state == HardState(1, 1)
    fs.heal()
    put(store, 1, message(5))
    store.save_hard_state(HardState(4, 3))
    assert store.hard_state == HardState(4, 3)


@pytest.mark.parametrize("call", ["write", "sync", "rename"])
def test_a_vote_that_cannot_be_saved_closes_the_store(broken, tmp_path, call):
    store, fs = broken
    fs.fail(call, "currterm")
    with pytest.raises(StoreBrokenError, match="vote"):
        store.save_hard_state(HardState(4, 2))
    fs.heal()
    with pytest.raises(StoreBrokenError):
        store.put(4, [message(1)])
    with pytest.raises(StoreError):
        store.close()
    with again(tmp_path) as reopened:
        assert reopened.hard_state in (HardState(1, 1), HardState(4, 2))


def fails_at(broken, at, change):
    """Make a change of the store fail at its call number `at` of the disk; close the store.

    Returns whether the change ended before that, and the calls.
    """
    store, fs = broken
    made = []

    def hook(call, path):
        made.append((call, path))
        if len(made) > at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    fs.hook = hook
    try:
        change(store)
        done = True
    except StoreError:
        done = False
    fs.heal()
    try:
        store.close()
    except StoreError:
        pass
    return done, made


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_a_cut_that_fails_anywhere_is_whole_or_absent_after_a_restart(broken, tmp_path, at):
    done, made = fails_at(broken, at, lambda store: store.truncate(50))
    with again(tmp_path) as reopened:
        assert reopened.end_index in ((49,) if done else (49, 119)), made
        assert len(bodies(reopened.messages)) == reopened.end_index + 1
        no_op(reopened, 2)


@pytest.mark.parametrize("at", range(0, 40, 3))
def test_an_install_that_fails_anywhere_is_whole_or_absent_after_a_restart(broken, tmp_path, at):
    done, made = fails_at(broken, at, lambda store: store.install(500, 4 * FILE_SIZE, 1))
    with again(tmp_path) as reopened:
        state = reopened.log_state()
        found = (state.begin_index, state.end_index)
        assert found in (((500, 499),) if done else ((500, 499), (0, 119))), made
        assert reopened.end_term == 1
        put(reopened, 2, message(1))


def test_a_put_that_a_full_disk_stops_at_a_file_s_end_says_what_is_stored(broken):
    store, fs = broken
    first = store.end_index + 1

    def hook(call, path):
        if call in ("rename", "open") and ("spare" in path or "/data/" in path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    records = [message(number, size=1000) for number in range(100)]
    fs.hook = hook
    outcome = store.put(1, [b"".join(records)])
    stored = [one for one in outcome.results[0] if one.status is Status.PUT_OK]
    assert 0 < len(stored) < 100 and outcome.count == len(stored)
    assert outcome.first_index == first and store.end_index == first + len(stored) - 1
    assert all(
        one.status is Status.SERVICE_NOT_AVAILABLE for one in outcome.results[0][len(stored) :]
    )


def test_a_dropped_log_makes_room_also_on_a_full_disk(broken):
    """Housekeeping has small files to write, which fails: the room that they need is in there."""
    store, fs = broken
    store.commit(store.end_index)
    messages = store.messages
    assert messages._housekeeping.stop()
    store.install(1000, 4 * FILE_SIZE, 1)
    dropped = f"{messages.config.root}/hastore/dropped"
    assert os.listdir(dropped)

    def is_full(call, path):
        if call in ("write", "rename") and dropped not in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    put(store, 2, message(1))
    store.commit(store.end_index)
    store.flush()
    fs.hook = is_full
    with pytest.raises((OSError, StoreError)):
        messages._housekeeping.keep()
    assert not os.listdir(dropped)


def test_a_folder_of_dropped_logs_that_cannot_be_read_holds_up_nothing_else(broken):
    """It is a problem of its own: the rest of housekeeping goes on."""
    store, _ = broken
    messages = store.messages
    assert messages._housekeeping.stop()
    path = f"{messages.config.root}/hastore/dropped"
    with open(path, "wb"):
        pass
    messages._housekeeping.keep()
    assert messages.entries.state.now.synced_index == 120
    assert any(path in one for one in messages.problems)
    os.remove(path)
    messages._housekeeping.keep()
    assert messages.problems == []


def test_a_start_that_cannot_note_what_is_missing_names_the_store_and_what_helps(broken):
    store, fs = broken
    root = store.messages.config.root
    store.close()
    os.remove(f"{root}/hastore/entries.json")
    fs.fail("rename", "votes.json", OSError(errno.EROFS, os.strerror(errno.EROFS)))
    with pytest.raises(StoreError, match=f"{root}: the store cannot be opened.*mount it anew"):
        make(root, fs=fs).open()
