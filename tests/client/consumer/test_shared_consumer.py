"""Consumers that share queues: who has which, what the listener is told, what is committed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore import Admin, Consumer, Producer, RebalanceListener, SharedConsumer, TopicQueue, aio
from hastore.client.consumer import sharing
from hastore.client.consumer.positions_client import Positions
from hastore.client.messages import Message, Position
from hastore.errors import (
    ClientError,
    FencedError,
    HastoreError,
    PositionLostError,
    ProtocolError,
    UsageError,
)
from hastore.protocol import api
from tests.client import interrupts
from tests.client.consumer.shared_node import SharedNode
from tests.client.consumer.test_consumer_positions import Cut, interrupts_calls, new_seed
from tests.process.harness import wait_until
from tests.server.api.kit import Client

LIMIT_S = 60.0


@pytest.fixture
def shared() -> Iterator[SharedNode]:
    node = SharedNode()
    yield node
    node.stop()


@pytest.fixture
def member(shared: SharedNode) -> Iterator[Callable[..., SharedConsumer]]:
    with contextlib.ExitStack() as ends:

        def make(topic: Any = "t", **options: Any) -> SharedConsumer:
            consumer = Consumer(topic, [shared.address], group="g", share=True, **options)
            assert isinstance(consumer, SharedConsumer)
            ends.callback(consumer.close)
            return consumer

        yield make


class Told(RebalanceListener):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[TopicQueue]]] = []

    def on_assigned(self, queues: list[TopicQueue]) -> None:
        self.calls.append(("assigned", queues))

    def on_revoked(self, queues: list[TopicQueue]) -> None:
        self.calls.append(("revoked", queues))

    def on_fenced(self, queues: list[TopicQueue]) -> None:
        self.calls.append(("fenced", queues))


def fill(node: SharedNode, count: int, topic: str = "t") -> None:
    """Put messages into the queues in turn; each body is the queue and the place in it."""
    with Producer([node.address]) as producer:
        for number in range(count):
            body = b"%s/%d/%d" % (topic.encode(), number % 4, number // 4)
            producer.send(topic, body, queue=number % 4)
        assert producer.flush(60)


def settle(*members: SharedConsumer, sizes: list[int], topic: str = "t") -> None:
    """Poll all members, taking nothing, until they have so many queues each, all once.

    Until then a member may not know of another one, whose queues it cannot get.
    """
    ids = {one.member for one in members}

    def right() -> bool:
        for one in members:
            fetcher: Any = one._core.fetcher
            fetcher.take_messages = lambda _most: []
            assert one.poll(timeout_s=0.01) == []
            del fetcher.take_messages
        held = [queue for one in members for queue in one.assignment if queue.topic == topic]
        each = [sum(queue.topic == topic for queue in one.assignment) for one in members]
        known = all(ids <= set(one.members) for one in members)
        return known and sorted(each) == sorted(sizes) and len(set(held)) == len(held)

    wait_until(right, LIMIT_S, lambda: str([one.assignment for one in members]))


def take(consumer: SharedConsumer, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += [message.body for message in consumer.poll(count - len(found), LIMIT_S)]
    return found


def queues(*numbers: int, topic: str = "t") -> list[TopicQueue]:
    return [TopicQueue(topic, number) for number in numbers]


def test_two_members_share_and_each_message_comes_once(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 400)
    one, two = member(), member()
    settle(one, two, sizes=[2, 2])
    first, second = take(one, 200), take(two, 200)
    assert len({*first, *second}) == 400
    for found in (first, second):
        by_queue: dict[bytes, list[int]] = {}
        for body in found:
            _, queue, number = body.split(b"/")
            by_queue.setdefault(queue, []).append(int(number))
        assert len(by_queue) == 2
        assert all(numbers == list(range(100)) for numbers in by_queue.values())
    assert one.members == two.members == sorted([one.member, two.member])
    one.commit()
    one.close()
    settle(two, sizes=[4])
    assert two.poll(timeout_s=0.1) == [], "what the other one has committed does not come again"


def test_the_listener_is_told_before_queues_leave_and_may_commit(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)

    class Commits(Told):
        def on_revoked(self, queues: list[TopicQueue]) -> None:
            super().on_revoked(queues)
            assert set(queues) <= set(one.assignment), "they are still its own"
            one.commit()

    told, other = Commits(), Told()
    one = member(listener=told)
    take(one, 40)
    assert told.calls == [("assigned", queues(0, 1, 2, 3))]
    two = member(listener=other)
    settle(one, two, sizes=[2, 2])
    moved = two.assignment
    assert told.calls[1:] == [("revoked", moved)] and other.calls == [("assigned", moved)]
    assert two.poll(timeout_s=0.1) == [], "all was committed"
    assert {name: at.queue_offset for name, at in two.committed().items()} == dict.fromkeys(
        queues(0, 1, 2, 3), 10
    )
    two.close()
    assert other.calls[1:] == [("revoked", moved)]
    settle(one, sizes=[4])
    assert told.calls[2:] == [("assigned", moved)]


def test_a_listener_that_raises_breaks_nothing(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 4)

    class Raises(Told):
        def on_assigned(self, queues: list[TopicQueue]) -> None:
            super().on_assigned(queues)
            raise ValueError("not now")

    told = Raises()
    one = member(listener=told)
    with pytest.raises(ValueError, match="not now"):
        one.poll(timeout_s=LIMIT_S)
    assert len(take(one, 4)) == 4 and len(told.calls) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_listener_that_raises_at_the_close_keeps_no_lock(
    shared: SharedNode, member: Callable[..., SharedConsumer], is_async: bool
) -> None:
    class Raises(Told):
        def on_revoked(self, queues: list[TopicQueue]) -> None:
            raise ValueError("not now")

    async def run() -> None:
        consumer = aio.Consumer("t", [shared.address], group="g", share=True, listener=Raises())
        assert len(await consumer.poll(4, LIMIT_S)) > 0
        await consumer.close()

    fill(shared, 40)
    with pytest.raises(ValueError, match="not now"):
        if is_async:
            asyncio.run(run())
        else:
            one = member(listener=Raises())
            take(one, 4)
            one.close()
    with shared.server._io_lock:
        assert not shared.locks.locks._locks.get("g")


def test_without_a_commit_the_next_owner_reads_again(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    one = member()
    take(one, 40)
    one.close()
    assert len(take(member(), 40)) == 40


def test_auto_commit_covers_earlier_polls_only(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    one, watcher = member(auto_commit_s=0.0), member("other")

    def committed() -> int:
        found = one.committed()
        return sum(at.queue_offset for at in found.values())

    assert len(one.poll(7, LIMIT_S)) == 7
    assert committed() == 0, "they may not be processed yet"
    assert len(one.poll(5, LIMIT_S)) == 5
    assert committed() == 7
    with pytest.raises(KeyError), one:
        assert len(one.poll(3, LIMIT_S)) == 3
        raise KeyError
    again = member(auto_commit_s=1_000.0)
    with again:
        assert sum(at.queue_offset for at in again.committed().values()) == 12
        assert len(take(again, 28)) == 28
    assert sum(at.queue_offset for at in member().committed().values()) == 40, "at its end, all"
    assert watcher.poll(timeout_s=0.0) == []


@pytest.mark.parametrize("how", ["poll", "commit", "seek", "administrator"])
def test_an_exception_takes_back_no_more_than_the_last_poll(
    shared: SharedNode, member: Callable[..., SharedConsumer], how: str
) -> None:
    """What a later poll, a commit, a seek or an administrator has said since stays as it is."""
    fill(shared, 40)
    one = member(auto_commit_s=1_000.0)
    with pytest.raises(ZeroDivisionError), one:
        take(one, 40)
        if how == "poll":
            assert one.poll(timeout_s=0.05) == []
        elif how == "commit":
            one.commit()
        elif how == "seek":
            for queue in queues(0, 1, 2, 3):
                one.seek(queue, 9)
        else:
            places = dict.fromkeys(range(4), 9)
            shared.door.soon(lambda: shared.asked._tell("g", "t", 0, places, b""))

            def is_moved() -> bool:
                one.committed()  # it hears of it meanwhile
                return {at.queue_offset for at in one.positions().values()} == {9}

            wait_until(is_moved, LIMIT_S, "moved")
        raise ZeroDivisionError
    kept = [at.queue_offset for at in member().committed().values()]
    # What the administrator says would be committed already.
    assert kept == {"seek": [9] * 4, "administrator": []}.get(how, [10] * 4)


def test_an_exception_takes_back_the_last_poll_also_after_a_seek(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    class Seeks(RebalanceListener):
        def on_assigned(self, queues: list[TopicQueue]) -> None:
            for queue in queues:
                one.seek(queue, 2)

    fill(shared, 40)
    one = member(listener=Seeks(), auto_commit_s=1_000.0)
    with pytest.raises(ZeroDivisionError), one:
        assert len(one.poll(3, LIMIT_S)) == 3
        raise ZeroDivisionError
    kept = member().committed().values()
    assert {at.queue_offset for at in kept} == {2}, "where reading has begun"


def test_auto_commit_at_a_revocation(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    one = member(auto_commit_s=1_000.0)
    take(one, 40)
    two = member()
    settle(one, two, sizes=[2, 2])
    assert two.poll(timeout_s=0.1) == []


def test_an_iteration_joins_and_moves_with_each_message(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 8)
    one, seen = member(auto_commit_s=0.0), 0
    for _ in one:
        seen += 1
        if seen == 8:
            break
    assert sum(at.queue_offset for at in one.positions().values()) == 8
    assert sum(at.queue_offset for at in one.committed().values()) == 7, "not the last one"


def test_a_commit_after_one_that_nobody_answered_is_sent(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is stored all the same: without the second the group would stay there."""
    fill(shared, 40)
    one = member()
    take(one, 4)
    one.commit()
    before = one.committed()
    take(one, 36)
    with monkeypatch.context() as patched:
        patched.setattr(shared.backend.transfer, "hold", True)
        patched.setattr(one._core, "timeout_s", 0.3)
        with pytest.raises(HastoreError):
            one.commit()
    shared.backend.transfer.end_all()
    assert {at.queue_offset for at in one.committed().values()} == {10}
    for queue, position in before.items():
        one.seek(queue, position)
    one.commit()
    assert one.committed() == before


