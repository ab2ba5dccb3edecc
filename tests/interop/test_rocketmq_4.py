"""The store of RocketMQ 4 as master and slave: it has the same link and the same files.

Maven Central has no broker of that version; its store alone can replicate.
"""

import random

import pytest

from hastore.client.producer.producer import Producer
from tests.interop.compare import (
    assert_same_derived,
    assert_same_log,
    lines_of,
    read_lines,
    rocketmq_sizes,
    sizes,
)
from tests.interop.test_disks import check_hastore, varieties
from tests.interop.test_hastore_slave import follow, wait_at
from tests.interop.test_rocketmq_slave import TOPICS, check_a_copy, produce
from tests.process.harness import wait_until
from tests.process.stores import read_log

pytestmark = pytest.mark.full
FILE_BYTES = 256 * 1024
BIG_FILE_BYTES = 8 * 1024 * 1024  # the largest message must fit


def few(count, seed=0):
    """Return messages of mixed sizes, most of them with keys and tags."""
    rng = random.Random(seed)
    return [
        {
            "topic": TOPICS[n % len(TOPICS)],
            "queue": n % 3,
            "size": rng.choice((0, 1, 100, 300, 900)),
            "seed": seed + n,
            "properties": {"KEYS": f"key{n % 50}", "TAGS": f"tag{n % 7}"} if n % 3 else {},
        }
        for n in range(count)
    ]


def put(peer, messages):
    return {result[0] for result in peer.call("store.put", messages=messages)}


def short_topics(messages):
    return [message for message in messages if len(message["topic"]) <= 127]


def check_all(peer, root, tmp_path):
    """Read all messages through RocketMQ's queues, and some by key; return the log."""
    log = read_log(root)
    assert peer.call("store.dump", file=str(tmp_path / "dump")) == len(log.records)
    assert read_lines(tmp_path / "dump") == lines_of(log)
    for topic in TOPICS:
        wanted = [
            found.offset
            for found in log.records
            if found.topic == topic and found.properties.get("KEYS") == "key7"
        ]
        assert sorted(peer.call("store.query", topic=topic, key="key7")) == wanted[-64:], topic
    return log


def test_rocketmq_4_follows_hastore(make_group, make_old_peer, tmp_path):
    check_a_copy(make_group, make_old_peer(), tmp_path)


@pytest.mark.slow("the master waits for a slave that is silent, and is closed and opened")
def test_hastore_follows_rocketmq_4(make_group, make_old_peer, ports, tmp_path):
    """A synchronous master of RocketMQ 4 waits at every put, until hastore's report releases it."""
    peer, root, port = make_old_peer(), tmp_path / "rocketmq", ports.take()
    settings = {
        **rocketmq_sizes(root, FILE_BYTES),
        "haListenPort": port,
        "brokerRole": "SYNC_MASTER",
        "syncFlushTimeout": 4000,
        "slaveTimeout": 4000,
    }
    peer.call("store.open", store=settings)
    assert put(peer, few(1)) == {"SLAVE_NOT_AVAILABLE"}
    group = make_group(
        1,
        master_role="SLAVE",
        store=sizes(FILE_BYTES),
        ha={"classic_master": f"127.0.0.1:{port}"},
    )
    node = follow(group[1])
    wait_at(node, peer.call("store.status")["max"])
    assert put(peer, few(1_500, seed=1)) == {"PUT_OK"}
    assert node.status()["max_offset"] == peer.call("store.status")["max"], "hastore has it"
    node.pause()
    assert put(peer, few(1)) == {"FLUSH_SLAVE_TIMEOUT"}
    node.kill()
    put(peer, few(1, seed=7))
    follow(node)
    wait_at(node, peer.call("store.status")["max"])
    peer.call("store.close")
    peer.call("store.open", store=settings)
    wait_until(lambda: peer.call("store.status")["slaves"] == 1, 60, "connected again")
    assert put(peer, few(1_500, seed=3)) == {"PUT_OK"}
    end = peer.call("store.status")["max"]
    assert end > 4 * FILE_BYTES
    wait_at(node, end)
    assert_same_log(root, node.store, end)
    log = check_all(peer, root, tmp_path)
    check_hastore(node, log)
    peer.call("store.close")
    assert node.stop() == 0
    assert_same_log(root, node.store, end)
    assert_same_derived(root, node.store)


@pytest.mark.parametrize("end", ["clean", "killed"])
def test_a_store_goes_from_one_to_the_other_and_back(make_group, make_old_peer, tmp_path, end):
    node = make_group(1, master_role="ASYNC_MASTER", store=sizes(BIG_FILE_BYTES))[1]
    root, peer = node.store, make_old_peer()
    settings = rocketmq_sizes(root, BIG_FILE_BYTES)
    peer.call("store.open", store=settings)
    unusual = short_topics(varieties())
    for messages in (few(1_000), unusual, few(1_000, seed=1)):
        assert put(peer, messages) == {"PUT_OK"}
    reached = peer.call("store.status")["max"]
    if end == "clean":
        peer.call("store.close")
    peer.kill()
    node.start("master").wait_log(f"from offset {reached} on")
    if end == "clean":  # the broker has written what is taken over from it, with a mark
        node.wait_log("took over from a RocketMQ broker")
    check_hastore(node, read_log(root))
    sent = produce([node.api], 2_000, seed=3)
    with Producer([node.api]) as producer:
        last = producer.send_sync("T", b"of hastore", queue=0, key="mine")
    reached = node.status()["max_offset"]
    if end == "clean":
        assert node.stop() == 0
    else:
        node.kill()
    peer = make_old_peer()
    assert peer.call("store.open", store=settings)["max"] == reached
    log = check_all(peer, root, tmp_path)
    assert len(log.records) == 2_000 + len(unusual) + (end == "clean") + len(sent) + 1
    assert peer.call("store.query", topic="T", key="mine") == [last.offset]
    assert put(peer, few(500, seed=5) + unusual) == {"PUT_OK"}
    log = check_all(peer, root, tmp_path)
    peer.call("store.close")
    peer.kill()
    node.start("master").wait_writable()
    assert node.status()["max_offset"] >= log.end
    check_hastore(node, log)
    assert node.stop() == 0
