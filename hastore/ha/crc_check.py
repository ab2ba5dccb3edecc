"""Look at what a master sends before it is acknowledged: each record's place, and its body's CRC.

Frames up to CHECKED_BYTES_MAX are looked at, which is all that a master pushes while its slave is
caught up; longer ones, of a slave that catches up, would cost a third of its CPU
(docs/ha-link.md has the figures). Pure but for the log that it reads.
"""

import struct

from zlib_ng.zlib_ng import crc32

from hastore.errors import ProtocolError
from hastore.ha.replica_log import ReplicaLog
from hastore.store.record import (
    BLANK_MAGIC,
    CRC_MASK,
    FLAG_IPV6,
    IPV6_EXTRA,
    MIN_RECORD_SIZE,
    V1_MAGIC,
    V2_MAGIC,
)

CHECKED_BYTES_MAX = 128 * 1024  # what a master pushes at once
_FRONT = struct.Struct(">iIi16xqi44xi")  # size, magic, CRC, place, flags, body length
_BODY_AT = _FRONT.size


class DamagedRecordError(ProtocolError):
    """A record came damaged, or its master has it so: it is not acknowledged.

    `crc` is of all bytes that came, to tell whether they come alike again.
    """

    def __init__(self, offset: int, crc: int) -> None:
        super().__init__(
            f"the record at {offset} came damaged: its head or its body's CRC is wrong; it is not "
            "acknowledged, and is fetched again"
        )
        self.offset = offset
        self.crc = crc


class CrcCheck:
    """Check whole records behind `begin`; `accepted` (offset, crc) came twice alike and passes."""

    def __init__(self, log: ReplicaLog, accepted: tuple[int, int] | None = None) -> None:
        self._log = log
        self._accepted = accepted
        self._from: int | None = None  # the first record that was not looked at; None: unknown
        self._frame = 0  # where the latest frame began
        self._sure = False  # whether a record is known to begin there

    def begin(self, offset: int, size: int) -> None:
        """Take note of a frame's start; a long one is let through."""
        if size > CHECKED_BYTES_MAX:
            self._from = None
        elif size:
            self._frame = offset
            if self._from is None:
                self._from, self._sure = offset, False

    def take(self, offset: int, data: memoryview) -> None:
        """Look at the whole records in a piece of a frame while it is at hand; DamagedRecordError.

        A piece that continues a record is left to `check`.
        """
        if self._from == offset:
            at = self._walk(data, offset)
            if at is not None:
                self._from = offset + at
            elif self._sure:  # a blank
                self._from = None

    def check(self, end: int) -> None:
        """Look at the whole records before the log's end that `take` left; DamagedRecordError."""
        start = self._from
        while start is not None and start < end:
            with self._log.view(start, end - start) as view:
                at, seen = self._walk(view, start), len(view)
            if start + seen < end:
                start += seen  # a file's end: a record begins the next one
                self._sure = True
            elif at is None and not self._sure and start < self._frame < end:
                start = self._frame  # it began inside a record: the latest frame may not
            else:
                start = None if at is None else start + at
                break
        self._from = start

    def _walk(self, view: memoryview, start: int) -> int | None:
        """Return where the first record begins that is not whole; None for a blank, or when the
        frame turns out to begin inside a record.
        """
        at, end, unpack, checksum = 0, len(view), _FRONT.unpack_from, crc32
        while end - at >= _BODY_AT:
            size, magic, crc, place, flags, length = unpack(view, at)
            body_at = at + 88
            if (  # the one layout that most have, as quickly as that goes
                magic == 0xDAA320A7
                and place == start + at
                and not flags & 0x30
                and 0 <= length <= size - 91
                and at + size <= end
                and checksum(view[body_at : body_at + length]) & 0x7FFFFFFF == crc
            ):
                at += size
                self._sure = True
                continue
            if (magic != V1_MAGIC and magic != V2_MAGIC) or place != start + at:
                if magic == BLANK_MAGIC or not self._sure:
                    return None
                self._refuse(view[at : at + _BODY_AT], start + at)
                return None
            after = at + size
            if after > end:
                break
            if flags & FLAG_IPV6:
                body_at += IPV6_EXTRA * ((flags >> 4 & 1) + (flags >> 5 & 1))
                length = int.from_bytes(view[body_at - 4 : body_at], signed=True)
            body_end = body_at + length
            if size < MIN_RECORD_SIZE:
                self._refuse(view[at : at + _BODY_AT], start + at)
                return None
            body_fits = body_at <= body_end <= after
            if not body_fits or checksum(view[body_at:body_end]) & CRC_MASK != crc:
                self._refuse(view[at:after], start + at)
            self._sure = True
            at = after
        return at

    def _refuse(self, record: memoryview, offset: int) -> None:
        crc = crc32(record)
        if (offset, crc) != self._accepted:
            raise DamagedRecordError(offset, crc)
