"""`hastore dledger`: hand the leadership over, or change the members of a group.

The node that leads takes the request from a file in its store (driver/requests.py). So these
commands run on the leader's machine, with the leader's configuration file; or anywhere with
`--remote`: they then look for the leader and have it write the file (remote_nodes.py).
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hastore.cli.common import (
    Seconds,
    print_json,
    print_note,
    print_text,
    with_config,
    with_json,
    with_patience,
    with_security,
)
from hastore.cli.completion import complete_nodes
from hastore.cli.own_node import (
    ANSWER_S,
    ask_node,
    ask_own_status,
    node_name,
    of_each,
    refuse_hanging,
    refuse_other_file,
)
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import config_error, load_config
from hastore.config.model import Config, Mode
from hastore.dledger.driver.requests import DONE, NOT_LINKED, request_path, write_request
from hastore.errors import HastoreError, NotAuthenticatedError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import folder_locked

if TYPE_CHECKING:
    from hastore.server.recover_group import GroupRecovery

PATIENCE_S = 10.0
_POLL_S = 0.05
_ASK_AGAIN_S = 1.0  # the leader notes each request
_MAY_BE_DONE = "; if the disk returns within 60 s, it may still do this"

Status = dict[str, Any]


@click.group("dledger", short_help="Hand the leadership over; add, replace or remove a node.")
def dledger_group() -> None:
    """Hand the leadership over, or change the members, of a group that elects its leader.

    FILE is the configuration file of the node that leads; `hastore status` shows which it is. With
    --remote it is that of any node, or a copy: the leader is looked for, and asked as an admin
    (--security). For `recover` it is the file of the node whose store is recovered.
    """


def request(
    path: str, command: str, node: int, patience_s: float, *, by: int | None = None
) -> Status:
    """Ask the leader, whose file is at `path`, for `command` about `node`; return its status after.

    `by` is the node that replaces it.

    Raises ConfigError if the file is not of this mode, UsageError if the node runs with another
    file, and HastoreError if the node does not lead, refuses, or does not answer in time.
    """
    config = load_config(path)
    if config.mode is not Mode.DLEDGER:
        problem = "is classic, where the operator names the master"
        raise config_error(path, "mode", problem, "use `hastore promote -c FILE`")
    before = ask_node(config)
    refuse_other_file(f"dledger {command}", path, config, before)
    if before is None:
        name = node_name(config)
        raise HastoreError(
            f"{name} does not answer; only a running leader can do this: start it first"
        )
    if before["leader"] != config.node:
        raise HastoreError(_not_leading(config, before))
    refuse_hanging(config, before)
    made = _write(config, before, command, node, by, patience_s)
    return _wait(config, made, patience_s)


def _write(
    config: Config, before: Status, command: str, node: int, by: int | None, patience_s: float
) -> str:
    """Write a request for the node whose status is `before`; return its id.

    A request of another administrator that the node has not taken yet is waited for.
    """
    root = config.store.root
    path = request_path(root)
    is_here = REAL.is_dir(os.path.dirname(path))  # otherwise write_request says so
    deadline = time.monotonic() + patience_s
    while True:
        # The lock is against another such command.
        with folder_locked(path) if is_here else contextlib.nullcontext():
            if not REAL.exists(path):
                return write_request(
                    REAL,
                    root,
                    command,
                    node,
                    term=before["term"],
                    members=tuple(before["members"]),
                    wall_ms=SYSTEM_CLOCK.wall_ms(),
                    by=by,
                )
        if time.monotonic() > deadline:
            raise HastoreError(
                f"{node_name(config)} has not taken another administrator's request within "
                f"{patience_s:g} s, so nothing was asked for; see `hastore status` and try again"
            )
        time.sleep(_POLL_S)


class Ask(NamedTuple):
    """How the leader is asked: with its own file, or with `remote` over the network."""

    path: str
    remote: bool
    patience_s: float

    def request(self, command: str, node: int, by: int | None = None) -> tuple[Config, Status]:
        """Ask for a command; return how the leader is reached, and its status after."""
        if not self.remote:
            status = request(self.path, command, node, self.patience_s, by=by)
            return load_config(self.path), status
        from hastore.cli.remote_nodes import ask_leader

        made = ask_leader(self.path, command, node, by)
        if made.request_id is None:
            return made.config, made.status
        return made.config, _wait(made.config, made.request_id, self.patience_s)


def _not_leading(config: Config, status: Status) -> str:
    leader = status["leader"]
    if leader is None:
        return f"{node_name(config)} knows no leader; see `hastore status` and try again"
    known = None if leader not in config.nodes else ask_own_status(config, leader, ANSWER_S)
    file = known.get("config") if known is not None else None
    where = f" with -c {file}" if file else "'s file"
    return f"{node_name(config)} does not lead; run this on the machine of node {leader}{where}"


def _wait(config: Config, request_id: str, patience_s: float) -> Status:
    deadline = time.monotonic() + patience_s
    while True:
        status = ask_node(config)
        known = status or {}
        taken = known.get("request") or {}
        for ended in known.get("requests", ()):  # of a version before there is the last one only
            if ended["id"] == request_id:
                taken = ended
        if status is not None and taken.get("id") == request_id and taken.get("outcome"):
            if taken["outcome"] != DONE:
                text = f"{taken['outcome']}: {taken['reason']}"
                raise HastoreError(f"{node_name(config)}: {text}")
            return status
        if taken.get("id") != request_id:
            refuse_hanging(config, status, _MAY_BE_DONE)
        if time.monotonic() > deadline:
            raise HastoreError(
                f"{node_name(config)} has not done it within {patience_s:g} s; whether it will is "
                "not known: `hastore status` shows leader and members"
            )
        time.sleep(_POLL_S)


def wait_member(config: Config, node: int, replaces: int | None, wait_s: float) -> Status:
    """Wait until a node is a member, and the one that it replaces is none; return the status.

    If the node that was asked does not answer any more, another one may lead, and go on with it.
    Raises HastoreError, with what the node waits for, if that takes longer than `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    silent = waits = f"{node_name(config)} does not answer, and no other node leads"
    while True:
        status = ask_node(config) or _ask_new_leader(config)
        if status is None:
            waits = silent
        else:
            learners = {one["node"]: one.get("waits_for") for one in status["learners"]}
            if node in learners:
                waits = learners[node] or "see `hastore status` of the leader"
            elif node not in status["members"]:
                raise HastoreError(
                    f"node {node} is no learner any more: it was withdrawn; see `hastore status`"
                )
            elif replaces not in status["members"]:
                return status
            else:
                waits = f"node {replaces} is still a member"
        if time.monotonic() > deadline:
            raise HastoreError(
                f"node {node} has not become a member within {wait_s:g} s ({waits}); it still "
                "will, by itself: `hastore status` shows it. To take it back: `hastore dledger "
                f"remove -c FILE --node {node}`"
            )
        time.sleep(_POLL_S)


