"""Delayed messages of hastore's own producers, over a real node: stored once, delivered once."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import hastore
from hastore.aio import Producer as AioProducer
from hastore.client.producer.preparer import OutgoingMessage
from hastore.errors import MessageIllegalError, NotStoredError, Status, UsageError
from hastore.record.codec import Record, build_record, decode_record
from hastore.record.delays import SCHEDULE_TOPIC, marked
from hastore.server.node import Node
from hastore.store.append.results import PutResult
from hastore.store.message_store import MessageStore
from tests.cli.kit import hastore as command
from tests.server.kit import config_of, running
from tests.store.kit import BORN, opened


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    config = config_of(tmp_path)
    with running(Node(config, lambda: None)) as started:
        yield started


def records_of(store: Any) -> list[Record]:
    assert store.wait_dispatched(store.whole_offset, 60)
    at, found = store.min_offset, []
    while at < store.max_offset:
        raw = store.reader.record_bytes(at)
        found.append(decode_record(raw))
        at += len(raw)
    return [record for record in found if not record.topic.startswith("HASTORE_")]


def polled(endpoint: str, topic: str, count: int) -> list[Any]:
    got: list[Any] = []
    with hastore.Consumer(topic, endpoint) as consumer:
        while len(got) < count:
            messages = consumer.poll(timeout_s=60)
            assert messages, f"{len(got)} of {count}"
            got += messages
    return got


def test_a_producer_delays_messages(node: Node) -> None:
    store = node.store
    with hastore.Producer(node.api.endpoint) as producer:
        sent = producer.send_sync("T", b"later", key="k", tags="red", queue=1, delay_level=1)
        assert sent.status is Status.PUT_OK
        [other] = producer.send_batch("T", [OutgoingMessage(b"batch", delay_level=1)]).result(60)
        at_once = producer.send_sync("T", b"now", queue=0)
        assert (at_once.queue_id, at_once.queue_offset) == (0, 0)
    waiting = records_of(store)[0]
    assert (waiting.topic, waiting.queue_id, waiting.physical_offset) == (
        SCHEDULE_TOPIC, 0, sent.offset,
    )  # fmt: skip
    assert (sent.queue_id, other.queue_offset) == (0, 1), "where it waits"
    got = {one.body: one for one in polled(node.api.endpoint, "T", 3)}
    assert got.keys() == {b"later", b"batch", b"now"}
    late = got[b"later"]
    assert (late.queue_id, late.tags) == (1, "red") and late.properties["KEYS"] == "k"
    delivered = {record.body: record for record in records_of(store) if record.topic == "T"}
    names = dict(delivered[b"later"].property_pairs)
    assert names.keys() == {"KEYS", "TAGS", "DELAY", "REAL_TOPIC", "REAL_QID", "HS_DELAYED"}
    assert marked(delivered[b"later"].properties) == (1, sent.offset)


def test_an_asyncio_producer_delays_messages(node: Node) -> None:
    async def send() -> Any:
        async with AioProducer(node.api.endpoint) as producer:
            sent = await producer.send("T", b"later", delay_level=1)
            await producer.send_batch("T", [OutgoingMessage(b"batch", delay_level=1)])
            return sent

    assert asyncio.run(send()).status is Status.PUT_OK
    got = polled(node.api.endpoint, "T", 2)
    assert sorted(one.body for one in got) == [b"batch", b"later"]


def test_the_command_sends_tags_properties_and_delays(node: Node) -> None:
    where = node.api.endpoint.removeprefix("tcp://")
    done = command(
        "produce", "T", "--bootstrap", where, "--tag", "red", "--property", "a=b=c",
        "--property", "d=", "--delay-level", "1", "--key", "k", stdin=b"one\ntwo\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {record.topic for record in records_of(node.store)} == {SCHEDULE_TOPIC}
    got = polled(node.api.endpoint, "T", 2)
    assert sorted(one.body for one in got) == [b"one", b"two"]
    assert {(one.tags, one.properties["a"], one.properties["d"]) for one in got} == {
        ("red", "b=c", "")
    }
    for text, why in (("a", "NAME=VALUE"), ("=b", "NAME=VALUE"), ("DELAY=3", "delay_level")):
        done = command(
            "produce", "T", "--bootstrap", where, "--property", text, stdin=b"x\n"
        )  # fmt: skip
        assert done.returncode == 2 and why in done.stderr, done


@pytest.mark.parametrize(
    ("properties", "why"),
    [
        ({"DELAY": "3"}, "delay_level"),
        ({"TIMER_DELAY_SEC": "3"}, "timer messages are not supported"),
        ({"TRAN_MSG": "true"}, "begin a transaction by Producer.transaction"),
    ],
)
def test_what_a_node_carries_out_is_no_plain_property(
    node: Node, properties: dict[str, str], why: str
) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        with pytest.raises(UsageError, match=why):
            producer.send("T", b"x", properties=properties)
        with pytest.raises(UsageError, match=why):
            OutgoingMessage(b"x", properties=properties)


@pytest.mark.parametrize("level", [0, -1, 100, "3", 1.5, True])
def test_a_level_is_a_number_from_1_to_99(node: Node, level: Any) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        with pytest.raises(UsageError, match="delay_level"):
            producer.send("T", b"x", delay_level=level)
        with pytest.raises(UsageError, match="delay_level"):
            OutgoingMessage(b"x", delay_level=level)


def test_a_delay_beyond_the_table_is_the_longest(node: Node) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        producer.send_sync("T", b"x", delay_level=99)
    [waiting] = records_of(node.store)
    assert waiting.queue_id == 17 and dict(waiting.property_pairs)["DELAY"] == "18"


def test_a_queue_that_is_missing_is_refused_at_once(node: Node) -> None:
    with hastore.Producer(node.api.endpoint) as producer:
        with pytest.raises((MessageIllegalError, NotStoredError), match="there is no queue 9"):
            producer.send_sync("T", b"x", queue=9, delay_level=1)
    assert records_of(node.store) == []


# -- what a node does with the bytes of any client


def delayed(number: int, level: str, *, topic: str = "T", **more: str) -> bytes:
    pairs = [("DELAY", level), *more.items(), ("HS_PID", "p"), ("HS_SEQ", str(number))]
    return build_record(
        topic, b"%d" % number, queue_id=1, properties=pairs, born_timestamp_ms=1, born_host=BORN
    )


def results_of(store: MessageStore, *payloads: bytes) -> list[PutResult]:
    return [result for one in store.put_encoded(payloads) for result in one]


def test_a_repeated_put_is_recognised(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        payload = delayed(1, "3") + delayed(2, "0") + delayed(3, "5") + delayed(4, "x")
        first = results_of(store, payload)
        assert [one.status for one in first] == [Status.PUT_OK] * 3 + [Status.MESSAGE_ILLEGAL]
        assert "DELAY='x'" in (first[3].reason or "")
        again = results_of(store, payload)
        assert [one.offset for one in again] == [one.offset for one in first]
        assert [one.duplicate for one in again] == [True] * 3 + [False]
        places = [(record.topic, record.queue_id) for record in records_of(store)]
        assert places == [(SCHEDULE_TOPIC, 2), ("T", 1), (SCHEDULE_TOPIC, 4)]
    with opened(tmp_path) as store:
        assert [one.duplicate for one in results_of(store, payload)] == [True] * 3 + [False]


def test_rights_are_those_of_its_own_topic(tmp_path: pathlib.Path) -> None:
    def guard(topic: bytes, producer: bytes | None) -> str | None:
        del producer
        return None if topic == b"T" else "forbidden"

    with opened(tmp_path) as store:
        [results] = store.put_encoded([delayed(1, "3") + delayed(2, "3", topic="U")], [guard])
        assert [one.status for one in results] == [Status.PUT_OK, Status.FORBIDDEN]
        assert [record.topic for record in records_of(store)] == [SCHEDULE_TOPIC]


def test_properties_that_leave_no_room_are_refused(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        for size in (32_400, 32_720):
            [one] = results_of(store, delayed(size, "3", long="x" * size))
            assert one.status is (Status.PUT_OK if size == 32_400 else Status.MESSAGE_ILLEGAL)
