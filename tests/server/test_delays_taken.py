"""A broker's delayed messages, taken over with its log: each is delivered once, none again."""

from dataclasses import replace

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import StoreError
from hastore.fs.filesystem import REAL
from hastore.ha.rules.epochs import FLOOR_EPOCH
from hastore.record.codec import decode_record, encode_record
from hastore.record.delays import DELAYS_MS, SCHEDULE_TOPIC, TAKEN_TOPIC, deliver, marked
from hastore.server.schedule_service import ScheduleMessageService
from hastore.server.take_over import DELAYS_FILE, read_offsets
from tests.server.test_schedule_service import (
    Clock,
    Master,
    Transfer,
    put_waiting,
    records_of,
    settle,
    waiting,
)
from tests.store.kit import message, opened, put


def delivered_by_broker(store, offset):
    """Append a delivery as a broker writes it: without a mark."""
    raw = deliver(store.reader.record_bytes(offset)).record
    record = decode_record(raw)
    kept = record.properties[: record.properties.index(b"HS_DELAYED")]
    put_waiting(store, encode_record(replace(record, properties=kept)))


def service_of(store, clock, floor, root, epoch=1 << 16 | 1):
    master = Master(store, epoch)
    master.starts = [(epoch, floor)]
    return ScheduleMessageService(
        store, master, Transfer(), clock, on_failure=lambda *_: None,
        taken=lambda: read_offsets(REAL, str(root)),
    )  # fmt: skip


def write_file(root, text):
    path = root / DELAYS_FILE
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("known", ["all", "fewer", "none"])
def test_what_the_broker_has_not_delivered_is_delivered(tmp_path, known):
    """The broker's file may lag behind its log, as after a kill."""
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        for number in range(12):
            [offset] = put_waiting(store, waiting(number, 1 + number % 2))
            if number < 7:
                delivered_by_broker(store, offset)
        again = decode_record(store.reader.record_bytes(offset))
        assert again.topic == SCHEDULE_TOPIC
        store.wait_dispatched(store.max_offset, 60)
        floor = store.max_offset
        texts = {"all": "{1:4,2:3}", "fewer": '{1:1,"2":2}', "none": "{}"}
        write_file(tmp_path, f'{{"dataVersion":{{"counter":1}},"offsetTable":{texts[known]}}}')
        clock.wall = SYSTEM_CLOCK.wall_ms()
        for epoch in (1 << 16 | 1, 2 << 16 | 1):
            service = service_of(store, clock, floor, tmp_path, epoch)
            for _ in range(3):
                settle(service, store)
                clock.move(DELAYS_MS[17])
        put_waiting(store, waiting(99, 1))
        for _ in range(3):
            settle(service, store)
            clock.move(DELAYS_MS[17])
        bodies = [int(one.body) for one in records_of(store) if one.topic == "T"]
        assert sorted(bodies) == [*range(12), 99]
        taken = [one for one in records_of(store) if one.topic == TAKEN_TOPIC]
        assert len(taken) == 2 and {marked(one.properties).level for one in taken} == {1, 2}


def test_without_the_file_they_stay_the_brokers(tmp_path):
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        put_waiting(store, waiting(1, 1))
        store.wait_dispatched(store.max_offset, 60)
        service = service_of(store, clock, store.max_offset, tmp_path)
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        settle(service, store)
        assert not [one for one in records_of(store) if one.topic in ("T", TAKEN_TOPIC)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"offsetTable":{0:1}}',
                                  '{"offsetTable":{1:-1}}', '{"offsetTable":{"x":1}}'])  # fmt: skip
