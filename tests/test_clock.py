"""The clock by which what was granted for a time ends."""

import time

import pytest

from hastore.clock import SYSTEM_CLOCK


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
def test_the_monotonic_clock_goes_on_while_the_machine_is_suspended(monkeypatch):
    suspended_s = [0.0]
    clocks = {
        time.CLOCK_MONOTONIC: lambda: 5.0,
        time.CLOCK_BOOTTIME: lambda: 5.0 + suspended_s[0],
    }
    monkeypatch.setattr(time, "clock_gettime", lambda which: clocks[which]())
    monkeypatch.setattr(time, "monotonic", clocks[time.CLOCK_MONOTONIC])
    assert SYSTEM_CLOCK.monotonic_ms() == 5_000.0
    suspended_s[0] = 3_600.0
    assert SYSTEM_CLOCK.monotonic_ms() == 3_605_000.0
