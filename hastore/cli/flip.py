"""The flip: `hastore promote` and `hastore demote` edit a role, then wait for the node to follow.

The role is in the node's file or, with a registry, in ZooKeeper (`own_node.py`). A command passes
its one-time flags, or the request for a new epoch of the present master, to the node in the file
`hastore/once.json` of the node's store, or with the role in ZooKeeper. The node removes them after
use. A command does not undo its edit when the node refuses or is late: a node that waits for
answers of other nodes tries again each second, and may succeed later. Meanwhile the command tells
what the node says that the promotion waits for, and whether it gets on (`Progress`). Before a
master is demoted, another node must be able to take over (`require_successor`).
"""

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import click

from hastore.cli.common import (
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
    RolePlace,
    as_node,
    ask_node,
    awaiting_promotion,
    node_name,
    of_each,
    pending_changes,
    refuse_other_file,
    registered,
    role_place,
)
from hastore.config.file import config_error, load_config, load_names
from hastore.config.model import Config, Mode, Role
from hastore.errors import HastoreError, NotAuthenticatedError, PromotionRefused, UsageError

PATIENCE_S = 10.0  # the longest wait without progress
REFUSED_AFTER_S = 3.0  # a node notices the edit within a second; a refusal is final after this
TELL_AFTER_S = 2.0  # a promotion that takes longer says what it waits for
_POLL_S = 0.1

SUCCESSOR_S = 3.0  # a slave that has just started is in sync within a moment
NO_NEW_EPOCH = "no new epoch has begun"  # a problem of RoleService's begins so
REPLAY_LATE = "replay is "  # in the reason of a promotion that waits for replay alone

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OneShotFlags:
    """The one-time flags that the operator has given."""

    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False

    @property
    def any(self) -> bool:
        """Whether any flag was given."""
        return self.no_catch_up or self.force_unclean or self.accept_loss


class Target(NamedTuple):
    """The node whose role a command changes; `given` is how the command was told of it."""

    path: str  # of the file that the command was given
    given: str
    config: Config
    before: Status | None  # what it says before; None: it does not answer
    place: RolePlace
    remote: bool


def promote(
    path: str, role: Role, flags: OneShotFlags = OneShotFlags(), patience_s: float = PATIENCE_S,
    *, remote: int | None = None,
) -> Status:  # fmt: skip
    """Make the node of the file at `path` a master; return its status once it takes writes.

    With `remote` it is the node of this number, of the file's group, which changes its own file.

    Raises PromotionRefused when the node refuses or is late, HastoreError when it does not answer;
    in both cases the file stays edited. Before the file is edited, raises UsageError when the node
    runs with another file, and HastoreError when flags cannot reach the node.
    """
    target = _target(path, "promote", remote)
    config, before, place = target.config, target.before, target.place
    lacks = 0 if before is None else before.get("classic_lag_bytes") or 0
    if lacks:
        print_note(
            f"{node_name(config)} lacks {lacks:,} bytes of the RocketMQ broker's log, as the broker"
            " said last: they are lost in hastore unless they reach it before this promotion"
        )
    present = place.role()
    if present is None and before is not None:  # no valid object in the registry
        present = Role(before["role"])
    is_assigned = present is not None and present.is_master
    follows = before is not None and before["role"] == Role.SLAVE.value  # superseded, if assigned
    # One that waits to be master goes on with its old order, and that one's options.
    state = {} if before is None else before
    waits = state.get("role_state") == "promoting" and not state["writable"]
    again = present is role or (is_assigned and (follows or waits))  # no change for the node alone
    flipped = is_assigned and not again
    # A change between the master roles keeps the epoch, in which changed acks or nodes never count.
    # To ASYNC_MASTER it must take effect at once: the new epoch would wait for nodes that are dead.
    renews = flipped and role is Role.SYNC_MASTER
    due = renews and before is not None and bool(awaiting_promotion(before))
    if flags.any or again or due:
        if before is None:
            problem = "only a running node can take flags or begin a new epoch"
            raise HastoreError(f"{node_name(config)} does not answer; {problem}: start it first")
        if again and before["writable"] and before["role"] == role.value and not flags.any:
            print_note(f"{node_name(config)} is already {role.value}; it begins a new epoch")
        place.change_once(role, "promote", asdict(flags), before)
    else:
        place.change(role)
    new_epoch = before is not None and (due or not flipped)

    def followed(status: Status) -> bool:
        right = bool(status["writable"]) and status["role"] == role.value
        return right and (not new_epoch or before is None or status["epoch"] > before["epoch"])

    status = _wait(target, followed, role, patience_s)
    left = awaiting_promotion(status) if flipped and not due else []
    if left and renews:  # the node had not read its changed file yet when it was asked first
        return promote(path, role, flags, patience_s, remote=remote)
    if left:
        print_note(
            f"the epoch stays, so {' and '.join(left)} of {place.what} are not in force yet: "
            f"`hastore promote -c {target.given} --async` again, or without --async, begins a new "
            "epoch with them"
        )
    return status


