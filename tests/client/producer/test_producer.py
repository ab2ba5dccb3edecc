"""The producer against real API servers: results, refusals, order, and failover."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import hastore
from hastore import OutgoingMessage, Producer
from hastore.client.connections import bootstrap
from hastore.client.producer import send_core
from hastore.client.producer.send_core import SendCore
from hastore.config.model import ApiConfig
from hastore.errors import (
    ClientError,
    FlushSlaveTimeout,
    MessageIllegalError,
    NotStoredError,
    OutcomeUnknown,
    UnreachableError,
    UsageError,
)
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol.api import Status
from hastore.record.codec import decode_record
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.client.conftest import Node


def bodies(node: Node, topic: str = "t") -> list[bytes]:
    """Return the bodies of a node's log, in its order."""
    log, at, found = bytes(node.backend.store.log), 0, []
    while at < len(log):
        record = decode_record(log, at)
        if record.topic == topic:
            found.append(record.body)
        at += record.size
    return found


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def test_a_message_is_stored_as_it_was_sent(node: Node) -> None:
    with Producer([node.address]) as producer:
        result = producer.send_sync(
            "t", b"\x80\x04pickle?", key="k", tags="x", properties={"a": "1"}, queue=2
        )
    assert result.status is Status.PUT_OK
    assert (result.topic, result.queue_id, result.queue_offset) == ("t", 2, 0)
    assert (result.level, result.epoch, result.offset) == ("SYNC_MEM(1)", 65537, 0)
    stored = decode_record(bytes(node.backend.store.log))
    assert result.msg_id == stored.message_id
    assert stored.body == b"\x80\x04pickle?"
    assert stored.property_pairs == [
        ("KEYS", "k"), ("TAGS", "x"), ("a", "1"), ("HS_PID", producer.producer_id),
        ("HS_SEQ", "0"),
    ]  # fmt: skip
    assert stored.born_host.text == "127.0.0.1:0"


def test_a_key_and_tags_replace_those_of_properties(node: Node) -> None:
    """Twice in a record, the index would take the one, and a consumer the other."""
    received = {"KEYS": "old", "TAGS": "red", "a": "1"}
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"", key="new", tags="green", properties=received, queue=0)
        producer.send_batch(
            "t", [OutgoingMessage(b"", key="new", tags="green", properties=received)], queue=0
        ).result(60)
        producer.send_sync("t", b"", properties=received, queue=0)
    log, at, found = bytes(node.backend.store.log), 0, []
    while at < len(log):
        record = decode_record(log, at)
        found.append([pair for pair in record.property_pairs if not pair[0].startswith("HS_")])
        at += record.size
    replaced = [("KEYS", "new"), ("TAGS", "green"), ("a", "1")]
    assert found == [replaced, replaced, list(received.items())]


def test_the_same_key_goes_to_the_same_queue(node: Node) -> None:
    with Producer([node.address]) as producer:
        keyed = {producer.send_sync("t", b"", key="k7").queue_id for _ in range(5)}
        queues = [producer.send_sync("t", b"").queue_id for _ in range(8)]
    assert len(keyed) == 1
    assert sorted(queues) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_many_messages_keep_their_order(node: Node) -> None:
    with Producer([node.address]) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(5_000)]
        assert producer.flush(60)
        offsets = [future.result(0).offset for future in futures]
    assert offsets == sorted(offsets) and len(set(offsets)) == 5_000
    assert bodies(node) == [b"%d" % i for i in range(5_000)]


def test_send_from_many_threads(node: Node) -> None:
    with Producer([node.address], max_in_flight=64) as producer:

        def work(name: int) -> None:
            for i in range(300):
                producer.send("t", b"%d:%d" % (name, i), queue=name)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert producer.flush(60)
    found = bodies(node)
    assert len(found) == 1200
    for name in range(4):
        mine = [body for body in found if body.startswith(b"%d:" % name)]
        assert mine == [b"%d:%d" % (name, i) for i in range(300)]


def test_a_batch_of_any_size(node: Node) -> None:
    with Producer([node.address]) as producer:
        messages = [OutgoingMessage(b"%d" % i, key=f"k{i}") for i in range(3_000)]
        results = producer.send_batch("t", messages).result(60)
        assert producer.send_batch("t", []).result(0) == []
        few = producer.send_batch("t", [b"a", b"b"], queue=1).result(60)
    assert len({r.offset for r in results}) == 3_000
    assert [r.queue_id for r in few] == [1, 1]
    assert bodies(node)[:3_000] == [b"%d" % i for i in range(3_000)]


