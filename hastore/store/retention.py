"""Retention: remove the oldest files of the log when they are too old or too many.

Only whole files are removed, and never the last one. A file stays if some of its bytes are not
replayed yet, not synced yet, or held for another reason, for example because a slave still needs
them. The node's RetentionService calls this module in its own thread, and says from which offset on
files are held. While files are removed, the lock `removing` excludes cuts of the log and the close
of the store.
"""

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from hastore.clock import Clock
from hastore.config.model import RetentionConfig
from hastore.errors import StoreError
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.topic_table import TopicTable
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.flush import FlushService
from hastore.store.log.mapped_file_queue import MappedFile
from hastore.store.log.record_walk import first_store_timestamp_ms
from hastore.store.replay import IndexBuildService

log = logging.getLogger(__name__)

STEP_MS = 60_000  # a clock that is set ahead by no more is believed at once


class AgeClock:
    """The wall time by which files are too old.

    A clock that is set ahead by days for a minute must not remove files that are minutes old. So
    a jump ahead counts once it has stood for a while, and the time goes on without it until then.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._believed: tuple[float, float] | None = None  # at the last look: wall, monotonic ms
        self._since_ms: float | None = None  # monotonic: since when the wall clock is ahead
        self.ahead_ms = 0.0  # by how much, while that does not count

    def look(self, hold_ms: float) -> int:
        """Return the time now; a jump counts once it has stood for `hold_ms`."""
        wall_ms, now_ms = float(self._clock.wall_ms()), self._clock.monotonic_ms()
        believed_ms = wall_ms
        if self._believed is not None:
            before_ms, at_ms = self._believed
            believed_ms = before_ms + now_ms - at_ms
        if wall_ms - believed_ms <= STEP_MS:
            believed_ms, self._since_ms = wall_ms, None
        else:
            if self._since_ms is None:
                self._since_ms = now_ms
            if now_ms - self._since_ms >= hold_ms:
                believed_ms, self._since_ms = wall_ms, None
        self._believed = believed_ms, now_ms
        self.ahead_ms = wall_ms - believed_ms
        return int(believed_ms)


class LogRetention:
    """Remove expired files of an open store's log; thread-safe."""

    def __init__(
        self,
        commit_log: CommitLog,
        flush_service: FlushService,
        replay: IndexBuildService,
        window: DedupWindow,
        topics: TopicTable,
        *,
        config: RetentionConfig,
        clock: Clock,
    ) -> None:
        self.removing = threading.Lock()  # held while files are removed; taken before all others
        self._log = commit_log
        self._flush_service = flush_service
        self._replay = replay
        self._window = window
        self._topics = topics
        self._config = config
        self._age_clock = AgeClock(clock)
        self._closing = False
        self.removed_files = 0  # since the start
        self.removed_bytes = 0

    def expired_end(self, hold_offset: int | None) -> int | None:
        """Return where the log would begin after `delete_expired`; None if nothing would go."""
        with self.removing:
            self._check_open()
            count = self._expired(hold_offset)
            return self._log.queue.files[count - 1].end if count else None

    def configure(self, config: RetentionConfig) -> None:
        """Let other limits count from the next look on."""
        self._config = config

    def noted_bytes(self) -> int:
        """Return about how much `delete_expired` writes before it removes a file."""
        return self._window.snapshot_bytes() + self._topics.file_bytes

    def problem(self) -> str | None:
        """Return a text while files stay because the clock has jumped ahead."""
        ahead_ms, config = self._age_clock.ahead_ms, self._config
        if not ahead_ms or config.max_age_ms is None:
            return None
        return (
            f"this node's clock has jumped ahead by {ahead_ms / 1000:.0f} s, or its machine was"
            " suspended: retention by age goes on by the time of before until the clock has stood"
            f" so for {config.hold_ms / 1000:g} s (retention.hold), and removes by the new time"
            " then. Look at the clock now (`timedatectl`)"
        )

    @property
    def last_file_offset(self) -> int | None:
        """Where the last file begins, which always stays; None without a file."""
        files = self._log.queue.files
        return min(files[-1].start, self._log.max_offset) if files else None

    def delete_expired(
        self, hold_offset: int | None, still_wanted: Callable[[], bool] = lambda: True
    ) -> int:
        """Remove expired files that end at or before `hold_offset`; returns how many.

        If `still_wanted()`, which is asked while cuts of the log are excluded, says no, none goes.

        The log's lock is held only to take the files out of the log. It is free while they are
        removed from the disk, so puts go on. Raises StoreError.
        """
        queue = self._log.queue
        with self.removing:  # puts only add files at the end, so expired files stay expired
            self._check_open()
            try:
                # First remove the files that an earlier call did not get to: otherwise a crash
                # may leave a gap.
                queue.discard()
                count = self._expired(hold_offset) if still_wanted() else 0
                if not count:
                    return 0
                min_offset = queue.files[count - 1].end
                self._window.save_before(min_offset)
                self._topics.save_before(min_offset)
                with self._log.lock:
                    if self._log.entries is not None:
                        self._log.entries.begin_at(min_offset)
                    self._log.min_offset = min_offset  # readers are refused before the bytes go
                    queue.detach_first(count)
                self._replay.delete_before(min_offset)
                queue.discard(lambda: self._closing)
                if self._log.entries is not None:
                    self._log.entries.remove_old_files()
            except OSError as failure:
                raise StoreError(
                    f"retention could not remove a file: {failure}; it tries again at its next look"
                ) from failure
        self.removed_files += count
        self.removed_bytes += count * self._log.file_size
        log.info("retention removed %d files below offset %d", count, min_offset)
        return count

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """End retention for good, and exclude it while the store closes.

        Another process may open the store afterwards. Its retention then removes the expired files
        that are left.
        """
        self._closing = True
        with self.removing:
            yield

    def _check_open(self) -> None:
        if self._closing:
            raise StoreError("the store is closed: no log file is removed any more")

    def _expired(self, hold_offset: int | None) -> int:
        hold = min(self._replay.dispatched_offset, self._flush_service.flushed_offset)
        if hold_offset is not None:
            hold = min(hold, hold_offset)
        before = self.problem()
        now_ms = self._age_clock.look(self._config.hold_ms)
        problem = self.problem()
        if problem is not None and before is None:
            log.warning("%s", problem)
        return expired_files(self._log, self._config, now_ms, hold)


