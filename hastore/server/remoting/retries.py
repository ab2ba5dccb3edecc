"""Messages that a consumer could not handle, and the groups' settings for them.

    36                  CONSUMER_SEND_MSG_BACK: read the message at its offset, put it again
    SendBack            the same for hastore's own consumers

The message goes to %RETRY%<group> after a delay that grows with each attempt (record/delays.py), or
to %DLQ%<group> once there were too many. A message that was cut by a failover cannot be sent back:
the client then sends its own copy.

The message is read from memory, or else by another thread (server/api/cold_reads.py). Everything
else runs in the API's thread.
"""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple, Protocol

from hastore.config.model import RemotingConfig
from hastore.errors import CorruptRecordError, MessageIllegalError, NotCachedError
from hastore.ha.rules.epochs import Standing
from hastore.protocol.api import Put, PutDone, SendBack, Status
from hastore.protocol.remoting import Answer, Code
from hastore.record.codec import Record, decode_record
from hastore.record.delays import DELAYS_MS, SCHEDULE_TOPIC, retry_of, sent_back
from hastore.record.properties import MAX_GROUP_TOPIC, check_topic, decode_properties
from hastore.server.api.cold_reads import TOO_MANY
from hastore.server.api.connections import Connection
from hastore.server.remoting.door import (
    Door,
    Handler,
    OwnRequest,
    RemotingRefusal,
    RemotingRequest,
    without_place,
)
from hastore.server.remoting.routes import OWN, RETRY, TopicView
from hastore.server.remoting.sends import ANSWER_MS
from hastore.server.remoting.subscriptions import GroupSettings
from hastore.store.append.results import own_records

_REFUSED = {
    Status.SLAVE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,
    Status.MESSAGE_ILLEGAL: Answer.MESSAGE_ILLEGAL,
    Status.PROPERTIES_SIZE_EXCEEDED: Answer.MESSAGE_ILLEGAL,
    Status.BUSY: Answer.SYSTEM_BUSY,
    Status.UNAUTHENTICATED: Answer.NO_PERMISSION,
    Status.FORBIDDEN: Answer.NO_PERMISSION,
}
# Topics of messages that wait, for their time or for the end of their transaction.
_WAITING = frozenset(
    f"{SCHEDULE_TOPIC} RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRANS_OP_HALF_TOPIC"
    " rmq_sys_wheel_timer".split()
)
_LATE = "WAIT_QUORUM_ACK_TIMEOUT"
_MAX_NAME = MAX_GROUP_TOPIC - len(RETRY)
_SHOWN = 40  # characters of a name in a text
_INT_MAX, _LONG_MAX = 2**31 - 1, 2**63 - 1


class Groups(Protocol):
    """Knows the settings of groups: Subscriptions."""

    def find(self, group: str) -> GroupSettings:
        """Return a group's settings, or the default ones."""
        ...


class Wish(NamedTuple):
    """What a consumer wants of a message that it sends back."""

    group: str
    offset: int
    level: int
    times_max: int
    message_id: str | None  # as the consumer knows the message
    topic: str | None  # the same


class OwnBack(OwnRequest):
    """A SendBack of a consumer of hastore's, with what `Retries` asks of a request."""

    asked: SendBack

    @property
    def put(self) -> Put:
        """How its message is confirmed: as a commit of the group."""
        return Put(self.asked.rid, None, timeout_ms=self.asked.timeout_ms)

    def done(self, done: PutDone) -> None:
        """Answer with the outcome; where the message waits concerns nobody."""
        super().done(without_place(done))


Request = RemotingRequest | OwnBack


