"""JSON bodies as columns: what fits, and what goes to `_corrupt`."""

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from hastore.errors import UsageError
from hastore.pipeline import json_columns
from hastore.pipeline.json_columns import JsonColumns, as_columns, sample_bodies
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.read.stores import PathBackend
from tests.spark.stores import numbered, write_store

NESTED = StructType([StructField("class", StringType()), StructField("n", LongType())])
SCHEMA = StructType(
    [
        StructField("from", StringType()),
        StructField("count", IntegerType()),
        StructField("ratio", DoubleType()),
        StructField("small", FloatType()),
        StructField("price", DecimalType(6, 2)),
        StructField("day", DateType()),
        StructField("at", TimestampType()),
        StructField("inner", NESTED),
        StructField("list", ArrayType(NESTED)),
        StructField("map", MapType(StringType(), LongType())),
    ]
)
WHOLE = {
    "from": "a",
    "count": 7,
    "ratio": 2,
    "small": 0.5,
    "price": "12.50",
    "day": "2026-11-22",
    "at": "2026-11-22T12:00:00+01:00",
    "inner": {"class": "x", "n": 1},
    "list": [{"n": 2}, None],
    "map": {"k": 3},
    "unknown": 1,
}


def decode(*bodies):
    columns = JsonColumns(SCHEMA.json())
    as_is = bytes | None
    arrays = columns.decode([b if isinstance(b, as_is) else json.dumps(b).encode() for b in bodies])
    rows = zip(*(array.to_pylist() for array in arrays), strict=True)
    return [dict(zip(columns.schema.names, row, strict=True)) for row in rows]


def test_a_body_fills_the_columns():
    (row,) = decode(WHOLE)
    assert row == {
        "from": "a",
        "count": 7,
        "ratio": 2.0,
        "small": 0.5,
        "price": decimal.Decimal("12.50"),
        "day": datetime.date(2026, 11, 22),
        "at": datetime.datetime(2026, 11, 22, 11, tzinfo=datetime.UTC),
        "inner": {"class": "x", "n": 1},
        "list": [{"class": None, "n": 2}, None],
        "map": [("k", 3)],
        "_corrupt": None,
    }


def test_a_time_without_a_zone_is_utc():
    (row,) = decode({"at": "2026-11-22T12:00:00"})
    assert row["at"] == datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)


def test_missing_names_and_nulls_are_null():
    for row in decode({}, dict.fromkeys(WHOLE), None):
        assert set(row.values()) == {None}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"not json",
        b"[1]",
        b'{"count":',
        {"count": 2**31},
        {"count": "7"},
        {"count": 1.5},
        {"from": 1},
        {"price": "123456.789"},
        {"at": "yesterday"},
        {"inner": []},
        {"map": {"k": "v"}},
        {"small": 1e300},
        {"count": float("nan")},
        {"count": 10**30},
        b'{"unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"from":"\\ud800"}',
    ],
)
def test_a_body_that_does_not_fit_is_kept_whole(body):
    before, row, after = decode({"count": 1}, body, {"count": 2})
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert row.pop("_corrupt") == raw
    assert set(row.values()) == {None}
    assert (before["count"], after["count"]) == (1, 2)
    assert before["_corrupt"] is None and after["_corrupt"] is None


def test_not_null_is_ignored_because_a_body_may_lack_the_name(tmp_path):
    inner = StructType([StructField("n", LongType(), nullable=False)])
    schema = StructType(
        [
            StructField("inner", inner, nullable=False),
            StructField("list", ArrayType(inner, containsNull=False), nullable=False),
            StructField("map", MapType(StringType(), LongType(), valueContainsNull=False)),
        ]
    )
    columns = JsonColumns(schema.json())
    body = b'{"inner": {}, "list": [null], "map": {"k": null}}'
    table = pa.Table.from_arrays(columns.decode([body, b"{}"]), schema=columns.schema)
    pq.write_table(table, tmp_path / "f.parquet")
    first, second = pq.read_table(tmp_path / "f.parquet").to_pylist()
    assert first == {
        "inner": {"n": None},
        "list": [None],
        "map": [("k", None)],
        "_corrupt": None,
    }
    assert set(second.values()) == {None}


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A")])
def test_names_that_spark_takes_for_one_are_refused(names):
    twice = StructType([StructField(name, LongType()) for name in names])
    for schema in (twice, StructType([StructField("x", ArrayType(twice))])):
        with pytest.raises(UsageError, match="'a', '[aA]' differ in case at most"):
            JsonColumns(schema.json())


def test_a_field_with_the_name_of_a_column_of_the_export_gets_another_column():
    inner = StructType([StructField("offset", LongType())])
    schema = StructType(
        [StructField("Offset", LongType()), StructField("a", inner), StructField("date", inner)]
    )
    columns = JsonColumns(as_columns(schema).json())
    assert columns.schema.names == ["body_Offset", "a", "body_date", "_corrupt"]
    body = b'{"Offset": 7, "body_Offset": 8, "a": {"offset": 9}, "date": {"offset": 1}}'
    rows = [array.to_pylist() for array in columns.decode([body])]
    assert rows == [[7], [{"offset": 9}], [{"offset": 1}], [None]]
    taken = StructType([StructField(name, LongType()) for name in ("offset", "body_offset")])
    with pytest.raises(UsageError, match="'body_offset', 'body_offset' .* schema in DDL"):
        as_columns(taken)


def test_a_struct_without_fields_is_refused():
    schema = StructType([StructField("x", StructType([]))])
    with pytest.raises(UsageError, match="column 'x' is a struct without fields"):
        JsonColumns(schema.json())


def test_types_that_json_has_not_are_refused():
    from pyspark.sql.types import BinaryType

    with pytest.raises(UsageError, match="column 'b' is binary"):
        JsonColumns(StructType([StructField("b", BinaryType())]).json())


def test_a_schema_is_inferred_from_few_bodies_if_they_are_large(tmp_path, monkeypatch):
    """The driver holds all of them: a thousand of 4 MiB of each queue were too many."""
    monkeypatch.setattr(json_columns, "SAMPLE", 30)
    monkeypatch.setattr(json_columns, "SAMPLE_BYTES", 2 * 10_000)
    write_store(tmp_path, [*numbered(40, topic="small"), *numbered(40, size=4_000)])
    small, large = TopicPartition("small", 0), TopicPartition("t", 0)
    with PathBackend(str(tmp_path), True) as backend:
        ranges = dict.fromkeys((small, large), OffsetRange(0, 40))
        found = [len(body) for body in sample_bodies(backend, ranges, decompress=True)]
    assert found == [10] * 30 + [4_000] * 3
