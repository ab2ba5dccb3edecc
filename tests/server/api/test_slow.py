"""What a node logs of single requests: slow ones, and why others were refused; with bounds."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hastore.config.model import ApiConfig
from hastore.protocol.api import Position, Pull, Put, PutDone
from hastore.server.api.cold_reads import ColdReads
from hastore.server.api.pulls import PullHandler
from hastore.server.api.puts import PutHandler
from hastore.server.api.replies import Failures
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.security.conftest import Clock
from tests.server.api.kit import record

PEER: Any = SimpleNamespace(
    peer="10.0.0.7:4711", run=0, next_at=None, guard=None, ended=False, parked=0
)


class Puts:
    """A PutHandler that logs what takes longer than 500 ms."""

    def __init__(self, backend: FakeBackend) -> None:
        self.clock = Clock()  # type: ignore[no-untyped-call]
        self.replies: list[PutDone] = []
        self.handler = PutHandler(
            backend, ApiConfig(), self.clock, lambda _, reply: self.replies.append(reply),
            lambda _, why: None, Failures(self.clock), slow_ms=500,
        )  # fmt: skip

    def put(self, wait_ms: float, acks: int | str | None = 1) -> None:
        now_ms = self.clock.monotonic_ms()
        self.handler.admit_put(PEER, Put(1, acks, False, 3_000), record(), now_ms)
        self.clock.pass_ms(wait_ms)  # type: ignore[no-untyped-call]
        self.handler.append_admitted(self.clock.monotonic_ms())
        if self.handler.has_done:
            self.handler.answer_ended()


def test_slow_puts_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    puts = Puts(backend)
    puts.put(500)
    assert caplog.messages == []
    puts.put(501)
    (line,) = caplog.messages
    size = len(record())
    assert line == (
        f"api: slow put of 10.0.0.7:4711: 501 ms until MASTER_MEM, 1 messages, {size} bytes"
    )
    times = puts.handler.counts.put_times["MASTER_MEM"]
    assert (sum(times.counts), times.sum_ms) == (2, 1_001.0)
    assert puts.handler.counts.puts == 2 and len(puts.replies) == 2


def test_what_only_waits_for_confirmations_is_no_put_that_took_a_time() -> None:
    """It was timed from its own begin back to the last append: the sum of all times fell."""
    puts = Puts(FakeBackend())
    puts.put(500)
    times = puts.handler.counts.put_times["MASTER_MEM"]
    puts.clock.pass_ms(3_600_000)  # type: ignore[no-untyped-call]
    answers: list[PutDone] = []
    puts.handler.confirm_log(Put(2, 1), answers.append, puts.clock.monotonic_ms())
    assert [one.status for one in answers] == ["PUT_OK"]
    assert (sum(times.counts), times.sum_ms) == (1, 500.0)


def test_refused_and_unconfirmed_puts_are_logged_with_bounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    backend = FakeBackend(writable=False)
    puts = Puts(backend)
    for _ in range(50):
        puts.put(0)
    assert len(caplog.messages) == 3
    assert caplog.messages[0] == (
        "api: a put of 10.0.0.7:4711 was refused: SERVICE_NOT_AVAILABLE: this node is a slave"
    )
    assert puts.handler.counts.refusals.items() == [("SERVICE_NOT_AVAILABLE", 50)]
    caplog.clear()
    put: Any = SimpleNamespace(connection=PEER)
    puts.handler._note_unconfirmed(put, "FLUSH_SLAVE_TIMEOUT")
    assert caplog.messages == [
        "api: a put of 10.0.0.7:4711 is stored, but not confirmed: FLUSH_SLAVE_TIMEOUT"
    ]


def test_slow_pulls_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()  # type: ignore[no-untyped-call]
    handler = PullHandler(
        FakeBackend(), clock, lambda *_: None, lambda _: True, Failures(clock),
        ColdReads(lambda: None, raise_failure), slow_ms=500,
    )  # fmt: skip
    pull = Pull(1, "Orders", 3, Position(0))
    handler.note_time(PEER, pull, 500.0)
    assert caplog.messages == []
    handler.note_time(PEER, pull, 730.0)
    assert caplog.messages == ["api: slow pull of 10.0.0.7:4711: 730 ms for queue 3 of Orders"]
