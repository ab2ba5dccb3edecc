"""The log that a rebuild reads: its files, its ranges, and how the ranges fit together."""

import contextlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hastore.errors import CorruptRecordError, StoreError
from hastore.fs.filesystem import FileSystem, read_range
from hastore.record.codec import decode_record
from hastore.record.delays import DELAYS_MS
from hastore.store.offline.log_files import LogFile, LogFiles
from hastore.store.offline.reader import StoreReader
from hastore.store.rebuild.layout import RangeResult, RangeTask
from hastore.store.state.limits import Limits, read_limits
from hastore.store.state.replay_progress import read_dispatched

_RANGES_MAX = 20_000  # of a very large log; its ranges are larger
_PROBE_BYTES = 1 << 16
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Log:
    """The log of a store as it was when the rebuild began."""

    root: str
    files: tuple[LogFile, ...]
    first: int  # offset of the first record
    limit: int  # nothing is read from here on; NO_LIMIT if no other process has the store open
    limits: Limits | None  # of a hastore store
    is_clean: bool  # whether the last process closed the store cleanly
    entries: bool = False  # whether the log has entries of DLedger

    @property
    def file_size(self) -> int:
        """Return the size of each file in bytes; 0 without files."""
        return self.files[0].size if self.files else 0

    @property
    def bytes(self) -> int:
        """Return how many bytes are to be read, at most."""
        return max(0, min(self.limit, self.files[-1].end) - self.first) if self.files else 0


def open_log(fs: FileSystem, root: str, *, in_use: bool) -> Log:
    """Find the log's files. Raises StoreError for what is no store, and if files are missing."""
    with contextlib.closing(LogFiles(root, fs)) as files:
        found = files.list()
        for before, after in zip(found, found[1:], strict=False):
            if after.start != before.end:
                raise StoreError(
                    f"{files.directory}: files are missing between {before.end} and {after.start};"
                    " restore them, or move the files before the gap away"
                )
            if after.size != before.size:
                raise StoreError(
                    f"{after.path} has another size than {before.path}; restore it from another"
                    " node or a backup"
                )
        limits = read_limits(fs, root)
        first = _first(files, found, limits)
        limit = NO_LIMIT
        if in_use:
            with StoreReader(root, fs=fs) as reader:
                limit = reader.limit_offset
            dispatched = read_dispatched(fs, f"{root}/hastore/replay")
            limit = limit if dispatched is None else min(limit, dispatched)
        if files.ledger is not None and limits is None:
            # Entries that are not committed are no messages: RocketMQ may still cut them.
            with StoreReader(root, fs=fs) as reader:
                limit = min(limit, reader.limit_offset)
        clean = not fs.exists(f"{root}/abort")
        return Log(root, tuple(found), first, limit, limits, clean, files.ledger is not None)


def first_now(fs: FileSystem, root: str) -> int:
    """Return where a store's log begins by now: retention may run meanwhile. Raises StoreError."""
    with contextlib.closing(LogFiles(root, fs)) as files:
        return _first(files, files.list(), read_limits(fs, root))


def _first(files: LogFiles, found: Sequence[LogFile], limits: Limits | None) -> int:
    if limits is not None:
        return max(limits.first_offset, found[0].start) if found else limits.first_offset
    return files.first_record_start(found) if found else 0


def used_end(fs: FileSystem, log: Log) -> int:
    """Return about where the log's bytes end, for a count of the work: files are preallocated.

    Damage in the log may hide what follows.
    """
    if not log.files:
        return log.first
    if log.limits is not None:
        end = log.limits.record_end
    else:
        with contextlib.closing(LogFiles(log.root, fs)) as files:
            end = files.whole_end()
    return max(log.first, min(end, log.limit, log.files[-1].end))


