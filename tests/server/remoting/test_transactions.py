"""Transactions: what half messages are stored as, and what each way to end one does, in order."""

from __future__ import annotations

from typing import Any

import pytest

from hastore.config.model import RemotingConfig
from hastore.errors import NotCachedError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.remoting import Answer, Code, Frame
from hastore.record.codec import Record, decode_record
from hastore.record.transactions import (
    ASIDE_TOPIC,
    CHECKS_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    OPEN_MAX,
    checks_in,
)
from hastore.server.remoting.check_backs import CheckBacks
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.sends import Sends
from hastore.server.remoting.transactions import COMMIT, NOT_YET, ROLLBACK, Decisions, Transactions
from tests.api_fakes import FakeBackend
from tests.server.remoting.desk import Desk, VirtualClient
from tests.server.remoting.test_sends import fields, records

CONFIG = RemotingConfig(transaction_check_max=3)
TIMEOUT_MS, INTERVAL_MS = CONFIG.transaction_timeout_ms, CONFIG.transaction_check_interval_ms
HOW = {COMMIT: "committed", ROLLBACK: "rolled back"}


class Node(Desk):
    """A master with the handlers of transactions."""

    backend: FakeBackend

    def __init__(self) -> None:
        backend = FakeBackend()
        super().__init__(backend)
        topics = TopicView(backend, auto_create=True)
        groups = GroupRequests(self.door)
        self.door.join(groups.handlers())
        self.door.join(Sends(self.door, topics, "test").handlers())
        self.decisions = Decisions(backend)
        self.ends = Transactions(self.door, self.decisions)
        self.door.join(self.ends.handlers())
        self.checks = CheckBacks(self.door, self.decisions, groups.members, CONFIG, "g0")
        # Stored messages are as old as the desk's clock says.
        self.wall_ms = 0.0
        clock: Any = self.clock
        clock.wall_ms = lambda: int(self.wall_ms + clock.now_ms)

    def records(self, *topics: str) -> list[Record]:
        """Return the stored records of these topics; without any all but the half messages."""
        found = records(self.backend)
        if topics:
            return [record for record in found if record.topic in topics]
        return [record for record in found if record.topic not in (HALF_TOPIC, CHECKS_TOPIC)]


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def client(node: Node) -> VirtualClient:
    return node.client()


def half_fields(unique: str, **more: str) -> dict[str, str]:
    properties = {"UNIQ_KEY": unique, "TRAN_MSG": "true", "PGROUP": "producers", **more}
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items() if value)
    return fields(i=text, f="4")


def begin(node: Node, client: VirtualClient, unique: str = "u1", **more: str) -> Frame:
    """Send a half message; return the answer."""
    answer = client.ask(Code.SEND_MESSAGE_V2, half_fields(unique, **more), b"body")
    assert answer.code == Answer.SUCCESS, answer
    record = records(node.backend)[-1]
    assert record.topic == HALF_TOPIC
    node.wall_ms = record.store_timestamp_ms - node.clock.now_ms
    return answer


def offset_of(sent: Frame) -> int:
    return int(sent.fields["msgId"][-16:], 16)


def end_fields(sent: Frame, how: int, **more: str) -> dict[str, str]:
    """Return the fields that Java's client sends to end what `sent` has answered."""
    return {
        "topic": "T", "producerGroup": "producers",
        "tranStateTableOffset": sent.fields["queueOffset"],
        "commitLogOffset": str(offset_of(sent)), "commitOrRollback": str(how),
        "fromTransactionCheck": "false", "msgId": sent.fields["transactionId"],
        "transactionId": sent.fields["transactionId"], **more,
    }  # fmt: skip


def end(client: VirtualClient, sent: Frame, how: int, **more: str) -> Frame:
    return client.ask(Code.END_TRANSACTION, end_fields(sent, how, **more))