def test_a_batch_with_large_properties_needs_several_frames(node: Node) -> None:
    """A node ends a connection that sends more than a frame may have, with all that is on it."""
    messages = [OutgoingMessage(b"x", properties={"p": "v" * 20_000}) for _ in range(256)]
    with Producer([node.address], delivery_timeout_s=20) as producer:
        assert len(producer.send_batch("t", messages, queue=0).result(60)) == 256
    assert len(bodies(node)) == 256


@pytest.mark.parametrize("properties", [{"a": "b\x02"}, {"a": "v" * 32_750}])
def test_a_batch_with_properties_that_no_record_can_hold_sends_nothing(
    node: Node, properties: dict[str, str]
) -> None:
    messages = [b"x"] * 256 + [OutgoingMessage(b"y", properties=properties)]
    with Producer([node.address]) as producer:
        with pytest.raises(MessageIllegalError):
            producer.send_batch("t", messages, queue=0)
    assert bodies(node) == []


def test_a_batch_of_which_some_were_sent_ends_by_its_future() -> None:
    """An exception of the call says that nothing was sent."""
    placed = [OutgoingMessage(b"1", queue=0)] * 256
    with Producer(["tcp://127.0.0.1:1"], delivery_timeout_s=0.3) as producer:
        with pytest.raises(UnreachableError):
            producer.send_batch("t", [b"2"])
        future = producer.send_batch("t", [*placed, b"2"])
        with pytest.raises(ClientError):
            future.result(60)


def test_a_batch_with_a_message_that_is_too_long_by_its_number_ends_by_its_future(
    node: Node,
) -> None:
    """What is checked before has no number yet; with its digits no record can hold it."""
    with Producer([node.address]) as producer:
        for length in range(32_600, 32_750):
            message = OutgoingMessage(b"y", properties={"p": "v" * length})
            try:
                future = producer.send_batch("t", [*[b"x"] * 256, message], queue=0)
            except MessageIllegalError:
                break  # of the next length nothing is sent
            failure = future.exception(60)
            if failure is not None:
                assert isinstance(failure, MessageIllegalError)
                return
    raise AssertionError("each length was refused before, or sent")


def test_linger_fills_frames(node: Node) -> None:
    with Producer([node.address], linger_ms=120_000, delivery_timeout_s=240) as producer:
        producer.send("t", b"first", queue=0)
        assert producer.flush(60)
        before = node.backend.store.appends
        for i in range(100):
            producer.send("t", b"%d" % i, queue=0)
        begin = time.monotonic()
        assert producer.flush(60)
        assert time.monotonic() - begin < 60.0  # a flush does not linger
        assert node.backend.store.appends - before <= 3


def test_acks_0_knows_nothing(node: Node) -> None:
    with Producer([node.address], acks=0) as producer:
        result = producer.send_sync("t", b"x", queue=0)
        assert (result.status, result.offset, result.msg_id) == (Status.PUT_OK, None, None)
        wait_for(lambda: bodies(node) == [b"x"])


