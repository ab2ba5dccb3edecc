"""The options of a write, and which columns are the parts of a message: parsed and checked. Pure.

Columns are those of Spark's Kafka sink. Spark passes the names of options in lower case; here they
get their spelling back. Unknown names are refused: an option that is ignored may be one that should
have kept rows from being lost. Those of the source are ignored, because a view in SQL has one set
of options for both.
"""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    StringType,
    StructType,
)

from hastore.errors import MessageIllegalError, UsageError
from hastore.record.topic_records import check_name
from hastore.spark.options.names import BOOTSTRAP, NAMES, PATH, TOPIC, Names
from hastore.spark.options.source_options import (
    DEFAULT_PATIENCE,
    DELIVERY_TIMEOUT,
    NO_TABLES,
    RETRY_TIMEOUT,
    SECURITY,
    SINK_ONLY,
    SOURCE_OPTIONS,
    Patience,
    parse_bool,
    parse_patience,
    security_file,
)

LOGGER = logging.getLogger(__name__)

_KNOWN = (
    *(BOOTSTRAP, *SINK_ONLY, SECURITY, RETRY_TIMEOUT),
    # Spark's own for streams; it passes them on.
    *("checkpointLocation", "queryName"),
)
_BY_LOWER_NAME = {name.lower(): name for name in (*_KNOWN, *SOURCE_OPTIONS, NAMES)}
_KAFKA = {
    "kafka.bootstrap.servers": BOOTSTRAP,
    "kafka.acks": "acks",
    "kafka.delivery.timeout.ms": DELIVERY_TIMEOUT,
    "kafka.enable.idempotence": "idempotent",
}
_ACKS: dict[str, Literal[0, 1, "all"]] = {"0": 0, "1": 1, "all": "all", "-1": "all"}
_FORMAT = "format 'hastore'"


@dataclass(frozen=True)
class SinkOptions:
    """The checked options of a write.

    `acks` None: the default of the master's role. `topic` is that of all rows, `default_topic` that
    of rows without one: the topic that a view with these options reads.
    """

    bootstrap: tuple[str, ...]
    topic: str | None
    acks: Literal[0, 1, "all"] | None
    sync_flush: bool
    idempotent: bool
    write_id: str | None
    security: str | None = None
    patience: Patience = DEFAULT_PATIENCE
    default_topic: str | None = None
    names: Names = Names.QUERY


