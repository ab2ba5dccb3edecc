"""Run a node whose clock and disk obey a small shared file; the tests write it while the node runs.

    python tests/process/faulty_node.py CONTROL bin/hastore-dledger -c FILE

`Faults` is that file. What happens to the node is counted in it, so a test can see that a fault
has met it. The node's own code is unchanged: its clock, and the system calls of its file system,
are replaced before it starts.
"""

from __future__ import annotations

import errno
import mmap
import os
import pathlib
import runpy
import struct
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
_FIELDS = (
    # what the tests set
    "wall_ms",  # added to the wall clock; may go back
    "monotonic_ms",  # added to the monotonic clock; must not go back while the node runs
    "sync_ms",  # how much longer each sync takes
    "full",  # 1: no file grows, and the disk says that it has no room
    "sync_fails",  # 1: each sync fails
    "read_ms",  # how long each read of the commit log takes that does not go through a map
    # what the node counts
    "shifted_reads",
    "slow_syncs",
    "refused_writes",
    "failed_syncs",
    "slow_reads",
)
_NUMBER = struct.Struct("=q")


class Faults:
    """The shared file, as numbers by their names."""

    def __init__(self, path: pathlib.Path | str) -> None:
        path = pathlib.Path(path)
        if not path.exists():
            path.write_bytes(bytes(_NUMBER.size * len(_FIELDS)))
        with open(path, "r+b") as file:
            self._data = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, name: str) -> int:
        number: int = _NUMBER.unpack_from(self._data, _FIELDS.index(name) * _NUMBER.size)[0]
        return number

    def __setitem__(self, name: str, value: int) -> None:
        _NUMBER.pack_into(self._data, _FIELDS.index(name) * _NUMBER.size, value)

    def heal(self) -> None:
        """Give the disk its speed and its room back; the clocks stay as they are."""
        for name in ("sync_ms", "full", "sync_fails", "read_ms"):
            self[name] = 0


def _install(faults: Faults) -> None:
    from hastore.clock import SystemClock

    def shifted(name: str, field: str) -> None:
        real = getattr(SystemClock, name)

        def read(self: SystemClock) -> Any:
            shift = faults[field]
            if shift:
                faults["shifted_reads"] += 1
            return real(self) + shift

        setattr(SystemClock, name, read)

    shifted("wall_ms", "wall_ms")
    shifted("monotonic_ms", "monotonic_ms")

    def synced(name: str) -> None:
        real = getattr(os, name)

        def sync(descriptor: int) -> None:
            if faults["sync_fails"]:
                faults["failed_syncs"] += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if faults["sync_ms"]:
                faults["slow_syncs"] += 1
                time.sleep(faults["sync_ms"] / 1000)
            real(descriptor)

        setattr(os, name, sync)

    synced("fsync")
    synced("fdatasync")

    def grown(descriptor: int, end: int) -> None:
        if faults["full"] and end > os.fstat(descriptor).st_size:
            faults["refused_writes"] += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    allocate, pwrite, statvfs = os.posix_fallocate, os.pwrite, os.statvfs

    def faulty_allocate(descriptor: int, offset: int, size: int) -> None:
        grown(descriptor, offset + size)
        allocate(descriptor, offset, size)

    def faulty_pwrite(descriptor: int, data: Any, offset: int) -> int:
        grown(descriptor, offset + len(data))
        return pwrite(descriptor, data, offset)

    def faulty_statvfs(path: Any) -> os.statvfs_result:
        found = list(statvfs(path))
        if faults["full"]:
            found[3] = found[4] = 0  # f_bfree, f_bavail
        return os.statvfs_result(found)

    os.posix_fallocate, os.pwrite = faulty_allocate, faulty_pwrite
    os.statvfs = faulty_statvfs  # type: ignore[assignment]
    _slow_reads(faults)


def _slow_reads(faults: Faults) -> None:
    """Let reads of the commit log take `read_ms`, as if no page of it were in memory.

    The node is told the same when it asks the kernel which pages are there.
    """
    from hastore.fs import filesystem

    pread, preadv, is_cached = os.pread, os.preadv, filesystem.is_cached

    def is_slow(descriptor: int) -> bool:
        if not faults["read_ms"]:
            return False
        return "/commitlog/" in os.readlink(f"/proc/self/fd/{descriptor}")

    def wait() -> None:
        faults["slow_reads"] += 1
        time.sleep(faults["read_ms"] / 1000)

    def slow_pread(descriptor: int, size: int, offset: int) -> bytes:
        if is_slow(descriptor):
            wait()
        return pread(descriptor, size, offset)

    def slow_preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if is_slow(descriptor):
            if flags & os.RWF_NOWAIT:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            wait()
        return preadv(descriptor, buffers, offset, flags)

    def cached(*arguments: Any) -> bool:
        return not faults["read_ms"] and is_cached(*arguments)

    os.pread, os.preadv = slow_pread, slow_preadv
    for module in list(sys.modules.values()):  # a warm process has imported the node already
        if getattr(module, "is_cached", None) is is_cached:
            module.is_cached = cached  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    _, control, *sys.argv = sys.argv
    _install(Faults(control))
    runpy.run_path(sys.argv[0], run_name="__main__")
