"""The quick way of a put: a payload whose records are alike, as a producer's frame mostly is.

Alike: V1, IPv4, one topic, one producer with rising sequence numbers (or none), nothing that asks
for more than a place in a queue. The checks are those of `Intake.examine`, which takes what is not
alike, and what fails here: it says why.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from zlib_ng.zlib_ng import crc32

from hastore.store.idempotence import producer_of
from hastore.store.put_result import PutResult, PutStatus
from hastore.store.record import (
    CRC_MASK,
    FLAG_INNER_BATCH,
    FLAG_IPV6,
    FLAG_PREPARED,
    MAX_PROPERTIES_BYTES,
    MIN_RECORD_SIZE,
    OFFSETS,
    OFFSETS_AT,
    STORE_AT,
    V1_MAGIC,
)

# totalSize, magic, bodyCRC, queueId, sysFlag, bodyLength of a V1 record between IPv4 hosts
_FRONT = struct.Struct(">IIIi20xi44xi")
_FLAG_UNWRAP = 0x40
FLAGS_REFUSED = FLAG_INNER_BATCH | _FLAG_UNWRAP  # what no client may set
_SPECIAL = FLAG_IPV6 | FLAG_PREPARED | FLAGS_REFUSED
_SEQUENCE = b"\x02HS_SEQ\x01"
_SEQUENCE_DIGITS = 18


class PutRun(NamedTuple):
    """Records that passed, as columns: where each begins in the payload, and what it asks for."""

    payload: bytes
    topic: bytes
    starts: list[int]
    queue_ids: list[int]
    producer: bytes | None
    sequences: list[int]  # empty without a producer


class StoredRun(Sequence[PutResult]):
    """The results of a run, all of it stored, none a duplicate; as columns, or one by one."""

    __slots__ = ("end_offset", "offsets", "queue_ids", "queue_offsets", "store_timestamp_ms")

    def __init__(
        self,
        offsets: list[int],
        end_offset: int,
        queue_ids: list[int],
        queue_offsets: list[int],
        store_timestamp_ms: int,
    ) -> None:
        self.offsets = offsets
        self.end_offset = end_offset
        self.queue_ids = queue_ids
        self.queue_offsets = queue_offsets
        self.store_timestamp_ms = store_timestamp_ms

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, place: int) -> PutResult: ...

    @overload
    def __getitem__(self, place: slice) -> list[PutResult]: ...

    def __getitem__(self, place: int | slice) -> PutResult | list[PutResult]:
        if isinstance(place, slice):
            return list(self)[place]
        place = range(len(self.offsets))[place]
        last = place + 1 == len(self.offsets)
        return PutResult(
            PutStatus.PUT_OK,
            self.offsets[place],
            self.end_offset if last else self.offsets[place + 1],
            self.queue_ids[place],
            self.queue_offsets[place],
            self.store_timestamp_ms,
        )

    def __iter__(self) -> Iterator[PutResult]:
        return (self[place] for place in range(len(self.offsets)))


def take_run(
    payload: bytes, topics: dict[bytes, str | None], max_body: int, max_record: int
) -> PutRun | None:
    """Check a payload; None when it is no run of alike records, or one of them is not right.

    `topics` holds what may be put without a further check.
    """
    end = len(payload)
    if end < MIN_RECORD_SIZE:
        return None
    topic = _topic_of(payload)
    if not topic or topics.get(topic, "") is not None:
        return None
    unpack, view = _FRONT.unpack_from, memoryview(payload)
    name = bytes((len(topic),)) + topic
    starts: list[int] = []
    queue_ids: list[int] = []
    sequences: list[int] = []
    producer: bytes | None = None
    known = b""  # the properties up to the sequence number, as in the record before
    last = -1
    at = 0
    while at < end:
        if end - at < MIN_RECORD_SIZE:
            return None
        size, magic, crc, queue_id, flags, body_size = unpack(payload, at)
        stop = at + size
        topic_at = at + 88 + body_size
        lengths_at = topic_at + len(name)
        if (
            magic != V1_MAGIC
            or flags & _SPECIAL
            or not 0 <= body_size <= max_body
            or size > max_record
            or stop > end
            or lengths_at + 2 > stop
            or not payload.startswith(name, topic_at)
            or crc32(view[at + 88 : topic_at]) & CRC_MASK != crc
        ):
            return None
        length = payload[lengths_at] << 8 | payload[lengths_at + 1]
        if lengths_at + 2 + length != stop or length > MAX_PROPERTIES_BYTES:
            return None
        if known and payload.startswith(known, lengths_at + 2) and payload[stop - 1] == 2:
            digits = payload[lengths_at + 2 + len(known) : stop - 1]
            if not digits.isdigit() or len(digits) > _SEQUENCE_DIGITS:
                return None
            sequence = int(digits)
        elif length:
            properties = payload[lengths_at + 2 : stop]
            found = _read_properties(properties)
            if found is None or (starts and found[0] != producer):
                return None
            producer, sequence = found
            known = _before_sequence(properties)
        elif producer is not None:
            return None
        if producer is not None:
            if sequence <= last:
                return None
            last = sequence
            sequences.append(sequence)
        starts.append(at)
        queue_ids.append(queue_id)
        at = stop
    return PutRun(payload, topic, starts, queue_ids, producer, sequences)


def patch_run(
    buffer: bytearray, position: int, run: PutRun, stored: StoredRun, stamp: bytes
) -> None:
    """Fill in, where the run lies in `buffer`, what only the master knows."""
    pack_offsets = OFFSETS.pack_into
    width = len(stamp)
    for start, queue_offset, offset in zip(
        run.starts, stored.queue_offsets, stored.offsets, strict=True
    ):
        at = position + start
        pack_offsets(buffer, at + OFFSETS_AT, queue_offset, offset)
        at += STORE_AT
        buffer[at : at + width] = stamp


def _topic_of(payload: bytes) -> bytes:
    """Return the first record's topic, empty when it is no V1 record between IPv4 hosts."""
    _, magic, _, _, flags, body_size = _FRONT.unpack_from(payload)
    at = 88 + body_size
    if magic != V1_MAGIC or flags & FLAG_IPV6 or not 88 <= at < len(payload):
        return b""
    return payload[at + 1 : at + 1 + payload[at]]


def _read_properties(properties: bytes) -> tuple[bytes | None, int] | None:
    """Return (producer, sequence number); None when the properties are not well formed."""
    if properties[-1] != 2 or properties.count(b"\x01") != properties.count(b"\x02"):
        return None
    try:
        found = producer_of(properties)
    except ValueError:
        return None
    return found if found is not None else (None, 0)


def _before_sequence(properties: bytes) -> bytes:
    """Return all up to a sequence number at the very end; empty when it lies elsewhere."""
    at = properties.find(_SEQUENCE) + len(_SEQUENCE)
    if at < len(_SEQUENCE) or properties.find(b"\x02", at) != len(properties) - 1:
        return b""
    return properties[:at]