def demote(
    path: str, flags: OneShotFlags = OneShotFlags(), patience_s: float = PATIENCE_S,
    *, remote: int | None = None, leave_no_master: bool = False,
) -> Status:  # fmt: skip
    """Make the node of the file at `path` a slave, as `promote`; return its status once it is one.

    Raises HastoreError when the node does not answer or is late; the file stays edited. Before the
    file is edited, raises UsageError when the node runs with another file, and HastoreError when a
    flag cannot reach the node, or when the node serves and no other node can take over at once,
    unless `leave_no_master`.
    """
    target = _target(path, "demote", remote)
    config, before, place = target.config, target.before, target.place
    if before is not None and before["writable"] and not (flags.accept_loss or leave_no_master):
        require_successor(config, before)
    if flags.accept_loss and before is not None:
        wait_met(config, before)
    if not flags.any:
        place.change(Role.SLAVE)
    elif before is None:
        raise HastoreError(
            f"{node_name(config)} does not answer; flags need a running node: start it first"
        )
    else:
        place.change_once(Role.SLAVE, "demote", asdict(flags), before)

    def followed(status: Status) -> bool:
        # A superseded node reports SLAVE even before it has read the edited file. Until it has
        # read it, its file says master, and its `reason` is therefore among its `problems` too.
        settled = status["reason"] not in status.get("problems", [])
        return bool(status["role"] == Role.SLAVE.value) and settled

    status = _wait(target, followed, Role.SLAVE, patience_s)
    if before is not None and before.get("role_state") == "promoting":
        tell_if_no_master(config)
    return status


def _target(path: str, command: str, remote: int | None) -> Target:
    """Return the node that a command is about; raises UsageError if it is another than it seems."""
    config = _load_classic(path, command, remote=remote is not None)
    if remote is None:
        before = ask_node(config)
        refuse_other_file(command, path, config, before)
        return Target(path, path, config, before, role_place(path, config), False)
    from hastore.cli.remote_nodes import ask_named, remote_place

    if remote not in config.nodes:
        known = ", ".join(map(str, config.nodes))
        raise UsageError(f"--node {remote}: {path} has no such node; its nodes are {known}")
    config = as_node(registered(config, copy=True), remote)
    given = f"{path} --node {remote} --remote"
    return Target(path, given, config, ask_named(config), remote_place(config), True)


def _load_classic(path: str, command: str, *, remote: bool) -> Config:
    """Return the file's configuration; raises ConfigError if its mode knows no promotion."""
    config = load_names(path) if remote else load_config(path)
    if config.mode is Mode.DLEDGER:
        problem = f"is dledger, where the nodes elect their leader: there is nothing to {command}"
        remedy = "to choose the leader, run `hastore dledger transfer -c FILE --to N`"
        raise config_error(path, "mode", problem, remedy)
    return config


