"""What mqadmin asks about positions, and how it moves a group."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from hastore.errors import CorruptRecordError
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.remoting import Answer, Code
from hastore.server.remoting.group_positions import ONE_WAY_MS, GroupPositions
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.position_requests import QUEUES_MAX, PositionRequests
from hastore.server.remoting.routes import TopicView
from hastore.store.append.topic_table import TopicTable
from tests.api_fakes import FakeBackend, FakePull
from tests.server.api.kit import record
from tests.server.remoting.desk import Desk
from tests.server.remoting.test_groups import java, subscribed

RESET = Code.RESET_CONSUMER_CLIENT_OFFSET
_KEY = re.compile(rb"(\{[^{}]*\}):")


def table(body: bytes) -> dict[tuple[str, int], object]:
    """Return a map whose keys are queues, which is no JSON."""
    plain = json.loads(_KEY.sub(lambda m: json.dumps(m[1].decode()).encode() + b":", body))
    found = {}
    for key, value in plain["offsetTable"].items():
        queue = json.loads(key)
        assert queue["brokerName"] == "brokers"
        found[queue["topic"], queue["queueId"]] = value
    return found


class Node:
    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.desk = Desk(self.backend)
        door = self.desk.door
        groups, positions = GroupRequests(door), GroupPositions(door)
        topics = TopicView(self.backend, auto_create=True)
        self.requests = PositionRequests(door, positions, groups.members, topics, "brokers")
        for each in (groups, positions, self.requests):
            door.join(each.handlers())
        self.admin = self.desk.client()
        for queue in range(2):
            self.backend.put_encoded([record("T", b"x", queue=queue) * 10])
        self.stored = [one.store_timestamp_ms for one in self.backend.store._records()]

    def commit(self, offset: int, queue: int = 0, group: str = "G", topic: str = "T") -> None:
        fields = {
            "consumerGroup": group, "topic": topic, "queueId": str(queue),
            "commitOffset": str(offset),
        }  # fmt: skip
        assert self.admin.ask(Code.UPDATE_CONSUMER_OFFSET, fields).code == 0

    def reset(self, **fields: str) -> tuple[int, dict[tuple[str, int], object]]:
        asked = {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true"} | fields
        answer = self.admin.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, asked)
        return answer.code, table(answer.body) if answer.code == 0 else {}

    def position(self, queue: int) -> int:
        fields = {"consumerGroup": "G", "topic": "T", "queueId": str(queue)}
        return int(self.admin.ask(Code.QUERY_CONSUMER_OFFSET, fields).fields["offset"])


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_progress_of_a_group(node: Node) -> None:
    node.commit(4)
    answer = node.admin.ask(Code.GET_CONSUME_STATS, {"consumerGroup": "G"})
    found = table(answer.body)
    assert set(found) == {("T", queue) for queue in range(4)}
    stored_ms = node.stored[3]
    assert found["T", 0] == {
        "brokerOffset": 10, "consumerOffset": 4, "lastTimestamp": stored_ms, "pullOffset": 4,
    }  # fmt: skip
    nothing = {"consumerOffset": 0, "lastTimestamp": 0, "pullOffset": 0}
    assert found["T", 1] == {"brokerOffset": 10} | nothing
    assert found["T", 3] == {"brokerOffset": 0} | nothing
    node.commit(10)
    body = node.admin.ask(Code.GET_CONSUME_STATS, {"consumerGroup": "G", "topic": "T"}).body
    assert 0.0 < float(re.findall(rb'"consumeTps":([^,]*)', body)[0]) <= 0.1
    node.commit(1, topic="U")
    node.backend.put_encoded([record("U", b"x")])
    for listed, topics in (("U;none;U", {"U"}), ("U;T", {"T", "U"}), ("", {"T", "U"})):
        asked = {"consumerGroup": "G", "topicList": listed}  # as 5.3 asks for some topics
        found = table(node.admin.ask(Code.GET_CONSUME_STATS, asked).body)
        assert {topic for topic, _ in found} == topics
    unknown = node.admin.ask(Code.GET_CONSUME_STATS, {"consumerGroup": "X"})
    assert (unknown.code, table(unknown.body)) == (0, {})


def test_a_damaged_message_does_not_hide_the_progress(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.commit(4)
    read = node.backend.store.pull

    def pull(topic: str, *place: Any, **more: Any) -> FakePull:
        if topic == "T":
            raise CorruptRecordError("the record at offset 0 is damaged")
        return read(topic, *place, **more)

    monkeypatch.setattr(node.backend.store, "pull", pull)
    answer = node.admin.ask(Code.GET_CONSUME_STATS, {"consumerGroup": "G"})
    assert table(answer.body)["T", 0] == {
        "brokerOffset": 10, "consumerOffset": 4, "lastTimestamp": 0, "pullOffset": 4,
    }  # fmt: skip


def test_who_consumes_a_topic(node: Node) -> None:
    node.commit(1, group="offline")
    online = node.desk.client()
    online.ask(Code.HEART_BEAT, {}, java("c", ("online",), subscribed("T", "a", 3)))
    found = node.admin.ask(Code.QUERY_TOPIC_CONSUME_BY_WHO, {"topic": "T"})
    assert json.loads(found.body) == {"groupList": ["offline", "online"]}
    known: list[str] = []
    node.requests.with_groups(known.extend)
    node.desk.run()
    assert sorted(known) == ["offline", "online"]
    for group in ("offline", "online"):
        found = node.admin.ask(Code.QUERY_TOPICS_BY_CONSUMER, {"group": group})
        assert json.loads(found.body) == {"topicList": ["T"]}
    fields = {"group": "online", "topic": "T"}
    found = node.admin.ask(Code.QUERY_SUBSCRIPTION_BY_CONSUMER, fields)
    assert json.loads(found.body)["subscriptionData"]["subString"] == "a"
    node.commit(1, group="online", topic="U")
    found = node.admin.ask(Code.QUERY_TOPICS_BY_CONSUMER, {"group": "online"})
    assert json.loads(found.body) == {"topicList": ["T"]}, "it wants U no more"


def test_a_reset_moves_the_positions_and_tells_the_consumers(node: Node) -> None:
    clients = [node.desk.client() for _ in range(2)]
    for client, language in zip(clients, ("JAVA", "CPP"), strict=True):
        client.ask(Code.HEART_BEAT, {}, java(f"c{language}", ("G",)), language=language)
    node.commit(7)
    code, found = node.reset()
    assert code == 0 and found == {("T", queue): 0 for queue in range(4)}
    assert node.position(0) == 0
    (java_told,), (cpp_told,) = (client.told(RESET) for client in clients)
    assert java_told.fields["topic"] == "T" and java_told.fields["group"] == "G"
    assert java_told.is_one_way and table(java_told.body) == found
    listed = json.loads(cpp_told.body)["offsetTable"]
    assert {(one["topic"], one["queueId"]): one["offset"] for one in listed} == found


def test_a_consumer_is_told_once_of_a_reset_that_comes_by_all_nodes(node: Node) -> None:
    """It stops for 10 s each time; with write twins mqadmin asks once for each node."""
    client, later = node.desk.client(), node.desk.client()
    client.ask(Code.HEART_BEAT, {}, java("c", ("G",)))
    node.commit(7)
    for _ in range(3):
        assert node.reset()[0] == 0 and node.position(0) == 0
    assert len(client.told(RESET)) == 1
    later.ask(Code.HEART_BEAT, {}, java("d", ("G",)))
    node.reset()
    assert [len(one.told(RESET)) for one in (client, later)] == [0, 1], "it did not know"
    node.reset(timestamp="-1")
    node.reset()
    assert len(client.told(RESET)) == 2, "there and back"
    node.desk.run(3_000)
    node.reset()
    assert len(client.told(RESET)) == 1, "the operator repeats it"


def test_a_reset_without_force_moves_nobody_forward(node: Node) -> None:
    node.commit(7)
    code, found = node.reset(timestamp="-1", isForce="false")
    assert code == 0 and (found["T", 0], found["T", 1]) == (7, 10)
    code, found = node.reset(timestamp="-1")
    assert (found["T", 0], found["T", 1], found["T", 3]) == (10, 10, 0)
    assert (node.position(0), node.position(1)) == (10, 10)
    code, found = node.reset(timestamp=str(2**62))
    assert (found["T", 0], found["T", 1]) == (10, 10)


def test_a_reset_to_an_offset_of_one_queue(node: Node) -> None:
    node.commit(7)
    assert node.reset(queueId="0", offset="3") == (0, {("T", 0): 3})
    assert node.position(0) == 3
    assert node.reset(queueId="0", offset="11")[0] == Answer.SYSTEM_ERROR
    assert node.reset(queueId="0", timestamp="-1") == (0, {("T", 0): 10})
    assert node.reset(queueId="9")[0] == Answer.SYSTEM_ERROR


def test_a_group_that_nobody_knows_is_not_reset(node: Node) -> None:
    assert node.reset()[0] == Answer.CONSUMER_NOT_ONLINE
    assert node.reset(topic="unknown")[0] == Answer.SYSTEM_ERROR
    node.desk.client().ask(Code.HEART_BEAT, {}, java("c"))
    assert node.reset()[0] == 0


def test_a_reset_that_is_not_confirmed_tells_nobody(node: Node) -> None:
    client = node.desk.client()
    client.ask(Code.HEART_BEAT, {}, java("c"))
    node.commit(7)
    node.backend.transfer.hold = True
    opaque = node.admin.send(
        Code.INVOKE_BROKER_TO_RESET_OFFSET, {"topic": "T", "group": "G", "timestamp": "0"}
    )
    node.desk.run()
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run(ONE_WAY_MS)
    assert node.admin.answers.pop(opaque).code != 0
    assert not client.told(RESET)


def test_a_search_by_time_that_takes_too_long_resets_nothing(node: Node) -> None:
    node.commit(7)
    node.backend.store.time_spent = True
    assert node.reset(timestamp="5")[0] == Answer.SYSTEM_BUSY
    assert node.position(0) == 7


@pytest.mark.parametrize("code", [208, 222, 300, 343, 345])
def test_missing_and_wrong_fields_have_one_clear_answer(node: Node, code: int) -> None:
    assert node.admin.ask(code).code == Answer.SYSTEM_ERROR
    wrong = {"topic": "T", "group": "G", "timestamp": "soon"}
    assert node.admin.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, wrong).code == Answer.SYSTEM_ERROR


def test_too_many_queues_are_refused(node: Node) -> None:
    store = node.backend.store
    many = TopicTable(MemoryFileSystem(), "", store, store.view, QUEUES_MAX + 1, file_size=1)
    store.topic_table = many
    node.commit(7)
    answer = node.admin.ask(Code.GET_CONSUME_STATS, {"consumerGroup": "G"})
    assert answer.code == Answer.SYSTEM_ERROR and "topic" in str(answer.remark)
