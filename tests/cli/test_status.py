"""What `hastore status` says of a group, in whole sentences: rows, roles, remedies, exit codes.

The nodes run in this process. tests/cli/test_settled.py has what is decided without a node.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore.config.model import Config, NodeAddress
from hastore.server.node import Node
from tests.cli.kit import hastore
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group

MakeNode = Callable[..., Node]


class Group:
    """Nodes of one group in this process, each on its fixed addresses."""

    def __init__(self, root: pathlib.Path, count: int) -> None:
        self.root = root
        self.ports = Ports()
        self.nodes = {
            number: NodeAddress(**one) for number, one in self.ports.addresses(count).items()
        }
        self._running: dict[int, Node] = {}
        self._changed: dict[int, Config] = {}

    def __getitem__(self, number: int) -> Node:
        return self._running[number]

    def start(self, *numbers: int, **changes: Any) -> None:
        """Start nodes, each without waiting for the others."""
        for number in numbers:
            config = config_in_group(self.root, number, self.nodes, **changes)
            node = Node(
                config,
                lambda number=number: self._changed.pop(number, None),
                config_path=self.file(number),
            )
            node.start()
            self._running[number] = node

    def file(self, number: int) -> str:
        """Return the path of a node's file, which it does not read here."""
        return f"/etc/hastore/node{number}.yaml"

    def edit(self, number: int, config: Config) -> None:
        """Let a node find another configuration in its file."""
        self._changed[number] = config
        self[number].wake()

    def stop(self, *numbers: int) -> None:
        """Stop nodes."""
        for number in numbers:
            self._running.pop(number).stop()

    def end(self) -> None:
        """Stop all nodes, and release the ports."""
        self.stop(*self._running)
        self.ports.close()

    def api(self, *numbers: int) -> str:
        """Return the addresses of nodes, for --bootstrap; of all, if none is named."""
        return ",".join(self.nodes[number].api for number in numbers or self.nodes)

    def wait(self, number: int, what: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the node's status once `what` is true of it."""
        wait_for(lambda: what(self[number].backend.status()), f"node {number}")
        return self[number].backend.status()

    def settle(self) -> None:
        """Wait until the slaves that run are in sync with node 1."""
        others = set(self._running) - {1}

        def in_sync(status: dict[str, Any]) -> bool:
            return others == {one["node"] for one in status["slaves"] if one["in_sync"]}

        self.wait(1, lambda s: s["writable"] and in_sync(s))
        for number in others:
            self.wait(number, lambda s: (s["reason"] or "").endswith("node 1 is the master"))


@pytest.fixture
def make_group(tmp_path: pathlib.Path) -> Iterator[Callable[[int], Group]]:
    with contextlib.ExitStack() as ends:

        def make(count: int) -> Group:
            group = Group(tmp_path, count)
            ends.callback(group.end)
            return group

        yield make


def shown(*arguments: str) -> tuple[int, list[str], list[str]]:
    """Run `hastore status`; return its exit code, and the lines on stdout and on stderr."""
    done = hastore("status", *arguments)
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


def cells(line: str) -> list[str]:
    """Return the columns of a row; they are two spaces apart."""
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_healthy_pair(make_group: Callable[[int], Group]) -> None:
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    code, lines, problems = shown("--bootstrap", group.api())
    assert (code, problems) == (0, [])
    assert cells(lines[1])[:2] == ["1", "SYNC_MASTER"] and cells(lines[1])[3] == "yes"
    assert cells(lines[2])[:2] == ["2", "SLAVE"] and cells(lines[2])[3] == "no"
    assert len(lines) == 4 and lines[3].startswith("node 1 <- slave 2 (")
    code, lines, problems = shown("--bootstrap", group.api(), "--json")
    master, slave = map(json.loads, lines)
    assert (code, problems) == (0, []) and master["answers"] and slave["answers"]
    assert master["address"] == group.nodes[1].api
    told = [(s["takes_default"], s["default_acks"], s["takes_acks"]) for s in (master, slave)]
    assert told == [(True, "all", ["all", 1, 0]), (False, None, [])]
    assert master["default_refused"] is None
    assert slave["default_refused"] == "this node is a slave; node 1 is the master"


def test_a_master_alone_refuses_default_puts(make_group: Callable[[int], Group]) -> None:
    group = make_group(2)
    group.start(1)
    group.wait(1, lambda s: s["writable"])
    code, lines, problems = shown("--bootstrap", group.api(1))
    assert code == 4
    assert problems == [
        "error: puts that do not set acks are refused: node 1, the SYNC_MASTER, takes puts with "
        "acks=1 only (0 of 1 slaves in sync); start node 2, or, if it is gone for long, let the "
        f"master go on alone: `hastore promote -c {group.file(1)} --async`"
    ]
    assert cells(lines[1])[3] == "acks 1 only"
    assert cells(lines[2])[:4] == ["2", "no answer", "-", "refused"]
    assert lines[-1] == (
        f"node 2: no answer from {group.nodes[2].api}: Connection refused: no node listens there"
    )
    code, lines, problems = shown("--bootstrap", group.api(), "--json")
    master, silent = map(json.loads, lines)
    assert code == 4 and problems[1:] == [f"no answer from {group.nodes[2].api}"]
    assert (master["writable"], master["takes_default"], master["takes_acks"]) == (
        True, False, [1, 0],
    )  # fmt: skip
    assert (silent["node"], silent["answers"], silent["silence"]) == (2, False, "refused")
    assert silent["role"] is None and not silent["writable"] and not silent["takes_default"]


@pytest.mark.parametrize("kind", ["refused", "timed out"])
def test_a_silent_slave_has_a_row_and_an_exit_code(
    make_group: Callable[[int], Group], kind: str
) -> None:
    """Puts go on beside it: exit code 1. A listener that never answers is not one that is gone."""
    group = make_group(3)
    group.start(2, 1)
    group.settle()
    with contextlib.ExitStack() as ends:
        if kind == "timed out":
            host, port = group.nodes[3].api.removeprefix("tcp://").split(":")
            ends.enter_context(socket.create_server((host, int(port))))
        code, lines, problems = shown("--bootstrap", group.api(1), "--timeout", "0.5")
    assert code == 1
    assert problems == ["error: node 3 does not answer; all others do, and puts are taken"]
    assert cells(lines[1])[3] == "yes"
    assert cells(lines[3])[:4] == ["3", "no answer", "-", kind]
    why = "Connection refused: no node listens there"
    if kind == "timed out":
        why = "it takes the connection and says nothing: it hangs, or is stopped"
    assert lines[-1] == f"node 3: no answer from {group.nodes[3].api}: {why}"
