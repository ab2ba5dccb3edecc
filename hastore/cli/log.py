"""`hastore log dump|verify|stat|pending`: look into any store, RocketMQ's too, read-only."""

import datetime
import json
from dataclasses import asdict

import click
from rich.table import Table

from hastore.cli.common import (
    DONE,
    STORE,
    progress_bar,
    put_json,
    say,
    say_error,
    stdout,
    tell,
    with_json,
)
from hastore.store.offline import inspect
from hastore.store.offline.pending import find_pending

with_store = click.option(
    "--store",
    "path",
    required=True,
    metavar="DIR",
    help="The store: the folder that has commitlog/, or log files, as under rescued/.",
)


@click.group("log")
def log_group() -> None:
    """Look into a store's log, read-only, in use or not."""


@log_group.command("dump", short_help="Print each record and blank, in order.")
@with_store
@click.option("--from", "start", type=click.IntRange(0), metavar="O", help="First offset.")
@click.option("--to", "end", type=click.IntRange(0), metavar="O", help="End offset, exclusive.")
@click.option("--body", "bodies", is_flag=True, help="With the bodies.")
@with_json
def dump_command(
    path: str, start: int | None, end: int | None, bodies: bool, as_json: bool
) -> None:
    """Print each record and blank that begins in [from, to), in the log's order.

    With --body also what it holds: a JSON string (the field `body`), base64 (`body_base64`) where
    it is no UTF-8.
    """
    for entry in inspect.dump(path, start, end, bodies=bodies):
        if as_json:
            put_json(entry)
        elif entry.get("blank"):
            print(f"{entry['offset']:>16} {entry['size']:>9} blank")
        else:
            keys = next((value for name, value in entry["properties"] if name == "KEYS"), "")
            print(
                f"{entry['offset']:>16} {entry['size']:>9} {entry['topic']}"
                f"[{entry['queue_id']}]@{entry['queue_offset']} {_time(entry['store_ms'])} {keys}"
            )
            if "body" in entry:
                print(f"{'':>16} {json.dumps(entry['body'], ensure_ascii=False)}")
            elif "body_base64" in entry:
                print(f"{'':>16} base64 {entry['body_base64']}")


@log_group.command("verify", short_help="Check every record and the queues.")
@with_store
@with_json
def verify_command(path: str, as_json: bool) -> int:
    """Check every record (CRC, place, lengths) and the consume queues; exit code 3 when damaged.

    The CRC in a record covers its body alone: damage to properties, times or flags may pass.
    """
    with progress_bar() as progress:
        task = progress.add_task("verifying", total=None, note="")
        found = inspect.verify(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        put_json(found.as_dict())
    else:
        log = found.stat
        tell(
            f"{log.records:,} records in [{log.min_offset:,}, {log.max_offset:,}), "
            f"{log.blanks:,} blanks, {found.units:,} units of consume queues"
        )
    for damage in found.damages:
        say_error(f"{path}: bytes [{damage.offset}, {damage.end_offset}): {damage.reason}")
    for wrong in found.units_wrong:
        say_error(f"{path}: {wrong}")
    if found.units_missing:
        say(f"{found.units_missing} units are not built yet: replay is behind the log")
    return DONE if found.ok else STORE


@log_group.command("stat")
@with_store
@with_json
def stat_command(path: str, as_json: bool) -> None:
    """Count what the log holds, by topic."""
    with progress_bar() as progress:
        task = progress.add_task("counting", total=None, note="")
        found = inspect.stat(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        put_json(found.as_dict())
        return
    span = f"{_time(found.first_store_ms)} to {_time(found.last_store_ms)}"
    tell(
        f"{found.store}: {found.files} files of {found.file_size:,} bytes, log "
        f"[{found.min_offset:,}, {found.max_offset:,}), {found.records:,} records and "
        f"{found.blanks:,} blanks, stored {span}"
    )
    table = Table("topic", box=None, pad_edge=False)
    for name in ("queues", "records", "bytes"):
        table.add_column(name, justify="right")
    for topic, counts in sorted(found.topics.items()):
        table.add_row(topic, *(f"{counts[name]:,}" for name in ("queues", "records", "bytes")))
    if found.topics:
        stdout.print(table)


@log_group.command("pending", short_help="List what a RocketMQ broker still owes.")
@with_store
@with_json
def pending_command(path: str, as_json: bool) -> None:
    """List what a RocketMQ broker still owes: delayed messages not delivered, half messages not
    ended. hastore stores them, and does no more.
    """
    with progress_bar() as progress:
        task = progress.add_task("looking", total=None, note="")
        found = find_pending(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    for one in found:
        if as_json:
            put_json({**asdict(one), "kind": one.kind.value})
        else:
            due = f" due {_time(one.due_ms)}" if one.due_ms is not None else ""
            print(f"{one.offset:>16} {one.kind.value:<7} {one.topic} {one.key}{due}")
    if not found and not as_json:
        say(f"{path}: nothing is pending")


def _time(stamp_ms: int | None) -> str:
    if stamp_ms is None:
        return "-"
    try:
        moment = datetime.datetime.fromtimestamp(stamp_ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):  # a record may state any number
        return str(stamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
