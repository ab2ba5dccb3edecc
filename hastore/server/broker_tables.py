"""The tables of a RocketMQ broker beside its log, as its files and its answers have them. Pure.

    config/topics.json              topicConfigTable: topic -> TopicConfig
    config/subscriptionGroup.json   subscriptionGroupTable: group -> SubscriptionGroupConfig
    config/consumerOffset.json      offsetTable: TOPIC@GROUP -> queue -> queue offset
    config/delayOffset.json         offsetTable: level -> queue offset (server/take_over.py)

An answer about topics also has topicQueueMappingDetailMap: the static topics of RocketMQ 5.

Brokers write numbers as keys without quotes, which is no JSON. What is in a table but cannot be a
topic, a group or a position here is left out and named; a table that is none is an error.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from hastore.errors import UNREADABLE, CorruptRecordError, MessageIllegalError
from hastore.protocol.api import Group, Name
from hastore.protocol.remoting import Code, encode_body
from hastore.record.delays import MAX_LEVELS, RETRY_PREFIX
from hastore.record.topic_records import RESERVED, TopicConfig, check_config, is_own_attribute
from hastore.server.remoting.subscriptions import (
    ATTRIBUTE,
    MAX_SETTINGS_BYTES,
    GroupSettings,
)
from hastore.server.remoting.topics import SYSTEM, SYSTEM_PREFIX, is_compacted

MAX_BYTES = 64 * 1024 * 1024  # of a table
_NAMED_MAX = 5  # of what is left out
_COMPACTED = "the messages that compaction (cleanup.policy) has kept beside the broker's log"
_MAPPED = "the mapping of a static topic's logical queues: make it an ordinary topic first"
# A string that does not end is matched to the end, or each quote in it would be tried in turn.
_NUMBER_KEY = re.compile(rb'("(?:[^"\\]|\\.)*+"?)|([{,]\s*+)(-?\d{1,20})(\s*+:)')
_DECIMAL = re.compile("[0-9]{1,19}")
_LONG_MAX, _INT_MAX = 2**63 - 1, 2**31 - 1
# Groups of RocketMQ's own: its tools, and its reading of half messages.
_OWN_GROUPS = frozenset(
    "TOOLS_CONSUMER FILTERSRV_CONSUMER SELF_TEST_C_GROUP SELF_TEST_P_GROUP __MONITOR_CONSUMER"
    " SCHEDULE_CONSUMER CID_SYS_RMQ_TRANS CID_ONSAPI_OWNER CID_ONSAPI_PERMISSION CID_ONSAPI_PULL"
    " CID_ONS-HTTP-PROXY DEFAULT_CONSUMER".split()
)
_OWN_GROUP_PREFIX = "CID_RMQ_SYS_"

Pair = tuple[str, str]  # group, topic
Offsets = dict[int, int]  # by queue
T = TypeVar("T")


class Table(NamedTuple):
    """One of the tables: the request that asks for it, its file, and its member in both."""

    code: int
    file: str
    member: str


TOPICS = Table(Code.GET_ALL_TOPIC_CONFIG, "config/topics.json", "topicConfigTable")
POSITIONS = Table(Code.GET_ALL_CONSUMER_OFFSET, "config/consumerOffset.json", "offsetTable")
DELAYS = Table(Code.GET_ALL_DELAY_OFFSET, "config/delayOffset.json", "offsetTable")
GROUPS = Table(
    Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "config/subscriptionGroup.json", "subscriptionGroupTable"
)
TABLES = (TOPICS, POSITIONS, DELAYS, GROUPS)
_MAPPINGS = TOPICS._replace(member="topicQueueMappingDetailMap")


class LogRange(NamedTuple):
    """The first offset of a log, and its end."""

    first: int
    end: int


class Read(NamedTuple, Generic[T]):
    """What a table says, and what of it was left out."""

    found: T
    left_out: list[str]


class _Topic(msgspec.Struct, rename="camel"):
    """RocketMQ's TopicConfig."""

    read_queue_nums: int = 16
    write_queue_nums: int = 16
    perm: int = 6
    order: bool = False
    topic_sys_flag: int = 0
    attributes: dict[str, str] | None = None


_names: msgspec.json.Decoder[tuple[Group, Name]] = msgspec.json.Decoder(tuple[Group, Name])


