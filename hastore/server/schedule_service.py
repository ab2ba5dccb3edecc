"""ScheduleMessageService: the master delivers delayed messages from the log, each once.

A message waits in the queue of its level (record/delays.py). When its time has come, this thread
appends it again under its own topic. That record says where the message waited. So delivery and
progress are one append: what a cut takes away is delivered again, by whoever is master then, and
what the log keeps is never delivered twice. A new master knows from its own log what was delivered
(store/derived/deliveries.py); no other node, and no file, is asked.

Messages of a level are delivered in the log's order. Replay wakes this thread when it has read
delayed messages; else it sleeps until the first message of a level is due.

**Clocks.** A message is due when the wall clock passes its store time plus the delay. If a clock
was set back, or the store time is another machine's with a wrong clock, a message is delivered at
the latest when its delay has passed since this master has seen it: late rather than never.

**Whose messages.** What a RocketMQ broker stored is its own to deliver, or was delivered before its
log was taken over. Such messages are those of epoch 0, unless they are taken over with it
(store/derived/taken_delays.py). If the history was shortened, it does not say any more where they
end: in that part, a message that is late by more than a day is taken for the broker's. In mode
dledger an entry of hastore has a CRC, and an entry of a broker has none: those before the record
that took them over are hastore's to deliver, later ones are a broker's that leads the group again.
While the broker's file is there and cannot be read, the levels in which it has messages wait.

**Levels** that the configuration has no more are delivered all the same, at the time that the level
had when the message was read.

**What waits.** Nothing is appended while the node refuses puts (no room, no quorum), or while a
put with `acks` all could not be confirmed. Under a SYNC_MASTER and in mode dledger the next batch
waits until the last one is confirmed.
"""

import errno
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hastore.clock import Clock
from hastore.errors import (
    CorruptRecordError,
    MessageIllegalError,
    NotStoredError,
    Status,
    StoreError,
)
from hastore.ha.master.group_transfer import Need, Outcome
from hastore.ha.rules.epochs import CLASSIC_EPOCH, FLOOR_EPOCH, classic_end
from hastore.record.delays import DELAYS_MS, MAX_LEVELS, SCHEDULE_TOPIC, deliver
from hastore.record.log_format import BODY_CRC_AT, CRC_BYTES
from hastore.record.properties import check_topic
from hastore.service import OnFailure, Service
from hastore.store.append.results import (
    DeliveriesIf,
    Guards,
    OwnIf,
    PutResult,
    PutResults,
    in_epoch,
)
from hastore.store.derived.consume_queue import ConsumeQueue, Unit
from hastore.store.log_store import LogStore

if TYPE_CHECKING:
    from hastore.server.take_over import TakeOver

log = logging.getLogger(__name__)

IDLE_S = 0.25  # a node that is no master looks so often whether it is
TICK_S = 1.0  # a master looks at the clock so often: it may be set
RETRY_S = 0.25  # after a refusal
_LOOK_MS = 5_000.0  # so often a file of a broker's that is damaged is looked at again
# So long a level waits for messages that cannot be read, or whose topic is damaged: the disk may
# recover, and the scrub gets damaged bytes from another node. For _NO_PATIENCE_MS after that,
# others are given up at once.
PATIENCE_MS = 60_000.0
_NO_PATIENCE_MS = 600_000.0
_BATCH_MESSAGES = 64
_BATCH_BYTES = 256 * 1024
_UNITS = 64
_REST_MAX_S = 0.05  # after a batch, if another follows
_NOWHERE = 1 << 62  # beyond any offset of a log
_DAY_MS = 86_400_000
_SEEN_MAX = 32  # notes per level of when this master saw which messages


class ScheduleBackend(Protocol):
    """What this thread needs of a node: NodeBackend or DLedgerBackend."""

    def put_encoded(self, payloads: Sequence[bytes], guards: Guards | None = None) -> PutResults:
        """Append through the write gate."""
        ...

    def writable_reason(self) -> str | None:
        """Return why puts are refused; None while the node is writable."""
        ...

    def can_confirm(self, sync_flush: bool) -> str | None:
        """Return why a put with `acks` all cannot be confirmed now; None if it can."""
        ...

    def default_acks_all(self) -> bool:
        """Whether a put without `acks` waits for other nodes."""
        ...

    def wait_limit_ms(self, need: Need) -> float:
        """Return the maximum wait of a put for `need`."""
        ...

    def epoch(self) -> int:
        """Return the last epoch of the node's history."""
        ...

    def history(self) -> Sequence[tuple[int, int]]:
        """Return the (epoch, start offset) entries, both rising."""
        ...


