"""A pair of processes: it replicates, serves reads from both nodes, stops, and restarts."""

import json
import random

import pytest

from hastore.client.producer.producer import OutgoingMessage, Producer
from tests.cli.kit import hastore
from tests.process.stores import assert_equal_stores, assert_queues_fit, read_log


def put_some(group, count, *, topic="T", seed=1, **options):
    """Send `count` messages of all sizes; return (body, key, result) of each."""
    rng = random.Random(seed)
    sent = []
    with Producer(group.bootstrap, **options) as producer:
        for number in range(count):
            body = b"%d:" % number + rng.randbytes(rng.choice((0, 10, 100, 1000, 5000)))
            key = f"key-{seed}-{number}"
            sent.append((body, key, producer.send(topic, body, key=key)))
        return [(body, key, future.result(60)) for body, key, future in sent]


def test_a_pair_replicates(pair):
    sent = put_some(pair, 600)
    assert {result.level for _, _, result in sent} == {"SYNC_MEM(1)"}
    end = pair.wait_equal()
    for node in pair:
        status = node.status()
        assert status["readable_offset"] == status["confirmed_offset"] == end
        assert (status["min_offset"], status["unclean"]) == (0, False)
    assert pair[1].status()["slaves"][0]["lag_bytes"] == 0
    # Each node serves every message, the slave too.
    for node in pair:
        got = consume(node, "T")
        assert len(got) == len(sent)
    for _, key, result in sent[::97]:
        line = hastore("query", "--topic", "T", "--key", key, "--bootstrap", pair[2].api, "--json")
        assert line.returncode == 0, line.stderr
        assert json.loads(line.stdout)["offset"] == result.offset
    pair.stop()
    log = assert_equal_stores(pair[1].store, pair[2].store)
    assert_queues_fit(pair[1].store, log.records)
    assert log.end == end > 3 * 65536, "several files were meant to be filled"
    by_offset = {found.offset: found for found in log.records}
    for body, key, result in sent:
        found = by_offset[result.offset]
        assert (found.body, found.properties["KEYS"]) == (body, key)
        assert (found.queue_id, found.queue_offset) == (result.queue_id, result.queue_offset)


def consume(node, topic):
    """Read a topic from one node with `hastore consume`; return the lines."""
    done = hastore(*("consume", topic, "--from", "earliest", "--bootstrap", node.api, "--json"))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_slave_shows_only_what_is_confirmed(pair):
    """While the slave is stopped, readers do not see messages that only the master has."""
    put_some(pair, 20)
    end = pair.wait_equal()
    pair[2].pause()
    with Producer(pair.bootstrap, acks=1) as producer:
        for number in range(20):
            result = producer.send_sync("T", b"alone %d" % number)
            assert result.level == "MASTER_MEM"
    status = pair[1].status()
    assert status["max_offset"] > end
    assert status["readable_offset"] == status["confirmed_offset"] == end
    pair[2].resume()
    assert pair.wait_equal() > end


def test_batches_and_acks(pair):
    with Producer(pair.bootstrap, acks="all") as producer:
        messages = [OutgoingMessage(b"b%d" % n, key=str(n), tags="x") for n in range(1000)]
        results = producer.send_batch("B", messages, queue=2).result(60)
        assert [r.queue_offset for r in results] == list(range(1000))
        assert {r.level for r in results} == {"SYNC_MEM(1)"}
    with Producer(pair.bootstrap, acks="all", sync_flush=True, delivery_timeout_s=60) as producer:
        # ha.ack_point is `written` here: slaves report what is in memory, never a synced disk.
        with pytest.raises(Exception, match="ack_point"):
            producer.send_sync("B", b"x")
    with Producer(pair.bootstrap, acks=1, sync_flush=True) as producer:
        assert producer.send_sync("B", b"x").level == "MASTER_DISK"
    with Producer(pair.bootstrap, acks=0) as producer:
        assert producer.send_sync("B", b"nobody answers").offset is None
        assert producer.flush(60)
    pair.wait_equal()


def test_disks_confirm(make_group):
    group = make_group(ha={"ack_point": "flushed"}, store={"flush": "sync"}).start()
    sent = put_some(group, 100, acks="all", sync_flush=True)
    assert {result.level for _, _, result in sent} == {"SYNC_DISK(1)"}
    end = group.wait_equal()
    assert all(node.status()["flushed_offset"] == end for node in group)


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.full), "kill"])
def test_both_go_down_and_come_back_in_the_same_epoch(make_group, how):
    # Cold nodes: their interpreters start as an operator's do, and are killed.
    pair = make_group(cold=True).start()
    for round_number in range(2):
        put_some(pair, 50, seed=round_number)
    epoch, end = pair[1].status()["epoch"], pair.wait_equal()
    for number in (1, 2) if how == "kill" else (2, 1):
        if how == "kill":
            pair[number].kill()
        else:
            assert pair[number].stop() == 0
    before = assert_equal_stores(pair[1].store, pair[2].store) if how == "stop" else None
    pair.start()
    assert pair[1].ready["epoch"] == pair[2].ready["epoch"] == str(epoch)
    assert pair[1].ready["max_offset"] == str(end)
    put_some(pair, 50, seed=9)
    assert pair.wait_equal() > end
    pair.stop()
    for node in pair:
        assert not (node.store / "rescued").exists()
    log = assert_equal_stores(pair[1].store, pair[2].store)
    assert before is None or log.bytes.startswith(before.bytes)
    assert len(log.records) == 150
    assert_queues_fit(pair[1].store, log.records)


@pytest.mark.full
def test_a_new_slave_gets_the_whole_history(make_group):
    group = make_group()
    group[1].start("master")
    group[2].start("slave")
    put_some(group, 300)
    group[2].kill()
    for part in (group[2].store,):
        for file in sorted(part.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
    # Its number is known with another store: after a lost disk a node needs a new number.
    group[2].start("slave")
    group[2].wait_log("known with another store")
    group[1].wait_status(lambda s: not s["slaves"], "the link of before the loss has ended")
    group[2].kill()
    assert read_log(group[2].store).end == 0
    for node in group:
        node.write(nodes={**node.settings["nodes"], 3: node.settings["nodes"][2]})
        nodes = {n: a for n, a in node.settings["nodes"].items() if n != 2}
        node.settings["nodes"] = nodes
        node.write()
    group[2].write(node=3, store={"root": str(group.folder / "store3")})
    group[2].store = group.folder / "store3"
    group[1].stop()
    group[1].start("master")
    group[2].start("slave")
    group[1].wait_in_sync(3)
    # A changed list of nodes is in force from the next promotion on; then node 3 confirms.
    done = hastore("promote", "-c", str(group[1].path))
    assert done.returncode == 0, done.stderr
    group[1].wait_in_sync(3)
    assert {result.level for _, _, result in put_some(group, 5, seed=2)} == {"SYNC_MEM(1)"}
    group.wait_equal()
    group.stop()
    assert_equal_stores(group[1].store, group[2].store)
