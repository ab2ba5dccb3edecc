"""Look at what a master sends before it is acknowledged: each record's place, and its body's CRC.

Frames up to CHECKED_BYTES_MAX are looked at, which is all that a master pushes while its slave is
caught up; longer ones, of a slave that catches up, would cost a third of its CPU
(docs/ha-link.md has the figures). Pure but for the log that it reads.
"""

from collections.abc import Container

from zlib_ng.zlib_ng import crc32

from hastore.errors import ProtocolError
from hastore.ha.node.replica_log import ReplicaLog
from hastore.record.codec import check_record, check_unreadable
from hastore.record.layout import (
    BLANK_MAGIC,
    CRC_MASK,
    FLAG_IPV6,
    HEADER_SIZE,
    HEADER_SIZES,
    MIN_RECORD_SIZE,
    V1_MAGIC,
    V2_MAGIC,
    header_struct,
)

CHECKED_BYTES_MAX = 128 * 1024  # what a master pushes at once
_FRONT = header_struct(
    "size", "magic", "body_crc", "physical_offset", "sys_flag", "body_length"
)  # between IPv4 hosts
_TAIL_BYTES_MAX = 2 * (2 + 0xFFFF)  # of a record behind its body: topic and properties


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
    """Check whole records behind `begin`; what is `accepted`, an (offset, crc), came twice alike
    and passes. `record_start`: where a record is known to begin.
    """

    def __init__(
        self,
        log: ReplicaLog,
        accepted: Container[tuple[int, int]] = (),
        record_start: int | None = None,
    ) -> None:
        self._log = log
        self._record_start = record_start
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
                self._from, self._sure = offset, offset == self._record_start

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

        A wrong size is no matter of the CRC: it shows where the next record is not at its end.
        """
        at, end, unpack, checksum = 0, len(view), _FRONT.unpack_from, crc32
        last = -1  # where the latest whole record begins
        while end - at >= HEADER_SIZE:
            size, magic, crc, place, flags, length = unpack(view, at)
            body_at = at + HEADER_SIZE
            if (  # the one layout that most have, as quickly as that goes
                magic == V1_MAGIC
                and place == start + at
                and not flags & FLAG_IPV6
                and 0 <= length <= size - MIN_RECORD_SIZE
                and at + size <= end
                and checksum(view[body_at : body_at + length]) & CRC_MASK == crc
            ):
                last = at
                at += size
                self._sure = True
                continue
            if (magic != V1_MAGIC and magic != V2_MAGIC) or place != start + at:
                if magic == BLANK_MAGIC or not self._sure:
                    return None
                if not self._is_ill_sized(view, last, start):
                    self._refuse(view[at : at + HEADER_SIZE], start + at)
                return None
            after = at + size
            if flags & FLAG_IPV6:
                body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
                length = int.from_bytes(view[body_at - 4 : body_at], signed=True)
            if after > end:
                if body_at <= end and _is_too_long(view, at, start, body_at, length):
                    self._refuse(view[at : at + HEADER_SIZE], start + at)
                    return None
                return at
            body_end = body_at + length
            if size < MIN_RECORD_SIZE:
                self._refuse(view[at : at + HEADER_SIZE], start + at)
                return None
            body_fits = body_at <= body_end <= after
            if not body_fits or checksum(view[body_at:body_end]) & CRC_MASK != crc:
                self._refuse(view[at:after], start + at)
            self._sure = True
            last, at = at, after
        return None if at < end and self._is_ill_sized(view, last, start) else at

    def _is_ill_sized(self, view: memoryview, at: int, start: int) -> bool:
        """Refuse the record at `at` (-1: none) if its size is not that of its parts; whether it is
        so all the same, and nobody knows where the next one begins.
        """
        if at < 0:
            return False
        layout = view, at, len(view), start + at
        if check_record(*layout) or check_unreadable(*layout):
            return False
        self._refuse(view[at : at + HEADER_SIZE], start + at)
        return True

    def _refuse(self, record: memoryview, offset: int) -> None:
        crc = crc32(record)
        if (offset, crc) not in self._accepted:
            raise DamagedRecordError(offset, crc)


def _is_too_long(view: memoryview, at: int, start: int, body_at: int, length: int) -> bool:
    """Whether the record at `at`, which is to end beyond the view, says more than its parts do."""
    size, magic = _FRONT.unpack_from(view, at)[:2]
    end, after, topic_at = len(view), at + size, body_at + length
    if length < 0 or not topic_at + 3 <= after <= topic_at + _TAIL_BYTES_MAX:
        return True
    properties_at = topic_at + (3 if magic == V1_MAGIC else 4)
    if properties_at > end:
        return False
    properties_at += int.from_bytes(view[topic_at : properties_at - 2])
    if properties_at > end:
        return False
    real = properties_at + int.from_bytes(view[properties_at - 2 : properties_at])
    if real > end:
        return False
    following = view[real : real + HEADER_SIZE]
    if len(following) < HEADER_SIZE:
        return not following
    place: int = _FRONT.unpack_from(following)[3]
    return place == start + real
