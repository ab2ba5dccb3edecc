"""RocketMQ as a slave of a hastore master: the classic link with RocketMQ's own code.

HASTORE_INTEROP_MESSAGES (30,000) sets the load of the test with a whole broker.
"""

import os
import random
import socket
import time

import pytest

from hastore.client.messages import Status
from hastore.client.producer.producer import Producer
from hastore.errors import NotStoredError
from hastore.ha.hello.peer import split_address
from tests.interop.compare import (
    assert_same_derived,
    assert_same_log,
    lines_of,
    read_lines,
    rocketmq_sizes,
    sizes,
)
from tests.process.harness import wait_until
from tests.process.stores import read_log

COUNT = int(os.environ.get("HASTORE_INTEROP_MESSAGES", "30000"))
FILE_BYTES = 1024 * 1024
SMALL_FILE_BYTES = 256 * 1024
TOPICS = ("flights", "T", "%RETRY%group", "a-topic_of|many-" + "x" * 100)


def produce(bootstrap, count, seed, **options):
    """Send mixed messages; return the results."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Producer(bootstrap, **options) as producer:
        futures = []
        for number in range(count):
            size = rng.choice((0, 1, 100, 300, 300, 900))
            if not number % 500:
                size = rng.randrange(60_000)
            pairs = [("number", str(number)), ("ümläut", "日本 🚀"), ("empty", "")]
            futures.append(
                producer.send(
                    TOPICS[number % len(TOPICS)],
                    rng.randbytes(size),
                    key=f"key{number % 1000}" if number % 3 else None,
                    tags=f"tag{number % 7}" if number % 2 else None,
                    properties=pairs[: number % 4],
                )
            )
        return [future.result(60) for future in futures]


def slave_store(peer, master, root, file_bytes=FILE_BYTES, **more):
    return peer.call(
        "store.open",
        store={
            **rocketmq_sizes(root, file_bytes),
            "brokerRole": "SLAVE",
            **more,
        },
        broker={"brokerId": 1},
        master=master.ha,
    )


def wait_caught_up(peer, end, timeout_s=180):
    return wait_until(
        lambda: (s := peer.call("store.status"))["max"] == end and s["dispatched"] and s,
        timeout_s,
        lambda: f"the RocketMQ slave is not at {end}: {peer.call('store.status')}",
    )


@pytest.fixture
def master(make_group):
    group = make_group(
        1,
        master_role="ASYNC_MASTER",
        store=sizes(FILE_BYTES),
        ha={"allow_classic_peers": True},
    )
    group[1].start("master").wait_writable()
    return group


@pytest.mark.slow("Maven builds the peer once, and RocketMQ closes its store")
def test_a_copy_by_rocketmq_has_the_same_bytes(make_group, make_peer, tmp_path):
    check_a_copy(make_group, make_peer(), tmp_path)


def check_a_copy(make_group, peer, tmp_path):
    """Let a RocketMQ store follow a node from the middle of a load on; compare their files."""
    group = make_group(
        1,
        master_role="ASYNC_MASTER",
        store=sizes(SMALL_FILE_BYTES),
        ha={"allow_classic_peers": True},
    )
    node, root = group[1], tmp_path / "rocketmq"
    node.start("master").wait_writable()
    produce(group.bootstrap, 2_000, seed=random.randrange(2**32))
    slave_store(peer, node, root, SMALL_FILE_BYTES)
    produce(group.bootstrap, 3_000, seed=random.randrange(2**32))
    end = node.status()["max_offset"]
    assert end > 8 * SMALL_FILE_BYTES
    wait_caught_up(peer, end)
    log = read_log(node.store)
    assert len(log.records) == 5_000
    check_queries(peer, log, tmp_path)
    peer.kill()  # a close takes seconds, and its files are already written
    assert node.stop() == 0
    assert_same_log(node.store, root, end)
    assert_same_derived(root, node.store)


@pytest.mark.slow("a whole broker and its consumer start, and all messages are compared")
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_bare_store_and_a_whole_broker_follow(master, make_peer, ports, tmp_path):
    node = master[1]
    bare, root = make_peer(), tmp_path / "bare"
    half = COUNT // 2
    sent = produce(master.bootstrap, half, seed=random.randrange(2**32))
    slave_store(bare, node, root)
    sent += produce(master.bootstrap, COUNT - half, seed=random.randrange(2**32))
    assert all(result.status is Status.PUT_OK for result in sent)
    end = node.status()["max_offset"]
    broker = SlaveBroker(make_peer(), ports, tmp_path / "broker", node.ha, TOPICS)
    wait_caught_up(bare, end)
    wait_caught_up(broker.peer, end)
    assert end > 10 * FILE_BYTES or COUNT < 30_000
    assert [slave["classic"] for slave in node.status()["slaves"]] == [True] * 2
    log = read_log(node.store)
    assert len(log.records) == COUNT
    check_queries(bare, log, tmp_path)
    broker.check_consumer(log, tmp_path)
    bare.call("store.close")
    broker.peer.kill()
    assert node.stop() == 0
    for copy in (root, broker.root):
        assert_same_log(node.store, copy, end)
    assert_same_derived(node.store, root)


def check_queries(peer, log, tmp_path):
    """Read all messages through RocketMQ's queues, and some of each topic by its key index."""
    assert peer.call("store.dump", file=str(tmp_path / "dump")) == len(log.records)
    assert read_lines(tmp_path / "dump") == lines_of(log)
    for key in ("key1", "key500", "key998"):
        for topic in TOPICS:
            wanted = [
                found.offset
                for found in log.records
                if found.topic == topic and found.properties.get("KEYS") == key
            ]
            found = peer.call("store.query", topic=topic, key=key)
            assert sorted(found) == wanted[-64:], (topic, key)


