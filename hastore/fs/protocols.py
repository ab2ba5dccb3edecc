"""The interface between the store and the file system.

`filesystem.py` implements it for the real file system; tests pass implementations that inject
failures.

Durability: `File.sync` covers the bytes of a file, `FileSystem.sync_dir` covers names (creation,
rename and removal). A caller that needs both calls both. `replace_bytes` does both by itself.

The reserve: a full disk must not keep a node from noting what it has to note, above all before it
removes something to make room. So files with room, but without content, lie in `reserve/` beside
the small files of a store, and `replace_bytes` writes into one of them if it finds no room.
"""

import contextlib
import errno
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from hastore.errors import StoreFullError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
Bytes = bytes | bytearray | memoryview | mmap.mmap
_COPY_BYTES = 1 << 20
_RESERVE = "reserve"
_BLOCK = 4096
# Another thread took it, or the file goes to another disk, or to another quota of the same one.
_NOT_TO_BE_MOVED = frozenset({errno.ENOENT, errno.EXDEV})
_DIGITS = 12  # of a size in the name of a file in the reserve, SIZE.NUMBER


class File(Protocol):
    """An open file; all positions and sizes are bytes. Methods may be called from any thread."""

    path: str
    size: int

    def fileno(self) -> int:
        """Return the descriptor, for sendfile and splice."""

    def pread(self, size: int, position: int) -> bytes:
        """Return up to `size` bytes from `position`; fewer only at the end of the file."""

    def pwrite(self, data: Bytes, position: int) -> None:
        """Write all of `data` at `position` or raise OSError; not durable before `sync`."""

    def allocate(self, size: int) -> None:
        """Reserve room for `size` bytes, so that no write within them fails for lack of room.

        Raises StoreFullError if there is not enough.
        """

    def zero(self, position: int, size: int) -> None:
        """Make the range read as zeros; holes stay holes. Not durable before `sync`."""

    def is_zero(self, position: int, size: int) -> bool:
        """Whether the range reads as zeros, as far as a short look tells."""

    def truncate(self, size: int) -> None:
        """Set the length to `size` bytes."""

    def sync(self) -> None:
        """Return once everything written is on the disk.

        A failed sync must not be retried: the kernel may have dropped the pages.
        """

    def map(self, *, writable: bool = False) -> mmap.mmap:
        """Map the whole file, shared: the map shows later writes of every process."""

    def close(self) -> None:
        """Close the descriptor, which also releases a lock; a second call does nothing."""


