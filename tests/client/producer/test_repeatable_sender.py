"""Attempts that are repeated from their beginning store each record once, whatever happens between.

The model test runs the sender over a simulated pair of nodes with the store's own deduplication
window: records are cut by failovers, refused, delivered late after their attempt has died, and
forgotten by the window. HASTORE_REPEAT_SEED replays one run, HASTORE_REPEAT_RUNS sets how many.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hastore.client.connections.transport import Arrival
from hastore.client.producer import repeatable_sender
from hastore.client.producer.preparer import RecordEncoder
from hastore.client.producer.repeatable_sender import RecordsDifferError, RepeatableSender
from hastore.config.model import ApiConfig
from hastore.errors import (
    ClientError,
    HastoreError,
    MessageIllegalError,
    ProtocolError,
    UnreachableError,
)
from hastore.fs.filesystem import REAL
from hastore.protocol import api
from hastore.record.codec import NO_HOST, decode_record
from hastore.record.properties import producer_of
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.append import dedup_window
from hastore.store.append.dedup_window import DedupWindow, UnheldNumber
from tests.api_fakes import FakeBackend

PID = "p"
NODES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


def records_of(numbers: Iterable[int], text: str = "row") -> bytes:
    encoder = RecordEncoder(PID, NO_HOST)
    return b"".join(
        encoder.encode("t", b"%s %d" % (text.encode(), number), 0, [], number, 1)
        for number in numbers
    )


def split(payload: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(payload):
        size = int.from_bytes(payload[at : at + 4])
        yield payload[at : at + size]
        at += size


def put_all(sender: RepeatableSender, first: int, rows: int, chunk: int, text: str = "row") -> None:
    for at in range(first, first + rows, chunk):
        numbers = range(at, min(at + chunk, first + rows))
        sender.put("t", records_of(numbers, text), at, len(numbers))
    sender.finish()


# -- over a real server


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    node = FakeBackend()
    server = ApiServer("tcp://127.0.0.1:0", node, ApiConfig(), on_failure=raise_failure)
    server.start()
    node.endpoint = server.endpoint  # type: ignore[attr-defined]
    yield node
    server.stop()


@pytest.fixture
def make(backend: Any) -> Iterator[Any]:
    made: list[RepeatableSender] = []

    def one(**more: Any) -> RepeatableSender:
        made.append(RepeatableSender((backend.endpoint,), PID, **more))
        return made[-1]

    yield one
    for sender in made:
        sender.close()


def numbers_in(backend: FakeBackend) -> list[int]:
    return [int(dict(r.property_pairs)["HS_SEQ"]) for r in backend.store._records()]


def test_a_second_attempt_goes_on_where_the_first_ended(backend: FakeBackend, make: Any) -> None:
    threads = set(threading.enumerate())
    first = make()
    assert first.begin(0) == 0 and first.last_known is None
    for at in range(0, 2_600, 200):
        first.put("t", records_of(range(at, at + 200)), at, 200)
    first._drain()
    first.close()  # killed: `finish` was not called
    assert set(threading.enumerate()) <= threads  # a task that is killed leaves none behind
    second = make()
    assert second.begin(0) == 2_599 - 1_022 and second.last_known == 2_599
    assert second.born_host().text == "127.0.0.1:0"
    put_all(second, 0, 3_000, 250)
    assert second.unconfirmed is None
    third = make()
    assert third.begin(0) == 2_999 - 1_022
    put_all(third, 0, 3_000, 100)
    assert numbers_in(backend) == list(range(3_000))


def test_an_attempt_with_other_rows_is_noticed_before_it_stores_any(
    backend: FakeBackend, make: Any
) -> None:
    first = make()
    first.begin(0)
    put_all(first, 0, 10, 4)
    other = make()
    assert other.begin(0) == 0
    with pytest.raises(RecordsDifferError, match="another record as number 0"):
        put_all(other, 0, 20, 7, "another")
    assert numbers_in(backend) == list(range(10))


def test_a_later_batch_begins_with_its_own_numbers(backend: FakeBackend, make: Any) -> None:
    one = make()
    one.begin(0)
    put_all(one, 0, 5, 5)
    two = make()
    assert two.begin(1 << 32) == 1 << 32 and two.last_known is None
    put_all(two, 1 << 32, 5, 5)
    late = make()  # an attempt of the first batch that still runs: all of its rows are stored
    assert late.begin(0) > 5
    put_all(late, 0, 5, 5)
    assert numbers_in(backend) == [*range(5), *range(1 << 32, (1 << 32) + 5)]


def test_a_master_that_cannot_tell_is_believed(backend: FakeBackend, make: Any) -> None:
    backend.store.forgotten = 700
    with pytest.raises(ClientError, match="cannot tell which rows are stored.*acks=1"):
        make().begin(0)
    sender = make()
    assert sender.begin(701) == 701
    put_all(sender, 701, 3, 1)


def test_behind_forgotten_numbers_the_epoch_must_stay(backend: FakeBackend, make: Any) -> None:
    first = make()
    first.begin(0)
    put_all(first, 0, 100, 50)
    backend.store.forgotten = 98  # an idle producer: the node knows 99 alone
    second = make()
    assert second.begin(0) == 99
    put_all(second, 0, 200, 50)
    backend.store.forgotten = 198
    third = make()
    assert third.begin(0) == 199
    backend.entries.append((backend.epoch() + 65_536, 0))  # a failover
    with pytest.raises(ClientError, match="the master changed"):
        put_all(third, 0, 300, 50)
    assert numbers_in(backend) == list(range(200))


def test_an_attempt_that_was_overtaken_puts_one_record_first_if_the_epoch_must_stay(
    backend: FakeBackend, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = make()
    sender.begin(0)
    with monkeypatch.context() as patched:
        patched.setattr(sender, "_settle", lambda: None)  # all are under way
        for at in (0, 5, 10):
            sender.put("t", records_of(range(at, at + 5)), at, 5)
    backend.store.forgotten = 2
    admitted: list[tuple[int, int]] = []
    admit = sender._admit

    def noted(topic: str, payload: bytes, first: int, count: int) -> None:
        admitted.append((first, count))
        admit(topic, payload, first, count)

    monkeypatch.setattr(sender, "_admit", noted)
    sender._overtaken(MessageIllegalError("number 0 is forgotten"))
    sender.finish()
    assert admitted == [(3, 1), (4, 1), (5, 5), (10, 5)]
    assert numbers_in(backend) == list(range(15))


def test_a_record_of_another_writer_in_the_same_place_is_no_difference(
    backend: FakeBackend, make: Any
) -> None:
    first = make()
    first.begin(0)
    put_all(first, 0, 10, 5)
    second = make(acks=1)
    second.begin(0)
    second.put("t", records_of(range(10)), 0, 10)
    second._drain()
    log = backend.store.log  # a failover has cut the rows; others are there now
    log[:] = log.replace(b"HS_PID\x01p\x02", b"HS_PID\x01q\x02")
    second.finish()


def test_refusals_name_the_records_and_end_the_attempt(backend: FakeBackend, make: Any) -> None:
    sender = make()
    sender.begin(0)
    sender.put("t", records_of(range(3)), 0, 3)
    encoder = RecordEncoder(PID, NO_HOST)
    sender.put("t", encoder.encode("t", b"", 9, [], 3, 1), 3, 1)
    with pytest.raises(MessageIllegalError, match="queue 9 of 4"):
        sender.finish()
    assert sender.unconfirmed == (3, 4)


def test_without_a_master_the_attempt_ends_in_time(backend: FakeBackend, make: Any) -> None:
    backend.writable = False
    with pytest.raises(UnreachableError, match="which rows are stored.*this node is a slave"):
        make(delivery_timeout_s=0.4).begin(0)


def test_a_master_that_is_too_old_for_the_question_is_named_at_once(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch, closed = ApiServer._dispatch, []
    most = 2

    def old_dispatch(self: ApiServer, connection: Any, request: Any) -> None:
        if isinstance(request, api.AskProducer) and len(closed) < most:
            closed.append(request)
            raise ProtocolError("not a request of the client API")
        dispatch(self, connection, request)

    monkeypatch.setattr(ApiServer, "_dispatch", old_dispatch)
    assert make().begin(0) == 0  # as a node that is started anew while it is asked
    assert len(closed) == most
    closed.clear()
    most = 1_000
    with pytest.raises(ClientError, match="closed the connection.*too old.*upgrade") as found:
        make(delivery_timeout_s=20.0).begin(0)
    assert not isinstance(found.value, UnreachableError)
    assert len(closed) == 3


def test_a_master_that_dies_while_it_is_asked_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeatable_sender, "ANSWER_S", 0.2)
    silent, other = FakeBackend(1), FakeBackend(2, writable=False)
    asked = threading.Event()
    go_on = threading.Event()

    def say_nothing(producer: bytes) -> Any:
        other.writable, other.entries = True, [(65_537, 0), (131_074, 0)]
        asked.set()
        go_on.wait(30.0)

    silent.store.producer_progress = say_nothing  # type: ignore[method-assign]
    with contextlib.ExitStack() as stack:
        for node in (silent, other):
            server = ApiServer("tcp://127.0.0.1:0", node, ApiConfig(), on_failure=raise_failure)
            server.start()
            stack.callback(server.stop)
            node.endpoint = server.endpoint  # type: ignore[attr-defined]
        stack.callback(go_on.set)
        endpoints = tuple(node.endpoint for node in (silent, other))  # type: ignore[attr-defined]
        sender = RepeatableSender(endpoints, PID, delivery_timeout_s=20.0)
        stack.callback(sender.close)
        assert sender.begin(0) == 0 and asked.is_set()
        put_all(sender, 0, 10, 5)
    assert numbers_in(other) == list(range(10))
    assert numbers_in(silent) == []


# -- the model


class Killed(Exception):
    """The process of an attempt ends."""


class Node:
    """A log in memory with the store's window; all records have 10 bytes."""

    def __init__(self, folder: Path, confirmed: Callable[[], int]) -> None:
        REAL.make_dirs(f"{folder}/hastore")
        self.window = DedupWindow(REAL, str(folder), confirmed)
        self.log: list[tuple[bytes, int, bytes]] = []

    def append(self, producer: bytes, number: int, record: bytes) -> None:
        offset = 10 * len(self.log)
        self.log.append((producer, number, record))
        self.window.add_runs([(producer, [number], [offset])], offset + 10)

    def cut(self, length: int) -> None:
        del self.log[length:]
        self.window.truncate(10 * length)


