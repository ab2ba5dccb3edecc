"""The consumer against real API servers: order, limits, positions, other replicas."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable

import pytest

from hastore import Admin, Consumer, Message, Position, Producer, aio
from hastore.client.consumer import fetcher, new_queues
from hastore.errors import (
    CorruptRecordError,
    NotStoredError,
    PositionLostError,
    UnreachableError,
    UsageError,
)
from hastore.store.derived.contract import Dispatched
from tests.client.conftest import Node, introduce


def fill(node: Node, count: int, topic: str = "t", first: int = 0) -> None:
    with Producer([node.address]) as producer:
        for i in range(first, first + count):
            producer.send(topic, b"%d" % i, key=f"k{i}", queue=i % 4)
        assert producer.flush(60)


def read(consumer: Consumer, count: int, timeout_s: float = 60.0) -> list[Message]:
    found: list[Message] = []
    end = time.monotonic() + timeout_s
    while len(found) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} came"
        found += consumer.poll(timeout_s=0.2)
    return found


def test_everything_once_and_each_queue_in_order(node: Node) -> None:
    fill(node, 2_000)
    with Consumer("t", [node.address], max_bytes=5_000) as consumer:
        found = read(consumer, 2_000)
        assert consumer.poll(timeout_s=0.05) == []
    assert sorted(int(m.body) for m in found) == list(range(2_000))
    for queue in range(4):
        assert [m.queue_offset for m in found if m.queue_id == queue] == list(range(500))


def test_a_message_has_all_its_parts(node: Node) -> None:
    with Producer([node.address]) as producer:
        result = producer.send_sync("t", b"b", key="k", tags="x", properties=[("p", "")], queue=1)
    with Consumer("t", [node.address]) as consumer:
        (message,) = read(consumer, 1)
    assert (message.body, message.key, message.tags) == (b"b", "k", "x")
    assert message.properties["p"] == ""
    assert message.message_id == result.msg_id
    assert (message.queue_id, message.queue_offset, message.offset) == (1, 0, 0)
    assert message.next_position == Position(1, 65537, 0)
    assert abs(message.store_timestamp_ms - time.time() * 1000) < 60_000


def test_poll_is_bounded_by_count_and_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "WAIT_MS", 60_000)
    monkeypatch.setattr(fetcher, "REFRESH_MS", 60_000.0)
    fill(node, 40)
    with Consumer("t", [node.address], queues=[2]) as consumer:
        assert len(consumer.poll(3)) == 3
        assert consumer.position(2).queue_offset == 3
        assert len(consumer.poll(100)) == 7
        begin = time.monotonic()
        assert consumer.poll(timeout_s=0.2) == []
        assert 0.15 < time.monotonic() - begin < 30.0


def test_later_messages_are_delivered_at_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "WAIT_MS", 60_000)
    with Consumer("t", [node.address]) as consumer:
        assert consumer.poll(timeout_s=0.3) == []
        threading.Timer(0.2, fill, (node, 1)).start()
        begin = time.monotonic()
        assert len(consumer.poll(timeout_s=120)) == 1
        assert time.monotonic() - begin < 30.0  # not only when the long poll ends


def test_nothing_beyond_the_readable_offset(node: Node) -> None:
    fill(node, 8)
    node.backend.store.confirmed = node.backend.store.units["t", 3][0][0]
    with Consumer("t", [node.address]) as consumer:
        assert sorted(int(m.body) for m in read(consumer, 3)) == [0, 1, 2]
        assert consumer.poll(timeout_s=0.1) == []
        node.backend.store.confirmed = None
        node.backend.moved()
        assert len(read(consumer, 5)) == 5


def test_seeking(node: Node) -> None:
    fill(node, 40)
    with Consumer("t", [node.address]) as consumer:
        consumer.seek_to_latest()
        assert consumer.poll(timeout_s=0.1) == []
        consumer.seek(1, 8)
        assert [int(m.body) for m in read(consumer, 2)] == [33, 37]
        consumer.seek_to_earliest()
        assert len(read(consumer, 40)) == 40
        consumer.seek_to_time(int(time.time() * 1000) + 60_000)
        assert consumer.poll(timeout_s=0.1) == []
        consumer.seek_to_time(0)
        assert len(read(consumer, 40)) == 40
        with pytest.raises(UsageError):
            consumer.seek(9, 0)
        with pytest.raises(UsageError):
            consumer.seek(0, -1)


def test_start_at_the_latest(node: Node) -> None:
    fill(node, 8)
    with Consumer("t", [node.address], start="latest") as consumer:
        assert consumer.poll(timeout_s=0.1) == []
        fill(node, 4, first=8)
        assert sorted(int(m.body) for m in read(consumer, 4)) == [8, 9, 10, 11]


def test_a_group_at_the_latest_reads_queues_that_came_meanwhile(node: Node) -> None:
    fill(node, 8)
    with Consumer("t", [node.address], group="g", start="latest") as consumer:
        consumer.commit()
    with Admin([node.address]) as admin:
        admin.set_topic("t", queues=6)
    with Producer([node.address]) as producer:
        for queue in (4, 5):
            producer.send_sync("t", b"%d" % queue, queue=queue)
    with Consumer("t", [node.address], group="g", start="latest") as consumer:
        assert sorted(int(m.body) for m in read(consumer, 2)) == [4, 5]
    with Consumer("t", [node.address], group="g", start="latest", queues=[4, 5]) as consumer:
        assert consumer.lag() == {4: 0, 5: 0}, "its own queues are new to the group"


def test_only_the_master_says_that_a_group_begins_at_the_latest(
    make_node: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    """A slave that lags has the messages, and not the group's first commit."""
    master, slave = make_node(1), make_node(2)
    fill(master, 8)
    fill(slave, 8)
    slave.backend.writable = False
    with Consumer("t", [master.address], group="g") as consumer:
        assert len(consumer.poll(1, 60)) == 1
        consumer.commit()
    introduce(master, slave)
    master.stop()
    with Consumer("t", [slave.address], group="g", start="latest") as consumer:
        # Said also before the time of the first question is over: the slave has answered.
        while consumer._core._not_prepared is None:
            assert consumer.poll(timeout_s=0.05) == []
        assert "only the master can say" in str(consumer._core._not_prepared)
    with Consumer("t", [slave.address], group="g", start="latest", timeout_s=0.5) as consumer:
        while "waits for the master" not in caplog.text:
            assert consumer.poll(timeout_s=0.1) == []
        with pytest.raises(UnreachableError, match="only the master can say .* no writable master"):
            consumer.positions()
        master.restart()
        assert len(read(consumer, 7)) == 7
        assert sum(each.queue_offset for each in consumer.positions().values()) == 8
    assert caplog.text.count("waits for the master") == 1


