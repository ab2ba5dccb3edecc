"""Pulls: answered in turn, or parked until a record becomes readable or their wait ends.

    offered --its turn--> answered from memory, or parked, or read from the disk --> answered
                                                     |                                  or parked
                                     an event, or the end of its wait
                                                     |
                                                 its turn again

The turns go from connection to connection. No read of the API's thread waits for the disk: a pull
whose bytes are not in memory is done by a thread of ColdReads.

A request of another protocol takes the same way, as an OwnPull: it says itself what it finds.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hastore.bounded_log import SlowLines
from hastore.clock import Clock
from hastore.counters import ApiCounts
from hastore.errors import NotCachedError
from hastore.ha.rules.epochs import EpochStarts, Standing, epoch_of, epochs_of
from hastore.heap import keep_freed, share_one_heap
from hastore.protocol.api import Failed, Position, Pull, Pulled, PullStatus
from hastore.record.codec import decode_record
from hastore.record.layout import header_struct
from hastore.record.message_filter import compile_filter
from hastore.record.properties import MAX_CREATED_TOPIC
from hastore.server.api.backend import ApiBackend
from hastore.server.api.cold_reads import TOO_MANY, ColdReads, Turns
from hastore.server.api.connections import Connection
from hastore.server.api.filtered_pulls import FilteredPull, Read
from hastore.server.api.parked import NEVER, Asked, Found, OwnPull, Parked, ParkedPulls
from hastore.server.api.replies import Failures, master_of
from hastore.store.message_store import PullResult

log = logging.getLogger(__name__)

Answer = Callable[[Connection, Pulled | Failed, bytes | None], None]
Due = tuple[Connection, Asked | Parked]
MAX_PARKED = 10_000
MAX_DUE = 10_000
MAX_PARKED_OF_ONE = 1_024
LATELY_MS = 50.0  # after a parked pull, its reader's next pull is expected within this time
EXPIRE_MS = 5.0  # between checks for ended waits, if more than MANY pulls are parked
MANY = 100
UNREAD = "earlier replies are not read yet"
TOO_MANY_PARKED = "too many pulls wait for records"
KEPT_BYTES = 8 * 1024 * 1024  # of freed memory, kept for the next replies
_PHYSICAL_OFFSET = header_struct("physical_offset")
_STATUSES = {status.name: status for status in PullStatus}
_FOUND = PullStatus.FOUND


class PullHandler:
    """Answer pulls up to the readable offset; the API's lock is held in every call.

    Other threads call only `has_news` and `lately_parked`.
    """

    def __init__(
        self,
        backend: ApiBackend,
        clock: Clock,
        answer: Answer,
        has_room: Callable[[Connection], bool],
        failures: Failures,
        cold: ColdReads,
        counts: ApiCounts | None = None,
        slow_ms: float | None = None,
    ) -> None:
        self.counts = counts or ApiCounts()
        self._slow = SlowLines(log, slow_ms, clock=clock)
        self._backend = backend
        self._clock = clock
        self._answer = answer
        self._has_room = has_room
        self._failures = failures
        self._cold = cold
        self._due: Turns[Due] = Turns()
        self._waiting = ParkedPulls()
        self._looking = 0  # pulls under way that may be parked: the event may come meanwhile
        self._cuts = 0  # `cuts` of the queues at the last look
        self._history: EpochStarts = ()  # at the last look, if a pull waits for another one
        self._check_from_ms = float("-inf")  # no look for ended waits before this time
        self._parked_ms = float("-inf")  # when the last pull was parked
        share_one_heap()
        keep_freed(KEPT_BYTES)

    @property
    def parked(self) -> int:
        """The number of parked pulls."""
        return len(self._waiting)

    def filtered(self, connection: Connection, request: Pull) -> FilteredPull | None:
        """Return a pull with its filter; None if that means all. Raises UsageError for it."""
        assert request.filter is not None
        wanted = compile_filter(request.filter.kind, request.filter.expression)
        if wanted is None:
            return None

        def answer(reply: Pulled | Failed, records: bytes | None) -> None:
            if records and isinstance(reply, Pulled):
                self.counts.sent.add(request.topic, reply.count, len(records))
            self._answer(connection, reply, records)

        return FilteredPull(self._backend, request, wanted, self._pull_under, answer)

    def offer(self, connection: Connection, request: Asked) -> None:
        """Take a pull, which gets its turn; answer it at once if too many wait for theirs."""
        if len(self._due) < MAX_DUE:
            self._due.add(connection, (connection, request))
        else:
            self.answer_or_park(connection, request)

    @property
    def has_due(self) -> bool:
        """Whether a pull waits for its turn."""
        return len(self._due) > 0

    def next_due(self) -> Due:
        """Take the pull whose turn it is, for `answer_due`. Raises IndexError if there is none."""
        return self._due.pop()

    def answer_due(self, connection: Connection, due: Asked | Parked) -> None:
        """Answer a pull, park it, or let its bytes be read from the disk."""
        if connection.ended:
            return
        if isinstance(due, Parked):
            self._look_again(due)
        elif isinstance(due, Pull) or not self._answer_plain(connection, due):
            self.answer_or_park(connection, due)

    def note_time(self, connection: Connection, due: Asked | Parked, took_ms: float) -> None:
        """Log a look for records that was slow."""
        if took_ms > self._slow.slow_ms:
            asked = due.request if isinstance(due, Parked) else due
            self._slow.write(
                "api: slow pull of %s: %.0f ms for queue %d of %s",
                connection.peer, took_ms, asked.queue_id, asked.topic,
            )  # fmt: skip

    def _answer_plain(self, connection: Connection, request: OwnPull) -> bool:
        """Answer a pull at once, if all of its records are at hand: most pulls of a busy reader.

        False if `answer_or_park` must look; it also meets a failure again, and answers it.
        """
        if not self._has_room(connection):
            return False
        history = self._backend.history()
        try:
            with self._backend.store.reader.without_waiting():
                reply = request.find_plain()
        except Exception:  # as said above
            return False
        if reply is None or self._backend.history() != history:
            return False
        self.counts.pulls += 1
        request.respond(reply)
        return True

    def answer_or_park(self, connection: Connection, request: Asked) -> None:
        """Answer a pull, or park it when it may wait."""
        if not self._has_room(connection):
            self._reply(connection, request, Found(_busy(request)))
            return
        if (
            request.wait_ms == 0
            or self.parked >= MAX_PARKED
            or connection.parked >= MAX_PARKED_OF_ONE
        ):
            found = self._find(request)
            if found is not None and found.may_wait and request.wait_ms:
                if isinstance(request, OwnPull):  # such a client would ask again at once
                    found = Found(_busy(request, TOO_MANY_PARKED))
        else:
            self._watch(request)
            try:
                found = self._find(request)
                if found is not None and found.may_wait:
                    self._parked_ms = self._clock.monotonic_ms()
                    connection.parked += 1
                    parked = Parked(connection, request, self._parked_ms + request.wait_ms)
                    self._waiting.add(parked, found.needs_offset)
                    return
            finally:
                self._watched(request)
        if found is None:
            self._read_cold(connection, request)
        else:
            self._reply(connection, request, found)

    def lately_parked(self, now_ms: float) -> bool:
        """Whether a pull is parked, or was parked within LATELY_MS."""
        return self.parked > 0 or now_ms - self._parked_ms < LATELY_MS

    def has_news(self) -> bool:
        """Whether `try_parked` may have something to do. Any thread may ask, after an event."""
        waiting, store = self._waiting, self._backend.store
        if self._looking:
            return True
        if not waiting:
            return False
        grown = store.queues.grown
        return (
            (grown.has_any and store.readable_offset > grown.since)
            or store.readable_offset >= waiting.next_offset
            or grown.cuts != self._cuts
            or waiting.needs_history
        )

    def wait_ms(self, now_ms: float) -> float:
        """Return the time until the first parked pull's wait ends; infinity if there is none."""
        return max(0.0, max(self._waiting.next_deadline_ms, self._check_from_ms) - now_ms)

    def try_parked(self) -> None:
        """Let the parked pulls look again for which a record has become readable."""
        store, waiting = self._backend.store, self._waiting
        grown = store.queues.grown
        for key in grown.take():
            try:
                known = store.queues.queue_range(*key)
            except Exception as failure:  # it affects all pulls parked for this queue
                for each in waiting.grown(*key):
                    self._end(each, Found(self._failed(each.request, failure)))
                continue
            if known is not None:
                self._are_due(waiting.grown(*key, known[1]))
        if grown.cuts != self._cuts:  # other records may now come below the offsets waited for
            self._cuts = grown.cuts
            self._are_due(waiting.readable())
        self._are_due(waiting.readable(store.readable_offset))
        if waiting.needs_history:
            history = tuple(self._backend.history())
            if history != self._history:
                self._history = history
                self._are_due(waiting.other_history())

    def forget_ended(self, ended: Iterable[Connection]) -> None:
        """Drop the parked pulls of connections that have ended."""
        for connection in ended:
            for parked in self._waiting.of(connection):
                self._forget(parked)

    def end_expired(self, now: float) -> None:
        """Let the parked pulls be answered whose wait has ended."""
        if now < self._waiting.next_deadline_ms or now < self._check_from_ms:
            return
        self._are_due(self._waiting.expired(now))
        if self.parked > MANY:
            self._check_from_ms = now + EXPIRE_MS

    def _are_due(self, taken: list[Parked]) -> None:
        for parked in taken:
            self._due.add(parked.connection, (parked.connection, parked))

    def _watch(self, request: Asked) -> None:
        """Miss no record of a pull's queue from here on, if the pull waits for it afterwards."""
        self._looking += 1
        self._backend.store.queues.grown.watch((request.topic, request.queue_id))

    def _watched(self, request: Asked) -> None:
        """Undo `_watch`, unless a pull waits for the queue; call this whatever happens."""
        self._looking -= 1
        key = request.topic, request.queue_id
        if not self._waiting.waits_in(*key):
            self._backend.store.queues.grown.unwatch(key)

    def _look_again(self, parked: Parked) -> None:
        """Answer a parked pull, unless nothing is new for it and its wait has not ended."""
        found = self._refusal(parked.connection, parked.request)
        if found is None:
            self._watch(parked.request)
            try:
                found = self._find(parked.request)
                if found is None:
                    self._read_cold(parked.connection, parked.request, parked)
                    return
                if found.may_wait and not parked.is_over:
                    self._waiting.add(parked, found.needs_offset)
                    return
            finally:
                self._watched(parked.request)
        self._end(parked, found)

    def _refusal(self, connection: Connection, request: Asked) -> Found | None:
        """Return why a pull that has waited is not answered; None if it is."""
        if not self._has_room(connection):
            return Found(_busy(request))
        outdated = self._backend.outdated()
        if outdated is not None:
            return Found(Failed(request.rid, "SERVICE_NOT_AVAILABLE", outdated))
        return None

    def _read_cold(
        self, connection: Connection, request: Asked, parked: Parked | None = None
    ) -> None:
        """Let another thread do a pull whose bytes are on the disk only."""

        begun_ms = self._clock.monotonic_ms()

        def then(result: Found | Exception) -> None:
            took_ms = self._clock.monotonic_ms() - begun_ms
            self.counts.cold_pull_times.observe(took_ms)
            self.note_time(connection, request, took_ms)
            self._finish_cold(connection, request, parked, result)

        def is_wanted() -> bool:
            return not connection.ended

        read = partial(self._pull_cold, connection, request)
        if not self._cold.accept(connection, read, then, is_wanted):
            busy = Found(_busy(request, TOO_MANY))
            self._conclude(connection, request, parked, busy)

    def _pull_cold(self, connection: Connection, request: Asked) -> Found:
        """Read records, in another thread; nothing if the client has not read what it has.

        Room is looked at without the lock: who finds too much is refused by `_finish_cold`.
        """
        return self._pull(request) if self._has_room(connection) else Found(_busy(request))

    def _finish_cold(
        self,
        connection: Connection,
        request: Asked,
        parked: Parked | None,
        result: Found | Exception,
    ) -> None:
        """Answer a pull that another thread has done; one that found nothing looks again."""
        if connection.ended:
            return
        if isinstance(result, Exception):
            result = Found(self._failed(request, result))
        if not result.may_wait:
            found = self._refusal(connection, request) or result
            self._conclude(connection, request, parked, found)
        elif parked is not None and not parked.is_over:
            self._look_again(parked)
        elif parked is None and request.wait_ms > 0:
            self.answer_or_park(connection, request)
        else:
            self._conclude(connection, request, parked, result)

    def _conclude(
        self, connection: Connection, request: Asked, parked: Parked | None, found: Found
    ) -> None:
        if parked is not None:
            self._end(parked, found)
        else:
            self._reply(connection, request, found)

    def _end(self, parked: Parked, found: Found) -> None:
        self._forget(parked)
        self._reply(parked.connection, parked.request, found)

    def _reply(self, connection: Connection, request: Asked, found: Found) -> None:
        counts, reply, records = self.counts, found.reply, found.records
        counts.pulls += 1
        if isinstance(reply, Failed):
            counts.refusals.add(reply.status)
        if isinstance(request, Pull):
            if records:
                counts.sent.add(request.topic, reply.count, len(records))
            self._answer(connection, reply, records)
        else:
            request.respond(found.reply)

    def _forget(self, parked: Parked) -> None:
        self._waiting.end(parked)
        parked.connection.parked -= 1
        key = parked.request.topic, parked.request.queue_id
        if not self._waiting.waits_in(*key):
            self._backend.store.queues.grown.unwatch(key)

    def _find(self, request: Asked) -> Found | None:
        """Return the answer to a pull as of now; None if it must be read from the disk.

        A failure affects this pull only.
        """
        try:
            with self._backend.store.reader.without_waiting():
                return self._pull(request)
        except NotCachedError:
            return None
        except Exception as failure:
            return Found(self._failed(request, failure))

    def _failed(self, request: Asked, failure: Exception) -> Failed:
        what = f"a pull of queue {request.queue_id} of {request.topic!r}"
        status, reason = self._failures.note(what, failure)
        return Failed(request.rid, status, reason, master_of(self._backend, self._failures))

    def _pull(self, request: Asked) -> Found:
        """Read records, in any thread.

        If the epoch history changed during the read, read again: the records may have been cut
        away, and the new history does not cover them.
        """
        history = self._backend.history()
        while True:
            if isinstance(request, Pull):
                found = self._pull_under(history, request)
            else:
                found = request.find()
            before, history = history, self._backend.history()
            if history == before:
                return found

    def _pull_under(self, history: EpochStarts, request: Pull, read: Read | None = None) -> Found:
        store = self._backend.store
        limit = store.readable_offset
        place = request.position
        if place.epoch is not None and place.offset is not None:
            standing, at = self._backend.standing(history, place.epoch, place.offset)
            if standing is Standing.LOST:
                return Found(self._lost(history, request, at))
            if standing is Standing.BEHIND:
                needs = place.offset + 1 if place.offset >= limit else NEVER
                reply = Pulled(request.rid, PullStatus.NO_NEW, place.queue_offset)
                return Found(reply, needs_offset=needs, may_wait=True)
        replayed = (
            store.dispatched_offset
        )  # before the read: queues have at least the records below
        if read is not None:
            found = read(request, limit)
        else:
            found = store.reader.pull(
                request.topic,
                request.queue_id,
                place.queue_offset,
                max_messages=request.max_messages,
                max_bytes=request.max_bytes,
                limit_offset=limit,
                check_bodies=not request.bulk,
            )
        status = _FOUND if found.count else _STATUSES[found.status.name]
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
            self._epochs(history, found),
            None,
            found.last_offset,
            _packed(found.sizes) if request.bulk else b"",
        )
        if found.count:
            return Found(reply, found.records)
        # A pull of a queue whose topic has too long a name would wait for ever.
        may_wait = status is PullStatus.NO_NEW or (
            status is PullStatus.NO_SUCH_QUEUE and len(request.topic) <= MAX_CREATED_TOPIC
        )
        return Found(reply, None, found.needs_offset, may_wait)

    def _epochs(self, history: EpochStarts, found: PullResult) -> list[tuple[int, int]]:
        """Return the (epoch, start) entries from the first of these records to the log's end.

        With a filter that none matches: from the last record that was looked at.
        """
        if found.count:
            (first,) = _PHYSICAL_OFFSET.unpack_from(found.records)
        elif found.last_offset is not None:
            first = found.last_offset
        else:
            return []
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


def _busy(request: Asked, why: str = UNREAD) -> Failed:
    return Failed(request.rid, "BUSY", why)
