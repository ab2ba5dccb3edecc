"""The files of an export's task, without Spark."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hastore.pipeline.parquet_files import ExportLayout, FileSet
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.partitions import QueueRange

COLUMNS = (Column.VALUE, Column.TIMESTAMP)
DAY_US = 24 * 3600 * 1_000_000
FIRST = (datetime.date(1, 1, 1) - datetime.date(1970, 1, 1)).days
LAST = (datetime.date(9999, 12, 31) - datetime.date(1970, 1, 1)).days


def write(tmp_path, days):
    (tmp_path / "staging").mkdir()
    schema = projection_of(COLUMNS).arrow_schema()
    times = pa.array([day * DAY_US for day in days]).view(schema.field("timestamp").type)
    values = pa.array([str(day).encode() for day in days])
    batch = pa.RecordBatch.from_arrays([values, times], schema=schema)
    layout = ExportLayout(str(tmp_path), "staging", tuple(c.value for c in COLUMNS), "snappy")
    with FileSet(layout) as files:
        files.add(QueueRange("a|b%\u4e2d", 0, 0, len(days)), batch)
        return files.close()


@pytest.mark.parametrize(
    ("day", "date"),
    [
        (-1, "1969-12-31"),
        (FIRST, "0001-01-01"),
        (LAST, "9999-12-31"),
        (FIRST - 1, None),
        (LAST + 1, None),
        (2**63 // DAY_US - 1, None),
    ],
)
def test_a_store_time_that_is_no_date_gets_none(tmp_path, day, date):
    files = {dict(file.partition)["date"]: file for file in write(tmp_path, [0, day])}
    assert set(files) == {"1970-01-01", date}
    other = files[date]
    assert other.partition == (("topic", "a|b%\u4e2d"), ("date", date))
    folder = f"topic=a|b%25\u4e2d/date={date or '__HIVE_DEFAULT_PARTITION__'}/"
    assert other.final.startswith(folder)
    with pq.ParquetFile(tmp_path / other.staged) as file:
        assert file.read(["value"])["value"].to_pylist() == [str(day).encode()]
