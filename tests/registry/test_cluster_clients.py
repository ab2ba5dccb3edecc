"""A Producer over all groups of a cluster; a real ZooKeeper and real nodes."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest

from hastore import Admin, Consumer, Producer
from hastore.addresses import is_cluster_address, parse_cluster_address
from hastore.client.producer.cluster_producer import ClusterProducer
from hastore.client.producer.preparer import NO_PROPERTIES
from hastore.config.model import Role
from hastore.errors import (
    ClientError,
    MessageIllegalError,
    NotStoredError,
    UnreachableError,
    UsageError,
)
from hastore.registry.entry import NodeEntry
from hastore.spark.options.source_options import Patience
from hastore.spark.read.clusters import ClusterBackend
from tests.process.harness import Group, hastore, wait_until

LIMIT_S = 120.0


def bodies(group: Group, topic: str) -> list[bytes]:
    """Return all messages of a topic in one group."""
    found: list[bytes] = []
    with Consumer(topic, group.bootstrap) as consumer, Admin(
        group.bootstrap, timeout_s=LIMIT_S
    ) as admin:
        while True:
            some = [one.body for one in consumer.poll(timeout_s=0.3)]
            found += some
            queues = {} if some else admin.topics().get(topic, {})
            if not some and len(found) >= sum(end - first for first, end in queues.values()):
                return found


def counts(groups: list[Group], topic: str) -> list[int]:
    return [len(bodies(group, topic)) for group in groups]


def cluster(servers: Any) -> str:
    return f"{servers.registry}/test"


def test_the_address() -> None:
    assert is_cluster_address("zk://a:1,b:2/shop") and not is_cluster_address("zk://a:1/shop/g0")
    assert parse_cluster_address("zk://a:1,b:2/shop") == ("a:1,b:2", "shop")
    for wrong in ("zk://a:1/a b", "zk://a/shop", "zk:///shop"):
        with pytest.raises(UsageError, match="bootstrap: "):
            Producer(wrong)


def test_messages_spread_over_the_groups_that_have_the_topic(
    two_groups: list[Group], servers: Any
) -> None:
    with Producer(cluster(servers)) as producer:
        assert isinstance(producer, ClusterProducer)
        wait_until(lambda: producer.groups == ("g0", "g1"), LIMIT_S, "not both are known")
        for name in producer.groups:
            assert producer.group(name).send_sync("Ready", name.encode()).status == "PUT_OK"
        assert [bodies(group, "Ready") for group in two_groups] == [[b"g0"], [b"g1"]]

        for n in range(100):
            producer.send("Orders", b"%d" % n)
        assert producer.flush(LIMIT_S)
        found = [bodies(group, "Orders") for group in two_groups]
        assert sorted(map(int, sum(found, []))) == list(range(100))
        assert [len(one) for one in found] == [50, 50]

        for n in range(100):
            producer.send("Keyed", b"%d" % (n % 10), key=f"k{n % 10}")
        assert producer.flush(LIMIT_S)
        found = [bodies(group, "Keyed") for group in two_groups]
        assert not set(found[0]) & set(found[1]) and all(found), "each key is in one group"
        assert len(sum(found, [])) == 100

        done = hastore("topics", "create", "Only", "--bootstrap", ",".join(two_groups[1].bootstrap))
        assert done.returncode == 0, done.stderr
        wait_until(lambda: producer._groups.with_topic("Only") == ["g1"], LIMIT_S, "not learnt")
        for n in range(10):
            producer.send("Only", b"%d" % n)
        assert len(producer.send_batch("Only", [b"a", b"b"]).result()) == 2
        assert producer.flush(LIMIT_S) and counts(two_groups, "Only") == [0, 12]

        with pytest.raises(UsageError, match="each group has its own"):
            producer.send("Orders", b"x", queue=1)
        with pytest.raises(UsageError, match="topic: expected a str, got"):
            producer.send(["Orders"], b"x")  # type: ignore[arg-type]
        for wrong in (5, "\ud800", b"\xff"):
            with pytest.raises(UsageError, match="key: expected a str, or bytes of UTF-8, got"):
                producer.send("Orders", b"x", key=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="of one group; make a Producer of zk://"):
            producer.transaction("Orders", b"x")
        with pytest.raises(UsageError, match="transaction_group: a transaction is of one group"):
            Producer(cluster(servers), transaction_group="t")
        with pytest.raises(MessageIllegalError):
            producer.send("no topic!", b"x")
        with pytest.raises(UsageError, match="no group 'g7'; it has g0, g1"):
            producer.group("g7")
        assert producer.flush(1), "what was refused is not waited for"
    assert not [one.name for one in threading.enumerate() if one.name.startswith("Cluster")]


def test_an_outage_of_a_group_harms_nobody(two_groups: list[Group], servers: Any) -> None:
    """Each message is stored once, and none fails, while one group is killed and comes back."""
    with Producer(cluster(servers)) as producer:
        wait_until(lambda: producer.groups == ("g0", "g1"), LIMIT_S, "not both are known")
        for name in producer.groups:
            producer.group(name).send_sync("Ready", b"")
        futures = []
        stop = threading.Event()

        def send() -> None:
            n = 0
            while not stop.wait(0.002):
                futures.append(producer.send("Orders", b"%d" % n, key=f"{n}" if n % 2 else None))
                n += 1

        sender = threading.Thread(target=send)
        sender.start()
        wait_until(lambda: len(futures) > 300, LIMIT_S, "nothing is sent")
        two_groups[0][1].kill()
        since = len(futures)
        wait_until(lambda: len(futures) > since + 500, LIMIT_S, "the other group takes none")
        wait_until(
            lambda: sum(one.done() for one in futures[since:]) > 300, LIMIT_S, "none is settled"
        )
        two_groups[0][1].start()
        since = len(futures)
        wait_until(lambda: len(futures) > since + 300, LIMIT_S, "nothing is sent")
        stop.set()
        sender.join()
        assert producer.flush(LIMIT_S)
        failed = [one.exception() for one in futures if one.exception() is not None]
        assert not failed, failed[:3]
        stored = Counter(sum((bodies(group, "Orders") for group in two_groups), []))
        assert set(stored) == {b"%d" % n for n in range(len(futures))}
        assert max(stored.values()) == 1, "none is doubled"


def key_of(producer: ClusterProducer, name: str) -> str:
    """Return a key whose messages go to this group."""
    return next(key for key in map(str, range(100)) if producer._order("T", key, 0)[0] == name)


@contextlib.contextmanager
def ready_producer(servers: Any) -> Iterator[ClusterProducer]:
    """Yield a producer that has a connection to both groups' masters."""
    with Producer(cluster(servers)) as producer:
        assert isinstance(producer, ClusterProducer)
        wait_until(lambda: producer.groups == ("g0", "g1"), LIMIT_S, "not both are known")
        for name in producer.groups:
            producer.group(name).send_sync("Ready", b"")
        yield producer


