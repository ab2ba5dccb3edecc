"""`hastore backup` and `hastore restore`: copies of a node's store, on its machine.

The node may run: its log is read as `hastore log` reads it. Nothing is asked of it.
"""

import math
import socket
from datetime import UTC, datetime
from typing import Any

import click

from hastore.addresses import parse_address
from hastore.backup.backups import find_backup, read_manifests, verify_backup
from hastore.backup.manifest import Manifest, number_of
from hastore.backup.restore import check_restore, restore_store, used_in
from hastore.backup.source import Source
from hastore.backup.take import Pace, take_backup
from hastore.backup.target import open_target
from hastore.cli.common import (
    DIFFER,
    DONE,
    STORE,
    Folder,
    Seconds,
    counted,
    print_error,
    print_json,
    print_note,
    print_text,
    progress_bar,
    with_config,
    with_json,
    with_security,
)
from hastore.cli.own_node import ANSWER_S, ask_or_why, of_each
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.client.security import SecurityLike, as_security, with_tls
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_config
from hastore.config.model import Config, Mode, Wire
from hastore.errors import HastoreError, NotAuthenticatedError, UsageError

_MIB = 1 << 20
_SLACK_S = 3_600.0  # by how much the clocks of two machines may differ
_target = click.argument("place", metavar="TARGET", type=Folder())
_which = click.option(
    "--backup",
    "number",
    type=click.IntRange(min=1),
    metavar="N",
    help="The number of a backup (default: the newest).",
)


@click.group("backup", short_help="Back up a node's store; list and check backups.")
def backup_group() -> None:
    """Back up a node's store while it runs; list and check backups.

    TARGET is a folder, or a URL such as s3://BUCKET/FOLDER, which needs: pip install
    "hastore[backup]" and fsspec's package for it, such as s3fs.
    """


@backup_group.command("take", short_help="Take a backup of a node.")
@with_config
@_target
@click.option(
    "--keep",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    metavar="N",
    help="How many backups are left in TARGET, this one included.",
)
@click.option(
    "--allow-shorter",
    is_flag=True,
    help="Take it even if this node has less of the log than the backup before.",
)
@click.option(
    "--max-rate",
    type=click.FloatRange(min=0.1),
    metavar="MIB",
    help="Read at most so many MiB of the log a second, so that the node's clients notice less.",
)
@with_json
def take_command(
    path: str, place: str, keep: int, allow_shorter: bool, max_rate: float | None, as_json: bool
) -> None:
    """Take a backup of the node of FILE, on its machine; the node may run.

    Only what TARGET lacks is copied. Every record that is copied is checked. Until the backup is
    whole, the one before it is as it was.
    """
    if max_rate is not None and not math.isfinite(max_rate):
        raise UsageError(f"--max-rate {max_rate:g}: it is no number; leave it out for no bound")
    config = load_config(path)
    target = open_target(place)
    with Source(config) as source, progress_bar(visible=not as_json) as bar:
        task = bar.add_task("copying", total=None, note="")
        taken = take_backup(
            config, target, source, keep=keep, allow_shorter=allow_shorter,
            pace=Pace(None if max_rate is None else max_rate * _MIB),
            progress=lambda done, due: bar.update(task, completed=done, total=due),
        )  # fmt: skip
    manifest = taken.manifest
    for name, why in taken.held_back.items():
        print_note(
            f"warning: {target.name}/{name} cannot be read, and may need anything, so what older"
            f" backups needed is left: {why}; remove it if you do not need it"
        )
    if as_json:
        more = {"copied_bytes": taken.copied_bytes, "kept_bytes": taken.kept_bytes}
        more |= {"removed_objects": taken.removed}
        print_json({**_as_dict(manifest), **more, "held_back": dict(taken.held_back)})
        return
    print_text(
        f"backup {manifest.number} of node {manifest.node.node}: {_range(manifest)};"
        f" {taken.copied_bytes:,} bytes copied, {taken.kept_bytes:,} were there"
    )
    if manifest.node.unclean:
        print_note(
            f"warning: node {manifest.node.node} is unclean: it may lack messages that it once"
            " acknowledged; better back up another node"
        )


