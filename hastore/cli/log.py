"""`hastore log`: `dump|verify|stat|pending` read any store, RocketMQ's too, without changing it.

`hastore log repair` writes: damaged bytes of a stopped node's log, fetched again from other nodes.
"""

import contextlib
import datetime
import json
from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from hastore.addresses import parse_address
from hastore.bounded_log import one_line
from hastore.cli.common import (
    DONE,
    STORE,
    Folder,
    print_error,
    print_json,
    print_note,
    print_text,
    progress_bar,
    stdout,
    with_config,
    with_json,
    with_security,
)
from hastore.cli.own_node import registered, security_of
from hastore.config.file import load_config
from hastore.config.model import Config, StoreKind
from hastore.errors import StoreError, UsageError
from hastore.fs.filesystem import REAL
from hastore.store.offline import inspect
from hastore.store.offline.pending import find_pending
from hastore.store.state.limits import read_limits

with_store = click.option(
    "--store",
    "path",
    required=True,
    type=Folder(),
    metavar="DIR",
    help="The store: the folder with commitlog/ or dledger-*/, DLedger's own folder (with data/),"
    " or a folder of log files, as under rescued/.",
)


@click.group("log", short_help="Inspect a store's log; repair a stopped node's.")
def log_group() -> None:
    """Inspect a store's log, read-only; a node may be using the store. Only `repair` writes."""


@log_group.command("dump", short_help="Print every record and blank, in order.")
@with_store
@click.option("--from", "start", type=click.IntRange(0), metavar="O", help="Start at this offset.")
@click.option("--to", "end", type=click.IntRange(0), metavar="O", help="End before this offset.")
@click.option("--body", "bodies", is_flag=True, help="Print the bodies too.")
@with_json
def dump_command(
    path: str, start: int | None, end: int | None, bodies: bool, as_json: bool
) -> int:
    """Print every record and blank that begins in [from, to), in the log's order.

    With --body it prints each body too: as a JSON string (the field `body`), or in base64
    (`body_base64`) when it is not UTF-8. It ends before damage, with exit code 3.
    """
    synced, code = _synced_end(path), DONE  # before the dump: a node may append meanwhile
    stop = inspect.begin_of(path)
    if start is not None and stop is not None and start > stop:
        stop = None  # it may lie inside a record
    for entry in inspect.dump(path, start, end, bodies=bodies):
        # Only of the first one, since the others are adjacent; retention may have moved the begin.
        if stop is not None and inspect.place_of(entry) > stop == inspect.begin_of(path):
            print_error(f"{path}: no record at offset {stop}: the log is damaged there")
            code = STORE
        stop = inspect.place_of(entry) + int(entry["size"])
        if as_json:
            print_json(entry)
        elif entry.get("blank"):
            print(f"{inspect.place_of(entry):>16} {entry['size']:>9} blank")
        elif "index" in entry:
            _print_entry(entry)
        else:
            _print_record(entry)
    problem = None if stop is None else _damage_text(path, stop, end, synced)
    if problem is None:
        return code
    print_error(problem)
    return STORE


def _synced_end(path: str) -> int | None:
    """Return up to where a node has synced its log; None if the store does not say it."""
    try:
        limits = read_limits(REAL, path)
    except (StoreError, OSError):  # `verify` says it
        return None
    return None if limits is None else limits.flushed_offset


def _damage_text(path: str, stop: int, end: int | None, synced: int | None) -> str | None:
    """Say that the log goes on beyond `stop`, where no record begins; None if it ends there."""
    if end is not None and stop >= end or synced is not None and stop >= synced:
        return None
    following = next(inspect.dump(path, stop, end), None)
    if following is not None and inspect.place_of(following) == stop:
        return None  # it was appended meanwhile
    if following is None:
        following = next(inspect.dump(path, stop + 1, end), None)
    if following is None and synced is None:
        return None
    text = f"{path}: no record at offset {stop}: the log is damaged there"
    if following is None:
        return f"{text}, up to {synced} or beyond"
    place = inspect.place_of(following)
    return f"{text}, and goes on at {place}: --from {place} has the rest"


def _print_entry(entry: dict[str, Any]) -> None:
    """Print an entry of a DLedger log, and its record in the next line."""
    print(
        f"{entry['pos']:>16} {entry['size']:>9} entry {entry['index']} of term {entry['term']},"
        f" {entry['body_size']} bytes"
    )
    _print_record(entry["record"] | {"size": ""} if "record" in entry else entry)


