"""What an operator's command for a whole group knows: its nodes' statuses, and their files here."""

from __future__ import annotations

import os
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
from hastore.errors import ConfigError, UsageError

NOTHING = "nothing was changed"

Status = dict[str, Any]


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
