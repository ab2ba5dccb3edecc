"""What a RocketMQ slave asks its master for: byte for byte, and only what its log bears out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from hastore.config.model import Config, HAConfig, NodeAddress, Role, StoreConfig
from hastore.protocol.remoting import Answer, Code
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.rights import NEEDS
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.slaves import SlaveRegistration, SlaveTables
from hastore.server.remoting.subscriptions import Subscriptions
from hastore.server.remoting.topics import Topics, version_of
from tests.api_fakes import FakeBackend
from tests.server.remoting.desk import Desk

ASKED = (21, 43, 45, 61, 103, 104, 201, 402)


class Node:
    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.desk = Desk(self.backend)
        self.slaves: list[dict[str, Any]] = []
        self.asked: list[int] = []
        known = self.backend.status()
        shown: Any = self.backend
        shown.status = lambda: {**known, "slaves": self.slaves}
        positions = GroupPositions(self.desk.door, memory_bytes=1 << 30)
        view = TopicView(self.backend, auto_create=True)
        settings = Subscriptions(self.desk.door, view)
        settings.known_groups = positions.groups
        for one in (
            positions, settings, Topics(self.desk.door, "g0"),
            SlaveTables(self.desk.door, positions, self.delays),
        ):  # fmt: skip
            self.desk.door.join(one.handlers())
        self.client = self.desk.client()

    def delays(self, end: int) -> dict[int, int]:
        self.asked.append(end)
        return {3: 7, 1: 0}

    def commit(self, group: str, topic: str, queue: int, offset: int) -> None:
        fields = {
            "consumerGroup": group, "topic": topic, "queueId": str(queue),
            "commitOffset": str(offset),
        }  # fmt: skip
        self.client.send(Code.UPDATE_CONSUMER_OFFSET, fields)
        self.desk.run(1.0)

    def table(self, code: int, name: str) -> Any:
        answer = self.client.ask(code)
        assert answer.code == Answer.SUCCESS, answer.remark
        return json.loads(answer.body)[name]


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_positions_have_the_form_of_a_brokers_file(node: Node) -> None:
    answer = node.client.ask(Code.GET_ALL_CONSUMER_OFFSET)
    assert answer.body.endswith(b',"offsetTable":{}}')
    node.commit("readers", "T", 0, 5)
    node.commit("readers", "T", 3, 0)
    node.commit("readers", "%RETRY%readers", 0, 9)
    node.commit("HASTORE_x", "T", 0, 9)
    answer = node.client.ask(Code.GET_ALL_CONSUMER_OFFSET)
    table = b'{"%RETRY%readers@readers":{0:9},"T@readers":{0:5,3:0}}'
    known = {"%RETRY%readers@readers": {0: 9}, "T@readers": {0: 5, 3: 0}}
    at = version_of(known)
    version = b'{"counter":%d,"stateVersion":0,"timestamp":%d}' % (at["counter"], at["timestamp"])
    assert answer.body == b'{"dataVersion":%s,"offsetTable":%s}' % (version, table)


def test_a_groups_settings_come_with_its_positions(node: Node) -> None:
    node.commit("readers", "T", 0, 5)
    node.client.ask(Code.GET_ALL_CONSUMER_OFFSET)
    found = node.table(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable")
    assert found["readers"]["groupName"] == "readers" and found["readers"]["retryMaxTimes"] == 16


def make_topic(node: Node, name: str, **more: str) -> None:
    fields = {"topic": name, "readQueueNums": "8", "writeQueueNums": "8", "perm": "6"}
    opaque = node.client.send(Code.UPDATE_AND_CREATE_TOPIC, {**fields, **more})
    node.desk.run(1.0)
    assert node.client.answers.pop(opaque).code == Answer.SUCCESS


def test_a_version_differs_exactly_when_the_table_does(node: Node) -> None:
    """A slave takes what has another version than its own, and writes its file for it."""
    versions = [node.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion")]
    make_topic(node, "A")
    versions.append(node.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion"))
    node.desk.run(20_000.0)
    assert node.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion") == versions[-1]
    make_topic(node, "A", perm="4")
    versions.append(node.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion"))
    make_topic(node, "A")
    assert node.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion") == versions[1]
    assert len({one["counter"] for one in versions}) == 3
    assert len({one["timestamp"] for one in versions}) == 3
    other = Node()  # after a failover another node answers
    make_topic(other, "A")
    assert other.table(Code.GET_ALL_TOPIC_CONFIG, "dataVersion") == versions[1]


def test_a_version_is_one_that_the_go_client_reads(node: Node) -> None:
    """Its `GetAllSubscriptionGroup` has 32 bits for the counter, and fails beyond that."""
    for group in map(str, range(20)):
        node.commit(group, "T", 0, 5)
        version = node.table(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "dataVersion")
        assert 0 <= version["counter"] < 2**31 and 0 <= version["timestamp"] < 2**63


def test_attributes_of_hastore_stay_here(node: Node) -> None:
    """A group's settings are an attribute of its topic of retries."""
    body = b'{"groupName":"g","retryMaxTimes":3}'
    opaque = node.client.send(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    node.desk.run(1.0)
    assert node.client.answers.pop(opaque).code == Answer.SUCCESS
    topics = node.table(Code.GET_ALL_TOPIC_CONFIG, "topicConfigTable")
    assert topics["%RETRY%g"]["attributes"] == {}
    groups = node.table(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable")
    assert groups["g"]["retryMaxTimes"] == 3


def test_a_broker_that_takes_attributes_for_changes_gets_changes_that_it_takes(node: Node) -> None:
    """5.3.2 and 5.3.3 had dropped all topics at the first attribute without a sign."""
    for name, attributes in (
        ("A", "+queue.type=BatchCQ,+message.type=FIFO"), ("B", "+reserve.time=-1"),
        ("C", "+queue.type=Other,+reserve.time=soon"), ("D", ""),
    ):  # fmt: skip
        make_topic(node, name, attributes=attributes)
    changes: dict[str, Any] = {
        "A": {"+queue.type": "BatchCQ", "+message.type": "FIFO"}, "B": {"+reserve.time": "-1"},
        "C": {}, "D": {},
    }  # fmt: skip
    plain = {
        "A": {"queue.type": "BatchCQ", "message.type": "FIFO"}, "B": {"reserve.time": "-1"},
        "C": {"queue.type": "Other", "reserve.time": "soon"}, "D": {},
    }  # fmt: skip
    # 4.9.7, 5.3.1, 5.3.2, 5.3.3, what comes after it, and mqadmin 5.3.3
    for version, fast, wanted in (
        (401, True, plain), (475, True, plain), (477, True, changes), (479, True, changes),
        (481, True, plain), (479, False, plain),
    ):  # fmt: skip
        node.client.version, node.client.fast = version, fast
        topics = node.table(Code.GET_ALL_TOPIC_CONFIG, "topicConfigTable")
        assert {name: topics[name]["attributes"] for name in "ABCD"} == wanted, (version, fast)


def test_such_a_broker_gets_groups_without_attributes(node: Node) -> None:
    body = b'{"groupName":"g","retryMaxTimes":3,"attributes":{"+a":"1"}}'
    opaque = node.client.send(Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body)
    node.desk.run(1.0)
    assert node.client.answers.pop(opaque).code == Answer.SUCCESS
    for fast in (False, True):
        node.client.fast = fast
        groups = node.table(Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable")
        assert groups["g"]["retryMaxTimes"] == 3 and ("attributes" in groups["g"]) is not fast


def linked(ack: int | None, host: str = "127.0.0.1", *, classic: bool = True) -> dict[str, Any]:
    return {"classic": classic, "address": f"{host}:3456", "ack_offset": ack}


@pytest.mark.parametrize(
    ("slaves", "end"),
    [
        ([linked(100)], 100),
        ([linked(100), linked(60)], 60),
        ([linked(100), linked(60, "10.0.0.1")], 100),
        ([linked(60, "10.0.0.1"), linked(50, "10.0.0.2")], 50),
        ([linked(None, "10.0.0.1"), linked(70)], 70),
        ([linked(0)], 0),
        ([linked(9, classic=False), linked(100)], 100),
        ([linked(1 << 40)], None),  # all that is readable
    ],
)
def test_delays_count_as_delivered_if_the_slave_has_it(
    node: Node, slaves: list[dict[str, Any]], end: int | None
) -> None:
    node.commit("readers", "T", 0, 5)
    readable = node.backend.store.readable_offset
    assert readable > 100
    node.slaves = slaves
    answer = node.client.ask(Code.GET_ALL_DELAY_OFFSET)
    assert answer.body.endswith(b',"offsetTable":{1:0,3:7}}')
    assert node.asked == [readable if end is None else end]


def test_without_a_slave_nobody_gets_delay_offsets(node: Node) -> None:
    node.slaves = [linked(100, classic=False)]
    answer = node.client.ask(Code.GET_ALL_DELAY_OFFSET)
    assert answer.code == Answer.SYSTEM_BUSY and "ha.allow_classic_peers" in str(answer.remark)
    assert not node.asked


@pytest.mark.parametrize("others", [[], [linked(100)], [linked(100, "10.0.0.1")]])
def test_a_slave_whose_link_has_just_begun_keeps_what_it_has(
    node: Node, others: list[dict[str, Any]]
) -> None:
    """It reports its log 5 s later at the latest; until then all would count as not delivered."""
    node.slaves = [linked(None), *others]
    answer = node.client.ask(Code.GET_ALL_DELAY_OFFSET)
    assert answer.code == Answer.SYSTEM_BUSY and "not reported" in str(answer.remark)
    assert not node.asked


def test_a_node_that_is_no_master_gives_nothing_that_may_be_old(node: Node) -> None:
    class Elsewhere:
        is_master = False

        def takes(self, _: Any) -> bool:
            return False

        def again(self, *_: Any) -> bool:
            return False

    elsewhere: Any = Elsewhere()
    node.desk.door.forwarding = elsewhere
    node.slaves = [linked(100)]
    for code in (Code.GET_ALL_CONSUMER_OFFSET, Code.GET_ALL_DELAY_OFFSET):
        answer = node.client.ask(code)
        assert answer.code == Answer.SYSTEM_BUSY and "not the master" in str(answer.remark)


def test_there_are_no_timers_and_no_modes(node: Node) -> None:
    assert node.table(Code.GET_TIMER_METRICS, "timingCount") == {}
    assert node.client.ask(Code.GET_TIMER_METRICS).body == (
        node.client.ask(Code.GET_TIMER_METRICS).body
    )
    modes = node.client.ask(Code.GET_ALL_MESSAGE_REQUEST_MODE)
    assert modes.body == b'{"messageRequestModeMap":{}}'


def test_only_an_admin_may_ask() -> None:
    assert {NEEDS[code].text for code in ASKED} == {"`admin`"}


def register(node: Node, **more: str) -> Any:
    """Register as RocketMQ 5.3.3 does."""
    fields = {
        "brokerName": "g0", "brokerAddr": "127.0.0.1:10931", "clusterName": "test",
        "haServerAddr": "127.0.0.1:10932", "brokerId": "1", "compressed": "false",
        "enableActingMaster": "false", "bodyCrc32": "0", **more,
    }  # fmt: skip
    return node.client.ask(Code.REGISTER_BROKER, fields, b"{}")


def registering(node: Node, *, allowed: bool = True, master: int | None = 2) -> Node:
    nodes = {
        number: NodeAddress(
            api=f"tcp://127.0.0.1:1{number}", ha=f"127.0.0.1:2{number}", http="127.0.0.1:1"
        )
        for number in (1, 2)
    }
    config = Config(
        cluster="test", group="g0", node=1, role=Role.ASYNC_MASTER, nodes=nodes,
        store=StoreConfig(root="/nowhere"), ha=HAConfig(allow_classic_peers=allowed),
    )  # fmt: skip
    known = node.backend.master_map()
    api = None if master is None else nodes[master].api
    node.backend.ha_addresses = {number: one.ha for number, one in nodes.items()}
    shown: Any = node.backend
    shown.master_map = lambda: msgspec.structs.replace(known, master_node=master, master_api=api)
    node.desk.door.join(SlaveRegistration(node.desk.door, config).handlers())
    return node


def test_a_slave_is_told_who_its_master_is(node: Node) -> None:
    answer = register(registering(node))
    assert answer.code == Answer.SUCCESS and answer.body == b'{"table":{}}'
    assert answer.fields == {"haServerAddr": "127.0.0.1:22", "masterAddr": "127.0.0.1:12"}
    shown: Any = node.backend
    assert shown.noted == "127.0.0.1:10931"
    node.backend.ha_addresses[2] = "10.0.0.9:22"  # it has moved, since this node's start
    assert register(node).fields["haServerAddr"] == "10.0.0.9:22"
    fields = {"brokerName": "g0", "brokerId": "1"}
    assert node.client.ask(Code.UNREGISTER_BROKER, fields).code == Answer.SUCCESS


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"brokerId": "0"}, "no name server"),
        ({"brokerName": "other"}, "is g0, not other"),
        ({"brokerName": ""}, "lacks the field brokerName"),
        ({"brokerId": "-1"}, "brokerId"),
        ({"brokerId": "x"}, "brokerId"),
    ],
)
def test_who_is_no_slave_of_the_group_is_refused(
    node: Node, more: dict[str, str], why: str
) -> None:
    answer = register(registering(node), **more)
    assert answer.code != Answer.SUCCESS and why in answer.remark and not answer.fields


def test_slaves_are_refused_where_none_may_follow(node: Node) -> None:
    answer = register(registering(node, allowed=False))
    assert answer.code == Answer.NO_PERMISSION and "ha.allow_classic_peers" in answer.remark


def test_without_a_master_a_slave_keeps_what_it_knows(node: Node) -> None:
    assert register(registering(node, master=None)).code == Answer.SYSTEM_BUSY
