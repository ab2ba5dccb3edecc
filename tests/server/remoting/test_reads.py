"""Reads of RocketMQ's clients: pulls, offsets, messages by key and id, on a real store."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hastore.client.producer.producer import Producer
from hastore.protocol.remoting import JSON, ROCKETMQ, Answer, Code, Frame
from hastore.record.codec import Record, decode_record
from hastore.record.layout import MIN_RECORD_SIZE
from hastore.server.api import queries
from hastore.server.api.replies import UNSENT_OF_ONE_BYTES
from hastore.server.api.server import ApiServer
from hastore.server.dledger_node import DLedgerNode
from hastore.server.remoting import pull_memory, reads
from hastore.server.remoting.reads import (
    COMMITS,
    HAS_CLASS,
    SUBSCRIBES,
    WAITS,
    Answered,
    Hooks,
    Reads,
    RemotingPull,
)
from hastore.server.remoting.routes import Shape
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.cli.test_status import Group
from tests.server.api.kit import until
from tests.server.kit import group_of_one, running
from tests.server.remoting.kit import RemotingClient, served
from tests.store import kit
from tests.store.kit import inner_batch

TOPIC = "TopicA"


@dataclass
class Subscription:
    expression: str
    expression_type: str = "TAG"
    version: int = 5


class Topics:
    """The topics of the test, as TopicView has them."""

    def __init__(self) -> None:
        self.shapes = {TOPIC: Shape(4, 4)}
        self.promised = {"New": Shape(4, 4)}

    def find(self, topic: str) -> Shape | None:
        return self.shapes.get(topic)

    def is_promised(self, topic: str) -> bool:
        return topic in self.promised

    def to_be(self, topic: str) -> Shape | None:
        return self.promised.get(topic, Shape(1, 1))


class Node:
    """A store, its API, and one client; the test sets what the hooks say."""

    def __init__(self, store: MessageStore, backend: FakeBackend) -> None:
        self.store = store
        self.backend = backend
        self.server: ApiServer
        self.clients: list[RemotingClient] = []
        self.reads: Reads
        self.topics = Topics()
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        self.commits: list[tuple[str, str, int, int]] = []
        self.refusals: dict[str, str] = {}
        self.stored: list[Any] = []  # the results of the puts

    def hooks(self) -> Hooks:
        return Hooks(
            lambda group, topic: self.subscriptions.get((group, topic)),
            lambda *place: self.commits.append(place),
            self.refusals.get,
            twins=True,
        )

    @property
    def client(self) -> RemotingClient:
        if not self.clients:
            self.connect()
        return self.clients[0]

    def connect(self) -> RemotingClient:
        self.clients.append(RemotingClient(self.server.endpoint))
        return self.clients[-1]

    def put(self, *tags: str, topic: str = TOPIC, readable: bool = True, **more: Any) -> None:
        """Put a message for each tag; "" is none."""
        first = len(self.stored)
        records = [
            kit.message(first + n, topic=topic,
                        properties=[("KEYS", f"k{first + n} all"), ("UNIQ_KEY", f"U{first + n}"),
                                    *([("TAGS", tag)] if tag else [])], **more)
            for n, tag in enumerate(tags)
        ]  # fmt: skip
        self.stored += kit.put(self.store, *records)
        assert self.store.wait_dispatched(self.store.max_offset, 60)
        if readable:
            self.show()

    def show(self) -> None:
        end = self.store.max_offset
        self.store.set_limits(confirmed=end, readable=end)

    def fields(self, at: int, **more: object) -> dict[str, str]:
        given = {
            "consumerGroup": "g", "topic": TOPIC, "queueId": 0, "queueOffset": at,
            "maxMsgNums": 32, "sysFlag": SUBSCRIBES, "commitOffset": 0,
            "suspendTimeoutMillis": 15_000, "subscription": "*", "subVersion": 5,
            "expressionType": "TAG", **more,
        }  # fmt: skip
        return {name: str(value) for name, value in given.items() if value is not None}

    def pull(self, at: int, **more: object) -> Frame:
        return self.client.ask(Code.PULL_MESSAGE, self.fields(at, **more))

    def send_pull(self, at: int, **more: object) -> int:
        """Send a pull that may wait, and wait until it is parked."""
        parked = self.parked
        fields = self.fields(at, **{"sysFlag": SUBSCRIBES | WAITS, **more})
        opaque = self.client.send(Code.LITE_PULL_MESSAGE, fields)
        until(lambda: self.parked == parked + 1)
        return opaque

    @property
    def parked(self) -> int:
        return self.server._pulls.parked


@contextlib.contextmanager
def node_of(root: Path, backend: FakeBackend, **changes: Any) -> Iterator[Node]:
    with kit.opened(root, **changes) as store:
        backend.store = store
        store.default_queues = 4  # type: ignore[attr-defined]
        node = Node(store, backend)

        def fill(door: Any) -> None:
            topics: Any = node.topics
            node.reads = Reads(door, topics, node.hooks())
            door.join(node.reads.handlers())

        with served(backend, fill) as node.server:
            store.hooks.on_readable = node.server.wake_readers
            try:
                yield node
            finally:
                for client in node.clients:
                    client.close()


@pytest.fixture
def node(tmp_path: Path, backend: FakeBackend) -> Iterator[Node]:
    with node_of(tmp_path, backend) as made:
        yield made


def records_in(body: bytes) -> list[Record]:
    found, at = [], 0
    while at < len(body):
        found.append(decode_record(body, at))
        at += found[-1].size
    return found


def queue_offsets(frame: Frame) -> list[int]:
    return [record.queue_offset for record in records_in(frame.body)]


def outcome(frame: Frame) -> tuple[int, str | None, int, int, int]:
    """Return the code, the remark, and the next, the smallest and the largest offset."""
    names = ("nextBeginOffset", "minOffset", "maxOffset")
    numbers = [int(frame.fields[name]) for name in names]
    return frame.code, frame.remark, numbers[0], numbers[1], numbers[2]


# -- pulls that are answered at once


def random_pull(chance: random.Random, node: Node) -> dict[str, str]:
    """Return the fields of a pull, mostly of a usual one, sometimes with wrong or missing ones."""
    fields = node.fields(
        chance.choice((chance.randrange(60), chance.randrange(-3, 200))),
        queueId=chance.choice((0, 0, 0, 1, 1, 2, 3, 4, -1)),
        topic=chance.choice((TOPIC, TOPIC, TOPIC, TOPIC, "New", "none")),
        maxMsgNums=chance.choice((32, 32, 32, 32, 1, 7, 64, 500, 0, -5)),
        maxMsgBytes=chance.choice((None, None, None, 1 << 31, 4_000, 1, -1)),
        sysFlag=chance.choice((*[SUBSCRIBES, SUBSCRIBES | COMMITS, SUBSCRIBES | 16] * 5,
                               SUBSCRIBES | WAITS, 0, HAS_CLASS, 1 << 40)),
        suspendTimeoutMillis=chance.choice((1, 1, 5, -1)),
        commitOffset=chance.choice((0, 5, -1)),
        subscription=chance.choice((*["*", ""] * 6, "red", "red || blue", "||", "a = 1")),
        expressionType=chance.choice((*["TAG", None] * 6, "SQL92", "other")),
    )  # fmt: skip
    if chance.random() < 0.1:
        name = chance.choice(list(fields))
        fields[name] = chance.choice(("", "x", "1.5", " 1", str(1 << 63), str(1 << 31), "-1"))
    if chance.random() < 0.05:
        del fields[chance.choice(list(fields))]
    return fields


def test_a_plain_pull_is_answered_as_any_other(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plain, ways, is_on = RemotingPull.find_plain, Counter[bool](), [True]

    def find_plain(pull: RemotingPull) -> Answered | None:
        if not is_on[0]:
            return None
        found = plain(pull)
        ways[found is not None] += 1
        return found

    monkeypatch.setattr(RemotingPull, "find_plain", find_plain)
    for queue_id, count in ((0, 50), (1, 90), (2, 3)):
        node.put(*chance.choices(("", "red", "blue"), k=count), queue_id=queue_id)
    node.put(*[""] * 4, readable=False)
    node.subscriptions["g", TOPIC] = Subscription("blue")
    ends = [one.end_offset for one in node.stored]
    clients = node.connect(), node.connect()
    for _ in range(800):
        fields, kind = random_pull(chance, node), chance.choice((JSON, ROCKETMQ))
        code = chance.choice((Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE))
        if chance.random() < 0.05:
            limit = chance.choice(ends[-10:])
            node.store.set_limits(confirmed=limit, readable=limit)
        said = []
        for is_on[0], client in zip((True, False), clients, strict=True):  # noqa: B020
            before, sent = len(node.commits), node.reads.sent_records
            answer = client.ask(code, fields, kind=kind)
            said.append((answer, node.commits[before:], node.reads.sent_records - sent))
        assert said[0] == said[1], (fields, kind)
    assert min(ways[True], ways[False]) > 10, ways


@pytest.mark.parametrize("kind", [0, ROCKETMQ])
def test_a_pull_returns_the_records_as_they_are_in_the_log(node: Node, kind: int) -> None:
    node.put("", "red", "")
    found = node.client.ask(Code.PULL_MESSAGE, node.fields(1), kind=kind)
    assert (
        found.body
        == kit.read_log(node.store.config.root)[node.stored[1].offset :][
            : node.stored[2].end_offset - node.stored[1].offset
        ]
    )
    assert found.fields == {
        "suggestWhichBrokerId": "0", "nextBeginOffset": "3", "minOffset": "0", "maxOffset": "3",
        "topicSysFlag": "0", "groupSysFlag": "0",
    }  # fmt: skip
    assert (found.code, found.remark, found.kind) == (Answer.SUCCESS, "FOUND", kind)


def test_each_place_of_a_queue_is_answered_as_rocketmq_does(node: Node) -> None:
    """The table of the module; tests/interop compares it with a real broker."""
    node.put("a", "b", "a", "c")
    moved, none, again = (
        Answer.PULL_OFFSET_MOVED, Answer.PULL_NOT_FOUND, Answer.PULL_RETRY_IMMEDIATELY
    )  # fmt: skip
    assert outcome(node.pull(4)) == (none, "OFFSET_OVERFLOW_ONE", 4, 0, 4)
    assert outcome(node.pull(5)) == (moved, "OFFSET_OVERFLOW_BADLY", 4, 0, 4)
    assert outcome(node.pull(-1)) == (moved, "OFFSET_TOO_SMALL", 0, 0, 4)
    assert outcome(node.pull(0, queueId=1)) == (none, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert outcome(node.pull(9, queueId=1)) == (moved, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
    assert outcome(node.pull(1, subscription="x")) == (again, "NO_MATCHED_MESSAGE", 4, 0, 4)
    found = node.pull(0, subscription="a || b")
    assert outcome(found)[2] == 4 and queue_offsets(found) == [0, 1, 2]
    found = node.pull(0, subscription="a", maxMsgNums=1)
    assert outcome(found)[2] == 1 and queue_offsets(found) == [0]
    assert node.pull(0, queueId=4).code == Answer.INVALID_PARAMETER
    assert node.pull(0, topic="Nobody").code == Answer.TOPIC_NOT_EXIST
    node.topics.shapes[TOPIC] = Shape(4, 4, perm=2)
    assert node.pull(0).code == Answer.NO_PERMISSION


def test_an_answer_is_bounded_by_messages_and_bytes_but_has_one_record(node: Node) -> None:
    node.put(*[""] * 5, size=30_000)
    size = node.stored[0].end_offset
    assert queue_offsets(node.pull(0, maxMsgNums=2)) == [0, 1]
    assert queue_offsets(node.pull(0, maxMsgBytes=3 * size)) == [0, 1, 2]
    assert queue_offsets(node.pull(3, maxMsgBytes=1)) == [3]
    assert queue_offsets(node.pull(3, maxMsgNums=0)) == [3]
    assert queue_offsets(node.pull(0, maxMsgNums=2**31 - 1)) == [0, 1, 2, 3, 4]
    assert node.pull(5).code == Answer.PULL_NOT_FOUND
    assert node.reads.sent_records == 2 + 3 + 1 + 1 + 5
    assert node.store.replayed_records == 5


def test_records_that_are_not_confirmed_are_not_read_and_no_offset_counts_them(node: Node) -> None:
    node.put("", "")
    node.put("", "", "", readable=False)
    assert queue_offsets(node.pull(0)) == [0, 1]
    assert outcome(node.pull(2)) == (Answer.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 2, 0, 2)
    moved = node.pull(9)
    assert (moved.code, moved.fields["nextBeginOffset"]) == (Answer.PULL_OFFSET_MOVED, "2")
    ends = node.client.ask(Code.GET_MAX_OFFSET, {"topic": TOPIC, "queueId": "0"})
    assert ends.fields == {"offset": "2"}
    late = {"topic": TOPIC, "queueId": "0", "timestamp": str(2**62)}
    assert node.client.ask(Code.SEARCH_OFFSET_BY_TIMESTAMP, late).fields == {"offset": "2"}
    hidden = {"offset": str(node.stored[3].offset)}
    assert node.client.ask(Code.VIEW_MESSAGE_BY_ID, hidden).code == Answer.SYSTEM_ERROR


def test_consumers_are_sent_to_slaves_that_are_near_and_stay_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "LOOK_MS", 0.0)
    node.put("")
    backend = node.backend

    def suggested(at: int = 0, queue_id: int = 0) -> str:
        return node.pull(at, queueId=queue_id).fields["suggestWhichBrokerId"]

    assert suggested() == "0"
    backend.reading = [2, 3]
    assert [suggested(0, n) for n in range(4)] == ["2", "3", "2", "3"] and suggested(1) == "2"
    backend.reading = []
    assert suggested() == "0"
    backend.writable, backend.master, backend.reading = False, 2, [1]
    assert suggested() == "1"
    backend.reading = []  # the master has ended
    assert suggested() == "1"
    monkeypatch.setattr(reads, "UNLINKED_MS", -1.0)
    assert suggested() == "0"
    backend.reading = [0]  # node 0 is no master, and its number means the master
    assert suggested() == "0"


@pytest.mark.parametrize(("own", "other"), [(1, "2"), (3, "0")], ids=["the master", "a slave"])
def test_a_consumer_goes_on_at_another_node_if_a_record_is_damaged_here(
    node: Node, monkeypatch: pytest.MonkeyPatch, own: int, other: str
) -> None:
    """RocketMQ's clients ask the same node again after an answer that is an error."""
    monkeypatch.setattr(reads, "DAMAGED_MS", 1.0)
    node.put(*["red"] * 5)
    damaged = node.stored[3].offset
    node.store.fence([(damaged, damaged + 10)], node.store.times_cut)
    backend = node.backend
    backend.node, backend.master, backend.writable = own, 1, own == 1
    backend.reading = [1, 2] if own == 1 else [own]
    first = node.pull(0)
    assert first.code == Answer.SUCCESS and outcome(first)[2] == 3
    for more in ({}, {"sysFlag": SUBSCRIBES | WAITS}, {"subscription": "red"}):
        found = node.pull(3, **more)
        assert found.code == Answer.PULL_RETRY_IMMEDIATELY and "damaged" in str(found.remark)
        assert found.fields["nextBeginOffset"] == "3"
        assert found.fields["suggestWhichBrokerId"] == other
    assert not node.reads._waiting
    backend.reading, backend.master = [], 1 if own == 1 else None
    found = node.pull(3)
    assert found.code == Answer.SYSTEM_ERROR and "damaged" in str(found.remark)


