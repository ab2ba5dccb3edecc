"""Delayed messages over real stores: each is delivered once in the log that survives."""

import errno
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import RetentionConfig
from hastore.errors import NotStoredError, Status
from hastore.fs.filesystem import REAL
from hastore.ha.master.group_transfer import Outcome
from hastore.ha.rules.epochs import CLASSIC_EPOCH, FLOOR_EPOCH
from hastore.record import properties
from hastore.record.codec import build_record, decode_record, encode_record
from hastore.record.delays import (
    DELAYS_MS,
    SCHEDULE_TOPIC,
    deliver,
    marked,
    parse_levels,
    schedule,
)
from hastore.record.layout import header_struct, offset_of
from hastore.record.queue_ends import build_queue_ends
from hastore.record.topic_records import PERM_READ, TopicChange, TopicConfig, build_change
from hastore.server.kept_positions import KeptPositions
from hastore.server.retention_service import RetentionService
from hastore.server.schedule_service import PATIENCE_MS, ScheduleMessageService
from hastore.store import replay
from hastore.store.append import validation
from hastore.store.append.results import own_records
from hastore.store.append.uniform_batch import EntryFraming
from hastore.store.derived.deliveries import read_delays
from hastore.store.log.record_walk import cut_point
from hastore.store.message_store import MessageStore
from hastore.store.replay import IndexBuildService
from tests.dledger.store.kit import opened as opened_entries
from tests.store.kit import (
    BORN,
    FILE_SIZE,
    HOST,
    config,
    crash_copy,
    log_file,
    message,
    opened,
    put,
    scribble,
)

SEED = int(os.environ.get("HASTORE_SEED", "0"))
SEEDS = int(os.environ.get("HASTORE_SEEDS", "6"))
START_MS = 1_700_000_000_000


class Clock:
    """Two clocks that stand until a test moves them."""

    def __init__(self):
        self.wall, self.monotonic = START_MS, 1_000.0

    def wall_ms(self):
        return self.wall

    def monotonic_ms(self):
        return self.monotonic

    def move(self, ms):
        self.wall += ms
        self.monotonic += ms


class Transfer:
    """Confirms every append at once, or when the test says so."""

    def __init__(self):
        self.holds = False
        self.waiting = []

    def add(self, end_offset, deadline_ms, need, done, *, epoch):
        self.waiting.append(done)
        if not self.holds:
            self.confirm()

    def confirm(self):
        for done in self.waiting:
            done(Outcome.CONFIRMED, "SYNC_MEM(1)")
        self.waiting.clear()


class Master:
    """A node's backend over a store, as the service sees it."""

    def __init__(self, store, epoch=1 << 16 | 1, floor=0):
        self.store, self.number = store, epoch
        self.starts = [(epoch, floor)]
        self.refusal = self.unconfirmable = self.fail = None
        self.sync = False

    def put_encoded(self, payloads, guards=None):
        if self.refusal is not None:
            raise NotStoredError(self.refusal, Status.SERVICE_NOT_AVAILABLE)
        if self.fail is not None:
            self.fail()
        return self.store.put_encoded(payloads, guards)

    def writable_reason(self):
        return self.refusal

    def can_confirm(self, sync_flush):
        return self.unconfirmable

    def default_acks_all(self):
        return self.sync

    def wait_limit_ms(self, need):
        return 3_000.0

    def epoch(self):
        return self.number

    def history(self):
        return self.starts


def waiting(number, level, *, topic="T", queue_id=0, **more):
    """The record of a message that is to wait."""
    properties = {"UNIQ_KEY": f"key{number}", "TAGS": "a", "DELAY": str(level), **more}
    place = schedule(topic, queue_id, properties)
    raw = build_record(
        place.topic, b"%d" % number,
        queue_id=place.queue_id, born_timestamp_ms=START_MS + number, born_host=BORN,
    )  # fmt: skip
    record = decode_record(raw)
    return encode_record(replace(record, properties=place.properties, flag=7, reconsume_times=2))


def put_waiting(store, *records):
    results = store.put_encoded(records, [own_records] * len(records))
    found = [result for one in results for result in one]
    assert all(result.status is Status.PUT_OK for result in found), found
    return [result.offset for result in found]


def service_of(master, clock, transfer=None):
    return ScheduleMessageService(
        master.store, master, transfer or Transfer(), clock, on_failure=lambda *_: None
    )


def settle(service, store):
    """Let the service deliver all that is due."""
    while True:
        assert store.wait_dispatched(store.max_offset, 10)
        if service.turn() > 0 and service.turn() > 0:
            return


def delivered_in(store):
    """The records of topic T, by its queues; the log may be damaged elsewhere."""
    store.wait_dispatched(store.max_offset, 10)
    places = [unit for queue in range(4) for unit in store.queues.read("T", queue, 0, 1_000)]
    return [store.reader.record_at(unit.offset) for unit in places]


def waits_at(store):
    """Where the first message waits, as retention asks; None if none does."""
    return service_of(Master(store), Clock()).waiting_from(3_600_000)


def records_of(store):
    """All records of the log, in order."""
    found, at = [], store.min_offset
    while at < store.max_offset:
        record = store.reader.record_at(at)
        if record is None:
            at = store.reader.after_blank(at)
            assert store.reader.record_at(at) is not None or at >= store.max_offset
            continue
        found.append(record)
        at += record.size
    return found


def check_log(store, *, drained):
    """Each message is delivered at most once, after it; once the log is drained, exactly once."""
    waits, delivered = {}, {}
    for record in records_of(store):
        mark = marked(record.properties)
        if record.topic == SCHEDULE_TOPIC:
            waits[record.physical_offset] = record
        elif mark is not None:
            assert mark.offset not in delivered, f"{mark.offset} was delivered twice"
            assert mark.level == waits[mark.offset].queue_id + 1
            assert record.body == waits[mark.offset].body
            delivered[mark.offset] = record
    if drained:
        assert waits.keys() == delivered.keys()
    return len(waits)


