"""Inner batches: one record with several messages of a producer, and its own kind of queue.

RocketMQ writes them for a producer's batch to a topic with `queue.type=BatchCQ`.
"""

import collections
import hashlib

import pytest

from hastore.client.consumer.consumer import Consumer
from tests.interop.compare import QUEUE_UNITS, assert_same_derived, assert_same_log, sizes
from tests.interop.test_hastore_slave import Broker, follow, wait_at
from tests.process.stores import read_log
from tests.spark.direct import rows

pytestmark = pytest.mark.full
UNIT_BYTES = 46


@pytest.mark.slow("a whole broker starts, and finishes what it does in the background")
@pytest.mark.timeout(900)
def test_inner_batches_are_stored_as_one_message_and_read_as_one_or_as_several(
    make_peer, make_group, ports, tmp_path
):
    broker = Broker(make_peer, ports, tmp_path / "rocketmq")
    broker.start(topics=["single"], mapperFileSizeBatchConsumeQueue=QUEUE_UNITS * UNIT_BYTES)
    broker.peer.call("broker.topic", topic="inner", queues=2, type="BatchCQ")
    classic = {"classic_master": f"127.0.0.1:{broker.ha}"}
    node = follow(make_group(1, master_role="SLAVE", store=sizes(), ha=classic)[1])
    sent = broker.produce("batch", 60, topic="inner")
    assert {result[0] for result in sent} == {"SEND_OK"}
    broker.produce("single", 20)
    end = broker.wait_quiet()
    wait_at(node, end)
    log = read_log(node.store)
    batches = [found for found in log.records if found.topic == "inner"]
    assert {found.sys_flag for found in batches} == {0xC0} and len(batches) == 60
    assert sum(int(found.properties["INNER_NUM"]) for found in batches) == len(sent) > 300
    # A consumer gets a batch as one message, in RocketMQ's encoding; its position counts them all.
    wanted = {(found.queue_id, found.queue_offset): found.body for found in batches}
    ends = {queue: sum(1 for result in sent if result[1] == queue) for queue in (0, 1)}
    with Consumer("inner", [node.api], queues=[0, 1]) as consumer:
        got = []
        while len(got) < len(batches):
            messages = consumer.poll(timeout_s=60)
            assert messages, len(got)
            got += messages
        assert not consumer.poll(timeout_s=0.2)
        assert {q: place.queue_offset for q, place in consumer.positions().items()} == ends
    assert {(m.queue_id, m.queue_offset): m.body for m in got} == wanted and len(got) == 60
    # The Spark source gives each message a row, as RocketMQ's consumers take the batches apart.
    inside, messages = collections.Counter(), {}
    for _, queue, first, digest in sent:
        messages[queue, first + inside[queue, first]] = digest
        inside[queue, first] += 1
    for where in ({"path": str(node.store)}, {"hastore.bootstrap.servers": node.api}):
        got = rows(subscribe="inner", **where)
        assert messages == {
            (row["partition"], row["offset"]): hashlib.sha1(row["value"]).hexdigest() for row in got
        }
        assert len(got) == len(sent) and any(row["key"] for row in got)
    broker.peer.kill()
    assert node.stop() == 0
    assert_same_log(broker.root, node.store, end)
    assert_same_derived(broker.root, node.store)
