"""Turn the rows of an Arrow batch into records of the log, each with its identity, ready to be put.

The identity of a row is a producer id and a number, `batch << 32 | row`. A number has at most 18
digits, so the batches of a producer end at 2**27; each further 2**27 batches have a producer of
their own.

Arrow joins the parts of all rows of a batch by one call: header, body, topic, properties. Python
code runs per row only to compute the body's CRC, and the queue of a row with a key. The bytes are
those of `RecordEncoder` (client/producer/preparer.py); a test compares them.
"""

import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from zlib_ng.zlib_ng import crc32

from hastore.errors import MessageIllegalError, UsageError
from hastore.record import compression
from hastore.record.codec import Host
from hastore.record.delays import TIMERS
from hastore.record.layout import (
    CRC_MASK,
    FLAG_BORN_IPV6,
    FLAG_COMPRESSED,
    MAX_PROPERTIES_BYTES,
    V1_MAGIC,
    numpy_format,
    offset_of,
)
from hastore.record.properties import (
    NODE_MARKS,
    NULL,
    PRODUCER_PROPERTIES,
)
from hastore.record.topic_records import MAX_QUEUES
from hastore.spark.sink.options import SinkColumns, check_destination

ROW_BITS = 32
_BATCH_BITS = 27  # 2**59 has 18 digits
MAX_ROWS = 1 << ROW_BITS


@dataclass(frozen=True)
class TaskIdentity:
    """The producer of one task, and the number of its first row.

    `query` and `batch` are those of a stream, for error texts.
    """

    producer_id: str
    first: int
    query: str | None = None
    batch: int = 0

    @property
    def end(self) -> int:
        """The first number that is beyond those of this task."""
        return self.first + MAX_ROWS


def stream_task(query_id: str, batch: int, partition: int) -> TaskIdentity:
    """Return the identity of a task of a streaming query."""
    era, place = batch >> _BATCH_BITS, batch & ((1 << _BATCH_BITS) - 1)
    producer_id = _producer("stream", query_id, era, partition)
    return TaskIdentity(producer_id, place << ROW_BITS, query_id, batch)


def batch_task(write_id: str, partition: int) -> TaskIdentity:
    """Return the identity of a task of a batch write."""
    return TaskIdentity(_producer("write", write_id, 0, partition), 0)


def number_of(identity: TaskIdentity, row: int) -> int:
    """Return the number of a row. Raises UsageError beyond 2**32 rows."""
    if row > MAX_ROWS:
        raise UsageError(
            f"a partition has more than {MAX_ROWS:,} rows; repartition the data before the write"
        )
    return identity.first + row


def _producer(kind: str, name: str, era: int, partition: int) -> str:
    text = f"{kind}\0{name}\0{era}\0{partition}"
    # Letters and digits alone: nodes read such an id fastest.
    return "spark" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


# -- records ---------------------------------------------------------------------------------------

Ints = npt.NDArray[np.int64]
ROWS_PER_CHUNK = 256  # a frame of the producer has at most so many records
BYTES_PER_CHUNK = 512 * 1024
_ROWS_PER_BUILD = 2_048
_BYTES_PER_BUILD = 16 * 1024 * 1024
MAX_BODY_BYTES = 4 * 1024 * 1024
_SEPARATORS = (1, 2)
_ZSTD_FLAGS = FLAG_COMPRESSED | 2 << 8
_ZSTD_LEVEL = 5  # of the producers
_FIELDS = ("size", "magic", "body_crc", "queue_id", "sys_flag", "born_timestamp_ms", "body_length")
# No headers: what is written otherwise, what a node would carry out, and the marks of messages in
# which other names are not the user's. The source shows none of them, but all others.
REFUSED_HEADERS = (
    PRODUCER_PROPERTIES | NODE_MARKS | TIMERS | frozenset(("DELAY", "TRAN_MSG", "UNIQ_KEY"))
)
_NULL_VALUE = f"{NULL}\x011\x02".encode()


# Constants of Arrow are made on first use: pyarrow then imports pandas, if it is there, which a
# process that only plans does not need.


@cache
def _reserved() -> pa.Array:
    return pa.array(sorted(REFUSED_HEADERS), pa.string())


@cache
def _constant(value: bytes) -> pa.Scalar:
    return pa.scalar(value, pa.binary())


@dataclass(frozen=True)
class Chunk:
    """Some records for one put; the first is row `first_row` of the partition."""

    first_row: int
    rows: int
    topic: str
    payload: bytes


