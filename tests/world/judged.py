"""The history of a walk as users record theirs, and the history checker's word about it."""

from __future__ import annotations

from typing import Any

from hastore.config.model import Mode
from hastore.history.files import record_event
from hastore.history.recorder import Recorder
from hastore.history.rules import events as e
from hastore.history.rules.checker import Checker
from hastore.history.rules.findings import Report
from tests.world.history import TOPIC, Log
from tests.world.scheduler import world


class Notes(Recorder):
    """A recorder that keeps its events. Of a walk's threads only one runs: it has no lock."""

    def __init__(self, mode: Mode, nodes: int) -> None:
        self.events: list[e.Event] = []
        super().__init__(mode="sync" if mode is Mode.CLASSIC else "dledger", nodes=nodes)

    def now(self) -> int:
        return int(world().now * 1e9)  # a host's own monotonic clock is not another one's

    def add(self, event: e.Event) -> None:
        self.events.append(event)

    def _named(self, kind: str, name: str | None) -> str:
        assert name is not None, f"each {kind} of a walk has a name"
        return name


def judge(notes: Notes, log: Log) -> Report:
    """Judge a walk, with the log that all nodes have at its end."""
    checker = Checker()
    header, *events = notes.events
    assert isinstance(header, e.Header)
    checker.begin(header)
    lines: list[Any] = [*events, e.Log(log.start, log.end)]
    lines += [
        record_event(offset, size, record)
        for offset, size, record in log.items()
        if record.topic == TOPIC
    ]
    for number, line in enumerate(lines, 1):
        checker.feed(line, number)
    return checker.finish()
