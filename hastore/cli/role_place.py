"""Where the operator's commands find and change a node's role: its file, or the registry."""

import json
import os
from typing import Any, Protocol

from hastore.addresses import KAZOO_MISSING
from hastore.cli.common import print_note
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import edit_role
from hastore.config.model import Config, Role
from hastore.errors import HastoreError, RegistryError, UsageError
from hastore.fs.filesystem import REAL

Flags = dict[str, bool]  # no_catch_up, force_unclean, accept_loss


class RolePlace(Protocol):
    """A node's role as the operator has set it; `what` names the place in texts."""

    what: str

    def role(self) -> Role | None:
        """Return the present role; None if there is none."""

    def change(self, role: Role) -> None:
        """Set the role."""

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Set the role, and give the running node the flags of this command, which it uses once.

        `before` is the node's status.
        """


def role_place(path: str, config: Config) -> RolePlace:
    """Return the place for the node of the file at `path`. Raises UsageError without kazoo."""
    return FilePlace(path, config) if config.registry is None else RegistryPlace(config)


class FilePlace:
    """The file itself; flags go to once.json in the store."""

    what = "the file"

    def __init__(self, path: str, config: Config) -> None:
        self._path = path
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the file."""
        return self._config.role

    def change(self, role: Role) -> None:
        """Edit the file."""
        edit_role(self._path, role)

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Write once.json durably; the edit of the file then makes the node read it."""
        folder = os.path.join(self._config.store.root, "hastore")
        if not REAL.is_dir(folder):
            remedy = "run the command in the directory where the node was started"
            raise HastoreError(
                f"{folder} does not exist, so store.root is another folder here; {remedy}"
            )
        note = {
            "command": command,
            **flags,
            "epoch": before["epoch"],
            "wall_ms": SYSTEM_CLOCK.wall_ms(),
        }
        REAL.replace_bytes(os.path.join(folder, "once.json"), json.dumps(note).encode())
        self.change(role)


class RegistryPlace:
    """The node's object in ZooKeeper; each operation has a session of its own."""

    what = "the registry"

    def __init__(self, config: Config) -> None:
        try:
            from hastore.registry import editing
        except ImportError as missing:
            raise UsageError(KAZOO_MISSING) from missing
        self._editing = editing
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the registry, None without a valid object."""
        with self._editing.open_editor(self._config) as editor:
            try:
                return editor.role()
            except RegistryError as wrong:
                print_note(f"warning: {wrong}")
                return None

    def read_role(self) -> Role | None:
        """Return the role in the registry, None without an object; raises RegistryError."""
        with self._editing.open_editor(self._config) as editor:
            return editor.role()

    def change(self, role: Role) -> None:
        """Set the role there."""
        with self._editing.open_editor(self._config) as editor:
            editor.change(role, None)

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Set role and flags in one write."""
        once = self._editing.new_once(command, before["epoch"], **flags)
        with self._editing.open_editor(self._config) as editor:
            editor.change(role, once)
