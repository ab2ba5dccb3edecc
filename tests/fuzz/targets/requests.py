"""Requests of RocketMQ's clients to a whole node's door: each is answered, and nothing fails."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hastore.config.model import Config, NodeAddress, Role, StoreConfig
from hastore.protocol.remoting import ANSWER, ONE_WAY, Code, Frame, RemotingWire, encode_frame
from hastore.record.codec import NO_HOST, build_record
from hastore.server.remoting import (
    admin,
    group_positions,
    group_requests,
    lock_requests,
    position_requests,
    reads,
    retries,
    routes,
    subscriptions,
    topics,
    transactions,
)
from hastore.server.remoting.door import Door
from hastore.server.remoting.forwarding import ForwardCounts, Network
from hastore.server.remoting.rooms import make_door
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.fuzz import kit
from tests.server.remoting.desk import Desk

REACHES = (
    Door.receive,
    Door.handle_inside,
    reads.Reads.pull,
    reads._check_fields,
    reads.Reads._wanted,
    reads.Reads.search_offset,
    group_requests.GroupRequests.heartbeat,
    group_requests.number,
    lock_requests.LockRequests.lock,
    retries.Retries.send_back,
    topics.Topics.update,
    subscriptions.Subscriptions.update,
    transactions.Transactions.end,
    routes.Routes.route,
    position_requests.PositionRequests.reset,
    admin.Admin.config,
    group_positions.GroupPositions.update,
)
LEAST = kit.Least(0.4, 10)
RUNS = 60
TOKENS = (
    *(b'"consumerGroup":"g"', b'"topic":"T"', b'"queueId":"0"', b'"queueOffset":"', b'"sysFlag":"'),
    *(b'"code":11', b'"code":34', b'"code":361', b'"code":37,', b'"group":"g"', b'"offset":"5"'),
    *(b'"subscription":"a || b"', b'"expressionType":"SQL92"', b'"commitOffset":"3"', b"%RETRY%g"),
)
MESSAGE = build_record("T", b"body", queue_id=0, born_timestamp_ms=1, born_host=NO_HOST)
HEARTBEAT = (
    b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":"CONSUME_PASSIVELY",'
    b'"messageModel":"CLUSTERING","subscriptionDataSet":[{"topic":"T","subString":"*",'
    b'"subVersion":1}]}],"producerDataSet":[{"groupName":"p"}]}'
)
LOCKS = b'{"clientId":"c","consumerGroup":"g","mqSet":[{"brokerName":"g","queueId":0,"topic":"T"}]}'
COMMON = {
    "topic": "T", "consumerGroup": "g", "queueId": "0", "group": "g", "producerGroup": "p",
    "groupName": "g", "clientID": "c", "clientId": "c", "offset": "0", "timestamp": "5",
}  # fmt: skip
FIELDS: dict[int, dict[str, str]] = {
    Code.PULL_MESSAGE: {
        "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
        "suspendTimeoutMillis": "5", "subscription": "a || b", "subVersion": "1",
    },
    Code.QUERY_MESSAGE: {"key": "k", "maxNum": "9", "beginTimestamp": "0", "endTimestamp": "9"},
    Code.UPDATE_CONSUMER_OFFSET: {"commitOffset": "1"},
    Code.VIEW_MESSAGE_BY_ID: {"offset": "0"},
    Code.CONSUMER_SEND_MSG_BACK: {"offset": "0", "delayLevel": "3", "originMsgId": "a"},
    Code.END_TRANSACTION: {
        "tranStateTableOffset": "0", "commitLogOffset": "0", "commitOrRollback": "8", "msgId": "a",
    },
    Code.UPDATE_AND_CREATE_TOPIC: {
        "readQueueNums": "4", "writeQueueNums": "4", "perm": "6", "attributes": "+a=b",
    },
    Code.INVOKE_BROKER_TO_RESET_OFFSET: {"timestamp": "-1", "isForce": "true"},
    Code.SEND_MESSAGE_V2: {
        "a": "p", "b": "T", "d": "4", "e": "0", "f": "0", "g": "5", "h": "0", "j": "0",
        "i": "UNIQ_KEY\x01A\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02",
    },
}  # fmt: skip
BODIES: dict[int, bytes] = {
    Code.HEART_BEAT: HEARTBEAT, Code.LOCK_BATCH_MQ: LOCKS, Code.UNLOCK_BATCH_MQ: LOCKS,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: b'{"groupName":"g","retryMaxTimes":3}',
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: b'{"groupConfigList":[{"groupName":"g"}]}',
    Code.UPDATE_AND_CREATE_TOPIC_LIST: b'{"topicConfigList":[{"topicName":"U","readQueueNums":1,'
    b'"writeQueueNums":1,"perm":6}]}',
    Code.CHECK_CLIENT_CONFIG: b'{"clientId":"c","group":"g","subscriptionData":{"topic":"T",'
    b'"subString":"n > 1","expressionType":"SQL92"}}',
    Code.SEND_MESSAGE_V2: b"body",
}  # fmt: skip


class WholeDesk(Desk):
    """A node's door with all of its handlers, in virtual time, with a message in a topic."""

    def __init__(self) -> None:
        super().__init__(FakeBackend())
        nothing: Any = None
        port: Any = type("Port", (), {"handler": None})()
        address = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:1", http="127.0.0.1:1")
        config = Config(
            cluster="c", group="g", node=1, role=Role.ASYNC_MASTER, nodes={1: address},
            store=StoreConfig(root="/nowhere"),
        )  # fmt: skip
        network = Network(port, nothing, lambda *_: None, raise_failure, ForwardCounts())
        # Pulls and queries that are right wait in these; who may end a connection, ends it.
        parts = self.door.parts._replace(
            pulls=mock.Mock(),
            queries=mock.Mock(accept_query=lambda *_: None),
            end=lambda connection, _why: connection.close(),
        )
        self.door = make_door(config, network, parts)
        self.backend.store.put_encoded([MESSAGE])


