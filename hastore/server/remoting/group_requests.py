"""Heartbeats, members and what they are told: the requests about groups that need no position.

    34, 35       HEART_BEAT, UNREGISTER_CLIENT
    38           GET_CONSUMER_LIST_BY_GROUP: each consumer shares out the queues by itself
    40           NOTIFY_CONSUMER_IDS_CHANGED, to the consumers: share them out anew
    46           CHECK_CLIENT_CONFIG
    203, 204     the connections of a consumer or producer group
    223          INVOKE_BROKER_TO_GET_CONSUMER_STATUS: 221 is asked of the consumers
    307, 309     passed on to one consumer, and its answer back

Every node notifies the members that it knows: a consumer may ask any node for the list, so it must
be told again by the last node that hears of a change. A group of many members is told less often,
see `Notifier`. A node that has not known a group for long asks the others for its members, see
members_elsewhere.py. Everything runs in the API's thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import msgspec

from hastore.addresses import address_text
from hastore.errors import HastoreError, UsageError
from hastore.protocol.remoting import Answer, Code, Frame, encode_body
from hastore.record.codec import decode_record
from hastore.record.sql_filter import SqlError, compile_sql
from hastore.server.api.backend import ApiStore
from hastore.server.api.cold_reads import TOO_MANY
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.groups import SQL92, TAG, Member, Membership
from hastore.server.remoting.members_elsewhere import YOUNG_MS, MembersElsewhere

SCAN_MS = 10_000.0  # how often silent clients are looked for
GAP_MS = 200.0  # between two rounds of notifications to a group, at least
GAP_OF_ONE_MS = 2.0  # the same for each of its members: 500 notifications a second
TELLS_MAX = 200  # notifications at once
ASK_MS = 10_000.0  # for a consumer's answer
STATUS_MS = 5_000.0
STATUS_BYTES = 256 * 1024  # of a consumer's answer about its positions
STATUS_SUM_BYTES = 16 * 1024 * 1024  # of all those that wait for the answers of other consumers
ASKED_OF_ONE = 64  # questions that one request may cause
# A string that does not end is matched to the end, or each quote in it would be tried in turn.
_BRACES = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}]')
_CONSUMER_GROUP = "consumerGroup"
_ACCEPTED = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "false"}
_INCOMPLETE = {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}

Members = Membership[Connection]
_Read = TypeVar("_Read")


class Notifier:
    """Tells consumers that their group has changed.

    The first change is told at once, and further ones GAP_MS later, or GAP_OF_ONE_MS for each
    member: n consumers that start together cause much fewer than n * n notifications.
    """

    def __init__(self, door: Door, members: Members) -> None:
        self._door = door
        self._members = members
        self._next_ms: dict[str, float] = {}  # when a group may be told again
        self._waiting: set[str] = set()  # groups that will be told
        self._left: dict[str, list[Connection]] = {}  # of rounds that did not fit into TELLS_MAX
        self._resumes = False
        self.rounds = 0

    def changed(self, groups: list[str]) -> None:
        """Tell the members of these groups, now or soon."""
        now = self._door.parts.clock.monotonic_ms()
        for group in groups:
            if group in self._waiting:
                continue
            next_ms = self._next_ms.get(group, now)
            if next_ms <= now:
                self._begin(group, now)
            else:
                self._waiting.add(group)
                self._door.at(next_ms, lambda group=group: self._again(group))  # type: ignore[misc]
        self._tell()

    def _again(self, group: str) -> None:
        self._waiting.discard(group)
        self._begin(group, self._door.parts.clock.monotonic_ms())
        self._tell()

    def _begin(self, group: str, now: float) -> None:
        members = self._members.consumers(group)
        if not members:
            self._next_ms.pop(group, None)
            self._left.pop(group, None)
            return
        self.rounds += 1
        if len(self._next_ms) > 1_000:
            self._next_ms = {name: at for name, at in self._next_ms.items() if at > now}
        self._next_ms[group] = now + max(GAP_MS, GAP_OF_ONE_MS * len(members))
        self._left[group] = [member.key for member in members]

    def _tell(self) -> None:
        budget = TELLS_MAX
        while self._left and budget:
            group, left = next(iter(self._left.items()))
            fields = {_CONSUMER_GROUP: group}
            while left and budget:
                connection = left.pop()
                if not connection.ended:
                    self._door.tell(connection, Code.NOTIFY_CONSUMER_IDS_CHANGED, fields)
                    budget -= 1
            if not left:
                del self._left[group]
        if self._left and not self._resumes:
            self._resumes = True
            self._door.later(self._resume)

    def _resume(self) -> None:
        self._resumes = False
        self._tell()


class GroupRequests:
    """The handlers of requests about groups, and the members that they hear of."""

    def __init__(self, door: Door, broker: str = "") -> None:
        """Prepare; `members` is for the handlers of other requests, too.

        `broker`: the name under which clients know the group of nodes.
        """
        self._door = door
        self._broker = broker
        self._clock = door.parts.clock
        self.members: Members = Membership()
        door.problems_of.append(self.members.problems)
        self.notifier = Notifier(door, self.members)
        self._elsewhere = MembersElsewhere(door, self._other_nodes)
        self._scans = False
        self._status_bytes = 0  # of consumers' answers that wait for those of others
        door.on_ended(self._ended)

    def handlers(self) -> dict[int, Handler]:
        """Return the handlers by request code."""
        return {
            Code.HEART_BEAT: self.heartbeat,
            Code.UNREGISTER_CLIENT: self.unregister,
            Code.GET_CONSUMER_LIST_BY_GROUP: self.consumer_list,
            Code.CHECK_CLIENT_CONFIG: self.check_config,
            Code.GET_CONSUMER_CONNECTION_LIST: self.consumer_connections,
            Code.GET_PRODUCER_CONNECTION_LIST: self.producer_connections,
            Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: self.consumer_status,
            Code.GET_CONSUMER_RUNNING_INFO: self.running_info,
            Code.CONSUME_MESSAGE_DIRECTLY: self.consume_directly,
        }

    # -- who is there

    def heartbeat(self, request: RemotingRequest) -> None:
        """Take a heartbeat; one that repeats the last one costs a comparison."""
        connection, frame, gate = own(request), request.frame, self._door.gate
        incomplete = self.hear(
            connection, frame.body, request.came_ms, language=frame.language,
            version=frame.version,
            may_read=None if gate is None else partial(gate.may_read, request),
        )  # fmt: skip
        request.answer(Answer.SUCCESS, _INCOMPLETE if incomplete else _ACCEPTED)

    def hear(
        self, connection: Connection, body: bytes, came_ms: float, *, language: str, version: int,
        may_read: Callable[[str], bool] | None = None,
    ) -> bool:  # fmt: skip
        """Take a client's heartbeat; return whether it must send its subscriptions again.

        `may_read`: which of them count. It stays the same as long as the connection: with other
        rights of its identity that ends.
        """
        if self.members.repeats(connection, body, came_ms):
            return False
        try:
            incomplete = self.members.hear(
                connection, body, came_ms, language=language, version=version,
                address=address_text(*connection.address), may_read=may_read,
                owner=None if connection.proof is None else connection.proof.identity.name,
            )  # fmt: skip
        except UsageError as failure:
            raise RemotingRefusal(Answer.SYSTEM_ERROR, str(failure)) from failure
        self.tell_changes()
        if not self._scans:
            self._scans = True
            self._door.at(came_ms + SCAN_MS, self._scan)
        return incomplete

    def unregister(self, request: RemotingRequest) -> None:
        """Take a client out of its groups."""
        fields = request.frame.fields
        client_id = needed(fields, "clientID")
        producer, consumer = fields.get("producerGroup"), fields.get(_CONSUMER_GROUP)
        self.members.leave(own(request), client_id, producer, consumer)
        self.tell_changes()
        request.answer(Answer.SUCCESS)

    def _ended(self, connection: Connection) -> None:
        self.members.end(connection)
        self.tell_changes()

    def _scan(self) -> None:
        self._scans = False
        now = self._clock.monotonic_ms()
        self.members.expire(now)
        self.tell_changes()
        if self.members.count:
            self._scans = True
            self._door.at(now + SCAN_MS, self._scan)

    def tell_changes(self) -> None:
        """Tell the members of groups that have changed."""
        changed = self.members.take_changed()
        if changed:
            self.notifier.changed(changed)

    # -- questions about members

    def consumer_list(self, request: RemotingRequest) -> None:
        """Answer with the client ids of a consumer group.

        A code other than 0 lets a consumer keep the queues that it has.
        """
        group = needed(request.frame.fields, _CONSUMER_GROUP)
        if request.is_forwarded or not self.is_young(group, request.came_ms):
            self._answer_list(request, group, frozenset())
            return

        def then(ids: frozenset[str] | None) -> None:
            if ids is not None or self._door.is_master:
                self._answer_list(request, group, ids or frozenset())
            else:
                text = f"no other node says who is in the group {group[:80]}; ask again"
                request.answer(Answer.SYSTEM_ERROR, remark=text)

        self.ask_elsewhere(group, then)

    def is_young(self, group: str, now_ms: float) -> bool:
        """Whether this node may not have heard of all members of a group yet."""
        first_ms = self.members.first_ms(group)
        return first_ms is None or now_ms - first_ms < YOUNG_MS

    def ask_elsewhere(self, group: str, then: Callable[[frozenset[str] | None], None]) -> None:
        """Let `then` have the client ids that the other nodes know; None if none says anything."""
        if not self._elsewhere.ask(group, then):
            text = "too many requests wait for other nodes; ask again"
            raise RemotingRefusal(Answer.SYSTEM_BUSY, text)

    def _answer_list(self, request: RemotingRequest, group: str, more: frozenset[str]) -> None:
        own = self.members.client_ids(group)
        if more.issubset(own):
            body = self.members.id_list(group)
        else:
            body = encode_body({"consumerIdList": sorted(more.union(own))})
        if body is None:
            text = f"no consumer for this group, {group[:80]}"
            request.answer(Answer.SYSTEM_ERROR, remark=text)
        else:
            request.answer(Answer.SUCCESS, body=body)

    def _other_nodes(self) -> set[int]:
        """Return the nodes that may know members that this one does not."""
        backend = self._door.parts.backend
        known = backend.master_map()
        return known.nodes.keys() - {known.node} - backend.without_remoting()

    def consumer_connections(self, request: RemotingRequest) -> None:
        """Answer with the members of a consumer group, and how they consume."""
        name = needed(request.frame.fields, _CONSUMER_GROUP)
        group = self.members.group(name)
        if group is None:
            text = f"the consumer group[{name[:80]}] not online"
            raise RemotingRefusal(Answer.CONSUMER_NOT_ONLINE, text)
        table = self.members.subscriptions(name)
        body = {
            "connectionSet": [_connection(one) for one in self.members.consumers(name)],
            "consumeFromWhere": group.from_where,
            "consumeType": group.consume_type,
            "messageModel": group.message_model,
            "subscriptionTable": {topic: one.as_json() for topic, one in table.items()},
        }
        request.answer(Answer.SUCCESS, body=encode_body(body))

    def producer_connections(self, request: RemotingRequest) -> None:
        """Answer with the members of a producer group."""
        name = needed(request.frame.fields, "producerGroup")
        members = self.members.producers(name)
        if not members:
            text = f"the producer group[{name[:80]}] not exist"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        body = {"connectionSet": [_connection(one) for one in members]}
        request.answer(Answer.SUCCESS, body=encode_body(body))

    def check_config(self, request: RemotingRequest) -> None:
        """Accept a subscription by tags or by SQL; refuse a wrong one, or of another kind."""
        try:
            asked = msgspec.json.decode(request.frame.body, type=_CheckedClient)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
            raise RemotingRefusal(Answer.SYSTEM_ERROR, f"no configuration: {failure}") from failure
        wanted = asked.subscriptionData or _CheckedSubscription()
        kind = wanted.expressionType
        if kind == SQL92:
            try:
                compile_sql(wanted.subString or "")
            except SqlError as failure:
                raise RemotingRefusal(Answer.SUBSCRIPTION_PARSE_FAILED, str(failure)) from failure
        elif kind not in (None, TAG):
            text = f"The broker does not support consumer to filter message by {kind[:40]}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        request.answer(Answer.SUCCESS)

    # -- questions to members

    def running_info(self, request: RemotingRequest) -> None:
        """Ask a consumer how it is, and pass its answer on."""
        self._pass_on(request, request.frame.fields, request.frame.body)

    def consume_directly(self, request: RemotingRequest) -> None:
        """Let a consumer consume one message now, and pass its answer on."""
        fields, store = request.frame.fields, self._door.parts.backend.store
        offset = offset_of_id(needed(fields, "msgId"))

        def read() -> bytes | None:
            if not store.min_offset <= offset < store.readable_offset:
                return None
            raw = store.reader.record_bytes(offset)
            return raw if raw is None or offset + len(raw) <= store.readable_offset else None

        def then(raw: bytes | None) -> None:
            if raw is None:
                text = f"there is no message at offset {offset}"
                raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
            # A listener is told the queue, with the broker's name.
            self._pass_on(request, {**fields, "brokerName": self._broker}, raw)

        read_aside(self._door, request, read, then)

    def _pass_on(self, request: RemotingRequest, fields: Mapping[str, str], body: bytes) -> None:
        group, client = needed(fields, _CONSUMER_GROUP), needed(fields, "clientId")
        who = f"<{group[:80]}> <{client[:80]}>"
        member = self.members.consumer(group, client)
        if member is None:
            raise RemotingRefusal(Answer.SYSTEM_ERROR, f"The Consumer {who} not online")
        if not member.key.remoting:
            text = f"The Consumer {who} is hastore's own client, which answers no such question"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)

        def then(answer: Frame | None) -> None:
            if answer is None:
                text = f"consumer {who} Timeout: no answer within {ASK_MS / 1000:.0f} s"
                request.answer(Answer.CONSUME_MSG_TIMEOUT, remark=text)
            else:
                request.answer(answer.code, answer.fields, answer.body, answer.remark)

        self._door.ask(member.key, request.frame.code, dict(fields), body, ASK_MS, then)

    def consumer_status(self, request: RemotingRequest) -> None:
        """Ask a group's consumers, or one of them, for their positions in a topic."""
        fields = request.frame.fields
        topic, group = needed(fields, "topic"), needed(fields, "group")
        only = (fields.get("clientAddr") or "").strip()
        members = [
            one for one in self.members.consumers(group) if not only or one.client_id == only
        ][:ASKED_OF_ONE]
        if not members:
            text = f"No Any Consumer online in the consumer group: [{group[:80]}]"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
        found: dict[str, bytes] = {}
        missing = len(members)

        def keep(client_id: str, body: bytes) -> None:
            """Keep an answer; one that is too large is left out, as if it had not come."""
            size = len(body)
            if size <= STATUS_BYTES and self._status_bytes + size <= STATUS_SUM_BYTES:
                self._status_bytes += size - len(found.get(client_id, b""))
                found[client_id] = body

        def heard(client_id: str) -> Callable[[Frame | None], None]:
            def then(answer: Frame | None) -> None:
                nonlocal missing
                missing -= 1
                if answer is not None and answer.code == Answer.SUCCESS and answer.body:
                    keep(client_id, answer.body)
                if not missing:
                    self._status_bytes -= sum(map(len, found.values()))
                    request.answer(Answer.SUCCESS, body=_status_body(found))

            return then

        asked = {"topic": topic, "group": group}
        code = Code.GET_CONSUMER_STATUS_FROM_CLIENT
        for member in members:
            then = heard(member.client_id)
            try:
                self._door.ask(member.key, code, asked, b"", STATUS_MS, then)
            except RemotingRefusal:  # too many questions wait: as if it had not answered
                then(None)


