"""A file system in memory that can say what a power loss would leave of it, at any call.

Names form a journal, as on ext4: a power loss keeps all changes up to one that came after the last
`sync_dir` of the directory it touched. Contents are lost by sector: each 512 bytes that were
written since the last sync of their file are there or not.
"""

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hastore.fs.filesystem import RealFile
from hastore.fs.memory import MemoryFileSystem
from hastore.fs.protocols import Bytes, File

_SECTOR = 512
Names = dict[str, RealFile]


@dataclass
class Snapshot:
    """What is in the page cache and what is on the disk, at one call; `note` is the caller's."""

    names: list[Names]  # states that a power loss may leave; the last one is the present
    cached: dict[RealFile, bytes]
    synced: dict[RealFile, bytes]
    note: object

    def restored(self, chance: random.Random | None) -> "LossyFileSystem":
        """Return what a power loss leaves; without `chance`, what a kill -9 leaves."""
        fs = LossyFileSystem()
        names = self.names[-1] if chance is None else chance.choice(self.names)
        whole = None if chance is None else chance.choice((None, None, 0.0, 1.0))
        for path, kept in names.items():
            fs.make_dirs(os.path.dirname(path))
            file = fs.open(path, create=True)
            file.pwrite(self._content(kept, chance, whole), 0)
            file.close()
            old = self.synced.get(kept, b"") if chance is None else None
            fs.settle(path, old)
        return fs

    def _content(self, kept: RealFile, chance: random.Random | None, whole: float | None) -> bytes:
        new, old = self.cached.get(kept, b""), self.synced.get(kept, b"")
        if chance is None or new == old:
            return new
        size = chance.choice((len(new), len(old)))
        share = chance.random() if whole is None else whole
        found = bytearray()
        for at in range(0, size, _SECTOR):
            source = new if chance.random() < share else old
            found += source[at : at + _SECTOR].ljust(_SECTOR, b"\0")
        return bytes(found[:size])


class LossyFile(RealFile):
    """An open file."""

    def __init__(self, fs: "LossyFileSystem", kept: RealFile, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs
        self._kept = kept

    def pwrite(self, data: Bytes, position: int) -> None:
        self._fs.call(self.path)
        super().pwrite(data, position)

    def allocate(self, size: int) -> None:
        self._fs.call(self.path)
        if size > self.size:
            super().truncate(size)

    def truncate(self, size: int) -> None:
        self._fs.call(self.path)
        super().truncate(size)

    def sync(self) -> None:
        self._fs.call(self.path)
        self._fs.synced[self._kept] = content(self._kept)


class LossyFileSystem(MemoryFileSystem):
    """See the module's text. `on_call(number)` runs before each call that changes something."""

    file_type: type[LossyFile] = LossyFile  # of what `open` returns

    def __init__(self) -> None:
        super().__init__()
        self.synced: dict[RealFile, bytes] = {}
        self.on_call: Callable[[int], None] = lambda number: None
        self.calls = 0
        self._journal: list[tuple[frozenset[str], Names]] = [(frozenset(), {})]
        self._one = threading.RLock()

    def call(self, path: str) -> None:
        del path
        with self._one:
            self.calls += 1
            self.on_call(self.calls)

    def snapshot(self, note: object) -> Snapshot:
        with self._one, self._guard:
            names = [state for _, state in self._journal]
            every = {kept for state in names for kept in state.values()}
            return Snapshot(
                names, {kept: content(kept) for kept in every},
                {kept: data for kept, data in self.synced.items() if kept in every}, note,
            )  # fmt: skip

    def settle(self, path: str, synced: bytes | None) -> None:
        """Make all names durable, and of a file `synced` (None: all); count calls from here on."""
        kept = self._files[path]
        self.synced[kept] = content(kept) if synced is None else synced
        self.calls = 0
        self._journal = self._journal[-1:]

    def _noted(self, *paths: str) -> None:
        touched = frozenset(os.path.dirname(os.path.normpath(path)) for path in paths)
        self._journal.append((touched, dict(self._files)))

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        with self._one, self._guard:
            is_new = create and not self.exists(path)
            if is_new:
                self.call(path)
            file = super().open(path, create=create, writable=writable)
            kept = self._files[os.path.normpath(path)]
            if is_new:
                self._noted(path)
            return self.file_type(self, kept, path, os.dup(file.fileno()))

    def rename(self, source: str, target: str) -> None:
        with self._one:
            self.call(target)
            kept = self._files.get(os.path.normpath(target))
            if kept is not None:  # the journal may still need its bytes
                self._files[os.path.normpath(target)] = RealFile(target, os.dup(kept.fileno()))
            super().rename(source, target)
            self._noted(source, target)

    def remove(self, path: str) -> None:
        with self._one:
            self.call(path)
            kept = self._files.get(os.path.normpath(path))
            if kept is not None:
                self._files[os.path.normpath(path)] = RealFile(path, os.dup(kept.fileno()))
            super().remove(path)
            self._noted(path)

    def remove_tree(self, path: str) -> None:
        with self._one:
            for name in sorted(self._files):
                if name.startswith(f"{os.path.normpath(path)}/"):
                    self.remove(name)
            super().remove_tree(path)

    def sync_dir(self, path: str) -> None:
        with self._one:
            self.call(path)
            path = os.path.normpath(path)
            last = max(
                (at for at, (touched, _) in enumerate(self._journal) if path in touched), default=0
            )
            self._journal = self._journal[last:]


def content(kept: RealFile) -> bytes:
    size = os.fstat(kept.fileno()).st_size
    return os.pread(kept.fileno(), size, 0)
