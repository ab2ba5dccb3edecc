"""hastore and RocketMQ open the same store in turn."""

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from tests.interop.compare import lines_of, read_lines, rocketmq_sizes, sizes
from tests.interop.test_rocketmq_slave import produce
from tests.process.stores import read_log

pytestmark = pytest.mark.full
FILE_BYTES = 8 * 1024 * 1024


@pytest.fixture
def node(make_group):
    """A hastore node without slaves."""
    return make_group(1, master_role="ASYNC_MASTER", store=sizes(FILE_BYTES))[1]


def open_in_rocketmq(peer, root, **more):
    return peer.call("store.open", store={**rocketmq_sizes(root, FILE_BYTES), **more})


def check_dump(peer, root, tmp_path):
    """Read all messages through RocketMQ's queues, compare them with the log, return the log."""
    count = peer.call("store.dump", file=str(tmp_path / "dump"))
    log = read_log(root)
    assert read_lines(tmp_path / "dump") == lines_of(log)
    assert count == len(log.records)
    return log


def check_hastore(node, log):
    """Read all messages through hastore's API, and compare them with the log."""
    topics = {found.topic for found in log.records}
    for topic in topics:
        wanted = {
            (found.queue_id, found.queue_offset): found.body
            for found in log.records
            if found.topic == topic
        }
        got = {}
        with Consumer(topic, [node.api]) as consumer:
            while len(got) < len(wanted):
                messages = consumer.poll(timeout_s=60)
                assert messages, (topic, len(got), len(wanted))
                got.update({(m.queue_id, m.queue_offset): m.body for m in messages})
        assert got == wanted, topic


def varieties():
    """Return unusual messages: the largest fields, V2 topics, IPv6 hosts, flags, many keys."""
    six = "2001:db8::1"
    many = " ".join(f"k{n}" for n in range(500))
    messages = [
        {"topic": "big", "size": 4 * 1024 * 1024, "seed": 1, "properties": {"KEYS": "huge"}},
        {"topic": "big", "size": 0, "seed": 1},
        {"topic": "v" * 128, "size": 100, "properties": {"TAGS": "two"}},
        {"topic": "w" * 250, "size": 100, "queue": 3},
        {"topic": "six", "size": 10, "bornHost": six},
        {"topic": "six", "size": 10, "storeHost": six},
        {
            "topic": "six",
            "size": 10,
            "bornHost": six,
            "storeHost": six,
            "properties": {"KEYS": "a"},
        },
        {"topic": "wide", "size": 10, "properties": {"p": "x" * 32_000}},
        {"topic": "wide", "size": 10, "properties": {"KEYS": many, "TAGS": "ümläut 日本"}},
        {"topic": "flags", "size": 10, "flag": -1, "reconsumeTimes": 7},
        {"topic": "flags", "size": 10, "flag": 2**31 - 1, "sysFlag": 2},
    ]
    return [{"queue": 0, **message} for message in messages]


@pytest.mark.slow("RocketMQ opens and closes the store twice, and hastore too")
@pytest.mark.parametrize("crc", [False, True], ids=["plain", "property-crc"])
@pytest.mark.parametrize("end", ["clean", "killed"])
def test_a_store_goes_from_one_to_the_other_and_back(node, make_peer, tmp_path, end, crc):
    root = node.store
    # RocketMQ writes the first messages.
    peer = make_peer()
    open_in_rocketmq(peer, root, enabledAppendPropCRC=crc)
    few = [{"topic": "T", "queue": n % 4, "size": 3000, "seed": n} for n in range(4_000)]
    for messages in (few[:2_000], varieties(), few[2_000:]):
        results = peer.call("store.put", messages=messages)
        assert {result[0] for result in results} == {"PUT_OK"}
    reached = peer.call("store.status")["max"]
    if end == "clean":
        peer.call("store.close")
    peer.kill()
    # hastore continues.
    node.start("master").wait_writable()
    assert node.status()["min_offset"] == 0
    assert node.status()["max_offset"] == reached
    log = read_log(root)
    assert len(log.records) == 4_000 + len(varieties())
    check_hastore(node, log)
    sent = produce([node.api], 4_000, seed=3)
    with Producer([node.api]) as producer:
        last = producer.send_sync("T", b"of hastore", queue=0, key="mine")
    assert last.queue_offset > 1_000, "the queue continues after RocketMQ's messages"
    reached = node.status()["max_offset"]
    if end == "clean":
        assert node.stop() == 0
    else:
        node.kill()
    # RocketMQ opens it again.
    peer = make_peer()
    assert open_in_rocketmq(peer, root, enabledAppendPropCRC=crc)["max"] == reached
    log = check_dump(peer, root, tmp_path)
    assert len(log.records) == 4_000 + len(varieties()) + len(sent) + 1
    assert peer.call("store.query", topic="T", key="mine") == [last.offset]
    assert peer.call("store.query", topic="big", key="huge") != []
    results = peer.call("store.put", messages=varieties() + few[:100])
    assert {result[0] for result in results} == {"PUT_OK"}
    assert results[-1][3] > 1_000
    log = check_dump(peer, root, tmp_path)
    if end == "clean":
        peer.call("store.close")
    peer.kill()
    # And hastore again.
    node.start("master").wait_writable()
    assert node.status()["max_offset"] == log.end
    check_hastore(node, log)
    assert node.stop() == 0
