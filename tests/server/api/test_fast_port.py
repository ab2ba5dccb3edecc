"""RocketMQ's slaves ask for the topics at the port of a node minus 2."""

from __future__ import annotations

import logging
import socket

import pytest

from hastore.config.model import ApiConfig
from hastore.protocol.remoting import Answer
from hastore.server.api.connections import Connection
from hastore.server.api.server import FAST_PORT_BELOW, ApiServer
from hastore.server.remoting.door import Door
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.server.api.kit import until
from tests.server.remoting.kit import RemotingClient


def started(endpoint: str = "tcp://127.0.0.1:0", *, fast_port: bool = True) -> ApiServer:
    server = ApiServer(
        endpoint, FakeBackend(), ApiConfig(), on_failure=raise_failure,
        make_door=lambda parts: Door(parts, None), fast_port=fast_port,
    )  # fmt: skip
    server.start()
    return server


def below(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) - FAST_PORT_BELOW}"


def is_free(address: str) -> bool:
    """Whether nobody listens there, and no connection of another process begins there."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_server((host, int(port))).close()
    except OSError:
        return False
    return True


def free_endpoint() -> str:
    """Return an address that is free, as is the fast port below it."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as held:
            endpoint = f"tcp://127.0.0.1:{held.getsockname()[1]}"
            if is_free(below(endpoint)):
                return endpoint
    raise AssertionError("no two free ports in 100 tries")


def test_both_ports_are_served_by_turns() -> None:
    server = started(free_endpoint())
    try:
        for _ in range(3):
            clients = [RemotingClient(each) for each in (server.endpoint, below(server.endpoint))]
            for client in [*clients, *reversed(clients)]:
                assert client.ask(999).code == Answer.REQUEST_CODE_NOT_SUPPORTED
            for client in clients:
                client.close()
    finally:
        assert server.stop(60)
    assert is_free(below(server.endpoint))


def test_a_request_tells_at_which_port_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """RocketMQ's slaves are known by that, and get an answer of their own about topics."""
    seen: list[bool] = []

    def receive(_door: Door, connection: Connection, *_: object) -> None:
        seen.append(connection.fast)

    monkeypatch.setattr(Door, "receive", receive)
    server = started(free_endpoint())
    try:
        for at, fast in ((server.endpoint, False), (below(server.endpoint), True)):
            client = RemotingClient(at)
            client.send(999)
            until(lambda: bool(seen))
            assert seen.pop() is fast
            client.close()
    finally:
        assert server.stop(60)


def test_a_port_that_is_taken_is_said_once_and_the_node_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    endpoint = free_endpoint()
    with socket.create_server(("127.0.0.1", int(below(endpoint).rpartition(":")[2]))):
        with caplog.at_level(logging.WARNING):
            server = started(endpoint)
        try:
            said = [one.getMessage() for one in caplog.records if "cannot bind" in one.getMessage()]
            assert len(said) == 1 and "RocketMQ's slaves ask there" in said[0]
            client = RemotingClient(server.endpoint)
            assert client.ask(999).code == Answer.REQUEST_CODE_NOT_SUPPORTED
            client.close()
        finally:
            assert server.stop(60)


def test_only_where_it_is_asked_for() -> None:
    server = started(free_endpoint(), fast_port=False)
    try:
        assert is_free(below(server.endpoint))
    finally:
        assert server.stop(60)
