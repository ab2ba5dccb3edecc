"""Transactions of hastore's own producers, over a real node: committed once, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

import hastore
from hastore import Decision
from hastore.aio import Producer as AioProducer
from hastore.client.producer.transactions import end_request
from hastore.config.model import RemotingConfig, SecurityConfig
from hastore.errors import (
    ClientError,
    ForbiddenError,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
    TransactionError,
    UsageError,
)
from hastore.record.codec import NO_HOST, Record, build_record
from hastore.record.transactions import ASIDE_TOPIC, HALF_TOPIC, half_pairs
from hastore.server.base_node import BaseNode
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from tests.process.harness import wait_until
from tests.server.api.secured import Secured
from tests.server.kit import config_of, group_of_one, running
from tests.server.test_delayed_sends import polled

REMOTING = RemotingConfig(transaction_timeout_ms=1_000, transaction_check_interval_ms=1_000,
                          transaction_check_max=3)  # fmt: skip
GROUP = "orders-service"


@pytest.fixture(params=["classic", "dledger"])
def node(request: Any, tmp_path: pathlib.Path) -> Iterator[BaseNode]:
    dledger = request.param == "dledger"
    config = group_of_one(tmp_path) if dledger else config_of(tmp_path)
    config = msgspec.structs.replace(config, remoting=REMOTING)
    made: BaseNode = DLedgerNode(config, lambda: None) if dledger else Node(config, lambda: None)
    with running(made) as started:
        wait_until(lambda: started.backend.writable_reason() is None, 60, "no master")
        yield started


def records(node: BaseNode, topic: str) -> list[Record]:
    """Return the records of a topic, by queue."""
    store = node.backend.store
    assert store.wait_dispatched(store.whole_offset, 60)
    found = []
    for queue_id, (begin, end) in store.queues.queues_of(topic).items():
        for unit in store.queues.read(topic, queue_id, begin, end - begin):
            record = store.reader.record_at(unit.offset)
            assert record is not None
            found.append(record)
    return found


def bodies(node: BaseNode, topic: str) -> list[bytes]:
    return [one.body for one in records(node, topic)]


def none_open(node: BaseNode) -> None:
    store = node.backend.store
    assert store.wait_dispatched(store.whole_offset, 60)
    wait_until(lambda: not len(store.transactions), 60, "transactions stay open")


def never(message: hastore.Message) -> Decision:
    raise AssertionError(f"asked for {message}")


def test_the_end_of_a_block_commits_its_message(node: BaseNode) -> None:
    store = node.backend.store
    with hastore.Producer(node.api.endpoint, transaction_group=GROUP, check=never) as producer:
        with producer.transaction("T", b"one", key="k", tags="red", queue=1) as transaction:
            assert transaction.outcome is None and transaction.topic == "T"
            assert bodies(node, "T") == [] and len(store.transactions) == 1
        assert transaction.outcome is Decision.COMMIT and transaction.result is not None
        assert transaction.commit() == transaction.result, "it has ended so"
        with pytest.raises(UsageError, match="has ended: COMMIT"):
            transaction.rollback()
    [got] = polled(node.api.endpoint, "T", 1)
    assert (got.body, got.key, got.tags, got.queue_id) == (b"one", "k", "red", 1)
    assert (got.offset, got.queue_offset) == (transaction.result.offset, 0)
    assert got.properties["UNIQ_KEY"] == transaction.transaction_id
    assert "HS_PID" not in got.properties


def test_an_exception_rolls_back_and_goes_on(node: BaseNode) -> None:
    with hastore.Producer(node.api.endpoint, transaction_group=GROUP) as producer:
        with pytest.raises(ZeroDivisionError):
            with producer.transaction("T", b"one") as transaction:
                raise ZeroDivisionError
        assert transaction.outcome is Decision.ROLLBACK
        with producer.transaction("T", b"two") as transaction:
            transaction.rollback()
        with pytest.raises(UsageError, match="has ended: ROLLBACK"):
            transaction.commit()
    assert bodies(node, "T") == [] and len(node.backend.store.transactions) == 0


def test_what_is_left_open_another_producer_of_the_group_decides(node: BaseNode) -> None:
    asked: list[hastore.Message] = []

    def check(message: hastore.Message) -> Decision:
        asked.append(message)
        if message.body == b"later" and len(asked) < 4:
            return Decision.UNKNOWN
        return Decision.ROLLBACK if message.body == b"no" else Decision.COMMIT

    endpoint = node.api.endpoint
    with hastore.Producer(endpoint, transaction_group=GROUP) as gone:
        for body in (b"yes", b"no", b"later"):
            gone.transaction("T", body, key=body).leave_open()
        with pytest.raises(KeyboardInterrupt):
            with gone.transaction("T", b"interrupted") as transaction:
                raise KeyboardInterrupt
        assert transaction.outcome is Decision.UNKNOWN
    with hastore.Producer(endpoint, transaction_group="others", check=never):
        with hastore.Producer(endpoint, transaction_group=GROUP, check=check):
            none_open(node)
    assert sorted(bodies(node, "T")) == [b"interrupted", b"later", b"yes"]
    seen = {one.body: (one.topic, one.key, one.properties["PGROUP"]) for one in asked}
    assert seen[b"no"] == ("T", "no", GROUP)


@pytest.mark.parametrize("awaits", [False, True])
def test_a_block_that_takes_longer_than_the_timeout_commits(
    tmp_path: pathlib.Path, awaits: bool
) -> None:
    """Its producer's check was asked meanwhile, found nothing yet, and rolled the message back."""
    orders: list[bytes] = []
    asked_for_other = threading.Event()

    def check(message: hastore.Message) -> Decision:
        if message.body == b"other":
            asked_for_other.set()
        return Decision.COMMIT if message.body in orders else Decision.ROLLBACK

    def work(endpoint: str) -> None:
        """Ends once the producer was asked for its own transaction, and for a later one."""
        with hastore.Producer(endpoint, transaction_group=GROUP) as other:
            other.transaction("T", b"other").leave_open()
        assert asked_for_other.wait(60)
        orders.append(b"one")

    async def main(endpoint: str) -> None:
        async with AioProducer(endpoint, transaction_group=GROUP, check=check) as producer:
            async with producer.transaction("T", b"one"):
                await asyncio.to_thread(work, endpoint)

    remoting = msgspec.structs.replace(REMOTING, transaction_check_max=1_000)
    config = msgspec.structs.replace(config_of(tmp_path), remoting=remoting)
    with running(Node(config, lambda: None)) as node:
        if awaits:
            asyncio.run(main(node.api.endpoint))
        else:
            endpoint = node.api.endpoint
            with hastore.Producer(endpoint, transaction_group=GROUP, check=check) as producer:
                with producer.transaction("T", b"one"):
                    work(endpoint)
        assert bodies(node, "T") == [b"one"]


