"""The interface between the store and the file system.

`filesystem.py` implements it for the real file system; tests pass implementations that inject
failures.

Durability: `File.sync` covers the bytes of a file, `FileSystem.sync_dir` covers names (creation,
rename and removal). A caller that needs both calls both. `replace_bytes` does both by itself.
"""

import contextlib
import errno
import mmap
import os
from typing import Protocol

Bytes = bytes | bytearray | memoryview | mmap.mmap
_COPY_BYTES = 1 << 20


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
        a name is made and removed first. It is that of a directory: RocketMQ ignores one.
        """
        probe = f"{path}/.renewed"
        self.make_dirs(probe, sync=False)
        self.remove_tree(probe)
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
        """
        temporary = f"{path}.tmp"
        try:
            with contextlib.closing(self._fresh(temporary)) as file:
                file.pwrite(data, 0)
                file.sync()
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):  # the first failure says more
                self.remove(temporary)
            raise
        self.sync_dir(os.path.dirname(os.path.abspath(path)))

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

        Returns the mode before; None if nothing had to change, and always in memory. A symbolic
        link is left alone. Raises OSError, PermissionError if another user owns it.
        """
        del path
        return None

    def modified_ms(self, path: str) -> int:
        """Return when a file was written last, in ms since 1970, by the clock of this host."""

    def free_bytes(self, path: str) -> int:
        """Return the bytes that an ordinary user may still allocate on that file system."""

    def used_bytes(self, path: str) -> int:
        """Return what a directory and all in it take on the disk; 0 without it."""
