"""Transactions of hastore's own producers at a node: ends that are answered, and check-backs."""

from __future__ import annotations

import errno
from typing import Any

import msgspec
import pytest

from hastore.client.producer.transactions import TransactionOptions, asked_in, end_request
from hastore.errors import NotCachedError, Status, StoreError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import api
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import NO_HOST, Record, build_record, decode_record
from hastore.record.properties import find_property
from hastore.record.transactions import (
    ASIDE_TOPIC,
    CHECKS_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    checks_in,
    half_pairs,
)
from hastore.server.api.queries import OwnQuery
from hastore.server.api.server import ApiParts
from hastore.server.remoting.check_polls import GONE_MS, GROUPS_MAX, KEPT_MAX
from hastore.server.remoting.transactions import COMMIT
from hastore.store.append.results import Guard, OwnIf
from tests.server.remoting.desk import VirtualClient
from tests.server.remoting.test_sends import records
from tests.server.remoting.test_transactions import (
    CONFIG,
    INTERVAL_MS,
    TIMEOUT_MS,
    Node,
    beat,
    end_fields,
    new_epoch,
)
from tests.server.remoting.test_transactions import begin as begin_java
from tests.server.remoting.test_transactions import end as end_java

UNCHECKED = OwnIf(lambda: None)  # what the log has of an earlier version


class OwnNode(Node):
    """A master, whose clients speak both protocols."""

    def _parts(self) -> ApiParts:
        replies: Any = self.replies
        replies.send = self._answered
        queries: Any = self
        return super()._parts()._replace(queries=queries)

    def __init__(self) -> None:
        self.replied: dict[int, tuple[Any, bytes]] = {}  # replies, by rid
        self.rid = 0
        super().__init__()
        self.door.ends_own, self.door.polls_own = self.ends.end_own, self.checks.polls.ask

    def _answered(self, connection: Any, reply: api.Reply, payload: bytes | None = None) -> None:
        assert reply.rid not in self.replied, "answered twice"
        if not connection.ended:
            self.replied[reply.rid] = api.decode_reply(api.encode(reply)), payload or b""

    def accept_query(self, _: Any, query: OwnQuery) -> None:
        """Answer a query at once, as QueryService does it in its own thread."""
        answer = next(one for one in query.steps(lambda: False) if one is not None)
        self.door.later(lambda: query.respond(*answer))

    def send(self, client: Any, request: api.Transactional) -> int:
        """Send a request; return its number. `request.rid` does not count."""
        self.rid += 1
        self.door.take_own(client, msgspec.structs.replace(request, rid=self.rid))
        return self.rid

    def ask(self, client: Any, request: api.Transactional) -> Any:
        rid = self.send(client, request)
        self.run()
        return self.replied[rid][0]


@pytest.fixture
def node() -> OwnNode:
    return OwnNode()


@pytest.fixture
def client(node: OwnNode) -> VirtualClient:
    return node.client()


def half_record(unique: str = "u1", group: str = "producers", **more: str) -> bytes:
    pairs = half_pairs("T", 1, group, unique, [("KEYS", "k"), *more.items()])
    return build_record(
        HALF_TOPIC, b"body", queue_id=0,
        properties=[*pairs, ("HS_PID", "p" + unique), ("HS_SEQ", "0")],
        born_timestamp_ms=1, born_host=NO_HOST,
    )  # fmt: skip


def begin(node: OwnNode, unique: str = "u1", guard: Guard | None = None, **more: str) -> Record:
    """Put a half message as its client does; return the stored record."""
    [[_]] = node.backend.put_encoded([half_record(unique, **more)], [guard])
    record = records(node.backend)[-1]
    assert record.topic == HALF_TOPIC
    node.wall_ms = record.store_timestamp_ms - node.clock.now_ms
    return record


def options_of(group: str) -> TransactionOptions:
    return TransactionOptions(group, None, None, False, 1_000)


def end_of(half: Record, unique: str = "u1", *, commit: bool = True, **more: Any) -> Any:
    fields = {"group": "producers", "acks": None, **more}
    return api.EndTransaction(
        0, commit, half.physical_offset, half.queue_offset, unique=unique, **fields
    )


