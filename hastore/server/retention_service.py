"""RetentionService: the thread that removes old files of the log, and what it must keep.

`Holds` says from which offset on the log is kept, for slaves and for unconfirmed bytes, and
`TransactionHold` for open transactions. Before the thread removes a file, it saves the positions
committed in that file (KeptPositions); on a master it also appends them again, with the changes of
topics, and states the next offsets of quiet queues (QueueEndsWriter). Any thread may call
`problems` and `keeps_files_for`.

A master makes a statement of next offsets (record/queue_ends.py) for each file of the log, once the
file has begun: it covers the log before that file. So the log states the offsets before any node's
retention may remove the last records of a queue, and retention finds room also if the disk is full.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hastore.clock import Clock
from hastore.config.model import RemotingConfig, RetentionConfig
from hastore.errors import NotStoredError, Status, StoreError, StoreFullError
from hastore.record.queue_ends import PART_BYTES, QueueNext, build_queue_ends
from hastore.record.topic_records import build_change, size_of_records
from hastore.record.transactions import Half
from hastore.server.kept_positions import KeptPositions
from hastore.service import OnFailure, Service
from hastore.store.log_store import LogStore
from hastore.store.message_store import PutResult

log = logging.getLogger(__name__)

_RESERVE_BYTES_MIN = 1 << 20  # for positions, at most; or, if that is more,
_RESERVE_SHARE = 16  # this part of a log file
CONFIRMED = "confirmation"
QUEUES = "queue offsets"
Put = Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]]

_SHARE = 4  # a statement takes at most this part of a log file, or it would fill the log
_PART_SHARE = 8  # and a record of it this part
_PUT_BYTES = 64 * 1024  # per append, so that clients' puts get their turn
_AT_ONCE = 64  # queues, whose last units are read from the disk
_REPLAY_S = 1.0


@dataclass(slots=True)
class _Holder:
    offset: int
    moved_ms: float  # when the offset last rose, or was at the end of the log
    seen_ms: float  # when `held_from` last got the holder


class _Waiting(NamedTuple):
    """Files below `first` go once the log is confirmed up to `log_end`: what they had is there."""

    first: int
    log_end: int


class Holds:
    """Track how long each holder of files has made no progress.

    A holder is a linked slave, by its name, CONFIRMED or QUEUES; it needs the log from its offset
    on.
    After `hold_ms` without progress its hold lapses, until its offset moves again. A slave that
    reconnects within `hold_ms` does not reset its time without progress.
    """

    def __init__(self, hold_ms: float) -> None:
        self.hold_ms = hold_ms
        self._holders: dict[str, _Holder] = {}
        self.lapsed: Mapping[str, int] = {}  # holder -> offset; replaced, never changed

    def held_from(self, now_ms: float, end_offset: int, offsets: Mapping[str, int]) -> int | None:
        """Return the offset from which the log must be kept; None if no hold is in force.

        `offsets` has each holder's offset at `now_ms`; the log ends at `end_offset`.
        """
        lapsed: dict[str, int] = {}
        for name, offset in offsets.items():
            holder = self._holders.get(name)
            if holder is None:
                holder = self._holders[name] = _Holder(offset, now_ms, now_ms)
            elif offset > holder.offset or offset >= end_offset:
                holder.moved_ms = now_ms
            holder.offset, holder.seen_ms = offset, now_ms
            if offset < end_offset and now_ms - holder.moved_ms >= self.hold_ms:
                lapsed[name] = offset
        for name in [n for n, h in self._holders.items() if now_ms - h.seen_ms > self.hold_ms]:
            del self._holders[name]
        before, self.lapsed = self.lapsed, lapsed
        for name in lapsed.keys() - before.keys():
            log.warning("%s", self._lapse_text(name, lapsed[name]))
        for name in before.keys() & offsets.keys() - lapsed.keys():
            log.info("retention keeps files for %s again, from %d on", name, offsets[name])
        return min((at for name, at in offsets.items() if name not in lapsed), default=None)

    def _lapse_text(self, name: str, offset: int) -> str:
        """Return why a hold has lapsed, and what retention may now remove."""
        seconds = self.hold_ms / 1000.0
        if name == CONFIRMED:
            return (
                f"nothing was confirmed for {seconds:g} s (retention.hold): retention may remove "
                f"bytes from {offset} on that no slave has confirmed"
            )
        if name == QUEUES:
            return (
                f"the master has not stated the next offsets of quiet queues for {seconds:g} s"
                f" (retention.hold): retention may remove their last messages, from {offset} on; if"
                " a node without its own queues then becomes master, their offsets begin again at"
                " 0; look at the master's problems and its version of hastore"
            )
        return (
            f"{name} received nothing for {seconds:g} s (retention.hold): retention may remove the "
            f"files that it needs, from {offset} on; the slave then needs a resync"
        )

    def problems(self) -> list[str]:
        """Return a text for each lapsed hold, for the status."""
        return [self._lapse_text(name, offset) for name, offset in self.lapsed.items()]


class RetentionService(Service):
    """Delete whole old files by age and size.

    A master keeps the files that a linked slave has not reported. Every node, also a slave, keeps
    the files that it does not know to be confirmed, and those of which the log does not state the
    ends of quiet queues. Each hold lapses after `retention.hold` without progress.
    """

    def __init__(
        self,
        config: RetentionConfig,
        store: LogStore,
        kept: KeptPositions,
        clock: Clock,
        *,
        open_epoch: Callable[[], int],
        confirms: Callable[[], bool],
        needed_from: Callable[[], dict[str, int]],
        put: Callable[[Sequence[bytes]], Sequence[Sequence[PutResult]]],
        on_failure: OnFailure,
        keep_unconfirmed: bool = False,
        before_removal: Callable[[int], None] | None = None,
        waiting_from: Callable[[float], int | None] = lambda _late_ms: None,
    ) -> None:
        """Prepare; this service's thread calls the functions, without a lock.

        `open_epoch` returns the epoch in which this node takes writes, 0 if in none; `confirms`,
        whether its log is ever confirmed; `needed_from`, from which offset on each node that
        receives the log needs it, by its name. `put` appends through the write gate, and takes
        the records that no client may put (`own_records`). With `keep_unconfirmed` the log is kept
        from what is not confirmed on, and what was rewritten or stated is waited for; that never
        lapses. `before_removal` is called with the log's new first offset before files are
        removed. `waiting_from(late_ms)` returns where the first delayed message is that was not
        delivered, and is not `late_ms` late or more; None without one.
        """
        super().__init__("RetentionService", on_failure=on_failure)
        self.kept = kept  # the positions of removed records
        self._store = store
        self._clock = clock
        self._open_epoch = open_epoch
        self._confirms = confirms
        self._needed_from = needed_from
        self._put = put
        self._keep_unconfirmed = keep_unconfirmed
        self._before_removal = before_removal
        self._waiting_from = waiting_from
        self._ends = QueueEndsWriter(store, clock)
        self._no_room = False  # the disk is too full for a statement of the ends of queues
        self._failure: str | None = None  # why the last look failed, for the status
        self._no_reserve: str | None = None  # why there is no reserve for a full disk
        self._waiting: _Waiting | None = None
        self._crowded = False  # rewritten positions would push each other out of the log
        self._many_topics = 0  # rewritten topics would push each other out of the log
        self._worked_ms = 0.0  # when the current piece of work began
        self._config = config
        self._wakeup = threading.Event()  # the configuration has changed, or the service stops
        self._holds = Holds(config.hold_ms)

    def configure(self, config: RetentionConfig) -> None:
        """Follow a changed file: from now on these settings count, and a look follows at once.

        Any thread may call this. A hold that has lapsed is in force again if `hold` is longer now.
        """
        if config == self._config:
            return
        self._config = config
        self._holds.hold_ms = config.hold_ms
        self._store.retention.configure(config)
        self._wakeup.set()

    def wake(self) -> None:
        """Wake the thread from its wait between two looks."""
        self._wakeup.set()

    @property
    def _interval_s(self) -> float:
        return self._config.check_interval_ms / 1000.0

    @property
    def _deletes(self) -> bool:
        return self._config.max_age_ms is not None or self._config.max_size_bytes is not None

    def run(self) -> None:
        """Remove expired files every interval until stopped."""
        self._keep_reserve()
        while not self.stopping.is_set():
            self._wakeup.wait(self._interval_s)
            self._wakeup.clear()
            if not self.stopping.is_set():
                self.look()

    def look(self) -> None:
        """Remove the files that may go; a failure is a problem, and the next look tries again."""
        try:
            self.remove_expired()
        except (OSError, StoreError) as error:
            log.error("retention could not delete: %s", error)
            self._failure = (
                f"retention could not remove files: {error}; it tries again each"
                f" {self._interval_s:g} s (retention.check_interval); make room on the store's"
                " disk, for example in rescued/, or look whether it works"
            )
        else:
            self._failure = None
        self._keep_reserve()

    def _keep_reserve(self) -> None:
        """Have room for what must be written before a file is removed from a full disk."""
        store = self._store
        try:
            # Also without a limit of age or size: whoever sets one may do so on a full disk.
            most = max(_RESERVE_BYTES_MIN, store.file_size // _RESERVE_SHARE)
            positions = min(most, self.kept.file_bytes(store))
            store.keep_reserve([store.retention.noted_bytes(), _RESERVE_BYTES_MIN // 4, positions])
        except (OSError, StoreError) as error:
            if self._no_reserve is None:
                log.warning("the reserve for a full disk is not complete: %s", error)
            self._no_reserve = (
                f"the reserve for a full disk is not complete: {error}; make room: on a full disk"
                " retention, votes and promises may find none"
            )
        else:
            self._no_reserve = None

    def remove_expired(self) -> int:
        """Remove the files that may go now; return their number. Raises StoreError, OSError."""
        self.state_queue_ends()
        cuts = self._store.times_cut
        end = self._expired_end()
        if end is not None and self._waiting is not None:
            end = min(end, self._waiting.first)
        if end is not None and not self.kept.gather(self._store, end, self._pause):
            return 0
        first = self._store.min_offset if end is None else end
        self._rewrite_positions(first)
        self._rewrite_topics(first)
        confirmed = self._store.confirmed_offset
        if not self._positions_confirmed(confirmed):
            return 0
        if end is not None and self._before_removal is not None:
            self._before_removal(end)
        # Only files below `first` are removed: their positions were gathered. This is called even
        # if nothing expired, because an earlier attempt may have left files on the disk. After a
        # cut or a resync `first` is a place in another log, of which nothing was gathered.
        removed = self._store.retention.delete_expired(
            first, lambda: self._store.times_cut == cuts
        )
        if removed:
            log.info("retention removed %d files; the log starts at %d", removed, first)
            if self._confirms() and first > confirmed:
                log.warning(
                    "retention removed bytes [%d, %d) that were not confirmed", confirmed, first
                )
        return removed

    def state_queue_ends(self) -> None:
        """As master, state the next offsets of quiet queues, if the log lacks them.

        A failure of the append is logged, and the next call tries again. Raises OSError.
        """
        self._worked_ms = self._clock.monotonic_ms()
        self._no_room = False
        if not self._open_epoch():
            return
        try:
            self._ends.state(self._put, self._pause)
        except (NotStoredError, StoreError) as error:
            # On a full disk the files are removed all the same, to make room. This node's queues
            # keep the offsets, and the log gets them once there is room.
            self._no_room = isinstance(error, StoreFullError)
            log.warning("the next offsets of quiet queues are not stated yet: %s", error)

    def _rewrite_positions(self, first_offset: int) -> None:
        """As master, append the positions that the log lacks from `first_offset` on.

        A failure is logged, and the next `remove_expired` tries again.
        """
        epoch, max_bytes = self._open_epoch(), self._config.max_size_bytes
        self._crowded = max_bytes is not None and self.kept.memory_bytes > max_bytes // 2
        if not epoch or self._crowded:
            return
        try:
            count = self.kept.rewrite(
                epoch, self._store, first_offset, self._put, self._clock.wall_ms(), self._pause
            )
        except (NotStoredError, StoreError, OSError) as error:
            # The files are removed all the same, because the disk may be full.
            log.warning("consumers' positions are not rewritten yet: %s", error)
        else:
            if count:
                self._waiting = _Waiting(first_offset, self._store.max_offset)
                log.info("%d records of consumers' positions were rewritten", count)

    def _rewrite_topics(self, first_offset: int) -> None:
        """As master, append the changes of topics that the log lacks from `first_offset` on.

        A failure is logged, and the next `remove_expired` tries again. Meanwhile each node has
        saved what its log said (TopicTable.save_before).
        """
        if not self._open_epoch():
            return
        changes = self._store.topic_table.lacking(first_offset)
        max_bytes = self._config.max_size_bytes
        self._many_topics = 0
        if max_bytes is not None and size_of_records(changes) > max_bytes // 4:
            self._many_topics = len(changes)
            return
        now_ms = self._clock.wall_ms()
        try:
            for piece in pieces([build_change(change, now_ms) for change in changes]):
                for result in [result for one in self._put(piece) for result in one]:
                    if result.status is not Status.PUT_OK:
                        raise StoreError(f"a topic could not be rewritten: {result.reason}")
                if self._pause():
                    return
        except (NotStoredError, StoreError, OSError) as error:
            log.warning("topics are not rewritten yet: %s", error)
        else:
            if changes:
                self._waiting = _Waiting(first_offset, self._store.max_offset)
                log.info("%d records of topics were rewritten", len(changes))

    def _positions_confirmed(self, confirmed: int) -> bool:
        """Whether what was rewritten last is confirmed, so that files may go.

        Otherwise a node that has only the rest of the log could become master without them.
        """
        waiting = self._waiting
        if waiting is not None and self._confirms() and CONFIRMED not in self.lapsed:
            # A failover may have cut the log since, and what was rewritten with it.
            if confirmed < min(waiting.log_end, self._store.max_offset):
                return False
        self._waiting = None
        return True

    def _pause(self) -> bool:
        """Throttle to 20 %: sleep four times as long as the work took, at most 1 s.

        Return whether the service stops.
        """
        worked_ms = self._clock.monotonic_ms() - self._worked_ms
        stopping = self.stopping.wait(min(4.0 * worked_ms / 1000.0, 1.0))
        self._worked_ms = self._clock.monotonic_ms()
        return stopping

    def problems(self) -> list[str]:
        """Return the lapsed holds and other problems for the status."""
        found = self._holds.problems() if self._deletes else []
        told = (self._failure, self._no_reserve, self._store.retention.problem())
        found += [one for one in told if one is not None]
        if self._ends.problem is not None:
            found.append(self._ends.problem)
        if self._many_topics:
            found.append(
                f"{self._many_topics} topics take more than a quarter of retention.max_size: they"
                " are not rewritten, and a new slave will lack those whose records are gone; raise"
                " retention.max_size"
            )
        if self._crowded:
            found.append(
                f"consumers' positions take {self.kept.memory_bytes} bytes, more than half of"
                " retention.max_size: they are not rewritten, and a new slave will lack those whose"
                " records are gone; raise retention.max_size"
            )
        return found

    @property
    def lapsed(self) -> Mapping[str, int]:
        """The holders without progress, which hold no files, with the offsets that they need."""
        return self._holds.lapsed

    def keeps_files_for(self, name: str) -> bool:
        """Whether retention still keeps the files that a linked slave needs."""
        return name not in self._holds.lapsed

    def _stated_offset(self, end: int, limit: int) -> int:
        """Return the offset up to which the log states the ends of queues; `end` if that suffices.

        Only statements below `limit` count. It suffices if one covers the log up to the last file,
        which always stays. Without a statement that is 0, and not the log's begin: that moves with
        each removal after a lapse, and the hold would be in force again.
        """
        store = self._store
        since = store.stated.since(limit) or 0
        covered = max(since, store.min_offset)
        return end if covered >= (store.retention.last_file_offset or 0) else since

    def _expired_end(self) -> int | None:
        """Return where the log will begin; None if nothing goes.

        If nothing may go, and the log has no room to grow, the holds for queue offsets and delayed
        messages do not count: a slave could not receive the statement for which it would wait, and
        no message could be delivered.
        """
        end = self._store.retention.expired_end(self._hold_offset())
        if end is None and self._store.no_room is not None:
            waits = self._waiting_from(self._config.hold_ms) is not None
            if waits or QUEUES not in self.lapsed:
                end = self._store.retention.expired_end(self._hold_offset(grows=False))
        return end

    def _hold_offset(self, *, grows: bool = True) -> int | None:
        end, confirmed = self._store.max_offset, self._store.confirmed_offset
        offsets, kept = self._needed_from(), confirmed
        if self._confirms():
            if not self._keep_unconfirmed:  # else it is kept below, and no hold of it may lapse
                offsets[CONFIRMED] = confirmed
            if grows and not self._no_room:
                # A statement counts once it is confirmed: a failover may cut it before.
                stated = self._stated_offset(end, end if CONFIRMED in self.lapsed else confirmed)
                offsets[QUEUES] = stated
                if self._keep_unconfirmed and self._stated_offset(end, end) == end:
                    offsets[QUEUES], kept = end, min(confirmed, stated)
        held = self._holds.held_from(self._clock.monotonic_ms(), end, offsets)
        waiting = self._waiting_from(self._config.hold_ms) if grows else None
        if waiting is not None:
            held = waiting if held is None else min(held, waiting)
        if not self._keep_unconfirmed:
            return held
        return kept if held is None else min(held, kept)


class TransactionHold:
    """Track for how long each open half message may still be asked for.

    By the wall clock it is kept from when it was stored on: for its timeout, or its immunity if
    that is longer, and for all checks. A clock that is set forward ends no hold: what an earlier
    look found counts on the monotonic clock, and from its first look on each is kept for at least
    as long as one without immunity. A clock that is set back keeps none for longer than one that
    was stored at its first look. Retention's thread calls this.
    """

    def __init__(
        self,
        halves: Callable[[], Iterable[Half]],
        clock: Clock,
        config: Callable[[], RemotingConfig],
    ) -> None:
        """Prepare; `halves()` returns the open transactions, in the log's order."""
        self._halves = halves
        self._clock = clock
        self._config = config
        # By the offset: when it was first looked at, and until when it is kept; monotonic ms.
        self._kept: dict[int, tuple[float, float]] = {}

    def held_from(self, late_ms: float) -> int | None:
        """Return the offset of the first half message to keep, or None.

        One is kept while its producers may be asked, and for `late_ms` more.
        """
        config = self._config()
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        checks_ms = config.transaction_check_max * config.transaction_check_interval_ms + late_ms
        usual_ms = config.transaction_timeout_ms + checks_ms
        before, self._kept = self._kept, {}
        found = None
        for half in self._halves():
            open_ms = max(usual_ms, 1_000.0 * (half.immunity_s or 0) + checks_ms)
            first_ms, until_ms = before.get(half.offset, (now_ms, now_ms + usual_ms))
            until_ms = max(until_ms, now_ms + half.stored_ms + open_ms - wall_ms)
            until_ms = min(until_ms, first_ms + open_ms)
            self._kept[half.offset] = first_ms, until_ms
            if found is None and now_ms < until_ms:
                found = half.offset
        return found