def check_places_below(store, rng):
    """What a shorter log says of the deliveries is what its records say."""
    if not store.wait_dispatched(store.max_offset, 10):
        return
    records = records_of(store)
    ends = [record.physical_offset for record in records] + [store.max_offset]
    end = rng.choice(ends)
    wanted = {}
    for record in records:
        mark = marked(record.properties)
        if record.physical_offset < end and mark is not None and record.topic != SCHEDULE_TOPIC:
            wanted[mark.level] = max(wanted.get(mark.level, -1), mark.offset)
    assert store.deliveries.places_below(end) == wanted


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(tmp_path, clock):
    found = MessageStore(config(tmp_path / "store"), store_host=HOST, clock=clock)
    found.open()
    yield found
    found.close()


def test_a_message_is_delivered_when_its_delay_is_over(store, clock):
    service = service_of(Master(store), clock)
    [offset] = put_waiting(store, waiting(1, 2, topic="Orders", queue_id=3))
    settle(service, store)
    clock.move(4_999)
    settle(service, store)
    assert service.delivered == 0
    assert service.turn() == pytest.approx(0.001)
    clock.move(1)
    settle(service, store)
    store.wait_dispatched(store.max_offset, 10)
    [unit] = store.queues.read("Orders", 3, 0, 10)
    found, before = store.reader.record_at(unit.offset), store.reader.record_at(offset)
    assert found.properties == before.properties + f"HS_DELAYED\x012-{offset}\x02".encode()
    for name in ("body", "flag", "sys_flag", "born_timestamp_ms", "born_host", "reconsume_times"):
        assert getattr(found, name) == getattr(before, name), name
    assert found.store_timestamp_ms == START_MS + 5_000
    assert waits_at(store) is None


def test_messages_of_a_level_keep_their_order_and_levels_do_not_wait_for_each_other(store, clock):
    service = service_of(Master(store), clock)
    put_waiting(store, *[waiting(n, 18 if n % 2 else 1) for n in range(600)])
    clock.move(1_000)
    settle(service, store)
    bodies = [int(one.body) for one in records_of(store) if one.topic == "T"]
    assert bodies == list(range(0, 600, 2))
    clock.move(DELAYS_MS[17])
    settle(service, store)
    check_log(store, drained=True)


def test_a_clock_set_back_delays_a_message_by_its_delay_at_most(store, clock):
    service = service_of(Master(store), clock)
    put_waiting(store, *[waiting(n, 3) for n in range(200)])
    settle(service, store)
    clock.wall -= 3_600_000
    clock.move(9_999)
    settle(service, store)
    assert service.delivered == 0
    clock.move(1)
    settle(service, store)
    check_log(store, drained=True)


def test_nothing_is_delivered_while_puts_are_refused_or_cannot_be_confirmed(store, clock):
    master, transfer = Master(store), Transfer()
    service = service_of(master, clock, transfer)
    put_waiting(store, waiting(1, 1))
    clock.move(1_000)
    store.wait_dispatched(store.max_offset, 10)
    end = store.max_offset
    master.refusal = "a slave"
    assert service.turn() > 0 and store.max_offset == end
    master.refusal, master.sync, master.unconfirmable = None, True, "no slave"
    assert service.turn() > 0 and store.max_offset == end
    master.unconfirmable = None
    transfer.holds = True
    assert service.turn() == 0.0 and store.max_offset > end
    put_waiting(store, waiting(2, 1))
    clock.move(1_000)
    end = store.max_offset
    store.wait_dispatched(end, 10)
    assert service.turn() > 0 and store.max_offset == end  # the last batch is not confirmed
    transfer.confirm()
    settle(service, store)
    transfer.confirm()
    check_log(store, drained=True)


def test_another_epoch_that_begins_before_the_append_forbids_it(store, clock):
    master = Master(store)
    service = service_of(master, clock)
    put_waiting(store, waiting(1, 1))
    clock.move(1_000)
    store.wait_dispatched(store.max_offset, 10)
    end = store.max_offset

    def flip():
        master.number += 1 << 16
        master.fail = None

    master.fail = flip
    assert service.turn() > 0 and store.max_offset == end
    settle(service, store)
    check_log(store, drained=True)


def test_a_failed_append_is_tried_again(store, clock):
    master = Master(store)
    service = service_of(master, clock)
    put_waiting(store, waiting(1, 1))
    clock.move(1_000)

    def full():
        master.fail = None
        raise OSError(28, "No space left on device")

    master.fail = full
    settle(service, store)
    check_log(store, drained=True)


def test_a_bad_sector_stops_its_level_for_a_moment_and_no_other(store, clock, monkeypatch):
    service = service_of(Master(store), clock)
    bad, *_ = put_waiting(store, waiting(1, 1), waiting(2, 1), waiting(3, 2))
    read = store.reader.record_bytes

    def fail(offset, size=None):
        if offset == bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(offset, size)

    monkeypatch.setattr(store.reader, "record_bytes", fail)
    clock.move(5_000)
    settle(service, store)
    assert service.delivered == 1, "of level 2"
    assert "level 1 wait" in service.problems()[0] and not service.lost
    clock.move(int(PATIENCE_MS))
    settle(service, store)
    monkeypatch.undo()
    assert [one.body for one in records_of(store) if one.topic == "T"] == [b"3", b"2"]
    assert service.lost == 1 and len(service.problems()) == 1