def beat(client: VirtualClient, *groups: str) -> None:
    """Send a producer's heartbeat."""
    named = ",".join(f'{{"groupName":"{group}"}}' for group in groups)
    body = f'{{"clientID":"{client.peer}","producerDataSet":[{named}],"consumerDataSet":[]}}'
    assert client.ask(Code.HEART_BEAT, {}, body.encode()).code == Answer.SUCCESS


def new_epoch(node: Node) -> None:
    store = node.backend.store
    node.backend.entries.append((node.backend.epoch() + (1 << 16), len(store.log)))


def properties(record: Record) -> dict[str, str]:
    return dict(record.property_pairs)


def test_a_half_message_waits_in_its_topic(node: Node, client: VirtualClient) -> None:
    sent = begin(node, client, TAGS="red", HS_PID="p", HS_SEQ="1", HS_DELAYED="1-5")
    assert sent.fields["queueId"] == "1" and sent.fields["queueOffset"] == "0"
    [half] = node.records(HALF_TOPIC)
    assert (half.queue_id, half.sys_flag, half.body) == (0, 0, b"body")
    assert properties(half) == {
        "UNIQ_KEY": "u1", "__transactionId__": "u1", "TRAN_MSG": "true", "PGROUP": "producers",
        "TAGS": "red", "REAL_TOPIC": "T", "REAL_QID": "1", "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true", "CLUSTER": "test",
    }  # fmt: skip
    assert node.records() == [], "its topic has nothing yet"


def test_a_commit_appends_the_message_once(node: Node, client: VirtualClient) -> None:
    sent = begin(node, client)
    for _ in range(3):
        assert end(client, sent, COMMIT).code == Answer.SUCCESS
    [half] = node.records(HALF_TOPIC)
    [message] = node.records("T")
    assert (message.topic, message.queue_id, message.sys_flag) == ("T", 1, 8)
    assert message.prepared_transaction_offset == half.physical_offset == offset_of(sent)
    assert message.properties == half.properties and message.body == b"body"
    assert message.born_host == half.born_host
    node.run(3_000)
    [op] = node.records(OP_TOPIC)
    assert (op.body, op.queue_id, op.tags) == (b"0", 0, "d")
    assert node.backend.store.transactions.unsaid() == []
    node.run(60_000)
    assert len(node.records()) == 2


def test_a_rollback_lists_the_half_message_as_ended(node: Node, client: VirtualClient) -> None:
    first, second = begin(node, client, "u1"), begin(node, client, "u2")
    for _ in range(2):
        assert end(client, second, ROLLBACK).code == Answer.SUCCESS
    [op] = node.records()
    assert (op.topic, op.body) == (OP_TOPIC, b"1")
    assert len(node.backend.store.transactions) == 1
    assert end(client, first, COMMIT).code == Answer.SUCCESS


@pytest.mark.parametrize("how", [COMMIT, ROLLBACK])
def test_the_end_of_a_transaction_is_final(node: Node, client: VirtualClient, how: int) -> None:
    sent = begin(node, client)
    assert end(client, sent, how).code == Answer.SUCCESS
    node.run(3_000)
    count = len(node.records())
    answer = end(client, sent, COMMIT + ROLLBACK - how)
    assert answer.code == Answer.SYSTEM_ERROR and HOW[how] in (answer.remark or "")
    assert end(client, sent, NOT_YET).code == Answer.SUCCESS
    assert len(node.records()) == count


@pytest.mark.parametrize("is_read", [True, False], ids=["ended", "decided"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"msgId": "cut", "transactionId": "cut"}, "that of cut was cut by a failover"),
        ({"producerGroup": "other"}, "producer group wrong"),
        ({"tranStateTableOffset": "7"}, "table offset wrong"),
    ],
)
def test_the_end_of_another_transaction_is_no_success(
    node: Node, client: VirtualClient, change: dict[str, str], text: str, is_read: bool
) -> None:
    """A failover cut the half message that is meant; the transaction there now has ended."""
    sent = begin(node, client, "there")
    if not is_read:
        node.backend.store.unread = []
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    for how in (COMMIT, ROLLBACK, NOT_YET):
        answer = end(client, sent, how, **change)
        assert answer.code == Answer.SYSTEM_ERROR and text in (answer.remark or ""), answer
    assert len(node.records("T")) == 1


