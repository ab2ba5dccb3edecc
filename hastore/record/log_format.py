"""How records lie in a log: one after the other, or each in an entry of DLedger. Pure.

An *item* is what lies between two offsets at which a log may be cut: a record in a plain log, an
entry in a log of entries. The record of an item begins `lead` bytes after it; that is its physical
offset. A blank fills the rest of a file in both, with other bytes.

An entry may have a body that is no record, if a program other than RocketMQ wrote it. `ENTRIES`
refuses those, as a node does; `ANY_ENTRIES` takes them, for tools that read any DLedger directory.
"""

from collections.abc import Callable, Container
from typing import Protocol

from hastore.record.codec import Buffer, check_blank, check_record, pack_blank
from hastore.record.entry import (
    ENTRY_BLANK,
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    MAX_ENTRY_BYTES,
    Body,
    body_of,
    check_entry_blank,
    pack_entry_blank,
    pack_unit,
    read_header,
)
from hastore.record.layout import (
    BLANK_SIZE,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
)

Check = Callable[[Buffer, int, int, int], int]

_MAGICS = (V1_MAGIC, V2_MAGIC)
_MAGIC_BYTES = tuple(magic.to_bytes(4) for magic in _MAGICS)


class LogFormat(Protocol):
    """The form of a log. Buffers, `at` and `end` are as in `check_record`; nothing raises."""

    lead: int  # bytes of an item before its record
    size_at: int  # where the 4 bytes of its size lie, in an item and in a blank

    def max_record(self, file_size: int) -> int:
        """Return the size of the largest record that fits a log with files of this size."""
        ...

    def pack_blank(self, size: int) -> bytes:
        """Return the first bytes of a blank of `size` bytes; the others are zeros."""
        ...

    def check_blank(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size of the blank at `at` if it ends exactly at `end`, else 0."""
        ...

    def announced(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size of the item that seems to begin at `at`, whole or not, else 0."""
        ...

    def check(self, buffer: Buffer, at: int, end: int, offset: int) -> int:
        """Return the size of the valid item at `at`, which lies at `offset` of the log, else 0."""
        ...

    def chain(self, *, units: bool = False) -> Check:
        """Return a `check` for items that follow each other, from the first one on.

        With `units` it keeps the index units of the entries.
        """
        ...

    def holds_record(self, buffer: Buffer, at: int, size: int) -> bool:
        """Whether the valid item of `size` bytes at `at` holds a record."""
        ...


class PlainRecords:
    """Records without anything between them, as RocketMQ's commit log has them."""

    lead = 0
    size_at = 0
    pack_blank = staticmethod(pack_blank)
    check_blank = staticmethod(check_blank)
    check = staticmethod(check_record)

    def max_record(self, file_size: int) -> int:
        """Return what a file holds beside the blank."""
        return file_size - BLANK_SIZE

    def announced(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size that a record's first bytes state."""
        if end - at < SIZE_AND_MAGIC.size:
            return 0
        size, magic = SIZE_AND_MAGIC.unpack_from(buffer, at)
        return int(size) if magic in _MAGICS and size >= MIN_RECORD_SIZE else 0

    def chain(self, *, units: bool = False) -> Check:
        """Return `check`: a record says nothing of the one before it."""
        del units
        return self.check

    def holds_record(self, buffer: Buffer, at: int, size: int) -> bool:
        """Return True: the item is the record."""
        del buffer, at, size
        return True


class Entries:
    """Records in DLedger's entries; `other_bodies` accepts those of other programs too."""

    lead = ENTRY_HEADER_BYTES
    size_at = 4
    pack_blank = staticmethod(pack_entry_blank)
    check_blank = staticmethod(check_entry_blank)

    def __init__(self, *, other_bodies: bool) -> None:
        self.takes = {Body.RECORD, Body.OTHER} if other_bodies else {Body.RECORD}

    def max_record(self, file_size: int) -> int:
        """Return what a file, and an entry, hold beside the blank and the header."""
        return min(file_size - ENTRY_BLANK.size, MAX_ENTRY_BYTES) - ENTRY_HEADER_BYTES

    def announced(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size that an entry's first bytes state."""
        if end - at < ENTRY_BLANK.size:
            return 0
        magic, size = ENTRY_BLANK.unpack_from(buffer, at)
        return int(size) if magic == ENTRY_MAGIC and size >= ENTRY_HEADER_BYTES else 0

    def check(self, buffer: Buffer, at: int, end: int, offset: int) -> int:
        """Return the size of the valid entry at `at`; its index and term may be any."""
        header = read_header(buffer, at, end, offset)
        if header is None or body_of(buffer, at, header.size, offset) not in self.takes:
            return 0
        return header.size

    def chain(self, *, units: bool = False) -> "EntryChain":
        """Return a check that also compares indexes and terms."""
        return EntryChain(self.takes, units=units)

    def holds_record(self, buffer: Buffer, at: int, size: int) -> bool:
        """Whether the body is a record, by its magic."""
        at += ENTRY_HEADER_BYTES
        return (
            size >= ENTRY_HEADER_BYTES + MIN_RECORD_SIZE
            and SIZE_AND_MAGIC.unpack_from(buffer, at)[1] in _MAGICS
        )


class EntryChain:
    """Check entries that must follow each other; the first may be any."""

    def __init__(self, takes: Container[Body], *, units: bool) -> None:
        self._takes = takes
        self._keep_units = units
        self.first_index: int | None = None
        self.next_index: int | None = None
        self.term = 0
        self.units = bytearray()  # of the entries, if they are kept

    def __call__(self, buffer: Buffer, at: int, end: int, offset: int) -> int:
        """Return the size of the entry at `at` if it continues the chain, else 0."""
        header = read_header(buffer, at, end, offset)
        if header is None or header.term < self.term:
            return 0
        index = header.index
        if self.next_index not in (None, index):
            return 0
        if body_of(buffer, at, header.size, offset) not in self._takes:
            return 0
        if self.next_index is None:
            self.first_index = index
        self.next_index, self.term = index + 1, header.term
        if self._keep_units:
            self.units += pack_unit(index, header.term, offset, header.size)
        return header.size


PLAIN = PlainRecords()
ENTRIES = Entries(other_bodies=False)
ANY_ENTRIES = Entries(other_bodies=True)


def record_places(data: bytes | memoryview, lead: int, start: int = 0) -> list[int]:
    """Return where items with a record may begin in `data`, by the records' magic."""
    raw = bytes(data)
    found = []
    for magic in _MAGIC_BYTES:
        at = raw.find(magic, start + lead + 4)
        while at >= 0:
            found.append(at - 4 - lead)
            at = raw.find(magic, at + 1)
    return sorted(found)
