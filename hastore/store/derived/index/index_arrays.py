"""Add many keys to the key index with numpy: the same bytes as adding them one by one."""

import numpy as np

from hastore.store.derived.contract import KeyedRecords
from hastore.store.derived.index.index_file import IndexFile, Plan

_SLOT = np.dtype(">i4")
_ENTRY = np.dtype([("hash", ">i4"), ("offset", ">i8"), ("seconds", ">i4"), ("previous", ">i4")])
_SECONDS_MAX = 0x7FFFFFFF


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
    if stored_ms.min() < 0:  # the difference from the begin time might overflow
        _put_each(plan, *columns)
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
    begin_ms = header.begin_timestamp_ms
    entries = np.empty(len(hashes), dtype=_ENTRY)
    entries["hash"], entries["offset"], entries["previous"] = hashes, offsets, previous
    seconds = np.maximum(stored_ms - begin_ms, 0) // 1000 if begin_ms > 0 else 0
    entries["seconds"] = np.minimum(seconds, _SECONDS_MAX)
    plan.entries += entries.tobytes()
    plan.slots.update(zip(slots.tolist(), numbers.tolist(), strict=True))
    header.slots_used += int(np.count_nonzero(previous == 0))
    header.count += len(hashes)
    header.end_offset = int(offsets[-1])
    header.end_timestamp_ms = int(stored_ms[-1])


def store_slots(file: IndexFile, slots: dict[int, int]) -> None:
    """Do what `file.store_slots` does, with numpy."""
    places = np.fromiter(slots.keys(), np.int64, len(slots))
    with file.slots_view() as view:
        np.frombuffer(view, _SLOT)[places] = np.fromiter(slots.values(), np.int64, len(slots))


def _put_each(plan: Plan, *columns: "np.typing.NDArray[np.int64]") -> None:
    for row in zip(*(column.tolist() for column in columns), strict=True):
        plan.put(*row)
