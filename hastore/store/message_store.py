"""A node's store: the commit log with all that is derived from it, under one roof.

Durability of the append methods: when they return, the bytes are in the page cache (they survive
kill -9); `flushed_offset` says what survives a power loss. Every StoreBrokenError is for ever: only
a new process, which recovers from what is really on the disk, opens the store again.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Flush, StoreConfig
from hastore.errors import StoreError
from hastore.record.codec import Record
from hastore.record.host import Host
from hastore.store.append.appender import Appender
from hastore.store.append.results import PutResult
from hastore.store.fs.filesystem import REAL, FileSystem
from hastore.store.log.mapped_file import FileRange
from hastore.store.message_reader import (
    PullResult,
    PullStatus,
    StoreReads,
    walk_whole,
)
from hastore.store.store_cuts import StoreCuts
from hastore.store.store_life import StoreLife

__all__ = ["FileRange", "MessageStore", "PullResult", "PullStatus", "PutResult"]

log = logging.getLogger(__name__)


class MessageStore:
    """The store of this process; all methods are thread-safe.

    `on_append(start, end, data)` is called in the appending thread right after a put (not under a
    lock; `data` None where it was not one write), `on_flushed(offset)` in whichever thread synced,
    after `flushed_offset` moved, and `on_readable()` in whichever thread moved the limits.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        on_failure: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        """Prepare; nothing is touched before `open`. `on_failure` hears of all that closes it."""
        self.config = config
        self.store_host = store_host
        self.file_size = config.commitlog_file_size
        self.on_append: Callable[[int, int, bytearray | None], None] | None = None
        self.on_readable: Callable[[], None] | None = None
        self._life = StoreLife(config, fs, clock, on_failure)
        self._parts = parts = self._life.parts
        self._log = parts.log
        self._flush = parts.flush
        self._build = parts.build
        self._page = parts.page
        self._reads = StoreReads(parts)
        self._cuts = StoreCuts(parts)
        self._appender = Appender(
            parts.log,
            parts.window,
            parts.table,
            parts.build,
            config=config,
            store_host=store_host,
            clock=clock,
        )
        self._sync_each_put = config.flush is Flush.SYNC
        self._changed = threading.Condition()
        self._waiters = 0

    def lock(self) -> None:
        """Take the store's lock ahead of `open`, for what else must be read under it.

        StoreInUseError, OSError. `unlock` gives it back, also after a failed `open`.
        """
        self._life.lock()

    def unlock(self) -> None:
        """Give the store's lock back, after `close(unlock=False)`."""
        self._life.unlock()

    def open(self, *, intent_offset: int | None = None, from_rocketmq: bool = False) -> None:
        """Lock and recover the store, then start its threads.

        `intent_offset`: a cut at this offset was begun and is being finished, so bytes beyond it
        may be missing. `from_rocketmq`: this node copied the log from a RocketMQ, whose records of
        topics that nobody can read are no damage. StoreInUseError, StoreBrokenError (synced bytes
        are missing or damaged), StoreError (it cannot be read or written, or has files of another
        size).
        """
        self._appender.last_store_timestamp_ms = self._life.open(
            intent_offset, from_rocketmq=from_rocketmq
        )

    def close(self, *, unlock: bool = True) -> None:
        """Stop cleanly: sync all, save the checkpoint, remove `abort`, unlock. StoreError."""
        with self._cuts.closing():
            self._life.close(unlock=unlock)
        self._wake()

    def check_place(self) -> None:
        """Close the store when its folder was moved or removed; StoreMovedError. Each second."""
        self._life.check_place()

    @property
    def broken_reason(self) -> str | None:
        """Why the store is closed for ever; None while it works."""
        return self._parts.health.reason

    @property
    def problems(self) -> list[str]:
        """What does not work at present: a full disk, replay that stands still; for the status."""
        return self._life.problems

    @property
    def min_offset(self) -> int:
        """The first byte there is."""
        return self._log.min_offset

    @property
    def max_offset(self) -> int:
        """The end of what is written; on a slave perhaps inside a record."""
        return self._log.max_offset

    @property
    def flushed_offset(self) -> int:
        """What is synced: everything below survives a power loss."""
        return self._flush.flushed_offset

    @property
    def whole_offset(self) -> int:
        """The end of the last whole record: `max_offset`, but for a record that is half there."""
        log = self._log
        known = max(log.record_end, self._build.dispatched_offset)
        if known >= log.max_offset:
            return log.max_offset
        with log.lock:
            known = max(log.record_end, min(self._build.dispatched_offset, log.max_offset))
            log.record_end = walk_whole(self._parts, known)
            return log.record_end

    @property
    def confirmed_offset(self) -> int:
        """Every byte below is known to be on `acks + 1` nodes."""
        return self._page.now.confirmed_offset

    @property
    def readable_offset(self) -> int:
        """Where readers stop."""
        return self._page.now.readable_offset

    def set_limits(self, *, confirmed: int | None = None, readable: int | None = None) -> None:
        """Publish the limits, which survive kill -9, and wake who waits for them."""
        try:
            self._page.update(confirmed=confirmed, readable=readable)
        except OSError as failure:
            raise self._parts.health.fail("the limits page cannot be written", failure) from failure
        if self._waiters:
            self._wake()
        if self.on_readable is not None:
            self.on_readable()

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend bytes from `offset`, of one file; empty at the log's end. UsageError."""
        return self._log.view(offset, max_bytes)

    def file_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the same bytes as a range of a descriptor, for sendfile."""
        return self._log.file_range(offset, max_bytes)

    def wait_beyond(self, offset: int, timeout_s: float) -> int:
        """Wait until the log reaches beyond `offset`; returns its end."""
        self._wait(lambda: self._log.max_offset > offset, timeout_s)
        return self._log.max_offset

    def wait_readable(self, offset: int, timeout_s: float) -> int:
        """Wait until the readable offset is beyond `offset`; returns it."""
        self._wait(lambda: self._page.now.readable_offset > offset, timeout_s)
        return self._page.now.readable_offset

    def _wait(self, reached: Callable[[], bool], timeout_s: float) -> None:
        if reached():
            return
        with self._changed:
            self._waiters += 1
            try:
                self._changed.wait_for(lambda: reached() or not self._life.is_open, timeout_s)
            finally:
                self._waiters -= 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def append_replica(self, offset: int, data: bytes | memoryview) -> int:
        """Append at `offset`, which must be the end; returns the new end.

        UsageError for another offset or bytes that cross a file's end; StoreFullError appends
        nothing. What a failed write left is cleared, or the store closes: StoreUncertainError.
        """
        log = self._log
        with log.lock:
            if offset != log.max_offset:
                log.commit(offset, 0)  # raises
            end = log.append(data)
        self._grown()
        return end

    def replica_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return room at the end to splice into; `commit_replica` makes it part of the log."""
        with self._log.lock:
            return self._log.replica_range(offset, max_bytes)

    def commit_replica(self, offset: int, size: int) -> int:
        """Take `size` bytes that were spliced at `offset` into the log; returns the new end."""
        with self._log.lock:
            end = self._log.commit(offset, size)
        self._grown()
        return end

    def replica_failed(self, offset: int, size: int, failure: OSError) -> StoreError:
        """Clear what a failed splice into `replica_range` left; returns the error to raise.

        StoreFullError for want of room, else the store is closed: StoreBrokenError.
        """
        with self._log.lock:
            return self._log.replica_failed(offset, size, failure)

    def _grown(self) -> None:
        if self._build.idle:
            self._build.notify()
        if self._sync_each_put:
            self._flush.request()
        if self._waiters:
            self._wake()

    def put_encoded(self, payloads: Sequence[bytes]) -> Sequence[Sequence[PutResult]]:
        """Append all valid records of all payloads by one write; a payload is records in a row.

        Results come in the records' order; a payload that is no row of records has one result,
        which refuses all of it. StoreFullError, StoreBrokenError or StoreError (replay lags):
        nothing was appended. Where a part was, or may have been, the results say what became of
        each record. With `store.flush: sync` a sync is under way when this returns.
        """
        results, start, end, data = self._appender.put(payloads)
        if end > start:
            self._grown()
            if self.on_append is not None:
                try:
                    self.on_append(start, end, data)
                except (StoreError, OSError) as failure:  # it is stored: nobody may be refused
                    log.error("the end %d of the log was not told: %s", end, failure)
        return results

    @property
    def on_flushed(self) -> Callable[[int], None] | None:
        """Called with `flushed_offset` after it moved."""
        return self._flush.on_flushed

    @on_flushed.setter
    def on_flushed(self, hook: Callable[[int], None] | None) -> None:
        self._flush.on_flushed = hook

    def flush(self) -> int:
        """Sync all that is written; returns `flushed_offset`. StoreBrokenError: for ever."""
        return self._flush.flush()

    def request_flush(self) -> None:
        """Ask for a sync soon, without waiting; `on_flushed` tells when. One sync serves many."""
        self._flush.request()

    def wait_flushed(self, offset: int, timeout_s: float) -> bool:
        """Wait until all below `offset` is synced; False: it took too long. StoreBrokenError."""
        return self._flush.wait_flushed(offset, timeout_s)

    def truncate(self, offset: int) -> None:
        """Clear what is beyond `offset`, durably, queues and index with it.

        The new end is lower than asked when `offset` lies inside a record: all of it goes.
        """
        self._cuts.truncate(offset)

    def archive(self, offset: int, name: str) -> int:
        """Copy what is beyond `offset` to `rescued/<name>/`, synced; returns the bytes copied."""
        return self._cuts.archive(offset, name)

    def set_aside(self, name: str) -> str:
        """Move the log to `rescued/<name>/` and go on empty; returns where it lies."""
        return self._cuts.set_aside(name)

    def begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`."""
        self._cuts.begin_at(offset)

    def free_bytes(self) -> int:
        """Return the room left on the store's disk."""
        return self._life.free_bytes()

    def expired_end(self, hold_offset: int | None) -> int | None:
        """Return where the log would begin after `delete_expired`; None when nothing would go."""
        return self._cuts.expired_end(hold_offset)

    def delete_expired(self, hold_offset: int | None) -> int:
        """Remove whole files by age and size, none from `hold_offset` on; returns how many."""
        return self._cuts.delete_expired(hold_offset)

    @property
    def dispatched_offset(self) -> int:
        """How far queues, index and idempotence window know the log."""
        return self._build.dispatched_offset

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; False when it took too long."""
        return self._build.wait_dispatched(offset, timeout_s)

    def watch_dispatched(
        self, hook: Callable[[int], None], readers_wait: Callable[[], bool]
    ) -> None:
        """Call `hook(dispatched_offset)` in replay's thread after a move, soon if readers wait."""
        self._build.on_dispatched = hook
        self._build.pace.readers_wait = readers_wait

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_messages: int,
        max_bytes: int,
        limit_offset: int,
    ) -> PullResult:
        """Read records of a queue that end at or below `limit_offset`. CorruptRecordError."""
        return self._reads.pull(
            topic,
            queue_id,
            queue_offset,
            max_messages=max_messages,
            max_bytes=max_bytes,
            limit_offset=limit_offset,
        )

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return the first and the next queue offset; None without such a queue."""
        return self._parts.queues.queue_range(topic, queue_id)

    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return the first and the next queue offset of each queue of each topic."""
        return self._parts.queues.topics()

    def query_key(
        self,
        topic: str,
        key: str,
        *,
        max_messages: int = 32,
        begin_ms: int = 0,
        end_ms: int = 2**63 - 1,
    ) -> list[int]:
        """Return the physical offsets of the records with a key, the latest first."""
        return self._reads.query_key(
            topic, key, max_messages=max_messages, begin_ms=begin_ms, end_ms=end_ms
        )

    def record_at(self, offset: int) -> Record | None:
        """Return the whole record that begins at `offset`; None without one."""
        return self._reads.record_at(offset)

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        """Return the size of the whole record at `offset`; None without one."""
        return self._reads.record_size(offset, check=check)

    def behind_blank(self, offset: int) -> int:
        """Return where the next file starts when a blank begins at `offset`, else `offset`."""
        return self._reads.behind_blank(offset)

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """Return the first queue offset stored at or after a time, else the queue's end."""
        return self._reads.queue_offset_by_time(topic, queue_id, timestamp_ms)
