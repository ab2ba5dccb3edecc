"""Move from a RocketMQ broker to hastore without losing a message, and back.

The steps are those of docs/migrate-from-rocketmq.md, in the same order.
"""

import json
import re
import shutil

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.messages import Status
from hastore.client.producer.producer import Producer
from tests.interop.compare import (
    FILE_BYTES,
    assert_same_log,
    lines_of,
    read_lines,
    rocketmq_sizes,
    sizes,
)
from tests.interop.test_hastore_slave import Broker, follow, wait_at
from tests.process.harness import hastore, wait_until
from tests.process.stores import assert_equal_stores, read_log
from tests.spark.direct import rows

pytestmark = pytest.mark.full
# Both tests take long: brokers start, finish what they do in the background, and stop.
TOPICS = ["single", "transactional", "delayed"]


@pytest.fixture
def broker(make_peer, ports, tmp_path):
    return Broker(make_peer, ports, tmp_path / "rocketmq")


def read_topic(group, topic, count):
    got = []
    with Consumer(topic, group.bootstrap) as consumer:
        while len(got) < count:
            messages = consumer.poll(timeout_s=60)
            assert messages, f"{len(got)} of {count}"
            got += messages
    return got


def copy_log(source, target):
    """Copy the log's files, oldest first, and create `abort`, so that the next start reads all."""
    (target / "commitlog").mkdir()
    for file in sorted((source / "commitlog").iterdir()):
        shutil.copy(file, target / "commitlog")
    (target / "abort").touch()