def test_a_check_that_fails_leaves_the_transaction_open(
    node: BaseNode, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [ZeroDivisionError(), "COMMIT", Decision.COMMIT]

    def check(_: hastore.Message) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with hastore.Producer(node.api.endpoint, transaction_group=GROUP, check=check) as producer:
        producer.transaction("T", b"one").leave_open()
        none_open(node)
    assert bodies(node, "T") == [b"one"] and not answers
    assert "ZeroDivisionError" in caplog.text and "no hastore.Decision" in caplog.text


def test_nobody_is_asked_for_ever(node: BaseNode) -> None:
    """After the last check the message is set aside, and a late end says so."""
    with hastore.Producer(
        node.api.endpoint, transaction_group=GROUP, check=lambda _: Decision.UNKNOWN
    ) as producer:
        transaction = producer.transaction("T", b"one")
        none_open(node)
        with pytest.raises(TransactionError, match="set aside"):
            transaction.commit()
        with pytest.raises(TransactionError, match="set aside"):
            with transaction:
                pass
    assert bodies(node, ASIDE_TOPIC) == [b"one"] and bodies(node, "T") == []


def test_an_asyncio_producer_has_transactions(node: BaseNode) -> None:
    asked: list[bytes] = []

    async def check(message: hastore.Message) -> Decision:
        await asyncio.sleep(0)
        asked.append(message.body)
        return Decision.COMMIT

    async def send() -> None:
        endpoint = node.api.endpoint
        async with AioProducer(endpoint, transaction_group=GROUP, check=check) as producer:
            async with producer.transaction("T", b"one") as transaction:
                pass
            assert transaction.outcome is Decision.COMMIT and transaction.result is not None
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction("T", b"two"):
                    raise ZeroDivisionError
            other = await producer.transaction("T", b"three", check_after_s=1)

            async def block() -> None:
                async with other:
                    await asyncio.sleep(600)

            task = asyncio.create_task(block())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert other.outcome is Decision.UNKNOWN
            while not asked or len(node.backend.store.transactions):
                await asyncio.sleep(0.05)
            many = [producer.transaction("T", b"%d" % number) for number in range(20)]
            begun = await asyncio.gather(*many)
            await asyncio.gather(*(one.commit() for one in begun))
            with pytest.raises(UsageError, match="check_after_s"):
                producer.transaction("T", b"", check_after_s=0)

    asyncio.run(send())
    assert asked == [b"three"]
    expected = sorted([b"one", b"three", *(b"%d" % number for number in range(20))])
    assert sorted(bodies(node, "T")) == expected


class Topic(str, enum.Enum):  # noqa: UP042  of many programs: `str()` of a member is its name
    ONE = "one"
    TWO = "two"


def test_the_queue_of_a_topic_that_has_fewer_by_now_is_chosen_again(node: BaseNode) -> None:
    """A topic that was created since: the half message was refused as the caller's fault."""
    endpoint = node.api.endpoint

    async def send() -> None:
        async with AioProducer(endpoint, transaction_group=GROUP) as producer:
            await producer.send("warm", b"")
            await asyncio.to_thread(admin.create_topic, "two", queues=1)
            for key in "ab":
                async with producer.transaction(Topic.TWO, b"x", key=key):
                    pass

    with hastore.Admin(endpoint) as admin:
        with hastore.Producer(endpoint, transaction_group=GROUP) as producer:
            producer.send_sync("warm", b"")
            admin.create_topic("one", queues=1)
            for key in "ab":  # of 4 queues these are 3 and 1
                with producer.transaction(Topic.ONE, b"x", key=key):
                    pass
            with pytest.raises(MessageIllegalError, match="no queue 3"):
                producer.transaction("one", b"y", queue=3)
        asyncio.run(send())
    for topic in ("one", "two"):
        assert [(one.queue_id, one.body) for one in records(node, topic)] == [(0, b"x")] * 2


def test_threads_share_a_producer(node: BaseNode) -> None:
    failures: list[BaseException] = []

    def work(producer: hastore.Producer, begin: int) -> None:
        try:
            for number in range(begin, begin + 25):
                with producer.transaction("T", b"%d" % number) as transaction:
                    if number % 5 == 0:
                        transaction.rollback()
        except BaseException as failure:
            failures.append(failure)

    with hastore.Producer(node.api.endpoint, transaction_group=GROUP, check=never) as producer:
        threads = [threading.Thread(target=work, args=(producer, at * 25)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not failures
    assert sorted(map(int, bodies(node, "T"))) == [one for one in range(100) if one % 5]


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: p.transaction("T", b"x", check_after_s=0), "check_after_s: expected an int from 1"),
    (lambda p: p.transaction("T", b"x", check_after_s=1.5), "check_after_s"),
    (lambda p: p.transaction("a b", b"x"), "topic 'a b'"),
    (lambda p: p.transaction("T", "x"), "body"),
    (lambda p: p.transaction("T", b"x", properties={"UNIQ_KEY": "u"}), "UNIQ_KEY are set by the"),
    (lambda p: p.transaction("T", b"x", properties={"DELAY": "1"}), "DELAY is no plain property"),
    (lambda p: p.transaction("T", b"x", queue=99), "queue 99"),
    (lambda p: p.transaction(HALF_TOPIC, b"x"), "reserved"),
    (lambda p: p.transaction("%RETRY%g", b"x"), "belongs to a consumer group"),
    (lambda p: p.transaction("T", b"x", properties={"p": "v" * 32_600}), "bytes of properties"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_wrong_arguments_are_refused(tmp_path: pathlib.Path, wrong: Any, text: str) -> None:
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        with hastore.Producer(node.api.endpoint, transaction_group=GROUP) as producer:
            with pytest.raises(UsageError) as refused:
                wrong(producer)
            assert text in str(refused.value)
        assert records(node, HALF_TOPIC) == records(node, "T") == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"check": never}, "without transaction_group"),
        ({"transaction_group": "a b"}, "transaction_group: expected"),
        ({"transaction_group": ""}, "transaction_group: expected"),
        ({"transaction_group": "g" * 256}, "transaction_group: expected"),
        ({"transaction_group": "g", "check": 1}, "check: expected a function"),
        ({"transaction_group": "g", "acks": 0}, "acks: with 0 no node answers"),
    ],
)
def test_wrong_arguments_of_a_producer_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        hastore.Producer("tcp://127.0.0.1:1", **arguments)


