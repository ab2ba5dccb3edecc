"""The options and columns of a write, and the identity of its rows."""

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from hastore.errors import UsageError
from hastore.record.properties import sole_producer
from hastore.spark.options.source_options import Patience
from hastore.spark.sink.options import (
    SinkColumns,
    SinkOptions,
    check_append,
    check_columns,
    ignored_columns,
    parse_sink_options,
)
from hastore.spark.sink.records import MAX_ROWS, batch_task, number_of, stream_task

SERVERS = {"hastore.bootstrap.servers": "tcp://a:1, tcp://b:2"}


def parse(*, streaming=False, **options):
    return parse_sink_options(SERVERS | options, streaming=streaming)


def test_defaults_and_all_options():
    servers, patience = ("tcp://a:1", "tcp://b:2"), Patience(30.0, 900.0, "deliveryTimeout")
    assert parse() == SinkOptions(servers, None, None, False, True, None, patience=patience)
    given = {"ACKS": "ALL", "syncflush": "True", "deliverytimeout": "2m", "topic": "t"}
    assert parse(**given, writeid="w") == SinkOptions(
        servers, "t", "all", True, True, "w", patience=Patience(120.0, 120.0, "deliveryTimeout")
    )
    assert parse(streaming=True, checkpointLocation="x", queryName="q", idempotent="false") == (
        SinkOptions(servers, None, None, False, False, None, patience=patience)
    )


@pytest.mark.parametrize(
    ("text", "acks"), [("0", 0), ("1", 1), ("all", "all"), ("-1", "all"), (" All ", "all")]
)
def test_acks(text, acks):
    assert parse(acks=text).acks == acks


@pytest.mark.parametrize(
    ("text", "seconds"), [("500", 0.5), ("500ms", 0.5), ("30s", 30), ("2 min", 120), ("1H", 3600)]
)
def test_delivery_timeout(text, seconds):
    patience = parse(deliveryTimeout=text, retryTimeout="9m").patience
    assert patience == Patience(seconds, seconds, "deliveryTimeout")
    assert parse(retryTimeout=text).patience == Patience(seconds, seconds, "retryTimeout")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topc": "t"}, "unknown option 'topc'.*did you mean 'topic'"),
        ({"ack": "1"}, "did you mean 'acks'"),
        ({"zzz": "1"}, "known options: hastore.bootstrap.servers, topic, acks"),
        ({"kafka.acks": "1"}, "Kafka's; use 'acks'"),
        ({"kafka.bootstrap.servers": "a"}, "use 'hastore.bootstrap.servers'"),
        ({"kafka.delivery.timeout.ms": "1"}, "use 'deliveryTimeout'"),
        ({"kafka.linger.ms": "1"}, "no meaning for format 'hastore'; remove it"),
        ({"path": "x"}, "writes to running nodes, not to a directory"),
        ({"acks": "2"}, "'acks' is '2'; use 'all'"),
        ({"syncFlush": "yes"}, "'syncFlush' is 'yes'; use true or false"),
        ({"deliveryTimeout": "0s"}, "a time above 0"),
        ({"deliveryTimeout": "soon"}, "'deliveryTimeout' is 'soon'; use a duration"),
        ({"topic": "a b"}, "option 'topic': topic 'a b'"),
        ({"topic": "a.b"}, "no dots as in Kafka's: write - or _ for a dot"),
        ({"topic": "HASTORE_FOO"}, "option 'topic': topic HASTORE_FOO: .* are the group's own"),
        ({"hastore.bootstrap.servers": " , "}, "is empty"),
        ({"asyncProgressTrackingEnabled": "true"}, "unknown option 'asyncProgress"),
        ({"writeId": " "}, "'writeId' is empty"),
        ({"writeId": "w", "idempotent": "false"}, "contradicts idempotent=false"),
    ],
)
def test_a_wrong_option_is_named(options, problem):
    with pytest.raises(UsageError, match=problem):
        parse(**options)


def test_servers_are_needed_and_a_stream_has_no_write_id():
    with pytest.raises(UsageError, match=r"servers' must be specified"):
        parse_sink_options({"topic": "t"}, streaming=False)
    with pytest.raises(UsageError, match="known by its checkpoint"):
        parse(streaming=True, writeId="w")


TEXT, RAW, INT, LONG = StringType(), BinaryType(), IntegerType(), LongType()


def headers(key="key", value=RAW):
    return ArrayType(StructType([StructField(key, TEXT), StructField("value", value)]))


def schema(columns):
    return StructType([StructField(name, kind) for name, kind in columns])


