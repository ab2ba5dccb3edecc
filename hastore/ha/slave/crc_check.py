"""CrcCheck: checks received records before they are reported: their offsets and bodies' CRCs.

Only frames of up to CHECKED_BYTES_MAX are checked. A slave that is caught up gets only such
frames. Longer frames go to a slave that catches up; checking them would take a third to a half more
CPU (docs/ha-link.md has the figures). SlaveStream calls CrcCheck in its receiving thread.
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

CHECKED_BYTES_MAX = 128 * 1024  # the most that a master pushes in one frame
_FRONT = header_struct(
    "size", "magic", "body_crc", "physical_offset", "sys_flag", "body_length"
)  # between IPv4 hosts
_TAIL_BYTES_MAX = 2 * (2 + 0xFFFF)  # the most that topic and properties take after the body


class DamagedRecordError(ProtocolError):
    """A received record is damaged, on the way or in the master's log; it is not reported.

    `crc` recognizes the same bytes when they come again. It is the CRC of the record's first
    HEADER_SIZE bytes, or of the whole record if its body does not fit or has a wrong CRC.
    """

    def __init__(self, offset: int, crc: int) -> None:
        super().__init__(
            f"the received record at {offset} is damaged: its header or its body's CRC is wrong; "
            "the record is not acknowledged, and is fetched again"
        )
        self.offset = offset
        self.crc = crc


class CrcCheck:
    """Check the whole records of one link's frames.

    A record starts at `record_start`, if that is not None. `accepted` lists damaged records, as
    (offset, CRC), that pass because the master has sent the same bytes twice.
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
        # Where checking goes on; None: unknown, until the next short frame.
        self._next: int | None = None
        self._frame = 0  # where the latest frame starts
        self._aligned = False  # whether a record is known to start at `_next`

    def begin(self, offset: int, size: int) -> None:
        """Note a frame's header. A long frame is not checked."""
        if size > CHECKED_BYTES_MAX:
            self._next = None
        elif size:
            self._frame = offset
            if self._next is None:
                self._next, self._aligned = offset, offset == self._record_start

    def check_piece(self, offset: int, data: memoryview) -> None:
        """Check the whole records in a piece of a frame, in memory; raises DamagedRecordError.

        `check_appended` checks a piece that starts inside a record, after it has been appended.
        """
        if self._next == offset:
            at = self._walk(data, offset)
            if at is not None:
                self._next = offset + at
            elif self._aligned:  # a blank, or an accepted record with a wrong size
                self._next = None

    def check_appended(self, end: int) -> None:
        """Check whole records that `check_piece` has not checked, up to the log's end.

        Raises DamagedRecordError.
        """
        start = self._next
        while start is not None and start < end:
            with self._log.view(start, end - start) as view:
                at, seen = self._walk(view, start), len(view)
            if start + seen < end:
                start += seen  # the view ends at a file's end; the next file starts with a record
                self._aligned = True
            elif at is None and not self._aligned and start < self._frame < end:
                # No record starts at `start`; one may start where the latest frame does.
                start = self._frame
            else:
                start = None if at is None else start + at
                break
        self._next = start

    def _walk(self, view: memoryview, start: int) -> int | None:
        """Return where the first incomplete record starts, relative to `start`.

        Return None if that is unknown: after a blank, if no record starts at `start`, or after an
        accepted record with a wrong size. The CRC does not cover a record's size. A wrong size is
        noticed because no record begins where it says that this one ends.
        """
        at, end, unpack, checksum = 0, len(view), _FRONT.unpack_from, crc32
        last = -1  # where the latest whole record starts
        while end - at >= HEADER_SIZE:
            size, magic, crc, place, flags, length = unpack(view, at)
            body_at = at + HEADER_SIZE
            if (  # fast path: a record of version 1 without IPv6 hosts
                magic == V1_MAGIC
                and place == start + at
                and not flags & FLAG_IPV6
                and 0 <= length <= size - MIN_RECORD_SIZE
                and at + size <= end
                and checksum(view[body_at : body_at + length]) & CRC_MASK == crc
            ):
                last = at
                at += size
                self._aligned = True
                continue
            if (magic != V1_MAGIC and magic != V2_MAGIC) or place != start + at:
                if magic == BLANK_MAGIC or not self._aligned:
                    return None
                if not self._has_wrong_size(view, last, start):
                    self._refuse(view[at : at + HEADER_SIZE], start + at)
                return None
            after = at + size
            if flags & FLAG_IPV6:
                body_at = at + HEADER_SIZES[flags & FLAG_IPV6]
                length = int.from_bytes(view[body_at - 4 : body_at], signed=True)
            if after > end:
                if body_at <= end and _claims_too_much(view, at, start, body_at, length):
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
            self._aligned = True
            last, at = at, after
        return None if at < end and self._has_wrong_size(view, last, start) else at

    def _has_wrong_size(self, view: memoryview, at: int, start: int) -> bool:
        """Refuse the record at `at` (-1: none) if its size does not match its parts.

        A record in `accepted` is not refused. True is then returned: its size is wrong, so the
        start of the next record is unknown.
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


def _claims_too_much(view: memoryview, at: int, start: int, body_at: int, length: int) -> bool:
    """Whether the size of the record at `at` exceeds its parts; it ends beyond the view."""
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
