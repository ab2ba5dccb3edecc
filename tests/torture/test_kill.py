"""A pair under load, killed at random instants, flipped and rejoined, again and again.

HASTORE_TORTURE_CYCLES (20) and HASTORE_TORTURE_SEED replay or prolong a run: the seed fixes which
kind of death comes when and after how long; the machine's timing is its own. `make torture` runs
500 cycles in about 20 minutes.

Kinds of a cycle:
    master      SIGKILL, flip of the slave, the old one rejoins (its file still saying master: half
                of the times)
    slave       SIGKILL, restart
    both        one after the other, restart, the epoch goes on
    tail        the slave dies, the master acknowledges alone, dies; the slave is promoted, and the
                old master's tail must end in rescued/
    rejoin      like tail, and the old master is killed again while it cuts and catches up
    promoting   like master, and the candidate is killed while it is being promoted
    switch      the master is demoted in order while it works
"""

import os
import random
import threading
import time
from collections import Counter

import pytest

from hastore.client.consumer import Consumer
from hastore.client.producer import Producer
from hastore.errors import ClientError, NotStoredError, UnreachableError
from tests.process.harness import wait_until
from tests.process.history import ACKED, UNKNOWN, Recorder, check
from tests.process.stores import assert_equal_stores, assert_queues_fit, rescued_records

CYCLES = int(os.environ.get("HASTORE_TORTURE_CYCLES", "20"))
SEED = int(os.environ.get("HASTORE_TORTURE_SEED", "0")) or random.SystemRandom().getrandbits(32)
KINDS = ("master", "slave", "both", "tail", "rejoin", "promoting", "switch")
RESUME_S = 10.0  # I8: writes resume within this once a master and its slave are back


class Load:
    """Producers and a reader in the background; all that they saw."""

    def __init__(self, group, seed):
        self.recorder = Recorder()
        self.reads = []
        self.failures = []
        self.stopping = threading.Event()
        self._group = group
        self._seed = seed
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=work.__name__)
            for work in (self._pipelined, self._one_by_one, self._read)
        ]

    def start(self):
        for thread in self._threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name} hangs"
        assert not self.failures, self.failures

    def _guard(self, work):
        try:
            work()
        except Exception as failure:
            self.failures.append(failure)

    def _pipelined(self):
        rng = random.Random(self._seed + 1)
        with Producer(self._group.bootstrap, max_in_flight=64) as producer:
            number = 0
            while not self.stopping.is_set():
                for _ in range(rng.randrange(1, 16)):
                    body = b"p%d:" % number + rng.randbytes(rng.choice((5, 50, 500, 3000)))
                    self.recorder.send(producer, "pipe", body, f"p{number}")
                    number += 1
                time.sleep(0.01)

    def _one_by_one(self):
        """A blocking producer with a short patience: its puts end as unknown in the middle."""
        rng = random.Random(self._seed + 2)
        number = 0
        while not self.stopping.is_set():
            with Producer(self._group.bootstrap, delivery_timeout_s=0.7) as producer:
                for _ in range(200):
                    if self.stopping.is_set():
                        break
                    body = b"o%d:" % number + rng.randbytes(rng.randrange(200))
                    number += 1
                    try:
                        future = self.recorder.send(producer, "one", body, f"o{number}")
                    except ClientError:
                        continue
                    future.exception(10)

    def _read(self):
        """What a reader was ever given, from any node, must be in the log for good."""
        # Never PositionLostError: nothing that was confirmed is cut, and no more is shown.
        with Consumer("pipe", self._group.bootstrap, timeout_s=1.0) as consumer:
            while not self.stopping.is_set():
                try:
                    messages = consumer.poll(timeout_s=0.2)
                except (UnreachableError, NotStoredError):
                    time.sleep(0.05)
                    continue
                self.reads += [(message.offset, message.body) for message in messages]


