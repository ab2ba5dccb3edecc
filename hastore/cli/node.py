"""`hastore node`: change which nodes a group has, in the files of its nodes.

`nodes` in the file of each node says who is in the group. A node that runs adds what it finds there
within a second, and forgets what is gone once the list in force is without it too. But the list
counts only from the next promotion, which needs an answer of every node of the new list, and of
enough of the old one (docs/failover.md). So the group is safe whichever files are edited, and in
any order. These commands edit the files that they are given, all or none, and say what is left, in
which order. With `--remote` they also have the nodes that answer edit their own (remote_nodes.py).
They can be run again after any interruption, and each takes the other back.

In mode dledger `nodes` has only addresses; who is a member is in the log (`hastore dledger`). So a
node is added here before it becomes a member, and removed here when it is none any more.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import yaml

from hastore.bounded_log import one_line
from hastore.cli.common import (
    DONE,
    FAILED,
    Seconds,
    print_error,
    print_json,
    print_note,
    print_text,
    with_json,
    with_security,
)
from hastore.cli.node_steps import NodeFile, Statuses, says_master, steps
from hastore.cli.own_node import (
    ANSWER_S,
    ask_own_status,
    best_informed,
    of_each,
    pending_changes,
    registered,
)
from hastore.cli.remote_nodes import (
    TIMEOUT_S,
    FileChanged,
    Missed,
    RemoteNodes,
    ask_statuses,
    listed_whys,
    members_of,
)
from hastore.config.file import load_names, parse_names
from hastore.config.model import Config, Mode, NodeAddress
from hastore.config.node_list import ListChange
from hastore.errors import ConfigError, HastoreError, UsageError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import LOCK_WAIT_S, folder_locked, replace_file

_ENDINGS = (".yaml", ".yml")


_files = click.argument("places", metavar="FILE...", nargs=-1, required=True)


def _number(option: str, name: str, text: str) -> Callable[[Any], Any]:
    kind = click.IntRange(1, 65_535)
    return click.option(option, name, type=kind, required=True, metavar="N", help=text)


def _address(function: Any) -> Any:
    for name, form in (("http", "HOST:PORT"), ("ha", "HOST:PORT"), ("api", "tcp://HOST:PORT")):
        option = click.option(
            f"--{name}", required=True, metavar=form, help=f"The address `{name}` of the new node."
        )
        function = option(function)
    return function


def _remote(function: Any) -> Any:
    time_out = click.option(
        "--timeout", "timeout_s", type=Seconds(), default=TIMEOUT_S, show_default=True,
        metavar="SECONDS", help="With --remote: ask no further node after this time.",
    )  # fmt: skip
    return click.option(
        "--remote", is_flag=True,
        help="Let the nodes change their own files elsewhere, as an admin (--security).",
    )(time_out(function))  # fmt: skip


@click.group("node", short_help="Add, remove or replace a node of a group.")
def node_group() -> None:
    """Add, remove or replace a node of a group.

    FILE... are the configuration files of the group's nodes on this machine, or folders of them.
    They are edited; what is left to do, also in files elsewhere, is printed. With --remote each
    node that answers changes its own file; FILE may then be a copy of a node's file. The nodes need
    security.identities, and the identity of --security the right admin. Exit code 1: a node could
    not be asked. In mode dledger a node becomes a member by hastore dledger add, and must be none
    any more before it is removed here.
    """


@node_group.command("add", short_help="Add a node to the files of a group.")
@_files
@_number("--node", "number", "The new node's number, which the group never had.")
@_address
@_remote
@with_security
@with_json
def add_command(
    places: tuple[str, ...],
    number: int,
    api: str,
    ha: str,
    http: str,
    remote: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Add a node to `nodes` in the files, and say what is left to do."""
    change = ListChange(new=number, address=NodeAddress(api=api, ha=ha, http=http))
    return _carry_out(places, change, remote, timeout_s, as_json)


@node_group.command("remove", short_help="Remove a node from the files of a group.")
@_files
@_number("--node", "number", "The number of the node that leaves; it may be dead.")
@_remote
@with_security
@with_json
def remove_command(
    places: tuple[str, ...], number: int, remote: bool, timeout_s: float, as_json: bool
) -> int:
    """Remove a node from `nodes` in the files, and say what is left to do."""
    return _carry_out(places, ListChange(gone=number), remote, timeout_s, as_json)


