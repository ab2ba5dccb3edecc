"""Prefetching: its bounds, its order, and lost positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hastore.client.connections.cluster import ClusterView
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.fetcher import (
    AGAIN_MS,
    ANSWER_MS,
    PULL_BYTES_MIN,
    QUIET_MS,
    REFRESH_MS,
    RETRY_MS,
    WAIT_MS,
    Fetcher,
    PulledRecords,
    QueueReader,
)
from hastore.errors import CorruptRecordError, PositionLostError
from hastore.protocol import api
from hastore.protocol.api import Position, PullStatus
from hastore.record.codec import Host, build_record, patch_for_store

HOST = Host.parse("127.0.0.1:1")
NODES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
EPOCH = 65537
SIZE = 200  # bytes between records in the simulated log


def records(begin: int, end: int, queue_id: int = 0) -> bytes:
    """The records of queue offsets [begin, end)."""
    found = []
    for number in range(begin, end):
        raw = bytearray(
            build_record(
                "t", b"%d" % number, queue_id=queue_id, born_timestamp_ms=1, born_host=HOST
            )
        )
        patch_for_store(
            raw, 0, queue_offset=number, physical_offset=number * SIZE, store_timestamp_ms=2,
            store_host=HOST,
        )  # fmt: skip
        found.append(bytes(raw))
    return b"".join(found)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return 0


class FakeTransport:
    def __init__(self) -> None:
        self.sent: list[tuple[str, api.Pull]] = []
        self.maps: dict[str, int] = {}  # the number of the last AskMap, by address
        self.heard = 0.0

    def send(self, address: str, message: api.Request) -> bool:
        if isinstance(message, api.Pull):
            self.sent.append((address, message))
        else:
            self.maps[address] = message.rid
        return True

    def is_up(self, address: str) -> bool:
        return True

    def heard_ms(self, address: str) -> float:
        return self.heard


class Requester:
    """No network: records the pulls, and the test supplies the replies."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.transport = FakeTransport()
        self.cluster = ClusterView(NODES)
        self.rids = itertools.count(1)
        self.waiting: list[Arrival] = []
        nodes = dict(enumerate(NODES, 1))
        for number, address in nodes.items():
            info = api.MapInfo(number, "SLAVE", EPOCH, False, 10_000, 1, NODES[0], nodes)
            self.cluster.learn(address, info)

    def deliver_to(self, receiver: Callable[[Arrival], None]) -> None:
        self.receiver = receiver

    def next_rid(self) -> int:
        return next(self.rids)

    def collect(self) -> list[Arrival]:
        arrived, self.waiting = self.waiting, []
        for arrival in arrived:
            self.receiver(arrival)
        return arrived


class Bench:
    """A fetcher of some queues, and the last pull of each."""

    def __init__(self, queues: int = 1, **options: Any) -> None:
        clock = Clock()
        self.requester: Any = Requester(clock)
        given: dict[str, Any] = {"max_bytes": 1 << 20, "prefetch_bytes": 8 << 20}
        given |= {"prefer_master": False, "on_lost": "raise"} | options
        self.fetcher = Fetcher(self.requester, "t", clock, **given)
        for queue_id in range(queues):
            start = Position(0)
            self.fetcher.queues[queue_id] = QueueReader(queue_id, start, start)
        self.fetcher.advance()

    @property
    def queue(self) -> QueueReader:
        return self.fetcher.queues[0]

    @property
    def pulls(self) -> list[tuple[str, api.Pull]]:
        sent: list[tuple[str, api.Pull]] = self.requester.transport.sent
        return sent

    def reply(self, status: PullStatus, payload: bytes = b"", **fields: Any) -> None:
        address, pull = self.pulls[-1]
        reply = api.Pulled(pull.rid, status, **fields)
        self.requester.waiting.append(Arrival(address, reply, payload))

    def found(self, begin: int, end: int, payload: bytes | None = None, **fields: Any) -> None:
        more: dict[str, Any] = {
            "next_queue_offset": end,
            "count": end - begin,
            "epochs": [(EPOCH, 0)],
            "last_offset": (end - 1) * SIZE,
        }
        payload = records(begin, end) if payload is None else payload
        self.reply(PullStatus.FOUND, payload, **(more | fields))
        self.fetcher.advance()

    def take(self, most: int = 100) -> list[int]:
        return [int(message.body) for message in self.fetcher.take_messages(most)]


