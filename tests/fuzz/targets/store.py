"""A whole store with damaged files: it opens or says why not, and serves no damaged record."""

from __future__ import annotations

import functools
import time
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Flush
from hastore.errors import CorruptRecordError, StoreError, UsageError
from hastore.fs.memory import MemoryFileSystem
from hastore.record.codec import check_record, decode_record
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.store.derived import consume_queue, index_file
from hastore.store.log_store import LogStore
from hastore.store.message_reader import MessageReader
from hastore.store.message_store import MessageStore
from hastore.store.replay import IndexBuildService
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
    LogStore._recover, LogStore._adopt, MessageReader.pull, index_file.IndexFile.walk,
    consume_queue.ConsumeQueueTable.load, IndexBuildService.load,
)  # fmt: skip
LEAST = kit.Least(0.3, 1)
RUNS = 15  # of `make test`: each opens a store
MEMORY_BYTES = 64 * 1024 * 1024
SIZES: dict[str, Any] = {
    "commitlog_file_size": 8_192, "consume_queue_units": 20, "index_slots": 10, "index_entries": 40,
    "flush": Flush.ASYNC, "flush_interval_ms": 3_600_000,
}  # fmt: skip
WAIT_S = 60.0  # only a replay that hangs takes longer


def _open(fs: MemoryFileSystem, failures: list[BaseException]) -> MessageStore:
    store = MessageStore(
        config(ROOT, **SIZES), fs=fs, clock=SYSTEM_CLOCK, store_host=HOST,
        on_failure=lambda _name, failure: failures.append(failure),
    )  # fmt: skip
    store.open(known=True)
    return store


@functools.cache
def template() -> Files:
    """Return the files of a store that was closed cleanly: 3 log files, 2 topics, keys."""
    fs, failures = MemoryFileSystem(), list[BaseException]()
    store = _open(fs, failures)
    store.put_encoded([build_change(TopicChange(TopicConfig("TopicB", 4, 4)), 5)])
    for number in range(60):
        topic = ("TopicA", "TopicB")[number % 5 == 4]
        store.put_encoded(
            [message(number, topic=topic, queue_id=number % 2, size=200, producer="p")]
        )
    assert store.wait_dispatched(store.max_offset, WAIT_S) and not failures
    store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
    store.close()
    return files_of(fs)


def _change(kind: int, path: str, at: int = 0, data: bytes = b"") -> bytes:
    return change(template(), kind, path, at, data)


def seeds() -> list[bytes]:
    """Return changes of one or several files of the store."""
    paths = list(template())
    logs = [path for path in paths if "/commitlog/" in path]
    queue = next(path for path in paths if "/consumequeue/TopicA/" in path)
    index = next(path for path in paths if "/index/" in path)
    limits, node = f"{ROOT}/hastore/limits", [path for path in paths if "/hastore/" in path]
    crash = _change(KILLED, logs[0])
    return [
        b"",
        crash,
        _change(WRITE, logs[0], 300, b"\xff"),
        crash + _change(WRITE, logs[-1], 900, bytes(9)),
        _change(WRITE, queue, 25, b"\x7f"),
        _change(WRITE, queue, 8, b"\0\0\xff\xff"),
        _change(TRUNCATE, queue, 100),
        _change(REMOVE, queue),
        _change(WRITE, index, 36, b"\0\0\0\x09"),
        _change(WRITE, index, 41, b"\xff" * 20),
        _change(REMOVE, index),
        _change(TRUNCATE, index, 70),
        _change(REMOVE, logs[1]),
        _change(TRUNCATE, logs[-1], 700),
        *(_change(REMOVE, path) for path in node),
        *(crash + _change(WRITE, path, 20, b"\xff") for path in node),
        _change(WRITE, limits, 0, bytes(100)) + _change(WRITE, limits, 2_048, bytes(100)),
        crash + _change(REMOVE, f"{ROOT}/hastore/replay") + _change(WRITE, logs[1], 20, b"\0\0\1"),
        _change(WRITE, f"{ROOT}/checkpoint", 0, b"\x7f" * 8),
        _change(WRITE, logs[0], 84, b"\0\0\1\0"),
    ]


def one(data: bytes) -> None:
    """Open the store, read all of it, put a message, close it, and open it again."""
    fs, failures = laid(template(), data), list[BaseException]()
    flushed = flushed_offset(fs)
    with kit.documented(StoreError):
        store = _open(fs, failures)
    try:
        assert flushed <= store.max_offset, "what was synced is never cut in silence"
        _replayed(store)
        _read_all(store)
        try:
            for results in store.put_encoded([message(9_999)]):
                assert all(result.status for result in results)
        except StoreError:
            pass
    finally:
        store.close()
    known = [failure for failure in failures if not isinstance(failure, StoreError | OSError)]
    assert not known, known
    try:
        again = _open(fs, failures)
    except StoreError:
        return
    assert again.max_offset >= store.max_offset
    again.close()


def _replayed(store: MessageStore) -> None:
    """Wait until replay has read the log, or says why it cannot."""
    until = time.monotonic() + WAIT_S
    while not store.wait_dispatched(store.whole_offset, 0.02) and not store.replay_problem:
        assert time.monotonic() < until, "replay neither goes on nor says why"


def _read_all(store: MessageStore) -> None:
    """Pull each queue, and search keys: each record that is served is valid, and of its queue."""
    for topic, queues in store.queues.topics().items():
        for queue_id, (low, high) in queues.items():
            at = low
            while at < high:
                try:
                    found = store.reader.pull(
                        topic, queue_id, at,
                        max_messages=32, max_bytes=1 << 16, limit_offset=store.max_offset,
                    )  # fmt: skip
                except (CorruptRecordError, StoreError, OSError):
                    break
                _check_served(found.records, topic, queue_id)
                if found.next_queue_offset <= at:
                    break
                at = found.next_queue_offset
    for number in range(0, 60, 7):
        try:
            offsets = store.reader.query_key("TopicA", f"key{number}", max_messages=9)
            for offset in offsets:
                store.reader.record_at(offset)
        except (StoreError, UsageError, OSError):
            continue


def _check_served(records: bytes, topic: str, queue_id: int) -> None:
    at = 0
    while at < len(records):
        physical = int.from_bytes(records[at + 28 : at + 36], signed=True)
        size = check_record(records, at, len(records), physical)
        assert size, f"a record that is not valid was served of {topic}/{queue_id}"
        decode_record(records, at)
        at += size
