"""Kill `hastore pipeline export` at random instants while a producer writes; compare with the log.

HASTORE_SPARK_CYCLES (3) sets the number of kills, HASTORE_SPARK_SEED replays the choices, but not
the machine's timing. HASTORE_SPARK_FORMAT is parquet, or iceberg. Each cycle kills the driver, one
of Spark's Python processes, or all processes of the job at once; and in one of these phases, after
a random pause:

    start       Spark is starting
    writing     a task has begun to write a file
    committing  a commit of this run is there

Then the export runs until it ends by itself, and each message must be in the files exactly once.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pyarrow.parquet as pq
import pytest

from hastore.client import Producer
from hastore.store.offline.reader import StoreReader
from tests.pipeline.test_iceberg import table_of
from tests.spark.conftest import require_java
from tests.spark.quick import QUICK_OPTIONS
from tests.spark.torture.processes import children, is_worker, wait_until_gone

pytestmark = pytest.mark.full

CYCLES = int(os.environ.get("HASTORE_SPARK_CYCLES", "3"))
FORMAT = os.environ.get("HASTORE_SPARK_FORMAT", "parquet")
SEED = int(os.environ.get("HASTORE_SPARK_SEED", "0")) or random.SystemRandom().getrandbits(32)
VICTIMS = ("driver", "worker", "all")
PHASES = ("writing", "committing", "start")
START_S = 10.0  # about as long as Spark takes to start and to end a small job
TOPIC = "t"
# Where tasks write files, and what there is one more of after each commit.
WRITTEN, COMMITS = {
    "parquet": ("_hastore/staging", "_hastore/commits"),
    "iceberg": ("data", "metadata"),
}[FORMAT]


class Writer(threading.Thread):
    """Sends numbered messages until it is stopped."""

    def __init__(self, bootstrap):
        super().__init__(daemon=True)
        self._addresses = bootstrap
        self.ended = threading.Event()
        self.begun = threading.Event()  # or it has failed
        self.failure = None

    def run(self):
        try:
            with Producer(self._addresses, acks=1) as producer:
                number = 0
                while not self.ended.is_set():
                    for _ in range(50):
                        body = f"{number}:".encode() + b"x" * 300
                        producer.send(TOPIC, body, queue=number % 3)
                        number += 1
                    producer.flush()
                    self.begun.set()
                    self.ended.wait(0.1)
        except Exception as error:
            self.failure = error
            self.begun.set()


def start(store, target):
    command = [sys.executable, "-m", "hastore", "pipeline", "export", "--master", "local[2]"]
    command += ["--path", str(store), "--target", str(target), "--topic", TOPIC, "--json"]
    command += ["--format", FORMAT, "--commit-every", "0.05", "--file-size", "4", *QUICK_OPTIONS]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def wait_for_phase(phase, job, target, commits, rng):
    """Return when the phase has begun, or the job has ended."""
    while job.poll() is None:
        if phase == "start":
            time.sleep(rng.random() * START_S)
            return
        if phase == "writing" and is_writing(target):
            break
        if phase == "committing" and count_commits(target) > commits:
            break
        time.sleep(0.002)
    time.sleep(rng.random() * rng.choice((0.01, 0.1, 0.5)))


def is_writing(target):
    try:
        return any((target / WRITTEN).rglob("part-*"))
    except FileNotFoundError:  # a commit has removed a folder meanwhile
        return False


def count_commits(target):
    return len(list((target / COMMITS).glob("[0-9]*.json"))) if target.exists() else 0


def kill(victim, job):
    pids = children(job.pid)
    workers = [pid for pid in pids if is_worker(pid)]
    if victim == "worker" and workers:
        chosen = workers[-1:]  # the daemon is the first, and the others are its children
    elif victim == "all":
        chosen = pids
    else:
        chosen = [job.pid]
    for pid in chosen:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return pids


def end_of(job):
    out, err = job.communicate(timeout=300)
    return job.returncode, out.decode(), err.decode()


def exported(target):
    if FORMAT == "iceberg":
        with table_of(target) as table:
            found = table.scan().to_arrow()
        columns = (found[name].to_pylist() for name in ("partition", "offset", "value"))
        return sorted(zip(*columns, strict=True))
    rows = []
    for file in target.glob("topic=*/date=*/*.parquet"):
        table = pq.read_table(file, columns=["partition", "offset", "value"], partitioning=None)
        rows += zip(*(table.column(n).to_pylist() for n in table.column_names), strict=True)
    return sorted(rows)


def logged(store):
    with StoreReader(str(store)) as reader:
        return sorted(
            (record.queue_id, record.queue_offset, record.body)
            for record in reader.records()
            if record.topic == TOPIC
        )


@pytest.mark.long
@pytest.mark.slow("a JVM starts after each kill, and once more for the rest")
@pytest.mark.timeout(600 + 120 * CYCLES)
def test_a_killed_export_has_each_message_once_when_it_was_run_again(make_group, tmp_path):
    require_java()
    print(f"seed {SEED}, {CYCLES} cycles")
    rng = random.Random(SEED)
    group = make_group(1, acks=0, master_role="ASYNC_MASTER", store={"commitlog_file_size": "4MiB"})
    group.start()
    store, target = tmp_path / "store1", tmp_path / "target"
    writer = Writer(group.bootstrap)
    writer.start()
    try:
        writer.begun.wait()
        assert writer.failure is None
        kills(rng, store, target)
    finally:
        writer.ended.set()
        writer.join()
    assert writer.failure is None
    job = start(store, target)
    code, out, err = end_of(job)
    assert code == 0, err
    found = exported(target)
    assert len({row[:2] for row in found}) == len(found), "a message was exported twice"
    assert found == logged(store)
    print(f"{len(found)} messages, {count_commits(target)} commits")
    assert len(found) > 0
    assert not any((target / "_hastore" / "staging").rglob("part-*"))


def kills(rng, store, target):
    victims = []
    for cycle in range(CYCLES):
        victims = victims or rng.sample(VICTIMS, len(VICTIMS))
        victim, phase = victims.pop(), PHASES[cycle % len(PHASES)]
        commits = count_commits(target)
        job = start(store, target)
        try:
            wait_for_phase(phase, job, target, commits, rng)
            pids = kill(victim, job)
            code, _, err = end_of(job)
            wait_until_gone(set(pids) - {job.pid})
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.communicate()
        print(
            f"cycle {cycle}: {victim} in {phase}: code {code}, "
            f"{count_commits(target) - commits} commits {err[-200:]!r}",
            flush=True,
        )
