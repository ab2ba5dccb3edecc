"""A RocketMQ broker's delayed messages, taken over with its log by the first hastore master.

    offsets of the broker's file --> the log behind them, in which it may have delivered more
                                 --> for each level a record with the mark of the last delivery

The mark is that of a delivery (record/delays.py), so every node knows from its log from where on
messages are hastore's own; in a log of entries, from where on and up to where. A level whose mark
is there is not taken again. The file lags behind a broker that was killed, by up to 10 s by
default: so the log counts, from the file's offsets on. A delivered message has the DELAY, the
UNIQ_KEY and the topic of the one that waited, and messages of a level are delivered in their order.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from hastore.record.codec import NO_HOST, build_record
from hastore.record.delays import DELAY_BYTES, MARK, SCHEDULE_TOPIC, TAKEN_TOPIC
from hastore.record.layout import FLAG_ROLLBACK
from hastore.record.log_format import LogFormat
from hastore.record.properties import find_property
from hastore.store.derived.consume_queue import ConsumeQueue
from hastore.store.derived.contract import Dispatched, ReplayableLog
from hastore.store.derived.deliveries import Deliveries
from hastore.store.derived.scalar_walk import reread

log = logging.getLogger(__name__)


def taken_marks(
    commit_log: ReplayableLog,
    form: LogFormat,
    deliveries: Deliveries,
    offsets: Mapping[int, int],
    floor: int,
    now_ms: int,
    *,
    again: bool = False,
    is_brokers: Callable[[int], bool] | None = None,
) -> list[bytes]:
    """Return the records that say which of a broker's messages were delivered, level by level.

    The broker's log ends at offset `floor`; with `is_brokers` some records before it are hastore's:
    it says whose the record at an offset is. Levels that have a mark already are left out; but not
    with `again`, if the broker has delivered more than the mark says: it is one of a time before
    that broker, when the log was hastore's already. Raises StoreError, OSError if the log cannot be
    read.
    """
    places = deliveries.state.places
    levels = untaken_levels(deliveries, floor, again=again, is_brokers=is_brokers)
    last = {level: _last_delivered(queue, offsets.get(level, 0))
            for level, queue in levels.items()}  # fmt: skip
    known = {level: place for level, place in last.items() if place is not None}
    for level in levels.keys() - known.keys():
        log.error("the broker's delayed messages of level %d are not delivered: the first one lies"
                  " at the begin of the log", level)  # fmt: skip
    if not known:
        return []
    for level, offset in _delivered_behind(commit_log, form, deliveries, floor, dict(known)):
        known[level] = max(known[level], offset)
    return [
        _record(level, place, now_ms)
        for level, place in sorted(known.items())
        if place > places.get(level, -1)
    ]


def untaken_levels(
    deliveries: Deliveries,
    floor: int,
    *,
    again: bool,
    is_brokers: Callable[[int], bool] | None,
) -> dict[int, ConsumeQueue]:
    """Return the levels of which `taken_marks` would say what was delivered, and their queues."""

    def has_brokers(queue: ConsumeQueue) -> bool:
        first = _first(queue)
        return first is not None and (first < floor if is_brokers is None else is_brokers(first))

    places = deliveries.state.places
    return {
        level: queue
        for level, queue in deliveries.levels()
        if (again or level not in places) and has_brokers(queue)
    }


def _first(queue: ConsumeQueue) -> int | None:
    """Return the offset of the first message of a level, or None."""
    units = queue.read_on(queue.files.first_at(0), 1)
    return units[0].offset if units else None


def _last_delivered(queue: ConsumeQueue, following: int) -> int | None:
    """Return the offset of the last message before a queue offset; before the first one, less.

    None if there is no such offset.
    """
    first = _first(queue)
    assert first is not None
    at = following - 1
    while at >= queue.min_queue_offset:
        units = queue.read_on(at, 1)
        if units and units[0].queue_offset == at:
            return units[0].offset
        at -= 1
    return first - 1 if first else None


def _delivered_behind(
    commit_log: ReplayableLog,
    form: LogFormat,
    deliveries: Deliveries,
    floor: int,
    known: Mapping[int, int],
) -> Iterator[tuple[int, int]]:
    """Yield level and offset of the messages behind `known` that the broker has delivered."""
    waiting: dict[tuple[int, bytes, bytes], deque[int]] = {}
    begins = []  # a walk begins at a record
    for level, queue in deliveries.levels():
        if level in known:
            at = queue.files.first_at(max(known[level] + 1, commit_log.min_offset))
            begins += [unit.offset - form.lead for unit in queue.read_on(at, 1)]
    begin = min(begins, default=floor)
    for batch in reread(commit_log, form, begin, floor):
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
