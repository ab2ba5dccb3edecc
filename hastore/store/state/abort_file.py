"""`abort`: by this file RocketMQ and hastore know that a store was not closed cleanly."""

import os

from hastore.store.fs.filesystem import FileSystem


class AbortFile:
    """`abort`: it exists from the start to a clean stop, and holds the process id."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self._path = f"{root}/abort"

    def exists(self) -> bool:
        """Whether the last process did not stop cleanly."""
        return self._fs.exists(self._path)

    def create(self) -> None:
        """Make the file, durably."""
        self._fs.replace_bytes(self._path, str(os.getpid()).encode())

    def remove(self) -> None:
        """Remove the file, durably: the last act of a clean stop."""
        if self._fs.exists(self._path):
            self._fs.remove(self._path)
            self._fs.sync_dir(self._root)
