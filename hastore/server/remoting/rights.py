"""What each request of RocketMQ's protocol needs: the rights of an identity, by code. Pure.

    topics        by `produce` and `consume`, as for every client
    groups        by `groups`: to be a member of a consumer group, and to move its positions
    %RETRY%g      may be read and sent to by whoever may be in group g, too: it has what the
                  group's members have read already
    `admin`       topics, settings of groups, the state of nodes; positions of every group

A code without an entry in NEEDS is not served to anybody who must prove who it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from hastore.protocol.remoting import Answer, Code, Frame
from hastore.security.identity import Identity
from hastore.server.api.access import is_own_retry, may_read, no_right
from hastore.server.remoting.door import RemotingRefusal

Check = Callable[[Identity, Frame], str | None]  # returns why a request is forbidden
NEW_TOPICS = "TBW102"  # the pattern of new topics


class Need(NamedTuple):
    """What a request needs, in words and as a check."""

    text: str
    check: Check


class _Consumer(msgspec.Struct):
    groupName: str


class _Heartbeat(msgspec.Struct):
    consumerDataSet: list[_Consumer] | None = None


class _Locks(msgspec.Struct):
    consumerGroup: str


_heartbeats = msgspec.json.Decoder(_Heartbeat)
_locks = msgspec.json.Decoder(_Locks)


def may_send(identity: Identity, topic: str) -> bool:
    """Return whether an identity may send to a topic."""
    return identity.may_produce(topic) or is_own_retry(identity, topic)


def may_see(identity: Identity, topic: str) -> bool:
    """Return whether an identity may know whether a topic exists."""
    if identity.is_admin or topic == NEW_TOPICS:
        return True
    return may_send(identity, topic) or may_read(identity, topic)


def listed_topics(fields: Mapping[str, str]) -> list[str]:
    """Return the topics that a question for a group's positions lists, since 5.3."""
    return [one for one in fields.get("topicList", "").split(";") if one]


# -- checks


def _anybody(_identity: Identity, _frame: Frame) -> str | None:
    return None


def _admin(identity: Identity, _frame: Frame) -> str | None:
    return None if identity.is_admin else f"identity {identity.name} is no admin"


def _send(topic_name: str) -> Check:
    """Return the check of a send. No record of it has a producer's id: sends.py leaves it out."""

    def check(identity: Identity, frame: Frame) -> str | None:
        topic = frame.fields.get(topic_name, "")
        return None if may_send(identity, topic) else no_right(identity, "produce", topic)

    return check


def _group(name: str, *, topic: str | None = None, admin: bool = True) -> Check:
    def check(identity: Identity, frame: Frame) -> str | None:
        if admin and identity.is_admin:
            return None
        group = frame.fields.get(name, "")
        if not identity.may_join(group):
            return no_right(identity, "groups", group)
        if topic is not None:
            about = frame.fields.get(topic, "")
            if not may_read(identity, about):
                return no_right(identity, "consume", about)
        return None

    return check


def _stats(identity: Identity, frame: Frame) -> str | None:
    why = _group("consumerGroup")(identity, frame)
    if why is not None or identity.is_admin:
        return why
    fields = frame.fields
    for topic in (fields.get("topic", ""), *listed_topics(fields)):
        if topic and not may_read(identity, topic):
            return no_right(identity, "consume", topic)
    return None


def _heartbeat(identity: Identity, frame: Frame) -> str | None:
    try:
        consumers = _heartbeats.decode(frame.body).consumerDataSet or ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, f"no heartbeat: {failure}") from failure
    for one in consumers:
        if not identity.may_join(one.groupName):
            return no_right(identity, "groups", one.groupName)
    return None


def _lock(identity: Identity, frame: Frame) -> str | None:
    try:
        group = _locks.decode(frame.body).consumerGroup
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, f"no locks: {failure}") from failure
    return None if identity.may_join(group) else no_right(identity, "groups", group)


def _read(identity: Identity, frame: Frame) -> str | None:
    topic = frame.fields.get("topic", "")
    return None if may_read(identity, topic) else no_right(identity, "consume", topic)


def _known(identity: Identity, frame: Frame) -> str | None:
    topic = frame.fields.get("topic", "")
    return None if may_see(identity, topic) else no_right(identity, "consume", topic)


def _range(identity: Identity, frame: Frame) -> str | None:
    return None if identity.is_admin else _read(identity, frame)


def _any_record(identity: Identity, _frame: Frame) -> str | None:
    if identity.is_admin or "*" in identity.consume:
        return None
    return no_right(identity, "consume", "*")


