"""`read_topic`, and the examples of docs/pipeline.md that use it."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.types import TimestampType

from hastore.demo.flights import find_flights, read_delays, read_flights
from hastore.errors import UsageError
from hastore.pipeline.stats import StatsOptions, run_stats
from hastore.pipeline.where import Where
from hastore.spark import read_topic
from tests.spark.stores import numbered, write_store

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "pipeline.md"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """100 messages in two queues, a second apart."""
    path = tmp_path_factory.mktemp("flights")
    write_store(path, numbered(100, topic="flights", queues=2))
    return path


def test_a_topic_is_read_whole(spark, store):
    frame = read_topic(spark, "flights", path=store, headers=True, metadata=True)
    assert {"key", "value", "headers", "tags"} <= set(frame.columns)
    assert frame.count() == 100


def test_a_stream_is_followed_and_its_wrong_options_are_refused_by_the_call(spark, store):
    frame = read_topic(spark, "flights", path=store, stream=True, columns=["offset"])
    assert frame.isStreaming and frame.columns == ["offset"]
    end = datetime.fromtimestamp(95, UTC)
    for wrong, text in (
        ({"end": end}, "ending timestamp not valid in streaming queries"),
        ({"options": {"pushFilters": "true"}}, "pushFilters is for batch queries"),
        ({"options": {"maxOffsetsPerTrigger": "0"}}, "maxOffsetsPerTrigger must be positive"),
    ):
        with pytest.raises(UsageError, match=text):
            read_topic(spark, "flights", path=store, stream=True, columns=["offset"], **wrong)


def test_columns_are_the_projection_in_their_order(spark, store):
    frame = read_topic(spark, ["flights"], path=store, columns=["offset", "value", "headers"])
    assert frame.columns == ["offset", "value", "headers"]
    assert frame.count() == 100


def test_a_time_has_a_zone_whatever_the_session_says(spark, store):
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        chosen = read_topic(spark, "flights", path=store, columns=["timestamp", "offset"])
        assert chosen.count() == 100
        assert chosen.schema["timestamp"].dataType == TimestampType()
        whole = read_topic(spark, "flights", path=store)
        assert whole.where("timestamp IS NOT NULL").count() == 100
        assert run_stats(spark, Where(str(store)), StatsOptions()).topics[0]["messages"] == 100
    finally:
        spark.conf.unset("spark.sql.timestampType")


def test_offsets_and_moments_bound_the_read(spark, store):
    start = {0: 10, 1: 49}
    assert read_topic(spark, "flights", path=store, start=start).count() == 41
    since = datetime.fromtimestamp(90, UTC)
    until = datetime.fromtimestamp(95, UTC)
    assert read_topic(spark, "flights", path=store, start=since, end=until).count() == 5


# May take long: for another time zone Spark starts other Python processes.
@pytest.mark.full
def test_moments_without_a_zone_are_those_of_the_session(spark, store):
    zone = spark.conf.get("spark.sql.session.timeZone")
    try:
        spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
        local = datetime(1970, 1, 1, 9, 1, 30)
        assert read_topic(spark, "flights", path=store, start=local).count() == 10
        iso = {"startingTimestamp": "1970-01-01T09:01:30"}
        assert read_topic(spark, "flights", path=store, options=iso).count() == 10
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.parametrize(
    ("topic", "arguments", "text"),
    [
        ("a", {}, "either a path or servers"),
        ("a", {"path": "/s", "servers": "h:1"}, "either a path or servers"),
        (["a", "b"], {"path": "/s", "start": {0: 1}}, "single topic"),
        ("a", {"path": "/s", "columns": ["velue"]}, "no column 'velue'"),
        ("a", {"path": "/s", "columns": ["value"], "headers": True}, "in `columns` instead"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(spark, topic, arguments, text):
    with pytest.raises(UsageError, match=text):
        read_topic(spark, topic, **arguments)


@pytest.mark.parametrize(
    ("topic", "options", "sentence"),
    [
        ("flights", {"startingOfsets": "earliest"}, "unknown option 'startingofsets'"),
        ("flight", {}, "there is no topic 'flight' at"),
    ],
)
def test_an_error_begins_with_the_sources_sentence(spark, store, topic, options, sentence):
    with pytest.raises(AnalysisException) as caught:
        read_topic(spark, topic, path=store, options=options).count()
    first = str(caught.value).splitlines()[0]
    assert sentence in first
    assert "Traceback" not in str(caught.value)


def test_the_examples_of_the_page_run(spark, store, capsys):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    examples = [block for block in blocks if "read_topic(" in block]
    assert examples
    for example in examples:
        assert "data/node2" in example
        exec(example.replace("data/node2", str(store)), {"spark": spark})
    assert "|        0|   50|" in capsys.readouterr().out


@pytest.mark.full
def test_the_notebook_of_the_page_runs_on_the_flights(spark, tmp_path, capsys):
    """The blocks of its section, in order, over the first 3,000 flights and the real airlines."""
    flights = find_flights()
    messages = [
        ("flights", flight.row % 4, {"body": flight.body, "store_timestamp_ms": flight.row})
        for flight in read_flights(3_000)
    ]
    write_store(tmp_path / "store", messages, file_size=1 << 22, units_per_file=1_000)
    section = PAGE.read_text().split("\n## A notebook")[1].split("\n## ")[0]
    code = "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    for name, place in (
        ("data/node2", tmp_path / "store"),
        ("out/checkpoint", tmp_path / "checkpoint"),
        ("airlines.csv", flights.parent / "airlines.csv"),
        ("delays.png", tmp_path / "delays.png"),
    ):
        assert f'"{name}"' in code
        code = code.replace(name, str(place))
    names = {"spark": spark}
    exec(code, names)
    assert "United Air Lines Inc." in names["lines"]
    assert sum(row.flights for row in names["daily"].collect()) == 3_000
    total = {carrier: delays.flights for carrier, delays in read_delays(3_000).items()}
    assert len(names["lines"]) == len(total)
    assert "AirTran Airways Corporation" in capsys.readouterr().out
    assert (tmp_path / "delays.png").read_bytes().startswith(b"\x89PNG")
