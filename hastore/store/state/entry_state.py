"""`hastore/entries.json`: what a log of entries must know beyond its bytes.

    synced_index   index units below this one are on the disk
    begin          (index, position, term of the entry before it) at which the log begins; written
                   before an empty log is begun there, and before retention removes files
    begin_sure     whether `begin` was compared with the files: earlier versions left it as it was
                   when they took over a log of RocketMQ's
    cut_at         a cut at this position was begun, and must be finished; null: none
    install        (as `begin`) the log is being given up, to begin anew there; null: no
    archived       whether what an install must keep is in `rescued/`; an earlier version of hastore
                   does not write this, and moves the whole log there
    proves_first   this version wrote the file: the version before, which does not prove
                   `ha.secret_file` before HELLO, leaves it out

Each write is atomic and durable. The file is written before the first entry. Without it, the index
is checked against the whole log, and nobody knows whether the log was being set aside: the node
must not count as one that has all that it acknowledged.
"""

import json
import threading

import msgspec

from hastore.errors import UNREADABLE, StoreBrokenError
from hastore.fs.filesystem import FileSystem

_VERSION = 1


class EntryFacts(msgspec.Struct, frozen=True):
    """The file's content."""

    version: int = _VERSION
    synced_index: int = 0
    begin: tuple[int, int, int] = (0, 0, -1)
    cut_at: int | None = None
    install: tuple[int, int, int] | None = None
    begin_sure: bool = False
    archived: bool = False
    proves_first: bool = False


class EntryState:
    """The file of one store; thread-safe."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/entries.json"
        self._guard = threading.Lock()
        self.now = EntryFacts()
        self.is_known = False  # whether there was a file

    def load(self) -> EntryFacts:
        """Read the file. Raises StoreBrokenError if it is damaged, OSError."""
        if self._fs.exists(self._path):
            raw = self._fs.read_bytes(self._path, 1 << 16)
            try:
                self.now = msgspec.json.decode(raw, type=EntryFacts)
            except UNREADABLE as failure:
                raise StoreBrokenError(
                    f"{self._path} is damaged ({failure}): remove it, and do not put back an older"
                    " one; the index of the entries is then built anew from the log, and the node's"
                    " votes and acknowledgements do not count before its leader has brought it in"
                    " line"
                ) from failure
            if self.now.version != _VERSION:
                raise StoreBrokenError(
                    f"{self._path} has version {self.now.version}: a later version of hastore wrote"
                    " this store"
                )
            self.is_known = True
        return self.now

    def save(self, **changes: object) -> None:
        """Change some facts durably. Raises OSError."""
        with self._guard:
            now = msgspec.structs.replace(self.now, proves_first=True, **changes)
            if now != self.now or not self.is_known:
                text = json.dumps(msgspec.to_builtins(now), indent=1)
                self._fs.replace_bytes(self._path, text.encode() + b"\n")
                self.now = now
                self.is_known = True

    def is_of_version_before(self) -> bool:
        """Whether the version before was the last to write the file. Raises as `load` does."""
        facts = self.load()
        return self.is_known and not facts.proves_first
