"""How far the derived files are complete: one small file, written after each batch.

    0 magic "HSRP"   4 version (4)   8 boot id (16)   24 dispatched (8)   32 synced (8)
    40 units (4)     44 slots (4)    48 entries (4)   52 CRC-32 of all before (4)
 `dispatched`: every derived file has every record below, in the page cache at least: true as long
as the kernel named by the boot id runs. `synced`: the same on the disk. Units, slots and entries
are the sizes of the derived files; with other ones everything is built anew. So it is without the
file: a store that RocketMQ wrote is replayed once.
"""

import struct
import threading
from typing import NamedTuple

from hastore.store.fs.filesystem import File, FileSystem
from hastore.store.fs.sync_files import sync_all
from hastore.store.state.crc_frame import FRAME_BYTES, CrcFrame

_FRAME = CrcFrame(b"HSRP", 1)
_STATE = struct.Struct(">16sqqiii")
_STATE_BYTES = _STATE.size + FRAME_BYTES
_FILE_SIZE = 4096
BOOT_ID_PATH = "/proc/sys/kernel/random/boot_id"


class Progress(NamedTuple):
    """Up to where all is derived; `trusted`: the same kernel, `dispatched` holds."""

    dispatched: int
    synced: int
    trusted: bool


def read_boot_id(fs: FileSystem) -> bytes:
    """Return the 16 bytes by which the kernel names its present run."""
    return bytes.fromhex(fs.read_bytes(BOOT_ID_PATH, 64).decode("ascii").strip().replace("-", ""))


class ReplayState:
    """The file `<root>/hastore/replay`; calls may come from any thread."""

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
        """Name the file and the sizes of derived files; `boot_id` is the kernel's by default."""
        self._fs = fs
        self._path = path
        self._sizes = (units, slots, entries)
        self._this_boot = read_boot_id(fs) if boot_id is None else boot_id
        self._boot_id = self._this_boot  # what is written: none while the page cache may lie
        self._file: File | None = None
        self._lock = threading.RLock()
        self.dispatched = 0
        self.synced = 0

    def load(self) -> Progress:
        """Read the file; all zero when there is none, it is torn, or the sizes differ."""
        self.dispatched = self.synced = 0
        if not self._fs.exists(self._path):
            return Progress(0, 0, False)
        raw = self._fs.read_bytes(self._path, _FILE_SIZE)
        content = _FRAME.unpack(raw[:_STATE_BYTES])
        if content is None:
            return Progress(0, 0, False)
        boot_id, dispatched, synced, *sizes = _STATE.unpack(content)
        if tuple(sizes) != self._sizes:
            return Progress(0, 0, False)
        self.dispatched, self.synced = dispatched, synced
        return Progress(dispatched, synced, boot_id == self._this_boot)

    def save_dispatched(self, offset: int) -> None:
        """Note that derived files were written up to `offset`; survives kill -9. Raises OSError."""
        with self._lock:
            self._write(offset, self.synced)

    def save_synced(self, offset: int) -> None:
        """Note durably that everything up to `offset` is on the disk. Raises OSError."""
        with self._lock:
            self._write(max(self.dispatched, offset), offset)
            file = self._open()
        file.sync()

    def trust(self) -> None:
        """Take `distrust` back, before the next `save`: the files were moved away."""
        self._boot_id = self._this_boot

    def save(self, dispatched: int, synced: int) -> None:
        """Set both durably, also backwards: before derived files are cut. Raises OSError."""
        with self._lock:
            self._write(dispatched, synced)
            file = self._open()
        file.sync()

    def sync_all(self) -> None:
        """Sync the file system that the derived files are on. SyncFailedError."""
        sync_all(self._fs, self._path.rpartition("/")[0])

    def distrust(self) -> None:
        """Have the next start read the files as after a power loss: from `synced` on.

        After a failed sync the page cache may lose what it had; `dispatched` does not hold.
        """
        with self._lock:
            self._boot_id = bytes(16)
            self._write(self.dispatched, self.synced)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, dispatched: int, synced: int) -> None:
        content = _STATE.pack(self._boot_id, dispatched, synced, *self._sizes)
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
