"""Reading for RocketMQ's clients: pulls, offsets, and messages by key or by id.

A pull is answered as RocketMQ's broker answers it; `offset` is the one asked for:

    queue                 offset              answer                     next offset
    any                   a record is there   SUCCESS, records           behind what was looked at
    any                   only other tags     PULL_RETRY_IMMEDIATELY     behind what was looked at
    any                   its end             PULL_NOT_FOUND             offset
    none, or empty        0                   PULL_NOT_FOUND             0
    none                  above 0             PULL_OFFSET_MOVED          0
    any                   below its minimum   PULL_OFFSET_MOVED          its minimum
    any                   beyond its end      PULL_OFFSET_MOVED          its end
    any                   a record that this  PULL_RETRY_IMMEDIATELY     offset
                          node cannot read

What is not found may wait, for as long as the client says. A node that is no master moves no
offset: its copy may lack what the master has. It waits for KEPT_MS at most, then it answers
PULL_RETRY_IMMEDIATELY with the same offset and suggests the master. So does a master until its
replay has come to where the log ended when the pull came. The end of a queue is that of its
readable part.

A record is damaged here, or in a bad sector: the answer suggests another node that serves reads,
after DAMAGED_MS, since that node may have the same damage. Without such a node it is SYSTEM_ERROR.

Tags are compared by their hashes, before a record is read, so others with the same hash come along:
the client compares again. If the subscription is not known, because no heartbeat has come to this
node yet, all records are sent, for the same reason.

An SQL filter (record/sql_filter.py) is decided by the record itself, and RocketMQ's client does not
compare again. One look reads so many records that the filter's terms are evaluated at most
MAX_EVALUATED times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from hastore.errors import CorruptRecordError, NotCachedError, UsageError
from hastore.protocol.api import Failed, FindKey, FindOffset, FindTime, Found, Position, TimeFound
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import decode_record, find_parts
from hastore.record.hashes import tag_codes
from hastore.record.layout import header_struct
from hastore.record.properties import decode_properties, offsets_taken
from hastore.record.sql_filter import SqlError, SqlFilter, compile_sql
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.parked import Found as Looked
from hastore.server.api.parked import OwnPull
from hastore.server.api.pulls import UNREAD
from hastore.server.api.queries import OwnQuery, Steps
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.group_requests import needed, number, read_aside
from hastore.server.remoting.groups import MAX_EXPRESSION, SQL92
from hastore.server.remoting.pull_memory import NoRoomError, PullMemory
from hastore.server.remoting.routes import (
    DLQ,
    MASTER_ID,
    READ,
    RETRY,
    Shape,
    TopicView,
    check_name,
)
from hastore.store.message_store import PullResult, PullStatus

COMMITS, WAITS, SUBSCRIBES, HAS_CLASS = 1, 2, 4, 8  # bits of a pull's sysFlag
MAX_WAIT_MS = 60_000
KEPT_MS = 1_000
LOOK_MS = 200.0  # so often it is looked which nodes serve reads
DAMAGED_MS = 500.0  # the answer waits that sends a consumer on because of damage
DELAYED_MAX = 1_024  # so many of these answers wait; others are errors
UNLINKED_MS = 30_000.0  # so long a slave without a master keeps its consumers
MAX_MESSAGES = 1_024
MAX_BYTES = 256 * 1024  # of records in an answer, or one larger record; as RocketMQ's from memory
MAX_EVALUATED = 20_000  # terms of SQL filters in one look, of some 0.3 us
MAX_LOOKS = 4  # in a row for one pull, if no record matches
MAX_FOUND = 64  # messages by a key, as in RocketMQ
UNIQUE_FOUND = 32  # the same, by a key that is unique
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1
_TAG = ("TAG", "", None)
_QUEUE_OFFSET = header_struct("queue_offset")
_UNREADABLE = ("CorruptRecordError", "StoreError")  # here, while another node may have it whole
_CODES = {"BUSY": Answer.SYSTEM_BUSY, "SERVICE_NOT_AVAILABLE": Answer.SERVICE_NOT_AVAILABLE}
_Read = TypeVar("_Read")


class Subscription(Protocol):
    """What a group's heartbeats say of a topic."""

    expression: str
    expression_type: str
    version: int


