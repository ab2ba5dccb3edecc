"""What a stranger may give the source: each case is one error that names the thing and the remedy.

The classes are called as Spark calls them, without Spark: that takes milliseconds.
"""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from hastore.errors import HastoreError
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import MAX_TASKS, split_log, split_queues
from hastore.spark.source import HastoreDataSource
from tests.spark.direct import batches
from tests.spark.stores import numbered, write_store

FILE_SIZE = 1 << 12
COUNT = 100


def file_of(store, offset):
    return store / "commitlog" / f"{offset // FILE_SIZE * FILE_SIZE:020}"


def overwrite(store, offset, data):
    path = file_of(store, offset)
    content = bytearray(path.read_bytes())
    at = offset % FILE_SIZE
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """A good store of 100 messages in two queues and several files, and damaged copies of it."""
    root = tmp_path_factory.mktemp("stores")
    placed = write_store(root / "good", numbered(COUNT, queues=2), file_size=FILE_SIZE)
    first, middle, last = placed[10], placed[45], placed[-5]
    for name in (
        "torn",
        "torn-late",
        "short",
        "body",
        "shrunk",
        "gone",
        "no-queues",
        "ünïcödé 日本",
    ):
        shutil.copytree(root / "good", root / name)
    overwrite(root / "torn", first.physical_offset + 4, b"\xff\xff\xff\xff")
    overwrite(root / "torn-late", last.physical_offset + 4, b"\xff\xff\xff\xff")
    rest = FILE_SIZE - last.physical_offset % FILE_SIZE
    overwrite(root / "short", last.physical_offset, bytes(rest))
    overwrite(root / "body", first.physical_offset + 88, b"X")
    os.truncate(file_of(root / "shrunk", first.physical_offset), 500)
    file_of(root / "gone", middle.physical_offset).unlink()
    shutil.rmtree(root / "no-queues" / "consumequeue")
    (root / "empty").mkdir()
    (root / "new" / "commitlog").mkdir(parents=True)
    (root / "file").write_text("x")
    return root


def rows(path, schema=None, **options):
    """Load, plan and read as Spark does; return the number of rows."""
    given = {"subscribe": "t"} | ({} if path is None else {"path": str(path)}) | options
    given = {name.replace("__", "."): text for name, text in given.items() if text is not None}
    return sum(batch.num_rows for batch in batches(schema, **given))


def of(*fields):
    return StructType([StructField(*field) for field in fields])


