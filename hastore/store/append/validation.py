"""The checks that every record of a put must pass before it is stored.

They include recovery's checks of layout and CRC, because recovery would take an invalid record for
the end of the log. A payload whose records are alike is checked as columns, by the same rules:
`read_uniform_batch` in uniform_batch.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from hastore.config.model import StoreConfig
from hastore.errors import CorruptRecordError, MessageIllegalError, Status
from hastore.record.codec import Host, RecordParts, find_parts
from hastore.record.delays import (
    DELAY_BYTES,
    MARK,
    MARK_BYTES,
    SCHEDULE_TOPIC,
    TAKEN_TOPIC,
    parse_levels,
    put_to_wait,
)
from hastore.record.layout import (
    CRC_MASK,
    FLAG_IPV6,
    FLAG_ROLLBACK,
    FLAG_STORE_IPV6,
    HEADER_SIZES,
    IPV6_EXTRA,
    MAX_PROPERTIES_BYTES,
    STORE_IPV4,
    STORE_IPV6,
    V2_MAGIC,
    header_struct,
    offset_of,
    store_at,
)
from hastore.record.log_format import OWN_TOPIC, PLAIN, LogFormat
from hastore.record.properties import (
    MAX_KEYS,
    check_topic,
    find_property,
    is_well_formed,
    producer_of,
    words_of_keys,
)
from hastore.record.queue_ends import QUEUES_TOPIC
from hastore.record.topic_records import TOPICS_TOPIC
from hastore.record.transactions import (
    CHECKS_TOPIC,
    FLAG_COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    put_half,
)
from hastore.store.append.results import (
    FLAGS_REFUSED,
    BuiltBatch,
    DeliveriesIf,
    Guard,
    Payload,
    PutResult,
    UniformBatch,
    is_own,
)
from hastore.store.append.uniform_batch import read_uniform_batch

_TOPICS_MAX = 8192  # in the cache
_SIZE = header_struct("size")
_QUEUE_ID = header_struct("queue_id")
_WAITING = SCHEDULE_TOPIC.encode()
_HALF = HALF_TOPIC.encode()
# What a message gets that waits, once it is delivered, committed or set aside: the name of its own
# topic, and a property. A record without room for it could never leave its waiting place.
_LATER = frozenset({_WAITING, _HALF})
_LATER_BYTES = 256
_V2 = V2_MAGIC.to_bytes(4)
_SYS_FLAG_AT = offset_of("sys_flag")
_SYS_FLAG = header_struct("sys_flag", start=_SYS_FLAG_AT)
_PREPARED = header_struct(
    "prepared_transaction_offset", start=offset_of("prepared_transaction_offset")
)


class ValidRecord(NamedTuple):
    """A record that passed: its place in the payload, and the fields that an append needs."""

    at: int
    size: int
    sys_flag: int
    topic: bytes
    queue_id: int
    producer: tuple[bytes, int] | None
    delivers: bool = False  # a delayed message, which its topic must take
    belongs: tuple[bytes, int] | None = None  # topic and queue of a message that is to wait


class PutValidator:
    """Validate payloads, and cache the topics that are allowed.

    Calls of `validate` must not overlap: the appender makes them under the log's lock.
    `uniform` only reads the cache, and may be called by any thread at any time.
    """

    def __init__(
        self,
        config: StoreConfig,
        store_host: Host,
        form: LogFormat = PLAIN,
        why_full: Callable[[bytes], str | None] = lambda _topic: None,
    ) -> None:
        """Prepare; `why_full` returns why a topic gets no more transactions, None if it does."""
        self._why_full = why_full
        self._max_body = config.max_message_size
        self._max_record = form.max_record(config.commitlog_file_size)
        self._max_waiting = self._max_record - _LATER_BYTES
        # A client must not forge a member list, the next offsets of queues, topics, or the end of
        # a transaction. A delayed message and a half message reach another topic later: the node
        # itself makes the record of the one, and checks that of the other.
        own = [
            *(QUEUES_TOPIC, TOPICS_TOPIC, SCHEDULE_TOPIC, TAKEN_TOPIC, HALF_TOPIC, OP_TOPIC),
            CHECKS_TOPIC,
            *([OWN_TOPIC] if form.lead else []),
        ]
        self._reserved = {name.encode() for name in own}
        self._ipv6 = store_host.is_ipv6
        self._levels = len(parse_levels(config.message_delay_level))
        self._topics: set[bytes] = set()
        # Returns the batch if a payload is uniform and valid. None leaves it to `validate`.
        self.validate_uniform: Callable[[bytes], UniformBatch | None] = partial(
            read_uniform_batch, self._topics, self._max_body, self._max_record
        )
        if self._ipv6:
            self.validate_uniform = _no_uniform_batch

    def uniform(self, payload: Payload) -> UniformBatch | None:
        """Return a payload as columns if it is uniform and valid; None leaves it to `validate`."""
        if not isinstance(payload, BuiltBatch):
            return self.validate_uniform(payload)
        if self._ipv6 or not payload.is_allowed(self._topics, self._max_body, self._max_record):
            return None
        return payload

    def validate(
        self, payload: bytes, guard: Guard | None = None
    ) -> tuple[bytes, list[ValidRecord | PutResult]]:
        """Split a payload into records, and validate each; `guard` may forbid some.

        Returns the payload, and for each record a ValidRecord or the result that refuses it. The
        payload is a copy if a storeHost had to be resized for this store's address family, or if
        messages are delayed: their records are those that wait for their time. A payload that
        cannot be split into records has a single result, which refuses all of it.
        """
        found: list[ValidRecord | PutResult] = []
        append = found.append
        view = memoryview(payload)
        at, end = 0, len(payload)
        delivers, has_delays = isinstance(guard, DeliveriesIf), False
        max_body = self._max_record if delivers else self._max_body
        while at < end:
            parts = find_parts(payload, at, end)
            if parts is None:
                return payload, [_unreadable(payload, at)]
            size, crc, _, flags, body_at, body_size, topic_at, topic_size, properties_at = parts
            topic = payload[topic_at : topic_at + topic_size]
            after = at + size
            properties = payload[properties_at:after]
            belongs: tuple[bytes, int] | None = None
            reason = None
            most = self._max_waiting if topic in _LATER and not delivers else self._max_record
            if topic not in self._topics:
                place = self._place(topic, payload[at:after], guard)
                if isinstance(place, PutResult):
                    append(place)
                    at = after
                    continue
                belongs = place
            if (
                flags & FLAGS_REFUSED
                or body_size > max_body
                or size > most
                # A delivery's properties are those that the log has already, perhaps a broker's.
                or (properties and not delivers and not is_well_formed(properties))
                or (not delivers and words_of_keys(properties))
                or crc32(view[body_at : body_at + body_size]) & CRC_MASK != crc
            ):
                reason = self._why_not(parts, b"" if delivers else properties, max_body, most)
            producer = None
            if reason is None and properties:
                try:
                    producer = producer_of(properties)
                except ValueError as failure:
                    reason = str(failure)
            if reason is None and MARK_BYTES in properties and not is_own(guard):
                reason = _is_marked(properties)
            if flags & FLAG_COMMIT and reason is None and not is_own(guard):
                reason = _ends_transaction(payload, at, flags)
            if reason is not None:
                append(PutResult(Status.MESSAGE_ILLEGAL, reason=reason))
            elif (
                guard is not None
                and (reason := guard((belongs or (topic,))[0], producer and producer[0]))
                is not None
            ):
                append(PutResult(Status.FORBIDDEN, reason=reason))
            elif bool(flags & FLAG_STORE_IPV6) is not self._ipv6:
                return self.validate(_with_store_host(payload, self._ipv6), guard)
            else:
                (queue_id,) = _QUEUE_ID.unpack_from(payload, at)
                append(ValidRecord(at, size, flags, topic, queue_id, producer, delivers, belongs))
                has_delays |= DELAY_BYTES in properties and not is_own(guard)
            at = after
        return self._put_to_wait(payload, found) if has_delays else (payload, found)

    def why_too_large(self, body_size: int, size: int) -> str | None:
        """Return why no client may put such a record, with an IPv4 storeHost; None if one may.

        Other threads may call it.
        """
        grown = size + IPV6_EXTRA if self._ipv6 else size  # by this store's own address
        return _why_too_large(body_size, grown, self._max_body, self._max_record)

    def _put_to_wait(
        self, payload: bytes, found: list[ValidRecord | PutResult]
    ) -> tuple[bytes, list[ValidRecord | PutResult]]:
        """Return the payload with the waiting record of each delayed message instead of its own."""
        pieces: list[bytes] = []
        at = 0
        for place, entry in enumerate(found):
            if isinstance(entry, PutResult):
                continue
            raw = payload[entry.at : entry.at + entry.size]
            entry = entry._replace(at=at)
            try:
                made = put_to_wait(raw, self._levels) if DELAY_BYTES in raw else None
            except (MessageIllegalError, CorruptRecordError) as failure:
                found[place] = PutResult(Status.MESSAGE_ILLEGAL, reason=str(failure))
                continue
            if made is not None:
                (queue_id,) = _QUEUE_ID.unpack_from(made, 0)
                entry = entry._replace(
                    size=len(made), topic=_WAITING, queue_id=queue_id,
                    belongs=(entry.topic, entry.queue_id),
                )  # fmt: skip
                if len(made) > self._max_waiting:
                    text = f"a record of {len(made)} bytes; the log takes up to {self._max_waiting}"
                    found[place] = PutResult(Status.MESSAGE_ILLEGAL, reason=text)
                    continue
            pieces.append(raw if made is None else made)
            at += entry.size
            found[place] = entry
        return b"".join(pieces), found

    def _place(
        self, topic: bytes, raw: bytes, guard: Guard | None
    ) -> tuple[bytes, int] | PutResult | None:
        """Return topic and queue of a client's half message, or the result that refuses a record.

        None: any other record, whose topic is allowed.
        """
        if topic != _HALF or is_own(guard):
            reason = self._check_topic(topic, guard)
            return None if reason is None else PutResult(Status.MESSAGE_ILLEGAL, reason=reason)
        try:
            name, queue_id = put_half(raw)
        except (MessageIllegalError, CorruptRecordError) as failure:
            return PutResult(Status.MESSAGE_ILLEGAL, reason=str(failure))
        reason = self._check_topic(name.encode(), guard)
        if reason is not None:
            return PutResult(Status.MESSAGE_ILLEGAL, reason=reason)
        reason = self._why_full(name.encode())
        if reason is not None:
            return PutResult(Status.BUSY, reason=reason)
        return name.encode(), queue_id

    def _check_topic(self, topic: bytes, guard: Guard | None) -> str | None:
        if topic in self._reserved:
            if is_own(guard) and not isinstance(guard, DeliveriesIf):
                return None  # a message that waited is a client's, whatever its record says
            return f"topic {topic.decode()} is reserved for the group's own records"
        try:
            check_topic(topic.decode("utf-8", "surrogateescape"))
        except MessageIllegalError as failure:
            return str(failure)  # not cached: untrusted input must not evict cache entries
        if len(self._topics) >= _TOPICS_MAX:
            self._topics.clear()
        self._topics.add(topic)
        return None

    def _why_not(
        self, parts: RecordParts, properties: bytes, max_body: int, max_record: int
    ) -> str:
        words = words_of_keys(properties)
        if words:
            return (
                f"KEYS has {words:,} words; at most {MAX_KEYS:,} are allowed, because each is an"
                " entry of the key index: give the message fewer keys"
            )
        size, flags, body_size = parts[0], parts[3], parts[5]
        if flags & FLAGS_REFUSED:
            return f"sysFlag {flags:#x}: inner batches are not accepted from clients"
        if text := _why_too_large(body_size, size, max_body, max_record):
            return text
        return "the body's CRC is wrong, or the properties are no `name 0x01 value 0x02` pairs"


def _why_too_large(body_size: int, size: int, max_body: int, max_record: int) -> str | None:
    if body_size > max_body:
        return f"a body of {body_size} bytes; store.max_message_size is {max_body}"
    if size > max_record:
        return f"a record of {size} bytes; the log takes up to {max_record}"
    return None


def _is_marked(properties: bytes) -> str | None:
    """Return why a client may not put a record with these properties; None if it may.

    A record with the mark of a delivery says that delayed messages were delivered.
    """
    if find_property(properties, MARK.encode()) is None:
        return None
    return f"property {MARK} is reserved: leave it out when you send a received message again"


def _ends_transaction(payload: bytes, at: int, flags: int) -> str | None:
    """Return why a client may not put a record with a transaction's bits; None if it may.

    A committed message says which half message it ends.
    """
    (offset,) = _PREPARED.unpack_from(
        payload, at + offset_of("prepared_transaction_offset", ipv6_flags=flags & FLAG_IPV6)
    )
    if flags & FLAG_ROLLBACK != FLAG_COMMIT or not offset:
        return None
    return (
        f"sysFlag {flags:#x} with preparedTransactionOffset {offset} says that a transaction was"
        " committed, which the master alone writes: leave both out"
    )


def _no_uniform_batch(_payload: bytes) -> None:
    """Return None: a uniform batch has IPv4 hosts only, and this store's host is IPv6."""


