"""Sends: the record that is stored, what each outcome is answered with, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import RemotingConfig
from hastore.errors import Status
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import remoting
from hastore.protocol.api import PutDone
from hastore.protocol.remoting import (
    JSON,
    MAX_ANSWER_HEADER_BYTES,
    MAX_FRAME_BYTES,
    ROCKETMQ,
    Answer,
    BatchMessage,
    Frame,
    encode_batch,
)
from hastore.record.codec import Host, Record, decode_record, message_id
from hastore.record.properties import in_java_order
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.server import ApiServer
from hastore.server.remoting.door import Door, RemotingRequest
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.sends import (
    ANSWER_MS,
    BATCH_MAX,
    RETRIES_MAX,
    RetryKey,
    RetryWindow,
    Sends,
    born_host,
    encode_message,
)
from hastore.server.remoting.topics import Topics
from tests.api_fakes import FakeBackend, FakePut
from tests.server.api.kit import until
from tests.server.remoting.desk import Desk, StoreBackend
from tests.server.remoting.kit import RemotingClient, served
from tests.store import kit as store_kit

SEND, SEND_LONG, SEND_BATCH = 310, 10, 320
LONG = {
    "a": "producerGroup", "b": "topic", "c": "defaultTopic", "d": "defaultTopicQueueNums",
    "e": "queueId", "f": "sysFlag", "g": "bornTimestamp", "h": "flag", "i": "properties",
    "j": "reconsumeTimes", "k": "unitMode", "l": "maxReconsumeTimes", "m": "batch",
}  # fmt: skip
UNIQUE = "7F00000100000000000000000000AAAA"


def fields(topic: str = "T", queue: int = 1, **more: str) -> dict[str, str]:
    """Return the fields of a send as Java's client writes them."""
    return {
        "a": "group", "b": topic, "c": "TBW102", "d": "4", "e": str(queue), "f": "0",
        "g": "1700000000123", "h": "7", "i": f"UNIQ_KEY\x01{UNIQUE}\x02WAIT\x01true\x02",
        "j": "0", "k": "false", "m": "false", "n": "g0", **more,
    }  # fmt: skip


class Sender(RemotingClient):
    """A client whose messages have a body, if a test gives none."""

    def send(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes | None = None,
        *,
        kind: int = JSON,
        one_way: bool = False,
    ) -> int:
        return super().send(code, fields, body or b"x", kind=kind, one_way=one_way)

    def ask(
        self,
        code: int,
        fields: dict[str, str] | None = None,
        body: bytes | None = None,
        *,
        kind: int = JSON,
    ) -> Frame:
        return self.answer_of(self.send(code, fields, body, kind=kind))


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def settings() -> RemotingConfig:
    return RemotingConfig()


@pytest.fixture
def sends() -> list[Sends]:
    """The handlers of the server."""
    return []


@pytest.fixture
def server(
    backend: FakeBackend, settings: RemotingConfig, sends: list[Sends]
) -> Iterator[ApiServer]:
    def fill(door: Door) -> None:
        topics = TopicView(backend, auto_create=settings.auto_create_topics)
        sends.append(Sends(door, topics, "test", drop_retries=settings.drop_retries))
        door.join(sends[0].handlers())
        door.join(Topics(door, "g0", topics).handlers())

    with served(backend, fill) as running:
        yield running


@pytest.fixture
def client(server: ApiServer) -> Iterator[RemotingClient]:
    made = Sender(server.endpoint)
    yield made
    made.close()


def records(backend: FakeBackend) -> list[Record]:
    found: list[Record] = backend.store._records()
    return found


@pytest.mark.parametrize("code", [SEND, SEND_LONG])
@pytest.mark.parametrize("kind", [JSON, ROCKETMQ])
def test_a_send_is_stored_as_rocketmq_would(
    backend: FakeBackend, client: RemotingClient, code: int, kind: int
) -> None:
    given = fields(
        f="1", j="2", i=f"UNIQ_KEY\x01{UNIQUE}\x02KEYS\x01a b\x02empty\x01\x02x\x01é\x02"
    )
    if code == SEND_LONG:
        given = {LONG.get(name, name): value for name, value in given.items()}
    answer = client.ask(code, given, b"\0body", kind=kind)
    (record,) = records(backend)
    assert (answer.code, answer.remark) == (Answer.SUCCESS, None)
    assert answer.fields == {
        "msgId": message_id(backend.store.store_host, 0), "queueId": "1", "queueOffset": "0",
        "transactionId": UNIQUE, "MSG_REGION": "DefaultRegion", "TRACE_ON": "true",
    }  # fmt: skip
    assert (record.topic, record.queue_id, record.body) == ("T", 1, b"\0body")
    assert (record.flag, record.sys_flag, record.reconsume_times) == (7, 1, 2)
    assert record.born_timestamp_ms == 1_700_000_000_123
    assert record.born_host.text == "{}:{}".format(*client.sock.getsockname())
    assert record.prepared_transaction_offset == 0
    # The order is that of a RocketMQ broker 5.3.3, which was sent the same.
    assert record.properties.decode() == (
        "MSG_REGION\x01DefaultRegion\x02UNIQ_KEY\x01" + UNIQUE + "\x02CLUSTER\x01test\x02"
        "KEYS\x01a b\x02TRACE_ON\x01true\x02x\x01é\x02"
    )


@pytest.mark.parametrize("host", ["10.1.2.3", "::1", "fe80::1%eth0"])
def test_the_flag_of_ipv6_follows_the_clients_address(host: str) -> None:
    for claimed in (0x01, 0x31):  # what the client says of addresses does not count
        record = decode_record(
            encode_message("T", b"b", b"a\x01b\x02", 1, 2, claimed, 3, born_host((host, 99)), 4)
        )
        assert record.sys_flag == 0x01 | (0x10 if ":" in host else 0)
        text = f"[{host.partition('%')[0]}]:99" if ":" in host else f"{host}:99"
        assert record.born_host.text == text
        assert (record.topic, record.properties, record.body) == ("T", b"a\x01b\x02", b"b")


