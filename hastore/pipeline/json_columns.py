"""Decode JSON bodies into columns, by a schema of the user.

Each body that is a JSON object fitting the schema fills the columns; missing names and nulls are
null. Any other body leaves all of them null and goes to the column `_corrupt`, so none is lost.
"""

import datetime
import decimal
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from hastore.errors import UsageError
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read.backend import Backend

CORRUPT = "_corrupt"
SAMPLE = 1_000  # bodies of each queue from which a schema is inferred
SAMPLE_BYTES = 64 * 1024 * 1024  # the most of all of them together, but for one batch of a queue
_FLOAT_MAX = (2 - 2**-23) * 2.0**127  # of 32 bits
_RESERVED = {column.value.lower() for column in Column} | {"date", CORRUPT}
_FIELD = "hastore.field"  # in a column's metadata: the name in the bodies, if it is another
_SIMPLE: dict[type[DataType], Any] = {
    StringType: str,
    BooleanType: bool,
    DoubleType: float,
    FloatType: Annotated[float, msgspec.Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)],
    DateType: datetime.date,
    TimestampType: datetime.datetime,  # without a time zone it is UTC
    DecimalType: decimal.Decimal,
}
_WHOLE = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}


def parse_schema(ddl: str) -> StructType:
    """Return the columns of a DDL text. Raises UsageError."""
    try:
        schema = DataType.fromDDL(ddl)
    except PySparkException as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"--json-schema {ddl!r} is not a schema in DDL: {first}") from error
    if not isinstance(schema, StructType) or not schema.fields:
        raise UsageError(f"--json-schema {ddl!r} has no columns; write NAME TYPE, NAME TYPE")
    if isinstance(DataType.fromDDL("timestamp"), TimestampNTZType):
        schema = StructType.fromJson(_with_zone(schema.jsonValue()))
    return as_columns(schema)


def _with_zone(value: Any) -> Any:
    """Return what a type is in JSON, with each TIMESTAMP as a time of UTC.

    In a session whose spark.sql.timestampType is TIMESTAMP_NTZ the word means one without a zone.
    """
    if isinstance(value, list):
        return [_with_zone(one) for one in value]
    if not isinstance(value, dict):
        return "timestamp" if value == "timestamp_ntz" else value
    return {name: one if name == "name" else _with_zone(one) for name, one in value.items()}


def as_columns(schema: StructType) -> StructType:
    """Return the columns of the export for the fields of the bodies.

    A field with the name of a column of the source, or of the export, gets the column body_NAME;
    the field's own name is in the metadata. Raises UsageError for a type that JSON has not.
    """
    columns = [
        StructField(f"body_{one.name}", one.dataType, metadata={_FIELD: one.name})
        if one.name.lower() in _RESERVED
        else one
        for one in schema.fields
    ]
    named = StructType(columns)
    JsonColumns(named.json())
    return named


def infer_schema(
    spark: SparkSession,
    backend: Backend,
    ranges: Mapping[TopicPartition, OffsetRange],
    *,
    decompress: bool = True,
) -> str:
    """Return the schema, in Spark's JSON, of the first JSON bodies of each queue.

    Raises UsageError if none of them is a JSON object; without `decompress` no compressed one is.
    """
    bodies = sample_bodies(backend, ranges, decompress=decompress)
    frame = spark.createDataFrame([(body,) for body in bodies], "value string")
    lines = frame.rdd.map(lambda row: row[0])
    schema = spark.read.option("mode", "DROPMALFORMED").json(lines).schema
    fields = [one for one in schema.fields if one.name != "_corrupt_record"]
    if not fields:
        raise UsageError(
            f"none of the first {len(bodies)} bodies is a JSON object: give a schema in DDL, or "
            "export without one"
        )
    return as_columns(StructType(fields)).json()


def sample_bodies(
    backend: Backend, ranges: Mapping[TopicPartition, OffsetRange], *, decompress: bool
) -> list[str]:
    """Return the first bodies of each queue, fewer if they are large: the driver holds all."""
    found: list[str] = []
    builder = BatchBuilder(projection_of([Column.VALUE]), decompress=decompress)
    for key, span in ranges.items():
        end, left = min(span.end, span.start + SAMPLE), SAMPLE_BYTES // len(ranges)
        sample = QueueRange(*key, span.start, end, backend.limit_offset())
        for batch in backend.read_queue(sample, builder):
            for body in batch.column(0).drop_null().to_pylist():
                if left > 0:
                    found.append(body.decode("utf-8", "replace"))
                    left -= len(body)
            if left <= 0:
                break
    return found