@pytest.mark.parametrize(
    ("columns", "topic", "places"),
    [
        ([("value", TEXT)], "t", SinkColumns(0)),
        ([("topic", TEXT), ("VALUE", RAW)], None, SinkColumns(1, topic=0)),
        ([("topic", TEXT), ("value", RAW)], "wins", SinkColumns(1)),
        (
            [("headers", headers()), ("key", TEXT), ("tags", TEXT), ("partition", INT),
             ("value", TEXT)], "t",
            SinkColumns(4, key=1, headers=0, partition=3, tags=2),
        ),
        (
            [("key", RAW), ("value", RAW), ("topic", TEXT), ("partition", INT), ("offset", LONG),
             ("timestamp", TimestampType()), ("timestampType", INT), ("msgId", TEXT)],
            None, SinkColumns(1, 0, None, 2, 3),
        ),
    ],
)  # fmt: skip
def test_columns(columns, topic, places):
    assert check_columns(schema(columns), topic) == places


V = ("value", TEXT)


@pytest.mark.parametrize(
    ("columns", "topic", "problem"),
    [
        ([("key", TEXT)], "t", r"'value' \(string or binary\) is missing"),
        ([V], None, "no topic: set the option 'topic'"),
        ([("value", INT)], "t", "'value' is int, but .* takes string or binary; cast it"),
        ([V, ("key", LONG)], "t", "'key' is bigint"),
        ([V, ("topic", INT)], None, "'topic' is int"),
        ([V, ("partition", LONG)], "t", "'partition' is bigint, .* takes int"),
        ([V, ("tags", RAW)], "t", "'tags' is binary"),
        ([V, ("headers", MapType(TEXT, TEXT))], "t", "'headers' is map<string,string>"),
        ([V, ("headers", headers(key="name"))], "t", "'headers' is array"),
        ([V, ("headers", headers(value=TEXT))], "t", "'headers' is array"),
        ([V, ("VALUE", TEXT)], "t", "'value' occurs twice"),
    ],
)
def test_a_wrong_column_is_named(columns, topic, problem):
    with pytest.raises(UsageError, match=problem):
        check_columns(schema(columns), topic)


def test_other_columns_are_left_out_with_one_warning_as_by_kafkas_sink():
    columns = [V, ("price", DoubleType()), ("Header", TEXT), ("offset", LONG), ("keys", TEXT)]
    assert check_columns(schema(columns), "t") == SinkColumns(0)
    text = ignored_columns(schema(columns))
    assert "does not write the columns price, Header, keys; did you mean 'headers' by" in text
    assert "did you mean 'key' by 'keys'" in text and "offset" not in text
    assert ignored_columns(schema([V, ("key", TEXT), ("timestampType", INT)])) is None
    both = ignored_columns(schema([V, ("key", TEXT), ("keys", TEXT)]))
    assert "columns keys; it takes" in both


def test_a_view_writes_what_it_reads():
    view = {"subscribe": "t", "startingOffsets": "earliest", "tags": "a", "maxTriggerDelay": "1s"}
    options = parse(**view)
    assert (options.topic, options.default_topic) == (None, "t")
    assert check_columns(schema([V]), None, options.default_topic) == SinkColumns(0)
    assert parse(subscribe="a,b").default_topic is None
    assert parse(subscribe="HASTORE_POSITIONS").default_topic is None
    assert parse(topic="u", subscribe="t").topic == "u"
    with pytest.raises(UsageError, match="if this is a table.*CREATE TEMPORARY VIEW"):
        parse_sink_options({}, streaming=False)


def test_only_append():
    check_append(False, streaming=True)
    with pytest.raises(UsageError, match=r"save mode overwrite .* use mode\('append'\)"):
        check_append(True, streaming=False)
    with pytest.raises(UsageError, match=r"output mode complete .* use outputMode\('append'\)"):
        check_append(True, streaming=True)


def test_identities_differ_and_stay():
    tasks = [
        stream_task("q", 0, 0), stream_task("q", 0, 1), stream_task("r", 0, 0),
        batch_task("q", 0), batch_task("q", 1), stream_task("q", 1 << 27, 0),
    ]  # fmt: skip
    assert len({task.producer_id for task in tasks}) == len(tasks)
    assert stream_task("q", 5, 3) == stream_task("q", 5, 3)
    assert stream_task("q", 5, 0).producer_id == stream_task("q", 0, 0).producer_id
    assert stream_task("q", 5, 0).first == 5 << 32
    last = stream_task("q", (1 << 27) - 1, 0)
    assert len(str(number_of(last, MAX_ROWS - 1))) <= 18
    with pytest.raises(UsageError, match="more than 4,294,967,296 rows"):
        number_of(last, MAX_ROWS + 1)
    for task in tasks:  # the form that nodes read fastest
        text = f"HS_PID\x01{task.producer_id}\x02HS_SEQ\x01{task.first}\x02".encode()
        assert sole_producer(text) is not None
