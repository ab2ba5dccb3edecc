"""The records of the topic HASTORE_POSITIONS, and the rule for which of them is in force. Pure.

A commit is one such record. Before retention removes it, the master rewrites its positions in a new
record, whose `origins` has the offset of the original commit. Of all records of a group for a
queue, the one with the greatest origin is in force; the order in which they are read does not
matter. So a rewrite that follows a newer commit in the log changes nothing, and no position moves
back.

A record may also say which consumers hold the locks of a group's queues (RocketMQ's consumers that
read in order), with positions or without. There the last record in the log is in force. Nothing
rewrites such a record but the master, while the lock is still asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec

from hastore.errors import UNREADABLE, CorruptRecordError
from hastore.protocol.api import Int64, Name, Position, QueueId

# The group and the topic of a position that is no group's: its queue offset is the end of a
# RocketMQ broker's log whose positions have been taken over (server/take_over.py).
TAKEN_OVER = "HASTORE_TAKEN_OVER"
MAX_GROUPS = 10_000  # (group, topic) pairs
MAX_TABLE_BYTES = 64 * 1024 * 1024  # of memory, as estimated below
READ_FACTOR = 2  # of what the log has: later a node may not know which topics were deleted then
MAX_LOCKS = 200_000  # of queues, in all groups
GAP_MS = 30_000.0  # a consumer that has locks leads to a record each 20 s
_STEP_MS = 0.001  # two records differ, also within a millisecond
_PAIR_BYTES = 600  # of a group and topic without positions, names not included
_PLACE_BYTES = 250  # of one queue's position
_NOTHING: Mapping[int, Place] = {}

Pair = tuple[str, str]  # (group, topic)


class Place(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A queue's position; `origin` is the log offset of its commit."""

    queue_offset: int
    epoch: int | None
    offset: int | None
    origin: int

    @property
    def position(self) -> Position:
        """Return the position as clients receive it."""
        return Position(self.queue_offset, self.epoch, self.offset)


class CommitBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a record, in JSON.

    By queue: `origins` has the offset of the original commit, `locks` the client id of the holder,
    `released` that of the one that has given the lock back. `member` is the client id of who has
    committed the positions, if it had the locks of their queues in that moment; "": anybody.
    """

    group: Annotated[str, msgspec.Meta(min_length=1)]
    topic: Name
    positions: dict[QueueId, tuple[Int64, Int64 | None, Int64 | None]]
    origins: dict[QueueId, Int64] = {}
    locks: dict[QueueId, Annotated[str, msgspec.Meta(max_length=255)]] = {}
    released: dict[QueueId, Annotated[str, msgspec.Meta(max_length=255)]] = {}
    member: Annotated[str, msgspec.Meta(max_length=255)] = ""


_decoder = msgspec.json.Decoder(CommitBody)


def encode_commit(body: CommitBody) -> bytes:
    """Return a record's body."""
    return msgspec.json.encode(body)


def decode_commit(raw: bytes) -> CommitBody:
    """Decode a record's body; CorruptRecordError when it is not a commit."""
    try:
        return _decoder.decode(raw)
    except UNREADABLE as error:  # or its subclass ValidationError
        raise CorruptRecordError(f"not a commit of positions: {error}") from error


