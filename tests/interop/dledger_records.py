"""RocketMQ's records as bodies of entries, made without hastore's own code."""

from __future__ import annotations

import struct
import zlib

from tests.interop.dledger_files import HEAD

ROLLED_BACK = 0xC  # sysFlag of the end of a transaction: RocketMQ puts it into no queue, no index
_RECORD = struct.Struct(">iIIiiqqiqIiqIiiqi")
_HOST, _PORT, _TIME_MS = 0x7F000001, 10911, 1_700_000_000_000


def record(
    pos: int, queue_offset: int, body: bytes = b"body", *, topic: str = "T", sys_flag: int = 0
) -> bytes:
    """Return a record for queue 0 of a topic, as the body of an entry at `pos` of the log."""
    size = _RECORD.size + len(body) + 1 + len(topic) + 2
    head = _RECORD.pack(
        *(size, 0xDAA320A7, zlib.crc32(body) & 0x7FFFFFFF, 0, 0, queue_offset, pos + HEAD.size),
        *(sys_flag, _TIME_MS, _HOST, _PORT, _TIME_MS, _HOST, _PORT, 0, 0, len(body)),
    )
    return head + body + bytes([len(topic)]) + topic.encode() + bytes(2)
