"""Check many entries of a leader at once: what entry_check.py checks, in a fraction of the time.

Sizes are read one after the other, everything else as numpy columns. Entries that are not alike
(IPv6 hosts, long topics, member lists, anything invalid) are left to entry_check.py, which also
says what is wrong with them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from zlib_ng.zlib_ng import crc32

from hastore.protocol.dledger import AppendRequest
from hastore.record.bulk_check import are_valid
from hastore.record.layout import FLAG_ROLLBACK, MIN_RECORD_SIZE, offset_of
from hastore.record.log_format import (
    BODY_CRC_AT,
    ENTRY_BLANK,
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    INDEX_UNIT_BYTES,
    MAX_ENTRY_BYTES,
)

_HEADER = np.dtype(
    [
        ("magic", ">u4"), ("size", ">u4"), ("index", ">i8"), ("term", ">i8"), ("pos", ">i8"),
        ("channel", ">i4"), ("chain_crc", ">u4"), ("body_crc", ">u4"), ("body_size", ">u4"),
    ]
)  # fmt: skip
_UNIT = np.dtype(
    [("magic", ">u4"), ("pos", ">i8"), ("size", ">u4"), ("index", ">i8"), ("term", ">i8")]
)
assert _HEADER.itemsize == ENTRY_HEADER_BYTES and _UNIT.itemsize == INDEX_UNIT_BYTES
_FLAGS_AT = ENTRY_HEADER_BYTES + offset_of("sys_flag") + 3  # the lowest byte


def units_of(request: AppendRequest, data: memoryview, skip: int) -> tuple[int, bytes, int] | None:
    """Return where the entries after the first `skip` begin, their units, and the last bodyCrc.

    Returns None unless all entries are valid and alike.
    """
    count = sum(number for _, number in request.runs)
    starts = _starts(data, count)
    if starts is None:
        return None
    at = np.array(starts, np.int64)
    every = np.ndarray((len(data) - ENTRY_HEADER_BYTES + 1,), _HEADER, data, 0, (1,))
    heads = every[at]
    sizes = np.diff(at, append=len(data))
    indexes = np.arange(request.prev_index + 1, request.prev_index + 1 + count)
    numbers = [number for _, number in request.runs]
    terms = np.repeat(np.array([term for term, _ in request.runs], np.int64), numbers)
    good = (
        (heads["magic"] == ENTRY_MAGIC)
        & (heads["size"] == sizes)
        & (heads["body_size"] == sizes - ENTRY_HEADER_BYTES)
        & (heads["index"] == indexes)
        & (heads["term"] == terms)
        & (heads["pos"] == at + request.pos)
        & (sizes <= MAX_ENTRY_BYTES)
    )
    flags = np.frombuffer(data, np.uint8)[at + _FLAGS_AT]
    if not good.all() or ((flags & FLAG_ROLLBACK) == FLAG_ROLLBACK).any():
        return None
    records = at[skip:] + ENTRY_HEADER_BYTES
    if len(records) and not are_valid(
        data, records + request.pos, sizes[skip:] - ENTRY_HEADER_BYTES, records
    ):
        return None
    if not _crcs_right(data, heads[skip:], starts[skip:]):
        return None
    units = np.empty(count - skip, _UNIT)
    for name in ("magic", "pos", "size", "index", "term"):
        units[name] = heads[name][skip:]
    begin = starts[skip] if skip < count else len(data)
    return begin, units.tobytes(), int(heads["body_crc"][-1])


def _crcs_right(data: memoryview, heads: npt.NDArray[Any], starts: Sequence[int]) -> bool:
    """Whether the CRCs of entries are right, and follow each other; entries may have none."""
    crcs, chain = heads["body_crc"], heads["chain_crc"]
    broken = (chain[1:] != 0) & (chain[1:] != crcs[:-1])
    if broken.any() or ((crcs == 0) & (chain != 0)).any():
        return False
    if not crcs.any():
        return True
    checksum, head, rest = crc32, BODY_CRC_AT, BODY_CRC_AT + 4
    computed = [
        checksum(data[start + rest : end], checksum(data[start : start + head])) or 1
        for start, end in zip(starts, [*starts[1:], len(data)], strict=True)
    ]
    return not ((crcs != 0) & (crcs != np.array(computed, np.int64))).any()


def _starts(data: memoryview, count: int) -> Sequence[int] | None:
    """Return where `count` entries with records begin, if these are exactly the data."""
    starts: list[int] = []
    add, unpack, end = starts.append, ENTRY_BLANK.unpack_from, len(data)
    at, last = 0, end - ENTRY_HEADER_BYTES - MIN_RECORD_SIZE
    while at <= last:
        add(at)
        at += unpack(data, at)[1] or end
    return starts if at == end and len(starts) == count else None
