"""The narrow door between replication and the store. Offsets and sizes are bytes; ranges are
half-open.
"""

from contextlib import AbstractContextManager
from typing import Protocol

from hastore.errors import StoreError
from hastore.store.message_store import FileRange


class ReplicaLog(Protocol):
    """A log that can be read in ranges, appended to as bytes, cut, and followed.

    One thread at a time appends, truncates or begins; any number reads. What is written survives
    kill -9, what is flushed survives a power loss.
    """

    file_size: int

    @property
    def min_offset(self) -> int:
        """The first byte there is."""
        ...

    @property
    def max_offset(self) -> int:
        """The end of what is written; on a slave perhaps inside a record."""
        ...

    @property
    def whole_offset(self) -> int:
        """The end of the last whole record."""
        ...

    @property
    def flushed_offset(self) -> int:
        """A lower bound of what is synced."""
        ...

    @property
    def confirmed_offset(self) -> int:
        """Every byte below is known to be on `acks + 1` nodes."""
        ...

    @property
    def readable_offset(self) -> int:
        """Where readers stop."""
        ...

    def set_limits(self, *, confirmed: int | None = None, readable: int | None = None) -> None:
        """Publish the limits, and wake who waits for them."""
        ...

    def view(self, offset: int, max_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend bytes from `offset`, never across a file's end; empty at the log's end."""
        ...

    def file_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the same range as a place in a file, for sendfile."""
        ...

    def append_replica(self, offset: int, data: bytes | memoryview) -> int:
        """Append at `offset`, which must be the end; return the new end. StoreFullError appends
        nothing.
        """
        ...

    def replica_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return room at the end to splice into; `commit_replica` makes it part of the log."""
        ...

    def commit_replica(self, offset: int, size: int) -> int:
        """Take `size` bytes that were spliced at `offset` into the log; return the new end."""
        ...

    def replica_failed(self, offset: int, size: int, failure: OSError) -> StoreError:
        """Clear what a failed splice into `replica_range` left; return the error to raise."""
        ...

    def begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`."""
        ...

    def set_aside(self, name: str) -> str:
        """Rename everything into `rescued/<name>/` and go on empty; return where it lies."""
        ...

    def archive(self, offset: int, name: str) -> int:
        """Copy what is beyond `offset` to `rescued/<name>/`, synced; return the bytes copied."""
        ...

    def truncate(self, offset: int) -> None:
        """Clear what is beyond `offset`, synced, queues and index with it."""
        ...

    def flush(self) -> int:
        """Sync all that is written; return `flushed_offset`. StoreBrokenError: closed until a
        restart.
        """
        ...

    def wait_beyond(self, offset: int, timeout_s: float) -> int:
        """Wait until the log reaches beyond `offset`; return its end."""
        ...

    @property
    def dispatched_offset(self) -> int:
        """How far queues, index and the idempotence window know the log."""
        ...

    def wait_dispatched(self, offset: int, timeout_s: float) -> bool:
        """Wait until replay has reached `offset`; False when it took too long."""
        ...

    def free_bytes(self) -> int:
        """Return the room left on the log's disk."""
        ...

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        """Return the size of the whole record at `offset`, None when there is none: by its head
        alone, or by all of it, CRC included.
        """
        ...

    def after_blank(self, offset: int) -> int:
        """Return where the next file starts when a blank begins at `offset`, else `offset`."""
        ...
