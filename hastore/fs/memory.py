"""A file system in memory, for a store that need not survive its process.

Each file is a memfd: a real file without a name in any directory, kept in memory (and swap) by the
kernel. So maps, pread, sendfile and splice work on it as on any file. Names are kept here. Memory
is taken as bytes are written, not when room is reserved: if the system runs out of it, the kernel
may end the process.

Syncs do nothing, since nothing survives. Thread-safe.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Sequence

from hastore.errors import StoreInUseError
from hastore.fs.filesystem import REAL, RealFile
from hastore.fs.protocols import File, FileSystem

_MEMORY_LEFT = b"MemAvailable:"


class _MemoryFile(RealFile):
    """An open file; it holds its memfd, also after the name is gone."""

    in_memory = True

    def allocate(self, size: int) -> None:
        """Make the file at least `size` bytes long; no memory is reserved."""
        if size > self.size:
            self.truncate(size)

    def sync(self) -> None:
        """Return: there is no disk."""


class MemoryFileSystem(FileSystem):
    """Names and directories in memory; a path outside them, as under /proc, is only read."""

    def __init__(self) -> None:
        self._guard = threading.RLock()
        self._files: dict[str, RealFile] = {}
        self._directories: set[str] = set()
        self._locked: set[str] = set()

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open a file."""
        del writable
        path = _plain(path)
        with self._guard:
            kept = self._files.get(path)
            if kept is None:
                if not create:
                    raise _no_file(path)
                if os.path.dirname(path) not in self._directories:
                    raise _no_file(os.path.dirname(path))
                kept = RealFile(path, os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC))
                self._files[path] = kept
            return _MemoryFile(path, os.dup(kept.fileno()))

    def exists(self, path: str) -> bool:
        """Tell whether the path names anything."""
        path = _plain(path)
        return path in self._files or path in self._directories

    def is_dir(self, path: str) -> bool:
        """Tell whether the path names a directory."""
        return _plain(path) in self._directories

    def list_dir(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        path = _plain(path)
        with self._guard:
            every = (*self._files, *self._directories)
        return sorted(os.path.basename(name) for name in every if os.path.dirname(name) == path)

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        """Make the directory and its parents."""
        del sync
        path = _plain(path)
        with self._guard:
            while path not in self._directories:
                if path in self._files:
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                self._directories.add(path)
                path = os.path.dirname(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file or a directory, replacing a target file."""
        source, target = _plain(source), _plain(target)
        with self._guard:
            if source in self._files:
                replaced = self._files.get(target)
                self._files[target] = self._files.pop(source)
                if replaced is not None and replaced is not self._files[target]:
                    replaced.close()
            elif source in self._directories:
                self._move_directory(source, target)
            else:
                raise _no_file(source)

    def _move_directory(self, source: str, target: str) -> None:
        under = source + "/"
        for path in [path for path in self._files if path.startswith(under)]:
            self._files[target + path[len(source) :]] = self._files.pop(path)
        for path in [path for path in self._directories if f"{path}/".startswith(under)]:
            self._directories.discard(path)
            self._directories.add(target + path[len(source) :])

    def remove(self, path: str) -> None:
        """Remove a file; who has it open keeps its bytes."""
        with self._guard:
            kept = self._files.pop(_plain(path), None)
        if kept is None:
            raise _no_file(path)
        kept.close()

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it."""
        path = _plain(path)
        with self._guard:
            if path not in self._directories:
                raise _no_file(path)
            for name in [name for name in self._files if name.startswith(path + "/")]:
                self._files.pop(name).close()
            self._directories -= {
                name for name in self._directories if f"{name}/".startswith(path + "/")
            }

    def sync_dir(self, path: str) -> None:
        """Return: there is no disk."""

    def sync_all(self, path: str) -> None:
        """Return: there is no disk."""

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        """Return all of a small file."""
        if path.startswith("/proc/"):
            return REAL.read_bytes(path, max_bytes)
        file = self.open(path)
        try:
            return file.pread(min(max_bytes, file.size), 0)
        finally:
            file.close()

    def keep_reserve(self, folder: str, sizes: Sequence[int]) -> None:
        """Return: memory is not reserved."""

    def lock(self, path: str) -> File:
        """Lock a file within this process: no other has these files."""
        path = _plain(path)
        with self._guard:
            if path in self._locked:
                raise StoreInUseError(
                    f"{path}: this process has the store open already; close it first"
                )
            self._locked.add(path)
            with contextlib.closing(self.open(path, create=True)) as file:
                return _LockFile(self, path, os.dup(file.fileno()))

    def unlock(self, path: str) -> None:
        """Give a lock back."""
        with self._guard:
            self._locked.discard(path)

    def is_same_file(self, path: str, file: File) -> bool:
        """Tell whether `path` names the open `file`."""
        with self._guard:
            kept = self._files.get(_plain(path))
            if kept is None:
                return False
            named, opened = os.fstat(kept.fileno()), os.fstat(file.fileno())
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def modified_ms(self, path: str) -> int:
        """Return when the file was written last."""
        with self._guard:
            kept = self._files.get(_plain(path))
            if kept is None:
                raise _no_file(path)
            return os.fstat(kept.fileno()).st_mtime_ns // 1_000_000

    def free_bytes(self, path: str) -> int:
        """Return how much memory the system can still give, as it estimates."""
        del path
        for line in REAL.read_bytes("/proc/meminfo", 1 << 16).splitlines():
            if line.startswith(_MEMORY_LEFT):
                return int(line.split()[1]) * 1024
        return 0

    def used_bytes(self, path: str) -> int:
        """Return the memory that the files below a directory take."""
        below = f"{_plain(path)}/"
        with self._guard:
            found = [file for name, file in self._files.items() if name.startswith(below)]
            return 512 * sum([os.fstat(file.fileno()).st_blocks for file in found])


class _LockFile(RealFile):
    """A locked file; closing it gives the lock back."""

    def __init__(self, fs: MemoryFileSystem, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs

    def close(self) -> None:
        """Give the lock back."""
        super().close()
        self._fs.unlock(self.path)


def _plain(path: str) -> str:
    return os.path.normpath(os.path.abspath(path))


def _no_file(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
