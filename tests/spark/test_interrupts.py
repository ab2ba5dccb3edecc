"""Parts of a program in which signals wait, or have no effect."""

import signal
import threading

import pytest

from hastore.spark.worker import SIGNALS, interrupted_later, uninterrupted


@pytest.fixture(autouse=True)
def handlers():
    """Count signals, and show that the handlers are there again afterwards."""
    came = []
    before = {one: signal.signal(one, lambda number, _: came.append(number)) for one in SIGNALS}
    inside = {one: signal.getsignal(one) for one in SIGNALS}
    yield came
    assert {one: signal.getsignal(one) for one in SIGNALS} == inside
    for one, old in before.items():
        signal.signal(one, old)


def test_a_signal_is_handled_when_the_body_has_ended(handlers):
    with interrupted_later():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert handlers == []
    assert handlers == [signal.SIGTERM]


def test_a_signal_is_handled_though_the_body_fails(handlers):
    with pytest.raises(ValueError), interrupted_later():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert handlers == [signal.SIGINT]


def test_a_signal_has_no_effect(handlers):
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert handlers == []


def test_other_threads_change_nothing():
    ended = []

    def work():
        with interrupted_later(), uninterrupted():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
