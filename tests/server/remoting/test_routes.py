"""Routes: brokers, twins, queues, and topics that do not exist yet."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hastore.config.model import Config, Mode, NodeAddress, RemotingConfig, Role, StoreConfig
from hastore.protocol.remoting import Answer, Frame
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.server import ApiServer
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.server.remoting.door import Door
from hastore.server.remoting.routes import Brokers, Readers, Routes, Shape, TopicView
from tests.api_fakes import FakeBackend
from tests.ha.nodes import wait_for
from tests.process.harness import Ports
from tests.server.kit import config_in_group
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
        routes = Routes(door, view, Brokers(backend, config), hold_ms=300)
        door.join(routes.handlers())

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
    for topic in ("%RETRY%group", "%DLQ%group", "%RETRY%" + "g" * 248):
        assert queues(route(connect(), topic))["g"] == (1, 1, 6)


def test_a_route_waits_for_the_topics_of_a_broker_and_is_refused_then(
    connect: Callable[[], RemotingClient], backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of `default_queues` counted for 30 s; a refused one is asked for at the next send."""
    waits = [True]
    monkeypatch.setattr(backend, "routes_wait", lambda: waits[0])
    client = connect()
    for topic in ("T", "TBW102", "New"):
        answer = code(client, topic)
        assert answer.code == Answer.SERVICE_NOT_AVAILABLE
        assert "are not taken over yet" in str(answer.remark)
    assert queues(route(client, "%RETRY%group"))["g"] == (1, 1, 6)
    backend.put_encoded([build_change(TopicChange(TopicConfig("T", 8, 4)), 1)])
    assert queues(route(client, "T"))["g"] == (8, 4, 6)
    waits[0] = False
    assert queues(route(client, "TBW102"))["g"] == (4, 4, 7)


def test_a_copy_of_a_broker_has_no_twins(
    connect: Callable[[], RemotingClient], backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "copies_broker", lambda: True)
    assert set(queues(route(connect(), "T"))) == {"g"}


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


@pytest.mark.parametrize("mode", [Mode.CLASSIC, Mode.DLEDGER])
def test_a_slave_names_the_other_slaves_that_serve_reads(tmp_path: Path, mode: Mode) -> None:
    """A client whose route comes from a slave may read from each node, also if the master dies."""
    make = Node if mode is Mode.CLASSIC else DLedgerNode
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(contextlib.closing(Ports()))
        addresses = {n: NodeAddress(**each) for n, each in ports.addresses(3).items()}
        nodes = {}
        for number in addresses:
            config = config_in_group(tmp_path, number, addresses, mode=mode)
            if mode is Mode.DLEDGER:
                config = msgspec.structs.replace(config, role=None)
            nodes[number] = make(config, lambda: None)
            nodes[number].start()
            stack.callback(nodes[number].stop)
        wait_for(
            lambda: any(len(one.backend.reading_nodes()) == 2 for one in nodes.values()),
            "a master with two slaves",
        )
        master = next(n for n, one in nodes.items() if len(one.backend.reading_nodes()) == 2)
        slaves = sorted(nodes.keys() - {master})
        clients = {n: RemotingClient(nodes[n].api.endpoint) for n in slaves}
        for client in clients.values():
            stack.callback(client.close)

        def named(number: int) -> dict[str, str]:
            """Return the addresses of the group in a route that a slave gives."""
            route = json.loads(clients[number].ask(ROUTE, standard("TBW102")).body)
            found: dict[str, str] = route["brokerDatas"][0]["brokerAddrs"]
            return found

        every = {str(n): addresses[n].api.removeprefix("tcp://") for n in slaves}
        every["0"] = addresses[master].api.removeprefix("tcp://")
        for number in slaves:
            wait_for(lambda n=number: named(n) == every, f"all nodes in the route of node {number}")
        cluster = {"acceptStandardJsonOnly": "true"}
        info = json.loads(clients[slaves[0]].ask(CLUSTER, cluster).body)
        assert info["brokerAddrTable"]["g0"]["brokerAddrs"] == every
        nodes[master].stop()
        left = {every[str(n)] for n in slaves}
        assert left <= set(named(slaves[0]).values()), "nobody is the master, or a slave is"


