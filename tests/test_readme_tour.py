"""Run the README's "Five minutes by hand": its blocks unchanged, in order, in one shell, twice.

The second time, in another shell, leaves out what one time is enough for: the queries by Spark.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from hastore.spark.session import find_java, java_home_for_spark
from tests.process.harness import ROOT
from tests.spark.conftest import require_java
from tests.spark.quick import QUICK_JVM
from tests.walk_through import TOUR_S, as_typed, blocks, checkout, play, processes

INSTALL = "python3 -m venv .venv && .venv/bin/pip install -e '.[spark]'\n"
pytestmark = pytest.mark.full
OWN_SESSION = "SparkSession.builder"
OWN_JVM = f"-Dspark.ui.enabled=false {QUICK_JVM}"
BLOCKS = blocks("README.md", "## Five minutes by hand", "\n## ")


USES_SPARK = re.compile(r"local_session|hastore pipeline")


def script(with_spark: bool) -> str:
    """Return the tour as one script, without the user's own session, which is tested below."""
    first, *others = [
        as_typed(kind, text)
        for kind, text in BLOCKS
        if OWN_SESSION not in text and (with_spark or not USES_SPARK.search(text))
    ]
    assert first.startswith(INSTALL)
    return "\n".join([first.removeprefix(INSTALL), *others])


@pytest.fixture
def tour(tmp_path):
    """Copy what the tour uses of a checkout, with free ports; yield folder and scripts."""
    with checkout(tmp_path, "bin", "conf", "hastore", "pyspark_hastore") as ports:
        others = {}
        for name in ("master", "slave"):
            file = tmp_path / "conf" / f"{name}.yaml"
            text = file.read_text().replace("file_size: 1GiB", "file_size: 1MiB")
            assert "1MiB" in text
            for port in re.findall(r"127\.0\.0\.1:(\d+)", text.partition("\nstore:")[0]):
                if port not in others:
                    others[port] = str(ports.take())
            for port, other in others.items():
                text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
            file.write_text(text)
        assert len(others) == 6
        scripts = [script(with_spark=True), script(with_spark=False)]
        for port, other in others.items():
            scripts = [one.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}") for one in scripts]
        assert len(scripts[1]) < len(scripts[0])
        yield tmp_path, scripts


@pytest.mark.slow("types a whole page of the README into two shells, with three sessions of Spark")
@pytest.mark.timeout(2 * TOUR_S)
def test_the_tour_works_twice_in_a_row(tour):
    require_java()
    folder, scripts = tour
    for shell, typed in zip(("bash", "sh"), scripts, strict=True):
        told, errors = play(folder, typed, shell)
        assert "error:" not in errors, errors
        assert [line for line in told.splitlines() if line.startswith("ready ")][2:], told
        sent = [json.loads(line) for line in told.splitlines() if line.startswith('{"status"')]
        assert {one["status"] for one in sent} == {"PUT_OK"} and len(sent) == 2
        assert {one["level"] for one in sent} == {"SYNC_MEM(1)"}
        assert told.count("hello, log\n") == 2, "printed by both consume commands"
        assert told.count("still here\n") == 1
        if typed is scripts[0]:
            table = [line for line in told.splitlines() if line.startswith("|")]
            values = [line.split("|")[4].strip() for line in table[1:]]
            assert {"hello, log", "still here"} <= set(values), told
        left = processes(folder)
        assert [p for p in left if p.info["name"] != "java"] == []
        assert not (folder / "data").exists()
        psutil.wait_procs(left, timeout=60)  # Spark's JVM ends a little after its driver


def own_session() -> str:
    """Return the README's block that creates a user's own session."""
    (found,) = [text for _, text in BLOCKS if OWN_SESSION in text]
    return found


COUNT = """
frame = spark.read.format("hastore").option("path", {path!r}).option("subscribe", "TopicA")
print("found", frame.load().count())
"""


def spark_says(code: str, folder: pathlib.Path, **environment: str) -> str:
    """Run `code` with this interpreter, outside of any checkout; return its stdout."""
    code += COUNT.format(path=str(ROOT / "tests" / "golden" / "three-files"))
    base = {name: text for name, text in os.environ.items() if not name.startswith("PYSPARK")}
    base |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_SUBMIT_OPTS": OWN_JVM}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=base | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, problems = process.communicate(timeout=TOUR_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Spark's JVM may still be running
    assert process.returncode == 0, problems
    return out


def java_of_this_machine() -> dict[str, str]:
    """Return the environment variables that a session other than `local_session` needs."""
    require_java()
    return {"JAVA_HOME": str(java_home_for_spark(find_java()))}


@pytest.mark.slow("a session of Spark in a process of its own")
@pytest.mark.timeout(TOUR_S + 60)
def test_a_users_own_session_works_as_the_readme_says(tmp_path):
    java = java_of_this_machine()
    assert "found 400" in spark_says(own_session(), tmp_path, **java)


@pytest.mark.slow("a session of Spark in a process of its own")
@pytest.mark.timeout(TOUR_S + 60)
def test_an_installed_package_needs_no_registration(tmp_path):
    java = java_of_this_machine()
    site = tmp_path / "site"
    for name in ("hastore", "pyspark_hastore"):
        shutil.copytree(ROOT / name, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    lines = own_session().splitlines(keepends=True)
    code = "".join(line for line in lines if "hastore" not in line)
    assert len(code) < len(own_session()) and "hastore" not in code
    python = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(site)}  # as an activated venv
    assert "found 400" in spark_says(code, tmp_path, **python, **java)
