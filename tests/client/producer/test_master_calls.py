"""The ends of transactions and the questions for checks, against a transport without sockets."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest

from hastore.client.connections.transport import Arrival
from hastore.client.producer.futures import SendFuture
from hastore.client.producer.master_calls import POLL_MS, MasterCall, MasterCalls
from hastore.errors import (
    ClientError,
    ForbiddenError,
    NotAuthenticatedError,
    NotStoredError,
    OutcomeUnknown,
    TransactionError,
)
from hastore.protocol import api
from hastore.protocol.api import Status

A, B = "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"


class Bench:
    """A producer's calls, and a node that answers what the test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []
        self.takes = True
        self.ended: deque[Any] = deque()
        transport: Any = self
        self.calls = MasterCalls(transport, itertools.count(1), self.ended)

    def sent_bytes(self, address: str) -> int:
        return 0

    def send(self, address: str, message: Any) -> bool:
        if self.takes:
            api.encode(message)
            self.sent.append((address, message))
        return self.takes

    def admit(self, expires_ms: float = 1_000.0, *, is_poll: bool = False) -> SendFuture[Any]:
        future: SendFuture[Any] = SendFuture()

        def make(rid: int) -> api.Request:
            if is_poll:
                return api.AskChecks(rid, "g")
            return api.EndTransaction(rid, True, 1, 2, "g", "u")

        expires_ms = float("inf") if is_poll else expires_ms
        self.calls.admit(MasterCall(make, future, expires_ms, is_poll))
        return future

    def answer(self, now: float, status: Status, **more: Any) -> bool:
        """Answer the last request."""
        address, request = self.sent[-1]
        reply = api.PutDone(request.rid, status, 5, **more)
        return self.calls.on_reply(Arrival(address, reply), now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_call_is_repeated_until_it_has_an_outcome(bench: Bench) -> None:
    future = bench.admit()
    bench.calls.step(0.0, None)
    assert not bench.sent and len(bench.calls) == 1 and bench.calls.ends == 1
    bench.calls.step(1.0, A)
    assert bench.sent[-1][0] == A
    assert bench.answer(2.0, Status.SERVICE_NOT_AVAILABLE), "another node may be the master"
    bench.calls.step(3.0, A)
    assert len(bench.sent) == 1, "after a pause"
    assert not bench.answer(3.0, Status.PUT_OK), "an answer comes once"
    now = 50.0
    for status in (Status.BUSY, Status.FLUSH_SLAVE_TIMEOUT, Status.TIMEOUT):
        bench.calls.step(now, B)
        assert not bench.answer(now, status)
        now += 250.0
    bench.calls.step(now, B)
    assert not bench.answer(now, Status.PUT_OK, offsets=[7])
    assert future.result(0).offsets == [7] and len(bench.calls) == 0


def test_what_was_in_flight_goes_to_the_new_master(bench: Bench) -> None:
    future = bench.admit()
    bench.calls.step(0.0, A)
    assert bench.calls.sent_ms() == 0.0
    bench.calls.roll_back()
    assert bench.calls.sent_ms() is None
    bench.calls.step(1.0, B)
    assert [address for address, _ in bench.sent] == [A, B]
    (_, old), (_, new) = bench.sent
    late = api.PutDone(old.rid, Status.MESSAGE_ILLEGAL, 0)
    assert not bench.calls.on_reply(Arrival(A, late), 2.0) and not future.done()
    bench.calls.on_reply(Arrival(A, api.PutDone(new.rid, Status.PUT_OK, 1)), 2.0)
    assert not future.done(), "not from the node that was asked"
    bench.answer(3.0, Status.PUT_OK)
    assert future.done()


@pytest.mark.parametrize(
    ("status", "failure"),
    [(Status.MESSAGE_ILLEGAL, TransactionError), (Status.FORBIDDEN, ForbiddenError)],
)
def test_final_answers_are_not_repeated(bench: Bench, status: Status, failure: Any) -> None:
    future = bench.admit()
    bench.calls.step(0.0, A)
    bench.answer(1.0, status, reason="why")
    with pytest.raises(failure, match="why"):
        future.result(0)
    bench.calls.step(500.0, A)
    assert len(bench.sent) == 1


@pytest.mark.parametrize("how", ["refused", "failed", "nobody"])
def test_a_refusal_after_an_attempt_without_an_answer_is_no_certainty(
    bench: Bench, how: str
) -> None:
    """The first attempt may have ended the transaction; rights and identities change meanwhile."""
    future = bench.admit()
    bench.calls.step(0.0, A)
    bench.calls.roll_back()
    if how == "nobody":
        bench.calls.refuse("no such identity")
    else:
        bench.calls.step(1.0, B)
        if how == "refused":
            bench.answer(2.0, Status.FORBIDDEN, reason="no such identity")
        else:
            failed = api.Failed(bench.sent[-1][1].rid, "FORBIDDEN", "no such identity")
            bench.calls.on_reply(Arrival(B, failed), 2.0)
    with pytest.raises(OutcomeUnknown, match="no such identity"):
        future.result(0)


def test_a_poll_that_was_sent_before_ends_nothing(bench: Bench) -> None:
    polls = [bench.admit(is_poll=True), bench.admit(is_poll=True)]
    bench.calls.step(0.0, A)
    bench.calls.roll_back()
    bench.calls.step(1.0, B)
    failed = api.Failed(bench.sent[-1][1].rid, "FORBIDDEN", "no right")
    bench.calls.on_reply(Arrival(B, failed), 2.0)
    bench.calls.refuse("no such identity")
    assert [type(poll.exception(0)) for poll in polls] == [NotAuthenticatedError, ForbiddenError]


def test_a_client_that_nobody_accepts_any_more_does_not_know_what_is_under_way(
    bench: Bench,
) -> None:
    future = bench.admit()
    bench.calls.step(0.0, A)
    bench.calls.refuse("no such identity")
    with pytest.raises(OutcomeUnknown, match="no such identity"):
        future.result(0)


@pytest.mark.parametrize("where", ["made", "encoded"])
def test_a_request_that_cannot_be_made_harms_no_other(bench: Bench, where: str) -> None:
    """Its error ended the thread of the producer, and all of its messages."""
    odd: SendFuture[Any] = SendFuture()

    def make(rid: int) -> api.Request:
        if where == "made":
            raise ValueError("no request")
        return api.EndTransaction(rid, True, 1, 2, "g", "odd\udcff")

    bench.calls.admit(MasterCall(make, odd, 1_000.0))
    good = bench.admit()
    bench.calls.step(0.0, A)
    with pytest.raises(ClientError, match="cannot be sent"):
        odd.result(0)
    bench.answer(1.0, Status.PUT_OK)
    assert good.result(0).status is Status.PUT_OK and len(bench.calls) == 0
    assert bench.calls.sent_ms() is None


@pytest.mark.parametrize("case", ["never sent", "refused", "in flight", "not confirmed"])
def test_a_call_whose_time_is_over_says_what_is_known(bench: Bench, case: str) -> None:
    future = bench.admit(1_000.0)
    if case != "never sent":
        bench.calls.step(0.0, A)
    if case == "refused":
        bench.answer(1.0, Status.SLAVE_NOT_AVAILABLE, reason="no slave")
    if case == "not confirmed":
        bench.answer(1.0, Status.FLUSH_SLAVE_TIMEOUT)
    bench.calls.step(980.0, A if case == "refused" else None)
    assert len(bench.sent) == (case != "never sent"), "no last attempt so late"
    bench.calls.step(1_000.0, A)
    known = case in ("never sent", "refused")
    with pytest.raises(NotStoredError if known else OutcomeUnknown):
        future.result(0)


def test_a_poll_has_no_time_limit_and_ends_with_the_producer(bench: Bench) -> None:
    poll = bench.admit(is_poll=True)
    bench.calls.step(0.0, A)
    bench.calls.step(1e9, A)
    assert len(bench.sent) == 1 and bench.calls.ends == 0
    assert bench.calls.sent_ms() == POLL_MS, "a node may keep it for so long"
    failed = api.Failed(bench.sent[-1][1].rid, "SERVICE_NOT_AVAILABLE", "a slave")
    assert bench.calls.on_reply(Arrival(A, failed), 1e9)
    bench.calls.step(1e9 + 300.0, B)
    reply = api.Checks(bench.sent[-1][1].rid, [(1, 2, 3)])
    bench.calls.on_reply(Arrival(B, reply, b"records"), 1e9)
    assert poll.result(0) == (reply, b"records")
    other = bench.admit(is_poll=True)
    bench.calls.step(1e9 + 600.0, B)
    bench.calls.stop_polls()
    assert bench.calls.due_ms(1e9 + 600.0, B) == 0.0 and not bench.calls.takes_polls
    bench.calls.step(1e9 + 601.0, B)
    with pytest.raises(ClientError, match="closed"):
        other.result(0)
    with pytest.raises(ClientError, match="closed"):
        bench.admit(is_poll=True)
    bench.admit()


def test_the_end_of_the_producer_ends_all(bench: Bench) -> None:
    sent = bench.admit()
    bench.calls.step(0.0, A)
    waiting, poll = bench.admit(), bench.admit(is_poll=True)
    bench.calls.end("it was closed")
    for future, failure in ((sent, OutcomeUnknown), (waiting, NotStoredError), (poll, ClientError)):
        with pytest.raises(failure, match="closed"):
            future.result(0)
    with pytest.raises(ClientError, match="closed"):
        bench.admit()


def test_a_client_that_nobody_accepts_learns_why(bench: Bench) -> None:
    future = bench.admit()
    bench.calls.refuse("no such identity")
    with pytest.raises(NotAuthenticatedError, match="no such identity"):
        future.result(0)
    bench.calls.step(0.0, A)
    assert not bench.sent and len(bench.calls) == 0


def test_a_connection_that_takes_nothing_is_tried_again(bench: Bench) -> None:
    bench.admit()
    bench.takes = False
    bench.calls.step(0.0, A)
    bench.takes = True
    bench.calls.step(1.0, A)
    assert not bench.sent and 1.0 < bench.calls.due_ms(1.0, A) <= 11.0
    bench.calls.step(11.0, A)
    assert len(bench.sent) == 1
