"""A MessageStore whose log is a data log of DLedger: each record lies in an entry.

The log and its index are under `<root>/dledger-n<node>/`, all else is as in a MessageStore: queues,
key index, limits and replay's progress. Physical offsets are those of the records, `pos + 48`.

What differs for callers:

    put_encoded(payloads, term)   appends entries of `term` under `log.lock`: indexes, positions,
                                  queue offsets and physical offsets are given out there
    append_entries                appends whole entries as they are, under `log.lock`
    cut_entries                   cuts the log after an entry, under all four locks of a cut, with
                                  an intent on the disk
    begin_entries                 sets the log aside, and begins an empty one; under all four locks
    log.entries                   the index: where an entry lies, its term (entry_index.py)

`append_replica`, `replica_range` and `begin_at` are not for this kind of log.
"""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import StoreConfig
from hastore.errors import StoreBrokenError, StoreFullError, UsageError
from hastore.fs.filesystem import NO_ROOM, REAL, FileSystem
from hastore.record.codec import Host
from hastore.record.log_format import ENTRIES, build_own
from hastore.service import OnFailure
from hastore.store.append.uniform_batch import EntryFraming
from hastore.store.log.commit_log import CommitLog
from hastore.store.log.entry_index import INDEX_FILE_BYTES, EntryIndex, NewEntries
from hastore.store.log.entry_loader import load_entries
from hastore.store.log.recovery import Recovered
from hastore.store.message_store import MessageStore
from hastore.store.rescue import copy_tail, written_end
from hastore.store.state.entry_state import EntryState
from hastore.store.state.marker_files import ledger_name

__all__ = ["INDEX_FILE_BYTES", "EntryMessageStore", "NewEntries"]

logger = logging.getLogger(__name__)


