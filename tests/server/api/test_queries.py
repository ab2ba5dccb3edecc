"""Queries by key, time and offset: beside puts, bounded, and honest about what they left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.protocol import api
from hastore.record.codec import decode_record
from hastore.record.hashes import KeyHasher
from hastore.server.api import queries, ranges
from hastore.server.api.server import ApiServer
from hastore.store import message_reader
from hastore.store.derived.key_index import KeyIndex, KeyWalk
from hastore.store.log import commit_log
from hastore.store.message_reader import MessageReader
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.server.api.kit import Client, record
from tests.store import kit
from tests.store.test_cold_reads import Disk
from tests.store.test_store_times import START, Clock

# Java's hash is the same for "Aa" and "BB", so each key of one topic has the hash of the other's.
TOPIC, TWIN = "TopicAa", "TopicBB"


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def clock() -> Clock:
    return Clock(START)


@pytest.fixture
def store(tmp_path: Path, disk: Disk, clock: Clock) -> Iterator[MessageStore]:
    opened = MessageStore(kit.config(tmp_path), fs=disk, clock=clock, store_host=kit.HOST)
    opened.open()
    setattr(opened, "default_queues", 4)  # noqa: B010 (for the fake node)
    opened.set_limits(confirmed=0, readable=0)
    yield opened
    disk.before_read = lambda path: None
    disk.bad.clear()
    opened.close()


@pytest.fixture
def backend(store: MessageStore) -> FakeBackend:
    found = FakeBackend()
    found.store = store
    return found


@pytest.fixture
def other(server: ApiServer) -> Iterator[Client]:
    found = Client(server.endpoint)
    yield found
    found.close()


def fill(store: MessageStore, count: int, topic: str = TOPIC, size: int = 8) -> None:
    """Put messages with the same key; the number of each begins its body."""
    for first in range(0, count, 500):
        kit.put(
            store,
            *[
                kit.message(number, topic=topic, size=size, properties=[("KEYS", "k")])
                for number in range(first, min(first + 500, count))
            ],
        )
    readable(store)


def readable(store: MessageStore) -> None:
    store.set_limits(readable=store.max_offset)
    assert store.wait_dispatched(store.max_offset, 60), store.problems


def hash_of(topic: str, key: str) -> int:
    return KeyHasher().key_hash(topic, key.encode())


def numbers(payload: bytes) -> list[int]:
    found, at = [], 0
    while at < len(payload):
        one = decode_record(payload, at)
        found.append(int(one.body[:8]))
        at += one.size
    return found


class Gate:
    """A disk on which reads of some files wait until the test lets them go on."""

    def __init__(self, disk: Disk, part: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

        def wait(path: str) -> None:
            if part in path and threading.current_thread().name != "MainThread":
                self.reached.set()
                assert self.opened.wait(60)

        disk.before_read = wait


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (api.FindKey(1, TOPIC, "k"), "index"),
        (api.FindKey(1, TOPIC, "k"), "commitlog"),
        (api.FindTime(1, TOPIC, 0, 1), "commitlog"),
        (api.FindOffset(1, 0), "commitlog"),
    ],
    ids=["key-index", "key-log", "time", "offset"],
)
def test_a_put_is_answered_while_a_query_waits_for_the_disk(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, disk: Disk, client: Client,
    other: Client, request_: api.Request, part: str,
) -> None:  # fmt: skip
    fill(store, 3)
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    gate = Gate(disk, part)
    client.send(request_)
    assert gate.reached.wait(60)
    try:
        other.send(api.Put(1, 1), record())
        assert other.receive(10)[0].status is api.Status.PUT_OK
        other.send(api.AskMap(2))
        assert isinstance(other.receive(10)[0], api.Map)
    finally:
        gate.opened.set()
    reply, payload = client.receive()
    assert reply.rid == 1 and not isinstance(reply, api.Failed), reply
    if isinstance(reply, api.Found):
        assert numbers(payload) == ([2, 1, 0] if "key" in str(type(request_)).lower() else [0])


def test_messages_of_another_topic_with_the_same_hash_hide_none(
    store: MessageStore, client: Client
) -> None:
    """The index finds a hash: what it finds of another topic must not count as found."""
    kit.put(store, kit.message(7, topic=TWIN, properties=[("KEYS", "k")]))
    fill(store, 40)
    assert client.ask(api.FindKey(1, TWIN, "k", 1)).count == 1
    assert numbers(client.payload) == [7]
    assert client.ask(api.FindKey(2, TOPIC, "k", 3)).count == 3
    assert numbers(client.payload) == [39, 38, 37]


def test_a_key_that_a_message_has_twice_counts_once(store: MessageStore, client: Client) -> None:
    for number in range(4):
        kit.put(store, kit.message(number, properties=[("UNIQ_KEY", "k"), ("KEYS", "k k a")]))
    readable(store)
    assert client.ask(api.FindKey(1, "TopicA", "k", 3)).count == 3
    assert numbers(client.payload) == [3, 2, 1]


def test_messages_that_are_not_readable_yet_do_not_count(
    store: MessageStore, client: Client
) -> None:
    fill(store, 10)
    end = store.max_offset
    kit.put(store, *[kit.message(n, topic=TOPIC, properties=[("KEYS", "k")]) for n in range(40)])
    assert store.wait_dispatched(store.max_offset, 60)
    assert store.readable_offset == end
    assert client.ask(api.FindKey(1, TOPIC, "k", 5)).count == 5
    assert numbers(client.payload) == [9, 8, 7, 6, 5]


class Counted:
    """The looks at the index of all searches, and the records that they read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: MessageStore) -> None:
        self.steps, self.reads = 0, 0
        real_walk, real_read = KeyIndex.walk_on, MessageReader.record_bytes

        def walk_on(index: KeyIndex, walk: KeyWalk, most: int) -> list[tuple[int, int]]:
            before = walk.steps
            found = real_walk(index, walk, most)
            assert walk.steps - before <= most
            self.steps += walk.steps - before
            return found

        def record_bytes(reader: MessageReader, offset: int) -> bytes | None:
            self.reads += 1
            return real_read(reader, offset)

        monkeypatch.setattr(KeyIndex, "walk_on", walk_on)
        monkeypatch.setattr(MessageReader, "record_bytes", record_bytes)


