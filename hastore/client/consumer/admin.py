"""Queries about a group: the status of its nodes, its topics, messages by key or id."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from hastore.client.arguments import (
    check_clock,
    flag,
    integer,
    key_text,
    moment_ms,
    refusal,
    seconds,
    text,
    utf8_text,
)
from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.connections.calls import Blocking, Client, ClientCall, Core
from hastore.client.connections.requester import Answer, Requester, Steps, error_of, expect
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.client.consumer.consumer_core import MAX_GROUP
from hastore.client.lifecycle import describe
from hastore.client.messages import (
    FoundMessages,
    GroupMember,
    GroupMembers,
    Message,
    NodeInfo,
    SendResult,
    SilentNode,
    decode_messages,
    failure_of,
)
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import (
    ClientError,
    CorruptRecordError,
    NotAuthenticatedError,
    UnreachableError,
    UsageError,
)
from hastore.protocol import api
from hastore.record.codec import parse_message_id
from hastore.record.topic_records import (
    MAX_QUEUES,
    READ_WRITE,
    TOPICS_TOPIC,
    TopicConfig,
    check_config,
    check_name,
)

QueueRanges = dict[int, tuple[int, int]]
DAMAGED_THERE = "the master has said that it is damaged"


class AdminCalls(Client):
    """The constructor and the calls of both Admins."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        timeout_s: float = 5.0,
        security: SecurityLike = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Start to connect; raises UsageError for wrong arguments."""
        addresses = parse_bootstrap(bootstrap)
        check_clock("clock", clock)
        self._timeout_s = seconds("timeout_s", timeout_s)
        requester = Requester(addresses, clock, security, any_group=True)
        super().__init__(Core(requester), describe(self._kind, addresses))

    @ClientCall
    def status(self) -> Steps[list[NodeInfo]]:
        """Return the status of each node that answers; raises UnreachableError if none does."""
        requester = self._requester
        deadline = requester.deadline(self._timeout_s)
        yield from requester.survey(self._timeout_s)
        replies = yield from requester.ask_all(api.AskStatus, requester.left_s(deadline))
        infos = [
            NodeInfo(address, reply.status)
            for address, reply in replies.items()
            if isinstance(reply, api.NodeStatus)
        ]
        return sorted(infos, key=lambda info: info.node)

    @ClientCall
    def nodes(self) -> Steps[list[NodeInfo | SilentNode]]:
        """Return what each known node says, by its number: its status, or why it does not answer.

        Known are the addresses that this client was given, and those that the nodes name. Raises
        UnreachableError, which says why of each address, if no node answers. A node is silent once
        it refuses, or has said nothing for `timeout_s`.
        """
        requester = self._requester
        yield from requester.survey(self._timeout_s, wait_for_starts=False)
        found = yield from requester.ask_each(api.AskStatus, self._timeout_s)
        infos = [
            NodeInfo(address, reply.status)
            for address, reply in found.items()
            if isinstance(reply, api.NodeStatus)
        ]
        silent = {one: said for one, said in found.items() if isinstance(said, NoAnswer)}
        for one, said in found.items():
            if isinstance(said, api.Failed):
                silent[one] = NoAnswer(Quiet.FAILED, f"{said.status}: {said.reason}")
        known = requester.cluster.maps.values()
        return sorted([*_once(infos), *_silent_nodes(infos, silent, known)], key=_by_number)

    @ClientCall
    def maps(self) -> Steps[dict[str, api.MapInfo]]:
        """Return each node's view of the group, by the node's address."""
        yield from self._requester.survey(self._timeout_s)
        return dict(self._requester.cluster.maps)

    @ClientCall
    def group_members(self, group: str) -> Steps[GroupMembers]:
        """Return who is online in a consumer group, and who reads which queue.

        The members are those that any node knows; the owners of queues are the master's. A node of
        an earlier version does not answer. Raises UnreachableError if no node answers, and
        ForbiddenError without a right for the group.
        """
        group = text("group", group, MAX_GROUP)
        requester = self._requester
        deadline = requester.deadline(self._timeout_s)
        yield from requester.survey(self._timeout_s)
        found = yield from requester.ask_all(
            lambda rid: api.AskMembers(rid, group), requester.left_s(deadline)
        )
        said = [one for one in found.values() if isinstance(one, api.MembersListed)]
        if not said:
            for one in found.values():  # each has refused
                expect(api.MembersListed, one)
            raise UnreachableError("no node says who is in the group; earlier versions cannot")
        members = {
            one.id: GroupMember(one.id, one.address, one.client)
            for each in said
            for one in each.members
        }
        owners = next((one.owners for one in said if one.owners is not None), None)
        listed = [members[name] for name in sorted(members)]
        return GroupMembers(listed, owners, any(one.cut for one in said))

    @ClientCall
    def topics(self) -> Steps[dict[str, QueueRanges]]:
        """Return each topic's queues with their (first, end) queue offsets, from the master."""
        reply, _ = yield from self._ask(lambda rid: api.AskTopics(rid))
        return expect(api.Topics, reply).topics

    @ClientCall
    def topic_configs(self) -> Steps[dict[str, TopicConfig]]:
        """Return the configuration of each topic, by name, from the master."""
        reply, _ = yield from self._ask(lambda rid: api.AskConfigs(rid))
        return {one.name: _config(one) for one in expect(api.Configs, reply).topics}

    @ClientCall
    def create_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = READ_WRITE,
        order: bool = False,
        attributes: Mapping[str, str] | None = None,
    ) -> Steps[TopicConfig]:
        """Create a topic, as durably as a message is stored; return its configuration.

        Without `queues` it has the group's `store.default_queues`; `read_queues` and `write_queues`
        differ from that while the number is changed. `perm` is the sum of 4 (read) and 2 (write).
        Raises UsageError if the topic exists, and otherwise what Producer.send_sync would.
        """
        check_name(text("name", name))
        changes = _changes(queues, read_queues, write_queues, perm, order, attributes)
        known = yield from self._known_topic(name)
        if known is not None:
            raise UsageError(f"topic {name} exists, with {known.write_queues} queues: change it")
        count = self._requester.cluster.default_queues
        new = TopicConfig(name, count, count)
        return (yield from self._set(msgspec.structs.replace(new, **changes)))

    @ClientCall
    def set_topic(
        self,
        name: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> Steps[TopicConfig]:
        """Change a topic; what is None stays as it is. Return its new configuration.

        Raises UsageError if there is no such topic, and otherwise what Producer.send_sync would.
        """
        check_name(text("name", name))
        changes = _changes(queues, read_queues, write_queues, perm, order, attributes)
        known = yield from self._known_topic(name)
        if known is None:
            raise UsageError(f"there is no topic {name}: create it")
        return (yield from self._set(msgspec.structs.replace(known, **changes)))

    @ClientCall
    def delete_topic(self, name: str) -> Steps[None]:
        """Delete a topic, for ever: no consumer sees its messages any more.

        A topic of that name may be made anew; it begins empty. A topic that does not exist is no
        error. Raises what Producer.send_sync would.
        """
        check_name(text("name", name))
        yield from self._change(lambda rid: api.DropTopic(rid, name, self._wait_ms()))

    def _set(self, config: TopicConfig) -> Steps[TopicConfig]:
        check_config(config)
        info = api.TopicInfo(
            config.name, config.read_queues, config.write_queues, config.perm, config.order,
            config.sys_flag, config.attributes,
        )  # fmt: skip
        yield from self._change(lambda rid: api.SetTopic(rid, info, self._wait_ms()))
        return config

    def _wait_ms(self) -> int:
        return int(min(max(1.0, self._timeout_s * 1000.0), 3_000.0))

    def _change(self, make: Callable[[int], api.Request]) -> Steps[None]:
        """Ask the master for a change of a topic; it may be repeated."""
        reply, _ = yield from self._requester.ask_master(make, self._timeout_s)
        done = expect(api.PutDone, reply)
        if done.status is not api.Status.PUT_OK:
            result = SendResult(done.status, TOPICS_TOPIC, 0, done.level)
            raise failure_of(done.status, done.reason, result, unknown=False)

    def _known_topic(self, name: str) -> Steps[TopicConfig | None]:
        """Return a topic as the master has it. Raises UsageError for nodes of several groups."""
        reply, _ = yield from self._requester.ask_master(
            lambda rid: api.AskConfigs(rid, name), self._timeout_s
        )
        groups = {f"{one.cluster}/{one.group}" for one in self._requester.cluster.maps.values()}
        if len(groups) > 1:
            raise UsageError(f"these are nodes of {', '.join(sorted(groups))}: name one group")
        found = expect(api.Configs, reply).topics
        return _config(found[0]) if found else None

    @ClientCall
    def query_key(
        self,
        topic: str,
        key: str | bytes,
        *,
        max_messages: int = 32,
        begin_ms: int | datetime.datetime = 0,
        end_ms: int | datetime.datetime = 2**63 - 1,
        before: int = 2**63 - 1,
    ) -> Steps[FoundMessages]:
        """Return a topic's messages with a key, stored in [begin_ms, end_ms], newest first.

        Only those below the offset `before` of the log. If the node has cut the search short, older
        messages may be missing: see `cut_ms` and `cut_offset` of the result.

        What is damaged at one node is read from another; `damaged` names what none could read.
        Raises CorruptRecordError if nothing else was found.
        """
        topic, wanted = text("topic", topic), text("key", key_text("key", key))
        most = integer("max_messages", max_messages, 1, api.MAX_KEY_MESSAGES)
        begin = moment_ms("begin_ms", begin_ms, round_up=True)
        end = moment_ms("end_ms", end_ms, round_up=False)
        below = integer("before", before, 0, 2**63 - 1)
        deadline = self._requester.deadline(self._timeout_s)
        reply, payload = yield from self._ask(
            lambda rid: api.FindKey(rid, topic, wanted, most, begin, end, below)
        )
        found = expect(api.Found, reply)
        messages, damaged = _messages(found.count, payload), []
        messages = [one for one in messages if one.offset < below]  # earlier versions do not know
        for offset in found.unreadable:
            if len(messages) >= most and offset < messages[-1].offset:
                break
            try:
                one = yield from self._read_at(offset, deadline, DAMAGED_THERE)
            except (ClientError, CorruptRecordError):
                damaged.append(offset)
                continue
            if one is not None and _is_wanted(one, topic, wanted, begin, end):
                messages.append(one)
                messages.sort(key=lambda each: each.offset, reverse=True)
                del messages[most:]
        if damaged and not messages:
            raise CorruptRecordError(
                f"a message at offset {damaged[0]}, which may have the key, is damaged, and no"
                " other node that answers has it whole; see `hastore log verify`"
            )
        return FoundMessages(messages, found.cut_ms, damaged, found.cut_offset)

    @ClientCall
    def query_message_id(self, message_id: str) -> Steps[Message | None]:
        """Return the message with an id, or None; raises UsageError for a malformed id.

        Raises CorruptRecordError if the message at its offset is damaged, and no other node that
        answers has it whole.
        """
        if not isinstance(message_id, str):
            raise refusal("message_id", message_id, "a str of 32 or 56 hexadecimal digits")
        host, offset = parse_message_id(message_id)
        deadline = self._requester.deadline(self._timeout_s)
        yield from self._requester.survey(self._timeout_s)
        found = yield from self._read_at(offset, deadline)
        return None if found is None or found.record.store_host != host else found

    def _read_at(self, offset: int, deadline: float, damage: str = "") -> Steps[Message | None]:
        """Return the message at an offset of the log as the first node has it that can read it.

        With `damage` a node has said before that the message is damaged there. Then one that does
        not have it lags, and is no proof that there is none: CorruptRecordError is raised.
        """
        requester = self._requester
        failure: ClientError | None = None
        for address, share_s in requester.shares(self._heard(), deadline):
            try:
                reply, payload = yield from requester.ask(
                    address, lambda rid: api.FindOffset(rid, offset), share_s
                )
            except (UnreachableError, NotAuthenticatedError) as unreachable:
                failure = unreachable
                continue
            if isinstance(reply, api.Failed):
                failure = error_of(reply)
                if reply.status == CorruptRecordError.__name__:
                    damage = f"{address}: {reply.reason}"
                continue
            found = _messages(expect(api.Found, reply).count, payload)
            if found or not damage:
                return found[0] if found else None
        if damage:
            raise CorruptRecordError(damage)
        raise failure or UnreachableError(requester.cluster.silence())

    def _ask(self, make: Callable[[int], api.Request]) -> Steps[Answer]:
        """Ask the master first, because its log is the most complete. Then ask the slaves."""
        requester = self._requester
        deadline = requester.deadline(self._timeout_s)
        yield from requester.survey(self._timeout_s)
        return (yield from requester.ask_any(self._heard(), make, requester.left_s(deadline)))

    def _heard(self) -> list[str]:
        """Return the nodes that answer, the master first."""
        cluster = self._requester.cluster
        return [address for address in reversed(cluster.replicas()) if address in cluster.maps]


class Admin(AdminCalls, Blocking):
    """Query a group. Threads may share an Admin; one call runs at a time."""

    _kind = "Admin"


def _config(info: api.TopicInfo) -> TopicConfig:
    return TopicConfig(
        info.name, info.read_queues, info.write_queues, info.perm, info.order, info.sys_flag,
        info.attributes,
    )  # fmt: skip


def _changes(
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: int | None,
    order: bool | None,
    attributes: Mapping[str, str] | None,
) -> dict[str, object]:
    """Return the settings of a topic that are not None. Raises UsageError for a wrong one."""
    wanted: dict[str, object] = {}
    if queues is not None:
        queues = integer("queues", queues, 1, MAX_QUEUES)
        wanted = {"read_queues": queues, "write_queues": queues}
    for name, number in (("read_queues", read_queues), ("write_queues", write_queues)):
        if number is not None:
            wanted[name] = integer(name, number, 0, MAX_QUEUES)
    if perm is not None:
        wanted["perm"] = integer("perm", perm, 0, READ_WRITE)
    if order is not None:
        wanted["order"] = flag("order", order)
    if attributes is not None:
        expected = "a mapping of str to str without lone surrogates"
        if not isinstance(attributes, Mapping):
            raise refusal("attributes", attributes, expected)
        wanted["attributes"] = {
            utf8_text("attributes", key, expected): utf8_text("attributes", value, expected)
            for key, value in attributes.items()
        }
    return wanted


def _by_number(one: NodeInfo | SilentNode) -> tuple[bool, int]:
    return (one.node is None, one.node or 0)


def _once(infos: Iterable[NodeInfo]) -> list[NodeInfo]:
    """Return each node once, also if it has answered at two addresses."""
    names = ("cluster", "group", "node", "store", "config")
    found = {tuple(str(info.status.get(name)) for name in names): info for info in infos}
    return list(found.values())


def _silent_nodes(
    infos: Iterable[NodeInfo], silent: Mapping[str, NoAnswer], maps: Collection[api.MapInfo]
) -> list[SilentNode]:
    """Return the silent addresses as nodes, except those of nodes that answer at another one."""
    there = {(one.status.get("cluster"), one.status.get("group"), one.node) for one in infos}
    named = {
        address: (info.cluster, info.group, number)
        for info in maps
        for number, address in info.nodes.items()
    }
    found = []
    for address, silence in silent.items():
        cluster, group, number = named.get(address, (None, None, None))
        if number is None or (cluster, group, number) not in there:
            found.append(
                SilentNode(address, number, silence.kind.value, silence.text, cluster, group)
            )
    return found


def _is_wanted(one: Message, topic: str, key: str, begin_ms: int, end_ms: int) -> bool:
    is_in_span = begin_ms <= one.store_timestamp_ms <= end_ms
    return is_in_span and one.topic == topic and key in one.record.keys


def _messages(count: int, payload: bytes) -> list[Message]:
    found, failure = decode_messages(payload, ())
    if failure is not None:
        raise failure
    if len(found) != count:
        raise ClientError(f"a reply has {len(found)} messages, but states {count}")
    return found