def _ask_new_leader(config: Config) -> Status | None:
    """Return the status of the other node that leads, in the newest term; None if none does."""
    others = [number for number in config.nodes if number != config.node]
    said = of_each(others, lambda number: _ask_other(config, number)).values()
    leading = [one for one in said if one is not None and one["leader"] == one["node"]]
    return max(leading, key=lambda one: int(one["term"]), default=None)


def _ask_other(config: Config, number: int) -> Status | None:
    try:
        return ask_own_status(config, number, ANSWER_S)
    except NotAuthenticatedError:  # it says nothing; others may
        return None


def _report(status: Status, text: str, began: float, as_json: bool) -> None:
    seconds = round(time.monotonic() - began, 3)
    if as_json:
        keys = ("node", "term", "leader", "members", "learners")
        print_json({key: status[key] for key in keys} | {"seconds": seconds})
    else:
        print_text(f"{text} ({seconds:.1f} s)")


def _add(ask: Ask, node: int, replaces: int | None, wait_s: float, as_json: bool) -> None:
    """Ask for a new node, perhaps in the place of a member, wait for it if asked to, and report."""
    began = time.monotonic()
    config, status = _ask_linked(ask, node, replaces, began + wait_s)
    if wait_s:
        left_s = round(max(began + wait_s - time.monotonic(), _POLL_S), 1)
        status = wait_member(config, node, replaces, left_s)
    _report(status, _addition_text(status, node, replaces), began, as_json)


def _ask_linked(
    ask: Ask, node: int, replaces: int | None, deadline: float
) -> tuple[Config, Status]:
    """Ask for a new node; until the deadline again, if it has no link with the leader yet."""
    told = False
    while True:
        try:
            if replaces is None:
                return ask.request("add", node)
            return ask.request("replace", replaces, by=node)
        except HastoreError as refused:
            if NOT_LINKED not in str(refused) or time.monotonic() >= deadline:
                raise
        if not told:
            print_note(f"node {node} is not linked with the leader yet; waiting for that")
            told = True
        time.sleep(_ASK_AGAIN_S)


