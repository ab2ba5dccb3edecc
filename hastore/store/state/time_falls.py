"""`<root>/hastore/times`: where the store times of the log fall, because a clock was set back.

    magic "HSST" 4 | version 4 | each: offset 8, time before 8 | CRC-32 (of all before) 4

Replay replaces the file, durably, before it counts the record of a new fall as read.
"""

import logging
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hastore.fs.filesystem import FileSystem
from hastore.store.state.crc_frame import CrcFrame

log = logging.getLogger(__name__)

_FRAME = CrcFrame(b"HSST", 1)
_FALL = struct.Struct(">qq")
_FILE_BYTES_MAX = 1 << 20


class Fall(NamedTuple):
    """The record at `offset` was stored earlier than one before it, by the times of both."""

    offset: int
    before_ms: int  # the greatest time since the fall before


def read_falls(fs: FileSystem, root: str) -> tuple[Fall, ...]:
    """Return the falls, in order; none if the file is missing or damaged. Raises OSError."""
    path = f"{root}/hastore/times"
    if not fs.exists(path):
        return ()
    content = _FRAME.unpack(fs.read_bytes(path, _FILE_BYTES_MAX))
    if content is None or len(content) % _FALL.size:
        log.warning(
            "%s is damaged: lookups by time may begin too late where a clock was set back; to have"
            " it made anew, stop the node and remove hastore/replay",
            path,
        )
        return ()
    return tuple(Fall(*one) for one in _FALL.iter_unpack(content))


def write_falls(fs: FileSystem, root: str, falls: Sequence[Fall]) -> None:
    """Replace the file, durably. Raises OSError."""
    data = _FRAME.pack(*(_FALL.pack(*fall) for fall in falls))
    fs.replace_bytes(f"{root}/hastore/times", data)
