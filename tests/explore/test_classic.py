"""Mode classic, explored to the end at small scope: the short form of `make explore`.

The scopes and what each is for are in classic_scopes.py. Here each is cut after some hundred
states, one that is small enough is closed, and mistakes are found that need few states.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest

from tests.explore.classic_model import Group, Scope
from tests.explore.classic_scopes import ALWAYS, SCOPES, SHOWS
from tests.explore.scopes import search_of
from tests.explore.search import Search
from tests.ha.planted import planted

STATES = 400
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
QUICK = ("flip_acks", "entry_after_bytes", "history_not_cut", "entries_at_once")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The nodes tell of each fault, thousands of times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("scope", [TINY, TINY_WITH_A_KILL], ids=["a put", "a kill"])
def test_all_states_of_a_pair_and_one_promotion(scope: Scope):
    search = Search(Group(scope), states_max=100_000, probe_every=300)
    report = search.run()
    print(report.line())
    assert not report.found, report.story
    assert report.closed
    assert report.states > 300 and report.depth >= 16 and report.probes > 1, report
    assert not search.missing(), report.kinds


@pytest.mark.parametrize("name", SCOPES)
def test_the_first_states_of_each_scope_keep_the_promises(name: str):
    report = search_of("classic", name, states_max=STATES, probe_every=100).run()
    print(report.line())
    assert not report.found, report.story
    assert report.closed or report.states >= STATES


@pytest.mark.parametrize("bug", QUICK)
def test_planted_mistakes_are_found(bug: str):
    with planted(bug):
        report = search_of("classic", SHOWS[bug], states_max=20_000, probe_every=11).run()
    assert report.found and report.story, report.line()
    print(report.found, *report.story, sep="\n")


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