@pytest.mark.parametrize(
    "options",
    [
        {"acks": 2}, {"acks": True}, {"acks": "ALL"}, {"max_in_flight": 0},
        {"max_in_flight": 1025}, {"batch_bytes": 0}, {"linger_ms": -1},
        {"delivery_timeout_s": 0},
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Producer(["tcp://127.0.0.1:1"], **options)


@pytest.mark.parametrize("topic", ["", "a/b", "../x", "a\0b", "x" * 128, "ü"])
def test_topics_that_no_master_would_take(node: Node, topic: str) -> None:
    with Producer([node.address]) as producer, pytest.raises(MessageIllegalError):
        producer.send(topic, b"")


def test_messages_that_no_master_would_take(node: Node) -> None:
    with Producer([node.address]) as producer:
        with pytest.raises(MessageIllegalError):
            producer.send("t", bytes(4 * 1024 * 1024 + 1))
        with pytest.raises(MessageIllegalError):
            producer.send("t", b"", properties={"a": "x" * 40_000})
        with pytest.raises(MessageIllegalError):
            producer.send("t", b"", key="a\x01b")
        with pytest.raises(UsageError):
            producer.send("t", "text")  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            producer.send("t", b"", properties={"HS_SEQ": "7"})
        with pytest.raises(MessageIllegalError, match="queue 77"):
            producer.send_sync("t", b"", queue=77)
        assert producer.send_sync("t", bytes(4 * 1024 * 1024)).status is Status.PUT_OK


def test_no_node_reachable() -> None:
    with Producer(["tcp://127.0.0.1:9"], delivery_timeout_s=0.3) as producer:
        begin = time.monotonic()
        why = r"no answer from tcp://127.0.0.1:9 \(tcp://127.0.0.1:9: \w+"
        with pytest.raises(UnreachableError, match=why):
            producer.send("t", b"")
        with pytest.raises(NotStoredError, match=f"no writable master: {why}") as caught:
            producer.send("t", b"", queue=0).result(60)
        assert caught.value.status == "SERVICE_NOT_AVAILABLE"
        assert time.monotonic() - begin < 30.0  # less than the default delivery timeout


def test_only_slaves_reachable(make_node: Callable[..., Node]) -> None:
    slave = make_node(2, writable=False)
    with Producer([slave.address], delivery_timeout_s=0.3) as producer:
        with pytest.raises(NotStoredError, match="this node is a slave"):
            producer.send("t", b"", queue=0).result(60)
    assert bodies(slave) == []


def test_no_slave_is_retried_and_then_certain(node: Node) -> None:
    node.backend.unconfirmable = "0 of 1 in sync"
    with Producer([node.address], delivery_timeout_s=0.4) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(100)]
        for future in futures:
            with pytest.raises(NotStoredError, match="0 of 1 in sync") as caught:
                future.result(60)
            assert caught.value.status == "SLAVE_NOT_AVAILABLE"
    assert bodies(node) == []


def test_a_permanent_refusal_is_raised_at_once(node: Node) -> None:
    node.backend.unconfirmable = "0 of 1 in sync"
    node.backend.unflushable = "set ha.ack_point: flushed on the slaves"
    with Producer([node.address], sync_flush=True, delivery_timeout_s=3_600) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(100)]
        for future in futures:
            with pytest.raises(NotStoredError, match="ha.ack_point: flushed") as caught:
                future.result(60)
            assert caught.value.status == "SLAVE_NOT_AVAILABLE"
        with pytest.raises(NotStoredError, match="ha.ack_point: flushed"):
            producer.send_batch("t", [b"a", b"b"], queue=0).result(60)
    assert bodies(node) == []


def test_a_slave_that_comes_back_in_time(node: Node) -> None:
    node.backend.unconfirmable = "0 of 1 in sync"
    with Producer([node.address], delivery_timeout_s=60) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(50)]
        time.sleep(0.3)
        node.backend.unconfirmable = None
        for future in futures:
            assert future.result(60).status is Status.PUT_OK
    assert bodies(node) == [b"%d" % i for i in range(50)]


def test_busy_is_retried_in_order(make_node: Callable[..., Node]) -> None:
    node = make_node()
    node.stop()
    config = ApiConfig(max_pending_puts=20)
    node.server = ApiServer(node.address, node.backend, config, on_failure=raise_failure)
    node.server.start()
    node.backend.transfer.hold = True
    ended = threading.Event()

    def confirm() -> None:
        while not ended.is_set():
            node.backend.transfer.end_all()
            time.sleep(0.01)

    helper = threading.Thread(target=confirm)
    helper.start()
    with Producer([node.address], batch_bytes=1_000) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(600)]
        assert producer.flush(60)
    ended.set()
    helper.join()
    assert all(future.result(0).status is Status.PUT_OK for future in futures)
    assert bodies(node) == [b"%d" % i for i in range(600)]


def test_stored_but_not_confirmed_is_asked_again_until_it_is(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address]) as producer:
        future = producer.send("t", b"x", queue=0)
        for _ in range(3):
            wait_for(lambda: node.backend.transfer.waiting)
            node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
            assert not future.done()
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all()
        assert future.result(60).status is Status.PUT_OK
    assert bodies(node) == [b"x"]