def test_a_transaction_that_has_ended_is_known_by_the_message_s_id_too(
    node: Node, client: VirtualClient
) -> None:
    sent = begin(node, client)
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    id_ = sent.fields["msgId"]
    assert end(client, sent, COMMIT, msgId=id_, transactionId="").code == Answer.SUCCESS


def test_what_is_decided_holds_before_replay_has_read_it(node: Node, client: VirtualClient) -> None:
    sent, other = begin(node, client, "u1"), begin(node, client, "u2")
    node.backend.store.unread = []
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    assert end(client, other, ROLLBACK).code == Answer.SUCCESS
    assert end(client, sent, COMMIT).code == end(client, other, ROLLBACK).code == Answer.SUCCESS
    assert end(client, sent, ROLLBACK).code == end(client, other, COMMIT).code == 1
    node.backend.store.replay()
    assert end(client, sent, COMMIT).code == end(client, other, ROLLBACK).code == Answer.SUCCESS
    assert end(client, sent, ROLLBACK).code == end(client, other, COMMIT).code == 1
    assert [record.topic for record in node.records()] == ["T", OP_TOPIC]


def test_an_end_waits_until_replay_has_read_the_half_message(
    node: Node, client: VirtualClient
) -> None:
    node.backend.store.unread = []
    sent = client.ask(Code.SEND_MESSAGE_V2, half_fields("u1"), b"body")
    opaque = client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT))
    late = client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT))
    node.run(50)
    assert opaque not in client.answers
    node.backend.store.replay()
    node.run(50)
    assert client.answers[opaque].code == client.answers[late].code == Answer.SUCCESS
    assert len(node.records("T")) == 1


def test_an_end_that_replay_never_reaches_is_refused(node: Node, client: VirtualClient) -> None:
    node.backend.store.unread = []
    sent = client.ask(Code.SEND_MESSAGE_V2, half_fields("u1"), b"body")
    opaque = client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT))
    node.run(CONFIG.hold_timeout_ms + 100)
    assert client.answers[opaque].code == Answer.SERVICE_NOT_AVAILABLE
    assert node.records("T") == []


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"producerGroup": "other"}, 1, "producer group wrong"),
        ({"producerGroup": ""}, 13, "producerGroup"),
        ({"tranStateTableOffset": "7"}, 1, "table offset wrong"),
        ({"tranStateTableOffset": "x"}, 13, "no whole number"),
        ({"tranStateTableOffset": "-1"}, 13, "is not from 0"),
        ({"commitLogOffset": "3"}, 1, "no transaction is open at offset 3"),
        ({"commitLogOffset": str(2**62)}, 1, "no transaction is open"),
        ({"commitLogOffset": str(2**63)}, 13, "is not from 0"),
        ({"commitOrRollback": "4"}, 13, "none of 0, 8, 12"),
        ({"msgId": "cut", "transactionId": "cut"}, 1, "that of cut was cut by a failover"),
        ({"msgId": "", "transactionId": ""}, 13, "are missing"),
    ],
)
def test_what_means_another_transaction_ends_none(
    node: Node, client: VirtualClient, change: dict[str, str], code: int, text: str
) -> None:
    sent = begin(node, client)
    for how in (ROLLBACK, COMMIT):
        answer = end(client, sent, how, **change)
        assert answer.code == code and text in (answer.remark or ""), answer
    assert node.records() == [] and len(node.backend.store.transactions) == 1


