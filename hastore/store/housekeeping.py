"""The store's housekeeping: once a second, sync derived files and write RocketMQ's checkpoint.

`keep` runs in this service's thread while the store is open, and once more in the thread that
closes the store, after this service has stopped.
"""

import logging
from collections.abc import Callable

from hastore.errors import StoreError
from hastore.service import OnFailure, Service
from hastore.store.derived.consume_queue import ConsumeQueueTable
from hastore.store.derived.key_index import KeyIndex
from hastore.store.log.commit_log import StoreHealth
from hastore.store.log.entry_index import EntryIndex
from hastore.store.log.flush import FlushService
from hastore.store.replay import IndexBuildService
from hastore.store.state.limits import LimitsPage
from hastore.store.state.marker_files import Checkpoint, CheckpointFile

log = logging.getLogger(__name__)

INTERVAL_S = 1.0


class HousekeepingService(Service):
    """Call `keep` every INTERVAL_S; repeated failures are logged once."""

    def __init__(
        self,
        check_place: Callable[[], None],
        health: StoreHealth,
        entries: EntryIndex | None,
        flush_service: FlushService,
        replay: IndexBuildService,
        queues: ConsumeQueueTable,
        index: KeyIndex,
        limits: LimitsPage,
        checkpoint: CheckpointFile,
        keep_more: Callable[[], None],
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `check_place()` raises StoreMovedError when the store's folder was moved.

        `entries` is the index of a log of entries. `keep` calls `keep_more()` too.
        """
        super().__init__("StoreHousekeepingService", on_failure=on_failure)
        self.failure_reason: str | None = None  # why the last call failed, for the status
        self._check_place = check_place
        self._health = health
        self._entries = entries
        self._flush_service = flush_service
        self._replay = replay
        self._queues = queues
        self._index = index
        self._limits = limits
        self._checkpoint = checkpoint
        self._keep_more = keep_more

    def run(self) -> None:
        """Call `keep` at its interval until stopped."""
        while not self.stopping.wait(INTERVAL_S):
            try:
                self.keep()
                self.failure_reason = None
            except (OSError, StoreError) as failure:
                if self.failure_reason is None:
                    log.error("store housekeeping failed: %s", failure)
                self.failure_reason = str(failure)

    def keep(self) -> None:
        """Sync the derived files, and write to the checkpoint how far everything is synced.

        Raises StoreMovedError if the store's folder was moved, SyncFailedError if this call or an
        earlier one could not sync derived files. After an OSError or another StoreError a later
        call may succeed.
        """
        self._check_place()
        if self._entries is not None:
            try:
                self._entries.sync()
            except OSError as failure:
                what = "a sync of the index of entries failed"
                raise self._health.fail(what, failure) from failure
        self._keep_more()
        self._replay.flush()
        flushed = self._flush_service.flushed_offset
        old = self._checkpoint.now
        queue_ms = self._queues.flushed_timestamp_ms
        now = Checkpoint(
            # The store time of the last record in the queues if the log is synced that far,
            # else the time of the last checkpoint.
            log_timestamp_ms=(
                max(queue_ms, old.log_timestamp_ms)
                if self._replay.dispatched_offset <= flushed
                else old.log_timestamp_ms
            ),
            queue_timestamp_ms=max(queue_ms, old.queue_timestamp_ms),
            index_timestamp_ms=self._index.full_timestamp_ms,
            master_flushed_offset=0,
            confirmed_offset=self._limits.now.confirmed_offset,
        )
        if now != old:
            self._checkpoint.save(now, sync=True)