def position_after(number: int) -> Position:
    return Position(number, EPOCH, (number - 1) * SIZE)


@pytest.mark.parametrize("status", [PullStatus.NO_NEW, PullStatus.NO_SUCH_QUEUE])
def test_a_queue_whose_pull_did_not_wait_is_not_asked_again_at_once(status: PullStatus) -> None:
    """A node lets at most 1,024 pulls of a connection wait, and answers the others at once."""
    bench = Bench()
    clock = bench.requester.clock
    bench.reply(status)
    bench.fetcher.advance()
    assert len(bench.pulls) == 1
    assert 0.4 < bench.fetcher.advance() <= 0.5, "it says when it wants to ask again"
    clock.now += AGAIN_MS
    bench.fetcher.advance()
    assert len(bench.pulls) == 2
    clock.now += WAIT_MS
    bench.reply(status)
    bench.fetcher.advance()
    assert len(bench.pulls) == 3, "this one has waited"
    bench.reply(status)
    bench.fetcher.advance()
    bench.queue.seek(Position(5))
    bench.fetcher.advance()
    assert len(bench.pulls) == 4, "a seek counts at once"


def test_the_next_pull_is_under_way_while_messages_are_taken() -> None:
    bench = Bench()
    assert [pull.position for _, pull in bench.pulls] == [Position(0)]
    bench.found(0, 10)
    assert len(bench.pulls) == 1  # no message was taken from the chunk: no further pull
    assert bench.take(3) == [0, 1, 2]
    assert bench.pulls[-1][1].position == position_after(10)
    assert bench.queue.next == position_after(3)
    bench.found(10, 20)
    assert bench.take(4) == [3, 4, 5, 6]
    assert len(bench.pulls) == 2  # one batch decoded and one chunk: no further pull
    assert bench.take(5) == [7, 8, 9, 10, 11]
    assert len(bench.pulls) == 3
    assert bench.queue.next == position_after(12)
    assert bench.take(100) == list(range(12, 20))
    assert bench.take(100) == []


@pytest.mark.parametrize("queues", [1, 4, 64, 1_000])
def test_fetched_and_requested_bytes_stay_within_their_bound(queues: int) -> None:
    bench = Bench(queues, prefetch_bytes=4 << 20)
    sizes = [pull.max_bytes for _, pull in bench.pulls]
    assert len(sizes) == queues
    assert 2 * sum(sizes) <= max(4 << 20, 2 * queues * PULL_BYTES_MIN)
    assert max(sizes) <= 1 << 20
    assert {pull.max_bytes for _, pull in Bench(1, max_bytes=5_000).pulls} == {5_000}


def test_a_node_that_does_not_say_where_the_last_record_lies() -> None:
    bench = Bench()
    bench.found(0, 10, last_offset=None)
    assert bench.take(3) == [0, 1, 2]
    bench.fetcher.advance()
    assert len(bench.pulls) == 1  # the next position is known only once the record is read
    assert bench.take(100) == list(range(3, 10))
    bench.fetcher.advance()
    assert bench.pulls[-1][1].position == position_after(10)


def test_a_seek_drops_everything_fetched_or_in_flight() -> None:
    bench = Bench()
    bench.found(0, 10)
    assert bench.take(1) == [0]
    bench.queue.seek(Position(50))
    bench.found(10, 20)  # the reply to the earlier pull
    assert bench.take() == []
    assert bench.pulls[-1][1].position == Position(50)
    bench.found(50, 60)
    assert bench.take() == list(range(50, 60))


def test_retention_ahead_of_the_reader_is_raised_once_everything_fetched_is_taken() -> None:
    bench = Bench()
    bench.found(0, 10)
    assert bench.take(4) == [0, 1, 2, 3]
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    assert len(bench.pulls) == 2
    assert bench.take(100) == [4, 5, 6, 7, 8, 9]
    bench.fetcher.advance()
    assert bench.pulls[-1][1].position == position_after(10)
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=40)
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)  # by the other replica
    bench.fetcher.advance()
    with pytest.raises(PositionLostError, match="10 is before the first one kept, 30") as caught:
        bench.take()
    assert caught.value.common == Position(30)


