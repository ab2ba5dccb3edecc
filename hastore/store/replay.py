"""Replay: feed everything derived from the commit log (RocketMQ's ReputMessageService).

On master and slave alike, one thread walks the log from `dispatched_offset` and hands each batch of
whole records to every dispatcher: consume queues, key index, deduplication window, queue offsets.

- `dispatched_offset` moves once every dispatcher has taken a batch. A failure (a full disk, an I/O
  error) leaves it unchanged and sets `blocked_reason`; replay dispatches the same batch again after
  1 s. So a dispatcher ignores records that it has already.
- The file `<root>/hastore/replay` (replay_progress.py) keeps two offsets up to which all
  dispatchers have all records. `dispatched` is valid until the machine restarts, because the page
  cache survives kill -9. `synced` is valid after a power loss too. `load` takes the valid offset,
  every dispatcher cuts itself to it, and replay continues there. No record is lost or taken twice.
- Threads wait on a Condition, never in a poll loop. `notify` costs the appending thread one
  attribute read unless replay sleeps.
- In a small batch each record costs several times as much as in a large one, and each wake-up takes
  the interpreter from the appending thread, which costs more than replay's own work. So ReplayPace
  lets small appends gather, for less time while a reader waits for new records. If records come
  one by one then, it does not wait at all.
"""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import HastoreError, StoreError, StoreFullError, SyncFailedError
from hastore.fs.filesystem import NO_ROOM
from hastore.record.delays import DELAYS_MS
from hastore.record.log_format import PLAIN, LogFormat
from hastore.service import OnFailure, Service
from hastore.store.derived.contract import Dispatcher, ReplayableLog, number_of_keys
from hastore.store.derived.scalar_walk import ScalarWalker, Stop, Walk
from hastore.store.state.replay_progress import ReplayState

if TYPE_CHECKING:
    from hastore.store.derived.vector_walk import VectorWalker

log = logging.getLogger(__name__)

VIEW_BYTES = 1 << 20  # the log's bytes in one batch: about a thousand records of 1 KiB
BULK_BYTES = 4 << 20  # the log's bytes in one batch, once the backlog is this large
TRICKLE_S = 0.002  # while appends come this close together, replay lingers longer
_LINGER_MAX_S = 0.01  # the longest linger
_HOLD_S = 0.0004  # the longest wait for a confirmation: most slaves confirm within this time
FEW_RECORDS = 4  # in a batch: records come one by one
_GROWING_BYTES = 1 << 16  # a log that grows by this during a batch is under a bulk load
_REST = 9  # rest, as a multiple of the batch's time: throttles replay to 10 %
_LATE_MAX_BYTES = 1 << 30  # from this backlog on, replay is throttled to 50 % instead
_REST_MAX_S = 0.02
# In one batch, if its records have more than a few. A client's record has up to 2,048 keys, one of
# RocketMQ up to 16,000, and each takes a microsecond.
KEYS_MAX = 32_768
_FEW_KEYS = 4  # of a record
_DENSE_REST_MAX_S = 0.1
_VECTOR_FROM_BYTES = 1 << 16  # the first view of this size loads numpy: 0.1 s of CPU, 15 MiB
_RETRY_S = 1.0  # after a failure
_IDLE_S = 1.0  # the longest sleep, in case a wake-up is lost


