"""What a client and a node see of a cluster's groups, as they come and go; without ZooKeeper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

import pytest

from hastore.addresses import parse_cluster_address
from hastore.client.connections.cluster_groups import ClusterGroups
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, Role, StoreConfig
from hastore.errors import RegistryError
from hastore.protocol.group_note import GroupRoutes, OtherTopic, encode_note
from hastore.registry.cluster_notes import MAX_NOTE_BYTES, ClusterNotes
from hastore.registry.cluster_watch import ClusterWatch
from hastore.registry.entry import NodeEntry
from hastore.registry.session import Stopped, Znode
from hastore.service import raise_failure

PATH = "/hastore/shop"


class Tree:
    """Stands for a session: what has been read is watched once, as by ZooKeeper."""

    def __init__(self) -> None:
        self.znodes: dict[str, bytes] = {}
        self._watched: set[str] = set()
        self._fired: set[str] = set()
        self.refused: set[str] = set()  # the paths that ZooKeeper lets nobody read
        self.asked: list[str] = []  # each path that was read or deleted

    def put(self, path: str, data: bytes = b"") -> None:
        is_new = path not in self.znodes
        self.znodes[path] = data
        self._fire(path, children=is_new)

    def delete(self, path: str) -> None:
        del self.znodes[path]
        self._fire(path, children=True)

    def _fire(self, path: str, *, children: bool) -> None:
        changed = {path, path.rpartition("/")[0] if children else path} & self._watched
        self._watched -= changed
        self._fired |= changed

    def take_fired(self) -> set[str]:
        fired, self._fired = self._fired, set()
        return fired

    def _read(self, path: str) -> None:
        self.asked.append(path)
        if path in self.refused:
            raise RegistryError(f"ZooKeeper refuses access to {path}")
        self._watched.add(path)

    def children(self, path: str) -> list[str]:
        self._read(path)
        return [one.rpartition("/")[2] for one in self.znodes if one.rpartition("/")[0] == path]

    def get(self, path: str) -> Znode | None:
        self._read(path)
        data = self.znodes.get(path)
        return None if data is None else Znode(data, 1, 1, 1)

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> None:
        self.put(path, data)

    def remove(self, path: str) -> None:
        self.asked.append(path)
        self.znodes.pop(path, None)


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
    watch.note_lost("out of reach")
    assert watch.heard.is_set() and not watch.was_read.is_set()
    watch.read(tree)
    assert watch.was_read.is_set()
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


def test_a_group_that_may_not_be_read_hides_no_other() -> None:
    tree: Any = Tree()
    for n in range(3):
        tree.put(f"{PATH}/g{n}")
        tree.put(f"{PATH}/g{n}/1", entry(n + 1))
    tree.refused.add(f"{PATH}/g1")
    watch = ClusterWatch(parse_cluster_address("zk://127.0.0.1:1/shop"), None, SYSTEM_CLOCK)
    watch.read(tree)
    assert list(watch.groups) == ["g0", "g2"]
    assert watch.problem == f"ZooKeeper refuses access to {PATH}/g1"
    assert watch.unread == {"g1": watch.problem}
    tree.refused.clear()
    watch.read(tree)
    assert list(watch.groups) == ["g0", "g1", "g2"] and watch.problem is None
    assert watch.unread == {}
    tree.refused.add(f"{PATH}/g1")
    tree.put(f"{PATH}/g1/2", entry(9))
    watch.read(tree)
    assert watch.problem is not None and watch.unread == {}, "what was known of it stays"


def test_a_group_of_which_no_node_can_be_read_is_not_taken_for_one_without_nodes() -> None:
    tree: Any = Tree()
    tree.put(f"{PATH}/g0")
    tree.put(f"{PATH}/g0/1", entry(1))
    tree.put(f"{PATH}/g1")
    watch = ClusterWatch(parse_cluster_address("zk://127.0.0.1:1/shop"), None, SYSTEM_CLOCK)
    watch.read(tree)
    assert list(watch.groups) == ["g0"] and watch.problem is None, "its first node comes later"
    assert list(watch.unread) == ["g1"], "or somebody has deleted the objects of its nodes"
    assert watch.unread["g1"].startswith(f"{PATH}/g1 has no objects of nodes: ")
    tree.put(f"{PATH}/g1/1", entry(2))
    tree.refused.add(f"{PATH}/g1/1")
    watch.read(tree)
    assert list(watch.unread) == ["g1"] and "refuses access" in watch.unread["g1"]
    tree.refused.clear()
    tree.put(f"{PATH}/g1/1", b"damaged")
    watch.read(tree)
    assert list(watch.unread) == ["g1"] and watch.problem == watch.unread["g1"]
    tree.put(f"{PATH}/g1/1", entry(2))
    watch.read(tree)
    assert list(watch.groups) == ["g0", "g1"] and watch.unread == {} and watch.problem is None


def note(group: str, *topics: str) -> bytes:
    return encode_note(GroupRoutes(group, 1, [], [OtherTopic(name, 4, 4) for name in topics]))


def test_a_group_keeps_its_topics_while_it_changes_its_master() -> None:
    """The old master's note goes before that of the new one comes; after a restart even later."""
    tree: Any = Tree()
    for n, topic in enumerate(("Other", "Orders")):
        tree.put(f"{PATH}/g{n}")
        tree.put(f"{PATH}/g{n}/1", entry(n + 1))
        tree.put(f"{PATH}/g{n}/routes-1", note(f"g{n}", topic))
    groups = ClusterGroups(parse_cluster_address("zk://127.0.0.1:1/shop"), None, SYSTEM_CLOCK)
    groups._watch.read(tree)
    assert groups.with_topic("Orders") == groups.holding("Orders") == ["g1"]
    tree.delete(f"{PATH}/g1/routes-1")
    groups._watch.read(tree)
    assert groups.with_topic("Orders") == ["g1"], "another group would get its messages"
    assert groups.with_topic("New") == ["g0", "g1"]
    assert groups.holding("Orders") == ["g0", "g1"], "more than needed is read, and not less"
    tree.put(f"{PATH}/g0/routes-1", note("g0", "Other", "More"))
    groups._watch.read(tree)
    assert groups.with_topic("Orders") == ["g1"] and groups.with_topic("More") == ["g0"]
    assert groups.holding("More") == ["g0", "g1"], "g1 states nothing now"
    tree.put(f"{PATH}/g1/routes-2", note("g1", "Later"))
    groups._watch.read(tree)
    assert groups.with_topic("Later") == ["g1"], "what the new master states counts"
    assert groups.with_topic("Orders") == ["g0", "g1"], "it was deleted"
    for znode in ("1", "routes-2"):
        tree.delete(f"{PATH}/g1/{znode}")
    tree.delete(f"{PATH}/g1")
    groups._watch.read(tree)
    assert groups.with_topic("Later") == ["g0"], "the group is gone"


