"""What one node of mode dledger does with one event: the product's core runs, once for each pair.

The core is a function of its state and the event, so what it did is remembered: a step from a state
that many states of the group share is taken once. The node's own observer (`Observer`) judges what
the disk of one node can show; what others must agree with is noted for `dledger_model.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from hastore.dledger.core.events import (
    ChangeMembers,
    LinkChanged,
    Propose,
    ReadIndex,
    ReplayBlocked,
    Retained,
    Role,
    Tick,
    Transfer,
)
from hastore.protocol.dledger import HeartBeatRequest, HeartBeatResponse, MemberSet
from tests.dledger.oracle import Violation
from tests.dledger.sim_disk import Entry
from tests.dledger.simulation import Crash
from tests.explore.dledger_bench import Bench, Event, Parcel
from tests.explore.local_states import (
    A_BEAT,
    A_LEASE,
    LONG,
    NODES,
    TOO_LATE,
    LocalNode,
    Node,
    Renaming,
    dump,
    load,
    renamed,
)


class View(NamedTuple):
    """What others may look at in a node's state."""

    node: Node
    up: bool
    role: Role | None
    term: int
    begin: int
    entries: tuple[Entry, ...]
    durable: int
    committed: int
    remembers: bool
    group: MemberSet
    lost: tuple[int, tuple[Entry, ...], int] | None  # the log of a lost disk
    syncing: bool
    blocked: bool
    serves: bool
    leader: int | None
    fresh: bool  # a follower that heard a leader lately
    removed: bool

    @property
    def end(self) -> int:
        return self.begin + len(self.entries) - 1

    def entry(self, index: int) -> Entry | None:
        """Return an entry; None if it is not there."""
        return self.entries[index - self.begin] if self.begin <= index <= self.end else None

    def has_or_had(self, index: int, entry: Entry) -> bool:
        """Whether the entry is durable here, or was on the disk that was lost."""
        if index < self.begin or (index <= self.durable and self.entry(index) == entry):
            return True
        if self.lost is None:
            return False
        begin, entries, durable = self.lost
        return index < begin or (index <= durable and entries[index - begin] == entry)


class Outcome(NamedTuple):
    """What a step has done."""

    after: int  # the node's state
    sends: tuple[int, ...]  # messages
    notes: tuple[Event, ...]  # what the group's observer must judge
    effects: int  # how often the node could have died in the middle
    broken: str  # what the node's own observer has found


