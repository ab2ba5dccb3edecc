"""Check the items of a log one after the other, and go on past damage. Pure: the caller reads.

What is damaged is a range: from an item, or a blank, that is not valid to the next valid item. A
range at the end of the walk ends where the walk may read no further. Items are valid as recovery
takes them to be (log_format.py); what no CRC covers may be damaged without a sign. In a log of
entries each must also continue the one before it.

`Read` returns at most so many bytes of the log from an offset, all in one file. An OSError with EIO
says that the disk cannot read them: then each page is tried alone, and an item with an unreadable
page is damaged. Other exceptions pass through.
"""

import copy
import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hastore.record.codec import find_parts
from hastore.record.log_format import (
    Check,
    EntryChain,
    LogFormat,
    read_header,
    record_places,
)

Read = Callable[[int, int], bytes]
Spans = list[tuple[int, int]]

WINDOW_BYTES = 1 << 20  # of one read, unless one item is longer
# A longer item counts as damaged: its size is wrong. RocketMQ's limit is 4 MiB by default.
ITEM_BYTES_MAX = 64 << 20
RECENT_ITEMS = 4
_BLANK_HEAD = 8
_PAGE = 4096  # bytes that the disk may not be able to read; larger pages are tried in parts


@dataclass(frozen=True, slots=True)
class Damage:
    """The bytes [start, end) of a log, and why they are not valid."""

    start: int
    end: int
    reason: str


