"""The CPU time a row of one Spark task that reads a store's directory, without Spark.

    python -m benchmarks.profile_spark [--repeats 5] [--scale 1] [--dir FOLDER] [--messages N]

The store is written here, with one topic of four queues in turn. One process reads the queues one
after the other into Arrow batches: the seven columns of a read without a schema, and `value` alone.
Each is read with and without the CRCs of the bodies, in turn, after a round to warm up. CPU time is
that of the process, user and kernel, so a busy machine disturbs it less than a rate.
"""

import functools
import itertools
import os
import pathlib
import shutil
import statistics
import struct
import time
import zlib
from collections.abc import Callable

from pyspark.sql.types import StructField, StructType

from benchmarks.common import arguments, figure, save, say, scratch
from hastore.fs.filesystem import REAL
from hastore.record.codec import Host, Record, encode_record, pack_blank
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import COLUMN_TYPES, Column, project, source_schema
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read.stores import PathBackend
from hastore.store.state.limits import Limits, LimitsPage

TOPIC = "flights"
QUEUES = 4
FILE_BYTES = 256 * 1024 * 1024
BODIES = (200, 1024)
PROPERTIES = "KEYS\x01flight-{0}\x02HS_PID\x0177\x02HS_SEQ\x01{0}\x02"
PROJECTIONS = {
    "7 columns": project(source_schema(include_headers=False, include_metadata=False)),
    "value only": project(StructType([StructField("value", COLUMN_TYPES[Column.VALUE])])),
}


def write_store(root: pathlib.Path, messages: int, body_bytes: int) -> int:
    """Write a store with random bodies, its consume queues and its limits page; return its end."""
    units: list[list[bytes]] = [[] for _ in range(QUEUES)]
    (root / "commitlog").mkdir(parents=True)
    host, offset, data = Host(b"\x7f\0\0\1", 10911), 0, bytearray()
    for number in range(messages):
        body = os.urandom(body_bytes)
        for _ in range(2):
            record = Record(
                body=body,
                topic=TOPIC,
                queue_id=number % QUEUES,
                queue_offset=number // QUEUES,
                physical_offset=offset,
                properties=PROPERTIES.format(number).encode(),
                body_crc=zlib.crc32(body) & 0x7FFFFFFF,
                born_timestamp_ms=1_700_000_000_000 + number,
                store_timestamp_ms=1_700_000_000_001 + number,
                born_host=host,
                store_host=host,
            )
            raw = encode_record(record)
            left = FILE_BYTES - offset % FILE_BYTES
            if len(raw) + 8 <= left:
                break
            data += pack_blank(left).ljust(left, b"\0")
            offset += left
        data += raw
        units[number % QUEUES].append(struct.pack(">qiq", offset, len(raw), 0))
        offset += len(raw)
    for number in range(-(-offset // FILE_BYTES)):
        part = data[number * FILE_BYTES : (number + 1) * FILE_BYTES]
        with open(root / "commitlog" / f"{number * FILE_BYTES:020}", "wb") as file:
            file.write(part)
            file.truncate(FILE_BYTES)
    for queue_id, column in enumerate(units):
        folder = root / "consumequeue" / TOPIC / str(queue_id)
        folder.mkdir(parents=True)
        (folder / f"{0:020}").write_bytes(b"".join(column))
    (root / "hastore").mkdir()
    page = LimitsPage(REAL, str(root))
    page.open(Limits(file_size=FILE_BYTES, record_end=offset, readable_offset=offset))
    page.close()
    return offset


def read_all(root: pathlib.Path, spans: list[QueueRange], builder: BatchBuilder) -> int:
    """Read the ranges into batches; return the number of rows."""
    with PathBackend(str(root), fail_on_data_loss=True) as backend:
        return sum(batch.num_rows for span in spans for batch in backend.read_queue(span, builder))


def cpu_us(run: Callable[[], int], messages: int) -> float:
    """Return the CPU microseconds a row; raises SystemExit if rows are missing."""
    before = time.process_time_ns()
    rows = run()
    used = time.process_time_ns() - before
    if rows != messages:
        raise SystemExit(f"read {rows} rows of {messages}")
    return used / 1e3 / messages


def measure(root: pathlib.Path, limit: int, messages: int, repeats: int) -> dict[str, list[float]]:
    """Return the samples of each projection, with and without CRCs."""
    spans = [
        QueueRange(TOPIC, queue, 0, len(range(queue, messages, QUEUES)), limit)
        for queue in range(QUEUES)
    ]
    samples: dict[str, list[float]] = {}
    for number in range(repeats + 1):
        for name, check in itertools.product(PROJECTIONS, (True, False)):
            builder = BatchBuilder(PROJECTIONS[name], check_crcs=check)
            used = cpu_us(functools.partial(read_all, root, spans, builder), messages)
            if number:  # the first round warms up
                label = name if check else f"{name}, CRCs not checked"
                samples.setdefault(label, []).append(used)
    return samples


def main() -> None:
    """Run the benchmark."""
    options = arguments(__doc__, messages=200_000)
    messages = max(QUEUES, int(options.messages * options.scale))
    figures = []
    with scratch(options.dir, 2 * messages * (BODIES[-1] + 300) + 2 * FILE_BYTES) as folder:
        for body_bytes in BODIES:
            root = folder / str(body_bytes)
            limit = write_store(root, messages, body_bytes)
            for name, taken in measure(root, limit, messages, options.repeats).items():
                label = f"{name}, {body_bytes} B"
                say(
                    f"{label}: min {min(taken):.3f}, median {statistics.median(taken):.3f} us a row"
                )
                figures.append(figure(label, "us of CPU a row", taken))
            shutil.rmtree(root)
    save("profile_spark", figures, {"messages": messages, "queues": QUEUES})


if __name__ == "__main__":
    main()
