"""Transactional messages as records. Pure.

    half message     waits in RMQ_SYS_TRANS_HALF_TOPIC, queue 0; REAL_TOPIC and REAL_QID say where
                     it belongs, PGROUP whose it is, and UNIQ_KEY which transaction of
                     this topic and group
    committed        the same under its own topic, with the commit bit in sysFlag; the header's
                     preparedTransactionOffset is the half message's physical offset
    ended            RMQ_SYS_TRANS_OP_HALF_TOPIC, TAGS=d: the body lists half messages that have
                     ended, by their queue offsets
    set aside        TRANS_CHECK_MAX_TIME_TOPIC: nobody has decided it after the last check

So RocketMQ 5.3.3 stores them. A producer of hastore's puts the record of the half message itself
(`put_half`), with its own number, HS_PID and HS_SEQ, which what ends the transaction leaves out.

A committed message says itself which half message it ends, so the
message and the note that it was appended are one record: whoever has a log, knows exactly what was
decided (store/derived/transactions.py). RocketMQ appends the half message again for each check, to
count them in TRANSACTION_CHECK_TIMES. A hastore master counts in a record of the group's own:

    topic HASTORE_CHECKS, sysFlag 0xC (so it is in no queue), no body
    HS_CHECKS = <physical offset of the half message>-<checks>, and more of these after commas
"""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from hastore.errors import CorruptRecordError, MessageIllegalError
from hastore.record.codec import NO_HOST, Host, Record, build_record, decode_record, encode_moved
from hastore.record.delays import (
    DLQ_PREFIX,
    OWN_PROPERTIES,
    RETRY_PREFIX,
    Waiting,
    level_of,
    real_place,
    waiting_properties,
)
from hastore.record.layout import FLAG_ROLLBACK, MAX_PROPERTIES_BYTES
from hastore.record.properties import (
    PID,
    PID_MARK,
    SEQ,
    check_topic,
    encode_properties,
    find_property,
    in_java_order,
    without_properties,
)

HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
ASIDE_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
CHECKS_TOPIC = "HASTORE_CHECKS"  # no client may put to it
FLAG_COMMIT = 0x8  # the two transaction bits of a committed message
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
IMMUNITY = "CHECK_IMMUNITY_TIME_IN_SECONDS"
CHECKS_MAX = 1_000  # in one record
OP_BODY_MAX = 4_096  # bytes of the places in one record, as in RocketMQ
IMMUNITY_MAX_S = 30 * 86_400
OPEN_MAX = 100_000  # open transactions; a half message more is refused
NAME_MAX = 255  # of a producer group, and of a UNIQ_KEY
_KEY_RULE = f"1 to {NAME_MAX} bytes of UTF-8"
_IDENTITY = (b"UNIQ_KEY", b"PGROUP", b"REAL_TOPIC")
_CHECKS = "HS_CHECKS"
_CHECK = re.compile(rb"([0-9]{1,18})-([0-9]{1,9})")
_TIMES_ROOM = len(CHECK_TIMES) + 2 + 10  # what a message gets that is set aside


def is_key(key: bytes) -> bool:
    """Whether a producer that is asked can send back this UNIQ_KEY."""
    try:
        key.decode()
    except UnicodeDecodeError:
        return False
    return 0 < len(key) <= NAME_MAX


def is_prepared(topic: str, properties: Mapping[str, str], reconsume_times: int) -> bool:
    """Whether a send is that of a half message.

    An old client sends the retry of a transactional message with its property.
    """
    if properties.get("TRAN_MSG", "").lower() != "true":
        return False
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        return False
    return not (reconsume_times > 0 and level_of(properties) > 0)


def prepare(topic: str, queue_id: int, properties: Mapping[str, str]) -> Waiting:
    """Return how a half message is stored until its transaction ends.

    Raises MessageIllegalError if it cannot be one.
    """
    if level_of(properties):
        raise MessageIllegalError(
            "a transactional message cannot be delayed: leave DELAY out, or send a delayed message"
            " without a transaction"
        )
    if not properties.get("PGROUP"):
        raise MessageIllegalError(
            "a transactional message without PGROUP: nobody could be asked whether to commit it;"
            " name its producer group"
        )
    changed = {name: value for name, value in properties.items() if name not in OWN_PROPERTIES}
    changed.pop(CHECK_TIMES, None)  # of a message that was set aside, and is sent again
    unique = changed.get("UNIQ_KEY")
    if unique:
        if not is_key(unique.encode("utf-8", "surrogateescape")):
            raise MessageIllegalError(f"UNIQ_KEY={unique[:40]!r}: {_KEY_RULE}")
        changed["__transactionId__"] = unique
    raw = waiting_properties("transactional", changed, topic, queue_id, _TIMES_ROOM)
    return Waiting(HALF_TOPIC, 0, raw)


