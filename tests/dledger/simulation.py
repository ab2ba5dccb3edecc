"""A DLedger group in one thread: the product's core over simulated disks, links, clocks and faults.

Each node runs the real `DLedgerCore`; SimNode does what a driver must do with its updates, in their
order, and may die before each of their parts. The world is a queue of events in simulated time:
messages that arrive, ticks, syncs that end, clients, and faults. All of it follows from one seed.
The Oracle (oracle.py) judges each effect. After the faults the group must heal: `World.heal`.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.election import TENURE_MOST
from hastore.dledger.core.events import (
    OUTCOMES,
    ChangeMembers,
    DiskFull,
    Event,
    HardState,
    LinkChanged,
    OwnEntry,
    Persisted,
    Propose,
    ReadIndex,
    Receive,
    ReplayBlocked,
    Retained,
    Role,
    Settings,
    Settled,
    Start,
    TakenEntries,
    Tick,
    Transfer,
    Update,
)
from hastore.protocol.dledger import (
    AppendRequest,
    InstallRequest,
    MemberSet,
    Message,
    PushResponse,
)
from tests.dledger.oracle import Oracle, Put, Read, Violation
from tests.dledger.sim_disk import Entry, Members, SimDisk, size_of

HEALED_WITHIN_MS = 5_000.0  # until writes resume and logs are equal
TRACE_LINES = 80
OLD_MESSAGES = 20  # of each kind


class Crash(BaseException):
    """A node's process dies here. Not an Exception: no code of the node may catch it."""

    def __init__(self, node: SimNode) -> None:
        super().__init__(f"node {node.number} dies")
        self.node = node


@dataclass(frozen=True)
class Plan:
    """What a seed's walk is like."""

    members: int = 3
    spares: int = 0
    settings: Settings = Settings()
    preferences: tuple[int, ...] = ()  # whom the nodes 1, 2, ... prefer; else what the settings say
    chaos_ms: float = 2_500.0
    fault_every_ms: float = 60.0
    put_every_ms: float = 12.0
    delay_ms: float = 1.0
    slow: float = 0.0  # the share of messages that come much later than the others
    ordered: bool = True  # messages of one link stay in order
    loss: float = 0.0
    twice: float = 0.0
    crash: float = 0.0  # at each effect
    sync_ms: float = 1.0
    drift: float = 0.0
    faults: tuple[str, ...] = ()
    last: str = "idle"  # the stage after the healing


def _kind_of(now: MemberSet, new: MemberSet) -> str:
    """Return what a new member list does."""
    if set(new.members) - set(now.members):
        return "promoted"
    if set(new.learners) - set(now.learners):
        return "learner replaces" if new.leaving else "learner added"
    if set(now.learners) - set(new.learners):
        return "learner withdrawn"
    return "replaced" if now.leaving and not new.leaving else "member removed"


