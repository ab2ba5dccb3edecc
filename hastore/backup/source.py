"""The store of a node, as a backup reads it: from another process, without a lock.

The log is append-only up to the readable offset, with two exceptions: retention removes its oldest
files, and a failover may cut its end. `Seen` is what a moment shows of both. If two moments agree
up to an offset (`same_log`), no byte below it was cut between them: equal epochs mean equal bytes,
up to where the epoch's master has resumed it meanwhile (docs/failover.md). In mode dledger nothing
is cut that is committed, and nothing else is readable.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from hastore.config.model import Config, Mode, StoreKind
from hastore.errors import UNREADABLE, StoreError, UsageError
from hastore.fs.filesystem import REAL, File, FileSystem
from hastore.ha.node.node_state import Durable
from hastore.ha.rules.epochs import CLASSIC_EPOCH, FLOOR_EPOCH, common_point, parted
from hastore.record.log_format import ENTRIES, PLAIN, LogFormat
from hastore.store.offline.log_files import LogFile, LogFiles
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import read_limits
from hastore.store.state.marker_files import ledger_name

# What the log does not say, once retention has removed what said it (docs/formats.md).
_SAVED = ("hastore/positions", "hastore/topics")
# Of a RocketMQ broker that the node follows, or that it took over.
_TABLES = ("topics.json", "subscriptionGroup.json", "consumerOffset.json", "delayOffset.json")
ENTRIES_FILE = "hastore/entries.json"  # in mode dledger: where the log begins
STATE_FILES = (*_SAVED, ENTRIES_FILE, *(f"config/{name}" for name in _TABLES))
_STATE_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Seen:
    """A moment of a store; the log is [first, limit) for readers."""

    node: Durable
    first: int
    limit: int
    confirmed: int

    def epochs(self, end: int) -> tuple[tuple[int, int], ...]:
        """Return which epochs wrote the bytes below `end`, each with its start."""
        return tuple((one.epoch, one.start) for one in self.node.history if one.start < end)


def same_log(before: Seen, after: Seen, end: int) -> bool:
    """Whether nothing below `end` was cut or replaced between two moments of one store."""
    old, new = before.node, after.node
    # A slave cuts within an epoch what its master's disk had lost, and gets other bytes there.
    pairs = zip(old.history, new.history, strict=False)
    apart = [at for one, other in pairs if (at := parted(one, other)) is not None]
    return (
        old.intent is None  # no cut is going on
        and new.intent is None
        and (old.store_id, old.aside, old.group_id) == (new.store_id, new.aside, new.group_id)
        and before.epochs(end) == after.epochs(end)
        and min(apart, default=end) >= end
    )


def shared_end(node: Durable, end: int, now: Seen) -> int:
    """Return up to where the log of `node`, which ended at `end`, is the log that is seen now.

    Of bytes whose epoch names no writer that is known only of one and the same store.
    """
    mine, theirs = node.history, now.node.history
    same_store = (node.store_id, node.aside) == (now.node.store_id, now.node.aside)
    if not mine and not theirs:  # mode dledger, or no epoch has begun yet
        same_group = bool(node.group_id) and node.group_id == now.node.group_id
        return min(end, now.limit) if same_store or same_group else 0
    common, kept = common_point(mine, end, theirs, now.limit)
    nameless = kept and mine[kept - 1].epoch in (CLASSIC_EPOCH, FLOOR_EPOCH)
    return 0 if nameless and not same_store else common


class Source:
    """A node's store. Close it, or use it in a `with`."""

    def __init__(self, config: Config, fs: FileSystem = REAL) -> None:
        """Open the store of a node's file.

        Raises UsageError if there is none to back up, PermissionError if this user may not look.
        """
        self.root = root = config.store.root
        if config.store.kind is StoreKind.MEMORY:
            raise UsageError("store.kind is memory: there are no files; back up another node")
        if not fs.exists(f"{root}/hastore/node.json"):
            fs.list_dir(f"{root}/hastore")  # raises if it is only hidden from this user
            raise UsageError(
                f"{root} is no store of a node that has run; give the node's file, on its machine,"
                " in the directory where the node was started"
            )
        self._fs = fs
        self._mode = config.mode
        self._files = LogFiles(root, fs)
        self.form: LogFormat = PLAIN if config.mode is Mode.CLASSIC else ENTRIES
        wanted = None if config.mode is Mode.CLASSIC else f"{root}/{ledger_name(config.node)}"
        if self._files.ledger != wanted:
            raise UsageError(f"{root} has no log of mode {config.mode.value}; check -c FILE")

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def see(self) -> Seen:
        """Return this moment. Raises StoreError if the store cannot be read."""
        path = f"{self.root}/hastore/node.json"
        with self._named():
            limits = read_limits(self._fs, self.root)
            try:
                # After the limits: a history may know more epochs than they cover, never fewer.
                node = msgspec.json.decode(self._fs.read_bytes(path), type=Durable)
            except UNREADABLE as failure:
                raise StoreError(
                    f"{path} cannot be read: {failure}; start the node: it says what is wrong"
                ) from failure
            files = self._files.list()
            first = files[0].start if files else 0
        if limits is None:
            raise StoreError(f"{self.root}/hastore/limits is missing: start the node first")
        if self._mode is Mode.DLEDGER:
            first = max(first, EntryState(self._fs, self.root).load().begin[1])
        return Seen(
            node,
            max(first, limits.first_offset),
            limits.readable_offset,
            min(limits.confirmed_offset, limits.readable_offset),
        )

    def file_of(self, offset: int) -> LogFile | None:
        """Return the log file with the byte at `offset`; None if retention removed it."""
        with self._named():
            for file in self._files.list():
                if file.start <= offset < file.end:
                    return file
        return None

    @contextlib.contextmanager
    def opened(self, file: LogFile) -> Iterator[File]:
        """Open a log file; what is read of it stays there if retention removes its name.

        Raises FileNotFoundError if it is gone.
        """
        with contextlib.closing(self._fs.open(file.path, writable=False)) as opened:
            yield opened

    def read(self, file: File, size: int, position: int) -> bytes:
        """Read a part of a log file. Raises StoreError for a bad sector."""
        with self._named():
            return file.pread(size, position)

    def state_files(self) -> dict[str, bytes]:
        """Return the small files that a backup takes along, by their paths in the store."""
        fs, root, found = self._fs, self.root, {}
        with self._named():
            for path in STATE_FILES:
                with contextlib.suppress(FileNotFoundError):
                    found[path] = fs.read_bytes(f"{root}/{path}", _STATE_BYTES_MAX)
        return found

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as failure:
            raise StoreError(
                f"the store {self.root} cannot be read: {failure}; run it as the node's user"
            ) from failure
