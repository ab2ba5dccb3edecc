"""What producers send is stored by hastore as RocketMQ 5.3.3 stores it: each byte of each record.

Only what the store itself decides may differ: times, addresses, offsets in the log.
"""

import contextlib
import re
import zlib

import pytest

from hastore.protocol.remoting import JSON, ROCKETMQ, BatchMessage, encode_batch
from hastore.record.codec import decode_record
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.dledger_files import read_ledger
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import Clients, HastoreSite, RocketSite
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, Ports, wait_until
from tests.process.stores import Log
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
STORE = {
    "commitlog_file_size": "16MiB",
    "consume_queue_units": 3000,
    "index_slots": 10_000,
    "index_entries": 40_000,
}
UNIQUE = "UNIQ_KEY\x01AC1100010A2B18B4AAC27F2F0A2B0000\x02"
SEND_LONG, SEND, SEND_BATCH = 10, 310, 320
LONG = dict(
    zip(
        "abcdefghijklm",
        (
            *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId"),
            *("sysFlag", "bornTimestamp", "flag", "properties", "reconsumeTimes", "unitMode"),
            *("maxReconsumeTimes", "batch"),
        ),
        strict=True,
    )
)


def fields(topic, **more):
    return {
        "a": "producers", "b": topic, "c": "TBW102", "d": "4", "e": "1", "f": "0",
        "g": "1700000000123", "h": "0", "i": UNIQUE + "WAIT\x01true\x02", "j": "0", "k": "false",
        "m": "false", **more,
    }  # fmt: skip


def cases(topic):
    """Return code, fields, body and kind of many sends, usual and odd ones."""
    rich = UNIQUE + "KEYS\x01one two\x02TAGS\x01red\x02ümläut\x01日本 🚀\x02a.b\x01x y\x02"
    zipped = zlib.compress(b"compresses " * 1000)
    batch = [
        BatchMessage(0, b"first", b"UNIQ_KEY\x01U1\x02KEYS\x01k\x02"),
        BatchMessage(9, b"second", b"UNIQ_KEY\x01U2\x02TAGS\x01t"),
        BatchMessage(0, b"third", b""),
    ]
    many = UNIQUE + "".join(f"name{number}\x01value{number}\x02" for number in range(200))
    popped = UNIQUE + "POP_CK\x010 5 60000 0 0 g0 1 5\x02xPOP_CK\x01x\x02"
    received = [BatchMessage(0, b"popped", b"POP_CK\x01own\x02")]
    timers = UNIQUE + "TIMER_DELAY_SEC\x015\x02TIMER_DELAY_MS\x015\x02TIMER_DELIVER_MS\x015\x02"
    sends = [
        (SEND, fields(topic), b"plain"),
        (SEND, fields(topic, h="7", i=rich), b"rich"),
        (SEND, fields(topic, h="-3", j="2"), b"flags"),
        (SEND, fields(topic, f="1"), zipped),
        (SEND, fields(topic, f="3"), zipped),
        (SEND, fields(topic, f="8"), b"a committed one"),
        (SEND, fields(topic, i=UNIQUE + "WAIT\x01false\x02"), b"the master alone"),
        (SEND, fields(topic, i=UNIQUE + "empty\x01\x02\x01no name\x02piece\x02x\x01y"), b"odd"),
        (SEND, fields(topic, i=UNIQUE + "CLUSTER\x01mine\x02TRACE_ON\x01false\x02"), b"taken"),
        (SEND, fields(topic, i=many), b"many properties"),
        (SEND, fields(topic, i=""), b"none"),
        (SEND, {k: v for k, v in fields(topic).items() if k not in "ij"}, b"absent"),
        (SEND, fields(topic, g="-5"), b"\0" * 300_000),
        (SEND, fields(topic, f="0", e="3"), b"the last queue"),
        (SEND, fields(f"%RETRY%{topic}", e="0", j="3"), b"a retry"),
        (SEND, fields(f"%RETRY%{topic}", e="0", j="17"), b"tried too often"),
        (SEND, fields(f"%RETRY%{topic}", e="0", j="3", l="2"), b"tried too often for the client"),
        (SEND, fields(topic, i=rich + "DELAY\x0110\x02"), b"delayed"),
        (SEND, fields(topic, i=rich + "DELAY\x01999\x02"), b"delayed, most of all"),
        (SEND, fields(topic, i=rich + "DELAY\x010\x02"), b"not delayed"),
        (SEND, fields(topic, i=timers + "DELAY\x0111\x02"), b"delayed, and no timer"),
        (SEND, fields(topic, i=timers + "TIMER_OUT_MS\x015\x02"), b"a timer that is over"),
        (SEND, fields(topic, i=popped), b"received by a pop"),
        (SEND, fields(topic, i=popped + "DELAY\x013\x02"), b"delayed, received by a pop"),
        (SEND, fields(topic, i=UNIQUE + "a\x011\x02b\x012\x02a\x013\x02"), b"a name twice"),
        (SEND, fields(topic, i=UNIQUE + "\U0001f680\x01x\x02\xe9\x01\U0001f680\x02"), b"no ASCII"),
        (SEND, fields(topic, i=UNIQUE + "KEYS\x01 a  b \x02TAGS\x01 \x02"), b"blanks"),
        (SEND, fields(topic, i=UNIQUE + "DELAY\x01-3\x02TRAN_MSG\x01no\x02"), b"below 0"),
        (SEND, fields(f"%DLQ%{topic}", e="0", i=UNIQUE + "DELAY\x012\x02"), b"delayed dead letter"),
        (SEND_BATCH, fields(topic, m="true", i=popped), encode_batch(received)),
        (SEND_BATCH, fields(topic, m="true", i="WAIT\x01true\x02"), encode_batch(batch)),
        (SEND_BATCH, fields(topic, m="true", i="", f="1"), encode_batch(batch[:1])),
        (SEND, fields(topic, m="true", i="x\x01y"), encode_batch(batch)),
    ]
    refused = [
        (SEND, fields(topic, e="4"), b"no such queue"),
        (SEND, fields("SCHEDULE_TOPIC_XXXX"), b"reserved"),
        (SEND, fields("a.b"), b"no name"),
        (SEND, fields("x" * 128), b"a long name"),
        (SEND, fields(topic, i="x\x01" + "y" * 33_000 + "\x02"), b"long properties"),
        (SEND_BATCH, fields(f"%RETRY%{topic}", e="0", m="true"), encode_batch(batch)),
    ]
    for code, given, body in sends + refused:
        yield code, given, body, JSON
    for code, given, body in (sends[1], sends[3], sends[-1]):
        yield code, given, body, ROCKETMQ
        if code == SEND:
            yield SEND_LONG, {LONG[name]: value for name, value in given.items()}, body, ROCKETMQ


