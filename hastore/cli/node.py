"""`hastore node`: change which nodes a group of mode classic has, in the files of this machine.

`nodes` in the file of each node says who is in the group. A node that runs adds what it finds there
within a second, and forgets what is gone at its next start. But the list counts only from the next
promotion, which needs an answer of every node of the new list, and of enough of the old one
(docs/failover.md). So the group is safe whichever files are edited, and in any order. These
commands edit the files that they are given, all or none, and say what is left, in which order.
They can be run again, and each takes the other back.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hastore.cli.common import print_json, print_text, with_json, with_security
from hastore.cli.own_node import ANSWER_S, ask_own_status, of_each
from hastore.config.file import load_names, parse_names
from hastore.config.model import Config, Mode, NodeAddress
from hastore.config.node_list import ListChange
from hastore.errors import UsageError
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import replace_file

_ENDINGS = (".yaml", ".yml")
Statuses = Mapping[int, Mapping[str, Any]]  # of the nodes that answer


@dataclass(frozen=True, slots=True)
class NodeFile:
    """The configuration file of a node on this machine."""

    path: str
    text: str
    config: Config


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


@click.group("node", short_help="Add, remove or replace a node of a group.")
def node_group() -> None:
    """Add, remove or replace a node of a group of mode classic.

    FILE... are the configuration files of the group's nodes on this machine, or folders of them.
    They are edited; what is left to do, also in files elsewhere, is printed. Mode dledger has its
    members in the log: see hastore dledger.
    """


@node_group.command("add", short_help="Add a node to the files of a group.")
@_files
@_number("--node", "number", "The new node's number, which the group never had.")
@_address
@with_security
@with_json
def add_command(
    places: tuple[str, ...], number: int, api: str, ha: str, http: str, as_json: bool
) -> None:
    """Add a node to `nodes` in the files, and say what is left to do."""
    change = ListChange(new=number, address=NodeAddress(api=api, ha=ha, http=http))
    _carry_out(places, change, as_json)


@node_group.command("remove", short_help="Remove a node from the files of a group.")
@_files
@_number("--node", "number", "The number of the node that leaves; it may be dead.")
@with_security
@with_json
def remove_command(places: tuple[str, ...], number: int, as_json: bool) -> None:
    """Remove a node from `nodes` in the files, and say what is left to do."""
    _carry_out(places, ListChange(gone=number), as_json)


@node_group.command("replace", short_help="Let a new node take the place of one.")
@_files
@_number("--node", "number", "The number of the node that leaves; it may be dead.")
@_number("--by", "by", "The new node's number, which the group never had.")
@_address
@with_security
@with_json
def replace_command(
    places: tuple[str, ...], number: int, by: int, api: str, ha: str, http: str, as_json: bool
) -> None:
    """Put a new node in the place of another one in the files, and say what is left to do."""
    if number == by:
        raise UsageError(f"node {number} cannot replace itself: a lost disk needs a new number")
    change = ListChange(gone=number, new=by, address=NodeAddress(api=api, ha=ha, http=http))
    _carry_out(places, change, as_json)


def _carry_out(places: Sequence[str], change: ListChange, as_json: bool) -> None:
    files = read_files(places)
    statuses = _ask(files[0].config)
    check_change(files, change, statuses)
    edited = [(file, change.edited(file.text, file.config)) for file in files]
    for file, text in edited:  # all are valid before the first is written
        parse_names(text, file.path)
    for file, text in edited:
        if text != file.text:
            replace_file(file.path, text.encode(), stat.S_IMODE(os.stat(file.path).st_mode))
    left = steps(files, change, statuses)
    if as_json:
        changed = [file.path for file, text in edited if text != file.text]
        print_json({"changed": changed, "steps": left})
        return
    for file, text in edited:
        print_text(f"{file.path}: {'changed' if text != file.text else 'nothing to change'}")
    print_text("what is left, in this order:")
    for place, step in enumerate(left, 1):
        print_text(f"{place}. {step}")


# -- the files -------------------------------------------------------------------------------------


def read_files(places: Sequence[str]) -> list[NodeFile]:
    """Return the node files at these paths, and in these folders.

    Raises UsageError or ConfigError unless they are those of nodes of one group of mode classic.
    """
    paths: dict[str, None] = {}
    for place in places:
        if os.path.isdir(place):
            inside = sorted(name for name in os.listdir(place) if name.endswith(_ENDINGS))
            paths.update(dict.fromkeys(os.path.join(place, name) for name in inside))
        else:
            paths[place] = None
    if not paths:
        raise UsageError(f"no file *.yaml is in {', '.join(places)}")
    files = [_read(path) for path in paths]
    first = files[0]
    seen: dict[int, str] = {}
    for file in files:
        config = file.config
        if config.mode is not Mode.CLASSIC:
            raise UsageError(
                f"{file.path} is of mode {config.mode.value}, whose members are in the log: see"
                " `hastore dledger add --help`"
            )
        if (config.cluster, config.group) != (first.config.cluster, first.config.group):
            raise UsageError(
                f"{file.path} is of {config.cluster}/{config.group}, {first.path} of"
                f" {first.config.cluster}/{first.config.group}; give the files of one group"
            )
        other = seen.setdefault(config.node, file.path)
        if other != file.path:
            raise UsageError(f"{other} and {file.path} are both files of node {config.node}")
    return files


def _read(path: str) -> NodeFile:
    config = load_names(path)
    return NodeFile(path, REAL.read_bytes(path).decode(), config)


def check_change(files: Sequence[NodeFile], change: ListChange, statuses: Statuses) -> None:
    """Raise UsageError if a change must not be made."""
    for file in files:
        refusal = change.refusal(file.config)
        if refusal is not None:
            raise UsageError(f"{file.path} {refusal}")
    masters = {file.config.node for file in files if _says_master(file)}
    masters |= {number for number, one in statuses.items() if one["writable"]}
    if change.gone in masters:
        raise UsageError(
            f"node {change.gone} is a master; nothing was changed: run `hastore promote` for"
            " another node, and `hastore demote` for this one"
        )


def _says_master(file: NodeFile) -> bool:
    """Whether a file makes its node a master; with a registry its role is not followed."""
    return file.config.registry is None and file.config.assigned_role.is_master


def _ask(config: Config) -> Statuses:
    """Return the statuses of the group's nodes that answer."""
    found = of_each(config.nodes, lambda number: ask_own_status(config, number, ANSWER_S))
    own = config.cluster, config.group
    return {
        number: one
        for number, one in found.items()
        if one is not None and (one.get("cluster"), one.get("group")) == own
    }


