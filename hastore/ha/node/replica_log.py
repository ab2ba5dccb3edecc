"""The interface between replication and the store; MessageStore implements it.

Offsets and sizes are bytes; ranges are half-open.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from hastore.errors import StoreError
from hastore.store.message_store import FileRange as FileRange


class ReplicaLog(Protocol):
    """A log that replication reads in ranges, appends bytes to, and cuts.

    Only one thread at a time changes the log; any number of threads read it. Written bytes survive
    kill -9, flushed bytes a power loss.
    """

    file_size: int

    @property
    def min_offset(self) -> int:
        """The offset of the first byte."""
        ...

    @property
    def max_offset(self) -> int:
        """The end of the written bytes; on a slave it may be inside a record."""
        ...

    @property
    def whole_offset(self) -> int:
        """The end of the last whole record."""
        ...

    @property
    def flushed_offset(self) -> int:
        """All bytes below are synced; later bytes may be synced too."""
        ...

    @property
    def broken_reason(self) -> str | None:
        """Why the log takes nothing any more until a restart; None while it works."""
        ...

    @property
    def confirmed_offset(self) -> int:
        """All bytes below are known to be on `acks + 1` nodes."""
        ...

    @property
    def readable_offset(self) -> int:
        """The end of the bytes that readers may see."""
        ...

    # What is appended next is confirmed in a moment: replay waits for that if it has little to do.
    confirmed_soon: bool

    def set_limits(
        self, *, confirmed: int | None = None, readable: int | None = None, tell: bool = True
    ) -> None:
        """Publish the limits, and wake the threads that wait for them.

        Without `tell` the caller calls `tell_readers` as soon as it holds no lock.
        """
        ...

    def readers_wait(self) -> bool:
        """Whether a reader waits for records that are not readable yet."""
        ...

    def tell_readers(self) -> None:
        """Let readers see what has become readable, perhaps in this thread; no lock is held."""
        ...

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend a view of the bytes from `offset` on, up to a file's end.

        The view is empty at the log's end.
        """
        ...

    def file_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the bytes that `view` would lend, as a range of a file, for sendfile."""
        ...

    def append_replica(self, offset: int, data: bytes | memoryview) -> int:
        """Append at `offset`, which must be the log's end; return the new end.

        Raises StoreFullError if the disk is full; then nothing was appended.
        """
        ...

    def replica_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return a file range at the log's end to splice into, for `commit_replica`."""
        ...

    def commit_replica(self, offset: int, size: int) -> int:
        """Make `size` bytes that were spliced at `offset` part of the log; return the new end."""
        ...

    def replica_failed(self, offset: int, size: int, failure: OSError) -> StoreError:
        """Clear the bytes that a failed splice left in its range; return the error to raise."""
        ...

    def begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`."""
        ...

    def set_aside(self, name: str, shared: int | None = None) -> str:
        """Move all files to `rescued/<name>/`, and return that path; the log is then empty.

        Messages beyond `shared` (None: the confirmed offset) may be nowhere else, and are told.
        """
        ...

    def archive(self, offset: int, name: str) -> int:
        """Copy the log beyond `offset` to `rescued/<name>/`, synced; return the bytes copied."""
        ...

    def cut_point(self, offset: int) -> int:
        """Return where a cut at `offset` begins: there, or further back because of damage."""
        ...

    def truncate(self, offset: int, *, exact: bool = False) -> None:
        """Cut the log, its queues and its index at `offset`; the cut is synced.

        If `offset` lies inside a record, that record is cut too, unless the cut is `exact`.
        """
        ...

    def flush(self) -> int:
        """Sync all written bytes; return `flushed_offset`.

        Raises StoreBrokenError if it fails; the store is then closed until a restart.
        """
        ...

    def wait_beyond(self, offset: int, timeout_s: float) -> int:
        """Wait until the log reaches beyond `offset`; return its end."""
        ...

    @property
    def dispatched_offset(self) -> int:
        """The offset up to which replay has built queues, index and deduplication window."""
        ...

    @property
    def replay_problem(self) -> str | None:
        """Why replay has stopped, None if it has not; it tries again each second."""
        ...

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; False after the timeout."""
        ...

    def free_bytes(self) -> int:
        """Return the free space on the log's disk."""
        ...

    @property
    def spare_bytes(self) -> int:
        """The bytes that the log's next file has already, so that no free space is needed."""
        ...

    @property
    def no_room(self) -> str | None:
        """Why there is no next log file, with the remedy; None if there is, or none was wanted."""
        ...

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        """Return the size of the whole record at `offset`, None when there is none.

        Only the record's header is checked; with `check` the whole record is, CRC included.
        """
        ...

    def after_blank(self, offset: int) -> int:
        """Return the end of the blank that starts at `offset`; `offset` when none starts there."""
        ...