def test_an_ipv4_client_is_one_at_a_socket_of_ipv6_too(backend: FakeBackend) -> None:
    """As Java sees it: RocketMQ's C++ client cannot read a record with an IPv6 host."""

    def fill(door: Door) -> None:
        door.join(Sends(door, TopicView(backend, auto_create=True), "test").handlers())

    with served(backend, fill, endpoint="tcp://[::]:0") as server:
        client = Sender("127.0.0.1:" + server.endpoint.rpartition(":")[2])
        assert client.ask(SEND, fields()).code == Answer.SUCCESS
        host = "{}:{}".format(*client.sock.getsockname())
        client.close()
    (record,) = records(backend)
    assert (record.born_host.text, record.sys_flag & 0x30) == (host, 0)


def test_java_orders_properties_by_their_hashes() -> None:
    """The orders are those that RocketMQ 5.3.3 itself gives these names."""
    added = ("MSG_REGION", "TRACE_ON", "CLUSTER")

    def ordered(*names: str) -> list[str]:
        return [name for name, _ in in_java_order(dict.fromkeys((*names, *added), "v"))]

    assert ordered("WAIT") == ["MSG_REGION", "CLUSTER", "WAIT", "TRACE_ON"]
    assert ordered("UNIQ_KEY", "WAIT", "TAGS", "Aa", "BB", "ümläut", "🚀") == [
        *("MSG_REGION", "UNIQ_KEY", "CLUSTER", "ümläut", "TAGS", "Aa", "BB", "WAIT"),
        *("TRACE_ON", "🚀"),
    ]
    many = ordered(*(f"name{number}" for number in range(200)))
    assert zlib.crc32(" ".join(many).encode()) == 546774826, "256 buckets"


def test_a_message_without_unique_key_gets_one(
    backend: FakeBackend, client: RemotingClient
) -> None:
    answer = client.ask(SEND, {name: value for name, value in fields().items() if name != "i"})
    (record,) = records(backend)
    unique = answer.fields["transactionId"]
    assert len(unique) == 32 and int(unique, 16)
    assert dict(record.property_pairs)["UNIQ_KEY"] == unique


def test_the_node_chooses_the_queue(backend: FakeBackend, client: RemotingClient) -> None:
    used = {client.ask(SEND, fields(queue=-1)).fields["queueId"] for _ in range(100)}
    assert used == {"0", "1", "2", "3"}
    assert {record.queue_id for record in records(backend)} == {0, 1, 2, 3}
    wrong = client.ask(SEND, fields(queue=4))
    assert wrong.code == Answer.INVALID_PARAMETER
    assert wrong.remark == "request queueId[4] is illegal: topic T has 4 queues"


def batch(count: int, bodies: str = "b") -> bytes:
    return encode_batch(
        [
            BatchMessage(number, f"{bodies}{number}".encode(), b"UNIQ_KEY\x01U%d\x02" % number)
            for number in range(count)
        ]
    )


@pytest.mark.parametrize("code", [SEND_BATCH, SEND, SEND_LONG])
def test_a_batch_is_stored_message_by_message(
    backend: FakeBackend, client: RemotingClient, code: int
) -> None:
    given = fields(m="true", i="WAIT\x01true\x02")
    if code == SEND_LONG:
        given = {LONG.get(name, name): value for name, value in given.items()}
    client.ask(SEND, fields())
    answer = client.ask(code, given, batch(3))
    assert answer.code == Answer.SUCCESS
    _, *found = records(backend)
    host = backend.store.store_host
    assert answer.fields == {
        "msgId": ",".join(message_id(host, record.physical_offset) for record in found),
        "queueId": "1", "queueOffset": "1", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true",
    }  # fmt: skip
    for number, record in enumerate(found):
        assert (record.body, record.flag, record.queue_id) == (b"b%d" % number, number, 1)
        assert record.properties.decode() == (
            f"UNIQ_KEY\x01U{number}\x02MSG_REGION\x01DefaultRegion\x02CLUSTER\x01test\x02"
            "WAIT\x01true\x02TRACE_ON\x01true\x02"
        )


def test_a_value_may_hold_the_byte_that_ends_a_name(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """RocketMQ splits at the first 0x01, and stores what its clients send."""
    odd = "odd\x01x\x01y\x02"
    for given in (odd, odd + "DELAY\x011\x02"):
        assert client.ask(SEND, fields(i=f"UNIQ_KEY\x01U\x02{given}")).code == Answer.SUCCESS
    common = encode_batch([BatchMessage(0, b"b", b"UNIQ_KEY\x01U\x02")])
    assert client.ask(SEND_BATCH, fields(m="true", i=odd), common).code == Answer.SUCCESS
    own = encode_batch([BatchMessage(0, b"b", odd.encode()), BatchMessage(0, b"c", b"a\x01b")])
    assert client.ask(SEND_BATCH, fields(m="true", i="c\x01d\x02"), own).code == Answer.SUCCESS
    *found, last = records(backend)
    assert [dict(one.property_pairs)["odd"] for one in found] == ["x\x01y"] * 4
    assert dict(last.property_pairs)["a"] == "b" and "odd" not in dict(last.property_pairs)


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ])
def test_the_answer_to_a_batch_repeats_its_unique_key(client: RemotingClient, kind: int) -> None:
    """Java's client gives each batch one, and its application the answer, as `transactionId`."""
    given = fields(m="true", i=f"WAIT\x01true\x02UNIQ_KEY\x01{UNIQUE}\x02")
    answer = client.ask(SEND_BATCH, given, batch(3), kind=kind)
    assert (answer.code, answer.fields.get("transactionId")) == (Answer.SUCCESS, UNIQUE)


