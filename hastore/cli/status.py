"""`hastore status`: show the state of each node of a group."""

import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import click

from hastore.cli import common
from hastore.cli.common import (
    DIFFER,
    DONE,
    FAILED,
    Decorator,
    Seconds,
    bootstrap_addresses,
    complete_files,
    fitting_table,
    print_error,
    print_json,
    print_note,
    print_text,
    terminal_columns,
    with_bootstrap,
    with_json,
)
from hastore.cli.own_node import (
    best_informed,
    pending_changes,
    pending_texts,
    registered,
    security_of,
)
from hastore.client.consumer.admin import Admin
from hastore.client.messages import NodeInfo, SilentNode
from hastore.client.security import SecurityLike
from hastore.config.file import load_config
from hastore.errors import HastoreError, UnreachableError, UsageError

Status = dict[str, Any]

SYNC_REFUSED = "synchronous puts are refused"  # the text in a node's `problems`
_POLL_S = 0.2
_POLL_ANSWER_S = 1.0
_OFFSETS = ("max_offset", "confirmed_offset", "readable_offset")
_DLEDGER_NUMBERS = ("ledger_end_index", "committed_index", "max_offset", "readable_offset")
_DLEDGER = "dledger"  # the `mode` of a group that elects its leader
_SLAVE = "this node is a slave"  # the beginning of a slave's `reason`
_KEEP = 3  # columns that even a narrow terminal shows: node, role, epoch


with_file: Decorator = click.option(
    "-c", "--config", "path", metavar="FILE", shell_complete=complete_files,
    help="All nodes of this configuration file, instead of --bootstrap.",
)  # fmt: skip
EVERY_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"  # the cursor to the top, the screen empty


with_watch: Decorator = click.option(
    "--watch",
    "every_s",
    type=Seconds(),
    is_flag=False,
    flag_value=str(EVERY_S),
    metavar="[SECONDS]",
    help=f"Show it again every so many seconds ({EVERY_S:g}), until Ctrl-C.",
)


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
@with_file
@with_watch
@with_bootstrap
@with_json
def status_command(
    wait_s: float | None,
    timeout_s: float,
    path: str | None,
    every_s: float | None,
    bootstrap: str | None,
    as_json: bool,
) -> int:
    """Show roles, epochs, offsets and slaves, with a row for each node, also for a silent one.

    Exit code 4 when nodes answer and no node takes puts that do not set acks. Exit code 1 when a
    node of the group does not answer; with --wait also when the group is not complete and in sync
    in time. --wait needs no node that the master's file no longer lists. With --watch it is 0 after
    Ctrl-C, and errors are lines of the screen.
    """
    place = place_of(path, bootstrap)
    if every_s is not None and wait_s is not None:
        raise UsageError("give --wait or --watch, not both")
    if every_s is not None:
        return watch(lambda: _show_frame(place, timeout_s, as_json), every_s)
    settled = wait_s is None or _wait(place, wait_s)
    look = look_at(place, timeout_s, waited=wait_s is not None)
    for text in look.errors:
        print_error(text)
    _print(look.groups, as_json)
    if not settled:
        print_error(f"the group is not complete and in sync after {wait_s:g} s")
        return FAILED
    return look.code


class Place(NamedTuple):
    """Whom to ask, and how this command proves who it is."""

    addresses: list[str]
    security: SecurityLike

    def admin(self, timeout_s: float) -> Admin:
        """Return a client that asks them."""
        return Admin(self.addresses, timeout_s=timeout_s, security=self.security)


class Found(NamedTuple):
    """What a look at the groups has found: what they say, the errors, and the exit code."""

    groups: list["GroupAnswers"]
    errors: list[str]
    code: int


def place_of(path: str | None, bootstrap: str | None) -> Place:
    """Return the nodes of a file, or of `--bootstrap`; raises UsageError for both or neither."""
    if path is None:
        return Place(bootstrap_addresses(bootstrap), None)
    if bootstrap is not None:
        raise UsageError("give -c FILE or --bootstrap, not both")
    config = registered(load_config(path))
    return Place([node.api for node in config.nodes.values()], security_of(config))