def parse_sink_options(raw: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Check the options of a write. Raises UsageError, which names the option and the remedy."""
    options: dict[str, str] = {}
    for given, value in raw.items():
        name = _BY_LOWER_NAME.get(given.lower())
        if name is None or name == PATH:
            raise UsageError(_unknown(given))
        options[name] = value
    if "writeId" in options and streaming:
        raise UsageError(
            "option 'writeId' is for batch writes; a stream's rows are known by its checkpoint"
        )
    idempotent = parse_bool(options, "idempotent", default=True)
    if "writeId" in options and not (options["writeId"].strip() and idempotent):
        problem = "is empty" if idempotent else "contradicts idempotent=false"
        raise UsageError(f"option 'writeId' {problem}; give a text of your own, or leave it out")
    return SinkOptions(
        bootstrap=_parse_bootstrap(options),
        topic=_parse_topic(options),
        acks=_parse_acks(options),
        sync_flush=parse_bool(options, "syncFlush", default=False),
        idempotent=idempotent,
        write_id=options.get("writeId"),
        security=security_file(options),
        patience=parse_patience(options, DELIVERY_TIMEOUT, RETRY_TIMEOUT),
        default_topic=_topic_of_view(options),
        names=Names.of(options),
    )


def _unknown(given: str) -> str:
    lower = given.lower()
    if lower == PATH:
        return (
            f"option 'path': {_FORMAT} writes to running nodes, not to a directory; leave the path "
            f"out and set {BOOTSTRAP!r}"
        )
    if lower in _KAFKA:
        return f"option {given!r} is Kafka's; use {_KAFKA[lower]!r}"
    if lower.startswith("kafka."):
        return f"option {given!r} has no meaning for {_FORMAT}; remove it"
    near = difflib.get_close_matches(lower, _BY_LOWER_NAME, n=1)
    if near:
        name = _BY_LOWER_NAME[near[0]]
        return f"unknown option {given!r} for a write to {_FORMAT}; did you mean {name!r}?"
    return f"unknown option {given!r} for a write to {_FORMAT}; known options: " + ", ".join(_KNOWN)


def _parse_bootstrap(options: Mapping[str, str]) -> tuple[str, ...]:
    text = options.get(BOOTSTRAP)
    servers = tuple(s.strip() for s in (text or "").split(",") if s.strip())
    if not servers:
        problem = "must be specified" if text is None else "is empty"
        raise UsageError(
            f"{Names.of(options).said(BOOTSTRAP)} {problem} for a write to {_FORMAT}; name at "
            "least one node, e.g. tcp://127.0.0.1:10911"
            + ("" if options else f"; if this is a table: {NO_TABLES}")
        )
    return servers


def _parse_topic(options: Mapping[str, str]) -> str | None:
    topic = options.get(TOPIC)
    if topic is not None:
        try:
            check_destination(topic)
        except MessageIllegalError as failure:
            raise UsageError(f"{Names.of(options).said(TOPIC)}: {failure}") from failure
    return topic


def check_destination(topic: str) -> None:
    """Raise MessageIllegalError for a topic that cannot be written.

    Nodes take some of the topics of the group itself, but a pattern, and so a job, reads none.
    """
    check_name(topic)


def _topic_of_view(options: Mapping[str, str]) -> str | None:
    """Return the topic of `subscribe`, if it is a single one that may be written."""
    topic = options.get("subscribe", "").strip()
    try:
        check_destination(topic)
    except MessageIllegalError:
        return None
    return topic


def _parse_acks(options: Mapping[str, str]) -> Literal[0, 1, "all"] | None:
    text = options.get("acks")
    if text is None:
        return None
    found = _ACKS.get(text.strip().lower())
    if found is None:
        raise UsageError(
            f"option 'acks' is {text!r}; use 'all' (the master and the group's slaves), 1 (the "
            "master) or 0 (nobody)"
        )
    return found


# -- columns ---------------------------------------------------------------------------------------


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


def check_columns(
    schema: StructType, topic_option: str | None, default_topic: str | None = None
) -> SinkColumns:
    """Return where each column is; `topic_option` makes the column `topic` unnecessary.

    Other columns are not written, as by Kafka's sink: see `ignored_columns`. Raises UsageError for
    a missing column, a name that occurs twice, or a wrong type.
    """
    places: dict[str, int] = {}
    for place, field in enumerate(schema.fields):
        name = field.name.lower()
        if name not in _EXPECTED:
            continue
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
    elif "topic" not in places and default_topic is None:
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


def ignored_columns(schema: StructType) -> str | None:
    """Return the warning that names the columns that are not written; None without any.

    Those of the source, which a DataFrame has that was read from hastore, are not named.
    """
    names = [field.name for field in schema.fields]
    others = [name for name in names if name.lower() not in {*_EXPECTED, *_OF_THE_SOURCE}]
    if not others:
        return None
    hints = ""
    for name in others:
        near = difflib.get_close_matches(name.lower(), _EXPECTED, n=1, cutoff=0.75)
        if near and near[0] not in {given.lower() for given in names}:
            hints += f"; did you mean {near[0]!r} by {name!r}?"
    known = ", ".join(f"{known} ({kind})" for known, kind in _EXPECTED.items())
    return (
        f"the sink of format 'hastore' does not write the columns {', '.join(others)}{hints}; it "
        f"takes {known}"
    )


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
