"""A Consumer over all groups of a cluster; a real ZooKeeper and real nodes."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hastore import Consumer, Message, Position, Producer
from hastore.client.consumer.cluster_consumer import ClusterConsumer
from hastore.errors import ClientError, PositionLostError, UnreachableError, UsageError
from tests.process.harness import Group, hastore, wait_until
from tests.registry.servers import registered

LIMIT_S = 120.0
Make = Callable[[str], Group]


@pytest.fixture
def make(tmp_path: pathlib.Path, servers: Any) -> Iterator[Make]:
    """Make a running group of one node."""
    with contextlib.ExitStack() as ends:

        def start(name: str) -> Group:
            (tmp_path / name).mkdir()
            group = Group(tmp_path / name, 1, master_role="ASYNC_MASTER", acks=0)
            group[1].write(group=name)
            return registered(ends.enter_context(group), servers)

        yield start


@pytest.fixture
def two_groups(make: Make) -> list[Group]:
    return [make("g0"), make("g1")]


def cluster(servers: Any) -> str:
    return f"{servers.registry}/test"


def send(group: Group, bodies: list[str], topic: str = "Orders", queue: int | None = None) -> None:
    with Producer(group.bootstrap) as producer:
        futures = [producer.send(topic, body.encode(), queue=queue) for body in bodies]
        assert all(one.result(LIMIT_S).status == "PUT_OK" for one in futures)


def named(group: str, numbers: range) -> list[str]:
    return [f"{group}-{n}" for n in numbers]


def read(consumer: Consumer, number: int, most: int = 500) -> list[Message]:
    """Return so many messages, in the order in which they came."""
    found: list[Message] = []

    def all_there() -> bool:
        found.extend(consumer.poll(most, timeout_s=0.2))
        return len(found) >= number

    wait_until(all_there, LIMIT_S, lambda: f"{len(found)} messages instead of {number}")
    assert len(found) == number
    return found


def texts(messages: list[Message]) -> list[str]:
    return [one.body.decode() for one in messages]


def check_order(messages: list[Message]) -> None:
    """Within each queue of a group the queue offsets follow one another."""
    last: dict[tuple[str | None, int], int] = {}
    for one in messages:
        key = one.cluster_group, one.queue_id
        assert one.queue_offset == last.get(key, one.queue_offset - 1) + 1, key
        last[key] = one.queue_offset
        assert one.body.decode().startswith(f"{one.cluster_group}-")


def test_all_groups_are_read_and_committed(two_groups: list[Group], servers: Any) -> None:
    for name, group in zip(("g0", "g1"), two_groups, strict=True):
        send(group, named(name, range(100)))
    with Consumer("Orders", cluster(servers), group="billing") as consumer:
        assert isinstance(consumer, ClusterConsumer)
        found = read(consumer, 200, most=30)
        check_order(found)
        assert set(texts(found)) == {*named("g0", range(100)), *named("g1", range(100))}
        assert consumer.groups == ("g0", "g1")
        consumer.commit()
        places = consumer.positions()
        assert set(places) == {(name, queue) for name in ("g0", "g1") for queue in range(4)}
        assert consumer.committed() == places
        assert consumer.lag() == dict.fromkeys(places, 0)
        assert {key: at.queue_offset for key, at in places.items()} == consumer.end_offsets()
        assert not consumer.poll(timeout_s=0.1)
        consumer.commit()  # again, harmless
    for name, group in zip(("g0", "g1"), two_groups, strict=True):
        send(group, named(name, range(100, 110)))
    with Consumer("Orders", cluster(servers), group="billing") as consumer:
        found = []
        for message in consumer:  # the position moves with each message
            found.append(message)
            if len(found) == 20:
                break
        check_order(found)
        assert set(texts(found)) == {*named("g0", range(100, 110)), *named("g1", range(100, 110))}
        consumer.commit()
        with Consumer("Orders", two_groups[0].bootstrap, group="billing") as alone:
            assert sum(at.queue_offset for at in alone.committed().values()) == 110
    assert not [one.name for one in threading.enumerate() if one.name.startswith("Cluster")]


def test_seek_pause_and_filters(two_groups: list[Group], servers: Any) -> None:
    for name, group in zip(("g0", "g1"), two_groups, strict=True):
        send(group, named(name, range(10)), queue=1)
    with Producer(two_groups[1].bootstrap) as producer:
        producer.send_sync("Orders", b"g1-red", queue=2, tags="red")
    with Consumer("Orders", cluster(servers), tags="red") as consumer:
        assert texts(read(consumer, 1)) == ["g1-red"]
    with Consumer("Orders", cluster(servers), start="latest") as consumer:
        wait_until(lambda: len(consumer.positions()) == 8, LIMIT_S, "not both are known")
        assert not consumer.poll(timeout_s=0.1)
        consumer.seek(("g1", 1), 7)
        assert consumer.position(("g1", 1)) == Position(7)
        assert texts(read(consumer, 3)) == named("g1", range(7, 10))
        consumer.seek_to_earliest()
        consumer.pause([("g1", 1), ("g0", 1)])
        assert consumer.paused == [("g0", 1), ("g1", 1)]
        assert texts(read(consumer, 1)) == ["g1-red"]
        consumer.resume()
        assert len(read(consumer, 20)) == 20 and consumer.paused == []
        consumer.seek_to_time(0)
        assert len(read(consumer, 21)) == 21
        consumer.seek_to_earliest()
        consumer.seek_to_latest()
        assert not consumer.poll(timeout_s=0.2)
        assert texts(consumer.in_group("g0").poll(timeout_s=0.1)) == []
        consumer.in_group("g0").seek(1, 9)
        assert texts(read(consumer, 1)) == ["g0-9"]
        consumer.seek(("g0", 1), 99)
        with pytest.raises(PositionLostError, match="^group g0: ") as lost:
            read(consumer, 1)
        assert lost.value.cluster_group == "g0" and lost.value.queue_id == 1
        send(two_groups[1], ["g1-on"], queue=1)
        got: list[str] = []

        def others_go_on() -> bool:
            with contextlib.suppress(PositionLostError):
                got.extend(texts(consumer.poll(timeout_s=0.2)))
            return got == ["g1-on"]

        wait_until(others_go_on, LIMIT_S, "a lost position of one group holds up the other")
        consumer.seek(("g0", 1), 10)
        assert not consumer.poll(timeout_s=0.1)
        with pytest.raises(UsageError, match="group g1: .* does not read queue 77$"):
            consumer.seek(("g1", 77), 0)
        with pytest.raises(UsageError, match="group g1: .* does not read queue 77$"):
            consumer.pause([("g0", 0), ("g1", 77)])
        assert consumer.paused == [], "a refused call leaves all as they are"


def test_an_outage_of_a_group_harms_no_other(two_groups: list[Group], servers: Any) -> None:
    with Consumer("Orders", cluster(servers), group="billing", timeout_s=2.0) as consumer:
        for name, group in zip(("g0", "g1"), two_groups, strict=True):
            send(group, named(name, range(10)))
        found = read(consumer, 20)
        two_groups[0][1].kill()
        send(two_groups[1], named("g1", range(10, 500)))
        found += read(consumer, 490, most=50)
        with pytest.raises(UnreachableError, match=r"group g0: .*the other groups are committed"):
            consumer.commit()
        with Consumer("Orders", two_groups[1].bootstrap, group="billing") as alone:
            assert sum(at.queue_offset for at in alone.committed().values()) == 500
        with pytest.raises(UnreachableError, match=r"group g0: .*use consumer.in_group\(NAME\)"):
            consumer.committed()
        assert consumer.in_group("g1").committed()
        two_groups[0][1].start()
        send(two_groups[0], named("g0", range(10, 20)))
        found += read(consumer, 10)
        check_order(found)
        assert len(set(texts(found))) == 520
        wait_until(lambda: _commits(consumer), LIMIT_S, "g0 is back, and takes no commit")
        assert sum(at.queue_offset for at in consumer.committed().values()) == 520
        two_groups[0][1].kill()
        consumer.commit()  # nothing has moved since: that a group is down is no error


def _commits(consumer: Consumer) -> bool:
    with contextlib.suppress(UnreachableError):
        consumer.commit()
        return True
    return False


def test_a_group_that_is_down_from_the_start(two_groups: list[Group], servers: Any) -> None:
    for name, group in zip(("g0", "g1"), two_groups, strict=True):
        send(group, named(name, range(10)))
    with Consumer("Orders", cluster(servers)) as consumer:
        assert len(read(consumer, 20)) == 20, "both are in ZooKeeper"
    two_groups[0][1].kill()
    with Consumer("Orders", cluster(servers), group="billing", timeout_s=1.0) as consumer:
        found = read(consumer, 10)
        assert {one.cluster_group for one in found} == {"g1"}
        consumer.commit()  # nothing has come of g0
        two_groups[0][1].start()
        found += read(consumer, 10)
        check_order(found)
        wait_until(lambda: _commits(consumer), LIMIT_S, "g0 takes no commit")
        assert sum(at.queue_offset for at in consumer.committed().values()) == 20


def test_a_later_group_is_read_from_its_beginning(
    two_groups: list[Group], servers: Any, make: Make
) -> None:
    with Consumer("Orders", cluster(servers), group="billing", start="latest") as consumer:
        wait_until(lambda: len(consumer.positions()) == 8, LIMIT_S, "not both are known")
        third = make("g2")
        send(third, named("g2", range(10)))
        found = read(consumer, 10)
        check_order(found)
        assert texts(found) and {one.cluster_group for one in found} == {"g2"}
        assert "g2" in consumer.groups
        consumer.commit()
        third[1].stop()
        with servers.client() as zookeeper:
            zookeeper.delete("/hastore/test/g2", recursive=True)
        wait_until(
            lambda: consumer.poll(timeout_s=0.1) == [] and "g2" not in consumer.groups,
            LIMIT_S, "a group that has gone is still read",
        )  # fmt: skip


def test_a_topic_of_one_group_only(two_groups: list[Group], servers: Any) -> None:
    done = hastore("topics", "create", "Only", "--bootstrap", ",".join(two_groups[1].bootstrap))
    assert done.returncode == 0, done.stderr
    with Consumer("Only", cluster(servers)) as consumer:
        groups = consumer._core._groups
        wait_until(lambda: groups.holding("Only") == ["g1"], LIMIT_S, "it is not learnt")
    with Consumer("Only", cluster(servers)) as consumer:
        send(two_groups[1], ["g1-0"], topic="Only")
        assert texts(read(consumer, 1)) == ["g1-0"] and consumer.groups == ("g1",)


def test_waiting_costs_nothing_and_close_ends_it(two_groups: list[Group], servers: Any) -> None:
    """While nothing comes, a poll does not look again and again; `close` ends it at once."""
    with Consumer("Orders", cluster(servers)) as consumer:
        wait_until(lambda: len(consumer.positions()) == 8, LIMIT_S, "not both are known")
        consumer.poll(timeout_s=0.5)
        rounds: dict[str, int] = defaultdict(int)
        wait = consumer._requester.transport.wait

        def counted(timeout_s: float) -> Any:
            rounds["all"] += 1
            return wait(timeout_s)

        consumer._requester.transport.wait = counted  # type: ignore[method-assign]
        before = time.thread_time()
        assert consumer.poll(timeout_s=5.0) == []
        used = time.thread_time() - before
        print(f"{rounds['all']} rounds, {used * 1000:.1f} ms of CPU in 5 s")
        # Eight queues whose long polls end each second, each in two rounds at most, and timers.
        assert rounds["all"] < 250
        results: list[Any] = []
        waiting = threading.Thread(target=lambda: results.append(consumer.poll(timeout_s=LIMIT_S)))
        waiting.start()
        wait_until(lambda: consumer._in_call, LIMIT_S, "it does not poll")
        consumer.close()
        waiting.join(LIMIT_S)
        assert results == [[]]
        with pytest.raises(ClientError, match="is closed"):
            consumer.poll()


def test_what_is_refused(servers: Any) -> None:
    where = cluster(servers)
    for wrong, text in (
        ({"share": True, "group": "g"}, "zk://"),
        ({"share": 1}, "share: expected True or False"),
        ({"queues": [1]}, "queues: each group of a cluster has its own; leave `queues` out, or"),
        ({"auto_commit_s": 1.0}, "are for consumers with share=True"),
        ({"start": "never"}, "start: "),
        ({"tags": "a", "sql": "b = 1"}, "."),
    ):
        with pytest.raises(UsageError, match=text):
            Consumer("Orders", where, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="bootstrap: "):
        Consumer("Orders", "zk://a:1/a b")
    with Consumer("Orders", f"{servers.registry}/nowhere", group="g", timeout_s=1.0) as consumer:
        assert consumer.poll(timeout_s=0.2) == [] and consumer.groups == ()
        for call in (consumer.commit, consumer.positions, consumer.lag):
            with pytest.raises(UnreachableError, match="/hastore/nowhere has no groups"):
                call()
        for key in (3, "g0", ("g0",), (1, 1)):
            with pytest.raises(UsageError, match=r"queue: .*or use consumer.in_group\(NAME\)"):
                consumer.seek(key, 0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="queues: each group has its own"):
            consumer.pause([1])
        with pytest.raises(UsageError, match=r"source: each group has its own"):
            assert consumer.source


def test_an_unknown_group_and_no_consumer_group(two_groups: list[Group], servers: Any) -> None:
    with Consumer("Orders", cluster(servers)) as consumer:
        wait_until(lambda: len(consumer.positions()) == 8, LIMIT_S, "not both are known")
        with pytest.raises(UsageError, match="no group 'g7' is read; those that are: g0, g1"):
            consumer.in_group("g7")
        with pytest.raises(UsageError, match="no group 'g7'"):
            consumer.seek(("g7", 0), 0)  # type: ignore[arg-type]
        for call in (consumer.commit, consumer.committed):
            with pytest.raises(UsageError, match="a commit needs a group's name"):
                call()
