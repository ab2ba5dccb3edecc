"""Parse the options of a stream: those of a read, and how much each micro-batch may take."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.errors import UsageError
from hastore.spark.options.source_options import (
    Mode,
    SourceOptions,
    parse_options,
    parse_positive,
    spell,
)

_DEFAULT_DELAY = "15m"
_UNITS_S = {
    **{"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0},
    "": 1e-3,  # Spark takes a number without a unit as milliseconds
}


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
    options = spell(raw)
    most = parse_positive(options, "maxOffsetsPerTrigger")
    least = parse_positive(options, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise UsageError(
            f"The value of minOffsetsPerTrigger ({least}) should be less than or equal to "
            f"maxOffsetsPerTrigger ({most})"
        )
    delay_s = _parse_duration("maxTriggerDelay", options.get("maxTriggerDelay", _DEFAULT_DELAY))
    return StreamOptions(source, Admission(most, least, delay_s))


def parse_either(raw: Mapping[str, str], session_zone: str | None = None) -> SourceOptions:
    """Check the options of a query that may be a batch read or a stream: Spark does not say.

    Raises UsageError for options that are wrong in both.
    """
    try:
        return parse_stream_options(raw, session_zone).source
    except UsageError:
        return parse_options(raw, session_zone)


def _parse_duration(name: str, text: str) -> float:
    """Return a duration in seconds, from Spark's form of it, such as 15m or 500ms."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([a-z]*)", text.strip().lower())
    unit = _UNITS_S.get(found[2]) if found else None
    if found is None or unit is None:
        raise UsageError(f"option {name!r} is {text!r}; use a duration such as 500ms, 30s or 15m")
    return int(found[1]) * unit