def test_messages_of_a_rocketmq_master_are_not_delivered(store, clock):
    put_waiting(store, waiting(1, 1), waiting(2, 1))
    master = Master(store)
    master.starts = [(0, 0), (1 << 16 | 1, store.max_offset)]
    service = service_of(master, clock)
    put_waiting(store, waiting(3, 1))
    clock.move(1_000)
    settle(service, store)
    assert [one.body for one in records_of(store) if one.topic == "T"] == [b"3"]


def history_with_forgotten_epochs(end):
    return [(FLOOR_EPOCH, 0), *[((n << 16) | 1, end) for n in range(300, 303)]]


def test_a_shortened_history_makes_none_of_the_brokers_messages_due_again(store, clock):
    put_waiting(store, *[waiting(n, level) for n in range(300) for level in (1, 18)])
    clock.move(DELAYS_MS[17] + 86_400_000 + 1)  # the broker has delivered them long ago
    ours = [waiting(n, level) for n in range(300, 310) for level in (1, 18)]
    put_waiting(store, *ours[:10])
    master = Master(store)
    master.starts = history_with_forgotten_epochs(store.max_offset)
    put_waiting(store, *ours[10:])
    service = service_of(master, clock)
    clock.move(DELAYS_MS[17])
    settle(service, store)
    delivered = [int(one.body) for one in records_of(store) if one.topic == "T"]
    assert sorted(delivered) == sorted([*range(300, 310)] * 2)
    assert service.waiting_from(3_600_000) is None


def test_a_follower_of_a_rocketmq_master_keeps_nothing_for_the_brokers_messages(store, clock):
    put_waiting(store, waiting(1, 18))
    store.wait_dispatched(store.max_offset, 10)
    follower = Master(store)
    service = service_of(follower, clock)
    for follower.starts in ([], [(CLASSIC_EPOCH, 0)]):
        assert service.waiting_from(3_600_000) is None
    follower.starts = [(1 << 16 | 1, 0)]
    assert service.waiting_from(3_600_000) == 0


class Leader(Master):
    """A node of mode dledger over its store of entries."""

    def put_encoded(self, payloads, guards=None):
        return self.store.put_encoded(payloads, self.number, guards)


def test_a_log_of_entries_delivers_what_hastore_stored_and_not_what_a_broker_did(
    tmp_path, monkeypatch
):
    with opened_entries(tmp_path / "store") as entries:
        store, clock = entries.messages, Clock()
        clock.wall = SYSTEM_CLOCK.wall_ms()  # the store has its own

        def put_all(numbers):
            raw = [waiting(n, 1 + n % 2) for n in numbers]
            for [result] in store.put_encoded(raw, 3, [own_records] * len(raw)):
                assert result.status is Status.PUT_OK

        with monkeypatch.context() as broker:  # DLedger leaves the CRCs of an entry out
            broker.setattr(EntryFraming, "seal", lambda self, data: None)
            put_all(range(50))
        leader = Leader(store, 4)
        leader.starts = [(3, 0)]
        service = service_of(leader, clock)
        store.wait_dispatched(store.max_offset, 10)
        assert service.waiting_from(60_000) is None
        put_all(range(50, 60))
        store.wait_dispatched(store.max_offset, 10)
        kept = service.waiting_from(60_000)
        assert kept is not None and store.reader.record_at(kept).body == b"50"

        def delivered():
            assert store.wait_dispatched(store.max_offset, 10)
            units = store.queues.read("T", 0, 0, 100)
            return [int(store.reader.record_at(unit.offset).body) for unit in units]

        clock.move(6_000)
        settle(service, store)
        assert delivered() == [*range(50, 60, 2), *range(51, 60, 2)]
        entries.truncate(entries.end_index - 4)  # from there on: five deliveries
        assert len(delivered()) == 5
        settle(service_of(leader, clock), store)
        assert delivered() == [*range(50, 60, 2), *range(51, 60, 2)]
        assert service.waiting_from(60_000) is None


def test_a_log_of_entries_goes_on_with_a_brokers_messages(tmp_path, monkeypatch):
    """With the broker's file; but not with those of a broker that leads the group again."""
    with opened_entries(tmp_path / "store") as entries:
        store, clock = entries.messages, Clock()
        clock.wall = SYSTEM_CLOCK.wall_ms()

        def put_all(raw):
            for [result] in store.put_encoded(raw, 3, [own_records] * len(raw)):
                assert result.status is Status.PUT_OK
            assert store.wait_dispatched(store.max_offset, 10)

        def broker_puts(raw):
            with monkeypatch.context() as broker:  # DLedger leaves the CRCs of an entry out
                broker.setattr(EntryFraming, "seal", lambda self, data: None)
                put_all(raw)

        def broker_delivers(unit):
            record = decode_record(deliver(store.reader.record_bytes(unit.offset)).record)
            kept = record.properties[: record.properties.index(b"HS_DELAYED")]
            broker_puts([encode_record(replace(record, properties=kept))])

        def turns(term, known=None):
            leader = Leader(store, term)
            leader.starts = [(3, 0)]
            service = service_of(leader, clock)
            service._taken = lambda: known
            for _ in range(3):
                settle(service, store)
                clock.move(6_000)
            return service

        def delivered():
            assert store.wait_dispatched(store.max_offset, 10)
            units = store.queues.read("T", 0, 0, 100)
            return sorted(int(store.reader.record_at(unit.offset).body) for unit in units)

        broker_puts([waiting(n, 1 + n % 2) for n in range(20)])
        for level in (0, 1):
            for unit in store.queues.read(SCHEDULE_TOPIC, level, 0, 4):
                broker_delivers(unit)
        turns(4)
        assert delivered() == list(range(8)), "without the file they are the broker's"
        end = entries.end_index + 1
        # It lags: the log says that four of each level are delivered.
        service = turns(5, {1: 2, 2: 4})
        assert delivered() == list(range(20))
        assert service.waiting_from(60_000) is None
        # A cut takes deliveries back, and then the take-over itself; each is made once more.
        for kept in (entries.end_index - 3, end):  # from there on
            entries.truncate(kept)
            assert len(delivered()) < 20
            turns(6, {1: 2, 2: 4})
            assert delivered() == list(range(20))
        put_all([waiting(n, 1 + n % 2) for n in range(20, 24)])
        broker_puts([waiting(n, 1 + n % 2) for n in range(24, 28)])  # it leads the group again
        put_all([waiting(n, 1 + n % 2) for n in range(28, 30)])
        turns(7, {1: 0, 2: 0})
        assert delivered() == [*range(24), 28, 29]
        store.deliveries.flush()
        assert read_delays(REAL, str(tmp_path / "store")) == store.deliveries._delays_ms


