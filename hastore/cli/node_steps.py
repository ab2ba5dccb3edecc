"""What is left to do after `hastore node` has changed files, in order, as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hastore.addresses import group_path
from hastore.cli.remote_nodes import Missed, RemoteNodes
from hastore.config.model import Config, Mode, Role
from hastore.config.node_list import ListChange
from hastore.protocol.api import Administered

Statuses = Mapping[int, Mapping[str, Any]]  # of the nodes that answer


@dataclass(frozen=True, slots=True)
class NodeFile:
    """The configuration file of a node on this machine."""

    path: str
    text: str
    config: Config


def says_master(file: NodeFile) -> bool:
    """Whether a file makes its node a master; with a registry its role is not followed."""
    role = file.config.role
    return role is not None and file.config.registry is None and role.is_master


def listed(numbers: Iterable[int]) -> str:
    """Return numbers of nodes as a text."""
    return ", ".join(map(str, sorted(numbers)))


def steps(
    files: Sequence[NodeFile], change: ListChange, statuses: Statuses,
    nodes: RemoteNodes | None = None,
) -> list[str]:  # fmt: skip
    """Return what is left to do, in order, once the files here are changed.

    `nodes` are those that have changed their own files.
    """
    here = {file.config.node: file for file in files}
    numbers = {number for file in files for number in file.config.nodes}
    looked = {} if nodes is None else nodes.looked
    for answer in looked.values():
        numbers |= set(answer.nodes)
    after = sorted((numbers - {change.gone}) | ({change.new} if change.new is not None else set()))
    found = []
    if nodes is not None:
        found += [_missed(number, one, change, here) for number, one in nodes.missed.items()]
    else:
        elsewhere = [number for number in after if number not in here and number != change.new]
        if elsewhere:
            names = listed(elsewhere)
            found.append(f"in the file of node {names}, under `nodes`: {change.by_hand}")
    if files[0].config.mode is Mode.DLEDGER:
        return [*found, *_of_members(files[0].path, change, statuses, looked, nodes is not None)]
    if change.new is not None and change.new not in statuses and change.new not in looked:
        own = here.get(change.new)
        file = (
            "a copy of another node's file with `role: SLAVE` and its own `node`, `store.root` and "
            "certificate"
        )
        if own is not None:
            file = own.path
        found.append(
            f"start node {change.new} with {file}, and an empty store or a restored one; wait until"
            " it is in sync: `hastore status --wait 600`"
        )
    if nodes is None:
        found.append(_promotion(here, statuses, after))
    else:
        found.append(_remote_promotion(files[0].path, looked, statuses, after))
    if change.gone is not None:
        found.append(f"stop node {change.gone} for good; its number must not come back")
        found += _deletion(files[0].config, change.gone)
    return found


def _deletion(config: Config, gone: int) -> list[str]:
    """Return the step for the object of a node that has left; none without a registry."""
    if config.registry is None:
        return []
    path = f"{group_path(config.cluster, config.group)}/{gone}"
    return [
        f"delete the znode {path} in ZooKeeper: clients go on to ask at its addresses, and another "
        "node may get them"
    ]


def _of_members(
    path: str,
    change: ListChange,
    statuses: Statuses,
    looked: Mapping[int, Administered],
    remote: bool,
) -> list[str]:
    """Return what is left in mode dledger, where the members are in the log."""
    new, found = change.new, []
    if new is None:
        return [f"stop node {change.gone}, if it runs"]
    if new not in statuses and new not in looked:
        found.append(
            f"start node {new} with a copy of another node's file with its own `node`, "
            "`store.root` and certificate, and an empty store or a restored one"
        )
    given = f"{path} --node {new}" + (" --remote" if remote else "")
    where = "" if remote else ", with the file of the node that leads"
    return [*found, f"make it a member: `hastore dledger add -c {given}`{where}"]


def _missed(number: int, one: Missed, change: ListChange, here: Mapping[int, NodeFile]) -> str:
    text = f"in the file of node {number}, under `nodes`: {change.by_hand} ({one.reason})"
    if one.perhaps_done:
        return f"{text}; perhaps that is done: give the command again to see it"
    if number in here:
        return f"{text}; {here[number].path} is done, unless it is only a copy of that file"
    return text


def _promotion(here: Mapping[int, NodeFile], statuses: Statuses, after: Sequence[int]) -> str:
    """Return the step that puts the list in force."""
    masters = [number for number, one in statuses.items() if one.get("writable")]
    masters += [number for number, file in here.items() if says_master(file)]
    path, who = "FILE", "the master"
    if masters:
        master = masters[0]
        who = f"node {master}, the master"
        path = here[master].path if master in here else str(statuses[master].get("config") or path)
    listed = ", ".join(map(str, after))
    return (
        f"put the list {listed} in force: `hastore promote -c {path}`, on the machine of {who}; it"
        f" begins a new epoch, and waits until each of these nodes answers{_of_async(statuses)}"
    )


def _remote_promotion(
    path: str, looked: Mapping[int, Administered], statuses: Statuses, after: Sequence[int]
) -> str:
    """Return the step that puts the list in force, from this machine."""
    masters = [number for number, one in statuses.items() if one.get("writable")]
    masters += [
        number for number, one in looked.items() if one.role not in (None, Role.SLAVE.value)
    ]
    node = masters[0] if masters else "N"
    return (
        f"put the list {listed(after)} in force: `hastore promote -c {path} --node {node} --remote`"
        " for the master; it begins a new epoch, and waits until each of these nodes answers"
        f"{_of_async(statuses)}"
    )


def _of_async(statuses: Statuses) -> str:
    """Say what the promotion makes of an ASYNC_MASTER; nothing if the master is none."""
    masters = [one for one in statuses.values() if one.get("writable")]
    if all(one.get("role") != Role.ASYNC_MASTER.value for one in masters):
        return ""
    return ". It makes a SYNC_MASTER of the ASYNC_MASTER; with --async that stays one"