def test_a_blocking_producer_cannot_await_its_check() -> None:
    async def check(_: hastore.Message) -> Decision:
        return Decision.COMMIT

    with pytest.raises(UsageError, match=r"hastore\.aio\.Producer"):
        hastore.Producer("tcp://127.0.0.1:1", transaction_group="g", check=check)


def test_a_transaction_needs_a_group() -> None:
    with hastore.Producer("tcp://127.0.0.1:1", delivery_timeout_s=0.1) as producer:
        with pytest.raises(UsageError, match="give the producer transaction_group"):
            producer.transaction("T", b"x")


def test_an_end_that_cannot_be_sent_leaves_the_transaction_open(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    config = config_of(tmp_path)
    with running(Node(config, lambda: None)) as node:
        producer = hastore.Producer(
            node.api.endpoint, transaction_group=GROUP, delivery_timeout_s=1.0
        )
        one, two = (producer.transaction("T", body) for body in (b"one", b"two"))
    with producer:
        with one:
            pass
        assert one.outcome is Decision.UNKNOWN and "a check decides" in caplog.text
        with pytest.raises((NotStoredError, OutcomeUnknown)):
            two.commit()
        with pytest.raises(ZeroDivisionError):
            with two:
                raise ZeroDivisionError
    with pytest.raises(ClientError, match="closed"):
        two.commit()


def test_a_half_message_is_checked_by_the_node(tmp_path: pathlib.Path) -> None:
    """What hastore's own producers never send."""

    def half(**changes: Any) -> bytes:
        names = dict(half_pairs("T", 1, "g", "u", []))
        for name, value in changes.pop("names", {}).items():
            names.pop(name, None)
            if value is not None:
                names[name] = value
        fields: dict[str, Any] = {"queue_id": 0, **changes}
        return build_record(
            HALF_TOPIC, b"x", properties=list(names.items()), born_timestamp_ms=1,
            born_host=NO_HOST, **fields,
        )  # fmt: skip

    wrong = {
        "a queue of its own": half(queue_id=1),
        "prepared": half(sys_flag=4),
        "committed": half(sys_flag=8),
        "no TRAN_MSG": half(names={"TRAN_MSG": None}),
        "another TRAN_MSG": half(names={"TRAN_MSG": "false"}),
        "no group": half(names={"PGROUP": None}),
        "no id": half(names={"UNIQ_KEY": None}),
        "a long id": half(names={"UNIQ_KEY": "u" * 256}),
        "an id that is no text": half(names={"UNIQ_KEY": "odd\udcff"}),
        "no topic": half(names={"REAL_TOPIC": None}),
        "no queue": half(names={"REAL_QID": None}),
        "a queue that is none": half(names={"REAL_QID": "-1"}),
        "a queue too many": half(names={"REAL_QID": "4"}),
        "a reserved topic": half(names={"REAL_TOPIC": HALF_TOPIC}),
        "a topic of a consumer group": half(names={"REAL_TOPIC": "%DLQ%g"}),
        "delayed": half(names={"DELAY": "1"}),
        "checked": half(names={"TRANSACTION_CHECK_TIMES": "3"}),
    }
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        for what, record in wrong.items():
            [[result]] = node.store.put_encoded([record])
            assert result.status.name == "MESSAGE_ILLEGAL" and result.reason, what
        [[result]] = node.store.put_encoded([half()])
        assert result.offset is not None
        node.store.wait_dispatched(node.store.whole_offset, 60)
        assert len(node.store.transactions) == 1


def test_only_who_may_produce_to_the_topic_has_its_transactions(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The name of a group proves nothing."""
    secured = Secured(tmp_path)
    shop = secured.identity("shop", produce=["T"], consume=["T"])
    other = secured.identity("other", produce=["U"])
    reader = secured.identity("reader", consume=["*"])
    config = msgspec.structs.replace(
        config_of(tmp_path / "store"),
        remoting=REMOTING, security=SecurityConfig(identities=str(secured.path)),
    )  # fmt: skip
    with running(Node(config, lambda: None)) as node, contextlib.ExitStack() as stack:

        def producer(security: hastore.Security, check: Any = None) -> hastore.Producer:
            made = hastore.Producer(
                node.api.endpoint, transaction_group=GROUP, check=check, security=security
            )
            return stack.enter_context(made)

        strange = producer(other, never)
        with pytest.raises(ForbiddenError, match="produce 'T'"):
            strange.transaction("T", b"x")
        producer(reader, never)
        transaction = producer(shop).transaction("T", b"one")
        options = strange._transactions
        assert options is not None
        end = end_request(transaction._begun, options, commit=True)
        with pytest.raises(ForbiddenError, match="not yours"):
            strange._driver.call(end).result(60)
        transaction.leave_open()
        asked = len(node.store.transactions)
        assert asked == 1
        producer(shop, lambda _: Decision.COMMIT)
        none_open(node)
        assert bodies(node, "T") == [b"one"]
        with pytest.raises(ForbiddenError, match="not yours"):
            strange._driver.call(end).result(60)
    assert "so it has no transactions" in caplog.text


def test_a_message_that_is_committed_keeps_its_flags(node: BaseNode) -> None:
    with hastore.Producer(
        node.api.endpoint, transaction_group=GROUP, compression="zlib"
    ) as producer:
        with producer.transaction("T", b"x" * 5_000, properties={"a": "b"}):
            pass
        with pytest.raises(MessageIllegalError, match="at most"):
            producer.transaction("T", b"x" * 5_000_000)
    [record] = records(node, "T")
    assert record.sys_flag & 0xD == 9 and len(record.body) < 100, "compressed"
    [message] = polled(node.api.endpoint, "T", 1)
    assert message.body == b"x" * 5_000