def _unreadable(payload: bytes, at: int) -> PutResult:
    """Refuse bytes that are no record; too many bytes of properties have their own status."""
    flag_at = at + _SYS_FLAG_AT
    flags = int.from_bytes(payload[flag_at : flag_at + _SYS_FLAG.size])  # may be cut off
    body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
    topic_at = body_at + int.from_bytes(payload[body_at - 4 : body_at])
    wide = payload[at + 4 : at + 8] == _V2
    topic_size = int.from_bytes(payload[topic_at : topic_at + 1 + wide])
    length_at = topic_at + 1 + wide + topic_size
    if int.from_bytes(payload[length_at : length_at + 2]) > MAX_PROPERTIES_BYTES:
        return PutResult(
            Status.PROPERTIES_SIZE_EXCEEDED,
            reason=f"more than {MAX_PROPERTIES_BYTES} bytes of properties",
        )
    return PutResult(Status.MESSAGE_ILLEGAL, reason=f"no record at byte {at} of the payload")


def _with_store_host(payload: bytes, ipv6: bool) -> bytes:
    """Give every record room for a storeHost of this store's address family."""
    records: list[bytes] = []
    at, end = 0, len(payload)
    while at < end:
        parts = find_parts(payload, at, end)
        if parts is None:
            records.append(payload[at:])
            break
        size, flags = parts[0], parts[3]
        record = bytearray(payload[at : at + size])
        place = store_at(flags)
        if ipv6 and not flags & FLAG_STORE_IPV6:
            record[place : place + STORE_IPV4.size] = bytes(STORE_IPV6.size)
        elif not ipv6 and flags & FLAG_STORE_IPV6:
            record[place : place + STORE_IPV6.size] = bytes(STORE_IPV4.size)
        _SIZE.pack_into(record, 0, len(record))
        flags = flags | FLAG_STORE_IPV6 if ipv6 else flags & ~FLAG_STORE_IPV6
        _SYS_FLAG.pack_into(record, _SYS_FLAG_AT, flags)
        records.append(bytes(record))
        at += size
    return b"".join(records)
