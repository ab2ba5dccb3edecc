"""`hastore status`: show the state of each node of a group."""

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
    print_error,
    print_json,
    print_note,
    print_text,
    terminal_columns,
    with_bootstrap,
    with_json,
)
from hastore.cli.own_node import pending_texts
from hastore.client.consumer.admin import Admin
from hastore.errors import UnreachableError

SYNC_REFUSED = "synchronous puts are refused"  # the text in a node's `problems`
_POLL_S = 0.2
_POLL_ANSWER_S = 1.0
_OFFSETS = ("max_offset", "confirmed_offset", "readable_offset")
_DLEDGER_NUMBERS = ("ledger_end_index", "committed_index", "max_offset", "readable_offset")
_DLEDGER = "dledger"  # the `mode` of a group that elects its leader
_SLAVE = "this node is a slave"  # the beginning of a slave's `reason`
_KEEP = 3  # columns that even a narrow terminal shows: node, role, epoch


@click.command("status", short_help="Show roles, epochs, offsets and slaves.")
@click.option(
    "--wait",
    "wait_s",
    type=Seconds(or_none=True),
    metavar="SECONDS",
    help="Wait up to this time until one node takes writes and all others are in sync with it.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each answer.",
)
@with_bootstrap
@with_json
def status_command(
    wait_s: float | None, timeout_s: float, bootstrap: str | None, as_json: bool
) -> int:
    """Show roles, epochs, offsets and slaves.

    Exit code 1 when no node answers; with --wait also when the group is not complete and in sync in
    time. Exit code 4 when nodes answer but none of them takes writes.
    """
    addresses = bootstrap_addresses(bootstrap)
    settled = wait_s is None or _wait(addresses, wait_s)
    with Admin(addresses, timeout_s=timeout_s) as admin:
        infos = admin.status()
        known = {address for one in admin.maps().values() for address in one.nodes.values()}
    statuses = [info.status for info in infos]
    headless = no_master_text(statuses)
    if headless is not None:
        print_error(headless)
    if as_json:
        for status in statuses:
            print_json(status)
    else:
        _show(statuses, headless=headless is not None)
    for address in sorted(known - {info.address for info in infos}):
        print_note(f"no answer from {address}")
    if not settled:
        print_error(f"the group is not complete and in sync after {wait_s:g} s")
        return FAILED
    return DIFFER if headless is not None else DONE


def no_master_text(statuses: list[dict[str, Any]]) -> str | None:
    """Return an error that names the node to promote; None when some node takes writes.

    The node to promote has the greatest (epoch, max_offset) of those that answered. A group that
    elects its leader needs no promotion: the error then says what the election lacks.
    """
    if not statuses or any(status["writable"] for status in statuses):
        return None
    if _elects(statuses[0]):
        return _no_leader_text(statuses)
    waiting = [s["node"] for s in statuses if s["role"] != "SLAVE"]
    best = max(statuses, key=lambda status: (status["epoch"], status["max_offset"]))
    text = (
        f"no node takes writes; node {best['node']} is the most up to date (epoch {best['epoch']}, "
        f"max_offset {best['max_offset']}): run `hastore promote -c {best.get('config') or 'FILE'}`"
    )
    if waiting:
        numbers = ", ".join(map(str, waiting))
        text = f"no node takes writes; node {numbers} waits to become master; see its reason"
    return text


def _elects(status: dict[str, Any]) -> bool:
    """Whether the node belongs to a group that elects its leader."""
    return status.get("mode") == _DLEDGER


def _no_leader_text(statuses: list[dict[str, Any]]) -> str:
    begun = [status for status in statuses if status["members"]]
    if not begun:
        return "no node takes writes; the group has not begun: see what its nodes wait for"
    newest = max(begun, key=lambda status: status["term"])
    leader, members = newest["leader"], newest["members"]
    if leader is not None:
        told = next((s["reason"] for s in statuses if s["node"] == leader), "it does not answer")
        return f"no node takes writes; node {leader} leads term {newest['term']}: {told}"
    needed = len(members) // 2 + 1
    forgetful = [s["node"] for s in begun if s["node"] in members and not s["remembers"]]
    if len(members) - len(forgetful) < needed:
        named = ", ".join(map(str, forgetful))
        return (
            f"no node takes writes; node {named} lost what it had, so no majority of the "
            f"{len(members)} members remembers its votes: see docs/dledger.md, 'A majority is gone'"
        )
    there = sum(1 for status in statuses if status["node"] in members)
    return (
        f"no node takes writes; {there} of the {len(members)} members answer, and an election "
        f"needs {needed} that reach each other; see their reasons"
    )