def _wait(
    target: Target, followed: Callable[[Status], bool], role: Role, patience_s: float
) -> Status:
    """Poll the node until `followed(status)`; raise after `patience_s` without progress."""
    config, before, place = target.config, target.before, target.place
    began = last_move = time.monotonic()
    seen: Status | None = None
    progress, notes = Progress(), Notes(node_name(config))
    reasons: Counter[str] = Counter()  # the most frequent one is reported
    while time.monotonic() - last_move < patience_s:
        status = ask_node(config)
        if status is not None:
            if followed(status):
                return status
            if progress.moved(status):
                last_move = time.monotonic()
            seen = status
            if role.is_master and time.monotonic() - began >= TELL_AFTER_S:
                notes.tell(status, role)
            reasons[status["reason"] or no_new_epoch(status)] += 1
            refused = status["role"] != role.value and status["reason"] not in (
                None,
                before and before["reason"],
            )
            if refused and time.monotonic() - began > REFUSED_AFTER_S:
                reasons = Counter([status["reason"]])
                break
        time.sleep(_POLL_S)
    stays = f"{place.what} keeps the role {role.value}"
    if seen is None:
        later = "starts, or goes on if it hangs"
        if role.is_master:
            later += ", unless another node has been promoted by then"
        raise HastoreError(
            f"{node_name(config)} does not answer; {stays}, which the node takes when it {later}"
        )
    reason = reasons.most_common(1)[0][0]
    remedy = _remedy(target, seen, reason) if role.is_master else ""
    follows = None if target.remote else seen.get("config")
    if follows and not os.path.exists(follows):
        remedy += f"; it reads {follows}, which is not on this machine"
    raise PromotionRefused(
        f"{node_name(config)} has not become {role.value}: {told_reason(seen, reason)}; {stays}"
        f"{remedy}"
    )


def _remedy(target: Target, seen: Status, reason: str) -> str:
    """Return the text of the operator's choices after a refused or late promotion."""
    awaited = awaited_nodes(reason)
    named = ", ".join(map(str, awaited))
    if seen["writable"]:  # it serves: to cancel by a demotion would stop the service
        if not awaited:
            return "; it tries again each second"
        group = f"{target.path} --remote" if target.remote else target.path
        removals = ", ".join(f"`hastore node remove {group} --node {number}`" for number in awaited)
        return (
            f"; it tries again each second: start node {named}, or take it out of the list of every"
            f" node's file again ({removals})"
        )
    call_off = f"`hastore demote -c {target.given}` cancels the promotion"
    if not awaited:
        return f"; {call_off}"
    return f"; it tries again each second: start node {named}, or {call_off}"


def _report(status: Status, seconds: float, *, as_json: bool) -> None:
    keys = ("node", "role", "epoch", "max_offset", "writable")
    if as_json:
        print_json({key: status[key] for key in keys} | {"seconds": round(seconds, 3)})
        return
    what = f"node {status['node']} is {status['role']} of epoch {status['epoch']}"
    text = f"{what}, its log ends at {status['max_offset']:,} ({seconds:.1f} s)"
    print_text(text)


_patience = with_patience(PATIENCE_S, "Give up after this time without progress.")
_CUTS = "Let this node cut confirmed records off its log"
_accept_loss = click.option("--accept-loss", is_flag=True, help=f"{_CUTS}.")
_accept_any_loss = click.option(
    "--accept-loss",
    is_flag=True,
    help=f"{_CUTS}; or, if its master has refused it, give up what others have instead.",
)


def _with_remote(function: Any) -> Any:
    """Add `--remote` and `--node`, which arrive as `remote` and `number`."""
    node = click.option(
        "--node", "number", type=click.IntRange(1, 65_535), metavar="N",
        shell_complete=complete_nodes,
        help="With --remote: the node, of the group of FILE, if it is not that of FILE.",
    )  # fmt: skip
    return click.option(
        "--remote", is_flag=True,
        help="Let the node change its own file, asked over the network as an admin (--security).",
    )(node(function))  # fmt: skip


def _remote_number(path: str, remote: bool, number: int | None) -> int | None:
    """Return the node that is changed over the network, None if a file here is."""
    if number is not None and not remote:
        raise UsageError("--node goes with --remote: add it, or leave --node out for that of FILE")
    if not remote:
        return None
    return load_names(path).node if number is None else number


