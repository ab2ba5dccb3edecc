"""The members of RocketMQ's producer and consumer groups, as this node hears them. Pure state.

A client tells every node of its route, every 30 s, which groups it is in. So each node knows the
members by itself, and a new master knows them at once. A member goes when it says so, when its
connection ends, or after EXPIRED_MS without a heartbeat.

    key         whatever stands for a client's connection: one key has one client
    heartbeat   JSON: clientID, producerDataSet, consumerDataSet with the subscriptions

A heartbeat that repeats the bytes of the one before costs one comparison. `take_changed` names the
consumer groups whose set of client ids has changed since the last call: a client that reconnects
changes nothing. Hashes of tags are computed from the subscription's text, since not every client
sends those that Java computes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from hastore.errors import UsageError
from hastore.record.hashes import java_hash_code
from hastore.shares import Shares

EXPIRED_MS = 120_000.0  # without a heartbeat
MAX_HEARTBEAT_BYTES = 256 * 1024
MAX_GROUPS_OF_ONE = 1_000  # groups in a heartbeat
MAX_SUBSCRIPTIONS_OF_ONE = 4_000  # in all groups of a heartbeat
MAX_NAME = 255  # characters of a group's name, or of a client id
MAX_TOPIC = 32_767
MAX_EXPRESSION = 8 * 1024  # characters of a subscription's text
MAX_BYTES = 64 * 1024 * 1024  # of all members, as estimated below
_COST = 6  # bytes of memory for each byte of a heartbeat
_MEMBER_BYTES = 2_000
ALL_TAGS = "*"
TAG, SQL92 = "TAG", "SQL92"
# RocketMQ's enumerations: the C++ client sends their ordinal numbers.
CONSUME_TYPES = ("CONSUME_ACTIVELY", "CONSUME_PASSIVELY", "CONSUME_POP")
MESSAGE_MODELS = ("BROADCASTING", "CLUSTERING")
FROM_WHERE = (
    *("CONSUME_FROM_LAST_OFFSET", "CONSUME_FROM_LAST_OFFSET_AND_FROM_MIN_WHEN_BOOT_FIRST"),
    *("CONSUME_FROM_MIN_OFFSET", "CONSUME_FROM_MAX_OFFSET", "CONSUME_FROM_FIRST_OFFSET"),
    "CONSUME_FROM_TIMESTAMP",
)


class Subscription:
    """What a group wants of a topic. `codes`: the tags' hashes; empty for all messages."""

    __slots__ = ("_codes", "expression", "expression_type", "tags", "topic", "version")

    def __init__(self, topic: str, expression: str, expression_type: str, version: int) -> None:
        self.topic = topic
        self.expression = expression
        self.expression_type = expression_type
        self.version = version
        self.tags = tags_of(expression) if expression_type == TAG else ()
        self._codes: frozenset[int] | None = None

    @property
    def codes(self) -> frozenset[int]:
        """The hashes of the tags, as queue entries have them."""
        if self._codes is None:
            self._codes = frozenset(map(java_hash_code, self.tags))
        return self._codes

    def as_json(self) -> dict[str, Any]:
        """Return RocketMQ's SubscriptionData."""
        return {
            "classFilterMode": False,
            "codeSet": sorted(self.codes),
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": list(self.tags),
            "topic": self.topic,
        }


def tags_of(expression: str) -> tuple[str, ...]:
    """Return the tags of "a || b"; none for all messages."""
    if expression.strip() in ("", ALL_TAGS):
        return ()
    return tuple(dict.fromkeys(tag for part in expression.split("||") if (tag := part.strip())))


class ConsumerGroup(NamedTuple):
    """What one member says of a group that it consumes in."""

    name: str
    consume_type: str
    message_model: str
    from_where: str
    subscriptions: tuple[Subscription, ...]


class Heartbeat(NamedTuple):
    """A client's heartbeat. `fingerprint`: of the subscriptions; 0 from clients before 5.1."""

    client_id: str
    producers: frozenset[str]
    consumers: tuple[ConsumerGroup, ...]
    fingerprint: int
    without_subscriptions: bool


