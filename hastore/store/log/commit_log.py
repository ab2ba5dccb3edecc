"""The commit log: appended by pwrite into reserved files, read without a lock.

Hot bytes are read through a map, cold bytes by pread. If a page of a map must come from the disk,
the thread waits with the interpreter's lock held. If the disk cannot read that page, a SIGBUS ends
the process. pread waits without the interpreter's lock, and fails with EIO if the disk cannot read.

    hot     the last HOT_BYTES, as far as this process wrote them: they are in the page cache
    cold    all else

Any thread may read. The caller of an appending or cutting method holds `lock`. `max_offset` moves
only after the bytes are in the page cache, so a reader that stays below it never sees a byte that
is still being written.

A failed write may leave whole records beyond `max_offset`. A later recovery would take them for
messages although their put was refused, and a promoted slave would keep them after its own records.
So they are cleared, durably, before the caller gets the error. If the process is killed before
that, the client has had no refusal. If they cannot be cleared, StoreHealth closes the store, as
after a failed sync, and the error says that the put's outcome is unknown (StoreUncertainError).
"""

import logging
import threading
from collections.abc import Callable

from hastore.errors import (
    StoreBrokenError,
    StoreError,
    StoreFullError,
    StoreMovedError,
    StoreUncertainError,
    UsageError,
)
from hastore.fs.filesystem import NO_ROOM, File, FileSystem
from hastore.record.layout import BLANK_SIZE
from hastore.record.log_format import BODY_CRC_AT, ENTRIES, PLAIN, LogFormat
from hastore.service import OnFailure
from hastore.store.log.allocate import AllocateService
from hastore.store.log.entry_index import EntryIndex, NewEntries
from hastore.store.log.mapped_file_queue import FileRange, MappedFile, MappedFileQueue

log = logging.getLogger(__name__)

HOT_BYTES = 64 << 20
# If files are no larger than this, the next one is reserved as soon as the current one begins. If
# they are larger, it is reserved when the current one is half full.
_AHEAD_AT_ONCE_BYTES = 64 << 20


class StoreHealth:
    """Keep the first failure after which the disk's content is unknown; thread-safe.

    After a failed fsync the kernel may have dropped the dirty pages, and the next fsync may report
    success. Only a restart, which recovers from the bytes on the disk, opens the store again.

    `on_failure` is called once for each reason, in the thread that met the failure; before that
    `note` once, if the disk's content is unknown: it writes that down for the next start.
    """

    def __init__(
        self,
        on_failure: Callable[[str, BaseException], None] | None = None,
        note: Callable[[], None] = lambda: None,
    ) -> None:
        self.reason: str | None = None
        self._on_failure = on_failure
        self._note = note
        self._guard = threading.Lock()

    def fail(self, what: str, failure: BaseException) -> StoreBrokenError:
        """Close the store; returns the error to raise, which names the first failure."""
        with self._guard:
            first = self.reason is None
            if first:
                self.reason = f"{what}: {failure}; restart the node to recover the store"
        error = StoreBrokenError(self.reason)
        if first:
            log.critical("the store is closed: %s", self.reason)
            self._note()
            if self._on_failure is not None:
                self._on_failure("store", error)
        return error

    def lose(self, reason: str) -> StoreMovedError:
        """Close the store because its folder was moved; returns the error to raise.

        `reason` replaces an earlier reason: the move was the cause of that failure too, for example
        because a file could not be opened any more.
        """
        error = StoreMovedError(reason)
        with self._guard:
            first, self.reason = self.reason != reason, reason
        if first:
            log.critical("the store is closed: %s", reason)
            if self._on_failure is not None:
                self._on_failure("store", error)
        return error

    def raise_if_closed(self) -> None:
        """Raise StoreBrokenError when the store is closed."""
        if self.reason is not None:
            raise StoreBrokenError(self.reason)


