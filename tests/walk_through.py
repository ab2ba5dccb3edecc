"""Walk-throughs of the documentation, played as a user types them, in a copy of this checkout.

Three things differ from a user's machine. Nothing is installed: a test leaves out the line that
does it, and this interpreter replaces the one of `.venv`. Ports and file sizes are different. A JVM
of Spark compiles little, because it runs for seconds.
"""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import psutil

from tests.process.harness import ROOT, Ports
from tests.spark.quick import QUICK_JVM

TOUR_S = 600  # for a busy machine; an idle one needs 10 to 20 s
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


def blocks(file: str, heading: str, end: str) -> list[tuple[str, str]]:
    """Return the blocks of a file's section, each with its kind: sh or python."""
    section = (ROOT / file).read_text().partition(heading)[2].partition(end)[0]
    return _BLOCK.findall(section)


def as_typed(kind: str, text: str) -> str:
    """Return a block for a shell; one of Python becomes the stdin of `.venv/bin/python`."""
    return f".venv/bin/python - <<'PYTHON'\n{text}PYTHON\n" if kind == "python" else text


@contextlib.contextmanager
def checkout(folder: pathlib.Path, *names: str) -> Iterator[Ports]:
    """Copy these parts of the checkout to `folder`; lend free ports.

    At the end, also after a failure, what still runs there is killed.
    """
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    assert sys.prefix != sys.base_prefix, "the tests run in a virtual environment"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with contextlib.closing(Ports()) as ports:
        try:
            yield ports
        finally:
            for process in processes(folder):
                process.kill()


def processes(folder: pathlib.Path) -> list[psutil.Process]:
    """Return the processes that run in `folder`."""
    found = psutil.process_iter(["cwd", "name"])
    return [one for one in found if one.info["cwd"] == str(folder)]


def play(folder: pathlib.Path, typed: str, shell: str) -> tuple[str, str]:
    """Run a walk-through in a shell in `folder`; return its output and errors."""
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}
    environment["SPARK_SUBMIT_OPTS"] = QUICK_JVM
    for name in ("HASTORE_BOOTSTRAP", "HASTORE_SECURITY"):
        environment.pop(name, None)
    done = subprocess.run(
        [shell], input=typed, cwd=folder, env=environment, text=True,
        capture_output=True, timeout=TOUR_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr
