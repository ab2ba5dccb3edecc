"""Random stores, whole and damaged: the rows and errors of a reader of one record at a time."""

import tempfile
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.types import StructField, StructType

from hastore.errors import CorruptRecordError
from hastore.record.layout import V1_MAGIC, V2_MAGIC
from hastore.spark.arrow import batch as arrow_batch
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import COLUMN_TYPES, Column, project
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read import stores
from hastore.spark.read.stores import PathBackend
from tests.spark.random_records import HOSTS, IPV4, PACKED, expected_row, records
from tests.spark.read import scalar_reader
from tests.spark.stores import numbered, write_store

# Plain stores take the short ways (no IPv6 host, no V2 record), mixed ones all others.
KINDS = st.sampled_from([(IPV4, (V1_MAGIC,)), (HOSTS, (V1_MAGIC, V2_MAGIC)), (HOSTS, (V2_MAGIC,))])
GIVEN = (
    *("body", "properties", "sys_flag", "born_host", "store_host", "magic"),
    *("born_timestamp_ms", "store_timestamp_ms", "reconsume_times"),
)
RAW_BYTES = st.sampled_from([bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\1", b"x"])
SCALAR = (Column.VALUE, Column.PHYSICAL_OFFSET, Column.TIMESTAMP, Column.RECONSUME_TIMES)


def projection(*columns):
    return project(StructType([StructField(c.value, COLUMN_TYPES[c]) for c in columns]))


@st.composite
def messages(draw):
    hosts, magics = draw(KINDS)
    items = draw(st.lists(records(hosts, magics, packed=True), min_size=1, max_size=12))
    found = [("t", 0, {name: getattr(item, name) for name in GIVEN}) for item in items]
    if draw(st.booleans()):  # KEYS is the first property of all, as in most stores
        for _, _, fields in found:
            value = draw(st.text("ab", max_size=3)).encode()
            fields["properties"] = b"KEYS\x01" + value + draw(st.sampled_from([b"", b"\x02"]))
    if draw(st.booleans()):  # bodies of one size, as in many topics, are copied in another way
        size = draw(st.integers(1, 20))
        for _, _, fields in found:
            if not fields["sys_flag"] & PACKED:
                fields["body"] = fields["body"].ljust(size, b"\0")[:size]
    return found


def read(path, count, limit, columns, rows_per_batch):
    """Return the rows until the end or an error, and the error's text."""
    rows, error = [], None
    with (
        mock.patch.object(arrow_batch, "ROWS_PER_BATCH", rows_per_batch),
        mock.patch.object(stores, "UNITS_AT_ONCE", 2 * rows_per_batch),
        PathBackend(path, True) as backend,
    ):
        try:
            span = QueueRange("t", 0, 0, count, limit)
            for batch in backend.read_queue(span, BatchBuilder(projection(*columns))):
                batch.validate(full=True)
                rows += [dict(zip(batch.schema.names, row, strict=True)) for row in _rows(batch)]
        except CorruptRecordError as found:
            error = str(found)
    return rows, error


def _rows(batch):
    """Return rows with times in us, because a damaged time may be no datetime of Python."""
    columns = [c.view("int64") if pa.types.is_timestamp(c.type) else c for c in batch.columns]
    return zip(*(column.to_pylist() for column in columns), strict=True)


@given(messages(), st.integers(1, 5))
@settings(max_examples=80, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
def test_every_column_of_a_random_store_equals_what_the_codec_reads(items, rows_per_batch):
    with tempfile.TemporaryDirectory() as path:
        placed = write_store(path, items, file_size=2048, units_per_file=5)
        end = placed[-1].physical_offset + placed[-1].size
        found, error = read(path, len(items), end, Column, rows_per_batch)
    assert error is None
    for row, record in zip(found, placed, strict=True):
        times = (row.pop("timestamp"), row.pop("bornTimestamp"))
        assert times == (record.store_timestamp_ms * 1000, record.born_timestamp_ms * 1000)
        assert row == expected_row(record)


@given(messages(), st.integers(1, 5), st.data())
@settings(max_examples=250, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.slow("each example writes a store, and reads it as Spark does and record by record")
def test_a_damaged_or_torn_store_gives_the_same_rows_and_the_same_error(items, per_batch, data):
    with tempfile.TemporaryDirectory() as path:
        placed = write_store(path, items, file_size=2048, units_per_file=5)
        for _ in range(data.draw(st.integers(0, 2))):
            record = data.draw(st.sampled_from(placed))
            places = [0, 4, 8, 28, 36, 84, 88 + len(record.body), record.size - 1]
            at = record.physical_offset + data.draw(
                st.sampled_from(places) | st.integers(0, record.size - 1)
            )
            with open(f"{path}/commitlog/{at // 2048 * 2048:020}", "r+b") as file:
                file.seek(at % 2048)
                file.write(data.draw(RAW_BYTES)[: 2048 - at % 2048])
        end = placed[-1].physical_offset + placed[-1].size
        limit = data.draw(st.just(end) | st.integers(0, end))
        count = sum(r.physical_offset + r.size <= limit for r in placed)
        columns = data.draw(st.sampled_from([(*SCALAR, Column.RECORD), SCALAR, (Column.VALUE,)]))
        found, error = read(path, count, limit, columns, per_batch)
        expected, text = scalar_reader.read_queue(path, "t", 0, limit, per_batch, 2 * per_batch)
    if text is None:
        assert error is None
    else:
        assert error.removeprefix(f"{path}: ").startswith(text)
    names = [column.value for column in columns]
    assert found == [{name: row[name] for name in names} for row in expected]


@pytest.mark.parametrize("size", [1, 200, 3000])
@pytest.mark.parametrize("columns", [(Column.VALUE,), (Column.RECORD,)])
def test_a_wrong_crc_is_found_in_a_body_of_any_size(tmp_path, size, columns):
    """Bodies over 2 KiB are checked in place, smaller ones on copies."""
    placed = write_store(tmp_path, numbered(7, size=size))
    bad = placed[4]
    with open(next((tmp_path / "commitlog").iterdir()), "r+b") as file:
        file.seek(bad.physical_offset + 88)
        file.write(b"!")
    end = placed[-1].physical_offset + placed[-1].size
    rows, error = read(str(tmp_path), 7, end, columns, rows_per_batch=2)
    assert len(rows) == 4
    assert f"offset {bad.physical_offset} has a body that does not match its CRC" in error