class RowError(UsageError):
    """A row that cannot be a message. The text is its problem, without the row."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row}: {problem}")
        self.row = row
        self.problem = problem


class RecordBuilder:
    """Build the records of one task.

    `topic` is that of all rows, `default_topic` that of rows without one. `queues_of` returns how
    many queues a topic has for messages without one.
    """

    def __init__(
        self,
        columns: SinkColumns,
        *,
        topic: str | None,
        default_topic: str | None = None,
        partition: int,
        producer_id: str,
        first_number: int,
        queues_of: Callable[[str], int],
        born_host: Host,
    ) -> None:
        self._columns = columns
        self._topic = default_topic if topic is None and columns.topic is None else topic
        self._default_topic = default_topic
        self._partition = partition
        self._numbered = pa.scalar(f"HS_PID\x01{producer_id}\x02HS_SEQ\x01".encode(), pa.binary())
        self._first_number = first_number
        self._queues_of = queues_of
        self._born_host = born_host
        self._flags = FLAG_BORN_IPV6 if born_host.is_ipv6 else 0
        self._header = np.dtype(
            {
                "names": list(_FIELDS),
                "formats": [numpy_format(name) for name in _FIELDS],
                "offsets": [offset_of(name, ipv6_flags=self._flags) for name in _FIELDS],
                "itemsize": offset_of("body", ipv6_flags=self._flags),
            }
        )
        self._topics: dict[str, bytes] = {}

    def build(self, batch: pa.RecordBatch, first_row: int, born_ms: int) -> Iterator[Chunk]:
        """Yield the records of a batch whose first row is row `first_row` of the partition.

        Raises RowError for the first row found that cannot be a message.
        """
        for rows in _slices(batch, self._columns.value):
            yield from self._build(rows, first_row, born_ms)
            first_row += rows.num_rows

    def _build(self, rows: pa.RecordBatch, first_row: int, born_ms: int) -> Iterator[Chunk]:
        count = rows.num_rows
        bodies = _bytes_of(rows.column(self._columns.value))
        nulls = _constant(b"")
        if bodies.null_count:
            nulls = pc.if_else(bodies.is_null(), _constant(_NULL_VALUE), nulls)
            bodies = bodies.fill_null(b"")
        key, tags = self._text(rows, "key", first_row), self._text(rows, "tags", first_row)
        properties = _join(
            _property(b"KEYS\x01", key),
            _property(b"TAGS\x01", tags),
            self._headers(rows, first_row),
            nulls,
            self._numbered,
            _numbers(self._first_number + first_row, count),
            _constant(b"\x02"),
        )
        topics, names = self._topic_parts(rows, first_row)
        bodies, body_flags = _fitting(bodies)
        body_sizes, property_sizes = _lengths(bodies), _lengths(properties)
        _refuse(
            body_sizes > MAX_BODY_BYTES,
            first_row,
            lambda at: (
                f"its body has {body_sizes[at]} bytes; at most {MAX_BODY_BYTES} fit in a message, "
                "perhaps compressed"
            ),
        )
        _refuse(
            property_sizes > MAX_PROPERTIES_BYTES,
            first_row,
            lambda at: (
                f"its key, tags and headers have {property_sizes[at]} bytes; at most "
                f"{MAX_PROPERTIES_BYTES} fit in a message"
            ),
        )
        headers = np.zeros(count, self._header)
        topic_sizes = len(topics.as_py()) if isinstance(topics, pa.Scalar) else _lengths(topics)
        headers["size"] = self._header.itemsize + body_sizes + topic_sizes + 2 + property_sizes
        headers["magic"] = V1_MAGIC
        headers["body_crc"] = _crcs(bodies)
        headers["queue_id"] = self._queue_ids(rows, key, names, first_row)
        headers["sys_flag"] = body_flags | self._flags
        headers["born_timestamp_ms"] = born_ms
        headers["body_length"] = body_sizes
        raw = headers.view(np.uint8).reshape(count, self._header.itemsize)
        at, packed = offset_of("born_host", ipv6_flags=self._flags), self._born_host.packed
        raw[:, at : at + len(packed)] = np.frombuffer(packed, np.uint8)
        records = _join(
            _fixed(raw),
            bodies,
            topics,
            _fixed(property_sizes.astype(">u2").view(np.uint8).reshape(count, 2)),
            properties,
        )
        yield from _chunks(records, first_row, names)

    # -- parts of the rows

    def _text(self, rows: pa.RecordBatch, name: str, first_row: int) -> pa.Array | None:
        """Return the column `key` or `tags` as bytes; None without the column."""
        place = getattr(self._columns, name)
        if place is None:
            return None
        values = _bytes_of(rows.column(place))
        _refuse_separators(values, None, first_row, f"column {name!r}")
        return values

    def _headers(self, rows: pa.RecordBatch, first_row: int) -> pa.Array | pa.Scalar:
        """Return each row's headers as properties."""
        place = self._columns.headers
        if place is None:
            return _constant(b"")
        lists = rows.column(place)
        pairs = lists.flatten()
        offsets = lists.offsets.to_numpy()
        counts = np.diff(offsets)
        if lists.null_count:
            counts = np.where(lists.is_null().to_numpy(zero_copy_only=False), 0, counts)
        owners = np.repeat(np.arange(len(lists)), counts)
        names, values = pairs.field("key"), _bytes_of(pairs.field("value"))

        def refuse(bad: pa.Array, problem: str) -> None:
            found = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
            if len(found):
                shown = names[found[0]].as_py()
                raise RowError(first_row + int(owners[found[0]]), problem.format(name=shown))

        refuse(pc.or_(pairs.is_null(), names.is_null()), "a header is null, or its key is")
        refuse(values.is_null(), "header {name!r} has no value; a property has one, perhaps empty")
        refuse(
            pc.is_in(names, _reserved()),
            "header {name!r} is a name that hastore or RocketMQ reserves: write the key and the "
            "tags as columns 'key' and 'tags', and rename other headers",
        )
        names = _bytes_of(names)
        _refuse_separators(names, owners, first_row, "a header's key")
        _refuse_separators(values, owners, first_row, "a header's value")
        bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        text = _join(names, _constant(b"\x01"), values, _constant(b"\x02"))
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(bounds), text), _constant(b""))
        return joined

    def _topic_parts(
        self, rows: pa.RecordBatch, first_row: int
    ) -> tuple[pa.Array | pa.Scalar, pa.Array | str]:
        """Return each row's topic after its length, and the names; one value if all are equal."""
        if self._topic is not None:
            return pa.scalar(self._topic_bytes(self._topic), pa.binary()), self._topic
        assert self._columns.topic is not None
        values = rows.column(self._columns.topic)
        if self._default_topic is not None:
            values = values.fill_null(self._default_topic)
        _refuse_nulls(
            values, first_row, "column 'topic' is null; set the option 'topic', or fill it"
        )
        encoded = values.dictionary_encode()
        parts: list[bytes] = []
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            try:
                parts.append(self._topic_bytes(name))
            except MessageIllegalError as failure:
                row = pc.index(encoded.indices, code).as_py()
                raise RowError(first_row + row, str(failure)) from failure
        if len(parts) == 1:
            return pa.scalar(parts[0], pa.binary()), encoded.dictionary[0].as_py()
        return pa.array(parts, pa.binary()).take(encoded.indices), values

    def _topic_bytes(self, name: str) -> bytes:
        """Return a topic after its length; raises MessageIllegalError."""
        found = self._topics.get(name)
        if found is None:
            check_destination(name)
            found = self._topics[name] = bytes((len(name),)) + name.encode()
        return found

    def _queue_ids(
        self, rows: pa.RecordBatch, key: pa.Array | None, topics: pa.Array | str, first_row: int
    ) -> Ints:
        """Return each row's queue: its `partition`, else by its key, else in turn."""
        count, queues = len(rows), self._queue_counts(topics)
        ids: Ints = (np.arange(count) + first_row + self._partition) % queues
        if key is not None and key.null_count < count:
            crc, counts = zlib.crc32, np.broadcast_to(queues, count).tolist()
            for row, value in enumerate(key.to_pylist()):
                if value is not None:
                    ids[row] = crc(value) % counts[row]
        place = self._columns.partition
        if place is None:
            return ids
        given = rows.column(place)
        wanted = given.fill_null(0).to_numpy()
        _refuse(
            wanted < 0, first_row, lambda at: f"column 'partition' is {wanted[at]}; it is a queue"
        )
        # A greater one is of a whole cluster that was read: its lower part is the queue.
        wanted = wanted % MAX_QUEUES
        return np.where(given.is_valid().to_numpy(zero_copy_only=False), wanted, ids)

    def _queue_counts(self, topics: pa.Array | str) -> Ints:
        """Return how many queues the topic of each row has; one number if all are equal."""
        if isinstance(topics, str):
            return np.array(self._queues_of(topics), np.int64)
        encoded = topics.dictionary_encode()
        counts = [self._queues_of(name) for name in encoded.dictionary.to_pylist()]
        found: Ints = np.array(counts, np.int64)[encoded.indices.to_numpy()]
        return found


