"""Compare a store's queues and key index with new ones; find the first difference.

Queues are compared byte by byte. Index files are compared key by key, because their division into
files depends on where the log began when they were written; then each file's chains are checked.
If a node has the store open, its newer records are ignored.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hastore.fs.filesystem import FileSystem, is_file_name, read_range, size_of
from hastore.store.derived.consume_queue import BATCH_UNIT, UNIT
from hastore.store.derived.index_arrays import ENTRY_ROW, chain
from hastore.store.derived.index_file import ENTRY, HEADER, SLOT, IndexHeader, index_file_bytes
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE
from hastore.store.rebuild.extract import Array
from hastore.store.rebuild.layout import BATCH_QUEUES, INDEX, QUEUES, Sizes
from hastore.store.rebuild.source import NO_LIMIT, Log

_CHUNK_UNITS = 1 << 16
_CHUNK_ENTRIES = 1 << 18


@dataclass(frozen=True)
class WrongFile:
    """The first place where a file differs, what the log says, and what the store has."""

    path: str
    place: str
    expected: str
    found: str

    @property
    def text(self) -> str:
        """Return a line for people."""
        return f"{self.path}: {self.place}: {self.found} instead of {self.expected}"


def compare(
    fs: FileSystem, root: str, new: str, log: Log, end: int, sizes: Sizes, *, index: bool = True
) -> WrongFile | None:
    """Compare the folders `root` and `new`; return None if they agree up to offset `end`."""
    in_use = log.limit != NO_LIMIT
    for kind, form in ((QUEUES, UNIT), (BATCH_QUEUES, BATCH_UNIT)):
        for queue in sorted({*_queues(fs, f"{new}/{kind}"), *_queues(fs, f"{root}/{kind}")}):
            folders = f"{root}/{kind}/{queue}", f"{new}/{kind}/{queue}"
            comparison = _QueueComparison(fs, *folders, form.size)
            found = comparison.first_difference(end if in_use else None)
            if found is not None:
                return found
    if not index:
        return None
    return _compare_index(fs, f"{root}/{INDEX}", f"{new}/{INDEX}", log, end, sizes)


def _queues(fs: FileSystem, folder: str) -> Iterator[str]:
    for topic in fs.list_dir(folder):
        if fs.is_dir(f"{folder}/{topic}"):
            for queue in fs.list_dir(f"{folder}/{topic}"):
                if fs.is_dir(f"{folder}/{topic}/{queue}"):
                    yield f"{topic}/{queue}"


# -- queues ----------------------------------------------------------------------------------------


class _QueueComparison:
    """The comparison of one queue."""

    def __init__(self, fs: FileSystem, present: str, new: str, unit_bytes: int) -> None:
        self._fs = fs
        self._present = present
        self._new = new
        self._unit = unit_bytes

    def first_difference(self, limit: int | None) -> WrongFile | None:
        """Compare all files; units of records from `limit` on are ignored in the present ones."""
        names = {*self._fs.list_dir(self._new), *self._fs.list_dir(self._present)}
        for name in sorted(filter(is_file_name, names)):
            found = self._file(name, limit)
            if found is not None:
                return found
        return None

    def _file(self, name: str, limit: int | None) -> WrongFile | None:
        new, present = f"{self._new}/{name}", f"{self._present}/{name}"
        sizes = [self._size(path) for path in (new, present)]
        if sizes[1] == 0 and sizes[0]:
            return WrongFile(present, "the file", f"{sizes[0]} bytes", "nothing")
        if sizes[0] and sizes[0] != sizes[1]:
            return WrongFile(present, "the file", f"{sizes[0]} bytes", f"{sizes[1]} bytes")
        step = _CHUNK_UNITS * self._unit
        for at in range(0, sizes[1], step):
            wanted, found = (self._read(path, step, at) for path in (new, present))
            wanted = wanted.ljust(len(found), b"\0")
            if wanted != found:
                place = self._differs(wanted, found, limit)
                if place is not None:
                    number = (int(name) + at + place) // self._unit
                    units = (part[place : place + self._unit] for part in (wanted, found))
                    return WrongFile(present, f"unit {number}", *map(_unit_text, units))
        return None

    def _differs(self, wanted: bytes, found: bytes, limit: int | None) -> int | None:
        """Return the position of the first unit that differs."""
        nothing = bytes(self._unit)
        for at in range(0, len(found), self._unit):
            unit = found[at : at + self._unit]
            if unit == wanted[at : at + self._unit]:
                continue
            if limit is not None and wanted[at : at + self._unit] == nothing:
                if int.from_bytes(unit[:8]) >= limit or unit == nothing:
                    continue
            return at
        return None

    def _size(self, path: str) -> int:
        return size_of(self._fs, path) if self._fs.exists(path) else 0

    def _read(self, path: str, size: int, at: int) -> bytes:
        return read_range(self._fs, path, size, at) if self._fs.exists(path) else b""


def _unit_text(raw: bytes) -> str:
    if not any(raw):
        return "no unit"
    if len(raw) == BATCH_UNIT.size:
        offset, size, tags, stored_ms, base, count, _, _ = BATCH_UNIT.unpack(raw)
        return (
            f"(offset {offset}, size {size}, tagsCode {tags}, stored {stored_ms},"
            f" {count} messages from queue offset {base})"
        )
    offset, size, tags = UNIT.unpack(raw) if len(raw) == UNIT.size else (0, 0, 0)
    if size == BLANK_UNIT_SIZE:
        return "a blank"
    return f"(offset {offset}, size {size}, tagsCode {tags})"


# -- index -----------------------------------------------------------------------------------------


def _compare_index(
    fs: FileSystem, present: str, new: str, log: Log, end: int, sizes: Sizes
) -> WrongFile | None:
    in_use = log.limit != NO_LIMIT
    expected = _Stream(_keys(fs, new, sizes))
    names = [name for name in fs.list_dir(present) if name.isdigit()]
    for number, name in enumerate(names):
        path = f"{present}/{name}"
        file = _IndexFile(fs, path, sizes)
        if file.problem is not None:
            return WrongFile(path, "the file", f"{file.full_size} bytes, a header", file.problem)
        is_last = number == len(names) - 1
        at = 1
        for rows in file.entries():
            keep = rows["offset"] >= log.first  # retention has removed the records before
            if in_use:
                keep &= rows["offset"] < end
            numbers = np.flatnonzero(keep)
            wanted = expected.next_rows(len(numbers))
            mine = rows[numbers]
            count = min(len(wanted), len(mine))
            unlike = np.flatnonzero(
                (wanted["hash"] != mine["hash"][:count])
                | (wanted["offset"] != mine["offset"][:count])
            )
            if len(unlike) or count < len(mine):
                place = int(unlike[0]) if len(unlike) else count
                text = _key_text(wanted[place]) if place < len(wanted) else "no entry"
                where = f"entry {at + int(numbers[place])}"
                return WrongFile(path, where, text, _key_text(mine[place]))
            at += len(rows)
        if not (in_use and is_last):
            found = file.check_chains()
            if found is not None:
                return found
    missing = expected.next_rows(1)
    if len(missing):
        return WrongFile(present, "after its last entry", _key_text(missing[0]), "no entry")
    return None


def _key_text(row: Array) -> str:
    return f"(keyHash {int(row['hash'])}, offset {int(row['offset'])})"


def _keys(fs: FileSystem, folder: str, sizes: Sizes) -> Iterator[Array]:
    for name in fs.list_dir(folder):
        yield from _IndexFile(fs, f"{folder}/{name}", sizes).entries()


class _Stream:
    """Arrays as one sequence."""

    def __init__(self, parts: Iterator[Array]) -> None:
        self._parts = parts
        self._rest = np.empty(0, ENTRY_ROW)

    def next_rows(self, count: int) -> Array:
        """Return the next `count` rows, or as many as there are."""
        while len(self._rest) < count:
            part = next(self._parts, None)
            if part is None:
                break
            self._rest = np.concatenate((self._rest, part))
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken


class _IndexFile:
    """An index file that is only read."""

    def __init__(self, fs: FileSystem, path: str, sizes: Sizes) -> None:
        self._fs = fs
        self._path = path
        self._sizes = sizes
        self._entries_at = HEADER.size + SLOT.size * sizes.slots
        self.full_size = index_file_bytes(sizes.slots, sizes.entries)
        self.header = IndexHeader()
        self.problem: str | None = None
        size = size_of(fs, path)
        if size != self.full_size:
            self.problem = f"{size} bytes"
            return
        self.header = IndexHeader(*HEADER.unpack(self._read(0, HEADER.size)))
        if not 0 <= self.header.count <= sizes.entries:
            self.problem = f"{self.header.count} entries in the header"

    def entries(self) -> Iterator[Array]:
        """Yield the entries, the unused first one left out, in parts."""
        for first in range(1, self.header.count, _CHUNK_ENTRIES):
            count = min(_CHUNK_ENTRIES, self.header.count - first)
            raw = self._read(self._entries_at + ENTRY.size * first, ENTRY.size * count)
            yield np.frombuffer(raw, ENTRY_ROW)

    def check_chains(self) -> WrongFile | None:
        """Compare slots and previous entries with what the keys' hashes say."""
        slots = np.zeros(self._sizes.slots, np.int32)
        number = 1
        for rows in self.entries():
            previous = chain(slots, rows["hash"].astype(np.int64) % self._sizes.slots, number)
            wrong = np.flatnonzero(previous != rows["previous"])
            if len(wrong):
                place = int(wrong[0])
                return WrongFile(
                    self._path, f"entry {number + place}",
                    f"previous entry {int(previous[place])}",
                    f"previous entry {int(rows['previous'][place])}",
                )  # fmt: skip
            number += len(rows)
        stored = np.frombuffer(self._read(HEADER.size, SLOT.size * len(slots)), ">i4")
        wrong = np.flatnonzero(stored != slots)
        if len(wrong):
            slot = int(wrong[0])
            return WrongFile(
                self._path, f"slot {slot}", f"entry {slots[slot]}", f"entry {stored[slot]}"
            )
        return None

    def _read(self, at: int, size: int) -> bytes:
        return read_range(self._fs, self._path, size, at)
