"""A whole store of a DLedger node with damaged files: it opens, or says why not.

It knows when it has lost what it voted or acknowledged.
"""

from __future__ import annotations

import functools
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Flush
from hastore.dledger.core.events import HardState, OwnEntry
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore, EntryStore
from hastore.errors import StoreError
from hastore.fs.memory import MemoryFileSystem
from hastore.record.log_format import read_header
from hastore.store.entry_message_store import EntryMessageStore
from hastore.store.log import entry_index, entry_loader
from tests.fuzz import kit
from tests.fuzz.changed_files import (
    KILLED,
    REMOVE,
    ROOT,
    TRUNCATE,
    WRITE,
    Files,
    change,
    files_of,
    flushed_offset,
    laid,
    repaired,
)
from tests.store.kit import HOST, config, message

__all__ = ["repaired"]  # of the kit's

REACHES = (
    EntryStore.open, EntryStore._load_files, EntryMessageStore.open,
    EntryMessageStore.missing_files, HardStateFiles.load, entry_loader.load_entries,
    entry_index.EntryIndex.unit,
)  # fmt: skip
LEAST = kit.Least(0.3, 2)
RUNS = 15  # of `make test`: each opens a store
MEMORY_BYTES = 64 * 1024 * 1024
SIZES: dict[str, Any] = {
    "commitlog_file_size": 8_192, "consume_queue_units": 20, "index_slots": 10, "index_entries": 40,
    "flush": Flush.SYNC, "flush_interval_ms": 3_600_000,
}  # fmt: skip
NODE = f"{ROOT}/dledger-n1"


def _open(fs: MemoryFileSystem, failures: list[BaseException]) -> DLedgerMmapFileStore:
    store = DLedgerMmapFileStore(
        config(ROOT, **SIZES), node=1, index_file_bytes=1_024, fs=fs, clock=SYSTEM_CLOCK,
        store_host=HOST, on_failure=lambda _name, failure: failures.append(failure),
    )  # fmt: skip
    store.open()
    return store


@functools.cache
def template() -> Files:
    """Return the files of a node that was closed cleanly: entries of two terms in three files."""
    fs, failures = MemoryFileSystem(), list[BaseException]()
    store = _open(fs, failures)
    for term in (3, 4):
        store.save_hard_state(HardState(term, 1), remembers=True)
        store.append_own(OwnEntry(store.end_index + 1, term))
        for number in range(25):
            store.put(term, [message(number, size=200)])
    store.flush()
    store.commit(store.end_index)
    store.close()
    assert not failures
    return files_of(fs)


def _change(kind: int, path: str, at: int = 0, data: bytes = b"") -> bytes:
    return change(template(), kind, path, at, data)


def seeds() -> list[bytes]:
    """Return changes of one or several files of the node."""
    paths = list(template())
    logs = [path for path in paths if "/data/" in path]
    index = next(path for path in paths if path.startswith(f"{NODE}/index/"))
    small = [path for path in paths if "/data/" not in path and "/consumequeue/" not in path]
    crash = _change(KILLED, logs[0])
    return [
        b"",
        crash,
        *(_change(REMOVE, path) for path in small),
        *(crash + _change(TRUNCATE, path, 30) for path in small),
        *(_change(WRITE, path, 12, b"\xff") for path in (*small, *logs)),
        crash + _change(WRITE, logs[-1], 900, bytes(9)),
        _change(REMOVE, logs[1]),
        _change(REMOVE, logs[-1]),
        _change(WRITE, index, 70, b"\x7f"),
        _change(REMOVE, f"{NODE}/currterm") + _change(REMOVE, f"{ROOT}/hastore/votes.json"),
    ]


def one(data: bytes) -> None:
    """Open the store, read each entry, put one, close it, and open it again."""
    fs, failures = laid(template(), data), list[BaseException]()
    flushed = flushed_offset(fs)
    whole = all(fs.exists(path) for path in (f"{NODE}/currterm", f"{ROOT}/hastore/limits"))
    with kit.documented(StoreError):
        store = _open(fs, failures)
    end = store.end_index
    try:
        assert flushed <= store.messages.max_offset, "what was synced is cut"
        assert store.hard_state.term >= store.end_term
        if fs.exists(f"{ROOT}/hastore/votes.json"):
            assert whole or not store.remembers, "a node that lost a file counts as if it had not"
        _read(store)
        term = store.hard_state.term + 1
        try:
            store.save_hard_state(HardState(term, 1))
            store.append_own(OwnEntry(end + 1, term))
        except (StoreError, OSError):
            pass
    finally:
        store.close()
    assert all(isinstance(failure, StoreError | OSError) for failure in failures), failures
    try:
        again = _open(fs, failures)
    except StoreError:
        return
    assert again.end_index >= end
    again.close()


def _read(store: DLedgerMmapFileStore) -> None:
    """Read each entry: its index, its term and its place are those that the index says."""
    index, end, before = store.begin_index, store.end_index, store.term_of(store.begin_index - 1)
    while index <= end:
        pos, stop = store.position(index), store.end_position(index)
        with store.messages.view(pos, stop - pos) as view:
            raw = bytes(view)
        header = read_header(raw, 0, len(raw), pos)
        assert header is not None and (header.index, header.size) == (index, stop - pos)
        assert before <= header.term == store.term_of(index)
        before = header.term
        index += 1