SERVERS = "hastore__bootstrap__servers"
ASSIGN = {"subscribe": None}
OPTIONS = [
    ({"startingofsets": "earliest"}, "unknown option 'startingofsets'.*did you mean"),
    ({"kafka__group__id": "g"}, "option 'kafka.group.id' has no meaning .*remove it"),
    ({"fetchOffset.numRetries": "9"}, "Kafka's; 'retryTimeout' is how long to wait"),
    ({"includeHeaders": "yes"}, "option 'includeHeaders' is 'yes'; use true or false"),
    ({"failOnDataLoss": ""}, "option 'failOnDataLoss' is ''; use true or false"),
    ({"mode": "fast"}, "option 'mode' is 'fast'; use 'queue' or 'log'"),
    ({"minPartitions": "1.5"}, "'minPartitions' is '1.5'; it must be a positive whole"),
    ({"minPartitions": "٣"}, "'minPartitions' is '٣'; it must be a positive whole"),
    ({"minPartitions": "9" * 30}, "'minPartitions' is '999.*positive whole"),
    ({"maxRecordsPerPartition": "0"}, "maxRecordsPerPartition must be positive"),
    ({"assign": '{"t":[0]}'}, "Only one .*: subscribe, subscribePattern, assign"),
    (ASSIGN, "One of the following options must .*: subscribe, subscribePattern, assign"),
    (ASSIGN | {"subscribePattern": "("}, "'subscribePattern' is not a regular expression"),
    (ASSIGN | {"assign": '{"t":[-1]}'}, "option 'assign': Expected e.g."),
    (ASSIGN | {"assign": '{"t":[99999999999999999999]}'}, "option 'assign': Expected e.g."),
    (ASSIGN | {"assign": '{"t":[7]}'}, r"topic 't' at .* has no partition 7; it has \[0, 1\]"),
    ({"subscribe": "tópico"}, "there is no topic 'tópico' at .*; topics there: t"),
    ({"subscribe": "../../etc"}, "there is no topic '../../etc'"),
    ({"subscribe": "a\0b"}, r"there is no topic 'a\\x00b'"),
    ({"startingOffsets": "latest"}, "can't be latest for batch"),
    ({"startingOffsets": "first"}, "option 'startingOffsets': .*earliest or latest, got first"),
    ({"endingOffsets": "{"}, "option 'endingOffsets': Expected e.g."),
    ({"endingOffsetsByTimestamp": "{"}, "option 'endingOffsetsByTimestamp': Expected e.g."),
    ({"startingOffsets": '{"t":{"0":3}}'}, "must specify all TopicPartitions.*t-0, t-1"),
    (
        {"startingOffsets": '{"t":{"0":0,"1":51}}'},
        r"starting offset 51 of t-1 is not available .*\[0, 50\).*set failOnDataLoss to false",
    ),
    ({"endingOffsets": '{"t":{"0":0,"1":9223372036854775807}}'}, "ending offset 92.*t-1 is not"),
    (
        {"startingOffsets": '{"t":{"0":9,"1":9}}', "endingOffsets": '{"t":{"0":8,"1":9}}'},
        r"startingOffsets of t-0 \(9\) is beyond endingOffsets \(8\)",
    ),
    ({"startingTimestamp": "yesterday"}, "option 'startingTimestamp': .*ISO 8601"),
    ({"startingTimestamp": "2099-01-01T00:00:00Z"}, "startingOffsetsByTimestampStrategy to"),
    ({"startingTimestamp": "5", "endingTimestamp": "4"}, "beyond endingTimestamp"),
    ({"mode": "log"}, "'subscribe' has no meaning in mode=log"),
    (ASSIGN | {"mode": "log", "maxRecordsPerPartition": "5"}, "has no meaning in mode=log"),
    ({SERVERS: "h:1"}, "Only one of the options 'path' .* 'hastore.bootstrap.servers'"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS)
def test_a_wrong_option_is_named_with_what_is_accepted(stores, options, text):
    with pytest.raises(HastoreError, match=f"(?s){text}"):
        rows(stores / "good", **options)


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("nonsense", "option 'hastore.bootstrap.servers': expected tcp://HOST:PORT"),
        ("h:99999", "option 'hastore.bootstrap.servers': expected tcp://HOST:PORT"),
        (" , ", "option 'hastore.bootstrap.servers' is empty; name at least one node"),
        ("127.0.0.1:1", "0.2 s.*no answer from .*127.0.0.1:1.*reach the nodes' API ports"),
    ],
)
def test_servers_that_are_none_are_named(named, text):
    with pytest.raises(HastoreError, match=text):
        rows(None, **{SERVERS: named, "retryTimeout": "200ms"})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": "tt"}, "there is no topic 'tt'.*did you mean 't'"),
        ({"subscribe": "orders.eu"}, "no topic 'orders.eu'.*RocketMQ's topic names have no dots"),
        (ASSIGN | {"assign": '{"t":[7]}'}, "has no partition 7"),
        ({"path": "/nonexistent"}, "there is no directory /nonexistent"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be positive"),
        ({"maxTriggerDelay": "soon"}, "'maxTriggerDelay' is 'soon'"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "less than or equal"),
    ],
)
def test_what_is_wrong_for_batches_and_streams_is_refused_by_load(stores, options, text):
    given = {"path": str(stores / "good"), "subscribe": "t"} | options
    source = HastoreDataSource({name: value for name, value in given.items() if value is not None})
    with pytest.raises(HastoreError, match=text):
        source.schema()


@pytest.mark.parametrize(
    "options",
    [
        {"subscribePattern": "later"},
        {"subscribe": "gone", "failOnDataLoss": "false"},
        {"topic": "new", "acks": "all"},  # a write may create it
        {"subscribe": "t", "topic": "other", "writeId": "w"},
        {SERVERS.replace("__", "."): "127.0.0.1:1", "subscribe": "t", "retryTimeout": "50ms"},
    ],
)
def test_load_does_not_refuse_what_may_come_later(stores, options):
    path = {} if SERVERS.replace("__", ".") in options else {"path": str(stores / "good")}
    assert HastoreDataSource(path | options).schema().fieldNames()[0] == "key"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", "there is no directory .*missing on .*every executor"),
        ("file", "there is no directory .*file on .*every executor"),
        ("empty", r"is no store: it has no commitlog/ or dledger-\*/"),
        ("new", "no topics at all: the store is empty, or lacks its consume queues"),
        ("no-queues", "`hastore pipeline index` builds anew"),
        ("torn", "torn: the record at offset .* has no record magic; `hastore log verify`"),
        ("body", "body: .*CRC"),
        ("shrunk", "shrunk: the record at offset .* does not fit into the bytes"),
        ("gone", "failOnDataLoss to false"),
        ("torn-late", "torn-late: the record at offset .* has no record magic"),
        ("short", "last whole record .*a record is damaged, or log files are missing"),
    ],
)
def test_a_store_that_is_none_or_damaged_is_never_read_in_silence(stores, name, text):
    with pytest.raises(HastoreError, match=text) as caught:
        rows(stores / name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("good", {}, COUNT),
        ("ünïcödé 日本", {}, COUNT),
        ("new", {"subscribe": None, "subscribePattern": ".*"}, 0),
        ("short", {"failOnDataLoss": "false"}, COUNT - 5),
        ("good", {"startingOffsets": '{"t":{"0":0,"1":51}}', "failOnDataLoss": "false"}, 50),
        (
            "good",
            {"startingOffsets": '{"t":{"0":7,"1":7}}', "endingOffsets": '{"t":{"0":7,"1":9}}'},
            2,
        ),
        ("good", {"endingOffsets": '{"t":{"0":0,"1":0}}'}, 0),
        ("good", {"topic": "t", "subscribe": None}, COUNT),
        ("good", {"maxRecordsPerPartition": "9" * 18}, COUNT),
        ("good", {"minPartitions": "9" * 18}, COUNT),
    ],
)
def test_what_can_be_read_is_read(stores, name, options, count):
    assert rows(stores / name, **options) == count