class PositionMap:
    """The current positions by group and topic. `bounded` limits their number and memory.

    One thread changes the map. A mapping that `find` has returned never changes.
    """

    def __init__(
        self, entries: Mapping[Pair, Mapping[int, Place]] | None = None, *, bounded: bool = True
    ) -> None:
        """Start empty, or with the entries of another map."""
        self._bounded = bounded
        self._entries: dict[Pair, Mapping[int, Place]] = dict(entries or {})
        self._bytes = sum(_cost(pair, len(places)) for pair, places in self._entries.items())

    def __len__(self) -> int:
        """Return the number of (group, topic) pairs."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Pair]:
        """Iterate over the pairs."""
        return iter(self._entries)

    @property
    def memory_bytes(self) -> int:
        """Return an upper estimate of the map's memory; its records in the log are smaller."""
        return self._bytes

    @property
    def entries(self) -> Mapping[Pair, Mapping[int, Place]]:
        """All entries; only for the thread that changes the map."""
        return self._entries

    def copied(self) -> dict[Pair, Mapping[int, Place]]:
        """Return all entries as they are at one moment; any thread may call this."""
        return self._entries.copy()

    def find(self, group: str, topic: str) -> Mapping[int, Place]:
        """Return the positions of a group in a topic, by queue."""
        return self._entries.get((group, topic), _NOTHING)

    def has_room(self, group: str, topic: str, queues: int, factor: int = 1) -> bool:
        """Whether there is room for `queues` more positions of a group in a topic.

        The bounds count `factor` times.
        """
        if not self._bounded:
            return True
        known = (group, topic) in self._entries
        cost = queues * _PLACE_BYTES if known else _cost((group, topic), queues)
        within = self._bytes + cost <= MAX_TABLE_BYTES * factor
        return within and (known or len(self) < MAX_GROUPS * factor)

    def drop_topics(self, topics: Collection[str]) -> int:
        """Drop the positions in these topics; return how many pairs had some."""
        gone = [pair for pair in self._entries if pair[1] in topics]
        for pair in gone:
            self._bytes -= _cost(pair, len(self._entries.pop(pair)))
        return len(gone)

    def apply_commit(self, body: CommitBody, record_offset: int, factor: int = 1) -> bool:
        """Apply the positions of a record at log offset `record_offset`; False without room."""
        if not body.positions:  # it is about locks only
            return True
        places = {}
        for queue, (queue_offset, epoch, offset) in body.positions.items():
            origin = origin_of(body, queue, record_offset)
            places[queue] = Place(queue_offset, epoch, offset, origin)
        return self.merge((body.group, body.topic), places, factor)

    def merge(self, pair: Pair, places: Mapping[int, Place], factor: int = 1) -> bool:
        """Take the places that are not older than the known ones; False without room."""
        known = self._entries.get(pair, _NOTHING)
        more = sum(1 for queue in places if queue not in known)
        if more and not self.has_room(*pair, more, factor):
            return False
        self._bytes += more * _PLACE_BYTES if pair in self._entries else _cost(pair, more)
        self._entries[pair] = newest(known, places)
        return True

    def clear(self) -> None:
        """Remove all entries."""
        self._entries = {}
        self._bytes = 0


class RecordedLock(NamedTuple):
    """Who holds a queue's lock, by the last record of it, and when that was (RecordedLocks)."""

    holder: str
    at_ms: float


class LocksRead(NamedTuple):
    """All that RecordedLocks knows."""

    now_ms: float
    stored_ms: int | None
    since_ms: float | None
    held: Mapping[Pair, Mapping[int, RecordedLock]]


