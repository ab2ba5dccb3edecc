"""Which messages a query's filters can match: what a plan may leave out. Pure.

Spark evaluates every filter again on the rows that it gets. So a filter that is not understood
here is ignored, and one that is may be widened: nothing that matches is ever left out. The columns
`topic`, `partition`, `offset`, `timestamp` and `physicalOffset` are never null.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NAMED = frozenset({"topic", "partition"})


@dataclass(frozen=True)
class Interval:
    """The whole numbers `[low, high)`; None: no bound."""

    low: int | None = None
    high: int | None = None

    def within(self, low: int | None, high: int | None) -> "Interval":
        """Return the numbers of this interval that are also in `[low, high)`."""
        lows = [bound for bound in (self.low, low) if bound is not None]
        highs = [bound for bound in (self.high, high) if bound is not None]
        return Interval(max(lows, default=None), min(highs, default=None))


@dataclass(frozen=True)
class WantedMessages:
    """What the filters of a query can match; at first, everything.

    `times_ms` are store times. `named` are filters of topic and partition.
    """

    offsets: Interval = Interval()
    times_ms: Interval = Interval()
    physical_offsets: Interval = Interval()
    named: tuple[Filter, ...] = field(default=())
    nothing: bool = False

    def narrow(self, filters: Iterable[Filter]) -> "WantedMessages":
        """Return what these filters, all of them, can match too."""
        wanted = self
        for each in filters:
            wanted = wanted._narrow_one(each)
        return wanted

    def keeps(self, topic: str, partition: int) -> bool:
        """Whether messages of this partition can match."""
        values = {"topic": topic, "partition": partition}
        return all(_may_match(each, values[_column(each)]) for each in self.named)

    def _narrow_one(self, given: Filter) -> "WantedMessages":
        column = _column(given)
        if column in _NAMED:
            return replace(self, named=(*self.named, given))
        unit = {"offset": 1, "physicaloffset": 1, "timestamp": 1000}.get(column)
        if unit is None:
            return self
        if isinstance(given, IsNull):
            return replace(self, nothing=True)
        bounds = _bounds(given, unit)
        if bounds is None:
            return self
        if column == "offset":
            return replace(self, offsets=self.offsets.within(*bounds))
        if column == "timestamp":
            return replace(self, times_ms=self.times_ms.within(*bounds))
        return replace(self, physical_offsets=self.physical_offsets.within(*bounds))


def _column(given: Filter) -> str:
    """Return the lower-case name of a filter's column, "" if there is no single one."""
    while isinstance(given, Not):
        given = given.child
    path: tuple[str, ...] = getattr(given, "attribute", ())
    return str(path[0]).lower() if len(path) == 1 else ""


def _bounds(given: Filter, unit: int) -> tuple[int | None, int | None] | None:
    """Return the `[low, high)` outside of which nothing matches; None if nothing is known.

    The column has a multiple of `unit` (timestamps: 1000 us); the result is divided by it.
    """
    if isinstance(given, In):
        numbers = [_number(value) for value in given.value if value is not None]
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return None
        return _ceil(min(known), unit), max(known) // unit + 1
    number = _number(getattr(given, "value", None))
    if number is None:
        return None
    match given:
        case EqualTo() | EqualNullSafe():
            return _ceil(number, unit), number // unit + 1
        case GreaterThan():
            return number // unit + 1, None
        case GreaterThanOrEqual():
            return _ceil(number, unit), None
        case LessThan():
            return None, _ceil(number, unit)
        case LessThanOrEqual():
            return None, number // unit + 1
    return None


def _number(value: Any) -> int | None:
    """Return an offset, or a time in microseconds since 1970; None for anything else."""
    if isinstance(value, datetime):
        return None if value.tzinfo is None else (value - _EPOCH) // _MICROSECOND
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ceil(number: int, unit: int) -> int:
    return -(-number // unit)


def _may_match(given: Filter, value: Any) -> bool:
    """Whether a filter can be true of a value; True if that is not known."""
    if isinstance(given, Not):
        child = given.child
        if isinstance(child, EqualTo | EqualNullSafe):
            return bool(child.value != value)
        return value not in child.value if isinstance(child, In) else True
    if isinstance(given, IsNull):
        return False
    if isinstance(given, In):
        return value in given.value
    wanted: Any = getattr(given, "value", None)
    if type(wanted) is not type(value):
        return True
    match given:
        case EqualTo() | EqualNullSafe():
            return bool(value == wanted)
        case GreaterThan():
            return bool(value > wanted)
        case GreaterThanOrEqual():
            return bool(value >= wanted)
        case LessThan():
            return bool(value < wanted)
        case LessThanOrEqual():
            return bool(value <= wanted)
        case StringStartsWith():
            return str(value).startswith(wanted)
        case StringEndsWith():
            return str(value).endswith(wanted)
        case StringContains():
            return wanted in value
    return True
