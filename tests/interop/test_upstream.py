"""DESIGN.md, "What upstream gets wrong": the same provocation for RocketMQ and for hastore.

The first half of each test shows that the fault is real, so it fails when RocketMQ mends it.
"""

import contextlib
import shutil
import socket
import struct

import pytest

from hastore.client.producer import Producer
from hastore.errors import FlushSlaveTimeout, MessageIllegalError, NotStoredError
from hastore.ha.peer import split_address
from tests.interop.compare import FILE_BYTES, rocketmq_sizes, sizes
from tests.process.harness import wait_until
from tests.process.stores import read_log

WAITING = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "totalReplicas": 2}


@pytest.fixture
def open_store(make_peer, ports, tmp_path):
    """Open a RocketMQ store; return its process and the address of its HA port."""

    def open_it(root="rocketmq", peer=None, **store):
        peer = peer or make_peer()
        port = ports.take()
        settings = {**rocketmq_sizes(tmp_path / root), "haListenPort": port, "slaveTimeout": 1500}
        peer.call("store.open", store={**settings, **store})
        return peer, f"127.0.0.1:{port}"

    return open_it


@pytest.fixture
def make_master(make_group):
    """Start a hastore master that serves, and by default counts, RocketMQ slaves."""

    def make(count=1, role="SYNC_MASTER", **ha):
        classic = {"allow_classic_peers": True, "count_classic_peers": True}
        group = make_group(count, master_role=role, store=sizes(), ha={**classic, **ha})
        group[1].start("master", wait=False).wait_ready()
        return group[1]

    return make


def messages(count, size=100, topic="T"):
    return [{"topic": topic, "queue": 0, "size": size, "seed": n} for n in range(count)]


def put(peer, *arguments, **options):
    return [
        result[0] for result in peer.call("store.put", messages=messages(*arguments, **options))
    ]


@contextlib.contextmanager
def classic_slave(address, *reports):
    """Connect and report, as a slave does."""
    with socket.create_connection(split_address(address), timeout=5) as sock:
        for report in reports:
            sock.sendall(struct.pack(">q", report))
        yield sock


def frame(sock):
    """Return offset and size of the next frame's header, None when the link was closed."""
    try:
        head = sock.recv(12, socket.MSG_WAITALL)
    except ConnectionResetError:
        return None
    return struct.unpack(">qi", head) if len(head) == 12 else None


def test_a_synchronous_master_without_a_slave(open_store, make_master):
    peer, _ = open_store(brokerRole="SYNC_MASTER")
    assert put(peer, 3) == ["PUT_OK"] * 3, "RocketMQ, with its default settings, waits for nobody"
    node = make_master()
    with Producer([node.api], delivery_timeout_s=1) as producer, pytest.raises(NotStoredError):
        producer.send_sync("T", b"x")


def test_a_stranger_that_reports_a_huge_offset(open_store, make_master):
    peer, address = open_store(**WAITING)
    with classic_slave(address, 0) as sock:
        wait_until(lambda: peer.call("store.status")["slaves"], 5, "connected")
        assert put(peer, 1) == ["FLUSH_SLAVE_TIMEOUT"]
        sock.sendall(struct.pack(">q", 2**60))
        wait_until(lambda: peer.call("store.status")["push2slave"] == 2**60, 5, "believed")
        assert put(peer, 20) == ["PUT_OK"] * 20, "RocketMQ: acknowledged, and nobody has it"
    node = make_master(slave_timeout="1s")
    with (
        classic_slave(node.ha, 0) as sock,
        Producer([node.api], delivery_timeout_s=1.5) as producer,
    ):
        node.wait_status(lambda s: s["slaves"], "connected")
        future = producer.send("T", b"nobody has it")
        assert frame(sock)[0] == 0
        sock.sendall(struct.pack(">q", 2**60))
        with pytest.raises(FlushSlaveTimeout):
            future.result(10)
        node.wait_log("a report of 1152921504606846976, beyond")
        assert not node.status()["slaves"]


def test_a_new_slave_gets_the_whole_history(open_store, make_master):
    peer, address = open_store()
    put(peer, 1_500)
    with classic_slave(address, 0) as sock:
        assert frame(sock)[0] >= 2 * FILE_BYTES, "RocketMQ begins with its last file"
    node = make_master(role="ASYNC_MASTER")
    with Producer([node.api], acks=1) as producer:
        for future in [producer.send("T", bytes(100)) for _ in range(1_500)]:
            future.result(10)
    assert node.status()["max_offset"] > 3 * FILE_BYTES
    with classic_slave(node.ha, 0) as sock:
        assert frame(sock)[0] == 0


