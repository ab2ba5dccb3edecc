"""Mistakes to plant into the product, one at a time; the walks must catch each.

Those of tests/ha/planted.py and tests/dledger/planted.py that whole nodes meet soon, and some that
only whole nodes can have: in stores, queues, windows, clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hastore.client.consumer.shared_core import SharedCore
from hastore.config.model import Mode
from hastore.ha.rules.acks import AckTable
from hastore.protocol.api import Position
from hastore.store import retention
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.log.flush import FlushService
from hastore.store.log.mapped_file_queue import MappedFile
from hastore.store.log_store import LogStore
from tests.dledger.planted import BUGS as DLEDGER_BUGS
from tests.ha.planted import BUGS as CLASSIC_BUGS
from tests.world.events import Event
from tests.world.machines import Shape
from tests.world.walk import Plan, plan_of

Patch = tuple[Any, str, Any]


def syncs_nothing() -> list[Patch]:
    """The log's files are never synced."""
    return [(MappedFile, "sync", lambda self: None)]


def window_lost() -> list[Patch]:
    """A restart takes the snapshot of the deduplication window for read, and has nothing of it."""

    def load(self: DedupWindow, offset: int, synced: bool) -> int:
        del synced
        self._clear()
        self.end_offset = self._snapshot_end = offset
        return offset

    return [(DedupWindow, "load", load)]


def window_not_replayed() -> list[Patch]:
    """Replay leaves the deduplication window as it is, on slaves too."""

    def dispatch(self: DedupWindow, batch: Any) -> None:
        if batch:
            self.end_offset = max(self.end_offset, batch[-1].end_offset)

    return [(DedupWindow, "dispatch", dispatch)]


def offsets_from_zero() -> list[Patch]:
    """A restart forgets the next offset of each queue."""

    def load(self: QueueOffsetTable, offset: int, synced: bool) -> int:
        del synced
        self.reset()
        self.end_offset = offset
        return offset

    return [(QueueOffsetTable, "load", load)]


def readable_at_once() -> list[Patch]:
    """Readers get what is not confirmed."""
    set_limits = LogStore.set_limits

    def careless(self: LogStore, *, readable: int | None = None, **more: Any) -> None:
        if readable is not None:
            readable = max(readable, self.max_offset)
        set_limits(self, readable=readable, **more)

    return [(LogStore, "set_limits", careless)]


def confirmed_alone() -> list[Patch]:
    """The master confirms what only it has stored."""

    def confirm(self: AckTable, own_offset: int) -> int:
        self.confirmed_offset = max(self.confirmed_offset, own_offset)
        return self.confirmed_offset

    return [(AckTable, "confirm", confirm)]


def commits_ahead() -> list[Patch]:
    """A consumer commits a position behind messages that nobody has got."""
    commit = SharedCore._commit

    def ahead(self: SharedCore, places: Any, deadline: Any) -> Any:
        places = {
            name: Position(place.queue_offset + 3, place.epoch, place.offset)
            for name, place in places.items()
        }
        return commit(self, places, deadline)

    return [(SharedCore, "_commit", ahead)]


def retention_takes_more() -> list[Patch]:
    """Retention removes what no limit says."""
    return [(retention, "expired_files", lambda log, *_: max(0, len(log.queue.files) - 2))]


def flushed_too_early() -> list[Patch]:
    """What is written counts as synced."""

    def flush(self: FlushService) -> int:
        target = self._log.max_offset
        self.flushed_offset = target
        self._on_flushed(target)
        return target

    return [(FlushService, "flush", flush)]


def _told(plan: Plan, *events: tuple[float, str, int, int, float]) -> Plan:
    """Return a plan with these events (s, kind, node, other, s) in a pair or group of three."""
    shape = Shape(plan.shape.mode, nodes=2 if plan.shape.mode is Mode.CLASSIC else 3)
    drawn = tuple(Event(*event, part=0.5) for event in events)
    return replace(plan, shape=shape, groups=("tame",), preempts=0.0, events=drawn)


# Walks that meet a mistake which random ones rarely meet.
TOLD: dict[str, tuple[tuple[float, str, int, int, float], ...]] = {
    "readable at once": ((5.0, "partition", 0, 1, 8.0), (8.0, "promote", 1, 0, 0.0)),
    "confirmed alone": ((5.0, "partition", 0, 1, 8.0), (8.0, "promote", 1, 0, 0.0)),
}


def plan_for(name: str) -> Plan:
    """Return the walk that catches a mistake."""
    mode, _, seed = BUGS[name]
    plan = plan_of(seed, mode)
    return _told(plan, *TOLD[name]) if name in TOLD else plan


# name: (mode, what makes it, the seed of the walk that catches it)
BUGS: dict[str, tuple[Mode, Callable[[], list[Patch]], int]] = {
    "syncs nothing": (Mode.CLASSIC, syncs_nothing, 4),
    "window lost": (Mode.CLASSIC, window_lost, 10),
    "window not replayed": (Mode.CLASSIC, window_not_replayed, 4),
    "window lost in mode dledger": (Mode.DLEDGER, window_lost, 10),
    "offsets from zero": (Mode.CLASSIC, offsets_from_zero, 0),
    "readable at once": (Mode.CLASSIC, readable_at_once, 0),
    "confirmed alone": (Mode.CLASSIC, confirmed_alone, 0),
    "commits ahead": (Mode.CLASSIC, commits_ahead, 0),
    "retention takes more": (Mode.DLEDGER, retention_takes_more, 0),
    "flushed too early": (Mode.CLASSIC, flushed_too_early, 0),
    "syncs nothing in mode dledger": (Mode.DLEDGER, syncs_nothing, 0),
    "hello_counts": (Mode.CLASSIC, CLASSIC_BUGS["hello_counts"], 0),
    "writes_after_promise": (Mode.CLASSIC, CLASSIC_BUGS["writes_after_promise"], 0),
    "offset_only": (Mode.CLASSIC, CLASSIC_BUGS["offset_only"], 0),
    "minority_elects": (Mode.DLEDGER, DLEDGER_BUGS["minority_elects"], 0),
    "shorter_log_elected": (Mode.DLEDGER, DLEDGER_BUGS["shorter_log_elected"], 0),
}


def plant(name: str) -> None:
    """Plant a mistake, for good: in a process that ends with its walk."""
    for place, attribute, value in BUGS[name][1]():
        setattr(place, attribute, value)