def look_at(place: Place, timeout_s: float, *, waited: bool = False) -> Found:
    """Ask all nodes. Raises UnreachableError, with the reasons, if none answers.

    `waited`: after --wait, for which nodes that leave need not be there.
    """
    with place.admin(timeout_s) as admin:
        groups = groups_of(admin.nodes())
    refusals = [text for text in map(refusal_text, groups) if text is not None]
    if refusals:
        return Found(groups, refusals, DIFFER)
    told = [missing_text(group, _leaving(group.statuses) if waited else set()) for group in groups]
    missing = [text for text in told if text is not None]
    return Found(groups, missing, FAILED if missing else DONE)


def _print(groups: list["GroupAnswers"], as_json: bool) -> None:
    if not as_json:
        _show(groups)
        return
    for group in groups:
        for status in group.rows:
            print_json(status)
        for one in group.silent:
            print_note(f"no answer from {one['address']}")


def _show_frame(place: Place, timeout_s: float, as_json: bool) -> None:
    """Print what there is to see now; a group that does not answer ends nothing."""
    if not as_json:
        print_text(time.strftime("%H:%M:%S"), "bold")
    try:
        look = look_at(place, timeout_s)
    except HastoreError as failure:
        look = Found([], [str(failure)], FAILED)
    for text in look.errors:
        if as_json:
            print_error(text)
        else:
            print_text(f"error: {text}", "red")
    _print(look.groups, as_json)


class GroupAnswers(NamedTuple):
    """What the nodes of one group say: their statuses, and an object for each silent node."""

    statuses: list[Status]
    silent: list[Status]

    @property
    def rows(self) -> list[Status]:
        """All nodes, by their number."""
        both = [*self.statuses, *self.silent]
        return sorted(both, key=lambda one: (one["node"] is None, one["node"] or 0))

    @property
    def absent(self) -> list[Status]:
        """The silent nodes whose answers the group lacks.

        A node that is only in a file yet, and becomes part of the group later, is not among them.
        """
        if any(map(_elects, self.statuses)):
            newest = best_informed(self.statuses)
            learners = {one["node"] for one in newest.get("learners", [])}
            known = {*newest["members"], *learners}
            return [one for one in self.silent if not known or one["node"] in {*known, None}]
        late: set[int] = set()
        for status in self.statuses:
            change = pending_changes(status).get("nodes")
            if change is not None:
                late |= set(change["in_file"]) - set(change["in_force"])
        return [one for one in self.silent if one["node"] not in late]


def groups_of(answers: Sequence[NodeInfo | SilentNode]) -> list[GroupAnswers]:
    """Return the answers by group: an administrator may look at several groups at once.

    A silent address that no node names belongs to the first group.
    """
    found: dict[tuple[object, object], GroupAnswers] = {}
    for one in answers:
        if isinstance(one, NodeInfo):
            names = one.status.get("cluster"), one.status.get("group")
            group = found.setdefault(names, GroupAnswers([], []))
            group.statuses.append({**one.status, "address": one.address, "answers": True})
    for one in answers:
        if isinstance(one, SilentNode):
            group = found.get((one.cluster, one.group)) or next(iter(found.values()))
            group.silent.append(_silent(one))
    return list(found.values())


def _silent(one: SilentNode) -> Status:
    """Return the object of a node that does not answer; it takes nothing, and knows nothing."""
    name = "the node" if one.node is None else f"node {one.node}"
    return {
        "node": one.node, "role": None, "epoch": None, "writable": False, "takes_default": False,
        "slaves": [], "reason": f"no answer from {one.address}: {one.why}",
        "problems": [f"{name} does not answer: {one.kind}"], "cluster": one.cluster,
        "group": one.group, "address": one.address, "answers": False, "silence": one.kind,
    }  # fmt: skip


