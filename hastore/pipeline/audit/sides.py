"""The two sides of an audit: what each can compare, and the bytes and digests of its log.

A side is a store's folder (`FolderSide`: hastore's or RocketMQ's, in use or not) or a running node
(node_side.py). `Extent` is plain data, which travels to the tasks; `open_side` (task.py) opens the
side there.

Digests read a folder's files through maps, in pieces of PIECE_BYTES. MADV_POPULATE_READ maps a
piece's pages first: a page that the disk cannot read is then an error with a name, and not a SIGBUS
that ends the process.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from hastore.errors import StoreError
from hastore.fs.filesystem import REAL
from hastore.record.hashes import new_digest
from hastore.store.offline.log_files import LogFile, LogFiles
from hastore.store.state.limits import read_limits

RANGE_BYTES = 16 * 1024 * 1024  # of one digest; ranges end at multiples of it
READ_BYTES = 1024 * 1024  # of one read

FOLDER = "hastore store"
ROCKETMQ = "RocketMQ store"
NODE = "node"

Epochs = tuple[tuple[int, int], ...]  # (epoch, start offset), both rising


@dataclass(frozen=True)
class Extent:
    """What a side has when the audit begins. All offsets are bytes of the log."""

    where: str  # the folder's path, or tcp://HOST:PORT
    kind: str
    min_offset: int
    end_offset: int  # compared up to here
    end_is: str  # what `end_offset` is: "confirmed offset", "readable offset", "last whole record"
    max_offset: int  # the end of its log, as far as it is known; at least `end_offset`
    file_size: int | None = None  # of a log file; None: not known
    epochs: Epochs = ()  # a node's history


@dataclass(frozen=True)
class Missing:
    """A side does not have a range (any more)."""

    where: str
    min_offset: int
    end_offset: int
    why: str = ""

    def reason(self, start: int) -> str:
        """Return why the range that begins at `start` is missing, as text for people."""
        if self.why:
            return self.why
        if start < self.min_offset:
            return f"{self.where} removed it by retention: its log begins at {self.min_offset} now"
        return f"{self.where} was cut or restarted: its log is readable up to {self.end_offset} now"


class Side(Protocol):
    """One side, open; used by one thread. Ranges have at most RANGE_BYTES."""

    where: str

    def begin(self, start: int, end: int) -> None:
        """Ask for the digest of a range; `finish` returns it, in the order of the calls."""
        ...

    def finish(self) -> bytes | Missing:
        """Return the digest of the oldest range that was begun. Raises HastoreError."""
        ...

    def read(self, start: int, end: int) -> bytes | Missing:
        """Return the bytes of a range. Raises HastoreError. No digest may be under way."""
        ...

    def lost(self, start: int, end: int) -> Missing | None:
        """Return how a cut has changed a range since the audit began; None if none has."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def covering(history: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return the (epoch, start offset) entries that cover [start, end), as a node states them."""
    first = 0
    for epoch, begin in history:
        if begin > start:
            break
        first = epoch
    return [(first, start), *((epoch, at) for epoch, at in history if start < at < end)]


# -- a folder

PIECE_BYTES = 2 * 1024 * 1024
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14; Python has no name for it
_PAGE = mmap.PAGESIZE


def folder_extent(path: str) -> Extent:
    """Look at a store's folder. Raises StoreError if it has no log, or is none."""
    root = os.path.abspath(path)
    files = open_folder(path)
    try:
        found = files.list()
        first, last = (found[0].start, found[-1].end) if found else (0, 0)
        size = found[0].size if found else None
        limits = read_limits(REAL, root)
        if limits is None:
            end = _last_end(files)
            return Extent(root, ROCKETMQ, first, end, "last whole record", end, size)
        begin = max(first, limits.first_offset)
        end = max(begin, min(limits.readable_offset, last))
        known = max(end, min(limits.record_end, last))
        return Extent(root, FOLDER, begin, end, "readable offset", known, size)
    finally:
        files.close()


def open_folder(path: str) -> LogFiles:
    """Open a folder's log. Raises StoreError if there is no folder, or none in it."""
    root = os.path.abspath(path)
    if not os.path.isdir(root):
        raise StoreError(f"{path}: no such folder; give a store's folder, or tcp://HOST:PORT")
    return LogFiles(root)


def _are_equal(one: memoryview, other: memoryview) -> bool:
    """Whether two views have the same bytes; eight bytes at a time."""
    import numpy as np

    size = len(one) - len(one) % 8
    with one[:size] as left, other[:size] as right:
        same = np.array_equal(np.frombuffer(left, np.uint64), np.frombuffer(right, np.uint64))
    return same and one[size:] == other[size:]


