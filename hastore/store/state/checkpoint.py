"""RocketMQ's `checkpoint` file: how far log, queues and index are synced.

Housekeeping writes it, so that RocketMQ can open the store. hastore itself reads only the last
store timestamp from it, when it opens the store.
"""

import struct
from dataclasses import dataclass

from hastore.fs.filesystem import File, FileSystem

_CHECKPOINT = struct.Struct(">qqqqq")
_PAGE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far the files are synced: store timestamps in ms, offsets in bytes.

    `checkpoint`, 4096 bytes: physicMsgTimestamp, logicsMsgTimestamp, indexMsgTimestamp,
    masterFlushedOffset, confirmPhyOffset, 8 bytes each, then zeros.
    """

    log_timestamp_ms: int = 0
    queue_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirmed_offset: int = 0


class CheckpointFile:
    """The store's `checkpoint` file; a short or missing one reads as zeros."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/checkpoint"
        self._file: File | None = None
        self.now = Checkpoint()

    def load(self) -> Checkpoint:
        """Read the file. Raises OSError."""
        raw = self._fs.read_bytes(self._path, _PAGE_SIZE) if self._fs.exists(self._path) else b""
        if len(raw) >= _CHECKPOINT.size:
            self.now = Checkpoint(*_CHECKPOINT.unpack_from(raw))
        return self.now

    def save(self, checkpoint: Checkpoint, *, sync: bool) -> None:
        """Write the file; the first call reserves its room. Raises OSError, StoreFullError."""
        if self._file is None:
            self._file = self._fs.open(self._path, create=True)
            if self._file.size != _PAGE_SIZE:
                self._file.truncate(0)
                self._file.allocate(_PAGE_SIZE)
        fields = (
            checkpoint.log_timestamp_ms,
            checkpoint.queue_timestamp_ms,
            checkpoint.index_timestamp_ms,
            checkpoint.master_flushed_offset,
            checkpoint.confirmed_offset,
        )
        self._file.pwrite(_CHECKPOINT.pack(*fields), 0)
        if sync:
            self._file.sync()
        self.now = checkpoint

    def close(self) -> None:
        """Close the file; the next save opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