class SimNode:
    """A node: its disk, its clock, and while it is up its core."""

    def __init__(self, world: World, number: int, members: Members) -> None:
        self.world = world
        self.number = number
        self.first_members = members  # of its configuration
        self.disk = SimDisk(members)
        self.lost_disk: SimDisk | None = None  # wiped: what it had acknowledged before
        self.rate = 1.0 + world.rng.uniform(-world.plan.drift, world.plan.drift)
        self.offset_ms = world.rng.uniform(0.0, 10_000.0)
        self.life = 0
        self.up = False
        self.paused_until = 0.0
        self.sync_ms = world.plan.sync_ms
        self.full = False
        self.blocked = False  # replay: what a leader appends from now on is in no queue
        self.opened = 0  # the last term in which replay has reached the log's end
        self.committed = -1
        self.core: DLedgerCore
        self.ticks = 0  # number of the tick that counts
        # Of the sync that runs: the log's end when it began, what was not cut since, the cuts.
        self.syncing: tuple[int, int, int] | None = None
        self.sync_again = False

    # ---- what the Oracle asks

    @property
    def core_term(self) -> int:
        return self.core.term

    @property
    def role(self) -> Role:
        return self.core.role

    def leads(self, term: int) -> bool:
        return self.up and self.role is Role.LEADER and self.core_term == term

    def has_or_had(self, index: int, entry: Entry) -> bool:
        """Whether the entry is durable here, or was before a wipe that is not yet made good."""
        if self.disk.holds(index, entry):
            return True
        return self.lost_disk is not None and self.lost_disk.holds(index, entry)

    # ---- time

    def local_ms(self) -> float:
        return self.offset_ms + self.rate * self.world.now

    def _schedule_tick(self, deadline_ms: float | None) -> None:
        self.ticks += 1
        if deadline_ms is None:
            return
        world = self.world
        late = world.rng.choice((0.0, 0.0, 1.0, 5.0))
        at = max(world.now, (deadline_ms - self.offset_ms) / self.rate) + late + 0.01
        world.at(at, self._tick, self.life, self.ticks)

    def _tick(self, life: int, number: int) -> None:
        if self.up and self.life == life and self.ticks == number:
            self.step(Tick(self.local_ms()))

    # ---- the process

    def start(self) -> None:
        world, disk = self.world, self.disk
        world.told_down -= {(self.number, peer) for peer in world.numbers}
        self.life += 1
        self.up = True
        self.syncing, self.sync_again = None, False
        disk.durable = disk.end  # the recovery syncs what it found
        world.oracle.starts(self)
        self.committed = min(disk.checkpoint, disk.end)
        self.core = world.make_core(self)
        world.note(f"{self.number} starts {disk.hard} {disk.begin}..{disk.end} {disk.members}")
        self.step(
            Start(
                self.local_ms(),
                disk.hard,
                disk.log_state(),
                self.committed,
                self.first_members,
                disk.remembers,
                disk.member_lists,
                disk.removed,
            )
        )
        if self.blocked:
            self.step(ReplayBlocked(self.local_ms(), True))

    def block_replay(self, blocked: bool) -> None:
        """Stop replay, or let it go on, over restarts too: it is a disk that does so."""
        self.blocked = blocked
        if self.up:
            self.step(ReplayBlocked(self.local_ms(), blocked))

    @property
    def serves(self) -> bool:
        """Whether this leader takes puts, as a driver does: once replay has been at the end."""
        if not self.blocked:
            self.opened = self.core_term
        return self.opened == self.core_term and self.core.refusal() is None

    def die(self) -> None:
        self.up = False
        self.full = False
        self.paused_until = 0.0
        self.world.abandon(self)

    def step(self, event: Event, taken: tuple[Entry, ...] = ()) -> None:
        """Give the core an event and do what it says."""
        self.world.trace_event(self, event)
        update = self.core.step(event)
        self._apply(update, event, taken)

    def _effect(self) -> None:
        world = self.world
        if world.plan.crash and world.chaos and world.rng.random() < world.plan.crash:
            raise Crash(self)

    def _apply(self, update: Update, event: Event, taken: tuple[Entry, ...]) -> None:
        world, disk, oracle = self.world, self.disk, self.world.oracle
        world.trace_update(self, update)
        if update.contradiction is not None:
            raise Violation(f"node {self.number}: {update.contradiction}")
        if update.hard_state is not None:
            self._effect()
            oracle.hard_state(self, update.hard_state)
            self.save(update.hard_state)
            if disk.remembers and self.lost_disk is not None:
                oracle.recalls(self)
                self.lost_disk = None
                world.count("recalled")
            self._effect()
        oracle.role(self)
        if self.role is Role.LEADER and not self.blocked:
            self.opened = self.core_term
        if update.truncate_from is not None:
            self._effect()
            oracle.truncates(self, update.truncate_from)
            world.count("truncated")
            self.truncate(update.truncate_from)
            if self.syncing is not None:
                end, kept, cuts = self.syncing
                self.syncing = end, min(kept, update.truncate_from - 1), cuts
            self._effect()
        if update.member_lists is not None:
            self._effect()
            disk.member_lists = update.member_lists
            self._effect()
        if update.removed:
            disk.removed = self.core.removed
        self._change_log(update, event, taken)
        if update.flush:
            self._sync()
        if update.committed_index is not None:  # before the messages that say so
            oracle.commits(self, self.committed, update.committed_index)
            self.commit(update.committed_index)
        for peer, message in update.messages:
            self._effect()
            self._send(peer, message)
        for settled in update.settled:
            world.settled(self, settled)
        oracle.members(self)
        self._schedule_tick(update.deadline_ms)

    def _change_log(self, update: Update, event: Event, taken: tuple[Entry, ...]) -> None:
        world, disk, oracle = self.world, self.disk, self.world.oracle
        if update.install is not None:
            self._effect()
            index, pos, term = update.install
            assert isinstance(event, Receive) and isinstance(event.message, InstallRequest)
            message = event.message
            group = MemberSet(message.members, message.learners, message.leaving)
            oracle.installs(self, index, group)
            world.count("installed")
            self.install(index, pos, term, group)
            self.syncing = None
            self._effect()
        for each in update.append:
            self._effect()
            if isinstance(each, OwnEntry):
                oracle.own_entry(self, each.group)
                if each.group is not None:
                    world.count(_kind_of(disk.group, each.group))
                self.append_own(each)
                oracle.appended(self, disk.end)
                continue
            assert isinstance(event, Receive) and isinstance(event.message, AppendRequest)
            self.append_taken(event.message, each, taken)

    def append_taken(
        self, request: AppendRequest, what: TakenEntries, taken: tuple[Entry, ...]
    ) -> None:
        """Append entries of a leader behind the log's end."""
        disk = self.disk
        first = request.prev_index + 1 + what.skip
        pos = request.pos + sum(size_of(entry) for entry in taken[: what.skip])
        if (first, pos) != (disk.end + 1, disk.end_pos):
            raise Violation(f"node {self.number}: {request} behind {disk.end} at {disk.end_pos}")
        for entry in taken[what.skip :]:
            disk.append(entry)
            self.world.oracle.appended(self, disk.end)
        assert disk.end == what.last_index, (disk.end, what)

    def _sync(self) -> None:
        """Start a sync, or another one when the present one is over."""
        if self.syncing is not None:
            self.sync_again = True
            return
        self.syncing = self.disk.end, self.disk.end, self.core.cuts
        world = self.world
        world.after(world.rng.expovariate(1.0 / self.sync_ms), self._synced, self.life)

    def _synced(self, life: int) -> None:
        if not self.up or self.life != life:
            return
        syncing, self.syncing = self.syncing, None
        if syncing is None:  # the log was set aside meanwhile
            self._sync()
            return
        end, kept, cuts = syncing
        self.disk.durable = max(self.disk.durable, kept)
        if self.sync_again:
            self.sync_again = False
            self._sync()
        self.step(Persisted(self.local_ms(), end, cuts))

    def _send(self, peer: int, message: Message) -> None:
        self.world.oracle.sends(self, peer, message)
        world = self.world
        if isinstance(message, PushResponse) and world.readers_rng.random() < world.readers:
            message = msgspec.structs.replace(message, readers=True)
            world.count("readers")
        for part, entries in self.filled(message):
            self.world.send(self.number, peer, part, entries)

    # ---- what the disk does

    def save(self, state: HardState) -> None:
        self.disk.hard = state

    def append_put(self, term: int, token: int, count: int) -> None:
        for _ in range(count):
            self.disk.append((term, token))
            self.world.oracle.appended(self, self.disk.end)

    def append_own(self, own: OwnEntry) -> None:
        self.disk.append_own(own)

    def truncate(self, index: int) -> None:
        self.disk.truncate(index)

    def install(self, index: int, pos: int, prev_term: int, group: MemberSet) -> None:
        self.disk.install(index, pos, prev_term, group)

    def commit(self, index: int) -> None:
        self.committed = index

    def retain(self, limit: int) -> bool:
        """Remove entries, at most those below `limit`; return whether any were."""
        disk = self.disk
        disk.retain(self.world.rng.randint(disk.begin + 1, limit))
        self.world.guard(lambda: self.step(Retained(self.local_ms(), disk.begin)))
        return True

    def lose_power(self) -> int:
        """Lose any part of what is not synced; return how many entries."""
        return self.disk.lose_power(self.world.rng)

    def wipe(self) -> None:
        """Begin with an empty disk."""
        if self.lost_disk is None:
            self.lost_disk = self.disk
        self.disk = SimDisk(self.first_members)
        self.disk.hard = HardState(0, None, remembers=False)

    def lose_end(self, index: int) -> None:
        """Find the log cut at `index`, without a limits page: as EntryStore opens it then."""
        self.lost_disk = copy.deepcopy(self.disk)
        self.disk.drop_from(index)
        self.disk.durable = min(self.disk.durable, index - 1)
        self.disk.hard = dataclasses.replace(self.disk.hard, remembers=False)

    def filled(self, message: Message) -> Iterator[tuple[Message, tuple[Entry, ...]]]:
        """Yield a message with what only the store knows of it, and the entries that it carries."""
        if isinstance(message, AppendRequest):
            entries = self.entries_of(message)
            pos = self.disk.pos_at(message.prev_index + 1)
            size = sum(size_of(entry) for entry in entries)
            yield msgspec.structs.replace(message, pos=pos, size=size), entries
        elif isinstance(message, InstallRequest):
            yield msgspec.structs.replace(message, pos=self.disk.pos_at(message.index)), ()
        else:
            yield message, ()

    def entries_of(self, message: AppendRequest) -> tuple[Entry, ...]:
        """Read what an AppendRequest carries; the core knows its terms."""
        disk, first = self.disk, message.prev_index + 1
        last = message.prev_index + sum(count for _, count in message.runs)
        if not disk.begin <= first <= last <= disk.end:
            raise Violation(f"node {self.number} sends {first} to {last}: {message}")
        if disk.runs(first, last) != message.runs:
            raise Violation(f"node {self.number} has terms {disk.runs(first, last)}: {message}")
        if disk.term_at(message.prev_index) != message.prev_term:
            raise Violation(f"node {self.number} has another prev_term than {message}")
        entries = tuple(disk.entry(index) for index in range(first, last + 1))
        lists = [(first + n, e[1]) for n, e in enumerate(entries) if isinstance(e[1], MemberSet)]
        if lists != message.member_sets():
            raise Violation(f"node {self.number} has the lists {lists}: {message}")
        return entries

    def receive(self, peer: int, message: Message, entries: tuple[Entry, ...]) -> None:
        self.step(Receive(self.local_ms(), peer, message), entries)