class _CheckedSubscription(msgspec.Struct):
    expressionType: str | None = None
    subString: str | None = None


class _CheckedClient(msgspec.Struct):
    subscriptionData: _CheckedSubscription | None = None


def own(request: RemotingRequest) -> Connection:
    """Return the connection of a client that speaks for itself."""
    if request.connection is None:
        text = "a client must tell each node by itself which groups it is in"
        raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
    return request.connection


def read_aside(
    door: Door, request: RemotingRequest, read: Callable[[], _Read], then: Callable[[_Read], None]
) -> None:
    """Let another thread read from the disk, and `then` answer in the API's thread.

    If one of them fails, the request is answered with the reason.
    """

    def finish(result: _Read | Exception) -> None:
        try:
            if isinstance(result, Exception):
                raise result
            then(result)
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)
        except Exception as failure:
            what = f"a RocketMQ request ({request.frame.code})"
            reason = door.parts.failures.note(what, failure)[1]
            if not request.is_answered:
                request.answer(Answer.SYSTEM_ERROR, remark=reason)

    whom = request.connection or door
    if not door.parts.cold.accept(whom, read, finish):
        raise RemotingRefusal(Answer.SYSTEM_BUSY, TOO_MANY)


def stored_ms(store: ApiStore, topic: str, queue: int, at: int, limit: int) -> int:
    """Return when a queue's message was stored; 0 if it is gone, damaged, or cannot be read.

    The reader itself tells of damage. All else that a tool asked for is of use without this time,
    most of all then.
    """
    try:
        found = store.reader.pull(
            topic, queue, at, max_messages=1, max_bytes=1, limit_offset=limit, check_bodies=False,
        )  # fmt: skip
        return decode_record(found.records).store_timestamp_ms if found.count else 0
    except (HastoreError, OSError):
        return 0


