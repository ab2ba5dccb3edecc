"""The index of a log of entries: where each entry lies, and of which term it is.

Files of 32-byte units under `index/` (record/log_format.py draws a unit; unit n lies at n * 32),
and the last units in memory. Units are derived from the log: they are written soon after their
entries, and what is missing after a crash is written anew from the log (`load_entries`). So
only the log is synced for a put.

Any thread may read. Who changes entries holds the log's lock. `write` and `sync` may run in any
thread.
"""

import errno
import logging
import threading
from bisect import bisect_right
from typing import NamedTuple

from hastore.errors import StoreBrokenError, StoreError, StoreFullError, UsageError
from hastore.fs.filesystem import NO_ROOM, File, FileSystem, file_name, is_file_name
from hastore.record.log_format import INDEX_UNIT, INDEX_UNIT_BYTES, unpack_unit
from hastore.store.state.entry_state import EntryState

log = logging.getLogger(__name__)

# What DLedger uses, and RocketMQ cannot change. The files are sparse: units that are not written
# take no room.
INDEX_FILE_BYTES = 167_772_160
_KEPT_BYTES = 4 << 20  # units kept in memory, at least this many once there were so many
_OPEN_MAX = 16
_UNIT = INDEX_UNIT_BYTES

Terms = tuple[tuple[int, int], ...]  # (term, where it begins)


class NewEntries(NamedTuple):
    """Entries to be appended: their index units, and (term, number of entries) in order.

    `last_crc` is bodyCrc of the last one; None: not known.
    """

    units: bytes | bytearray
    runs: tuple[tuple[int, int], ...]
    last_crc: int | None = None


class Unit(NamedTuple):
    """An entry's place in the log."""

    pos: int
    size: int
    term: int

    @property
    def end(self) -> int:
        """Return where the entry ends."""
        return self.pos + self.size


