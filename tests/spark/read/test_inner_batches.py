"""RocketMQ's inner batches: a row for each message, from a path and from nodes."""

import random
import struct
import zlib

import pyarrow as pa
import pytest

from hastore.client.consumer.range_reader import Chunk
from hastore.errors import CorruptRecordError, PositionLostError
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.read_positions import read_mark
from hastore.pipeline.where import Where
from hastore.record.codec import Host, Record, encode_record
from hastore.spark.arrow import inner_batches
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import project, source_schema
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read import stores
from hastore.spark.read.servers import ServerBackend
from hastore.spark.read.stores import PathBackend
from hastore.store.derived.consume_queue import BATCH_UNIT, UNIT
from tests.pipeline.test_export_commits import SPARK, run_here

ALL = project(source_schema(include_headers=True, include_metadata=True))
HOST = Host(b"\x7f\0\0\1", 4242)
WRAPPED, ZLIB, ZSTD = 0xC0, 0x301, 0x201
COUNTS = (1, 7, 300, 2, 40)
END = sum(COUNTS)


def pack(body, properties):
    size = 22 + len(body) + len(properties)
    front = struct.pack(">iiiii", size, 0, 0, 5, len(body))
    return front + body + struct.pack(">H", len(properties)) + properties


def batch(first, count, offset, *, flags=WRAPPED, said=None, body=None):
    """A record with the messages first, first + 1, ..."""
    if body is None:
        body = b"".join(
            pack(b"%d" % n, b"KEYS\x01k%d\x02UNIQ_KEY\x01u%d\x02of\x01user\x02" % (n, n))
            for n in range(first, first + count)
        )
    if flags & 0x700 == 0x200:
        body = pa.compress(body, codec="zstd", asbytes=True)
    elif flags & 1:
        body = zlib.compress(body)
    return encode_record(
        Record(
            body=body,
            topic="inner",
            queue_id=3,
            queue_offset=first,
            physical_offset=offset,
            sys_flag=flags,
            properties=b"INNER_BASE\x01%d\x02INNER_NUM\x01%d\x02" % (first, said or count),
            body_crc=zlib.crc32(body) & 0x7FFFFFFF,
            store_timestamp_ms=1_000 * first,
            store_host=HOST,
        )
    )


def records(flags=(WRAPPED, WRAPPED | ZLIB, WRAPPED | ZSTD)):
    found, first, offset = [], 0, 0
    for number, count in enumerate(COUNTS):
        found.append(batch(first, count, offset, flags=flags[number % len(flags)]))
        first += count
        offset += len(found[-1])
    return found


def write(root, raws, *, units=None):
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / f"{0:020}").write_bytes(b"".join(raws).ljust(1 << 20, b"\0"))
    queue = root / "batchconsumequeue" / "inner" / "3"
    queue.mkdir(parents=True)
    data, offset, first = b"", 0, 0
    for raw, count in zip(raws, COUNTS, strict=True):
        data += BATCH_UNIT.pack(offset, len(raw), 0, 0, first, count, -1, 0)
        offset += len(raw)
        first += count
    (queue / f"{0:020}").write_bytes(data[: units and units * BATCH_UNIT.size])
    (root / "consumequeue").mkdir()


def read(root, start, end, *, fail=True):
    with PathBackend(str(root), fail) as backend:
        span = QueueRange("inner", 3, start, end, backend.limit_offset())
        batches = list(backend.read_queue(span, BatchBuilder(ALL)))
    return [row for each in batches for row in each.to_pylist()]


def build(raws, start, end):
    sizes = b"".join(struct.pack(">i", len(raw)) for raw in raws)
    chunk = Chunk(memoryview(b"".join(raws)), sizes, [])
    span = QueueRange("inner", 3, start, end)
    batches = list(ServerBackend(("tcp://a:1",), True)._build(chunk, span, BatchBuilder(ALL)))
    return [row for each in batches for row in each.to_pylist()]


def test_each_message_is_a_row_from_a_path_and_from_nodes(tmp_path):
    raws = records()
    write(tmp_path, raws)
    rows = read(tmp_path, 0, END)
    assert [row["offset"] for row in rows] == list(range(END))
    assert rows == build(raws, 0, END)
    for n, row in enumerate(rows):
        assert (row["value"], row["key"]) == (b"%d" % n, b"k%d" % n)
        assert row["headers"] == [{"key": "of", "value": b"user"}]
        assert row["partition"] == 3 and row["topic"] == "inner"
    firsts = {row["physicalOffset"] for row in rows}
    assert len(firsts) == len(COUNTS)


def test_a_range_may_begin_and_end_inside_a_batch(tmp_path, monkeypatch):
    raws = records()
    write(tmp_path, raws)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        monkeypatch.setattr(stores, "UNITS_AT_ONCE", rng.choice((3, 64, 1000)))
        start = rng.randrange(END)
        end = rng.randrange(start + 1, END + 1)
        for rows in (read(tmp_path, start, end), build(raws, start, end)):
            assert [row["offset"] for row in rows] == list(range(start, end))
            assert [int(row["value"]) for row in rows] == list(range(start, end))


def test_batches_that_consumers_leave_whole_are_one_row(tmp_path):
    raws = records((0x80,))
    write(tmp_path, raws)
    rows = read(tmp_path, 0, END)
    assert [row["offset"] for row in rows] == [0, 1, 8, 308, 310]


