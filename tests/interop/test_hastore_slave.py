"""hastore as a slave of a RocketMQ master, with all kinds of messages of the official producers."""

import threading
import time

import pytest

from hastore.client.consumer.admin import Admin
from hastore.client.consumer.consumer import Consumer
from hastore.store.offline.pending import Owed, find_pending
from tests.interop.compare import (
    assert_same_derived,
    assert_same_log,
    lines_of,
    read_lines,
    rocketmq_sizes,
    sizes,
)
from tests.pipeline.audit.kit import audit
from tests.process.harness import wait_until
from tests.process.stores import read_log

pytestmark = pytest.mark.full
KINDS = ("single", "batch", "compressed", "transactional", "delayed", "ordered")
LIMIT_S = 180.0


class Broker:
    """A name server, a broker and a client in one JVM; after a kill, `start` makes a new JVM."""

    def __init__(self, make_peer, ports, root):
        self._make_peer = make_peer
        self.root = root
        self.listen = ports.take(-2)  # a broker takes the port minus 2 too
        self.name_server, self.ha = ports.take(), ports.take()
        self.peer = None
        self.open_halves = 0  # transactions that the producer leaves open: every third

    @property
    def namesrv(self):
        return f"127.0.0.1:{self.name_server}"

    def start(self, role="ASYNC_MASTER", topics=KINDS, **store):
        self.peer = peer = self._make_peer()
        peer.call("namesrv.start", port=self.name_server)
        peer.call(
            "broker.start",
            store={
                **rocketmq_sizes(self.root),
                "brokerRole": role,
                "haListenPort": self.ha,
                **store,
            },
            broker={
                "namesrvAddr": self.namesrv,
                "listenPort": self.listen,
                "flushConsumerOffsetInterval": 500,
            },
        )
        for topic in topics:
            peer.call("broker.topic", topic=topic, queues=4)
        return self

    def produce(self, kind, count, **options):
        return self.begin(kind, count, **options).result(120)

    def begin(self, kind, count, **options):
        if kind == "transactional":
            self.open_halves += count // 3
        options = {"topic": kind, "seed": 1, **options}
        return self.peer.begin("produce", namesrv=self.namesrv, kind=kind, count=count, **options)

    @property
    def max_offset(self):
        return self.peer.call("store.status")["max"]

    def wait_quiet(self):
        """Wait until delayed messages are delivered and decided transactions are ended.

        The broker appends both to the log some time later, on a busy machine a long time. Then wait
        until the log stops growing; return its end.
        """
        wait_until(self._owes_nothing, LIMIT_S, "delayed or half messages are not finished")
        last = [None]

        def still():
            before, last[0] = last[0], self.max_offset
            return before == last[0]

        wait_until(
            lambda: still() and not threading.Event().wait(1.5) and still(), LIMIT_S, "it grows"
        )
        return last[0]

    def _owes_nothing(self):
        soon = time.time() * 1000 + 60_000
        pending = find_pending(str(self.root))
        delayed = [one for one in pending if one.kind is Owed.DELAYED and one.due_ms < soon]
        halves = [one for one in pending if one.kind is Owed.HALF]
        return not delayed and len(halves) <= self.open_halves


@pytest.fixture
def broker(make_peer, ports, tmp_path):
    return Broker(make_peer, ports, tmp_path / "rocketmq")


@pytest.fixture
def make_slave(make_group):
    def make(broker, **ha):
        group = make_group(
            1,
            master_role="SLAVE",
            store=sizes(),
            ha={"classic_master": f"127.0.0.1:{broker.ha}", **ha},
        )
        return group

    return make


def wait_at(node, end, timeout_s=LIMIT_S):
    return node.wait_status(
        lambda s: s["max_offset"] == end and s["dispatched_offset"] == end, f"at {end}", timeout_s
    )


def follow(node):
    """Start the slave early: RocketMQ sends an empty slave only its last log file."""
    since = len(node.log)
    node.start("slave")
    node.wait_log("following the RocketMQ master", since=since)
    return node


