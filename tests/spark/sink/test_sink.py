"""The sink in a real session, to real nodes: round trips, repeated writes, restarted streams."""

import shutil

import pytest
from pyspark.errors import AnalysisException, PythonException, StreamingQueryException
from pyspark.sql.functions import lit
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    StringType,
    StructField,
    StructType,
)

from tests.process.harness import Group
from tests.spark.late import finish

HEADERS = ArrayType(
    StructType([StructField("key", StringType()), StructField("value", BinaryType())])
)
ROWS = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("headers", HEADERS),
        StructField("tags", StringType()),
    ]
)
SHOWN = ("key", "value", "partition", "headers", "tags")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A running pair; files of 4 MiB."""
    with Group(tmp_path_factory.mktemp("nodes"), 2, store={"commitlog_file_size": "4MiB"}) as group:
        yield group.start()


def servers(pair):
    return ",".join(pair.bootstrap)


def save(frame, pair, topic=None, **options):
    writer = frame.write.format("hastore").mode("append")
    options["hastore.bootstrap.servers"] = servers(pair)
    if topic is not None:
        options["topic"] = topic
    writer.options(**options).save()


def load(spark, pair, topic):
    return spark.read.format("hastore").options(**{
        "hastore.bootstrap.servers": servers(pair), "subscribe": topic,
        "includeHeaders": "true", "includeMetadata": "true",
    }).load()  # fmt: skip


def content(frame):
    """Return the rows, as the source shows them, in a comparable form."""

    def plain(value):
        if isinstance(value, list):
            return tuple((pair.key, bytes(pair.value)) for pair in value)
        return bytes(value) if isinstance(value, bytearray) else value

    rows = [tuple(plain(row[name]) for name in SHOWN) for row in frame.select(*SHOWN).collect()]
    return sorted(rows, key=repr)


def values(spark, pair, topic):
    return sorted(row.value.decode() for row in load(spark, pair, topic).collect())


@pytest.mark.slow("the first writes of a session start Python workers")
def test_what_the_source_shows_comes_back_exactly(spark, pair):
    rows = [
        (b"k", b"v", 1, [("a", b"1"), ("b", b""), ("a", b"2")], "red"),
        (None, b"", 3, None, None),
        (b"", b"\x00\x01\x02\xff", 0, [("trace", b"\xff\xfe\x00")], ""),
        ("schlüssel".encode(), "größe".encode(), 2, [("ü", "ö".encode())], "grün"),
        (b"\xff\xfe", b"x" * 100_000, 2, [("long", b"y" * 20_000)], "t"),
        (b"gone", None, 1, None, None),  # a tombstone
    ]
    frame = spark.createDataFrame(rows, ROWS)
    save(frame.withColumn("price", lit(1.5)), pair, "first")  # not written, as by Kafka's sink
    first = load(spark, pair, "first")
    written = content(frame)
    assert content(first) == written
    assert {row.bornHost for row in first.select("bornHost").collect()} == {"127.0.0.1:0"}
    # All columns of the source, so `topic` comes from the option, and `offset` is not written.
    save(first, pair, "second")
    assert content(load(spark, pair, "second")) == written


def test_sql_writes_and_reads_one_view(spark, pair):
    given = f"`hastore.bootstrap.servers` '{servers(pair)}', topic 'sql', acks 'all'"
    spark.sql(f"CREATE TEMPORARY VIEW both USING hastore OPTIONS ({given}, minPartitions 1)")
    try:
        spark.sql(
            "INSERT INTO both (key, value) SELECT CAST(k AS BINARY), CAST(v AS BINARY) "
            "FROM VALUES ('a', '1'), ('b', NULL) AS rows (k, v)"
        )
        found = spark.sql("SELECT CAST(key AS STRING) k, CAST(value AS STRING) v, topic FROM both")
        assert sorted(tuple(row) for row in found.collect()) == [
            ("a", "1", "sql"), ("b", None, "sql"),
        ]  # fmt: skip
    finally:
        spark.sql("DROP VIEW both")


@pytest.mark.full
def test_rows_without_partition_go_by_key_or_in_turn(spark, pair):
    keyed = spark.range(40).selectExpr("CAST(id AS STRING) AS value", "CAST(id % 5 AS STRING) key")
    save(keyed, pair, "keyed", acks="all")
    found = load(spark, pair, "keyed").selectExpr("CAST(key AS STRING)", "partition").distinct()
    assert found.count() == 5  # one queue for each key
    topics = spark.range(40).selectExpr(
        "CAST(id AS STRING) AS value", "IF(id % 2 = 0, 'even', 'odd') AS topic"
    )
    save(topics, pair, acks="1", syncFlush="true")
    even, odd = load(spark, pair, "even"), load(spark, pair, "odd")
    assert even.count() == odd.count() == 20
    assert even.union(odd).select("partition").distinct().count() == 4


def numbered(spark, count, bad=None, text="row"):
    """Rows in two partitions; the row `bad` has a tag that no message can have."""
    tags = "NULL" if bad is None else f"IF(id = {bad}, '\\u0001', NULL)"
    return spark.range(0, count, 1, 2).selectExpr(
        f"'{text} ' || id AS value", f"CAST({tags} AS STRING) AS tags"
    )


@pytest.mark.slow("each of its jobs plans, writes and commits anew")
def test_a_write_id_makes_a_repeated_job_write_each_row_once(spark, pair):
    every = sorted(f"row {n}" for n in range(8_000))
    with pytest.raises(PythonException) as failed:
        save(numbered(spark, 8_000, bad=7_900), pair, "job", writeId="job 1")
    sentence = "hastore.errors.UsageError: row 3900 of partition 1: column 'tags' has a"
    assert sentence in str(failed.value)
    assert 0 < len(values(spark, pair, "job")) < 8_000
    save(numbered(spark, 8_000), pair, "job", writeId="job 1")
    assert values(spark, pair, "job") == every
    save(numbered(spark, 8_000), pair, "job", writeId="job 1")
    assert values(spark, pair, "job") == every
    with pytest.raises(PythonException, match=r"row \d+ of partition \d is not the row that an"):
        save(numbered(spark, 8_000, text="other"), pair, "job", writeId="job 1")
    with pytest.raises(PythonException, match="has 1000 rows, but an earlier attempt has stored"):
        save(numbered(spark, 2_000), pair, "job", writeId="job 1")
    assert values(spark, pair, "job") == every
    save(numbered(spark, 10), pair, "job", writeId="job 2")
    assert len(values(spark, pair, "job")) == 8_010


def start(frame, pair, checkpoint, **options):
    return (
        frame.writeStream.format("hastore").trigger(availableNow=True)
        .option("hastore.bootstrap.servers", servers(pair))
        .option("checkpointLocation", str(checkpoint)).options(**options).start()
    )  # fmt: skip


@pytest.mark.slow("a query starts twice, and plans each of its batches")
def test_a_restarted_query_repeats_its_batch_without_duplicates(spark, pair, tmp_path):
    source, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    source.mkdir()

    def add(name, numbers, bad=""):
        lines = "".join(f"{number}{bad}\n" for number in numbers)
        (source / name).write_text(lines)

    def lines():
        text = spark.readStream.text(str(source))
        bad = "IF(value LIKE '%bad', '\\u0001', NULL)"
        return text.selectExpr("value", f"CAST({bad} AS STRING) AS tags")

    add("a", range(3_000))
    start(lines(), pair, checkpoint, topic="stream").awaitTermination()
    add("b", range(3_000, 6_000))
    start(lines(), pair, checkpoint, topic="stream").awaitTermination()
    every = sorted(str(number) for number in range(6_000))
    assert values(spark, pair, "stream") == every
    # A driver that dies before it notes the end of a batch repeats the batch.
    forget_commits(checkpoint, 1)
    start(lines(), pair, checkpoint, topic="stream").awaitTermination()
    assert values(spark, pair, "stream") == every
    add("c", [*range(6_000, 8_000), "bad"])
    query = start(lines(), pair, checkpoint, topic="stream")
    with pytest.raises(StreamingQueryException, match="row 2000 of partition 0: column 'tags' has"):
        query.awaitTermination()
    # The file is repaired: the batch is repeated, and the rows that are stored stay as they are.
    add("c", range(6_000, 8_001))
    shutil.rmtree(source / ".c.crc", ignore_errors=True)
    start(lines(), pair, checkpoint, topic="stream").awaitTermination()
    assert values(spark, pair, "stream") == sorted(str(number) for number in range(8_001))


def forget_commits(checkpoint, first):
    """Remove the checkpoint's commits from a batch on, as if the driver had died before them."""
    for commit in (checkpoint / "commits").iterdir():
        number = commit.name.lstrip(".").partition(".")[0]
        if number.isdigit() and int(number) >= first:
            commit.unlink()


