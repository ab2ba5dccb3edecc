"""Consumers of one group: each reads everything, and none moves the group back by accident."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hastore import Consumer, Producer, aio, errors
from hastore.client.connections import requester
from hastore.client.consumer import consumer_core
from hastore.client.consumer.positions_client import Positions
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import api
from hastore.protocol.api import Position
from hastore.server.api import server
from tests.client.conftest import Node
from tests.ha.nodes import wait_for


class Interrupted(BaseException):
    """The exception of a signal handler."""


def fill(node: Node, count: int, queue: int = 0, topic: str = "t") -> None:
    with Producer([node.address]) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, queue=queue)
        assert producer.flush(60)


def take(consumer: Consumer, count: int) -> None:
    taken = 0
    while taken < count:
        taken += len(consumer.poll(count - taken, timeout_s=60.0))


def kept(node: Node, group: str = "g") -> dict[int, int]:
    """Return a group's positions without those at the beginning of a queue."""
    with Positions([node.address]) as positions:
        found = positions.committed(group, "t")
    return {queue: place.queue_offset for queue, place in found.items() if place.queue_offset}


def test_the_later_commit_of_a_second_consumer_does_not_move_the_group_back(node: Node) -> None:
    fill(node, 50)
    with (
        Consumer("t", [node.address], group="g") as first,
        Consumer("t", [node.address], group="g") as second,
    ):
        take(first, 40)
        take(second, 10)
        first.commit()
        with pytest.raises(errors.PositionBehindError) as told:
            second.commit()
        assert "group 'g' in topic 't' is at 40 in queue 0, the commit at 10" in str(told.value)
        assert "do not share" in str(told.value)
        assert kept(node) == {0: 40}
        take(second, 35)
        second.commit()
        assert kept(node) == {0: 45}


def test_a_seek_allows_one_commit_to_move_the_group_back(node: Node) -> None:
    fill(node, 50)
    fill(node, 50, queue=1)
    with (
        Consumer("t", [node.address], group="g", queues=[0, 1]) as consumer,
        Consumer("t", [node.address], group="g", queues=[0, 1]) as other,
    ):
        consumer.seek_to_latest()
        consumer.commit()
        consumer.seek(0, 7)
        consumer.commit()
        assert kept(node) == {0: 7, 1: 50}
        other.seek(0, 20)
        other.seek(1, 50)
        other.commit()
        with pytest.raises(errors.PositionBehindError):
            consumer.commit()
        consumer.seek(0, 5)
        other.seek_to_earliest()  # in both queues
        consumer.commit()
        other.commit()
        assert kept(node) == {}
        with pytest.raises(errors.PositionBehindError, match="queue 0.*queue 1"):
            consumer.seek_to_latest()
            consumer.commit()
            other.commit()


def test_an_interrupted_seek_does_not_allow_moving_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node, 50)
    with Consumer("t", [node.address], group="g", queues=[0]) as consumer:
        assert len(consumer.poll(10, timeout_s=60.0)) > 0
        with Positions([node.address]) as positions:
            positions.commit("g", "t", {0: 40})
        leave = consumer._core.end_call

        def interrupt() -> None:
            monkeypatch.setattr(consumer._core, "end_call", leave)
            raise Interrupted

        monkeypatch.setattr(consumer._core, "end_call", interrupt)
        with pytest.raises(Interrupted):
            consumer.seek(0, 5)
        with pytest.raises(errors.PositionBehindError):
            consumer.commit()
        consumer.seek(0, 5)
        consumer.commit()
    assert kept(node) == {0: 5}


def test_what_a_policy_moved_back_may_be_committed(node: Node) -> None:
    """A move by `on_lost` allows it."""
    fill(node, 10)
    with Consumer("t", [node.address], group="g", queues=[0], on_lost="earliest") as consumer:
        consumer.seek(0, 15)
        consumer.commit()
        take(consumer, 5)
        fill(node, 10)  # now the log has the group's position
        consumer.commit()
    assert kept(node) == {0: 5}


def test_positions_move_back_with_allow_back(node: Node) -> None:
    fill(node, 20)
    with Positions([node.address]) as positions:
        positions.commit("g", "t", {0: 12})
        with pytest.raises(errors.PositionBehindError):
            positions.commit("g", "t", {0: 5})
        assert positions.all() == {("g", "t"): {0: 12}}
        positions.commit("g", "t", {0: 5}, allow_back=True)
        assert positions.all() == {("g", "t"): {0: 5}}
        assert positions.committed("g", "t") == {0: Position(5)}


