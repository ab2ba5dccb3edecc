"""Which holders retention keeps files for, and for how long."""

import logging

import pytest

from hastore.config.model import RemotingConfig
from hastore.record.transactions import Half
from hastore.server.retention_service import CONFIRMED, Holds, TransactionHold

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


class Clocks:
    """Two clocks, of which a test sets each."""

    def __init__(self) -> None:
        self.now_ms = 5_000.0
        self.ahead_ms = 1_700_000_000_000

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms) + self.ahead_ms

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing sleeps here")


class Open:
    """Open transactions, and what retention keeps of them."""

    def __init__(self) -> None:
        self.clock = Clocks()
        self.halves: list[Half] = []
        self.config = RemotingConfig()
        self.asked_ms = (
            self.config.transaction_check_max * self.config.transaction_check_interval_ms
        )
        self.usual_ms = self.config.transaction_timeout_ms + self.asked_ms + HOLD_MS
        self.restart()

    def restart(self) -> None:
        self.hold = TransactionHold(lambda: self.halves, self.clock, lambda: self.config)

    def begin(self, offset: int, immunity_s: int | None = None, age_ms: float = 0) -> None:
        stored_ms = self.clock.wall_ms() - int(age_ms)
        self.halves.append(Half(offset, 0, stored_ms, 0, immunity_s, b"k%d" % offset))

    def kept(self, after_ms: float = 0) -> int | None:
        self.clock.now_ms += after_ms
        return self.hold.held_from(HOLD_MS)


def test_a_half_message_is_kept_while_it_may_be_asked_for() -> None:
    node = Open()
    assert node.kept() is None
    node.begin(7)
    assert node.kept() == 7
    node.begin(9, age_ms=-1_000)
    assert node.kept(node.usual_ms - 1) == 7
    assert node.kept(1) == 9
    assert node.kept(node.usual_ms) is None
    node.begin(11)
    assert node.kept() == 11
    node.halves.clear()
    assert node.kept() is None


def test_a_half_message_of_which_nobody_is_asked_for_long_is_kept_for_longer() -> None:
    node = Open()
    node.begin(7, immunity_s=7_200)
    node.begin(9, immunity_s=1)
    assert node.kept() == 7
    assert node.kept(7_200_000 + node.asked_ms + HOLD_MS - 1) == 7
    assert node.kept(1) is None
    node.begin(11, immunity_s=1)  # it may be a repeat of one without
    assert node.kept() == 11
    assert node.kept(node.usual_ms - 1) == 11
    assert node.kept(1) is None


def test_half_messages_are_not_kept_one_after_the_other() -> None:
    node = Open()
    for offset in range(3):
        node.begin(offset)
    assert node.kept() == 0
    assert node.kept(node.usual_ms) is None


@pytest.mark.parametrize("looked", [True, False])
@pytest.mark.parametrize("immunity_s", [None, 7_200])
def test_a_clock_that_was_set_forward_for_a_moment_ends_no_hold(
    looked: bool, immunity_s: int | None
) -> None:
    node = Open()
    node.begin(7, immunity_s)
    if looked:
        assert node.kept() == 7
    node.clock.ahead_ms += 86_400_000
    assert node.kept(1_000) == 7
    node.clock.ahead_ms -= 86_400_000
    assert node.kept(1_000) == 7
    open_ms = 1_000 * (immunity_s or 0) + node.asked_ms + HOLD_MS
    assert node.kept(open_ms - 2_001) == 7


def test_a_clock_that_was_set_back_holds_nothing_for_ever() -> None:
    node = Open()
    node.begin(7)
    assert node.kept() == 7
    node.clock.ahead_ms -= 10**9
    assert node.kept(node.usual_ms - 1) == 7
    assert node.kept(1) is None


def test_a_restart_does_not_begin_a_long_hold_again() -> None:
    node = Open()
    node.begin(7, immunity_s=7_200)
    assert node.kept() == 7
    node.kept(7_200_000)
    node.restart()
    assert node.kept() == 7
    assert node.kept(node.usual_ms) is None
