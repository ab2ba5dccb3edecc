"""What `hastore status` says of a group, in whole sentences: rows, roles, remedies, exit codes.

The nodes run in this process. tests/cli/test_settled.py has what is decided without a node.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import yaml

from hastore import __version__
from hastore.cli import doctor
from hastore.cli.own_node import pending_texts
from hastore.cli.status import versions_text
from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, HAConfig, NodeAddress, Role, SecurityConfig, Wire
from hastore.errors import NotStoredError, OutcomeUnknown
from hastore.fs.filesystem import REAL, FileSystem, RealFileSystem
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.security.tls_engine import NodeName
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.metrics.from_status import render_metrics
from hastore.server.node import Node
from tests.cli.kit import hastore
from tests.ha.nodes import wait_for
from tests.process.harness import Ports, audit_lines
from tests.security.pki import Pki
from tests.server.kit import config_in_group, config_of, group_of_one, running
from tests.store.faulty import FaultyFileSystem

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

    def start(self, *numbers: int, fs: FileSystem = REAL, **changes: Any) -> None:
        """Start nodes, each without waiting for the others."""
        for number in numbers:
            config = config_in_group(self.root, number, **{"nodes": self.nodes, **changes})
            self._write(config)
            node = Node(
                config,
                lambda number=number: self._changed.pop(number, None),
                config_path=self.file(number),
                fs=fs,
            )
            node.start()
            self._running[number] = node

    @property
    def running(self) -> set[int]:
        """The nodes that run."""
        return set(self._running)

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
        """Return the first status of the node of which `what` is true."""

        def look() -> dict[str, Any] | None:
            status = self[number].backend.status()
            return status if what(status) else None

        found: dict[str, Any] = wait_for(look, f"node {number}")
        return found

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


@pytest.fixture
def pair(make_group: Callable[[int], Group]) -> Group:
    """A master, node 1, and a slave in sync."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    return group


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
    status = group.wait(1, lambda s: s["unlinked"])  # over HTTP there is only this
    (missing,) = status["unlinked"]
    assert (missing["node"], missing["address"]) == (2, group.nodes[2].ha)
    assert "refused" in missing["why"]
    told = metrics_of(status)
    assert told["hastore_unlinked"] == told["hastore_writable"] == "1"
    assert told["hastore_takes_default"] == "0"
    group.start(2)
    group.settle()
    assert group[1].backend.status()["unlinked"] == []


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
        for timeout_s in ("0.5", "2", "8", "32"):  # on a busy machine the others need longer
            code, lines, problems = shown("--bootstrap", group.api(1), "--timeout", timeout_s)
            if code == 1 and sum("no answer" in cells(line)[1:2] for line in lines[1:4]) == 1:
                break
    assert code == 1
    assert problems == ["error: node 3 does not answer; all others do, and puts are taken"]
    assert cells(lines[1])[3] == "yes"
    assert cells(lines[3])[:4] == ["3", "no answer", "-", kind]
    why = "Connection refused: no node listens there"
    if kind == "timed out":
        why = "it takes the connection and says nothing: it hangs, or is stopped"
    assert lines[-1] == f"node 3: no answer from {group.nodes[3].api}: {why}"


def test_nodes_of_different_versions_are_named(make_group: Callable[[int], Group]) -> None:
    """Between two steps of an upgrade: which node runs what; an earlier version does not say."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    _, lines, _ = shown("--bootstrap", group.api())
    assert not any("versions" in line for line in lines)
    one, other = group[1].backend.status(), group[2].backend.status()
    assert one["version"] == other["version"] == __version__
    old = {key: value for key, value in other.items() if key != "version"}
    assert versions_text([one, old]) == (
        f"the versions differ: node 1 runs {__version__}; node 2 runs an earlier version"
    )
    assert versions_text([{**one, "version": "0.2.0"}, other, {**other, "node": 3}]) == (
        f"the versions differ: node 1 runs 0.2.0; node 2, 3 run {__version__}"
    )


def supersede(group: Group) -> dict[str, Any]:
    """Let node 2 become master although the file of node 1 says master; return node 1's status."""
    config = config_in_group(group.root, 2, group.nodes, role=Role.SYNC_MASTER)
    group.edit(2, config)
    group.wait(2, lambda s: s["writable"])
    return group.wait(1, lambda s: (s["reason"] or "").endswith("node 2 is the master"))