@pytest.mark.slow("whole brokers start on both sides, and finish what they do in the background")
@pytest.mark.timeout(900)
def test_there_and_back(broker, make_group, make_peer, tmp_path):
    # The broker has several files, and delayed and half messages, which hastore only stores here.
    broker.start(topics=TOPICS)
    sent = broker.produce("single", 2_000)
    owed = len(broker.produce("delayed", 7, delayLevel=18))
    broker.produce("delayed", 5, delayLevel=1)
    broker.produce("transactional", 30)
    assert broker.max_offset > 5 * FILE_BYTES

    # 1. hastore's slaves begin with a copy, taken while the broker writes, because RocketMQ's
    # master sends an empty slave only its last file.
    writing = broker.begin("single", 6_000, seed=2)
    group = make_group(
        2,
        master_role="SLAVE",
        store=sizes(),
        ha={"classic_master": f"127.0.0.1:{broker.ha}"},
    )
    for node in group:
        node.store.mkdir()
        copy_log(broker.root, node.store)
        node.write(remoting={"enabled": False})  # no producer is asked for what is open
        follow(node)
    path = str(group[1].store)

    # 2. Spark's source reads while the broker writes.
    def count():
        places = [(row["partition"], row["offset"]) for row in rows(path=path, subscribe="single")]
        assert len(set(places)) == len(places)
        return len(places)

    assert count() >= 2_000
    sent += writing.result(180)
    assert {result[0] for result in sent} == {"SEND_OK"}
    end = broker.wait_quiet()
    for node in group:
        wait_at(node, end)

    # 3. Delayed and half messages are listed before the switch.
    done = hastore("log", "pending", "--store", path, "--json")
    assert done.returncode == 0, done.stderr
    pending = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(one["kind"] == "delayed" for one in pending) == owed
    assert {one["topic"] for one in pending if one["kind"] == "delayed"} == {"delayed"}
    halves = [one for one in pending if one["kind"] == "half"]
    assert len(halves) == 10, "a third of 30 transactions is open"

    # 4. The broker stops; both slaves have its whole log; one is promoted.
    broker.peer.call("broker.stop")
    broker.peer.kill()
    end = read_log(broker.root).end
    for node in group:
        wait_at(node, end)
        assert_same_log(broker.root, node.store, end)
    done = hastore("promote", "-c", str(group[1].path), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["role"] == "SYNC_MASTER"
    assert "classic_master: null" in group[1].path.read_text()
    # The other node follows the new master: the bytes are equal, so nothing is cut or copied.
    assert group[2].stop() == 0
    group[2].write(ha={"classic_master": None})
    group[2].start("slave")
    group[1].wait_in_sync(2)
    assert not (group[2].store / "rescued").exists()

    # 5. Python producers and consumers, and Spark, continue.
    with Producer(group.bootstrap) as producer:
        results = [producer.send_sync("single", f"py{n}".encode(), key="py") for n in range(500)]
    assert {result.status for result in results} == {Status.PUT_OK}
    assert {result.level for result in results} == {"SYNC_MEM(1)"}
    got = read_topic(group, "single", len(sent) + 500)
    places = {(message.queue_id, message.queue_offset) for message in got}
    assert len(places) == len(got) == len(sent) + 500
    group.wait_equal()
    assert count() == len(got)
    end = group[1].status()["max_offset"]

    # And back: the broker's old store is a prefix of hastore's log; it follows as a slave ...
    group[1].write(role="SYNC_MASTER", ha={"allow_classic_peers": True, "classic_master": None})
    assert group[1].stop() == 0
    group[1].start("master").wait_writable()
    peer = make_peer()
    peer.call(
        "store.open",
        store={**rocketmq_sizes(broker.root), "brokerRole": "SLAVE"},
        broker={"brokerId": 1},
        master=group[1].ha,
    )
    wait_until(lambda: peer.call("store.status")["max"] == end, 180, "RocketMQ has caught up")
    group[1].wait_in_sync(2)
    for node in group:
        assert node.stop() == 0
    peer.call("store.close")
    peer.kill()
    log = assert_equal_stores(group[1].store, group[2].store)
    assert_same_log(group[1].store, broker.root, log.end)
    # ... and becomes the broker again.
    broker.start(topics=TOPICS)
    assert broker.max_offset >= end
    results = broker.produce("single", 100, seed=9)
    assert {result[0] for result in results} == {"SEND_OK"}
    wanted = [line for line in lines_of(read_log(broker.root)) if line.startswith("single\t")]
    assert consume(broker, len(got) + 100, tmp_path / "consumed") == wanted


def consume(broker, count, file, **options):
    """Read with the official consumer; return its lines."""
    got = broker.peer.call(
        "consume",
        namesrv=broker.namesrv,
        topics=["single"],
        count=count,
        timeout=120,
        file=str(file),
        **options,
    )
    assert got == count
    return read_lines(file)


def positions_in(file):
    """Return the sum of the readers' positions that a broker has saved; 0 while it saves."""
    text = file.read_text() if file.exists() else ""
    found = re.search(r'"single@readers":\{([^}]*)\}', text)
    return sum(map(int, re.findall(r":(\d+)", found[1]))) if found else 0


@pytest.mark.slow("a whole broker starts, and finishes what it does in the background")
@pytest.mark.timeout(900)
def test_by_disk_with_the_consumers_positions(broker, make_group, tmp_path):
    """Copy the log's files there and back, with both sides stopped, and move the positions too."""
    broker.start(topics=["single"])
    sent = broker.produce("single", 400)
    consume(broker, 400, tmp_path / "first", group="readers")
    unread = broker.produce("single", 100, seed=2)
    assert {result[0] for result in sent + unread} == {"SEND_OK"}
    config = broker.root / "config"
    known = config / "consumerOffset.json"
    wait_until(lambda: positions_in(known) == 400, 180, lambda: known.read_text())
    broker.peer.kill()  # equivalent to a stop, which takes 10 s

    # There: one node gets a copy of the log, the other replicates from it.
    group = make_group(2, store=sizes())
    group[1].store.mkdir()
    copy_log(broker.root, group[1].store)
    group.start()
    bootstrap = ",".join(address.removeprefix("tcp://") for address in group.bootstrap)
    done = hastore(
        "positions", "import", str(known), "--group", "readers", "--json",
        "--bootstrap", bootstrap,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = {(one["topic"], one["outcome"]) for one in map(json.loads, done.stdout.splitlines())}
    assert ("single", "imported") in outcomes
    with Producer(group.bootstrap) as producer:
        for number in range(200):
            producer.send_sync("single", f"py{number}".encode(), key="py", queue=number % 4)
    with Consumer("single", group.bootstrap, group="readers") as consumer:
        got = []
        while len(got) < 100 + 50:
            messages = consumer.poll(max_messages=150 - len(got), timeout_s=60)
            assert messages, len(got)
            got += messages
        consumer.commit()
        left = {queue: place.queue_offset for queue, place in consumer.positions().items()}
    begun = {(result[1], result[2]) for result in unread}
    assert len({(m.queue_id, m.queue_offset) for m in got} & begun) >= 50, "unread messages first"
    assert not {(m.queue_id, m.queue_offset) for m in got} & {(r[1], r[2]) for r in sent}

    # And back: stop, copy, let RocketMQ rebuild its queues.
    saved = tmp_path / "consumerOffset.json"
    done = hastore("positions", "export", str(saved), "--bootstrap", bootstrap)
    assert done.returncode == 0, done.stderr
    for node in group:
        assert node.stop() == 0
    log = assert_equal_stores(group[1].store, group[2].store)
    for derived in ("consumequeue", "index"):
        shutil.rmtree(broker.root / derived)
    (broker.root / "checkpoint").unlink()
    for file in sorted((group[1].store / "commitlog").iterdir()):
        shutil.copy(file, broker.root / "commitlog")
    (broker.root / "abort").touch()
    shutil.copy(saved, config)
    broker.start(topics=["single"])
    assert broker.max_offset == log.end
    assert {result[0] for result in broker.produce("single", 30, seed=3)} == {"SEND_OK"}

    def is_left(line):
        topic, queue, queue_offset = line.split("\t")[:3]
        return topic == "single" and int(queue_offset) >= left[int(queue)]

    wanted = [line for line in lines_of(read_log(broker.root)) if is_left(line)]
    assert len(wanted) == 100 + 200 - 150 + 30
    assert consume(broker, len(wanted), tmp_path / "last", group="readers") == wanted
