"""The disk of a machine: what a power cut loses, failed and slow calls, no room, rot.

The page cache and the disk are those of tests/dledger/store/lossy.py: names form a journal, bytes
that were not synced are lost by sector.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import uuid
from typing import Any

from hastore.errors import NotCachedError, StoreFullError
from hastore.fs.filesystem import RealFile, may_wait
from hastore.fs.protocols import Bytes, File, FileSystem
from hastore.ha.node.node_state import BOOT_ID_PATH
from tests.dledger.store.lossy import LossyFile, LossyFileSystem, content
from tests.world.scheduler import world

SYNC_S = 0.002
COLD = 0.02  # of the reads that must not wait


class DiskFile(LossyFile):
    """An open file."""

    _fs: Disk

    def pread(self, size: int, position: int) -> bytes:
        disk = self._fs
        if not may_wait() and world().current is not None and disk.chance.random() < COLD:
            raise NotCachedError(f"{self.path}: byte {position} is not in memory")
        disk.fault("read", self.path)
        if disk.slow_s and may_wait() and world().current is not None:
            world().sleep(disk.slow_s * disk.chance.random())
        return os.pread(self.fileno(), size, position)

    def pwrite(self, data: Bytes, position: int) -> None:
        self._fs.check_room(position + len(data) - self.size, self.path)
        self._fs.note_write(self._kept)
        super().pwrite(data, position)

    def allocate(self, size: int) -> None:
        if self._fs.lacks(size - self.size):
            raise StoreFullError(f"{self.path}: no room for {size} bytes")
        super().allocate(size)

    def sync(self) -> None:
        self._fs.wait_for_sync()
        self._fs.fault("sync", self.path)
        super().sync()


class Disk(LossyFileSystem):
    """All files of one machine."""

    file_type = DiskFile

    def __init__(self, seed: str) -> None:
        super().__init__()
        self.chance = random.Random(f"disk {seed}")
        self.name = seed
        self.boots = self.mounts = 1
        self._machine = random.Random(seed).getrandbits(100) << 20
        self.slow_s = 0.0
        self.full = False
        self.failing: dict[str, float] = {}  # read, write, sync: the share of calls that fail
        self.failed: list[str] = []
        self.written_ms: dict[RealFile, int] = {}

    # -- what goes wrong

    def fault(self, call: str, path: str) -> None:
        """Let a call fail, but none of an event: those happen between the threads."""
        share = self.failing.get(call) if world().current is not None else None
        if share and self.chance.random() < share:
            self.failed.append(f"{call} {path}")
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    def lacks(self, more: int) -> bool:
        return self.full and more > 0 and world().current is not None

    def check_room(self, more: int, path: str) -> None:
        if self.lacks(more):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def wait_for_sync(self) -> None:
        if world().current is not None:
            world().sleep(self.chance.random() * (SYNC_S + 4 * self.slow_s))

    def call(self, path: str) -> None:
        super().call(path)
        self.fault("write", path)

    def note_write(self, kept: RealFile) -> None:
        self.written_ms[kept] = int(world().host.wall() * 1000)

    # -- FileSystem

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        if create and not self.exists(path):
            self.check_room(1, path)
        file = super().open(path, create=create, writable=writable)
        if create:
            wall_ms = int(world().host.wall() * 1000)
            self.written_ms.setdefault(self._files[os.path.normpath(path)], wall_ms)
        return file

    def sync_dir(self, path: str) -> None:
        self.wait_for_sync()
        self.fault("sync", path)
        super().sync_dir(path)

    def sync_all(self, path: str) -> None:
        self.wait_for_sync()
        self.fault("sync", path)
        for kept in set(self._files.values()):
            self.synced[kept] = content(kept)
        self._journal = self._journal[-1:]

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        if path == BOOT_ID_PATH:
            return f"{uuid.UUID(int=self._machine + self.boots)}\n".encode()
        return super().read_bytes(path, max_bytes)

    def mount_id(self, path: str) -> str:
        del path
        return f"mount {self.mounts}"

    def keep_reserve(self, folder: str, sizes: Any) -> None:
        FileSystem.keep_reserve(self, folder, sizes)

    def modified_ms(self, path: str) -> int:
        kept = self._files.get(os.path.normpath(path))
        if kept is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.written_ms.get(kept, 0)

    def free_bytes(self, path: str) -> int:
        del path
        return 0 if self.full else 1 << 40

    def used_bytes(self, path: str) -> int:
        below = f"{os.path.normpath(path)}/"
        found = [file for path, file in self._files.items() if path.startswith(below)]
        return sum(os.fstat(file.fileno()).st_size for file in found)

    # -- the machine's end

    def process_ended(self) -> None:
        """Give back the locks of a killed process."""
        self._locked.clear()

    def after_power_cut(self) -> Disk:
        """Return the disk as the next boot finds it."""
        found = Disk(self.name)
        found.chance, found.boots = self.chance, self.boots + 1
        found._adopt(self.snapshot(None).restored(self.chance))
        return found

    def after_mount(self) -> Disk:
        """Return the disk after the kernel has shut its file system down; the machine runs on."""
        found = self.after_power_cut()
        found.boots, found.mounts = self.boots, self.mounts + 1
        return found

    def image(self) -> Disk:
        """Return a copy of all that is there now: a backup, or a virtual machine's snapshot."""
        made = Disk(self.name)
        made.chance, made.boots = random.Random(self.chance.random()), self.boots
        made._adopt(self.snapshot(None).restored(None))
        return made

    def _adopt(self, other: LossyFileSystem) -> None:
        self._files, self._directories = other._files, other._directories
        self.synced, self._journal = other.synced, copy.copy(other._journal)

    def files(self, below: str) -> list[str]:
        return sorted(path for path in self._files if path.startswith(f"{below}/"))

    def rot(self, path: str, position: int, mask: int) -> None:
        """Change bits of one byte of a file, in memory and on the disk."""
        kept = self._files[path]
        (old,) = os.pread(kept.fileno(), 1, position)
        os.pwrite(kept.fileno(), bytes([old ^ mask]), position)
        synced = self.synced.get(kept, b"")
        if position < len(synced):
            changed = bytearray(synced)
            changed[position] ^= mask
            self.synced[kept] = bytes(changed)

    def size(self, path: str) -> int:
        return os.fstat(self._files[path].fileno()).st_size
