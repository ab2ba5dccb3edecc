"""Rebuild the queues and the key index of a store: in place, in another folder, or to compare."""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass

from hastore.errors import StoreError, StoreInUseError, UsageError
from hastore.fs.filesystem import FileSystem
from hastore.store.offline.log_files import LogFiles
from hastore.store.rebuild.compare import Difference, compare
from hastore.store.rebuild.install import put_in_place
from hastore.store.rebuild.layout import INDEX, KINDS, WORK_NAME, Runner, Sizes, Steps
from hastore.store.rebuild.rebuild import BUCKETS, RANGE_BYTES, Built, Rebuild
from hastore.store.rebuild.source import Log, open_log
from hastore.store.state.lock_file import LockFile


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
    lock.take()
    try:
        log = open_log(fs, root, in_use=False)
        work = f"{root}/{WORK_NAME}"
        rebuild = _rebuild(fs, log, sizes, work, how)
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
        lock.give_back()


def rebuild_to(fs: FileSystem, root: str, output: str, sizes: Sizes, how: How) -> Built:
    """Write the queues and the index of a store to an empty folder; the store may be in use.

    Raises UsageError if the folder is not empty, StoreError.
    """
    root, output = os.path.abspath(root), os.path.abspath(output)
    check_output(fs, output)
    check_store(fs, root, in_place=False, index=how.index)
    with _log_of(fs, root) as log:
        rebuild = _rebuild(fs, log, sizes, f"{output}/{WORK_NAME}", how)
        built = rebuild.build()
        for kind in fs.list_dir(built.new):
            fs.rename(f"{built.new}/{kind}", f"{output}/{kind}")
        rebuild.discard()
        fs.sync_all(output)
        return built


def verify(
    fs: FileSystem, root: str, work: str, sizes: Sizes, how: How
) -> tuple[Built, Difference | None]:
    """Compare a store's queues and index with what its log says; the store may be in use.

    `work` is a folder for the files to compare with; it is removed at the end. Returns the first
    difference, None if there is none. Raises StoreError.
    """
    root, work = os.path.abspath(root), os.path.abspath(work)
    check_store(fs, root, in_place=False, index=how.index)
    with _log_of(fs, root) as log:
        rebuild = _rebuild(fs, log, sizes, work, how)
        try:
            built = rebuild.build()
            found = compare(fs, root, built.new, log, built.end_offset, sizes, index=how.index)
            return built, found
        finally:
            rebuild.discard()


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
        raise UsageError(f"{root} is a hastore store: its node needs the key index too")
    lock = LockFile(fs, root)
    if fs.exists(lock.path):
        lock.take()
        lock.give_back()


def check_output(fs: FileSystem, output: str) -> None:
    """Raise UsageError unless the folder is new or empty, or has what a rebuild has left."""
    output = os.path.abspath(output)
    others = [name for name in fs.list_dir(output) if name != WORK_NAME]
    if others:
        raise UsageError(f"{output} is not empty: it has {others[0]}; give a new folder")


def _rebuild(fs: FileSystem, log: Log, sizes: Sizes, work: str, how: How) -> Rebuild:
    return Rebuild(
        fs, log, sizes, work,
        runner=how.runner, steps=how.steps, range_bytes=how.range_bytes, buckets=how.buckets,
        index=how.index,
    )  # fmt: skip


@contextlib.contextmanager
def _log_of(fs: FileSystem, root: str) -> Iterator[Log]:
    """Open a log to be read; keep its store locked meanwhile unless a node has it open."""
    lock = LockFile(fs, root)
    in_use = False
    if fs.exists(lock.path):
        try:
            lock.take()
        except StoreInUseError:
            in_use = True
        except OSError as failure:  # a read-only copy, which nobody writes to
            if not isinstance(failure, PermissionError) and failure.errno != errno.EROFS:
                raise StoreError(f"{lock.path}: {failure}") from failure
    try:
        yield open_log(fs, root, in_use=in_use)
    finally:
        lock.give_back()
