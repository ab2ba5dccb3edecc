"""Warnings that strangers can cause are bounded in the log."""

import logging

from hastore.bounded_log import BoundedWarnings
from tests.security.conftest import Clock


def test_a_flood_is_counted_and_told_with_the_next_line(caplog):
    clock = Clock()
    warn = BoundedWarnings(logging.getLogger("test"), clock=clock, burst=3, every_ms=100.0).warn
    for number in range(50):
        warn("refused %s: %d", "a%d", number)
    assert caplog.messages == ["refused a%d: 0", "refused a%d: 1", "refused a%d: 2"]
    caplog.clear()
    clock.pass_ms(100)
    warn("refused %s", "b")
    warn("refused %s", "c")
    assert caplog.messages == ["refused b (47 other warnings were not logged)"]
    caplog.clear()
    clock.pass_ms(60_000)  # an hour of silence does not pay for more than a burst
    for number in range(9):
        warn("late %d", number)
    assert caplog.messages == [
        "late 0 (1 other warnings were not logged)", "late 1", "late 2",
    ]  # fmt: skip
