"""Delays and retries leave the same bytes in a hastore group's store as in a RocketMQ broker's."""

import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hastore.record.codec import NO_HOST, encode_record
from hastore.record.delays import DELAYS_MS, SCHEDULE_TOPIC
from hastore.store.offline.reader import StoreReader
from tests.interop.build import CLIENTS_5, command
from tests.interop.rocketmq_clients import LIMIT_S, Clients, HastoreSite, RocketSite
from tests.interop.rocketmq_scenes import RICH, on, ready
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until

pytestmark = pytest.mark.full
DELAYED, RETRIED, GROUP = "Delayed", "Retried", "group"
TOPICS = (SCHEDULE_TOPIC, DELAYED, RETRIED, f"%RETRY%{GROUP}", f"%DLQ%{GROUP}")
STORE = {
    "commitlog_file_size": "16MiB",
    "consume_queue_units": 3000,
    "index_slots": 10_000,
    "index_entries": 40_000,
}
# What differs from one run to the next.
OWN = re.compile(rb"(UNIQ_KEY|ORIGIN_MESSAGE_ID)\x01([0-9A-F]+)\x02")
MARK = re.compile(rb"HS_DELAYED\x01([0-9]+)-([0-9]+)\x02$")


@pytest.fixture
def jvm(tmp_path):
    made = Clients(command(CLIENTS_5), tmp_path, "clients")
    yield made
    made.kill()


@pytest.fixture(params=["pair", "dledger"])
def hastore(request, tmp_path):
    folder = tmp_path / "hastore"
    folder.mkdir()
    group = (Group if request.param == "pair" else DLedgerGroup)(folder, store=STORE)
    yield HastoreSite(group.start(), request.param)
    group.close()


@pytest.fixture
def rocketmq(make_peer, ports, tmp_path):
    return RocketSite(make_peer(), ports, tmp_path / "rocketmq")


def play(jvm, site, store):
    """Send messages with delays, and one that is refused until it is a dead letter."""
    producer = jvm.producer(site)
    for topic in (DELAYED, RETRIED):
        ready(jvm, producer, topic)
    messages = [
        {"topic": DELAYED, "body": "1 s", "delay": 1, **RICH},
        {"topic": DELAYED, "body": "5 s", "delay": 2},
        {"topic": DELAYED, "body": "two hours", "delay": 99},
    ]
    jvm.send(producer, messages, "queue", **on(("g0", 2), DELAYED))
    consumer = jvm.push(site, GROUP, RETRIED, refuse=9, delay_level=1, max_reconsume=1)
    retried = [{"topic": RETRIED, "body": "again", **RICH}]
    jvm.send(producer, retried, "queue", **on(("g0", 3), RETRIED))

    def settled():
        with StoreReader(str(store())) as reader:
            topics = [record.topic for record in reader.records()]
        return topics.count(f"%DLQ%{GROUP}") == 2 and topics.count(DELAYED) == 3

    wait_until(settled, LIMIT_S, "the messages are not delivered")
    jvm.call("push.stop", name=consumer)
    jvm.call("producer.stop", name=producer)


def stored(store):
    """Return each record of the topics as bytes, without what differs from run to run."""
    found, marks, waiting = [], {}, {}
    with StoreReader(str(store)) as reader:
        for record in reader.records():
            if record.topic not in TOPICS:
                continue
            if record.topic == SCHEDULE_TOPIC:
                waiting[record.physical_offset] = record
            raw = record.properties
            mark = MARK.search(raw)
            if mark is not None:
                marks[int(mark[2])] = int(mark[1])
                raw = raw[: mark.start()]
            raw = OWN.sub(lambda one: one[1] + b"\x01%d\x02" % len(one[2]), raw)
            assert record.store_host != NO_HOST != record.born_host
            found.append(
                encode_record(
                    replace(
                        record, properties=raw, physical_offset=0, queue_offset=0,
                        born_timestamp_ms=0, store_timestamp_ms=0, born_host=NO_HOST,
                        store_host=NO_HOST,
                    )
                )
            )  # fmt: skip
    return sorted(found), marks, waiting


def entries(store):
    """Return the entries of SCHEDULE_TOPIC_XXXX's queues: (queue, offset, size, tagsCode)."""
    found = []
    for folder in sorted((store / "consumequeue" / SCHEDULE_TOPIC).iterdir()):
        for file in sorted(folder.iterdir()):
            raw = file.read_bytes()
            units = struct.iter_unpack(">qiq", raw[: len(raw) // 20 * 20])
            found += [(int(folder.name), *unit) for unit in units if 0 < unit[1] < 2**31 - 1]
    return found


@pytest.mark.slow("delays of seconds, with RocketMQ and with hastore")
def test_records_and_queue_entries_are_rocketmqs(jvm, rocketmq, hastore, tmp_path):
    with ThreadPoolExecutor(2) as threads:  # most of it is waiting
        theirs_done = threads.submit(play, jvm, rocketmq, lambda: tmp_path / "rocketmq")
        play(jvm, hastore, lambda: hastore.writable().store)
        theirs_done.result()
    theirs, _, their_waiting = stored(tmp_path / "rocketmq")
    store = hastore.writable().store
    ours, marks, waiting = stored(store)
    assert ours == theirs
    assert len(waiting) == len(their_waiting) == 5
    for root, records in ((tmp_path / "rocketmq", their_waiting), (store, waiting)):
        units = entries(root)
        assert {unit[1] for unit in units} == records.keys()
        for queue_id, offset, size, tags_code in units:
            record = records[offset]
            assert (queue_id, size) == (record.queue_id, record.size)
            assert tags_code == record.store_timestamp_ms + DELAYS_MS[queue_id]
    delivered = {at: one.queue_id + 1 for at, one in waiting.items() if one.queue_id < 17}
    assert marks == delivered
