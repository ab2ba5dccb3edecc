"""What a node has read of the positions outlives a restart, if the log is the same up to there."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig, Config
from hastore.errors import CorruptRecordError
from hastore.fs.memory import MemoryFileSystem
from hastore.protocol import api
from hastore.protocol.committed_positions import CommitBody
from hastore.server.api import position_reader
from hastore.server.api.commit_records import CommitReader, commit_record
from hastore.server.api.commits import PositionTable
from hastore.server.api.server import ApiServer
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.server.position_file import PositionFile, parse
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.server.api.kit import until
from tests.server.kit import config_of, group_of_one, running

PATH = "store/hastore/positions-read"


@pytest.fixture
def begins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the queue offsets at which commits are read; few are enough for the file."""
    found: list[int] = []
    real = CommitReader.next

    def note(self: CommitReader, source: Any, at: int, **more: Any) -> Any:
        found.append(at)
        return real(self, source, at, **more)

    monkeypatch.setattr(CommitReader, "next", note)
    monkeypatch.setattr(position_reader, "SAVE_AT_END", 1)
    return found


@pytest.fixture
def fs() -> MemoryFileSystem:
    found = MemoryFileSystem()
    found.make_dirs("store/hastore")
    return found


def commits(*offsets: int, group: str = "g", **more: Any) -> bytes:
    bodies = (CommitBody(group, "t", {0: (at, None, None)}, **more) for at in offsets)
    return b"".join(commit_record(body, SYSTEM_CLOCK.wall_ms()) for body in bodies)


def make_server(backend: FakeBackend, fs: MemoryFileSystem) -> ApiServer:
    return ApiServer(
        "tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure,
        position_file=PositionFile(fs, "store"),
    )  # fmt: skip


def read_all(backend: FakeBackend, fs: MemoryFileSystem) -> PositionTable:
    """Let a node read its positions and end."""
    server = make_server(backend, fs)
    server.start()
    try:
        until(lambda: server._positions.warm)
    finally:
        assert server.stop(60)
    return server._positions


def test_after_a_restart_only_the_commits_since_are_read(
    fs: MemoryFileSystem, begins: list[int]
) -> None:
    backend = FakeBackend()
    backend.store.put_encoded([commits(1, 2, 3), commits(7, group="h", locks={0: "a client"})])
    before = read_all(backend, fs)
    backend.store.put_encoded([commits(9)])
    begins.clear()
    after = read_all(backend, fs)
    assert min(begins) == 4
    assert after.find("g", "t") == {0: api.Position(9)}
    assert after.find("h", "t") == {0: api.Position(7)}
    assert dict(after.locks.items()) == dict(before.locks.items())
    assert len(after.locks) == 1 and not after.locks.lacks_within(1e9)
    assert after._latest.memory_bytes == before._latest.memory_bytes


def shorter(backend: FakeBackend) -> None:
    """Cut the last commit, as a power loss may."""
    del backend.store.log[backend.store.units[api.POSITIONS_TOPIC, 0].pop()[0] :]


def written_again(backend: FakeBackend) -> None:
    """Have another commit of the same size at the place of the last one, in the same epoch."""
    shorter(backend)
    backend.store.put_encoded([commits(4)])


def of_another_epoch(backend: FakeBackend) -> None:
    """Have the same bytes by another master, as after a rejoin."""
    at = backend.store.units[api.POSITIONS_TOPIC, 0][-1][0]
    backend.entries = [(65537, 0), (131074, at)]


def retained(backend: FakeBackend) -> None:
    """Let retention remove the last commit."""
    backend.store.min_offset = len(backend.store.log)