class ReplayPace:
    """Decide how long to wait before the next batch; used by replay's thread."""

    def __init__(self, linger_s: float, readers_wait: Callable[[], bool]) -> None:
        """Begin; `readers_wait()` returns whether a reader waits for new records."""
        self._base_s = self._grown_s = linger_s
        self._readers_wait = readers_wait
        self._few = True  # the last batch had few records, and nothing came during it

    def quiet(self) -> None:
        """Return to the base linger time, because nothing was appended for a while."""
        self._grown_s = self._base_s

    def trickle(self) -> None:
        """Double the time for which small appends gather, because they follow each other."""
        self._grown_s = min(2 * self._grown_s, _LINGER_MAX_S)

    def linger_s(self) -> float:
        """Return how long replay lets small appends gather after the first one."""
        if not self._readers_wait():
            return self._grown_s
        return 0.0 if self._few else self._base_s

    def rest_s(
        self, late: int, grown: int, spent_ms: float, *, dense: bool = False, records: int = 1_000
    ) -> float:
        """Return how long to rest after a batch that took `spent_ms`.

        `late` is the backlog in bytes, and `grown` is how much of it was appended during the batch.
        During a bulk load appends have priority, because replay catches up in a fraction of the
        load's time. A batch is `dense` if it ended early because of its many keys. After it replay
        rests as long as it took, because otherwise such batches would follow one another. While a
        reader waits, there is no rest after a batch of FEW_RECORDS `records` or less during which
        nothing was appended: the next record finds replay ready. Under a load batches have more.
        """
        self._few = records <= FEW_RECORDS and not late
        if self._few and self._readers_wait():
            return 0.0
        rest_s = self._rest_s(late, grown, spent_ms)
        return max(rest_s, min(spent_ms / 1000, _DENSE_REST_MAX_S)) if dense else rest_s

    def _rest_s(self, late: int, grown: int, spent_ms: float) -> float:
        if late < VIEW_BYTES:
            self.trickle()
            return min(max(_REST * spent_ms / 1000, self.linger_s()), _LINGER_MAX_S)
        if late < BULK_BYTES or grown < _GROWING_BYTES:
            return 0.0
        share = _REST if late < _LATE_MAX_BYTES else 1
        return min(share * spent_ms / 1000, _REST_MAX_S)


