"""`hastore status`: what each node of a group says of itself."""

import time
from typing import Any

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    Seconds,
    bootstrap_addresses,
    fitting_table,
    put_json,
    say,
    say_error,
    tell,
    terminal_columns,
    with_bootstrap,
    with_json,
)
from hastore.cli.which_file import pending_texts
from hastore.client.admin import Admin
from hastore.errors import UnreachableError

SYNC_REFUSED = "synchronous puts are refused"  # as a node's `problems` say it
_POLL_S = 0.2
_POLL_ANSWER_S = 1.0
_OFFSETS = ("max_offset", "confirmed_offset", "readable_offset")
_SLAVE = "this node is a slave"  # as a node's `reason` begins
_KEEP = 3  # columns that no terminal is too narrow for: node, role, epoch


@click.command("status", short_help="Show roles, epochs, offsets and slaves.")
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(or_none=True),
    metavar="SECONDS",
    help="Wait so long until all nodes answer, one takes writes and the others are in sync.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each answer may take.",
)
@with_bootstrap
@with_json
def status_command(
    wait_s: float | None, timeout_s: float, bootstrap: str | None, as_json: bool
) -> int:
    """Show roles, epochs, offsets and slaves.

    Exit code 1 when no node answers, with --wait also when the group is not complete and in sync in
    time; 4 when nodes answer and none of them takes writes.
    """
    addresses = bootstrap_addresses(bootstrap)
    settled = wait_s is None or _wait(addresses, wait_s)
    with Admin(addresses, timeout_s=timeout_s) as admin:
        infos = admin.status()
        known = {address for one in admin.maps().values() for address in one.nodes.values()}
    statuses = [info.status for info in infos]
    headless = no_master_text(statuses)
    if headless is not None:
        say_error(headless)
    if as_json:
        for status in statuses:
            put_json(status)
    else:
        _show(statuses, headless=headless is not None)
    for address in sorted(known - {info.address for info in infos}):
        say(f"no answer from {address}")
    if not settled:
        say_error(f"not complete and in sync within {wait_s:g} s")
        return FAILED
    return DIFFER if headless is not None else DONE


def no_master_text(statuses: list[dict[str, Any]]) -> str | None:
    """Say that no node takes writes, and which one to promote; None while one does.

    The one to promote has the greatest (epoch, max_offset) of those that answered.
    """
    if not statuses or any(status["writable"] for status in statuses):
        return None
    on_its_way = [s["node"] for s in statuses if s["role"] != "SLAVE"]
    best = max(statuses, key=lambda status: (status["epoch"], status["max_offset"]))
    text = (
        f"no node takes writes; node {best['node']} has most (epoch {best['epoch']}, "
        f"max_offset {best['max_offset']}): run `hastore promote -c {best.get('config') or 'FILE'}`"
    )
    if on_its_way:
        numbers = ", ".join(map(str, on_its_way))
        text = f"no node takes writes; node {numbers} is to be master and waits, see its reason"
    return text


def _wait(addresses: list[str], wait_s: float) -> bool:
    """Ask until the group is complete and in sync; False when it is not in time."""
    deadline = time.monotonic() + wait_s
    while True:
        with Admin(addresses, timeout_s=_POLL_ANSWER_S) as admin:  # a new one: nodes come up
            try:
                statuses = [info.status for info in admin.status()]
                maps = admin.maps().values()
            except UnreachableError:
                statuses, maps = [], {}.values()
        group = {number for one in maps for number in one.nodes}
        if group and any(_in_sync(status, group) for status in statuses):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _in_sync(status: dict[str, Any], group: set[int]) -> bool:
    """Whether this is the open master, and every other node of the group is in sync with it."""
    followers = {slave["node"] for slave in status["slaves"] if slave["in_sync"]}
    return bool(status["writable"]) and group <= followers | {status["node"]}


def not_following_text(status: dict[str, Any], *, headless: bool) -> str | None:
    """Return why a slave follows nobody; None while it does, and for a master.

    In a group without a master (`headless`) that none is open is said once, not for each slave.
    """
    reason: str | None = status["reason"]
    if status["role"] != "SLAVE" or reason is None or reason.endswith(" is the master"):
        return None
    if reason == _SLAVE or headless and reason.startswith(f"{_SLAVE}; no master is open"):
        return None
    return reason


def _show(statuses: list[dict[str, Any]], *, headless: bool) -> None:
    # What matters most comes first: a narrow terminal leaves out the last columns.
    offsets = [name.removesuffix("_offset") for name in _OFFSETS]
    rows = [
        [str(status["node"]), status["role"], str(status["epoch"]), _takes(status)]
        + [f"{status[name]:,}" for name in _OFFSETS]
        for status in statuses
    ]
    head = ["node", "role", "epoch", "writable", *offsets]
    table = fitting_table(head, rows, keep=_KEEP, right=offsets, width=terminal_columns())
    for line, style in zip(table, ["bold", *map(_style, rows)], strict=True):
        tell(line, style)
    for status in statuses:
        for slave in status["slaves"]:
            _show_slave(status["node"], slave)
        if status["unclean"]:
            tell(f"node {status['node']} is unclean: it may lack bytes it acknowledged")
        told = status["reason"]
        if status["role"] == "SLAVE":
            told = not_following_text(status, headless=headless)
        if told:
            tell(f"node {status['node']}: {told}")
        found = [each for each in status.get("problems", []) if told is None or each not in told]
        for text in (*found, *pending_texts(status.get("config"), status)):
            tell(f"node {status['node']}: {text}", "yellow")


def _takes(status: dict[str, Any]) -> str:
    """Say which puts the node takes."""
    if not status["writable"]:
        return "no"
    return "acks 1 only" if _refuses_default(status) else "yes"


def _style(row: list[str]) -> str | None:
    return {"yes": "green", "acks 1 only": "yellow"}.get(row[3])


def _refuses_default(status: dict[str, Any]) -> bool:
    """Whether a put without options is refused, since too few slaves are in sync."""
    return any(text.startswith(SYNC_REFUSED) for text in status.get("problems", []))


def _show_slave(node: int, slave: dict[str, Any]) -> None:
    who = "a RocketMQ slave" if slave["classic"] else f"slave {slave['node']}"
    sync = "in sync" if slave["in_sync"] else "not in sync"
    ack = "no report yet" if slave["ack_offset"] is None else f"at {slave['ack_offset']:,}"
    lag = "" if not slave["lag_bytes"] else f", {slave['lag_bytes']:,} bytes behind"
    text = f"node {node} <- {who} ({slave['address']}): {sync}, {ack}{lag}"
    tell(text, None if slave["in_sync"] else "yellow")