class JsonColumns:
    """Turns a column of bodies into the columns of a schema, and `_corrupt`."""

    def __init__(self, schema_json: str) -> None:
        """Take the schema in Spark's JSON. Raises UsageError for a type that JSON has not."""
        schema = StructType.fromJson(msgspec.json.decode(schema_json))
        self._decoder = msgspec.json.Decoder(_struct(schema, "Body"))
        self._names = [f"f{place}" for place in range(len(schema.fields))]
        # Any name may be missing in a body, so NOT NULL cannot hold, at any depth.
        arrow = to_arrow_schema(schema.toNullable(), timezone="UTC")
        self.schema: pa.Schema = arrow.append(pa.field(CORRUPT, pa.binary()))

    def decode(self, bodies: Sequence[bytes | None]) -> list[pa.Array]:
        """Return an array for each column of `schema`; all are null where the body is."""
        rows: list[Any] = []
        corrupt: list[bytes | None] = []
        decode = self._decoder.decode
        for body in bodies:
            if body is None:
                rows.append(None)
                corrupt.append(None)
                continue
            try:
                rows.append(decode(body))
                corrupt.append(None)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                rows.append(None)
                corrupt.append(body)
        try:
            columns = self._columns(rows)
        except (pa.ArrowException, OverflowError, ValueError):
            # A value that is right by its own type, but not by Arrow's, such as too many decimals.
            for place, row in enumerate(rows):
                if row is not None and not self._fits(row):
                    rows[place], corrupt[place] = None, bodies[place]
            columns = self._columns(rows)
        return [*columns, pa.array(corrupt, pa.binary())]

    def _columns(self, rows: Sequence[Any]) -> list[pa.Array]:
        return [
            pa.array(
                [None if row is None else _plain(getattr(row, name)) for row in rows], field.type
            )
            for name, field in zip(self._names, self.schema, strict=False)
        ]

    def _fits(self, row: Any) -> bool:
        try:
            self._columns([row])
        except (pa.ArrowException, OverflowError, ValueError):
            return False
        return True


def _plain(value: Any) -> Any:
    """Return nested objects as Arrow takes them: dicts by the fields' own names."""
    if isinstance(value, msgspec.Struct):
        return {
            field.encode_name: _plain(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
        }
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return [(name, _plain(one)) for name, one in value.items()]
    return value


def _type(kind: DataType, name: str) -> Any:
    for whole, bits in _WHOLE.items():
        if isinstance(kind, whole):
            return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]
    for simple, found in _SIMPLE.items():
        if isinstance(kind, simple):
            return found
    if isinstance(kind, ArrayType):
        return list[_type(kind.elementType, name) | None]  # type: ignore[misc]
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        return dict[str, _type(kind.valueType, name) | None]  # type: ignore[misc]
    if isinstance(kind, StructType):
        return _struct(kind, name)
    raise UsageError(
        f"--json-schema: column {name!r} is {kind.simpleString()}; JSON has string, boolean, "
        "tinyint, smallint, int, bigint, float, double, decimal, date, timestamp, array, struct, "
        "and map with string keys"
    )


def _struct(schema: StructType, name: str) -> Any:
    lower = [field.name.lower() for field in schema.fields]
    twice = [field.name for field in schema.fields if lower.count(field.name.lower()) > 1]
    if twice:
        raise UsageError(
            f"--json-schema: the names {', '.join(map(repr, twice))} differ in case at most, and "
            "Spark takes them for one column; write a schema in DDL with one of them"
        )
    if not schema.fields:
        raise UsageError(f"--json-schema: column {name!r} is a struct without fields; leave it out")
    fields = [
        (f"f{place}", _type(field.dataType, field.name) | None, None)
        for place, field in enumerate(schema.fields)
    ]
    names = {
        f"f{place}": field.metadata.get(_FIELD, field.name)
        for place, field in enumerate(schema.fields)
    }
    return msgspec.defstruct("Body", fields, rename=names)
