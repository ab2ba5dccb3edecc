"""A Producer over all groups of a cluster, without ZooKeeper: a group that moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from hastore import Producer
from hastore.client.producer import cluster_producer
from hastore.errors import (
    ClientError,
    NotAuthenticatedError,
    NotStoredError,
    UnreachableError,
)
from tests.client.conftest import Node

LIMIT_S = 120.0


class Seen(NamedTuple):
    addresses: tuple[str, ...]


class Groups:
    """What ZooKeeper would say of a cluster's groups."""

    problem = "it is not there"

    def __init__(self) -> None:
        self.groups: dict[str, Seen] = {}
        self.topics: dict[str, list[str]] = {}  # of those that not all groups have

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        pass

    def wait_heard(self, timeout_s: float) -> None:
        pass

    def with_topic(self, topic: str) -> list[str]:
        return self.topics.get(topic) or sorted(self.groups)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    """The groups that each producer of a cluster finds."""
    one = Groups()
    monkeypatch.setattr(cluster_producer, "ClusterGroups", lambda *_given: one)
    return one


@pytest.mark.parametrize("keeps_one", [False, True])
def test_a_groups_producer_follows_it_to_other_addresses(
    make_node: Callable[..., Node], groups: Groups, keeps_one: bool
) -> None:
    """Also who has it from `group` and asks for no other one."""
    before, after = make_node(1), make_node(2)
    gone = ("tcp://127.0.0.1:9",) if keeps_one else ()
    groups.groups = {"a": Seen((before.address, *gone))}
    producer: Any = Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S)
    with producer:
        own = producer.group("a")
        assert own.send_sync("t", b"1", queue=0).status == "PUT_OK"
        before.stop()
        last = own.send("t", b"2", queue=0)
        groups.groups = {"a": Seen((*gone, after.address))}
        assert last.result(LIMIT_S).status == "PUT_OK"
        assert own.send_sync("t", b"3").status == "PUT_OK" and own.master == after.address
        assert producer.group("a") is own
        assert producer.send("t", b"4").result(LIMIT_S).status == "PUT_OK"
        while before.address in own._driver.core.cluster.addresses:
            groups.groups = {"a": Seen((*gone, after.address))}  # as ZooKeeper is read again
            assert own.send_sync("t", b"again").status == "PUT_OK"
        groups.groups = {}
        assert own.send_sync("t", b"5").status == "PUT_OK", "without ZooKeeper all stays"


def test_callbacks_of_two_groups_do_not_wait_for_each_others_room(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    """Each runs in the thread that the other one's messages need."""
    nodes = {"a": make_node(1), "b": make_node(2)}
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    both, all_done, said = threading.Barrier(2), threading.Barrier(3), []
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S, max_in_flight=1) as producer:

        def go_on(other: str) -> None:
            both.wait(LIMIT_S)  # its own answer has come, and makes room
            producer.group(other).send("t", b"fills the room", queue=0)
            both.wait(LIMIT_S)
            try:
                producer.group(other).send("t", b"has to wait", queue=0)
            except ClientError as refused:
                said.append(str(refused))
            all_done.wait(LIMIT_S)

        for node in nodes.values():  # no answer before its callback: that would run in this thread
            node.backend.writable = False
        for name, other in (("a", "b"), ("b", "a")):
            first = producer.group(name).send("t", b"1", queue=0)
            first.add_done_callback(lambda _, other=other: go_on(other))  # type: ignore[misc]
        for node in nodes.values():
            node.backend.writable = True
        all_done.wait(LIMIT_S / 2)
    assert len(said) == 2 and all("must not wait" in each for each in said)


def test_a_groups_callback_does_not_wait_for_the_master_of_another_group(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    """The other one's callback may wait for this group's in turn."""
    served, lost = make_node(1, writable=False), make_node(2, writable=False)
    groups.groups = {"a": Seen((served.address,)), "b": Seen((lost.address,))}
    done, said = threading.Event(), []
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S) as producer:

        def go_on(_: Any) -> None:
            try:
                producer.group("b").send("t", b"of which queue?")
            except ClientError as refused:
                said.append(str(refused))
            done.set()

        first = producer.group("a").send("t", b"1", queue=0)
        first.add_done_callback(go_on)
        served.backend.writable = True
        is_done = done.wait(LIMIT_S / 2)
        lost.backend.writable = True  # else its end waits for the callback
        assert done.wait(LIMIT_S)
    assert is_done and len(said) == 1 and "must not wait" in said[0]


@pytest.fixture
def failing(
    make_node: Callable[..., Node], groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, str, Node]]:
    """A producer of two groups, a key of the group "a", and its node, which has begun to refuse."""
    monkeypatch.setattr(cluster_producer, "LEAVE_MS", 50.0)
    nodes = {"a": make_node(1), "b": make_node(2)}
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    groups.topics = {"of-a": ["a"]}
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S) as producer:
        for name in nodes:
            assert producer.group(name).send_sync("t", b"0").status == "PUT_OK"
        made: Any = producer
        key = next(str(n) for n in range(99) if made._order("t", str(n), 0)[0] == "a")
        nodes["a"].backend.writable = False
        yield producer, key, nodes["a"]
        nodes["a"].backend.writable = True  # else its end waits for what only that group may have


