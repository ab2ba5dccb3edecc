"""RocketMQ's clients over two hastore groups of one cluster: they know one node of one of them."""

from __future__ import annotations

import contextlib
import pathlib

import pytest

from tests.interop.build import CLIENTS_4, CLIENTS_5, Program, command
from tests.interop.rocketmq_clients import LIMIT_S, Clients, Site, address
from tests.process.harness import Group, hastore, wait_until
from tests.registry.servers import Servers, registered

pytestmark = pytest.mark.full
TOPIC, COUNT = "Orders", 200


class OneNode(Site):
    """Clients that are configured with one node as their only name server."""

    def __init__(self, group: Group) -> None:
        self.namesrv = address(group[2])


@pytest.mark.slow("two groups, a ZooKeeper and a JVM")
@pytest.mark.parametrize("program", [CLIENTS_5, CLIENTS_4], ids=["5.3.3", "4.9.8"])
def test_java_clients_spread_over_all_groups(program: Program, tmp_path: pathlib.Path) -> None:
    with contextlib.ExitStack() as ends:
        servers = Servers(tmp_path)
        ends.callback(servers.close)
        servers.start()
        groups = []
        for name in ("g0", "g1"):
            (tmp_path / name).mkdir()
            group = ends.enter_context(Group(tmp_path / name))
            for node in group:
                node.write(group=name)
            groups.append(registered(group, servers))
            done = hastore("topics", "create", TOPIC, "--bootstrap", ",".join(group.bootstrap))
            assert done.returncode == 0, done.stderr
        jvm = Clients(command(program), tmp_path, "clients")
        ends.callback(jvm.kill)
        first, second = (OneNode(group) for group in groups)
        everywhere = {"g0", "g0@2", "g1", "g1@2"}

        def brokers(producer: str) -> set[str]:
            return {queue[1] for queue in jvm.call("producer.queues", name=producer, topic=TOPIC)}

        producer = jvm.producer(first, poll_ms=1_000)
        wait_until(lambda: brokers(producer) == everywhere, LIMIT_S, lambda: f"{brokers(producer)}")
        consumer = jvm.push(second, "billing", TOPIC, poll_ms=1_000)
        sent = jvm.send(producer, [{"topic": TOPIC, "body": f"{n}"} for n in range(COUNT)])
        assert {one["status"] for one in sent} == {"SEND_OK"}
        assert {one["broker"] for one in sent} == everywhere
        found = jvm.received(consumer, COUNT)
        assert sorted(int(one["body"]) for one in found) == list(range(COUNT))
