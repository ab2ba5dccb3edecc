"""States that count as one behave as one: what the search leaves out of a state changes nothing.

Of states that were reached in two ways, both are kept here, and given the same events.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.explore import classic_model, dledger_model
from tests.explore.classic_model import Scope as ClassicScope
from tests.explore.classic_node import LOST
from tests.explore.classic_scopes import ALWAYS as CLASSIC_ALWAYS
from tests.explore.classic_states import States
from tests.explore.dledger_scopes import SCOPES
from tests.explore.dledger_steps import Steps
from tests.explore.local_states import LocalNode, dump
from tests.explore.search import Search

STATES = {"classic": 1_000, "dledger": 300}
COMPARED = 30


class BothHistories(States):
    """Keeps another history of each state, if there is one."""

    others: dict[int, Any]

    def _add(self, key: Any, history: Any, view: Any) -> int:
        known = super()._add(key, history, view)
        if self._histories[known] != history:
            self.others[known] = history
        return known


@pytest.mark.parametrize("begin", ["", "diverged"])
def test_histories_of_one_state_of_mode_classic(begin: str):
    bounds = {**CLASSIC_ALWAYS, "put": 1, "promote": 2, "kill": 1, "lost": 1, "break": 1}
    group = classic_model.Group(ClassicScope(begin=begin, bounds=bounds))
    states = BothHistories(group.states.steps)
    states.others, group.states = {}, states
    Search(group, states_max=STATES["classic"]).run()
    steps, compared = states.steps, 0
    for local, other in list(states.others.items()):
        first, view = states._histories[local], states.views[local]
        events = [event for _, event, _ in group._events(local)]
        if view.waits is not None:
            events.append(("reply", LOST, 0))
        if view.up:
            asked = [n for n, (to, _) in enumerate(steps.requests) if to == view.number]
            events += [("hello", number, 9) for number in asked[:6]]
        for event in events:
            one = states._take(local, event, 0)
            states._histories[local] = other
            assert states._take(local, event, 0) == one, (event, first, other)
            states._histories[local] = first
            compared += 1
    assert compared > COMPARED, compared


class BothNodes(Steps):
    """Keeps a node as it was before its times were rounded and its left-overs forgotten."""

    others: dict[int, bytes]

    def _intern(self, node: LocalNode) -> int:
        if node.core is not None:
            node.core._due_ms = float("inf")  # no process is paused
        before, node.world = node.__dict__.get("world"), None
        blob, node.world = dump(node), before
        known = super()._intern(node)
        if self._blobs[known] != blob:
            self.others[known] = blob
        return known


@pytest.mark.parametrize("name", ["messages of 2", "logs", "lost disks"])
def test_what_is_left_out_of_a_state_of_mode_dledger(name: str):
    group = dledger_model.Group(SCOPES[name])
    steps = BothNodes(left_out=group.scope.left_out)
    steps.others, group.steps = {}, steps
    Search(group, states_max=STATES["dledger"]).run()
    compared = 0
    for local, other in list(steps.others.items()):
        first, view = steps._blobs[local], steps.views[local]
        events = [event for _, event, _ in group._events(local)]
        if view.up:
            sent = [n for n, one in enumerate(steps.messages) if one.target == view.node]
            events += [("receive", number) for number in sent[local % 7 :: 7][:6]]
        for event in events:
            one = steps._take(local, event)
            steps._blobs[local] = other
            assert steps._take(local, event) == one, (event, view)
            steps._blobs[local] = first
            compared += 1
    assert compared > COMPARED, compared
