"""What a client sees of a cluster's groups, as they come and go; without ZooKeeper."""

from __future__ import annotations

from typing import Any

from hastore.addresses import parse_cluster_address
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Role
from hastore.registry.cluster_watch import ClusterWatch
from hastore.registry.entry import NodeEntry
from hastore.registry.session import Znode

PATH = "/hastore/shop"


class Tree:
    """Stands for a session: what has been read is watched once, as by ZooKeeper."""

    def __init__(self) -> None:
        self.znodes: dict[str, bytes] = {}
        self._watched: set[str] = set()
        self._fired: set[str] = set()

    def put(self, path: str, data: bytes = b"") -> None:
        self.znodes[path] = data
        self._fire(path)

    def delete(self, path: str) -> None:
        del self.znodes[path]
        self._fire(path)

    def _fire(self, path: str) -> None:
        changed = {path, path.rpartition("/")[0]} & self._watched
        self._watched -= changed
        self._fired |= changed

    def take_fired(self) -> set[str]:
        fired, self._fired = self._fired, set()
        return fired

    def children(self, path: str) -> list[str]:
        self._watched.add(path)
        return [one.rpartition("/")[2] for one in self.znodes if one.rpartition("/")[0] == path]

    def get(self, path: str) -> Znode | None:
        self._watched.add(path)
        data = self.znodes.get(path)
        return None if data is None else Znode(data, 1, 1, 1)


def entry(port: int) -> bytes:
    return NodeEntry(
        role=Role.ASYNC_MASTER, api=f"tcp://127.0.0.1:{port}", ha="127.0.0.1:2",
        http="127.0.0.1:3", cluster="shop",
    ).encode()  # fmt: skip


def test_a_group_is_seen_whose_first_node_comes_after_it() -> None:
    tree: Any = Tree()
    tree.put(f"{PATH}/g0")
    tree.put(f"{PATH}/g0/1", entry(1))
    watch = ClusterWatch(parse_cluster_address("zk://127.0.0.1:1/shop"), None, SYSTEM_CLOCK)
    watch.read(tree)
    assert list(watch.groups) == ["g0"]
    tree.put(f"{PATH}/g1")
    watch.read(tree)
    assert list(watch.groups) == ["g0"], "no node of it is there"
    tree.put(f"{PATH}/g1/1", entry(2))
    watch.read(tree)
    assert watch.groups["g1"].addresses == ("tcp://127.0.0.1:2",)
    tree.delete(f"{PATH}/g1/1")
    watch.read(tree)
    assert list(watch.groups) == ["g0", "g1"], "an outage: its addresses are kept"
    tree.delete(f"{PATH}/g1")
    watch.read(tree)
    assert list(watch.groups) == ["g0"]