@pytest.mark.parametrize("outcome", [Outcome.WAIT_QUORUM_ACK_TIMEOUT, Outcome.TERM_CHANGED])
def test_what_no_majority_has_confirmed_is_sent_again_and_stored_once(
    node: Node, outcome: Outcome
) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address]) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(3)]
        for _ in range(2):
            wait_for(lambda: node.backend.transfer.waiting)
            node.backend.transfer.end_all(outcome)
            assert not any(future.done() for future in futures)
        node.backend.transfer.hold = False
        wait_for(lambda: node.backend.transfer.end_all() >= 0 and all(f.done() for f in futures))
        assert {future.result(60).status for future in futures} == {Status.PUT_OK}
    assert bodies(node) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("outcome", [Outcome.WAIT_QUORUM_ACK_TIMEOUT, Outcome.TERM_CHANGED])
def test_a_refused_message_ends_as_refused_whatever_becomes_of_its_frame(
    node: Node, outcome: Outcome
) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], linger_ms=50) as producer:
        first, refused, last = [producer.send("t", b"%d" % q, queue=q) for q in (0, 9, 1)]
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all(outcome)
        with pytest.raises(MessageIllegalError, match="queue 9 of 4"):
            refused.result(60)
        assert not first.done() and not last.done()
        node.backend.transfer.hold = False
        wait_for(lambda: node.backend.transfer.end_all() >= 0 and first.done() and last.done())
        assert {first.result(60).status, last.result(60).status} == {Status.PUT_OK}
    assert bodies(node) == [b"0", b"1"]


def test_without_idempotence_what_no_majority_has_confirmed_is_unknown(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], idempotent=False) as producer:
        future = producer.send("t", b"x", queue=0)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all(Outcome.TERM_CHANGED)
        with pytest.raises(OutcomeUnknown, match="TERM_CHANGED: this node stopped leading"):
            future.result(60)


@pytest.mark.parametrize("outcome", [Outcome.WAIT_QUORUM_ACK_TIMEOUT, Outcome.TERM_CHANGED])
def test_without_idempotence_what_follows_an_unconfirmed_message_is_stored_once(
    node: Node, outcome: Outcome
) -> None:
    transfer = node.backend.transfer
    transfer.hold = True
    with Producer([node.address], idempotent=False) as producer:
        futures = []
        for number in (1, 2):
            futures.append(producer.send("t", b"%d" % number, queue=0))
            wait_for(lambda n=number: len(transfer.waiting) == n)
        *_, done = transfer.waiting.pop(0)
        done(outcome, "MASTER_MEM")
        transfer.after_done()
        for future in futures:  # the node had appended both; the second one's answer is dropped
            with pytest.raises(OutcomeUnknown):
                future.result(60)
        transfer.hold = False
        last = producer.send("t", b"3", queue=0)
        wait_for(lambda: transfer.end_all() >= 0 and last.done())
        assert last.result(60).status is Status.PUT_OK
    assert bodies(node) == [b"1", b"2", b"3"]


def test_stored_but_never_confirmed_carries_the_result(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], delivery_timeout_s=0.5) as producer:
        future = producer.send("t", b"x", queue=0)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
        node.backend.unconfirmable = "nobody in sync"
        with pytest.raises(FlushSlaveTimeout) as caught:
            future.result(60)
        assert caught.value.result.offset == 0  # type: ignore[attr-defined]


def test_without_idempotence_nothing_is_sent_twice(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], idempotent=False) as producer:
        future = producer.send("t", b"x", queue=0)
        wait_for(lambda: node.backend.transfer.waiting)
        node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
        with pytest.raises(FlushSlaveTimeout):
            future.result(60)
        future = producer.send("t", b"y", queue=0)
        wait_for(lambda: node.backend.transfer.waiting)
        node.stop()
        with pytest.raises(OutcomeUnknown):
            future.result(60)
    node.restart()


def test_an_answer_that_never_comes_is_unknown(node: Node) -> None:
    node.backend.transfer.hold = True
    with Producer([node.address], delivery_timeout_s=0.5) as producer:
        future = producer.send("t", b"x", queue=0)
        with pytest.raises(OutcomeUnknown):
            future.result(60)
    assert bodies(node) == [b"x"]


