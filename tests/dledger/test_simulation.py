"""Random walks of simulated DLedger groups: what is promised holds in every state and the group
heals; planted mistakes are caught.

A failure prints its seed, the plan and what happened last; `walk(SEED)` repeats it. HASTORE_SEEDS
sets the number of fresh walks (if it is set, all mistakes are hunted), HASTORE_SEED the first seed.
"""

import os
import random

import pytest

from tests.dledger.planted import BUGS, planted
from tests.dledger.simulation import FAULTS, LAST_STAGES, Violation, walk

ON_DEMAND = "HASTORE_SEEDS" in os.environ
FRESH = 150
# Seeds that once failed because of a defect in the core.
FAILED_ONCE: dict[int, str] = {}
# Mistakes that the first walks catch; a run takes some of them. The others need more walks.
QUICK_WALKS, WALKS = 70, 2_000
QUICK = tuple(bug for bug in BUGS if bug not in ())
IN_A_RUN = 14
# What else the walks must meet.
MET = (
    *("crash", "power cut", "unsynced entries lost", "lost", "twice", "slow", "truncated"),
    *("installed", "recalled", "settled TERM_CHANGED", "settled WAIT_QUORUM_ACK_TIMEOUT"),
)


def first_seed() -> int:
    return int(os.environ.get("HASTORE_SEED", random.SystemRandom().randrange(1 << 31)))


def test_the_promises_hold_in_fresh_walks():
    first, count = first_seed(), int(os.environ.get("HASTORE_SEEDS", str(FRESH)))
    print(f"HASTORE_SEED={first} HASTORE_SEEDS={count}")
    seen: dict[str, int] = {}
    for seed in range(first, first + count):
        for what, times in walk(seed).counts.items():
            seen[what] = seen.get(what, 0) + times
    print(sorted(seen.items()))
    if count < FRESH:
        return  # a replay of a few walks
    for what in ("elected", "acked", "read answered", "put refused", "healed"):
        assert seen.get(what, 0) >= count, (what, seen)
    for what in (*FAULTS, *(f"last {stage}" for stage in LAST_STAGES), *MET):
        assert seen.get(what, 0), (what, seen)


@pytest.mark.parametrize("seed", sorted(FAILED_ONCE))
def test_walks_that_failed_once_pass(seed):
    walk(seed)


def caught(bug: str, walks: int) -> str | None:
    """Plant a mistake; return what caught it within a number of walks, None if nothing did."""
    with planted(bug):
        for seed in range(walks):
            try:
                walk(seed)
            except Violation as violation:
                return f"walk {seed}: {str(violation).splitlines()[0]}"
    return None


def test_planted_mistakes_are_caught():
    """Some of the quick ones in each run, all of them with HASTORE_SEEDS."""
    seed = first_seed()
    print(f"HASTORE_SEED={seed}")
    bugs = sorted(BUGS) if ON_DEMAND else random.Random(seed).sample(QUICK, IN_A_RUN)
    missed = []
    for bug in bugs:
        by = caught(bug, WALKS if ON_DEMAND else QUICK_WALKS)
        print(f"{bug}: {by}")
        missed += [bug] if by is None else []
    assert not missed


def test_the_first_walks_pass_without_a_mistake():
    """So what catches a mistake in them is the mistake."""
    for seed in range(QUICK_WALKS):
        walk(seed)