def test_a_search_is_cut_short_after_so_many_entries_and_says_so(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, clock: Clock
) -> None:
    """All keys of one slot form a chain, and an absent key walks through all of it."""
    seconds = 3_000
    for number in range(seconds):
        clock.now = START + 1000 * number
        kit.put(store, kit.message(number, topic=TWIN, properties=[("KEYS", f"a{number}")]))
    readable(store)
    counted = Counted(monkeypatch, store)
    chain = [n for n in range(seconds) if hash_of(TWIN, f"a{n}") % 100 == hash_of(TOPIC, "k") % 100]
    reply = client.ask(api.FindKey(1, TOPIC, "k"))
    assert (reply.count, reply.cut_ms, counted.reads) == (0, None, 0)
    assert len(chain) <= counted.steps <= len(chain) + len(store._index._files) + 1
    monkeypatch.setattr(message_reader, "STEP", 2)
    monkeypatch.setattr(message_reader, "STEPS_MAX", 8)
    counted.steps = 0
    reply = client.ask(api.FindKey(2, TOPIC, "k"))
    assert reply.count == 0 and counted.steps == 8
    assert reply.cut_ms // 1000 * 1000 in [START + 1000 * n for n in chain]
    monkeypatch.setattr(message_reader, "STEPS_MAX", 2)
    reply = client.ask(api.FindKey(3, TOPIC, "k", end_ms=START + 1_000_000))
    assert reply.cut_ms == START + 1_000_000  # so far only files that are too new were skipped


def test_a_search_among_messages_of_the_same_hash_reads_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client
) -> None:
    kit.put(store, kit.message(7, topic=TWIN, properties=[("KEYS", "k")]))
    fill(store, 500)
    counted = Counted(monkeypatch, store)
    monkeypatch.setattr(message_reader, "READS_MAX", 50)
    reply = client.ask(api.FindKey(1, TWIN, "k"))
    assert reply.count == 0 and reply.cut_ms is not None and counted.reads == 50
    monkeypatch.setattr(message_reader, "READS_MAX", 501)
    reply = client.ask(api.FindKey(2, TWIN, "k"))
    assert reply.count == 1 and reply.cut_ms is None and counted.reads == 50 + 501
    monkeypatch.setattr(message_reader, "READ_BYTES_MAX", 1_000)
    reply = client.ask(api.FindKey(3, TWIN, "k"))
    assert reply.count == 0 and reply.cut_ms is not None and counted.reads < 50 + 501 + 10