@pytest.mark.parametrize("policy", ["raise", "common", "earliest", "latest"])
def test_what_one_replica_has_removed_is_read_from_another(policy: str) -> None:
    bench = Bench(on_lost=policy)
    source = bench.fetcher.source
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    address, pull = bench.pulls[-1]
    assert address not in (source, None) and pull.position == Position(0)
    bench.found(0, 10)
    assert bench.take() == list(range(10))


@pytest.mark.parametrize("policy", ["raise", "common", "earliest"])
def test_a_lost_position_goes_on_at_the_replica_that_begins_first(policy: str) -> None:
    bench = Bench(on_lost=policy)
    begins_first = bench.fetcher.source
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=60)  # by the other replica
    bench.fetcher.advance()
    if policy == "raise":
        with pytest.raises(PositionLostError, match="first one kept, 30") as caught:
            bench.take()
        bench.queue.seek(caught.value.common)
    bench.fetcher.advance()
    address, pull = bench.pulls[-1]
    assert (address, pull.position) == (begins_first, Position(30))
    bench.found(30, 40)
    assert bench.take() == list(range(30, 40))


def test_a_position_is_lost_if_one_replica_has_removed_it_and_the_other_lags() -> None:
    bench = Bench()
    bench.queue.seek(Position(10))
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_LARGE, max_queue_offset=5)
    bench.fetcher.advance()
    bench.requester.clock.now += RETRY_MS + 1
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    with pytest.raises(PositionLostError, match="10 is before the first one kept, 30"):
        bench.take()


@pytest.mark.parametrize("policy", ["raise", "common", "earliest", "latest"])
def test_a_replica_that_was_left_is_asked_before_a_position_is_lost(policy: str) -> None:
    """It lagged, or was silent for a while: it may be the only one that has kept the message."""
    bench = Bench(on_lost=policy)
    bench.queue.seek(Position(10))
    bench.fetcher.advance()
    left = bench.fetcher.source
    bench.fetcher._switch_replica()
    bench.fetcher.advance()
    assert bench.fetcher.source != left
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    address, pull = bench.pulls[-1]
    assert (address, pull.position) == (left, Position(10))
    bench.found(10, 20)
    assert bench.take() == list(range(10, 20))


def test_a_replica_that_was_left_is_asked_once_before_a_position_is_lost() -> None:
    bench = Bench()
    bench.queue.seek(Position(10))
    bench.fetcher.advance()
    left = bench.fetcher.source
    bench.fetcher._switch_replica()
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    assert bench.fetcher.source == left
    bench.fetcher._switch_replica()  # it says nothing, again
    bench.fetcher.advance()
    bench.reply(PullStatus.OFFSET_TOO_SMALL, min_queue_offset=30)
    bench.fetcher.advance()
    with pytest.raises(PositionLostError, match="10 is before the first one kept, 30"):
        bench.take()


@pytest.mark.parametrize("policy", ["raise", "common", "earliest", "latest"])
def test_a_failover_ahead_of_the_reader_skips_no_valid_message(policy: str) -> None:
    bench = Bench(on_lost=policy)
    bench.found(0, 10)
    assert bench.take(4) == [0, 1, 2, 3]
    bench.reply(PullStatus.HISTORY_DIFFERS, common=position_after(6), min_queue_offset=0)
    bench.fetcher.advance()
    # The next pull is for the reader's own position; the cut history is dropped.
    assert bench.take() == []
    assert bench.pulls[-1][1].position == position_after(4)
    bench.found(4, 8)
    assert bench.take() == [4, 5, 6, 7]


def test_damage_is_raised_after_the_valid_messages_and_another_replica_asked() -> None:
    bench = Bench()
    source = bench.fetcher.source
    damaged = bytearray(records(0, 10))
    damaged[len(records(0, 6)) + 88] ^= 1
    bench.found(0, 10, bytes(damaged))
    assert bench.take(4) == [0, 1, 2, 3]
    assert bench.take(100) == [4, 5]
    with pytest.raises(CorruptRecordError, match="no valid record"):
        bench.take(100)
    assert bench.queue.next == position_after(6)
    bench.fetcher.advance()
    assert bench.fetcher.source not in (None, source)
    assert bench.pulls[-1] == (bench.fetcher.source, bench.pulls[-1][1])
    assert bench.pulls[-1][1].position == position_after(6)
    bench.found(6, 10)
    assert bench.take() == [6, 7, 8, 9]