_Number = int | str | None


class _Subscription(msgspec.Struct):
    topic: str
    subString: str | None = None
    expressionType: str | None = None
    subVersion: _Number = 0


class _Consumer(msgspec.Struct):
    groupName: str
    consumeType: _Number = None
    messageModel: _Number = None
    consumeFromWhere: _Number = None
    subscriptionDataSet: list[_Subscription] | None = None


class _Producer(msgspec.Struct):
    groupName: str


class _Heartbeat(msgspec.Struct):
    clientID: str
    producerDataSet: list[_Producer] | None = None
    consumerDataSet: list[_Consumer] | None = None
    heartbeatFingerprint: int = 0
    withoutSub: bool = False


_decoder = msgspec.json.Decoder(_Heartbeat)


def decode_heartbeat(body: bytes) -> Heartbeat:
    """Read a heartbeat; raises UsageError with the reason if it is none, or beyond a bound."""
    if len(body) > MAX_HEARTBEAT_BYTES:
        raise UsageError(f"a heartbeat of {len(body)} bytes; at most {MAX_HEARTBEAT_BYTES}")
    try:
        raw = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise UsageError(f"this is no heartbeat: {failure}") from failure
    producers, consumers = raw.producerDataSet or [], raw.consumerDataSet or []
    if len(producers) + len(consumers) > MAX_GROUPS_OF_ONE:
        count = len(producers) + len(consumers)
        raise UsageError(f"a heartbeat with {count} groups; at most {MAX_GROUPS_OF_ONE}")
    subscriptions = sum(len(one.subscriptionDataSet or ()) for one in consumers)
    if subscriptions > MAX_SUBSCRIPTIONS_OF_ONE:
        text = f"{subscriptions} subscriptions; at most {MAX_SUBSCRIPTIONS_OF_ONE}"
        raise UsageError(f"a heartbeat with {text}")
    names = [*(one.groupName for one in producers), *(one.groupName for one in consumers)]
    for what, name in (("a client id", raw.clientID), *(("a group", name) for name in names)):
        if not 1 <= len(name) <= MAX_NAME:
            raise UsageError(f"a heartbeat names {what} of {len(name)} characters; 1 to {MAX_NAME}")
    return Heartbeat(
        raw.clientID,
        frozenset(one.groupName for one in producers),
        tuple({one.groupName: _consumer(one) for one in consumers}.values()),
        raw.heartbeatFingerprint,
        raw.withoutSub,
    )


def _readable(beat: Heartbeat, may_read: Callable[[str], bool]) -> Heartbeat:
    """Return a heartbeat without the subscriptions to topics that its client may not read."""
    return beat._replace(
        consumers=tuple(
            group._replace(
                subscriptions=tuple(one for one in group.subscriptions if may_read(one.topic))
            )
            for group in beat.consumers
        )
    )


def _consumer(raw: _Consumer) -> ConsumerGroup:
    return ConsumerGroup(
        raw.groupName,
        _named(raw.consumeType, CONSUME_TYPES, 1),
        _named(raw.messageModel, MESSAGE_MODELS, 1),
        _named(raw.consumeFromWhere, FROM_WHERE, 0),
        tuple(map(_subscription, raw.subscriptionDataSet or ())),
    )


def _subscription(raw: _Subscription) -> Subscription:
    expression = ALL_TAGS if raw.subString is None else raw.subString
    if not 1 <= len(raw.topic) <= MAX_TOPIC:
        raise UsageError(f"a heartbeat names a topic of {len(raw.topic)} characters")
    if len(expression) > MAX_EXPRESSION:
        text = f"{len(expression)} characters; at most {MAX_EXPRESSION}"
        raise UsageError(f"the subscription to {raw.topic[:80]!r} has {text}")
    return Subscription(raw.topic, expression, raw.expressionType or TAG, _number(raw.subVersion))


def _number(value: _Number) -> int:
    try:
        number = int(value or 0)
    except ValueError as failure:
        raise UsageError(f"a heartbeat with the version {str(value)[:40]!r}") from failure
    return number if -(2**63) <= number < 2**63 else 0


