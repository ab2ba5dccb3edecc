"""`hastore log repair`: damaged bytes of a stopped node's log, fetched again from other nodes."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from hastore.addresses import parse_address
from hastore.cli.common import (
    DONE,
    STORE,
    print_error,
    print_json,
    print_note,
    print_text,
    with_config,
    with_json,
    with_security,
)
from hastore.cli.own_node import registered, security_of
from hastore.config.file import load_config
from hastore.config.model import Config, StoreKind
from hastore.errors import StoreError, UsageError


@click.command("repair", short_help="Repair a stopped node's log from other nodes.")
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
    from hastore.repair.peer import PeerLog
    from hastore.repair.stopped import Report, opened, repair

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
