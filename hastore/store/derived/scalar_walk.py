"""The scalar walk: read the records of a view one by one, in plain Python.

The walk is pure. It is the reference for the vector walk (vector_walk.py), which must return the
same records and stop at the same byte for the same reason. One `unpack_from` reads a record's
header; one slice reads its topic and properties. record/layout.py draws these fields.

In a log of entries each record has an entry's header before it, which must fit the record; entries
without a record are skipped.

A record is taken when its lengths add up and its physicalOffset is its offset in the log. The
body's CRC is not checked here. A put and recovery check it. A slave checks it in frames of up to
128 KiB. A slave that catches up takes longer frames unchecked (docs/ha-link.md), so a replayed body
may be damaged.

`reread` walks a part of a log again. What is derived from the log may keep its state at several
ends of it: it goes back to one of them when the log is cut, and takes the records from there on.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hastore.errors import StoreError
from hastore.record.delays import DELAYS_MS, SCHEDULE_TOPIC
from hastore.record.hashes import java_hash_code
from hastore.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
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
from hastore.record.log_format import ENTRY_HEADER_BYTES, ENTRY_MAGIC, ENTRY_PLACE, PLAIN, LogFormat
from hastore.record.properties import find_property, stored_tags
from hastore.store.derived.contract import Dispatched, ReplayableLog

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
_VIEW_BYTES = 1 << 20  # that `reread` looks at at once


class Stop(enum.Enum):
    """Why a walk ended."""

    END = "the view ended, perhaps inside a record"
    BLANK = "a blank: the log continues in the next file"
    BAD = "neither a record nor a blank"


class Walk(NamedTuple):
    """The result of a walk over a view."""

    batch: Sequence[Dispatched]
    consumed: int  # bytes of the whole records in `batch`
    stop: Stop
    wanted: int  # with Stop.END: how many bytes the next record needs, as far as known


class ScalarWalker:
    """Walk whole records. It caches topics and tags, so each thread needs its own walker."""

    def __init__(self, form: LogFormat = PLAIN, delays_ms: Sequence[int] = DELAYS_MS) -> None:
        """Prepare; `delays_ms` has the delay of each level, beginning with level 1."""
        self.form = form
        self._delays_ms = delays_ms
        self._topics: dict[bytes, str] = {}
        self._tags: dict[bytes, int] = {}

    def walk(self, view: memoryview | bytes, base: int, left: int) -> Walk:
        """Walk the records of `view`.

        The view's first byte lies at offset `base` of the log, `left` bytes before the end of the
        log file. Invalid bytes raise no error: the walk stops before them with Stop.BAD.
        """
        batch: list[Dispatched] = []
        lead = self.form.lead
        at = self._records(view, base, lead, batch)
        if lead:
            at -= lead
            while size := self._without_record(view, base, at, left - at):
                at = self._records(view, base, at + size + lead, batch) - lead
        return self.ended(view, base, at, left, batch)

    def _records(
        self, view: memoryview | bytes, base: int, at: int, batch: list[Dispatched]
    ) -> int:
        """Add the records from byte `at` of the view on; return where the next one would begin."""
        append, unpack, topics = batch.append, _IPV4.unpack_from, self._topics
        make, lead = tuple.__new__, self.form.lead
        end = len(view)
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
            if after > end or (lead and not _fits(view, at, base + at, size)):
                break
            tail = bytes(view[tail_at:after])
            # V1 stores the topic's length in a signed byte.
            if magic == V1_MAGIC and tail and tail[0] <= V1_MAX_TOPIC_BYTES:
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
            at = after + lead
        return at

    def _without_record(self, view: memoryview | bytes, base: int, at: int, left: int) -> int:
        """Return the size of the entry at `at` if it is whole and has no record, else 0."""
        form, end = self.form, len(view)
        size = form.announced(view, at, end)
        if not 0 < size <= end - at or size > left or form.holds_record(view, at, size):
            return 0
        return form.check_item(view, at, end, base + at)

    def ended(
        self, view: memoryview | bytes, base: int, at: int, left: int, batch: Sequence[Dispatched]
    ) -> Walk:
        """Return the result of a walk that took `batch` and stopped at byte `at` of the view."""
        have, left = len(view) - at, left - at
        if have < BLANK_SIZE:
            return Walk(batch, at, Stop.END, BLANK_SIZE)
        if self.form.lead:
            return self._ended_entries(view, base, at, left, batch)
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

    def _ended_entries(
        self, view: memoryview | bytes, base: int, at: int, left: int, batch: Sequence[Dispatched]
    ) -> Walk:
        form, have = self.form, len(view) - at
        if form.check_blank(view, at, at + left):
            return Walk(batch, at, Stop.BLANK, left)
        size = form.announced(view, at, len(view))
        if size and size <= have and batch and self._without_record(view, base, at, left):
            return Walk(batch, at, Stop.END, size)
        if not size or size > left or size <= have:
            return Walk(batch, at, Stop.BAD, 0)
        if have >= ENTRY_PLACE.size and ENTRY_PLACE.unpack_from(view, at)[2] != base + at:
            return Walk(batch, at, Stop.BAD, 0)
        return Walk(batch, at, Stop.END, size)

    def topic(self, raw: bytes) -> str:
        """Return a topic as text; bytes that are not UTF-8 are decoded as surrogates."""
        if len(self._topics) >= _CACHE_LIMIT:
            self._topics.clear()
        topic = raw.decode("utf-8", "surrogateescape")
        self._topics[raw] = topic
        return topic

    def tags_code(self, topic: str, properties: bytes, store_timestamp_ms: int) -> int:
        """Compute RocketMQ's tagsCode: Java's hash of TAGS, or a delayed message's due time."""
        if topic == SCHEDULE_TOPIC:
            level = find_property(properties, b"DELAY")
            if level is not None and level.isdigit() and len(level) < 10 and int(level) > 0:
                delays_ms = self._delays_ms
                return store_timestamp_ms + delays_ms[min(int(level), len(delays_ms)) - 1]
        tags = stored_tags(properties)
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


