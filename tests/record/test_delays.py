"""Delayed messages and retries as records: what a RocketMQ 5.3.3 broker wrote, and the rules."""

import dataclasses

import pytest

from hastore.config.model import StoreConfig
from hastore.errors import CorruptRecordError, MessageIllegalError, UsageError
from hastore.record.codec import Host, Record, build_record, decode_record, encode_record
from hastore.record.delays import (
    DEFAULT_LEVELS,
    DELAYS_MS,
    Marked,
    Retry,
    Waiting,
    deliver,
    format_levels,
    level_of,
    marked,
    parse_levels,
    retry_of,
    schedule,
    sent_back,
)
from hastore.record.layout import FLAG_PREPARED, MAX_PROPERTIES_BYTES
from hastore.record.properties import decode_properties

BORN = Host.parse("127.0.0.1:49532")


def test_the_levels_are_rocketmqs():
    assert len(DELAYS_MS) == 18
    assert (DELAYS_MS[0], DELAYS_MS[4], DELAYS_MS[17]) == (1_000, 60_000, 7_200_000)
    assert parse_levels("2s 1d") == (2_000, 86_400_000)
    assert format_levels(DELAYS_MS) == DEFAULT_LEVELS
    assert format_levels((90_000, 7_200_000, 86_400_000)) == "90s 2h 1d"


@pytest.mark.parametrize("text", ["", "1", "0s", "1s,2s", "s", "-1s", "1S", "1s " * 100])
def test_a_list_of_delays_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="is no list of delays"):
        parse_levels(text)


@pytest.mark.parametrize(("text", "level"), [("1", 1), ("0", 0), ("-1", 0), ("+3", 3), ("19", 19)])
def test_a_level_is_a_whole_number(text, level):
    assert level_of({"DELAY": text}) == level
    assert level_of({}) == 0
    for bad in (text + "x", " " + text, ""):
        with pytest.raises(MessageIllegalError, match="a whole number"):
            level_of({"DELAY": bad})


def test_a_message_without_a_delay_is_left_alone():
    assert schedule("T", 1, {"DELAY": "0"}) is None and schedule("T", 1, {}) is None


def test_a_message_waits_in_the_queue_of_its_level():
    given = {
        "DELAY": "3",
        "HS_PID": "p",
        "HS_SEQ": "1",
        "HS_DELAYED": "1-2",
        "TIMER_DELAY_SEC": "1",
    }
    found = schedule("T", 7, given)
    assert found == Waiting(
        "SCHEDULE_TOPIC_XXXX", 2, b"DELAY\x013\x02REAL_TOPIC\x01T\x02REAL_QID\x017\x02"
    )


def test_a_level_above_the_last_one_is_the_last_one():
    found = schedule("T", 0, {"DELAY": "99"})
    assert found.queue_id == 17 and b"DELAY\x0118\x02" in found.properties


def test_a_message_has_room_for_the_mark_of_its_delivery():
    room = MAX_PROPERTIES_BYTES
    while True:
        try:
            place = schedule("T", 0, {"DELAY": "1", "pad": "x" * room})
            break
        except MessageIllegalError:
            room -= 1
    raw = record_of(place, physical_offset=10**18 - 1)
    assert len(decode_record(deliver(raw).record).properties) <= MAX_PROPERTIES_BYTES
    assert MAX_PROPERTIES_BYTES - len(place.properties) < 64


def record_of(place, **more):
    return encode_record(
        Record(b"", place.topic, place.queue_id, place.properties, born_host=BORN, **more)
    )


def test_a_delivery_says_what_it_delivers():
    raw = record_of(schedule("T", 7, {"DELAY": "3"}), physical_offset=4_711)
    topic, queue_id, made = deliver(raw)
    found = decode_record(made)
    assert (topic, queue_id, found.topic, found.queue_id) == ("T", 7, "T", 7)
    assert marked(found.properties) == Marked(3, 4_711)
    assert deliver(raw, queue_id=0).queue_id == 0


@pytest.mark.parametrize("value", ["", "0-1", "100-1", "1-", "1--1", "1-1x", "1-" + "1" * 19])
def test_a_mark_of_another_form_is_none(value):
    assert marked(f"HS_DELAYED\x01{value}\x02".encode()) is None
    assert marked(b"XHS_DELAYED\x011-1\x02") is None


