"""Read a store, in use or not, from another process, without a lock and without writing.

A hastore store is read up to the readable offset that its node keeps on the limits page, a RocketMQ
store up to the last whole record, a store of RocketMQ on DLedger up to the entry that its
checkpoint, which is written every 3 s, knows to be committed. Each record's CRC and offset are
checked when it is read, so only whole records are returned. If a failover cuts the log meanwhile,
the limit moves back and reading ends there.

`view` and `file_view` lend the log's pages without a copy. Bytes beyond the limit may change while
they are lent. After a cut, bytes below the earlier limit may change too: to notice a cut, compare
`limit_offset` after use.
"""

import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from hastore.errors import CorruptRecordError, StoreBrokenError, StoreError
from hastore.fs.filesystem import REAL, FileSystem, read_or_empty
from hastore.record.codec import Record, check_record, decode_record, stated_time_ms
from hastore.record.layout import BLANK_SIZE, SIZE_AND_MAGIC
from hastore.record.log_format import LogFormat, read_header
from hastore.record.topic_records import (
    OWN_PREFIX,
    TOPICS_QUEUE,
    TOPICS_TOPIC,
    SavedTopics,
    apply_change,
    begins_of,
    change_in,
    decode_topics,
    forget_removed,
)
from hastore.store.derived.unit_files import first_late
from hastore.store.offline.log_files import LogFile, LogFiles, committed_index, unit_of
from hastore.store.offline.queue_files import NEAR_BYTES, QueueFiles, QueueUnits, known_start
from hastore.store.state.crc_frame import FILE_BYTES_MAX
from hastore.store.state.limits import read_limits
from hastore.store.state.time_falls import read_falls

__all__ = ["LogFile", "QueueUnits", "StoreReader"]

DAMAGED_MAX = 1_000  # records in a row that a search by time looks at, if they do not say theirs
_LATE_MS = 2**63 - 1


