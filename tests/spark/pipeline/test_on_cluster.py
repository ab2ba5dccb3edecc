"""`hastore pipeline export --master spark://...` on a standalone master with two workers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.cluster.standalone import SMALL, Cluster
from tests.spark.conftest import require_java
from tests.spark.pipeline.test_command import offsets
from tests.spark.stores import numbered, write_store

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parent.parent.parent.parent
COUNT = 3_000


def test_the_tasks_of_a_job_run_on_the_workers(tmp_path):
    require_java()
    write_store(tmp_path / "store", numbered(COUNT, queues=2), units_per_file=COUNT)
    (tmp_path / "cluster").mkdir()
    command = [sys.executable, "-m", "hastore", "pipeline", "export", "--topic", "t", "--json"]
    command += ["--path", str(tmp_path / "store"), "--target", str(tmp_path / "out")]
    settings = {k: v for k, v in SMALL.items() if k.startswith(("spark.exec", "spark.driver"))}
    for name, value in settings.items():
        command += ["--conf", f"{name}={value}"]
    with Cluster(tmp_path / "cluster") as cluster:
        done = subprocess.run(
            [*command, "--master", cluster.master],
            env=cluster.environment(PYTHONPATH=str(ROOT)),
            capture_output=True,
            text=True,
            timeout=500,
        )
        work = list((tmp_path / "cluster").glob("work*/app-*"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["messages"] == COUNT
    assert offsets(tmp_path / "out") == sorted((n % 2, n // 2) for n in range(COUNT))
    assert work, "no worker has run an executor"