def test_messages_of_levels_that_the_configuration_has_no_more_are_delivered(tmp_path, clock):
    def open_with(levels):
        found = MessageStore(
            config(tmp_path / "store", message_delay_level=levels), store_host=HOST, clock=clock
        )
        found.open()
        return found

    store = open_with("1s 5s 10s 1m")
    put_waiting(store, *[waiting(n, level) for n in range(3) for level in (1, 2, 3, 4)])
    assert store.wait_dispatched(store.max_offset, 10)
    store.close()
    store = open_with("1s 5s")
    try:
        service = ScheduleMessageService(
            store, Master(store), Transfer(), clock,
            on_failure=lambda *_: None, delays_ms=parse_levels("1s 5s"),
        )  # fmt: skip
        assert service.waiting_from(3_600_000) == 0
        for moved, count in ((1_000, 3), (4_000, 6), (4_999, 6), (1, 9), (49_999, 9), (1, 12)):
            clock.move(moved)
            settle(service, store)
            assert service.delivered == count
        check_log(store, drained=True)
        assert service.waiting_from(3_600_000) is None
    finally:
        store.close()


def test_the_status_counts_what_waits_by_level(store, clock):
    [old] = put_waiting(store, waiting(0, 3))  # a broker's
    service = service_of(Master(store, floor=old + 1), clock)
    assert service.status() == {"waiting": 0, "levels": {}, "delivered": 0, "lost": 0}
    put_waiting(store, *[waiting(n, level) for n in range(5) for level in (1, 3)], waiting(9, 18))
    store.wait_dispatched(store.max_offset, 10)
    levels = {"1": 5, "3": 5, "18": 1}
    assert service.status() == {"waiting": 11, "levels": levels, "delivered": 0, "lost": 0}
    clock.move(1_000)
    settle(service, store)
    levels = {"3": 5, "18": 1}
    assert service.status() == {"waiting": 6, "levels": levels, "delivered": 5, "lost": 0}
    clock.move(DELAYS_MS[17])
    settle(service, store)
    assert service.status() == {"waiting": 0, "levels": {}, "delivered": 11, "lost": 0}


def test_a_message_that_says_no_topic_is_given_up_and_the_next_one_is_delivered(store, clock):
    service = service_of(Master(store), clock)
    raw = build_record(
        SCHEDULE_TOPIC, b"x",
        queue_id=0, properties=[("DELAY", "1")], born_timestamp_ms=1, born_host=BORN,
    )  # fmt: skip
    put_waiting(store, raw, waiting(2, 1), waiting(3, 1, queue_id=77))
    clock.move(1_000)
    settle(service, store)
    assert not service.lost, "its properties may be damaged, and repaired"
    clock.move(int(PATIENCE_MS))
    settle(service, store)
    assert service.lost == 1 and "could not be delivered" in service.problems()[0]
    found = [one for one in records_of(store) if one.topic == "T"]
    assert [(one.body, one.queue_id) for one in found] == [(b"2", 0), (b"3", 0)]


def test_many_due_messages_leave_the_interpreter_to_others_in_between(store, clock, monkeypatch):
    service, rests = service_of(Master(store), clock), []

    class Stopping:
        def is_set(self):
            return len(rests) == 3

        def wait(self, seconds):
            rests.append(seconds)

    spent = iter([7.0, 0.0, 900.0])

    def turn():
        clock.move(next(spent))
        return 0.0

    monkeypatch.setattr(service, "stopping", Stopping())
    monkeypatch.setattr(service, "turn", turn)
    service.run()
    assert rests == pytest.approx([0.007, 0.0, 0.05])


def test_a_step_is_bounded_however_many_messages_are_due(store, clock):
    service, sizes = service_of(Master(store), clock), []
    put_waiting(store, *[waiting(n, 1 + n % 3) for n in range(1_000)])
    put_waiting(store, *[waiting(n, 1, pad="x" * 30_000) for n in range(30)])
    store.wait_dispatched(store.max_offset, 10)
    clock.move(10_000)
    while service.turn() == 0.0:
        sizes.append(service.delivered - sum(sizes))
    assert sum(sizes) == 1_030 and max(sizes) <= 64
    assert min(sizes) < 20, "of large messages there are fewer in a step"
    check_log(store, drained=True)