def test_a_batch_is_stored_whole_or_not_at_all(
    backend: FakeBackend, client: RemotingClient
) -> None:
    keys = b"KEYS\x01" + b"k " * 2_100 + b"\x02"
    for wrong in (keys, b"x\x02", b"DELAY\x013\x02"):
        body = encode_batch([BatchMessage(0, b"a", b""), BatchMessage(0, b"b", wrong)])
        assert client.ask(SEND_BATCH, fields(m="true"), body).code == Answer.MESSAGE_ILLEGAL
    for body in (b"\0", b"\0\0\0\x09", batch(2)[:-1]):
        assert client.ask(SEND_BATCH, fields(m="true"), body).code == Answer.MESSAGE_ILLEGAL
    for code in (SEND, SEND_BATCH):
        empty = RemotingClient.send(client, code, fields())
        assert client.answer_of(empty).code == Answer.MESSAGE_ILLEGAL
    retry = client.ask(SEND_BATCH, fields("%RETRY%g", 0, m="true"), batch(1))
    assert retry.code == Answer.MESSAGE_ILLEGAL
    assert records(backend) == []


@pytest.mark.parametrize("flag", ["0", "16"], ids=["built at once", "one by one"])
def test_a_batch_with_a_message_that_is_too_large_is_refused_as_a_whole(
    tmp_path: Path, flag: str
) -> None:
    """What was stored in part was stored again with each retry."""
    with store_kit.opened(tmp_path, max_message_size=3_500, commitlog_file_size=4_096) as store:
        desk = Desk(StoreBackend(store))
        view = TopicView(desk.backend, auto_create=True)
        desk.door.join(Sends(desk.door, view, "test").handlers())
        client = desk.client()

        def send(size: int, own: bytes = b"") -> Frame:
            sizes = ((1, b""), (size, own), (1, b""))
            body = encode_batch([BatchMessage(0, b"x" * each, more) for each, more in sizes])
            return client.ask(SEND_BATCH, fields("T", 0, m="true", f=flag), body)

        answer = send(3_501)
        assert answer.code == Answer.MESSAGE_ILLEGAL
        assert answer.remark == client.ask(SEND, fields("T", 0), b"x" * 3_501).remark
        answer = send(3_500, b"a\x01" + b"v" * 500)
        assert answer.code == Answer.MESSAGE_ILLEGAL
        assert "the log takes up to" in str(answer.remark)
        assert store.max_offset == 0
        assert send(3_500).code == Answer.SUCCESS
        assert store.wait_dispatched(store.max_offset, 60)
        assert store.queues.queue_range("T", 0) == (0, 3)


@pytest.mark.parametrize("count", [64, 65, 600])
def test_a_batch_that_javas_client_makes_of_messages_with_keys(
    backend: FakeBackend, client: RemotingClient, count: int
) -> None:
    """With `autoBatch` it repeats the keys of all messages in the batch's own properties."""
    keys = [f"order-{number}" for number in range(count)]
    body = encode_batch([BatchMessage(0, b"b", b"KEYS\x01" + key.encode()) for key in keys])
    given = fields(m="true", i="KEYS\x01" + " ".join(keys) + "\x02UNIQ_KEY\x01U\x02")
    assert client.ask(SEND_BATCH, given, body).code == Answer.SUCCESS
    found = [dict(record.property_pairs)["KEYS"] for record in records(backend)]
    assert found == (keys if count > 64 else [" ".join(keys)] * count)  # the last one counts
    other = fields(m="true", i="KEYS\x01" + "k " * 64 + "k\x02")
    refused = client.ask(SEND_BATCH, other, body)
    assert refused.code == Answer.MESSAGE_ILLEGAL
    assert "KEYS of a batch has 65 words; at most 64" in str(refused.remark)


def test_the_clients_trace_has_the_keys_of_all_messages_that_it_is_about(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """A producer of 4.9 puts 100 messages into one, a consumer each batch that it was given."""
    keys = " ".join(f"{UNIQUE[:-3]}{number:03d} order-{number}" for number in range(700))
    given = fields("RMQ_SYS_TRACE_TOPIC", i=f"KEYS\x01{keys}\x02UNIQ_KEY\x01{UNIQUE}\x02")
    answer = client.ask(SEND, given, b"Pub")
    assert answer.code == Answer.SUCCESS, answer.remark
    assert dict(records(backend)[-1].property_pairs)["KEYS"] == keys


def test_a_one_way_send_gets_no_answer(backend: FakeBackend, client: RemotingClient) -> None:
    backend.transfer.hold = True
    client.send(SEND, fields(), one_way=True)
    client.send(SEND_BATCH, fields(m="true"), batch(2), one_way=True)
    client.send(SEND, fields(queue=9), one_way=True)
    until(lambda: len(records(backend)) == 3)
    assert backend.transfer.waiting == [], "it waits for no slave"
    backend.transfer.hold = False
    assert client.ask(SEND, fields()).fields["queueOffset"] == "3"


def test_only_a_send_that_waits_asks_the_slaves(
    backend: FakeBackend, client: RemotingClient
) -> None:
    backend.transfer.hold = True
    unique = f"UNIQ_KEY\x01{UNIQUE}\x02"
    assert client.ask(SEND, fields(i=unique + "WAIT\x01false\x02")).code == Answer.SUCCESS
    opaques = [client.send(SEND, fields(i=unique + wait)) for wait in ("", "WAIT\x01TRUE\x02")]
    until(lambda: len(backend.transfer.waiting) == 2)
    assert backend.transfer.end_all() == 2
    for opaque in opaques:
        assert client.answer_of(opaque).code == Answer.SUCCESS


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.CONFIRMED, Answer.SUCCESS),
        (Outcome.FLUSH_DISK_TIMEOUT, Answer.FLUSH_DISK_TIMEOUT),
        (Outcome.FLUSH_SLAVE_TIMEOUT, Answer.FLUSH_SLAVE_TIMEOUT),
    ],
)
def test_what_is_stored_is_answered_so(
    backend: FakeBackend, client: RemotingClient, outcome: Outcome, code: int
) -> None:
    backend.transfer.hold = True
    for body, opaque in ((b"", client.send(SEND, fields())), (batch(2), None)):
        if opaque is None:
            opaque = client.send(SEND_BATCH, fields(m="true"), body)
        until(lambda: len(backend.transfer.waiting) == 1)
        ((_, deadline_ms, _, _),) = backend.transfer.waiting
        backend.transfer.end_all(outcome)
        answer = client.answer_of(opaque)
        assert answer.code == code
        assert answer.fields["msgId"] and answer.fields["queueId"] == "1"


