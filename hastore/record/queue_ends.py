"""The next queue offsets of quiet queues, as records of the log itself. Pure.

The next offset of a queue is known from its last record. Retention may remove that record while
the queue is quiet. So before that, the log states the next offsets of all queues that have no
record from an offset `since` on. Such a statement is one or more records ("parts"), in order:

    topic HASTORE_QUEUES, sysFlag 0xC (a transaction that was rolled back), no body
    HS_QUEUES = CRC-32 of the JSON in 8 hex digits, then the JSON:
    {"since": S, "id": I, "part": n, "parts": m, "next": {"<topic>": {"<queue>": next offset}}}

A record of a rolled back transaction is in no queue and in no key index, so RocketMQ steps over
it. A queue that a record before the statement belongs to is either in `next`, or has a record at
or beyond `since`. So a log that begins at or before `since`, and holds all parts, lacks no offset.

The next offset of a queue is at least the stated one: the queue may have got records meanwhile.
"""

import json
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from hastore.record.codec import NO_HOST, build_record
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.properties import find_property

QUEUES_TOPIC = "HASTORE_QUEUES"  # no client may put to it
PROPERTY = "HS_QUEUES"
PART_BYTES = 24_000  # of the queues in one record, whose properties have room for 32,767
_NAME = PROPERTY.encode()
_NUMBERS = ("since", "id", "part", "parts")
_CRC_DIGITS = 8
_OFFSET_MAX = 1 << 58

QueueNext = tuple[str, int, int]  # topic, queue id, next queue offset


class QueueEnds(NamedTuple):
    """One part of a statement."""

    since: int  # a queue that is not stated has a record at or beyond this offset
    ident: int  # the same in all parts of a statement
    part: int
    parts: int
    queues: tuple[QueueNext, ...]


def build_queue_ends(
    queues: Iterable[QueueNext],
    *,
    since: int,
    ident: int,
    now_ms: int,
    part_bytes: int = PART_BYTES,
) -> list[bytes]:
    """Return the records of a statement, in order; `now_ms` is wall time."""
    parts: list[dict[str, dict[str, int]]] = [{}]
    size = 0
    for topic, queue_id, next_offset in queues:
        known = parts[-1].get(topic)
        size += len(f'"{queue_id}":{next_offset},')
        size += 0 if known is not None else len(json.dumps(topic)) + len(":{},")
        if size > part_bytes and parts[-1]:
            parts.append({})
            size = len(f'"{queue_id}":{next_offset},') + len(json.dumps(topic)) + len(":{},")
        parts[-1].setdefault(topic, {})[str(queue_id)] = next_offset
    return [
        _record(
            {"since": since, "id": ident, "part": part, "parts": len(parts), "next": queues_},
            now_ms,
        )
        for part, queues_ in enumerate(parts)
    ]


def _record(content: dict[str, object], now_ms: int) -> bytes:
    # ASCII: a topic's bytes that are not UTF-8 are escaped like any other, and so are separators.
    text = json.dumps(content, separators=(",", ":"))
    value = f"{zlib.crc32(text.encode()):0{_CRC_DIGITS}x}{text}"
    return build_record(
        QUEUES_TOPIC, b"",
        queue_id=0, properties=[(PROPERTY, value)], sys_flag=FLAG_ROLLBACK,
        born_timestamp_ms=now_ms, born_host=NO_HOST,
    )  # fmt: skip


def queue_ends_in(topic: str, sys_flag: int, properties: bytes) -> QueueEnds | None:
    """Return the part of a statement that a record is; None if it is none, or is damaged."""
    if topic != QUEUES_TOPIC or sys_flag & FLAG_ROLLBACK != FLAG_ROLLBACK:
        return None
    value = find_property(properties, _NAME) or b""
    crc, text = value[:_CRC_DIGITS], value[_CRC_DIGITS:]
    if crc != b"%08x" % zlib.crc32(text):  # the record's own CRC is that of its body only
        return None
    try:
        content = json.loads(text)
        since, ident, part, parts = (content[name] for name in _NUMBERS)
        found = QueueEnds(
            since,
            ident,
            part,
            parts,
            tuple(
                (name, int(queue_id), next_offset)
                for name, queues in content["next"].items()
                for queue_id, next_offset in queues.items()
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # a form of a later version
    return found if _is_sound(found) else None


def _is_sound(found: QueueEnds) -> bool:
    return (
        all(isinstance(number, int) for number in found[:4])
        and 0 <= found.part < found.parts
        and found.since >= 0
        and all(
            isinstance(after, int) and 0 <= after < _OFFSET_MAX and queue_id >= 0
            for _, queue_id, after in found.queues
        )
    )
