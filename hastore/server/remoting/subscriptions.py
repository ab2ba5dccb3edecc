"""The settings of RocketMQ's consumer groups: who may consume, how often a message is tried again.

    200, 225     UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, and the same for a list of groups
    207          DELETE_SUBSCRIPTIONGROUP
    201, 352     the settings of all groups, of one group

A group's settings are an attribute of its topic %RETRY%<group>, whose queues they number too. So
they are a record of the log, like each topic: every node has them, and they survive a failover,
retention and a resync. A group without settings has the default ones; it comes into being by its
first heartbeat or its first retry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any

import msgspec

from hastore.errors import UNREADABLE, MessageIllegalError
from hastore.protocol.remoting import Answer, Code, encode_body
from hastore.record.delays import RETRY_PREFIX
from hastore.record.topic_records import MAX_QUEUES, OWN_PREFIX, TopicConfig
from hastore.server.api.topics import Respond, TopicChanges
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, read_aside
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.topics import (
    LIST_MAX,
    PUT,
    altered,
    answer_change,
    change_each,
    takes_changes,
    version_of,
)

ATTRIBUTE = "hastore.group"  # of the topic %RETRY%<group>
GROUP_NOT_EXIST = 26
MAX_SETTINGS_BYTES = 4 * 1024
_Int = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class GroupSettings(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """RocketMQ's SubscriptionGroupConfig, with its defaults.

    `consume_enable`, `retry_queue_nums` and `retry_max_times` count here; all else is only kept.
    """

    group_name: str = ""
    consume_enable: bool = True
    consume_from_min_enable: bool = True
    consume_broadcast_enable: bool = True
    consume_message_orderly: bool = False
    retry_queue_nums: Annotated[int, msgspec.Meta(ge=0, le=MAX_QUEUES)] = 1
    retry_max_times: _Int = 16
    group_retry_policy: dict[str, Any] | None = None
    broker_id: _Int = 0
    which_broker_when_consume_slowly: _Int = 1
    notify_consumer_ids_changed_enable: bool = True
    group_sys_flag: _Int = 0
    consume_timeout_minute: _Int = 15
    subscription_data_set: list[dict[str, Any]] | None = None
    attributes: dict[str, str] | None = None


class _GroupList(msgspec.Struct, rename="camel"):
    group_config_list: list[GroupSettings]


DEFAULT = GroupSettings()
_one = msgspec.json.Decoder(GroupSettings)
_list = msgspec.json.Decoder(_GroupList)


class Subscriptions:
    """The settings of all groups, and the handlers of requests about them.

    The API's lock is held in every call.
    """

    def __init__(self, door: Door, topics: TopicView) -> None:
        self._door = door
        self._topics = topics
        self._store = door.parts.backend.store
        self._changes = TopicChanges(door.parts.backend, door.parts.puts, door.parts.clock)
        self._read: dict[str, tuple[TopicConfig, GroupSettings]] = {}  # a cache
        self.known_groups: Callable[[], Iterable[str]] = tuple  # online, or with positions

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.update,
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: self.update_list,
            Code.DELETE_SUBSCRIPTIONGROUP: self.delete,
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all_settings,
            Code.GET_SUBSCRIPTIONGROUP_CONFIG: self.settings_of,
        }

    # -- what others ask

    def find(self, group: str) -> GroupSettings:
        """Return a group's settings, or the default ones."""
        config = self._store.topic_table.recorded(RETRY_PREFIX + group)
        if config is None or ATTRIBUTE not in config.attributes:
            return DEFAULT
        known = self._read.get(group)
        if known is None or known[0] is not config:
            if len(self._read) >= LIST_MAX:
                self._read.clear()
            known = self._read[group] = config, _decoded(config) or DEFAULT
        return known[1]

    def refusal(self, group: str) -> str | None:
        """Return why a group may not consume; None if it may."""
        if self.find(group).consume_enable:
            return None
        return f"subscription group no permission, {group}"

    # -- changes

    def update(self, request: RemotingRequest) -> None:
        """Set what a group has."""
        try:
            settings = _one.decode(request.frame.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
            raise _invalid(f"no settings of a group: {failure}") from failure
        self._set(settings, partial(answer_change, request, "group"))

    def update_list(self, request: RemotingRequest) -> None:
        """Set what several groups have, one after the other up to the first that fails."""
        try:
            listed = _list.decode(request.frame.body).group_config_list
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
            raise _invalid(f"no list of groups: {failure}") from failure
        if not 0 < len(listed) <= LIST_MAX:
            raise _invalid(f"a list of {len(listed)} groups; 1 to {LIST_MAX} are allowed")
        change_each(self._door, request, "group", listed, self._set)

    def _set(self, settings: GroupSettings, respond: Respond) -> None:
        before = self.find(settings.group_name).attributes
        if settings.attributes or before:
            both = altered(before or {}, settings.attributes or {})
            settings = msgspec.structs.replace(settings, attributes=both)
        text = msgspec.json.encode(settings).decode()
        if len(text) > MAX_SETTINGS_BYTES:
            raise _invalid(f"{len(text)} bytes of settings; at most {MAX_SETTINGS_BYTES}")
        name = RETRY_PREFIX + settings.group_name
        if not settings.group_name:
            raise _invalid("the settings lack the group's name (groupName)")
        queues = max(1, settings.retry_queue_nums)
        known = self._store.topic_table.recorded(name)
        shape = self._topics.find(name)  # without a record, too: by the queues that it has
        if known is None:
            known = TopicConfig(name, queues, queues)
        self._put(
            msgspec.structs.replace(
                known,
                read_queues=max(0 if shape is None else shape.read, queues),
                write_queues=queues,
                attributes={**known.attributes, ATTRIBUTE: text},
            ),
            respond,
        )

    def delete(self, request: RemotingRequest) -> None:
        """Give a group the default settings again; its topic and its positions stay."""
        fields = request.frame.fields
        name = RETRY_PREFIX + needed(fields, "groupName")
        if fields.get("cleanOffset") == "true":  # mqadmin's -r
            raise _invalid(
                "a group's positions stay: delete it without -r (removeOffset); where it goes on,"
                " `mqadmin resetOffsetByTime` says"
            )
        known = self._store.topic_table.recorded(name)
        if known is None or ATTRIBUTE not in known.attributes:
            request.answer(Answer.SUCCESS)
            return
        rest = {key: value for key, value in known.attributes.items() if key != ATTRIBUTE}
        config = msgspec.structs.replace(known, attributes=rest)
        self._put(config, partial(answer_change, request, "group"))

    def _put(self, config: TopicConfig, respond: Respond) -> None:
        try:
            self._changes.set(config, PUT, respond)
        except MessageIllegalError as failure:
            raise _invalid(str(failure)) from failure

    # -- questions

    def settings_of(self, request: RemotingRequest) -> None:
        """Answer one group's settings."""
        group = needed(request.frame.fields, "group")
        known = self._store.topic_table.find(RETRY_PREFIX + group) is not None
        if not known and (group.startswith(OWN_PREFIX) or group not in self.known_groups()):
            text = f"No group in this broker. group: {group}"
            raise RemotingRefusal(GROUP_NOT_EXIST, text)
        request.answer(
            Answer.SUCCESS, body=encode_body(_as_json(group, self.find(group)), standard=True)
        )

    def all_settings(self, request: RemotingRequest) -> None:
        """Answer the settings of all groups that have settings, retries, members or positions."""
        table, without = self._store.topic_table, takes_changes(request)
        placed = [name for name in self.known_groups() if not name.startswith(OWN_PREFIX)]

        def read() -> bytes:
            found = {group: _as_json(group, DEFAULT) for group in placed}
            found |= {
                group: _as_json(group, _decoded(config) or DEFAULT)
                for config in table.all()
                if (group := config.name.removeprefix(RETRY_PREFIX)) != config.name
            }
            if without:
                for settings in found.values():
                    settings.pop("attributes", None)
            body = {"dataVersion": version_of(found), "subscriptionGroupTable": found}
            return encode_body(body, standard=True)

        def answer(body: bytes) -> None:
            request.answer(Answer.SUCCESS, body=body)

        read_aside(self._door, request, read, answer)


def _decoded(config: TopicConfig) -> GroupSettings | None:
    """Return the settings that a topic keeps; None without any, or of a later version."""
    try:
        return _one.decode(config.attributes.get(ATTRIBUTE, ""))
    except UNREADABLE:
        return None


def _as_json(group: str, settings: GroupSettings) -> dict[str, Any]:
    """Return RocketMQ's SubscriptionGroupConfig."""
    written = GroupSettings.__struct_encode_fields__
    values = msgspec.structs.astuple(settings)
    found = {name: value for name, value in zip(written, values, strict=True) if value is not None}
    return {**found, "groupName": group}


def _invalid(remark: str) -> RemotingRefusal:
    return RemotingRefusal(Answer.INVALID_PARAMETER, remark)
