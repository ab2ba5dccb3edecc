"""Messages that a consumer of hastore's sends back, over a real node of each mode."""

from __future__ import annotations

import asyncio
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import hastore
from hastore import aio
from hastore.client.consumer import sharing
from hastore.client.consumer.shared_consumer import SharedConsumer
from hastore.client.messages import Message
from hastore.config.model import Role
from hastore.errors import (
    ClientError,
    FlushSlaveTimeout,
    MessageIllegalError,
    ProtocolError,
    UsageError,
)
from hastore.ha.master.ha_service import HAService
from hastore.protocol import api
from hastore.server.backend import NodeBackend
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.server.remoting.subscriptions import ATTRIBUTE
from tests.server.kit import config_of, group_of_one, running
from tests.server.retention.kit import Nodes

LEVELS = "1s"  # each delay is a second
Make = Callable[..., SharedConsumer]


@pytest.fixture(params=["classic", "dledger"])
def node(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Node | DLedgerNode]:
    made: Node | DLedgerNode
    if request.param == "classic":
        config = config_of(tmp_path)
        store = msgspec.structs.replace(config.store, message_delay_level=LEVELS)
        made = Node(msgspec.structs.replace(config, store=store), lambda: None)
    else:
        made = DLedgerNode(group_of_one(tmp_path, message_delay_level=LEVELS), lambda: None)
    with running(made) as started:
        with hastore.Admin(started.api.endpoint) as admin:
            admin.create_topic("%RETRY%g", queues=1)  # else members look for it each 10 s
        yield started


def member(
    node: Node | DLedgerNode, topic: str = "orders", group: str = "g"
) -> SharedConsumer:
    consumer = hastore.Consumer(topic, node.api.endpoint, group=group, share=True)
    assert isinstance(consumer, SharedConsumer)
    return consumer


def one_of(consumer: SharedConsumer) -> Message:
    """Return the next message, which must come."""
    while not (found := consumer.poll(1, timeout_s=60)):
        pass
    return found[0]


def test_a_message_comes_again_and_is_a_dead_letter_in_the_end(node: Node | DLedgerNode) -> None:
    with hastore.Producer(node.api.endpoint) as producer, member(node) as consumer:
        producer.send_sync("orders", b"poison", key="k", properties={"n": "1"}, queue=2)
        message = one_of(consumer)
        assert (message.body, message.reconsume_times) == (b"poison", 0)
        consumer.send_back(message, 1, max_attempts=1)
        consumer.commit()
        producer.send_sync("orders", b"next", queue=2)
        found = [one_of(consumer), one_of(consumer)]
        assert sorted(one.body for one in found) == [b"next", b"poison"]
        (again,) = (one for one in found if one.body == b"poison")
        assert (again.topic, again.reconsume_times, again.key) == ("%RETRY%g", 1, "k")
        names = again.properties
        assert (names["n"], names["RETRY_TOPIC"]) == ("1", "orders")
        assert names["ORIGIN_MESSAGE_ID"] == message.message_id
        assert again.store_timestamp_ms - message.store_timestamp_ms >= 1_000
        consumer.send_back(again, max_attempts=1)
        consumer.commit()
        assert consumer.lag() == dict.fromkeys(consumer.assignment, 0)
    with hastore.Consumer("%DLQ%g", node.api.endpoint) as letters:
        (dead,) = letters.poll(timeout_s=60)
        assert (dead.body, dead.reconsume_times) == (b"poison", 2)


def test_a_coroutine_sends_a_dead_letter_at_once(node: Node | DLedgerNode) -> None:
    async def run() -> None:
        consumer = aio.Consumer("orders", node.api.endpoint, group="g", share=True)
        assert isinstance(consumer, aio.SharedConsumer)
        async with consumer:
            while not (found := await consumer.poll(timeout_s=60)):
                pass
            await consumer.send_back(found[0], dead_letter=True)
            await consumer.commit()

    with hastore.Producer(node.api.endpoint) as producer:
        producer.send_sync("orders", b"poison")
    asyncio.run(run())
    with hastore.Consumer("%DLQ%g", node.api.endpoint) as letters:
        assert [one.body for one in letters.poll(timeout_s=60)] == [b"poison"]


def moved(message: Message, **changes: Any) -> Message:
    """Return the message as one of another place in the log."""
    fields = {name: getattr(message, name) for name in Message.__struct_fields__}
    return Message(**{**fields, **changes})


def test_a_message_that_is_not_in_the_log_any_more_is_not_sent_back(
    node: Node | DLedgerNode,
) -> None:
    with hastore.Producer(node.api.endpoint) as producer, member(node) as consumer:
        producer.send_sync("orders", b"first", queue=0)
        producer.send_sync("orders", b"other", queue=0)
        first, other = one_of(consumer), one_of(consumer)
        end = node.backend.store.max_offset
        at = first.offset
        for wrong in (
            moved(first, offset=other.offset), moved(first, offset=end), moved(first, epoch=0),
            moved(other, offset=at), moved(first, queue_offset=1), moved(first, queue_id=1),
        ):  # fmt: skip
            with pytest.raises(MessageIllegalError, match=r"is not at offset \d+ of the log: .*"
                                                          "send a copy of it"):  # fmt: skip
                consumer.send_back(wrong)
        with pytest.raises(UsageError, match="a dead letter is not delivered again"):
            consumer.send_back(first, 3, dead_letter=True)
        assert node.backend.store.queues.queue_range("SCHEDULE_TOPIC_XXXX", 0) is None


