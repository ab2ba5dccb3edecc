"""The options: names, defaults, precedence and errors as in Spark's Kafka source."""

import os

import pytest

from hastore.errors import UsageError
from hastore.spark.options.offsets import (
    Bound,
    GlobalTimestamp,
    NoMatch,
    OffsetsByPartition,
    TimestampsByPartition,
    TopicPartition,
)
from hastore.spark.options.source_options import (
    Assign,
    Mode,
    Subscribe,
    SubscribePattern,
    parse_options,
)

BASE = {"path": "/store", "subscribe": "TopicA"}


def test_the_defaults_are_kafkas():
    options = parse_options(BASE)
    assert options.path == "/store"
    assert options.bootstrap == ()
    assert options.mode is Mode.QUEUE
    assert options.strategy == Subscribe(("TopicA",))
    assert options.limits.start is Bound.EARLIEST
    assert options.limits.end is Bound.LATEST
    assert options.limits.fail_on_data_loss
    assert options.limits.no_match is NoMatch.ERROR
    assert not options.include_headers
    assert not options.include_metadata
    assert options.min_partitions is None
    assert options.max_records_per_partition is None


def test_names_are_accepted_in_any_case():
    options = parse_options({"PATH": "/s", "SUBSCRIBEPATTERN": "a.*", "includeheaders": "TRUE"})
    assert options.strategy == SubscribePattern("a.*")
    assert options.include_headers


def test_the_security_file_is_the_option_s_else_the_environment_s(monkeypatch):
    raw = {"hastore.bootstrap.servers": "a:1", "subscribe": "t"}
    monkeypatch.delenv("HASTORE_SECURITY", raising=False)
    assert parse_options(raw).security is None
    monkeypatch.setenv("HASTORE_SECURITY", "/e/client.yaml")
    assert parse_options(raw).security == "/e/client.yaml"
    monkeypatch.setenv("HASTORE_SECURITY", "client.yaml")  # executors run in other folders
    assert parse_options(raw).security == os.path.abspath("client.yaml")
    given = {**raw, "Hastore.Security.File": " /o/client.yaml "}
    assert parse_options(given).security == "/o/client.yaml"


def test_servers_are_split_and_trimmed():
    raw = {"hastore.bootstrap.servers": " tcp://a:1, tcp://b:2 ,", "subscribe": "b, a ,b"}
    options = parse_options(raw)
    assert options.bootstrap == ("tcp://a:1", "tcp://b:2")
    assert options.strategy == Subscribe(("a", "b"))


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("file:///data/s", "/data/s"),
        ("file:/data/s", "/data/s"),
        ("file://localhost/data/s", "/data/s"),
        ("FILE:/data/a b%20", "/data/a b%20"),
        ("file:s", "file:s"),
        ("file://host/s", "file://host/s"),
        ("s/file:/x", "s/file:/x"),
    ],
)
def test_a_file_url_is_a_path(given, path):
    assert parse_options({**BASE, "path": given}).path == path


def test_assign_names_partitions():
    options = parse_options({"path": "/s", "assign": '{"a":[0,1],"b":[2]}'})
    wanted = {TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 2)}
    assert options.strategy == Assign(frozenset(wanted))


def test_precedence_is_timestamp_then_timestamps_by_partition_then_offsets():
    by_partition = '{"a":{"0":5}}'
    raw = {
        **BASE,
        "startingOffsets": '{"a":{"0":1}}',
        "startingOffsetsByTimestamp": by_partition,
        "startingTimestamp": "7",
    }
    assert parse_options(raw).limits.start == GlobalTimestamp(7)
    del raw["startingTimestamp"]
    expected = TimestampsByPartition({TopicPartition("a", 0): 5})
    assert parse_options(raw).limits.start == expected
    del raw["startingOffsetsByTimestamp"]
    assert parse_options(raw).limits.start == OffsetsByPartition({TopicPartition("a", 0): 1})


