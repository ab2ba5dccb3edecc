"""Groups of RocketMQ's push consumers, in JVMs of their own, on a pair of hastore nodes.

The consumers look for a new share of the queues by themselves only every ten minutes here: what
happens sooner, happens because a node told them. Orderly ones of 4.9.8 look every 20 s.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from hastore import Consumer, Producer, SharedConsumer
from hastore.client.consumer.positions_client import Positions
from hastore.dead_letters import DeadLetter, read_dead_letters, resend_dead_letters
from hastore.protocol.remoting import Code
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq_clients import Clients, HastoreSite
from tests.interop.rocketmq_scenes import bodies, on, ready
from tests.process.harness import Group, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = [pytest.mark.full, pytest.mark.slow("starts and kills JVMs")]
# Within the limits nothing happens by itself: no search for a new share, no heartbeat.
NEVER_BY_ITSELF = ["-Drocketmq.client.rebalance.waitInterval=600000"]
NO_HEARTBEAT = {"heartbeat_ms": 600_000}
HEARTBEATS_2 = ["-Dcom.rocketmq.heartbeat.v2=true"]
LIMIT_S = 100.0  # a node forgets a silent client after 120 s
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HastoreSite]:
    with Group(tmp_path_factory.mktemp("groups")) as group:
        yield HastoreSite(group.start(), "pair")


@pytest.fixture(params=["5.3.3", "5.3.3, heartbeats of version 2", "4.9.8"])
def new_jvm(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> Iterator[Callable[..., Clients]]:
    program = command(CLIENTS_4 if request.param == "4.9.8" else CLIENTS_5)
    options = HEARTBEATS_2 if "heartbeats" in request.param else []
    with contextlib.ExitStack() as ends:

        def make(*, orderly: bool = False) -> Clients:
            # An orderly consumer of 4.9.8 that finds a queue still locked by its former owner asks
            # again only when it looks by itself, every 20 s; one of 5 asks after a second.
            looks = orderly and request.param == "4.9.8"
            every = options if looks else [*NEVER_BY_ITSELF, *options]
            jvm = Clients(program, tmp_path, f"groups-{next(_numbers)}", every)
            ends.callback(jvm.kill)
            return jvm

        yield make


class Admin:
    """Asks a node what its consumers do, as mqadmin does."""

    def __init__(self, site: HastoreSite, group: str) -> None:
        self.client = RemotingClient(site.master)
        self.group = group

    def ids(self) -> list[str]:
        """Return the client ids of the group."""
        fields = {"consumerGroup": self.group}
        answer = self.client.ask(Code.GET_CONSUMER_LIST_BY_GROUP, fields)
        return list(json.loads(answer.body)["consumerIdList"]) if answer.code == 0 else []

    def shares(self, topic: str) -> dict[str, list[int]]:
        """Return the queues of a topic that each consumer has now."""
        found = {}
        for client_id in self.ids():
            fields = {"consumerGroup": self.group, "clientId": client_id, "jstackEnable": "false"}
            answer = self.client.ask(Code.GET_CONSUMER_RUNNING_INFO, fields)
            if answer.code == 0:
                text = answer.body.decode()
                found[client_id] = [
                    queue for queue in range(4)
                    if any(each in text for each in keys_of(topic, queue))
                ]  # fmt: skip
        return found

    def wait_shares(self, topic: str, *sizes: int) -> float:
        """Wait until the consumers have so many queues each, all once; return the seconds."""
        begun = time.monotonic()

        def right() -> bool:
            found = self.shares(topic)
            held = Counter(queue for queues in found.values() for queue in queues)
            return sorted(map(len, found.values())) == sorted(sizes) and set(held.values()) == {1}

        wait_until(right, LIMIT_S, lambda: f"{sizes}: {self.shares(topic)}")
        return time.monotonic() - begun


@pytest.fixture
def new_admin() -> Iterator[Callable[[HastoreSite, str], Admin]]:
    with contextlib.ExitStack() as ends:

        def make(site: HastoreSite, group: str) -> Admin:
            admin = Admin(site, group)
            ends.callback(admin.client.close)
            return admin

        yield make


def keys_of(topic: str, queue: int) -> tuple[str, ...]:
    """Return how fastjson may write a queue as the key of a map."""
    return (
        f'{{"brokerName":"g0","queueId":{queue},"topic":"{topic}"}}:',
        f'{{"topic":"{topic}","brokerName":"g0","queueId":{queue}}}:',
    )


def send(jvm: Clients, producer: str, topic: str, first: int, count: int) -> None:
    for number in range(first, first + count):
        message = {"topic": topic, "body": f"m{number}"}
        (sent,) = jvm.send(producer, [message], "queue", **on(("g0", number % 4), topic))
        assert sent["status"] == "SEND_OK", sent


@pytest.mark.parametrize("orderly", [False, True])
def test_consumers_share_the_queues_as_soon_as_one_comes_or_goes(
    site: HastoreSite,
    new_jvm: Callable[..., Clients],
    new_admin: Callable[[HastoreSite, str], Admin],
    orderly: bool,
) -> None:
    one, two = new_jvm(orderly=orderly), new_jvm(orderly=orderly)
    topic, group = one.unique("Shared").replace(".", "_"), one.unique("shared").replace(".", "_")
    producer = one.producer(site)
    ready(one, producer, topic)
    admin = new_admin(site, group)
    first = one.push(site, group, topic, orderly=orderly, **NO_HEARTBEAT)
    times = {"one starts": admin.wait_shares(topic, 4)}
    send(one, producer, topic, 0, 20)
    second = two.push(site, group, topic, orderly=orderly, **NO_HEARTBEAT)
    times["another starts"] = admin.wait_shares(topic, 2, 2)
    send(one, producer, topic, 20, 20)
    one.call("push.stop", name=first) if orderly else two.call("push.stop", name=second)
    times["one stops"] = admin.wait_shares(topic, 4)
    send(one, producer, topic, 40, 20)
    left, jvm = (second, two) if orderly else (first, one)
    if not orderly:
        again = two.push(site, group, topic, **NO_HEARTBEAT)
        admin.wait_shares(topic, 2, 2)
        two.kill()
        times["one is killed"] = admin.wait_shares(topic, 4)
        assert again
    send(one, producer, topic, 60, 20)
    wait_until(
        lambda: "m79" in bodies(jvm.received(left, 0)), LIMIT_S,
        lambda: str(bodies(jvm.received(left, 0))),
    )  # fmt: skip
    print({what: f"{seconds:.2f} s" for what, seconds in times.items()})


def test_positions_are_those_of_hastore_and_are_moved_by_mqadmin(
    site: HastoreSite,
    new_jvm: Callable[[], Clients],
    new_admin: Callable[[HastoreSite, str], Admin],
) -> None:
    jvm = new_jvm()
    topic, group = jvm.unique("Moved").replace(".", "_"), jvm.unique("moved").replace(".", "_")
    producer = jvm.producer(site)
    ready(jvm, producer, topic)
    with Consumer(topic, site.group.bootstrap) as reader:  # Java's producer may have tried twice
        total = 40 + sum(reader.end_offsets().values())
    consumer = jvm.push(site, group, topic)
    send(jvm, producer, topic, 0, 40)
    jvm.received(consumer, total)

    def committed() -> dict[int, int]:
        with Positions(site.group.bootstrap) as positions:
            found = positions.committed(group, topic)
        return {queue: place.queue_offset for queue, place in found.items()}

    wait_until(lambda: sum(committed().values()) >= total, LIMIT_S, lambda: str(committed()))
    assert sum(committed().values()) == total, "10 messages a queue, and the first one"
    admin = new_admin(site, group)
    asked = {"topic": topic, "group": group, "timestamp": "0", "isForce": "true"}
    answer = admin.client.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, asked)
    assert answer.code == 0, answer.remark
    found = jvm.received(consumer, 2 * total)
    assert len(found) == 2 * total
    assert all(count % 2 == 0 for count in Counter(bodies(found)).values()), "each of them twice"
    wait_until(lambda: sum(committed().values()) >= total, LIMIT_S, lambda: str(committed()))
    answer = admin.client.ask(
        Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": topic, "group": group}
    )
    assert answer.code == 0 and answer.body.count(b'"queueId"') == 4, answer.body
    jvm.call("push.stop", name=consumer)
    wait_until(lambda: not admin.ids(), LIMIT_S, "it has stopped")
    answer = admin.client.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, asked)
    assert answer.code == 0 and set(committed().values()) == {0}
    consumer = jvm.push(site, group, topic)
    found = jvm.received(consumer, total)
    assert len(found) == total and len(set(bodies(found))) == 41


def test_members_are_known_to_a_new_master_at_once(
    tmp_path: pathlib.Path,
    new_jvm: Callable[[], Clients],
    new_admin: Callable[[HastoreSite, str], Admin],
) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    with Group(folder, count=3) as nodes:
        site = HastoreSite(nodes.start(), "three")
        jvm = new_jvm()
        topic, group = jvm.unique("New").replace(".", "_"), jvm.unique("new").replace(".", "_")
        producer = jvm.producer(site)
        ready(jvm, producer, topic)
        jvm.push(site, group, topic)
        jvm.push(site, group, topic)
        admin = new_admin(site, group)
        admin.wait_shares(topic, 2, 2)
        ids = admin.ids()
        nodes[1].kill()
        nodes[1].edit_role("SLAVE")
        nodes[2].edit_role("SYNC_MASTER")
        assert site.writable(1).number == 2
        admin = new_admin(site, group)
        assert admin.ids() == ids, "no heartbeat came since"
        admin.wait_shares(topic, 2, 2)


def test_what_a_python_member_sends_back_comes_to_a_java_member(
    site: HastoreSite, make_jvm: Callable[..., Clients]
) -> None:
    """With its own topic and id, and counted: the copy is what RocketMQ's broker would write.

    So does a dead letter that is sent again to the group; its attempts count anew.
    """
    with (
        Producer(site.group.bootstrap) as producer,
        Consumer("Again", site.group.bootstrap, group="mixed", share=True) as member,
    ):
        assert isinstance(member, SharedConsumer)
        producer.send_sync("Again", b"poison", key="k", tags="red", properties={"n": "1"})
        while not (found := member.poll(timeout_s=LIMIT_S)):
            pass
        member.send_back(found[0], 1, max_attempts=5)
        producer.send_sync("Again", b"given up", key="d")
        while not (second := [one for one in member.poll(timeout_s=LIMIT_S) if one.key == "d"]):
            pass
        member.send_back(second[0], dead_letter=True)
        member.commit()
    letters: list[DeadLetter] = []
    while not letters:  # until replay has come to it
        letters = list(read_dead_letters("mixed", site.group.bootstrap))
    (resent,) = resend_dead_letters(letters, site.group.bootstrap, to="group")
    assert resent.result is not None
    jvm = make_jvm("mixed", "5.3.3")
    both = jvm.received(jvm.push(site, "mixed", "Again"), 2)
    got, again = sorted(both, key=lambda one: one["body"], reverse=True)
    assert (again["body"], again["reconsume"], again["topic"]) == ("given up", 0, "Again")
    assert (again["keys"], again["properties"]["RESENT_FROM"]) == ("d", letters[0].name)
    assert (got["body"], got["reconsume"], got["topic"]) == ("poison", 1, "Again")
    assert (got["keys"], got["tags"], got["properties"]["n"]) == ("k", "red", "1")
    assert got["properties"]["ORIGIN_MESSAGE_ID"] == found[0].message_id
