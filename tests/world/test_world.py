"""Whole nodes of both modes and their clients on virtual time, network and disk.

`make world` runs many walks: MODE=classic|dledger, SEED=first, SEEDS=how many.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest

from hastore.config.model import Mode
from tests.world import install, scheduler
from tests.world.events import KINDS
from tests.world.isolated import run
from tests.world.plans import Outcome, plan_of, tour_of
from tests.world.planted import BUGS, plan_for, plant, walks_for
from tests.world.shrink import kind_of, shrink

TOURS = {Mode.CLASSIC: ("tame", "registry", "rest"), Mode.DLEDGER: ("tame", "rest")}


def passed(outcome: Outcome) -> Outcome:
    assert not outcome.problems, f"{outcome.story()}\nmake world SEED={outcome.plan.seed} SEEDS=1"
    return outcome


@pytest.mark.slow("whole nodes meet each kind of event")
@pytest.mark.parametrize("mode", list(Mode))
def test_a_walk_with_each_kind_of_event(mode):
    fired: Counter[str] = Counter()
    for tour in TOURS[mode]:
        outcome = passed(run(tour_of(mode, tour)))
        fired += outcome.fired
        assert outcome.acked > 50 and outcome.reads > outcome.acked, outcome.story()
        if tour == "tame":
            assert outcome.judged["acknowledged_and_found"] == outcome.judged["acknowledged"] > 50
            assert min(outcome.judged[name] for name in ("read", "commits", "ranges")) > 5
            did = outcome.rocketmq
            assert did["got"] >= did["acknowledged"] > 5 and did["locks"] > 5 and did["commits"]
    due = {name for name, kind in KINDS.items() if mode in kind.modes} - {"power of all"}
    assert not due - fired.keys()


@pytest.mark.parametrize("mode", list(Mode))
def test_a_drawn_walk(mode):
    seed = int(os.environ.get("HASTORE_SEED", "1"))
    passed(run(plan_of(seed, mode)))


def test_a_seed_repeats_its_walk_bit_for_bit_also_in_another_process():
    name = "readable at once"  # without the mistake: a short walk
    here = passed(run(plan_for(name)))
    code = (
        "from tests.world.isolated import run; from tests.world.planted import plan_for; "
        f"print(run(plan_for({name!r})).digest)"
    )
    there = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert int(there.stdout) == here.digest


def test_a_walk_does_not_depend_on_the_real_machine_and_process(monkeypatch):
    """Members send both in their name, and a longer message takes another time."""
    monkeypatch.setattr(scheduler, "_active", scheduler.Scheduler(0))
    replaced = install._replaced()
    assert replaced[id(socket)].gethostname() == "outside"
    assert replaced[id(os)].getpid() == 1


def test_a_planted_mistake_is_caught_and_its_walk_reduced():
    name = "offsets from zero"
    broken = partial(run, before=partial(plant, name))
    caught = broken(plan_for(name))
    assert caught.problems, name
    small = shrink(caught, broken, runs=2)
    assert len(small.plan.events) < len(caught.plan.events)
    assert kind_of(small.problems[0]) in {kind_of(problem) for problem in caught.problems}
    assert f"seed 0, mode {BUGS[name][0].value}" in small.story()


@pytest.mark.long
@pytest.mark.full
@pytest.mark.slow("some ten mistakes, each in a walk of whole nodes")
def test_planted_mistakes_are_caught():
    missed = [
        name
        for name in BUGS
        if not any(run(plan, before=partial(plant, name)).problems for plan in walks_for(name))
    ]
    assert not missed
