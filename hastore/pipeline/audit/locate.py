"""Find the record, the blank or the header of an entry with a byte at which two logs differ.

All bytes before the first difference are equal on both sides, so one side's bytes are enough to
find where the record begins. A record is recognized by its magic and by its own physicalOffset;
from there on the sizes lead to the next ones. In a log of DLedger's entries the header of an entry
comes before each record.
"""

from __future__ import annotations

from collections.abc import Callable

from hastore.record.entry import (
    ENTRY_BLANK,
    ENTRY_BLANK_MAGIC,
    ENTRY_HEADER_BYTES,
    EntryHeader,
    read_header,
)
from hastore.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    SIZE_AND_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
    header_struct,
)

Read = Callable[[int, int], bytes | None]  # the bytes [start, end) of a log; None: not there
STEPS_BYTES = (64 * 1024, 1024 * 1024, 6 * 1024 * 1024)  # how far back to search; then: 64 MiB
FAR_BYTES = 64 * 1024 * 1024
_FRONT = header_struct("size", "magic", "physical_offset")
_MAGICS = (V1_MAGIC, V2_MAGIC)
_ENTRY_SIZE_MAX = (1 << 32) - 1  # what its field can hold


def record_start(read: Read, low: int, at: int) -> int | None:
    """Return where the item that contains byte `at` begins; None if it is unknown.

    An item is a record, a blank, or the header of an entry. The bytes [`low`, `at`) are searched
    backwards. An item is taken to begin at `low`, unless one is found after it.
    """
    for step in (*STEPS_BYTES, FAR_BYTES):
        base = max(low, at - step)
        data = read(base, at)
        if data is None:
            return None
        found = _last_record(data, base)
        if found is not None:
            return _follow(data, base, found, at)
        if base == low:
            return _follow(data, base, low, at)
    return None


def _last_record(data: bytes, base: int) -> int | None:
    """Return the last offset at which a record's magic and its own offset stand."""
    best = None
    if len(data) < _FRONT.size:
        return None
    for magic in _MAGICS:
        mark = magic.to_bytes(4)
        found = data.rfind(mark, 4, len(data) - _FRONT.size + 8)
        while found >= 4:
            at = found - 4
            if _FRONT.unpack_from(data, at)[2] == base + at:
                best = at if best is None else max(best, at)
                break
            found = data.rfind(mark, 4, found + 3)
    return None if best is None else base + best


def _follow(data: bytes, base: int, start: int, at: int) -> int:
    """Follow the sizes from an item's start to the item that contains `at`."""
    while start + BLANK_SIZE <= at:
        size = _size_of(data, start - base, start)
        if not size or start + size > at:
            break
        start += size
    return start


def _size_of(data: bytes, place: int, offset: int) -> int:
    """Return the size of the item at `place`, which lies at `offset` of its log; 0: unknown."""
    size, magic = SIZE_AND_MAGIC.unpack_from(data, place)
    if magic in (*_MAGICS, BLANK_MAGIC) and size >= BLANK_SIZE:
        return int(size)
    magic, size = ENTRY_BLANK.unpack_from(data, place)
    if magic == ENTRY_BLANK_MAGIC and size >= ENTRY_BLANK.size:
        return int(size)
    return ENTRY_HEADER_BYTES if entry_header(data, place, offset) is not None else 0


def entry_header(data: bytes, place: int, offset: int) -> EntryHeader | None:
    """Return the sound header of an entry at `place`, which lies at `offset` of its log."""
    if len(data) - place < ENTRY_HEADER_BYTES:
        return None
    return read_header(data, place, place + _ENTRY_SIZE_MAX, offset)
