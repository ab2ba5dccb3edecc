"""A Python data source that does nothing but yield prepared Arrow batches: Spark's own limit.

The batches lie in one Arrow file for each task, which is mapped, so a batch is yielded without a
copy. What a read of them costs is Spark's: its planning, the stream from the Python worker to the
JVM, and the copy of the columns to rows. Only what hastore's source costs beyond that is its own.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "bare_batches"


@dataclasses.dataclass(frozen=True)
class BatchFile(InputPartition):
    """The Arrow file of one task."""

    path: str


class BareSource(DataSource):
    """The option `path` is a folder of Arrow files, as `prepare` writes it."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return FORMAT

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the files."""
        return BareReader(self.options["path"])


class BareReader(DataSourceReader):
    """One task for each file."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def partitions(self) -> list[InputPartition]:
        """Return the files."""
        return [BatchFile(str(path)) for path in sorted(pathlib.Path(self._folder).iterdir())]

    def read(self, partition: InputPartition) -> Iterator["pa.RecordBatch"]:
        """Yield the batches of one file."""
        import pyarrow as pa

        assert isinstance(partition, BatchFile)
        with pa.memory_map(partition.path) as source, pa.ipc.open_file(source) as batches:
            for number in range(batches.num_record_batches):
                yield batches.get_batch(number)


def prepare(reader: DataSourceReader, folder: pathlib.Path) -> None:
    """Write the batches of a source's reader, as its tasks yield them, a file for each task."""
    import pyarrow as pa

    folder.mkdir()
    for number, task in enumerate(reader.partitions()):
        batches: Iterator[Any] = iter(reader.read(task))
        first = next(batches)
        with pa.ipc.new_file(str(folder / f"{number:04}.arrow"), first.schema) as file:
            file.write_batch(first)
            for batch in batches:
                file.write_batch(batch)
