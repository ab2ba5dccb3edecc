"""Cycles of faults in a group of mode dledger under load: three nodes, or five.

After each cycle all faults end. Then a put must be confirmed within `heal_s`, all nodes must follow
one leader, and their logs must be equal. Each cycle checks that its fault has met the group. Kinds:

    kill        SIGKILL of the leader; it comes back after the next one has confirmed puts
    follower    SIGKILL of a follower
    majority    SIGKILL of a majority, with the leader or without it
    all         SIGKILL of all nodes at once
    stop        SIGTERM of the leader, which hands over
    asleep      the leader is stopped (SIGSTOP) until another one confirms puts
    dozing      nodes are stopped for a moment, one after the other
    wipe        a node is killed and loses its disk; half of the times another one is killed while
                it has not been filled again
    cutoff      the leader is cut off from the other nodes, not from its clients
    lone        a follower is cut off
    halves      the nodes are split at random
    deaf        one way: the leader receives nothing from the others
    mute        the other way: the others receive nothing from the leader
    triangle    the leader and a follower cannot reach each other, all others can
    ring        each node receives from only one of the others
    flapping    links are cut and restored repeatedly, or cables are pulled and plugged in again
    slow        the leader's link has little bandwidth
    lossy       a part of all packets is lost
    clock       wall clocks jump by up to a day, monotonic clocks forward by up to 4 s
    slowdisk    syncs take up to 1.5 s longer, on one node or on several
    fulldisk    the leader's disk is full: another node must lead; half of the times a follower's
    badsync     a sync fails: the node must leave the quorum; it is restarted
    transfer    an administrator transfers the leadership; half of the times the leader is killed
                right after the request was written
    members     a node is removed and added again, or replaces another, which is added then; half
                of the times that one is killed meanwhile
    storm       kills, pauses, cuts, slow and full disks and jumps of clocks at the same time
"""

import shutil
import signal
import time
from collections import Counter

from hastore.clock import SYSTEM_CLOCK
from hastore.dledger.driver.requests import request_path, write_request
from hastore.fs.filesystem import REAL
from tests.interop.dledger_files import read_ledger
from tests.process.harness import wait_until
from tests.process.stores import QUEUES_TOPIC, assert_queues_fit, parse_record
from tests.torture.cycles import PATIENCE_S, Cycles
from tests.torture.load import verdict

KINDS = (
    *("kill", "follower", "majority", "all", "stop", "asleep", "dozing", "wipe"),
    *("cutoff", "lone", "halves", "deaf", "mute", "triangle", "ring", "flapping", "slow", "lossy"),
    *("clock", "slowdisk", "fulldisk", "badsync", "transfer", "members", "storm"),
)
DAY_MS = 24 * 3_600_000
OWN_TOPICS = ("HASTORE_DLEDGER", QUEUES_TOPIC)  # of the group's own entries: in no queue


