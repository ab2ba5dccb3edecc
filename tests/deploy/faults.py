"""What the tests of alerts share: which alerts a test lets fire, puts that go on, small disks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from hastore import Producer
from hastore.errors import HastoreError
from tests.cli.kit import hastore
from tests.process.harness import Node

TEST = {"cluster": "test", "group": "g0"}  # the labels of an alert about the group
WHY = "each alert is waited for until it fires, and until it has gone"
# What may fire for a moment while a link or a master changes: here after 1 to 4 s, not 10 to 60.
PASSING = ("HastorePutsRefused", "HastoreSeveralMasters", "HastoreTooFewInSync", "HastoreProblems")
_Test = TypeVar("_Test", bound=Callable[..., Any])


def fires(*names: str) -> Callable[[_Test], _Test]:
    """Say which alerts a test sees firing; test_rules.py checks that no alert is left out."""

    def mark(test: _Test) -> _Test:
        test.fires = names  # type: ignore[attr-defined]
        return test

    return mark


def of(node: Node) -> dict[str, str]:
    """Return the labels of an alert about a node."""
    return {**TEST, "node": str(node.number)}


def run(*words: str) -> None:
    """Run `hastore WORDS`, which must succeed."""
    done = hastore(*words)
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def puts(
    bootstrap: list[str], body: bytes = bytes(100), pause_s: float = 0.05, **options: Any
) -> Iterator[None]:
    """Put messages without an end during the block; what comes of them does not matter."""
    stop = threading.Event()
    settings: dict[str, Any] = {"delivery_timeout_s": 5.0, **options}

    def run() -> None:
        with Producer(bootstrap, **settings) as producer:
            while not stop.wait(pause_s):
                with contextlib.suppress(HastoreError):
                    producer.send("T", body)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class SmallDisk:
    """A tmpfs, and a file of ballast that fills it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    @property
    def free_bytes(self) -> int:
        """The free bytes."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_bsize

    def fill(self, size: int) -> None:
        """Let the ballast take `size` more bytes."""
        with open(self._ballast, "ab") as file:
            os.posix_fallocate(file.fileno(), file.tell(), size)

    def make_room(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink()


@contextlib.contextmanager
def small_disk_at(folder: pathlib.Path, size: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of `size` bytes at `folder`; skip the test where that is not permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
