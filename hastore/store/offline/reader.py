"""Read a store from another process: no lock, nothing written, in use or not.
 How far it reads: of a hastore store up to the readable offset that its node keeps on the limits
page, of a RocketMQ store up to the last whole record. Records come whole or not at all: each is
checked (CRC and place) when it is read, and a limit that moved back meanwhile (a failover cut the
log) ends the reading there.
 `view` and `file_view` lend the log's own pages without a copy: what lies beyond the limit may
change under them, and after a cut what lies below it too; compare `limit_offset` again after use
where that matters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hastore.errors import CorruptRecordError, StoreError
from hastore.record.codec import (
    BLANK_SIZE,
    V1_MAGIC,
    V2_MAGIC,
    Record,
    check_blank,
    check_record,
    decode_record,
)
from hastore.store.fs.filesystem import REAL, FileSystem
from hastore.store.offline.log_files import LogFile, LogFiles
from hastore.store.offline.queue_files import QueueFiles, QueueUnits
from hastore.store.state.limits import read_limits

__all__ = ["LogFile", "QueueUnits", "StoreReader"]


class StoreReader:
    """A store's log and queues, read in place; thread-safe. Close it, or use it under `with`."""

    def __init__(self, path: str, *, fs: FileSystem = REAL) -> None:
        """Open the store in directory `path`; StoreError when there is none."""
        self.path = path
        self._fs = fs
        self._files = LogFiles(path, fs)
        self._queues = QueueFiles(path, fs)
        self._whole = 0  # the record end up to which a RocketMQ store was seen to be whole

    def __enter__(self) -> "StoreReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files; views that are lent stay good until they are dropped."""
        self._files.close()

    # -- limits ------------------------------------------------------------------------------------

    @property
    def is_hastore(self) -> bool:
        """Whether a hastore node keeps this store's limits."""
        return read_limits(self._fs, self.path) is not None

    @property
    def min_offset(self) -> int:
        """Return where the log begins now."""
        files = self._files.list()
        limits = read_limits(self._fs, self.path)
        first = files[0].start if files else 0
        return first if limits is None else max(first, limits.first_offset)

    @property
    def limit_offset(self) -> int:
        """Return the offset at which reading ends now: read anew at each call."""
        limits = read_limits(self._fs, self.path)
        if limits is not None:
            return limits.readable_offset
        self._whole = self._files.whole_end(self._whole or None)
        return self._whole

    @property
    def file_size(self) -> int:
        """Return the bytes of a commit log file; 0 for a log without files."""
        files = self._files.list()
        return files[0].size if files else 0

    # -- the log -----------------------------------------------------------------------------------

    def files(self) -> list[LogFile]:
        """Return the commit log's files, the oldest first."""
        return self._files.list()

    def file_view(self, file: LogFile) -> memoryview:
        """Return a whole file as read-only memory, for numpy; FileNotFoundError when it is gone."""
        return self._files.view(file)

    @contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        """Lend bytes from `offset`, of one file, up to the limit; empty at the end. StoreError."""
        file = self._file_of(offset)
        if file is None:
            yield memoryview(b"")
            return
        size = min(max_bytes, file.end - offset, self.limit_offset - offset)
        at = offset - file.start
        with self._map(file)[at : at + max(size, 0)] as part:
            yield part

    def record_at(self, offset: int, limit: int | None = None) -> Record | None:
        """Return the whole record at `offset`; None beyond the limit, or where none begins."""
        limit = self.limit_offset if limit is None else limit
        file = self._file_of(offset)
        if file is None or offset >= limit:
            return None
        data = self._map(file)
        at = offset - file.start
        size = check_record(data, at, min(file.size, limit - file.start), offset)
        # Decoded from a copy that is checked again: the pages may be cut while they are read.
        raw = bytes(data[at : at + size])
        if not size or check_record(raw, 0, size, offset) != size:
            return None
        return decode_record(raw)

    def raw_records(
        self, start: int | None = None, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of every whole record that begins in [start, end) below the limit.

        `start` may lie inside a record: the first one behind it comes first. StoreError when
        retention took what comes next; CorruptRecordError for damage below the limit.
        """
        offset = self.min_offset if start is None else max(start, 0)
        limit = self.limit_offset
        stop = limit if end is None else min(end, limit)
        aligned = start is None
        while offset < stop:
            file = self._file_of(offset)
            if file is None:
                return
            if not aligned:
                offset = self._files.record_start_at(file, offset)
                aligned = True
                continue
            data = self._map(file)
            while offset < min(stop, file.end):
                at = offset - file.start
                size = check_record(data, at, min(file.size, limit - file.start), offset)
                raw = bytes(data[at : at + size])
                if size and check_record(raw, 0, size, offset) == size:
                    yield offset, raw
                elif not (size := check_blank(data, at, file.size)):
                    limit = min(limit, self.limit_offset)
                    if offset < limit and not self._is_partial(data, at, limit - file.start):
                        raise CorruptRecordError(
                            f"{file.path}: no valid record at offset {offset}, below the limit"
                            f" {limit}; see `hastore log verify`"
                        )
                    return
                offset += size

    def records(self, start: int | None = None, end: int | None = None) -> Iterator[Record]:
        """Yield the records of `raw_records`, decoded."""
        for _, raw in self.raw_records(start, end):
            yield decode_record(raw)

    # -- queues ------------------------------------------------------------------------------------

    def topics(self) -> dict[str, dict[int, tuple[int, int]]]:
        """Return (min, max) queue offsets of each queue of each topic, up to the limit."""
        low, limit = self.min_offset, self.limit_offset
        return self._queues.topics(low, limit)

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return (min, max) queue offsets up to the limit; None without such a queue."""
        return self._queues.queue_range(topic, queue_id, self.min_offset, self.limit_offset)

    def queue_units(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        end: int | None = None,
        *,
        limit: int | None = None,
    ) -> QueueUnits:
        """Return where the records of queue offsets [start, end) lie, up to the limit.

        What replay has not reached yet is missing at the end. `limit` is `limit_offset` unless
        given.
        """
        limit = self.limit_offset if limit is None else limit
        return self._queues.units(topic, queue_id, start, end, self.min_offset, limit)

    def queue_records(
        self, topic: str, queue_id: int, start: int | None = None, end: int | None = None
    ) -> Iterator[Record]:
        """Yield the records of queue offsets [start, end); CorruptRecordError, StoreError."""
        limit = self.limit_offset
        for offset in self.queue_units(topic, queue_id, start, end, limit=limit).offsets:
            record = self.record_at(offset, limit)
            if record is None:
                if offset < self.min_offset:
                    continue  # retention was faster
                if offset >= self.limit_offset:
                    return  # the log was cut
                raise CorruptRecordError(
                    f"queue {queue_id} of {topic!r} points at offset {offset}: no record"
                )
            yield record

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """Return the first position stored at or after a time, else the end; None: no queue."""
        limits = self.queue_range(topic, queue_id)
        if limits is None:
            return None
        low, high = limits
        limit = self.limit_offset
        while low < high:
            middle = (low + high) // 2
            found = self.queue_units(topic, queue_id, middle, middle + 1, limit=limit)
            record = self.record_at(found.offsets[0], limit) if found.offsets else None
            if record is None or record.store_timestamp_ms < timestamp_ms:
                low = middle + 1
            else:
                high = middle
        return low

    # -- inside ------------------------------------------------------------------------------------

    def _file_of(self, offset: int) -> LogFile | None:
        """Return an offset's file, None behind the last; StoreError before the first."""
        files = self._files.list()
        for file in files:
            if file.start <= offset < file.end:
                return file
        if files and offset < files[-1].start:
            raise StoreError(
                f"offset {offset} was removed by retention: the log of {self.path} begins at"
                f" {files[0].start}"
            )
        return None

    def _map(self, file: LogFile) -> memoryview:
        try:
            return self._files.view(file)
        except FileNotFoundError as failure:
            raise StoreError(f"{file.path} was removed by retention while it was read") from failure

    @staticmethod
    def _is_partial(data: memoryview, at: int, limit: int) -> bool:
        """Whether the bytes up to the limit are the beginning of a record that ends beyond it.

        A damaged size is often a huge one: only a record that fits into its file is partial.
        """
        if limit - at < 8:
            return True
        size, magic = (int.from_bytes(data[i : i + 4]) for i in (at, at + 4))
        return magic in (V1_MAGIC, V2_MAGIC) and limit - at < size <= len(data) - at - BLANK_SIZE