def log_of(folder):
    """Return the records of a commit log, in its order."""
    log = Log(folder)
    return [log.bytes[one.offset - log.start :][: one.size] for one in log.records]


def log_of_entries(folder):
    """Return the records in the entries of a live log of mode dledger, in its order."""
    return [one.body for one in read_ledger(folder, is_live=True) if one.body]


def stored(log, topics):
    """Return records of topics, each with its bytes without what the store decides."""
    found = []
    for whole in log:
        record = decode_record(whole)
        if record.topic not in topics:
            continue
        raw = bytearray(whole)
        assert record.store_host.address == record.born_host.address == b"\x7f\0\0\x01"
        raw[20:36] = bytes(16)  # the places in queue and log
        raw[52:56] = bytes(4)  # the client's port
        raw[56:72] = bytes(16)  # store time and host
        found.append((record, bytes(raw)))
    return found


def masked(_record, raw):
    """Return a record of a Java client without what differs from run to run."""
    changing = raw[:12] + bytes(4) + raw[16:20] + bytes(8) + raw[28:40] + bytes(8) + raw[48:]
    return re.sub(rb"UNIQ_KEY\x01[^\x02]{32}", b"UNIQ_KEY\x01", changing)  # a batch has two


@contextlib.contextmanager
def a_broker(peer, folder):
    """Give the site of a broker, and what reads its log."""
    ports = Ports()
    site = RocketSite(peer, ports, folder / "store")
    yield site, lambda: log_of(folder / "store" / "commitlog")
    peer.kill()
    ports.close()


@contextlib.contextmanager
def a_group(kind, folder, **remoting):
    """Give the site of a group that is one broker, as RocketMQ has; and what reads its log."""
    group = (Group if kind == "pair" else DLedgerGroup)(folder, store=STORE)
    for node in group:
        node.write(remoting={"twins": False, **remoting})
    site = HastoreSite(group.start(), kind)

    def log():
        node = site.writable()
        if kind == "pair":
            return log_of(node.store / "commitlog")
        return log_of_entries(node.store / f"dledger-n{node.number}")

    yield site, log
    group.close()