def test_a_refusal_after_an_unanswered_attempt_is_no_certainty(
    pair: tuple[Node, Node],
) -> None:
    master, slave = pair
    master.backend.transfer.hold = True
    with Producer([master.address, slave.address], delivery_timeout_s=1.0) as producer:
        future = producer.send("t", b"x", queue=0)
        wait_for(lambda: master.backend.transfer.waiting)
        master.stop()  # it was stored without an answer; the slave refuses
        with pytest.raises(OutcomeUnknown):
            future.result(60)
    master.restart()


def flip(master: Node, slave: Node, epoch: int) -> None:
    master.backend.writable = False
    slave.backend.entries = [*slave.backend.entries, (epoch, slave.backend.store.max_offset)]
    slave.backend.writable = True
    for each in (master, slave):
        each.backend.master = slave.backend.node


@pytest.mark.parametrize("kill", [True, False])
def test_a_failover_loses_nothing_doubles_nothing_keeps_the_order(
    pair: tuple[Node, Node], kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_core, "ATTEMPT_SLACK_MS", 120_000.0)  # it asks long before that
    master, slave = pair
    results = []
    with Producer([master.address], delivery_timeout_s=60) as producer:
        futures = [producer.send("t", b"%d" % i, queue=0) for i in range(500)]
        wait_for(lambda: futures[200].done())
        master.backend.transfer.hold = True
        futures += [producer.send("t", b"%d" % i, queue=0) for i in range(500, 1_000)]
        if kill:
            master.stop()
        begin = time.monotonic()
        flip(master, slave, 131074)
        futures += [producer.send("t", b"%d" % i, queue=0) for i in range(1_000, 2_000)]
        results = [future.result(60) for future in futures]
        took = time.monotonic() - begin
        assert producer.master == slave.address
        assert producer.epoch == 131074
    assert took < 30.0
    assert bodies(slave) == [b"%d" % i for i in range(2_000)]
    assert len({r.offset for r in results}) == 2_000
    if kill:
        master.restart()