# They read no field, but the status of a real node and its disk.
OF_THE_NODE = {Code.GET_BROKER_RUNTIME_INFO, Code.GET_BROKER_HA_STATUS}


def codes() -> list[int]:
    """Return the codes that a node has handlers for."""
    return sorted(set(WholeDesk().door.codes) - OF_THE_NODE)


def request(code: int, *, kind: int = 0, flag: int = 0, **changes: str) -> bytes:
    """Return a request, as a client writes it."""
    fields = {**COMMON, **FIELDS.get(code, {}), **changes}
    return encode_frame(
        Frame(code, 1, flag, fields, BODIES.get(code, b""), None, "JAVA", 479, kind)
    )


def seeds() -> list[bytes]:
    """Return a request of each code, right ones, and some after others."""
    first = request(Code.HEART_BEAT)
    sql = request(Code.PULL_MESSAGE, expressionType="SQL92", subscription="n > 5")
    half = request(Code.SEND_MESSAGE_V2)
    return [
        *(request(code) for code in codes()),
        first + request(Code.GET_CONSUMER_LIST_BY_GROUP),
        first + request(Code.LOCK_BATCH_MQ) + request(Code.UNLOCK_BATCH_MQ),
        sql,
        request(99, kind=1),
        request(Code.PULL_MESSAGE, kind=1, queueOffset="x"),
        half + request(Code.END_TRANSACTION),
        request(Code.LITE_PULL_MESSAGE, topic="none"),
        request(Code.PULL_MESSAGE, subscription=""),
        request(Code.UPDATE_CONSUMER_OFFSET, flag=ONE_WAY),
        first + request(Code.GET_CONSUME_STATS),
        request(Code.VIEW_MESSAGE_BY_ID, offset="-1"),
        request(Code.SEARCH_OFFSET_BY_TIMESTAMP, topic="x"),
        request(0, flag=ANSWER),
        request(Code.UPDATE_AND_CREATE_TOPIC, attributes="+a=b,-c,d"),
    ]


def repaired(data: bytes) -> bytes:
    """Return one frame with the right size, whose header ends where its JSON does."""
    if len(data) < 9:
        return data
    stop = data.rfind(b"}") + 1
    length = max(0, min(int.from_bytes(data[5:8]), len(data) - 8) if len(data) % 2 else stop - 8)
    return (len(data) - 4).to_bytes(4) + data[4:5] + length.to_bytes(3) + data[8:]


def one(data: bytes) -> None:
    """Let a client send requests, then end: none fails because of a bug, or is answered twice."""
    wire = RemotingWire()
    frames = [one for one in wire.receive(data) if one.code not in OF_THE_NODE][:8]
    kit.refuse(frames, "no whole frame")
    desk = WholeDesk()
    client: Any = desk.client()
    for opaque, frame in enumerate(frames, 1):
        frame.opaque = opaque  # so that an answer tells whose it is
        if not client.ended:
            desk.door.receive(client, frame, desk.clock.now_ms)
            desk.run()
    desk.run(2_000.0)
    last = client.answers.get(1)
    client.close()
    desk.run(60_000.0)
    kit.refuse(last is None or last.code == 0, f"{frames[0].code}: {last and last.code}")
