"""Keep in `rescued/` the bytes that a node takes out of its log, until an operator removes them.

A tail that is cut off is copied to `rescued/<name>/`; a log that is set aside is moved there by
LogStore.
"""

import contextlib

from hastore.errors import StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import FileSystem, file_name
from hastore.store.log.commit_log import CommitLog

_COPY_BYTES = 1 << 20
_HEAD_BYTES = 8  # of an item; no item begins with so many zeros


def rescue_folder(fs: FileSystem, root: str, name: str) -> str:
    """Return the path of an empty or new folder `rescued/<name>`.

    If an earlier attempt left files there, a number is added to the name, so that nothing is
    overwritten. Raises UsageError if `name` is no directory name.
    """
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise UsageError(f"{name!r} is no name for a folder in {root}/rescued; give another")
    folder = f"{root}/rescued/{name}"
    number = 1
    while fs.list_dir(folder):
        number += 1
        folder = f"{root}/rescued/{name}.{number}"
    return folder


def copy_tail(fs: FileSystem, root: str, name: str, log: CommitLog, offset: int, end: int) -> int:
    """Copy [offset, end) to sparse files under `rescued/<name>`, synced; returns the size.

    The files keep their names. The caller holds the log's lock. Raises StoreFullError if there is
    no room, StoreError if the copy fails.
    """
    folder = rescue_folder(fs, root, name)
    size = end - offset
    if size > fs.free_bytes(root):
        raise StoreFullError(
            f"{folder}: no room for {size} bytes to be rescued; free space on its file system"
        )
    try:
        fs.make_dirs(folder)
        while offset < end:
            offset = _copy_file(fs, log, offset, end, folder)
        fs.sync_dir(folder)
    except OSError as failure:
        raise StoreError(
            f"{folder}: the log's tail cannot be rescued: {failure}; it was not cut: make the"
            " folder writable, and check its disk"
        ) from failure
    return size


def written_end(log: CommitLog, offset: int) -> int:
    """Return the end of what is written from `offset` on; `offset` if zeros begin there.

    The log's files are read beyond its end. Raises OSError.
    """
    first = log.queue.find(offset)
    if first is None or not any(first.file.pread(_HEAD_BYTES, offset - first.start)):
        return offset
    for file in reversed(log.queue.files):
        end = file.size
        while end:
            size = min(_COPY_BYTES, end)
            found = file.file.pread(size, end - size).rstrip(b"\0")
            if found:
                return file.start + end - size + len(found)
            end -= size
    return offset


def _copy_file(fs: FileSystem, log: CommitLog, offset: int, stop: int, folder: str) -> int:
    """Copy the log's bytes from `offset` to `stop`, or the end of their file; return that end."""
    file = log.queue.find(offset)
    if file is None:
        raise log.gone(offset, f"the file of offset {offset}")
    end = min(file.end, stop)
    path = f"{folder}/{file_name(file.start)}"
    with contextlib.closing(fs.open(path, create=True)) as target:
        target.truncate(0)
        while offset < end:
            data = file.file.pread(min(_COPY_BYTES, end - offset), offset - file.start)
            target.pwrite(data, offset - file.start)
            offset += len(data)
        target.sync()
    return end