class Pair:
    """A master and a slave; the slave's log is a prefix of the master's, and is what is confirmed.

    It is the Transport of the sender under test, and its clock. Events happen while it sleeps.
    """

    source = None

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance = chance
        self.confirmed = 0
        self.nodes = [Node(folder / name, lambda: 10 * self.confirmed) for name in "01"]
        self.master = 0
        self.epoch = 65_537
        self.now = 0.0
        self.others = itertools.count()
        self.late: list[tuple[api.Put, bytes]] = []  # sent by attempts that have died
        self.poison: set[int] = set()
        self.done = Counter[str]()
        self.calm = False
        self.connect()

    # -- the clock and the transport

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now)

    def connect(self) -> None:
        """Begin with new connections, as an attempt does."""
        self.arrivals: list[Arrival] = []
        self.sent: list[tuple[api.Put, bytes]] = []
        self.pending: list[tuple[api.PutDone, int]] = []  # answered once the slave has so much
        self.up: set[str] = set()
        self.run, self.next_at = 0, 0

    def open(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            if address in NODES and address not in self.up:
                self.up.add(address)
                self.arrivals.append(Arrival(address, None, up=True))

    def reopen(self, address: str) -> None:
        self.drop(address)
        self.open([address])

    def sent_bytes(self, address: str) -> int:
        return 0

    def acked_bytes(self, address: str) -> int:
        return 0

    def drop(self, address: str) -> None:
        self.up.discard(address)
        self.arrivals.append(Arrival(address, None, up=False))
        if address == NODES[self.master]:
            self.late += self.sent
            self.sent, self.pending = [], []
            self.run, self.next_at = 0, 0

    def is_up(self, address: str) -> bool:
        return address in self.up

    def silence(self, _address: str) -> None:
        return None

    def send(self, address: str, message: api.Request, payload: bytes | None = None) -> bool:
        if address not in self.up:
            return False
        if isinstance(message, api.Put):
            if address == NODES[self.master]:
                self.sent.append((message, payload or b""))
            return True
        self.arrivals.append(Arrival(address, *self.answer(address, message)))
        return True

    def answer(self, address: str, message: api.Request) -> tuple[api.Reply, bytes]:
        is_master = address == NODES[self.master]
        node = self.nodes[NODES.index(address)]
        if isinstance(message, api.AskMap):
            info = api.MapInfo(1, "SYNC_MASTER", self.epoch - 1 + is_master, is_master)
            return api.Map(message.rid, info), b""
        if isinstance(message, api.AskProducer):
            if not is_master:
                return api.Failed(message.rid, "SERVICE_NOT_AVAILABLE", "a slave"), b""
            known = node.window.progress(message.producer.encode())
            return api.ProducerKnown(message.rid, self.epoch, *known), b""
        assert isinstance(message, api.FindOffset)
        return api.Found(message.rid, 1), node.log[message.offset // 10][2]

    def collect(self) -> list[Arrival]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def wait(self, timeout_s: float) -> list[Arrival]:
        if not self.arrivals:
            self.sleep(timeout_s)
        return self.collect()

    def sleep(self, timeout_s: float) -> None:
        self.now += min(timeout_s, 0.02) * 1000.0 if timeout_s >= 0 else 20.0
        self.event()
        self.open(NODES)

    def close(self, linger_s: float = 0.0) -> None:
        pass

    def abandon(self) -> None:
        pass

    # -- events

    def event(self) -> None:
        draw = self.chance.random()
        if self.sent and (draw < 0.5 or self.calm):
            self.take(*self.sent.pop(0))
        elif draw < 0.8 or self.calm:
            self.replicate(self.chance.randrange(1, 12))
        elif draw < 0.83:
            self.failover()
        elif draw < 0.85:
            self.done["connection lost"] += 1
            self.drop(NODES[self.master])
        elif draw < 0.88 and self.late:
            self.done["late"] += 1
            self.store(*self.late.pop(0), refuse=set())
        elif draw < 0.92:
            self.write_others(self.chance.randrange(1, 4))
        elif draw < 0.94:
            raise Killed

    def replicate(self, most: int) -> None:
        master, slave = self.nodes[self.master], self.nodes[1 - self.master]
        for entry in master.log[len(slave.log) : len(slave.log) + most]:
            slave.append(*entry)
        self.confirmed = confirmed = max(self.confirmed, len(slave.log))
        ready = [done for done, end in self.pending if end <= confirmed]
        self.pending = [each for each in self.pending if each[1] > confirmed]
        self.arrivals += [Arrival(NODES[self.master], done) for done in ready]

    def failover(self) -> None:
        self.done["failover"] += 1
        for address in NODES:
            self.drop(address)
        self.master = 1 - self.master
        self.epoch += 65_536
        old, kept = self.nodes[1 - self.master], len(self.nodes[self.master].log)
        self.done["cut"] += len(old.log) > kept
        old.cut(kept)

    def write_others(self, count: int) -> None:
        """Let other producers write, so that this one becomes idle."""
        for _ in range(count):
            self.nodes[self.master].append(b"other%d" % next(self.others), 0, b"")

    def take(self, put: api.Put, payload: bytes) -> None:
        follows = put.at == self.next_at if put.run == self.run else put.run > self.run
        follows = follows and (put.run == self.run or not put.at)
        if not follows or (not self.calm and self.chance.random() < 0.03):
            self.done["refused"] += 1
            self.next_at = -1
            reply = api.PutDone(put.rid, api.Status.BUSY, 0)
            self.arrivals.append(Arrival(NODES[self.master], reply))
            return
        self.run, self.next_at = put.run, put.at + 1
        done, end = self.store(put, payload, refuse=self.poison)
        self.pending.append((done, end))

    def store(self, put: api.Put, payload: bytes, refuse: set[int]) -> tuple[api.PutDone, int]:
        node = self.nodes[self.master]
        statuses, offsets = [], []
        for record in split(payload):
            found = producer_of(decode_record(record).properties)
            assert found is not None
            producer, number = found
            place = node.window.find(producer, number)
            if place is UnheldNumber.FORGOTTEN or (place is UnheldNumber.NEW and number in refuse):
                self.done["forgotten" if place is UnheldNumber.FORGOTTEN else "poison"] += 1
                statuses.append(api.Status.MESSAGE_ILLEGAL)
                offsets.append(0)
                continue
            if place is UnheldNumber.NEW:
                place = 10 * len(node.log)
                node.append(producer, number, record)
            else:
                self.done["duplicate"] += 1
            statuses.append(api.Status.PUT_OK)
            assert isinstance(place, int)
            offsets.append(place)
        zeros = [0] * len(offsets)
        good = all(status is api.Status.PUT_OK for status in statuses)
        end = max(offsets, default=0) // 10 + 1
        return api.PutDone(
            put.rid, api.Status.PUT_OK, self.epoch, "", offsets, zeros, zeros,
            None if good else statuses,
        ), end  # fmt: skip


def attempt(pair: Pair, first: int, rows: int) -> None:
    """Run one attempt; raises Killed or what ends it."""
    pair.connect()
    sender = RepeatableSender(NODES, PID, clock=pair)  # type: ignore[arg-type]
    try:
        sender.begin(first)
        put_all(sender, first, rows, pair.chance.randrange(1, 9))
    finally:
        pair.late += pair.sent
        if pair.chance.random() < 0.5:
            pair.late.clear()
        sender.close()


def run(pair: Pair, batches: int) -> list[int]:
    """Write some batches, repeating each until it is done; return all numbers in order."""
    numbers: list[int] = []
    for batch in range(batches):
        first, rows = batch << 32, pair.chance.choice([1, 5, 40, 150])
        numbers += range(first, first + rows)
        for tries in itertools.count():
            pair.calm = tries > 30
            if pair.chance.random() < 0.2:
                pair.poison = set(pair.chance.sample(range(first, first + rows), 1))
            try:
                attempt(pair, first, rows)
                break
            except Killed:
                pair.done["killed"] += 1
            except HastoreError as failure:
                assert not isinstance(failure, RecordsDifferError)
                pair.done[type(failure).__name__] += 1
                assert tries < 100, failure
            pair.poison = set()
        pair.poison = set()
    return numbers


def test_each_record_is_stored_once_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeatable_sender, "_SPAN", 15)
    monkeypatch.setattr(dedup_window, "WINDOW", 16)
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 4)
    chosen = os.environ.get("HASTORE_REPEAT_SEED")
    runs = int(os.environ.get("HASTORE_REPEAT_RUNS", "60"))
    total = Counter[str]()
    for number in range(1 if chosen else runs):
        seed = int(chosen) if chosen else random.SystemRandom().getrandbits(32)
        print("seed", seed)
        pair = Pair(tmp_path / str(number), random.Random(seed))
        monkeypatch.setattr(
            "hastore.client.connections.requester.make_transport",
            lambda addresses, clock, security, pair=pair: (addresses, pair),
        )
        expected = run(pair, 4)
        confirmed = pair.nodes[1 - pair.master].log
        stored = [entry for entry in confirmed if entry[0] == PID.encode()]
        assert sorted(number for _, number, _ in stored) == expected
        for _, row, record in stored:
            assert decode_record(record).body == b"row %d" % row
        total += pair.done
    print(dict(total))
    if not chosen:
        wanted = {"failover", "cut", "late", "killed", "poison", "duplicate", "forgotten"}
        assert wanted <= set(total), total
