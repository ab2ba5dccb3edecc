"""Both ends of a link that forwards, as tests use them: what a link has told, what was asked."""

from hastore.clock import SYSTEM_CLOCK
from hastore.ha.hello.forward_link import ForwardLink, ForwardTimes
from hastore.protocol.forward_link import ClientRequest
from hastore.service import raise_failure
from tests.ha.nodes import wait_for

CLIENT = bytes([10, 1, 2, 3])


class Master:
    """What a master's handler is given; the test answers."""

    def __init__(self, port):
        self.got = []
        self.echoes = False
        port.handler = self._take

    def echo(self):
        """Answer each request with its own frame from now on."""
        self.echoes = True

    def _take(self, requests):
        self.got += requests
        for one in requests if self.echoes else ():
            one.answer(one.client.frame)


class Caller:
    """The calling end, and what its link has told."""

    def __init__(self, dial, to, *, silence_ms=60_000.0):
        self.limits = None
        self.outcomes = {}
        self.ends = []
        self.problems = []
        self.refused = []
        times = ForwardTimes(
            idle_ms=60_000.0, silence_ms=silence_ms, dial_ms=20_000.0, closed_ms=50, old_ms=50
        )  # fmt: skip
        self.link = ForwardLink(
            to, dial, self, SYSTEM_CLOCK, times=times,
            on_refused=lambda _who, why: self.refused.append(why), on_failure=raise_failure,
        )  # fmt: skip
        self.link.start()

    def on_open(self, _link, limits):
        self.limits = limits

    def on_outcomes(self, _link, frames):
        for one in frames:
            assert one.id not in self.outcomes, "two outcomes"
            self.outcomes[one.id] = one

    def on_close(self, _link, reason, unsent):
        self.limits = None
        self.ends.append((reason, unsent))

    def on_problem(self, _link, reason, *, lasting):
        self.problems.append((reason, lasting))

    def opened(self):
        wait_for(lambda: self.limits, "the link")
        return self

    def send(self, number, frame=b"a frame"):
        return self.link.send(number, ClientRequest(CLIENT, 4_711, frame, 17))

    def outcome(self, number):
        return wait_for(lambda: self.outcomes.get(number), f"the outcome of {number}")

    def stop(self):
        assert self.link.stop(60)