def end(node: OwnNode, client: Any, half: Record, unique: str = "u1", **more: Any) -> api.PutDone:
    reply = node.ask(client, end_of(half, unique, **more))
    assert isinstance(reply, api.PutDone), reply
    return reply


def test_a_commit_appends_the_message_once_and_says_where(
    node: OwnNode, client: VirtualClient
) -> None:
    half = begin(node)
    done = end(node, client, half)
    [message] = node.records("T")
    assert (done.status, done.statuses, done.epoch) == (Status.PUT_OK, None, node.backend.epoch())
    assert done.offsets == [message.physical_offset] and done.queue_ids == [1]
    assert (message.sys_flag, message.prepared_transaction_offset) == (8, half.physical_offset)
    names = dict(message.property_pairs)
    assert names.keys().isdisjoint(("HS_PID", "HS_SEQ")), "it is not the record of that number"
    assert names["UNIQ_KEY"] == names["__transactionId__"] == "u1" and names["KEYS"] == "k"
    for _ in range(2):
        again = end(node, client, half)
        assert (again.status, again.offsets, again.host) == (Status.PUT_OK, [], b"")
    assert len(node.records("T")) == 1
    assert node.ends.committed == 1


def test_a_rollback_lists_the_half_message_as_ended(node: OwnNode, client: VirtualClient) -> None:
    half = begin(node)
    for _ in range(2):
        done = end(node, client, half, commit=False)
        assert (done.status, done.offsets) == (Status.PUT_OK, [])
    [op] = node.records()
    assert op.topic == OP_TOPIC


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("forgets", [True, False])
def test_the_end_is_final_also_for_a_master_that_does_not_remember_it(
    node: OwnNode, client: VirtualClient, first: bool, forgets: bool
) -> None:
    half = begin(node)
    assert end(node, client, half, commit=first).status is Status.PUT_OK
    node.run(3_000)
    if forgets:
        node.backend.store.transactions._ended.clear()
        node.decisions._made.clear()
    count = len(node.records())
    assert end(node, client, half, commit=first).status is Status.PUT_OK
    other = end(node, client, half, commit=not first)
    assert other.status is Status.MESSAGE_ILLEGAL
    assert ("committed" if first else "rolled back") in other.reason
    assert len(node.records()) == count


@pytest.mark.parametrize("first", [True, False])
def test_the_end_is_found_by_the_message_s_id_too(
    node: OwnNode, client: VirtualClient, first: bool
) -> None:
    """Nothing is stored under that: what ended the transaction has its UNIQ_KEY."""
    half = begin(node)
    name = half.message_id
    assert end(node, client, half, name, commit=first).status is Status.PUT_OK
    node.run(3_000)
    node.backend.store.transactions._ended.clear()
    node.decisions._made.clear()
    assert end(node, client, half, name, commit=first).status is Status.PUT_OK
    other = end(node, client, half, name, commit=not first)
    assert other.status is Status.MESSAGE_ILLEGAL
    assert ("committed" if first else "rolled back") in other.reason


def test_an_earlier_transaction_with_the_same_id_is_another_one(
    node: OwnNode, client: VirtualClient
) -> None:
    first = begin(node)
    assert end(node, client, first).status is Status.PUT_OK
    node.run(3_000)
    [[_]] = node.backend.put_encoded([half_record(begun="again", HS_PID="q")])
    second = records(node.backend)[-1]
    assert second.topic == HALF_TOPIC
    assert end(node, client, second, commit=False).status is Status.PUT_OK
    node.run(3_000)
    node.backend.store.transactions._ended.clear()
    node.decisions._made.clear()
    assert end(node, client, second, commit=False).status is Status.PUT_OK
    assert "rolled back" in end(node, client, second).reason
    assert end(node, client, first).status is Status.PUT_OK


