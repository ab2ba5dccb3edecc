"""Run `hastore` in this process: its exit code, stdout and stderr as a process would give them.

    done = hastore("status", "--bootstrap", addresses)
    assert done.returncode == 0, done.stderr

A command takes 0.001 s of CPU here, and 0.27 s as a process. test_kit.py compares both. Start a
process (tests/process/harness.py) if the process is the point: signals, a terminal, a closed pipe,
a node that runs.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from unittest import mock

import click

from hastore.cli import common, nodes
from hastore.cli.main import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS: Mapping[str, click.Command] = {
    "hastore": cli,
    "hastore-master": nodes.master_command,
    "hastore-slave": nodes.slave_command,
    "hastore-dledger": nodes.dledger_command,
}
_one_at_a_time = threading.Lock()  # the streams belong to the whole process


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Let this process be a user who may not look into folders of mode 0; root may."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def hastore(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Run `hastore ARGUMENTS` to its end; return its exit code, stdout and stderr."""
    return program("hastore", *arguments, stdin=stdin)


def program(
    name: str, *arguments: str, stdin: bytes | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `bin/NAME ARGUMENTS` to its end, like `hastore`. An exception that it lets out is raised.

    It must not start a node: a node takes over the signals and the log of its process.
    """
    assert _one_at_a_time.acquire(blocking=False), "another command runs in this process"
    try:
        argv = [str(ROOT / "bin" / name), *arguments]
        with _as_in_a_process(argv, stdin or b"") as (out, err):
            code = _exit_code(name, list(arguments))
            return subprocess.CompletedProcess(
                argv, code, out.getvalue().decode(), err.getvalue().decode()
            )
    finally:
        _one_at_a_time.release()


def _exit_code(name: str, arguments: list[str]) -> int:
    """Do what `common.run` does, up to the end of the interpreter."""
    before = set(threading.enumerate())
    try:
        code = common.run_code(PROGRAMS[name], name, arguments)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join()  # the interpreter waits for these
    return code


@contextlib.contextmanager
def _as_in_a_process(argv: list[str], stdin: bytes) -> Iterator[tuple[io.BytesIO, io.BytesIO]]:
    """Replace what a new process has of its own: arguments, streams, and a log without handlers."""
    out, err = io.BytesIO(), io.BytesIO()
    streams = {
        "stdin": io.TextIOWrapper(io.BytesIO(stdin), "utf-8"),
        "stdout": io.TextIOWrapper(out, "utf-8", write_through=True),
        "stderr": io.TextIOWrapper(err, "utf-8", "backslashreplace", write_through=True),
    }
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []  # warnings go to stderr, without pytest's handlers
    _forget_consoles()
    try:
        with mock.patch.multiple(sys, argv=argv, **streams):
            yield out, err
    finally:
        _forget_consoles()
        root.handlers = handlers


def _forget_consoles() -> None:
    """Let the next output look at its stream and at COLUMNS again."""
    for name in ("stdout", "stderr"):
        vars(common).pop(name, None)
