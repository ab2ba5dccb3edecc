"""Which delayed messages of a log were delivered, by the deliveries in the log itself.

A delivery is a record with a mark: the level of the delay, and where the message waited
(record/delays.py). The messages of a level are delivered in the log's order. So for each level the
greatest place in a mark says it all: messages up to there were delivered, later ones were not. If
retention has removed that delivery, it has removed all messages up to there too.

The file `<root>/hastore/deliveries` keeps that state at several ends of the log:

    magic "HSDL" 4 | version 4 | states 4
    each: end of the log 8 | levels 4, each: level 4 | greatest place 8
    delays 4, each: milliseconds 8. The configured delay of each level, from level 1 on
    CRC-32 (of all before) 4

In a log of entries, where a broker and hastore may lead in turn, the records that took a broker's
messages over (taken_delays.py) count beside the marks: under 1,000 + the level, the offset of that
record. What a broker stored before it is hastore's to deliver.

A start replays from the last state that the log still reaches. A cut goes back to such a state, and
reads the log again from there. Without one, no delivery lies before the first waiting message. The
queues say where that is, as far as they have the log: if they were lost too, that is nowhere, and
all of the log is read. An earlier version writes no delays, and does not read them. Whoever builds
the queues anew without the node's configuration (store/rebuild) takes them from here.

Replay's thread writes; any thread calls `state`, `levels`, `next_own`, `due_from`.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.record.delays import (
    DELAYS_MS,
    MARK_BYTES,
    MAX_LEVELS,
    SCHEDULE_TOPIC,
    TAKEN_TOPIC,
    marked,
)
from hastore.record.log_format import LogFormat
from hastore.store.derived.consume_queue import ConsumeQueue, ConsumeQueueTable, Unit
from hastore.store.derived.contract import Dispatched, RecordColumns, ReplayableLog
from hastore.store.derived.scalar_walk import reread
from hastore.store.derived.unit_files import first_where
from hastore.store.state.crc_frame import CrcFrame

_STEP_BYTES = 4 << 20  # of the log between two states, while messages are delivered
_QUIET_STEP_BYTES = 64 << 20  # and else
_TAKEN = 1_000  # beyond every level
_KEPT = 64  # states; then every second one of the older half goes
_FRAME = CrcFrame(b"HSDL", 1)
_COUNT = struct.Struct(">I")
_HEAD = struct.Struct(">qI")
_LEVEL = struct.Struct(">Iq")
_DELAY = struct.Struct(">q")


class Delivered(NamedTuple):
    """The deliveries in the log below `end`: by level, the greatest place that a mark names."""

    end: int
    places: Mapping[int, int]


_NOTHING = Delivered(0, {})


class Deliveries:
    """The deliveries of a log; a Dispatcher, called after the consume queues."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        log: ReplayableLog,
        queues: ConsumeQueueTable,
        form: LogFormat,
        on_waiting: Callable[[], None],
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Prepare; replay's thread calls `on_waiting()` after it has read delayed messages.

        `delays_ms` has the delay of each level, beginning with level 1.
        """
        self._fs = fs
        self._path = f"{root}/hastore/deliveries"
        self._log = log
        self._queues = queues
        self._form = form
        self._on_waiting = on_waiting
        self._delays_ms = tuple(delays_ms)
        self.state = _NOTHING  # replaced, never changed
        self._states: list[Delivered] = []  # earlier ones, by their ends
        self._unsaved = False

    # -- reading -----------------------------------------------------------------------------------

    def places_below(self, end: int) -> Mapping[int, int]:
        """Return the places that the deliveries in the log below `end` name.

        Raises StoreError, OSError if the log cannot be read.
        """
        state = self.state
        if state.end <= end:
            return state.places
        state = next((one for one in reversed(self._states) if one.end <= end), _NOTHING)
        begin = state.end
        if state is _NOTHING:  # no delivery lies before the first waiting message
            first = self._first_message()
            begin = end if first is None else min(first - self._form.lead, end)
        places = dict(state.places)
        for batch in reread(self._log, self._form, begin, end):
            for record in batch:
                if MARK_BYTES in record.properties:
                    _add_mark(places, record, notes_taken=bool(self._form.lead))
        return places

    def levels(self) -> Iterator[tuple[int, ConsumeQueue]]:
        """Yield each level of which messages were read, and its queue."""
        for level in range(1, MAX_LEVELS + 1):
            queue = self._queues.get(SCHEDULE_TOPIC, level - 1)
            if queue is not None:
                yield level, queue

    def next_own(self, queue: ConsumeQueue, place: int, is_own: Callable[[Unit], bool]) -> int:
        """Return the first queue offset whose record lies beyond `place`, is in the log and is own.

        `is_own` tells a message that a hastore master stored from one of a RocketMQ broker. It
        holds for all messages from some one on.
        """

        def is_owned(queue_offset: int) -> bool:
            units = queue.read_on(queue_offset, 1)
            return not units or is_own(units[0])

        at, end = self._next_after(queue, place), queue.max_queue_offset
        return at if at >= end or is_owned(at) else first_where(at, end, is_owned)

    def taken_below(self, level: int) -> int:
        """Return below which offset a level of a log of entries was taken over from a broker."""
        return self.state.places.get(_TAKEN + level, 0)

    def due_from(self, queue: ConsumeQueue, at: int, since_ms: int) -> Unit | None:
        """Return the first message at or beyond a queue offset that is due at `since_ms` or later.

        The times of a level rise, but where the log's store times fall.
        """

        def is_due(queue_offset: int) -> bool:
            units = queue.read_on(queue_offset, 1)
            return not units or units[0].tags_code >= since_ms

        found = queue.read_on(first_where(at, queue.max_queue_offset, is_due), 1)
        return found[0] if found else None

    def _next_after(self, queue: ConsumeQueue, place: int) -> int:
        return queue.files.first_at(max(place + 1, self._log.min_offset))

    # -- replay ------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the file; return from where the log is needed."""
        del synced  # the file is replaced durably
        raw = read_or_empty(self._fs, self._path)
        self._states, delays_ms = _unpack(raw)
        self._unsaved = bool(self._states) and delays_ms != self._delays_ms
        self._go_back(offset, min(offset, self._queues.loaded_end))
        return self.state.end

    def _go_back(self, log_end: int, queues_end: int) -> None:
        """Take the last state that a log has that ends at `log_end`.

        The queues have every record below `queues_end`.
        """
        kept = [state for state in self._states if state.end <= log_end]
        if len(kept) < len(self._states):
            self._states = kept
            self._save()  # the log may grow again, with other records
        if kept:
            self.state = kept[-1]
        else:
            first = self._first_message()
            begin = queues_end if first is None else first - self._form.lead
            self.state = Delivered(min(begin, log_end), {})

    def _first_message(self) -> int | None:
        """Return the offset of the first delayed message in the log, delivered or not."""
        units = [
            unit
            for _, queue in self.levels()
            for unit in queue.read_on(self._next_after(queue, -1), 1)
        ]
        return min((unit.offset for unit in units), default=None)

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Note the deliveries of a batch."""
        if not batch or batch[-1].end_offset <= self.state.end:
            return
        if isinstance(batch, RecordColumns):
            marks, waiting = batch.deliveries(), batch.has_topic(SCHEDULE_TOPIC)
        else:  # a tuple's field by its number: this looks at every record of a small batch
            marks = [record for record in batch if MARK_BYTES in record[8]]
            waiting = SCHEDULE_TOPIC in [record[2] for record in batch]
        self._take(marks, batch[-1].end_offset, waiting=waiting)
        if waiting:
            self._on_waiting()

    def _take(self, marks: Sequence[Dispatched], end: int, *, waiting: bool = False) -> None:
        places = self.state.places
        if marks:
            changed = dict(places)
            for record in marks:
                if record.offset >= self.state.end:
                    _add_mark(changed, record, notes_taken=bool(self._form.lead))
            places = changed
        self.state = Delivered(end, places)
        last = self._states[-1].end if self._states else 0
        step = _STEP_BYTES if marks else _QUIET_STEP_BYTES
        if (self._states and end - last >= step) or (not self._states and (places or waiting)):
            self._states = [*self._states, self.state]
            if len(self._states) > _KEPT:
                half = _KEPT // 2
                self._states = [*self._states[:half:2], *self._states[half:]]
            self._unsaved = True

    def truncate(self, log_end: int) -> None:
        """Go back to the deliveries of a log that now ends at `log_end`, durably.

        Raises StoreError, OSError if the log cannot be read.
        """
        if log_end >= self.state.end:
            return
        self._go_back(log_end, log_end)  # replay has read the log up to there
        self._read_log(log_end)

    def _read_log(self, log_end: int) -> None:
        """Take the records of the log up to `log_end`."""
        for batch in reread(self._log, self._form, self.state.end, log_end):
            marks = [record for record in batch if MARK_BYTES in record.properties]
            self._take(marks, batch[-1].end_offset)
        self.state = Delivered(log_end, self.state.places)

    def flush(self) -> None:
        """Save the states, if there is a new one. Raises OSError."""
        if self._unsaved:
            self._save()

    def reset(self) -> None:
        """Forget everything, durably."""
        self.state, self._states = _NOTHING, []
        if self._fs.exists(self._path):
            self._save()

    def delete_before(self, min_offset: int) -> None:
        """Keep everything: earlier states cover the log that is left."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _save(self) -> None:
        self._unsaved = False
        states = self._states
        parts = [_COUNT.pack(len(states))]
        for state in states:
            parts.append(_HEAD.pack(state.end, len(state.places)))
            parts += (_LEVEL.pack(*one) for one in sorted(state.places.items()))
        parts.append(_COUNT.pack(len(self._delays_ms)))
        parts += (_DELAY.pack(delay) for delay in self._delays_ms)
        try:
            self._fs.replace_bytes(self._path, _FRAME.pack(*parts))
        except BaseException:
            self._unsaved = True
            raise


