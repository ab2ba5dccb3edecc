"""EntryMessageStore: the store of a node in mode dledger, whose log is a data log of DLedger.

Each record lies in an entry. The log and its index are under `<root>/dledger-n<node>/`, all else is
as in every LogStore (log_store.py): queues, key index, limits and replay's progress. Physical
offsets are those of the records, `pos + 48`. `log.entries` is the index: where an entry lies, its
term (log/entry_index.py).

Indexes, positions, queue offsets and physical offsets are given out under `log.lock`. A cut takes
all four locks, and is noted on the disk before it begins.
"""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import Clock
from hastore.config.model import StoreConfig
from hastore.errors import StoreBrokenError, StoreFullError, UsageError, unopened_store
from hastore.fs.filesystem import NO_ROOM, FileSystem
from hastore.record.codec import Host
from hastore.record.log_format import Lists, build_own
from hastore.service import OnFailure
from hastore.store.append.results import Guards, Payload, PutResults
from hastore.store.append.uniform_batch import EntryFraming
from hastore.store.log.entry_index import INDEX_FILE_BYTES, EntryIndex, NewEntries
from hastore.store.log_store import LogStore, StoreHooks
from hastore.store.rescue import rescue_folder
from hastore.store.state.entry_state import EntryState
from hastore.store.state.marker_files import ledger_name

__all__ = ["INDEX_FILE_BYTES", "EntryMessageStore", "NewEntries"]

logger = logging.getLogger(__name__)


