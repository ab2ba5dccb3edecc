"""Cycles of faults in a group under load: one kind of fault each, after which the group must heal.

A subclass has a method `cycle_KIND` for each kind, and `settled`, which heals and checks the group.
"""

import random
import time
from collections import Counter

from tests.process.harness import wait_until
from tests.torture.load import Load, busy

PATIENCE_S = 180.0  # a wait that takes longer than this is a hang


def in_turn(kinds, rng):
    """Yield the kinds without end: all of them in a random order, then in another order."""
    while True:
        yield from rng.sample(kinds, len(kinds))


class Cycles:
    """The cycles over one group in one network; everything random follows from the seed."""

    def __init__(self, group, network, seed, kinds):
        self.group = group
        self.network = network
        self.rng = random.Random(seed)
        self.load = Load(group, seed, sizes=(5, 50, 500), pause_s=0.02)
        self.done = Counter()
        self.slowest = (0.0, "none")
        self.kinds = kinds
        self.kind = ""

    def run(self, cycles, name):
        """Run `cycles` cycles under the load, which ends with them."""
        self.load.start()
        try:
            self._run(cycles, name)
            wait_until(lambda: busy(self.load, cycles), PATIENCE_S, "too few puts or reads")
        finally:
            self.network.heal()  # also after a failure, so that puts under way end soon
            self.load.stop()

    def _run(self, cycles, name):
        """Run the cycles; a failure names its cycle and the state of all nodes."""
        for number, kind in zip(range(cycles), in_turn(self.kinds, self.rng), strict=False):
            began_s = time.monotonic()
            self.kind = kind
            where = f"{name}, cycle {number}: {self.describe()}"
            print(where, end="", flush=True)
            try:
                getattr(self, f"cycle_{kind}")()
                self.settled()
            except Exception as failure:
                raise AssertionError(f"{where}: {failure!r}\n{self.state()}") from failure
            self.done[kind] += 1
            print(f" ({time.monotonic() - began_s:.1f} s)", flush=True)

    def describe(self):
        """Return the cycle's kind and what else a reader of the run should know."""
        return self.kind

    def settled(self):
        """Heal; check that puts are confirmed, all nodes run and follow, and the logs are equal."""
        raise NotImplementedError

    def state(self):
        """Return the status of each node and the end of its log."""
        text = []
        for node in self.group:
            life = "runs" if node.running else "is dead"
            text.append(f"node {node.number} {life}: {node.status()}\n{node.last_lines(12)}")
        return "\n".join(text)

    # ---- parts of a cycle

    def nap(self, longest_s):
        """Let the fault last for a random time."""
        time.sleep((0.2 + 0.8 * self.rng.random()) * longest_s)

    def felt(self, longest_s):
        """Let a fault last during which no put may be confirmed; check that none is."""
        began_ns = time.monotonic_ns()
        self.nap(longest_s)
        assert not self.load.recorder.acked_since(began_ns), "confirmed over a link that is cut"

    def heal(self):
        """End the faults of the network; return the time from which writes must be confirmed."""
        self.network.heal()
        return time.monotonic_ns()

    def returned(self, since_ns):
        """Wait until a put that began after `since_ns` is confirmed; return how long it took."""
        wait_until(
            lambda: self.load.recorder.acked_since(since_ns) or self.load.failures,
            PATIENCE_S,
            "no put is confirmed",
        )
        assert not self.load.failures, self.load.failures
        took_s = (self.load.recorder.first_ack_ns(since_ns) - since_ns) / 1e9
        self.slowest = max(self.slowest, (took_s, self.kind))
        return took_s

    def sever(self, one, other):
        """Cut the link between two nodes, both ways."""
        self.network.cut(one.number, other.number)
        self.network.cut(other.number, one.number)

    def isolate(self, node):
        """Cut a node off from all other nodes, both ways; clients still reach it."""
        for other in self.group:
            if other is not node:
                self.sever(node, other)

    def flap(self, ends):
        """Cut and restore links repeatedly, or pull a cable and plug it in again."""
        pulled = self.rng.random() < 0.5
        for _ in range(self.rng.randrange(3, 8)):
            first, second = self.rng.choice(ends)
            if pulled:
                self.network.unplug(second)
                self.nap(0.3)
                self.network.plug(second)
            else:
                self.network.cut(first, second)
                self.nap(0.2)
                self.network.cut(second, first)
                self.nap(0.2)
                self.network.heal()
            self.nap(0.2)

    def lose_some(self, share):
        """Lose a share of the packets between all nodes."""
        for source in self.group:
            for target in self.group:
                if source is not target:
                    self.network.lose(source.number, target.number, share)
