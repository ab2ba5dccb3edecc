"""Options of streams: Kafka's rules, and what only a batch read may have."""

import logging

import pytest

from hastore.errors import UsageError
from hastore.spark.options.offsets import Bound, GlobalTimestamp, TopicPartition
from hastore.spark.options.source_options import Mode, Patience, parse_either, parse_stream_options

WHERE = {"path": "/store", "subscribe": "t"}


def parse(**options):
    return parse_stream_options(WHERE | options)


def test_a_stream_begins_at_the_end_without_limits():
    options = parse()
    assert options.source.limits.start is Bound.LATEST
    assert options.source.limits.fail_on_data_loss
    assert options.admission.max_offsets is None
    assert options.admission.min_offsets is None
    assert options.admission.max_delay_s == 900


def test_starts_have_the_forms_and_precedence_of_a_read():
    assert parse(startingOffsets="EARLIEST").source.limits.start is Bound.EARLIEST
    start = parse(startingOffsets='{"t":{"0":-1,"1":-2,"2":7}}').source.limits.start
    assert start.offsets == {
        TopicPartition("t", 0): Bound.LATEST,
        TopicPartition("t", 1): Bound.EARLIEST,
        TopicPartition("t", 2): 7,
    }
    later = parse(startingOffsets="latest", startingTimestamp="1970-01-01T00:00:09Z")
    assert later.source.limits.start == GlobalTimestamp(9_000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("15m", 900), ("500ms", 0.5), ("250", 0.25), ("2 h", 7_200), ("3S", 3), ("1d", 86_400)],
)
def test_the_delay_is_a_duration_of_spark(text, seconds):
    assert parse(maxTriggerDelay=text).admission.max_delay_s == pytest.approx(seconds)


def test_how_long_a_query_waits_for_nodes():
    assert parse().source.patience == Patience(30.0, 900.0, "retryTimeout")
    assert parse(retryTimeout="1h").source.patience == Patience(3_600.0, 3_600.0, "retryTimeout")
    with pytest.raises(UsageError, match="'retryTimeout' is '0s'; use a time above 0"):
        parse(retryTimeout="0s")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endingOffsets": "latest"}, "ending offset not valid in streaming queries"),
        ({"endingTimestamp": "5"}, "ending timestamp not valid in streaming queries"),
        ({"endingOffsetsByTimestamp": "{}"}, "ending timestamp not valid in streaming queries"),
        ({"maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger must be positive"),
        ({"minOffsetsPerTrigger": "many"}, "'minOffsetsPerTrigger' is 'many'"),
        (
            {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            r"\(9\) should be less than or equal to maxOffsetsPerTrigger \(8\)",
        ),
        ({"maxTriggerDelay": "soon"}, "use a duration such as 500ms, 30s or 15m"),
        ({"maxTriggerDelay": "-5s"}, "use a duration"),
        ({"maxOffsetPerTrigger": "5"}, "did you mean 'maxOffsetsPerTrigger'"),
    ],
)
def test_wrong_options_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        parse(**options)


def test_mode_log_is_for_batch_reads():
    with pytest.raises(UsageError, match="mode=log is for batch queries"):
        parse_stream_options({"path": "/store", "mode": "log"})


def test_filters_are_not_pushed_into_a_stream():
    with pytest.raises(UsageError, match="pushFilters is for batch queries.*remove it"):
        parse_stream_options(WHERE | {"pushFilters": "true"})
    assert not parse_stream_options(WHERE | {"pushFilters": "false"}).source.push_filters
    assert parse_either(WHERE | {"pushFilters": "true"}).push_filters


def test_the_schema_accepts_what_either_kind_of_query_accepts(caplog):
    with caplog.at_level(logging.WARNING):
        parse_either(WHERE | {"startingOffsets": "latest", "maxOffsetsPerTrigger": "5"})
    assert not caplog.records  # the stream uses the option that a batch read ignores
    parse_either(WHERE | {"endingOffsets": "latest"})
    assert parse_either({"path": "/store", "mode": "log"}).mode is Mode.LOG
    with pytest.raises(UsageError, match="did you mean"):
        parse_either(WHERE | {"startingOfsets": "latest"})
