"""The client API over a real store: bad sectors, slow disks, and retention while clients read."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import NotCachedError
from hastore.fs.filesystem import may_wait
from hastore.protocol import api
from hastore.server.api import cold_reads
from hastore.server.api.pulls import UNREAD
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store import message_reader
from hastore.store.log import commit_log
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, record, until
from tests.store import kit
from tests.store.test_cold_reads import Disk, numbers, open_store, passes, where

PARTS = 4


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> Iterator[MessageStore]:
    opened = open_store(
        tmp_path, disk, retention=RetentionConfig(max_size_bytes=PARTS * kit.FILE_SIZE)
    )
    setattr(opened, "default_queues", 4)  # noqa: B010 (for the fake node)
    opened.set_limits(confirmed=0, readable=0)
    yield opened
    disk.bad.clear()
    opened.close()


@pytest.fixture
def backend(store: MessageStore) -> FakeBackend:
    found = FakeBackend()
    found.store = store
    return found


def fill(store: MessageStore, first: int, count: int) -> None:
    kit.put(store, *[kit.message(n, size=700, queue_id=n % 2) for n in range(first, first + count)])
    store.flush()
    store.set_limits(readable=store.max_offset)
    assert store.wait_dispatched(store.max_offset, 60), store.problems


def test_a_bad_sector_fails_only_the_request_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, disk: Disk
) -> None:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    monkeypatch.setattr(message_reader, "COLD_MS", float("inf"))  # the machine may be slow
    fill(store, 0, 60)
    disk.bad.append(where(store, 5))
    offset = int(disk.bad[0][0]) + disk.bad[0][1]
    reply = client.ask(api.Pull(1, "TopicA", 0, api.Position(5)))
    assert reply.status == "StoreError" and "Input/output error" in reply.reason
    assert disk.bad[0][0] in reply.reason
    assert client.ask(api.FindOffset(2, offset)).status == "StoreError"
    assert client.ask(api.FindKey(3, "TopicA", "key10")).status == "StoreError"
    assert client.ask(api.Pull(4, "TopicA", 0, api.Position(6))).count == 24
    assert client.ask(api.Pull(5, "TopicA", 1, api.Position(0), max_messages=9)).count == 9
    at = 0
    while isinstance(reply := client.ask(api.Pull(6, "TopicA", 0, api.Position(at))), api.Pulled):
        at = reply.next_queue_offset
    assert at == 5  # a reader gets the records before it


def test_a_file_removed_before_it_is_opened_counts_as_removed_by_retention(
    store: MessageStore, client: Client
) -> None:
    fill(store, 0, 600)
    passes(store)
    reply = client.ask(api.Pull(1, "TopicA", 0, api.Position(0)))
    assert reply.status is api.PullStatus.OFFSET_TOO_SMALL
    assert reply.next_queue_offset == store.queues.queue_range("TopicA", 0)[0] > 0
    assert client.ask(api.Pull(2, "TopicA", 0, api.Position(reply.next_queue_offset))).count > 0


@pytest.mark.parametrize("hot_bytes", [0, commit_log.HOT_BYTES], ids=["cold", "hot"])
def test_readers_get_records_or_the_first_offset_while_retention_removes_files(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, server: ApiServer, hot_bytes: int
) -> None:
    """Three readers at the beginning of the log, while files are written, removed and closed."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    monkeypatch.setattr(commit_log, "HOT_BYTES", hot_bytes)
    fill(store, 0, 400)
    ended = threading.Event()
    problems: list[object] = []
    heard: list[set[object]] = [set() for _ in range(3)]
    enough = threading.Semaphore(0)

    def read(number: int) -> None:
        chance = random.Random(seed + number)
        reader = Client(server.endpoint)
        try:
            at, rid = 0, 0
            while not ended.is_set():
                rid += 1
                count = chance.choice((1, 3, 100))
                reply = reader.ask(api.Pull(rid, "TopicA", 0, api.Position(at), max_messages=count))
                heard[number].add(reply.status)
                if reply.status is api.PullStatus.FOUND:
                    first = 2 * at
                    assert numbers(reader.payload) == list(range(first, first + 2 * reply.count, 2))
                    enough.release()
                else:
                    assert reply.status in (
                        api.PullStatus.OFFSET_TOO_SMALL, api.PullStatus.NO_NEW
                    ), reply  # fmt: skip
                    low = max(reply.min_queue_offset, reply.next_queue_offset)
                    assert reply.status is api.PullStatus.NO_NEW or low > at
                if chance.random() < 0.5:  # where retention removes files
                    at = max(0, reply.min_queue_offset - chance.randrange(3))
                else:
                    at = reply.next_queue_offset
        except BaseException as problem:
            problems.append(problem)
        finally:
            reader.close()

    readers = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in readers:
        thread.start()
    chance = random.Random(seed + 99)
    for turn in range(25):
        fill(store, 400 + 100 * turn, 100)
        for _ in range(3):
            if chance.random() < 0.5:
                store.log.queue.release()
            store.retention.delete_expired(None)
        if not problems:
            assert enough.acquire(timeout=60) or problems
    ended.set()
    for thread in readers:
        thread.join()
    assert not problems, problems
    assert store.min_offset > 0


