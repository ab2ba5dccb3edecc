"""Build Arrow RecordBatches, column by column, from raw records of the log or of a pull's reply."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hastore.errors import CorruptRecordError
from hastore.heap import keep_freed
from hastore.record import compression
from hastore.record.codec import Host
from hastore.record.layout import FLAG_COMPRESSED
from hastore.record.message_filter import MessageFilter
from hastore.record.properties import NULL
from hastore.spark.arrow.record_fields import (
    Bools,
    Ints,
    PropertyScan,
    RecordFields,
    list_values,
    slice_values,
)
from hastore.spark.arrow.schema import TIMESTAMP_TYPE_LOG_APPEND, Column, Projection

# A batch costs 0.25 to 0.5 ms however few rows it has, and one of much more than 2 MiB takes new
# memory each time. These were among the fastest sizes measured, with bodies of 200 B and of 1 KiB;
# a node's reply, of about 2 MiB, is one batch.
ROWS_PER_BATCH = 8_000
BYTES_PER_BATCH = 2_400_000  # the most of a batch; a larger record is a batch of its own
MADE_BYTES_PER_BATCH = compression.MAX_BODY_BYTES  # the same, of what a batch's records become
_KEPT_BYTES = 3 * BYTES_PER_BATCH  # of freed memory: copies of bodies for the batch and the CRCs
TIMESTAMP_MAX_MS = (2**63 - 1) // 1000  # the year 294247; the least is as far from 1970
_SMALL_BODY_BYTES = 2048  # mean size up to which bodies are copied before the CRC check
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class QueueRows:
    """The queue and queue offsets that a batch's rows get; record headers may have others."""

    topic: str
    partition: int
    offsets: Ints

    def only(self, rows: Bools) -> "QueueRows":
        """Return the chosen rows."""
        return QueueRows(self.topic, self.partition, self.offsets[rows])


class BatchTooLargeError(Exception):
    """Records become too many bytes for one batch: bodies of MBs may be stored as some KB.

    Those before `position` fit, and are one at least: build them alone, then the others.
    """

    def __init__(self, position: int) -> None:
        super().__init__(f"the record at byte {position} needs a batch of its own")
        self.position = position


