"""Pulls: answered at once, or parked until a record becomes readable or their wait ends."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hastore.clock import Clock
from hastore.ha.rules.epochs import EpochStarts, Standing, check_position, epoch_of, epochs_of
from hastore.heap import keep_freed
from hastore.protocol.api import Failed, Position, Pull, Pulled, PullStatus
from hastore.record.codec import decode_record
from hastore.record.layout import header_struct
from hastore.record.properties import MAX_CREATED_TOPIC
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.replies import Failures, master_of

Answer = Callable[[Connection, Pulled | Failed, bytes | None], None]
MAX_PARKED = 10_000
MAX_PARKED_OF_ONE = 1_024
LATELY_MS = 50.0  # after a parked pull, its reader's next pull is expected within this time
EXPIRE_MS = 5.0  # between checks for ended waits, if more than MANY pulls are parked
MANY = 100
UNREAD = "earlier replies are not read yet"
KEPT_BYTES = 8 * 1024 * 1024  # of freed memory, kept for the next replies
_PHYSICAL_OFFSET = header_struct("physical_offset")
_STATUSES = {status.name: status for status in PullStatus}


@dataclass(slots=True)
class _Parked:
    connection: Connection
    request: Pull
    deadline_ms: float


class PullHandler:
    """Answer pulls up to the readable offset; the API's lock is held in every call."""

    def __init__(
        self,
        backend: ApiBackend,
        clock: Clock,
        answer: Answer,
        has_room: Callable[[Connection], bool],
        failures: Failures,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._answer = answer
        self._has_room = has_room
        self._failures = failures
        self._parked: dict[tuple[str, int], list[_Parked]] = {}
        self._next_deadline_ms = float("inf")
        self.parked = 0
        self._parked_ms = float("-inf")  # when the last pull was parked
        keep_freed(KEPT_BYTES)

    def answer_or_park(self, connection: Connection, request: Pull) -> None:
        """Answer a pull, or park it when it may wait."""
        if not self._has_room(connection):
            self._answer(connection, _busy(request), None)
            return
        # The pull is counted before the read, so that a record that becomes readable during the
        # read wakes the loop.
        self.parked += 1
        reply: Pulled | Failed
        try:
            reply, records = self._pull(request)
        except Exception as failure:  # this pull's failure; the others go on
            reply, records = self._failed(request, failure), None
        if (
            reply.status not in (PullStatus.NO_NEW, PullStatus.NO_SUCH_QUEUE)
            or request.wait_ms == 0
            or (  # no topic can get so long a name: waiting would be in vain
                reply.status is PullStatus.NO_SUCH_QUEUE and len(request.topic) > MAX_CREATED_TOPIC
            )
            or self.parked > MAX_PARKED
            or connection.parked >= MAX_PARKED_OF_ONE
        ):
            self.parked -= 1
            self._answer(connection, reply, records)
            return
        deadline_ms = self._clock.monotonic_ms() + request.wait_ms
        key = (request.topic, request.queue_id)
        self._parked.setdefault(key, []).append(_Parked(connection, request, deadline_ms))
        self._next_deadline_ms = min(self._next_deadline_ms, deadline_ms)
        connection.parked += 1
        self._parked_ms = deadline_ms - request.wait_ms

    def lately_parked(self, now_ms: float) -> bool:
        """Whether a pull is parked, or was parked within LATELY_MS."""
        return self.parked > 0 or now_ms - self._parked_ms < LATELY_MS

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the first parked pull's wait ends; infinity if there is none."""
        return max(0.0, self._next_deadline_ms - now_ms) if self.parked else float("inf")

    def try_parked(self) -> None:
        """Answer the parked pulls for which a record has become readable."""
        for key in list(self._parked):
            waiting = self._parked[key]
            try:
                known = self._backend.store.queues.queue_range(*key)
            except Exception as failure:  # it affects all pulls parked for this queue
                for each in waiting:
                    self._end(each, self._failed(each.request, failure), None)
                del self._parked[key]
                continue
            if known is None:
                continue
            kept = []
            for each in waiting:
                ready = known[1] > each.request.position.queue_offset or each.connection.ended
                if not (ready and self._answer_if_new(each)):
                    kept.append(each)
            self._keep(key, kept)

    def forget_ended(self) -> None:
        """Drop the parked pulls of connections that have ended."""
        for key in list(self._parked):
            kept = [each for each in self._parked[key] if not each.connection.ended]
            self.parked -= len(self._parked[key]) - len(kept)
            self._keep(key, kept)

    def end_expired(self, now: float) -> None:
        """Answer the parked pulls whose wait has ended."""
        if now < self._next_deadline_ms:
            return
        self._next_deadline_ms = float("inf")
        for key in list(self._parked):
            kept = []
            for each in self._parked[key]:
                if each.deadline_ms <= now:
                    self._end(each, *self._reply_now(each))
                else:
                    kept.append(each)
                    self._next_deadline_ms = min(self._next_deadline_ms, each.deadline_ms)
            self._keep(key, kept)
        if self.parked > MANY:
            self._next_deadline_ms = max(self._next_deadline_ms, now + EXPIRE_MS)

    def _keep(self, key: tuple[str, int], kept: list[_Parked]) -> None:
        if kept:
            self._parked[key] = kept
        else:
            del self._parked[key]

    def _answer_if_new(self, parked: _Parked) -> bool:
        """Answer a parked pull unless nothing is new; return whether it was answered."""
        reply, records = self._reply_now(parked)
        if reply.status in (PullStatus.NO_NEW, PullStatus.NO_SUCH_QUEUE):
            return False
        self._end(parked, reply, records)
        return True

    def _reply_now(self, parked: _Parked) -> tuple[Pulled | Failed, bytes | None]:
        """Return the answer of a parked pull as of now; a failure affects this pull only."""
        if parked.connection.ended or not self._has_room(parked.connection):
            return _busy(parked.request), None
        outdated = self._backend.outdated()
        if outdated is not None:
            return Failed(parked.request.rid, "SERVICE_NOT_AVAILABLE", outdated), None
        try:
            return self._pull(parked.request)
        except Exception as failure:
            return self._failed(parked.request, failure), None

    def _end(self, parked: _Parked, reply: Pulled | Failed, records: bytes | None) -> None:
        self.parked -= 1
        parked.connection.parked -= 1
        self._answer(parked.connection, reply, records)  # dropped if the connection has ended

    def _failed(self, request: Pull, failure: Exception) -> Failed:
        what = f"a pull of queue {request.queue_id} of {request.topic!r}"
        status, reason = self._failures.note(what, failure)
        return Failed(request.rid, status, reason, master_of(self._backend, self._failures))

    def _pull(self, request: Pull) -> tuple[Pulled, bytes | None]:
        """Read records. If the epoch history changed during the read, read again: the records may
        have been cut away, and the new history does not cover them.
        """
        history = self._backend.history()
        while True:
            found = self._pull_under(history, request)
            before, history = history, self._backend.history()
            if history == before:
                return found

    def _pull_under(self, history: EpochStarts, request: Pull) -> tuple[Pulled, bytes | None]:
        store = self._backend.store
        limit = store.readable_offset
        place = request.position
        if place.epoch is not None and place.offset is not None:
            standing, at = check_position(history, store.max_offset, place.epoch, place.offset)
            if standing is Standing.LOST:
                return self._lost(history, request, at), None
            if standing is Standing.BEHIND:
                return Pulled(request.rid, PullStatus.NO_NEW, place.queue_offset), None
        replayed = (
            store.dispatched_offset
        )  # before the read: queues have at least the records below
        found = store.reader.pull(
            request.topic,
            request.queue_id,
            place.queue_offset,
            max_messages=request.max_messages,
            max_bytes=request.max_bytes,
            limit_offset=limit,
            check_bodies=not request.bulk,
        )
        status = _STATUSES[found.status.name]
        if status is PullStatus.OFFSET_TOO_LARGE:
            if place.offset is not None and place.offset >= replayed:
                status = PullStatus.NO_NEW  # the record before it is here, but not replayed yet
        elif status is PullStatus.NO_SUCH_QUEUE and place.queue_offset > 0:
            before = store.max_offset - 1 if place.offset is None else place.offset
            if before < replayed:  # the queue is empty, and does not become that long by replay
                status = PullStatus.OFFSET_TOO_LARGE
        reply = Pulled(
            request.rid,
            status,
            found.next_queue_offset,
            found.min_queue_offset,
            found.max_queue_offset,
            found.count,
            self._epochs(history, found.records) if found.count else [],
            None,
            found.last_offset,
            _packed(found.sizes) if request.bulk else b"",
        )
        return reply, (found.records if found.count else None)

    def _epochs(self, history: EpochStarts, records: bytes) -> list[tuple[int, int]]:
        """Return the (epoch, start) entries from the first of these records to the log's end."""
        (first,) = _PHYSICAL_OFFSET.unpack_from(records)
        return epochs_of(history, first, self._backend.store.max_offset)

    def _lost(self, history: EpochStarts, request: Pull, common: int) -> Pulled:
        """Answer with the position after the queue's last record below the common point."""
        store = self._backend.store
        known = store.queues.queue_range(request.topic, request.queue_id) or (0, 0)
        low, high = known[0], min(known[1], request.position.queue_offset)
        before: tuple[int, int] | None = None
        while low < high:  # find the last record that starts below the common point
            middle = (low + high) // 2
            offset = self._offset_of(request, middle)
            if offset is not None and offset < common:
                low, before = middle + 1, (middle, offset)
            else:
                high = middle
        place = Position(known[0])
        if before is not None:
            epoch = epoch_of(history, before[1])
            place = Position(before[0] + 1, epoch, before[1])
        return Pulled(
            request.rid, PullStatus.HISTORY_DIFFERS, place.queue_offset, known[0], known[1], 0, [],
            place,
        )  # fmt: skip

    def _offset_of(self, request: Pull, queue_offset: int) -> int | None:
        found = self._backend.store.reader.pull(
            request.topic, request.queue_id, queue_offset,
            max_messages=1, max_bytes=1, limit_offset=self._backend.store.max_offset,
        )  # fmt: skip
        return decode_record(found.records).physical_offset if found.count else None


def _packed(sizes: Any) -> bytes:
    """Return each size as 4 bytes, big-endian; `sizes` is a list or a numpy array."""
    if isinstance(sizes, list):
        return struct.pack(f">{len(sizes)}i", *sizes)
    packed: bytes = sizes.astype(">i4").tobytes()
    return packed


def _busy(request: Pull) -> Failed:
    return Failed(request.rid, "BUSY", UNREAD)
