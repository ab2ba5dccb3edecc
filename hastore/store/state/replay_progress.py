"""Replay's progress, `<root>/hastore/replay`: how far the derived files are complete.

     0 magic "HSRP" 4 | 4 version 4 | 8 cache id 16 | 24 dispatched 8 | 32 synced 8
    40 units 4 | 44 slots 4 | 48 entries 4 | 52 CRC-32 (of all before) 4

Replay writes the file after each batch. The derived files have every record below `dispatched`, at
least in the page cache, so this offset is valid while there is the page cache with that id, which
is that of the machine's boot, and of the file system's mount where that is known. They have
every record below `synced` on the disk. Units, slots and entries are the sizes of the derived
files. If these differ from the configured sizes, or the file is missing, as in a store that
RocketMQ wrote, all derived files are built anew.
"""

import functools
import hashlib
import struct
import threading
from typing import NamedTuple

from hastore.fs.filesystem import File, FileSystem, read_or_empty, sync_all
from hastore.store.state.crc_frame import FRAME_BYTES, CrcFrame

_FRAME = CrcFrame(b"HSRP", 1)
_STATE = struct.Struct(">16sqqiii")
_STATE_BYTES = _STATE.size + FRAME_BYTES
_FILE_SIZE = 4096
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class SavedOffsets(NamedTuple):
    """The file's offsets; `dispatched` is valid only if `trusted`: the page cache survives."""

    dispatched: int
    synced: int
    trusted: bool


def read_boot_id(fs: FileSystem) -> bytes:
    """Return the 16 bytes that identify the machine's current boot."""
    return bytes.fromhex(fs.read_bytes(BOOT_ID_PATH, 64).decode("ascii").strip().replace("-", ""))


def read_cache_id(fs: FileSystem, path: str) -> bytes:
    """Return the 16 bytes that identify the page cache of the file system of `path`.

    They change with the machine's boot, and with a new mount of the file system, if that is known:
    then they are those of the boot mixed with those of the mount.
    """
    boot_id, mount_id = read_boot_id(fs), fs.mount_id(path)
    if not mount_id:
        return boot_id
    mixed = hashlib.sha256(boot_id + mount_id.encode("utf-8", "surrogateescape"))
    return mixed.digest()[:16]


def cache_survives(fs: FileSystem, path: str, saved: bytes) -> bool:
    """Whether the page cache of the file system of `path` is still that with the id `saved`.

    An earlier version saved the boot id alone.
    """
    return saved in (read_cache_id(fs, path), read_boot_id(fs))


def read_sizes(fs: FileSystem, path: str) -> tuple[int, int, int] | None:
    """Return units, slots and entries from the file at `path`; None if it is missing or damaged."""
    content = _read(fs, path)
    return None if content is None else content[3:]


def read_dispatched(fs: FileSystem, path: str) -> int | None:
    """Return how far a running node has replayed the log; None without a valid file at `path`."""
    content = _read(fs, path)
    return None if content is None else content[1]


def _read(fs: FileSystem, path: str) -> tuple[bytes, int, int, int, int, int] | None:
    raw = read_or_empty(fs, path, _FILE_SIZE)
    return _FRAME.read(raw[:_STATE_BYTES], _STATE.unpack)


class ReplayState:
    """The file `<root>/hastore/replay`; thread-safe."""

    def __init__(
        self,
        fs: FileSystem,
        path: str,
        *,
        units: int,
        slots: int,
        entries: int,
        boot_id: bytes | None = None,
    ) -> None:
        """Prepare; `boot_id` is that of the file system's page cache by default (read_cache_id)."""
        self._fs = fs
        self._path = path
        self._sizes = (units, slots, entries)
        self._given_boot = boot_id
        self._distrusted = False  # zeros are written instead of the id
        self._file: File | None = None
        self._lock = threading.RLock()
        self.dispatched = 0
        self.synced = 0

    def load(self) -> SavedOffsets:
        """Read the file; returns zeros if it is missing or damaged, or the sizes differ.

        Raises OSError.
        """
        self.dispatched = self.synced = 0
        content = _read(self._fs, self._path)
        if content is None:
            return SavedOffsets(0, 0, False)
        boot_id, dispatched, synced, *sizes = content
        if tuple(sizes) != self._sizes:
            return SavedOffsets(0, 0, False)
        self.dispatched, self.synced = dispatched, synced
        if self._given_boot is not None:
            return SavedOffsets(dispatched, synced, boot_id == self._given_boot)
        return SavedOffsets(dispatched, synced, cache_survives(self._fs, self._path, boot_id))

    @functools.cached_property
    def _this_boot(self) -> bytes:
        given = self._given_boot
        return read_cache_id(self._fs, self._path) if given is None else given

    def save_dispatched(self, offset: int) -> None:
        """Write that the derived files have all records below `offset`.

        This survives kill -9. Raises OSError.
        """
        with self._lock:
            self._write(offset, self.synced)

    def save_synced(self, offset: int) -> None:
        """Write, durably, that the derived files are synced up to `offset`. Raises OSError."""
        with self._lock:
            self._write(max(self.dispatched, offset), offset)
            file = self._open()
        file.sync()

    def trust(self) -> None:
        """Undo `distrust` from the next write on, after the files in doubt were moved away."""
        self._distrusted = False

    def save(self, dispatched: int, synced: int) -> None:
        """Set both offsets durably, before derived files are cut.

        The offsets may be lower than before. Raises OSError.
        """
        with self._lock:
            self._write(dispatched, synced)
            file = self._open()
        file.sync()

    def sync_all(self) -> None:
        """Sync the file system that the derived files are on. Raises SyncFailedError, OSError."""
        sync_all(self._fs, self._path.rpartition("/")[0])

    def distrust(self) -> None:
        """Make the next start replay from `synced` on, as after a power loss. Raises OSError.

        After a failed sync the kernel may have dropped pages, so `dispatched` is not valid.
        """
        with self._lock:
            self._distrusted = True
            self._write(self.dispatched, self.synced)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, dispatched: int, synced: int) -> None:
        boot_id = bytes(16) if self._distrusted else self._this_boot
        content = _STATE.pack(boot_id, dispatched, synced, *self._sizes)
        self._open().pwrite(_FRAME.pack(content), 0)
        self.dispatched, self.synced = dispatched, synced

    def _open(self) -> File:
        if self._file is None:
            directory = self._path.rpartition("/")[0]
            self._fs.make_dirs(directory)
            file = self._fs.open(self._path, create=True)
            try:
                file.allocate(_FILE_SIZE)
            except BaseException:
                file.close()
                raise
            self._fs.sync_dir(directory)
            self._file = file
        return self._file
