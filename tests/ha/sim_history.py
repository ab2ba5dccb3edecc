"""What the clients of a walk saw, judged at its end by the history checker.

Time is the number of events. Each value is in a queue of its own, so a queue has no order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from hastore.ha.rules.epochs import EpochEntry
from hastore.history.rules import events as e
from hastore.history.rules.checker import Checker

TOPIC = "T"


@functools.cache
def _digest(value: int) -> str:
    return e.digest_of(TOPIC, None, bytes([value]))


class SimHistory:
    """The puts of a walk and how they ended, and what excuses that a master's own are gone."""

    found = lost = 0  # acknowledged values that the log has; those that the faults excuse

    def __init__(self) -> None:
        self.now = 0
        self.open: set[int] = set()  # values
        self.events: list[e.Line] = []

    def _tick(self) -> int:
        self.now += 1
        return self.now

    def began(self, value: int) -> None:
        """A client sends a value."""
        self.events.append(e.Send("clients", value, self._tick(), TOPIC, _digest(value)))
        self.open.add(value)

    def acked(self, value: int, level: str, offset: int, epoch: int) -> None:
        """It is acknowledged."""
        if value in self.open:
            self.open.remove(value)
            self.events.append(e.Ok("clients", value, self._tick(), level, offset, value, 0, epoch))

    def begun(self, epoch: int) -> None:
        """A node has this epoch: others may follow it, and lose what they had alone."""
        self.events.append(e.Epoch(epoch))

    def fault(self, name: str, node: int) -> None:
        """A node loses what it has not synced (power), or all (lost)."""
        self.events.append(e.Fault(self._tick(), name, node))

    def judge(
        self, begin: int, end: int, records: Iterable[tuple[int, int, int]],
        history: Iterable[EpochEntry],
    ) -> list[str]:  # fmt: skip
        """Return the findings, with the log [begin, end) of records (offset, size, value)."""
        checker = Checker()
        checker.begin(e.Header())
        events: list[e.Line] = [*self.events, e.Log(begin, end)]
        events += [e.Epoch(one.epoch, one.start) for one in history]
        sent = {one.op for one in events if isinstance(one, e.Send)}
        for offset, size, value in records:
            if value not in sent:  # of a RocketMQ master
                events.append(e.Send("RocketMQ's", value, 0, TOPIC, _digest(value)))
            events.append(e.Record(offset, size, TOPIC, value, 0, _digest(value)))
        for line, event in enumerate(events, 1):
            checker.feed(event, line)
        report = checker.finish()
        self.found, self.lost = report.counts["acknowledged_and_found"], report.losses
        return list(map(str, report.findings))
