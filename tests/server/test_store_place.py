"""A store's folder that is moved, replaced or removed under a running node ends that node."""

from __future__ import annotations

import pathlib
import shutil
import time
from collections.abc import Callable

import pytest

from hastore.config.model import Role
from hastore.errors import StoreBrokenError
from hastore.server.node import Node
from tests.server.kit import config_of

PATIENCE_S = 60


def start(root: pathlib.Path) -> Node:
    """Start a node and wait until it has saved its role; it then writes no file by itself."""
    node = Node(config_of(root), lambda: None)
    node.start()
    deadline = time.monotonic() + PATIENCE_S
    while node.state.data.role_followed is not Role.ASYNC_MASTER or node.roles.reason is not None:
        assert time.monotonic() < deadline, node.roles.reason
        time.sleep(0.01)
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
