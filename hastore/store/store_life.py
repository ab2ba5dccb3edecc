"""How a store opens, keeps house, and closes.

Open: lock; read the limits page and `abort`; find the log's end; clear what is beyond it; write
both limits slots under the present boot id; open what is derived; start the threads. Close in
reverse, `abort` last: while it exists the next open reads as after a crash.
"""

import logging

from hastore.clock import Clock
from hastore.config.model import StoreConfig
from hastore.errors import HastoreError, StoreBrokenError, StoreError
from hastore.service import OnFailure, raise_failure
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.queue_offsets import QueueOffsetTable
from hastore.store.derived.index.key_index import KeyIndex
from hastore.store.derived.queues.consume_queue import ConsumeQueueTable
from hastore.store.fs.filesystem import File, FileSystem
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.flush import FlushService, HousekeepingService
from hastore.store.log.health import StoreHealth
from hastore.store.log.recovery import Recovered, clear_beyond, recover
from hastore.store.parts import StoreParts
from hastore.store.replay.service import IndexBuildService
from hastore.store.state.checkpoint import AbortFile, Checkpoint, CheckpointFile
from hastore.store.state.limits import Limits, LimitsPage, read_limits
from hastore.store.state.replay_progress import ReplayState, read_boot_id

log = logging.getLogger(__name__)

_HOUSEKEEPING_MS = 1_000
_DRAIN_S = 2.0  # how long a stop waits for replay; the rest is replayed at the next start