_ADMIN = Need("`admin`", _admin)
_ANYBODY = Need("any identity", _anybody)
_SENDS = "`produce` for the topic; for `%RETRY%g` the group g suffices"
_LONG = Need(_SENDS, _send("topic"))
_SHORT = Need(_SENDS, _send("b"))
_OF_GROUP = "the group, or `admin`"
_POSITION = Need(
    "the group, and `consume` for the topic; or `admin`", _group("consumerGroup", topic="topic")
)
_RESET = Need(_POSITION.text, _group("group", topic="topic"))
_PULL = Need(
    "the group, and `consume` for the topic; for `%RETRY%g` the group g suffices",
    _group("consumerGroup", topic="topic", admin=False),
)
_RANGE = Need("`consume` for the topic, or `admin`", _range)
_KNOWN = Need("`produce` or `consume` for the topic, or `admin`", _known)
_MEMBERS = Need(_OF_GROUP, _group("consumerGroup"))
_GROUP = Need(_OF_GROUP, _group("group"))
_LOCK = Need("the group", _lock)

NEEDS: dict[int, Need] = {
    Code.SEND_MESSAGE: _LONG,
    Code.SEND_MESSAGE_V2: _SHORT,
    Code.SEND_BATCH_MESSAGE: _SHORT,
    Code.PULL_MESSAGE: _PULL,
    Code.LITE_PULL_MESSAGE: _PULL,
    Code.QUERY_MESSAGE: Need("`consume` for the topic", _read),
    Code.VIEW_MESSAGE_BY_ID: Need("`consume` for `*`, or `admin`", _any_record),
    Code.QUERY_CONSUMER_OFFSET: _POSITION,
    Code.UPDATE_CONSUMER_OFFSET: _POSITION,
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _RESET,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _RANGE,
    Code.GET_MAX_OFFSET: _RANGE,
    Code.GET_MIN_OFFSET: _RANGE,
    Code.GET_EARLIEST_MSG_STORETIME: _RANGE,
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _RANGE,
    Code.HEART_BEAT: Need(
        "each consumer group in it; subscriptions without `consume` for their topic do not count",
        _heartbeat,
    ),  # the handler asks `Gate.may_read` for the topics
    Code.UNREGISTER_CLIENT: _ANYBODY,  # of its own connection
    Code.CHECK_CLIENT_CONFIG: _ANYBODY,  # only parses what it brings
    Code.CONSUMER_SEND_MSG_BACK: Need(
        "the group, and `consume` for the message's topic", _group("group", admin=False)
    ),  # the handler asks `Gate.may_read` for the topic of the record itself
    Code.END_TRANSACTION: Need(
        "`produce` for the message's topic", _anybody
    ),  # the handler asks `Gate.may_send` for the topic of the half message itself
    Code.LOCK_BATCH_MQ: _LOCK,
    Code.UNLOCK_BATCH_MQ: _LOCK,
    Code.GET_CONSUMER_LIST_BY_GROUP: _MEMBERS,
    Code.GET_CONSUMER_CONNECTION_LIST: _MEMBERS,
    Code.GET_CONSUMER_RUNNING_INFO: _MEMBERS,
    Code.GET_CONSUME_STATS: Need(
        "the group, and `consume` for each topic that it names or is told of; or `admin`",
        _stats,
    ),  # the handler asks `Gate.may_read` for the topics that it finds by itself
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _GROUP,
    Code.QUERY_TOPICS_BY_CONSUMER: _GROUP,
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: _GROUP,
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: _GROUP,
    Code.GET_ROUTEINFO_BY_TOPIC: _ANYBODY,  # but see `Gate`: not for topics that it may not see
    Code.GET_BROKER_CLUSTER_INFO: _ANYBODY,
    Code.GET_TOPIC_STATS_INFO: _KNOWN,
    Code.GET_TOPIC_CONFIG: _KNOWN,
    Code.CONSUME_MESSAGE_DIRECTLY: _ADMIN,  # any record, and any member gets it
    Code.GET_PRODUCER_CONNECTION_LIST: _ADMIN,
    Code.UPDATE_AND_CREATE_TOPIC: _ADMIN,
    Code.UPDATE_AND_CREATE_TOPIC_LIST: _ADMIN,
    Code.DELETE_TOPIC_IN_BROKER: _ADMIN,
    Code.DELETE_TOPIC_IN_NAMESRV: _ADMIN,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _ADMIN,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _ADMIN,
    Code.DELETE_SUBSCRIPTIONGROUP: _ADMIN,
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: _ADMIN,
    Code.GET_ALL_TOPIC_CONFIG: _ADMIN,
    Code.GET_ALL_CONSUMER_OFFSET: _ADMIN,
    Code.GET_ALL_DELAY_OFFSET: _ADMIN,
    Code.GET_TIMER_METRICS: _ADMIN,
    Code.REGISTER_BROKER: _ADMIN,
    Code.UNREGISTER_BROKER: _ADMIN,
    Code.GET_ALL_MESSAGE_REQUEST_MODE: _ADMIN,
    Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: _ADMIN,
    Code.GET_TOPICS_BY_CLUSTER: _ADMIN,
    Code.GET_BROKER_CONFIG: _ADMIN,
    Code.GET_BROKER_RUNTIME_INFO: _ADMIN,
    Code.GET_BROKER_HA_STATUS: _ADMIN,
    Code.PUT_KV_CONFIG: _ADMIN,
    Code.GET_KV_CONFIG: _ADMIN,
    Code.DELETE_KV_CONFIG: _ADMIN,
}
