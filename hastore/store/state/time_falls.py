"""`<root>/hastore/times`: where the store times of the log fall, because a clock was set back.

    magic "HSST" 4 | version 4 | content | CRC-32 (of all before) 4
    version 1, if none is small: each: offset 8, time before 8
    version 2: thinned end 8 | each: offset 8, time before 8, small 1

Replay replaces the file, durably, before it counts the record of a new fall as read.
"""

import logging
import struct
from typing import NamedTuple

from hastore.fs.filesystem import FileSystem
from hastore.store.state.crc_frame import CrcFrame

log = logging.getLogger(__name__)

_FRAME, _FRAME_2 = CrcFrame(b"HSST", 1), CrcFrame(b"HSST", 2)
_FALL, _FALL_2, _END = struct.Struct(">qq"), struct.Struct(">qq?"), struct.Struct(">q")
_FILE_BYTES_MAX = 1 << 20


class Fall(NamedTuple):
    """The record at `offset` was stored earlier than one before it, by the times of both."""

    offset: int
    before_ms: int  # the greatest time since the last fall that is not small


class Falls(NamedTuple):
    """The falls of a log, in order. Between two of them the store times rise.

    A fall is small if a store time falls to at most REPEATED_MS below the greatest one since the
    last fall that is not small.
    """

    all: tuple[Fall, ...] = ()
    small: frozenset[int] = frozenset()  # the offsets of those that are small
    thinned_end: int = 0  # offset: up to it, small falls may be left out


NO_FALLS = Falls()


def read_falls(fs: FileSystem, root: str) -> Falls:
    """Return the falls; none if the file is missing or damaged. Raises OSError."""
    path = f"{root}/hastore/times"
    if not fs.exists(path):
        return NO_FALLS
    data = fs.read_bytes(path, _FILE_BYTES_MAX)
    content, content_2 = _FRAME.unpack(data), _FRAME_2.unpack(data)
    if content is not None and len(content) % _FALL.size == 0:
        return Falls(tuple(Fall(*one) for one in _FALL.iter_unpack(content)))
    if content_2 is not None and len(content_2) % _FALL_2.size == _END.size:
        found = list(_FALL_2.iter_unpack(content_2[_END.size :]))
        return Falls(
            tuple(Fall(offset, before_ms) for offset, before_ms, _ in found),
            frozenset(offset for offset, _, small in found if small),
            _END.unpack_from(content_2)[0],
        )
    log.warning(
        "%s is damaged: lookups by time may begin too late where a clock was set back; to have"
        " it made anew, stop the node and remove hastore/replay",
        path,
    )
    return NO_FALLS


def write_falls(fs: FileSystem, root: str, falls: Falls) -> None:
    """Replace the file, durably. Raises OSError.

    Versions before know no small falls: they can read what this writes for a log without any.
    """
    if falls.small or falls.thinned_end:
        parts = [_FALL_2.pack(*one, one.offset in falls.small) for one in falls.all]
        data = _FRAME_2.pack(_END.pack(falls.thinned_end), *parts)
    else:
        data = _FRAME.pack(*(_FALL.pack(*one) for one in falls.all))
    fs.replace_bytes(f"{root}/hastore/times", data)
