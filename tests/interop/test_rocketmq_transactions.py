"""Transactions as RocketMQ 5.3.3 has them: the bytes in the log, Java's producers, moved stores."""

import time

import msgspec
import pytest

from hastore.protocol.remoting import Answer
from hastore.record.codec import decode_record
from hastore.record.transactions import HALF_TOPIC, OP_TOPIC, ended_in
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq import Peer
from tests.interop.rocketmq_clients import Clients
from tests.interop.test_rocketmq_sends import (
    SEND,
    UNIQUE,
    a_broker,
    a_group,
    fields,
    stored,
)
from tests.process.harness import wait_until
from tests.server.remoting.kit import RemotingClient

pytestmark = pytest.mark.full
END, CHECK, HEARTBEAT = 37, 39, 34
NOT_YET, COMMIT, ROLLBACK = 0, 8, 12
TRANSACTION = "TRAN_MSG\x01true\x02PGROUP\x01producers\x02"
FAST = {
    "transaction_timeout": "1s",
    "transaction_check_interval": "2s",
    "transaction_check_max": 60,  # a producer may answer late
}
FAST_ROCKETMQ = {
    "transactionTimeOut": 1_000,
    "transactionCheckInterval": 2_000,
    "transactionCheckMax": 60,
}


class FastPeer(Peer):
    """A broker that asks producers soon."""

    more = {}  # settings of the broker

    def call(self, op, **arguments):
        if op == "broker.start":
            arguments["broker"] = {**arguments["broker"], **FAST_ROCKETMQ, **self.more}
        return super().call(op, **arguments)


