"""The job `stats`: messages, bytes, latency and lag, by topic and minute; plots of them.

The latency of a message is its store time minus its born time, in ms. It includes the difference
between the clocks of producer and master, so it can be negative. Percentiles come from a histogram
whose bounds are the same everywhere, so that partial results can be merged: values up to 127 ms are
exact, and a larger one is rounded to the middle of a bucket, 0.8 % away at most.

Lag is a distance in the log: how many bytes the master has appended that a node does not have. The
log has one order for all topics, so a topic has no lag of its own, and a log does not tell how late
its copies were: only what was sampled is known. The nodes answer one after the other, so a sample
is off by what was appended in between.
"""

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from hastore.client.consumer.admin import Admin
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import HastoreError, UsageError
from hastore.fs.private_files import UMASK_MODE, open_fresh
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.running import run_action
from hastore.pipeline.where import Where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MINUTE_MS = 60_000
TIMESTAMP_MAX_MS = (2**63 - 1) // 1000  # the source's times are not farther from 1970
SOURCE_SCHEMA = "topic string, timestamp timestamp, bornTimestamp timestamp, size int"
OTHERS = "other topics"
_EXACT = 128  # latencies below it have buckets of their own
_BITS = 6  # larger ones share a bucket if their 7 leading binary digits are the same
_PERCENTILES = (0.5, 0.9, 0.99)


_SAMPLE_EVERY_MS = 1_000
_BINS_MAX = 480  # points of a line in a plot
_TOPICS_PLOTTED = 6
_TOPICS_MAX = 10_000  # in the summary


@dataclass(frozen=True)
class StatsOptions:
    """What to do with the figures; times limit the messages by store time, as ISO text or ms."""

    since: str | None = None
    until: str | None = None
    parquet: str | None = None
    plots: str | None = None
    sample_s: float = 0.0  # how long to sample the lag of running nodes; 0: once
    last_minutes: int = 20  # rows of topics and minutes in the summary; 0: none

    def limits(self) -> dict[str, str]:
        """Return the times as options of the source."""
        limits = {"startingTimestamp": self.since, "endingTimestamp": self.until}
        return {name: value for name, value in limits.items() if value is not None}


@dataclass(frozen=True)
class StatsSummary:
    """The figures; `minutes` has only the latest rows, the Parquet file has all.

    Topics and minutes have the columns of the Parquet file, with times in UTC. A latency is the
    store time minus the born time, in ms, so it is negative if the producer's clock was ahead.
    """

    source: str
    topics: list[dict[str, Any]]  # by number of messages, the greatest first
    minutes: list[dict[str, Any]]
    lag: list[dict[str, Any]]  # of running nodes, by minute; empty for a path
    parquet: str | None
    plots: list[str]
    not_plotted: int  # messages stored outside of the years 1 to 9999, which plots cannot show
    seconds: float


def run_stats(
    spark: SparkSession, where: Where, options: StatsOptions, progress: JobProgress | None = None
) -> StatsSummary:
    """Compute the figures, and write the Parquet file and the plots that are asked for.

    Raises UsageError, StoreError, UnreachableError. After an error no file is left half-written.
    """
    shown = progress or JobProgress()
    began_ms = SYSTEM_CLOCK.monotonic_ms()
    check_stats(where, options)
    lag = _lag(where, options, shown)
    reader = spark.read.format("hastore").schema(SOURCE_SCHEMA)
    reader = reader.options(**where.options(options.limits()))
    buckets = by_bucket(reader.load()).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        rows = run_action(spark, "read the messages", lambda: _topics(buckets), shown)
        table = minutes(buckets)
        if options.parquet is not None:
            _write_parquet(spark, table, options.parquet, shown)
        latest: Sequence[Row] = ()
        if options.last_minutes:
            newest = table.withColumn("minute", F.unix_millis("minute"))
            newest = newest.orderBy(F.desc("minute"), "topic").limit(options.last_minutes)
            latest = run_action(spark, "order the minutes", newest.collect, shown)
        plots, not_plotted = _plot(spark, buckets, rows, lag, options, shown)
    finally:
        buckets.unpersist()
    return StatsSummary(
        source=where.path or where.servers or "",
        topics=[_topic_fields(row) for row in rows],
        minutes=[_minute_fields(row) for row in sorted(latest, key=lambda one: one["minute"])],
        lag=[asdict(one) | {"minute": _text(one.minute_ms)} for one in lag],
        parquet=options.parquet,
        plots=plots,
        not_plotted=not_plotted,
        seconds=round((SYSTEM_CLOCK.monotonic_ms() - began_ms) / 1000, 3),
    )


