"""RocketMQ's small files beside a log: `abort`, `lock` and `checkpoint`; what forbids a start.

abort        exists from a start until a clean stop, for hastore and RocketMQ
lock         locked by the process that has the store open; excludes other hastore processes and
             RocketMQ (FileSystem.lock)
checkpoint   how far log, queues and index are synced. Housekeeping writes it, so that RocketMQ
             can open the store; hastore itself reads only the last store timestamp from it,
             when it opens the store
"""

import os
import struct
from dataclasses import astuple, dataclass

from hastore.config.model import Mode
from hastore.fs.filesystem import File, FileSystem, read_or_empty

_NAMES = frozenset(
    {
        *("commitlog", "consumequeue", "batchconsumequeue", "index", "hastore", "rescued"),
        *("abort", "checkpoint", "lock", "rebuild.tmp"),
    }
)


def is_store_name(name: str) -> bool:
    """Whether a name in a store's root is the store's, and not something else that lies there."""
    return name in _NAMES or name.startswith("dledger-")


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


class LockFile:
    """The store's lock. One thread at a time takes it or gives it back."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self.path = f"{root}/lock"
        self._fs = fs
        self._root = root
        self._file: File | None = None

    def acquire(self) -> None:
        """Take the lock, unless this object holds it already; creates the store's root.

        Raises StoreInUseError, OSError.
        """
        if self._file is None:
            self._fs.make_dirs(self._root)
            self._file = self._fs.lock(self.path)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def is_in_place(self) -> bool:
        """Whether the path still names the locked file; True while no lock is held."""
        file = self._file
        return file is None or self._fs.is_same_file(self.path, file)


_CHECKPOINT = struct.Struct(">qqqqq")
_PAGE_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far the files are synced: store timestamps in ms, offsets in bytes.

    `checkpoint`, 4096 bytes: physicMsgTimestamp, logicsMsgTimestamp, indexMsgTimestamp,
    masterFlushedOffset, confirmPhyOffset, 8 bytes each, then zeros.
    """

    log_timestamp_ms: int = 0
    queue_timestamp_ms: int = 0
    index_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirmed_offset: int = 0


class CheckpointFile:
    """The store's `checkpoint` file; a short or missing one reads as zeros."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        self._fs = fs
        self._path = f"{root}/checkpoint"
        self._file: File | None = None
        self.now = Checkpoint()

    def load(self) -> Checkpoint:
        """Read the file. Raises OSError."""
        raw = read_or_empty(self._fs, self._path, _PAGE_SIZE)
        if len(raw) >= _CHECKPOINT.size:
            self.now = Checkpoint(*_CHECKPOINT.unpack_from(raw))
        return self.now

    def reserve(self) -> None:
        """Have room for the file before the disk may be full. Raises OSError, StoreFullError."""
        if self._file is None:
            self._file = self._open()

    def _open(self) -> File:
        file = self._fs.open(self._path, create=True)
        try:
            if file.size != _PAGE_SIZE:
                file.truncate(0)
                file.allocate(_PAGE_SIZE)
        except BaseException:
            file.close()
            raise
        return file

    def save(self, checkpoint: Checkpoint, *, sync: bool) -> None:
        """Write the file. Raises OSError, StoreFullError."""
        file = self._file  # another thread may `forget` it
        if file is None:
            file = self._file = self._open()
        file.pwrite(_CHECKPOINT.pack(*astuple(checkpoint)), 0)
        if sync:
            file.sync()
        self.now = checkpoint

    def forget(self) -> None:
        """Begin anew, after the file was moved away; the next save makes another one.

        It is not closed here: a save in another thread may still be writing to it.
        """
        self._file, self.now = None, Checkpoint()

    def close(self) -> None:
        """Close the file; the next save opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


_CLASSIC_LOG = "commitlog"
DLEDGER_LOG = "dledger-"  # the beginning of the name
RESTORING = "restoring.tmp"  # where `hastore restore` makes a store, before it moves it in place


def ledger_name(node: int) -> str:
    """Return the name of the directory with a node's log in mode dledger."""
    return f"{DLEDGER_LOG}n{node}"


def other_log_problem(fs: FileSystem, root: str, mode: Mode, node: int) -> str | None:
    """Return why a node of `mode` must not open the store at `root`; None if it may.

    The store has the log of the other mode, or in mode dledger that of another node. The node would
    not see it, and begin an empty one.
    """
    if not fs.is_dir(root):
        return None
    names = fs.list_dir(root)
    ledgers = [name for name in names if name.startswith(DLEDGER_LOG)]
    if mode is Mode.DLEDGER:
        fits, logs = Mode.CLASSIC, [name for name in names if name == _CLASSIC_LOG]
    else:
        fits, logs = Mode.DLEDGER, ledgers
    for name in logs:
        if fs.list_dir(f"{root}/{name}"):
            return (
                f"{root}/{name} is a log of mode {fits.value}, but the file says mode: "
                f"{mode.value}; give the node another store.root, or set mode: {fits.value}"
            )
    own = ledger_name(node)
    if mode is Mode.DLEDGER and not fs.list_dir(f"{root}/{own}/data"):
        for name in ledgers:
            if name != own and fs.list_dir(f"{root}/{name}/data"):
                return (
                    f"{root}/{name} is a log of DLedger, but node {node} keeps its log in {own}:"
                    " rename the directory if it is this node's, or give the node another"
                    " store.root"
                )
    return None


def restore_problem(fs: FileSystem, root: str) -> str | None:
    """Return why no node must open the store at `root`: a restore has not put its log in place.

    The node would begin an empty log, in the place of what was to be restored.
    """
    if not fs.exists(f"{root}/{RESTORING}"):
        return None
    left = fs.list_dir(f"{root}/{RESTORING}")
    for name in fs.list_dir(root):
        if name == _CLASSIC_LOG or name.startswith(DLEDGER_LOG):
            data = f"{root}/{name}" if name == _CLASSIC_LOG else f"{root}/{name}/data"
            if not left or fs.list_dir(data):
                return None  # it is the last thing that is moved, or a node has run there since
    return (
        f"{root}: a restore was broken off there: give `hastore restore` again; or, for a node that"
        " is to begin without the backup, empty the folder"
    )