def few_text(members: Sequence[int]) -> str | None:
    """Return a warning if so few members are left that none may fail; None if enough are."""
    named = ", ".join(map(str, members))
    remedy = "`hastore dledger add` makes another node a member"
    if len(members) == 1:
        return (
            f"warning: node {named} is the only member: no other node has a copy that counts, and "
            f"with its disk all is lost; {remedy}"
        )
    if len(members) == 2:
        return (
            f"warning: node {named} are the only members: a put needs both, so the group stops if "
            f"one fails; {remedy}"
        )
    return None


def _addition_text(status: Status, node: int, replaces: int | None) -> str:
    """Return what has happened to a node that was added, and what will."""
    then = "" if replaces is None else f", and node {replaces} none any more"
    if node in status["members"] and replaces not in status["members"]:
        return f"node {node} is a member{then}; the members are {_members(status)}"
    return (
        f"node {node} is a learner: it copies the log without a vote. The leader makes it a member "
        f"when it keeps up{then}; `hastore status` shows what it waits for. To take it back: "
        f"`hastore dledger remove -c FILE --node {node}`"
    )


def preferred_text(config: Config, to: int) -> str | None:
    """Return what to know before node `to` leads: a preferred leader leads again soon, or None."""
    preferred = config.dledger.preferred_leader
    if preferred in (None, to):
        return None
    return (
        f"node {preferred} is the preferred leader: while it runs and is up to date, it leads again"
        " within seconds. To stop it, just stop it (SIGTERM), which hands over by itself; to let"
        f" node {to} stay, change `dledger.preferred_leader` in all files, and restart the nodes"
    )


def _transfer_text(status: Status, node: int) -> str:
    if status["node"] == node:
        return f"node {node} leads already"
    return f"node {node} takes over from node {status['node']}"


def _members(status: Status) -> str:
    return ", ".join(map(str, status["members"]))


def _with_node(option: str, name: str, help_text: str) -> Callable[..., Any]:
    return click.option(
        option,
        name,
        type=click.IntRange(1, 65_535),
        required=True,
        metavar="N",
        shell_complete=complete_nodes,
        help=help_text,
    )


_with_wait = click.option(
    "--wait",
    "wait_s",
    type=Seconds(or_none=True),
    default=0.0,
    metavar="SECONDS",
    help="Wait up to this time until the node is linked with the leader, and then a member; exit "
    "code 1 if it takes longer.",
)
_OUTCOME = "How long to wait for the outcome."
_with_remote = click.option(
    "--remote", is_flag=True,
    help="Look for the leader, and ask it over the network as an admin (--security).",
)  # fmt: skip


@dledger_group.command("transfer", short_help="Let another node lead.")
@with_config
@with_security
@_with_node("--to", "node", "The node's number in `nodes`.")
@_with_remote
@with_patience(PATIENCE_S, _OUTCOME)
@with_json
def transfer_command(path: str, node: int, remote: bool, patience_s: float, as_json: bool) -> None:
    """Let another node lead. Clients follow it by themselves, and nothing is lost.

    A node that lacks more than dledger.transfer_gap entries is refused.
    """
    began = time.monotonic()
    config, status = Ask(path, remote, patience_s).request("transfer", node)
    _report(status, _transfer_text(status, node), began, as_json)
    note = preferred_text(config, node)
    if note is not None:
        print_note(note)


@dledger_group.command("add", short_help="Add a node, which becomes a member.")
@with_config
@with_security
@_with_node("--node", "node", "The node's number in `nodes`.")
@_with_wait
@_with_remote
@with_patience(PATIENCE_S, _OUTCOME)
@with_json
def add_command(
    path: str, node: int, wait_s: float, remote: bool, patience_s: float, as_json: bool
) -> None:
    """Add a node as a learner. It must be listed under `nodes` in the file of every node, and run.

    A learner copies the log without a vote, and counts for nothing. The leader makes it a member
    when it keeps up. Until then `hastore dledger remove` takes it back, whether it runs or not.
    """
    _add(Ask(path, remote, patience_s), node, None, wait_s, as_json)


@dledger_group.command("replace", short_help="Let a new node take the place of a member.")
@with_config
@with_security
@_with_node("--node", "node", "The member that leaves; it may be dead.")
@_with_node("--by", "by", "The number in `nodes` of the node that takes its place.")
@_with_wait
@_with_remote
@with_patience(PATIENCE_S, _OUTCOME)
@with_json
def replace_command(
    path: str, node: int, by: int, wait_s: float, remote: bool, patience_s: float, as_json: bool
) -> None:
    """Add a node as a learner, and remove a member, dead or not, when it keeps up.

    The node becomes a member first, then the other is removed; if that one does not answer, the
    other way round. A new leader goes on with it. Until then `hastore dledger remove` with the
    number of the new node takes all of it back.
    """
    _add(Ask(path, remote, patience_s), by, node, wait_s, as_json)


