"""`hastore can-stop`: whether a node may be stopped now without puts being refused."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    print_json,
    print_note,
    print_text,
    with_config,
    with_json,
    with_security,
)
from hastore.cli.own_node import (
    ANSWER_S,
    ask_own,
    has_closed_store,
    node_name,
    of_each,
    pending_changes,
    registered,
)
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.config.file import load_config
from hastore.config.model import Config, Mode, Role
from hastore.errors import NotAuthenticatedError

Status = dict[str, Any]
_NO_LINK = "NO_LINK"  # the state of a follower of mode dledger whose link is broken


class Verdict(NamedTuple):
    """Whether a node may be stopped: None if nobody knows; and why, with a remedy."""

    may: bool | None
    why: str


@click.command("can-stop", short_help="Say whether a node may be stopped now.")
@with_config
@with_security
@with_json
def can_stop_command(path: str, as_json: bool) -> int:
    """Say whether the node of FILE may be stopped now without puts being refused for it.

    Exit code 0: yes, or it does not run. 4: no; the line says what to do first. 1: not known,
    because the master does not answer, or a slave that it counts, or the node itself does not but
    may run. It is true for this moment: stop one node, wait until it is in sync again, and ask anew
    before the next.
    """
    config = registered(load_config(path))
    said = of_each(config.nodes, lambda number: _ask(config, number))
    own = said.pop(config.node)
    for number, one in said.items():
        if isinstance(one, NoAnswer) and one.kind is Quiet.UNAUTHENTICATED:
            print_note(f"node {number} does not tell its state: {one.text}")
    others = {number: one for number, one in said.items() if not isinstance(one, NoAnswer)}
    silent = {
        number: one.text
        for number, one in said.items()
        if isinstance(one, NoAnswer) and one.kind is not Quiet.UNAUTHENTICATED
    }
    found = verdict(config, own, others, silent)
    if as_json:
        print_json({"node": config.node, "may_stop": found.may, "why": found.why})
    else:
        answer = {True: "yes", False: "no", None: "not known"}[found.may]
        print_text(f"{answer}: {found.why}")
    return {True: DONE, False: DIFFER, None: FAILED}[found.may]


def _ask(config: Config, number: int) -> Status | NoAnswer:
    """Return a node's status, or why there is none: a refusal of one node is no failure."""
    try:
        return ask_own(config, number, ANSWER_S)
    except NotAuthenticatedError as refused:
        return NoAnswer(Quiet.UNAUTHENTICATED, str(refused))


def verdict(
    config: Config,
    own: Status | NoAnswer,
    others: dict[int, Status],
    silent: Mapping[int, str] = MappingProxyType({}),
) -> Verdict:
    """Return whether the node may be stopped; `own` is its status, or why it does not answer,
    `others` are those of the nodes that do, and `silent` says why the rest does not.
    """
    name, number = node_name(config), config.node
    masters = [one for one in others.values() if _is_master(one)]
    if isinstance(own, NoAnswer):
        alive = _perhaps_alive(config, own, others, masters)
        if alive is None:
            return Verdict(True, f"{name} does not run ({own.text})")
        return Verdict(
            None,
            f"{name} does not answer, but it may run, and be the master: {alive}. Look at its "
            "process and at the way to it first; see `hastore status`",
        )
    if _is_master(own):
        return _of_master(config, own, others)
    if has_closed_store(own):  # neither a put nor an election waits for it until it is restarted
        return Verdict(True, f"{name} takes nothing until it is restarted ({own['reason']}): look "
                       "at its disk, and restart it")  # fmt: skip
    if not masters:
        return Verdict(None, f"no master answers; see `hastore status`. {name} may be the one that "
                       "becomes master")  # fmt: skip
    master = max(masters, key=lambda one: int(one["epoch"]))
    if config.mode is Mode.DLEDGER:
        return _of_follower(number, master)
    near = [one for one in _counted(config, master) if one["node"] != number]
    # A master whose disk is full takes no puts now, and says of none what it waits for.
    if master["default_acks"] == 1 or master.get("role") == Role.ASYNC_MASTER.value:
        left = f"{len(near)} other slaves are in sync" if near else "no other slave is in sync"
        return Verdict(True, f"node {master['node']}, the master, waits for no slave; {left}")
    need = int(master["acks"])  # those in force: this node's file may have others already
    quiet = [one["node"] for one in near if one["node"] in silent]
    if len(near) - len(quiet) < need <= len(near):  # the master may learn of that only later
        named = ", ".join(f"node {one} does not answer ({silent[one]})" for one in quiet)
        return Verdict(
            None,
            f"node {master['node']}, the master, needs {need} slaves in sync, and has {len(near)} "
            f"without node {number}, but {named}: it may hang or be cut off. Look at it first; see "
            "`hastore status`",
        )
    if len(near) >= need:
        return Verdict(True, f"node {master['node']}, the master, needs {need} slaves in sync, and "
                       f"has {len(near)} without node {number}")  # fmt: skip
    return Verdict(
        False,
        f"node {master['node']}, the master, needs {need} slaves in sync, and has {len(near)} "
        f"without node {number}: puts that do not set acks would be refused. Bring another slave "
        "in sync first",
    )