class IndexBuildService(Service):
    """Replay the log into the dispatchers, in a thread of its own.

    Lifecycle: `load()` once, then `start()`, `stop()`, `close()`. The owner calls `flush()` at
    intervals, and before `close()`. To cut the log: `with build.paused(): cut the log;
    build.truncate(end)`.
    """

    def __init__(
        self,
        commit_log: ReplayableLog,
        dispatchers: Sequence[Dispatcher],
        *,
        state: ReplayState,
        on_failure: OnFailure,
        linger_s: float = 0.001,
        clock: Clock = SYSTEM_CLOCK,
        form: LogFormat = PLAIN,
        on_dispatched: Callable[[int], None] = lambda _offset: None,
        on_damage: Callable[[int], None] = lambda _offset: None,
        readers_wait: Callable[[], bool] = lambda: False,
        readable: Callable[[], int] = lambda: 1 << 63,
        delays_ms: Sequence[int] = DELAYS_MS,
    ) -> None:
        """Prepare; small appends gather for `linger_s` seconds while nobody waits for replay.

        Replay's thread calls `on_dispatched(dispatched_offset)` whenever that offset has moved, and
        `on_damage(offset)` at each try that damage of the log stops: it lies at or before `offset`.
        While `readers_wait()` is true, it pauses less. `readable()` is the readable offset.
        """
        super().__init__("IndexBuildService", on_failure=on_failure)
        self._log = commit_log
        self._dispatchers = tuple(dispatchers)
        self._state = state
        self._clock = clock
        self.pace = ReplayPace(linger_s, readers_wait)
        self._form = form
        self._scalar = ScalarWalker(form, delays_ms)
        self._vector: VectorWalker | None = None  # loads numpy, so made when needed or idle
        self._changed = threading.Condition()
        self._flush_lock = threading.Lock()
        self.idle = False  # true while replay sleeps: the next append must `notify`
        self.holds = False  # true while replay waits for readable records: they must `go_on`
        self._soon = False  # what has ended the last sleep is readable in a moment
        self._readable = readable
        self._busy = False
        self._pauses = 0
        self._held = False  # replay waits for the end of a pause
        self._waiters = 0
        self._dispatched = 0
        self.records = 0  # that were dispatched since the start
        self._seen_end = 0  # the log's end when replay last looked for records
        self._most_bytes = BULK_BYTES  # in a batch; fewer after batches with many keys
        self._dense = False  # whether the last batch ended early because of its many keys
        self._sync_failed: str | None = None  # why `synced` does not move any more
        self._inherited = False  # the previous process may have left files unsynced
        self.blocked_reason: str | None = None  # why replay has stopped, for the status; else None
        self.lacks_room = False  # it has stopped for want of room
        self._damaged_at: int | None = None  # damage of the log has stopped the last step
        self._on_dispatched = on_dispatched
        self._on_damage = on_damage

    @property
    def dispatched_offset(self) -> int:
        """Return the offset up to which every dispatcher has every record."""
        return self._dispatched

    def load(self) -> int:
        """Open the dispatchers, cut them to the log; return the offset where replay continues."""
        end = self._log.max_offset
        dispatched, synced, trusted = self._state.load()
        self._inherited = trusted or dispatched > 0
        offset = max(min(dispatched if trusted else synced, end), self._log.min_offset)
        self._dispatched = min(
            [offset, *(dispatcher.load(offset, trusted) for dispatcher in self._dispatchers)]
        )
        self._dispatched = max(self._dispatched, self._log.min_offset)
        # Before the first file is built anew: a start after a kill or a power loss must not take
        # the offsets of the files that were lost for those of the half-built ones. Always, because
        # the sync of an earlier process, which lowered the offsets for a cut, may have failed.
        self._state.save(self._dispatched, min(self._state.synced, self._dispatched))
        for dispatcher in self._dispatchers:
            _delete_before(dispatcher, self._log.min_offset)
        return self._dispatched

    # -- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        """Replay until stopped."""
        while not self.stopping.is_set():
            with self._changed:
                self._held = self._pauses > 0
                self._changed.wait_for(lambda: not self._pauses or self.stopping.is_set())
                if self._held:
                    self._held = False
                    self._changed.notify_all()
                if self.stopping.is_set():
                    return
                self._busy = True
            began_ms, records = self._clock.monotonic_ms(), self.records
            try:
                moved = self._step_or_reason()
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
            if not moved:
                if self._damaged_at is not None:
                    self._on_damage(self._damaged_at)
                self._sleep()
            else:
                # `_busy` is False now. If it were True, a hook that waits for a thread in `paused`
                # would deadlock, since `paused` waits for `_busy` to end.
                self._on_dispatched(self._dispatched)
                self._rest(self._clock.monotonic_ms() - began_ms, self.records - records)

    def replay(self) -> int:
        """Replay the whole log in the calling thread, before `start`; return `dispatched_offset`.

        Raises what a dispatcher raises, and StoreError for bytes that are not a record.
        """
        while self._step():
            continue
        return self._dispatched

    def _step_or_reason(self) -> bool:
        self._damaged_at = None
        try:
            moved = self._step()
        except (OSError, HastoreError) as failure:
            if self.blocked_reason is None:
                log.error("replay stopped at offset %d: %s", self._dispatched, failure)
            full = isinstance(failure, OSError) and failure.errno in NO_ROOM
            self.lacks_room = full or isinstance(failure, StoreFullError)
            self.blocked_reason = f"replay stopped at offset {self._dispatched}: {failure}"
            return False
        if moved and self.blocked_reason is not None:
            log.warning("replay continues from offset %d", self._dispatched)
            self.blocked_reason, self.lacks_room = None, False
        return moved

    def _step(self) -> bool:
        """Replay one batch; False when no whole record follows."""
        # Retention may have removed log files that replay has not read yet.
        offset = max(self._dispatched, self._log.min_offset)
        whole = self._log.record_end  # first: it is never beyond the end
        end, file_size = self._log.max_offset, self._log.file_size
        self._seen_end = end
        left = file_size - offset % file_size
        wanted = min(VIEW_BYTES if end - offset < BULK_BYTES else BULK_BYTES, self._most_bytes)
        while True:
            with self._view(offset, min(wanted, left), end) as view:
                seen = len(view)
                walk = self._walk(view, offset, left)
            fewer = self._fewer_bytes(walk)
            if fewer is not None:
                wanted = fewer
                continue
            if (
                walk.batch
                or walk.stop is not Stop.END
                or walk.wanted <= seen
                or offset + walk.wanted > end
            ):
                break
            wanted = walk.wanted  # the record is larger than the view
        after = offset + walk.consumed
        if walk.stop is Stop.BLANK and end >= offset + left:
            after = offset + left
        elif not walk.batch and (
            # An item ends at `whole`, so none that begins before it is still to be completed.
            walk.stop is Stop.BAD or (walk.stop is Stop.END and after == offset < whole)
        ):
            self._damaged_at = after
            raise StoreError(f"offset {after} holds no record; see `hastore log verify`")
        if after == self._dispatched:
            return False
        if walk.batch:
            for dispatcher in self._dispatchers:
                dispatcher.dispatch(walk.batch)
            self.records += len(walk.batch)
        self._advance(after)
        return True

    def _view(self, offset: int, size: int, end: int) -> AbstractContextManager[memoryview]:
        try:
            return self._log.view(offset, size)
        except OSError as failure:
            if failure.errno == errno.EIO:  # somewhere in there
                self._damaged_at = min(offset + size, end) - 1
            raise

    def _fewer_bytes(self, walk: Walk) -> int | None:
        """Return how many bytes to walk instead, because the batch has too many keys; else None."""
        keys, records = number_of_keys(walk.batch), len(walk.batch)
        many = keys > _FEW_KEYS * records
        if many and keys > KEYS_MAX and records > 1:
            least = walk.batch[0].size + self._form.lead
            self._most_bytes = max(least, walk.consumed * KEYS_MAX // keys * 7 // 8)
            if self._most_bytes < walk.consumed:
                return self._most_bytes
        self._dense = many and self._most_bytes < BULK_BYTES and keys > KEYS_MAX // 4
        if not self._dense:
            self._most_bytes = min(2 * self._most_bytes, BULK_BYTES)
        return None

    def _walk(self, view: memoryview, offset: int, left: int) -> Walk:
        if self._vector is None and len(view) < _VECTOR_FROM_BYTES:
            return self._scalar.walk(view, offset, left)
        return self._load_vector_walker().walk(view, offset, left)

    def _load_vector_walker(self) -> "VectorWalker":
        if self._vector is None:
            from hastore.store.derived.vector_walk import VectorWalker

            self._vector = VectorWalker(self._scalar)
        return self._vector

    def _advance(self, offset: int) -> None:
        self._state.save_dispatched(offset)
        with self._changed:
            self._dispatched = offset
            if self._waiters:
                self._changed.notify_all()

    def _sleep(self) -> None:
        """Wait for new bytes, a retry or the stop; then let small appends gather."""
        quiet = False
        with self._changed:
            if self.blocked_reason is not None:
                self._changed.wait_for(self.stopping.is_set, _RETRY_S)
                return
            self.idle = True
            # An append moves max_offset, then reads `idle`. Replay sets `idle`, then reads
            # max_offset. So at least one of them sees the other.
            if self._changed.wait_for(self._has_work, TRICKLE_S):
                self.pace.trickle()
            else:
                self.pace.quiet()
                quiet = not self._changed.wait_for(self._has_work, _IDLE_S)
            self.idle = False
            linger_s = self.pace.linger_s()
            if linger_s and not self._waiters:
                self._changed.wait_for(
                    lambda: bool(self._waiters) or self.stopping.is_set(), linger_s
                )
            elif not linger_s and self._soon:
                self._hold()
        if quiet:  # loading numpy delays no append now
            self._load_vector_walker()

    def _hold(self) -> None:
        """Let what has just come be confirmed before its records are dispatched.

        Replay would take the interpreter from the threads that confirm it, and nobody reads it
        before.
        """
        self.holds = True
        self._changed.wait_for(self._is_wanted, _HOLD_S)
        self.holds = False

    def _is_wanted(self) -> bool:
        if self._readable() > self._dispatched:
            return True
        return bool(self._waiters or self._pauses) or self.stopping.is_set()

    def _rest(self, spent_ms: float, records: int) -> None:
        """After a batch, leave the interpreter to other threads, unless one waits for replay."""
        end = self._log.max_offset
        late, grown = end - self._dispatched, end - self._seen_end
        rest_s = self.pace.rest_s(late, grown, spent_ms, dense=self._dense, records=records)
        if rest_s:
            with self._changed:
                self._changed.wait_for(
                    lambda: bool(self._waiters or self._pauses) or self.stopping.is_set(), rest_s
                )

    def _has_work(self) -> bool:
        return not self.idle or self.stopping.is_set() or self._log.max_offset != self._seen_end

    # -- other threads -----------------------------------------------------------------------------

    def notify(self, *, soon: bool = False) -> None:
        """Tell replay that the log grew, after every append; cheap unless replay sleeps.

        `soon`: what was appended is probably readable in a moment, and not before.
        """
        if self.idle:
            with self._changed:
                self.idle = False
                self._soon = soon
                self._changed.notify_all()

    def go_on(self) -> None:
        """Tell replay, if it `holds`, that the readable offset has moved."""
        with self._changed:
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        with self._changed:
            self._changed.notify_all()

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; False after `timeout_s` seconds or on `stop`."""
        if self._dispatched >= offset:
            return True
        with self._changed:
            self._waiters += 1
            self.idle = False
            self._changed.notify_all()
            try:
                return (
                    self._changed.wait_for(
                        lambda: self._dispatched >= offset or self.stopping.is_set(), timeout_s
                    )
                    and self._dispatched >= offset
                )
            finally:
                self._waiters -= 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep replay off the log during the `with`; first wait for the current batch to end."""
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def truncate(self, log_end: int) -> None:
        """Cut all derived data to a log that now ends at `log_end`; durable after `flush`."""
        with self.paused(), self._flush_lock:
            offset = min(self._dispatched, log_end)
            # Saved before the files change: a kill in between must not leave a greater offset.
            self._state.save(offset, min(self._state.synced, offset))
            for dispatcher in self._dispatchers:
                dispatcher.truncate(log_end)
                _delete_before(dispatcher, self._log.min_offset)  # a cut queue begins anew
            self._continue_at(offset)

    def reset(self, offset: int) -> None:
        """Forget all derived data and continue at `offset`; the caller has moved its files away."""
        with self.paused(), self._flush_lock:
            for dispatcher in self._dispatchers:
                dispatcher.reset()
            self._sync_failed = None
            self._state.trust()
            self._state.save(offset, offset)
            self._continue_at(offset)

    def _continue_at(self, offset: int) -> None:
        with self._changed:
            self._dispatched = offset
            self.blocked_reason, self.lacks_room = None, False
            self._changed.notify_all()

    def delete_before(self, min_offset: int) -> None:
        """Remove derived files that cover only records below `min_offset` (retention)."""
        for dispatcher in self._dispatchers:
            steps: Iterator[None] | None = None
            left = True
            while left:
                with self.paused(), self._flush_lock:
                    if steps is None:
                        steps = iter(dispatcher.delete_before(min_offset) or ())
                    left = next(steps, False) is None
                with self._changed:  # replay, which waits for the end of the pause, goes first
                    self._changed.wait_for(
                        lambda: not self._held or self._pauses or self.stopping.is_set()
                    )

    @property
    def sync_failure(self) -> str | None:
        """Why queues and index are not synced any more before the next start; else None."""
        return self._sync_failed

    def flush(self) -> None:
        """Make durable what was dispatched so far, then save its end as `synced`.

        After a power loss replay continues from `synced`. Raises OSError or StoreError when a later
        call may succeed (a full disk). Raises SyncFailedError when a sync failed, and at every call
        after that: the kernel may have dropped pages, so `synced` does not move again in this
        process. The next start rebuilds from `synced`.
        """
        with self._flush_lock:
            if self._sync_failed is not None:
                raise SyncFailedError(self._sync_failed)
            offset = self._dispatched
            if offset == self._state.synced:
                return
            try:
                if self._inherited:
                    self._state.sync_all()
                    self._inherited = False
                for dispatcher in self._dispatchers:
                    dispatcher.flush()
                self._state.save_synced(offset)
            except SyncFailedError as failure:
                self._sync_failed = (
                    f"queues and index are not synced any more: {failure}; restart the node, which"
                    f" rebuilds them from offset {self._state.synced} on"
                )
                self._state.distrust()
                raise SyncFailedError(self._sync_failed) from failure

    def close(self) -> None:
        """Close all files, after `stop`; a `flush` before `close` makes the next start quick."""
        for dispatcher in self._dispatchers:
            dispatcher.close()
        self._state.close()


def _delete_before(dispatcher: Dispatcher, min_offset: int) -> None:
    """Let a dispatcher remove its files in one go."""
    for _ in dispatcher.delete_before(min_offset) or ():
        continue
