"""A group of mode dledger as a model for search.py: what may happen, within a scope's bounds.

A state is (each node's state, what is in flight, what the observer knows, what is left of the
bounds), each a number of an interned value. The grain of a scope says what one transition is:

    messages    one event of one node: a message arrives, a timer ends, a sync ends, a node dies.
                What is in flight is a set: messages arrive in any order, or never; with the bound
                `twice`, again. At most `in_flight` are on their way; one may be lost at any time.
    exchanges   an event of one node and then the messages between it and some others, in order,
                until they are silent or the links break after any of them; the rest is lost. Syncs
                end at once, or later. So a whole election is one transition, and long histories
                come into reach.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from hastore.dledger.core.events import Role
from tests.dledger.oracle import Violation
from tests.explore.dledger_bench import Event
from tests.explore.dledger_events import Scope, events_of
from tests.explore.dledger_healing import heal, settle
from tests.explore.dledger_observer import Known, judge, logs_agree
from tests.explore.dledger_steps import Steps, View
from tests.explore.dledger_story import tell
from tests.explore.kit import Bounded
from tests.explore.local_states import NODES, Renaming
from tests.explore.search import Found, Label, State

EXCHANGE_MOST = 60  # messages


class Group(Bounded):
    """The model."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.bounds)
        self.scope = scope
        self.count = scope.nodes
        self._exchanges = scope.grain == "exchanges"
        self.numbers = [NODES[n] for n in range(1, scope.nodes + 1)]
        self.members = tuple(self.numbers[: scope.members or scope.nodes])
        bounds = scope.bounds
        self.steps = Steps(
            rounds="read" in bounds, replay="blocked" in bounds, left_out=scope.left_out
        )
        self._nets: dict[tuple[int, tuple[int, ...]], int | None] = {}
        self._agree: dict[tuple[int, int], bool] = {}
        self._own: dict[int, list[tuple[str, Event, str]]] = {}
        self._orbits: dict[int, int] = {}
        self._renamings: dict[tuple[int, Renaming], int] = {}
        self.met: dict[str, int] = {}  # messages that were received, by kind
        same = [[*self.members], self.numbers[len(self.members) :]]
        self._symmetries: list[Renaming] = [
            tuple(int(n) for n in (*first, *rest))
            for first in itertools.permutations(same[0])
            for rest in itertools.permutations(same[1])
        ]

    # ---- values

    def view(self, state: State, place: int) -> View:
        """Return what can be seen of a node."""
        return self.steps.views[state[place]]

    def views(self, state: State) -> list[View]:
        """Return what can be seen of each node."""
        return [self.steps.views[local] for local in state[: self.count]]

    def initial(self) -> State:
        locals_ = [self.steps.first(number, self.members) for number in self.numbers]
        left = tuple(self.scope.bounds.values())
        state = (*locals_, self.number(()), self.number(Known()), self.number(left))
        try:
            for place in range(self.count):
                state = self.step(state, place, ("start",))[0]
            return self._led(state) if self.scope.led else state
        except Violation as violation:
            raise Found(("begins",), str(violation)) from violation

    def _led(self, state: State) -> State:
        """Let the first node become leader, commit its first entry, and tell the others."""
        state = settle(self, self.step(state, 0, ("timeout",)))
        for _ in range(2):
            if self.view(state, 0).role is not Role.LEADER:
                raise Violation("node 1 asks for votes, all hear it, and it does not lead")
            state = settle(self, self.step(state, 0, ("beat",)))
        return state

    # ---- one step of one node

    def step(self, state: State, place: int, event: Event) -> tuple[State, tuple[int, ...]]:
        """Return the state after a node's step, and what it sends; raises Violation."""
        local = state[place]
        outcome = self.steps.step(local, event)
        if outcome.broken:
            raise Violation(outcome.broken)
        after = outcome.after
        if after != local:
            state = (*state[:place], after, *state[place + 1 :])
            for other in range(self.count):
                if other != place and not self._logs_agree(after, state[other]):
                    raise Violation(f"3: the logs of nodes {place + 1} and {other + 1} differ")
        if outcome.notes:
            views = dict(zip(self.numbers, self.views(state), strict=True))
            known = judge(self.named[state[-2]], outcome.notes, views[NODES[place + 1]], views,
                          self.members)  # fmt: skip
            state = (*state[:-2], self.number(known), state[-1])
        return state, outcome.sends

    def _logs_agree(self, one: int, other: int) -> bool:
        key = (one, other)
        agree = self._agree.get(key)
        if agree is None:
            views = self.steps.views
            agree = self._agree[key] = logs_agree(views[one], views[other])
        return agree

    def _used(self, state: State, name: str) -> int:
        """Return how often an event of a bound has happened."""
        return (self.scope.bounds[name] or 0) - (self.named[state[-1]][self._bounds[name]] or 0)

    def _sent(self, state: State, sends: tuple[int, ...], taken: int | None = None) -> State | None:
        """Return the state with messages in flight, without `taken`; None if they are too many."""
        key = (state[-3], sends if taken is None else (*sends, -1 - taken))
        if key not in self._nets:
            flying = set(self.named[state[-3]])
            flying.discard(taken)
            flying.update(sends)
            many = len(flying) > self.scope.in_flight
            self._nets[key] = None if many else self.number(tuple(sorted(flying)))
        net = self._nets[key]
        return None if net is None else (*state[:-3], net, *state[-2:])

    # ---- what may happen

    def _events(self, local: int) -> list[tuple[str, Event, str]]:
        """Return (kind, event, bound) of what a node may do by itself in a state of it."""
        known = self._own.get(local)
        if known is None:
            found = list(events_of(self.steps.views[local], self.numbers))
            known = self._own[local] = [one for one in found if one[2] in self._bounds]
        return known

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        for place in range(self.count):
            for kind, event, bound in self._events(state[place]):
                paid = self.spend(state, bound)
                if paid is None or (kind == "disk lost" and not self._may_lose(state, place)):
                    continue
                yield from self._happens(paid, (kind, place, event))
            yield from self._client(state, place)
        if not self._exchanges:
            yield from self._network(state)

    def _may_lose(self, state: State, place: int) -> bool:
        """More than half of each node's members remember."""
        views = self.views(state)
        gone = {view.node for view in views if not view.remembers} | {NODES[place + 1]}
        return all(2 * len(gone & set(v.group.members)) < len(v.group.members) for v in views)

    def _client(self, state: State, place: int) -> Iterator[tuple[Label, State]]:
        view = self.view(state, place)
        if view.role is not Role.LEADER:
            return
        if view.serves and (paid := self.spend(state, "put")) is not None:
            event: Event = ("put", self._used(state, "put") + 1)
            yield from self._happens(paid, ("put", place, event))
        if (paid := self.spend(state, "read")) is not None:
            event = ("read", self._used(state, "read") + 1, self.named[state[-2]].told)
            yield from self._happens(paid, ("read", place, event))

    def _happens(self, state: State, label: Label) -> Iterator[tuple[Label, State]]:
        """Yield what comes of a node's own event."""
        _, place, event = label
        try:
            after, sends = self.step(state, place, event)
            if event[0] in ("dies", "wiped"):
                yield from self._ended(after, place, label)
                return
            if event[0] == "start":
                after, sends = self.linked(after, place, sends)
        except Violation as violation:
            raise Found(label, str(violation)) from violation
        if self._exchanges:
            yield from self._exchange(after, place, label, sends)
            return
        yield from self._within(self._sent(after, sends), label)
        yield from self._torn(state, place, label, event)

    def _within(self, after: State | None, label: Label) -> Iterator[tuple[Label, State]]:
        if after is not None:
            terms = self.scope.terms
            if all(self.steps.views[local].term <= terms for local in after[: self.count]):
                yield label, after

    def _torn(
        self, state: State, place: int, label: Label, event: Event
    ) -> Iterator[tuple[Label, State]]:
        """Yield the states in which the node dies within a step."""
        paid = self.spend(state, "torn")
        if paid is None:
            return
        for effect in range(1, self.steps.step(state[place], event).effects + 1):
            torn = ("dies within", place, ("dies at", effect, *event))
            try:
                after, sends = self.step(paid, place, ("dies at", effect, *event))
            except Violation as violation:
                raise Found(torn, str(violation)) from violation
            yield from self._within(self._sent(after, sends), torn)

    def _ended(self, state: State, place: int, label: Label) -> Iterator[tuple[Label, State]]:
        """A node has died: the others notice it at once, or not before it is back."""
        if label[2][0] == "wiped":  # a new store has a new id: what the old one sent is refused
            flying = self.named[state[-3]]
            kept = tuple(m for m in flying if self.steps.messages[m].source != place + 1)
            state = (*state[:-3], self.number(kept), *state[-2:])
        yield from self._within(state, (*label, "unnoticed"))
        sent: tuple[int, ...] = ()
        for other in range(self.count):
            if other != place and self.view(state, other).up:
                state, sends = self.step(state, other, ("link", place + 1, False))
                sent += sends
        yield from self._within(self._sent(state, sent), (*label, "noticed"))

    def linked(
        self, state: State, place: int, sends: tuple[int, ...]
    ) -> tuple[State, tuple[int, ...]]:
        """A node has started: the others open their links to it anew."""
        for other in range(self.count):
            if other != place and self.view(state, other).up:
                state, more = self.step(state, other, ("link", place + 1, True))
                sends += more
        return state, sends

    def _network(self, state: State) -> Iterator[tuple[Label, State]]:
        twice = self.spend(state, "twice")
        for number in self.named[state[-3]]:
            parcel = self.steps.messages[number]
            place = parcel.target - 1
            lost = self._sent(state, (), number)
            assert lost is not None
            yield ("lost", number), lost
            if not self.view(state, place).up:
                continue
            label, event = (parcel.kind, number), ("receive", number)
            try:
                after, sends = self.step(state, place, event)
                yield from self._within(self._sent(after, sends, number), label)
                if twice is not None:
                    again, _ = self.step(twice, place, event)
                    yield from self._within(self._sent(again, sends), ("twice", number))
            except Violation as violation:
                raise Found(label, str(violation)) from violation
            yield from self._torn(lost, place, label, event)

    # ---- exchanges

    def _exchange(
        self, state: State, place: int, label: Label, sends: tuple[int, ...]
    ) -> Iterator[tuple[Label, State]]:
        """Yield the states after each message between a node and some others."""
        yield from self._within(state, (*label, (), False, 0))
        others = [n for n in range(self.count) if n != place]
        for count in range(1, len(others) + 1) if sends else ():
            for reached in itertools.permutations(others, count):
                for synced in (True, False):
                    yield from self._talk(state, place, (*label, reached, synced), sends)

    def _talk(
        self, state: State, place: int, label: Label, sends: tuple[int, ...]
    ) -> Iterator[tuple[Label, State]]:
        linked = [place, *label[-2]]  # between two links, the order of messages is this one
        messages, views = self.steps.messages, self.steps.views
        queue: deque[int] = deque()

        def put(sends: tuple[int, ...]) -> None:
            between = [
                (linked.index(messages[one].target - 1), one)
                for one in sends
                if messages[one].source - 1 in linked and messages[one].target - 1 in linked
            ]
            between.sort(key=lambda found: found[0])
            queue.extend(one for to, one in between if views[state[linked[to]]].up)

        put(sends)
        synced = "synced" in self.scope.bounds and label[-1]
        for done in range(1, EXCHANGE_MOST + 1):
            if not queue:
                return
            number = queue.popleft()
            to = messages[number].target - 1
            kind = messages[number].kind
            self.met[kind] = self.met.get(kind, 0) + 1
            try:
                state, sends = self.step(state, to, ("receive", number))
                put(sends)
                for each in linked if synced else ():
                    if views[state[each]].syncing:
                        state, sends = self.step(state, each, ("persisted",))
                        put(sends)
            except Violation as violation:
                raise Found((*label, done), str(violation)) from violation
            yield from self._within(state, (*label, done))

    # ---- symmetry

    def _orbit(self, local: int) -> int:
        """Return a number that states have in common which differ in the others' numbers only."""
        known = self._orbits.get(local)
        if known is None:
            own = self.steps.views[local].node
            first = 1 if own in self.members else len(self.members) + 1
            found = [self.steps.renamed(local, r) for r in self._symmetries if r[own - 1] == first]
            known = min(found)
            for one in found:
                self._orbits[one] = known
            self._orbits[local] = known
        return known

    def canonical(self, state: State) -> State:
        orbits = [self._orbit(local) for local in state[: self.count]]
        if len(self.members) == self.count and all(
            orbits[n] < orbits[n + 1] for n in range(self.count - 1)
        ):
            return state
        found = []
        for renaming in self._symmetries:
            placed = [0] * self.count
            for place, new in enumerate(renaming):
                placed[new - 1] = orbits[place]
            found.append((placed, renaming))
        least = min(found)[0]
        return min(self.renamed(state, r) for placed, r in found if placed == least)

    def renamed(self, state: State, renaming: Renaming) -> State:
        """Return the state with other numbers for the nodes."""
        placed = [0] * self.count
        for place, new in enumerate(renaming):
            placed[new - 1] = self.steps.renamed(state[place], renaming)
        net, known = state[-3], state[-2]
        key = (net, renaming)
        if key not in self._renamings:
            found = [self.steps.renamed_message(m, renaming) for m in self.named[net]]
            self._renamings[key] = self.number(tuple(sorted(found)))
        other = (known, renaming)
        if other not in self._renamings:
            self._renamings[other] = self.number(self.named[known].renamed(renaming))
        return (*placed, self._renamings[key], self._renamings[other], state[-1])

    # ---- what search.py asks

    def probe(self, state: State) -> None:
        heal(self, state)

    def missing(self, kinds: dict[str, int]) -> list[str]:
        return sorted(self.scope.due - kinds.keys() - self.met.keys())

    def tell(self, state: State, label: Label, after: State | None) -> str:
        return tell(self, state, label, after)
