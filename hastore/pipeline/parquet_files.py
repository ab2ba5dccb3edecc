"""Export to files: cut the ranges into tasks, write the files of a task, merge small Parquet files.

A task writes a file for each topic and date, without the JVM, under staging and under names that no
other attempt of the task uses, and syncs them. Only the driver makes them visible. In a bucket of
S3 the names are final at once (places.py).

Each run and each task leaves some small files, and readers open them all. A merge is a commit of
its own: the new file becomes visible and the small ones are removed. Whoever lists the folder at
that very moment may see both or miss some; Delta has no such moment.
"""

import contextlib
import functools
import math
import os
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hastore.errors import StoreBrokenError, UsageError
from hastore.pipeline.json_columns import JsonColumns
from hastore.pipeline.object_target import ObjectTarget
from hastore.pipeline.orc_files import OrcWriter
from hastore.pipeline.places import Place, is_bucket, place_of
from hastore.pipeline.progress import JobProgress
from hastore.pipeline.read_positions import MARK_COLUMNS, RecordMark, mark_of
from hastore.pipeline.running import Start, run_tasks
from hastore.pipeline.target import StagedFile, Target, folder_of, needs_room
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import QueueRange, split_queues
from hastore.spark.options.source_options import SourceOptions
from hastore.spark.read.backend import Backend
from hastore.spark.read.planning import open_backend

TASK_BYTES = 128 * 1024 * 1024  # of records; by default the most of a task
LEAST_TASK_BYTES = 8 * 1024 * 1024
TASKS_PER_CORE = 3
_SAMPLES = 64  # records, at the start of a range, whose size is measured
_SAMPLED_QUEUES = 4  # of a topic


@dataclass(frozen=True)
class ExportPiece:
    """The ranges of one task, and their number of messages."""

    ranges: tuple[QueueRange, ...]

    @property
    def messages(self) -> int:
        """Return the number of queue offsets in the ranges."""
        return sum(span.end - span.start for span in self.ranges)


def plan(
    backend: Backend,
    ranges: Mapping[TopicPartition, OffsetRange],
    cores: int,
    task_bytes: int = TASK_BYTES,
) -> list[ExportPiece]:
    """Return the tasks. Each queue's ranges are in order, within a task and from task to task."""
    sizes = record_sizes(backend, ranges)
    total = sum(span.size * sizes[key.topic] for key, span in ranges.items())
    wanted = total / max(1, cores * TASKS_PER_CORE)
    most_bytes = min(max(wanted, LEAST_TASK_BYTES), task_bytes)
    limit = backend.limit_offset()
    pieces: list[ExportPiece] = []
    room = 0.0
    for key in sorted(ranges):
        size = sizes[key.topic]
        for span in split_queues(
            [(key, ranges[key])],
            min_partitions=None,
            max_records=max(1, math.floor(most_bytes / size)),
        ):
            placed = QueueRange(span.topic, span.partition, span.start, span.end, limit)
            span_bytes = (span.end - span.start) * size
            if span_bytes > room:
                pieces.append(ExportPiece((placed,)))
                room = most_bytes
            else:
                pieces[-1] = ExportPiece((*pieces[-1].ranges, placed))
            room -= span_bytes
    return pieces


def record_sizes(
    backend: Backend, ranges: Mapping[TopicPartition, OffsetRange]
) -> dict[str, float]:
    """Return the mean size of a record by topic, from the first records of its largest ranges."""
    by_topic: dict[str, list[tuple[TopicPartition, OffsetRange]]] = {}
    for key, span in ranges.items():
        by_topic.setdefault(key.topic, []).append((key, span))
    result = {}
    for topic, spans in by_topic.items():
        spans.sort(key=lambda one: one[1].size, reverse=True)
        sizes: list[int] = []
        for key, span in spans[:_SAMPLED_QUEUES]:
            end = min(span.end, span.start + _SAMPLES)
            sample = QueueRange(topic, key.partition, span.start, end, backend.limit_offset())
            for batch in backend.read_queue(sample, BatchBuilder(projection_of([Column.SIZE]))):
                sizes += batch.column(0).to_pylist()
        result[topic] = sum(sizes) / len(sizes) if sizes else 1024.0
    return result


# -- the files of one task -------------------------------------------------------------------------

