"""Streams into Delta without Spark: tests/spark/stream/test_delta_batches.py has a real query."""

import datetime
import json
from types import SimpleNamespace

import deltalake
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaError
from pyspark.sql.pandas.types import from_arrow_schema

from hastore.errors import HastoreError, UsageError
from hastore.pipeline import delta_stream as module
from hastore.pipeline import parquet_files
from hastore.pipeline.delta import DeltaLog
from hastore.pipeline.delta_stream import DeltaBatches, split_by_values
from hastore.pipeline.target import StagedFile
from tests.pipeline.s3 import client, new_target, s3_server

DAY = datetime.date(2026, 11, 22)
BATCH = pa.RecordBatch.from_pydict(
    {
        "topic": ["a", None, "a", "b", "a%/="],
        "day": [DAY, DAY, None, DAY, DAY],
        "late": [True, False, None, True, True],
        "n": pa.array([1, 2, 3, 4, 5], pa.int32()),
        "at": pa.array([0, 1, 2, 3, 4], pa.timestamp("us", "Europe/Berlin")),
    }
)
SCHEMA = BATCH.schema.set(4, pa.field("at", pa.timestamp("us", "UTC")))


def test_rows_are_split_by_the_values_of_columns_and_nulls_are_a_value():
    found = {values: part["n"].to_pylist() for values, part in split_by_values(BATCH, ["topic"])}
    assert found == {("a",): [1, 3], (None,): [2], ("b",): [4], ("a%/=",): [5]}
    assert [part for _, part in split_by_values(BATCH, [])] == [BATCH]
    assert len(list(split_by_values(BATCH, ["topic", "day", "late", "n"]))) == 5


@pytest.mark.parametrize("open_files", [1, 8])
def test_a_table_of_the_files_has_the_rows(tmp_path, monkeypatch, open_files):
    """However few files a task may have open."""
    monkeypatch.setattr(parquet_files, "OPEN_FILES", open_files)
    by = ("topic", "day", "late", "n")
    writer = module._BatchWriter(str(tmp_path), SCHEMA, by, "zstd")
    batches = [BATCH, BATCH.slice(0, 0), BATCH]
    rows = [row for made in writer(iter(batches)) for row in made.to_pylist()]
    assert len(rows) == (10 if open_files == 1 else 5) and sum(row["rows"] for row in rows) == 10
    files = [
        StagedFile(row["name"], row["name"], row["rows"], row["bytes"], partition_of(row))
        for row in rows
    ]
    DeltaLog(str(tmp_path)).add(None, {"query": 0}, SCHEMA, by, files)
    table = deltalake.DeltaTable(str(tmp_path))
    assert table.transaction_version("query") == 0
    got = table.to_pyarrow_table().select(SCHEMA.names).sort_by("n").to_pylist()
    assert got == [row for one in BATCH.cast(SCHEMA).to_pylist() for row in (one, one)]


def partition_of(row):
    return tuple(json.loads(row["partition"]))


class Frame:
    """A batch whose one task runs in this process; `name` is that of its query, None elsewhere."""

    def __init__(self, name, batch=BATCH):
        self._batch = batch
        self.schema = from_arrow_schema(batch.schema)
        context = SimpleNamespace(getLocalProperty={"sql.streaming.queryId": name}.get)
        self.sparkSession = SimpleNamespace(sparkContext=context, _jvm=None)

    def mapInArrow(self, write, _ddl):
        rows = [row for made in write(iter([self._batch])) for row in made.to_pylist()]
        return SimpleNamespace(collect=lambda: rows)


@pytest.fixture(autouse=True)
def _of_no_spark(monkeypatch):
    """tests/spark/stream/test_delta_batches.py asks a real one for the plans."""
    monkeypatch.setattr(module, "plan_of", lambda *_: None)


def rows_of(target, **options):
    return deltalake.DeltaTable(target, **options).to_pyarrow_table().num_rows


def test_a_batch_of_a_query_is_written_once(tmp_path, monkeypatch):
    """Also if it dies before the commit, after it, or with another query at the same moment."""
    target, add = str(tmp_path / "table"), DeltaLog.add
    batches = DeltaBatches(target, partition_by=["topic", "day"])
    batches(Frame("q", BATCH.slice(0, 0)), 0)  # no rows, no table
    assert not deltalake.DeltaTable.is_deltatable(target)

    def die_before(*_args):
        raise DeltaError("it died")

    def die_after(*args):
        add(*args)
        raise DeltaError("it died")

    for die, count in ((die_before, 0), (die_after, 5)):
        with monkeypatch.context() as patch, pytest.raises(HastoreError, match="batch 1 .*it died"):
            patch.setattr(DeltaLog, "add", die)
            batches(Frame("q"), 1)
        assert (rows_of(target) if count else 0) == count
    batches(Frame("q"), 1)
    assert rows_of(target) == 5
    batches(Frame("q"), 2)
    batches(Frame("other"), 0)
    assert rows_of(target) == 15

    def add_after_the_same_batch(*args):
        monkeypatch.setattr(DeltaLog, "add", add)
        batches(Frame("q"), 3)
        add(*args)

    monkeypatch.setattr(DeltaLog, "add", add_after_the_same_batch)
    with pytest.raises(HastoreError, match="batch 3 .*Concurrent transaction.*Start the query"):
        batches(Frame("q"), 3)
    assert rows_of(target) == 20


def test_a_checkpoint_that_was_set_back_is_refused(tmp_path):
    """Its batches have the numbers of other ones: with these, new messages would be left out."""
    target = str(tmp_path / "table")
    batches = DeltaBatches(target)
    for number in (0, 1, 2):
        batches(Frame("q"), number)
    for frame in (Frame("q"), Frame("q", BATCH.slice(0, 0))):
        with pytest.raises(UsageError, match="batch 1 of the query q .* has its batch 2.*set back"):
            batches(frame, 1)
    assert rows_of(target) == 15
    batches(Frame("q"), 2)
    batches(Frame("other"), 1)
    batches(Frame("q"), 3)
    assert rows_of(target) == 25


def test_a_checkpoint_that_was_set_back_by_one_batch_is_refused(tmp_path, monkeypatch):
    """Its next batch has the number of the last one, and what came since beside that one's rows."""
    target = str(tmp_path / "table")
    batches, plans = DeltaBatches(target), {0: "to 10", 1: "to 20"}
    monkeypatch.setattr(module, "plan_of", lambda _session, _query, batch: plans[batch])
    for number in (0, 1, 1):  # Spark repeats the last one by the same plan
        batches(Frame("q"), number)
    plans[1] = "to 25"
    with pytest.raises(UsageError, match="batch 1 .* has a batch of that number .*set back"):
        batches(Frame("q"), 1)
    assert rows_of(target) == 10
    for plan in (None, "to 20"):  # not known by this Spark; as it was
        plans[1] = plan
        batches(Frame("q"), 1)
    plans[2] = None
    batches(Frame("q"), 2)  # of an older version: the table has the mark of batch 1
    plans[2] = "to 30"
    batches(Frame("q"), 2)
    assert rows_of(target) == 15


def test_batches_go_to_a_bucket(monkeypatch):
    with s3_server():
        url = new_target(client())
        for batch in (0, 0, 1):
            DeltaBatches(url)(Frame("q"), batch)
        assert rows_of(url, storage_options={"aws_allow_http": "true"}) == 10


def test_batches_of_other_columns_than_the_tables_are_refused(tmp_path):
    target = str(tmp_path / "table")
    DeltaBatches(target, ["topic"])(Frame("q"), 0)
    with pytest.raises(UsageError, match="has other columns than the batch"):
        DeltaBatches(target, ["topic"])(Frame("q", BATCH.select(["topic", "n"])), 1)
    with pytest.raises(UsageError, match=r"partitioned by \['topic'\]; give these"):
        DeltaBatches(target)(Frame("q"), 1)
    for column in ("at", "none"):
        with pytest.raises(UsageError, match=f"partition_by has '{column}'"):
            DeltaBatches(str(tmp_path / "new"), [column])(Frame("q"), 0)
    with pytest.raises(HastoreError, match="call DeltaBatches by foreachBatch only"):
        DeltaBatches(target)(Frame(None), 2)
    assert rows_of(target) == 5


@pytest.mark.parametrize("by", [["topic"], ["topic", "topic"]])
def test_a_table_has_a_column_that_does_not_partition_it_and_each_of_those_once(tmp_path, by):
    """A file without a column has no rows: all of the batch would be gone, without an error."""
    batch = BATCH.select(["topic", "n"] if len(by) > 1 else ["topic"])
    with pytest.raises(UsageError, match="partition_by"):
        DeltaBatches(str(tmp_path / "table"), by)(Frame("q", batch), 0)
    assert not (tmp_path / "table").exists()


def test_wrong_targets_are_refused_at_once(tmp_path):
    for target, text in (("gs://a/b", "also take s3"), ("s3://", "BUCKET/FOLDER"), ("", "empty")):
        with pytest.raises(UsageError, match=text):
            DeltaBatches(target)
    with pytest.raises(UsageError, match="compression is 'x'"):
        DeltaBatches(str(tmp_path), compression="x")
    writer = module._BatchWriter(str(tmp_path / "none"), SCHEMA, (), "zstd")
    with pytest.raises(UsageError, match="an executor does not see the table"):
        list(writer(iter([BATCH])))