def standard(topic: str) -> dict[str, str]:
    return {"topic": topic, "acceptStandardJsonOnly": "true"}


class Links:
    """A node that asks its master when the test lets it."""

    def __init__(self) -> None:
        self.is_master = False
        self.has_link = True
        self.asked: list[Callable[[Frame | None], None]] = []

    def ask(self, frame: Frame, then: Callable[[Frame | None], None]) -> bool:
        assert frame.code == CLUSTER
        if self.has_link:
            self.asked.append(then)
        return self.has_link

    def takes(self, request: Any) -> bool:
        return False

    def again(self, request: Any, reason: str) -> bool:
        return False


def says(*nodes: int) -> Frame:
    """Return a master's answer."""
    addresses = {str(n): f"10.0.0.{n}:1" for n in nodes}
    table = {"brokerAddrTable": {"g": {"brokerAddrs": addresses}}}
    return Frame(Answer.SUCCESS, 0, body=json.dumps(table).encode())


class Asking:
    """Readers of a slave, with a clock and timers that the test moves."""

    def __init__(self) -> None:
        self.links = Links()
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        door: Any = self
        self.forwarding, self.parts, self.clock = self.links, self, self
        self.readers = Readers(door, "g")

    def monotonic_ms(self) -> float:
        return self.now

    def at(self, ms: float, call: Callable[[], None]) -> None:
        self.timers.append((ms, call))

    def later(self, call: Callable[[], None]) -> None:
        call()

    def run(self, until_ms: float) -> None:
        while due := [one for one in self.timers if one[0] <= until_ms]:
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = until_ms

    def wanted(self) -> list[float]:
        """Want the readers; return the times at which the call came."""
        came: list[float] = []
        self.readers.want(lambda: came.append(self.now))
        return came


def test_the_first_route_waits_for_the_masters_answer_but_not_for_long() -> None:
    asking = Asking()
    came = asking.wanted()
    (answer,) = asking.links.asked
    assert not came
    asking.run(20)
    answer(says(0, 2, 3))
    assert came == [20] and asking.readers.nodes() == {2, 3}
    assert asking.wanted() == [20], "they are known"
    silent = Asking()
    silent.links.has_link = False
    came = silent.wanted()
    silent.run(5_000)
    assert came == [300] and not silent.readers.nodes()
    assert len(silent.timers) == 1, "one timer goes on"


def test_a_slave_asks_each_second_while_clients_ask_for_routes() -> None:
    asking = Asking()
    asking.wanted()
    for second in range(1, 200):
        for answer in asking.links.asked[second - 1 :]:
            answer(says(0, second))
        asking.run(second * 1_000)
    assert 85 <= len(asking.links.asked) <= 95 and not asking.timers
    assert not asking.readers.nodes(), "what is old does not count"
    asking.wanted()
    assert len(asking.timers) == 2


@pytest.mark.parametrize(
    "answer",
    [None, says(2, 3), Frame(1, 0), Frame(0, 0, body=b"{"), Frame(0, 0, body=b"{}"),
     Frame(0, 0, body=b'{"brokerAddrTable": {"g": {"brokerAddrs": {"x": "y"}}}}')],
)  # fmt: skip
def test_an_answer_that_is_none_leaves_what_the_node_knows(answer: Frame | None) -> None:
    asking = Asking()
    came = asking.wanted()
    asking.links.asked[0](answer)
    asking.run(1_000)
    assert came == [300] and not asking.readers.nodes()
    assert len(asking.links.asked) > 1, "it asks again"
    asking.links.is_master = True
    assert asking.wanted() == [1_000]
