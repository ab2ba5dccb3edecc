"""Streams in a real session: over a store's directory and over nodes, restarted and refused."""

import json
import shutil
import time

import pytest
from pyspark.errors import PySparkException

from hastore.spark import QueueLag, lag
from tests.api_fakes import FakeBackend
from tests.server.api.test_filtered_pulls import TOPIC, Node
from tests.spark.late import finish, is_late_process
from tests.spark.read.test_heads import cut
from tests.spark.read.test_server_reader import fill, serving
from tests.spark.stores import GOLDEN, numbered, write_store
from tests.store.kit import opened

WAIT_S = 120  # only a hang takes so long, on a busy machine too


def stream(spark, schema=None, **options):
    reader = spark.readStream.format("hastore").options(**options)
    return (reader.schema(schema) if schema else reader).load()


def run_to_end(frame, folder, **how):
    """Run a query until there is nothing new; return it. Rows go to Parquet files.

    Where it starts must be explicit: see `finish`.
    """
    writer = (
        frame.writeStream.format("parquet")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .option("path", f"{folder}/rows")
        .trigger(**how or {"availableNow": True})
    )
    return finish(writer.start, WAIT_S)


def offsets(spark, folder):
    rows = spark.read.parquet(f"{folder}/rows").select("partition", "offset").collect()
    return sorted((row.partition, row.offset) for row in rows)


@pytest.mark.slow("a query starts twice, and plans each of its batches")
def test_a_query_over_a_path_is_restarted_with_each_message_once(spark, tmp_path):
    store = tmp_path / "store"
    write_store(store, numbered(100, queues=2))
    options = {"path": str(store), "subscribe": "t", "startingOffsets": "earliest"}
    frame = stream(spark, maxOffsetsPerTrigger="30", includeHeaders="true", **options)
    assert "headers" in frame.columns
    query = run_to_end(frame, tmp_path)
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    assert [progress["numInputRows"] for progress in batches] == [30, 30, 30, 10]
    assert json.loads(batches[0]["sources"][0]["latestOffset"]) == {"t": {"0": 50, "1": 50}}
    assert lag(batches[0]) == [QueueLag("t", 0, 15, 50, 35), QueueLag("t", 1, 15, 50, 35)]
    assert sum(row.lag for row in lag(query)) == 0

    write_store(store, numbered(130, queues=3))  # other queues than before: q0 and q1 shrink
    with pytest.raises(PySparkException) as caught:
        run_to_end(frame, tmp_path)
    first = str(caught.value).splitlines()[0]
    assert "failOnDataLoss" in first
    assert "Traceback" not in str(caught.value)

    shutil.rmtree(store)
    write_store(store, numbered(140, queues=2))
    run_to_end(stream(spark, includeHeaders="true", **options), tmp_path, once=True)
    assert offsets(spark, tmp_path) == [(q, n) for q in range(2) for n in range(70)]


@pytest.mark.full
@pytest.mark.slow("four runs of queries, each with several batches")
def test_a_filtered_query_has_each_match_once_and_its_offsets_are_those_of_all(spark, tmp_path):
    """From nodes by tags, and in place by SQL; restarted, with batches in which nothing matches."""
    with opened(tmp_path / "store") as store:
        store.set_limits(confirmed=0, readable=0)
        node = Node(store)
        try:
            node.tags(*["red"] * 30, "blue", "red", "blue")
            node.tags("blue", *["red"] * 9, queue=1)
            common = {"subscribe": TOPIC, "startingOffsets": "earliest"}
            common |= {"maxOffsetsPerTrigger": "20"}
            ways = {
                "nodes": {"hastore.bootstrap.servers": node.address, "tags": "blue"},
                "path": {"path": str(tmp_path / "store"), "sql": "TAGS = 'blue'"},
            }
            for name, options in ways.items():
                query = run_to_end(stream(spark, **options, **common), tmp_path / name)
                last = json.loads(query.lastProgress["sources"][0]["endOffset"])
                assert last["next"] == {TOPIC: {"0": 33, "1": 10}}
                assert offsets(spark, tmp_path / name) == [(0, 30), (0, 32), (1, 0)]
            node.tags("red", "blue")
            for name, options in ways.items():
                run_to_end(stream(spark, **options, **common), tmp_path / name)
                assert offsets(spark, tmp_path / name) == [(0, 30), (0, 32), (0, 34), (1, 0)]
        finally:
            node.server.stop()


def test_a_query_over_nodes_follows_them_and_reports_a_cut(spark, tmp_path):
    node = FakeBackend()
    fill(node.store, 10)
    rows = []

    def keep(frame, batch):
        rows.append((batch, sorted(row.value for row in frame.collect())))

    def wait_for(check):
        deadline = time.monotonic() + WAIT_S
        while not check():
            assert query.isActive, query.exception()
            assert time.monotonic() < deadline, (rows, query.lastProgress)
            time.sleep(0.01)

    with serving(node) as bootstrap:
        frame = stream(
            spark,
            schema="topic STRING, value BINARY",
            subscribePattern="[a-z]+",
            **{"hastore.bootstrap.servers": ",".join(bootstrap)},
        )
        writer = (
            frame.selectExpr("CAST(value AS STRING) value")
            .writeStream.foreachBatch(keep)
            .option("checkpointLocation", str(tmp_path))
        )
        query = writer.start()
        try:
            while not rows:
                if not query.isActive and is_late_process(query.exception()):
                    query = writer.start()  # nothing has come meanwhile
                assert query.isActive, query.exception()
                time.sleep(0.01)
            assert rows == [(0, [])]  # it begins at the end: the empty batch keeps the start
            fill(node.store, 4)
            wait_for(lambda: sum(len(each) for _, each in rows) == 4)
            node.store.units["new", 0] = list(node.store.units["t", 0][:3])
            node.moved()
            wait_for(lambda: sum(len(each) for _, each in rows) == 7)
            wait_for(lambda: {row.topic for row in lag(query)} == {"t", "new"})
            cut(node, 3, 131_073)
            fill(node.store, 1)
            with pytest.raises(PySparkException) as caught:
                query.awaitTermination(WAIT_S)
        finally:
            query.stop()
    first = str(caught.value).splitlines()[0]
    assert "after a record that a failover cut away" in first
    assert "set failOnDataLoss to false" in first
    assert "Traceback" not in str(caught.value)
    assert sum(len(each) for _, each in rows) == 7


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": "Topic"}, "there is no topic 'Topic'"),
        ({"subscribe": "TopicA", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be"),
    ],
)
def test_what_a_batch_read_would_not_take_either_is_refused_by_load(spark, options, text):
    with pytest.raises(PySparkException, match=text):
        stream(spark, path=str(GOLDEN / "three-files"), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"subscribe": "TopicA", "endingOffsets": "latest"},
            "ending offset not valid in streaming",
        ),
        pytest.param({"mode": "log"}, "mode=log is for batch queries", marks=pytest.mark.full),
        pytest.param(
            {"subscribe": "TopicA", "startingOffsets": '{"TopicA":{"0":5}}'},
            "specify all",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_wrong_stream_is_refused_in_one_sentence(spark, options, text):
    frame = stream(spark, path=str(GOLDEN / "three-files"), **options)
    query = None
    with pytest.raises(PySparkException) as caught:
        query = frame.writeStream.format("noop").start()
        query.awaitTermination(WAIT_S)
    assert text in str(caught.value).splitlines()[0]
    for noise in ("UnboundLocalError", "Traceback"):
        assert noise not in str(caught.value)
