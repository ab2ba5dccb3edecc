"""The options of a read and of a stream, parsed and checked.

Names, defaults, precedence and errors are those of Spark's Kafka source. Spark passes the names in
lower case; here they get their spelling back. An unknown name is an error, which suggests the
nearest known one: an option that is ignored would change what a query reads.

How long a query waits for nodes (`Patience`) are options too:

    retryTimeout       of a read: how long a query that runs waits for an answer of any node
    deliveryTimeout    of a write: how long a row waits for its confirmation

Without them both are 15 minutes: longer than a planned restart of a group takes, so that it does
not end a query, and short enough that somebody hears of a group that does not come back. An address
that has never answered is more likely wrong than restarting. So a query that begins waits
FIRST_ANSWER_S for a first answer, unless its option says otherwise.
"""

import difflib
import enum
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.addresses import folder_of_url, is_cluster_address
from hastore.errors import UsageError
from hastore.record.message_filter import MessageFilter, make_filter
from hastore.spark.options.names import BOOTSTRAP as BOOTSTRAP
from hastore.spark.options.names import NAMES, PATH, TOPIC, Names
from hastore.spark.options.offsets import (
    Bound,
    GlobalTimestamp,
    Limits,
    NoMatch,
    OffsetLimit,
    OffsetsByPartition,
    TopicPartition,
    check_limits,
    parse_instant,
    parse_offsets,
    parse_partitions,
    parse_timestamps,
)

