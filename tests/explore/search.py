"""Breadth-first search of all states of a model: each state once, the shortest way to a violation.

A model gives an initial state, a state's successors, and of each state the canonical one of those
that differ from it in names only. Of a state that was seen only a 64-bit hash and its parent are
kept, 12 bytes in arrays beside the set of hashes; the states themselves are held for one level. Two
states with one hash would be taken for one: among n states the odds are n * n / 2**65, 3 in a
million for ten million.
"""

from __future__ import annotations

import resource
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

State = tuple[int, ...]
Label = tuple[Any, ...]  # the kind of the event, and what it needs to be told

NO_PARENT = 0


class Found(Exception):
    """A transition that breaks a promise: its label, and what is broken."""

    def __init__(self, label: Label, text: str) -> None:
        super().__init__(text)
        self.label = label


class Model(Protocol):
    """What is searched."""

    def initial(self) -> State:
        """Return the state in which the search begins."""
        ...

    def successors(self, state: State) -> Iterator[tuple[Label, State]]:
        """Yield what may happen next; raise Found if it breaks a promise."""
        ...

    def canonical(self, state: State) -> State:
        """Return the state that stands for all that differ from this one in names only."""
        ...

    def tell(self, state: State, label: Label, after: State | None) -> str:
        """Return a transition as a line of text."""
        ...

    def probe(self, state: State) -> None:
        """Heal the state without chance, and raise Found if the group does not work again."""
        ...

    def missing(self, kinds: dict[str, int]) -> list[str]:
        """Return what the search was to meet, and has not: `kinds` are the events that it met."""
        ...


@dataclass
class Report:
    """What a search has seen."""

    states: int = 0
    transitions: int = 0
    depth: int = 0  # of the last level that was searched completely
    closed: bool = False  # nothing within the bounds is left
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of this process: on a busy machine much less
    probes: int = 0
    mib: int = 0  # the greatest size of the process
    kinds: dict[str, int] = field(default_factory=dict)  # how often each event happened
    found: str = ""  # what is broken
    story: list[str] = field(default_factory=list)  # the shortest way there

    def line(self) -> str:
        """Return the figures as a line."""
        rate = self.states / max(self.cpu_seconds, 1e-9)
        end = "closed" if self.closed else "cut"
        return (
            f"{self.states:,} states, {self.transitions:,} transitions, depth {self.depth}, {end}, "
            f"{self.probes:,} healed, {self.seconds:.0f} s, {self.cpu_seconds:.0f} s of CPU, "
            f"{rate:,.0f} states each of these, {self.mib:,} MiB"
        )


class Search:
    """One search of a model."""

    def __init__(
        self,
        model: Model,
        *,
        states_max: int,
        probe_every: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._model = model
        self._states_max = states_max
        self._probe_every = probe_every
        self._progress = progress
        self._hashes = array("q")  # of each state, in the order in which they were met
        self._parents = array("I")
        self._seen: set[int] = set()
        self.report = Report()

    def run(self) -> Report:
        """Search until nothing is left, a promise is broken or the limit is reached."""
        began, cpu = time.perf_counter(), time.process_time()
        try:
            self._levels(began)
        finally:
            report = self.report
            report.cpu_seconds = time.process_time() - cpu
            report.seconds = time.perf_counter() - began
            report.states = len(self._hashes)
            unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
            report.mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit
        return report

    def missing(self) -> list[str]:
        """Return what the search was to meet, and has not: then it shows little."""
        return self._model.missing(self.report.kinds)

    def _levels(self, began: float) -> None:
        model, report = self._model, self.report
        try:
            first = model.canonical(model.initial())
        except Found as found:
            report.found, report.story = str(found), ["the group begins"]
            return
        self._seen.add(hash(first))
        self._hashes.append(hash(first))
        self._parents.append(NO_PARENT)
        level, number = [first], 0
        while level:
            following: list[State] = []
            for state in level:
                if len(self._hashes) >= self._states_max:
                    return
                try:
                    self._expand(state, number, following)
                    if self._probe_every and number % self._probe_every == 0:
                        report.probes += 1
                        model.probe(state)
                except Found as found:
                    report.found = str(found)
                    report.story = self._story(number, found.label)
                    return
                number += 1
            level = following
            if level:
                report.depth += 1
            if self._progress is not None:
                spent = time.perf_counter() - began
                self._progress(
                    f"depth {report.depth}: {len(level):,} new of {len(self._hashes):,} states, "
                    f"{spent:.0f} s"
                )
        report.closed = True

    def _expand(self, state: State, number: int, following: list[State]) -> None:
        report, seen, kinds = self.report, self._seen, self.report.kinds
        canonical = self._model.canonical
        for label, after in self._model.successors(state):
            report.transitions += 1
            kind = label[0]
            kinds[kind] = kinds.get(kind, 0) + 1
            after = canonical(after)
            mark = hash(after)
            if mark not in seen:
                seen.add(mark)
                self._hashes.append(mark)
                self._parents.append(number)
                following.append(after)

    def _story(self, number: int, last: Label) -> list[str]:
        """Walk from the initial state to a state; the names are those of the walk."""
        marks = []
        while number:
            marks.append(self._hashes[number])
            number = self._parents[number]
        model, lines = self._model, []
        state = model.initial()
        for mark in reversed(marks):
            for label, after in model.successors(state):
                if hash(model.canonical(after)) == mark:
                    lines.append(model.tell(state, label, after))
                    state = after
                    break
            else:
                raise AssertionError("a state of the way is not met again")
        try:
            for label, _ in model.successors(state):
                del label
            model.probe(state)
        except Found as found:
            last, self.report.found = found.label, str(found)  # by the names of this walk
        lines.append(model.tell(state, last, None))
        return lines
