"""Kill a streaming query, its Python processes and its node at any instant; compare with the log.

HASTORE_SPARK_CYCLES (4) sets the number of kills, HASTORE_SPARK_SEED repeats the kinds and pauses
of a run, but not the machine's timing. `make torture-spark` kills 100 times.

Kinds of a kill, all by SIGKILL:

    query       the driver, its JVM and all workers, and a new process continues at the checkpoint:
                half of the times it reads from the store's folder instead of the node, or back
    planner     the Python process in which the source plans; the query fails and is started again
    worker      the Python workers of tasks; Spark tries their tasks again
    node        the node; it is started again
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from hastore import Producer
from hastore.errors import ClientError
from hastore.store.offline.reader import StoreReader
from tests.process.harness import ROOT, wait_until
from tests.spark.conftest import require_java
from tests.spark.torture.checkpoints import committed_batches

pytestmark = [pytest.mark.full, pytest.mark.long]

CYCLES = int(os.environ.get("HASTORE_SPARK_CYCLES", "4"))
SEED = int(os.environ.get("HASTORE_SPARK_SEED", "0")) or random.SystemRandom().getrandbits(32)
KINDS = ("query", "planner", "worker", "node")
TOPIC = "flights"
START_S = 300.0  # of a JVM on a busy machine
SETTLE_S = 300.0
MARKS = {"planner": "python_streaming_source_runner", "worker": "pyspark.daemon pyspark.worker"}


class Job:
    """The process of the query, in a session of its own."""

    def __init__(self, folder, number):
        self.out = folder / f"job{number}.out"
        self.err = folder / f"job{number}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(pathlib.Path(__file__).with_name("stream_job.py")), folder],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def said(self, word):
        """Return how often the job has printed a line that begins with a word."""
        return sum(line.startswith(word) for line in self.out.read_text().splitlines())

    def wait_for(self, word, times=1, timeout_s=START_S):
        def look():
            assert self.process.poll() is None or self.said(word) >= times, self.last_words()
            return self.said(word) >= times

        wait_until(look, timeout_s, lambda: f"no {word!r}: {self.last_words()}")

    def last_words(self):
        return f"{self.out.read_text()[-2_000:]} {self.err.read_text(errors='replace')[-3_000:]}"

    def kill(self):
        """Kill the driver, the JVM and all workers."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        wait_until(self.kill_members, 60, "the session's processes do not end")
        self.process.wait()

    def kill_members(self):
        """Kill the living processes of the session; return whether there were none."""
        members = self.members()
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not members

    def members(self, mark=""):
        """Return the living processes of the session whose command contains `mark`.

        Spark's Python daemons make process groups of their own.
        """
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if int(session) == self.process.pid and state != "Z" and mark in command:
                found.append(int(path.name))
        return found


class Load:
    """Puts numbered messages until it is stopped; a put that fails is done again."""

    def __init__(self, group):
        self.group = group
        self.put = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def _run(self):
        while not self._stopping.is_set():
            try:
                with Producer(self.group.bootstrap, delivery_timeout_s=30) as producer:
                    while not self._stopping.wait(0.02):
                        producer.send(TOPIC, b"message %d" % self.put).result(60)
                        self.put += 1
            except ClientError:  # the node was killed; the message may be in the log or not
                time.sleep(0.05)

    def stop(self):
        self._stopping.set()
        self._thread.join()


class Kills:
    def __init__(self, group, folder, seed):
        self.group, self.folder = group, folder
        self.checkpoint = folder / "checkpoint"  # of stream_job.py
        self.rng = random.Random(seed)
        self.done = Counter()
        self.jobs = []
        self.by_path = False
        self.waited = 0

    def where(self):
        """Let the next query read from the node, or from its store's folder."""
        self.by_path = self.by_path != (self.rng.random() < 0.5)
        source = {"hastore.bootstrap.servers": ",".join(self.group.bootstrap)}
        if self.by_path:
            source = {"path": str(self.group[1].store)}
        options = {"subscribePattern": TOPIC, "startingOffsets": "earliest", **source}
        if self.rng.random() < 0.5:
            options["maxOffsetsPerTrigger"] = str(self.rng.randrange(5, 60))
        (self.folder / "options.json").write_text(json.dumps(options))

    def start(self):
        self.where()
        self.jobs.append(Job(self.folder, len(self.jobs)))
        return self.jobs[-1]

    def run(self, cycles):
        job = self.start()
        for cycle in range(cycles):
            if cycle % len(KINDS) == 0:
                order = self.rng.sample(KINDS, len(KINDS))
            kind = order[cycle % len(KINDS)]
            if kind != "query" or self.rng.random() < 0.5:
                self.wait_for_batch(job)  # else perhaps before the first one
            time.sleep(self.rng.random() * 3)
            print(f"cycle {cycle}: {kind}", flush=True)
            if kind == "query":
                job.kill()
                job = self.start()
            elif kind == "node":
                self.group[1].kill()
                time.sleep(self.rng.random())
                self.group[1].start("master")
            else:
                self.kill_some(job, kind)
            self.done[kind] += 1
        return job

    def wait_for_batch(self, job):
        """Wait until the query has committed a batch since the last kill."""
        job.wait_for("running")
        before = committed_batches(self.checkpoint)
        wait_until(lambda: committed_batches(self.checkpoint) > before, SETTLE_S, job.last_words)
        self.waited += 1

    def kill_some(self, job, kind):
        """Kill the planner, or one of the workers, as soon as there is one."""
        found = wait_until(
            lambda: job.members(MARKS[kind]), SETTLE_S, lambda: f"no {kind}: {job.last_words()}"
        )
        before = job.said("running")
        try:
            os.kill(self.rng.choice(found), signal.SIGKILL)
        except ProcessLookupError:
            return
        if kind == "planner":
            job.wait_for("running", before + 1)

    def finish(self, job):
        """Let the job read all that is there; return its rows."""
        job.wait_for("running")
        job.process.stdin.write(b"finish\n")
        job.process.stdin.flush()
        job.wait_for("done", timeout_s=SETTLE_S)
        assert job.process.wait(120) == 0, job.last_words()
        rows = json.loads((self.folder / "rows.json").read_text())
        return [tuple(row) for row in rows]


@pytest.mark.slow("a JVM starts after each kill of the driver")
@pytest.mark.timeout(900 + 120 * CYCLES)
def test_a_killed_query_delivers_each_message_once(make_group, tmp_path):
    print(f"HASTORE_SPARK_SEED={SEED} HASTORE_SPARK_CYCLES={CYCLES}")
    require_java()
    group = make_group(1, acks=0, master_role="ASYNC_MASTER").start()
    load = Load(group)
    kills = Kills(group, tmp_path, SEED)
    try:
        job = kills.run(CYCLES)
        load.stop()
        rows = kills.finish(job)
    finally:
        load.stop()
        for each in kills.jobs:
            each.kill()
    with StoreReader(str(group[1].store)) as reader:
        expected = sorted(
            (queue, record.queue_offset, record.body.decode())
            for queue in reader.topics()[TOPIC]
            for record in reader.queue_records(TOPIC, queue)
        )
    batches = committed_batches(kills.checkpoint)
    failures = sum(each.said("failed") for each in kills.jobs)
    print(f"{len(rows)} rows in {batches} batches, {failures} failed runs, {dict(kills.done)}")
    assert len(expected) >= load.put > 0
    assert rows == expected
    # The run meant something: batches ran between the kills, and the kills hit.
    assert batches >= kills.waited
    assert len(kills.jobs) == 1 + kills.done["query"]
    assert failures >= kills.done["planner"]