# -- a slow disk: what is not in memory is read by other threads


class SlowDisk:
    """Lets reads of the log wait for `go_on`, as if the pages were not in memory; not replay's."""

    def __init__(self, disk: Disk) -> None:
        self.go_on = threading.Event()
        self.waiting: list[str] = []  # the reads that have begun to wait, by their thread
        self.is_cold: Callable[[str], bool] = lambda path: "commitlog" in path
        disk.before_read = self._before_read

    def _before_read(self, path: str) -> None:
        name = threading.current_thread().name
        if not self.is_cold(path) or name == "IndexBuildService":
            return
        if not may_wait():
            raise NotCachedError(path)
        self.waiting.append(name)
        assert self.go_on.wait(60)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, store: MessageStore, disk: Disk) -> Iterator[SlowDisk]:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    monkeypatch.setattr(message_reader, "COLD_MS", float("inf"))  # the machine may be slow
    fill(store, 0, 60)
    found = SlowDisk(disk)
    yield found
    found.go_on.set()


@pytest.fixture
def other(server: ApiServer) -> Iterator[Client]:
    found = Client(server.endpoint)
    yield found
    found.close()


def fail(_: object, failure: Exception) -> None:
    raise failure


def pull(rid: int, at: int = 0, queue: int = 0, **more: int) -> api.Pull:
    return api.Pull(rid, "TopicA", queue, api.Position(at), max_messages=1, **more)


def test_nobody_waits_for_a_reader_whose_bytes_are_on_the_disk(
    slow: SlowDisk, server: ApiServer, client: Client, other: Client
) -> None:
    """Neither puts nor a client that begins: only the reader itself."""
    for rid in range(20):
        client.send(pull(rid, rid))
    until(lambda: len(slow.waiting) == cold_reads.READERS)
    assert all(name.startswith("ColdReader-") for name in slow.waiting)
    reply = other.ask(api.Put(1, 1), record())
    assert reply.status is api.Status.PUT_OK
    latest = Client(server.endpoint)
    try:
        assert isinstance(latest.ask(api.AskMap(1)), api.Map)
    finally:
        latest.close()
    assert client.silent(0.0)
    slow.go_on.set()
    got = [client.receive() for _ in range(20)]
    assert sorted((reply.rid, *numbers(payload)) for reply, payload in got) == [
        (rid, 2 * rid) for rid in range(20)
    ]