def test_the_offset_of_a_plain_message_opens_none(node: Node, client: VirtualClient) -> None:
    sent = client.ask(Code.SEND_MESSAGE_V2, fields(), b"plain")
    answer = end(client, sent, COMMIT)
    assert answer.code == Answer.SYSTEM_ERROR and "no transaction is open" in (answer.remark or "")


def test_an_end_of_one_way_is_carried_out(node: Node, client: VirtualClient) -> None:
    sent = begin(node, client)
    client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT), one_way=True)
    node.run()
    assert len(node.records("T")) == 1 and not client.answers


def test_a_half_message_that_is_not_in_memory_is_read_by_another_thread(
    node: Node, client: VirtualClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = begin(node, client)
    read, tries = node.backend.store.record_bytes, []

    def cold(at: int) -> bytes | None:
        tries.append(at)
        if len(tries) == 1:
            raise NotCachedError("not in memory")
        return read(at)

    monkeypatch.setattr(node.backend.store, "record_bytes", cold)
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    assert len(node.records("T")) == 1


def test_a_refusal_leaves_the_transaction_open(
    node: Node, client: VirtualClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = begin(node, client)
    with monkeypatch.context() as patch:
        patch.setattr(node.backend, "writable_reason", lambda: "no room")
        answer = end(client, sent, COMMIT)
        assert answer.code == Answer.SERVICE_NOT_AVAILABLE and answer.remark == "no room"
    assert end(client, sent, ROLLBACK).code == Answer.SUCCESS
    assert [record.topic for record in node.records()] == [OP_TOPIC]


def test_another_epoch_ends_nothing_of_this_one(node: Node, client: VirtualClient) -> None:
    """The guard stands under the write gate: the epoch may change after the decision."""
    sent = begin(node, client)
    opaque = client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT))
    new_epoch(node)
    node.run()
    assert client.answers[opaque].code == Answer.SERVICE_NOT_AVAILABLE
    assert node.records("T") == []
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    assert len(node.records("T")) == 1


def test_an_end_that_is_not_confirmed_says_so(node: Node, client: VirtualClient) -> None:
    sent = begin(node, client)
    node.backend.sync = True
    node.backend.transfer.hold = True
    opaque = client.send(Code.END_TRANSACTION, end_fields(sent, COMMIT))
    node.run()
    assert opaque not in client.answers
    assert end(client, sent, ROLLBACK).code == 1
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.run()
    answer = client.answers[opaque]
    assert answer.code == Answer.SYSTEM_ERROR and "stored, but not confirmed" in answer.remark
    assert end(client, sent, COMMIT).code == Answer.SUCCESS
    assert len(node.records("T")) == 1


def test_a_send_that_is_repeated_is_one_transaction(node: Node, client: VirtualClient) -> None:
    """A client that got no answer sends again by itself, and knows the last answer only."""
    first, second = begin(node, client), begin(node, client)
    assert offset_of(first) != offset_of(second)
    assert len(node.backend.store.transactions) == 1
    assert end(client, second, COMMIT).code == Answer.SUCCESS
    assert end(client, first, COMMIT).code == Answer.SUCCESS
    assert end(client, first, ROLLBACK).code == Answer.SYSTEM_ERROR
    beat(client, "producers")
    node.run(10 * INTERVAL_MS)
    assert client.told(Code.CHECK_TRANSACTION_STATE) == []
    assert len(node.records("T")) == 1
    assert {record.body for record in node.records(OP_TOPIC)} == {b"0", b"1"}


@pytest.mark.parametrize("how", [COMMIT, ROLLBACK])
def test_another_producer_s_half_message_with_the_same_id_is_no_repeat(
    node: Node, client: VirtualClient, how: int
) -> None:
    first, second = begin(node, client), begin(node, client, PGROUP="others")
    assert len(node.backend.store.transactions) == 2
    assert end(client, second, how, producerGroup="others").code == Answer.SUCCESS
    assert end(client, first, COMMIT).code == Answer.SUCCESS
    groups = [properties(record)["PGROUP"] for record in node.records("T")]
    assert groups == (["others", "producers"] if how == COMMIT else ["producers"])


