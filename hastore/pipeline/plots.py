"""The plots of the job `stats`: throughput, latency and lag as PNG files, with times in UTC."""

import os
from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

from hastore.fs.private_files import UMASK_MODE, open_fresh
from hastore.pipeline.lag import MINUTE_MS, LagLines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OTHERS = "other topics"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # for all eyes
_GREY = "#888888"
_DPI = 120
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
SHOWN_MS = (-62_135_596_800_000, 253_402_300_799_999)  # the years 1 to 9999: matplotlib's dates
_LINEAR_BYTES = 1_000  # of lag: greater values are on a logarithmic scale
_LEGEND_CHARACTERS = 142  # that fit into a line of a figure's width
_SHOWN_LEAST = 6  # intervals on the axis of time
_NAMED = "named"  # the lines that the legend names
_MARKED = 60  # lines of fewer points also show their points

FigureRow = dict[str, Any]
Points = tuple[list[float], list[float]]  # days since 1970; values


def draw(
    folder: str,
    rows: Sequence[FigureRow],
    topics: Sequence[str],
    width_ms: int,
    lag: LagLines,
) -> list[str]:
    """Draw throughput.png and latency.png of rows and lag.png of samples; return their paths.

    `rows` have a topic and a `bin_ms` each, a multiple of `width_ms`. What has nothing to show is
    not drawn.
    """
    os.makedirs(folder, exist_ok=True)
    names = [*topics, OTHERS] if any(row["topic"] == OTHERS for row in rows) else list(topics)
    drawn = []
    if rows:
        drawn.append(("throughput", _throughput(rows, names, width_ms)))
        drawn.append(("latency", _latency(rows, names, width_ms)))
    if lag.known:
        drawn.append(("lag", _draw_lag(lag)))
    paths = []
    for name, figure in drawn:
        path = f"{folder}/{name}.png"
        with open_fresh(f"{path}.tmp", UMASK_MODE) as file:
            figure.savefig(file, dpi=_DPI, format="png")
        os.replace(f"{path}.tmp", path)
        paths.append(path)
    return paths


def _throughput(rows: Sequence[FigureRow], names: Sequence[str], width_ms: int) -> "Figure":
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
    _finish(figure, messages, volume, times=_starts(rows), width_ms=width_ms)
    return figure


def _latency(rows: Sequence[FigureRow], names: Sequence[str], width_ms: int) -> "Figure":
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
    _finish(figure, middle, high, times=_starts(rows), width_ms=width_ms)
    return figure


def _negative_text(rows: Sequence[FigureRow]) -> str:
    negative = sum(row["negative_latencies"] for row in rows)
    total = sum(row["messages"] for row in rows)
    if not negative:
        return ""
    return (
        f"\n{negative:,} of {total:,} messages have a negative latency:"
        " their producer's clock was ahead of the master's"
    )


def _draw_lag(lag: LagLines) -> "Figure":
    figure, (axes,) = _panels(1)
    times = [at_ms for line in lag.nodes.values() for at_ms in line]
    most = 0
    for number, (name, line) in enumerate(sorted(lag.nodes.items())):
        values = [float("nan") if value is None else float(value) for value in line.values()]
        _line(axes, ([_time(at_ms) for at_ms in line], values), name, number)
        most = max(most, *(value or 0 for value in line.values()))
    axes.set_title("Replication lag: bytes behind the end of the master's log")
    axes.set_ylabel(f"bytes, greatest sample of {_interval(lag.width_ms)}")
    axes.set_ylim(0, None if most > _LINEAR_BYTES else _LINEAR_BYTES)
    if most > _LINEAR_BYTES:
        axes.set_yscale("symlog", linthresh=_LINEAR_BYTES)
        # matplotlib's own ticks would name 0 and 100, one above the other.
        axes.set_yticks([0, *(10**power for power in range(3, len(str(most))))])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _finish(figure, axes, times=times, width_ms=lag.width_ms, time="time of the sample")
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
        label=shown.replace("$", r"\$"), gid=_NAMED,
        clip_on=False,  # a line at 0 lies on the axis
    )  # fmt: skip


def _series(
    rows: Sequence[FigureRow], name: str, field: str, width_ms: int, *, missing: float
) -> Points:
    """Return a field of a topic at regular times; `missing` where there are no messages."""
    starts = [row["bin_ms"] for row in rows]
    known = {row["bin_ms"]: float(row[field]) for row in rows if row["topic"] == name}
    times = range(min(starts), max(starts) + width_ms, width_ms)
    return [_time(at) for at in times], [known.get(at, missing) for at in times]


def _time(moment_ms: int) -> float:
    """Return a time as matplotlib has it: in days since 1970."""
    return moment_ms / 86_400_000


def _starts(rows: Sequence[FigureRow]) -> list[int]:
    return [row["bin_ms"] for row in rows]


def _interval(width_ms: int) -> str:
    units = (("day", 86_400_000), ("hour", 3_600_000), ("minute", MINUTE_MS), ("second", 1_000))
    name, unit_ms = next(unit for unit in units if width_ms % unit[1] == 0)
    count = width_ms // unit_ms
    return f"each {name}" if count == 1 else f"each {count:,} {name}s"


def _finish(
    figure: "Figure",
    *all_axes: "Axes",
    times: Sequence[int],
    width_ms: int,
    time: str = "store time",
) -> None:
    """Set the axis of time, which ends a little beyond the intervals, and the legend."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    first, last = min(times), max(times)
    # Of a single interval matplotlib would show the years around it.
    margin_ms = max((last - first) // 40, width_ms, (_SHOWN_LEAST * width_ms - last + first) // 2)
    all_axes[-1].set_xlim(  # the axes share it
        _time(max(first - margin_ms, SHOWN_MS[0])), _time(min(last + margin_ms, SHOWN_MS[1]))
    )
    for axes in all_axes:
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        form = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_formatter(form)
    all_axes[-1].set_xlabel(f"{time}, UTC")
    # matplotlib's own list lacks the names that begin with an underscore.
    handles = [line for line in all_axes[0].get_lines() if line.get_gid() == _NAMED]
    labels = [str(line.get_label()) for line in handles]
    fitting = _LEGEND_CHARACTERS // (max(map(len, labels)) + 9)  # 9 for the line beside a name
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, fitting), frameon=False)
