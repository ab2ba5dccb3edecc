"""The log's files: reserved ahead, contiguous, read without a lock, few of them open."""

import os
import resource
import threading
import time
from pathlib import Path

import pytest

from hastore.errors import NoLogFileError, StoreBrokenError, StoreFullError, UsageError
from hastore.fs.filesystem import REAL, File, FileSystem, RealFile, RealFileSystem
from hastore.service import raise_failure
from hastore.store.log import allocate
from hastore.store.log.allocate import AllocateService
from hastore.store.log.commit_log import CommitLog, StoreHealth
from hastore.store.log.mapped_file_queue import MappedFile, MappedFileQueue
from tests.store.faulty import BAD_DISK, NO_SPACE, FaultyFileSystem, fresh
from tests.store.kit import log_file, message, opened, put

SIZE = 4096


def commit_log(root: Path, fs: FileSystem = REAL) -> CommitLog:
    for name in ("commitlog", "hastore"):
        REAL.make_dirs(f"{root}/{name}")
    log = CommitLog(fs, str(root), SIZE, StoreHealth(), on_failure=raise_failure)
    log.allocator.start()
    return log


def wait_for(reached: object, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_appended_bytes_are_read_within_one_file_and_the_log(tmp_path: Path) -> None:
    log = commit_log(tmp_path)
    with log.lock:
        assert log.append(b"a" * 1000) == 1000
        assert log.append(b"b" * 3096) == SIZE
        assert log.append(b"c" * 10) == SIZE + 10
        with pytest.raises(UsageError, match="boundary"):
            log.append(b"x" * SIZE)
    with log.view(990, 20) as view:
        assert bytes(view) == b"a" * 10 + b"b" * 10
        assert view.readonly
    with log.view(SIZE - 5, 100) as view:
        assert bytes(view) == b"b" * 5  # never across a file's end
    with log.view(SIZE, 100) as view:
        assert bytes(view) == b"c" * 10
    with log.view(SIZE + 10, 100) as view:
        assert len(view) == 0
    with pytest.raises(ValueError, match="released"):
        len(view)
    for outside in (-1, SIZE + 11):
        with pytest.raises(UsageError):
            log.view(outside, 1)
    found = log.file_range(1000, 5000)
    assert (found.position, found.size) == (1000, 3096)
    assert os.pread(found.fd, 5, found.position) == b"bbbbb"
    log.allocator.stop()


def test_the_next_file_is_ready_before_it_is_needed(tmp_path: Path) -> None:
    log = commit_log(tmp_path)
    spare = tmp_path / "hastore" / "spare"
    with log.lock:
        log.append(b"a")
    wait_for(spare.exists)
    wait_for(lambda: log.allocator._ready)
    assert os.path.getsize(spare) == SIZE
    assert os.listdir(tmp_path / "commitlog") == [f"{0:020d}"]  # no file that RocketMQ would refuse
    inode = os.stat(spare).st_ino
    with log.lock:
        log.roll()
        assert log.max_offset == SIZE
        log.append(b"b")
    assert os.stat(log_file(tmp_path, SIZE)).st_ino == inode
    log.allocator.stop()
    log.allocator.discard()
    assert not spare.exists()


@pytest.mark.parametrize(
    "error, kind, what, remedy",
    [
        (NO_SPACE, StoreFullError, "the disk is full", "make room"),
        (BAD_DISK, NoLogFileError, "the next log file cannot be made", "look at the store's disk"),
    ],
)
def test_why_there_is_no_next_file(
    tmp_path: Path, error: OSError, kind: type[StoreFullError], what: str, remedy: str
) -> None:
    fs = FaultyFileSystem()
    log = commit_log(tmp_path, fs)
    spare = f"{tmp_path}/hastore/spare"

    def fail(call: str, path: str) -> None:
        if call == "open" and path == spare:
            raise fresh(error, path)

    fs.hook = fail
    for _ in range(2):  # by the thread's failure, and from the last one
        with pytest.raises(StoreFullError) as failed:
            log.allocator.wait_ready()
        assert type(failed.value) is kind
    assert log.allocator.refusal == (
        f"{what}: [Errno {error.errno}] {error.strerror}: '{spare}'; {remedy}, and puts go on by "
        "themselves"
    )
    fs.heal()
    wait_for(lambda: log.allocator.refusal is None)
    log.allocator.wait_ready()
    log.allocator.stop()


def test_room_counts_the_blank(tmp_path: Path) -> None:
    log = commit_log(tmp_path)
    assert log.room(SIZE) == 0  # at a file's start there is nothing to fill
    with log.lock:
        log.append(bytes(100))
    assert log.room(SIZE - 108) == 0
    assert log.room(SIZE - 107) == SIZE - 100
    log.allocator.stop()


def test_a_view_outlives_its_file(tmp_path: Path) -> None:
    log = commit_log(tmp_path)
    with log.lock:
        log.append(b"a" * SIZE)
        log.append(b"b")
    view = log.view(10, 5)
    taken = log.file_range(10, 5)
    log.queue.detach_first(1)
    log.queue.discard()
    with view as data:
        assert bytes(data) == b"aaaaa"
    assert os.pread(taken.fd, 5, taken.position) == b"aaaaa"
    fd = taken.fd
    del taken, view
    with pytest.raises(OSError):
        os.fstat(fd)
    log.allocator.stop()


def test_only_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))  # of which log files get 3
    log = commit_log(tmp_path)
    for number in range(12):
        with log.lock:
            log.append(bytes([number]) * SIZE)
    for _ in range(2):
        for number in range(12):
            with log.view(number * SIZE, 1) as view:
                assert bytes(view) == bytes([number])
    assert sum(file.is_open for file in log.queue.files) <= 3
    log.allocator.stop()