def test_a_reply_of_other_records_than_it_states_is_damage() -> None:
    for fields in ({"count": 9}, {"last_offset": 77}):
        bench = Bench()
        bench.found(0, 10, **fields)
        with pytest.raises(CorruptRecordError, match="does not hold the"):
            bench.take()


def refuse_as_damaged(bench: Bench) -> str:
    """Let the replica that was asked last refuse the record; returns its address."""
    bench.requester.clock.now += RETRY_MS + 1
    bench.fetcher.advance()
    address, pull = bench.pulls[-1]
    reply = api.Failed(pull.rid, "CorruptRecordError", "the record at offset 7 is damaged")
    bench.requester.waiting.append(Arrival(address, reply, b""))
    bench.fetcher.advance()
    return str(address)


@pytest.mark.parametrize("prefer_master", [False, True])
def test_what_every_replica_refuses_as_damaged_is_raised_and_asked_for_again(
    prefer_master: bool,
) -> None:
    bench = Bench(prefer_master=prefer_master)
    for _ in range(2):
        first = refuse_as_damaged(bench)
        assert bench.take() == [], "the other replica may have the record whole"
        second = refuse_as_damaged(bench)
        assert second != first
        with pytest.raises(CorruptRecordError, match=f"{second}: the record at offset 7"):
            bench.take()
        assert bench.queue.next == Position(0)
        bench.fetcher.advance()
    bench.found(0, 10)
    assert bench.take() == list(range(10))


@pytest.mark.parametrize("prefer_master", [False, True])
@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (PullStatus.NO_NEW, {}),
        (PullStatus.OFFSET_TOO_LARGE, {"max_queue_offset": 0}),
        (PullStatus.OFFSET_TOO_SMALL, {"min_queue_offset": 30}),
    ],
)
def test_damage_is_raised_if_the_other_replica_does_not_have_the_record(
    status: PullStatus, fields: dict[str, int], prefer_master: bool
) -> None:
    bench = Bench(prefer_master=prefer_master, on_lost="earliest")
    master = NODES[0]
    if status is PullStatus.NO_NEW and bench.fetcher.source != master:
        bench.fetcher._switch_replica()  # the other one would be asked until it stalls
        bench.fetcher.advance()
    while bench.queue.damage is None:
        assert len(bench.pulls) < 9, bench.pulls
        bench.requester.clock.now += RETRY_MS + 1
        bench.fetcher.advance()
        if bench.pulls[-1][0] == master:
            refuse_as_damaged(bench)
        else:
            bench.requester.clock.now += WAIT_MS
            bench.reply(status, **fields)
            bench.fetcher.advance()
    with pytest.raises(CorruptRecordError, match="the record at offset 7"):
        bench.take()


def test_damage_ahead_of_the_reader_does_not_disturb_what_was_fetched() -> None:
    bench = Bench()
    source = bench.fetcher.source
    bench.found(0, 10)
    assert bench.take(4) == [0, 1, 2, 3]
    refuse_as_damaged(bench)
    assert bench.fetcher.source == source, "what else it prefetches is not dropped"
    assert bench.take(100) == [4, 5, 6, 7, 8, 9]
    bench.fetcher.advance()
    assert bench.pulls[-1][1].position == position_after(10)


def test_damage_in_one_queue_loses_no_message_of_another() -> None:
    bench = Bench(2)
    for (address, pull), payload in zip(
        list(bench.pulls), (b"?" * 300, records(0, 5, 1)), strict=True
    ):
        reply = api.Pulled(
            pull.rid, PullStatus.FOUND, 5, count=5, epochs=[(EPOCH, 0)], last_offset=4 * SIZE
        )
        bench.requester.waiting.append(Arrival(address, reply, payload))
    bench.fetcher.advance()
    taken, raised = [], 0
    for _ in range(6):
        try:
            taken += bench.take(2)
        except CorruptRecordError:
            raised += 1
    assert taken == [0, 1, 2, 3, 4]
    assert raised == 1


def test_a_replica_whose_answer_is_being_read_is_kept() -> None:
    """A caller that was away for long reads what has come meanwhile in several steps."""
    bench = Bench()
    clock, source = bench.requester.clock, bench.fetcher.source
    for _ in range(3):
        clock.now += WAIT_MS + ANSWER_MS + 1.0
        bench.requester.transport.heard = clock.now
        bench.fetcher.advance()
        assert (bench.fetcher.source, len(bench.pulls)) == (source, 1)
    clock.now += QUIET_MS + 1.0
    bench.fetcher.advance()
    assert bench.fetcher.source is None, "now nothing comes"


