"""How far running nodes are behind their master, sampled each second; by minute, and for a plot.

Lag is a distance in the log: how many bytes the master has appended that a node does not have. The
log has one order for all topics, so a topic has no lag of its own. The nodes answer one after the
other, so a sample is off by what was appended in between.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hastore.client.consumer.admin import Admin
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import UnreachableError
from hastore.pipeline.progress import JobProgress

log = logging.getLogger(__name__)
MINUTE_MS = 60_000
SAMPLE_EVERY_MS = 1_000
POINTS_MAX = 480  # of a line in a plot
# Intervals of a plot, each a multiple of the one before, so that points can be merged.
_WIDTHS_S = (1, 2, 10, 30, 60, 120, 600, 1_800, 3_600, 7_200, 21_600, 86_400)


@dataclass(frozen=True)
class LagSample:
    """How far a node was behind the master at a moment; None if that is unknown."""

    at_ms: int
    node: str
    end_offset: int
    behind_bytes: int | None


@dataclass(frozen=True)
class LagMinute:
    """The samples of a node in one minute; bytes are None if no sample knew them."""

    minute_ms: int
    node: str
    samples: int
    end_offset: int  # of the last sample
    mean_bytes: float | None
    max_bytes: int | None


def lag_of(statuses: Sequence[dict[str, Any]], at_ms: int) -> list[LagSample]:
    """Return a sample for each node, and one named "unconfirmed" for the master's own log.

    "unconfirmed" is what the master has appended beyond the confirmed offset: what a failover may
    lose. Classic slaves, which do not answer themselves, appear as the master sees them.
    """
    masters = [one for one in statuses if one["role"] != "SLAVE" and one["writable"]]
    master = max(masters, key=lambda one: one["epoch"], default=None)
    end = None if master is None else int(master["max_offset"])
    found = []
    for one in statuses:
        own = int(one["max_offset"])
        name = f"node {one['node']}"
        if one is master:
            behind = max(0, own - int(one["confirmed_offset"]))
            found.append(LagSample(at_ms, "unconfirmed", int(one["confirmed_offset"]), behind))
        else:
            found.append(LagSample(at_ms, name, own, None if end is None else max(0, end - own)))
    if master is not None and end is not None:
        for slave in master["slaves"]:
            if slave.get("classic") and slave.get("ack_offset") is not None:
                ack = int(slave["ack_offset"])
                found.append(LagSample(at_ms, f"slave {slave['address']}", ack, max(0, end - ack)))
    return found


def by_minute(samples: Sequence[LagSample]) -> list[LagMinute]:
    """Merge samples by node and minute, in the order of time."""
    groups: dict[tuple[int, str], list[LagSample]] = {}
    for sample in samples:
        minute = sample.at_ms - sample.at_ms % MINUTE_MS
        groups.setdefault((minute, sample.node), []).append(sample)
    merged = []
    for (minute, node), group in sorted(groups.items()):
        known = [one.behind_bytes for one in group if one.behind_bytes is not None]
        merged.append(
            LagMinute(
                minute,
                node,
                len(group),
                group[-1].end_offset,
                sum(known) / len(known) if known else None,
                max(known, default=None),
            )
        )
    return merged


@dataclass(frozen=True)
class LagLines:
    """The lines of a plot: for each node, by the start of an interval, the greatest bytes in it.

    None means that no sample of the interval knew them.
    """

    width_ms: int
    nodes: Mapping[str, Mapping[int, int | None]]

    @property
    def known(self) -> bool:
        """Whether there is a point to draw."""
        return any(value is not None for line in self.nodes.values() for value in line.values())


@dataclass
class LagSeries:
    """The samples of a run of any length, in bounded memory: merged as they come."""

    _minutes: list[LagMinute] = field(default_factory=list)
    _minute: list[LagSample] = field(default_factory=list)  # the samples of the minute that goes on
    _step: int = 0  # in _WIDTHS_S
    _lines: dict[str, dict[int, int | None]] = field(default_factory=dict)

    def add(self, samples: Sequence[LagSample]) -> None:
        """Take the samples of one moment, in the order of time."""
        for one in samples:
            if self._minute and one.at_ms // MINUTE_MS != self._minute[-1].at_ms // MINUTE_MS:
                self._minutes += by_minute(self._minute)
                self._minute = []
            self._minute.append(one)
            self._put(one.node, one.at_ms, one.behind_bytes)
        while self._step + 1 < len(_WIDTHS_S) and any(
            len(line) > POINTS_MAX for line in self._lines.values()
        ):
            self._step += 1
            lines, self._lines = self._lines, {}
            for node, line in lines.items():
                for at_ms, value in line.items():
                    self._put(node, at_ms, value)

    @property
    def minutes(self) -> list[LagMinute]:
        """Return the samples by minute and node."""
        return [*self._minutes, *by_minute(self._minute)]

    @property
    def lines(self) -> LagLines:
        """Return the samples for a plot, of about POINTS_MAX points a node at most."""
        return LagLines(self._width_ms, self._lines)

    @property
    def _width_ms(self) -> int:
        return _WIDTHS_S[self._step] * 1_000

    def _put(self, node: str, at_ms: int, value: int | None) -> None:
        line = self._lines.setdefault(node, {})
        start = at_ms - at_ms % self._width_ms
        before = line.get(start)
        line[start] = value if before is None else max(before, value or 0)


def sample_lag(servers: str | None, sample_s: float, progress: JobProgress) -> LagSeries:
    """Ask the nodes each second for `sample_s`, once at least; without nodes there is no sample.

    Raises UnreachableError if no node answers at first. Once one has, a time in which none does
    only has no samples: a restart must not take what hours have found.
    """
    series = LagSeries()
    if servers is None:
        return series
    begin_ms = SYSTEM_CLOCK.monotonic_ms()
    progress.begin("sample the lag", round(sample_s) or 1, "seconds")
    answered: bool | None = None  # the last time; None before the first
    with Admin(servers) as admin:
        while True:
            try:
                statuses = [info.status for info in admin.status()]
            except UnreachableError as silence:
                if answered is None:
                    raise
                if answered:
                    log.warning("no node answers; there is no sample until one does: %s", silence)
                answered = False
            else:
                answered = True
                series.add(lag_of(statuses, SYSTEM_CLOCK.wall_ms()))
            progress.advance(1)
            spent_ms = SYSTEM_CLOCK.monotonic_ms() - begin_ms
            if spent_ms + SAMPLE_EVERY_MS > sample_s * 1000:
                return series
            time.sleep((SAMPLE_EVERY_MS - spent_ms % SAMPLE_EVERY_MS) / 1000)
