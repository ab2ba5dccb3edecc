"""Break the network between the nodes under load; partitions.py describes the kinds of faults.

`make test` has one kind, `make test-all` each kind once with three nodes, and with a pair the kinds
that differ for two nodes.
HASTORE_TORTURE_CYCLES makes the run longer: two thirds of the cycles with three nodes, the rest
with a pair, in rounds of 50 with a new group each. HASTORE_TORTURE_SEED replays the kinds, their
order and the pauses, but not the machine's timing. Three nodes run in network namespaces if the
system allows them, a pair with proxies between its nodes; a long run alternates both.
HASTORE_TEST_NETWORK=proxies or namespaces chooses one.
"""

import os
import random
import shutil
import time
from collections import Counter

import pytest

from tests.process.harness import Group
from tests.process.history import ACKED
from tests.process.networks import open_network
from tests.torture.load import judge
from tests.torture.partitions import KINDS_OF_THREE, KINDS_OF_TWO, Partitions

CYCLES = int(os.environ.get("HASTORE_TORTURE_CYCLES", "0"))
SEED = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().getrandbits(32)
ROUND = 50
THREES = 2 * CYCLES // 3 if CYCLES else len(KINDS_OF_THREE)
IN_SUITE = ("superseded", "rivals", "dying")
PAIRS = max(1, CYCLES - THREES) if CYCLES else len(IN_SUITE)
SETTINGS = {
    "store": {"commitlog_file_size": "256KiB"},
    "retention": {"check_interval": "200ms"},
    "ha": {"slave_timeout": "1s", "housekeeping_interval": "3s"},
}


def test_a_superseded_master_loses_nothing(tmp_path):
    """The master is cut off from two slaves, not from its clients, and one of them is promoted."""
    torment(tmp_path, ("superseded",), 1, ["proxies"])


@pytest.mark.full
@pytest.mark.slow("each kind of fault")
@pytest.mark.timeout(600 + 20 * THREES)
def test_three_nodes_lose_nothing_in_a_broken_network(tmp_path):
    torment(tmp_path, KINDS_OF_THREE, THREES, ["", "proxies"])


@pytest.mark.full
@pytest.mark.slow("each kind of fault that differs for two nodes")
@pytest.mark.timeout(600 + 20 * PAIRS)
def test_a_pair_loses_nothing_in_a_broken_network(tmp_path):
    torment(tmp_path, KINDS_OF_TWO if CYCLES else IN_SUITE, PAIRS, ["proxies", ""], 2)


def torment(folder, kinds, cycles, networks, nodes=3):
    """Run all rounds, judge each of them, and print the figures of all."""
    wanted = os.environ.get("HASTORE_TEST_NETWORK", "")
    done, acked, slowest, began_s = Counter(), 0, (0.0, "none"), time.monotonic()
    for number, first in enumerate(range(0, cycles, ROUND)):
        seed = SEED + number
        count = min(ROUND, cycles - first)
        kind = wanted or networks[number % 2]
        runner = one_round(folder / f"round{number}", nodes, kinds, count, seed, kind)
        done += runner.done
        acked += runner.load.recorder.count(ACKED)
        slowest = max(slowest, runner.slowest)
    print(
        f"{nodes} nodes: {done.total()} cycles in {time.monotonic() - began_s:.0f} s, "
        f"{dict(sorted(done.items()))}; {acked} acknowledged puts; "
        f"slowest return of writes {slowest[0]:.1f} s ({slowest[1]})"
    )
    assert done.total() == cycles


def one_round(folder, nodes, kinds, cycles, seed, network_kind):
    """Run cycles over a new group and judge the result; return the runner."""
    folder.mkdir()
    with (
        open_network(nodes, network_kind) as network,
        Group(folder, nodes, network=network, **SETTINGS) as group,
    ):
        name = f"{nodes} nodes, {network.name}, HASTORE_TORTURE_SEED={seed}"
        runner = Partitions(group.start(), network, seed, kinds)
        runner.run(cycles, name)
        verdict = judge(group, runner.master, runner.load)
    print(f"{name}: {verdict.text}")
    assert verdict.wrong == [], (name, verdict.wrong[:10])
    assert verdict.epochs >= cycles // 4  # masters did change
    shutil.rmtree(folder)
    return runner