class BatchBuilder:
    """Turn records into RecordBatches of one projection.

    With `check_crcs` the CRC of every body is checked, if the projection has the column `value` or
    `record`. Otherwise damage within bodies goes unnoticed. Without `decompress` compressed bodies
    stay as they are stored. Only messages that `wanted` matches become rows.
    """

    def __init__(
        self,
        projection: Projection,
        *,
        check_crcs: bool = True,
        decompress: bool = True,
        wanted: MessageFilter | None = None,
    ) -> None:
        keep_freed(_KEPT_BYTES)
        self.wanted = wanted
        # Whether a row so far is a record of several messages, which has more offsets than one.
        self.left_whole = False
        self._columns = projection.columns
        self._schema = projection.arrow_schema()
        self._decompress = decompress
        bodies = (Column.VALUE, Column.RECORD)
        self.check_crcs = check_crcs and any(column in self._columns for column in bodies)

    def note_left_whole(self) -> None:
        """Note that a row stands for more offsets than one."""
        self.left_whole = True

    def build(
        self,
        data: memoryview,
        positions: Ints,
        base: int | None,
        queue: QueueRows | None,
        fields: RecordFields | None = None,
    ) -> pa.RecordBatch | None:
        """Return one batch of the records at `positions`, which must ascend; None: none is wanted.

        `base` is the physical offset of `data[0]`, or None if unknown. Topic, partition and offset
        come from `queue`, or from the record headers if `queue` is None. `fields` are those of the
        records, if the caller has them. Raises CorruptRecordError, and BatchTooLargeError.
        """
        if fields is None:
            fields = RecordFields(data, positions, base)
        if self.wanted is not None:
            matching = _matching(self.wanted, data, fields)
            if not matching.any():
                return None
            if not matching.all():
                fields = RecordFields(data, positions[matching], base)
                queue = None if queue is None else queue.only(matching)
        batch = _Batch(data, fields, queue, self._decompress)
        if self.check_crcs:
            batch.check_bodies()
        arrays = [
            batch.column(column, field.type)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _matching(wanted: MessageFilter, data: memoryview, fields: RecordFields) -> Bools:
    """Return which records a filter matches by their properties."""
    found: Bools
    if wanted.sql is None:
        properties = PropertyScan(pa.py_buffer(data), fields.property_starts, fields.property_ends)
        tags = properties.tags(pa.binary())
        names = pa.array(sorted(wanted.tags), pa.binary())
        found = pc.is_in(tags, names).to_numpy(zero_copy_only=False)
        return found
    bounds = zip(fields.property_starts.tolist(), fields.property_ends.tolist(), strict=True)
    matches = (wanted.matches(bytes(data[start:end])) for start, end in bounds)
    found = np.fromiter(matches, np.bool_, len(fields.positions))
    return found


def build_parts(
    build: Callable[[slice], pa.RecordBatch | None], positions: Ints
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of the records at `positions`, as few as may be.

    `build` makes the batch of some of them; it raises what `BatchBuilder.build` raises.
    """
    start, stop = 0, len(positions)
    while start < len(positions):
        try:
            batch = build(slice(start, stop))
        except BatchTooLargeError as large:
            stop = int(np.searchsorted(positions, large.position))
            continue
        if batch is not None:  # a filter may match none of them
            yield batch
        start, stop = stop, len(positions)


def cut_batches(positions: Ints, sizes: Ints) -> Iterator[slice]:
    """Cut ordered records into batches.

    Each batch has at most ROWS_PER_BATCH rows and BYTES_PER_BATCH bytes (or one larger record), and
    spans less than 2 GiB.
    """
    ends = np.cumsum(sizes)
    places = positions + sizes
    start = 0
    while start < len(positions):
        done = int(ends[start - 1]) if start else 0
        by_bytes = int(np.searchsorted(ends, done + BYTES_PER_BATCH, side="right"))
        span = int(positions[start]) + _INT32_MAX
        by_span = int(np.searchsorted(places, span, side="right"))
        stop = max(start + 1, min(start + ROWS_PER_BATCH, by_bytes, by_span))
        yield slice(start, min(stop, len(positions)))
        start = stop


class _Batch:
    """The records of one batch, whose columns are made on request."""

    def __init__(
        self, data: memoryview, fields: RecordFields, queue: QueueRows | None, decompress: bool
    ) -> None:
        self._data = data
        self._decompress = decompress
        self._buffer: pa.Buffer = pa.py_buffer(data)
        self._fields = fields
        self._queue = queue
        self._count = len(fields.positions)

    def column(self, column: Column, kind: pa.DataType) -> pa.Array:
        fields = self._fields
        match column:
            case Column.KEY:
                return self._properties.values(b"KEYS", kind)
            case Column.TAGS:
                return self._properties.tags(kind)
            case Column.HEADERS:
                return self._properties.headers(kind)
            case Column.VALUE:
                return self._values(kind)
            case Column.TOPIC:
                if self._queue is not None:
                    return pa.repeat(pa.scalar(self._queue.topic, kind), self._count)
                return slice_values(self._buffer, fields.topic_starts, fields.topic_ends, kind)
            case Column.TIMESTAMP:
                return _timestamps(fields.store_timestamps_ms, kind)
            case Column.BORN_TIMESTAMP:
                return _timestamps(fields.born_timestamps_ms, kind)
            case Column.TIMESTAMP_TYPE:
                return pa.repeat(pa.scalar(TIMESTAMP_TYPE_LOG_APPEND, kind), self._count)
            case Column.BORN_HOST:
                return self._hosts(born=True)
            case Column.STORE_HOST:
                return self._hosts(born=False)
            case Column.MESSAGE_ID:
                return self._message_ids()
            case Column.RECORD:
                return slice_values(self._buffer, fields.positions, fields.property_ends, kind)
            case Column.PARTITION if self._queue is not None:
                return pa.repeat(pa.scalar(self._queue.partition, kind), self._count)
            case _:
                return pa.array(self._numbers(column)).cast(kind)

    def _numbers(self, column: Column) -> Ints:
        fields = self._fields
        match column:
            case Column.PARTITION:
                return fields.queue_ids
            case Column.OFFSET:
                return fields.queue_offsets if self._queue is None else self._queue.offsets
            case Column.PHYSICAL_OFFSET:
                return fields.physical_offsets
            case Column.SIZE:
                return fields.sizes
            case Column.SYS_FLAG:
                return fields.sys_flags
            case Column.BODY_CRC:
                return fields.body_crcs
            case Column.RECONSUME_TIMES:
                return fields.reconsume_times
            case _:
                raise AssertionError(f"{column} is not a column of numbers")

    @cached_property
    def _properties(self) -> PropertyScan:
        fields = self._fields
        return PropertyScan(self._buffer, fields.property_starts, fields.property_ends)

    def check_bodies(self) -> None:
        """Check the CRC of every body. Raises CorruptRecordError.

        The CRC of a memoryview takes longer than that of a bytes object, unless the body is large.
        So small bodies are copied first: one call makes the bytes objects of a batch.
        """
        fields = self._fields
        bodies: Iterable[bytes | memoryview] = fields.body_views()
        lengths = fields.body_ends - fields.body_starts
        if int(lengths.sum()) <= _SMALL_BODY_BYTES * self._count and fields.in_order:
            bodies = list_values(self._bodies)
        fields.check_bodies(bodies)

    @cached_property
    def _bodies(self) -> pa.Array:
        """The bodies as stored, which may be compressed."""
        fields = self._fields
        return slice_values(self._buffer, fields.body_starts, fields.body_ends, pa.binary())

    def _values(self, kind: pa.DataType) -> pa.Array:
        nulls = self._nulls()
        values = self._texts(kind)
        return values if nulls is None else pc.if_else(nulls, pa.scalar(None, kind), values)

    def _nulls(self) -> pa.Array | None:
        """Return which messages have the value null; None if there is no empty body at all."""
        fields = self._fields
        empty = fields.body_ends == fields.body_starts
        if not empty.any():
            return None
        marks = self._properties.values(NULL.encode(), pa.binary())
        return pc.and_(pa.array(empty), marks.is_valid())

    def _texts(self, kind: pa.DataType) -> pa.Array:
        """Return the bodies, decompressed unless the option says otherwise."""
        fields = self._fields
        packed = (fields.sys_flags & FLAG_COMPRESSED) != 0
        if not self._decompress or not packed.any():
            return self._bodies
        values = self._bodies.to_pylist()
        made_bytes = 0
        for row in np.flatnonzero(packed):
            values[row] = decompress(
                values[row], int(fields.sys_flags[row]), int(fields.physical_offsets[row])
            )
            made_bytes += len(values[row])
            if made_bytes > MADE_BYTES_PER_BATCH and row:
                raise BatchTooLargeError(int(fields.positions[row]))
        return pa.array(values, kind)

    def _hosts(self, *, born: bool) -> pa.Array:
        fields = self._fields
        if (fields.born_is_ipv6 if born else fields.store_is_ipv6).any():
            raws = self._raw_hosts(born=born)
            texts = [Host(raw[:-4], int.from_bytes(raw[-4:], signed=True)).text for raw in raws]
            return pa.array(texts, pa.string())
        block = fields.host_rows(np.arange(self._count), born=born, ipv6=False)
        unique, inverse = np.unique(block.view(">u8").ravel(), return_inverse=True)
        raws = [int(value).to_bytes(8) for value in unique]
        texts = [Host(raw[:4], int.from_bytes(raw[4:], signed=True)).text for raw in raws]
        return pa.array(texts, pa.string()).take(pa.array(inverse))

    def _raw_hosts(self, *, born: bool) -> list[bytes]:
        fields = self._fields
        is_ipv6 = fields.born_is_ipv6 if born else fields.store_is_ipv6
        result = [b""] * self._count
        for wide in (False, True):
            rows = np.flatnonzero(is_ipv6 == wide)
            block = fields.host_rows(rows, born=born, ipv6=wide)
            for row, raw in zip(rows.tolist(), block, strict=True):
                result[row] = raw.tobytes()
        return result

    def _message_ids(self) -> pa.Array:
        """Return storeHost and physicalOffset as upper-case hex: 32 characters, 56 with IPv6."""
        fields = self._fields
        offsets: npt.NDArray[np.uint8] = (
            fields.physical_offsets.astype(">i8").view(np.uint8).reshape(-1, 8)
        )
        if fields.store_is_ipv6.any():
            hosts = self._raw_hosts(born=False)
            ids = [
                (host + offset.tobytes()).hex().upper()
                for host, offset in zip(hosts, offsets, strict=True)
            ]
            return pa.array(ids, pa.string())
        raw = np.hstack(
            (fields.host_rows(np.arange(self._count), born=False, ipv6=False), offsets)
        ).tobytes()
        places = np.arange(0, 32 * self._count + 1, 32, dtype=np.int32)
        text = raw.hex().upper().encode("ascii")
        buffers = [None, pa.py_buffer(places), pa.py_buffer(text)]
        return pa.Array.from_buffers(pa.string(), self._count, buffers)


def _timestamps(milliseconds: Ints, kind: pa.DataType) -> pa.Array:
    """Return Spark's microseconds; a time that they cannot hold becomes the nearest one."""
    if milliseconds.min() < -TIMESTAMP_MAX_MS or milliseconds.max() > TIMESTAMP_MAX_MS:
        milliseconds = np.clip(milliseconds, -TIMESTAMP_MAX_MS, TIMESTAMP_MAX_MS)
    return pa.array(milliseconds * 1000).view(kind)


def decompress(body: bytes, sys_flag: int, physical_offset: int) -> bytes:
    """Undo the compression that sysFlag names, without other libraries than Arrow.

    Raises CorruptRecordError, which names the remedy, as `compression.decompress` says.
    """
    try:
        return compression.decompress(
            body, sys_flag, f"the record at offset {physical_offset}", _INFLATES
        )
    except CorruptRecordError as failure:
        raise CorruptRecordError(
            f"{failure}: set the option decompress to false, or export with --no-decompress"
        ) from failure


def _inflate(body: bytes, most: int, *, codec: str) -> bytes:
    try:
        with pa.CompressedInputStream(pa.BufferReader(body), codec) as stream:
            text: bytes = stream.read(most)
            return text
    except OSError as failure:
        raise compression.BadStreamError(str(failure)) from failure


_INFLATES = {codec: partial(_inflate, codec=codec) for codec in ("lz4", "zstd")}