class EntryIndex:
    """The index of one log."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        state: EntryState,
        *,
        file_bytes: int = INDEX_FILE_BYTES,
    ) -> None:
        self.directory = directory
        self.log_directory = f"{directory.rpartition('/')[0]}/data"
        self.state = state
        self.file_bytes = file_bytes
        self.begin_index = 0
        self.begin_pos = 0
        self.prev_term = -1  # of the entry before `begin_index`; -1: none, or not known
        self.end_index = -1
        self.terms: Terms = ()  # (term, its first index here)
        self.last_crc: int | None = None  # bodyCrc of the last entry; None: the log must be asked
        self.failure_reason: str | None = None  # why units are not written
        self._fs = fs
        self._guard = threading.Lock()  # of the units in memory
        self._writing = threading.Lock()  # of the files; taken before `_guard`
        self._kept = bytearray()
        self._kept_from = 0  # the index of the first unit in memory
        self._written = 0  # units below are in the files
        self._synced = 0  # units below are on the disk
        self._loaded_from: int | None = None  # the first unit that was written before `adopt`
        self._files: dict[int, File] = {}
        self._new_names = False
        self._removals = 0  # how often entries were cut or removed
        # Where the terms begin; of this very tuple, which is replaced when a term comes or goes.
        self._term_starts: tuple[Terms, Terms] = (self.terms, ())

    # -- reading ----------------------------------------------------------------------------------

    @property
    def end_term(self) -> int:
        """The term of the last entry; without entries that of the entry before."""
        return self.terms[-1][0] if self.terms else self.prev_term

    def unit(self, index: int) -> Unit:
        """Return where an entry lies. Raises UsageError for an absent one, OSError."""
        with self._guard:
            self._check_there(index)
            at = (index - self._kept_from) * _UNIT
            if at >= 0:
                _, pos, size, _, term = INDEX_UNIT.unpack_from(self._kept, at)
                return Unit(pos, size, term)
        found = self.read_unit(index)
        if found is None and index < self.begin_index:
            raise StoreError(f"entry {index} was removed by retention")
        if found is None:
            self._check_there(index)  # it was cut meanwhile
            raise StoreBrokenError(
                f"{self.directory}: the unit of entry {index} is damaged or unreadable; stop the"
                " node, remove the folder, and start the node again: it writes the index anew from"
                " the log"
            )
        return found

    def _check_there(self, index: int) -> None:
        if not self.begin_index <= index <= self.end_index:
            raise UsageError(
                f"there is no entry {index}: the log has [{self.begin_index}, {self.end_index}]"
            )

    def read_unit(self, index: int) -> Unit | None:
        """Read a unit from its file; None if it is missing, unreadable, or of no such entry."""
        start = index * _UNIT // self.file_bytes * self.file_bytes
        try:
            with self._writing:
                file = self._open(start, create=False)
                raw = b"" if file is None else file.pread(_UNIT, index * _UNIT - start)
        except OSError as failure:
            if failure.errno != errno.EIO:
                raise
            # A bad sector is damage: what it had is in the log, too.
            log.error("the unit of entry %d cannot be read: %s", index, failure)
            return None
        found = unpack_unit(raw, index)
        return None if found is None else Unit(*found)

    def term_of(self, index: int) -> int:
        """Return the term of an entry, or of the one before `begin_index`. Raises UsageError."""
        with self._guard:  # against retention
            begin, end, terms, prev_term = (
                *(self.begin_index, self.end_index, self.terms, self.prev_term),
            )
        if index == begin - 1:
            return prev_term
        if not begin <= index <= end:
            raise UsageError(f"there is no entry {index}: the log has [{begin}, {end}]")
        return terms[bisect_right(terms, index, key=lambda run: run[1]) - 1][0]

    def end_of(self, index: int) -> int:
        """Return where an entry ends; for `begin_index` - 1, where the log begins."""
        return self.begin_pos if index == self.begin_index - 1 else self.unit(index).end

    def last_within(self, offset: int) -> int:
        """Return the last entry that ends at or before `offset`; `begin_index` - 1: none.

        Any thread may ask: if the log is cut meanwhile, or retention removes entries, what is left
        counts. Raises StoreBrokenError, OSError.
        """
        while True:
            removals = self._removals
            try:
                return self._last_within(offset, self.begin_index, self.end_index)
            except StoreBrokenError:
                raise
            except (UsageError, StoreError):
                if removals == self._removals:
                    raise

    def _last_within(self, offset: int, first: int, last: int) -> int:
        if last >= first and self.unit(last).end <= offset:
            return last
        entries = range(first, last + 1)
        return first - 1 + bisect_right(entries, offset, key=lambda index: self.unit(index).end)

    def term_starts(self) -> Terms:
        """Return (term, position of its first entry here), in order.

        Any thread may ask: if entries are cut or removed meanwhile, what is left counts. Each pull
        asks twice, so nothing is read unless a term has come or gone. Raises StoreBrokenError,
        OSError.
        """
        while True:
            with self._guard:
                removals, terms = self._removals, self.terms
            of_terms, starts = self._term_starts
            if of_terms is terms:
                return starts
            try:
                starts = tuple((term, self.unit(first).pos) for term, first in terms)
            except StoreBrokenError:
                raise
            except (UsageError, StoreError):
                if removals == self._removals:
                    raise
            else:
                if removals == self._removals:
                    self._term_starts = terms, starts
                    return starts

    def runs(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return (term, number of entries) of the entries [first, last]."""
        terms = self.terms
        number = bisect_right(terms, first, key=lambda run: run[1]) - 1
        found = []
        while first <= last:
            until = terms[number + 1][1] - 1 if number + 1 < len(terms) else last
            until = min(until, last)
            found.append((terms[number][0], until - first + 1))
            first = until + 1
            number += 1
        return tuple(found)

    # -- changes (under the log's lock) -----------------------------------------------------------

    def add(self, new: NewEntries) -> None:
        """Add entries that were appended to the log."""
        index, terms = self.end_index + 1, self.terms
        for term, count in new.runs:
            if not terms or terms[-1][0] != term:
                terms = (*terms, (term, index))
            index += count
        self.last_crc = new.last_crc
        with self._guard:
            self.terms = terms
            self._kept += new.units
            self.end_index = index - 1
            self._forget_old()

    def truncate_at(self, offset: int) -> None:
        """Forget the entries that end beyond `offset`; their units become zeros. Raises OSError.

        Before the log's bytes go: a unit of an entry that is not there would be taken for damage.
        """
        last = self.last_within(offset)
        if last == self.end_index:
            return
        self.last_crc = None
        with self._writing:
            synced = min(self._synced, last + 1)
            if self.state.now.synced_index > synced:
                self.state.save(synced_index=synced)
            with self._guard:
                self._removals += 1
                self.end_index = last
                del self._kept[max(0, last + 1 - self._kept_from) * _UNIT :]
                self._kept_from = min(self._kept_from, last + 1)
                self._written = min(self._written, last + 1)
                self._synced = synced
                self.terms = tuple(run for run in self.terms if run[1] <= last)
            self._clear_from(last + 1)

    def begin_at(self, offset: int) -> None:
        """Let the log begin at `offset`, where an entry begins: retention removes what is before.

        Durable when this returns, before files are removed. Raises OSError.
        """
        index = self.last_within(offset) + 1
        if index <= self.begin_index:
            return
        prev_term = self.term_of(index - 1)
        self.state.save(begin=(index, offset, prev_term))
        kept = [run for run in self.terms if run[1] > index]
        if index <= self.end_index:
            kept.insert(0, (self.unit(index).term, index))
        with self._guard:
            self._removals += 1
            self.begin_index, self.begin_pos, self.prev_term = index, offset, prev_term
            self.terms = tuple(kept)

    def remove_old_files(self) -> None:
        """Remove index files that have only units below `begin_index`. Raises OSError."""
        with self._writing:
            gone = [
                start
                for start in self._starts()
                if start + self.file_bytes <= self.begin_index * _UNIT
            ]
            for start in gone:
                self._files.pop(start, None)
                self._fs.remove(self._path(start))
            if gone:
                self._fs.sync_dir(self.directory)

    def restart(self, index: int, offset: int, prev_term: int) -> None:
        """Begin anew without entries, after the files were moved away. Raises OSError."""
        self.state.save(begin=(index, offset, prev_term), synced_index=index, cut_at=None)
        self.last_crc = None
        with self._writing, self._guard:
            self._removals += 1
            self._files.clear()
            self._fs.make_dirs(self.directory)
            self.begin_index, self.begin_pos, self.prev_term = index, offset, prev_term
            self.end_index, self.terms = index - 1, ()
            self._kept.clear()
            self._kept_from = self._written = self._synced = index
            for start in self._starts():
                self._fs.remove(self._path(start))

    # -- files: any thread ------------------------------------------------------------------------

    def write(self) -> None:
        """Write units that are only in memory. A failure is kept in `failure_reason`."""
        with self._guard:
            if self._written > self.end_index:
                return
        with self._writing:
            with self._guard:
                first = self._written
                data = bytes(self._kept[(first - self._kept_from) * _UNIT :])
            try:
                self._write_at(first * _UNIT, data)
            except OSError as failure:
                if self.failure_reason is None:
                    log.error("index units are not written: %s", failure)
                self.failure_reason = f"index units are not written: {failure}"
                return
            self.failure_reason = None
            with self._guard:
                self._written = first + len(data) // _UNIT

    def sync(self) -> None:
        """Write and sync the units, and note how far.

        Raises OSError if a sync failed, and units may be lost; StoreFullError if there was no room
        for the note: a later call writes it.
        """
        self.write()
        with self._writing:
            self._sync_files(self._synced, self._written)
            if self._synced <= self.state.now.synced_index:
                return
            try:
                self.state.save(synced_index=self._synced)
            except OSError as failure:
                if failure.errno in NO_ROOM:
                    raise StoreFullError(
                        f"the index of entries is not noted: {failure}"
                    ) from failure
                raise

    def _sync_files(self, first: int, end: int) -> None:
        if end <= first:
            return
        size = self.file_bytes
        for start in range(first * _UNIT // size * size, end * _UNIT, size):
            file = self._open(start, create=False)
            if file is not None:
                file.sync()
        if self._new_names:
            self._fs.sync_dir(self.directory)
            self._new_names = False
        self._synced = end

    def close(self) -> None:
        """Drop all files."""
        with self._writing:
            for file in self._files.values():
                file.close()
            self._files.clear()

    # -- loading: one thread, before the store is open --------------------------------------------

    def load_units(self, index: int, units: bytes | bytearray) -> None:
        """Write units from `index` on over what the files have; nothing is kept in memory.

        Raises OSError.
        """
        with self._writing:
            self._write_at(index * _UNIT, bytes(units))
            before = self._loaded_from
            self._loaded_from = index if before is None else min(before, index)

    def adopt(self, begin: tuple[int, int, int], end_index: int, units: bytearray) -> None:
        """Begin with what the files have: all units up to `end_index`, of which `units` are last.

        Raises StoreBrokenError, OSError.
        """
        self.begin_index, self.begin_pos, self.prev_term = begin
        self.last_crc = None
        keep = units[-_KEPT_BYTES:]
        with self._writing:
            self.end_index = end_index
            self._kept = bytearray(keep)
            self._kept_from = end_index + 1 - len(keep) // _UNIT
            self._written = end_index + 1
            synced = min(self.state.now.synced_index, end_index + 1)
            # What was written just now is not on the disk, also if it was once.
            self._synced = synced if self._loaded_from is None else min(synced, self._loaded_from)
            self._clear_from(end_index + 1)
        self.terms = self._find_terms()

    def _find_terms(self) -> tuple[tuple[int, int], ...]:
        """Find where the terms begin, by a binary search for each."""
        found: list[tuple[int, int]] = []
        index = self.begin_index
        while index <= self.end_index:
            term = self.unit(index).term
            found.append((term, index))
            entries = range(index, self.end_index + 1)
            index += bisect_right(entries, term, key=lambda each: self.unit(each).term)
        return tuple(found)

    # -- inside -----------------------------------------------------------------------------------

    def _forget_old(self) -> None:
        """Drop written units from memory, once there are many; holds the guard."""
        spare = min(len(self._kept) - _KEPT_BYTES, (self._written - self._kept_from) * _UNIT)
        if spare >= _KEPT_BYTES:
            del self._kept[:spare]
            self._kept_from += spare // _UNIT

    def _write_at(self, at: int, data: bytes) -> None:
        """Write units at a byte of the index; holds `_writing`."""
        view = memoryview(data)
        while view:
            start = at - at % self.file_bytes
            file = self._open(start, create=True)
            assert file is not None
            count = min(len(view), start + self.file_bytes - at)
            file.pwrite(view[:count], at - start)
            at, view = at + count, view[count:]

    def _clear_from(self, index: int) -> None:
        """Make all units from `index` on zeros, and remove later files; holds `_writing`."""
        at = index * _UNIT
        for start in reversed(self._starts()):
            if start >= at and start > self.begin_index * _UNIT:
                self._files.pop(start, None)
                self._fs.remove(self._path(start))
            elif start + self.file_bytes > at:
                file = self._open(start, create=False)
                if file is not None:
                    position = max(0, at - start)
                    file.zero(position, self.file_bytes - position)

    def _starts(self) -> list[int]:
        names = self._fs.list_dir(self.directory)
        return [int(name) for name in names if is_file_name(name)]

    def _path(self, start: int) -> str:
        return f"{self.directory}/{file_name(start)}"

    def _open(self, start: int, *, create: bool) -> File | None:
        """Return an index file, of full length; holds `_writing`."""
        file = self._files.get(start)
        if file is not None:
            return file
        path = self._path(start)
        is_new = not self._fs.exists(path)
        if is_new and not create:
            return None
        file = self._fs.open(path, create=True)
        if file.size != self.file_bytes:
            file.truncate(self.file_bytes)
        self._new_names = self._new_names or is_new
        if len(self._files) >= _OPEN_MAX:
            self._files.pop(next(iter(self._files))).close()
        self._files[start] = file
        return file