# -- Arrow


def _slices(batch: pa.RecordBatch, value: int) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that the records of each piece stay far below 2 GiB."""
    ends = np.cumsum(_lengths(_bytes_of(batch.column(value))))
    start = done = 0
    while start < batch.num_rows:
        stop = int(np.searchsorted(ends, done + _BYTES_PER_BUILD, side="right"))
        stop = min(max(stop, start + 1), start + _ROWS_PER_BUILD, batch.num_rows)
        yield batch.slice(start, stop - start)
        start, done = stop, int(ends[stop - 1])


def _chunks(records: pa.Array, first_row: int, topics: pa.Array | str) -> Iterator[Chunk]:
    data = memoryview(records.buffers()[2])
    ends = np.frombuffer(records.buffers()[1], np.int32, len(records) + 1)
    start = 0
    while start < len(records):
        stop = int(np.searchsorted(ends, ends[start] + BYTES_PER_CHUNK, side="right")) - 1
        stop = min(max(stop, start + 1), start + ROWS_PER_CHUNK, len(records))
        topic = topics if isinstance(topics, str) else topics[start].as_py()
        yield Chunk(first_row + start, stop - start, topic, bytes(data[ends[start] : ends[stop]]))
        start = stop


def _bytes_of(values: pa.Array) -> pa.Array:
    """Return strings or bytes, in any of Arrow's forms, as `binary`."""
    return values if values.type == pa.binary() else values.cast(pa.binary())


