"""All faults end: any node can be promoted, logs and histories become equal, nothing acked is lost.

That is promise 7 of docs/failover.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.explore.classic_inputs import Input
from tests.explore.search import Found, State
from tests.ha.simulation import Violation, ranges

if TYPE_CHECKING:
    from tests.explore.classic_model import Group, Link

ROUNDS = 40
ANSWERS = 60


def drive(group: Group, state: State, place: int, event: Input) -> State:
    """Give a node an input, and answer its calls at once."""
    return _answers(group, group.take(state, place, event), place)


def _answers(group: Group, state: State, place: int) -> State:
    for _ in range(ANSWERS):
        waits = group.view(state, place).waits
        if waits is None:
            return state
        number, request = waits
        if not group.view(state, number - 1).up:
            state = group.take(state, place, ("reply", -1, 0))
            continue
        asked, reply, link = group.answer(state, number - 1, request)
        state = group.reply(asked, place, reply, link)
    raise Violation(f"node {place + 1} asks for ever")


def begin_led(group: Group, state: State) -> State:
    """Make node 1 the master, and let all others follow."""
    state = drive(group, state, 0, ("promote", False))
    state, _ = _together(group, state, 0)
    return state


def begin_filled(group: Group, state: State) -> State:
    """Let node 1 put two records, which all others have and know to be confirmed."""
    for value in (1, 2):
        state = group.take(state, 0, ("put", value))
        state, _ = _together(group, state, 0)
    return group.take(state, 0, ("flush",))


def begin_ahead(group: Group, state: State) -> State:
    """Let node 1 put a record that the last node lacks; of three nodes the second confirms it."""
    state = group.take(state, 0, ("put", len(group.named[state[-2]].written) + 1))
    if group.count > 2:
        state = _stream_once(group, state, 0, only=2)
    return state


def begin_diverged(group: Group, state: State) -> State:
    """Let node 1 put a record that no other has, and end; node 2 is promoted and puts another."""
    state = group.take(state, 0, ("put", 1))
    state = group.take(state, 0, ("dies",))
    for place in range(1, group.count):
        if group.view(state, place).stream is not None:
            state = group.take(state, place, ("end",))
    state = drive(group, state, 1, ("promote", False))
    return group.take(state, 1, ("put", 2))


def _together(group: Group, state: State, master: int) -> tuple[State, bool]:
    """Stream until all logs and limits are equal; return whether they are."""
    for _ in range(ROUNDS):
        for place in range(group.count):
            view = group.view(state, place)
            if place != master and (view.stream is None or view.stream_over):
                state = drive(group, state, place, ("follow",))
        state = _stream_once(group, state, master)
        views = group.views(state)
        end = views[master].end
        linked = len(group.links(state)) == group.count - 1
        same = all((view.end, view.disk.confirmed) == (end, end) for view in views)
        if linked and same and not any(link.to_master for link in group.links(state)):
            return state, True
    return state, False


def _stream_once(group: Group, state: State, master: int, only: int | None = None) -> State:
    """Send all on each link, or on that of one slave, and take its report."""
    for link, slave, sent in group.view(state, master).links:
        if only not in (None, slave):
            continue
        size = group.view(state, master).end - sent
        state = group.take(state, master, ("send", link, size, True))
    for link in group.links(state):
        state = _emptied(group, state, link, to_slave=())
        for frame in link.to_slave:
            if group.view(state, link.slave - 1).stream != link.number:
                break
            state = group.take(state, link.slave - 1, ("receive", frame))
    for link in group.links(state):
        state = group.take(state, link.slave - 1, ("flush",))
    for link in group.links(state):
        state = _emptied(group, state, link, to_master=())
        for data in link.to_master:
            state = group.take(state, link.master - 1, ("report", link.number, data))
    return state


def _emptied(group: Group, state: State, link: Link, **empty: tuple[()]) -> State:
    """Take what is on its way in one direction of a link."""
    emptied = link._replace(**empty)
    links = tuple(emptied if one.number == link.number else one for one in group.links(state))
    return (*state[: group.count], group.number(links), *state[-2:])


def heal(group: Group, state: State) -> None:
    """Raise Found unless the group comes together under one of its nodes; the state says which."""
    try:
        _heal(group, state)
    except Violation as violation:
        raise Found(("healed",), str(violation)) from violation


def _heal(group: Group, state: State) -> None:
    chosen = sum(state) % group.count
    for place in range(group.count):
        if not group.view(state, place).up:
            state = group.take(state, place, ("start",))
    for place in range(group.count):
        state = _answers(group, state, place)
        if group.view(state, place).stream is not None:
            state = group.take(state, place, ("end",))
    for _ in range(4):
        state = drive(group, state, chosen, ("promote", False))
        if group.view(state, chosen).open_epoch:
            break
    else:
        excused = ("power", "retain", "force")
        if any(group.scope.bounds.get(name) for name in excused):
            return  # too few clean nodes may be left, or the logs do not connect
        raise Violation(f"7: node {chosen + 1} is refused although all answer")
    state, together = _together(group, state, chosen)
    known = group.named[state[-2]]
    if known.forced:
        return  # two parts of the group may disagree, and the operator decides
    if not together:
        raise Violation("7: the healed group does not come together")
    views = group.views(state)
    master = views[chosen]
    for view in views:
        low = max(view.disk.min_offset, master.disk.min_offset)
        if view.disk.data[low:] != master.disk.data[low:]:
            raise Violation(f"7: healed, yet the log of node {view.number} differs")
        if ranges(view.history, low) != ranges(master.history, low):
            raise Violation(f"7: healed, yet the history of node {view.number} differs")
    held = {value: at for at, value in master.records}
    for value, acked in enumerate(known.acked, 1):
        at = known.written[value - 1][1]
        if acked and at >= master.disk.min_offset and held.get(value) != at:
            raise Violation(f"I1: value {value} was acknowledged and is lost")


BEGINS: dict[str, list[Callable[[Group, State], State]]] = {
    "": [],
    "led": [begin_led],
    "filled": [begin_led, begin_filled],
    "ahead": [begin_led, begin_ahead],
    "diverged": [begin_led, begin_diverged],
}
