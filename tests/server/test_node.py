"""A node's start and stop: what happens in which order."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest

from hastore.config import Config, NodeAddress, Role, StoreConfig
from hastore.errors import StoreInUseError
from hastore.ha.node_state import NodeState
from hastore.server.node import Node
from hastore.store.filesystem import REAL


class Watched:
    """The machine's files; notes who holds the store's lock when node.json is used."""

    def __init__(self) -> None:
        self.locked = False
        self.seen: list[tuple[str, bool]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(REAL, name)
        if not callable(real):
            return real

        def call(*given: Any, **named: Any) -> Any:
            if any("node.json" in str(each) for each in given):
                self.seen.append((name, self.locked))
            return real(*given, **named)

        return call

    def lock(self, path: str) -> Any:
        file = REAL.lock(path)
        self.locked = True
        return _Unlocking(file, self)


class _Unlocking:
    def __init__(self, file: Any, watched: Watched) -> None:
        self._file = file
        self._watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self._watched.locked = False
        self._file.close()


def config_of(root: pathlib.Path) -> Config:
    return Config(
        cluster="test",
        group="g0",
        node=1,
        role=Role.ASYNC_MASTER,
        acks=0,
        nodes={1: NodeAddress(api="tcp://127.0.0.1:0", ha="127.0.0.1:0", http="127.0.0.1:0")},
        store=StoreConfig(root=str(root), commitlog_file_size=65536, index_slots=100,
                          index_entries=400, consume_queue_units=300),
    )  # fmt: skip


def test_node_json_is_read_and_written_under_the_stores_lock(tmp_path: pathlib.Path) -> None:
    watched = Watched()
    node = Node(config_of(tmp_path / "s"), lambda: None, fs=watched)  # type: ignore[arg-type]
    node.start()
    assert node.roles.settled.wait(20)
    node.stop()
    used = {name for name, _ in watched.seen}
    assert len(used) > 1, "node.json was not read and written"
    assert all(locked for _, locked in watched.seen), watched.seen
    assert not watched.locked


def test_a_second_start_beside_a_running_node_changes_nothing(tmp_path: pathlib.Path) -> None:
    node = Node(config_of(tmp_path / "s"), lambda: None)
    node.start()
    try:
        assert node.roles.settled.wait(20)
        node.state.promise(node.state.data.promised_epoch + (1 << 16))
        promised = node.state.data.promised_epoch
        with pytest.raises(StoreInUseError):
            Node(config_of(tmp_path / "s"), lambda: None).start()
    finally:
        node.stop()
    state = NodeState(REAL, str(tmp_path / "s"))
    state.load(1, "test", "g0")
    assert state.data.promised_epoch == promised
    assert state.data.clean_stop
    assert not [t for t in threading.enumerate() if "Service" in t.name]
