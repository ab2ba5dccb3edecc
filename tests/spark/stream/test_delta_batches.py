"""A stream into a Delta table, as the page shows it: a batch that dies is there once."""

import json
import shutil

import deltalake
import pytest
from pyspark.errors import PySparkException

from hastore.pipeline.delta import DeltaLog
from hastore.pipeline.delta_stream import OFFSETS, DeltaBatches
from tests.documents.blocks import blocks_of
from tests.spark.late import is_late_process
from tests.spark.stores import numbered, write_store

pytestmark = pytest.mark.full


@pytest.mark.slow("a query starts three times")
def test_a_checkpoint_that_was_set_back_by_one_batch_is_refused(spark, tmp_path, caplog):
    """Its next batch has the number of the last one, and more messages."""
    store, checkpoint = tmp_path / "store", tmp_path / "checkpoint"
    target = str(tmp_path / "table")

    def run():
        while True:
            query = (
                spark.readStream.format("hastore")
                .option("path", str(store))
                .option("subscribe", "t")
                .option("startingOffsets", "earliest")
                .load()
                .writeStream.foreachBatch(DeltaBatches(target))
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            try:
                query.awaitTermination()
                return
            except PySparkException as failed:
                if not is_late_process(failed):
                    raise

    for count in (10, 20):
        shutil.rmtree(store, ignore_errors=True)
        write_store(store, numbered(count))
        run()
    mark = deltalake.DeltaTable(target).transaction_version
    query_id = json.loads((checkpoint / "metadata").read_text())["id"]
    assert mark(query_id) == 1 and mark(query_id + OFFSETS) is not None
    (checkpoint / "commits" / "1").unlink()
    run()  # as if it was killed behind the commit of the table
    assert deltalake.DeltaTable(target).to_pyarrow_table().num_rows == 20
    for kind in ("commits", "offsets"):
        (checkpoint / kind / "1").unlink()
        (checkpoint / kind / ".1.crc").unlink(missing_ok=True)
    shutil.rmtree(store)
    write_store(store, numbered(25))
    with pytest.raises(PySparkException, match="batch 1 of the query .*set back"):
        run()
    assert not [r for r in caplog.records if "are not known" in r.getMessage()]


@pytest.mark.slow("a query starts three times, and plans each of its batches")
def test_a_batch_that_dies_before_or_after_its_commit_is_there_once(spark, tmp_path, monkeypatch):
    messages = numbered(60, topic="flights", queues=2)
    write_store(tmp_path / "data" / "node2", messages)
    (block,) = [b for b in blocks_of("docs/pipeline.md") if "DeltaBatches" in b.text]
    text = block.text.replace('"data/', f'"{tmp_path}/data/').replace('"out/', f'"{tmp_path}/out/')
    assert "100_000" in text
    code = compile(text.replace("100_000", "30"), str(block), "exec")
    add, commits = DeltaLog.add, []

    def dying(*args):
        commits.append(1)
        if len(commits) == 1:
            raise RuntimeError("it died")
        add(*args)
        if len(commits) == 2:
            raise RuntimeError("it died")

    def run():
        while True:
            names = {"spark": spark}
            exec(code, names)
            try:
                names["query"].processAllAvailable()
                return
            except PySparkException as failed:
                if not is_late_process(failed):
                    raise
            finally:
                names["query"].stop()

    def rows():
        table = deltalake.DeltaTable(str(tmp_path / "out" / "flights")).to_pyarrow_table()
        return sorted((r["partition"], r["offset"], r["value"]) for r in table.to_pylist())

    monkeypatch.setattr(DeltaLog, "add", dying)
    for _ in range(2):
        with pytest.raises(PySparkException, match="it died"):
            run()
    assert len(rows()) == 30
    run()
    assert rows() == [
        (queue, n, messages[2 * n + queue][2]["body"]) for queue in range(2) for n in range(30)
    ]
    assert len(commits) == 3  # of two batches: what the table has is not committed again
