"""Recovery after clean stops, crashes, power losses and damage."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hastore.errors import StoreBrokenError, StoreError, StoreInUseError
from hastore.fs.filesystem import REAL, RealFile
from hastore.record.codec import build_record, check_record, decode_record
from hastore.record.log_format import ENTRY_HEADER_BYTES
from hastore.store.log import recovery
from hastore.store.log.mapped_file_queue import MappedFile
from hastore.store.log_store import LogStore
from hastore.store.message_store import MessageStore
from hastore.store.state import limits as limits_module
from hastore.store.state.limits import LimitsPage, read_limits
from tests.dledger.store import kit as entry_kit
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

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "..", "golden")


def fill(store: MessageStore, count: int, first: int = 0, size: int = 1000) -> list[bytes]:
    for number in range(first, first + count):
        put(store, message(number, size=size))
    return [decode_record(message(n, size=size)).body for n in range(first, first + count)]


def forget_boot(root: object) -> None:
    """Make the limits page one of another boot, as after a power loss."""
    found = read_limits(REAL, str(root))
    assert found is not None
    page = LimitsPage(REAL, str(root))
    page.open(found._replace(boot_id=b"another boot id."))
    page.close()


def forget_hastore(root: object) -> None:
    """Make a store look as if RocketMQ had written it."""
    shutil.rmtree(os.path.join(str(root), "hastore"))


def test_after_a_clean_stop_nothing_is_cut(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        wanted = fill(store, 150)
        end = store.max_offset
        assert os.path.exists(tmp_path / "abort")
    assert not os.path.exists(tmp_path / "abort")
    assert sorted(os.listdir(tmp_path / "hastore")) == ["idempotence", "limits", "replay"]
    with opened(tmp_path) as store:
        assert (store.min_offset, store.max_offset, store.flushed_offset) == (0, end, end)
        assert bodies(store) == wanted
        assert put(store, message(150))[0].queue_offset == 150


def test_after_kill_9_every_written_record_is_there(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        wanted = fill(store, 150)
        end = store.max_offset
        copy = crash_copy(store, tmp_path / "b")
    with opened(copy) as store:
        assert store.max_offset == store.flushed_offset == end
        assert bodies(store) == wanted


def test_a_start_opens_few_of_many_log_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept each file open that it had read, and failed beyond the limit of the process."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))  # of which log files get 3
    with opened(tmp_path / "a") as store:
        wanted = fill(store, 12, size=FILE_SIZE - 500)
        copy = crash_copy(store, tmp_path / "b")
    most: list[int] = []
    files: set[MappedFile] = set()
    before = MappedFile._open

    def noted(file: MappedFile) -> tuple[Any, memoryview]:
        done = before(file)
        files.add(file)
        most.append(sum(one.is_open for one in files))
        return done

    monkeypatch.setattr(MappedFile, "_open", noted)
    for page_lost in (False, True):
        if page_lost:
            os.remove(f"{copy}/hastore/limits")
        with opened(copy) as store:
            assert bodies(store) == wanted
    assert len(files) == 2 * 12
    assert max(most) <= 4


def test_a_file_is_synced_before_it_is_closed_if_it_was_written_again(tmp_path: Path) -> None:
    """The kernel may forget a file that nobody has open, and with it that a write of it failed."""
    with opened(tmp_path / "a") as store:
        fill(store, 4, size=FILE_SIZE - 500)
        copy = crash_copy(store, tmp_path / "b")
    fs = FaultyFileSystem()
    again = MessageStore(config(copy), store_host=HOST, fs=fs)
    again.open()
    calls = [one for one in fs.calls if one[0] in ("write", "sync") and "/commitlog/" in one[1]]
    again.close()
    written = [path for call, path in calls if call == "write"]
    assert len(set(written)) == 4
    for path in written:
        assert calls[calls.index(("write", path)) + 1] == ("sync", path)


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_torn_tail_is_cut_and_cleared(tmp_path: Path, power_loss: bool) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 10)
        store.flush()
        wanted = fill(store, 3, first=10)
        end = store.max_offset
        copy = crash_copy(store, tmp_path / "b")
    size = len(message(12, size=1000))
    scribble(log_file(copy), end - size // 2, bytes(size // 2))
    if power_loss:
        forget_boot(copy)
    with opened(copy) as store:
        assert store.max_offset == end - size
        assert bodies(store)[10:] == wanted[:2]
        assert not any(read_log(copy)[end - size : FILE_SIZE])
        assert put(store, message(99))[0].offset == end - size


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("sector", ["first", "middle", "end of one"])
def test_a_record_without_a_part_of_its_properties_is_torn(
    tmp_path: Path, sector: str, synced: bool
) -> None:
    """They have no CRC. What was synced is as it was written."""
    with opened(tmp_path / "a") as store:
        fill(store, 3)
        store.flush()
        torn = store.max_offset
        properties = [("KEYS", "k"), ("long", "x" * 2_000)]
        raw = build_record(
        "TopicA", b"body",
        queue_id=0, properties=properties, born_timestamp_ms=1, born_host=HOST,
    )  # fmt: skip
        put(store, raw)
        if synced:
            store.flush()
        fill(store, 1)
        copy = crash_copy(store, tmp_path / "b")
    begin = torn + raw.index(b"KEYS")
    at = begin if sector == "first" else begin + 1_024 - begin % 512
    if sector == "end of one":  # a second write had begun there
        at += 500
    scribble(log_file(copy), at, bytes(512 - at % 512))
    forget_boot(copy)
    with opened(copy) as store:
        assert (store.max_offset == torn) is not synced
        assert len(bodies(store)[:3]) == 3


@pytest.mark.parametrize("value", ["x" + "\0" * 1000 + "x", "x" * 300 + "\0" * 700 + "x"])
def test_a_synced_message_with_zeros_in_a_property_survives_a_power_loss(
    tmp_path: Path, value: str
) -> None:
    """The page is not synced: after a power loss it may be older than the last sync of the log."""
    with opened(tmp_path / "a") as store:
        fill(store, 1)
        store.flush()
        page = Path(limits_module.limits_path(str(tmp_path / "a"))).read_bytes()
        put(store, message(1, properties=[("PADDED", value)]))
        fill(store, 8)
        end = store.flush()
        root = crash_copy(store, tmp_path / "b")
    Path(limits_module.limits_path(root)).write_bytes(page)
    forget_boot(root)
    assert ends_doubted(root) == (end, [])


def test_a_torn_record_that_whole_ones_follow_is_told(tmp_path: Path) -> None:
    """Its zeros may be a client's, and all of it synced."""
    with opened(tmp_path / "a") as store:
        fill(store, 1)
        store.flush()
        at = store.max_offset
        zeros = "x" * (1024 - (at + len(message(1, properties=[("PADDED", "")])) - 1) % 512)
        put(store, message(1, properties=[("PADDED", zeros + "\0" * 512 + "x" * 700)]))
        whole = crash_copy(store, tmp_path / "b")
        fill(store, 1)
        followed = crash_copy(store, tmp_path / "c")
    for root, doubted in ((whole, []), (followed, [at])):
        forget_boot(root)
        assert ends_doubted(root) == (at, doubted)