@pytest.mark.parametrize("begins_before_the_topic", [True, False])
def test_queues_that_a_topic_gets_later_are_read_too(
    node: Node, monkeypatch: pytest.MonkeyPatch, begins_before_the_topic: bool
) -> None:
    monkeypatch.setattr(new_queues, "LOOK_MS", 100.0)
    if not begins_before_the_topic:
        fill(node, 4)
    with Consumer("t", [node.address], group="g", start="latest") as consumer:
        assert consumer.poll(timeout_s=0.1) == [] and len(consumer.positions()) == 4
        with Admin([node.address]) as admin:
            (admin.create_topic if begins_before_the_topic else admin.set_topic)("t", queues=16)
        with Producer([node.address]) as producer:
            for queue in range(16):
                producer.send_sync("t", b"%d" % queue, queue=queue)
        assert sorted(int(m.body) for m in read(consumer, 16)) == list(range(16))
        consumer.commit()
        assert len(consumer.committed()) == 16


def test_the_lag_has_queues_that_have_just_come(node: Node) -> None:
    fill(node, 4)
    with Consumer("t", [node.address]) as consumer:
        read(consumer, 4)
        consumer.pause()
        with Admin([node.address]) as admin:
            admin.set_topic("t", queues=5)
        with Producer([node.address]) as producer:
            producer.send_sync("t", b"4", queue=4)
        assert consumer.lag() == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1}
        assert consumer.poll(timeout_s=0.1) == [], "all queues are paused"
        consumer.resume()
        assert [m.body for m in read(consumer, 1)] == [b"4"]


def test_a_topic_or_a_queue_that_does_not_exist_is_named_once(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    with Consumer("t", [node.address]) as consumer:
        assert consumer.poll(timeout_s=0.1) == consumer.poll(timeout_s=0.1) == []
    fill(node, 3)
    with Consumer("t", [node.address], queues=[3, 9]) as consumer:
        assert consumer.poll(timeout_s=0.1) == consumer.poll(timeout_s=0.1) == []
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "topic t does not exist yet; it is read once it does",
        "topic t has 4 queues, not yet queue 9; that is read once it exists",
    ]


def test_queues_that_come_back_go_on_where_the_group_is(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_queues, "LOOK_MS", 100.0)
    with Admin([node.address]) as admin:
        admin.create_topic("t", queues=6)
        with Producer([node.address]) as producer:
            for number in range(60):
                producer.send_sync("t", b"%d" % number, queue=number % 6)
        with Consumer("t", [node.address], group="g") as consumer:
            assert len(read(consumer, 60)) == 60
            consumer.commit()
        admin.set_topic("t", read_queues=4, write_queues=6)
        with Consumer("t", [node.address], group="g") as consumer:
            assert consumer.poll(timeout_s=0.1) == []
            admin.set_topic("t", read_queues=6, write_queues=6)
            with Producer([node.address]) as producer:
                producer.send_sync("t", b"60", queue=5)
            assert [one.body for one in read(consumer, 1)] == [b"60"]
            consumer.commit()
            assert consumer.poll(timeout_s=0.1) == [] and len(consumer.committed()) == 6