ROW_GROUP_BYTES = 32 * 1024 * 1024  # of Arrow data; a writer holds at most this much
OPEN_FILES = 8  # of a task; store times that jump back and forth close files early
# The columns of a table that its files do not have: they are the names of folders, or in its log.
PARTITIONS = pa.schema([("topic", pa.string()), ("date", pa.date32())])
_DAYS = range(-719_162, 2_932_897)  # the years 1 to 9999: others are no dates of SQL
_NO_DATE = "__HIVE_DEFAULT_PARTITION__"  # what Spark writes and reads for null
_DAY_US = 24 * 3600 * 1_000_000
# Columns whose values repeat. A dictionary of bodies or keys would only cost time.
_DICTIONARY = (
    *("partition", "timestampType", "tags", "bornHost", "storeHost", "sysFlag"),
    *("topic", "date"),
)
_NO_STATISTICS = ("key", "value", "headers", "msgId", "_corrupt")


@dataclass(frozen=True)
class ExportLayout:
    """What tasks write: the columns, and where under the target."""

    target: str  # a path, or s3://BUCKET/FOLDER
    staging: str  # relative to the target
    columns: tuple[str, ...]  # of the source
    compression: str
    json_schema: str | None = None  # in Spark's JSON: decode the bodies
    keep_value: bool = True
    flat: bool = False  # all files in one folder, for Delta
    format: str = "parquet"  # or orc
    in_place: bool = False  # write files under their final names at once
    schema: pa.Schema | None = None  # of the files, for Iceberg: with topic and date, and numbers


@dataclass(frozen=True)
class WrittenFiles:
    """What a task has written: its files; for each range its rows, and its last record's marks."""

    files: tuple[StagedFile, ...]
    rows: tuple[int, ...]
    marks: tuple[RecordMark | None, ...]
    corrupt: int  # bodies that are not JSON of the schema
    missing: tuple[int, ...]  # offsets of the ranges without a message, as far as that is known


def write_piece(source: SourceOptions, layout: ExportLayout, piece: ExportPiece) -> WrittenFiles:
    """Write the messages of a task. Runs on an executor.

    Raises the backend's errors, StoreFullError, and StoreError if a bucket is not reached.
    """
    with needs_room(layout.target):
        return _write_piece(source, layout, piece)


def _write_piece(source: SourceOptions, layout: ExportLayout, piece: ExportPiece) -> WrittenFiles:
    staging = Path(layout.target, layout.staging)
    if not is_bucket(layout.target) and not staging.is_dir():
        raise UsageError(
            f"an executor does not see the target {layout.target}: it must be a folder that the "
            "driver and all executors share, or the run was ended"
        )
    columns = tuple(Column(name) for name in layout.columns)
    extra = [column for column in MARK_COLUMNS if column not in columns]
    new_builder = functools.partial(
        BatchBuilder,
        projection_of([*columns, *extra]),
        check_crcs=source.check_crcs,
        decompress=source.decompress,
    )
    rows: list[int] = []
    missing: list[int] = []
    marks: list[RecordMark | None] = []
    with open_backend(source) as backend, FileSet(layout) as files:
        for span in piece.ranges:
            last, count, builder = None, 0, new_builder()
            for batch in backend.read_queue(span, builder):
                last = mark_of(batch) or last
                count += batch.num_rows
                files.add(span, batch)
            rows.append(count)
            # A batch that stays one row stands for as many offsets as its messages.
            missing.append(0 if builder.left_whole else span.end - span.start - count)
            marks.append(last)
        written = files.close()
    return WrittenFiles(
        tuple(written), tuple(rows), tuple(marks), files.corrupt, tuple(missing)
    )


@dataclass
class OpenFile:
    """A file that is being written, and rows that are not in it yet."""

    staged: str  # relative to the target
    final: str
    partition: tuple[tuple[str, str | None], ...]
    writer: pq.ParquetWriter | OrcWriter
    rows: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, which are written when there are enough of them for a row group."""
        self.waiting.append(batch)
        self.waiting_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self.waiting_bytes >= ROW_GROUP_BYTES:
            self.flush()

    def with_partition(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a batch with topic and date as columns, too."""
        for name, value in self.partition:
            one = pa.array([value]).cast(PARTITIONS.field(name).type)
            column = one.take(pa.repeat(0, batch.num_rows))
            batch = batch.append_column(name, column)
        return batch

    def flush(self) -> None:
        """Write the rows that wait."""
        if self.waiting:
            table = pa.Table.from_batches(self.waiting)
            self.writer.write_table(table, row_group_size=table.num_rows)
            self.waiting, self.waiting_bytes = [], 0


