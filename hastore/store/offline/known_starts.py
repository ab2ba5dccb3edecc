"""Find a record's start near an offset of the log, by the units of the consume queues.

A search for bytes that look like a record could be deceived: a message's body may hold a copy of
a record, with the physical offset at which it happens to lie. Only the log's reader, record by
record from a file's start, knows where records begin, and replay has written that down: each unit
has the physical offset of a record. So a unit saves the walk from the file's start.
"""

from collections.abc import Iterator

from hastore.fs.filesystem import FileSystem, is_file_name
from hastore.store.derived.queues.batch_consume_queue import BATCH_UNIT
from hastore.store.derived.queues.consume_queue import UNIT
from hastore.store.derived.queues.unit_files import BLANK_UNIT_SIZE, PLACE, queue_ids

QUEUES_MAX = 64  # more are not looked at
NEAR_BYTES = 64 * 1024  # a record this close is near enough
_KINDS = (("consumequeue", UNIT.size), ("batchconsumequeue", BATCH_UNIT.size))


def known_start(fs: FileSystem, root: str, offset: int, low: int) -> int | None:
    """Return the start of a record in `[low, offset]`, as near to `offset` as a few queues know.

    Returns None if they know none. The caller checks that the record is there, because queues may
    be older or newer than the log, for example in a copy.
    """
    best = -1
    for number, (directory, unit_bytes) in enumerate(_queues(fs, root)):
        if number >= QUEUES_MAX or best >= max(0, offset - NEAR_BYTES):
            break
        best = max(best, _last_start(fs, directory, unit_bytes, offset))
    return best if best >= low else None


def _queues(fs: FileSystem, root: str) -> Iterator[tuple[str, int]]:
    for kind, unit_bytes in _KINDS:
        for topic, queue_id in queue_ids(fs, root, kind):
            yield f"{root}/{kind}/{topic}/{queue_id}", unit_bytes


def _last_start(fs: FileSystem, directory: str, unit_bytes: int, offset: int) -> int:
    """Return the last record start at or below `offset` in one queue; -1 if there is none."""
    names = [name for name in fs.list_dir(directory) if is_file_name(name)]
    low, high = 0, len(names)
    while low < high:  # files whose first unit is at or below `offset`
        middle = (low + high) // 2
        if _search(fs, f"{directory}/{names[middle]}", 1, unit_bytes, offset)[0]:
            low = middle + 1
        else:
            high = middle
    if not low:
        return -1
    return _search(fs, f"{directory}/{names[low - 1]}", None, unit_bytes, offset)[1]


def _search(
    fs: FileSystem, path: str, count: int | None, unit_bytes: int, offset: int
) -> tuple[int, int]:
    """Return how many leading units are at or below `offset`, and the last one's record start.

    It looks at the first `count` units. The start is -1 if there is no such unit, or it is blank.
    """
    try:
        file = fs.open(path, writable=False)
    except FileNotFoundError:  # retention removed it
        return 0, -1
    try:
        low, high = 0, file.size // unit_bytes if count is None else count
        found = -1
        while low < high:
            middle = (low + high) // 2
            raw = file.pread(PLACE.size, middle * unit_bytes)
            place, size = PLACE.unpack(raw) if len(raw) == PLACE.size else (0, 0)
            if size > 0 and place <= offset:
                low = middle + 1
                found = -1 if size == BLANK_UNIT_SIZE else place
            else:
                high = middle
        return low, found
    finally:
        file.close()
