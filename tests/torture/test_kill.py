"""Kill the nodes of a pair, and of three nodes, at random times under load; promote and rejoin.

A short run has the two kinds that matter most. HASTORE_TORTURE_CYCLES (20) sets the length of the
others. HASTORE_TORTURE_SEED replays one: the seed
fixes the kinds, their order and the pauses, but not the machine's timing. `make torture` runs 500
cycles in about 20 minutes.

Kinds of a cycle with two nodes:

    master      SIGKILL of the master, the slave is promoted, the old master rejoins (half of the
                times its file still says master). The first time, the master is stopped before,
                until a put has ended without an answer
    slave       SIGKILL and restart of the slave
    both        SIGKILL of both, one after the other; restart, the epoch continues
    tail        the slave dies, the master acknowledges alone and dies; the slave is promoted, and
                the end of the old master's log must go to rescued/
    rejoin      like tail, and the old master is killed again while it cuts and catches up
    promoting   like master, and the candidate is killed during its promotion
    switch      the running master is demoted, and the slave promoted

With three nodes (half as many cycles): slave, master, switch, and

    lag         a slave is stopped, the master dies, the slave is killed and promoted: it catches up
    two         the master and a slave die; the last node waits for an answer, then is promoted
    all         all nodes die, and continue in the same epoch
    duel        a slave is promoted while the master runs
    rivals      the master dies, and both slaves are promoted at the same time
"""

import os
import random
import time
from collections import Counter

import pytest

from hastore.client.producer.producer import Producer
from tests.process.harness import wait_until
from tests.process.history import UNKNOWN
from tests.torture.load import Load, judge

CYCLES = int(os.environ.get("HASTORE_TORTURE_CYCLES", "20"))
SEED = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().getrandbits(32)
KINDS = ("master", "slave", "both", "tail", "rejoin", "promoting", "switch")
RESUME_S = 60.0  # writes must resume by themselves; the limit allows for a busy machine


