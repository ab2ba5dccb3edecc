"""Files of fixed-size units, each with a record's place, and the cache of those that are open.

    physicalOffset (8)  size (4)  the rest of the unit
    size 0: not written yet.  size 0x7FFFFFFF: a blank, for a queue offset without a record.

Unit n lies at byte n * unit_bytes of the queue. A file's name is the position of its first byte in
the queue, in 20 digits. Files are created sparse at full size and written by pwrite, which raises
OSError on a full disk. There may be gaps between the files. Both kinds of queue store units.

Replay's thread writes, housekeeping flushes, and any thread reads. All queues of a store share one
FileCache, which also records which files are unsynced.
"""

import contextlib
import struct
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator

from hastore.fs.filesystem import (
    File,
    FileSystem,
    file_name,
    is_file_name,
    size_of,
    sync_all,
    sync_files,
)
from hastore.shares import descriptor_shares
from hastore.store.derived.contract import REPEATED_MS
from hastore.store.state.time_falls import Falls

_SYNC_EACH_MAX = 256  # files synced one by one; for more, one call syncs the file system


class FileCache:
    """A cache of open files that drops the least recently used file first; thread-safe.

    A write holds the lock. A read may wait for the disk, so it holds a reference to its file
    instead of the lock. The cache drops a file without closing it; the file is closed when its last
    reference goes.
    """

    def __init__(self, fs: FileSystem) -> None:
        self.fs = fs
        self._lock = threading.Lock()
        self._files: OrderedDict[str, File] = OrderedDict()
        self._dirty: set[str] = set()
        self._dirty_dirs: set[str] = set()
        self._open_max = 0  # set at first use: by then the node has raised its descriptor limit

    def read(self, path: str, size: int, position: int) -> bytes:
        """Return up to `size` bytes; raises OSError."""
        with self._lock:
            file = self._file(path)
        return file.pread(size, position)

    def write(self, path: str, data: bytes | memoryview, position: int) -> None:
        """Write all of `data`, durable after `flush`; raises OSError."""
        with self._lock:
            self._dirty.add(path)
            self._file(path).pwrite(data, position)

    def zero(self, path: str, position: int, size: int, *, whole: bool) -> None:
        """Zero a range; durable after `flush`.

        If `whole`, what reads as zeros is left as it is: else each start would write a block of
        each queue. If not, the disk may have other bytes than are read.
        """
        with self._lock:
            file = self._file(path)
            if not whole or not file.is_zero(position, size):
                self._dirty.add(path)
                file.zero(position, size)

    def create(self, path: str, size: int) -> bool:
        """Make a sparse file of zeros, and its directories; durable after `flush`.

        Returns False if there was one, which keeps its bytes.
        """
        directory = path.rpartition("/")[0]
        with self._lock:
            missing = directory
            while missing and not self.fs.is_dir(missing):
                missing = missing.rpartition("/")[0]
                self._dirty_dirs.add(missing)
            self.fs.make_dirs(directory, sync=False)
            with contextlib.closing(self.fs.open(path, create=True)) as file:
                self._dirty_dirs.add(directory)
                self._dirty.add(path)
                is_new = not file.size
                file.truncate(size)
        return is_new

    def remove(self, path: str) -> None:
        """Remove a file; durable after `flush`."""
        with self._lock:
            self._files.pop(path, None)
            self._dirty.discard(path)
            with contextlib.suppress(FileNotFoundError):  # an operator removed it
                self.fs.remove(path)
            self._dirty_dirs.add(path.rpartition("/")[0])

    def flush(self) -> None:
        """Make durable everything written before the call; raises OSError, SyncFailedError.

        It syncs through its own descriptors, so writers do not wait for the disk. After a failure,
        the next call syncs the same files again. After SyncFailedError, even a successful call does
        not prove that the data is on the disk.
        """
        with self._lock:
            paths, self._dirty = self._dirty, set()
            directories, self._dirty_dirs = self._dirty_dirs, set()
        try:
            if len(paths) > _SYNC_EACH_MAX:
                sync_all(self.fs, min(paths).rpartition("/")[0])
            else:
                sync_files(self.fs, paths, directories)
        except BaseException:
            with self._lock:
                self._dirty |= paths
                self._dirty_dirs |= directories
            raise

    def close(self) -> None:
        """Drop all files and forget which files are unsynced."""
        with self._lock:
            self._files.clear()
            self._dirty.clear()
            self._dirty_dirs.clear()

    def _file(self, path: str) -> File:
        file = self._files.get(path)
        if file is None:
            file = self.fs.open(path)
            self._files[path] = file
            if not self._open_max:
                self._open_max = descriptor_shares().queue_files
            if len(self._files) > self._open_max:
                self._files.popitem(last=False)
        else:
            self._files.move_to_end(path)
        return file


