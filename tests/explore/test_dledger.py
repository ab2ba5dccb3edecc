"""All states of mode dledger at the smallest scope; test_scopes.py has the larger ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from tests.explore.dledger_events import Scope
from tests.explore.dledger_model import Group
from tests.explore.dledger_scopes import ALWAYS, SCOPES
from tests.explore.search import Label, Search, State

# What a pair can do in its first term, without a bound on what fails.
TINY = Scope(
    nodes=2, grain="exchanges", terms=1, bounds={**ALWAYS, "dies": None},
    due=frozenset({"election timeout", "beat", "cut off", "dies", "start", "synced",
                   "CompareRequest", "PushResponse append", "CommitRequest"}),
)  # fmt: skip


def test_all_states_of_a_pair_in_its_first_term():
    search = Search(Group(TINY), states_max=100_000, probe_every=50)
    report = search.run()
    print(report.line())
    assert not report.found, report.story
    assert report.closed
    assert report.states > 500 and report.depth >= 5 and report.probes > 10, report
    assert not search.missing(), report.kinds


def test_a_search_that_meets_too_little_says_so():
    scope = dataclasses.replace(TINY, due=TINY.due | {"InstallRequest"})
    search = Search(Group(scope), states_max=50)
    search.run()
    assert "InstallRequest" in search.missing()


def some_states(group: Group, levels: int) -> Iterator[tuple[State, list[tuple[Label, State]]]]:
    """Yield the first states, not made canonical, with their successors."""
    level = [group.initial()]
    for _ in range(levels):
        following: dict[State, None] = {}
        for state in level:
            found = list(group.successors(state))
            yield state, found
            following |= dict.fromkeys(after for _, after in found)
        level = list(following)[:: max(1, len(following) // 6)]


@pytest.mark.parametrize("name", ["messages of 3", "logs", "lost disks"])
def test_the_core_treats_all_numbers_of_nodes_alike(name: str):
    """Renaming a state and then taking each step leads where the steps, then renamed, lead."""
    group = Group(SCOPES[name])
    renaming = (2, 3, 1)
    for state, found in some_states(group, 2):
        there = {group.renamed(after, renaming) for _, after in found}
        assert {after for _, after in group.successors(group.renamed(state, renaming))} == there


def test_renamed_states_have_one_canonical_state():
    group = Group(SCOPES["logs"])
    for state, _ in some_states(group, 2):
        same = {
            group.canonical(group.renamed(state, renaming))
            for renaming in itertools.permutations((1, 2, 3))
        }
        assert len(same) == 1
