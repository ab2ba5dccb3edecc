"""A service: its thread's start and stop; a sleep that ends in time."""

import contextlib
import signal
import threading

from hastore import service as service_module
from hastore.service import Service, Sleeper, raise_failure


class Waiting(Service):
    """Wait until stopped."""

    def run(self):
        """Wait until stopped."""
        self.stopping.wait()


def test_a_stop_in_the_middle_of_a_start_waits_for_the_thread(monkeypatch):
    """As when a node stops while it begins to call another: the stop failed, and was not clean."""
    service, outcome, joined = Waiting("waiting", on_failure=raise_failure), [], threading.Event()

    def stop():
        try:
            outcome.append(service.stop(60))
        except RuntimeError as error:
            outcome.append(error)
            joined.set()

    stopper = threading.Thread(target=stop)

    class SlowToStart(threading.Thread):
        def start(self):
            stopper.start()
            assert service.stopping.wait(60)
            joined.wait(0.2)  # the stop must not get there before the thread is started
            super().start()

    with monkeypatch.context() as patch:
        patch.setattr(service_module.threading, "Thread", SlowToStart)
        service.start()
    stopper.join(60)
    assert outcome == [True] and not service.alive


@contextlib.contextmanager
def limited(seconds):
    """Fail if the main thread blocks for ever in one step of C."""

    def expired(*_):
        raise AssertionError("it sleeps for ever")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_sleep_ends_though_its_deadline_passes_at_once():
    """SimpleQueue.get, which did this before, waits for ever then: in the first of 1,000 calls."""
    with limited(60):
        for _ in range(1_000):
            assert not Sleeper().sleep(0.000001)


def test_a_wake_is_kept_for_the_next_sleep_and_counts_once():
    sleeper = Sleeper()
    sleeper.wake()
    sleeper.wake()
    assert sleeper.sleep(60)
    assert not sleeper.sleep(0.001)
    threading.Timer(0.01, sleeper.wake).start()
    assert sleeper.sleep()


def test_a_signal_handler_wakes_the_thread_that_it_interrupts():
    sleeper = Sleeper()
    before = signal.signal(signal.SIGUSR1, lambda *_: sleeper.wake())
    try:
        main = threading.main_thread().ident
        threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGUSR1)).start()
        with limited(60):
            assert sleeper.sleep(30)
    finally:
        signal.signal(signal.SIGUSR1, before)