class StoreLife:
    """Open and close the parts of a store."""

    def __init__(
        self,
        config: StoreConfig,
        fs: FileSystem,
        clock: Clock,
        on_failure: OnFailure | None,
    ) -> None:
        """Prepare; without `on_failure` a thread that fails says so by `threading.excepthook`."""
        self.is_open = False
        self._fs = fs
        self._root = config.root
        self._on_failure = on_failure or raise_failure
        self._on_closed = on_failure
        self._lock_file: File | None = None
        self._abort = AbortFile(fs, config.root)
        self._checkpoint = CheckpointFile(fs, config.root)
        self._housekeeping: HousekeepingService | None = None
        self.parts = self._make_parts(config, fs, clock)

    def _make_parts(self, config: StoreConfig, fs: FileSystem, clock: Clock) -> StoreParts:
        root = config.root
        health = StoreHealth(self._on_closed)
        commit_log = CommitLog(
            fs,
            root,
            config.commitlog_file_size,
            health,
            on_failure=self._on_failure,
            warm_files=config.warm_files,
        )
        page = LimitsPage(fs, root)
        queues = ConsumeQueueTable(fs, root, units_per_file=config.consume_queue_units)
        index = KeyIndex(
            fs,
            f"{root}/index",
            commit_log,
            slots=config.index_slots,
            entries=config.index_entries,
            clock=clock,
        )
        window = DedupWindow(fs, root)
        table = QueueOffsetTable(queues.topics, config.default_queues)
        state = ReplayState(
            fs,
            f"{root}/hastore/replay",
            units=config.consume_queue_units,
            slots=config.index_slots,
            entries=config.index_entries,
        )
        build = IndexBuildService(
            commit_log,
            [queues, index, window, table],
            state=state,
            on_failure=self._on_failure,
            clock=clock,
        )
        flush = FlushService(
            commit_log,
            page,
            health,
            interval_ms=config.flush_interval_ms,
            record_end=lambda: max(commit_log.record_end, build.dispatched_offset),
            on_failure=self._on_failure,
        )
        return StoreParts(
            config, fs, clock, health, commit_log, page, flush, queues, index, window, table, build
        )

    # -- open -------------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the store's lock, unless this object holds it. StoreInUseError."""
        if self._lock_file is None:
            self._fs.make_dirs(self._root)
            self._lock_file = self._fs.lock(f"{self._root}/lock")

    def unlock(self) -> None:
        """Give the store's lock back."""
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None

    def open(self, intent_offset: int | None, *, from_rocketmq: bool) -> int:
        """Open everything; returns the last store timestamp known, in ms."""
        try:
            self.lock()
            try:
                self._fs.make_dirs(f"{self._root}/commitlog")
                self._fs.make_dirs(f"{self._root}/hastore")
                return self._open_locked(intent_offset, from_rocketmq)
            except BaseException:
                self._release()
                self.unlock()
                raise
        except OSError as failure:
            raise StoreError(
                f"the store {self._root} cannot be opened: {failure}; give the node a directory"
                " that it can write (store.root)"
            ) from failure

    def _open_locked(self, intent_offset: int | None, from_rocketmq: bool) -> int:
        parts = self.parts
        limits = read_limits(self._fs, self._root)
        clean = not self._abort.exists()
        boot_id = read_boot_id(self._fs)
        if limits is not None and limits.file_size != parts.log.file_size:
            raise StoreError(
                f"the store {self._root} has commit log files of {limits.file_size} bytes but"
                f" store.commitlog_file_size is {parts.log.file_size}: set the key to the former"
            )
        parts.log.queue.load(None if limits is None else limits.file_size)
        recovered = recover(
            parts.log,
            limits,
            clean=clean,
            same_boot=limits is not None and limits.boot_id == boot_id,
            floor=intent_offset,
            from_rocketmq=from_rocketmq,
        )
        checkpoint = self._checkpoint.load()
        self._abort.create()  # from here on bytes change
        self._adopt(recovered, limits, boot_id)
        self._start()
        log.info(
            "store %s: log [%d, %d), read from %d, %d records",
            self._root, recovered.min_offset, recovered.end, recovered.scanned_from,
            recovered.records,
        )  # fmt: skip
        return max(recovered.last_store_timestamp_ms, checkpoint.log_timestamp_ms)

    def _adopt(self, recovered: Recovered, limits: Limits | None, boot_id: bytes) -> None:
        """Make the log what recovery found, on the disk too, before the page says so."""
        parts = self.parts
        end = recovered.end
        parts.log.set_range(recovered.min_offset, end)
        clear_beyond(parts.log, recovered, 0 if limits is None else limits.flushed_offset)
        old = limits if limits is not None else Limits()
        parts.page.open(
            old._replace(
                sequence=old.sequence + 1,
                boot_id=boot_id,
                file_size=parts.log.file_size,
                first_offset=recovered.min_offset,
                flushed_offset=end,
                record_end=end,
                recovery_start=recovered.recovery_start,
                next_recovery_start=recovered.next_recovery_start,
                confirmed_offset=min(old.confirmed_offset, end),
                readable_offset=min(old.readable_offset, end),
            )
        )
        parts.flush.reset(end)
        parts.build.load()

    def _start(self) -> None:
        parts = self.parts
        self.is_open = True
        parts.log.allocator.start()
        parts.log.warm_rest()
        parts.flush.start()
        parts.build.start()
        self._housekeeping = HousekeepingService(
            self._keep_house, interval_ms=_HOUSEKEEPING_MS, on_failure=self._on_failure
        )
        self._housekeeping.start()

    # -- while it runs ----------------------------------------------------------------------------

    def check_place(self) -> None:
        """Close the store when its folder was moved, replaced or removed; StoreMovedError.

        The files that are open would take more bytes, where no start finds them; what is made by
        path would come to lie beside them, without the lock.
        """
        path = f"{self._root}/lock"
        if self._lock_file is not None and not self._fs.is_same_file(path, self._lock_file):
            raise self.parts.health.lose(
                f"{path} is not the file that this node has locked: the store's folder was moved, "
                "replaced or removed under it; nothing more is written: bring the folder back, or "
                "correct store.root, and start the node again"
            )

    def free_bytes(self) -> int:
        """Return the room left on the store's disk."""
        return self._fs.free_bytes(self._root)

    @property
    def problems(self) -> list[str]:
        """What does not work at present."""
        keeper = self._housekeeping
        found = [
            self.parts.health.reason,
            self.parts.log.allocator.failure_reason,
            self.parts.flush.failure_reason,
            self.parts.build.blocked_reason,
            None if keeper is None else keeper.failure_reason,
        ]
        return [reason for reason in found if reason is not None]

    def _keep_house(self) -> None:
        """Sync what is derived, and note in RocketMQ's checkpoint how far everything is."""
        self.check_place()
        parts = self.parts
        parts.build.flush()
        flushed = parts.flush.flushed_offset
        old = self._checkpoint.now
        queue_ms = parts.queues.flushed_timestamp_ms
        now = Checkpoint(
            # The queues know the time of every record that they hold; the log is synced so far.
            log_timestamp_ms=(
                max(queue_ms, old.log_timestamp_ms)
                if parts.build.dispatched_offset <= flushed
                else old.log_timestamp_ms
            ),
            queue_timestamp_ms=max(queue_ms, old.queue_timestamp_ms),
            index_timestamp_ms=parts.index.full_timestamp_ms,
            master_flushed_offset=0,
            confirmed_offset=parts.page.now.confirmed_offset,
        )
        if now != old:
            self._checkpoint.save(now, sync=True)

    # -- close ------------------------------------------------------------------------------------

    def close(self, *, unlock: bool) -> None:
        """Close everything; what fails leaves `abort` behind and is raised at the end."""
        if not self.is_open:
            if unlock:
                self.unlock()
            return
        self.is_open = False
        parts = self.parts
        if parts.health.reason is None:
            parts.build.wait_dispatched(parts.log.record_end, _DRAIN_S)
        if self._housekeeping is not None:
            self._housekeeping.stop()
        for service in (parts.build, parts.flush, parts.log.allocator):
            service.stop()
        try:
            self._settle()
        except (OSError, HastoreError) as failure:
            if isinstance(failure, StoreBrokenError):
                raise
            raise StoreError(f"the store {self._root} did not stop cleanly: {failure}") from failure
        finally:
            self._release()
            if unlock:
                self.unlock()

    def _settle(self) -> None:
        parts = self.parts
        self.check_place()
        parts.health.check()
        parts.flush.flush()
        self._keep_house()
        try:
            parts.window.save()
        except OSError as failure:  # a full disk: the next start reads more of the log
            log.warning("the idempotence snapshot was not written: %s", failure)
        record_end = max(parts.log.record_end, parts.build.dispatched_offset)
        parts.page.update(sync=True, record_end=record_end, flushed=record_end)
        parts.log.allocator.discard()
        self._abort.remove()

    def _release(self) -> None:
        parts = self.parts
        parts.build.close()
        parts.page.close()
        self._checkpoint.close()
        parts.log.queue.release()