def test_an_answer_that_sends_a_consumer_elsewhere_waits_a_little(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes may have the damage; the node that stops meanwhile answers at once."""
    monkeypatch.setattr(reads, "DAMAGED_MS", 60_000.0)
    monkeypatch.setattr(reads, "DELAYED_MAX", 2)
    node.put("")
    node.store.fence([(0, 10)], node.store.times_cut)
    node.backend.reading = [2]
    client, gone = node.connect(), node.connect()
    gone.send(Code.PULL_MESSAGE, node.fields(0))
    opaque = client.send(Code.PULL_MESSAGE, node.fields(0))
    until(lambda: node.reads._delayed == 2)
    assert node.connect().ask(Code.PULL_MESSAGE, node.fields(0)).code == Answer.SYSTEM_ERROR
    gone.close()
    until(lambda: len(node.reads._waiting) == 1)
    node.reads._door.later(node.reads.answer_waiting)
    assert client.answer_of(opaque).code == Answer.PULL_RETRY_IMMEDIATELY


# -- what waiting pulls take


def long_expression(letter: str = "a") -> str:
    """Return an expression whose hashes take some 100 KB."""
    return "||".join(f"{letter}{n}" for n in range(1_000))


def test_pulls_of_a_group_share_the_hashes_of_a_long_subscription(node: Node) -> None:
    node.put("")
    node.subscriptions["g", TOPIC] = Subscription(long_expression())
    for _ in range(20):
        node.send_pull(1, sysFlag=WAITS, subscription=None)
    pulls = [pull for waiting in node.reads._waiting.values() for pull in waiting]
    assert len(pulls) == 20 and len({id(pull.codes) for pull in pulls}) == 1
    assert 0 < node.reads._memory.bytes < 200_000
    del pulls
    node.client.close()
    until(lambda: not node.reads._waiting)
    assert not node.reads._memory.bytes


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("TAG", long_expression(), long_expression("b")),
        ("SQL92", f"a = '{'x' * 5_000}'", f"a = '{'y' * 5_000}'"),
    ],
)
def test_the_memory_of_waiting_pulls_is_bounded_by_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch, kind: str, one: str, other: str
) -> None:
    node.put("")
    memory = node.reads._memory
    fields = {"sysFlag": SUBSCRIBES | WAITS, "expressionType": kind}
    node.send_pull(1, subscription=one, **fields)
    monkeypatch.setattr(pull_memory, "MAX_BYTES", memory.bytes)
    refused = node.connect().ask(Code.PULL_MESSAGE, node.fields(1, subscription=other, **fields))
    assert refused.code == Answer.SYSTEM_BUSY and f"{memory.bytes:,}" in str(refused.remark)
    node.send_pull(1, subscription=one, **fields)  # the same one takes nothing more
    node.send_pull(1, subscription="red")  # nor does a small one
    node.clients[0].close()
    until(lambda: not node.parked and not memory.bytes)
    fields["sysFlag"] = SUBSCRIBES
    found = node.clients[1].ask(Code.PULL_MESSAGE, node.fields(1, subscription=other, **fields))
    assert found.code == Answer.PULL_NOT_FOUND and not memory.bytes


def test_a_pull_of_a_topic_that_nobody_can_create_does_not_wait(node: Node) -> None:
    for topic in ("%RETRY%" + "x" * 250, "%DLQ%a.b"):
        found = node.pull(0, topic=topic, sysFlag=SUBSCRIBES | WAITS)
        assert found.code == Answer.INVALID_PARAMETER and "characters" in str(found.remark)
    longest = "%RETRY%" + "x" * 248
    node.send_pull(0, topic=longest)


def test_a_waiting_pull_keeps_nothing_of_its_request(node: Node) -> None:
    node.put("")
    opaque = node.client.send(
        Code.PULL_MESSAGE, node.fields(1, sysFlag=SUBSCRIBES | WAITS), b"x" * 1_000_000
    )
    until(lambda: node.parked == 1)
    ((pull,),) = node.reads._waiting.values()
    frame = pull.request.frame
    assert not (frame.body or frame.fields or frame.remark or frame.language)
    node.put("")
    assert node.client.answer_of(opaque).code == Answer.SUCCESS


# -- subscriptions


def test_the_subscription_of_the_heartbeat_counts_unless_the_request_has_one(node: Node) -> None:
    node.put("a", "b", "")
    silent = {"sysFlag": 0, "subscription": None}
    assert queue_offsets(node.pull(0, **silent)) == [0, 1, 2]  # none is known: the client compares
    node.subscriptions["g", TOPIC] = Subscription("b")
    assert queue_offsets(node.pull(0, **silent)) == [1]
    assert queue_offsets(node.pull(0, subscription="a")) == [0]
    assert queue_offsets(node.pull(0, **silent, subVersion=6)) == [0, 1, 2]  # a later one
    node.subscriptions["g", TOPIC] = Subscription("TAGS = 'a' OR KEYS CONTAINS 'k2'", "SQL92")
    assert queue_offsets(node.pull(0, **silent)) == [0, 2]


def test_an_sql_filter_is_compared_with_each_record(node: Node) -> None:
    node.put("a", "b", "", "b", "a", "a")
    sql = {"expressionType": "SQL92"}
    found = node.pull(0, **sql, subscription="TAGS IN ('b', 'c')")
    assert queue_offsets(found) == [1, 3]
    assert outcome(found) == (Answer.SUCCESS, "FOUND", 6, 0, 6)
    found = node.pull(1, **sql, subscription="TAGS = 'a'", maxMsgNums=1)
    assert queue_offsets(found) == [4], "it asks for one that matches"
    assert outcome(found) == (Answer.SUCCESS, "FOUND", 5, 0, 6)
    found = node.pull(4, **sql, subscription="TAGS = 'b'")
    assert outcome(found) == (Answer.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", 6, 0, 6)


def test_the_next_offset_of_a_filtered_pull_is_behind_all_messages_of_an_inner_batch(
    node: Node,
) -> None:
    """One that was within the batch had led the consumer to the same batch for ever."""
    node.topics.shapes["Batches"] = Shape(1, 1)
    for base, count in ((0, 5), (5, 3), (8, 1)):
        end = node.store.max_offset
        node.store.append_replica(end, inner_batch(base, count, end))
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    asked = {"topic": "Batches", "subscription": "a IS NULL", "expressionType": "SQL92"}
    for most, found in ((1, [(0, 5), (5, 8), (8, 9)]), (2, [(0, 8), (8, 9)])):
        at, seen = 0, []
        while at < 9 and len(seen) < 9:
            frame = node.pull(at, maxMsgNums=most, **asked)
            at = int(frame.fields["nextBeginOffset"])
            seen.append((queue_offsets(frame)[0], at))
        assert seen == found


def test_an_sql_filter_is_awaited_until_a_heartbeat_brings_it(node: Node) -> None:
    """RocketMQ's clients do not compare again, so the node sends nothing unfiltered."""
    node.put("a", "b")
    silent = {"sysFlag": 0, "subscription": None, "expressionType": "SQL92"}
    assert node.pull(0, **silent).code == Answer.SUBSCRIPTION_NOT_EXIST
    node.subscriptions["g", TOPIC] = Subscription("TAGS = 'b'", "SQL92")
    assert queue_offsets(node.pull(0, **silent)) == [1]
    assert node.pull(0, **silent, subVersion=6).code == Answer.SUBSCRIPTION_NOT_EXIST


def test_one_look_for_an_sql_filter_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "MAX_EVALUATED", 20)
    node.put(*["a"] * 8, "b")
    sql = {"expressionType": "SQL92", "subscription": "TAGS = 'b'"}
    assert node.pull(0, **sql).fields["nextBeginOffset"] == "6", "of 3 terms each"
    assert queue_offsets(node.pull(6, **sql)) == [8]


