"""One file of the commit log: written by pwrite, read by pread or through a shared map."""

import threading
from dataclasses import dataclass, field

from hastore.errors import StoreError
from hastore.fs.filesystem import File, FileSystem


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
                raise StoreError(f"{self.path} cannot be opened: {failure}") from failure
        opened[0].pwrite(data, offset - self.start)

    def range(self, offset: int, size: int) -> FileRange:
        """Return `size` bytes from an offset of the log as a range of the descriptor."""
        file = self.file
        return FileRange(file.fileno(), offset - self.start, size, file)

    def sync(self) -> None:
        """Return once the bytes are on the disk."""
        self.file.sync()

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