def is_own_topic(name: str) -> bool:
    """Return whether a topic is one of RocketMQ's or hastore's own."""
    is_rocketmqs = name in SYSTEM or name in RESERVED or name.startswith(SYSTEM_PREFIX)
    return is_rocketmqs or name.startswith("HASTORE_")


def is_own_group(name: str) -> bool:
    """Return whether a group is one of RocketMQ's or hastore's own."""
    return name in _OWN_GROUPS or name.startswith((_OWN_GROUP_PREFIX, "HASTORE_"))


def load(table: Table, raw: bytes) -> dict[str, Any]:
    """Return the member of a table; raises CorruptRecordError."""
    if len(raw) > MAX_BYTES:
        raise CorruptRecordError(f"{len(raw)} bytes; at most {MAX_BYTES}")
    plain = _NUMBER_KEY.sub(
        lambda match: match[1] or match[2] + b'"' + match[3] + b'"' + match[4], raw
    )
    try:
        found = msgspec.json.decode(plain)
        member = found[table.member]
        if isinstance(member, dict):
            return member
        raise TypeError(f"{table.member} is no table")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError) as why:
        name = table.file.rpartition("/")[2]
        raise CorruptRecordError(f"no {name} of RocketMQ: {why!r}") from why


def read_topics(raw: bytes) -> Read[list[TopicConfig]]:
    """Return the topics but RocketMQ's own; raises CorruptRecordError.

    A compaction topic is found, and what of it is in no log is named as left out; so is the mapping
    of a static topic.
    """
    found, left_out = [], []
    listed, mapped = load(TOPICS, raw), dict[str, Any]()
    with contextlib.suppress(CorruptRecordError):  # RocketMQ 4 has none, nor has a file of topics
        mapped = load(_MAPPINGS, raw)
    for name, value in sorted(listed.items()):
        if is_own_topic(name) or is_own_group(name.removeprefix(RETRY_PREFIX)):
            continue
        try:
            one = msgspec.convert(value, _Topic)
            known = one.attributes or {}
            kept = {key: known[key] for key in known if not is_own_attribute(key)}
            config = TopicConfig(
                name, one.read_queue_nums, one.write_queue_nums, one.perm, one.order,
                one.topic_sys_flag, kept,
            )  # fmt: skip
            check_config(config)
            found.append(config)
            if is_compacted(kept):
                left_out.append(f"topic {name!r:.80}: {_COMPACTED}")
            if name in mapped:
                left_out.append(f"topic {name!r:.80}: {_MAPPED}")
        except (msgspec.ValidationError, MessageIllegalError) as why:
            left_out.append(f"topic {name!r:.80}: {why}")
    return Read(found, left_out)


def read_groups(raw: bytes) -> Read[list[GroupSettings]]:
    """Return the settings of groups but RocketMQ's own; raises CorruptRecordError."""
    found, left_out = [], []
    for name, value in sorted(load(GROUPS, raw).items()):
        if is_own_group(name):
            continue
        try:
            _names.decode(msgspec.json.encode((name, RETRY_PREFIX + name)))
            settings = msgspec.structs.replace(
                msgspec.convert(value, GroupSettings), group_name=name
            )
            size = len(msgspec.json.encode(settings))
            if size > MAX_SETTINGS_BYTES:
                raise MessageIllegalError(f"{size} bytes of settings; at most {MAX_SETTINGS_BYTES}")
            check_config(config_of(settings, None))
            found.append(settings)
        except (msgspec.ValidationError, MessageIllegalError) as why:
            left_out.append(f"group {name!r:.80}: {why}")
    return Read(found, left_out)


def read_positions(raw: bytes) -> Read[dict[Pair, Offsets]]:
    """Return where groups are but RocketMQ's own; raises CorruptRecordError.

    A queue without a position, an offset below 0, is left out silently.
    """
    found: dict[Pair, Offsets] = {}
    left_out = []
    for key, queues in sorted(load(POSITIONS, raw).items()):
        topic, _, group = key.partition("@")
        if is_own_topic(topic) or is_own_group(group):
            continue
        try:
            _names.decode(msgspec.json.encode((group, topic)))
            offsets = {
                _number(queue, _INT_MAX): _number(at, _LONG_MAX, ~_LONG_MAX)
                for queue, at in queues.items()
            }
            offsets = {queue: at for queue, at in sorted(offsets.items()) if at >= 0}
        except (msgspec.ValidationError, ValueError, AttributeError) as why:
            left_out.append(f"{key!r:.80}: {why}")
            continue
        if offsets:
            found[group, topic] = offsets
    return Read(found, left_out)


