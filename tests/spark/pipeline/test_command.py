"""`hastore pipeline export` as a process: what it prints, a stop by Ctrl-C, and spark-submit."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.spark.conftest import require_java
from tests.spark.quick import QUICK_JVM, QUICK_OPTIONS
from tests.spark.stores import numbered, write_store
from tests.spark.torture.processes import children, wait_until_gone

ROOT = Path(__file__).resolve().parent.parent.parent.parent
MESSAGES = 40_000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    require_java()
    path = tmp_path_factory.mktemp("store")
    messages = numbered(MESSAGES, queues=2, size=500)
    write_store(path, messages, file_size=1 << 26, units_per_file=MESSAGES)
    return path


def start(arguments, program=(sys.executable, "-m", "hastore", "pipeline"), **options):
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        **options,
    )


def offsets(target):
    found = []
    for file in target.glob("topic=t/date=*/*.parquet"):
        table = pq.read_table(file, columns=["partition", "offset"], partitioning=None)
        found += zip(*(column.to_pylist() for column in table.columns), strict=True)
    return sorted(found)


ALL = sorted((n % 2, n // 2) for n in range(MESSAGES))


@pytest.mark.slow("a JVM starts for each of the two runs")
@pytest.mark.full
def test_ctrl_c_stops_the_job_at_once_and_the_next_run_continues(store, tmp_path):
    arguments = ["export", "--path", store, "--topic", "t", "--target", tmp_path / "out"]
    arguments += ["--master", "local[1]", "--file-size", 1, "--commit-every", 0.01]
    arguments += QUICK_OPTIONS
    job = start(arguments)
    commits = tmp_path / "out" / "_hastore" / "commits"
    try:
        while job.poll() is None and not list(commits.glob("0*.json")):
            time.sleep(0.01)
        processes = set(children(job.pid)) - {job.pid}
        assert processes, "the job ended before it could be stopped"
        job.send_signal(signal.SIGINT)
        out, err = job.communicate(timeout=300)
    finally:
        job.kill()
        job.communicate()
    assert (job.returncode, out) == (130, ""), err
    lines = [line for line in err.splitlines() if not line.startswith("export: ")]
    assert len(lines) == 1, err
    assert lines[0].startswith("stopped: ") and "messages were exported" in lines[0]
    assert lines[0].endswith("run the same command again to continue")
    wait_until_gone(processes)
    kept = offsets(tmp_path / "out")
    assert 0 < len(kept) < MESSAGES and f"{len(kept):,} messages" in lines[0]

    job = start([*arguments, "--json"])
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert json.loads(out)["messages"] == MESSAGES - len(kept)
    assert offsets(tmp_path / "out") == ALL


@pytest.mark.full
@pytest.mark.slow("a JVM starts, and ends while it still does")
def test_ctrl_c_while_the_session_is_made_leaves_one_line_and_no_process(store, tmp_path):
    """The signal comes when Spark's context is there, with pyspark's own handler of SIGINT."""
    program = (
        "import os, signal, sys\n"
        "from hastore.cli.main import main\n"
        "import hastore.spark.session as session\n"
        "register = session.register\n"
        "def stopped(spark):\n"
        "    print(*open(f'/proc/self/task/{os.getpid()}/children').read().split(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    register(spark)\n"
        "session.register = stopped\n"
        "main()\n"
    )
    arguments = ["--path", store, "--topic", "t", "--target", tmp_path / "out", *QUICK_OPTIONS]
    job = start(arguments, (sys.executable, "-c", program, "pipeline", "export"))
    out, err = job.communicate(timeout=300)
    assert job.returncode == 130, err
    lines = [line for line in err.splitlines() if not line.startswith("export: ")]
    assert len(lines) == 1 and lines[0].startswith("stopped: "), err
    wait_until_gone(set(map(int, out.split())))


@pytest.mark.slow("a JVM of its own starts, and Python for its tasks")
@pytest.mark.full
def test_spark_submit_runs_the_same_job_in_its_session(store, tmp_path):
    from hastore.spark.session import find_java, java_home_for_spark

    submit = Path(sysconfig.get_path("scripts"), "spark-submit")
    script = ROOT / "hastore" / "cli" / "pipeline" / "submit.py"
    settings = ["spark.ui.enabled=false", "spark.driver.host=127.0.0.1"]
    settings += ["spark.driver.bindAddress=127.0.0.1"]
    settings += [f"spark.driver.extraJavaOptions={QUICK_JVM}"]
    program = [str(submit), "--master", "local[2]"]
    program += [word for one in settings for word in ("--conf", one)]
    clean = {k: v for k, v in os.environ.items() if "PYTHON" not in k and "SPARK" not in k}
    clean |= {"JAVA_HOME": str(java_home_for_spark(find_java())), "PYSPARK_PYTHON": sys.executable}
    job = start(
        ["export", "--path", store, "--topic", "t", "--target", tmp_path / "out", "--json"],
        [*program, str(script)],
        env=clean,
    )
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["merged_files"] == 0  # the newest field: this hastore
    assert offsets(tmp_path / "out") == ALL


def test_wrong_arguments_are_reported_before_spark_starts(tmp_path):
    job = start(["export", "--target", tmp_path / "out"])
    out, err = job.communicate(timeout=300)
    assert job.returncode == 2 and out == ""
    assert err == "error: give either --path (a store's directory) or --servers (nodes)\n"
    assert not (tmp_path / "out").exists()
