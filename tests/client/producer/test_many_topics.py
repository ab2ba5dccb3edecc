"""Producers know how many queues a topic has, also if the map has no room for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from hastore import Admin, Producer, SendResult, aio
from hastore.client.connections import cluster
from hastore.client.producer import send_core
from hastore.client.producer.repeatable_sender import RepeatableSender
from hastore.protocol import api
from hastore.store.append import topic_table
from tests.client.conftest import Node

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


def test_a_callback_does_not_wait_for_the_answer(full: Node) -> None:
    """What it sends goes to a queue that is there all the same: it is placed again."""
    ended, sent = threading.Event(), []

    with Producer([full.address]) as producer:

        def go_on(_done: Future[SendResult]) -> None:
            sent.extend(producer.send("one", b"x", key=key) for key in KEYS)
            ended.set()

        producer.send("a", b"x").add_done_callback(go_on)
        assert ended.wait(60)
        assert {one.result(60).queue_id for one in sent} == {0}


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
