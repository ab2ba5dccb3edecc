"""A file system that fails, stops half-way or blocks as a test says, and lists its calls."""

import errno
import os
import threading
from collections.abc import Callable

from hastore.errors import StoreFullError
from hastore.fs.filesystem import Bytes, File, RealFile, RealFileSystem

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BAD_DISK = OSError(errno.EIO, os.strerror(errno.EIO))


def fresh(error: OSError, path: str) -> OSError:
    """Return a new error of the same kind, as the system would raise it."""
    return OSError(error.errno, error.strerror, path)


class FaultyFile(RealFile):
    """A file whose writes, zeroing and syncs obey the rules of its file system."""

    def __init__(self, fs: "FaultyFileSystem", path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs
        self._zeroing = False

    def pwrite(self, data: Bytes, position: int) -> None:
        if not self._zeroing:
            self._fs.begin("write", self.path)
            rule = self._fs.torn.get(self._fs.kind(self.path))
            if rule is not None:
                size, error = rule
                if size:
                    super().pwrite(memoryview(data)[:size], position)
                raise fresh(error, self.path)
        super().pwrite(data, position)

    def zero(self, position: int, size: int) -> None:
        self._fs.begin("zero", self.path)
        self._zeroing = True
        try:
            super().zero(position, size)
        finally:
            self._zeroing = False

    def sync(self) -> None:
        self._fs.begin("sync", self.path)
        super().sync()


class FaultyFileSystem(RealFileSystem):
    """The real file system under rules.

    `hook(call, path)` runs before each call, in its thread, and may raise or block. `torn` has, for
    a kind of file (the name of its directory, such as "commitlog"), how many bytes of a write
    arrive and the error that follows. `calls` has all calls in order.
    """

    def __init__(self) -> None:
        self.hook: Callable[[str, str], None] | None = None
        self.torn: dict[str, tuple[int, OSError]] = {}
        self.calls: list[tuple[str, str]] = []

    def fail(self, call: str, part: str, error: OSError = BAD_DISK) -> None:
        """Make a call fail if its path contains `part`."""

        def rule(made: str, path: str) -> None:
            if made == call and part in path:
                raise fresh(error, path)

        self.hook = rule

    def heal(self) -> None:
        """Remove all rules."""
        self.hook = None
        self.torn.clear()

    def begin(self, call: str, path: str) -> None:
        """Record a call and apply the rules to it."""
        self.calls.append((call, path))
        if self.hook is not None:
            self.hook(call, path)

    @staticmethod
    def kind(path: str) -> str:
        """Return the name of the directory that a file lies in."""
        return path.rpartition("/")[0].rpartition("/")[2]

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        self.begin("open", path)
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return FaultyFile(self, path, os.open(path, flags | os.O_CLOEXEC, 0o644))

    def rename(self, source: str, target: str) -> None:
        self.begin("rename", target)
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self.begin("remove", path)
        super().remove(path)

    def sync_dir(self, path: str) -> None:
        self.begin("sync_dir", path)
        super().sync_dir(path)

    def sync_all(self, path: str) -> None:
        self.begin("sync_all", path)
        super().sync_all(path)


class NoticedLock:
    """A lock that sets an event when a thread has to wait for it."""

    def __init__(self, waiting: threading.Event) -> None:
        self._lock = threading.RLock()
        self._waiting = waiting

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class _RoomFile(RealFile):
    """A file that gets no block any more while its disk is full."""

    def __init__(self, fs: "FullDisk", path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs

    def _check(self, end: int) -> None:
        if self._fs.full and end > 512 * os.fstat(self.fileno()).st_blocks:
            raise fresh(NO_SPACE, self.path)

    def pwrite(self, data: Bytes, position: int) -> None:
        self._check(position + len(data))
        super().pwrite(data, position)

    def allocate(self, size: int) -> None:
        try:
            self._check(size)
        except OSError as failure:
            raise StoreFullError(f"{self.path}: no room for {size} bytes") from failure
        super().allocate(size)


class FullDisk(RealFileSystem):
    """The real file system. While `full`, it has no room for a new block or a new name."""

    full = False

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if create and not self.exists(path):
            self._no_new(path)
        file = super().open(path, create=create, writable=writable)
        return _RoomFile(self, path, os.dup(file.fileno()))

    def create_new(self, path: str) -> File:
        self._no_new(path)
        return super().create_new(path)

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        if not self.is_dir(path):
            self._no_new(path)
        super().make_dirs(path, sync=sync)

    def remove(self, path: str) -> None:
        super().remove(path)
        if "/commitlog/" in path or "/data/" in path:
            self.full = False  # that made room

    def _no_new(self, path: str) -> None:
        if self.full:
            raise fresh(NO_SPACE, path)
