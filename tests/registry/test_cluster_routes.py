"""Nodes of several groups that answer for the routes of their whole cluster; a real ZooKeeper."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from hastore.config.model import NodeAddress
from hastore.errors import ProtocolError
from hastore.protocol import group_note
from hastore.protocol.group_note import (
    GroupRoutes,
    OtherBroker,
    OtherTopic,
    decode_note,
    encode_note,
)
from hastore.protocol.registration import Route, decode_route, question_of_route
from hastore.protocol.remoting import Answer, Code, Frame
from hastore.registry import cluster_notes
from hastore.server.name_servers import Line
from hastore.server.node import Node
from hastore.server.remoting.elsewhere import Elsewhere
from tests.process.harness import Ports, wait_until
from tests.server.kit import config_of, running
from tests.server.test_name_servers import record

LIMIT_S = 120.0


def address(node: Node) -> str:
    return node.config.nodes[1].api.removeprefix("tcp://")


def ask(node: Node, frame: Frame) -> Frame:
    line = Line(address(node), threading.Event())
    line.open()
    try:
        return line.ask(frame)
    finally:
        line.close()


def route(node: Node, topic: str) -> Route:
    """Return the route of a topic; an empty one if there is none."""
    answer = ask(node, question_of_route(topic))
    if answer.code == Answer.TOPIC_NOT_EXIST:
        return Route()
    return decode_route(answer.body)


def holders(node: Node, topic: str) -> dict[str, tuple[int, dict[str, str]]]:
    """Return the queues and the addresses of each broker with a topic."""
    found = route(node, topic)
    queues = {one.brokerName: one.writeQueueNums for one in found.queueDatas}
    return {one.brokerName: (queues[one.brokerName], one.brokerAddrs) for one in found.brokerDatas}


@pytest.fixture
def begin(tmp_path: pathlib.Path) -> Iterator[Callable[..., Node]]:
    """Return a function that starts the only node of a group, with a ZooKeeper, in this process."""
    with contextlib.ExitStack() as ends, contextlib.closing(Ports()) as ports:

        def start(group: str, servers: Any, ends: contextlib.ExitStack = ends) -> Node:
            config = msgspec.structs.replace(
                config_of(tmp_path / group), group=group, registry=servers.registry,
                nodes={1: NodeAddress(**ports.addresses(1)[1])},
            )  # fmt: skip
            return ends.enter_context(running(Node(config, lambda: None)))

        yield start


def test_each_node_answers_for_all_groups(
    servers: Any, begin: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_notes, "KEEP_MS", 300.0)
    monkeypatch.setattr(cluster_notes, "TICK_S", 0.05)
    one = begin("g0", servers)
    with contextlib.ExitStack() as ends:
        two = begin("g1", servers, ends)
        at = {"g0": {"0": address(one)}, "g1": {"0": address(two)}}
        for node in (one, two):
            node.backend.put_encoded([record("Both")])
        two.backend.put_encoded([record("Second")])
        both = {name: (4, where) for name, where in at.items()}
        for node in (one, two):
            for topic in ("Both", "TBW102"):
                wait_until(
                    lambda node=node, topic=topic: holders(node, topic) == both, LIMIT_S,
                    lambda node=node, topic=topic: f"{topic}: {holders(node, topic)}",
                )  # fmt: skip
            wait_until(
                lambda node=node: holders(node, "Second") == {"g1": (4, at["g1"])}, LIMIT_S,
                "the topic of one group has a route",
            )  # fmt: skip
            retries = {name: (1, where) for name, where in at.items()}
            assert holders(node, "%RETRY%billing") == retries
            assert holders(node, "Nowhere") == {}
            frame = Frame(
                Code.GET_BROKER_CLUSTER_INFO, 0, fields={"acceptStandardJsonOnly": "true"}
            )
            cluster = json.loads(ask(node, frame).body)
            assert sorted(cluster["clusterAddrTable"]["test"]) == ["g0", "g1"]
            assert {
                name: found["brokerAddrs"] for name, found in cluster["brokerAddrTable"].items()
            } == at
            names = json.loads(ask(node, Frame(Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, 0)).body)
            assert {"Both", "Second"} <= set(names["topicList"])
            assert "TBW102" not in names["topicList"]
    # The group has ended: its note is gone, and soon its routes.
    wait_until(lambda: not holders(one, "Second"), LIMIT_S, "routes of a group that is gone")
    assert holders(one, "Both") == {"g0": both["g0"]}
    with contextlib.ExitStack() as ends:
        two = begin("g1", servers, ends)
        wait_until(lambda: "g1" in holders(one, "Second"), LIMIT_S, "the group is back")


def test_without_zookeeper_the_known_routes_stay(
    mortal: Any, begin: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_notes, "KEEP_MS", 300.0)
    monkeypatch.setattr(cluster_notes, "TICK_S", 0.05)
    one, two = begin("g0", mortal), begin("g1", mortal)
    two.backend.put_encoded([record("Second")])
    wait_until(lambda: holders(one, "Second"), LIMIT_S, "no route")
    mortal.each[0].kill()
    assert one.registry is not None
    wait_until(lambda: not one.registry.in_touch, LIMIT_S, "ZooKeeper's end is not seen")
    # What is longer than a missing note is kept; nothing else tells that nothing happens.
    until = one._clock.monotonic_ms() + 1_000
    while one._clock.monotonic_ms() < until:
        assert holders(one, "Second")
    mortal.start()
    wait_until(lambda: one.registry.in_touch, LIMIT_S, "not in touch again")
    two.backend.put_encoded([record("Third")])
    wait_until(lambda: holders(one, "Third"), LIMIT_S, "no news after ZooKeeper's return")
    assert holders(one, "Second")


def note(group: str = "g1", epoch: int = 1, topic: str = "T") -> bytes:
    brokers = [OtherBroker(group, {0: "h:1"}), OtherBroker(f"{group}@2", {0: "h:2"}, True)]
    return encode_note(GroupRoutes(group, epoch, brokers, [OtherTopic(topic, 4, 4)]))


class TestNotes:
    """Notes that cannot be: left out, with one line each."""

    def test_the_greater_epoch_counts(self) -> None:
        known = Elsewhere()
        known.take({("g1", 1): note(epoch=5, topic="new"), ("g1", 2): note(epoch=4, topic="old")})
        assert [list(one.topics) for one in known.groups] == [["new"]]
        known.take({("g1", 2): note(epoch=4, topic="old"), ("g2", 1): note("g2")})
        assert [list(one.topics) for one in known.groups] == [["old"], ["T"]]

    def test_bad_notes_are_left_out(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        caplog.set_level(logging.WARNING)
        monkeypatch.setattr(group_note, "MAX_BYTES", 1_000)
        bad = {
            "empty": b"", "garbage": b"\0" * 50, "cut": note()[:-5],
            "no note": zlib.compress(b"[]"),
            "nested": zlib.compress(b'{"x":' + b"[" * 900),
            "bomb": zlib.compress(b" " * 10_000_000), "foreign": note("g9"),
            "negative": zlib.compress(
                b'{"group":"negative","epoch":1,"brokers":[],"topics":[["T",-1,1]]}'
            ),
        }  # fmt: skip
        known = Elsewhere()
        for _ in range(3):
            known.take({**{(name, 1): data for name, data in bad.items()}, ("g1", 1): note()})
            assert [one.group for one in known.groups] == ["g1"]
        assert len(caplog.records) == len(bad), "each once"

    def test_a_copy_of_a_note_under_another_group_hides_none_and_adds_none(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        known, own = Elsewhere(), {("g1", 1): note()}
        for copies in ({("a", 1): note()}, {}, {("z", 1): note()}):
            for _ in range(2):
                known.take({**own, **copies})
                assert [one.group for one in known.groups] == ["g1"]
        assert len(caplog.records) == 2, "each copy once"

    def test_a_note_comes_back(self) -> None:
        found = decode_note(note())
        assert found.brokers[1] == OtherBroker("g1@2", {0: "h:2"}, True)
        with pytest.raises(ProtocolError):
            decode_note(note()[1:])