class Retries:
    """The handler of messages that are sent back; the API's lock is held in every call."""

    def __init__(
        self,
        door: Door,
        topics: TopicView,
        groups: Groups,
        levels: int = len(DELAYS_MS),
        hold_ms: int = RemotingConfig().hold_timeout_ms,
    ) -> None:
        """Prepare; `levels` is the number of delay levels."""
        self._levels = levels
        self._door = door
        self._parts = door.parts
        self._topics = topics
        self._groups = groups
        self._wait = Put(0, None, timeout_ms=hold_ms + ANSWER_MS)  # as a producer's

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {Code.CONSUMER_SEND_MSG_BACK: self.send_back}

    def send_back(self, request: RemotingRequest) -> None:
        """Take a message back."""
        fields = request.frame.fields
        group = fields.get("group", "")
        if not 0 < len(group) <= _MAX_NAME:
            raise _illegal("the field group is missing, or too long")
        settings = self._groups.find(group)
        if settings.retry_queue_nums <= 0:  # as RocketMQ: such a group does not try again
            request.answer(Answer.SUCCESS)
            return
        times = _number(fields, "maxReconsumeTimes", str(settings.retry_max_times), least=-1)
        wish = Wish(
            group,
            _number(fields, "offset", None, most=_LONG_MAX),
            _number(fields, "delayLevel", "0", least=-_INT_MAX),
            settings.retry_max_times if times < 0 else times,
            fields.get("originMsgId"),
            fields.get("originTopic"),
        )
        self._read(request, wish)

    def take_own(self, connection: Connection, asked: SendBack, came_ms: float) -> None:
        """Take a message back from a consumer of hastore's."""
        request = OwnBack(self._parts, connection, asked, came_ms)
        refused = self._parts.backend.writable_reason()
        if refused is not None:
            request.answer(Answer.SERVICE_NOT_AVAILABLE, remark=refused)
            return
        settings = self._groups.find(asked.group)
        times = settings.retry_max_times if asked.attempts is None else asked.attempts
        wish = Wish(asked.group, asked.offset, asked.level, times, None, asked.topic)
        try:
            _check_group(asked.group)
            if settings.retry_queue_nums <= 0:
                raise _illegal(
                    f"the settings of group {asked.group!r} say that it has no retries "
                    "(retryQueueNums is 0)"
                )
            self._read(request, wish)
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)

    def _read(self, request: Request, wish: Wish) -> None:
        """Read the message, and put it again."""
        reader = self._parts.backend.store.reader
        try:
            with reader.without_waiting():
                raw = reader.record_bytes(wish.offset)
        except NotCachedError:
            whom = request.connection if request.connection is not None else self
            read = partial(reader.record_bytes, wish.offset)
            # `then` is called after the puts of its iteration were appended: this one comes next.
            then = partial(self._after_read, request, wish)
            if not self._parts.cold.accept(whom, read, then):
                raise RemotingRefusal(Answer.SYSTEM_BUSY, TOO_MANY) from None
            return
        self._put(request, wish, raw)

    def _after_read(
        self, request: Request, wish: Wish, result: bytes | Exception | None
    ) -> None:
        self._door.later(partial(self._go_on, request, wish, result))

    def _go_on(
        self, request: Request, wish: Wish, result: bytes | Exception | None
    ) -> None:
        """Go on with what another thread has read."""
        try:
            if isinstance(result, Exception):
                _, reason = self._parts.failures.note("a message that is sent back", result)
                raise RemotingRefusal(_unreadable(request), reason)
            self._put(request, wish, result)
        except RemotingRefusal as refusal:
            request.answer(refusal.code, remark=refusal.remark)

    def _put(self, request: Request, wish: Wish, raw: bytes | None) -> None:
        settings = self._groups.find(wish.group)
        try:
            record = None if raw is None else decode_record(raw)
            if isinstance(request, OwnBack):
                record = self._own(request, record)
            elif record is None or not _is_same(record, wish):
                text = f"look message by offset failed, {wish.offset}"
                raise RemotingRefusal(Answer.SYSTEM_ERROR, text)
            else:
                self._guard(request, record)
            retry = retry_of(
                record, wish.group,
                level=wish.level, times_max=wish.times_max,
                retry_queue=random.randrange(settings.retry_queue_nums),
            )  # fmt: skip
            queues = self._topics.queues_to_write(retry.topic, settings.retry_queue_nums)
            retry = retry._replace(queue_id=retry.queue_id % queues)
            payload = sent_back(record, retry, self._levels)
        except (MessageIllegalError, CorruptRecordError) as failure:
            raise _illegal(str(failure)) from failure
        respond = partial(self._answer, request)
        since_ms = request.came_ms
        put = request.put if isinstance(request, OwnBack) else self._wait
        self._parts.puts.admit_own_record(put, payload, respond, own_records, since_ms)

    def _guard(self, request: RemotingRequest, record: Record) -> None:
        """Raise RemotingRefusal if a message must not be copied to where the group reads."""
        gate = self._door.gate
        if gate is not None and not gate.may_read(request, record.topic):
            text = f"the message at offset {record.physical_offset} is of a topic that is not yours"
            raise gate.forbidden(request, text)

    def _own(self, request: OwnBack, record: Record | None) -> Record:
        """Return the message that a consumer of hastore's means, of a topic that it may read.

        Raises RemotingRefusal if it is not in this log.
        """
        asked, backend = request.asked, self._parts.backend
        reader = backend.store.reader
        if record is None and reader.is_damaged(asked.offset):
            reader.note_damage(asked.offset)
            text = f"the message at offset {asked.offset} is damaged at this node"
            raise RemotingRefusal(Answer.SERVICE_NOT_AVAILABLE, text)
        if record is not None and not (asked.topic.startswith(OWN) or asked.topic in _WAITING):
            standing = Standing.AGREED
            if asked.epoch is not None:
                history = backend.history()
                standing, _ = backend.standing(history, asked.epoch, asked.offset)
            place = record.topic, record.queue_id, record.queue_offset
            meant = asked.topic, asked.queue_id, asked.queue_offset
            if standing is Standing.AGREED and place == meant:
                return record
        raise _illegal(
            f"message {asked.queue_offset} in queue {asked.queue_id} of {asked.topic} is not at "
            f"offset {asked.offset} of the log: retention has removed it, or a failover cut it; "
            "send a copy of it"
        )

    def _answer(self, request: Request, done: PutDone) -> None:
        """Answer with the outcome; after any code but 0 RocketMQ's client sends its own copy."""
        if isinstance(request, OwnBack):
            request.done(done)
            return
        status = done.status
        if status is Status.PUT_OK and done.statuses is None and done.offsets:
            request.answer(Answer.SUCCESS)
        elif status is Status.SERVICE_NOT_AVAILABLE:
            request.answer(Answer.SERVICE_NOT_AVAILABLE, remark=done.reason or status.value)
        elif status in _REFUSED:
            remark = done.reason or f"{status}: nothing was stored"
            request.answer(_REFUSED[status], remark=remark)
        elif status.is_stored:
            request.answer(Answer.SYSTEM_ERROR, remark=f"{status}: stored, but not confirmed")
        else:
            reason = done.reason or "whether the message is stored is unknown"
            request.leave_open(reason, is_late=reason.startswith(_LATE))


