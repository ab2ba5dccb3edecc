"""The limits page, `<root>/hastore/limits`: how far the log is whole, synced, confirmed, readable.

Two slots are written in turn, each by one pwrite. The valid slot with the greater sequence is in
force, so after a torn write the previous slot counts. Other processes read the page without a lock.
The node's threads update it as the limits move, and recovery reads it at the next start.

    slot at 0 and at 2048:
      0 magic "HSLM" 4 | 4 version 4 | 8 sequence 8 | 16 boot id 16 | 32 file_size 8
     40 first_offset 8 | 48 flushed 8 | 56 record_end 8 | 64 recovery_start 8
     72 next_recovery_start 8 | 80 confirmed 8 | 88 readable 8 | 96 CRC-32 (of all before) 4
    at 1024: "HSLF" 4 once the store has closed after a failed sync, until the next start

The boot id is that of the machine's boot, mixed with that of the file system's mount where that is
known (replay_progress.read_cache_id).
`record_end` and both recovery starts are offsets at which a record ends and the next may begin. All
records below them were whole when the slot was written. These three offsets are valid while the
same kernel runs, because the page cache survives kill -9. After a power loss only `flushed` is
valid.
"""

import struct
import threading
from typing import NamedTuple

from hastore.errors import StoreBrokenError
from hastore.fs.filesystem import File, FileSystem
from hastore.store.state.crc_frame import FRAME_BYTES, CrcFrame

_FRAME = CrcFrame(b"HSLM", 1)
_SLOT = struct.Struct(">Q16sqqqqqqqq")  # the fields of Limits, in their order
_SLOT_BYTES = _SLOT.size + FRAME_BYTES
_SLOT_AT = (0, 2048)
_PAGE_SIZE = 4096
_FAILED_AT = 1024
_FAILED = b"HSLF"
RECOVERY_STEP_BYTES = 32 << 20  # a recovery starts between one and two steps before the end


class Limits(NamedTuple):
    """The page's content; all offsets are bytes of the log.

    recovery_start <= next_recovery_start <= record_end; a record ends at flushed_offset.
    """

    sequence: int = 0
    boot_id: bytes = bytes(16)
    file_size: int = 0
    first_offset: int = 0  # the log's start when it was opened or emptied; may be inside a file
    flushed_offset: int = 0  # a lower bound of the synced bytes
    record_end: int = 0
    recovery_start: int = 0
    next_recovery_start: int = 0
    confirmed_offset: int = 0
    readable_offset: int = 0


def limits_path(root: str) -> str:
    """Return the page's path in a store."""
    return f"{root}/hastore/limits"


def read_limits(fs: FileSystem, root: str) -> Limits | None:
    """Return the page's content; None if there is no page, or it is all zeros.

    A crash before the first write leaves zeros. In a store that has had a page, none and zeros are
    the loss of it (`LogStore.limits_lost`). Raises StoreBrokenError if no slot is valid.
    """
    path = limits_path(root)
    if not fs.exists(path):
        return None
    raw = fs.read_bytes(path, _PAGE_SIZE)
    found = [limits for at in _SLOT_AT if (limits := _unpack(raw, at)) is not None]
    if not found:
        if not raw.strip(b"\0"):
            return None
        # An older page would be worse than none: what was synced since would be cut in silence.
        raise StoreBrokenError(
            f"{path} is damaged: remove it, and do not put back an older one; the node then reads"
            " its whole log, and its votes and acknowledgements do not count before its master or"
            " leader has brought it in line"
        )
    return max(found, key=lambda limits: limits.sequence)


def sync_failed(fs: FileSystem, root: str) -> bool:
    """Whether the last process with this store has closed it after a failed sync.

    What was not synced then may be gone, though the machine has not booted since: the kernel may
    have dropped it from memory. Ask before the page is opened, which forgets it.
    """
    path = limits_path(root)
    if not fs.exists(path):
        return False
    return fs.read_bytes(path, _PAGE_SIZE)[_FAILED_AT:].startswith(_FAILED)


