"""`make run` in a checkout without a usable environment: what it says before pip, or instead of it.

`bin/hastore` without one says what to run.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FAKE = """#!/bin/sh
# A Python that looks like another one, and tells what it is asked to run.
if [ "$1" = -c ]; then exec {real} -S -c 'import sys; {patch}; exec(sys.argv.pop(1))' "$2"; fi
echo "RUNS $*"
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with what `make run` needs before pip; the environment is still to be made."""
    for name in ("Makefile", "setup.cfg", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "bin", tmp_path / "bin", symlinks=True)
    return tmp_path


def make(checkout: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    return subprocess.run(
        ["make", *words], cwd=checkout, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def put_python(checkout: pathlib.Path, patch: str) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE.format(real=sys.executable, patch=patch))
    python.chmod(0o755)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("sys.version_info = (3, 9, 2)", ".venv has Python 3.9, and hastore needs 3.11 or later"),
        ("import importlib.util as u; u.find_spec = lambda name: None", ".venv has no pip: make "),
    ],
    ids=["an old Python", "no pip"],
)
def test_an_environment_that_cannot_work_is_named_before_pip(
    checkout: pathlib.Path, patch: str, said: str
) -> None:
    put_python(checkout, patch)
    done = make(checkout, "run", "SPARK=0")
    assert done.returncode == 2
    assert f"error: {said}" in done.stderr and "make clean" in done.stderr
    assert "RUNS" not in done.stdout


def test_another_python_than_the_one_that_was_asked_for_is_named(checkout: pathlib.Path) -> None:
    put_python(checkout, "sys.version = str(1); import importlib.util as u; u.find_spec = id")
    done = make(checkout, "run", "SPARK=0", f"PYTHON={sys.executable}")
    assert done.returncode == 2 and "was made by another Python" in done.stderr
    assert "RUNS" not in done.stdout


def test_what_pip_installs_is_said_before_it_starts(checkout: pathlib.Path) -> None:
    put_python(checkout, "import importlib.util as u; u.find_spec = id")
    small = make(checkout, "run", "SPARK=0")
    assert small.returncode == 0, small.stderr
    assert "once: 0.3 GB. This may take some minutes." in small.stderr
    whole = make(checkout, "run")
    assert "once: 1.0 GB, half of it Spark; make run SPARK=0 needs 0.3 GB." in whole.stderr
    assert "RUNS -m pip install" in whole.stdout and "demo,spark" in whole.stdout
    assert "RUNS bin/hastore demo" in whole.stdout
    again = make(checkout, "run")
    assert "pip" not in again.stdout + again.stderr


@pytest.mark.parametrize(
    "program", ["hastore", "hastore-master", "hastore-slave", "hastore-dledger"]
)
def test_a_program_without_an_environment_says_what_to_run(
    checkout: pathlib.Path, program: str
) -> None:
    (checkout / "hastore").symlink_to(ROOT / "hastore")
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(checkout / "bin" / program), "--help"],  # no packages
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "has no click, which hastore needs" in done.stderr
    assert f"run `make run SPARK=0` in {checkout} once" in done.stderr
