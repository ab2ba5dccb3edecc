"""What of the rows of `compact` is written to a topic, if they were legal in the log only."""

import random

import pyarrow as pa
import pytest

from hastore.errors import UsageError
from hastore.pipeline.compact import COLUMNS, PUBLISHED_COLUMNS
from hastore.pipeline.compact_files import Fitting
from hastore.record.codec import Host
from hastore.record.layout import MAX_PROPERTIES_BYTES
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import Column, projection_of
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read.stores import PathBackend
from hastore.spark.sink.options import SinkColumns
from hastore.spark.sink.records import RecordBuilder, batch_task
from tests.spark.stores import write_store

GOOD = b"KEYS\x01good\x02TAGS\x01red\x02of\x01user\x02"


def rows_of(root, *properties, bodies=None):
    """Return the rows of a store with a message for each properties, as compact reads them."""
    bodies = bodies or [b"x"] * len(properties)
    messages = [
        ("t", 0, {"body": body, "properties": text})
        for text, body in zip(properties, bodies, strict=True)
    ]
    write_store(root, messages, file_size=1 << 24)
    with PathBackend(str(root), True) as backend:
        span = QueueRange("t", 0, 0, len(messages), backend.limit_offset())
        builder = BatchBuilder(projection_of(map(Column, COLUMNS)))
        return pa.Table.from_batches(list(backend.read_queue(span, builder)))


def sent(table):
    """Return how many rows the sink makes messages of; raises RowError."""
    places = {name: number for number, name in enumerate(PUBLISHED_COLUMNS)}
    identity = batch_task("w", 0)
    builder = RecordBuilder(
        SinkColumns(**places),
        topic="c",
        partition=0,
        producer_id=identity.producer_id,
        first_number=identity.first,
        queues_of=lambda _: 4,
        born_host=Host(b"\x7f\0\0\1", 1),
    )
    (batch,) = table.select(PUBLISHED_COLUMNS).combine_chunks().to_batches()
    return sum(chunk.rows for chunk in builder.build(batch, 0, 1))


@pytest.mark.parametrize(
    ("properties", "kept", "dropped"),
    [
        (b"trace\x01a\x01b\x02of\x01user\x02", {"of"}, 1),
        (b"DELAY\x013\x02of\x01user\x02", {"of"}, 1),
        (b"TIMER_DELIVER_MS\x013\x02", set(), 1),
        (b"big\x01" + b"v" * 32_740 + b"\x02of\x01user\x02", {"of"}, 1),
        (b"a\x01" + b"v" * 20_000 + b"\x02b\x01" + b"v" * 12_700 + b"\x02", {"b"}, 1),
        (b"TAGS\x01a\x01b\x02of\x01user\x02", {"of"}, 1),
        (b"fits\x01" + b"v" * 32_600 + b"\x02", {"fits"}, 0),
    ],
    ids=["separator", "delay", "timer", "size", "the largest", "tags", "all"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 100])
def test_headers_that_cannot_be_sent_are_dropped_and_counted(
    tmp_path, properties, kept, dropped, size
):
    table = rows_of(tmp_path, GOOD, b"KEYS\x01k\x02" + properties, GOOD, properties)
    rows = Fitting("t", leaves_out=False).rows()
    parts = [rows.apply(table.slice(at, size)) for at in range(0, len(table), size)]
    found = pa.concat_tables(parts)
    assert sent(found) == 4 and rows.left_out == 0 and rows.dropped == 2 * dropped
    good, bad, again, last = found.to_pylist()
    assert [good, again] == [table.to_pylist()[at] for at in (0, 2)]
    for row in (bad, last):
        assert {one["key"] for one in row["headers"] or ()} == kept
        assert row["tags"] is None and row["value"] == b"x"
    assert Fitting("t", leaves_out=False).rows().apply(found).equals(found), "nothing more to drop"


def test_a_header_for_which_there_is_just_room_is_sent(tmp_path):
    """The number of a row is a part of it: that of the eleventh is a byte longer."""
    name = b"KEYS\x01k\x02h\x01"
    identity = len(f"HS_PID\x01{batch_task('w', 0).producer_id}\x02HS_SEQ\x010\x02")
    full = name + b"v" * (MAX_PROPERTIES_BYTES - identity - len(name) - 1) + b"\x02"
    table = rows_of(tmp_path, *[full] * 11)
    rows = Fitting("t", leaves_out=False).rows()
    found = rows.apply(table)
    assert sent(found) == 11 and rows.dropped == 1
    assert found.slice(0, 10).equals(table.slice(0, 10))


@pytest.mark.parametrize(
    ("properties", "body", "problem"),
    [
        (b"KEYS\x01a\x01b\x02", b"x", "column 'key' has a byte 1 or 2"),
        (b"KEYS\x01" + b"k" * 32_740 + b"\x02", b"x", "its key, tags and headers have"),
        (b"KEYS\x01k\x02", None, "its body has"),
    ],
    ids=["key", "size", "body"],
)
def test_a_row_that_cannot_be_sent_is_refused_or_left_out(tmp_path, properties, body, problem):
    body = body or random.Random(1).randbytes(5 << 20)
    table = rows_of(tmp_path, GOOD, properties, GOOD, bodies=[b"x", body, b"y"])
    with pytest.raises(UsageError, match=f"the message 1 of t-0 .*{problem}.*--allow-data-loss"):
        Fitting("t", leaves_out=False).rows().apply(table)
    rows = Fitting("t", leaves_out=True).rows()
    found = rows.apply(table)
    assert sent(found) == 2 and (rows.left_out, rows.dropped) == (1, 0)
    assert found["value"].to_pylist() == [b"x", b"y"]