class Hooks(NamedTuple):
    """What pulls need of the other rooms; all are called in the API's thread."""

    subscription: Callable[[str, str], Subscription | None]  # of a group to a topic
    # Take a position that a pull brings: group, topic, queue id, queue offset.
    commit: Callable[[str, str, int, int], None]
    refusal: Callable[[str], str | None]  # why a group may not consume
    read_slaves: bool = True  # the master suggests its slaves to consumers
    twins: bool = False  # clients see each node as a broker of its own, too


class Answered(NamedTuple):
    """What a pull found: a code, the next offset, the queue's range, and the records."""

    code: Answer
    status: str  # as RocketMQ names it
    next_offset: int
    low: int
    high: int
    records: bytes = b""
    messages: int = 0  # in `records`
    suggested: int | None = None  # the broker id that the next pull is to ask; None: as usual


class Wanted(NamedTuple):
    """Which records of a queue a consumer wants."""

    codes: frozenset[int] | None = None  # of the tags; None: all
    sql: SqlFilter | None = None


class RemotingPull(OwnPull):
    """A pull of a RocketMQ client, by the table above."""

    __slots__ = (
        *("backend", "codes", "group", "log_end", "looked", "max_bytes", "max_messages", "offset"),
        *("on_answer", "request", "sql", "sys_flag"),
    )

    def __init__(
        self, backend: ApiBackend, request: RemotingRequest, group: str, topic: str, queue_id: int,
        offset: int, wait_ms: int, max_messages: int, max_bytes: int,
        wanted: Wanted, sys_flag: int,
        on_answer: Callable[[RemotingPull, Answered | Failed], None],
    ) -> None:  # fmt: skip
        """Prepare; `on_answer` sends the answer."""
        super().__init__(topic, queue_id, Position(offset), wait_ms)
        self.backend = backend
        self.request = request
        self.group = group
        self.max_messages = max_messages
        self.max_bytes = max_bytes
        self.offset = offset
        self.codes, self.sql = wanted
        self.sys_flag = sys_flag
        self.on_answer = on_answer
        self.log_end = backend.store.max_offset
        self.looked = False  # once in vain: from then on it moves on by itself

    def find(self) -> Looked:
        """Return the answer as of now; see OwnPull."""
        store = self.backend.store
        replayed = store.dispatched_offset  # before the read
        limit = store.readable_offset
        found = self._read(limit)
        status = found.status
        if status is PullStatus.FOUND:
            return Looked(_answer_of(found))
        if status is PullStatus.NO_MATCH:
            return Looked(self._not_matched(found))
        if status is PullStatus.NO_NEW:
            return self._nothing_new(found)
        if status is PullStatus.NO_SUCH_QUEUE and not self.offset:
            nothing = Answered(Answer.PULL_NOT_FOUND, "NO_MESSAGE_IN_QUEUE", 0, 0, 0)
            return Looked(nothing, may_wait=True)
        return self._misplaced(found, limit, replayed)

    def find_plain(self) -> Answered | None:
        """Return the answer if all records are wanted, and `pull_few` finds them; see OwnPull."""
        if self.codes is not None or self.sql is not None:
            return None
        store = self.backend.store
        found = store.reader.pull_few(
            self.topic, self.queue_id, self.offset, self.max_messages, self.max_bytes,
            store.readable_offset,
        )  # fmt: skip
        return None if found is None else _answer_of(found)

    def _read(self, limit: int) -> PullResult:
        """Return what is wanted of the next records.

        A pull that moves on by itself looks behind records of which none is wanted, but not for
        ever: others wait for their turn.
        """
        sql, messages = self.sql, self.max_messages
        if sql is not None:
            messages = max(1, min(MAX_MESSAGES, MAX_EVALUATED // sql.terms))
        for looks_left in range(MAX_LOOKS - 1, -1, -1):
            found = self.backend.store.reader.pull(
                self.topic, self.queue_id, self.position.queue_offset,
                max_messages=messages, max_bytes=self.max_bytes, limit_offset=limit,
                codes=self.codes,
            )  # fmt: skip
            if sql is None or found.status is not PullStatus.FOUND:
                break
            _keep_matching(found, sql, self.max_messages)
            if found.count or not self.looked or not looks_left:
                break
            self.position = Position(found.next_queue_offset)
        return found

    def _not_matched(self, found: PullResult) -> Answered:
        return Answered(
            Answer.PULL_RETRY_IMMEDIATELY, "NO_MATCHED_MESSAGE", found.next_queue_offset,
            found.min_queue_offset, found.max_queue_offset,
        )  # fmt: skip

    def _nothing_new(self, found: PullResult) -> Looked:
        """Wait at the queue's end. If others were looked at, the client first learns of that."""
        following = found.next_queue_offset
        if following > self.offset:
            if self.looked:
                self.position = Position(following)
            return Looked(self._not_matched(found), None, found.needs_offset, self.looked)
        self.looked = True
        empty = found.max_queue_offset == 0
        status = "NO_MESSAGE_IN_QUEUE" if empty else "OFFSET_OVERFLOW_ONE"
        high = following if found.needs_offset is not None else found.max_queue_offset
        nothing = Answered(Answer.PULL_NOT_FOUND, status, self.offset, found.min_queue_offset, high)
        return Looked(nothing, None, found.needs_offset, may_wait=True)

    def _misplaced(self, found: PullResult, limit: int, replayed: int) -> Looked:
        """Answer a pull whose offset the queue does not have."""
        backend, low, high = self.backend, found.min_queue_offset, found.max_queue_offset
        status, following = "OFFSET_TOO_SMALL", found.next_queue_offset
        too_small = found.status is PullStatus.OFFSET_TOO_SMALL
        if found.status is PullStatus.OFFSET_TOO_LARGE:
            readable = backend.store.reader.readable_range(self.topic, self.queue_id, limit)
            low, high = readable or (low, high)
            status, following = "OFFSET_OVERFLOW_BADLY", high
        elif found.status is PullStatus.NO_SUCH_QUEUE:
            status = "NO_MESSAGE_IN_QUEUE"
        group = backend.master_map()
        is_master = group.master_node == group.node
        has_all = replayed >= self.log_end and backend.writable_reason() is None
        if is_master and (too_small or has_all):
            return Looked(Answered(Answer.PULL_OFFSET_MOVED, status, following, low, high))
        self.wait_ms = min(self.wait_ms, KEPT_MS)
        kept = Answered(
            Answer.PULL_RETRY_IMMEDIATELY, status, self.offset, low, high, suggested=MASTER_ID
        )
        return Looked(kept, None, self.log_end if is_master else None, may_wait=True)

    @property
    def filter(self) -> frozenset[int] | SqlFilter | None:
        """By what records are chosen; None: all are wanted."""
        return self.codes if self.sql is None else self.sql

    def respond(self, reply: Any) -> None:
        """Answer the client."""
        self.on_answer(self, reply)


def _answer_of(found: PullResult) -> Answered:
    return Answered(
        Answer.SUCCESS, "FOUND", found.next_queue_offset, found.min_queue_offset,
        found.max_queue_offset, found.records, found.count,
    )  # fmt: skip


def _keep_matching(found: PullResult, sql: SqlFilter, most: int) -> None:
    """Keep the first `most` of the records that match; with none, the status is NO_MATCH."""
    view, kept, at = found.records, [], 0
    for size in found.sizes:
        stop = at + int(size)
        parts = find_parts(view, at, stop)
        own = b"" if parts is None else view[parts[-1] : stop]
        if parts is not None and sql.matches(dict(decode_properties(own))):
            kept.append(view[at:stop])
            if len(kept) == most:
                (begin,) = _QUEUE_OFFSET.unpack_from(view, at)
                found.next_queue_offset = begin + offsets_taken(parts[3], own)
                break
        at = stop
    found.records, found.count = b"".join(kept), len(kept)
    if not kept:
        found.status = PullStatus.NO_MATCH


class Reads:
    """Answers requests that read; see the module's text."""

    def __init__(self, door: Door, topics: TopicView, hooks: Hooks) -> None:
        """Prepare; the door must be told the `handlers`."""
        self._door = door
        self._topics = topics
        self._parts = door.parts
        self._backend = door.parts.backend
        self._hooks = hooks
        self._waiting: dict[Connection, dict[RemotingPull, None]] = {}  # without an answer
        self._memory = PullMemory()  # of those in `_waiting`
        self._delayed = 0  # answers that wait for DAMAGED_MS
        self._readers: Sequence[int] = ()  # the nodes that are suggested
        self._look_ms = float("-inf")  # no look for them before this time
        self._linked_ms = float("-inf")  # when there were some
        self.sent_records = 0  # to pulls
        door.on_ended(self._forget)
        door.on_stop(self.answer_waiting)

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each code."""
        return {
            Code.PULL_MESSAGE: self.pull,
            Code.LITE_PULL_MESSAGE: self.pull,
            Code.SEARCH_OFFSET_BY_TIMESTAMP: self.search_offset,
            Code.GET_MAX_OFFSET: self.max_offset,
            Code.GET_MIN_OFFSET: self.min_offset,
            Code.GET_EARLIEST_MSG_STORETIME: self.earliest_time,
            Code.VIEW_MESSAGE_BY_ID: self.view_message,
            Code.QUERY_MESSAGE: self.query_message,
        }

    # -- pulls

    def pull(self, request: RemotingRequest) -> None:
        """Take a pull; it is answered in its turn, or once its wait is over."""
        connection, fields = _own(request), request.frame.fields
        self._check_serves()
        try:
            group, topic = fields["consumerGroup"], fields["topic"]
            queue_id, offset = int(fields["queueId"]), int(fields["queueOffset"])
            flags, most = int(fields["sysFlag"]), int(fields["maxMsgNums"])
            wait_ms = int(fields["suspendTimeoutMillis"]) if flags & WAITS else 0
            most_bytes = int(fields.get("maxMsgBytes", MAX_BYTES))
        except (KeyError, ValueError):
            _check_fields(fields)
            raise
        if not (group and topic and -_LONG_MAX <= offset <= _LONG_MAX and 0 <= flags <= _INT_MAX):
            _check_fields(fields)
        refusal = self._hooks.refusal(group)
        if refusal is not None:
            raise RemotingRefusal(Answer.NO_PERMISSION, refusal)
        shape = self._shape(topic)
        if not shape.perm & READ:
            remark = f"the topic[{topic}] pulling message is forbidden"
            raise RemotingRefusal(Answer.NO_PERMISSION, remark)
        if not 0 <= queue_id < shape.read:
            raise RemotingRefusal(
                Answer.INVALID_PARAMETER,
                f"queueId[{queue_id}] is illegal, topic:[{topic}]"
                f" topicConfig.readQueueNums:[{shape.read}]",
            )
        wanted = self._wanted(group, topic, flags, fields)
        pull = RemotingPull(
            self._backend, request, group, topic, queue_id, offset,
            min(max(wait_ms, 0), MAX_WAIT_MS), min(max(most, 1), MAX_MESSAGES),
            min(max(most_bytes, 1), MAX_BYTES), wanted, shape.sys_flag, self._answer_pull,
        )  # fmt: skip
        if flags & COMMITS:
            place = number(fields, "commitOffset", -1, _LONG_MAX)
            if place >= 0:
                self._hooks.commit(group, topic, queue_id, place)
        try:
            self._memory.take(topic, pull.filter)
        except NoRoomError as failure:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, str(failure)) from failure
        frame = request.frame  # it may wait for long, and needs nothing of these any more
        frame.fields, frame.body, frame.remark, frame.language = {}, b"", None, ""
        self._waiting.setdefault(connection, {})[pull] = None
        self._parts.pulls.offer(connection, pull)

    def _shape(self, topic: str) -> Shape:
        """Return a topic, or what it will be if clients have a route of it already."""
        topics = self._topics
        shape = topics.find(topic)
        if shape is None and (topic.startswith((RETRY, DLQ)) or topics.is_promised(topic)):
            check_name(topic)  # else it would wait for what nobody can create
            shape = topics.to_be(topic)
        if shape is None:
            remark = f"topic[{topic}] not exist, apply first please!"
            raise RemotingRefusal(Answer.TOPIC_NOT_EXIST, remark)
        return shape

    def _wanted(self, group: str, topic: str, flags: int, fields: Mapping[str, str]) -> Wanted:
        """Return which records are wanted."""
        kind = fields.get("expressionType")
        if flags & HAS_CLASS:
            remark = "hastore runs no filter classes: subscribe to tags"
            raise RemotingRefusal(Answer.SUBSCRIPTION_PARSE_FAILED, remark)
        expression: str | None = fields.get("subscription", "") if flags & SUBSCRIBES else None
        if expression is None:
            known = self._hooks.subscription(group, topic)
            version = 0
            if "subVersion" in fields:
                version = number(fields, "subVersion", -_LONG_MAX, _LONG_MAX)
            if known is not None and known.version >= version:
                expression, kind = known.expression, known.expression_type
        if kind not in (*_TAG, SQL92):
            remark = f"The broker does not support consumer to filter message by {kind:.40}"
            raise RemotingRefusal(Answer.SYSTEM_ERROR, remark)
        if expression is not None and len(expression) > MAX_EXPRESSION:
            remark = f"a subscription of {len(expression)} characters; at most {MAX_EXPRESSION}"
            raise RemotingRefusal(Answer.SUBSCRIPTION_PARSE_FAILED, remark)
        try:
            if kind == SQL92:
                if expression is None:  # the client asks again, after its next heartbeat
                    remark = "the consumer's subscription is not known yet, or is an older one"
                    raise RemotingRefusal(Answer.SUBSCRIPTION_NOT_EXIST, remark)
                return Wanted(sql=compile_sql(expression))
            return Wanted(None if expression is None else tag_codes(expression))
        except (SqlError, UsageError) as failure:
            raise RemotingRefusal(Answer.SUBSCRIPTION_PARSE_FAILED, str(failure)) from failure

    def _answer_pull(self, pull: RemotingPull, reply: Answered | Failed) -> None:
        connection = _own(pull.request)
        waiting = self._waiting.get(connection)
        if waiting is None or pull not in waiting:
            return  # it was answered when the node stopped
        if isinstance(reply, Failed) and reply.status in _UNREADABLE:
            if self._sends_elsewhere(pull, reply):
                return
        del waiting[pull]
        self._memory.free(pull.topic, pull.filter)
        if not waiting:
            del self._waiting[connection]
        if isinstance(reply, Failed):
            if reply.reason == UNREAD:  # the client asks again in 20 ms, otherwise in 3 s
                pull.request.answer(Answer.FLOW_CONTROL, remark=UNREAD)
            else:
                _refuse(pull.request, reply)
            return
        if reply.messages:
            refusal = self._hooks.refusal(pull.group)  # since it has begun to wait
            if refusal is not None:
                pull.request.answer(Answer.NO_PERMISSION, remark=refusal)
                return
            self.sent_records += reply.messages
            self._parts.pulls.counts.sent.add(pull.topic, reply.messages, len(reply.records))
        suggested = reply.suggested
        if suggested is None:
            suggested = self._suggested(pull.queue_id)
        fields = {
            "suggestWhichBrokerId": str(suggested),
            "nextBeginOffset": str(reply.next_offset),
            "minOffset": str(reply.low),
            "maxOffset": str(reply.high),
            "topicSysFlag": str(pull.sys_flag),
            "groupSysFlag": "0",
        }
        pull.request.answer(reply.code, fields, reply.records, reply.status)

    def _sends_elsewhere(self, pull: RemotingPull, failed: Failed) -> bool:
        """Answer soon that another node is to be asked; False if no other one serves reads."""
        group = self._backend.master_map()
        if group.node != group.master_node:
            others = [] if group.master_node is None else [MASTER_ID]
        else:
            known = self._backend.reading_nodes()
            others = [node for node in known if node not in (MASTER_ID, group.node)]
        if not others or self._delayed >= DELAYED_MAX:
            return False
        answer = Answered(
            Answer.PULL_RETRY_IMMEDIATELY, failed.reason, pull.position.queue_offset, 0, 0,
            suggested=others[pull.queue_id % len(others)],
        )  # fmt: skip

        def go_on() -> None:
            self._delayed -= 1
            self._answer_pull(pull, answer)

        self._delayed += 1
        self._door.at(self._parts.clock.monotonic_ms() + DAMAGED_MS, go_on)
        return True

    def _suggested(self, queue_id: int) -> int:
        """Return the broker id that the client is to ask next.

        A consumer that reads from a slave goes on when the master ends. One that reads from the
        master would wait for its next route, for up to 30 s. So a slave without a master still
        suggests itself for a time; then its link alone may be broken.
        """
        now = self._parts.clock.monotonic_ms()
        if now >= self._look_ms and self._hooks.read_slaves:
            self._look_ms = now + LOOK_MS
            found = [node for node in self._backend.reading_nodes() if node != MASTER_ID]
            group = self._backend.master_map()
            if found:
                self._linked_ms = now
            if found or group.master_node == group.node or now > self._linked_ms + UNLINKED_MS:
                self._readers = found
        readers = self._readers
        return readers[queue_id % len(readers)] if readers else MASTER_ID

    def answer_waiting(self) -> None:
        """Answer all pulls that wait, so that their clients turn to another node."""
        own = self._backend.master_map().node
        self._suggested(0)
        self._readers = [node for node in self._readers if node != own]
        self._look_ms = float("inf")
        for waiting in list(self._waiting.values()):
            for pull in list(waiting):
                offset = pull.position.queue_offset
                code = Answer.PULL_RETRY_IMMEDIATELY
                self._answer_pull(pull, Answered(code, "NO_MATCHED_MESSAGE", offset, 0, 0))

    def _forget(self, connection: Connection) -> None:
        for pull in self._waiting.pop(connection, ()):
            self._memory.free(pull.topic, pull.filter)

    # -- offsets

    def search_offset(self, request: RemotingRequest) -> None:
        """Find the first message at or after a time, or the last one at or before it."""
        topic, queue_id = self._queue(request)
        at_ms = number(request.frame.fields, "timestamp", -_LONG_MAX, _LONG_MAX)
        upper = request.frame.fields.get("boundaryType", "").lower() == "upper"
        # The last one at or before a time is before the first one after it.
        question = FindTime(0, topic, queue_id, min(max(at_ms + upper, 0), _LONG_MAX))

        def steps(is_late: Callable[[], bool]) -> Iterator[tuple[Any, None] | None]:
            found = self._parts.queries.by_time(question, is_late)
            if isinstance(found, Failed):
                yield 0, None  # there is no such queue
            elif isinstance(found, TimeFound) and not found.cut_short:
                store = self._backend.store
                readable = store.reader.readable_range(topic, queue_id, store.readable_offset)
                low, high = readable or (0, 0)
                offset = min(found.queue_offset, high)
                yield max(low, offset - 1) if upper and offset else offset, None
            else:
                yield Failed(0, "BUSY", "the search took too long; ask again later"), None

        self._query(request, steps, lambda offset, _: _answer_offset(request, offset))

    def max_offset(self, request: RemotingRequest) -> None:
        """Answer with the next offset of a queue's readable part; 0 if there is no such queue."""
        topic, queue_id = self._queue(request)
        store = self._backend.store

        def read() -> int:
            found = store.reader.readable_range(topic, queue_id, store.readable_offset)
            return 0 if found is None else found[1]

        self._read(request, read, lambda offset: _answer_offset(request, offset))

    def min_offset(self, request: RemotingRequest) -> None:
        """Answer with the first offset of a queue; 0 if there is no such queue."""
        found = self._backend.store.queues.queue_range(*self._queue(request))
        _answer_offset(request, 0 if found is None else found[0])

    def earliest_time(self, request: RemotingRequest) -> None:
        """Answer when the first message of a queue was stored; -1 if there is none."""
        topic, queue_id = self._queue(request)
        store = self._backend.store

        def read() -> int:
            low, _ = store.queues.queue_range(topic, queue_id) or (0, 0)
            found = store.reader.pull(
                topic, queue_id, low, max_messages=1, max_bytes=1,
                limit_offset=store.readable_offset,
            )  # fmt: skip
            return decode_record(found.records).store_timestamp_ms if found.count else -1

        def then(stored_ms: int) -> None:
            request.answer(Answer.SUCCESS, {"timestamp": str(stored_ms)})

        self._read(request, read, then)

    def _queue(self, request: RemotingRequest) -> tuple[str, int]:
        self._check_serves()
        fields = request.frame.fields
        return needed(fields, "topic"), number(fields, "queueId", 0, _INT_MAX)

    # -- messages

    def view_message(self, request: RemotingRequest) -> None:
        """Answer with the message at an offset of the log."""
        self._check_serves()
        offset = number(request.frame.fields, "offset", -_LONG_MAX, _LONG_MAX)
        question = FindOffset(0, max(offset, 0))

        def steps(_: Callable[[], bool]) -> Iterator[tuple[Any, bytes | None] | None]:
            yield self._parts.queries.by_offset(question)

        def respond(_: Found, records: bytes | None) -> None:
            if records and offset >= 0:
                request.answer(Answer.SUCCESS, body=records)
            else:
                remark = f"can not find message by the offset, {offset}"
                request.answer(Answer.SYSTEM_ERROR, remark=remark)

        self._query(request, steps, respond)

    def query_message(self, request: RemotingRequest) -> None:
        """Answer with the latest messages that have a key, or a unique key.

        Clients ask each broker of the route and add up the answers, so of a group with twins only
        the master finds something.
        """
        self._check_serves()
        group = self._backend.master_map()
        if self._hooks.twins and group.master_node not in (None, group.node):
            remark = "the master of this group answers queries by key"
            raise RemotingRefusal(Answer.QUERY_NOT_FOUND, remark)
        fields = request.frame.fields
        most = number(fields, "maxNum", -_INT_MAX, _INT_MAX)
        if fields.get("_UNIQUE_KEY_QUERY") == "true":
            most = UNIQUE_FOUND
        begin = number(fields, "beginTimestamp", -_LONG_MAX, _LONG_MAX)
        end = number(fields, "endTimestamp", -_LONG_MAX, _LONG_MAX)
        question = FindKey(
            0, needed(fields, "topic"), needed(fields, "key"), min(max(most, 1), MAX_FOUND),
            max(begin, 0), max(end, 0),
        )  # fmt: skip

        def steps(is_late: Callable[[], bool]) -> Iterator[tuple[Any, bytes | None] | None]:
            for found in self._parts.queries.by_key(question, is_late):
                if found is None or isinstance(found[0], Failed):
                    yield found
                elif found[0].unreadable and not found[0].count:
                    reason = f"a message is damaged here, at offset {found[0].unreadable[0]}"
                    yield Failed(0, CorruptRecordError.__name__, reason), None
                else:
                    keyed = self._backend.store.reader.last_keyed
                    yield (found[0].count, keyed), _ascending(found[1] or b"")

        def respond(found: tuple[int, tuple[int, int]], records: bytes | None) -> None:
            count, (stored_ms, offset) = found
            known = {
                "indexLastUpdateTimestamp": str(stored_ms), "indexLastUpdatePhyoffset": str(offset)
            }  # fmt: skip
            if count:
                request.answer(Answer.SUCCESS, known, records or b"")
            else:
                remark = "can not find message, maybe time range not correct"
                request.answer(Answer.QUERY_NOT_FOUND, known, remark=remark)

        self._query(request, steps, respond)

    # -- all of them

    def _check_serves(self) -> None:
        outdated = self._backend.outdated()
        if outdated is not None:
            raise RemotingRefusal(Answer.SERVICE_NOT_AVAILABLE, outdated)

    def _query(
        self, request: RemotingRequest, steps: Steps, respond: Callable[[Any, bytes | None], None]
    ) -> None:
        """Let the thread of queries answer."""
        connection = _own(request)
        if not self._parts.replies.has_room(connection):
            raise RemotingRefusal(Answer.SYSTEM_BUSY, UNREAD)

        def then(found: Any, records: bytes | None) -> None:
            if isinstance(found, Failed):
                _refuse(request, found)
            else:
                respond(found, records)

        busy = self._parts.queries.accept_query(connection, OwnQuery(steps, then))
        if busy is not None:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, busy)

    def _read(
        self, request: RemotingRequest, read: Callable[[], _Read], then: Callable[[_Read], None]
    ) -> None:
        """Answer with what is read now, or by another thread if it is on the disk only."""
        with suppress(NotCachedError):
            with self._backend.store.reader.without_waiting():
                found = read()
            then(found)
            return
        read_aside(self._door, request, read, then)


def _own(request: RemotingRequest) -> Connection:
    """Return the client's connection. Reads are not forwarded: every node answers them itself."""
    if request.connection is None:
        raise RemotingRefusal(Answer.SYSTEM_ERROR, "a node answers reads of its own clients only")
    return request.connection


def _check_fields(fields: Mapping[str, str]) -> None:
    """Raise RemotingRefusal, which names the field, for a pull whose fields are wrong."""
    needed(fields, "consumerGroup")
    needed(fields, "topic")
    for name in ("queueId", "maxMsgNums"):
        number(fields, name, -_INT_MAX, _INT_MAX)
    number(fields, "queueOffset", -_LONG_MAX, _LONG_MAX)
    if number(fields, "sysFlag", 0, _INT_MAX) & WAITS:
        number(fields, "suspendTimeoutMillis", -_LONG_MAX, _LONG_MAX)
    if "maxMsgBytes" in fields:
        number(fields, "maxMsgBytes", -_INT_MAX, _INT_MAX)


def _refuse(request: RemotingRequest, failed: Failed) -> None:
    request.answer(_CODES.get(failed.status, Answer.SYSTEM_ERROR), remark=failed.reason)


def _answer_offset(request: RemotingRequest, offset: int) -> None:
    request.answer(Answer.SUCCESS, {"offset": str(offset)})


def _ascending(records: bytes) -> bytes:
    """Return records, the latest first, in the order of the log, as RocketMQ does."""
    found, at = list[bytes](), 0
    while at < len(records):
        parts = find_parts(records, at, len(records))
        assert parts is not None  # they are valid
        found.append(records[at : at + parts[0]])
        at += parts[0]
    return b"".join(reversed(found))