def test_valid_records_after_a_hole_do_not_come_back(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 10)
        store.flush()
        hole = store.max_offset
        fill(store, 100, first=10)
        copy = crash_copy(store, tmp_path / "b")
    scribble(log_file(copy), hole, bytes(512))
    forget_boot(copy)
    with opened(copy) as store:
        assert store.max_offset == hole
        assert len(bodies(store)) == 10
        fill(store, 1, first=10)
        assert len(bodies(store)) == 11
    assert os.listdir(os.path.join(copy, "commitlog")) == [f"{0:020d}"]
    data = read_log(copy)
    assert not any(data[hole + len(message(10, size=1000)) :])


def test_old_records_and_zero_files_after_the_end_are_cleared(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 100)
        copy = crash_copy(store, tmp_path / "b")
        end = store.max_offset
    old = message(3, size=500)  # valid, but of another offset
    scribble(log_file(copy, FILE_SIZE), end - FILE_SIZE, old)
    with open(log_file(copy, 2 * FILE_SIZE), "wb") as file:
        file.truncate(FILE_SIZE)
    with opened(copy) as store:
        assert store.max_offset == end
        assert len(bodies(store)) == 100
    data = read_log(copy)
    assert len(data) == 2 * FILE_SIZE
    assert not any(data[end:])