@pytest.fixture
def one_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one thread read, so that reads begin in the order in which they are given out."""
    monkeypatch.setattr(cold_reads, "READERS", 1)


def test_readers_of_the_disk_take_turns(
    one_reader: None, slow: SlowDisk, server: ApiServer, client: Client, other: Client
) -> None:
    """One connection asks for much; another one's read comes next all the same."""
    read: list[int] = []
    queue_1 = api.Pull(99, "TopicA", 1, api.Position(0), max_messages=1)
    real = server._pulls._pull
    server._pulls._pull = lambda request: read.append(request.rid) or real(request)
    for rid in range(20):
        client.send(pull(rid, rid))
    until(lambda: len(server._cold._turns) == 19)
    other.send(queue_1)
    until(lambda: len(server._cold._turns) == 20 and slow.waiting)
    read.clear()
    slow.go_on.set()
    assert other.receive()[0].rid == 99
    assert {client.receive()[0].rid for _ in range(20)} == set(range(20))
    assert read.index(99) <= 1


def test_reads_of_the_disk_are_bounded(
    slow: SlowDisk, monkeypatch: pytest.MonkeyPatch, client: Client, other: Client
) -> None:
    monkeypatch.setattr(cold_reads, "MAX_COLD_OF_ONE", 3)
    for rid in range(cold_reads.READERS + 4):
        client.send(pull(rid, rid))
    reply, _ = client.receive()
    assert reply == api.Failed(cold_reads.READERS + 3, "BUSY", cold_reads.TOO_MANY, reply.master)
    other.send(pull(1))
    assert other.silent(0.0)
    slow.go_on.set()
    assert other.receive()[0].status is api.PullStatus.FOUND
    assert all(client.receive()[0].count == 1 for _ in range(cold_reads.READERS + 3))


def test_a_connection_that_asks_for_little_is_never_refused_because_of_others(
    slow: SlowDisk, monkeypatch: pytest.MonkeyPatch, client: Client, other: Client
) -> None:
    """However much of the disk others ask for, and again as soon as they are answered."""
    monkeypatch.setattr(cold_reads, "MAX_COLD", 2)
    for rid in range(cold_reads.READERS + 3):
        client.send(pull(rid, rid))
    assert client.receive()[0].status == "BUSY"
    other.send(pull(1))
    other.send(pull(3))
    assert other.receive()[0].rid == 3  # it has one that waits
    slow.go_on.set()
    reply, _ = other.receive()
    assert (reply.rid, reply.status) == (1, api.PullStatus.FOUND)


def test_a_slow_read_that_fails_is_answered_with_the_reason(
    slow: SlowDisk, store: MessageStore, client: Client, disk: Disk
) -> None:
    disk.bad.append(where(store, 5))
    client.send(pull(1, 5))
    until(lambda: slow.waiting)
    slow.go_on.set()
    reply, _ = client.receive()
    assert reply.status == "StoreError" and disk.bad[0][0] in reply.reason


def test_reads_that_end_while_others_are_answered_wait_for_the_next_iteration() -> None:
    """A disk that is as fast as the API does not keep its thread from puts."""
    read, answered = threading.Semaphore(0), list[int]()
    reads = cold_reads.ColdReads(read.release, raise_failure)
    reads.start()
    try:
        for number in range(50):
            assert reads.accept("a client", lambda: b"", lambda _, n=number: answer(n))

        def answer(number: int) -> None:
            if len(answered) < 50 - cold_reads.READERS:
                assert read.acquire(timeout=60)  # one more is there
            answered.append(number)

        assert read.acquire(timeout=60)
        reads.finish(fail)
        assert 1 <= len(answered) <= cold_reads.READERS
        while len(answered) < 50:
            reads.finish(fail)
    finally:
        reads.stop()


def test_a_reader_that_waits_keeps_nothing_of_what_it_has_read() -> None:
    """Four of them would keep 16 MiB, as long as nobody else needs the disk."""

    class Result:
        pass

    read, found = threading.Semaphore(0), list[weakref.ref[Result]]()
    reads = cold_reads.ColdReads(read.release, raise_failure)
    reads.start()
    try:
        assert reads.accept("a client", Result, lambda result: found.append(weakref.ref(result)))
        assert read.acquire(timeout=60)
        reads.finish(fail)
        until(lambda: found[0]() is None)
    finally:
        reads.stop()