def _add_mark(places: dict[int, int], record: Dispatched, *, notes_taken: bool) -> None:
    """Add what the mark of a record says, if it is one of a hastore master."""
    found = marked(record.properties)
    if found is not None and found.offset < record.offset and found.level <= MAX_LEVELS:
        places[found.level] = max(places.get(found.level, -1), found.offset)
        if notes_taken and record.topic == TAKEN_TOPIC:
            places[_TAKEN + found.level] = record.offset


def read_delays(fs: FileSystem, root: str) -> tuple[int, ...] | None:
    """Return the delay of each level in ms that the node of a store had; None if it is not known.

    Raises OSError.
    """
    path = f"{root}/hastore/deliveries"
    return _unpack(fs.read_bytes(path))[1] if fs.exists(path) else None


def _unpack(raw: bytes) -> tuple[list[Delivered], tuple[int, ...] | None]:
    """Return what the file holds; nothing if it is damaged, which only makes a start slower."""
    return _FRAME.read(raw, _read_states) or ([], None)


def _read_states(content: memoryview) -> tuple[list[Delivered], tuple[int, ...] | None]:
    (count,) = _COUNT.unpack_from(content)
    at, found = _COUNT.size, []
    for _ in range(count):
        end, levels = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        size = levels * _LEVEL.size
        found.append(Delivered(end, dict(_LEVEL.iter_unpack(content[at : at + size]))))
        at += size
    if at == len(content):  # of an earlier version
        return found, None
    (count,) = _COUNT.unpack_from(content, at)
    at += _COUNT.size
    delays = _DELAY.iter_unpack(content[at : at + count * _DELAY.size])
    return found, tuple(delay for (delay,) in delays)