@node_group.command("replace", short_help="Let a new node take the place of one.")
@_files
@_number("--node", "number", "The number of the node that leaves; it may be dead.")
@_number("--by", "by", "The new node's number, which the group never had.")
@_address
@_remote
@with_security
@with_json
def replace_command(
    places: tuple[str, ...],
    number: int,
    by: int,
    api: str,
    ha: str,
    http: str,
    remote: bool,
    timeout_s: float,
    as_json: bool,
) -> int:
    """Put a new node in the place of another one in the files, and say what is left to do."""
    if number == by:
        raise UsageError(f"node {number} cannot replace itself: a lost disk needs a new number")
    change = ListChange(gone=number, new=by, address=NodeAddress(api=api, ha=ha, http=http))
    return _carry_out(places, change, remote, timeout_s, as_json)


def _carry_out(
    places: Sequence[str], change: ListChange, remote: bool, timeout_s: float, as_json: bool
) -> int:
    left_out: list[str] = []
    files = read_files(places, left_out.append)
    nodes = RemoteNodes(files[0].config, timeout_s) if remote else None
    edit = _Edit(files, change, nodes, as_json)
    try:
        edit.run()
    except KeyboardInterrupt:
        print_note(f"interrupted: {edit.state}")
        raise
    left = steps(files, change, edit.statuses, nodes)
    if as_json:
        told: dict[str, Any] = {} if nodes is None else {"nodes": edit.all_told}
        if left_out:
            told["left_out"] = left_out
        print_json({"changed": edit.changed, "steps": left, **told})
    else:
        for path in left_out:
            print_note(f"note: {path} is no node's file, and is left out")
        print_text("what is left, in this order:")
        for place, step in enumerate(left, 1):
            print_text(f"{place}. {step}")
    if nodes is None or not nodes.missed:
        return DONE
    print_error(f"not every node has said that its file is changed: {edit.whys}")
    return FAILED