class EntryMessageStore(MessageStore):
    """The store of a node in the DLedger mode; all methods are thread-safe."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        node: int,
        index_file_bytes: int = INDEX_FILE_BYTES,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        keep_more: Callable[[], None] = lambda: None,
        on_failure: OnFailure | None = None,
    ) -> None:
        """Prepare; no file is touched before `open`. RocketMQ needs the default index files.

        `keep_more()` is called by housekeeping's thread each second, and at the close.
        """
        name = ledger_name(node)
        self.directory = f"{config.root}/{name}"
        self._keep_more = keep_more
        # What the checkpoint of a store that hastore has not opened yet says: none may be missing.
        self.foreign_committed = -1
        self._clock = clock
        self._state = EntryState(fs, config.root)
        self.entries = EntryIndex(
            fs, f"{self.directory}/index", self._state, file_bytes=index_file_bytes
        )
        super().__init__(config, fs=fs, clock=clock, store_host=store_host, on_failure=on_failure)
        self._moved = (f"{name}/data", f"{name}/index", *self._moved)

    def _make_log(self, config: StoreConfig, on_failure: OnFailure) -> CommitLog:
        return CommitLog(
            self._fs, self._root, self.file_size, self._health,
            on_failure=on_failure, warm_files=config.warm_files,
            form=ENTRIES, entries=self.entries, directory=f"{self.directory}/data",
        )  # fmt: skip

    def open(self, *, intent_offset: int | None = None, from_rocketmq: bool = False) -> None:
        """Lock and recover the store, finish a cut that was begun, then start its threads.

        Raises as MessageStore.open.
        """
        del intent_offset, from_rocketmq  # entries.json says what was begun
        super().open()
        facts = self._state.now
        try:
            if facts.install is not None:
                self.begin_entries(*facts.install, name=f"{facts.install[2]}-{self.min_offset}")
            elif facts.cut_at is not None:
                self._finish_cut(facts.cut_at)
        except BaseException:
            self.close()
            raise

    def _recover(self, intent_offset: int | None, from_rocketmq: bool) -> None:
        del intent_offset
        facts = self._state.load()
        self._fs.make_dirs(self.entries.directory)
        super()._recover(facts.cut_at, from_rocketmq)

    def _load_entries(self, recovered: Recovered, trusted: bool) -> None:
        chain = recovered.chain
        last = -1 if chain is None or chain.next_index is None else chain.next_index - 1
        if not self._state.is_known and last < self.foreign_committed:
            raise StoreBrokenError(
                f"{self.directory}: its checkpoint says that entry {self.foreign_committed} is"
                f" committed, but the log ends with entry {last} at {recovered.end}; nothing was"
                " cut: restore the log from a backup or another node (see `hastore log verify`)"
            )
        load_entries(self.log, recovered, trusted=trusted)
        if self._state.is_known and not self._abort.exists():
            self._rescue_appended(recovered.end)

    def _rescue_appended(self, end: int) -> None:
        """Archive what another program appended to a log that this node had closed cleanly."""
        written = written_end(self.log, end)
        if written > end:
            name = f"{self.entries.end_term}-{end}"
            copy_tail(self._fs, self._root, name, self.log, end, written)
            logger.warning("%s: another program wrote bytes %d to %d, which do not continue this"
                           " log: they are cut, and archived in rescued/%s",
                           self.directory, end, written, name)  # fmt: skip

    def _keep_entries(self) -> None:
        try:
            self.entries.sync()
        except OSError as failure:
            raise self._health.fail("a sync of the index of entries failed", failure) from failure
        self._keep_more()

    def fail(self, what: str, failure: OSError) -> StoreBrokenError:
        """Close the store for good, since something that must be durable is not."""
        return self._health.fail(what, failure)

    def _release(self) -> None:
        super()._release()
        self.entries.close()

    @property
    def problems(self) -> list[str]:
        """What fails at present, for the status."""
        reason = self.entries.failure_reason
        return super().problems + ([] if reason is None else [reason])

    # -- append -----------------------------------------------------------------------------------

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

    def append_own(self, members: Sequence[int] | None, term: int) -> None:
        """Append an entry of the group itself as leader of `term`; raises as a put."""
        log = self.log
        with log.lock:
            self._appender.last_store_timestamp_ms = now_ms = max(
                self._clock.wall_ms(), self._appender.last_store_timestamp_ms
            )
            record = self._own_record(members, now_ms)
            if log.room(log.form.lead + len(record)):
                log.roll()
                record = self._own_record(members, now_ms)
            start = log.max_offset
            framing = EntryFraming(log, term)
            data = framing.join([record])
            log.record_end = end = log.append(data, framing.entries())
            # The next put need not wait until replay has seen an entry that is in no queue.
            if self._table.end_offset == start:
                self._table.advance(end)
            if self._window.end_offset == start:
                self._window.advance(end)
        self._grown()

    def _own_record(self, members: Sequence[int] | None, now_ms: int) -> bytes:
        offset = self.log.max_offset + self.log.form.lead
        return build_own(members, physical_offset=offset, now_ms=now_ms, host=self.store_host)

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
                raise StoreFullError(f"nothing was cut: {failure}") from failure
            raise self.fail("a cut cannot be noted", failure) from failure

    def _end(self, **intent: object) -> None:
        """Note, durably, that it has ended. Raises StoreBrokenError."""
        try:
            self._state.save(**intent)
        except OSError as failure:
            raise self.fail("the end of a cut cannot be noted", failure) from failure

    def begin_entries(self, index: int, pos: int, prev_term: int, *, name: str) -> str:
        """Set the log aside in `rescued/<name>/`, and begin an empty one; returns that folder.

        The first entry will be `index`, at `pos`, and the one before it is of `prev_term`. Raises
        UsageError if `pos` is not where a file begins, StoreFullError, StoreBrokenError.
        """
        if pos % self.file_size or index < 0:
            raise UsageError(f"a log cannot begin with entry {index} at {pos}")
        self._begin(install=(index, pos, prev_term))  # a crash must not leave an empty log
        try:
            folder = self.set_aside(name)
        except StoreFullError:
            self._end(install=None)
            raise
        with self._stopped():
            self.entries.restart(index, pos, prev_term)
        self.begin_at(pos)
        self._end(install=None)
        return folder
