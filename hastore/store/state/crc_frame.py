"""The frame of the store's own state files: it shows whether a file is damaged or torn.

    0 magic 4 | 4 version 4 | 8 content | CRC-32 (of all before) 4

All numbers are big-endian. This module does no I/O. The modules that write the files describe their
content: limits.py, replay_progress.py, append/dedup_window.py.
"""

import struct
import zlib
from collections.abc import Callable
from typing import TypeVar

FRAME_BYTES = 12  # magic, version and CRC
# Of a state file: more than any of them has. One that is read in part would look damaged.
FILE_BYTES_MAX = 1 << 30
_HEAD = struct.Struct(">4sI")
_CRC = struct.Struct(">I")

T = TypeVar("T")


class CrcFrame:
    """The frame of one kind of file."""

    def __init__(self, magic: bytes, version: int) -> None:
        self._head = _HEAD.pack(magic, version)

    def pack(self, *parts: bytes) -> bytes:
        """Return the framed content; it may be given in parts, which are joined only once."""
        crc = zlib.crc32(self._head)
        for part in parts:
            crc = zlib.crc32(part, crc)
        return b"".join((self._head, *parts, _CRC.pack(crc)))

    def unpack(self, framed: bytes) -> memoryview | None:
        """Return a frame's content; None if the frame is damaged, torn or of another kind."""
        view = memoryview(framed)
        if len(view) < FRAME_BYTES or view[: _HEAD.size] != self._head:
            return None
        body = view[: -_CRC.size]
        if _CRC.unpack(view[-_CRC.size :])[0] != zlib.crc32(body):
            return None
        return body[_HEAD.size :]

    def read(self, framed: bytes, parse: Callable[[memoryview], T]) -> T | None:
        """Return what `parse` makes of a frame's content; None without a sound frame, as `unpack`.

        None too if `parse` finds that lengths do not add up: struct.error, ValueError, LookupError;
        a right CRC says that the file is as it was written, but not by which version.
        """
        content = self.unpack(framed)
        if content is None:
            return None
        try:
            return parse(content)
        except (struct.error, ValueError, LookupError):
            return None
