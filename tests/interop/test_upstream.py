"""Faults of RocketMQ: the same situation with RocketMQ and with hastore.

The first half of each test shows that the fault is real, so it fails once RocketMQ corrects it.
"""

import contextlib
import os
import shutil
import socket
import struct

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.errors import FlushSlaveTimeout, MessageIllegalError, NotStoredError, OutcomeUnknown
from hastore.ha.hello.peer import split_address
from tests.interop.compare import FILE_BYTES, rocketmq_sizes, sizes
from tests.interop.java_process import PeerError
from tests.interop.test_rocketmq_slave import SlaveBroker
from tests.process.harness import wait_until
from tests.process.stores import read_log

pytestmark = pytest.mark.full
WAITING = {"brokerRole": "SYNC_MASTER", "inSyncReplicas": 2, "totalReplicas": 2}


@pytest.fixture
def open_store(make_peer, ports, tmp_path):
    """Return a function that opens a RocketMQ store; it returns the process and the HA address."""

    def open_it(root="rocketmq", peer=None, master=None, **store):
        peer = peer or make_peer()
        port = ports.take()
        settings = {**rocketmq_sizes(tmp_path / root), "haListenPort": port, "slaveTimeout": 1500}
        broker = {"brokerId": 1} if master else {}
        peer.call("store.open", store={**settings, **store}, broker=broker, master=master)
        return peer, f"127.0.0.1:{port}"

    return open_it


@pytest.fixture
def make_master(make_group):
    """Return a function that starts a hastore master that accepts and counts RocketMQ slaves."""

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
    """Connect and report like a slave."""
    with socket.create_connection(split_address(address), timeout=60) as sock:
        for report in reports:
            sock.sendall(struct.pack(">q", report))
        yield sock


def frame(sock):
    """Return offset and size of the next frame's header, or None if the link is closed."""
    try:
        head = sock.recv(12, socket.MSG_WAITALL)
    except ConnectionResetError:
        return None
    return struct.unpack(">qi", head) if len(head) == 12 else None


def test_a_synchronous_master_without_a_slave(open_store, make_master):
    peer, _ = open_store(brokerRole="SYNC_MASTER")
    assert put(peer, 3) == ["PUT_OK"] * 3, "RocketMQ, by default, does not wait for a slave"
    node = make_master()
    with Producer([node.api], delivery_timeout_s=1) as producer, pytest.raises(NotStoredError):
        producer.send_sync("T", b"x")


def test_an_unknown_peer_that_reports_a_huge_offset(open_store, make_master):
    peer, address = open_store(**WAITING)
    with classic_slave(address, 0) as sock:
        wait_until(lambda: peer.call("store.status")["slaves"], 60, "connected")
        assert put(peer, 1) == ["FLUSH_SLAVE_TIMEOUT"]
        sock.sendall(struct.pack(">q", 2**60))
        wait_until(lambda: peer.call("store.status")["push2slave"] == 2**60, 60, "believed")
        assert put(peer, 20) == ["PUT_OK"] * 20, "RocketMQ acknowledges, but no slave has them"
    node = make_master()
    with (
        classic_slave(node.ha, 0) as sock,
        Producer([node.api], delivery_timeout_s=3) as producer,
    ):
        node.wait_status(lambda s: s["slaves"], "connected")
        future = producer.send("T", b"nobody has it")
        assert frame(sock)[0] == 0
        sock.sendall(struct.pack(">q", 2**60))
        with pytest.raises((FlushSlaveTimeout, OutcomeUnknown)):  # of the node, or of the client
            future.result(60)
        node.wait_log("a report of 1152921504606846976, beyond")
        node.wait_status(lambda s: not s["slaves"], "the link is closed")


def test_a_new_slave_gets_the_whole_history(open_store, make_master):
    peer, address = open_store()
    put(peer, 1_500)
    with classic_slave(address, 0) as sock:
        assert frame(sock)[0] >= 2 * FILE_BYTES, "RocketMQ begins with its last file"
    node = make_master(role="ASYNC_MASTER")
    with Producer([node.api], acks=1) as producer:
        for future in [producer.send("T", bytes(100)) for _ in range(1_500)]:
            future.result(60)
    assert node.status()["max_offset"] > 3 * FILE_BYTES
    with classic_slave(node.ha, 0) as sock:
        assert frame(sock)[0] == 0


def test_a_slave_beyond_the_end_of_the_log(open_store, make_master):
    peer, address = open_store()
    put(peer, 10)
    with classic_slave(address, 10**9) as sock:
        assert [frame(sock), frame(sock)] == [(10**9, 0)] * 2, "RocketMQ sends only heartbeats"
    node = make_master(role="ASYNC_MASTER")
    with classic_slave(node.ha, 10**9) as sock:
        assert frame(sock) is None
    node.wait_log("the RocketMQ slave's log ends at 1000000000")