def read_delays(raw: bytes) -> dict[int, int]:
    """Return which message of each level is delivered next; raises CorruptRecordError."""
    try:
        return {
            _number(level, MAX_LEVELS, 1): _number(offset, _LONG_MAX)
            for level, offset in load(DELAYS, raw).items()
        }
    except ValueError as why:
        raise CorruptRecordError(f"no delayOffset.json of RocketMQ: {why}") from why


def read_log_range(raw: bytes) -> LogRange:
    """Return where a broker's log begins and ends, as the answer to 28 says.

    Raises CorruptRecordError.
    """
    try:
        table = msgspec.json.decode(raw)["table"]
        names = "commitLogMinOffset", "commitLogMaxOffset"
        return LogRange(*(_number(table[name], _LONG_MAX) for name in names))
    except (*UNREADABLE, LookupError, TypeError, ValueError) as why:
        raise CorruptRecordError(f"no runtime info of RocketMQ: {why!r:.200}") from why


def read_settings(raw: bytes) -> dict[str, str]:
    """Return a broker's settings by name, as the answer to 26 says; raises CorruptRecordError.

    A broker writes each as NAME=VALUE on a line of its own, and escapes nothing.
    """
    try:
        pairs = [line.partition("=") for line in raw.decode().splitlines()]
    except UnicodeDecodeError as why:
        raise CorruptRecordError(f"no settings of RocketMQ: {why}") from why
    found = {name.strip(): value.strip() for name, is_set, value in pairs if is_set}
    if not found.get("brokerName"):
        raise CorruptRecordError("no settings of RocketMQ: no brokerName")
    return found


def merged(table: Table, known: bytes, news: bytes) -> bytes:
    """Return a table of offsets with what is new in `news`, and all else as it was.

    So RocketMQ's slaves do it: what a master has lost, or does not say, stays. Both must be valid.
    """
    offsets = {**load(table, known), **load(table, news)}
    numbered = {key: _numbered(value) for key, value in sorted(offsets.items())}
    return encode_body({table.member: _numbered(numbered)})


def without_deleted(positions: bytes, before: bytes, now: bytes) -> bytes:
    """Return positions without those of topics that the broker has deleted since `before`.

    A topic that is made again begins at 0, and a group in it must not begin at an old place. `now`
    and `before` are tables of topics. If no topic of before is left, the broker has lost its files,
    and nothing is dropped. All must be valid.
    """
    kept, now_there = load(POSITIONS, positions), load(TOPICS, now).keys()
    there = {name for name in load(TOPICS, before) if not is_own_topic(name)}
    gone = {key for key in kept if key.partition("@")[0] in there - now_there}
    if not gone or not there & now_there:
        return positions
    left = {key: _numbered(value) for key, value in kept.items() if key not in gone}
    return encode_body({POSITIONS.member: left})


def config_of(settings: GroupSettings, base: TopicConfig | None) -> TopicConfig:
    """Return the topic of a group's retries with the group's settings; `base`: as it is known."""
    queues = max(1, settings.retry_queue_nums)
    known = base or TopicConfig(RETRY_PREFIX + settings.group_name, queues, queues)
    text = msgspec.json.encode(settings).decode()
    return msgspec.structs.replace(known, attributes={**known.attributes, ATTRIBUTE: text})


def named(left_out: list[str]) -> str:
    """Return the first of what was left out, and how much more there is."""
    more = len(left_out) - _NAMED_MAX
    return "; ".join(left_out[:_NAMED_MAX]) + (f"; and {more} more" if more > 0 else "")


def _number(value: Any, highest: int, lowest: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"{value!r:.40} is no number")
    found = int(value) if len(str(value)) <= 20 else highest + 1
    if not lowest <= found <= highest:
        raise ValueError(f"{found} is not {lowest} to {highest}")
    return found


def _numbered(table: Any) -> Any:
    """Return a table whose keys are numbers, if all of them are."""
    if not isinstance(table, Mapping) or not all(_DECIMAL.fullmatch(str(key)) for key in table):
        return table
    return {int(key): value for key, value in table.items()}
