"""Reads of cold bytes: by pread, on a failing disk, and in files that retention removes."""

import errno
import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import RetentionConfig
from hastore.errors import CorruptRecordError, NotCachedError, StoreError
from hastore.fs.filesystem import REAL, RealFile, is_cached, may_wait, without_waiting
from hastore.ha.master.link_writer import SENDFILE_BYTES_MIN
from hastore.ha.master.write_socket_service import WriteSocketService
from hastore.record.codec import decode_record
from hastore.service import raise_failure
from hastore.store import message_reader
from hastore.store.log import commit_log
from hastore.store.message_store import MessageStore, PullStatus
from tests.store import kit


class Disk:
    """The real file system with bad sectors; maps made while `poisoned` read as zeros."""

    def __init__(self) -> None:
        self.bad: list[tuple[str, int, int]] = []  # end of the path, bytes [begin, end)
        self.poisoned = False
        self.before_read: Callable[[str], None] = lambda path: None
        self.read: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(REAL, name)

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> Any:
        return _DiskFile(self, REAL.open(path, create=create, writable=writable))

    def check(self, path: str, begin: int, end: int) -> None:
        for name, first, behind in self.bad:
            if path.endswith(name) and begin < behind and first < end:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)


class _DiskFile:
    def __init__(self, disk: Disk, real: Any) -> None:
        self._disk = disk
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def pread(self, size: int, position: int) -> bytes:
        self._disk.before_read(self.path)
        self._disk.check(self.path, position, position + size)
        self._disk.read.append((self.path, position, size))
        data: bytes = self._real.pread(size, position)
        return data

    def map(self, *, writable: bool = False) -> mmap.mmap:
        if self._disk.poisoned and "commitlog" in self.path:
            return mmap.mmap(-1, self.size)
        mapped: mmap.mmap = self._real.map(writable=writable)
        return mapped


def open_store(root: Path, disk: Disk, **changes: Any) -> MessageStore:
    store = MessageStore(kit.config(root, **changes), fs=disk, store_host=kit.HOST)
    store.open()
    assert store.wait_dispatched(store.max_offset, 60), store.problems
    return store


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def cold(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageStore]:
    """A store that was opened with 300 messages in 5 files; its maps read as zeros."""
    monkeypatch.setattr(message_reader, "COLD_MS", float("inf"))  # the machine may be slow
    with kit.opened(tmp_path) as store:
        for number in range(0, 300, 20):
            kit.put(
                store,
                *[kit.message(n, size=700, queue_id=n % 2) for n in range(number, number + 20)],
            )
        assert store.wait_dispatched(store.max_offset, 60)
    store = open_store(tmp_path, disk)
    assert len(store.log.queue.files) > 3
    disk.poisoned = True
    store.log.queue.release()
    yield store
    disk.bad.clear()
    disk.poisoned = False
    store.log.queue.release()
    store.close()


def pull(store: MessageStore, at: int, queue_id: int = 0, **limits: Any) -> Any:
    given = {"max_messages": 1000, "max_bytes": 1 << 20, "limit_offset": store.max_offset}
    return store.reader.pull("TopicA", queue_id, at, **(given | limits))


def numbers(records: bytes) -> list[int]:
    found, at = [], 0
    while at < len(records):
        record = decode_record(records, at)
        found.append(int(record.body[:8]))
        at += record.size
    return found


def where(store: MessageStore, at: int, queue_id: int = 0) -> tuple[str, int, int]:
    """The place of a record: file name, and its bytes there."""
    offset, size = store.queues.get("TopicA", queue_id).files.place(at)
    start = offset - offset % store.file_size
    return f"{start:020d}", offset - start, offset - start + size


# -- cold, hot