def test_only_log_files_count_and_gaps_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "commitlog"
    directory.mkdir()
    for start in (SIZE, 2 * SIZE, 4 * SIZE):
        (directory / f"{start:020d}").write_bytes(bytes(SIZE))
    (directory / "note.txt").write_bytes(b"x")
    queue = MappedFileQueue(REAL, str(directory), SIZE)
    with pytest.raises(StoreBrokenError, match=r"\[12288, 16384\)"):
        queue.load()
    (directory / f"{4 * SIZE:020d}").unlink()
    queue.load()
    assert (queue.start, queue.end) == (SIZE, 3 * SIZE)
    assert queue.find(SIZE - 1) is None
    assert queue.find(3 * SIZE) is None
    found = queue.find(2 * SIZE)
    assert isinstance(found, MappedFile) and found.start == 2 * SIZE
    with pytest.raises(StoreBrokenError, match="gap"):
        queue.add(5 * SIZE, lambda path: None)


def test_a_sync_of_many_files_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst over 1,000 small files ended with 2,068 descriptors."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (48, 48))  # of which log files get 3
    fs = FaultyFileSystem()
    queue = MappedFileQueue(fs, str(tmp_path), SIZE)
    for start in range(0, 10 * SIZE, SIZE):
        added = queue.add(start, lambda path: Path(path).write_bytes(bytes(SIZE)) and None)
        added.pwrite(b"x", start)
    before = [file.is_open for file in queue.files]
    assert sum(before) == 3
    queue.sync(SIZE, 9 * SIZE)
    assert [file.is_open for file in queue.files] == before
    synced = [path for call, path in fs.calls if call == "sync"]
    assert synced == [file.path for file in queue.files[1:9]]