def test_the_same_for_asyncio(node: Node) -> None:
    fill(node, 50)

    async def main() -> None:
        async with (
            aio.Consumer("t", [node.address], group="g", queues=[0]) as first,
            aio.Consumer("t", [node.address], group="g", queues=[0]) as second,
        ):
            assert await second.poll(1, timeout_s=60.0)
            await first.seek_to_latest()
            await first.commit()
            with pytest.raises(errors.PositionBehindError):
                await second.commit()
            await second.seek(0, 3)
            await second.commit()

    asyncio.run(main())
    assert kept(node) == {0: 3}


def test_a_commit_follows_the_group_to_its_new_master(pair: tuple[Node, Node]) -> None:
    """One that waits for the answer of a node that is gone would fail when its time is up."""
    master, slave = pair
    fill(master, 5)
    with Consumer("t", [master.address, slave.address], group="g", timeout_s=20.0) as consumer:
        take(consumer, 5)
        consumer.commit()
        consumer.seek(0, 3)
        master.stop()
        slave.backend.writable, slave.backend.master = True, 2
        slave.backend.entries.append((131073, 0))
        consumer.commit()
    assert kept(slave) == {0: 3}


@pytest.mark.parametrize("answers_maps", [True, False])
def test_a_commit_leaves_a_master_that_does_not_answer(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, answers_maps: bool
) -> None:
    """A process that hangs, or waits for slaves that have left it, keeps its connections."""
    master, slave = pair
    fill(master, 5)
    answer = server.ApiServer._dispatch

    def dispatch(self: Any, connection: Any, request: Any) -> None:
        hangs = self is master.server and slave.backend.writable
        if not hangs or (answers_maps and isinstance(request, api.AskMap)):
            answer(self, connection, request)

    monkeypatch.setattr(server.ApiServer, "_dispatch", dispatch)
    monkeypatch.setattr(requester, "LATE_S", 0.1)
    monkeypatch.setitem(requester.Requester.survey.__kwdefaults__, "patience_s", 0.1)
    # Half of the time would be over before the hung node is given up.
    with Consumer("t", [master.address, slave.address], group="g", timeout_s=600.0) as consumer:
        take(consumer, 5)
        consumer.commit()
        consumer.seek(0, 3)
        slave.backend.writable, slave.backend.master = True, 2
        slave.backend.entries.append((131073, 0))
        consumer.commit()
        assert consumer.committed()[0].queue_offset == 3
        assert consumer.lag()[0] == 2
    assert kept(slave) == {0: 3}


def test_all_queues_of_the_widest_topic_are_committed(node: Node) -> None:
    """In several commits: a node takes one of at most 1,024 queues."""
    fill(node, 5, queue=3)
    wide = list(range(4_096))
    with Consumer("t", [node.address], group="g", queues=wide, timeout_s=60.0) as consumer:
        consumer.seek(3, 5)
        consumer.seek(4_095, 7)  # beyond its end: the group may be there all the same
        consumer.commit()
        assert kept(node) == {3: 5, 4_095: 7}
        assert not consumer._core.fetcher.sought
        assert sorted(consumer.committed()) == wide


def test_an_administrator_moves_all_queues_of_the_widest_topic(node: Node) -> None:
    with Positions([node.address], timeout_s=60.0) as positions:
        positions.commit("g", "t", dict.fromkeys(range(4_096), 7))
        assert len(positions.committed("g", "t")) == 4_096
        with pytest.raises(errors.UsageError, match="of 1 to 4,096 queues"):
            positions.commit("g", "t", dict.fromkeys(range(4_097), 7))


def test_what_a_commit_in_parts_has_confirmed_may_not_move_back_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_core, "COMMIT_QUEUES", 2)
    options: Any = {"group": "g", "queues": [0, 1, 2, 3], "timeout_s": 60.0}
    fill(node, 5)
    fill(node, 9, queue=3)
    with (
        Consumer("t", [node.address], **options) as consumer,
        Positions([node.address]) as positions,
    ):
        consumer.seek(0, 3)
        positions.commit("g", "t", {0: 4, 3: 9})
        with pytest.raises(errors.PositionBehindError, match="at 9 in queue 3"):
            consumer.commit()
        assert kept(node) == {0: 3, 3: 9}, "the first part is committed"
        positions.commit("g", "t", {0: 4, 3: 0}, allow_back=True)
        with pytest.raises(errors.PositionBehindError, match="at 4 in queue 0"):
            consumer.commit()