def test_minus_two_and_minus_one_in_json_are_earliest_and_latest():
    raw = {
        **BASE,
        "startingOffsets": '{"a":{"0":-2,"1":4}}',
        "endingOffsets": '{"a":{"0":-1,"1":9}}',
    }
    limits = parse_options(raw).limits
    assert isinstance(limits.start, OffsetsByPartition)
    assert isinstance(limits.end, OffsetsByPartition)
    assert limits.start.offsets[TopicPartition("a", 0)] is Bound.EARLIEST
    assert limits.start.offsets[TopicPartition("a", 1)] == 4
    assert limits.end.offsets[TopicPartition("a", 0)] is Bound.LATEST


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"path": "/s"}, "One of the following options must be specified"),
        ({**BASE, "subscribePattern": "x"}, "Only one of the following options can"),
        ({**BASE, "assign": '{"a":[0]}'}, "Only one of the following options can"),
        ({"subscribe": "a"}, "One of the options 'path'"),
        ({**BASE, "hastore.bootstrap.servers": "tcp://a:1"}, "Only one of the options 'path'"),
        ({**BASE, "path": " "}, "'path' is empty"),
        ({**BASE, "path": "a\0b"}, "NUL"),
        ({"hastore.bootstrap.servers": " ,", "subscribe": "a"}, "name at least one node"),
        ({**BASE, "subscribe": " , "}, "No topics to subscribe to"),
        ({"path": "/s", "subscribePattern": " "}, "Pattern to subscribe is empty"),
        ({"path": "/s", "subscribePattern": "a("}, "is not a regular expression"),
        ({"path": "/s", "assign": "a"}, "No topicpartitions to assign"),
        ({"path": "/s", "assign": "{}"}, "No topicpartitions to assign"),
        ({"path": "/s", "assign": '{"a":0}'}, 'Expected e.g. {"topicA":[0,1]'),
        ({"path": "/s", "assign": '{"a":[-1]}'}, 'Expected e.g. {"topicA":[0,1]'),
        ({"path": "/s", "assign": '{"a":[true]}'}, 'Expected e.g. {"topicA":[0,1]'),
        ({"path": "/s", "assign": '{"a":[0]'}, 'Expected e.g. {"topicA":[0,1]'),
        ({**BASE, "startingOffsets": "latest"}, "starting offset can't be latest"),
        ({**BASE, "startingOffsets": '{"a":{"0":-1}}'}, "startingOffsets for a-0 can't be latest"),
        ({**BASE, "endingOffsets": "Earliest"}, "ending offset can't be earliest"),
        ({**BASE, "endingOffsets": '{"a":{"0":-2}}'}, "ending offset for a-0 can't be earliest"),
        ({**BASE, "startingOffsets": "first"}, 'Expected e.g. {"topicA":{"0":23'),
        ({**BASE, "startingOffsets": "[1]"}, 'Expected e.g. {"topicA":{"0":23'),
        ({**BASE, "startingOffsets": '{"a":{"0":-3}}'}, 'Expected e.g. {"topicA":{"0":23'),
        ({**BASE, "startingOffsets": '{"a":{"0":1.5}}'}, 'Expected e.g. {"topicA":{"0":23'),
        ({**BASE, "startingOffsets": '{"a":{"x":1}}'}, 'Expected e.g. {"topicA":{"0":23'),
        ({**BASE, "startingOffsets": '{"a":{"0":1},"a":{"0":2}}'}, "a name twice"),
        ({**BASE, "startingOffsets": '{"a":{"0":9223372036854775808}}'}, "Expected e.g."),
        ({**BASE, "startingOffsets": "[" * 100_000}, "Expected e.g."),
        ({**BASE, "startingTimestamp": "yesterday"}, "Expected milliseconds since 1970 or ISO"),
        ({**BASE, "endingTimestamp": "2026-11-20 21:52"}, "has no time zone"),
        ({**BASE, "startingTimestamp": "9", "endingTimestamp": "8"}, "beyond endingTimestamp"),
        ({**BASE, "startingOffsetsByTimestampStrategy": "x"}, "use 'error' or 'latest'"),
        ({**BASE, "failOnDataLoss": "yes"}, "use true or false"),
        ({**BASE, "minPartitions": "0"}, "minPartitions must be positive"),
        ({**BASE, "minPartitions": "two"}, "positive whole number"),
        ({**BASE, "maxRecordsPerPartition": "-5"}, "maxRecordsPerPartition must be positive"),
        ({**BASE, "mode": "fast"}, "use 'queue' or 'log'"),
        ({**BASE, "mode": "log"}, "'subscribe' has no meaning in mode=log"),
        ({"mode": "log", "hastore.bootstrap.servers": "tcp://a:1"}, "set the option 'path'"),
        ({**BASE, "statringOffsets": "earliest"}, "did you mean 'startingOffsets'?"),
        ({**BASE, "qqqq": "1"}, "known options: hastore.bootstrap.servers"),
        ({**BASE, "kafka.bootstrap.servers": "a:1"}, "use 'hastore.bootstrap.servers'"),
        ({**BASE, "kafka.group.id": "g"}, "has no meaning for format 'hastore'"),
        ({**BASE, "groupIdPrefix": "g"}, "has no meaning for format 'hastore'"),
        ({}, "One of the options 'path'"),
        ({}, "CREATE TEMPORARY VIEW name USING hastore"),
        ({**BASE, "Provider": "hastore"}, "CREATE TEMPORARY VIEW name USING hastore"),
        ({"paths": '["/a","/b"]', "subscribe": "a"}, "one store at a time"),
    ],
)
def test_a_wrong_option_is_refused_by_name(raw, text):
    with pytest.raises(UsageError) as caught:
        parse_options(raw)
    assert text in str(caught.value)


def test_limits_that_contradict_each_other_are_refused():
    start = '{"a":{"0":5}}'
    with pytest.raises(UsageError, match="different topic partitions"):
        parse_options({**BASE, "startingOffsets": start, "endingOffsets": '{"a":{"1":6}}'})
    with pytest.raises(UsageError, match="beyond endingOffsets"):
        parse_options({**BASE, "startingOffsets": start, "endingOffsets": '{"a":{"0":4}}'})


def test_options_of_streams_are_ignored_with_a_warning(caplog):
    parse_options({**BASE, "maxOffsetsPerTrigger": "10"})
    assert "maxOffsetsPerTrigger option ignored in batch queries" in caplog.text


def test_mode_log_needs_only_a_path():
    options = parse_options({"path": "/s", "mode": "log", "minPartitions": "3"})
    assert options.mode is Mode.LOG
    assert options.strategy is None
