"""Three nodes as processes: a lagging slave, two confirmations, simultaneous starts, one alone."""

import signal
import threading
import time

import pytest

from hastore.client.producer.producer import Producer
from tests.process.harness import wait_until
from tests.process.history import Recorder, check
from tests.process.stores import assert_equal_stores, read_log, rescued_records


def epochs_of(group, status):
    """Return (epoch, start offset, api port of its node) of a status' history."""
    return [
        (e["epoch"], e["start_offset"], int(group[e["node"]].api.rpartition(":")[2]))
        for e in status["history"]
    ]


def verify(group, recorder):
    """Stop all nodes, compare their stores, check the history; return the log."""
    status = next(s for node in group if (s := node.status()) and s["writable"])
    rescued = [found for node in group for found in rescued_records(node.store)]
    group.stop()
    nodes = list(group)
    for other in nodes[1:]:
        log = assert_equal_stores(nodes[0].store, other.store)
    epochs = epochs_of(group, status)
    assert check(recorder.events, log.records, rescued=rescued, epochs=epochs) == []
    return log


def send_some(recorder, producer, name, count=100):
    futures = [recorder.send(producer, "T", b"%s %d" % (name, n), f"k{n}") for n in range(count)]
    return [future.result(60) for future in futures]


def test_a_lagging_slave_catches_up_when_it_is_promoted(make_group):
    group, recorder = make_group(3).start(), Recorder()
    with Producer(group.bootstrap) as producer:
        send_some(recorder, producer, b"all")
        end = group.wait_equal()
        group[3].pause()
        send_some(recorder, producer, b"two")
        ahead = group[1].status()["max_offset"]
        group[1].kill()
        # Bytes under way to node 3 are lost with its process, so it certainly lags.
        group[3].kill()
        group[3].edit_role("SYNC_MASTER")
        group[3].start("master", wait=False)
        status = group[3].wait_writable()
        assert end < ahead <= status["max_offset"]
        assert status["history"][-1]["start_offset"] == ahead
        send_some(recorder, producer, b"after")
        group[1].edit_role("SLAVE")
        group[1].start("slave")
        group[3].wait_in_sync(1, 2)
        send_some(recorder, producer, b"end")
        group.wait_equal()
    assert "catching up" in group[3].log or status["history"][-1]["start_offset"] == ahead
    assert len(verify(group, recorder).records) == 400


@pytest.mark.full
def test_two_must_confirm(make_group):
    group, recorder = make_group(3, acks=2).start(), Recorder()
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        assert {r.level for r in send_some(recorder, producer, b"a")} == {"SYNC_MEM(2)"}
        group[3].kill()
        waiting = recorder.send(producer, "T", b"waits for the third", "k")
        time.sleep(0.5)
        assert not waiting.done()
        group[3].start("slave")
        assert waiting.result(60).level == "SYNC_MEM(2)"
        # A promotion needs 3 - 2 = 1 answer: every node has all acknowledged messages.
        group.wait_equal()
        group[1].kill()
        group[2].kill()
        group[3].edit_role("SYNC_MASTER")
        group[3].wait_writable()
        for number in (1, 2):
            group[number].edit_role("SLAVE")
            group[number].start("slave")
        group[3].wait_in_sync(1, 2)
        send_some(recorder, producer, b"b")
        group.wait_equal()
    assert len(verify(group, recorder).records) == 201


def test_three_start_at_once_from_empty(make_group):
    group, recorder = make_group(3), Recorder()
    sender = Producer(group.bootstrap)
    results = []
    thread = threading.Thread(target=lambda: results.extend(send_some(recorder, sender, b"early")))
    thread.start()
    for node in reversed(list(group)):
        node.start(wait=False)
    for node in group:
        node.wait_ready()
    group[1].wait_in_sync(2, 3)
    thread.join(60)
    sender.close()
    assert len(results) == 100
    assert group.wait_equal() > 0
    # There is one master and one epoch, the first.
    assert {node.status()["epoch"] for node in group} == {1 << 16 | 1}
    assert [node.number for node in group if node.status()["writable"]] == [1]
    verify(group, recorder)


@pytest.mark.full
def test_one_of_three_waits_and_says_for_whom(make_group):
    group = make_group(3)
    node = group[1].start("master")
    status = node.status()
    assert not status["writable"] and status["epoch"] == 0
    assert "needs 2" in status["reason"] and "node 2, 3" in status["reason"]
    assert "waiting for node 2, 3" in node.log
    node.send(signal.SIGTERM)
    assert node.exit_code(50) == 0  # it stops without waiting for the others
    # With the second node there are two of three, which is enough.
    node.start("master")
    group[2].start("slave")
    node.wait_writable()
    node.wait_in_sync(2)
    with Producer(group.bootstrap) as producer:
        assert producer.send_sync("T", b"two are enough").level == "SYNC_MEM(1)"


@pytest.mark.full
def test_the_slave_that_confirms_may_change(make_group):
    """With `acks: 1` either slave may be down; a promotion needs two of the three nodes."""
    group, recorder = make_group(3).start(), Recorder()
    with Producer(group.bootstrap) as producer:
        for number in (2, 3, 2):
            group[number].kill()
            send_some(recorder, producer, b"without %d, %d" % (number, len(recorder.puts)))
            group[number].start("slave")
            group[1].wait_in_sync(2, 3)
        # Node 2 alone, one of three, is not enough.
        group[1].kill()
        group[3].kill()
        group[2].edit_role("SYNC_MASTER")
        group[2].wait_log("waiting for node 1, 3")
        assert not group[2].status()["writable"]
        group[3].start("slave")
        group[2].wait_writable()
        send_some(recorder, producer, b"new")
        group[1].edit_role("SLAVE")
        group[1].start()
        group[2].wait_in_sync(1, 3)
        group.wait_equal()
    assert len(verify(group, recorder).records) == 400


@pytest.mark.full
def test_a_stopped_slave_delays_no_put(make_group):
    group, recorder = make_group(3, ha={"slave_timeout": "2m"}).start(), Recorder()
    with Producer(group.bootstrap) as producer:
        group[2].pause()
        began = time.monotonic()
        assert {r.level for r in send_some(recorder, producer, b"a")} == {"SYNC_MEM(1)"}
        assert time.monotonic() - began < 60  # well before the slave timeout of two minutes
        group[3].pause()
        late = recorder.send(producer, "T", b"nobody confirms", "k")
        time.sleep(0.5)
        assert not late.done()
        group[2].resume()
        assert late.result(60).level == "SYNC_MEM(1)"
        group[3].resume()
        wait_until(lambda: group[1].status()["waiting_puts"] == 0, 60, "puts still wait")
        group.wait_equal()
    assert len(read_log(group[1].store).records) == 101
    verify(group, recorder)