def _named(value: _Number, names: tuple[str, ...], default: int) -> str:
    """Return the constant of an enumeration, given by its name or its ordinal number."""
    if value is None:
        return names[default]
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if value in names:
        return str(value)
    raise UsageError(f"a heartbeat with {str(value)[:40]!r}, which is none of {', '.join(names)}")


Key = TypeVar("Key", bound=Hashable)


class Member(Generic[Key]):
    """A client: what it is, and its groups. Only `Membership` changes it."""

    __slots__ = (
        *("address", "client_id", "consumers", "cost", "fingerprint", "key", "language"),
        *("owner", "producers", "raw", "seen_ms", "version"),
    )

    def __init__(self, key: Key, client_id: str, address: str) -> None:
        self.key = key
        self.client_id = client_id
        self.address = address
        self.language = ""
        self.version = 0
        self.raw: bytes | None = None  # the last heartbeat, unless something was changed since
        self.seen_ms = 0.0
        self.fingerprint = 0
        self.cost = _MEMBER_BYTES
        self.owner: str | None = None
        self.producers: frozenset[str] = frozenset()
        self.consumers: dict[str, ConsumerGroup] = {}


class _Group(Generic[Key]):
    """A consumer group: its members, and what they want."""

    __slots__ = ("first_ms", "generation", "ids", "last", "listed", "members", "table")

    def __init__(self, last: ConsumerGroup, now_ms: float) -> None:
        self.generation = 0  # another one after each change of `ids`
        self.first_ms = now_ms  # when its first member was heard
        self.members: dict[Key, Member[Key]] = {}
        self.ids: Counter[str] = Counter()  # client ids: a client may have two connections
        self.last = last  # as the latest member has said it
        self.listed: bytes | None = None  # the answer to a question for the client ids
        self.table: dict[str, Subscription] | None = {}  # by topic; None: compute it again


