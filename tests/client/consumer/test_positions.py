"""RocketMQ's consumerOffset.json: reading the broker's, and writing one for it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore import Consumer, Producer
from hastore.client.consumer.positions_client import (
    Positions,
    fit,
    format_offsets,
    parse_offsets,
)
from hastore.errors import UsageError
from hastore.protocol.api import POSITIONS_TOPIC
from tests.client.conftest import Node

# As a broker 5.3.3 writes it: with numbers as keys.
OF_A_BROKER = """{
	"dataVersion":{
		"counter":17,
		"stateVersion":0,
		"timestamp":1795271801123
	},
	"offsetTable":{
		"flights@delays":{0:250,1:0,2:249,3:-1
		},
		"%RETRY%delays@delays":{0:3
		},
		"odd{1:2}@g,3:4":{7:1}
	}
}"""


def test_a_brokers_file_is_understood():
    assert parse_offsets(OF_A_BROKER) == {
        ("delays", "flights"): {0: 250, 1: 0, 2: 249},
        ("delays", "%RETRY%delays"): {0: 3},
        ("g,3:4", "odd{1:2}"): {7: 1},
    }


NAMES = st.text('abc%_-|{}:,"\\ 1日', min_size=1, max_size=12)
TABLES = st.dictionaries(
    st.tuples(NAMES, NAMES),
    st.dictionaries(st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), min_size=1, max_size=5),
    max_size=5,
)


@given(TABLES)
def test_what_is_written_comes_back(table):
    text = format_offsets(table)
    assert parse_offsets(text) == table
    json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"offsetTable": 3}', '{"offsetTable": {"t@g": 3}}',
        '{"offsetTable": {"t": {"0": 1}}}', '{"offsetTable": {"@g": {"0": 1}}}',
        '{"offsetTable": {"t@g": {"x": 1}}}', '{"offsetTable": {"t@g": {"0": null}}}',
        '{"offsetTable": {"t@g": {0:1}}',
    ],
)  # fmt: skip
def test_a_malformed_file_is_refused(text):
    with pytest.raises(UsageError, match=r"consumerOffset\.json"):
        parse_offsets(text)


def test_positions_are_moved_into_the_log():
    ranges = {0: (10, 50), 1: (0, 5)}
    assert fit({0: 3, 1: 5, 2: 7}, ranges) == {0: 10, 1: 5}
    assert fit({0: 51, 1: 2}, ranges) == {0: 50, 1: 2}


def test_a_record_that_is_no_commit_is_passed_over(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """Any client may put one into the topic of the commits; the nodes pass it over, too."""
    with Producer([node.address]) as producer:
        producer.send_sync("t", b"1", queue=0)
        producer.send_sync(POSITIONS_TOPIC, b"no commit", queue=0)
        with Consumer("t", [node.address], group="g", queues=[0]) as consumer:
            assert len(consumer.poll(1, 60)) == 1
            consumer.commit()
    with Positions([node.address]) as positions:
        assert positions.all() == {("g", "t"): {0: 1}}
    assert "no commit at offset" in caplog.text
