"""A stream into a Delta table, as the page shows it: a batch that dies is there once."""

import json

import deltalake
import pytest
from pyspark.errors import PySparkException

from hastore.pipeline.delta import DeltaLog
from hastore.pipeline.delta_stream import PLAN, DeltaBatches
from tests.documents.blocks import blocks_of
from tests.spark.late import is_late_process
from tests.spark.stores import numbered, write_store

pytestmark = pytest.mark.full


@pytest.mark.slow("a query runs four times")
def test_a_checkpoint_that_was_set_back_by_one_batch_is_refused(spark, tmp_path, caplog):
    """Its next batch has the number of the last one, and more rows.

    The source is Spark's own: its offsets alone do not tell which files a batch has.
    """
    folder, checkpoint = tmp_path / "texts", tmp_path / "checkpoint"
    target = str(tmp_path / "table")

    def run():
        query = (
            spark.readStream.text(str(folder))
            .writeStream.foreachBatch(DeltaBatches(target))
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sorted(deltalake.DeltaTable(target).to_pyarrow_table()["value"].to_pylist())

    def forget(*places):
        """Remove what the checkpoint has of batch 1."""
        for place in places:
            for name in ("1", ".1.crc"):
                (checkpoint / place / name).unlink()

    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name)
        run()
    mark = deltalake.DeltaTable(target).transaction_version
    query = json.loads((checkpoint / "metadata").read_text())["id"]
    assert mark(query) == 1 and mark(query + PLAN) is not None
    forget("commits")
    assert run() == ["a", "b"]  # as if it was killed behind the commit of the table
    forget("commits", "offsets", "sources/0")
    (folder / "c").write_text("c")
    with pytest.raises(PySparkException, match="batch 1 of the query .*set back"):
        run()
    assert not [one for one in caplog.records if "are not known" in one.getMessage()]


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