class World:
    """One walk: the group, what is in flight, the clients, the faults, and the Oracle."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng = random.Random(seed)
        self.readers = 0.0  # how often an answer says that readers wait
        self.readers_rng = random.Random(seed ^ 0x9EAD)  # the other choices stay what they are
        self.plan = plan
        self.now = 0.0
        self.chaos = True
        self.loss, self.twice, self.slow = plan.loss, plan.twice, plan.slow
        self.ordered = plan.ordered
        self.queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers_of_events = itertools.count()
        self.tokens = itertools.count(1)
        first = tuple(range(1, plan.members + 1))
        self.oracle = Oracle(first)
        self.cuts: set[tuple[int, int]] = set()  # (from, to): nothing comes through
        self.told_down: set[tuple[int, int]] = set()  # (node, peer): the node knows
        self.arrived: dict[tuple[int, int], float] = {}  # of ordered links
        self.old: dict[str, list[tuple[int, int, Message, tuple[Entry, ...]]]] = {}
        self.counts: dict[str, int] = {}
        self.trace: list[str] = []
        self.waiting: dict[int, int] = {}  # token -> node, of puts and reads
        # Of each token what the operator asked for, the outcome and its reason.
        self.operations: dict[int, list[str]] = {}
        spares = range(plan.members + 1, plan.members + plan.spares + 1)
        self.numbers = [*first, *spares]
        self.nodes = {number: self.make_node(number, first) for number in self.numbers}
        self.oracle.nodes = self.nodes

    def begin(self) -> None:
        """Start all nodes, the clients and the faults."""
        self.start_all()
        self.client()
        self.after(100.0, self.fault)

    def start_all(self) -> None:
        for node in self.nodes.values():
            self.guard(node.start)
        for one, other in itertools.permutations(self.numbers, 2):
            self.link_changed(one, other, up=True)

    def make_node(self, number: int, members: Members) -> SimNode:
        return SimNode(self, number, members)

    def make_core(self, node: SimNode) -> DLedgerCore:
        def log_bytes(first: int, last: int) -> int:
            return node.disk.pos_at(last + 1) - node.disk.pos_at(first)

        settings, preferences = self.plan.settings, self.plan.preferences
        if node.number <= len(preferences):
            preferred = preferences[node.number - 1]
            settings = dataclasses.replace(settings, preferred_leader=preferred)
        return DLedgerCore(node.number, settings, self.rng, log_bytes)

    # ---- events in time

    def at(self, time_ms: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.queue, (time_ms, next(self.numbers_of_events), call, args))

    def after(self, delay_ms: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_ms, call, *args)

    def run(self, until_ms: float, done: Callable[[], bool] | None = None) -> bool:
        """Let time pass; return whether `done` came true."""
        while self.queue and self.queue[0][0] <= until_ms:
            time_ms, _, call, args = heapq.heappop(self.queue)
            self.now = max(self.now, time_ms)
            owner = getattr(call, "__self__", None)
            if isinstance(owner, SimNode) and owner.paused_until > self.now:
                self.at(owner.paused_until, call, *args)
                continue
            self.guard(call, *args)
            if done is not None and done():
                return True
        self.now = until_ms
        return False

    def guard(self, call: Callable[..., None], *args: Any) -> None:
        """Make a call; a node that dies in it is restarted later."""
        try:
            call(*args)
        except Crash as crash:
            node = crash.node
            self.count("crash")
            self.note(f"{node.number} dies at an effect")
            self.kill(node, power=self.rng.random() < 0.5)

    def kill(self, node: SimNode, *, power: bool) -> None:
        node.die()
        if power:
            self.count("power cut")
            if node.lose_power():
                self.count("unsynced entries lost")
        for other in self.numbers:
            self.link_changed(other, node.number, up=False)
        self._for_a_while(self.restart, node)

    def restart(self, node: SimNode) -> None:
        if node.up:
            return
        node.start()
        for other in self.numbers:
            self.link_changed(other, node.number, up=True)
            self.link_changed(node.number, other, up=True)

    def link_changed(self, node: int, peer: int, *, up: bool) -> None:
        """Tell a node of its link, if the other is there."""
        one, other = self.nodes[node], self.nodes[peer]
        if up:
            self.told_down.discard((node, peer))
        elif one is not other:
            self.told_down.add((node, peer))
        if one is not other and one.up and (other.up or not up):
            self.guard(lambda: one.step(LinkChanged(one.local_ms(), peer, up)))

    # ---- messages

    def send(
        self, source: int, target: int, message: Message, entries: tuple[Entry, ...] = ()
    ) -> None:
        rng = self.rng
        kept = self.old.setdefault(type(message).__name__, [])
        if len(kept) < OLD_MESSAGES:
            kept.append((source, target, message, entries))
        elif rng.random() < 0.3:
            kept[rng.randrange(OLD_MESSAGES)] = (source, target, message, entries)
        if (source, target) in self.cuts:
            return
        if self.loss and rng.random() < self.loss:
            self.count("lost")
            return
        self._in_flight(source, target, message, entries)
        if self.twice and rng.random() < self.twice:
            self.count("twice")
            self._in_flight(source, target, message, entries)

    def _in_flight(
        self, source: int, target: int, message: Message, entries: tuple[Entry, ...]
    ) -> None:
        rng = self.rng
        mean = self.plan.delay_ms  # at most 5 times as long: a healthy group keeps its leader
        delay = 0.05 + min(rng.expovariate(1.0 / mean), 5.0 * mean)
        if self.slow and rng.random() < self.slow:
            self.count("slow")
            delay += rng.choice((20.0, 150.0, 800.0))
        at = self.now + delay
        if self.ordered:
            at = self.arrived[source, target] = max(at, self.arrived.get((source, target), 0.0))
        self.at(at, self._deliver, source, target, message, entries)

    def _deliver(
        self, source: int, target: int, message: Message, entries: tuple[Entry, ...]
    ) -> None:
        node = self.nodes[target]
        if node.paused_until > self.now:
            self.at(node.paused_until, self._deliver, source, target, message, entries)
        elif node.up and (source, target) not in self.cuts:
            node.receive(source, message, entries)

    # ---- clients

    def client(self) -> None:
        """Put or read on some node, mostly on a leader, and come again."""
        if self.chaos:
            self.after(self.rng.expovariate(1.0 / self.plan.put_every_ms), self.client)
        leaders = [node for node in self.nodes.values() if node.up and node.role is Role.LEADER]
        everyone = [node for node in self.nodes.values() if node.up]
        nodes = leaders if leaders and self.rng.random() < 0.9 else everyone
        if not nodes:
            return
        node = self.rng.choice(nodes)
        if node.paused_until > self.now:
            return
        if self.rng.random() < 0.2:
            self.read(node)
        else:
            self.put(node, self.rng.choice((1, 1, 1, 2, 5)))

    def guarded_put(self, node: SimNode) -> Put | None:
        """Put; None if the node refuses or dies."""
        done: list[Put | None] = [None]

        def put() -> None:
            done[0] = self.put(node, self.rng.choice((1, 2, 5)))

        self.guard(put)
        return done[0]

    def put(self, node: SimNode, count: int = 1) -> Put | None:
        """Put `count` entries as one put; None if the node refuses."""
        if not node.serves:
            self.count("put refused")
            return None
        assert not node.full
        token = next(self.tokens)
        disk, term = node.disk, node.core_term
        first = disk.end + 1
        put = Put(token, node.number, term, first, first + count - 1, self.now, self.oracle.acked)
        self.oracle.puts[token] = put
        self.waiting[token] = node.number
        node.append_put(term, token, count)
        self.count("put")
        node._effect()
        node.step(Propose(node.local_ms(), count, token))
        return put

    def read(self, node: SimNode) -> Read:
        token = next(self.tokens)
        floor = max(self.oracle.acked, self.oracle.read_up_to)
        read = self.oracle.reads[token] = Read(token, node.number, self.now, floor)
        self.waiting[token] = node.number
        self.count("read")
        node.step(ReadIndex(node.local_ms(), token))
        return read

    def settled(self, node: SimNode, settled: Settled) -> None:
        """Take an outcome that a core has told its client."""
        assert isinstance(settled.token, int)
        token, outcome = settled.token, settled.outcome
        if outcome not in OUTCOMES:
            raise Violation(f"unknown outcome {settled}")
        if self.waiting.get(token) != node.number:
            raise Violation(f"node {node.number} settles {settled}, which does not wait there")
        del self.waiting[token]
        self.count(f"settled {outcome}")
        if token in self.oracle.puts:
            self.oracle.put_ended(self.oracle.puts[token], outcome, settled.index, self.now)
            self.count("acked", outcome == "COMMITTED")
        elif token in self.oracle.reads:
            self.oracle.read_ended(self.oracle.reads[token], outcome, settled.index)
            self.count("read answered", outcome == "COMMITTED")
        else:
            self.operations[token][1:] = outcome, settled.reason

    def abandon(self, node: SimNode) -> None:
        """Forget what waited on a node that dies: its clients do not know the outcome."""
        for token in [token for token, at in self.waiting.items() if at == node.number]:
            del self.waiting[token]

    # ---- what is recorded

    def count(self, what: str, really: bool = True) -> None:
        if really:
            self.counts[what] = self.counts.get(what, 0) + 1

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now:9.2f} {text}")
        if len(self.trace) > 4 * TRACE_LINES:
            del self.trace[: 2 * TRACE_LINES]

    # ---- faults

    def fault(self) -> None:
        """Let one fault happen, and come again."""
        if not self.chaos:
            return
        self.after(self.rng.expovariate(1.0 / self.plan.fault_every_ms), self.fault)
        name = self.rng.choice(self.plan.faults)
        node = self.nodes[self.rng.choice(self.numbers)]
        if self.rng.random() < 0.5:  # leaders make the more interesting victims
            leaders = [n for n in self.nodes.values() if n.up and n.role is Role.LEADER]
            node = self.rng.choice(leaders or [node])
        if getattr(self, f"do_{name}")(node):
            self.count(name)
            self.note(f"fault {name} {node.number}")

    def _for_a_while(self, call: Callable[..., None], *args: Any) -> None:
        long = self.plan.settings.election_timeout_ms  # the others elect within twice as long
        times = (0.05, 0.4, 1.5, 2.5, 2.5, 4.0, 4.0, 8.0)
        self.after(long * self.rng.choice(times), call, *args)

    def do_kill(self, node: SimNode) -> bool:
        if node.up:
            self.kill(node, power=False)
            return True
        return False

    def do_power(self, node: SimNode) -> bool:
        if node.up:
            self.kill(node, power=True)
            return True
        return False

    def do_power_of_all(self, node: SimNode) -> bool:
        if self.rng.random() < 0.3:
            for each in self.nodes.values():
                if each.up:
                    self.kill(each, power=True)
            return True
        return False

    def do_restart_all(self, node: SimNode) -> bool:
        if self.rng.random() < 0.3:
            for each in self.nodes.values():
                if each.up:
                    self.kill(each, power=False)
            return True
        return False

    def do_failed_sync(self, node: SimNode) -> bool:
        """A sync fails: its pages may be lost though they look clean; the node stops for good."""
        if node.up and node.syncing is not None:
            self.kill(node, power=True)
            return True
        return False

    def do_pause(self, node: SimNode) -> bool:
        """SIGSTOP: what comes meanwhile is handled afterwards, late."""
        if node.up and node.paused_until <= self.now:
            node.paused_until = self.now + self.rng.choice((20.0, 200.0, 900.0))
            return True
        return False

    def do_clock_jump(self, node: SimNode) -> bool:
        node.offset_ms += self.rng.choice((50.0, 500.0, 5_000.0, 1e7))
        if node.up:
            self.guard(lambda: node.step(Tick(node.local_ms())))
        return True

    def _cut(self, pairs: set[tuple[int, int]]) -> bool:
        if self.cuts and self.rng.random() < 0.8:
            return False  # too many cuts at once, and nothing happens at all
        pairs -= self.cuts
        self.cuts |= pairs
        noticed = self.rng.random() < 0.3

        def heal() -> None:
            if not self.chaos:
                return
            self.cuts -= pairs
            for source, target in sorted(pairs):
                self.link_changed(target, source, up=True)

        for node in self.nodes.values():  # what a leader takes now may have to be cut later
            while node.up and node.role is Role.LEADER and self.rng.random() < 0.7:
                if node.paused_until > self.now or self.guarded_put(node) is None:
                    break
        for source, target in sorted(pairs) if noticed else ():
            self.link_changed(target, source, up=False)
        self._for_a_while(heal)
        return True

    def do_isolate(self, node: SimNode) -> bool:
        others = [n for n in self.numbers if n != node.number]
        return self._cut({(node.number, n) for n in others} | {(n, node.number) for n in others})

    def do_halves(self, node: SimNode) -> bool:
        shuffled = self.rng.sample(self.numbers, len(self.numbers))
        at = self.rng.randrange(1, len(shuffled))
        one, other = shuffled[:at], shuffled[at:]
        pairs = {(a, b) for a in one for b in other}
        return self._cut(pairs | {(b, a) for a, b in pairs})

    def do_one_way(self, node: SimNode) -> bool:
        """What the node sends arrives nowhere, or nothing comes to it; or one link is cut."""
        others = [n for n in self.numbers if n != node.number]
        if self.rng.random() < 0.4:
            others = [self.rng.choice(others)]
        if self.rng.random() < 0.5:
            return self._cut({(node.number, n) for n in others})
        return self._cut({(n, node.number) for n in others})

    def do_reset_link(self, node: SimNode) -> bool:
        """A connection breaks and comes again; half of what was in flight is lost."""
        peer = self.rng.choice([n for n in self.numbers if n != node.number])
        ends = {(node.number, peer), (peer, node.number)}
        self.queue = [
            each
            for each in self.queue
            if each[2] != self._deliver or each[3][:2] not in ends or self.rng.random() < 0.5
        ]
        heapq.heapify(self.queue)
        for one, other in ((node.number, peer), (peer, node.number)):
            self.link_changed(one, other, up=False)
            self.link_changed(one, other, up=True)
        return True

    def do_bad_network(self, node: SimNode) -> bool:
        """All links lose, double and delay more for a while."""
        self.loss, self.twice, self.slow = 0.3, 0.2, 0.2

        def better() -> None:
            if self.chaos:
                plan = self.plan
                self.loss, self.twice, self.slow = plan.loss, plan.twice, plan.slow

        self._for_a_while(better)
        return True

    def do_old_message(self, node: SimNode) -> bool:
        """A message that was sent long ago arrives, perhaps again."""
        kinds = [kept for _, kept in sorted(self.old.items()) if kept]
        if not kinds:
            return False
        source, target, message, entries = self.rng.choice(self.rng.choice(kinds))
        for _ in range(self.rng.choice((1, 1, 2))):
            self.after(self.rng.random(), self._deliver, source, target, message, entries)
        return True

    def do_slow_disk(self, node: SimNode) -> bool:
        node.sync_ms = 150.0

        def faster() -> None:
            node.sync_ms = self.plan.sync_ms

        self._for_a_while(faster)
        return True

    def do_disk_full(self, node: SimNode) -> bool:
        if not node.up or node.full:
            return False
        node.full = True
        self.guard(lambda: node.step(DiskFull(node.local_ms(), True)))
        self._for_a_while(self._disk_free, node, node.life)
        return True

    def _disk_free(self, node: SimNode, life: int) -> None:
        if node.up and node.life == life and node.full:
            node.full = False
            node.step(DiskFull(node.local_ms(), False))

    def do_blocked_replay(self, node: SimNode) -> bool:
        """Replay stops: as leader the node could not take puts."""
        if node.blocked:
            return False
        self.guard(lambda: node.block_replay(True))
        self._for_a_while(self._replay_goes_on, node)
        return True

    def _replay_goes_on(self, node: SimNode) -> None:
        if self.chaos and node.blocked:
            node.block_replay(False)

    def do_checkpoint(self, node: SimNode) -> bool:
        if node.up and node.committed > node.disk.checkpoint:
            node.disk.checkpoint = node.committed
            return True
        return False

    def do_retain(self, node: SimNode) -> bool:
        """Remove entries that are committed and durable, perhaps all but the last."""
        disk = node.disk
        limit = min(node.committed, disk.durable) if node.up else -1
        if limit <= disk.begin:
            return False
        return node.retain(limit)

    def do_wipe(self, node: SimNode) -> bool:
        """The disk is replaced; the node comes back with its old number and an empty store."""
        gone = {n.number for n in self.nodes.values() if not n.disk.remembers} | {node.number}
        for each in self.nodes.values():
            members = each.disk.members
            if 2 * len(gone & set(members)) >= len(members):
                return False  # more than a group survives
        if node.up:
            self.kill(node, power=True)
        node.wipe()
        self.oracle.terms.pop(node.number, None)
        # A new store has a new id: nothing that the old one sent is taken for the new one's.
        mine = node.number
        self.queue = [e for e in self.queue if e[2] != self._deliver or e[3][0] != mine]
        heapq.heapify(self.queue)
        self.old = {k: [e for e in kept if e[0] != mine] for k, kept in self.old.items()}
        return True

    # ---- the operator

    def _operate(self, node: SimNode, what: str, event: Event, token: int) -> None:
        self.operations[token] = [what, "", ""]
        self.waiting[token] = node.number
        self.guard(lambda: node.step(event))

    def do_transfer(self, node: SimNode) -> bool:
        if not node.up:
            return False
        to = self.rng.choice([n for n in self.numbers if n != node.number])
        token = next(self.tokens)
        self._operate(node, f"transfer {to}", Transfer(node.local_ms(), to, token), token)
        return True

    def do_members(self, node: SimNode) -> bool:
        """Add, replace, withdraw or remove a node; sometimes ask for what must be refused."""
        if not node.up or any(not n.disk.remembers for n in self.nodes.values()):
            return False
        now, leaving = node.disk.group, ()
        members, learners = set(now.members), set(now.learners)
        one = self.rng.choice(self.numbers)
        others = [n for n in self.numbers if n not in members]
        if others and self.rng.random() < 0.5:
            one = self.rng.choice(others)
        if self.rng.random() < 0.25:
            members = set(self.rng.sample(self.numbers, self.rng.randint(1, len(self.numbers))))
            learners = set(self.rng.sample(self.numbers, self.rng.randint(0, 2)))
        elif one in members | learners:
            members.discard(one)
            learners.discard(one)
        else:
            learners.add(one)
            leaving = now.leaving
            if not (now.learners or leaving) and self.rng.random() < 0.5:
                leaving = (self.rng.choice(now.members),)
        if len(members) < 2:
            return False
        self._change(node, MemberSet(tuple(members), tuple(learners), leaving))
        return True

    def _change(self, node: SimNode, wanted: MemberSet) -> int:
        """Ask a node for a member list; return the token."""
        token = next(self.tokens)
        event = ChangeMembers(
            node.local_ms(), wanted.members, token, wanted.learners, wanted.leaving
        )
        self._operate(node, "members", event, token)
        return token

    # ---- the end of a walk

    def heal(self) -> None:
        """End all faults. Within 5 s one leader commits new puts and all logs become equal."""
        first, self.chaos = self.chaos, False
        self.loss = self.twice = self.slow = 0.0
        self.ordered = True
        self.cuts.clear()
        # What is slow on an ordered link delays all that follows on it.
        self.run(max([self.now, *self.arrived.values()]))
        self.note("healing")
        for node in self.nodes.values():
            node.paused_until = min(node.paused_until, self.now)
            node.sync_ms = self.plan.sync_ms
            if not node.up:
                self.restart(node)
            self._disk_free(node, node.life)
        for one, other in itertools.permutations(self.numbers, 2):
            if self.rng.random() < 0.5:
                self.link_changed(one, other, up=False)
            if (one, other) in self.told_down:
                self.link_changed(one, other, up=True)
        if first:
            self._heal_without_all_replays()
        began = self.now
        self._commit_again(began + HEALED_WITHIN_MS)
        if not self.run(began + HEALED_WITHIN_MS, self._together):
            raise Violation(f"healed, and not together after 5 s: {self.describe()}")
        self.count("healed")

    def _heal_without_all_replays(self) -> None:
        """Let replay stay blocked where it is, but not on all members: one that serves leads."""
        if "blocked_replay" in self.plan.faults and self.rng.random() < 0.5:
            (self.leader() or self.rng.choice(list(self.nodes.values()))).block_replay(True)
        for node in self.nodes.values():
            group = node.disk.group  # a member that is being replaced may be gone soon
            members = [self.nodes[n] for n in group.members if n not in group.leaving]
            if all(one.blocked for one in members):
                self.rng.choice(members).block_replay(False)
        if any(node.blocked for node in self.nodes.values()):
            patience_ms = 8.0 * self.plan.settings.election_timeout_ms
            self._commit_again(self.now + HEALED_WITHIN_MS + patience_ms)
            if not self.run(self.now + HEALED_WITHIN_MS, self._a_leader_serves):
                raise Violation(f"a node leads that cannot serve: {self.describe()}")
            self.count("healed beside a blocked replay")
        for node in self.nodes.values():
            if node.blocked:
                node.block_replay(False)

    def _a_leader_serves(self) -> bool:
        leader = self.leader()
        return leader is not None and not leader.blocked

    def _commit_again(self, until_ms: float) -> None:
        """Let a new put be acknowledged before `until_ms`."""
        tried: list[Put] = []

        def client() -> None:
            if not any(put.outcome == "COMMITTED" for put in tried):
                self.after(20.0, client)
                leaders = [n for n in self.nodes.values() if n.up and n.role is Role.LEADER]
                for node in leaders:
                    put = self.put(node)
                    tried.extend([put] if put is not None else [])

        client()
        if not self.run(until_ms, lambda: any(p.outcome == "COMMITTED" for p in tried)):
            raise Violation(f"healed, and no put is acknowledged: {self.describe()}")

    def leader(self) -> SimNode | None:
        """Return the leader of the greatest term, if it is the only one."""
        leaders = [n for n in self.nodes.values() if n.up and n.role is Role.LEADER]
        return leaders[0] if len(leaders) == 1 else None

    def _together(self) -> bool:
        leader = self.leader()
        if leader is None or self.waiting or leader.disk.group != MemberSet(leader.disk.members):
            return False  # in a healthy group each learner becomes a member
        for number in leader.disk.members:
            node = self.nodes[number]
            low = max(node.disk.begin, leader.disk.begin)
            if (
                node.core_term != leader.core_term
                or (node.disk.end, node.disk.durable) != (leader.disk.end, leader.disk.end)
                or node.committed != leader.disk.end
                or node.disk.entries[low - node.disk.begin :]
                != leader.disk.entries[low - leader.disk.begin :]
                or not node.disk.remembers
            ):
                return False
        return True

    def last_stage(self) -> None:
        """In the healed group: one disturbance, and what it may and may not cause."""
        getattr(self, f"last_{self.plan.last}")()
        self.count(f"last {self.plan.last}")

    def _led(self) -> tuple[SimNode, int, list[SimNode]]:
        leader = self.leader()
        assert leader is not None
        followers = [self.nodes[n] for n in leader.disk.members if n != leader.number]
        return leader, leader.core_term, followers

    def _undisturbed(self, leader: SimNode, term: int, ms: float) -> None:
        if self.run(self.now + ms, lambda: not leader.leads(term)):
            raise Violation(f"node {leader.number} does not lead {term} any more")

    def last_idle(self) -> None:
        """A healthy group keeps its leader."""
        preferred = self.plan.settings.preferred_leader
        if self.plan.preferences:  # it may hand over once, to one that prefers itself
            self.run(self.now + 30_000.0)
            self.heal()
        elif preferred is not None and preferred in self._led()[0].disk.members:
            node = self.nodes[preferred]
            # A leader that soon led again stays for the longest tenure before it hands over.
            longest_ms = TENURE_MOST * self.plan.settings.election_timeout_ms
            until_ms = self.now + longest_ms + 30_000.0
            if not self.run(until_ms, lambda: node.role is Role.LEADER):
                raise Violation(f"node {preferred} is preferred and does not lead")
            self.heal()
        leader, term, _ = self._led()
        self._undisturbed(leader, term, 6.0 * self.plan.settings.election_timeout_ms)

    def last_follower_returns(self) -> None:
        """A follower that was cut off, or heard nothing, does not depose the leader."""
        leader, term, followers = self._led()
        node = self.rng.choice(followers)
        others = [n for n in self.numbers if n != node.number]
        self.cuts = {(n, node.number) for n in others}
        if self.rng.random() < 0.5:
            self.cuts |= {(node.number, n) for n in others}
        wait_ms = 8.0 * self.plan.settings.election_timeout_ms
        quorum_left = 2 * len(followers) > len(followers) + 1  # leader and the other followers
        if not quorum_left:
            self.cuts.clear()
        self._undisturbed(leader, term, wait_ms)
        self.cuts.clear()
        self._undisturbed(leader, term, wait_ms)
        self.heal()

    def last_leader_cut_off(self) -> None:
        """The others elect another leader; the old one steps down and its reads return nothing."""
        leader, term, followers = self._led()
        others = [n for n in self.numbers if n != leader.number]
        self.cuts = {(n, leader.number) for n in others}
        if self.rng.random() < 0.5:
            self.cuts |= {(leader.number, n) for n in others}
        stepped = self.now + 4.0 * self.plan.settings.election_timeout_ms
        read = self.read(leader)
        if not self.run(stepped, lambda: not leader.leads(term)):
            raise Violation(f"node {leader.number} is cut off and still leads {term}")
        if len(followers) > 1:
            self._commit_again(self.now + HEALED_WITHIN_MS)
        if read.outcome == "COMMITTED":
            raise Violation(f"node {leader.number} is cut off and answers a read")
        self.heal()

    def last_transfer(self) -> None:
        """The leader hands over to a follower that has all entries."""
        leader, term, followers = self._led()
        target = self.rng.choice(followers)
        self._ask(leader, lambda token: Transfer(leader.local_ms(), target.number, token))
        done = self.now + self.plan.settings.transfer_timeout_ms
        if not self.run(done, lambda: target.role is Role.LEADER and target.core_term > term):
            raise Violation(f"node {target.number} does not take over: {self.describe()}")
        self.heal()

    def _ask(self, leader: SimNode, event: Callable[[int], Event]) -> int:
        """Ask a leader as an operator who tries again when it refuses; return the token."""
        for _ in range(20):
            token = next(self.tokens)
            self._operate(leader, "last", event(token), token)
            if self.operations[token][1] != "REFUSED":
                return token
            self.run(self.now + 100.0)
        raise Violation(f"refused for 2 s: {self.operations[token]}: {self.describe()}")

    def last_removed(self) -> None:
        """A removed node does not disturb the others."""
        leader, term, followers = self._led()
        gone = self.rng.choice(followers)
        members = tuple(n for n in leader.disk.members if n != gone.number)
        token = self._ask(leader, lambda token: ChangeMembers(leader.local_ms(), members, token))
        if not self.run(self.now + 3_000.0, lambda: token not in self.waiting):
            raise Violation(f"the change of members has no end: {self.describe()}")
        if self.operations[token][1] != "COMMITTED" or leader.disk.members != members:
            raise Violation(f"node {gone.number} is not removed: {self.operations[token]}")
        learns_ms = 4.0 * self.plan.settings.election_timeout_ms
        if not self.run(self.now + learns_ms, lambda: self._knows_of_removal(gone)):
            raise Violation(f"node {gone.number} does not learn that it was removed")
        if self.rng.random() < 0.5:
            self.kill(gone, power=True)
            self.run(self.now + learns_ms)
            self.restart(gone)
        self._undisturbed(leader, term, 8.0 * self.plan.settings.election_timeout_ms)
        if not self._knows_of_removal(gone):
            raise Violation(f"node {gone.number} does not know any more that it was removed")
        self.heal()

    @staticmethod
    def _knows_of_removal(node: SimNode) -> bool:
        return node.core.removed is not None and node.role is Role.FOLLOWER

    def _outside(self) -> tuple[SimNode, SimNode, list[SimNode]]:
        """Return the leader, a node that is no member, and the followers."""
        leader, _, followers = self._led()
        outside = [self.nodes[n] for n in self.numbers if n not in leader.disk.members]
        if outside:
            return leader, self.rng.choice(outside), followers
        gone = followers.pop(self.rng.randrange(len(followers)))
        rest = tuple(n for n in leader.disk.members if n != gone.number)
        self._asked(leader, MemberSet(rest))
        return leader, gone, followers

    def _asked(self, leader: SimNode, group: MemberSet) -> None:
        """Ask for a member list, and wait until it is committed."""
        token = self._ask(
            leader,
            lambda token: ChangeMembers(
                leader.local_ms(), group.members, token, group.learners, group.leaving
            ),
        )
        self.run(self.now + 3_000.0, lambda: token not in self.waiting)
        if self.operations[token][1] != "COMMITTED":
            raise Violation(f"no change to {group}: {self.operations[token]}: {self.describe()}")

    def _fails(self, node: SimNode, leader: SimNode) -> None:
        """End a node until the healing, if the leader still has a majority without it."""
        if 2 * sum(self.nodes[n].up for n in leader.disk.members if n != node.number) > len(
            leader.disk.members
        ):
            node.die()
            for other in self.numbers:
                self.link_changed(other, node.number, up=False)

    def last_learner_dead(self) -> None:
        """A node that is down is added, and another fails: the group goes on."""
        leader, new, followers = self._outside()
        members = leader.disk.members
        new.die()
        self._asked(leader, MemberSet(members, (new.number,)))
        if followers:
            self._fails(self.rng.choice(followers), leader)
        self._commit_again(self.now + HEALED_WITHIN_MS)
        if self.rng.random() < 0.5:
            self._asked(leader, MemberSet(members))
            self.count("withdrawn while dead")
        self.heal()

    def last_replaced(self) -> None:
        """A dead member is replaced: the other node is a member in its place."""
        leader, new, followers = self._outside()
        members = leader.disk.members
        old = self.rng.choice(followers or [leader])
        if old is not leader:
            self._fails(old, leader)
        self._asked(leader, MemberSet(members, (new.number,), (old.number,)))
        wanted = MemberSet(tuple(sorted({*members, new.number} - {old.number})))

        def done() -> bool:
            return any(n.up and n.disk.group == wanted for n in (leader, new))

        if not self.run(self.now + HEALED_WITHIN_MS, done):
            raise Violation(f"node {old.number} is not replaced: {self.describe()}")
        self.heal()

    def describe(self) -> str:
        lines = []
        for node in self.nodes.values():
            disk = node.disk
            what = f"{node.role.value} of {node.core_term}" if node.up else "down"
            lines.append(
                f"{node.number}: {what}, {disk.begin}..{disk.durable}..{disk.end} (term "
                f"{disk.term_at(disk.end)}), committed {node.committed}, {disk.group}"
                + ("" if disk.remembers else ", wiped")
                + (", replay blocked" if node.blocked else "")
            )
        return "; ".join(lines) + f"; waiting {self.waiting}"

    def trace_event(self, node: SimNode, event: Event) -> None:
        if isinstance(event, Receive):
            self.note(f"{node.number} <- {event.peer} {event.message}")
        elif not isinstance(event, Tick | Start):
            self.note(f"{node.number} {event}")

    def trace_update(self, node: SimNode, update: Update) -> None:
        parts = []
        if update.hard_state is not None:
            parts.append(f"{update.hard_state}")
        if update.install is not None:
            parts.append(f"install {update.install}")
        if update.truncate_from is not None:
            parts.append(f"truncate {update.truncate_from}")
        parts += [str(each) for each in update.append]
        if update.committed_index is not None:
            parts.append(f"committed {update.committed_index}")
        parts += [str(each) for each in update.settled]
        if update.role_changed:
            self.count("elected", node.role is Role.LEADER)
            parts.append(f"{node.role.value} of {node.core_term}")
        if parts:
            self.note(f"  {node.number} {'; '.join(parts)}")


FAULTS = (
    *("kill", "power", "power_of_all", "restart_all", "failed_sync", "pause", "clock_jump"),
    *("isolate", "halves", "one_way", "reset_link", "bad_network", "old_message", "slow_disk"),
    *("disk_full", "blocked_replay", "checkpoint", "retain", "wipe", "transfer", "members"),
)
THEMES = (  # faults that are rare together, and dangerous
    ("halves", "isolate", "one_way", "old_message"),
    ("power", "power_of_all", "slow_disk", "isolate", "old_message"),
    ("members", "halves", "isolate", "kill"),
    ("wipe", "kill", "isolate", "checkpoint"),
    ("retain", "checkpoint", "isolate", "kill", "old_message"),
    ("blocked_replay", "disk_full", "kill", "halves"),
)
LAST_STAGES = (
    *("idle", "follower_returns", "leader_cut_off", "transfer", "removed"),
    *("learner_dead", "replaced"),
)


def plan_of(seed: int) -> Plan:
    """Return what the walk of a seed is like: each has its own faults, delays and sizes."""
    rng = random.Random(seed ^ 0x5EED)
    members = rng.choice((3, 3, 3, 4, 5, 5))
    faults = tuple(rng.sample(FAULTS, rng.randint(3, len(FAULTS))))
    if rng.random() < 0.5:
        faults = rng.choice(THEMES)
    delay_ms, sync_ms = rng.choice((0.3, 2.0, 8.0)), rng.choice((0.2, 2.0, 15.0))
    election_ms = rng.choice((80, 150, 150, 500) if delay_ms < 8.0 else (150, 500))
    slow = delay_ms > 2.0 or sync_ms > 2.0  # then small pushes one by one take too long
    settings = Settings(
        election_timeout_ms=election_ms,
        heartbeat_interval_ms=election_ms // rng.choice((3, 5)),
        append_timeout_ms=rng.choice((300, 2_500)),
        resend_ms=rng.choice((50, 200, 1_000)),
        pending_max=rng.choice((4, 10_000, 10_000)),
        in_flight_pushes=rng.choice((3, 64) if slow else (1, 3, 64)),
        batch_bytes=rng.choice((1_500, 1 << 20) if slow else (300, 1_500, 1 << 20)),
        transfer_gap=rng.choice((0, 1_000)),
        preferred_leader=rng.choice((None, None, None, None, 1, members)),
    )
    last = rng.choice(LAST_STAGES) if settings.preferred_leader is None else "idle"
    preferences: tuple[int, ...] = ()
    if settings.preferred_leader is not None and rng.random() < 0.5:
        preferences = tuple(rng.choices(range(1, members + 1), k=members))
    return Plan(
        members=members,
        preferences=preferences,
        spares=rng.choice((0, 1, 2)) if members < 5 else 0,
        settings=settings,
        chaos_ms=election_ms * rng.choice((12.0, 25.0)),
        fault_every_ms=election_ms * rng.choice((0.15, 0.4, 1.0, 1.6)),
        put_every_ms=election_ms * rng.choice((0.06, 0.15)),
        delay_ms=delay_ms,
        slow=rng.choice((0.0, 0.0, 0.03)),
        ordered=rng.random() < 0.5,
        loss=rng.choice((0.0, 0.02, 0.1)),
        twice=rng.choice((0.0, 0.0, 0.05)),
        crash=rng.choice((0.0, 0.0, 0.0005, 0.003)),
        sync_ms=sync_ms,
        drift=rng.choice((0.0, 0.02, 0.1)),
        faults=faults,
        last=last,
    )


def walk(seed: int, plan: Plan | None = None, world: type[World] = World) -> World:
    """Take one walk; a Violation names the seed, the plan and what happened last."""
    plan = plan or plan_of(seed)
    one = world(seed, plan)
    one.readers = 0.5
    try:
        one.begin()
        one.run(plan.chaos_ms)
        one.heal()
        one.last_stage()
        one.oracle.check_end()
    except (Violation, AssertionError, ValueError, LookupError) as error:
        tail = "\n".join(one.trace[-TRACE_LINES:])
        raise Violation(f"seed {seed}: {error}\n{plan}\n{tail}") from error
    return one
