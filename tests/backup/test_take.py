"""Backups of nodes that run: prefixes of whole records, of which only the new part is copied."""

import contextlib
import errno
import os
import threading

import msgspec
import pytest

from hastore.backup import take as taking
from hastore.backup import target as targets
from hastore.backup.backups import find_backup, read_manifests, verify_backup
from hastore.backup.manifest import (
    PARTIAL,
    decode_manifest,
    digest,
    encode_manifest,
    manifest_name,
    number_of,
)
from hastore.backup.source import Source
from hastore.backup.take import Pace, take_backup
from hastore.backup.target import LocalTarget, open_target
from hastore.clock import SystemClock
from hastore.config.model import Role
from hastore.errors import (
    HastoreError,
    StoreBrokenError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    UsageError,
)
from hastore.fs.filesystem import REAL, RealFileSystem, size_of
from hastore.ha.node.node_state import CutIntent
from hastore.ha.replica.rewind import cut_back
from hastore.ha.rules.epochs import resumed_entry
from hastore.store.offline.reader import StoreReader
from tests.backup.kit import FILE_SIZE, check, content, fill, in_step, running, take, wait_for
from tests.cli.kit import as_another_user
from tests.store.kit import log_file, scribble


def objects(place):
    return LocalTarget(str(place)).objects()


def manifests(place):
    return [number_of(name) for name in objects(place) if number_of(name) is not None]


@pytest.fixture
def node(tmp_path):
    with running(tmp_path) as group:
        node = group.started[0]
        fill(node, 3 * FILE_SIZE + 1000)
        yield node


@pytest.fixture
def place(tmp_path):
    return tmp_path / "backups"


def test_only_what_is_new_is_copied(node, place):
    first = take(node.config, place)
    manifest, target = first.manifest, open_target(str(place))
    assert (manifest.start_offset, manifest.end_offset) == (0, node.store.max_offset)
    assert content(target, manifest) == node.bytes()
    assert manifest.confirmed_offset == node.store.confirmed_offset
    assert manifest.node.history == node.state.history and manifest.number == 1
    before = {name: os.stat(place / name).st_mtime_ns for name in manifest.objects}

    fill(node, 4 * FILE_SIZE + 5000, b"later" * 100)
    second = take(node.config, place)
    assert second.copied_bytes == node.store.max_offset - manifest.end_offset
    assert second.kept_bytes == manifest.end_offset
    assert second.manifest.log[: len(manifest.log)] == manifest.log
    assert {name: os.stat(place / name).st_mtime_ns for name in before} == before
    assert content(target, second.manifest) == node.bytes()

    third = take(node.config, place)
    assert third.copied_bytes == 0 and third.manifest.log == second.manifest.log
    assert check(place) == third.manifest


def test_many_small_pieces_of_a_log_file_become_one(node, place, monkeypatch):
    monkeypatch.setattr(taking, "_PIECES_MAX", 3)
    counts = []
    for _ in range(6):
        taken = take(node.config, place, keep=1)
        counts.append(len([one for one in taken.manifest.log if one.start >= 3 * FILE_SIZE]))
        node.put(b"more")
    assert counts == [1, 2, 3, 1, 2, 3]
    assert check(place) == taken.manifest
    assert len(objects(place)) == 1 + len(taken.manifest.objects)


def test_a_manifest_names_nothing_outside_its_folders(node, place):
    manifest = take(node.config, place).manifest
    for name in ("log/../../etc/passwd", "/etc/passwd", "log/..", "manifests/00000001.json"):
        piece = msgspec.structs.replace(manifest.log[0], name=name)
        wrong = msgspec.structs.replace(manifest, number=2, log=(piece,))
        (place / "manifests" / "00000002.json").write_bytes(encode_manifest(wrong))
        with pytest.raises(StoreBrokenError, match="it names"):
            find_backup(open_target(str(place)))


def test_old_backups_go_with_what_only_they_need(node, place):
    for number in range(1, 5):
        taken = take(node.config, place, keep=2)
        assert taken.manifest.number == number
        node.put(b"more")
    assert manifests(place) == [3, 4]
    kept = [find_backup(open_target(str(place)), number) for number in (3, 4)]
    needed = {name for one in kept for name in one.objects}
    assert {n for n in objects(place) if number_of(n) is None} == needed
    assert all(verify_backup(open_target(str(place)), n).problems == [] for n in (3, 4))


