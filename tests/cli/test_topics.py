"""`hastore topics`, and the calls of Admin behind it, with real nodes."""

import asyncio
import json

import pytest

from hastore import aio
from hastore.client import Admin, Consumer, Producer
from hastore.errors import ForbiddenError, MessageIllegalError, UsageError
from hastore.record.topic_records import TopicConfig
from tests.cli.kit import hastore
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with Group(tmp_path_factory.mktemp("topics"), 2) as group:
        group.start()
        yield group


@pytest.fixture
def topics(pair):
    def run(*arguments):
        addresses = ",".join(node.api.removeprefix("tcp://") for node in (pair[1], pair[2]))
        return hastore("topics", *arguments, "--bootstrap", addresses)

    return run


def listed(topics):
    done = topics("list", "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["topic"]: row for row in rows}


def test_a_topic_is_created_changed_used_and_deleted(pair, topics):
    done = topics("create", "orders", "--queues", "9")
    assert done.returncode == 0, done.stderr
    assert "created topic orders: 9 queues, permission rw" in done.stderr
    assert topics("create", "orders").returncode != 0
    with Producer([pair[1].api], acks="all") as producer:
        sent = [producer.send_sync("orders", b"%d" % n) for n in range(9)]
        assert sorted(one.queue_id for one in sent) == list(range(9))
        with pytest.raises(MessageIllegalError, match="has 9 queues"):
            producer.send_sync("orders", b"", queue=9)
    wait_until(lambda: listed(topics)["orders"]["messages"] == 9, 60, "the master's replay")
    assert listed(topics)["orders"] == {
        "topic": "orders", "read_queues": 9, "write_queues": 9, "perm": "rw", "order": False,
        "attributes": {}, "messages": 9,
    }  # fmt: skip
    with Consumer("orders", [pair[2].api], start="earliest") as consumer:
        got = 0
        while got < 9:
            got += len(consumer.poll(timeout_s=60))
    assert "9 for consumers" in topics("set", "orders", "--write-queues", "1").stderr
    with Producer([pair[1].api]) as producer:
        assert {producer.send_sync("orders", b"").queue_id for _ in range(3)} == {0}
    assert topics("delete", "orders").returncode == 0
    assert "orders" not in listed(topics)  # at once: the master has added its own change
    misspelt = topics("delete", "order")
    assert misspelt.returncode == 0 and "there was no topic order, so nothing" in misspelt.stderr
    assert topics("set", "orders", "--perm", "r").returncode != 0
    with Admin([pair[2].api]) as admin:  # a slave hears of it by replication
        wait_until(lambda: "orders" not in admin.topics(), 60, "the slave hides the topic")


def test_the_list_as_text(topics):
    topics("create", "text", "--queues", "2", "--perm", "w")
    lines = [line.split() for line in topics("list").stdout.splitlines()]
    assert lines[0] == "topic read queues write queues permission messages".split()
    assert ["text", "2", "2", "w", "0"] in lines


def test_messages_that_a_change_leaves_to_nobody_are_named(pair, topics):
    with Producer([pair[1].api], acks="all") as producer:
        for number in range(8):
            producer.send_sync("shrunk", b"", queue=number % 4)
    done = topics("set", "shrunk", "--queues", "2")  # at once: it waits for the master's replay
    assert done.returncode == 0, done.stderr
    assert "4 messages are in queues 2 to 3, which consumers do not read" in done.stderr
    assert "`hastore topics set shrunk --read-queues 4`" in done.stderr
    again = topics("set", "shrunk", "--read-queues", "4")
    assert "messages" not in again.stderr
    assert listed(topics)["shrunk"]["messages"] == 8


def test_permissions_hold_for_puts_and_pulls(pair):
    with Admin([pair[1].api]) as admin, Producer([pair[1].api]) as producer:
        made = admin.create_topic("closed", queues=1, perm=4, attributes={"a": "b"})
        assert made == TopicConfig("closed", 1, 1, 4, attributes={"a": "b"})
        with pytest.raises(MessageIllegalError, match="permission"):
            producer.send_sync("closed", b"")
        admin.set_topic("closed", perm=2)
        producer.send_sync("closed", b"in", queue=0)
        with Consumer("closed", [pair[1].api], read_from="master") as consumer:
            with pytest.raises(ForbiddenError, match="permission"):
                consumer.poll(timeout_s=60)
        admin.set_topic("closed", perm=6)
        with Consumer("closed", [pair[1].api], read_from="master") as consumer:
            assert [one.body for one in consumer.poll(timeout_s=60)] == [b"in"]
        assert admin.topic_configs()["closed"].attributes == {"a": "b"}


def test_a_running_producer_learns_that_a_topic_has_fewer_queues(pair):
    with Admin([pair[1].api]) as admin, Producer([pair[1].api]) as producer:
        for _ in range(4):
            producer.send_sync("fewer", b"before")
        wait_until(lambda: "fewer" in admin.topic_configs(), 60, "the master has replayed it")
        admin.set_topic("fewer", write_queues=1)

        def sent():
            try:
                sent_to = producer.send_sync("fewer", b"after").queue_id
            except MessageIllegalError:
                return False
            return sent_to == 0

        wait_until(lambda: all(sent() for _ in range(5)), 60, "it uses queue 0 alone")
        admin.set_topic("fewer", write_queues=6)  # more queues: with the next map
        with Producer([pair[1].api]) as other:
            assert {other.send_sync("fewer", b"").queue_id for _ in range(6)} == set(range(6))


def test_a_topic_that_a_put_began_can_be_changed(pair):
    with Admin([pair[1].api]) as admin, Producer([pair[1].api]) as producer:
        producer.send_sync("begun", b"", queue=3)
        wait_until(lambda: "begun" in admin.topic_configs(), 60, "the master has replayed it")
        assert admin.topic_configs()["begun"] == TopicConfig("begun", 4, 4)
        assert admin.set_topic("begun", queues=5) == TopicConfig("begun", 5, 5)


def test_what_is_wrong_is_said(pair):
    with Admin([pair[1].api]) as admin:
        for name in ("a.b", "HASTORE_POSITIONS", "SCHEDULE_TOPIC_XXXX", "TBW102", "x" * 128):
            with pytest.raises(UsageError):
                admin.create_topic(name)
            with pytest.raises(UsageError):
                admin.delete_topic(name)
        for wrong in ({"queues": -1}, {"queues": 5_000}, {"perm": 7}, {"order": 1}):
            with pytest.raises(UsageError):
                admin.create_topic("t", **wrong)
        with pytest.raises(UsageError, match="attributes"):
            admin.create_topic("t", attributes={"a": "b" * 9_000})


def test_the_calls_for_asyncio(pair):
    async def scene():
        async with aio.Admin([pair[1].api]) as admin:
            assert (await admin.create_topic("awaited", queues=3)).read_queues == 3
            await admin.set_topic("awaited", order=True)
            configs = await admin.topic_configs()
            await admin.delete_topic("awaited")
            return configs["awaited"]

    assert asyncio.run(scene()) == TopicConfig("awaited", 3, 3, order=True)


def test_topics_outlive_a_kill_of_the_master(pair, topics):
    """The slave's own log has the record before the client is told that the topic is there."""
    assert topics("create", "kept", "--queues", "7").returncode == 0
    pair[1].kill()
    pair[1].start("master")
    pair[1].wait_writable()
    assert listed(topics)["kept"]["read_queues"] == 7
    with Admin([pair[2].api]) as admin:
        assert admin.topic_configs()["kept"] == TopicConfig("kept", 7, 7)


def test_topics_outlive_the_leader_of_mode_dledger(tmp_path):
    with DLedgerGroup(tmp_path) as group:
        group.start()
        with Admin([node.api for node in group]) as admin:
            admin.create_topic("kept", queues=7)
            admin.create_topic("gone", queues=1)
            leader = group.wait_leader()
            with Producer([leader.api]) as producer:
                producer.send_sync("gone", b"")
            admin.delete_topic("gone")
            leader.kill()
            group.wait_leader(but=leader)
            assert admin.topic_configs() == {"kept": TopicConfig("kept", 7, 7)}
            assert admin.set_topic("kept", perm=4).perm == 4
            assert "gone" not in admin.topics()
