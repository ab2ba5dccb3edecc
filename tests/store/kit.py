"""Stores for tests: small files, and copies as a crash would leave them."""

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hastore.config.model import Flush, StoreConfig
from hastore.errors import Status
from hastore.record.codec import Host, Record, build_record, encode_record
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore, PutResult

HOST = Host.parse("127.0.0.1:10911")
BORN = Host.parse("10.0.0.7:4242")
FILE_SIZE = 64 * 1024


def config(root: object, **changes: Any) -> StoreConfig:
    """A configuration with small files; no sync by interval happens within a test."""
    settings: dict[str, Any] = {
        "commitlog_file_size": FILE_SIZE,
        "flush": Flush.ASYNC,
        "flush_interval_ms": 3_600_000,
        "consume_queue_units": 300,
        "index_slots": 100,
        "index_entries": 400,
    }
    return StoreConfig(root=str(root), **(settings | changes))


def message(
    number: int,
    *,
    topic: str = "TopicA",
    queue_id: int = 0,
    size: int = 100,
    producer: str | None = None,
    **more: Any,
) -> bytes:
    """The record of message `number`, as a producer encodes it."""
    properties = [("KEYS", f"key{number}")]
    if producer is not None:
        properties += [("HS_PID", producer), ("HS_SEQ", str(number))]
    body = (b"%08d" % number) * (size // 8 + 1)
    return build_record(
        topic,
        body[:size],
        queue_id=queue_id,
        properties=more.pop("properties", properties),
        born_timestamp_ms=1_700_000_000_000 + number,
        born_host=more.pop("born_host", BORN),
        **more,
    )


def inner_batch(base: int, count: int, offset: int) -> bytes:
    """Return a record that RocketMQ wrote for `count` messages from queue offset `base` on."""
    body = b"%d messages" % count
    return encode_record(
        Record(
            body,
            "Batches",
            properties=b"INNER_BASE\x01%d\x02INNER_NUM\x01%d\x02" % (base, count),
            sys_flag=FLAG_INNER_BATCH,
            queue_offset=base,
            physical_offset=offset,
            body_crc=zlib.crc32(body) & 0x7FFFFFFF,
            store_timestamp_ms=1,
        )
    )


def put(store: MessageStore, *records: bytes) -> list[PutResult]:
    """Put each record as its own payload; all must be stored."""
    results = [result for payload in store.put_encoded(records) for result in payload]
    assert all(result.status is Status.PUT_OK for result in results), results
    return results


@contextmanager
def opened(root: object, **changes: Any) -> Iterator[MessageStore]:
    """An open store; it is closed cleanly at the end unless the test closed it."""
    store = MessageStore(config(root, **changes), store_host=HOST)
    store.open()
    try:
        yield store
    finally:
        store.close()


def crash_copy(store: LogStore, target: object) -> str:
    """Copy a running store as kill -9 would leave it: every written byte, and `abort`.

    A kill stops all files at one moment. So replay, appends and syncs wait meanwhile: otherwise the
    copy might say of its queues what only became true after they were copied.
    """
    with store.replay.paused(), store.log.lock, store.flush_service.sync_lock:
        for _ in range(100):
            try:
                shutil.copytree(store.config.root, str(target))
            except shutil.Error as failure:
                # The store renamed or removed a file between the listing and the copy.
                if any("No such file" not in str(why) for _, _, why in failure.args[0]):
                    raise
                shutil.rmtree(str(target))
            else:
                return str(target)
    raise AssertionError(f"{store.config.root} never stood still")


def log_file(root: object, start: int = 0) -> str:
    return os.path.join(str(root), "commitlog", f"{start:020d}")


def read_log(root: object) -> bytes:
    """All commit log bytes, in order."""
    directory = os.path.join(str(root), "commitlog")
    data = b""
    for name in sorted(os.listdir(directory)):
        with open(os.path.join(directory, name), "rb") as file:
            data += file.read()
    return data


def log_has(files: Mapping[int, bytes], offset: int, data: bytes, file_size: int) -> bool:
    """Whether files of a log, by the offsets at which they begin, have `data` at `offset`.

    What a shorter file lacks, or is in no file, are zeros.
    """
    first = offset - offset % file_size
    starts = range(first, offset + len(data), file_size)
    found = b"".join([files.get(at, b"").ljust(file_size, b"\0") for at in starts])
    return found[offset - first :].startswith(data)


def scribble(path: str, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def bodies(store: MessageStore, topic: str = "TopicA", queue_id: int = 0) -> list[bytes]:
    """The bodies in a queue, read through replay."""
    from hastore.record.codec import decode_record

    assert store.wait_dispatched(store.whole_offset, 60), store.problems
    known = store.queues.queue_range(topic, queue_id)
    if known is None:
        return []
    found, position = [], known[0]
    while position < known[1]:
        result = store.reader.pull(
            topic,
            queue_id,
            position,
            max_messages=1000,
            max_bytes=1 << 20,
            limit_offset=store.max_offset,
        )
        at = 0
        while at < len(result.records):
            record = decode_record(result.records, at)
            found.append(record.body)
            at += record.size
        if not result.count:
            break
        position = result.next_queue_offset
    return found


def fill_up(place: Path) -> Path:
    """Take all the room on the disk."""
    ballast = place / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                break
    return ballast