def _wait(addresses: list[str], wait_s: float) -> bool:
    """Poll until the group is complete and in sync; False if that takes longer than `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        with Admin(
            addresses, timeout_s=_POLL_ANSWER_S
        ) as admin:  # a new Admin each time, because nodes may be starting
            try:
                statuses = [info.status for info in admin.status()]
                maps = admin.maps().values()
            except UnreachableError:
                statuses, maps = [], {}.values()
        group = _members(statuses) or {number for one in maps for number in one.nodes}
        if group and any(_in_sync(status, group) for status in statuses):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _members(statuses: list[dict[str, Any]]) -> set[int]:
    """Return the members of a group that elects its leader, as the newest term knows them."""
    known = [status for status in statuses if _elects(status)]
    return set(max(known, key=lambda status: status["term"])["members"]) if known else set()


def _in_sync(status: dict[str, Any], group: set[int]) -> bool:
    """Whether this node takes writes and every other node of the group is in sync with it."""
    followers = {slave["node"] for slave in status["slaves"] if slave["in_sync"]}
    return bool(status["writable"]) and group <= followers | {status["node"]}


def not_following_text(status: dict[str, Any], *, headless: bool) -> str | None:
    """Return why a slave follows no master; None for a master, and for a slave that follows one.

    In a group that elects its leader: why the leader takes no writes, or why there is none.

    If the group has no open master (`headless`) and that is the only reason, returns None too: the
    command prints it once for the whole group.
    """
    reason: str | None = status["reason"]
    if _elects(status):
        return reason if status["leader"] in (None, status["node"]) else None
    if status["role"] != "SLAVE" or reason is None or reason.endswith(" is the master"):
        return None
    if reason == _SLAVE or headless and reason.startswith(f"{_SLAVE}; no master is open"):
        return None
    return reason


def _show(statuses: list[dict[str, Any]], *, headless: bool) -> None:
    # The most important columns come first: a narrow terminal leaves out the last ones.
    elects = any(map(_elects, statuses))
    names = _DLEDGER_NUMBERS if elects else _OFFSETS
    numbers = [name.removesuffix("_offset").removesuffix("_index") for name in names]
    rows = [
        [str(status["node"]), status["role"], str(status["epoch"]), _takes(status)]
        + [f"{status[name]:,}" if name in status else "" for name in names]
        for status in statuses
    ]
    head = ["node", "role", "term" if elects else "epoch", "writable", *numbers]
    table = fitting_table(head, rows, keep=_KEEP, right=numbers, width=terminal_columns())
    for line, style in zip(table, ["bold", *map(_style, rows)], strict=True):
        print_text(line, style)
    for status in statuses:
        for slave in status["slaves"]:
            show_slave(status["node"], slave)
        for learner in status.get("learners", []):
            show_learner(status, learner)
        if status["unclean"]:
            print_text(
                f"node {status['node']} is unclean: it may lack records that it acknowledged"
            )
        told = status["reason"]
        if status["role"] == "SLAVE" or _elects(status):
            told = not_following_text(status, headless=headless)
        if told:
            print_text(f"node {status['node']}: {told}")
        registry = status.get("registry")
        if registry is not None and registry["connected"]:
            role = registry["role"] or "not valid"
            where = f"registry {registry['address']}: connected, the role there is {role}"
            print_text(f"node {status['node']}: {where}")
        found = [each for each in status.get("problems", []) if told is None or each not in told]
        for text in (*found, *pending_texts(status.get("config"), status)):
            print_text(f"node {status['node']}: {text}", "yellow")


def _takes(status: dict[str, Any]) -> str:
    """Return the column `writable`: which puts the node takes."""
    if not status["writable"]:
        return "no"
    return "acks 1 only" if _refuses_default(status) else "yes"


def _style(row: list[str]) -> str | None:
    return {"yes": "green", "acks 1 only": "yellow"}.get(row[3])


def _refuses_default(status: dict[str, Any]) -> bool:
    """Whether a put with default acks is refused, because too few slaves are in sync."""
    return any(text.startswith(SYNC_REFUSED) for text in status.get("problems", []))


def show_learner(status: dict[str, Any], learner: dict[str, Any]) -> None:
    """Print what the leader knows of a learner, and what it waits for."""
    if "ack_index" not in learner:
        return  # a follower knows only that there is one
    replaces = "".join(f", replaces node {one}" for one in status["leaving"])
    ack, lag = "no report yet", ""
    if learner["ack_index"] >= 0:
        ack = f"entry {learner['ack_index']:,}"
        lag = f", {learner['lag_entries']:,} entries ({learner['lag_bytes']:,} bytes) behind"
    waits = learner["waits_for"] or "becomes a member now"
    print_text(
        f"node {status['node']} <- learner {learner['node']} ({learner['address']}){replaces}: "
        f"{ack}{lag}; {waits}",
        "yellow",
    )


def show_slave(node: int, slave: dict[str, Any]) -> None:
    """Print what the node, which leads or is master, knows of a node that follows it."""
    elects = "ack_index" in slave
    kind = "follower" if elects else "slave"
    who = "a RocketMQ slave" if slave["classic"] else f"{kind} {slave['node']}"
    sync = "in sync" if slave["in_sync"] else "not in sync"
    ack = "no report yet" if slave["ack_offset"] is None else f"at {slave['ack_offset']:,}"
    lag = "" if not slave["lag_bytes"] else f", {slave['lag_bytes']:,} bytes behind"
    if elects and slave["ack_index"] >= 0:
        ack = f"entry {slave['ack_index']:,}"
    elif elects:
        ack, lag = "no report yet", ""  # nobody knows how far it is behind
    if slave["state"] == "NO_LINK":
        ack = f"no link, {ack}"
    text = f"node {node} <- {who} ({slave['address']}): {sync}, {ack}{lag}"
    print_text(text, None if slave["in_sync"] else "yellow")