def test_iteration_ends_with_close(node: Node) -> None:
    fill(node, 10)
    consumer = Consumer("t", [node.address])
    threading.Timer(0.5, consumer.close).start()
    assert len(list(consumer)) == 10


def test_committed_positions_are_where_the_next_one_starts(node: Node) -> None:
    fill(node, 40)
    with Consumer("t", [node.address], group="g") as consumer:
        first = consumer.poll(15)
        consumer.commit()
        assert consumer.committed() == consumer.positions()
    with Consumer("t", [node.address], group="g") as consumer:
        rest = read(consumer, 25)
    assert sorted(int(m.body) for m in first + rest) == list(range(40))
    with Consumer("t", [node.address]) as nobody, pytest.raises(UsageError):
        nobody.commit()


def test_a_commit_that_no_node_takes(make_node: Callable[..., Node]) -> None:
    slave = make_node(2, writable=False)
    with Consumer("t", [slave.address], group="g", timeout_s=0.4) as consumer:
        with pytest.raises(UnreachableError, match="this node is a slave"):
            consumer.commit()
    slave.backend.writable = True
    slave.backend.unconfirmable = "nobody in sync"
    with Consumer("t", [slave.address], group="g", timeout_s=0.4) as consumer:
        with pytest.raises(NotStoredError, match="nobody in sync"):
            consumer.commit()


class TestLost:
    def cut(self, node: Node, group: str, **options: object) -> Consumer:
        """A consumer that has read ten messages, four of which a failover then cut away."""
        with Producer([node.address]) as producer:
            for i in range(10):
                producer.send_sync("t", b"%d" % i, queue=0)
        consumer = Consumer("t", [node.address], queues=[0], **options)  # type: ignore[arg-type]
        assert len(read(consumer, 10)) == 10
        units = node.backend.store.units["t", 0]
        node.backend.entries = [(65537, 0), (131074, units[6][0])]
        return consumer

    def test_an_error_that_names_the_common_point(self, node: Node) -> None:
        consumer = self.cut(node, "g")
        with pytest.raises(PositionLostError, match="6 is still valid") as caught:
            read(consumer, 1)
        assert (caught.value.topic, caught.value.queue_id) == ("t", 0)
        with pytest.raises(PositionLostError):
            consumer.poll()
        assert isinstance(caught.value.common, Position)
        consumer.seek(0, caught.value.common)
        assert [m.body for m in read(consumer, 4)] == [b"6", b"7", b"8", b"9"]
        consumer.close()

    @pytest.mark.parametrize(("policy", "count"), [("common", 4), ("earliest", 10)])
    def test_policies(self, node: Node, policy: str, count: int) -> None:
        consumer = self.cut(node, "g", on_lost=policy)
        assert len(read(consumer, count)) == count
        consumer.close()

    def test_the_latest(self, node: Node) -> None:
        consumer = self.cut(node, "g", on_lost="latest")
        assert consumer.poll(timeout_s=1.5) == []  # the long poll ends within that time
        with Producer([node.address]) as producer:
            producer.send_sync("t", b"new", queue=0)
        assert [m.body for m in read(consumer, 1)] == [b"new"]
        consumer.close()

    def test_beyond_the_end(self, node: Node) -> None:
        fill(node, 4)
        with Consumer("t", [node.address], queues=[0]) as consumer:
            consumer.seek(0, 99)
            with pytest.raises(PositionLostError, match="beyond the end"):
                read(consumer, 1)


def test_slaves_are_read_first_and_the_master_when_none_is_left(pair: tuple[Node, Node]) -> None:
    master, slave = pair
    fill(master, 20)
    with Consumer("t", [master.address]) as consumer:
        read(consumer, 20)
        slave_known = time.monotonic() + 60
        while consumer.source != slave.address and time.monotonic() < slave_known:
            consumer._core.fetcher._switch_replica()
            consumer.seek_to_earliest()
            consumer.poll(timeout_s=0.1)
        assert consumer.source == slave.address
        slave.stop()
        fill(master, 20, first=20)
        consumer.seek_to_earliest()
        assert len(read(consumer, 40)) == 40
        assert consumer.source == master.address
    slave.restart()


def test_a_stalled_replica_is_replaced(make_node: Callable[..., Node]) -> None:
    master, slave = make_node(1), make_node(2, writable=False)
    introduce(master, slave)
    fill(master, 20)
    with Consumer("t", [slave.address, master.address]) as consumer:
        assert len(read(consumer, 20, 10)) == 20  # the slave is empty and stays so


