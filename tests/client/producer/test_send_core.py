"""The producer's core without threads and sockets: interrupted anywhere, it loses nothing."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from hastore.client.arguments import SendOptions
from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import Arrival
from hastore.client.messages import SendResult
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.master_calls import POLL_MS, MasterCall
from hastore.client.producer.preparer import RecordEncoder
from hastore.client.producer.send_core import SendCore
from hastore.client.producer.transactions import TransactionOptions, poll_request
from hastore.client.producer.window import Entry, Window
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    FlushSlaveTimeout,
    HastoreError,
    MessageIllegalError,
    NotAuthenticatedError,
    NotStoredError,
    OutcomeUnknown,
)
from hastore.protocol import api
from hastore.record.codec import NO_HOST, decode_record
from tests.api_fakes import FakeBackend
from tests.client.interrupts import interrupt_everywhere

ADDRESS = "tcp://127.0.0.1:1"
_OK = api.Status.PUT_OK


class FakeTransport:
    """One connection to a node in memory, which keeps the rule of runs."""

    def __init__(self) -> None:
        self.backend = FakeBackend()
        self.arrivals: list[Arrival] = [Arrival(ADDRESS, None)]
        self.run = self.place = 0
        self.withheld = False  # the node stores, but does not answer

    @property
    def addresses(self) -> list[str]:
        return [ADDRESS]

    def is_up(self, address: str) -> bool:
        return True

    def open(self, addresses: Iterable[str]) -> None:
        pass

    def reopen(self, address: str) -> None:
        self.arrivals = [Arrival(ADDRESS, None)]
        self.run = self.place = 0

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        if isinstance(message, api.AskMap):
            reply: api.Reply = api.Map(message.rid, self.backend.master_map())
        else:
            assert isinstance(message, api.Put) and payload is not None
            reply = self.take(message, payload)
        if not self.withheld and getattr(message, "acks", None) != 0:
            self.arrivals.append(Arrival(ADDRESS, reply))
        return True

    def take(self, put: api.Put, payload: bytes) -> api.PutDone:
        in_place = (put.run, put.at) == (self.run, self.place)
        begins = put.run > self.run and put.at == 0
        if put.run and not in_place and not begins:
            return api.PutDone(put.rid, api.Status.BUSY, 65537)
        self.run, self.place = put.run, put.at + 1
        (results,) = self.backend.put_encoded([payload])
        return api.PutDone(
            put.rid, api.Status.PUT_OK, 65537, "SYNC_MEM(1)", [r.offset for r in results],
            [r.queue_id for r in results], [r.queue_offset for r in results],
        )  # fmt: skip

    def sent_bytes(self, address: str) -> int:
        return 0

    def acked_bytes(self, address: str) -> int:
        return 0

    def collect(self) -> list[Arrival]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def bodies(self) -> list[bytes]:
        log, at, found = bytes(self.backend.store.log), 0, []
        while at < len(log):
            record = decode_record(log, at)
            found.append(record.body)
            at += record.size
        return found


class Bench:
    """A core on a fake transport, with a clock of its own."""

    def __init__(
        self, acks: int | None = None, *, idempotent: bool = True, limit: int = 8,
        transport: FakeTransport | None = None, leave_ms: float | None = None,
    ) -> None:  # fmt: skip
        options = SendOptions(
            acks, False, 0.0, 1_000, limit, 5_000.0, idempotent, leave_ms=leave_ms
        )
        self.now = 1_000.0
        self.transport = transport or FakeTransport()
        self.window = Window(limit)
        fake: Any = self.transport
        self.core = SendCore(options, self.window, fake, ClusterView((ADDRESS,)))
        self.encoder = RecordEncoder("pid" if idempotent else None, NO_HOST)
        self.futures: list[SendFuture[SendResult]] = []
        self.called: list[object] = []

    def run_once(self) -> None:
        self.core.run_once(self.now)
        while self.core.ended:
            self.core.ended.popleft().notify()

    def send(
        self, body: bytes, *, may_move: bool = False, queue: int = 0, chosen: bool = False,
        key: str | None = None,
    ) -> None:  # fmt: skip
        future: SendFuture[SendResult] = SendFuture()
        with self.window.lock:
            assert self.window.has_room(1)
            seq = self.window.next_seq
            payload = self.encoder.encode("t", body, queue, [], seq, 0)
            expires = self.now + 5_000.0
            self.window.admit(
                Entry(seq, 1, "t", payload, future, False, self.now, expires, may_move, chosen, key)
            )
        self.futures.append(future)
        future.add_done_callback(self.called.append)

    def settle_all(self, rounds: int = 200) -> None:
        for _ in range(rounds):
            self.run_once()
            self.now += 20.0
            if self.window.has_settled(self.window.next_seq):
                return
        raise AssertionError("it was never settled")


def test_only_what_may_move_to_another_group_is_given_up_before_its_delivery_timeout() -> None:
    bench = Bench(leave_ms=1_000.0)
    bench.transport.arrivals = []
    bench.transport.withheld = True  # so no master is found
    for may_move in (False, True, False):
        bench.send(b"x", may_move=may_move)
    bench.now += 1_001.0
    bench.run_once()
    assert [future.done() for future in bench.futures] == [False, True, False]
    assert isinstance(bench.futures[1].exception(), NotStoredError)
    bench.transport.withheld = False
    bench.settle_all()
    assert [bench.futures[place].exception() for place in (0, 2)] == [None, None]


@pytest.mark.parametrize("acks", [None, 0])
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_run_interrupted_anywhere_loses_and_doubles_nothing(
    acks: int | None, idempotent: bool
) -> None:
    def make() -> Bench:
        bench = Bench(acks, idempotent=idempotent)
        for _ in range(3):
            bench.run_once()
        assert bench.core.master_found
        for number in range(3):
            bench.send(b"%d" % number)
        return bench

    def run(bench: Bench) -> None:
        bench.core.send_now(bench.now)
        bench.core.run_once(bench.now)

    cuts = 0
    for bench in interrupt_everywhere(make, run):
        cuts += 1
        waiters = [
            threading.Thread(target=future.exception, args=(60,)) for future in bench.futures[:1]
        ]
        for waiter in waiters:
            waiter.start()
        bench.settle_all()
        for waiter in waiters:
            waiter.join(60)
            assert not waiter.is_alive()
        assert sorted(map(id, bench.called)) == sorted(map(id, bench.futures))
        stored = bench.transport.bodies()
        failures = [future.exception(0) for future in bench.futures]
        if idempotent:
            assert failures == [None] * 3
            assert stored == [b"0", b"1", b"2"]
        else:  # a message that may have been sent is not sent again
            assert all(isinstance(failure, OutcomeUnknown | None) for failure in failures)
            assert stored == sorted(set(stored))
            for number, failure in enumerate(failures):
                assert failure is not None or b"%d" % number in stored or acks == 0
        if acks is None:
            assert all(
                future.exception(0) or future.result(0).offset is not None
                for future in bench.futures
            )
    assert cuts > 100


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_put_that_the_disk_failed_half_way_is_unknown_and_goes_again(idempotent: bool) -> None:
    bench = Bench(idempotent=idempotent)
    for _ in range(3):
        bench.run_once()
    take, failing = bench.transport.take, [api.Status.TIMEOUT]

    def fail_once(put: api.Put, payload: bytes) -> api.PutDone:
        if failing:
            bench.transport.place = -1  # the rest of the run is refused
            return api.PutDone(put.rid, failing.pop(), 0, reason="disk")
        return take(put, payload)

    bench.transport.take = fail_once  # type: ignore[method-assign]
    bench.send(b"0")
    bench.core.send_now(bench.now)
    bench.send(b"1")
    bench.settle_all()
    failures = [future.exception(0) for future in bench.futures]
    if idempotent:
        assert failures == [None, None]
        assert bench.transport.bodies() == [b"0", b"1"]
    else:
        assert isinstance(failures[0], OutcomeUnknown) and "TIMEOUT: disk" in str(failures[0])
        assert failures[1] is None
        assert bench.transport.bodies() == [b"1"]


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("failed", [api.Status.TIMEOUT, api.Status.SERVICE_NOT_AVAILABLE])
def test_what_a_disk_failed_within_a_frame_goes_again(idempotent: bool, failed: api.Status) -> None:
    """The rest of the frame is stored, or refused for good."""
    bench = Bench(idempotent=idempotent)
    for _ in range(3):
        bench.run_once()
    take, failing = bench.transport.take, [failed]

    def fail_once(put: api.Put, payload: bytes) -> api.PutDone:
        if not failing:
            return take(put, payload)
        bench.transport.place = -1  # the rest of the run is refused
        statuses = [failing.pop(), api.Status.MESSAGE_ILLEGAL]
        zeros = [0, 0]
        return api.PutDone(put.rid, api.Status.PUT_OK, 1, "", zeros, zeros, zeros, statuses,
                           reason="disk")  # fmt: skip

    bench.transport.take = fail_once  # type: ignore[method-assign]
    for body in (b"0", b"1"):
        bench.send(body)
    bench.core.send_now(bench.now)
    bench.send(b"2")
    bench.settle_all()
    first, second, third = [future.exception(0) for future in bench.futures]
    assert isinstance(second, MessageIllegalError) and third is None
    if failed is api.Status.TIMEOUT and not idempotent:
        assert isinstance(first, OutcomeUnknown)
        assert bench.transport.bodies() == [b"2"]
    else:
        assert first is None
        assert bench.transport.bodies() == [b"0", b"2"]


_FLUSH = api.Status.FLUSH_SLAVE_TIMEOUT


@pytest.mark.parametrize(
    ("statuses", "kind", "says"),
    [
        ((_FLUSH, api.Status.MESSAGE_ILLEGAL), MessageIllegalError, "1 of 2 refused"),
        ((_FLUSH, api.Status.TIMEOUT), OutcomeUnknown, "why"),
        ((api.Status.TIMEOUT, _OK, api.Status.MESSAGE_ILLEGAL), OutcomeUnknown, "why$"),
        ((_FLUSH, _OK), FlushSlaveTimeout, "why"),
    ],
)
def test_a_batch_is_not_told_as_stored_if_one_of_its_messages_may_not_be(
    statuses: tuple[api.Status, ...], kind: type[HastoreError], says: str
) -> None:
    bench = Bench(idempotent=False)  # else what is not confirmed is asked for again
    for _ in range(3):
        bench.run_once()
    count = len(statuses)

    def answer(put: api.Put, payload: bytes) -> api.PutDone:
        places = list(range(1, count + 1))
        return api.PutDone(put.rid, _OK, 1, "", places, places, places, list(statuses),
                           reason="why")  # fmt: skip

    bench.transport.take = answer  # type: ignore[method-assign]
    future: SendFuture[list[SendResult]] = SendFuture()
    with bench.window.lock:
        assert bench.window.has_room(count)
        payload = b"".join(bench.encoder.encode("t", b"x", 0, [], n, 0) for n in range(count))
        bench.window.admit(
            Entry(0, count, "t", payload, future, True, bench.now, bench.now + 5_000.0)
        )
    bench.settle_all()
    with pytest.raises(kind, match=says):
        future.result(0)


class TopicOfOneQueue(FakeTransport):
    """A node whose topic has one queue; a client that is open longer does not know that."""

    reason = "there is no queue 1: topic t has 1 queues"
    answers_whole = False

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[str, int] = {}  # as the client learns them

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        if not isinstance(message, api.AskMap):
            return super().send(address, message, payload)
        map_ = msgspec.structs.replace(self.backend.master_map(), queues=self.queues)
        self.arrivals.append(Arrival(ADDRESS, api.Map(message.rid, map_)))
        return True

    def take(self, put: api.Put, payload: bytes) -> api.PutDone:
        at, statuses = 0, []
        while at < len(payload):
            record = decode_record(payload, at)
            statuses.append(_OK if record.queue_id == 0 else api.Status.MESSAGE_ILLEGAL)
            if record.queue_id == 0 and not self.answers_whole:
                self.backend.put_encoded([payload[at : at + record.size]])
            at += record.size
        self.queues = {"t": 1}
        if set(statuses) == {_OK}:
            return super().take(put, payload)
        self.run, self.place = put.run, put.at + 1
        if self.answers_whole:
            return api.PutDone(put.rid, api.Status.MESSAGE_ILLEGAL, 65537, reason=self.reason)
        zeros = [0] * len(statuses)
        return api.PutDone(put.rid, api.Status.PUT_OK, 65537, "", zeros, zeros, zeros, statuses,
                           reason=self.reason)  # fmt: skip


@pytest.mark.parametrize("answers_whole", [False, True])
@pytest.mark.parametrize("key", [None, "k3"])
def test_a_message_goes_to_another_queue_if_the_client_has_chosen_one_that_is_not_there(
    key: str | None, answers_whole: bool
) -> None:
    """A topic that was created since has fewer queues than the default. Once; a caller's own queue
    and what is refused for another reason fail."""
    transport = TopicOfOneQueue()
    transport.answers_whole = answers_whole
    bench = Bench(transport=transport)
    bench.run_once()
    bench.run_once()
    assert zlib.crc32(b"k3") % bench.core.cluster.queues_of("t") != 0, "another queue before"
    bench.send(b"placed", queue=1, chosen=True, key=key)
    bench.settle_all()
    bench.send(b"the caller's", queue=1)
    bench.settle_all()
    bench.send(b"next", chosen=True)
    bench.settle_all()
    first, second, third = bench.futures
    assert first.result(0).status == third.result(0).status == "PUT_OK"
    assert isinstance(second.exception(0), MessageIllegalError)
    assert transport.bodies() == [b"placed", b"next"]
    transport.queues = {"t": 8}
    bench.run_once()
    transport.take = lambda put, _payload: api.PutDone(  # type: ignore[method-assign]
        put.rid, api.Status.MESSAGE_ILLEGAL, 65537, reason="too large"
    )
    bench.send(b"bad", chosen=True)
    bench.settle_all()
    with pytest.raises(MessageIllegalError, match="too large"):
        bench.futures[-1].result(0)


@pytest.mark.parametrize("sent", [1, 2, 3])
@pytest.mark.parametrize("learns_late", [False, True])
def test_messages_that_go_to_another_queue_stay_in_order(sent: int, learns_late: bool) -> None:
    """`sent` of three are in flight when the client learns that the topic has one queue: by the
    refusal of the first one, or before. A later message goes to the right queue at once."""
    transport = TopicOfOneQueue()
    bench = Bench(transport=transport)
    bench.run_once()
    bench.run_once()
    for number in range(3):
        bench.send(b"%d" % number, queue=1, chosen=True)
        if number < sent:
            bench.core.send_now(bench.now)
    kept = transport.arrivals[learns_late:]
    del transport.arrivals[learns_late:]
    if not learns_late:
        transport.send(ADDRESS, api.AskMap(1_000))
    bench.run_once()
    bench.run_once()
    assert bench.core.cluster.queues_of("t") == 1
    bench.send(b"3", chosen=True)
    bench.run_once()
    transport.arrivals[:0] = kept
    bench.settle_all()
    assert [future.exception(0) for future in bench.futures] == [None] * 4
    assert transport.bodies() == [b"0", b"1", b"2", b"3"]


def test_a_run_that_sends_to_other_queues_interrupted_anywhere_stays_in_order() -> None:
    def make() -> Bench:
        bench = Bench(transport=TopicOfOneQueue())
        bench.run_once()
        bench.run_once()
        for number in range(3):
            bench.send(b"%d" % number, queue=1, chosen=True)
            bench.core.send_now(bench.now)
        return bench

    def run(bench: Bench) -> None:
        for _ in range(4):
            bench.core.run_once(bench.now)

    for bench in interrupt_everywhere(make, run):
        bench.settle_all()
        assert [future.exception(0) for future in bench.futures] == [None] * 3
        assert bench.transport.bodies() == [b"0", b"1", b"2"]


def test_the_queues_of_a_topic_are_asked_for_again_if_the_question_is_lost() -> None:
    transport = TopicOfOneQueue()
    bench = Bench(transport=transport)
    bench.run_once()
    bench.run_once()
    bench.send(b"0", queue=1, chosen=True)
    bench.core.send_now(bench.now)
    answers, send = transport.arrivals, transport.send
    transport.send = lambda *_: False  # type: ignore[method-assign]
    bench.run_once()
    transport.send = send  # type: ignore[method-assign]
    assert answers and not bench.futures[0].done()
    assert 0.0 < bench.core.sleep_s(bench.now) <= 0.1
    bench.settle_all()
    assert bench.futures[0].result(0).status == "PUT_OK"


def test_a_send_interrupted_anywhere_is_sent_or_not_and_no_number_is_used_twice() -> None:
    def make() -> Bench:
        bench = Bench(limit=2)
        for _ in range(3):
            bench.run_once()
        return bench

    for bench in interrupt_everywhere(make, lambda bench: bench.send(b"cut")):
        before = len(bench.window.incoming)
        bench.send(b"next")
        bench.settle_all()
        bench.send(b"last")  # the window has room for two again
        bench.send(b"one more")
        bench.settle_all()
        assert all(future.done() for future in bench.futures)
        stored = bench.transport.bodies()
        assert stored == [b"cut"] * before + [b"next", b"last", b"one more"]


def test_a_send_without_an_answer_is_never_known_not_to_be_stored() -> None:
    """A run that was interrupted after sending does not forget that."""

    def make() -> Bench:
        bench = Bench()
        for _ in range(3):
            bench.run_once()
        bench.transport.withheld = True
        bench.send(b"0")
        return bench

    for bench in interrupt_everywhere(make, lambda bench: bench.core.send_now(bench.now)):
        sent = bool(bench.transport.bodies())
        bench.transport.send = lambda *_: False  # type: ignore[method-assign]
        bench.run_once()
        bench.now += 6_000.0
        bench.run_once()
        failure = bench.futures[0].exception(0)
        assert isinstance(failure, HastoreError)
        assert isinstance(failure, OutcomeUnknown) or not sent


def test_what_is_under_way_when_no_node_accepts_the_client_any_more_is_unknown() -> None:
    """The master was lost before, by a refusal: so the end of its connection is not the master's.

    As it is superseded, it refuses a put, while an earlier one waits for a slave.
    """
    bench = Bench()
    for _ in range(3):
        bench.run_once()
    bench.transport.withheld = True
    for body in (b"0", b"1"):
        bench.send(body)
        bench.run_once()
    first, second = bench.core._frames
    bench.transport.arrivals = [
        Arrival(ADDRESS, api.PutDone(second, api.Status.SERVICE_NOT_AVAILABLE, 0)),
        Arrival(ADDRESS, None, up=False, refused="there is no identity app"),
    ]
    bench.run_once()
    waiting, refused = [future.exception(0) for future in bench.futures]
    assert isinstance(waiting, OutcomeUnknown) and "no identity app" in str(waiting)
    assert isinstance(refused, NotAuthenticatedError)


def test_ending_interrupted_anywhere_can_be_repeated() -> None:
    def make() -> Bench:
        bench = Bench()
        for _ in range(3):
            bench.run_once()
        bench.transport.withheld = True
        for number in range(3):
            bench.send(b"%d" % number)
        bench.run_once()
        return bench

    for bench in interrupt_everywhere(make, lambda bench: bench.core.end("closed")):
        bench.core.end("closed")
        assert all(isinstance(future.exception(0), OutcomeUnknown) for future in bench.futures)
        with pytest.raises(HastoreError, match="closed"):
            bench.send(b"3")


def test_a_frame_without_an_answer_is_dropped_when_all_of_it_has_expired() -> None:
    bench = Bench()
    for _ in range(3):
        bench.run_once()
    bench.transport.withheld = True
    bench.send(b"0")
    bench.run_once()
    sent_ms = bench.now
    bench.now += 2_000.0
    (entry,) = bench.window.entries()
    entry.expires_ms = bench.now
    runs = 0
    while bench.core.under_way():
        bench.run_once()
        runs += 1
        sleep_s = bench.core.sleep_s(bench.now)
        assert bench.futures[0].done() and bench.core.is_idle()
        bench.now += max(0.001, sleep_s) * 1000.0
        assert bench.now - sent_ms < 5_000.0
    assert runs < 50  # it sleeps in between


def test_each_message_ends_in_time_though_an_earlier_one_has_more() -> None:
    """Its thread has waited for room for longer than the thread of the one before it."""
    bench = Bench()
    for _ in range(3):
        bench.run_once()
    bench.transport.withheld = True
    for body in (b"0", b"1", b"2"):
        bench.send(body)
    first, second, third = bench.window.entries()
    second.expires_ms, third.expires_ms = first.expires_ms - 3_000.0, first.expires_ms - 1_000.0
    for entry, ended in ((second, [1]), (third, [1, 2]), (first, [0, 1, 2])):
        bench.run_once()
        assert not bench.futures[entry.first_seq].done()
        while bench.now < entry.expires_ms:  # as a driver does that nothing else wakes
            bench.now += max(0.001, bench.core.sleep_s(bench.now)) * 1000.0
            bench.run_once()
        assert bench.now < entry.expires_ms + 1.0
        assert [place for place in range(3) if bench.futures[place].done()] == ended
    assert bench.core.is_idle()


def test_what_is_not_acknowledged_is_counted_by_topic() -> None:
    bench = Bench()
    assert bench.core.unacknowledged() == ""
    bench.send(b"0")
    bench.send(b"1")
    assert bench.core.unacknowledged() == "messages not acknowledged: 2 to 't'"
    bench.settle_all()
    assert bench.core.unacknowledged() == ""


class SilentForPolls(FakeTransport):
    """A machine that has lost its power: it answers nothing, and ends no connection."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = self.reopened = 0

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        if isinstance(message, api.AskChecks):
            self.polls += 1
            return True
        return self.polls == 1 or super().send(address, message, payload)

    def reopen(self, address: str) -> None:
        super().reopen(address)
        self.reopened += 1
        self.polls = 10  # it is back


