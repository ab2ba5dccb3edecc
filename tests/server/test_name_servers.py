"""A node at RocketMQ's name servers: what it tells them, and what bad ones do to it: nothing."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import random
import re
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from hastore.config.file import parse_config
from hastore.config.model import Config, NodeAddress, RemotingConfig
from hastore.errors import ConfigError
from hastore.protocol.registration import (
    SHORT_BYTES,
    BrokerName,
    Queues,
    Version,
    decode_route,
    encode_topics,
    registration,
)
from hastore.record.codec import NO_HOST, build_record
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server import name_servers
from hastore.server.metrics.from_status import render_metrics
from hastore.server.node import Node
from hastore.store.append.results import own_records
from tests.config.test_file import PAIR
from tests.process.harness import Ports, wait_until
from tests.server.kit import config_of, running
from tests.server.name_server import FORGET, REGISTER, TOPICS, NameServer, read_body

LIMIT_S = 60.0
Make = Callable[..., Node]


@pytest.fixture
def server() -> Iterator[NameServer]:
    made = NameServer()
    yield made
    made.stop()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node repeat within fractions of a second what it repeats after seconds."""
    for name in ("REGISTER_MS", "CHECK_MS", "SOON_MS", "AGAIN_MS"):
        monkeypatch.setattr(name_servers, name, 100.0)
    monkeypatch.setattr(name_servers, "TICK_S", 0.02)


@pytest.fixture
def ports() -> Iterator[Ports]:
    with contextlib.closing(Ports()) as held:
        yield held


def config_at(root: pathlib.Path, ports: Ports, *servers: str, **changes: object) -> Config:
    """Return the configuration of a node alone, a master, that registers at some servers."""
    address = NodeAddress(**ports.addresses(1)[1])
    fields = {"nodes": {1: address}, "remoting": RemotingConfig(name_servers=servers), **changes}
    return msgspec.structs.replace(config_of(root), **fields)


def own(config: Config) -> str:
    return config.nodes[1].api.removeprefix("tcp://")


def problems(node: Node) -> list[str]:
    return [text for text in node.backend.problems() if text.startswith("name server ")]


def record(topic: str) -> bytes:
    return build_record(topic, b"body", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST)


def delete(node: Node, topic: str) -> None:
    """Delete a topic, as a client's request would."""
    change = build_change(TopicChange(deleted=topic), 1)
    node.backend.put_encoded([change], [own_records])


def of(server: NameServer, node: Node) -> dict[str, object]:
    statuses = node.backend.status()["name_servers"]
    found: dict[str, object] = next(one for one in statuses if one["address"] == server.address)
    return found


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == name_servers.__name__]


class TestBody:
    """The body of a registration, in both forms."""

    def test_both_forms_say_the_same(self) -> None:
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        some = random.Random(seed)
        for count in (0, 1, 3, 5_000):
            table = [
                Queues(f"topic-{n}", some.randrange(4097), some.randrange(4097), some.randrange(8))
                for n in range(count)
            ]
            version = Version(some.randrange(2**45), some.randrange(2**31), some.randrange(2**62))
            body, is_compressed = encode_topics(table, version)
            assert is_compressed == (count == 5_000)
            assert not is_compressed or len(body) < SHORT_BYTES
            broker = BrokerName("c", "b", 0, "h:1")
            found = read_body(registration(broker, "h:2", body, compressed=is_compressed))
            counts = {"counter": version.counter, "stateVersion": version.state}
            assert found["dataVersion"] == {"timestamp": version.timestamp_ms, **counts}
            assert {
                name: (one["readQueueNums"], one["writeQueueNums"], one["perm"])
                for name, one in found["topicConfigTable"].items()
            } == {one.topic: (one.read, one.write, one.perm) for one in table}

    def test_a_route_with_bare_numbers_is_read(self) -> None:
        body = b'{"brokerDatas":[{"brokerAddrs":{0:"a.1:9",12:"[::1]:8"},"brokerName":"b"}]}'
        assert decode_route(body).brokerDatas[0].brokerAddrs == {"0": "a.1:9", "12": "[::1]:8"}


