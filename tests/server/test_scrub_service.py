"""ScrubService: what it finds, what readers get then, and what it forgets again."""

from __future__ import annotations

import contextlib
import pathlib
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import CorruptRecordError
from hastore.fs.filesystem import REAL
from hastore.ha.hello.peer import ClosedError
from hastore.protocol.hello import RangeOf
from hastore.record.codec import decode_record
from hastore.record.log_walk import Damage, LogWalk
from hastore.repair.mending import Mended
from hastore.server.dledger_node import DLedgerNode
from hastore.server.node import Node
from hastore.server.repairing import mend_from
from hastore.server.scrub_service import BLOCKED_MS, Mend, ScrubService
from hastore.service import raise_failure
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore
from tests.dledger.store import kit as entry_kit
from tests.ha.nodes import wait_for
from tests.server.kit import config_of, group_of_one, running
from tests.store import kit

COUNT = 400
FAST = 16 << 30


class Scrubbed:
    """An open store of either mode, all of it readable, and its scrubber."""

    def __init__(
        self, root: pathlib.Path, mode: str, store: LogStore, put: Callable[..., list[int]]
    ) -> None:
        self.root, self.store, self.put = root, store, put
        self.places = put(*(kit.message(number) for number in range(COUNT)))
        folder = "commitlog" if mode == "classic" else "dledger-n1/data"
        self.folder = root / folder
        self.lead = store.log.form.lead
        self.scrubber = self.make()
        self.publish()

    def make(self, rate: int | None = FAST, mend: Mend | None = None) -> ScrubService:
        scrubber = ScrubService(
            self.store, SYSTEM_CLOCK, fs=REAL, path=str(self.root / "hastore/scrub.json"),
            rate=rate, mend=mend or (lambda _walk, damage, _cut: Mended(damage, None)),
            remedy=lambda: "run this", on_failure=raise_failure,
        )  # fmt: skip
        scrubber.start_s = 1e6
        return scrubber

    def publish(self) -> None:
        self.store.flush()
        end = self.store.max_offset
        self.store.set_limits(confirmed=end, readable=end)
        assert self.store.wait_dispatched(end, 60)

    def flip(self, number: int, at: int, mask: int = 1) -> None:
        """Change a byte of a record on the disk."""
        offset = self.places[number] + at
        start = offset - offset % kit.FILE_SIZE
        path = self.folder / f"{start:020}"
        with open(path, "rb") as file:
            file.seek(offset - start)
            (old,) = file.read(1)
        kit.scribble(str(path), offset - start, bytes([old ^ mask]))

    def pull(self, at: int, count: int = 1000) -> Any:
        return self.store.reader.pull(
            "TopicA", 0, at,
            max_messages=count, max_bytes=1 << 20, limit_offset=self.store.readable_offset,
        )  # fmt: skip


@contextlib.contextmanager
def scrubbed(root: pathlib.Path, mode: str) -> Iterator[Scrubbed]:
    if mode == "classic":
        with kit.opened(root) as store:

            def put(*messages: bytes) -> list[int]:
                return [one.offset or 0 for one in kit.put(store, *messages)]

            yield Scrubbed(root, mode, store, put)
    else:
        with entry_kit.opened(root) as entries:
            yield Scrubbed(root, mode, entries.messages, partial(entry_kit.put, entries, 1))


@pytest.fixture(params=["classic", "dledger"])
def log(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Scrubbed]:
    with scrubbed(tmp_path / "s", str(request.param)) as found:
        yield found


def test_a_sound_log(log: Scrubbed) -> None:
    log.scrubber.scrub()
    status = log.scrubber.status()
    assert status["passes"] == 1 and status["damages"] == []
    assert status["scrubbed_bytes"] >= log.store.max_offset
    assert log.scrubber.problems() == [] and log.store.log.fenced == ()


