"""Where the log states the next offsets of quiet queues (record/queue_ends.py).

Retention asks `since`: from which offset on the log lacks no next offset. The file
`<root>/hastore/queues` keeps the answer for the next start:

    magic "HSQE" 4 | version 4 | complete statements 4
    each: since 8 | start 8 | end 8, of all its records in the log
    the statement that is not complete yet, if there is one:
        since 8 | start 8 | end 8 | id 8 | its next part 4 | its parts 4
    CRC-32 (of all before) 4

Replay's thread writes; any thread calls `since`.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.record.queue_ends import QueueEnds
from hastore.store.derived.contract import Dispatched, queue_ends_of
from hastore.store.state.crc_frame import CrcFrame

_KEPT = 64  # statements; older ones cover less
_FRAME = CrcFrame(b"HSQE", 1)
_COUNT = struct.Struct(">I")
_STATEMENT = struct.Struct(">qqq")
_BEGUN = struct.Struct(">qqqqII")


class Statement(NamedTuple):
    """A complete statement: all its parts lie in [start, end) of the log."""

    since: int
    start: int
    end: int


class _Begun(NamedTuple):
    """A statement of which the log has the first parts."""

    since: int
    start: int
    end: int  # of the last part so far
    ident: int
    part: int  # the next one
    parts: int


class StatedEnds:
    """The newest statements in the log; a Dispatcher."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/queues"
        self._statements: tuple[Statement, ...] = ()  # in the log's order; replaced, never changed
        self._begun: _Begun | None = None
        self._unsaved = False  # whether the file lacks what was noted: there was no room

    def since(self, limit: int) -> int | None:
        """Return the `since` of the newest complete statement that ends at or below `limit`."""
        return max((one.since for one in self._statements if one.end <= limit), default=None)

    # -- replay ------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the file, and forget what lies beyond `offset`."""
        del synced  # the file is replaced durably
        raw = read_or_empty(self._fs, self._path)
        known = self._statements, self._begun = _unpack(raw)
        self._forget_beyond(offset)
        if known != (self._statements, self._begun):
            self._save()  # the log may grow beyond `offset` again, with other records
        return offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Note the statements in a batch, durably; raises OSError."""
        for record, part in queue_ends_of(batch):
            self._unsaved |= self._note(record, part)
        if self._unsaved:  # also if the batch came before, and could not be saved
            self._save()

    def _note(self, record: Dispatched, part: QueueEnds) -> bool:
        begun = self._begun
        latest = begun.end if begun is not None else 0
        if self._statements:
            latest = max(latest, self._statements[-1].end)
        if record.offset < latest:  # it was taken before
            return False
        if part.part == 0:
            begun = _Begun(part.since, record.offset, 0, part.ident, 0, part.parts)
        elif begun is None or begun[0] != part.since or begun[3:] != part[1:4]:
            # Parts are missing, or are of another statement: this one never becomes complete.
            self._begun = None
            return begun is not None
        begun = begun._replace(end=record.end_offset, part=part.part + 1)
        self._begun = begun
        if begun.part == begun.parts:
            done = Statement(begun.since, begun.start, begun.end)
            self._statements = (*self._statements, done)[-_KEPT:]
            self._begun = None
        return True

    def truncate(self, log_end: int) -> None:
        """Forget the statements that end beyond `log_end`, durably."""
        known = self._statements, self._begun
        self._forget_beyond(log_end)
        if known != (self._statements, self._begun):
            self._save()

    def _forget_beyond(self, log_end: int) -> None:
        self._statements = tuple(one for one in self._statements if one.end <= log_end)
        if self._begun is not None and self._begun.end > log_end:
            self._begun = None

    def flush(self) -> None:
        """Do nothing: the file is written, durably, with each change."""

    def reset(self) -> None:
        """Forget everything, durably."""
        self._statements, self._begun = (), None
        if self._fs.exists(self._path):
            self._save()

    def delete_before(self, min_offset: int) -> None:
        """Forget the statements of which the log has lost a part."""
        self._statements = tuple(one for one in self._statements if one.start >= min_offset)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _save(self) -> None:
        parts = [_COUNT.pack(len(self._statements))]
        parts += (_STATEMENT.pack(*one) for one in self._statements)
        if self._begun is not None:
            parts.append(_BEGUN.pack(*self._begun))
        self._fs.replace_bytes(self._path, _FRAME.pack(*parts))
        self._unsaved = False


def _unpack(raw: bytes) -> tuple[tuple[Statement, ...], _Begun | None]:
    """Return what the file holds; nothing if it is damaged, which only delays retention."""
    return _FRAME.read(raw, _read_statements) or ((), None)


def _read_statements(content: memoryview) -> tuple[tuple[Statement, ...], _Begun | None]:
    (count,) = _COUNT.unpack_from(content)
    end = _COUNT.size + count * _STATEMENT.size
    statements = [Statement(*one) for one in _STATEMENT.iter_unpack(content[_COUNT.size : end])]
    begun = _Begun(*_BEGUN.unpack(content[end:])) if len(content) > end else None
    return tuple(statements), begun
