"""ORC files, written through what the exports use of pyarrow's ParquetWriter.

A time outside of the years 1677 to 2262 is written, but pyarrow cannot read it back: its times in
ORC are nanoseconds. So no job of hastore reads ORC files, and they are not merged.
"""

from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.orc as orc

from hastore.errors import UsageError

STRIPE_BYTES = 32 * 1024 * 1024  # a writer holds at most this much
_COMPRESSIONS = {"gzip": "ZLIB", "none": "UNCOMPRESSED"}  # where ORC has another name


class OrcWriter:
    """Writes one file."""

    def __init__(self, path: str, compression: str, filesystem: Any = None) -> None:
        """Make the file; a file system of None is the local one."""
        self._stream = (filesystem or pafs.LocalFileSystem()).open_output_stream(path)
        self._writer: Any = None
        self._compression = _COMPRESSIONS.get(compression, compression.upper())

    def write_table(self, table: pa.Table, row_group_size: int | None = None) -> None:
        """Add rows; ORC decides itself how many are in a stripe."""
        if self._writer is None:
            self._writer = orc.ORCWriter(
                self._stream, compression=self._compression, stripe_size=STRIPE_BYTES
            )
        self._writer.write(table)

    def close(self) -> None:
        """Write the rest; the file is whole then."""
        try:
            if self._writer is not None:  # pyarrow cannot close one that has written nothing
                self._writer.close()
        finally:
            self._stream.close()


def check_orc(schema: pa.Schema) -> None:
    """Raise UsageError if ORC has no type for a column."""
    for field in schema:
        try:
            with orc.ORCWriter(pa.BufferOutputStream()) as writer:
                writer.write(pa.schema([field]).empty_table())
        except pa.ArrowException as failure:
            raise UsageError(
                f"ORC has no type for the column {field.name} ({field.type}): give it another type "
                "in --json-schema, or export with --format parquet"
            ) from failure
