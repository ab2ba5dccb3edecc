"""The bounds of a search of mode dledger, and what a node may do by itself in a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hastore.dledger.core.events import Role
from hastore.protocol.dledger import MemberSet
from tests.explore.dledger_bench import Event
from tests.explore.dledger_steps import View
from tests.explore.local_states import Node


@dataclass(frozen=True)
class Scope:
    """The bounds of a search: how often each kind of event may happen. None: without a bound."""

    nodes: int = 3
    grain: str = "messages"
    terms: int = 2  # an event that leads to a later term is not followed
    in_flight: int = 6
    left_out: frozenset[str] = frozenset()  # kinds of messages that are always lost
    bounds: dict[str, int | None] = field(default_factory=dict)
    led: bool = False  # begin with a leader that has committed its first entry
    torn: bool = False  # a node may die within a step, before or after each of its effects
    members: int = 0  # 0: all nodes; else the others are spares
    due: frozenset[str] = frozenset()  # kinds of events and messages that must be met


def events_of(view: View, numbers: list[Node]) -> Iterator[tuple[str, Event, str]]:
    """Yield (kind, event, bound) of what a node may do by itself."""
    if not view.up:
        yield "start", ("start",), "start"
        return
    if view.role is Role.LEADER:
        yield "beat", ("beat",), "beat"
        yield "late", ("late",), "late"
        yield "cut off", ("timeout",), "cut off"
        for other in numbers:
            if other != view.node:
                yield "transfer", ("transfer", other), "transfer"
        yield from _changes(view, numbers)
    else:
        yield "election timeout", ("timeout",), "timeout"
        if view.fresh:
            yield "lease over", ("lapse",), "lapse"
    if view.syncing:
        yield "synced", ("persisted",), "synced"
    yield "dies", ("dies", 0), "dies"
    for lost in range(1, view.end - view.durable + 1):
        yield "power lost", ("dies", lost), "power"
    yield "disk lost", ("wiped",), "wipe"
    limit = min(view.committed, view.durable)
    if limit > view.begin:
        yield "retained", ("retain", limit), "retain"
    if view.committed >= 0:
        yield "checkpoint", ("checkpoint",), "checkpoint"
    yield "replay", ("blocked", not view.blocked), "blocked"


def _changes(view: View, numbers: list[Node]) -> Iterator[tuple[str, Event, str]]:
    now = view.group
    for node in now.members:
        if len(now.members) > 1:
            rest = tuple(n for n in now.members if n != node)
            yield "removed", ("members", MemberSet(rest, now.learners)), "members"
    for node in numbers:
        if node not in now.members and node not in now.learners:
            yield "added", ("members", MemberSet(now.members, (*now.learners, node))), "members"