class LimitsPage:
    """The page of a store that this process has open; thread-safe.

    Every update survives kill -9. It also survives a power loss once this update or a later one has
    returned with `sync=True`.
    """

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self._guard = threading.Lock()
        self._file: File | None = None
        self.now = Limits()

    def open(self, limits: Limits) -> None:
        """Write these limits to both slots and sync; makes the page if it is absent.

        Raises OSError.
        """
        directory = f"{self._root}/hastore"
        file = self._fs.open(limits_path(self._root), create=True)
        try:
            if file.size < _PAGE_SIZE:
                file.allocate(_PAGE_SIZE)  # later writes never lack room
            self._file, self.now = file, limits
            file.pwrite(bytes(len(_FAILED)), _FAILED_AT)
            self.update(sync=True)
            self.update(sync=True)  # the other slot, which an earlier process wrote
            self._fs.sync_dir(directory)
        except BaseException:
            self._file = None
            file.close()
            raise

    def update(
        self,
        *,
        sync: bool = False,
        flushed: int | None = None,
        record_end: int | None = None,
        confirmed: int | None = None,
        readable: int | None = None,
    ) -> None:
        """Change some limits; with `sync` durably. Raises OSError.

        Both recovery starts move up once `record_end` is RECOVERY_STEP_BYTES or more beyond
        `next_recovery_start`.
        """
        with self._guard:
            now = self.now
            recovery_start, next_recovery_start = now.recovery_start, now.next_recovery_start
            if record_end is not None and record_end - next_recovery_start >= RECOVERY_STEP_BYTES:
                recovery_start, next_recovery_start = next_recovery_start, record_end
            self._write(
                Limits(
                    now.sequence + 1,
                    now.boot_id,
                    now.file_size,
                    now.first_offset,
                    now.flushed_offset if flushed is None else flushed,
                    now.record_end if record_end is None else record_end,
                    recovery_start,
                    next_recovery_start,
                    now.confirmed_offset if confirmed is None else confirmed,
                    now.readable_offset if readable is None else readable,
                )
            )
            file = self._file
        if sync and file is not None:
            file.sync()

    def cut(self, end: int, *, recovery_start: int) -> None:
        """Lower every limit to the log's new end, durably, before a cut. Raises OSError.

        `recovery_start` is the start of a record at or below `end`. It replaces each of the two
        recovery starts that lies beyond `end`.
        """
        with self._guard:
            now = self.now
            old = now.recovery_start, now.next_recovery_start
            first, following = (start if start <= end else recovery_start for start in old)
            low = now._replace(
                sequence=now.sequence + 1,
                flushed_offset=min(now.flushed_offset, end),
                record_end=min(now.record_end, end),
                recovery_start=first,
                next_recovery_start=following,
                confirmed_offset=min(now.confirmed_offset, end),
                readable_offset=min(now.readable_offset, end),
            )
            self._write(low)
            self._write(low._replace(sequence=low.sequence + 1))
            file = self._file
        if file is not None:
            file.sync()

    def restart(self, offset: int) -> None:
        """Write, durably, that the log is empty and begins at `offset`. Raises OSError."""
        with self._guard:
            empty = self.now._replace(
                sequence=self.now.sequence + 1,
                first_offset=offset,
                flushed_offset=offset,
                record_end=offset,
                recovery_start=offset,
                next_recovery_start=offset,
                confirmed_offset=0,
                readable_offset=0,
            )
            self._write(empty)
            self._write(empty._replace(sequence=empty.sequence + 1))
            file = self._file
        if file is not None:
            file.sync()

    def note_failure(self) -> None:
        """Write that a sync has failed; `sync_failed` tells the next start. Raises OSError.

        It is not synced: it counts as long as this boot and the file system's mount last. After
        another one the start counts as one after a power loss anyhow.
        """
        with self._guard:
            if self._file is not None:
                self._file.pwrite(_FAILED, _FAILED_AT)

    def close(self) -> None:
        """Close the page; later updates only change `now`."""
        with self._guard:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, limits: Limits) -> None:
        if self._file is not None:
            self._file.pwrite(_FRAME.pack(_SLOT.pack(*limits)), _SLOT_AT[limits.sequence & 1])
        self.now = limits


def _unpack(raw: bytes, at: int) -> Limits | None:
    return _FRAME.read(raw[at : at + _SLOT_BYTES], lambda slot: Limits(*_SLOT.unpack(slot)))
