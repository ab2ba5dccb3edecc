"""Both modes, explored at small scope: the short form of `make explore`.

The scopes and what each is for are in classic_scopes.py and dledger_scopes.py. Here each is cut
after some hundred states, and mistakes are found that need few states.
"""

from __future__ import annotations

import pytest

from tests.explore.scopes import MODES, PLANTED, SHOWS, search_of

STATES = 400
HEAL_EVERY = {"classic": 100, "dledger": 400}  # one state of so many
# Mistakes that are found within some hundred states.
QUICK = {
    "classic": ("flip_acks", "entry_after_bytes", "history_not_cut", "entries_at_once"),
    "dledger": (
        *("vote_in_memory", "vote_forgotten", "votes_twice", "term_not_saved", "minority_elects"),
        *("quorum_short", "lost_puts_acknowledged", "lost_puts_refused"),
    ),
}
# One of mode classic shows only when nothing fails any more.
HEAL_EVERY_PLANTED = {"classic": 11, "dledger": 0}


@pytest.mark.parametrize(("mode", "name"), [(mode, name) for mode in MODES for name in MODES[mode]])
def test_the_first_states_of_each_scope_keep_the_promises(mode: str, name: str):
    report = search_of(mode, name, states_max=STATES, probe_every=HEAL_EVERY[mode]).run()
    print(report.line())
    assert not report.found, report.story
    assert report.closed or report.states >= STATES


@pytest.mark.parametrize(("mode", "bug"), [(mode, bug) for mode in QUICK for bug in QUICK[mode]])
def test_planted_mistakes_are_found(mode: str, bug: str):
    with PLANTED[mode](bug):
        every = HEAL_EVERY_PLANTED[mode]
        report = search_of(mode, SHOWS[mode][bug], states_max=20_000, probe_every=every).run()
    assert report.found and report.story, report.line()
    print(report.found, *report.story, sep="\n")
