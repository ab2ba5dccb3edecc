"""The classes that Spark calls to write: made on the driver, pickled, and run in tasks."""

import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from hastore.errors import ClientError, UsageError
from hastore.spark.sink.options import (
    check_append,
    check_columns,
    ignored_columns,
    parse_sink_options,
)
from hastore.spark.worker import short_errors

if TYPE_CHECKING:
    import pyarrow as pa

LOGGER = logging.getLogger(__name__)

QUERY_ID = "sql.streaming.queryId"
_BATCH_ID = "streaming.sql.batchId"


@dataclass(frozen=True)
class RowsWritten(WriterCommitMessage):
    """What a task reports to the driver: the rows of its partition, all confirmed."""

    rows: int


class HastoreWriter(DataSourceArrowWriter):
    """A batch write. All attempts of a task have the same identity: see `hastore.spark.sink`."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        from hastore.spark.sink.task import check_nodes

        check_append(overwrite, streaming=False)
        self._options = parse_sink_options(options, streaming=False)
        self._columns = check_columns(schema, self._options.topic, self._options.default_topic)
        ignored = ignored_columns(schema)
        if ignored is not None:
            LOGGER.warning("%s", ignored)
        self._write_id = self._options.write_id or uuid.uuid4().hex
        check_nodes(self._options)

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> RowsWritten:
        """Write the rows of one partition; returns when all are confirmed. Runs on an executor."""
        from hastore.spark.sink.records import batch_task
        from hastore.spark.sink.task import write_task

        partition = _context().partitionId()
        identity = batch_task(self._write_id, partition)
        with short_errors():
            rows = write_task(self._options, self._columns, identity, partition, iterator)
            return RowsWritten(rows)


class HastoreStreamWriter(DataSourceStreamArrowWriter):
    """A stream's write. Spark makes one for each batch, on the driver."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool) -> None:
        check_append(overwrite, streaming=True)
        self._options = parse_sink_options(options, streaming=True)
        self._columns = check_columns(schema, self._options.topic, self._options.default_topic)
        self._ignored = ignored_columns(schema)

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> RowsWritten:
        """Write the rows of one partition of a batch; returns when all are confirmed."""
        from hastore.spark.sink.records import stream_task
        from hastore.spark.sink.task import write_task

        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(_BATCH_ID)
        partition = context.partitionId()
        with short_errors():
            if query is None or batch is None:
                raise ClientError(
                    f"Spark did not tell the task its query and batch ({QUERY_ID}, {_BATCH_ID}); "
                    "without them a repeated task would write its rows twice"
                )
            if self._ignored is not None and int(batch) == partition == 0:  # once a query
                LOGGER.warning("%s", self._ignored)
            identity = stream_task(query, int(batch), partition)
            rows = write_task(
                self._options, self._columns, identity, partition, iterator,
                is_new=int(batch) == 0,
            )  # fmt: skip
            return RowsWritten(rows)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise UsageError("a write to format 'hastore' runs in a task of Spark only")
    return context
