"""Routes: brokers, twins, queues, and topics that do not exist yet."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from hastore.config.model import Config, NodeAddress, RemotingConfig, Role, StoreConfig
from hastore.protocol.remoting import Answer, Frame
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import Door
from hastore.server.remoting.routes import Brokers, Routes, Shape, TopicView
from tests.api_fakes import FakeBackend
from tests.server.remoting.kit import RemotingClient, served

ROUTE, CLUSTER, TOPICS, TOPICS_OF = 105, 106, 206, 224
ADDRESS = NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:0", http="127.0.0.1:0")
CONFIG = Config(
    cluster="c", group="g", node=1, role=Role.ASYNC_MASTER, nodes={1: ADDRESS},
    store=StoreConfig(root="/nowhere"),
)  # fmt: skip


class View(TopicView):
    """Topics that a test sets."""

    shapes: dict[str, Shape]

    def find(self, topic: str) -> Shape | None:
        return self.shapes.get(topic)

    def names(self) -> list[str]:
        return sorted(self.shapes)


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend(node=1)
    made.nodes = {2: "tcp://10.0.0.2:7402", 1: "tcp://10.0.0.1:7401", 3: "tcp://[::1]:7403"}
    return made


@pytest.fixture
def settings() -> RemotingConfig:
    return RemotingConfig()


@pytest.fixture
def view(backend: FakeBackend, settings: RemotingConfig) -> View:
    made = View(backend, auto_create=settings.auto_create_topics)
    made.shapes = {"T": Shape(8, 4), "R": Shape(2, 2, 4), "O": Shape(3, 3, order=True)}
    return made


@pytest.fixture
def server(backend: FakeBackend, settings: RemotingConfig, view: View) -> Iterator[ApiServer]:
    config = msgspec.structs.replace(CONFIG, remoting=settings)

    def fill(door: Door) -> None:
        door.join(Routes(door, view, Brokers(backend, config)).handlers())

    with served(backend, fill) as running:
        yield running


@pytest.fixture
def connect(server: ApiServer) -> Iterator[Callable[[], RemotingClient]]:
    made: list[RemotingClient] = []

    def make() -> RemotingClient:
        made.append(RemotingClient(server.endpoint))
        return made[-1]

    yield make
    for client in made:
        client.close()


def route(client: RemotingClient, topic: str) -> Any:
    answer = client.ask(ROUTE, {"topic": topic, "acceptStandardJsonOnly": "true"})
    assert answer.code == Answer.SUCCESS, answer
    return json.loads(answer.body)


def code(client: RemotingClient, topic: str) -> Frame:
    return client.ask(ROUTE, {"topic": topic})


def queues(found: Any) -> dict[str, tuple[int, int, int]]:
    return {
        one["brokerName"]: (one["readQueueNums"], one["writeQueueNums"], one["perm"])
        for one in found["queueDatas"]
    }


def test_a_route_names_the_group_and_its_twins(connect: Callable[[], RemotingClient]) -> None:
    found = route(connect(), "T")
    assert found["brokerDatas"] == [
        {
            "brokerAddrs": addresses, "brokerName": name, "cluster": "c",
            "enableActingMaster": False,
        }
        for name, addresses in (
            ("g", {"0": "10.0.0.1:7401", "2": "10.0.0.2:7402", "3": "[::1]:7403"}),
            ("g@2", {"0": "10.0.0.2:7402"}),
            ("g@3", {"0": "[::1]:7403"}),
        )
    ]  # fmt: skip
    assert queues(found) == {"g": (8, 4, 6), "g@2": (8, 4, 2), "g@3": (8, 4, 2)}
    assert found["filterServerTable"] == {}
    assert "orderTopicConf" not in found
    assert route(connect(), "O")["orderTopicConf"] == "g:3"
    assert queues(route(connect(), "R")) == {"g": (2, 2, 4), "g@2": (2, 2, 0), "g@3": (2, 2, 0)}


def test_a_message_selector_picks_the_same_queue_whoever_is_the_master(
    connect: Callable[[], RemotingClient], backend: FakeBackend
) -> None:
    """Java's producer sorts the brokers with id 0 by name, and picks by a key's hash."""
    client = connect()
    for master in (1, 2, 3, None):
        backend.master = master
        found = route(client, "T")
        sent_to = {one["brokerName"] for one in found["brokerDatas"] if "0" in one["brokerAddrs"]}
        picked = [queue for _ in sorted(sent_to) for queue in range(4)]
        assert picked == [0, 1, 2, 3] * 3, "three names, also without a master"
        assert all(queues(found)[name][1] == 4 for name in sent_to)


def test_only_who_asks_for_it_gets_standard_json(connect: Callable[[], RemotingClient]) -> None:
    for more in ({}, {"acceptStandardJsonOnly": "false"}):
        body = connect().ask(ROUTE, {"topic": "T", **more}).body
        assert b'"brokerAddrs":{0:"10.0.0.1:7401",2:"10.0.0.2:7402",3:"[::1]:7403"}' in body
        with pytest.raises(ValueError, match="property name"):
            json.loads(body)


def test_the_ids_follow_the_master(
    backend: FakeBackend, connect: Callable[[], RemotingClient]
) -> None:
    def brokers() -> dict[str, dict[str, str]]:
        found = route(connect(), "T")["brokerDatas"]
        return {one["brokerName"]: one["brokerAddrs"] for one in found}

    backend.master = 2
    assert brokers()["g"] == {"0": "10.0.0.2:7402", "1": "10.0.0.1:7401", "3": "[::1]:7403"}
    assert sorted(brokers()) == ["g", "g@1", "g@3"]
    backend.master = None
    assert brokers()["g"] == {"1": "10.0.0.1:7401", "2": "10.0.0.2:7402", "3": "[::1]:7403"}
    assert sorted(brokers()) == ["g", "g@1", "g@2", "g@3"], "each of them holds a send"


def test_a_long_list_of_topics_holds_nobody_up(
    connect: Callable[[], RemotingClient], view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = threading.Event()
    monkeypatch.setattr(view, "names", lambda: ["T"] if listed.wait(60) else [])
    client, other = connect(), connect()
    opaque = client.send(TOPICS)
    assert route(other, "T")["queueDatas"]
    many = [other.send(TOPICS) for _ in range(2_000)]
    refused = [frame for frame in (other.next() for _ in range(900)) if frame.code]
    assert {frame.code for frame in refused} == {Answer.SYSTEM_BUSY}
    listed.set()
    assert json.loads(client.answer_of(opaque).body) == {"topicList": ["T"]}
    left = [other.next() for _ in range(len(many) - 900)]
    assert {frame.code for frame in left} <= {Answer.SUCCESS, Answer.SYSTEM_BUSY}


class TestWithoutTwins:
    """`remoting.twins: false`."""

    @pytest.fixture
    def settings(self) -> RemotingConfig:
        return RemotingConfig(twins=False)

    def test_there_is_one_broker(self, connect: Callable[[], RemotingClient]) -> None:
        assert queues(route(connect(), "T")) == {"g": (8, 4, 6)}
        table = json.loads(quoted(connect().ask(CLUSTER).body))
        assert table["clusterAddrTable"] == {"c": ["g"]}


def quoted(body: bytes) -> bytes:
    """Return fastjson's form as JSON: the keys of addresses are quoted."""
    for number in range(4):
        body = body.replace(b"{%d:" % number, b'{"%d":' % number)
        body = body.replace(b",%d:" % number, b',"%d":' % number)
    return body