def test_a_slave_beyond_the_log_is_not_kept_waiting(open_store, make_master):
    peer, address = open_store()
    put(peer, 10)
    with classic_slave(address, 10**9) as sock:
        assert [frame(sock), frame(sock)] == [(10**9, 0)] * 2, "RocketMQ: heartbeats for ever"
    node = make_master(role="ASYNC_MASTER")
    with classic_slave(node.ha, 10**9) as sock:
        assert frame(sock) is None
    assert "the RocketMQ slave's log ends at 1000000000" in node.log


def test_a_topic_of_few_characters_and_many_bytes(open_store, make_master, tmp_path):
    topic = "日" * 43
    peer, _ = open_store()
    assert put(peer, 3) + put(peer, 1, topic=topic) + put(peer, 3) == ["PUT_OK"] * 7
    end = peer.call("store.status")["max"]
    peer.call("store.close")
    open_store(peer=peer)
    left = peer.call("store.status")["max"]
    assert left < end, "RocketMQ: acknowledged, then cut away with all that follows"
    node = make_master(role="ASYNC_MASTER")
    with Producer([node.api]) as producer:
        with pytest.raises(MessageIllegalError):
            producer.send(topic, b"x")
        assert producer.send_sync("T", b"x", tags=topic).offset == 0
    assert node.stop() == 0
    node.start("master")
    assert node.status()["max_offset"] == read_log(node.store).end > 0


def test_damage_in_the_middle(open_store, make_master, tmp_path):
    def damage(root):
        """Turn one bit of a body in the middle of the first file's records."""
        log = read_log(root)
        victim = log.records[50]
        with open(root / "commitlog" / f"{0:020d}", "r+b") as file:
            file.seek(victim.offset + 100)
            byte = file.read(1)
            file.seek(victim.offset + 100)
            file.write(bytes([byte[0] ^ 1]))
        return victim

    peer, _ = open_store()
    assert put(peer, 100) == ["PUT_OK"] * 100
    end = peer.call("store.status")["max"]
    peer.call("store.close")
    victim = damage(tmp_path / "rocketmq")
    open_store(peer=peer)
    assert peer.call("store.status")["max"] == victim.offset < end, "RocketMQ drops what follows"
    node = make_master(role="ASYNC_MASTER")
    with Producer([node.api]) as producer:
        for number in range(100):
            producer.send_sync("T", bytes([number]) * 100)
    end = node.status()["max_offset"]
    assert node.stop() == 0
    damage(node.store)
    before = (node.store / "commitlog" / f"{0:020d}").read_bytes()
    node.start("master", wait=False)
    assert node.exit_code() == 3, "hastore says so, and cuts nothing"
    assert (node.store / "commitlog" / f"{0:020d}").read_bytes() == before
    assert str(end) in node.last_words()


def test_an_old_master_with_a_tail_of_its_own(open_store, make_group, tmp_path):
    peer, _ = open_store("a")
    put(peer, 20)
    peer.call("store.close")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    open_store("a", peer)
    put(peer, 1)  # the tail: not replicated when the old master died
    peer.call("store.close")
    other, address = open_store("b")
    other.call("store.put", messages=[{**messages(1)[0], "seed": 99}])
    open_store("a", peer, brokerRole="SLAVE")
    peer.call("store.close")
    peer.call(
        "store.open",
        store={**rocketmq_sizes(tmp_path / "a"), "brokerRole": "SLAVE"},
        broker={"brokerId": 1},
        master=address,
    )
    end = other.call("store.status")["max"]
    wait_until(lambda: other.call("store.status")["push2slave"] == end, 15, "in sync, it says")
    mine, theirs = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    assert mine.end == theirs.end and mine.bytes != theirs.bytes, "RocketMQ: differ in silence"

    group = make_group(2).start()
    with Producer([group[1].api]) as producer:
        producer.send_sync("T", b"both")
    group[2].kill()
    group[1].write(role="ASYNC_MASTER")
    group[1].wait_status(lambda s: s["role"] == "ASYNC_MASTER", "flipped")
    with Producer([group[1].api]) as producer:
        producer.send_sync("T", b"tail")
    group[1].kill()
    group[2].write(role="SYNC_MASTER")
    group[2].start("master", wait=False)
    group[2].wait_status(lambda s: s["writable"], "promoted")
    group[1].write(role="SLAVE")
    group[1].start("slave")
    group[2].wait_in_sync(1)
    with Producer([group[2].api]) as producer:
        producer.send_sync("T", b"else")
    group.wait_equal()
    assert [found.body for found in read_log(group[1].store).records] == [b"both", b"else"]
    assert list((group[1].store / "rescued").iterdir()), "the tail is kept aside"