class EntryMessageStore(LogStore):
    """The store below a DLedgerMmapFileStore; all methods are thread-safe."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        node: int,
        index_file_bytes: int,
        fs: FileSystem,
        clock: Clock,
        store_host: Host,
        on_failure: OnFailure | None,
        hooks: StoreHooks,
        keep_more: Callable[[], None],
    ) -> None:
        """Prepare; no file is touched before `open`. RocketMQ needs the default index files.

        No append requests a sync: the node's driver does, once it has sent the entries.
        """
        self.directory = f"{config.root}/{ledger_name(node)}"
        self._state = EntryState(fs, config.root)
        self.entries = EntryIndex(
            fs, f"{self.directory}/index", self._state, file_bytes=index_file_bytes
        )
        super().__init__(
            config, fs=fs, clock=clock, store_host=store_host, on_failure=on_failure, hooks=hooks,
            sync_each_put=False, entries=self.entries, keep_more=keep_more,
        )  # fmt: skip

    def missing_files(self, *, known: bool) -> list[str]:
        """Return the state files that are missing though hastore has opened this store before.

        `known` says that it has; `entries.json` says so too. Without one of them, the node must not
        count as one that has all that it acknowledged. Ask before `open`, which makes new ones.
        Raises StoreBrokenError for a damaged file, OSError.
        """
        self._state.load()
        has_log = self._fs.is_dir(self.log.directory) and self._fs.list_dir(self.log.directory)
        found = []
        if self.limits_lost(known=known or self._state.is_known):
            found.append("hastore/limits")
        if known and not self._state.is_known and has_log:
            found.append("hastore/entries.json")
        return found

    def is_of_version_before(self) -> bool:
        """Whether the version before was the last to write this store; ask before `open`.

        Raises StoreBrokenError for a damaged file, OSError.
        """
        return self._state.is_of_version_before()

    def open(self, *, committed_index: int = -1, known: bool = False) -> None:
        """Lock and recover the store, finish a cut that was begun, then start its threads.

        `committed_index` is what the checkpoint of DLedger says: that entry must be there. `known`
        is as in MessageStore.open, which says what this raises.
        """
        known = known or self._state.is_known
        self._open(committed_index=committed_index, known=known)
        facts = self._state.now
        try:
            if facts.install is None:
                self._note_begin()  # before the first entry
            if facts.install is not None:
                self._finish_install(*facts.install)
            elif facts.cut_at is not None:
                self._finish_cut(facts.cut_at)
        except BaseException:
            self.close()
            raise

    def _note_begin(self) -> None:
        """Note where the log begins, so that a later start knows when files are missing."""
        index = self.entries
        try:
            begin = index.begin_index, index.begin_pos, index.prev_term
            self._state.save(begin=begin, begin_sure=True)
        except OSError as failure:
            if failure.errno not in NO_ROOM or not self._state.is_known:
                raise unopened_store(self.config.root, failure) from failure
            logger.warning("where the log begins is not noted before the next start: %s", failure)

    def fail(self, what: str, failure: OSError) -> StoreBrokenError:
        """Close the store for good, since something that must be durable is not."""
        return self._health.fail(what, failure)

    # -- append -----------------------------------------------------------------------------------

    def put_encoded(
        self, payloads: Sequence[Payload], term: int, guards: Guards | None = None
    ) -> PutResults:
        """Append the valid records of all payloads as entries of `term`; as MessageStore does."""
        results, start, end, _ = self._appender.put(payloads, term, guards)
        if end > start:
            self._grown(soon=True)
        return results

    def last_crc(self) -> int | None:
        """Return bodyCrc of the last entry; 0 before the first, None if that is not known."""
        with self.log.lock:
            return self.log.last_crc()

    def append_entries(self, pos: int, data: bytes | memoryview, new: NewEntries) -> None:
        """Append whole entries as they are; `new` has their index units. They are not checked.

        `pos` is where the last entry ends, or the start of the file after it: the rest of the last
        file then becomes a blank. Raises UsageError for another position, StoreFullError if nothing
        was appended, StoreBrokenError.
        """
        log, index = self.log, self.entries
        if pos == index.end_of(index.end_index) < log.max_offset:
            self.truncate(pos)  # a blank that was written before an append that failed
        with log.lock:
            start = log.max_offset
            if pos != start and pos == start - start % log.file_size + log.file_size:
                log.roll()
            if pos != log.max_offset:
                raise UsageError(f"position {pos} does not follow the log's end {log.max_offset}")
            log.record_end = log.append(data, new)
        self._grown()

    def append_own(self, lists: Lists | None, term: int, group_id: str = "") -> None:
        """Append an entry of the group itself as leader of `term`; raises as a put."""
        log = self.log
        with log.lock:
            now_ms = self._appender.next_store_timestamp_ms()
            record = self._own_record(lists, now_ms, group_id)
            if log.room(log.form.lead + len(record)):
                log.roll()
                record = self._own_record(lists, now_ms, group_id)
            start = log.max_offset
            framing = EntryFraming(log, term)
            data = framing.join([record])
            framing.seal(data)
            log.record_end = end = log.append(data, framing.entries())
            # The next put need not wait until replay has seen an entry that is in no queue.
            if self._table.end_offset == start:
                self._table.advance(end)
            if self._window.end_offset == start:
                self._window.advance(end)
        self._grown()

    def _own_record(self, lists: Lists | None, now_ms: int, group_id: str) -> bytes:
        offset = self.log.max_offset + self.log.form.lead
        return build_own(
            lists, physical_offset=offset, now_ms=now_ms, host=self.store_host, group_id=group_id
        )

    # -- cut --------------------------------------------------------------------------------------

    def cut_entries(self, first: int, *, name: str) -> int:
        """Remove the entries from `first` on, durably; archives them in `rescued/<name>/`.

        Returns the bytes archived. A blank before `first` goes too. Raises StoreFullError if there
        is no room for the archive (nothing was cut), UsageError, StoreBrokenError.
        """
        index = self.entries
        offset = index.end_of(first - 1)
        end = self.log.max_offset
        if offset == end:
            return 0
        archived = self.archive(offset, name)
        self._begin(cut_at=offset)
        self._finish_cut(offset)
        logger.warning("entries from %d on were cut: bytes %d to %d, archived in rescued/%s",
                       first, offset, end, name)  # fmt: skip
        return archived

    def _finish_cut(self, offset: int) -> None:
        if self.log.max_offset > offset:
            self.truncate(offset)
        self._end(cut_at=None)

    def _begin(self, **intent: object) -> None:
        """Note, durably, what begins. Raises StoreFullError, StoreBrokenError."""
        try:
            self._state.save(**intent)
        except OSError as failure:
            if failure.errno in NO_ROOM:
                raise StoreFullError(
                    f"nothing was cut: {failure}; free space on the store's file system"
                ) from failure
            raise self.fail("a cut cannot be noted", failure) from failure

    def _end(self, **intent: object) -> None:
        """Note, durably, that it has ended. Raises StoreBrokenError."""
        try:
            self._state.save(**intent)
        except OSError as failure:
            raise self.fail("the end of a cut cannot be noted", failure) from failure

    def begin_entries(
        self, index: int, pos: int, prev_term: int, *, committed_end: int, name: str
    ) -> str | None:
        """Give up the log, and begin an empty one, with entry `index` at `pos`.

        What is beyond `committed_end` is kept in `rescued/<name>/`; returns that folder, None if
        there is nothing beyond. What is committed and not in the leader's log any more has expired:
        it is removed, so that the new log has room. The entry before `index` is of `prev_term`.
        Raises UsageError if `pos` is not where a file begins, StoreFullError if there is no room
        for what is to be kept (nothing was changed), StoreBrokenError.
        """
        if pos % self.file_size or index < 0:
            raise UsageError(f"a log cannot begin with entry {index} at {pos}")
        kept = None
        self.cuts.forget_noted()
        if committed_end < self.max_offset:
            kept = rescue_folder(self._fs, self.config.root, name)
            self.archive(committed_end, name)
        # A crash must not leave an empty log; what is in the log then is known to be kept.
        self._begin(install=(index, pos, prev_term), archived=True)
        self._finish_install(index, pos, prev_term)
        return kept

    def _finish_install(self, index: int, pos: int, prev_term: int) -> None:
        if self._state.now.archived:
            self.drop()
        else:  # an earlier version began it, and has kept nothing yet
            self.set_aside(f"{prev_term}-{self.min_offset}")
        with self._stopped():
            self.entries.restart(index, pos, prev_term)
        self._begin_at(pos)
        self._end(install=None, archived=False)