def test_a_pull_waits_for_a_record_that_its_sql_filter_wants(node: Node) -> None:
    node.put("a")
    opaque = node.send_pull(1, subscription="TAGS = 'a'", expressionType="SQL92")
    for _ in range(3):
        node.put("b", "b")
        assert node.parked == 1
    node.put("b", "a", "b", readable=False)
    assert node.parked == 1
    node.show()
    found = node.client.answer_of(opaque)
    assert queue_offsets(found) == [8]
    assert found.fields["nextBeginOffset"] in ("9", "10")


def test_filters_of_other_kinds_are_refused_with_a_clear_text(node: Node) -> None:
    node.put("a")
    found = node.pull(0, expressionType="SQL92", subscription="a > ")
    assert found.code == Answer.SUBSCRIPTION_PARSE_FAILED
    assert found.remark == "SQL filter: it ends too early: 'a > '"
    found = node.pull(0, expressionType="XPATH", subscription="a")
    assert found.code == Answer.SYSTEM_ERROR
    assert found.remark == "The broker does not support consumer to filter message by XPATH"
    found = node.pull(0, sysFlag=HAS_CLASS | SUBSCRIBES)
    assert (found.code, found.remark) == (
        Answer.SUBSCRIPTION_PARSE_FAILED, "hastore runs no filter classes: subscribe to tags"
    )  # fmt: skip
    assert node.pull(0, subscription="||").code == Answer.SUBSCRIPTION_PARSE_FAILED
    found = node.pull(0, subscription="a" * 8_193)
    assert (found.code, found.remark) == (
        Answer.SUBSCRIPTION_PARSE_FAILED, "a subscription of 8193 characters; at most 8192"
    )  # fmt: skip
    assert queue_offsets(node.pull(0, expressionType="", subscription="")) == [0]


