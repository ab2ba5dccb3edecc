"""Bring the index of a log of entries in line with the log, when a store is opened.

Recovery has read the log's last entries, and checked all of them. Of the entries before, the units
in the index files count, as far as they are known to be on the disk: all of them after a clean
stop, else those below `synced_index`. The page cache of a killed process does not count: a sync of
it may have failed. The first entry of each data file must equal its unit, as in DLedger. What is
missing or differs is written anew from the entries' headers.
"""

import logging

from hastore.errors import StoreBrokenError
from hastore.record.log_format import (
    ENTRY_HEADER_BYTES,
    INDEX_UNIT_BYTES,
    EntryHeader,
    check_entry_blank,
    pack_unit,
    read_header,
)
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.entry_index import EntryIndex
from hastore.store.log.recovery import Recovered
from hastore.store.state.entry_state import EntryFacts

log = logging.getLogger(__name__)

_WINDOW_BYTES = 1 << 20
_UNITS_BYTES = 1 << 20  # units written at a time
_Begin = tuple[int, int, int]  # index, position, term of the entry before


def load_entries(
    commit_log: CommitLog,
    recovered: Recovered,
    *,
    trusted: bool,
    committed_index: int = -1,
    page_lost: bool = False,
) -> None:
    """Load the index; `trusted` if all units that were written are on the disk.

    `committed_index` is what the checkpoint says: the log must hold that entry. With `page_lost`
    (there is no limits page) it must also hold all entries whose units were synced. Writes to the
    index only. Raises StoreBrokenError if it does not, or if an entry below the ones that recovery
    read is damaged; OSError.
    """
    index, chain = commit_log.entries, recovered.chain
    assert index is not None
    begin = _begin(commit_log, index, recovered)
    is_empty = recovered.end == recovered.min_offset
    read_to = None if chain is None else chain.next_index
    if is_empty or read_to is not None:
        last = (begin[0] if is_empty or read_to is None else read_to) - 1
        _refuse_short(commit_log, recovered, last, committed_index, page_lost=page_lost)
    if is_empty:
        index.adopt(begin, begin[0] - 1, bytearray())
        return
    read_from = recovered.scanned_from
    first = chain.first_index if chain is not None else None
    if chain is None or first is None:
        read_from, first = recovered.end, None
    known, complete = _last_right_unit(commit_log, index, begin, read_from, trusted=trusted)
    walk = _Walk(commit_log, index, *known)
    unit = None if first is None else index.read_unit(first)
    if (
        first is None
        or not complete
        or unit is None
        or unit.pos != read_from
        or not (trusted or first <= index.state.now.synced_index)
    ):
        walk.write_units(read_from)
        if first is not None and walk.next_index != first:
            raise _broken(commit_log, read_from, f"entry {walk.next_index} was expected")
    if chain is not None and first is not None:
        index.load_units(first, chain.units)
        assert chain.next_index is not None
        index.adopt(begin, chain.next_index - 1, chain.units)
    else:  # recovery has read no entry: the log ends where it began to read
        last = walk.next_index - 1
        _refuse_short(commit_log, recovered, last, committed_index, page_lost=page_lost)
        index.adopt(begin, last, walk.last_units)


def _refuse_short(
    commit_log: CommitLog,
    recovered: Recovered,
    last: int,
    committed_index: int,
    *,
    page_lost: bool,
) -> None:
    """Raise StoreBrokenError if the log, which ends with entry `last`, lacks what was in it."""
    index = commit_log.entries
    assert index is not None
    facts = index.state.now
    if facts.install is not None:  # the log is being set aside: what is left of it says nothing
        return
    problem = None
    if last < committed_index:
        problem = f"the checkpoint says that entry {committed_index} is committed"
    elif page_lost and last < facts.synced_index - 1 and facts.cut_at is None:
        problem = f"the index was synced up to entry {facts.synced_index - 1}"
    if problem is not None:
        raise StoreBrokenError(
            f"{commit_log.directory}: {problem}, but the log ends with entry {last} at"
            f" {recovered.end}; nothing was cut: {commit_log.remedy} (see `hastore log verify`)"
        )


def _begin(commit_log: CommitLog, index: EntryIndex, recovered: Recovered) -> _Begin:
    """Return the log's first index and position, and the term of the entry before."""
    known = index.state.now.begin
    _refuse_missing_start(commit_log, index.state.now, recovered)
    if recovered.end == recovered.min_offset:
        return known if known[1] == recovered.min_offset else (0, recovered.min_offset, -1)
    header = _header_at(commit_log, recovered.min_offset)
    if known[:2] == (header.index, recovered.min_offset):
        return known
    before = index.read_unit(header.index - 1) if header.index else None
    return header.index, recovered.min_offset, -1 if before is None else before.term


