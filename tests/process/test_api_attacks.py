"""The client API under attack: the node survives, uses little memory, and serves other clients.

Some kinds, drawn anew in each run, attack in `make test`; all of them for 20 s in `make test-all`,
and for 10 minutes in `make fuzz-api` (SECONDS=n). SEED=n repeats a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import tempfile
import threading
import time
from itertools import islice

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.testing import warm
from tests.process.api_attacks import SHAKEN, schedule
from tests.process.harness import ROOT, wait_until

SECONDS = float(os.environ.get("HASTORE_FUZZ_API_SECONDS") or 20)
SHORT = 4  # kinds in the short attack
SEED = int(os.environ.get("HASTORE_FUZZ_API_SEED") or 0) or random.SystemRandom().getrandbits(32)
MIB = 1024 * 1024
# What docs/architecture.md ("Bounds") allows at once: unread replies, unfinished messages, pulls
# that are read from the disk, the records of a query, and freed memory that is kept; and a third
# more for what lies between them in the heap. Most attacks take 1 to 20 MiB; `pipelines` 13 to 58
# on a quiet machine, and up to 91 on a busy one.
GROWTH_BYTES_MAX = (40 + 16 + 16 + 8 + 16) * MIB * 4 // 3
LEFT_BYTES_MAX = 32 * MIB  # after the attacks; a node keeps 16 MiB of freed memory
SLOWEST_S = 60.0  # most time of a put during an attack, on a busy machine
STORE = {"commitlog_file_size": "16MiB", "consume_queue_units": 30_000}


class Worker:
    """A client that puts one message after the other during the attacks."""

    def __init__(self, bootstrap):
        self.acknowledged = []
        self.slowest_s = 0.0
        self.failure = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(bootstrap,))
        self._thread.start()

    def _run(self, bootstrap):
        try:
            with Producer(bootstrap, delivery_timeout_s=120) as producer:
                number = 0
                while not self._stop.is_set():
                    body = b"%d" % number
                    begin = time.monotonic()
                    producer.send_sync("work", body, key="k")
                    self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
                    self.acknowledged.append(body)
                    number += 1
                    self._stop.wait(0.002)
        except Exception as failure:
            self.failure = failure

    def take_slowest_s(self):
        """Return the longest duration of a put since the last call."""
        slowest, self.slowest_s = self.slowest_s, 0.0
        return slowest

    def end(self):
        self._stop.set()
        self._thread.join()


def anonymous_bytes(node):
    """Return the node's memory without mapped files (the log's pages belong to the page cache)."""
    with open(f"/proc/{node.pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["RssAnon"].split()[0]) * 1024


class Watch:
    """Watches the memory of nodes, twenty times a second."""

    def __init__(self, nodes):
        self._nodes = list(nodes)
        self.before = {node.number: anonymous_bytes(node) for node in self._nodes}
        self._peak = dict(self.before)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stop.wait(0.05):
            for node in self._nodes:
                with contextlib.suppress(OSError, AssertionError):  # the node may have just ended
                    now = anonymous_bytes(node)
                    self._peak[node.number] = max(self._peak[node.number], now)

    def take_growth(self):
        """Return the largest growth of each node since the last call."""
        peak, self._peak = self._peak, dict(self.before)
        return {number: peak[number] - self.before[number] for number in peak}

    def end(self):
        self._stop.set()
        self._thread.join()


def begin_attack(kind, address, seed, seconds):
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    said = tempfile.TemporaryFile()
    script = ROOT / "tests" / "process" / "api_attacks.py"
    process = warm.start([str(script), kind, host, port, str(seed), str(seconds)], stdout=said)
    return process, said


def end_attack(attack, seconds):
    """Wait for the end of an attack; check that it made connections."""
    process, said = attack
    with said:
        try:
            process.wait(seconds + 120)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, f"the attack itself ended with {process.returncode}"
        said.seek(0)
        done = json.loads(said.read().splitlines()[-1])
    assert done["connections"] > 0
    return done


def stopped_client(node, seed, seconds):
    """Run a client that pulls much and is then stopped (SIGSTOP), so that it reads nothing."""
    client, said = begin_attack("lazy_reader", node.api, seed, 3600)
    try:
        time.sleep(min(1.0, seconds / 2))
        os.kill(client.pid, signal.SIGSTOP)
        time.sleep(seconds / 2)
    finally:
        client.kill()
        client.wait()
        said.close()


def stopped_node(node, seed, seconds):
    """Stop the node (SIGSTOP) during an attack that connects, sends and resets."""
    kind = random.Random(seed).choice(["pings", "frames", "noise", "pipelines"])
    attack = begin_attack(kind, node.api, seed, seconds)
    time.sleep(min(0.5, seconds / 4))
    node.pause()
    try:
        time.sleep(seconds / 2)
    finally:
        node.resume()
    end_attack(attack, seconds)


SPECIAL = {"stopped_client": stopped_client, "stopped_node": stopped_node}


def check(kind, seed, node, pid, worker, watch):
    """Check the node after one attack, and that the client was served during it."""
    text = f"{kind}, seed {seed}"
    assert node.running and node.pid == pid, f"{text}: the node died: {node.last_words(20)}"
    assert "died" not in node.log and "Traceback" not in node.log, node.last_lines(40)
    before = len(worker.acknowledged)
    wait_until(
        lambda: worker.failure or len(worker.acknowledged) > before + 1,
        SLOWEST_S, f"{text}: the other client is not served: {node.last_words()}",
    )  # fmt: skip
    assert worker.failure is None, f"{text}: {worker.failure!r}"
    slowest, growth = worker.take_slowest_s(), watch.take_growth()
    grown = ", ".join(f"{size / 2**20:.1f}" for size in growth.values())
    print(f"{kind:18} {seed:10}: slowest put {slowest * 1000:6.0f} ms, growth {grown} MiB")
    assert max(growth.values()) < GROWTH_BYTES_MAX, f"{text}: {growth}"
    assert slowest < SLOWEST_S, f"{text}: a put took {slowest:g} s"


def read_all(addresses, topic, count):
    """Read a topic until `count` different bodies have arrived; return them."""
    found = set()
    with Consumer(topic, addresses, queues=range(4)) as consumer:
        deadline = time.monotonic() + 180
        while len(found) < count and time.monotonic() < deadline:
            found |= {each.body for each in consumer.poll(timeout_s=2)}
    return found


def test_a_short_attack(make_group):
    under_attack(make_group(store=STORE).start(), 20.0, SHORT)


# It takes 20 s, so that each of the kinds has a second for what takes time: timeouts, full buffers.
@pytest.mark.slow("each kind of attack lasts a second or more")
@pytest.mark.full
@pytest.mark.timeout(SECONDS * 20 + 600)
def test_the_api_under_attack(make_group):
    under_attack(make_group(store=STORE).start(), SECONDS)


def under_attack(group, seconds, most=None):
    """Attack node 1 in all ways, one after the other, while a client puts messages.

    `most` ends it after so many attacks.
    """
    print(f"make fuzz-api SECONDS={seconds:g} SEED={SEED}")
    node = group[1]
    pid = node.pid
    with Producer(group.bootstrap) as producer:
        for _ in range(3):
            producer.send_sync("large", bytes(1024 * 1024), queue=0)
    worker = Worker(group.bootstrap)
    watch = None
    try:
        wait_until(lambda: len(worker.acknowledged) > 200, 60, "the client is not served")
        watch = Watch(group)
        worker.take_slowest_s()
        for kind, seed, each_s in islice(schedule(SEED, seconds, tuple(SPECIAL)), most):
            if kind in SPECIAL:
                SPECIAL[kind](node, seed, each_s)
            else:
                end_attack(begin_attack(kind, node.api, seed, each_s), each_s)
            check(kind, seed, node, pid, worker, watch)
        wait_until(
            lambda: all(anonymous_bytes(each) < watch.before[each.number] + LEFT_BYTES_MAX
                        for each in group),
            60, "the memory that the attacks needed does not come back",
        )  # fmt: skip
    finally:
        worker.end()
        if watch is not None:
            watch.end()
    assert worker.failure is None
    found = read_all(group.bootstrap, "work", len(worker.acknowledged))
    missing = set(worker.acknowledged) - found
    assert not missing, f"{len(missing)} of {len(worker.acknowledged)} are lost"
    assert all(each.running for each in group)


def test_the_node_survives_without_free_descriptors(make_group):
    """Open more connections than the node has descriptors for; then raise the limit again."""
    group = make_group(store=STORE).start()
    node = group[1]
    _, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    host, _, port = node.api.removeprefix("tcp://").rpartition(":")
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        producer.send_sync("work", b"before")
        used = len(os.listdir(f"/proc/{node.pid}/fd"))
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (used + 20, hard))
        crowd = []
        try:
            for _ in range(200):
                crowd.append(socket.create_connection((host, int(port)), timeout=60))
                with contextlib.suppress(OSError):
                    crowd[-1].sendall(SHAKEN)
            node.wait_log("cannot accept")
            for number in range(50):
                producer.send_sync("work", b"%d" % number)
        finally:
            for sock in crowd:
                sock.close()
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (hard, hard))
        with Producer(group.bootstrap, delivery_timeout_s=60) as late:
            late.send_sync("work", b"after")
    assert node.running and "died" not in node.log and "Traceback" not in node.log
    assert len(read_all(group.bootstrap, "work", 52)) == 52
