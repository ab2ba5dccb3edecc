"""What commands for a whole group share: its nodes' statuses, their files here, and planned flips.

`Flip` is what the planned flips of both modes share: the group, the deadline, and how to go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hastore.cli.own_node import (
    ANSWER_S,
    FilePlace,
    RegistryPlace,
    RolePlace,
    as_node,
    ask_own_status,
    file_mismatch,
    node_name,
    of_each,
    registered,
)
from hastore.config.file import load_config, load_names
from hastore.errors import ConfigError, NotAuthenticatedError, RegistryError, UsageError

NOTHING = "nothing was changed"
POLL_S = 0.1
# Errors of one node, one file or ZooKeeper, which do not know how far a flip is.
STATELESS = (ConfigError, NotAuthenticatedError, RegistryError, UsageError)

Status = dict[str, Any]
Say = Callable[[str, str], None]  # takes a step's name, and what to tell of it


class GroupFiles:
    """The nodes of the file's group: what they say, and where their roles are changed from here."""

    def __init__(self, path: str, wanted: int | None = None, *, remote: bool = False) -> None:
        """Read the file at `path`; `wanted` is the node that is to be master, for errors.

        With `remote` the nodes change their own files, and that at `path` may be a copy.
        """
        self.path = path
        self.given = f"{path} --remote" if remote else path  # for commands in texts
        self.wanted = wanted
        self.remote = remote
        config = load_names(path) if remote else load_config(path)
        self.config = registered(config, copy=remote)
        self.seen: dict[int, Status] = {}  # of the nodes that answered last

    def look(self) -> dict[int, Status]:
        """Ask every node; return the statuses of those that answer.

        Raises UsageError if another node answers at an address, or if the file's node runs with
        another file.
        """
        found = of_each(self.config.nodes, self.ask)
        self.seen = {number: status for number, status in found.items() if status is not None}
        own = None if self.remote else self.seen.get(self.config.node)
        differs = None if own is None else file_mismatch(self.path, self.config, own)
        if differs is not None:
            raise UsageError(f"{differs}; {NOTHING}: check -c FILE")
        return self.seen

    def ask(self, number: int) -> Status | None:
        """Return a node's status; None without an answer."""
        status = ask_own_status(self.config, number, ANSWER_S)
        if status is None:
            return None
        config = self.config
        wanted = number, config.cluster, config.group, config.mode.value
        told = tuple(status.get(key) for key in ("node", "cluster", "group", "mode"))
        if told != wanted:
            raise UsageError(
                f"{config.nodes[number].api} is node {told[0]} of {told[1]}/{told[2]}, mode "
                f"{told[3]}, not node {number} of {config.cluster}/{config.group}, mode "
                f"{config.mode.value}: correct `nodes` in {self.path}"
            )
        return status

    def name(self, number: int) -> str:
        """Return a node's number and address."""
        return node_name(msgspec.structs.replace(self.config, node=number))

    def file_of(self, number: int) -> str | None:
        """Return the path of a node's file, if that is on this machine."""
        if number == self.config.node:
            return self.path
        path = self.seen.get(number, {}).get("config")
        if not path or not os.path.exists(path):
            return None
        try:
            found = load_config(path)
        except ConfigError:
            return None
        ours = (number, self.config.cluster, self.config.group)
        return path if (found.node, found.cluster, found.group) == ours else None

    def place(self, number: int) -> RolePlace | None:
        """Return where a node's role is changed; None if that is on another machine."""
        if self.config.registry is not None:
            return RegistryPlace(msgspec.structs.replace(self.config, node=number))
        if self.remote:
            from hastore.cli.remote_nodes import RemotePlace

            return RemotePlace(as_node(self.config, number))
        path = self.file_of(number)
        if path is None:
            return None
        config = load_config(path)
        root = self.seen.get(number, {}).get("store") or config.store.root
        store = msgspec.structs.replace(config.store, root=root)
        return FilePlace(path, msgspec.structs.replace(config, store=store))

    def needed_place(self, number: int) -> RolePlace:
        """Return where a node's role is changed; raises UsageError if that is not here."""
        place = self.place(number)
        if place is None:
            file = self.seen.get(number, {}).get("config") or "FILE"
            raise UsageError(
                f"the role of node {number} is in {file}, which is not on this machine; {NOTHING}: "
                f"run `hastore flip -c {file} --to {self.wanted or number}` there"
            )
        return place


class Flip:
    """A planned flip to node `to`; `run` of a mode does its steps."""

    def __init__(self, group: GroupFiles, to: int, timeout_s: float, say: Say) -> None:
        """Prepare; the deadline is `timeout_s` from now."""
        self._group = group
        self._to = to
        self._say = say
        self._end = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self.master: int | None = None  # the master, or the leader, that the flip has found
        self._is_asked = False  # whether the wanted node was told to take over

    def run(self, *, only_check: bool) -> Status:
        """Do the steps; return the status of node `to`. `only_check`: say them only."""
        raise NotImplementedError

    @property
    def _again(self) -> str:
        """The command that goes on with this flip."""
        return f"`hastore flip -c {self._group.given} --to {self._to}`"

    def _wait_until(self, done: Callable[[], bool], end: float | None = None) -> bool:
        """Wait until `done()`; False if it is not so at `end`, or at the flip's deadline."""
        end = self._end if end is None else end
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True


def slave_of(status: Status, number: int) -> Status | None:
    """Return what a master, or a leader, says of a node that follows it; None without a link."""
    return next((one for one in status["slaves"] if one["node"] == number), None)
