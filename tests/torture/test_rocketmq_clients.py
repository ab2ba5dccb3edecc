"""Flips, kills, hangs and partitions under RocketMQ's own Java clients, in both modes.

All the time a producer sends and others consume: two push consumers share a topic, two orderly ones
another. The nodes are three, with proxies between them (tests/process/networks.py). Afterwards each
node has each acknowledged message, each was delivered, and each stream of the orderly topic came in
the order in which it was sent, but for what was delivered again.

`make test-all` has each kind once in each mode. HASTORE_CLIENTS_CYCLES (make torture-rocketmq: 200)
makes the run longer: half of the cycles in each mode, in rounds of 25 with a new group each, with
the clients 5.3.3 and 4.9.8 in turn. HASTORE_TORTURE_SEED replays the kinds, their order and the
pauses, but not the machine's timing.
"""

import contextlib
import os
import random
import shutil
import time
from collections import Counter

import pytest

from hastore.demo.java_clients import prove_consumed, prove_stored, told
from tests.interop.build import CLIENTS_4, CLIENTS_5, command
from tests.interop.rocketmq_clients import Clients, HastoreSite
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until
from tests.process.networks import open_network
from tests.torture.cycles import PATIENCE_S
from tests.torture.dledger import Elections
from tests.torture.partitions import Partitions

pytestmark = pytest.mark.full
CYCLES = int(os.environ.get("HASTORE_CLIENTS_CYCLES", "0"))
SEED = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().getrandbits(32)
ROUND = 25
NODES = 3
CLASSIC = ("flip", "killed", "asleep", "superseded")  # flip, kill, hang, partition
DLEDGER = ("transfer", "kill", "asleep", "cutoff")
LOADS = {"plain": False, "ordered": True}  # topics; whether a stream keeps to its queue
STREAMS = 4
EVERY_MS = 20
STORE = {"commitlog_file_size": "4MiB", "consume_queue_units": 3000}
SETTINGS = {"store": STORE, "retention": {"check_interval": "200ms"}}
TIMES = {"slave_timeout": "1s", "housekeeping_interval": "3s"}


class JavaLoad:
    """The clients of one round, with what Cycles asks a load for."""

    def __init__(self, jvm, site):
        self.failures = []  # a send that fails is no failure of the load
        self.recorder = self
        self.seen = {}
        self._jvm, self._site = jvm, site
        self._consumers = {}

    def start(self):
        producer = self._jvm.producer(self._site)
        for topic, ordered in LOADS.items():
            self._consumers[topic] = [
                self._jvm.push(self._site, f"of-{topic}", topic, orderly=ordered, compact=True)
                for _ in range(2)
            ]
            self._jvm.call(
                "load.start", load=topic, name=producer, topic=topic, ordered=ordered,
                streams=STREAMS, every_ms=EVERY_MS,
            )  # fmt: skip
        since_ns = time.monotonic_ns()
        wait_until(lambda: self.acked_since(since_ns), PATIENCE_S, "nothing is acknowledged")

    def first_ack_ns(self, since_ns):
        """Return when the last of the loads had a send acknowledged that began after a time."""
        firsts = [
            self._jvm.call("load.first", load=topic, since_ms=since_ns / 1e6) for topic in LOADS
        ]
        return None if None in firsts else round(max(firsts) * 1e6)

    def acked_since(self, since_ns):
        return self.first_ack_ns(since_ns) is not None

    @contextlib.contextmanager
    def held(self):
        """Stop new sends within the block."""
        for held in (True, False):
            for topic in LOADS:
                self._jvm.call("load.hold", load=topic, held=held)
            if held:
                yield

    def stop(self):
        """End the loads; keep what the clients saw, once all that is acknowledged was delivered."""
        for topic, consumers in self._consumers.items():
            streams = self._jvm.call("load.stop", load=topic)
            wanted = {
                f"{s['stream']}:{number}" for s in streams for number, *_ in s["acknowledged"]
            }
            deadline = time.monotonic() + PATIENCE_S
            while True:
                received = [
                    one for name in consumers for one in self._jvm.call("push.numbers", name=name)
                ]
                missing = wanted - {name for name, _ in received}
                if not missing or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            self.seen[topic] = told(streams, received)


