"""Read consume queue files from another process, without a lock; sizes are those of the files.

Units of a queue show where records begin in the log, too (`known_start`). A search for bytes that
look like a record could be deceived: a message's body may hold a copy of a record, with the
physical offset at which it happens to lie. Only the log's reader, record by record from a file's
start, knows where records begin, and replay has written that down: each unit has the physical
offset of a record. So a unit saves the walk from the file's start.
"""

import contextlib
import struct
from array import array
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hastore.errors import UsageError
from hastore.fs.filesystem import FileSystem, is_file_name, read_range, size_of
from hastore.store.derived.consume_queue import BATCH_UNIT, UNIT, is_directory_name
from hastore.store.derived.contract import UNIT_FIELDS
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE, PLACE, first_where, queue_ids

if TYPE_CHECKING:
    import numpy.typing as npt


_CHUNK_UNITS = 1 << 16


@dataclass(slots=True)
class QueueUnits:
    """Units as columns of equal length, a row for each record; an inner batch is one row."""

    queue_offsets: "array[int]" = field(default_factory=lambda: array("q"))
    offsets: "array[int]" = field(default_factory=lambda: array("q"))  # in the log
    sizes: "array[int]" = field(default_factory=lambda: array("i"))
    tags_codes: "array[int]" = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.offsets)

    def extend(self, *columns: "npt.NDArray[Any]") -> None:
        """Add rows, given as columns in the order of the fields."""
        fields = (self.queue_offsets, self.offsets, self.sizes, self.tags_codes)
        for own, column in zip(fields, columns, strict=True):
            own.frombytes(column.astype(f"={own.typecode}").tobytes())

    def sort(self) -> None:
        """Order the rows by their queue offsets."""
        order = sorted(range(len(self)), key=self.queue_offsets.__getitem__)
        for own in (self.queue_offsets, self.offsets, self.sizes, self.tags_codes):
            own[:] = array(own.typecode, [own[row] for row in order])