def test_a_commit_is_repeated_if_it_is_stored_but_not_confirmed(node: Node) -> None:
    """As a put is: after a flip the new master may have it, or not."""
    fill(node, 5)
    with Consumer("t", [node.address], group="g", timeout_s=60.0) as consumer:
        take(consumer, 5)
        node.backend.transfer.hold = True
        asked = threading.Thread(target=consumer.commit)
        asked.start()
        for outcome in (Outcome.FLUSH_SLAVE_TIMEOUT, Outcome.FLUSH_DISK_TIMEOUT, Outcome.CONFIRMED):
            wait_for(lambda: node.backend.transfer.waiting or not asked.is_alive())
            assert asked.is_alive(), f"the commit ended before {outcome}"
            node.backend.transfer.end_all(outcome)
        asked.join()
    node.backend.transfer.hold = False
    assert kept(node) == {0: 5}


def test_a_commit_that_is_never_confirmed_says_that_it_is_stored(node: Node) -> None:
    fill(node, 5)
    with Consumer("t", [node.address], group="g", timeout_s=0.5) as consumer:
        take(consumer, 5)
        node.backend.transfer.hold = True
        later = threading.Thread(
            target=lambda: (
                wait_for(lambda: node.backend.transfer.waiting),
                node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT),
            )
        )
        later.start()
        with pytest.raises(errors.FlushSlaveTimeout, match="stored, but .* keep or lose it"):
            consumer.commit()
        later.join()
        node.backend.transfer.end_all()


def test_a_node_that_is_too_busy_for_a_moment_ends_no_poll(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group's positions are asked for again, as messages are."""
    fill(node, 5)
    with Consumer("t", [node.address], group="g", timeout_s=0.5) as consumer:
        with monkeypatch.context() as patched:
            patched.setattr("hastore.server.api.server.MAX_FETCHES", 0)
            assert consumer.poll(timeout_s=0.5) == []
            with pytest.raises(errors.NotStoredError, match="BUSY"):
                consumer.positions()
        assert len(consumer.poll(timeout_s=60.0)) == 5


def test_a_commit_is_repeated_while_the_node_is_too_busy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node, 5)
    with Consumer("t", [node.address], group="g", timeout_s=60.0) as consumer:
        take(consumer, 5)
        monkeypatch.setattr(server, "MAX_FETCHES", 0)
        later = threading.Timer(0.3, lambda: setattr(server, "MAX_FETCHES", 1_000))
        later.start()
        consumer.commit()
        later.join()
    assert kept(node) == {0: 5}


def test_a_question_is_repeated_while_the_node_is_too_busy(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node, 5)
    answer, left = server.ApiServer._dispatch, 0

    def dispatch(self: Any, connection: Any, request: Any) -> None:
        nonlocal left
        asks = api.Fetch | api.AskTopics | api.FindTime
        if left and isinstance(request, asks):
            left -= 1
            self._fail(connection, request.rid, "BUSY", "too much to do")
        else:
            answer(self, connection, request)

    monkeypatch.setattr(server.ApiServer, "_dispatch", dispatch)
    options: Any = {"group": "g", "queues": [0], "timeout_s": 60.0}
    with Consumer("t", [node.address], **options) as consumer:
        assert consumer.positions() == {0: Position(0)}
        for ask, found in (
            (consumer.committed, {}), (consumer.lag, {0: 5}), (consumer.end_offsets, {0: 5}),
            (lambda: consumer.seek_to_time(0), None), (consumer.seek_to_latest, None),
        ):  # fmt: skip
            left = 2
            assert ask() == found and not left


def test_a_commit_that_a_node_never_has_room_for_says_so(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(node, 5)
    with Consumer("t", [node.address], group="g", timeout_s=0.5) as consumer:
        take(consumer, 5)
        monkeypatch.setattr(server, "MAX_FETCHES", 0)
        with pytest.raises(errors.NotStoredError, match="BUSY"):
            consumer.commit()
