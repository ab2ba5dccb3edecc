"""EntryStore: the entries of a node by their index, and what must survive a restart.

DLedgerMmapFileStore keeps them in files, DLedgerMemoryStore in memory. Both are an
EntryMessageStore, `messages`, whose log has entries. It serves consumers: pulls, queries, replay,
retention and limits work on it as in the classic mode.

    <root>/dledger-n<node>/data, index    the log and its index, byte for byte DLedger's
    <root>/dledger-n<node>/checkpoint     committedIndex and endIndex, each second and at the end
    <root>/dledger-n<node>/currterm       term and vote
    <root>/hastore/                       what those cannot say, and limits and replay's progress
    <root>/rescued/                       what was cut off, or kept of a log that was given up

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

import logging
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import StoreConfig
from hastore.dledger.core.events import HardState, LogState, OwnEntry, TakenEntries
from hastore.dledger.store.entry_check import check_chain, check_taken
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import (
    ProtocolError,
    StoreBrokenError,
    StoreFullError,
    UsageError,
    unopened_store,
)
from hastore.fs.filesystem import NO_ROOM, REAL, FileSystem
from hastore.fs.memory import MemoryFileSystem
from hastore.protocol.dledger import AppendRequest
from hastore.record.codec import Host
from hastore.record.log_format import (
    ENTRY_HEADER_BYTES,
    Body,
    body_of,
    group_id_in,
    read_header,
)
from hastore.service import OnFailure
from hastore.store.append.results import Guards, Payload, PutResult
from hastore.store.entry_message_store import INDEX_FILE_BYTES, EntryMessageStore
from hastore.store.log_store import StoreHooks
from hastore.store.message_store import FileRange

log = logging.getLogger(__name__)


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
class EntryPut:
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


class EntryStore:
    """The entries of one node, and its hard state. The module's text says what holds for all."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        node: int,
        index_file_bytes: int = INDEX_FILE_BYTES,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Prepare; no file is touched before `open`."""
        self.messages = EntryMessageStore(
            config, node=node, index_file_bytes=index_file_bytes, fs=fs, clock=clock,
            store_host=store_host, on_failure=on_failure,
            hooks=StoreHooks(on_flushed=self._flushed), keep_more=self._save_checkpoint,
        )  # fmt: skip
        self.on_persisted: Callable[[int], None] | None = None
        self._index = self.messages.entries
        self._files = HardStateFiles(fs, config.root, self.messages.directory)
        self._committed = -1

    def open(self) -> None:
        """Lock and recover the store, and start its threads.

        Raises StoreInUseError, StoreBrokenError if synced entries are damaged or missing (nothing
        was cut then), StoreError.
        """
        messages = self.messages
        try:
            messages.lock()
            try:
                self._load_files()
            except BaseException:
                messages.unlock()
                raise
        except OSError as failure:
            raise unopened_store(messages.config.root, failure) from failure
        files = self._files
        checkpoint = files.checkpoint.get("committedIndex", -1)
        messages.open(committed_index=checkpoint, known=files.noted is not None)
        index = self._index
        if files.state.term < index.end_term:
            # Without `currterm`, or with an older one: the log proves that the term was reached.
            files.state = HardState(index.end_term, None)
            if files.noted and files.remembers:
                log.error("currterm is older than the log: this node does not remember its votes")
                files.remembers = False
        limits = index.last_within(messages.confirmed_offset)
        known = max(limits, min(checkpoint, index.end_index))
        self._committed = max(known, index.begin_index - 1)
        self._publish()

    def _load_files(self) -> None:
        """Read the state files; what is missing among them is noted, before new ones are made."""
        files = self._files
        files.load()
        missing = self.messages.missing_files(known=files.noted is not None)
        if missing:
            log.error(
                "%s: missing in a store that has had it: this node may lack entries that it has"
                " acknowledged; its votes and acknowledgements do not count before its leader has"
                " brought its log in line", ", ".join(missing),
            )  # fmt: skip
            files.forget()

    def close(self) -> None:
        """Sync everything, write the checkpoint, and unlock. Raises StoreError."""
        self.messages.close()

    def _save_checkpoint(self) -> None:
        # A leader may commit what its own disk does not have yet; the next start compares the log
        # with this, and must find what is named here.
        committed = min(self._committed, self.persisted_index)
        self._files.save_checkpoint(committed, self.end_index)

    # -- state: any thread -------------------------------------------------------------------------

    @property
    def begin_index(self) -> int:
        """The index of the first entry that retention has left."""
        return self._index.begin_index

    @property
    def end_index(self) -> int:
        """The index of the last entry; `begin_index` - 1 without entries."""
        return self._index.end_index

    @property
    def end_term(self) -> int:
        """The term of the last entry; that of the entry before `begin_index` without entries."""
        return self._index.end_term

    @property
    def persisted_index(self) -> int:
        """The last entry that a power loss does not take."""
        return self._index.last_within(self.messages.flushed_offset)

    @property
    def committed_index(self) -> int:
        """The greatest index that `commit` was given; after a restart, what the store recalls."""
        return self._committed

    def log_state(self) -> LogState:
        """Return indexes and terms as `Start.log` wants them. All entries of it are synced."""
        index = self._index
        return LogState(index.begin_index, index.end_index, index.terms, index.prev_term)

    def epochs(self) -> tuple[tuple[int, int], ...]:
        """Return (term, position of its first entry here), in order: the epoch history."""
        return self._index.term_starts()

    @property
    def hard_state(self) -> HardState:
        """The hard state as it was saved last; term 0 (or the log's term) and no vote before.

        Its `remembers` is that of the store.
        """
        state = self._files.state
        return HardState(state.term, state.voted_for, self._files.remembers)

    @property
    def remembers(self) -> bool:
        """Whether this store knows all that this node has voted and acknowledged.

        False on an empty disk, and after the loss of a state file.
        """
        return self._files.remembers

    @property
    def notes_votes(self) -> bool:
        """Whether votes.json exists: if not, a node that has joined has lost it."""
        return self._files.noted is not None

    # -- reading: any thread -----------------------------------------------------------------------

    def position(self, index: int) -> int:
        """Return where the entry `index` begins in the log; UsageError for an absent one."""
        return self._index.unit(index).pos

    def end_position(self, index: int) -> int:
        """Return where the entry `index` ends; for `begin_index` - 1, where the log begins."""
        return self._index.end_of(index)

    def index_at(self, position: int) -> int:
        """Return the last entry that ends at or before `position`; `begin_index` - 1: none."""
        return self._index.last_within(position)

    def term_of(self, index: int) -> int:
        """Return the term of the entry `index`, which may be `begin_index` - 1."""
        return self._index.term_of(index)

    def read(self, first_index: int, max_bytes: int) -> EntryRange:
        """Return entries from `first_index` on: at most `max_bytes`, but at least one, of one file.

        The range is a file's, ready for sendfile; `messages.view(range.pos, range.size)` lends the
        bytes. Raises UsageError for an absent entry, StoreError if retention removed it.
        """
        index = self._index
        first = index.unit(first_index)
        file_size = self.messages.file_size
        stop = min(first.pos + max_bytes, first.pos - first.pos % file_size + file_size)
        high = min(index.end_index, first_index + max(0, max_bytes) // ENTRY_HEADER_BYTES)
        if index.unit(high).end > stop:
            others = range(first_index + 1, high)
            high = first_index + bisect_right(others, stop, key=lambda one: index.unit(one).end)
        size = index.unit(high).end - first.pos
        file = self.messages.file_range(first.pos, size)
        return EntryRange(first_index, high, first.pos, size, index.runs(first_index, high), file)

    def group_id(self, first: int, last: int) -> str:
        """Return the group's id from the last entry in a range that has it: the first of a term."""
        for _, index in reversed(self._index.terms):
            if first <= index <= last:
                unit = self._index.unit(index)
                with self.messages.view(unit.pos, unit.size) as view:
                    found = group_id_in(view[ENTRY_HEADER_BYTES:])
                if found:
                    return found
        return ""

    def crc_of(self, index: int) -> int | None:
        """Return the CRC-32 of an entry's bytes, header included; None for an absent one.

        None too for a damaged or unreadable one, which is to be repaired: its bytes are not what
        this node has taken; and for one that the index does not find any more. Raises StoreError if
        retention removes it meanwhile.
        """
        if not self.begin_index <= index <= self.end_index:
            return None
        messages = self.messages
        try:
            unit = self._index.unit(index)
        except StoreBrokenError as failure:
            log.error("entry %d cannot be found: %s", index, failure)
            return None
        try:
            with messages.view(unit.pos, unit.size) as view:
                header = read_header(view, 0, unit.size, unit.pos)
                whole = header is not None and header.size == len(view)
                if whole and body_of(view, 0, unit.size, unit.pos) is not Body.BAD:
                    return zlib.crc32(view)
        except OSError as failure:
            log.error("entry %d cannot be read: %s", index, failure)
        messages.reader.note_damage(unit.pos + ENTRY_HEADER_BYTES)
        return None

    # -- changes: one thread at a time -------------------------------------------------------------

    def save_hard_state(self, state: HardState, *, remembers: bool | None = None) -> None:
        """Save term and vote durably and atomically; `remembers` (None: unchanged) with them.

        Raises StoreFullError if there is no room: the vote must not be given then. So it must not
        if the store's folder was moved away (StoreMovedError): once it is back, it does not know
        the vote, and the node could give another one in the same term.
        """
        self.messages.check_place()
        reached = max(self._files.state.term, self.end_term)
        if state.term < reached:
            raise UsageError(f"term {state.term} is before {reached}, which was reached")
        try:
            self._files.save(state, self.remembers if remembers is None else remembers)
        except OSError as failure:
            if failure.errno in NO_ROOM:
                raise StoreFullError(f"term and vote cannot be saved: {failure}") from failure
            raise self.messages.fail("term and vote cannot be saved", failure) from failure

    def put(self, term: int, payloads: Sequence[Payload], guards: Guards | None = None) -> EntryPut:
        """Append as leader of `term`: each valid record of the payloads becomes an entry.

        The results are those of MessageStore.put_encoded. A failure that leaves some entries of the
        put in the log is in the results, not raised: `count` entries must be proposed.
        """
        self._check_term(term)
        first = self.end_index + 1
        results = self.messages.put_encoded(payloads, term, guards)
        return EntryPut(results, first, self.end_index)

    def append_own(self, entry: OwnEntry, group_id: str = "") -> None:
        """Append an entry of the core itself as leader; its index must be the next.

        Its body is the record that OwnEntry describes: in no queue and in no key index. `group_id`
        is the group's, "" if the group has none.
        """
        self._check_term(entry.term)
        if entry.index != self.end_index + 1:
            raise UsageError(f"entry {entry.index} does not follow {self.end_index}")
        self.messages.append_own(entry.group, entry.term, group_id)

    def append_taken(
        self, request: AppendRequest, data: bytes | memoryview, taken: TakenEntries
    ) -> None:
        """Append entries of a leader's request as they are; `data` are all `request.size` bytes.

        Every entry is checked before the first is appended: header, index, term (against
        `request.runs`), position, size, the CRCs of entry and record, and the member lists in them
        (against `request.members` and `request.learners`). If the leader began a new file there,
        this node fills the rest of the old one itself.
        """
        if request.prev_index + taken.skip != self.end_index:
            raise ProtocolError(
                f"entry {request.prev_index + taken.skip + 1} does not follow {self.end_index}"
            )
        view = memoryview(data)
        begin, new = check_taken(request, view, taken.skip, self.messages.file_size)
        if not new.runs:
            return
        if new.runs[0][0] < self.end_term:
            raise ProtocolError(f"an entry of term {new.runs[0][0]} follows term {self.end_term}")
        pos = request.pos + begin
        end = self.end_position(self.end_index)
        file_size = self.messages.file_size
        following = end - end % file_size + file_size
        if pos != end and (pos != following or end % file_size == 0):
            raise ProtocolError(f"an entry at {pos}, but the last one ends at {end}")
        header = read_header(view, begin, len(view), pos)
        assert header is not None  # it was checked
        check_chain(header, self.messages.last_crc())
        self.messages.append_entries(pos, view[begin:], new)

    def truncate(self, index: int) -> int:
        """Remove the entries from `index` on, durably; return the bytes archived under rescued/.

        Raises UsageError below `begin_index` and for a committed entry.
        """
        if index <= self._committed or index < self.begin_index:
            raise UsageError(
                f"entry {index} cannot be removed: entries up to {self._committed} are committed,"
                f" and the log begins with {self.begin_index}"
            )
        if index > self.end_index:
            return 0
        name = f"{self.end_term}-{self.end_position(index - 1)}"
        return self.messages.cut_entries(index, name=name)

    def install(self, index: int, pos: int, prev_term: int) -> str | None:
        """Give up the log, and begin an empty one at `index`.

        Its first entry will lie at `pos`, which is the start of a file; the entry before it had
        `prev_term`. Entries that are not known to be committed are kept under rescued/; returns
        where, None if there are none.
        """
        end = self.end_position(self._committed)
        folder = self.messages.begin_entries(
            index, pos, prev_term, committed_end=end, name=f"{self.end_term}-{end}"
        )
        self._committed = index - 1
        self._publish()
        return folder

    def flush(self) -> int:
        """Sync all entries; return `persisted_index`."""
        return self._index.last_within(self.messages.flush())

    def commit(self, index: int) -> None:
        """Publish that all entries up to `index` are committed: consumers read them from now on.

        The caller calls `messages.tell_readers` as soon as it holds no lock.
        """
        if index > self._committed:
            if index > self.end_index:
                raise UsageError(f"entry {index} is not here, the log ends with {self.end_index}")
            self._committed = index
            self._publish(tell=False)

    # -- inside ------------------------------------------------------------------------------------

    def _publish(self, *, tell: bool = True) -> None:
        end = self._index.end_of(self._committed)
        self.messages.set_limits(confirmed=end, readable=end, tell=tell)

    def _check_term(self, term: int) -> None:
        if term < self.end_term:
            raise UsageError(f"term {term} is before the log's last term {self.end_term}")

    def _flushed(self, offset: int) -> None:
        hook = self.on_persisted
        if hook is not None:
            hook(self._index.last_within(offset))


class DLedgerMmapFileStore(EntryStore):
    """The EntryStore of a node whose log is in files."""


class DLedgerMemoryStore(EntryStore):
    """The EntryStore of a node whose log is in memory (`store.kind: memory`).

    It is over a file system in memory, and does not touch `config.root`. So consumers, replay and
    retention work as with files, and a follower gets the same bytes. Nothing survives the process:
    after a restart the node has no entries and does not remember its votes. A majority that
    restarts at once loses all.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        node: int,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Prepare; memory is taken as entries are appended."""
        self._fs = fs = MemoryFileSystem()
        self._rescued = f"{config.root}/rescued"
        super().__init__(
            config, node=node, fs=fs, clock=clock, store_host=store_host, on_failure=on_failure
        )

    def truncate(self, index: int) -> int:
        """Remove the entries from `index` on; nobody could fetch an archive from this memory."""
        archived = super().truncate(index)
        self._forget_archives()
        return archived

    def install(self, index: int, pos: int, prev_term: int) -> str | None:
        """Drop the log, and begin an empty one."""
        folder = super().install(index, pos, prev_term)
        self._forget_archives()
        return folder

    def _forget_archives(self) -> None:
        if self._fs.exists(self._rescued):
            self._fs.remove_tree(self._rescued)