class Notes:
    """The notes of a node of g0, which writes `own`, and what it was told of those of others."""

    def __init__(self, tree: Any) -> None:
        self.own: bytes | None = None
        self.told: list[Mapping[tuple[str, int], bytes]] = []
        self._tree = tree
        config = Config(
            node=1, nodes={}, cluster="shop", group="g0", registry="zk://127.0.0.1:1",
            role=Role.ASYNC_MASTER, store=StoreConfig(root="/none"),
        )  # fmt: skip
        self.notes = ClusterNotes(
            config, None, SYSTEM_CLOCK, tls=None, own=lambda: self.own,
            on_notes=self.told.append, on_failure=raise_failure,
        )  # fmt: skip

    def read(self) -> str | None:
        self._tree.asked.clear()
        self.notes.read(self._tree)
        return self.notes.problem


def test_a_note_that_may_not_be_read_hides_no_other_and_is_read_as_soon_as_it_may() -> None:
    tree: Any = Tree()
    for n in range(1, 4):
        tree.put(f"{PATH}/g{n}")
        tree.put(f"{PATH}/g{n}/routes-1", b"%d" % n)
    tree.refused |= {f"{PATH}/g1", f"{PATH}/g2/routes-1"}
    of_node = Notes(tree)
    assert of_node.read() == f"ZooKeeper refuses access to {PATH}/g1"
    assert of_node.told == [{("g3", 1): b"3"}]
    tree.refused.clear()
    assert of_node.read() is None, "the problem is over"
    assert of_node.told[1:] == [{("g1", 1): b"1", ("g2", 1): b"2", ("g3", 1): b"3"}]
    of_node.read()
    assert not tree.asked and not of_node.told[2:], "nothing has changed"
    tree.put(f"{PATH}/g2/routes-1", b"new")
    of_node.read()
    assert tree.asked == [f"{PATH}/g2/routes-1"] and of_node.told[-1]["g2", 1] == b"new"


def test_a_note_that_is_too_large_is_deleted_once() -> None:
    tree: Any = Tree()
    tree.delete = tree.remove
    of_node = Notes(tree)
    of_node.own = b"x"
    assert of_node.read() is None
    assert tree.znodes[f"{PATH}/g0/routes-1"] == b"x"
    of_node.own = b"x" * (MAX_NOTE_BYTES + 1)
    for asked in ([f"{PATH}/g0/routes-1"], []):
        assert "1,000,001 bytes, more than 1,000,000" in (of_node.read() or "")
        assert tree.asked == asked
    assert f"{PATH}/g0/routes-1" not in tree.znodes
    of_node.own = b"y"
    assert of_node.read() is None
    assert tree.znodes[f"{PATH}/g0/routes-1"] == b"y"


def test_the_end_of_a_node_is_no_problem() -> None:
    tree: Any = Tree()
    tree.children = MagicMock(side_effect=Stopped("the caller stops"))
    of_node = Notes(tree)
    with pytest.raises(Stopped):
        of_node.read()
    assert of_node.notes.problem is None


def test_a_note_that_somebody_deletes_is_written_again() -> None:
    """As by `deleteall` of a group: its nodes write their objects again, and so its note."""
    tree: Any = Tree()
    of_node, path = Notes(tree), f"{PATH}/g0/routes-1"
    tree.delete = lambda gone: Tree.delete(tree, gone) if gone in tree.znodes else None
    tree.replace = lambda found, data: tree.put(found, data) if found in tree.znodes else None
    of_node.own = b"x"
    of_node.read()
    of_node.read()
    assert tree.znodes == {path: b"x"}
    tree.delete(path)
    for _ in range(2):
        of_node.read()
    assert tree.znodes == {path: b"x"}
    # Also at the moment in which it is replaced.
    replace = tree.replace

    def too_late(found: str, data: bytes) -> None:
        tree.replace = replace
        tree.delete(found)
        replace(found, data)

    tree.replace, of_node.own = too_late, b"y"
    for _ in range(2):
        of_node.read()
    assert tree.znodes == {path: b"y"}
    of_node.own = None
    of_node.read()
    assert not tree.znodes, "it is no master any more"
    of_node.read()
    assert not tree.znodes and not tree.asked