class SlaveBroker:
    """A complete broker as hastore's slave, with the name server for its consumers."""

    def __init__(self, peer, ports, root, master, topics, **settings):
        self.peer, self.root, self.topics = peer, root, topics
        name_server = ports.take()
        self.namesrv = f"127.0.0.1:{name_server}"
        peer.call("namesrv.start", port=name_server)
        peer.call(
            "broker.start",
            store={
                **rocketmq_sizes(root, FILE_BYTES),
                "brokerRole": "SLAVE",
                "haMasterAddress": master,
                "maxTransferCountOnMessageInMemory": 1_000,
                "maxTransferBytesOnMessageInMemory": 1024 * 1024,
            },
            broker={
                "brokerId": 1,
                "namesrvAddr": self.namesrv,
                "listenPort": ports.take(-2),  # a broker takes the port minus 2 too
                **settings,
            },
        )
        for topic in topics:
            peer.call("broker.topic", topic=topic, queues=4)
            peer.call("namesrv.topic", topic=topic, queues=4, broker="rocketmq")

    def check_consumer(self, log, tmp_path):
        """Read every message of the log with the official consumer."""
        got = self.peer.call(
            "consume",
            namesrv=self.namesrv,
            topics=self.topics,
            count=len(log.records),
            timeout=180,
            file=str(tmp_path / "consumed"),
            timeout_s=240,
        )
        assert got == len(log.records)
        assert read_lines(tmp_path / "consumed") == lines_of(log)


@pytest.mark.full
def test_the_first_report_may_come_after_the_hello_timeout(make_group):
    """A RocketMQ slave that connects right after its start sends its first report after 5 s."""
    group = make_group(
        1, master_role="ASYNC_MASTER", ha={"allow_classic_peers": True, "hello_timeout": "1s"}
    )
    node = group[1].start("master")
    produce(group.bootstrap, 10, seed=1)
    with socket.create_connection(split_address(node.ha), timeout=60) as sock:
        time.sleep(1.5)
        sock.sendall(bytes(8))
        assert sock.recv(12, socket.MSG_WAITALL)[:8] == bytes(8)


@pytest.mark.full
def test_its_reports_release_synchronous_puts(make_group, make_peer, tmp_path):
    """In a group of two whose hastore slave is down, only RocketMQ's reports confirm puts."""
    group = make_group(
        2,
        store=sizes(),
        ha={
            "allow_classic_peers": True,
            "count_classic_peers": True,
            "heartbeat_interval": "1s",
            "slave_timeout": "1s",
        },
    ).start()
    check_released_by_classic(group, make_peer(), tmp_path / "rocketmq", stop=group[2])


@pytest.mark.full
def test_its_reports_release_puts_of_a_single_node(make_group, make_peer, tmp_path):
    group = make_group(
        1,
        store=sizes(),
        ha={
            "allow_classic_peers": True,
            "count_classic_peers": True,
            "heartbeat_interval": "1s",
            "slave_timeout": "1s",
        },
    )
    group[1].start("master")
    check_released_by_classic(group, make_peer(), tmp_path / "rocketmq")


def check_released_by_classic(group, peer, root, stop=None):
    node = group[1]
    if stop is not None:
        with Producer([node.api]) as producer:
            assert producer.send_sync("T", b"by the slave").level == "SYNC_MEM(1)"
        stop.kill()
        node.wait_status(lambda s: not s["slaves"], "the slave is gone")
    check_refused(node)
    before = node.status()["max_offset"]
    slave_store(peer, node, root, file_bytes=sizes()["commitlog_file_size"])
    node.wait_status(lambda s: [x["classic"] for x in s["slaves"]] == [True], "a RocketMQ slave")
    wait_caught_up(peer, before)
    with Producer([node.api], delivery_timeout_s=60) as producer:
        results = [producer.send_sync("T", b"counted" * n) for n in range(300)]
    assert {result.level for result in results} == {"CLASSIC"}
    # The puts are confirmed, so RocketMQ's store has them.
    assert peer.call("store.status")["max"] == node.status()["max_offset"]
    peer.kill()
    wait_until(lambda: not node.status()["slaves"], 60, "the RocketMQ slave is gone")
    check_refused(node)


def check_refused(node):
    """Check that a put to a master without slaves is refused, and nothing is appended."""
    before = node.status()["max_offset"]
    with (
        Producer([node.api], delivery_timeout_s=1) as producer,
        pytest.raises(NotStoredError) as no,
    ):
        producer.send_sync("T", b"nobody there")
    assert no.value.status == "SLAVE_NOT_AVAILABLE"
    assert node.status()["max_offset"] == before, "refused, so nothing was appended"
