"""Random walks of groups in which nodes are lost and restored: docs/failover.md's promises hold.

A failure prints its seed; `walk_with_backups(SEED)` repeats it. HASTORE_SEEDS sets the number of
walks, HASTORE_SEED the first seed.
"""

import logging
import os
import random

import pytest

from tests.backup.sim_restore import walk_with_backups
from tests.ha.simulation import Violation


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_the_promises_hold_when_nodes_are_lost_and_restored():
    first = int(os.environ.get("HASTORE_SEED", random.SystemRandom().randrange(1 << 31)))
    count = int(os.environ.get("HASTORE_SEEDS", "40"))
    print(f"HASTORE_SEED={first} HASTORE_SEEDS={count}")
    seen: dict[str, int] = {}
    for seed in range(first, first + count):
        for what, times in walk_with_backups(seed).counts.items():
            seen[what] = seen.get(what, 0) + times
    print(seen)
    for what in ("put", "open", "backup", "restored", "healed"):
        assert seen.get(what, 0) > count // 8, (what, seen)


def test_a_node_that_comes_back_as_it_was_is_caught():
    """With its number and its store, as an older copy of its disk: what the rules forbid."""
    for seed in range(85, 400):  # the first walks do not meet it
        try:
            walk_with_backups(seed, as_it_was=True)
        except Violation as caught:
            print(caught)
            return
    raise AssertionError("no walk has met it")