def check_stats(where: Where, options: StatsOptions) -> None:
    """Check what needs no Spark. Raises UsageError, StoreError, UnreachableError."""
    if options.sample_s and where.servers is None:
        raise UsageError("--sample needs --servers: a store alone does not know its replicas")
    if options.parquet is not None and os.path.exists(options.parquet):
        raise UsageError(f"{options.parquet} exists; give a folder that does not")
    if options.plots is not None:
        if os.path.exists(options.plots) and not os.path.isdir(options.plots):
            raise UsageError(f"{options.plots} is a file; give a folder")
        try:
            import matplotlib  # noqa: F401
        except ImportError as missing:
            raise UsageError("plots need matplotlib: pip install matplotlib") from missing
    where.check(options.limits())


# -- lag -------------------------------------------------------------------------------------------


def _lag(where: Where, options: StatsOptions, progress: JobProgress) -> "list[LagMinute]":
    """Sample the nodes' offsets each second, once at least."""
    if where.servers is None:
        return []
    samples: list[LagSample] = []
    begin_ms = SYSTEM_CLOCK.monotonic_ms()
    progress.begin("sample the lag", round(options.sample_s) or 1, "seconds")
    with Admin(where.servers) as admin:
        while True:
            statuses = [info.status for info in admin.status()]
            samples += lag_of(statuses, SYSTEM_CLOCK.wall_ms())
            progress.advance(1)
            spent_ms = SYSTEM_CLOCK.monotonic_ms() - begin_ms
            if spent_ms + _SAMPLE_EVERY_MS > options.sample_s * 1000:
                return by_minute(samples)
            time.sleep((_SAMPLE_EVERY_MS - spent_ms % _SAMPLE_EVERY_MS) / 1000)


# -- results ---------------------------------------------------------------------------------------


def _topics(buckets: DataFrame) -> list[Row]:
    table = grouped(buckets, "topic").orderBy(F.desc("messages"), "topic")
    rows = table.limit(_TOPICS_MAX + 1).collect()
    if len(rows) > _TOPICS_MAX:
        raise UsageError(f"there are more than {_TOPICS_MAX:,} topics; give --topic or --pattern")
    return rows


def _topic_fields(row: Row) -> dict[str, Any]:
    fields = row.asDict()
    first, last = int(fields.pop("first_ms")), int(fields.pop("last_ms"))
    seconds = (last - first + MINUTE_MS) / 1000
    return {
        **fields,
        "first_minute": _text(first),
        "last_minute": _text(last),
        "messages_per_second": fields["messages"] / seconds,
    }


def _minute_fields(row: Row) -> dict[str, Any]:
    fields = row.asDict()
    return {**fields, "minute": _text(int(fields["minute"]))}


