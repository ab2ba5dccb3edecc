"""Replay with restarts, cuts, kills, power losses and full disks equals a replay from scratch."""

import errno
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from hastore.fs.filesystem import REAL, RealFileSystem
from hastore.fs.protocols import File
from hastore.record.properties import keys_of
from hastore.store import replay as replay_pace
from hastore.store import replay as replay_service
from hastore.store.derived import consume_queue
from hastore.store.derived.contract import Dispatched
from hastore.store.derived.unit_files import UnitFiles
from hastore.store.replay import ReplayPace
from tests.store import kit
from tests.store.derived_files import BOOT, UNITS, Derived, query, rebuilt
from tests.store.logs import START_MS, MemoryLog, fill

OTHER_BOOT = bytes(16)


def assert_as_rebuilt(derived: Derived, log: MemoryLog, root: Path) -> None:
    expected = rebuilt(root, log)
    files = derived.files()
    assert files.keys() == expected.keys()
    assert [path for path in expected if files[path] != expected[path]] == []


@pytest.fixture(params=range(6))
def seed(request: pytest.FixtureRequest) -> int:
    print(f"seed {request.param}")
    return int(request.param)


def test_a_restart_continues_where_replay_was(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 500, keys=2)
    derived = Derived.over(tmp_path / "a", log)
    assert derived.build.replay() == log.max_offset
    derived.build.close()
    derived = Derived.over(tmp_path / "a", log)
    assert derived.build.dispatched_offset == log.max_offset
    assert_as_rebuilt(derived, log, tmp_path / "b")


