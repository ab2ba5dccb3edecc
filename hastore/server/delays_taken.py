"""A RocketMQ broker's delayed messages, taken over with its log by the first hastore master.

The broker notes for each level which message it delivers next, in `config/delayOffset.json`. If
that file lies in the folder of the store, in the same place, the master goes on from there:

    offsets of the file --> the log behind them, in which the broker may have delivered more
                        --> for each level a record with the mark of the last delivered message

The mark is that of a delivery (record/delays.py), so every node knows from its log from where on
messages are hastore's own. A level whose mark is there is not taken again. The file lags behind a
broker that was killed, by up to 10 s by default: so the log counts, from the file's offsets on. A
delivered message has the DELAY, the UNIQ_KEY and the topic of the one that waited, and messages of
a level are delivered in their order.
"""

import json
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping

from hastore.errors import StoreError
from hastore.fs.filesystem import FileSystem
from hastore.record.codec import NO_HOST, build_record
from hastore.record.delays import (
    DELAY_BYTES,
    MARK,
    MAX_LEVELS,
    SCHEDULE_TOPIC,
    TAKEN_TOPIC,
)
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.properties import find_property
from hastore.store.derived.consume_queue import ConsumeQueue
from hastore.store.derived.contract import Dispatched
from hastore.store.derived.reread import reread
from hastore.store.log_store import LogStore

log = logging.getLogger(__name__)

FILE = "config/delayOffset.json"
_BYTES_MAX = 64 * 1024
_UNQUOTED = re.compile(r"([{,]\s*)([0-9]{1,3})(\s*:)")  # keys, as fastjson writes them


def read_offsets(fs: FileSystem, root: str) -> dict[int, int] | None:
    """Return the queue offset of each level that the broker delivers next; None without the file.

    Raises StoreError if it is damaged, OSError.
    """
    path = f"{root}/{FILE}"
    if not fs.exists(path):
        return None
    try:
        text = fs.read_bytes(path, _BYTES_MAX).decode()
        table = json.loads(_UNQUOTED.sub(r'\1"\2"\3', text))["offsetTable"]
        found = {int(level): int(offset) for level, offset in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise StoreError(
            f"{path} is no delayOffset.json of RocketMQ ({failure}): give the broker's file, or"
            " remove it, then the broker's delayed messages are not delivered"
        ) from failure
    if any(not 0 < level <= MAX_LEVELS or offset < 0 for level, offset in found.items()):
        raise StoreError(f"{path} has a level or an offset that no broker writes: remove it")
    return found


def taken_marks(
    store: LogStore, offsets: Mapping[int, int], floor: int, now_ms: int
) -> list[bytes]:
    """Return the records that say which of a broker's messages were delivered, level by level.

    The broker's log ends at offset `floor`. Levels that have a mark already are left out. Raises
    StoreError, OSError if the log cannot be read.
    """
    places = store.deliveries.state.places
    levels = {
        level: queue
        for level, queue in store.deliveries.levels()
        if level not in places and _first(queue, floor) is not None
    }
    last = {level: _last_delivered(queue, offsets.get(level, 0), floor)
            for level, queue in levels.items()}  # fmt: skip
    known = {level: place for level, place in last.items() if place is not None}
    for level in levels.keys() - known.keys():
        log.error("the broker's delayed messages of level %d are not delivered: the first one lies"
                  " at the begin of the log", level)  # fmt: skip
    if not known:
        return []
    for level, offset in _delivered_behind(store, floor, dict(known)):
        known[level] = max(known[level], offset)
    return [_record(level, place, now_ms) for level, place in sorted(known.items())]


def _first(queue: ConsumeQueue, floor: int) -> int | None:
    """Return the offset of the first message of a level, if it is the broker's."""
    units = queue.read_on(queue.files.first_at(0), 1)
    return units[0].offset if units and units[0].offset < floor else None


def _last_delivered(queue: ConsumeQueue, following: int, floor: int) -> int | None:
    """Return the offset of the last message before a queue offset; before the first one, less.

    None if there is no such offset.
    """
    first = _first(queue, floor)
    assert first is not None
    at = following - 1
    while at >= queue.min_queue_offset:
        units = queue.read_on(at, 1)
        if units and units[0].queue_offset == at:
            return units[0].offset
        at -= 1
    return first - 1 if first else None


def _delivered_behind(
    store: LogStore, floor: int, known: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield level and offset of the messages behind `known` that the broker has delivered."""
    waiting: dict[tuple[int, bytes, bytes], deque[int]] = {}
    begins = []  # a walk begins at a record
    for level, queue in store.deliveries.levels():
        if level in known:
            at = queue.files.first_at(max(known[level] + 1, store.log.min_offset))
            begins += [unit.offset for unit in queue.read_on(at, 1)]
    begin = min(begins, default=floor)
    for batch in reread(store.log, store.log.form, begin, floor):
        for record in batch:
            if DELAY_BYTES not in record.properties:
                continue
            name = _name_of(record)
            if record.topic == SCHEDULE_TOPIC:
                if record.offset > known.get(record.queue_id + 1, floor):
                    waiting.setdefault(name, deque()).append(record.offset)
            elif waiting.get(name):
                yield name[0], waiting[name].popleft()


def _name_of(record: Dispatched) -> tuple[int, bytes, bytes]:
    """Return what a waiting and the delivered message have in common."""
    raw = record.properties
    if record.topic == SCHEDULE_TOPIC:
        level = record.queue_id + 1
        topic = find_property(raw, b"REAL_TOPIC") or b""
    else:
        text = find_property(raw, b"DELAY") or b""
        level = int(text) if text.isdigit() and len(text) < 4 else 0
        topic = record.topic.encode("utf-8", "surrogateescape")
    return level, find_property(raw, b"UNIQ_KEY") or b"", topic


def _record(level: int, place: int, now_ms: int) -> bytes:
    return build_record(
        TAKEN_TOPIC, b"",
        queue_id=0, properties=[(MARK, f"{level}-{place}")], sys_flag=FLAG_ROLLBACK,
        born_timestamp_ms=now_ms, born_host=NO_HOST,
    )  # fmt: skip
