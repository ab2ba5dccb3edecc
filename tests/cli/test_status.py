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

import msgspec
import pytest
import yaml

from hastore.client.producer.producer import Producer
from hastore.config.model import Config, NodeAddress, Role
from hastore.server.http_server import render_metrics
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
            self._write(config)
            node = Node(
                config,
                lambda number=number: self._changed.pop(number, None),
                config_path=self.file(number),
            )
            node.start()
            self._running[number] = node

    def file(self, number: int) -> str:
        """Return the path of a node's file, for commands; the node does not read it here."""
        return str(self.root / f"node{number}.yaml")

    def _write(self, config: Config) -> None:
        own = {"root": config.store.root, "commitlog_file_size": config.store.commitlog_file_size}
        nodes = {number: msgspec.to_builtins(one) for number, one in self.nodes.items()}
        fields = {
            "cluster": config.cluster, "group": config.group, "node": config.node,
            "role": config.assigned_role.value, "acks": config.acks, "nodes": nodes, "store": own,
        }  # fmt: skip
        pathlib.Path(self.file(config.node)).write_text(yaml.safe_dump(fields))

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


def put(node: Node, *bodies: bytes, acks: int | str = 1) -> None:
    """Send messages, and wait for each."""
    with Producer(node.api.endpoint, acks=acks) as producer:  # type: ignore[arg-type]
        for body in bodies:
            assert producer.send_sync("t", body).status == "PUT_OK"


def metrics_of(status: dict[str, Any]) -> dict[str, str]:
    """Return the samples of /metrics without their labels."""
    lines = render_metrics(status).decode().splitlines()
    return {line.partition("{")[0]: line.split()[-1] for line in lines if line[0] != "#"}


def audited(node: Node, action: str) -> list[dict[str, Any]]:
    """Return the lines of the audit log about an action."""
    text = pathlib.Path(node.audit.path).read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["action"] == action]


def test_messages_that_were_cut_are_told_until_an_operator_dismisses_them(
    make_group: Callable[[int], Group],
) -> None:
    """They were acknowledged with acks=1, by a master that had lost its slave."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    put(group[1], b"on both", acks="all")
    group.wait(2, lambda s: s["confirmed_offset"] == s["max_offset"] > 0)
    group.stop(2)
    put(group[1], b"lost 1", b"lost 2", b"lost 3")
    group.stop(1)
    group.start(2, role=Role.SYNC_MASTER)
    group.wait(2, lambda s: s["writable"])
    group.start(1, role=Role.SLAVE)
    status = group.wait(1, lambda s: s["cuts"])
    (cut,) = status["cuts"]
    start, end = cut["start_offset"], cut["end_offset"]
    folder = f"{group.root}/node1/rescued/65537-{start}"
    assert (cut["folder"], cut["messages"], cut["all_counted"]) == (folder, 3, True)
    assert pathlib.Path(folder, "0" * 20).stat().st_size == end > start
    text = (
        "3 messages were cut from this log and may be nowhere else (puts with acks=1 may have been "
        f"acknowledged): bytes {start} to {end}, in {folder}; look at them (`hastore log dump "
        f"--store {folder} --body`), send again what is missing, then run `hastore rescued dismiss "
        "-c FILE --cut 1` on this node"
    )
    assert text in status["problems"]
    told = metrics_of(status)
    assert (told["hastore_cuts"], told["hastore_cut_messages"]) == ("1.0", "3.0")
    (line,) = wait_for(lambda: audited(group[1], "cut"))
    assert line["outcome"] == "archived"
    assert line["reason"] == f"cut 1: 3 messages, bytes {start} to {end}, in {folder}"
    group.stop(1)
    group.start(1, role=Role.SLAVE)  # a restart forgets nothing
    assert group[1].backend.status()["cuts"] == [cut]
    listed = hastore("rescued", "list", "-c", group.file(1))
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout.startswith("cut 1: 3 messages, 20")
    assert listed.stdout.endswith(f"Z, bytes {start} to {end}, in {folder}\n")
    other = hastore("rescued", "dismiss", "-c", group.file(1), "--cut", "2")
    assert other.returncode == 1 and "has no cut 2" in other.stderr
    dismissed = hastore("rescued", "dismiss", "-c", group.file(1), "--cut", "1")
    assert (dismissed.returncode, dismissed.stdout) == (0, "1 cut dismissed\n"), dismissed.stderr
    status = group[1].backend.status()
    assert (status["cuts"], status["cut_messages"]) == ([], 0)
    assert not any("cut from this log" in problem for problem in status["problems"])
    assert metrics_of(status)["hastore_cuts"] == "0.0"
    lines = wait_for(lambda: len(found := audited(group[1], "cut")) == 2 and found)
    assert lines[1]["outcome"] == "dismissed"
    assert lines[1]["reason"].startswith(f"{lines[0]['reason']}, by ")
    assert pathlib.Path(folder).is_dir(), "the archive is the operator's"
    group.stop(1)
    group.start(1, role=Role.SLAVE)
    assert group[1].backend.status()["cuts"] == []


def test_a_dismissal_reaches_a_node_that_does_not_run(tmp_path: pathlib.Path) -> None:
    group = Group(tmp_path, 1)
    changes = {"role": Role.ASYNC_MASTER, "acks": 0}
    try:
        group.start(1, **changes)
        group.wait(1, lambda s: s["writable"])
        put(group[1], b"1", b"2")
        store = group[1].backend.store
        store.archive(0, "65537-0")
        assert group[1].backend.status()["cuts"] == [], "it was not made yet"
        store.archive(0, "65537-0")  # a crash had interrupted it: it is one cut
        store.truncate(0)
        (cut,) = group[1].backend.status()["cuts"]
        assert (cut["id"], cut["messages"]) == (2, 2) and cut["folder"].endswith("65537-0.2")
        group.stop(1)
        done = hastore("rescued", "dismiss", "-c", group.file(1), "--all")
        assert done.returncode == 0, done.stderr
        assert done.stdout == (
            "1 cut dismissed; the node does not run, and takes this when it starts\n"
        )
        group.start(1, **changes)
        wait_for(lambda: not group[1].backend.status()["cuts"])
        group.wait(1, lambda s: s["writable"])
        put(group[1], b"3")
        group[1].backend.store.archive(0, "65537-0")
        group[1].backend.store.truncate(0)
        (cut,) = group[1].backend.status()["cuts"]
        assert (cut["id"], cut["messages"]) == (3, 1), "a number is never used again"
    finally:
        group.end()