@click.command("promote", short_help="Make a node the master.")
@with_config
@with_security
@click.option(
    "--async",
    "to_async",
    is_flag=True,
    help="Make it an ASYNC_MASTER: puts do not wait for slaves.",
)
@click.option(
    "--no-catch-up",
    is_flag=True,
    help="Refuse when another node is ahead, instead of copying from it.",
)
@click.option(
    "--force-unclean",
    is_flag=True,
    help="Promote with too few answers; acknowledged records may be lost.",
)
@_accept_any_loss
@_with_remote
@_patience
@with_json
def promote_command(
    path: str,
    to_async: bool,
    no_catch_up: bool,
    force_unclean: bool,
    accept_loss: bool,
    remote: bool,
    number: int | None,
    patience_s: float,
    as_json: bool,
) -> None:
    """Make a node the master: edit its role, and wait until the node takes writes.

    With --remote FILE may be that of any node of the group, or a copy.

    A node that is the master already begins a new epoch; one that only changes between ASYNC_MASTER
    and SYNC_MASTER keeps its epoch, unless it becomes a SYNC_MASTER, and `acks` or `nodes` of its
    file wait for a promotion. Exit code 1 when the node refuses or is
    late. The role then stays edited, and a node that waits for other nodes' answers keeps trying.
    """
    began = time.monotonic()
    role = Role.ASYNC_MASTER if to_async else Role.SYNC_MASTER
    flags = OneShotFlags(no_catch_up, force_unclean, accept_loss)
    status = promote(path, role, flags, patience_s, remote=_remote_number(path, remote, number))
    if to_async:
        print_note("an ASYNC_MASTER acknowledges records that only this node has")
    _report(status, time.monotonic() - began, as_json=as_json)


@click.command("demote", short_help="Make a node a slave.")
@with_config
@with_security
@_accept_loss
@click.option(
    "--leave-no-master",
    is_flag=True,
    help="Demote the master even if no other node can take over at once.",
)
@_with_remote
@_patience
@with_json
def demote_command(
    path: str,
    accept_loss: bool,
    leave_no_master: bool,
    remote: bool,
    number: int | None,
    patience_s: float,
    as_json: bool,
) -> None:
    """Make a node a slave: edit its role, and wait until the node is a slave.

    With --remote FILE may be that of any node of the group, or a copy.

    A master that takes puts is not demoted while no other node can take over at once (exit code 1),
    except with --leave-no-master or --accept-loss. hastore flip moves the role in one go.
    """
    began = time.monotonic()
    flags = OneShotFlags(accept_loss=accept_loss)
    status = demote(
        path, flags, patience_s, remote=_remote_number(path, remote, number),
        leave_no_master=leave_no_master,
    )  # fmt: skip
    _report(status, time.monotonic() - began, as_json=as_json)


def require_successor(config: Config, status: Status) -> None:
    """Raise HastoreError if no other node can become master once this one is demoted."""
    end = time.monotonic() + SUCCESSOR_S
    problem = successor_problem(config, status)
    while problem is not None and time.monotonic() < end:
        time.sleep(_POLL_S)
        now = ask_node(config)
        if now is not None and not now["writable"]:
            return
        problem = problem if now is None else successor_problem(config, now)
    if problem is not None:
        raise HastoreError(
            f"{node_name(config)} is the master, and no other node can take over at once: "
            f"{problem}; nothing was changed. `hastore flip` moves the role once one can; with "
            "--leave-no-master no node takes puts after this command"
        )
    print_note(
        "no node takes puts until another one is promoted; `hastore flip` moves the role in one go"
    )


def wait_met(config: Config, status: Status) -> None:
    """Wait a moment until the node knows a master, for which alone an accepted loss counts; tell
    if it knows none.
    """
    end = time.monotonic() + SUCCESSOR_S
    while status["master"] in (None, config.node):
        if status["writable"] or time.monotonic() >= end:
            print_note(
                f"{node_name(config)} follows no master now: --accept-loss counts for the last one "
                "that it has met, not for one that is promoted later. If that one refuses it, or "
                "it refuses to cut its log, give the command again"
            )
            return
        time.sleep(_POLL_S)
        status = ask_node(config) or status


def tell_if_no_master(config: Config) -> None:
    """Say which node to promote if a promotion that was called off has left no master."""
    answers = of_each(config.nodes, lambda number: _ask(as_node(config, number)))
    said = [one for one in answers.values() if one is not None]
    if any(one["writable"] or one.get("role_state") in ("master", "promoting") for one in said):
        return
    if len(said) < len(answers):
        print_note("no node that answers takes puts now; `hastore status` says what to do")
        return
    able = [one for one in said if not one["unclean"] and not one.get("written_over")] or said
    best = max(able, key=lambda one: (one["epoch"], one["max_offset"]))
    if best.get("written_over"):
        print_note("no node takes puts now; `hastore status` says what to do")
        return
    file = best.get("config") or "FILE"
    print_note(
        f"no node takes puts now: run `hastore promote -c {file}` for node {best['node']}, which "
        "is the most up to date"
    )


