"""`hastore pipeline compact`: the latest message of each key of a topic."""

from typing import TYPE_CHECKING

import click

from hastore.cli.common import counted, print_text, with_json
from hastore.cli.pipeline.common import (
    SessionOptions,
    check_spark,
    run_job,
    with_path,
    with_servers,
    with_session,
)
from hastore.errors import UsageError

if TYPE_CHECKING:
    from hastore.pipeline.compact import CompactSummary


@click.command("compact", short_help="Keep the latest message of each key of a topic.")
@with_path
@with_servers
@click.option("--topic", required=True, metavar="T", help="The topic to compact.")
@click.option(
    "--target",
    required=True,
    metavar="DIR",
    help="The folder of the files; or s3://BUCKET/FOLDER, as AWS_ENDPOINT_URL and keys say.",
)
@click.option(
    "--without-key",
    type=click.Choice(["drop", "keep"]),
    help="What to do with messages that have no key (default: drop).",
)
@click.option("--to-topic", metavar="T", help="Write the changes to this new topic, too.")
@click.option("--to-servers", metavar="ADDR,ADDR", help="The nodes of that topic.")
@click.option(
    "--compression",
    type=click.Choice(["snappy", "zstd", "lz4", "gzip", "none"]),
    default="snappy",
    show_default=True,
    help="The compression of the files.",
)
@click.option(
    "--allow-data-loss",
    is_flag=True,
    help="Go on when retention has removed messages that were not read yet, or --to-topic cannot "
    "take one.",
)
@with_session
@with_json
def compact_command(
    path: str | None,
    servers: str | None,
    topic: str,
    target: str,
    without_key: str | None,
    to_topic: str | None,
    to_servers: str | None,
    compression: str,
    allow_data_loss: bool,
    session: SessionOptions,
    as_json: bool,
) -> int:
    """Write the latest message of each key of a topic to Parquet files.

    As in Kafka, a message with an empty body deletes its key. The files are DIR/topic=T/*.parquet.
    Run the command again to bring them up to date: it reads only what has come since, and replaces
    the files when it ends. It takes over --without-key, --to-topic and --to-servers from the first
    run.
    """
    check_spark()
    from hastore.pipeline.compact import CompactOptions, Destination, check_compact, compact_with
    from hastore.pipeline.where import Where

    where = Where(path, servers, (topic,))
    if (to_topic is None) != (to_servers is None):
        raise UsageError("give --to-topic and --to-servers together")
    destination = Destination(to_topic, to_servers) if to_topic and to_servers else None
    keep = None if without_key is None else without_key == "keep"
    options = CompactOptions(keep, compression, not allow_data_loss, destination)
    return run_job(
        "compact",
        lambda start, progress: compact_with(start, where, target, options, progress=progress),
        session,
        check=lambda: check_compact(where, target, options),
        as_json=as_json,
        show=_show,
    )


def _show(summary: "CompactSummary") -> None:
    print_text(
        f"{summary.target} has the latest messages of {summary.keys:,} keys of {summary.topic} "
        f"({counted(summary.files, 'file')}, {summary.bytes:,} bytes); "
        f"{summary.read:,} messages were read in {summary.seconds:.1f} s"
    )
    if summary.published:
        print_text(f"{summary.published:,} messages were written to the topic")
    if summary.published_again:
        print_text(
            f"{summary.published_again:,} of these again: messages of the topic were gone, by "
            "retention or with the topic"
        )
    if summary.dropped_headers:
        print_text(
            f"{counted(summary.dropped_headers, 'header')} of them cannot be sent, and "
            "only the files have them"
        )
    if summary.left_out:
        print_text(
            f"{counted(summary.left_out, 'message')} cannot be written to the topic, and only the "
            "files have them"
        )
    if summary.without_key:
        print_text(f"{summary.without_key:,} messages without a key were kept")
    if summary.lost_messages:
        print_text(f"{summary.lost_messages:,} messages were removed before they were read")
