"""The notes of other groups, over a session whose znodes change between two reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from hastore.clock import SystemClock
from hastore.config.model import Config
from hastore.registry.cluster_notes import ClusterNotes
from hastore.registry.session import Session, Znode
from tests.server.kit import config_of

GROUP = "/hastore/test/g1"
NOTE = f"{GROUP}/routes-1"


class Znodes:
    """What ZooKeeper does: a watch of a znode, or of its children, fires once."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.watched: set[str] = set()
        self.fired: set[str] = set()
        self.before_get: Callable[[], None] = lambda: None

    def set(self, path: str, data: bytes | None) -> None:
        """Write a znode, or delete it."""
        parent = path.rpartition("/")[0]
        if (path in self.data) != (data is not None):
            self._fire(parent)
        self._fire(path)
        if data is None:
            self.data.pop(path, None)
        else:
            self.data[path] = data

    def _fire(self, path: str) -> None:
        if path in self.watched:
            self.watched.discard(path)
            self.fired.add(path)

    # What ClusterNotes calls.

    def take_fired(self) -> set[str]:
        fired, self.fired = self.fired, set()
        return fired

    def children(self, path: str) -> list[str]:
        self.watched.add(path)
        return sorted(
            {one[len(path) + 1 :].partition("/")[0] for one in self.data if f"{path}/" in one}
        )

    def get(self, path: str) -> Znode | None:
        before, self.before_get = self.before_get, lambda: None
        before()
        if path not in self.data:
            return None
        self.watched.add(path)
        return Znode(self.data[path], 0, 0, 0)

    def delete(self, path: str) -> None:
        self.set(path, None)


def test_a_note_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Any) -> None:
    znodes, seen = Znodes(), list[dict[tuple[str, int], bytes]]()
    config: Config = msgspec.structs.replace(config_of(tmp_path), registry="zk://h:1")
    notes = ClusterNotes(
        config, None, SystemClock(), tls=None, own=lambda: None,
        on_notes=lambda all_notes: seen.append(dict(all_notes)), on_failure=lambda _e: None,
    )  # fmt: skip
    session = cast(Session, znodes)
    znodes.set(NOTE, b"of the session before")
    # The master's new session deletes the note of the one before, and makes it anew: after the
    # list of notes was read, and on both sides of the read of the note.
    znodes.before_get = lambda: znodes.set(NOTE, None)
    notes.begin(session)
    notes.read(session)
    znodes.set(NOTE, b"new")
    notes.read(session)
    assert seen[-1] == {("g1", 1): b"new"}
    znodes.set(NOTE, b"newer")
    notes.read(session)
    assert seen[-1] == {("g1", 1): b"newer"}
