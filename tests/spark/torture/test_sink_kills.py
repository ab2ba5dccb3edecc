"""Kill a stream's driver, its Python workers and the master at random instants; compare the log.

HASTORE_SPARK_CYCLES (3) sets the number of kills. HASTORE_SPARK_SEED replays the choices, but not
the machine's timing. While sink_job.py writes the lines of files to a pair of nodes, each cycle
kills one of these after a random pause, and makes it go on:

    driver      SIGKILL of Spark with all its processes, and a new start: the last batch is repeated
    worker      SIGKILL of a Python worker: Spark repeats its task
    master      SIGKILL of the master; the slave is promoted, and the old master rejoins

In the end the log must have each line exactly once.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from hastore.store.offline.reader import StoreReader
from tests.process.harness import ROOT, wait_until
from tests.spark.conftest import require_java
from tests.spark.torture.checkpoints import committed_batches
from tests.spark.torture.processes import children, is_alive, is_worker

pytestmark = pytest.mark.full

CYCLES = int(os.environ.get("HASTORE_SPARK_CYCLES", "3"))
SEED = int(os.environ.get("HASTORE_SPARK_SEED", "0")) or random.SystemRandom().getrandbits(32)
JOB = Path(__file__).parent / "sink_job.py"
LINES = 2_000  # of a file; a batch has up to three files
WORKER_LOST = "Python worker exited unexpectedly"
RESUME_S = 300.0
AHEAD = 6  # files that wait to be read


class Input(threading.Thread):
    """Adds files of numbered lines while fewer than AHEAD files wait for the job."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.folder = folder / "input"
        self.folder.mkdir()
        self.checkpoint = folder / "checkpoint"
        self.ended = threading.Event()
        self.files = 0
        self.failure = None

    def run(self):
        try:
            while not self.ended.is_set():
                if self.files < AHEAD + 2 * committed_batches(self.checkpoint):
                    self.add()
                self.ended.wait(0.05)
        except Exception as error:
            self.failure = error

    def add(self):
        lines = "".join(f"{self.files}:{line}:{'x' * 100}\n" for line in range(LINES))
        hidden = self.folder / f".{self.files}"
        hidden.write_text(lines)
        hidden.rename(self.folder / f"{self.files:06}.txt")
        self.files += 1


class Job:
    """The process of sink_job.py, started anew after each kill."""

    def __init__(self, group, folder):
        self.group, self.folder = group, folder
        self.out, self.err = folder / "job.out", folder / "job.err"
        self.process = None
        self.seen = set()
        self.lost_worker = False  # one was killed, and the job may end of it

    def start(self):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with open(self.out, "wb") as out, open(self.err, "ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), ",".join(self.group.bootstrap), str(self.folder)],
                stdout=out, stderr=err, env=environment, start_new_session=True,
            )  # fmt: skip

    def wait_for_batches(self, count):
        """Wait until this process has finished some batches."""

        def said():
            if self.process.poll() is not None:
                assert self.start_again(), f"the job ended: {self.last_words()}"
            return self.out.read_text().count("batch") >= count

        wait_until(said, RESUME_S, lambda: f"no batch is finished: {self.last_words()}")

    def start_again(self):
        """Start a job that ended since its worker was killed; False if it ended for another reason.

        Spark tries a task again, but neither a commit nor the plan of a batch, which have Python
        workers too.
        """
        if not self.lost_worker or WORKER_LOST not in self.err.read_text(errors="replace"):
            return False
        self.lost_worker = False
        print("the job ended with the worker, and goes on", flush=True)
        self.start()
        return True

    def last_words(self):
        return self.err.read_text()[-2_000:]

    def workers(self):
        """Return the Python workers, without the daemons that fork them."""
        found = [pid for pid in children(self.process.pid) if is_worker(pid)]
        parents = {parent_of(pid) for pid in found}
        return [pid for pid in found if pid not in parents]

    def kill(self):
        """End all processes of the job."""
        pids = children(self.process.pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()
        wait_until(
            lambda: not any(is_alive(pid) for pid in pids), 60, "a process of the job lives on"
        )


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


class Kills:
    """The cycles; `master` and `slave` are the nodes that have these roles at the moment."""

    def __init__(self, group, job, rng):
        self.group, self.job, self.rng = group, job, rng
        self.master, self.slave = group[1], group[2]
        self.done = Counter()

    def run(self, cycles):
        order = []
        for cycle in range(cycles):
            order = order or self.rng.sample(("driver", "worker", "master"), 3)
            victim = order.pop()
            self.job.wait_for_batches(1)
            time.sleep(self.rng.random() * 1.5)
            print(f"cycle {cycle}: {victim}", flush=True)
            getattr(self, f"kill_{victim}")()
            self.done[victim] += 1

    def kill_driver(self):
        self.job.kill()
        self.job.start()

    def kill_worker(self):
        workers = self.job.workers()
        if workers:
            try:
                os.kill(self.rng.choice(workers), signal.SIGKILL)
                self.job.lost_worker = True
            except ProcessLookupError:
                print("the worker had ended", flush=True)

    def kill_master(self):
        self.master.kill()
        time.sleep(self.rng.random() * 0.3)
        self.slave.edit_role("SYNC_MASTER")
        self.master, self.slave = self.slave, self.master
        self.slave.edit_role("SLAVE")
        time.sleep(self.rng.random() * 0.3)
        self.slave.start("serve", wait=False)
        self.slave.wait_ready()
        self.master.wait_in_sync(self.slave.number)


@pytest.mark.slow("a JVM starts after each kill of the driver")
@pytest.mark.timeout(600 + 120 * CYCLES)
def test_each_line_is_in_the_log_once(make_group, tmp_path):
    require_java()
    print(f"seed {SEED}, {CYCLES} cycles")
    group = make_group(2, store={"commitlog_file_size": "4MiB"}).start()
    lines, job = Input(tmp_path), Job(group, tmp_path)
    kills = Kills(group, job, random.Random(SEED))
    lines.add()
    lines.start()
    job.start()
    try:
        kills.run(CYCLES)
        lines.ended.set()
        lines.join()
        assert lines.failure is None
        (tmp_path / "end").touch()
        while job.process.wait(RESUME_S) != 0:
            assert job.start_again(), job.last_words()
    finally:
        lines.ended.set()
        if job.process.poll() is None:
            job.kill()
    group.wait_equal()
    expected = Counter((file, line) for file in range(lines.files) for line in range(LINES))
    with StoreReader(str(tmp_path / "store1")) as reader:
        found = Counter(place(record) for record in reader.records() if record.topic == "t")
    missing, double = expected - found, found - expected
    assert not missing and not double, (
        f"{len(missing)} lines are missing, {len(double)} are there twice: "
        f"{list(missing)[:5]}, {list(double)[:5]}"
    )
    print(f"{len(found)} lines, each once; kills: {dict(kills.done)}")


def place(record):
    """Return (file, line) of a record, after checking all of its parts."""
    file, line, rest = record.body.decode().split(":")
    properties = dict(record.property_pairs)
    assert (rest, properties["KEYS"], properties["line"]) == ("x" * 100, file, line)
    return int(file), int(line)