def _refuse_missing_start(commit_log: CommitLog, facts: EntryFacts, recovered: Recovered) -> None:
    """Raise StoreBrokenError if files are missing that retention has not removed.

    It notes where the log begins before it removes files. Entries that are not here count as
    committed, and as known to this node: neither is sure of entries that somebody else removed.
    """
    index, pos, _ = facts.begin
    if facts.begin_sure and facts.install is None and recovered.min_offset > pos:
        raise StoreBrokenError(
            f"{commit_log.directory}: the log begins at {recovered.min_offset}, but by"
            f" hastore/entries.json it begins with entry {index} at {pos}: the files between are"
            f" missing, and retention has not removed them; nothing was cut: {commit_log.remedy}"
        )


def _last_right_unit(
    commit_log: CommitLog, index: EntryIndex, begin: _Begin, read_from: int, *, trusted: bool
) -> tuple[tuple[int, int, int], bool]:
    """Return (index, position, term) of an entry below which the units are right.

    Also returns whether no unit is known to be wrong.
    """
    found = begin[0], begin[1], 0
    for start in (begin[1], *(file.start for file in commit_log.queue.files)):
        if not begin[1] <= start < read_from:
            continue
        header = _header_at(commit_log, start)
        if not trusted and header.index >= index.state.now.synced_index:
            return max(found, _last_synced_unit(commit_log, index, begin, read_from)), False
        unit = index.read_unit(header.index)
        if unit != (start, header.size, header.term):
            return found, False
        found = header.index, start, header.term
    if not trusted:
        found = max(found, _last_synced_unit(commit_log, index, begin, read_from))
    return found, True


def _last_synced_unit(
    commit_log: CommitLog, index: EntryIndex, begin: _Begin, read_from: int
) -> tuple[int, int, int]:
    """Return (index, position, term) of the last entry whose unit is on the disk, if it is right.

    Else, those of the log's beginning.
    """
    last = index.state.now.synced_index - 1
    unit = index.read_unit(last) if last > begin[0] else None
    if unit is not None and begin[1] <= unit.pos < read_from:
        file = commit_log.queue.find(unit.pos)
        raw = b"" if file is None else file.file.pread(ENTRY_HEADER_BYTES, unit.pos - file.start)
        header = read_header(raw, 0, commit_log.file_size, unit.pos)
        if header is not None and header.index == last and unit[1:] == (header.size, header.term):
            return last, unit.pos, unit.term
    return begin[0], begin[1], 0


class _Walk:
    """Read the headers of entries, one after the other, and write their units."""

    def __init__(
        self, commit_log: CommitLog, index: EntryIndex, next_index: int, pos: int, term: int
    ) -> None:
        self.next_index = next_index
        self.last_units = bytearray()  # those that were written last
        self._units = bytearray()  # to be written
        self._log = commit_log
        self._index = index
        self._pos = pos
        self._term = term

    def write_units(self, stop: int) -> None:
        """Read up to `stop`. Raises StoreBrokenError for bytes that are no header, OSError."""
        log.info("the index is compared with the log from %d to %d", self._pos, stop)
        while self._pos < stop:
            file = self._log.queue.find(self._pos)
            if file is None:
                raise _broken(self._log, self._pos, "no file is there")
            at = self._pos - file.start
            window = file.file.pread(min(_WINDOW_BYTES, file.size - at), at)
            self._read_window(window, file.end, stop)
            if len(self._units) >= _UNITS_BYTES:
                self._write()
        if self._pos != stop:
            raise _broken(self._log, stop, f"the entry before it ends at {self._pos}")
        self._write()

    def _read_window(self, window: bytes, file_end: int, stop: int) -> None:
        base = self._pos
        while self._pos < stop:
            at = self._pos - base
            left = file_end - self._pos
            if len(window) - at >= 8 and check_entry_blank(window, at, at + left):
                self._pos = file_end
                return
            if len(window) - at < ENTRY_HEADER_BYTES:
                if at == 0:
                    raise _broken(self._log, self._pos, "the file has no room for one")
                return
            header = read_header(window, at, at + left, self._pos)
            if header is None or header.index != self.next_index or header.term < self._term:
                raise _broken(self._log, self._pos, f"entry {self.next_index} was expected")
            self._units += pack_unit(header.index, header.term, self._pos, header.size)
            self.next_index += 1
            self._term = header.term
            self._pos += header.size

    def _write(self) -> None:
        units, self._units = self._units, bytearray()
        self._index.load_units(self.next_index - len(units) // INDEX_UNIT_BYTES, units)
        self.last_units = (self.last_units + units)[-_UNITS_BYTES:]


def _header_at(commit_log: CommitLog, pos: int) -> EntryHeader:
    file = commit_log.queue.find(pos)
    if file is None:
        raise _broken(commit_log, pos, "no file is there")
    raw = file.file.pread(ENTRY_HEADER_BYTES, pos - file.start)
    header = read_header(raw, 0, file.end - pos, pos)
    if header is None:
        raise _broken(commit_log, pos, "an entry's header was expected")
    return header


def _broken(commit_log: CommitLog, pos: int, why: str) -> StoreBrokenError:
    return StoreBrokenError(
        f"{commit_log.directory}: no sound entry is at {pos}, but later ones are: {why}; nothing"
        f" was cut: {commit_log.remedy}"
    )
