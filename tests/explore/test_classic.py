"""All states of mode classic at the smallest scopes; test_scopes.py has the larger ones."""

from __future__ import annotations

import dataclasses

import pytest

from tests.explore.classic_model import Group, Scope
from tests.explore.classic_scopes import ALWAYS, SCOPES
from tests.explore.search import Search

# A pair, one promotion and one put.
TINY = Scope(
    bounds={**ALWAYS, "put": 1, "promote": 1},
    due=frozenset({"follow", "send", "receive", "report", "answer", "put", "promote", "synced",
                   "link ended"}),
)  # fmt: skip
# The same without a put, with a kill.
TINY_WITH_A_KILL = Scope(
    bounds={**ALWAYS, "promote": 1, "kill": 1},
    due=frozenset({"start", "follow", "answer", "no answer", "promote", "killed", "report"}),
)


@pytest.mark.parametrize("scope", [TINY, TINY_WITH_A_KILL], ids=["a put", "a kill"])
def test_all_states_of_a_pair_and_one_promotion(scope: Scope):
    search = Search(Group(scope), states_max=100_000, probe_every=300)
    report = search.run()
    print(report.line())
    assert not report.found, report.story
    assert report.closed
    assert report.states > 300 and report.depth >= 16 and report.probes > 1, report
    assert not search.missing(), report.kinds


def test_a_node_does_the_same_with_the_same_inputs():
    """A state is a history of inputs: run again, it is the same state."""
    group = Group(SCOPES["flips of a pair"])
    level = [group.initial()]
    for _ in range(4):
        level = [after for state in level for _, after in group.successors(state)][::7]
    steps, histories = group.states.steps, group.states._histories
    for number, (node, disk, inputs) in list(enumerate(histories))[::5]:
        if inputs:
            before = group.states.views[number]
            again = Group(SCOPES["flips of a pair"])
            again.states.steps = steps
            local = again.states.down(node, disk)
            for event in inputs:
                local = again.states.step(local, event).after
            assert again.states.views[local] == before


def test_a_search_that_meets_too_little_says_so():
    search = Search(Group(dataclasses.replace(TINY, due=TINY.due | {"retained"})), states_max=50)
    search.run()
    assert "retained" in search.missing()
