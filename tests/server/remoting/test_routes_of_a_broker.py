"""Routes at a promotion from a RocketMQ broker: none says what its topics are about to change."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hastore.config.model import NodeAddress, RemotingConfig
from hastore.protocol.remoting import Answer
from hastore.server import take_over
from hastore.server.node import Node
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group
from tests.server.remoting.kit import RemotingClient
from tests.store.kit import message, opened, put

ROUTE, SEND = 105, 310
TOPICS = {"Inner": {"readQueueNums": 2, "writeQueueNums": 2, "perm": 6}}
STANDARD = {"acceptStandardJsonOnly": "true"}


class Group:
    """Two nodes with copies of a broker's log and files; node 1 will be the master."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self.stack = stack
        ports = stack.enter_context(contextlib.closing(Ports()))
        addresses = {n: NodeAddress(**each) for n, each in ports.addresses(2).items()}
        self.nodes = {}
        for number in addresses:
            config = config_in_group(root, number, addresses)
            remoting = RemotingConfig(hold_timeout_ms=60_000)
            store = Path(config.store.root)
            copy_of_broker(root, store, config.store.commitlog_file_size)
            self.nodes[number] = Node(
                msgspec.structs.replace(config, remoting=remoting), lambda: None
            )
        self.may_take_over = threading.Event()
        turn = self.nodes[1].take_over.turn

        def held(*args: Any) -> None:
            assert self.may_take_over.wait(60)
            turn(*args)

        self.nodes[1].take_over.turn = held  # type: ignore[method-assign]

    def start(self, number: int) -> None:
        self.nodes[number].start()
        self.stack.callback(self.nodes[number].stop)

    def client(self, number: int) -> RemotingClient:
        made = RemotingClient(self.nodes[number].api.endpoint)
        self.stack.callback(made.close)
        return made


def copy_of_broker(root: Path, store: Path, file_size: int) -> None:
    """Write a store as it is before the promotion."""
    broker = root / "broker"
    if not broker.exists():
        with opened(broker, commitlog_file_size=file_size) as made:
            put(made, message(0, topic="Inner", queue_id=1))
    shutil.copytree(broker / "commitlog", store / "commitlog")
    (store / "config").mkdir()
    (store / "config/topics.json").write_text(json.dumps({"topicConfigTable": TOPICS}))
    (store / "abort").touch()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(take_over, "TOPICS_MS", 120_000.0)
    with contextlib.ExitStack() as stack:
        made = Group(tmp_path, stack)
        stack.callback(made.may_take_over.set)
        yield made


def queues(body: bytes) -> dict[str, int]:
    found: dict[str, int] = {
        one["brokerName"]: one["writeQueueNums"] for one in json.loads(body)["queueDatas"]
    }
    return found


def test_a_route_waits_on_each_node_for_the_topics_of_the_broker(group: Group) -> None:
    """A producer that began in that second kept a wrong one for 30 s, and its sends failed."""
    for number in (2, 1):
        group.start(number)
    master = group.nodes[1].backend
    wait_for(lambda: list(master.reading_nodes()) == [2], "a master with a slave")
    wait_for(lambda: group.nodes[2].backend.epoch() > 0, "the slave's epoch")
    asked = [
        (topic, client, client.send(ROUTE, {"topic": topic, **STANDARD}))
        for number in (1, 2)
        for topic in ("Inner", "TBW102")
        for client in [group.client(number)]
    ]
    for number in (1, 2):  # this answer comes behind the wrong ones, if there are any
        client = group.client(number)
        assert client.ask(ROUTE, {"topic": "%RETRY%g", **STANDARD}).code == Answer.SUCCESS
    assert group.nodes[1].store.topic_table.recorded("Inner") is None
    group.may_take_over.set()
    for topic, client, opaque in asked:
        answer = client.answer_of(opaque)
        assert answer.code == Answer.SUCCESS, answer
        wanted = {"Inner": 2, "TBW102": 4}[topic]
        assert queues(answer.body) == {"g0": wanted, "g0@2": wanted}


def test_before_the_promotion_no_producer_is_sent_to_a_node_that_forwards(group: Group) -> None:
    """Its route of `default_queues` would have counted for 30 s, beyond the promotion."""
    group.start(2)
    client = group.client(2)
    for topic in ("Inner", "TBW102"):
        answer = client.ask(ROUTE, {"topic": topic, **STANDARD})
        assert answer.code == Answer.SUCCESS
        brokers = json.loads(answer.body)["brokerDatas"]
        assert not any("0" in one["brokerAddrs"] for one in brokers), brokers
    group.may_take_over.set()
    group.start(1)

    def known() -> bool:
        answer = client.ask(ROUTE, {"topic": "Inner", **STANDARD})
        found = queues(answer.body)
        assert len(found) == 1 or set(found.values()) == {2}, found
        return found == {"g0": 2, "g0@2": 2}

    wait_for(known, "the routes of a group with a master")
