"""The files of a log: contiguous, of one size, named by their start offset, read through maps.

A file is written by pwrite, and read by pread or through a shared map. The log's lock guards
changes: adding at the end, detaching at the beginning, and cuts. Readers take no lock: `files` is a
tuple that is replaced as a whole.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hastore.errors import StoreBrokenError, StoreError
from hastore.fs.filesystem import File, FileSystem, file_name, is_file_name
from hastore.shares import descriptor_shares

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of an open file, for sendfile and splice; it keeps the file open while it lives."""

    fd: int
    position: int
    size: int
    keep: object = field(default=None, repr=False, compare=False)


class MappedFile:
    """A file of a fixed size that begins at offset `start` of its log; opened on first use.

    Nothing is ever written through the map: on a full disk such a write ends the process by SIGBUS.
    `release` and `remove` close nothing: they drop this object's references. A thread that holds a
    pin, a view or a FileRange can still read the old bytes. When the last reference is dropped, map
    and descriptor are closed.

    Any thread may read, open and release; writers hold the log's lock.
    """

    def __init__(self, fs: FileSystem, path: str, start: int, size: int) -> None:
        self.path = path
        self.start = start
        self.end = start + size
        self.size = size
        self._fs = fs
        self._guard = threading.Lock()
        self.opened: tuple[File, memoryview] | None = None  # descriptor and map; None: closed

    @property
    def is_open(self) -> bool:
        """Whether a descriptor and a map are held."""
        return self.opened is not None

    def pin(self) -> tuple[File, memoryview]:
        """Return file and map, valid while held, even after the file's removal. Raises OSError."""
        return self.opened or self._open()

    @property
    def file(self) -> File:
        """Return the open file."""
        return self._open()[0]

    @property
    def view(self) -> memoryview:
        """Return the whole file as read-only memory, coherent with every write."""
        opened = self.opened
        return opened[1] if opened is not None else self._open()[1]

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write at an offset of the log; the bytes must fit. Not durable before `sync`.

        Raises StoreError if the file cannot be opened: nothing is written then. Raises OSError if
        the write fails: a part of the bytes may be written.
        """
        opened = self.opened
        if opened is None:
            try:
                opened = self._open()
            except OSError as failure:
                raise StoreError(
                    f"{self.path} cannot be opened: {failure}; check the store's disk, and the"
                    " limit of open files"
                ) from failure
        opened[0].pwrite(data, offset - self.start)

    def range(self, offset: int, size: int) -> FileRange:
        """Return `size` bytes from an offset of the log as a range of the descriptor."""
        file = self.file
        return FileRange(file.fileno(), offset - self.start, size, file)

    def sync(self) -> None:
        """Return once the bytes are on the disk; a file that was closed is closed again.

        Otherwise a sync of many files would leave all of them open. Raises OSError.
        """
        opened = self.opened
        if opened is not None:
            opened[0].sync()
        else:
            with contextlib.closing(self._fs.open(self.path)) as file:
                file.sync()

    def modified_ms(self) -> int:
        """Return when the file was written last, by this host's clock. Raises OSError."""
        return self._fs.modified_ms(self.path)

    def release(self) -> None:
        """Drop descriptor and map; they are opened again on the next use."""
        with self._guard:
            self.opened = None

    def remove(self) -> None:
        """Remove the file; its name is gone durably after `sync_dir`."""
        self._fs.remove(self.path)
        self.release()  # last, so that no reader opens the file again before it is removed

    def _open(self) -> tuple[File, memoryview]:
        with self._guard:
            if self.opened is None:
                file = self._fs.open(self.path)
                self.opened = (file, memoryview(file.map()))
            return self.opened


