"""A store's folder that is moved, replaced or removed under a running node ends that node."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable

import pytest

from hastore.config.model import Role
from hastore.errors import StoreBrokenError
from hastore.server.node import Node
from hastore.store.log_store import _SMALL_FILES
from tests.ha.nodes import wait_for
from tests.server.kit import config_of

PATIENCE_S = 60
RESERVED_BY_RETENTION = 3  # files


def start(root: pathlib.Path) -> Node:
    """Start a node and wait until it has written its files; it then writes none by itself."""
    node = Node(config_of(root), lambda: None)
    node.start()
    audit, reserve = root / "hastore" / "audit.log", root / "hastore" / "reserve"
    wait_for(lambda: node.state.data.role_followed is Role.ASYNC_MASTER, "the role")
    wait_for(lambda: node.roles.reason is None, "the saved role")
    wait_for(lambda: audit.exists() and audit.read_text().count('"promote"') == 2, "its lines")
    whole = RESERVED_BY_RETENTION + len(_SMALL_FILES)
    wait_for(lambda: reserve.exists() and len(list(reserve.iterdir())) == whole, "the reserve")
    return node


def moved(root: pathlib.Path) -> None:
    root.rename(root.with_name("elsewhere"))


def removed(root: pathlib.Path) -> None:
    shutil.rmtree(root)


def replaced(root: pathlib.Path) -> None:
    root.rename(root.with_name("elsewhere"))
    root.mkdir()
    (root / "lock").touch()


def without_its_lock(root: pathlib.Path) -> None:
    (root / "lock").unlink()


@pytest.mark.parametrize("happens", [moved, removed, replaced, without_its_lock])
def test_a_node_without_its_folder_ends_and_says_why(
    tmp_path: pathlib.Path, happens: Callable[[pathlib.Path], None]
) -> None:
    root = tmp_path / "s"
    node = start(root)
    try:
        happens(root)
        before = sorted(root.rglob("*"))
        assert node.failed.wait(PATIENCE_S), "nobody noticed"
        reason = node.backend.writable_reason()
        assert reason is not None and f"{root}/lock" in reason and "moved" in reason
        assert any("moved" in problem for problem in node.backend.status()["problems"])
    finally:
        with pytest.raises(StoreBrokenError, match="start the node again"):
            node.stop()
    assert sorted(root.rglob("*")) == before, "the node wrote by the old path"
    assert root.exists() == bool(before), "the folder was made anew"


@pytest.mark.parametrize("happens", [moved, removed, replaced])
def test_the_audit_log_does_not_make_the_folder_anew(
    tmp_path: pathlib.Path, happens: Callable[[pathlib.Path], None]
) -> None:
    """Whatever is noted between the loss of the folder and the moment in which it is noticed."""
    root = tmp_path / "s"
    node = start(root)
    try:
        happens(root)
        before = sorted(root.rglob("*"))
        node.audit.note("authenticate", outcome="refused", address="10.0.0.7:1")
        wait_for(lambda: node.audit.problem or sorted(root.rglob("*")) != before)
        assert sorted(root.rglob("*")) == before, "the audit log was written at the old path"
        assert root.exists() == bool(before), "the folder was made anew"
    finally:
        with pytest.raises(StoreBrokenError, match="start the node again"):
            node.stop()


def test_no_room_is_reserved_in_a_folder_that_took_the_place(tmp_path: pathlib.Path) -> None:
    """Another node may run there: its reserve is not this node's."""
    root = tmp_path / "s"
    node = start(root)
    try:
        moved(root)
        shutil.copytree(root.with_name("elsewhere"), root)
        shutil.rmtree(root / "hastore" / "reserve")
        node.retention.look()
        assert not (root / "hastore" / "reserve").exists()
    finally:
        with pytest.raises(StoreBrokenError, match="start the node again"):
            node.stop()


def test_a_folder_removed_just_before_the_stop_is_not_created_again(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "s"
    node = start(root)
    removed(root)
    with pytest.raises(StoreBrokenError, match="moved, replaced or removed"):
        node.stop()
    assert not root.exists()


def test_a_node_whose_folder_stays_goes_on(tmp_path: pathlib.Path) -> None:
    node = start(tmp_path / "s")
    try:
        node.store.check_place()
        assert node.store.broken_reason is None
    finally:
        node.stop()
    assert not node.failed.is_set()