@pytest.fixture
def open_folder():
    """A folder that other users reach; pytest's folders are private."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("part", ["", "commitlog", f"commitlog/{0:020}", "consumequeue/t/0"])
def test_a_store_that_is_not_readable_is_named(stores, open_folder, part):
    rows(stores / "good")  # imports what another user may not be able to import
    store = open_folder / "store"
    shutil.copytree(stores / "good", store)
    for path in (store, *store.rglob("*")):  # a node makes what only its own user can read
        path.chmod(0o755 if path.is_dir() else 0o644)
    hidden = store / part
    mode = hidden.stat().st_mode
    hidden.chmod(0)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)  # root may read everything
        with pytest.raises(HastoreError, match=f"{hidden} is not readable on .*let that user read"):
            rows(store)
    finally:
        if root:
            os.seteuid(0)
        hidden.chmod(mode)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (of(("velue", BinaryType())), "no column 'velue'; .*projection of: key, value"),
        (of(("välue", BinaryType())), "no column 'välue'"),
        (of(("value", StringType())), "'value' .*is binary, not string; .*cast it"),
        (of(("partition", LongType())), "'partition' .*is int, not bigint"),
        (of(("key", BinaryType(), False)), "can be null; drop NOT NULL"),
        (of(("value", BinaryType()), ("VALUE", BinaryType())), "named twice"),
        (of(), "has no columns; name at least one"),
    ],
)
def test_a_wrong_schema_is_refused(stores, schema, text):
    with pytest.raises(HastoreError, match=text):
        rows(stores / "good", schema)


def test_a_read_of_too_many_tasks_is_refused_at_once():
    queue = [(TopicPartition("t", 0), OffsetRange(0, 10**15))]
    with pytest.raises(HastoreError, match="'minPartitions' is 1000000000000.*lower it"):
        split_queues(queue, min_partitions=10**12, max_records=None)
    with pytest.raises(HastoreError, match="'maxRecordsPerPartition' is 1, .*raise it"):
        split_queues(queue, min_partitions=None, max_records=1)
    with pytest.raises(HastoreError, match="'minPartitions' is"):
        split_log(0, 10**15, min_partitions=MAX_TASKS * 10)


def test_spark_reports_one_sentence_and_leaves_no_half_written_output(spark, stores, tmp_path):
    """The record that is torn is read after the first rows were written."""
    frame = spark.read.format("hastore").load(
        str(stores / "torn"), subscribe="t", maxRecordsPerPartition="5"
    )
    with pytest.raises(PySparkException) as caught:
        frame.write.parquet(str(tmp_path / "out"))
    text = str(caught.value)
    assert "at offset" in text
    assert "Traceback" not in text
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert not list((tmp_path / "out").glob("*.parquet"))


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        # Spark refuses this itself, for every Python data source.
        ("SELECT * FROM hastore.`{path}`", "Unsupported data source type for direct query"),
        (
            "CREATE TEMPORARY VIEW bad USING hastore OPTIONS (path '{path}', subscrib 't')",
            "subscribe",
        ),
        ("CREATE TEMPORARY VIEW bad USING hastore OPTIONS (path '{path}')", "One of the following"),
        (
            "CREATE TEMPORARY VIEW bad (velue BINARY) USING hastore "
            "OPTIONS (path '{path}', subscribe 't')",
            "velue",
        ),
    ],
)
def test_sql_reports_the_sources_sentence(spark, stores, sql, text):
    with pytest.raises(AnalysisException, match=text):
        spark.sql(sql.format(path=stores / "good")).collect()
        spark.sql("SELECT * FROM bad").collect()
