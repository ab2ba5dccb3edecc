"""Records of sends, made in one go where a send is like most: the fast path of sends.py.

    build_batch    the messages of a batch, as one uniform batch
    SendLayouts    the properties of a message: known names, in the order that RocketMQ stores

Both return None for whatever is not usual. Then sends.py makes the records one by one, and says
what is wrong. What they return is byte for byte what sends.py would have made, and has passed each
check that the store would make; tests compare both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from hastore.record.codec import Host
from hastore.record.delays import MARK_BYTES
from hastore.record.layout import (
    CRC_MASK,
    FLAG_IPV6,
    FLAG_PREPARED,
    HEADER_SIZE,
    HEADERS,
    MAX_PROPERTIES_BYTES,
    TAIL_MIN,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    header_struct,
)
from hastore.record.properties import MAX_KEYS, PID_MARK
from hastore.store.append.uniform_batch import FLAGS_REFUSED, BuiltBatch

UNUSUAL_FLAGS = FLAG_IPV6 | FLAG_PREPARED | FLAGS_REFUSED
_FRONT = header_struct("unsigned_size", "magic", "body_crc", "queue_id", "flag")
_MESSAGE = struct.Struct(">iiiii")  # of a batch: size, magic, CRC, flag, length of the body
_LENGTH_BYTES = 4  # of a body: written before it in a batch as in a record
_SHORT = struct.Struct(">h")
_LEAST = _MESSAGE.size + _SHORT.size


class Alike(NamedTuple):
    """What the records of one send have in common."""

    topic: str
    queue_id: int
    sys_flag: int
    born_ms: int
    born: Host
    reconsume_times: int

    @property
    def is_usual(self) -> bool:
        """Whether its records can be a uniform batch."""
        return not self.sys_flag & UNUSUAL_FLAGS and len(self.born.address) == 4


def build_batch(alike: Alike, shared: bytes, body: bytes, most: int) -> BuiltBatch | None:
    """Return the records of a batch of at most `most` messages; None leaves it to the slow way.

    `shared` are the batch's properties as they are stored: checked, and with a final 0x02.
    """
    name, queue_id = alike.topic.encode(), alike.queue_id
    if not alike.is_usual or len(name) > V1_MAX_TOPIC_BYTES or _is_unusual(shared):
        return None
    middle, named = _middle(alike), bytes((len(name),)) + name
    added = HEADER_SIZE + TAIL_MIN + len(name)
    unpack, unpack_short = _MESSAGE.unpack_from, _SHORT.unpack_from
    pack, pack_short = _FRONT.pack, _SHORT.pack
    pieces: list[bytes] = []
    starts: list[int] = []
    owns: list[bytes] = []
    start = longest_body = longest = 0
    at, end = 0, len(body)
    while at < end:
        if end - at < _LEAST or len(starts) >= most:
            return None
        size, _, _, flag, length = unpack(body, at)
        body_at, stop = at + _MESSAGE.size, at + size
        own_at = body_at + length + _SHORT.size
        if length < 0 or own_at > stop or stop > end:
            return None
        content, own = body[body_at : own_at - _SHORT.size], body[own_at:stop]
        joint = shared if not own or own[-1] == 2 else b"\x02" + shared
        rest = len(own) + len(joint)
        if (
            unpack_short(body, own_at - _SHORT.size)[0] != len(own)
            or rest > MAX_PROPERTIES_BYTES
            or own.count(b"\x01") - own.count(b"\x02") != len(joint) - len(shared)
        ):
            return None
        total = added + length + rest
        front = pack(total, V1_MAGIC, crc32(content) & CRC_MASK, queue_id, flag)
        size_of_body = body[body_at - _LENGTH_BYTES : body_at]
        pieces += (front, middle, size_of_body, content, named, pack_short(rest), own, joint)
        starts.append(start)
        owns.append(own)
        start += total
        longest, longest_body = max(longest, total), max(longest_body, length)
        at = stop
    if not starts or _has_unusual(owns, shared):
        return None
    queues = [queue_id] * len(starts)
    return BuiltBatch(b"".join(pieces), name, starts, queues, None, [], longest_body, longest)


def _middle(alike: Alike) -> bytes:
    """Return the bytes of a header that are the same in all records of a send."""
    whole = HEADERS[0].pack(
        0, 0, 0, 0, 0, 0, 0, alike.sys_flag, alike.born_ms, alike.born.address, alike.born.port,
        0, b"", 0, alike.reconsume_times, 0, 0,
    )  # fmt: skip
    return whole[_FRONT.size : -_LENGTH_BYTES]


def _is_unusual(properties: bytes) -> bool:
    """Whether properties may have what the store reads: a producer, the mark of a delivery."""
    return PID_MARK in properties or MARK_BYTES in properties


def _has_unusual(owns: Sequence[bytes], shared: bytes) -> bool:
    """Whether one of the messages may have a producer, a mark, or too many keys."""
    block = b"\x02".join(owns)
    if _is_unusual(block):
        return True
    if block.count(b" ") + shared.count(b" ") < MAX_KEYS:
        return False
    left = MAX_KEYS - shared.count(b" ")
    return any(own.count(b" ") >= left for own in owns)
