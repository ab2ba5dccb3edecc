"""The real file system: the module through which store, replication and server touch files.

Callers take a `FileSystem` as an argument: `REAL` in a node, an implementation with injected
failures in tests. Any thread may call it.

A failure is an `OSError` whose text names the file, with two exceptions: an allocation without
enough room raises `StoreFullError`, since a full disk is an expected and temporary state, and a
lock that is held raises `StoreInUseError`.

After the class come functions over any FileSystem: syncs of many files, names of log and queue
files, and whether the page cache has the bytes of a mapped file.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator

from hastore.errors import NotCachedError, StoreFullError, StoreInUseError, SyncFailedError
from hastore.fs.protocols import NO_ROOM, Bytes, File, FileSystem

__all__ = ["NO_ROOM", "Bytes", "File", "FileSystem"]  # callers get the interface here too

# The process or the system has no free descriptor. Only `open` fails with these errors, never a
# write or a sync.
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_FALLOC_FL_ZERO_RANGE = 0x10
_ZEROS = bytes(1 << 20)
_LOOK_BYTES = 1 << 16  # of data that `is_zero` reads
_KINDS_WITH_OBJECT = ("ext4", "xfs", "f2fs")  # file systems that have a folder in /sys/fs

log = logging.getLogger(__name__)


class _Reading(threading.local):
    """Whether the reads of a thread may wait for the disk."""

    may_wait = True


_reading = _Reading()


class _WithoutWaiting:
    __slots__ = ()

    def __enter__(self) -> None:
        _reading.may_wait = False

    def __exit__(self, *_: object) -> None:
        _reading.may_wait = True


_without_waiting = _WithoutWaiting()  # it has no state: a thread's is in `_reading`


def without_waiting() -> contextlib.AbstractContextManager[None]:
    """Let each `pread` of this thread take only what is in memory: else it raises NotCachedError.

    For a thread that must not wait for a slow disk. Another thread then reads what was missing.
    Not a generator: every pull enters it.
    """
    return _without_waiting


def may_wait() -> bool:
    """Whether the reads of this thread may wait for the disk."""
    return _reading.may_wait


class SyncCount:
    """How many syncs this process has made; any thread adds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self) -> None:
        """Count a sync that succeeded."""
        with self._lock:
            self.count += 1


SYNCS = SyncCount()
# Where a file may be made, a link that another user has planted is not followed.
_MAKE = os.O_CREAT | os.O_NOFOLLOW


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the file's name to the error of a call that knows only a descriptor."""
    try:
        yield
    except OSError as failure:
        if failure.filename is None:
            failure.filename = path
        raise


@contextlib.contextmanager
def _no_link(path: str) -> Iterator[None]:
    """Say what the error of an open with O_NOFOLLOW means."""
    try:
        yield
    except OSError as failure:
        if failure.errno == errno.ELOOP:
            why = "is a symbolic link, which is not followed where a file may be made; remove it"
            raise OSError(errno.ELOOP, why, path) from failure
        raise