def test_bytes_from_before_the_start_are_read_without_maps(cold: MessageStore) -> None:
    assert numbers(pull(cold, 0).records) == list(range(0, 300, 2))
    assert numbers(pull(cold, 7, 1).records) == list(range(15, 300, 2))
    assert numbers(pull(cold, 3, max_messages=1).records) == [6]
    offset = pull(cold, 3, max_messages=1).last_offset
    record = cold.reader.record_at(offset)
    assert record is not None and record.body[:8] == b"00000006"
    assert cold.record_size(offset, check=True) == record.size
    assert cold.reader.query_key("TopicA", "key6") == [offset]
    middle = record.store_timestamp_ms
    found = cold.reader.queue_offset_by_time("TopicA", 0, middle)
    assert found <= 3
    with cold.view(offset, record.size) as view:
        assert decode_record(view).body == record.body


def test_neighbouring_records_are_read_by_one_pread(cold: MessageStore, disk: Disk) -> None:
    disk.read.clear()
    pull(cold, 0)
    of_log = [path for path, _, _ in disk.read if "commitlog" in path]
    assert len(of_log) == len(set(of_log)) == len(cold.log.queue.files)


def test_the_tail_that_this_process_wrote_is_read_through_the_map(
    tmp_path: Path, disk: Disk
) -> None:
    store = open_store(tmp_path, disk)
    kit.put(store, *[kit.message(n) for n in range(20)])
    assert store.wait_dispatched(store.max_offset, 60)
    disk.read.clear()
    assert numbers(pull(store, 0).records) == list(range(20))
    assert not [path for path, _, _ in disk.read if "commitlog" in path]
    store.close()