def test_a_topic_of_few_characters_and_many_bytes(open_store, make_master, tmp_path):
    topic = "日" * 43
    peer, _ = open_store()
    assert put(peer, 3) + put(peer, 1, topic=topic) + put(peer, 3) == ["PUT_OK"] * 7
    end = peer.call("store.status")["max"]
    peer.call("store.close")
    open_store(peer=peer)
    left = peer.call("store.status")["max"]
    assert left < end, "RocketMQ cuts acknowledged records, and all that follow"
    node = make_master(role="ASYNC_MASTER")
    with Producer([node.api]) as producer:
        with pytest.raises(MessageIllegalError):
            producer.send(topic, b"x")
        assert producer.send_sync("T", b"x", tags=topic).offset == 0
    assert node.stop() == 0
    node.start("master")
    assert node.status()["max_offset"] == read_log(node.store).end > 0


@pytest.mark.slow("a store of RocketMQ is closed, and nodes start four times")
def test_damage_in_the_middle(open_store, make_master, tmp_path):
    def damage(root):
        """Flip one bit of a record's body in the middle of the first file."""
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
    check_foreign_damage(make_master, tmp_path / "rocketmq", victim, end)
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
    assert node.exit_code() == 3, "hastore reports the damage, and cuts nothing"
    assert (node.store / "commitlog" / f"{0:020d}").read_bytes() == before
    assert str(end) in node.last_words()


def test_bytes_that_only_the_page_cache_holds(open_store, make_group, tmp_path):
    """Both sides flush once an hour.

    RocketMQ's slave reports messages that are only in its page cache, even to a master with
    SYNC_FLUSH. hastore's reports say which of the two they mean.
    """
    master, address = open_store("m", **WAITING, flushDiskType="SYNC_FLUSH")
    hourly = {"flushIntervalCommitLog": 3_600_000, "flushCommitLogThoroughInterval": 7_200_000}
    slave, _ = open_store("s", brokerRole="SLAVE", **hourly, master=address)
    wait_until(lambda: master.call("store.status")["slaves"], 60, "connected")
    assert put(master, 20) == ["PUT_OK"] * 20
    there = slave.call("store.status")
    assert there["flushed"] == 0 < there["max"], "RocketMQ: acknowledged, but on one disk only"

    def make(ack_point):
        store = {**sizes(), "flush_interval": "1h"}
        return make_group(2, store=store, ha={"ack_point": ack_point}).start()

    group = make("written")
    with Producer(group.bootstrap) as producer:
        assert producer.send_sync("T", b"x").level == "SYNC_MEM(1)", "the reply says memory"
    with (
        Producer(group.bootstrap, sync_flush=True, delivery_timeout_s=60) as producer,
        pytest.raises(NotStoredError, match="ack_point"),
    ):
        producer.send_sync("T", b"x")
    assert group[2].status()["flushed_offset"] < group[2].status()["max_offset"]
    group.close()
    group = make("flushed")
    with Producer(group.bootstrap, sync_flush=True) as producer:
        for _ in range(20):
            result = producer.send_sync("T", b"x")
            assert result.level == "SYNC_DISK(1)"
        end = group[2].status()["max_offset"]
        assert group[2].status()["flushed_offset"] == end > result.offset


def turn_a_bit(root, victim):
    with open(root / "commitlog" / f"{0:020d}", "r+b") as file:
        byte = os.pread(file.fileno(), 1, victim.offset + 92)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 1]), victim.offset + 92)


def test_cut_records_do_not_reappear(open_store, make_master, tmp_path):
    """After a crash the log is cut at a damaged record, and the next record has the same size."""
    peer, _ = open_store()
    assert put(peer, 100) == ["PUT_OK"] * 100
    end = peer.call("store.status")["max"]
    peer.kill()
    victim = read_log(tmp_path / "rocketmq").records[50]
    turn_a_bit(tmp_path / "rocketmq", victim)
    peer, _ = open_store()
    assert peer.call("store.status")["max"] == victim.offset
    assert put(peer, 1) == ["PUT_OK"]
    assert peer.call("store.status")["max"] == victim.offset + victim.size < end
    peer.kill()
    peer, _ = open_store()
    assert peer.call("store.status")["max"] == end, "RocketMQ: the cut records are back"

    node = make_master(role="ASYNC_MASTER")
    node.stop()
    node.write(store={"flush_interval": "1h"})
    node.start("master").wait_writable()
    with Producer([node.api]) as producer:
        first = producer.send_sync("T", bytes(100), queue=0)
        for _ in range(99):
            producer.send_sync("T", bytes(100), queue=0)
    node.kill()
    log = read_log(node.store)
    victim, size = log.records[50], log.records[0].size
    assert log.records[0].offset == first.offset
    turn_a_bit(node.store, victim)
    node.start("master").wait_writable()
    assert node.status()["max_offset"] == victim.offset
    with Producer([node.api]) as producer:
        producer.send_sync("T", bytes(100 + victim.size - size), queue=0)
    assert node.status()["max_offset"] == victim.offset + victim.size
    node.kill()
    node.start("master").wait_writable()
    assert node.status()["max_offset"] == victim.offset + victim.size
    assert len(read_log(node.store).records) == 51
    assert node.stop() == 0