def needed(fields: Mapping[str, str], name: str) -> str:
    """Return a field that must be there."""
    value = fields.get(name)
    if not value:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, f"the request lacks the field {name}")
    return value


def number(fields: Mapping[str, str], name: str, lowest: int, highest: int) -> int:
    """Return a field that must be a number within bounds."""
    text = needed(fields, name)
    try:
        value = int(text) if len(text) <= 20 else highest + 1
    except ValueError:
        value = highest + 1
    if not lowest <= value <= highest:
        problem = f"the field {name} is {text[:40]!r}; {lowest} to {highest} are allowed"
        raise RemotingRefusal(Answer.SYSTEM_ERROR, problem)
    return value


def offset_of_id(message_id: str) -> int:
    """Return the log offset that a message id ends with: host, port, offset in hexadecimal."""
    if len(message_id) in (32, 56):
        try:
            return int.from_bytes(bytes.fromhex(message_id)[-8:], "big", signed=True)
        except ValueError:
            pass
    raise RemotingRefusal(Answer.SYSTEM_ERROR, f"{message_id[:80]!r} is no message id of a node")


def _connection(member: Member[Connection]) -> dict[str, Any]:
    return {
        "clientAddr": member.address,
        "clientId": member.client_id,
        "language": member.language,
        "version": member.version,
    }


def _status_body(found: Mapping[str, bytes]) -> bytes:
    """Join the consumers' positions: each answer has a map with objects as keys, which JSON lacks.

    The maps are passed on as they are, so nothing of them is parsed.
    """
    tables = []
    for client_id, body in found.items():
        table = _member_of(body, b'"messageQueueTable":')
        if table is not None:
            tables.append(msgspec.json.encode(client_id) + b":" + table)
    return b'{"consumerTable":{' + b",".join(tables) + b"}}"


def _member_of(body: bytes, name: bytes) -> bytes | None:
    """Return the object that follows a name in a body; None if it is not there or not closed."""
    at = body.find(name)
    if at < 0 or len(body) > STATUS_BYTES or body[at + len(name) : at + len(name) + 1] != b"{":
        return None
    at += len(name)
    depth = 0
    for found in _BRACES.finditer(body, at):
        if found[0] == b"{":
            depth += 1
        elif found[0] == b"}":
            depth -= 1
            if not depth:
                return body[at : found.end()]
    return None
