"""The Spark data source `hastore`, over a store's directory or over running nodes.

Spark imports this module in every application that uses any Python data source (see
`pyspark_hastore`). So it imports numpy, pyarrow, the store and the client only when a hastore query
is planned or read. Spark pickles the objects of these classes and sends them to other processes:
they hold options and a schema, never files or sockets.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

try:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
except ImportError:  # pyspark 4.1: batch reads work
    SupportsTriggerAvailableNow = object  # type: ignore[assignment, misc]

from hastore.spark.worker import end_quietly, session_zone, short_errors, zone_of_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.streaming.datasource import ReadLimit

    from hastore.spark.options.source_options import SourceOptions
    from hastore.spark.options.stream_options import StreamOptions
    from hastore.spark.read.backend import Backend
    from hastore.spark.read.places import Head
    from hastore.spark.stream.driver import StreamDriver


class HastoreDataSource(DataSource):
    """The source and the sink of `spark.read`, `readStream`, `write` and `writeStream`.

    Columns, options and errors have the names that they have in Spark's Kafka source.
    """

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "hastore"

    def schema(self) -> StructType:
        """Return the columns.

        Raises UsageError for wrong options, so that `load()` already reports them.
        """
        from hastore.spark.arrow.schema import log_schema, source_schema
        from hastore.spark.options.source_options import Mode
        from hastore.spark.options.stream_options import parse_either

        with short_errors():
            options = parse_either(self.options, session_zone())
        if options.mode is Mode.LOG:
            return log_schema()
        return source_schema(
            include_headers=options.include_headers, include_metadata=options.include_metadata
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader of these columns. Raises UsageError."""
        with short_errors():
            return HastoreReader(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a stream reader of these columns; wrong options are reported by its methods.

        If this method raised, Spark would report an error of its own.
        """
        return HastoreStreamReader(dict(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch write. Raises UsageError for wrong options or columns."""
        from hastore.spark.writer import HastoreWriter

        with short_errors():
            return HastoreWriter(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return the writer of a stream. Raises UsageError for wrong options or columns."""
        from hastore.spark.writer import HastoreStreamWriter

        with short_errors():
            return HastoreStreamWriter(dict(self.options), schema, overwrite)


class HastoreReader(DataSourceReader):
    """A batch read: the driver fixes the offsets when it plans the query; tasks read ranges."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        from hastore.spark.arrow.schema import project
        from hastore.spark.options.source_options import parse_options

        self._options: SourceOptions = parse_options(options, session_zone())
        self._projection = project(schema)

    def partitions(self) -> list[InputPartition]:
        """Resolve the offsets and cut them into tasks. Runs on the driver, once per action."""
        from hastore.spark.options.partitions import NoRange
        from hastore.spark.read.planning import plan

        with short_errors(), self._open() as backend:
            return plan(backend, self._options) or [NoRange("no message in the range")]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Yield the rows of one task as Arrow batches. Runs on an executor."""
        from hastore.spark.arrow.batch import BatchBuilder
        from hastore.spark.options.partitions import LogRange, QueueRange

        end_quietly()
        builder = BatchBuilder(self._projection, check_crcs=self._options.check_crcs)
        with short_errors():
            _check_zone(self._options)
            match partition:
                case QueueRange():
                    with self._open() as backend:
                        yield from backend.read_queue(partition, builder)
                case LogRange():
                    with self._open() as backend:
                        yield from backend.read_log(partition, builder)

    def _open(self) -> "Backend":
        return _open_backend(self._options)


class HastoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream. Spark keeps one object on the driver for a run, and sends others to the tasks."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._raw = options
        self._schema = schema
        self._parsed: StreamOptions | None = None
        self._driver: StreamDriver | None = None

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins."""
        from hastore.spark.stream.offsets import to_json

        with short_errors():
            return to_json(self._drive().initial_offset())

    def getDefaultReadLimit(self) -> "ReadLimit":
        """Return the limit of the options; `latestOffset` applies all of them."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, ReadMinRows

        with short_errors():
            admission = self._options.admission
            if admission.max_offsets is not None:
                return ReadMaxRows(admission.max_offsets)
            if admission.min_offsets is not None:
                return ReadMinRows(admission.min_offsets)
            return ReadAllAvailable()

    def latestOffset(
        self, start: dict[str, Any] | None = None, limit: "ReadLimit | None" = None
    ) -> dict[str, Any]:
        """Return where the next batch ends; the given start if there is nothing new.

        Spark passes ReadAllAvailable, which disables the options' limits, for the trigger `once`.
        """
        from hastore.spark.stream.offsets import from_json, to_json

        with short_errors():
            if start is None or limit is None:
                self._refuse_old_spark()
            assert start is not None
            begin = from_json(start)
            limited = type(limit).__name__ != "ReadAllAvailable"
            end = self._drive().latest_offset(begin, limited=limited)
            return start if end is begin else to_json(end)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the queues in Kafka's form, for the query's progress."""
        from hastore.spark.stream.offsets import next_offsets

        with short_errors():
            ends = self._drive().latest_ends()
            return None if ends is None else next_offsets(ends)

    def prepareForTriggerAvailableNow(self) -> None:
        """Fix the end of a run that ends by itself."""
        with short_errors():
            self._drive().prepare_available_now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Cut a batch into tasks."""
        from hastore.spark.stream.offsets import from_json

        with short_errors():
            return self._drive().tasks(from_json(start), from_json(end))

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Yield the rows of one task as Arrow batches. Runs on an executor."""
        from hastore.spark.arrow.batch import BatchBuilder
        from hastore.spark.arrow.schema import project
        from hastore.spark.options.partitions import QueueRange

        assert isinstance(partition, QueueRange)
        end_quietly()
        with short_errors():
            source = self._options.source
            _check_zone(source)
            builder = BatchBuilder(project(self._schema), check_crcs=source.check_crcs)
            with _open_backend(source) as backend:
                yield from backend.read_queue(partition, builder)

    def stop(self) -> None:
        """Close files and sockets."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    @property
    def _options(self) -> "StreamOptions":
        from hastore.spark.options.stream_options import parse_stream_options

        if self._parsed is None:
            self._parsed = parse_stream_options(self._raw, session_zone())
        return self._parsed

    def _drive(self) -> "StreamDriver":
        if self._driver is None:
            from hastore.spark.arrow.schema import project
            from hastore.spark.stream.driver import StreamDriver

            project(self._schema)  # refuses a wrong schema before the first batch
            self._driver = StreamDriver(_open_head(self._options.source), self._options)
        return self._driver

    @staticmethod
    def _refuse_old_spark() -> NoReturn:
        from hastore.errors import UsageError

        raise UsageError("streams of format 'hastore' need pyspark 4.2 or later")


def _check_zone(options: "SourceOptions") -> None:
    """Raise UsageError if the plan read a time in another zone than the session now has."""
    from hastore.errors import UsageError

    assumed, current = options.assumed_zone, zone_of_task()
    if assumed is not None and current not in (None, assumed):
        raise UsageError(
            f"a timestamp without a time zone was read in {assumed}, but the session's zone is "
            f"now {current}: call hastore.spark.register(spark) again, or write the zone"
        )


def _open_backend(options: "SourceOptions") -> "Backend":
    if options.path is not None:
        from hastore.spark.read.store_reader import PathBackend

        return PathBackend(options.path, options.limits.fail_on_data_loss)
    from hastore.spark.read.server_reader import ServerBackend

    return ServerBackend(options.bootstrap, options.limits.fail_on_data_loss)


def _open_head(options: "SourceOptions") -> "Head":
    if options.path is not None:
        from hastore.spark.read.store_head import PathHead

        return PathHead(options.path)
    from hastore.spark.read.server_head import ServerHead

    return ServerHead(options.bootstrap)
