"""One Spark session for the whole run, which takes 5 to 10 s to start, and the wheel."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from hastore.errors import UsageError
from hastore.spark.session import find_java
from tests.spark.quick import QUICK

ROOT = Path(__file__).resolve().parent.parent.parent


def pip(python, *arguments):
    """Run pip for an environment that may have none of its own."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel of this tree, built from a copy: a build leaves files behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("hastore", "pyspark_hastore"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    pip(sys.executable, "wheel", str(tree), "--no-deps", "--wheel-dir", str(tree / "dist"))
    (built,) = (tree / "dist").iterdir()
    return built


def require_java():
    """Skip the test without a Java; in CI fail instead."""
    try:
        find_java()
    except UsageError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no Spark tests: {error}")


@pytest.fixture(scope="session")
def spark():
    require_java()
    from hastore.spark.session import local_session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # raised by pyspark's own imports
        session = local_session("hastore tests", master="local[2]", memory="512m", settings=QUICK)
    yield session
    session.stop()
