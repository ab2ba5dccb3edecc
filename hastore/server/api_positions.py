"""Committed positions: records of HASTORE_POSITIONS, each group and topic's latest kept at hand.

    topic HASTORE_POSITIONS, queue 0; KEYS = the consumer group; body (JSON):
    {"group": G, "topic": T, "positions": {"<queue>": [queue_offset, epoch|null, offset|null]}}

A commit is a put like any other, confirmed like any other, so a position survives what the messages
survive. Each node follows the topic up to its own readable offset: a slave answers too.
"""

from __future__ import annotations

import json
import logging

import msgspec

from hastore.clock import Clock
from hastore.errors import CorruptRecordError
from hastore.protocol.api import POSITIONS_TOPIC, Commit, Position
from hastore.server.api_backend import ApiBackend
from hastore.server.api_history import Standing, check_position, epoch_at
from hastore.store.host import NO_HOST
from hastore.store.record import build_record, decode_record

log = logging.getLogger(__name__)

QUEUE = 0
MAX_ENTRIES = 10_000  # (group, topic) pairs
_CHUNK_BYTES = 1024 * 1024


class _Body(msgspec.Struct, frozen=True):
    group: str
    topic: str
    positions: dict[int, tuple[int, int | None, int | None]]


_decoder = msgspec.json.Decoder(_Body)


class PositionTable:
    """The latest committed positions; used by whoever holds the API's socket."""

    def __init__(self, backend: ApiBackend, clock: Clock) -> None:
        self._backend = backend
        self._clock = clock
        self._latest: dict[tuple[str, str], dict[int, Position]] = {}
        self._next: int | None = None  # the next queue offset to read
        self._last: tuple[int, int] | None = None  # (epoch, offset) of the record read last

    def record_of(self, commit: Commit) -> bytes:
        """Return the record that keeps a commit."""
        body = {
            "group": commit.group,
            "topic": commit.topic,
            "positions": {
                str(queue): [place.queue_offset, place.epoch, place.offset]
                for queue, place in commit.positions.items()
            },
        }
        return build_record(
            POSITIONS_TOPIC,
            json.dumps(body, separators=(",", ":")).encode(),
            queue_id=QUEUE,
            properties=[("KEYS", "_".join(commit.group.split()) or "_")],
            born_timestamp_ms=self._clock.wall_ms(),
            born_host=NO_HOST,
        )

    def has_room(self, group: str, topic: str) -> bool:
        """Whether one more group and topic would still be kept."""
        return len(self._latest) < MAX_ENTRIES or (group, topic) in self._latest

    def find(self, group: str, topic: str) -> dict[int, Position]:
        """Return the latest positions of a group in a topic, as far as `catch_up` came."""
        return dict(self._latest.get((group, topic), {}))

    def has_read(self, offset: int) -> bool:
        """Whether the record at an offset of the log has been read."""
        return self._last is not None and self._last[1] >= offset

    def catch_up(self) -> bool:
        """Read on, at most 1 MiB; whether the readable end was reached."""
        store = self._backend.store
        known = store.queue_range(POSITIONS_TOPIC, QUEUE)
        if known is None:
            self._forget()
            return True
        if self._next is None or not self._still_there(known):
            self._forget()
            self._next = known[0]
        found = store.pull(
            POSITIONS_TOPIC, QUEUE, max(self._next or 0, known[0]),
            max_messages=4096, max_bytes=_CHUNK_BYTES, limit_offset=store.readable_offset,
        )  # fmt: skip
        if not found.count:
            return True
        self._read(found.records)
        self._next = found.next_queue_offset
        return False

    def _forget(self) -> None:
        self._latest.clear()
        self._next = None
        self._last = None

    def _still_there(self, known: tuple[int, int]) -> bool:
        """Whether what was read is still this log's: a rewind may have cut it."""
        if self._next is not None and self._next > known[1]:
            return False
        if self._last is None:
            return True
        end = self._backend.store.max_offset
        standing, _ = check_position(self._backend.history(), end, *self._last)
        return standing is Standing.AGREED

    def _read(self, records: bytes) -> None:
        at = 0
        while at < len(records):
            record = decode_record(records, at)
            at += record.size
            epoch = epoch_at(self._backend.history(), record.physical_offset)
            self._last = (epoch, record.physical_offset)
            try:
                body = _decoder.decode(record.body)
                places = {
                    queue: msgspec.convert(list(place), Position)
                    for queue, place in body.positions.items()
                }
            except (msgspec.ValidationError, msgspec.DecodeError, CorruptRecordError) as failure:
                log.warning("api: no position at offset %d: %s", record.physical_offset, failure)
                continue
            if self.has_room(body.group, body.topic):
                self._latest.setdefault((body.group, body.topic), {}).update(places)