class LogWalk:
    """A walk over a log; `next_damage` goes on to the next damaged range."""

    def __init__(
        self,
        form: LogFormat,
        read: Read,
        file_size: int,
        start: int,
        end: int,
        *,
        limit: int | None = None,
        ends_whole: bool = True,
        chain: Check | None = None,
        searches: bool = True,
    ) -> None:
        """Prepare a walk from the item at `start` over all items that begin below `end`.

        Nothing is read beyond `limit` (None: `end`). `ends_whole`: an item is known to end there,
        so that invalid bytes up to it are damage; otherwise invalid bytes that no valid item
        follows are where the log ends. `chain` has checked what lies before `start`. With
        `searches` false, a damaged range ends at `limit`: nobody looks for what follows it.
        """
        self.offset = start  # all before is sound, or was returned
        self.end = end
        self.limit = end if limit is None else limit
        # (start, end) of the last items before `offset`, with nothing damaged in between.
        self.recent: deque[tuple[int, int]] = deque(maxlen=RECENT_ITEMS)
        self.chain = form.chain() if chain is None else chain
        self._form = form
        self._read = read
        self._file_size = file_size
        self._ends_whole = ends_whole
        self._searches = searches

    def file_end(self, offset: int) -> int:
        """Return where the file that holds `offset` ends."""
        return offset - offset % self._file_size + self._file_size

    def next_damage(self) -> Damage | None:
        """Go on to the next damaged range; None at the end.

        `offset` is where it begins, and `chain` has checked what lies before it. The next call
        looks at the same bytes again, unless `skip` is called first.
        """
        wanted = WINDOW_BYTES
        while self.offset < self.end:
            begin, file_end = self.offset, self.file_end(self.offset)
            left = min(file_end, self.limit) - begin
            data, unreadable = self._window(begin, min(wanted, left))
            self._walk(memoryview(data), unreadable, file_end)
            if self.offset > begin:
                wanted = WINDOW_BYTES
                continue
            size = self._form.announced(data, 0, len(data))
            if wanted < size <= min(left, ITEM_BYTES_MAX):
                wanted = size
                continue
            return self._damage(data, unreadable)
        return None

    def skip(self, damage: Damage) -> None:
        """Go on behind a damaged range."""
        self._begin_at(damage.end)

    def _begin_at(self, offset: int) -> None:
        self.offset, self.chain = offset, self._form.chain()
        self.recent.clear()

    def _walk(self, data: memoryview, unreadable: Spans, file_end: int) -> None:
        """Move through the valid items, and the blank, that `data` begins with."""
        form, check = self._form, self.chain
        begin, end, at = self.offset, len(data), 0
        while at < end and begin + at < self.end:
            place = begin + at
            if unreadable and _meets(unreadable, at, max(form.announced(data, at, end), 1)):
                return
            size = check(data, at, end, place)
            if size:
                at += size
                self.offset = begin + at
                self.recent.append((place, self.offset))
                continue
            if end - at >= _BLANK_HEAD and form.check_blank(data, at, at + file_end - place):
                self.offset = file_end
            return

    def _damage(self, data: bytes, unreadable: Spans) -> Damage | None:
        start = self.offset
        if self._has_lost_its_crc(data):
            assert isinstance(self.chain, EntryChain)
            index = self.chain.next_index
            start = self.recent[-1][0]
            self._begin_at(start)
            assert isinstance(self.chain, EntryChain) and index is not None
            self.chain.next_index = index - 1
            return Damage(start, self._next_end(start), "an entry has lost its CRC")
        if unreadable and _meets(unreadable, 0, max(self._form.announced(data, 0, len(data)), 1)):
            why = "the disk cannot read it"
        elif isinstance(self.chain, EntryChain):
            why = self.chain.why_not(data, 0, len(data), start)
        else:
            parts = find_parts(data, 0, len(data))
            is_here = parts is not None and parts[2] == start
            why = "the body's CRC is wrong" if is_here else "no valid record"
        end = self._next_good(start + 1) if self._searches else self.limit
        if end is None:
            if not self._ends_whole:
                self.end = start
                return None
            end = self.limit
        return Damage(start, end, why)

    def _has_lost_its_crc(self, data: bytes) -> bool:
        """Whether the entry here is sound, and says that the one before had a CRC: it has none."""
        chain = self.chain
        if not isinstance(chain, EntryChain) or chain.crc != 0 or not self.recent:
            return False
        header = read_header(data, 0, len(data), self.offset)
        if header is None or not header.chain_crc or header.index != chain.next_index:
            return False
        return self._form.check_item(data, 0, len(data), self.offset) > 0

    def _next_end(self, start: int) -> int:
        """Return where the entry at `start`, whose header is sound, ends."""
        head = self._window(start, self._form.lead)[0]
        return start + self._form.announced(head, 0, len(head))

    def _next_good(self, start: int) -> int | None:
        """Return the first valid item from `start` on; None if there is none."""
        ahead = self._form.lead + _BLANK_HEAD  # the record's magic ends there
        while start < self.limit:
            file_end = self.file_end(start)
            stop = min(file_end, self.limit)
            while start + ahead <= stop:
                data, _ = self._window(start, min(WINDOW_BYTES, stop - start))
                for at in record_places(data, self._form.lead):
                    if self._goes_on_at(start + at, stop):
                        return start + at
                if len(data) < ahead:
                    break
                start += len(data) - ahead + 1
            start = file_end
        return None

    def _goes_on_at(self, place: int, stop: int) -> bool:
        """Whether a valid item begins at `place` that may follow what was checked before."""
        form = self._form
        head = self._window(place, min(form.lead + _BLANK_HEAD, stop - place))[0]
        size = form.announced(head, 0, len(head))
        if not 0 < size <= min(stop - place, ITEM_BYTES_MAX):
            return False
        data, unreadable = self._window(place, size)
        if unreadable or form.check_item(data, 0, len(data), place) != size:
            return False
        if isinstance(self.chain, EntryChain):
            header = read_header(data, 0, size, place)
            assert header is not None
            # The damaged bytes had an entry, unless they are a blank.
            next_index = self.chain.next_index or 0
            first = next_index if place % self._file_size == 0 else next_index + 1
            return header.index >= first and header.term >= self.chain.term
        return True

    def _window(self, offset: int, size: int) -> tuple[bytes, Spans]:
        """Read bytes; those that the disk cannot read are zeros, and listed by position."""
        try:
            return self._read(offset, size), []
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
        found, unreadable = bytearray(), []
        while len(found) < size:
            at = offset + len(found)
            some = min(size - len(found), _PAGE - at % _PAGE)
            try:
                data = self._read(at, some)
            except OSError as failure:
                if failure.errno != errno.EIO:
                    raise
                unreadable.append((len(found), len(found) + some))
                data = bytes(some)
            found += data
            if len(data) < some:  # the file's end
                break
        return bytes(found), unreadable


def following(walk: LogWalk) -> Check:
    """Return a copy of the walk's chain, to check other bytes in place of those that come next."""
    return copy.copy(walk.chain)


def _meets(spans: Spans, at: int, size: int) -> bool:
    """Whether [at, at + size) and one of the spans have a byte in common."""
    return any(start < at + size and at < end for start, end in spans)
