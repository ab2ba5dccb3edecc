"""Real nodes in this process that follow their own files and know identities, for `--remote`.

Each node's file is in a folder of its own, as on a machine of its own. `copy` is what an
administrator has elsewhere: a copy of node 1's file, and the security files of two identities.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_names
from hastore.config.model import Mode
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.server.role_source import ConfigWatch
from tests.cli.kit import hastore
from tests.ha.nodes import wait_for
from tests.process.harness import Ports, audit_lines

NEW = ("--api", "tcp://127.0.0.1:41", "--ha", "127.0.0.1:42", "--http", "127.0.0.1:43")
SMALL = {"commitlog_file_size": 65536, "index_slots": 100, "index_entries": 400}


class Machines:
    """The nodes of a group; `files` are theirs, `stores` their stores."""

    def __init__(self, folder: pathlib.Path, count: int, mode: Mode = Mode.CLASSIC) -> None:
        self.folder = folder
        self.mode = mode
        self._ports = Ports()
        self.addresses = self._ports.addresses(count)
        self.files: dict[int, pathlib.Path] = {}
        self.stores: dict[int, pathlib.Path] = {}
        self._running: dict[int, Node | DLedgerNode] = {}
        self.identities = folder / "identities.yaml"
        editor = IdentityEditor(str(self.identities), create=True)
        for name, is_admin in (("ops", True), ("shop", False)):
            key = secrets.token_hex(32)
            editor.add(
                Identity(name, produce=("*",), is_admin=is_admin), key, SYSTEM_CLOCK.wall_ms()
            )
            file = folder / f"{name}.key"
            file.write_text(key)
            file.chmod(0o600)
            (folder / f"{name}.yaml").write_text(f"identity: {name}\nkey_file: {file}\n")
        editor.save()
        for number in self.addresses:
            self.write(number)
        self.copy = folder / "copy.yaml"
        self.copy.write_bytes(self.files[1].read_bytes())

    def write(self, number: int, **changes: Any) -> None:
        """Write a node's file."""
        place = self.folder / f"machine{number}"
        place.mkdir(exist_ok=True)
        self.stores[number] = place / "store"
        settings: dict[str, Any] = {
            "cluster": "c", "group": "g", "node": number, "mode": self.mode.value,
            "store": {"root": str(self.stores[number]), **SMALL},
            "security": {"identities": str(self.identities)}, **changes,
        }  # fmt: skip
        if self.mode is Mode.CLASSIC:
            settings |= {"acks": 1, "role": "SYNC_MASTER" if number == 1 else "SLAVE"}
        settings["nodes"] = self.addresses
        self.files[number] = place / "node.yaml"
        self.files[number].write_text(f"# {number}\n{yaml.safe_dump(settings, sort_keys=False)}")

    def start(self, *numbers: int) -> None:
        """Start nodes, each without waiting for the others."""
        for number in numbers:
            path = str(self.files[number])
            watch = ConfigWatch(path, {})
            make: Callable[..., Node | DLedgerNode] = Node
            if self.mode is Mode.DLEDGER:
                make = DLedgerNode
            node = make(
                watch.first(), watch.follow, config_path=path,
                config_problem=lambda watch=watch: watch.problem, parse=watch.parse,
            )  # fmt: skip
            node.start()
            self._running[number] = node

    def stop(self, *numbers: int) -> None:
        """Stop nodes."""
        for number in numbers:
            self._running.pop(number).stop()

    def end(self) -> None:
        """Stop all nodes, and release the ports."""
        self.stop(*self._running)
        self._ports.close()

    @property
    def running(self) -> set[int]:
        """The nodes that run."""
        return set(self._running)

    def status(self, number: int) -> dict[str, Any]:
        """Return a node's status."""
        return self._running[number].backend.status()

    def wait(self, number: int, what: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the first status of the node of which `what` is true."""

        def look() -> dict[str, Any] | None:
            status = self.status(number)
            return status if what(status) else None

        found: dict[str, Any] = wait_for(look, f"node {number}")
        return found

    def lists(self) -> list[list[int]]:
        """Return the nodes that each node's file lists."""
        return [sorted(load_names(str(path)).nodes) for path in self.files.values()]

    def bytes(self) -> list[bytes]:
        """Return the content of the nodes' files."""
        return [path.read_bytes() for path in self.files.values()]

    def run(self, *arguments: object, who: str | None = "ops") -> tuple[int, Any, str]:
        """Run a command with `--remote`; return its exit code, its JSON and its stderr."""
        security = [] if who is None else ["--security", str(self.folder / f"{who}.yaml")]
        done = hastore(*map(str, arguments), "--remote", *security, "--json")
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    def audit(self, number: int, action: str) -> list[dict[str, Any]]:
        """Return lines of a node's audit log."""
        return audit_lines(self.stores[number], action)


@contextlib.contextmanager
def machines(folder: pathlib.Path, count: int, mode: Mode = Mode.CLASSIC) -> Iterator[Machines]:
    """Make a group; its nodes end with the block."""
    made = Machines(folder, count, mode)
    try:
        yield made
    finally:
        made.end()