def test_hot_and_cold_reads_give_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(message_reader, "COLD_MS", float("inf"))
    with kit.opened(tmp_path, consume_queue_units=50) as store:
        for number in range(0, 600, 30):
            kit.put(store, *[
                kit.message(n, size=chance.choice((20, 300, 3000, 20_000)),
                            queue_id=chance.randrange(3))
                for n in range(number, number + 30)
            ])  # fmt: skip
        assert store.wait_dispatched(store.max_offset, 60)
        for _ in range(150):
            queue_id = chance.randrange(3)
            at = chance.randrange(store.queues.queue_range("TopicA", queue_id)[1])
            limits = {
                "max_messages": chance.choice((1, 5, 70, 1000)),
                "max_bytes": chance.choice((100, 10_000, 1 << 20)),
                "limit_offset": chance.choice((store.max_offset, store.max_offset // 2)),
            }
            monkeypatch.setattr(commit_log, "HOT_BYTES", 1 << 40)
            hot = pull(store, at, queue_id, **limits)
            monkeypatch.setattr(commit_log, "HOT_BYTES", chance.randrange(store.max_offset))
            assert pull(store, at, queue_id, **limits) == hot
            monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
            assert pull(store, at, queue_id, **limits) == hot


def test_a_file_cut_short_is_damage_not_the_end_of_the_process(cold: MessageStore) -> None:
    name, begin, end = where(cold, 10)
    path = f"{cold.config.root}/commitlog/{name}"
    os.truncate(path, end - 10)
    found = pull(cold, 0)
    assert numbers(found.records) == list(range(0, 20, 2))
    with pytest.raises(CorruptRecordError):
        pull(cold, 10)
    os.truncate(path, cold.file_size)


def test_a_pull_on_a_slow_disk_returns_the_records_read_in_time(
    cold: MessageStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow:
        """A clock by which each read of the log takes 8 ms."""

        now_ms = 0.0

        def monotonic_ms(self) -> float:
            return self.now_ms

    slow = Slow()

    def take(path: str) -> None:
        if "commitlog" in path:
            slow.now_ms += 8.0

    whole = pull(cold, 0)
    monkeypatch.setattr(message_reader, "COLD_MS", 20.0)
    monkeypatch.setattr(cold.reader, "_clock", slow)
    monkeypatch.setattr(message_reader, "_GAP_BYTES", 0)
    monkeypatch.setattr(message_reader._read_cold, "__defaults__", (0,))
    disk.before_read = take
    got, at = [], 0
    while at < whole.next_queue_offset:
        found = pull(cold, at)
        assert found.count == min(
            3, whole.count - at
        )  # three reads of 8 ms: the third one ends after 20 ms
        got += numbers(found.records)
        at = found.next_queue_offset
    assert got == numbers(whole.records)


def test_replay_does_not_wait_for_a_cold_read_of_a_queue(tmp_path: Path, disk: Disk) -> None:
    store = open_store(tmp_path, disk)
    kit.put(store, *[kit.message(n) for n in range(20)])
    assert store.wait_dispatched(store.max_offset, 60)
    reading, go_on = threading.Event(), threading.Event()

    def wait(path: str) -> None:
        if "consumequeue" in path and threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(60)

    disk.before_read = wait
    got: list[int] = []
    reader = threading.Thread(target=lambda: got.extend(numbers(pull(store, 0).records)))
    reader.start()
    try:
        assert reading.wait(60)
        kit.put(store, *[kit.message(n) for n in range(20, 40)])
        assert store.wait_dispatched(store.max_offset, 60)
    finally:
        go_on.set()
        reader.join()
    assert got[:20] == list(range(20))
    store.close()


# -- a disk with bad sectors


def test_a_bad_sector_fails_only_the_request_that_reads_it(cold: MessageStore, disk: Disk) -> None:
    disk.bad.append(where(cold, 10))
    got, at = [], 0
    with pytest.raises(OSError, match="commitlog") as caught:
        while True:
            found = pull(cold, at)
            got += numbers(found.records)
            at = found.next_queue_offset
    assert caught.value.errno == errno.EIO
    assert got == list(range(0, 20, 2))  # all records before it
    assert numbers(pull(cold, 11).records) == list(range(22, 300, 2))  # all records after it
    assert pull(cold, 0, 1, max_messages=5).count == 5  # another queue
    offset = int(disk.bad[0][0]) + disk.bad[0][1]
    for read in (
        lambda: cold.reader.record_at(offset),
        lambda: cold.record_size(offset),
        lambda: cold.reader.query_key("TopicA", "key20"),
        lambda: cold.view(offset, 100),
    ):
        with pytest.raises(OSError, match="commitlog"):
            read()


@pytest.mark.parametrize("kind", ["consumequeue/TopicA/0", "index"])
def test_a_bad_sector_in_a_queue_or_the_index(cold: MessageStore, disk: Disk, kind: str) -> None:
    folder = f"{cold.config.root}/{kind}"
    disk.bad.append((f"{kind}/{sorted(os.listdir(folder))[0]}", 0, 1 << 40))
    with pytest.raises(OSError, match=kind):
        pull(cold, 0) if kind != "index" else cold.reader.query_key("TopicA", "key6")
    assert pull(cold, 0, 1).count > 0


def test_replay_stops_at_a_bad_sector_and_reports_it(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    store = open_store(tmp_path, disk)
    disk.bad.append((f"commitlog/{0:020d}", 0, store.file_size))
    kit.put(store, *[kit.message(n) for n in range(20)])
    end = time.monotonic() + 60
    while not any("replay stopped" in each for each in store.problems):
        assert time.monotonic() < end
        time.sleep(0.005)
    disk.bad.clear()
    assert store.wait_dispatched(store.max_offset, 60)
    assert pull(store, 0).count == 20
    store.close()


# -- retention beside readers


RETENTION = RetentionConfig(max_size_bytes=2 * kit.FILE_SIZE)


@pytest.fixture
def kept(tmp_path: Path, disk: Disk) -> Iterator[MessageStore]:
    """A store of which retention may remove all but two files."""
    store = open_store(tmp_path, disk, retention=RETENTION)
    kit.put(store, *[kit.message(n, size=700) for n in range(400)])
    store.flush()
    assert store.wait_dispatched(store.max_offset, 60)
    assert len(store.log.queue.files) > 3
    yield store
    store.close()


def passes(store: MessageStore) -> None:
    """Let retention run once, after a reader has found its file and before it opens it."""
    store.log.queue.release()  # as after reads of more than 64 other files
    real = store.log.queue.find

    def find(offset: int) -> Any:
        found = real(offset)
        store.log.queue.find = real
        assert store.retention.delete_expired(None) > 0
        return found

    store.log.queue.find = find


def test_a_pull_whose_file_retention_removes_first_is_offset_too_small(
    kept: MessageStore,
) -> None:
    passes(kept)
    found = pull(kept, 0)
    assert found.status is PullStatus.OFFSET_TOO_SMALL and not found.count
    first = kept.queues.queue_range("TopicA", 0)[0]
    assert found.next_queue_offset == found.min_queue_offset == first > 0
    assert numbers(pull(kept, found.next_queue_offset).records)[0] == first


def test_a_reader_that_pinned_a_file_reads_it_to_the_end(
    kept: MessageStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    held = kept.log.queue.files[0]

    def retention(path: str) -> None:
        if path == held.path and not kept.min_offset:
            assert kept.retention.delete_expired(None) > 0

    disk.before_read = retention
    found = pull(kept, 0, max_messages=20)
    assert numbers(found.records) == list(range(20))
    assert not os.path.exists(held.path)
    assert held.opened is None  # the file is closed once nobody reads it
    assert pull(kept, 0).status is PullStatus.OFFSET_TOO_SMALL


@pytest.mark.parametrize("read", ["record", "time", "range", "view"])
def test_other_reads_beside_retention(kept: MessageStore, read: str) -> None:
    stored_ms = kept.reader.record_at(0).store_timestamp_ms
    passes(kept)
    if read == "time":
        assert kept.reader.queue_offset_by_time("TopicA", 0, stored_ms) >= 0
        return
    with pytest.raises(StoreError, match="retention"):
        {
            "record": lambda: kept.reader.record_at(0),
            "range": lambda: kept.file_range(0, 100),
            "view": lambda: kept.view(0, 100),
        }[read]()


def test_the_error_names_a_file_that_somebody_else_removed(kept: MessageStore) -> None:
    os.unlink(kit.log_file(kept.config.root))
    kept.log.queue.release()
    with pytest.raises(StoreError, match=f"{0:020d} is missing"):
        pull(kept, 0)
    assert pull(kept, kept.queues.queue_range("TopicA", 0)[1] - 1).count == 1


# -- a stream to a slave that lags far


def drain(sock: socket.socket) -> None:
    while sock.recv(1 << 16):
        pass


@pytest.mark.parametrize("frame_bytes", [SENDFILE_BYTES_MIN, 1024])
def test_a_stream_that_meets_a_bad_sector_ends_with_the_reason(
    cold: MessageStore, disk: Disk, monkeypatch: pytest.MonkeyPatch, frame_bytes: int
) -> None:
    """By sendfile, and by small frames."""
    real = os.sendfile

    def sendfile(out: int, descriptor: int, position: int, size: int) -> int:
        disk.check(os.readlink(f"/proc/self/fd/{descriptor}"), position, position + size)
        return real(out, descriptor, position, size)

    monkeypatch.setattr(os, "sendfile", sendfile)
    disk.bad.append((f"{cold.file_size:020d}", 0, 10))
    broken: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = threading.Thread(target=drain, args=(theirs,))
        reader.start()
        service = WriteSocketService(
            ours, cold, SYSTEM_CLOCK, name="stream", start_offset=0, frame_bytes_max=frame_bytes,
            heartbeat_ms=1000.0, history=(), tell_limits=False, on_broken=broken.append,
            on_failure=raise_failure,
        )  # fmt: skip
        service.run()  # it returns: only this stream ends
        service.release()
        ours.shutdown(socket.SHUT_RDWR)
        reader.join()
    assert service.sent_offset == cold.file_size
    assert broken == [
        f"sending from offset {cold.file_size} failed: [Errno 5] Input/output error: "
        f"'{kit.log_file(cold.config.root, cold.file_size)}'"
    ]


def test_cold_bytes_in_the_page_cache_are_read_through_the_map(
    cold: MessageStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gaps between the records, a pread would copy what nobody wants."""
    monkeypatch.setattr(message_reader, "_ASKED_BYTES", range(1, 1 << 26))
    expected = pull(cold, 0)
    assert len(disk.read) > 3  # the poisoned maps have no pages
    disk.poisoned = False
    cold.log.queue.release()
    disk.read.clear()
    assert pull(cold, 0).records == expected.records
    assert not [path for path, _, _ in disk.read if "commitlog" in path]


def test_the_page_cache_is_asked_for_every_page(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * mmap.PAGESIZE))
    file = REAL.open(str(path))
    file.sync()
    view = memoryview(file.map())
    last = 9 * mmap.PAGESIZE
    assert is_cached(view, 0, len(view)) and is_cached(view, 1, 2)
    os.posix_fadvise(file.fileno(), last, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(view, last, last + 1):
        return  # the file system keeps its pages, as tmpfs does
    assert not is_cached(view, 0, len(view))
    assert not is_cached(view, last - 1, last + 1)
    assert is_cached(view, last - 1, last)
    file.close()


# -- threads that must not wait


def test_a_thread_that_must_not_wait_reads_only_what_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = bytes(random.randbytes(10 * mmap.PAGESIZE + 5))
    path.write_bytes(data)
    file = REAL.open(str(path))
    file.sync()
    with without_waiting():
        assert not may_wait()
        assert file.pread(len(data), 0) == data
        assert file.pread(100, len(data) - 5) == data[-5:]
        assert file.pread(100, len(data)) == b""
    assert may_wait()
    last = 9 * mmap.PAGESIZE
    os.posix_fadvise(file.fileno(), last, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(memoryview(file.map()), last, last + 1):
        return  # the file system keeps its pages, as tmpfs does
    with without_waiting():
        with pytest.raises(NotCachedError, match=f"{path}: byte {last} is not"):
            file.pread(2 * mmap.PAGESIZE, last - mmap.PAGESIZE)
        assert file.pread(mmap.PAGESIZE, last - mmap.PAGESIZE) == data[last - mmap.PAGESIZE : last]
    assert file.pread(100, last) == data[last : last + 100]
    with without_waiting():
        assert file.pread(100, last) == data[last : last + 100]


def test_a_file_system_that_cannot_read_without_waiting_is_asked_for_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    data = bytes(random.randbytes(10 * mmap.PAGESIZE + 5))
    path.write_bytes(data)
    file = REAL.open(str(path))
    file.sync()

    def unsupported(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    def read_from_memory() -> list[bytes]:
        with without_waiting():
            return [
                file.pread(len(data), 0),
                file.pread(100, len(data) - 5),
                file.pread(100, len(data) + mmap.PAGESIZE),
            ]

    monkeypatch.setattr(os, "preadv", unsupported)
    for tries_left in reversed(range(100)):
        try:
            assert read_from_memory() == [data, data[-5:], b""]
            break
        except NotCachedError:  # a machine short of memory drops even what was just written
            if not tries_left:
                raise
            path.read_bytes()
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(memoryview(file.map()), 0, 1):
        return  # the file system keeps its pages, as tmpfs does
    with without_waiting(), pytest.raises(NotCachedError, match="bytes at 7 are not in memory"):
        file.pread(100, 7)
    assert isinstance(file, RealFile)


def test_a_pull_that_must_not_wait_returns_the_records_in_memory(
    cold: MessageStore, disk: Disk
) -> None:
    """And raises if the first is not: then there is nothing to return."""
    files = [file.path for file in cold.log.queue.files]
    whole = numbers(pull(cold, 0).records)

    def second_is_cold(path: str) -> None:
        if path == files[1] and not may_wait():
            raise NotCachedError(path)

    disk.before_read = second_is_cold
    with without_waiting():
        found = pull(cold, 0)
        assert 0 < found.count < len(whole)
        assert numbers(found.records) == whole[: found.count]
        with pytest.raises(NotCachedError):
            pull(cold, found.next_queue_offset)
    assert numbers(pull(cold, 0).records) == whole