def test_a_replica_seems_to_stall_only_by_its_latest_map() -> None:
    """That may be unread yet, behind all that has come while the caller was away."""
    bench = Bench()
    clock, source = bench.requester.clock, bench.fetcher.source
    cluster = bench.requester.cluster
    (other,) = set(NODES) - {source}

    def look(address: str, rid: int, readable: int) -> None:
        info = msgspec.structs.replace(cluster.maps[address], readable_offset=readable)
        cluster.learn(address, info)
        bench.requester.waiting.append(Arrival(address, api.Map(rid, info)))
        clock.now += REFRESH_MS
        bench.reply(PullStatus.NO_NEW)
        bench.fetcher.advance()

    maps = bench.requester.transport.maps
    old = maps[source]
    look(other, maps[other], 10_001)
    for _ in range(3):
        look(source, old, 10_000)
        assert bench.fetcher.source == source
    look(source, maps[source], 10_000)
    look(source, maps[source], 10_000)
    assert bench.fetcher.source == other


def test_a_busy_replica_is_asked_again_later_and_kept() -> None:
    bench = Bench()
    address, pull = bench.pulls[-1]
    bench.requester.waiting.append(Arrival(address, api.Failed(pull.rid, "BUSY", "unread")))
    bench.fetcher.advance()
    assert (bench.fetcher.source, len(bench.pulls)) == (address, 1)
    bench.requester.clock.now += RETRY_MS + 1
    bench.fetcher.advance()
    assert len(bench.pulls) == 2


def test_a_reply_that_came_while_the_caller_was_away_counts() -> None:
    bench = Bench()
    source = bench.fetcher.source
    bench.reply(PullStatus.FOUND, records(0, 3), next_queue_offset=3, count=3, epochs=[(EPOCH, 0)])
    bench.requester.clock.now += 60_000.0
    bench.fetcher.advance()
    assert bench.fetcher.source == source
    assert bench.take() == [0, 1, 2]


def chunk(*offsets: int, after: int) -> PulledRecords:
    """A filtered reply with messages at these queue offsets, which ends before `after`."""
    payload = b"".join(records(offset, offset + 1) for offset in offsets)
    return PulledRecords(payload, len(offsets), [(EPOCH, 0)], behind(after), is_filtered=True)


def behind(after: int) -> Position:
    return Position(after, EPOCH, (after - 1) * SIZE)


def test_a_filtered_queue_is_behind_what_does_not_match_once_its_messages_are_taken() -> None:
    queue = QueueReader(0, Position(0), Position(0))
    queue.pass_by(behind(3))
    assert (queue.next, queue.fetch) == (behind(3), behind(3))
    queue.decode(chunk(4, 6, after=9))
    assert queue.damage is None and queue.next == behind(3)
    queue.pass_by(behind(12))  # the next pull has found nothing
    assert queue.next == behind(3), "two messages wait: whoever gives them up begins before them"
    [first] = queue.take_ready(1)
    assert queue.next == first.next_position == behind(5)
    queue.pass_by(behind(15))
    assert queue.next == behind(5)
    queue.take_ready(1)
    assert queue.next == behind(15)
    queue.pass_by(behind(20))
    assert queue.next == behind(20)
    queue.decode(chunk(21, after=22))
    assert queue.next == behind(20), "not back to the last message: a commit would be refused"
    [last] = queue.take_ready(9)
    assert queue.next == last.next_position == behind(22)
    queue.decode(chunk(30, after=40))
    queue.seek(Position(7))
    assert queue.next == Position(7) and queue.is_drained


def test_a_filtered_reply_that_lacks_a_message_is_damaged() -> None:
    queue = QueueReader(0, Position(0), Position(0))
    queue.decode(chunk(4, 6, after=9)._replace(number=3))
    assert queue.damage is not None and not queue.ready
    queue = QueueReader(0, Position(0), Position(0))
    queue.decode(chunk(4, 6, after=5))  # its end lies before its last message
    assert queue.damage is not None
    queue = QueueReader(0, Position(0), Position(0))
    queue.decode(chunk(4, 6, after=9)._replace(is_filtered=False))
    assert queue.damage is not None