def test_a_damaged_message_stops_neither_its_level_nor_the_thread(store, clock):
    chance = random.Random(SEED)
    print(f"HASTORE_SEED={SEED}")
    service = service_of(Master(store), clock)
    offsets = put_waiting(store, *[waiting(n, 1) for n in range(200)])
    store.wait_dispatched(store.max_offset, 10)
    damaged = set(chance.sample(range(200), 60))
    path = log_file(store.config.root)
    for number in damaged:
        [unit] = store.queues.get(SCHEDULE_TOPIC, 0).read(number, 1)
        for _ in range(3):
            scribble(path, offsets[number] + chance.randrange(unit.size), chance.randbytes(1))
    clock.move(1_000)
    settle(service, store)
    clock.move(int(PATIENCE_MS))  # once, not for each of them
    settle(service, store)
    found = {marked(one.properties).offset for one in delivered_in(store)}
    assert {offsets[n] for n in range(200) if n not in damaged} <= found
    assert service.delivered + service.lost == 200 and len(found) == service.delivered


def test_a_damaged_message_waits_for_its_repair(store, clock):
    service, asked = service_of(Master(store), clock), []
    store.hooks.on_damage = asked.append
    offsets = put_waiting(store, *[waiting(n, 1) for n in range(4)], waiting(4, 2))
    store.wait_dispatched(store.max_offset, 10)
    path = log_file(store.config.root)
    sound = Path(path).read_bytes()
    for number in (1, 3):
        scribble(path, offsets[number], bytes(8))
    clock.move(5_000)
    settle(service, store)
    assert sorted(one.body for one in delivered_in(store)) == [b"0", b"4"]
    assert set(asked) == {offsets[1]} and not service.lost
    assert service.problems() == ["the delayed messages of level 1 wait: one cannot be read"]
    clock.move(int(PATIENCE_MS) - 1)
    settle(service, store)
    scribble(path, offsets[1], sound[offsets[1] : offsets[1] + 8])
    settle(service, store)
    clock.move(int(PATIENCE_MS) - 1)  # the next one that is damaged has its own
    settle(service, store)
    assert set(asked) == {offsets[1], offsets[3]} and not service.lost
    scribble(path, offsets[3], sound[offsets[3] : offsets[3] + 8])
    settle(service, store)
    assert sorted(one.body for one in delivered_in(store)) == [b"0", b"1", b"2", b"3", b"4"]
    assert not service.lost and not service.problems()


def test_a_message_whose_topic_is_damaged_waits_for_its_repair(store, clock):
    """No CRC of a plain log covers properties, so only the topic that none can have shows it."""
    service, asked = service_of(Master(store), clock), []
    store.hooks.on_wrong = asked.append
    offsets = put_waiting(store, *[waiting(n, 1) for n in range(3)])
    store.wait_dispatched(store.max_offset, 10)
    path = log_file(store.config.root)
    at = Path(path).read_bytes().index(b"REAL_TOPIC\x01T", offsets[1]) + len(b"REAL_TOPIC\x01")
    scribble(path, at, b"$")
    clock.move(1_000)
    settle(service, store)
    assert [one.body for one in delivered_in(store)] == [b"0"]
    assert set(asked) == {offsets[1]} and not service.lost
    assert service.problems() == ["the delayed messages of level 1 wait: one cannot be read"]
    scribble(path, at, b"T")
    settle(service, store)
    assert [one.body for one in delivered_in(store)] == [b"0", b"1", b"2"]
    assert not service.lost and not service.problems()


def test_a_damaged_queue_number_does_not_count_for_another_level(store, clock):
    service = service_of(Master(store), clock)
    offsets = put_waiting(store, waiting(1, 18), waiting(2, 1), waiting(3, 1))
    store.wait_dispatched(store.max_offset, 10)
    at = header_struct("queue_id", start=offset_of("queue_id"))
    path = log_file(store.config.root)
    for offset, wrong in zip(offsets[1:], (17, 1 << 28), strict=True):
        scribble(path, offset + offset_of("queue_id"), at.pack(wrong))
    clock.move(1_000)
    settle(service, store)
    assert service.delivered == 2
    assert store.deliveries.state.places == {1: offsets[2]}
    clock.move(DELAYS_MS[17])
    settle(service_of(Master(store), clock), store)  # knows the log only
    assert sorted(one.body for one in delivered_in(store)) == [b"1", b"2", b"3"]


def test_a_client_can_neither_forge_a_delivery_nor_a_waiting_message(store):
    forged = deliver(store.reader.record_bytes(put_waiting(store, waiting(1, 1))[0])).record
    end = store.max_offset
    for raw in (forged, waiting(2, 1)):
        [[result]] = store.put_encoded([raw])
        assert result.status is Status.MESSAGE_ILLEGAL and "reserved" in result.reason
    assert store.max_offset == end


def replicate(source, target, end):
    """Copy the log of `source` up to `end`, in pieces that end with a file."""
    while target.max_offset < end:
        at = target.max_offset
        left = source.file_size - at % source.file_size
        with source.view(at, min(left, end - at)) as view:
            target.append_replica(at, bytes(view))


