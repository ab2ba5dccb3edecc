"""The doors of replay: what it needs of the log, and what it feeds."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hastore.record.layout import MIN_RECORD_SIZE
from hastore.store.replay.scalar_walk import Dispatched, RecordWalker


class LogView(Protocol):
    """What replay needs of a CommitLog."""

    @property
    def min_offset(self) -> int:
        """Return the first offset that is there."""
        ...

    @property
    def max_offset(self) -> int:
        """Return the end of the bytes written; on a slave perhaps inside a record."""
        ...

    @property
    def file_size(self) -> int:
        """Return the bytes of each commit log file."""
        ...

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend bytes from `offset`: at most `max_bytes`, of one file, never beyond `max_offset`."""
        ...


class Dispatcher(Protocol):
    """A taker of the replayed log. Calls come one at a time, but `flush` beside any `dispatch`."""

    def load(self, offset: int, synced: bool) -> int:
        """Open what is on disk for a replay from `offset`, and drop what came from records at or
        beyond it.

        `synced` false: the kernel restarted, and only what was flushed before `offset` was reached
        can be trusted. Returns the offset from which this dispatcher itself needs the log, at most
        `offset`.
        """
        ...

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Take whole records in the log's order, ignoring what came before; OSError, StoreError."""
        ...

    def truncate(self, log_end: int) -> None:
        """Forget every record that does not end at or below `log_end`."""
        ...

    def flush(self) -> None:
        """Make durable what was dispatched before the call.

        Raises OSError when a later call may do better, SyncFailedError when none can.
        """
        ...

    def reset(self) -> None:
        """Forget everything and close all files: they were moved away."""
        ...

    def delete_before(self, min_offset: int) -> None:
        """Drop whole files that know only records below `min_offset` (retention)."""
        ...

    def close(self) -> None:
        """Give all files back."""
        ...


def read_dispatched(commit_log: LogView, offset: int) -> Dispatched | None:
    """Read one record of the log as replay sees it; None when there is none."""
    if not commit_log.min_offset <= offset < commit_log.max_offset:
        return None
    left = commit_log.file_size - offset % commit_log.file_size
    wanted = min(left, 4096)
    while True:
        with commit_log.view(offset, wanted) as view:
            walk = RecordWalker().walk(view[: _first_size(view)], offset, left)
            seen = len(view)
        if walk.batch:
            return walk.batch[0]
        if not seen < walk.wanted <= left:
            return None
        wanted = walk.wanted


def _first_size(view: memoryview) -> int:
    """Return the size that the first record states, at least what tells whether it is one."""
    return max(int.from_bytes(view[:4]), MIN_RECORD_SIZE)