def test_closing_lets_messages_move_as_they_were_given(
    two_groups: list[Group], servers: Any
) -> None:
    with ready_producer(servers) as producer:
        two_groups[0][1].kill()
        wait_until(lambda: producer.group("g0").master is None, LIMIT_S, "the end is not seen")
        body, pairs = bytearray(b"first"), [("a", "1")]
        future = producer.send(
            "T", body, key=key_of(producer, "g0"),
            properties=iter(pairs),  # type: ignore[arg-type]
        )  # fmt: skip
        body[:] = b"later"
        assert not future.done()
    assert future.result().status == "PUT_OK", "closing waits for it, also while it moves"
    with Consumer("T", two_groups[1].bootstrap) as consumer:
        (message,) = consumer.poll(timeout_s=LIMIT_S)
    assert (message.body, message.properties.get("a")) == (b"first", "1")


def test_what_cannot_move_waits_for_its_group(two_groups: list[Group], servers: Any) -> None:
    """For the delivery timeout, while another message leaves the group without a master."""
    with ready_producer(servers) as producer:
        group = producer.group("g0")
        two_groups[0][1].kill()
        wait_until(lambda: group.master is None, LIMIT_S, "the end is not seen")
        own = group.send("T", b"own", queue=0)
        batch = group.send_batch("T", [b"batch"])
        moves = producer.send("T", b"moves", key=key_of(producer, "g0"))
        assert moves.result(LIMIT_S).status == "PUT_OK"
        assert not own.done() and not batch.done()
        two_groups[0][1].start()
        assert own.result(LIMIT_S).status == "PUT_OK" and len(batch.result(LIMIT_S)) == 1
    assert bodies(two_groups[1], "T") == [b"moves"]