def test_the_unknown_is_not_answered(backend: FakeBackend, server: ApiServer) -> None:
    backend.transfer.hold = True
    client = Sender(server.endpoint)
    client.send(SEND, fields())
    until(lambda: len(backend.transfer.waiting) == 1)
    backend.transfer.end_all(Outcome.WAIT_QUORUM_ACK_TIMEOUT)
    backend.transfer.hold = False
    assert client.ask(SEND, fields()).code == Answer.SUCCESS, "the connection goes on"
    backend.transfer.hold = True
    client.send(SEND, fields())
    until(lambda: len(backend.transfer.waiting) == 1)
    backend.transfer.end_all(Outcome.TERM_CHANGED)
    assert client.ended() and client.frames == []
    client.close()


def test_an_unconfirmed_put_of_an_earlier_epoch_is_not_said_to_be_stored(
    server: ApiServer, backend: FakeBackend
) -> None:
    """The node was demoted and promoted again meanwhile: the message may have been cut."""
    backend.transfer.hold = True
    client = Sender(server.endpoint)
    client.send(SEND, fields())
    until(lambda: len(backend.transfer.waiting) == 1)
    backend.entries.append((backend.epoch() + 65_536, 0))
    backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    assert client.ended() and client.frames == []
    client.close()


def test_the_time_for_confirmations_begins_when_the_client_began_to_wait(
    server: ApiServer, backend: FakeBackend, sends: list[Sends]
) -> None:
    backend.transfer.hold = True
    came_ms = SYSTEM_CLOCK.monotonic_ms() - 2_000  # it waited for a master
    frame = Frame(SEND, 1, 0, fields(), b"x")
    request = RemotingRequest(frame, came_ms, None, ("127.0.0.1", 5), lambda *_: None)
    sends[0]._door.later(lambda: sends[0].send(request))
    until(lambda: len(backend.transfer.waiting) == 1)
    (_, deadline_ms, _, _), *_ = backend.transfer.waiting
    assert deadline_ms == came_ms + RemotingConfig().hold_timeout_ms + ANSWER_MS
    assert deadline_ms - came_ms < 3_000, "the clients' own default"


def results(*statuses: Status) -> Callable[..., list[list[FakePut]]]:
    def put(payloads: object, guards: object = None) -> list[list[FakePut]]:
        return [
            [
                FakePut(one, at, at + 100, 1, at, 5, False, "why")
                if one is Status.PUT_OK
                else FakePut(one, reason="why")
                for at, one in enumerate(statuses)
            ]
        ]

    return put


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.MESSAGE_ILLEGAL, Answer.MESSAGE_ILLEGAL),
        (Status.PROPERTIES_SIZE_EXCEEDED, Answer.MESSAGE_ILLEGAL),
        (Status.SERVICE_NOT_AVAILABLE, Answer.SERVICE_NOT_AVAILABLE),
        (Status.FORBIDDEN, Answer.NO_PERMISSION),
    ],
)
def test_what_the_store_refuses_is_refused(
    backend: FakeBackend, client: RemotingClient, status: Status, code: int
) -> None:
    backend.put_encoded = results(status)  # type: ignore[method-assign]
    answer = client.ask(SEND, fields())
    assert (answer.code, answer.remark) == (code, "why")
    backend.put_encoded = results(status, status)  # type: ignore[method-assign]
    assert client.ask(SEND_BATCH, fields(m="true"), batch(2)).code == code


@pytest.mark.parametrize(
    "statuses",
    [
        (Status.TIMEOUT,),
        (Status.PUT_OK, Status.SERVICE_NOT_AVAILABLE),
        (Status.MESSAGE_ILLEGAL, Status.PUT_OK),
        (Status.TIMEOUT, Status.MESSAGE_ILLEGAL),
    ],
)
def test_what_is_stored_in_part_is_not_answered(
    backend: FakeBackend, client: RemotingClient, statuses: tuple[Status, ...]
) -> None:
    backend.put_encoded = results(*statuses)  # type: ignore[method-assign]
    client.send(SEND_BATCH, fields(m="true"), batch(len(statuses)))
    assert client.ended() and client.frames == []


def test_a_failure_of_an_append_ends_the_connection(
    backend: FakeBackend, client: RemotingClient
) -> None:
    def fail(payloads: object, guards: object = None) -> None:
        raise LookupError("a bug")

    backend.put_encoded = fail  # type: ignore[assignment,method-assign]
    client.send(SEND, fields())
    assert client.ended() and client.frames == []