class MappedFileQueue:
    """A directory of log files.

    Callers hold the log's lock for a change, except for `discard` and `release`.
    """

    def __init__(
        self, fs: FileSystem, directory: str, file_size: int, source: str | None = None
    ) -> None:
        """Prepare; `source` is the directory that new files are renamed from."""
        self.directory = directory
        self.file_size = file_size
        self.files: tuple[MappedFile, ...] = ()
        self._source = source
        self._detached: list[MappedFile] = []  # files to remove, the oldest first
        self._names_added = 0  # a count, so that a sync knows which names it covers
        self._names_synced = 0
        self._fs = fs
        self._opened: list[MappedFile] = []
        self._open_max = 0  # set at first use: by then the node has raised its descriptor limit
        self._opened_guard = threading.Lock()

    @property
    def start(self) -> int:
        """Return the offset at which the first file begins; 0 without files."""
        return self.files[0].start if self.files else 0

    @property
    def end(self) -> int:
        """Return the offset at which the last file ends; 0 without files."""
        return self.files[-1].end if self.files else 0

    def load(self, expected_size: int | None = None) -> None:
        """Read the directory.

        Raises StoreBrokenError for a gap between files, StoreError for a file of a wrong size,
        and OSError.

        `expected_size` is the file size on the limits page. If the configured size is the same, but
        the last file is shorter, that file was damaged: it is filled up with zeros, and recovery
        finds the log's end. Any other file of a wrong size raises StoreError: the configured size
        may be the wrong one, and only the operator can tell.
        """
        found: list[MappedFile] = []
        names = [name for name in self._fs.list_dir(self.directory) if is_file_name(name)]
        for name in names:
            path = f"{self.directory}/{name}"
            file = self._fs.open(path)
            size = file.size
            if size < self.file_size and name == names[-1] and expected_size == self.file_size:
                log.error("%s was cut off: %d bytes of %d are left", path, size, self.file_size)
                file.allocate(self.file_size)
                size = self.file_size
            file.close()
            if size != self.file_size:
                raise StoreError(
                    f"{path} has {size} bytes but store.commitlog_file_size is {self.file_size}:"
                    " set the key to the size with which the store was created, or restore the"
                    " file"
                )
            start = int(name)
            if found and start != found[-1].end:
                raise StoreBrokenError(
                    f"{self.directory}: bytes [{found[-1].end}, {start}) are missing, no file holds"
                    " them: restore them from a backup, or move the store away and let the node"
                    " start empty, in mode classic under a new node number: it then copies the log"
                    " from its master or leader"
                )
            found.append(MappedFile(self._fs, path, start, self.file_size))
        self.files = tuple(found)

    def find(self, offset: int) -> MappedFile | None:
        """Return the file that holds `offset`; None if there is none."""
        files = self.files
        if not files:
            return None
        index = (offset - files[0].start) // self.file_size
        if not 0 <= index < len(files):
            return None
        found = files[index]
        if found.opened is None:
            self._note_opened(found)
        return found

    def one_by_one(self) -> Iterator[MappedFile]:
        """Yield each file, and close it before the next: who looks at all of them opens only one.

        A log of small files may have more of them than the process may open.
        """
        for file in self.files:
            try:
                yield file
            finally:
                file.release()

    def add(self, start: int, take: Callable[[str], None]) -> MappedFile:
        """Add the file at `start`, which `take(path)` moves to `path`. Its name is not synced."""
        if self.files and start != self.end:
            raise StoreBrokenError(f"a file at {start} would leave a gap after {self.end}")
        path = f"{self.directory}/{file_name(start)}"
        take(path)
        added = MappedFile(self._fs, path, start, self.file_size)
        self.note_names()
        self.files = (*self.files, added)
        self._note_opened(added)
        return added

    def detach_first(self, count: int) -> None:
        """Take the oldest files out of the log; `discard` removes them from the disk."""
        self._detached += self.files[:count]
        self.files = self.files[count:]

    def discard(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Remove the detached files, each durably before the next, so that no crash leaves a gap.

        Calls must not overlap; the log's lock is not needed. After an OSError, or when `stop()` is
        true, some files are left: the next call removes them.
        """
        while self._detached and not stop():
            with contextlib.suppress(FileNotFoundError):  # an operator removed it
                self._detached[0].remove()
            self.sync_names()
            del self._detached[0]

    def forget(self) -> None:
        """Forget all files, after they were moved away."""
        self.files = ()
        self._detached.clear()

    def remove_from(self, start: int) -> None:
        """Remove the files from `start` on, newest first, each durably before the next."""
        while self.files and self.files[-1].start >= start:
            gone, self.files = self.files[-1], self.files[:-1]
            gone.remove()
            self.sync_names()

    def note_names(self) -> None:
        """Remember that names may not be durable, so that the next `sync` syncs the directories."""
        self._names_added += 1

    def sync_names(self) -> None:
        """Sync the directory of the files, and the one that they were renamed from.

        Any thread may call this.
        """
        added = self._names_added
        self._fs.sync_dir(self.directory)
        if added > self._names_synced:
            if self._source is not None:
                self._fs.sync_dir(self._source)
            self._names_synced = added  # last, so that no thread relies on an unfinished sync

    def sync(self, start: int, end: int) -> None:
        """Make the bytes [start, end) durable, and the files' names. Raises OSError."""
        if self._names_added > self._names_synced:
            self.sync_names()
        for file in self.files:
            if file.start < end and file.end > start:
                file.sync()

    def release(self) -> None:
        """Drop all maps and descriptors; the next use opens them again."""
        for file in self.files:
            file.release()

    def _note_opened(self, file: MappedFile) -> None:
        with self._opened_guard:
            self._opened.append(file)
            if not self._open_max:
                self._open_max = descriptor_shares().log_files
            if len(self._opened) > self._open_max:  # they are opened again on use
                self._opened.pop(0).release()
