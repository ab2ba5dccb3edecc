"""Two nodes of a group that followed two different RocketMQ masters, with logs of equal length.

Epoch 0 names no writer, so only a comparison of the bytes shows that the logs differ.
"""

import json

import pytest

from hastore.client.producer.producer import Producer
from tests.interop.compare import assert_same_log, rocketmq_sizes, sizes
from tests.interop.test_hastore_slave import follow, wait_at
from tests.process.harness import hastore
from tests.process.stores import read_log

pytestmark = pytest.mark.full


def test_their_logs_are_never_mixed(make_group, make_peer, ports, tmp_path):
    group = make_group(2, master_role="SLAVE", store=sizes())
    roots = []
    for node in group:
        peer, port = make_peer(), ports.take()
        roots.append(tmp_path / f"rocketmq{node.number}")
        peer.call("store.open", store={**rocketmq_sizes(roots[-1]), "haListenPort": port})
        node.write(ha={"classic_master": f"127.0.0.1:{port}"})
        follow(node)
        messages = [
            {"topic": "T", "queue": 0, "size": 300, "seed": node.number * 1_000 + n}
            for n in range(600)
        ]
        peer.call("store.put", messages=messages)
        end = peer.call("store.status")["max"]
        wait_at(node, end)
        assert_same_log(roots[-1], node.store, end)
        peer.kill()
    assert group[1].status()["max_offset"] == group[2].status()["max_offset"] > 0
    done = hastore("promote", "-c", str(group[1].path), "--async", "--json")
    assert done.returncode == 0, done.stderr
    assert group[2].stop() == 0
    group[2].write(ha={"classic_master": None})
    group[2].start("slave")
    status = group[2].wait_status(
        lambda s: s["reason"] and "different RocketMQ masters" in s["reason"], "refused"
    )
    assert "hastore demote -c FILE --accept-loss" in status["reason"]
    with Producer([group[1].api]) as producer:
        producer.send_sync("T", b"goes on", queue=0)
    assert_same_log(roots[1], group[2].store, end)  # it kept its own bytes

    done = hastore("demote", "-c", str(group[2].path), "--accept-loss", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["role"] == "SLAVE"
    group[1].wait_in_sync(2)
    with Producer([group[1].api], acks="all") as producer:
        assert producer.send_sync("T", b"on both", queue=0).level == "SYNC_MEM(1)"
    assert read_log(group[2].store).bytes == read_log(group[1].store).bytes
    (aside,) = (group[2].store / "rescued").iterdir()
    assert_same_log(roots[1], aside, end)