def expired_files(
    commit_log: CommitLog, config: RetentionConfig, now_ms: int, hold_offset: int
) -> int:
    """Return how many of the oldest files may go; bytes at or beyond `hold_offset` stay."""
    files = commit_log.queue.files
    count = 0
    reached_ms = 0  # the greatest time of the first records of the files so far
    for place, file in enumerate(files[:-1]):
        if file.end > min(hold_offset, commit_log.max_offset):
            break
        too_many = (
            config.max_size_bytes is not None
            and (len(files) - place) * commit_log.file_size > config.max_size_bytes
        )
        if not too_many:
            if config.max_age_ms is None:
                break
            reached_ms = max(reached_ms, _past(_first_ms(commit_log, file), now_ms) or 0)
            ended_ms = _ended_ms(commit_log, file, files[place + 1 :], now_ms)
            if ended_ms is None or now_ms - max(ended_ms, reached_ms) <= config.max_age_ms:
                break
        count += 1
    return count


def _ended_ms(
    commit_log: CommitLog, file: MappedFile, later: Sequence[MappedFile], now_ms: int
) -> int | None:
    """Return when a file got its last record; None if that is not known. `later` follow it.

    That is the time of the first record of the next file, or the time at which the file was written
    last, whichever is smaller: a clock that was ahead makes one of them too great, a copy of the
    store the other. If the record is damaged or lies in a bad sector, the first record of the file
    after that counts: a bad record must not keep all files forever. So it does if the record's time
    has not come yet: the clock was wrong when it was stored. A clock that was behind does no harm:
    the caller knows the times of the records before.
    """
    modified_ms = _past(file.modified_ms(), now_ms)
    for following in later:
        if following.start >= commit_log.max_offset:
            break
        stored_ms = _past(_first_ms(commit_log, following), now_ms)
        if stored_ms is not None:
            return stored_ms if modified_ms is None else min(stored_ms, modified_ms)
    return None if not later or later[0].start >= commit_log.max_offset else modified_ms


def _first_ms(commit_log: CommitLog, file: MappedFile) -> int | None:
    """Return the store time of the file's first record; None if it cannot be read."""
    try:
        return first_store_timestamp_ms(commit_log, max(file.start, commit_log.min_offset))
    except OSError as failure:
        if failure.errno != errno.EIO:
            raise
        return None


def _past(time_ms: int | None, now_ms: int) -> int | None:
    return None if time_ms is None or time_ms > now_ms else time_ms
