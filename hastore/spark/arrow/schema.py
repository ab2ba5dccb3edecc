"""The columns of the data source: those of Spark's Kafka source, then those of RocketMQ records.

A schema given by the user is a projection. Spark does not prune the columns of a Python data
source, so a user who wants to read only some columns names them in a schema.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from hastore.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

TIMESTAMP_TYPE_LOG_APPEND = 1  # in Kafka: the timestamp is the time of the append


class Column(enum.Enum):
    """A column that the source can fill; the value is its name in Spark."""

    KEY = "key"
    VALUE = "value"
    TOPIC = "topic"
    PARTITION = "partition"
    OFFSET = "offset"
    TIMESTAMP = "timestamp"
    TIMESTAMP_TYPE = "timestampType"
    HEADERS = "headers"
    PHYSICAL_OFFSET = "physicalOffset"
    SIZE = "size"
    SYS_FLAG = "sysFlag"
    BODY_CRC = "bodyCrc"
    MESSAGE_ID = "msgId"
    TAGS = "tags"
    BORN_TIMESTAMP = "bornTimestamp"
    BORN_HOST = "bornHost"
    STORE_HOST = "storeHost"
    RECONSUME_TIMES = "reconsumeTimes"
    RECORD = "record"


_HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)

COLUMN_TYPES: dict[Column, DataType] = {
    Column.KEY: BinaryType(),
    Column.VALUE: BinaryType(),
    Column.TOPIC: StringType(),
    Column.PARTITION: IntegerType(),
    Column.OFFSET: LongType(),
    Column.TIMESTAMP: TimestampType(),
    Column.TIMESTAMP_TYPE: IntegerType(),
    Column.HEADERS: _HEADERS,
    Column.PHYSICAL_OFFSET: LongType(),
    Column.SIZE: IntegerType(),
    Column.SYS_FLAG: IntegerType(),
    Column.BODY_CRC: IntegerType(),
    Column.MESSAGE_ID: StringType(),
    Column.TAGS: StringType(),
    Column.BORN_TIMESTAMP: TimestampType(),
    Column.BORN_HOST: StringType(),
    Column.STORE_HOST: StringType(),
    Column.RECONSUME_TIMES: IntegerType(),
    Column.RECORD: BinaryType(),
}

KAFKA_COLUMNS = (
    Column.KEY,
    Column.VALUE,
    Column.TOPIC,
    Column.PARTITION,
    Column.OFFSET,
    Column.TIMESTAMP,
    Column.TIMESTAMP_TYPE,
)
METADATA_COLUMNS = (
    Column.PHYSICAL_OFFSET,
    Column.SIZE,
    Column.SYS_FLAG,
    Column.BODY_CRC,
    Column.MESSAGE_ID,
    Column.TAGS,
    Column.BORN_TIMESTAMP,
    Column.BORN_HOST,
    Column.STORE_HOST,
    Column.RECONSUME_TIMES,
)
LOG_COLUMNS = (
    Column.PHYSICAL_OFFSET,
    Column.SIZE,
    Column.TOPIC,
    Column.PARTITION,
    Column.OFFSET,
    Column.TIMESTAMP,
    Column.SYS_FLAG,
    Column.BODY_CRC,
    Column.RECORD,
)
NULLABLE_COLUMNS = frozenset({Column.KEY, Column.VALUE, Column.HEADERS, Column.TAGS})

_BY_LOWER_NAME = {column.value.lower(): column for column in Column}


def source_schema(*, include_headers: bool, include_metadata: bool) -> StructType:
    """Return the schema of a read without a user schema.

    All columns are nullable, as Kafka's are.
    """
    columns: tuple[Column, ...] = KAFKA_COLUMNS
    if include_headers:
        columns += (Column.HEADERS,)
    if include_metadata:
        columns += METADATA_COLUMNS
    return _schema_of(columns)


def log_schema() -> StructType:
    """Return the schema of mode=log without a user schema; `record` holds a record's raw bytes."""
    return _schema_of(LOG_COLUMNS)


def _schema_of(columns: tuple[Column, ...]) -> StructType:
    return StructType([StructField(c.value, COLUMN_TYPES[c]) for c in columns])


@dataclass(frozen=True)
class Projection:
    """The columns of one read, in order, and the Spark schema that their batches must match."""

    columns: tuple[Column, ...]
    schema: StructType

    def arrow_schema(self) -> "pa.Schema":
        """Return the Arrow schema with which Spark compares the first batch."""
        from pyspark.sql.pandas.types import to_arrow_schema

        make: Callable[..., pa.Schema] = to_arrow_schema
        return make(self.schema, timezone="UTC")


def projection_of(columns: Iterable[Column]) -> Projection:
    """Return the projection to some columns, for callers that have no schema of a query."""
    chosen = tuple(columns)
    return Projection(chosen, _schema_of(chosen))


def project(schema: StructType) -> Projection:
    """Map a schema, the source's own or the user's, to columns.

    Raises UsageError for an empty schema, an unknown name, a column named twice, a wrong type, or
    `NOT NULL` on a column that can be null.
    """
    if not schema.fields:
        raise UsageError("the schema given to format 'hastore' has no columns; name at least one")
    columns = []
    for field in schema.fields:
        column = _BY_LOWER_NAME.get(field.name.lower())
        if column is None:
            raise UsageError(
                f"format 'hastore' has no column {field.name!r}; a schema given to it is a "
                "projection of: " + ", ".join(c.value for c in Column)
            )
        expected = COLUMN_TYPES[column]
        if field.dataType != expected:
            raise UsageError(
                f"column {field.name!r} of format 'hastore' is {expected.simpleString()}, not "
                f"{field.dataType.simpleString()}; read it as it is and cast it in the query"
            )
        if not field.nullable and column in NULLABLE_COLUMNS:
            raise UsageError(
                f"column {field.name!r} of format 'hastore' can be null; drop NOT NULL"
            )
        if column in columns:
            raise UsageError(f"column {field.name!r} is named twice in the schema")
        columns.append(column)
    return Projection(tuple(columns), schema)
