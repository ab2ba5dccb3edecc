"""What a node has read of the committed positions, kept in `<store>/hastore/positions-read`.

After a restart the node then reads only the commits made since. The file is a cache: it counts only
if the log still has the very record that was read last, in the same epoch. If a cut, a resync, a
power loss or retention has taken that record, or the file is damaged, all is read from the log.

The first line is an object in JSON, `_Head`; each of the others is the positions or the locks of a
group in a topic. The thread PositionReader uses this.
"""

from __future__ import annotations

import zlib

import msgspec

from hastore.errors import UNREADABLE, CorruptRecordError
from hastore.fs.filesystem import FileSystem
from hastore.protocol.committed_positions import LocksRead, Pair, Place, RecordedLock
from hastore.server.api.commits import LastRead, TableRead

_VERSION = 1
_FILE_BYTES_MAX = 1 << 30


class _Head(msgspec.Struct, frozen=True):
    version: int
    lines: int
    crc32: int
    next: int
    last: LastRead
    now_ms: float
    stored_ms: int | None
    since_ms: float | None


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    group: str
    topic: str
    positions: dict[int, Place] = {}
    locks: dict[int, RecordedLock] = {}


_line_decoder = msgspec.json.Decoder(_Line)
_head_decoder = msgspec.json.Decoder(_Head)


class PositionFile:
    """The file; `save` and `load` raise OSError."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/positions-read"

    def save(self, read: TableRead) -> None:
        """Replace the file durably."""
        pairs, locks = read.positions.items(), read.locks
        lines = [_Line(*pair, positions=dict(places)) for pair, places in pairs]
        lines += [_Line(*pair, locks=dict(held)) for pair, held in locks.held.items()]
        body = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        head = _Head(
            _VERSION, len(lines), zlib.crc32(body), read.next, read.last,
            locks.now_ms, locks.stored_ms, locks.since_ms,
        )  # fmt: skip
        self._fs.replace_bytes(self._path, msgspec.json.encode(head) + b"\n" + body)

    def load(self) -> TableRead | None:
        """Return what was saved; None without a file. Raises CorruptRecordError, OSError."""
        if not self._fs.exists(self._path):
            return None
        return parse(self._fs.read_bytes(self._path, _FILE_BYTES_MAX))


def parse(raw: bytes) -> TableRead:
    """Return the content of the file. Raises CorruptRecordError."""
    first, _, body = raw.partition(b"\n")
    try:
        head = _head_decoder.decode(first)
        if head.version != _VERSION:
            raise CorruptRecordError(f"its version {head.version} is unknown")
        if zlib.crc32(body) != head.crc32:
            raise CorruptRecordError("the checksum of its lines is wrong")
        lines = [_line_decoder.decode(line) for line in body.splitlines()]
    except UNREADABLE as error:
        raise CorruptRecordError(f"it is unreadable: {error}") from error
    positions: dict[Pair, dict[int, Place]] = {}
    held: dict[Pair, dict[int, RecordedLock]] = {}
    for line in lines:
        if line.positions:
            positions[line.group, line.topic] = line.positions
        if line.locks:
            held[line.group, line.topic] = line.locks
    locks = LocksRead(head.now_ms, head.stored_ms, head.since_ms, held)
    return TableRead(head.next, head.last, positions, locks)
