"""Read what replay needs of each record, at the speed of plain Python: pure, no files.

A record's fixed part is read by one `unpack_from`, its topic and properties by one slice:

    size magic crc queueId flag queueOffset physicalOffset sysFlag | born time, host |
    storeTimestamp
      4    4    4     4      4       8            8           4    |     16 or 28    |       8
    | store host, reconsume times, prepared offset | bodyLength, body, topic, properties
    |                  20 or 32                    |     4

Lengths must add up and the record must know its own place; the body's CRC is not replay's business
(the bytes were checked by recovery, by the master's put, or by the link that brought them).
"""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from hastore.record.java_hash import java_hash_code
from hastore.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    FLAG_BORN_IPV6,
    FLAG_INNER_BATCH,
    FLAG_IPV6,
    FLAG_PREPARED,
    FLAG_STORE_IPV6,
    HEADER_SIZE,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    TAIL_MIN,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    V2_MAGIC,
    header_struct,
)
from hastore.record.properties import find_property

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
DELAYS_MS = tuple(
    seconds * 1000
    for seconds in (
        1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200,
    )
)  # fmt: skip
_FIELDS = (
    *("size", "magic", "queue_id", "queue_offset", "physical_offset", "sys_flag"),
    *("store_timestamp_ms", "body_length"),
)
_IPV4 = header_struct(*_FIELDS)
_BY_FLAGS = {
    flags: header_struct(*_FIELDS, ipv6_flags=flags)
    for flags in (FLAG_BORN_IPV6, FLAG_STORE_IPV6, FLAG_IPV6)
}
_PHYSICAL_OFFSET = header_struct("physical_offset")
_CACHE_LIMIT = 8192


class Dispatched(NamedTuple):
    """One record as replay hands it on; `properties` are the raw bytes.

    The order of the fields is part of the door: a dispatcher may unpack the tuple in one step.
    """

    offset: int  # physical, of the record's first byte
    size: int
    topic: str  # bytes that are no UTF-8 as surrogates
    queue_id: int
    queue_offset: int
    sys_flag: int
    store_timestamp_ms: int
    tags_code: int  # as the consume queue stores it
    properties: bytes

    @property
    def end_offset(self) -> int:
        """Return the offset just behind the record."""
        return self.offset + self.size

    @property
    def takes_unit(self) -> bool:
        """Whether the record gets a place in its queue: prepared and rollback records get none."""
        return not self.sys_flag & FLAG_PREPARED


class Stop(enum.Enum):
    """Why a walk ended."""

    END = "the bytes ended, perhaps inside a record"
    BLANK = "a blank: go on in the next file"
    BAD = "neither a record nor a blank"


class Walk(NamedTuple):
    """What a walk over a view found."""

    batch: Sequence[Dispatched]
    consumed: int  # bytes of the whole records in `batch`
    stop: Stop
    wanted: int  # bytes that the record at the stop needs, as far as that is known (END)


