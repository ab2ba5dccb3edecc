"""Bodies of RocketMQ's requests and answers: heartbeats, locks, settings, tables, routes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec

from hastore.client.consumer.positions_client import parse_offsets
from hastore.errors import CorruptRecordError, ProtocolError, UsageError
from hastore.protocol import registration
from hastore.protocol.registration import Queues, Version, decode_route, decode_topic_list
from hastore.protocol.remoting import Frame, encode_body
from hastore.security.identity import Identity
from hastore.server import broker_tables
from hastore.server.remoting import group_requests, groups, lock_requests, rights, subscriptions
from hastore.server.remoting.door import RemotingRefusal
from tests.fuzz import kit

REACHES = (
    groups.decode_heartbeat,
    lock_requests._decode,
    broker_tables.load,
    broker_tables.read_topics,
    broker_tables.read_positions,
    broker_tables.read_groups,
    broker_tables.read_delays,
    broker_tables.read_settings,
    decode_route,
    decode_topic_list,
    group_requests._member_of,
    broker_tables.merged,
)
LEAST = kit.Least(0.4, 8)
TOKENS = (
    *(b'"clientID":"c"', b'"groupName":"g"', b'"topic":"T"', b'"queueId":', b"{0:1,", b'"perm":6'),
    *(b'"offsetTable":{', b'"topicConfigTable":{', b'"T@g":{', b'"attributes":{', b"{1:{"),
)


def seeds() -> list[bytes]:
    """Return bodies as RocketMQ's clients, brokers and name servers write them."""
    heartbeat = (
        b'{"clientID":"10.0.0.1@7","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_FIRST"'
        b',"consumeType":"CONSUME_PASSIVELY","groupName":"g","messageModel":"CLUSTERING",'
        b'"subscriptionDataSet":[{"classFilterMode":false,"codeSet":[97],"expressionType":"TAG",'
        b'"subString":"a || b","subVersion":17,"tagsSet":["a","b"],"topic":"T"}]}],'
        b'"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"p"}],"withoutSub":false}'
    )
    locks = (
        b'{"clientId":"c","consumerGroup":"g","mqSet":[{"brokerName":"b","queueId":0,"topic":"T"},'
        b'{"brokerName":"b","queueId":1,"topic":"T"}],"onlyThisBroker":false}'
    )
    topics, _ = registration.encode_topics([Queues("T", 4, 4, 6)], Version(1, 2, 3))
    table = b'{"dataVersion":{"counter":1},"topicConfigTable":{"T":{"order":false,"perm":6,'
    table += b'"readQueueNums":4,"topicName":"T","topicSysFlag":0,"writeQueueNums":4,'
    table += b'"attributes":{"a":"b"}}}}'
    positions = b'{"offsetTable":{"T@g":{0:5,1:-1,"2":7},"%RETRY%g@g":{0:1}}}'
    settings = b'{"subscriptionGroupTable":{"g":{"groupName":"g","retryMaxTimes":3,"consumeEnable":'
    settings += b'true,"retryQueueNums":1}},"dataVersion":{"counter":1}}'
    route = b'{"brokerDatas":[{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"b","cluster":"c"}],'
    route += b'"filterServerTable":{},"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":4,'
    route += b'"topicSysFlag":0,"writeQueueNums":4}]}'
    return [
        b"h" + heartbeat,
        b"h{}",
        b'h{"clientID":""}',
        b'h{"clientID":"c","producerDataSet":[{}]}',
        b"l" + locks,
        b'l{"clientId":"c","consumerGroup":"\\u0001"}',
        b"l[]",
        b"l" + locks.replace(b'"queueId":1', b'"queueId":-1'),
        b"t" + table,
        b"t{}",
        b"t" + topics,
        b"c" + positions,
        b'c{"offsetTable":{"@g":{"0":5}}}',
        b'c{"offsetTable":{"T@g":{"0":Infinity}}}',
        b'c{"offsetTable":' + b"[" * 1_500,
        b'm{"messageQueueTable":{"' + b'\\"' * 2_000,
        b'o{"' + b'\\"' * 2_000,
        b"o" + positions,
        b'o{"offsetTable":[]}',
        b"g" + settings,
        b"g{",
        b'd{"offsetTable":{1:5,18:9}}',
        b'd{"offsetTable":{99:5}}',
        b"r" + route,
        b"r" + route.replace(b"{0:", b'{"0":'),
        b"r[]",
        b'n{"topicList":["T","U"]}',
        b'n{"topicList":5}',
        b'm{"messageQueueTable":{{"topic":"T"}:5}}',
        b'm{"messageQueueTable":{{',
        b"s" + b'{"groupName":"g","retryMaxTimes":3}',
        b"b" + b"brokerName=g0\nbrokerId=0\n",
        b"bbrokerId=0\n",
        b'q{"topic":"T","queueId":0}',
        b'k{"consumerDataSet":[{"groupName":"g"}]}',
    ]


def one(data: bytes) -> None:
    """Read a body by what answers the request; the bounds that the reader states hold."""
    kind, body = data[:1], data[1:]
    reader = READERS.get(kind)
    kit.refuse(reader, "no such body")
    assert reader is not None
    with kit.documented(ProtocolError, CorruptRecordError, UsageError, RemotingRefusal):
        reader(body)


def _heartbeat(body: bytes) -> None:
    found = groups.decode_heartbeat(body)
    assert 1 <= len(found.client_id) <= groups.MAX_NAME
    assert len(found.producers) + len(found.consumers) <= groups.MAX_GROUPS_OF_ONE


def _locks(body: bytes) -> None:
    request: Any = SimpleNamespace(frame=Frame(41, 1, body=body))
    asked = lock_requests._decode(request)
    queues = lock_requests._queues(asked)
    lock_requests._by_topic(queues)
    msgspec.json.decode(lock_requests._granted(asked, set(queues)))


def _positions(body: bytes) -> None:
    for offsets in broker_tables.read_positions(body).found.values():
        assert offsets and all(0 <= at < 2**63 for at in offsets.values())
    again = broker_tables.merged(broker_tables.POSITIONS, body, body)
    assert broker_tables.read_positions(again).found == broker_tables.read_positions(body).found


def _member(body: bytes) -> None:
    found = group_requests._member_of(body, b'"messageQueueTable":')
    kit.refuse(found is not None, "no such member")
    assert found is not None and found in body and found[:1] == b"{" and found[-1:] == b"}"


def _settings(body: bytes) -> None:
    for settings in broker_tables.read_groups(body).found:
        config = broker_tables.config_of(settings, None)
        assert subscriptions._decoded(config) == settings


def _right(body: bytes) -> None:
    rights._heartbeat(Identity("a", groups=("g*",)), Frame(34, 1, body=body))


def _topics(body: bytes) -> None:
    for config in broker_tables.read_topics(body).found:
        encode_body(msgspec.to_builtins(config))


def _offsets(body: bytes) -> None:
    for offsets in parse_offsets(kit.text_of(body)).values():
        assert offsets and all(at >= 0 for at in offsets.values())


READERS: dict[bytes, Any] = {
    b"h": _heartbeat, b"l": _locks, b"t": _topics, b"o": _positions, b"g": _settings,
    b"d": broker_tables.read_delays, b"r": decode_route, b"n": decode_topic_list, b"m": _member,
    b"k": _right,
    b"b": broker_tables.read_settings,
    b"c": _offsets,
}  # fmt: skip
