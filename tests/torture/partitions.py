"""Cycles of network faults in a group under load: one kind of fault each, then the network heals.

After each cycle writes must be confirmed again, every node must run and follow, and the logs must
be equal. The kinds with three nodes and `acks: 1`:

    lone        a slave is cut off from both other nodes; writes continue
    cutoff      the master is cut off from its slaves, not from its clients, and reconnects
    superseded  the same, but a slave is promoted meanwhile; half of the times clients with acks=1
                append to the old master's log
    asleep      the master is stopped (SIGSTOP), superseded, and continued
    deaf        one way: the slaves receive nothing from the master, which receives from them; half
                of the times one of them is promoted
    mute        the other way: the master receives nothing from its slaves
    ring        each node receives from only one of the two others
    triangle    two slaves cannot reach each other; one of them is promoted
    flapping    links are cut and restored repeatedly, or a cable is pulled and plugged in again
    slow        the master's link has little bandwidth
    lossy       a part of all packets is lost, and a slave is promoted
    behind      the promoted slave was cut off while the other one confirmed: it has to catch up
    chain       the master is cut off and superseded; then its successor is too, by the third node
                or by the old master, which has unconfirmed messages at its end
    rivals      the master is cut off, and both slaves are promoted at the same time
    dying       the master is cut off, and the candidate is killed during its promotion; it comes
                back and continues, or the other slave is promoted

A pair has the kinds that make sense for two nodes. A candidate has no other node there: it opens
its epoch, but its puts are confirmed only after the link is back. In `rivals` the two nodes of the
pair are masters at the same time.
"""

import contextlib
import subprocess
import sys
import time

from hastore.client.producer.producer import Producer
from tests.process.harness import ROOT, wait_until
from tests.torture.cycles import PATIENCE_S, Cycles

KINDS_OF_THREE = (
    *("lone", "cutoff", "superseded", "asleep", "deaf", "mute", "ring", "triangle"),
    *("flapping", "slow", "lossy", "behind", "chain", "rivals", "dying"),
)
KINDS_OF_TWO = (
    *("cutoff", "superseded", "asleep", "deaf", "mute"),
    *("flapping", "slow", "lossy", "rivals", "dying"),
)