def _lengths(values: pa.Array) -> Ints:
    found: Ints = pc.binary_length(values).fill_null(0).to_numpy().astype(np.int64)
    return found


def _join(*parts: pa.Array | pa.Scalar) -> pa.Array:
    """Join the parts of each row; a null part counts as empty."""
    return pc.binary_join_element_wise(*parts, _constant(b""), null_handling="skip")


def _property(begin: bytes, values: pa.Array | None) -> pa.Array | pa.Scalar:
    """Return a property of each row; null for a row without it."""
    if values is None:
        return _constant(b"")
    ends = (_constant(begin), values, _constant(b"\x02"), _constant(b""))
    return pc.binary_join_element_wise(*ends, null_handling="emit_null")


def _numbers(first: int, count: int) -> pa.Array:
    numbers = pa.array(np.arange(first, first + count, dtype=np.int64))
    return numbers.cast(pa.string()).cast(pa.binary())


def _fixed(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Return each line of a table of bytes as a value."""
    count, width = rows.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows.tobytes())]
    )


def _crcs(bodies: pa.Array) -> list[int]:
    offsets = np.frombuffer(bodies.buffers()[1], np.int32, bodies.offset + len(bodies) + 1)
    offsets = offsets[bodies.offset :]
    data = memoryview(bodies.buffers()[2] or b"")
    bounds = offsets.tolist()
    return [
        crc32(data[start:end]) & CRC_MASK
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]  # fmt: skip


def _zstd(body: bytes) -> bytes:
    text: bytes = pa.Codec("zstd", _ZSTD_LEVEL).compress(body, asbytes=True)
    return text


def _fitting(bodies: pa.Array) -> tuple[pa.Array, Ints]:
    """Compress the bodies that are too large for a message; return all with their bits of sysFlag.

    The source has decompressed such bodies, up to what it reads. What is too large even so stays.
    """
    sizes = _lengths(bodies)
    flags = np.zeros(len(sizes), np.int64)
    large = np.flatnonzero((sizes > MAX_BODY_BYTES) & (sizes <= compression.MAX_BODY_BYTES))
    if not len(large):
        return bodies, flags
    values = bodies.to_pylist()
    for row in large:
        text, flag = compression.compress(values[row], compression.ZLIB)
        if len(text) > MAX_BODY_BYTES:  # what repeats itself from afar fits by ZSTD only
            text, flag = _zstd(values[row]), _ZSTD_FLAGS
        if len(text) <= MAX_BODY_BYTES:
            values[row], flags[row] = text, flag
    return pa.array(values, pa.binary()), flags


# -- refusals


def _refuse(bad: npt.NDArray[np.bool_], first_row: int, problem: Callable[[int], str]) -> None:
    """Raise RowError for the first row that is bad; `problem` is called with its place."""
    found = np.flatnonzero(bad)
    if len(found):
        raise RowError(first_row + int(found[0]), problem(int(found[0])))


def _refuse_nulls(values: pa.Array, first_row: int, problem: str) -> None:
    if values.null_count:
        _refuse(values.is_null().to_numpy(zero_copy_only=False), first_row, lambda _: problem)


def _refuse_separators(values: pa.Array, owners: Ints | None, first_row: int, what: str) -> None:
    """Raise RowError for a value with a byte that separates properties in a record."""
    buffers = values.buffers()
    if not len(values) or buffers[2] is None:
        return
    offsets = np.frombuffer(buffers[1], np.int32, values.offset + len(values) + 1)[values.offset :]
    data = np.frombuffer(buffers[2], np.uint8)[offsets[0] : offsets[-1]]
    if not np.isin(data, _SEPARATORS).any():
        return
    for place, value in enumerate(values.to_pylist()):
        if value is not None and (b"\x01" in value or b"\x02" in value):
            row = place if owners is None else int(owners[place])
            raise RowError(
                first_row + row,
                f"{what} has a byte 1 or 2, which separate the properties of a message; encode it, "
                "for example with base64()",
            )
