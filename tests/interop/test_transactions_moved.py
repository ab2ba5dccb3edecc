"""A store with open transactions moves from a RocketMQ broker to hastore, and back.

Whoever goes on asks for what is open, and for nothing else; each message is committed once.
"""

import shutil
import time

import msgspec
import pytest

from hastore.protocol.remoting import Answer
from hastore.record.codec import decode_record
from hastore.record.transactions import HALF_TOPIC
from tests.interop.rocketmq_clients import HastoreSite, RocketSite
from tests.interop.test_migration import copy_log
from tests.interop.test_rocketmq_sends import SEND, STORE, UNIQUE, fields, log_of
from tests.interop.test_rocketmq_transactions import (
    CHECK,
    COMMIT,
    FAST,
    HEARTBEAT,
    NOT_YET,
    ROLLBACK,
    TRANSACTION,
    FastPeer,
    ended,
)
from tests.process.harness import Group, Ports, wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
TOPIC = "Moved"


class PatientPeer(FastPeer):
    """A broker that asks often before it sets a message aside."""

    more = {"transactionCheckMax": 50}


class Producer:
    """A producer of the group, which answers checks only when it is told to."""

    def __init__(self, address):
        self.client = RemotingClient(address)
        self.beat()

    def beat(self):
        groups = [{"groupName": "producers"}]
        beat = {"clientID": "me", "producerDataSet": groups, "consumerDataSet": []}
        answer = self.client.ask(HEARTBEAT, {}, msgspec.json.encode(beat))
        assert answer.code == Answer.SUCCESS

    def half(self, name):
        given = fields(TOPIC, g=str(int(time.time() * 1000)), f="4", e="0")
        given["i"] = UNIQUE.replace("AC1100010A2B18B4AAC27F2F0A2B0000", name) + TRANSACTION
        sent = self.client.ask(SEND, given, name.encode())
        assert sent.code == Answer.SUCCESS, sent
        return sent

    def end(self, sent, how):
        assert ended(self.client, sent, how).code == Answer.SUCCESS

    def answer_checks(self, ends, limit_s):
        """Answer checks as `ends` says, until the time is over; return who was asked, in order."""
        names, deadline = [], time.monotonic() + limit_s
        while (left := deadline - time.monotonic()) > 0:
            self.client.sock.settimeout(left)
            try:
                frame = self.client.pushed.pop(0) if self.client.pushed else self.client.next()
            except TimeoutError:
                break
            if frame.code != CHECK:
                continue
            name = decode_record(frame.body).body.decode()
            names.append(name)
            given = {
                "producerGroup": "producers", "fromTransactionCheck": "true",
                "commitOrRollback": str(ends.get(name, NOT_YET)), **{
                    key: frame.fields[key] for key in
                    ("tranStateTableOffset", "commitLogOffset", "msgId", "transactionId")
                },
            }  # fmt: skip
            self.client.send(37, given, one_way=True)
        self.client.sock.settimeout(60)
        return names

    def close(self):
        self.client.close()


def messages(folder):
    """Return the bodies in the topic, in the log's order."""
    records = [decode_record(raw) for raw in log_of(folder)]
    return [one.body.decode() for one in records if one.topic == TOPIC and one.body != b"first"]


def begin(site):
    """Let the topic come into being."""
    client = RemotingClient(site.master)
    assert client.ask(SEND, fields(TOPIC, e="0"), b"first").code == Answer.SUCCESS
    client.close()


@pytest.mark.slow("brokers start, and producers are asked")
@pytest.mark.timeout(600)
def test_open_transactions_move_there_and_back(rocketmq_5, tmp_path):
    ports = Ports()
    broker_root = tmp_path / "rocketmq-store"
    peer = PatientPeer(rocketmq_5, tmp_path, "before")
    site = RocketSite(peer, ports, broker_root)
    begin(site)
    producer = Producer(site.master)
    # `checked` is put again by the broker for each check, `fresh` is open, and the rest has ended;
    # the broker is killed before it has listed `late` as ended.
    producer.half("checked")
    asked = producer.answer_checks({}, 6.5)
    assert set(asked) == {"checked"} and len(asked) > 1, asked
    for name, how in (("committed", COMMIT), ("rolled", ROLLBACK)):
        producer.end(producer.half(name), how)
    time.sleep(4)  # longer than a broker gathers what has ended
    producer.end(producer.half("late"), COMMIT)
    producer.half("fresh")
    producer.half("fresh-rolled")
    commitlog = broker_root / "commitlog"
    names = {"checked", "committed", "rolled", "late", "fresh", "fresh-rolled"}
    wait_until(lambda: names <= {
        decode_record(raw).body.decode() for raw in log_of(commitlog)
    }, 60, "the log has not all yet")  # fmt: skip
    peer.kill()
    producer.close()
    halves = [one for one in map(decode_record, log_of(commitlog)) if one.topic == HALF_TOPIC]
    assert sum(one.body == b"checked" for one in halves) > 1, "put again for each check"

    group = Group(tmp_path, store=STORE)
    group[1].store.mkdir(parents=True)
    copy_log(broker_root, group[1].store)
    for node in group:
        node.write(remoting={"twins": False, **FAST, "transaction_check_max": 50})
    there = HastoreSite(group.start(), "pair")
    producer = Producer(there.master)
    ends = {"checked": COMMIT, "fresh": COMMIT, "fresh-rolled": ROLLBACK}
    asked = producer.answer_checks(ends, 7)
    assert set(asked) == ends.keys(), asked
    assert len(asked) == 3, f"once each: {asked}"
    assert sorted(messages(group[1].store / "commitlog")) == [
        "checked", "committed", "fresh", "late",
    ]  # fmt: skip
    status = group[1].status()["transactions"]
    assert status["open"] == 0
    producer.end(producer.half("new"), COMMIT)
    producer.half("open")
    producer.end(producer.half("back"), ROLLBACK)
    time.sleep(2.5)  # the master lists `new` as ended a second later
    producer.close()
    group.wait_equal()
    for node in group:
        assert node.stop() == 0
    stored = messages(group[1].store / "commitlog")

    for derived in ("consumequeue", "index", "config"):
        shutil.rmtree(broker_root / derived, ignore_errors=True)
    (broker_root / "checkpoint").unlink(missing_ok=True)
    for file in sorted((group[1].store / "commitlog").iterdir()):
        shutil.copy(file, broker_root / "commitlog")
    (broker_root / "abort").touch()
    peer = PatientPeer(rocketmq_5, tmp_path, "after")
    site = RocketSite(peer, ports, broker_root)
    peer.call("broker.topic", topic=TOPIC, queues=4)
    producer = Producer(site.master)
    asked = producer.answer_checks({"open": COMMIT}, 12)
    assert set(asked) == {"open"}, asked
    wait_until(lambda: messages(commitlog) == [*stored, "open"], 60, lambda: messages(commitlog))
    producer.close()
    peer.kill()
    group.close()
    ports.close()
