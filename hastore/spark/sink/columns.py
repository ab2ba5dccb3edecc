"""Map the columns of a DataFrame to the parts of a message, as Spark's Kafka sink does."""

import difflib
from dataclasses import dataclass

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
)

from hastore.errors import UsageError

_TEXT = "string or binary"
_HEADERS = "array<struct<key:string,value:binary>>"
_EXPECTED = {
    "value": _TEXT,
    "key": _TEXT,
    "headers": _HEADERS,
    "topic": "string",
    "partition": "int",
    "tags": "string",
}
# The source's other columns: a DataFrame that was read from hastore is written as it is.
_OF_THE_SOURCE = frozenset(
    (
        *("offset", "timestamp", "timestamptype", "physicaloffset", "size", "sysflag", "bodycrc"),
        *("msgid", "borntimestamp", "bornhost", "storehost", "reconsumetimes"),
    )
)


@dataclass(frozen=True)
class SinkColumns:
    """The place of each column in the rows; None for a column that the DataFrame does not have."""

    value: int
    key: int | None = None
    headers: int | None = None
    topic: int | None = None
    partition: int | None = None
    tags: int | None = None


def check_columns(schema: StructType, topic_option: str | None) -> SinkColumns:
    """Return where each column is; `topic_option` makes the column `topic` unnecessary.

    Raises UsageError for a missing or unknown column, a name that occurs twice, or a wrong type.
    """
    places: dict[str, int] = {}
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name in _OF_THE_SOURCE:
            continue
        if name not in _EXPECTED:
            raise UsageError(_unknown(field.name))
        if name in places:
            raise UsageError(f"column {name!r} occurs twice; the sink takes one")
        if not _fits(name, field.dataType):
            raise UsageError(
                f"column {field.name!r} is {field.dataType.simpleString()}, but the sink of format "
                f"'hastore' takes {_EXPECTED[name]}; cast it in the query"
            )
        places[name] = place
    if "value" not in places:
        raise UsageError(
            f"column 'value' ({_TEXT}) is missing; the sink of format 'hastore' writes it as the "
            "message's body"
        )
    if topic_option is not None:
        places.pop("topic", None)  # the option wins, as in Kafka's sink
    elif "topic" not in places:
        raise UsageError(
            "no topic: set the option 'topic', or add a column 'topic' with each row's topic"
        )
    return SinkColumns(**places)


def check_append(overwrite: bool, *, streaming: bool) -> None:
    """Raise UsageError for a save or output mode that would remove what is stored."""
    if overwrite:
        mode, append = (
            ("output mode complete", "outputMode('append')")
            if streaming
            else ("save mode overwrite", "mode('append')")
        )
        raise UsageError(f"{mode} is not possible for format 'hastore', a log; use {append}")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), _EXPECTED, n=1, cutoff=0.75)
    hint = f"did you mean {near[0]!r}?" if near else "drop it, or put it into 'value' or 'headers'."
    known = ", ".join(f"{known} ({kind})" for known, kind in _EXPECTED.items())
    return f"the sink of format 'hastore' has no column {name!r}; {hint} It takes {known}"


def _fits(name: str, kind: DataType) -> bool:
    if name in ("value", "key"):
        return isinstance(kind, StringType | BinaryType)
    if name == "headers":
        return (
            isinstance(kind, ArrayType)
            and isinstance(kind.elementType, StructType)
            and kind.elementType.fieldNames() == ["key", "value"]
            and isinstance(kind.elementType["key"].dataType, StringType)
            and isinstance(kind.elementType["value"].dataType, BinaryType)
        )
    return isinstance(kind, IntegerType if name == "partition" else StringType)