def _last_end(files: LogFiles) -> int:
    """Return the end of the last whole record, beyond any damage: damage is to be compared."""
    end = files.whole_end()
    while True:
        later = None
        for file in files.list():
            if file.end > end and later is None:
                later = files.find_record(file, max(end + 1, file.start))
                where = file
        if later is None:
            return end
        end = files.scan(where, later)


class FolderSide:
    """The log files of a folder."""

    def __init__(self, extent: Extent, algorithm: str) -> None:
        self.where = extent.where
        self._extent = extent
        self._algorithm = algorithm
        self._files = LogFiles(extent.where)
        self._begun: deque[tuple[int, int]] = deque()
        self._maps: dict[int, mmap.mmap] = {}  # the file that was used last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
        self._maps.clear()

    def begin(self, start: int, end: int) -> None:
        """Note a range; `finish` does the work."""
        self._begun.append((start, end))

    def finish(self) -> bytes | Missing:
        """Return the digest of the oldest range that was begun."""
        digest = new_digest(self._algorithm)
        start, end = self._begun.popleft()
        try:
            for piece in self.pieces(start, end):
                with piece:
                    digest.update(piece)
        except FileNotFoundError:
            return self._missing()
        return digest.digest()

    def digest_beside(self, other: FolderSide, start: int, end: int) -> bytes | Missing | None:
        """Return the digest of a range whose bytes are equal in `other`; None if they differ.

        Comparing bytes costs a tenth of SHA-256, and shows as surely that its digest is the same.
        """
        digest = new_digest(self._algorithm)
        side = self
        try:
            at = start
            for piece in self.pieces(start, end):
                with piece:
                    digest.update(piece)
                    place, side = 0, other
                    for beside in other.pieces(at, at + len(piece)):
                        with beside, piece[place : place + len(beside)] as own:
                            place += len(own)
                            if not _are_equal(own, beside):
                                return None
                    at, side = at + len(piece), self
        except FileNotFoundError:
            return side._missing()
        return digest.digest()

    def read(self, start: int, end: int) -> bytes | Missing:
        """Return the bytes of a range."""
        found = bytearray()
        try:
            for piece in self.pieces(start, end):
                with piece:
                    found += piece
        except FileNotFoundError:
            return self._missing()
        return bytes(found)

    def lost(self, start: int, end: int) -> Missing | None:
        """Return how a cut has changed a range; a store of RocketMQ has no such sign."""
        limits = read_limits(REAL, self.where)
        if limits is None or limits.readable_offset >= end:
            return None
        return self._missing()

    def pieces(self, start: int, end: int) -> Iterator[memoryview]:
        """Lend a range in pieces, none of which spans two files. Raises FileNotFoundError."""
        at = start
        while at < end:
            file = self._file_of(at)
            mapped = self._map(file)
            while at < min(end, file.end):
                size = min(end - at, file.end - at, PIECE_BYTES)
                place = at - file.start
                self._populate(file, mapped, place, size)
                with memoryview(mapped) as whole:
                    yield whole[place : place + size]
                at += size

    def _file_of(self, offset: int) -> LogFile:
        for file in self._files.list():
            if file.start <= offset < file.end:
                return file
        raise FileNotFoundError(errno.ENOENT, "no log file has this offset", self.where)

    def _map(self, file: LogFile) -> mmap.mmap:
        found = self._maps.get(file.start)
        if found is None:
            try:
                with open(file.path, "rb") as handle:
                    found = mmap.mmap(handle.fileno(), file.size, access=mmap.ACCESS_READ)
            except ValueError as shorter:
                text = "the log file was cut since it was listed"
                raise FileNotFoundError(errno.ENOENT, text, file.path) from shorter
            self._maps = {file.start: found}
        return found

    def _populate(self, file: LogFile, mapped: mmap.mmap, place: int, size: int) -> None:
        """Map the pages of a piece. Raises StoreError if the disk cannot read one of them."""
        begin = place - place % _PAGE
        try:
            mapped.madvise(_POPULATE_READ, begin, place + size - begin)
        except OSError as failure:
            if failure.errno == errno.EINVAL:  # an older kernel
                return
            raise StoreError(
                f"{file.path}: the disk cannot read bytes {place} to {place + size}, offsets "
                f"[{file.start + place}, {file.start + place + size}): {failure.strerror}"
            ) from failure

    def _missing(self) -> Missing:
        now = folder_extent(self.where)
        why = ""
        if now.min_offset <= self._extent.min_offset and now.end_offset >= self._extent.end_offset:
            why = f"a log file is missing or cut short in the middle of {self.where}"
        return Missing(self.where, now.min_offset, now.end_offset, why)