def refusal_text(group: GroupAnswers) -> str | None:
    """Return why puts that do not set `acks` are refused, and what to do; None if one takes them.

    Of several nodes that take writes, which only a flip makes for a moment, the newest counts.
    """
    takers = [status for status in group.statuses if status["writable"]]
    if not takers:
        return no_master_text(group.statuses, group.silent)
    master = max(takers, key=lambda status: status["epoch"])
    why = default_refusal(master)
    if why is None:
        return None
    node, role = master["node"], master["role"]
    text = (
        f"puts that do not set acks are refused: node {node}, the {role}, takes puts with acks=1 "
        f"only ({why.partition('; ')[0]})"
    )
    file = master.get("config") or "FILE"
    added = _added_in_sync(master)
    if added:
        verb = "is in sync, but counts" if len(added) == 1 else "are in sync, but count"
        return (
            f"{text}; {_named(added)} {verb} only once the changed list of nodes is in force: "
            f"`hastore promote -c {file}`"
        )
    absent = group.absent
    if not absent:
        return f"{text}; see why its slaves do not follow, or are behind"
    verb = "it is" if len(absent) == 1 else "they are"
    return (
        f"{text}; {_first_step(absent)}, or, if {verb} gone for long, let the master go on alone: "
        f"`hastore promote -c {file} --async`"
    )


def _added_in_sync(master: Status) -> list[Status]:
    """Return the slaves that no acknowledgement counts, as the list with them is not in force."""
    change = pending_changes(master).get("nodes")
    if change is None:
        return []
    added = set(change["in_file"]) - set(change["in_force"])
    return [one for one in master["slaves"] if one["in_sync"] and one["node"] in added]


def default_refusal(status: Status) -> str | None:
    """Return why a node that takes writes refuses those that do not set `acks`; None if it takes
    them.
    """
    if "takes_default" in status:
        why: str | None = status["default_refused"]
        return why
    for text in status.get("problems", []):  # a node of an earlier version
        if text.startswith(SYNC_REFUSED):
            return str(text).partition(": ")[2]
    return None


def missing_text(group: GroupAnswers, leaving: Collection[int] = ()) -> str | None:
    """Return which nodes of a group, but for those that leave, do not answer; None if all do."""
    absent = [one for one in group.absent if one["node"] not in leaving]
    if not absent:
        return None
    verb = "does" if len(absent) == 1 else "do"
    text = f"{_named(absent)} {verb} not answer; all others do, and puts are taken"
    hanging = [one for one in absent if one["silence"] == "timed out"]
    for master in group.statuses:
        if _waits_only_for({one["node"] for one in hanging}, master):
            if_hung = "if it hangs" if len(hanging) == 1 else "if they hang"
            return (
                f"{text}, but node {master['node']} still has a link to {_named(hanging)}: "
                f"{if_hung}, puts that do not set acks end as FLUSH_SLAVE_TIMEOUT"
            )
    return text


def _waits_only_for(nodes: set[int | None], master: Status) -> bool:
    """Whether default puts to a master wait for slaves of which only these are in sync."""
    if not master["writable"] or master["role"] != "SYNC_MASTER":
        return False
    in_sync = {slave["node"] for slave in master["slaves"] if slave["in_sync"]}
    return bool(in_sync) and in_sync <= nodes


def _first_step(silent: Sequence[Status]) -> str:
    """Return what to do about silent nodes: only where nothing listens there is one to start."""
    gone = [one for one in silent if one["silence"] == "refused"]
    there = [one for one in silent if one["silence"] != "refused"]
    steps = [f"start {_named(gone)}"] if gone else []
    if there:
        kinds = ", ".join(sorted({one["silence"] for one in there}))
        verb = "does" if len(there) == 1 else "do"
        steps.append(f"see why {_named(there)} {verb} not answer ({kinds})")
    return " and ".join(steps)