def _text(moment_ms: int) -> str:
    """Return a minute in UTC; a record may contain any number."""
    try:
        moment = datetime.fromtimestamp(moment_ms / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{moment_ms} ms"
    return moment.strftime("%Y-%m-%dT%H:%MZ")


def _write_parquet(
    spark: SparkSession, table: DataFrame, target: str, progress: JobProgress
) -> None:
    """Write the table to a folder that appears when it is complete."""
    target = os.path.abspath(target)
    temporary = f"{target}.{uuid.uuid4().hex}.tmp"
    try:
        write = table.coalesce(1).write.parquet
        run_action(spark, "write Parquet", lambda: write(f"file://{temporary}"), progress)
        os.rename(temporary, target)
    except OSError as failure:
        raise HastoreError(f"{target}: {failure}") from failure
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _plot(
    spark: SparkSession,
    buckets: DataFrame,
    topics: Sequence[Row],
    lag: "Sequence[LagMinute]",
    options: StatsOptions,
    progress: JobProgress,
) -> tuple[list[str], int]:
    """Draw the plots; return their paths, and how many messages they leave out."""
    if options.plots is None or not topics:
        return [], 0

    everything = sum(int(row["messages"]) for row in topics)
    if not all(SHOWN_MS[0] <= minute_ms <= SHOWN_MS[1] for minute_ms in _span(topics)):
        buckets = buckets.where(F.col("minute_ms").between(*SHOWN_MS))
        topics = run_action(spark, "prepare the plots", lambda: _topics(buckets), progress)
    left_out = everything - sum(int(row["messages"]) for row in topics)
    if not topics:
        return [], left_out
    first, last = _span(topics)
    width_ms = MINUTE_MS * -(-(last - first + MINUTE_MS) // (MINUTE_MS * _BINS_MAX))
    names = [str(row["topic"]) for row in topics[:_TOPICS_PLOTTED]]
    points = run_action(
        spark, "prepare the plots", bins(buckets, names, width_ms).collect, progress
    )
    rows = [row.asDict() for row in points]
    return draw(options.plots, rows, names, width_ms, lag), left_out


def _span(topics: Sequence[Row]) -> tuple[int, int]:
    """Return the first and the last minute."""
    first = min(int(row["first_ms"]) for row in topics)
    return first, max(int(row["last_ms"]) for row in topics)


# -- counts and latencies, as aggregates of Spark --------------------------------------------------


def by_bucket(messages: DataFrame) -> DataFrame:
    """Return the messages, with the columns of SOURCE_SCHEMA, by topic, minute and bucket."""
    stored = F.unix_millis("timestamp")
    latency = stored - F.unix_millis("bornTimestamp")
    rows = messages.select(
        "topic",
        (stored - F.pmod(stored, F.lit(MINUTE_MS))).alias("minute_ms"),
        latency.alias("latency"),
        "size",
    )
    return (
        rows.withColumn("bucket", _bucket(F.col("latency")))
        .groupBy("topic", "minute_ms", "bucket")
        .agg(
            F.count(F.lit(1)).alias("messages"),
            F.sum("size").alias("bytes"),
            F.min("latency").alias("lowest"),
            F.max("latency").alias("highest"),
            # As whole numbers, the sum of some million born times of 0 would be an error.
            F.sum(F.col("latency").cast("double")).alias("total"),
            F.count_if(F.col("latency") < 0).alias("negative"),
        )
    )


def _bucket(latency: Column) -> Column:
    """Return the middle of the bucket of a latency."""
    size = F.abs(latency)
    width = F.expr(f"shiftleft(1L, cast(floor(log2(abs(latency))) as int) - {_BITS})")
    middle = F.floor(size / width) * width + F.floor(width / 2)
    return F.when(size < _EXACT, latency).otherwise(F.signum(latency) * middle).cast("double")


def grouped(buckets: DataFrame, *columns: Column | str) -> DataFrame:
    """Merge the buckets into one row for each value of `columns`."""
    percentiles = F.percentile("bucket", list(_PERCENTILES), F.col("messages"))
    merged = buckets.groupBy(*columns).agg(
        F.sum("messages").alias("messages"),
        F.sum("bytes").alias("bytes"),
        F.min("lowest").alias("latency_min_ms"),
        (F.sum("total") / F.sum("messages")).alias("latency_mean_ms"),
        percentiles.alias("percentiles"),
        F.max("highest").alias("latency_max_ms"),
        F.sum("negative").alias("negative_latencies"),
        F.min("minute_ms").alias("first_ms"),
        F.max("minute_ms").alias("last_ms"),
    )
    for number, share in enumerate(_PERCENTILES):
        name = f"latency_p{share * 100:g}_ms"
        value = F.greatest(F.col("percentiles")[number], F.col("latency_min_ms"))
        merged = merged.withColumn(name, F.least(value, F.col("latency_max_ms")))
    return merged.drop("percentiles")


def minutes(buckets: DataFrame) -> DataFrame:
    """Return a row for each topic and minute, ordered, as the Parquet file has them."""
    table = grouped(buckets, "topic", "minute_ms")
    # The minute of the least time that a timestamp can hold begins before it.
    minute = F.greatest("minute_ms", F.lit(-TIMESTAMP_MAX_MS))
    return table.select(
        "topic",
        F.timestamp_millis(minute).alias("minute"),
        *("messages", "bytes", "latency_min_ms", "latency_mean_ms", "latency_p50_ms"),
        *("latency_p90_ms", "latency_p99_ms", "latency_max_ms", "negative_latencies"),
    ).orderBy("minute", "topic")


def bins(buckets: DataFrame, topics: list[str], width_ms: int) -> DataFrame:
    """Return a row for each topic and interval of `width_ms`, other topics added up."""
    topic = F.when(F.col("topic").isin(topics), F.col("topic")).otherwise(OTHERS)
    start = F.col("minute_ms") - F.pmod(F.col("minute_ms"), F.lit(width_ms))
    return grouped(
        buckets.withColumn("topic", topic).withColumn("bin_ms", start), "topic", "bin_ms"
    ).orderBy("bin_ms", "topic")


# -- the lag of running nodes ----------------------------------------------------------------------


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


# -- plots, with times in UTC ----------------------------------------------------------------------

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # for all eyes
_GREY = "#888888"
_DPI = 120
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
SHOWN_MS = (-62_135_596_800_000, 253_402_300_799_999)  # the years 1 to 9999: matplotlib's dates
_MARKED = 60  # lines of fewer points also show their points

FigureRow = dict[str, Any]
Points = tuple[list[float], list[float]]  # days since 1970; values


def draw(
    folder: str,
    rows: Sequence[FigureRow],
    topics: Sequence[str],
    width_ms: int,
    lag: Sequence[LagMinute],
) -> list[str]:
    """Draw throughput.png, latency.png and, with samples, lag.png; return their paths.

    `rows` have a topic and a `bin_ms` each, a multiple of `width_ms`.
    """
    os.makedirs(folder, exist_ok=True)
    names = [*topics, OTHERS] if any(row["topic"] == OTHERS for row in rows) else list(topics)
    drawn = [("throughput", _throughput(rows, names, width_ms))]
    drawn.append(("latency", _latency(rows, names, width_ms)))
    if any(one.max_bytes is not None for one in lag):
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
    _finish(figure, messages, volume)
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
    _finish(figure, middle, high)
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


def _draw_lag(lag: Sequence[LagMinute]) -> "Figure":
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