class Partitions(Cycles):
    """The cycles over one group; `master` is the node that should be master at the moment."""

    def __init__(self, group, network, seed, kinds):
        super().__init__(group, network, seed, kinds)
        self.master = group[1]
        self.alone = 0

    def describe(self):
        return f"{self.kind}, master is node {self.master.number}"

    @property
    def slaves(self):
        """Return the other nodes, in a random order."""
        others = [node for node in self.group if node is not self.master]
        return self.rng.sample(others, len(others))

    def settled(self):
        """Heal; check that puts are confirmed, all nodes run and follow, and the logs are equal."""
        self.returned(self.heal())
        dead = [node.number for node in self.group if not node.running]
        assert not dead, f"dead: {dead}"
        others = set(self.group.nodes) - {self.master.number}
        self.master.wait_in_sync(*others, timeout_s=PATIENCE_S)
        with self.load.held():
            self.group.wait_equal(PATIENCE_S)
        for node in self.group:
            status = node.wait_status(lambda _: True, "an answer", PATIENCE_S)
            assert status["writable"] == (node is self.master), f"node {node.number}: {status}"

    def order(self, node):
        """Start `hastore promote` for a node, as its operator would."""
        command = [sys.executable, str(ROOT / "bin" / "hastore"), "promote", "-c", str(node.path)]
        command += ["--patience", "60"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT
        )

    def promote(self, node):
        """Promote a node during the fault; with three nodes, wait until puts are confirmed."""
        began_ns = time.monotonic_ns()
        code, said = _end(self.order(node))
        assert code == 0, f"promote node {node.number}: {said}"
        self.master = node
        if len(self.group.nodes) > 2:
            self.returned(began_ns)

    def give_way(self, node):
        """Wait until a node knows that it was superseded; then set the role in its file."""
        node.wait_status(lambda s: s["role"] == "SLAVE", "superseded", PATIENCE_S)
        self.file_says_slave(node)

    def file_says_slave(self, node):
        """Set the role in the file to SLAVE, and wait until the node has applied it."""
        since = len(node.log)
        node.edit_role("SLAVE")
        node.wait_log("changes the role from SYNC_MASTER to SLAVE", PATIENCE_S, since=since)

    def put_alone(self, node):
        """Let a disconnected master acknowledge messages that no other node has."""
        with Producer([node.api], acks=1, delivery_timeout_s=PATIENCE_S) as producer:
            for number in range(self.rng.randrange(1, 40)):
                body = b"alone %d.%d" % (self.alone, number) + bytes(self.rng.randrange(2000))
                future = self.load.recorder.send(producer, "alone", body, "a")
                assert future.result(PATIENCE_S).level == "MASTER_MEM"
        self.alone += 1

    # ---- the kinds

    def cycle_lone(self):
        lone = self.slaves[0]
        self.isolate(lone)
        self.nap(1.0)
        self.returned(time.monotonic_ns())

    def cycle_cutoff(self):
        self.isolate(self.master)
        self.felt(2.0)

    def cycle_superseded(self):
        old, (new, *_) = self.master, self.slaves
        self.isolate(old)
        self.felt(0.5)
        if self.rng.random() < 0.5:
            self.put_alone(old)
        self.promote(new)
        self.nap(0.5)
        self.heal()
        self.give_way(old)

    def cycle_asleep(self):
        old, (new, *_) = self.master, self.slaves
        old.pause()
        try:
            self.nap(0.3)
            self.promote(new)
            self.nap(0.5)
        finally:
            old.resume()
        self.give_way(old)

    def cycle_deaf(self):
        self.one_way(from_master=True)

    def cycle_mute(self):
        self.one_way(from_master=False)

    def one_way(self, from_master):
        old, slaves = self.master, self.slaves
        for slave in slaves:
            ends = (old.number, slave.number)
            self.network.cut(*(ends if from_master else reversed(ends)))
        self.felt(1.0)
        if self.rng.random() < 0.5:
            self.promote(slaves[0])
            self.nap(0.5)
            self.heal()
            self.give_way(old)

    def cycle_ring(self):
        first, second, third = (node.number for node in [self.master, *self.slaves])
        for source, target in ((first, second), (second, third), (third, first)):
            self.network.cut(source, target)
        self.felt(2.0)

    def cycle_triangle(self):
        old, (new, other) = self.master, self.slaves
        self.sever(new, other)
        self.nap(0.3)
        self.promote(new)
        self.give_way(old)
        self.nap(0.5)

    def cycle_flapping(self):
        self.flap([(self.master.number, slave.number) for slave in self.slaves])

    def cycle_slow(self):
        self.network.slow(self.master.number)
        self.nap(1.0)
        self.returned(time.monotonic_ns())
        self.nap(1.0)

    def cycle_lossy(self):
        old, (new, *_) = self.master, self.slaves
        self.lose_some(0.15)
        self.nap(1.0)
        self.promote(new)
        self.give_way(old)
        self.nap(0.5)

    def cycle_behind(self):
        old, (new, other) = self.master, self.slaves
        self.isolate(new)
        self.nap(0.5)
        # Several rounds, so that the candidate lacks puts that the other slave has confirmed.
        for _ in range(3):
            self.returned(time.monotonic_ns())
        self.isolate(old)
        for way in ((new, other), (other, new)):
            self.network.restore(*(node.number for node in way))
        self.promote(new)
        self.heal()
        self.give_way(old)

    def cycle_chain(self):
        first, (second, third) = self.master, self.slaves
        self.isolate(first)
        if self.rng.random() < 0.5:
            self.put_alone(first)
        self.promote(second)
        self.network.heal()
        self.isolate(second)
        self.nap(0.3)
        self.promote(self.rng.choice([first, third]))
        self.heal()
        for node in (first, second):
            if node is not self.master:
                self.give_way(node)

    def cycle_rivals(self):
        old = self.master
        three = len(self.group.nodes) > 2
        self.isolate(old)
        self.nap(0.3)
        rivals = self.slaves if three else [old, *self.slaves]
        with contextlib.ExitStack() as stack:
            orders = [stack.enter_context(self.order(rival)) for rival in rivals]
            began_ns = time.monotonic_ns()
            if not three:
                self.nap(1.5)
                self.heal()
            # One command may report that the other node won; that is no failure. Wait for both: one
            # of them may not have begun yet.
            ends = [_end(order) for order in orders]
        assert 0 in [code for code, _ in ends], ends
        self.master = self.decided(rivals)
        if three:
            self.returned(began_ns)
            self.heal()
        for node in self.group:
            if node is not self.master and (node in rivals or node is old):
                self.give_way(node)

    def decided(self, rivals):
        """Wait until one of the rivals is master and the others follow; return it."""

        def look():
            seen = [(rival, rival.status()) for rival in rivals]
            masters = [r for r, s in seen if s and s["writable"] and s["role"] != "SLAVE"]
            follow = [r for r, s in seen if s and s["role"] == "SLAVE"]
            return masters[0] if len(masters) == 1 and len(follow) == len(rivals) - 1 else None

        return wait_until(look, PATIENCE_S, "neither rival has won")

    def cycle_dying(self):
        old, (new, *others) = self.master, self.slaves
        self.isolate(old)
        self.nap(0.3)
        new.edit_role("SYNC_MASTER")
        self.nap(1.2)  # a node reads a changed file within a second
        assert new.running, "the candidate died by itself"
        new.kill()
        began_ns = time.monotonic_ns()
        if others and self.rng.random() < 0.5:
            # The remaining slave needs an answer of the old master, so heal first.
            self.heal()
            self.promote(others[0])
            new.edit_role("SLAVE")
            new.start("serve")
        else:
            new.start("serve", wait=False)
            new.wait_ready(PATIENCE_S)
            new.wait_writable(PATIENCE_S)
            self.master = new
            if others:
                self.returned(began_ns)
            self.heal()
        self.give_way(old)


def _end(order):
    """Wait for a command; return its exit code and its output."""
    try:
        said, _ = order.communicate(timeout=PATIENCE_S + 60)
    except BaseException:
        order.kill()
        order.communicate()
        raise
    return order.returncode, said.decode(errors="replace").strip()
