"""A file system in memory that records each effect on its disk, and what was promised when.

It stands in for the real one: the store's own code runs over it. Files are memfds, so maps work.
What was written through a map, or to a descriptor that was handed out, is found by comparing the
file with what was recorded, before the next effect and before each promise.

State files that are replaced as a whole (`replace_bytes`) promise by themselves: from its return
on, a crash leaves the new content; until then the old or the new one; and never anything else.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Iterable, Iterator

from hastore.errors import StoreFullError
from hastore.fs.filesystem import RealFile
from hastore.fs.memory import MemoryFileSystem
from hastore.fs.protocols import Bytes, File, FileSystem
from hastore.store.state.replay_progress import BOOT_ID_PATH
from tests.crash.effects import (
    ROOT,
    SECTOR,
    Effect,
    Name,
    Names,
    Promise,
    Resize,
    Sync,
    SyncAll,
    SyncNames,
    Tree,
    Write,
)


class RecordingFile(RealFile):
    """An open file whose changes are recorded."""

    in_memory = True

    def __init__(self, fs: "RecordingFileSystem", number: int, path: str, descriptor: int) -> None:
        super().__init__(path, descriptor)
        self._fs = fs
        self.number = number

    def fileno(self) -> int:
        self._fs.watch(self.number)
        return super().fileno()

    def pwrite(self, data: Bytes, position: int) -> None:
        with self._fs.guard:
            self._fs.look()
            super().pwrite(data, position)
            self._fs.recorded(self.number)
            self._fs.note(Write(self.number, position, bytes(data)))

    def zero(self, position: int, size: int) -> None:
        size = min(size, self.size - position)
        if size > 0:
            with self._fs.guard:
                self._fs.look()
                super().pwrite(bytes(size), position)
                self._fs.recorded(self.number)
                self._fs.note(Write(self.number, position, bytes(size), "zero"))

    def allocate(self, size: int) -> None:
        if self._fs.full and size > self.size:
            raise StoreFullError(f"{self.path}: no room for {size} bytes")
        self._resize(max(size, self.size), "allocate")

    def truncate(self, size: int) -> None:
        self._resize(size, "truncate")

    def _resize(self, size: int, kind: str) -> None:
        with self._fs.guard:
            self._fs.look()
            if size != os.fstat(self._descriptor).st_size:
                super().truncate(size)
                self._fs.recorded(self.number)
                self._fs.note(Resize(self.number, size, kind))
            self.size = size

    def sync(self) -> None:
        with self._fs.guard:
            self._fs.look()
            self._fs.syncing(self.path)
            self._fs.note(Sync(self.number))

    def map(self, *, writable: bool = False):
        if writable:
            self._fs.watch(self.number)
        return super().map(writable=writable)


class RecordingFileSystem(MemoryFileSystem):
    """See the module's text. While `full`, there is no room for a new file."""

    keep_reserve = FileSystem.keep_reserve  # of a memory file system, it does nothing

    def __init__(
        self,
        files: dict[str, bytes] | None = None,
        directories: Iterable[str] = (),
        promise: Promise | None = None,
    ) -> None:
        """Begin with what a crash has left: all of it is on the disk."""
        super().__init__()
        self.guard = self._guard
        self.effects: list[Effect] = []
        self.full = False
        self.boot = uuid.uuid4()
        self._promise = Promise()
        # Names that a sync of a directory makes final: (directory, state file, its contents).
        self._settling: list[tuple[str, str, tuple[bytes | None, ...]]] = []
        self._numbers: dict[str, int] = {"/": ROOT}
        self._last = ROOT  # the last number that was given
        self._known: dict[int, bytes] = {}  # of watched files: what was recorded
        self._open_of: dict[int, RealFile] = {}  # the memfd of each file
        self._quiet = True  # nothing is recorded while it is set up
        self._directories.add("/")
        for path in sorted(directories):
            self.make_dirs(path)
        for path, data in sorted((files or {}).items()):
            self._put(path, data)
        self._quiet = False
        if promise is not None:
            self._say(promise)
        self.start = Tree(
            dict(self._names_now()),
            frozenset(self._numbers[path] for path in self._directories),
            {self._numbers[path]: data for path, data in (files or {}).items()},
        )

    def _put(self, path: str, data: bytes) -> None:
        kept = RealFile(path, os.memfd_create("crash", os.MFD_CLOEXEC))
        if data:
            RealFile.pwrite(kept, data, 0)
        self._files[path] = kept
        self._open_of[self._number(path)] = kept

    def _names_now(self) -> list[tuple[Name, int]]:
        return [(self._name(path), number) for path, number in self._numbers.items() if number]

    def _number(self, path: str) -> int:
        if path not in self._numbers:
            self._last += 1
            self._numbers[path] = self._last
        return self._numbers[path]

    def _name(self, path: str) -> Name:
        return self._numbers[os.path.dirname(path)], os.path.basename(path)

    # -- recording --------------------------------------------------------------------------------

    def note(self, effect: Effect) -> None:
        """Record an effect."""
        if not self._quiet:
            self.effects.append(effect)

    def watch(self, number: int) -> None:
        """Compare a file from now on with what was recorded: others may write to it."""
        with self.guard:
            if number not in self._known:
                self._known[number] = _content(self._open_of[number])

    def look(self) -> None:
        """Record what was written to watched files past this interface."""
        for number, known in self._known.items():
            found = _content(self._open_of[number])
            if found != known:
                self._known[number] = found
                for at in _changed(known, found):
                    self.note(Write(number, at, found[at : at + SECTOR], "map"))

    def recorded(self, number: int) -> None:
        """Take what a file has now for recorded."""
        if number in self._known:
            self._known[number] = _content(self._open_of[number])

    def syncing(self, path: str) -> None:
        """Called before each sync of a file or of names, which it may let fail."""

    def promise(self, note: object) -> None:
        """From here on, `note` must hold after a crash."""
        with self.guard:
            self.look()
            self._say(Promise(self._promise.files, note))

    def _say(self, promise: Promise) -> None:
        self._promise = promise
        self.note(promise)

    def _allow(self, path: str, *contents: bytes | None) -> None:
        files = {**self._promise.files, path: tuple(dict.fromkeys(contents))}
        self._say(Promise(files, self._promise.note))

    # -- the file system --------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        path = os.path.normpath(path)
        with self.guard:
            self.look()
            is_new = create and not self.exists(path)
            if is_new and self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            file = super().open(path, create=create)
            if is_new:
                number = self._number(path)
                self._open_of[number] = self._files[path]
                self.note(Names(((self._name(path), number),), "create"))
            number = self._numbers[path]
            return RecordingFile(self, number, path, os.dup(RealFile.fileno(file)))

    def make_dirs(self, path: str, *, sync: bool = True) -> None:
        path = os.path.normpath(path)
        if self.is_dir(path):
            return
        with self.guard:
            self.look()
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self.make_dirs(os.path.dirname(path), sync=sync)
            super().make_dirs(path)
            number = self._number(path)
            self.note(Names(((self._name(path), number),), "mkdir", made=number))
            if sync:
                self.sync_dir(os.path.dirname(path))

    def rename(self, source: str, target: str) -> None:
        source, target = os.path.normpath(source), os.path.normpath(target)
        with self.guard:
            self.look()
            kept = self._files.get(target)
            if kept is not None:  # its number may still be compared
                self._files[target] = RealFile(target, os.dup(kept.fileno()))
            super().rename(source, target)
            changes = ((self._name(target), self._numbers[source]), (self._name(source), None))
            under = f"{source}/"
            for path in [one for one in self._numbers if f"{one}/".startswith(under)]:
                self._numbers[target + path[len(source) :]] = self._numbers.pop(path)
            self._moved(source, target)
            self.note(Names(changes, "rename"))

    def _moved(self, source: str, target: str) -> None:
        """State files are under their old or their new name until the folders are synced."""
        files = self._promise.files
        for old in [one for one in files if one == source or one.startswith(f"{source}/")]:
            new, contents = target + old[len(source) :], files[old]
            self._allow(new, *files.get(new, (None,)), *contents)
            self._allow(old, *contents, None)
            self._settling.append((os.path.dirname(target), new, contents))
            self._settling.append((os.path.dirname(source), old, (None,)))

    def remove(self, path: str) -> None:
        path = os.path.normpath(path)
        with self.guard:
            self.look()
            kept = self._files.get(path)
            if kept is not None:
                self._files[path] = RealFile(path, os.dup(kept.fileno()))
            super().remove(path)
            name = self._name(path)
            self._known.pop(self._numbers.pop(path), None)
            if path in self._promise.files:
                self._allow(path, *self._promise.files[path], None)
            self.note(Names(((name, None),), "remove"))

    def remove_tree(self, path: str) -> None:
        path = os.path.normpath(path)
        with self.guard:
            for name in self.list_dir(path):
                below = f"{path}/{name}"
                (self.remove_tree if self.is_dir(below) else self.remove)(below)
            super().remove_tree(path)
            name_, number = self._name(path), self._numbers.pop(path)
            gone = [one for one in self._promise.files if one.startswith(f"{path}/")]
            self._settling += [(os.path.dirname(path), one, (None,)) for one in gone]
            self.note(Names(((name_, None),), "rmdir", removed=number))

    def sync_dir(self, path: str) -> None:
        path = os.path.normpath(os.path.abspath(path))
        with self.guard:
            self.look()
            if not self.is_dir(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            self.syncing(path)
            self.note(SyncNames(self._numbers[path]))
            done = [one for one in self._settling if one[0] == path]
            self._settling = [one for one in self._settling if one[0] != path]
            for _, file, contents in done:
                self._allow(file, *contents)
            for file, contents in self._promise.files.items():
                if len(contents) > 1 and os.path.dirname(file) == path and not self.exists(file):
                    self._allow(file, None)

    def sync_all(self, path: str) -> None:
        with self.guard:
            self.look()
            self.note(SyncAll())

    @contextlib.contextmanager
    def replaced(self, path: str, data: bytes) -> Iterator[None]:
        """A state file gets a new content in this `with`: it has the old or the new one."""
        with self.guard:
            before = self._promise.files.get(path)
            if before is None:
                before = (self.read_bytes(path) if self.exists(path) else None,)
            self._allow(path, *before, data)
            yield
            self._allow(path, data)

    def kept(self, path: str, data: bytes) -> None:
        """From here on, a file has this content."""
        self._allow(path, data)

    def replace_bytes(self, path: str, data: bytes) -> None:
        path = os.path.normpath(path)
        with self.replaced(path, data):
            super().replace_bytes(path, data)

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        if path == BOOT_ID_PATH:
            return f"{self.boot}\n".encode()
        return super().read_bytes(path, max_bytes)

    def free_bytes(self, path: str) -> int:
        del path
        return 0 if self.full else 1 << 40

    def close(self) -> None:
        """Give the memory of all files back."""
        for kept in (*self._files.values(), *self._open_of.values()):
            kept.close()

    def path_of(self) -> dict[int, str]:
        """Return the present path of each number that has one."""
        return {number: path for path, number in self._numbers.items()}


def _content(kept: RealFile) -> bytes:
    descriptor = RealFile.fileno(kept)
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _changed(old: bytes, new: bytes) -> list[int]:
    """Where the sectors begin that differ; a file that has become longer is recorded elsewhere."""
    return [
        at
        for at in range(0, len(new), SECTOR)
        if new[at : at + SECTOR] != old[at : at + SECTOR].ljust(len(new[at : at + SECTOR]), b"\0")
    ]
