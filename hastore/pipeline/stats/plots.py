"""Plots of the figures of `stats` as PNG files, with times in UTC."""

import os
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

from hastore.pipeline.stats.aggregates import MINUTE_MS, OTHERS
from hastore.pipeline.stats.lag import LagMinute

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # for all eyes
_GREY = "#888888"
_DPI = 120
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
SHOWN_MS = (-62_135_596_800_000, 253_402_300_799_999)  # the years 1 to 9999: matplotlib's dates
_MARKED = 60  # lines of fewer points also show their points

Row = dict[str, Any]
Points = tuple[list[float], list[float]]  # days since 1970; values


def draw(
    folder: str, rows: Sequence[Row], topics: Sequence[str], width_ms: int, lag: Sequence[LagMinute]
) -> list[str]:
    """Draw throughput.png, latency.png and, with samples, lag.png; return their paths.

    `rows` have a topic and a `bin_ms` each, a multiple of `width_ms`.
    """
    os.makedirs(folder, exist_ok=True)
    names = [*topics, OTHERS] if any(row["topic"] == OTHERS for row in rows) else list(topics)
    drawn = [("throughput", _throughput(rows, names, width_ms))]
    drawn.append(("latency", _latency(rows, names, width_ms)))
    if any(one.max_bytes is not None for one in lag):
        drawn.append(("lag", _lag(lag)))
    paths = []
    for name, figure in drawn:
        path = f"{folder}/{name}.png"
        figure.savefig(f"{path}.tmp", dpi=_DPI, format="png")
        os.replace(f"{path}.tmp", path)
        paths.append(path)
    return paths


def _throughput(rows: Sequence[Row], names: Sequence[str], width_ms: int) -> "Figure":
    figure, (messages, volume) = _panels(2)
    most = max(row["bytes"] for row in rows) / (width_ms / 1000)
    unit, divisor = next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])
    for number, name in enumerate(names):
        for axes, field, scale in ((messages, "messages", 1.0), (volume, "bytes", divisor)):
            times, values = _series(rows, name, field, width_ms, missing=0.0)
            rates = [value / scale / (width_ms / 1000) for value in values]
            _line(axes, (times, rates), name, number)
    messages.set_title(f"Throughput by topic, mean of {_interval(width_ms)}")
    messages.set_ylabel("messages a second")
    volume.set_ylabel(f"{unit} a second")
    for axes in (messages, volume):
        axes.set_ylim(bottom=0)
        axes.margins(y=0.1)
    _finish(figure, messages, volume)
    return figure


def _latency(rows: Sequence[Row], names: Sequence[str], width_ms: int) -> "Figure":
    figure, (middle, high) = _panels(2)
    lowest, highest = 0.0, 1.0
    for number, name in enumerate(names):
        for axes, field in ((middle, "latency_p50_ms"), (high, "latency_p99_ms")):
            times, values = _series(rows, name, field, width_ms, missing=float("nan"))
            _line(axes, (times, values), name, number)
            known = [value for value in values if value == value]
            lowest, highest = min([lowest, *known]), max([highest, *known])
    middle.set_title(
        f"Latency from born to stored, percentiles of {_interval(width_ms)}" + _negative_text(rows)
    )
    for axes, text in ((middle, "p50"), (high, "p99")):
        axes.set_ylabel(f"{text}, ms")
        if highest - lowest > 100:
            axes.set_yscale("symlog", linthresh=10)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.set_ylim(lowest * 1.2, highest * 1.2)
        if lowest < 0:
            axes.axhline(0, color="black", linewidth=0.8)
    _finish(figure, middle, high)
    return figure


def _negative_text(rows: Sequence[Row]) -> str:
    negative = sum(row["negative_latencies"] for row in rows)
    total = sum(row["messages"] for row in rows)
    if not negative:
        return ""
    return (
        f"\n{negative:,} of {total:,} messages have a negative latency:"
        " their producer's clock was ahead of the master's"
    )


def _lag(lag: Sequence[LagMinute]) -> "Figure":
    figure, (axes,) = _panels(1)
    names = sorted({one.node for one in lag if one.max_bytes is not None})
    for number, name in enumerate(names):
        mine = [one for one in lag if one.node == name and one.max_bytes is not None]
        times = [_time(one.minute_ms) for one in mine]
        _line(axes, (times, [float(one.max_bytes or 0) for one in mine]), name, number)
    axes.set_title("Replication lag: bytes behind the end of the master's log")
    axes.set_ylabel("bytes, greatest sample of a minute")
    axes.set_yscale("symlog", linthresh=1_000)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    most = max((one.max_bytes or 0 for one in lag), default=0)
    axes.set_ylim(0, None if most else 1_000)
    _finish(figure, axes, time="time of the sample")
    return figure


# -- parts -----------------------------------------------------------------------------------------


def _panels(count: int) -> "tuple[Figure, Sequence[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.2 + 3.1 * count), layout="constrained")
    return figure, list(figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0])


def _line(axes: "Axes", points: Points, name: str, number: int) -> None:
    colour = _GREY if name == OTHERS else _COLOURS[number % len(_COLOURS)]
    style = "--" if number >= len(_COLOURS) and name != OTHERS else "-"
    marker = "o" if len(points[0]) < _MARKED else None
    shown = name if len(name) <= 40 else name[:39] + "…"
    axes.plot(
        *points, color=colour, linestyle=style, linewidth=1.4, marker=marker, markersize=3,
        label=shown.replace("$", r"\$"),
    )  # fmt: skip


def _series(rows: Sequence[Row], name: str, field: str, width_ms: int, *, missing: float) -> Points:
    """Return a field of a topic at regular times; `missing` where there are no messages."""
    starts = [row["bin_ms"] for row in rows]
    known = {row["bin_ms"]: float(row[field]) for row in rows if row["topic"] == name}
    times = range(min(starts), max(starts) + width_ms, width_ms)
    return [_time(at) for at in times], [known.get(at, missing) for at in times]


def _time(moment_ms: int) -> float:
    """Return a time as matplotlib has it: in days since 1970."""
    return moment_ms / 86_400_000


def _interval(width_ms: int) -> str:
    count = width_ms // MINUTE_MS
    return "each minute" if count == 1 else f"each {count:,} minutes"


def _finish(figure: "Figure", *all_axes: "Axes", time: str = "store time") -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    for axes in all_axes:
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        form = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(form)
    low, high = all_axes[-1].get_xlim()  # the axes share it; its margins may leave the years
    all_axes[-1].set_xlim(max(low, _time(SHOWN_MS[0])), min(high, _time(SHOWN_MS[1])))
    all_axes[-1].set_xlabel(f"{time}, UTC")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False
    )
