"""LogStore: a node's log and all that is derived from it, opened, cut and closed as one.

LogStore composes these components. Callers use a component directly for what it does alone.
Components in parentheses are private:

    log             the bytes and files of the commit log          store/log/commit_log.py
    flush_service   fdatasync, on demand and by interval           store/log/flush.py
    replay          derives queues, index and window from the log  store/replay.py
    queues          queue offsets of each topic                    store/derived/consume_queue.py
    deliveries      which delayed messages were delivered          store/derived/deliveries.py
    stated          where the log states the ends of quiet queues  store/append/stated_ends.py
    topic_table     the topics that the log's records make         store/append/topic_table.py
    reader          pulls; records by offset, key and time         store/message_reader.py
    retention       removes the log's oldest files                 store/retention.py
    (appender)      checks and appends what clients put            store/append/appender.py
    (housekeeping)  calls `_keep` each second: sync derived files, write RocketMQ's checkpoint

This module does what concerns several of them, whatever the form of the log: open, close, limits
and cuts. How bytes get into the log differs: MessageStore (mode classic) appends records and bytes
of a master, EntryMessageStore (mode dledger) appends entries.

Locks are taken in this order: `retention.removing`, replay's pause, `log.lock`,
`flush_service.sync_lock`. A cut takes all four, so that no other thread removes files, replays,
appends or syncs meanwhile. Readers take none of them. If a reader was lent a map of the log before
a cut, the map shows zeros in place of the cut bytes.

Durability: when a method that appends returns, the bytes are in the page cache and survive kill -9.
Bytes below `flushed_offset` survive a power loss. After a StoreBrokenError the store stays closed:
only a new process, which recovers from the bytes on the disk, opens it again.
"""

import contextlib
import errno
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hastore.clock import Clock
from hastore.config.model import Flush, StoreConfig
from hastore.errors import (
    HastoreError,
    StoreBrokenError,
    StoreError,
    StoreFullError,
    UsageError,
    unopened_store,
)
from hastore.fs.filesystem import File, FileSystem
from hastore.record.codec import Host
from hastore.record.delays import parse_levels
from hastore.record.topic_records import TopicConfig
from hastore.service import OnFailure, Service, raise_failure
from hastore.store.append.appender import Appender
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.append.results import ProducerProgress
from hastore.store.append.stated_ends import StatedEnds
from hastore.store.append.topic_table import TopicTable
from hastore.store.cuts import Cuts
from hastore.store.derived.consume_queue import ConsumeQueueTable
from hastore.store.derived.deliveries import Deliveries
from hastore.store.derived.key_index import KeyIndex
from hastore.store.derived.taken_delays import taken_marks, untaken_levels
from hastore.store.derived.transactions import OpenTransactions
from hastore.store.growth import Growth
from hastore.store.log.commit_log import CommitLog, StoreHealth
from hastore.store.log.entry_index import EntryIndex
from hastore.store.log.entry_loader import load_entries
from hastore.store.log.flush import FlushService
from hastore.store.log.record_walk import cut_point, store_timestamp_ms, whole_end
from hastore.store.log.recovery import Recovered, clear_beyond, recover, rewrite_unsynced
from hastore.store.message_reader import MessageReader
from hastore.store.replay import IndexBuildService
from hastore.store.rescue import Rescued, copy_tail, count_messages, rescue_folder, written_end
from hastore.store.retention import LogRetention
from hastore.store.state.limits import Limits, LimitsPage, read_limits, sync_failed
from hastore.store.state.marker_files import (
    AbortFile,
    Checkpoint,
    CheckpointFile,
    LockFile,
    is_store_name,
)
from hastore.store.state.replay_progress import ReplayState, cache_survives, read_cache_id
from hastore.store.store_times import StoreTimes

logger = logging.getLogger(__name__)

HOUSEKEEPING_S = 1.0
_MEND_BYTES = 1 << 20
# The state files of a node, which it may have to write while its disk is full.
_SMALL_FILES = (*[4096] * 6, *[65536] * 2)
_DRAIN_S = 2.0  # how long a close waits for replay; the rest is replayed at the next start
_MOVED: tuple[str, ...] = ("commitlog", "consumequeue", "batchconsumequeue", "index", "checkpoint")


def _nothing(_offset: int = 0) -> None: ...


@dataclass(slots=True)
class StoreHooks:
    """What a store calls: replication and the client API of its node.

    Both are made after the store, because they need it. So whoever composes a node fills in the
    hooks of its store, before the first put. No lock of the store is held during a call, except
    where it is said.
    """

    # After each put of a MessageStore, in the putting thread, which holds the write gate: start and
    # end of what was appended, and its bytes, or None if the put was not uniform.
    on_append: Callable[[int, int, bytearray | None], None] | None = None
    # After `flushed_offset` has moved to this offset, in the thread that synced.
    on_flushed: Callable[[int], None] = _nothing
    # After `set_limits`, in the same thread.
    on_readable: Callable[[], None] = _nothing
    # The same for a thread that holds no lock of the node: after `dispatched_offset` moved, in
    # replay's, and after `set_limits(tell=False)`. Without it, `on_readable` is called.
    answer_readers: Callable[[], None] | None = None
    # After messages were archived for a cut, or an operator has dismissed that: what happened, and
    # to what. In the thread that cuts, with the log's lock, or in housekeeping's.
    on_cut: Callable[[str, str], None] = lambda _outcome, _text: None
    # After delayed messages were read and are in their queues, in replay's thread.
    on_delayed: Callable[[], None] = _nothing
    # A reader has met a damaged record at this offset; in the reader's thread.
    on_damage: Callable[[int], None] = _nothing
    # The same of a record that no CRC shows to be damaged.
    on_wrong: Callable[[int], None] = _nothing
    # Damage at this offset would lead a cut further back; in the thread that would cut, which holds
    # the write gate.
    on_blocked_cut: Callable[[int], None] = _nothing
    # Damage at this offset, or before it, keeps replay from going on; in replay's thread, at each
    # of its tries.
    on_blocked_replay: Callable[[int], None] = _nothing
    # Whether a reader waits for new records: replay then pauses less, and a slave says so to its
    # master. In replay's thread, or the one of the link.
    readers_wait: Callable[[], bool] = lambda: False


