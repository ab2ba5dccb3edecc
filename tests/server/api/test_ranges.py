"""Digests and bytes of ranges: answered by a thread of their own, bounded, honest about cuts."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hastore.config.model import ApiConfig, RetentionConfig
from hastore.protocol import api
from hastore.server.api import ranges
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.log import commit_log
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, record, until
from tests.store import kit
from tests.store.test_cold_reads import Disk, open_store

OLD, NEW = 65537, 131074


def fill(store: MessageStore, numbers: range) -> None:
    kit.put(store, *[kit.message(number, size=700) for number in numbers])
    store.set_limits(readable=store.max_offset)
    assert store.wait_dispatched(store.max_offset, 60), store.problems


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path, disk: Disk) -> Iterator[MessageStore]:
    opened = open_store(tmp_path, disk, retention=RetentionConfig(max_size_bytes=kit.FILE_SIZE))
    opened.set_limits(confirmed=0, readable=0)
    fill(opened, range(200))
    yield opened
    disk.bad.clear()
    opened.close()


@pytest.fixture
def backend(store: MessageStore) -> FakeBackend:
    found = FakeBackend()
    setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
    found.store = store
    return found


def raw(store: MessageStore, start: int, end: int) -> bytes:
    """Return the bytes as they are in the files."""
    log, size = b"", store.file_size
    for name in sorted(Path(store.log.directory).iterdir()):
        begin = int(name.name)
        if begin < end and begin + size > start:
            log += name.read_bytes()[max(0, start - begin) : max(0, end - begin)]
    return log


@pytest.mark.parametrize("hot_bytes", [0, commit_log.HOT_BYTES])
def test_a_digest_is_that_of_the_files_bytes(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, hot_bytes: int
) -> None:
    monkeypatch.setattr(commit_log, "HOT_BYTES", hot_bytes)
    end = store.readable_offset
    assert end > 2 * store.file_size
    for start, stop in [(0, end), (1, end - 1), (end - 1, end), (store.file_size - 3, end), (5, 5)]:
        wanted = raw(store, start, stop)
        assert len(wanted) == stop - start
        reply = client.ask(api.AskDigest(1, start, stop))
        assert reply.digest == xxhash.xxh3_128(wanted).digest()
        assert (reply.min_offset, reply.readable_offset) == (0, end)
        assert reply.epochs == [(OLD, start)]
        reply = client.ask(api.AskDigest(2, start, stop, "sha256"))
        assert reply.digest == hashlib.sha256(wanted).digest()
        reply = client.ask(api.AskBytes(3, start, stop))
        assert reply.present and client.payload == wanted


@pytest.mark.parametrize("kind", [api.AskDigest, api.AskBytes])
def test_a_range_that_is_not_readable_has_no_digest(
    store: MessageStore, client: Client, kind: type[Any]
) -> None:
    def refused(start: int, end: int) -> bool:
        reply = client.ask(kind(1, start, end))
        assert reply.readable_offset == store.readable_offset
        return reply.digest is None if kind is api.AskDigest else not reply.present

    end = store.max_offset
    store.set_limits(readable=end - 100)
    assert refused(0, end - 99) and refused(end - 100, end) and refused(2**62, 2**62 + 1)
    assert not refused(0, end - 100) and not refused(end - 100, end - 100)
    store.flush()
    assert store.retention.delete_expired(None)
    first = store.min_offset
    assert first >= store.file_size
    assert refused(0, 1) and refused(first - 1, first + 1) and not refused(first, first + 1)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (api.AskDigest(1, 0, api.MAX_DIGEST_BYTES + 1), "0 to 16777216 bytes"),
        (api.AskDigest(1, 5, 4), "[5, 4)"),
        (api.AskDigest(1, 0, 4, "md5"), "'md5' is no digest; the digests are xxh3-128, sha256"),
        (api.AskBytes(1, 0, api.MAX_RANGE_BYTES + 1), "0 to 1048576 bytes"),
    ],
)
def test_wrong_ranges_and_algorithms_are_refused(
    client: Client, request_: api.RangeQuestion, text: str
) -> None:
    reply = client.ask(request_)
    assert reply.status == "UsageError" and text in reply.reason
    assert client.ask(api.AskDigest(2, 0, 1)).digest is not None


def test_a_bad_sector_fails_only_the_digest_that_reads_it(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, disk: Disk
) -> None:
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    name = sorted(Path(store.log.directory).iterdir())[1]
    disk.bad.append((str(name), 4096, 4096 + 512))
    at = int(name.name) + 4096
    reply = client.ask(api.AskDigest(1, 0, at + 1))
    assert reply.status == "StoreError" and "Input/output error" in reply.reason
    assert client.ask(api.AskBytes(2, at, at + 1)).status == "StoreError"
    assert client.ask(api.AskDigest(3, 0, at)).digest is not None


class Gate:
    """Holds the thread of digests before each piece, until the test opens it."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self.open = threading.Event()
        self.then = lambda: None
        real = store.view

        @contextmanager
        def view(offset: int, most: int) -> Iterator[memoryview]:
            self.reached.release()
            assert self.open.wait(60)
            with real(offset, most) as lent:
                yield lent
            then, self.then = self.then, lambda: None
            then()

        monkeypatch.setattr(store, "view", view)


