"""Helpers of the audit's tests: run it without Spark, task by task; damaged copies of stores."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hastore.pipeline.audit.job import Summary, compare
from hastore.pipeline.audit.task import Task, TaskResult, run_task
from hastore.pipeline.progress import NoProgress

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"


def audit(
    a: str | pathlib.Path,
    b: str | pathlib.Path,
    *,
    before: Callable[[Task], None] = lambda task: None,
    **options: Any,
) -> Summary:
    """Compare two sides in this process; call `before` before each task."""

    def run(tasks: Sequence[Task]) -> Iterator[tuple[Task, TaskResult]]:
        for task in tasks:
            before(task)
            yield task, run_task(task)

    options.setdefault("progress", NoProgress())
    return compare(a, b, run, 2, **options)


def copied(tmp_path: pathlib.Path, name: str, count: int = 2) -> list[pathlib.Path]:
    """Return copies of a golden store."""
    found = []
    for number in range(count):
        target = tmp_path / f"{name}-{number}"
        shutil.copytree(GOLDEN / name, target)
        found.append(target)
    return found


def files(store: pathlib.Path) -> list[pathlib.Path]:
    return sorted((store / "commitlog").iterdir())


def peek(store: pathlib.Path, start: int, end: int) -> bytes:
    """Return bytes [start, end) of a log."""
    raw = b""
    for path in files(store):
        begin, size = int(path.name), path.stat().st_size
        if begin < end and start < begin + size:
            raw += path.read_bytes()[max(0, start - begin) : max(0, end - begin)]
    return raw


def poke(store: pathlib.Path, offset: int, data: bytes) -> None:
    """Overwrite bytes of a log, within one file."""
    for path in files(store):
        begin = int(path.name)
        if begin <= offset < begin + path.stat().st_size:
            with open(path, "r+b") as file:
                file.seek(offset - begin)
                file.write(data)
            return
    raise AssertionError(offset)


def flip(store: pathlib.Path, offset: int, mask: int) -> None:
    """Change one byte of a log."""
    poke(store, offset, bytes((peek(store, offset, offset + 1)[0] ^ mask,)))