@pytest.mark.slow("of its batches: each commits to a checkpoint")
@pytest.mark.full
def test_a_topic_is_copied_once_by_a_stream_that_repeats_batches(spark, pair, tmp_path):
    """From nodes to nodes: three batches, of which the last is repeated."""
    rows = spark.range(0, 9_000, 1, 3).selectExpr(
        "CAST(id AS STRING) AS value", "CAST(id % 100 AS STRING) AS key", "'red' AS tags",
        "array(struct('n' AS key, CAST(CAST(id AS STRING) AS BINARY) AS value)) AS headers",
    )  # fmt: skip
    save(rows, pair, "original")
    original = load(spark, pair, "original")

    def copy():
        source = spark.readStream.format("hastore").options(**{
            "hastore.bootstrap.servers": servers(pair), "subscribe": "original",
            "startingOffsets": "earliest", "includeHeaders": "true", "includeMetadata": "true",
            "maxOffsetsPerTrigger": "3000",
        }).load()  # fmt: skip
        finish(lambda: start(source, pair, tmp_path / "copy", topic="copy"), 600)

    copy()
    commits = [name for name in (tmp_path / "copy" / "commits").iterdir() if name.name.isdigit()]
    assert len(commits) >= 3
    assert content(load(spark, pair, "copy")) == content(original)
    forget_commits(tmp_path / "copy", len(commits) - 1)
    copy()
    assert content(load(spark, pair, "copy")) == content(original)


def test_wrong_writes_are_refused_when_they_are_planned(spark, pair):
    frame = spark.range(3).selectExpr("CAST(id AS STRING) AS value")
    for change, sentence in (
        (lambda: save(frame, pair), "no topic: set the option 'topic'"),
        (lambda: save(frame, pair, "t", ack="1"), "unknown option 'ack'"),
        (lambda: save(frame.selectExpr("1 AS value"), pair, "t"), "column 'value' is int"),
        (
            lambda: frame.write.format("hastore").mode("overwrite").save(),
            "save mode overwrite is not possible",
        ),
    ):
        with pytest.raises(AnalysisException) as refused:
            change()
        first = str(refused.value).splitlines()[0]
        assert sentence in first and "Traceback" not in str(refused.value)


def test_a_queue_that_does_not_exist_fails_the_write(spark, pair):
    frame = spark.range(3).selectExpr("CAST(id AS STRING) AS value", "9 AS partition")
    with pytest.raises(PythonException, match="there is no queue 9: topic nine has 4 queues"):
        save(frame, pair, "nine")
