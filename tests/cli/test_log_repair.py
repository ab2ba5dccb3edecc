"""`hastore log repair`: a stopped node's log is repaired from a node that runs."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from hastore.config.model import ApiConfig
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.cli.kit import hastore
from tests.dledger.store import kit as entry_kit
from tests.repair.test_stopped import fill
from tests.store import kit

MODES = ["classic", "dledger"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_file(folder: pathlib.Path, mode: str, root: pathlib.Path, other: str) -> pathlib.Path:
    """The file of node 1; node 2 is `other`."""
    port = free_port()
    role = "role: SLAVE\n" if mode == "classic" else ""
    path = folder / "node1.yaml"
    path.write_text(
        f"cluster: c\ngroup: g\nnode: 1\nmode: {mode}\n{role}nodes:\n"
        f'  1: {{api: "tcp://127.0.0.1:{port}", ha: "127.0.0.1:{port + 1}",'
        f' http: "127.0.0.1:{port + 2}"}}\n'
        f'  2: {{api: "{other}", ha: "127.0.0.1:{port + 3}", http: "127.0.0.1:{port + 4}"}}\n'
        f"store: {{root: {root}, commitlog_file_size: 64KiB}}\n"
    )
    return path


@contextlib.contextmanager
def serving(root: pathlib.Path, kind: str, **changes: Any) -> Iterator[ApiServer]:
    """The client API of a node over a store that is there."""
    backend = FakeBackend()
    with contextlib.ExitStack() as stack:
        if kind == "classic":
            store = stack.enter_context(kit.opened(root))
            backend.entries = [(0, 0)]
        else:
            entries = entry_kit.make(root)
            entries.open()
            stack.callback(entries.close)
            store = entries.messages
            backend.entries = list(entries.epochs())
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        backend.store = store
        status = {
            "node": 2, "cluster": "c", "group": "g", "mode": kind, "min_offset": 0,
            "readable_offset": store.readable_offset, **changes,
        }  # fmt: skip
        backend.status = lambda: status  # type: ignore[method-assign]
        server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
        server.start()
        stack.callback(server.stop, 60)
        yield server


def make_pair(tmp_path: pathlib.Path, mode: str) -> tuple[Any, pathlib.Path, bytes]:
    """Two stores with the same log; return where its items are, its first file, and its bytes."""
    log = fill(entry_kit.REAL, str(tmp_path / "node1"), mode)
    shutil.copytree(tmp_path / "node1", tmp_path / "node2")
    folder = "commitlog" if mode == "classic" else "dledger-n1/data"
    file = tmp_path / "node1" / folder / f"{0:020}"
    return log, file, file.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_stopped_node_is_repaired_from_the_other_node_of_its_file(
    tmp_path: pathlib.Path, mode: str
) -> None:
    log, file, whole = make_pair(tmp_path, mode)
    start, end = log.items[42]
    kit.scribble(str(file), start + 4, b"\x55\x55")
    with serving(tmp_path / "node2", mode) as server:
        path = str(config_file(tmp_path, mode, tmp_path / "node1", server.endpoint))
        dry = hastore("log", "repair", "-c", path, "--dry-run")
        assert dry.returncode == 3 and f"would be repaired from {server.endpoint}" in dry.stdout
        assert file.read_bytes() != whole
        done = hastore("log", "repair", "-c", path, "--from", "2", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        found = json.loads(done.stdout)
        assert found["ok"] and found["end_offset"] == log.end and found["left_bytes"] == 0
        (one,) = found["ranges"]
        assert (one["offset"], one["end_offset"]) == (start, end)
        assert one["repaired"] and one["from"] == server.endpoint
        assert file.read_bytes() == whole
        again = hastore("log", "repair", "-c", path)
        assert again.returncode == 0 and again.stdout.endswith("sound\n")
    checked = hastore("log", "verify", "--store", str(tmp_path / "node1"))
    assert checked.returncode == 0, checked.stderr


def test_a_node_of_another_group_or_itself_is_not_asked(tmp_path: pathlib.Path) -> None:
    log, file, _ = make_pair(tmp_path, "classic")
    kit.scribble(str(file), log.items[42][0], b"\x55")
    for changes, text in (
        ({"group": "other"}, "it is of group c/other, mode classic, and the log of c/g"),
        ({"mode": "dledger"}, "it is of group c/g, mode dledger"),
        ({"node": 1}, "it is node 1 itself"),
    ):
        with serving(tmp_path / "node2", "classic", **changes) as server:
            path = str(config_file(tmp_path, "classic", tmp_path / "node1", server.endpoint))
            done = hastore("log", "repair", "-c", path)
        assert done.returncode == 3 and text in done.stderr, done.stderr
        assert "no other node could be asked" in done.stderr


def test_a_node_that_runs_and_wrong_addresses_are_refused(tmp_path: pathlib.Path) -> None:
    make_pair(tmp_path, "classic")
    path = str(config_file(tmp_path, "classic", tmp_path / "node1", "tcp://127.0.0.1:1"))
    for given, text in (
        ("7", "the file has no node 7"),
        ("1", "that is the damaged node itself"),
        ("a:b:c", "write a node's number, or HOST:PORT"),
        ("²", "write a node's number, or HOST:PORT"),
    ):
        done = hastore("log", "repair", "-c", path, "--from", given)
        assert done.returncode == 2 and text in done.stderr
    with kit.opened(tmp_path / "node1"):
        done = hastore("log", "repair", "-c", path)
        assert done.returncode == 3 and "has the store open" in done.stderr
