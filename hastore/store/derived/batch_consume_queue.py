"""Queues of RocketMQ's inner batches. Each batch is one record and has one unit.

    physicalOffset (8)  size (4)  tagsCode (8)  storeTimestamp (8)
    INNER_BASE (8): queue offset of the first message   INNER_NUM (2): messages   -1 (4)   0 (4)

A unit's number is not a queue offset; a binary search finds the unit of a queue offset.
"""

import struct
from collections.abc import Callable

from hastore.store.derived.contract import Dispatched
from hastore.store.derived.unit_files import FileCache, UnitFiles, first_where

BATCH_UNIT = struct.Struct(">qiqqqhii")
_Unit = tuple[int, int, int, int, int, int, int, int]


class BatchConsumeQueue:
    """One queue of inner batches. Replay's thread writes; any thread reads."""

    def __init__(self, cache: FileCache, directory: str, units_per_file: int) -> None:
        self.files = UnitFiles(cache, directory, BATCH_UNIT.size, units_per_file)
        self.min_queue_offset = 0
        self.max_queue_offset = 0
        self._last_offset = -1

    def put(self, record: Dispatched, base: int, count: int) -> None:
        """Write the unit of a batch of `count` messages from queue offset `base`.

        Ignores a record that has its unit already. Raises OSError.
        """
        if record.offset <= self._last_offset:
            return
        first = self.files.end == 0
        self.files.append(
            BATCH_UNIT.pack(
                record.offset, record.size, record.tags_code, record.store_timestamp_ms,
                base, count, -1, 0,
            )
        )  # fmt: skip
        self._last_offset = record.offset
        if first:
            self.min_queue_offset = base
        self.max_queue_offset = base + count

    def read(self, queue_offset: int, max_units: int) -> list[tuple[int, int, int, int]]:
        """Return (first queue offset, offset, size, tagsCode) of batches.

        The first batch contains `queue_offset`. The list is empty if the queue does not contain it.
        """
        if not self.min_queue_offset <= queue_offset < self.max_queue_offset:
            return []
        first = self._first_where(lambda unit: unit[4] + unit[5] > queue_offset)
        raw = self.files.read(first, max_units)
        raw = raw[: len(raw) - len(raw) % BATCH_UNIT.size]
        return [
            (base, offset, size, tags)
            for offset, size, tags, _, base, _, _, _ in BATCH_UNIT.iter_unpack(raw)
            if size > 0
        ]

    def find_by_time(self, timestamp_ms: int) -> int:
        """Return the first queue offset of the first batch stored at or after a time.

        Returns the queue's end if there is no such batch.
        """
        unit = self._unit(self._first_where(lambda unit: unit[3] >= timestamp_ms))
        return self.max_queue_offset if unit is None else max(unit[4], self.min_queue_offset)

    def load(self, limit: int) -> None:
        """Find the files and cut them to `limit`."""
        self.files.load(limit)
        self._settle(0)

    def cut(self, limit: int) -> None:
        """Drop batches whose record ends beyond `limit`."""
        self.files.cut(limit)
        self._settle(0)

    def delete_before(self, min_offset: int) -> None:
        """Remove whole files of records below `min_offset`."""
        self.files.delete_before(min_offset)
        self._settle(min_offset)

    def _settle(self, min_offset: int) -> None:
        last = self._unit(self.files.end - 1)
        first = self._unit(self.files.first_at(min_offset))
        self._last_offset = -1 if last is None else last[0]
        self.max_queue_offset = 0 if last is None else last[4] + last[5]
        self.min_queue_offset = self.max_queue_offset if first is None else first[4]

    def _first_where(self, holds: Callable[[_Unit], bool]) -> int:
        """Return the number of the first unit for which `holds`; from it on it holds for all."""
        low = self.files.starts[0] if self.files.starts else 0
        return first_where(
            low, self.files.end, lambda n: (unit := self._unit(n)) is not None and holds(unit)
        )

    def _unit(self, number: int) -> _Unit | None:
        raw = self.files.read(number, 1) if number >= 0 else b""
        if len(raw) < BATCH_UNIT.size:
            return None
        unit: _Unit = BATCH_UNIT.unpack(raw)
        return unit