class Torture:
    """The cycles; `master` and `slave` are the nodes in the roles of the moment."""

    def __init__(self, group, seed):
        self.group = group
        self.rng = random.Random(seed)
        self.load = Load(group, seed)
        self.master, self.slave = group[1], group[2]
        self.done = Counter()
        self.alone = 0
        self.slowest_s = 0.0

    def run(self, cycles):
        kinds = [*KINDS]
        for cycle in range(cycles):
            if cycle % len(kinds) == 0:
                self.rng.shuffle(kinds)
            kind = kinds[cycle % len(kinds)]
            print(f"cycle {cycle}: {kind}, master is node {self.master.number}", flush=True)
            self.nap(0.3)
            getattr(self, f"cycle_{kind}")()
            self.settled()
            self.done[kind] += 1

    def nap(self, longest_s):
        time.sleep(self.rng.random() * longest_s)

    def settled(self):
        """Both nodes are back: puts are confirmed again, and in time."""
        began_ns = time.monotonic_ns()
        wait_until(
            lambda: self.load.recorder.acked_since(began_ns) or self.load.failures,
            RESUME_S,
            lambda: f"nothing acknowledged for {RESUME_S:g} s: {self.master.status()}",
        )
        assert not self.load.failures, self.load.failures
        self.master.wait_in_sync(self.slave.number)
        self.slowest_s = max(self.slowest_s, (time.monotonic_ns() - began_ns) / 1e9)

    def flip(self):
        """Make the slave the master; the roles change places."""
        self.slave.edit_role("SYNC_MASTER")
        if not self.slave.running:
            self.slave.start("master", wait=False)
        self.master, self.slave = self.slave, self.master

    def rejoin(self):
        """Start the old master, half of the times with a file that still says master."""
        stubborn = self.rng.random() < 0.5
        if not stubborn:
            self.slave.edit_role("SLAVE")
        self.slave.start("serve", wait=False)
        self.slave.wait_ready()
        if stubborn:
            self.slave.wait_status(lambda s: s["role"] == "SLAVE", "superseded")
            # A flip is a difference: two edits between two looks at the file are none.
            said = len(self.slave.log)
            self.slave.edit_role("SLAVE")
            self.slave.wait_log("changes the role from SYNC_MASTER to SLAVE", since=said)

    def put_alone(self):
        """Let the master acknowledge what nobody else has."""
        with Producer(self.group.bootstrap, acks=1, delivery_timeout_s=5) as producer:
            for number in range(self.rng.randrange(1, 40)):
                body = b"alone %d.%d" % (self.alone, number) + bytes(self.rng.randrange(5000))
                self.load.recorder.send(producer, "alone", body, "a").result(10)
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
        for _ in range(2):
            self.slave.start("slave", wait=False)
            time.sleep(0.3)
            self.nap(0.4)
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


@pytest.mark.timeout(120 + 10 * CYCLES)
def test_nothing_acknowledged_is_lost(make_group):
    print(f"HASTORE_TORTURE_SEED={SEED} HASTORE_TORTURE_CYCLES={CYCLES}")
    group = make_group(store={"commitlog_file_size": "256KiB"}, ha={"slave_timeout": "1s"}).start()
    torture = Torture(group, SEED)
    load = torture.load
    load.start()
    try:
        torture.run(CYCLES)
    finally:
        load.stopping.set()
        load.stop()
    group.wait_equal()
    status = torture.master.status()
    assert [node.stop() for node in group] == [0, 0]
    log = assert_equal_stores(group[1].store, group[2].store)
    assert_queues_fit(group[1].store, log)
    rescued = [found for node in group for found in rescued_records(node.store)]
    epochs = [
        (e["epoch"], e["start_offset"], int(group[e["node"]].api.rpartition(":")[2]))
        for e in status["history"]
    ]
    puts = load.recorder.puts
    wrong = check(puts, log.records, rescued=rescued, epochs=epochs, reads=load.reads)
    acked = [put for put in puts if put.outcome == ACKED]
    unknown = [put for put in puts if put.outcome == UNKNOWN]
    print(
        f"{len(puts)} puts: {len(acked)} acknowledged, {len(unknown)} unknown; "
        f"{len(log.records)} records, {len(epochs)} epochs, {len(rescued)} records archived, "
        f"{len(load.reads)} read; {dict(torture.done)}; "
        f"slowest to settle {torture.slowest_s:.1f} s"
    )
    assert wrong == [], wrong[:10]
    # Not vacuous: work was done in each cycle, masters changed, tails were cut, readers read.
    assert sum(put.durable for put in acked) > 50 * CYCLES
    assert len(load.reads) > 20 * CYCLES
    assert len(epochs) > CYCLES // 3
    assert CYCLES < len(KINDS) or (rescued and torture.done["tail"])
    assert CYCLES < 20 or unknown
