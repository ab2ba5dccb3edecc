"""The client API over a real store: unreadable sectors, and retention while clients read."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.protocol import api
from hastore.server.api.server import ApiServer
from hastore.store import message_reader
from hastore.store.log import commit_log
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client
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