def _named(nodes: Sequence[Status]) -> str:
    """Return e.g. "node 2, 3"; the addresses, if a number is not known."""
    if any(one["node"] is None for one in nodes):
        return ", ".join(one["address"] for one in nodes)
    return "node " + ", ".join(str(one["node"]) for one in nodes)


def no_master_text(statuses: list[Status], silent: Sequence[Status] = ()) -> str | None:
    """Return an error that says why no node takes writes, and what to do; None when one does.

    A promotion is named as the remedy only where it moves no master that may be alive. The node to
    promote has the greatest (epoch, max_offset) of those that answered. A group that elects its
    leader needs no promotion: the error then says what the election lacks.
    """
    if not statuses or any(status["writable"] for status in statuses):
        return None
    if _elects(statuses[0]):
        return _no_leader_text(statuses, silent)
    for status in statuses:
        if status.get("role_state") == "master":  # its disk is full, or its store is closed
            return f"no node takes writes; node {status['node']} is the master: {status['reason']}"
    waiting = [s for s in statuses if s["role"] != "SLAVE"]
    if waiting:
        numbers = ", ".join(str(one["node"]) for one in waiting)
        return f"no node takes writes; node {numbers} waits to become master; see its reason"
    copies = [status for status in statuses if status.get("classic_master")]
    if copies:
        verb = "follows" if len(copies) == 1 else "follow"
        broker = copies[0]["classic_master"]
        late = "".join(
            f"; node {one['node']} is {one['classic_lag_bytes']:,} bytes behind it"
            for one in copies
            if one.get("classic_lag_bytes")
        )
        return (
            f"no node takes writes; {_named(copies)} {verb} the RocketMQ master {broker}, which "
            f"does{late}"
        )
    alive = _perhaps_alive(statuses, silent)
    if alive is not None:
        return alive
    able = [one for one in statuses if not one.get("unclean") and not one.get("written_over")]
    able = able or statuses
    best = max(able, key=lambda status: (status["epoch"], status["max_offset"]))
    over = best.get("written_over")
    if over is not None:
        return (
            f"no node takes writes; node {over['node']} has refused node {best['node']} as its "
            f"slave, since it has other messages: start node {over['node']}, or see what node "
            f"{best['node']} says of it before you promote that"
        )
    text = (
        f"no node takes writes; node {best['node']} is the most up to date (epoch {best['epoch']}, "
        f"max_offset {best['max_offset']})"
    )
    command = f"run `hastore promote -c {best.get('config') or 'FILE'}`"
    if any(one["silence"] != "refused" for one in silent):
        it = "it" if len(silent) == 1 else "one of them"
        gone = "it is" if len(silent) == 1 else "they are"
        return (
            f"{text} of those that answer: {_first_step(silent)}; {it} may still take writes. If "
            f"{gone} gone, {command}"
        )
    if silent:
        return (
            f"{text} of those that answer: {_first_step(silent)}, which may have messages that no "
            f"other node has, or {command}"
        )
    return f"{text}: {command}"


def _perhaps_alive(statuses: list[Status], silent: Sequence[Status]) -> str | None:
    """Return what to do if the master only does not answer here; None if it is down.

    Where the kernel refuses the connection no process listens any more.
    """
    for one in silent:
        followers = [s for s in statuses if one["node"] and s.get("master") == one["node"]]
        if followers and one["silence"] != "refused":
            told = f"{_named(followers)} knows it as the master"
            if len(followers) > 1:
                told = f"{_named(followers)} know it as the master"
            return (
                f"no node that answers takes writes; {told}, but node {one['node']} does not "
                f"answer here ({one['silence']}): it may well take writes. Look at it and at the "
                "way to it first; a promotion would take the role from it"
            )
    return None


def _elects(status: dict[str, Any]) -> bool:
    """Whether the node belongs to a group that elects its leader."""
    return status.get("mode") == _DLEDGER


