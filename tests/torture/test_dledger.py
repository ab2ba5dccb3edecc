"""Groups of mode dledger under load, with every fault of tests/torture/dledger.py.

`make test` has two kinds, `make test-all` a few more, the same in each run. HASTORE_TORTURE_CYCLES
makes the run longer: rounds of 50 cycles with a new group each, every third one with five nodes, in
network namespaces (if the system allows them) and with proxies in turn. In a long run a put must be
confirmed within 5 s after all faults have ended; the suite allows for a machine that is busy.
HASTORE_TORTURE_SEED replays the kinds, their order, the nodes and the pauses, but not the machine's
timing. HASTORE_TORTURE_NODES=3 or 5 and HASTORE_TEST_NETWORK=proxies or namespaces choose the rest;
each cycle prints all three.
"""

import os
import random
import shutil
import time
from collections import Counter

import pytest

from tests.process.dledger_group import DLedgerGroup
from tests.process.history import ACKED, UNKNOWN
from tests.process.networks import open_network
from tests.torture.cycles import PATIENCE_S
from tests.torture.dledger import KINDS, Elections, judge

CYCLES = int(os.environ.get("HASTORE_TORTURE_CYCLES", "0"))
SEED = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().getrandbits(32)
NODES = int(os.environ.get("HASTORE_TORTURE_NODES", "0"))
ROUND = 50
IN_SUITE = ("kill", "asleep", "wipe", "cutoff", "clock", "slowdisk", "fulldisk", "badsync")
COUNT = CYCLES or len(IN_SUITE)
HEAL_S = 5.0 if CYCLES else PATIENCE_S
SETTINGS = {
    "store": {"commitlog_file_size": "64KiB"},
    "retention": {"check_interval": "200ms"},
}


def test_a_killed_and_a_cut_off_leader_lose_nothing(tmp_path):
    runner = one_round(tmp_path / "round", 3, ("kill", "cutoff"), 2, SEED, "proxies")
    assert runner.done == {"kill": 1, "cutoff": 1}


@pytest.mark.full
@pytest.mark.slow("eight kinds of fault")
@pytest.mark.timeout(600 + 30 * COUNT)
def test_nothing_acknowledged_is_lost(tmp_path):
    wanted = os.environ.get("HASTORE_TEST_NETWORK", "")
    kinds = KINDS if CYCLES else IN_SUITE
    done, met, counts, healed_s, began_s = Counter(), Counter(), Counter(), [], time.monotonic()
    for number, first in enumerate(range(0, COUNT, ROUND)):
        nodes = NODES or (5 if number % 3 == 2 else 3)
        network = wanted or ("", "proxies")[number % 2]
        count = min(ROUND, COUNT - first)
        runner = one_round(tmp_path / f"round{number}", nodes, kinds, count, SEED + number, network)
        done += runner.done
        met += runner.met
        healed_s += runner.healed_s
        recorder = runner.load.recorder
        counts.update({name: recorder.count(name) for name in (ACKED, UNKNOWN)})
    healed_s.sort()
    print(
        f"{done.total()} cycles in {time.monotonic() - began_s:.0f} s, "
        f"{dict(sorted(done.items()))}; met: {dict(sorted(met.items()))}; "
        f"{counts[ACKED]} acknowledged puts, {counts[UNKNOWN]} with an unknown outcome; none is "
        f"lost or there twice; first put after healing: median "
        f"{healed_s[len(healed_s) // 2]:.2f} s, at most {healed_s[-1]:.2f} s"
    )
    assert done.total() == COUNT and len(done) == min(COUNT, len(kinds))


def one_round(folder, nodes, kinds, cycles, seed, network_kind):
    """Run cycles over a new group and judge the result; return the runner."""
    folder.mkdir()
    with (
        open_network(nodes, network_kind) as network,
        DLedgerGroup(folder, nodes, network=network, faulty=True, **SETTINGS) as group,
    ):
        name = f"HASTORE_TORTURE_NODES={nodes} HASTORE_TEST_NETWORK={network.name}"
        name += f" HASTORE_TORTURE_SEED={seed}"
        runner = Elections(group.start(), network, seed, kinds, HEAL_S)
        runner.run(cycles, name)
        verdict = judge(group, runner.load)
        runner.note_cuts()
    print(f"{name}: {verdict.text}")
    assert verdict.wrong == [], (name, verdict.wrong[:10])
    shutil.rmtree(folder)
    return runner
