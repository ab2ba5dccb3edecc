"""The load that runs while nodes are killed or disconnected, and the verdict at the end."""

import contextlib
import random
import threading
import time
from dataclasses import dataclass

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.errors import ClientError, NotStoredError, UnreachableError
from tests.process.harness import wait_until
from tests.process.history import ACKED, UNKNOWN, Recorder, check
from tests.process.stores import (
    QUEUES_TOPIC,
    assert_equal_stores,
    assert_queues_fit,
    ends_are_stated,
    rescued_records,
)


class Load:
    """Producers and a reader in background threads, with a record of everything that they saw."""

    def __init__(self, group, seed, sizes=(5, 50, 500, 3000), pause_s=0.01):
        self.recorder = Recorder()
        self.failures = []
        self.stopping = threading.Event()
        self._group = group
        self._seed = seed
        self._sizes = sizes
        self._pause_s = pause_s
        self._going = threading.Event()
        self._going.set()
        self._begun = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=work.__name__)
            for work in (self._pipelined, self._unnumbered, self._one_by_one, self._read)
        ]

    def start(self):
        """Begin; return once two producers have found the master: a fault may come next."""
        for thread in self._threads:
            thread.start()
        for _ in range(2):
            assert self._begun.acquire(timeout=60), self.failures

    @contextlib.contextmanager
    def held(self):
        """Stop new sends within the block; puts that are already sent may still be under way."""
        self._going.clear()
        try:
            yield
        finally:
            self._going.set()

    def stop(self):
        """End all threads; raise AssertionError if one of them failed."""
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

    def _begin(self, future):
        """Wait for the producer's first answer, whatever it is: a busy slave may be out of sync."""
        future.exception(60)
        self._begun.release()

    def _pipelined(self):
        rng = random.Random(self._seed + 1)
        with Producer(self._group.bootstrap, max_in_flight=64) as producer:
            number = 0
            while not self.stopping.is_set():
                for _ in range(rng.randrange(1, 16)):
                    body = b"p%d:" % number + rng.randbytes(rng.choice(self._sizes))
                    future = self.recorder.send(producer, "pipe", body, f"p{number}")
                    if not number:
                        self._begin(future)
                    number += 1
                time.sleep(self._pause_s)
                self._going.wait()

    def _unnumbered(self):
        """Put without idempotence: whatever happens, a message is stored once or not at all."""
        number = 0
        with Producer(self._group.bootstrap, idempotent=False) as producer:
            while not self.stopping.is_set():
                for _ in range(3):
                    future = self.recorder.send(producer, "plain", b"u%d" % number, f"u{number}")
                    if not number:
                        self._begin(future)
                    number += 1
                    time.sleep(0.005)  # several frames are in flight
                time.sleep(5 * self._pause_s)
                self._going.wait()

    def _one_by_one(self):
        """Put one by one with a short timeout, so that faults leave puts with unknown outcome."""
        rng = random.Random(self._seed + 2)
        number = 0
        while not self.stopping.is_set():
            with Producer(self._group.bootstrap, delivery_timeout_s=0.7) as producer:
                for _ in range(200):
                    self._going.wait()
                    if self.stopping.is_set():
                        break
                    body = b"o%d:" % number + rng.randbytes(rng.randrange(200))
                    number += 1
                    try:
                        future = self.recorder.send(producer, "one", body, f"o{number}")
                    except ClientError:
                        continue
                    future.exception(60)

    def _read(self):
        """Read from any node; every message that was read must stay in the log for ever."""
        # PositionLostError would be a defect: readers get only confirmed messages, which stay.
        reader = Consumer("pipe", self._group.bootstrap, timeout_s=1.0)
        with self.recorder.consumer(reader) as consumer:
            while not self.stopping.is_set():
                try:
                    consumer.poll(timeout_s=0.2)
                except (UnreachableError, NotStoredError):
                    time.sleep(0.05)


@dataclass
class Verdict:
    """The result of a run: the violations (empty if there are none), and the figures."""

    wrong: list
    text: str
    epochs: int
    rescued: list


def judge(group, master, load):
    """Stop the nodes after the load has ended; compare their stores and check the history."""
    wait_until(lambda: ends_are_stated(master.store), 60, "the ends of queues are not stated")
    group.wait_equal()
    status = master.status()
    for node in group:
        code = node.stop()
        assert code == 0, f"node {node.number} ended with {code}: {node.last_lines(20)}"
    first, *others = group
    for other in others:
        log = assert_equal_stores(first.store, other.store)
    records = [found for found in log.records if found.topic != QUEUES_TOPIC]
    assert_queues_fit(first.store, records)
    rescued = [found for node in group for found in rescued_records(node.store)]
    epochs = [
        (e["epoch"], e["start_offset"], int(group[e["node"]].api.rpartition(":")[2]))
        for e in status["history"]
    ]
    return verdict(load, records, epochs, rescued)


def verdict(load, records, epochs, rescued=None):
    """Check the history of a load against the log that all nodes have."""
    recorder = load.recorder
    wrong = check(recorder.events, records, rescued=rescued or [], epochs=epochs)
    counts = [load.recorder.count(outcome) for outcome in (ACKED, UNKNOWN)]
    text = (
        f"{len(recorder.puts)} puts: {counts[0]} acknowledged, {counts[1]} unknown; "
        f"{len(records)} records, {len(epochs)} epochs, {recorder.read} read"
    )
    if rescued is not None:
        text += f", {len(rescued)} records archived"
    return Verdict(wrong, text, len(epochs), rescued)


def busy(load, cycles):
    """Return whether enough puts were confirmed and read, or the load failed."""
    confirmed = sum(put.durable for put in list(load.recorder.puts))
    return load.failures or (confirmed > 20 * cycles and load.recorder.read > 5 * cycles)
