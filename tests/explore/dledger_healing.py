"""All faults end: within a few rounds one leader commits a new put, and all logs are equal."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hastore.dledger.core.events import Role
from tests.dledger.oracle import Violation
from tests.explore.search import Found, State

if TYPE_CHECKING:
    from tests.explore.dledger_model import Group

ROUNDS = 16
MESSAGES = 1_000  # of one round
PUT = 1_000  # the value of the put that must be committed


def settle(group: Group, begun: tuple[State, tuple[int, ...]]) -> State:
    """Let all messages arrive, in order, and all syncs end."""
    state, sends = begun
    queue = deque([*group.named[state[-3]], *sends])
    state = (*state[:-3], group.number(()), *state[-2:])
    for _ in range(MESSAGES):
        for place in range(group.count):
            if group.view(state, place).syncing:
                state, sends = group.step(state, place, ("persisted",))
                queue.extend(sends)
        if not queue:
            return state
        number = queue.popleft()
        place = group.steps.messages[number].target - 1
        if group.view(state, place).up:
            state, sends = group.step(state, place, ("receive", number))
            queue.extend(sends)
    raise Violation(f"{MESSAGES} messages, and no end")


def heal(group: Group, state: State) -> None:
    """Raise Found unless the group works again."""
    try:
        if not _heals(group, state):
            raise Violation("healed, and no put is committed everywhere")
    except Violation as violation:
        raise Found(("healed",), str(violation)) from violation


def _heals(group: Group, state: State) -> bool:
    for place in range(group.count):
        if not group.view(state, place).up:
            after, sends = group.step(state, place, ("start",))
            state = settle(group, group.linked(after, place, sends))
        if group.view(state, place).blocked:
            state = settle(group, group.step(state, place, ("blocked", False)))
    state, put = settle(group, (state, ())), False
    for turn in range(ROUNDS):
        leaders = [p for p in range(group.count) if group.view(state, p).role is Role.LEADER]
        for place in leaders:
            state = settle(group, group.step(state, place, ("beat",)))
        serving = [p for p in leaders if group.view(state, p).serves]
        known = group.named[state[-2]]
        if serving and not put:
            put = True
            state = settle(group, group.step(state, serving[0], ("put", PUT)))
        elif put and any(value == PUT for (_, value), _ in known.committed):
            if _together(group, state):
                return True
        elif not leaders or turn > ROUNDS // 2:
            waits = group.view(state, turn % group.count)
            event = "timeout" if waits.role is not Role.LEADER else "late"
            state = settle(group, group.step(state, waits.node - 1, (event,)))
    return False


def _together(group: Group, state: State) -> bool:
    views = group.views(state)
    leader = max((v for v in views if v.role is Role.LEADER), key=lambda v: v.term, default=None)
    return leader is not None and all(
        (view.term, view.end, view.committed, view.remembers)
        == (leader.term, leader.end, leader.end, True)
        for view in views
        if view.node in leader.group.members
    )
