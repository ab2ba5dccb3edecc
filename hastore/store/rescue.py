"""Keep in `rescued/` the bytes that a node takes out of its log, until an operator removes them.

A tail that a rewind cuts off is copied to `rescued/<name>/`; a log that is set aside is moved there
by MessageStore.
"""

from hastore.errors import StoreError, StoreFullError, UsageError
from hastore.store.fs.file_names import file_name
from hastore.store.fs.filesystem import FileSystem
from hastore.store.log.commit_log import CommitLog

_COPY_BYTES = 1 << 20


def rescue_folder(fs: FileSystem, root: str, name: str) -> str:
    """Return the path of an empty or new folder `rescued/<name>`.

    If an earlier attempt left files there, a number is added to the name, so that nothing is
    overwritten. Raises UsageError if `name` is no directory name.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UsageError(f"{name!r} is no directory name")
    folder = f"{root}/rescued/{name}"
    number = 1
    while fs.list_dir(folder):
        number += 1
        folder = f"{root}/rescued/{name}.{number}"
    return folder


def copy_tail(fs: FileSystem, root: str, name: str, log: CommitLog, offset: int) -> int:
    """Copy [offset, max_offset) to sparse files under `rescued/<name>`, synced; returns the size.

    The files keep their names. The caller holds the log's lock. Raises StoreFullError if there is
    no room, StoreError if the copy fails.
    """
    folder = rescue_folder(fs, root, name)
    size = log.max_offset - offset
    if size > fs.free_bytes(root):
        raise StoreFullError(f"{folder}: no room for {size} bytes to be rescued")
    try:
        fs.make_dirs(folder)
        while offset < log.max_offset:
            offset = _copy_file(fs, log, offset, folder)
        fs.sync_dir(folder)
    except OSError as failure:
        raise StoreError(f"{folder}: cannot rescue the log's tail: {failure}") from failure
    return size


def _copy_file(fs: FileSystem, log: CommitLog, offset: int, folder: str) -> int:
    """Copy the log's bytes from `offset` to the end of their file; returns where they end."""
    file = log.queue.find(offset)
    if file is None:
        raise StoreError(f"no file holds offset {offset}")
    end = min(file.end, log.max_offset)
    target = fs.open(f"{folder}/{file_name(file.start)}", create=True)
    try:
        target.truncate(0)
        while offset < end:
            data = file.file.pread(min(_COPY_BYTES, end - offset), offset - file.start)
            target.pwrite(data, offset - file.start)
            offset += len(data)
        target.sync()
    finally:
        target.close()
    return end
