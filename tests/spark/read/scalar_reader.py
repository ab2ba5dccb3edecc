"""What a read of a queue must return, by Python code that handles one record after the other.

It reads the store's files itself and shares no code with the reader except the decompression, so a
fast path that changes a value, an error or the place of an error differs from it.
"""

import struct
import zlib
from pathlib import Path

from hastore.errors import CorruptRecordError
from hastore.record.layout import V1_MAGIC, V2_MAGIC
from hastore.spark.arrow.batch import decompress

_UNIT = struct.Struct(">qiq")
_LEAST = 91  # bytes of a record without body, topic and properties

LATEST_MS = (2**63 - 1) // 1000  # a timestamp of Spark has microseconds


def read_queue(path, topic, queue, limit, rows_per_batch, units_at_once):
    """Return (rows, the beginning of the error's text or None); `row` names the columns."""
    files = {int(p.name): p.read_bytes() for p in Path(path, "commitlog").iterdir()}
    folder = Path(path, "consumequeue", topic, str(queue))
    units = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    batches = []
    for unit, (offset, size, _) in enumerate(_UNIT.iter_unpack(units)):
        if size and offset + size <= limit:
            start = max(s for s in files if s <= offset)
            key = start, unit // units_at_once
            if not batches or batches[-1][0] != key or len(batches[-1][1]) == rows_per_batch:
                batches.append((key, []))
            batches[-1][1].append(offset - start)
    rows = []
    for (start, _), places in batches:
        data = files[start]
        faults = [fault(data, at, start) for at in places]
        # All records of a batch pass one check before the next check begins.
        first = min((f[0] for f in faults if f), default=None)
        if first is not None:
            number = next(n for n, f in enumerate(faults) if f and f[0] == first)
            what = faults[number][1]
            return rows, f"the record at offset {start + places[number]} {what}; "
        try:
            rows += [row(data, at) for at in places]
        except CorruptRecordError as error:  # raised by `decompress`
            return rows, str(error)
    return rows, None


def number(data, at, size, *, signed=True):
    """Return a big-endian integer."""
    return int.from_bytes(data[at : at + size], signed=signed)


def parts(data, at):
    """Return sysFlag, the bytes that IPv6 hosts add, and where the body begins and ends."""
    flags = number(data, at + 36, 4)
    extra = 12 * bool(flags & 0x10) + 12 * bool(flags & 0x20)
    start = at + 88 + extra
    return flags, extra, start, start + number(data, at + 84 + extra, 4)


def fault(data, at, base):
    """Return (number of the check, text) of the first check that a record fails; None if none."""
    if at > len(data) - _LEAST:
        return 0, "does not fit into the bytes that are there"
    size = number(data, at, 4)
    if not _LEAST <= size <= len(data) - at:
        return 1, "has an impossible size"
    magic = number(data, at + 4, 4, signed=False)
    if magic not in (V1_MAGIC, V2_MAGIC):
        return 2, "has no record magic"
    if number(data, at + 28, 8) != base + at:
        return 3, "has another physical offset"
    end = at + size
    _, _, start, stop = parts(data, at)
    if start > end - 3:
        return 4, "has an impossible size"
    if not start <= stop <= end - 3:
        return 5, "has an impossible body length"
    width = 1 if magic == V1_MAGIC else 2
    topic = number(data, stop, width, signed=width == 2)
    after = stop + width + topic
    if topic < 0 or after > end - 2:
        return 6, "has an impossible topic length"
    length = number(data, after, 2)
    if length < 0 or after + 2 + length != end:
        return 7, "has lengths that do not add up"
    if zlib.crc32(data[start:stop]) & 0x7FFFFFFF != number(data, at + 8, 4):
        return 8, "has a body that does not match its CRC"
    return None


def row(data, at):
    """Return some columns of a whole record; `timestamp` in us."""
    flags, extra, start, stop = parts(data, at)
    physical = number(data, at + 28, 8)
    body = data[start:stop]
    stored_ms = number(data, at + 56 + 12 * bool(flags & 0x10), 8)
    return {
        "value": decompress(body, flags, physical) if flags & 1 else body,
        "physicalOffset": physical,
        "timestamp": max(-LATEST_MS, min(stored_ms, LATEST_MS)) * 1000,  # damaged times
        "reconsumeTimes": number(data, at + 72 + extra, 4),
        "record": data[at : at + number(data, at, 4)],
    }