RETRY_TIMEOUT = "retryTimeout"
DELIVERY_TIMEOUT = "deliveryTimeout"
FIRST_ANSWER_S = 30.0
DEFAULT_S = 900.0
_UNITS_S = {
    **{"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0},
    "": 1e-3,  # Spark takes a number without a unit as milliseconds
}


@dataclass(frozen=True)
class Patience:
    """How long to wait for nodes: for the first answer of any, and for later ones, in seconds.

    `option` is the option that sets it, for errors; None if there is none.
    """

    first_s: float = FIRST_ANSWER_S
    later_s: float = DEFAULT_S
    option: str | None = RETRY_TIMEOUT

    @property
    def changed_by(self) -> str:
        """Return what a text says behind a time that was waited."""
        return f", which the option {self.option} changes" if self.option else ""

    @property
    def or_raise(self) -> str:
        """Return what a text adds to other remedies."""
        return f", or raise the option {self.option}" if self.option else ""


DEFAULT_PATIENCE = Patience()


def parse_duration(name: str, text: str) -> float:
    """Return a duration in seconds, from Spark's form of it, such as 15m or 500ms."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.strip().lower(), re.ASCII)
    unit = _UNITS_S.get(found[2]) if found else None
    if found is None or unit is None:
        raise UsageError(f"option {name!r} is {text!r}; use a duration such as 500ms, 30s or 15m")
    return int(found[1]) * unit


def parse_patience(options: Mapping[str, str], *names: str) -> Patience:
    """Return how long to wait, by the first of the options `names` that is given.

    Raises UsageError for a duration that is none, or 0.
    """
    for name in names:
        if name in options:
            seconds = parse_duration(name, options[name])
            if seconds <= 0.0:
                raise UsageError(
                    f"option {name!r} is {options[name]!r}; use a time above 0, such as 30s or "
                    "15m; a number alone is milliseconds"
                )
            return Patience(seconds, seconds, name)
    return Patience(option=names[0] if Names.of(options).have_waits else None)


LOGGER = logging.getLogger(__name__)

GROUPS = "hastore.groups"
SECURITY = "hastore.security.file"
_STRATEGIES = ("subscribe", "subscribePattern", "assign")
STREAM_ONLY = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
# Of the sink. A view in SQL has one set of options, and is read and written.
SINK_ONLY = (TOPIC, "acks", "syncFlush", DELIVERY_TIMEOUT, "idempotent", "writeId")
_KNOWN = (
    BOOTSTRAP,
    GROUPS,
    SECURITY,
    RETRY_TIMEOUT,
    PATH,
    "mode",
    *_STRATEGIES,
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "includeHeaders",
    "includeMetadata",
    "minPartitions",
    "maxRecordsPerPartition",
    "checkCrcs",
    "decompress",
    "tags",
    "sql",
    "pushFilters",
    *STREAM_ONLY,
)
SOURCE_OPTIONS = _KNOWN
_OF_TABLES = "provider"  # Spark sets it when it creates a table
NO_TABLES = (
    "Spark does not pass a table's options to a Python data source; use CREATE TEMPORARY VIEW name "
    "USING hastore OPTIONS (...), which SELECT and INSERT INTO take as a table"
)
_BY_LOWER_NAME = {name.lower(): name for name in (*_KNOWN, *SINK_ONLY, NAMES)}
_KAFKA_ONLY = frozenset({"groupidprefix", "includetimestamp"})
_KAFKA_WAITS = frozenset(
    {"kafkaconsumer.polltimeoutms", "fetchoffset.numretries", "fetchoffset.retryintervalms"}
)
_QUEUE_OPTIONS = frozenset(
    name
    for name in _KNOWN
    if name in _STRATEGIES
    or name.startswith(("starting", "ending"))
    or name in ("includeHeaders", "includeMetadata", "maxRecordsPerPartition", "tags", "sql")
)


class Mode(enum.Enum):
    """What a row of the result is."""

    QUEUE = "queue"  # the messages of topics, by queue
    LOG = "log"  # every record of the commit log, by physical ranges


@dataclass(frozen=True)
class Subscribe:
    """Read all partitions of the named topics."""

    topics: tuple[str, ...]


@dataclass(frozen=True)
class SubscribePattern:
    """Read all partitions of the topics whose whole name matches."""

    pattern: str


@dataclass(frozen=True)
class Assign:
    """Read exactly these partitions."""

    partitions: frozenset[TopicPartition]


Strategy = Subscribe | SubscribePattern | Assign


@dataclass(frozen=True)
class SourceOptions:
    """The checked options of a read.

    Exactly one of `path` and `bootstrap` is set. `strategy` is None if and only if mode is LOG.
    `groups` are those of a cluster that must be there.
    `security` is the path of the client's security file, on the driver and on all executors.
    `assumed_zone` is the session's time zone if a time without a zone was read in it, else None.
    """

    path: str | None
    bootstrap: tuple[str, ...]
    groups: tuple[str, ...]
    security: str | None
    mode: Mode
    strategy: Strategy | None
    limits: Limits
    include_headers: bool
    include_metadata: bool
    min_partitions: int | None
    max_records_per_partition: int | None
    check_crcs: bool
    decompress: bool
    push_filters: bool
    assumed_zone: str | None
    tags: str | None = None
    sql: str | None = None
    patience: Patience = DEFAULT_PATIENCE
    names: Names = Names.QUERY
    may_be_written: bool = False  # the topic is that of a write, which may create it

    @property
    def wanted(self) -> MessageFilter | None:
        """The filter of `tags` or `sql`, which was checked; compiled anew in each process."""
        return make_filter(self.tags, self.sql)


def parse_options(
    raw: Mapping[str, str], session_zone: str | None = None, *, stream: bool = False
) -> SourceOptions:
    """Check the options of a read; times without a zone are in `session_zone`.

    Raises UsageError, which names the option and the remedy.
    """
    options = spell(raw)
    mode, names = _parse_mode(options), Names.of(options)
    instants = {
        name: parse_instant(names.said(name), options[name], session_zone)
        for name in ("startingTimestamp", "endingTimestamp")
        if name in options
    }
    options |= {name: str(instant.timestamp_ms) for name, instant in instants.items()}
    limits = _parse_stream_limits(options) if stream else _parse_limits(options)
    _parse_admission(options)  # its errors: `load()` knows no stream from a batch read
    for name in STREAM_ONLY:
        if name in options and not stream:
            LOGGER.warning("%s option ignored in batch queries", name)
    make_filter(options.get("tags"), options.get("sql"))  # its errors name them
    path, bootstrap = _parse_where(options)
    if mode is Mode.LOG:
        _check_log_mode(options)
    return SourceOptions(
        path=path,
        bootstrap=bootstrap,
        groups=_parse_groups(options, bootstrap),
        security=security_file(options),
        mode=mode,
        strategy=_parse_strategy(options) if mode is Mode.QUEUE else None,
        limits=limits,
        include_headers=parse_bool(options, "includeHeaders", default=False),
        include_metadata=parse_bool(options, "includeMetadata", default=False),
        min_partitions=parse_positive(options, "minPartitions"),
        max_records_per_partition=parse_positive(options, "maxRecordsPerPartition"),
        check_crcs=parse_bool(options, "checkCrcs", default=True),
        decompress=parse_bool(options, "decompress", default=True),
        push_filters=parse_bool(options, "pushFilters", default=False),
        assumed_zone=session_zone if any(i.in_session_zone for i in instants.values()) else None,
        tags=options.get("tags"),
        sql=options.get("sql"),
        patience=parse_patience(options, RETRY_TIMEOUT),
        names=names,
        may_be_written=not any(name in options for name in _STRATEGIES),
    )


def spell(raw: Mapping[str, str]) -> dict[str, str]:
    """Return the options under the names that the documentation has. Raises UsageError."""
    if any(given.lower() == _OF_TABLES for given in raw):
        raise UsageError(f"format 'hastore' does not support tables: {NO_TABLES}")
    options = {}
    for given, value in raw.items():
        lower = given.lower()
        name = _BY_LOWER_NAME.get(lower)
        if name is None:
            raise UsageError(_unknown(given))
        options[name] = value
    return options


def security_file(options: Mapping[str, str]) -> str | None:
    """Return the client's security file: the option, else HASTORE_SECURITY as the driver has it.

    The latter becomes absolute: executors run in folders of their own.
    """
    given, environment = options.get(SECURITY, "").strip(), os.environ.get("HASTORE_SECURITY")
    return given or (os.path.abspath(environment) if environment else None)


def _unknown(given: str) -> str:
    lower = given.lower()
    if lower == "kafka.bootstrap.servers":
        return f"option {given!r} is Kafka's; use {BOOTSTRAP!r} for the addresses of hastore nodes"
    if lower in _KAFKA_WAITS:
        return f"option {given!r} is Kafka's; {RETRY_TIMEOUT!r} is how long to wait for nodes"
    if lower.startswith("kafka.") or lower in _KAFKA_ONLY:
        return f"option {given!r} has no meaning for format 'hastore'; remove it"
    if lower == "paths":
        return "format 'hastore' reads one store at a time; give one path to load()"
    near = difflib.get_close_matches(lower, _BY_LOWER_NAME, n=1)
    if near:
        name = _BY_LOWER_NAME[near[0]]
        return f"unknown option {given!r} for format 'hastore'; did you mean {name!r}?"
    return f"unknown option {given!r} for format 'hastore'; known options: " + ", ".join(_KNOWN)


def _parse_mode(options: Mapping[str, str]) -> Mode:
    text = options.get("mode", Mode.QUEUE.value).strip().lower()
    for mode in Mode:
        if mode.value == text:
            return mode
    raise UsageError(f"option 'mode' is {options['mode']!r}; use 'queue' or 'log'")


def _check_log_mode(options: Mapping[str, str]) -> None:
    refused = sorted(name for name in options if name in _QUEUE_OPTIONS)
    if refused:
        raise UsageError(
            f"option {refused[0]!r} has no meaning in mode=log, which reads every record of the "
            "log; remove it"
        )
    if PATH not in options:
        raise UsageError("mode=log reads a store's directory; set the option 'path'")


def _parse_where(options: Mapping[str, str]) -> tuple[str | None, tuple[str, ...]]:
    if (PATH in options) == (BOOTSTRAP in options):
        which = "Only one" if PATH in options else "One"
        raise UsageError(
            f"{which} of the options {PATH!r} (a store's directory) and {BOOTSTRAP!r} "
            "(addresses of running nodes) must be specified for format 'hastore'"
            + ("" if options else f"; if this is a table: {NO_TABLES}")
        )
    names = Names.of(options)
    if PATH in options:
        path, called = options[PATH], names.said(PATH)
        if not path.strip():
            raise UsageError(f"{called} is empty; name a store's directory")
        if "\0" in path:
            raise UsageError(f"{called} holds a NUL character; name a store's directory")
        # A URI, or Hadoop's form of one: file:/a is file:///a.
        return folder_of_url(path), ()
    servers = tuple(s.strip() for s in options[BOOTSTRAP].split(",") if s.strip())
    if not servers:
        raise UsageError(
            f"{names.said(BOOTSTRAP)} is empty; name at least one node, e.g. tcp://127.0.0.1:10911"
        )
    return None, servers


def _parse_groups(options: Mapping[str, str], bootstrap: tuple[str, ...]) -> tuple[str, ...]:
    """Return the groups of a cluster that must be there; none without the option."""
    if GROUPS not in options:
        return ()
    if not is_cluster_address(",".join(bootstrap)):
        raise UsageError(
            f"option {GROUPS!r} is for all groups of a cluster: set {BOOTSTRAP!r} to "
            "zk://HOST:PORT/CLUSTER, or remove it"
        )
    names = sorted({one.strip() for one in options[GROUPS].split(",")} - {""})
    if not names:
        raise UsageError(f"option {GROUPS!r} is empty; name at least one group, or remove it")
    return tuple(names)


def _parse_strategy(options: Mapping[str, str]) -> Strategy:
    given = [name for name in _STRATEGIES if name in options]
    if not given and TOPIC in options:
        return Subscribe((options[TOPIC].strip(),))
    if len(given) != 1:
        which = (
            "Only one of the following options can"
            if given
            else "One of the following options must"
        )
        raise UsageError(f"{which} be specified for hastore source: {', '.join(_STRATEGIES)}")
    value, names = options[given[0]], Names.of(options)
    called = names.said(given[0])
    if given[0] == "assign":
        if not value.strip().startswith("{"):
            raise UsageError(
                f"No topicpartitions to assign as specified value for option 'assign' is '{value}'"
            )
        return Assign(parse_partitions(value))
    if given[0] == "subscribe":
        topics = tuple(sorted({t.strip() for t in value.split(",") if t.strip()}))
        if not topics and names is not Names.QUERY:
            raise UsageError(f"name a topic: {called} is '{value}'")
        if not topics:
            raise UsageError(
                f"No topics to subscribe to as specified value for {called} is '{value}'"
            )
        return Subscribe(topics)
    pattern = value.strip()
    if not pattern and names is not Names.QUERY:
        raise UsageError(f"give a regular expression: {called} is '{value}'")
    if not pattern:
        raise UsageError(
            f"Pattern to subscribe is empty as specified value for {called} is '{value}'"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(
            f"{called} is not a regular expression: {error}; correct it"
        ) from error
    return SubscribePattern(pattern)


def _parse_limits(options: Mapping[str, str]) -> Limits:
    start = _parse_limit(options, "starting", Bound.EARLIEST)
    if start is Bound.LATEST:
        raise UsageError("starting offset can't be latest for batch queries on hastore")
    if isinstance(start, OffsetsByPartition):
        for key, offset in start.offsets.items():
            if offset is Bound.LATEST:
                raise UsageError(
                    f"startingOffsets for {key} can't be latest for batch queries on hastore"
                )
    end = _parse_limit(options, "ending", Bound.LATEST)
    if end is Bound.EARLIEST:
        raise UsageError("ending offset can't be earliest for batch queries on hastore")
    if isinstance(end, OffsetsByPartition):
        for key, offset in end.offsets.items():
            if offset is Bound.EARLIEST:
                raise UsageError(
                    f"ending offset for {key} can't be earliest for batch queries on hastore"
                )
    check_limits(start, end, Names.of(options))
    return _make_limits(options, start, end)


def _parse_stream_limits(options: Mapping[str, str]) -> Limits:
    for name in options:
        if name.startswith("ending"):
            which = "offset" if name == "endingOffsets" else "timestamp"
            raise UsageError(
                f"ending {which} not valid in streaming queries: remove option {name!r}, or use "
                "read instead of readStream"
            )
    return _make_limits(options, _parse_limit(options, "starting", Bound.LATEST), Bound.LATEST)


def _make_limits(options: Mapping[str, str], start: OffsetLimit, end: OffsetLimit) -> Limits:
    text = options.get("startingOffsetsByTimestampStrategy", "error").strip().lower()
    if text not in ("error", "latest"):
        raise UsageError(
            f"option 'startingOffsetsByTimestampStrategy' is {text!r}; use 'error' or 'latest'"
        )
    fails = parse_bool(options, "failOnDataLoss", default=True)
    return Limits(start, end, NoMatch(text), fails, Names.of(options))


def _parse_limit(options: Mapping[str, str], which: str, default: Bound) -> OffsetLimit:
    """Parse one end of the read.

    A global timestamp takes precedence over timestamps by partition, and these over offsets.
    """
    if (name := f"{which}Timestamp") in options:
        return GlobalTimestamp(int(options[name]))  # parse_options has turned text into digits
    if (name := f"{which}OffsetsByTimestamp") in options:
        return parse_timestamps(options[name].strip(), name)
    name = f"{which}Offsets"
    text = options.get(name, default.value).strip()
    for bound in Bound:
        if text.lower() == bound.value:
            return bound
    return parse_offsets(text, name)


def parse_bool(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return an option that is true or false. Raises UsageError."""
    text = options.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise UsageError(f"option {name!r} is {options[name]!r}; use true or false")
    return text == "true"


def parse_positive(options: Mapping[str, str], name: str) -> int | None:
    """Return an option's whole number above 0; None without the option. Raises UsageError."""
    if name not in options:
        return None
    text = options[name].strip()
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise UsageError(
            f"option {name!r} is {options[name]!r}; it must be a positive whole number"
        )
    if int(text) <= 0:
        raise UsageError(f"{name} must be positive")
    return int(text)


# -- a stream: how much each micro-batch takes -----------------------------------------------------

_DEFAULT_DELAY = "15m"


@dataclass(frozen=True)
class Admission:
    """How many messages a micro-batch may take, and for how many it waits, at most `max_delay_s`.

    None: no limit.
    """

    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_s: float = 900.0


@dataclass(frozen=True)
class StreamOptions:
    """The checked options of a stream."""

    source: SourceOptions
    admission: Admission


def parse_stream_options(raw: Mapping[str, str], session_zone: str | None = None) -> StreamOptions:
    """Check the options of a stream by the rules of Spark's Kafka source. Raises UsageError."""
    source = parse_options(raw, session_zone, stream=True)
    if source.mode is Mode.LOG:
        raise UsageError("mode=log is for batch queries: remove it, or use read")
    if source.push_filters:
        raise UsageError(
            "pushFilters is for batch queries: Spark does not tell a stream its filters; remove "
            "it, or use read"
        )
    return StreamOptions(source, _parse_admission(spell(raw)))


def _parse_admission(options: Mapping[str, str]) -> Admission:
    most = parse_positive(options, "maxOffsetsPerTrigger")
    least = parse_positive(options, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise UsageError(
            f"The value of minOffsetsPerTrigger ({least}) should be less than or equal to "
            f"maxOffsetsPerTrigger ({most})"
        )
    delay_s = parse_duration("maxTriggerDelay", options.get("maxTriggerDelay", _DEFAULT_DELAY))
    return Admission(most, least, delay_s)


def parse_either(raw: Mapping[str, str], session_zone: str | None = None) -> SourceOptions:
    """Check the options of a query that may be a batch read or a stream: Spark does not say.

    Raises UsageError for options that are wrong in both.
    """
    try:
        return parse_stream_options(raw, session_zone).source
    except UsageError:
        return parse_options(raw, session_zone)