def test_another_producer_s_transaction_with_the_same_id_does_not_say_how_it_ended(
    node: OwnNode, client: VirtualClient
) -> None:
    """Also for a master that looks for what has ended it."""
    first = begin(node)
    [[_]] = node.backend.put_encoded([half_record(group="others", HS_PID="q")])
    second = records(node.backend)[-1]
    assert end(node, client, second, group="others").status is Status.PUT_OK
    assert end(node, client, first, commit=False).status is Status.PUT_OK
    node.run(3_000)
    node.backend.store.transactions._ended.clear()
    node.decisions._made.clear()
    assert end(node, client, first, commit=False).status is Status.PUT_OK
    assert end(node, client, second, group="others").status is Status.PUT_OK


def test_nobody_remembers_the_end_of_a_transaction_without_an_id(
    node: OwnNode, client: VirtualClient
) -> None:
    """Of a broker's log that was taken over: nothing finds what has ended one."""
    pairs = [pair for pair in half_pairs("T", 1, "producers", "", ()) if pair[1]]
    raw = build_record(
        HALF_TOPIC, b"body", queue_id=0, properties=pairs, born_timestamp_ms=1, born_host=NO_HOST
    )
    [[_]] = node.backend.put_encoded([raw])
    half = records(node.backend)[-1]
    assert end(node, client, half, half.message_id).status is Status.PUT_OK
    node.run(3_000)
    assert end(node, client, half, half.message_id).status is Status.PUT_OK, "it is remembered"
    node.backend.store.transactions._ended.clear()
    node.decisions._made.clear()
    for commit in (True, False):
        done = end(node, client, half, half.message_id, commit=commit)
        assert done.status is Status.TIMEOUT and "not remembered" in done.reason


def test_a_message_set_aside_is_not_taken_for_rolled_back(
    node: OwnNode, client: VirtualClient
) -> None:
    half = begin(node)
    node.run(TIMEOUT_MS + INTERVAL_MS * (CONFIG.transaction_check_max + 1))
    assert len(node.records(ASIDE_TOPIC)) == 1
    node.backend.store.transactions._ended.clear()
    for commit in (True, False):
        done = end(node, client, half, commit=commit)
        assert done.status is Status.MESSAGE_ILLEGAL and "set aside" in done.reason


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"group": "other"}, "producer group wrong"),
        ({"unique": "u2"}, "another message's half message is at offset"),
        ({"queue_offset": 7}, "state table offset wrong"),
        ({"offset": 3}, "it was cut by a failover"),
        ({"offset": 2**62}, "it was cut by a failover"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_only_the_half_message_that_is_meant_ends(
    node: OwnNode, client: VirtualClient, change: Any, text: str, ended: bool
) -> None:
    """Not another one at the offset of one that was cut, open or ended."""
    half = begin(node)
    if ended:
        assert end(node, client, half).status is Status.PUT_OK
    count = len(node.records())
    asked = msgspec.structs.replace(end_of(half), **change)
    done: Any = node.ask(client, asked)
    assert done.status is Status.MESSAGE_ILLEGAL
    assert ("no half message of this transaction" if ended else text) in done.reason
    assert len(node.records()) == count


@pytest.mark.parametrize("read", [True, False])
def test_a_repeated_end_is_answered_once_the_first_is_confirmed(
    node: OwnNode, client: VirtualClient, read: bool
) -> None:
    half = begin(node)
    node.backend.transfer.hold = True
    node.backend.store.unread = None if read else []
    first = node.send(client, end_of(half))
    again = node.send(client, end_of(half))
    other = node.send(client, end_of(half, commit=False))
    node.run(50)
    assert not node.replied, "nothing is confirmed"
    while node.backend.transfer.end_all():
        node.run(50)
    for rid in (first, again):
        reply: Any = node.replied[rid][0]
        assert (reply.status, reply.level) == (Status.PUT_OK, "SYNC_MEM(1)")
    assert node.replied[other][0].status is Status.MESSAGE_ILLEGAL
    assert len(node.records("T")) == 1


def test_nothing_is_final_before_it_is_confirmed(node: OwnNode, client: VirtualClient) -> None:
    """A failover may cut the commit, and then the rollback is right."""
    half = begin(node)
    node.backend.transfer.hold = True
    node.send(client, end_of(half))
    other = node.send(client, end_of(half, commit=False))
    node.run(50)
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.run(50)
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.run(50)
    reply: Any = node.replied[other][0]
    assert reply.status is Status.FLUSH_SLAVE_TIMEOUT


def test_an_end_that_is_not_confirmed_says_so(node: OwnNode, client: VirtualClient) -> None:
    half = begin(node)
    node.backend.transfer.hold = True
    first = node.send(client, end_of(half))
    node.run(50)
    assert node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.run(50)
    assert node.replied[first][0].status is Status.FLUSH_SLAVE_TIMEOUT
    node.backend.transfer.hold = False
    assert end(node, client, half).status is Status.PUT_OK
    assert len(node.records("T")) == 1


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "bad sector"), StoreError("gone"), None])
@pytest.mark.parametrize("cold", [False, True])
def test_a_half_message_that_cannot_be_read_is_not_said_to_be_none(
    node: OwnNode,
    client: VirtualClient,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
    cold: bool,
) -> None:
    """The producer asks again: the disk may recover, and a damaged record is repaired."""
    half = begin(node)
    tries: list[int] = []

    def read(at: int) -> None:
        tries.append(at)
        if cold and len(tries) == 1:
            raise NotCachedError("not in memory")
        if failure is not None:
            raise failure

    with monkeypatch.context() as patch:
        patch.setattr(node.backend.store, "record_bytes", read)
        patch.setattr(node.failures, "note", lambda _what, why: ("StoreError", str(why)))
        done = end(node, client, half)
    text = "is damaged" if failure is None else str(failure)
    assert done.status is Status.TIMEOUT and text in done.reason
    assert node.backend.store.damaged == [half.physical_offset]
    assert end(node, client, half).status is Status.PUT_OK
    assert len(node.records("T")) == 1