def test_a_master_that_appends_all_the_time_is_backed_up(node, place):
    ended, failed = threading.Event(), []

    def put():
        try:
            while not ended.is_set() and node.store.max_offset < 30 * FILE_SIZE:
                node.put(*[b"y" * 900] * 5)
        except BaseException as failure:
            failed.append(failure)

    thread = threading.Thread(target=put)
    thread.start()
    try:
        for _ in range(3):
            taken = take(node.config, place)
            check(place)
    finally:
        ended.set()
        thread.join()
    assert not failed
    assert content(open_target(str(place)), taken.manifest) == node.bytes(
        0, taken.manifest.end_offset
    )


def test_a_synchronous_master_is_copied_up_to_what_is_confirmed(tmp_path, place):
    with running(tmp_path, 2) as group:
        master, slave = group.started
        fill(master, 1000)
        in_step(master, slave)
        end = master.store.max_offset
        slave.unfollow()
        master.put(b"on the master alone")
        assert take(master.config, place).manifest.end_offset == end


def test_a_log_that_is_readable_up_to_inside_a_blank_is_copied_up_to_the_blank(node, place):
    """A slave has received a part of the blank at the end of a log file: bytes, not records."""
    blank = last_item(node.bytes(0, FILE_SIZE))
    end = node.store.max_offset
    node.store.set_limits(readable=blank + 10)
    assert take(node.config, place).manifest.end_offset == blank
    assert check(place).end_offset == blank
    node.store.set_limits(readable=end)
    assert take(node.config, place).manifest.end_offset == end
    assert content(open_target(str(place)), check(place)) == node.bytes(0, end)


def last_item(file: bytes) -> int:
    """Return where the last record or blank of a log file begins."""
    at = last = 0
    while at < len(file):
        last, at = at, at + int.from_bytes(file[at : at + 4])
    return last


class Broken(LocalTarget):
    """A target that fails at the n-th new object, after a part of it was written."""

    def __init__(self, path, at, failure):
        super().__init__(str(path))
        self.left, self.failure = at, failure

    @contextlib.contextmanager
    def new(self, name):
        with super().new(name) as writer:
            yield writer
            self.left -= 1
            if not self.left:
                raise self.failure


def take_broken(node, place, at, failure=None):
    failure = failure or OSError(errno.EIO, "broken")
    with Source(node.config) as source, pytest.raises(StoreError) as raised:
        take_backup(node.config, Broken(place, at, failure), source)
    return raised.value


def test_a_run_that_is_broken_off_leaves_the_backup_before_and_is_continued(node, place):
    take(node.config, place)
    fill(node, 7 * FILE_SIZE)
    take_broken(node, place, 3)
    assert manifests(place) == [1] and PARTIAL in objects(place)
    assert check(place).number == 1
    taken = take(node.config, place)
    assert taken.kept_bytes >= 5 * FILE_SIZE, "what was whole when it broke off was copied again"
    assert check(place) == taken.manifest and PARTIAL not in objects(place)
    assert {n for n in objects(place) if number_of(n) is None} <= {
        name for n in (1, 2) for name in find_backup(open_target(str(place)), n).objects
    }


def test_the_first_run_that_is_broken_off_is_no_backup(node, place):
    take_broken(node, place, 2)
    with pytest.raises(UsageError, match="has no backup"):
        find_backup(open_target(str(place)))
    assert take(node.config, place).kept_bytes == FILE_SIZE


