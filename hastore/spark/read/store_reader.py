"""Read a store in place: offsets from the consume queue files, records from mapped log files.

The reader takes no lock and never waits for the node that owns the store. It reads a hastore store
up to the readable offset, and a RocketMQ store up to its last whole record. Spark's driver fixes
that limit and passes it to the tasks. Meanwhile retention may remove files, and a failover may cut
the log: both are reported as lost positions, not as damage.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from hastore.errors import CorruptRecordError, PositionLostError, StoreError
from hastore.record.layout import BLANK_MAGIC, MIN_RECORD_SIZE, SIZE_AND_MAGIC
from hastore.spark.arrow.batch import BatchBuilder, QueueRows, cut_batches
from hastore.spark.arrow.inner_batches import unwrap
from hastore.spark.arrow.record_fields import Ints
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange
from hastore.store.offline.reader import LogFile, StoreReader

# Makes rows of records: of those at some places in the bytes of a file, which begins at a physical
# offset. The slice says which of the range's records they are.
Make = Callable[[memoryview, Ints, int, slice], list[pa.RecordBatch]]
UNITS_AT_ONCE = 65_536  # units (entries) of a consume queue held as arrays: 2 MB
RECORDS_AT_ONCE = 16_384  # records of the log held as arrays


class PathBackend:
    """A store's directory, read through its files."""

    def __init__(self, path: str, fail_on_data_loss: bool) -> None:
        self.where = path
        self._fail_on_data_loss = fail_on_data_loss
        self._opened: StoreReader | None = None

    def __enter__(self) -> Self:
        self._opened = StoreReader(self.where)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()

    @property
    def _reader(self) -> StoreReader:
        assert self._opened is not None, "used outside of `with`"
        return self._opened

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue with its range of offsets below the current limit."""
        return {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for topic, queues in self._reader.topics().items()
            for queue_id, bounds in queues.items()
        }

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        bounds = self._reader.queue_range(*partition)
        found = self._reader.queue_offset_by_time(*partition, timestamp_ms)
        return None if bounds is None or found is None or found >= bounds[1] else found

    def limit_offset(self) -> int:
        """Return the physical offset at which reading ends now."""
        return self._reader.limit_offset

    def log_range(self) -> tuple[int, int]:
        """Return the physical offsets `[start, end)` that can be read now."""
        start = self._reader.min_offset
        return start, max(start, self._reader.limit_offset)

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range; read UNITS_AT_ONCE queue units at a time."""
        for start in range(span.start, span.end, UNITS_AT_ONCE):
            end = min(start + UNITS_AT_ONCE, span.end)
            found = self._reader.queue_units(
                span.topic, span.partition, start, end, limit=span.limit
            )
            numbers = np.array(found.queue_offsets, np.int64)
            offsets = np.array(found.offsets, np.int64)
            sizes = np.array(found.sizes, np.int64)
            if self._is_batch_queue(span):
                yield from self._read_inner_batches(span, builder, (start, end), offsets, sizes)
                continue
            self._check_complete(span, start, end, len(numbers))

            def make(
                data: memoryview, places: Ints, base: int, rows: slice, numbers: Ints = numbers
            ) -> list[pa.RecordBatch]:
                own = QueueRows(span.topic, span.partition, numbers[rows])
                return [builder.build(data, places, base, own)]

            yield from self._build(offsets, sizes, make)

    def _read_inner_batches(
        self,
        span: QueueRange,
        builder: BatchBuilder,
        window: tuple[int, int],
        offsets: Ints,
        sizes: Ints,
    ) -> Iterator[pa.RecordBatch]:
        covered = 0

        def make(data: memoryview, places: Ints, base: int, rows: slice) -> list[pa.RecordBatch]:
            nonlocal covered
            found = unwrap(data, places, base, *window, check_crcs=builder.check_crcs)
            covered += found.covered
            return list(found.batches(builder, span.topic, span.partition))

        yield from self._build(offsets, sizes, make)
        self._check_complete(span, *window, covered)

    def _check_complete(self, span: QueueRange, start: int, end: int, found: int) -> None:
        if found < end - start:
            self._lose(f"{end - start - found} messages of {span.name} in [{start}, {end})")

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the records that begin in a range; the size of each leads to the next one."""
        try:
            at = self._reader.record_start_at(span.start)
        except StoreError as gone:
            self._lose(f"the records from offset {span.start} on ({gone})")
            at = max(self._reader.min_offset, span.start)
        for file in self._reader.files():
            if not file.start <= at < min(file.end, span.end):
                continue
            try:
                data = self._reader.file_view(file)
            except FileNotFoundError:
                self._lose(f"the records in {file.path}, which is gone")
                at = file.end
                continue
            while at < min(file.end, span.end):
                found, at = _walk(data, file, at, span)
                offsets = np.array(found, np.int64)
                yield from self._build(
                    offsets,
                    np.diff(offsets, append=at),
                    lambda data, places, base, _: [builder.build(data, places, base, None)],
                )

    def _build(self, offsets: Ints, sizes: Ints, make: Make) -> Iterator[pa.RecordBatch]:
        """Yield the records at `offsets` (ascending) in batches; no batch spans two files."""
        files = self._reader.files()
        placed = 0
        for file in files:
            first, stop = np.searchsorted(offsets, (file.start, file.end)).tolist()
            placed += stop - first
            for part in cut_batches(offsets[first:stop], sizes[first:stop]):
                rows = slice(first + part.start, first + part.stop)
                yield from self._build_some(file, offsets[rows], sizes[rows], rows, make)
        if placed < len(offsets):
            self._lose(f"{len(offsets) - placed} records in files that are gone")

    def _build_some(
        self, file: LogFile, offsets: Ints, sizes: Ints, rows: slice, make: Make
    ) -> list[pa.RecordBatch]:
        end = int(offsets[-1] + sizes[-1])
        try:
            batches = make(self._reader.file_view(file), offsets - file.start, file.start, rows)
        except FileNotFoundError:
            self._lose(f"{len(offsets)} records in {file.path}, which is gone")
            return []
        except CorruptRecordError:
            if not self._was_cut(end):
                raise
        else:
            if not self._was_cut(end):
                return batches
        self._lose(f"records that reach to offset {end}, beyond the readable end of the log")
        return []

    def _was_cut(self, end: int) -> bool:
        """Return whether bytes below `end` are no longer readable, after a cut by a failover."""
        return self._reader.is_hastore and self._reader.limit_offset < end

    def _is_batch_queue(self, span: QueueRange) -> bool:
        """Return whether this is a queue of inner batches, each with several messages."""
        return Path(self.where, "batchconsumequeue", span.topic, str(span.partition)).is_dir()

    def _lose(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise PositionLostError(
                f"{self.where} lost {what}: removed by retention or cut by a failover during the "
                "read; set failOnDataLoss to false to read the messages that are available"
            )


def _walk(data: memoryview, file: LogFile, at: int, span: LogRange) -> tuple[list[int], int]:
    """Follow the sizes of records from `at`; return their offsets, and where to continue.

    The walk stops at bytes that cannot be a record. It returns their offset too, so that
    RecordFields raises an error that names the offset.
    """
    found: list[int] = []
    stop = min(file.end, span.end)
    while at < stop and len(found) < RECORDS_AT_ONCE:
        left = file.end - at
        size, magic = 0, 0
        if left >= SIZE_AND_MAGIC.size:
            size, magic = SIZE_AND_MAGIC.unpack_from(data, at - file.start)
        if magic == BLANK_MAGIC and size == left:
            return found, file.end
        plausible = MIN_RECORD_SIZE <= size <= left
        if at + size > span.limit and (plausible or span.limit - at < SIZE_AND_MAGIC.size):
            return found, span.end  # the log's limit lies inside this record
        found.append(at)
        if not plausible:
            return found, span.end
        at += size
    return found, at
