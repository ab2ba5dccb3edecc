"""The demo at 1/20 of its size, with Spark."""

import json
import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from hastore.demo.flights import count_rows
from tests.process.harness import ROOT, hastore
from tests.spark.quick import QUICK_JVM

pytestmark = pytest.mark.full
SCALE = "0.05"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Run the demo once; return its folder, its JSON and its stderr.

    The environment names the security file of another group, which the demo's nodes know nothing
    of. When it reports that nothing is left running, it must have no child processes.
    """
    folder = tmp_path_factory.mktemp("demo") / "stores"
    left, text = [], ""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "bin" / "hastore"), "demo", "--json"]
        + ["--scale", SCALE, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ
        | {"HASTORE_SECURITY": str(folder.parent / "another-group.yaml")}
        | {"SPARK_SUBMIT_OPTS": QUICK_JVM},
    ) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        for line in demo.stderr:
            text += line
            if "nothing is left running" in line:
                left = [child.name() for child in psutil.Process(demo.pid).children(recursive=True)]
        found = demo.stdout.read()
    assert demo.returncode == 0, text
    assert left == []
    return folder, json.loads(found), text


@pytest.mark.slow("the demo itself, with a Spark of its own")
@pytest.mark.timeout(900)
def test_all_steps_run_and_all_proofs_hold(told):
    folder, facts, text = told
    rows = count_rows(float(SCALE))
    assert facts["messages"] == facts["spark_messages"] == rows
    assert facts["levels"] == {"SYNC_MEM(1)": rows}
    assert facts["flip"]["seconds_without_acknowledgement"] > 0
    assert facts["queue_units_identical"] == rows
    assert facts["log_bytes_identical"] > rows * 300
    assert pathlib.Path(facts["plot"]).read_bytes().startswith(b"\x89PNG")
    assert text.startswith("HASTORE_SECURITY is not used: the demo makes a group of its own")
    for number in range(1, 7):
        assert f"{number}/6 " in text
    for number in (1, 2):
        assert (folder / f"node{number}" / "commitlog").is_dir()


def test_nothing_is_left_running(told):
    folder, _, _ = told
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert str(folder).encode() not in process.read_bytes(), process
        except (FileNotFoundError, ProcessLookupError):
            pass  # the process has ended since


def test_a_folder_is_not_used_twice(told):
    folder, _, _ = told
    done = hastore("demo", "--folder", str(folder))
    assert done.returncode == 2 and "already contains a demo" in done.stderr