def _is_same(record: Record, wish: Wish) -> bool:
    """Whether a record may be the message that a consumer means: a failover may have cut that.

    No consumer gets a record of the group itself, or one that waits for its delay or transaction.
    """
    topic, message_id = record.topic, wish.message_id
    if topic.startswith(OWN) or topic in _WAITING:
        return False
    properties = dict(decode_properties(record.properties))
    # A client shows its application the topic of a retry's first attempt, and no namespace.
    known = (topic, properties.get("RETRY_TOPIC", topic))
    if wish.topic and not any(f"%{each}".endswith(f"%{wish.topic}") for each in known):
        return False
    unique = properties.get("UNIQ_KEY")
    if not message_id or unique is None:
        return True
    return message_id in (unique, record.message_id, properties.get("ORIGIN_MESSAGE_ID"))


def _number(
    fields: dict[str, str], name: str, default: str | None, *, least: int = 0, most: int = _INT_MAX
) -> int:
    text = fields.get(name, default)
    try:
        number = int(text or "")
    except ValueError as failure:
        raise _illegal(f"the field {name} is missing, or no whole number") from failure
    if not least <= number <= most:
        raise _illegal(f"{name}={number} is not from {least} to {most}")
    return number


def _check_group(group: str) -> None:
    """Refuse a group of hastore's whose name topics of retries and of dead letters cannot have."""
    try:
        check_topic(RETRY + group)
    except MessageIllegalError as failure:
        shown = group if len(group) <= _SHOWN else group[:_SHOWN] + "..."
        raise _illegal(
            f"the group {shown!r} has no retries and no dead letters: for these its name has 1 to "
            f"{_MAX_NAME} characters of A-Za-z0-9_%|-; send a copy of the message, or read on in a "
            "group of another name"
        ) from failure


def _unreadable(request: Request) -> Answer:
    """Return the code for a message that the disk does not give now."""
    is_own = isinstance(request, OwnBack)  # which asks again
    return Answer.SERVICE_NOT_AVAILABLE if is_own else Answer.SYSTEM_ERROR


def _illegal(remark: str) -> RemotingRefusal:
    return RemotingRefusal(Answer.MESSAGE_ILLEGAL, remark)
