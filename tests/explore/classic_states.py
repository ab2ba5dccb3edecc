"""All states of the nodes of mode classic that a search has met, and all steps between them.

A node that waits for an answer has a call on its stack. What that call will do follows from the
state in which it began, and from each answer with the state in which it came: `_calls` numbers
these. So two such states are one if that and the node's present value are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hastore.ha.rules.epochs import History
from hastore.ha.rules.promotion import may_resume
from tests.explore.classic_inputs import Input
from tests.explore.classic_node import Bench, Disk, Steps, value_of
from tests.ha.simulation import SimNode


class View(NamedTuple):
    """What others may look at in a node's state."""

    number: int
    up: bool
    waits: tuple[int, int] | None  # for the answer of a node to a HELLO
    busy: str  # with which input
    open_epoch: int
    promised: int
    history: History
    unclean: bool
    disk: Disk
    records: tuple[tuple[int, int], ...]  # (offset, value) of each whole record
    readable: int
    links: tuple[tuple[int, int, int], ...]  # of a master: (link, slave, what was sent)
    stream: int | None  # of a slave: its link
    stream_over: bool
    resumes: bool

    @property
    def end(self) -> int:
        return len(self.disk.data)


class Outcome(NamedTuple):
    """What an input has done."""

    after: int
    out: tuple[Input, ...]
    notes: tuple[Input, ...]
    reply: int | None
    effects: int
    broken: str


class States:
    """The states by number. The same state may be reached by several histories; one is kept."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._ids: dict[Any, int] = {}
        self._histories: list[tuple[int, Disk, tuple[Input, ...]]] = []
        self._calls: dict[tuple[Any, ...], int] = {}
        self._call_of: dict[int, int] = {}  # of each state that waits
        self.views: list[View] = []
        self._known: dict[tuple[Any, ...], Outcome] = {}

    @property
    def taken(self) -> int:
        """How many steps were taken."""
        return len(self._known)

    def down(self, number: int, disk: Disk) -> int:
        """Return the state of a node whose process has ended."""
        key = ("down", number, disk)
        if key not in self._ids:
            bench = Bench(self.steps, (), None)
            node = SimNode(bench, number)  # type: ignore[arg-type]
            disk.put_into(node)
            self._add(key, (number, disk, ()), _view(bench, node, disk, up=False))
        return self._ids[key]

    def step(self, local: int, event: Input, dies_at: int = 0) -> Outcome:
        """Return what a node does with an input; with `dies_at` it dies at that effect."""
        key = (local, dies_at, *event)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._take(local, event, dies_at)
        return known

    def _take(self, local: int, event: Input, dies_at: int) -> Outcome:
        number, disk, inputs = self._histories[local]
        if event[0] == "wiped":
            return Outcome(self.down(number, Disk(store=disk.store + 1)), (), (), None, 0, "")
        inputs, seen = (*inputs, event), []

        def waiting(bench: Bench, node: SimNode) -> None:
            now = Disk.of(node, disk.store)
            seen.append((value_of(bench, node, now), _view(bench, node, now, up=True)))

        bench, node, broken = self.steps.run(number, disk, inputs, dies_at or None, waiting)
        if broken:
            return Outcome(local, (), (), None, bench.effects, broken)
        if not node.up:
            after = self.down(number, Disk.of(node, disk.store))
        elif seen:
            ((value, view),) = seen
            call = self._call_of.get(local)
            if call is None or event[0] == "reply":
                call = self._calls.setdefault((local, *event), len(self._calls))
            after = self._add(("waits", number, call, value), (number, disk, inputs), view)
            self._call_of[after] = call
        else:
            now = Disk.of(node, disk.store)
            key = ("up", number, value_of(bench, node, now))
            after = self._add(key, (number, disk, inputs), _view(bench, node, now, up=True))
        out, notes = tuple(bench.out), tuple(bench.notes)
        return Outcome(after, out, notes, bench.reply, bench.effects, "")

    def _add(self, key: Any, history: tuple[int, Disk, tuple[Input, ...]], view: View) -> int:
        known = self._ids.setdefault(key, len(self.views))
        if known == len(self.views):
            self._histories.append(history)
            self.views.append(view)
        return known


def _view(bench: Bench, node: SimNode, disk: Disk, *, up: bool) -> View:
    records = tuple(node.store.records())
    if not up:
        return View(node.number, False, None, "", 0, 0, (), False, disk, records, disk.readable,
                    (), None, False, False)  # fmt: skip
    data, stream = node.state.data, node.stream
    links = tuple(
        (link, one.node, one.writer.sent_offset)
        for link, one in sorted(bench.links.items())
        if not one.closed and one.writer is not None
    )
    may = may_resume(data.history, data.promised_epoch, node.number, data.epoch_over)
    return View(
        node.number, True, bench.request, bench.event[0] if bench.request else "",
        node.member.open_epoch, data.promised_epoch, data.history, data.unclean, disk, records,
        node.store.readable_offset, links,
        None if stream is None else stream._sock.link,  # type: ignore[attr-defined]
        stream is not None and stream.closed, may is not None and not node.member.open_epoch,
    )  # fmt: skip
