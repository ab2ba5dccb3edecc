"""`hastore pipeline index`: build a store's queues and key index anew, or verify them."""

from typing import TYPE_CHECKING

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    Folder,
    counted,
    print_error,
    print_note,
    print_text,
    with_json,
)
from hastore.cli.pipeline.common import SessionOptions, check_spark, run_job, with_session

if TYPE_CHECKING:
    from hastore.pipeline.index import IndexSummary

_COUNT = click.IntRange(1, 100_000_000)


@click.command("index", short_help="Rebuild queues and key index from the log.")
@click.option(
    "--path",
    required=True,
    type=Folder(),
    metavar="DIR",
    help="The store: the folder with commitlog/ or dledger-*/.",
)
@click.option(
    "--output", type=Folder(), metavar="DIR",
    help="Write to this new folder; the store may be in use then.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare the store's files with its log, and write nothing to the store.",
)
@click.option(
    "--work",
    type=Folder(),
    metavar="DIR",
    help="With --verify: the folder for the files to compare with, about as large as the store's"
    " queues and index (default: a new one under TMPDIR).",
)
@click.option(
    "--queues-only",
    is_flag=True,
    help="Leave the key index out, for a RocketMQ broker with messageIndexEnable=false.",
)
@click.option(
    "--queue-units", "units", type=_COUNT, metavar="N", help="Units of a queue file (300000)."
)
@click.option(
    "--index-slots", "slots", type=_COUNT, metavar="N", help="Slots of an index file (5000000)."
)
@click.option(
    "--index-entries",
    "entries",
    type=click.IntRange(2, 100_000_000),
    metavar="N",
    help="Entries of an index file (20000000).",
)
@click.option(
    "--delay-levels",
    metavar="TEXT",
    help="The delays of delayed messages by level, as store.message_delay_level (by default those"
    " that the node has noted in the store, else RocketMQ's).",
)
@with_session
@with_json
def index_command(
    path: str,
    output: str | None,
    verify: bool,
    work: str | None,
    queues_only: bool,
    units: int | None,
    slots: int | None,
    entries: int | None,
    delay_levels: str | None,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Build the consume queues and the key index of a store anew from its commit log.

    The store is hastore's or RocketMQ's, and no node may use it: the new files are put in place at
    the end, in one go. With --output they are written elsewhere, and with --verify only compared;
    exit code 4 if they differ. The sizes of the files are those that the store has now, else
    RocketMQ's defaults, which are also hastore's.
    """
    check_spark()
    from hastore.pipeline.index import IndexOptions, check_index, run_index

    options = IndexOptions(
        path,
        output=output,
        verify=verify,
        work=work,
        index=not queues_only,
        units=units,
        slots=slots,
        entries=entries,
        delay_levels=delay_levels,
    )
    return run_job(
        "index",
        lambda start, progress: run_index(start(), options, progress),
        session,
        check=lambda: check_index(options),
        as_json=as_json,
        show=_show,
        judge=_judge,
    )


def _judge(summary: "IndexSummary") -> int:
    for name in summary.refused_queues:
        print_note(f"{name}: the units of removed records contradict the log, and were not kept")
    if summary.delays_from == "default":
        print_note(
            f"delayed messages are due after RocketMQ's default delays ({summary.delay_levels}):"
            " the store does not say which its node has; give --delay-levels if"
            " store.message_delay_level or messageDelayLevel is set"
        )
    if summary.difference is not None:
        print_error(summary.difference)
        return DIFFER
    return DONE


def _show(summary: "IndexSummary") -> None:
    queues = counted(summary.queues, "consume queue")
    if summary.batch_queues:
        queues += f" and {summary.batch_queues:,} queues of inner batches"
    what = "agree with" if summary.verified else "were built from"
    if summary.difference is None:
        print_text(
            f"{queues} and {counted(summary.index_files, 'index file')} {what} the log"
            f" [{summary.first_offset:,}, {summary.end_offset:,}): {summary.records:,} records,"
            f" {summary.units:,} units, {summary.keys:,} keys, in {summary.seconds:,.1f} s"
        )
    if summary.kept_queues:
        print_text(
            f"{summary.kept_queues:,} queues begin with units of records that retention has removed"
        )
