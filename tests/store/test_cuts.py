"""Cuts of the log: truncate, archive, set_aside, begin_at; and retention."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import StoreBrokenError, StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import REAL, RealFile, RealFileSystem
from hastore.record.codec import check_record, decode_record
from hastore.record.transactions import HALF_TOPIC
from hastore.security.audit_log import AuditLog
from hastore.server.callbacks import connect_audit
from hastore.service import raise_failure
from hastore.store.cuts import (
    CUTS_MAX,
    CutList,
    Cuts,
    Dismissal,
    cuts_path,
    dismissal_path,
)
from hastore.store.message_store import MessageStore, PullStatus
from hastore.store.state.limits import read_limits
from tests.store.faulty import FaultyFileSystem
from tests.store.kit import (
    FILE_SIZE,
    HOST,
    bodies,
    config,
    crash_copy,
    log_file,
    message,
    opened,
    put,
    read_log,
    scribble,
)


def fill(store: MessageStore, count: int, first: int = 0) -> list[int]:
    """Put messages of 1 000 bytes by one producer; returns their offsets."""
    return [
        put(store, message(n, size=1000, producer="p"))[0].offset or 0
        for n in range(first, first + count)
    ]


def body(number: int) -> bytes:
    return decode_record(message(number, size=1000)).body


@pytest.mark.parametrize("keep", [0, 1, 30, 57, 58, 60, 120, 150])
def test_a_cut_clears_bytes_files_queues_and_window(tmp_path: Path, keep: int) -> None:
    with opened(tmp_path / "a") as store:
        offsets = fill(store, 150)
        store.set_limits(confirmed=store.max_offset, readable=store.max_offset)
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
        end = offsets[keep] if keep < 150 else store.max_offset
        store.truncate(end)
        assert (store.max_offset, store.whole_offset, store.flushed_offset) == (end, end, end)
        assert (store.confirmed_offset, store.readable_offset) == (end, end)
        assert not any(read_log(tmp_path / "a")[end:])
        assert len(bodies(store)) == keep
        copy = crash_copy(store, tmp_path / "b")
        again = put(store, message(keep, size=1000, producer="p"))[0]
        assert (again.offset, again.queue_offset, again.duplicate) == (end, keep, False)
        if keep:
            old = put(store, message(keep - 1, size=1000, producer="p"))[0]
            assert (old.offset, old.duplicate) == (offsets[keep - 1], True)
    with opened(copy) as store:
        assert store.max_offset == end
        assert bodies(store) == [body(number) for number in range(keep)]


def test_a_cut_at_a_blank_and_at_a_file_boundary(tmp_path: Path) -> None:
    for number, place in enumerate(("blank", "boundary")):
        with opened(tmp_path / str(number)) as store:
            offsets = fill(store, 80)
            last = max(offset for offset in offsets if offset < FILE_SIZE)
            size = len(message(59, size=1000, producer="p"))
            end = last + size if place == "blank" else FILE_SIZE
            store.truncate(end)
            assert store.max_offset == end
            fill(store, 40, first=200)
            copy = crash_copy(store, tmp_path / f"{number}c")
            whole = store.max_offset
        with opened(copy) as store:
            assert store.max_offset == whole


def test_a_cut_inside_a_record_takes_the_record(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        offsets = fill(store, 70)
        store.truncate(offsets[65] + 100)
        assert store.max_offset == offsets[65]
        store.truncate(offsets[20] + 1)
        assert store.max_offset == offsets[20]
        assert len(bodies(store)) == 20
        with pytest.raises(UsageError):
            store.truncate(offsets[21])


def test_a_cut_while_others_read_and_sync(tmp_path: Path) -> None:
    with opened(tmp_path, flush_interval_ms=1) as store:
        offsets = fill(store, 50)
        with store.view(offsets[10], 2000) as view:
            taken = store.file_range(offsets[10], 100)
            store.truncate(offsets[10])
            assert not any(view)
            assert os.pread(taken.fd, taken.size, taken.position) == bytes(100)
        fill(store, 50, first=100)
        store.truncate(offsets[0])
        assert store.max_offset == 0


def test_archive_keeps_places_and_names(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        offsets = fill(store, 100)
        start, end = offsets[40], store.max_offset
        assert store.archive(start, "65537-40") == end - start
        assert store.archive(start, "65537-40") == end - start  # nothing is overwritten
        assert store.archive(end, "empty") == 0
        log = read_log(tmp_path)
    rescued = tmp_path / "rescued"
    assert sorted(os.listdir(rescued)) == ["65537-40", "65537-40.2", "empty"]
    names = sorted(os.listdir(rescued / "65537-40"))
    assert names == [f"{0:020d}", f"{FILE_SIZE:020d}"]
    data = b"".join((rescued / "65537-40" / name).read_bytes() for name in names)
    assert data == bytes(start) + log[start:end]
    assert check_record(data, start, FILE_SIZE, start)
    with opened(tmp_path) as store, pytest.raises(UsageError):
        store.archive(0, "../out")


def test_what_a_cut_takes_because_of_damage_is_archived_too(tmp_path: Path) -> None:
    """Sizes lead from the file's start to the record that a cut lies in; a damaged one does not."""
    with opened(tmp_path / "a") as store:
        offsets = fill(store, 20)
        assert store.wait_dispatched(store.max_offset, 60)
        whole, end = read_log(tmp_path / "a"), store.max_offset
        for bad in (offsets[3], offsets[15]):
            scribble(log_file(tmp_path / "a", 0), bad + 4, b"????")
        assert store.archive(offsets[15], "x") == end - offsets[3]
        store.truncate(offsets[15])
        assert store.max_offset == offsets[3]
        kept = (tmp_path / "a/rescued/x" / ("0" * 20)).read_bytes()
        assert kept[offsets[4] : offsets[15]] == whole[offsets[4] : offsets[15]]