class Clientele:
    """Runs cycles under a JavaLoad instead of hastore's own clients."""

    def run(self, cycles, name):
        self.load.start()
        try:
            self._run(cycles, name)
        finally:
            self.network.heal()
            self.load.stop()


class ClassicFaults(Clientele, Partitions):
    """Three nodes of which one is promoted by its operator."""

    def cycle_flip(self):
        old, (new, *_) = self.master, self.slaves
        self.promote(new)
        self.give_way(old)

    def cycle_killed(self):
        old, (new, *_) = self.master, self.slaves
        old.kill()
        self.nap(0.3)
        self.promote(new)
        old.edit_role("SLAVE")
        old.start("serve")

    def felt(self, longest_s):
        """Let a fault last; the load's sends may be acknowledged by no cut-off master."""
        self.nap(longest_s)

    def put_alone(self, node):
        """Append nothing more: the load sends to the cut-off master all the time."""


class DLedgerFaults(Clientele, Elections):
    """Three nodes that elect their leader."""

    def felt(self, longest_s):
        """Let a fault last: the twins of the other nodes may go on acknowledging."""
        self.nap(longest_s)


@pytest.mark.slow("each kind of fault")
@pytest.mark.timeout(600 + 20 * CYCLES)
@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_clients_lose_nothing(tmp_path, mode):
    kinds = CLASSIC if mode == "classic" else DLEDGER
    cycles = CYCLES // 2 or len(kinds)
    done, figures, began_s = Counter(), Counter(), time.monotonic()
    for number, first in enumerate(range(0, cycles, ROUND)):
        seed, count = SEED + number, min(ROUND, cycles - first)
        done += one_round(tmp_path / f"round{number}", mode, kinds, count, seed, number, figures)
    print(
        f"{mode}: {done.total()} cycles in {time.monotonic() - began_s:.0f} s, "
        f"{dict(sorted(done.items()))}; {dict(figures)}; nothing acknowledged is lost, each was "
        "delivered, the ordered ones in order"
    )
    assert done.total() == cycles


def one_round(folder, mode, kinds, cycles, seed, number, figures):
    """Run cycles over a new group with new clients, and judge; return the cycles by kind."""
    folder.mkdir()
    program, version = [(CLIENTS_5, "5.3.3"), (CLIENTS_4, "4.9.8")][number % 2]
    name = f"{mode}, clients {version}, HASTORE_TORTURE_SEED={seed}"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(open_network(NODES, "proxies"))
        if mode == "classic":
            group = Group(folder, NODES, network=network, ha=TIMES, **SETTINGS)
            faults = ClassicFaults
        else:
            group = DLedgerGroup(folder, NODES, network=network, faulty=True, **SETTINGS)
            faults = DLedgerFaults
        stack.enter_context(group)
        group.start()
        jvm = Clients(command(program), folder, f"clients-{version}")
        stack.callback(jvm.kill)
        runner = faults(group, network, seed, kinds)
        runner.load = JavaLoad(jvm, HastoreSite(group, mode))
        runner.run(cycles, name)
        jvm.kill()
        for node in group:
            assert node.stop() == 0, f"node {node.number}: {node.last_words()}"
        for topic, seen in runner.load.seen.items():
            found = judge(group, topic, seen)
            figures.update(found)
            gaps = seen.acknowledgement_gap().ms / 1000, seen.delivery_gap().ms / 1000
            print(f"{name}, {topic}: {dict(found)}; longest gap {gaps[0]:.1f} s, {gaps[1]:.1f} s")
    shutil.rmtree(folder)
    return runner.done


def judge(group, topic, seen):
    """Check what the clients saw against the stores; return the figures."""
    delivered = prove_consumed(seen)
    for node in group:
        stored = prove_stored(node.store, topic, seen)
    if LOADS[topic]:
        assert_in_order(seen)
    return Counter(
        acknowledged=len(seen.acknowledged),
        failed=len(seen.failed),
        stored_again=sum(stored.values()) - len(stored),
        delivered_again=sum(delivered.values()) - len(delivered),
    )


def assert_in_order(seen):
    """Check that the first deliveries of each stream have its order."""
    first = {}
    for name, at in sorted(seen.delivered, key=lambda one: one[1]):
        first.setdefault(name, at)
    last = {}
    for name in first:
        stream, _, number = name.partition(":")
        assert last.get(stream, -1) < int(number), f"{name} came after {stream}:{last[stream]}"
        last[stream] = int(number)
