"""Run a node on a machine that has rebooted, as far as the node can tell.

    python tests/crash/rebooted.py BOOT bin/hastore-master -c FILE

`BOOT` is a file with the id of the boot. A power cut of `fuse_disk.py` loses files, but the kernel
goes on. FUSE does not pass syncfs on, so this syncs each file instead; and the index of a log of
entries has small files, since the file system keeps no holes. If the name of the file ends
with `UNSYNCED`, no file is synced: a mistake that the power cuts must find.
"""

import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


UNSYNCED = ".unsynced"
INDEX_FILE_BYTES = 1 << 16


def _install(boot: str) -> None:
    from hastore.dledger.store.mmap_file_store import EntryStore
    from hastore.fs.filesystem import RealFile, RealFileSystem
    from hastore.store.state.replay_progress import BOOT_ID_PATH

    read = RealFileSystem.read_bytes

    def read_bytes(self: RealFileSystem, path: str, max_bytes: int = 1 << 26) -> bytes:
        return read(self, boot if path == BOOT_ID_PATH else path, max_bytes)

    def sync_all(self: RealFileSystem, path: str) -> None:
        for folder, _, names in os.walk(os.path.dirname(path)):
            for name in (".", *names):
                descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    EntryStore.__init__.__kwdefaults__["index_file_bytes"] = INDEX_FILE_BYTES
    RealFileSystem.read_bytes = read_bytes
    RealFileSystem.sync_all = sync_all
    if boot.endswith(UNSYNCED):
        RealFile.sync = lambda self: None


if __name__ == "__main__":
    boot, program, *words = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    sys.argv = [program, *words]
    _install(boot)
    runpy.run_path(program, run_name="__main__")