@pytest.mark.parametrize(
    "properties",
    [(), (("REAL_TOPIC", "T"),), (("REAL_TOPIC", ""), ("REAL_QID", "1")),
     (("REAL_TOPIC", "T"), ("REAL_QID", "-1"))],
)  # fmt: skip
def test_a_message_that_does_not_say_where_it_belongs_is_not_delivered(properties):
    raw = build_record(
        "SCHEDULE_TOPIC_XXXX", b"", queue_id=0, properties=properties, born_timestamp_ms=1,
        born_host=BORN,
    )  # fmt: skip
    with pytest.raises(CorruptRecordError, match="REAL_TOPIC"):
        deliver(raw)


def message(times=0, *pairs, **more):
    raw = "".join(f"{name}\x01{value}\x02" for name, value in pairs).encode()
    return Record(
        b"", "T", 1, raw, reconsume_times=times, physical_offset=255, store_host=BORN, **more
    )


@pytest.mark.parametrize(
    ("times", "level", "expected"),
    [
        (0, 0, Retry("%RETRY%g", 0, 3)),
        (15, 0, Retry("%RETRY%g", 0, 18)),
        (2, 9, Retry("%RETRY%g", 0, 9)),
        (16, 0, Retry("%DLQ%g", 0, 0)),
        (0, -1, Retry("%DLQ%g", 0, 0)),
    ],
)
def test_where_a_message_goes_that_is_sent_back(times, level, expected):
    assert retry_of(message(times), "g", level=level, times_max=16, retry_queue=0) == expected


def test_a_message_that_is_sent_back_waits_and_knows_where_it_came_from():
    first = message(0, ("UNIQ_KEY", "k"), ("HS_PID", "p"), ("HS_SEQ", "1"), ("HS_DELAYED", "1-2"))
    found = decode_record(sent_back(first, Retry("%RETRY%g", 0, 3)))
    known = dict(decode_properties(found.properties))
    assert (found.topic, found.queue_id, found.reconsume_times) == ("SCHEDULE_TOPIC_XXXX", 2, 1)
    assert known == {
        "UNIQ_KEY": "k", "RETRY_TOPIC": "T", "WAIT": "false", "DELAY": "3", "REAL_QID": "0",
        "REAL_TOPIC": "%RETRY%g", "ORIGIN_MESSAGE_ID": first.message_id,
    }  # fmt: skip
    again = decode_record(deliver(encode_record(found)).record)
    dead = decode_record(sent_back(again, Retry("%DLQ%g", 0, 0)))
    known = dict(decode_properties(dead.properties))
    assert (dead.topic, dead.queue_id, dead.reconsume_times) == ("%DLQ%g", 0, 2)
    assert known["ORIGIN_MESSAGE_ID"] == first.message_id and known["RETRY_TOPIC"] == "T"
    assert known["DELAY"] == "0" and "HS_DELAYED" not in known


def test_a_message_of_rocketmqs_log_with_0x01_in_a_value_can_be_sent_back():
    first = message(0, ("UNIQ_KEY", "k"), ("odd", "a-b"))
    first = dataclasses.replace(first, properties=first.properties.replace(b"a-b", b"a\x01b"))
    waits = decode_record(sent_back(first, Retry("%RETRY%g", 0, 3)))
    dead = decode_record(sent_back(first, Retry("%DLQ%g", 0, 0)))
    for found in (waits, dead):
        assert dict(decode_properties(found.properties))["odd"] == "a\x01b"


def test_the_count_of_attempts_stays_at_its_greatest():
    """A client may send it, or damage makes it: the fuzzer found that it failed then."""
    dead = decode_record(sent_back(message(2**31 - 1), Retry("%DLQ%g", 0, 0)))
    assert (dead.topic, dead.reconsume_times) == ("%DLQ%g", 2**31 - 1)


def test_a_half_message_cannot_be_sent_back():
    with pytest.raises(MessageIllegalError, match="open transaction"):
        sent_back(message(sys_flag=FLAG_PREPARED), Retry("%RETRY%g", 0, 3))


def test_the_default_of_the_configuration_is_rocketmqs():
    assert StoreConfig(root="x").message_delay_level == DEFAULT_LEVELS
