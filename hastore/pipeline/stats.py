"""The job `stats`: messages, bytes, latency and lag, by topic and minute; plots of them.

The latency of a message is its store time minus its born time, in ms. It includes the difference
between the clocks of producer and master, so it can be negative. Percentiles come from a histogram
whose bounds are the same everywhere, so that partial results can be merged: values up to 127 ms are
exact, and a larger one is rounded to the middle of a bucket, 0.8 % away at most.

Each message of RocketMQ's inner batches counts, as it is a row of the source: with the bytes that
it would have as a record of its own, since a batch's bytes belong to no single one of its messages.

Lag is what was sampled of running nodes (lag.py): a log does not tell how late its copies were.
"""

import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from hastore.errors import HastoreError, UsageError
from hastore.pipeline.lag import MINUTE_MS, POINTS_MAX, LagLines, sample_lag
from hastore.pipeline.plots import OTHERS, SHOWN_MS, draw
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.running import Start, Stopwatch, check_session, run_action
from hastore.pipeline.where import Where
from hastore.spark.options.names import Names
from hastore.spark.options.offsets import parse_instant
from hastore.spark.read.backend import spans_of
from hastore.spark.read.planning import open_backend, select

SAMPLE_MAX_S = 366 * 86_400.0
TIMESTAMP_MAX_MS = (2**63 - 1) // 1000  # the source's times are not farther from 1970
# "timestamp" alone may have no zone: spark.sql.timestampType.
SOURCE_SCHEMA = "topic string, timestamp timestamp_ltz, bornTimestamp timestamp_ltz, size int"
_EXACT = 128  # latencies below it have buckets of their own
_BITS = 6  # larger ones share a bucket if their 7 leading binary digits are the same
_PERCENTILES = (0.5, 0.9, 0.99)

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
    lag_only: bool = False  # only the lag of running nodes; no message is read

    def limits(self) -> dict[str, str]:
        """Return the times as options of the source; those without a zone are in UTC.

        The session need not be in UTC, so the source gets milliseconds. Raises UsageError.
        """
        times = {"startingTimestamp": self.since, "endingTimestamp": self.until}
        limits = {
            name: str(parse_instant(Names.COMMAND.said(name), text, "UTC").timestamp_ms)
            for name, text in times.items()
            if text is not None
        }
        if self.since is not None:  # a queue may have no message since then
            limits["startingOffsetsByTimestampStrategy"] = "latest"
        return limits


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
    check_session(spark)
    return stats_with(lambda: spark, where, options, progress)


def stats_with(
    start: Start, where: Where, options: StatsOptions, progress: JobProgress | None = None
) -> StatsSummary:
    """Compute as `run_stats` does; call `start`, after the samples, only if there are messages."""
    shown = progress or JobProgress()
    watch = Stopwatch(start)
    check_stats(where, options)
    lag = sample_lag(where.servers, options.sample_s, shown)
    if options.lag_only or not (options.parquet or _has_messages(where, options)):
        found = _Found(plots=_draw([], [], MINUTE_MS, lag.lines, options))
    else:
        found = _of_messages(watch.start(), where, options, lag.lines, shown)
    return StatsSummary(
        source=where.path or where.servers or "",
        topics=[_topic_fields(row) for row in found.topics],
        minutes=[
            _minute_fields(row) for row in sorted(found.latest, key=lambda one: one["minute"])
        ],
        lag=[asdict(one) | {"minute": _text(one.minute_ms)} for one in lag.minutes],
        parquet=options.parquet,
        plots=found.plots,
        not_plotted=found.not_plotted,
        seconds=watch.seconds,
    )


@dataclass
class _Found:
    """What the messages told."""

    topics: Sequence[Row] = ()
    latest: Sequence[Row] = ()  # topics and minutes
    plots: list[str] = field(default_factory=list)
    not_plotted: int = 0


def _has_messages(where: Where, options: StatsOptions) -> bool:
    parsed = where.parsed(options.limits())
    assert parsed.strategy is not None
    with open_backend(parsed) as backend:
        chosen = backend.readable(select(parsed.strategy, backend))
        ranges = parsed.limits.resolve(spans_of(chosen), backend.offset_by_time)
    return any(span.size for span in ranges.values())


def _of_messages(
    spark: SparkSession, where: Where, options: StatsOptions, lag: LagLines, shown: JobProgress
) -> _Found:
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
    return _Found(rows, sorted(latest, key=lambda one: one["minute"]), plots, not_plotted)


def check_stats(where: Where, options: StatsOptions) -> None:
    """Check what needs no Spark. Raises UsageError, StoreError, UnreachableError."""
    if options.sample_s and where.servers is None:
        raise UsageError("--sample needs --servers: a store alone does not know its replicas")
    if options.sample_s > SAMPLE_MAX_S:
        raise UsageError("--sample has no end within a year; give a number of seconds")
    if options.lag_only and where.servers is None:
        raise UsageError("--lag-only needs --servers: a store alone does not know its replicas")
    if options.lag_only and options.parquet is not None:
        raise UsageError("--parquet has the figures of messages; leave it out, or --lag-only")
    if options.parquet is not None and os.path.exists(options.parquet):
        raise UsageError(f"{options.parquet} exists; give a folder that does not")
    if options.plots is not None:
        if os.path.exists(options.plots) and not os.path.isdir(options.plots):
            raise UsageError(f"{options.plots} is a file; give a folder")
        try:
            import matplotlib  # noqa: F401
        except ImportError as missing:
            raise UsageError("plots need matplotlib: pip install matplotlib") from missing
    if options.lag_only:
        where.parsed()
    else:
        where.check(options.limits())
    if options.plots is not None:  # now, and not after minutes of work
        try:
            os.makedirs(options.plots, exist_ok=True)
        except OSError as failure:
            raise UsageError(
                f"--plots {options.plots}: the folder cannot be made ({failure.strerror}); give "
                "one that this user may make"
            ) from failure


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
    lag: LagLines,
    options: StatsOptions,
    progress: JobProgress,
) -> tuple[list[str], int]:
    """Draw the plots; return their paths, and how many messages they leave out."""
    if options.plots is None:
        return [], 0

    everything = sum(int(row["messages"]) for row in topics)
    if topics and not all(SHOWN_MS[0] <= at_ms <= SHOWN_MS[1] for at_ms in _span(topics)):
        buckets = buckets.where(F.col("minute_ms").between(*SHOWN_MS))
        topics = run_action(spark, "prepare the plots", lambda: _topics(buckets), progress)
    left_out = everything - sum(int(row["messages"]) for row in topics)
    if not topics:
        return _draw([], [], MINUTE_MS, lag, options), left_out
    first, last = _span(topics)
    width_ms = MINUTE_MS * -(-(last - first + MINUTE_MS) // (MINUTE_MS * POINTS_MAX))
    names = [str(row["topic"]) for row in topics[:_TOPICS_PLOTTED]]
    points = run_action(
        spark, "prepare the plots", bins(buckets, names, width_ms).collect, progress
    )
    return _draw([row.asDict() for row in points], names, width_ms, lag, options), left_out


def _draw(
    rows: list[dict[str, Any]],
    names: list[str],
    width_ms: int,
    lag: LagLines,
    options: StatsOptions,
) -> list[str]:
    return [] if options.plots is None else draw(options.plots, rows, names, width_ms, lag)


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
