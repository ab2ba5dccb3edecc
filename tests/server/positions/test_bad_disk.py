"""An unreadable commit loses only itself: others are kept, fetched and rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hastore.clock import SystemClock
from hastore.config.model import ApiConfig
from hastore.fs.filesystem import REAL
from hastore.protocol import api
from hastore.server.api.commit_records import PATIENCE_MS
from hastore.server.api.server import ApiServer
from hastore.server.kept_positions import KeptPositions
from hastore.service import raise_failure
from hastore.store.log import commit_log
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client
from tests.server.retention.test_kept_positions import commit, found, go_on, kept_in
from tests.store.kit import log_file, message, put, scribble
from tests.store.test_cold_reads import Disk, open_store

Damage = Callable[[MessageStore, Disk, int, int], None]


def bad_sector(_store: MessageStore, disk: Disk, begin: int, end: int) -> None:
    disk.bad.append((f"{0:020d}", begin, end))


def bad_bytes(store: MessageStore, _disk: Disk, begin: int, end: int) -> None:
    scribble(log_file(store.config.root), (begin + end) // 2, b"\xff\xfe")


class Clock(SystemClock):
    """The real clock, plus what a test sets."""

    ahead_ms = 0.0

    def monotonic_ms(self) -> float:
        return super().monotonic_ms() + self.ahead_ms


damages = pytest.mark.parametrize("damage", [bad_sector, bad_bytes])


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    opened = open_store(tmp_path, disk)
    setattr(opened, "default_queues", 4)  # noqa: B010 (for the fake node)
    opened.set_limits(confirmed=0, readable=0)
    yield opened
    disk.bad.clear()
    opened.close()


def three(store: MessageStore) -> tuple[int, int]:
    """Commit for the groups g, bad and h; return where bad's commit begins and ends."""
    begin = commit(store, "g", {0: 1})
    end = commit(store, "bad", {0: 2})
    commit(store, "h", {0: 3})
    put(store, message(1))
    assert store.wait_dispatched(store.max_offset, 10)
    return begin, end


@damages
def test_groups_commit_and_fetch_despite_an_unreadable_commit(
    store: MessageStore, disk: Disk, damage: Damage
) -> None:
    damage(store, disk, *three(store))
    store.set_limits(readable=store.max_offset)
    backend = FakeBackend()
    backend.store = store
    clock = Clock()
    server = ApiServer(
        "tcp://127.0.0.1:0", backend, ApiConfig(), clock=clock, on_failure=raise_failure
    )
    server.start()
    client = Client(server.endpoint)
    try:
        assert isinstance(client.ask(api.Fetch(9, "g", "t")), api.Failed)  # the disk may recover
        clock.ahead_ms = PATIENCE_MS
        for rid, group, at in ((1, "g", 1), (2, "h", 3)):
            reply = client.ask(api.Fetch(rid, group, "t"))
            assert isinstance(reply, api.Positions), reply
            assert reply.positions[0].queue_offset == at
        reply = client.ask(api.Commit(3, "g", "t", {0: api.Position(4)}))
        assert isinstance(reply, api.PutDone), reply
        assert reply.status is api.Status.PUT_OK
    finally:
        client.close()
        assert server.stop()


@damages
def test_retention_skips_an_unreadable_commit(
    store: MessageStore, disk: Disk, damage: Damage
) -> None:
    damage(store, disk, *three(store))
    clock = Clock()
    kept = KeptPositions(REAL, store.config.root, lambda: 0, clock)
    if damage is bad_sector:
        with pytest.raises(OSError, match="Input/output"):
            kept.gather(store, store.max_offset, go_on)
    clock.ahead_ms = PATIENCE_MS
    assert kept.gather(store, store.max_offset, go_on)
    assert (found(kept, "g"), found(kept, "bad"), found(kept, "h")) == ({0: 1}, {}, {0: 3})


@damages
def test_positions_are_written_anew_despite_an_unreadable_commit(
    store: MessageStore, disk: Disk, damage: Damage
) -> None:
    first = commit(store, "g", {0: 1})
    commit(store, "h", {0: 3})
    kept = kept_in(store)
    assert kept.gather(store, store.max_offset, go_on)
    begin = store.max_offset
    end = commit(store, "g", {0: 2})
    put(store, message(1))
    assert store.wait_dispatched(store.max_offset, 10)
    damage(store, disk, begin, end)
    assert first < begin
    assert kept.rewrite(65537, store, begin, store.put_encoded, 1, go_on) == 2