def test_a_pull_brings_a_position_once(node: Node) -> None:
    node.put("")
    node.pull(0, commitOffset=7)
    assert not node.commits
    node.pull(0, commitOffset=7, sysFlag=SUBSCRIBES | COMMITS)
    opaque = node.send_pull(1, commitOffset=8, sysFlag=SUBSCRIBES | COMMITS | WAITS)
    node.put("")
    node.client.answer_of(opaque)
    assert node.commits == [("g", TOPIC, 0, 7), ("g", TOPIC, 0, 8)]
    node.refusals["g"] = "group g is disabled"
    refused = node.pull(0, commitOffset=9, sysFlag=SUBSCRIBES | COMMITS)
    assert (refused.code, refused.remark) == (Answer.NO_PERMISSION, "group g is disabled")
    assert len(node.commits) == 2


def test_a_pull_that_waits_is_refused_once_its_group_may_not_consume(node: Node) -> None:
    """As by RocketMQ's broker, which looks at everything anew when a message wakes a pull."""
    node.put("")
    opaque = node.send_pull(1, sysFlag=SUBSCRIBES | WAITS)
    node.refusals["g"] = "group g is disabled"
    node.put("")
    refused = node.client.answer_of(opaque)
    assert (refused.code, refused.remark) == (Answer.NO_PERMISSION, "group g is disabled")
    del node.refusals["g"]
    assert queue_offsets(node.pull(1)) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": None}, {"consumerGroup": ""}, {"queueId": "x"}, {"queueOffset": "1.5"},
        {"maxMsgNums": None}, {"queueOffset": 2**63}, {"sysFlag": -1}, {"queueId": "9" * 5_000},
        {"suspendTimeoutMillis": "soon", "sysFlag": WAITS}, {"maxMsgBytes": "all"},
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(node: Node, changes: dict[str, Any]) -> None:
    node.put("")
    found = node.pull(0, **changes)
    assert found.code == Answer.SYSTEM_ERROR and next(iter(changes)) in str(found.remark)
    assert node.pull(0).code == Answer.SUCCESS