class Membership(Generic[Key]):
    """Who is in which group. Time is an argument, in monotonic ms."""

    def __init__(self) -> None:
        self._members: OrderedDict[Key, Member[Key]] = OrderedDict()  # the longest silent first
        self._consumers: dict[str, _Group[Key]] = {}
        self._producers: dict[str, dict[Key, Member[Key]]] = {}
        self._changed: dict[str, None] = {}
        self._changes = 0
        self._bytes = 0
        self._owned: Shares[str] = Shares()  # bytes by owner

    @property
    def memory_bytes(self) -> int:
        """An estimate of the memory that the members take."""
        return self._bytes

    @property
    def count(self) -> int:
        """The number of clients."""
        return len(self._members)

    # -- what clients say

    def repeats(self, key: Key, body: bytes, now_ms: float) -> bool:
        """Whether a heartbeat says what the client's last one said; if so, it is taken."""
        member = self._members.get(key)
        if member is None or member.raw != body:
            return False
        member.seen_ms = now_ms
        self._members.move_to_end(key)
        return True

    def hear(
        self, key: Key, body: bytes, now_ms: float, *, language: str, version: int, address: str,
        may_read: Callable[[str], bool] | None = None, owner: str | None = None,
    ) -> bool:  # fmt: skip
        """Take a heartbeat; return whether the client must send its subscriptions again.

        Subscriptions to topics that it may not read do not count: the group's other members would
        be told what they want of these. `owner` is the client's identity; one may take as much room
        as is left for others. Raises UsageError if the heartbeat is malformed or too large, or if
        there is no room; it has changed nothing then.
        """
        beat = decode_heartbeat(body)
        if may_read is not None:
            beat = _readable(beat, may_read)
        member = self._members.get(key)
        cost = _MEMBER_BYTES + _COST * len(body)
        more = cost - (member.cost if member is not None else 0)
        left = MAX_BYTES - self._bytes - more
        if left < 0 or (owner is not None and more > 0 and self._owned[owner] + more > left):
            raise UsageError("too many groups are registered at this node; stop some clients")
        if member is not None and member.client_id != beat.client_id:
            self.end(key)
            member = None
        if member is None:
            member = self._members[key] = Member(key, beat.client_id, address)
            member.owner = owner
            self._take(member, member.cost)
        self._take(member, cost - member.cost)
        member.cost = cost
        member.language, member.version = language, version
        member.seen_ms = now_ms
        self._members.move_to_end(key)
        consumers, incomplete = self._completed(member, beat)
        # A heartbeat that lacks something is not remembered, so the same bytes are read again.
        member.raw = None if incomplete else body
        if not incomplete:
            member.fingerprint = beat.fingerprint
        self._set_producers(member, beat.producers)
        self._set_consumers(member, consumers)
        return incomplete

    def _take(self, member: Member[Key], size: int) -> None:
        self._bytes += size
        if member.owner is not None:
            self._owned.change(member.owner, size)

    def problems(self) -> list[str]:
        """Return for the status that the room for clients is nearly used up; any thread may ask."""
        size = self._bytes
        crowding = self._owned.crowding(MAX_BYTES, size)
        if crowding is None:
            return []
        owner, own = crowding
        return [
            f"the clients that are registered take {size:,} bytes, {own:,} those of identity"
            f" {owner or '-'}; at most {MAX_BYTES:,} may be, and of an identity as many as are"
            " left: look at its consumers"
        ]

    def _completed(
        self, member: Member[Key], beat: Heartbeat
    ) -> tuple[dict[str, ConsumerGroup], bool]:
        """Return the groups, with known subscriptions where they were left out; were some unknown?

        A client of 5.1 and later leaves its subscriptions out while they stay the same.
        """
        consumers = {one.name: one for one in beat.consumers}
        if not beat.without_subscriptions:
            return consumers, False
        unknown = beat.fingerprint != member.fingerprint
        for name, one in consumers.items():
            known = member.consumers.get(name)
            if known is None:
                unknown = True
            elif not one.subscriptions:
                consumers[name] = one._replace(subscriptions=known.subscriptions)
        return consumers, unknown

    def leave(self, key: Key, client_id: str, producer: str | None, consumer: str | None) -> None:
        """Take a client out of a producer group, a consumer group, or both."""
        member = self._members.get(key)
        if member is None or member.client_id != client_id:
            return
        member.raw = None
        if producer in member.producers:
            self._set_producers(member, member.producers - {producer})
        if consumer in member.consumers:
            left = {name: one for name, one in member.consumers.items() if name != consumer}
            self._set_consumers(member, left)
        if not member.producers and not member.consumers:
            self.end(key)

    def end(self, key: Key) -> None:
        """Forget the client of a connection that has ended, or is silent for too long."""
        member = self._members.pop(key, None)
        if member is not None:
            self._take(member, -member.cost)
            self._set_producers(member, frozenset())
            self._set_consumers(member, {})

    def expire(self, now_ms: float) -> list[Key]:
        """Forget the clients that were silent for EXPIRED_MS; return their keys."""
        gone = []
        while self._members:
            member = next(iter(self._members.values()))
            if member.seen_ms + EXPIRED_MS > now_ms:
                break
            gone.append(member.key)
            self.end(member.key)
        return gone

    def take_changed(self) -> list[str]:
        """Return, once, the consumer groups whose set of client ids has changed."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    # -- what others ask

    def consumer_groups(self) -> list[str]:
        """Return the consumer groups that have members."""
        return list(self._consumers)

    def groups_of_topic(self, topic: str) -> list[str]:
        """Return the consumer groups that have subscribed to a topic."""
        return [name for name in self._consumers if topic in self.subscriptions(name)]

    def first_ms(self, group: str) -> float | None:
        """Return since when a consumer group has had members all the time; None without any."""
        found = self._consumers.get(group)
        return None if found is None else found.first_ms

    def generation(self, group: str) -> int:
        """Return a number that is another one after each change of the client ids."""
        found = self._consumers.get(group)
        return 0 if found is None else found.generation

    def client_ids(self, group: str) -> list[str]:
        """Return the ids of a consumer group's members, each once."""
        found = self._consumers.get(group)
        return [] if found is None else sorted(found.ids)

    def id_list(self, group: str) -> bytes | None:
        """Return the body that answers GET_CONSUMER_LIST_BY_GROUP; None without members."""
        found = self._consumers.get(group)
        if found is None:
            return None
        if found.listed is None:
            found.listed = msgspec.json.encode({"consumerIdList": sorted(found.ids)})
        return found.listed

    def consumers(self, group: str) -> list[Member[Key]]:
        """Return a consumer group's members."""
        found = self._consumers.get(group)
        return [] if found is None else list(found.members.values())

    def producers(self, group: str) -> list[Member[Key]]:
        """Return a producer group's members."""
        return list(self._producers.get(group, {}).values())

    def consumer(self, group: str, client_id: str) -> Member[Key] | None:
        """Return a consumer group's member by its client id: by its latest connection."""
        found: Member[Key] | None = None
        for member in self.consumers(group):
            if member.client_id == client_id and (found is None or member.seen_ms > found.seen_ms):
                found = member
        return found

    def group(self, group: str) -> ConsumerGroup | None:
        """Return how a consumer group consumes, as its latest member has said it."""
        found = self._consumers.get(group)
        return None if found is None else found.last

    def subscriptions(self, group: str) -> dict[str, Subscription]:
        """Return a consumer group's subscriptions by topic: of each the latest version."""
        found = self._consumers.get(group)
        if found is None:
            return {}
        if found.table is None:
            found.table = _latest(
                one for member in found.members.values()
                for one in member.consumers[group].subscriptions
            )  # fmt: skip
        return found.table

    def subscription(self, group: str, topic: str) -> Subscription | None:
        """Return what a consumer group wants of a topic; None if no member has said it."""
        return self.subscriptions(group).get(topic)

    def members(self) -> Iterator[Member[Key]]:
        """Iterate over all clients."""
        return iter(self._members.values())

    # -- changes

    def _set_producers(self, member: Member[Key], groups: frozenset[str]) -> None:
        for name in member.producers - groups:
            of_group = self._producers[name]
            del of_group[member.key]
            if not of_group:
                del self._producers[name]
        for name in groups - member.producers:
            self._producers.setdefault(name, {})[member.key] = member
        member.producers = groups

    def _set_consumers(self, member: Member[Key], groups: dict[str, ConsumerGroup]) -> None:
        before, member.consumers = member.consumers, groups
        for name in before:
            if name not in groups:
                self._drop(self._consumers[name], name, member)
        for name, said in groups.items():
            of_group = self._consumers.get(name)
            if of_group is None:
                of_group = self._consumers[name] = _Group(said, member.seen_ms)
            of_group.last = said
            if name not in before:
                of_group.members[member.key] = member
                of_group.ids[member.client_id] += 1
                if of_group.ids[member.client_id] == 1:
                    self._note_change(of_group, name)
            elif {one.topic for one in before[name].subscriptions} - {
                one.topic for one in said.subscriptions
            }:
                of_group.table = None
            if of_group.table is not None:
                _merge(of_group.table, said.subscriptions)

    def _drop(self, of_group: _Group[Key], name: str, member: Member[Key]) -> None:
        del of_group.members[member.key]
        of_group.table = None
        of_group.ids[member.client_id] -= 1
        if not of_group.ids[member.client_id]:
            del of_group.ids[member.client_id]
            self._note_change(of_group, name)
        if not of_group.members:
            del self._consumers[name]

    def _note_change(self, of_group: _Group[Key], name: str) -> None:
        of_group.listed = None
        self._changes += 1
        of_group.generation = self._changes
        self._changed[name] = None


def _latest(subscriptions: Iterable[Subscription]) -> dict[str, Subscription]:
    table: dict[str, Subscription] = {}
    _merge(table, subscriptions)
    return table


def _merge(table: dict[str, Subscription], subscriptions: Iterable[Subscription]) -> None:
    for one in subscriptions:
        known = table.get(one.topic)
        if known is None or one.version >= known.version:
            table[one.topic] = one