@pytest.mark.parametrize("change", [shorter, written_again, of_another_epoch, retained])
def test_a_log_that_has_changed_is_read_from_its_first_commit(
    fs: MemoryFileSystem, begins: list[int], change: Callable[[FakeBackend], None]
) -> None:
    backend = FakeBackend()
    backend.store.put_encoded([commits(1, 2, 3)])
    read_all(backend, fs)
    change(backend)
    begins.clear()
    after = read_all(backend, fs)
    assert min(begins) == 0
    told = {shorter: 2, written_again: 4}.get(change, 3)
    assert after.find("g", "t") == {0: api.Position(told)}


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-3],
        lambda raw: raw.replace(b'"g"', b'"h"'),
        lambda raw: raw.replace(b'"version":1', b'"version":2'),
        lambda raw: b"",
        lambda raw: b"\xff" + raw,
    ],
    ids=["torn", "changed", "of a later version", "empty", "no JSON"],
)
def test_a_damaged_file_is_not_used(
    fs: MemoryFileSystem, begins: list[int], damage: Callable[[bytes], bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    backend = FakeBackend()
    backend.store.put_encoded([commits(1, 2, 3)])
    read_all(backend, fs)
    raw = damage(fs.read_bytes(PATH))
    with pytest.raises(CorruptRecordError):
        parse(raw)
    fs.replace_bytes(PATH, raw)
    with caplog.at_level(logging.WARNING):
        assert read_all(backend, fs).find("g", "t") == {0: api.Position(3)}
    assert "hastore/positions-read is not used" in caplog.text


def test_a_line_that_is_no_line_makes_the_file_unreadable(fs: MemoryFileSystem) -> None:
    body = b'{"group":1}\n'
    head = {
        "version": 1, "lines": 1, "crc32": zlib.crc32(body), "next": 1, "last": [1, 0, 0, 0, 0],
        "now_ms": 0.0, "stored_ms": None, "since_ms": None,
    }  # fmt: skip
    with pytest.raises(CorruptRecordError, match="unreadable"):
        parse(msgspec.json.encode(head) + b"\n" + body)


def test_the_file_is_written_while_the_node_runs_once_the_log_is_on_the_disk(
    fs: MemoryFileSystem, begins: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill must not cost all that was read; a file ahead of the log would be of no use."""
    monkeypatch.setattr(position_reader, "SAVE_EACH", 2)
    backend = FakeBackend()
    backend.store.put_encoded([commits(1, 2, 3)])
    flushed = [0]
    monkeypatch.setattr(type(backend.store), "flushed_offset", property(lambda _: flushed[0]))
    server = make_server(backend, fs)
    server.start()
    try:
        until(lambda: server._reader._to_save is not None)
        assert not fs.exists(PATH)
        flushed[0] = len(backend.store.log)
        server._reader.wake()
        until(lambda: fs.exists(PATH))
        assert parse(fs.read_bytes(PATH)).next == 3
    finally:
        assert server.stop(60)


def test_a_file_that_cannot_be_written_is_only_a_warning(
    fs: MemoryFileSystem, begins: list[int], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fs, "replace_bytes", full)
    backend = FakeBackend()
    backend.store.put_encoded([commits(1)])
    with caplog.at_level(logging.WARNING):
        read_all(backend, fs)
    assert "hastore/positions-read could not be written" in caplog.text


@pytest.mark.parametrize(
    ("kind", "config"), [(Node, config_of), (DLedgerNode, group_of_one)], ids=["classic", "dledger"]
)
def test_a_node_of_either_mode_goes_on_where_it_was(
    kind: Any, config: Callable[[Path], Config], tmp_path: Path, begins: list[int]
) -> None:
    with running(kind(config(tmp_path / "s"), lambda: None)) as node:
        until(lambda: node.backend.writable_reason() is None)
        node.backend.put_encoded([commits(1, 2, 3)])
        until(lambda: node.api._positions.find("g", "t") == {0: api.Position(3)})
    begins.clear()
    with running(kind(config(tmp_path / "s"), lambda: None)) as node:
        until(lambda: node.api._positions.warm)
        assert node.api._positions.find("g", "t") == {0: api.Position(3)}
    assert min(begins) == 3
