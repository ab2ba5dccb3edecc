"""A sync that failed: the pages may be lost though the next sync says success, also to a restart.

Each test ends with a power loss, after which only what was really written is there.
"""

from typing import Any

import pytest

from hastore.dledger.core.events import HardState
from hastore.errors import StoreBrokenError, StoreError
from hastore.store import log_store
from hastore.store.log import recovery
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore
from hastore.store.state.limits import LimitsPage, read_limits
from tests.dledger.store import kit as entries
from tests.store.kernel import KernelFileSystem
from tests.store.kit import FILE_SIZE, HOST, bodies, config, message, put

ROOT = "/store"


class Classic:
    """A store of mode classic, over a file system that outlives it."""

    log = f"{ROOT}/commitlog/"

    def __init__(self, fs: KernelFileSystem) -> None:
        self.store = self.messages = MessageStore(config(ROOT), fs=fs, store_host=HOST)
        self.store.open()

    def put(self, *numbers: int, size: int = 1000) -> None:
        for number in numbers:
            put(self.messages, message(number, size=size))


class Ledger:
    """A store of mode dledger."""

    log = f"{ROOT}/dledger-n1/data/"

    def __init__(self, fs: KernelFileSystem) -> None:
        self.store = entries.make(ROOT, fs=fs)
        self.store.open()
        self.messages: LogStore = self.store.messages

    def put(self, *numbers: int, size: int = 1000) -> None:
        for number in numbers:
            entries.put(self.store, 1, message(number, size=size))


def break_sync(node: Classic | Ledger, fs: KernelFileSystem) -> None:
    """Let a sync of the log fail, as if its disk were bad for a moment; this ends the store."""
    fs.failing = {node.log}
    with pytest.raises(StoreBrokenError):
        node.store.flush()
    end_broken(node.store)
    fs.heal()


both = pytest.mark.parametrize("node", [Classic, Ledger])


@pytest.fixture(autouse=True)
def _no_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no sync of its own come between those of a test."""
    monkeypatch.setattr(log_store, "HOUSEKEEPING_S", 3600.0)


def end_broken(store: Any) -> None:
    """Close a store that is closed for good; the process ends, the page cache stays."""
    with pytest.raises(StoreBrokenError):
        store.close()


@both
@pytest.mark.parametrize("count", [3, 150])
def test_what_a_restart_calls_synced_is_there_after_a_power_loss(node: Any, count: int) -> None:
    fs = KernelFileSystem()
    first = node(fs)
    first.put(*range(5))
    first.store.flush()
    first.put(*range(5, 5 + count))
    break_sync(first, fs)
    again = node(fs)
    assert len(bodies(again.messages)) == 5 + count
    assert again.messages.flushed_offset == again.messages.max_offset
    again.store.close()
    last = node(fs.after_power_loss())
    assert len(bodies(last.messages)) == 5 + count
    last.store.close()


@both
def test_the_rewriting_is_done_in_pieces_and_only_above_what_was_synced(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = 8192
    monkeypatch.setattr(recovery, "_WINDOW_BYTES", piece)
    fs = KernelFileSystem()
    first = node(fs)
    first.put(*range(20))
    flushed = first.store.flush() and first.messages.flushed_offset
    first.put(*range(20, 150))
    break_sync(first, fs)
    end = first.messages.max_offset
    fs.writes.clear()
    again = node(fs)
    written = [(path, at, size) for path, at, size in fs.writes if path.startswith(node.log)]
    kept = [(path, at, size) for path, at, size in written if int(path[-20:]) + at < end]
    assert all(size <= piece for _, _, size in kept)
    assert min(int(path[-20:]) + at for path, at, _ in kept) == flushed
    assert sum(size for _, _, size in kept) <= end - flushed
    again.store.close()


@both
def test_a_kill_after_a_failed_sync_and_damage_below_refuses_and_changes_nothing(
    node: Any,
) -> None:
    fs = KernelFileSystem()
    first = node(fs)
    first.put(*range(5))
    first.store.flush()
    first.put(*range(5, 9))
    break_sync(first, fs)
    file = fs.open(f"{node.log}{0:020d}")
    file.pwrite(b"rot", 700)
    file.close()
    fs.writes.clear()
    with pytest.raises(StoreBrokenError, match="were synced"):
        node(fs)
    assert [path for path, _, _ in fs.writes if path.startswith(node.log)] == []


@both
def test_a_sync_that_fails_again_while_the_store_is_opened_refuses_it(node: Any) -> None:
    fs = KernelFileSystem()
    first = node(fs)
    first.put(*range(5))
    fs.failing = {node.log}
    with pytest.raises(StoreBrokenError):
        first.store.flush()
    end_broken(first.store)
    for _ in range(3):
        with pytest.raises(StoreError, match="cannot be opened"):
            node(fs)
    fs.heal()
    again = node(fs)
    assert again.messages.flushed_offset == again.messages.max_offset
    again.store.close()
    last = node(fs.after_power_loss())
    assert len(bodies(last.messages)) == 5
    last.store.close()


@both
def test_a_page_that_the_kernel_dropped_below_the_usual_start_of_the_scan_is_noticed(
    node: Any,
) -> None:
    """The disk was unmounted, or the memory was needed: the page is read from the disk again."""
    fs = KernelFileSystem()
    first = node(fs)
    size = len(message(10, size=1000)) + first.messages.log.form.lead
    first.put(*range(10, 15))
    first.store.flush()
    first.put(*range(15, 40))
    break_sync(first, fs)
    begin_recovery_at(fs, 20 * size)
    file = fs.open(f"{node.log}{0:020d}")
    file.pwrite(bytes(size), 8 * size)
    file.close()
    again = node(fs)
    assert len(bodies(again.messages)) == 8
    assert again.messages.flushed_offset == again.messages.max_offset == 8 * size
    again.store.close()


def test_a_page_that_the_kernel_dropped_before_whole_records_is_told() -> None:
    """The node has acknowledged them as written: it must not count as one that has them."""
    fs, doubted = KernelFileSystem(), list[int]()
    first = Classic(fs)
    size = len(message(10, size=1000))
    first.put(*range(10, 15))
    first.store.flush()
    first.put(*range(15, 40))
    break_sync(first, fs)
    file = fs.open(f"{first.log}{0:020d}")
    file.pwrite(bytes(size), 8 * size)
    file.close()
    again = MessageStore(config(ROOT), fs=fs, store_host=HOST)
    again.open(on_doubt=doubted.append)
    assert doubted == [again.max_offset] == [8 * size]
    again.close()


@both
def test_a_name_whose_sync_failed_is_written_again(node: Any) -> None:
    """The log's first file: its folder could not be synced, and the next sync has nothing to do."""
    fs = KernelFileSystem()
    first = node(fs)
    first.put(*range(3))
    fs.failing_dirs = {node.log.rstrip("/")}
    with pytest.raises(StoreBrokenError):
        first.store.flush()
    end_broken(first.store)
    fs.heal()
    again = node(fs)
    assert len(bodies(again.messages)) == 3
    again.store.close()
    last = node(fs.after_power_loss())
    assert len(bodies(last.messages)) == 3
    last.store.close()