def test_a_master_that_is_gone_without_a_word_is_noticed_by_a_poll_alone() -> None:
    """A producer that only decides transactions has no put that would be late."""
    transport = SilentForPolls()
    bench = Bench(transport=transport)
    bench.run_once()
    bench.run_once()
    poll: SendFuture[Any] = SendFuture()
    options = TransactionOptions("g", None, None, False, 3_000)
    bench.core.calls.admit(MasterCall(poll_request(options), poll, float("inf"), True))
    bench.run_once()
    assert transport.polls == 1
    began = bench.now
    while transport.polls < 11 and bench.now < began + 60_000.0:
        sleep_s = bench.core.sleep_s(bench.now)
        assert sleep_s >= 0.0, "nothing would wake it"
        bench.now += sleep_s * 1_000.0 + 1.0
        bench.run_once()
        assert not transport.reopened or bench.now > began + POLL_MS
    assert (transport.reopened, transport.polls) == (1, 11) and not poll.done()


class LateRefusals(FakeTransport):
    """The node refuses every put, after a delay."""

    def __init__(self, delay_ms: float) -> None:
        super().__init__()
        self.delay_ms = delay_ms
        self.now = 0.0
        self.tries_ms: list[float] = []
        self._late: list[tuple[float, Arrival]] = []

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        if not isinstance(message, api.Put):
            return super().send(address, message, payload)
        self.tries_ms.append(self.now)
        reply = api.PutDone(
            message.rid, api.Status.SLAVE_NOT_AVAILABLE, 65537, reason="nobody in sync"
        )
        self._late.append((self.now + self.delay_ms, Arrival(ADDRESS, reply)))
        return True

    def collect(self) -> list[Arrival]:
        arrived = [arrival for due, arrival in self._late if due <= self.now]
        self._late = [each for each in self._late if each[0] > self.now]
        return super().collect() + arrived


