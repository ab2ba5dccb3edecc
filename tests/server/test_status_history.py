"""The hour of figures, the changes of role and the groups' lag that the status page shows."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from hastore import Consumer, Producer
from hastore.client.consumer.positions_client import Positions
from hastore.clock import SYSTEM_CLOCK
from hastore.server import status_history
from hastore.server.node import Node
from hastore.server.status_history import (
    CHANGES,
    POINTS,
    STEP_MS,
    GroupLags,
    Lag,
    Measured,
    Recent,
    StatusHistory,
    measured,
)
from hastore.service import raise_failure
from tests.ha.nodes import wait_for
from tests.server.kit import config_of, running
from tests.server.test_overview import MASTER, OF_SLAVE, SLAVE

NOTHING = Measured()


def look(recent: Recent, second: int, counted: Measured = NOTHING, **changes: Any) -> None:
    status = MASTER | changes
    recent.look(second * 1_000.0, 1_000_000 + second * 1_000, status, lambda: counted)


def test_a_point_has_averages_of_what_flows_and_the_greatest_of_what_waits() -> None:
    recent = Recent()
    look(recent, 0, Measured(0, 0, 0.0), max_offset=1_000, slaves=[], waiting_puts=0)
    look(recent, 5, slaves=[SLAVE | {"lag_bytes": 70}, SLAVE | {"lag_bytes": None}], waiting_puts=9)
    assert not recent.points
    look(recent, 10, Measured(500, 50, 100.0), max_offset=21_000, slaves=[], waiting_puts=1)
    (point,) = recent.points
    assert point == (1_010_000, 2_000.0, 50.0, 2.0, 70, 9)
    look(recent, 20, Measured(400, 50, 100.0), max_offset=20_000, slaves=[], waiting_puts=0)
    cut, deleted = 0.0, 0.0  # neither is a negative rate
    assert recent.points[1] == (1_020_000, cut, deleted, None, None, 0)


def test_what_is_not_counted_is_not_known() -> None:
    recent = Recent()
    for second in (0, 10):
        look(recent, second)
    assert recent.points[0].messages_per_s is None and recent.points[0].wait_ms is None


def test_points_and_changes_are_bounded() -> None:
    recent = Recent()
    step = int(STEP_MS / 1_000)
    for number in range(POINTS + 20):
        look(recent, number * step, epoch=number)
    assert len(recent.points) == POINTS and len(recent.changes) == CHANGES
    assert recent.points[-1].wall_ms == 1_000_000 + (POINTS + 19) * step * 1_000


def test_changes_of_role_are_noted_once_with_their_reason() -> None:
    recent = Recent()
    for second, status in enumerate((MASTER, MASTER, OF_SLAVE, OF_SLAVE)):
        recent.look(second * 1_000.0, second, status, Measured)
    first, second = recent.changes
    assert (first["role"], first["takes_default"], first["reason"]) == ("SYNC_MASTER", True, None)
    assert (second["role"], second["wall_ms"], second["master"]) == ("SLAVE", 2, 1)
    assert second["reason"] == OF_SLAVE["reason"]


@pytest.fixture
def node(tmp_path: pathlib.Path) -> Iterator[Node]:
    with running(Node(config_of(tmp_path), lambda: None)) as made:
        yield made


def consume(node: Node, group: str, topic: str, count: int) -> None:
    with Consumer(topic, [node.api.endpoint], group=group) as consumer:
        left = count
        while left:
            left -= len(consumer.poll(left, timeout_s=60))
        consumer.commit()


def no_pause(_seconds: float) -> bool:
    return False


def test_the_lag_of_groups_is_that_of_what_they_have_committed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    lags = GroupLags(node.backend, SYSTEM_CLOCK)
    assert lags.read(no_pause) == ([], 0)
    with Producer([node.api.endpoint]) as producer:
        for number in range(10):
            producer.send("orders", b"x", queue=number % 2).result(60)
        consume(node, "billing", "orders", 10)
        for _ in range(3):
            producer.send("orders", b"x", queue=0).result(60)
    expected = [Lag("billing", "orders", 2, 3)], 0
    wait_for(lambda: lags.read(no_pause) == expected, "the replay of all messages")
    with Positions([node.api.endpoint]) as positions:
        positions.commit("billing", "gone", {0: 5})
    assert lags.read(no_pause) == expected, "there is no such queue"
    # As if retention had removed all but the last two messages of queue 0, and queue 1 wholly.
    ends = {0: (6, 8), 1: (5, 5)}

    def readable_range(topic: str, queue: int, _limit: int) -> tuple[int, int] | None:
        return ends.get(queue) if topic == "orders" else None

    monkeypatch.setattr(node.store.reader, "readable_range", readable_range)
    assert lags.read(no_pause) == ([Lag("billing", "orders", 2, 2)], 0)


def history_of(node: Node) -> StatusHistory:
    return StatusHistory(node.backend, SYSTEM_CLOCK, measure=Measured, on_failure=raise_failure)


def test_messages_are_counted_unless_there_are_many_topics(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Producer([node.api.endpoint]) as producer:
        for topic in ("orders", "parts", "parts"):
            producer.send(topic, b"x").result(60)
    queues, transfer = node.store.queues, node.transfer
    wait_for(lambda: measured(queues, transfer).messages == 3, "the replay")
    monkeypatch.setattr(status_history, "COUNTED_TOPICS", 1)
    assert measured(queues, transfer).messages is None


def test_groups_are_read_while_somebody_looks(node: Node) -> None:
    history = history_of(node)
    history.start()
    try:
        shown = history.shown(lambda _row: True)
        assert shown["groups"]["rows"] == [] and shown["changes"] is not None
        wait_for(lambda: history.shown(lambda _row: True)["groups"]["read"], "the positions")
        assert history.shown(lambda _row: True)["changes"][0]["role"] == "ASYNC_MASTER"
    finally:
        assert history.stop(60)


def test_a_status_that_fails_is_logged_and_looked_at_again(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    history = history_of(node)

    def fail() -> None:
        raise LookupError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(node.backend, "status", fail)
        history.start()
        wait_for(lambda: "a defect" in caplog.text, "the line of the log")
    history.wake()
    wait_for(lambda: history.shown(lambda _row: True)["changes"], "the next look")
    assert history.stop(60)
