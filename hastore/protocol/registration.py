"""What a broker tells a RocketMQ name server of itself, and what that says of brokers. Pure.

    103  a broker's name, number, address, and its topics; every 30 s
    104  the broker goes
    105  the brokers and the queues of a topic
    216  a topic goes, of all brokers of the cluster
    224  the names of a cluster's topics

The body of 103 is JSON, or, if that is long, RocketMQ's shorter form, deflated. A name server takes
the topics of a broker only if their `Version` differs from the one before, so each other body needs
another version.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from hastore.errors import ProtocolError
from hastore.protocol.remoting import Code, Frame

SHORT_BYTES = 256 * 1024  # a longer body is sent in the shorter form
MASTER_ID = 0
INHERIT = 1  # a topic's permission: new topics may be made like it
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_INT = struct.Struct(">i")
_FILTER = "SINGLE_TAG"
# fastjson writes the numbers of brokers as {0:"ADDRESS"}; an address has its colon elsewhere.
_BARE_KEY = re.compile(rb"([{,])(\d{1,19}):")


class Queues(NamedTuple):
    """A topic of a broker, as a name server keeps it."""

    topic: str
    read: int
    write: int
    perm: int
    order: bool = False
    sys_flag: int = 0


class Version(NamedTuple):
    """RocketMQ's DataVersion. `state` is of the role: the greatest one holds a broker's name.

    Name servers of RocketMQ 4 do not know `state`.
    """

    timestamp_ms: int
    counter: int
    state: int


class BrokerName(NamedTuple):
    """One entry of a name server: the number `broker_id` of a broker, and who answers for it."""

    cluster: str
    name: str
    broker_id: int
    address: str


def registration(broker: BrokerName, ha: str, body: bytes, *, compressed: bool) -> Frame:
    """Return the request 103. `ha`: where RocketMQ's slaves would follow."""
    fields = {
        "brokerName": broker.name,
        "brokerAddr": broker.address,
        "clusterName": broker.cluster,
        "haServerAddr": ha,
        "brokerId": str(broker.broker_id),
        "compressed": "true" if compressed else "false",
        # RocketMQ's UtilAll.crc32 leaves out the sign; 0 means: not computed.
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
    }
    return Frame(Code.REGISTER_BROKER, 0, fields=fields, body=body)


def end_of_registration(broker: BrokerName) -> Frame:
    """Return the request 104."""
    fields = {
        "brokerName": broker.name,
        "brokerAddr": broker.address,
        "clusterName": broker.cluster,
        "brokerId": str(broker.broker_id),
    }
    return Frame(Code.UNREGISTER_BROKER, 0, fields=fields)


def encode_topics(topics: Iterable[Queues], version: Version) -> tuple[bytes, bool]:
    """Return the body of 103, and whether it is compressed."""
    table = list(topics)
    body = msgspec.json.encode(
        {
            "filterServerList": [],
            "topicConfigSerializeWrapper": {
                "dataVersion": _version(version),
                "topicConfigTable": {one.topic: _topic(one) for one in table},
            },
        }
    )
    if len(body) <= SHORT_BYTES:
        return body, False
    pieces = [_sized(msgspec.json.encode(_version(version))), _INT.pack(len(table))]
    for one in table:
        text = f"{one.topic} {one.read} {one.write} {one.perm} {_FILTER}"
        pieces.append(_sized(text.encode()))
    pieces += (_sized(b"[]"), _INT.pack(0))  # no filter servers; RocketMQ 5: no static topics
    return zlib.compress(b"".join(pieces)), True


def _version(version: Version) -> dict[str, int]:
    return {
        "counter": version.counter,
        "stateVersion": version.state,
        "timestamp": version.timestamp_ms,
    }


def _topic(one: Queues) -> dict[str, object]:
    return {
        "order": one.order,
        "perm": one.perm,
        "readQueueNums": one.read,
        "topicFilterType": _FILTER,
        "topicName": one.topic,
        "topicSysFlag": one.sys_flag,
        "writeQueueNums": one.write,
    }


def _sized(data: bytes) -> bytes:
    return _INT.pack(len(data)) + data


class BrokerData(msgspec.Struct):
    """A broker, as a route has it: its addresses by number."""

    brokerName: str
    cluster: str = ""
    brokerAddrs: dict[str, str] = {}


class QueueData(msgspec.Struct):
    """The queues that a broker has of a topic."""

    brokerName: str
    readQueueNums: int = 0
    writeQueueNums: int = 0
    perm: int = 0


class Route(msgspec.Struct):
    """Where a topic's queues are."""

    brokerDatas: list[BrokerData] = []
    queueDatas: list[QueueData] = []


class _TopicList(msgspec.Struct):
    topicList: list[str] = []


_decode_route = msgspec.json.Decoder(Route).decode
_decode_topics = msgspec.json.Decoder(_TopicList).decode


def question_of_route(topic: str) -> Frame:
    """Return the request 105."""
    fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
    return Frame(Code.GET_ROUTEINFO_BY_TOPIC, 0, fields=fields)


def decode_route(body: bytes) -> Route:
    """Return the answer to 105; raises ProtocolError if it is none.

    Before 4.9.4 a name server knew only fastjson's form, whose keys are numbers.
    """
    try:
        return _decode_route(body)
    except _UNREADABLE:
        pass
    try:
        return _decode_route(_BARE_KEY.sub(rb'\1"\2":', body))
    except _UNREADABLE as failure:
        raise ProtocolError(f"a route that cannot be read: {failure}") from failure


def decode_topic_list(body: bytes) -> list[str]:
    """Return the answer to 224; raises ProtocolError if it is none."""
    try:
        return _decode_topics(body).topicList
    except _UNREADABLE as failure:
        raise ProtocolError(f"a list of topics that cannot be read: {failure}") from failure


def second_address(address: str) -> str:
    """Return another text for `HOST:PORT`, which leads to the same port: `HOST:0PORT`.

    A name server keeps what it knows of a broker's life by the text of the address, so one text
    cannot stand for two brokers: when the connection ends, only one of them would go.
    """
    host, _, port = address.rpartition(":")
    return f"{host}:0{port}"


def shown(text: str, most: int = 200) -> str:
    """Return a text of a name server as a log may have it: in one line, and not too long."""
    return json.dumps(text[:most], ensure_ascii=False)
