"""What filters can match: nothing that matches may be left out."""

import pickle
import random
from datetime import UTC, datetime, timedelta, timezone

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from hastore.spark.options.filters import Interval, WantedMessages

OFFSET, TIME, TOPIC, PARTITION = ("offset",), ("timestamp",), ("topic",), ("partition",)
T = datetime(2026, 11, 20, 12, tzinfo=UTC)
T_MS = int(T.timestamp()) * 1000
MICROSECOND = timedelta(microseconds=1)


def wanted(*filters):
    return WantedMessages().narrow(filters)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (EqualTo(OFFSET, 5), Interval(5, 6)),
        (EqualNullSafe(OFFSET, 5), Interval(5, 6)),
        (GreaterThan(OFFSET, 5), Interval(6, None)),
        (GreaterThanOrEqual(OFFSET, 5), Interval(5, None)),
        (LessThan(OFFSET, 5), Interval(None, 5)),
        (LessThanOrEqual(OFFSET, 5), Interval(None, 6)),
        (In(OFFSET, (9, 3, None, 5)), Interval(3, 10)),
        (In(OFFSET, (None,)), Interval()),
        (In(OFFSET, (3, "x")), Interval()),
        (EqualTo(OFFSET, None), Interval()),
        (EqualNullSafe(OFFSET, None), Interval()),
        (EqualTo(OFFSET, True), Interval()),
        (EqualTo(OFFSET, 5.0), Interval()),
        (Not(EqualTo(OFFSET, 5)), Interval()),
        (Not(GreaterThan(OFFSET, 5)), Interval()),
        (IsNotNull(OFFSET), Interval()),
        (EqualTo(("value", "offset"), 5), Interval()),
        (GreaterThan(("OFFSET",), 5), Interval(6, None)),
    ],
)
def test_the_bounds_of_an_offset(given, expected):
    assert wanted(given).offsets == expected
    assert wanted(given) == WantedMessages(offsets=expected)


def test_several_filters_are_all_required():
    found = wanted(GreaterThan(OFFSET, 5), LessThan(OFFSET, 20), GreaterThan(OFFSET, 9))
    assert found.offsets == Interval(10, 20)
    assert wanted(LessThan(OFFSET, 3), GreaterThan(OFFSET, 9)).offsets == Interval(10, 3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GreaterThan(TIME, T), (1, None)),
        (GreaterThan(TIME, T - MICROSECOND), (0, None)),
        (GreaterThan(TIME, T + MICROSECOND), (1, None)),
        (GreaterThanOrEqual(TIME, T), (0, None)),
        (GreaterThanOrEqual(TIME, T + MICROSECOND), (1, None)),
        (LessThan(TIME, T), (None, 0)),
        (LessThan(TIME, T + MICROSECOND), (None, 1)),
        (LessThanOrEqual(TIME, T), (None, 1)),
        (LessThanOrEqual(TIME, T - MICROSECOND), (None, 0)),
        (EqualTo(TIME, T), (0, 1)),
        (EqualTo(TIME, T + MICROSECOND), (1, 1)),  # no store time has microseconds
        (EqualTo(TIME, T.astimezone(timezone(timedelta(hours=5)))), (0, 1)),
        (In(TIME, (T, T + timedelta(seconds=1))), (0, 1001)),
    ],
)
def test_times_are_milliseconds_and_literals_microseconds(given, expected):
    bounds = [None if bound is None else T_MS + bound for bound in expected]
    assert wanted(given).times_ms == Interval(*bounds)


def test_a_time_without_a_zone_is_ignored():
    assert wanted(GreaterThan(TIME, T.replace(tzinfo=None))) == WantedMessages()


def test_times_before_1970_round_down():
    before = datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC)
    assert wanted(GreaterThan(TIME, before)).times_ms == Interval(0, None)
    assert wanted(LessThanOrEqual(TIME, before)).times_ms == Interval(None, 0)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (EqualTo(TOPIC, "b"), "b"),
        (EqualNullSafe(TOPIC, "b"), "b"),
        (In(TOPIC, ("a", "c", None)), "ac"),
        (Not(EqualTo(TOPIC, "b")), "ac"),
        (Not(In(TOPIC, ("b", "c"))), "a"),
        (GreaterThan(TOPIC, "a"), "bc"),
        (LessThanOrEqual(TOPIC, "b"), "ab"),
        (StringStartsWith(TOPIC, "b"), "b"),
        (StringEndsWith(TOPIC, "c"), "c"),
        (StringContains(TOPIC, "a"), "a"),
        (Not(StringContains(TOPIC, "a")), "abc"),
        (IsNull(TOPIC), ""),
        (Not(IsNull(TOPIC)), "abc"),
        (IsNotNull(TOPIC), "abc"),
        (EqualTo(TOPIC, None), "abc"),
        (EqualTo(TOPIC, 5), "abc"),
    ],
)
def test_topics(given, kept):
    assert [topic for topic in "abc" if wanted(given).keeps(topic, 0)] == list(kept)


def test_partitions():
    found = wanted(GreaterThanOrEqual(PARTITION, 2), LessThan(PARTITION, 9))
    found = found.narrow([In(PARTITION, (1, 2, 3, 12)), Not(EqualTo(PARTITION, 3))])
    assert [n for n in range(20) if found.keeps("t", n)] == [2]
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301


def test_null_offsets_and_times_do_not_exist():
    assert wanted(IsNull(OFFSET)).nothing and wanted(IsNull(TIME)).nothing
    assert wanted(IsNull(("key",)), EqualTo(("value",), b"")) == WantedMessages()


def test_no_row_that_matches_is_left_out():
    """Random filters against rows, evaluated one by one."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    tests = {
        EqualTo: lambda a, b: a == b,
        GreaterThan: lambda a, b: a > b,
        GreaterThanOrEqual: lambda a, b: a >= b,
        LessThan: lambda a, b: a < b,
        LessThanOrEqual: lambda a, b: a <= b,
    }
    rows = [(n, T + timedelta(milliseconds=n)) for n in range(20)]
    for _ in range(500):
        kinds = rng.choices(list(tests), k=2)
        columns = rng.choices((0, 1), k=2)
        values = [
            T + rng.randrange(-3, 60) * 500 * MICROSECOND if column else rng.randrange(-2, 22)
            for column in columns
        ]
        filters = [
            kind(TIME if column else OFFSET, value)
            for kind, column, value in zip(kinds, columns, values, strict=True)
        ]
        found = wanted(*filters)
        for row in rows:
            matches = all(
                tests[kind](row[column], value)
                for kind, column, value in zip(kinds, columns, values, strict=True)
            )
            inside = [
                (bounds.low is None or number >= bounds.low)
                and (bounds.high is None or number < bounds.high)
                for bounds, number in (
                    (found.offsets, row[0]),
                    (found.times_ms, T_MS + row[0]),
                )
            ]
            assert all(inside) == matches, (filters, row)