def test_the_first_of_repeated_half_messages_may_be_named(
    node: Node, client: VirtualClient
) -> None:
    first, second = begin(node, client), begin(node, client)
    assert end(client, first, ROLLBACK).code == Answer.SUCCESS
    assert end(client, second, ROLLBACK).code == Answer.SUCCESS
    assert sorted(record.body for record in node.records()) == [b"0", b"1"]


@pytest.mark.parametrize(
    ("given", "body", "text"),
    [
        (half_fields("u", DELAY="3"), b"x", "cannot be delayed"),
        (half_fields("u", PGROUP=""), b"x", "without PGROUP"),
        (half_fields("u" * 256), b"x", "1 to 255 bytes of UTF-8"),
        (half_fields("\xfc" * 128), b"x", "1 to 255 bytes of UTF-8"),
        (fields(f="4"), b"x", "sysFlag 4"),
        (fields(f="12"), b"x", "sysFlag 12"),
        (half_fields("u", long="x" * 32_600), b"x", "bytes of properties"),
        ({**half_fields("u"), "m": "true"}, b"x", "sysFlag 4"),
        ({**half_fields("u"), "m": "true", "f": "0"}, b"x", "a batch belongs to no transaction"),
    ],
)
def test_what_is_no_half_message_is_refused(
    node: Node, client: VirtualClient, given: dict[str, str], body: bytes, text: str
) -> None:
    answer = client.ask(Code.SEND_MESSAGE_V2, given, body)
    assert answer.code == Answer.MESSAGE_ILLEGAL and text in (answer.remark or ""), answer
    assert records(node.backend) == []