class Pair:
    """Two nodes with one log between them: kills, restarts, cuts and changes of the master."""

    def __init__(self, folder, seed):
        self.random, self.folder, self.clock = random.Random(seed), folder, Clock()
        self.copies = self.epoch = self.messages = 0
        self.roots = [folder / "0", folder / "1"]
        self.stores = [self.open(root) for root in self.roots]
        self.master = 0
        self.lead(0)

    def open(self, root):
        found = MessageStore(config(root), store_host=HOST, clock=self.clock)
        found.open()
        return found

    def lead(self, master):
        self.master, self.epoch = master, self.epoch + 1
        self.backend = Master(self.stores[master], self.epoch << 16 | master + 1)
        self.service = service_of(self.backend, self.clock)

    def step(self):
        kinds = "put put deliver deliver deliver time jump topic copy kill restart cut flip".split()
        getattr(self, self.random.choice(kinds))()

    def put(self):
        store, count = self.stores[self.master], self.random.randint(1, 40)
        levels = self.random.choice([(1,), (1, 2), (1, 2, 3, 18)])
        for _ in range(count):
            self.messages += 1
            size = self.random.choice([0, 0, 0, 3_000])
            more = {"pad": "x" * size} if size else {}
            level = self.random.choice(levels)
            put_waiting(store, waiting(self.messages, level, queue_id=self.messages % 4, **more))

    def deliver(self):
        for _ in range(self.random.randint(1, 3)):
            self.service.turn()

    def time(self):
        self.clock.move(self.random.choice([100, 1_000, 6_000, 30_000]))

    def topic(self):
        """The topic takes messages, or none, or has fewer queues, or is deleted."""
        changes = [
            *[TopicChange(TopicConfig("T", 4, count, perm)) for count, perm in ((4, 6), (1, 6))],
            *[TopicChange(TopicConfig("T", 4, count, perm)) for count, perm in ((4, 4), (0, 0))],
            TopicChange(deleted="T"),
        ]
        put_waiting(self.stores[self.master], build_change(self.random.choice(changes), 1))

    def jump(self):
        """Somebody sets the clock."""
        hours = self.random.choice([-30, -1, 1])
        self.clock.wall += hours * 3_600_000

    def copy(self):
        source, target = self.stores[self.master], self.stores[1 - self.master]
        end = self.random.randint(target.max_offset, source.max_offset)
        replicate(source, target, cut_point(source.log, end))

    def kill(self):
        node = self.random.randrange(2)
        self.copies += 1
        root = self.folder / f"{node}-{self.copies}"
        crash_copy(self.stores[node], root)
        self.stores[node].close()
        shutil.rmtree(self.roots[node])
        self.roots[node] = root
        if self.random.random() < 0.5:
            _lose(root, *[name for name in _ALL_DERIVED if self.random.random() < 0.5])
        self.again(node)

    def restart(self):
        node = self.random.randrange(2)
        self.stores[node].close()
        self.again(node)

    def again(self, node):
        self.stores[node] = self.open(self.roots[node])
        if node == self.master:
            self.lead(node)

    def cut(self):
        """The master dies, and the other node goes on with what it has."""
        old, new = self.stores[self.master], self.stores[1 - self.master]
        end = new.max_offset
        old.truncate(end)
        assert old.max_offset == end
        self.lead(1 - self.master)

    def flip(self):
        """The other node becomes master, with all that this one has."""
        source, target = self.stores[self.master], self.stores[1 - self.master]
        replicate(source, target, source.max_offset)
        self.lead(1 - self.master)

    def drain(self):
        settle(self.service, self.stores[self.master])  # sees all that waits
        self.clock.move(DELAYS_MS[17])
        settle(self.service, self.stores[self.master])

    def close(self):
        for store in self.stores:
            store.close()


@pytest.mark.parametrize("seed", range(SEED, SEED + SEEDS))
def test_each_message_is_delivered_once_whatever_happens(tmp_path, seed):
    print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1")
    pair = Pair(tmp_path, seed)
    try:
        for _ in range(60):
            pair.step()
            check_log(pair.stores[pair.master], drained=False)
            check_places_below(pair.stores[pair.master], pair.random)
        pair.put()
        pair.drain()
        assert check_log(pair.stores[pair.master], drained=True) > 0
    finally:
        pair.close()


def test_the_state_survives_a_kill_and_a_cut_at_any_record(tmp_path, clock):
    root = tmp_path / "store"
    with opened(root) as store:
        service = ScheduleMessageService(
            store, Master(store), Transfer(), clock, on_failure=lambda *_: None
        )
        for number in range(120):
            put_waiting(store, waiting(number, 1 + number % 3))
            if number % 5 == 4:
                clock.wall = 1 << 50
                settle(service, store)
        ends = [one.physical_offset for one in records_of(store)]
        expected, places = {}, {}
        for record in records_of(store):
            expected[record.physical_offset] = dict(places)
            mark = marked(record.properties)
            if mark is not None:
                places[mark.level] = max(places.get(mark.level, -1), mark.offset)
        copy = crash_copy(store, tmp_path / "copy")
        for end in reversed(ends[::7]):
            store.truncate(end)
            assert store.deliveries.state.places == expected[end], end
    with opened(copy) as again:
        again.wait_dispatched(again.max_offset, 10)
        assert again.deliveries.state.places == places
        again.truncate(ends[60])
        assert again.deliveries.state.places == expected[ends[60]]


def retention_of(store, root, limits, clock, service):
    return RetentionService(
        limits, store, KeptPositions(REAL, str(root), lambda: 0, clock), clock,
        open_epoch=lambda: 0, confirms=lambda: False, needed_from=dict,
        put=store.put_encoded, on_failure=lambda *_: None, waiting_from=service.waiting_from,
    )  # fmt: skip


def fill(store, files):
    end = store.max_offset + files * FILE_SIZE
    while store.max_offset < end:
        put(store, *[message(n, size=1_000) for n in range(30)])
    store.wait_dispatched(store.max_offset, 10)
    store.flush()


@pytest.mark.parametrize("how", ["delivered", "late", "no room"])
def test_retention_keeps_messages_that_wait(tmp_path, clock, how, monkeypatch):
    limits = RetentionConfig(max_size_bytes=2 * FILE_SIZE, hold_ms=60_000)
    with opened(tmp_path / "store", retention=limits) as store:
        master = Master(store)
        service = service_of(master, clock)
        retention = retention_of(store, tmp_path / "store", limits, clock, service)
        clock.wall = SYSTEM_CLOCK.wall_ms()  # the store has its own
        [offset] = put_waiting(store, waiting(1, 18))
        for number in range(6):
            put(store, *[message(number * 100 + n, size=1_000) for n in range(60)])
        store.wait_dispatched(store.max_offset, 10)
        store.flush()
        retention.look()
        assert store.min_offset <= offset and retention.problems() == []
        if how == "no room":
            monkeypatch.setattr(type(store), "no_room", "it is full")
        else:
            clock.move(DELAYS_MS[17] + (60_001 if how == "late" else 1_000))
        if how == "delivered":
            settle(service, store)
            assert service.delivered == 1
            store.wait_dispatched(store.max_offset, 10)
        store.flush()
        retention.look()
        assert store.min_offset > offset


