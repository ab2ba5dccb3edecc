"""What a soak has sampled, and the rule that tells a bounded series from a growing one. Pure.

The first part of a run, WARM_UP of it, counts for nothing: tables and caches fill. Of the rest,

    first, last    the greatest value in its first and in its last quarter
    per hour       the slope of its second half by Theil and Sen: the median of the slopes between
                   any two points, with an interval of 95 % by Kendall's statistic

A series grows if the lower end of that interval is above what its Rule allows an hour, and `last`
exceeds `first` by more than its slack. The points are the medians of short windows: samples that
follow each other are no independent measurements, and one high sample is no growth. A saw-tooth,
as retention makes it, has no slope. A series that still grows slower than the rule allows within
the run's time is not seen: a longer run sees less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 0.25  # of the run, but at most
WARM_UP_MOST_S = 900.0
WINDOWS = 40  # at most, in the second half
LEAST_WINDOWS = 5
_Z = 1.96  # of 95 %
_HOUR_S = 3_600.0
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Rule:
    """What a series may do: so much more an hour, and `slack` within the run."""

    per_hour: float
    slack: float


# Sizes in MiB. A leak of 1 kB for each of 30 connections a second is 100 MiB an hour; one object
# for each of 100 requests a second is 360,000 blocks.
RULES = {
    "memory": Rule(24.0, 12.0),
    "heap": Rule(16.0, 8.0),
    "blocks": Rule(120_000.0, 40_000.0),
    "threads": Rule(6.0, 6.0),
    "other sockets": Rule(20.0, 20.0),
    "open files": Rule(100.0, 40.0),
    "store files": Rule(100.0, 40.0),
    "store": Rule(24.0, 12.0),
    "topics": Rule(20.0, 20.0),
    "groups": Rule(60.0, 40.0),
}


@dataclass(frozen=True, slots=True)
class Trend:
    """A slope per hour, and the ends of its interval of 95 %."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a series did. `trend` is None, and nothing is judged, with too few samples."""

    node: int
    name: str
    first: float
    last: float
    trend: Trend | None
    rule: Rule | None  # None: the series is shown, but may do what it likes

    @property
    def grows(self) -> bool:
        """Whether it grows by more than its rule allows."""
        if self.rule is None or self.trend is None:
            return False
        return self.trend.low > self.rule.per_hour and self.last - self.first > self.rule.slack


Points = Sequence[tuple[float, float]]  # time in s, value


def warm_up_s(length_s: float) -> float:
    """Return how much of a run counts for nothing."""
    return min(length_s * WARM_UP, WARM_UP_MOST_S)


def trend_of(points: Points) -> Trend | None:
    """Return the slope of points per hour; None for fewer than LEAST_WINDOWS windows of them."""
    count = min(WINDOWS, len(points) // 3)
    if count < LEAST_WINDOWS:
        return None
    cuts = [len(points) * number // count for number in range(count + 1)]
    windows = [points[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]
    middles = [
        (statistics.median(at for at, _ in one), statistics.median(value for _, value in one))
        for one in windows
    ]
    slopes = sorted(
        (right[1] - left[1]) / (right[0] - left[0]) * _HOUR_S
        for number, left in enumerate(middles)
        for right in middles[number + 1 :]
    )
    spread = _Z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0)
    low = max(0, int((len(slopes) - spread) / 2.0))
    return Trend(slopes[low], statistics.median(slopes), slopes[-1 - low])


def judge(node: int, name: str, points: Points, *, restarted: bool) -> Verdict:
    """Return what a series did; that of a node that was `restarted` meanwhile is not judged.

    The points are in the order of time, and there is at least one.
    """
    begin = points[0][0]
    after = begin + warm_up_s(points[-1][0] - begin)
    judged = [point for point in points if point[0] >= after] or points[-1:]
    quarter = max(1, len(judged) // 4)
    return Verdict(
        node, name,
        max(value for _, value in judged[:quarter]),
        max(value for _, value in judged[-quarter:]),
        trend_of(judged[len(judged) // 2 :]),
        None if restarted else RULES.get(name),
    )  # fmt: skip


COLUMNS = ["node", "what", "first", "last", "per hour", "95 %", "may", "verdict"]


def cells(one: Verdict) -> list[str]:
    """Return a verdict as the texts of a row."""
    trend, rule = one.trend, one.rule
    slope = "" if trend is None else f"{_figure(trend.middle)}"
    interval = "" if trend is None else f"{_figure(trend.low)} to {_figure(trend.high)}"
    verdict = "not judged" if rule is None or trend is None else "grows" if one.grows else "bounded"
    may = "" if rule is None else f"{_figure(rule.per_hour)}/h"
    shown = [_figure(one.first), _figure(one.last), slope, interval, may, verdict]
    return [str(one.node), one.name, *shown]


def _figure(number: float) -> str:
    if abs(number) >= 100 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.1f}"