@pytest.mark.usefixtures("soon")
def test_topics_that_may_become_others_are_told_later(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a promotion from a broker: a client keeps what it is told for 30 s."""
    waits = [True]
    with running(Node(config_at(tmp_path, ports, server.address), lambda: None)) as node:
        monkeypatch.setattr(node.backend, "routes_wait", lambda: waits[0])
        node.backend.put_encoded([record("Orders")])
        change = build_change(TopicChange(TopicConfig("Taken", 2, 2)), 1)
        node.backend.put_encoded([change], [own_records])
        wait_until(lambda: server.topic("Taken"), LIMIT_S, "what is known is told")
        assert not server.topic("Orders")
        waits[0] = False
        wait_until(lambda: server.topic("Orders"), LIMIT_S, "Orders is not told")
        assert server.topic("TBW102")


@pytest.mark.usefixtures("soon")
def test_topics_follow_and_go(server: NameServer, ports: Ports, tmp_path: pathlib.Path) -> None:
    """New topics, changed, deleted ones; one that another broker has, too; the node's end."""
    config = config_at(tmp_path / "store", ports, server.address)
    with running(Node(config, lambda: None)) as node:
        wait_until(lambda: server.holders("g0") == {"0": own(config)}, LIMIT_S, "not registered")
        assert set(server.topics) == {"g0", "test", "TBW102"}
        assert server.topic("TBW102")["g0"]["perm"] == 7
        for name in ("Orders", "Shared"):
            node.backend.put_encoded([record(name)])
            wait_until(lambda name=name: server.topic(name), LIMIT_S, f"no {name}")
        queues = {"readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
        assert server.topic("Orders") == {"g0": queues}
        server.topics["Shared"]["other"] = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
        counters = [one["counter"] for one in server.versions]
        assert counters == sorted(counters) and len(set(counters)) >= 2
        assert len({one["timestamp"] for one in server.versions}) >= 2

        delete(node, "Orders")
        wait_until(lambda: not server.topic("Orders"), LIMIT_S, "Orders stays")
        delete(node, "Shared")
        wait_until(lambda: server.topic("Shared")["g0"]["perm"] == 0, LIMIT_S, "Shared stays")
        assert server.topic("Shared")["other"]["perm"] == 6, "the other broker's queues stay"
        assert server.seen[FORGET] == 1
        node.backend.put_encoded([record("Shared")])
        wait_until(lambda: server.topic("Shared")["g0"]["perm"] == 6, LIMIT_S, "Shared is not back")

        status = of(server, node)
        assert status["brokers"] == ["g0:0"] and status["problem"] is None
        text = f'node="1",address="{server.address}"}} 1'
        assert text in render_metrics(node.backend.status()).decode()
    assert server.holders("g0") == {}, "104 came before the end"


def test_a_group_without_topics_that_is_named_as_its_cluster(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path
) -> None:
    """A name server of RocketMQ 5 refuses a new broker with one topic only."""
    config = config_at(tmp_path, ports, server.address, cluster="shop", group="shop")
    remoting = msgspec.structs.replace(config.remoting, auto_create_topics=False)
    config = msgspec.structs.replace(config, remoting=remoting)
    with running(Node(config, lambda: None)) as node:
        wait_until(lambda: server.seen[REGISTER] > 0, LIMIT_S, "no registration")
        wait_until(lambda: of(server, node)["brokers"] == ["shop:0"], LIMIT_S, "not registered")
        assert server.holders("shop") == {"0": own(config)} and not problems(node)


@pytest.mark.usefixtures("soon")
def test_a_topic_that_is_deleted_in_the_middle_of_a_registration_goes(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node knows of the deletion before it has made the table of its topics anew."""
    config = config_at(tmp_path / "store", ports, server.address)
    has, behind = name_servers.Topics.has, ["Orders"]

    def has_still(topics: name_servers.Topics, topic: str) -> bool:
        if topic in behind:
            behind.remove(topic)
            return True
        return has(topics, topic)

    with running(Node(config, lambda: None)) as node:
        node.backend.put_encoded([record("Orders")])
        wait_until(lambda: server.topic("Orders"), LIMIT_S, "no Orders")
        monkeypatch.setattr(name_servers.Topics, "has", has_still)
        delete(node, "Orders")
        wait_until(lambda: not server.topic("Orders"), LIMIT_S, "Orders stays")
        assert not behind


@pytest.mark.usefixtures("soon")
def test_a_topic_that_is_made_again_and_deleted_again_goes_again(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path
) -> None:
    """One of the group alone is forgotten each time; one of others, too, is hidden each time."""
    config = config_at(tmp_path / "store", ports, server.address)
    with running(Node(config, lambda: None)) as node:
        for time_ in ("first", "second"):
            for name in ("Orders", "Shared"):
                node.backend.put_encoded([record(name)])
                wait_until(
                    lambda name=name: server.topic(name).get("g0", {}).get("perm") == 6,
                    LIMIT_S,
                    f"no {name} the {time_} time",
                )
            other = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
            server.topics["Shared"]["other"] = other
            for name in ("Orders", "Shared"):
                delete(node, name)
            wait_until(
                lambda: not server.topic("Orders"), LIMIT_S, f"Orders stays the {time_} time"
            )
            wait_until(
                lambda: server.topic("Shared")["g0"]["perm"] == 0,
                LIMIT_S,
                f"Shared stays the {time_} time",
            )
        assert server.seen[FORGET] == 2


@pytest.mark.usefixtures("soon")
def test_a_busy_name_server_is_asked_again_to_forget_a_topic(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path
) -> None:
    config = config_at(tmp_path / "store", ports, server.address)
    with running(Node(config, lambda: None)) as node:
        node.backend.put_encoded([record("Orders")])
        wait_until(lambda: server.topic("Orders"), LIMIT_S, "no Orders")
        server.busy = [TOPICS, FORGET]
        delete(node, "Orders")
        wait_until(lambda: not server.topic("Orders"), LIMIT_S, "Orders stays")
        assert not server.busy and not problems(node)


BAD = {
    "silent": "does not answer: it takes too long to answer",
    "garbage": "its answer cannot be read",
    "huge": "its answer cannot be read: an answer of 2147483647 bytes",
    "refuses": "it does not say who is broker g0: code 1",
    "another answer": "which nobody asked",
    "no route": "its answer cannot be read: a route that cannot be read",
    "nested": "its answer cannot be read: a route that cannot be read",
    "no text": "its answer cannot be read: a route that cannot be read",
    "forgets": "it takes the registration, but does not have it afterwards",
}


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("mood", BAD)
def test_a_bad_name_server_hinders_nobody(
    mood: str,
    server: NameServer,
    ports: Ports,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line in the log, however often it is tried; the other name server is told all."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(name_servers, "ANSWER_S", 0.3)
    good = NameServer()
    config = config_at(tmp_path / "store", ports, server.address, good.address)
    server.mood = mood
    try:
        with running(Node(config, lambda: None)) as node:
            wait_until(lambda: problems(node), LIMIT_S, "no problem is seen")
            tried = server.tries
            wait_until(lambda: server.tries >= tried + 3, LIMIT_S, "not tried again")
            node.backend.put_encoded([record("Orders")])
            wait_until(lambda: good.topic("Orders"), LIMIT_S, "the good one does not hear of it")
            assert problems(node) == [of(server, node)["problem"]]
            assert BAD[mood] in problems(node)[0] and len(problems(node)[0]) < 500
            assert "\n" not in problems(node)[0]
            assert of(server, node)["brokers"] == [] and of(good, node)["brokers"] == ["g0:0"]
            assert len(lines(caplog)) == 1, lines(caplog)

            server.mood = "good"
            wait_until(lambda: server.topic("Orders"), LIMIT_S, "it is not told once it is well")
            wait_until(lambda: not problems(node), LIMIT_S, "the problem stays")
            assert len(lines(caplog)) == 2, lines(caplog)
            server.mood = mood
            server.remove("g0", 0)
            wait_until(lambda: problems(node), LIMIT_S, "no problem is seen")
            began = time.monotonic()
        assert time.monotonic() - began < name_servers.STOP_S + 20, "the end does not hang"
        assert len(lines(caplog)) == 2, "what comes and goes is not logged each time"
    finally:
        good.stop()


@pytest.mark.usefixtures("soon")
def test_nobody_answers(
    ports: Ports, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    address = f"127.0.0.1:{ports.take()}"
    config = config_at(tmp_path / "store", ports, address)
    with running(Node(config, lambda: None)) as node:
        wait_until(lambda: problems(node), LIMIT_S, "no problem is seen")
        assert "Connection refused" in problems(node)[0]
        server = NameServer(int(address.rpartition(":")[2]))
        try:
            wait_until(lambda: server.holders("g0"), LIMIT_S, "not registered")
        finally:
            server.stop()
    assert len([one for one in lines(caplog) if "does not answer" in one]) == 1


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("address", "cluster", "text"),
    [
        ("10.0.0.9:10911", "test", 'broker g0 (id 0) is "10.0.0.9:10911" in cluster "test" there'),
        ("10.0.0.9:10911", "else", 'broker g0 (id 0) is "10.0.0.9:10911" in cluster "else" there'),
        (None, "else", 'it knows broker g0 as one of cluster "else", not of test'),
    ],
)
def test_a_name_that_another_broker_has_is_not_taken(
    address: str | None,
    cluster: str,
    text: str,
    server: NameServer,
    ports: Ports,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who came first keeps it; once it is free, the node is registered."""
    caplog.set_level(logging.WARNING)
    config = config_at(tmp_path / "store", ports, server.address)
    server.put_foreign("g0", 0, address or own(config), cluster)
    before = server.holders("g0")
    with running(Node(config, lambda: None)) as node:
        wait_until(lambda: problems(node), LIMIT_S, "no problem is seen")
        tried = server.tries
        wait_until(lambda: server.tries >= tried + 3, LIMIT_S, "not tried again")
        assert text in problems(node)[0]
        assert server.holders("g0") == before and not server.seen[REGISTER]
        assert len(lines(caplog)) == 1, lines(caplog)
        server.remove("g0", 0)
        wait_until(lambda: server.holders("g0") == {"0": own(config)}, LIMIT_S, "not registered")


@pytest.mark.usefixtures("soon")
def test_two_groups_that_begin_at_once_with_one_name(
    server: NameServer, ports: Ports, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them has it in the end; the other one says so, and clients are led to one only."""
    caplog.set_level(logging.WARNING)
    configs = [config_at(tmp_path / name, ports, server.address) for name in ("a", "b")]
    with contextlib.ExitStack() as ends:
        nodes = [ends.enter_context(running(Node(one, lambda: None))) for one in configs]

        def settled() -> bool:
            return sorted(bool(problems(node)) for node in nodes) == [False, True]

        wait_until(settled, LIMIT_S, lambda: f"{[problems(node) for node in nodes]}")
        winner = next(n for n, node in enumerate(nodes) if not problems(node))
        alone = {"0": own(configs[winner])}  # what the other one said before, it takes back
        wait_until(
            lambda: server.holders("g0") == alone, LIMIT_S, lambda: str(server.holders("g0"))
        )
        tried = server.tries
        wait_until(lambda: server.tries >= tried + 10, LIMIT_S, "nothing is asked any more")
        assert settled() and server.holders("g0") == alone
        assert all("broker g0 (id 0) is" in one for one in lines(caplog))
        assert 1 <= len(lines(caplog)) <= 3, lines(caplog)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[127.0.0.1]", "'127.0.0.1' is not an address; write HOST:PORT of each server"),
        ("[a..b:9876]", "'a..b:9876' is not an address; write HOST:PORT of each server"),
        ("[127.0.0.1:0]", "is not an address"),
        ("['127.0.0.1:10911']", "127.0.0.1:10911 is nodes.1.api"),
        ("[ns:9876, NS:9876]", "NS:9876 is listed twice"),
        ("{a: b}", "is neither a list nor a text"),
        (f"[{', '.join(f'ns{n}:9876' for n in range(17))}]", "17 servers; name 16 at most"),
    ],
)
def test_the_key_is_checked(value: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        parse_config(PAIR + f"remoting: {{name_servers: {value}}}\n", "n.yaml")
    assert "remoting.name_servers" in str(caught.value)


def test_the_key_needs_the_door() -> None:
    remoting = "remoting: {enabled: false, name_servers: [ns:9876]}\n"
    with pytest.raises(ConfigError, match="does not serve RocketMQ's clients; set remoting.en"):
        parse_config(PAIR + remoting, "n.yaml")


@pytest.mark.parametrize("value", ["[a:1, 'b:2']", "a:1;b:2", "'a:1, b:2'"])
def test_the_key_is_a_list_or_a_text(value: str) -> None:
    config = parse_config(PAIR + f"remoting: {{name_servers: {value}}}\n", "n.yaml")
    assert config.remoting.name_servers == ("a:1", "b:2")
    assert parse_config(PAIR, "n.yaml").remoting.name_servers == ()
