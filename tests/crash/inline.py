"""Stores without threads: what their services would do is done when a workload says so.

So a seed repeats a run, effect by effect, and a start of a store takes milliseconds.
"""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from hastore.service import Service
from hastore.store.log.allocate import AllocateService
from hastore.store.replay import IndexBuildService


def _start(self: Service) -> None:
    del self


def _wait_ready(self: AllocateService) -> None:
    if not self._ready:
        self._wanted = True
        provide(self)
    if not self._ready:
        raise self._failure(self.failure_reason or "there is no spare")


def provide(allocator: AllocateService) -> None:
    """Make the next log file, if it is wanted, as the allocating thread does."""
    if allocator._lacking:
        failure = allocator._make()
        allocator._ready = failure is None
        allocator._note(None if failure is None else str(failure), failure)


def _wait_dispatched(self: IndexBuildService, offset: int, timeout_s: float) -> bool:
    del timeout_s
    while self._dispatched < offset and step(self):
        continue
    return self._dispatched >= offset


def step(replay: IndexBuildService) -> bool:
    """Replay one batch, as replay's thread does; False if none was left."""
    moved = replay._step_or_reason()
    if moved:
        replay._on_dispatched(replay._dispatched)
    return moved


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """Let no service start its thread."""
    with (
        patch.object(Service, "start", _start),
        patch.object(AllocateService, "wait_ready", _wait_ready),
        patch.object(IndexBuildService, "wait_dispatched", _wait_dispatched),
    ):
        yield
