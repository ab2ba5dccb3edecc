"""Write stores in RocketMQ's format file by file, without a node."""

import struct
import zlib
from pathlib import Path

from hastore.record.codec import Host, Record, encode_record, pack_blank

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
UNITS_PER_FILE = 100


def write_store(root, messages, *, file_size=1 << 20, units_per_file=UNITS_PER_FILE):
    """Write messages (topic, queue_id, fields of Record) and their queues; return the Records."""
    files, placed, queues = {}, [], {}
    offset = 0
    for topic, queue_id, fields in messages:
        units = queues.setdefault((topic, queue_id), [])
        values = {
            "store_host": Host(b"\x7f\0\0\1", 10911),
            "body_crc": zlib.crc32(fields["body"]) & 0x7FFFFFFF,
            **fields,
        }
        for _ in range(2):
            record = Record(
                **values,
                topic=topic,
                queue_id=queue_id,
                queue_offset=len(units),
                physical_offset=offset,
            )
            raw = encode_record(record)
            left = file_size - offset % file_size
            if len(raw) + 8 <= left:
                break
            files[offset // file_size] += pack_blank(left) + bytes(left - 8)
            offset += left
        files.setdefault(offset // file_size, bytearray()).extend(raw)
        units.append(struct.pack(">qiq", offset, len(raw), 0))
        placed.append(record)
        offset += len(raw)
    for number, data in files.items():
        path = Path(root, "commitlog", f"{number * file_size:020}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(data).ljust(file_size, b"\0"))
    for (topic, queue_id), units in queues.items():
        for first in range(0, len(units), units_per_file):
            path = Path(root, "consumequeue", topic, str(queue_id), f"{first * 20:020}")
            path.parent.mkdir(parents=True, exist_ok=True)
            data = b"".join(units[first : first + units_per_file])
            path.write_bytes(data.ljust(units_per_file * 20, b"\0"))
    return placed


def numbered(count, *, topic="t", queues=1, size=10):
    """Return `count` messages, a second apart, to the queues in turn."""
    return [
        (
            topic,
            n % queues,
            {
                "body": str(n).encode().rjust(size, b"."),
                "properties": f"KEYS\x01k{n}\x02".encode(),
                "store_timestamp_ms": 1_000 * n,
            },
        )
        for n in range(count)
    ]