def test_damage_is_told_and_fenced_and_all_else_is_served(
    log: Scrubbed, caplog: pytest.LogCaptureFixture
) -> None:
    log.flip(100, 90)  # of the body
    log.scrubber.scrub()
    begin, end = log.places[100] - log.lead, log.places[101] - log.lead
    status = log.scrubber.status()
    assert status["damaged_bytes"] == end - begin
    (one,) = status["damages"]
    assert (one["offset"], one["end_offset"]) == (begin, end)
    (problem,) = log.scrubber.problems()
    assert f"bytes [{begin}, {end})" in problem and problem.endswith("run this")
    assert f"bytes [{begin}, {end})" in caplog.text
    assert log.pull(0).count == 100, "up to the damage"
    with pytest.raises(CorruptRecordError, match="is damaged"):
        log.pull(100)
    assert log.pull(101).count == COUNT - 101
    assert log.store.reader.record_bytes(log.places[100]) is None

    log.flip(100, 90)  # repaired
    log.scrubber.scrub()
    assert log.scrubber.problems() == [] and log.scrubber.damaged_bytes == 0
    assert log.pull(0).count == COUNT
    assert "are sound now" in caplog.text


def test_what_only_the_crc_of_an_entry_shows_is_not_served_any_more(tmp_path: pathlib.Path) -> None:
    with scrubbed(tmp_path / "s", "dledger") as log:
        log.flip(100, 47)  # the born time: the record's own CRC does not cover it
        assert log.pull(100, 1).count == 1
        log.scrubber.scrub()
        with pytest.raises(CorruptRecordError):
            log.pull(100, 1)
        assert log.pull(99, 1).count == log.pull(101, 1).count == 1


def test_a_cut_lifts_the_fences_beyond_it(log: Scrubbed, tmp_path: pathlib.Path) -> None:
    log.flip(50, 90)
    log.flip(300, 90)
    log.scrubber.scrub()
    assert len(log.store.log.fenced) == 2
    if log.lead:
        return  # entries below the committed index are never cut
    log.store.set_limits(confirmed=log.places[200], readable=log.places[200])
    log.store.truncate(log.places[200])
    kit.put(log.store, *(kit.message(number) for number in range(200, COUNT)))
    log.publish()
    assert len(log.store.log.fenced) == 1 and log.pull(200).count == COUNT - 200
    log.scrubber.scrub()
    status = log.scrubber.status()
    assert [one["offset"] for one in status["damages"]] == [log.places[50]]
    assert len(log.store.log.fenced) == 1