class StoreReader:
    """A store's log and queues, read in place; thread-safe. Close it, or use it in a `with`."""

    def __init__(self, path: str, *, fs: FileSystem = REAL) -> None:
        """Open the store in directory `path`; raises StoreError when there is none."""
        self.path = path
        self._fs = fs
        self._files = LogFiles(path, fs)
        self._queues = QueueFiles(path, fs)
        self.form: LogFormat = self._files.form  # of the log
        self._whole = 0  # the end of the last whole record that was found in a RocketMQ store
        # A cache: the state of the files, where deleted topics begin, and the queues of the others.
        self._known: tuple[tuple[int, ...], dict[str, int], dict[str, int]] = (), {}, {}

    def __enter__(self) -> "StoreReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; lent views stay valid until they are dropped."""
        self._files.close()

    # -- limits ------------------------------------------------------------------------------------

    @property
    def is_hastore(self) -> bool:
        """Whether a hastore node keeps this store's limits."""
        return read_limits(self._fs, self.path) is not None

    @property
    def readable_offset(self) -> int | None:
        """Return what a hastore node lets read now; None for a store that none keeps."""
        limits = read_limits(self._fs, self.path)
        return None if limits is None else limits.readable_offset

    @property
    def min_offset(self) -> int:
        """Return the offset at which the log begins now."""
        files = self._files.list()
        limits = read_limits(self._fs, self.path)
        first = files[0].start if files else 0
        return first if limits is None else max(first, limits.first_offset)

    @property
    def limit_offset(self) -> int:
        """Return the offset at which reading ends now; each call determines it again."""
        limits = read_limits(self._fs, self.path)
        if limits is not None:
            return limits.readable_offset
        if self._files.ledger is not None:
            return self._committed_end(self._files.ledger)
        self._whole = self._files.whole_end(self._whole or self._dispatched())
        return self._whole

    def _committed_end(self, ledger: str) -> int:
        """Return where the last entry ends that the checkpoint knows to be committed."""
        files = self._files.list()
        index = committed_index(self._fs, ledger)
        if index < 0 or not files:
            return files[0].start if files else 0
        unit = unit_of(self._fs, ledger, index)
        for file in reversed(files):
            if unit is not None and not file.start <= unit[0] < file.end:
                continue
            at = 0 if unit is None else unit[0] - file.start
            data = self._files.view(file)
            while (header := read_header(data, at, file.size, file.start + at)) is not None:
                if header.index > index:
                    break
                at += header.size
                if header.index == index:
                    return file.start + at
        return self._files.whole_end()  # the log ends before that entry

    def _dispatched(self) -> int | None:
        """Return the start of a record near the log's end.

        The broker has dispatched it, so it has also written all records before it.
        """
        files = self._files.list()
        if not files:
            return None
        low = files[-2:][0].start  # RocketMQ makes the next file before it needs it
        known = known_start(self._fs, self.path, files[-1].end, low)
        return known if known is not None and self._files.is_record(known) else None

    @property
    def file_size(self) -> int:
        """Return the size of a commit log file in bytes; 0 for a log without files."""
        files = self._files.list()
        return files[0].size if files else 0

    # -- the log -----------------------------------------------------------------------------------

    def files(self) -> list[LogFile]:
        """Return the commit log's files, the oldest first."""
        return self._files.list()

    def record_start_at(self, offset: int) -> int:
        """Return the first record start, or start of a blank, at or beyond `offset`.

        In a log of entries this is where an entry begins. After the last file, returns its end.
        Raises StoreError if retention removed the file.
        """
        file = self._file_of(offset)
        if file is None:
            return max((file.end for file in self._files.list()), default=0)
        try:
            return self._start_at(file, offset)
        except FileNotFoundError as failure:
            raise StoreError(f"{file.path} was removed by retention while it was read") from failure

    def _start_at(self, file: LogFile, offset: int) -> int:
        known = None
        if offset - file.start > NEAR_BYTES:
            known = known_start(self._fs, self.path, offset, file.start)
            known = None if known is None else known - self.form.lead
        return self._files.record_start_at(file, offset, known)

    def file_view(self, file: LogFile) -> memoryview:
        """Lend a whole file read-only, for numpy; raises FileNotFoundError when it is gone."""
        return self._files.view(file)

    @contextmanager
    def view(self, offset: int, max_bytes: int) -> Iterator[memoryview]:
        """Lend bytes of one file from `offset` on, up to the limit; raises StoreError.

        The view is empty at the limit.
        """
        file = self._file_of(offset)
        if file is None:
            yield memoryview(b"")
            return
        size = min(max_bytes, file.end - offset, self.limit_offset - offset)
        at = offset - file.start
        with self._map(file)[at : at + max(size, 0)] as part:
            yield part

    def record_at(self, offset: int, limit: int | None = None) -> Record | None:
        """Return the record at `offset`; None beyond the limit or when no record begins there."""
        limit = self.limit_offset if limit is None else limit
        file = self._file_of(offset)
        if file is None or offset >= limit:
            return None
        data = self._map(file)
        at = offset - file.start
        size = check_record(data, at, min(file.size, limit - file.start), offset)
        # The log may be cut during the check, so copy the record, and check and decode the copy.
        raw = bytes(data[at : at + size])
        if not size or check_record(raw, 0, size, offset) != size:
            return None
        return decode_record(raw)

    def raw_records(
        self, start: int | None = None, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of every whole record that begins in [start, end) below the limit.

        If `start` lies inside a record, the next record comes first. Raises StoreError when
        retention removed the next record, CorruptRecordError for damage below the limit.
        """
        offset = self.min_offset if start is None else max(start, 0)
        form, lead = self.form, self.form.lead
        limit = self.limit_offset
        stop = limit if end is None else min(end, limit)
        aligned = start is None
        while offset < stop:
            file = self._file_of(offset)
            if file is None:
                return
            if not aligned:
                offset = self._start_at(file, offset)
                aligned = True
                continue
            data = self._map(file)
            while offset < min(stop, file.end):
                at = offset - file.start
                size = form.check_item(data, at, min(file.size, limit - file.start), offset)
                raw = bytes(data[at : at + size])
                if size and form.check_item(raw, 0, size, offset) == size:
                    if form.holds_record(raw, 0, size):
                        yield offset + lead, raw[lead:]
                elif not (size := form.check_blank(data, at, file.size)):
                    limit = min(limit, self.limit_offset)
                    end = limit - file.start
                    if offset < limit and not self._is_partial(data, at, end, offset):
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

    def topics(self, names: Collection[str] | None = None) -> dict[str, dict[int, tuple[int, int]]]:
        """Return (min, max) queue offsets of each queue, up to the limit, of these topics or all.

        Names without a topic are left out, and so are topics of which a deletion hides all records.
        A queue of which it hides all begins and ends at its next queue offset.
        """
        low, limit = self.min_offset, self.limit_offset
        hidden = self._hidden(limit)
        found = self._queues.topics(low, limit, names)
        for topic in hidden.keys() & found.keys():
            queues = {queue: self.queue_range(topic, queue) for queue in found.pop(topic)}
            there = {queue: one for queue, one in queues.items() if one}
            if any(low < high for low, high in there.values()):
                found[topic] = there
        return {topic: found[topic] for topic in sorted(found)} if hidden else found

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return (min, max) queue offsets up to the limit; None if the queue does not exist."""
        limit = self.limit_offset
        return self._queues.queue_range(topic, queue_id, self._low(topic, limit), limit)

    def ended(self, topic: str, queue_id: int) -> int | None:
        """Return at which queue offset the last deletion of a topic ended a queue.

        Returns None if there was none, or if that is not known any more: the log begins after the
        deletion, and the queue lacks what was before it. Retention may have removed later records.
        """
        limit = self.limit_offset
        begin = self._hidden(limit).get(topic, 0)
        found = self._queues.queue_range(topic, queue_id, begin, limit) if begin else None
        if found is None:
            return None
        end = found[0]
        is_known = not end or begin >= self.min_offset
        if is_known or self._queues.units(topic, queue_id, end - 1, end, 0, limit):
            return end
        return None

    def configured_queues(self, topic: str) -> int | None:
        """Return how many queues a topic has, with and without messages; None if no record says.

        Topics that nobody made or changed have no such record.
        """
        self._hidden(self.limit_offset)
        return self._known[2].get(topic)

    def queue_units(
        self,
        topic: str,
        queue_id: int,
        start: int | None = None,
        end: int | None = None,
        *,
        limit: int | None = None,
    ) -> QueueUnits:
        """Return the units of queue offsets [start, end), up to the limit.

        Records that replay has not reached yet are missing at the end. `limit` defaults to
        `limit_offset`.
        """
        limit = self.limit_offset if limit is None else limit
        low = self._low(topic, limit)
        return self._queues.units(topic, queue_id, start, end, low, limit)

    def queue_records(
        self, topic: str, queue_id: int, start: int | None = None, end: int | None = None
    ) -> Iterator[Record]:
        """Yield the records of queue offsets [start, end).

        Raises CorruptRecordError or StoreError.
        """
        limit = self.limit_offset
        for offset in self.queue_units(topic, queue_id, start, end, limit=limit).offsets:
            record = self.record_at(offset, limit)
            if record is None:
                if offset < self.min_offset:
                    continue  # retention removed it
                if offset >= self.limit_offset:
                    return  # the log was cut
                raise CorruptRecordError(
                    f"queue {queue_id} of {topic!r} names offset {offset}, where no record is; see"
                    " `hastore log verify`"
                )
            yield record

    def queue_offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int | None:
        """Return the first queue offset stored at or after a time, also if store times fall.

        Returns the queue's end if there is no such record, None if there is no such queue.
        """
        limits = self.queue_range(topic, queue_id)
        if limits is None:
            return None
        limit = self.limit_offset

        def is_late(queue_offset: int, end: int, time_ms: int) -> bool:
            stored = self._stored_ms(topic, queue_id, queue_offset, end, limit)
            return stored is not None and stored >= time_ms

        falls = read_falls(self._fs, self.path)
        return first_late(
            *limits, falls, timestamp_ms,
            lambda offset: self._first_at(topic, queue_id, offset, limits[1]), is_late,
        )  # fmt: skip

    def _stored_ms(
        self, topic: str, queue_id: int, queue_offset: int, end: int, limit: int
    ) -> int | None:
        """Return when a record was stored, or, if it does not say, the next one below `end`.

        A damaged record must not count as an old one: a search would step over all before it. If
        there is none after it, it counts as a late one. Returns None without a unit. Raises
        CorruptRecordError if DAMAGED_MAX records in a row do not say.
        """
        for start, stop in ((0, 1), (1, DAMAGED_MAX)):
            units = self.queue_units(
                topic, queue_id, queue_offset + start, min(queue_offset + stop, end), limit=limit
            )
            for offset in units.offsets:
                file = self._file_of(offset)
                if file is None or offset >= limit:
                    return None
                data, at = self._map(file), offset - file.start
                stored = stated_time_ms(data, at, min(file.size, limit - file.start), offset)
                if stored is not None and stored > 0:
                    return stored
            if not start and not units:
                return None
        if queue_offset + DAMAGED_MAX >= end:
            return _LATE_MS
        raise CorruptRecordError(
            f"{self.path}: no record's header is at offset {offset}, nor in the {DAMAGED_MAX - 1}"
            f" records before it in queue {queue_id} of {topic!r}; see `hastore log verify`"
        )

    def _first_at(self, topic: str, queue_id: int, offset: int, otherwise: int) -> int:
        found = self._queues.queue_range(topic, queue_id, offset, self.limit_offset)
        return otherwise if found is None else found[0]

    # -- inside ------------------------------------------------------------------------------------

    def _low(self, topic: str, limit: int) -> int:
        """Return the offset of the log from which on a topic's records show."""
        if topic.startswith(OWN_PREFIX):
            return self.min_offset
        return max(self.min_offset, self._hidden(limit).get(topic, 0))

    def _hidden(self, limit: int) -> dict[str, int]:
        """Return the topics that were deleted below `limit`, each with the last deletion."""
        low, path = self.min_offset, f"{self.path}/hastore/topics"
        saved = read_or_empty(self._fs, path, FILE_BYTES_MAX)
        known = self._queues.queue_range(TOPICS_TOPIC, TOPICS_QUEUE, low, limit) or (0, 0)
        state = (*known, low, zlib.crc32(saved))
        if state == self._known[0]:
            return self._known[1]
        found = (decode_topics(saved) or SavedTopics({}, 0)).at(limit)
        entries, start = dict(found.entries), found.offset
        units = self._queues.units(TOPICS_TOPIC, TOPICS_QUEUE, None, None, low, limit)
        for offset in units.offsets:
            record = self.record_at(offset, limit) if offset >= start else None
            change = None if record is None else change_in(record.properties)
            if change is not None:
                apply_change(entries, change, offset)
        forget_removed(entries, low, lambda _name: True)
        configs = {name: one.config for name, one in entries.items() if one.config is not None}
        queues = {name: config.read_queues for name, config in configs.items()}
        self._known = state, begins_of(entries), queues
        return self._known[1]

    def _file_of(self, offset: int) -> LogFile | None:
        """Return an offset's file; None after the last file.

        Raises StoreError before the first one, StoreBrokenError if files are missing there.
        """
        files = self._files.list()
        for file in files:
            if file.start <= offset < file.end:
                return file
        for before, after in zip(files, files[1:], strict=False):
            if before.end <= offset < after.start:
                raise StoreBrokenError(
                    f"{self.path}: files of the log are missing between {before.end} and"
                    f" {after.start}; restore them, or copy the store anew"
                )
        if files and offset < files[0].start:
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

    def _is_partial(self, data: memoryview, at: int, limit: int, offset: int) -> bool:
        """Whether the bytes up to the limit are the beginning of a record that ends beyond it.

        A damaged size is often too large: then it does not fit the file, or the other lengths.
        """
        if limit - at < SIZE_AND_MAGIC.size:
            return True
        form, size = self.form, self.form.announced(data, at, len(data))
        fits = limit - at < size <= len(data) - at - BLANK_SIZE
        return fits and form.may_begin(data, at, limit, offset)