class RecordedLocks:
    """The locks of queues as the records say. One thread uses it.

    How much time lies between two records is added up from one record to the next, at most GAP_MS
    each, because a wall clock may jump, and another master's may be ahead. So less time may have
    been counted than has passed, and hardly ever more.
    """

    def __init__(self) -> None:
        self._now_ms = 0.0  # of the last record, by the time that is added up
        self._stored_ms: int | None = None  # the wall time of the last record
        self._since_ms: float | None = None  # records before may be missing; None: none is
        self._locks: dict[Pair, dict[int, RecordedLock]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of locks."""
        return self._count

    def note_gap(self) -> None:
        """Note that records before the next one are missing."""
        self._since_ms = self._now_ms

    def lacks_within(self, span_ms: float) -> bool:
        """Whether records may be missing that are not older than this."""
        return self._since_ms is not None and self._now_ms - self._since_ms < span_ms

    def apply(self, body: CommitBody | None, stored_ms: int) -> None:
        """Take a record, None for one that is damaged, which was stored at a wall time.

        Beyond MAX_LOCKS the half that is oldest is forgotten.
        """
        gap_ms = 0 if self._stored_ms is None else stored_ms - self._stored_ms
        self._stored_ms = stored_ms
        self._now_ms += _STEP_MS + min(max(0, gap_ms), GAP_MS)
        if body is None:
            return
        if body.released:
            self._release((body.group, body.topic), body.released)
        if not body.locks:
            return
        known = self._locks.setdefault((body.group, body.topic), {})
        before = len(known)
        for queue, holder in body.locks.items():
            known[queue] = RecordedLock(holder, self._now_ms)
        self._count += len(known) - before
        if self._count > MAX_LOCKS:
            times = sorted(one.at_ms for locks in self._locks.values() for one in locks.values())
            self._since_ms = max(self._since_ms or 0.0, times[len(times) // 2])
            self._forget_before(self._since_ms)

    def _release(self, pair: Pair, released: Mapping[int, str]) -> None:
        known = self._locks.get(pair)
        if known is None:
            return
        for queue, holder in released.items():
            if queue in known and known[queue].holder == holder:
                del known[queue]
                self._count -= 1
        if not known:
            del self._locks[pair]

    def forget_older(self, span_ms: float) -> None:
        """Forget locks whose record is older than this."""
        self._forget_before(self._now_ms - span_ms)

    def _forget_before(self, at_ms: float) -> None:
        for pair, known in list(self._locks.items()):
            for queue in [queue for queue, one in known.items() if one.at_ms < at_ms]:
                del known[queue]
                self._count -= 1
            if not known:
                del self._locks[pair]

    def clear(self) -> None:
        """Forget all."""
        self._now_ms, self._stored_ms, self._since_ms = 0.0, None, None
        self._locks.clear()
        self._count = 0

    def copied(self) -> LocksRead:
        """Return all that is known, for `restore`."""
        held = {pair: known.copy() for pair, known in self._locks.items()}
        return LocksRead(self._now_ms, self._stored_ms, self._since_ms, held)

    def restore(self, read: LocksRead) -> None:
        """Know what `copied` has returned, and nothing else."""
        self._now_ms, self._stored_ms, self._since_ms = read.now_ms, read.stored_ms, read.since_ms
        self._locks = {pair: dict(known) for pair, known in read.held.items()}
        self._count = sum(map(len, self._locks.values()))

    def items(self) -> Iterator[tuple[Pair, Mapping[int, RecordedLock]]]:
        """Iterate over groups with topics, and their locks by queue."""
        return iter(self._locks.items())


def origin_of(body: CommitBody, queue: int, record_offset: int) -> int:
    """Return a position's origin from `origins`; the record's offset is the default and maximum."""
    return min(body.origins.get(queue, record_offset), record_offset)


def newest(one: Mapping[int, Place], other: Mapping[int, Place]) -> Mapping[int, Place]:
    """Return the place with the greater origin for each queue; on a tie, that of `other`."""
    merged = dict(one)
    for queue, place in other.items():
        known = merged.get(queue)
        if known is None or place.origin >= known.origin:
            merged[queue] = place
    return merged


def below(places: Mapping[int, Place], offset: int) -> Mapping[int, Place]:
    """Return the places whose origin is below a log offset."""
    if all(place.origin < offset for place in places.values()):
        return places
    return {queue: place for queue, place in places.items() if place.origin < offset}


def with_kept(
    kept: Mapping[int, Place], latest: Mapping[int, Place], begin: int
) -> dict[int, Place]:
    """Return the places of a group in a topic: those in the log, and those that retention kept.

    If a queue has both, the kept one counts only if its commit is below the log's `begin`:
    otherwise a failover may have cut that commit.
    """
    return {**kept, **newest(below(kept, begin), latest)}


def _cost(pair: Pair, queues: int) -> int:
    return _PAIR_BYTES + sum(len(name.encode()) for name in pair) + queues * _PLACE_BYTES