def give_away(shared: SharedNode, *numbers: int) -> None:
    """Let another member have queues of `t`: as if their time were over, and it had asked."""
    with shared.server._io_lock:
        for number in numbers:
            lock = shared.locks.locks._locks["g"]["t", number]
            lock.holder, lock.until_ms = "somebody@else", float("inf")


def test_a_member_without_the_lock_cannot_commit(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    told = Told()
    one = member(listener=told)
    take(one, 40)
    give_away(shared, 1, 2)
    with pytest.raises(FencedError) as fenced:
        one.commit()
    assert str(fenced.value) == (
        "in the group 'g' queue 1 of topic 't' belongs to 'somebody@else' now, not to "
        f"{one.member!r}; nothing was committed"
    )
    assert one.committed() == {}
    wait_until(lambda: one.poll(timeout_s=0.05) == [] and len(told.calls) > 1, LIMIT_S, "fenced")
    assert told.calls[1:] == [("fenced", queues(1, 2))]
    assert one.assignment == queues(0, 3)
    one.commit()
    assert sorted(one.committed()) == queues(0, 3)


def test_after_a_loss_no_commit_succeeds_before_a_poll_has_told_of_it(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Else a second try, with nothing left to commit, looks like a commit of what was read."""
    fill(shared, 40)
    told = Told()
    one = member(listener=told)
    take(one, 40)
    give_away(shared, 1, 2)
    with pytest.raises(FencedError):
        one.commit()
    wait_until(lambda: one.committed() == {} and len(one.assignment) == 2, LIMIT_S, "not lost")
    for _ in range(2):
        with pytest.raises(FencedError) as fenced:
            one.commit()
        assert str(fenced.value) == (
            f"in the group 'g' {one.member} lost queue 1 of t, queue 2 of t before it had committed"
            " what it has read there: that comes again, perhaps to another member; nothing was"
            " committed; poll before the next commit"
        )
    assert one.committed() == {}
    wait_until(lambda: one.poll(timeout_s=0.05) == [] and len(told.calls) > 1, LIMIT_S, "fenced")
    one.commit()
    assert sorted(one.committed()) == queues(0, 3)


@pytest.mark.parametrize("call", ["lag", "committed"])
@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])
def test_a_commit_is_refused_also_if_another_call_has_noticed_the_end_of_the_lease(
    shared: SharedNode, member: Callable[..., SharedConsumer], call: str, is_async: bool
) -> None:
    async def run() -> None:
        consumer = aio.Consumer("t", [shared.address], group="g", share=True)
        async with consumer:
            await consumer.poll(1, LIMIT_S)
            end_leases(consumer)
            await getattr(consumer, call)()
            with pytest.raises(FencedError, match="lost queue 0 of t"):
                await consumer.commit()
            assert not await consumer.committed()

    fill(shared, 40)
    if is_async:
        asyncio.run(run())
        return
    one = member()
    take(one, 40)
    end_leases(one)
    getattr(one, call)()
    with pytest.raises(FencedError, match="lost queue 0 of t"):
        one.commit()
    assert one.committed() == {}
    assert len(take(one, 40)) == 40, "they come again"
    one.commit()
    assert {at.queue_offset for at in one.committed().values()} == {10}


def test_a_commit_counts_while_the_master_keeps_the_lock(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """A lease ends a little before its lock; what was committed then is no loss afterwards."""
    fill(shared, 40)
    told = Told()
    one = member(listener=told)
    take(one, 40)
    end_leases(one)
    one.commit()
    assert {at.queue_offset for at in one.committed().values()} == {10}
    one.commit()
    one.poll(1, LIMIT_S)
    assert told.calls[1] == ("fenced", queues(0, 1, 2, 3)), "the first commit has noticed it"


def end_leases(consumer: Any, *names: TopicQueue) -> None:
    """Let the time of some or all of its queues be over, as after a long pause of its caller."""
    core = consumer._core
    for name in names or core.fetcher.mine:
        core.fetcher.mine[name].lease_ms = 0.0
    core.sharing._renewing = None  # its answer may be under way, and would renew them
    core.sharing._next_ms = 0.0


def test_the_listener_may_commit_the_other_queues_when_it_is_told_of_a_loss(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    class Commits(Told):
        def on_fenced(self, queues: list[TopicQueue]) -> None:
            super().on_fenced(queues)
            one.commit()

    fill(shared, 40)
    told = Commits()
    one = member(listener=told)
    take(one, 40)
    end_leases(one, TopicQueue("t", 1))
    one.poll(1, LIMIT_S)
    assert told.calls[1] == ("fenced", queues(1))
    # Queue 1 may have come back before the commit: then it begins anew, and is committed at 0.
    beyond = [name for name, at in one.committed().items() if at.queue_offset]
    assert sorted(beyond) == queues(0, 2, 3)


def test_a_lease_that_is_over_gives_no_message(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    told = Told()
    one = member(listener=told)
    assert len(one.poll(1, LIMIT_S)) == 1
    end_leases(one)
    assert one._core.fetcher.take_messages(100) == [], "the messages are there, but not its own"
    one.poll(1, LIMIT_S)
    assert [kind for kind, _ in told.calls] == ["assigned", "fenced", "assigned"]


def test_seeks_go_to_the_place_of_each_queue(
    shared: SharedNode,
    member: Callable[..., SharedConsumer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two topics, so that two queues have each number; and each queue has an end of its own."""
    ends = {
        TopicQueue(topic, number): 3 * number + more + 1
        for topic, more in (("t", 0), ("u", 20))
        for number in range(4)
    }
    with Producer([shared.address]) as producer:
        for (topic, number), end in ends.items():
            for _ in range(end):
                producer.send(topic, b"", queue=number)
        assert producer.flush(60)
    one = member(["t", "u"])
    settle(one, sizes=[4], topic="u")
    settle(one, sizes=[4])

    def places() -> dict[TopicQueue, int]:
        return {name: at.queue_offset for name, at in one.positions().items()}

    one.seek_to_latest()
    assert places() == ends == one.end_offsets() and not any(one.lag().values())
    one.seek(TopicQueue("u", 2), 5)
    one.seek(TopicQueue("t", 1), one.position(TopicQueue("t", 0)))
    assert places() == ends | {TopicQueue("u", 2): 5, TopicQueue("t", 1): 1}
    one.seek_to_earliest()
    assert places() == dict.fromkeys(ends, 0)
    one.seek_to_time(2**62)
    assert places() == ends
    assert not caplog.records
    shared.backend.store.time_spent = True
    one.seek_to_time(0)
    assert places() == dict.fromkeys(ends, 0)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 8 and all("cut short" in text for text in told)
    assert "queue 3 of topic u is read from queue offset 0 on" in " ".join(told)
    assert len(take(one, sum(ends.values()))) == sum(ends.values())


def test_a_lost_position_names_its_topic(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 4, "a")
    fill(shared, 4, "b")
    one = member(["a", "b"])
    take(one, 8)
    one.seek(TopicQueue("b", 2), 99)
    with pytest.raises(PositionLostError) as caught:
        one.poll(timeout_s=LIMIT_S)
    lost = caught.value
    assert lost.topic is not None and lost.queue_id is not None
    assert isinstance(lost.common, Position)
    one.seek(TopicQueue(lost.topic, lost.queue_id), lost.common)
    assert one.position(TopicQueue("b", 2)).queue_offset == 1


def test_pause_and_resume(shared: SharedNode, member: Callable[..., SharedConsumer]) -> None:
    fill(shared, 40)
    one = member()
    settle(one, sizes=[4])
    one.pause(queues(1, 3))
    assert one.paused == queues(1, 3)
    assert len(take(one, 20)) == 20 and one.poll(timeout_s=0.1) == []
    assert one.lag() == dict(zip(queues(0, 1, 2, 3), (0, 10, 0, 10), strict=True))
    assert one.end_offsets() == dict.fromkeys(queues(0, 1, 2, 3), 10)
    one.resume(queues(3))
    assert {body.split(b"/")[1] for body in take(one, 10)} == {b"3"}
    one.resume()
    assert len(take(one, 10)) == 10 and not one.paused


def test_several_topics_prefixes_and_patterns(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LIST_MS", 100.0)
    for topic in ("a", "b-1", "c1", "c1x", "%RETRY%other"):
        fill(shared, 4, topic)
    one = member(["a", "b-*", re.compile(r"[cd]\d")])
    assert sorted({body.split(b"/")[0] for body in take(one, 12)}) == [b"a", b"b-1", b"c1"]
    assert one.topic == "a, b-*, /[cd]\\d/"
    for topic in ("b-2", "d7", "e"):
        fill(shared, 4, topic)
    assert sorted({body.split(b"/")[0] for body in take(one, 8)}) == [b"b-2", b"d7"]
    assert {name.topic for name in one.assignment} == {"a", "b-1", "b-2", "c1", "d7"}


def test_committed_knows_what_patterns_match_before_the_first_poll(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    for topic in ("a", "b-1", "c"):
        fill(shared, 4, topic)
    with Positions([shared.address]) as positions:
        for topic in ("a", "b-1", "c"):
            positions.commit("g", topic, {2: 1})
    found = member(["a", "b-*"]).committed()
    assert {name: at.queue_offset for name, at in found.items()} == {
        TopicQueue("a", 2): 1, TopicQueue("b-1", 2): 1
    }  # fmt: skip


def test_the_retries_of_the_group_are_shared_too(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    with Producer([shared.address]) as producer:
        producer.send_sync("%RETRY%g", b"again", queue=0)
    one = member()
    assert take(one, 1) == [b"again"]
    assert TopicQueue("%RETRY%g", 0) in one.assignment


def test_a_topic_that_is_missing_is_named_once_and_read_later(
    shared: SharedNode,
    member: Callable[..., SharedConsumer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = member()
    settle(one, sizes=[4])
    fill(shared, 4)
    assert len(take(one, 4)) == 4
    told = [record.getMessage() for record in caplog.records if "exist" in record.getMessage()]
    assert told == ["group g: topic t does not exist yet; it is read once it does"]


def test_a_start_at_the_end_is_committed_at_once(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    one = member(start="latest")
    assert one.poll(timeout_s=0.5) == []
    assert {at.queue_offset for at in one.committed().values()} == {10}
    fill(shared, 4)
    one.close()
    assert len(take(member(start="latest"), 4)) == 4, "they came after the group's beginning"


def test_a_start_at_the_end_steps_over_nothing_that_comes_while_the_group_exists(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New topics of a pattern, new queues and retries are read from their beginning."""
    monkeypatch.setattr(sharing, "LIST_MS", 100.0)
    monkeypatch.setattr(sharing, "JOIN_MS", 200.0)
    for topic in ("a-1", "t"):
        fill(shared, 40, topic)
    one = member(["a-*", "t"], start="latest")
    settle(one, sizes=[4])
    settle(one, sizes=[4], topic="a-1")
    assert one.poll(timeout_s=0.1) == []
    fill(shared, 4, "a-2")
    with Admin([shared.address]) as admin:
        admin.set_topic("t", queues=6)
    with Producer([shared.address]) as producer:
        for queue in (4, 5):
            producer.send_sync("t", b"t/%d/0" % queue, queue=queue)
        producer.send_sync("%RETRY%g", b"again", queue=0)
    expected = [b"a-2/0/0", b"a-2/1/0", b"a-2/2/0", b"a-2/3/0", b"again", b"t/4/0", b"t/5/0"]
    assert sorted(take(one, 7)) == expected
    assert not any(one.lag().values())
    committed = one.committed()
    assert committed[TopicQueue("t", 4)].queue_offset == 0, "where it began"
    assert committed[TopicQueue("t", 0)].queue_offset == 10


def test_a_restart_at_the_end_reads_queues_that_came_meanwhile(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """The members may have only new queues: what the group has in the others counts."""
    fill(shared, 40)
    one = member(start="latest")
    settle(one, sizes=[4])
    assert one.poll(timeout_s=0.1) == []
    one.close()
    with Admin([shared.address]) as admin:
        admin.set_topic("t", queues=8)
    with Producer([shared.address]) as producer:
        for queue in range(4, 8):
            producer.send_sync("t", b"t/%d/0" % queue, queue=queue)
    one, two = member(start="latest"), member(start="latest")
    settle(one, two, sizes=[4, 4])
    found = [*one.poll(timeout_s=0.1), *two.poll(timeout_s=0.1)]
    while len(found) < 4:
        found += [*one.poll(timeout_s=0.1), *two.poll(timeout_s=0.1)]
    assert sorted(message.body for message in found) == [b"t/%d/0" % n for n in range(4, 8)]


def test_the_members_of_a_new_group_all_start_at_the_end(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """One of them commits where it begins while the other has not begun."""
    fill(shared, 40)
    one, two = member(start="latest"), member(start="latest")
    settle(one, two, sizes=[2, 2])
    assert one.poll(timeout_s=0.1) == two.poll(timeout_s=0.1) == []
    assert {at.queue_offset for at in one.committed().values()} == {10}


@pytest.mark.parametrize("commits", [False, True])
def test_a_listener_that_seeks_says_where_the_group_begins(
    shared: SharedNode, member: Callable[..., SharedConsumer], commits: bool
) -> None:
    """The end of the queue would be committed otherwise: a later owner would begin there."""

    class Seeks(RebalanceListener):
        def on_assigned(self, queues: list[TopicQueue]) -> None:
            for queue in queues:
                one.seek(queue, 3)
            if commits:
                one.commit()

    fill(shared, 40)
    one = member(start="latest", listener=Seeks())
    while not one.poll(1, LIMIT_S):
        pass
    assert {at.queue_offset for at in one.committed().values()} == {3}
    one.close()  # nothing more is committed
    assert len(take(member(start="latest"), 28)) == 28


def test_an_administrator_moves_the_group(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    one = member()
    take(one, 40)
    one.commit()
    shared.door.soon(lambda: shared.asked._tell("g", "t", 0, {1: 3, 2: 10}, b""))
    assert len(take(one, 7)) == 7
    assert one.position(TopicQueue("t", 1)).queue_offset == 10


@pytest.mark.parametrize("way", ["commit", "poll", "close"])
def test_a_commit_does_not_undo_what_an_administrator_has_moved(
    shared: SharedNode, member: Callable[..., SharedConsumer], way: str
) -> None:
    """What the member was told while it handled its messages counts before it commits."""
    fill(shared, 40)
    one = member(auto_commit_s=None if way == "commit" else 0)
    take(one, 40)
    told = threading.Event()
    with Positions([shared.address]) as positions:
        positions.commit("g", "t", {1: 3, 2: 4}, allow_back=True)
        shared.door.soon(lambda: shared.asked._tell("g", "t", 0, {1: 3, 2: 4}, b"") or told.set())
        assert told.wait(LIMIT_S)
        time.sleep(0.2)  # it has been sent, and nobody reads it yet
        if way == "poll":
            one.poll(1, timeout_s=0)
        else:
            one.commit() if way == "commit" else one.close()
        kept = {queue: at.queue_offset for queue, at in positions.committed("g", "t").items()}
    assert kept == {0: 10, 1: 3, 2: 4, 3: 10}


def test_a_flip_keeps_the_owners(shared: SharedNode, member: Callable[..., SharedConsumer]) -> None:
    fill(shared, 40)
    told = Told()
    one, two = member(listener=told), member()
    settle(one, two, sizes=[2, 2])
    mine = one.assignment
    take(one, 20)
    with shared.server._io_lock:
        history = shared.backend.entries
        shared.backend.entries = [*history, (131_073, shared.backend.store.max_offset)]
    one.commit()
    one._core.sharing.renew_now()
    two._core.sharing.renew_now()
    settle(one, two, sizes=[2, 2])
    assert one.assignment == mine and [kind for kind, _ in told.calls].count("fenced") == 0
    assert shared.locks.locks.epoch == 131_073


def test_a_member_that_is_silent_is_taken_out_of_the_list(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.server.remoting.own_members.SESSION_MS", 500.0)
    monkeypatch.setattr("hastore.server.remoting.own_members.SCAN_MS", 100.0)
    monkeypatch.setattr(sharing, "JOIN_MS", 100.0)
    one, two = member(), member()
    settle(one, two, sizes=[2, 2])

    def alone() -> bool:
        two.poll(timeout_s=0.05)
        return two.members == [two.member]

    wait_until(alone, LIMIT_S, "the other one does not poll")
    assert len(two.assignment) == 2, "the other one's locks are not over"

    def both() -> bool:
        settle(one, two, sizes=[2, 2])
        return len(two.members) == 2

    wait_until(both, LIMIT_S, "it is one again once it polls")


def test_a_close_in_another_thread_ends_a_poll(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    one = member()
    settle(one, sizes=[4])
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(one.poll(timeout_s=LIMIT_S)))
    thread.start()
    one.close()
    thread.join(LIMIT_S)
    assert found == [[]]
    with pytest.raises(ClientError, match="is closed"):
        one.poll()
    settle(member(), sizes=[4])


class Slow(Told):
    """Its `on_assigned` takes long, as one that looks into a database."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def on_assigned(self, queues: list[TopicQueue]) -> None:
        self.begun.set()
        assert self.go_on.wait(LIMIT_S)
        super().on_assigned(queues)


def test_a_close_in_another_thread_commits_nothing_that_is_still_worked_on(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """As when a service is stopped: its thread may end, or fail, in the middle of a message."""
    fill(shared, 1)  # one message, so that there is one poll: what earlier ones returned is done
    works, may_end = threading.Event(), threading.Event()
    one = member(auto_commit_s=1_000.0)

    def work() -> None:
        take(one, 1)
        works.set()
        assert may_end.wait(LIMIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    assert works.wait(LIMIT_S)
    one.close()
    may_end.set()
    thread.join(LIMIT_S)
    again = member(auto_commit_s=1_000.0)
    thread = threading.Thread(target=lambda: take(again, 1))  # it comes again
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    again.close()  # a thread that has ended has done its work
    last = member()
    settle(last, sizes=[4])
    assert last.poll(timeout_s=0.1) == []


def test_so_does_a_close_in_another_task(shared: SharedNode) -> None:
    fill(shared, 1)

    async def work(one: aio.Consumer, works: asyncio.Event, may_end: asyncio.Event) -> None:
        while not await one.poll(timeout_s=LIMIT_S):
            pass
        works.set()
        await may_end.wait()

    async def main() -> None:
        for ends_first in (False, True):
            one = aio.Consumer("t", [shared.address], group="g", share=True, auto_commit_s=1_000.0)
            works, may_end = asyncio.Event(), asyncio.Event()
            task = asyncio.create_task(work(one, works, may_end))
            await works.wait()
            if ends_first:
                may_end.set()
                await task
            await one.close()
            may_end.set()
            await task

    asyncio.run(asyncio.wait_for(main(), LIMIT_S))
    with Positions([shared.address]) as positions:
        assert {one.queue_offset for one in positions.committed("g", "t").values()} - {0} == {1}


def test_a_close_in_another_thread_waits_for_the_listener(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Else `on_revoked` would keep positions before `on_assigned` has set them."""
    told = Slow()
    one = member(listener=told)
    poll = threading.Thread(target=lambda: one.poll(timeout_s=LIMIT_S))
    poll.start()
    assert told.begun.wait(LIMIT_S)
    close = threading.Thread(target=one.close)
    close.start()
    close.join(0.3)
    assert close.is_alive()
    told.go_on.set()
    poll.join(LIMIT_S)
    close.join(LIMIT_S)
    assert told.calls == [("assigned", queues(0, 1, 2, 3)), ("revoked", queues(0, 1, 2, 3))]


def test_the_listener_is_told_nothing_after_the_close(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Another thread closes between the steps of a poll and the call of the listener."""
    told = Told()
    one = member(listener=told)
    lock = one._telling

    class Late:
        acquire, release = lock.acquire, lock.release

        def __enter__(self) -> None:
            close = threading.Thread(target=one.close)
            close.start()
            close.join(LIMIT_S)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    one._telling = Late()  # type: ignore[assignment]
    assert one.poll(timeout_s=LIMIT_S) == []
    assert [kind for kind, _ in told.calls] == ["revoked"]


def test_a_close_does_not_wait_for_ever_for_the_listener(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    told = Slow()
    one = member(listener=told, timeout_s=0.2)
    poll = threading.Thread(target=lambda: one.poll(timeout_s=LIMIT_S))
    poll.start()
    try:
        assert told.begun.wait(LIMIT_S)
        one.close()
        assert told.calls == [("revoked", queues(0, 1, 2, 3))]
    finally:
        told.go_on.set()
        poll.join(LIMIT_S)


def test_a_close_waits_no_longer_than_its_time_for_another_call(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Of which a commit of another thread is a part."""
    fill(shared, 40)
    one = member(auto_commit_s=1_000.0, timeout_s=1.0)
    take(one, 40)
    shared.backend.transfer.hold = True
    began = threading.Event()

    def commit() -> None:
        began.set()
        with contextlib.suppress(HastoreError):
            one.commit()

    other = threading.Thread(target=commit)
    other.start()
    assert began.wait(LIMIT_S)
    time.sleep(0.1)
    before = time.monotonic()
    one.close()
    assert time.monotonic() - before < 1.5
    other.join(LIMIT_S)
    shared.backend.transfer.end_all()


@pytest.mark.parametrize("closes_too", [False, True])
def test_a_close_in_another_task_waits_for_the_listener(
    shared: SharedNode, closes_too: bool
) -> None:
    calls: list[str] = []

    class Listener(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            begun.set()
            await asyncio.sleep(0.2)
            if closes_too:
                await one.close()
            calls.append("assigned")

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            calls.append("revoked")

    async def main() -> None:
        nonlocal one, begun
        begun = asyncio.Event()
        one = aio.Consumer("t", [shared.address], group="g", share=True, listener=Listener())
        poll = asyncio.create_task(one.poll(10, LIMIT_S))
        await begun.wait()
        await one.close()
        assert await poll == [] and calls == ["assigned", "revoked"]

    one: Any = None
    begun: Any = None
    asyncio.run(asyncio.wait_for(main(), 8.0))  # less than `timeout_s`


def test_asyncio_members_share_with_the_others(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 40)
    calls: list[str] = []

    class Listener(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            await asyncio.sleep(0)
            calls.append("assigned")

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            await two.commit()
            calls.append("revoked")

    async def run() -> int:
        nonlocal two
        two = aio.Consumer("t", [shared.address], group="g", share=True, listener=Listener())
        assert isinstance(two, aio.SharedConsumer)
        async with two:
            seen = 0
            async for _ in two:
                seen += 1
                if seen == 40:
                    break
            await asyncio.gather(two.poll(timeout_s=0.1), asyncio.to_thread(one.poll, 1, 0.1))
            while len(one.assignment) < 2:
                await asyncio.gather(two.poll(timeout_s=0.1), asyncio.to_thread(one.poll, 1, 0.1))
            assert len(two.assignment) == 2 and calls == ["assigned", "revoked"]
        return seen

    two: Any = None
    one = member()
    assert asyncio.run(run()) == 40
    settle(one, sizes=[4])
    assert one.poll(timeout_s=0.1) == []


def test_an_asyncio_member_may_be_closed_by_several_tasks(shared: SharedNode) -> None:
    """As by the end of its block and by whoever handles SIGTERM: it leaves once."""

    class Slow(RebalanceListener):
        revoked = 0

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            self.revoked += 1
            await asyncio.sleep(0.1)
            await one.commit()

    async def main() -> Slow:
        nonlocal one
        listener = Slow()
        one = aio.Consumer("t", [shared.address], group="g", share=True, listener=listener)
        while not one.assignment:
            await one.poll(timeout_s=0.05)
        await asyncio.gather(one.close(), one.close(), one.close())
        with pytest.raises(ClientError, match="is closed"):
            await one.poll()
        return listener

    one: Any = None
    assert asyncio.run(asyncio.wait_for(main(), LIMIT_S)).revoked == 1


def test_the_polls_of_other_tasks_wait_for_the_listener(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Nobody reads a queue before `on_assigned` has returned, nor gets it before `on_revoked`."""
    fill(shared, 40)
    kept: list[int] = []

    class Listener(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            for queue in queues:
                await asyncio.sleep(0.05)
                await two.seek(queue, 7)

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            await asyncio.sleep(0.3)
            await two.commit()
            kept.append(len(two.assignment))
            ended.set()

    async def run() -> list[int]:
        nonlocal two
        two = aio.Consumer("t", [shared.address], group="g", share=True, listener=Listener())
        offsets: list[int] = []

        async def poll() -> None:
            while not ended.is_set():
                offsets.extend(one.queue_offset for one in await two.poll(timeout_s=0.05))

        def read() -> None:
            one = member()
            while not ended.is_set():
                one.poll(timeout_s=0.02)

        tasks = [asyncio.create_task(poll()) for _ in range(3)]
        while len(offsets) < 12:
            await asyncio.sleep(0.01)
        await asyncio.gather(asyncio.to_thread(read), *tasks)
        await two.close()
        return offsets

    two: Any = None
    ended = threading.Event()
    assert sorted(asyncio.run(run())) == [7, 7, 7, 7, 8, 8, 8, 8, 9, 9, 9, 9]
    assert kept[0] == 4, "a queue went before the listener had returned"


def test_a_listener_may_poll_and_close_in_tasks_of_its_own(shared: SharedNode) -> None:
    """So do `wait_for`, before Python 3.12, and `gather`."""
    fill(shared, 40)
    found: list[Any] = []

    class Listener(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            polls = [asyncio.create_task(one.poll(10, LIMIT_S)) for _ in range(2)]
            found.extend(await asyncio.gather(*polls))

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            await asyncio.gather(one.close())
            found.append(await asyncio.gather(one.poll()))

    async def main() -> None:
        nonlocal one
        one = aio.Consumer("t", [shared.address], group="g", share=True, listener=Listener())
        rest = await one.poll(500, LIMIT_S)
        offsets = [message.offset for part in (*found, rest) for message in part]
        assert len(found) == 2 and len(set(offsets)) == len(offsets), "none of them twice"
        await one.close()
        assert found[2:] == [[[]]]

    one: Any = None
    asyncio.run(asyncio.wait_for(main(), 10.0))


@pytest.mark.parametrize("kind", ["assigned", "revoked"])
def test_a_listener_that_was_cancelled_with_its_poll_is_told_again(
    shared: SharedNode, member: Callable[..., SharedConsumer], kind: str
) -> None:
    fill(shared, 40)
    calls: list[str] = []

    class Slow(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            await self.wait("assigned")
            for queue in queues:
                await one.seek(queue, 5)

        async def on_revoked(self, queues: list[TopicQueue]) -> None:
            await self.wait("revoked")
            await one.commit()

        async def wait(self, what: str) -> None:
            if what == kind:
                calls.append(what)
                await go_on.wait()

    def joins() -> None:
        with contextlib.closing(member()) as other:
            while not ended.is_set():
                other.poll(timeout_s=0.02)

    async def main() -> None:
        nonlocal one, go_on
        go_on = asyncio.Event()
        one = aio.Consumer("t", [shared.address], group="g", share=True, listener=Slow())
        async with one:
            if kind == "revoked":
                seen = 0
                while seen < 20:
                    seen += len(await one.poll(500, LIMIT_S))
                joining.start()
            while not calls:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one.poll(500, LIMIT_S), 0.3)
            assert calls == [kind] and len(one.assignment) == 4
            go_on.set()
            if kind == "assigned":
                found = await one.poll(500, LIMIT_S)
                assert min(message.queue_offset for message in found) == 5
            else:
                while len(one.assignment) == 4:
                    assert await one.poll(500, 0.05) == []
                kept = (await one.committed()).values()
                assert [at.queue_offset for at in kept] == [10] * 4, "before they left"
            assert calls == [kind] * 2

    one: Any = None
    go_on: Any = None
    ended = threading.Event()
    joining = threading.Thread(target=joins)
    try:
        asyncio.run(main())
    finally:
        ended.set()
        if joining.ident is not None:
            joining.join(LIMIT_S)


@interrupts_calls
def test_a_listener_that_was_interrupted_is_told_again(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Wherever it is: nothing is read before what it seeks."""

    class Seeks(RebalanceListener):
        def on_assigned(self, queues: list[TopicQueue]) -> None:
            for queue in queues:
                one.seek(queue, 5)

    def ready() -> SharedConsumer:
        one.seek_to_earliest()
        assert len(take(one, 4)) == 4
        one._core.sharing._events.append(sharing.Event(sharing.ASSIGNED, one.assignment))
        return one

    fill(shared, 40)
    one = member(listener=Seeks())
    settle(one, sizes=[4])
    points = 0
    for _ in interrupts.interrupt_everywhere(ready, lambda it: it.poll(1, 0.0)):
        points += 1
        found = one.poll(500, LIMIT_S)
        assert found and min(message.queue_offset for message in found) >= 5
    print(f"interrupted at {points - 1} points")
    assert points > 20


def test_a_listener_is_told_again_if_a_handler_of_signals_ended_its_seek(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an Exception, too, though one of the listener's own ends what it is told."""

    class Seeks(RebalanceListener):
        def on_assigned(self, queues: list[TopicQueue]) -> None:
            for queue in queues:
                with monkeypatch.context() as patch:
                    if not cut:
                        patch.setattr(one._core, "end_call", interrupt)
                    one.seek(queue, 5)

    def interrupt() -> None:
        cut.append(True)
        raise TimeoutError

    fill(shared, 40)
    cut: list[bool] = []
    one = member(listener=Seeks())
    with pytest.raises(TimeoutError):
        one.poll(timeout_s=LIMIT_S)
    found = one.poll(timeout_s=LIMIT_S)
    assert found and min(message.queue_offset for message in found) == 5


def test_a_listener_with_coroutines_needs_asyncio(member: Callable[..., SharedConsumer]) -> None:
    class Listener(RebalanceListener):
        async def on_assigned(self, queues: list[TopicQueue]) -> None:
            """Never awaited."""

    one = member(listener=Listener())
    with pytest.warns(RuntimeWarning, match="never awaited"):
        with pytest.raises(UsageError, match="use hastore.aio"):
            one.poll(timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": None}, "share=True needs a group"),
        ({"queues": [0]}, "queues: with share=True"),
        ({"topic": []}, "at least one topic"),
        ({"topic": 7}, "topic: expected a topic, a prefix"),
        ({"topic": ["a", b"b"]}, "topic: expected a topic, a prefix"),
        ({"topic": "a b"}, "topic: expected 1 to 127 characters"),
        ({"topic": re.compile(b"x")}, "not of bytes"),
        ({"listener": print}, "listener: expected a RebalanceListener"),
        ({"auto_commit_s": -1}, "auto_commit_s: expected a number"),
        ({"share": False, "listener": Told()}, "are for consumers with share=True"),
        ({"share": False, "auto_commit_s": 1}, "are for consumers with share=True"),
        ({"share": 1}, "share: expected"),
        ({"share": False, "topic": ["a"]}, "topic: expected a str"),
    ],
)
def test_wrong_arguments_have_one_clear_error(options: dict[str, Any], text: str) -> None:
    given = {"topic": "t", "bootstrap": "tcp://127.0.0.1:1", "group": "g", "share": True, **options}
    for make in (Consumer, aio.Consumer):
        with pytest.raises(UsageError, match=re.escape(text)):
            make(**given)


def test_a_queue_that_is_not_its_own_is_refused(member: Callable[..., SharedConsumer]) -> None:
    one = member()
    with pytest.raises(UsageError, match="queue 0 of topic t is not this member's now"):
        one.seek(TopicQueue("t", 0), 0)
    with pytest.raises(UsageError, match="expected a TopicQueue"):
        one.position(0)  # type: ignore[arg-type]
    for given in (3, "t", b"t"):
        with pytest.raises(UsageError, match="queues: expected TopicQueues"):
            one.pause(given)  # type: ignore[arg-type]


def test_members_that_read_other_topics_leave_no_queue_unread(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """As in a group whose members are upgraded one by one, to a version that reads one topic more.

    By RocketMQ's rule each member counts in the shares of each topic.
    """
    fill(shared, 40)
    fill(shared, 40, topic="u")
    old, new = member("t"), member(["t", "u"])
    found: list[bytes] = []

    def all_is_read() -> bool:
        for one in (old, new):
            found.extend(message.body for message in one.poll(timeout_s=0.01))
            one.commit()
        sizes = len(old.assignment), len(new.assignment)
        return len(found) >= 80 and sizes == (2, 6)

    wait_until(all_is_read, LIMIT_S, lambda: str((len(found), old.assignment, new.assignment)))
    assert len(found) == len(set(found)) == 80
    assert {queue.topic for queue in old.assignment} == {"t"}


def test_the_first_retry_comes_at_once(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its topic is not there when the members join, and they do not join again by themselves."""
    monkeypatch.setattr(sharing, "JOIN_MS", 1e9)
    fill(shared, 40)
    both = member(), member()
    settle(*both, sizes=[2, 2])
    fill(shared, 1, topic="%RETRY%g")
    found: list[Message] = []

    def has_come() -> bool:
        for one in both:
            found.extend(one.poll(timeout_s=0.01))
        return any(message.topic == "%RETRY%g" for message in found)

    wait_until(has_come, LIMIT_S, "the retry")


def test_committed_has_the_positions_of_the_retries_before_the_first_poll(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    fill(shared, 1)
    fill(shared, 1, topic="%RETRY%g")
    with Positions([shared.address]) as positions:
        positions.commit("g", "%RETRY%g", {0: 1})
    assert member().committed() == {TopicQueue("%RETRY%g", 0): Position(1)}


def test_a_second_member_of_the_same_id_is_refused(shared: SharedNode) -> None:
    def join(client: Client, rid: int, token: int) -> Any:
        return client.ask(api.Join(rid, "g", "same", token, [api.Subscription("t")]))

    with (
        contextlib.closing(Client(shared.address)) as first,
        contextlib.closing(Client(shared.address)) as second,
    ):
        assert join(first, 1, 5).members == ["same"]
        assert join(second, 2, 5).members == ["same"], "its own other connection"
        refused = join(second, 3, 6)
        assert refused.status == "MEMBER_EXISTS" and "'same' already, at 127" in refused.reason


def test_a_member_reads_what_its_filter_wants_and_the_group_knows_it(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    with Producer([shared.address]) as producer:
        for number in range(40):
            tag = ("red", "blue")[number % 8 // 4]
            producer.send("t", b"%d" % number, queue=number % 4, tags=tag)
        assert producer.flush(60)
    consumer = member(sql="TAGS = 'blue'")
    found: list[int] = []
    while len(found) < 20 or any(one.queue_offset < 10 for one in consumer.positions().values()):
        found += [int(message.body) for message in consumer.poll(timeout_s=0.2)]
    assert sorted(found) == [number for number in range(40) if number % 8 >= 4]
    consumer.commit()
    assert {place.queue_offset for place in consumer.committed().values()} == {10}
    known = shared.groups.members.subscriptions("g")["t"]
    assert (known.expression, known.expression_type) == ("TAGS = 'blue'", "SQL92")
    with pytest.raises(UsageError, match="tags and sql: give one"):
        member(tags="a", sql="b = 1")


@interrupts_calls
@pytest.mark.slow("reads until sixty of its calls were interrupted")
def test_an_exception_of_a_signal_handler_loses_no_message(
    shared: SharedNode, member: Callable[..., SharedConsumer]
) -> None:
    """Another member comes and goes meanwhile, so that queues leave and come back, too."""
    count = 2_000
    fill(shared, count)
    rng = random.Random(new_seed())
    cut, found = Cut(rng), set[bytes]()
    one = member(max_bytes=9_000, auto_commit_s=0.05, timeout_s=60.0)
    other: SharedConsumer | None = None
    while len(found) < count or cut.count < 60:
        what = rng.random()
        if what < 0.5:
            most = rng.randint(1, 120)
            found |= {message.body for message in cut(lambda: one.poll(most, 0.2))}  # noqa: B023
        elif what < 0.7:
            found |= {message.body for message in one.poll(rng.randint(1, 60), 0.5)}
        elif what < 0.8:
            cut(one.commit)  # type: ignore[arg-type]
        elif other is None:
            other = member(timeout_s=60.0)
        elif what < 0.95:
            found |= {message.body for message in other.poll(20, 0.02)}
            other.commit()
        else:
            other.close()
            other = None
    print(f"{cut.count} calls were interrupted")
    if other is not None:
        other.close()
    settle(one, sizes=[4])
    assert one.poll(timeout_s=0.05) == []
    one.commit()
    assert {at.queue_offset for at in one.committed().values()} == {count // 4}


def test_a_node_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older node ends the connection of a client that sends what it does not know."""
    known = api.decode_request

    def older(header: bytes) -> api.Request:
        request = known(header)
        if isinstance(request, api.Sharing):
            raise ProtocolError("not a request of the client API")
        return request

    node = SharedNode()
    monkeypatch.setattr("hastore.server.api.server.api.decode_request", older)
    try:
        with Consumer("t", [node.address], group="g", share=True) as consumer:
            with pytest.raises(ClientError, match="too old to share queues; upgrade the nodes"):
                consumer.poll(timeout_s=LIMIT_S)
    finally:
        node.stop()


def test_patterns_that_match_too_much_are_refused(
    shared: SharedNode, member: Callable[..., SharedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_SUBSCRIPTIONS", 3)
    for number in range(4):
        fill(shared, 1, f"many-{number}")
    with pytest.raises(ClientError, match=r"the patterns many-\* match 4 topics; at most 3"):
        member("many-*").poll(timeout_s=LIMIT_S)