def test_closing_a_groups_producer_waits_for_its_messages_and_ends_nothing(
    two_groups: list[Group], servers: Any
) -> None:
    with Producer(cluster(servers), delivery_timeout_s=3.0) as producer:
        wait_until(lambda: producer.groups == ("g0", "g1"), LIMIT_S, "not both are known")
        for name in producer.groups:
            with producer.group(name) as one:
                future = one.send("T", b"own", queue=0)
            assert future.done() and future.result().status == "PUT_OK"
            assert producer.group(name) is one
            assert one.send_sync("T", b"again", queue=0).status == "PUT_OK"
        assert producer.send("T", b"x").result(LIMIT_S).status == "PUT_OK"
        assert len(producer.send_batch("T", [b"y"]).result(LIMIT_S)) == 1
    one.close()
    with pytest.raises(ClientError, match="is closed"):
        one.send("T", b"late", queue=0)


def test_a_groups_producer_that_has_ended_is_no_reason_to_try_for_ever(
    two_groups: list[Group], servers: Any
) -> None:
    with ready_producer(servers) as producer:
        for name in producer.groups:
            producer._producers[name].end(0.0)
        for send in (producer.send, producer.send_batch):
            with pytest.raises(ClientError, match="is closed"):
                send("T", b"x" if send == producer.send else [b"x"])  # type: ignore[operator]


def test_flush_waits_for_earlier_messages_only_and_not_for_others_to_share_a_frame(
    two_groups: list[Group], servers: Any
) -> None:
    with ready_producer(servers) as producer:
        keys = [key_of(producer, name) for name in ("g0", "g1")]
        for group in two_groups:
            group[1].pause()
        first = producer.send("T", b"first", key=keys[0])
        flushed: list[bool] = []
        flushing = threading.Thread(target=lambda: flushed.append(producer.flush(20.0)))
        flushing.start()
        wait_until(lambda: producer._settled.sleepers, LIMIT_S, "flush does not wait")
        second = producer.send("T", b"second", key=keys[1])
        two_groups[0][1].resume()
        flushing.join()
        assert flushed == [True] and first.done() and not second.done()
        two_groups[1][1].resume()
    with Producer(cluster(servers), linger_ms=25_000.0) as producer:
        future = producer.send("T", b"lingers")
        assert producer.flush(20.0) and future.done()


def test_a_producer_that_is_dropped_says_so_and_ends_its_threads(
    two_groups: list[Group], servers: Any
) -> None:
    producer = Producer(cluster(servers))
    assert producer.send_sync("T", b"x").status == "PUT_OK"
    with pytest.warns(ResourceWarning) as warned:
        del producer
        gc.collect()
    assert any(f"Producer at {cluster(servers)} was not closed" in str(one) for one in warned)
    wait_until(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("Cluster")],
        LIMIT_S,
        "a thread is left",
    )