class FileSystem(Protocol):
    """Names and directories; all paths are strings. `copy` and `replace_bytes` use the others."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        """Open a file; `create` makes it if it is absent (the name is durable after `sync_dir`).

        A file that is made here is private from its birth. With `create` the path must not be a
        symbolic link: who planted it would choose what is written.
        """

    def create_new(self, path: str) -> File:
        """Make and open a file. Raises FileExistsError if the path names anything, a link too."""
        if self.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        return self.open(path, create=True)

    def exists(self, path: str) -> bool:
        """Tell whether the path names anything."""

    def is_dir(self, path: str) -> bool:
        """Tell whether the path names a directory."""

    def mount_id(self, path: str) -> str:
        """Return what tells this mount of the file system of `path` from earlier ones in this boot.

        "": that is not known. What was written, but not synced, goes with the page cache of a file
        system that the kernel has shut down, though the machine runs on. `path` need not exist.
        """
        del path
        return ""

    def list_dir(self, path: str) -> list[str]:
        """Return the names in a directory, sorted; empty when there is no such directory."""

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        """Make the directory and its parents, durably if `sync`; each is private from its birth."""

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing a target file; durable after `sync_dir` of both directories."""

    def remove(self, path: str) -> None:
        """Remove a file; durable after `sync_dir`."""

    def remove_tree(self, path: str) -> None:
        """Remove a directory and everything in it; durable after `sync_dir` of its parent."""

    def copy(self, source: str, target: str) -> None:
        """Copy the bytes of a file and sync them; the name is durable after `sync_dir`."""
        with (
            contextlib.closing(self.open(source, writable=False)) as origin,
            contextlib.closing(self.open(target, create=True)) as copy,
        ):
            copy.truncate(0)
            position = 0
            while data := origin.pread(_COPY_BYTES, position):
                copy.pwrite(data, position)
                position += len(data)
            copy.sync()

    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    def renew_names(self, path: str) -> None:
        """Make the names in a directory durable, even if an earlier sync of it has failed.

        After that the kernel may count the directory as written, and a sync alone says success. So
        a name is made and removed first. It is that of a directory: RocketMQ ignores one. A full
        disk may have no room for it; then a file of the reserve has that name for a moment.
        """
        probe = f"{path}/.renewed"
        if self.exists(probe) and not self.is_dir(probe):  # a crash came in that moment
            self.remove(probe)
        try:
            self.make_dirs(probe, sync=False)
            self.remove_tree(probe)
        except OSError as failure:
            taken = self._take_reserve(probe, probe, 0) if failure.errno in NO_ROOM else None
            if taken is None:
                raise
            self.rename(probe, taken)
        self.sync_dir(path)

    def sync_all(self, path: str) -> None:
        """Make all writes and names durable on the file system that holds `path`."""

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        """Return all of a small file, or its first `max_bytes` bytes."""

    def replace_bytes(self, path: str, data: bytes) -> None:
        """Replace a file's content by `data`, atomically and durably.

        The content is written to `<path>.tmp`. Its name can be guessed, so what is there already is
        removed and never opened: the rest of a crash, or a link that another user has planted. Two
        writers of one file must exclude each other. After a failure no temporary file is left.
        On a full disk the reserve is used, if it has a file that is large enough.
        """
        temporary, taken = f"{path}.tmp", None
        try:
            try:
                _write_whole(self._fresh(temporary), data)
            except OSError as failure:
                if failure.errno not in NO_ROOM:
                    raise
                taken = self._take_reserve(path, temporary, len(data))
                if taken is None:
                    raise
                _write_whole(self.open(temporary), data)
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):  # the first failure says more
                self.remove(temporary)
            raise
        self.sync_dir(os.path.dirname(os.path.abspath(path)))
        if taken is not None:
            # The old content was as large, in general: its room is taken before others take it.
            with contextlib.suppress(OSError, StoreFullError):  # `keep_reserve` tries again
                self._reserve(taken)

    def keep_reserve(self, folder: str, sizes: Sequence[int]) -> None:
        """Have a file with room for each of `sizes` in the reserve of a folder; one thread.

        Sizes are rounded up to powers of two. Raises StoreFullError if there is no room, OSError.
        """
        place = f"{folder}/{_RESERVE}"
        self.make_dirs(place)
        present: list[tuple[int, str]] = []
        for name in self.list_dir(place):
            size = self._reserved(f"{place}/{name}")
            if size is not None:
                present.append((size, name))
            else:  # a crash interrupted its making
                with contextlib.suppress(FileNotFoundError):  # another thread took it
                    self.remove(f"{place}/{name}")
        wanted = Counter(max(_BLOCK, 1 << (size - 1).bit_length()) for size in sizes)
        surplus = Counter(size for size, _ in present) - wanted
        taken = {name for _, name in present}
        for size in sorted((wanted - Counter(size for size, _ in present)).elements()):
            names = (f"{size:0{_DIGITS}d}.{number}" for number in range(len(taken) + 1))
            name = next(name for name in names if name not in taken)
            with contextlib.suppress(FileExistsError):  # another thread has put it back
                self._reserve(f"{place}/{name}")
            self.sync_dir(place)
            taken.add(name)
        for size, name in present:  # those that have become too small or too large
            if surplus[size] > 0:
                surplus[size] -= 1
                with contextlib.suppress(FileNotFoundError):  # another thread took it
                    self.remove(f"{place}/{name}")

    def _reserve(self, path: str) -> None:
        """Make the file of the reserve whose name says its size. Raises FileExistsError."""
        file = self.create_new(path)
        try:
            with contextlib.closing(file):
                file.allocate(_reserved_bytes(os.path.basename(path)) or _BLOCK)
                file.sync()
        except (OSError, StoreFullError):
            with contextlib.suppress(OSError):
                self.remove(path)
            raise

    def _reserved(self, path: str) -> int | None:
        """Return the room of a file in the reserve; None if it has not what its name says."""
        size = _reserved_bytes(os.path.basename(path))
        if size is not None:
            with (
                contextlib.suppress(FileNotFoundError),  # another thread took it
                contextlib.closing(self.open(path, writable=False)) as file,
            ):
                return size if file.size == size else None
        return None

    def _take_reserve(self, path: str, target: str, size: int) -> str | None:
        """Move the smallest file that suffices from the reserve to `target`; return its old path.

        Returns None if there is none. Its room cannot go to others meanwhile.
        """
        for place in _reserves(path):
            for name in self.list_dir(place):  # the smallest first
                # A crash may have left one without room.
                if (_reserved_bytes(name) or -1) < size or not self._reserved(f"{place}/{name}"):
                    continue
                with contextlib.suppress(FileNotFoundError):  # what there was no room for
                    self.remove(target)
                try:
                    self.rename(f"{place}/{name}", target)
                except OSError as failure:
                    if failure.errno not in _NOT_TO_BE_MOVED:
                        raise
                    continue
                self.sync_dir(place)  # a power loss must not leave it under both names
                return f"{place}/{name}"
        return None

    def _fresh(self, path: str) -> File:
        try:
            return self.create_new(path)
        except FileExistsError:
            self.remove(path)
        return self.create_new(path)

    def lock(self, path: str) -> File:
        """Lock a file for this process, until the returned file is closed.

        Raises StoreInUseError if another process, or this one, holds the lock.
        """

    def is_same_file(self, path: str, file: File) -> bool:
        """Tell whether `path` names the open `file`; False if it names nothing."""

    def restrict(self, path: str) -> int | None:
        """Take from other users what a file or folder made now would not give them.

        Returns the mode before; None if nothing had to change, and always in memory. Raises OSError
        for a symbolic link to what is open, PermissionError if another user owns it.
        """
        del path
        return None

    def modified_ms(self, path: str) -> int:
        """Return when a file was written last, in ms since 1970, by the clock of this host."""

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an ordinary user may still allocate on that file system."""

    def used_bytes(self, path: str) -> int:
        """Return what a directory and all in it take on the disk; 0 without it."""


def _write_whole(file: File, data: bytes) -> None:
    with contextlib.closing(file):
        file.pwrite(data, 0)
        if file.size > len(data):  # it comes from the reserve
            file.truncate(len(data))
        file.sync()


def _reserved_bytes(name: str) -> int | None:
    """Return the size that the name of a file in the reserve says; None if it is another name."""
    size, _, number = name.partition(".")
    whole = len(size) == _DIGITS and (size + number).isascii() and (size + number).isdigit()
    return int(size) if whole and number else None


def _reserves(path: str) -> Iterator[str]:
    """The reserves for a file: that of its folder, and of the store whose root is above it."""
    folder = os.path.dirname(os.path.abspath(path))
    yield f"{folder}/{_RESERVE}"
    for _ in range(3):  # <root>/abort, <root>/dledger-n1/currterm, <root>/dledger-n1/data/...
        yield f"{folder}/hastore/{_RESERVE}"
        folder = os.path.dirname(folder)
