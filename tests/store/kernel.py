"""A file system that treats failed syncs as Linux does, and knows what is on its disk.

Writes go to the page cache. A sync writes a file's dirty pages to the disk. If it fails, the pages
are not on the disk, and count as clean all the same: the next sync has nothing to write, and says
success. A directory is one page of names, which obeys the same rules. A power loss leaves what is
on the disk, and another boot id.
"""

import os
import uuid

from hastore.fs.filesystem import RealFile
from hastore.fs.memory import MemoryFileSystem
from hastore.fs.protocols import Bytes, File
from hastore.store.state.replay_progress import BOOT_ID_PATH
from tests.store.faulty import BAD_DISK, fresh

PAGE = 4096


def _content(kept: RealFile) -> bytes:
    return os.pread(kept.fileno(), os.fstat(kept.fileno()).st_size, 0)


class KernelFile(RealFile):
    """An open file; its writes make pages dirty."""

    def __init__(self, fs: "KernelFileSystem", kept: RealFile, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs
        self._kept = kept

    def pwrite(self, data: Bytes, position: int) -> None:
        with self._fs.guard:
            super().pwrite(data, position)
            self._fs.writes.append((self.path, position, len(data)))
            if len(data):
                pages = range(position // PAGE, (position + len(data) - 1) // PAGE + 1)
                self._fs.dirty.setdefault(self._kept, set()).update(pages)

    def allocate(self, size: int) -> None:
        if size > self.size:
            self.truncate(size)

    def zero(self, position: int, size: int) -> None:
        self.pwrite(bytes(min(size, self.size - position)), position)

    def sync(self) -> None:
        self._fs.sync_file(self._kept, self, self.path)


class KernelFileSystem(MemoryFileSystem):
    """See the module's text. Syncs fail of files whose path has a part in `failing`.

    Those of the directories in `failing_dirs` fail too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()
        self.failing_dirs: set[str] = set()
        self.writes: list[tuple[str, int, int]] = []  # path, position, size
        self.dirty: dict[RealFile, set[int]] = {}
        self._disk: dict[RealFile, bytearray] = {}
        self._dirty_names: set[str] = set()  # directories
        self._names: dict[str, RealFile] = {}  # on the disk
        self._boot = uuid.uuid4()
        self.guard = self._guard

    def heal(self) -> None:
        """Let all syncs succeed from now on."""
        self.failing, self.failing_dirs = set(), set()

    def paths(self) -> list[str]:
        """Return the paths of all files, as a running process sees them."""
        with self._guard:
            return sorted(self._files)

    def on_disk(self, path: str) -> bytes | None:
        """What a power loss leaves of a file; None if its name is not on the disk."""
        kept = self._names.get(path)
        return None if kept is None else bytes(self._disk.get(kept, b""))

    def after_power_loss(self) -> "KernelFileSystem":
        """The file system as the next boot finds it."""
        fs = KernelFileSystem()
        with self._guard:
            fs._directories = set(self._directories)
            found = {path: self.on_disk(path) or b"" for path in self._names}
        for path, data in found.items():
            file = fs.open(path, create=True)
            file.pwrite(data, 0)
            file.close()
        fs.sync_all("/")
        return fs

    def sync_file(self, kept: RealFile, opened: RealFile, path: str) -> None:
        """Write the dirty pages of a file, or lose them; `opened` may be it after its removal."""
        with self._guard:
            pages = self.dirty.pop(kept, set())
            if any(part in path for part in self.failing):
                raise fresh(BAD_DISK, path)
            data, disk = _content(opened), self._disk.setdefault(kept, bytearray())
            disk[:] = disk[: len(data)].ljust(len(data), b"\0")
            for page in pages:
                disk[page * PAGE : (page + 1) * PAGE] = data[page * PAGE : (page + 1) * PAGE]

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        with self._guard:
            if create and not self.exists(path):
                self._dirty_names.add(os.path.dirname(path))
            file = super().open(path, create=create, writable=writable)
            return KernelFile(self, self._files[path], path, os.dup(file.fileno()))

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        if not self.is_dir(path):
            self._dirty_names.add(os.path.dirname(path))
        super().make_dirs(path, sync=sync)

    def rename(self, source: str, target: str) -> None:
        self._dirty_names |= {os.path.dirname(source), os.path.dirname(target)}
        super().rename(source, target)

    def remove(self, path: str) -> None:
        self._dirty_names.add(os.path.dirname(path))
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self._dirty_names.add(os.path.dirname(path))
        super().remove_tree(path)

    def sync_dir(self, path: str) -> None:
        with self._guard:
            was_dirty = path in self._dirty_names
            self._dirty_names.discard(path)
            if path in self.failing_dirs:
                raise fresh(BAD_DISK, path)
            if was_dirty:
                names = {p: k for p, k in self._names.items() if os.path.dirname(p) != path}
                here = {p: k for p, k in self._files.items() if os.path.dirname(p) == path}
                self._names = names | here

    def sync_all(self, path: str) -> None:
        with self._guard:
            for name, kept in self._files.items():
                self.sync_file(kept, kept, name)
            for directory in list(self._dirty_names):
                self.sync_dir(directory)

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        if path == BOOT_ID_PATH:
            return f"{self._boot}\n".encode()
        return super().read_bytes(path, max_bytes)