def test_retention_keeps_what_waits_behind_a_late_message_of_its_level(tmp_path):
    limits = RetentionConfig(max_size_bytes=2 * FILE_SIZE, hold_ms=60_000)
    root, clock = tmp_path / "store", Clock()
    store = MessageStore(config(root, retention=limits), store_host=HOST, clock=clock)
    store.open()
    try:
        service = service_of(Master(store), clock)
        retention = retention_of(store, root, limits, clock, service)
        put_waiting(store, waiting(1, 18))
        fill(store, 4)
        clock.move(DELAYS_MS[17] - 1_000)
        [second] = put_waiting(store, waiting(2, 18))
        fill(store, 4)
        retention.look()
        clock.move(61_001)
        retention.look()  # nothing delivers: the first message is late, and lapses
        assert 0 < store.min_offset <= second
        assert service.waiting_from(limits.hold_ms) == second
        clock.move(DELAYS_MS[17] - 61_001 + 59_000)
        assert service.waiting_from(limits.hold_ms) == second
        clock.move(1_001)
        assert service.waiting_from(limits.hold_ms) is None
    finally:
        store.close()


def test_retention_keeps_late_messages_while_they_are_being_delivered(store, clock):
    service = service_of(Master(store), clock)
    put_waiting(store, *[waiting(n, 1) for n in range(600)])
    clock.move(1_000)
    for _ in range(4):  # slow: each batch later than the last by nearly `hold`
        assert store.wait_dispatched(store.max_offset, 10)
        kept = service.waiting_from(60_000)
        assert kept is not None
        clock.move(59_000)
        assert service.waiting_from(60_000) == kept
        service.turn()
    settle(service, store)
    assert service.waiting_from(60_000) is None


def test_a_message_from_a_clock_far_ahead_does_not_hold_the_log_for_ever(store, clock):
    service = service_of(Master(store), clock)
    clock.wall += 10 * 365 * 86_400_000
    [offset] = put_waiting(store, waiting(1, 3))
    store.wait_dispatched(store.max_offset, 10)
    clock.wall -= 10 * 365 * 86_400_000
    assert service.waiting_from(60_000) == offset
    clock.move(69_999)
    assert service.waiting_from(60_000) == offset
    clock.move(1)
    assert service.waiting_from(60_000) is None  # nobody has delivered it for 10 s + hold


def test_queue_offsets_without_a_message_hide_none_behind_them(store, clock):
    service = service_of(Master(store), clock)
    put_waiting(store, waiting(1, 1))
    clock.move(1_000)
    settle(service, store)
    ends = build_queue_ends([(SCHEDULE_TOPIC, 0, 10_000)], since=0, ident=1, now_ms=1)
    put_waiting(store, *ends)
    store.wait_dispatched(store.max_offset, 10)
    [offset] = put_waiting(store, waiting(2, 1))
    store.wait_dispatched(store.max_offset, 10)
    [unit] = store.queues.get(SCHEDULE_TOPIC, 0).read(10_000, 1)
    assert unit.offset == offset
    assert service.waiting_from(60_000) == offset
    clock.move(1_000)
    settle(service, store)
    check_log(store, drained=True)


def test_the_levels_are_configured(tmp_path, clock):
    levels = "2s 3m"
    store = MessageStore(
        config(tmp_path / "store", message_delay_level=levels), store_host=HOST, clock=clock
    )
    store.open()
    try:
        [offset] = put_waiting(store, waiting(1, 2))
        store.wait_dispatched(store.max_offset, 10)
        [unit] = store.queues.read(SCHEDULE_TOPIC, 1, 0, 1)
        assert (unit.offset, unit.tags_code) == (offset, START_MS + 180_000)
        service = ScheduleMessageService(
            store, Master(store), Transfer(), clock,
            on_failure=lambda *_: None, delays_ms=parse_levels(levels),
        )  # fmt: skip
        clock.move(179_999)
        settle(service, store)
        assert service.delivered == 0
        clock.move(1)
        settle(service, store)
        check_log(store, drained=True)
    finally:
        store.close()


def set_topic(store, config):
    put_waiting(store, build_change(TopicChange(config=config), 1))


@pytest.mark.parametrize(
    ("topic", "places"),
    [
        (TopicConfig("T", 4, 4, PERM_READ), [0, 3, 0]),
        (TopicConfig("T", 4, 4, 0), [0, 3, 0]),
        (TopicConfig("T", 2, 2, PERM_READ), [0, 0, 0]),
        (TopicConfig("T", 4, 0), [0, 3, 0]),  # consumers still read its queue: the order stays
        (TopicConfig("T", 3, 0), [0, 0, 0]),
    ],
)
def test_a_topic_that_takes_no_messages_gets_those_that_were_accepted(store, clock, topic, places):
    set_topic(store, TopicConfig("T", 4, 4))
    service = service_of(Master(store), clock)
    put_waiting(store, *[waiting(n, 1, queue_id=queue) for n, queue in enumerate([0, 3, 5])])
    set_topic(store, topic)
    clock.move(1_000)
    settle(service, store)
    assert service.lost == 0 and service.problems() == []
    check_log(store, drained=True)
    assert [one.queue_id for one in records_of(store) if one.topic == "T"] == places
    [[refused]] = store.put_encoded([message(1, topic="T")])  # others are refused still
    assert refused.status is Status.MESSAGE_ILLEGAL