def test_a_cut_that_must_read_damaged_records_again_closes_the_store(tmp_path: Path) -> None:
    """Replay would go on behind the log's end: what comes there next would be in no queue."""
    half = [("TRAN_MSG", "true"), ("UNIQ_KEY", "u"), ("PGROUP", "g")]
    half += [("REAL_TOPIC", "TopicA"), ("REAL_QID", "0")]
    store = MessageStore(config(tmp_path), store_host=HOST)
    store.open()
    put(store, message(0, topic=HALF_TOPIC, properties=half))
    assert store.wait_dispatched(store.max_offset, 60)
    offsets = fill(store, 20)
    assert store.wait_dispatched(store.max_offset, 60)
    scribble(log_file(tmp_path), offsets[3] + 4, b"????")
    with pytest.raises(StoreBrokenError, match="a cut of the log failed: .* holds no record"):
        store.truncate(offsets[15])
    with pytest.raises(StoreBrokenError):
        put(store, message(99))
    with pytest.raises(StoreBrokenError):
        store.close()
    scribble(log_file(tmp_path), offsets[3] + 4, message(3, size=1000)[4:8])  # a repair
    with opened(tmp_path) as store:
        assert store.max_offset == offsets[15]
        put(store, message(15, size=1000))
        assert bodies(store) == [body(n) for n in range(16)]


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
def test_an_archive_that_fails_half_way_leaves_no_part_of_it(tmp_path: Path, code: int) -> None:
    """The room that the file system names is not that of a quota. A slave tries again and again."""
    fs = FaultyFileSystem()
    store = MessageStore(config(tmp_path), store_host=HOST, fs=fs)
    store.open()
    try:
        offset = fill(store, 10)[7]
        fs.torn["1-7"] = (100, OSError(code, os.strerror(code)))
        kind = StoreError if code == errno.EIO else StoreFullError
        for _ in range(2):
            with pytest.raises(StoreError, match="it was not cut") as raised:
                store.archive(offset, "1-7")
            assert type(raised.value) is kind
        assert os.listdir(tmp_path / "rescued") == []
        fs.heal()
        store.archive(offset, "1-7")
        assert os.listdir(tmp_path / "rescued") == ["1-7"]
    finally:
        store.close()


