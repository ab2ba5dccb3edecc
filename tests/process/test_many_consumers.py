"""5,000 real connections of RocketMQ's consumers at a pair: what they take, and whom they harm."""

from __future__ import annotations

import contextlib
import json
import pathlib
import resource

import pytest

from hastore.protocol.remoting import Code
from tests.process.harness import Group, wait_until
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.test_groups import java, subscribed

pytestmark = pytest.mark.full
CONNECTIONS, OF_A_GROUP, BATCH = 5_000, 50, 100
LIMIT_S = 120.0
# Of the master: sockets, buffers and members; a heartbeat here has 2 KiB.
MAX_GROWTH_BYTES = CONNECTIONS * 20_000


@pytest.mark.slow("5,000 connections, each with two heartbeats")
def test_5_000_consumers_of_100_groups_harm_nobody(tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 12_000)), hard))
    with contextlib.ExitStack() as ends:
        group = ends.enter_context(Group(tmp_path))
        for node in group:
            node.write(api={"max_connections": CONNECTIONS + 100})
        node = group.start()[1]
        other = ends.enter_context(contextlib.closing(RemotingClient(node.api)))
        assert other.ask(Code.GET_BROKER_CLUSTER_INFO).code == 0
        before = node.resident_bytes()
        crowd = ends.enter_context(contextlib.ExitStack())
        clients = []
        topics = [subscribed(f"T{number}") for number in range(10)]
        for number in range(CONNECTIONS):
            client = crowd.enter_context(contextlib.closing(RemotingClient(node.api)))
            body = java(f"c{number:04}", (f"g{number // OF_A_GROUP}",), *topics)
            client.send(Code.HEART_BEAT, {}, body)
            clients.append((client, body))
            if number % BATCH == BATCH - 1:  # of one address only so many may wait for their turn
                assert {answer(each).code for each, _ in clients[-BATCH:]} == {0}
                assert other.ask(Code.GET_BROKER_CLUSTER_INFO).code == 0
        for client, body in clients:
            client.send(Code.HEART_BEAT, {}, body)
        for client, _ in clients:
            assert answer(client).code == 0
        grown = node.resident_bytes() - before
        print(f"{CONNECTIONS} consumers take {grown / CONNECTIONS / 1_000:.1f} kB each")
        assert grown < MAX_GROWTH_BYTES
        assert len(members(other, "g0")) == OF_A_GROUP
        assert len(members(clients[-1][0], f"g{CONNECTIONS // OF_A_GROUP - 1}")) == OF_A_GROUP
        crowd.close()
        wait_until(lambda: not members(other, "g0"), LIMIT_S, "members are kept")
        assert other.ask(Code.GET_BROKER_CLUSTER_INFO).code == 0


def answer(client: RemotingClient):
    """Return the next answer; what the node tells of changes is dropped."""
    while not (frame := client.next()).is_answer:
        continue
    return frame


def members(client: RemotingClient, group: str) -> list[str]:
    client.send(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    found = answer(client)
    return list(json.loads(found.body)["consumerIdList"]) if found.code == 0 else []