def test_retention_removes_what_is_being_read(
    log: Scrubbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.flip(10, 90)
    log.flip(COUNT - 3, 90)
    view, removed = log.store.view, []

    def late(offset: int, size: int) -> Any:
        if offset >= 20_000 and not removed:
            removed.append(offset)
            monkeypatch.setattr(log.store.log, "min_offset", kit.FILE_SIZE)
        return view(offset, size)

    monkeypatch.setattr("hastore.record.log_walk.WINDOW_BYTES", 5000)
    monkeypatch.setattr(log.store, "view", late)
    log.scrubber.scrub()
    log.scrubber.scrub()
    status = log.scrubber.status()
    assert removed
    assert [one["offset"] for one in status["damages"]] == [log.places[COUNT - 3] - log.lead]


def test_a_restart_goes_on_and_fences_what_is_known(log: Scrubbed) -> None:
    log.flip(10, 90)
    log.scrubber.scrub()
    log.store.fence((), log.store.times_cut)
    again = log.make()
    again.start()
    try:
        assert len(log.store.log.fenced) == 1 and len(again.problems()) == 1
        assert again.status()["passes"] == 1
    finally:
        assert again.stop()


def test_a_repair_while_the_node_was_down_is_seen_at_once(log: Scrubbed) -> None:
    log.flip(10, 90)
    log.scrubber.scrub()
    log.flip(10, 90)
    again = log.make()
    again.start()
    try:
        wait_for(lambda: log.store.log.fenced == (), "the end of the fence")
        assert again.problems() == [] and log.pull(10).count == COUNT - 10
    finally:
        assert again.stop()


def test_a_slow_pass_ends_at_once_when_the_node_stops(log: Scrubbed) -> None:
    slow = log.make(rate=1)
    slow.start_s = 0.0
    slow.start()
    assert slow.stop()
    assert slow.scrubbed_bytes == 0 and slow.failure is None


def test_what_a_reader_meets_is_looked_at_though_no_pass_is_made(log: Scrubbed) -> None:
    asked: list[int] = []

    def mend(_walk: LogWalk, damage: Damage, _times_cut: int) -> Mended:
        asked.append(damage.start)
        log.flip(100, 90)
        return Mended(damage, "node 2", written=True)

    scrubber = log.make(rate=None, mend=mend)
    log.store.hooks.on_damage = scrubber.note_read
    log.flip(100, 90)
    assert log.pull(90).count == 10, "the records before it"
    scrubber.look_at_reads()
    assert asked == [log.places[100] - log.lead]
    assert log.pull(100).count == COUNT - 100 and log.store.log.fenced == ()
    scrubber.scrub()
    status = scrubber.status()
    assert (status["rate"], status["passes"], len(asked)) == (None, 0, 1)
    assert status["repaired_bytes"] == log.places[101] - log.places[100]


def test_a_damaged_queue_is_not_taken_for_a_damaged_log(log: Scrubbed) -> None:
    scrubber = log.make(rate=None)
    scrubber.note_read(log.places[100] + 7)
    scrubber.look_at_reads()
    assert scrubber.status()["damages"] == [] and log.store.log.fenced == ()
    read = scrubber.scrubbed_bytes
    scrubber.note_read(log.places[100] + 7)  # each pull meets it again
    scrubber.look_at_reads()
    assert 0 < read == scrubber.scrubbed_bytes


def test_what_keeps_the_log_from_being_cut_is_tried_again_each_minute(log: Scrubbed) -> None:
    asked: list[int] = []

    def mend(_walk: LogWalk, damage: Damage, _times_cut: int) -> Mended:
        asked.append(damage.start)
        return Mended(damage, None, ("node 2: it does not answer",))

    scrubber = log.make(rate=None, mend=mend)
    log.store.hooks.on_blocked_cut = scrubber.note_blocked
    log.flip(100, 90)
    for tries in (1, 2, 3):
        for _ in range(5):  # a node tries to follow each second
            scrubber.note_blocked(log.places[100])
            scrubber.look_at_reads()
        assert len(asked) == tries
        scrubber._blocked_ms[log.places[100]] -= BLOCKED_MS


@pytest.mark.parametrize("what", ["magic", "size"])
def test_where_replay_stops_is_looked_at_and_repaired_and_replay_goes_on(
    log: Scrubbed, what: str
) -> None:
    number = {"magic": COUNT + 10, "size": COUNT + 19}[what]
    # The magic, or a size that leads beyond the log's end, as of a record that is incomplete yet.
    at = 4 if what == "magic" else -42 if log.lead else 2
    found: list[int] = []

    def mend(_walk: LogWalk, damage: Damage, _times_cut: int) -> Mended:
        found.append(damage.start)
        if len(found) == 1:
            return Mended(damage, None, ("node 2: it does not answer",))
        log.flip(number, at, 0x10)
        return Mended(damage, "node 2", written=True)

    store, scrubber = log.store, log.make(mend=mend)
    asked = threading.Event()

    def note(offset: int) -> None:
        scrubber.note_blocked(offset)
        asked.set()

    store.hooks.on_blocked_replay = note
    with store.replay.paused():  # a long one, as after the queues were lost
        log.places += log.put(*(kit.message(COUNT + more) for more in range(20)))
        log.flip(number, at, 0x10)
        end = store.flush()
        store.set_limits(confirmed=end, readable=end)
    assert asked.wait(60)
    assert store.replay_problem is not None and store.dispatched_offset < end
    scrubber.look_at_reads()
    begin = log.places[number] - log.lead
    (one,) = scrubber.status()["damages"]
    assert (one["offset"], one["not_repaired"]) == (begin, "node 2: it does not answer")
    assert log.store.log.fenced
    scrubber.scrub()
    assert found == [begin, begin]
    assert store.wait_dispatched(end, 60) and log.pull(0).count == COUNT + 20
    wait_for(lambda: store.replay_problem is None)  # replay says so after the step that got there
    assert scrubber.problems() == []


def test_damage_that_was_cut_off_is_told_no_more(tmp_path: pathlib.Path) -> None:
    with scrubbed(tmp_path / "s", "classic") as log:
        store = log.store
        assert isinstance(store, MessageStore)
        scrubber = log.make()
        log.flip(COUNT - 1, 90)
        scrubber.scrub()
        assert scrubber.problems() and scrubber.damaged_bytes and scrubber.status()["damages"]
        store.truncate(log.places[COUNT - 1])
        assert scrubber.problems() == [] and scrubber.damaged_bytes == 0
        assert scrubber.status()["damages"] == []


def test_what_is_written_and_reads_back_damaged_is_tried_once_in_a_pass(log: Scrubbed) -> None:
    tried: list[Damage] = []

    def mend(_walk: LogWalk, damage: Damage, _times_cut: int) -> Mended:
        tried.append(damage)
        return Mended(damage, "node 2", written=True)

    scrubber = log.make(mend=mend)
    log.flip(100, 90)
    scrubber.scrub()
    assert len(tried) == 1 and scrubber.damaged_bytes > 0
    with pytest.raises(CorruptRecordError):
        log.pull(100)


def test_a_node_that_cannot_be_asked_is_a_reason(log: Scrubbed) -> None:
    def dial(node: int, _start: int, _end: int) -> Any:
        raise ClosedError("closed the connection") if node == 2 else TimeoutError("slow")

    def mend(walk: LogWalk, damage: Damage, times_cut: int) -> Mended:
        return mend_from(log.store, None, (2, 3), dial, walk, damage, times_cut)

    scrubber = log.make(mend=mend)
    log.flip(100, 90)
    scrubber.scrub()
    (one,) = scrubber.status()["damages"]
    assert one["not_repaired"] == "node 2: closed the connection; node 3: slow"


def test_a_cut_while_other_nodes_are_asked_ends_the_repair(tmp_path: pathlib.Path) -> None:
    """Another node that has the tail which a failover cut here would put it back."""
    old_epochs = [(1 << 16 | 1, 0)]
    with scrubbed(tmp_path / "s", "classic") as log:
        store = log.store
        assert isinstance(store, MessageStore)
        whole, end = kit.read_log(log.root), store.max_offset
        log.flip(100, 90)

        def dial(_node: int, start: int, stop: int) -> Any:
            if not store.times_cut:
                store.truncate(log.places[100])
                kit.put(store, *(kit.message(number + 500) for number in range(100, COUNT)))
                log.publish()
            data = whole[start:stop]
            answer = RangeOf(0, end, data, tuple(old_epochs) if data else ())
            return types.SimpleNamespace(answer=answer, close=lambda: None)

        def mend(walk: LogWalk, damage: Damage, times_cut: int) -> Mended:
            return mend_from(store, old_epochs, (2,), dial, walk, damage, times_cut)

        log.make(mend=mend).scrub()
        bodies = kit.bodies(store)
        new = [decode_record(kit.message(number + 500)).body for number in range(100, COUNT)]
        assert bodies[100:] == new


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_a_node_tells_it_in_status_and_metrics(tmp_path: pathlib.Path, mode: str) -> None:
    root = tmp_path / "s"
    node = (
        Node(config_of(root), lambda: None)
        if mode == "classic"
        else DLedgerNode(group_of_one(root), lambda: None)
    )
    with running(node):
        store = node.backend.store
        (result,), = node.backend.put_encoded([kit.message(1)])
        assert result.offset is not None
        store.flush()
        assert store.wait_dispatched(store.max_offset, 60)
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        folder = next(root.glob("commitlog")) if mode == "classic" else next(root.glob("*/data"))
        kit.scribble(str(folder / f"{0:020}"), result.offset + 90, b"\xff")
        node.scrub.scrub()
        status = node.backend.status()
        size = status["scrub"]["damaged_bytes"]
        assert size > 0 and status["scrub"]["rate"] == 1 << 20
        assert any("hastore log repair -c FILE" in one for one in status["problems"])
        page = node.metrics.render().decode()
        assert any(
            line.startswith("hastore_damaged_bytes{") and line.endswith(f" {size}")
            for line in page.splitlines()
        )