@pytest.mark.parametrize("topic", ["T", HALF_TOPIC])
def test_a_committed_transaction_whose_message_is_damaged_is_not_said_to_be_rolled_back(
    node: OwnNode, client: VirtualClient, topic: str
) -> None:
    half = begin(node)
    assert end(node, client, half).status is Status.PUT_OK
    node.run(3_000)
    node.backend.store.transactions._ended.clear()
    node.decisions._made.clear()
    (bad,) = (one for one in records(node.backend) if one.topic == topic)
    node.backend.store.bad = {bad.physical_offset}
    for commit in (False, True):
        done = end(node, client, half, commit=commit)
        assert done.status is Status.TIMEOUT, done
        assert f"a message is damaged here, at offset {bad.physical_offset}" in done.reason
    node.backend.store.bad.clear()
    assert end(node, client, half).status is Status.PUT_OK


def test_it_is_not_known_how_a_transaction_has_ended_that_cannot_be_looked_up(
    node: OwnNode, client: VirtualClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be committed: a producer must not be told that it never will be."""
    half = begin(node)
    assert end(node, client, half).status is Status.PUT_OK
    node.run(3_000)

    def fail(_: Any, query: OwnQuery) -> None:
        failed = api.Failed(0, "StoreError", "the store cannot be read: bad sector")
        node.door.later(lambda: query.respond(failed, None))

    with monkeypatch.context() as patch:
        patch.setattr(node, "accept_query", fail)
        done = end(node, client, half)
    assert done.status is Status.TIMEOUT and "bad sector" in done.reason
    assert end(node, client, half).status is Status.PUT_OK


def test_a_slave_refuses_and_names_the_master(node: OwnNode, client: VirtualClient) -> None:
    half = begin(node)
    node.backend.writable, node.backend.master = False, 2
    node.backend.nodes = {2: "tcp://127.0.0.1:10912"}
    done = end(node, client, half)
    assert (done.status, done.master) == (Status.SERVICE_NOT_AVAILABLE, "tcp://127.0.0.1:10912")
    reply: Any = node.ask(client, api.AskChecks(0, "producers", 1_000))
    assert (reply.status, reply.master) == ("SERVICE_NOT_AVAILABLE", "tcp://127.0.0.1:10912")
    assert node.records() == []


def test_a_producer_that_asks_gets_what_its_group_must_decide(
    node: OwnNode, client: VirtualClient
) -> None:
    half = begin(node)
    rid = node.send(client, api.AskChecks(0, "producers", 60_000))
    other = node.send(node.client(), api.AskChecks(0, "another", 60_000))
    node.run(TIMEOUT_MS - 1_500)
    assert rid not in node.replied
    node.run(3_000)
    reply, payload = node.replied[rid]
    assert isinstance(reply, api.Checks) and other not in node.replied
    assert reply.halves == [(half.physical_offset, half.queue_offset, 1)]
    asked = decode_record(payload)
    assert (asked.topic, asked.queue_id, asked.body) == ("T", 1, b"body")
    assert end(node, client, half).status is Status.PUT_OK
    assert len(node.records("T")) == 1


def test_either_kind_of_producer_is_asked_for_the_other_s_half_message(
    node: OwnNode, client: VirtualClient
) -> None:
    own = begin(node)
    java = node.client()
    beat(java, "producers")
    node.run(TIMEOUT_MS + 1_500)
    [asked] = java.told(Code.CHECK_TRANSACTION_STATE)
    assert asked.fields["commitLogOffset"] == str(own.physical_offset)
    assert (asked.fields["msgId"], asked.body != b"") == ("u1", True)
    fields = {
        "topic": "T", "producerGroup": "producers", "commitOrRollback": str(COMMIT),
        "tranStateTableOffset": asked.fields["tranStateTableOffset"],
        "commitLogOffset": asked.fields["commitLogOffset"],
        "msgId": asked.fields["msgId"], "transactionId": asked.fields["transactionId"],
    }  # fmt: skip
    assert java.ask(Code.END_TRANSACTION, fields).code == Answer.SUCCESS
    java.close()
    sent = begin_java(node, node.client(), "u2")
    rid = node.send(client, api.AskChecks(0, "producers", 60_000))
    node.run(TIMEOUT_MS + 1_500)
    [[offset, place, _]] = node.replied[rid][0].halves
    assert str(offset) == end_fields(sent, COMMIT)["commitLogOffset"]
    asked_for = api.EndTransaction(0, True, offset, place, "producers", "u2")
    assert node.ask(client, asked_for).status is Status.PUT_OK
    assert end_java(node.client(), sent, COMMIT).code == Answer.SUCCESS
    assert [record.topic for record in node.records("T")] == ["T", "T"]


def test_a_transaction_whose_id_is_no_text_holds_up_no_other_one(
    node: OwnNode, client: VirtualClient
) -> None:
    """Of a half message that an earlier version has stored."""
    beat(client, "producers")
    odd = begin(node, "odd\udcff", UNCHECKED)
    begin(node, "usual")
    node.run(TIMEOUT_MS + 1_000)
    ids = [asked.fields["msgId"] for asked in client.told(Code.CHECK_TRANSACTION_STATE)]
    assert ids == [odd.message_id, "usual"]
    counted = [checks_in(record.properties) for record in node.records(CHECKS_TOPIC)]
    assert sorted(count for each in counted for _, count in each) == [1, 1]
    answer = {
        "producerGroup": "producers", "tranStateTableOffset": str(odd.queue_offset),
        "commitLogOffset": str(odd.physical_offset), "commitOrRollback": str(COMMIT),
        "msgId": odd.message_id,
    }  # fmt: skip
    assert client.ask(Code.END_TRANSACTION, answer).code == Answer.SUCCESS
    assert len(node.records("T")) == 1


@pytest.mark.parametrize("unique", ["odd\udcff", "u" * 300, "\xfc" * 128])
def test_a_producer_is_asked_by_an_id_that_it_can_send_back(
    node: OwnNode, client: VirtualClient, unique: str
) -> None:
    """One half message in the log stopped all of its group's producers, also for other messages."""
    half = begin(node, unique, UNCHECKED)
    rid = node.send(client, api.AskChecks(0, "producers", 60_000))
    node.run(TIMEOUT_MS + 1_500)
    [(message, begun)] = asked_in(*node.replied[rid], options_of("producers"))
    assert "UNIQ_KEY" not in message.properties and message.properties["KEYS"] == "k"
    assert begun.unique == half.message_id
    made = end_request(begun, options_of("producers"), commit=True)(1)
    asked = api.decode_request(api.encode(made))
    assert [node.ask(client, asked).status for _ in range(2)] == [Status.PUT_OK] * 2
    [committed] = node.records("T")
    assert find_property(committed.properties, b"UNIQ_KEY") == unique.encode(
        "utf-8", "surrogateescape"
    )


def test_a_producer_at_work_is_asked_with_its_next_request(
    node: OwnNode, client: VirtualClient
) -> None:
    assert node.ask(client, api.AskChecks(0, "producers", 0)).halves == []
    halves = [begin(node, f"u{number}") for number in range(3)]
    node.run(TIMEOUT_MS + 1_500)
    assert end(node, client, halves[1], "u1").status is Status.PUT_OK
    rid = node.send(client, api.AskChecks(0, "producers", 60_000))
    node.run()
    reply, payload = node.replied[rid]
    offsets = [offset for offset, _, _ in reply.halves]
    assert offsets == [halves[0].physical_offset, halves[2].physical_offset], "what is still open"
    assert len(payload) > 0


def test_a_check_counts_whether_or_not_anybody_asks(node: OwnNode, client: VirtualClient) -> None:
    begin(node)
    node.send(client, api.AskChecks(0, "producers", 60_000))
    client.ended = True
    node.run(TIMEOUT_MS + INTERVAL_MS * CONFIG.transaction_check_max + 2_000)
    assert len(node.records(ASIDE_TOPIC)) == 1 and len(node.checks.polls) == 0
    aside = dict(node.records(ASIDE_TOPIC)[0].property_pairs)
    assert "HS_PID" not in aside and aside["TRANSACTION_CHECK_TIMES"] == "3"


def test_what_has_ended_is_listed_also_without_rocketmq_s_clients(
    node: OwnNode, client: VirtualClient
) -> None:
    """Else each node, and each state in its file, keeps all that was ever committed."""
    node.door._refusal = "not served"
    half = begin(node)
    assert node.ask(client, end_of(half)).status is Status.PUT_OK
    assert len(node.checks.polls) == 0
    node.run(3_000)
    [op] = node.records(OP_TOPIC)
    assert op.body == b"0" and node.backend.store.transactions.unsaid() == []


def rot(node: OwnNode, what: bytes, to: bytes) -> None:
    """Change bytes of the first record of the log that has them."""
    at = node.backend.store.log.index(what)
    node.backend.store.log[at : at + len(what)] = to


ROTS = [
    (b"REAL_TOPIC\x01T", b"REAL_TOPIC\x01$"),  # no topic can have this name
    (b"REAL_TOPIC\x01T", b"REAL_TOPIC\x01U"),
    (b"REAL_TOPIC\x01T", b"REAL_TOPIB\x01T"),
    (b"PGROUP\x01p", b"PGROUP\x01q"),
    (b"UNIQ_KEY\x01u", b"UNIQ_KEY\x01v"),
    (b"UNIQ_KEY\x01u", b"UNIQ_KEY\x01\xf5"),
]


@pytest.mark.parametrize(("sound", "damaged"), ROTS)
@pytest.mark.parametrize("commit", [True, False])
def test_damage_that_no_crc_shows_leaves_the_transaction_open(
    node: OwnNode,
    client: VirtualClient,
    monkeypatch: pytest.MonkeyPatch,
    sound: bytes,
    damaged: bytes,
    commit: bool,
) -> None:
    half = begin(node)
    rot(node, sound, damaged)
    with monkeypatch.context() as patch:
        patch.setattr(node.failures, "note", lambda _what, why: ("CorruptRecordError", str(why)))
        done = end(node, client, half, commit=commit)
    assert done.status is Status.TIMEOUT and "is damaged" in done.reason
    assert node.backend.store.damaged == [half.physical_offset]
    assert node.records() == [] and len(node.backend.store.transactions) == 1
    rot(node, damaged, sound)
    assert end(node, client, half, commit=commit).status is Status.PUT_OK
    assert len(node.records("T")) == commit


@pytest.mark.parametrize("kind", ["RocketMQ's", "hastore's", "only hastore's"])
@pytest.mark.parametrize(("sound", "damaged"), [ROTS[0], ROTS[4], ROTS[5]])
def test_damage_that_no_crc_shows_is_set_aside_once(
    node: OwnNode, client: VirtualClient, kind: str, sound: bytes, damaged: bytes
) -> None:
    """Nobody is asked for another message; and what is set aside ends the transaction."""
    begin(node)
    rot(node, sound, damaged)
    if kind == "RocketMQ's":
        beat(client, "producers")
    if kind == "only hastore's":
        node.door._refusal = "not served"
    for _ in range(CONFIG.transaction_check_max + 4):
        rid = node.send(client, api.AskChecks(0, "producers", int(INTERVAL_MS)))
        node.run(INTERVAL_MS + 1_000)
        assert node.replied[rid][0].halves == []
    assert client.told(Code.CHECK_TRANSACTION_STATE) == []
    [aside] = node.records(ASIDE_TOPIC)
    assert aside.body == b"body" and len(node.backend.store.transactions) == 0
    node.run(3_000)
    assert [record.body for record in node.records(OP_TOPIC)] == [b"0"]


def test_a_node_without_rocketmq_s_clients_counts_only_what_it_has_asked(
    node: OwnNode, client: VirtualClient
) -> None:
    """RocketMQ's producers cannot be asked there: their half messages wait."""
    node.door._refusal = "not served"
    begin(node)
    node.run(TIMEOUT_MS + INTERVAL_MS * 10)
    rid = node.send(client, api.AskChecks(0, "other", 60_000))
    node.run(INTERVAL_MS * 10)
    assert node.records(CHECKS_TOPIC, ASIDE_TOPIC) == []
    assert node.replied[rid][0].halves == []
    for times in range(1, CONFIG.transaction_check_max + 1):
        rid = node.send(client, api.AskChecks(0, "producers", 60_000))
        node.run(INTERVAL_MS + 1_000)
        assert [checks for *_, checks in node.replied[rid][0].halves] == [times]
    node.send(client, api.AskChecks(0, "producers", 60_000))
    node.run(INTERVAL_MS + 1_000)
    assert len(node.records(CHECKS_TOPIC)) == CONFIG.transaction_check_max
    assert len(node.records(ASIDE_TOPIC)) == 1


def test_what_waits_for_a_producer_is_bounded(node: OwnNode, client: VirtualClient) -> None:
    node.ask(client, api.AskChecks(0, "producers", 0))
    for number in range(KEPT_MAX + 10):
        begin(node, f"u{number}")
    node.run(TIMEOUT_MS + 3_000)
    reply: Any = node.ask(client, api.AskChecks(0, "producers", 0))
    assert len(reply.halves) == KEPT_MAX
    node.run(GONE_MS + 2_000)
    assert len(node.checks.polls) == 0, "it has not asked for long"


def test_requests_that_wait_end_with_their_time_and_with_the_master(
    node: OwnNode, client: VirtualClient
) -> None:
    early = node.send(client, api.AskChecks(0, "producers", 500))
    node.run(600)
    assert node.replied[early][0].halves == []
    first = node.send(client, api.AskChecks(0, "producers", 60_000))
    second = node.send(client, api.AskChecks(0, "producers", 60_000))
    assert node.replied[first][0].halves == [], "one waits"
    node.backend.writable = False
    node.run(1_500)
    assert node.replied[second][0].status == "SERVICE_NOT_AVAILABLE"
    assert len(node.checks.polls) == 0


def test_the_groups_of_a_connection_are_bounded(node: OwnNode, client: VirtualClient) -> None:
    rids = [
        node.send(client, api.AskChecks(0, f"g{number}", 60_000))
        for number in range(GROUPS_MAX + 1)
    ]
    assert node.replied[rids[-1]][0].status == "BUSY"
    assert len(node.replied) == 1


def test_a_new_master_goes_on(node: OwnNode, client: VirtualClient) -> None:
    half, other = begin(node, "u1"), begin(node, "u2")
    assert end(node, client, half).status is Status.PUT_OK
    new_epoch(node)
    assert end(node, client, half).status is Status.PUT_OK
    assert end(node, client, other, "u2").status is Status.PUT_OK
    assert len(node.records("T")) == 2