def test_refusals_never_mean_stored(backend: FakeBackend, client: RemotingClient) -> None:
    backend.unconfirmable = "no slave is connected"
    answer = client.ask(SEND, fields())
    assert (answer.code, answer.remark) == (
        Answer.SERVICE_NOT_AVAILABLE, "no slave is connected"
    )  # fmt: skip
    alone = client.ask(SEND, fields(i="WAIT\x01false\x02"))
    assert alone.code == Answer.SUCCESS, "the master's own word is enough"
    backend.writable, backend.unconfirmable = False, None
    answer = client.ask(SEND, fields())
    assert (answer.code, answer.remark) == (Answer.SERVICE_NOT_AVAILABLE, "this node is a slave")
    backend.writable, backend.gate_closed = True, True
    assert client.ask(SEND, fields()).code == Answer.SERVICE_NOT_AVAILABLE
    assert len(records(backend)) == 1


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"b": ""}, Answer.INVALID_PARAMETER, "topic ''"),
        ({"b": "a.b"}, Answer.INVALID_PARAMETER, "topic 'a.b'"),
        ({"b": "T" * 128}, Answer.INVALID_PARAMETER, "1 to 127 characters"),
        ({"b": "HASTORE_POSITIONS"}, Answer.NO_PERMISSION, "the group's own"),
        ({"b": "SCHEDULE_TOPIC_XXXX"}, Answer.NO_PERMISSION, "is forbidden"),
        ({"e": "one"}, Answer.MESSAGE_ILLEGAL, "e='one' is no whole number"),
        ({"e": str(2**31)}, Answer.MESSAGE_ILLEGAL, "e=2147483648 is not from"),
        ({"f": "-1"}, Answer.MESSAGE_ILLEGAL, "f=-1 is not from 0"),
        ({"g": ""}, Answer.MESSAGE_ILLEGAL, "g='' is no whole number"),
        ({"h": str(2**31)}, Answer.MESSAGE_ILLEGAL, "h=2147483648 is not from -2147483648"),
        ({"h": "1.5"}, Answer.MESSAGE_ILLEGAL, "h='1.5' is no whole number"),
        ({"f": "4"}, Answer.MESSAGE_ILLEGAL, "sysFlag 4 is that of a transaction"),
        ({"f": "12"}, Answer.MESSAGE_ILLEGAL, "sysFlag 12 is that of a transaction"),
        ({"i": "TRAN_MSG\x01true\x02"}, Answer.MESSAGE_ILLEGAL, "without PGROUP"),
        ({"i": "TIMER_DELAY_SEC\x015\x02"}, Answer.MESSAGE_ILLEGAL, "timer messages"),
        ({"i": "TIMER_DELAY_MS\x015\x02"}, Answer.MESSAGE_ILLEGAL, "timer messages"),
        ({"i": "INNER_MULTI_DISPATCH\x01%LMQ%a\x02"}, Answer.MESSAGE_ILLEGAL, "light queues"),
        ({"i": "DELAY\x01soon\x02"}, Answer.MESSAGE_ILLEGAL, "DELAY='soon'"),
        ({"i": "DELAY\x011\x02x\x01" + "y" * 32_620 + "\x02"}, Answer.MESSAGE_ILLEGAL, "delayed"),
        ({"i": "x\x01" + "y" * 40_000 + "\x02"}, Answer.MESSAGE_ILLEGAL, "at most 32767"),
        ({"i": "KEYS\x01" + "k " * 2_100 + "\x02"}, Answer.MESSAGE_ILLEGAL, "KEYS has 2,101"),
    ],
)
def test_a_wrong_send_is_refused_with_its_reason(
    backend: FakeBackend, client: RemotingClient, change: dict[str, str], code: int, why: str
) -> None:
    answer = client.ask(SEND, fields(**change))
    assert answer.code == code
    assert why in str(answer.remark)
    missing = {name: value for name, value in fields().items() if name not in change}
    assert client.ask(SEND, missing).code in (0, Answer.MESSAGE_ILLEGAL, Answer.INVALID_PARAMETER)
    assert len(records(backend)) == ("i" in change)


def test_a_delayed_message_waits_in_the_topic_of_its_level(
    backend: FakeBackend, client: RemotingClient
) -> None:
    unique = f"UNIQ_KEY\x01{UNIQUE}\x02"
    delayed = client.ask(SEND, fields(i=unique + "DELAY\x013\x02TIMER_DELAY_SEC\x015\x02"))
    assert (delayed.code, delayed.fields["queueId"]) == (Answer.SUCCESS, "1")
    for level in ("0", "-1"):
        assert client.ask(SEND, fields(i=unique + f"DELAY\x01{level}\x02")).code == 0
    waiting, *others = records(backend)
    assert (waiting.topic, waiting.queue_id) == ("SCHEDULE_TOPIC_XXXX", 2)
    assert dict(waiting.property_pairs) == {
        "UNIQ_KEY": UNIQUE, "DELAY": "3", "REAL_TOPIC": "T", "REAL_QID": "1", "CLUSTER": "test",
        "MSG_REGION": "DefaultRegion", "TRACE_ON": "true",
    }  # fmt: skip
    assert [other.topic for other in others] == ["T", "T"]
    batched = client.ask(SEND_BATCH, fields(m="true", i="DELAY\x011\x02"), batch(1))
    assert batched.code == Answer.MESSAGE_ILLEGAL and "batch" in str(batched.remark)


