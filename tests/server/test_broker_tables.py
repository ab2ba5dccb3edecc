"""A RocketMQ broker's tables: what its files say, what is left out, and what is no table."""

import contextlib
import json
import os
import random

import pytest

from hastore.errors import CorruptRecordError, MessageIllegalError
from hastore.protocol.committed_positions import CommitBody
from hastore.record.topic_records import (
    MAX_QUEUES,
    TopicChange,
    TopicConfig,
    build_change,
    check_config,
)
from hastore.server.api.commit_records import commit_record
from hastore.server.broker_tables import (
    DELAYS,
    POSITIONS,
    config_of,
    load,
    merged,
    named,
    read_delays,
    read_groups,
    read_positions,
    read_topics,
)

# As RocketMQ 5.3.3 and 4.9.8 write them (4.9.8 has no attributes).
TOPICS_5 = b"""{
	"dataVersion":{"counter":3,"stateVersion":0,"timestamp":1700000000000},
	"topicConfigTable":{
		"Orders":{"attributes":{"message.type":"NORMAL","hastore.group":"x"},"order":true,"perm":4,
			"readQueueNums":8,"topicFilterType":"SINGLE_TAG","topicName":"Orders",
			"topicSysFlag":2,"writeQueueNums":6},
		"SCHEDULE_TOPIC_XXXX":{"order":false,"perm":6,"readQueueNums":18,"writeQueueNums":18},
		"%RETRY%TOOLS_CONSUMER":{"perm":6,"readQueueNums":1,"writeQueueNums":1},
		"rmq_sys_REVIVE_LOG_c":{"perm":6,"readQueueNums":8,"writeQueueNums":8},
		"HASTORE_POSITIONS":{"perm":6,"readQueueNums":1,"writeQueueNums":1}
	}
}"""
TOPICS_4 = (
    b'{"dataVersion":{"counter":1,"timestamp":2},"topicConfigTable":{"T":{"order":false,"perm":6,'
    b'"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,'
    b'"writeQueueNums":4}}}'
)
POSITIONS_5 = (
    b'{"dataVersion":{"counter":1},"offsetTable":{"T@g":{0:5,1:0,2:-1},"%RETRY%g@g":{0:3},'
    b'"RMQ_SYS_TRANS_HALF_TOPIC@CID_RMQ_SYS_TRANS":{0:9},"a{1:2}@x":{7:1}}}'
)


def test_topics_of_both_versions():
    found, left_out = read_topics(TOPICS_5)
    attributes = {"message.type": "NORMAL"}
    assert found == [TopicConfig("Orders", 8, 6, 4, True, 2, attributes)] and not left_out
    assert read_topics(TOPICS_4).found == [TopicConfig("T", 4, 4)]


def test_positions():
    found, left_out = read_positions(POSITIONS_5)
    assert found == {
        ("g", "T"): {0: 5, 1: 0},
        ("g", "%RETRY%g"): {0: 3},
        ("x", "a{1:2}"): {7: 1},  # numbers within a name are no keys
    }
    assert not left_out
    assert read_positions(b'{"offsetTable":{"T@g":{"0":5}}}').found == {("g", "T"): {0: 5}}


def test_groups_with_their_topics():
    raw = (
        b'{"subscriptionGroupTable":{"g":{"groupName":"other","retryMaxTimes":3,"retryQueueNums":2,'
        b'"unknown":{"a":1}},"TOOLS_CONSUMER":{},"CID_RMQ_SYS_TRANS":{},"d":{}}}'
    )
    found, left_out = read_groups(raw)
    assert [one.group_name for one in found] == ["d", "g"] and not left_out
    assert found[1].retry_max_times == 3
    config = config_of(found[1], None)
    assert (config.name, config.read_queues, config.write_queues) == ("%RETRY%g", 2, 2)
    assert json.loads(config.attributes["hastore.group"]) == {
        "groupName": "g", "retryMaxTimes": 3, "retryQueueNums": 2,
    }  # fmt: skip
    known = TopicConfig("%RETRY%d", 5, 5, attributes={"a": "b"})
    assert config_of(found[0], known).read_queues == 5
    assert config_of(found[0], known).attributes.keys() == {"a", "hastore.group"}


