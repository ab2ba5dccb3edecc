"""Nodes to back up, and backups to look into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hastore.backup.backups import find_backup, verify_backup
from hastore.backup.manifest import Manifest
from hastore.backup.restore import restore_store
from hastore.backup.source import Source
from hastore.backup.take import Taken, take_backup
from hastore.backup.target import Target, open_target
from hastore.config.model import Config, Role
from hastore.ha.node.node_state import NodeState
from tests.ha.nodes import FILE_SIZE, Group, HaNode, wait_for
from tests.store.logs import GOLDEN

__all__ = ["FILE_SIZE", "GOLDEN", "Group", "HaNode", "wait_for"]
BODY = b"x" * 900


def fill(node: HaNode, end: int, body: bytes = BODY) -> None:
    """Put until the log ends at or beyond `end`."""
    while node.store.max_offset < end:
        node.put(*[body] * 5)


@contextlib.contextmanager
def running(root: Path, count: int = 1, **settings: Any) -> Iterator[Group]:
    """A group whose node 1 is the master, and its other nodes are in step with it."""
    group = Group(root, count, **settings)
    try:
        nodes = [group.start(number) for number in range(1, count + 1)]
        nodes[0].promote()
        for slave in nodes[1:]:
            slave.follow()
        wait_for(lambda: all(slave.linked for slave in nodes[1:]))
        yield group
    finally:
        group.stop()


def in_step(master: HaNode, *slaves: HaNode) -> None:
    """Wait until all have the same log, and know that it is confirmed."""

    def same() -> bool:
        end = master.store.max_offset
        return all(
            (one.store.max_offset, one.store.confirmed_offset, one.store.readable_offset)
            == (end, end, end)
            for one in (master, *slaves)
        )

    wait_for(same, "being in step")


def take(config: Config, place: object, **more: Any) -> Taken:
    """Take a backup into a folder, a URL or a target."""
    target = open_target(str(place)) if isinstance(place, str | Path) else place
    with Source(config) as source:
        return take_backup(config, target, source, **more)


def content(target: Target, manifest: Manifest) -> bytes:
    """Return the bytes of a backup's log."""
    return b"".join(target.read(one.name, one.end - one.start) for one in manifest.log)


def check(place: object) -> Manifest:
    """Check the newest backup in a folder; return its manifest."""
    found = verify_backup(open_target(str(place)))
    assert found.problems == []
    return found.manifest


def restore(config: Config, place: object, **more: Any) -> Config:
    """Restore the newest backup in a folder or URL; return the node's configuration."""
    target = open_target(str(place))
    restore_store(config, target, find_backup(target), **more)
    return config


def as_slave(config: Config) -> Config:
    """Return the configuration with the role of a slave."""
    return msgspec.structs.replace(config, role=Role.SLAVE)


def state_of(config: Config, fs: Any) -> NodeState:
    """Return a stopped node's durable state."""
    state = NodeState(fs, config.store.root)
    state.load(config.node, config.cluster, config.group)
    return state
