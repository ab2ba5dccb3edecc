"""The class that Spark calls for a stream; `source` loads it only for a stream."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from hastore.spark.arrow.schema import project
from hastore.spark.options.partitions import QueueRange
from hastore.spark.options.source_options import StreamOptions, parse_stream_options
from hastore.spark.read.planning import open_backend, open_head
from hastore.spark.stream_driver import StreamDriver
from hastore.spark.stream_offsets import from_json, next_offsets, to_json
from hastore.spark.worker import (
    check_zone,
    end_quietly,
    end_with_parent,
    session_zone,
    short_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa


class HastoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark keeps one object on the driver for a run, and sends others to the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._raw = options
        self._schema = schema
        self._parsed: StreamOptions | None = None
        self._driver: StreamDriver | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins."""
        with short_errors():
            return to_json(self._drive().initial_offset())

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of the options; `latestOffset` applies all of them."""
        with short_errors():
            admission = self._options.admission
            if admission.max_offsets is not None:
                return ReadMaxRows(admission.max_offsets)
            if admission.min_offsets is not None:
                return ReadMinRows(admission.min_offsets)
            return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next batch ends; the given start if there is nothing new.

        Spark passes ReadAllAvailable, which disables the options' limits, for the trigger `once`.
        """
        with short_errors():
            begin = from_json(start)
            limited = not isinstance(limit, ReadAllAvailable)
            end = self._drive().latest_offset(begin, limited=limited)
            return start if end is begin else to_json(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the queues in Kafka's form, for the query's progress."""
        with short_errors():
            ends = self._drive().latest_ends()
            return None if ends is None else next_offsets(ends)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of a run that ends by itself."""
        with short_errors():
            self._drive().prepare_available_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut a batch into tasks."""
        with short_errors():
            return self._drive().tasks(from_json(start), from_json(end))

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Yield the rows of one task as Arrow batches. Runs on an executor."""
        from hastore.spark.arrow.batch import BatchBuilder

        assert isinstance(partition, QueueRange)
        end_quietly()
        with short_errors():
            source = self._options.source
            check_zone(source.assumed_zone)
            builder = BatchBuilder(
                project(self._schema), check_crcs=source.check_crcs,
                decompress=source.decompress, wanted=source.wanted,
            )  # fmt: skip
            with open_backend(source) as backend:
                yield from backend.read_queue(partition, builder)

    def stop(self) -> None:
        """Close files and sockets."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    @property
    def _options(self) -> StreamOptions:
        if self._parsed is None:
            self._parsed = parse_stream_options(self._raw, session_zone())
        return self._parsed

    def _drive(self) -> StreamDriver:
        if self._driver is None:
            end_with_parent()
            project(self._schema)  # refuses a wrong schema before the first batch
            self._driver = StreamDriver(open_head(self._options.source), self._options)
        return self._driver
