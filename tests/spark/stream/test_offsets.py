"""The JSON of a stream's offsets."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import UsageError
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import Stored
from hastore.spark.read.backend import QueuePlace
from hastore.spark.stream_offsets import StreamOffset, from_json, next_offsets, to_json

T0, T10 = TopicPartition("t", 0), TopicPartition("t", 10)
NUMBERS = st.integers(0, 2**63 - 1)
PLACES = st.dictionaries(
    st.builds(TopicPartition, st.text(min_size=1), st.integers(0, 2**31 - 1)),
    st.builds(
        QueuePlace, NUMBERS, st.none() | st.builds(Stored, st.none() | NUMBERS, NUMBERS)
    ),
    max_size=4,
)  # fmt: skip


def test_the_form_is_the_documented_one():
    places = {T10: QueuePlace(3), T0: QueuePlace(17, Stored(65537, 4711))}
    assert to_json(StreamOffset(places, origin={T0: QueuePlace(0)})) == {
        "version": 1,
        "next": {"t": {"0": 17, "10": 3}},
        "before": {"t": {"0": [65537, 4711]}},
        "from": {"next": {"t": {"0": 0}}, "before": {}},
    }
    assert next_offsets(places) == {"t": {"0": 17, "10": 3}}


@given(PLACES, st.none() | PLACES, st.booleans())
def test_offsets_survive_the_checkpoint(places, origin, is_initial):
    offset = StreamOffset(places, origin, is_initial)
    assert from_json(json.loads(json.dumps(to_json(offset)))) == offset


def test_equal_offsets_have_equal_text():
    one = StreamOffset({T0: QueuePlace(1), T10: QueuePlace(2)})
    other = StreamOffset({T10: QueuePlace(2), T0: QueuePlace(1)})
    assert json.dumps(to_json(one)) == json.dumps(to_json(other))


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"t": {"0": 5}}, "not those of a hastore stream"),
        ({"version": 2}, "version 2"),
        ({"version": 1, "next": {"t": {"x": 5}}, "before": {}}, "another checkpointLocation"),
        ({"version": 1, "next": [], "before": {}}, "another checkpointLocation"),
        ({"version": 1, "next": {"t": {"0": 5}}, "before": {"t": {"0": [1]}}}, "checkpoint"),
    ],
)
def test_the_offsets_of_another_source_are_refused(tree, text):
    with pytest.raises(UsageError, match=text):
        from_json(tree)
