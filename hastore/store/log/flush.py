"""The flushing thread: sync the log on demand, as a group commit, and at an interval.

`flushed_offset` moves only after fdatasync of every file below it has succeeded. A failed sync
closes the store for good (StoreHealth) and is never tried again. Without a free descriptor no sync
is begun: nothing is lost then, and a later attempt may succeed.
"""

import logging
import threading
from collections.abc import Callable

from hastore.bounded_log import SlowLines
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.counters import Histogram
from hastore.errors import StoreBrokenError, StoreError
from hastore.fs.filesystem import NO_DESCRIPTOR
from hastore.service import OnFailure, Service
from hastore.store.log.commit_log import CommitLog, StoreHealth
from hastore.store.state.limits import LimitsPage

log = logging.getLogger(__name__)

_RETRY_S = 0.1
HANGS_MS = 5_000.0  # no disk that works takes so long for a sync of a few bytes
SLOW_BYTES_PER_MS = 4096  # what a slow one syncs at least, beside others that use it


class FlushService(Service):
    """Sync the log on request and every `interval_ms`; requests during a sync share the next one.

    Thread-safe. `flush` syncs in the calling thread.
    """

    def __init__(
        self,
        commit_log: CommitLog,
        page: LimitsPage,
        health: StoreHealth,
        *,
        interval_ms: int,
        record_end: Callable[[], int],
        on_flushed: Callable[[int], None],
        on_failure: OnFailure,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare; `record_end()` returns the end of the last record that is known to be whole.

        `on_flushed(offset)` is called in the thread that synced, without the sync lock, after
        `flushed_offset` moved.
        """
        super().__init__("FlushCommitLogService", on_failure=on_failure)
        self.flushed_offset = 0
        self.times = Histogram()  # changed with the sync lock, as is
        self.synced_bytes = 0
        self._begun_ms: float | None = None  # when the sync that runs began
        self._syncing = 0  # how many bytes it syncs
        self._slow = SlowLines(log, None, clock=clock)
        self._clock = clock
        self._on_flushed = on_flushed
        self._log = commit_log
        self._page = page
        self._health = health
        self._interval_s = interval_ms / 1000
        self._record_end = record_end
        self.sync_lock = threading.RLock()  # held by a sync or a cut; taken after the log's lock
        self._changed = threading.Condition()
        self._requested = False
        self._waiters = 0
        self.failure_reason: str | None = None  # why no sync could be begun

    @property
    def running_ms(self) -> float:
        """For how long the sync that runs now has been running; 0: none runs. Takes no lock."""
        begun_ms = self._begun_ms
        return 0.0 if begun_ms is None else max(0.0, self._clock.monotonic_ms() - begun_ms)

    @property
    def sync_problem(self) -> str | None:
        """What an operator must look at while a sync does not return; else None."""
        if self.running_ms < HANGS_MS + self._syncing / SLOW_BYTES_PER_MS:
            return None
        return (
            f"a sync of the log has not returned for {HANGS_MS / 1000:.0f} s or more: look at the"
            " disk of this node, and let another node take puts meanwhile"
        )

    def tell_slow(self, slow_ms: float | None) -> None:
        """Log syncs that take longer than that from now on; None: none."""
        self._slow = SlowLines(log, slow_ms, clock=self._clock)

    def reset(self, offset: int) -> None:
        """Set how far the log is synced, at open and after the log was cut or moved away."""
        with self._changed:
            self.flushed_offset = offset
            self._changed.notify_all()

    def request(self) -> None:
        """Ask for a sync soon, without waiting."""
        with self._changed:
            self._requested = True
            self._changed.notify_all()

    def flush(self) -> int:
        """Sync everything written so far; returns `flushed_offset`.

        Raises StoreBrokenError if the store is closed. Raises StoreError if no descriptor was free:
        a later call may succeed.
        """
        self._health.raise_if_closed()
        with self.sync_lock:
            self._health.raise_if_closed()
            record_end = self._record_end()
            target = self._log.max_offset
            start = self.flushed_offset
            if target == start:
                return start
            self._syncing = target - start
            begun_ms = self._begun_ms = self._clock.monotonic_ms()
            try:
                self._log.queue.sync(start, target)
                if self._log.entries is not None:
                    self._log.entries.write()  # a restart finds the units below `flushed`
                self._page.update(flushed=record_end, record_end=record_end)
            except OSError as failure:
                if failure.errno in NO_DESCRIPTOR:
                    raise StoreError(
                        f"bytes [{start}, {target}) are not synced yet: {failure}; raise the limit"
                        " of open files"
                    ) from failure
                error = self._health.fail(f"a sync of bytes [{start}, {target}) failed", failure)
                with self._changed:
                    self._changed.notify_all()
                raise error from failure
            finally:
                self._begun_ms = None
            took_ms = self._clock.monotonic_ms() - begun_ms
            self.times.observe(took_ms)
            self.synced_bytes += target - start
            if took_ms > self._slow.slow_ms:
                self._slow.write(
                    "slow sync of the log: %.0f ms for bytes [%d, %d)", took_ms, start, target
                )
            with self._changed:
                self.flushed_offset = target
                if self._waiters:
                    self._changed.notify_all()
        self._on_flushed(target)
        return target

    def wait_flushed(self, offset: int, timeout_s: float) -> bool:
        """Ask for a sync, and wait until `flushed_offset` has reached `offset`.

        Returns False if that does not happen within `timeout_s`, or before the service stops.
        Raises StoreBrokenError if the store closes meanwhile.
        """
        if self.flushed_offset >= offset:
            return True
        with self._changed:
            self._requested = True
            self._waiters += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: (
                        self.flushed_offset >= offset
                        or self._health.reason is not None
                        or self.stopping.is_set()
                    ),
                    timeout_s,
                )
            finally:
                self._waiters -= 1
        self._health.raise_if_closed()
        return self.flushed_offset >= offset

    def run(self) -> None:
        """Sync until stopped, or until a failure closes the store."""
        while not self.stopping.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._requested or self.stopping.is_set(), self._interval_s
                )
                self._requested = False
            if self._health.reason is not None:
                return
            try:
                self.flush()
            except StoreBrokenError as failure:
                log.error("the log is not synced any more: %s", failure)
                return
            except StoreError as failure:  # no sync was begun
                if self.failure_reason is None:
                    log.error("%s", failure)
                self.failure_reason = str(failure)
                self._requested = True
                self.stopping.wait(_RETRY_S)
            else:
                self.failure_reason = None

    def wake(self) -> None:
        """Wake the service's thread and the threads in `wait_flushed`."""
        with self._changed:
            self._changed.notify_all()