@both
def test_a_blank_that_begins_a_page_is_written_again(node: Any) -> None:
    fs, page = KernelFileSystem(), 4096
    first = node(fs)
    first.put(0)
    lead = first.messages.log.form.lead
    first.store.flush()
    while first.messages.max_offset < FILE_SIZE - 3 * page:
        first.put(1)
    head = len(message(1, size=1000)) - 1000
    first.put(1, size=FILE_SIZE - page - first.messages.max_offset - lead - head)
    assert first.messages.max_offset == FILE_SIZE - page
    first.put(2, size=5000)
    break_sync(first, fs)
    again = node(fs)
    wanted = bodies(again.messages)
    again.store.close()
    last = node(fs.after_power_loss())
    assert bodies(last.messages) == wanted
    last.store.close()


def test_replay_progress_that_a_cut_lowered_without_a_sync_is_lowered_durably() -> None:
    """Units of records that were cut must not count for those that came in their place."""
    fs = KernelFileSystem()
    first = Classic(fs)
    first.put(*range(20))
    first.store.flush()
    assert len(bodies(first.store)) == 20
    first.store._keep()
    fs.failing = {"/hastore/replay"}
    with pytest.raises(StoreBrokenError, match="cut"):
        first.store.truncate(first.store.max_offset // 2)
    end_broken(first.store)
    fs.heal()
    again = Classic(fs)
    assert len(bodies(again.store)) == 10
    again.put(*range(50, 70), size=700)
    again.store.flush()
    wanted = bodies(again.store)
    last = Classic(fs.after_power_loss())
    assert bodies(last.store) == wanted
    again.store.close()
    last.store.close()


def test_index_units_whose_sync_failed_are_written_again() -> None:
    fs = KernelFileSystem()
    first = Ledger(fs)
    first.put(*range(3))
    first.messages._keep()
    first.put(*range(3, 400), size=100)
    first.store.flush()
    fs.failing = {"/dledger-n1/index/"}
    with pytest.raises(StoreBrokenError, match="index of entries"):
        first.messages._keep()
    end_broken(first.store)
    fs.heal()
    # A restart that scans only the end of the log takes the units before it from the index files.
    begin_recovery_at(fs, first.store.position(390))
    again = Ledger(fs)
    again.messages._keep()
    lost = fs.after_power_loss()
    units = entries.folder_bytes(f"{ROOT}/dledger-n1/index", lost)
    _, wanted = entries.walk(entries.folder_bytes(f"{ROOT}/dledger-n1/data", lost), FILE_SIZE)
    assert units.rstrip(b"\0") == wanted.rstrip(b"\0")
    again.store.close()


def begin_recovery_at(fs: KernelFileSystem, offset: int) -> None:
    """Let the next recovery in this boot begin at the entry at `offset`, as in a long log."""
    found = read_limits(fs, ROOT)
    assert found is not None
    page = LimitsPage(fs, ROOT)
    page.open(found._replace(recovery_start=offset, next_recovery_start=offset))
    page.close()


SMALL = ("currterm", "votes.json", "entries.json", "idempotence", "abort")


def test_all_small_files_are_on_the_disk_after_a_start() -> None:
    """Their folders could not be synced: after a power loss the old ones would be back."""
    fs = KernelFileSystem()
    first = Ledger(fs)
    first.put(*range(50))
    first.store.save_hard_state(HardState(2, 1), remembers=True)
    first.store.flush()
    first.messages._window.save()
    first.messages._keep()
    fs.failing_dirs = {f"{ROOT}/hastore", f"{ROOT}/dledger-n1"}
    with pytest.raises(StoreBrokenError):
        first.store.save_hard_state(HardState(3, 2))
    end_broken(first.store)
    fs.heal()
    again = Ledger(fs)
    assert again.store.hard_state == HardState(3, 2, True)
    again.store.save_hard_state(HardState(3, 2))  # the same vote again: nothing is written
    found = {path: fs.read_bytes(path) for path in fs.paths() if path.rsplit("/")[-1] in SMALL}
    assert len(found) == len(SMALL)
    lost = fs.after_power_loss()
    assert {path: lost.read_bytes(path) for path in found if lost.exists(path)} == found
    limits = read_limits(lost, ROOT)
    assert limits is not None and limits.flushed_offset == again.messages.flushed_offset
    again.store.close()