def test_a_cut_is_told_once_it_was_made_whenever_the_node_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that dies before the cut may keep the messages: then nothing was cut."""
    with opened(tmp_path / "a") as store:
        offsets = fill(store, 10)
        store.archive(offsets[7] + 5, "1-7")  # inside the record that it cuts too
        before = crash_copy(store, tmp_path / "before")
        monkeypatch.setattr(Cuts, "note_made", lambda cuts, end: None)
        store.truncate(offsets[7] + 5)
        after = crash_copy(store, tmp_path / "after")
        monkeypatch.undo()
    with opened(before) as store:
        assert store.max_offset > offsets[9] and store.cuts.all == ()
        fill(store, 1, first=10)
        store.archive(offsets[9], "1-9")
        store.truncate(offsets[9])
        (cut,) = store.cuts.all
        assert (cut.id, cut.messages, cut.folder) == (2, 2, "1-9")
    with opened(after) as store:
        (cut,) = store.cuts.all
        assert (cut.id, cut.messages, cut.folder) == (1, 3, "1-7")
        assert store.max_offset == offsets[7]


def test_a_log_that_is_set_aside_tells_what_was_not_confirmed(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    with opened(tmp_path) as store:
        store.hooks.on_cut = lambda outcome, text: told.append((outcome, text))
        offsets = fill(store, 100)  # over several files, with blanks at their ends
        store.set_limits(confirmed=offsets[30] + 1)
        place, end = store.set_aside("2-0-1"), store.max_offset
        (cut,) = store.cuts.all
        assert (cut.messages, cut.all_counted, end) == (70, True, 0)
        assert told == [
            ("archived", f"cut 1: 70 messages, bytes {offsets[30] + 1} to {cut.end_offset}, "
                         f"in {place}")
        ]  # fmt: skip


def test_a_list_of_cuts_that_cannot_be_saved_or_read_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        offsets = fill(store, 10)
        with monkeypatch.context() as full:
            full.setattr(type(REAL), "replace_bytes", no_room)
            store.archive(offsets[4], "1-4")
            store.cuts.note_made(offsets[4])
            (failure, _) = store.cuts.problems()
            assert "cuts.json cannot be written" in failure and "restart forgets" in failure
        store.cuts.take_dismissal()
        assert len(store.cuts.problems()) == 1
    path = tmp_path / "hastore" / "cuts.json"
    path.write_text("{")
    with opened(tmp_path) as store:
        (failure,) = store.cuts.problems()
        assert "cuts.json cannot be read" in failure and store.cuts.all == ()
        assert (tmp_path / "hastore" / "cuts.json.damaged").read_text() == "{"
        store.archive(offsets[2], "1-2")
        store.truncate(offsets[2])
        shutil.rmtree(tmp_path / "rescued" / "1-2")
        (damaged, cut) = store.cuts.problems()
        assert damaged == failure, "a new list says nothing of the old one"
        (new,) = store.cuts.all
        assert new.id > 1_000_000, "a request that is left may name 1, which nobody has seen"
        assert "that folder is gone" in cut and "log dump" not in cut


def no_room(_fs: object, path: str, _data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_old_cuts_are_added_up(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(CUTS_MAX + 3):
            store.cuts.note(f"1-{number}", number, number + 1, 2, all_counted=number != 1)
            store.cuts.note_made(number)
        cuts = store.cuts.all
        assert len(cuts) == CUTS_MAX and store.cuts.messages == 2 * (CUTS_MAX + 3)
        assert (cuts[0].messages, cuts[0].all_counted, cuts[0].folder) == (8, False, "")
        assert store.cuts.status()[0]["folder"] is None
        first, *others = store.cuts.problems()
        assert first.startswith(f"{CUTS_MAX - 5} earlier cuts took") and len(others) == 5


def test_each_cut_that_was_dismissed_is_in_the_audit_log_however_many_they_are(
    tmp_path: Path,
) -> None:
    """It takes few lines of one kind in a minute."""
    with opened(tmp_path) as store:
        cuts, audit = store.cuts, AuditLog(REAL, f"{tmp_path}/a", 1, on_failure=raise_failure)
        for number in range(CUTS_MAX):
            cuts.note(f"1-{number}", number, number + 1, 2, all_counted=True)
            cuts.note_made(number)
        connect_audit(store, audit)
        ids = tuple(one.id for one in cuts.all)
        REAL.replace_bytes(
            dismissal_path(str(tmp_path)), msgspec.json.encode(Dismissal(ids=ids, by="eve"))
        )
        cuts.take_dismissal()
        audit.start()
        assert audit.stop() and cuts.all == ()
        lines = [json.loads(line)["reason"] for line in Path(audit.path).read_text().splitlines()]
        assert re.findall(r"\b\d+(?=[,:])", " ".join(lines)) == [str(one) for one in ids]
        assert all(line.endswith("messages, by eve") for line in lines)


def test_a_store_that_closes_leaves_a_dismissal_to_the_next_start(tmp_path: Path) -> None:
    """The audit log of a node has stopped by then, or has not begun if the start failed."""
    with opened(tmp_path) as store:
        assert store._housekeeping.stop()
        store.cuts.note("1-0", 0, 1, 2, all_counted=True)
        store.cuts.note_made(0)
        request = dismissal_path(str(tmp_path))
        REAL.replace_bytes(request, msgspec.json.encode(Dismissal(ids=(1,), by="eve")))
    assert REAL.exists(request)
    kept = msgspec.json.decode(REAL.read_bytes(cuts_path(str(tmp_path))), type=CutList)
    assert [one.id for one in kept.cuts] == [1]


def test_a_cut_that_a_crash_prevented_is_not_told_by_a_later_one(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        offsets = fill(store, 40)
        store.archive(offsets[30], "2-x")
        copy = crash_copy(store, tmp_path / "b")
    with opened(copy) as store:  # another master has all of it, and this node goes on
        assert store.max_offset > offsets[39] and not store.cuts.all
        store.set_limits(confirmed=store.max_offset)
        store.set_aside("3-0-1")
        assert not store.cuts.all and not store.problems


@pytest.mark.parametrize("archived", [True, False])
def test_a_store_whose_log_was_moved_away_has_a_checkpoint_of_its_own(
    tmp_path: Path, archived: bool
) -> None:
    with opened(tmp_path) as store:
        store._housekeeping.stop()
        put(store, message(0))
        store.wait_dispatched(store.max_offset, 60)
        store._keep()
        before = store._checkpoint.now
        if archived:
            place = Path(store.set_aside("2-0-1"))
            old = (place / "checkpoint").read_bytes()
        else:
            store.drop()
        put(store, message(1))
        store.wait_dispatched(store.max_offset, 60)
        store._keep()
        assert (tmp_path / "checkpoint").stat().st_size == 4096
        assert not archived or (place / "checkpoint").read_bytes() == old
        assert store._checkpoint.now.queue_timestamp_ms >= before.queue_timestamp_ms > 0


def test_set_aside_and_begin_elsewhere(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as master:
        fill(master, 150)
        start = 2 * FILE_SIZE
        with master.view(start, FILE_SIZE) as view:
            data = bytes(view)
    with opened(tmp_path / "s") as store:
        fill(store, 100)
        bodies(store)
        store.set_limits(confirmed=5000, readable=6000)
        place = store.set_aside("resync-1")
        assert sorted(os.listdir(place)) == [
            "checkpoint",
            "commitlog",
            "consumequeue",
            "index",
        ] or (sorted(os.listdir(place)) == ["commitlog", "consumequeue", "index"])
        assert (store.min_offset, store.max_offset, store.confirmed_offset) == (0, 0, 0)
        assert store.queues.topics() == {}
        store.begin_at(start)
        with pytest.raises(UsageError):
            store.append_replica(0, data)
        store.append_replica(start, data)
        found = bodies(store)
        assert found and found[-1] == body(149)
        copy = crash_copy(store, tmp_path / "c")
        with pytest.raises(UsageError):
            store.begin_at(0)
        known = store.queues.queue_range("TopicA", 0)
    with opened(copy) as store:
        assert (store.min_offset, store.max_offset) == (start, start + len(data))
        assert bodies(store) == found
        assert store.queues.queue_range("TopicA", 0) == known
        again = put(store, message(149, size=1000, producer="p"))[0]
        assert again.duplicate


def test_a_log_may_begin_inside_its_first_file(tmp_path: Path) -> None:
    with opened(tmp_path / "m") as master:
        offsets = fill(master, 100)
        start = offsets[20]
        with master.view(start, FILE_SIZE) as view:
            data = bytes(view)
    with opened(tmp_path / "s") as store:
        store.begin_at(start)
        copy_empty = crash_copy(store, tmp_path / "e")
        store.append_replica(start, data)
        with pytest.raises(UsageError):
            store.view(0, 10)
        found = bodies(store)
        assert found[0] == body(20)
        store.flush()
        copy = crash_copy(store, tmp_path / "c")
    for root in (str(tmp_path / "s"), copy):
        with opened(root) as store:
            assert (store.min_offset, store.max_offset) == (start, start + len(data))
            assert bodies(store) == found
    assert not any(read_log(copy)[:start])
    with opened(copy_empty) as store:
        assert (store.min_offset, store.max_offset) == (start, start)


def test_a_crash_before_a_log_is_set_aside_leaves_it_though_it_begins_inside_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "m") as master:
        start = fill(master, 100)[20]
        with master.view(start, FILE_SIZE) as view:
            data = bytes(view)
    copies: list[str] = []
    rename = RealFileSystem.rename
    with opened(tmp_path / "s") as store:
        store.begin_at(start)
        store.append_replica(start, data)
        store.flush()
        found = bodies(store)

        def copy_first(fs: RealFileSystem, source: str, target: str) -> None:
            if source.endswith("/commitlog"):
                copies.append(crash_copy(store, tmp_path / "c"))
            rename(fs, source, target)

        monkeypatch.setattr(RealFileSystem, "rename", copy_first)
        store.set_aside("resync-1")
        assert (store.min_offset, store.max_offset) == (0, 0)
    with opened(copies[0]) as store:
        assert (store.min_offset, store.max_offset) == (start, start + len(data))
        assert bodies(store) == found


def test_set_aside_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as store:
        fill(store, 10)
        monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: FILE_SIZE)
        with pytest.raises(StoreFullError):
            store.set_aside("x")
        with pytest.raises(StoreFullError):
            monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: 1)
            store.archive(0, "y")
        assert len(bodies(store)) == 10


def dismiss(store: MessageStore, *ids: int) -> None:
    """Say to a store that an operator has looked at these cuts."""
    request = msgspec.json.encode(Dismissal(ids=ids, by="eve"))
    Path(dismissal_path(store.config.root)).write_bytes(request)
    store.cuts.take_dismissal()


def archives(root: Path) -> set[str]:
    return {path.name for path in (root / "rescued").iterdir()}


def tidy(store: MessageStore) -> None:
    """Do what housekeeping does every ten seconds."""
    store.rescued._next_ms = 0.0
    store.rescued.tidy(store.min_offset, store.cuts.holds)


def test_the_log_that_a_resync_sets_aside_stays_until_its_cut_is_dismissed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master's log begins behind all of it: that is no sign that anybody has looked at it."""
    monkeypatch.setattr("hastore.store.rescue.LARGE_BYTES", 1)
    with opened(tmp_path) as store:
        store._housekeeping.stop()
        fill(store, 10)
        store.set_aside("1-0-1")
        store.begin_at(64 * FILE_SIZE)
        fill(store, 5, first=100)
        tidy(store)
        assert archives(tmp_path) == {"1-0-1"}
        (cut,) = store.cuts.all
        assert cut.messages == 10 and "look at them (`hastore log dump" in store.cuts.problems()[0]
        dismiss(store, cut.id)
        tidy(store)
        assert archives(tmp_path) == set()


