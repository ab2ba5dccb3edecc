"""A pair whose nodes bind other addresses than those at which others reach them, as behind NAT."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import msgspec
import pytest

from hastore import Consumer, Producer
from hastore.config.model import BindConfig, Config, NodeAddress, RemotingConfig
from hastore.errors import NodeFailedError
from hastore.protocol.remoting import Code
from hastore.server.base_node import store_host
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.process.relay import Relay
from tests.server.kit import config_in_group, config_of, running
from tests.server.name_server import NameServer
from tests.server.remoting.kit import RemotingClient

ROUTE = (Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})


class Pair:
    """Two nodes, and the relays through which all others reach them."""

    def __init__(self, root: pathlib.Path, ends: contextlib.ExitStack) -> None:
        ports = ends.enter_context(contextlib.closing(Ports()))
        self.bound = ports.addresses(2)
        self.relays = {
            (number, name): ends.enter_context(Relay(each[name]))
            for number, each in self.bound.items()
            for name in ("api", "ha")
        }
        self.told = {
            number: NodeAddress(
                api=self.relays[number, "api"].address,
                ha=self.relays[number, "ha"].address.removeprefix("tcp://"),
                http=each["http"],
            )
            for number, each in self.bound.items()
        }
        self.name_server = NameServer()
        ends.callback(self.name_server.stop)
        self.nodes = [
            ends.enter_context(running(Node(self._config(root, number), lambda: None)))
            for number in (1, 2)
        ]
        wait_for(lambda: self.nodes[0].backend.not_ready() is None, "the slave in sync")

    def _config(self, root: pathlib.Path, number: int) -> Config:
        own = self.bound[number]
        bind = BindConfig(api=own["api"], ha=own["ha"])
        servers = RemotingConfig(name_servers=(self.name_server.address,))
        return config_in_group(root, number, self.told, bind=bind, remoting=servers)

    def api(self, number: int) -> str:
        """Return where others reach a node's API: HOST:PORT."""
        return self.told[number].api.removeprefix("tcp://")


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Pair]:
    with contextlib.ExitStack() as ends:
        yield Pair(tmp_path, ends)


def test_clients_and_slaves_use_what_they_are_told(pair: Pair) -> None:
    with Producer([pair.told[2].api]) as producer:  # the slave names the master
        producer.send("orders", b"1").result(60)
    with Consumer("orders", [pair.told[1].api]) as consumer:
        assert [one.body for one in consumer.poll(timeout_s=60)] == [b"1"]
    for node in pair.nodes:
        assert node.backend.master_map().nodes == {n: one.api for n, one in pair.told.items()}
    assert pair.relays[1, "ha"].connections and pair.relays[1, "api"].connections
    assert f"api={pair.bound[1]['api']} ha={pair.bound[1]['ha']}" in pair.nodes[0].ready_line()


def test_rocketmqs_routes_name_servers_and_slaves_have_what_others_reach(pair: Pair) -> None:
    with Producer([pair.told[1].api]) as producer:
        producer.send("orders", b"1").result(60)
    for node in pair.nodes:
        with contextlib.closing(RemotingClient(node.api.endpoint)) as client:
            wait_for(lambda ask=client.ask: ask(*ROUTE).body, "the topic, by the slave's replay")
            route = client.ask(*ROUTE).body.decode()
        assert f'{{0:"{pair.api(1)}",2:"{pair.api(2)}"}},"brokerName":"g0"' in route
        assert f'{{0:"{pair.api(2)}"}},"brokerName":"g0@2"' in route
    held = pair.name_server.holders
    wait_for(lambda: held("g0") == {"0": pair.api(1), "2": pair.api(2)}, "both registrations")


def test_a_node_whose_own_name_is_not_known_says_so(tmp_path: pathlib.Path) -> None:
    address = NodeAddress(api="tcp://n1.invalid:1", ha="127.0.0.1:2", http="127.0.0.1:3")
    config = msgspec.structs.replace(config_of(tmp_path), nodes={1: address})
    with pytest.raises(NodeFailedError, match="nodes.1.api: the name n1.invalid cannot be resolve"):
        store_host(config)