def test_messages_of_the_second_after_the_span_do_not_use_up_the_reads(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, clock: Clock
) -> None:
    """The index has whole seconds: a search must come past the rest of the last one."""
    fill(store, 3)
    clock.now += 1
    fill(store, 200)
    monkeypatch.setattr(message_reader, "READS_MAX", 10)
    reply = client.ask(api.FindKey(1, TOPIC, "k", 32, 0, START))
    assert numbers(client.payload) == [2, 1, 0] and reply.cut_ms is None
    reply = client.ask(api.FindKey(2, TOPIC, "k", 5, START + 1, START + 1))
    assert numbers(client.payload) == [199, 198, 197, 196, 195] and reply.cut_ms is None


def test_a_reply_that_has_no_room_for_more_says_so(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client
) -> None:
    fill(store, 10, size=700)
    monkeypatch.setattr(queries, "MAX_FOUND_BYTES", 2_000)
    reply = client.ask(api.FindKey(1, TOPIC, "k"))
    assert numbers(client.payload) == [9, 8] and reply.cut_ms is not None
    reply = client.ask(api.FindKey(2, TOPIC, "k", 2))  # all that was asked for
    assert reply.count == 2 and reply.cut_ms is None


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("queries.MAX_FOUND_BYTES", 2_000),
        ("message_reader.READS_MAX", 3),
        ("message_reader.READ_BYTES_MAX", 2_500),
    ],
)
def test_a_search_that_was_cut_short_goes_on_where_it_was_cut(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, name: str, bound: int
) -> None:
    """All messages were stored in one millisecond, so a time does not say where."""
    kit.put(store, kit.message(0, topic=TWIN, properties=[("KEYS", "k")]))
    fill(store, 10, size=700)
    kit.put(store, *[kit.message(9, topic=TWIN, properties=[("KEYS", "k")]) for _ in range(5)])
    readable(store)
    module, constant = name.split(".")
    monkeypatch.setattr({"queries": queries}.get(module, message_reader), constant, bound)
    before, found = 2**63 - 1, list[int]()
    for _ in range(20):
        reply = client.ask(api.FindKey(1, TOPIC, "k", before=before))
        found += numbers(client.payload)
        if reply.cut_offset is None:
            break
        assert reply.cut_ms is not None and reply.cut_offset < before
        before = reply.cut_offset
    assert found == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0] and reply.cut_ms is None


def test_a_full_reply_says_when_the_message_was_stored_that_it_has_no_room_for(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, clock: Clock
) -> None:
    """So a client of an earlier version goes on there: the index has whole seconds."""
    for number in range(4):
        clock.now = START + 10 * number
        kit.put(store, kit.message(number, topic=TOPIC, size=700, properties=[("KEYS", "k")]))
    readable(store)
    monkeypatch.setattr(queries, "MAX_FOUND_BYTES", 2_000)
    reply = client.ask(api.FindKey(1, TOPIC, "k"))
    assert reply.cut_ms == START + 10
    reply = client.ask(api.FindKey(2, TOPIC, "k", end_ms=reply.cut_ms))
    assert numbers(client.payload) == [1, 0] and reply.cut_ms is None


@pytest.mark.parametrize("at", [0, 88])  # of the header; of the body
def test_a_damaged_message_is_not_said_to_be_missing(
    store: MessageStore, client: Client, at: int
) -> None:
    """Else whoever asks whether an order was stored sends it again."""
    fill(store, 3)
    offsets = [unit.offset for unit in store.queues.read(TOPIC, 0, 0, 3)]
    damaged: list[int] = []
    store.hooks.on_damage = damaged.append
    store.flush()
    file = store.log.queue.find(offsets[1])
    assert file is not None
    kit.scribble(file.path, offsets[1] - file.start + at, b"\xff\xff\xff\xff")
    reply = client.ask(api.FindKey(1, TOPIC, "k"))
    assert numbers(client.payload) == [2, 0] and reply.unreadable == [offsets[1]]
    assert damaged == offsets[1:2], "it is repaired"
    reply = client.ask(api.FindKey(2, TOPIC, "k", 1))
    assert numbers(client.payload) == [2] and reply.unreadable == []
    if not at:  # a scrub finds it
        assert client.ask(api.FindOffset(3, offsets[1])) == api.Found(3, 0)
        store.fence([(offsets[1], offsets[2])], store.times_cut)
    reply = client.ask(api.FindOffset(4, offsets[1]))
    assert reply.status == "CorruptRecordError" and f"offset {offsets[1]} is" in reply.reason
    assert set(damaged) == {offsets[1]}
    inside = client.ask(api.FindOffset(5, offsets[0] + 9))
    assert inside == api.Found(5, 0)


