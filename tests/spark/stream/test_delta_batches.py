"""A stream into a Delta table, as the page shows it: a batch that dies is there once."""

import deltalake
import pytest
from pyspark.errors import PySparkException

from hastore.pipeline.delta import DeltaLog
from tests.documents.blocks import blocks_of
from tests.spark.late import is_late_process
from tests.spark.stores import numbered, write_store

pytestmark = pytest.mark.full


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
