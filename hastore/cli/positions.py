"""`hastore positions`: import and export consumers' positions in a RocketMQ broker's format."""

import os
import pathlib
import stat
import sys
from dataclasses import dataclass

import click

from hastore.cli.common import (
    DONE,
    bootstrap_addresses,
    print_json,
    print_note,
    with_bootstrap,
    with_json,
)
from hastore.cli.completion import complete_groups, complete_topics
from hastore.cli.own_node import need_replayed
from hastore.client.consumer.admin import Admin, QueueRanges
from hastore.client.consumer.positions_client import (
    Offsets,
    Positions,
    fit,
    format_offsets,
    parse_offsets,
)
from hastore.errors import UsageError
from hastore.fs.private_files import UMASK_MODE, replace_file

IMPORTED, KEPT, NO_TOPIC = "imported", "kept", "no such topic"


@dataclass(frozen=True, slots=True)
class ImportResult:
    """The outcome of the import of one group's positions in one topic."""

    group: str
    topic: str
    outcome: str
    positions: Offsets
    corrected: tuple[int, ...] = ()  # queues whose imported position was outside the queue

    def show(self, as_json: bool) -> None:
        """Print the outcome, as JSON or as text."""
        if as_json:
            positions = {str(queue): offset for queue, offset in self.positions.items()}
            print_json(
                {
                    "group": self.group,
                    "topic": self.topic,
                    "outcome": self.outcome,
                    "positions": positions,
                    "corrected": list(self.corrected),
                }
            )
            return
        places = " ".join(f"{queue}:{offset}" for queue, offset in self.positions.items())
        click.echo(f"{self.outcome}  {self.group}  {self.topic}  {places}")
        if self.corrected:
            print_note(
                f"{self.group}, {self.topic}: the position in queue "
                f"{', '.join(map(str, self.corrected))} was outside the log and was corrected"
            )


@click.group("positions", short_help="Import or export consumers' positions.")
def positions_group() -> None:
    """Import and export consumers' positions as a RocketMQ broker's config/consumerOffset.json."""


@positions_group.command("import", short_help="Import positions from a broker's file.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path))
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="G",
    shell_complete=complete_groups,
    help="Only this consumer group; may be repeated.",
)
@click.option(
    "--topic", "topics", multiple=True, metavar="T", shell_complete=complete_topics,
    help="Only this topic; may be repeated.",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace positions that the group has already.")
@with_bootstrap
@with_json
def import_command(
    file: pathlib.Path,
    groups: tuple[str, ...],
    topics: tuple[str, ...],
    overwrite: bool,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Commit the positions in FILE, a broker's consumerOffset.json, for their groups.

    A group that has committed positions in a topic keeps them, so a second run changes nothing. A
    position outside its queue is moved to the nearest end of the queue, as a broker does.
    """
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as failure:
        raise UsageError(f"{file} is not UTF-8: give a broker's consumerOffset.json") from failure
    wanted = {
        (group, topic): offsets
        for (group, topic), offsets in parse_offsets(text).items()
        if (not groups or group in groups) and (not topics or topic in topics)
    }
    addresses = bootstrap_addresses(bootstrap)
    need_replayed(addresses)
    with Admin(addresses) as admin:
        ranges = admin.topics()
    with Positions(addresses) as positions:
        for (group, topic), offsets in sorted(wanted.items()):
            import_positions(positions, ranges, group, topic, offsets, overwrite=overwrite).show(
                as_json
            )
    if not wanted:
        print_note("no position to import")
    return DONE


def import_positions(
    positions: Positions,
    ranges: dict[str, QueueRanges],
    group: str,
    topic: str,
    offsets: Offsets,
    *,
    overwrite: bool,
) -> ImportResult:
    """Commit one group's positions in one topic; raises what `Positions.commit` raises."""
    fitting = fit(offsets, ranges.get(topic, {}))
    if not fitting:
        return ImportResult(group, topic, NO_TOPIC, {})
    known = {} if overwrite else positions.committed(group, topic)
    if known:
        kept = {queue: place.queue_offset for queue, place in sorted(known.items())}
        return ImportResult(group, topic, KEPT, kept)
    positions.commit(group, topic, fitting, allow_back=overwrite)
    corrected = tuple(queue for queue, offset in fitting.items() if offset != offsets[queue])
    return ImportResult(group, topic, IMPORTED, fitting, corrected)


@positions_group.command("export", short_help="Export positions as a broker's file.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=pathlib.Path))
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="G",
    shell_complete=complete_groups,
    help="Only this consumer group; may be repeated.",
)
@with_bootstrap
def export_command(
    file: pathlib.Path | None, groups: tuple[str, ...], bootstrap: str | None
) -> int:
    """Write all groups' positions to FILE (default: stdout) in the format of a RocketMQ broker.

    FILE is replaced at once: without room the one before stays.
    """
    addresses = bootstrap_addresses(bootstrap)
    need_replayed(addresses)  # else commits of the last moment would be missing
    with Positions(addresses) as positions:
        found = positions.all()
    text = format_offsets(
        {key: offsets for key, offsets in found.items() if not groups or key[0] in groups}
    )
    if file is None:
        sys.stdout.write(text + "\n")
    elif file.exists() and not file.is_file():  # a device or a pipe
        file.write_text(text + "\n", "utf-8")
    else:
        replace_file(str(file), f"{text}\n".encode(), _mode_of(file))
    return DONE


def _mode_of(file: pathlib.Path) -> int:
    """Return the mode that a file has, or gets when it is made."""
    if file.exists():
        return stat.S_IMODE(file.stat().st_mode)
    umask = os.umask(0)
    os.umask(umask)
    return UMASK_MODE & ~umask