def test_a_message_that_no_other_group_has_a_place_for_holds_up_no_other_one(
    failing: tuple[Any, str, Node],
) -> None:
    """All that has left a group waited for the first of them, until each was too late."""
    producer, key, a = failing
    stuck = producer.send("of-a", b"1")
    moved = producer.send("t", b"2", key=key)
    assert moved.result(LIMIT_S / 2).status == "PUT_OK" and not stuck.done()
    a.backend.writable = True
    assert stuck.result(LIMIT_S / 2).status == "PUT_OK"


def test_a_group_that_changed_its_master_while_nothing_was_sent_to_it_is_used_again(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    """Its producer asked no node any more: after a failover of each group no message was taken."""
    master, slave = make_node(1), make_node(2, writable=False)
    groups.groups = {"a": Seen((master.address, slave.address))}
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S) as producer:
        own: Any = producer.group("a")
        assert own.send_sync("t", b"1").status == "PUT_OK"
        while slave.address not in own._driver.core.cluster.maps:
            time.sleep(0.005)
        master.stop()
        while own.master is not None:
            time.sleep(0.005)
        slave.backend.writable = True  # by its promotion
        slave.backend.entries = [(131074, 0)]
        assert producer.send("t", b"2").result(LIMIT_S / 2).status == "PUT_OK"
        assert own.master == slave.address


def test_who_waits_for_room_in_a_group_that_fails_goes_to_another_one(
    make_node: Callable[..., Node], groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is under way stays there as unknown, and takes the room: the sender waited for it."""
    monkeypatch.setattr(cluster_producer, "LEAVE_MS", 50.0)
    nodes = {"a": make_node(1), "b": make_node(2)}
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S, max_in_flight=1) as producer:
        for name in nodes:
            assert producer.group(name).send_sync("t", b"0").status == "PUT_OK"
        made: Any = producer
        key = next(str(n) for n in range(99) if made._order("t", str(n), 0)[0] == "a")
        nodes["a"].backend.transfer.hold = True  # it stores, and does not answer
        under_way = producer.send("t", b"1", key=key)
        while nodes["a"].backend.store.appends < 2:
            time.sleep(0.005)
        nodes["a"].stop()
        moved = producer.send("t", b"2", key=key)
        assert moved.result(LIMIT_S / 2).status == "PUT_OK" and not under_way.done()
        nodes["a"].backend.transfer.hold = False
        nodes["a"].restart()
        assert under_way.result(LIMIT_S / 2).status == "PUT_OK"


def test_what_moves_to_another_group_keeps_the_order_of_its_key(
    failing: tuple[Any, str, Node],
) -> None:
    producer, key, a = failing
    sent = [producer.send("of-a", b"%d" % n, key=key) for n in range(5)]
    a.backend.writable = True
    places = [each.result(LIMIT_S).queue_offset for each in sent]
    assert places == sorted(places)


def test_what_each_group_refuses_for_good_ends_at_once(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    """It went from group to group as fast as they answered, for the whole delivery timeout."""
    nodes = {"a": make_node(1), "b": make_node(2)}
    groups.groups = {name: Seen((node.address,)) for name, node in nodes.items()}
    for node in nodes.values():
        node.backend.unconfirmable = "0 of 1 in sync"
        node.backend.unflushable = "set ha.ack_point: flushed on the slaves"
    made: Any = Producer("zk://127.0.0.1:1/shop", sync_flush=True, delivery_timeout_s=LIMIT_S)
    with made as producer:
        with pytest.raises(NotStoredError, match="ha.ack_point: flushed") as refused:
            producer.send("t", b"1").result(LIMIT_S / 2)
        assert refused.value.final
        nodes["b"].backend.unconfirmable = nodes["b"].backend.unflushable = None
        key = next(str(n) for n in range(99) if producer._order("t", str(n), 0)[0] == "a")
        assert producer.send("t", b"2", key=key).result(LIMIT_S / 2).status == "PUT_OK"


def test_without_a_thread_to_move_it_a_message_ends_as_not_stored(
    failing: tuple[Any, str, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the exit of Python 3.12. Its Future never ended, nor that of any later one."""
    producer, key, _ = failing

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        first = producer.send("t", b"1", key=key)
        with pytest.raises(NotStoredError, match="can't start new thread"):
            first.result(LIMIT_S / 2)
    second = producer.send("t", b"2", key=key)
    assert second.result(LIMIT_S / 2).status == "PUT_OK"
    assert producer.flush(LIMIT_S)


def test_that_no_group_has_a_master_is_said_with_what_their_nodes_say(
    make_node: Callable[..., Node], groups: Groups
) -> None:
    groups.groups = {"a": Seen((make_node(1, writable=False).address,))}
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=0.5) as producer:
        own: Any = producer.group("a")
        while not own._driver.core.cluster.maps:
            time.sleep(0.005)
        with pytest.raises(UnreachableError, match="group a: tcp://.* of epoch"):
            producer.send("t", b"1")


def test_a_client_that_no_group_accepts_learns_so_at_once(groups: Groups) -> None:
    """It waited for the whole delivery timeout, and was told that no group has a master."""
    nobody = "tcp://127.0.0.1:9"
    groups.groups = {"a": Seen((nobody,))}
    with Producer("zk://127.0.0.1:1/shop", delivery_timeout_s=LIMIT_S) as producer:
        own: Any = producer.group("a")
        own._driver.core.cluster.refusals[nobody] = "there is no identity app"  # as it would say
        with pytest.raises(NotAuthenticatedError, match="group a: .*no identity app"):
            producer.send("t", b"1")
