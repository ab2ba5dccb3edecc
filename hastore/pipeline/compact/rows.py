"""Write the rows of a compaction to staged Parquet files, from the Arrow batches of its tasks.

A task writes one file of the rows that stay and, for a topic, one of the rows that have changed
since the run before. An empty body deletes its key, so it is in the changes only.
"""

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row

from hastore.errors import UsageError
from hastore.pipeline.export.writing import parquet_writer, row_groups
from hastore.pipeline.target import StagedFile, sync_file

FRESH = "fresh"  # the column that says whether this run has read the row from the log
STAGED = "changes boolean, staged string, rows bigint, bytes bigint"


@dataclass(frozen=True)
class RowWriter:
    """Writes each task's rows to files of its own; without rows it writes none."""

    target: str
    staging: str  # relative to the target
    compression: str
    changes: bool  # write the changes too
    deletions: bool  # with those that delete a key

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches of one task; yield a row for each file. Runs on an executor."""
        if not Path(self.target, self.staging).is_dir():
            raise UsageError(
                f"an executor does not see the target {self.target}: it must be a folder that the "
                "driver and all executors share, or the run was ended"
            )
        kinds = (False, True) if self.changes else (False,)
        files = {kind: _File(self, kind) for kind in kinds}
        try:
            for table in row_groups(batches):
                for file in files.values():
                    file.write(table)
        finally:
            for file in files.values():
                file.close()
        for kind, file in files.items():
            if file.rows:
                sync_file(file.path)
                size = file.path.stat().st_size
                yield pa.RecordBatch.from_pydict(
                    {
                        "changes": [kind],
                        "staged": [os.path.join(self.staging, file.path.name)],
                        "rows": [file.rows],
                        "bytes": [size],
                    }
                )

    def choose(self, table: pa.Table, changes: bool) -> pa.Table:
        """Return the rows that stay, or the changes."""
        chosen = pc.or_(pc.greater(pc.binary_length(table["value"]), 0), pc.is_null(table["key"]))
        if changes:
            chosen = table[FRESH] if self.deletions else pc.and_(chosen, table[FRESH])
        return table.filter(chosen).drop_columns([FRESH])


class _File:
    """A file that begins with its first row."""

    def __init__(self, owner: RowWriter, changes: bool) -> None:
        self._owner = owner
        self._changes = changes
        self._writer: pq.ParquetWriter | None = None
        self.path = Path(owner.target, owner.staging, f"part-{uuid.uuid4().hex}.parquet")
        self.rows = 0

    def write(self, table: pa.Table) -> None:
        chosen = self._owner.choose(table, self._changes)
        if not chosen.num_rows:
            return
        if self._writer is None:
            self._writer = parquet_writer(self.path, chosen.schema, self._owner.compression)
        self._writer.write_table(chosen, row_group_size=chosen.num_rows)
        self.rows += chosen.num_rows

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


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
        if row.changes == changes
    ]