# -- pulls that wait


def test_a_pull_waits_for_a_record_with_its_tag_and_skips_the_others(node: Node) -> None:
    node.put("a")
    opaque = node.send_pull(1, subscription="a")
    for _ in range(3):
        node.put("b", "b")
        assert node.parked == 1
    node.put("b", "a", "b", readable=False)
    assert node.parked == 1
    node.show()
    found = node.client.answer_of(opaque)
    assert found.code == Answer.SUCCESS
    assert queue_offsets(found) == [8]
    assert found.fields["nextBeginOffset"] in ("9", "10")


def test_a_pull_that_waits_keeps_neither_body_nor_fields(node: Node) -> None:
    node.put("a")
    fields = node.fields(1, sysFlag=SUBSCRIBES | WAITS)
    opaque = node.client.send(Code.PULL_MESSAGE, fields, bytes(1 << 20))
    until(lambda: node.parked == 1)
    (waiting,) = (pull for pulls in node.reads._waiting.values() for pull in pulls)
    assert (waiting.request.frame.body, waiting.request.frame.fields) == (b"", {})
    node.put("a")
    assert queue_offsets(node.client.answer_of(opaque)) == [1]


def test_a_wait_in_vain_ends_and_the_client_learns_what_was_skipped(node: Node) -> None:
    node.put("a")
    opaque = node.send_pull(1, subscription="a", suspendTimeoutMillis=300)
    node.put("b", "b")
    found = node.client.answer_of(opaque)
    assert outcome(found) == (Answer.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", 3, 0, 3)
    found = node.client.answer_of(node.send_pull(3, subscription="a", suspendTimeoutMillis=100))
    assert outcome(found) == (Answer.PULL_NOT_FOUND, "OFFSET_OVERFLOW_ONE", 3, 0, 3)


def test_a_queue_without_records_and_one_to_come_are_waited_for(node: Node) -> None:
    for topic, queue_id in (("New", 2), ("%RETRY%g", 0)):
        opaque = node.send_pull(0, topic=topic, queueId=queue_id)
        node.put("", topic=topic, queue_id=queue_id)
        assert queue_offsets(node.client.answer_of(opaque)) == [0]


def test_records_of_other_tags_wake_a_pull_but_do_not_cost_a_read_of_each(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put(*["b"] * 50)
    opaque = node.send_pull(50, subscription="a")
    seen: list[int] = []
    after: list[int] = []
    real = node.store.reader.pull

    def spied(topic: str, queue_id: int, at: int, **limits: Any) -> Any:
        found = real(topic, queue_id, at, **limits)
        seen.append(at)
        after.append(found.next_queue_offset)
        return found

    monkeypatch.setattr(node.store.reader, "pull", spied)
    for _ in range(20):
        node.put(*["b"] * 20)
    until(lambda: bool(after) and after[-1] == 450)
    assert len(seen) <= 40 and seen[1:] == after[:-1], "none is looked at twice"
    node.put("a")
    assert queue_offsets(node.client.answer_of(opaque)) == [450]


def test_a_slave_moves_no_offset_but_sends_the_client_to_the_master(node: Node) -> None:
    node.put("", "")
    node.backend.writable, node.backend.master = False, 2
    node.backend.nodes = {2: "tcp://127.0.0.1:1"}
    node.backend.reading = [1]
    assert node.pull(0).fields["suggestWhichBrokerId"] == "1"
    kept = node.pull(7)
    assert outcome(kept)[:3] == (Answer.PULL_RETRY_IMMEDIATELY, "OFFSET_OVERFLOW_BADLY", 7)
    assert kept.fields["suggestWhichBrokerId"] == "0"
    opaque = node.send_pull(3)
    node.put("", "")  # replication brings what the client has read elsewhere
    assert queue_offsets(node.client.answer_of(opaque)) == [3]
    kept = node.client.answer_of(node.send_pull(9, queueId=1))  # after a moment
    assert outcome(kept)[:3] == (Answer.PULL_RETRY_IMMEDIATELY, "NO_MESSAGE_IN_QUEUE", 9)


def test_a_master_that_has_not_replayed_its_log_moves_no_offset(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put("", "")
    with node.store.replay.paused():
        kit.put(node.store, kit.message(1), kit.message(2))
        node.show()
        assert node.pull(3).code == Answer.PULL_RETRY_IMMEDIATELY
        opaque = node.send_pull(3)
    assert queue_offsets(node.client.answer_of(opaque)) == [3]


def test_a_query_by_key_before_replay_is_refused(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "REPLAY_S", 0.0)
    with node.store.replay.paused():
        kit.put(node.store, kit.message(1, properties=[("KEYS", "new")]))
        node.show()
        fields = {"topic": "TopicA", "key": "new", "maxNum": 8, "endTimestamp": 2**62}
        refused = ask(node, Code.QUERY_MESSAGE, beginTimestamp=0, **fields)
        assert refused.code == Answer.SYSTEM_BUSY and "has not read" in (refused.remark or "")


def test_a_node_that_stops_answers_its_waiting_pulls_first(
    tmp_path: Path, backend: FakeBackend
) -> None:
    with node_of(tmp_path, backend) as node:
        node.put("", "")
        node.backend.reading = [1, 2]
        waiting = [node.send_pull(2), node.send_pull(0, queueId=1)]
        assert node.server.stop(60)
        found = [node.client.answer_of(opaque) for opaque in waiting]
        assert [frame.code for frame in found] == [Answer.PULL_RETRY_IMMEDIATELY] * 2
        assert [frame.fields["nextBeginOffset"] for frame in found] == ["2", "0"]
        assert {frame.fields["suggestWhichBrokerId"] for frame in found} == {"2"}


def test_pulls_of_a_connection_that_ends_are_forgotten(node: Node) -> None:
    node.put("")
    node.send_pull(1)
    node.send_pull(1)
    node.client.close()
    until(lambda: node.parked == 0)
    node.clients.clear()
    node.put("")
    assert queue_offsets(node.pull(1)) == [1]


def test_a_put_wakes_its_own_of_ten_thousand_pulls_and_one_more_is_refused(node: Node) -> None:
    """What waking costs is measured in steps by tests/server/api/test_pulls.py."""
    node.topics.shapes["Many"] = Shape(1_000, 4)
    for _ in range(10):
        client = node.connect()
        fields = [
            node.fields(0, topic="Many", queueId=n, sysFlag=SUBSCRIBES | WAITS,
                        suspendTimeoutMillis=600_000)
            for n in range(1_000)
        ]  # fmt: skip
        for one in fields:
            client.send(Code.PULL_MESSAGE, one)
    until(lambda: node.parked == 10_000)
    late = node.connect()
    refused = late.ask(Code.PULL_MESSAGE, node.fields(0, topic="Many", sysFlag=SUBSCRIBES | WAITS))
    assert (refused.code, refused.remark) == (
        Answer.SYSTEM_BUSY, "too many pulls wait for records"
    )  # fmt: skip
    for n in range(4):
        node.put("", topic="Many", queue_id=n)
        until(lambda n=n: node.parked == 10_000 - 10 * (n + 1))  # type: ignore[misc]


def test_a_client_that_does_not_read_is_refused_more_and_others_are_served(node: Node) -> None:
    node.put(*[""] * 16, size=40_000)
    slow = node.connect()
    other = node.connect()
    for _ in range(150):
        slow.send(Code.PULL_MESSAGE, node.fields(0))
    full = UNSENT_OF_ONE_BYTES
    until(lambda: any(c.unsent_bytes >= full for c in node.server._connections.all()))
    for _ in range(20):
        found = other.ask(Code.PULL_MESSAGE, node.fields(0, maxMsgNums=1))
        assert found.code == Answer.SUCCESS
    codes = [slow.next().code for _ in range(150)]
    assert set(codes) == {Answer.SUCCESS, Answer.FLOW_CONTROL}
    assert found.code == Answer.SUCCESS


def test_a_plain_pull_is_refused_too_to_a_client_that_does_not_read(node: Node) -> None:
    node.put(*[""] * 2, size=100)
    answered = node.pull(0)
    for connection in node.server._connections.all():
        connection.unsent_bytes += UNSENT_OF_ONE_BYTES  # as if it did not read
    refused = node.pull(0)
    for connection in node.server._connections.all():
        connection.unsent_bytes -= UNSENT_OF_ONE_BYTES
    codes = [answered.code, refused.code, node.pull(0).code]
    assert codes == [Answer.SUCCESS, Answer.FLOW_CONTROL, Answer.SUCCESS]


def test_a_plain_pull_is_not_answered_with_what_a_failover_may_have_cut(
    node: Node, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.put("", "")
    plain, looks = RemotingPull.find_plain, list[str]()

    def find_plain(pull: RemotingPull) -> Answered | None:
        found = plain(pull)
        assert found is not None
        backend.entries = [*backend.entries, (1 << 20, node.store.max_offset)]
        looks.append("plain")
        return found

    monkeypatch.setattr(RemotingPull, "find_plain", find_plain)
    find = RemotingPull.find
    monkeypatch.setattr(RemotingPull, "find", lambda pull: looks.append("find") or find(pull))
    assert node.pull(0).code == Answer.SUCCESS
    assert looks == ["plain", "find"]


# -- offsets


def ask(node: Node, code: Code, **fields: object) -> Frame:
    given = {"topic": TOPIC, "queueId": 0, **fields}
    return node.client.ask(code, {name: str(value) for name, value in given.items()})


def test_offsets_of_a_queue(node: Node) -> None:
    node.put("", "", "")
    for code, offset in ((Code.GET_MAX_OFFSET, "3"), (Code.GET_MIN_OFFSET, "0")):
        assert ask(node, code).fields == {"offset": offset}
        assert ask(node, code, queueId=9).fields == {"offset": "0"}
        assert ask(node, code, queueId="x").code == Answer.SYSTEM_ERROR
    first = records_in(node.pull(0).body)[0]
    early = ask(node, Code.GET_EARLIEST_MSG_STORETIME)
    assert early.fields == {"timestamp": str(first.store_timestamp_ms)}
    none = ask(node, Code.GET_EARLIEST_MSG_STORETIME, queueId=3)
    assert (none.code, none.fields) == (Answer.SUCCESS, {"timestamp": "-1"})


def test_offsets_by_time_have_both_boundaries(node: Node) -> None:
    times: list[int] = []
    while len(set(times)) < 3:  # until three of them differ
        node.put("")
        times.append(records_in(node.pull(len(times)).body)[0].store_timestamp_ms)
        time.sleep(0.002)

    def found(at_ms: int, **more: str) -> int:
        answer = ask(node, Code.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=at_ms, **more)
        assert answer.code == Answer.SUCCESS
        return int(answer.fields["offset"])

    for at_ms in {moment + more for moment in times for more in (-1, 0, 1)}:
        first = next((n for n, moment in enumerate(times) if moment >= at_ms), len(times))
        last = max((n for n, moment in enumerate(times) if moment <= at_ms), default=0)
        assert (found(at_ms), found(at_ms, boundaryType="UPPER")) == (first, last), at_ms
        assert found(at_ms, boundaryType="LOWER") == first
    assert found(-5) == 0 and found(2**63 - 1) == len(times)
    assert found(times[0], queueId=3) == 0  # type: ignore[arg-type]


def test_a_message_is_found_by_the_offset_of_its_id(node: Node) -> None:
    node.put("a", "b")
    found = node.client.ask(Code.VIEW_MESSAGE_BY_ID, {"offset": str(node.stored[1].offset)})
    assert found.code == Answer.SUCCESS and queue_offsets(found) == [1]
    for offset in (node.stored[1].offset + MIN_RECORD_SIZE, node.store.max_offset, -1, 2**62):
        missing = node.client.ask(Code.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
        assert missing.code == Answer.SYSTEM_ERROR
        assert missing.remark == f"can not find message by the offset, {offset}"


def test_messages_are_found_by_their_keys_and_their_unique_key(node: Node) -> None:
    node.put(*[""] * 40)

    def query(key: str, **more: object) -> Frame:
        fields = {
            "topic": TOPIC, "key": key, "maxNum": 64, "beginTimestamp": 0,
            "endTimestamp": 2**63 - 1, **more,
        }  # fmt: skip
        given = {name: str(value) for name, value in fields.items()}
        return node.client.ask(Code.QUERY_MESSAGE, given)

    assert queue_offsets(query("k7")) == [7]
    assert queue_offsets(query("U9", _UNIQUE_KEY_QUERY="true", maxNum=1)) == [9]
    assert queue_offsets(query("all")) == list(range(40))
    found = query("all", maxNum=3)
    assert queue_offsets(found) == [37, 38, 39]
    last = records_in(found.body)[-1]
    assert found.fields == {
        "indexLastUpdateTimestamp": str(last.store_timestamp_ms),
        "indexLastUpdatePhyoffset": str(last.physical_offset),
    }
    for nothing in (query("k40"), query("k7", endTimestamp=5), query("k7", topic="Other")):
        assert nothing.code == Answer.QUERY_NOT_FOUND and not nothing.body
    assert query("").code == Answer.SYSTEM_ERROR
    node.backend.master = 2  # its answer is added to that of this node
    assert query("k7").code == Answer.QUERY_NOT_FOUND
    node.backend.master = None
    assert queue_offsets(query("k7")) == [7]


def test_a_damaged_message_is_not_one_that_does_not_exist(node: Node) -> None:
    node.put("a", "b")
    bad = node.stored[1].offset
    file = node.store.log.queue.find(bad)
    assert file is not None
    node.store.flush()
    kit.scribble(file.path, bad - file.start + 88, b"\xff\xff\xff\xff")
    fields = {"topic": TOPIC, "key": "k1", "maxNum": 4, "beginTimestamp": 0, "endTimestamp": 2**62}
    found = node.client.ask(Code.QUERY_MESSAGE, {name: str(one) for name, one in fields.items()})
    assert found.code == Answer.SYSTEM_ERROR
    assert found.remark == f"a message is damaged here, at offset {bad}"
    found = node.client.ask(Code.VIEW_MESSAGE_BY_ID, {"offset": str(bad)})
    assert found.code == Answer.SYSTEM_ERROR and "is damaged" in found.remark


def test_a_node_that_was_removed_from_its_group_serves_no_reads(node: Node) -> None:
    node.put("")
    waiting = node.send_pull(1)
    node.backend.removed = "this node was removed from its group"
    node.put("")
    answers = [node.client.answer_of(waiting), node.pull(0), ask(node, Code.GET_MAX_OFFSET)]
    answers.append(ask(node, Code.VIEW_MESSAGE_BY_ID, offset=0))
    for found in answers:
        assert (found.code, found.remark) == (
            Answer.SERVICE_NOT_AVAILABLE, "this node was removed from its group"
        )  # fmt: skip


# -- whole nodes


def waiting_pull(client: RemotingClient, server: ApiServer, at: int) -> int:
    fields = {
        "consumerGroup": "g", "topic": "t", "queueId": "0", "queueOffset": str(at),
        "maxMsgNums": "32", "sysFlag": str(SUBSCRIBES | WAITS), "suspendTimeoutMillis": "60000",
        "subscription": "*",
    }  # fmt: skip
    opaque = client.send(Code.PULL_MESSAGE, fields)
    until(lambda: server._pulls.parked == 1)
    return opaque


def test_a_slave_serves_consumers_and_its_master_suggests_it(tmp_path: Path) -> None:
    group = Group(tmp_path, 2)
    try:
        group.start(1, 2)
        group.settle()
        with Producer(group.api(1)) as producer:
            producer.send_sync("t", b"x", queue=0)
            clients = {n: RemotingClient(group.api(n)) for n in (1, 2)}
            servers = {n: group[n].api for n in (1, 2)}
            until(lambda: group[2].store.readable_offset == group[1].store.max_offset)
            until(lambda: group[2].store.dispatched_offset == group[1].store.max_offset)
            for n in (1, 2):
                opaque = waiting_pull(clients[n], servers[n], n)
                producer.send_sync("t", b"x", queue=0)
                found = clients[n].answer_of(opaque)
                assert found.code == Answer.SUCCESS and queue_offsets(found) == [n]
                assert found.fields["suggestWhichBrokerId"] == "2"
            for client in clients.values():
                client.close()
    finally:
        group.end()


def test_the_leader_of_a_group_of_mode_dledger_serves_consumers(tmp_path: Path) -> None:
    node = DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)
    with running(node), Producer(node.api.endpoint) as producer:
        result = producer.send_sync("t", b"x", queue=0)
        client = RemotingClient(node.api.endpoint)
        queue = {"topic": "t", "queueId": "0"}
        until(lambda: client.ask(Code.GET_MAX_OFFSET, queue).fields == {"offset": "1"})
        opaque = waiting_pull(client, node.api, 1)
        producer.send_sync("t", b"y", queue=0)
        assert queue_offsets(client.answer_of(opaque)) == [1]
        viewed = client.ask(Code.VIEW_MESSAGE_BY_ID, {"offset": str(result.offset)})
        assert viewed.code == Answer.SUCCESS and queue_offsets(viewed) == [0]
        client.close()