class Transfer(Protocol):
    """Tells when an append is confirmed: GroupTransferService."""

    def add(
        self,
        end_offset: int,
        deadline_ms: float,
        need: Need,
        done: Callable[[Outcome, str], None],
        *,
        epoch: int | None,
    ) -> None:
        """Call `done(outcome, level)` exactly once, from any thread."""
        ...


class _Unreadable(Exception):
    """A message cannot be read now, or not be meant as it is. It may be later."""

    def __init__(self, text: str, *, is_valid: bool) -> None:
        super().__init__(text)
        self.is_valid = is_valid  # by its CRC, which does not cover its properties


class _Due(NamedTuple):
    """A message whose time has come, as it is appended."""

    level: "_Level"
    unit: Unit
    record: bytes


class _Level:
    """The waiting messages of one level, as this master knows them."""

    def __init__(self, number: int, delay_ms: float) -> None:
        self.number = number
        self.delay_ms = delay_ms
        self.place = -1  # where the last message waited that was delivered, or given up
        self.at: int | None = None  # the next queue offset
        self.failing: int | None = None  # the queue offset of a message that cannot be read
        self._waits_ms: float | None = None  # since when the level waits for such messages
        self._ends: list[int] = []  # ends of the queue, rising
        self._seen_ms: list[float] = []  # when this master saw them

    def begin(self, place: int) -> None:
        """Begin an epoch; messages up to `place` were delivered."""
        self.place = place
        self.at = None
        self.failing = self._waits_ms = None
        self._ends.clear()
        self._seen_ms.clear()

    def fail(self, queue_offset: int, now_ms: float) -> bool:
        """Note that a message cannot be read; return whether the level waits for it any longer.

        Many may be damaged, so the patience is for all of them, and not for each.
        """
        waits_ms = self._waits_ms
        if waits_ms is None or now_ms - waits_ms >= PATIENCE_MS + _NO_PATIENCE_MS:
            waits_ms = self._waits_ms = now_ms
        self.failing = queue_offset
        return now_ms - waits_ms < PATIENCE_MS

    def pass_by(self, queue_offset: int, *, is_read: bool) -> None:
        """Go on behind a message. One that can be read at last renews the patience."""
        if is_read and self.failing == queue_offset:
            self._waits_ms = None
        self.failing = None
        self.at = queue_offset + 1

    def see(self, end: int, now_ms: float) -> None:
        """Note that the queue ends at queue offset `end`, at a monotonic time."""
        if self._ends and end <= self._ends[-1]:
            return
        # Notes that lie close together are one, with the later time: late rather than early.
        if len(self._ends) > 1 and now_ms - self._seen_ms[-2] < self.delay_ms / _SEEN_MAX:
            self._ends.pop()
            self._seen_ms.pop()
        self._ends.append(end)
        self._seen_ms.append(now_ms)
        if len(self._ends) > 2 * _SEEN_MAX:
            del self._ends[0], self._seen_ms[0]

    def latest_ms(self, queue_offset: int) -> float:
        """Return the monotonic time at which a message of the queue is due at the latest."""
        note = bisect_right(self._ends, queue_offset)
        seen_ms = self._seen_ms[note] if note < len(self._ends) else float("inf")
        return seen_ms + self.delay_ms