class _Edit:
    """One change of all files: those here, and with `nodes` those of the nodes elsewhere."""

    def __init__(
        self, files: Sequence[NodeFile], change: ListChange, nodes: RemoteNodes | None, quiet: bool
    ) -> None:
        self.statuses: Statuses = {}
        self.changed: list[str] = []  # paths of files here
        self.told: list[dict[str, Any]] = []  # what became of each node's own file elsewhere
        self._files = files
        self._change = change
        self._nodes = nodes
        self._quiet = quiet

    def run(self) -> None:
        """Look at all files, then change them, by the nodes' numbers; raises HastoreError."""
        files, change, nodes = self._files, self._change, self._nodes
        if nodes is None:
            self.statuses = ask(files[0].config)
        else:
            self.statuses, _ = ask_statuses(nodes.config)
        own = [file for file in files if is_own(file, self.statuses)]
        if files[0].config.mode is Mode.DLEDGER:
            check_members(files, change, self.statuses)
        else:
            check_masters(files if nodes is None else own, change, self.statuses)
        for file in files:
            refusal = change.refusal(file.config)
            if refusal is not None:
                raise UsageError(f"{file.path} {refusal}")
        if nodes is not None:
            nodes.look(change, [file.config.node for file in own])
            if not nodes.looked and nodes.missed and not own:
                raise HastoreError(
                    f"no node could be asked; nothing was changed: {self.whys}. Start a node, or "
                    "correct `nodes` in FILE or --security, as the reasons say"
                )
        looked_nodes = [] if nodes is None else [one.nodes for one in nodes.looked.values()]
        check_known(files, change, self.statuses, looked_nodes)
        edited = [  # all are valid before the first is written
            (file, change.edited(file.text, file.path, file.config, parse_names)) for file in files
        ]
        here = {file.config.node: (file, text) for file, text in edited}
        looked = {} if nodes is None else nodes.looked
        for number in sorted({*here, *looked}):
            try:
                if number in here:
                    self._write(*here[number])
                if number in looked:
                    self._have_changed(number)
            except (FileChanged, UsageError) as conflict:
                raise HastoreError(
                    f"{conflict}. Somebody else changes this group too: ask first; {self.state}"
                ) from conflict
            except (ConfigError, OSError) as failure:  # of a file here
                raise ConfigError(f"{failure}; {self.state}") from failure

    def _write(self, file: NodeFile, text: str) -> None:
        if text != file.text:
            with folder_locked(file.path, LOCK_WAIT_S):
                if REAL.read_bytes(file.path) != file.text.encode():
                    raise FileChanged(f"{file.path} was changed meanwhile")
                replace_file(file.path, text.encode(), stat.S_IMODE(os.stat(file.path).st_mode))
            self.changed.append(file.path)
        self._say(f"{file.path}: {'changed' if text != file.text else 'nothing to change'}")

    def _have_changed(self, number: int) -> None:
        assert self._nodes is not None
        looked = self._nodes.looked[number]
        found = self._nodes.change(number) if looked.changed else looked
        file = one_line(looked.file)
        one: dict[str, Any] = {"node": number, "file": file, "outcome": "unchanged"}
        text = "nothing to change"
        if isinstance(found, Missed):
            one |= {
                "outcome": "unknown" if found.perhaps_done else "missed",
                "reason": found.reason,
            }
            text = f"{'perhaps changed' if found.perhaps_done else 'not changed'}: {found.reason}"
        elif found.changed:
            one["outcome"] = text = "changed"
        self.told.append(one)
        self._say(f"node {number}, {file}: {text}")

    @property
    def state(self) -> str:
        """What was changed so far, and how to go on."""
        changed = [f"node {one['node']}" for one in self.told if one["outcome"] == "changed"]
        done = ", ".join([*self.changed, *changed]) or "nothing"
        return (
            f"changed so far: {done}; look at `hastore status`, then give the command again to "
            "complete it, or the opposite one to take it back"
        )

    @property
    def whys(self) -> str:
        """Why nodes were missed."""
        missed = {} if self._nodes is None else self._nodes.missed
        return listed_whys({number: one.reason for number, one in missed.items()})

    @property
    def all_told(self) -> list[dict[str, Any]]:
        """What became of each node's file elsewhere, also of those that could not be asked."""
        known = {one["node"] for one in self.told}
        missed = {} if self._nodes is None else self._nodes.missed
        more = [
            {"node": number, "file": None, "outcome": "missed", "reason": one.reason}
            for number, one in missed.items()
            if number not in known
        ]
        return sorted([*self.told, *more], key=lambda one: int(one["node"]))

    def _say(self, text: str) -> None:
        if not self._quiet:
            print_text(text)


# -- the files -------------------------------------------------------------------------------------


def read_files(places: Sequence[str], on_left_out: Callable[[str], None]) -> list[NodeFile]:
    """Return the node files at these paths, and in these folders.

    `on_left_out` is called with each YAML file in a folder that is no node's, such as one of
    identities. Raises UsageError or ConfigError unless the rest are those of nodes of one group.
    """
    paths: dict[str, None] = {}
    for place in places:
        if os.path.isdir(place):
            inside = sorted(name for name in os.listdir(place) if name.endswith(_ENDINGS))
            for path in (os.path.join(place, name) for name in inside):
                if os.path.isfile(path) and _may_be_nodes(path):
                    paths[path] = None
                else:
                    on_left_out(path)
        else:
            paths[place] = None
    if not paths:
        named = ", ".join(places)
        raise UsageError(
            f"no node's file is in {named} (*.yaml, *.yml, with `nodes`); give the folder of the "
            "nodes' files"
        )
    files = [_read(path) for path in paths]
    first = files[0]
    seen: dict[int, str] = {}
    for file in files:
        config = file.config
        if _group_text(config) != _group_text(first.config):
            raise UsageError(
                f"{file.path} is of {_group_text(config)}, {first.path} of"
                f" {_group_text(first.config)}; give the files of one group"
            )
        other = seen.setdefault(config.node, file.path)
        if other != file.path:
            raise UsageError(
                f"{other} and {file.path} are both files of node {config.node}; give one of them"
            )
    return files


