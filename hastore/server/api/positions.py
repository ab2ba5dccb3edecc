"""Committed positions: a table of each group's latest positions, read from the log.

    topic HASTORE_POSITIONS, queue 0; KEYS = the consumer group; body (JSON):
    {"group": G, "topic": T, "positions": {"<queue>": [queue_offset, epoch|null, offset|null]},
     "origins": {"<queue>": offset in the log of the commit that this one repeats}}

A commit is an ordinary put and is confirmed as one, so positions are as durable as messages.
Positions whose records retention would remove are written again (kept_positions.py), with
`origins`. Each node reads the topic up to its own readable offset, so slaves answer too.
"""

from __future__ import annotations

from hastore.clock import Clock
from hastore.ha.rules.history import History, Standing, check_position, epoch_at
from hastore.protocol.api import POSITIONS_TOPIC, Commit, Position
from hastore.protocol.positions import CommitBody, PositionMap, below, newest
from hastore.server.api.backend import ApiBackend
from hastore.server.positions.commit_records import (
    QUEUE,
    CommitReader,
    commit_record,
    read_commits,
)

_CHUNK_BYTES = 1024 * 1024


class PositionTable:
    """The latest committed positions; the API's lock is held in every call."""

    def __init__(self, backend: ApiBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._latest = PositionMap()  # from the records read so far
        self._reader = CommitReader(clock, near_end=True)
        self._next: int | None = None  # the next queue offset to read
        self._last: tuple[int, int] | None = None  # (epoch, offset) of the record read last

    def record_of(self, commit: Commit) -> bytes:
        """Return a commit as a record."""
        places = {
            queue: (place.queue_offset, place.epoch, place.offset)
            for queue, place in commit.positions.items()
        }
        body = CommitBody(commit.group, commit.topic, places)
        return commit_record(body, self._clock.wall_ms())

    def has_room(self, commit: Commit) -> bool:
        """Whether the table has room for the queues that a commit adds."""
        group, topic = commit.group, commit.topic
        known = self._latest.find(group, topic)
        more = sum(1 for queue in commit.positions if queue not in known)
        return not more or self._latest.has_room(group, topic, more)

    def find(self, group: str, topic: str) -> dict[int, Position]:
        """Return the latest positions of a group in a topic, as far as `catch_up` has read."""
        # The kept positions are fetched after `catch_up` has read the log, so that none is missed:
        # retention keeps a position before it removes the record. If a queue also has a position in
        # the log, the kept one counts only if its commit is below the start of the log: otherwise a
        # failover may have cut that commit.
        kept = self._backend.kept_positions(group, topic)
        latest = self._latest.find(group, topic)
        found = {**kept, **newest(below(kept, self._backend.store.min_offset), latest)}
        return {queue: place.position for queue, place in found.items()}

    def has_read(self, offset: int) -> bool:
        """Whether the record at an offset of the log has been read."""
        return self._last is not None and self._last[1] >= offset

    def catch_up(self) -> bool:
        """Read up to 1 MiB more of the topic; return whether the readable offset was reached."""
        store = self._backend.store
        known = store.queues.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            self._forget()
            return True
        if self._next is None or not self._still_there(known):
            self._forget()
            self._next = known[0]
        history = self._backend.history()
        pulled = self._reader.next(
            store.reader, max(self._next or 0, known[0]),
            max_messages=4096, max_bytes=_CHUNK_BYTES, limit_offset=store.readable_offset,
        )  # fmt: skip
        if self._backend.history() != history:  # a failover may have cut the bytes just read
            return False
        if pulled is None:
            return True
        self._read(history, pulled[0])
        self._next = pulled[1]
        return False

    def _forget(self) -> None:
        self._latest.clear()
        self._next = None
        self._last = None

    def _still_there(self, known: tuple[int, int]) -> bool:
        """Whether the log still has the records that were read: a rewind may have cut them."""
        if self._next is not None and self._next > known[1]:
            return False
        if self._last is None:
            return True
        end = self._backend.store.max_offset
        standing, _ = check_position(self._backend.history(), end, *self._last)
        return standing is Standing.AGREED

    def _read(self, history: History, records: bytes) -> None:
        for offset, body in read_commits(records):
            self._last = (epoch_at(history, offset), offset)
            if body is not None:
                self._latest.take(body, offset)  # drops a commit that has_room would refuse