class Shape:
    """Turns the source's batches into those of the files: chosen columns, decoded bodies."""

    def __init__(self, columns: Sequence[str], json_schema: str | None, keep_value: bool) -> None:
        value = Column.VALUE.value
        self._kept = [name for name in columns if keep_value or name != value]
        self._json = None if json_schema is None else JsonColumns(json_schema)
        self.corrupt = 0

    def schema(self) -> pa.Schema:
        """Return the schema of the files."""
        arrow = projection_of(Column(name) for name in self._kept).arrow_schema()
        return arrow if self._json is None else pa.schema([*arrow, *self._json.schema])

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of a batch of the source in the shape of the files."""
        kept = batch.select(self._kept)
        if self._json is None:
            return kept
        decoded = self._json.decode(batch.column(Column.VALUE.value).to_pylist())
        self.corrupt += batch.num_rows - decoded[-1].null_count
        return pa.RecordBatch.from_arrays([*kept.columns, *decoded], schema=self.schema())


def table_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of an export's table: that of its files, then topic and date."""
    return pa.schema([*schema, *PARTITIONS])


Key = TypeVar("Key", bound=Hashable)


class TaskFiles(Generic[Key]):
    """The files of one task by a key, of which OPEN_FILES at most are open at a time."""

    def __init__(self, place: Place) -> None:
        """Take the place of the files."""
        self._place = place
        self._open: dict[Key, OpenFile] = {}  # the least recently used first
        self._closed: list[StagedFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._place.named():
            for file in self._open.values():
                file.writer.close()

    def close(self) -> list[StagedFile]:
        """Close and sync all files, and return them."""
        with self._place.named():
            for key in list(self._open):
                self._finish(key)
        return self._closed

    def _file(self, key: Key, begin: Callable[[], OpenFile]) -> OpenFile:
        """Return the open file of a key; `begin` opens one if there is none."""
        found = self._open.pop(key, None)
        if found is None:
            if len(self._open) >= OPEN_FILES:
                self._finish(next(iter(self._open)))
            found = begin()
        self._open[key] = found
        return found

    def _finish(self, key: Key) -> None:
        file = self._open[key]
        file.flush()
        file.writer.close()
        size = self._place.finish(file.staged)
        del self._open[key]
        self._closed.append(StagedFile(file.staged, file.final, file.rows, size, file.partition))


class FileSet(TaskFiles[tuple[str, int]]):
    """The files of one task, by topic and date."""

    def __init__(self, layout: ExportLayout) -> None:
        super().__init__(place_of(layout.target))
        self._layout = layout
        self._attempt = uuid.uuid4().hex[:16]
        self._count = 0
        self._shape = Shape(layout.columns, layout.json_schema, layout.keep_value)

    @property
    def corrupt(self) -> int:
        """Return the number of bodies that are not JSON of the schema."""
        return self._shape.corrupt

    def add(self, span: QueueRange, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch, each to the file of its date."""
        kept = self._shape.apply(batch)
        with self._place.named():
            for day, part in split_by_day(kept, batch.column(Column.TIMESTAMP.value)):
                schema = self._layout.schema or kept.schema
                begin = functools.partial(self._begin, span.topic, day, schema)
                file = self._file((span.topic, day), begin)
                file.add(part if self._layout.schema is None else file.with_partition(part))

    def _begin(self, topic: str, day: int, schema: pa.Schema) -> OpenFile:
        name = f"part-{self._attempt}-{self._count:04}.{self._layout.format}"
        self._count += 1
        date = str(np.datetime64(day, "D")) if day in _DAYS else None
        folder = os.path.join(folder_of(topic), f"date={date or _NO_DATE}")
        final = name if self._layout.flat else os.path.join(folder, name)
        staged = os.path.join(self._layout.staging, final if self._layout.in_place else name)
        if self._layout.in_place:
            final = staged
        path, compression = self._place.begin(staged), self._layout.compression
        writer: pq.ParquetWriter | OrcWriter
        if self._layout.format == "orc":
            writer = OrcWriter(path, compression, self._place.filesystem)
        else:
            writer = parquet_writer(path, schema, compression, self._place.filesystem)
        return OpenFile(staged, final, (("topic", topic), ("date", date)), writer)


def parquet_writer(
    path: str | Path, schema: pa.Schema, compression: str, filesystem: Any = None
) -> pq.ParquetWriter:
    """Return a writer with the settings of all exported files; None is the local file system."""
    return pq.ParquetWriter(
        str(path),
        schema,
        compression=compression,
        use_dictionary=[name for name in schema.names if name in _DICTIONARY],
        write_statistics=[name for name in schema.names if name not in _NO_STATISTICS],
        store_schema=False,
        filesystem=filesystem,
    )


def row_groups(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield the rows of batches as tables of about ROW_GROUP_BYTES."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if batch.num_rows:
            waiting.append(batch)
            size += batch.nbytes
        if size >= ROW_GROUP_BYTES:
            yield pa.Table.from_batches(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def split_by_day(
    batch: pa.RecordBatch, timestamps: pa.Array
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (days since 1970, rows) of a batch, by the UTC date of each row's store time."""
    times_us = timestamps.view(pa.int64()).to_numpy()
    if not len(times_us):
        return
    first, last = int(times_us.min()) // _DAY_US, int(times_us.max()) // _DAY_US
    if first == last:
        yield first, batch
        return
    days = times_us // _DAY_US
    for day in np.unique(days).tolist():
        yield day, batch.filter(pc.equal(pa.array(days), day))


# -- merging ---------------------------------------------------------------------------------------

GROUPS_PER_COMMIT = 16


@dataclass(frozen=True)
class Group:
    """Files of one folder that become one file."""

    names: tuple[str, ...]  # relative to the target


@dataclass(frozen=True)
class MergePlace:
    """Where a merging task reads and writes."""

    target: str  # a path, or s3://BUCKET/FOLDER
    staging: str  # relative to the target
    compression: str
    in_place: bool  # as in ExportLayout


def merge_files(
    start: Start,
    target: Target | ObjectTarget,
    compression: str,
    file_bytes: int,
    progress: JobProgress,
) -> tuple[int, int]:
    """Merge files of less than half of `file_bytes`; return how many became how many.

    Spark is started only if there are such files.
    """
    groups = small_files(target.files(), file_bytes)
    if not groups:
        return 0, 0
    place = MergePlace(target.root, target.staging_name, compression, target.in_place)
    progress.begin("merge", sum(len(group.names) for group in groups), "files")
    merged = made = 0
    done: list[tuple[Group, StagedFile]] = []

    def commit() -> None:
        if done:
            removed = [name for group, _ in done for name in group.names]
            target.commit(target.state, [file for _, file in done], removed=removed)
            done.clear()

    work = functools.partial(merge_group, place)
    with contextlib.closing(run_tasks(start(), "merge", work, groups)) as results:
        for group, file in results:
            done.append((group, file))
            merged, made = merged + len(group.names), made + 1
            progress.advance(len(group.names))
            if len(done) >= GROUPS_PER_COMMIT:
                commit()
    commit()
    return merged, made


def small_files(files: Mapping[str, int], file_bytes: int) -> list[Group]:
    """Return groups of two or more small files in one folder, of `file_bytes` at most together."""
    groups: list[Group] = []
    waiting: dict[str, tuple[list[str], int]] = {}
    for name, size in files.items():
        if size >= file_bytes // 2 or not os.path.basename(name).startswith("part-"):
            continue
        folder = os.path.dirname(name)
        names, total = waiting.get(folder, ([], 0))
        if names and total + size > file_bytes:
            groups.append(Group(tuple(names)))
            names, total = [], 0
        waiting[folder] = ([*names, name], total + size)
    groups += [Group(tuple(names)) for names, _ in waiting.values()]
    return [group for group in groups if len(group.names) > 1]


def merge_group(place: MergePlace, group: Group) -> StagedFile:
    """Write one file with the rows of a group. Runs on an executor.

    Raises StoreFullError, and StoreError if a bucket is not reached.
    """
    with needs_room(place.target), place_of(place.target).named():
        return _merge_group(place, group)


def _merge_group(place: MergePlace, group: Group) -> StagedFile:
    folder = os.path.dirname(group.names[0])
    name = f"part-{uuid.uuid4().hex[:16]}-merged.parquet"
    files = place_of(place.target)
    where = {"filesystem": files.filesystem}
    final = os.path.join(folder, name)
    staged = final if place.in_place else os.path.join(place.staging, name)
    schema = pq.read_schema(files.path(group.names[0]), **where)
    expected = written = 0
    with contextlib.closing(
        parquet_writer(files.path(staged), schema, place.compression, files.filesystem)
    ) as writer:
        for table in row_groups(_batches(place, group)):
            writer.write_table(table, row_group_size=table.num_rows)
            written += table.num_rows
    for one in group.names:
        expected += pq.read_metadata(files.path(one), **where).num_rows
    if written != expected:
        raise StoreBrokenError(
            f"{place.target}: the files of {folder} have {expected} rows, but {written} were read"
        )
    return StagedFile(staged, final, written, files.finish(staged))


def _batches(place: MergePlace, group: Group) -> Iterator[pa.RecordBatch]:
    files = place_of(place.target)
    for name in group.names:
        with pq.ParquetFile(files.path(name), filesystem=files.filesystem) as file:
            yield from file.iter_batches(batch_size=65_536)