def test_missing_newest_file_is_refused_and_named(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, 100)
        end = store.max_offset
    before = read_log(tmp_path)[:FILE_SIZE]
    os.remove(log_file(tmp_path, FILE_SIZE))
    store = MessageStore(config(tmp_path), store_host=HOST)
    with pytest.raises(StoreBrokenError, match=rf"\[{FILE_SIZE}, {end}\).*restore"):
        store.open()
    assert read_log(tmp_path) == before
    shutil.rmtree(tmp_path / "commitlog")
    with pytest.raises(StoreBrokenError, match="no file is there"):
        MessageStore(config(tmp_path), store_host=HOST).open()


def test_a_gap_between_files_is_refused_and_named(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, 150)
    os.remove(log_file(tmp_path, FILE_SIZE))
    with pytest.raises(
        StoreBrokenError, match=rf"\[{FILE_SIZE}, {2 * FILE_SIZE}\) are missing"
    ) as found:
        MessageStore(config(tmp_path), store_host=HOST).open()
    # Under its old number the group would refuse an empty node.
    assert "start empty, in mode classic under a new node number" in str(found.value)


@pytest.mark.parametrize("stop", ["clean", "kill", "power"])
def test_damage_in_synced_bytes_is_never_cut(tmp_path: Path, stop: str) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 50)
        store.flush()
        copy = crash_copy(store, tmp_path / "b")
    root = str(tmp_path / "a") if stop == "clean" else copy
    if stop == "power":
        forget_boot(root)
    size = len(message(12, size=1000))
    scribble(log_file(root), 20 * size + 300, b"rot")
    before = read_log(root)
    for _ in range(2):
        with pytest.raises(StoreBrokenError, match=r"bytes \[\d+, \d+\) were synced"):
            MessageStore(config(root), store_host=HOST).open()
        assert read_log(root) == before


def damaged_slave(root: Path, at: int, bad: bytes) -> tuple[MessageStore, list[int]]:
    """A slave that has synced a log beyond damage in its record 20, at which its replay stopped."""
    with opened(root / "master") as master:
        offsets = [put(master, message(n, size=1000))[0].offset or 0 for n in range(100)]
        end = master.max_offset
    data = bytearray(read_log(root / "master")[:end])
    data[offsets[20] + at : offsets[20] + at + len(bad)] = bad
    store = MessageStore(config(root / "a"), store_host=HOST)
    store.open()
    for start in range(0, end, FILE_SIZE):
        store.append_replica(start, bytes(data[start : min(end, start + FILE_SIZE)]))
    while store.replay_problem is None:
        assert not store.wait_dispatched(end, 0.01)
    assert store.flush() == end
    store.set_limits(confirmed=end)
    return store, offsets


@pytest.mark.parametrize("stop", ["clean", "kill"])
@pytest.mark.parametrize(("at", "bad"), [(4, b"????"), (0, b"\0\0\xff\xff")])
def test_damage_that_a_slave_has_synced_beyond_is_never_cut(
    tmp_path: Path, stop: str, at: int, bad: bytes
) -> None:
    store, offsets = damaged_slave(tmp_path, at, bad)
    root = crash_copy(store, tmp_path / "b")
    store.close()
    if stop == "clean":
        root = str(tmp_path / "a")
    before = read_log(root)
    with pytest.raises(StoreBrokenError, match=f"at {offsets[20]} is damaged.*log repair"):
        MessageStore(config(root), store_host=HOST).open()
    assert read_log(root) == before


def ends_doubted(root: object) -> tuple[int, list[int]]:
    """Open and close a store; return where its log ends now, and the ends that were doubted."""
    doubted: list[int] = []
    store = MessageStore(config(root), store_host=HOST)
    store.open(on_doubt=doubted.append)
    end = store.max_offset
    store.close()
    return end, doubted


def test_after_a_power_loss_such_damage_is_cut_and_told(tmp_path: Path) -> None:
    store, offsets = damaged_slave(tmp_path, 4, b"????")
    root = crash_copy(store, tmp_path / "b")
    store.close()
    forget_boot(root)
    assert ends_doubted(root) == (offsets[20], [offsets[20]])


@pytest.mark.parametrize("confirmed", ["it", "a part of it", "what is before it"])
def test_a_last_record_that_is_damaged_is_told_if_it_is_confirmed(
    tmp_path: Path, confirmed: str
) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 10)
        store.flush()
        last, end = store.max_offset, store.max_offset + len(message(10, size=1000))
        fill(store, 1, first=10)
        limit = {"it": end, "a part of it": end - 1, "what is before it": last}[confirmed]
        store.set_limits(confirmed=limit)
        root = crash_copy(store, tmp_path / "b")
    scribble(log_file(root), last + 200, b"rot")
    assert ends_doubted(root) == (last, [last] if confirmed == "it" else [])