@pytest.mark.parametrize("delay_ms", range(1, 50))
def test_what_was_only_ever_refused_ends_as_refused(delay_ms: int) -> None:
    """However slow the answers are, no attempt is in flight at the delivery timeout."""
    bench = Bench(transport=LateRefusals(delay_ms))
    assert isinstance(bench.transport, LateRefusals)
    bench.run_once()
    bench.send(b"1")
    expires = bench.now + 5_000.0
    while not bench.futures[0].done():
        bench.transport.now = bench.now
        bench.run_once()
        bench.now += 1.0
    assert expires <= bench.now <= expires + 2.0
    assert len(bench.transport.tries_ms) > 10
    assert max(bench.transport.tries_ms) <= expires - 50.0
    failure = bench.futures[0].exception(0)
    assert type(failure) is NotStoredError and "nobody in sync" in str(failure)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_a_master_that_was_replaced_has_stored_is_not_known_to_be_stored(
    replaced: bool, answers: bool
) -> None:
    """It had not confirmed it as asked: the slave that was promoted may lack it."""
    bench = Bench()
    bench.run_once()
    bench.run_once()
    backend, statuses = bench.transport.backend, [api.Status.FLUSH_SLAVE_TIMEOUT]

    def take(put: api.Put, payload: bytes) -> api.PutDone:
        if statuses:
            return api.PutDone(put.rid, statuses.pop(), 65537, "", [131], [0], [7])
        return api.PutDone(
            put.rid, api.Status.SLAVE_NOT_AVAILABLE, backend.epoch(), reason="0 of 1 in sync"
        )

    bench.transport.take = take  # type: ignore[method-assign]
    bench.send(b"1")
    bench.run_once()
    bench.run_once()
    assert not statuses and not bench.futures[0].done()
    bench.transport.withheld = not answers
    if replaced:
        backend.entries = [*backend.entries, (131074, 0)]
        bench.transport.arrivals.append(Arrival(ADDRESS, api.Map(0, backend.master_map())))
        bench.run_once()
    bench.settle_all(300)  # longer than the delivery timeout
    failure = bench.futures[0].exception(0)
    if replaced:
        assert type(failure) is OutcomeUnknown and "master of epoch 65537 had" in str(failure)
        assert ("SLAVE_NOT_AVAILABLE: 0 of 1 in sync" in str(failure)) is answers
    else:
        assert isinstance(failure, FlushSlaveTimeout) and failure.result.offset == 131