def test_what_the_master_cannot_look_for_an_empty_slave_does_not_deny(
    make_node: Callable[..., Node],
) -> None:
    master, slave = make_node(1), make_node(2, writable=False)
    introduce(master, slave)
    fill(master, 1)
    master.backend.store.unread = [Dispatched(0, 100, "t", 0, 0, 0, 0, 0, b"")]
    master.backend.store.replay_problem = "replay stopped"
    with Admin([master.address, slave.address], timeout_s=60) as admin:
        with pytest.raises(NotStoredError, match="BUSY: replay has come to offset 0, .*stopped"):
            admin.query_key("t", "k7")
        fill(slave, 8)
        (found,) = admin.query_key("t", "k7")
        assert found.body == b"7"


def test_admin_asks_all(pair: tuple[Node, Node]) -> None:
    master, slave = pair
    fill(master, 12)
    with Admin([master.address], timeout_s=60) as admin:
        assert [info.node for info in admin.status()] == [1, 2]
        assert [info.role for info in admin.status()] == ["SYNC_MASTER", "SLAVE"]
        assert admin.topics() == {"t": dict.fromkeys(range(4), (0, 3))}
        (found,) = admin.query_key("t", "k7")
        assert found.body == b"7"
        again = admin.query_message_id(found.message_id)
        assert again is not None and again.body == b"7"
        assert admin.query_message_id("7F000001" + "00002A9F" + "0" * 15 + "1") is None
        assert admin.query_key("t", "nothing") == []
        with pytest.raises(UsageError):
            admin.query_message_id("zz")
        slave.stop()
        assert [info.node for info in admin.status()] == [1]
    slave.restart()


def test_a_query_reads_from_another_node_what_is_damaged_at_the_master(
    make_node: Callable[..., Node],
) -> None:
    master, slave = make_node(1), make_node(2, writable=False)
    introduce(master, slave)
    fill(master, 12)
    store, other = master.backend.store, slave.backend.store
    with Admin([master.address], timeout_s=60) as admin:
        (whole,) = admin.query_key("t", "k7")
        store.bad = {whole.offset}  # the slave has nothing yet: it lags
        for ask in (lambda: admin.query_key("t", "k7"),
                    lambda: admin.query_message_id(whole.message_id)):  # fmt: skip
            with pytest.raises(CorruptRecordError, match=f"offset {whole.offset}"):
                ask()
        found = admin.query_key("t", "k3")
        assert [one.body for one in found] == [b"3"] and found.damaged == [whole.offset]
        slave.backend.store = copy.copy(store)
        slave.backend.store.bad = set()
        found = admin.query_key("t", "k7")
        assert [one.body for one in found] == [b"7"] and found.damaged == []
        again = admin.query_message_id(whole.message_id)
        assert again is not None and again.body == b"7"
        found = admin.query_key("t", "k3")
        assert [one.body for one in found] == [b"3"] and found.damaged == []
        slave.backend.store = other


def test_searches_that_a_node_cut_short_say_so(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    fill(node, 12)
    with Admin([node.address], timeout_s=60) as admin, Consumer("t", [node.address]) as consumer:
        whole = admin.query_key("t", "k7")
        assert [each.body for each in whole] == [b"7"] and whole.cut_ms is None
        node.backend.store.cut_ms, node.backend.store.time_spent = 1_700_000_000_123, True
        assert admin.query_key("t", "k7").cut_ms == 1_700_000_000_123
        assert admin.query_key("t", "no").cut_ms == 1_700_000_000_123
        consumer.seek_to_time(1)
    warned = [each.getMessage() for each in caplog.records if "cut short" in each.getMessage()]
    assert len(warned) == 4 and "read from queue offset 0 on" in warned[0]


def test_admin_without_nodes() -> None:
    with Admin(["tcp://127.0.0.1:9"], timeout_s=0.3) as admin, pytest.raises(UnreachableError):
        admin.status()


def test_the_same_for_asyncio(node: Node) -> None:
    async def main() -> None:
        async with aio.Producer([node.address]) as producer:
            sent = await asyncio.gather(*(producer.send("t", b"%d" % i) for i in range(100)))
            assert len({r.offset for r in sent}) == 100
            assert len(await producer.send_batch("t", [b"a", b"b"])) == 2
        async with aio.Consumer("t", [node.address], group="g") as consumer:
            found = []
            async for message in consumer:
                found.append(message.body)
                if len(found) == 102:
                    break
            await consumer.commit()
            assert sum(p.queue_offset for p in (await consumer.committed()).values()) == 102
        async with aio.Admin([node.address]) as admin:
            assert (await admin.status())[0].node == 1

    asyncio.run(main())
