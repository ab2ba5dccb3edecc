"""Topics as RocketMQ's mqadmin makes, changes, deletes and looks at them.

A change is a record of the log (record/topic_records.py), so it holds on every node, and over a
failover. Like a send it is carried out by the master; other nodes forward it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from hastore.errors import MessageIllegalError, Status
from hastore.protocol.api import Put, PutDone
from hastore.protocol.remoting import Answer, Code, Pairs, encode_body
from hastore.record.topic_records import MAX_ATTRIBUTES_BYTES, TopicConfig, is_own_attribute
from hastore.server.api.topics import Respond, TopicChanges
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, number, read_aside, stored_ms
from hastore.server.remoting.routes import OWN, TopicView

WAIT_MS = 4_000  # for a confirmation; mqadmin waits 5 s
MAX_CHANGES = 2 * MAX_ATTRIBUTES_BYTES  # characters that one request has of attributes
LIST_MAX = 1_000  # topics, or groups, that one request changes
# Topics of RocketMQ itself, which mqadmin may not change.
SYSTEM = frozenset(
    "TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC"
    " RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC"
    " OFFSET_MOVED_EVENT CHECKPOINT_TOPIC".split()
)
SYSTEM_PREFIX = "rmq_sys_"
_INT_MAX = 2**31 - 1
_PERM_MAX = 7
# The attributes that RocketMQ's topics may have. hastore keeps them, and does nothing by them.
_ATTRIBUTES = frozenset(("cleanup.policy", "message.type", "queue.type", "reserve.time"))
_POLICY, _PLAIN, _COMPACTION = "cleanup.policy", "DELETE", "COMPACTION"
# A broker of RocketMQ 5.3.2 or 5.3.3 takes its master's attributes for changes of a new topic. One
# without a sign, of another name or value ends that, after it has dropped all its topics. So it is
# with its groups, of which it knows no attribute.
_TAKES_CHANGES = range(477, 480)  # the numbers of these versions
_TAKEN = {
    "cleanup.policy": re.compile("DELETE|COMPACTION"),
    "message.type": re.compile("UNSPECIFIED|NORMAL|FIFO|DELAY|TRANSACTION|MIXED"),
    "queue.type": re.compile("BatchCQ|SimpleCQ"),
    "reserve.time": re.compile("-1|[0-9]{1,18}", re.ASCII),
}
_ATTRIBUTE = re.compile(r"\+([^=,]+)=([^,]*)|-([^=,]+)")
_REFUSED = {
    Status.BUSY: Answer.SYSTEM_BUSY,
    Status.SLAVE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,  # here it means: not stored
    Status.SERVICE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,
    Status.MESSAGE_ILLEGAL: Answer.INVALID_PARAMETER,
    Status.PROPERTIES_SIZE_EXCEEDED: Answer.INVALID_PARAMETER,
}
PUT = Put(0, None, timeout_ms=WAIT_MS)  # of a change
_NOTHING_YET = PutDone(0, Status.PUT_OK, 0)
T = TypeVar("T")


class _Listed(msgspec.Struct, rename="camel"):
    """A topic in the body of a request: RocketMQ's TopicConfig."""

    topic_name: str
    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = 6
    order: bool = False
    topic_sys_flag: int = 0
    attributes: dict[str, str] | None = None


class _TopicList(msgspec.Struct, rename="camel"):
    topic_config_list: list[_Listed]


_lists = msgspec.json.Decoder(_TopicList)


