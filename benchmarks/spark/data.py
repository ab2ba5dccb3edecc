"""The same messages for all systems: in a store of hastore, in a topic of Kafka, in Parquet.

Bodies are random bytes from a seed, so they do not compress, and every system gets the same.
"""

import dataclasses
import pathlib
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common import MIB, say
from hastore.config.model import StoreConfig
from hastore.record.codec import Host, build_record
from hastore.store.message_store import MessageStore

TOPIC = "rows"
QUEUES = 4
FILE_BYTES = 256 * MIB
AT_ONCE = 500  # messages built and stored together
REPLAY_S = 300.0
PRODUCER = "77"


@dataclasses.dataclass(frozen=True, slots=True)
class Messages:
    """`count` messages with random bodies of `body_bytes`, in QUEUES queues in turn."""

    count: int
    body_bytes: int
    seed: int = 11

    def __iter__(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield (queue, key, body) of each message."""
        source, size = np.random.default_rng(self.seed), self.body_bytes
        for first in range(0, self.count, AT_ONCE):
            many = min(AT_ONCE, self.count - first)
            bodies = source.bytes(many * size)
            for place in range(many):
                number = first + place
                body = bodies[place * size : (place + 1) * size]
                yield number % QUEUES, b"flight-%d" % number, body

    def digest(self) -> tuple[int, int, int]:
        """Return what `spark.digest` returns for the same rows: count, bytes, sum of CRCs."""
        crcs = sum(zlib.crc32(body) for _, _, body in self)
        return self.count, self.count * self.body_bytes, crcs

    def log_bytes(self) -> int:
        """Return about how many bytes the messages take in a log."""
        return self.count * (self.body_bytes + 160) + FILE_BYTES


def write_store(root: pathlib.Path, messages: Messages) -> int:
    """Write a store by its own append, in this process, and close it; return its end offset.

    The records have the properties that hastore's producers set.
    """
    host, now_ms = Host.parse("127.0.0.1:10911"), time.time_ns() // 1_000_000
    store = MessageStore(
        StoreConfig(root=str(root), commitlog_file_size=FILE_BYTES), store_host=host
    )
    store.open()
    try:
        payload: list[bytes] = []
        for number, (queue, key, body) in enumerate(messages):
            record = build_record(
                TOPIC,
                body,
                queue_id=queue,
                properties=(
                    ("KEYS", key.decode()),
                    ("HS_PID", PRODUCER),
                    ("HS_SEQ", str(number)),
                ),
                born_timestamp_ms=now_ms,
                born_host=host,
            )
            payload.append(record)
            if len(payload) == AT_ONCE or number + 1 == messages.count:
                _check(store.put_encoded([b"".join(payload)])[0])
                payload.clear()
        if not store.wait_dispatched(store.max_offset, REPLAY_S):
            raise TimeoutError(f"replay did not reach the log's end within {REPLAY_S:g} s")
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        return store.max_offset
    finally:
        store.close()


def _check(results: Any) -> None:
    for one in results:
        if one.status.name != "PUT_OK":
            raise RuntimeError(f"the store refused a message: {one}")


def write_parquet(spark: Any, root: pathlib.Path, path: pathlib.Path) -> int:
    """Write the seven columns of a store to Parquet by Spark; return the bytes of the files."""
    rows = spark.read.format("hastore").option("path", str(root)).option("subscribe", TOPIC)
    rows.load().write.mode("overwrite").parquet(str(path))
    size = sum(file.stat().st_size for file in path.glob("*.parquet"))
    say(f"spark: {size / MIB:,.0f} MiB of Parquet")
    return size