class SlowLink(FakeTransport):
    """The link carries `rate` bytes per ms, until `stops_ms`; the node answers what has come."""

    def __init__(self, rate: float, stops_ms: float = float("inf")) -> None:
        super().__init__()
        self.rate, self.stops_ms = rate, stops_ms
        self.now = self.sent = self.acked = 0.0
        self.reopened_ms: list[float] = []
        self.silent = False
        self._leaving: list[tuple[float, api.Request, bytes | None]] = []

    def advance(self, now: float) -> None:
        took = self.rate * (min(now, self.stops_ms) - min(self.now, self.stops_ms))
        self.now, self.acked = now, min(self.sent, self.acked + took)
        while self._leaving and self._leaving[0][0] <= self.acked:
            _, message, payload = self._leaving.pop(0)
            self.withheld = self.silent and not isinstance(message, api.AskMap)
            if isinstance(message, api.EndTransaction):
                done = api.PutDone(message.rid, api.Status.PUT_OK, 65537)
                self.arrivals.append(Arrival(ADDRESS, done))
            else:
                super().send(ADDRESS, message, payload)

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        self.sent += 30 + len(payload or b"")
        self._leaving.append((self.sent, message, payload))
        return True

    def reopen(self, address: str) -> None:
        super().reopen(address)
        self._leaving.clear()
        self.sent = self.acked = 0.0
        self.reopened_ms.append(self.now)

    def sent_bytes(self, address: str) -> int:
        return int(self.sent)

    def acked_bytes(self, address: str) -> int:
        return int(self.acked)


