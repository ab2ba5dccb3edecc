"""/readyz and /master of real nodes: what load balancers and orchestrators ask."""

from __future__ import annotations

import contextlib
import pathlib
import urllib.error
import urllib.request

from hastore.client import Producer
from hastore.config.model import NodeAddress
from hastore.errors import StoreFullError
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group, group_of_one, running


def probe(node: BaseNode, path: str) -> tuple[int, str]:
    """Return the code and the text of an answer."""
    try:
        with urllib.request.urlopen(f"http://{node.http_address}{path}", timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def both(node: BaseNode) -> tuple[int, int]:
    return probe(node, "/readyz")[0], probe(node, "/master")[0]


def test_a_pair_is_ready_while_each_node_serves_its_role(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports, contextlib.ExitStack() as stack:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        slave = Node(config_in_group(tmp_path, 2, nodes), lambda: None)
        slave.start()
        stack.callback(slave.stop)
        code, reason = probe(slave, "/readyz")
        assert code == 503 and reason.startswith("this node is a slave")
        master = Node(config_in_group(tmp_path, 1, nodes), lambda: None)
        stack.enter_context(running(master))
        wait_for(lambda: both(master) == (200, 200), "the slave in sync")
        wait_for(lambda: both(slave) == (200, 503), "the link to the master")
        assert "node 1 is the master" in probe(slave, "/master")[1]
        slave.stop()
        wait_for(lambda: both(master) == (503, 503), "the loss of the slave")
        assert "slave" in probe(master, "/readyz")[1]


def test_a_slave_without_its_master_is_not_ready(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        with running(Node(config_in_group(tmp_path, 2, nodes), lambda: None)) as slave:
            with running(Node(config_in_group(tmp_path, 1, nodes), lambda: None)):
                wait_for(lambda: both(slave) == (200, 503), "the link to the master")
            wait_for(lambda: both(slave) == (503, 503), "the end of the link")
            assert probe(slave, "/healthz") == (200, "ok\n")


def test_a_group_of_one_that_leads_is_ready(tmp_path: pathlib.Path) -> None:
    with running(DLedgerNode(group_of_one(tmp_path), lambda: None)) as node:
        wait_for(lambda: both(node) == (200, 200), "its term")


def test_a_slave_whose_replay_is_blocked_is_not_ready(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        with (
            running(Node(config_in_group(tmp_path, 1, nodes), lambda: None)),
            running(Node(config_in_group(tmp_path, 2, nodes), lambda: None)) as slave,
        ):
            wait_for(lambda: both(slave) == (200, 503), "the link to the master")
            slave.backend.store.replay.blocked_reason = "replay stopped at offset 7: damaged"
            assert probe(slave, "/readyz") == (503, "replay stopped at offset 7: damaged\n")


def test_a_node_that_follows_and_has_no_room_is_not_ready(tmp_path: pathlib.Path) -> None:
    with contextlib.closing(Ports()) as ports:
        nodes = {number: NodeAddress(**each) for number, each in ports.addresses(2).items()}
        with (
            running(Node(config_in_group(tmp_path, 1, nodes), lambda: None)) as master,
            running(Node(config_in_group(tmp_path, 2, nodes), lambda: None)) as slave,
        ):
            wait_for(lambda: both(slave) == (200, 503), "the link to the master")
            wait_for(lambda: both(master) == (200, 200), "the slave in sync")
            store = slave.backend.store
            append = store.append_replica

            def refuse(_offset: int, _data: object) -> int:
                raise StoreFullError("no room")

            store.append_replica = refuse  # type: ignore[method-assign]
            with Producer([nodes[1].api], acks=1) as producer:
                producer.send("t", b"x").result(60)
            wait_for(lambda: both(slave) == (503, 503), "the full disk")
            assert "is appended: no room" in probe(slave, "/readyz")[1]
            store.append_replica = append  # type: ignore[method-assign]
            wait_for(lambda: both(slave) == (200, 503), "room again")