def test_a_search_stops_before_its_time_span_and_begins_near_its_end(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, clock: Clock
) -> None:
    """60,000 entries of a key in one file; each message is a second later than the one before."""
    store._index._entries = 1 << 20  # of the next files
    count = 3_000
    for number in range(count):
        clock.now = START + 1000 * number
        keys = [("KEYS", " ".join(["k"] * 20))]
        kit.put(store, kit.message(number, topic=TOPIC, size=8, properties=keys))
    readable(store)
    counted = Counted(monkeypatch, store)
    late = START + 1000 * (count - 5)
    reply = client.ask(api.FindKey(1, TOPIC, "k", 1_000, late))
    assert numbers(client.payload) == [2999, 2998, 2997, 2996, 2995] and reply.cut_ms is None
    assert counted.steps <= 20 * 20 + 300  # down to the slack of 10 s before it
    counted.steps = 0
    reply = client.ask(api.FindKey(2, TOPIC, "k", 3, 0, START + 1000 * 100))
    assert numbers(client.payload) == [100, 99, 98]
    assert counted.steps <= 20 * 20 + 2 * message_reader.STEP


def test_a_lookup_by_time_looks_at_a_bounded_number_of_messages(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client, clock: Clock
) -> None:
    for number in range(64):
        clock.now = START + 1000 * number
        kit.put(store, kit.message(number))
    readable(store)
    wanted = api.FindTime(1, "TopicA", 0, START + 1000 * 40)
    assert client.ask(wanted) == api.TimeFound(1, 40)
    monkeypatch.setattr(queries, "TIME_STEPS", 3)
    reply = client.ask(wanted)
    assert reply.cut_short and 0 < reply.queue_offset < 40  # earlier, never later


def test_connections_take_turns_and_what_is_late_is_cut_short(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, disk: Disk, server: ApiServer,
    client: Client, other: Client,
) -> None:  # fmt: skip
    kit.put(store, kit.message(7, properties=[("KEYS", "one")]))
    fill(store, 2_000)
    monkeypatch.setattr(ranges, "SLICE_MS", 0.0)  # each step is a slice
    monkeypatch.setattr(ranges, "GROWING_MS", 0.0)
    monkeypatch.setattr(commit_log, "HOT_BYTES", 0)
    served: list[object] = []
    real = queries.QueryService._slice

    def in_turn(service: queries.QueryService, query: Any) -> object:
        served.append(query.request)
        return real(service, query)

    monkeypatch.setattr(queries.QueryService, "_slice", in_turn)
    gate = Gate(disk, "index")
    for rid in range(queries.MAX_QUERIES_OF_ONE):
        client.send(api.FindKey(rid, TWIN, "k", 1_000))  # reads all 2,000 messages of the twin
    assert gate.reached.wait(60)
    client.send(api.FindKey(rid + 1, TWIN, "k"))
    assert client.receive()[0] == api.Failed(rid + 1, "BUSY", "too many queries wait")
    short = api.FindKey(1, "TopicA", "one")
    other.send(short)
    other.ask(api.AskMap(2))  # the query has arrived too
    gate.opened.set()
    assert other.receive()[0] == api.Found(1, 1)
    turns = [place for place, request in enumerate(served) if request == short]
    assert turns[0] == 1 and turns == list(range(1, 2 * len(turns), 2))  # every second slice
    monkeypatch.setattr(server._queries, "_clock", Later())
    for _ in range(queries.MAX_QUERIES_OF_ONE):
        reply = client.receive()[0]
        begun = isinstance(reply, api.Found)
        assert reply.cut_ms is not None if begun else reply.status == "BUSY"


def test_a_connection_with_one_query_is_never_refused_because_of_others(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, disk: Disk, client: Client, other: Client
) -> None:
    """However many others ask, and again as soon as they are answered."""
    fill(store, 3)
    monkeypatch.setattr(queries, "MAX_QUERIES", 2)
    gate = Gate(disk, "index")
    for rid in range(3):
        client.send(api.FindKey(rid, TOPIC, "k"))
    assert client.receive()[0] == api.Failed(2, "BUSY", "too many queries wait")
    for rid in range(2):
        other.send(api.FindKey(rid, TOPIC, "k"))
    assert other.receive()[0].rid == 1  # it has one that waits
    gate.opened.set()
    assert other.receive()[0] == api.Found(0, 3)


class Later:
    """A clock that is a minute ahead."""

    def monotonic_ms(self) -> float:
        return SYSTEM_CLOCK.monotonic_ms() + 60_000.0


