"""The Spark data source `hastore`, over a store's directory or over running nodes.

Spark imports this module in every application that uses any Python data source (see
`pyspark_hastore`). So it imports numpy, pyarrow, the store and the client only when a hastore query
is planned or read. Spark pickles the objects of these classes and sends them to other processes:
they hold options and a schema, never files or sockets.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from hastore.spark.worker import (
    check_spark_version,
    check_zone,
    end_quietly,
    is_told_filters,
    session_zone,
    short_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import Filter

    from hastore.spark.options.source_options import SourceOptions
    from hastore.spark.read.backend import Backend


class HastoreDataSource(DataSource):
    """The source and the sink of `spark.read`, `readStream`, `write` and `writeStream`.

    Columns, options and errors have the names that they have in Spark's Kafka source.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        """Keep the options. Raises UsageError if Spark is too old."""
        super().__init__(options)
        with short_errors():
            check_spark_version()

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "hastore"

    def schema(self) -> StructType:
        """Return the columns.

        Raises UsageError for wrong options and unknown topics, so that `load()` already reports
        them. Spark does not call this if the user gives a schema, nor does it say whether the query
        is a stream.
        """
        from hastore.spark.arrow.schema import log_schema, source_schema
        from hastore.spark.options.source_options import Mode, parse_either
        from hastore.spark.read.planning import check_topics

        with short_errors():
            options = parse_either(self.options, session_zone())
            check_topics(options)
        if options.mode is Mode.LOG:
            return log_schema()
        return source_schema(
            include_headers=options.include_headers, include_metadata=options.include_metadata
        )

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a batch reader of these columns. Raises UsageError."""
        with short_errors():
            reader = HastoreReader(dict(self.options), schema)
            if reader.pushes_filters and is_told_filters():
                return PushingReader(dict(self.options), schema)
            return reader

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a stream reader of these columns; wrong options are reported by its methods.

        If this method raised, Spark would report an error of its own.
        """
        from hastore.spark.stream_reader import HastoreStreamReader

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
        from hastore.spark.options.filters import WantedMessages
        from hastore.spark.options.source_options import parse_options

        self._options: SourceOptions = parse_options(options, session_zone())
        self._projection = project(schema)
        self._wanted = WantedMessages()

    @property
    def pushes_filters(self) -> bool:
        """Whether the query's filters may decide what is read."""
        return self._options.push_filters

    def partitions(self) -> list[InputPartition]:
        """Resolve the offsets and cut them into tasks. Runs on the driver, once per `load()`."""
        from hastore.spark.options.partitions import NoRange
        from hastore.spark.read.planning import plan

        with short_errors(), self._open() as backend:
            pieces = plan(backend, self._options, self._wanted)
        return pieces or [NoRange("no message in the range")]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Yield the rows of one task as Arrow batches. Runs on an executor."""
        from hastore.spark.arrow.batch import BatchBuilder
        from hastore.spark.options.partitions import LogRange, QueueRange

        end_quietly()
        options = self._options
        builder = BatchBuilder(
            self._projection, check_crcs=options.check_crcs, decompress=options.decompress,
            wanted=options.wanted,
        )  # fmt: skip
        with short_errors():
            check_zone(self._options.assumed_zone)
            match partition:
                case QueueRange():
                    with self._open() as backend:
                        yield from backend.read_queue(partition, builder)
                case LogRange():
                    with self._open() as backend:
                        yield from backend.read_log(partition, builder)

    def _open(self) -> "Backend":
        from hastore.spark.read.planning import open_backend

        return open_backend(self._options)


class PushingReader(HastoreReader):
    """A batch read that is told the query's filters.

    Spark refuses a reader that defines `pushFilters` in a session that does not push filters. Where
    it does, Spark up to 4.3 keeps the plan of the last filters in the DataFrame, and uses it for
    other queries of the same DataFrame too (its PythonScanBuilder calls `setReadInfo` on the
    shared table). Rows would be missing without an error. So only an option brings this reader.
    """

    def pushFilters(self, filters: list["Filter"]) -> list["Filter"]:
        """Leave out of the plan what the filters cannot match.

        Returns all of them, because Spark has to apply them to the rows that are read.
        """
        self._wanted = self._wanted.narrow(filters)
        return filters