class Steps:
    """All states of nodes, all messages, and all steps that were taken."""

    def __init__(
        self, *, rounds: bool = False, replay: bool = False, left_out: frozenset[str] = frozenset()
    ) -> None:
        self._rounds, self._replay = rounds, replay
        self._left_out = left_out  # kinds of messages that are always lost
        self._ids: dict[Any, int] = {}
        self._blobs: list[bytes] = []
        self.views: list[View] = []
        self._message_ids: dict[Parcel, int] = {}
        self.messages: list[Parcel] = []
        self._known: dict[tuple[Any, ...], Outcome] = {}
        self._renamed: dict[tuple[int, Renaming], int] = {}
        self._renamed_messages: dict[tuple[int, Renaming], int] = {}

    def first(self, number: Node, members: tuple[Node, ...]) -> int:
        """Return the state of a node that was never started."""
        bench = Bench()
        node = LocalNode(bench, number, members)
        return self._intern(node)

    def message_id(self, parcel: Parcel) -> int:
        known = self._message_ids.setdefault(parcel, len(self.messages))
        if known == len(self.messages):
            self.messages.append(parcel)
        return known

    def _intern(self, node: LocalNode) -> int:
        node.forget(rounds=self._rounds, replay=self._replay, pauses=False)
        value = node.value()
        known = self._ids.get(value)
        if known is None:
            known = self._ids[value] = len(self._blobs)
            node.world = None
            self._blobs.append(dump(node))
            self.views.append(_view(node))
        return known

    # ---- steps

    def step(self, local: int, event: Event) -> Outcome:
        """Return what a node does with an event."""
        key = (local, *event)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._take(local, event)
        return known

    def _take(self, local: int, event: Event) -> Outcome:
        node, dies_at = load(self._blobs[local]), None
        if event[0] == "dies at":
            _, dies_at, *rest = event
            event = tuple(rest)
        bench = node.world = Bench(dies_at)
        view, broken = self.views[local], ""
        bench.term, bench.led = view.term, view.role is Role.LEADER
        try:
            getattr(self, f"_do_{event[0].replace(' ', '_')}")(node, *event[1:])
        except Crash:
            node.die()
        except (Violation, AssertionError, ValueError, LookupError) as error:
            broken = f"{type(error).__name__}: {error}" if not str(error) else str(error)
            return Outcome(local, (), (), bench.effects, broken)
        kept = [one for one in bench.out if one.kind not in self._left_out]
        sends = dict.fromkeys(self.message_id(self._plain(one)) for one in kept)
        notes = tuple(bench.notes)
        return Outcome(self._intern(node), tuple(sends), notes, bench.effects, broken)

    def _plain(self, parcel: Parcel) -> Parcel:
        message = parcel.message
        if not self._rounds and isinstance(message, HeartBeatRequest | HeartBeatResponse):
            return parcel._replace(message=replace(message, round=1))
        return parcel

    def _do_start(self, node: LocalNode) -> None:
        node.start()

    def _do_receive(self, node: LocalNode, number: int) -> None:
        parcel = self.messages[number]
        node.receive(parcel.source, parcel.message, parcel.entries)

    def _do_put(self, node: LocalNode, value: int) -> None:
        term, token = node.core_term, f"put {value}"
        node.waiting[token] = node.disk.end + 1, term
        node.append_put(term, value, 1)
        node._effect()
        node.step(Propose(node.local_ms(), 1, token))

    def _do_read(self, node: LocalNode, number: int, floor: int) -> None:
        token = f"read {number}"
        node.waiting[token] = floor, node.core_term
        node.step(ReadIndex(node.local_ms(), token))

    def _do_persisted(self, node: LocalNode) -> None:
        node._synced(node.life)

    def _pass(self, node: LocalNode, time_ms: float) -> None:
        node.clock += time_ms
        node.step(Tick(node.clock))

    def _do_beat(self, node: LocalNode) -> None:
        self._pass(node, A_BEAT)

    def _do_late(self, node: LocalNode) -> None:
        self._pass(node, TOO_LATE)

    def _do_lapse(self, node: LocalNode) -> None:
        self._pass(node, A_LEASE)

    def _do_timeout(self, node: LocalNode) -> None:
        self._pass(node, LONG)

    def _do_dies(self, node: LocalNode, lost: int) -> None:
        """End the process; with `lost` the power, and so many entries that were not synced."""
        node.die()
        if lost:
            node.disk.drop_from(node.disk.end + 1 - lost)

    def _do_wiped(self, node: LocalNode) -> None:
        node.die()
        node.wipe()

    def _do_link(self, node: LocalNode, peer: int, up: bool) -> None:
        node.step(LinkChanged(node.local_ms(), NODES[peer], up))

    def _do_transfer(self, node: LocalNode, to: int) -> None:
        node.waiting["transfer"] = 0, node.core_term
        node.step(Transfer(node.local_ms(), NODES[to], "transfer"))

    def _do_members(self, node: LocalNode, wanted: MemberSet) -> None:
        node.waiting["members"] = 0, node.core_term
        node.step(ChangeMembers(node.local_ms(), wanted.members, "members", wanted.learners,
                                wanted.leaving))  # fmt: skip

    def _do_retain(self, node: LocalNode, begin: int) -> None:
        node.disk.retain(begin)
        node.step(Retained(node.local_ms(), begin))

    def _do_checkpoint(self, node: LocalNode) -> None:
        node.disk.checkpoint = node.committed

    def _do_blocked(self, node: LocalNode, blocked: bool) -> None:
        node.blocked = blocked
        node.step(ReplayBlocked(node.local_ms(), blocked))

    # ---- names

    def renamed(self, local: int, renaming: Renaming) -> int:
        """Return a node's state with other numbers for all nodes."""
        key = (local, renaming)
        known = self._renamed.get(key)
        if known is None:
            node = load(self._blobs[local], renaming)
            known = self._renamed[key] = self._intern(node)
        return known

    def renamed_message(self, number: int, renaming: Renaming) -> int:
        """Return a message with other numbers for all nodes."""
        key = (number, renaming)
        known = self._renamed_messages.get(key)
        if known is None:
            parcel: Parcel = Parcel(*renamed(tuple(self.messages[number]), renaming))
            known = self._renamed_messages[key] = self.message_id(parcel)
        return known


def _view(node: LocalNode) -> View:
    disk, lost, up = node.disk, node.lost_disk, node.up and node.core is not None
    core = node.core
    gone = None if lost is None else (lost.begin, tuple(lost.entries), lost.durable)
    fresh = up and core._elector.heard_leader_ms is not None and core._elector.hears_leader(
        core._now_ms
    )  # fmt: skip
    return View(
        NODES[node.number], up, core.role if up else None, core.term if up else disk.hard.term,
        disk.begin, tuple(disk.entries), disk.durable, node.committed, disk.remembers, disk.group,
        gone, node.syncing is not None, node.blocked, up and node.serves,
        core.leader if up else None, fresh, up and core.removed is not None,
    )  # fmt: skip