@pytest.mark.parametrize("why", ["added up", "damaged"])
def test_no_archive_is_removed_while_the_list_does_not_name_those_of_all_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr("hastore.store.rescue.LARGE_BYTES", 1)
    with opened(tmp_path) as store:
        fill(store, 10)
        store.set_aside("1-0-1")
        for number in range(CUTS_MAX if why == "added up" else 0):
            store.cuts.note(f"2-{number}", number, number + 1, 1, all_counted=True)
            store.cuts.note_made(0)
    if why == "damaged":
        scribble(Path(cuts_path(str(tmp_path))), 0, b"no")
    with opened(tmp_path) as store:
        store._housekeeping.stop()
        store.begin_at(64 * FILE_SIZE)
        tidy(store)
        assert archives(tmp_path) == {"1-0-1"} and store.rescued.problem is not None
        if why == "added up":
            dismiss(store, *(one.id for one in store.cuts.all if not one.folder))
            tidy(store)
            assert archives(tmp_path) == set()


def test_a_large_rescued_is_a_problem_and_only_what_has_expired_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What lies before the log's begin would be gone by retention too; the rest may be unique."""
    settings = config(tmp_path, retention=RetentionConfig(max_size_bytes=FILE_SIZE))
    store = MessageStore(settings, store_host=HOST)
    store.open()
    try:
        for name in ("1-1", "1-2"):
            offset = fill(store, 30)[0]
            store.archive(offset, name)
        store.set_aside("2-0-1")
        fill(store, 300, first=1000)
        store.archive(offsets_end := store.max_offset - 500, "3-9")
        (tmp_path / "rescued" / "note.txt").write_text("an operator's")
        rescued = store.rescued
        rescued.look()
        assert rescued.bytes > 10_000 and rescued.problem is None
        store.wait_dispatched(store.max_offset, 60)
        store.flush()
        expired = store.retention.expired_end(None)
        store.retention.delete_expired(None)
        assert store.min_offset == expired and store.min_offset > 2 * FILE_SIZE
        tidy(store)
        every = {"1-1", "1-2", "2-0-1", "3-9", "note.txt"}
        assert archives(tmp_path) == every, "it is not large"
        monkeypatch.setattr("hastore.store.rescue.LARGE_BYTES", 1)
        rescued._next_ms = 0.0
        rescued.tidy(0, store.cuts.holds)
        assert archives(tmp_path) == every
        assert f"rescued takes {rescued.bytes} bytes" in rescued.problem
        tidy(store)  # the others' cuts were not made: the log went on
        assert archives(tmp_path) == {"2-0-1", "3-9", "note.txt"} and offsets_end > store.min_offset
        dismiss(store, *(one.id for one in store.cuts.all))
        tidy(store)
        assert archives(tmp_path) == {"3-9", "note.txt"}
        assert caplog.text.count("is removed") == 3
        assert rescued.problem is not None and rescued.bytes > 0
        monkeypatch.setattr("hastore.store.rescue.LARGE_BYTES", 1 << 30)
        rescued.look()
        assert rescued.problem is None
        monkeypatch.setattr(type(REAL), "free_bytes", lambda self, path: 0)
        rescued.look()
        assert "0 bytes of its disk are free" in rescued.problem
    finally:
        store.close()