@backup_group.command("list", short_help="Show the backups in a target.")
@_target
@click.option(
    "--max-age",
    "max_age_s",
    type=Seconds(),
    metavar="SECONDS",
    help="Exit code 4 if the newest backup is older, in the future, unreadable, or there is none.",
)
@with_json
def list_command(place: str, max_age_s: float | None, as_json: bool) -> int:
    """Show the backups in TARGET, the newest first; exit code 3 if one of them cannot be read."""
    target = open_target(place)
    found, bad = read_manifests(target, target.objects())
    numbers = {number_of(name) or 0: name for name in bad}
    there = {one.number: one for one in found}
    for number in sorted({*there, *numbers}, reverse=True):
        one = there.get(number)
        if one is None:
            name = numbers[number]
            if as_json:
                print_json({"backup": number, "manifest": name, "unreadable": bad[name]})
            print_note(f"{name} is no backup: {bad[name]}")
        elif as_json:
            print_json(_as_dict(one))
        else:
            print_text(
                f"backup {one.number}: {_time(one.made_ms)}, node {one.node.node} of"
                f" {one.node.cluster}/{one.node.group}, {_range(one)}"
            )
    if not found and not as_json:
        print_text(f"{target.name} has no backup")
    code = STORE if bad else DONE
    if max_age_s is None:
        return code
    age_s = (SYSTEM_CLOCK.wall_ms() - found[0].made_ms) / 1000 if found else math.inf
    newest_is_bad = max(numbers, default=0) > (found[0].number if found else 0)
    ahead = age_s < -_SLACK_S
    if ahead:  # it would be new for as long as a clock was ahead, whatever is made since
        print_note(
            f"by this machine's clock, backup {found[0].number} is made in the future: this clock"
            " is behind, or that of the node was ahead. Compare both (`timedatectl`), and take"
            " another backup"
        )
    return DIFFER if age_s > max_age_s or ahead or newest_is_bad else code


@backup_group.command("verify", short_help="Check a backup wholly.")
@_target
@_which
@with_json
def verify_command(place: str, number: int | None, as_json: bool) -> int | None:
    """Read a backup wholly, and check its digests and every record; exit code 3 for damage."""
    target = open_target(place)
    with progress_bar(visible=not as_json) as bar:
        task = bar.add_task("reading", total=None, note="")
        found = verify_backup(
            target, number, lambda done, due: bar.update(task, completed=done, total=due)
        )
    manifest = found.manifest
    if as_json:
        more = {"records": found.records, "ok": not found.problems, "problems": found.problems}
        print_json({**_as_dict(manifest), **more})
    for problem in found.problems:
        print_error(f"backup {manifest.number}: {problem}")
    if found.problems:
        print_note(
            "take the next backup into a new target, where nothing of this one is used again, and "
            "look at the disk or bucket of this one"
        )
        return STORE
    if not as_json:
        records = counted(found.records, "record")
        print_text(f"backup {manifest.number} is whole: {_range(manifest)}, {records}")
    return None


@click.command("restore", short_help="Restore a backup as a new node.")
@_target
@click.option(
    "-c", "--config", "path", metavar="FILE", help="The new node's file; without it only look."
)
@_which
@click.option("--as-only", is_flag=True, help="As the only node that is left of the group.")
@click.option(
    "--accept-loss",
    is_flag=True,
    help="With --as-only: what was acknowledged after the backup is lost.",
)
@with_security
@with_json
def restore_command(
    place: str,
    path: str | None,
    number: int | None,
    as_only: bool,
    accept_loss: bool,
    as_json: bool,
) -> None:
    """Restore a backup into the empty store of a new node.

    Without -c it changes nothing, and says what the backup has and what is lost if there is no
    other copy. With -c FILE the node of FILE gets the log, and copies the rest from its group when
    it starts. With --as-only it becomes the only node of a group that is lost otherwise.
    """
    if as_only and path is None:
        raise UsageError("--as-only needs -c FILE, of the node that is to be; nothing was changed")
    if accept_loss and not as_only:
        raise UsageError("--accept-loss needs --as-only; nothing was changed")
    target = open_target(place)
    manifest = find_backup(target, number)
    every, _ = read_manifests(target, target.objects())
    used = used_in((manifest, *every))
    if path is None or (as_only and not accept_loss):
        if path is not None:
            check_restore(load_config(path), manifest, as_only=as_only, used=used)
        _show(manifest, used, as_json)
        if path is not None:
            raise HastoreError(
                "nothing was changed; if no other node of the group has its store any more, give"
                " the command again with --accept-loss"
            )
        return
    config = load_config(path)
    check_restore(config, manifest, as_only=as_only, used=used)
    if as_only:
        _refuse_living_group(config, manifest, every)
    with progress_bar(visible=not as_json) as bar:
        task = bar.add_task("restoring", total=None, note="")
        restore_store(
            config, target, manifest, as_only=as_only,
            progress=lambda done, due: bar.update(task, completed=done, total=due),
        )  # fmt: skip
    if as_only and config.mode is Mode.DLEDGER:
        from hastore.server.recover_group import recover_group  # it loads the store

        try:
            recover_group(config, unsafe=True)
        except BaseException:  # also Ctrl-C: a repeat would find the store not empty
            print_note(
                f"{config.store.root} has the log of backup {manifest.number}, but the group is"
                f" not recovered: run `hastore dledger recover -c {path} --unsafe`; or move that"
                " folder away, and restore again"
            )
            raise
    if as_json:
        print_json({**_as_dict(manifest), "restored_as": config.node, "as_only": as_only})
        return
    print_text(f"node {config.node} has the log of backup {manifest.number}: {_range(manifest)}")
    print_text(_next_step(config, path, as_only))


