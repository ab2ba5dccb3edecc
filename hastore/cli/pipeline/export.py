"""`hastore pipeline export`: topics to files or a table, incrementally and exactly once."""

from typing import TYPE_CHECKING

import click

from hastore.cli.common import Seconds, counted, print_text, size_from_mib, with_json
from hastore.cli.pipeline.common import (
    SessionOptions,
    check_spark,
    run_job,
    with_session,
    with_where,
)

if TYPE_CHECKING:
    from hastore.pipeline.export import ExportSummary


def _needed(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Ask for a target unless a catalog says where the table is."""
    if value is None and not context.params.get("catalog") and not context.resilient_parsing:
        raise click.MissingParameter(ctx=context, param=option)
    return value


@click.command("export", short_help="Export topics to Parquet, each message exactly once.")
@with_where
@click.option(
    "--target",
    metavar="DIR",
    callback=_needed,
    help="The folder of the files; or s3://BUCKET/FOLDER, as AWS_ENDPOINT_URL and keys say. With "
    "--catalog it is where a new table lies, and may be left out.",
)
@click.option(
    "--headers", is_flag=True, default=None, help="Add the column headers: the users' properties."
)
@click.option(
    "--metadata",
    is_flag=True,
    default=None,
    help="Add physicalOffset, msgId, tags, bornTimestamp ...",
)
@click.option(
    "--compression",
    type=click.Choice(["snappy", "zstd", "lz4", "gzip", "none"]),
    default="snappy",
    show_default=True,
    help="The compression of the files.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["parquet", "orc", "delta", "iceberg"]),
    default="parquet",
    show_default=True,
    help="Plain Parquet or ORC files, or a Delta or Iceberg table (extras `delta`, `iceberg`).",
)
@click.option(
    "--catalog",
    metavar="NAME",
    is_eager=True,
    help="With --format iceberg: a catalog of pyiceberg's configuration (default: one in DIR).",
)
@click.option("--table", metavar="NS.NAME", help="The table in that catalog.")
@click.option(
    "--json-schema",
    metavar="DDL",
    help="Decode JSON bodies into these columns, e.g. 'carrier STRING, delay INT'; the word "
    "infer takes the schema of the first bodies.",
)
@click.option(
    "--drop-value",
    is_flag=True,
    default=None,
    help="With --json-schema: leave out the bodies that were decoded; others are in _corrupt.",
)
@click.option(
    "--no-decompress",
    is_flag=True,
    help="Leave compressed bodies as they are stored: for one that does not decompress.",
)
@click.option("--merge", is_flag=True, help="Merge small files at the end.")
@click.option(
    "--allow-data-loss",
    is_flag=True,
    help="Go on when retention has removed messages that were not exported yet.",
)
@click.option(
    "--file-size",
    callback=lambda context, option, text: size_from_mib(text, context, option),
    default="128MiB",
    show_default=True,
    metavar="SIZE",
    help="About the most that a file holds, before compression: 256MiB, 1GiB (256 is 256MiB).",
)
@click.option(
    "--commit-every",
    type=Seconds(),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Make what is done visible at this interval; a run that is stopped keeps it.",
)
@with_session
@with_json
def export_command(
    path: str | None,
    servers: str | None,
    topics: tuple[str, ...],
    pattern: str | None,
    exclude_internal: bool,
    target: str | None,
    headers: bool | None,
    metadata: bool | None,
    compression: str,
    form: str,
    catalog: str | None,
    table: str | None,
    json_schema: str | None,
    drop_value: bool | None,
    no_decompress: bool,
    merge: bool,
    allow_data_loss: bool,
    file_size: int,
    commit_every: float,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Export the messages that the target does not have yet to Parquet files.

    The files are DIR/topic=T/date=YYYY-MM-DD/*.parquet, by the UTC date of the store time. Run the
    command again to add what has come since: it takes over --headers, --metadata, --json-schema and
    --drop-value from the first run. It may be killed at any moment: the next run finishes
    or undoes what was left, so that each message is in the files exactly once.
    """
    check_spark()
    from hastore.pipeline.export import ExportOptions, check_export, export_with
    from hastore.pipeline.where import Where

    where = Where(path, servers, topics, pattern, exclude_internal)
    options = ExportOptions(
        headers,
        metadata,
        compression,
        fail_on_data_loss=not allow_data_loss,
        file_bytes=file_size,
        commit_every_s=commit_every,
        json_schema=json_schema,
        keep_value=None if drop_value is None else not drop_value,
        decompress=not no_decompress,
        merge=merge,
        format=form,
        catalog=catalog,
        table=table,
    )
    return run_job(
        "export",
        lambda start, progress: export_with(start, where, target, options, progress=progress),
        session,
        check=lambda: check_export(where, target, options),
        as_json=as_json,
        show=_show,
    )


def _show(summary: "ExportSummary") -> None:
    from hastore.pipeline.where import is_internal

    rate = summary.messages / summary.seconds if summary.seconds else 0.0
    print_text(
        f"{summary.messages:,} messages exported to {summary.target} in {summary.seconds:.1f} s, "
        f"{rate:,.0f} a second: {counted(summary.files, 'file')}, {summary.bytes:,} bytes"
    )
    if summary.taken_over:
        print_text("as in the first run: " + ", ".join(summary.taken_over))
    for topic, count in summary.messages_by_topic.items():
        print_text(f"  {topic}: {count:,}")
    internal = [topic for topic in summary.messages_by_topic if is_internal(topic)]
    if internal:
        print_text(
            f"messages that wait, were rolled back or are repeated are in {', '.join(internal)}: "
            "give --exclude-internal to leave such topics out"
        )
    if summary.corrupt_bodies:
        print_text(f"{summary.corrupt_bodies:,} bodies do not fit the schema: see column _corrupt")
    if summary.merged_files:
        print_text(f"{summary.merged_files:,} small files were merged into {summary.merged_into:,}")
    if summary.lost_messages:
        print_text(f"{summary.lost_messages:,} messages were removed before they were exported")
    if not summary.messages:
        print_text("the target has all messages already")
