"""Count messages, bytes and latencies by topic and minute; sample the lag of running nodes."""

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from hastore.client.admin import Admin
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import HastoreError, UsageError
from hastore.pipeline.progress import NoProgress, Progress
from hastore.pipeline.running import run_action
from hastore.pipeline.stats.aggregates import (
    MINUTE_MS,
    SOURCE_SCHEMA,
    bins,
    by_bucket,
    grouped,
    minutes,
)
from hastore.pipeline.stats.lag import LagMinute, LagSample, by_minute, lag_of
from hastore.pipeline.where import Where

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
    spark: SparkSession, where: Where, options: StatsOptions, progress: Progress | None = None
) -> StatsSummary:
    """Compute the figures, and write the Parquet file and the plots that are asked for.

    Raises UsageError, StoreError, UnreachableError. After an error no file is left half-written.
    """
    shown = progress or NoProgress()
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


def _lag(where: Where, options: StatsOptions, progress: Progress) -> list[LagMinute]:
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


def _write_parquet(spark: SparkSession, table: DataFrame, target: str, progress: Progress) -> None:
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
    lag: Sequence[LagMinute],
    options: StatsOptions,
    progress: Progress,
) -> tuple[list[str], int]:
    """Draw the plots; return their paths, and how many messages they leave out."""
    if options.plots is None or not topics:
        return [], 0
    from hastore.pipeline.stats.plots import SHOWN_MS, draw

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