def test_a_full_disk_at_the_target(node, place, monkeypatch):
    take(node.config, place)
    fill(node, 5 * FILE_SIZE)
    told = take_broken(node, place, 1, OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(told, StoreFullError) and str(place) in str(told)
    assert check(place).number == 1 and len(objects(place)) == 1 + len(check(place).objects)
    monkeypatch.setattr(LocalTarget, "free_bytes", lambda _self: 1000)
    with pytest.raises(StoreFullError, match="1,000 bytes free"):
        take(node.config, place)
    assert manifests(place) == [1]


class Killed(LocalTarget):
    """A target whose run is killed after its second piece: nothing is removed then."""

    pieces = 0

    @contextlib.contextmanager
    def new(self, name):
        with super().new(name) as writer:
            yield writer
        self.pieces += 1
        if self.pieces == 2:
            raise KeyboardInterrupt


class Small(LocalTarget):
    """A target with so much room for its objects."""

    def __init__(self, path, room):
        super().__init__(path)
        self.room = room

    def free_bytes(self):
        return self.room - sum(self.objects().values())


def test_what_a_killed_run_has_left_keeps_no_later_run_from_its_room(node, place):
    before = take(node.config, place).manifest
    fill(node, 9 * FILE_SIZE)
    with Source(node.config) as source, pytest.raises(KeyboardInterrupt):
        take_backup(node.config, Killed(str(place)), source)
    there = objects(place)
    noted = decode_manifest((place / PARTIAL).read_bytes()).end_offset
    left = [n for n in there if n.startswith(f"log/{noted:020d}-")]
    assert len(left) == 1, "the killed run has left a piece that nothing names"
    room = sum(there.values()) + node.store.readable_offset - noted - 1
    (place / manifest_name(1)).write_bytes(b"torn".ljust(there[manifest_name(1)]))
    with pytest.raises(StoreFullError):
        take(node.config, Small(str(place), room))
    assert objects(place).keys() == there.keys(), "a damaged manifest may need anything"
    (place / manifest_name(1)).write_bytes(encode_manifest(before))
    taken = take(node.config, Small(str(place), room))
    assert taken.kept_bytes == noted and left[0] not in objects(place)
    assert check(place) == taken.manifest


def test_a_torn_manifest_is_no_backup_and_none_before_it_is_taken_for_it(node, place):
    take(node.config, place)
    node.put(b"more")
    taken = take(node.config, place)
    path = place / "manifests" / "00000002.json"
    whole = path.read_bytes()
    for torn in (whole[:-2], whole[: len(whole) // 2], b"", whole.replace(b":2,", b":3,", 1)):
        path.write_bytes(torn)
        for number in (None, 2):
            with pytest.raises(StoreBrokenError, match="cannot be read"):
                find_backup(open_target(str(place)), number)
        assert find_backup(open_target(str(place)), 1).number == 1
    # It keeps its number, and what it may need is not removed.
    assert take(node.config, place).manifest.number == 3
    path.write_bytes(whole)
    assert verify_backup(open_target(str(place)), 2).manifest == taken.manifest
    assert verify_backup(open_target(str(place)), 2).problems == []


def grow_with_a_bad_manifest(node, place, bad):
    """Take backups after the manifest of the first was replaced; return what each held back."""
    take(node.config, place, keep=2)
    path = place / "manifests" / "00000001.json"
    path.write_bytes(bad(path.read_bytes()))
    held = []
    for _ in range(4):
        cut(node, FILE_SIZE, b"x" * 100)  # so none needs the last piece of the one before
        fill(node, 2 * FILE_SIZE)
        held.append(list(take(node.config, place, keep=2, allow_shorter=True).held_back))
    return held


def test_a_damaged_manifest_goes_when_it_would_have_gone(node, place):
    """It ended all cleaning: the target grew until it was full."""
    held = grow_with_a_bad_manifest(node, place, lambda data: data[:50] + b"?" + data[51:])
    assert held == [["manifests/00000001.json"], [], [], []]
    assert manifests(place) == [4, 5]
    kept = [find_backup(open_target(str(place)), number) for number in (4, 5)]
    needed = {name for one in kept for name in one.objects}
    assert {n for n in objects(place) if number_of(n) is None} == needed


def test_a_manifest_of_a_later_version_keeps_all_that_it_may_need(node, place):
    def later(data):
        raw = msgspec.json.encode(msgspec.json.decode(data)["manifest"] | {"format": 2})
        return msgspec.json.encode({"manifest": msgspec.Raw(raw), "xxh3_128": digest(raw)})

    before = take(node.config, place).manifest
    held = grow_with_a_bad_manifest(node, place, later)
    assert held == [["manifests/00000001.json"]] * 4
    assert set(before.objects) <= set(objects(place)) and manifests(place) == [1, 5, 6]


def test_one_run_at_a_time(node, place):
    target = open_target(str(place))
    with target.locked(), pytest.raises(StoreInUseError, match="another backup"):
        take(node.config, place)


def test_a_manifest_that_another_run_has_written_is_not_replaced(node, place):
    class Unlocked(LocalTarget):
        def settle(self):
            super().settle()
            path = place / "manifests" / "00000001.json"
            path.write_bytes(b"another run's")

    with pytest.raises(StoreError, match="another run"):
        take(node.config, Unlocked(str(place)))


class Hooked(Source):
    """A source that calls a function once, when the file with an offset is opened."""

    def __init__(self, config, offset, call):
        super().__init__(config)
        self.offset, self.call = offset, call

    @contextlib.contextmanager
    def opened(self, file):
        with super().opened(file) as opened:
            if self.call is not None and file.start <= self.offset < file.end:
                call, self.call = self.call, None
                call()
            yield opened


def test_retention_that_removes_files_during_a_backup(node, place):
    node.stop()

    def remove():
        for start in (0, FILE_SIZE, 2 * FILE_SIZE):
            os.remove(log_file(node.config.store.root, start))

    with Hooked(node.config, 0, remove) as source:
        taken = take_backup(node.config, open_target(str(place)), source)
    assert taken.manifest.start_offset == 3 * FILE_SIZE
    assert check(place) == taken.manifest
    # The pieces of files that are gone leave with the next backup.
    names = {one.name for one in taken.manifest.log}
    assert {name for name in objects(place) if name.startswith("log/")} == names


def test_what_retention_has_removed_is_left_out_of_the_next_backup(node, place):
    take(node.config, place, keep=1)
    node.stop()
    os.remove(log_file(node.config.store.root, 0))
    taken = take(node.config, place, keep=1)
    assert taken.manifest.start_offset == FILE_SIZE and taken.copied_bytes == 0
    assert check(place) == taken.manifest


def cut(node, offset, body):
    """Cut the node's log as a rewind does, and let it go on in a new epoch."""
    node.member.step_down()
    node.ha.close_epoch("a test")
    with node.member.gate.lock:
        cut_back(
            node.store, node.state, offset, len(node.state.history), accept_loss=True, why="a test"
        )
    node.promote()
    fill(node, offset + FILE_SIZE, body)


def test_a_cut_during_a_backup(node, place):
    old, at = node.bytes(), 2 * FILE_SIZE
    with Hooked(node.config, 3 * FILE_SIZE, lambda: cut(node, at, b"z" * 500)) as source:
        taken = take_backup(node.config, open_target(str(place)), source)
    assert taken.manifest.end_offset == node.store.readable_offset
    now = node.bytes()
    assert content(open_target(str(place)), taken.manifest) == now and now[: len(old)] != old
    assert taken.manifest.node.history == node.state.history and len(node.state.history) == 2
    assert check(place) == taken.manifest


def cut_within_its_epoch(node, offset, body):
    """Cut the node's log as a slave does that has what its master's disk had lost: the epoch goes
    on, with what the master has written since it resumed it.
    """
    node.member.step_down()
    node.ha.close_epoch("a test")
    state, gate = node.state, node.member.gate
    with gate.lock:
        cut_back(node.store, state, offset, len(state.history), accept_loss=True, why="a test")
        entry = resumed_entry(state.history[-1], (), offset, now_s=7)
        state.take_entries((), (*state.history[:-1], entry))
        node._open(entry)
        node.member.open_epoch = entry.epoch
        gate.open(entry.epoch)
    fill(node, offset + FILE_SIZE, body)


def test_a_cut_within_an_epoch_during_a_backup(node, place):
    old, at = node.bytes(), 2 * FILE_SIZE

    def change():
        cut_within_its_epoch(node, at, b"z" * 500)
        fill(node, len(old))

    with Hooked(node.config, 3 * FILE_SIZE, change) as source:
        taken = take_backup(node.config, open_target(str(place)), source)
    now = node.bytes()
    assert content(open_target(str(place)), taken.manifest) == now and now[: len(old)] != old
    assert len(node.state.history) == 1 and check(place) == taken.manifest


def test_a_master_that_resumes_its_epoch_does_not_disturb_a_backup(node, place):
    """Nothing is cut: the slave that is backed up has a part of what the master had then."""

    def resumes():
        entry = resumed_entry(node.state.history[-1], (), node.store.max_offset, now_s=7)
        node.state.take_entries((), (*node.state.history[:-1], entry))
        fill(node, 4 * FILE_SIZE)

    with Hooked(node.config, FILE_SIZE, resumes) as source:
        before = source.see()
        taken = take_backup(node.config, open_target(str(place)), source)
    assert taken.manifest.node.history == before.node.history != node.state.history
    assert check(place) == taken.manifest


def test_a_cut_between_two_backups(node, place):
    first = take(node.config, place).manifest
    cut(node, 2 * FILE_SIZE, b"z" * 500)
    second = take(node.config, place)
    assert second.kept_bytes == 2 * FILE_SIZE
    assert content(open_target(str(place)), second.manifest) == node.bytes()
    target = open_target(str(place))
    assert all(verify_backup(target, n).problems == [] for n in (1, 2)), "each has its pieces"
    assert find_backup(target, 1) == first


def test_a_cut_that_goes_on_is_waited_for(node, place, monkeypatch):
    monkeypatch.setattr(taking, "_PAUSE_S", 0)
    node.state.save(intent=CutIntent(FILE_SIZE, 1))
    with pytest.raises(StoreError, match="a cut is going on"):
        take(node.config, place)
    node.state.save(intent=None)
    taken = take(node.config, place)
    assert check(place) == taken.manifest


@pytest.mark.parametrize("changes", [{"cluster": "other"}, {"group": "other"}])
def test_the_target_of_another_group_is_refused(node, place, tmp_path, changes):
    take(node.config, place)
    with running(tmp_path / "other", **changes) as group:
        other = group.started[0]
        other.put(b"theirs")
        with pytest.raises(UsageError, match="another group"):
            take(other.config, place)
    assert check(place).number == 1


def test_the_target_of_another_group_of_the_same_name_is_refused(node, place, tmp_path):
    """Their epochs have the same numbers."""
    take(node.config, place)
    with running(tmp_path / "other") as group:
        other = group.started[0]
        fill(other, node.store.max_offset + FILE_SIZE, b"theirs")
        assert other.state.history[0].epoch == node.state.history[0].epoch
        with pytest.raises(UsageError, match="no store is known to both"):
            take(other.config, place)


def test_a_folder_with_other_things_is_refused(node, place):
    place.mkdir()
    (place / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"holiday\.jpg"):
        take(node.config, place)


def test_other_bytes_under_the_same_epochs_are_refused(node, place):
    taken = take(node.config, place).manifest
    node.stop()
    # Both stores say that they have the same log; the record before the end differs.
    path = log_file(node.config.store.root, 3 * FILE_SIZE)
    scribble(path, taken.end_offset - 3 * FILE_SIZE - 100, b"!")
    with pytest.raises(UsageError, match="other bytes before offset"):
        take(node.config, place)
    assert check(place) == taken


def test_any_node_of_the_group_goes_on_with_the_backups_of_another(tmp_path, place):
    with running(tmp_path, 2) as group:
        master, slave = group.started
        fill(master, 2 * FILE_SIZE)
        in_step(master, slave)
        first = take(slave.config, place).manifest
        fill(master, 3 * FILE_SIZE)
        in_step(master, slave)
        taken = take(master.config, place)
        assert taken.kept_bytes == first.end_offset
        slave.unfollow()
        slave_config = slave.config
        fill(master, 3 * FILE_SIZE + 5000)
        # Asynchronous, so the master alone is further.
        master.ha.set_sync(False)
        wait_for(lambda: master.store.readable_offset == master.store.max_offset)
        assert take(master.config, place).manifest.end_offset == master.store.max_offset
        with pytest.raises(UsageError, match="has less of the log"):
            take(slave_config, place)
        shorter = take(slave_config, place, allow_shorter=True)
        assert shorter.manifest.end_offset == slave.store.readable_offset
        assert shorter.copied_bytes < FILE_SIZE


def test_damage_in_the_log_is_no_backup(node, place):
    node.stop()
    scribble(log_file(node.config.store.root, FILE_SIZE), 500, b"????")
    with pytest.raises(StoreBrokenError, match="the log is damaged"):
        take(node.config, place)
    assert manifests(place) == []


def test_a_damaged_size_that_points_beyond_the_end_is_no_end_of_the_log(node, place):
    """The record's size says that it ends where nothing is written yet, in the last log file."""
    node.stop()
    with StoreReader(node.config.store.root) as reader:
        records = [one for one, _ in reader.raw_records(3 * FILE_SIZE)]
    bad = records[0] - 3 * FILE_SIZE
    size = FILE_SIZE - bad - 100
    assert len(records) > 1 and bad + size > node.store.readable_offset % FILE_SIZE
    scribble(log_file(node.config.store.root, 3 * FILE_SIZE), bad, size.to_bytes(4))
    with pytest.raises(StoreBrokenError, match="the log is damaged"):
        take(node.config, place)
    assert manifests(place) == []


def test_stores_that_cannot_be_backed_up(tmp_path, node, place):
    config = node.config
    empty = msgspec.structs.replace(
        config, store=msgspec.structs.replace(config.store, root=str(tmp_path / "empty"))
    )
    with pytest.raises(UsageError, match="no store of a node that has run"):
        take(empty, place)
    assert not place.exists() and config.role is Role.SYNC_MASTER
    node.stop()
    folder = os.path.join(config.store.root, "hastore")
    os.chmod(folder, 0)
    try:
        with as_another_user(), pytest.raises(PermissionError):
            Source(config)
    finally:
        os.chmod(folder, 0o700)


@pytest.mark.parametrize("what", ["piece", "missing", "table", "short"])
def test_damage_in_the_target_is_found(node, place, what):
    REAL.replace_bytes(f"{node.config.store.root}/hastore/positions", b"positions")
    manifest = take(node.config, place).manifest
    target = open_target(str(place))
    path = place / manifest.log[1].name
    if what == "table":
        path = place / next(one.name for one in manifest.files if one.path.endswith("positions"))
    data = path.read_bytes()
    if what == "missing":
        path.unlink()
    elif what == "short":
        path.write_bytes(data[:-1])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = verify_backup(target)
    assert len(found.problems) == 1 and path.name in found.problems[0]


def test_an_empty_log_is_backed_up(tmp_path, place):
    with running(tmp_path) as group:
        node = group.started[0]
        manifest = take(node.config, place).manifest
        assert (manifest.log, manifest.end_offset) == ((), 0)
        node.put(b"first")
        assert take(node.config, place).copied_bytes == node.store.max_offset


def test_a_place_that_fsspec_reaches(node):
    pytest.importorskip("fsspec")
    url = f"memory://backups/{id(node)}"
    first = take(node.config, url)
    fill(node, 5 * FILE_SIZE)
    second = take(node.config, url, keep=1)
    assert second.kept_bytes == first.manifest.end_offset
    target = open_target(url)
    found = verify_backup(target)
    assert found.problems == [] and content(target, found.manifest) == node.bytes()
    assert [number_of(name) for name in target.objects() if number_of(name)] == [2]
    target.remove(found.manifest.log[0].name)
    assert "is missing" in verify_backup(target).problems[0]


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "FILE://localhost{}"])
def test_a_folder_may_be_given_as_a_url(tmp_path, monkeypatch, form):
    """In every form of it: else the backups would be in the working directory."""
    monkeypatch.chdir(tmp_path)
    assert open_target(form.format(tmp_path / "a b%20")).name == str(tmp_path / "a b%20")
    for wrong in ("file://backups/a", "file:backups"):
        with pytest.raises(UsageError, match="write the whole path, file:///FOLDER"):
            open_target(wrong)


def test_a_password_in_a_url_is_in_no_text(monkeypatch):
    """Logs, and mails of timers, keep these."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    url = "memory://me:s3cret@host/x"

    def fail(*_args, **_options):
        raise OSError(f"cannot reach {url}")

    target = open_target(url)
    monkeypatch.setattr(MemoryFileSystem, "find", fail)
    with pytest.raises(StoreError) as failed:
        target.objects()
    assert str(failed.value).count("memory://me:***@host/x") == 2, failed.value
    with pytest.raises(UsageError) as refused:
        open_target("nothing://me:s3cret@host/x")
    assert "s3cret" not in f"{failed.value} {refused.value}"


def test_a_url_whose_place_is_gone_is_named_and_not_the_log(node, monkeypatch):
    """As a bucket that nobody has made: several file systems say then that no file is found."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    def gone(*_args, **_options):
        raise FileNotFoundError("The specified bucket does not exist")

    url = f"memory://gone/{id(node)}"
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", gone)
        with pytest.raises(StoreError, match=f"{url}: .*bucket does not exist"):
            take(node.config, url)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", gone)
        with pytest.raises(StoreError, match=f"{url}: .*bucket does not exist"):
            take(node.config, url)
    assert take(node.config, url).manifest.end_offset == node.store.max_offset


def test_a_pace_bounds_the_rate_and_makes_up_for_no_time_lost():
    """At 10 MB a second; another task holds the copy up for three seconds after the first one."""
    now, waits = [0.0], []

    class Clock(SystemClock):
        def monotonic_ms(self):
            return now[0] * 1e3

    def wait(seconds):
        waits.append(seconds)
        now[0] += seconds

    pace = Pace(10e6, Clock(), wait)
    assert pace.chunk == 500_000  # 20 a second
    assert (Pace(1.0).chunk, Pace(1e12).chunk, Pace(None).chunk) == (65_536, 4 << 20, 4 << 20)
    for _ in range(20):
        pace.took(pace.chunk)
    assert now[0] == pytest.approx(1.0)
    now[0] += 3.0
    before = now[0]
    for _ in range(20):
        pace.took(pace.chunk)
    assert now[0] - before == pytest.approx(0.95)  # the share of one read is not waited for
    unbounded = Pace(None, Clock(), wait)
    waits.clear()
    unbounded.took(1 << 40)
    assert not waits


def test_the_log_is_read_at_its_pace(node, place):
    read = []

    class Noting(Pace):
        def took(self, size):
            read.append(size)

    taken = take(node.config, place, pace=Noting(1.0))
    assert sum(read) == node.store.max_offset == taken.copied_bytes
    assert max(read) <= Noting(1.0).chunk
    assert content(open_target(str(place)), check(place)) == node.bytes()


def test_a_long_object_is_synced_in_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_SYNC_BYTES", 1000)
    synced = []

    class Noting(RealFileSystem):
        def create_new(self, path):
            file = super().create_new(path)
            sync = file.sync
            file.sync = lambda: (synced.append(size_of(REAL, path)), sync())
            return file

    target = LocalTarget(str(tmp_path), Noting())
    with target.locked(), target.new("log/x") as writer:
        for _ in range(7):
            writer.write(bytes(400))
    assert synced == [1200, 2400, 2800]


def test_a_listing_beside_a_run_that_removes_old_backups_leaves_them_out(node, place):
    take(node.config, place)
    names = objects(place)

    class Late(RealFileSystem):
        """Lists a folder as it was a moment ago."""

        def list_dir(self, path):
            return sorted({*super().list_dir(path), "00000099.json", "00000007.json.tmp"})

    assert LocalTarget(str(place), Late()).objects() == names
    found, bad = read_manifests(LocalTarget(str(place)), {**names, "manifests/00000099.json": 9})
    assert [one.number for one in found] == [1] and bad == {}


@pytest.mark.parametrize("folder", ["log/", "state/"])
def test_a_backup_that_is_removed_while_it_is_read_is_not_called_damaged(
    node, place, tmp_path, monkeypatch, folder
):
    monkeypatch.setattr(taking, "_PIECES_MAX", 1)  # the last log file is copied anew each time
    state = os.path.join(node.config.store.root, "hastore", "topics")
    with open(state, "wb") as file:
        file.write(b"1")
    take(node.config, place)

    class Removed(LocalTarget):
        """Another run removes the backup before its first object of the folder is read."""

        def read(self, name, size, position=0):
            if name.startswith(folder) and find_backup(LocalTarget(self.name)).number == 1:
                with open(state, "wb") as file:
                    file.write(b"2")
                fill(node, node.store.max_offset + 1000)
                take(node.config, self.name, keep=1)
            return super().read(name, size, position)

    with pytest.raises(HastoreError, match="backup 1 was removed while it was read") as told:
        verify_backup(Removed(str(place)))
    assert not isinstance(told.value, StoreError), "no damage"
    assert verify_backup(Removed(str(place))).problems == []
    (piece, *_) = find_backup(LocalTarget(str(place))).log
    os.remove(place / piece.name)
    assert verify_backup(Removed(str(place))).problems[0] == f"{piece.name} is missing"
