"""Arrow batches, compared with the codec that reads one record at a time."""

import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from hastore.errors import CorruptRecordError
from hastore.record import compression
from hastore.record.codec import Record, encode_record
from hastore.spark.arrow import batch as arrow_batch
from hastore.spark.arrow.batch import BatchBuilder, cut_batches, decompress
from hastore.spark.arrow.schema import COLUMN_TYPES, Column, project
from tests.spark.random_records import expected_row, records

ALL = project(StructType([StructField(c.value, COLUMN_TYPES[c]) for c in Column]))
BASE = 1 << 30


def lay(items, base=BASE):
    """Encode records one after the other, each with its physical offset."""
    data, positions, placed = bytearray(), [], []
    for item in items:
        offset = base + len(data)
        record = Record(
            **{
                name: offset if name == "physical_offset" else getattr(item, name)
                for name in Record.__dataclass_fields__
            }
        )
        positions.append(len(data))
        placed.append(record)
        data += encode_record(record)
    return bytes(data), np.array(positions, np.int64), placed


def build(data, positions, base=BASE, queue=None, projection=ALL):
    builder = BatchBuilder(projection, check_crcs=False)
    return builder.build(memoryview(data), positions, base, queue)


@given(st.lists(records(), min_size=1, max_size=8))
@settings(max_examples=150, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
def test_every_column_equals_what_the_codec_reads(items):
    data, positions, placed = lay(items)
    batch = build(data, positions)
    batch.validate(full=True)
    for row, record in zip(batch.to_pylist(), placed, strict=True):
        times = (row.pop("timestamp"), row.pop("bornTimestamp"))
        milliseconds = [round(time.timestamp() * 1000) for time in times]
        assert milliseconds == [record.store_timestamp_ms, record.born_timestamp_ms]
        assert row == expected_row(record)


def test_a_time_that_spark_cannot_hold_becomes_the_nearest_one():
    most = (2**63 - 1) // 1000
    times = [-(2**63), -most - 1, -most, -1, 0, most, most + 1, 2**62, 2**63 - 1]
    items = [
        Record(b"x", topic="t", store_timestamp_ms=at, born_timestamp_ms=-1 - at) for at in times
    ]
    data, positions, _ = lay(items)
    batch = build(data, positions)
    for name, stored in (("timestamp", times), ("bornTimestamp", [-1 - at for at in times])):
        found = batch.column(name).view(pa.int64()).to_pylist()
        assert found == [1000 * max(-most, min(most, at)) for at in stored]


def test_a_batch_equals_the_schema_that_spark_expects():
    data, positions, _ = lay([Record(body=b"x", topic="t")])
    assert build(data, positions).schema == ALL.arrow_schema()


def test_a_projection_gives_its_columns_in_its_order():
    names = [Column.OFFSET, Column.TOPIC]
    own = project(StructType([StructField(c.value, COLUMN_TYPES[c], False) for c in names]))
    data, positions, _ = lay([Record(body=b"x", topic="t", queue_offset=7)])
    batch = build(data, positions, projection=own)
    assert batch.schema.names == ["offset", "topic"]
    assert not batch.schema.field("topic").nullable
    assert batch.to_pylist() == [{"offset": 7, "topic": "t"}]


def test_properties_that_are_not_utf8_are_replaced_in_strings():
    raw = b"TAGS\x01\xff\x02a\xff\x01\xff\x02"
    data, positions, _ = lay([Record(body=b"", topic="t", properties=raw)])
    row = build(data, positions).to_pylist()[0]
    assert row["tags"] == "\ufffd"
    assert row["headers"] == [{"key": "a\ufffd", "value": b"\xff"}]


def test_of_several_tags_the_last_that_is_not_empty_is_shown():
    raw = [
        b"TAGS\x01a\x02TAGS\x01b\x02", b"", b"x\x01y\x02TAGS\x01c\x02TAGS\x01\x02",
        b"TAGS\x01\x02TAGS\x01", b"TAGS\x01d\x02",
    ]  # fmt: skip
    data, positions, _ = lay([Record(body=b"", topic="t", properties=one) for one in raw])
    assert [row["tags"] for row in build(data, positions).to_pylist()] == ["b", None, "c", "", "d"]


def test_headers_are_the_properties_that_users_set():
    names = ["HS_PID", "a", "KEYS", "UNIQ_KEY", "TAGS", "b", "WAIT", "a", "HS_SEQ"]
    raw = "".join(f"{name}\x01{n}\x02" for n, name in enumerate(names)).encode()
    data, positions, _ = lay(
        [
            Record(body=b"", topic="t", properties=b"HS_PID\x01x\x02HS_SEQ\x011\x02"),
            Record(body=b"", topic="t", properties=raw),
        ]
    )
    none, some = build(data, positions).to_pylist()
    assert none["headers"] is None
    assert [(h["key"], h["value"]) for h in some["headers"]] == [
        ("a", b"1"),
        ("b", b"5"),
        ("a", b"7"),
    ]


@given(records(), st.data())
@settings(max_examples=200, print_blob=True)
def test_damaged_bytes_never_cause_a_read_out_of_bounds(item, data):
    raw, positions, _ = lay([item, item])
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        build(bytes(damaged[:cut]), positions).validate(full=True)
    except CorruptRecordError:
        pass


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (0, b"\xff\xff\xff\xff", "impossible size"),
        (0, b"\x7f\xff\xff\xff", "impossible size"),
        (4, b"\0\0\0\0", "no record magic"),
        (28, bytes(8), "another physical offset"),
        (84, b"\xff\xff\xff\xff", "impossible body length"),
        (84, b"\0\0\0\1", "lengths that do not add up|impossible topic length"),
    ],
)
def test_an_invalid_record_is_refused_with_its_offset(at, value, text):
    data, positions, _ = lay([Record(body=b"", topic="t"), Record(body=b"abcd", topic="t")])
    place = int(positions[1])
    damaged = bytearray(data)
    damaged[place + at : place + at + len(value)] = value
    with pytest.raises(CorruptRecordError, match=text) as caught:
        build(bytes(damaged), positions)
    assert str(BASE + place) in str(caught.value)


