"""The files of `compact`: what a task writes, and how the next run reads them.

In a bucket Spark cannot read without jars of its own, so there the files are read by pyarrow, and
written under their final names at once (object_target.py).
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession

from hastore.errors import UsageError
from hastore.pipeline.parquet_files import parquet_writer, row_groups
from hastore.pipeline.places import Place, is_bucket, place_of
from hastore.pipeline.target import StagedFile, needs_room, spark_path
from hastore.spark.sink.sendable import SendableRows

FRESH = "fresh"  # the column that says whether this run has read the row from the log
STAGED = (
    "changes boolean, staged string, rows bigint, with_key bigint, bytes bigint, dropped bigint, "
    "left_out bigint"
)
_READ_ROWS = 65_536
# Whatever the session says: rows that are left out would be lost, and times must not change.
_AS_WRITTEN = {
    "ignoreCorruptFiles": "false",
    "ignoreMissingFiles": "false",
    "datetimeRebaseMode": "CORRECTED",
}
_SHOWN_BYTES = 100  # of a key, in an error


@dataclass(frozen=True)
class RowWriter:
    """Writes each task's rows to files of its own; without rows it writes none."""

    target: str  # a path, or s3://BUCKET/FOLDER
    staging: str  # relative to the target
    compression: str
    changes: bool  # write the changes too
    deletions: bool  # with those that delete a key
    changes_staging: str | None = None  # None: as the other files
    topic: str = ""  # of the messages
    leaves_out: bool = False  # changes that cannot be sent; without it they are refused

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches of one task; yield a row for each file. Runs on an executor.

        Raises StoreFullError, StoreError if a bucket is not reached, and UsageError for a change
        that cannot be sent.
        """
        with needs_room(self.target):
            yield from self._write(batches)

    def _write(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not is_bucket(self.target) and not Path(self.target, self.staging).is_dir():
            raise UsageError(
                f"an executor does not see the target {self.target}: it must be a folder that the "
                "driver and all executors share, or the run was ended"
            )
        kinds = (False, True) if self.changes else (False,)
        place = place_of(self.target)
        files = {kind: _File(self, place, kind) for kind in kinds}
        try:
            for table in row_groups(batches):
                for file in files.values():
                    file.write(table)
        finally:
            for file in files.values():
                file.close()
        for kind, file in files.items():
            if file.rows or file.left_out:
                with place.named():
                    size = place.finish(file.name) if file.rows else 0
                yield pa.RecordBatch.from_pydict(
                    {
                        "changes": [kind],
                        "staged": [file.name],
                        "rows": [file.rows],
                        "with_key": [file.with_key],
                        "bytes": [size],
                        "dropped": [file.dropped],
                        "left_out": [file.left_out],
                    }
                )

    def choose(self, table: pa.Table, changes: bool) -> pa.Table:
        """Return the rows that stay, or the changes."""
        filled = pc.greater(pc.fill_null(pc.binary_length(table["value"]), 0), 0)
        chosen = pc.or_(filled, pc.is_null(table["key"]))
        if changes:
            chosen = table[FRESH] if self.deletions else pc.and_(chosen, table[FRESH])
        return table.filter(chosen).drop_columns([FRESH])


class _File:
    """A file that begins with its first row."""

    def __init__(self, owner: RowWriter, place: Place, changes: bool) -> None:
        self._owner = owner
        self._place = place
        self._changes = changes
        self._writer: pq.ParquetWriter | None = None
        folder = owner.changes_staging if changes else None
        self.name = os.path.join(folder or owner.staging, f"part-{uuid.uuid4().hex}.parquet")
        self.rows = self.with_key = 0
        self._sendable = Fitting(owner.topic, owner.leaves_out).rows() if changes else None

    @property
    def dropped(self) -> int:
        """Return how many headers and tags of changes are not sent."""
        return self._sendable.dropped if self._sendable else 0

    @property
    def left_out(self) -> int:
        """Return how many changes are not sent."""
        return self._sendable.left_out if self._sendable else 0

    def write(self, table: pa.Table) -> None:
        chosen = self._owner.choose(table, self._changes)
        if self._sendable:
            chosen = self._sendable.apply(chosen)
        if not chosen.num_rows:
            return
        with self._place.named():
            if self._writer is None:
                path = self._place.begin(self.name)
                self._writer = parquet_writer(
                    path, chosen.schema, self._owner.compression, self._place.filesystem
                )
            self._writer.write_table(chosen, row_group_size=chosen.num_rows)
        self.rows += chosen.num_rows
        self.with_key += chosen.num_rows - chosen["key"].null_count

    def close(self) -> None:
        if self._writer is not None:
            with self._place.named():
                self._writer.close()


@dataclass(frozen=True)
class Fitting:
    """Makes changes fit for their topic. The files of the target have all that is not sent.

    It is done before the commit that fixes them: one that the sink refuses would stop every run.
    """

    topic: str  # of the messages
    leaves_out: bool

    def rows(self) -> SendableRows:
        """Return what makes the rows of one file fit."""
        return SendableRows(self._refuse)

    def _refuse(self, row: Mapping[str, Any], problem: str) -> None:
        if self.leaves_out:
            return
        problem = problem.removesuffix("; encode it, for example with base64()")  # it is stored so
        key = row["key"] and row["key"][:_SHOWN_BYTES]
        raise UsageError(
            f"the message {row['offset']} of {self.topic}-{row['partition']} (key {key!r}) cannot "
            f"be written to the topic of --to-topic: {problem}. Give --allow-data-loss to leave it "
            "out there; the files of the target have it"
        )

    # Changes of an older version, which has committed them as they were; a task has one file.

    def count(self, frame: DataFrame) -> Callable[[], list[Row]]:
        """Return the action that counts for each file what is dropped and left out.

        It raises UsageError for a row that is refused.
        """
        return lambda: frame.mapInArrow(self._count, "dropped bigint, left_out bigint").collect()

    def fit(self, frame: DataFrame, ddl: str) -> DataFrame:
        """Return the rows as they can be sent."""
        return frame.mapInArrow(self._fit, ddl)

    def _count(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = self.rows()
        for batch in batches:
            rows.apply(pa.Table.from_batches([batch]))
        yield pa.RecordBatch.from_pydict({"dropped": [rows.dropped], "left_out": [rows.left_out]})

    def _fit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = self.rows()
        for batch in batches:
            yield from rows.apply(pa.Table.from_batches([batch])).to_batches()


def write_rows(frame: DataFrame, writer: RowWriter) -> Callable[[], list[Row]]:
    """Return the action that writes a DataFrame and returns a row for each staged file."""
    write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = writer
    return lambda: frame.mapInArrow(write, STAGED).collect()


def staged_files(rows: list[Row], folder: str, *, changes: bool) -> list[StagedFile]:
    """Return the files of `write_rows` of one kind, with their final places in a folder."""
    return [
        StagedFile(
            row.staged, os.path.join(folder, os.path.basename(row.staged)), row.rows, row.bytes
        )
        for row in rows
        if row.changes == changes and row.rows
    ]


@dataclass(frozen=True)
class RowReader:
    """Reads files of a bucket: a task reads those whose places in the list it is given."""

    target: str
    names: tuple[str, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files, in their order. Runs on an executor. Raises StoreError."""
        place = place_of(self.target)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                with place.named():
                    yield from self._read(place, self.names[number])

    def _read(self, place: Place, name: str) -> Iterator[pa.RecordBatch]:
        with contextlib.closing(
            pq.ParquetFile(place.path(name), filesystem=place.filesystem)
        ) as file:
            for group in range(file.num_row_groups):  # a group is not larger than a task may hold
                yield from file.iter_batches(batch_size=_READ_ROWS, row_groups=[group])


def read_rows(spark: SparkSession, target: str, names: Sequence[str], ddl: str) -> DataFrame:
    """Return the rows of a target's files. In a bucket each file is a task, in the list's order."""
    if not is_bucket(target):
        paths = [spark_path(Path(target, name)) for name in names]
        return spark.read.options(**_AS_WRITTEN).schema(ddl).parquet(*paths)
    reader: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = RowReader(
        target, tuple(names)
    )
    return spark.range(0, len(names), 1, len(names)).mapInArrow(reader, ddl)