def _counted(config: Config, master: Status) -> list[Status]:
    """Return the slaves in sync for which the master's puts wait: those that its acks count.

    A node counts once its list is in force, and a RocketMQ slave where this group's files say so.
    """
    found = [one for one in master["slaves"] if one["in_sync"]]
    if not config.ha.count_classic_peers:
        found = [one for one in found if not one.get("classic")]
    change = pending_changes(master).get("nodes")
    if change is not None:
        in_force = {*change["in_force"], None}  # a RocketMQ slave has no number
        found = [one for one in found if one["node"] in in_force]
    return found


def _is_master(status: Status) -> bool:
    """Whether a node is the master, also if it takes no puts now: its disk may be full."""
    return bool(status["writable"]) or status["master"] == status["node"]


def _perhaps_alive(
    config: Config, silence: NoAnswer, others: dict[int, Status], masters: list[Status]
) -> str | None:
    """Return why a node that does not answer may run all the same; None: its process is gone.

    Where the kernel refuses the connection no process listens any more. But its other threads may
    live, and whoever asks from another machine may be refused by what is on the way.
    """
    if silence.kind is not Quiet.REFUSED:
        return silence.text
    but = "no process listens there, but"
    knowing = [str(one) for one, status in sorted(others.items()) if _knows(status, config.node)]
    if knowing:
        return f"{but} a link to it is open at node {', '.join(knowing)}"
    if masters or config.mode is Mode.DLEDGER:
        return None
    if config.registry is not None:
        return f"{but} no other node is the master, and ZooKeeper has its role"
    if config.assigned_role.is_master:
        role = config.assigned_role.value
        return f"{but} no other node is the master, and its file says {role}"
    return None


def _knows(status: Status, number: int) -> bool:
    """Whether a node has a link with another one, or follows it."""
    slaves = (one["node"] for one in status["slaves"] if one["state"] != _NO_LINK)
    links = (one["node"] for one in status.get("links") or () if one["linked"])
    return status["master"] == number or number in slaves or number in links


def _of_master(config: Config, own: Status, others: dict[int, Status]) -> Verdict:
    near = [one for one in own["slaves"] if one["in_sync"] and one["node"] in others]
    # In mode dledger one whose replay has stopped is in sync, and could not take puts.
    to = min((one["node"] for one in near if one.get("able", True)), default=None)
    cost = "puts would stop" if own["writable"] else f"it takes no puts now ({own['reason']})"
    if config.mode is Mode.DLEDGER:
        none = "no follower in sync can take over" if near else "no follower is in sync"
        what = none if to is None else f"`hastore dledger transfer -c FILE --to {to}`"
        if to is not None and config.dledger.preferred_leader == config.node:
            what += ", and stop it at once: as the preferred leader it leads again within seconds"
        return Verdict(False, f"node {config.node} leads: its stop costs an election; {what}")
    if to is None:
        then = "see `hastore status`"
        if has_closed_store(own):
            then = "until it is restarted, it takes none: look at its disk, and restart it"
        return Verdict(False, f"node {config.node} is the master, and no slave is in sync with it: "
                       f"{cost}; {then}")  # fmt: skip
    file = others[to].get("config") or "FILE"
    return Verdict(
        False,
        f"node {config.node} is the master: {cost}. Run `hastore flip -c {file} "
        f"--to {to}` on node {to} first",
    )


def _of_follower(number: int, leader: Status) -> Verdict:
    members = set(leader["members"])
    if number not in members:
        return Verdict(True, f"node {number} is no member: no put waits for it")
    near = {one["node"] for one in leader["slaves"] if one["in_sync"]} & members - {number}
    hangs = bool(leader.get("sync_hangs"))  # the leader's own disk, which counts for no put then
    have, need = len(near) + (not hangs), len(members) // 2 + 1
    text = f"a put needs {need} of {len(members)} members, and {have} are in sync without {number}"
    if hangs:
        text += f"; the disk of node {leader['node']}, the leader, hangs"
    if have >= need:
        return Verdict(True, text)
    return Verdict(False, f"{text}: puts would wait in vain. Bring another member in sync first")
