"""Jobs on a real standalone cluster: the source on every executor, one killed in mid-job."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zlib
from pathlib import Path

import pytest

from tests.process.harness import Group
from tests.spark.cluster.standalone import SMALL, SPARK_HOME, Cluster
from tests.spark.conftest import require_java
from tests.spark.pipeline.test_command import offsets
from tests.spark.stores import numbered, write_store

pytestmark = pytest.mark.full

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
MESSAGES = 20_000
END_S = 480


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    require_java()
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    messages = numbered(MESSAGES, queues=4, size=500)
    write_store(path, messages, file_size=1 << 22, units_per_file=5_000)
    return path


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Group(tmp_path_factory.mktemp("nodes"), 2, store={"commitlog_file_size": "4MiB"}) as pair:
        yield ",".join(pair.start().bootstrap)


def start(cluster, command, **environment):
    """Start a driver; its output is in the returned file."""
    output = cluster.folder / f"driver-{time.monotonic_ns()}.log"
    with output.open("wb") as file:
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=file,
            stderr=file,
            env=cluster.environment(**environment),
        ), output


def options(cluster):
    return [
        part
        for item in (SMALL | {"spark.master": cluster.master}).items()
        for part in ("--conf", "=".join(item))
    ]


def finish(process, output):
    """Return the lines of a driver that ended well."""
    try:
        code = process.wait(END_S)
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    assert code == 0, text[-6_000:]
    return text.splitlines()


def wait_for(path, process, output):
    end = time.monotonic() + END_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, output.read_text()[-6_000:]
        time.sleep(0.1)
    return path.read_text()


def expected(queues):
    """Return what the driver prints of these queues: count, distinct, offsets, digests."""
    bodies = [str(n).encode().rjust(500, b".") for n in range(MESSAGES) if n % 4 in queues]
    each = MESSAGES // 4
    offsets = len(queues) * each * (each - 1) // 2
    return f"{len(bodies)} {len(bodies)} {offsets} {sum(map(zlib.crc32, bodies))}"


@pytest.mark.slow("Spark's driver and two executors start, and Python in each")
def test_a_job_reads_and_writes_while_an_executor_is_killed(cluster, store, nodes, tmp_path):
    process, output = start(
        cluster,
        [sys.executable, HERE / "read_and_write.py", store, nodes, tmp_path],
        PYSPARK_SUBMIT_ARGS=shlex.join([*options(cluster), "pyspark-shell"]),
        # hastore is imported from a folder; `register` tells the executors which.
        PYTHONPATH=str(ROOT),
    )
    executor = int(wait_for(tmp_path / "executor", process, output))
    os.kill(executor, signal.SIGKILL)
    lines = finish(process, output)
    assert "master spark" in lines
    assert f"killed {expected({0, 1, 2, 3})}" in lines
    assert f"whole {expected({0, 1, 2, 3})}" in lines
    assert f"copy {expected({0})}" in lines


@pytest.mark.long
@pytest.mark.slow("Spark's driver and two executors start, and Python in each")
def test_spark_submit_brings_the_wheel_to_executors_that_lack_it(cluster, store, wheel, tmp_path):
    """By `--py-files`, with the wheel as a zip; the executors have only its dependencies."""
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": bare, "platbase": bare}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    packed = shutil.copy(wheel, tmp_path / "hastore.zip")
    submit = [SPARK_HOME / "bin" / "spark-submit", *options(cluster), "--py-files", packed]
    driver = start(
        cluster,
        [*submit, HERE / "count.py", store],
        PYSPARK_PYTHON=str(bare / "bin" / "python"),
    )
    lines = finish(*driver)
    assert f"path {MESSAGES}" in lines
    (found,) = [line for line in lines if line.startswith("from ")]
    assert all("hastore.zip" in path for path in found.split()[1:])


@pytest.mark.slow("Spark's driver and two executors start, and Python in each")
def test_the_tasks_of_a_pipeline_job_run_on_the_workers(cluster, store, tmp_path):
    """By `hastore pipeline export --master spark://...`."""
    executors = cluster.executors()
    command = [sys.executable, "-m", "hastore", "pipeline", "export", "--topic", "t", "--json"]
    command += ["--path", store, "--target", tmp_path / "out", "--master", cluster.master]
    command += [
        part
        for name, value in SMALL.items()
        if name.startswith(("spark.exec", "spark.driver"))
        for part in ("--conf", f"{name}={value}")
    ]
    lines = finish(*start(cluster, command, PYTHONPATH=str(ROOT)))
    (told,) = [line for line in lines if line.startswith("{")]
    assert json.loads(told)["messages"] == MESSAGES
    assert offsets(tmp_path / "out") == sorted((n % 4, n // 4) for n in range(MESSAGES))
    assert cluster.executors() > executors, "no worker has run an executor"