@pytest.mark.slow("a whole broker starts, twice")
def test_a_broker_that_lost_its_end_is_not_followed(broker, make_slave):
    """Without power it has lost what it had not flushed, and writes other messages there."""
    node = make_slave(broker)[1]
    broker.start(topics=["single"])
    follow(node)
    broker.produce("single", 20)
    cut = broker.max_offset
    broker.produce("single", 5, seed=2)
    end = broker.max_offset
    wait_at(node, end)
    broker.peer.kill()
    with (broker.root / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(cut)
        file.write(bytes(end - cut))
    broker.start(topics=["single"])
    assert broker.max_offset == cut
    lacks = f"it sends nothing from {cut} on, but this log ends at {end}"
    node.wait_status(lambda s: lacks in str(s["problems"]), "the problem", LIMIT_S)
    broker.produce("single", 40, seed=3)
    others = f"are not those of this log, which ends at {end}"
    node.wait_status(lambda s: others in str(s["problems"]), "the other bytes", LIMIT_S)
    assert node.status()["max_offset"] == end


@pytest.mark.slow("a whole broker starts, and finishes what it does in the background")
def test_all_kinds_of_messages(broker, make_slave, tmp_path):
    group = make_slave(broker)
    broker.start()
    node = follow(group[1])
    for kind in KINDS:
        count = {"batch": 40, "transactional": 60}.get(kind, 150)
        results = broker.produce(kind, count)
        assert {result[0] for result in results} == {"SEND_OK"}, kind
    for kind in ("LZ4", "ZSTD"):
        broker.produce("compressed", 50, compression=kind, seed=2)
    end = broker.wait_quiet()
    wait_at(node, end)
    assert_same_log(broker.root, node.store, end)
    log = read_log(node.store)
    topics = {found.topic for found in log.records}
    assert topics >= {*KINDS, "SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC"}
    with Admin(group.bootstrap, timeout_s=60) as admin:
        ranges = admin.topics()
    for kind in KINDS:
        wanted = [found for found in log.records if found.topic == kind]
        assert wanted, kind
        with Consumer(kind, group.bootstrap) as consumer:
            got = []
            while len(got) < sum(last - first for first, last in ranges[kind].values()):
                messages = consumer.poll(timeout_s=60)
                assert messages, (kind, len(got))
                got += messages
        visible = {(found.queue_id, found.queue_offset): found.body for found in wanted}
        assert {(m.queue_id, m.queue_offset): m.raw_body for m in got} == visible, kind
    for side in (node.api, node.store):  # against the folder of the running broker
        compared = audit(broker.root, side)
        assert compared.equal and compared.complete and compared.bytes == end, compared
    assert broker.peer.call("store.dump", file=str(tmp_path / "dump")) > 0
    broker.peer.kill()  # a stop takes 10 s, and its files are already written
    assert node.stop() == 0
    assert_same_log(broker.root, node.store, end)
    assert_same_derived(broker.root, node.store)


SYNC = {"role": "SYNC_MASTER", "inSyncReplicas": 2, "totalReplicas": 2, "slaveTimeout": 4000}


@pytest.mark.slow("a whole broker starts, and waits for a slave that is silent")
def test_its_reports_release_a_synchronous_master(broker, make_slave):
    """By both of the slave's settings; the broker that a slave has left waits for the next one."""
    node = make_slave(broker)[1]
    broker.start(topics=["single"], **SYNC)
    for ack_point in ("written", "flushed"):
        node.write(ha={"ack_point": ack_point})
        check_released_by_reports(broker, node)
        assert node.stop() == 0
        wait_until(lambda: broker.peer.call("store.status")["slaves"] == 0, 60, "it has left")


def check_released_by_reports(broker, node):
    alone = broker.produce("single", 1, keepGoing=True)
    assert alone[0][0] != "SEND_OK", "the broker does wait for a slave"
    follow(node)
    wait_at(node, broker.max_offset)
    results = broker.produce("single", 300)
    assert {result[0] for result in results} == {"SEND_OK"}
    assert node.status()["max_offset"] == broker.max_offset, "released, so the slave has it"
    node.pause()
    results = broker.produce("single", 1, keepGoing=True, timeout=5000)
    assert results[0][0] == "FLUSH_SLAVE_TIMEOUT"
    node.resume()
    wait_at(node, broker.max_offset)
    results = broker.produce("single", 50)
    assert {result[0] for result in results} == {"SEND_OK"}
    end = broker.max_offset
    wait_at(node, end)
    assert_same_log(broker.root, node.store, end)


@pytest.mark.slow("each kill is followed by the start of a whole broker")
def test_both_resume_after_kill_9(broker, make_slave, tmp_path):
    """Kill the slave, then the broker, then both, while the official producer sends."""
    node = make_slave(broker)[1]
    broker.start(topics=["single", "batch"])
    follow(node)
    for victims in ("slave", "broker", "both"):
        broker.begin("single", 1_000_000, keepGoing=True, size=2_000)
        before = node.status()["max_offset"]
        node.wait_status(lambda s, b=before: s["max_offset"] > b + 200_000, "it grows")
        if victims != "broker":
            node.kill()
        if victims != "slave":
            broker.peer.kill()
        if not node.running:
            node.start("slave")
        if victims == "slave":  # it resumes while the broker keeps writing; then restart the broker
            reached = broker.max_offset
            node.wait_status(lambda s, r=reached: s["max_offset"] > r, "it resumes")
            broker.peer.call("broker.stop")
            broker.peer.kill()
        broker.start(topics=["single", "batch"])
        results = broker.produce("batch", 20)
        assert {result[0] for result in results} == {"SEND_OK"}
        end = broker.wait_quiet()
        wait_at(node, end)
        assert_same_log(broker.root, node.store, end)
    for side in (node.api, node.store):  # against the folder of the running broker
        compared = audit(broker.root, side)
        assert compared.equal and compared.complete and compared.bytes == end, compared
    assert broker.peer.call("store.dump", file=str(tmp_path / "dump")) > 0
    log = read_log(node.store)
    assert read_lines(tmp_path / "dump") == lines_of(log)
    broker.peer.kill()  # a stop takes 10 s, and its files are already written
    assert node.stop() == 0
    # RocketMQ indexes some keys twice when it restarts after a crash.
    assert_same_derived(broker.root, node.store, index_by_entries=True)