FORKS = """
import os, sys
from hastore import Producer
from hastore.errors import OutcomeUnknown

with Producer(sys.argv[1]) as producer:
    producer.send_sync("T", b"x")
    os.kill(int(sys.argv[2]), 19)
    os.kill(int(sys.argv[3]), 19)
    future = producer.send("T", b"y")
    child = os.fork()
    if not child:
        try:
            future.result(20)
        except OutcomeUnknown as failure:
            os._exit(0 if "forked" in str(failure) else 2)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.kill(int(sys.argv[2]), 18)
    os.kill(int(sys.argv[3]), 18)
    assert future.result(60).status == "PUT_OK"
sys.exit(code)
"""


def test_in_a_forked_child_a_future_ends(two_groups: list[Group], servers: Any) -> None:
    nodes = [str(group[1].pid) for group in two_groups]
    command = [sys.executable, "-c", FORKS, cluster(servers), *nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def test_an_object_that_a_node_has_left_gives_no_group_the_messages_of_another(
    two_groups: list[Group], servers: Any
) -> None:
    """The address of a former node of g0 is now that of g1's node; g0 is down."""
    for name, group in zip(("g0", "g1"), two_groups, strict=True):
        with Producer(group.bootstrap) as producer:
            producer.send("Orders", name.encode())
    at = two_groups[1][1].settings["nodes"][1]
    left = NodeEntry(role=Role.SLAVE, api=at["api"], ha=at["ha"], http=at["http"], node=7)
    with servers.client() as zookeeper:
        zookeeper.create("/hastore/test/g0/7", left.encode())
    two_groups[0][1].stop()

    def is_refused(client: Any) -> bool:
        return list(client.cluster.refusals) == [at["api"]]

    patience = Patience(1.0, 1.0)
    address = parse_cluster_address(cluster(servers))
    with ClusterBackend(address, True, None, patience) as backend, pytest.raises(UnreachableError):
        backend.available(["Orders"])
    with Producer(cluster(servers)) as producer, Consumer("Orders", cluster(servers)) as consumer:
        own: Any = producer.group("g0")
        sent = own._send("Mine", b"for g0", None, None, NO_PROPERTIES, 0, None)
        own._wake()
        wait_until(lambda: is_refused(own._driver.core), LIMIT_S, "the other group's node is used")
        read: list[tuple[str | None, bytes]] = []

        def poll() -> bool:
            read.extend((one.cluster_group, one.body) for one in consumer.poll(timeout_s=0.1))
            member = cast(Any, consumer)._core.members.get("g0")
            return member is not None and is_refused(member.requester) and bool(read)

        wait_until(poll, LIMIT_S, "the other group's node is read as one of g0")
        assert read == [("g1", b"g1")]
        two_groups[0][1].start()
        assert sent.result(LIMIT_S).status == "PUT_OK"
        wait_until(lambda: poll() and len(read) == 2, LIMIT_S, "the messages of g0 are hidden")
        assert sorted(read) == [("g0", b"g0"), ("g1", b"g1")]
    assert [bodies(group, "Mine") for group in two_groups] == [[b"for g0"], []]


def test_without_any_group(two_groups: list[Group], servers: Any) -> None:
    with contextlib.ExitStack() as ends:
        producer = ends.enter_context(Producer(cluster(servers), delivery_timeout_s=3.0))
        wait_until(lambda: producer.groups == ("g0", "g1"), LIMIT_S, "not both are known")
        for name in producer.groups:
            producer.group(name).send_sync("Ready", b"")
        for group in two_groups:
            group[1].kill()
        with pytest.raises((UnreachableError, NotStoredError)):
            producer.send("Orders", b"x").result(LIMIT_S)
        with pytest.raises((UnreachableError, NotStoredError)):
            producer.send("Orders", b"x", key="k").result(LIMIT_S)
        assert producer.flush(1)
    with Producer(f"{servers.registry}/nowhere", delivery_timeout_s=1.0) as producer:
        with pytest.raises(UnreachableError, match="/hastore/nowhere has no groups in ZooKeeper"):
            producer.send("Orders", b"x")