def _no_leader_text(statuses: list[Status], silent: Sequence[Status]) -> str:
    begun = [status for status in statuses if status["members"]]
    if not begun:
        return "no node takes writes; the group has not begun: see what its nodes wait for"
    newest = best_informed(begun)
    leader, members = newest["leader"], newest["members"]
    if leader is not None:
        told = next((s["reason"] for s in (*statuses, *silent) if s["node"] == leader), None)
        told = told or "it does not answer"
        return f"no node takes writes; node {leader} leads term {newest['term']}: {told}"
    needed = len(members) // 2 + 1
    forgetful = [s["node"] for s in begun if s["node"] in members and not s["remembers"]]
    if len(members) - len(forgetful) < needed:
        named = ", ".join(map(str, forgetful))
        return (
            f"no node takes writes; node {named} lost what it had, so no majority of the "
            f"{len(members)} members remembers its votes: see docs/dledger.md, 'A majority is gone'"
        )
    there = [s for s in statuses if s["node"] in members]
    idle = [s["node"] for s in there if not s["members"] or not s["remembers"]]
    text = f"no node takes writes; {len(there)} of the {len(members)} members answer"
    if idle:
        text += f", but the vote of node {', '.join(map(str, idle))} does not count yet"
    text += f", and an election needs {needed} that reach each other"
    absent = [one for one in silent if one["node"] in members]
    if len(there) - len(idle) >= needed or not absent:
        return f"{text}; see their reasons"
    return f"{text}: {_first_step(absent)}, or look at the way to it"


