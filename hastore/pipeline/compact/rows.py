"""Write rows of a DataFrame to staged Parquet files, from the Arrow batches of its tasks."""

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, Row

from hastore.errors import UsageError
from hastore.pipeline.export.writing import parquet_writer, row_groups
from hastore.pipeline.target import StagedFile, sync_file

STAGED = "staged string, rows bigint, bytes bigint"


@dataclass(frozen=True)
class RowWriter:
    """Writes each task's rows to a file of its own; a task without rows writes none."""

    target: str
    staging: str  # relative to the target
    compression: str

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches of one task; yield the file. Runs on an executor."""
        folder = Path(self.target, self.staging)
        if not folder.is_dir():
            raise UsageError(
                f"an executor does not see the target {self.target}: it must be a folder that the "
                "driver and all executors share, or the run was ended"
            )
        path = folder / f"part-{uuid.uuid4().hex}.parquet"
        rows = 0
        writer = None
        try:
            for table in row_groups(batches):
                writer = writer or parquet_writer(path, table.schema, self.compression)
                writer.write_table(table, row_group_size=table.num_rows)
                rows += table.num_rows
        finally:
            if writer is not None:
                writer.close()
        if writer is None:
            return
        sync_file(path)
        staged = os.path.join(self.staging, path.name)
        yield pa.RecordBatch.from_pydict(
            {"staged": [staged], "rows": [rows], "bytes": [path.stat().st_size]}
        )


def write_rows(frame: DataFrame, writer: RowWriter) -> Callable[[], list[Row]]:
    """Return the action that writes a DataFrame and returns a row for each staged file."""
    write: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] = writer
    return lambda: frame.mapInArrow(write, STAGED).collect()


def staged_files(rows: list[Row], folder: str) -> list[StagedFile]:
    """Return the files of `write_rows` with their final places in a folder of the target."""
    return [
        StagedFile(
            row.staged, os.path.join(folder, os.path.basename(row.staged)), row.rows, row.bytes
        )
        for row in rows
    ]