PLACE = struct.Struct(">qi")
BLANK_UNIT_SIZE = 0x7FFFFFFF
_SCAN_BYTES = 1 << 16
_SEARCH_BYTES = 1 << 12


def queue_ids(
    fs: FileSystem, root: str, kind: str, topics: Collection[str] | None = None
) -> Iterator[tuple[str, int]]:
    """Yield (topic, queue id) of the queues under `kind`, of these topics or of all.

    What else lies there is left out, for example a desktop's .DS_Store.
    """
    for topic in fs.list_dir(f"{root}/{kind}"):
        folder = f"{root}/{kind}/{topic}"
        if (topics is not None and topic not in topics) or not fs.is_dir(folder):
            continue
        for name in fs.list_dir(folder):
            if name.isascii() and name.isdigit() and str(int(name)) == name:
                yield topic, int(name)


def first_where(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the first number in [low, high) for which `holds`, by binary search; `high`: none.

    From that number on, `holds` must be true.
    """
    return low + bisect_left(range(low, high), True, key=holds)


def first_late(
    low: int,
    high: int,
    falls: Falls,
    timestamp_ms: int,
    first_at: Callable[[int], int],
    is_late: Callable[[int, int, int], bool],
    is_spent: Callable[[], bool] = lambda: False,
) -> int:
    """Return the first of the queue's units [low, high) with a record stored at or after a time.

    `falls` are where the log's store times fall. Between two falls the times rise, so each such run
    is searched alone. `first_at(offset)` returns the first unit with a record at or beyond an
    offset of the log, `is_late(unit, end, time_ms)` whether it was stored at or after a time: it
    may ask the units behind it, which are in its run up to `end`. Returns `high` if there is none.

    `is_spent()` is asked before each look at a unit. Once it is true, nothing more is looked at
    but the unit before the last one that was not late, and the search returns a unit below which
    none is late: the right one, or one before it. That is so too if a record's time is damaged, and
    seems to be early, and where small falls were left out.
    """

    def search(time_ms: int) -> int:
        return _first_late(
            low, high, falls, time_ms, first_at,
            lambda unit, end: is_late(unit, end, time_ms), is_spent,
        )  # fmt: skip

    if falls.thinned_end:
        # Behind a late record, all of its run are at most REPEATED_MS before the time. So below
        # what is found for that time, no record is late.
        early = search(timestamp_ms - REPEATED_MS)
        if early < first_at(falls.thinned_end):
            return early
    return search(timestamp_ms)


def _first_late(
    low: int,
    high: int,
    falls: Falls,
    timestamp_ms: int,
    first_at: Callable[[int], int],
    is_late: Callable[[int, int], bool],
    is_spent: Callable[[], bool],
) -> int:
    """Return what `first_late` does if no fall was left out."""

    def first_of_run(low: int, stop: int) -> int:
        def late(unit: int) -> bool:
            return is_spent() or is_late(unit, stop)

        found = first_where(low, stop, late)
        # The last unit that was not late decides; its time is damaged if the one before is late.
        while found > low + 1 and is_late(found - 2, stop):
            found = first_where(low, found - 2, late)
        return found

    begin: int | None = None  # offset: where the run begins; None: with the queue
    for offset, before_ms in falls.all:
        if before_ms >= timestamp_ms:
            if is_spent():
                return low
            if begin is not None:
                low = min(max(first_at(begin), low), high)
            stop = min(max(first_at(offset), low), high)
            if stop > low:
                found = first_of_run(low, stop)
                if found < stop:
                    return found
            low, begin = stop, None
        else:
            begin = offset
    if begin is not None and not is_spent():
        low = min(max(first_at(begin), low), high)
    return first_of_run(low, high)


class UnitFiles:
    """The files of one queue. One thread writes; any thread reads below `end`."""

    __slots__ = (
        *("directory", "end", "starts", "unit_bytes", "units_per_file"),
        *("_begin", "_cache", "_changes", "_clean", "_last_path", "_last_start", "_tail"),
    )

    def __init__(
        self, cache: FileCache, directory: str, unit_bytes: int, units_per_file: int
    ) -> None:
        self._cache = cache
        self.directory = directory
        self.unit_bytes = unit_bytes
        self.units_per_file = units_per_file
        # The first unit of each file, ascending. The list is replaced, never changed in place.
        self.starts: list[int] = []
        self.end = 0  # the number of the next unit
        self._last_start, self._last_path = -1, ""  # the file of the last append
        # Offset and size of the last unit, so that most queues need no read; None if it is not
        # known, if no file has it, or if it is a blank without an offset.
        self._tail: tuple[int, int] | None = None
        self._clean = False  # nothing but zeros lies behind the last unit
        self._changes = 0  # how often units went
        # `_changes`, and for which least offset `begin_at` returned which unit, at which offset
        self._begin = -1, 0, 0, 0

    def load(self, limit: int, *, whole: bool = False) -> None:
        """Find the files and cut them to `limit`; `cut` explains `whole`.

        If a file has an unexpected size, all files are replaced by blanks up to the queue's end.
        An empty file, which a kill during the file's creation leaves, is removed.
        """
        self._tail, self._clean = None, False
        names: list[str] = []
        sizes: list[int] = []
        for name in self._cache.fs.list_dir(self.directory):
            if not is_file_name(name):
                continue
            path = f"{self.directory}/{name}"
            size = size_of(self._cache.fs, path)
            if size:
                names.append(name)
                sizes.append(size)
            else:
                self._cache.remove(path)
        full = self.unit_bytes * self.units_per_file
        resized = any(
            size != full or int(name) % full for name, size in zip(names, sizes, strict=True)
        )
        if resized:
            self._rewrite(names, sizes, limit)
            return
        self.starts = [int(name) // self.unit_bytes for name in names]
        self.cut(limit, whole=whole)

    def path(self, start: int) -> str:
        """Return the path of the file whose first unit is `start`."""
        return f"{self.directory}/{file_name(start * self.unit_bytes)}"

    def read(self, unit: int, count: int) -> bytes:
        """Return up to `count` units from `unit` on, of one file and below `end`; b"" if none."""
        count = min(count, self.end - unit)
        starts = self.starts
        at = bisect_right(starts, unit) - 1
        if count <= 0 or at < 0:
            return b""
        within = unit - starts[at]
        count = min(count, self.units_per_file - within)
        if count <= 0:
            return b""
        size = self.unit_bytes
        try:
            return self._cache.read(self.path(starts[at]), count * size, within * size)
        except FileNotFoundError:  # retention removed the file meanwhile
            return b""

    def place(self, unit: int) -> tuple[int, int]:
        """Return (physical offset, size) of a unit; size 0 when there is none."""
        raw = self.read(unit, 1)
        offset, size = PLACE.unpack_from(raw) if len(raw) == self.unit_bytes else (0, 0)
        return offset, size

    def last_place(self) -> tuple[int, int]:
        """Return (physical offset, size) of the last unit; size 0 when there is none."""
        return self._tail or self.place(self.end - 1)

    def last_offset(self) -> int:
        """Return the physical offset of the last unit's record; -1 if it has none. Raises OSError.

        A blank of zeros stands for a record that the log no longer has.
        """
        offset, size = self.last_place()
        return offset if size and (offset or size != BLANK_UNIT_SIZE) else -1

    def append(self, data: bytes | memoryview) -> None:
        """Write whole units at `end`, one pwrite for each file, and move `end`; raises OSError."""
        size = self.unit_bytes
        at = 0
        is_clean, self._clean = self._clean or not self.starts, False
        self._tail = None  # before `end` moves: `_first` says why
        while at < len(data):
            within = self.end % self.units_per_file
            room = (self.units_per_file - within) * size
            part = data if at == 0 and len(data) <= room else data[at : at + room]
            start = self.end - within
            is_clean = self._make(start) and is_clean
            if start != self._last_start:
                self._last_start, self._last_path = start, self.path(start)
            self._cache.write(self._last_path, part, within * size)
            self.end += len(part) // size
            at += len(part)
        self._clean = is_clean
        if data:
            self._note_tail(*PLACE.unpack_from(data, len(data) - size))

    def skip_to(self, unit: int) -> None:
        """Move `end` up to `unit` by writing blanks; raises OSError.

        Files that would contain only blanks are not created. A blank after a record holds that
        record's offset + 1, so that offsets never decrease.
        """
        per_file = self.units_per_file
        offset, size = self.last_place()
        if size not in (0, BLANK_UNIT_SIZE):
            offset += 1
        blank = PLACE.pack(offset, BLANK_UNIT_SIZE) + bytes(self.unit_bytes - PLACE.size)
        target = unit // per_file * per_file
        if self.starts and self.starts[-1] < target and self.end % per_file:
            self.append(blank * (per_file - self.end % per_file))
        if self.end < target:
            self._tail = None
            self.end = target
        if self.end < unit:
            self.append(blank * (unit - self.end))

    def clear(self) -> None:
        """Remove all files, and begin at unit 0 again; raises OSError."""
        self._tail = None
        starts, self.starts, self.end = self.starts, [], 0
        self._changes += 1
        for start in starts:
            self._cache.remove(self.path(start))

    def hold_end(self) -> None:
        """Make the file that shows `end` after a restart if there is none; raises OSError."""
        if not self.starts and self.end:
            self._make(self.end - self.end % self.units_per_file)

    def cut(self, limit: int, *, whole: bool = True) -> None:
        """Keep only the leading units whose record ends at or below `limit`.

        `whole` is false if a power loss may have left holes; then every unit of the last file is
        read.
        """
        if whole and self._clean and self._tail is not None and _stays(*self._tail, limit):
            return
        self._tail, self._clean = None, False
        try:
            self._cut(limit, whole=whole)
        finally:
            self._changes += 1  # now: another thread may have asked `begin_at` meanwhile
        self._clean = True
        self._note_tail(*self.place(self.end - 1))

    def _cut(self, limit: int, *, whole: bool) -> None:
        starts = self.starts
        if not starts:
            self.end = 0
            return
        last = len(starts) - 1
        while last > 0 and not self._is_full(starts[last - 1], starts[last], limit, whole=whole):
            last -= 1
        for start in starts[last + 1 :]:
            self._cache.remove(self.path(start))
        count = (self._search if whole else self._count_sound)(starts[last], limit)
        keep = last + 1
        self.end = starts[last] + count
        if count == 0 and (last > 0 or starts[0] == 0):
            self._cache.remove(self.path(starts[last]))
            keep = last
            # Not where the removed file began: a power loss may have taken a file before it.
            self.end = starts[last - 1] + self.units_per_file if last else 0
        else:
            size = self.unit_bytes
            rest = (self.units_per_file - count) * size
            self._cache.zero(self.path(starts[last]), count * size, rest, whole=whole)
        self.starts = starts[:keep]

    def drop_from(self, unit: int) -> None:
        """Move `end` back to `unit`; there are only blanks from there on. Raises OSError."""
        starts, per_file = self.starts, self.units_per_file
        kept = [start for start in starts if start < unit]
        end = min(unit, kept[-1] + per_file) if kept else 0
        self._tail, self._clean = None, False
        self.starts, self.end = kept, end
        for start in starts[len(kept) :]:
            self._cache.remove(self.path(start))
        if kept:
            at, size = end - kept[-1], self.unit_bytes
            self._cache.zero(self.path(kept[-1]), at * size, (per_file - at) * size, whole=True)
            self._note_tail(*self.place(end - 1))
        self._changes += 1  # now: as in `cut`
        self._clean = True
        self.skip_to(unit)  # the file of `unit` may not have been there

    def delete_before(self, min_offset: int) -> None:
        """Remove whole files whose last record lies below `min_offset`; the last file stays."""
        starts = self.starts
        if len(starts) < 2:
            return
        begin = self.begin_at(min_offset)
        gone = sum(1 for start in starts[:-1] if start + self.units_per_file <= begin)
        if not gone:
            return
        self.starts = starts[gone:]
        self._changes += 1
        for start in starts[:gone]:
            self._cache.remove(self.path(start))

    def first_at(self, min_offset: int) -> int:
        """Return the first unit with a record at or beyond `min_offset`; `end` if there is none."""
        return self._first(min_offset)[0]

    def begin_at(self, min_offset: int) -> int:
        """Return what `first_at` returns; nothing is read if the begin of before still holds."""
        changes = self._changes
        known, since, unit, offset = self._begin
        if known == changes and since <= min_offset <= offset:
            return unit
        unit, found = self._first(min_offset)
        if found is not None:
            self._begin = changes, min_offset, unit, found
        return unit

    def _first(self, min_offset: int) -> tuple[int, int | None]:
        """Return the first unit with a record at or beyond `min_offset`, and that record's offset.

        Returns `end` and None if there is none.
        """
        # In this order: the last unit's offset is then that of unit `end` - 1, or of a later one.
        end, tail = self.end, self._tail
        if tail is not None and tail[0] < min_offset:
            return end, None
        found: int | None = None

        def is_there(unit: int) -> bool:
            nonlocal found
            offset, size = self.place(unit)
            if _precedes(offset, size, min_offset):
                return False
            found = offset  # of the unit that the search ends with, as it goes down from here on
            return True

        for start in self.starts:
            stop = min(start + self.units_per_file, end)
            if (
                (stop == end and tail is not None)  # that unit does not precede, as was seen above
                or start >= stop
                or not _precedes(*self.place(stop - 1), min_offset)
            ):
                unit = first_where(start, stop, is_there)
                return unit, found
        return end, None

    def _note_tail(self, offset: int, size: int) -> None:
        has_offset = size not in (0, BLANK_UNIT_SIZE) or (size == BLANK_UNIT_SIZE and offset)
        self._tail = (offset, size) if has_offset else None

    def _make(self, start: int) -> bool:
        """Make a file if it is missing; False if its bytes are not known."""
        if self.starts and self.starts[-1] >= start:
            return True
        is_new = self._cache.create(self.path(start), self.unit_bytes * self.units_per_file)
        self.starts = [*self.starts, start]
        return is_new

    def _is_full(self, start: int, following: int, limit: int, *, whole: bool) -> bool:
        """Whether a file's last unit is whole, and its record ends at or below `limit`.

        `following` is the first unit of the file after it.
        """
        if not self._stays_at(start, self.units_per_file - 1, limit):
            return False
        if whole or self._stays_at(following, 0, limit):
            return True
        return not self._is_torn(start, self.units_per_file - 1)

    def _is_torn(self, start: int, number: int) -> bool:
        """Whether only the second half of a unit, the last below a limit, was written.

        A power loss does that to the first unit that was not synced, where a sector ends inside it.
        The half names an offset before those of the units before it, which rise. Two of these are
        asked, because one may have rotted.
        """
        first = max(0, number - 2)
        path, size = self.path(start), self.unit_bytes
        raw = self._cache.read(path, (number + 1 - first) * size, first * size)
        *before, (offset, length) = (
            PLACE.unpack_from(raw, at * size) for at in range(number + 1 - first)
        )
        offsets = [place for place, other in before if other != BLANK_UNIT_SIZE]
        return length != BLANK_UNIT_SIZE and bool(offsets) and offset < min(offsets)

    def _stays_at(self, start: int, number: int, limit: int) -> bool:
        """Whether unit `number` of a file exists, and its record ends at or below `limit`."""
        raw = self._cache.read(self.path(start), PLACE.size, number * self.unit_bytes)
        if len(raw) < PLACE.size:
            return False
        offset, size = PLACE.unpack(raw)
        return _stays(offset, size, limit)

    def _count(self, start: int, limit: int, bytes_max: int | None = None) -> int:
        """Count the leading units of a file that a cut to `limit` keeps."""
        size = self.unit_bytes
        total = self.units_per_file if bytes_max is None else bytes_max // size
        chunk = _SCAN_BYTES // size
        form = struct.Struct(f">qi{size - PLACE.size}x")
        for at in range(0, total, chunk):
            raw = self._cache.read(self.path(start), min(chunk, total - at) * size, at * size)
            whole = len(raw) // size
            for number, (offset, length) in enumerate(form.iter_unpack(raw[: whole * size])):
                if not _stays(offset, length, limit):
                    return at + number
            if whole < min(chunk, total - at):
                return at + whole
        return total

    def _count_sound(self, start: int, limit: int) -> int:
        """Return `_count`, without a last unit that a power loss has torn."""
        count = self._count(start, limit)
        return count - (count > 0 and self._is_torn(start, count - 1))

    def _search(self, start: int, limit: int) -> int:
        """Return what `_count` returns, by binary search; only for a file without holes."""
        low = self._count(start, limit, _SEARCH_BYTES)  # one read finds the end of a short queue
        high = self.units_per_file if low == _SEARCH_BYTES // self.unit_bytes else low
        return first_where(low, high, lambda number: not self._stays_at(start, number, limit))

    def _rewrite(self, names: list[str], sizes: list[int], limit: int) -> None:
        end = 0
        for name, size in zip(names, sizes, strict=True):
            start = int(name) // self.unit_bytes
            count = self._count(start, limit, size)
            end = max(end, start + count) if count else end
        for name in names:
            self._cache.remove(f"{self.directory}/{name}")
        self.starts, self.end = [], 0
        if end:
            self.skip_to(end)


def _precedes(offset: int, size: int, min_offset: int) -> bool:
    """Whether a unit has no record at or beyond `min_offset`."""
    return size == 0 or offset < min_offset or (size == BLANK_UNIT_SIZE and offset == 0)


def _stays(offset: int, size: int, limit: int) -> bool:
    if size == BLANK_UNIT_SIZE:
        return 0 <= offset <= limit
    return size > 0 and 0 <= offset <= limit - size
