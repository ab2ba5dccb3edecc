"""Build all queues and the key index of a store anew: in place, in another folder, or to compare.

`rebuild_in_place`, `rebuild_to` and `rebuild_to_verify` run a Rebuild, the driver's part of the
work. Its first step reads the ranges of the log in parallel and writes a piece for each
(extract.py). Its second step builds from all pieces the queues and the index files, in parallel too
(write.py). Everything happens in a work folder, whose plan says what it was built from. So a
rebuild that was killed goes on with the pieces and parts that exist, unless the log has changed or
the machine has restarted, which may have lost files that were not synced.

`put_in_place` moves the result into the store. The store is locked meanwhile, so no node sees half
of it. If this process is killed in between, a hastore node that starts then builds everything anew,
because replay's progress was set to 0 before; a RocketMQ broker finds the index before the queues,
and appends what is missing. Calling `put_in_place` again completes it.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    CorruptRecordError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    UsageError,
)
from hastore.fs.filesystem import REAL, FileSystem, sync_all
from hastore.store.derived.index_file import index_name
from hastore.store.offline.log_files import LogFiles
from hastore.store.rebuild.compare import WrongFile, compare
from hastore.store.rebuild.extract import Piece, extract_range
from hastore.store.rebuild.layout import (
    BATCH_QUEUES,
    INDEX,
    KINDS,
    QUEUES,
    WORK_NAME,
    RangeResult,
    RangeTask,
    Runner,
    Sizes,
    Steps,
    disk_errors,
)
from hastore.store.rebuild.source import (
    NO_LIMIT,
    Log,
    fingerprint,
    join,
    open_log,
    ranges,
    used_end,
)
from hastore.store.rebuild.write import (
    BucketResult,
    BucketTask,
    IndexResult,
    IndexTask,
    build_bucket,
    build_index,
    index_tasks,
)
from hastore.store.state.marker_files import CheckpointFile, LockFile
from hastore.store.state.replay_progress import ReplayState, read_cache_id

RANGE_BYTES = 128 << 20
BUCKETS = 32
_STOPPED = "queues and index are as they were, and the work so far is kept in {work}"

Part = BucketTask | IndexTask


@dataclass(frozen=True)
class Built:
    """What was built, in the folder `new`."""

    new: str
    first_offset: int
    end_offset: int  # of the last record that was read
    log_bytes: int
    records: int
    queues: int
    batch_queues: int
    units: int
    keys: int
    index_files: int
    kept_queues: int  # queues with units of records that retention has removed
    refused: tuple[str, ...]  # queues whose old units contradict the log, and were not kept
    full_ms: int  # end time of the last full index file, 0 without one


@dataclass(frozen=True)
class How:
    """How a rebuild runs."""

    runner: Runner
    steps: Steps
    range_bytes: int = RANGE_BYTES
    buckets: int = BUCKETS
    index: bool = True  # the key index too, or only the queues


def rebuild_in_place(fs: FileSystem, root: str, sizes: Sizes, how: How) -> Built:
    """Replace a store's queues and index by new ones. Raises StoreInUseError, StoreError.

    The store is locked from beginning to end. After an error nothing of it has changed.
    """
    root = os.path.abspath(root)
    check_store(fs, root, in_place=True, index=how.index)  # before a lock file is made
    lock = LockFile(fs, root)
    lock.acquire()
    try:
        log = open_log(fs, root, in_use=False)
        work = f"{root}/{WORK_NAME}"
        rebuild = Rebuild(fs, log, sizes, work, how)
        built = rebuild.build()
        how.steps.keep("the new queues and the new index are partly in place")
        begun = f"{work}/installing"
        if not fs.exists(begun):
            for kind in KINDS:  # a kind that the log has no records of becomes empty
                if fs.exists(f"{root}/{kind}") and (how.index or kind != INDEX):
                    fs.make_dirs(f"{built.new}/{kind}", sync=False)
            fs.replace_bytes(begun, b"")  # from here on, a kind that is not in `new` is in place
        put_in_place(fs, root, work, sizes, built.end_offset, built.full_ms if how.index else None)
        rebuild.discard()
        return built
    finally:
        lock.release()


def rebuild_to(fs: FileSystem, root: str, output: str, sizes: Sizes, how: How) -> Built:
    """Write the queues and the index of a store to an empty folder; the store may be in use.

    Raises UsageError if the folder is not empty, StoreError.
    """
    root, output = os.path.abspath(root), os.path.abspath(output)
    check_output(fs, output)
    check_store(fs, root, in_place=False, index=how.index)
    with _log_of(fs, root) as log:
        rebuild = Rebuild(fs, log, sizes, f"{output}/{WORK_NAME}", how)
        built = rebuild.build()
        for kind in fs.list_dir(built.new):
            fs.rename(f"{built.new}/{kind}", f"{output}/{kind}")
        rebuild.discard()
        fs.sync_all(output)
        return built


def rebuild_to_verify(
    fs: FileSystem, root: str, work: str, sizes: Sizes, how: How
) -> tuple[Built, WrongFile | None]:
    """Compare a store's queues and index with what its log says; the store may be in use.

    `work` is a folder for the files to compare with; it is removed at the end. Returns the first
    difference, None if there is none. Raises StoreError.
    """
    root, work = os.path.abspath(root), os.path.abspath(work)
    check_store(fs, root, in_place=False, index=how.index)
    with _log_of(fs, root) as log:
        in_use = log.limit != NO_LIMIT
        try:
            built, found = _verify(fs, log, work, sizes, how)
            if found is None or not in_use:
                return built, found
        except CorruptRecordError:
            if not in_use:
                raise
    # A failover may have cut the log meanwhile: only what is wrong with it by now is a difference.
    with _log_of(fs, root) as log:
        return _verify(fs, log, work, sizes, how)


def _verify(
    fs: FileSystem, log: Log, work: str, sizes: Sizes, how: How
) -> tuple[Built, WrongFile | None]:
    rebuild = Rebuild(fs, log, sizes, work, how)
    try:
        built = rebuild.build()
        found = compare(fs, log.root, built.new, log, built.end_offset, sizes, index=how.index)
        return built, found
    finally:
        rebuild.discard()


def put_in_place(
    fs: FileSystem, root: str, work: str, sizes: Sizes, end: int, full_ms: int | None
) -> None:
    """Replace queues and index by those in WORK/new. Raises OSError, SyncFailedError.

    `end` is the end of the last record in them; `full_ms` is the end time of the last full index
    file, None if the index stays as it is. Everything is durable when this returns.
    """
    sync_all(fs, work)
    progress = None
    if fs.is_dir(f"{root}/hastore"):
        progress = ReplayState(
            fs, f"{root}/hastore/replay",
            units=sizes.units, slots=sizes.slots, entries=sizes.entries,
        )  # fmt: skip
        progress.save(0, 0)
    try:
        for kind in KINDS:
            _replace(fs, f"{root}/{kind}", f"{work}/new/{kind}", f"{work}/old")
        fs.sync_dir(root)
        if full_ms is not None and fs.exists(f"{root}/checkpoint"):
            # After a crash, RocketMQ removes index files that end later than its checkpoint says.
            with contextlib.closing(CheckpointFile(fs, root)) as file:
                now = file.load()
                file.save(replace(now, index_timestamp_ms=full_ms), sync=True)
        if progress is not None:
            progress.save(end, end)
    finally:
        if progress is not None:
            progress.close()


def _replace(fs: FileSystem, target: str, new: str, old: str) -> None:
    """Move a directory in place; do nothing if it was moved before."""
    if not fs.exists(new):
        return
    if fs.exists(target):
        fs.make_dirs(old)
        number = len(fs.list_dir(old))
        fs.rename(target, f"{old}/{number}")
    fs.rename(new, target)


class Rebuild:
    """One rebuild of a log, in a work folder on the file system of its result."""

    def __init__(self, fs: FileSystem, log: Log, sizes: Sizes, work: str, how: How) -> None:
        """Prepare; nothing is written before `build`."""
        self._fs = fs
        self._log = log
        self._sizes = sizes
        self._work = work
        self._how = how

    def build(self) -> Built:
        """Build everything in the work folder. Raises StoreError; the store is not changed.

        The work folder is removed if the disk has no room, or if the log is damaged: once that is
        repaired, the log is another one.
        """
        try:
            with disk_errors():
                created_ms = self._open_work()
                self._how.steps.keep(_STOPPED.format(work=self._work))
                joined = self._read_log()
                return self._write_parts(joined, created_ms)
        except (StoreFullError, CorruptRecordError):
            self.discard()
            raise

    def discard(self) -> None:
        """Remove the work folder."""
        if self._fs.exists(self._work):
            self._fs.remove_tree(self._work)

    # -- the work folder ---------------------------------------------------------------------------

    def _open_work(self) -> int:
        """Continue in the work folder if it is of the same log, else make it anew."""
        fs, path = self._fs, f"{self._work}/plan"
        plan = {
            "version": 2,
            "boot": read_cache_id(fs, self._work).hex(),
            "store": os.path.abspath(self._log.root),
            "log": fingerprint(fs, self._log),
            "sizes": asdict(self._sizes),
            "buckets": self._how.buckets,
            "range_bytes": self._how.range_bytes,
            "index": self._how.index,
        }
        if fs.exists(path):
            try:
                known = json.loads(fs.read_bytes(path))
                created_ms = int(known.pop("created_ms"))
            except (ValueError, KeyError, AttributeError, TypeError):
                known, created_ms = None, 0
            if known == json.loads(json.dumps(plan)):
                return created_ms
        self.discard()
        for name in ("pieces", "done", "parts", "new"):
            fs.make_dirs(f"{self._work}/{name}")
        created_ms = SYSTEM_CLOCK.wall_ms()
        fs.replace_bytes(path, json.dumps({**plan, "created_ms": created_ms}).encode())
        return created_ms

    # -- the first step ----------------------------------------------------------------------------

    def _read_log(self) -> list[tuple[RangeTask, RangeResult]]:
        fs, log, how = self._fs, self._log, self._how
        tasks = ranges(
            log, self._work, how.buckets, how.range_bytes,
            keys=how.index, delays_ms=self._sizes.delays_ms,
        )  # fmt: skip
        results: dict[int, RangeResult] = {}
        for number, task in enumerate(tasks):
            if fs.exists(task.piece):
                result = Piece(fs, task.piece).result
                if result.start == task.start:
                    results[number] = result
        end = used_end(fs, log)
        used = [max(0, min(task.end, end) - task.start) for task in tasks]
        how.steps.begin("reading the log", sum(used), "bytes")
        how.steps.advance(sum(used[number] for number in results))
        numbers = {task.start: number for number, task in enumerate(tasks)}
        missing = [task for number, task in enumerate(tasks) if number not in results]
        extract = partial(extract_range, fs=fs)
        for task, result in self._how.runner("read the log", extract, missing):
            results[numbers[task.start]] = result
            self._how.steps.advance(used[numbers[task.start]])
        return join(log, tasks, [results[number] for number in range(len(tasks))], extract)

    # -- the second step ---------------------------------------------------------------------------

    def _write_parts(
        self, joined: Sequence[tuple[RangeTask, RangeResult]], created_ms: int
    ) -> Built:
        log, results = self._log, [result for _, result in joined]
        paths = [task.piece for task, _ in joined]
        parts = f"{self._work}/parts"
        bucket_tasks = [
            BucketTask(
                bucket=bucket,
                buckets=self._how.buckets,
                pieces=tuple(
                    path
                    for path, result in zip(paths, results, strict=True)
                    if bucket in result.buckets
                ),
                store=os.path.abspath(log.root),
                min_offset=log.first,
                units=self._sizes.units,
                folder=f"{parts}/queues-{bucket:04}",
            )
            for bucket in range(self._how.buckets)
        ]
        files = index_tasks(results, paths, self._sizes, parts) if self._how.index else []
        self._how.steps.begin("writing queues and index", len(bucket_tasks) + len(files), "tasks")
        # The index files first, because one of them takes longer than the queues of a bucket.
        done = self._build_parts([*files, *bucket_tasks])
        indexes = [done[task.folder] for task in files]
        queues = [done[task.folder] for task in bucket_tasks]
        self._assemble(queues, indexes, created_ms)
        return Built(
            new=f"{self._work}/new",
            first_offset=log.first,
            end_offset=max((result.end for result in results), default=log.first),
            log_bytes=sum(result.end - (result.first or 0) for result in results),
            records=sum(result.records for result in results),
            queues=sum(result.queues for result in queues),
            batch_queues=sum(result.batch_queues for result in queues),
            units=sum(result.units for result in queues),
            keys=sum(result.keys for result in indexes),
            index_files=sum(result.files for result in indexes),
            kept_queues=sum(result.kept for result in queues),
            refused=tuple(name for result in queues for name in result.refused),
            full_ms=next((one.full_ms for one in reversed(indexes) if one.full_ms), 0),
        )

    def _build_parts(self, tasks: Sequence[Part]) -> dict[str, Any]:
        """Run the tasks that are not done yet; return the results by the tasks' folders."""
        fs = self._fs
        results: dict[str, Any] = {}
        for task in tasks:
            path = self._done_path(task)
            if fs.exists(path):
                fields = json.loads(fs.read_bytes(path))
                if isinstance(task, BucketTask):
                    fields["refused"] = tuple(fields["refused"])
                    results[task.folder] = BucketResult(**fields)
                else:
                    results[task.folder] = IndexResult(**fields)
        self._how.steps.advance(len(results))
        missing = [task for task in tasks if task.folder not in results]
        for task, result in self._how.runner("build", partial(build_part, fs=fs), missing):
            fs.replace_bytes(self._done_path(task), json.dumps(asdict(result)).encode())
            results[task.folder] = result
            self._how.steps.advance(1)
        return results

    def _done_path(self, task: Part) -> str:
        return f"{self._work}/done/{task.folder.rpartition('/')[2]}"

    def _assemble(
        self, queues: Iterable[BucketResult], indexes: Iterable[IndexResult], created_ms: int
    ) -> None:
        """Move the parts to WORK/new; those that were moved before are there already."""
        fs, new = self._fs, f"{self._work}/new"
        for bucket in queues:
            for kind in (QUEUES, BATCH_QUEUES):
                for topic in fs.list_dir(f"{bucket.folder}/{kind}"):
                    source, target = f"{bucket.folder}/{kind}/{topic}", f"{new}/{kind}/{topic}"
                    fs.make_dirs(target, sync=False)
                    for queue in fs.list_dir(source):
                        fs.rename(f"{source}/{queue}", f"{target}/{queue}")
        parts = list(indexes)
        names = _index_names(created_ms, sum(part.files for part in parts))
        for part in parts:
            for name in fs.list_dir(part.folder):
                fs.make_dirs(f"{new}/{INDEX}", sync=False)
                fs.rename(f"{part.folder}/{name}", f"{new}/{INDEX}/{names[int(name)]}")