class RecordWalker:
    """Walk whole records; keeps caches of topics and tags, so use one for each thread."""

    def __init__(self) -> None:
        self._topics: dict[bytes, str] = {}
        self._tags: dict[bytes, int] = {}

    def walk(self, view: memoryview | bytes, base: int, left: int) -> Walk:
        """Walk the records of `view`, whose first byte is at offset `base`, `left` bytes before its
        file's end.

        Never raises on bad bytes: it stops there (Stop.BAD).
        """
        batch: list[Dispatched] = []
        append, unpack, topics = batch.append, _IPV4.unpack_from, self._topics
        make = tuple.__new__
        at, end = 0, len(view)
        while end - at >= MIN_RECORD_SIZE:
            size, magic, queue_id, queue_offset, physical, flags, store_ms, body = unpack(view, at)
            tail_at = at + HEADER_SIZE + body
            if flags & FLAG_IPV6:
                wide = _BY_FLAGS[flags & FLAG_IPV6]
                if end - at < wide.size:
                    break
                store_ms, body = wide.unpack_from(view, at)[6:]
                tail_at = at + wide.size + body
            if physical != base + at or body < 0 or magic == BLANK_MAGIC:
                break
            after = at + size
            if after > end:
                break
            tail = bytes(view[tail_at:after])
            if magic == V1_MAGIC and tail and tail[0] <= V1_MAX_TOPIC_BYTES:  # a signed byte
                topic_at, topic_end = 1, 1 + tail[0]
            elif magic == V2_MAGIC and len(tail) > 1:
                topic_at, topic_end = 2, 2 + (tail[0] << 8 | tail[1])
            else:
                break
            properties = tail[topic_end + 2 :]
            count = len(properties)
            if count > 0xFFFF or tail[topic_end : topic_end + 2] != count.to_bytes(2):
                break
            raw = tail[topic_at:topic_end]
            topic = topics.get(raw)
            if topic is None:
                topic = self.topic(raw)
            tags = 0
            if properties and (b"TAGS\x01" in properties or topic == SCHEDULE_TOPIC):
                tags = self.tags_code(topic, properties, store_ms)
            fields = (
                base + at,
                size,
                topic,
                queue_id,
                queue_offset,
                flags,
                store_ms,
                tags,
                properties,
            )
            append(make(Dispatched, fields))
            at = after
        return self.ended(view, base, at, left, batch)

    def ended(
        self, view: memoryview | bytes, base: int, at: int, left: int, batch: Sequence[Dispatched]
    ) -> Walk:
        """Say why the walk came no further than `at`."""
        have, left = len(view) - at, left - at
        if have < BLANK_SIZE:
            return Walk(batch, at, Stop.END, BLANK_SIZE)
        size, magic = SIZE_AND_MAGIC.unpack_from(view, at)
        if magic == BLANK_MAGIC and size == left:
            return Walk(batch, at, Stop.BLANK, size)
        if magic not in (V1_MAGIC, V2_MAGIC) or not MIN_RECORD_SIZE <= size <= left or size <= have:
            return Walk(batch, at, Stop.BAD, 0)
        if have >= _PHYSICAL_OFFSET.size:
            (physical,) = _PHYSICAL_OFFSET.unpack_from(view, at)
            if physical != base + at:
                return Walk(batch, at, Stop.BAD, 0)
        return Walk(batch, at, Stop.END, size)

    def topic(self, raw: bytes) -> str:
        """Return a topic as text; bytes that are no UTF-8 as surrogates."""
        if len(self._topics) >= _CACHE_LIMIT:
            self._topics.clear()
        topic = raw.decode("utf-8", "surrogateescape")
        self._topics[raw] = topic
        return topic

    def tags_code(self, topic: str, properties: bytes, store_timestamp_ms: int) -> int:
        """Compute tagsCode as RocketMQ does: Java's hash of TAGS, or the time of delivery."""
        if topic == SCHEDULE_TOPIC:
            level = find_property(properties, b"DELAY")
            if level is not None and level.isdigit() and len(level) < 10 and int(level) > 0:
                return store_timestamp_ms + DELAYS_MS[min(int(level), len(DELAYS_MS)) - 1]
        tags = find_property(properties, b"TAGS")
        return self.tags_hash(tags) if tags else 0

    def tags_hash(self, tags: bytes) -> int:
        """Return Java's hash of a TAGS value."""
        code = self._tags.get(tags)
        if code is None:
            if len(self._tags) >= _CACHE_LIMIT:
                self._tags.clear()
            code = java_hash_code(tags.decode("utf-8", "surrogateescape"))
            self._tags[tags] = code
        return code


def properties_at(tail: bytes, *, wide: bool) -> int | None:
    """Return where the properties of a tail begin (topic length to the record's end).

    None when its lengths do not add up. `wide`: a topic length of two bytes (V2).
    """
    if len(tail) < TAIL_MIN + wide or (not wide and tail[0] > V1_MAX_TOPIC_BYTES):
        return None
    start = (2 + int.from_bytes(tail[:2]) if wide else 1 + tail[0]) + 2
    if start > len(tail) or int.from_bytes(tail[start - 2 : start]) != len(tail) - start:
        return None
    return start


def inner_batch_of(record: Dispatched) -> tuple[int, int] | None:
    """Return (INNER_BASE, INNER_NUM) of an inner batch; None for any other record."""
    if not record.sys_flag & FLAG_INNER_BATCH:
        return None
    base = find_property(record.properties, b"INNER_BASE")
    count = find_property(record.properties, b"INNER_NUM")
    if base is None or count is None or not base.isdigit() or not count.isdigit():
        return None
    if len(base) > 18 or len(count) > 5 or not 0 < int(count) < 1 << 15:
        return None
    return int(base), int(count)
