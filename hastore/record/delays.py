"""Delayed messages and the retries of consumer groups, as records. Pure.

A message with the property DELAY, a level from 1 on, waits in the queue `level - 1` of the topic
SCHEDULE_TOPIC_XXXX, as in RocketMQ; REAL_TOPIC and REAL_QID say where it belongs. Once its time has
come, the master appends it again, under its own topic. RocketMQ writes the delivered message with
the same properties. A hastore master adds one:

    HS_DELAYED = <level>-<physical offset of the waiting record>

So a delivery and the note that it was made are one record. Whoever has a log, knows exactly which
of its waiting messages were delivered (store/derived/deliveries.py).

A producer of hastore's sends a delayed message under its own topic, with DELAY; the master that
takes it makes the waiting record (`put_to_wait`).

A message that a consumer could not handle goes to the topic %RETRY%<group>, in the same way after a
delay, or after too many attempts to %DLQ%<group>.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hastore.errors import CorruptRecordError, MessageIllegalError, UsageError
from hastore.record.codec import (
    RawRecord,
    Record,
    decode_record,
    encode_moved,
    join_moved,
    split_record,
)
from hastore.record.layout import FLAG_PREPARED, MAX_PROPERTIES_BYTES, header_struct
from hastore.record.properties import (
    PID,
    PID_MARK,
    SEQ,
    VALUE_END,
    encode_properties,
    find_property,
    in_java_order,
    without_properties,
)

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TAKEN_TOPIC = "HASTORE_DELAYS"  # which messages a broker delivered; no client may put to it
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
# RocketMQ's default `messageDelayLevel`: level 1 is a second, level 18 two hours.
DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
MAX_LEVELS = 99
FIRST_RETRY_LEVEL = 3  # of a message that is sent back for the first time
_ATTEMPTS_MAX = 2**31 - 1  # that a record can count
MARK = "HS_DELAYED"
_MARK = MARK.encode()
MARK_BYTES = _MARK + b"\x01"  # a record without these bytes is no delivery
_MARK_VALUE = re.compile(rb"([1-9][0-9]?)-([0-9]{1,18})")
_SEQ_MARK = SEQ + b"\x01"
_VALUE_END = VALUE_END.encode()
_PLACE = header_struct("queue_id", "physical_offset")
_MARK_ROOM = len(_MARK) + 2 + 2 + 1 + 18
TIMERS = frozenset({"TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"})
# Names the light queues (RocketMQ's LMQ) in which a message is to be, beside its own queue.
LIGHT_QUEUES = "INNER_MULTI_DISPATCH"
_NUMBER = (PID.decode(), SEQ.decode())  # of a producer of hastore's
OWN_PROPERTIES = (*_NUMBER, MARK)  # of the record itself, not of the message in it
DELAY_BYTES = b"DELAY\x01"  # a record without these bytes is not delayed
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)


def parse_levels(text: str) -> tuple[int, ...]:
    """Return the delay of each level in milliseconds, from RocketMQ's form "1s 5s 10s ...".

    Raises UsageError.
    """
    found = [_LEVEL.fullmatch(word) for word in text.split()]
    delays = [int(one[1]) * _UNIT_MS[one[2]] for one in found if one is not None]
    if not 0 < len(found) <= MAX_LEVELS or None in found or 0 in delays:
        raise UsageError(
            f"{text!r} is no list of delays: 1 to {MAX_LEVELS} words such as 1s, 30m, 2h or 1d"
        )
    return tuple(delays)


def format_levels(delays_ms: Sequence[int]) -> str:
    """Return the delays in the form that `parse_levels` reads."""
    units = sorted(_UNIT_MS.items(), key=lambda unit: -unit[1])
    words = []
    for delay in delays_ms:
        name, unit_ms = next(unit for unit in units if delay % unit[1] == 0 or unit[0] == "s")
        words.append(f"{delay // unit_ms}{name}")
    return " ".join(words)


DELAYS_MS = parse_levels(DEFAULT_LEVELS)


class Marked(NamedTuple):
    """What the mark of a delivered message says: its level, and where it waited in the log."""

    level: int
    offset: int


def marked(properties: bytes) -> Marked | None:
    """Return the mark of a delivery; None if the record is none."""
    value = find_property(properties, _MARK)
    found = None if value is None else _MARK_VALUE.fullmatch(value)
    return None if found is None else Marked(int(found[1]), int(found[2]))


def level_of(properties: Mapping[str, str]) -> int:
    """Return the delay level of a message; 0 if it is not delayed. Java reads an int.

    Raises MessageIllegalError if DELAY is no number, at which RocketMQ's broker fails too.
    """
    text = properties.get("DELAY")
    if text is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,10}", text, re.ASCII):
        raise MessageIllegalError(f"DELAY={text[:40]!r}: the level of a delay is a whole number")
    return max(0, int(text))


class Waiting(NamedTuple):
    """How a delayed message is stored until its time comes."""

    topic: str
    queue_id: int
    properties: bytes


def schedule(
    topic: str, queue_id: int, properties: Mapping[str, str], levels: int = len(DELAYS_MS)
) -> Waiting | None:
    """Return how a message is stored until its delay is over; None if it has no delay.

    `levels` is the number of levels: a greater one counts as the last. Raises MessageIllegalError
    for a DELAY that is no number, and for too many bytes of properties.
    """
    level = level_of(properties)
    if not level:
        return None
    changed = {name: value for name, value in properties.items() if name not in OWN_PROPERTIES}
    # With a level, the times of RocketMQ's timer messages do not count.
    for name in TIMERS:
        changed.pop(name, None)
    if level > levels:
        level = levels
        changed["DELAY"] = str(level)
    raw = waiting_properties("delayed", changed, topic, queue_id, _MARK_ROOM)
    return Waiting(SCHEDULE_TOPIC, level - 1, raw)


def waiting_properties(
    kind: str, properties: Mapping[str, str], topic: str, queue_id: int, room: int
) -> bytes:
    """Return the raw properties of a message that waits, with the place where it belongs.

    Raises MessageIllegalError if they leave less than `room` bytes for what it gets later.
    """
    place = {"REAL_TOPIC": topic, "REAL_QID": str(queue_id)}
    raw = encode_properties(in_java_order({**properties, **place}), as_stored=True)
    if len(raw) + room > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(
            f"{len(raw)} bytes of properties; a {kind} message may have"
            f" {MAX_PROPERTIES_BYTES - room}"
        )
    return raw


def put_to_wait(raw: bytes, levels: int) -> bytes | None:
    """Return the record of a delayed message as it waits; None if the one that was put is not so.

    It keeps the number that a producer of hastore's gave it, so that a repeated put is recognised.
    Raises MessageIllegalError as `schedule` does, CorruptRecordError.
    """
    record = decode_record(raw)
    pairs = dict(record.property_pairs)
    waiting = schedule(record.topic, record.queue_id, pairs, levels)
    if waiting is None:
        return None
    number = [(name, pairs[name]) for name in _NUMBER if name in pairs]
    properties = waiting.properties + encode_properties(number)
    if len(properties) > MAX_PROPERTIES_BYTES:
        raise MessageIllegalError(f"{len(properties)} bytes of properties with those of the delay")
    return encode_moved(record, waiting.topic, waiting.queue_id, properties=properties)


def real_place(properties: bytes) -> tuple[str, int]:
    """Return topic and queue of a message that waits, by its raw properties.

    Raises CorruptRecordError without them.
    """
    topic = find_property(properties, b"REAL_TOPIC")
    queue = find_property(properties, b"REAL_QID")
    if not topic or queue is None or not re.fullmatch(rb"[0-9]{1,9}", queue):
        raise CorruptRecordError("REAL_TOPIC and REAL_QID do not say where the message belongs")
    return topic.decode("utf-8", "surrogateescape"), int(queue)


class Delivery(NamedTuple):
    """A record that delivers a message, and where it goes."""

    topic: str
    queue_id: int
    record: bytes


def deliver(raw: bytes, *, queue_id: int | None = None, level: int | None = None) -> Delivery:
    """Return the record that delivers a waiting one; the master fills in its new place.

    All of the message is kept: body, properties, flags, times and hosts of its birth, the number of
    attempts to consume it. It goes to its own queue, or to `queue_id`. `level` is that of the queue
    where it was found: a damaged record must not say that another level was delivered.

    Raises CorruptRecordError if the record is damaged or does not say where it belongs,
    MessageIllegalError if it is too long.
    """
    record = split_record(raw)
    properties = record.properties
    topic, own_queue = real_place(properties)
    queue_id = own_queue if queue_id is None else queue_id
    waited, offset = _PLACE.unpack_from(record.header)
    level = waited + 1 if level is None else level
    # The delivered message is another record than the one that its producer has numbered.
    if PID_MARK in properties or _SEQ_MARK in properties:
        properties = without_properties(properties, (PID, SEQ))
    end = b"" if properties.endswith(_VALUE_END) else _VALUE_END  # RocketMQ 4.9 omits the last one
    mark = f"{MARK}\x01{level}-{offset}\x02".encode()
    moved = RawRecord(
        record.header, record.body, topic.encode("utf-8", "surrogateescape"),
        b"".join((properties, end, mark)),
    )  # fmt: skip
    made = join_moved(moved, queue_id, prepared_transaction_offset=0)
    return Delivery(topic, queue_id, made)


class Retry(NamedTuple):
    """Where a message goes that a consumer has sent back."""

    topic: str
    queue_id: int
    delay_level: int  # 0: at once, as to %DLQ%


def retry_of(record: Record, group: str, *, level: int, times_max: int, retry_queue: int) -> Retry:
    """Return where a message goes that a consumer of `group` sends back.

    `level` is the consumer's wish: 0 for the usual delay, which grows with each attempt, less for
    no further attempt. After `times_max` attempts the message goes to the group's dead letters.
    """
    if record.reconsume_times >= times_max or level < 0:
        return Retry(DLQ_PREFIX + group, 0, 0)
    level = level or FIRST_RETRY_LEVEL + record.reconsume_times
    return Retry(RETRY_PREFIX + group, retry_queue, level)


def sent_back(record: Record, retry: Retry, levels: int = len(DELAYS_MS)) -> bytes:
    """Return the record of a message that was sent back, as RocketMQ's broker writes it.

    Raises MessageIllegalError if it becomes too long, or is no message for consumers.
    """
    if record.sys_flag & FLAG_PREPARED:
        raise MessageIllegalError("a message of an open transaction cannot be sent back")
    pairs = record.property_pairs
    properties = {name: value for name, value in pairs if name not in OWN_PROPERTIES}
    properties.setdefault("RETRY_TOPIC", record.topic)
    properties["WAIT"] = "false"
    properties["DELAY"] = str(retry.delay_level)
    if not properties.get("ORIGIN_MESSAGE_ID", "").strip():
        properties["ORIGIN_MESSAGE_ID"] = record.message_id
    topic, queue_id = retry.topic, retry.queue_id
    waiting = schedule(topic, queue_id, properties, levels)
    if waiting is not None:
        topic, queue_id, raw = waiting
    else:
        raw = encode_properties(in_java_order(properties), as_stored=True)
    topic.encode()  # raises UnicodeEncodeError for a group's name that is not Unicode
    return encode_moved(
        record, topic, queue_id,
        properties=raw, reconsume_times=min(record.reconsume_times + 1, _ATTEMPTS_MAX),
        prepared_transaction_offset=0,
    )  # fmt: skip
