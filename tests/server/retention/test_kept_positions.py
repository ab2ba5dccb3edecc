"""KeptPositions: which positions are kept, for how long they are valid, and failures."""

from __future__ import annotations

import errno
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest

from hastore.errors import NotStoredError, Status, StoreError
from hastore.fs.filesystem import REAL
from hastore.protocol import committed_positions
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import CommitBody, PositionMap
from hastore.server.api.commit_records import QUEUE, commit_record, read_commits
from hastore.server.kept_positions import KeptPositions
from hastore.store.message_store import MessageStore, PullStatus, PutResult
from tests.store.kit import opened, put


class Files:
    """The real file system; `full`: no file can be replaced."""

    def __init__(self) -> None:
        self.full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def replace_bytes(self, path: str, data: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        REAL.replace_bytes(path, data)


class Part:
    """How often the store was set aside."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        return self.number


def commit(store: MessageStore, group: str, positions: dict[int, int]) -> int:
    """Commit positions; returns the record's end."""
    body = CommitBody(group, "t", {q: (at, None, None) for q, at in positions.items()})
    end = put(store, commit_record(body, 1))[0].end_offset
    assert end is not None and store.wait_dispatched(end, 60)
    return end


def kept_in(store: MessageStore, part: Part | None = None, fs: Any = REAL) -> KeptPositions:
    kept = KeptPositions(fs, store.config.root, part or Part())
    kept.load()
    return kept


def found(kept: KeptPositions, group: str) -> dict[int, int]:
    return {queue: place.queue_offset for queue, place in kept.find(group, "t").items()}


def go_on() -> bool:
    return False


def written(
    kept: KeptPositions, store: MessageStore, epoch: int = 65537, *, put_: Any = None,
    pause: Any = go_on,
) -> int:  # fmt: skip
    """Return how many records are rewritten if the whole log is about to be removed."""
    assert store.wait_dispatched(store.max_offset, 60)
    return kept.rewrite(
        epoch, store, store.max_offset, put_ or store.put_encoded, 1, pause
    )  # fmt: skip


def in_log(store: MessageStore) -> PositionMap:
    """Return the positions that a node with only this log knows."""
    said = PositionMap()
    assert store.wait_dispatched(store.max_offset, 60)
    at = (store.queues.queue_range(POSITIONS_TOPIC, QUEUE) or (0, 0))[0]
    while True:
        pulled = store.reader.pull(
            POSITIONS_TOPIC, QUEUE, at,
            max_messages=100, max_bytes=1 << 20, limit_offset=store.max_offset,
        )  # fmt: skip
        if pulled.status is not PullStatus.FOUND:
            return said
        for offset, body in read_commits(pulled.records):
            assert body is None or said.apply_commit(body, offset)
        at = pulled.next_queue_offset


def test_commits_below_an_offset_are_kept_over_a_restart(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        commit(store, "g", {0: 1, 1: 1})
        end = commit(store, "g", {0: 2})
        commit(store, "g", {0: 3})
        kept = kept_in(store)
        assert kept.gather(store, end, go_on)
        assert found(kept, "g") == found(kept_in(store), "g") == {0: 2, 1: 1}
        assert kept.gather(store, store.max_offset, go_on)
        assert found(kept, "g") == found(kept_in(store), "g") == {0: 3, 1: 1}
        assert found(kept, "other") == {}


def test_kept_positions_are_rewritten_once(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        commit(store, "g", {0: 1})
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)
        assert written(kept, store) == 1
        assert written(kept, store) == 0
        # Later the rewritten records are removed too, and rewritten with the origin of the commit.
        assert kept.gather(store, store.max_offset, go_on)
        assert written(kept, store) == 1
        assert {p.origin for p in in_log(store).find("g", "t").values()} == {0}


def test_a_new_master_rewrites_only_what_its_log_lacks(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        for group in ("kept", "moved", "half", "still there"):
            commit(store, group, {0: 1, 1: 1})
        kept = kept_in(store)
        first = store.max_offset
        assert kept.gather(store, first, go_on)
        commit(store, "moved", {0: 2, 1: 2})
        commit(store, "half", {1: 2})
        body = CommitBody("still there", "t", {0: (1, None, None), 1: (1, None, None)})
        repeated = {q: p.origin for q, p in kept.find("still there", "t").items()}
        put(store, commit_record(CommitBody(body.group, body.topic, body.positions, repeated), 1))
        assert store.wait_dispatched(store.max_offset, 60)
        begin = store.max_offset
        for epoch in (65537, 131073):
            count = kept.rewrite(epoch, store, first, store.put_encoded, 1, go_on)
            assert count == (2 if epoch == 65537 else 0)
            assert store.wait_dispatched(store.max_offset, 60)
        said = in_log(store)
        assert {p.queue_offset for p in said.find("moved", "t").values()} == {2}
        assert {q: p.queue_offset for q, p in said.find("half", "t").items()} == {0: 1, 1: 2}
        assert store.max_offset > begin


def test_positions_kept_from_a_log_that_was_set_aside_are_forgotten(tmp_path: pathlib.Path) -> None:
    part = Part()
    with opened(tmp_path) as store:
        commit(store, "g", {0: 7})
        kept = kept_in(store, part)
        assert kept.gather(store, store.max_offset, go_on)
        part.number += 1
        store.set_aside("1-0-1")
        assert found(kept, "g") == found(kept_in(store, part), "g") == {}
        assert written(kept, store) == 0
        end = commit(store, "h", {0: 1})
        assert kept.gather(store, end, go_on)
        assert found(kept, "g") == {}
        assert found(kept, "h") == found(kept_in(store, part), "h") == {0: 1}


def test_a_put_that_is_refused_is_tried_again(tmp_path: pathlib.Path) -> None:
    def refused(_payloads: Sequence[bytes]) -> Sequence[Sequence[PutResult]]:
        raise NotStoredError("superseded", "SERVICE_NOT_AVAILABLE")

    def full(payloads: Sequence[bytes]) -> Sequence[Sequence[PutResult]]:
        return [[PutResult(Status.SERVICE_NOT_AVAILABLE, reason="no room")] for _ in payloads]

    with opened(tmp_path) as store:
        commit(store, "g", {0: 1})
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)
        with pytest.raises(NotStoredError):
            written(kept, store, put_=refused)
        with pytest.raises(StoreError, match="no room"):
            written(kept, store, put_=full)
        assert written(kept, store) == 1


def test_a_save_that_fails_keeps_nothing_and_is_tried_again(tmp_path: pathlib.Path) -> None:
    files = Files()
    with opened(tmp_path) as store:
        commit(store, "g", {0: 1})
        kept = kept_in(store, fs=files)
        files.full = True
        with pytest.raises(OSError, match="No space"):
            kept.gather(store, store.max_offset, go_on)
        assert found(kept, "g") == {}
        files.full = False
        assert kept.gather(store, store.max_offset, go_on)
        assert found(kept, "g") == {0: 1}


def test_a_stop_during_the_work_leaves_the_rest_for_later(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        for number in range(600):
            commit(store, f"g{number}" + "x" * 200, {0: number})
        kept = kept_in(store)
        assert not kept.gather(store, store.max_offset, lambda: True)
        assert not pathlib.Path(store.config.root, "hastore", "positions").exists()
        assert kept.gather(store, store.max_offset, go_on)
        first = written(kept, store, pause=lambda: True)
        assert 0 < first < 600
        assert first + written(kept, store) == 600


def test_a_damaged_commit_loses_only_itself(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        commit(store, "g", {0: 1})
        begin = store.max_offset
        end = commit(store, "g", {0: 2})
        commit(store, "h", {0: 3})
        with open(store.log.queue.files[0].path, "r+b") as file:
            file.seek((begin + end) // 2)
            file.write(b"\xff\xfe")
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)
        assert (found(kept, "g"), found(kept, "h")) == ({0: 1}, {0: 3})
    assert any("a committed position is lost" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda raw: raw[:-3], "checksum"),
        (lambda raw: b"", "first line"),
        (lambda raw: raw.replace(b'"version":1', b'"version":9'), "version 9"),
    ],
)
def test_a_damaged_file_is_named_and_does_not_stop_the_node(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, damage: Any, text: str
) -> None:
    with opened(tmp_path) as store:
        commit(store, "g", {0: 1})
        assert kept_in(store).gather(store, store.max_offset, go_on)
        path = pathlib.Path(store.config.root, "hastore", "positions")
        path.write_bytes(damage(path.read_bytes()))
        kept = kept_in(store)
        assert found(kept, "g") == {}
        assert kept.gather(store, store.max_offset, go_on)
        assert found(kept_in(store), "g") == {0: 1}
    errors = [r.message for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1 and text in errors[0] and "hastore/positions" in errors[0]


def test_a_group_with_thousands_of_queues_is_split(tmp_path: pathlib.Path) -> None:
    with opened(tmp_path) as store:
        for first in range(0, 3000, 500):
            commit(store, "g", {q: q + 1 for q in range(first, first + 500)})
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)
        begin = store.max_offset
        assert written(kept, store) > 1
        said = in_log(store).find("g", "t")
        assert {q: p.queue_offset for q, p in said.items()} == {q: q + 1 for q in range(3000)}
        assert all(place.origin < begin for place in said.values())
        assert found(kept_in(store), "g") == {q: q + 1 for q in range(3000)}


def test_a_kept_position_that_was_cut_away_does_not_count(tmp_path: pathlib.Path) -> None:
    """Saved before retention removed the file, which failed; a flip then cut the bytes away."""
    with opened(tmp_path) as store:
        common = commit(store, "g", {0: 1})
        for at in range(2, 6):
            commit(store, "g", {0: at})
        kept = kept_in(store)
        assert kept.gather(store, store.max_offset, go_on)  # then the removal fails
        store.truncate(common)
        end = commit(store, "g", {0: 3, 1: 3})
        assert kept.gather(store, end, go_on)
        assert found(kept, "g") == found(kept_in(store), "g") == {0: 3, 1: 3}


def test_positions_in_deleted_topics_make_room_for_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committed_positions, "MAX_GROUPS", 1)
    with opened(tmp_path) as store:
        kept = kept_in(store)
        assert kept.gather(store, commit(store, "g", {0: 1}), go_on)
        put(store, commit_record(CommitBody("h", "u", {0: (7, None, None)}), 1))
        assert store.wait_dispatched(store.max_offset, 60)
        monkeypatch.setattr(store.topic_table, "gone", lambda: {"t"})
        assert kept.gather(store, store.max_offset, go_on)
        for each in (kept, kept_in(store)):
            assert found(each, "g") == {}
            assert {at.queue_offset for at in each.find("h", "u").values()} == {7}