def test_nothing_is_read_from_the_disk_for_a_client_that_has_no_room(
    slow: SlowDisk, server: ApiServer, client: Client
) -> None:
    for rid in range(cold_reads.READERS + 10):
        client.send(pull(rid, rid))
    until(lambda: len(server._cold._turns) == 10)
    until(lambda: len(slow.waiting) == cold_reads.READERS)
    server._pulls._has_room = lambda _: False  # as when it reads no reply any more
    slow.go_on.set()
    for _ in range(cold_reads.READERS + 10):
        reply, _ = client.receive()
        assert (reply.status, reply.reason) == ("BUSY", UNREAD)
    assert len(slow.waiting) == cold_reads.READERS


@pytest.mark.parametrize("what", ["a pull", "positions"])
def test_a_failure_to_answer_what_was_read_does_not_end_the_node(
    slow: SlowDisk, store: MessageStore, server: ApiServer, client: Client, other: Client, what: str
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a mistake")

    if what == "a pull":
        server._pulls._refusal = broken  # type: ignore[assignment]
        client.send(pull(1))
    else:
        slow.is_cold = lambda path: False
        client.ask(api.Commit(1, "g", "TopicA", {0: api.Position(3)}))
        store.set_limits(readable=store.max_offset)
        assert store.wait_dispatched(store.max_offset, 60)
        slow.is_cold = lambda path: "commitlog" in path
        server._positions.take = broken  # type: ignore[assignment]
        client.send(api.Fetch(2, "g", "TopicA"))
    until(lambda: slow.waiting)
    slow.go_on.set()
    if what == "a pull":
        until(lambda: server._connections.ended == 1)
    else:
        assert "KeyError" in client.receive()[0].reason
    assert other.ask(api.Put(3, 1), record()).status is api.Status.PUT_OK


def test_a_parked_pull_whose_record_is_on_the_disk_only(
    slow: SlowDisk, store: MessageStore, server: ApiServer, client: Client
) -> None:
    """It is answered when the disk has it; one whose wait ends meanwhile gets it too."""
    client.send(pull(1, 30, wait_ms=60_000))
    client.send(pull(2, 30, wait_ms=1))
    until(lambda: server._pulls.parked == 1)  # the wait of the second is over
    assert client.receive()[0].status is api.PullStatus.NO_NEW
    client.send(pull(3, 30, wait_ms=60_000))
    until(lambda: server._pulls.parked == 2)
    fill(store, 60, 2)
    server.wake_readers()
    until(lambda: len(slow.waiting) == 2)
    for parked in list(server._pulls._waiting._deadlines):
        parked.is_over = True
    slow.go_on.set()
    assert {client.receive()[0].count for _ in range(2)} == {1}
    assert server._pulls.parked == 0 and not server._pulls._waiting._of_connection


def test_a_reader_that_leaves_while_its_bytes_are_read_leaves_nothing_behind(
    slow: SlowDisk, server: ApiServer, client: Client, other: Client
) -> None:
    leaving = Client(server.endpoint)
    for rid in range(20):
        leaving.send(pull(rid, rid))
    until(lambda: len(server._cold._turns) == 20 - cold_reads.READERS)
    leaving.close()
    until(lambda: server.connections == 0)
    slow.go_on.set()
    assert client.ask(pull(1)).count == 1
    assert len(slow.waiting) == cold_reads.READERS + 1  # the rest was not read
    assert not len(server._cold._turns)


def test_committed_positions_are_read_from_a_slow_disk_beside_puts(
    slow: SlowDisk, store: MessageStore, client: Client, other: Client
) -> None:
    slow.is_cold = lambda path: False
    place = api.Position(3)
    done = client.ask(api.Commit(1, "g", "TopicA", {0: place}))
    assert done.status is api.Status.PUT_OK
    store.set_limits(readable=store.max_offset)
    assert store.wait_dispatched(store.max_offset, 60)
    slow.is_cold = lambda path: "commitlog" in path
    client.send(api.Fetch(2, "g", "TopicA"))
    until(lambda: slow.waiting)
    assert other.ask(api.Put(3, 1), record()).status is api.Status.PUT_OK
    slow.go_on.set()
    reply, _ = client.receive()
    assert reply.positions == {0: place}
