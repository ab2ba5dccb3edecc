"""Which holders retention keeps files for, and for how long."""

import logging

import pytest

from hastore.server.retention_service import CONFIRMED, Holds

HOLD_MS = 1_000.0


def test_files_are_kept_for_the_slowest_that_moves() -> None:
    holds = Holds(HOLD_MS)
    for now in range(0, 10_000, 400):
        assert holds.held_from(now, 10**9, {"node 2": now + 5, "node 3": 10**6 + now}) == now + 5
    assert holds.held_from(10_400, 10**9, {}) is None
    assert not holds.problems()


def test_a_slave_without_progress_does_not_hold_files_until_it_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    holds = Holds(HOLD_MS)
    assert holds.held_from(0, 100, {"node 2": 10, "node 3": 50}) == 10
    assert holds.held_from(999, 200, {"node 2": 10, "node 3": 60}) == 10
    assert holds.held_from(1_000, 300, {"node 2": 10, "node 3": 70}) == 70
    assert list(holds.lapsed) == ["node 2"]
    assert "node 2" in holds.problems()[0]
    holds.held_from(1_100, 400, {"node 2": 10, "node 3": 80})
    assert [r.levelname for r in caplog.records] == ["WARNING"]  # once
    assert holds.held_from(1_200, 500, {"node 2": 11, "node 3": 90}) == 11
    assert not holds.problems()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]
    assert holds.held_from(2_199, 600, {"node 2": 11, "node 3": 100}) == 11


def test_a_holder_at_the_end_does_not_lapse() -> None:
    holds = Holds(HOLD_MS)
    for now in range(0, 5_000, 500):
        assert holds.held_from(now, 100, {"node 2": 100}) == 100
    assert holds.held_from(5_000, 200, {"node 2": 100}) == 100  # data has just come
    assert holds.held_from(5_499, 200, {"node 2": 100}) == 100
    assert holds.held_from(5_500, 200, {"node 2": 100}) is None


def test_a_new_link_does_not_count_as_progress() -> None:
    holds = Holds(HOLD_MS)
    holds.held_from(0, 100, {"node 2": 10})
    holds.held_from(400, 100, {})
    holds.held_from(800, 100, {"node 2": 10})
    assert holds.held_from(1_000, 100, {"node 2": 10}) is None
    # Away for longer than the hold, it is a new holder.
    holds.held_from(2_100, 100, {})
    assert holds.held_from(2_200, 100, {"node 2": 10}) == 10


def test_a_slave_that_was_rewound_does_not_lapse_once_it_moves() -> None:
    holds = Holds(HOLD_MS)
    holds.held_from(0, 100, {"node 2": 90})
    assert holds.held_from(900, 100, {"node 2": 10}) == 10
    assert holds.held_from(1_800, 100, {"node 2": 20}) == 20


def test_unconfirmed_bytes_are_named() -> None:
    holds = Holds(0)
    assert holds.held_from(0, 100, {CONFIRMED: 10}) is None
    assert "confirmed" in holds.problems()[0]