class Torture:
    """The cycles; `master` and `slave` are the nodes that have these roles at the moment."""

    kinds = KINDS

    def __init__(self, group, seed):
        self.group = group
        self.rng = random.Random(seed)
        self.load = Load(group, seed)
        self.master, self.slave = group[1], group[2]
        self.done = Counter()
        self.alone = 0
        self.slowest_s = 0.0

    def run(self, cycles, first=0):
        for cycle in range(first, first + cycles):
            place = cycle % len(self.kinds)
            if place == 0:
                self.order = self.rng.sample(self.kinds, len(self.kinds))
            kind = self.order[place]
            print(f"cycle {cycle}: {kind}, master is node {self.master.number}", flush=True)
            self.nap(0.3)
            getattr(self, f"cycle_{kind}")()
            self.settled()
            self.done[kind] += 1

    def nap(self, longest_s):
        time.sleep(self.rng.random() * longest_s)

    def settled(self):
        """Wait until puts are confirmed again and all slaves are in sync."""
        began_ns = time.monotonic_ns()
        wait_until(
            lambda: self.load.recorder.acked_since(began_ns) or self.load.failures,
            RESUME_S,
            lambda: f"nothing acknowledged for {RESUME_S:g} s: {self.master.status()}",
        )
        assert not self.load.failures, self.load.failures
        self.master.wait_in_sync(*(set(self.group.nodes) - {self.master.number}))
        self.slowest_s = max(self.slowest_s, (time.monotonic_ns() - began_ns) / 1e9)

    def flip(self):
        """Make the slave the master; `master` and `slave` change places."""
        self.slave.edit_role("SYNC_MASTER")
        if not self.slave.running:
            self.slave.start("master", wait=False)
        self.master, self.slave = self.slave, self.master

    def rejoin(self):
        """Start the old master; half of the times its file still says master."""
        stubborn = self.rng.random() < 0.5
        if not stubborn:
            self.slave.edit_role("SLAVE")
        self.slave.start("serve", wait=False)
        self.slave.wait_ready()
        if stubborn:
            self.slave.wait_status(lambda s: s["role"] == "SLAVE", "superseded")
            # Wait for the log line: the node must have read this edit before the next one.
            said = len(self.slave.log)
            self.slave.edit_role("SLAVE")
            self.slave.wait_log("changes the role from SYNC_MASTER to SLAVE", since=said)

    def unanswered(self):
        """Stop the master until a put has ended without an answer: its outcome is unknown."""
        before = self.load.recorder.count(UNKNOWN)
        self.master.pause()
        wait_until(
            lambda: self.load.recorder.count(UNKNOWN) > before or self.load.failures,
            RESUME_S,
            "no put ended without an answer",
        )

    def put_alone(self):
        """Let the master acknowledge messages that no other node has."""
        with Producer(self.group.bootstrap, acks=1, delivery_timeout_s=60) as producer:
            for number in range(self.rng.randrange(1, 40)):
                body = b"alone %d.%d" % (self.alone, number) + bytes(self.rng.randrange(5000))
                self.load.recorder.send(producer, "alone", body, "a").result(60)
        self.alone += 1

    # ---- the kinds

    def cycle_switch(self):
        self.master.edit_role("SLAVE")
        self.master.wait_status(lambda s: not s["writable"], "demoted")
        self.flip()
        self.master.wait_writable()

    def cycle_slave(self):
        self.slave.kill()
        self.nap(0.3)
        self.slave.start("slave")

    def cycle_both(self):
        first, second = self.rng.sample([self.master, self.slave], 2)
        first.kill()
        self.nap(0.2)
        second.kill()
        for node in self.rng.sample([first, second], 2):
            node.start("serve", wait=False)
            self.nap(0.3)
        self.master.wait_ready()
        self.slave.wait_ready()

    def cycle_master(self):
        if not self.done["master"]:
            self.unanswered()
        self.master.kill()
        self.nap(0.2)
        self.flip()
        self.nap(0.3)
        self.rejoin()

    def cycle_tail(self):
        self.slave.kill()
        self.put_alone()
        self.master.kill()
        self.flip()
        self.master.wait_writable()
        self.rejoin()

    def cycle_rejoin(self):
        self.slave.kill()
        self.put_alone()
        self.master.kill()
        self.flip()
        self.master.wait_writable()
        self.slave.edit_role("SLAVE")
        self.slave.start("slave", wait=False)
        self.nap(0.5)
        self.slave.kill()
        said = len(self.slave.log)
        self.slave.start("slave", wait=False)
        self.slave.wait_log("INFO store ", since=said)  # it asks for the master, then it cuts
        self.nap(0.15)
        self.slave.kill()
        self.slave.start("slave")

    def cycle_promoting(self):
        self.master.kill()
        self.flip()
        self.nap(0.25)
        self.master.kill()
        self.master.start("master", wait=False)
        self.nap(0.6)
        self.rejoin()
        self.master.wait_ready()