class LogStore:
    """A store that this process opens; all methods are thread-safe."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        fs: FileSystem,
        clock: Clock,
        store_host: Host,
        on_failure: OnFailure | None,
        hooks: StoreHooks | None,
        sync_each_put: bool,
        entries: EntryIndex | None = None,
        keep_more: Callable[[], None] = _nothing,
    ) -> None:
        """Prepare; no file of the store is touched before `open`.

        `on_failure` is called when the store closes for good or one of its threads fails. Without
        it, `threading.excepthook` reports a failed thread. With `sync_each_put`, each append
        requests a sync. `entries` is the index of a log of entries, None for a log of records.
        Housekeeping calls `keep_more` each second, and a last time at the close.
        """
        self.config = config
        self.store_host = store_host
        self.file_size = config.commitlog_file_size
        self.hooks = hooks or StoreHooks()
        self.is_open = False
        self.confirmed_soon = False  # as ReplicaLog has it
        self.times_cut = 0  # how often the log was cut or begun anew since the start
        self._fs = fs
        self._root = config.root
        self._clock = clock
        self._changed = threading.Condition()
        self._waiters = 0
        self._sync_each_put = sync_each_put
        self._health = StoreHealth(on_failure, self._note_failure)
        self._lock_file = LockFile(fs, self._root)
        self._abort = AbortFile(fs, self._root)
        self._checkpoint = CheckpointFile(fs, self._root)
        self._noting = threading.Lock()  # for the checkpoint, from its times to the file
        self._limits = LimitsPage(fs, self._root)
        self._keep_more = keep_more
        self._dropping = threading.Lock()  # of what is moved to `hastore/dropped`
        self._drop_failure: str | None = None
        self._compose(entries, on_failure or raise_failure)
        # Replication calls these two for each frame, so they are the log's own: no call is added.
        self.view, self.file_range = self.log.view, self.log.file_range

    def _compose(self, entries: EntryIndex | None, on_failure: OnFailure) -> None:
        config, fs, root, clock = self.config, self._fs, self._root, self._clock
        health, hooks = self._health, self.hooks
        units, slots = config.consume_queue_units, config.index_slots
        self.log = log = CommitLog(
            fs, root, self.file_size, health,
            on_failure=on_failure, warm_files=config.warm_files, entries=entries,
        )  # fmt: skip
        self.queues = ConsumeQueueTable(
            fs, root, units_per_file=units, on_batch=lambda batch: self.topic_table.add(batch)
        )
        self._index = index = KeyIndex(
            fs, f"{root}/index", log, slots=slots, entries=config.index_entries, clock=clock
        )
        self._window = DedupWindow(fs, root, lambda: self._limits.now.confirmed_offset, clock)
        self.topic_table = topics = TopicTable(
            fs, root, self.queues, log.view, config.default_queues, file_size=self.file_size
        )
        self._table = QueueOffsetTable(self.queues, config.default_queues, topics.limits)
        self.stated = StatedEnds(fs, root)
        self._times = StoreTimes(fs, root, clock, self._last_store_ms)
        self.deliveries = Deliveries(
            fs, root, log, self.queues, log.form, lambda: hooks.on_delayed(),
            parse_levels(config.message_delay_level),
        )  # fmt: skip
        self.transactions = OpenTransactions(fs, root, log, self.queues, log.form)
        self.replay = replay = IndexBuildService(
            # The times come before the index: a search must know of a fall when it meets records
            # from after it.
            log,
            [
                *(self.queues, topics, self._times, index, self._window, self._table),
                *(self.stated, self.deliveries, self.transactions),
            ],
            state=ReplayState(
                fs, f"{root}/hastore/replay",
                units=units, slots=slots, entries=config.index_entries,
            ),
            on_failure=on_failure, clock=clock, form=log.form,
            on_dispatched=lambda _: self.tell_readers(), readers_wait=lambda: hooks.readers_wait(),
            on_damage=lambda offset: hooks.on_blocked_replay(offset),
            readable=lambda: self._limits.now.readable_offset,
            delays_ms=parse_levels(config.message_delay_level),
        )  # fmt: skip
        self.flush_service = FlushService(
            log, self._limits, health,
            interval_ms=config.flush_interval_ms, record_end=self._record_end,
            on_flushed=lambda offset: hooks.on_flushed(offset), on_failure=on_failure, clock=clock,
        )  # fmt: skip
        self.growth = Growth()
        self.retention = LogRetention(
            log, self.flush_service, replay, self._window, topics,
            config=config.retention, clock=clock,
        )  # fmt: skip
        self._housekeeping = HousekeepingService(self._keep, on_failure=on_failure)
        self.rescued = Rescued(fs, root, clock, self.free_bytes)
        self.cuts = Cuts(
            fs, root, clock, elects=entries is not None,
            on_change=lambda outcome, text: hooks.on_cut(outcome, text),
        )  # fmt: skip
        self._appender = Appender(
            log, self._window, self._table, topics, replay,
            next_ms=self._times.next_ms, config=config, store_host=self.store_host,
            why_full=lambda topic: self.transactions.why_full(topic),
        )  # fmt: skip
        self.taken = self._appender.taken  # what puts have appended, by topic
        self.reader = MessageReader(
            log, self.queues, index, clock, on_wrong=lambda offset: hooks.on_wrong(offset),
            falls=lambda: self._times.falls, on_damage=lambda offset: hooks.on_damage(offset),
        )  # fmt: skip

    # -- open -------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the store's lock before `open`, for a caller that first reads the store's files.

        A failed `open` releases the lock; otherwise `close` or `unlock` does. Raises
        StoreInUseError, OSError.
        """
        self._lock_file.acquire()

    def unlock(self) -> None:
        """Release the store's lock, if it is held, after `close(unlock=False)` or instead of it."""
        self._lock_file.release()

    def _open(
        self,
        intent_offset: int | None = None,
        *,
        from_rocketmq: bool = False,
        rocketmq_end: int = 0,
        committed_index: int = -1,
        known: bool = False,
        on_doubt: Callable[[int], None] = _nothing,
    ) -> None:
        """Lock and recover the store, then start its threads; raises as MessageStore.open.

        Its arguments are those of MessageStore.open and of EntryMessageStore.open.
        """
        try:
            self._lock_file.acquire()
            try:
                self._close_to_others()
                self._fs.make_dirs(self.log.directory)
                self._fs.make_dirs(f"{self._root}/hastore")
                self.cuts.load()
                self._recover(
                    intent_offset, from_rocketmq, rocketmq_end, committed_index, known, on_doubt
                )
                self._start()
            except BaseException:
                self._release()
                self._lock_file.release()
                raise
        except OSError as failure:
            raise unopened_store(self._root, failure) from failure

    def _close_to_others(self) -> None:
        """Take the store's folders from other users: earlier versions and RocketMQ left them open.

        What is in a closed folder needs no change. The root itself may hold other things.
        """
        for name in self._fs.list_dir(self._root):
            if not is_store_name(name):
                continue
            path = f"{self._root}/{name}"
            try:
                before = self._fs.restrict(path)
            except FileNotFoundError:  # such as a file that a command replaces
                continue
            except OSError as failure:
                logger.warning("%s stays open to other users: %s", path, failure)
                continue
            if before is not None:
                logger.warning("%s was open to other users (mode %03o), and is not any more;"
                               " store.group_read lets those of the node's group read",
                               path, before)  # fmt: skip

    def limits_lost(self, *, known: bool) -> bool:
        """Whether the limits page of this store is gone; `known` if hastore has opened it before.

        Ask it before `open`, which writes a new page, and note it durably. Without the page nobody
        knows what was synced here: the log's end may lack what the node has acknowledged. Raises
        StoreBrokenError for a damaged page.
        """
        return known and read_limits(self._fs, self._root) is None

    def sync_failed(self) -> bool:
        """Whether the last process has closed this store after a failed sync.

        What was not synced may be gone then, as after a power loss. Ask it before `open`, which
        forgets it, and note it durably.
        """
        return sync_failed(self._fs, self._root)

    def _note_failure(self) -> None:
        """Write down for the next start that a sync has failed."""
        try:
            self._limits.note_failure()
        except OSError as failure:  # a file system that is shut down must be mounted anew: it tells
            logger.error("that a sync has failed cannot be noted for the next start: %s", failure)

    def _recover(
        self,
        intent_offset: int | None,
        from_rocketmq: bool,
        rocketmq_end: int,
        committed_index: int,
        known: bool,
        on_doubt: Callable[[int], None],
    ) -> None:
        """Find the log's end, and bring log, limits and derived files into line with it."""
        entries = self.log.entries
        if entries is not None:
            intent_offset = entries.state.load().cut_at
            self._fs.make_dirs(entries.directory)
        limits = read_limits(self._fs, self._root)
        clean = not self._abort.exists()
        boot_id = read_cache_id(self._fs, self._root)
        if limits is not None and limits.file_size != self.file_size:
            raise StoreError(
                f"the store {self._root} has commit log files of {limits.file_size} bytes but"
                f" store.commitlog_file_size is {self.file_size}: set it to {limits.file_size}"
            )
        self.log.queue.load(None if limits is None else limits.file_size)
        same_boot = limits is not None and cache_survives(self._fs, self._root, limits.boot_id)
        recovered = recover(
            self.log, limits,
            clean=clean, same_boot=same_boot, floor=intent_offset, from_rocketmq=from_rocketmq,
            rocketmq_end=rocketmq_end, page_lost=limits is None and known,
        )  # fmt: skip
        if recovered.doubtful:
            on_doubt(recovered.end)
        self._checkpoint.load()
        if entries is not None:
            synced = limits is None or self.config.flush is Flush.SYNC
            load_entries(
                self.log, recovered, trusted=clean,
                committed_index=committed_index if synced else -1, page_lost=limits is None,
            )  # fmt: skip
            if entries.state.is_known and clean:
                self._rescue_appended(recovered.end)
        self._abort.create()  # from here on the store's bytes change
        with contextlib.suppress(OSError, StoreFullError):  # housekeeping tries again, and says so
            self._checkpoint.reserve()
        if limits is not None and same_boot:
            rewrite_unsynced(self.log, recovered, limits.flushed_offset)
        self._renew_names()
        self._adopt(recovered, limits, boot_id)
        self._appender.last_store_timestamp_ms = recovered.last_store_timestamp_ms
        for offset in recovered.wrong_crcs:  # the master's damage, or this disk's
            self.hooks.on_damage(offset)
        logger.info(
            "store %s: log [%d, %d), read from %d, %d records",
            self._root, recovered.min_offset, recovered.end, recovered.scanned_from,
            recovered.records,
        )  # fmt: skip

    def _renew_names(self) -> None:
        """Sync the folders of the log and of the small files, whatever syncs of them have failed.

        A file that is replaced is synced before it gets its name. So once the names are on the
        disk, all that this start has read of such files is there.
        """
        fs, root, entries = self._fs, self._root, self.log.entries
        folders = {root, f"{root}/hastore", self.log.directory}
        if entries is not None:
            folders |= {entries.directory, entries.directory.rpartition("/")[0]}
        for folder in sorted(folders):
            fs.renew_names(folder)

    def _rescue_appended(self, end: int) -> None:
        """Archive what another program appended to a log that this node had closed cleanly."""
        log = self.log
        written = written_end(log, end)
        if written > end:
            assert log.entries is not None
            name = f"{log.entries.end_term}-{end}"
            copy_tail(self._fs, self._root, name, log, end, written)
            logger.warning("%s: another program wrote bytes %d to %d, which do not continue this"
                           " log: they are cut, and archived in rescued/%s",
                           log.directory, end, written, name)  # fmt: skip

    def _adopt(self, recovered: Recovered, limits: Limits | None, boot_id: bytes) -> None:
        """Cut the log at the end that was found, durably; then write the limits and load replay."""
        end = recovered.end
        self.log.set_range(recovered.min_offset, end)
        clear_beyond(self.log, recovered, 0 if limits is None else limits.flushed_offset)
        old = limits if limits is not None else Limits()
        self._limits.open(
            old._replace(
                sequence=old.sequence + 1,
                boot_id=boot_id,
                file_size=self.file_size,
                first_offset=recovered.min_offset,
                flushed_offset=end,
                record_end=end,
                recovery_start=recovered.recovery_start,
                next_recovery_start=recovered.next_recovery_start,
                confirmed_offset=min(old.confirmed_offset, end),
                readable_offset=min(old.readable_offset, end),
            )
        )
        self.flush_service.reset(end)
        self.replay.load()
        self._lower_checkpoint()

    def _start(self) -> None:
        self.is_open = True
        self.rescued.look()
        self.cuts.note_made(self.log.max_offset)  # a crash may have come between cut and note
        self.log.allocator.start()
        self.log.warm_rest()
        self.flush_service.start()
        self.replay.start()
        self._housekeeping.start()

    # -- while it is open -------------------------------------------------------------------------

    def check_place(self) -> None:
        """Close the store if its folder was moved, replaced or removed. Raises StoreMovedError.

        Without this check the node would go on writing to files that the next start does not find,
        and would create new files at the old path, without the lock.
        """
        if not self._lock_file.is_in_place():
            raise self._health.lose(
                f"{self._lock_file.path} is not the file that this node has locked: the store's"
                " folder was moved, replaced or removed; nothing more is written: bring"
                " the folder back, or correct store.root, and start the node again"
            )

    def _keep(self) -> None:
        """Sync the derived files, and write to the checkpoint how far everything is synced.

        Housekeeping calls this each second, and the thread that closes the store once more after
        it. Raises StoreMovedError if the store's folder was moved, SyncFailedError if this call or
        an earlier one could not sync derived files. After an OSError or another StoreError a later
        call may succeed.
        """
        self.check_place()
        self.growth.note(self.log.max_offset, self._clock.monotonic_ms())
        # First, because all else needs room: on a full disk it fails, and the room is in there.
        self._remove_dropped()
        self.rescued.tidy(self.log.min_offset, self.cuts.holds)
        if self._housekeeping.stopping.is_set():
            self.cuts.save_again()  # the audit log could not say any more who dismissed what
        else:
            self.cuts.take_dismissal()
        if self.log.entries is not None:
            try:
                self.log.entries.sync()
            except OSError as failure:
                what = "a sync of the index of entries failed"
                raise self._health.fail(what, failure) from failure
        self._keep_more()
        self.replay.flush()
        with self._noting:
            self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """Write to the checkpoint how far everything is synced. Raises OSError, StoreFullError."""
        flushed, old = self.flush_service.flushed_offset, self._checkpoint.now
        # RocketMQ takes all records as synced that are in a file whose first one was stored earlier
        # than these times. So they follow the log where its times fall, and are never in the
        # future: a time in the future would cover records that are still to come.
        now_ms = self._clock.wall_ms()
        queue_ms = self.queues.flushed_timestamp_ms or old.queue_timestamp_ms
        # Of the log: the store time of the last record in the queues, if the log is synced so far.
        is_synced = self.replay.dispatched_offset <= flushed
        log_ms = queue_ms if is_synced else old.log_timestamp_ms
        now = Checkpoint(
            log_timestamp_ms=_not_ahead(log_ms, old.log_timestamp_ms, now_ms),
            queue_timestamp_ms=_not_ahead(queue_ms, old.queue_timestamp_ms, now_ms),
            index_timestamp_ms=self._index.full_timestamp_ms,
            confirmed_offset=self._limits.now.confirmed_offset,
        )
        if now != old:
            self._checkpoint.save(now, sync=True)

    def _lower_checkpoint(self) -> None:
        """Let the checkpoint's times cover only records that are there, durably.

        What was cut, or lost in a crash, may come again from a master with the same times, and is
        not synced then. Raises OSError.
        """
        with self._noting:
            last_ms, old = self._last_store_ms() or 0, self._checkpoint.now
            now = replace(
                old,
                log_timestamp_ms=min(old.log_timestamp_ms, last_ms),
                queue_timestamp_ms=min(old.queue_timestamp_ms, last_ms),
            )
            if now != old:
                self._checkpoint.save(now, sync=True)

    @property
    def broken_reason(self) -> str | None:
        """Why the store is closed for good; None while it works."""
        return self._health.reason

    @property
    def clock_problem(self) -> str | None:
        """What is wrong with the store times of the log, for the status; puts go on."""
        return self._times.problem()

    def _last_store_ms(self) -> int | None:
        """Return the store time of the last record in the queues, if it can be read."""
        offset = self.queues.last_offset()
        if offset is None or not self.log.min_offset <= offset < self.log.max_offset:
            return None
        try:
            return store_timestamp_ms(self.log, offset)
        except (OSError, StoreError) as failure:
            logger.warning("the store time at offset %d is not known: %s", offset, failure)
            return None

    @property
    def problems(self) -> list[str]:
        """What fails at present, for the status: for example a full disk, or blocked replay."""
        entries = self.log.entries
        found = (
            self._health.reason,
            self.log.allocator.failure_reason,
            self.flush_service.failure_reason,
            self.replay.blocked_reason,
            self._housekeeping.failure_reason,
            self._drop_failure,
            None if entries is None else entries.failure_reason,
            *self.reader.problems,
        )
        return [reason for reason in found if reason is not None]

    @property
    def lacks_room(self) -> bool:
        """Whether something fails that may fail for want of room.

        Queues whose sync has failed do not: no room helps them before the next start.
        """
        others = {self._drop_failure, self.replay.sync_failure, *self.reader.problems}
        if not self.replay.lacks_room:
            others.add(self.replay.blocked_reason)
        return not others.issuperset(self.problems)

    @property
    def no_room(self) -> str | None:
        """Why there is no next log file, such as a full disk, with the remedy; None if there is."""
        return self.log.allocator.refusal

    @property
    def spare_bytes(self) -> int:
        """The bytes that the log's next file has already, so that no free space is needed."""
        return self.log.allocator.spare_bytes

    def keep_reserve(self, sizes: Sequence[int]) -> None:
        """Have room for files of these sizes, and for small ones, whatever else fills the disk.

        Raises StoreFullError if there is no room for the reserve, StoreMovedError, OSError.
        """
        self.check_place()
        self._fs.keep_reserve(f"{self._root}/hastore", [*sizes, *_SMALL_FILES])

    def free_bytes(self) -> int:
        """Return the room left on the store's disk."""
        return self._fs.free_bytes(self._root)

    # -- close ------------------------------------------------------------------------------------

    def close(self, *, unlock: bool = True) -> None:
        """Stop cleanly: sync all, save the checkpoint, remove `abort`, unlock.

        Raises StoreError or StoreBrokenError if something was not written. The file `abort` stays
        then, so that the next open recovers the store as after a crash.
        """
        with self.retention.closing():
            if self.is_open:
                self.is_open = False
                self._stop(unlock)
            elif unlock:
                self._lock_file.release()
        self._wake()

    def _stop(self, unlock: bool) -> None:
        if self._health.reason is None:
            self.replay.wait_dispatched(self.log.record_end, _DRAIN_S)
        self._housekeeping.stop()
        for service in (self.replay, self.flush_service, self.log.allocator):
            service.stop()
        try:
            self._settle()
        except (OSError, HastoreError) as failure:
            if isinstance(failure, StoreBrokenError):
                raise
            raise StoreError(
                f"the store {self._root} did not stop cleanly: {failure}; the next start"
                " recovers it"
            ) from failure
        finally:
            self._release()
            if unlock:
                self._lock_file.release()

    def _settle(self) -> None:
        """Sync everything, then remove `abort`."""
        self.check_place()
        self._health.raise_if_closed()
        self.flush_service.flush()
        self._housekeeping.keep()
        try:
            self._window.save()
        except OSError as failure:  # the next start reads more of the log
            logger.warning("the snapshot of the deduplication window was not written: %s", failure)
        end = self._record_end()
        self._limits.update(sync=True, record_end=end, flushed=end)
        self.log.allocator.discard()
        self._abort.remove()

    def _release(self) -> None:
        self.replay.close()
        self._limits.close()
        self._checkpoint.close()
        self.log.queue.release()
        if self.log.entries is not None:
            self.log.entries.close()

    # -- offsets ----------------------------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        """The offset of the log's first byte."""
        return self.log.min_offset

    @property
    def max_offset(self) -> int:
        """The end of the written bytes; on a slave perhaps inside a record."""
        return self.log.max_offset

    @property
    def whole_offset(self) -> int:
        """The end of the last whole record: `max_offset`, unless the last record is incomplete."""
        log = self.log
        if self._record_end() >= log.max_offset:
            return log.max_offset
        with log.lock:
            known = max(log.record_end, min(self.replay.dispatched_offset, log.max_offset))
            log.record_end = whole_end(log, known)
            return log.record_end

    def _record_end(self) -> int:
        """Return the end of the last record that is known to be whole, without reading the log."""
        return max(self.log.record_end, self.replay.dispatched_offset)

    @property
    def flushed_offset(self) -> int:
        """The end of the synced bytes: all below survive a power loss."""
        return self.flush_service.flushed_offset

    @property
    def dispatched_offset(self) -> int:
        """Replay's offset: queues, index and deduplication window have all records below."""
        return self.replay.dispatched_offset

    @property
    def replayed_records(self) -> int:
        """How many records replay has dispatched since the start."""
        return self.replay.records

    def flush(self) -> int:
        """Sync all written bytes; see FlushService.flush."""
        return self.flush_service.flush()

    @property
    def replay_problem(self) -> str | None:
        """Why replay has stopped, None if it has not."""
        return self.replay.blocked_reason

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; see IndexBuildService.wait_dispatched."""
        return self.replay.wait_dispatched(offset, timeout_s)

    def why_too_large(self, body_size: int, size: int) -> str | None:
        """Return why a client's record of these sizes cannot be put; None if it can.

        A put of several records is checked one by one: those that cannot be stored do not keep the
        others from it. Who wants all or none asks this before.
        """
        return self._appender.why_too_large(body_size, size)

    def find_topic(self, name: str) -> TopicConfig | None:
        """Return a topic as the log's end has it; None if there is none of that name.

        A topic that nobody has configured shows in the queues only after replay has read one of its
        messages. A put to it may have been acknowledged before.
        """
        replayed = self.dispatched_offset  # before the queues are looked at
        found = self.topic_table.find(name)
        raw = name.encode("utf-8", "surrogateescape")
        if found is not None or self._table.put_end(raw) <= max(
            replayed, self.queues.begin_of(name)
        ):
            return found
        count = self._table.count(raw)
        return TopicConfig(name, count, count)

    def begin_queues(self, ends: Mapping[tuple[str, int], int]) -> None:
        """Let puts begin these queues at these offsets, as long as the log has nothing of them."""
        begins = {
            (topic.encode("utf-8", "surrogateescape"), queue_id): after
            for (topic, queue_id), after in ends.items()
        }
        with self.log.lock:  # a put that has read the old ones has grown the log
            self._table.begins = begins

    def delivery_queue(self, topic: str, queue_id: int) -> int:
        """Return the queue of a topic that gets a message which was put to `queue_id` earlier.

        That is its own one as long as producers or consumers have it.
        """
        config = self.topic_table.recorded(topic)
        queues = 0 if config is None else max(config.read_queues, config.write_queues)
        return self._table.delivery_queue(
            topic.encode("utf-8", "surrogateescape"), queue_id, queues
        )

    def taken_delays(
        self,
        offsets: Mapping[int, int],
        floor: int,
        now_ms: int,
        *,
        again: bool = False,
        is_brokers: Callable[[int], bool] | None = None,
    ) -> list[bytes]:
        """Return the records that say which of a broker's delayed messages were delivered.

        See taken_delays.py. Raises StoreError, OSError if the log cannot be read.
        """
        log = self.log
        return taken_marks(
            log, log.form, self.deliveries, offsets, floor, now_ms,
            again=again, is_brokers=is_brokers,
        )  # fmt: skip

    def untaken_delays(
        self, floor: int, *, again: bool, is_brokers: Callable[[int], bool] | None
    ) -> frozenset[int]:
        """Return the levels with a broker's messages of which `taken_delays` would say something.

        Raises StoreError, OSError.
        """
        found = untaken_levels(self.deliveries, floor, again=again, is_brokers=is_brokers)
        return frozenset(found)

    def producer_progress(self, producer: bytes) -> ProducerProgress | None:
        """Return how far a producer came; None while the window lacks a part of the log."""
        if max(self._window.end_offset, self.replay.dispatched_offset) < self.log.max_offset:
            return None
        return self._window.progress(producer)

    @property
    def confirmed_offset(self) -> int:
        """Every byte below is known to be on `acks + 1` nodes."""
        return self._limits.now.confirmed_offset

    @property
    def readable_offset(self) -> int:
        """The offset up to which consumers read."""
        return self._limits.now.readable_offset

    def set_limits(
        self, *, confirmed: int | None = None, readable: int | None = None, tell: bool = True
    ) -> None:
        """Publish confirmed and readable offset, which survive kill -9. Raises StoreBrokenError.

        Without `tell` the caller calls `tell_readers` as soon as it holds no lock.
        """
        try:
            self._limits.update(confirmed=confirmed, readable=readable)
        except OSError as failure:
            raise self._health.fail("the limits page cannot be written", failure) from failure
        if tell:
            if self.replay.holds:
                self.replay.go_on()
            self.hooks.on_readable()

    def fence(self, ranges: Sequence[tuple[int, int]], times_cut: int) -> bool:
        """Let reads of these ranges of the log fail as damaged, and of no others.

        Returns False, and does nothing, if the log was cut since `times_cut` was read: other
        records may be there now. A cut lifts the fences beyond it.
        """
        with self.log.lock:
            if self.times_cut != times_cut:
                return False
            self.log.fenced = tuple(ranges)
            return True

    def mend(
        self, parts: Sequence[tuple[int, bytes]], times_cut: int, *, skip_unreadable: bool = False
    ) -> None:
        """Write bytes at offsets over damaged ones, durably; the caller knows that they fit.

        With `skip_unreadable`, parts are left out whose pages the disk cannot read. Raises
        StoreError if the log was cut since `times_cut` was read, if retention has removed the
        bytes, or if they cannot be written; StoreBrokenError if the sync fails.
        """
        if max((offset + len(data) for offset, data in parts), default=0) > self.flushed_offset:
            self.flush()
        # The open files, not their names: retention, or a cut, may remove those before the syncs.
        touched: dict[int, File] = {}
        for offset, data in parts:
            at = 0
            while at < len(data):
                place = offset + at
                file, size = self._mend_piece(place, data[at:], times_cut, skip_unreadable)
                touched[place // self.file_size] = file
                at += size
        for file in touched.values():
            with self.flush_service.sync_lock:
                try:
                    file.sync()
                except OSError as failure:
                    what = f"a sync of repaired bytes at {parts[0][0]} failed"
                    raise self._health.fail(what, failure) from failure

    def _mend_piece(
        self, place: int, data: bytes, times_cut: int, skip_unreadable: bool
    ) -> tuple[File, int]:
        """Write the first bytes of `data`; return the open file that has them, and how many."""
        with self.log.lock:  # excludes cuts and appends, for a piece at a time
            self._health.raise_if_closed()
            file = self.log.queue.find(place)
            if not self.is_open or self.times_cut != times_cut or file is None:
                raise StoreError(f"the log has changed at {place} meanwhile")
            piece = data[: min(_MEND_BYTES, file.end - place)]
            opened = None
            try:
                opened = self.log.pin(file)[0]
                opened.pwrite(piece, place - file.start)
            except OSError as failure:
                if opened is None or not skip_unreadable or failure.errno != errno.EIO:
                    raise StoreError(f"bytes at {place} cannot be written: {failure}") from failure
            return opened, len(piece)

    def readers_wait(self) -> bool:
        """Whether a reader waits for new records, or did so a moment ago."""
        return self.hooks.readers_wait()

    def tell_readers(self) -> None:
        """Let readers see what has become readable; the caller holds no lock of the node."""
        if self.replay.holds:
            self.replay.go_on()
        (self.hooks.answer_readers or self.hooks.on_readable)()

    def wait_beyond(self, offset: int, timeout_s: float) -> int:
        """Wait until the log ends beyond `offset`, or the store closes; returns the log's end."""
        if self.log.max_offset <= offset:
            with self._changed:
                self._waiters += 1
                try:
                    self._changed.wait_for(
                        lambda: self.log.max_offset > offset or not self.is_open, timeout_s
                    )
                finally:
                    self._waiters -= 1
        return self.log.max_offset

    def _grown(self, *, soon: bool = False) -> None:
        if self.replay.idle:
            self.replay.notify(soon=soon)
        if self._sync_each_put:
            self.flush_service.request()
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # -- cut --------------------------------------------------------------------------------------

    def truncate(self, offset: int, *, exact: bool = False) -> None:
        """Cut the log at `offset`, durably, with all that is derived from it.

        If `offset` lies inside a record, that record is cut too; in a log of entries one ends
        there. `exact` says that one ends there in a log of records, too: then damage before it does
        not lead the cut further back. The limits are lowered first. If a crash interrupts the cut,
        recovery then finds the end of a whole record, and does not count the cut bytes as missing.
        Raises UsageError for an offset outside the log, StoreBrokenError if the disk fails, or if
        the records are damaged that must be read again for what is derived.
        """
        log = self.log
        with self._stopped():
            if not log.min_offset <= offset <= log.max_offset:
                raise UsageError(f"offset {offset} is outside [{log.min_offset}, {log.max_offset}]")
            start = max(log.min_offset, offset - offset % log.file_size)
            offset = offset if exact else self._cut_point(offset)
            self.times_cut += 1  # before the bytes change, for who reads them without a lock
            log.fenced = tuple(one for one in log.fenced if one[1] <= offset)
            self._limits.cut(offset, recovery_start=start)
            log.truncate(offset)
            self.flush_service.reset(min(self.flush_service.flushed_offset, offset))
            # Puts have added records beyond replay's offset to the queue offsets and to the
            # deduplication window. Both are cut to that offset, and replay adds the rest again.
            try:
                self.replay.truncate(min(offset, self.replay.dispatched_offset))
            except StoreError as failure:  # what must be read again for that is damaged
                raise self._health.fail("a cut of the log failed", failure) from failure
            self._lower_checkpoint()
            self.cuts.note_made(offset)

    def cut_point(self, offset: int) -> int:
        """Return where a cut at `offset` would begin; see `truncate`.

        If that is further back, `on_blocked_cut` is told, since damage may be the reason.
        """
        with self.log.lock:
            begin = self._cut_point(offset)
        if begin < offset:
            self.hooks.on_blocked_cut(begin)
        return begin

    def _cut_point(self, offset: int) -> int:
        """Return where a cut at `offset` begins; the log is locked.

        In a log of records it is found by their sizes, so damage may lead it further back. The
        index of a log of entries knows it: nothing that is committed may go.
        """
        return offset if self.log.entries is not None else cut_point(self.log, offset)

    def archive(self, offset: int, name: str) -> int:
        """Copy what a cut at `offset` takes to `rescued/<name>/`, synced; returns its bytes.

        Raises StoreFullError if there is no room, StoreError if the copy fails.
        """
        log = self.log
        with log.lock:
            offset, end = self._cut_point(offset), log.max_offset
            folder = copy_tail(self._fs, self._root, name, log, offset, end)
            self._note_cut(folder, offset)
        self.rescued.look()
        return end - offset

    def _note_cut(self, folder: str, offset: int) -> None:
        """Note which messages beyond `offset` are about to leave the log; it is locked.

        Of a log of entries nothing is cut that is committed. Of a log of records it may be, with
        --accept-loss, and is told too.
        """
        if self.log.entries is not None:
            offset = max(offset, min(self.confirmed_offset, self.log.max_offset))
        messages, all_counted = count_messages(self.log, offset)
        if not messages and all_counted:
            self.cuts.forget_noted()
            return
        bare = folder.rpartition("/")[2]
        self.cuts.note(bare, offset, self.log.max_offset, messages, all_counted=all_counted)

    def set_aside(self, name: str, shared: int | None = None) -> str:
        """Move log, queues and index to `rescued/<name>/`, and start an empty log.

        Up to offset `shared` others have the log too; None: up to the confirmed offset. Messages
        beyond it are told as cut. Returns that folder. Raises StoreFullError, with nothing changed,
        if there is no room for the files of another log.
        """
        needed = 2 * self.file_size
        folder = rescue_folder(self._fs, self._root, name)
        with self._stopped():
            free = self.free_bytes()
            if free < needed:
                raise StoreFullError(
                    f"{self._root}: no room for another log beside the old one, {free} bytes are"
                    f" free; free {needed} bytes on its file system, for example in"
                    f" {self._root}/rescued",
                    needed_bytes=needed,
                )
            # What is confirmed is on other nodes too; the rest may be nowhere else.
            shared = self.confirmed_offset if shared is None else shared
            self._note_cut(folder, max(self.log.min_offset, min(shared, self.log.max_offset)))
            self._move_log(folder)
            self.cuts.note_made(0)
        self.rescued.look()
        logger.warning("the store's log was set aside in %s", folder)
        return folder

    def drop(self) -> None:
        """Give up log, queues and index, and start an empty log; nothing of them is kept.

        They are moved away, durably, and removed soon after by housekeeping, also of the next
        start: removing much takes long. Raises StoreBrokenError.
        """
        with self._stopped(), self._dropping:
            taken = self._fs.list_dir(self._dropped)
            number = next(n for n in itertools.count(1) if str(n) not in taken)
            self._move_log(f"{self._dropped}/{number}")
            self.cuts.note_made(0)

    @property
    def _dropped(self) -> str:
        return f"{self._root}/hastore/dropped"

    def _remove_dropped(self) -> None:
        """Remove what was dropped; a failure is a problem, and is tried again."""
        try:
            with self._dropping:
                names = self._fs.list_dir(self._dropped)
            for name in names:
                self._fs.remove_tree(f"{self._dropped}/{name}")
            self._drop_failure = None
        except OSError as failure:
            if self._drop_failure is None:
                logger.error("%s cannot be removed: %s", self._dropped, failure)
            self._drop_failure = f"{self._dropped} has an old log, and cannot be removed: {failure}"

    def _move_log(self, folder: str) -> None:
        """Move log, queues and index to a folder, and start an empty log; all else is stopped."""
        fs, root = self._fs, self._root
        fs.make_dirs(folder)
        # Limits and replay's progress are reset first: if a crash interrupts the moves, the next
        # start reads the log that it finds from its beginning, which may lie inside a file.
        self.times_cut += 1
        self._limits.restart(self.log.min_offset)
        self.replay.reset(0)
        self.log.queue.release()
        for moved in self._moved():
            if fs.exists(f"{root}/{moved}"):
                fs.make_dirs(f"{folder}/{moved}".rpartition("/")[0])
                fs.rename(f"{root}/{moved}", f"{folder}/{moved}")
        with self._noting:
            self._checkpoint.forget()
        fs.sync_dir(folder)
        fs.sync_dir(root)
        self._limits.restart(0)
        fs.make_dirs(self.log.directory)
        self._restart(0)

    def _moved(self) -> list[str]:
        """Return what belongs to the log, as paths below the root."""
        log = self.log
        found = [] if log.entries is None else [log.directory, log.entries.directory]
        return [*(path.removeprefix(f"{self._root}/") for path in found), *_MOVED]

    def _begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`. Raises UsageError if the present log is not empty."""
        queue = self.log.queue
        with self._stopped():
            if self.log.max_offset > self.log.min_offset:
                raise UsageError(
                    f"the log holds [{self.log.min_offset}, {self.log.max_offset}):"
                    " only an empty log can begin elsewhere"
                )
            queue.discard()
            queue.remove_from(0)
            self._limits.restart(offset)
            self._restart(offset)

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        """Exclude retention, replay, appends and syncs; an OSError closes the store."""
        with (
            self.retention.removing,
            self.replay.paused(),
            self.log.lock,
            self.flush_service.sync_lock,
        ):
            self._health.raise_if_closed()
            try:
                yield
            except OSError as failure:
                raise self._health.fail("a cut of the log failed", failure) from failure

    def _restart(self, offset: int) -> None:
        """Go on with an empty log that begins at `offset`."""
        self.log.queue.forget()
        self.log.fenced = ()
        self.log.set_range(offset, offset)
        self.flush_service.reset(offset)
        self.replay.reset(offset)
        self._table.advance(offset)
        self._window.advance(offset)
        self._lower_checkpoint()


def _not_ahead(stored_ms: int, old_ms: int, now_ms: int) -> int:
    """Return a time for the checkpoint: the old one while the new one has not come yet."""
    return stored_ms if stored_ms <= now_ms else min(old_ms, now_ms)


class HousekeepingService(Service):
    """Call `keep` each second while the store is open; repeated failures are logged once."""

    def __init__(self, keep: Callable[[], None], *, on_failure: OnFailure) -> None:
        super().__init__("StoreHousekeepingService", on_failure=on_failure)
        self.keep = keep
        self.failure_reason: str | None = None  # why the last call failed, for the status

    def run(self) -> None:
        """Call `keep` at its interval until stopped."""
        while not self.stopping.wait(HOUSEKEEPING_S):
            try:
                self.keep()
                self.failure_reason = None
            except (OSError, StoreError) as failure:
                if self.failure_reason is None:
                    logger.error("store housekeeping failed: %s", failure)
                self.failure_reason = str(failure)
