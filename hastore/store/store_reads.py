"""What a store answers: pulls, records by place, by key and by time. No lock is taken."""

import enum
import struct
from dataclasses import dataclass

from hastore.errors import CorruptRecordError, StoreError
from hastore.store.consume_queue import Unit
from hastore.store.parts import StoreParts
from hastore.store.record import (
    BLANK_SIZE,
    MIN_RECORD_SIZE,
    V1_MAGIC,
    V2_MAGIC,
    Record,
    check_record,
    decode_record,
)
from hastore.store.retention import first_store_timestamp_ms

_HEAD = struct.Struct(">iI20xq")  # totalSize, magic, physicalOffset
_HOLE_UNITS = 4096  # positions without a record that one pull skips
_UNITS_MAX = 32_768  # of one pull


class PullStatus(enum.Enum):
    """How a pull ended."""

    FOUND = "FOUND"
    NO_NEW = "NO_NEW"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    OFFSET_TOO_LARGE = "OFFSET_TOO_LARGE"
    NO_SUCH_QUEUE = "NO_SUCH_QUEUE"


@dataclass(slots=True)
class PullResult:
    """Records as stored, one behind the other, and where the next pull goes on."""

    status: PullStatus
    next_queue_offset: int
    min_queue_offset: int
    max_queue_offset: int
    records: bytes = b""
    count: int = 0


class StoreReads:
    """Reads of a store that is open in this process; thread-safe."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._log = parts.log

    def pull(
        self,
        topic: str,
        queue_id: int,
        queue_offset: int,
        *,
        max_messages: int,
        max_bytes: int,
        limit_offset: int,
    ) -> PullResult:
        """Read records of a queue that end at or below `limit_offset`; at least one that is there.

        CorruptRecordError for damaged bytes: that range is served no more.
        """
        known = self._parts.queues.queue_range(topic, queue_id)
        if known is None:
            return PullResult(PullStatus.NO_SUCH_QUEUE, 0, 0, 0)
        low, high = known
        if queue_offset < low:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, low, low, high)
        if queue_offset >= high:
            large = queue_offset > high
            status = PullStatus.OFFSET_TOO_LARGE if large else PullStatus.NO_NEW
            return PullResult(status, high, low, high)
        wanted = max(1, min(max_messages, _UNITS_MAX))
        limit = min(limit_offset, self._log.max_offset)
        units = self._units(topic, queue_id, queue_offset, high, wanted)
        pieces: list[bytes] = []
        taken = 0
        count = 0
        place = queue_offset
        for unit in units[:wanted]:
            if unit.offset + unit.size > limit or (taken and taken + unit.size > max_bytes):
                break
            if unit.offset < self._log.min_offset:
                return PullResult(PullStatus.OFFSET_TOO_SMALL, unit.queue_offset + 1, low, high)
            pieces.append(self._checked(unit))
            taken += unit.size
            count += 1
            place = unit.queue_offset + 1
        if not pieces:
            if units and units[0].queue_offset > queue_offset:
                place = units[0].queue_offset
            return PullResult(PullStatus.NO_NEW, place, low, high)
        return PullResult(PullStatus.FOUND, place, low, high, b"".join(pieces), count)

    def _units(
        self, topic: str, queue_id: int, queue_offset: int, high: int, wanted: int
    ) -> list[Unit]:
        """Return units from a position on, over holes where the queue has positions without any."""
        while queue_offset < high:
            units = self._parts.queues.read(topic, queue_id, queue_offset, wanted)
            if units:
                return units
            queue_offset += wanted
            wanted = max(wanted, _HOLE_UNITS)
        return []

    def _checked(self, unit: Unit) -> bytes:
        with self._log.view(unit.offset, unit.size) as view:
            if check_record(view, 0, len(view), unit.offset) != unit.size:
                raise CorruptRecordError(
                    f"the record at offset {unit.offset} is damaged; see `hastore log verify`"
                )
            return bytes(view)

    def record_size(self, offset: int) -> int | None:
        """Return the size of the whole record at `offset` by its head alone; None without one."""
        log = self._log
        if not log.min_offset <= offset < log.max_offset:
            return None
        with log.view(offset, MIN_RECORD_SIZE) as view:
            if len(view) < MIN_RECORD_SIZE:
                return None
            size, magic, physical = _HEAD.unpack_from(view)
        if magic not in (V1_MAGIC, V2_MAGIC) or physical != offset or size < MIN_RECORD_SIZE:
            return None
        left = log.file_size - offset % log.file_size
        fits: bool = size + BLANK_SIZE <= left and offset + size <= log.max_offset
        return int(size) if fits else None

    def record_at(self, offset: int) -> Record | None:
        """Return the whole, valid record that begins at `offset`; None without one."""
        size = self.record_size(offset)
        if size is None:
            return None
        with self._log.view(offset, size) as view:
            if check_record(view, 0, len(view), offset) != size:
                return None
            return decode_record(view)

    def query_key(
        self, topic: str, key: str, *, max_messages: int, begin_ms: int, end_ms: int
    ) -> list[int]:
        """Return physical offsets of the records that have a key, the latest first."""
        found = []
        for offset in self._parts.index.query(
            topic, key, max_messages=max_messages, begin_ms=begin_ms, end_ms=end_ms
        ):
            record = self.record_at(offset)
            if record is not None and record.topic == topic and key in record.keys:
                found.append(offset)
        return found

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """Return the first queue offset stored at or after a time, else the end; 0: no queue."""
        found = self._parts.queues.find_by_time(
            topic, queue_id, timestamp_ms, self._store_timestamp_ms
        )
        return 0 if found is None else found

    def _store_timestamp_ms(self, offset: int) -> int | None:
        if not self._log.min_offset <= offset < self._log.max_offset:
            return None
        try:
            return first_store_timestamp_ms(self._log, offset)
        except StoreError:  # retention was faster
            return None


def walk_whole(parts: StoreParts, start: int) -> int:
    """Return the end of the last whole record, or blank, from a record's start on; heads only."""
    log = parts.log
    offset, end = start, log.max_offset
    while offset < end:
        left = log.file_size - offset % log.file_size
        with log.view(offset, left) as view:
            have = len(view)
            at = 0
            while have - at >= MIN_RECORD_SIZE or have - at >= BLANK_SIZE:
                size, magic = struct.unpack_from(">iI", view, at)
                if magic in (V1_MAGIC, V2_MAGIC):
                    whole = MIN_RECORD_SIZE <= size <= have - at
                else:  # a blank, whole when all of the file is there
                    whole = size == left - at == have - at
                if not whole:
                    return offset + at
                at += size
        if at < left:
            return offset + at
        offset += left
    return offset
