"""One node's state as a value: the real DLedgerCore and its disk, copied, compared and renamed.

A state of a node is a `LocalNode`: the node of the simulation, with the product's core in it. Two
states are one if nothing that the core could still look at differs. What is left out:

- **Time.** All times are kept relative to the node's own now, and only as far as the core can tell
  them apart with SETTINGS: fresh, older than a heart beat, older than an election timeout, and the
  same for what is due later. No clock is shared, so a node may be as slow or fast as it likes.
- **Left-overs**: what a former role has left in fields that are set anew before they are read.
- **Counters** of which only differences count: cuts of the log, and rounds of heart beats unless a
  read waits for one.

Numbers of nodes are of the type `Node`, so that they can be told from other numbers and renamed.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.core import _assumed_bytes as assumed_bytes
from hastore.dledger.core.dispatcher import COMPARES_AT_ONCE
from hastore.dledger.core.events import Settings
from hastore.protocol.dledger import MemberSet
from tests.dledger.simulation import SimNode

BEAT_MS, LATE_MS, ELECTION_MS = 10, 100, 10_000
NOW = 1_000_000.0  # of every node, after each of its steps
SETTINGS = Settings(
    election_timeout_ms=ELECTION_MS,
    heartbeat_interval_ms=BEAT_MS,
    resend_ms=BEAT_MS,
    append_timeout_ms=LATE_MS,
    transfer_timeout_ms=LATE_MS,
    in_flight_pushes=2,
)
# How far a node's clock goes forward.
A_BEAT, TOO_LATE, A_LEASE, LONG = BEAT_MS, 2 * LATE_MS, 1.2 * ELECTION_MS, 5.0 * ELECTION_MS

Renaming = tuple[int, ...]  # the new number of node n is at n - 1
_renaming: Renaming | None = None  # of the state that is being loaded


class Node(int):
    """The number of a node."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Callable[[int], Node], tuple[int]]:
        return _node, (int(self),)


NODES = {number: Node(number) for number in range(1, 6)}


def _node(number: int) -> Node:
    return NODES[number if _renaming is None else _renaming[number - 1]]


class Longest:
    """The core's randomness: a follower waits as long as it may; it is woken earlier at will."""

    def uniform(self, a: float, b: float) -> float:
        del a
        return b

    def __reduce__(self) -> str:
        return "LONGEST"


LONGEST = Longest()


class SharedSettings(Settings):
    """SETTINGS, which all states share."""

    def __reduce__(self) -> str:
        return "SHARED"


SHARED = SharedSettings(**{name: getattr(SETTINGS, name) for name in Settings.__slots__})


class Core(DLedgerCore):
    """The product's core; only how it is copied differs."""

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(self.__dict__)
        del kept["_steps"]
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        DLedgerCore.__init__(self, kept["node"], SHARED, LONGEST, assumed_bytes)
        self.__dict__.update(kept)


# Shared objects, what never changes, and what follows from the rest.
_LEFT_OUT = {
    *("_own", "_membership", "_settings", "settings", "_log_bytes", "_random", "_steps", "world"),
    *("rate", "offset_ms", "paused_until", "sync_ms", "life", "ticks", "clock", "_due_ms"),
    *("ends", "list_indexes", "_timeout_ms", "_tenure_ms", "_stays_until_ms", "_gave_way_ms"),
}
_FRESH = {"heard_ms", "heard_leader_ms", "began_ms", "_grace_heard_ms"}
_ATOMS = {int, bool, type(None), str, float, Node}
PLAIN, TIME, FRESH = range(3)
_fields: dict[type, tuple[tuple[str, int], ...]] = {}


def _fields_of(one: Any) -> tuple[tuple[str, int], ...]:
    cls = type(one)
    if cls not in _fields:
        slots = [name for each in cls.__mro__ for name in getattr(each, "__slots__", ())]
        names = slots or list(one.__dict__)
        if cls is not Core:
            names = [name for name in names if name != "_state"]
        _fields[cls] = tuple(
            (name, FRESH if name in _FRESH else TIME if name.endswith("_ms") else PLAIN)
            for name in sorted(names)
            if name not in _LEFT_OUT
        )
    return _fields[cls]


def _rounded(at_ms: float, now_ms: float, fresh: bool) -> float:
    """Return what the core can tell of a time, relative to NOW."""
    ahead = at_ms - now_ms
    if ahead > ELECTION_MS / 2:
        return NOW + 2 * ELECTION_MS
    if ahead > BEAT_MS:
        return NOW + LATE_MS
    if ahead > 0:
        return NOW + BEAT_MS
    if ahead == 0:
        return NOW
    if ahead >= -ELECTION_MS / 2:
        return NOW if fresh else NOW - TOO_LATE
    return NOW - 2 * ELECTION_MS


def frozen(one: Any, now_ms: float) -> Any:
    """Return a value as nested tuples that can be compared, and round its times in place."""
    kind = type(one)
    if kind in _ATOMS:
        return one
    if kind is tuple or kind is list or kind is deque:
        return tuple([v if type(v) in _ATOMS else frozen(v, now_ms) for v in one])
    if kind is dict:
        return tuple(sorted((key, frozen(value, now_ms)) for key, value in one.items()))
    if kind is set:
        return tuple(sorted(one))
    if kind is MemberSet:
        return tuple(one)
    if isinstance(one, Enum):
        return one.value
    parts = []
    for name, what in _fields_of(one):
        value = getattr(one, name)
        if what != PLAIN and value is not None:
            rounded = _rounded(value, now_ms, what == FRESH)
            if rounded != value:
                object.__setattr__(one, name, rounded)
            value = rounded
        elif type(value) not in _ATOMS:
            value = frozen(value, now_ms)
        parts.append(value)
    return tuple(parts)