class Topics:
    """The handlers of requests about topics; the API's lock is held in every call."""

    def __init__(self, door: Door, group: str, view: TopicView | None = None) -> None:
        """Prepare; `group` is the name of the group, and of its broker.

        From now on `view` creates topics by records.
        """
        self._view = view or TopicView(door.parts.backend, auto_create=False)
        self._view.make = self.make
        self._door = door
        self._group = group
        self._store = door.parts.backend.store
        self._changes = TopicChanges(door.parts.backend, door.parts.puts, door.parts.clock)

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {
            Code.UPDATE_AND_CREATE_TOPIC: self.update,
            Code.UPDATE_AND_CREATE_TOPIC_LIST: self.update_list,
            Code.DELETE_TOPIC_IN_BROKER: self.delete,
            Code.DELETE_TOPIC_IN_NAMESRV: self.forget_route,
            Code.GET_TOPIC_CONFIG: self.config,
            Code.GET_ALL_TOPIC_CONFIG: self.all_configs,
            Code.GET_TOPIC_STATS_INFO: self.stats,
        }

    # -- changes

    def make(self, config: TopicConfig, put: Put) -> None:
        """Create a topic for a send, whose message comes in the log after this record.

        The record waits for the same nodes as the send, whose put is given. So if the record is
        refused, so is the send, for the same reason; but not for lack of room in the table.
        """
        making = self._view.making
        if config.name in making or _is_system(config.name):
            return
        if len(making) >= LIST_MAX:
            self._view.promise(config.name)
            return
        making[config.name] = config

        def respond(_done: PutDone) -> None:
            making.pop(config.name, None)

        self._set(config, respond, put)

    def update(self, request: RemotingRequest) -> None:
        """Create a topic, or change it."""
        fields = request.frame.fields
        name = needed(fields, "topic")
        known = self._known(name)
        config = TopicConfig(
            name,
            number(fields, "readQueueNums", 0, _INT_MAX),
            number(fields, "writeQueueNums", 0, _INT_MAX),
            number(fields, "perm", 0, _PERM_MAX),
            fields.get("order") == "true",
            number(fields, "topicSysFlag", 0, _INT_MAX) if fields.get("topicSysFlag") else 0,
            _supported(known, _attributes(known, fields.get("attributes", ""))),
        )
        self._set(config, partial(answer_change, request, "topic"))

    def update_list(self, request: RemotingRequest) -> None:
        """Create topics, or change them, one after the other up to the first that fails."""
        try:
            listed = _lists.decode(request.frame.body).topic_config_list
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
            raise RemotingRefusal(Answer.INVALID_PARAMETER, f"no list of topics: {failure}") from (
                failure
            )
        if not 0 < len(listed) <= LIST_MAX:
            text = f"a list of {len(listed)} topics; 1 to {LIST_MAX} are allowed"
            raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
        configs = [
            TopicConfig(
                one.topic_name, one.read_queue_nums, one.write_queue_nums, one.perm, one.order,
                one.topic_sys_flag, _supported(known, altered(known, one.attributes or {})),
            )
            for one in listed
            for known in (self._known(one.topic_name),)
        ]  # fmt: skip
        for config in configs:
            _check(config.name)
        change_each(self._door, request, "topic", configs, self._set)

    def _known(self, topic: str) -> Mapping[str, str]:
        """Return the attributes that a topic has."""
        config = self._store.topic_table.recorded(topic)
        return {} if config is None else config.attributes

    def _set(self, config: TopicConfig, respond: Respond, put: Put = PUT) -> None:
        _check(config.name)
        try:
            self._changes.set(config, put, respond)
        except MessageIllegalError as failure:
            raise RemotingRefusal(Answer.INVALID_PARAMETER, str(failure)) from failure

    def delete(self, request: RemotingRequest) -> None:
        """Delete a topic; one that does not exist is no error."""
        name = needed(request.frame.fields, "topic")
        _check(name)
        try:
            self._changes.delete(name, PUT, partial(answer_change, request, "topic"))
        except MessageIllegalError as failure:
            raise RemotingRefusal(Answer.INVALID_PARAMETER, str(failure)) from failure

    def forget_route(self, request: RemotingRequest) -> None:
        """Answer a name server's part of a deletion: the routes follow the topics by themselves."""
        needed(request.frame.fields, "topic")
        request.answer(Answer.SUCCESS)

    # -- questions

    def config(self, request: RemotingRequest) -> None:
        """Answer one topic's configuration."""
        found = _for_others(as_json(self._find(request)))
        request.answer(Answer.SUCCESS, body=encode_body(found, standard=True))

    def all_configs(self, request: RemotingRequest) -> None:
        """Answer the configurations of all topics."""
        table, as_changes = self._store.topic_table, takes_changes(request)

        def read() -> bytes:
            topics = {config.name: _for_others(as_json(config)) for config in table.all()}
            if as_changes:
                for topic in topics.values():
                    topic["attributes"] = _changes(topic["attributes"])
            found = {
                "dataVersion": version_of(topics),
                "mappingDataVersion": version_of({}),  # of logical queues, which there are none of
                "topicConfigTable": topics,
                "topicQueueMappingDetailMap": {},
            }
            return encode_body(found, standard=True)

        read_aside(self._door, request, read, partial(_answer_body, request))

    def stats(self, request: RemotingRequest) -> None:
        """Answer the range of each of a topic's queues, and when they got their last messages."""
        config = self._find(request)
        count = max(config.read_queues, config.write_queues)
        read_aside(
            self._door,
            request,
            partial(self._read_stats, config.name, count),
            partial(_answer_body, request),
        )

    def _read_stats(self, topic: str, count: int) -> bytes:
        """Return the body of an answer; a thread that may wait for the disk calls it."""
        table = Pairs()
        for queue in range(count):
            low, high, last_ms = self._range_of(topic, queue)
            place = {"brokerName": self._group, "queueId": queue, "topic": topic}
            offsets = {"lastUpdateTimestamp": last_ms, "maxOffset": high, "minOffset": low}
            table.append((place, offsets))
        return encode_body({"offsetTable": table, "topicPutTps": 0.0})

    def _range_of(self, topic: str, queue: int) -> tuple[int, int, int]:
        """Return the range of a queue, and the store time of its last message or 0."""
        store = self._store
        low, high = store.queues.queue_range(topic, queue) or (0, 0)
        if low >= high:
            return low, high, 0
        return low, high, stored_ms(store, topic, queue, high - 1, store.max_offset)

    def _find(self, request: RemotingRequest) -> TopicConfig:
        name = needed(request.frame.fields, "topic")
        found = self._store.topic_table.find(name)
        if found is None or name.startswith(OWN):
            raise RemotingRefusal(Answer.TOPIC_NOT_EXIST, f"topic[{name}] not exist")
        return found