class Clock:
    """A wall clock that a test moves."""

    now = 1_000_000

    def monotonic_ms(self) -> float:
        return float(self.now)

    def wall_ms(self) -> int:
        return self.now


def test_retention_by_age_takes_whole_files_never_the_last(tmp_path: Path) -> None:
    clock = Clock()
    settings = config(tmp_path, retention=RetentionConfig(max_age_ms=1000))
    store = MessageStore(settings, store_host=HOST, clock=clock)
    store.open()
    fill(store, 100)
    clock.now += 600
    fill(store, 100, first=100)
    store.flush()
    assert store.wait_dispatched(store.max_offset, 60)
    assert store.retention.delete_expired(None) == 0
    clock.now += 600
    # a slave is still being sent the first file
    assert store.retention.delete_expired(FILE_SIZE - 1) == 0
    assert store.retention.delete_expired(None) == 1
    assert store.min_offset == FILE_SIZE
    clock.now += 10_000
    assert store.retention.delete_expired(None) == 2
    files = sorted(os.listdir(tmp_path / "commitlog"))
    assert files == [f"{3 * FILE_SIZE:020d}"]
    with pytest.raises(UsageError):
        store.view(0, 1)
    low = store.queues.queue_range("TopicA", 0)
    assert low is not None and low[0] > 100
    small = store.reader.pull(
        "TopicA", 0, 0, max_messages=1, max_bytes=1, limit_offset=store.max_offset
    )
    assert (small.status, small.next_queue_offset) == (PullStatus.OFFSET_TOO_SMALL, low[0])
    found = bodies(store)
    store.close()
    with opened(tmp_path) as again:
        assert again.min_offset == 3 * FILE_SIZE
        assert bodies(again) == found