def _fits(view: memoryview | bytes, at: int, offset: int, size: int) -> bool:
    """Whether an entry's header before byte `at` fits the record of `size` bytes at `offset`."""
    lead = ENTRY_HEADER_BYTES
    found = ENTRY_PLACE.unpack_from(view, at - lead)
    return found == (ENTRY_MAGIC, lead + size, offset - lead, size)


def properties_at(tail: bytes, *, wide: bool) -> int | None:
    """Return where the properties begin in a tail (the bytes from topicLength to the record's end).

    Returns None when the lengths do not add up. `wide` means that topicLength has two bytes (V2).
    """
    if len(tail) < TAIL_MIN + wide or (not wide and tail[0] > V1_MAX_TOPIC_BYTES):
        return None
    start = (2 + int.from_bytes(tail[:2]) if wide else 1 + tail[0]) + 2
    if start > len(tail) or int.from_bytes(tail[start - 2 : start]) != len(tail) - start:
        return None
    return start


def reread(
    log: ReplayableLog, form: LogFormat, start: int, log_end: int
) -> Iterator[Sequence[Dispatched]]:
    """Yield the records from `start` on up to `log_end`, in batches.

    Raises StoreError, OSError if the log cannot be read.
    """
    walker = ScalarWalker(form)
    at, wanted = max(start, log.min_offset), _VIEW_BYTES
    while at < log_end:
        left = log.file_size - at % log.file_size
        with log.view(at, min(wanted, left, log_end - at)) as view:
            seen = len(view)
            walk = walker.walk(view, at, left)
        if walk.batch:
            yield walk.batch
        at += walk.consumed
        if walk.stop is Stop.BLANK:
            at += left - walk.consumed
        elif walk.stop is Stop.BAD and not walk.batch:
            raise StoreError(f"offset {at} holds no record; see `hastore log verify`")
        elif not walk.consumed:
            if walk.wanted <= seen or at + walk.wanted > log_end:
                return  # the end of the last whole record
            wanted = walk.wanted
            continue
        wanted = _VIEW_BYTES