def version_of(table: Mapping[Any, Any]) -> dict[str, int]:
    """Return RocketMQ's DataVersion of a table: another one if and only if the table is another.

    A RocketMQ slave takes a table if its version differs from that of its own, whatever is greater.
    A digest says that over failovers, too, where a count of one node means nothing at another. It
    does not fit into the counter alone: the Go client has 32 bits for that.
    """
    raw = json.dumps(table, sort_keys=True).encode()
    digest = hashlib.blake2b(raw, digest_size=10).digest()
    return {
        "counter": int.from_bytes(digest[:4], "big") >> 1,
        "stateVersion": 0,
        "timestamp": int.from_bytes(digest[4:], "big"),
    }


def as_json(config: TopicConfig) -> dict[str, Any]:
    """Return RocketMQ's TopicConfig."""
    return {
        "attributes": config.attributes,
        "order": config.order,
        "perm": config.perm,
        "readQueueNums": config.read_queues,
        "topicFilterType": "SINGLE_TAG",
        "topicName": config.name,
        "topicSysFlag": config.sys_flag,
        "writeQueueNums": config.write_queues,
    }


def _for_others(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what only hastore knows, such as the settings of a group: 201 has these."""
    known = config["attributes"]
    kept = {name: known[name] for name in known if not is_own_attribute(name)}
    return {**config, "attributes": kept}


def takes_changes(request: RemotingRequest) -> bool:
    """Return whether it is a broker that takes attributes for changes; see `_TAKES_CHANGES`."""
    connection = request.connection
    is_broker = connection is not None and connection.fast
    return is_broker and request.frame.version in _TAKES_CHANGES


def _changes(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return attributes as changes that a broker takes; see `_TAKEN`."""
    return {
        f"+{name}": value
        for name, value in attributes.items()
        if name in _TAKEN and _TAKEN[name].fullmatch(value)
    }


def answer_change(request: RemotingRequest, what: str, done: PutDone) -> None:
    """Answer what became of a change of a topic or a group; `what` names the kind."""
    status = done.statuses[0] if done.statuses else done.status
    reason = done.reason or status.value
    if status is Status.PUT_OK:
        request.answer(Answer.SUCCESS)
    elif status.is_stored:
        text = f"the change is in the master's log, but is not confirmed: {reason}"
        request.answer(Answer.SYSTEM_ERROR, remark=text)
    elif status in _REFUSED:
        request.answer(_REFUSED[status], remark=reason)
    else:
        request.leave_open(f"whether the {what} was changed is unknown: {reason}")


def change_each(
    door: Door,
    request: RemotingRequest,
    what: str,
    left: Sequence[T],
    change: Callable[[T, Respond], None],
    done: PutDone = _NOTHING_YET,
) -> None:
    """Make changes one after the other, up to the first that fails; then call `answer_change`.

    `change` makes one of them, and gives what became of it to its second argument.
    """
    if done.status is not Status.PUT_OK or not left:
        answer_change(request, what, done)
        return

    def go_on() -> None:
        try:
            change(left[0], partial(change_each, door, request, what, left[1:], change))
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)
        except Exception as failure:
            asked = f"a RocketMQ request ({request.frame.code})"
            reason = door.parts.failures.note(asked, failure)[1]
            request.answer(Answer.SYSTEM_ERROR, remark=reason)

    door.later(go_on)  # not from within the answer to the one before


