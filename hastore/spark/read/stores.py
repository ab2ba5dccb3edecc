"""Read a store's folder in place: ranges of queues, and the ends and epochs that a stream follows.

Offsets come from the consume queue files, records from mapped log files. The reader takes no lock
and never waits for the node that owns the store. It reads a hastore store up to the readable
offset, and a RocketMQ store up to its last whole record. Spark's driver fixes that limit and passes
it to the tasks. Meanwhile retention may remove files, and a failover may cut the log: both are
reported as lost positions, not as damage. The epochs are those of `<store>/hastore/node.json`.
"""

import json
import logging
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

from hastore.errors import (
    ClientError,
    CorruptRecordError,
    PositionLostError,
    StoreBrokenError,
    StoreError,
)
from hastore.ha.rules.epochs import (
    CLASSIC_EPOCH,
    FORGOTTEN_EPOCH,
    Standing,
    check_position,
    epoch_of,
)
from hastore.record.layout import BLANK_MAGIC, MIN_RECORD_SIZE, SIZE_AND_MAGIC
from hastore.record.log_format import LogFormat
from hastore.spark.options.names import BOOTSTRAP, Names
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import LogRange, QueueRange, Stored
from hastore.spark.read.backend import PlaceVerdict, QueuePlace, ReadableRange
from hastore.store.offline.reader import LogFile, QueueUnits, StoreReader

if TYPE_CHECKING:
    import pyarrow as pa

    from hastore.spark.arrow.batch import BatchBuilder, QueueRows
    from hastore.spark.arrow.inner_batches import InnerBatchBuilder
    from hastore.spark.arrow.record_fields import Bools, Ints

log = logging.getLogger(__name__)

UNITS_AT_ONCE = 65_536  # units (entries) of a consume queue held as arrays: 2 MB
_WHOLE_LOG = 2**62  # a limit beyond every offset
_HALF = 0xFFFFFFFF
RECORDS_AT_ONCE = 16_384  # records of the log held as arrays
Entries = tuple[tuple[int, int], ...]  # (epoch, start offset), both rising


