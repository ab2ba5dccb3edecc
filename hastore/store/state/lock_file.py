"""`lock`: a node holds this file's lock, so that no other process opens its store.

The lock excludes other hastore processes and RocketMQ (fs/filesystem.py, `lock`).
"""

from hastore.fs.filesystem import File, FileSystem


class LockFile:
    """The store's lock. One thread at a time takes it or gives it back."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.path = f"{root}/lock"
        self._fs = fs
        self._root = root
        self._file: File | None = None

    def take(self) -> None:
        """Take the lock, unless this object holds it already; creates the store's root.

        Raises StoreInUseError, OSError.
        """
        if self._file is None:
            self._fs.make_dirs(self._root)
            self._file = self._fs.lock(self.path)

    def give_back(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_in_place(self) -> bool:
        """Whether the path still names the locked file; True while no lock is held."""
        file = self._file
        return file is None or self._fs.is_same_file(self.path, file)
