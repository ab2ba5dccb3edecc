"""RocketMQ acknowledges a topic of 43 characters and 129 bytes, but nobody can read the record.

A hastore slave ends its log before such a record, reports it, and keeps the rest under rescued/.
"""

import pytest

from hastore.client.consumer.consumer import Consumer
from tests.interop.compare import assert_same_log, rocketmq_sizes, sizes
from tests.interop.test_hastore_slave import follow, wait_at
from tests.process.harness import wait_until

pytestmark = pytest.mark.full


def read_all(node, count):
    """Read `count` messages of T, and check that there are no more."""
    with Consumer("T", [node.api]) as consumer:
        got = []
        while len(got) < count:
            messages = consumer.poll(timeout_s=60)
            assert messages, len(got)
            got += messages
        assert not consumer.poll(timeout_s=0.5) and len(got) == count


@pytest.mark.slow("the slave tries again and again, and RocketMQ closes its store")
def test_a_slave_ends_its_log_before_an_unreadable_record(make_group, make_peer, ports, tmp_path):
    peer, port, root = make_peer(), ports.take(), tmp_path / "rocketmq"
    settings = {**rocketmq_sizes(root), "haListenPort": port}
    peer.call("store.open", store=settings)
    classic = {"classic_master": f"127.0.0.1:{port}"}
    group = make_group(1, master_role="SLAVE", store=sizes(), ha=classic)
    node = follow(group[1])

    def put(count, topic="T"):
        messages = [{"topic": topic, "queue": 0, "size": 100, "seed": n} for n in range(count)]
        results = peer.call("store.put", messages=messages)
        assert {result[0] for result in results} == {"PUT_OK"}
        return results[0][1]

    def wait_turned_away():
        status = node.wait_status(
            lambda s: s["reason"] and "is unreadable" in s["reason"], "turned away"
        )
        assert f"its record at {broken} " in status["reason"]
        assert status["max_offset"] == status["readable_offset"] == broken
        told = [one for one in status["problems"] if one != status["reason"]]
        number = "an unknown number of messages were cut from this log"
        assert told and all(one.startswith(number) for one in told), status

    put(3)
    broken = put(1, topic="日" * 43)
    put(3)
    end = peer.call("store.status")["max"]
    wait_turned_away()
    read_all(node, 3)
    kept = (node.store / "rescued" / f"0-{broken}" / f"{0:020d}").read_bytes()
    log = (root / "commitlog" / f"{0:020d}").read_bytes()
    assert kept[broken:end] == log[broken:end]
    # Further attempts write nothing to disk, and a restart is possible.
    wait_until(lambda: peer.call("store.status")["slaves"] == 0, 60, "the link is closed")
    assert node.stop() == 0
    node.start("slave")
    wait_turned_away()
    # RocketMQ restarts without that record, and without the acknowledged records after it.
    peer.call("store.close")
    assert peer.call("store.open", store=settings)["max"] == broken
    put(5)
    end = peer.call("store.status")["max"]
    wait_at(node, end)
    assert_same_log(root, node.store, end)
    read_all(node, 8)
    assert node.stop() == 0
    assert len(list((node.store / "rescued").iterdir())) == 2, "one per start"