def _wait(place: Place, wait_s: float) -> bool:
    """Poll until the group is complete and in sync; False if that takes longer than `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        with place.admin(_POLL_ANSWER_S) as admin:  # a new one, because nodes may be starting
            try:
                statuses = [info.status for info in admin.status()]
                maps = admin.maps().values()
            except UnreachableError:
                statuses, maps = [], {}.values()
        group = _members(statuses) or {number for one in maps for number in one.nodes}
        group -= _leaving(statuses)
        if group and any(_in_sync(status, group) for status in statuses):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _leaving(statuses: Sequence[Status]) -> set[int]:
    """Return the nodes that are in force but not in the master's file any more: they may be dead.

    The promotion that takes them out comes after the wait for the nodes that take their places.
    """
    leaving: set[int] = set()
    for status in statuses:
        change = pending_changes(status).get("nodes")
        if status["writable"] and change is not None:
            leaving |= set(change["in_force"]) - set(change["in_file"])
    return leaving


def _members(statuses: list[dict[str, Any]]) -> set[int]:
    """Return the members of a group that elects its leader, as its best informed node has them."""
    known = [status for status in statuses if _elects(status)]
    return set(best_informed(known)["members"]) if known else set()


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


def _show(groups: list[GroupAnswers]) -> None:
    if not groups:
        return
    # The most important columns come first: a narrow terminal leaves out the last ones.
    every = [status for group in groups for status in group.rows]
    elects = any(map(_elects, every))
    names = _DLEDGER_NUMBERS if elects else _OFFSETS
    numbers = [name.removesuffix("_offset").removesuffix("_index") for name in names]
    rows = [_row(status, names) for status in every]
    head = ["node", "role", "term" if elects else "epoch", "writable", *numbers]
    table = fitting_table(head, rows, keep=_KEEP, right=numbers, width=terminal_columns())
    for line, style in zip(table, ["bold", *map(_style, every)], strict=True):
        print_text(line, style)
    for group in groups:
        masters = [status for status in group.statuses if status["writable"]]
        headless = no_master_text(group.statuses, group.silent) is not None
        for status in group.statuses:
            _show_node(status, masters, headless=headless)
        for one in group.silent:
            name = "a node" if one["node"] is None else f"node {one['node']}"
            print_text(f"{name}: {one['reason']}", "red" if one in group.absent else "yellow")
        versions = versions_text(group.statuses)
        if versions is not None:
            print_text(versions)


def versions_text(statuses: list[Status]) -> str | None:
    """Return which node runs which version of hastore; None if all run the same one."""
    nodes: dict[str, list[Status]] = {}
    for status in statuses:
        nodes.setdefault(status.get("version") or "an earlier version", []).append(status)
    if len(nodes) < 2:
        return None
    told = [
        f"{_named(ones)} {'runs' if len(ones) == 1 else 'run'} {version}"
        for version, ones in nodes.items()
    ]
    return f"the versions differ: {'; '.join(told)}"


def _row(status: Status, names: Sequence[str]) -> list[str]:
    """Return the columns of one node."""
    if not status["answers"]:
        number = "?" if status["node"] is None else str(status["node"])
        return [number, "no answer", "-", status["silence"], *("" for _ in names)]
    return [
        *(str(status["node"]), status["role"], str(status["epoch"]), _takes(status)),
        *(f"{status[name]:,}" if name in status else "" for name in names),
    ]


def _show_node(status: Status, masters: list[Status], *, headless: bool) -> None:
    """Print what there is to say of a node that answers, below the table."""
    for slave in status["slaves"]:
        show_slave(status["node"], slave)
    for learner in status.get("learners", []):
        show_learner(status, learner)
    if status["unclean"]:
        print_text(f"node {status['node']} is unclean: it may lack records that it acknowledged")
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
    found = [each.removesuffix(", or see `hastore status`") for each in found]  # this is it
    notes = status.get("notes", [])
    if status.get("config"):  # a node does not name its file in its own commands
        own = f"-c {status['config']}"
        found = [each.replace("-c FILE", own) for each in found]
        notes = [each.replace("-c FILE", own) for each in notes]
    for text in (*found, *pending_texts(status.get("config"), status, masters)):
        print_text(f"node {status['node']}: {text}", "yellow")
    for text in notes:
        print_text(f"node {status['node']}: {text}")
    delayed = delayed_text(status)
    if delayed is not None:
        print_text(f"node {status['node']}: {delayed}")


def delayed_text(status: dict[str, Any]) -> str | None:
    """Return how many delayed messages wait, for a node that delivers them; None without any."""
    delayed = status.get("delayed", {})  # a node of an earlier version says nothing
    if not status["writable"] or not delayed.get("waiting"):
        return None
    levels = ", ".join(f"level {level}: {count:,}" for level, count in delayed["levels"].items())
    return f"delayed messages that wait: {delayed['waiting']:,} ({levels})"


def _takes(status: Status) -> str:
    """Return the column `writable`: which puts the node takes."""
    if not status["writable"]:
        return "no"
    return "acks 1 only" if "all" not in _acks(status) else "yes"


def _acks(status: Status) -> list[str | int]:
    """Return the `acks` that a writable node takes, also one of an earlier version."""
    refused: list[str | int] = [1, 0] if default_refusal(status) else ["all", 1, 0]
    return list(status.get("takes_acks", refused))


def _style(status: Status) -> str | None:
    """Return the colour of a node's row."""
    if not status["answers"]:
        return "red"
    if not status["writable"]:
        return None
    return "green" if default_refusal(status) is None else "yellow"


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
    if slave.get("full"):
        sync += ", its disk is full"
    if slave["state"] == "stalled":
        sync += ", it takes nothing"
    text = f"node {node} <- {who} ({slave['address']}): {sync}, {ack}{lag}"
    print_text(text, None if slave["in_sync"] else "yellow")


def watch(show: Callable[[], object], every_s: float) -> int:
    """Call `show`, which prints a frame on stdout, every `every_s` seconds until Ctrl-C.

    On a terminal each frame replaces the one before, in one write, so that nothing flickers. In a
    pipe the frames follow each other.
    """
    console = common.stdout
    try:
        while True:
            if console.is_terminal:
                with console.capture() as frame:
                    show()
                sys.stdout.write(_CLEAR + frame.get())
            else:
                show()
            sys.stdout.flush()
            pause(every_s)
    except KeyboardInterrupt:
        return DONE


def pause(seconds: float) -> None:
    """Wait until the next frame."""
    time.sleep(seconds)
