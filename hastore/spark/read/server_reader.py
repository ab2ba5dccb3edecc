"""Read ranges of queues from running nodes: slaves first, another replica if one stalls.

A reply holds many records, as they are in the log. They are turned into Arrow without being decoded
one by one. The next reply is under way while a batch is built. Each call opens and closes its
own sockets, so that no forked worker inherits one.
"""

from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from hastore.client import Admin, Consumer, Position
from hastore.client.connections.addresses import parse_bootstrap
from hastore.client.connections.requester import Requester
from hastore.client.consumer.fetcher import Fetcher
from hastore.client.consumer.queue_reader import QueueReader
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import PositionLostError, UnreachableError, UsageError
from hastore.record.layout import MIN_RECORD_SIZE, header_struct
from hastore.spark.arrow.batch import BatchBuilder, QueueRows, cut_batches
from hastore.spark.arrow.record_fields import Ints, RecordFields
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange

PULL_BYTES = 4 * 1024 * 1024  # the most bytes of one reply
STALL_S = 60.0  # a task gives up after this time without a message
STEP_S = 1.0  # longest wait in one step of the fetcher
_SIZE = header_struct("size")


class ServerBackend:
    """The nodes of a group, read through the client API."""

    def __init__(self, bootstrap: tuple[str, ...], fail_on_data_loss: bool) -> None:
        self._bootstrap = parse_bootstrap(bootstrap)
        self.where = ",".join(self._bootstrap)
        self._fail_on_data_loss = fail_on_data_loss

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: each call closes its own sockets, `read_queue` when its iterator ends."""

    def limit_offset(self) -> int | None:
        """Return None: each node enforces its own readable offset."""
        return None

    def available(self) -> dict[TopicPartition, OffsetRange]:
        """Return every queue and its range; they are the master's if a master answers."""
        with Admin(self._bootstrap) as admin:
            topics = admin.topics()
        return {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for topic, queues in topics.items()
            for queue_id, bounds in queues.items()
        }

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        topic, queue_id = partition
        with Consumer(topic, self._bootstrap, queues=[queue_id]) as consumer:
            consumer.seek_to_latest()
            end = consumer.position(queue_id).queue_offset
            consumer.seek_to_time(timestamp_ms)
            found = consumer.position(queue_id).queue_offset
        return found if found < end else None

    def log_range(self) -> tuple[int, int]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_log(self, span: LogRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Raise UsageError: nodes give messages by queue only."""
        raise UsageError("mode=log reads a store's directory; set the option 'path'")

    def read_queue(self, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a range from any replica that has them.

        Raises UnreachableError if no replica sends a message for STALL_S.
        """
        requester = Requester(self._bootstrap, SYSTEM_CLOCK)
        try:
            for payload in self._payloads(requester, span):
                yield from _build(payload, span, builder)
        finally:
            requester.close()

    def _payloads(self, requester: Requester, span: QueueRange) -> Iterator[bytes]:
        """Yield replies that cover the range; pull the next while the caller uses the last."""
        # Wait for the answers of all nodes. The fetcher could not prefer a slave that it does not
        # know yet.
        requester.run(requester.survey(STALL_S))
        fetcher = Fetcher(
            requester,
            span.topic,
            SYSTEM_CLOCK,
            max_bytes=PULL_BYTES,
            prefetch_bytes=2 * PULL_BYTES,
            prefer_master=False,
        )
        # With "common" the fetcher moves a lost position to one that the replica still has.
        fetcher.policy = "raise" if self._fail_on_data_loss else "common"
        start = Position(span.start)
        queue = QueueReader(span.partition, start, start)
        fetcher.queues[span.partition] = queue
        reached = span.start
        deadline = requester.deadline(STALL_S)
        while reached < span.end:
            requester.run(fetcher.step(STEP_S))
            if queue.lost is not None:
                raise PositionLostError(
                    f"{queue.lost}; set failOnDataLoss to false to read the messages that are "
                    "available",
                    queue.lost.queue_id,
                )
            if queue.next.queue_offset < reached or queue.next.queue_offset >= span.end:
                return  # the rest of the range is lost, and the policy allows that
            reached = queue.next.queue_offset
            payload = queue.take_chunk()
            if payload:
                reached = queue.next.queue_offset
                if reached < span.end:
                    fetcher.advance()
                yield payload
                deadline = requester.deadline(STALL_S)
            elif not requester.left_s(deadline):
                raise UnreachableError(
                    f"no node of {self.where} sent {span.name} from offset {reached} within "
                    f"{STALL_S:g} s"
                )


def _build(payload: bytes, span: QueueRange, builder: BatchBuilder) -> Iterator[pa.RecordBatch]:
    data = memoryview(payload)
    positions = _positions(payload)
    fields = RecordFields(data, positions, None)
    wanted = (fields.queue_offsets >= span.start) & (fields.queue_offsets < span.end)
    positions, sizes = positions[wanted], fields.sizes[wanted]
    offsets = fields.queue_offsets[wanted]
    for part in cut_batches(positions, sizes):
        rows = QueueRows(span.topic, span.partition, offsets[part])
        yield builder.build(data, positions[part], None, rows)


def _positions(payload: bytes) -> Ints:
    """Return where each record begins, from the sizes; RecordFields checks the records later."""
    found = []
    at, end = 0, len(payload)
    while at < end:
        found.append(at)
        size = _SIZE.unpack_from(payload, at)[0] if at + 4 <= end else 0
        if size < MIN_RECORD_SIZE:
            break  # RecordFields refuses this record and names its place
        at += size
    return np.array(found, np.int64)