def over_slow_link(transport: SlowLink, sizes: Iterable[int]) -> Bench:
    """Return a bench that has found its master and has sent messages that have 10 minutes."""
    bench = Bench(transport=transport)
    transport.advance(bench.now)
    for _ in range(3):
        drive(bench, 100.0)
    for size in sizes:
        bench.send(bytes(size))
    for entry in bench.window.entries():
        entry.expires_ms = bench.now + 600_000.0
    return bench


def drive(bench: Bench, for_ms: float, futures: Iterable[SendFuture[Any]] = ()) -> None:
    """Run as a driver that something wakes each 10 ms, until the futures are done, if any."""
    assert isinstance(bench.transport, SlowLink)
    end, waiting = bench.now + for_ms, list(futures)
    while bench.now < end and not (waiting and all(each.done() for each in waiting)):
        bench.now += 10.0
        bench.transport.advance(bench.now)
        bench.run_once()


def test_what_leaves_over_a_slow_link_is_sent_once_however_long_it_takes() -> None:
    """The first takes 20 s; the two behind it, and the end of a transaction, wait for it."""
    transport = SlowLink(rate=1.0)
    bench = over_slow_link(transport, (20_000, 8_000, 6_000))
    drive(bench, 10.0)
    ended: SendFuture[Any] = SendFuture()

    def end(rid: int) -> api.Request:
        return api.EndTransaction(rid, True, 0, 0, "group", "unique")

    bench.core.calls.admit(MasterCall(end, ended, bench.now + 600_000.0))
    drive(bench, 120_000.0, [*bench.futures, ended])
    assert transport.reopened_ms == []
    assert [future.exception(0) for future in (*bench.futures, ended)] == [None] * 4
    assert [len(body) for body in transport.bodies()] == [20_000, 8_000, 6_000]


