"""The world of one node of mode dledger for one step: what it sends, and what its observer sees."""

from __future__ import annotations

from typing import Any, NamedTuple

from hastore.dledger.core.events import Role, Settled
from hastore.protocol.dledger import (
    MemberSet,
    Message,
    PushResponse,
    TakeLeadership,
    VoteRequest,
    VoteResponse,
)
from tests.dledger.oracle import Oracle, Violation
from tests.dledger.sim_disk import Entry
from tests.dledger.simulation import Crash, Plan
from tests.explore.local_states import (
    LONGEST,
    NODES,
    SHARED,
    Core,
    LocalNode,
    Node,
    assumed_bytes,
)

Event = tuple[Any, ...]


class Parcel(NamedTuple):
    """A message on its way, with the entries that it carries."""

    source: Node
    target: Node
    message: Message
    entries: tuple[Entry, ...]

    @property
    def kind(self) -> str:
        """The kind of message: at most so many of one kind are on a link."""
        name = type(self.message).__name__
        if isinstance(self.message, VoteRequest | VoteResponse):
            return f"{name} {self.message.pre}"
        if isinstance(self.message, PushResponse):
            return f"{name} {self.message.push.value}"
        return name


class Observer(Oracle):
    """Judges what one node's disk and core can show; notes what others must agree with."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(())
        self.bench = bench

    def truncates(self, node: Any, index: int) -> None:
        super().truncates(node, index)
        self.bench.notes.append(("cut", index, tuple(node.disk.entries[index - node.disk.begin :])))

    def installs(self, node: Any, index: int, group: MemberSet) -> None:
        disk = node.disk
        held = disk.entry(index) if disk.begin <= index <= disk.end else None
        self.bench.notes.append(("install", index, group, held))

    def recalls(self, node: Any) -> None:
        disk, lost = node.disk, node.lost_disk
        self.bench.notes.append(
            ("recall", disk.begin, tuple(disk.entries), disk.durable,
             lost.begin, tuple(lost.entries), lost.durable)
        )  # fmt: skip

    def sends(self, node: Any, peer: int, message: Message) -> None:
        if not isinstance(message, TakeLeadership):
            super().sends(node, peer, message)

    def _acknowledges(self, node: Any, message: PushResponse) -> None:
        if message.index > node.disk.durable:
            raise Violation(
                f"node {node.number} acknowledges {message.index}; durable is {node.disk.durable}"
            )

    def role(self, node: Any) -> None:
        state = node.core_term
        if state < self.bench.term:
            raise Violation(f"node {node.number}: the term falls from {self.bench.term} to {state}")
        if state > node.disk.hard.term:
            raise Violation(f"node {node.number} is in {state}, durable is {node.disk.hard.term}")
        if node.role is Role.LEADER and not self.bench.led:
            if not node.disk.remembers:
                raise Violation(f"node {node.number} leads {state}, it was wiped")
            self.bench.led, self.bench.term = True, state
            self.bench.notes.append(("leads", state, node.number))

    def commits(self, node: Any, before: int, index: int) -> None:
        disk = node.disk
        if index < before:
            raise Violation(f"node {node.number}: the committed index falls to {index}")
        if index > disk.end:
            raise Violation(f"node {node.number} commits {index} beyond its end {disk.end}")
        first = max(before + 1, disk.begin)
        entries = tuple(disk.entries[first - disk.begin : index + 1 - disk.begin])
        # A leader that commits its own removal has stepped down in the same step.
        own = node.number if self.bench.led and node.core_term == self.bench.term else None
        self.bench.notes.append(("commit", first, entries, node.core_term, own, disk.members))

    def own_entry(self, node: Any, group: MemberSet | None) -> None:
        if group is None:
            return
        now = node.disk.group
        if len(set(now.members) ^ set(group.members)) > 1:
            raise Violation(f"node {node.number} changes {now} to {group} at once")
        for new in set(group.members) - set(now.members):
            if new not in now.learners:
                raise Violation(f"node {node.number} makes node {new} a member, no learner")
        lists = [
            node.disk.begin + place
            for place, (_, value) in enumerate(node.disk.entries)
            if isinstance(value, MemberSet)
        ]
        self.bench.notes.append(("change", tuple(lists), node.core_term))


class Bench:
    """The world of one node for one step; the parts of the simulation's World that a node uses."""

    plan = Plan(settings=SHARED)
    now = 0.0
    chaos = True
    readers = 0.0
    told_down: set[tuple[int, int]] = set()
    numbers: tuple[int, ...] = ()

    def __init__(self, dies_at: int | None = None) -> None:
        self.rng: Any = self
        self.readers_rng = self.rng
        self.notes: list[Event] = []
        self.out: list[Parcel] = []
        self.effects = 0
        self.dies_at = dies_at
        self.term = 0
        self.led = False
        self.oracle = Observer(self)

    def uniform(self, a: float, b: float) -> float:
        return a

    def random(self) -> float:
        return 1.0

    def expovariate(self, rate: float) -> float:
        return 1.0

    def effect(self, node: LocalNode) -> None:
        """Count a place where the node may die; let it die if it shall."""
        self.effects += 1
        if self.effects == self.dies_at:
            raise Crash(node)

    def after(self, delay_ms: float, call: Any, *args: Any) -> None:
        """Leave it to the search when a sync ends."""

    def make_core(self, node: LocalNode) -> Core:
        return Core(node.number, SHARED, LONGEST, assumed_bytes)

    def send(
        self, source: int, target: int, message: Message, entries: tuple[Entry, ...] = ()
    ) -> None:
        self.out.append(Parcel(NODES[source], NODES[target], message, entries))

    def settled(self, node: LocalNode, settled: Settled) -> None:
        token: Any = settled.token  # "put 1", "read 1", "transfer" or "members"
        if token not in node.waiting:
            raise Violation(f"node {node.number} settles {settled}, which does not wait there")
        known = node.waiting.pop(token)
        self.notes.append(("settled", token, settled.outcome, settled.index, *known))

    def abandon(self, node: LocalNode) -> None:
        node.waiting = {}

    def count(self, what: str, really: bool = True) -> None:
        return

    def note(self, text: str) -> None:
        return

    def trace_event(self, node: LocalNode, event: Any) -> None:
        return

    def trace_update(self, node: LocalNode, update: Any) -> None:
        return