def test_no_room_is_refused_at_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate, "_RETRY_S", 3_600.0)

    class Full(RealFileSystem):
        full = True
        tries = 0

        def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
            Full.tries += 1
            if Full.full:
                raise StoreFullError("no room at all")
            return super().open(path, create=create, writable=writable)

    service = AllocateService(Full(), f"{tmp_path}/spare", SIZE, on_failure=raise_failure)
    service.start()
    with pytest.raises(StoreFullError, match="no room at all"):
        service.wait_ready()
    for _ in range(100):
        with pytest.raises(StoreFullError):
            service.wait_ready()
    assert Full.tries == 1  # no put waited for another try
    assert service.stop(60)
    monkeypatch.setattr(allocate, "_RETRY_S", 0.01)
    service = AllocateService(Full(), f"{tmp_path}/spare", SIZE, on_failure=raise_failure)
    service.start()
    with pytest.raises(StoreFullError, match="no room at all"):
        service.wait_ready()
    Full.full = False
    wait_for(lambda: service.failure_reason is None)
    service.take_spare(f"{tmp_path}/taken")
    assert os.path.getsize(tmp_path / "taken") == SIZE
    service.stop()


class Reads(RealFileSystem):
    """Record the positions that were read, by path."""

    def __init__(self) -> None:
        self.places: dict[str, list[int]] = {}

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        places = self.places.setdefault(path, [])

        class Noted(RealFile):
            def pread(self, size: int, position: int) -> bytes:
                data = super().pread(size, position)
                if data:
                    places.append(position)
                return data

        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        return Noted(path, os.open(path, flags, 0o644))


def test_a_warmed_file_is_read_whole_before_and_after_it_is_taken(tmp_path: Path) -> None:
    fs, size = Reads(), 5 << 20
    spare = f"{tmp_path}/spare"
    service = AllocateService(fs, spare, size, warm=True, on_failure=raise_failure)
    service.start()
    service.take_spare(f"{tmp_path}/0")
    service.take_spare(f"{tmp_path}/1")  # it is made although the first may still be read ahead
    wait_for(lambda: fs.places[spare] == 2 * [number << 20 for number in range(5)])
    service.warm_rest(f"{tmp_path}/1", (3 << 20) + 5)
    wait_for(lambda: fs.places[f"{tmp_path}/1"] == [(3 << 20) + 5, (4 << 20) + 5])
    service.stop()
    assert descriptors_of(tmp_path) == []


def test_without_room_no_removed_file_is_kept_open_to_be_read_ahead(tmp_path: Path) -> None:
    """A removed file takes room while it is open, and the next file may need it."""

    class Full(RealFileSystem):
        def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
            if create:
                raise StoreFullError("no room at all")
            return super().open(path, writable=writable)

    for number in range(3):
        (tmp_path / str(number)).write_bytes(bytes(8 << 20))
    service = AllocateService(
        Full(), f"{tmp_path}/spare", SIZE, warm=True, on_failure=raise_failure
    )
    for number in range(3):
        service.warm_rest(f"{tmp_path}/{number}", 0)
        os.remove(tmp_path / str(number))
    service.warm_rest(f"{tmp_path}/3", 0)  # a missing file is only logged
    service.want()
    service.start()
    wait_for(lambda: service.failure_reason is not None and descriptors_of(tmp_path) == [])
    assert service.stop(60)


def test_files_are_read_ahead_only_if_configured(tmp_path: Path) -> None:
    fs = Reads()
    service = AllocateService(fs, f"{tmp_path}/spare", SIZE, on_failure=raise_failure)
    service.start()
    service.take_spare(f"{tmp_path}/0")
    service.warm_rest(f"{tmp_path}/0", 0)
    service.stop()
    assert fs.places == {f"{tmp_path}/spare": []}
    assert descriptors_of(tmp_path) == []


def descriptors_of(folder: Path) -> list[str]:
    """Return the files in the folder that this process has open."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in map(read_link, links) if path.startswith(str(folder))]


def read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # the listing's own
        return ""


def test_readers_run_beside_a_writer(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        stop = threading.Event()
        wrong: list[str] = []

        def read() -> None:
            while not stop.is_set():
                offset, end = 0, store.whole_offset
                while offset < end:
                    record = store.reader.record_at(offset)
                    if record is None:
                        offset += 65536 - offset % 65536
                    else:
                        offset += record.size
                if offset != end and offset % 65536:
                    wrong.append(f"{offset} is not {end}")

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for number in range(300):
            put(store, message(number, size=700))
        stop.set()
        for reader in readers:
            reader.join()
        assert not wrong