# -- what is left ----------------------------------------------------------------------------------


def steps(files: Sequence[NodeFile], change: ListChange, statuses: Statuses) -> list[str]:
    """Return what is left to do, in order, once the files here are changed."""
    here = {file.config.node: file for file in files}
    numbers = {number for file in files for number in file.config.nodes}
    after = sorted((numbers - {change.gone}) | ({change.new} if change.new is not None else set()))
    elsewhere = [number for number in after if number not in here and number != change.new]
    found = []
    if elsewhere:
        names = ", ".join(map(str, elsewhere))
        found.append(f"in the file of node {names}, under `nodes`: {change.by_hand}")
    if change.new is not None and change.new not in statuses:
        own = here.get(change.new)
        file = "a copy of another slave's file with its own `node`, `store.root` and certificate"
        if own is not None:
            file = own.path
        found.append(
            f"start node {change.new} with {file}, and an empty store or a restored one; wait until"
            " it is in sync: `hastore status --wait 600`"
        )
    found.append(_promotion(here, statuses, after))
    if change.gone is not None:
        found.append(f"stop node {change.gone} for good; its number must not come back")
    return found


def _promotion(here: Mapping[int, NodeFile], statuses: Statuses, after: Sequence[int]) -> str:
    """Return the step that puts the list in force."""
    masters = [number for number, one in statuses.items() if one["writable"]]
    masters += [number for number, file in here.items() if _says_master(file)]
    path, who = "FILE", "the master"
    if masters:
        master = masters[0]
        who = f"node {master}, the master"
        path = here[master].path if master in here else str(statuses[master].get("config") or path)
    listed = ", ".join(map(str, after))
    return (
        f"put the list {listed} in force: `hastore promote -c {path}`, on the machine of {who}; it"
        " begins a new epoch, and waits until each of these nodes answers"
    )
