"""Take the messages out of RocketMQ's inner batches, so that each message is a row.

An inner batch is one record with the messages of one send to a topic of the type BatchCQ. As
RocketMQ's consumers do, a message gets its body, flag and properties from the batch's body, a queue
offset of its own, and everything else from the batch's record. In the body, which may be
compressed, each message is:

    size (4)  magic (4)  bodyCRC (4)  flag (4)  bodyLength (4)  body  propertiesLength (2)
    properties                                    (magic and bodyCRC are 0)
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from hastore.errors import CorruptRecordError
from hastore.record.codec import Record, decode_record, encode_record
from hastore.record.compression import COMPRESSION_FLAGS
from hastore.record.layout import (
    CRC_MASK,
    FLAG_COMPRESSED,
    FLAG_INNER_BATCH,
    FLAG_NEED_UNWRAP,
)
from hastore.record.properties import inner_count
from hastore.spark.arrow.batch import (
    MADE_BYTES_PER_BATCH,
    BatchBuilder,
    BatchTooLargeError,
    QueueRows,
    decompress,
)
from hastore.spark.arrow.record_fields import Bools, Ints, RecordFields

_FRONT = struct.Struct(">iiiii")
_SHORT = struct.Struct(">H")
_WRAPPED = FLAG_INNER_BATCH | FLAG_NEED_UNWRAP


def are_wrapped(sys_flags: Ints) -> Bools:
    """Return which records hold several messages, by their sysFlag."""
    wrapped: Bools = (sys_flags & _WRAPPED) == _WRAPPED
    return wrapped


def is_any_left_whole(sys_flags: Ints) -> bool:
    """Return whether a record holds several messages and is not taken apart."""
    return bool(((sys_flags & _WRAPPED) == FLAG_INNER_BATCH).any())


class InnerBatchBuilder:
    """A BatchBuilder that gives each message of queue offset `[low, high)` a row.

    `size` and `bodyCrc` of such a row are those that the message would have alone; its physical
    offset is the batch's. A batch that RocketMQ's consumers do not take apart stays one row, at its
    first queue offset, and so does a single message. `covered` is how many queue offsets of the
    range all but those batches stood for so far; `left_whole` is whether there was such a batch.
    """

    def __init__(self, builder: BatchBuilder, low: int, high: int) -> None:
        self._builder = builder
        self._low = low
        self._high = high
        self.wanted = builder.wanted
        self.covered = 0
        self.left_whole = False

    def build(
        self, data: memoryview, positions: Ints, base: int | None, queue: QueueRows | None
    ) -> pa.RecordBatch | None:
        """Return a row for each message of the records; None if no message is in the range.

        Raises CorruptRecordError, and BatchTooLargeError.
        """
        if queue is None:
            raise ValueError("inner batches are taken apart by queue only")
        fields = RecordFields(data, positions, base)
        if self._builder.check_crcs:
            fields.check_bodies(fields.body_views())
        records: list[bytes] = []
        queue_offsets: list[int] = []
        covered = made_bytes = 0
        for place, size, first, is_wrapped, flags in zip(
            positions.tolist(),
            fields.sizes.tolist(),
            queue.offsets.tolist(),
            are_wrapped(fields.sys_flags).tolist(),
            fields.sys_flags.tolist(),
            strict=True,
        ):
            raw = bytes(data[place : place + size])
            messages: Iterator[bytes] = iter((raw,))
            if is_wrapped:
                batch = decode_record(raw)
                count = inner_count(batch.properties)
                covered += max(0, min(first + count, self._high) - max(first, self._low))
                messages = _messages(batch, count)
            elif flags & FLAG_INNER_BATCH:
                self.left_whole = True
                self._builder.note_left_whole()
            else:  # a single message beside batches
                covered += self._low <= first < self._high
            for queue_offset, message in enumerate(messages, first):
                if self._low <= queue_offset < self._high:
                    records.append(message)
                    queue_offsets.append(queue_offset)
                    made_bytes += len(message)
                    if made_bytes > MADE_BYTES_PER_BATCH and place > positions[0]:
                        raise BatchTooLargeError(place)
        self.covered += covered
        if not records:
            return None
        sizes = np.array([len(record) for record in records], np.int64)
        starts: Ints = np.cumsum(sizes) - sizes
        own = QueueRows(queue.topic, queue.partition, np.array(queue_offsets, np.int64))
        return self._builder.build(memoryview(b"".join(records)), starts, None, own)


def _messages(batch: Record, count: int) -> Iterator[bytes]:
    """Yield the `count` messages of an inner batch as records."""
    body = batch.body
    if batch.sys_flag & FLAG_COMPRESSED:
        body = decompress(body, batch.sys_flag, batch.physical_offset)
    at, found = 0, 0
    while at < len(body):
        size, flag, begin, end = _find_message(body, at)
        (length,) = _SHORT.unpack_from(body, end) if 0 <= begin <= end <= len(body) - 2 else (-1,)
        if length < 0 or end + 2 + length != at + size or at + size > len(body):
            raise CorruptRecordError(
                f"the inner batch at offset {batch.physical_offset} has no whole message at byte "
                f"{at} of its body"
            )
        message = body[begin:end]
        yield encode_record(
            replace(
                batch,
                body=message,
                body_crc=zlib.crc32(message) & CRC_MASK,
                flag=flag,
                sys_flag=batch.sys_flag & ~COMPRESSION_FLAGS,
                properties=body[end + 2 : at + size],
                queue_offset=batch.queue_offset + found,
            )
        )
        found += 1
        at += size
    if found != count:
        raise CorruptRecordError(
            f"the inner batch at offset {batch.physical_offset} holds {found} messages, and its "
            f"property INNER_NUM says {count}"
        )


def _find_message(body: bytes, at: int) -> tuple[int, int, int, int]:
    """Return size and flag of the message at `at`, and where its body begins and ends."""
    if len(body) - at < _FRONT.size:
        return 0, 0, 0, -1
    size, _, _, flag, length = _FRONT.unpack_from(body, at)
    begin = at + _FRONT.size
    return size, flag, begin, begin + length
