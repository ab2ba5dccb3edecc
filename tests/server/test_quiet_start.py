"""A start as it should be logs no warning, in both modes; a node that stays away is one."""

from __future__ import annotations

import contextlib
import logging
import pathlib
from collections.abc import Callable, Iterator

import msgspec
import pytest

from hastore import bounded_log
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, DLedgerConfig, Flush, Mode, NodeAddress, Role, StoreConfig
from hastore.dledger.driver.requests import write_request
from hastore.fs.filesystem import REAL
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.process.harness import Ports
from tests.server.kit import config_of
from tests.server.test_node import until

SMALL = StoreConfig(root="", commitlog_file_size=65536, flush=Flush.SYNC)
Configs = Callable[..., list[Config]]
ELECTING = {"mode": Mode.DLEDGER, "role": None, "acks": None, "store": SMALL}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes, the nodes are started within the time for that."""
    monkeypatch.setattr(bounded_log, "START_MS", 600_000.0)


@pytest.fixture
def configs() -> Iterator[Configs]:
    """Return a function that makes the configurations of a group's nodes on ports of their own."""
    with contextlib.closing(Ports()) as ports:

        def make(root: pathlib.Path, count: int, **changes: object) -> list[Config]:
            nodes = {n: NodeAddress(**places) for n, places in ports.addresses(count).items()}
            alone = [
                msgspec.structs.replace(config_of(root / f"n{number}"), **changes)
                for number in nodes
            ]
            return [
                msgspec.structs.replace(
                    one,
                    node=number,
                    nodes=nodes,
                    store=msgspec.structs.replace(one.store, root=str(root / f"n{number}")),
                )
                for number, one in zip(nodes, alone, strict=True)
            ]

        yield make


@contextlib.contextmanager
def started(nodes: list[BaseNode]) -> Iterator[None]:
    """Start the nodes one after the other, and stop them at the end."""
    with contextlib.ExitStack() as stack:
        for node in nodes:
            node.start()
            stack.callback(node.stop)
        yield


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno > logging.INFO]


@pytest.mark.parametrize("first", [Role.SYNC_MASTER, Role.SLAVE])
def test_a_pair(
    configs: Configs, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, first: Role
) -> None:
    caplog.set_level(logging.INFO)
    master, slave = configs(tmp_path, 2, role=Role.SYNC_MASTER, acks=1)
    slave = msgspec.structs.replace(slave, role=Role.SLAVE)
    for _ in range(2):  # the first start of the stores, and a later one
        caplog.clear()
        nodes = [Node(master, lambda: None), Node(slave, lambda: None)]
        with started(list(nodes if first is Role.SYNC_MASTER else reversed(nodes))):
            until(lambda nodes=nodes: nodes[0].backend.status()["writable"], 60)
            until(
                lambda nodes=nodes: any(
                    one["in_sync"] for one in nodes[0].backend.status()["slaves"]
                ),
                60,
            )
            assert warnings(caplog) == []
            assert "SYNC_MASTER in epoch" in caplog.text and "following node 1" in caplog.text


def test_a_group_that_elects_its_leader(
    configs: Configs, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # A machine that is slow must not make them elect twice.
    slow = DLedgerConfig(heartbeat_interval_ms=500, election_timeout_ms=2_500)
    group = configs(tmp_path, 3, dledger=slow, **ELECTING)
    for _ in range(2):
        caplog.clear()
        nodes = [DLedgerNode(config, lambda: None) for config in group]
        with started(list(nodes)):
            until(lambda nodes=nodes: any(node.backend.status()["writable"] for node in nodes), 120)
            assert warnings(caplog) == []
            assert "LEADER in term" in caplog.text
            # Nobody takes over while all are stopped: the entry with which a term begins would then
            # be on one node only, and the next leader would cut it off, which is a warning.
            for node in nodes:
                node.driver._stopping_puts = True


def test_a_node_that_is_started_and_added(
    configs: Configs, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one, two = configs(tmp_path, 2, dledger=DLedgerConfig(), **ELECTING)
    alone = msgspec.structs.replace(one, nodes={1: one.nodes[1]})
    nodes = [DLedgerNode(alone, lambda: None), DLedgerNode(two, lambda: None)]
    with started(nodes[:1]):
        until(lambda: nodes[0].backend.status()["writable"], 60)
        nodes[0].driver.set_addresses({number: at.ha for number, at in two.nodes.items()})
        with started(nodes[1:]):
            until(lambda: "no puts yet: node 2 is no member" in caplog.text, 60)
            write_request(
                REAL, one.store.root, "add", 2,
                term=nodes[0].driver.term, members=(1,), wall_ms=SYSTEM_CLOCK.wall_ms(),
            )  # fmt: skip
            until(lambda: nodes[1].backend.status()["members"] == [1, 2], 60)
            assert warnings(caplog) == []
            for text in ("the request to add node 2: DONE", "the members are 1; the learners: 2",
                         "the members are 1, 2"):  # fmt: skip
                assert text in caplog.messages


def test_a_node_that_stays_away_is_a_warning(
    configs: Configs,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(bounded_log, "START_MS", 1_000.0)
    _, slave = configs(tmp_path / "pair", 2, role=Role.SLAVE, acks=1)
    with started([Node(slave, lambda: None)]):
        until(lambda: any("no master is open" in text for text in warnings(caplog)), 60)
    caplog.clear()
    group = configs(tmp_path / "group", 3, **ELECTING)
    with started([DLedgerNode(group[1], lambda: None)]):
        until(lambda: any("no link to node 1" in text for text in warnings(caplog)), 60)
        until(lambda: any("its first start waits" in text for text in warnings(caplog)), 60)