def test_too_many_open_transactions_are_refused(
    node: Node, client: VirtualClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.store.derived.transactions.OPEN_MAX", 4)
    for number in range(2):
        begin(node, client, f"u{number}")
    answer = client.ask(Code.SEND_MESSAGE_V2, half_fields("u"), b"x")
    assert answer.code == Answer.SYSTEM_BUSY
    assert "2 transactions are open, 2 of topic T" in (answer.remark or "")
    assert OPEN_MAX >= 10_000


# -- check-backs


def test_a_producer_is_asked_until_it_knows(node: Node, client: VirtualClient) -> None:
    sent = begin(node, client)
    other, strange = node.client(), node.client()
    beat(other, "producers")
    beat(strange, "others")
    node.run(TIMEOUT_MS - 1_000)
    assert other.told(Code.CHECK_TRANSACTION_STATE) == []
    node.run(2_000)
    [asked] = other.told(Code.CHECK_TRANSACTION_STATE)
    half = node.records(HALF_TOPIC)[0]
    assert asked.is_one_way and asked.fields == {
        "topic": HALF_TOPIC, "commitLogOffset": str(offset_of(sent)), "tranStateTableOffset": "0",
        "msgId": "u1", "transactionId": "u1", "offsetMsgId": half.message_id, "bname": "g0",
    }  # fmt: skip
    message = decode_record(asked.body)
    assert (message.topic, message.queue_id, message.body) == ("T", 1, b"body")
    assert message.properties == half.properties
    assert end(other, sent, NOT_YET, fromTransactionCheck="true").code == Answer.SUCCESS
    node.run(INTERVAL_MS)
    [_] = other.told(Code.CHECK_TRANSACTION_STATE)
    assert end(other, sent, COMMIT, fromTransactionCheck="true").code == Answer.SUCCESS
    node.run(3 * INTERVAL_MS)
    assert other.told(Code.CHECK_TRANSACTION_STATE) == strange.asked == client.asked == []
    assert len(node.records("T")) == 1


def test_a_message_may_say_when_it_is_asked_for(node: Node, client: VirtualClient) -> None:
    beat(client, "producers")
    begin(node, client, CHECK_IMMUNITY_TIME_IN_SECONDS="20")
    node.run(19_000)
    assert client.told(Code.CHECK_TRANSACTION_STATE) == []
    node.run(2_000)
    assert len(client.told(Code.CHECK_TRANSACTION_STATE)) == 1


def test_what_nobody_decides_is_set_aside(node: Node, client: VirtualClient) -> None:
    """The checks count while no producer is connected, and a new master goes on counting."""
    sent = begin(node, client)
    node.run(TIMEOUT_MS + 1_000)
    new_epoch(node)
    node.run(1_500)  # the new epoch asks at once
    checks = [checks_in(one.properties) for one in node.records(CHECKS_TOPIC)]
    assert checks == [[(offset_of(sent), 1)], [(offset_of(sent), 2)]]
    node.run(INTERVAL_MS)
    assert node.records() == []
    node.run(INTERVAL_MS + 2_000)
    aside, op = node.records()
    assert (aside.topic, aside.queue_id, aside.sys_flag) == (ASIDE_TOPIC, 0, 0)
    assert aside.prepared_transaction_offset == offset_of(sent) and aside.body == b"body"
    assert properties(aside) == {
        **properties(node.records(HALF_TOPIC)[0]), "TRANSACTION_CHECK_TIMES": "3",
    }  # fmt: skip
    assert (op.topic, op.body) == (OP_TOPIC, b"0")
    answer = end(client, sent, COMMIT)
    assert answer.code == Answer.SYSTEM_ERROR and "set aside" in (answer.remark or "")
    node.run(10 * INTERVAL_MS)
    assert len(node.records()) == 2


@pytest.mark.parametrize("what", ["a new epoch", "a full disk"])
def test_masters_that_change_often_set_nothing_aside_early(
    node: Node, client: VirtualClient, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Each asks at once, and that counts; but a producer may need the time to come back."""
    begin(node, client)
    node.run(TIMEOUT_MS + 2_000)
    for _ in range(2 * CONFIG.transaction_check_max):
        if what == "a new epoch":
            new_epoch(node)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(node.backend, "writable_reason", lambda: "no room")
                node.run(1_000)
        node.run(2_000)
    assert node.records(ASIDE_TOPIC) == [] and node.checks.set_aside == 0
    beat(client, "producers")
    node.run(INTERVAL_MS + 1_000)
    assert len(client.told(Code.CHECK_TRANSACTION_STATE)) == 1
    node.run((CONFIG.transaction_check_max + 1) * INTERVAL_MS)
    assert len(node.records(ASIDE_TOPIC)) == node.checks.set_aside == 1


def test_a_clock_that_was_set_back_keeps_no_transaction_open(
    node: Node, client: VirtualClient
) -> None:
    begin(node, client)
    node.wall_ms -= 10**9
    node.run(TIMEOUT_MS + (CONFIG.transaction_check_max + 1) * INTERVAL_MS)
    assert len(node.records(ASIDE_TOPIC)) == 1


def test_a_slave_asks_nobody(
    node: Node, client: VirtualClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(node, client)
    with monkeypatch.context() as patch:
        patch.setattr(node.backend, "writable_reason", lambda: "a slave")
        node.run(10 * INTERVAL_MS)
        beat(client, "producers")
        node.run(5_000)
        assert client.asked == [] and node.records(CHECKS_TOPIC) == []
    node.run(2_000)
    assert len(client.told(Code.CHECK_TRANSACTION_STATE)) == 1


def test_many_open_transactions_are_asked_for_in_turn(node: Node, client: VirtualClient) -> None:
    beat(client, "producers")
    for number in range(300):
        begin(node, client, f"u{number}")
    node.run(TIMEOUT_MS + 2_000)
    asked = [one.fields["msgId"] for one in client.told(Code.CHECK_TRANSACTION_STATE)]
    assert sorted(asked) == sorted(f"u{number}" for number in range(300))