class Elections(Cycles):
    """The cycles over one DLedgerGroup with `faulty` nodes. `met` counts the faults."""

    def __init__(self, group, network, seed, kinds, heal_s=PATIENCE_S):
        super().__init__(group, network, seed, kinds)
        self.heal_s = heal_s
        self.met = Counter()
        self.healed_s = []

    @property
    def nodes(self):
        """Return all nodes, in a random order."""
        nodes = list(self.group)
        return self.rng.sample(nodes, len(nodes))

    def led(self):
        """Return the leader, and the other nodes in a random order."""
        leader = self.group.wait_leader(timeout_s=PATIENCE_S)
        return leader, [node for node in self.nodes if node is not leader]

    def some(self, most=None):
        """Return some of the nodes, at least one."""
        return self.nodes[: self.rng.randrange(1, (most or len(self.group.nodes)) + 1)]

    def heal(self):
        """End all faults and start what was killed; return the time when all nodes answered."""
        self.network.heal()
        for node in self.group:
            self.group.faults[node.number].heal()
        for node in self.nodes:
            if node.process is None:
                node.start("dledger", wait=False)
        for node in self.group:
            node.wait_status(lambda _: True, "an answer", PATIENCE_S)
        return time.monotonic_ns()

    def settled(self):
        """Heal; check that puts are confirmed soon, and that all nodes follow with equal logs."""
        took_s = self.returned(self.heal())
        assert took_s <= self.heal_s, f"the first put was confirmed {took_s:.1f} s after healing"
        self.healed_s.append(took_s)
        with self.load.held():
            self.group.wait_same(PATIENCE_S)
        seen = []

        def follow_one():
            """Whether all follow the same leader, who may change until then."""
            seen[:] = [node.status() for node in self.group]
            if not all(seen) or not all(status["remembers"] for status in seen):
                return False
            leaders = {status["leader"] for status in seen}
            return len(leaders) == 1 and None not in leaders

        wait_until(follow_one, PATIENCE_S, lambda: f"they follow no leader: {seen}")
        for status in seen:
            assert status["members"] == sorted(self.group.nodes), status

    def note_cuts(self):
        """Count how often a node has cut the end of its log: what no majority had."""
        self.met["cut of a log"] = sum(
            node.log.count("bytes are in rescued/") for node in self.group
        )

    def elected(self, old, since_ns):
        """Wait until another node than `old` leads and confirms puts."""
        self.group.wait_leader(but=old, timeout_s=PATIENCE_S)
        self.returned(since_ns)
        self.met["another leader"] += 1

    def kill(self, *nodes):
        """Send SIGKILL to all of them before the first is reaped."""
        for node in nodes:
            node.send(signal.SIGKILL)
        for node in nodes:
            node.kill()
        self.met["kill"] += len(nodes)

    def counted(self, node, name, text):
        """Wait until a node has met a fault of its clock or disk once more."""
        faults = self.group.faults[node.number]
        before = faults[name]
        wait_until(lambda: faults[name] > before, PATIENCE_S, f"node {node.number} met no {text}")
        self.met[text] += 1

    # ---- processes

    def cycle_kill(self):
        leader, _ = self.led()
        self.nap(0.3)
        self.kill(leader)
        self.elected(leader, time.monotonic_ns())

    def cycle_follower(self):
        _, (follower, *_) = self.led()
        self.kill(follower)
        self.nap(0.3)
        self.returned(time.monotonic_ns())

    def cycle_majority(self):
        nodes = self.nodes
        dead = nodes[: len(nodes) // 2 + 1]
        for node in dead:
            self.kill(node)
            self.nap(0.1)
        self.felt(1.0)
        for node in dead:
            node.start("dledger", wait=False)
            self.nap(0.3)

    def cycle_all(self):
        self.kill(*self.group)
        for node in self.nodes:
            node.start("dledger", wait=False)
            self.nap(0.3)

    def cycle_stop(self):
        leader, _ = self.led()
        began_ns = time.monotonic_ns()
        assert leader.stop() == 0
        self.elected(leader, began_ns)

    def cycle_asleep(self):
        leader, _ = self.led()
        leader.pause()
        try:
            self.elected(leader, time.monotonic_ns())
        finally:
            leader.resume()
        self.met["pause"] += 1

    def cycle_dozing(self):
        for node in self.nodes:
            node.pause()
            try:
                self.nap(1.2)
            finally:
                node.resume()
            self.met["pause"] += 1
            self.nap(0.2)

    def cycle_wipe(self):
        leader, followers = self.led()
        lost, other = followers[0], self.rng.choice([leader, *followers[1:]])
        if self.rng.random() < 0.3:
            lost, other = leader, followers[0]
        self.kill(lost)
        shutil.rmtree(lost.store)
        since = len(lost.log)
        self.nap(0.3)
        lost.start("dledger", wait=False)
        lost.wait_log("has lost its disk", PATIENCE_S, since=since)
        if self.rng.random() < 0.5:
            self.kill(other)
            self.nap(0.5)
        self.met["wipe"] += 1

    # ---- the network

    def cycle_cutoff(self):
        leader, _ = self.led()
        self.isolate(leader)
        self.elected(leader, time.monotonic_ns())
        leader.wait_status(lambda s: not s["writable"], "stepped down", PATIENCE_S)

    def cycle_lone(self):
        _, (follower, *_) = self.led()
        self.isolate(follower)
        self.nap(2.0)
        self.returned(time.monotonic_ns())
        follower.wait_status(lambda s: s["leader"] is None, "without a leader", PATIENCE_S)

    def cycle_halves(self):
        nodes = self.nodes
        place = self.rng.randrange(1, len(nodes))
        for one in nodes[:place]:
            for other in nodes[place:]:
                self.sever(one, other)
        self.nap(1.5)
        self.returned(time.monotonic_ns())

    def cycle_deaf(self):
        self.one_way(to_leader=True)

    def cycle_mute(self):
        self.one_way(to_leader=False)

    def one_way(self, to_leader):
        leader, followers = self.led()
        for follower in followers:
            ends = (follower.number, leader.number)
            self.network.cut(*(ends if to_leader else reversed(ends)))
        self.elected(leader, time.monotonic_ns())

    def cycle_triangle(self):
        leader, (follower, *_) = self.led()
        self.sever(leader, follower)
        self.nap(2.0)
        self.returned(time.monotonic_ns())

    def cycle_ring(self):
        nodes = self.nodes
        for place, node in enumerate(nodes):
            for other in nodes:
                if other is not node and other is not nodes[place - 1]:
                    self.network.cut(other.number, node.number)
        self.nap(0.5)
        self.felt(1.5)

    def cycle_flapping(self):
        leader, followers = self.led()
        self.flap([(leader.number, follower.number) for follower in followers])

    def cycle_slow(self):
        leader, _ = self.led()
        self.network.slow(leader.number)
        self.nap(1.0)
        self.returned(time.monotonic_ns())

    def cycle_lossy(self):
        self.lose_some(0.15)
        self.nap(2.0)

    # ---- clocks and disks

    def cycle_clock(self):
        for _ in range(3):
            node = self.rng.choice(self.nodes)
            self.jump(node)
            self.counted(node, "shifted_reads", "jump of a clock")
            self.nap(0.5)

    def jump(self, node):
        """Let the clocks of a node jump."""
        faults = self.group.faults[node.number]
        faults["wall_ms"] = self.rng.randrange(-DAY_MS, DAY_MS)
        faults["monotonic_ms"] += self.rng.choice([50, 300, 1_000, 4_000])

    def cycle_slowdisk(self):
        for node in self.some():
            self.group.faults[node.number]["sync_ms"] = self.rng.choice([20, 200, 700, 1_500])
            self.counted(node, "slow_syncs", "slow sync")
        self.nap(1.5)

    def cycle_fulldisk(self):
        leader, (follower, *_) = self.led()
        if self.rng.random() < 0.5:
            self.group.faults[leader.number]["full"] = 1
            self.counted(leader, "refused_writes", "full disk")
            self.elected(leader, time.monotonic_ns())
        else:
            self.group.faults[follower.number]["full"] = 1
            self.counted(follower, "refused_writes", "full disk")
            self.nap(1.0)
            self.returned(time.monotonic_ns())

    def cycle_badsync(self):
        node = self.rng.choice(self.nodes)
        since = len(node.log)
        self.group.faults[node.number]["sync_fails"] = 1
        self.counted(node, "failed_syncs", "failed sync")
        node.wait_log("leaves the quorum", PATIENCE_S, since=since)
        self.returned(time.monotonic_ns())
        self.kill(node)

    # ---- administrators

    def cycle_transfer(self):
        leader, (target, *_) = self.led()
        self.write(leader, "transfer", target)
        if self.rng.random() < 0.5:
            self.nap(0.3)
            self.kill(leader)
        else:
            wait_until(lambda: self.taken(leader), PATIENCE_S, "nobody takes the request")
        self.met["request"] += 1

    def cycle_members(self):
        _, (node, other, *_) = self.led()
        rest = sorted(set(self.group.nodes) - {node.number})
        self.change("remove", node, rest)
        if self.rng.random() < 0.5:
            self.kill(other)
        self.nap(1.0)
        if self.rng.random() < 0.5:
            # The node comes back in the place of the other one, which may be dead; then that one.
            place = sorted(set(self.group.nodes) - {other.number})
            if other.running or len(place) > 2:
                self.change("replace", other, place, node)
                node = other
        if not other.running:
            other.start("dledger", wait=False)
        self.change("add", node, sorted(self.group.nodes))

    def write(self, leader, command, node, by=None):
        """Write an administrator's request; return its id, None if the leader leads no more."""
        status = leader.wait_status(lambda _: True, "an answer", PATIENCE_S)
        wall_ms = SYSTEM_CLOCK.wall_ms() + self.group.faults[leader.number]["wall_ms"]
        return write_request(
            REAL, str(leader.store), command, node.number, term=status["term"],
            members=tuple(status["members"]), wall_ms=wall_ms, by=by and by.number,
        )  # fmt: skip

    def taken(self, leader):
        """Return whether a node has taken the request that was written last."""
        return not leader.running or not REAL.exists(request_path(str(leader.store)))

    def change(self, command, node, wanted, by=None):
        """Give a command until the members are as wanted: a leader may end before it is done."""

        def done():
            leader, _ = self.led()
            status = leader.wait_status(lambda _: True, "an answer", PATIENCE_S)
            if status["members"] == wanted and not status["learners"]:
                return True
            if not (status["learners"] or status["leaving"]):  # else the leader is about it
                self.write(leader, command, node, by)
                wait_until(lambda: self.taken(leader), PATIENCE_S, "nobody takes the request")
            self.nap(0.3)
            return False

        wait_until(done, PATIENCE_S, f"the members do not become {wanted}")
        self.met[command] += 1

    # ---- all at once

    def cycle_storm(self):
        paused = set()
        try:
            for _ in range(self.rng.randrange(4, 10)):
                getattr(self, self.rng.choice(STORM))(paused)
                self.nap(0.6)
        finally:
            for node in paused:
                if node.running:
                    node.resume()
        self.met["storm"] += 1

    def storm_kill(self, paused):
        node = self.rng.choice(self.nodes)
        if node.running:
            self.kill(node)
            paused.discard(node)

    def storm_start(self, _paused):
        for node in self.nodes:
            if node.process is None:
                node.start("dledger", wait=False)
                return

    def storm_pause(self, paused):
        node = self.rng.choice(self.nodes)
        if node.running and node not in paused:
            node.pause()
            paused.add(node)
            self.met["pause"] += 1
        elif node in paused:
            paused.remove(node)
            node.resume()

    def storm_cut(self, _paused):
        one, other, *_ = self.nodes
        self.network.cut(one.number, other.number)

    def storm_isolate(self, _paused):
        self.isolate(self.rng.choice(self.nodes))

    def storm_mend(self, _paused):
        self.network.heal()

    def storm_jump(self, _paused):
        self.jump(self.rng.choice(self.nodes))

    def storm_disk(self, _paused):
        faults = self.group.faults[self.rng.choice(self.nodes).number]
        faults.heal()
        faults[self.rng.choice(["sync_ms", "full"])] = self.rng.randrange(1, 500)


STORM = (
    *("storm_kill", "storm_kill", "storm_start", "storm_start", "storm_pause", "storm_pause"),
    *("storm_cut", "storm_isolate", "storm_mend", "storm_mend", "storm_jump", "storm_disk"),
)


def judge(group, load):
    """Stop the nodes after the load has ended; compare their logs and check the history."""
    end = group.wait_same()["max_offset"]
    for node in group:
        node.send(signal.SIGTERM)
    for node in group:
        code = node.exit_code()
        assert code == 0, f"node {node.number} ended with {code}: {node.last_lines(20)}"
    logs = []
    for node in group:
        ledger = read_ledger(node.store / f"dledger-n{node.number}")
        found = [(one, parse_record(one.body, one.pos + 48)) for one in ledger]
        records = [record for _, record in found if record.topic not in OWN_TOPICS]
        assert_queues_fit(node.store, records)
        # What was added behind the end is a leader's first entry, or states the ends of queues.
        assert all(one.pos < end or record.topic in OWN_TOPICS for one, record in found)
        logs.append([(one, record) for one, record in found if one.pos < end])
    for node, log in zip(group, logs, strict=True):
        assert log == logs[0], f"the log of node {node.number} differs"
    epochs = {}
    for one, record in logs[0]:
        epochs.setdefault(one.term, (one.term, one.pos, record.store_port))
    records = [record for _, record in logs[0] if record.topic not in OWN_TOPICS]
    return verdict(load, records, list(epochs.values()))