def test_what_cannot_be_is_left_out_and_named():
    queues = MAX_QUEUES + 1
    raw = b'{"topicConfigTable":{"A":{"readQueueNums":%d},"B":{"perm":"x"},"C":{},"":{},"D":7}}'
    found, left_out = read_topics(raw % queues)
    assert [one.name for one in found] == ["C"]
    assert len(left_out) == 4 and any("4097 read queues" in text for text in left_out)
    raw = (
        b'{"offsetTable":{"T@g":{"0":"x"},"T@h":{"0":1.5},"T@i":7,"T":{"0":1},"@k":{"0":1},'
        b'"T@l":{"0":99999999999999999999},"T@m":{"-1":1},"T@n":{"0":true},"T@ok":{"0":1}}}'
    )
    found, left_out = read_positions(raw)
    assert found == {("ok", "T"): {0: 1}} and len(left_out) == 8
    assert named(left_out).endswith("; and 3 more")
    found, left_out = read_groups(
        b'{"subscriptionGroupTable":{"g":{"retryQueueNums":-1},"h":7,"":{},"i":{"attributes":{"a":"'
        + b"x" * 5000 + b'"}}}}'
    )  # fmt: skip
    assert not found and len(left_out) == 4


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"null", b"7", b"{}", b'{"offsetTable":[]}', b'{"offsetTable":null}',
        b'{"offsetTable":{"a@b":{0:1}', b"\xff\xfe", b'{"offsetTable":{"a":' * 100_000,
        b"[" * 100_000, b"\0" * 64,
    ],
)  # fmt: skip
def test_what_is_no_table_is_an_error(raw):
    with pytest.raises(CorruptRecordError, match=r"no consumerOffset\.json of RocketMQ"):
        load(POSITIONS, raw)
    with pytest.raises(CorruptRecordError):
        read_topics(raw)
    with pytest.raises(CorruptRecordError):
        read_groups(raw)
    with pytest.raises(CorruptRecordError):
        read_delays(raw)


@pytest.mark.parametrize("cut", range(1, len(POSITIONS_5), 7))
def test_a_table_that_is_cut_is_an_error(cut):
    with pytest.raises(CorruptRecordError):
        read_positions(POSITIONS_5[:cut])


@pytest.mark.parametrize("table", [b"{0:1}", b"{999:1}", b"{1:-1}", b'{1:"x"}', b"{1:null}"])
def test_delay_offsets_are_checked(table):
    read_delays(b'{"offsetTable":{1:0,18:7}}')
    with pytest.raises(CorruptRecordError):
        read_delays(b'{"offsetTable":%s}' % table)


def test_what_an_answer_does_not_name_stays():
    known = b'{"offsetTable":{"T@g":{0:5,1:6},"T@h":{0:1}}}'
    news = b'{"dataVersion":{"counter":9},"offsetTable":{"T@g":{0:4},"T@i":{0:2}}}'
    assert merged(POSITIONS, known, news) == (
        b'{"offsetTable":{"T@g":{0:4},"T@h":{0:1},"T@i":{0:2}}}'
    )
    known, news = b'{"offsetTable":{1:5,3:9}}', b'{"offsetTable":{"1":6}}'
    assert merged(DELAYS, known, news) == b'{"offsetTable":{1:6,3:9}}'


SEED = int(os.environ.get("HASTORE_SEED", "0"))
SEEDS = int(os.environ.get("HASTORE_SEEDS", "400"))
PIECES = [
    b'"', b"{", b"}", b"[", b"]", b":", b",", b"@", b"\\ud800", b"\\u0000", b"\\u0001", b"-1",
    b"1e999", b"\xff", b"null", b"true", b"9" * 30, b"\\", b"1.5", b"%RETRY%", b"HASTORE_",
    b'"a":{', b"\0",
]  # fmt: skip
GROUPS_5 = (
    b'{"subscriptionGroupTable":{"g":{"attributes":{"a":"b"},"groupName":"g","retryMaxTimes":3,'
    b'"subscriptionDataSet":[{"a":1}],"groupRetryPolicy":{"type":"EXPONENTIAL"}}}}'
)


def test_fuzz_whatever_a_broker_says_only_this_error_is_raised():
    readers = [read_topics, read_positions, read_groups, read_delays]
    for seed in range(SEED, SEED + SEEDS):
        rng = random.Random(seed)
        raw = bytearray(rng.choice([TOPICS_5, TOPICS_4, POSITIONS_5, GROUPS_5]))
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randrange(4)] = rng.choice(PIECES)
        for read in readers:
            try:
                found = read(bytes(raw))
            except CorruptRecordError:
                continue
            except BaseException:
                print(f"HASTORE_SEED={seed} HASTORE_SEEDS=1 {bytes(raw)!r}")
                raise
            if read is read_groups:
                for settings in found.found:
                    check_config(config_of(settings, None))
                    build_change(TopicChange(config_of(settings, None)), 1)
            if read is read_topics:
                for config in found.found:
                    build_change(TopicChange(config), 1)
            if read is read_positions:
                for (group, topic), offsets in found.found.items():
                    places = {queue: (at, None, None) for queue, at in offsets.items()}
                    with contextlib.suppress(MessageIllegalError):
                        commit_record(CommitBody(group, topic, places), 1)
                merged(POSITIONS, bytes(raw), POSITIONS_5)
