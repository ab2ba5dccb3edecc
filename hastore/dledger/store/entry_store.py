"""What the driver needs of a store: entries by their index, and what must survive a restart.

`DLedgerMmapFileStore` keeps entries in files, `DLedgerMemoryStore` in memory. Both use a
LogStore whose log has entries; `messages` is that LogStore, and serves consumers: pulls,
queries, replay, retention and limits work on it as in the classic mode.

Locks. Methods under "changes" are called by one thread at a time: the caller holds the lock under
which it steps the core. Each of them takes the store's own locks (log_store.py) by itself, and
no lock of the store is held when it returns. All other methods, and those of `messages` that read,
may be called by any thread at any time. `on_persisted` is called without any lock of the store, in
the thread that synced: `flush_service` of `messages`, or the one that called `flush`.

Durability. What `save_hard_state`, `truncate` and `install` changed is on the disk when they
return. What `put`, `append_own` and `append_taken` appended survives kill -9 when they return, and
a power loss once `persisted_index` has reached it.

Errors. StoreFullError: no room, and nothing was appended or changed. StoreBrokenError: the store is
closed until a restart. ProtocolError: a peer's bytes are no entries that continue this log, and
nothing was appended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hastore.dledger.core.events import HardState, LogState, OwnEntry, TakenEntries
from hastore.protocol.dledger import AppendRequest
from hastore.store.append.results import Guards, PutResult
from hastore.store.log_store import LogStore
from hastore.store.message_store import FileRange


@dataclass(frozen=True, slots=True)
class EntryRange:
    """Whole entries that follow each other in one file of the log.

    `file` is where their bytes lie, for sendfile; `runs` are (term, number of entries), in order.
    """

    first_index: int
    last_index: int
    pos: int
    size: int
    runs: tuple[tuple[int, int], ...]
    file: FileRange


@dataclass(frozen=True, slots=True)
class Put:
    """The outcome of `put`: a list of results for each payload, and the entries appended.

    `last_index` is `first_index` - 1 if nothing was appended.
    """

    results: Sequence[Sequence[PutResult]]
    first_index: int
    last_index: int

    @property
    def count(self) -> int:
        """Return how many entries were appended, for `Propose.count`."""
        return self.last_index - self.first_index + 1


class EntryStore(Protocol):
    """The entries of one node, and its hard state. The module's text says what holds for all."""

    on_persisted: Callable[[int], None] | None  # called with the new `persisted_index`

    @property
    def messages(self) -> LogStore:
        """The store whose log has the entries."""
        ...

    def open(self) -> None:
        """Lock and recover the store, and start its threads.

        Raises StoreInUseError, StoreBrokenError if synced entries are damaged or missing (nothing
        was cut then), StoreError.
        """
        ...

    def close(self) -> None:
        """Sync everything, write the checkpoint, and unlock. Raises StoreError."""
        ...

    # -- state: any thread -------------------------------------------------------------------------

    @property
    def begin_index(self) -> int:
        """The index of the first entry that retention has left."""
        ...

    @property
    def end_index(self) -> int:
        """The index of the last entry; `begin_index` - 1 without entries."""
        ...

    @property
    def end_term(self) -> int:
        """The term of the last entry; that of the entry before `begin_index` without entries."""
        ...

    @property
    def persisted_index(self) -> int:
        """The last entry that a power loss does not take."""
        ...

    @property
    def committed_index(self) -> int:
        """The greatest index that `commit` was given; after a restart, what the store recalls."""
        ...

    def log_state(self) -> LogState:
        """Return indexes and terms as `Start.log` wants them. All entries of it are synced."""
        ...

    def epochs(self) -> list[tuple[int, int]]:
        """Return (term, position of its first entry here), in order: the epoch history."""
        ...

    @property
    def hard_state(self) -> HardState:
        """The hard state as it was saved last; term 0 (or the log's term) and no vote before.

        Its `remembers` is that of the store.
        """
        ...

    @property
    def remembers(self) -> bool:
        """Whether this store knows all votes that this node has given; False on an empty disk."""
        ...

    # -- reading: any thread -----------------------------------------------------------------------

    def position(self, index: int) -> int:
        """Return where the entry `index` begins in the log; UsageError for an absent one."""
        ...

    def end_position(self, index: int) -> int:
        """Return where the entry `index` ends; for `begin_index` - 1, where the log begins."""
        ...

    def index_at(self, position: int) -> int:
        """Return the last entry that ends at or before `position`; `begin_index` - 1: none."""
        ...

    def term_of(self, index: int) -> int:
        """Return the term of the entry `index`, which may be `begin_index` - 1."""
        ...

    def read(self, first_index: int, max_bytes: int) -> EntryRange:
        """Return entries from `first_index` on: at most `max_bytes`, but at least one, of one file.

        The range is a file's, ready for sendfile; `messages.view(range.pos, range.size)` lends the
        bytes. Raises UsageError for an absent entry, StoreError if retention removed it.
        """
        ...

    # -- changes: one thread at a time -------------------------------------------------------------

    def save_hard_state(self, state: HardState, *, remembers: bool | None = None) -> None:
        """Save term and vote durably and atomically; `remembers` (None: unchanged) with them.

        Raises StoreFullError if there is no room: the vote must not be given then.
        """
        ...

    def put(self, term: int, payloads: Sequence[bytes], guards: Guards | None = None) -> Put:
        """Append as leader of `term`: each valid record of the payloads becomes an entry.

        The results are those of MessageStore.put_encoded. A failure that leaves some entries of the
        put in the log is in the results, not raised: `count` entries must be proposed.
        """
        ...

    def append_own(self, entry: OwnEntry) -> None:
        """Append an entry of the core itself as leader; its index must be the next.

        Its body is the record that OwnEntry describes: in no queue and in no key index.
        """
        ...

    def append_taken(
        self, request: AppendRequest, data: bytes | memoryview, taken: TakenEntries
    ) -> None:
        """Append entries of a leader's request as they are; `data` are all `request.size` bytes.

        Every entry is checked before the first is appended: header, index, term (against
        `request.runs`), position, size, the record's CRC, and the member lists in the records
        (against `request.members`). If the leader began a new file there,
        this node fills the rest of the old one itself.
        """
        ...

    def truncate(self, index: int) -> int:
        """Remove the entries from `index` on, durably; return the bytes archived under rescued/.

        Raises UsageError below `begin_index` and for a committed entry.
        """
        ...

    def install(self, index: int, pos: int, prev_term: int) -> str:
        """Set the log aside under rescued/ (return where), and begin an empty one at `index`.

        Its first entry will lie at `pos`, which is the start of a file; the entry before it had
        `prev_term`.
        """
        ...

    def flush(self) -> int:
        """Sync all entries; return `persisted_index`."""
        ...

    def commit(self, index: int) -> None:
        """Publish that all entries up to `index` are committed: consumers read them from now on."""
        ...