@pytest.fixture(scope="module")
def rocket(rocketmq_5, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rocketmq")
    with a_broker(Peer(rocketmq_5, folder, "rocketmq"), folder) as found:
        yield found


@pytest.fixture(scope="module", params=["pair", "dledger"])
def hastore(request, tmp_path_factory):
    with a_group(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def ask_all(address, topic):
    """Send all cases to a place; return what was answered, without ids."""
    client = RemotingClient(address)
    client.ask(SEND, fields(topic), b"the topic comes into being")
    answers = []
    for code, given, body, kind in cases(topic):
        answer = client.ask(code, given, body, kind=kind)
        fields_ = dict(answer.fields)
        ids = fields_.pop("msgId", "").split(",")
        if not given.get("i", given.get("properties", "")).startswith("UNIQ_KEY"):
            fields_.pop("transactionId", None)
        if body.startswith(b"delayed"):  # its place in a queue that others use too
            fields_.pop("queueOffset", None)
        if answer.code:  # RocketMQ names its region in refusals too
            fields_.clear()
        answers.append((body[:20], answer.code, fields_, len(ids), {len(one) for one in ids}))
    client.close()
    return answers


def test_frames_are_stored_byte_for_byte(rocket, hastore):
    topic = f"Frames_{hastore[0].name}"
    topics = (topic, f"%RETRY%{topic}", f"%DLQ%{topic}", "SCHEDULE_TOPIC_XXXX")
    found = []
    for site, read in (rocket, hastore):
        before = len(stored(read(), topics))
        answers = ask_all(site.master, topic)
        records = []
        for record, raw in stored(read(), topics)[before:]:
            unique = dict(record.property_pairs).get("UNIQ_KEY", "")
            known = unique in UNIQUE or unique.startswith("U")
            records.append(raw if known else raw.replace(unique.encode(), b"?" * len(unique)))
        found.append((answers, records))
    (wanted, wanted_records), (answers, records) = found
    assert answers == wanted
    assert len(records) == len(wanted_records) > 25
    for mine, its in zip(records, wanted_records, strict=True):
        assert decode_record(mine) == decode_record(its)
        assert mine == its


@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_java_clients_messages_are_stored_byte_for_byte(rocket, hastore, version, tmp_path):
    jvm = Clients(command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4), tmp_path, "clients")
    topic = f"Java_{version.replace('.', '_')}_{hastore[0].name}"
    rich = {"tags": "red", "keys": "a b", "flag": 7, "properties": {"ü": "日本", "n": "1"}}
    messages = [
        {"topic": topic, "body": "plain"},
        {"topic": topic, "body": "rich", **rich},
        {"topic": topic, "body": "compresses ", "repeat": 2000},
        {"topic": topic, "body": "alone", "wait": False},
    ]
    found = []
    for site, read in (rocket, hastore):
        producer = jvm.producer(site)
        jvm.send(producer, messages[:1])
        place = {"topic": topic, "broker": "g0", "queue": 2}
        sent = jvm.send(producer, messages, "queue", **place)
        assert {one["status"] for one in sent} == {"SEND_OK"}, sent
        for how in ("async", "oneway", "batch"):
            jvm.send(producer, messages[:2], how)
        jvm.call("producer.stop", name=producer)
        many = lambda: len(stored(read(), (topic,)))  # noqa: B023, E731
        wait_until(lambda: many() >= 11, 60, lambda: f"{many()} of 11 records")  # noqa: B023
        found.append(sorted(masked(*one) for one in stored(read(), (topic,))))
    jvm.kill()
    assert found[1] == found[0]


@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_a_new_topic_has_as_many_queues_as_with_rocketmq(rocket, hastore, version, tmp_path):
    jvm = Clients(command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4), tmp_path, "clients")
    found = []
    for site, _ in (rocket, hastore):
        numbers = {}
        for asked in (1, 3, 4, 9):
            topic = f"Queues{asked}_{version.replace('.', '_')}_{hastore[0].name}"
            producer = jvm.producer(site, topic_queues=asked)
            sent = jvm.send(producer, [{"topic": topic, "body": "x"}] * 20)
            assert {one["status"] for one in sent} == {"SEND_OK"}, sent
            numbers[asked] = {one["queue"] for one in sent}
            jvm.call("producer.stop", name=producer)
        found.append(numbers)
    jvm.kill()
    assert found[1] == found[0]
    assert [len(numbers) for numbers in found[1].values()] == [1, 3, 4, 4]
