"""Put the new queues and the new index in place of a store's present ones.

The store is locked meanwhile, so no node sees half of it. If this process is killed in between, a
hastore node that starts then builds everything anew, because replay's progress was set to 0 before;
a RocketMQ broker finds the index before the queues, and appends what is missing. Calling
`put_in_place` again completes it.
"""

from dataclasses import replace

from hastore.fs.filesystem import FileSystem, sync_all
from hastore.store.rebuild.layout import KINDS, Sizes
from hastore.store.state.checkpoint import CheckpointFile
from hastore.store.state.replay_progress import ReplayState


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
            file = CheckpointFile(fs, root)
            try:
                now = file.load()
                file.save(replace(now, index_timestamp_ms=full_ms), sync=True)
            finally:
                file.close()
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
