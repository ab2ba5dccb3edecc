"""`abort`: the file that tells hastore and RocketMQ that a store was not closed cleanly."""

import os

from hastore.fs.filesystem import FileSystem


class AbortFile:
    """`abort`: it exists from a start until a clean stop, and holds the process id."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._root = root
        self._path = f"{root}/abort"

    def exists(self) -> bool:
        """Whether the last process did not close the store cleanly."""
        return self._fs.exists(self._path)

    def create(self) -> None:
        """Make the file, durably."""
        self._fs.replace_bytes(self._path, str(os.getpid()).encode())

    def remove(self) -> None:
        """Remove the file, durably: the last step of a clean stop."""
        if self._fs.exists(self._path):
            self._fs.remove(self._path)
            self._fs.sync_dir(self._root)