def test_truncate_matches_a_rebuild(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    log = MemoryLog()
    records = fill(log, 900, keys=chance.choice((0, 1, 3)), queues=range(chance.choice((1, 3))))
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    for round_ in range(4):
        at = chance.randrange(len(records)) if round_ < 3 else 0
        end = records[at].physical_offset
        del records[at:]
        log.cut(end)
        derived.build.truncate(end)
        assert derived.build.dispatched_offset == end
        if records:
            assert_as_rebuilt(derived, log, tmp_path / f"b{round_}")
        if not records:
            break
    assert derived.queues.topics() == {} if not records else True
    derived.build.close()


def test_killed_at_any_write(tmp_path: Path, seed: int) -> None:
    """A replay killed in the middle of a batch ends with the same files."""
    chance = random.Random(seed)
    log = MemoryLog()
    fill(log, 700, keys=2, queues=(0, 1, 5))
    end = log.max_offset

    class Killed(BaseException):
        pass

    left = chance.randrange(1, 60)

    class DyingFile:
        def __init__(self, file: File) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def pwrite(self, data: bytes, position: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self._file.pwrite(data[: chance.randrange(len(data) + 1)], position)
                raise Killed
            self._file.pwrite(data, position)

    class DyingSystem(RealFileSystem):
        def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
            return DyingFile(super().open(path, create=create, writable=writable))  # type: ignore

    derived = Derived.over(tmp_path / "a", log, fs=DyingSystem())
    try:
        for shown in range(0, end, 5000):
            log.max_offset = shown
            derived.build.replay()
    except Killed:
        pass
    log.max_offset = end - chance.randrange(3000)
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    assert_as_rebuilt(derived, log, tmp_path / "b")


def flush_on_the_way(root: Path, log: MemoryLog, offset: int, units: int = UNITS) -> None:
    """Replay a log into the folder `a`; `flushed` is a copy of it as of the flush at an offset."""
    end, log.max_offset = log.max_offset, offset
    derived = Derived.over(root / "a", log, units=units)
    derived.build.replay()
    derived.build.flush()
    shutil.copytree(root / "a", root / "flushed")
    log.max_offset = end
    derived.build.replay()
    derived.build.close()


def test_power_loss_keeps_what_was_flushed(tmp_path: Path, seed: int) -> None:
    """Random pages written after the flush are lost, and the end of the log as well."""
    chance = random.Random(seed)
    log = MemoryLog()
    records = fill(log, 1200, keys=2, queues=(0, 1))
    flush_on_the_way(tmp_path, log, records[chance.randrange(300, 700)].physical_offset)
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_dir() or path.name == "replay":
            continue
        before = tmp_path / "flushed" / path.relative_to(tmp_path / "a")
        old = before.read_bytes() if before.exists() else bytes(path.stat().st_size)
        new = bytearray(path.read_bytes())
        for at in range(0, len(new), 512):  # smaller than a page: more pieces
            if chance.random() < 0.5:
                new[at : at + 512] = old[at : at + 512]
        path.write_bytes(new)
    shutil.copy(tmp_path / "flushed" / "hastore" / "replay", tmp_path / "a" / "hastore" / "replay")
    log.max_offset = records[chance.randrange(750, 1200)].physical_offset
    derived = Derived.over(tmp_path / "a", log, boot_id=OTHER_BOOT)
    derived.build.replay()
    assert_as_rebuilt(derived, log, tmp_path / "b")


@pytest.mark.parametrize("start", [0, (1 << 32) + 4096])
@pytest.mark.parametrize(
    ("synced", "units"),
    [*((number, 300) for number in (2, 25, 28, 51, 53, 76, 79, 102)), (51, 52), (102, 103)],
)
def test_power_loss_tears_the_first_unit_that_was_not_synced(
    tmp_path: Path, synced: int, units: int, start: int
) -> None:
    """A half of its offset named a record below what was synced, and the other half was kept."""
    log = MemoryLog(start=start)
    records = fill(log, synced + 20, queues=(0,))
    flush_on_the_way(tmp_path, log, records[synced].physical_offset, units)
    wanted = rebuilt(tmp_path / "b", log, units=units)
    torn = 0
    for path in sorted((tmp_path / "a").rglob("*")):
        if path.is_dir() or path.name == "replay":
            continue
        new = path.read_bytes()
        flushed = tmp_path / "flushed" / path.relative_to(tmp_path / "a")
        old = flushed.read_bytes() if flushed.exists() else bytes(len(new))
        places = [at for at in range(0, len(new), 512) if new[at : at + 512] != old[at : at + 512]]
        for at in places:
            for one, other in ((new, old), (old, new)):
                shutil.copytree(tmp_path / "flushed", tmp_path / "c")
                data = one[:at] + other[at : at + 512] + one[at + 512 :]
                (tmp_path / "c" / path.relative_to(tmp_path / "a")).write_bytes(data)
                derived = Derived.over(tmp_path / "c", log, boot_id=OTHER_BOOT, units=units)
                derived.build.replay()
                for number, record in enumerate(records):
                    found = query(derived.index, "Topic", f"k{number}-0")
                    assert found == [record.physical_offset], (path, at, number)
                derived.build.close()
                assert derived.files() == wanted, (path, at)
                shutil.rmtree(tmp_path / "c")
                torn += 1
    assert torn >= 4


@pytest.mark.parametrize("boot", [BOOT, OTHER_BOOT], ids=["kill", "power loss"])
def test_a_unit_that_has_rotted_takes_no_other_one_along(tmp_path: Path, boot: bytes) -> None:
    """Its offset is no longer below the next one's; a torn unit is the last one."""
    log = MemoryLog()
    records = fill(log, 130, queues=(0,))
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    for path, unit in (("consumequeue", 20 * 50), ("index", 440 + 20 * 51 + 4)):
        (file,) = (one for one in (tmp_path / path).rglob("*") if one.is_file())
        data = bytearray(file.read_bytes())
        data[unit + 6] ^= 0x10
        file.write_bytes(data)
    again = Derived.over(tmp_path, log, boot_id=boot)
    again.build.replay()
    assert again.queues.queue_range("Topic", 0) == (0, 130)
    for number in (49, 51, 129):
        assert query(again.index, "Topic", f"k{number}-0") == [records[number].physical_offset]


def test_other_sizes_rebuild_and_keep_the_queue_end(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 400)
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    derived.build.close()
    derived = Derived.over(tmp_path / "a", log, units=77, slots=50, entries=120)
    derived.build.replay()
    expected = rebuilt(tmp_path / "b", log, units=77, slots=50, entries=120)
    assert derived.files() == expected
    assert derived.queues.topics() == {"Topic": {0: (0, 200), 1: (0, 200)}}


@pytest.mark.parametrize("end", ["kill in the first batch", "power loss"])
def test_a_start_that_finds_nothing_and_ends_early_leaves_the_rest_to_the_next(
    tmp_path: Path, end: str
) -> None:
    """What replay's file says of the lost queues must not count for those that are half built."""
    log = MemoryLog()
    fill(log, 900, keys=2)
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    shutil.rmtree(tmp_path / "a" / "consumequeue")
    shutil.rmtree(tmp_path / "a" / "index")
    whole, log.max_offset = log.max_offset, log.max_offset // 2
    if end == "power loss":  # all that was written by then happens to be on the disk
        derived = Derived.over(tmp_path / "a", log)
        derived.build.replay()
        derived.build.close()
    else:
        log.max_offset = whole
        derived = Derived.over(tmp_path / "a", log)
        log.max_offset = whole // 2
        with log.view(0, log.max_offset) as view:
            batch = derived.build._walk(view, 0, log.file_size).batch
        derived.queues.dispatch(batch)
        derived.index.dispatch(batch)
        derived.build.close()
    log.max_offset = whole
    boot = OTHER_BOOT if end == "power loss" else BOOT
    derived = Derived.over(tmp_path / "a", log, boot_id=boot)
    derived.build.replay()
    assert_as_rebuilt(derived, log, tmp_path / "b")


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_kill_while_a_damaged_index_is_removed(tmp_path: Path, kept: int) -> None:
    log = MemoryLog()
    fill(log, 700, keys=2)
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    derived.build.close()
    files = sorted((tmp_path / "a" / "index").iterdir())
    assert len(files) == 4
    files[-1].write_bytes(bytes(10))

    class Killed(BaseException):
        pass

    class DyingSystem(RealFileSystem):
        def remove(self, path: str) -> None:
            if len(list((tmp_path / "a" / "index").iterdir())) == kept:
                raise Killed
            super().remove(path)

    with pytest.raises(Killed):
        Derived.over(tmp_path / "a", log, fs=DyingSystem())
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    assert_as_rebuilt(derived, log, tmp_path / "b")


def test_queue_end_outlives_its_records(tmp_path: Path) -> None:
    """After retention removed every record of a queue, its next queue offset is still known."""
    log = MemoryLog()
    records = fill(log, 1000)
    derived = Derived.over(tmp_path / "a", log)
    derived.build.replay()
    log.min_offset = log.max_offset
    derived.build.delete_before(log.min_offset)
    assert derived.queues.topics() == {"Topic": {0: (500, 500), 1: (500, 500)}}
    derived.build.close()
    (tmp_path / "a" / "hastore" / "replay").unlink()
    derived = Derived.over(tmp_path / "a", log)
    assert derived.queues.queue_range("Topic", 0) == (500, 500)
    assert len(records) == 1000


def test_replay_goes_on_while_retention_looks_at_many_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 40,000 queues it stood still for 0.65 s, and consumers waited for new records."""
    monkeypatch.setattr(consume_queue, "_DELETE_STEP", 1, raising=False)
    log = MemoryLog()
    fill(log, 40, queues=(0, 1, 2))
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    build, offset = derived.build, log.max_offset
    real, dispatched = UnitFiles.delete_before, []

    def look(files: UnitFiles, min_offset: int) -> None:
        real(files, min_offset)
        dispatched.append(build.dispatched_offset)
        if len(dispatched) == 1:
            log.append(topic="Topic", queue_id=3)
            build.notify()
            until(lambda: build._held)  # by the end of this step

    monkeypatch.setattr(UnitFiles, "delete_before", look)
    build.start()
    until(lambda: build.idle)
    build.delete_before(1)
    assert dispatched == [offset, log.max_offset, log.max_offset]
    assert derived.queues.queue_range("Topic", 0) == (1, 14)
    build.stop()
    build.close()


def test_a_full_disk_stops_replay_until_there_is_room(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 900, keys=2)
    room = 5

    class FullFile:
        def __init__(self, file: File) -> None:
            self._file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def pwrite(self, data: bytes, position: int) -> None:
            nonlocal room
            if room <= 0:
                self._file.pwrite(data[: len(data) // 2], position)
                raise OSError(errno.ENOSPC, "No space left on device", self._file.path)
            room -= 1
            self._file.pwrite(data, position)

    class FullSystem(RealFileSystem):
        def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
            return FullFile(super().open(path, create=create, writable=writable))  # type: ignore

    derived = Derived.over(tmp_path / "a", log, fs=FullSystem())
    build = derived.build
    build.start()
    deadline = time.monotonic() + 60
    while build.blocked_reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert build.blocked_reason is not None and "No space left" in build.blocked_reason
    assert build.dispatched_offset < log.max_offset
    room = 1 << 30
    assert build.wait_dispatched(log.max_offset, 60)
    assert build.blocked_reason is None
    assert build.stop(60)
    assert_as_rebuilt(derived, log, tmp_path / "b")


def test_the_thread_follows_appends_cuts_and_resets(tmp_path: Path) -> None:
    log = MemoryLog()
    seen: list[int] = []
    derived = Derived.over(tmp_path / "a", log, on_dispatched=seen.append)
    build = derived.build
    build.start()
    records = fill(log, 100)
    build.notify()
    assert build.wait_dispatched(log.max_offset, 60)
    assert seen[-1] == log.max_offset
    with build.paused():
        cut = records[50].physical_offset
        log.cut(cut)
        build.truncate(cut)
    assert build.dispatched_offset == cut
    assert not build.wait_dispatched(cut + 1, 0.05)
    assert derived.queues.queue_range("Topic", 0) == (0, 25)
    with build.paused():
        shutil.rmtree(tmp_path / "a" / "consumequeue")
        shutil.rmtree(tmp_path / "a" / "index")
        log.data.clear()
        log.base = log.min_offset = log.max_offset = 65536
        build.reset(65536)
    fill(log, 30)
    build.notify()
    assert build.wait_dispatched(log.max_offset, 60)
    assert build.stop(60) and not build.alive
    assert_as_rebuilt(derived, log, tmp_path / "b")


def test_notify_wakes_an_idle_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `notify` replay would look once an hour here."""
    monkeypatch.setattr(replay_service, "_IDLE_S", 3_600.0)
    log = MemoryLog()
    derived = Derived.over(tmp_path / "a", log)
    derived.build.start()
    for _ in range(20):
        time.sleep(0.005)  # most of the time replay is in its long sleep now
        fill(log, 1)
        derived.build.notify()
        end = time.monotonic() + 60
        while derived.build.dispatched_offset < log.max_offset:  # wait_* would wake it too
            assert time.monotonic() < end
            time.sleep(0.001)
    derived.build.stop()


def test_replay_yields_to_a_bulk_load_but_not_to_a_waiting_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (replay_service, replay_pace):
        monkeypatch.setattr(module, "BULK_BYTES", 4_000)
        monkeypatch.setattr(module, "VIEW_BYTES", 4_000)
    monkeypatch.setattr(replay_pace, "_GROWING_BYTES", 1)
    monkeypatch.setattr(replay_pace, "_REST", 1e9)
    monkeypatch.setattr(replay_pace, "_REST_MAX_S", 30.0)
    log = MemoryLog(file_size=1 << 20)
    records = fill(log, 2_000)
    end = log.max_offset
    log.max_offset = records[100].physical_offset
    derived = Derived.over(tmp_path / "a", log)
    derived.queues.dispatch = grow(log, end, derived.queues.dispatch)  # type: ignore
    derived.build.start()
    time.sleep(0.3)
    assert 0 < derived.build.dispatched_offset < log.max_offset
    assert derived.build.wait_dispatched(records[1_000].physical_offset, 60)
    assert derived.build.stop(60)


@pytest.mark.parametrize("shape", ["large", "alike", "many"])
def test_a_step_of_replay_has_a_bounded_number_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """RocketMQ stores records with thousands of keys, and a slave replays them beside its readers.

    A step ends after KEYS_MAX keys or one record; the files are as after steps without a bound.
    """
    log = MemoryLog(file_size=1 << 22)
    if shape == "large":  # a few records have many keys
        for number in range(20):
            fill_keys(log, 1, 4_000, number)
            fill_keys(log, 30, 1, number)
    elif shape == "alike":
        fill_keys(log, 60, 3_000, 0)
    else:  # as many as a client may put, in many records
        fill_keys(log, 1_500, 64, 0)
    sizes = {"slots": 1_000, "entries": 1 << 19, "units": 3_000}
    whole = Derived.over(tmp_path / "whole", log, **sizes)
    with monkeypatch.context() as patch:
        patch.setattr(replay_service, "KEYS_MAX", 1 << 40)
        assert whole.build.replay() == log.max_offset
    monkeypatch.setattr(replay_service, "KEYS_MAX", 10_000)
    derived = Derived.over(tmp_path / "steps", log, **sizes)
    steps: list[tuple[int, int]] = []
    real = derived.index.dispatch

    def counting(batch: Sequence[Dispatched]) -> None:
        steps.append((len(batch), sum(len(keys_of(record.properties)) for record in batch)))
        real(batch)

    derived.index.dispatch = counting  # type: ignore[method-assign]
    assert derived.build.replay() == log.max_offset
    assert all(keys <= 10_000 or records == 1 for records, keys in steps), steps
    assert len(steps) < 60 and sum(keys for _, keys in steps) > 80_000
    for each in (derived, whole):
        each.build.close()
    assert derived.files() == whole.files()


def fill_keys(log: MemoryLog, count: int, keys: int, first: int) -> None:
    names = " ".join(f"{first % 10}{key:04d}" for key in range(keys)).encode()
    for _ in range(count):
        log.append(properties=b"KEYS\x01" + names + b"\x02", store_timestamp_ms=START_MS)


def test_after_a_step_with_many_keys_replay_rests_as_long_as_it_took() -> None:
    pace = ReplayPace(0.001, lambda: False)
    assert pace.rest_s(1 << 21, 0, 50.0) == 0.0
    assert pace.rest_s(1 << 21, 0, 50.0, dense=True) == 0.05
    assert pace.rest_s(1 << 29, 1 << 20, 50.0, dense=True) == 0.05
    assert pace.rest_s(1 << 21, 0, 5_000.0, dense=True) == 0.1  # a slow disk


def test_small_appends_gather_unless_readers_wait_for_them() -> None:
    waiting = False
    pace = ReplayPace(0.001, lambda: waiting)
    assert [pace.rest_s(0, 0, 0.1) for _ in range(5)] == [0.002, 0.004, 0.008, 0.01, 0.01]
    assert pace.linger_s() == 0.01
    waiting = True
    assert pace.linger_s() == 0.001
    assert pace.rest_s(0, 0, 0.1) == 0.001
    assert pace.rest_s(0, 0, 0.5) == 0.0045  # still throttled to 10 % of the time
    waiting = False
    pace.quiet()
    assert pace.linger_s() == 0.001


def test_records_that_come_one_by_one_do_not_wait_if_a_reader_waits() -> None:
    waiting = True
    pace = ReplayPace(0.001, lambda: waiting)
    assert pace.linger_s() == 0.0
    assert pace.rest_s(0, 0, 0.1, records=4) == 0.0 and pace.linger_s() == 0.0
    assert pace.rest_s(0, 0, 0.1, records=5) == 0.001 and pace.linger_s() == 0.001  # a load
    assert pace.rest_s(700, 700, 0.1, records=1) == 0.001  # something came meanwhile
    assert pace.rest_s(0, 0, 5.0, records=1) == 0.0
    waiting = False
    pace.quiet()
    assert pace.rest_s(0, 0, 0.1, records=1) == 0.002 and pace.linger_s() == 0.002


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_put_is_dispatched_when_it_is_confirmed_if_a_reader_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_service, "_HOLD_S", 600.0)
    with kit.opened(tmp_path) as store:
        store.hooks.readers_wait = lambda: True
        for tell in (True, False):
            before = store.dispatched_offset
            until(lambda: store.replay.idle)
            kit.put(store, kit.message(1))
            until(lambda: store.replay.holds)
            assert store.dispatched_offset == before
            store.set_limits(readable=store.max_offset, tell=tell)
            if not tell:
                assert store.replay.holds and store.dispatched_offset == before
                store.tell_readers()
            until(lambda: store.dispatched_offset == store.max_offset)
        with store.log.view(0, store.max_offset) as view:
            copy = bytes(view)
        with kit.opened(tmp_path / "slave") as slave:  # nobody knows when it is confirmed
            slave.hooks.readers_wait = lambda: True
            slave.append_replica(0, copy)
            until(lambda: slave.dispatched_offset == len(copy))


def test_a_put_that_nobody_confirms_is_dispatched_all_the_same(tmp_path: Path) -> None:
    with kit.opened(tmp_path) as store:
        store.hooks.readers_wait = lambda: True
        kit.put(store, kit.message(1))
        until(lambda: store.dispatched_offset == store.max_offset)
        assert store.readable_offset == 0


def grow(log: MemoryLog, end: int, dispatch: Callable[[object], None]) -> Callable[[object], None]:
    def dispatch_and_grow(batch: object) -> None:
        dispatch(batch)
        log.max_offset = min(end, log.max_offset + 20_000)

    return dispatch_and_grow


def test_garbage_stops_replay_with_a_reason(tmp_path: Path) -> None:
    log = MemoryLog()
    records = fill(log, 10)
    log.data += b"\x7f" * 200
    log.max_offset += 200
    derived = Derived.over(tmp_path / "a", log)
    derived.build.start()
    end = records[-1].physical_offset + records[-1].size
    assert derived.build.wait_dispatched(end, 60)
    deadline = time.monotonic() + 60
    while derived.build.blocked_reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert f"offset {end}" in (derived.build.blocked_reason or "")
    assert derived.build.alive
    log.cut(end)
    derived.build.truncate(end)
    fill(log, 5, queues=(7,))
    assert derived.build.wait_dispatched(log.max_offset, 60)
    derived.build.stop()


def test_an_unreadable_sector_is_told_until_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_service, "_RETRY_S", 0.01)
    log = MemoryLog()
    bad = fill(log, 100)[50].physical_offset
    view, is_bad, told = log.view, True, threading.Semaphore(0)

    def read(offset: int, size: int) -> AbstractContextManager[memoryview]:
        if is_bad and offset <= bad < offset + size:
            raise OSError(errno.EIO, "Input/output error")
        return view(offset, size)

    def note(offset: int) -> None:
        assert bad <= offset < log.max_offset
        told.release()

    monkeypatch.setattr(log, "view", read)
    derived = Derived.over(tmp_path / "a", log, on_damage=note)
    derived.build.start()
    for _ in range(3):
        assert told.acquire(timeout=60)
    assert "Input/output error" in (derived.build.blocked_reason or "")
    is_bad = False
    assert derived.build.wait_dispatched(log.max_offset, 60)
    derived.build.stop()