def test_a_stale_record_at_the_end(open_store, make_master, tmp_path):
    """A valid record at the offset of another, like a block that a disk misplaced."""

    def misplace(root):
        log = read_log(root)
        old, last = log.records[60], log.records[-1]
        assert old.size == last.size
        with open(root / "commitlog" / f"{0:020d}", "r+b") as file:
            os.pwrite(file.fileno(), os.pread(file.fileno(), old.size, old.offset), last.offset)
        return last.offset

    peer, _ = open_store()
    assert put(peer, 99) == ["PUT_OK"] * 99
    end = peer.call("store.status")["max"]
    peer.kill()
    at = misplace(tmp_path / "rocketmq")
    peer, _ = open_store()
    assert peer.call("store.status")["max"] == end > at, "RocketMQ accepts it"
    node = make_master(role="ASYNC_MASTER")
    node.stop()
    node.write(store={"flush_interval": "1h"})
    node.start("master").wait_writable()
    with Producer([node.api]) as producer:
        for _ in range(99):
            producer.send_sync("T", bytes(100), queue=0)
    node.kill()
    at = misplace(node.store)
    node.start("master").wait_writable()
    assert node.status()["max_offset"] == at
    with Consumer("T", [node.api]) as consumer:
        got = []
        while len(got) < 98:
            messages = consumer.poll(timeout_s=60)
            assert messages, len(got)
            got += messages
        assert not consumer.poll(timeout_s=0.5)
    assert [message.queue_offset for message in got] == list(range(98))
    assert node.stop() == 0


@pytest.mark.slow("a whole broker starts")
def test_reads_from_a_slave(make_group, make_peer, ports, tmp_path):
    """The master is down, and clients read from its slave with default settings."""
    group = make_group(2, ha={"allow_classic_peers": True}, store=sizes()).start()
    with Producer(group.bootstrap) as producer:
        for number in range(20):
            producer.send_sync("T", bytes([number]), queue=0)
    end = group[1].status()["max_offset"]
    broker = SlaveBroker(
        make_peer(), ports, tmp_path / "broker", group[1].ha, ["T"], slaveReadEnable=False
    )
    wait_until(lambda: broker.peer.call("store.status")["max"] == end, 60, "a RocketMQ slave")
    group[1].kill()
    pull = {"namesrv": broker.namesrv, "topic": "T", "broker": "rocketmq", "queue": 0}
    with pytest.raises(PeerError, match="REJECTREQUEST"):
        broker.peer.call("pull", **pull)
    assert broker.peer.call("store.dump", file=str(tmp_path / "dump")) == 20, "the slave has them"
    with Consumer("T", [group[2].api]) as consumer:
        got = []
        while len(got) < 20:
            messages = consumer.poll(timeout_s=60)
            assert messages, len(got)
            got += messages
    assert [message.body for message in got] == [bytes([number]) for number in range(20)]


def check_foreign_damage(make_master, root, victim, end):
    """Open that store with hastore: it cuts the log only after the operator creates `abort`."""
    node = make_master(role="ASYNC_MASTER")
    assert node.stop() == 0
    shutil.rmtree(node.store)
    shutil.copytree(root, node.store)
    file = node.store / "commitlog" / f"{0:020d}"
    before = file.read_bytes()
    node.start("master", wait=False)
    assert node.exit_code() == 3
    assert f"at {victim.offset} is damaged" in node.last_words()
    assert file.read_bytes() == before
    (node.store / "abort").touch()  # as the error advises
    node.start("master").wait_writable()
    assert node.status()["max_offset"] == victim.offset < end
    assert node.stop() == 0


def test_an_old_master_with_a_tail_of_its_own(open_store, make_group, tmp_path):
    peer, _ = open_store("a")
    put(peer, 20)
    peer.kill()  # to close a store takes 4 s
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    peer, _ = open_store("a")
    put(peer, 1)  # not replicated before the old master died
    peer.kill()
    other, address = open_store("b")
    other.call("store.put", messages=[{**messages(1)[0], "seed": 99}])
    open_store("a", brokerRole="SLAVE", master=address)
    end = other.call("store.status")["max"]
    wait_until(lambda: other.call("store.status")["push2slave"] == end, 60, "reported in sync")
    mine, theirs = read_log(tmp_path / "a"), read_log(tmp_path / "b")
    assert mine.end == theirs.end and mine.bytes != theirs.bytes, "RocketMQ does not notice"

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