def test_a_body_with_a_wrong_crc_is_refused_if_the_body_is_read():
    data, positions, placed = lay([Record(body=b"rotten", topic="t", body_crc=1)])
    with pytest.raises(CorruptRecordError, match=f"offset {BASE} has a body that does not match"):
        BatchBuilder(ALL).build(memoryview(data), positions, BASE, None)
    fields = [StructField("offset", COLUMN_TYPES[Column.OFFSET])]
    builder = BatchBuilder(project(StructType(fields)))
    assert builder.build(memoryview(data), positions, BASE, None).num_rows == len(placed)


def test_positions_out_of_order_are_refused():
    data, positions, _ = lay([Record(body=b"a", topic="t"), Record(body=b"b", topic="t")])
    with pytest.raises(CorruptRecordError, match="order"):
        build(data, positions[::-1].copy())
    data, positions, _ = lay([Record(body=b"rotten", topic="t", body_crc=1)] * 2)
    with pytest.raises(CorruptRecordError, match="has a body that does not match its CRC"):
        BatchBuilder(ALL).build(memoryview(data), positions[::-1].copy(), BASE, None)


def pack(body, codec):
    return zlib.compress(body) if codec == "zlib" else pa.Codec(codec).compress(body, asbytes=True)


@pytest.mark.parametrize(("codec", "bits"), [("lz4", 1), ("zstd", 2), ("zlib", 3), ("zlib", 0)])
def test_a_compressed_body_is_decompressed(codec, bits):
    body = b"long " * 100
    flag = 1 | bits << 8
    packed = pack(body, codec)
    items = [
        Record(body=b"plain", topic="t"),
        Record(body=packed, topic="t", sys_flag=flag),
    ]
    data, positions, _ = lay(items)
    assert [row["value"] for row in build(data, positions).to_pylist()] == [b"plain", body]


def test_bodies_stay_as_they_are_stored_on_request():
    packed = pack(b"long " * 100, "zstd")
    items = [
        Record(body=b"junk", topic="t", sys_flag=0x501),
        Record(body=packed, topic="t", sys_flag=0x201),
    ]
    data, positions, _ = lay(items)
    with pytest.raises(CorruptRecordError, match="unknown compression 5.*option decompress"):
        build(data, positions)
    builder = BatchBuilder(ALL, check_crcs=False, decompress=False)
    rows = builder.build(memoryview(data), positions, BASE, None).to_pylist()
    assert [row["value"] for row in rows] == [b"junk", packed]


@pytest.mark.parametrize("bits", [0, 1, 2])
def test_a_compressed_body_that_is_damaged_is_refused(bits):
    with pytest.raises(CorruptRecordError, match="offset 77"):
        decompress(b"certainly not compressed", 1 | bits << 8, 77)


def test_a_decompression_bomb_is_refused_at_the_limit(monkeypatch):
    monkeypatch.setattr(compression, "MAX_BODY_BYTES", 1000)
    with pytest.raises(CorruptRecordError, match="over 1000 bytes"):
        decompress(zlib.compress(bytes(1_000_000)), 1, 0)
    with pytest.raises(CorruptRecordError, match="ends within"):
        decompress(zlib.compress(b"0123456789")[:-3], 1, 0)


def test_batches_are_cut_by_rows_bytes_and_span():
    def cut(positions, sizes):
        slices = cut_batches(np.array(positions, np.int64), np.array(sizes, np.int64))
        return [(s.start, s.stop) for s in slices]

    rows = arrow_batch.ROWS_PER_BATCH
    assert cut(range(0, 100 * (rows + 1), 100), [100] * (rows + 1)) == [(0, rows), (rows, rows + 1)]
    half = arrow_batch.BYTES_PER_BATCH // 2
    assert cut([0, half, 2 * half], [half] * 3) == [(0, 2), (2, 3)]
    assert cut([0, 2**31], [100, 100]) == [(0, 1), (1, 2)]
    assert cut([0], [2 * arrow_batch.BYTES_PER_BATCH]) == [(0, 1)]
    assert cut([], []) == []
