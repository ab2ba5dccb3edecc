"""Run the walk-through at the top of docs/security.md: its blocks unchanged, in one shell.

As in the test of the README's tour, nothing is installed, and ports and file sizes are different.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import psutil
import pytest

from tests.process.harness import ROOT, Ports

TEXT = (ROOT / "docs" / "security.md").read_text()
TOUR = TEXT.partition("## A group with TLS and identities everywhere")[2].partition("\n### ")[0]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -e '.[tls]'\n"
INIT = "bin/hastore init --tls group\n"
PORTS = ("10911", "10912", "10913", "10921", "10922", "10923")
TOUR_S = 600  # for a busy machine; an idle one needs 10 s


def script(ports: dict[str, str]) -> str:
    """Return the walk-through as one script, on other ports."""
    parts = []
    for kind, text in BLOCK.findall(TOUR):
        if kind == "python":
            text = f".venv/bin/python - <<'PYTHON'\n{text}PYTHON\n"
        parts.append(text)
    assert parts[0] == INSTALL and parts[1] == INIT
    changes = [f"s/127.0.0.1:{port}/127.0.0.1:{other}/" for port, other in ports.items()]
    changes.append("s/commitlog_file_size: 1GiB/commitlog_file_size: 1MiB/")
    edits = "".join(f" -e '{one}'" for one in changes)
    typed = "\n".join([INIT, f"sed -i{edits} group/node1.yaml group/node2.yaml", *parts[2:]])
    before, edit, after = typed.partition("group/node1.yaml group/node2.yaml")
    for port, other in ports.items():
        after = after.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
    return before + edit + after


@pytest.fixture
def checkout(tmp_path):
    """Copy the parts of a checkout that the walk-through uses; yield folder and script."""
    for name in ("bin", "conf", "hastore"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    assert sys.prefix != sys.base_prefix, "the tests run in a virtual environment"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with contextlib.closing(Ports()) as ports:
        yield tmp_path, script({port: str(ports.take()) for port in PORTS})
        for process in psutil.process_iter(["cwd"]):
            if process.info["cwd"] == str(tmp_path):
                process.kill()


def play(folder: pathlib.Path, typed: str, shell: str) -> tuple[str, str]:
    """Run the walk-through in a shell in `folder`; return its output and errors."""
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"}
    for name in ("HASTORE_BOOTSTRAP", "HASTORE_SECURITY"):
        environment.pop(name, None)
    done = subprocess.run(
        [shell], input=typed, cwd=folder, env=environment, text=True,
        capture_output=True, timeout=TOUR_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, done.stderr


@pytest.mark.timeout(TOUR_S)
def test_the_walk_through_works(checkout):
    folder, typed = checkout
    told, errors = play(folder, typed, "sh")
    assert len([line for line in told.splitlines() if line.startswith("ready ")]) == 2, told
    sent = [json.loads(line) for line in told.splitlines() if line.startswith('{"status"')]
    assert [one["status"] for one in sent] == ["PUT_OK"] * 2 and "SYNC_MEM(1)\n" in told, told
    assert told.count("two pears\n") == 2 and told.count("three apples\n") == 1
    assert told.count("four plums\n") == 1, told
    # Three requests are refused, each for its own reason, and nothing else.
    assert told.count("refused, as it must be\n") == 3, told + errors
    assert "identity shop has no right to produce 'payments'" in errors
    assert "this node asks its clients who they are" in errors
    assert "identity shop is unknown here or has another key" in errors
    wrong = [line for line in errors.splitlines() if line.startswith("error:")]
    assert len(wrong) == 3, errors
    noted = [json.loads(line) for line in told.splitlines() if line.startswith('{"time"')]
    assert {one["action"] for one in noted} >= {"authenticate", "Put"}, told
    assert 'hastore_writable{node="1"} 1.0' in told, told
    assert "prometheus" in told.rpartition("NAME")[2] and "shop" not in told.rpartition("NAME")[2]
    left = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]
    assert left == [] and not (folder / "group").exists()