@dledger_group.command("remove", short_help="Remove a node, or take an addition back.")
@with_config
@with_security
@_with_node("--node", "node", "The node's number in `nodes`.")
@_with_remote
@with_patience(PATIENCE_S, _OUTCOME)
@with_json
def remove_command(path: str, node: int, remote: bool, patience_s: float, as_json: bool) -> None:
    """Make a member or a learner neither any more; then stop it."""
    began = time.monotonic()
    _, status = Ask(path, remote, patience_s).request("remove", node)
    text = f"node {node} is no member; the members are {_members(status)}"
    few = few_text(status["members"])
    if few is not None:
        print_note(few)
    _report(status, text, began, as_json)


def recovery_text(found: "GroupRecovery") -> list[str]:
    """Say what a recovery means, as lines."""
    listed = ", ".join(map(str, found.left_behind)) or "none"
    were, refused = ("were", "are") if found.done else ("are", "will be")
    lines = [
        f"node {found.node}: the members {were} {', '.join(map(str, found.members))}",
        f"the last entry of this store {'was' if found.done else 'is'} {found.end_index}, of term"
        f" {found.end_term}",
        f"committed, as far as this store knows: up to entry {found.committed_index}; the others"
        " may have acknowledged more, and that is lost",
        f"entries after that: {found.kept_beyond}; whether they were acknowledged is not known;"
        " they are kept, and count as committed afterwards",
        f"left behind: node {listed}; their stores {refused} refused for ever, their numbers may"
        " come again with empty stores",
    ]
    if not found.done:
        lines.insert(
            2,
            "to choose between stores, compare the term first, then the entry: a longer log of an"
            " older term lacks acknowledged messages",
        )
    if not found.remembers:
        lines.append(
            "this store had lost its disk or a state file, and was not yet in line: it may lack"
            " much of what was acknowledged; recover another store if there is one"
        )
    return lines


def refuse_living(path: str, config: Config) -> None:
    """Raise HastoreError if another node answers that has a store of the group of the file.

    Without members a node has an empty store, and waits to be added.
    """

    def is_there(number: int) -> bool | None:
        try:
            status = ask_own_status(config, number, ANSWER_S) or {}
        except NotAuthenticatedError:
            return None  # somebody is there
        own = config.cluster, config.group
        return (status.get("cluster"), status.get("group")) == own and bool(status.get("members"))

    there = of_each(sorted(set(config.nodes) - {config.node}), is_there)
    alive = ", ".join(str(number) for number, found in there.items() if found)
    hidden = ", ".join(str(number) for number, found in there.items() if found is None)
    if alive:
        raise HastoreError(
            f"node {alive} of the group answers, and nothing was changed: if a majority of the"
            " members can run, start them, and nothing is lost; if their disks are lost for good,"
            f" stop node {alive} first: else there might be two groups that acknowledge puts"
        )
    if hidden:
        raise HastoreError(
            f"who answers at the address of node {hidden} does not accept this command, and nothing"
            " was changed: if it is that node, stop it first: there might be two groups that"
            f" acknowledge puts; if another has its address now, take it out of `nodes` in {path}"
        )


@dledger_group.command("recover", short_help="Make one store a group of its own; loses messages.")
@with_config
@click.option("--unsafe", is_flag=True, help="Do it; without this nothing is changed.")
@with_json
def recover_command(path: str, unsafe: bool, as_json: bool) -> None:
    """Make the store of one stopped node a group of one, when the majority is lost for good.

    Acknowledged messages that this store lacks are lost. FILE is that node's file. First give the
    command without --unsafe, on each store that is left, and take the one whose last entry has the
    greatest term; among equals, the one with the greatest last entry. With --unsafe it is refused
    while another node of the group answers.
    """
    from dataclasses import asdict

    from hastore.server.recover_group import recover_group  # it loads the store

    config = load_config(path)
    if unsafe:
        refuse_living(path, config)
    found = recover_group(config, unsafe=unsafe)
    if as_json:
        print_json({**asdict(found), "kept_beyond": found.kept_beyond})
    else:
        for line in recovery_text(found):
            print_text(line)
    if not found.done:
        raise HastoreError(
            "nothing was changed; if the other members are lost for good, give the command again"
            " with --unsafe"
        )
    if not as_json:
        print_text(
            f"node {found.node} is a group of its own now, in term {found.term}, with the id"
            f" {found.group_id}; start it, and add the other nodes with empty stores"
        )
