"""Pulls with a filter: records are looked at in turn, and only those that match are sent.

    looked at                              answer                    position afterwards
    some that match                        FOUND, they               behind what was looked at
    as many as one look may, none matches  NO_MATCH                  behind what was looked at
    all there are, none matches            NO_MATCH                  at the queue's end
    nothing, at the queue's end            it waits, then NO_NEW     where it was

A pull that waits looks at new records as they come, without an answer unless one matches or its
wait ends: NO_MATCH then tells the client how far it looked. So a reader of few messages in a busy
queue has one pull under way, its position does not fall behind, and no record is looked at twice.

One look is bounded, because it may be done by the API's thread: by tags, up to TAGGED_UNITS_MAX
entries of the queue, and MAX_RECORDS records that have one of the hashes; by SQL, so many records
that the expression's terms are evaluated at most MAX_EVALUATED times, and until these records had
MAX_PROPERTIES properties. Tags are compared by their
hashes in the queue first, before a record is read, and then exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hastore.ha.rules.epochs import EpochStarts
from hastore.protocol.api import Failed, Pull, Pulled, PullStatus
from hastore.record.codec import find_parts
from hastore.record.layout import header_struct
from hastore.record.message_filter import MessageFilter
from hastore.record.properties import offsets_taken
from hastore.server.api.backend import ApiBackend
from hastore.server.api.parked import Found, OwnPull
from hastore.store.message_store import PullResult
from hastore.store.message_store import PullStatus as ReadStatus

MAX_RECORDS = 2_048  # that one look compares, of 1 to 3 us each
MAX_EVALUATED = 20_000  # terms of SQL filters in one look, of some 0.3 us
MAX_PROPERTIES = 20_000  # that one look with an SQL filter decodes, of some 0.3 us
MAX_LOOKS = 4  # in a row for one pull, if no record matches
_QUEUE_OFFSET = header_struct("queue_offset")
Read = Callable[[Pull, int], PullResult]  # up to an offset of the log


class FilteredPull(OwnPull):
    """A pull of the client API with a filter, by the table above."""

    __slots__ = (
        *("_answer", "_asked", "_backend", "_has_waited", "_passed", "_pull_under", "_wanted"),
        "rid",
    )

    def __init__(
        self,
        backend: ApiBackend,
        asked: Pull,
        wanted: MessageFilter,
        pull_under: Callable[[EpochStarts, Pull, Read], Found],
        answer: Callable[[Pulled | Failed, bytes | None], None],
    ) -> None:
        """Prepare; `pull_under` answers a pull under a history, by a way to read."""
        super().__init__(asked.topic, asked.queue_id, asked.position, asked.wait_ms)
        self.rid = asked.rid
        self._backend = backend
        self._asked = asked
        self._wanted = wanted
        self._pull_under = pull_under
        self._answer = answer
        self._has_waited = False  # from then on it moves on by itself
        self._passed: Pulled | None = None  # what would tell the client how far that was

    def find(self) -> Found:
        """Return the answer as of now; see OwnPull. Its reply is a Pulled with its records."""
        for looks_left in range(MAX_LOOKS - 1, -1, -1):
            asked = msgspec.structs.replace(self._asked, position=self.position)
            found = self._pull_under(self._backend.history(), asked, self._read)
            reply = found.reply
            if reply.status is PullStatus.HISTORY_DIFFERS and self._passed is not None:
                # A failover has cut records that the client did not get: look again from there.
                self.position, self._passed = self._asked.position, None
                return self.find()
            if reply.status is PullStatus.NO_MATCH:
                self.position, self._passed = reply.after, reply
                if self._has_waited and looks_left:
                    continue
            break
        self._has_waited = self._has_waited or found.may_wait
        if found.may_wait and self._passed is not None:
            reply = self._passed
        return Found((reply, found.records), None, found.needs_offset, found.may_wait)

    def respond(self, reply: Any) -> None:
        """Answer the client."""
        if isinstance(reply, Failed):
            self._answer(reply, None)
        else:
            self._answer(*reply)

    def _read(self, request: Pull, limit: int) -> PullResult:
        """Return the records that match of one look; see `MessageReader.pull`."""
        wanted, at = self._wanted, request.position.queue_offset
        most = min(MAX_RECORDS, max(1, MAX_EVALUATED // wanted.terms))
        if wanted.sql is None:
            most = min(most, request.max_messages)  # others with the same hash are rare
        found = self._backend.store.reader.pull(
            request.topic, request.queue_id, at,
            max_messages=most, max_bytes=request.max_bytes, limit_offset=limit,
            check_bodies=not request.bulk, codes=wanted.codes,
        )  # fmt: skip
        behind = found.last_offset
        if found.count:
            behind = keep_matching(found, wanted, request.max_messages)
        elif wanted.codes is not None and found.next_queue_offset > at:
            if found.status is ReadStatus.NO_NEW:
                found.status = ReadStatus.NO_MATCH  # up to a record that is not readable yet
        if found.status in (ReadStatus.FOUND, ReadStatus.NO_MATCH):
            if wanted.codes is not None:
                behind = self._offset_before(found.next_queue_offset)
            found.last_offset = behind
        return found

    def _offset_before(self, queue_offset: int) -> int | None:
        """Return the log offset of the record before a queue offset; None if it is not there."""
        units = self._backend.store.queues.read(self.topic, self.queue_id, queue_offset - 1, 1)
        return units[0].offset if units else None


def keep_matching(found: PullResult, wanted: MessageFilter, most: int) -> int | None:
    """Keep the first `most` records that match, of those that one look may decode; with none, the
    status is NO_MATCH.

    Returns the log offset of the last record that was looked at.
    """
    records, kept = found.records, list[bytes]()
    sizes: list[int] = []
    at, last, properties = 0, found.last_offset, 0
    for size in _plain(found.sizes):
        stop = at + size
        parts = find_parts(records, at, stop)
        if parts is not None:
            own = records[parts[8] : stop]
            if wanted.matches_record(parts[3], own):
                kept.append(records[at:stop])
                sizes.append(size)
            if wanted.sql is not None:
                properties += own.count(b"\x01")
            if (len(kept) == most or properties > MAX_PROPERTIES) and stop < len(records):
                (begin,) = _QUEUE_OFFSET.unpack_from(records, at)
                found.next_queue_offset = begin + offsets_taken(parts[3], own)
                last = parts[2]
                break
        at = stop
    found.records, found.sizes, found.count = b"".join(kept), sizes, len(kept)
    if not kept:
        found.status = ReadStatus.NO_MATCH
    return last


def _plain(sizes: Any) -> Sequence[int]:
    """Return a list or a numpy array of sizes as a list."""
    plain: list[int] = sizes if isinstance(sizes, list) else sizes.tolist()
    return plain