def test_the_cluster_and_its_topics(connect: Callable[[], RemotingClient]) -> None:
    client = connect()
    table = json.loads(quoted(client.ask(CLUSTER).body))
    assert table["clusterAddrTable"] == {"c": ["g", "g@2", "g@3"]}
    assert table["brokerAddrTable"]["g"]["brokerAddrs"]["0"] == "10.0.0.1:7401"
    assert sorted(table["brokerAddrTable"]) == ["g", "g@2", "g@3"]
    for asked, more in ((TOPICS, {}), (TOPICS_OF, {"cluster": "c"})):
        assert json.loads(client.ask(asked, more).body) == {"topicList": ["O", "R", "T"]}
    other = client.ask(TOPICS_OF, {"cluster": "d"})
    assert (other.code, other.remark) == (1, "the cluster here is c, not d")


def test_a_producer_asks_for_the_pattern_of_new_topics(
    connect: Callable[[], RemotingClient],
) -> None:
    client = connect()
    for _ in range(3):  # it asks again for each message, until one was stored
        missing = code(client, "new")
        assert missing.code == Answer.TOPIC_NOT_EXIST
        assert missing.remark == "No topic route info in name server for the topic: new"
        assert queues(route(client, "TBW102"))["g"] == (4, 4, 7)
        assert queues(route(client, "TBW102"))["g@2"] == (4, 4, 2)


def test_a_consumer_that_starts_first_gets_a_route(
    connect: Callable[[], RemotingClient], view: View
) -> None:
    client, other = connect(), connect()
    assert code(client, "new").code == Answer.TOPIC_NOT_EXIST
    assert code(other, "new").code == Answer.TOPIC_NOT_EXIST
    assert queues(route(client, "new"))["g"] == (4, 4, 6)
    assert queues(route(connect(), "new"))["g"] == (4, 4, 6), "all must know the same"
    view.shapes["new"] = Shape(9, 9)
    assert queues(route(client, "new"))["g"] == (9, 9, 6)


def test_retries_and_dead_letters_have_a_route_before_they_exist(
    connect: Callable[[], RemotingClient],
) -> None:
    for topic in ("%RETRY%group", "%DLQ%group"):
        assert queues(route(connect(), topic))["g"] == (1, 1, 6)


@pytest.mark.parametrize(
    ("topic", "wanted"),
    [
        ("", Answer.INVALID_PARAMETER),
        ("a b", Answer.INVALID_PARAMETER),
        ("x" * 200, Answer.INVALID_PARAMETER),
        ("HASTORE_POSITIONS", Answer.NO_PERMISSION),
    ],
)
def test_a_wrong_name_has_no_route(
    connect: Callable[[], RemotingClient], topic: str, wanted: int
) -> None:
    client = connect()
    assert [code(client, topic).code for _ in range(2)] == [wanted, wanted]
    assert client.ask(ROUTE).code == Answer.INVALID_PARAMETER


def test_a_client_that_asks_for_many_topics_is_remembered_within_bounds(
    connect: Callable[[], RemotingClient],
) -> None:
    client = connect()
    names = [f"new{number}" for number in range(100)]
    assert {code(client, name).code for name in names} == {Answer.TOPIC_NOT_EXIST}
    again = [code(client, name).code for name in names]
    assert again == [Answer.SUCCESS] * 64 + [Answer.TOPIC_NOT_EXIST] * 36


class TestWithoutAutoCreation:
    """`remoting.auto_create_topics: false`."""

    @pytest.fixture
    def settings(self) -> RemotingConfig:
        return RemotingConfig(auto_create_topics=False)

    def test_only_what_exists_has_a_route(self, connect: Callable[[], RemotingClient]) -> None:
        client = connect()
        for topic in ("new", "new", "TBW102"):
            assert code(client, topic).code == Answer.TOPIC_NOT_EXIST
        assert queues(route(client, "T"))["g"] == (8, 4, 6)
        assert queues(route(client, "%RETRY%group"))["g"] == (1, 1, 6)