def _ask(config: Config) -> Status | None:
    """Return a node's status: that one does not tell it is no failure of a command that is done."""
    try:
        return ask_node(config)
    except NotAuthenticatedError:
        return None


def successor_problem(config: Config, master: Status) -> str | None:
    """Return why no other node could be promoted now; None if one could.

    `master` is the status of the node that serves.
    """
    own = {one["node"]: one for one in master["slaves"] if not one["classic"]}
    if not any(one["in_sync"] for one in own.values()):
        return "no slave is in sync with it"
    awaiting = awaiting_promotion(master)
    members = set(config.nodes)
    if "nodes" in awaiting:
        members = set(pending_changes(master)["nodes"]["in_file"])
    answers = {one["node"] for one in master.get("unlinked") or [] if one["why"] is None}
    silent = sorted(members - {config.node} - own.keys() - answers)
    # A changed list, or `acks`, needs the answer of every node (docs/failover.md, "Promotion").
    if len(silent) <= (0 if awaiting else master["acks"]):
        return None
    verb = "does" if len(silent) == 1 else "do"
    return f"node {', '.join(map(str, silent))} {verb} not answer, and a promotion needs that"


def no_new_epoch(status: Status) -> str:
    """Say why a master has not begun the new epoch that it was told to begin, if it says so."""
    return _new_epoch_problem(status) or f"it is {status['role']} in epoch {status['epoch']}"


def told_reason(status: Status, reason: str) -> str:
    """Return the reason with what the node says of its registry, if anything, before it.

    A node that cannot follow ZooKeeper does not know what it was told to be: its own reason is that
    of its old role.
    """
    registry = (text for text in status.get("problems", []) if text.startswith("the registry"))
    return "; ".join([*registry, reason])


def _new_epoch_problem(status: Status) -> str | None:
    told = (text for text in status.get("problems", []) if text.startswith(NO_NEW_EPOCH))
    return next(told, None)


def awaited_nodes(text: str) -> list[int]:
    """Return the nodes whose answers a promotion waits for, as its reason names them."""
    found = re.search(r"waiting for node ([0-9]+(?:, [0-9]+)*)", text)
    return [] if found is None else [int(number) for number in found[1].split(", ")]


class Progress:
    """Whether a promotion gets on, from one status of its node to the next.

    What puts add to the log is no progress of the promotion: it would never be late while producers
    run.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, ...] | None = None
        self._awaited: int | None = None  # the fewest nodes that were awaited so far

    def moved(self, status: Status) -> bool:
        """Whether the promotion has got on since the last call; True at the first."""
        reason = status["reason"] or no_new_epoch(status)
        state: tuple[Any, ...] = (status["role"], status["epoch"])
        grows_by_puts = status["writable"] or status.get("master") is not None
        # An unclean node becomes clean, and counts, when it has reached its master's end.
        if not grows_by_puts or status.get("unclean"):
            state += (status["max_offset"],)
        if not grows_by_puts or REPLAY_LATE in reason:
            state += (status.get("dispatched_offset"),)
        moved = state != self._last
        self._last = state
        awaited = len(awaited_nodes(reason))
        if awaited:
            moved |= self._awaited is not None and awaited < self._awaited
            self._awaited = awaited if self._awaited is None else min(awaited, self._awaited)
        return moved


class Notes:
    """Tells what a promotion waits for, each reason once."""

    def __init__(self, name: str, say: Callable[[str], None] = print_note) -> None:
        """Prepare; `say` takes each line, which begins with `name`."""
        self._name = name
        self._say = say
        self._told: set[object] = set()

    def tell(self, status: Status, role: Role) -> None:
        """Print a note if the node waits for something that was not told yet."""
        if status["role"] != role.value:
            return  # it has not read its role yet, or has given up
        text = status["reason"] or _new_epoch_problem(status)
        if text is None:
            return
        words = re.sub("[0-9][0-9,]*", "", text)  # its numbers of bytes change all the time
        kind = tuple(awaited_nodes(text)), words
        if kind not in self._told:
            self._told.add(kind)
            self._say(f"{self._name}: {text}")
