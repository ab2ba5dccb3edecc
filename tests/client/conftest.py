"""Nodes in this process that the clients connect to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore.client.connections import transport_factory
from hastore.config.model import ApiConfig
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend

OVER_BOTH = ("test_producer", "test_consumer")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of OVER_BOTH over plain sockets and over libzmq."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if name in OVER_BOTH and {"node", "pair", "make_node"} & set(metafunc.fixturenames):
        metafunc.parametrize("transport", ["tcp", "zmq+tcp"], indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Give clients `zmq+tcp://` addresses in the runs over libzmq."""
    scheme = str(getattr(request, "param", "tcp"))
    real = transport_factory.make_transport

    def make(addresses: tuple[str, ...], *clock: Any) -> Any:
        return real(tuple(each.replace("tcp", scheme, 1) for each in addresses), *clock)

    if scheme != "tcp":
        for name, module in list(sys.modules.items()):
            if name.startswith("hastore.") and getattr(module, "make_transport", None) is real:
                monkeypatch.setattr(module, "make_transport", make)
    return scheme


class Node:
    """A fake backend behind a real ApiServer; can be killed and started again on its port."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
        self.server.start()
        self.address = self.server.endpoint

    def stop(self) -> None:
        self.server.stop()
        assert self.server.failure is None

    def restart(self) -> None:
        self.server = ApiServer(self.address, self.backend, ApiConfig(), on_failure=raise_failure)
        self.server.start()


@pytest.fixture
def make_node() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def make(number: int = 1, *, writable: bool = True, epoch: int = 65537) -> Node:
        nodes.append(Node(FakeBackend(number, writable=writable, epoch=epoch)))
        return nodes[-1]

    yield make
    for node in nodes:
        node.stop()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()


def introduce(master: Node, slave: Node) -> None:
    """Let nodes 1 and 2 know of each other."""
    for each in (master, slave):
        each.backend.nodes = {1: master.address, 2: slave.address}
        each.backend.master = 1


@pytest.fixture
def pair(make_node: Callable[..., Node]) -> tuple[Node, Node]:
    """A master and a slave that know of each other and share one log."""
    master, slave = make_node(1), make_node(2, writable=False)
    slave.backend.store = master.backend.store
    introduce(master, slave)
    return master, slave
