"""Producers know how many queues a topic has, also if the map has no room for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from hastore import Admin, OutgoingMessage, Producer, SendResult, aio
from hastore.client.connections import cluster
from hastore.client.producer import send_core
from hastore.client.producer.preparer import RecordEncoder
from hastore.client.producer.repeatable_sender import RepeatableSender
from hastore.errors import NotStoredError
from hastore.protocol import api
from hastore.record.codec import NO_HOST
from hastore.server.api import queries
from hastore.server.api.backend import ApiBackend
from hastore.server.api.server import ApiServer
from hastore.store.append import topic_table
from tests.client.conftest import Node, introduce

KEYS = [f"k{number}" for number in range(64)]


@pytest.fixture(autouse=True)
def room_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert topic_table.MAX_OTHER == api.MAP_TOPICS, "the client knows when a map is full"
    monkeypatch.setattr(topic_table, "MAX_OTHER", 1)
    monkeypatch.setattr(cluster, "MAP_TOPICS", 1)


@pytest.fixture
def full(make_node: Callable[..., Node]) -> Node:
    """A node whose map lists the topic `a` only."""
    node = make_node()
    with Admin([node.address]) as admin:
        for name, queues in (("a", 2), ("one", 1), ("many", 64)):
            admin.create_topic(name, queues=queues)
    assert node.backend.master_map().queues == {"a": 2}
    return node


def queues_in(results: list[SendResult]) -> int:
    assert all(one.status == "PUT_OK" for one in results)
    return max(one.queue_id for one in results) + 1


COUNTS = [("a", 2), ("one", 1), ("many", 64), ("new", 4)]


@pytest.mark.parametrize(("topic", "most"), COUNTS)
def test_a_producer_asks_for_the_queues_of_a_topic_that_the_map_has_no_room_for(
    full: Node, topic: str, most: int
) -> None:
    with Producer([full.address]) as producer:
        found = queues_in([producer.send_sync(topic, b"x", key=key) for key in KEYS])
        assert found <= most and found > min(most, 32) // 2
        (batch,) = producer.send_batch(topic, [b"y"]).result(60)
        assert batch.queue_id < most


@pytest.mark.parametrize(("topic", "most"), COUNTS)
def test_so_does_an_asyncio_producer(full: Node, topic: str, most: int) -> None:
    async def main() -> list[SendResult]:
        async with aio.Producer([full.address]) as producer:
            return await asyncio.gather(*(producer.send(topic, b"x", key=key) for key in KEYS))

    found = queues_in(asyncio.run(main()))
    assert found <= most and found > min(most, 32) // 2


def test_so_does_a_sender_that_is_repeated(full: Node) -> None:
    sender = RepeatableSender((full.address,), "pid")
    try:
        sender.reach(60.0)
        assert [sender.queues_of(topic) for topic, _ in COUNTS] == [most for _, most in COUNTS]
    finally:
        sender.close()


def test_a_repeated_sender_that_asks_has_records_under_way(
    full: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question took the core's answers: each put before it stood still for 4 s."""
    monkeypatch.setattr(send_core, "QUEUES_MS", 50.0)
    busy = ["BUSY", "BUSY"]
    answer = queries._configs

    def busy_at_first(backend: ApiBackend, request: api.AskConfigs) -> api.Reply:
        if busy:
            return api.Failed(request.rid, busy.pop(), "later")
        return answer(backend, request)

    monkeypatch.setattr(queries, "_configs", busy_at_first)
    sender = RepeatableSender((full.address,), "pid")
    encoder = RecordEncoder("pid", NO_HOST)
    try:
        sender.reach(60.0)
        sender.begin(0)
        sender.put("a", encoder.encode("a", b"x", 0, [], 0, 1), 0, 1)
        frames = [*sender._core._frames.values()]
        assert sender.queues_of("one") == 1
        sender._drive(lambda: all(entry.settled for one in frames for entry in one.entries))
        assert not any(entry.unknown for one in frames for entry in one.entries)
        sender.finish()
    finally:
        sender.close()


def from_callback(full: Node, send: Callable[[Producer], Any]) -> Any:
    """Return what `send` returns in a Future's callback, in the producer's thread."""
    found: Future[Any] = Future()
    full.stop()
    with Producer([full.address]) as producer:
        first = producer.send("a", b"x", queue=0)
        first.add_done_callback(lambda _: found.set_result(send(producer)))
        full.restart()
        return found.result(60), send(producer)


