"""What mqadmin asks about the positions of groups, and how it moves them.

    208        GET_CONSUME_STATS: where a group is in each queue, and where the queue ends
    222        INVOKE_BROKER_TO_RESET_OFFSET: to a time, or to an offset of one queue
    220        RESET_CONSUMER_CLIENT_OFFSET, to the consumers that are online
    300        QUERY_TOPIC_CONSUME_BY_WHO: the groups of a topic
    343, 345   the topics of a group, and what it wants of one

A reset is committed first, then the consumers are told. They stop consuming the topic, wait 10 s by
themselves, and go on at the new positions, which they then commit again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hastore.protocol.remoting import Answer, Code, Pairs, encode_body
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import (
    Members,
    needed,
    number,
    read_aside,
    stored_ms,
)
from hastore.server.remoting.rights import listed_topics
from hastore.server.remoting.routes import RETRY, TopicView

READ_MS = 3_000.0  # for all reads of one request
STEPS_MAX = 256  # messages that a search by time looks at in one queue
QUEUES_MAX = 1_024  # of one request
SAME_RESET_MS = 3_000.0  # mqadmin's requests to all nodes follow each other faster
_LONG_MAX = 2**63 - 1
_INT_MAX = 2**31 - 1
_CPP = "CPP"


class _Queue(NamedTuple):
    topic: str
    queue: int
    position: int | None


class _Told(NamedTuple):
    """The last reset of a group in a topic: when the first client was told, and who was."""

    at_ms: float
    offsets: dict[int, int]
    clients: set[tuple[str, str]]  # by id and address


class PositionRequests:
    """The handlers of these requests, of one node."""

    def __init__(
        self,
        door: Door,
        positions: GroupPositions,
        members: Members,
        topics: TopicView,
        broker: str,
    ) -> None:
        """Prepare; `broker`: the name under which clients know the group of nodes."""
        self._door = door
        self._clock = door.parts.clock
        self._store = door.parts.backend.store
        self._positions = positions
        self._members = members
        self._topics = topics
        self._broker = broker
        self._told: OrderedDict[tuple[str, str], _Told] = OrderedDict()  # by group and topic

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.GET_CONSUME_STATS: self.stats,
            Code.INVOKE_BROKER_TO_RESET_OFFSET: self.reset,
            Code.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            Code.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            Code.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
        }

    # -- who consumes what

    def groups_of_topic(self, request: RemotingRequest) -> None:
        """Answer with the groups that have subscribed to a topic, or have positions in it."""
        topic = needed(request.frame.fields, "topic")

        def then() -> None:
            groups = {group for group, each in self._positions.pairs() if each == topic}
            groups.update(self._members.groups_of_topic(topic))
            request.answer(Answer.SUCCESS, body=encode_body({"groupList": sorted(groups)}))

        self._when_read(request, then)

    def topics_of_group(self, request: RemotingRequest) -> None:
        """Answer with the topics that a group has subscribed to, or has positions in."""
        group = needed(request.frame.fields, "group")

        def then() -> None:
            body = {"topicList": self._topics_of(group)}
            request.answer(Answer.SUCCESS, body=encode_body(body))

        self._when_read(request, then)

    def subscription(self, request: RemotingRequest) -> None:
        """Answer with what a group wants of a topic."""
        fields = request.frame.fields
        group, topic = needed(fields, "group"), needed(fields, "topic")
        found = self._members.subscription(group, topic)
        body: dict[str, Any] = {"group": group, "topic": topic}
        if found is not None:
            body["subscriptionData"] = found.as_json()
        request.answer(Answer.SUCCESS, body=encode_body(body))

    def _topics_of(self, group: str) -> list[str]:
        """Return a group's topics; of its positions only those of topics that it still wants."""
        wanted = set(self._members.subscriptions(group))
        kept = {topic for each, topic in self._positions.pairs() if each == group}
        return sorted(kept & wanted | wanted if wanted else kept)

    def _readable_topics_of(self, group: str, request: RemotingRequest) -> list[str]:
        """Return those of a group's topics that who asks may read; an admin may see all."""
        gate, found = self._door.gate, self._topics_of(group)
        if gate is None:
            return found
        return [topic for topic in found if gate.may_read(request, topic, or_admin=True)]

    def _when_read(self, request: RemotingRequest, then: Callable[[], None]) -> None:
        def read(failure: Exception | None) -> None:
            try:
                if failure is not None:
                    raise failure
                then()
            except RemotingRefusal as refusal:
                request.answer(refusal.code, remark=refusal.remark)
            except Exception as problem:
                what = f"a RocketMQ request ({request.frame.code})"
                reason = self._door.parts.failures.note(what, problem)[1]
                if not request.is_answered:
                    request.answer(Answer.SYSTEM_ERROR, remark=reason)

        self._positions.when_read(read)

    def with_groups(self, call: Callable[[Iterable[str]], None]) -> None:
        """Make a call with the names of all groups that are online, or have positions."""

        def then(_: Exception | None) -> None:  # without the table: those that are known
            kept = {group for group, _ in self._positions.pairs()}
            call(kept.union(self._members.consumer_groups()))

        self._positions.when_read(then)

    # -- how far it is

    def stats(self, request: RemotingRequest) -> None:
        """Answer with a group's position in each queue of its topics, or of some of them."""
        fields = request.frame.fields
        group, only = needed(fields, "consumerGroup"), fields.get("topic")
        named = list(dict.fromkeys(listed_topics(fields))) or ([only] if only else [])

        def then() -> None:
            queues = self._queues_of(group, named or self._readable_topics_of(group, request))
            until_ms = self._clock.monotonic_ms() + READ_MS

            def read() -> bytes:
                table = Pairs()
                for each in queues:
                    table.append((self._as_json(each), self._progress(each, until_ms)))
                return encode_body({"consumeTps": rate, "offsetTable": table})

            rate = self._positions.rate(group)
            read_aside(
                self._door, request, read,
                lambda body: request.answer(Answer.SUCCESS, body=body),
            )  # fmt: skip

        self._when_read(request, then)

    def _queues_of(self, group: str, topics: list[str]) -> list[_Queue]:
        found: list[_Queue] = []
        for topic in topics:
            shape = self._topics.find(topic)
            if shape is None and topic == RETRY + group:
                shape = self._topics.to_be(topic)  # RocketMQ makes it with the first heartbeat
            if shape is None:
                continue
            known = self._positions.known(group, topic)
            found += (_Queue(topic, queue, known.get(queue)) for queue in range(shape.read))
            if len(found) > QUEUES_MAX:
                text = f"the group has more than {QUEUES_MAX} queues; name one topic"
                raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        return found

    def _progress(self, one: _Queue, until_ms: float) -> dict[str, int]:
        """Return where a queue ends, where the group is, and when the last message was stored."""
        store = self._store
        known = store.reader.readable_range(one.topic, one.queue, store.readable_offset)
        end, at = 0 if known is None else known[1], one.position or 0
        last_ms = 0
        if known is not None and known[0] < at <= end and self._clock.monotonic_ms() < until_ms:
            last_ms = stored_ms(store, one.topic, one.queue, at - 1, store.readable_offset)
        return {
            "brokerOffset": end, "consumerOffset": at, "lastTimestamp": last_ms, "pullOffset": at,
        }  # fmt: skip

    def _as_json(self, one: _Queue) -> dict[str, Any]:
        return {"brokerName": self._broker, "queueId": one.queue, "topic": one.topic}

    # -- somewhere else

    def reset(self, request: RemotingRequest) -> None:
        """Move a group to where the queues were at a time, or to an offset of one queue."""
        fields = request.frame.fields
        topic, group = needed(fields, "topic"), needed(fields, "group")
        at_ms = number(fields, "timestamp", -1, _LONG_MAX) if "timestamp" in fields else -1
        force = fields.get("isForce", "false") == "true"
        only = number(fields, "queueId", -1, _INT_MAX) if fields.get("queueId") else -1
        offset = number(fields, "offset", -1, _LONG_MAX) if fields.get("offset") else -1

        def then() -> None:
            queues = self._queues_of(group, [topic])
            if only >= 0:
                queues = [one for one in queues if one.queue == only]
            if not queues:
                text = f"[reset-offset] reset offset failed, no topic in this broker. topic={topic}"
                raise RemotingRefusal(Answer.SYSTEM_ERROR, text[:200])
            if not self._members.consumers(group) and all(one.position is None for one in queues):
                text = (
                    f"Consumer not online, so can not reset offset, Group: {group} Topic: {topic}"
                )
                raise RemotingRefusal(Answer.CONSUMER_NOT_ONLINE, text[:200])
            until_ms = self._clock.monotonic_ms() + READ_MS

            def read() -> dict[int, int]:
                if only >= 0 and offset >= 0:
                    return {only: self._checked(queues[0], offset)}
                found = {one.queue: self._at(one, at_ms, until_ms) for one in queues}
                for one in queues:
                    if not force and one.position is not None:
                        found[one.queue] = min(found[one.queue], one.position)
                return found

            read_aside(
                self._door, request, read,
                lambda offsets: self._move(request, group, topic, at_ms, offsets),
            )  # fmt: skip

        self._when_read(request, then)

    def _checked(self, one: _Queue, offset: int) -> int:
        low, high = self._range(one)
        if not low <= offset <= high:
            text = f"Target offset {offset} not in consume queue range [{low}-{high}]"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        return offset

    def _range(self, one: _Queue) -> tuple[int, int]:
        store = self._store
        found = store.reader.readable_range(one.topic, one.queue, store.readable_offset)
        return (0, 0) if found is None else (found[0], found[1])

    def _at(self, one: _Queue, at_ms: int, until_ms: float) -> int:
        """Return where a queue was at a time; -1: its end."""
        low, high = self._range(one)
        if at_ms < 0 or low == high:
            return high
        steps, spent = 0, False

        def is_spent() -> bool:
            nonlocal steps, spent
            steps += 1
            spent = spent or steps > STEPS_MAX or self._clock.monotonic_ms() > until_ms
            return spent

        found = self._store.reader.queue_offset_by_time(one.topic, one.queue, at_ms, is_spent)
        if spent:
            text = "the search by time took too long; nothing was reset; try again"
            raise RemotingRefusal(Answer.SYSTEM_BUSY, text)
        return min(max(found, low), high)

    def _move(
        self, request: RemotingRequest, group: str, topic: str, at_ms: int, offsets: dict[int, int]
    ) -> None:
        def then(code: int, why: str | None) -> None:
            if code != Answer.SUCCESS:
                request.answer(code, remark=why)
                return
            table = Pairs(
                (self._as_json(_Queue(topic, queue, None)), offset)
                for queue, offset in sorted(offsets.items())
            )
            body = encode_body({"offsetTable": table})
            self._tell(group, topic, at_ms, offsets, body)
            request.answer(Answer.SUCCESS, body=body)

        self._positions.commit(group, topic, offsets, then)

    def _tell(
        self, group: str, topic: str, at_ms: int, offsets: dict[int, int], body: bytes
    ) -> None:
        """Tell the consumers: that of C++, and hastore's own, want a list.

        Each stops for 10 s. With write twins mqadmin asks once for each node, and all that comes
        here: who has just been told is not told the same again, since it would stop for longer.
        """
        now, told = self._clock.monotonic_ms(), self._told
        while told and now - next(iter(told.values())).at_ms >= SAME_RESET_MS:
            told.popitem(last=False)
        last = told.get((group, topic))
        if last is None or last.offsets != offsets:
            told.pop((group, topic), None)
            last = told[group, topic] = _Told(now, offsets, set())
        fields = {"topic": topic, "group": group, "timestamp": str(at_ms), "isForce": "true"}
        listed = [
            self._as_json(_Queue(topic, queue, None)) | {"offset": offset}
            for queue, offset in sorted(offsets.items())
        ]
        for member in self._members.consumers(group):
            client = member.client_id, member.address
            if client in last.clients:
                continue
            last.clients.add(client)
            wants_list = member.language == _CPP or not member.key.remoting
            data = encode_body({"offsetTable": listed}) if wants_list else body
            self._door.tell(member.key, Code.RESET_CONSUMER_CLIENT_OFFSET, fields, data)