def _print_record(entry: dict[str, Any]) -> None:
    """Print a record, and its body if it is there."""
    if "topic" in entry:
        keys = next((value for name, value in entry["properties"] if name == "KEYS"), "")
        print(
            f"{entry['offset']:>16} {entry['size']:>9} {one_line(entry['topic'])}"
            f"[{entry['queue_id']}]@{entry['queue_offset']} {_time(entry['store_ms'])} "
            f"{one_line(keys)}"
        )
    if "body" in entry:
        print(f"{'':>16} {one_line(json.dumps(entry['body'], ensure_ascii=False))}")
    elif "body_base64" in entry:
        print(f"{'':>16} base64 {entry['body_base64']}")


@log_group.command("verify", short_help="Check every record and the queues.")
@with_store
@with_json
def verify_command(path: str, as_json: bool) -> int:
    """Check every record (CRC, offset, lengths) and the consume queues; exit code 3 for damage.

    A record's CRC covers only its body: damage to properties, times or flags may go unnoticed. In
    mode dledger each entry has a CRC of all its bytes, except those that DLedger or an earlier
    version of hastore wrote.
    """
    with progress_bar() as progress:
        task = progress.add_task("verifying", total=None, note="")
        found = inspect.verify(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        print_json(found.as_dict())
    else:
        log = found.stat
        print_text(
            f"{log.records:,} records in [{log.min_offset:,}, {log.max_offset:,}), "
            f"{log.blanks:,} blanks, {found.units:,} units of consume queues"
        )
    for damage in found.damages:
        print_error(f"{path}: bytes [{damage.offset}, {damage.end_offset}): {damage.reason}")
    for wrong in found.units_wrong:
        print_error(f"{path}: {wrong}")
    if found.stat.entries_without_crc:
        print_note(
            f"{found.stat.entries_without_crc:,} of {found.stat.entries:,} entries have no CRC of"
            " their own: only the bodies of their messages are verified"
        )
    if found.units_missing:
        print_note(f"{found.units_missing} units are not built yet: replay lags behind the log")
    return DONE if found.ok else STORE


@log_group.command("stat", short_help="Count the records of the log by topic.")
@with_store
@with_json
def stat_command(path: str, as_json: bool) -> int:
    """Count the records, queues and bytes of the log by topic.

    It ends at the first damage, with exit code 3.
    """
    with progress_bar() as progress:
        task = progress.add_task("counting", total=None, note="")
        found = inspect.stat(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    if as_json:
        print_json(found.as_dict())
    else:
        _print_stat(found)
    if found.damaged_at is None:
        return DONE
    print_error(
        f"{path}: counted up to {found.max_offset}: damaged at {found.damaged_at} ({found.damage});"
        " see `hastore log verify`"
    )
    return STORE


def _print_stat(found: inspect.Stat) -> None:
    span = f"{_time(found.first_store_ms)} to {_time(found.last_store_ms)}"
    print_text(
        f"{found.store}: {found.files} files of {found.file_size:,} bytes, log "
        f"[{found.min_offset:,}, {found.max_offset:,}), {found.records:,} records and "
        f"{found.blanks:,} blanks, stored {span}"
    )
    if found.entries is not None:
        print_text(
            f"{found.entries:,} entries, [{found.ledger_begin_index}, {found.ledger_end_index}],"
            f" the last one of term {found.ledger_end_term}"
        )
    table = Table("topic", box=None, pad_edge=False)
    for name in ("queues", "records", "bytes"):
        table.add_column(name, justify="right")
    for topic, counts in sorted(found.topics.items()):
        table.add_row(topic, *(f"{counts[name]:,}" for name in ("queues", "records", "bytes")))
    if found.topics:
        stdout.print(table)


@log_group.command("pending", short_help="List messages that a RocketMQ broker has not delivered.")
@with_store
@with_json
def pending_command(path: str, as_json: bool) -> None:
    """List delayed messages that neither a RocketMQ broker nor hastore has delivered yet, and half
    messages (transactions) that are neither committed nor rolled back; and by group and queue what
    POP consumers have taken and not acknowledged.

    docs/migrate-from-rocketmq.md says with which of them hastore goes on.
    """
    with progress_bar() as progress:
        task = progress.add_task("searching", total=None, note="")
        found = find_pending(
            path, progress=lambda done, total: progress.update(task, completed=done, total=total)
        )
    for one in found:
        if as_json:
            print_json({**asdict(one), "kind": one.kind.value})
        else:
            due = f" due {_time(one.due_ms)}" if one.due_ms is not None else ""
            place = f"{one_line(one.topic)} {one_line(one.key)}"
            if one.popped:
                place += f" queue {one.queue_id}: {', '.join(map(str, one.popped))}"
            print(f"{one.offset:>16} {one.kind.value:<7} {place}{due}")
    if not found and not as_json:
        print_note(f"{path}: nothing is pending")


def _time(stamp_ms: int | None) -> str:
    if stamp_ms is None:
        return "-"
    try:
        moment = datetime.datetime.fromtimestamp(stamp_ms / 1000, datetime.UTC)
    except (OverflowError, OSError, ValueError):  # a record may contain any number
        return str(stamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@log_group.command("repair", short_help="Repair a stopped node's log from other nodes.")
@with_config
@with_security
@click.option(
    "--from", "given", multiple=True, metavar="NODE,NODE",
    help="The nodes to fetch from, in this order: numbers of the file, or their api addresses"
    " (default: all other nodes of the file).",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be repaired; write nothing.")
@with_json
def repair_command(path: str, given: tuple[str, ...], dry_run: bool, as_json: bool) -> int:
    """Replace the damaged bytes of a stopped node's log by those of a node that runs.

    The log is checked as by `hastore log verify`, as far as it was synced. Each damaged range is
    fetched from the first node whose bytes are valid and belong to the same log, and written in
    place, durably. Nothing is cut, and nothing else is written. Exit code 0: the log is sound; 3:
    damage is left, with the reasons.
    """
    from hastore.repair.stopped import PeerLog, Report, opened, repair

    config = load_config(path)
    if config.store.kind is StoreKind.MEMORY:
        raise UsageError(f"{path}: the node's log is in memory: there is nothing to repair;"
            " start it again, and it copies the log")
    addresses = _addresses(registered(config), given)
    report = Report(config.store.root, dry_run)
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(
            opened(config.store.root, node=config.node, cluster=config.cluster, group=config.group)
        )
        sources = []
        for address in addresses:
            peer = PeerLog(address, security_of(config))
            stack.callback(peer.close)
            why = peer.look(
                node=config.node, cluster=config.cluster, group=config.group,
                mode=config.mode.value,
            )  # fmt: skip
            if why is None:
                sources.append(peer)
            else:
                print_note(f"{address} is not asked: {why}")
        try:
            repair(stopped, list(sources), report)
        except StoreError:
            _print(report.as_dict(), as_json=as_json)
            raise
    _print(report.as_dict(), as_json=as_json)
    return DONE if report.ok else STORE


def _addresses(config: Config, given: tuple[str, ...]) -> list[str]:
    """Return where the nodes are that were named; all other nodes of the file without a name."""
    names = [name.strip() for one in given for name in one.split(",")]
    if not names:
        names = [str(number) for number in config.nodes if number != config.node]
    found = []
    for name in names:
        if name.isascii() and name.isdigit():
            if int(name) not in config.nodes:
                raise UsageError(f"--from {name}: the file has no node {name}; give its address")
            if int(name) == config.node:
                raise UsageError(f"--from {name}: that is the damaged node itself; give "
                    "another one")
            found.append(config.nodes[int(name)].api)
            continue
        bare = name.removeprefix("tcp://")
        if parse_address(bare) is None:
            raise UsageError(f"--from {name}: write a node's number, or HOST:PORT")
        found.append(f"tcp://{bare}")
    return found


def _print(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    verb = "would be repaired" if found["dry_run"] else "repaired"
    for one in found["ranges"]:
        where = f"bytes [{one['offset']}, {one['end_offset']}): {one['reason']}"
        if one["from"] is None:
            why = "; ".join(one["refused"]) or "no other node could be asked"
            print_error(f"{where}; not repaired: {why}")
        elif not as_json:
            print_text(f"{where}; {verb} from {one['from']}")
    if as_json:
        return
    state = "sound"
    if not found["ok"]:
        left = found["damaged_bytes"] if found["dry_run"] else found["left_bytes"]
        state = f"{left:,} bytes are damaged"
    print_text(f"{found['store']}: [{found['min_offset']:,}, {found['end_offset']:,}): {state}")
