"""A group of mode classic as a model for search.py: what may happen, within a scope's bounds.

A state is (each node's state, the links with what is in flight on them, what the observer knows,
what is left of the bounds). One transition is one input of one node: a frame or a report arrives, a
step of its own, or the answer to a call that it waits for. A call is one transition: asked and
answered, not answered, or answered and the answer lost. Between two calls of a promotion or a
rejoin anything else may happen, on this node too what its other threads do.

A node's number is a part of its epochs, and decides between two candidates of one counter. So nodes
are not alike, and no two states differ in numbers only; values are numbered in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.explore.classic_healing import BEGINS, heal
from tests.explore.classic_inputs import Input
from tests.explore.classic_node import ANSWER_LOST, LOST, Disk, Steps
from tests.explore.classic_observer import Known, check, judge
from tests.explore.classic_states import States, View
from tests.explore.classic_story import tell
from tests.explore.kit import Bounded
from tests.explore.search import Found, Label, State
from tests.ha.simulation import Violation


@dataclass(frozen=True)
class Scope:
    """The bounds of a search: how often each kind of event may happen. None: without a bound."""

    nodes: int = 2
    acks: int = 1
    flushed: bool = False
    frames: int = 1  # on their way on one link
    bounds: dict[str, int | None] = field(default_factory=dict)
    begin: str = ""  # BEGINS: how far the group is when the search begins
    due: frozenset[str] = frozenset()


class Link(NamedTuple):
    """What is on its way on a link."""

    number: int
    slave: int
    master: int
    to_slave: tuple[bytes, ...] = ()
    to_master: tuple[bytes, ...] = ()


class Group(Bounded):
    """The model."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope.bounds)
        self.scope = scope
        self.count = scope.nodes
        numbers = list(range(1, scope.nodes + 1))
        self.states = States(Steps(numbers, scope.acks, flushed=scope.flushed))
        self._fine: set[tuple[int, int]] = set()  # states of nodes that were checked
        self._own: dict[int, list[tuple[str, Input, str]]] = {}

    # ---- values

    def view(self, state: State, place: int) -> View:
        """Return what can be seen of a node."""
        return self.states.views[state[place]]

    def views(self, state: State) -> list[View]:
        """Return what can be seen of each node."""
        return [self.states.views[local] for local in state[: self.count]]

    def links(self, state: State) -> tuple[Link, ...]:
        """Return the links."""
        found: tuple[Link, ...] = self.named[state[-3]]
        return found

    def initial(self) -> State:
        locals_ = [self.states.down(n, Disk()) for n in range(1, self.count + 1)]
        left = tuple(self.scope.bounds.values())
        state = (*locals_, self.number(()), self.number(Known()), self.number(left))
        try:
            for place in range(self.count):
                state = self.take(state, place, ("start",))
            for one in BEGINS[self.scope.begin]:
                state = one(self, state)
            return state
        except Violation as violation:
            raise Found(("begins",), str(violation)) from violation

    def canonical(self, state: State) -> State:
        return state

    # ---- one input of one node

    def take(
        self, state: State, place: int, event: Input, *, dies_at: int = 0, new: Link | None = None
    ) -> State:
        """Return the state after an input of a node; `new` is a link that it opens."""
        outcome = self.states.step(state[place], event, dies_at)
        if outcome.broken:
            raise Violation(outcome.broken)
        known = state[-2]
        if outcome.notes:
            known = self.number(judge(self.named[known], outcome.notes))
        locals_ = (*state[:place], outcome.after, *state[place + 1 : self.count])
        links = self.links(state) if new is None else (*self.links(state), new)
        links = self._flowing(locals_, links, outcome.out)
        state = (*locals_, self.number(links), known, state[-1])
        self._check(state)
        return state

    def _flowing(
        self, locals_: tuple[int, ...], links: tuple[Link, ...], out: tuple[Input, ...]
    ) -> tuple[Link, ...]:
        """Return the links that an end still has, with what was just sent."""
        views, kept = self.states.views, []
        for link in links:
            slave, master = views[locals_[link.slave - 1]], views[locals_[link.master - 1]]
            sent = [(way, data) for way, number, data in out if number == link.number]
            to_slave = (*link.to_slave, *(data for way, data in sent if way == "to slave"))
            to_master = (*link.to_master, *(data for way, data in sent if way == "to master"))
            follows = slave.stream == link.number
            serves = any(number == link.number for number, _, _ in master.links)
            if follows or serves:
                kept.append(
                    link._replace(
                        to_slave=to_slave if follows else (), to_master=to_master if serves else ()
                    )
                )
        return tuple(sorted(kept))

    def _check(self, state: State) -> None:
        views, known, opened = self.states.views, state[-2], []
        for local in state[: self.count]:
            view = views[local]
            if view.open_epoch:
                opened.append(view.open_epoch)
            if view.up and (local, known) not in self._fine:
                check(view, self.named[known])
                self._fine.add((local, known))
        if len(set(opened)) < len(opened):
            raise Violation("1: two masters are open in one epoch")

    # ---- what may happen

    def _events(self, local: int) -> list[tuple[str, Input, str]]:
        known = self._own.get(local)
        if known is None:
            found = _events_of(self.states.views[local])
            known = self._own[local] = [one for one in found if one[2] in self._bounds]
        return known

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        for place in range(self.count):
            view = self.view(state, place)
            for kind, event, bound in self._events(state[place]):
                paid = self.spend(state, bound)
                if paid is not None:
                    yield from self._happens(paid, (kind, place, event))
            if view.open_epoch and (paid := self.spend(state, "put")) is not None:
                value = len(self.named[state[-2]].written) + 1
                yield from self._happens(paid, ("put", place, ("put", value)))
            if view.waits is not None:
                yield from self._answered(state, place, view)
        yield from self._flows(state)

    def _happens(self, state: State, label: Label) -> Iterator[tuple[Label, State]]:
        """Yield what comes of an input, and of the node's death within it."""
        _, place, event = label
        try:
            yield label, self.take(state, place, event)
            torn = self.spend(state, "torn") if event[0] not in ("dies", "power", "wiped") else None
            if torn is not None:
                for effect in range(1, self.states.step(state[place], event).effects + 1):
                    label = ("dies within", place, event, effect)
                    yield label, self.take(torn, place, event, dies_at=effect)
        except Violation as violation:
            raise Found(label, str(violation)) from violation

    def _answered(self, state: State, place: int, view: View) -> Iterator[tuple[Label, State]]:
        """Yield what comes of the call that a node waits for."""
        assert view.waits is not None
        number, request = view.waits
        there = self.view(state, number - 1).up
        lost = state if not there else self.spend(state, "lost")
        if lost is not None:
            yield from self._happens(lost, ("no answer", place, ("reply", LOST, 0)))
        if not there:
            return
        label: Label = ("answer", place, ("hello", request), number)
        try:
            asked, reply, link = self.answer(state, number - 1, request)
            yield label, self.reply(asked, place, reply, link)
            gone = self.spend(asked, "lost")
            if gone is not None:
                label = ("answer lost", place, ("hello", request), number)
                yield label, self.take(gone, place, ("reply", ANSWER_LOST, 0))
        except Violation as violation:
            raise Found(label, str(violation)) from violation

    def answer(self, state: State, target: int, request: int) -> tuple[State, int | None, int]:
        """Let a node answer a HELLO; return the state, its answer's number and the link's."""
        used = {link.number for link in self.links(state)}
        link = next(n for n in range(1, 100) if n not in used)
        event = ("hello", request, link)
        outcome = self.states.step(state[target], event)
        slave = self.states.steps.requests[request][1].node
        asked = self.take(state, target, event, new=Link(link, slave, target + 1))
        return asked, outcome.reply, link

    def reply(self, state: State, place: int, reply: int | None, link: int) -> State:
        """Let a node go on with the answer to its call; None: the other has closed the link."""
        if reply is None:
            return self.take(state, place, ("reply", ANSWER_LOST, 0))
        return self.take(state, place, ("reply", reply, link))

    def _flows(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield what the links bring, and what masters send on them."""
        links = self.links(state)
        for number, link in enumerate(links):
            slave, master = self.view(state, link.slave - 1), self.view(state, link.master - 1)
            follows = slave.stream == link.number
            if follows and link.to_slave and slave.busy != "follow" and not slave.stream_over:
                rest = link._replace(to_slave=link.to_slave[1:])
                yield from self._brought(
                    state, number, rest, link.slave - 1, ("receive", link.to_slave[0])
                )
            if link.to_master:
                rest = link._replace(to_master=link.to_master[1:])
                event: Input = ("report", link.number, link.to_master[0])
                yield from self._brought(state, number, rest, link.master - 1, event)
            sent = [sent for one, _, sent in master.links if one == link.number]
            if sent and follows and len(link.to_slave) < self.scope.frames:
                for size, limits in _pieces(master.end - sent[0]):
                    place, event = link.master - 1, ("send", link.number, size, limits)
                    yield from self._happens(state, ("send", place, event))

    def _brought(
        self, state: State, number: int, rest: Link, place: int, event: Input
    ) -> Iterator[tuple[Label, State]]:
        links = self.links(state)
        links = (*links[:number], rest, *links[number + 1 :])
        state = (*state[: self.count], self.number(links), *state[-2:])
        yield from self._happens(state, (event[0], place, event))

    # ---- what search.py asks

    def probe(self, state: State) -> None:
        heal(self, state)

    def missing(self, kinds: dict[str, int]) -> list[str]:
        return sorted(self.scope.due - kinds.keys())

    def tell(self, state: State, label: Label, after: State | None) -> str:
        return tell(self, state, label, after)


def _pieces(left: int) -> list[tuple[int, bool]]:
    """Return how much a master may send at once, and whether with its limits."""
    if not left:
        return [(0, True)]
    return [(left, False), (left, True), *([(1, False)] if left > 1 else [])]


def _events_of(view: View) -> Iterator[tuple[str, Input, str]]:
    """Yield (kind, input, bound) of what a node may do by itself."""
    if not view.up:
        yield "start", ("start",), "start"
        yield "disk lost", ("wiped",), "wipe"
        return
    yield "killed", ("dies",), "kill"
    for kept in range(view.disk.flushed, view.end + 1):
        for confirmed in {True, not view.disk.confirmed}:
            yield "power lost", ("power", kept, confirmed), "power"
    if view.disk.flushed < view.end:
        yield "synced", ("flush",), "flush"
    for link, _, _ in view.links:
        yield "link broken", ("break", link), "break"
    if view.waits is not None:
        return
    if not view.open_epoch:
        if view.stream is None or view.stream_over:
            yield "follow", ("follow",), "follow"
        if view.stream is not None:
            yield "link ended", ("end",), "end"
        if view.resumes:
            yield "resume", ("resume",), "resume"
    else:
        yield "demoted", ("demote",), "demote"
    yield "promote", ("promote", False), "promote"
    yield "promote by force", ("promote", True), "force"
    for at, _ in view.records:
        if view.disk.min_offset < at <= min(view.disk.confirmed, view.disk.flushed):
            yield "retained", ("retain", at), "retain"