def _may_be_nodes(path: str) -> bool:
    """Whether a file has `nodes` as a key; one that is no valid YAML: a line that begins so."""
    text = REAL.read_bytes(path).decode(errors="replace")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return re.search("^nodes *:", text, re.MULTILINE) is not None
    return isinstance(root, yaml.MappingNode) and any(key.value == "nodes" for key, _ in root.value)


def _group_text(config: Config) -> str:
    mode = ", mode dledger" if config.mode is Mode.DLEDGER else ""
    return f"{config.cluster}/{config.group}{mode}"


def _read(path: str) -> NodeFile:
    config = load_names(path)
    return NodeFile(path, REAL.read_bytes(path).decode(), config)


def check_masters(files: Sequence[NodeFile], change: ListChange, statuses: Statuses) -> None:
    """Raise UsageError if the master of a group of mode classic would leave it.

    `files` are those that nodes follow: a copy may tell an old role. So may that of a node that
    does not answer, while another one takes puts: it was promoted after that node's last epoch.
    """
    masters = {number for number, one in statuses.items() if one.get("writable")}
    told = {file.config.node for file in files if says_master(file)}
    masters |= told & statuses.keys() if masters else told
    if change.gone is not None and change.gone in masters:
        raise UsageError(
            f"node {change.gone} is a master; nothing was changed: run `hastore promote` for"
            " another node, and `hastore demote` for this one"
        )


def check_known(
    files: Sequence[NodeFile],
    change: ListChange,
    statuses: Statuses,
    more: Sequence[Mapping[int, object]],
) -> None:
    """Raise UsageError for a node that leaves and that nobody knows; `more` are nodes' own lists.

    It is known in a repeat of the command, too: a file or the list in force still has it, or its
    replacement is there. If no master says who is in the group, a warning must do.
    """
    gone, new = change.gone, change.new
    if gone is None or (new is not None and all(new in file.config.nodes for file in files)):
        return
    known = {number for file in files for number in (file.config.node, *file.config.nodes)}
    known.update(statuses, *more)
    for one in statuses.values():
        known |= {each["node"] for key in ("slaves", "unlinked") for each in one.get(key) or []}
        pending = pending_changes(one).get("nodes")
        if pending is not None:
            known.update(pending["in_force"], pending["in_file"])
    if gone in known:
        return
    text = f"node {gone} is in none of these files"
    masters = [one for one in statuses.values() if one.get("writable")]
    if files[0].config.mode is Mode.DLEDGER or not masters:
        print_note(f"warning: {text}")
        return
    raise UsageError(
        f"{text}, and no node that answers knows it: it has left already, or the number is wrong; "
        "nothing was changed: see `hastore status`"
    )


def check_members(files: Sequence[NodeFile], change: ListChange, statuses: Statuses) -> None:
    """Raise UsageError if a member of a group of mode dledger would lose its addresses."""
    gone, path = change.gone, files[0].path
    if gone is None:
        return
    if change.new is not None:
        raise UsageError(
            f"in mode dledger a node is replaced in three steps; nothing was changed: `hastore node"
            f" add {path} --node {change.new}` with its addresses, `hastore dledger replace -c "
            f"{path} --node {gone} --by {change.new}`, `hastore node remove {path} --node {gone}`"
        )
    known = [one for one in statuses.values() if isinstance(one.get("term"), int)]
    if not known:
        raise HastoreError(
            "no node answers that knows the members; nothing was changed: start one first"
        )
    if gone in members_of(best_informed(known)):
        raise UsageError(
            f"node {gone} is a member, or becomes one; nothing was changed: first `hastore dledger "
            f"remove -c {path} --node {gone}`"
        )


def ask(config: Config) -> Statuses:
    """Return the statuses of the group's nodes that answer."""
    config = registered(config)
    found = of_each(config.nodes, lambda number: ask_own_status(config, number, ANSWER_S))
    own = config.cluster, config.group
    return {
        number: one
        for number, one in found.items()
        if one is not None and (one.get("cluster"), one.get("group")) == own
    }


def is_own(file: NodeFile, statuses: Statuses) -> bool:
    """Whether a running node says that it follows this very file; a copy of it is another one."""
    status = statuses.get(file.config.node, {})
    path = status.get("config")
    if status.get("node") != file.config.node or not isinstance(path, str):
        return False
    return os.path.exists(path) and os.path.samefile(path, file.path)