def test_a_record_larger_than_a_view(tmp_path: Path) -> None:
    log = MemoryLog(file_size=8 << 20)
    fill(log, 3)
    log.append(topic="Topic", queue_id=0, queue_offset=2, body=b"x" * (3 << 20))
    log.append(topic="Topic", queue_id=0, queue_offset=3)
    derived = Derived.over(tmp_path / "a", log)
    assert derived.build.replay() == log.max_offset
    assert derived.queues.queue_range("Topic", 0) == (0, 4)
    assert REAL.exists(f"{tmp_path}/a/hastore/replay") and BOOT != OTHER_BOOT


def test_lost_queues_beside_those_of_inner_batches_are_built_anew(tmp_path: Path) -> None:
    log = MemoryLog()
    fill(log, 50)
    inner = b"INNER_NUM\x013\x02INNER_BASE\x010\x02"
    log.append(topic="Batches", sys_flag=0x80, store_timestamp_ms=1, properties=inner)
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    expected = derived.files()
    shutil.rmtree(tmp_path / "consumequeue")
    derived = Derived.over(tmp_path, log)
    assert derived.build.dispatched_offset == 0
    derived.build.replay()
    assert derived.files() == expected
    derived.build.close()


def test_a_store_of_inner_batches_alone_is_not_built_anew_at_each_start(tmp_path: Path) -> None:
    log = MemoryLog()
    inner = b"INNER_NUM\x013\x02INNER_BASE\x010\x02"
    log.append(topic="Batches", sys_flag=0x80, store_timestamp_ms=1, properties=inner)
    derived = Derived.over(tmp_path, log)
    derived.build.replay()
    derived.build.flush()
    derived.build.close()
    derived = Derived.over(tmp_path, log)
    assert derived.build.dispatched_offset == log.max_offset
    derived.build.close()


@pytest.mark.parametrize("lost", ["consumequeue", "index"])
def test_a_lost_folder_is_built_anew(tmp_path: Path, lost: str) -> None:
    """Replay's progress says that everything is there; without the queues it is not true."""
    log = MemoryLog()
    fill(log, 50)
    expected = rebuilt(tmp_path, log)
    shutil.rmtree(tmp_path / lost)
    derived = Derived.over(tmp_path, log)
    assert derived.build.dispatched_offset == 0
    derived.build.replay()
    assert derived.files() == expected
    derived.build.close()