@pytest.mark.parametrize("taken_ms", [0.0, 1_000.0, 7_000.0])
def test_a_slow_link_that_carries_nothing_any_more_is_replaced(taken_ms: float) -> None:
    bench = over_slow_link(SlowLink(rate=1.0), (20_000, 8_000))
    transport = bench.transport
    assert isinstance(transport, SlowLink)
    transport.stops_ms = bench.now + taken_ms
    drive(bench, taken_ms + 4_500.0)
    assert len(transport.reopened_ms) == 1
    assert 3_600.0 < transport.reopened_ms[0] - transport.stops_ms <= 4_400.0


@pytest.mark.parametrize("rate", [1e9, 1.0])
def test_bytes_of_later_requests_do_not_excuse_a_node_that_is_silent(rate: float) -> None:
    """As one that is stopped: its system takes bytes, as those that ask for the master."""
    bench = over_slow_link(SlowLink(rate), (200,))
    transport = bench.transport
    assert isinstance(transport, SlowLink)
    transport.silent, began = True, bench.now
    for _ in range(6):
        drive(bench, 600.0)
        bench.send(bytes(1_000))  # a frame of its own, which is sent at once
    drive(bench, 900.0)
    assert len(transport.reopened_ms) == 1
    assert 3_700.0 <= transport.reopened_ms[0] - began < 4_350.0


def test_an_interrupted_wake_up_does_not_prevent_later_ones() -> None:
    for transport in interrupt_everywhere(
        lambda: SocketTransport(SYSTEM_CLOCK), lambda transport: transport.wake()
    ):
        transport.wake()
        began = time.monotonic()
        transport.sleep(120.0)
        assert time.monotonic() - began < 60.0
        transport.close()

    def make() -> SocketTransport:
        transport = SocketTransport(SYSTEM_CLOCK)
        transport.wake()
        return transport

    for transport in interrupt_everywhere(make, lambda transport: transport.sleep(120.0)):
        transport.wake()
        began = time.monotonic()
        transport.sleep(120.0)
        assert time.monotonic() - began < 60.0
        transport.close()