def test_a_superseded_node_says_that_it_follows(make_group: Callable[[int], Group]) -> None:
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    status = supersede(group)
    assert (status["role"], status["role_state"]) == ("SLAVE", "following")
    group.wait(2, lambda s: s["takes_default"])
    code, lines, problems = shown("--bootstrap", group.api())
    assert (code, problems) == (0, [])
    assert cells(lines[1])[:2] == ["1", "SLAVE"] and cells(lines[2])[1] == "SYNC_MASTER"
    assert lines[3] == (
        "node 1: superseded by node 2 (epoch 131074); this node follows. To make it master again "
        "run `hastore promote`, to make it a slave `hastore demote`; node 2 is the master"
    )
    assert len(lines) == 5 and lines[4].startswith("node 2 <- slave 1 (")


def test_without_zookeeper_a_superseded_node_does_not_keep_its_role(
    make_group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("kazoo")
    monkeypatch.setattr("hastore.server.node.REGISTRY_WAIT_S", 0.1)
    monkeypatch.setattr("hastore.registry.session.ANSWER_S", 0.1)
    group = make_group(2)
    zookeeper = f"zk://127.0.0.1:{group.ports.take()}"  # nobody listens there
    group.start(2)
    group.start(1, registry=zookeeper)
    group.settle()

    def said(status: dict[str, Any]) -> str:
        (text,) = [one for one in status["problems"] if "out of reach" in one]
        return str(text)

    status = group.wait(1, lambda s: any("out of reach" in one for one in s["problems"]))
    assert said(status).endswith("; the node keeps its role, SYNC_MASTER")
    status = supersede(group)
    assert said(status).endswith(
        "; the node goes on as SLAVE, although its role there was SYNC_MASTER"
    )


def test_a_full_disk_is_no_wait_to_become_master(make_group: Callable[[int], Group]) -> None:
    group, fs = make_group(2), FaultyFileSystem()

    def full(call: str, path: str) -> None:
        if call == "open" and path.endswith("/spare"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    group.start(2)
    group.start(1, fs=fs)
    group.settle()
    put(group[1], b"the first file is there")
    group.wait(1, lambda s: pathlib.Path(group.root, "node1", "hastore", "spare").exists())
    fs.hook = full
    for timeout_s in (0.5, 4.0, 32.0):  # on a busy machine a put may wait before it is refused
        with Producer(group[1].api.endpoint, acks=1, delivery_timeout_s=timeout_s) as producer:
            with pytest.raises((NotStoredError, OutcomeUnknown)) as refused:
                for _ in range(8):  # two files, and no room for the third
                    producer.send_sync("t", b"x" * 30_000)
        if "SERVICE_NOT_AVAILABLE" in str(refused.value):
            break
    assert isinstance(refused.value, NotStoredError)
    assert "SERVICE_NOT_AVAILABLE" in str(refused.value)
    status = group.wait(1, lambda s: not s["writable"])
    code, lines, problems = shown("--bootstrap", group.api())
    spare = f"{group.root}/node1/hastore/spare"
    reason = (
        f"the disk is full: [Errno 28] No space left on device: '{spare}'; make room, and puts go "
        "on by themselves"
    )
    assert code == 4
    assert problems == [f"error: no node takes writes; node 1 is the master: {reason}"]
    assert (status["role_state"], status["reason"], status["takes_acks"]) == ("master", reason, [])
    assert cells(lines[1])[:2] == ["1", "SYNC_MASTER"] and cells(lines[1])[3] == "no"
    assert f"node 1: {reason}" in lines
    fs.heal()
    group.wait(1, lambda s: s["takes_default"])
    assert shown("--bootstrap", group.api())[0] == 0


def test_a_promotion_under_way_is_told_with_what_it_waits_for(
    make_group: Callable[[int], Group],
) -> None:
    group = make_group(3)
    group.start(2, role=Role.SYNC_MASTER)  # it needs one more node
    group.wait(2, lambda s: "waiting for node" in (s["reason"] or ""))
    code, lines, problems = shown("--bootstrap", group.api(2))
    assert code == 4
    assert problems == [
        "error: no node takes writes; node 2 waits to become master; see its reason"
    ]
    assert [cells(line)[:2] for line in lines[1:4]] == [
        ["1", "no answer"], ["2", "SYNC_MASTER"], ["3", "no answer"],
    ]  # fmt: skip
    assert lines[4].startswith(
        "node 2: waiting to be master: promotion needs 2 clean nodes and has 1; waiting for node 1"
    )
    assert group[2].backend.status()["role_state"] == "promoting"


def test_a_node_that_was_added_moves_no_master(make_group: Callable[[int], Group]) -> None:
    """Both files have the new node; the remedy is a promotion of the master, also at the slave."""
    group = make_group(3)
    both = {number: group.nodes[number] for number in (1, 2)}
    group.start(2, 1, nodes=both)
    group.settle()
    for number in (1, 2):
        group.edit(number, config_in_group(group.root, number, group.nodes))
        group.wait(number, lambda s: s["config_pending"])
    code, lines, problems = shown("--bootstrap", group.api(1, 2))
    assert (code, problems) == (0, []), "the new node does not count yet"
    assert cells(lines[3])[:4] == ["3", "no answer", "-", "refused"]
    pending = "nodes: 1, 2, 3 in its file, 1, 2 in force until the next promotion"
    command = f"`hastore promote -c {group.file(1)}`"
    assert f"node 1: {pending}, {command}" in lines
    assert f"node 2: {pending} of the master, node 1: {command}" in lines
    told = next(pending_texts(group.file(2), group[2].backend.status()))
    assert told == f"{pending} of the master, node 1, by its file"


def test_nobody_waits_for_a_dead_node_that_was_replaced(make_group: Callable[[int], Group]) -> None:
    """The list without it is put in force later, once the new node is in sync."""
    group = make_group(4)
    old = {number: group.nodes[number] for number in (1, 2, 3)}
    new = {number: group.nodes[number] for number in (1, 3, 4)}
    group.start(3, 2, 1, nodes=old)
    group.settle()
    group.stop(2)
    for number in (1, 3):
        group.edit(number, config_in_group(group.root, number, new))
    group.wait(1, lambda s: s["config_pending"])
    group.start(4, nodes=new)
    code, _, problems = shown("--bootstrap", group.api(1), "--wait", "60")
    assert (code, problems) == (0, [])
    assert 4 in {one["node"] for one in group[1].backend.status()["slaves"] if one["in_sync"]}
    code, _, problems = shown("--bootstrap", group.api(1))
    assert code == 1 and "node 2 does not answer" in problems[0], "it is in force still"


def test_in_a_pair_a_node_that_replaces_a_dead_one_needs_a_promotion(
    make_group: Callable[[int], Group],
) -> None:
    """It is in sync and counts for nothing yet: neither it nor its link is what is wrong."""
    group = make_group(3)
    old = {number: group.nodes[number] for number in (1, 2)}
    new = {number: group.nodes[number] for number in (1, 3)}
    group.start(2, 1, nodes=old)
    group.settle()
    group.stop(2)
    group.edit(1, config_in_group(group.root, 1, new))
    group.wait(1, lambda s: s["config_pending"])
    group.start(3, nodes=new)
    code, _, problems = shown("--bootstrap", group.api(1), "--wait", "60")
    assert code == 4
    assert problems == [
        "error: puts that do not set acks are refused: node 1, the SYNC_MASTER, takes puts with "
        "acks=1 only (0 of 1 slaves in sync); node 3 is in sync, but counts only once the changed "
        f"list of nodes is in force: `hastore promote -c {group.file(1)}`"
    ]


def test_a_master_that_only_does_not_answer_here_is_not_replaced(
    make_group: Callable[[int], Group],
) -> None:
    """Its listener is there: the way to it is broken, or it hangs. The slave still follows it."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    hidden = NodeAddress(api="", ha=group.nodes[1].ha, http=group.nodes[1].http)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hidden = msgspec.structs.replace(hidden, api=f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        group.stop(2)
        group.nodes[1] = hidden
        group.start(2)
        group.wait(2, lambda s: (s["reason"] or "").endswith("node 1 is the master"))
        code, lines, problems = shown("--bootstrap", group.api(2), "--timeout", "0.3")
    assert code == 4
    assert problems == [
        "error: no node that answers takes writes; node 2 knows it as the master, but node 1 does "
        "not answer here (timed out): it may well take writes. Look at it and at the way to it "
        "first; a promotion would take the role from it"
    ]
    assert cells(lines[1])[:4] == ["1", "no answer", "-", "timed out"]
    assert not any("hastore promote" in line for line in lines)


def test_a_dead_master_is_named_beside_the_node_to_promote(
    make_group: Callable[[int], Group],
) -> None:
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    group.stop(1)
    status = group.wait(2, lambda s: s["master"] is None)
    code, lines, problems = shown("--bootstrap", group.api(2))
    assert code == 4  # node 2 may have called node 1 in between, and have a problem of its own
    assert [line for line in problems if line.startswith("error: ")] == [
        f"error: no node takes writes; node 2 is the most up to date (epoch {status['epoch']}, "
        f"max_offset {status['max_offset']}) of those that answer: start node 1, which may "
        f"have messages that no other node has, or run `hastore promote -c {group.file(2)}`"
    ]
    assert lines[-1].endswith("Connection refused: no node listens there")


def listen_silently(group: Group, number: int) -> socket.socket:
    """Return a listener at a node's api address, which takes connections and says nothing."""
    host, port = group.nodes[number].api.removeprefix("tcp://").split(":")
    return socket.create_server((host, int(port)))


def test_a_last_master_that_hangs_is_looked_at_before_another_is_promoted(
    make_group: Callable[[int], Group],
) -> None:
    """No slave has a link to it any more, but its process is there: it is none to start."""
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    group.stop(1)
    status = group.wait(2, lambda s: s["master"] is None)
    with listen_silently(group, 1):
        code, lines, problems = shown("--bootstrap", group.api(2), "--timeout", "0.3")
    assert code == 4  # node 2 may have called node 1 in between, and have a problem of its own
    assert [line for line in problems if line.startswith("error: ")] == [
        f"error: no node takes writes; node 2 is the most up to date (epoch {status['epoch']}, "
        f"max_offset {status['max_offset']}) of those that answer: see why node 1 does not answer "
        "(timed out); it may still take writes. If it is gone, run "
        f"`hastore promote -c {group.file(2)}`"
    ]
    assert cells(lines[1])[:4] == ["1", "no answer", "-", "timed out"]
    group.start(1)
    group.settle()
    group.stop(2)
    group.wait(1, lambda s: not s["takes_default"])
    with listen_silently(group, 2):
        code, lines, problems = shown("--bootstrap", group.api(1), "--timeout", "0.3")
    assert code == 4 and "; see why node 2 does not answer (timed out), or, if " in problems[0]
    assert "node 1: synchronous puts are refused: 0 of 1 slaves in sync; start the slaves" in lines


def test_a_silent_slave_that_its_master_counts_may_hold_up_default_puts(
    make_group: Callable[[int], Group],
) -> None:
    """A slave that is stopped by a signal is in sync until its master ends the link."""
    group = make_group(2)
    own = group.nodes[2]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        api = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        group.nodes[2] = msgspec.structs.replace(own, api=api)
        group.start(1)
        group.nodes[2] = own
        group.start(2)
        group.settle()
        code, lines, problems = shown("--bootstrap", group.api(1), "--timeout", "0.3")
    assert code == 1 and cells(lines[1])[3] == "yes"
    assert problems == [
        "error: node 2 does not answer; all others do, and puts are taken, but node 1 still has a "
        "link to node 2: if it hangs, puts that do not set acks end as FLUSH_SLAVE_TIMEOUT"
    ]


def test_a_group_of_which_no_node_answers_says_why_of_each(
    make_group: Callable[[int], Group],
) -> None:
    group = make_group(2)
    with listen_silently(group, 2):
        code, lines, problems = shown("--bootstrap", group.api(), "--timeout", "1")
    assert (code, lines) == (1, [])
    first, second = group.nodes[1].api, group.nodes[2].api
    assert problems == [
        f"error: no answer from {first}, {second} within 1 s ({first}: Connection refused: no "
        f"node listens there; {second}: it takes the connection and says nothing: it hangs, or is "
        "stopped)"
    ]


@pytest.mark.parametrize("kind", ["TLS", "unauthenticated"])
def test_a_node_that_accepts_no_stranger_is_not_called_dead(
    make_group: Callable[[int], Group], tmp_path: pathlib.Path, kind: str
) -> None:
    group = make_group(2)
    if kind == "TLS":
        pki = Pki(tmp_path / "pki")
        files = pki.node(NodeName("test", "g0", 2))
        security = SecurityConfig(
            ca=files.ca, certificate=files.certificate, key=files.key, api=Wire.TLS
        )
        why = "this port speaks TLS: name the group's CA as tls_ca in the client's security file"
    else:
        editor = IdentityEditor(str(tmp_path / "ids.yaml"), create=True)
        editor.add(Identity("ops", is_admin=True), "0" * 64, SYSTEM_CLOCK.wall_ms())
        editor.save()
        security = SecurityConfig(identities=str(tmp_path / "ids.yaml"))
        why = "this node asks its clients who they are: name identity and key_file"
    group.start(2, security=security)
    group.start(1)
    group.wait(1, lambda s: s["takes_default"])
    code, lines, problems = shown("--bootstrap", group.api(1))
    assert code == 1
    assert problems[-1] == "error: node 2 does not answer; all others do, and puts are taken"
    assert cells(lines[2])[:4] == ["2", "no answer", "-", kind]
    assert lines[-1].startswith(f"node 2: no answer from {group.nodes[2].api}: ")
    assert why in lines[-1]


def test_a_group_that_elects_its_leader(tmp_path: pathlib.Path) -> None:
    """Healthy; with one silent member; without a majority."""
    ports = Ports()
    nodes = {number: NodeAddress(**one) for number, one in ports.addresses(3).items()}
    api = ",".join(one.api for one in nodes.values())
    with contextlib.ExitStack() as ends:
        ends.callback(ports.close)
        members = {}
        for number in nodes:
            config = group_of_one(tmp_path / f"node{number}")
            config = msgspec.structs.replace(config, node=number, nodes=nodes)
            members[number] = node = DLedgerNode(config, lambda: None)
            node.start()
            ends.callback(node.stop)

        def leads() -> list[int]:
            found = [n for n, one in members.items() if one.backend.status()["takes_default"]]
            known = {one.backend.status()["leader"] for one in members.values()}
            return found if known == set(found) else []

        (leader,) = wait_for(leads)
        wait_for(lambda: all(s["in_sync"] for s in members[leader].backend.status()["slaves"]))
        code, lines, problems = shown("--bootstrap", api)
        assert (code, problems) == (0, [])
        assert sorted(cells(line)[1] for line in lines[1:4]) == ["FOLLOWER", "FOLLOWER", "LEADER"]
        status = members[leader].backend.status()
        assert (status["default_acks"], status["takes_acks"]) == ("all", ["all", 1, 0])
        assert metrics_of(status)["hastore_takes_default"] == "1"
        first, second = sorted(set(nodes) - {leader})
        members[first].stop = lambda: None  # type: ignore[method-assign]
        DLedgerNode.stop(members.pop(first))
        code, lines, problems = shown("--bootstrap", nodes[leader].api)
        assert code == 1
        assert problems == [
            f"error: node {first} does not answer; all others do, and puts are taken"
        ]
        assert cells(lines[first])[:4] == [str(first), "no answer", "-", "refused"]
        members[second].stop = lambda: None  # type: ignore[method-assign]
        DLedgerNode.stop(members.pop(second))
        wait_for(lambda: members[leader].backend.status()["leader"] is None)
        code, lines, problems = shown("--bootstrap", nodes[leader].api)
        assert code == 4
        assert problems == [
            "error: no node takes writes; 1 of the 3 members answer, and an election needs 2 that "
            f"reach each other: start node {first}, {second}, or look at the way to it"
        ]
        assert [cells(line)[1] for line in lines[1:4]].count("no answer") == 2


def test_the_slave_of_a_rocketmq_master_is_not_to_be_promoted(
    make_group: Callable[[int], Group], tmp_path: pathlib.Path
) -> None:
    """A node that takes classic slaves stands for the broker, which takes the writes."""
    broker = msgspec.structs.replace(
        config_of(tmp_path / "broker"), ha=HAConfig(allow_classic_peers=True)
    )
    with running(Node(broker, lambda: None)) as master:
        group = make_group(1)
        ha = HAConfig(classic_master=master.ha_address)
        group.start(1, role=Role.SLAVE, acks=0, ha=ha)
        status = group.wait(1, lambda s: s["classic_master"])
        assert status["classic_master"] == master.ha_address
        code, lines, problems = shown("--bootstrap", group.api())
        assert code == 4
        assert problems == [
            "error: no node takes writes; node 1 follows the RocketMQ master "
            f"{master.ha_address}, which does"
        ]
    group.wait(1, lambda s: s["classic_master"] is None)
    code, lines, problems = shown("--bootstrap", group.api())
    assert code == 4 and problems[0].endswith(f"run `hastore promote -c {group.file(1)}`")


@pytest.mark.parametrize("scheme", ["tcp", "zmq+tcp"])
def test_a_node_has_one_row_at_whatever_addresses_it_is_asked(
    make_group: Callable[[int], Group], scheme: str
) -> None:
    if scheme == "zmq+tcp":
        pytest.importorskip("zmq")
    group = make_group(2)
    group.start(2, 1)
    group.settle()
    there = group.nodes[1].api.rpartition(":")[2]
    addresses = f"{scheme}://127.0.0.1:{there},{scheme}://localhost:{there}"
    code, lines, problems = shown("--bootstrap", addresses)
    assert (code, problems) == (0, []), lines
    assert [cells(line)[0] for line in lines[1:3]] == ["1", "2"] and len(lines) == 4


def test_a_cut_of_a_node_that_elects_its_leader_is_told_and_is_no_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No put of it was acknowledged, and each leader that dies under load leaves one."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        cuts = node.store.messages.cuts
        cuts.note("3-4711", 4711, 5000, 2, all_counted=True)
        assert node.backend.status()["cuts"] == []
        cuts.note_made(4711)
        status = node.backend.status()
        (note,) = status["notes"]
        assert status["problems"] == []
        assert note.startswith(
            "2 messages were cut from this log and may be nowhere else (as far as this node knows "
            "no majority had them, so no put was acknowledged): bytes 4711 to 5000, in "
            f"{tmp_path}/s/rescued/3-4711; "
        )
        told = metrics_of(status)
        assert (told["hastore_cuts"], told["hastore_cut_messages"]) == ("1", "2")
        monkeypatch.setattr(doctor, "ask_own", lambda *_: status)
        found = {one.check: one for one in doctor.check_node("n.yaml", node.config)}
        assert "problem" not in found
        assert (found["note"].verdict, found["note"].text) == (
            doctor.Severity.NOTE, note.replace("-c FILE", "-c n.yaml"),
        )  # fmt: skip
        (line,) = wait_for(lambda: audited(node, "cut"))
        assert (line["outcome"], line["reason"]) == (
            "archived",
            f"cut 1: 2 messages, bytes 4711 to 5000, in {tmp_path}/s/rescued/3-4711",
        )


def test_doctor_tells_the_problems_of_a_node_that_runs(pair: Group) -> None:
    """So that a node that lost messages, or whose replay has stopped, is not called good."""
    status = cut_three(pair)
    pair.wait(2, lambda s: s["takes_default"])
    told = [one.replace("-c FILE", f"-c {pair.file(1)}") for one in status["problems"]]
    for more in ((), ("--all",)):
        done = hastore("doctor", "-c", pair.file(1), "--json", *more)
        found = map(json.loads, done.stdout.splitlines())
        assert [one["text"] for one in found if one["verdict"] == "bad"] == told
        assert done.returncode == 1
        assert "were cut from this log" in told[0]


def test_doctor_does_not_call_a_master_good_that_refuses_default_puts(
    make_group: Callable[[int], Group],
) -> None:
    group = make_group(2)
    group.start(1)
    group.wait(1, lambda s: s["writable"])
    done = hastore("doctor", "-c", group.file(1), "--json")
    (node,) = [one for one in map(json.loads, done.stdout.splitlines()) if one["check"] == "node"]
    assert done.returncode == 1 and '"problem"' not in done.stdout  # it is said once
    assert node["verdict"] == "bad"
    assert node["text"] == (
        "node 1 runs as SYNC_MASTER, epoch 65537; it takes puts with acks=1 only, and refuses "
        "those that do not set acks: 0 of 1 slaves in sync; start the slaves, or see `hastore "
        "status`"
    )


def put(node: Node, *bodies: bytes, acks: int | str = 1) -> None:
    """Send messages, and wait for each."""
    with Producer(node.api.endpoint, acks=acks) as producer:  # type: ignore[arg-type]
        for body in bodies:
            assert producer.send_sync("t", body).status == "PUT_OK"


def cut_three(group: Group) -> dict[str, Any]:
    """Let a pair cut three messages off node 1, which it had acknowledged alone; return its status.

    Node 2 is the master then.
    """
    put(group[1], b"on both", acks="all")
    group.wait(2, lambda s: s["confirmed_offset"] == s["max_offset"] > 0)
    group.stop(2)
    put(group[1], b"lost 1", b"lost 2", b"lost 3")
    group.stop(1)
    group.start(2, role=Role.SYNC_MASTER)
    group.wait(2, lambda s: s["writable"])
    group.start(1, role=Role.SLAVE)
    return group.wait(1, lambda s: s["cuts"])


def metrics_of(status: dict[str, Any]) -> dict[str, str]:
    """Return the samples of /metrics without their labels."""
    lines = render_metrics(status).decode().splitlines()
    return {line.partition("{")[0]: line.split()[-1] for line in lines if line[0] != "#"}


def audited(node: BaseNode, action: str) -> list[dict[str, Any]]:
    """Return the lines of the audit log about an action."""
    return audit_lines(node.config.store.root, action)


def test_messages_that_were_cut_are_told_until_an_operator_dismisses_them(pair: Group) -> None:
    """They were acknowledged with acks=1, by a master that had lost its slave."""
    group = pair
    status = cut_three(group)
    (cut,) = status["cuts"]
    start, end = cut["start_offset"], cut["end_offset"]
    folder = f"{group.root}/node1/rescued/65537-{start}"
    assert (cut["folder"], cut["messages"], cut["all_counted"]) == (folder, 3, True)
    assert pathlib.Path(folder, "0" * 20).stat().st_size == end > start
    text = (
        "3 messages were cut from this log and may be nowhere else (puts with acks=1 may have been "
        f"acknowledged): bytes {start} to {end}, in {folder}; look at them (`hastore log dump "
        f"--store {folder} --body`), send again what is missing (`hastore rescued resend -c "
        "FILE --cut 1`), then run `hastore rescued dismiss -c FILE --cut 1` on this node"
    )
    assert text in status["problems"] and status["notes"] == []
    told = metrics_of(status)
    assert (told["hastore_cuts"], told["hastore_cut_messages"]) == ("1", "3")
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
    assert metrics_of(status)["hastore_cuts"] == "0"
    lines = wait_for(lambda: len(found := audited(group[1], "cut")) == 2 and found)
    assert lines[1]["outcome"] == "dismissed"
    assert lines[1]["reason"].startswith(f"{lines[0]['reason']}, by ")
    assert pathlib.Path(folder).is_dir(), "the archive is the operator's"
    group.stop(1)
    group.start(1, role=Role.SLAVE)
    assert group[1].backend.status()["cuts"] == []


def test_a_dismissal_that_the_node_removes_with_an_earlier_one_is_given_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crossed(RealFileSystem):
        """The node read another command's request, and removes the file after this one's write."""

        writes = 0

        def replace_bytes(self, path: str, data: bytes) -> None:
            folder = os.open(os.path.dirname(path), os.O_RDONLY)
            try:
                with pytest.raises(BlockingIOError):  # another command waits, and adds to this one
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(folder)
            self.writes += 1
            if self.writes > 1:
                super().replace_bytes(path, data)

    fs, group = Crossed(), Group(tmp_path, 1)
    monkeypatch.setattr("hastore.cli.rescued.REAL", fs)
    try:
        group.start(1, role=Role.ASYNC_MASTER, acks=0)
        group.wait(1, lambda s: s["writable"])
        put(group[1], b"1")
        group[1].backend.store.archive(0, "65537-0")
        group[1].backend.store.truncate(0)
        done = hastore("rescued", "dismiss", "-c", group.file(1), "--all", "--patience", "60")
        assert (done.returncode, done.stdout) == (0, "1 cut dismissed\n"), done.stderr
        assert group[1].backend.status()["cuts"] == [] and fs.writes > 1
    finally:
        group.end()


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
            "1 cut dismissed; the node does not answer, and takes this once it runs\n"
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
