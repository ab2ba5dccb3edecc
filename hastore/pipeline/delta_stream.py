"""Streams into Delta tables without Spark's own Delta: `foreachBatch(DeltaBatches(TARGET))`.

Tasks write Parquet files into the table's folder or bucket, under their final names, and the driver
adds them by one commit of the table. That sets the number of the batch as the version of an
application, which is the query: Spark keeps its id in the checkpoint. So a batch that Spark repeats
after a kill is found in the table, and its rows are there once. Spark's own Delta does the same.

A second application, the query's id with PLAN, has a digest of what the checkpoint says of the
batch: when it was planned, and where it ends in its sources. Spark writes that before it runs a
batch, and repeats the batch by it. So a batch of the same number with another plan is not that
batch again: the checkpoint was set back.
"""

import datetime
import functools
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from hastore.errors import HastoreError, UsageError
from hastore.pipeline.delta import DeltaLog
from hastore.pipeline.delta_objects import options_of
from hastore.pipeline.parquet_files import OpenFile, TaskFiles, parquet_writer
from hastore.pipeline.places import Bucket, is_bucket, place_of
from hastore.pipeline.running import check_session
from hastore.pipeline.target import (
    StagedFile,
    check_compression,
    local_path,
    needs_room,
    sync_file,
)
from hastore.spark.writer import QUERY_ID

log = logging.getLogger(__name__)
PLAN = "-plan"
_WRITTEN = "name string, rows bigint, bytes bigint, partition string"
Values = tuple[Any, ...]  # of the columns by which a table is partitioned


@dataclass(frozen=True)
class DeltaBatches:
    """Writes each batch of a query once; give it to `foreachBatch` of one query.

    `target` is a folder that the driver and all executors share, or s3://BUCKET/FOLDER. The first
    batch with rows makes the table, partitioned by some columns: texts, whole numbers, dates or
    booleans. Later batches, of any query, must have the same columns.
    """

    target: str
    partition_by: Sequence[str] = ()
    compression: str = "snappy"

    def __post_init__(self) -> None:
        """Raise UsageError for a wrong compression or target."""
        check_compression(self.compression)
        self._root()

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write a batch; return at once if the table has it already.

        Raises UsageError for other columns than the table's, for a batch before the last one that
        the table has of the query, and for other messages under its number, StoreFullError,
        StoreError, and HastoreError if the commit failed. Then let Spark repeat the batch, by a
        restart.
        """
        from deltalake.exceptions import DeltaError

        session = frame.sparkSession
        check_session(session)
        query = session.sparkContext.getLocalProperty(QUERY_ID)
        if query is None:
            raise HastoreError(
                "Spark did not say which query the batch is of; call DeltaBatches by foreachBatch "
                "only: without the query a repeated batch would be there twice"
            )
        root = self._root()
        delta_log = DeltaLog(root, options_of(Bucket(root)) if is_bucket(root) else None)
        schema = to_arrow_schema(frame.schema.toNullable(), timezone="UTC")
        mark = mark_of(plan_of(session, query, batch_id), batch_id)
        try:
            table = delta_log.table()
            if table is not None:
                done = table.transaction_version(query)
                if done is not None and done > batch_id:
                    raise _set_back(root, query, batch_id, done)
                if done == batch_id:
                    there = table.transaction_version(query + PLAN)
                    if is_of_another(there, mark):
                        raise _set_back(root, query, batch_id, done)
                    return
                self._check_table(table, schema)
            files = self._write(frame, schema, root)
            if files:
                marks = {query: batch_id} | ({} if mark is None else {query + PLAN: mark})
                delta_log.add(table, marks, schema, self.partition_by, files)
        except DeltaError as error:
            raise HastoreError(
                f"the commit of batch {batch_id} to the Delta table {root} failed: {error}. Start "
                "the query again: it finds out whether the commit took place"
            ) from error

    def _root(self) -> str:
        return Bucket(self.target).url if is_bucket(self.target) else str(local_path(self.target))

    def _check_table(self, table: Any, schema: pa.Schema) -> None:
        from deltalake import Schema

        there, given = table.schema(), Schema.from_arrow(schema)
        if there != given:
            raise UsageError(
                f"the Delta table {self.target} has other columns than the batch: "
                f"{there.to_json()} instead of {given.to_json()}; select these, or name another "
                "table"
            )
        by = table.metadata().partition_columns
        if by != list(self.partition_by):
            raise UsageError(
                f"the Delta table {self.target} is partitioned by {by}; give these as partition_by"
            )

    def _write(self, frame: DataFrame, schema: pa.Schema, root: str) -> list[StagedFile]:
        """Let the tasks write the rows; return the files, which no reader sees yet."""
        for name in self.partition_by:
            kind = schema.field(name).type if name in schema.names else None
            if kind not in _TEXTS:
                raise UsageError(
                    f"partition_by has {name!r}, and the batch has no column of that name that is "
                    "a text, a whole number, a date or a boolean"
                )
        by = set(self.partition_by)
        if len(by) < len(self.partition_by) or by.issuperset(schema.names):
            raise UsageError(
                f"partition_by is {list(self.partition_by)}: it names each column once, and at "
                "least one column of the batch must be left for the files, or rows would be lost"
            )
        if not is_bucket(root):
            os.makedirs(root, exist_ok=True)
        write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = _BatchWriter(
            root, schema, tuple(self.partition_by), self.compression
        )
        rows = frame.mapInArrow(write, _WRITTEN).collect()
        if rows and not is_bucket(root):
            sync_file(root)  # the names of the files
        return [
            StagedFile(
                row["name"],
                row["name"],
                row["rows"],
                row["bytes"],
                tuple(json.loads(row["partition"])),
            )
            for row in rows
        ]


def _set_back(root: str, query: str, batch_id: int, done: int) -> UsageError:
    """Return the error of a batch whose number the table has had, though it is not that batch.

    It may have other rows than the batch of that number: what came since would be left out.
    """
    has = f"its batch {done}, and Spark repeats only the last one"
    if done == batch_id:
        has = "a batch of that number that was planned before"
    return UsageError(
        f"batch {batch_id} of the query {query} is not written: the Delta table {root} has "
        f"{has}. So the query's checkpoint was set back, or copied for a second query, and "
        "messages that came since would be left out. Start the query with a new checkpoint, and "
        "the startingOffsets to go on from"
    )


def plan_of(session: SparkSession, query: str, batch_id: int) -> str | None:
    """Return what the checkpoint says of a batch, in Spark's JSON.

    That are its time and the offsets at which it ends: of files these are numbers that do not tell
    which ones. None if this Spark does not tell: its classes are not a public interface.
    """
    jvm: Any = session._jvm
    try:
        running = session._jsparkSession.sharedState().activeStreamingQueries()
        found = running.get(jvm.java.util.UUID.fromString(query))
        if found is None:
            return None
        path = jvm.org.apache.hadoop.fs.Path(f"{found.resolvedCheckpointRoot()}/offsets/{batch_id}")
        stream = path.getFileSystem(session.sparkContext._jsc.hadoopConfiguration()).open(path)
        try:
            return str(jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()
    except (Py4JError, TypeError) as unknown:  # TypeError: a package of that name, and no class
        _warn_once(query, str(unknown))
        return None


@functools.cache
def _warn_once(query: str, why: str) -> None:
    log.warning(
        "the plans of the batches of query %s are not known, so a checkpoint that is set back by "
        "exactly one batch is not noticed: %s", query, why,
    )  # fmt: skip


def mark_of(plan: str | None, batch_id: int) -> int | None:
    """Return the number under which a table keeps a batch's plan; None if that is not known.

    It has the batch's own: an older version of hastore writes batches without it.
    """
    if plan is None:
        return None
    digest = int.from_bytes(hashlib.sha256(plan.encode()).digest()[:4], "big")
    return (batch_id % 2**31) << 32 | digest


def is_of_another(there: int | None, mark: int | None) -> bool:
    """Whether a table's mark is one of the same batch with another plan."""
    if there is None or mark is None:
        return False
    return there != mark and there >> 32 == mark >> 32


