"""Random walks of groups in which nodes are lost and restored: docs/failover.md's promises hold.

A failure prints its seed; `walk_with_backups(SEED)` repeats it. HASTORE_SEEDS sets the number of
walks, HASTORE_SEED the first seed.
"""

import logging
import os
import random

import pytest

from hastore.backup.restore import new_member_state
from hastore.ha.node.node_state import NodeState
from tests.backup.sim_restore import walk_with_backups
from tests.ha.directed_walks import a_master_that_wrote_over_a_lost_end, follow
from tests.ha.simulation import MemoryFiles, Violation


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


def test_a_restored_node_knows_what_a_master_had_written_over():
    with a_master_that_wrote_over_a_lost_end() as (group, master, two, begin):
        follow(group, master, 2)
        data, end = two.state.data, two.store.max_offset
        assert data.written_over is not None and data.written_over.offset == begin < end
        state = NodeState(MemoryFiles(lambda: None), "/n")
        state.load(4, "c", "g")
        state.save(**new_member_state(data, end))
        assert state.data.written_over == data.written_over