class RealFile:
    """An open file of the real file system."""

    in_memory = False  # whether there is no disk to wait for

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.size = os.fstat(descriptor).st_size

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def pread(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes from `position`; see `without_waiting`."""
        if not _reading.may_wait and not self.in_memory:
            return self._pread_cached(size, position)
        try:
            data = os.pread(self._descriptor, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            got = len(data)
            while got < size and data:
                data = os.pread(self._descriptor, size - got, position + got)
                parts.append(data)
                got += len(data)
            return b"".join(parts)
        except OSError as failure:
            failure.filename = self.path
            raise

    def _pread_cached(self, size: int, position: int) -> bytes:
        """Return what `pread` returns, without waiting for the disk. Raises NotCachedError."""
        data = bytearray(size)
        got = 0
        try:
            while got < size:
                more = os.preadv(
                    self._descriptor, [memoryview(data)[got:]], position + got, os.RWF_NOWAIT
                )
                if not more:  # the file's end
                    break
                got += more
        except BlockingIOError:
            raise NotCachedError(f"{self.path}: byte {position + got} is not in memory") from None
        except OSError as failure:
            if failure.errno not in _UNSUPPORTED:
                failure.filename = self.path
                raise
            return self._pread_resident(size, position)
        return bytes(data[:got] if got < size else data)

    def _pread_resident(self, size: int, position: int) -> bytes:
        """Do the same on a file system, such as tmpfs, that cannot read without waiting."""
        with _named(self.path):
            end = min(position + size, os.fstat(self._descriptor).st_size)
            start = position - position % mmap.ALLOCATIONGRANULARITY
            if end > position:
                view = memoryview(
                    mmap.mmap(self._descriptor, end - start, prot=mmap.PROT_READ, offset=start)
                )
                if not is_cached(view, position - start, end - start):
                    raise NotCachedError(f"{self.path}: bytes at {position} are not in memory")
            return os.pread(self._descriptor, size, position)

    def pwrite(self, data: Bytes, position: int) -> None:
        """Write all of `data` at `position`."""
        try:
            wanted = len(data)
            written = os.pwrite(self._descriptor, data, position)
            if written < wanted:
                rest = memoryview(data)
                while written < wanted:
                    written += os.pwrite(self._descriptor, rest[written:], position + written)
        except OSError as failure:
            failure.filename = self.path
            raise
        if position + wanted > self.size:
            self.size = position + wanted

    def allocate(self, size: int) -> None:
        """Reserve room for `size` bytes; the length becomes at least `size`.

        Raises StoreFullError if there is not enough room.
        """
        try:
            os.posix_fallocate(self._descriptor, 0, size)
        except OSError as failure:
            if failure.errno in NO_ROOM:
                raise StoreFullError(
                    f"{self.path}: no room for {size} bytes; free space on its file system"
                ) from failure
            failure.filename = self.path
            raise
        self.size = max(self.size, size)

    def zero(self, position: int, size: int) -> None:
        """Make the range read as zeros; only data extents are written, holes are zeros already."""
        with _named(self.path):
            for start, end in self._data_extents(position, min(position + size, self.size)):
                if not _zero_range(self._descriptor, start, end - start):
                    for at in range(start, end, len(_ZEROS)):
                        self.pwrite(_ZEROS[: min(len(_ZEROS), end - at)], at)

    def is_zero(self, position: int, size: int) -> bool:
        """Whether the range reads as zeros; False too if more than _LOOK_BYTES of it are data.

        And if it cannot be read: whoever asks zeroes it then, which a bad sector may bear.
        """
        left = _LOOK_BYTES
        with _named(self.path):
            for start, end in self._data_extents(position, min(position + size, self.size)):
                left -= end - start
                try:
                    if left < 0 or self.pread(end - start, start).strip(b"\0"):
                        return False
                except OSError as failure:
                    if failure.errno != errno.EIO:
                        raise
                    return False
        return True

    def truncate(self, size: int) -> None:
        """Set the length."""
        with _named(self.path):
            os.ftruncate(self._descriptor, size)
        self.size = size

    def sync(self) -> None:
        """Return once everything written, and the length, is on the disk (fdatasync)."""
        with _named(self.path):
            os.fdatasync(self._descriptor)
        SYNCS.add()

    def map(self, *, writable: bool = False) -> mmap.mmap:
        """Map the whole file, shared."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with _named(self.path):
            return mmap.mmap(self._descriptor, 0, flags=mmap.MAP_SHARED, prot=access)

    def __del__(self) -> None:
        # The last reference closes the file. A FileRange holds one, so its descriptor's number
        # cannot be reused for another file while the range is in use.
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def _data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            try:
                start = os.lseek(self._descriptor, start, os.SEEK_DATA)
            except OSError as failure:
                if failure.errno == errno.ENXIO:  # a hole up to the end of the file
                    return
                raise
            if start >= end:
                return
            stop = min(os.lseek(self._descriptor, start, os.SEEK_HOLE), end)
            yield start, stop
            start = stop


class _LockFile(RealFile):
    """A locked file; closing it gives the lock back."""

    def __init__(self, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        status = os.fstat(descriptor)
        self.key = (status.st_dev, status.st_ino)
        self.absolute = os.path.abspath(path)

    def close(self) -> None:
        """Give the lock back, once: a later lock of the same file has the same key."""
        with _locks_guard:
            if self._descriptor >= 0:
                super().close()
                _locks_held.pop(self.key, None)


_locks_guard = threading.RLock()  # the garbage collector may close a lock while it is held
_locks_held: dict[tuple[int, int], str] = {}  # (device, inode) of a lock file: its path


def _check_locks(path: str) -> None:
    """Raise FileNotFoundError if `path` is in or below a directory whose lock is not there."""
    with _locks_guard:
        for key, lock in _locks_held.copy().items():  # the garbage collector may take one out
            directory = os.path.dirname(lock)
            if path != directory and not path.startswith(f"{directory.rstrip('/')}/"):
                continue
            try:
                status = os.stat(lock)
            except (FileNotFoundError, NotADirectoryError):
                status = None
            if status is None or (status.st_dev, status.st_ino) != key:
                raise FileNotFoundError(
                    errno.ENOENT, f"{directory} was moved, replaced or removed while in use", path
                )


def _device_of(path: str) -> int:
    """Return the device of a path, or of the nearest folder above it that is there."""
    while True:
        try:
            return os.stat(path).st_dev
        except FileNotFoundError:
            path = os.path.dirname(os.path.abspath(path))


class RealFileSystem(FileSystem):
    """The real file system. What it makes is open to nobody but its owner, whatever the umask."""

    file_mode = 0o600
    folder_mode = 0o700

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open a file."""
        flags = (os.O_RDWR if writable else os.O_RDONLY) | (_MAKE if create else 0)
        with _no_link(path) if create else contextlib.nullcontext():
            return RealFile(path, os.open(path, flags | os.O_CLOEXEC, self.file_mode))

    def create_new(self, path: str) -> File:
        """Make and open a file, which belongs to its folder's owner if root makes it.

        So a node that runs as another user can read what a command of root's leaves for it.
        """
        made = os.open(path, os.O_RDWR | _MAKE | os.O_EXCL | os.O_CLOEXEC, self.file_mode)
        try:
            if os.geteuid() == 0:
                folder = os.stat(os.path.dirname(path) or ".")
                with contextlib.suppress(OSError):  # root of a container, or of NFS, may not
                    os.fchown(made, folder.st_uid, folder.st_gid)
            file = self.open(path)
            if os.path.sameopenfile(made, file.fileno()):
                return file
            file.close()
            raise FileExistsError(errno.EEXIST, "replaced by another program", path)
        finally:
            os.close(made)

    def exists(self, path: str) -> bool:
        """Tell whether the path names anything."""
        return os.path.lexists(path)

    def is_dir(self, path: str) -> bool:
        """Tell whether the path names a directory."""
        return os.path.isdir(path)

    def mount_id(self, path: str) -> str:
        """Return the number of the kernel's object for the mounted file system; see FileSystem.

        That is the inode of /sys/fs/TYPE/DEVICE: no two objects of a boot share one. Mount
        namespaces and bind mounts, as of containers and services, share the file system's pages and
        that object. ext4, xfs and f2fs have one; of others "" is returned.
        """
        try:
            device = _device_of(path)
            number = f"{os.major(device)}:{os.minor(device)}"
            name = os.path.basename(os.readlink(f"/sys/dev/block/{number}"))
            for kind in _KINDS_WITH_OBJECT:
                with contextlib.suppress(FileNotFoundError):
                    return f"{kind}/{name} {os.stat(f'/sys/fs/{kind}/{name}').st_ino}"
        except OSError as failure:  # no block device, or no sysfs
            log.debug("the mount of %s is not known: %s", path, failure)
        return ""

    def list_dir(self, path: str) -> list[str]:
        """Return the sorted names in a directory."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        """Make the directory and its parents; each new name is synced unless `sync` is false.

        Raises FileNotFoundError in place of making a directory in which this process holds a lock,
        or one below it, if the lock's file is not there: somebody has moved, replaced or removed
        the locked directory.
        """
        if os.path.isdir(path):
            return
        absolute = os.path.abspath(path)
        _check_locks(absolute)
        parent = os.path.dirname(absolute)
        self.make_dirs(parent, sync=sync)
        with contextlib.suppress(FileExistsError):  # another thread made it, or it is a file
            os.mkdir(path, self.folder_mode)
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        if sync:
            self.sync_dir(parent)

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing a target file."""
        os.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it."""
        shutil.rmtree(path)

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _named(path):
                os.fsync(descriptor)
            SYNCS.add()
        finally:
            os.close(descriptor)

    def sync_all(self, path: str) -> None:
        """Sync the file system that holds `path`; OSError if a write to any of its files failed."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if LIBC.syncfs(descriptor) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), path)
            SYNCS.add()
        finally:
            os.close(descriptor)

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        """Return all of a small file; reads it in pieces, since /proc refuses one large read."""
        pieces = []
        with open(path, "rb") as file:
            while max_bytes > 0 and (piece := file.read(min(max_bytes, 1 << 16))):
                pieces.append(piece)
                max_bytes -= len(piece)
        return b"".join(pieces)

    def lock(self, path: str) -> File:
        """Lock a file: flock excludes hastore, a record lock of byte 0 excludes RocketMQ.

        Java's FileLock is a record lock. When a process closes any descriptor of a file, the kernel
        drops all record locks that the process holds on that file. So a second attempt in this
        process is refused before it opens the file.
        """
        with _locks_guard:
            if os.path.exists(path):
                status = os.stat(path)
                if (status.st_dev, status.st_ino) in _locks_held:
                    raise StoreInUseError(
                        f"{path}: this process has the store open already; close it first"
                    )
            with _no_link(path):
                descriptor = os.open(path, os.O_RDWR | _MAKE | os.O_CLOEXEC, self.file_mode)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
            except OSError as failure:
                os.close(descriptor)
                if failure.errno in (errno.EAGAIN, errno.EACCES):
                    raise StoreInUseError(
                        f"{path}: another process has the store open; stop it first"
                    ) from failure
                failure.filename = path
                raise
            file = _LockFile(path, descriptor)
            _locks_held[file.key] = file.absolute
            return file

    def is_same_file(self, path: str, file: File) -> bool:
        """Tell whether `path` names the open `file`, without opening it (see `lock`)."""
        try:
            named, opened = os.stat(path), os.fstat(file.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)

    def restrict(self, path: str) -> int | None:
        """Take from other users what a file or folder made now would not give them."""
        # O_PATH: a link is not followed, and the close of another descriptor would drop a lock.
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            mode = os.fstat(descriptor).st_mode
            is_link = stat.S_ISLNK(mode)
            if is_link:
                mode = os.stat(path).st_mode
            allowed = self.folder_mode if stat.S_ISDIR(mode) else self.file_mode
            excess = mode & 0o077 & ~allowed
            if not excess:
                return None
            if is_link:
                raise OSError(errno.ELOOP, "a symbolic link is not followed: use chmod", path)
            with _named(path):
                os.chmod(f"/proc/self/fd/{descriptor}", stat.S_IMODE(mode) & ~excess)
            return stat.S_IMODE(mode)
        finally:
            os.close(descriptor)

    def modified_ms(self, path: str) -> int:
        """Return when the file was written last."""
        return os.stat(path).st_mtime_ns // 1_000_000

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an ordinary user may still allocate on that file system."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def used_bytes(self, path: str) -> int:
        """Return what the files below a directory take on the disk; holes take nothing."""
        blocks = 0
        for folder, _, names in os.walk(path):
            for name in names:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    blocks += os.lstat(f"{folder}/{name}").st_blocks
        return 512 * blocks


class _GroupReadable(RealFileSystem):
    """The same, where users of the owner's group may read."""

    file_mode = 0o640
    folder_mode = 0o750


REAL: FileSystem = RealFileSystem()
GROUP_READABLE: FileSystem = _GroupReadable()  # for a process with umask 027


def shared_as(path: str) -> FileSystem:
    """Return the file system whose new files the owner's group may read if it may read `path`."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_mode & stat.S_IRGRP:
            return GROUP_READABLE
    return REAL


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _zero_range(descriptor: int, position: int, size: int) -> bool:
    """Have the file system zero the range; False if it cannot, as on tmpfs."""
    while LIBC.fallocate(descriptor, _FALLOC_FL_ZERO_RANGE, position, size) != 0:
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


_PAGE = mmap.PAGESIZE
_RESIDENT = 1  # the lowest bit of a page's entry; the others are undefined


def is_cached(view: memoryview, begin: int, end: int) -> bool:
    """Whether all bytes [begin, end) of a mapped file are in the page cache.

    `view` is the whole file, and at least one byte is asked for. Returns False if the kernel does
    not tell. It tells the file's owner, and whoever may write to the file; it would tell others
    that everything is cached.
    """
    import numpy as np  # imported late: a node starts faster without numpy

    first = begin - begin % _PAGE
    pages = (end - first + _PAGE - 1) // _PAGE
    found = np.empty(pages, np.uint8)
    address = np.frombuffer(view, np.uint8).ctypes.data + first
    if LIBC.mincore(address, end - first, found.ctypes.data) != 0:
        return False
    return bool((found & _RESIDENT).all())


@contextlib.contextmanager
def _final() -> Iterator[None]:
    """Turn the OSError of a failed sync into SyncFailedError.

    The kernel may have dropped the pages, so no retry helps. If a file is missing or no descriptor
    is free, no sync was begun, and the error is raised as it is.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as failure:
        if failure.errno in NO_DESCRIPTOR:
            raise
        raise SyncFailedError(f"a sync failed: {failure}") from failure


def sync_files(fs: FileSystem, paths: Iterable[str], directories: Iterable[str]) -> None:
    """Sync files, then directories; skips those that were removed meanwhile.

    Raises SyncFailedError if a sync failed: pages may be lost. Raises OSError if a file could not
    be opened or no descriptor was free: nothing is lost, and the caller may try again.
    """
    for path in sorted(paths):
        with (
            contextlib.suppress(FileNotFoundError),
            contextlib.closing(fs.open(path)) as file,
            _final(),
        ):
            file.sync()
    for directory in sorted(directories):
        with contextlib.suppress(FileNotFoundError), _final():
            fs.sync_dir(directory)


def sync_all(fs: FileSystem, directory: str) -> None:
    """Sync the file system that holds a directory; raises as `sync_files` does."""
    with _final():
        fs.sync_all(directory)


def read_or_empty(fs: FileSystem, path: str, max_bytes: int = 1 << 26) -> bytes:
    """Return a file's content, at most `max_bytes`; b"" if there is no file. Raises OSError."""
    return fs.read_bytes(path, max_bytes) if fs.exists(path) else b""


def size_of(fs: FileSystem, path: str) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    with contextlib.closing(fs.open(path, writable=False)) as file:
        return file.size


def read_range(fs: FileSystem, path: str, size: int, position: int) -> bytes:
    """Return up to `size` bytes of a file, which is opened for this read. Raises OSError."""
    with contextlib.closing(fs.open(path, writable=False)) as file:
        return file.pread(size, position)


_DIGITS = 20


def file_name(first_byte: int) -> str:
    """Return the name of the file that begins with byte number `first_byte` of a log or queue."""
    return f"{first_byte:0{_DIGITS}d}"


def is_file_name(name: str) -> bool:
    """Whether a directory entry is named like a log or queue file."""
    return len(name) == _DIGITS and name.isascii() and name.isdigit()