def test_single_messages_beside_batches_are_rows(tmp_path):
    """As after a switch from RocketMQ: hastore puts what it is sent into a queue of its own."""
    raws = records()
    write(tmp_path, raws)
    at, units = sum(map(len, raws)), b""
    for n in range(END, END + 3):
        raw = batch(n, 1, at, flags=0, body=b"%d" % n)
        units += UNIT.pack(at, len(raw), 0)
        raws.append(raw)
        at += len(raw)
    log = tmp_path / "commitlog" / f"{0:020}"
    log.write_bytes(b"".join(raws).ljust(1 << 20, b"\0"))
    singles = tmp_path / "consumequeue" / "inner" / "3"
    singles.mkdir(parents=True)
    blanks = UNIT.pack(0, 0x7FFFFFFF, 0) * END
    (singles / f"{0:020}").write_bytes((blanks + units).ljust(20 * 400, b"\0"))
    with PathBackend(str(tmp_path), True) as backend:
        ranges = backend.available({"inner"})
        assert [(one.start, one.end) for one in ranges.values()] == [(0, END + 3)]
        span = QueueRange("inner", 3, 0, END + 3, backend.limit_offset())
        builder = BatchBuilder(ALL)
        rows = [row for each in backend.read_queue(span, builder) for row in each.to_pylist()]
        assert not builder.left_whole
    assert [int(row["value"]) for row in rows] == list(range(END + 3))
    assert rows == build(raws, 0, END + 3)


def test_messages_of_many_bytes_are_read_in_batches_of_a_few(tmp_path, monkeypatch):
    monkeypatch.setattr(inner_batches, "MADE_BYTES_PER_BATCH", 2_000)
    raws = records()
    write(tmp_path, raws)
    rows = read(tmp_path, 0, END)
    assert [int(row["value"]) for row in rows] == [row["offset"] for row in rows]
    assert [row["offset"] for row in rows] == list(range(END))
    assert build(raws, 0, END) == rows


@pytest.mark.parametrize("flags", [0x80, WRAPPED])
def test_an_export_counts_no_message_of_a_batch_left_whole_as_lost(tmp_path, monkeypatch, flags):
    raws = records((flags,))
    write(tmp_path / "store", raws)
    run_here(monkeypatch)
    where = Where(str(tmp_path / "store"), topics=("inner",))
    options = ExportOptions(fail_on_data_loss=False)
    summary = export(SPARK, where, str(tmp_path / "target"), options)
    assert summary.lost_messages == 0
    assert summary.messages == (END if flags == WRAPPED else len(COUNTS))
    builder = BatchBuilder(ALL)
    chunk = Chunk(memoryview(b"".join(raws)), b"", [])
    list(ServerBackend(("tcp://a:1",), True)._build(chunk, QueueRange("inner", 3, 0, END), builder))
    assert builder.left_whole == (flags != WRAPPED)


def test_an_export_of_batches_left_whole_goes_on_behind_the_last_one(tmp_path, monkeypatch):
    raws = records((0x80,))
    write(tmp_path / "store", raws)
    run_here(monkeypatch)
    where = Where(str(tmp_path / "store"), topics=("inner",))
    export(SPARK, where, str(tmp_path / "target"))
    assert export(SPARK, where, str(tmp_path / "target")).messages == 0
    with PathBackend(str(tmp_path / "store"), True) as backend:
        key = TopicPartition("inner", 3)
        marks = [read_mark(backend, key, at, 0) for at in (END - 1, 307, 8, 0)]
        assert read_mark(backend, key, 307, 10) is None
    assert [mark.size for mark in marks] == [len(raws[at]) for at in (-1, 2, 2, 0)]
    write(tmp_path / "other", [*raws[:-1], batch(310, 40, sum(map(len, raws[:-1])), flags=0x81)])
    with pytest.raises(PositionLostError, match="the message 349 of inner-3 .* is not the one"):
        export(SPARK, Where(str(tmp_path / "other"), topics=("inner",)), str(tmp_path / "target"))


def test_missing_batches_are_lost_messages(tmp_path):
    write(tmp_path, records(), units=3)
    with pytest.raises(PositionLostError, match="42 messages of inner-3"):
        read(tmp_path, 0, END)
    assert len(read(tmp_path, 0, END, fail=False)) == 308


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (batch(0, 2, 0, said=3), "holds 2 messages, and its property INNER_NUM says 3"),
        (batch(0, 1, 0, body=b"x" * 30), "no whole message at byte 0"),
        (batch(0, 1, 0, body=pack(b"a", b"") + b"short"), "no whole message at byte 23"),
        (batch(0, 1, 0, body=struct.pack(">iiiii", 22, 0, 0, 0, -5) + b"\0\0"), "at byte 0"),
        (batch(0, 1, 0, body=struct.pack(">iiiii", 0, 0, 0, 0, 0) + b"\0\0"), "at byte 0"),
    ],
)
def test_a_malformed_batch_is_named(raw, text):
    with pytest.raises(CorruptRecordError, match=text):
        build([raw], 0, 5)


def test_a_batch_whose_crc_is_wrong_is_refused():
    raw = bytearray(records()[1])
    raw[100] ^= 1
    with pytest.raises(CorruptRecordError):
        build([bytes(raw)], 0, END)