class LocalNode(SimNode):
    """A node of the simulation whose world is there only while it takes a step."""

    core: Any
    clock: float
    waiting: dict[Any, tuple[int, int]]  # of a put or read: index or floor, and term

    def __init__(self, world: Any, number: Node, members: tuple[Node, ...]) -> None:
        super().__init__(world, number, members)
        self.clock = NOW
        self.core = None
        self.waiting = {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "world"}

    def local_ms(self) -> float:
        return self.clock

    def _schedule_tick(self, deadline_ms: float | None) -> None:
        return  # a tick may come whenever it is legal

    def _effect(self) -> None:
        self.world.effect(self)

    def die(self) -> None:
        super().die()
        self.core, self.waiting, self.syncing, self.sync_again = None, {}, None, False

    def forget(self, *, rounds: bool, replay: bool, pauses: bool) -> None:
        """Reset what nothing looks at any more."""
        self.life = self.ticks = 0
        self.rate, self.offset_ms = 1.0, 0.0
        if not replay:
            self.opened = 0
        if self.core is None:
            self.committed = -1
            return
        core: Core = self.core
        state, elector, leader = core._state, core._elector, core._leader
        if self.syncing is None:
            state.cuts = 0
        else:
            end, kept, cuts = self.syncing
            state.cuts -= cuts
            self.syncing = end, kept, 0
        if elector.pre is None:
            elector.accepted, elector.transfer = set(), False
        if state.is_leader:
            elector.deadline_ms = core._now_ms
        if not elector.hears_leader(core._now_ms):
            elector.heard_leader_ms = None
        if not pauses:
            elector._had_grace = False
        if not rounds:
            leader.reads.round, leader.reads.answered = 0, {}
        if not leader.dispatchers:  # no leader: these are set when it becomes one
            leader._beat_due_ms = leader._cut_off_ms = leader._grace_ms = 0.0
        for one in leader.dispatchers.values():
            one._compares = min(one._compares, COMPARES_AT_ONCE + 1)
            # Only the later of both counts, and what is sent next is sent now or later.
            sent_ms = one.pending[0].sent_ms if one.pending else core._now_ms
            one._progress_ms = max(one._progress_ms, sent_ms)
            if one.is_sending():
                one._low = one._high = one._questions = one.compare_index = one._follower_begin = 0
                one._follower_end = None

    def value(self) -> Any:
        """Round the times; return what tells this state from others."""
        now_ms = NOW if self.core is None else self.core._now_ms
        value = frozen(self, now_ms)
        self.clock = NOW
        if self.core is not None:
            self.core._now_ms, self.core._due_ms = NOW, float("inf")
        return value


def _sorted(group: MemberSet) -> MemberSet:
    return MemberSet(*(tuple(sorted(part)) for part in group))


def load(blob: bytes, renaming: Renaming | None = None) -> LocalNode:
    """Return a node from what `dump` has made of it, perhaps with other numbers for all nodes."""
    global _renaming
    _renaming = renaming
    try:
        node: LocalNode = pickle.loads(blob)  # noqa: S301 - made by dump in this process
    finally:
        _renaming = None
    if renaming is not None:
        _sort_members(node)
    return node


def dump(node: LocalNode) -> bytes:
    """Return a node as bytes."""
    return pickle.dumps(node, protocol=5)


def _sort_members(node: LocalNode) -> None:
    """Bring the lists of nodes in order again: all code of the product keeps them so."""

    def lists(found: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(type(one)(one.index, one.term, *_sorted(one.group)) for one in found)

    node.first_members = tuple(sorted(node.first_members))
    for disk in [node.disk, *([node.lost_disk] if node.lost_disk is not None else [])]:
        disk.base_group = _sorted(disk.base_group)
        disk.entries = [
            (term, _sorted(value) if isinstance(value, MemberSet) else value)
            for term, value in disk.entries
        ]
        disk.member_lists = lists(disk.member_lists)
        if disk.removed is not None:
            (disk.removed,) = lists((disk.removed,))
    if node.core is not None:
        state, leader = node.core._state, node.core._leader
        state.first_members = tuple(sorted(state.first_members))
        state.member_lists = lists(state.member_lists)
        if state.removed is not None:
            (state.removed,) = lists((state.removed,))
        leader.dispatchers = dict(sorted(leader.dispatchers.items()))


def renamed(value: Any, renaming: Renaming) -> Any:
    """Return a message, an entry or a part of one with other numbers for the nodes."""
    if type(value) is Node:
        return NODES[renaming[value - 1]]
    if isinstance(value, MemberSet):
        return _sorted(MemberSet(*(renamed(part, renaming) for part in value)))
    if isinstance(value, tuple):
        found = tuple(renamed(part, renaming) for part in value)
        return tuple(sorted(found)) if found and all(type(p) is Node for p in found) else found
    if hasattr(value, "__struct_fields__"):
        names = value.__struct_fields__
        return type(value)(*(renamed(getattr(value, name), renaming) for name in names))
    return value