def test_queries_of_a_node_that_is_removed_meanwhile_are_refused(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, backend: FakeBackend, disk: Disk,
    client: Client, other: Client,
) -> None:  # fmt: skip
    fill(store, 3)
    gate = Gate(disk, "index")
    client.send(api.FindKey(1, TOPIC, "k"))
    assert gate.reached.wait(60)
    backend.removed = "removed from its group"
    gate.opened.set()
    reply = client.receive()[0]
    assert (reply.status, reply.reason) == ("SERVICE_NOT_AVAILABLE", "removed from its group")


def test_a_cut_of_the_log_begins_a_search_anew(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore
) -> None:
    """What was found may have been cut away: the answer has none of it."""
    fill(store, 300)
    places = store.reader.query_key(TOPIC, "k", max_messages=1_000)
    search = store.reader.search_key(TOPIC, "k", max_messages=1_000)
    while len(search.found) < 100:
        search.step()
    store.truncate(places[50])
    store.log.queue.release()
    more = [kit.message(n, topic=TOPIC, properties=[("KEYS", "k")]) for n in (7, 8)]
    kit.put(store, *more)
    readable(store)
    while not search.ended:
        search.step()
    assert set(places[51:]) <= set(search.found) and not set(places[:50]) & set(search.found)


@pytest.mark.parametrize("by", ["key", "offset"])
def test_a_query_begins_anew_after_a_failover_that_cut_the_log(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, backend: FakeBackend, client: Client,
    by: str,
) -> None:  # fmt: skip
    """It finds neither what was cut nor what is not confirmed, though both were below its limit."""
    fill(store, 3)
    latest, cut_at, oldest = store.reader.query_key(TOPIC, "k")
    real = store.reader.record_bytes

    def cut(offset: int) -> bytes | None:
        found = real(offset)
        if offset == (oldest if by == "key" else latest) and len(backend.entries) == 1:
            store.set_limits(readable=cut_at)
            store.truncate(cut_at)
            backend.entries = [*backend.entries, (backend.epoch() + 1, cut_at)]
            for n in (7, 8, 9):
                kit.put(store, kit.message(n, topic=TOPIC, size=8, properties=[("KEYS", "k")]))
            assert store.wait_dispatched(store.max_offset, 60), store.problems
            if by == "offset":
                store.set_limits(readable=store.max_offset)
        return found

    monkeypatch.setattr(store.reader, "record_bytes", cut)
    asked = api.FindKey(1, TOPIC, "k") if by == "key" else api.FindOffset(1, latest)
    assert client.ask(asked).count == 1
    assert numbers(client.payload) == ([0] if by == "key" else [8])


def test_no_message_is_denied_that_replay_has_not_read(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client
) -> None:
    """The index lacks it; where replay has stopped it says so at once."""
    monkeypatch.setattr(queries, "REPLAY_S", 0.0)
    fill(store, 1)
    with store.replay.paused():
        kit.put(store, kit.message(1, topic=TOPIC, size=8, properties=[("KEYS", "new")]))
        store.set_limits(readable=store.max_offset)
        late = client.ask(api.FindKey(1, TOPIC, "new"))
        assert (late.status, late.reason) == (
            "BUSY",
            f"replay has come to offset {store.dispatched_offset:,}, and has not read what is"
            " stored after it: it is late: try again",
        )
        assert client.ask(api.FindKey(2, TOPIC, "k")).count == 1, "what it knows it says"
        monkeypatch.setattr(store.replay, "blocked_reason", "replay stopped")
        assert client.ask(api.FindKey(3, TOPIC, "new")).reason.endswith(": replay stopped")
        monkeypatch.setattr(store.replay, "blocked_reason", None)
    readable(store)
    assert client.ask(api.FindKey(4, TOPIC, "new")).count == 1
    assert client.ask(api.FindKey(5, TOPIC, "no")).count == 0


def test_a_query_waits_for_replay_that_is_late(
    monkeypatch: pytest.MonkeyPatch, store: MessageStore, client: Client
) -> None:
    monkeypatch.setattr(queries, "REPLAY_S", 60.0)
    waits, wait = threading.Event(), store.wait_dispatched

    def waited(offset: int, timeout_s: float) -> bool:
        waits.set()
        return wait(offset, timeout_s)

    monkeypatch.setattr(store, "wait_dispatched", waited)
    with store.replay.paused():
        kit.put(store, kit.message(1, topic=TOPIC, size=8, properties=[("KEYS", "new")]))
        store.set_limits(readable=store.max_offset)
        client.send(api.FindKey(1, TOPIC, "new"))
        assert waits.wait(60)
    assert client.receive()[0].count == 1
