"""A node's role, changed by the node itself over the network: promote, demote, flip `--remote`."""

import secrets
from typing import Any

from hastore.cli.own_node import Flags, RegistryPlace, RolePlace, ask_node, node_name
from hastore.cli.remote_nodes import CHANGE_S, LOOK_S, FileChanged, Missed, order
from hastore.config.model import Config, Role
from hastore.errors import HastoreError, UsageError
from hastore.protocol import api


class RemotePlace:
    """The role in the file of the node of a configuration; the node reads and changes it."""

    def __init__(self, config: Config) -> None:
        self.what = f"the file of node {config.node}"
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the node's file. Raises HastoreError if the node does not say it."""
        looked = self._look(_change(Role.SLAVE, None))
        try:
            return Role(looked.role)
        except ValueError as wrong:
            raise HastoreError(
                f"{node_name(self._config)} tells no role of its file: give the command on its "
                "machine"
            ) from wrong

    def change(self, role: Role) -> None:
        """Have the node edit its file; raises HastoreError or UsageError if it does not."""
        self._have_changed(_change(role, None))

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Have the node edit its file, and take the flags, which it uses once."""
        once = api.OnceOptions(command, int(before["epoch"]), **flags)
        self._have_changed(_change(role, once))

    def _look(self, change: api.RoleChange) -> api.Administered:
        found = order(self._config, self._config.node, change, None, LOOK_S)
        if isinstance(found, Missed):
            raise HastoreError(
                f"{node_name(self._config)}: {found.reason}; its role was not changed: see to "
                "that, or give the command on its machine"
            )
        return found

    def _have_changed(self, change: api.RoleChange) -> None:
        looked = self._look(change)
        if not looked.changed:
            return
        own = self._config
        try:
            found = order(own, own.node, change, looked.version, CHANGE_S)
        except FileChanged as conflict:
            raise HastoreError(f"{conflict}; give the command again") from conflict
        if isinstance(found, Missed):
            known = "perhaps it was changed: give the command again"
            text = known if found.perhaps_done else "its role was not changed"
            raise HastoreError(f"{node_name(own)}: {found.reason}; {text}")


def remote_place(config: Config) -> RolePlace:
    """Return where the role of the configuration's node is changed from another machine."""
    return RemotePlace(config) if config.registry is None else RegistryPlace(config)


def ask_named(config: Config) -> dict[str, Any] | None:
    """Return the status of the configuration's node, as `ask_node`; UsageError if it is another."""
    status = ask_node(config)
    wanted = config.node, config.cluster, config.group
    if status is not None:
        told = tuple(status.get(key) for key in ("node", "cluster", "group"))
        if told != wanted:
            raise UsageError(
                f"{node_name(config)} is node {told[0]} of {told[1]}/{told[2]}; nothing was "
                "changed: correct `nodes` in FILE"
            )
    return status


def _change(role: Role, once: api.OnceOptions | None) -> api.RoleChange:
    return api.RoleChange(secrets.token_hex(8), role.value, once)
