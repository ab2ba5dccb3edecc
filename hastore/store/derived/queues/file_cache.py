"""A cache of the open files of all queues of a store; it also records which files are unsynced.

Replay's thread writes, housekeeping flushes, and any thread reads.
"""

import contextlib
import resource
import threading
from collections import OrderedDict

from hastore.fs.filesystem import File, FileSystem, sync_all, sync_files

_OPEN_FILES_MIN, _OPEN_FILES_MAX = 128, 16_384
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

    def zero(self, path: str, position: int, size: int) -> None:
        """Zero a range; durable after `flush`."""
        with self._lock:
            self._dirty.add(path)
            self._file(path).zero(position, size)

    def create(self, path: str, size: int) -> None:
        """Make a sparse file of zeros, and its directories; durable after `flush`."""
        directory = path.rpartition("/")[0]
        with self._lock:
            missing = directory
            while missing and not self.fs.is_dir(missing):
                missing = missing.rpartition("/")[0]
                self._dirty_dirs.add(missing)
            self.fs.make_dirs(directory, sync=False)
            file = self.fs.open(path, create=True)
            self._dirty_dirs.add(directory)
            self._dirty.add(path)
            try:
                file.truncate(size)
            finally:
                file.close()

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
                share = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
                self._open_max = min(max(share, _OPEN_FILES_MIN), _OPEN_FILES_MAX)
            if len(self._files) > self._open_max:
                self._files.popitem(last=False)
        else:
            self._files.move_to_end(path)
        return file
