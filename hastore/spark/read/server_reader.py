"""Read ranges of queues from running nodes: slaves first, another replica if one stalls.

A reply holds many records, as they are in the log. They are turned into Arrow without being decoded
one by one. The next reply is under way while a batch is built. Each call opens and closes its
own sockets, so that no forked worker inherits one. If a reply is damaged, its records are read from
another replica.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hastore.client import Admin
from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.consumer.range_reader import Chunk, RangeReader
from hastore.errors import CorruptRecordError, PositionLostError, UnreachableError, UsageError
from hastore.record.layout import MIN_RECORD_SIZE, header_struct
from hastore.spark.arrow.batch import BatchBuilder, QueueRows, cut_batches
from hastore.spark.arrow.inner_batches import InnerBatchBuilder, are_wrapped
from hastore.spark.arrow.record_fields import Ints, RecordFields
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange
from hastore.spark.read.epoch_file import valid_end
from hastore.spark.read.server_head import ServerHead, offset_by_time

_SIZE = header_struct("size")


class ServerBackend:
    """The nodes of a group, read through the client API."""

    def __init__(
        self, bootstrap: tuple[str, ...], fail_on_data_loss: bool, security: str | None = None
    ) -> None:
        try:
            self._bootstrap = parse_bootstrap(bootstrap)
        except UsageError as error:
            text = str(error).removeprefix("bootstrap: ")
            raise UsageError(f"option 'hastore.bootstrap.servers': {text}") from error
        self.where = ",".join(self._bootstrap)
        self._security = security
        self._fail_on_data_loss = fail_on_data_loss

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each call closes its own sockets, `read_queue` when its iterator ends."""

    def limit_offset(self) -> int | None:
        """Return None: each node enforces its own readable offset."""
        return None

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue and its range; they are the master's if a master answers."""
        try:
            with Admin(self._bootstrap, security=self._security) as admin:
                topics = admin.topics()
        except UnreachableError as error:
            raise UnreachableError(
                f"{error}; check 'hastore.bootstrap.servers', that a node runs there, and that "
                "Spark's driver and executors can reach the nodes' API ports"
            ) from error
        return {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for topic, queues in topics.items()
            for queue_id, bounds in queues.items()
        }

    def check_right(self, topic: str) -> None:
        """Raise ForbiddenError if the client has no right to the topic."""
        head = ServerHead(self._bootstrap, self._security)
        try:
            head.check_right(topic)
        finally:
            head.close()

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, OffsetRange]:
        """Return the ranges up to the readable offset of the node that has the greatest.

        The nodes list the queues of their whole log. In a synchronous group its last messages may
        not be confirmed yet; a task would wait for them.
        """
        head = ServerHead(self._bootstrap, self._security)
        try:
            ends = {key: span.end for key, span in queues.items() if span.size}
            found = head.locate(ends, {key: queues[key].start for key in ends})
        finally:
            head.close()
        result = dict(queues)
        for key in ends:
            start, place = queues[key].start, found.get(key)
            end = start if place is None else min(place.next, ends[key])
            result[key] = OffsetRange(start, max(start, end))
        return result

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        return offset_by_time(self._bootstrap, self._security, partition, timestamp_ms)

    def log_range(self) -> tuple[int, int]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range from any replica that has them.

        Raises UnreachableError if no replica sends a message for a minute.
        """
        reader = RangeReader(
            self._bootstrap,
            span.topic,
            span.partition,
            span.start,
            span.end,
            before=span.before,
            skip_lost=not self._fail_on_data_loss,
            security=self._security,
        )
        chunks = reader.chunks()
        try:
            for chunk in chunks:
                try:
                    batches = list(self._build(chunk, span, builder))
                except CorruptRecordError as damage:
                    reader.refuse(damage)
                    continue
                yield from batches
        except PositionLostError as lost:
            raise PositionLostError(
                f"{lost}; set failOnDataLoss to false to read the messages that are available",
                lost.queue_id,
                lost.common,
            ) from lost
        except UnreachableError as failure:
            raise UnreachableError(
                f"{failure}. Start a node of the group, or name nodes that run in "
                "hastore.bootstrap.servers"
            ) from failure
        finally:
            chunks.close()

    def _build(
        self, chunk: Chunk, span: QueueRange, builder: BatchBuilder
    ) -> Iterator[pa.RecordBatch]:
        data = chunk.payload
        positions = _positions(chunk)
        fields = RecordFields(data, positions, None)
        wrapped = are_wrapped(fields.sys_flags)
        wanted = (fields.queue_offsets >= span.start) | wrapped
        wanted &= fields.queue_offsets < span.end
        cut = valid_end(chunk.epochs, span.last)
        if cut is not None:
            gone = wanted & (fields.physical_offsets >= cut)
            if gone.any() and self._fail_on_data_loss:
                raise PositionLostError(
                    f"messages of {span.name} before offset {span.end} were cut by a failover "
                    "during the read",
                    span.partition,
                )
            wanted &= ~gone
        offsets, sizes = fields.queue_offsets, fields.sizes
        if not wanted.all():
            positions, sizes, offsets = positions[wanted], sizes[wanted], offsets[wanted]
        if wrapped.any():
            inner = InnerBatchBuilder(builder, span.start, span.end)
            batch = inner.build(
                data, positions, None, QueueRows(span.topic, span.partition, offsets)
            )
            if batch is not None:
                yield batch
            return
        for part in cut_batches(positions, sizes):
            rows = QueueRows(span.topic, span.partition, offsets[part])
            yield builder.build(data, positions[part], None, rows)


def _positions(chunk: Chunk) -> Ints:
    """Return where each record begins. RecordFields checks the records later.

    Raises CorruptRecordError if the sizes that the node states are not those of the records.
    """
    data, size = chunk.payload, len(chunk.payload)
    if chunk.sizes:
        stated = np.frombuffer(chunk.sizes, ">i4").astype(np.int64)
        ends = np.cumsum(stated)
        if stated.min() < MIN_RECORD_SIZE or ends[-1] != size:
            raise CorruptRecordError("a reply states sizes that are not those of its records")
        positions: Ints = ends - stated
        view: npt.NDArray[Any] = np.ndarray((size - 3,), ">i4", buffer=data, strides=(1,))
        if (view[positions] != stated).any():
            raise CorruptRecordError("a reply states sizes that are not those of its records")
        return positions
    found = []
    at = 0
    while at < size:
        found.append(at)
        length = _SIZE.unpack_from(data, at)[0] if at + 4 <= size else 0
        if length < MIN_RECORD_SIZE:
            break  # RecordFields refuses this record and names its place
        at += length
    return np.array(found, np.int64)
