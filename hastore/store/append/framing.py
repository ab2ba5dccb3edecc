"""Join the records of an append: as they are, or each in an entry of DLedger."""

from collections.abc import Iterable

from hastore.record.entry import ENTRY_HEADER_BYTES, pack_header, pack_unit
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.entry_index import NewEntries


class EntryFraming:
    """The entries of one append as leader of `term`, at the log's end. Used under the log's lock.

    A record's physical offset is ENTRY_HEADER_BYTES greater than its entry's position.
    """

    def __init__(self, log: CommitLog, term: int) -> None:
        assert log.entries is not None
        self._pos = log.max_offset
        self._index = log.entries.end_index + 1
        self._term = term
        self._units: list[bytes] = []

    def join(self, bodies: Iterable[bytes | memoryview]) -> bytearray:
        """Return the bytes of the entries."""
        pieces: list[bytes | memoryview] = []
        add, note = pieces.append, self._units.append
        pos, index, term = self._pos, self._index, self._term
        for body in bodies:
            size = len(body)
            add(pack_header(index, term, pos, size))
            add(body)
            size += ENTRY_HEADER_BYTES
            note(pack_unit(index, term, pos, size))
            pos += size
            index += 1
        self._pos, self._index = pos, index
        return bytearray().join(pieces)

    def entries(self) -> NewEntries:
        """Return what the index takes of the entries that were joined."""
        return NewEntries(b"".join(self._units), ((self._term, len(self._units)),))
