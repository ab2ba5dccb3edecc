"""`spark.read.format("hastore")` over a store's directory, in a real session."""

import json

import pytest
from pyspark.errors import PySparkException

from hastore.history import Recorder, check
from hastore.record.properties import ROCKETMQ_PROPERTIES
from hastore.spark.arrow.schema import KAFKA_COLUMNS
from hastore.store.offline.reader import StoreReader
from tests.spark.stores import GOLDEN, numbered, write_store

THREE_FILES = str(GOLDEN / "three-files")


def load(spark, path=THREE_FILES, schema=None, **options):
    reader = spark.read.format("hastore").options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(str(path))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A store with 100 messages in one queue, a second apart."""
    path = tmp_path_factory.mktemp("numbers")
    write_store(path, numbered(100))
    return path


def offsets(frame):
    return sorted(row.offset for row in frame.select("offset").collect())


def test_the_format_needs_no_registration_and_has_kafkas_columns(spark):
    frame = load(spark, subscribe="TopicA")
    assert frame.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,"
        "timestamp:timestamp,timestampType:int>"
    )
    assert frame.columns == [column.value for column in KAFKA_COLUMNS]


def test_all_messages_of_the_golden_store_arrive(spark):
    with StoreReader(THREE_FILES) as reader:
        expected = {r.message_id: r for r in reader.records()}
    frame = load(spark, subscribe="TopicA", includeHeaders="true", includeMetadata="true")
    rows = frame.collect()
    assert len(rows) == 400
    for row in rows:
        record = expected[row.msgId]
        assert bytes(row.value) == record.body
        users = [pair for pair in record.property_pairs if pair[0] not in ROCKETMQ_PROPERTIES]
        assert [(h.key, bytes(h.value).decode()) for h in row.headers or ()] == users
        assert round(row.timestamp.timestamp() * 1000) == record.store_timestamp_ms
        assert row.tags == record.tags


def test_a_history_compares_the_rows_with_the_log(spark, numbers, tmp_path):
    rows = load(spark, numbers, subscribe="t").collect()
    seen = [(row.offset, row.key and bytes(row.key).decode(), bytes(row.value)) for row in rows]
    with Recorder(tmp_path / "history.jsonl", topics=[]) as recorder:
        recorder.rows("t", 0, 0, 100, seen)
        recorder.rows("t", 0, 0, 100, [*seen[1:], seen[1]])
    report = check([tmp_path / "history.jsonl"], store=numbers)
    assert report.counts["ranges"] == 2 and report.broken == {"ranges": 1}, report.findings


def test_a_user_schema_is_the_projection(spark):
    frame = load(spark, schema="offset BIGINT, tags STRING", assign='{"TopicA":[2]}')
    rows = frame.orderBy("offset").collect()
    assert [row.offset for row in rows] == list(range(100))
    assert all(row.tags.startswith("tag") for row in rows)


def test_a_query_counts_and_groups_by_sql(spark):
    load(spark, subscribePattern="Topic.").createOrReplaceTempView("messages")
    rows = spark.sql("SELECT partition, count(*) n FROM messages GROUP BY 1 ORDER BY 1").collect()
    assert [(row.partition, row.n) for row in rows] == [(q, 100) for q in range(4)]


def test_temporary_views_read_by_sql_alone(spark):
    views = {"plain": "", "file": "file:", "slashes": "file://"}
    for name, prefix in views.items():
        spark.sql(
            f"CREATE OR REPLACE TEMPORARY VIEW {name} USING hastore "
            f"OPTIONS (path '{prefix}{THREE_FILES}', subscribe 'TopicA', includeMetadata true)"
        )
    counts = (f"SELECT '{name}', partition, count(tags) FROM {name} GROUP BY 2" for name in views)
    rows = spark.sql(" UNION ALL ".join(counts)).collect()
    assert {tuple(row) for row in rows} == {(name, q, 100) for name in views for q in range(4)}
    for name in views:
        spark.sql(f"DROP VIEW {name}")


@pytest.mark.full
def test_a_temporary_view_over_nodes_names_the_unreachable_address(spark):
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW nodes USING hastore "
        "OPTIONS (`hastore.bootstrap.servers` '127.0.0.1:1', subscribe 'TopicA', retryTimeout '1s')"
    )
    with pytest.raises(PySparkException, match=r"127\.0\.0\.1:1"):
        spark.sql("SELECT * FROM nodes").collect()
    spark.sql("DROP VIEW nodes")


@pytest.mark.parametrize(
    "clauses",
    [
        f"OPTIONS (path '{THREE_FILES}', subscribe 'TopicA')",
        f"OPTIONS (subscribe 'TopicA') LOCATION '{THREE_FILES}'",
        "OPTIONS (`hastore.bootstrap.servers` '127.0.0.1:1', subscribe 'TopicA')",
    ],
)
def test_a_table_is_refused_when_it_is_made(spark, clauses):
    with pytest.raises(PySparkException, match="use CREATE TEMPORARY VIEW name USING hastore"):
        spark.sql(f"CREATE TABLE refused USING hastore {clauses}")
    assert not spark.catalog.tableExists("refused")


def test_a_table_with_declared_columns_is_refused_when_it_is_read(spark):
    # Spark does not call the source when it creates such a table, and later passes no options.
    spark.sql(f"CREATE TABLE own (value BINARY) USING hastore OPTIONS (path '{THREE_FILES}')")
    try:
        for query in ("SELECT * FROM own", "INSERT INTO own SELECT CAST('a' AS BINARY)"):
            with pytest.raises(PySparkException, match="use CREATE TEMPORARY VIEW name USING has"):
                spark.sql(query).collect()
    finally:
        spark.sql("DROP TABLE own")


def test_offsets_bound_the_read(spark, numbers):
    frame = load(
        spark,
        numbers,
        subscribe="t",
        startingOffsets=json.dumps({"t": {"0": 10}}),
        endingOffsets=json.dumps({"t": {"0": 20}}),
    )
    assert offsets(frame) == list(range(10, 20))


def test_timestamps_bound_the_read(spark, numbers):
    frame = load(spark, numbers, subscribe="t", startingTimestamp="90500", endingTimestamp="95000")
    assert offsets(frame) == list(range(91, 95))


@pytest.mark.parametrize(
    ("options", "tasks"),
    [({}, 1), ({"minPartitions": "4"}, 4), ({"maxRecordsPerPartition": "9"}, 12)],
)
def test_a_read_is_cut_into_tasks(spark, numbers, options, tasks):
    frame = load(spark, numbers, subscribe="t", **options)
    assert frame.rdd.getNumPartitions() == tasks
    assert offsets(frame) == list(range(100))


def test_an_empty_range_has_no_rows(spark, numbers):
    frame = load(spark, numbers, subscribe="t", endingOffsets=json.dumps({"t": {"0": 0}}))
    assert frame.collect() == []
    assert load(spark, numbers, subscribePattern="nothing").collect() == []


def test_mode_log_returns_every_record(spark):
    with StoreReader(str(GOLDEN / "variants")) as reader:
        expected = dict(reader.raw_records())
    rows = load(spark, GOLDEN / "variants", mode="log", minPartitions="3").collect()
    assert {row.physicalOffset: bytes(row.record) for row in rows} == expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": "TopicA", "startingOfsets": "earliest"}, "did you mean 'startingOffsets'?"),
        ({}, "One of the following options must be specified"),
        ({"subscribe": "TopicA", "endingOffsets": "earliest"}, "ending offset can't be earliest"),
        ({"subscribe": "topicA"}, "did you mean 'TopicA'?"),
        ({"assign": '{"TopicA":[9]}'}, "has no partition 9"),
        ({"subscribe": "a", "path": "/nonexistent"}, "there is no directory /nonexistent"),
    ],
)
def test_a_wrong_option_is_reported_by_load(spark, options, text):
    with pytest.raises(PySparkException) as caught:
        load(spark, **{"path": THREE_FILES, **options})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("path", "options", "text"),
    [
        # Only now it is known that this is not a stream.
        (THREE_FILES, {"subscribe": "TopicA", "startingOffsets": "latest"}, "can't be latest for"),
        (
            THREE_FILES,
            {"assign": '{"TopicA":[0]}', "startingOffsets": '{"TopicA":{"0":101}}'},
            "is not available",
        ),
    ],
)
def test_missing_stores_topics_and_offsets_are_reported_by_the_planning(spark, path, options, text):
    with pytest.raises(PySparkException) as caught:
        load(spark, path, **options).count()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ("velue BINARY", "has no column 'velue'"),
        ("value STRING", "is binary, not string"),
        ("key BINARY NOT NULL", "can be null"),
        ("value BINARY, VALUE BINARY", "twice|already exists|duplicate"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(spark, schema, text):
    with pytest.raises(PySparkException, match=f"(?is).*({text})"):
        load(spark, schema=schema, subscribe="TopicA").collect()


def rows_of_the_scan(frame):
    """Run a query; return the number of rows that its scan gave to Spark."""
    frame.collect()
    plan = frame._jdf.queryExecution().executedPlan()
    leaves = plan.collectLeaves()
    return leaves.head().metrics().apply("numOutputRows").value()


PUSHES = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def pushing(spark):
    """A session that pushes filters."""
    spark.conf.set(PUSHES, "true")
    yield spark
    spark.conf.unset(PUSHES)


def test_with_an_option_filters_decide_what_is_read(pushing, numbers):
    schema = "offset BIGINT, timestamp TIMESTAMP"

    def where(condition):  # a DataFrame of its own for each query, as the documentation says
        frame = load(pushing, numbers, subscribe="t", schema=schema, pushFilters="true")
        return frame.filter(condition)

    tail = where("offset >= 90 AND offset <> 95")
    assert offsets(tail) == [90, 91, 92, 93, 94, 96, 97, 98, 99]
    assert rows_of_the_scan(tail) == 10
    late = where("timestamp > '1970-01-01T00:01:30.0005Z'")
    assert offsets(late) == list(range(91, 100))
    assert rows_of_the_scan(late) == 100 - (91 - 60)  # times may run back by a minute
    assert rows_of_the_scan(where("offset IS NULL")) == 0
    assert offsets(where("offset IN (3, 5, NULL)")) == [3, 5]
    assert offsets(where("offset <=> NULL")) == []
    assert offsets(where("NOT (offset > 1)")) == [0, 1]
    assert offsets(where("offset < 2 OR offset = 50")) == [0, 1, 50]
    assert rows_of_the_scan(where("offset > 92233720368547758")) == 0


def test_without_the_option_a_dataframe_may_be_used_by_several_queries(pushing, numbers):
    """Spark up to 4.3 would use the plan of the first one for the others too."""
    frame = load(pushing, numbers, subscribe="t", schema="offset BIGINT")
    assert offsets(frame.filter("offset >= 90")) == list(range(90, 100))
    assert rows_of_the_scan(frame.filter("offset >= 90")) == 100
    assert offsets(frame) == list(range(100))
    assert offsets(frame.filter("offset < 2 OR offset = 50")) == [0, 1, 50]
    both = frame.filter("offset < 5").union(frame.filter("offset >= 90"))
    assert offsets(both) == [*range(5), *range(90, 100)]


def test_in_a_session_that_does_not_push_filters_the_option_changes_nothing(spark, numbers):
    frame = load(spark, numbers, subscribe="t", pushFilters="true").filter("offset >= 90")
    assert offsets(frame) == list(range(90, 100))
    assert rows_of_the_scan(frame) == 100