def test_a_slave_that_stopped_inside_a_confirmed_record_is_not_doubted(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        fill(master, 20)
        with master.view(0, FILE_SIZE) as view:
            data = bytes(view)
    whole = len(data) - len(message(19, size=1000))
    for left in (1, 7, 90, 500):
        root = tmp_path / str(left)
        with opened(root) as store:
            store.append_replica(0, data[: whole + left])
            store.flush()
            store.set_limits(confirmed=whole + left)
            copy = crash_copy(store, tmp_path / f"{left}b")
        for each in (root, copy):
            assert ends_doubted(each) == (whole, [])


def test_a_newest_file_that_is_too_short(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 100)
        store.flush()
        synced = store.max_offset
        fill(store, 5, first=100)
        copy = crash_copy(store, tmp_path / "b")
    path = log_file(copy, FILE_SIZE)
    os.truncate(path, synced - FILE_SIZE + 100)
    with opened(copy) as store:
        assert store.max_offset == synced
        assert os.path.getsize(path) == FILE_SIZE
    os.truncate(path, 1000)
    with pytest.raises(StoreBrokenError, match="were synced"):
        MessageStore(config(copy), store_host=HOST).open()


def test_another_file_size_is_refused_naming_the_key(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, 5)
    with pytest.raises(StoreError, match="store.commitlog_file_size"):
        MessageStore(config(tmp_path, commitlog_file_size=1 << 20), store_host=HOST).open()
    forget_hastore(tmp_path)
    with pytest.raises(StoreError, match="store.commitlog_file_size"):
        MessageStore(config(tmp_path, commitlog_file_size=1 << 20), store_host=HOST).open()


def test_a_damaged_limits_page_is_refused_one_slot_is_not(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        wanted = fill(store, 5)
    path = limits_module.limits_path(str(tmp_path))
    found = read_limits(REAL, str(tmp_path))
    assert found is not None
    scribble(path, 2048 * (found.sequence & 1) + 50, b"rot")
    with opened(tmp_path) as store:
        assert bodies(store) == wanted
    scribble(path, 50, b"rot")
    scribble(path, 2048 + 50, b"rot")
    with pytest.raises(StoreBrokenError, match="limits is damaged"):
        MessageStore(config(tmp_path), store_host=HOST).open()
    os.remove(path)
    with opened(tmp_path) as store:
        assert bodies(store) == wanted


def test_a_begun_cut_may_lack_synced_bytes(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, 100)
    os.remove(log_file(tmp_path, FILE_SIZE))
    store = MessageStore(config(tmp_path), store_host=HOST)
    store.open(intent_offset=20_000)
    assert 20_000 < store.max_offset <= FILE_SIZE
    size = len(message(0, size=1000))
    store.truncate(size * 3)
    assert store.max_offset == store.flushed_offset == size * 3
    store.close()


@pytest.mark.parametrize(("name", "end"), [("three-files", 167944), ("variants", 18770)])
@pytest.mark.parametrize("killed", [False, True])
def test_rocketmq_stores_open_and_go_on(tmp_path: Path, name: str, end: int, killed: bool) -> None:
    root = tmp_path / "s"
    shutil.copytree(os.path.join(GOLDEN, name), root)
    before = read_log(root)
    if killed:
        (root / "abort").write_bytes(b"1")
    with opened(root) as store:
        assert (store.min_offset, store.max_offset) == (0, end)
        assert store.wait_dispatched(end, 60)
        result = put(store, message(1, topic="New"))[0]
        assert (result.offset, result.queue_offset) == (end, 0)
        assert read_log(root)[:end] == before[:end]
        again = put(store, message(2, topic="TopicA", queue_id=1))[0]
        known = store.queues.queue_range("TopicA", 1)
        assert known is not None and again.queue_offset in (known[1], known[1] - 1)


def test_a_foreign_log_without_its_head_is_not_wiped(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store, 5)
    forget_hastore(tmp_path)
    scribble(log_file(tmp_path), 0, bytes(600))
    with pytest.raises(StoreBrokenError, match="nothing was cut"):
        MessageStore(config(tmp_path), store_host=HOST).open()


def test_an_incomplete_record_of_a_slave_is_dropped(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        wanted = fill(master, 20)
        with master.view(0, FILE_SIZE) as view:
            data = bytes(view)
    with opened(tmp_path / "a") as store:
        store.append_replica(0, data[:-40])
        assert store.max_offset == len(data) - 40
        store.flush()
        assert store.flushed_offset == len(data) - 40
        copy = crash_copy(store, tmp_path / "b")
    whole = len(data) - len(message(19, size=1000))
    for root in (str(tmp_path / "a"), copy):
        with opened(root) as store:
            assert store.max_offset == whole
            assert bodies(store) == wanted[:-1]
            store.append_replica(whole, data[whole:])
            assert bodies(store) == wanted


def test_every_cut_of_the_unsynced_tail_recovers_to_a_prefix(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with opened(tmp_path / "a") as store:
        wanted = fill(store, 5, size=200)
        store.flush()
        synced = store.max_offset
        wanted += fill(store, 10, first=5, size=200)
        end = store.max_offset
        copy = crash_copy(store, tmp_path / "b")
    forget_boot(copy)
    whole = read_log(copy)
    for number in range(25):
        root = str(tmp_path / f"c{number}")
        shutil.copytree(copy, root)
        cut = chance.randrange(synced, end + 1)
        torn = bytes(chance.randrange(320, 1000))  # a hole longer than a record
        scribble(log_file(root), cut, torn + whole[cut + len(torn) : end])
        with opened(root) as store:
            found = bodies(store)
            assert found == wanted[: len(found)]
            assert synced <= store.max_offset <= end
            assert store.max_offset <= cut
        shutil.rmtree(root)


def test_opening_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        fill(store, 80)
        copy = crash_copy(store, tmp_path / "b")
    with opened(copy):
        first = read_log(copy)
    with opened(copy):
        assert read_log(copy) == first


OPENER = """
import sys
from hastore.store.message_store import MessageStore
from tests.store.kit import HOST, config, message
store = MessageStore(config(sys.argv[1]), store_host=HOST)
store.open()
print("open", flush=True)
number = 0
while len(sys.argv) > 2:
    result = store.put_encoded([message(number, size=300)])[0][0]
    print(number, result.end_offset, flush=True)
    number += 1
sys.stdin.read()
"""


def _start(*arguments: str) -> "subprocess.Popen[bytes]":
    root = os.path.join(os.path.dirname(__file__), "..", "..", "..")
    process = subprocess.Popen(
        [sys.executable, "-c", OPENER, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"open\n"
    return process


def test_a_store_in_use_by_another_process(tmp_path: Path) -> None:
    process = _start(str(tmp_path))
    try:
        with pytest.raises(StoreInUseError, match="another process"):
            MessageStore(config(tmp_path), store_host=HOST).open()
    finally:
        process.kill()
        process.communicate()
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("cycle", range(3))
def test_kill_9_of_a_writer_loses_no_acknowledged_put(tmp_path: Path, cycle: int) -> None:
    process = _start(str(tmp_path), "write")
    time.sleep(0.2 + 0.1 * cycle)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    lines = [line.split() for line in output.splitlines(keepends=True) if line.endswith(b"\n")]
    assert lines
    with opened(tmp_path) as store:
        assert store.max_offset >= int(lines[-1][1])
        found = bodies(store)
        wanted = [decode_record(message(n, size=300)).body for n in range(len(found))]
        assert found == wanted
        assert len(found) > int(lines[-1][0])


def test_a_kill_between_a_queue_files_making_and_its_length(tmp_path: Path) -> None:
    """The new file is empty; the units in the files before it are still valid."""
    with opened(tmp_path / "a") as store:
        fill(store, 200)
        assert store.wait_dispatched(store.max_offset, 60)
        copy = crash_copy(store, tmp_path / "b")
    queue = Path(copy) / "consumequeue" / "TopicA" / "0"
    (queue / f"{6000 * len(list(queue.iterdir())):020}").touch()
    with opened(copy) as store:
        assert len(bodies(store)) == 200
        assert store.queues.queue_range("TopicA", 0) == (0, 200)
        fill(store, 200, first=200)
        assert len(bodies(store)) == 400
        assert store.queues.queue_range("TopicA", 0) == (0, 400)


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="store.root"):
        MessageStore(config(tmp_path / "file" / "store"), store_host=HOST).open()


@pytest.mark.parametrize(
    ("call", "number", "remedy"),
    [
        ("open", errno.EMFILE, "ulimit -n"),
        ("write", errno.ENOSPC, "free space"),
        ("write", errno.EDQUOT, "free space"),
        ("write", errno.EROFS, "mount it anew"),
        ("sync", errno.EIO, "dmesg"),
        ("open", errno.EACCES, "store.root"),
    ],
)
def test_a_start_that_fails_names_what_helps(
    tmp_path: Path, call: str, number: int, remedy: str
) -> None:
    """On a full or broken disk it asked for another store.root: that would be an empty store."""
    with opened(tmp_path) as store:
        fill(store, 3)
    fs = FaultyFileSystem()

    def fail(name: str, path: str) -> None:
        if name == call:
            raise OSError(number, os.strerror(number), path)

    fs.hook = fail
    with pytest.raises(StoreError, match=f"cannot be opened: .*{os.strerror(number)}") as raised:
        MessageStore(config(tmp_path), store_host=HOST, fs=fs).open()
    assert remedy in str(raised.value)
    assert ("store.root" in str(raised.value)) == (remedy == "store.root")


def test_recovery_reads_only_the_tail_of_a_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits_module, "RECOVERY_STEP_BYTES", 40_000)
    monkeypatch.setattr("hastore.store.log.recovery.RECOVERY_STEP_BYTES", 40_000)
    with opened(tmp_path / "a") as store:
        for number in range(10):
            fill(store, 40, first=40 * number)
            store.flush()
        page = read_limits(REAL, str(tmp_path / "a"))
        assert page is not None
        assert 40_000 <= store.max_offset - page.recovery_start < 200_000
        copy = crash_copy(store, tmp_path / "b")
        end = store.max_offset
    data = read_log(copy)
    start = page.recovery_start
    assert check_record(data, start, FILE_SIZE * (start // FILE_SIZE + 1), start)
    scribble(log_file(copy), 100, b"rot that a quick start does not look for")
    with opened(copy) as store:
        assert store.max_offset == end


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_a_start_reads_no_more_than_a_window_or_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Though a record, or a blank, is longer than the window, or a size at the end is damaged."""
    window, is_classic = 4096, mode == "classic"
    monkeypatch.setattr(recovery, "_WINDOW_BYTES", window)
    messages = [
        message(number, size=size)  # a blank of 10,000 bytes follows the fifth
        for number, size in enumerate((100, 10_000, 100, 20_000, 25_000, 40_000, 100))
    ]
    if is_classic:
        lead, size_at, offset_at, folder = 0, 0, 28, "commitlog"
        with opened(tmp_path / "a") as first:
            places = [one.offset or 0 for one in put(first, *messages)]
            end, copy = first.max_offset, crash_copy(first, tmp_path / "b")
    else:
        lead, size_at, offset_at, folder = ENTRY_HEADER_BYTES, 4, 16, "dledger-n1/data"
        with entry_kit.opened(tmp_path / "a") as entries:
            places = [place - lead for place in entry_kit.put(entries, 1, *messages)]
            end = entries.messages.max_offset
            copy = crash_copy(entries.messages, tmp_path / "b")
    log = b"".join(path.read_bytes() for path in sorted(Path(copy, folder).iterdir()))
    items = [(at, int.from_bytes(log[at + size_at :][:4])) for at in places]
    # The header of the last record again, but for its place, and its size, which is damaged.
    head = bytearray(log[places[-1] :][: lead + 100])
    head[size_at : size_at + 4] = (15_000).to_bytes(4)
    head[offset_at : offset_at + 8] = end.to_bytes(8)
    scribble(f"{copy}/{folder}/{FILE_SIZE:020}", end - FILE_SIZE, bytes(head))

    read: list[tuple[int, int]] = []
    scan_file, pread = recovery._scan_file, RealFile.pread

    def note(file: RealFile, size: int, position: int) -> bytes:
        read.append((int(os.path.basename(file.path)) + position, size))
        return pread(file, size, position)

    def scan(*args: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(RealFile, "pread", note)
            return scan_file(*args)

    monkeypatch.setattr(recovery, "_scan_file", scan)
    with opened(copy) if is_classic else entry_kit.opened(copy) as again:
        store: LogStore = again if isinstance(again, MessageStore) else again.messages
        assert store.max_offset == end
    assert max(size for _, size in read) == items[5][1]
    assert {one for one in read if one[1] > window} == {one for one in items if one[1] > window}