def test_a_damaged_file_is_named_and_the_brokers_levels_wait_for_it(tmp_path, text, caplog):
    """A delivery of hastore's own would count as one behind all of the broker's of its level."""
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        put_waiting(store, waiting(1, 1))
        store.wait_dispatched(store.max_offset, 60)
        write_file(tmp_path, text)
        with pytest.raises(StoreError, match=r"delayOffset\.json"):
            read_offsets(REAL, str(tmp_path))
        floor = store.max_offset
        service = service_of(store, clock, floor, tmp_path)
        put_waiting(store, waiting(2, 1), waiting(3, 2))
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        for _ in range(3):
            settle(service, store)
            clock.move(10_000)
        assert [one.body for one in records_of(store) if one.topic == "T"] == [b"3"]
        said = [one for one in caplog.records if "delayOffset.json" in one.getMessage()]
        assert len(said) == 1 and service.problems() == [said[0].getMessage()]
        service = service_of(store, clock, floor, tmp_path)  # a restart changes nothing
        settle(service, store)
        write_file(tmp_path, '{"offsetTable":{1:0}}')
        clock.move(10_000)
        for _ in range(3):
            settle(service, store)
        bodies = [one.body for one in records_of(store) if one.topic == "T"]
        assert bodies == [b"3", b"1", b"2"] and not service.problems()


@pytest.mark.parametrize("is_there", [True, False])
def test_what_nobody_may_read_is_waited_for_until_it_is_given_or_removed(tmp_path, is_there):
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        put_waiting(store, waiting(1, 1))
        store.wait_dispatched(store.max_offset, 60)
        (tmp_path / DELAYS_FILE).mkdir(parents=True)
        service = service_of(store, clock, store.max_offset, tmp_path)
        put_waiting(store, waiting(2, 1))
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        settle(service, store)
        assert "Is a directory" in service.problems()[0]
        (tmp_path / DELAYS_FILE).rmdir()
        if is_there:
            write_file(tmp_path, '{"offsetTable":{}}')
        clock.move(10_000)
        for _ in range(3):
            settle(service, store)
        bodies = [one.body for one in records_of(store) if one.topic == "T"]
        assert bodies == ([b"1", b"2"] if is_there else [b"2"]) and not service.problems()


def test_nothing_waits_any_more_once_nobody_knows_where_the_brokers_log_ends(tmp_path):
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        put_waiting(store, waiting(1, 1))
        store.wait_dispatched(store.max_offset, 60)
        write_file(tmp_path, "{")
        master = Master(store, 1 << 16 | 1)
        master.starts = [(master.number, store.max_offset)]
        service = ScheduleMessageService(
            store, master, Transfer(), clock, on_failure=lambda *_: None,
            taken=lambda: read_offsets(REAL, str(tmp_path)),
        )  # fmt: skip
        put_waiting(store, waiting(2, 1))
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        settle(service, store)
        assert service.problems()
        master.number = 2 << 16 | 1
        master.starts = [(FLOOR_EPOCH, 0), (1 << 16 | 1, master.starts[0][1])]  # shortened
        settle(service, store)
        assert b"2" in [one.body for one in records_of(store) if one.topic == "T"]
        assert not service.problems()


def test_without_messages_of_the_broker_nothing_waits_for_its_file(tmp_path):
    clock = Clock()
    with opened(tmp_path) as store:
        put(store, message(0))
        store.wait_dispatched(store.max_offset, 60)
        write_file(tmp_path, "{")
        service = service_of(store, clock, store.max_offset, tmp_path)
        put_waiting(store, waiting(2, 1))
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        settle(service, store)
        assert [one.body for one in records_of(store) if one.topic == "T"] == [b"2"]
        assert not service.problems()


def test_the_first_record_of_the_log_is_not_lost_in_silence(tmp_path, caplog):
    clock = Clock()
    with opened(tmp_path) as store:
        put_waiting(store, waiting(1, 1), waiting(2, 1))
        store.wait_dispatched(store.max_offset, 60)
        write_file(tmp_path, '{"offsetTable":{}}')
        service = service_of(store, clock, store.max_offset, tmp_path)
        clock.wall = SYSTEM_CLOCK.wall_ms() + DELAYS_MS[17]
        settle(service, store)
        assert "level 1 are not delivered" in caplog.text
        assert not [one for one in records_of(store) if one.topic == "T"]
