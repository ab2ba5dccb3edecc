"""`hastore pipeline stats`: messages, bytes, latency and lag by topic and minute."""

from typing import TYPE_CHECKING, Any

import click

from hastore.cli.common import (
    Folder,
    Seconds,
    fitting_table,
    print_text,
    terminal_columns,
    with_json,
)
from hastore.cli.pipeline.common import (
    SessionOptions,
    check_spark,
    run_job,
    with_session,
    with_where,
)

if TYPE_CHECKING:
    from hastore.pipeline.stats import StatsSummary


@click.command("stats", short_help="Messages, bytes, latency and lag by topic and minute.")
@with_where
@click.option(
    "--since", metavar="TIME", help="From this store time on: ISO 8601 (UTC) or ms since 1970."
)
@click.option("--until", metavar="TIME", help="Before this store time.")
@click.option(
    "--parquet", type=Folder(), metavar="DIR", help="Write a row for each topic and minute to DIR."
)
@click.option("--plots", type=Folder(), metavar="DIR", help="Write PNG plots to DIR.")
@click.option(
    "--sample",
    "sample_s",
    type=Seconds(),
    default=None,
    metavar="SECONDS",
    help="With --servers: sample the lag each second for this time (default: once).",
)
@click.option(
    "--lag-only", is_flag=True, help="With --servers: only sample the lag, and start no Spark."
)
@click.option(
    "--minutes",
    "last_minutes",
    type=click.IntRange(0, 100_000),
    default=20,
    show_default=True,
    metavar="N",
    help="Print this many rows, the latest, of topics and minutes.",
)
@with_session
@with_json
def stats_command(
    path: str | None,
    servers: str | None,
    topics: tuple[str, ...],
    pattern: str | None,
    exclude_internal: bool,
    since: str | None,
    until: str | None,
    parquet: str | None,
    plots: str | None,
    sample_s: float | None,
    lag_only: bool,
    last_minutes: int,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Count messages and bytes, and measure latency, by topic and minute of the store time.

    The latency is the store time minus the born time. It includes the difference between the clocks
    of producer and master, so it can be negative. The lag of running nodes is sampled: it is a
    distance in the log, the same for all topics.
    """
    check_spark()
    from hastore.pipeline.stats import StatsOptions, check_stats, stats_with
    from hastore.pipeline.where import Where

    where = Where(path, servers, topics, pattern, exclude_internal)
    options = StatsOptions(since, until, parquet, plots, sample_s or 0.0, last_minutes, lag_only)
    return run_job(
        "stats",
        lambda start, progress: stats_with(start, where, options, progress),
        session,
        check=lambda: check_stats(where, options),
        as_json=as_json,
        show=_show,
    )


_FIGURES = (
    ("messages", "messages", ",.0f"),
    ("MB", "bytes", ",.1f"),
    ("p50 ms", "latency_p50_ms", ",.0f"),
    ("p99 ms", "latency_p99_ms", ",.0f"),
    ("max ms", "latency_max_ms", ",.0f"),
    ("min ms", "latency_min_ms", ",.0f"),
    ("negative", "negative_latencies", ",.0f"),
)


def _show(summary: "StatsSummary") -> None:
    if not (summary.topics or summary.lag):
        print_text(f"{summary.source}: no messages")
    if summary.topics:
        head = ["topic", *(name for name, _, _ in _FIGURES), "from", "to"]
        _print_table(head, [_cells(one, "first_minute", "last_minute") for one in summary.topics])
    if summary.minutes:
        print_text("")
        head = ["topic", *(name for name, _, _ in _FIGURES)]
        rows = [[one["minute"], *_cells(one)] for one in summary.minutes]
        _print_table(["minute", *head], rows)
    if summary.lag:
        print_text("")
        head = ["minute", "node", "samples", "mean bytes behind", "max bytes behind", "end offset"]
        _print_table(head, [_lag_cells(one) for one in summary.lag])
    for written in (summary.parquet, *summary.plots):
        if written is not None:
            print_text(f"written: {written}")
    if summary.not_plotted:
        print_text(
            f"{summary.not_plotted:,} messages are not in the plots: their store times are outside "
            "of the years 1 to 9999"
        )


def _cells(one: dict[str, Any], *more: str) -> list[str]:
    scaled = {**one, "bytes": one["bytes"] / 1e6}
    figures = [format(scaled[field], form) for _, field, form in _FIGURES]
    return [str(one["topic"]), *figures, *(str(one[name]) for name in more)]


def _lag_cells(one: dict[str, Any]) -> list[str]:
    mean, most = one["mean_bytes"], one["max_bytes"]
    return [
        one["minute"],
        one["node"],
        str(one["samples"]),
        "unknown" if mean is None else f"{mean:,.0f}",
        "unknown" if most is None else f"{most:,}",
        f"{one['end_offset']:,}",
    ]


def _print_table(head: list[str], rows: list[list[str]]) -> None:
    left = {"topic", "minute", "node", "from", "to"}
    right = [name for name in head if name not in left]
    for line in fitting_table(head, rows, keep=3, right=right, width=terminal_columns()):
        print_text(line)