@pytest.mark.parametrize(("read", "write", "place"), [(4, 1, 3), (1, 4, 3), (3, 2, 0)])
def test_a_message_keeps_its_queue_as_long_as_somebody_has_it(store, clock, read, write, place):
    """Another queue would overtake the messages of its own that consumers still read."""
    set_topic(store, TopicConfig("T", 4, 4))
    service = service_of(Master(store), clock)
    put_waiting(store, waiting(1, 1, queue_id=3))
    set_topic(store, TopicConfig("T", read, write))
    clock.move(1_000)
    settle(service, store)
    check_log(store, drained=True)
    assert [one.queue_id for one in records_of(store) if one.topic == "T"] == [place]


def test_a_smaller_limit_of_messages_refuses_none_that_was_accepted(tmp_path, clock):
    raw = build_record(
        SCHEDULE_TOPIC, b"x" * 5_000, queue_id=0,
        properties=[("DELAY", "1"), ("REAL_TOPIC", "T"), ("REAL_QID", "0")],
        born_timestamp_ms=1, born_host=BORN,
    )  # fmt: skip
    with opened(tmp_path / "store") as store:
        put_waiting(store, raw)
    with opened(tmp_path / "store", max_message_size=4_096) as store:
        clock.wall = SYSTEM_CLOCK.wall_ms() + 1_000  # the store has its own
        service = service_of(Master(store), clock)
        settle(service, store)
        assert service.delivered == 1 and service.lost == 0
        check_log(store, drained=True)


@pytest.mark.parametrize("more", [{"KEYS": "k " * 2_100 + "k"}, {"odd": "a-b"}])
def test_properties_that_only_a_broker_takes_are_delivered(store, clock, monkeypatch, more):
    """Of a log that was taken over: RocketMQ bounds no KEYS, and takes 0x01 in a value."""
    raw = waiting(0, 1, **more).replace(b"a-b", b"a\x01b")
    with monkeypatch.context() as patch:
        patch.setattr(properties, "MAX_KEYS", 10_000)
        patch.setattr(validation, "is_well_formed", lambda _: True)
        put_waiting(store, raw, waiting(1, 1))
    clock.move(2_000)
    service = service_of(Master(store), clock)
    settle(service, store)
    assert (service.delivered, service.lost) == (2, 0)
    found = [one for one in records_of(store) if one.topic == "T"]
    assert [one.body for one in found] == [b"0", b"1"]
    assert decode_record(raw).properties in found[0].properties


def _lose(root, *names):
    for name in names:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


_ALL_DERIVED = (
    *("consumequeue", "index", "checkpoint"),
    *("hastore/deliveries", "hastore/replay", "hastore/idempotence"),
)
_DERIVED = ("consumequeue", "hastore/deliveries", "hastore/replay", "index hastore/idempotence")


@pytest.mark.parametrize(("clean", "later"), [(True, "at once"), (False, "after a cut")])
def test_any_loss_of_derived_files_delivers_each_message_once(tmp_path, clock, clean, later):
    root = tmp_path / "store"
    with opened(root) as store:
        service = service_of(Master(store), clock)
        for number in range(0, 60, 6):
            put_waiting(store, *[waiting(number + n, 1 + n % 3) for n in range(6)])
            put(store, message(number, size=4_000))
            clock.wall = SYSTEM_CLOCK.wall_ms() + 1_000  # the store has its own
            settle(service, store)
        middle = records_of(store)[-20].physical_offset
        put_waiting(store, *[waiting(n, 1 + n % 3) for n in range(60, 66)])
        if not clean:
            crash_copy(store, tmp_path / "killed")
    origin = root if clean else tmp_path / "killed"
    for lost in range(1 << len(_DERIVED)):
        names = [name for bit, name in enumerate(_DERIVED) if lost >> bit & 1]
        copy = tmp_path / f"without-{lost}"
        shutil.copytree(origin, copy)
        _lose(copy, *" ".join(names).split())
        with opened(copy) as store:
            if later == "after a cut":
                store.truncate(middle)
            service = service_of(Master(store), clock)
            clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
            settle(service, store)
            assert check_log(store, drained=True) > 20, names
            assert waits_at(store) is None, names


def test_a_cut_while_lost_queues_are_built_again_forgets_no_delivery(tmp_path, clock, monkeypatch):
    root = tmp_path / "store"
    with opened(root) as store:
        service = service_of(Master(store), clock)
        put(store, *[message(n, size=2_000) for n in range(10)])
        put_waiting(store, *[waiting(n, 1) for n in range(5)])
        clock.wall = SYSTEM_CLOCK.wall_ms() + 1_000  # the store has its own
        settle(service, store)
        end = store.max_offset
        put(store, message(99))
    _lose(root, "hastore/deliveries")
    with opened(root) as store:  # reads the log as one batch: the only state is at its end
        store.wait_dispatched(store.max_offset, 10)
    _lose(root, "consumequeue")
    monkeypatch.setattr(replay, "VIEW_BYTES", 4_096)
    step = IndexBuildService._step
    monkeypatch.setattr(
        IndexBuildService, "_step", lambda self: self.dispatched_offset < 8_000 and step(self)
    )
    with opened(root) as store:
        store.wait_dispatched(8_000, 10)
        store.truncate(end)
        assert store.dispatched_offset < end // 2, "no delayed message was read"
        monkeypatch.undo()
        settle(service_of(Master(store), clock), store)
        check_log(store, drained=True)
