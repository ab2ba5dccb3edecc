"""Retention: remove the oldest files of the log when they are too old or too many.

Only whole files are removed, never the last one, and none with bytes that are still needed: not
replayed yet, not synced yet, or held because a slave still needs them. The node's RetentionService
decides when to call this, in its own thread, and from which offset on files are held. The lock
`removing` excludes cuts of the log and the close of the store meanwhile.
"""

import contextlib
import errno
import logging
import threading
from collections.abc import Iterator, Sequence

from hastore.clock import Clock
from hastore.config.model import RetentionConfig
from hastore.errors import StoreError
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.flush import FlushService
from hastore.store.log.mapped_file import MappedFile
from hastore.store.log.record_walk import store_timestamp_ms
from hastore.store.replay.service import IndexBuildService

log = logging.getLogger(__name__)


class LogRetention:
    """Remove expired files of an open store's log; thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        flush_service: FlushService,
        replay: IndexBuildService,
        window: DedupWindow,
        *,
        config: RetentionConfig,
        clock: Clock,
    ) -> None:
        self.removing = threading.Lock()  # held while log files are removed; taken first of all
        self._log = commit_log
        self._flush_service = flush_service
        self._replay = replay
        self._window = window
        self._config = config
        self._clock = clock
        self._closing = False

    def expired_end(self, hold_offset: int | None) -> int | None:
        """Return where `delete_expired` would make the log begin; None if it removed nothing."""
        with self.removing:
            self._check_open()
            count = self._expired(hold_offset)
            return self._log.queue.files[count - 1].end if count else None

    def delete_expired(self, hold_offset: int | None) -> int:
        """Remove expired files, none from `hold_offset` on; returns how many. Raises StoreError.

        The log's lock is held only to take the files out of the log, not while the disk works: puts
        go on.
        """
        queue = self._log.queue
        with self.removing:  # puts only add files at the end: expired files stay expired
            self._check_open()
            try:
                queue.discard()  # first what an earlier call left: else a crash may leave a gap
                count = self._expired(hold_offset)
                if not count:
                    return 0
                min_offset = queue.files[count - 1].end
                self._window.save_before(min_offset)
                with self._log.lock:
                    self._log.min_offset = min_offset  # readers are refused before the bytes go
                    queue.detach_first(count)
                self._replay.delete_before(min_offset)
                queue.discard(lambda: self._closing)
            except OSError as failure:
                raise StoreError(f"retention could not remove a file: {failure}") from failure
        log.info("retention removed %d files below offset %d", count, min_offset)
        return count

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """End retention for good, and exclude it while the store closes.

        Another process may open the store afterwards; its retention removes what is left.
        """
        self._closing = True
        with self.removing:
            yield

    def _check_open(self) -> None:
        if self._closing:
            raise StoreError("the store is closed")

    def _expired(self, hold_offset: int | None) -> int:
        hold = min(self._replay.dispatched_offset, self._flush_service.flushed_offset)
        if hold_offset is not None:
            hold = min(hold, hold_offset)
        return expired_files(self._log, self._config, self._clock, hold)


def expired_files(
    commit_log: CommitLog, config: RetentionConfig, clock: Clock, hold_offset: int
) -> int:
    """Return how many of the oldest files may go; bytes at or beyond `hold_offset` stay.

    A file is as old as the first record of the next file, which was stored no earlier than any of
    its own records.
    """
    files = commit_log.queue.files
    count = 0
    for place, file in enumerate(files[:-1]):
        if file.end > min(hold_offset, commit_log.max_offset):
            break
        too_many = (
            config.max_size_bytes is not None
            and (len(files) - place) * commit_log.file_size > config.max_size_bytes
        )
        if not too_many and not _too_old(commit_log, config, clock, files[place + 1 :]):
            break
        count += 1
    return count


def _too_old(
    commit_log: CommitLog, config: RetentionConfig, clock: Clock, later: Sequence[MappedFile]
) -> bool:
    """Whether a file is too old, by the first record of the file after it, the first in `later`.

    If a bad sector or damage makes that record unreadable, the first record of the file after that
    counts: one bad record must not keep all files for ever.
    """
    if config.max_age_ms is None:
        return False
    for file in later:
        if file.start >= commit_log.max_offset:
            break
        try:
            stored_ms = store_timestamp_ms(commit_log, file.start)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            stored_ms = None
        if stored_ms is not None:
            return clock.wall_ms() - stored_ms > config.max_age_ms
    return False