def test_a_digest_does_not_keep_other_requests_waiting_and_the_queue_is_bounded(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, server: ApiServer
) -> None:
    gate = Gate(store, monkeypatch)
    first, second = Client(server.endpoint), Client(server.endpoint)
    others = [Client(server.endpoint) for _ in range(ranges.MAX_RANGES // ranges.MAX_RANGES_OF_ONE)]
    try:
        for rid in range(ranges.MAX_RANGES_OF_ONE):
            first.send(api.AskDigest(rid, 0, 100))
        assert gate.reached.acquire(timeout=60)
        assert second.ask(api.AskMap(1)).map.node == 1  # while the digest is held
        assert first.ask(api.AskDigest(99, 0, 100)).status == "BUSY"  # of one connection
        for number, other in enumerate(others, 2):
            for rid in range(ranges.MAX_RANGES_OF_ONE):
                other.send(api.AskBytes(rid, 0, number))
            other.send(api.AskMap(50))
            told = [other.receive()[0]]
            while told[-1].rid != 50:
                told.append(other.receive()[0])
            # The last one finds the node's queue full.
            refused = ranges.MAX_RANGES_OF_ONE if other is others[-1] else 0
            assert [reply.status for reply in told[:-1]] == ["BUSY"] * refused
        gate.open.set()
        replies = [first.receive()[0] for _ in range(ranges.MAX_RANGES_OF_ONE)]
        assert [reply.rid for reply in replies] == list(range(ranges.MAX_RANGES_OF_ONE))
        assert len({reply.digest for reply in replies}) == 1
        for number, other in enumerate(others[:-1], 2):
            found = [other.receive() for _ in range(ranges.MAX_RANGES_OF_ONE)]
            assert all(reply.present and len(sent) == number for reply, sent in found)
        assert first.ask(api.AskDigest(100, 0, 100)).digest == replies[0].digest  # room again
    finally:
        gate.open.set()
        for each in (first, second, *others):
            each.close()


def test_digests_of_a_connection_that_has_ended_are_dropped(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, server: ApiServer
) -> None:
    gate = Gate(store, monkeypatch)
    gone, other = Client(server.endpoint), Client(server.endpoint)
    try:
        for rid in range(ranges.MAX_RANGES_OF_ONE):
            gone.send(api.AskDigest(rid, 0, 100))
        assert gate.reached.acquire(timeout=60)
        gone.close()
        until(lambda: server.connections == 0)
        gate.open.set()
        assert other.ask(api.AskDigest(1, 0, 100)).digest is not None
        assert gate.reached.acquire(timeout=60)  # the other client's
        assert not gate.reached.acquire(blocking=False)
        assert server._ranges.pending == 0 and not server._ranges._of_one
    finally:
        gate.open.set()
        other.close()


def test_a_node_stops_while_a_digest_is_under_way(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, backend: FakeBackend
) -> None:
    gate = Gate(store, monkeypatch)
    monkeypatch.setattr(ranges, "PIECE_BYTES", 10)
    running = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    running.start()
    client = Client(running.endpoint)
    try:
        client.send(api.AskDigest(1, 0, 20_000))
        assert gate.reached.acquire(timeout=60)
        running.stopping.set()
        gate.open.set()
        assert running.stop(60) and not running._ranges.alive
    finally:
        gate.open.set()
        client.close()


@pytest.mark.parametrize("kind", [api.AskDigest, api.AskBytes])
def test_bytes_that_were_cut_and_written_again_meanwhile_count_as_the_new_epochs(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, backend: FakeBackend,
    kind: type[Any],
) -> None:  # fmt: skip
    backend.entries = [(OLD, 0)]
    common = store.file_size
    end = common + 3_000
    gate = Gate(store, monkeypatch)
    gate.open.set()
    before = raw(store, common, end)

    def flip() -> None:
        store.set_limits(readable=common)
        store.truncate(common)
        backend.entries = [(OLD, 0), (NEW, common)]
        fill(store, range(1000, 1100))

    gate.then = flip
    reply = client.ask(kind(1, common, end))
    after = raw(store, common, end)
    assert after != before and reply.epochs == [(NEW, common)]
    if kind is api.AskDigest:
        assert reply.digest == xxhash.xxh3_128(after).digest()
    else:
        assert client.payload == after


def test_a_cut_during_a_digest_gives_none(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client
) -> None:
    """The history changes only after the bytes are gone, so it alone would not tell."""
    monkeypatch.setattr(ranges, "PIECE_BYTES", 100)
    gate = Gate(store, monkeypatch)
    gate.open.set()

    def cut() -> None:
        store.set_limits(readable=50)
        store.truncate(50)

    gate.then = cut
    reply = client.ask(api.AskDigest(1, 0, 1000))
    assert reply.digest is None and reply.readable_offset < 1000


def test_the_thread_rests_only_while_the_log_grows(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, server: ApiServer
) -> None:
    monkeypatch.setattr(ranges, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(ranges, "GROWING_MS", 0.001)
    monkeypatch.setattr(ranges, "SLICE_MS", 0.0)
    rests: list[float] = []

    def wait(timeout: float) -> bool:
        rests.append(timeout)
        return False

    client.ask(api.AskDigest(1, 0, 10))
    monkeypatch.setattr(server._ranges.stopping, "wait", wait)
    client.ask(api.AskDigest(2, 0, 50_000))
    assert rests == []
    monkeypatch.setattr(ranges, "GROWING_MS", 60_000.0)
    kit.put(store, kit.message(1))
    client.ask(api.AskDigest(3, 0, 50_000))
    assert len(rests) == 5 and all(0.0 < rest <= ranges.REST_MAX_S for rest in rests)
    monkeypatch.setattr(ranges, "SLICE_MS", float("inf"))
    client.ask(api.AskDigest(4, 0, 50_000))
    assert len(rests) == 5  # there is more to do before the next rest


def test_a_fake_log_has_digests_too(tmp_path: Path) -> None:
    backend = FakeBackend()
    running = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    running.start()
    client = Client(running.endpoint)
    try:
        client.ask(api.Put(1), record())
        reply = client.ask(api.AskDigest(2, 0, len(backend.store.log)))
        assert reply.digest == xxhash.xxh3_128(bytes(backend.store.log)).digest()
    finally:
        client.close()
        assert running.stop(60)