def test_what_is_for_light_queues_is_refused_in_a_batch_and_a_transaction_but_not_in_a_retry(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """It was stored in its own queue alone, and the producer was told that it is stored."""
    light = f"INNER_MULTI_DISPATCH\x01%LMQ%a\x02UNIQ_KEY\x01{UNIQUE}\x02"
    half = client.ask(SEND, fields(i=light + "TRAN_MSG\x01true\x02PGROUP\x01p\x02"))
    delayed = client.ask(SEND, fields(i=light + "DELAY\x013\x02"))
    common = client.ask(SEND_BATCH, fields(m="true", i=light), batch(2))
    own = encode_batch([BatchMessage(0, b"b", one) for one in (b"a\x01b\x02", light.encode())])
    answers = [half, delayed, common, client.ask(SEND_BATCH, fields(m="true"), own)]
    assert [one.code for one in answers] == [Answer.MESSAGE_ILLEGAL] * 4
    assert all("light queues" in str(one.remark) for one in answers)
    assert records(backend) == []
    assert client.ask(SEND, fields(i="x" + light)).code == 0
    alike = BatchMessage(0, b"b", b"xINNER_MULTI_DISPATCH\x01c\x02")
    assert client.ask(SEND_BATCH, fields(m="true"), encode_batch([alike])).code == 0
    # A consumer that got one from RocketMQ's log, and fails, must be able to try it again.
    assert client.ask(SEND, fields(b="%RETRY%g", e="0", i=light)).code == 0


def test_a_send_waits_for_the_topics_of_a_broker(
    backend: FakeBackend, client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right after a promotion one went into a topic that the broker had closed for producers."""
    monkeypatch.setattr(backend, "topics_wait", lambda: True)
    for more in ({}, {"b": "New"}, {"m": "true"}):
        answer = client.ask(SEND, fields(**more), batch(1) if "m" in more else b"body")
        assert answer.code == Answer.SERVICE_NOT_AVAILABLE
        assert "are not taken over yet" in str(answer.remark)
    assert records(backend) == []
    assert client.ask(SEND, fields(b="%RETRY%g", e="0")).code == 0
    backend.put_encoded([build_change(TopicChange(TopicConfig("T", 4, 4)), 1)])
    assert client.ask(SEND, fields()).code == 0
    monkeypatch.setattr(backend, "topics_wait", lambda: False)
    assert client.ask(SEND, fields(b="New")).code == 0


def test_the_mark_of_a_delivery_is_left_out(backend: FakeBackend, client: RemotingClient) -> None:
    """An application may send on what it has received, properties and all."""
    mark = "HS_DELAYED\x013-0\x02"
    assert client.ask(SEND, fields(i="a\x01b\x02" + mark + "xHS_DELAYED\x01c\x02")).code == 0
    own = [mark + "a\x01b\x02", mark[:-1], "a\x01b\x02" + mark[:-1]]
    body = encode_batch([BatchMessage(0, b"b", one.encode()) for one in own])
    assert client.ask(SEND_BATCH, fields(m="true"), body).code == 0
    found = [dict(record.property_pairs) for record in records(backend)]
    assert not any("HS_DELAYED" in one for one in found)
    assert [one.get("a") for one in found] == ["b", "b", None, "b"]
    assert found[0]["xHS_DELAYED"] == "c"


def test_the_pop_of_a_received_message_is_left_out(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """As by RocketMQ 5.3.3, which takes it off the properties of the send, not of a batch's own."""
    pop = "POP_CK0 5 60000 0 0 g0 1 5"
    known = "UNIQ_KEYkWAITtrue"  # as most have them
    for before, after in (("", known), (known, ""), ("xPOP_CKc", known)):
        assert client.ask(SEND, fields(i=before + pop + after)).code == Answer.SUCCESS
    body = encode_batch([BatchMessage(0, b"b", pop.encode())])
    assert client.ask(SEND_BATCH, fields(m="true", i=pop + "ab"), body).code == 0
    found = [dict(record.property_pairs) for record in records(backend)]
    assert [one.get("POP_CK") for one in found] == [None, None, None, "0 5 60000 0 0 g0 1 5"]
    assert found[2]["xPOP_CK"] == "c" and found[3]["a"] == "b"


def test_the_number_of_a_received_message_is_left_out(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """Otherwise what is sent again would be taken for a repeat of what a hastore producer sent."""
    number = "HS_PID\x01p\x02HS_SEQ\x010\x02"
    first = encode_message(
        "T", b"first", number.encode(), 1, 0, 0, 5, born_host(("127.0.0.1", 9)), 0
    )
    backend.put_encoded([first])
    again = client.ask(SEND, fields(i=number + "a\x01b\x02"))
    assert (again.code, again.fields["queueOffset"]) == (Answer.SUCCESS, "1"), "it is stored"
    letter = fields("%RETRY%g", 0, j="16", l="16", i=number + "DELAY\x0119\x02")
    assert client.ask(SEND, letter).code == Answer.SUCCESS, "an orderly consumer would wait for it"
    assert client.ask(SEND, fields("Other", i="HS_SEQ\x015\x02" + number)).code == Answer.SUCCESS
    own = [number, number[:-1], "a\x01b\x02" + number[:-1]]
    body = encode_batch([BatchMessage(0, b"b", one.encode()) for one in own])
    assert client.ask(SEND_BATCH, fields(m="true", i=number), body).code == Answer.SUCCESS
    _, *found = records(backend)
    topics = ["T", "%DLQ%g", "Other", "T", "T", "T"]
    assert [record.topic for record in found] == topics
    names = {name for record in found for name, _ in record.property_pairs}
    assert "a" in names and names.isdisjoint({"HS_PID", "HS_SEQ"})


def test_a_message_that_failed_too_often_goes_to_the_dead_letters(
    backend: FakeBackend, client: RemotingClient
) -> None:
    for times, most in (("16", None), ("17", None), ("3", "2"), ("2", "2")):
        more = {} if most is None else {"l": most}
        assert client.ask(SEND, fields("%RETRY%g", 0, j=times, **more)).code == Answer.SUCCESS
    topics = [record.topic for record in records(backend)]
    assert topics == ["%RETRY%g", "%DLQ%g", "%DLQ%g", "%RETRY%g"]


def test_a_new_topic_has_the_smaller_number_of_queues(
    backend: FakeBackend, client: RemotingClient
) -> None:
    table = backend.store.topic_table
    wrong = client.ask(SEND, fields("Two", 0, d="2", i="DELAY\x01soon\x02"))
    assert (wrong.code, records(backend)) == (Answer.MESSAGE_ILLEGAL, [])
    opaques = [client.send(SEND, fields("Two", queue, d="2")) for queue in (0, 1, 2)]
    codes = {frame.opaque: frame.code for frame in (client.next() for _ in opaques)}
    wanted = (Answer.SUCCESS, Answer.SUCCESS, Answer.INVALID_PARAMETER)
    assert codes == dict(zip(opaques, wanted, strict=True))
    assert (table.find("Two").read_queues, table.find("Two").write_queues) == (2, 2)
    assert client.ask(SEND, fields("Two", 2, d="4")).code == Answer.INVALID_PARAMETER
    for name, asked in (("More", "99"), ("None", "0"), ("Less", "-1")):
        assert client.ask(SEND, fields(name, 3, d=asked)).code == Answer.SUCCESS
        assert table.find(name).write_queues == 4
    first = [record.topic for record in records(backend)]
    assert first == ["HASTORE_TOPICS", "Two", "Two", "More", "None", "Less"]


@pytest.mark.parametrize("one_way", [False, True])
def test_a_send_that_waits_for_the_master_alone_creates_its_topic_as_it_asks(
    backend: FakeBackend, client: RemotingClient, one_way: bool
) -> None:
    """No slave can confirm: the topic's record was refused, and the message stored all the same."""
    backend.unconfirmable = "no slaves"
    assert client.ask(SEND, fields("Two", 0, d="2")).code == Answer.SERVICE_NOT_AVAILABLE
    given = fields("Two", 0, d="2", i="WAIT\x01false\x02")
    if one_way:
        client.send(SEND, fields("Two", 0, d="2"), one_way=True)
        client.send(SEND_BATCH, fields("One", 0, d="1", m="true"),
                    encode_batch([BatchMessage(0, b"b", b"")]), one_way=True)  # fmt: skip
    else:
        assert client.ask(SEND, given).code == Answer.SUCCESS
        batch = encode_batch([BatchMessage(0, b"b", b"")])
        assert client.ask(SEND_BATCH, given | {"b": "One", "d": "1", "m": "true"}, batch).code == 0
    table = backend.store.topic_table
    until(lambda: len(records(backend)) == 4)
    assert table.find("Two").write_queues == 2 and table.recorded("One") is not None
    topics = [record.topic for record in records(backend)]
    assert topics == ["HASTORE_TOPICS", "Two", "HASTORE_TOPICS", "One"]


def test_more_than_a_client_sends_is_refused_before_it_is_looked_at(
    backend: FakeBackend, client: RemotingClient
) -> None:
    def refusal(given: dict[str, str], body: bytes = b"x", code: int = SEND) -> str:
        answer = client.ask(code, given, body)
        assert answer.code == Answer.MESSAGE_ILLEGAL
        return str(answer.remark)

    many = encode_batch([BatchMessage(0, b"", b"")] * (BATCH_MAX + 1))
    text = refusal(fields(m="true"), many, SEND_BATCH)
    assert text == "more than 16,384 messages in a batch: send several batches"
    wide = encode_batch([BatchMessage(0, b"", b"")] * 600)
    text = refusal(fields(m="true", i=f"a\x01{'b' * 30_000}\x02"), wide, SEND_BATCH)
    assert text.startswith("600 messages, each with the batch's 30,") and "16,777,216" in text
    text = refusal(fields(i="".join(f"{n}\x01a\x02" for n in range(1_025))))
    assert text == "1,025 properties; at most 1,024 are allowed"
    text = refusal(fields(m="true", i="a\x01b\x02" * 1_025), many, SEND_BATCH)
    assert text == "1,025 properties; at most 1,024 are allowed"
    assert refusal(fields(i="\x02" * 40_000)).startswith("40000 characters of properties")
    assert "2,049 words" in refusal(fields(i=f"KEYS\x01{' '.join('k' * 2_049)}\x02"))
    assert not records(backend)


def test_the_largest_batch_is_answered_with_the_id_of_each_message(
    backend: FakeBackend, client: RemotingClient
) -> None:
    """An answer that could not be sent let the client send the batch again, for ever."""
    body = encode_batch([BatchMessage(0, b"", b"")] * BATCH_MAX)
    client.wire.allow((MAX_ANSWER_HEADER_BYTES, MAX_FRAME_BYTES))
    answer = client.ask(SEND_BATCH, fields(m="true"), body)
    assert answer.code == Answer.SUCCESS
    assert answer.fields["msgId"].count(",") == BATCH_MAX - 1
    id_bytes = len(message_id(Host.parse("[2001:db8::1]:10911"), 1)) + 1
    assert BATCH_MAX * id_bytes < MAX_ANSWER_HEADER_BYTES - 1_024, "with longer addresses, too"


def test_an_answer_that_no_frame_can_carry_ends_its_connection_only(
    client: RemotingClient, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure was taken for a second answer, and ended the thread of the API."""
    monkeypatch.setattr(remoting, "MAX_ANSWER_HEADER_BYTES", 1_000)
    other = Sender(server.endpoint)
    body = encode_batch([BatchMessage(0, b"", b"")] * 100)
    client.send(SEND_BATCH, fields(m="true"), body)
    assert client.was_reset() and not client.frames
    assert other.ask(SEND, fields()).code == Answer.SUCCESS
    other.close()


class TestWithoutAutoCreation:
    """Sends to topics that do not exist, where no send creates one."""

    @pytest.fixture
    def settings(self) -> RemotingConfig:
        return RemotingConfig(auto_create_topics=False)

    def test_a_topic_that_does_not_exist_is_refused(
        self, backend: FakeBackend, client: RemotingClient
    ) -> None:
        answer = client.ask(SEND, fields())
        assert answer.code == Answer.TOPIC_NOT_EXIST
        assert answer.remark == "topic[T] not exist, apply first please!"
        assert client.ask(SEND, fields("%RETRY%g", 0)).code == Answer.SUCCESS
        assert len(records(backend)) == 1


class Times:
    """The part of a Door that a RetryWindow needs: calls at a time, which the test moves on."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.waiting: list[tuple[float, Callable[[], None]]] = []
        self.parts: Any = SimpleNamespace(clock=SimpleNamespace(monotonic_ms=lambda: self.now_ms))

    def at(self, when_ms: float, call: Callable[[], None]) -> int:
        self.waiting.append((when_ms, call))
        return 0

    def run_to(self, now_ms: float) -> None:
        while self.waiting and (first := min(self.waiting, key=lambda one: one[0]))[0] <= now_ms:
            self.waiting.remove(first)
            self.now_ms = max(self.now_ms, first[0])
            first[1]()
        self.now_ms = now_ms


def key_of(unique: str) -> RetryKey:
    return RetryKey("T", unique, None, 1)


def sent() -> Any:
    return SimpleNamespace(queue_id=0, request=SimpleNamespace(answer=lambda *_: None))


def remember(window: RetryWindow, unique: str, now_ms: float) -> None:
    """Send a message, and let it be stored."""
    key = window.begin(key_of(unique), sent(), now_ms)
    assert key is not None
    done = PutDone(0, Status.PUT_OK, 1, offsets=[0], queue_offsets=[0], host=b"12345678")
    window.end(key, done, now_ms)


class TestDroppedRetries:
    """`remoting.drop_retries`: what a client sends again itself is stored once."""

    @pytest.fixture
    def settings(self) -> RemotingConfig:
        return RemotingConfig(drop_retries=True)

    def test_a_retry_gets_the_first_answer(
        self, backend: FakeBackend, client: RemotingClient
    ) -> None:
        def place(answer: Frame) -> tuple[str, str]:
            return answer.fields["msgId"], answer.fields["queueOffset"]

        first = client.ask(SEND, fields())
        again = client.ask(SEND, fields(queue=2, g="1700000009999"))
        assert (again.code, place(again)) == (Answer.SUCCESS, place(first))
        assert again.fields["queueId"] == "1", "where it is, not where the retry wanted it"
        other = client.ask(SEND, fields("U"))
        assert place(other) != place(first)
        retry = [client.ask(SEND, fields("%RETRY%g", 0)) for _ in range(2)]
        assert place(retry[0]) != place(retry[1])
        assert len(records(backend)) == 4

    @pytest.mark.parametrize(
        ("waits", "other"),
        [
            ("DELAY\x013\x02", {"b": "Other"}),
            ("TRAN_MSG\x01true\x02PGROUP\x01g\x02", {"b": "Other"}),
            ("TRAN_MSG\x01true\x02PGROUP\x01g\x02", {"PGROUP": "h"}),
        ],
    )
    def test_what_waits_for_another_topic_or_producer_is_no_retry(
        self, backend: FakeBackend, client: RemotingClient, waits: str, other: dict[str, str]
    ) -> None:
        """Their records wait in one topic. The second one was told that it is stored, and was not.

        A consumer that sends a message on to another topic leaves its UNIQ_KEY there.
        """
        text = f"UNIQ_KEY\x01{UNIQUE}\x02{waits}"
        first = client.ask(SEND, fields(i=text))
        group = other.get("PGROUP", "g")
        changed = {"i": text.replace("PGROUP\x01g", f"PGROUP\x01{group}"),
                   "b": other.get("b", "T")}  # fmt: skip
        second = client.ask(SEND, {**fields(), **changed})
        assert (first.code, second.code) == (Answer.SUCCESS, Answer.SUCCESS)
        assert first.fields["msgId"] != second.fields["msgId"]
        again = client.ask(SEND, {**fields(), **changed})
        assert again.fields["msgId"] == second.fields["msgId"]
        assert len(records(backend)) == 2

    def test_a_retry_of_a_send_under_way_waits_for_it(
        self, backend: FakeBackend, client: RemotingClient
    ) -> None:
        backend.transfer.hold = True
        opaques = [client.send(SEND, fields()) for _ in range(3)]
        assert client.ask(SEND, fields(queue=9)).code == Answer.INVALID_PARAMETER  # all have come
        until(lambda: len(backend.transfer.waiting) == 1)
        backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
        for opaque in opaques:
            assert client.answer_of(opaque).code == Answer.FLUSH_SLAVE_TIMEOUT
        assert len(records(backend)) == 1
        opaque = client.send(SEND, fields())  # it was not confirmed: it is stored again
        until(lambda: len(backend.transfer.waiting) == 1)
        backend.transfer.end_all()
        assert client.answer_of(opaque).code == Answer.SUCCESS
        assert len(records(backend)) == 2

    def test_a_send_that_waits_for_more_nodes_is_no_retry(
        self, backend: FakeBackend, client: RemotingClient
    ) -> None:
        alone = fields(i=f"UNIQ_KEY\x01{UNIQUE}\x02WAIT\x01false\x02")
        assert client.ask(SEND, alone).code == Answer.SUCCESS
        client.send(SEND, fields(), one_way=True)
        backend.transfer.hold = True
        opaque = client.send(SEND, fields())
        until(lambda: len(backend.transfer.waiting) == 1)
        backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
        assert client.answer_of(opaque).code == Answer.FLUSH_SLAVE_TIMEOUT

    def test_a_send_of_another_epoch_is_no_retry(
        self, backend: FakeBackend, client: RemotingClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = client.ask(SEND, fields())
        monkeypatch.setattr(backend, "epoch", lambda: 2 << 16 | 1)  # the record may be cut by now
        again = client.ask(SEND, fields())
        assert again.fields["queueOffset"] != first.fields["queueOffset"]
        assert len(records(backend)) == 2

    def test_long_keys_do_not_fill_the_memory(self) -> None:
        door: Any = Times()
        window = RetryWindow(door)
        for number in range(3_000):
            remember(window, f"{number}{'k' * 16_000}", 0.0)
        assert 1_000 < len(window) <= 16 * 1024 * 1024 // 16_000
        assert window.begin(key_of("2999" + "k" * 16_000), sent(), 1.0) is None, "the last are kept"
        for number in range(RETRIES_MAX + 5):
            remember(window, f"{number:032}", 0.0)
        assert len(window) == RETRIES_MAX

    def test_what_was_sent_a_minute_ago_is_forgotten_without_further_sends(self) -> None:
        door: Any = Times()
        window = RetryWindow(door)
        for number in range(5_000):
            remember(window, f"{number}", 10.0 * number)
        door.run_to(30_000.0)
        assert len(window) == 5_000
        door.run_to(75_000.0)
        assert 3_400 <= len(window) <= 3_600  # those of the last 60 s, about
        door.run_to(120_000.0)
        assert len(window) == 0 and not door.waiting
        remember(window, "again", 130_000.0)
        door.run_to(200_000.0)
        assert len(window) == 0

    def test_few_retries_of_one_send_wait(
        self, backend: FakeBackend, client: RemotingClient
    ) -> None:
        backend.transfer.hold = True
        opaques = [client.send(SEND, fields()) for _ in range(10)]
        for opaque in opaques[8:]:
            assert client.answer_of(opaque).code == Answer.SYSTEM_BUSY
        backend.transfer.end_all()
        for opaque in opaques[:8]:
            assert client.answer_of(opaque).code == Answer.SUCCESS
        assert len(records(backend)) == 1