def build_part(task: Part, fs: FileSystem = REAL) -> BucketResult | IndexResult:
    """Build what the task says: a bucket's queues or some index files. Raises StoreError."""
    return build_bucket(task, fs) if isinstance(task, BucketTask) else build_index(task, fs)


def _index_names(created_ms: int, count: int) -> list[str]:
    """Return ascending names, a millisecond apart, of files that were created before now."""
    created = datetime.fromtimestamp(created_ms / 1000)
    return [index_name(created - timedelta(milliseconds=left)) for left in range(count, 0, -1)]


def check_store(fs: FileSystem, root: str, *, in_place: bool, index: bool) -> None:
    """Look whether a store can be rebuilt; writes nothing. Raises UsageError, StoreError.

    With `in_place`, raises StoreInUseError if a node has it open.
    """
    root = os.path.abspath(root)
    if fs.exists(f"{root}/consumequeue_ext"):
        raise UsageError(
            f"{root} has consumequeue_ext: queues with extensions (enableConsumeQueueExt)"
            " cannot be rebuilt; let the RocketMQ broker do it"
        )
    if not in_place:
        LogFiles(root, fs).close()
        return
    open_log(fs, root, in_use=False)
    if not index and fs.is_dir(f"{root}/hastore"):
        raise UsageError(
            f"{root} is a hastore store: its node needs the key index too; leave out --queues-only"
        )
    lock = LockFile(fs, root)
    if fs.exists(lock.path):
        lock.acquire()
        lock.release()


def check_output(fs: FileSystem, output: str) -> None:
    """Raise UsageError unless the folder is new or empty, or has what a rebuild has left."""
    output = os.path.abspath(output)
    others = [name for name in fs.list_dir(output) if name != WORK_NAME]
    if others:
        raise UsageError(f"{output} is not empty: it has {others[0]}; give a new folder")


@contextlib.contextmanager
def _log_of(fs: FileSystem, root: str) -> Iterator[Log]:
    """Open a log to be read; keep its store locked meanwhile unless a node has it open."""
    lock = LockFile(fs, root)
    in_use = False
    if fs.exists(lock.path):
        try:
            lock.acquire()
        except StoreInUseError:
            in_use = True
        except OSError as failure:  # a read-only copy, which nobody writes to
            if not isinstance(failure, PermissionError) and failure.errno != errno.EROFS:
                raise StoreError(
                    f"{lock.path} cannot be locked: {failure}; check the store's disk"
                ) from failure
    try:
        yield open_log(fs, root, in_use=in_use)
    finally:
        lock.release()