class _QueueReader:
    """The files of one queue, listed once; units are numbered as in unit_files.py."""

    def __init__(self, fs: FileSystem, directory: str, form: struct.Struct) -> None:
        self._fs = fs
        self._form = form
        self._files: list[tuple[int, int, str]] = []  # first unit, units, path
        for name in fs.list_dir(directory):
            if not is_file_name(name):
                continue
            path = f"{directory}/{name}"
            try:
                units = size_of(fs, path) // form.size
            except FileNotFoundError:
                continue
            if units:
                self._files.append((int(name) // form.size, units, path))

    def bounds(self, low_offset: int, limit: int) -> tuple[int, int] | None:
        """Return the range of units with records in [low_offset, limit); None without files."""
        if not self._files:
            return None
        end = self._files[0][0]
        for start, units, path in reversed(self._files):
            count = self._search(path, units, lambda offset, size: _within(offset, size, limit))
            if count or start == self._files[0][0]:
                end = start + count
                break
        first = end
        for start, units, path in self._files:
            count = min(units, end - start)
            if count <= 0:
                break
            below = self._search(
                path,
                count,
                lambda offset, size: (
                    offset < low_offset or (size == BLANK_UNIT_SIZE and not offset)
                ),
            )
            if below < count:
                first = start + below
                break
        return first, end

    def read(self, first: int, count: int) -> bytes:
        """Return up to `count` units of one file; b"" if there are none."""
        for start, units, path in self._files:
            if start <= first < start + units:
                count = min(count, start + units - first)
                size = self._form.size
                try:
                    raw = read_range(self._fs, path, count * size, (first - start) * size)
                except FileNotFoundError:
                    return b""
                return raw[: len(raw) - len(raw) % size]
        return b""

    def next_start(self, unit: int) -> int | None:
        """Return the first unit of the next file after `unit`; None after the last file."""
        return min((start for start, _, _ in self._files if start > unit), default=None)

    def _search(self, path: str, count: int, holds: Callable[[int, int], bool]) -> int:
        """Return how many leading units pass `holds`; all later units must fail it."""
        try:
            return _count_leading(self._fs, path, count, self._form.size, holds)[0]
        except FileNotFoundError:  # retention removed it and the files before it
            return count


class QueueFiles:
    """All queues of a store; each call lists the files again."""

    def __init__(self, root: str, fs: FileSystem) -> None:
        self._root = root
        self._fs = fs

    def topics(
        self, low_offset: int, limit: int, names: Collection[str] | None = None
    ) -> dict[str, dict[int, tuple[int, int]]]:
        """Return (min, max) queue offsets of each queue of each topic, or of these topics."""
        result: dict[str, dict[int, tuple[int, int]]] = {}
        for kind in ("consumequeue", "batchconsumequeue"):
            for topic, queue_id in queue_ids(self._fs, self._root, kind, names):
                found = self.queue_range(topic, queue_id, low_offset, limit)
                if found is not None:
                    result.setdefault(topic, {})[queue_id] = found
        return {topic: dict(sorted(result[topic].items())) for topic in sorted(result)}

    def queue_range(
        self, topic: str, queue_id: int, low_offset: int, limit: int
    ) -> tuple[int, int] | None:
        """Return (min, max) queue offsets of records in [low_offset, limit)."""
        kinds, found = self._find(topic, queue_id), list[tuple[int, int]]()
        for queue, is_batch in kinds:
            span = self._range_of(queue, low_offset, limit, is_batch=is_batch)
            if span is not None and not is_batch and len(kinds) > 1:
                span = span[0], self._end_of_records(queue, span[1], limit)
            if span is not None:
                found.append(span)
        if not found:
            return None
        high = max(high for _, high in found)
        return min((low for low, end in found if low < end), default=high), high

    @staticmethod
    def _range_of(
        queue: _QueueReader, low_offset: int, limit: int, *, is_batch: bool
    ) -> tuple[int, int] | None:
        """Return what `queue_range` does of one kind of queue."""
        bounds = queue.bounds(low_offset, limit)
        if bounds is None or not is_batch:
            return bounds
        first, end = bounds
        raw = queue.read(end - 1, 1)
        if not raw:
            return 0, 0
        *_, base, count, _, _ = BATCH_UNIT.unpack(raw)
        if first < end:
            low = BATCH_UNIT.unpack(queue.read(first, 1) or raw)[4]
        else:
            low = base + count  # no batch of the queue is in the range
        return low, base + count

    @staticmethod
    def _end_of_records(queue: _QueueReader, end: int, limit: int) -> int:
        """Return where the records of a queue end, if blanks may end at `end`.

        Blanks between two records may stand for inner batches, which the limit may cut off.
        """
        raw = queue.read(end - 1, 1)
        if not raw:  # whole files of blanks are not there
            return 0
        offset, size, _ = UNIT.unpack(raw)
        if size != BLANK_UNIT_SIZE:
            return end
        known = queue.bounds(offset, limit) if offset else None  # of the first such blank
        return 0 if known is None else min(known[0], end)

    def units(
        self,
        topic: str,
        queue_id: int,
        start: int | None,
        end: int | None,
        low_offset: int,
        limit: int,
    ) -> QueueUnits:
        """Return the units of queue offsets [start, end), of both kinds of queue."""
        result = QueueUnits()
        kinds = self._find(topic, queue_id)
        for queue, is_batch in kinds:
            self._add(result, queue, (start, end), low_offset, limit, is_batch=is_batch)
        if len(kinds) > 1:
            result.sort()
        return result

    @staticmethod
    def _add(
        result: QueueUnits,
        queue: _QueueReader,
        span: tuple[int | None, int | None],
        low_offset: int,
        limit: int,
        *,
        is_batch: bool,
    ) -> None:
        """Add the units of one kind of queue."""
        bounds = queue.bounds(low_offset, limit)
        if bounds is None:
            return
        (start, end), (unit, stop) = span, bounds
        if not is_batch:
            unit = unit if start is None else max(unit, start)
            stop = stop if end is None else min(stop, end)
        while unit < stop:
            raw = queue.read(unit, min(_CHUNK_UNITS, stop - unit))
            if not raw:
                following = queue.next_start(unit)
                if following is None:
                    break
                unit = following
                continue
            if is_batch:
                unit += _add_batches(result, raw, start, end, limit)
            else:
                unit += _add_units(result, raw, unit, limit)

    def _find(self, topic: str, queue_id: int) -> list[tuple[_QueueReader, bool]]:
        """Return the queue's files of each kind, and whether they are of inner batches.

        Those of single records are there, even if empty, unless there are batches only.
        """
        if not is_directory_name(topic):
            raise UsageError(
                f"topic {topic[:80]!r} has no queues: it cannot name a folder (1 to 255 bytes, no"
                " slash, no NUL)"
            )
        found = []
        batches = f"{self._root}/batchconsumequeue/{topic}/{queue_id}"
        singles = f"{self._root}/consumequeue/{topic}/{queue_id}"
        if self._fs.is_dir(batches):
            found.append((_QueueReader(self._fs, batches, BATCH_UNIT), True))
        if not found or self._fs.is_dir(singles):
            found.append((_QueueReader(self._fs, singles, UNIT), False))
        return found


def _within(offset: int, size: int, limit: int) -> bool:
    if size == BLANK_UNIT_SIZE:
        return 0 <= offset <= limit
    return size > 0 and offset + size <= limit


def _add_units(result: QueueUnits, raw: bytes, unit: int, limit: int) -> int:
    """Add the records of raw units that begin with unit `unit`; return the number of units."""
    import numpy as np  # imported late: a command that reads no queue starts faster without numpy

    units = np.frombuffer(raw, np.dtype(UNIT_FIELDS))
    offsets, sizes = units["offset"].astype(np.int64), units["size"].astype(np.int64)
    columns = [np.arange(unit, unit + len(units)), offsets, sizes, units["tags_code"]]
    # Replay writes units in the log's order: if the last record is below the limit, all are.
    ordinary = sizes.min() > 0 and sizes.max() < BLANK_UNIT_SIZE
    if not ordinary or int(offsets[-1]) + int(sizes[-1]) > limit:
        whole = (sizes > 0) & (sizes < BLANK_UNIT_SIZE)
        whole &= (offsets >= 0) & (offsets <= limit - sizes)
        columns = [column[whole] for column in columns]
    result.extend(*columns)
    return len(units)


def _add_batches(
    result: QueueUnits, raw: bytes, start: int | None, end: int | None, limit: int
) -> int:
    for offset, size, tags, _, base, number, _, _ in BATCH_UNIT.iter_unpack(raw):
        if (start is not None and base + number <= start) or (end is not None and base >= end):
            continue
        if 0 < size and 0 <= offset <= limit - size:
            result.queue_offsets.append(base)
            result.offsets.append(offset)
            result.sizes.append(size)
            result.tags_codes.append(tags)
    return len(raw) // BATCH_UNIT.size


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

    def search(number: int, count: int | None) -> tuple[int, int, int]:
        path = f"{directory}/{names[number]}"
        try:
            return _count_leading(
                fs, path, count, unit_bytes, lambda place, size: size > 0 and place <= offset
            )
        except FileNotFoundError:  # retention removed it
            return 0, 0, 0

    count = first_where(0, len(names), lambda number: not search(number, 1)[0])
    found, place, size = search(count - 1, None) if count else (0, 0, 0)
    return place if found and size != BLANK_UNIT_SIZE else -1


def _count_leading(
    fs: FileSystem,
    path: str,
    count: int | None,
    unit_bytes: int,
    holds: Callable[[int, int], bool],
) -> tuple[int, int, int]:
    """Return how many of a file's leading units pass `holds`, and place and size of the last one.

    It looks at the first `count` units, or at all; after one that fails, all must fail.
    """
    last = 0, 0
    with contextlib.closing(fs.open(path, writable=False)) as file:

        def fails(number: int) -> bool:
            nonlocal last
            raw = file.pread(PLACE.size, number * unit_bytes)
            place = PLACE.unpack(raw) if len(raw) == PLACE.size else (0, 0)
            if len(raw) < PLACE.size or not holds(*place):
                return True
            last = place  # the search ends after it has seen the last one
            return False

        number = first_where(0, file.size // unit_bytes if count is None else count, fails)
        return number, *last