class QueueEndsWriter:
    """State the ends of quiet queues as master; used by retention's thread."""

    def __init__(self, store: LogStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.problem: str | None = None  # why nothing is stated, for the status

    def state(self, put: Put, pause: Callable[[], bool]) -> int:
        """Append a statement if the log lacks one for its last file; return its records' number.

        `pause()` is called between pieces of work; if it returns True, nothing more is appended.
        Raises OSError, StoreError, and the errors of `put`; the next call then tries again.
        """
        store, self.problem = self._store, None
        since = store.retention.last_file_offset
        if not since or (store.stated.since(store.max_offset) or 0) >= since:
            return 0
        if store.dispatched_offset < since:  # the queues lack records before the file
            return 0
        queues: list[QueueNext] = []
        for queue in store.queues.quiet_since(since):
            queues.append(queue)
            if len(queues) % _AT_ONCE == 0 and pause():
                return 0
        records = build_queue_ends(
            queues,
            since=since,
            ident=self._clock.wall_ms(),
            now_ms=self._clock.wall_ms(),
            part_bytes=min(PART_BYTES, store.file_size // _PART_SHARE),
        )
        size = sum(map(len, records))
        if size > store.file_size // _SHARE:
            self.problem = (
                f"{len(queues)} queues had no message lately, and their next offsets take {size}"
                " bytes, too many for a log file: they are not stated; raise"
                " store.commitlog_file_size"
            )
            return 0
        end = 0
        for piece in pieces(records):
            for results in put(piece):
                for result in results:
                    if result.status is not Status.PUT_OK:
                        raise StoreError(f"queue offsets could not be stated: {result.reason}")
                    end = result.end_offset or end
            if piece[-1] is not records[-1] and pause():
                return 0
        store.wait_dispatched(end, _REPLAY_S)
        log.info("the next offsets of %d quiet queues are stated before %d", len(queues), end)
        return len(records)


def pieces(records: Sequence[bytes]) -> list[list[bytes]]:
    """Divide records into appends of some 64 KiB."""
    pieces: list[list[bytes]] = []
    size = _PUT_BYTES
    for record in records:
        if size >= _PUT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(record)
        size += len(record)
    return pieces
