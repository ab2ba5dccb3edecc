"""Commands in this process (kit.py) say the same as real processes, and end with the same code."""

import contextlib
import threading

import pytest

from tests.cli import kit
from tests.process import harness
from tests.process.harness import Ports

GOLDEN = str(harness.ROOT / "tests" / "golden" / "three-files")
NOWHERE = ("--bootstrap", "127.0.0.1:1", "--timeout", "0.1")
COMMANDS = {
    "help": (("--help",), b""),
    "without arguments": (("log",), b""),
    "no such command": (("stauts",), b""),
    "a wrong option": (("status", "--timeout", "nan"), b""),
    "a table": (("log", "stat", "--store", GOLDEN), b""),
    "objects": (("log", "dump", "--store", GOLDEN, "--json", "--to", "2000"), b""),
    "no store": (("log", "verify", "--store", "/nowhere"), b""),
    "no node": (("status", *NOWHERE), b""),
    "lines of stdin": (("produce", "t", "--json", *NOWHERE), b"one\n\xff\n"),
    "a message with no place": (("produce", "a/b", *NOWHERE), b"x"),
    "a wrong file": (("serve", "-c", "/nowhere/x.yaml"), b""),
}


OFTEN = ("help", "a table", "no node", "lines of stdin", "a wrong file")


@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in COMMANDS],
)
def test_a_command_here_is_like_a_process(name):
    arguments, stdin = COMMANDS[name]
    here = kit.hastore(*arguments, stdin=stdin)
    there = harness.hastore(*arguments, stdin=stdin)
    assert here.stdout or here.stderr
    for part in ("returncode", "stdout", "stderr"):
        assert getattr(here, part) == getattr(there, part), part


def test_the_other_programs_check_their_files(tmp_path):
    with harness.Group(tmp_path) as group:
        done = kit.program("hastore-master", "-c", str(group[1].path), "--check")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"{group[1].path} is valid: node 1 of 2")


def test_a_command_here_leaves_nothing_behind(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    threads = set(threading.enumerate())
    kit.hastore("log", "stat", "--store", GOLDEN)
    with contextlib.closing(Ports()) as ports:
        address = f"127.0.0.1:{ports.take()}"
        done = kit.hastore("produce", "t", "--bootstrap", address, "--timeout", "0.1", stdin=b"x")
    assert done.returncode == 1 and address in done.stderr
    assert set(threading.enumerate()) <= threads
    assert capsys.readouterr() == ("", "")