def half_pairs(
    topic: str, queue_id: int, group: str, unique: str, pairs: Iterable[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the properties of the record of a half message, which `put_half` takes."""
    return [
        *pairs,
        ("TRAN_MSG", "true"), ("PGROUP", group),
        ("UNIQ_KEY", unique), ("__transactionId__", unique),
        ("REAL_TOPIC", topic), ("REAL_QID", str(queue_id)),
    ]  # fmt: skip


def put_half(raw: bytes) -> tuple[str, int]:
    """Return topic and queue of a half message that a client puts.

    Raises MessageIllegalError if it cannot be one.
    """
    record = decode_record(raw)
    properties = dict(record.property_pairs)
    why = None
    if record.queue_id or record.sys_flag & FLAG_ROLLBACK:
        why = f"it is put to queue 0 of {HALF_TOPIC}, without the transaction bits of sysFlag"
    elif len(properties) != len(record.property_pairs):
        why = "a property occurs twice"
    elif properties.get("TRAN_MSG") != "true" or CHECK_TIMES in properties:
        why = f"it needs TRAN_MSG=true, and no {CHECK_TIMES}"
    elif level_of(properties):
        why = "it cannot be delayed: leave DELAY out"
    elif not 0 < len(properties.get("PGROUP", "")) <= NAME_MAX:
        why = "nobody could be asked whether to commit it: name its producer group in PGROUP"
    elif not is_key(properties.get("UNIQ_KEY", "").encode("utf-8", "surrogateescape")):
        why = f"UNIQ_KEY says which transaction it is: {_KEY_RULE}"
    elif len(record.properties) + _TIMES_ROOM > MAX_PROPERTIES_BYTES:
        why = f"{len(record.properties)} bytes of properties; at most " + str(
            MAX_PROPERTIES_BYTES - _TIMES_ROOM
        )
    if why is not None:
        raise MessageIllegalError(f"topic {HALF_TOPIC} is reserved for half messages: {why}")
    try:
        topic, queue_id = real_place(record.properties)
    except CorruptRecordError as failure:
        text = f"topic {HALF_TOPIC} is reserved for half messages: {failure}"
        raise MessageIllegalError(text) from failure
    check_topic(topic)
    if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
        raise MessageIllegalError(f"topic {topic} belongs to a consumer group: no transaction")
    return topic, queue_id


class Identity(NamedTuple):
    """What the half messages of one transaction have in common: they are repeats of one send.

    Two producers may give the same UNIQ_KEY to messages of their own.
    """

    key: bytes  # UNIQ_KEY; empty if a half message has none: then no other is of its transaction
    group: bytes | None  # PGROUP
    topic: bytes | None  # REAL_TOPIC


def identity_in(properties: bytes) -> Identity:
    """Return which transaction a half message belongs to, or a message that was set aside."""
    key, group, topic = (
        (find_property(properties, name) or b"")[:NAME_MAX] for name in _IDENTITY
    )
    return Identity(key, group, topic)


class Half(msgspec.Struct, frozen=True, array_like=True):
    """The last half message of an open transaction."""

    offset: int  # physical
    place: int  # queue offset
    stored_ms: int
    checks: int  # so often its producers were asked, as far as the log says
    immunity_s: int | None  # for how long nobody is asked; None: as long as usual
    key: bytes  # UNIQ_KEY; empty without one
    earlier: tuple[tuple[int, int], ...] = ()  # offset and queue offset of others, in log order
    group: bytes | None = None  # PGROUP; None: not known, from a state of an earlier version
    topic: bytes | None = None  # REAL_TOPIC

    @property
    def identity(self) -> Identity:
        """What another half message of the same transaction has too."""
        return Identity(self.key, self.group, self.topic)

    @property
    def offsets(self) -> list[int]:
        """The offsets of all its half messages."""
        return [*(offset for offset, _ in self.earlier), self.offset]

    @property
    def places(self) -> list[int]:
        """The queue offsets of all its half messages."""
        return [*(place for _, place in self.earlier), self.place]


class Ended(Enum):
    """How a transaction ended, as far as the log says."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    SET_ASIDE = "set aside after the last check"


class HalfMessage(NamedTuple):
    """What replay needs to know of a half message's properties."""

    identity: Identity
    checks: int  # how often RocketMQ has asked for it
    immunity_s: int | None  # for how long nobody is asked; None: as long as usual


def half_in(properties: bytes) -> HalfMessage:
    """Return what the properties of a half message say."""
    checks = find_property(properties, CHECK_TIMES.encode()) or b""
    immunity = find_property(properties, IMMUNITY.encode()) or b""
    return HalfMessage(
        identity_in(properties),
        int(checks) if re.fullmatch(rb"[0-9]{1,9}", checks) else 0,
        min(int(immunity), IMMUNITY_MAX_S) if re.fullmatch(rb"[0-9]{1,18}", immunity) else None,
    )


class Committed(NamedTuple):
    """The record of a committed message, and where it goes."""

    topic: str
    queue_id: int
    record: bytes


def commit(raw: bytes, *, queue_id: int | None = None) -> Committed:
    """Return the record that commits a half message; the master fills in its new place.

    It goes to its own queue, or to `queue_id`. Raises CorruptRecordError if the record is damaged
    or does not say where it belongs, MessageIllegalError if it is too long.
    """
    record = decode_record(raw)
    topic, own_queue = real_place(record.properties)
    queue_id = own_queue if queue_id is None else queue_id
    flags = record.sys_flag & ~FLAG_ROLLBACK | FLAG_COMMIT
    properties = record.properties
    if PID_MARK in properties:  # it is another record than the one that its producer has numbered
        properties = without_properties(properties, (PID, SEQ))
    return Committed(topic, queue_id, _ending(record, topic, queue_id, properties, flags))


def set_aside(raw: bytes, checks: int) -> bytes:
    """Return the record of a message that nobody has decided after so many checks.

    Raises CorruptRecordError, MessageIllegalError.
    """
    record = decode_record(raw)
    properties = {
        name: value for name, value in record.property_pairs if name not in OWN_PROPERTIES
    }
    properties[CHECK_TIMES] = str(checks)
    made = encode_properties(in_java_order(properties), as_stored=True)
    return _ending(record, ASIDE_TOPIC, 0, made, record.sys_flag & ~FLAG_ROLLBACK)


def _ending(record: Record, topic: str, queue_id: int, properties: bytes, sys_flag: int) -> bytes:
    """Return the record that ends the transaction of a half message, which it names."""
    return encode_moved(
        record, topic, queue_id,
        properties=properties, sys_flag=sys_flag,
        prepared_transaction_offset=record.physical_offset,
    )  # fmt: skip


def as_asked(raw: bytes) -> tuple[bytes, Record]:
    """Return a half message as a producer is asked for it, under its own topic, and its record.

    A UNIQ_KEY that is none, of an earlier version or damaged, is left out: then the producer names
    the message by its id. Raises CorruptRecordError, MessageIllegalError.
    """
    record = decode_record(raw)
    properties = record.properties
    key = find_property(properties, _IDENTITY[0])
    if key is not None and not is_key(key):
        properties = without_properties(properties, _IDENTITY[:1])
    return encode_moved(record, *real_place(properties), properties=properties), record


def build_ended(places: Iterable[int], now_ms: int, host: Host) -> list[bytes]:
    """Return records that say that half messages have ended, by their queue offsets.

    One record for each: RocketMQ 5 reads and writes lists, 4.9 knows a single number only.
    """
    return [
        build_record(
            OP_TOPIC, str(place).encode(),
            queue_id=0, properties=[("WAIT", "true"), ("TAGS", "d")],
            born_timestamp_ms=now_ms, born_host=host,
        )
        for place in places
    ]  # fmt: skip


def ended_in(body: bytes) -> list[int]:
    """Return the queue offsets that a record of the topic of ended half messages lists."""
    words = [word.strip() for word in body[: 16 * OP_BODY_MAX].split(b",")]
    return [int(word) for word in words if word.isdigit() and len(word) < 19]


def build_checks(counts: Iterable[tuple[int, int]], now_ms: int) -> bytes:
    """Return the record of checks that were made: (offset of the half message, checks so far)."""
    text = ",".join(f"{offset}-{checks}" for offset, checks in counts)
    return build_record(
        CHECKS_TOPIC, b"",
        queue_id=0, properties=[(_CHECKS, text)], sys_flag=FLAG_ROLLBACK,
        born_timestamp_ms=now_ms, born_host=NO_HOST,
    )  # fmt: skip


def checks_in(properties: bytes) -> list[tuple[int, int]]:
    """Return the checks that a record of the topic HASTORE_CHECKS counts."""
    text = find_property(properties, _CHECKS.encode()) or b""
    found = [_CHECK.fullmatch(word) for word in text.split(b",")]
    return [(int(one[1]), int(one[2])) for one in found if one is not None]


def check_half(half: Half, record: Record) -> None:
    """Raise CorruptRecordError if the properties of an open half message show damage.

    Replay has read it before. In a plain log no CRC covers properties.
    """
    group_of(record)
    try:
        check_topic(real_place(record.properties)[0])
    except MessageIllegalError as failure:
        raise CorruptRecordError(f"REAL_TOPIC: {failure}") from failure
    for was, now in zip(half.identity, identity_in(record.properties), strict=True):
        if was is not None and was != now:
            raise CorruptRecordError("UNIQ_KEY, PGROUP or REAL_TOPIC is not what it was before")


def group_of(record: Record) -> str:
    """Return the producer group of a half message; raises CorruptRecordError without one."""
    group = find_property(record.properties, b"PGROUP")
    if not group:
        raise CorruptRecordError("PGROUP does not say whose the half message is")
    return group.decode("utf-8", "surrogateescape")
