"""A service: its thread's start and stop."""

import threading

from hastore import service as service_module
from hastore.service import Service, raise_failure


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