def _next_step(config: Config, path: str, as_only: bool) -> str:
    if config.mode is Mode.DLEDGER:
        if as_only:
            return "it is a group of its own now: start it, and add other nodes with empty stores"
        return (
            "start it: it votes and counts once its leader has brought its log in line; if the"
            " group does not have its number, see `hastore dledger add`"
        )
    if as_only:
        promote = f"; then run `hastore promote -c {path}`"
        how = "start it" + ("" if config.assigned_role.is_master else promote)
        return f"{how}: it begins a new epoch, above all of the old group"
    return (
        "see to it that `nodes` in the file of every node has it (`hastore node add` helps), then"
        " start it: it copies what it lacks"
    )


def _refuse_living_group(config: Config, manifest: Manifest, all_of_it: list[Manifest]) -> None:
    """Raise HastoreError if a node that was in the group answers: then the group is not lost.

    Every backup of the target is looked into: each has the nodes of its time.
    """
    security = as_security(None)
    own = config.security
    if own.api is Wire.TLS and own.ca is not None:
        security = with_tls(security, own.ca, own.certificate, own.key)
    known = {pair for one in (manifest, *all_of_it) for pair in one.addresses.items()}
    asked = dict(enumerate(sorted(known)))
    answers = of_each(asked, lambda place: _who_is_there(asked[place][1], security))
    for place, there in answers.items():
        if there is not None:
            number, address = asked[place]
            raise HastoreError(f"node {number} at {address} {there}")
    listed = ", ".join(f"node {number} at {address}" for number, address in asked.values())
    print_note(
        f"asked, and there was no answer: {listed}; a node that joined after the newest backup here"
        " is not known: see to it that none runs"
    )


def _who_is_there(address: str, security: SecurityLike) -> str | None:
    """Return what a node at an address does, and what to do; None if nobody is there.

    Who takes a connection is there, though it hangs, is slow, or speaks with others only: a group
    that lives would have a second life beside it. A host that is down takes none.
    """
    answers = (
        "answers: the group is not lost; restore without --as-only, as one more node, or stop that"
        " node for good"
    )
    try:
        found = ask_or_why(address, ANSWER_S, security)
    except NotAuthenticatedError:
        return answers
    if not isinstance(found, NoAnswer):
        return answers
    if found.kind in (Quiet.REFUSED, Quiet.UNREACHABLE):
        return None
    if found.kind is Quiet.TIMED_OUT and not _takes_connections(address):
        return None
    return (
        f"may run, since a process takes connections there ({found.text}): if it is that node, the"
        " group is not lost; else stop what listens there until the restore is done"
    )


def _takes_connections(address: str) -> bool:
    endpoint = parse_address(address.removeprefix("tcp://"))
    try:
        socket.create_connection(endpoint or ("", 0), ANSWER_S).close()
    except OSError:
        return False
    return True


# -- texts -----------------------------------------------------------------------------------------


def _as_dict(one: Manifest) -> dict[str, Any]:
    data = one.node
    return {
        "backup": one.number,
        "made_ms": one.made_ms,
        "version": one.version,
        "cluster": data.cluster,
        "group": data.group,
        "mode": one.mode,
        "node": data.node,
        "start_offset": one.start_offset,
        "end_offset": one.end_offset,
        "confirmed_offset": one.confirmed_offset,
        "last_store_ms": one.last_store_ms,
        "epochs": [[entry.epoch, entry.start] for entry in data.history],
        "used_numbers": sorted(one.used_numbers),
        "objects": len(one.objects),
    }


def _time(wall_ms: int) -> str:
    return datetime.fromtimestamp(wall_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _range(one: Manifest) -> str:
    size = one.end_offset - one.start_offset
    return f"bytes {one.start_offset} to {one.end_offset} of the log ({size:,} bytes)"


def _show(one: Manifest, used: frozenset[int], as_json: bool) -> None:
    """Say what a backup has, and what may be lost; `used` are the numbers that the group had."""
    if as_json:
        print_json({**_as_dict(one), "used_numbers": sorted(used)})
        return
    for line in loss_text(one, used):
        print_text(line)


def loss_text(one: Manifest, used: frozenset[int]) -> list[str]:
    """Say what a backup has and what is lost if it is all that is left, as lines."""
    data = one.node
    unconfirmed = one.end_offset - one.confirmed_offset
    lines = [
        f"backup {one.number}, taken {_time(one.made_ms)} from node {data.node} of"
        f" {data.cluster}/{data.group} in mode {one.mode}",
        f"the log: {_range(one)}, in {counted(len(one.log), 'piece')}",
    ]
    if one.last_store_ms:
        lines.append(f"its last message was stored {_time(one.last_store_ms)}")
    lines.append(
        f"confirmed at that time, as far as this node knew: up to {one.confirmed_offset}"
        + (f"; {unconfirmed:,} bytes after that may be on no other node" if unconfirmed else "")
    )
    lines.append(
        "messages that were acknowledged after that are not in it: if this is the only copy left,"
        " they are lost"
    )
    if data.unclean:
        lines.append("the node was unclean: it may have lacked messages that it had acknowledged")
    if one.mode == Mode.CLASSIC.value:
        numbers = ", ".join(map(str, sorted(used)))
        lines.append(
            f"node numbers that must not be used again, as far as the backups here know: {numbers}"
        )
    return lines