def fingerprint(fs: FileSystem, log: Log) -> list[object]:
    """Return what shows whether a log is still the one that was read, as a JSON value."""
    probes = []
    for file in log.files:
        head = read_range(fs, file.path, 4096, 0)
        tail = read_range(fs, file.path, _PROBE_BYTES, max(0, file.size - _PROBE_BYTES))
        changed_ns = os.stat(file.path).st_mtime_ns
        probes.append([file.start, file.size, zlib.crc32(head), zlib.crc32(tail), changed_ns])
    sequence = None if log.limits is None else log.limits.sequence  # rises at each start of a node
    return [log.first, log.limit, log.is_clean, sequence, probes]


def ranges(
    log: Log,
    work: str,
    buckets: int,
    range_bytes: int,
    *,
    keys: bool,
    delays_ms: tuple[int, ...] = DELAYS_MS,
) -> list[RangeTask]:
    """Divide the log into ranges of one file each."""
    step = max(range_bytes, -(-log.bytes // _RANGES_MAX))
    return [
        RangeTask(
            path=file.path,
            file_start=file.start,
            start=max(start, log.first),
            end=min(start + step, file.end),
            exact=start <= max(file.start, log.first),
            limit=log.limit,
            piece=f"{work}/pieces/{max(start, log.first):020}",
            buckets=buckets,
            keys=keys,
            entries=log.entries,
            delays_ms=delays_ms,
        )
        for file in log.files
        for start in range(file.start, file.end, step)
        if start + step > log.first and start < log.limit and file.end > log.first
    ]


def join(
    log: Log,
    tasks: Sequence[RangeTask],
    results: Sequence[RangeResult],
    again: Callable[[RangeTask], RangeResult],
) -> list[tuple[RangeTask, RangeResult]]:
    """Return the ranges with records, and check that each begins where the one before ends.

    A range whose first record was not found where the one before ends is read again from there:
    bytes inside a body looked like a record. Raises CorruptRecordError if bytes in the middle of
    the log are no record.
    """
    joined: list[tuple[RangeTask, RangeResult]] = []
    at = log.first
    for number, (task, result) in enumerate(zip(tasks, results, strict=True)):
        if at >= task.end or at >= log.limit:
            continue  # a record of an earlier range covers it
        if result.first != at:
            task = replace(task, start=at, exact=True)
            result = again(task)
        if result.first is not None and result.end > result.first:
            joined.append((task, result))
        at = max(at, result.end)
        if not result.is_whole:
            _check_end(log, at, result.last_store_ms, results[number + 1 :])
            break
    return joined


def _check_end(log: Log, end: int, stored_ms: int, later: Sequence[RangeResult]) -> None:
    """Raise CorruptRecordError unless the log may end at `end`, where no record begins.

    The rules are those of recovery (log/recovery.py): synced bytes are never given up, and a
    RocketMQ store that was closed cleanly has no whole records after a damaged one.
    """
    if log.limits is not None:
        if end < min(log.limits.flushed_offset, log.limit):
            raise _damaged(log, end, f"synced bytes follow, up to {log.limits.flushed_offset}")
        return
    if log.is_clean:
        following = _record_after(log, end, stored_ms)
    else:  # a kill leaves a torn end; but in an earlier file there is none
        file_end = end - end % log.file_size + log.file_size
        following = next(
            (one.first for one in later if one.start >= file_end and one.records), None
        )
    if following is not None:
        raise _damaged(log, end, f"whole records follow from {following} on")


def _record_after(log: Log, end: int, stored_ms: int) -> int | None:
    """Return the first whole record after `end` that was stored at `stored_ms` or later.

    Older ones are no sign of damage: RocketMQ leaves them when it cuts a log.
    """
    with contextlib.closing(LogFiles(log.root)) as files:
        for file in log.files:
            at: int | None = max(end + 1, file.start)
            while at is not None and at < file.end:
                at = files.find_record(file, at)
                if at is not None:
                    place = at - file.start + files.form.lead
                    record = decode_record(files.view(file), place)
                    if record.store_timestamp_ms >= stored_ms:
                        return at
                    at += 1
    return None


def _damaged(log: Log, offset: int, why: str) -> CorruptRecordError:
    return CorruptRecordError(
        f"{log.root}: no valid record is at offset {offset}, but {why}; nothing was changed:"
        " restore the file of the log from another node or a backup (see `hastore log verify`)"
    )
