"""The key index with numpy: the same bytes as adding keys one by one (index_file.py).

`put_all` and `store_slots` add a batch's keys to a file for replay. `WholeFile` builds a file of a
rebuild from all of its keys: its slots are kept in memory, and written with the header at the end.
So a file that was not finished has a header of zeros, which is no valid header.
"""

import numpy as np
import numpy.typing as npt

from hastore.fs.filesystem import File, FileSystem
from hastore.store.derived.contract import KeyedRecords
from hastore.store.derived.index_file import ENTRY, HEADER, SLOT, IndexFile, IndexHeader, Plan

_SLOT = np.dtype(">i4")
ENTRY_ROW = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_SECONDS_MAX = 0x7FFFFFFF
_CHUNK_KEYS = 1 << 17

Column = npt.NDArray[np.int64]


def put_all(plan: Plan, keys: KeyedRecords, first: int, end: int) -> None:
    """Do what `plan.put` does, for the keys with the numbers [first, end).

    The caller ensures that the file has room, and calls this at most once for each plan.
    """
    columns = keys.hashes[first:end], keys.offsets[first:end], keys.stored_ms[first:end]
    if plan.header.count == 1:  # a file's first key sets the file's begin time
        _put_each(plan, *(column[:1] for column in columns))
        columns = tuple(column[1:] for column in columns)
    hashes, offsets, stored_ms = columns
    if not len(hashes):
        return
    header = plan.header
    slots = hashes % plan.file.slots
    numbers = np.arange(header.count, header.count + len(hashes))
    with plan.file.slots_view() as view:
        previous = np.frombuffer(view, _SLOT)[slots].astype(np.int64)
    previous[(previous < 0) | (previous > numbers)] = 0
    # `plan.slots` is empty, or has only the slot of the first key, which was put above.
    for slot, number in plan.slots.items():
        previous[slots == slot] = number
    order = np.argsort(slots, kind="stable")
    in_order = slots[order]
    again = (in_order[1:] == in_order[:-1]).nonzero()[0]
    previous[order[again + 1]] = numbers[order[again]]
    plan.entries += _rows(hashes, offsets, stored_ms, previous, header).tobytes()
    plan.slots.update(zip(slots.tolist(), numbers.tolist(), strict=True))
    _count(header, offsets, stored_ms, previous)


def store_slots(file: IndexFile, slots: dict[int, int]) -> None:
    """Do what `file.store_slots` does, with numpy."""
    places = np.fromiter(slots.keys(), np.int64, len(slots))
    with file.slots_view() as view:
        np.frombuffer(view, _SLOT)[places] = np.fromiter(slots.values(), np.int64, len(slots))


def _put_each(plan: Plan, *columns: "np.typing.NDArray[np.int64]") -> None:
    for row in zip(*(column.tolist() for column in columns), strict=True):
        plan.put(*row)


def chain(slots: npt.NDArray[np.int32], places: Column, first: int) -> Column:
    """Return the previous entry of each new one, and store the latest ones in `slots`.

    Entry `first` + n belongs to the slot `places[n]`.
    """
    numbers = np.arange(first, first + len(places))
    previous = slots[places].astype(np.int64)
    order = np.argsort(places, kind="stable")
    in_order = places[order]
    again = in_order[1:] == in_order[:-1]
    previous[order[1:][again]] = numbers[order[:-1][again]]
    latest = order[np.append(~again, True)]
    slots[places[latest]] = numbers[latest]
    return previous


def _rows(
    hashes: Column, offsets: Column, stored_ms: Column, previous: Column, header: IndexHeader
) -> npt.NDArray[np.void]:
    """Return new entries as the file of this header stores them."""
    rows = np.empty(len(hashes), ENTRY_ROW)
    rows["hash"], rows["offset"], rows["previous"] = hashes, offsets, previous
    begin_ms = header.begin_timestamp_ms
    # Negative times are replaced before the subtraction, which could overflow.
    seconds = np.maximum(np.maximum(stored_ms, 0) - begin_ms, 0) // 1000 if begin_ms > 0 else 0
    rows["seconds"] = np.minimum(seconds, _SECONDS_MAX)
    return rows


def _count(header: IndexHeader, offsets: Column, stored_ms: Column, previous: Column) -> None:
    """Count new entries in their file's header."""
    header.slots_used += int(np.count_nonzero(previous == 0))
    header.count += len(offsets)
    header.end_offset, header.end_timestamp_ms = int(offsets[-1]), int(stored_ms[-1])


class WholeFile:
    """An index file that is being built: `add` keys in the log's order, then `finish`."""

    def __init__(
        self, fs: FileSystem, path: str, slots: int, entries: int, previous: IndexHeader
    ) -> None:
        """Create the file; `previous` is the header of the file before it. Raises OSError."""
        self.header = IndexHeader(
            begin_timestamp_ms=previous.end_timestamp_ms,
            end_timestamp_ms=previous.end_timestamp_ms,
            begin_offset=previous.end_offset,
            end_offset=previous.end_offset,
        )
        self._slots = np.zeros(slots, np.int32)
        self._entries_at = HEADER.size + SLOT.size * slots
        self._file: File = fs.open(path, create=True)
        self._file.truncate(0)
        self._file.truncate(self._entries_at + ENTRY.size * entries)

    def add(self, hashes: Column, offsets: Column, stored_ms: Column) -> None:
        """Add keys; the caller ensures that the file has room. Raises OSError."""
        at = 0
        while at < len(hashes):
            # The first key sets the file's begin time, after its own entry was made.
            end = at + 1 if self.header.count == 1 else at + _CHUNK_KEYS
            self._add(hashes[at:end], offsets[at:end], stored_ms[at:end])
            at = end

    def _add(self, hashes: Column, offsets: Column, stored_ms: Column) -> None:
        header = self.header
        slots = hashes % len(self._slots)
        previous = chain(self._slots, slots, header.count)
        entries = _rows(hashes, offsets, stored_ms, previous, header)
        self._file.pwrite(entries.view(np.uint8).data, self._entries_at + ENTRY.size * header.count)
        if header.count == 1:
            header.begin_offset, header.begin_timestamp_ms = int(offsets[0]), int(stored_ms[0])
        _count(header, offsets, stored_ms, previous)

    def finish(self) -> None:
        """Write slots and header, and close the file. Raises OSError."""
        self._file.pwrite(self._slots.astype(_SLOT).view(np.uint8).data, HEADER.size)
        self._file.pwrite(self.header.pack(), 0)
        self._file.close()

    def close(self) -> None:
        """Close the file; one that was not finished is to be removed."""
        self._file.close()