def test_the_settings_of_the_group_may_allow_no_retries(node: Node | DLedgerNode) -> None:
    with hastore.Producer(node.api.endpoint) as producer, member(node) as consumer:
        producer.send_sync("orders", b"poison")
        message = one_of(consumer)
        with hastore.Admin(node.api.endpoint) as admin:
            settings = '{"groupName":"g","retryQueueNums":0}'
            admin.set_topic("%RETRY%g", attributes={ATTRIBUTE: settings})
        with pytest.raises(MessageIllegalError, match="say that it has no retries"):
            consumer.send_back(message)


def test_a_group_that_may_not_consume_gets_no_queues(
    node: Node | DLedgerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocketMQ's setting consumeEnable; no queue is lost with what was read there."""
    monkeypatch.setattr(sharing, "JOIN_MS", 50.0)
    told: list[str] = []

    class Listener(hastore.RebalanceListener):
        def on_revoked(self, queues: list[hastore.TopicQueue]) -> None:
            told.append("revoked")
            consumer.commit()

        def on_fenced(self, queues: list[hastore.TopicQueue]) -> None:
            told.append("fenced")

    def allow(*, allowed: bool) -> None:
        text = f'{{"groupName":"g","consumeEnable":{str(allowed).lower()}}}'
        with hastore.Admin(node.api.endpoint) as admin:
            admin.set_topic("%RETRY%g", attributes={ATTRIBUTE: text})

    with (
        hastore.Producer(node.api.endpoint) as producer,
        hastore.SharedConsumer(
            "orders", node.api.endpoint, group="g", listener=Listener()
        ) as consumer,
    ):
        producer.send_sync("orders", b"first", queue=0)
        assert one_of(consumer).body == b"first"
        allow(allowed=False)
        while consumer.assignment:
            assert consumer.poll(timeout_s=0.05) == []
        producer.send_sync("orders", b"second", queue=0)
        for _ in range(3):  # joins
            assert consumer.poll(timeout_s=0.1) == [] and not consumer.assignment
        allow(allowed=True)
        assert one_of(consumer).body == b"second"
        assert told == ["revoked"]


@pytest.mark.parametrize("group", ["my.group", "g" * 249])
def test_a_group_whose_name_no_topic_can_have_is_named(
    node: Node | DLedgerNode, group: str
) -> None:
    """Its members read, and only the first message to be sent back shows that it has no retries."""
    with hastore.Producer(node.api.endpoint) as producer, member(node, group=group) as consumer:
        producer.send_sync("orders", b"poison")
        message = one_of(consumer)
        for dead in (False, True):
            expected = f"the group '{group[:9]}.* has no retries and no dead letters"
            with pytest.raises(MessageIllegalError, match=expected):
                consumer.send_back(message, dead_letter=dead)
        consumer.commit()


def test_a_node_that_does_not_know_the_request_is_named(
    node: Node | DLedgerNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an earlier version: it ends the connection each time, and so might all of the time."""
    asked, decode, own = [], api.decode_request, threading.get_ident()

    def decoded(header: bytes) -> api.Request:
        request = decode(header)
        if isinstance(request, api.SendBack) and threading.get_ident() != own:
            asked.append(request)
            raise ProtocolError(api.NO_REQUEST)
        return request

    monkeypatch.setattr(api, "decode_request", decoded)
    with hastore.Producer(node.api.endpoint) as producer, member(node) as consumer:
        producer.send_sync("orders", b"poison")
        message = one_of(consumer)
        with pytest.raises(ClientError, match=r"closed the connection 3 times at this question: "
                                              "its hastore is too old to know it"):  # fmt: skip
            consumer.send_back(message)
        assert len(asked) == 3
        consumer.commit()


def test_what_is_stored_and_not_confirmed_is_not_stored_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy comes: a slave that was silent for a moment would double the message."""
    nodes = Nodes(tmp_path, 2, 1)
    try:
        one, _ = nodes.start(1, Role.SYNC_MASTER), nodes.start(2, Role.SLAVE)
        with hastore.Producer(one.api.endpoint) as producer, member(one) as consumer:
            producer.send_sync("orders", b"poison")
            message = one_of(consumer)
            monkeypatch.setattr(NodeBackend, "wait_limit_ms", lambda _self, _need: 10.0)
            with monkeypatch.context() as patched:
                patched.setattr(HAService, "on_report", lambda *_: None)
                with pytest.raises(FlushSlaveTimeout):
                    consumer.send_back(message, 18)
        assert one.store.wait_dispatched(one.store.max_offset, 60)
        assert one.store.queues.queue_range("SCHEDULE_TOPIC_XXXX", 17) == (0, 1)
    finally:
        nodes.stop()
