"""What changes a store but for appends: cut, archive, set aside, begin elsewhere, retention.

Each cut first stops replay and takes the log's lock and the sync's, so nobody appends, replays or
syncs meanwhile. Reads go on; a view taken before sees zeros where bytes were cut. Retention takes
files out of the log under the log's lock, and does all that the disk has part in without it.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from hastore.errors import StoreError, StoreFullError, UsageError
from hastore.record.codec import check_blank, check_record
from hastore.store.message_reader import walk_whole
from hastore.store.parts import StoreParts
from hastore.store.retention import expired_files

log = logging.getLogger(__name__)

_MOVED = ("commitlog", "consumequeue", "batchconsumequeue", "index", "checkpoint")


class StoreCuts:
    """The surgery on a store that is open in this process; one call at a time."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._root = parts.config.root
        self._removing = threading.Lock()  # retention or a cut, taken before all other locks
        self._closing = False

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Wait until nothing is removed any more, for good: another process may have the store
        then. What retention still owes the next start finds again.
        """
        self._closing = True
        with self._removing:
            yield

    def _check_open(self) -> None:
        if self._closing:
            raise StoreError("the store is closed")

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        parts = self._parts
        with self._removing, parts.build.paused(), parts.log.lock, parts.flush.sync_lock:
            parts.health.check()
            try:
                yield
            except OSError as failure:
                raise parts.health.fail("a cut of the log failed", failure) from failure

    def truncate(self, offset: int) -> None:
        """Cut the log at `offset`, durably, with all that is derived.

        An offset inside a record cuts that record too. The limits go down first: after a crash
        in the middle recovery ends the log at a whole record and finds nothing missing.
        """
        parts = self._parts
        with self._stopped():
            if not parts.log.min_offset <= offset <= parts.log.max_offset:
                raise UsageError(
                    f"offset {offset} is outside [{parts.log.min_offset}, {parts.log.max_offset}]"
                )
            start = max(parts.log.min_offset, offset - offset % parts.log.file_size)
            if not self._is_record_end(offset):
                offset = min(offset, self._last_record_end(start, offset))
            parts.page.cut(offset, recovery_start=start)
            parts.log.truncate(offset)
            parts.flush.reset(min(parts.flush.flushed_offset, offset))
            # What replay has not reached is in no queue: it comes again from there, and feeds
            # queue offsets and window, which a put had fed before, anew.
            parts.build.truncate(min(offset, parts.build.dispatched_offset))

    def _is_record_end(self, offset: int) -> bool:
        log = self._parts.log
        if offset in (log.min_offset, log.record_end) or offset % log.file_size == 0:
            return True
        if offset >= log.max_offset:
            return False
        with log.map_view(offset, log.file_size) as view:
            size = len(view)
            return bool(check_record(view, 0, size, offset) or check_blank(view, 0, size))

    def _last_record_end(self, start: int, offset: int) -> int:
        """Return the end of the last whole record at or below `offset`."""
        log = self._parts.log
        whole = walk_whole(self._parts, start)
        if whole <= offset:
            return whole
        place = start
        while True:
            with log.map_view(place, 4) as view:
                size = int.from_bytes(view)
            if place + size > offset:
                return place
            place += size

    def archive(self, offset: int, name: str) -> int:
        """Copy [offset, end) to `rescued/<name>/`, synced; returns the bytes. StoreFullError."""
        parts = self._parts
        directory = self._rescued(name)
        with parts.log.lock:
            size = parts.log.max_offset - offset
            if size > parts.fs.free_bytes(self._root):
                raise StoreFullError(f"{directory}: no room for {size} bytes to be rescued")
            try:
                copied = parts.log.copy_to(offset, directory)
            except OSError as failure:
                raise StoreError(
                    f"{directory}: cannot rescue the log's tail: {failure}"
                ) from failure
        return copied

    def set_aside(self, name: str) -> str:
        """Move log, queues and index to `rescued/<name>/` and go on empty; returns the place.

        StoreFullError, and nothing is changed, when there is no room for a log file beside it.
        """
        parts = self._parts
        directory = self._rescued(name)
        with self._stopped():
            if parts.fs.free_bytes(self._root) < 2 * parts.log.file_size:
                raise StoreFullError(f"{self._root}: no room for another log beside the old one")
            parts.fs.make_dirs(directory)
            # Limits and replay's state go first: whatever of the moves a crash leaves undone, the
            # next start reads the log that it finds from the beginning.
            parts.page.restart(0)
            parts.build.reset(0)
            parts.log.queue.release()
            for moved in _MOVED:
                if parts.fs.exists(f"{self._root}/{moved}"):
                    parts.fs.rename(f"{self._root}/{moved}", f"{directory}/{moved}")
            parts.fs.sync_dir(directory)
            parts.fs.sync_dir(self._root)
            parts.fs.make_dirs(parts.log.directory)
            self._go_on(0)
        log.warning("the store's log was set aside in %s", directory)
        return directory

    def begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`; UsageError when it holds anything."""
        parts = self._parts
        with self._stopped():
            if parts.log.max_offset > parts.log.min_offset:
                raise UsageError(
                    f"the log holds [{parts.log.min_offset}, {parts.log.max_offset}):"
                    " only an empty one can begin elsewhere"
                )
            parts.log.queue.discard()
            parts.log.queue.remove_from(0)
            parts.page.restart(offset)
            self._go_on(offset)

    def expired_end(self, hold_offset: int | None) -> int | None:
        """Return where the log would begin after `delete_expired`; None when nothing would go."""
        parts = self._parts
        with self._removing:
            self._check_open()
            count = self._expired(hold_offset)
            return parts.log.queue.files[count - 1].end if count else None

    def _expired(self, hold_offset: int | None) -> int:
        parts = self._parts
        hold = min(parts.build.dispatched_offset, parts.flush.flushed_offset)
        if hold_offset is not None:
            hold = min(hold, hold_offset)
        return expired_files(parts.log, parts.config.retention, parts.clock, hold)

    def delete_expired(self, hold_offset: int | None) -> int:
        """Remove whole old files, none from `hold_offset` on; returns how many. StoreError."""
        parts = self._parts
        queue = parts.log.queue
        with self._removing:  # puts only add files at the end: what is expired stays so
            self._check_open()
            try:
                queue.discard()  # what an earlier call owes: first, or a gap would remain
                count = self._expired(hold_offset)
                if not count:
                    return 0
                min_offset = queue.files[count - 1].end
                parts.window.save_before(min_offset)
                with parts.log.lock:
                    parts.log.min_offset = min_offset  # readers are refused before the bytes go
                    queue.detach_first(count)
                parts.build.delete_before(min_offset)
                queue.discard(lambda: self._closing)
            except OSError as failure:
                raise StoreError(f"retention could not remove a file: {failure}") from failure
        log.info("retention removed %d files below offset %d", count, min_offset)
        return count

    def _go_on(self, offset: int) -> None:
        parts = self._parts
        parts.log.queue.forget()
        parts.log.set_range(offset, offset)
        parts.flush.reset(offset)
        parts.build.reset(offset)
        parts.table.advance(offset)
        parts.window.advance(offset)

    def _rescued(self, name: str) -> str:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise UsageError(f"{name!r} is no directory name")
        directory = f"{self._root}/rescued/{name}"
        number = 1
        while self._parts.fs.list_dir(directory):  # of an earlier attempt: nothing is overwritten
            number += 1
            directory = f"{self._root}/rescued/{name}.{number}"
        return directory
