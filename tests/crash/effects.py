"""What a process does to a disk, as a list of effects; a name is (directory's number, name).

Files and directories have numbers, as inodes have. The root is number 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ROOT = 0
SECTOR = 512
Name = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes written into a file; `kind` says by which call: write, zero or map."""

    file: int
    at: int
    data: bytes
    kind: str = "write"


@dataclass(frozen=True, slots=True)
class Resize:
    """The length of a file was set, by `truncate` or `allocate`."""

    file: int
    size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Sync:
    """All bytes and the length of a file are on the disk."""

    file: int
    kind: str = "sync"


@dataclass(frozen=True, slots=True)
class Names:
    """Names that changed at once: what each names now, None for nothing.

    `made` is the directory that this makes, `removed` the one that it removes.
    """

    changes: tuple[tuple[Name, int | None], ...]
    kind: str  # create, rename, remove, mkdir, rmdir
    made: int | None = None
    removed: int | None = None

    @property
    def directories(self) -> frozenset[int]:
        """The directories whose names changed."""
        return frozenset(name[0] for name, _ in self.changes)


@dataclass(frozen=True, slots=True)
class SyncNames:
    """All names in a directory are on the disk."""

    directory: int
    kind: str = "sync of names"


@dataclass(frozen=True, slots=True)
class SyncAll:
    """Everything is on the disk."""

    kind: str = "sync of all"


@dataclass(frozen=True, slots=True)
class Promise:
    """What must hold after a crash from here on.

    `files` has the contents that a state file may have, None for no file. `note` is the workload's.
    """

    files: Mapping[str, tuple[bytes | None, ...]] = field(default_factory=dict)
    note: object = None
    kind: str = "promise"


Effect = Write | Resize | Sync | Names | SyncNames | SyncAll | Promise


@dataclass(frozen=True, slots=True)
class Tree:
    """A disk's content: the names, which numbers are directories, the bytes of files."""

    names: Mapping[Name, int]
    directories: frozenset[int]
    files: Mapping[int, bytes]

    def paths(self) -> tuple[dict[str, bytes], set[str]]:
        """Return what each path names: the bytes of files, and the directories.

        What is in a directory without a name is lost.
        """
        below: dict[int, list[tuple[str, int]]] = {}
        for (directory, name), number in self.names.items():
            below.setdefault(directory, []).append((name, number))
        found: dict[str, bytes] = {}
        directories = {"/"}
        waiting = [("", ROOT)]
        while waiting:
            path, directory = waiting.pop()
            for name, number in below.get(directory, ()):
                if number in self.directories:
                    directories.add(f"{path}/{name}")
                    waiting.append((f"{path}/{name}", number))
                else:
                    found[f"{path}/{name}"] = self.files.get(number, b"")
        return found, directories