class _Folder:
    """What batch reads and streams ask of a store's folder alike."""

    def __init__(self, path: str, opened: StoreReader | None, names: Names) -> None:
        self.where = path
        self._names = names
        self._opened = opened
        self._epochs = EpochFile(path)

    @property
    def _reader(self) -> StoreReader:
        assert self._opened is not None, "used outside of `with`"
        return self._opened

    def _ranges(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        return {
            TopicPartition(topic, queue_id): OffsetRange(*bounds)
            for topic, queues in self._reader.topics(topics).items()
            for queue_id, bounds in queues.items()
        }

    def ended(self, keys: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return at which offset the last deletion of its topic ended each of these queues."""
        found = {key: self._reader.ended(*key) for key in keys}
        return {key: end for key, end in found.items() if end is not None}

    def check_unlisted(self, topic: str) -> None:
        """Raise ClientError for a topic that exists, but has a queue without a message.

        A folder shows only queues with messages. Whoever may read it may read all topics.
        """
        count = self._reader.configured_queues(topic)
        if count is not None and len(self._ranges({topic})) < count:
            raise ClientError(
                f"topic {topic!r} at {self.where} has {count} queues, and not each has a message "
                "in this store yet: a path shows only those that have; wait for the first "
                "message, or read from nodes"
            )

    def absent(self, keys: Collection[TopicPartition]) -> dict[str, str]:
        """Return {}: there is only this folder."""
        return {}

    def offset_by_time(self, partition: TopicPartition, timestamp_ms: int) -> int | None:
        """Return the first offset stored at or after the instant; None if all are older."""
        bounds = self._reader.queue_range(*partition)
        found = self._reader.queue_offset_by_time(*partition, timestamp_ms)
        return None if bounds is None or found is None or found >= bounds[1] else found

    def limit_offset(self) -> int:
        """Return the physical offset at which reading ends now."""
        return self._reader.limit_offset

    def locate(
        self, ends: Mapping[TopicPartition, int], lows: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, QueuePlace]:
        """Return the place of each offset, or of the greatest readable one from `lows` to it."""
        while True:
            history = self._epochs.read()
            limit = self._reader.limit_offset
            found = {
                key: self._locate(key, end, lows.get(key, 0), limit, history)
                for key, end in ends.items()
            }
            if self._epochs.read() == history:
                return {key: place for key, place in found.items() if place is not None}

    def _locate(
        self, key: TopicPartition, end: int, low: int, limit: int, history: Entries | None
    ) -> QueuePlace | None:
        stored = self._stored(key, end - 1, limit, history)
        if stored is not None or end <= low:
            return QueuePlace(end, stored)
        # A cut or retention has removed the record since the queue was listed.
        place = self._common(key, QueuePlace(end), limit, limit, history)
        return place if place.next > low else None

    def _common(
        self, key: TopicPartition, place: QueuePlace, at: int, limit: int, history: Entries | None
    ) -> QueuePlace:
        """Return the place after the queue's last record that begins below `at`."""
        low, high = self._reader.queue_range(*key) or (0, 0)
        high = min(high, place.next)
        result = QueuePlace(low)
        while low < high:
            middle = (low + high) // 2
            stored = self._stored(key, middle, limit, history)
            if stored is not None and stored.offset < at:
                low = middle + 1
                result = QueuePlace(low, stored)
            else:
                high = middle
        return result

    def _stored(
        self, key: TopicPartition, offset: int, limit: int, history: Entries | None = None
    ) -> Stored | None:
        """Return where the record of a queue offset is; None if there is none."""
        if offset < 0:
            return None
        found = self._reader.queue_units(*key, offset, offset + 1, limit=limit).offsets
        if not found:
            return None
        return Stored(None if history is None else epoch_of(history, found[-1]), found[-1])


class PathBackend(_Folder):
    """A store's directory, read through its files."""

    def __init__(
        self, path: str, fail_on_data_loss: bool, names: Names = Names.QUERY
    ) -> None:
        super().__init__(path, None, names)
        self._fail_on_data_loss = fail_on_data_loss

    def __enter__(self) -> Self:
        _check_folder(self.where, self._names)
        try:
            os.scandir(self.where).close()
            self._opened = StoreReader(self.where)
        except PermissionError as error:
            raise _not_readable(error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reader.close()
        if isinstance(error, PermissionError):
            raise _not_readable(error) from error

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges below the limit.

        With `failOnDataLoss`, raises CorruptRecordError for a RocketMQ store whose queues name
        records that the log lacks.
        """
        found = self._ranges(topics)
        if self._fail_on_data_loss and not self._reader.is_hastore:
            self._check_end(found)
        return found

    def readable(
        self, queues: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, ReadableRange]:
        """Return the ranges: `available` leaves out what is not readable."""
        found = self.locate({key: span.end for key, span in queues.items() if span.size}, {})
        places = {key: found.get(key, QueuePlace(span.end)) for key, span in queues.items()}
        return {key: ReadableRange(span, places[key].before) for key, span in queues.items()}

    @property
    def knows_deletions(self) -> bool:
        """Whether the log has the deletions of topics: a RocketMQ broker only removes queues."""
        return self._reader.is_hastore

    def _check_end(self, queues: Mapping[TopicPartition, OffsetRange]) -> None:
        """Raise CorruptRecordError if a queue goes on beyond the last whole record of the log.

        A RocketMQ store is read up to its last whole record, which a damaged record would hide: its
        queues do not end there. The broker writes a queue's unit after the record, so the log's end
        that is looked up after the units cannot be older than they are.
        """
        beyond = []
        for (topic, queue_id), span in queues.items():
            units = self._reader.queue_units(
                topic, queue_id, span.end, span.end + 1, limit=_WHOLE_LOG
            )
            beyond += [(at, topic, queue_id, span.end) for at in units.offsets]
        first = min(beyond, default=None)
        end = self._reader.limit_offset
        if first is not None and first[0] >= end:
            raise CorruptRecordError(
                f"{self.where}: the last whole record of the log ends at offset {end}, but its "
                f"queues go on (message {first[3]} of {first[1]}-{first[2]} at offset {first[0]}): "
                "a record is damaged, or log files are missing; copy the store again"
                f"{self._names.or_without_loss('read what precedes')}"
            )

    def log_range(self) -> tuple[int, int]:
        """Return the physical offsets `[start, end)` that can be read now.

        Raises CorruptRecordError as `available` does.
        """
        if self._fail_on_data_loss:
            self.available()
        start = self._reader.min_offset
        return start, max(start, self._reader.limit_offset)

    def read_queue(self, span: QueueRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
        """Yield the messages of a range; read UNITS_AT_ONCE queue units at a time."""
        from hastore.spark.arrow.inner_batches import InnerBatchBuilder

        for start in range(span.start, span.end, UNITS_AT_ONCE):
            end = min(start + UNITS_AT_ONCE, span.end)
            found = self._reader.queue_units(
                span.topic, span.partition, start, end, limit=span.limit
            )
            numbers = np.frombuffer(found.queue_offsets, np.int64)
            offsets = np.frombuffer(found.offsets, np.int64)
            sizes = np.frombuffer(found.sizes, np.int32).astype(np.int64)
            if not self._is_batch_queue(span):
                self._check_complete(span, start, end, len(numbers))
                if builder.wanted is not None and builder.wanted.codes is not None:
                    tagged = _tagged(found, builder.wanted.codes)
                    numbers, offsets, sizes = numbers[tagged], offsets[tagged], sizes[tagged]
                yield from self._build(builder, offsets, sizes, (span, numbers))
                continue
            inner = InnerBatchBuilder(builder, start, end)
            yield from self._build(inner, offsets, sizes, (span, numbers))
            if not inner.left_whole:  # else it is not known how many messages those have
                self._check_complete(span, start, end, inner.covered)

    def _check_complete(self, span: QueueRange, start: int, end: int, found: int) -> None:
        if found < end - start:
            self._lose(f"{end - start - found} messages of {span.name} in [{start}, {end})")

    def read_log(self, span: LogRange, builder: "BatchBuilder") -> Iterator["pa.RecordBatch"]:
        """Yield the records that begin in a range; the size of each leads to the next one."""
        try:
            at = self._reader.record_start_at(span.start)
        except StoreError as gone:
            self._lose(f"the records from offset {span.start} on ({gone})")
            at = max(self._reader.min_offset, span.start)
        for file in self._reader.files():
            if not file.start <= at < min(file.end, span.end):
                continue
            try:
                data = self._reader.file_view(file)
            except FileNotFoundError:
                self._lose(f"the records in {file.path}, which is gone")
                at = file.end
                continue
            while at < min(file.end, span.end):
                found, at = _walk(self._reader.form, data, file, at, span)
                offsets = np.array(found, np.int64)
                lead = self._reader.form.lead
                sizes = np.diff(offsets, append=at + lead) - lead
                yield from self._build(builder, offsets, sizes, None)

    def _build(
        self,
        builder: "BatchBuilder | InnerBatchBuilder",
        offsets: "Ints",
        sizes: "Ints",
        queue: "tuple[QueueRange, Ints] | None",
    ) -> Iterator["pa.RecordBatch"]:
        """Yield the records at `offsets` (ascending) in batches; no batch spans two files."""
        from hastore.spark.arrow.batch import QueueRows, build_parts, cut_batches

        files = self._reader.files()
        placed = 0
        for file in files:
            first, stop = np.searchsorted(offsets, (file.start, file.end)).tolist()
            placed += stop - first
            for part in cut_batches(offsets[first:stop], sizes[first:stop]):
                rows = slice(first + part.start, first + part.stop)
                placed_here, own = (offsets[rows], sizes[rows]), None
                if queue is not None:
                    own = QueueRows(queue[0].topic, queue[0].partition, queue[1][rows])
                last = None if queue is None else queue[0].last
                build = partial(self._build_one, builder, file, placed_here, own, last)
                yield from build_parts(build, placed_here[0] - file.start)
        if placed < len(offsets):
            self._lose(f"{len(offsets) - placed} records in files that are gone")

    def _build_one(
        self,
        builder: "BatchBuilder | InnerBatchBuilder",
        file: LogFile,
        placed: "tuple[Ints, Ints]",
        own: "QueueRows | None",
        last: Stored | None,
        part: slice,
    ) -> "pa.RecordBatch | None":
        """Return a part of the records at offsets as a batch; None if all of it were cut.

        `placed` are the offsets of all with their sizes, `own` their rows.
        """
        offsets, sizes = placed[0][part], placed[1][part]
        own = None if own is None else replace(own, offsets=own.offsets[part])
        ends = offsets + sizes
        batch: pa.RecordBatch | None = None
        damage: CorruptRecordError | None = None
        try:
            batch = builder.build(
                self._reader.file_view(file), offsets - file.start, file.start, own
            )
        except FileNotFoundError:
            self._lose(f"{len(offsets)} records in {file.path}, which is gone")
            return None
        except CorruptRecordError as error:
            damage = error
        # A cut changes bytes only after it has moved the limit back, and later records are written
        # only after their epoch is in the history. So look at the limit first.
        kept = self._whole_until(ends, last)
        if kept == len(ends):
            if damage is not None:
                raise CorruptRecordError(f"{self.where}: {damage}") from damage
            return batch
        self._lose(f"records that reach to offset {ends[-1]}, beyond the readable end of the log")
        if kept == 0:
            return None
        from hastore.spark.arrow.inner_batches import InnerBatchBuilder

        whole = builder.wanted is None and not isinstance(builder, InnerBatchBuilder)
        if batch is None or not whole:  # records are not rows
            return self._build_one(builder, file, (offsets, sizes), own, last, slice(kept))
        return batch.slice(0, kept)

    def _whole_until(self, ends: "Ints", last: Stored | None) -> int:
        """Return how many records, by their ends, no failover has cut away meanwhile."""
        readable = self._reader.readable_offset
        if readable is None:
            return len(ends)
        stops = [readable]
        cut = None if last is None else valid_end(self._epochs.read(), last)
        if cut is not None:
            stops.append(cut)
        return int(np.searchsorted(ends, min(stops), side="right"))

    def _is_batch_queue(self, span: QueueRange) -> bool:
        """Return whether this is a queue of inner batches, each with several messages."""
        return Path(self.where, "batchconsumequeue", span.topic, str(span.partition)).is_dir()

    def _lose(self, what: str) -> None:
        if self._fail_on_data_loss:
            raise PositionLostError(
                f"{self.where} lost {what}: removed by retention or cut by a failover during the "
                f"read; {self._names.without_loss()}"
            )
        log.warning("%s lost %s: they are left out", self.where, what)


def _tagged(units: QueueUnits, codes: frozenset[int]) -> "Bools":
    """Return which units may have one of the hashes of tags, in the lower half of their codes.

    A code that is no int32 is no hash: the time of a delayed message, or an address in RocketMQ's
    extended queue. Such records are compared exactly, like all others, when they are read.
    """
    given = np.array(units.tags_codes, np.int64)
    found: Bools = np.isin(given & _HALF, np.fromiter(codes, np.int64, len(codes)))
    found |= given != given.astype(np.int32)
    return found


def _check_folder(path: str, names: Names) -> None:
    """Raise StoreError if there is no folder; with Spark Connect the machine may be another one."""
    if os.path.isdir(path):
        return
    relative = "" if os.path.isabs(path) else f" ({path!r} in Spark's working directory there)"
    raise StoreError(
        f"there is no directory {os.path.abspath(path)} on {socket.gethostname()}{relative}; a "
        "path must lead to the store on the driver and on every executor; otherwise read from "
        f"nodes: give {names.said(BOOTSTRAP)} instead"
    )


def _not_readable(error: PermissionError) -> StoreError:
    return StoreError(
        f"{error.filename} is not readable on {socket.gethostname()} for the user of Spark's "
        "Python processes; let that user read the store's files (see store.group_read)"
    )


def _walk(
    form: LogFormat, data: memoryview, file: LogFile, at: int, span: LogRange
) -> tuple[list[int], int]:
    """Follow the sizes of records from `at`; return their offsets, and where to continue.

    The walk stops at bytes that cannot be a record. It returns their offset too, so that
    RecordFields raises an error that names the offset.
    """
    if form.lead:
        return _walk_entries(form, data, file, at, span)
    found: list[int] = []
    stop = min(file.end, span.end)
    while at < stop and len(found) < RECORDS_AT_ONCE:
        left = file.end - at
        size, magic = 0, 0
        if left >= SIZE_AND_MAGIC.size:
            size, magic = SIZE_AND_MAGIC.unpack_from(data, at - file.start)
        if magic == BLANK_MAGIC and size == left:
            return found, file.end
        plausible = MIN_RECORD_SIZE <= size <= left
        if plausible and at + size > span.limit:
            plausible = form.may_begin(data, at - file.start, span.limit - file.start, at)
        if at + size > span.limit and (plausible or span.limit - at < SIZE_AND_MAGIC.size):
            return found, span.end  # the log's limit lies inside this record
        found.append(at)
        if not plausible:
            return found, span.end
        at += size
    return found, at


def _walk_entries(
    form: LogFormat, data: memoryview, file: LogFile, at: int, span: LogRange
) -> tuple[list[int], int]:
    """Do what `_walk` does in a log of entries; entries without a record are left out."""
    found: list[int] = []
    stop = min(file.end, span.end)
    while at < stop and len(found) < RECORDS_AT_ONCE:
        place, left = at - file.start, file.end - at
        if form.check_blank(data, place, file.size):
            return found, file.end
        size = form.announced(data, place, file.size)
        whole = at + size <= span.limit
        begun = whole or form.may_begin(data, place, span.limit - file.start, at)
        if begun and (not whole or (not size and span.limit - at < form.lead)):
            return found, span.end
        if not begun or not size or size > left:
            found.append(at + form.lead)
            return found, span.end
        if form.holds_record(data, place, size):
            found.append(at + form.lead)
        at += size
    return found, at


# -- the ends that a stream follows ----------------------------------------------------------------


class EpochFile:
    """The history that a store's node keeps; None for a store of RocketMQ.

    The node replaces the file as a whole, so a reader sees the old or the new one.
    """

    def __init__(self, root: str) -> None:
        self._path = f"{root}/hastore/node.json"
        self._seen: tuple[int, int, int] | None = None
        self._entries: Entries | None = None

    def read(self) -> Entries | None:
        """Return the entries now; reads the file again only if it has changed."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._seen = self._entries = None
            return None
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._entries = self._load()
            self._seen = seen
        return self._entries

    def _load(self) -> Entries | None:
        try:
            with open(self._path, "rb") as file:
                history = json.load(file)["history"]
            return tuple((int(entry[0]), int(entry[1])) for entry in history)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreBrokenError(f"{self._path} is not the state of a node: {error}") from error


def valid_end(history: Entries | None, last: Stored | None) -> int | None:
    """Return where the records end that belong to the log that had the record `last`.

    None: nowhere, all records belong to it as far as `history` says.
    """
    if history is None or last is None or last.epoch is None:
        return None
    if last.epoch == FORGOTTEN_EPOCH:  # other nodes may remember it: nothing to compare
        return None
    standing, at = check_position(history, last.offset + 1, last.epoch, last.offset)
    if standing is Standing.LOST:
        return at
    return next((start for epoch, start in history if epoch > last.epoch), None)


def names_writer(before: Stored) -> bool:
    """Return whether the epoch says which node wrote a record.

    Then equal epochs mean equal bytes; if a queue has another record there, the log is another one.
    """
    return before.epoch not in (None, CLASSIC_EPOCH, FORGOTTEN_EPOCH)


class PathHead(_Folder):
    """A store's directory. The epochs come from the node's state, which a RocketMQ store lacks."""

    def __init__(self, path: str, names: Names = Names.QUERY) -> None:
        """Open the store; raises StoreError when there is none."""
        _check_folder(path, names)
        super().__init__(path, StoreReader(path), names)
        self._token: Entries | None = None

    def close(self) -> None:
        """Close the log's files."""
        self._reader.close()

    def token(self) -> object:
        """Return the epoch history at the last `available`; None without one."""
        return self._token

    def available(self, topics: Collection[str] | None = None) -> dict[TopicPartition, OffsetRange]:
        """Return the queues, of these topics or of all, with their ranges at this moment."""
        self._token = self._epochs.read()
        found = self._ranges(topics)
        self._reader.close()  # a cut may replace the files that a RocketMQ store's limit has mapped
        return found

    def check(
        self, places: Mapping[TopicPartition, QueuePlace]
    ) -> dict[TopicPartition, PlaceVerdict]:
        """Return whether the record before each place is still in the log."""
        while True:
            history = self._epochs.read()
            limit = self._reader.limit_offset
            found = {key: self._judge(key, place, limit, history) for key, place in places.items()}
            if self._epochs.read() == history:
                return found

    def _judge(
        self, key: TopicPartition, place: QueuePlace, limit: int, history: Entries | None
    ) -> PlaceVerdict:
        if place.before is None:
            return PlaceVerdict(Standing.AGREED, place)
        if history is None or place.before.epoch is None:
            return self._compare(key, place, place.before, limit)
        standing, at = check_position(history, limit, place.before.epoch, place.before.offset)
        if standing is Standing.LOST:
            return PlaceVerdict(standing, self._common(key, place, at, limit, history))
        if standing is Standing.AGREED and self._differs(key, place, place.before, limit):
            low, _ = self._reader.queue_range(*key) or (0, 0)
            return PlaceVerdict(Standing.LOST, QueuePlace(low))
        return PlaceVerdict(standing, place)

    def _differs(self, key: TopicPartition, place: QueuePlace, before: Stored, limit: int) -> bool:
        """Return whether the queue has another record before a place, though the epochs agree.

        A queue that replay has not filled yet, or whose records are gone, does not say.
        """
        bounds = self._reader.queue_range(*key)
        if bounds is None or not names_writer(before):
            return False
        last = min(place.next, bounds[1]) - 1
        found = self._stored(key, last, limit) if last >= bounds[0] else None
        if found is None:
            return False
        if last == place.next - 1:
            return found.offset != before.offset
        return found.offset >= before.offset

    def _compare(
        self, key: TopicPartition, place: QueuePlace, before: Stored, limit: int
    ) -> PlaceVerdict:
        """Compare a place by the record's offset alone: the store or the place has no epochs."""
        bounds = self._reader.queue_range(*key)
        if bounds is None or place.next <= bounds[0]:
            return PlaceVerdict(Standing.AGREED, place)
        if place.next > bounds[1]:
            if self._reader.is_hastore:
                return PlaceVerdict(Standing.BEHIND, place)
            return PlaceVerdict(
                Standing.LOST, QueuePlace(bounds[1], self._stored(key, bounds[1] - 1, limit))
            )
        found = self._stored(key, place.next - 1, limit)
        if found is None or found.offset == before.offset:
            return PlaceVerdict(Standing.AGREED, place)
        return PlaceVerdict(Standing.LOST, QueuePlace(bounds[0]))