class LogView:
    """Bytes of the log, lent for a `with` block."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __enter__(self) -> memoryview:
        return self._view

    def __exit__(self, *_: object) -> None:
        self._view.release()


class CommitLog:
    """The log's files, and where it begins and ends: records under `commitlog/`, or entries.

    A log of entries has an index of them, `entries`, which grows and is cut with the log.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        file_size: int,
        health: StoreHealth,
        *,
        on_failure: OnFailure,
        warm_files: bool = False,
        entries: EntryIndex | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.entries = entries
        self.form: LogFormat = PLAIN if entries is None else ENTRIES
        self.directory = f"{root}/commitlog" if entries is None else entries.log_directory
        self.file_size = file_size
        self.min_offset = 0
        self.max_offset = 0
        self.record_end = 0  # the end of the last record known to be whole; <= max_offset
        self.fenced: tuple[tuple[int, int], ...] = ()  # damaged ranges; replaced, never changed
        self.queue = MappedFileQueue(fs, self.directory, file_size, f"{root}/hastore")
        self.allocator = AllocateService(
            fs, f"{root}/hastore/spare", file_size, on_failure=on_failure, warm=warm_files
        )
        self._health = health
        self._written_from = 0  # bytes below were there when this process opened the log
        self._want_at: int | None = 0  # call `_want_next` from this end on; None: asked

    @property
    def remedy(self) -> str:
        """What to do about synced bytes that are damaged or missing, for errors."""
        if self.entries is None:
            return (
                "fetch them again from another node (`hastore log repair -c FILE`), restore them"
                " from a backup, or move the store away and let the node start empty"
                " under a new node number: it then copies the log from its master"
            )
        return (
            "fetch them again from another node (`hastore log repair -c FILE`), restore them from"
            " a backup, or, while the other nodes run, move the store away and"
            " start the node again: it copies the log from its leader, and does not vote before it"
            " has it"
        )

    def set_range(self, min_offset: int, max_offset: int) -> None:
        """Set where the log begins and ends, at open and when an empty log is started."""
        self.min_offset = min_offset
        self.max_offset = max_offset
        self.record_end = max_offset
        self._written_from = max_offset
        self._want_at = 0

    def warm_rest(self) -> None:
        """Read ahead the unwritten rest of the last file, if `store.warm_files` is set."""
        file = self.queue.find(self.max_offset)
        if file is not None:
            self.allocator.warm_rest(file.path, self.max_offset - file.start)

    # -- reading ----------------------------------------------------------------------------------

    def view(self, offset: int, max_bytes: int) -> LogView:
        """Lend at most `max_bytes` from `offset`, within one file, never beyond `max_offset`.

        At the log's end the view is empty. Raises UsageError for an offset outside
        [min_offset, max_offset], StoreError if the file is gone, for example removed by retention,
        and OSError if the disk cannot read it. All of the view's cold bytes are read before this
        returns, so `max_bytes` should be no more than the caller needs.
        """
        file, size = self._bounds(offset, max_bytes)
        if file is None:
            return LogView(memoryview(b""))
        opened, view = file.opened or self.pin(file)
        at = offset - file.start
        if offset < self.cold_end:
            return LogView(memoryview(opened.pread(size, at)))
        return LogView(view[at : at + size])

    def map_view(self, offset: int, max_bytes: int) -> LogView:
        """Lend the bytes that `view` would lend, but always through the map.

        Only record_walk.py calls this, for cuts and for the end of the last whole record: its walks
        from record to record touch few pages of the map. A bad sector ends the process by SIGBUS.
        """
        file, size = self._bounds(offset, max_bytes)
        if file is None:
            return LogView(memoryview(b""))
        at = offset - file.start
        return LogView(self.pin(file)[1][at : at + size])

    def file_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the bytes that `view` would lend as a range of a descriptor; size 0 at the end."""
        file, size = self._bounds(offset, max_bytes)
        if file is None:
            return FileRange(-1, 0, 0)
        opened, _ = self.pin(file)
        return FileRange(opened.fileno(), offset - file.start, size, opened)

    def last_crc(self) -> int | None:
        """Return bodyCrc of the last entry, in a log of entries.

        Returns 0 if the first entry comes next, None if the entry before is not here. The caller
        holds `lock`. Raises as `view` does.
        """
        index = self.entries
        assert index is not None
        if index.end_index < index.begin_index:
            return None if index.begin_index else 0
        if index.last_crc is None:
            with self.view(index.unit(index.end_index).pos + BODY_CRC_AT, 4) as view:
                index.last_crc = int.from_bytes(view)
        return index.last_crc

    @property
    def cold_end(self) -> int:
        """The offset at which the hot bytes begin; cold bytes lie below.

        In a cgroup with less memory than HOT_BYTES, hot bytes may leave the page cache too.
        """
        return max(self._written_from, self.max_offset - HOT_BYTES)

    def pin(self, file: MappedFile) -> tuple[File, memoryview]:
        """Return file and map, valid while they are held; StoreError if the file is gone."""
        try:
            return file.pin()
        except FileNotFoundError as failure:
            raise self.gone(file.start, file.path) from failure

    def gone(self, offset: int, path: str) -> StoreError:
        """Return the error to raise when the file that holds `offset` does not exist."""
        if offset < self.min_offset:
            return StoreError(f"{path} was removed by retention; the log begins at"
                              f" {self.min_offset}")  # fmt: skip
        return StoreError(f"{path} is missing: restore it from a backup, or copy the store from"
                          " another node")  # fmt: skip

    def _bounds(self, offset: int, max_bytes: int) -> tuple[MappedFile | None, int]:
        end = self.max_offset
        if not self.min_offset <= offset <= end:
            raise UsageError(f"offset {offset} is outside the log [{self.min_offset}, {end}]")
        if offset == end or max_bytes <= 0:
            return None, 0
        file = self.queue.find(offset)
        if file is None:
            raise self.gone(offset, f"the file of offset {offset}")
        return file, min(max_bytes, end - offset, file.end - offset)

    # -- appending (under `lock`) -----------------------------------------------------------------

    def room(self, size: int) -> int:
        """Return the size of the blank needed before `size` bytes of records; 0 if they fit."""
        position = self.max_offset % self.file_size
        left = self.file_size - position
        return left if position and size + BLANK_SIZE > left else 0

    def roll(self) -> None:
        """Wait until the next file is ready, then fill the rest of this one with a blank.

        Raises StoreFullError if the next file does not get ready.
        """
        file = self._writable()
        self.allocator.wait_ready()
        try:
            file.pwrite(self.form.pack_blank(file.end - self.max_offset), self.max_offset)
        except OSError as failure:
            raise self._not_written(file, BLANK_SIZE, failure) from failure
        self.max_offset = file.end

    def append(
        self, data: bytes | bytearray | memoryview, entries: NewEntries | None = None
    ) -> int:
        """Append bytes that fit into the file; returns the new `max_offset`.

        `entries` are the index units of the bytes, in a log of entries.

        Raises UsageError if they do not fit. Raises StoreFullError or StoreBrokenError if none of
        the bytes is in the log, StoreUncertainError if some of them may be.
        """
        file = self._writable()
        start = self.max_offset
        end = start + len(data)
        if end > file.end:
            raise UsageError(
                f"{len(data)} bytes at offset {start} cross a file boundary: they are of a log"
                f" whose files have another size than store.commitlog_file_size, {self.file_size}"
            )
        try:
            file.pwrite(data, start)
        except OSError as failure:
            raise self._not_written(file, len(data), failure) from failure
        if entries is not None and self.entries is not None:
            self.entries.add(entries)  # before the end moves: who sees the end finds the entries
        self.max_offset = end
        if self._want_at is not None and end >= self._want_at:
            self._want_next(file, end)
        return end

    def replica_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the range to splice into, at `offset`, which must be `max_offset`.

        Raises StoreFullError.
        """
        self._expect_end(offset)
        file = self._writable()
        return file.range(offset, min(max_bytes, file.end - offset))

    def commit(self, offset: int, size: int) -> int:
        """Make `size` bytes spliced into `replica_range` part of the log; returns the new end."""
        self._expect_end(offset)
        file = self._writable()
        end = offset + size
        if size < 0 or end > file.end:
            raise UsageError(f"{size} bytes at offset {offset} cross a file boundary")
        self.max_offset = end
        if self._want_at is not None and end >= self._want_at:
            self._want_next(file, end)
        return end

    def replica_failed(self, offset: int, size: int, failure: OSError) -> StoreError:
        """Clear the bytes of a failed splice into `replica_range`; returns the error to raise."""
        self._expect_end(offset)
        file = self.queue.find(offset)
        if file is None:
            return self.gone(offset, f"the file of offset {offset}")
        return self._not_written(file, size, failure)

    def _expect_end(self, offset: int) -> None:
        if offset != self.max_offset:
            raise UsageError(f"offset {offset} is not the log's end {self.max_offset}")

    def _writable(self) -> MappedFile:
        """Return the file that the log's end lies in; adds a file if the last one is full."""
        if self._health.reason is not None:
            self._health.raise_if_closed()
        file = self.queue.find(self.max_offset)
        if file is None:
            start = self.max_offset - self.max_offset % self.file_size
            file = self.queue.add(start, self.allocator.take_spare)
            self._want_at = start
        return file

    def _want_next(self, file: MappedFile, end: int) -> None:
        """Ask for the next file, or note the offset at which to ask."""
        at = file.start if self.file_size <= _AHEAD_AT_ONCE_BYTES else file.start + file.size // 2
        if end >= at:
            self._want_at = None
            self.allocator.want()
        else:
            self._want_at = at

    def _not_written(self, file: MappedFile, size: int, failure: OSError) -> StoreError:
        """Clear the bytes that a failed write at the log's end left; returns the error to raise.

        The clearing is synced: the bytes may be on the disk already, and would otherwise be back
        after a power loss.
        """
        position = self.max_offset - file.start
        try:
            left = file.file.pread(min(size, file.size - position), position)
            if left.strip(b"\0"):
                file.file.zero(position, len(left))
                file.sync()
        except OSError as second:
            broken = self._health.fail(
                f"a write at offset {self.max_offset} failed ({failure}), and its bytes could not"
                " be cleared",
                second,
            )
            return StoreUncertainError(str(broken))
        if failure.errno in NO_ROOM:  # a file system that does not honour reservations
            return StoreFullError(f"{file.path}: {failure.strerror}")
        return self._health.fail(f"a write at offset {self.max_offset} failed", failure)

    # -- cutting (under `lock`, with appends and syncs excluded) ----------------------------------

    def truncate(self, offset: int) -> None:
        """Cut the log at `offset`, durably: later files are removed, later bytes become zeros."""
        if self.entries is not None:
            self.entries.truncate_at(offset)
        self.max_offset = min(self.max_offset, offset)
        self.record_end = min(self.record_end, offset)
        self._want_at = 0
        first = self.queue.start
        last_start = max(offset - offset % self.file_size, first)
        # A cut at a file's start removes that file too, unless it is the log's first.
        keep = last_start + self.file_size if offset > last_start or last_start == first else offset
        self.queue.remove_from(keep)
        file = self.queue.find(offset)
        if file is not None:
            file.file.zero(offset - file.start, file.end - offset)
            file.sync()
