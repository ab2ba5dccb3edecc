"""A consumer of its own: pause and resume, the ends of its queues and what is left in them."""

from __future__ import annotations

import asyncio

import pytest

from hastore import Consumer, Position, Producer, aio
from hastore.errors import UsageError
from tests.client.conftest import Node


def fill(node: Node, count: int) -> None:
    with Producer([node.address]) as producer:
        for number in range(count):
            producer.send("t", b"%d" % (number % 4), queue=number % 4)
        assert producer.flush(60)


def take(consumer: Consumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [message.body for message in consumer.poll(count - len(found), 60.0)]
    return found


def test_paused_queues_give_nothing_and_keep_their_positions(node: Node) -> None:
    fill(node, 40)
    with Consumer("t", [node.address], timeout_s=60.0) as consumer:
        take(consumer, 4)
        before = consumer.positions()
        consumer.pause([1, 3])
        assert consumer.paused == [1, 3]
        assert consumer.positions() == before
        rest = sum(10 - before[queue].queue_offset for queue in (0, 2))
        assert set(take(consumer, rest)) == {b"0", b"2"}
        assert consumer.poll(timeout_s=0.1) == []
        consumer.resume([3])
        assert set(take(consumer, 10 - before[3].queue_offset)) == {b"3"}
        consumer.resume()
        assert consumer.paused == []
        assert set(take(consumer, 10 - before[1].queue_offset)) == {b"1"}
        assert consumer.lag() == dict.fromkeys(range(4), 0)
        with pytest.raises(UsageError, match="does not read queue 9"):
            consumer.pause([1, 9])
        assert consumer.paused == [], "a refused call leaves all as they are"


def test_a_pause_in_a_loop_counts_at_once(node: Node) -> None:
    fill(node, 40)
    with Consumer("t", [node.address], timeout_s=60.0) as consumer:
        seen = []
        for message in consumer:
            seen.append(message.queue_id)
            if len(seen) == 1:
                consumer.pause([message.queue_id])
            if len(seen) == 31:
                break
        assert seen.count(seen[0]) == 1, "none of those that were fetched before"


def test_ends_and_lag_are_those_of_the_master(pair: tuple[Node, Node]) -> None:
    master, _ = pair
    fill(master, 40)
    addresses = [node.address for node in pair]
    with Consumer("t", addresses, queues=[0, 2], timeout_s=60.0) as consumer:
        assert consumer.end_offsets() == {0: 10, 2: 10}
        assert consumer.lag() == {0: 10, 2: 10}
        consumer.seek(0, Position(7))
        assert consumer.lag() == {0: 3, 2: 10}
        fill(master, 4)
        assert consumer.lag() == {0: 4, 2: 11}
        consumer.seek(2, 500)
        assert consumer.lag() == {0: 4, 2: 0}


def test_the_same_for_asyncio(node: Node) -> None:
    fill(node, 8)

    async def main() -> None:
        async with aio.Consumer("t", [node.address], timeout_s=60.0) as consumer:
            await consumer.pause()
            assert consumer.paused == [0, 1, 2, 3]
            assert await consumer.poll(timeout_s=0.1) == []
            await consumer.resume([2])
            assert {one.body for one in await consumer.poll(timeout_s=60.0)} == {b"2"}
            assert await consumer.lag() == {0: 2, 1: 2, 2: 0, 3: 2}
            assert await consumer.end_offsets() == dict.fromkeys(range(4), 2)

    asyncio.run(main())
