"""What the first run into a target fixes: later runs take it over, and may not ask for others."""

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from hastore.errors import UsageError
from hastore.pipeline import export_options
from hastore.pipeline.compact import CompactOptions, Destination, _take_over
from hastore.pipeline.export import ExportOptions, export
from hastore.pipeline.export_options import INFER, shape_of, take_over
from hastore.pipeline.where import Where
from tests.pipeline.test_export_commits import SPARK, overwrite, run_here, values
from tests.spark.stores import numbered, write_store

SCHEMA = StructType([StructField("carrier", StringType())])
OTHER = StructType([StructField("delay", LongType())])
DDL = {"carrier STRING": SCHEMA, "carrier string": SCHEMA, "delay BIGINT": OTHER}


@pytest.fixture
def parsed(monkeypatch):
    """Replace Spark's parser of DDL; return the texts that it was given."""
    texts = []
    monkeypatch.setattr(
        export_options, "parse_schema", lambda text: texts.append(text) or DDL[text]
    )
    return texts


def state_after(tmp_path, **options):
    """Return what a first run with these options leaves."""
    settled, taken = take_over(tmp_path, {}, ExportOptions(**options))
    assert taken == ()
    shape = shape_of(tmp_path, {}, settled, SCHEMA.json())
    return {"shape": shape, "json_ddl": options.get("json_schema")}


def test_a_repeated_export_takes_over_what_is_not_given(tmp_path, parsed):
    state = state_after(
        tmp_path, headers=True, metadata=True, json_schema="carrier STRING", keep_value=False
    )
    parsed.clear()
    options, taken = take_over(tmp_path, state, ExportOptions(compression="zstd"))
    assert taken == ("--headers", "--metadata", "--drop-value", "--json-schema")
    assert (options.headers, options.metadata, options.keep_value) == (True, True, False)
    assert options.compression == "zstd"
    assert shape_of(tmp_path, state, options, None) == state["shape"]
    assert parsed == []


def test_the_same_schema_may_be_given_in_other_words(tmp_path, parsed):
    state = state_after(tmp_path, json_schema="carrier STRING")
    parsed.clear()
    for text, calls in (("carrier STRING", 0), ("carrier string", 1), (INFER, 1)):
        options, taken = take_over(tmp_path, state, ExportOptions(json_schema=text))
        assert taken == ()
        assert shape_of(tmp_path, state, options, None) == state["shape"]
        assert len(parsed) == calls
    options, _ = take_over(tmp_path, state, ExportOptions(json_schema="delay BIGINT"))
    with pytest.raises(UsageError, match="with another --json-schema, 'carrier STRING'"):
        shape_of(tmp_path, state, options, None)


@pytest.mark.parametrize(
    ("first", "given", "how"),
    [
        ({}, {"headers": True}, "was without --headers, "),
        ({}, {"metadata": True}, "was without --metadata, "),
        ({}, {"json_schema": INFER}, "was without --json-schema, "),
        ({"json_schema": INFER}, {"keep_value": False}, "was without --drop-value, "),
        ({"headers": True}, {"headers": False}, "was with --headers, "),
    ],
)
def test_what_differs_from_the_first_run_is_named_by_its_option(tmp_path, first, given, how):
    state = state_after(tmp_path, **first)
    with pytest.raises(UsageError, match=how):
        take_over(tmp_path, state, ExportOptions(**given))


def test_a_target_of_an_earlier_version_is_taken_over(tmp_path, parsed):
    state = state_after(tmp_path, json_schema="carrier STRING")
    del state["json_ddl"]
    options, _ = take_over(tmp_path, state, ExportOptions(json_schema="carrier STRING"))
    assert shape_of(tmp_path, state, options, None) == state["shape"]
    options, _ = take_over(tmp_path, state, ExportOptions(json_schema="delay BIGINT"))
    with pytest.raises(UsageError, match="with another --json-schema, and all files"):
        shape_of(tmp_path, state, options, None)


def test_the_files_of_a_run_without_options_have_the_columns_of_the_first(tmp_path, monkeypatch):
    store, target = tmp_path / "store", tmp_path / "target"
    messages = numbered(40)
    write_store(store, messages[:20])
    run_here(monkeypatch)
    where = Where(str(store), topics=("t",))
    assert export(SPARK, where, str(target), ExportOptions(metadata=True)).taken_over == ()
    overwrite(store, messages)
    assert export(SPARK, where, str(target)).taken_over == ("--metadata",)
    assert len(values(target)) == 40
    assert {len(export_columns(file)) for file in target.rglob("part-*")} == {16}


def export_columns(file):
    import pyarrow.parquet as pq

    return pq.read_schema(file).names


def compacted(to_topic=None, **more):
    state = {"topic": "t", "keep_without_key": True, "to_topic": to_topic}
    return {**state, "to_servers": to_topic and "127.0.0.1:1", **more}


def test_a_repeated_compaction_takes_over_what_is_not_given(tmp_path):
    options = _take_over(tmp_path, compacted(), "t", CompactOptions())
    assert (options.keep_without_key, options.destination) == (True, None)
    options = _take_over(tmp_path, compacted("latest"), "t", CompactOptions())
    assert options.destination == Destination("latest", "127.0.0.1:1")
    moved = Destination("latest", "127.0.0.1:2")
    options = _take_over(tmp_path, compacted("latest"), "t", CompactOptions(destination=moved))
    assert options.destination == moved
    assert _take_over(tmp_path, {}, "t", CompactOptions()).keep_without_key is False


@pytest.mark.parametrize(
    ("state", "options", "text"),
    [
        (compacted(), CompactOptions(False), "leave out --without-key drop"),
        (compacted(), CompactOptions(destination=Destination("x", "a:1")), "to no topic since"),
        (
            compacted("y"),
            CompactOptions(destination=Destination("x", "a:1")),
            "the topic 'y' since",
        ),
        (compacted("y", to_servers=None), CompactOptions(), "give --to-topic y and --to-servers"),
        (compacted(topic="u"), CompactOptions(), "has the topic 'u'"),
    ],
)
def test_a_compaction_that_differs_is_refused(tmp_path, state, options, text):
    with pytest.raises(UsageError, match=text):
        _take_over(tmp_path, state, "t", options)