def _answer_body(request: RemotingRequest, body: bytes) -> None:
    request.answer(Answer.SUCCESS, body=body)


def _is_system(name: str) -> bool:
    return name in SYSTEM or name.startswith(SYSTEM_PREFIX)


def _check(name: str) -> None:
    if _is_system(name):
        text = f"The topic[{name}] is conflict with system topic."
        raise RemotingRefusal(Answer.INVALID_PARAMETER, text)


def _attributes(known: Mapping[str, str], changes: str) -> dict[str, str]:
    """Return attributes after changes such as `+a=1,-b`."""
    if len(changes) > MAX_CHANGES:
        text = f"attributes: {len(changes)} characters of changes; at most {MAX_CHANGES}"
        raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
    found = dict(known)
    for piece in filter(None, changes.split(",")):
        match = _ATTRIBUTE.fullmatch(piece.strip())
        if match is None:
            text = f"attributes: {piece:.40}; write +NAME=VALUE or -NAME"
            raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
        _check_attribute(match[1] or match[3])
        if match[3] is not None:
            found.pop(match[3], None)
        else:
            found[match[1]] = match[2]
    return found


def _check_attribute(name: str) -> None:
    """Refuse a change of an attribute of hastore's, such as a group's settings."""
    if is_own_attribute(name):
        text = f"attributes: {name:.40} is hastore's own; a group's settings: updateSubGroup"
        raise RemotingRefusal(Answer.INVALID_PARAMETER, text)


def is_compacted(attributes: Mapping[str, str]) -> bool:
    """Return whether a broker keeps a topic's latest message of each key, beside its log."""
    return attributes.get(_POLICY) == _COMPACTION


def _supported(known: Mapping[str, str], found: dict[str, str]) -> dict[str, str]:
    """Return a topic's new attributes; refuse what is set now and counts nowhere.

    `known` are those of before: a topic that came from a broker keeps its own.
    """
    for name, value in found.items():
        if value == known.get(name):
            continue
        if name not in _ATTRIBUTES:
            text = f"attributes: unsupported key: {name:.40}"
            raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
        if name == _POLICY and value != _PLAIN:
            text = (
                f"attributes: {name}={value:.40} is not supported: retention would remove the"
                f" latest message of each key, too; only {_PLAIN} is"
            )
            raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
    return found


def altered(known: Mapping[str, str], changes: Mapping[str, str]) -> dict[str, str]:
    """Return attributes after changes in a body: `+a` and `a` are set, `-a` goes."""
    found = dict(known)
    for key, value in changes.items():
        name = key[1:] if key.startswith(("+", "-")) else key
        if not name:
            text = f"attributes: {key!r:.40} is no name; write +NAME or -NAME"
            raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
        _check_attribute(name)
        if key.startswith("-"):
            found.pop(name, None)
        else:
            found[name] = value
    return found