@pytest.fixture(scope="module")
def rocket(rocketmq_5, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rocketmq")
    with a_broker(FastPeer(rocketmq_5, folder, "rocketmq"), folder) as found:
        yield found


@pytest.fixture(scope="module", params=["pair", "dledger"])
def hastore(request, tmp_path_factory):
    with a_group(request.param, tmp_path_factory.mktemp(request.param), **FAST) as found:
        yield found


def ended(client, sent, how, **more):
    """End what `sent` has answered; return the answer."""
    given = {
        "producerGroup": "producers", "tranStateTableOffset": sent.fields["queueOffset"],
        "commitLogOffset": str(int(sent.fields["msgId"][-16:], 16)), "commitOrRollback": str(how),
        "fromTransactionCheck": "false", "msgId": sent.fields["transactionId"],
        "transactionId": sent.fields["transactionId"], **more,
    }  # fmt: skip
    return client.ask(END, given)


def half_cases(topic, now_ms):
    """Return the fields and bodies of half messages."""
    rich = UNIQUE + TRANSACTION + "KEYS\x01one two\x02TAGS\x01red\x02ümläut\x01日本 🚀\x02"
    last = 0
    for given, body in (
        ({"i": UNIQUE + TRANSACTION, "f": "4"}, b"half"),
        ({"i": rich, "f": "4", "h": "-3", "j": "2"}, b"rich"),
        ({"i": UNIQUE + TRANSACTION.replace("true", "TRUE")}, b"without the flag"),
        ({"i": rich + "WAIT\x01false\x02", "f": "5", "e": "3"}, b"compressed, it says"),
        ({"i": rich + "CHECK_IMMUNITY_TIME_IN_SECONDS\x0130\x02", "f": "4"}, b"later"),
    ):
        last += 1
        given["i"] = given["i"].replace("2F0A2B0000", f"2F0A2B{last:04}")
        yield fields(topic, g=str(now_ms), **given), body


def test_half_messages_and_commits_are_stored_byte_for_byte(rocket, hastore):
    topic, now_ms = f"Halves_{hastore[0].name}", int(time.time() * 1000)
    found = []
    for site, read in (rocket, hastore):
        client = RemotingClient(site.master)
        client.ask(SEND, fields(topic), b"the topic comes into being")
        answers = []
        for number, (given, body) in enumerate(half_cases(topic, now_ms)):
            sent = client.ask(SEND, given, body)
            shown = {k: v for k, v in sent.fields.items() if k not in ("msgId", "queueOffset")}
            answers.append((sent.code, shown, len(sent.fields["msgId"])))
            answers.append(ended(client, sent, ROLLBACK if number == 1 else COMMIT).code)
            for wrong in ({"producerGroup": "other"}, {"tranStateTableOffset": "999"}):
                given, body = next(half_cases(topic, now_ms))
                given["i"] = given["i"].replace("2F0A2B", f"{number:02}0A2B")
                one = client.ask(SEND, given, body)
                refused = ended(client, one, COMMIT, **wrong)
                answers.append((refused.code, refused.remark))
                answers.append(ended(client, one, ROLLBACK).code)
        client.close()
        half, done, places = [], [], {}
        for record, raw in stored(read(), (topic, HALF_TOPIC)):
            if dict(record.property_pairs).get("REAL_TOPIC", topic) != topic:
                continue
            if record.topic == HALF_TOPIC:
                places[record.physical_offset] = record.properties
                if b"TRANSACTION_CHECK_TIMES" not in raw:  # on a slow machine one is asked for
                    half.append(raw)
            elif record.sys_flag & 8:
                assert places[record.prepared_transaction_offset] == record.properties
                done.append(raw[:76] + bytes(8) + raw[84:])
        assert len(done) == 4
        found.append((answers, half, done))
    (wanted, wanted_half, wanted_done), (answers, half, done) = found
    assert answers == wanted
    assert half == wanted_half
    assert done == wanted_done


def ops(read):
    """Return the places that are said to have ended, and the records' other bytes."""
    records = [(record, raw) for record, raw in stored(read(), (OP_TOPIC,))]
    places = [place for record, _ in records for place in ended_in(record.body)]
    return places, {(raw[16:56], record.properties, record.queue_id) for record, raw in records}


def test_ended_half_messages_are_listed(rocket, hastore):
    found = []
    for site, read in (rocket, hastore):
        client = RemotingClient(site.master)
        topic, places = f"Ops_{hastore[0].name}", []
        client.ask(SEND, fields(topic), b"the topic comes into being")
        for number, how in enumerate([COMMIT, ROLLBACK, COMMIT]):
            given, body = next(half_cases(topic, int(time.time() * 1000)))
            given["i"] = given["i"].replace("2F0A2B", f"0F{number:02}2B")
            sent = client.ask(SEND, given, body)
            assert ended(client, sent, how).code == Answer.SUCCESS
            places.append(int(sent.fields["queueOffset"]))
        client.close()
        wanted = set(places)
        wait_until(lambda: wanted <= set(ops(read)[0]), 60, "they are not listed")  # noqa: B023
        found.append({(raw[:20], rest, queue) for raw, rest, queue in ops(read)[1]})
    assert [(properties, queue) for _, properties, queue in found[1]] == [
        (properties, queue) for _, properties, queue in found[0]
    ]


def asked(client, limit_s=60.0):
    """Return the next check of a producer."""
    client.sock.settimeout(limit_s)
    while True:
        frame = client.pushed.pop(0) if client.pushed else client.next()
        if frame.code == CHECK:
            return frame


def test_a_producer_is_asked_in_the_same_way(rocket, hastore):
    found = []
    for site, _ in (rocket, hastore):
        client = RemotingClient(site.master)
        group = f"asked-{hastore[0].name}"
        topic = f"Asked_{hastore[0].name}"
        beat = {"clientID": "me", "producerDataSet": [{"groupName": group}], "consumerDataSet": []}
        assert client.ask(HEARTBEAT, {}, msgspec.json.encode(beat)).code == Answer.SUCCESS
        given, body = next(half_cases(topic, int(time.time() * 1000)))
        given["i"] = given["i"].replace("PGROUP\x01producers", f"PGROUP\x01{group}")
        given["i"] = given["i"].replace("2F0A2B", "2F0F2B")
        sent = client.ask(SEND, given, body)
        frames = []
        for _ in range(2):
            frame = asked(client)
            record = decode_record(frame.body)
            properties = dict(record.property_pairs)
            properties.pop("TRANSACTION_CHECK_TIMES", None)
            properties.pop("WAIT", None)
            shown = {
                name: value for name, value in frame.fields.items()
                if name not in ("commitLogOffset", "tranStateTableOffset", "offsetMsgId")
            }  # fmt: skip
            frames.append(
                (frame.flag, shown, record.topic, record.queue_id, record.body, properties)
            )
        last = {name: frame.fields[name] for name in ("commitLogOffset", "tranStateTableOffset")}
        code = ended(client, sent, COMMIT, producerGroup=group, **last).code
        client.close()
        found.append((frames, code))
    assert found[1] == found[0]


@pytest.mark.slow("a JVM starts, and its producers are asked after a while")
@pytest.mark.parametrize("version", ["5.3.3", "4.9.8"])
def test_javas_transactions(rocket, hastore, version, tmp_path):
    jvm = Clients(command(CLIENTS_5 if version == "5.3.3" else CLIENTS_4), tmp_path, "clients")
    topic = f"Java_{version.replace('.', '_')}_{hastore[0].name}"
    endings = [
        ("COMMIT_MESSAGE", None), ("ROLLBACK_MESSAGE", None), ("UNKNOW", "COMMIT_MESSAGE"),
        ("UNKNOW", "ROLLBACK_MESSAGE"),
    ]  # fmt: skip
    found = []
    for site, read in (rocket, hastore):
        producer = jvm.producer(site, group=f"p-{topic}", transactions=True)
        consumer = jvm.push(site, f"c-{topic}", topic)
        answers = []
        for number in range(20):
            state, checked = endings[number % 4]
            more = {} if checked is None else {"properties": {"whenChecked": checked}}
            message = {"topic": topic, "body": f"{number}", "tags": "a", **more}
            [one] = jvm.send(producer, [message], "transaction", state=state)
            answers.append(one["status"])
        received = jvm.received(consumer, 10)

        def is_listed(read=read):
            halves = [
                record.queue_offset for record, _ in stored(read(), (HALF_TOPIC,))
                if dict(record.property_pairs)["REAL_TOPIC"] == topic
                and record.body in {b"1", b"5", b"9", b"13", b"17"}
            ]  # fmt: skip
            return len(halves) >= 5 and set(halves) <= set(ops(read)[0])

        wait_until(is_listed, 60, "the rollbacks are not listed")
        time.sleep(5)  # longer than the time between two checks: nothing comes twice
        received = jvm.received(consumer, 10)
        found.append((answers, sorted(one["body"] for one in received)))
        for name in (producer, consumer):
            jvm.call(f"{name.partition('-')[0]}.stop", name=name)
    jvm.kill()
    assert found[1] == found[0]
    assert found[1][1] == sorted(str(number) for number in range(20) if number % 2 == 0)
