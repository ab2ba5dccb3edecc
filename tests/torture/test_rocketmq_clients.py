"""Flips, kills, hangs and partitions under RocketMQ's own Java clients, in both modes.

All the time producers send and others consume, with the clients 5.3.3 and 4.9.8 at the same time:
of each version two push consumers share a topic, two orderly ones another. The nodes are three,
with proxies between them (tests/process/networks.py). Afterwards each node has each acknowledged
message, each was delivered, and each stream of the orderly topics came in the order in which it was
sent, but for what was delivered again.

`make test-all` has each kind once in each mode. HASTORE_CLIENTS_CYCLES (make torture-rocketmq: 200)
makes the run longer: half of the cycles in each mode, in rounds of 25 with a new group each.
HASTORE_TORTURE_SEED replays the kinds, their order and the pauses, but not the machine's timing.
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
VERSIONS = {"5.3.3": CLIENTS_5, "4.9.8": CLIENTS_4}
LOADS = {"plain": False, "ordered": True}  # kinds of topics; whether a stream keeps to its queue
STREAMS = 4
EVERY_MS = 40
STORE = {"commitlog_file_size": "4MiB", "consume_queue_units": 3000}
SETTINGS = {"store": STORE, "retention": {"check_interval": "200ms"}}
TIMES = {"slave_timeout": "1s", "housekeeping_interval": "3s"}


class JavaLoad:
    """The clients of one round, with what Cycles asks a load for."""

    def __init__(self, jvms, site):
        """Take a JVM for each version of the clients."""
        self.failures = []  # a send that fails is no failure of the load
        self.recorder = self
        self.seen = {}
        self._site = site
        self._jvms = {
            f"{kind}-{version.partition('.')[0]}": jvm
            for version, jvm in jvms.items() for kind in LOADS
        }  # by topic  # fmt: skip
        self._consumers = {}

    def start(self):
        for topic, jvm in self._jvms.items():
            producer = jvm.producer(self._site, timeout_ms=3_000)
            ordered = is_ordered(topic)
            self._consumers[topic] = [
                jvm.push(self._site, f"of-{topic}", topic, orderly=ordered, compact=True)
                for _ in range(2)
            ]
            jvm.call(
                "load.start", load=topic, name=producer, topic=topic, ordered=ordered,
                streams=STREAMS, every_ms=EVERY_MS,
            )  # fmt: skip
        since_ns = time.monotonic_ns()
        wait_until(lambda: self.acked_since(since_ns), PATIENCE_S, "nothing is acknowledged")

    def first_ack_ns(self, since_ns):
        """Return when the last of the loads had a send acknowledged that began after a time."""
        firsts = [
            jvm.call("load.first", load=topic, since_ms=since_ns / 1e6)
            for topic, jvm in self._jvms.items()
        ]
        return None if None in firsts else round(max(firsts) * 1e6)

    def acked_since(self, since_ns):
        return self.first_ack_ns(since_ns) is not None

    @contextlib.contextmanager
    def held(self):
        """Stop new sends within the block."""
        for held in (True, False):
            for topic, jvm in self._jvms.items():
                jvm.call("load.hold", load=topic, held=held)
            if held:
                yield

    def stop(self):
        """End the loads; keep what the clients saw, once all that is acknowledged was delivered."""
        for topic, jvm in self._jvms.items():
            streams = jvm.call("load.stop", load=topic)
            wanted = {
                f"{s['stream']}:{number}" for s in streams for number, *_ in s["acknowledged"]
            }
            # A lock that a new master does not know goes to a consumer after 65 s.
            deadline = time.monotonic() + 2 * PATIENCE_S
            while True:
                received = [
                    one
                    for name in self._consumers[topic]
                    for one in jvm.call("push.numbers", name=name)
                ]
                missing = wanted - {name for name, _ in received}
                if not missing or time.monotonic() > deadline:
                    break
                time.sleep(0.2)
            self.seen[topic] = told(streams, received)


def is_ordered(topic):
    return LOADS[topic.partition("-")[0]]


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
        done += one_round(tmp_path / f"round{number}", mode, kinds, count, seed, figures)
    print(
        f"{mode}: {done.total()} cycles in {time.monotonic() - began_s:.0f} s, "
        f"{dict(sorted(done.items()))}; {dict(figures)}; nothing acknowledged is lost, each was "
        "delivered, the ordered ones in order"
    )
    assert done.total() == cycles


def one_round(folder, mode, kinds, cycles, seed, figures):
    """Run cycles over a new group with new clients, and judge; return the cycles by kind."""
    folder.mkdir()
    name = f"{mode}, HASTORE_TORTURE_SEED={seed}"
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
        jvms = {}
        for version, program in VERSIONS.items():
            jvms[version] = Clients(command(program), folder, f"clients-{version}")
            stack.callback(jvms[version].kill)
        runner = faults(group, network, seed, kinds)
        runner.load = JavaLoad(jvms, HastoreSite(group, mode))
        runner.run(cycles, name)
        for jvm in jvms.values():
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
    if is_ordered(topic):
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


@pytest.mark.parametrize(
    ("came", "wrong"),
    [
        (["0:0", "1:0", "0:1", "0:0", "0:1", "0:2", "1:1"], None),  # some of them again
        (["0:0", "0:2", "0:1"], "0:1 came after 0:2"),
        (["0:0", "1:1", "0:1", "1:0"], "1:0 came after 1:1"),
    ],
)
def test_a_wrong_order_is_found(came, wrong):
    seen = told([], [(name, float(at)) for at, name in enumerate(came)][::-1])
    with contextlib.nullcontext() if wrong is None else pytest.raises(AssertionError, match=wrong):
        assert_in_order(seen)