def test_retention_by_size(tmp_path: Path) -> None:
    settings = RetentionConfig(max_size_bytes=2 * FILE_SIZE)
    with opened(tmp_path, retention=settings) as store:
        fill(store, 300)
        assert store.wait_dispatched(store.max_offset, 60)
        assert store.retention.delete_expired(None) == 0  # nothing is synced yet
        store.flush()
        files = len(os.listdir(tmp_path / "commitlog"))
        assert store.retention.delete_expired(None) == files - 2
        assert len(os.listdir(tmp_path / "commitlog")) == 2


def test_the_limits_are_lowered_before_the_bytes_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "a") as store:
        offsets = fill(store, 100)
        store.flush()
        copies: list[str] = []
        zero = RealFile.zero

        def copy_first(file: RealFile, position: int, size: int) -> None:
            if not copies:
                copies.append(crash_copy(store, tmp_path / "b"))
            zero(file, position, size)

        monkeypatch.setattr(RealFile, "zero", copy_first)
        store.truncate(offsets[30])
    page = read_limits(REAL, copies[0])
    assert page is not None and page.flushed_offset == offsets[30]
    store = MessageStore(config(copies[0]), store_host=HOST)
    store.open(intent_offset=offsets[30])  # the cut is repeated, as a node with an intent does
    store.truncate(offsets[30])
    assert len(bodies(store)) == 30
    store.close()