class ScheduleMessageService(Service):
    """Deliver due messages while this node is master. Any thread may call `wake`."""

    def __init__(
        self,
        store: LogStore,
        backend: ScheduleBackend,
        transfer: Transfer,
        clock: Clock,
        *,
        on_failure: OnFailure,
        delays_ms: Sequence[int] = DELAYS_MS,
        taken: Callable[[], Mapping[int, int] | None] = lambda: None,
        tables: "TakeOver | None" = None,
    ) -> None:
        """Prepare; `delays_ms` has the delay of each level, beginning with level 1.

        `taken()` returns which message of each level a broker would deliver next, by queue offset,
        if its delayed messages are taken over (server/take_over.py). It may raise StoreError or
        OSError. `tables` takes over what else a broker has beside its log.
        """
        super().__init__("ScheduleMessageService", on_failure=on_failure)
        self._store = store
        self._backend = backend
        self._transfer = transfer
        self._clock = clock
        known = [*delays_ms, *[float("inf")] * (MAX_LEVELS - len(delays_ms))]
        self._levels = [_Level(number, delay) for number, delay in enumerate(known, 1)]
        self._taken = taken
        self._tables = tables
        self._wakeup = threading.Event()
        self._epoch = 0  # in which `_levels` are valid; 0: in none
        self._begins: tuple[int, int] | None = None  # an epoch, and the log's end when it was seen
        self._first = 0  # the level that comes first in the next batch
        # Of each level the first message that waits, and since when; used by `waiting_from`.
        self._held: dict[int, tuple[int, float]] = {}
        self._unknown: str | None = None  # why it is not known what a broker has delivered
        self._untaken: frozenset[int] = frozenset()  # levels that wait until it is
        self._withheld = False  # and so does what else a broker has
        self._again_ms = 0.0
        self._pending = False  # a batch waits for its confirmation
        self._refused: str | None = None  # the last refusal that was logged
        self._uncounted: str | None = None  # why the last status could not count what waits
        self.delivered = 0
        self.lost = 0  # messages that could not be delivered

    def wake(self) -> None:
        """Look at the queues now: there are new messages, or the service stops."""
        self._wakeup.set()

    def run(self) -> None:
        """Deliver until stopped."""
        while not self.stopping.is_set():
            self._wakeup.clear()
            began_ms = self._clock.monotonic_ms()
            wait_s = self.turn()
            if wait_s > 0:
                self._wakeup.wait(wait_s)
            else:  # many are due: other threads have the interpreter for as long
                spent_s = (self._clock.monotonic_ms() - began_ms) / 1000.0
                self.stopping.wait(min(max(spent_s, 0.0), _REST_MAX_S))

    def turn(self) -> float:
        """Deliver a batch of what is due; return for how many seconds nothing more is due."""
        try:
            if not self._ready():
                return IDLE_S
            if self._pending:
                return TICK_S  # the confirmation wakes this thread
            due, wait_s = self._collect()
            if due:
                self._append(due)
                return 0.0
            return min(wait_s, TICK_S)
        except (NotStoredError, StoreError, OSError) as failure:
            self._epoch = 0  # what was appended is read from the log again
            self._note_refusal(str(failure))
            return RETRY_S

    # -- whose turn it is --------------------------------------------------------------------------

    def _ready(self) -> bool:
        """Whether this node may deliver now, and knows what was delivered."""
        backend = self._backend
        reason = backend.writable_reason()
        if reason is None and backend.default_acks_all():
            reason = backend.can_confirm(False)
        if reason is not None:
            self._epoch, self._begins = 0, None
            if self._tables is not None:
                self._tables.look(backend)
            return False
        epoch = backend.epoch()
        if epoch == self._epoch:
            if self._is_known_now():
                self._epoch, self._begins = 0, None  # take it over, and begin anew
                return False
            self._take_tables(epoch)
            return True
        # All deliveries of earlier epochs lie before the log's end as it is seen now. Those of this
        # epoch are made by this thread alone.
        if self._begins is None or self._begins[0] != epoch:
            self._begins = epoch, self._store.max_offset
        if not self._store.wait_dispatched(self._begins[1], RETRY_S):
            return False
        if self._take_over(epoch):
            self._begins = None  # and read it from the log
            return False
        self._take_tables(epoch)
        self._begin(epoch)
        return True

    def _take_over(self, epoch: int) -> bool:
        """Append which of a broker's messages were delivered; False if there is nothing to say."""
        floor = self._store.max_offset
        is_brokers: Callable[[int], bool] | None = self._is_brokers
        if not self._store.log.form.lead:
            classic = classic_end(self._backend.history())
            if classic is None:
                self._go_on()
                return False  # there was no broker, or it is not known where its log ends
            floor, is_brokers = classic, None
        try:
            offsets = self._taken()
        except (StoreError, OSError) as failure:
            self._hold_back(str(failure), floor, is_brokers)
            return False
        self._go_on()
        if offsets is None:
            return False
        tables = None if is_brokers is not None else self._tables
        again = tables is not None and not tables.is_taken(floor)
        marks = self._store.taken_delays(
            offsets, floor, self._clock.wall_ms(), again=again, is_brokers=is_brokers
        )
        if not marks:
            return False
        guard = OwnIf(in_epoch(self._backend.epoch, epoch))
        [results] = self._backend.put_encoded([b"".join(marks)], [guard])
        if any(result.status is not Status.PUT_OK for result in results):
            raise StoreError(f"a broker's delayed messages are not taken over: {results}")
        log.warning("took over the delayed messages of a RocketMQ broker in %d levels", len(marks))
        return True

    def _go_on(self) -> None:
        """Let nothing wait for a broker's file."""
        self._unknown, self._untaken, self._withheld = None, frozenset(), False

    def _hold_back(self, why: str, floor: int, is_brokers: Callable[[int], bool] | None) -> None:
        """Let levels with a broker's messages wait until it is known which it has delivered.

        Each delivery of hastore's is a mark, behind which nothing of the broker's is looked for.
        And so is the one of the tables, so it waits, too.
        """
        tables = None if is_brokers is not None else self._tables
        again = tables is not None and not tables.is_taken(floor)
        self._untaken = self._store.untaken_delays(floor, again=again, is_brokers=is_brokers)
        self._withheld = again and bool(self._untaken)
        self._again_ms = self._clock.monotonic_ms() + _LOOK_MS
        if not self._untaken:
            self._unknown = None
        elif why != self._unknown:
            self._unknown = why
            log.error("a broker's delayed messages are not delivered: %s", why)

    def _is_known_now(self) -> bool:
        """Whether what was not known of a broker's deliveries is known, or nobody asks any more."""
        now_ms = self._clock.monotonic_ms()
        if self._unknown is None or now_ms < self._again_ms:
            return False
        self._again_ms = now_ms + _LOOK_MS
        try:
            self._taken()
        except (StoreError, OSError):
            return False
        return True

    def _take_tables(self, epoch: int) -> None:
        tables = self._tables
        if tables is not None and not self._withheld and tables.is_due(epoch):
            tables.turn(self._backend, epoch)

    def _begin(self, epoch: int) -> None:
        places = self._store.deliveries.state.places
        for level in self._levels:
            level.begin(places.get(level.number, -1))
        self._epoch, self._begins = epoch, None

    def _next_own(self, level: int, queue: ConsumeQueue, place: int) -> int:
        """Return the queue offset of the first message beyond `place` that hastore delivers."""
        deliveries = self._store.deliveries
        if self._store.log.form.lead:
            return deliveries.next_own(queue, place, partial(self._is_own, level))
        if place >= 0:  # of hastore's own, or taken over: so are all behind it
            return deliveries.next_own(queue, place, lambda _unit: True)
        own = [entry for entry in self._backend.history() if entry[0] != CLASSIC_EPOCH]
        epoch, floor = own[0] if own else (CLASSIC_EPOCH, _NOWHERE)
        sure = floor
        if epoch == FLOOR_EPOCH:
            sure = own[1][1] if len(own) > 1 else _NOWHERE
        since_ms = self._clock.wall_ms() - _DAY_MS
        return deliveries.next_own(
            queue,
            max(place, floor - 1),
            lambda unit: unit.offset >= sure or unit.tags_code >= since_ms,
        )

    def _is_own(self, level: int, unit: Unit) -> bool:
        """Whether a message in a log of entries is hastore's to deliver: its own, or taken over."""
        taken = self._store.deliveries.taken_below(level)
        return unit.offset < taken or not self._is_brokers(unit.offset)

    def _is_brokers(self, offset: int) -> bool:
        """Whether the entry of a message has no CRC, as every one has that hastore wrote."""
        at = offset - self._store.log.form.lead + BODY_CRC_AT
        try:
            with self._store.view(at, CRC_BYTES) as raw:
                return not any(raw)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            return False  # whoever reads the message, meets the failure again

    def waiting_from(self, late_ms: float) -> int | None:
        """Return the offset from which on the log is needed for messages that wait, or None.

        A message that is late by more than `late_ms` is not waited for, if no message of its level
        was delivered for so long. Neither is one that has not been delivered `late_ms` after it was
        due at the latest, whatever the clocks say. Retention's thread of any node calls this.
        """
        now_ms, since_ms = self._clock.monotonic_ms(), self._clock.wall_ms() - int(late_ms)
        places, found = self._store.deliveries.state.places, []
        for number, queue in self._store.deliveries.levels():
            at = self._next_own(number, queue, places.get(number, -1))
            first = next(iter(queue.read_on(at, 1)), None)
            if first is None:
                self._held.pop(number, None)
                continue
            offset, began_ms = self._held.get(number, (-1, now_ms))
            if offset != first.offset:
                began_ms = now_ms
            self._held[number] = first.offset, began_ms
            if now_ms - began_ms >= late_ms + self._levels[number - 1].delay_ms:
                continue
            if now_ms - began_ms >= late_ms:
                first = self._store.deliveries.due_from(queue, at, since_ms)
            if first is not None:
                found.append(first.offset)
        return min(found, default=None)

    # -- what is due -------------------------------------------------------------------------------

    def _collect(self) -> tuple[list[_Due], float]:
        """Return the next messages that are due; if none is, the seconds until one may be."""
        found: list[_Due] = []
        wait_ms = float("inf")
        size = 0
        first = self._first
        for level in (*self._levels[first:], *self._levels[:first]):
            queue = self._store.queues.get(SCHEDULE_TOPIC, level.number - 1)
            if queue is None or level.number in self._untaken:
                continue
            level.see(queue.max_queue_offset, self._clock.monotonic_ms())
            at = self._next_of(level, queue)
            while at < queue.max_queue_offset:
                if len(found) >= _BATCH_MESSAGES or size >= _BATCH_BYTES:
                    self._first = level.number % len(self._levels)  # others come before it
                    return found, 0.0
                units = queue.read_on(at, _UNITS)
                if not units:  # only blanks: queue offsets that no message has
                    break
                taken = self._take(level, units, found, _BATCH_BYTES - size)
                size = sum(len(one.record) for one in found)
                at = level.at or 0
                if taken is not None:
                    wait_ms = min(wait_ms, taken)
                    break
        return found, wait_ms / 1000.0

    def _next_of(self, level: _Level, queue: ConsumeQueue) -> int:
        """Return the queue offset of a level's next message, and keep it in the level."""
        if level.at is None:
            level.at = self._next_own(level.number, queue, level.place)
        return level.at

    def _take(
        self, level: _Level, units: Sequence[Unit], found: list[_Due], room: int
    ) -> float | None:
        """Take the messages of `units` that are due; return the wait in ms if the next is not.

        `level.at` moves past those that were taken, or given up.
        """
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        for unit in units:
            wait_ms = min(unit.tags_code - wall_ms, level.latest_ms(unit.queue_offset) - now_ms)
            if wait_ms > 0:
                return wait_ms
            if len(found) >= _BATCH_MESSAGES or room <= 0:
                return None
            try:
                record = self._read(level, unit)
            except _Unreadable as why:
                reader = self._store.reader
                (reader.note_wrong if why.is_valid else reader.note_damage)(unit.offset)
                if level.fail(unit.queue_offset, now_ms):
                    self._note_refusal(str(why))
                    level.at = unit.queue_offset  # this level tries it again; the others go on
                    return RETRY_S * 1000.0
                self._give_up(unit, str(why))
                level.pass_by(unit.queue_offset, is_read=False)
                continue
            level.pass_by(unit.queue_offset, is_read=True)
            if record is not None:
                room -= len(record)
                found.append(_Due(level, unit, record))
        return None

    def _read(self, level: _Level, unit: Unit) -> bytes | None:
        """Return a message as it is delivered; None if it is not to be delivered.

        Raises _Unreadable if it is damaged, or lies in a bad sector; OSError, StoreError.
        """
        raw = None
        try:
            raw = self._store.reader.record_bytes(unit.offset, unit.size)
            if self._store.log.form.lead and not self._is_own(level.number, unit):
                return None  # a broker's, behind some of hastore's
            if raw is None:
                if unit.offset < self._store.min_offset:
                    return None  # retention has removed it
                raise CorruptRecordError(f"offset {unit.offset} holds no record")
            topic, queue_id, record = deliver(raw, level=level.number)
            check_topic(topic)  # as when it was put
            place = self._store.delivery_queue(topic, queue_id)
            if place != queue_id:
                # Its topic has fewer queues by now.
                record = deliver(raw, queue_id=place, level=level.number).record
            return record
        except (CorruptRecordError, MessageIllegalError, OSError) as failure:
            if isinstance(failure, OSError) and failure.errno != errno.EIO:
                raise
            is_valid = raw is not None and not isinstance(failure, OSError)
            raise _Unreadable(str(failure), is_valid=is_valid) from failure

    def _give_up(self, unit: Unit, reason: str) -> None:
        self.lost += 1
        log.error("the delayed message at offset %d is not delivered: %s", unit.offset, reason)

    # -- delivering --------------------------------------------------------------------------------

    def _append(self, due: Sequence[_Due]) -> None:
        """Append a batch; raises what a put raises, if nothing was appended or it is unknown."""
        epoch = self._epoch
        results = self._put([one.record for one in due], epoch)
        end = 0
        for one, result in zip(due, results, strict=True):
            if result.status is Status.PUT_OK:
                end = max(end, result.end_offset or 0)
                self.delivered += 1
            elif result.status in (Status.MESSAGE_ILLEGAL, Status.PROPERTIES_SIZE_EXCEEDED):
                self._give_up(one.unit, result.reason or result.status)
            else:  # the disk, or another epoch: read from the log what was delivered
                raise StoreError(f"delayed messages are not delivered: {result.reason}")
            one.level.place = max(one.level.place, one.unit.offset)
        self._refused = None
        if end and self._backend.default_acks_all():
            self._await(end, epoch)

    def _put(self, records: Sequence[bytes], epoch: int) -> list[PutResult]:
        guard = DeliveriesIf(in_epoch(self._backend.epoch, epoch))
        [results] = self._backend.put_encoded([b"".join(records)], [guard])
        return list(results)

    def _await(self, end: int, epoch: int) -> None:
        """Let the next batch wait until this one is confirmed, or its wait is over."""

        def done(outcome: Outcome, level: str) -> None:
            del outcome, level  # a batch that is not confirmed in time is in the log all the same
            self._pending = False
            self._wakeup.set()

        deadline_ms = self._clock.monotonic_ms() + self._backend.wait_limit_ms(Need.SLAVES)
        self._pending = True  # first: `done` may be called before `add` ends
        self._transfer.add(end, deadline_ms, Need.SLAVES, done, epoch=epoch)

    def _note_refusal(self, reason: str) -> None:
        if reason != self._refused:  # logged once, not for each attempt
            log.warning("delayed messages wait: %s", reason)
        self._refused = reason

    def status(self) -> dict[str, Any]:
        """Return for the status how many messages wait on this node, which reads a few units.

        `delivered` and `lost` count since the node's start.
        """
        places, levels = self._store.deliveries.state.places, {}
        try:
            for number, queue in self._store.deliveries.levels():
                at = self._next_own(number, queue, places.get(number, -1))
                levels[str(number)] = max(0, queue.max_queue_offset - at)
            self._uncounted = None
        except OSError as failure:
            self._uncounted = f"the delayed messages that wait cannot be counted: {failure}"
        return {
            "waiting": sum(levels.values()),
            "levels": {level: count for level, count in levels.items() if count},
            "delivered": self.delivered,
            "lost": self.lost,
        }

    def next_offsets(self, end: int) -> dict[int, int]:
        """Return for each level the queue offset of the next delivery, by the log below `end`.

        Any thread may call this; it reads from the disk. Raises StoreError, OSError.
        """
        deliveries = self._store.deliveries
        places = deliveries.places_below(end)
        return {
            level: self._next_own(level, queue, places.get(level, -1))
            for level, queue in deliveries.levels()
        }

    def problems(self) -> list[str]:
        """Return what an operator must look at."""
        found = [] if self._uncounted is None else [self._uncounted]
        unknown = self._unknown
        if self._epoch and unknown is not None:
            found.append(f"a broker's delayed messages are not delivered: {unknown}")
        if self.lost:
            found.append(
                f"{self.lost} delayed messages could not be delivered since the start; the log of"
                " this node names them"
            )
        found += [
            f"the delayed messages of level {level.number} wait: one cannot be read"
            for level in self._levels
            if self._epoch and level.failing is not None
        ]
        return found