@pytest.mark.parametrize(
    "options", [{}, {"idempotent": False}, {"acks": 0}], ids=["usual", "not idempotent", "acks 0"]
)
def test_a_node_that_is_given_by_another_address_than_it_states_is_followed_by_one(
    pair: tuple[Node, Node], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By both in turns, it would drop its connection, and what is on it, at each message."""
    caplog.set_level(logging.INFO, "hastore.client.producer.send_core")
    master, slave = pair

    def names(node: Node) -> set[str]:
        return {node.address, node.address.replace("127.0.0.1", "localhost")}

    given = [max(names(node)) for node in pair]
    with Producer(given, delivery_timeout_s=120, **options) as producer:
        maps = producer._driver.core.cluster.maps

        def send(begin: int) -> None:
            futures = [producer.send("t", b"%d" % i, queue=0) for i in range(begin, begin + 500)]
            assert [future.result(60).status for future in futures] == [Status.PUT_OK] * 500
            wait_for(lambda: len(bodies(slave)) == begin + 500)

        wait_for(lambda: names(master) | names(slave) <= maps.keys())
        send(0)
        assert producer.master in names(master)
        flip(master, slave, 131074)
        master.stop()
        wait_for(lambda: producer.epoch == 131074 and names(slave) == maps.keys())
        send(500)
        assert producer.master in names(slave)
    master.restart()
    assert bodies(slave) == [b"%d" % i for i in range(1_000)]
    assert len([one for one in caplog.messages if "the master is" in one]) == 2


def test_a_superseded_master_is_never_followed_again(pair: tuple[Node, Node]) -> None:
    master, slave = pair
    with Producer([master.address, slave.address]) as producer:
        producer.send_sync("t", b"1", queue=0)
        flip(master, slave, 131074)
        producer.send_sync("t", b"2", queue=0)
        slave.stop()
        master.backend.writable = True  # it believes to be master still
        future = producer.send("t", b"3", queue=0)
        time.sleep(0.5)
        assert not future.done()
        slave.restart()
        assert future.result(60).epoch == 131074


def test_a_restarted_master_gets_what_it_lost(node: Node) -> None:
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"1", queue=0)
        node.stop()
        future = producer.send("t", b"2", queue=0)
        time.sleep(0.1)
        node.restart()
        assert future.result(60).queue_offset == 1


def test_a_silent_master_is_replaced_by_one_that_answers(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_core, "ATTEMPT_SLACK_MS", 120_000.0)  # it asks long before that
    master, slave = pair
    with Producer([master.address, slave.address], delivery_timeout_s=120) as producer:
        producer.send_sync("t", b"1", queue=0)
        master.backend.transfer.hold = True  # as if stopped: neither answer nor refusal
        future = producer.send("t", b"2", queue=0)
        wait_for(lambda: master.backend.transfer.waiting)
        begin = time.monotonic()
        slave.backend.entries = [*slave.backend.entries, (131074, 0)]
        slave.backend.writable = True
        assert future.result(60).epoch == 131074
        assert time.monotonic() - begin < 60.0  # before the delivery timeout


def test_the_window_bounds_what_is_unsettled(node: Node) -> None:
    node.backend.transfer.hold = True
    sent = []
    with Producer([node.address], max_in_flight=10) as producer:

        def work() -> None:
            for i in range(30):
                sent.append(producer.send("t", b"%d" % i, queue=0))

        helper = threading.Thread(target=work)
        helper.start()
        time.sleep(0.2)
        assert len(sent) == 10
        node.backend.transfer.hold = False
        node.backend.transfer.end_all()
        helper.join(60)
        assert producer.flush(60)
    assert len(sent) == 30


def test_close_settles_what_is_left(node: Node) -> None:
    node.backend.transfer.hold = True
    producer = Producer([node.address])
    future = producer.send("t", b"x", queue=0)
    wait_for(lambda: node.backend.transfer.waiting)
    producer.close(timeout_s=0.1)
    with pytest.raises(OutcomeUnknown, match="closed"):
        future.result(0)
    with pytest.raises(ClientError, match="closed"):
        producer.send("t", b"y", queue=0)
    producer.close()


def test_an_answer_that_does_not_match_is_no_success(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FakeBackend.put_encoded

    def short(self: FakeBackend, payloads: Any) -> Any:
        return [results[:-1] for results in real(self, payloads)]

    with Producer([node.address]) as producer:
        producer.send_sync("t", b"1", queue=0)
        monkeypatch.setattr(FakeBackend, "put_encoded", short)
        with pytest.raises(OutcomeUnknown):
            producer.send("t", b"2", queue=0).result(60)
        monkeypatch.undo()
        assert producer.send_sync("t", b"3", queue=0).status is Status.PUT_OK


def test_an_idle_producer_sleeps(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    real = SendCore.run_once
    monkeypatch.setattr(
        SendCore, "run_once", lambda self, now: (runs.append(1), real(self, now))[1]
    )
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"1", queue=0)
        # It has a PING every two seconds, and the reply to the send may still be under way: so a
        # stretch without a run must come, not any certain one. A busy loop never has one.
        limit = time.monotonic() + 60
        before = -1
        while before != len(runs):
            assert time.monotonic() < limit, f"{len(runs)} runs"
            before = len(runs)
            time.sleep(0.5)


def test_the_package_offers_the_clients() -> None:
    assert hastore.Producer is Producer
    with pytest.raises(AttributeError):
        _ = hastore.Nothing


def test_a_node_given_by_name_does_not_delay_the_constructor(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is looked up in the background; then bornHost is known as well."""
    goes_on = threading.Event()
    real = bootstrap._targets

    def slow(host: str, port: int, flags: int) -> bootstrap.Targets:
        if not flags:
            assert goes_on.wait(60)
            return real("127.0.0.1", port, flags)
        return real(host, port, flags)

    monkeypatch.setattr(bootstrap, "_targets", slow)
    port = node.address.rpartition(":")[2]
    with Producer([f"tcp://localhost:{port}"]) as producer:  # does not wait
        assert not goes_on.is_set()
        goes_on.set()
        wait_for(lambda: producer.send_sync("t", b"x", queue=0) and stored_hosts(node)[-1] != NO)
    assert stored_hosts(node)[-1] == "127.0.0.1:0"


NO = "0.0.0.0:0"


def stored_hosts(node: Node) -> list[str]:
    """Return the born hosts of a node's log, in its order."""
    log, at, found = bytes(node.backend.store.log), 0, []
    while at < len(log):
        record = decode_record(log, at)
        found.append(record.born_host.text)
        at += record.size
    return found