class ThreeTorture(Torture):
    """Three nodes with `acks: 1`: two of three must answer a promotion."""

    kinds = ("slave", "master", "switch", "lag", "two", "all", "duel", "rivals")

    def __init__(self, group, seed):
        super().__init__(group, seed)
        self.third = group[3]

    def run(self, cycles, first=0):
        for cycle in range(cycles):
            if self.rng.random() < 0.5:
                self.slave, self.third = self.third, self.slave
            super().run(1, cycle)

    def cycle_lag(self):
        self.slave.pause()
        self.nap(0.5)
        self.master.kill()
        self.slave.kill()
        self.flip()
        self.nap(0.3)
        self.rejoin()
        self.master.wait_ready()

    def cycle_two(self):
        old, other = self.master, self.third
        for node in self.rng.sample([old, other], 2):
            node.kill()
            self.nap(0.1)
        self.flip()
        self.nap(0.5)
        other.start("slave")
        self.master.wait_writable()
        self.rejoin()

    def cycle_all(self):
        nodes = [self.master, self.slave, self.third]
        for node in self.rng.sample(nodes, 3):
            node.kill()
            self.nap(0.1)
        for node in self.rng.sample(nodes, 3):
            node.start("serve", wait=False)
            self.nap(0.2)
        for node in nodes:
            node.wait_ready()

    def cycle_duel(self):
        self.flip()
        self.master.wait_writable()
        self.slave.wait_status(lambda s: s["role"] == "SLAVE", "superseded")
        said = len(self.slave.log)
        self.slave.edit_role("SLAVE")
        self.slave.wait_log("changes the role from SYNC_MASTER to SLAVE", since=said)

    def cycle_rivals(self):
        old, rivals = self.master, self.rng.sample([self.slave, self.third], 2)
        old.kill()
        said = [len(rival.log) for rival in rivals]
        for rival in rivals:
            rival.edit_role("SYNC_MASTER")
            self.nap(0.1)
        for rival, since in zip(rivals, said, strict=True):
            rival.wait_log("changes the role from SLAVE to SYNC_MASTER", since=since)

        def decided():
            seen = [rival.status() for rival in rivals]
            open_ones = [s["writable"] and s["role"] != "SLAVE" for s in seen if s]
            follows = [s["role"] == "SLAVE" for s in seen if s]
            return sum(open_ones) == 1 and sum(follows) == 1 and rivals[open_ones.index(True)]

        self.master = wait_until(decided, RESUME_S, lambda: [rival.status() for rival in rivals])
        self.slave, self.third = (node for node in self.group if node is not self.master)
        loser = rivals[0] if self.master is rivals[1] else rivals[1]
        since = len(loser.log)
        loser.edit_role("SLAVE")
        loser.wait_log("changes the role from SYNC_MASTER to SLAVE", since=since)
        old.edit_role("SLAVE")
        old.start("slave")


class ShortTorture(Torture):
    """A kill with a promotion, and one that leaves a tail to be archived."""

    kinds = ("master", "tail")


def test_a_pair_loses_nothing_in_two_cycles(make_group):
    print(f"HASTORE_TORTURE_SEED={SEED}")
    assert torment(make_group(2, **SETTINGS), ShortTorture, 2).rescued


@pytest.mark.full
@pytest.mark.slow("each kind of kill, almost three times")
@pytest.mark.timeout(600 + 60 * CYCLES)
def test_a_pair_loses_nothing(make_group):
    print(f"HASTORE_TORTURE_SEED={SEED} HASTORE_TORTURE_CYCLES={CYCLES}")
    verdict = torment(make_group(2, **SETTINGS), Torture, CYCLES)
    assert CYCLES < len(KINDS) or verdict.rescued


@pytest.mark.full
@pytest.mark.slow("each kind of kill")
@pytest.mark.timeout(600 + 60 * CYCLES)
def test_three_nodes_lose_nothing(make_group):
    print(f"HASTORE_TORTURE_SEED={SEED} HASTORE_TORTURE_CYCLES={CYCLES}")
    torment(make_group(3, **SETTINGS), ThreeTorture, max(1, CYCLES // 2))


SETTINGS = {
    "store": {"commitlog_file_size": "256KiB"},
    "retention": {"check_interval": "200ms"},
    "ha": {"slave_timeout": "1s"},
}


def meant_something(load, cycles):
    """Return whether there were puts and reads in each cycle, on average."""
    puts = sum(put.durable for put in list(load.recorder.puts))
    return puts > 50 * cycles and load.recorder.read > 20 * cycles


def torment(group, kind, cycles):
    """Run and judge the cycles; return the verdict."""
    torture = kind(group.start(), SEED)
    load = torture.load
    load.start()
    try:
        torture.run(cycles)
        enough = f"{50 * cycles} puts and {20 * cycles} reads"
        wait_until(lambda: load.failures or meant_something(load, cycles), RESUME_S, enough)
    finally:
        load.stopping.set()
        load.stop()
    # The master may not have read yet what a producer has sent and given up.
    wait_until(lambda: not any(node.clients() for node in group), RESUME_S, "clients stay")
    verdict = judge(group, torture.master, load)
    print(f"{verdict.text}; {dict(torture.done)}; slowest to settle {torture.slowest_s:.1f} s")
    assert verdict.wrong == [], verdict.wrong[:10]
    assert meant_something(load, cycles) and not load.failures, load.failures
    assert verdict.epochs > cycles // 3
    assert load.recorder.count(UNKNOWN) or not torture.done["master"]
    return verdict
