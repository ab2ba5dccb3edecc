"""MessageStore: the store of a node in mode classic, whose log holds records.

A master appends what clients put, a slave the bytes of its master's log. All else is the same for
every form of the log, and in LogStore (log_store.py), which also says who locks what.
"""

import logging
from collections.abc import Callable, Sequence

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Flush, StoreConfig
from hastore.errors import StoreError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.record.codec import Host
from hastore.service import OnFailure
from hastore.store.append.results import Guards, Payload, PutResult, PutResults
from hastore.store.log.mapped_file_queue import FileRange
from hastore.store.log_store import LogStore, StoreHooks
from hastore.store.message_reader import PullResult, PullStatus

__all__ = ["FileRange", "MessageStore", "PullResult", "PullStatus", "PutResult"]

logger = logging.getLogger(__name__)


class MessageStore(LogStore):
    """A ReplicaLog (ha/node/replica_log.py) that also takes puts; all methods are thread-safe."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
        store_host: Host,
        on_failure: OnFailure | None = None,
        hooks: StoreHooks | None = None,
    ) -> None:
        """Prepare; no file is touched before `open`. LogStore says what the arguments are."""
        super().__init__(
            config, fs=fs, clock=clock, store_host=store_host, on_failure=on_failure, hooks=hooks,
            sync_each_put=config.flush is Flush.SYNC,
        )  # fmt: skip

    def open(
        self,
        *,
        intent_offset: int | None = None,
        from_rocketmq: bool = False,
        rocketmq_end: int = 0,
        known: bool = False,
        on_doubt: Callable[[int], None] = lambda _end: None,
    ) -> None:
        """Lock and recover the store, then start its threads.

        If `intent_offset` is given, a cut at this offset was begun: bytes beyond it may be missing.
        If `from_rocketmq` is true, this node copied the log from a RocketMQ master: a record that
        cannot be decoded only because of its topic's length is then no damage. `rocketmq_end` is
        where the bytes end that it copied from one, also earlier: up to there a wrong CRC of what
        was synced is no damage of this store. `known` means that
        hastore has opened this store before, so that it must have a limits page (`limits_lost`).
        `on_doubt` is called before the log is cut at that offset, if records may lie behind it that
        were synced or confirmed: the caller notes that durably.

        Raises StoreInUseError if another process has the store open, StoreBrokenError if synced
        bytes are missing or damaged, and StoreError if the store cannot be read or written or has
        files of another size.
        """
        self._open(
            intent_offset, from_rocketmq=from_rocketmq, rocketmq_end=rocketmq_end, known=known,
            on_doubt=on_doubt,
        )  # fmt: skip

    def put_encoded(self, payloads: Sequence[Payload], guards: Guards | None = None) -> PutResults:
        """Append the valid records of all payloads; a payload is one or more encoded records.

        All records are written at once, unless the log's last file has no room for them. Returns
        the results of each payload, in the order of its records; a malformed payload has one
        result, which refuses all of it. Raises StoreFullError, StoreBrokenError or StoreError if
        nothing was appended; all other failures are in the results (Appender.put). With `flush:
        sync` a sync has been requested. Guards may forbid records.
        """
        results, start, end, data = self._appender.put(payloads, None, guards)
        if end > start:
            self._grown(soon=True)
            on_append = self.hooks.on_append
            if on_append is not None:
                try:
                    on_append(start, end, data)
                except (StoreError, OSError) as failure:  # the put is stored all the same
                    logger.error("replication was not told of the log's end %d: %s", end, failure)
        return results

    def append_replica(self, offset: int, data: bytes | memoryview) -> int:
        """Append at `offset`, which must be the end; returns the new end.

        Raises UsageError for another offset or for bytes that cross a file's end, and
        StoreFullError if there was no room. In both cases nothing was appended. Any other failed
        write closes the store: it raises StoreBrokenError if its bytes were cleared,
        StoreUncertainError if not.
        """
        log = self.log
        with log.lock:
            if offset != log.max_offset:
                log.commit(offset, 0)  # raises UsageError
            end = log.append(data)
        self._grown(soon=self.confirmed_soon)
        return end

    def replica_range(self, offset: int, max_bytes: int) -> FileRange:
        """Return the range at the log's end; the caller splices, then calls `commit_replica`."""
        with self.log.lock:
            return self.log.replica_range(offset, max_bytes)

    def commit_replica(self, offset: int, size: int) -> int:
        """Make `size` bytes spliced at `offset` part of the log; returns the new end."""
        with self.log.lock:
            end = self.log.commit(offset, size)
        self._grown()
        return end

    def replica_failed(self, offset: int, size: int, failure: OSError) -> StoreError:
        """Clear the bytes of a failed splice into `replica_range`; returns the error to raise.

        The error is StoreFullError if there was no room. Otherwise the store is closed, and the
        error is StoreBrokenError, or StoreUncertainError if the bytes could not be cleared.
        """
        with self.log.lock:
            return self.log.replica_failed(offset, size, failure)

    def record_size(self, offset: int, *, check: bool = False) -> int | None:
        """Return the size of the whole record at `offset`; see MessageReader.record_size."""
        return self.reader.record_size(offset, check=check)

    def after_blank(self, offset: int) -> int:
        """Return the end of the blank that begins at `offset`, else `offset`."""
        return self.reader.after_blank(offset)

    def begin_at(self, offset: int) -> None:
        """Start an empty log at `offset`. Raises UsageError if the present log is not empty."""
        self._begin_at(offset)