@pytest.mark.parametrize(("topic", "most"), COUNTS)
def test_what_a_callback_sends_waits_in_the_producer(full: Node, topic: str, most: int) -> None:
    """The callback itself must not wait; each key has one queue, there as elsewhere."""

    def send(producer: Producer) -> list[Future[SendResult]]:
        return [producer.send(topic, b"x", key=key) for key in KEYS]

    for one, other in zip(*from_callback(full, send), strict=True):
        assert one.result(60).queue_id == other.result(60).queue_id < most


@pytest.mark.parametrize(("topic", "most"), COUNTS)
def test_so_does_a_batch_that_a_callback_sends(full: Node, topic: str, most: int) -> None:
    """Its messages with a queue of their own keep it."""

    def send(producer: Producer) -> Future[list[SendResult]]:
        return producer.send_batch(
            topic, [OutgoingMessage(b"x", queue=0), *(OutgoingMessage(b"x", key=k) for k in KEYS)]
        )

    one, other = ([each.queue_id for each in sent.result(60)] for sent in from_callback(full, send))
    assert one == other and not one[0] and max(one) < most


def test_what_waits_for_the_number_of_queues_wakes_nobody(
    full: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread looked 1000 times a second whether the master had answered."""
    wakes: list[float] = []
    run_once, dispatch = send_core.SendCore.run_once, ApiServer._dispatch

    def count(self: send_core.SendCore, now: float) -> None:
        wakes.append(now)
        run_once(self, now)

    def silent(self: ApiServer, connection: Any, request: Any) -> None:
        if not isinstance(request, api.AskConfigs):
            dispatch(self, connection, request)

    monkeypatch.setattr(ApiServer, "_dispatch", silent)
    found: Future[Any] = Future()
    full.stop()
    with Producer([full.address], delivery_timeout_s=3) as producer:
        first = producer.send("a", b"x", queue=0)
        first.add_done_callback(lambda _: found.set_result(producer.send("one", b"x")))
        full.restart()
        waits = found.result(60)
        monkeypatch.setattr(send_core.SendCore, "run_once", count)
        assert not producer.flush(0.1)
        with pytest.raises(NotStoredError, match="did not answer in time"):
            waits.result(60)
    assert len(wakes) < 200


def test_a_topic_that_loses_its_place_in_the_map_keeps_its_queues(
    make_node: Callable[..., Node],
) -> None:
    """What was not sent yet went to the queues below the default number, and its key with it."""
    node = make_node()
    with Admin([node.address]) as admin:
        admin.create_topic("many", queues=64)
        with Producer([node.address]) as producer:
            first = [producer.send_sync("many", b"x", key=key).queue_id for key in KEYS]
            assert max(first) > 32
            admin.create_topic("a", queues=2)
            node.stop()
            later = [producer.send("many", b"x", key=key) for key in KEYS]
            node.restart()
            assert [one.result(60).queue_id for one in later] == first
            assert [producer.send_sync("many", b"x", key=key).queue_id for key in KEYS] == first


def test_a_question_that_a_master_does_not_answer_goes_to_the_next_one(
    make_node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_core, "QUEUES_MS", 50.0)
    old, new = make_node(1), make_node(2, epoch=131_074)
    for node in (old, new):
        with Admin([node.address]) as admin:
            for name, queues in (("a", 2), ("one", 1)):
                admin.create_topic(name, queues=queues)
    new.backend.writable = False
    introduce(old, new)
    dispatch = ApiServer._dispatch

    def one_is_silent(self: ApiServer, connection: Any, request: Any) -> None:
        if self is old.server and isinstance(request, api.AskConfigs):
            new.backend.writable = True
        else:
            dispatch(self, connection, request)

    with Producer([old.address, new.address]) as producer:
        producer.send_sync("a", b"x")
        monkeypatch.setattr(ApiServer, "_dispatch", one_is_silent)
        assert producer.send_sync("one", b"x").epoch == 131_074


def test_another_master_and_a_lost_question_are_asked_again(
    full: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_core, "QUEUES_MS", 50.0)
    with Producer([full.address]) as producer:
        assert producer.send_sync("many", b"x", key="k3").queue_id > 3
        with Admin([full.address]) as admin:
            admin.set_topic("many", queues=64, write_queues=1)
        full.stop()
        full.restart()
        assert {producer.send_sync("many", b"x", key=key).queue_id for key in KEYS} == {0}
