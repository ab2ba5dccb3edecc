"""List what a RocketMQ broker must still handle: delayed, half and popped messages.

hastore goes on with half messages that it took over from a broker, and with delayed messages if it
is told how far the broker came; not with timer messages, nor with what POP consumers have taken
and not acknowledged. So operators list them before they leave a broker
(docs/migrate-from-rocketmq.md).
Sources: RocketMQ's ScheduleMessageService, TimerMessageStore, TransactionalMessageBridge,
PopMessageProcessor and PopReviveService.

    SCHEDULE_TOPIC_XXXX, rmq_sys_wheel_timer   a delayed message; on delivery the broker writes it
                                               to REAL_TOPIC with the same UNIQ_KEY. One in the
                                               second topic with TIMER_DEL_UNIQKEY recalls another
                                               that is due at the same time, and is never delivered
    RMQ_SYS_TRANS_HALF_TOPIC                   a prepared message; on commit the broker writes it
                                               to REAL_TOPIC with the same UNIQ_KEY and PGROUP
    RMQ_SYS_TRANS_OP_HALF_TOPIC                ends half messages: the body lists queue offsets in
                                               the half topic's queue with the same queue id
    TRANS_CHECK_MAX_TIME_TOPIC                 ends one, too: a copy with its properties, written
                                               after the last check; the broker lists it nowhere

What a hastore master delivers names the record that waited (HS_DELAYED): just that one is not
pending any more, since those before it may be a broker's that nobody has delivered. Its record of
HASTORE_DELAYS names the last one of a level that the broker had delivered (record/delays.py).

A broker moves a POP consumer's position at the pop. It writes a checkpoint of what it gave, and a
record for each acknowledgement, to rmq_sys_REVIVE_LOG_<cluster>; both wait as delayed messages
until the messages are due again. Then it gives those again that were not acknowledged.

    tag ck     {"t": topic, "q": queue, "c": group, "so": first queue offset, "pt": time of the pop,
                "it": invisible time, "n": messages, "d": their distances to the first one}
    tag ack    the same t, q, c, so, pt; "ao": the queue offset; tag bAck: "aol", a list of them
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

import msgspec

from hastore.fs.filesystem import REAL
from hastore.record.codec import Record
from hastore.record.delays import (
    DELAYS_MS,
    MARK_BYTES,
    SCHEDULE_TOPIC,
    TAKEN_TOPIC,
    Marked,
    marked,
)
from hastore.record.properties import find_property
from hastore.record.transactions import ASIDE_TOPIC, HALF_TOPIC, OP_TOPIC
from hastore.store.derived.deliveries import read_delays
from hastore.store.offline.reader import StoreReader

REVIVE_PREFIX = "rmq_sys_REVIVE_LOG_"
_MOST = 32  # messages of a checkpoint, whose bits are those of a number


class _Body(msgspec.Struct):
    t: str
    q: int
    c: str
    so: int
    pt: int
    it: int = 0
    n: int = 0
    d: list[int] | None = None
    ao: int | None = None
    aol: list[int] | None = None


_decoder = msgspec.json.Decoder(_Body)
_Pop = tuple[str, int, str, int, int]  # topic, queue, group, first queue offset, time


class Popped(NamedTuple):
    """A checkpoint; `left` is changed by later acknowledgements."""

    topic: str
    queue_id: int
    group: str
    due_ms: int  # when the broker gives again what is left
    left: set[int]  # queue offsets


class Pops:
    """The checkpoints that wait; `take` sees the records of a log in their order."""

    def __init__(self) -> None:
        self._open: dict[_Pop, Popped] = {}

    def take(self, record: Record, *, waits: bool) -> Popped | None:
        """Return the checkpoint that a record is; None for an acknowledgement, and what is neither.

        `waits`: the record waits for its time. Else the broker handles the checkpoint now.
        """
        try:
            body = _decoder.decode(record.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        pop = body.t, body.q, body.c, body.so, body.pt
        tag = find_property(record.properties, b"TAGS")
        if tag == b"ck":
            if not waits:
                return self._open.pop(pop, None)
            given = range(body.n) if body.d is None else body.d
            left = {body.so + distance for distance in given[:_MOST]}
            # A message that waits for long is written more than once.
            one = Popped(body.t, body.q, body.c, body.pt + body.it, left)
            return self._open.setdefault(pop, one)
        known = self._open.get(pop)
        if known is not None and tag in (b"ack", b"bAck"):
            known.left.difference_update(body.aol or [], [] if body.ao is None else [body.ao])
        return None

TIMER_TOPIC = "rmq_sys_wheel_timer"
_STEP_RECORDS = 1_000


class Owed(Enum):
    """Why a message is pending."""

    DELAYED = "delayed"
    HALF = "half"
    POPPED = "popped"


@dataclass(frozen=True, slots=True)
class Pending:
    """A record that a broker would still act on.

    `due_ms` is the time at which a delayed message is due: its TIMER_OUT_MS, or the time given by
    the delay levels that the store's node had, RocketMQ's default ones if no node says it. It is
    None for half messages, and if the time is unknown. Of popped messages `key` is the group, and
    `popped` has the queue offsets that are not acknowledged in the queue of the topic.
    """

    kind: Owed
    offset: int
    topic: str
    key: str
    due_ms: int | None
    queue_id: int
    queue_offset: int
    popped: tuple[int, ...] = ()


_Name = tuple[Owed, str, str, str]  # kind, topic, key, a half message's producer group


def find_pending(
    path: str, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> list[Pending]:
    """Return the pending records of the store at `path`, in the log's order; reads the whole log.

    `progress` gets the bytes done and the total. Raises StoreError, CorruptRecordError, OSError.
    """
    with StoreReader(path) as reader:
        first, limit = reader.min_offset, reader.limit_offset

        def watched() -> Iterable[Record]:
            for number, record in enumerate(reader.records()):
                if number % _STEP_RECORDS == 0:
                    progress(record.physical_offset - first, limit - first)
                yield record

        return pending_of(watched(), read_delays(REAL, path) or DELAYS_MS)


def pending_of(records: Iterable[Record], delays_ms: Sequence[int] = DELAYS_MS) -> list[Pending]:
    """Return those of `records`, in the log's order, that are still pending after the last one.

    `delays_ms` has the delay of each level, beginning with level 1.
    """
    found: dict[_Name, Pending] = {}  # but what waits for a delay level
    waiting: dict[_Name, Pending] = {}
    halves: dict[tuple[int, int], _Name] = {}
    recalled: set[tuple[str, str, int | None]] = set()  # topic, key and time of timer messages
    pops, checkpoints = Pops(), dict[_Name, Popped]()
    for record in records:
        if _is_of_pops(record):
            waits = record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC)
            checkpoint, name = pops.take(record, waits=waits), _name(Owed.POPPED, record)
            if checkpoint is not None and waits:
                found[name] = _pending(name, record, checkpoint.due_ms)
                checkpoints[name] = checkpoint
            elif not waits:
                name = Owed.POPPED, record.topic, _text(record, b"UNIQ_KEY"), ""
                found.pop(name, None)
                checkpoints.pop(name, None)
        elif record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            name = _name(Owed.DELAYED, record)
            recalls = _text(record, b"TIMER_DEL_UNIQKEY")
            due_ms = _due_ms(record, delays_ms)
            if record.topic == SCHEDULE_TOPIC:
                waiting[name] = _pending(name, record, due_ms)
            elif recalls:
                recalled.add((*_recalled(name, recalls), due_ms))
            else:
                found[name] = _pending(name, record, due_ms)
        elif record.topic == HALF_TOPIC:
            name = _name(Owed.HALF, record)
            found[name] = _pending(name, record, None)
            halves[record.queue_id, record.queue_offset] = name
        elif record.topic == OP_TOPIC:
            for place in record.body.split(b","):
                if place.strip().isdigit():
                    ended = halves.pop((record.queue_id, int(place)), None)
                    if ended is not None:
                        found.pop(ended, None)
        elif record.topic == ASIDE_TOPIC:
            found.pop(_name(Owed.HALF, record), None)
        elif (mark := _mark(record)) is not None:
            _drop_delivered(waiting, record, mark)
        elif found or waiting:
            key = _text(record, b"UNIQ_KEY")
            for kind in Owed:
                name = kind, record.topic, key, _group(kind, record)
                found.pop(name, None)
                waiting.pop(name, None)
    for name, checkpoint in checkpoints.items():
        found[name] = _popped(found[name], checkpoint)
    owed = (
        one
        for one in found.values()
        if (one.popped or one.kind is not Owed.POPPED)
        and (one.topic, one.key, one.due_ms) not in recalled
    )
    return sorted((*owed, *waiting.values()), key=lambda one: one.offset)


def _recalled(name: _Name, recalls: str) -> tuple[str, str]:
    """Return topic and UNIQ_KEY of what a recall names: `TOPIC+KEY`, before RocketMQ 5.3 `KEY`."""
    topic, plus, key = recalls.partition("+")
    return (topic, key) if plus else (name[1], recalls)


def _is_of_pops(record: Record) -> bool:
    """Whether a record is a checkpoint or an acknowledgement of POP consumers, waiting or not."""
    if record.topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
        return _text(record, b"REAL_TOPIC").startswith(REVIVE_PREFIX)
    return record.topic.startswith(REVIVE_PREFIX)


def _popped(one: Pending, checkpoint: Popped) -> Pending:
    left = tuple(sorted(checkpoint.left))
    return replace(
        one, topic=checkpoint.topic, key=checkpoint.group, queue_id=checkpoint.queue_id,
        queue_offset=left[0] if left else one.queue_offset, popped=left,
    )  # fmt: skip


def _mark(record: Record) -> Marked | None:
    """Return what a record says to have been delivered, of a hastore master only."""
    mark = marked(record.properties) if MARK_BYTES in record.properties else None
    return None if mark is None or mark.offset >= record.physical_offset else mark


def _drop_delivered(waiting: dict[_Name, Pending], record: Record, mark: Marked) -> None:
    """Remove what a delivery of hastore's names, or what its note on a broker's deliveries says."""
    level, offset = mark
    if record.topic == TAKEN_TOPIC:
        names = [name for name, one in waiting.items() if one.offset <= offset]
    else:
        names = [_name(Owed.DELAYED, record, offset)]  # a delivery keeps the properties
        names = [name for name in names if name in waiting and waiting[name].offset == offset]
    for name in names:
        if waiting[name].queue_id == level - 1:
            del waiting[name]


def _name(kind: Owed, record: Record, offset: int | None = None) -> _Name:
    """Return a name that all copies of a message share: its UNIQ_KEY, or its offset without one.

    Two producers may have given one UNIQ_KEY to half messages of their own. `offset` is that of the
    record that waited, if this one delivers it.
    """
    offset = record.physical_offset if offset is None else offset
    key = _text(record, b"UNIQ_KEY") or f"@{offset}"
    return kind, _text(record, b"REAL_TOPIC"), key, _group(kind, record)


def _group(kind: Owed, record: Record) -> str:
    return _text(record, b"PGROUP") if kind is Owed.HALF else ""


def _pending(name: _Name, record: Record, due_ms: int | None) -> Pending:
    kind, topic, key, _ = name
    return Pending(
        kind, record.physical_offset, topic, key, due_ms, record.queue_id, record.queue_offset
    )


def _due_ms(record: Record, delays_ms: Sequence[int]) -> int | None:
    if record.topic == TIMER_TOPIC:
        due = _text(record, b"TIMER_OUT_MS")
        return int(due) if due.isascii() and due.isdigit() else None
    if 0 <= record.queue_id < len(delays_ms):
        return record.store_timestamp_ms + delays_ms[record.queue_id]
    return None


def _text(record: Record, name: bytes) -> str:
    value = find_property(record.properties, name)
    return "" if value is None else value.decode("utf-8", "replace")