@dataclass(frozen=True)
class _BatchWriter:
    """Writes the rows of each task to files of its own, one for each partition of the table."""

    root: str
    schema: pa.Schema  # of the table
    partition_by: tuple[str, ...]
    compression: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches of one task; yield a row for each file. Runs on an executor.

        Raises StoreFullError, and StoreError if a bucket is not reached.
        """
        if not is_bucket(self.root) and not Path(self.root).is_dir():
            raise UsageError(
                f"an executor does not see the table {self.root}: it must be a folder that the "
                "driver and all executors share"
            )
        with needs_room(self.root), place_of(self.root).named(), _Files(self) as files:
            for batch in batches:
                if batch.num_rows:
                    # Spark gives times in the session's zone, which means the same moments.
                    files.add(batch.cast(self.schema))
            written = files.close()
        for file in written:
            yield pa.RecordBatch.from_pydict(
                {
                    "name": [file.final],
                    "rows": [file.rows],
                    "bytes": [file.size],
                    "partition": [json.dumps(file.partition)],
                }
            )


class _Files(TaskFiles[Values]):
    """The files of one task, by the values of the columns that partition the table."""

    def __init__(self, owner: _BatchWriter) -> None:
        super().__init__(place_of(owner.root))
        self._owner = owner
        kept = [field for field in owner.schema if field.name not in owner.partition_by]
        self._schema = pa.schema(kept)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch, each to the file of its values."""
        for values, part in split_by_values(batch, self._owner.partition_by):
            file = self._file(values, functools.partial(self._begin, values))
            file.add(part.select(self._schema.names))

    def _begin(self, values: Values) -> OpenFile:
        name = f"part-{uuid.uuid4().hex}.parquet"
        writer = parquet_writer(
            self._place.begin(name), self._schema, self._owner.compression, self._place.filesystem
        )
        texts = (
            None if value is None else _TEXTS[self._owner.schema.field(column).type](value)
            for column, value in zip(self._owner.partition_by, values, strict=True)
        )
        partition = tuple(zip(self._owner.partition_by, texts, strict=True))
        return OpenFile(name, name, partition, writer)


def split_by_values(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Yield (values of some columns, rows that have them) of a batch."""
    if not columns:
        yield (), batch
        return
    found = pa.Table.from_batches([batch.select(list(columns))]).group_by(list(columns))
    for row in found.aggregate([]).to_pylist():
        mask = None
        for column in columns:
            array, value = batch.column(column), row[column]
            if value is None:
                same = pc.is_null(array)
            else:
                same = pc.fill_null(pc.equal(array, pa.scalar(value, array.type)), False)
            mask = same if mask is None else pc.and_(mask, same)
        yield tuple(row[column] for column in columns), batch.filter(mask)


def _of_a_boolean(value: bool) -> str:
    return str(value).lower()


# How Delta writes values as texts.
_TEXTS: dict[pa.DataType, Callable[[Any], str]] = {
    pa.string(): str,
    pa.bool_(): _of_a_boolean,
    pa.date32(): datetime.date.isoformat,
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.int64()), str),
}
