"""Sends of RocketMQ's producers: 10, 310 and 320, stored as RocketMQ's broker would store them.

    frame --> the record as RocketMQ's broker writes it --> PutHandler --> the answer

Of a record only queue offset, physical offset, store time and store host are the master's. As
RocketMQ 5.3.3, the node adds the properties MSG_REGION, TRACE_ON and CLUSTER, and UNIQ_KEY if the
client gave none, and writes all of them in the order of Java's HashMap. It leaves out those that a
message has which the client has received, and sends again, as a dead letter say: the number of a
hastore producer's message (its copy would count as a repeat of it), and the mark of a delivery.

What a put's outcome is answered with:

    stored                               0; 10 or 12 if a disk or the slaves did not confirm in time
    not stored                           2, 13, 14 or 16, never 10 to 12
    stored in part, or unknown           no answer: the connection is ended, unless the time that
                                         a client waits is over

A producer that does not ask for confirmations (WAIT=false) waits for the master alone. A one-way
send is put as one with WAIT=false.

How long a client waits, no request says. It is taken to be a little more than
`remoting.hold_timeout`, from the moment on at which a node got the request: for a master and for
confirmations together.
"""

from __future__ import annotations

import random
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from hastore.config.model import RemotingConfig
from hastore.errors import MessageIllegalError, ProtocolError
from hastore.protocol.api import Put, PutDone, Status
from hastore.protocol.remoting import BATCH_MAX, Answer, Code, decode_batch
from hastore.record.codec import Host
from hastore.record.delays import (
    DELAY_BYTES,
    DELAYS_MS,
    LIGHT_QUEUES,
    MARK_BYTES,
    OWN_PROPERTIES,
    SCHEDULE_TOPIC,
    TIMERS,
    level_of,
    schedule,
)
from hastore.record.layout import (
    CRC_MASK,
    FLAG_BORN_IPV6,
    FLAG_IPV6,
    FLAG_PREPARED,
    FLAG_ROLLBACK,
    HEADERS,
    MAX_PROPERTIES_BYTES,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    V2_MAGIC,
)
from hastore.record.properties import (
    FEW_KEYS,
    MAX_KEYS,
    PID_MARK,
    in_java_order,
    is_well_formed,
    keys_of,
    producer_of,
    without_properties,
    words_of_keys,
)
from hastore.record.topic_records import TopicConfig
from hastore.record.transactions import HALF_TOPIC, is_prepared, prepare
from hastore.server.remoting.door import Door, Handler, RemotingRefusal, RemotingRequest
from hastore.server.remoting.routes import DLQ, RETRY, WRITE, TopicView
from hastore.server.remoting.send_records import (
    REGION,
    RESERVED,
    Alike,
    SendLayouts,
    build_batch,
    build_message,
    fields_of,
    stored_answer,
)
from hastore.store.append.results import Payload, own_records

ANSWER_MS = 300  # for confirmations, of a request that was held for as long as it may
RETRIES_OF_ONE_MAX = 8  # sends of one message that wait for its first one
RETRIES_MAX = 100_000  # sends that the window of `remoting.drop_retries` remembers
RETRIES_MS = 60_000.0
RETRIES_BYTES = 16 * 1024 * 1024  # of their topics and keys: more than 100,000 usual ones have
_EXPIRED_AT_ONCE = 2_000  # about 1 ms
# Of a batch, and of a message. RocketMQ has no such bounds, and its clients stay far below them: it
# recommends batches of up to 1 MiB, and a message of a batch takes some 60 bytes without its body.
BATCH_BYTES_MAX = 16 * 1024 * 1024  # as stored: each message gets the batch's properties
PROPERTIES_MAX = 1_024
# RocketMQ's own topics, to which no client may send.
FORBIDDEN = frozenset(
    "SCHEDULE_TOPIC_XXXX RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRANS_OP_HALF_TOPIC"
    " TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT".split()
)
_STORED = {
    Status.PUT_OK: Answer.SUCCESS,
    Status.FLUSH_DISK_TIMEOUT: Answer.FLUSH_DISK_TIMEOUT,
    Status.FLUSH_SLAVE_TIMEOUT: Answer.FLUSH_SLAVE_TIMEOUT,
}
_REFUSED = {
    Status.SLAVE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,  # here it means: not stored
    Status.SERVICE_NOT_AVAILABLE: Answer.SERVICE_NOT_AVAILABLE,
    Status.MESSAGE_ILLEGAL: Answer.MESSAGE_ILLEGAL,
    Status.PROPERTIES_SIZE_EXCEEDED: Answer.MESSAGE_ILLEGAL,
    Status.BUSY: Answer.SYSTEM_BUSY,
    Status.UNAUTHENTICATED: Answer.NO_PERMISSION,
    Status.FORBIDDEN: Answer.NO_PERMISSION,
}
_LATE = "WAIT_QUORUM_ACK_TIMEOUT"  # how the reason of a put begins that waited for its whole time
_RECORD_BYTES = 256  # of a record, at most, beside its body and its properties
_LIGHT_BYTES = LIGHT_QUEUES.encode()
_OWN_NAMES = frozenset(name.encode() for name in OWN_PROPERTIES)
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1
_LONG_MIN, _LONG_MAX = -(2**63), 2**63 - 1


class SendNames(NamedTuple):
    """The names of the fields of a send: in full, or as single letters."""

    topic: str
    default_queues: str
    queue_id: str
    sys_flag: str
    born_ms: str
    flag: str
    properties: str
    reconsume_times: str
    max_reconsume_times: str
    batch: str


_LONG_NAMES = SendNames(
    *("topic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
    *("properties", "reconsumeTimes", "maxReconsumeTimes", "batch"),
)
_SHORT_NAMES = SendNames(*"bdefghijlm")


class Sent(NamedTuple):
    """What an answer needs to know of a send. `unique`: its UNIQ_KEY; a batch may have none."""

    request: RemotingRequest
    queue_id: int
    unique: str | None


class Sends:
    """The handlers of sends; the API's lock is held in every call."""

    def __init__(
        self,
        door: Door,
        topics: TopicView,
        cluster: str,
        *,
        drop_retries: bool = False,
        retries_of: Callable[[str], int] = lambda _group: 16,
        is_ordered: Callable[[str], bool] = lambda _group: False,
        levels: int = len(DELAYS_MS),
        hold_ms: int = RemotingConfig().hold_timeout_ms,
    ) -> None:
        """Prepare; `retries_of` returns how often a consumer group tries a message again.

        `is_ordered` returns whether a group consumes in order: what it sends to its retries, it has
        tried often enough. `levels` is the number of delay levels.
        """
        self._levels = levels
        self._is_ordered = is_ordered
        self._door = door
        self._parts = door.parts
        self._topics = topics
        self._cluster = cluster
        self._retries_of = retries_of
        self._window = RetryWindow(door) if drop_retries else None
        self._layouts = SendLayouts(cluster)
        wait_ms = hold_ms + ANSWER_MS
        self._by_role = Put(0, None, timeout_ms=wait_ms)
        self._by_master = Put(0, 1, timeout_ms=wait_ms)
        self._one_way = Put(0, 0, timeout_ms=wait_ms)

    def handlers(self) -> dict[int, Handler]:
        """Return the handler of each request's code."""
        return {
            Code.SEND_MESSAGE: self.send_long,
            Code.SEND_MESSAGE_V2: self.send,
            Code.SEND_BATCH_MESSAGE: self.send_batch,
        }

    def send_long(self, request: RemotingRequest) -> None:
        """Take a message whose fields have their full names."""
        self._send(request, _LONG_NAMES)

    def send(self, request: RemotingRequest) -> None:
        """Take a message."""
        self._send(request, _SHORT_NAMES)

    def _send(self, request: RemotingRequest, names: SendNames) -> None:
        if self._send_usual(request, names):
            return
        frame = request.frame
        fields = frame.fields
        if fields.get(names.batch) == "true":
            self._send_batch(request, names)
            return
        topic, queue_id, sys_flag, new = self._place_of(request, names)
        if not frame.body:
            raise _illegal("a message without a body")
        properties = _properties_of(fields.get(names.properties, ""))
        reconsume_times = _number(fields, names.reconsume_times, default="0")
        flag = _number(fields, names.flag, least=_INT_MIN)
        born_ms = _number(fields, names.born_ms, _LONG_MAX, least=_LONG_MIN)
        properties["MSG_REGION"] = REGION
        properties["TRACE_ON"] = "true"
        if topic.startswith(RETRY):
            most = fields.get(names.max_reconsume_times)
            group = topic[len(RETRY) :]
            limit = self._retries_of(group) if most is None else _number(fields, names[-2])
            # Java's 4.9.8 does not count the last attempt of a consumer that reads in order, but
            # takes it for the level of the delay. All others take one less. So a new master that
            # knows no locks yet sees it, too.
            gives_up = properties.get("DELAY") == str(3 + reconsume_times)
            if reconsume_times + gives_up > limit or self._is_ordered(group):
                topic, queue_id = DLQ + group, 0
                properties["DELAY"] = "-1"
        unique = properties.get("UNIQ_KEY")
        if unique is None:
            unique = properties["UNIQ_KEY"] = secrets.token_hex(16).upper()
        properties["CLUSTER"] = self._cluster
        _delay_of(properties)  # raises RemotingRefusal if it is no number
        own_topic = topic  # the message's; its record may wait in another one
        if not topic.startswith((RETRY, DLQ)):  # RocketMQ, too, passes over it there
            _refuse_light_queues(properties)
        if is_prepared(topic, properties, reconsume_times):
            topic, stored_queue, raw = self._prepared(topic, queue_id, properties)
            sys_flag &= ~FLAG_ROLLBACK  # both bits
        else:
            self._refuse_others(properties, sys_flag)
            topic, stored_queue, raw = _stored_as(topic, queue_id, properties, self._levels)
        guard = own_records if topic in (SCHEDULE_TOPIC, HALF_TOPIC) else None
        record = encode_message(
            topic, frame.body, raw, stored_queue, flag, sys_flag, born_ms,
            born_host(request.address), reconsume_times,
        )  # fmt: skip
        sent = Sent(request, queue_id, unique)
        put = self._put_of(request, properties.get("WAIT"))
        if new is not None:
            self._topics.make(new, put)  # appended before the message
        window = self._window
        if window is None or own_topic.startswith(RETRY) or "RETRY_TOPIC" in properties:
            respond = partial(self._answer, sent)
            self._parts.puts.admit_own_record(put, record, respond, guard, request.came_ms)
        else:
            now_ms = request.came_ms
            group = properties.get("PGROUP", "") if topic == HALF_TOPIC else ""
            epoch = self._parts.backend.epoch()
            about = RetryKey(own_topic, unique, put.acks, epoch, topic, group)
            key = window.begin(about, sent, now_ms)
            if key is not None:
                respond = partial(self._answer_all, window, key, sent, now_ms)
                self._parts.puts.admit_own_record(put, record, respond, guard, now_ms)

    def _send_usual(self, request: RemotingRequest, names: SendNames) -> bool:
        """Take a message that is like most; False leaves it to `_send`, and nothing was done.

        It does what `_send` does with fewer steps, and refuses nothing.
        """
        fields = request.frame.fields
        try:
            topic = fields[names.topic]
            queue_id, asked = int(fields[names.queue_id]), int(fields[names.default_queues])
            sys_flag, flag = int(fields[names.sys_flag]), int(fields[names.flag])
            born_ms, text = int(fields[names.born_ms]), fields[names.properties]
        except (KeyError, ValueError):
            return False
        shape = self._topics.find(topic)
        if (
            shape is None
            or not shape.perm & WRITE
            or not 0 <= queue_id < shape.write
            or not _INT_MIN <= asked <= _INT_MAX
            or not 0 <= sys_flag <= _INT_MAX
            or not _INT_MIN <= flag <= _INT_MAX
            or not _LONG_MIN <= born_ms <= _LONG_MAX
            or fields.get(names.reconsume_times) != "0"
            or fields.get(names.batch) == "true"
            or topic in FORBIDDEN
            or topic.startswith(RETRY)
            or self._window is not None
            or self._topics.waits(topic)
        ):
            return False
        properties = self._layouts.read(text)
        if properties is None:
            return False
        alike = Alike(topic, queue_id, sys_flag, born_ms, born_host(request.address), 0)
        record = build_message(alike, flag, request.frame.body, properties.raw)
        if record is None:
            return False
        put = self._put_of(request, properties.wait)
        respond = partial(self._answer, Sent(request, queue_id, properties.unique))
        self._parts.puts.admit_own_record(put, record, respond, since_ms=request.came_ms)
        return True

    def send_batch(self, request: RemotingRequest) -> None:
        """Take a batch of messages, which are stored one by one in a queue of one topic."""
        self._send_batch(request, _SHORT_NAMES)

    def _send_batch(self, request: RemotingRequest, names: SendNames) -> None:
        frame = request.frame
        fields = frame.fields
        topic, queue_id, sys_flag, new = self._place_of(request, names)
        if topic.startswith(RETRY):
            raise _illegal(f"topic {topic} takes no batch: retries are sent one by one")
        common = _properties_of(fields.get(names.properties, ""))
        words = common.get("KEYS", "").count(" ") + 1
        if words > FEW_KEYS:  # each message would get them
            if not _repeats_keys(common, frame.body):
                text = f"KEYS of a batch has {words:,} words; at most {FEW_KEYS} are allowed"
                raise _illegal(text)
            del common["KEYS"]
        common["MSG_REGION"] = REGION
        common["TRACE_ON"] = "true"
        common["CLUSTER"] = self._cluster
        self._refuse_others(common, sys_flag)
        _refuse_light_queues(common)
        if common.get("TRAN_MSG", "").lower() == "true":
            raise _illegal("a batch belongs to no transaction: send its messages one by one")
        if _delay_of(common):
            raise _illegal("a batch cannot be delayed: send its messages one by one")
        shared = encode(common)
        reconsume_times = _number(fields, names.reconsume_times, default="0")
        born_ms = _number(fields, names.born_ms, _LONG_MAX, least=_LONG_MIN)
        born = born_host(request.address)
        alike = Alike(topic, queue_id, sys_flag, born_ms, born, reconsume_times)
        room = (BATCH_BYTES_MAX - len(frame.body)) // (len(shared) + _RECORD_BYTES)
        built = build_batch(alike, shared, frame.body, min(BATCH_MAX, room))
        records: Payload
        if built is not None:
            self._check_sizes(built.longest_body, built.longest_record)
            records = built
        else:
            records = encode_batch_of(alike, shared, frame.body, self._check_sizes)
        put = self._put_of(request, common.get("WAIT"))
        if new is not None:
            self._topics.make(new, put)  # appended before the message
        respond = partial(self._answer, Sent(request, queue_id, common.get("UNIQ_KEY")))
        since_ms = request.came_ms
        self._parts.puts.admit_own_record(put, records, respond, since_ms=since_ms)

    def _check_sizes(self, body_size: int, size: int) -> None:
        """Refuse a batch with a record that the store would refuse: it would store the others."""
        text = self._parts.backend.store.why_too_large(body_size, size)
        if text is not None:
            raise _illegal(text)

    # -- what a send asks for

    def _place_of(
        self, request: RemotingRequest, names: SendNames
    ) -> tuple[str, int, int, TopicConfig | None]:
        """Return topic, queue and sysFlag of a send, and the topic if the send creates it."""
        fields = request.frame.fields
        topic = fields.get(names.topic, "")
        queue_id = _number(fields, names.queue_id, least=_INT_MIN)
        sys_flag = _number(fields, names.sys_flag)
        if topic in FORBIDDEN:
            raise RemotingRefusal(
                Answer.NO_PERMISSION, f"Sending message to topic[{topic}] is forbidden."
            )
        asked = _number(fields, names.default_queues, default="4", least=_INT_MIN)
        new: list[TopicConfig] = []
        queues = self._topics.queues_to_write(topic, asked, new.append)
        if queue_id < 0:
            queue_id = random.randrange(queues)
        elif queue_id >= queues:
            shape = self._topics.find(topic)
            if shape is None or queue_id >= shape.read:
                text = f"request queueId[{queue_id}] is illegal: topic {topic} has {queues} queues"
                raise RemotingRefusal(Answer.INVALID_PARAMETER, text)
            queue_id %= queues  # producers lose this queue, and not all of them know it yet
        return topic, queue_id, sys_flag, new[0] if new else None

    def _put_of(self, request: RemotingRequest, wait: str | None) -> Put:
        if request.frame.is_one_way:
            return self._one_way
        return self._by_role if not wait or wait.lower() == "true" else self._by_master

    def _prepared(
        self, topic: str, queue_id: int, properties: Mapping[str, str]
    ) -> tuple[str, int, bytes]:
        """Return topic, queue and properties of the record of a half message."""
        why = self._parts.backend.store.transactions.why_full(topic.encode("utf-8", "replace"))
        if why is not None:
            raise RemotingRefusal(Answer.SYSTEM_BUSY, why)
        try:
            waiting = prepare(topic, queue_id, properties)
        except (MessageIllegalError, UnicodeEncodeError) as failure:
            raise _illegal(str(failure)) from failure
        _check_properties(waiting.properties)
        return waiting

    def _refuse_others(self, properties: Mapping[str, str], sys_flag: int) -> None:
        """Refuse what this node does not do: other forms of transactions, timers."""
        if sys_flag & FLAG_PREPARED:
            raise _illegal(
                f"sysFlag {sys_flag} is that of a transaction: send the message by itself, with the"
                " properties TRAN_MSG=true and PGROUP, to its own topic"
            )
        is_timer = not TIMERS.isdisjoint(properties) and "TIMER_OUT_MS" not in properties
        if is_timer and not _delay_of(properties):
            raise _illegal("timer messages are not supported: give a delay level (DELAY)")

    # -- answers

    def _answer(self, sent: Sent, done: PutDone) -> None:
        request = sent.request
        status = done.status
        statuses = done.statuses
        if statuses is None and done.offsets and (code := _STORED.get(status)) is not None:
            self._stored(sent, code, done)
            return
        of_each = statuses if statuses is not None else [status]
        if statuses is not None and all(each.is_stored for each in of_each):
            self._stored(sent, max(_STORED[each] for each in of_each), done)
        elif any(each not in _REFUSED for each in of_each):
            reason = done.reason or "whether messages are stored is unknown"
            request.leave_open(reason, is_late=reason.startswith(_LATE))
        else:
            first = of_each[0]
            remark = done.reason or f"{first}: nothing was stored"
            request.answer(_REFUSED[first], remark=remark)

    def _stored(self, sent: Sent, code: int, done: PutDone) -> None:
        """Answer that messages are stored.

        Whether those stay that nobody confirmed, only the master of their epoch knows: if it was
        none in between, they may have been cut.
        """
        if code == Answer.SUCCESS or (
            self._door.is_master and done.epoch == self._parts.backend.epoch()
        ):
            request, queue_id, unique = sent
            data = stored_answer(request.frame, code, queue_id, unique, done)
            if data is not None:
                request.end(data)
            else:
                request.answer(code, fields_of(queue_id, unique, done))
        else:
            sent.request.leave_open("this node is not the master any more, and nobody confirmed it")

    def _answer_all(
        self, window: RetryWindow, key: RetryKey, sent: Sent, now_ms: float, done: PutDone
    ) -> None:
        """Answer a send, and its retries that came meanwhile."""
        for each in window.end(key, done, now_ms):
            if not each.request.is_answered:
                self._answer(each, done)


class RetryKey(NamedTuple):
    """What two sends must have in common for one to be the retry of the other.

    One that waits for more nodes is none: it would be told that they have it. In another epoch the
    first may have been cut off the log.
    """

    topic: str
    unique: str
    acks: int | None  # of the put
    epoch: int
    stored: str = ""  # the topic of its record: that of half messages, for one
    group: str = ""  # of a half message's producer, which alone ends it

    @property
    def size(self) -> int:
        """Return about how many bytes its names take."""
        names = self.topic, self.unique, self.group
        return sum(len(name) if name.isascii() else 4 * len(name) for name in names)


class RetryWindow:
    """What was sent lately: a client's own retry is not stored again.

    An entry goes after RETRIES_MS, or for later ones when there are too many, or their names take
    too much.
    """

    def __init__(self, door: Door) -> None:
        self._door = door
        self._stored: OrderedDict[RetryKey, tuple[float, int, PutDone]] = OrderedDict()
        self._bytes = 0  # of the names in them
        self._waits = False  # to be called when the first one expires
        self._under_way: dict[RetryKey, list[Sent]] = {}

    def __len__(self) -> int:
        """Return the number of sends that are remembered."""
        return len(self._stored)

    def begin(self, key: RetryKey, sent: Sent, now_ms: float) -> RetryKey | None:
        """Return the key of a new send; answer a retry, now or with the first, and return None."""
        waiting = self._under_way.get(key)
        if waiting is not None:
            if len(waiting) >= RETRIES_OF_ONE_MAX:
                text = f"{len(waiting)} sends of message {key.unique:.40} wait"
                raise RemotingRefusal(Answer.SYSTEM_BUSY, text)
            waiting.append(sent._replace(queue_id=waiting[0].queue_id))
            return None
        known = self._stored.get(key)
        if known is not None and now_ms < known[0] + RETRIES_MS:
            _, queue_id, done = known
            sent.request.answer(Answer.SUCCESS, fields_of(queue_id, key.unique, done))
            return None
        self._under_way[key] = [sent]
        return key

    def end(self, key: RetryKey, done: PutDone, now_ms: float) -> list[Sent]:
        """Note a put's outcome; return the sends that it answers."""
        waiting = self._under_way.pop(key, [])
        stored = done.status is Status.PUT_OK and done.statuses is None and done.offsets
        if waiting and stored and done.epoch == key.epoch:
            if self._stored.pop(key, None) is None:
                self._bytes += key.size
            self._stored[key] = now_ms, waiting[0].queue_id, done
            while len(self._stored) > RETRIES_MAX or self._bytes > RETRIES_BYTES:
                self._forget_first()
            self._wait(now_ms + RETRIES_MS)
        return waiting

    def _forget_first(self) -> None:
        self._bytes -= self._stored.popitem(last=False)[0].size

    def _wait(self, until_ms: float) -> None:
        if not self._waits:
            self._waits = True
            self._door.at(until_ms, self._expire)

    def _expire(self) -> None:
        """Forget the sends whose time is over, and wait for the next ones."""
        self._waits = False
        now_ms = self._door.parts.clock.monotonic_ms()
        for _ in range(_EXPIRED_AT_ONCE):
            if not self._stored:
                return
            stored_ms = next(iter(self._stored.values()))[0]
            if now_ms < stored_ms + RETRIES_MS:
                self._wait(max(stored_ms + RETRIES_MS, now_ms + 1_000))
                return
            self._forget_first()
        if self._stored:
            self._wait(now_ms + 1)


# -- records


def read_properties(text: str) -> dict[str, str]:
    """Return the properties of a send, as RocketMQ's broker reads them: empty values count not."""
    found = {}
    for piece in text.split("\x02"):
        at = piece.find("\x01")
        if 0 < at < len(piece) - 1:
            found[piece[:at]] = piece[at + 1 :]
    return found


def _properties_of(text: str) -> dict[str, str]:
    """Return the properties of a send, if they are not too many to look at each.

    Those that belong to the record of a received message are left out; see the module's text.
    """
    if len(text) > MAX_PROPERTIES_BYTES:
        raise _illegal(f"{len(text)} characters of properties; at most {MAX_PROPERTIES_BYTES}")
    count = text.count("\x02")
    if count > PROPERTIES_MAX:
        raise _illegal(f"{count:,} properties; at most {PROPERTIES_MAX:,} are allowed")
    found = read_properties(text)
    for name in (*OWN_PROPERTIES, RESERVED):
        found.pop(name, None)
    return found


def encode(properties: Mapping[str, str]) -> bytes:
    """Return properties as RocketMQ's broker stores them; raises RemotingRefusal."""
    try:
        raw = "".join(
            [f"{name}\x01{value}\x02" for name, value in in_java_order(properties)]
        ).encode()
    except UnicodeEncodeError as failure:
        raise _illegal("a property that is not Unicode") from failure
    _check_properties(raw)
    return raw


def _check_properties(raw: bytes) -> None:
    """Refuse properties that the store would refuse; raises RemotingRefusal."""
    if len(raw) > MAX_PROPERTIES_BYTES:
        raise _illegal(f"{len(raw)} bytes of properties; at most {MAX_PROPERTIES_BYTES}")
    if not is_well_formed(raw):
        raise _illegal("the properties are no `name 0x01 value 0x02` pairs")
    words = words_of_keys(raw)
    if words:
        raise _illegal(f"KEYS has {words:,} words; at most {MAX_KEYS:,} are allowed")
    try:
        producer_of(raw)
    except ValueError as failure:
        raise _illegal(str(failure)) from failure


def encode_message(
    topic: str,
    body: bytes,
    properties: bytes,
    queue_id: int,
    flag: int,
    sys_flag: int,
    born_ms: int,
    born: Host,
    reconsume_times: int,
) -> bytes:
    """Return a record as the store takes it; the fields that the master fills in are 0."""
    name = topic.encode()
    sys_flag &= ~FLAG_IPV6
    if len(born.address) == 16:
        sys_flag |= FLAG_BORN_IPV6
    header = HEADERS[sys_flag & FLAG_IPV6]
    is_wide = len(name) > V1_MAX_TOPIC_BYTES  # as of the retries of a group with a long name
    magic, named = (V2_MAGIC, 2) if is_wide else (V1_MAGIC, 1)
    size = header.size + len(body) + named + len(name) + 2 + len(properties)
    fixed = header.pack(
        size, magic, crc32(body) & CRC_MASK, queue_id, flag, 0, 0, sys_flag, born_ms,
        born.address, born.port, 0, b"", 0, reconsume_times, 0, len(body),
    )  # fmt: skip
    rest = len(name).to_bytes(named), name, len(properties).to_bytes(2), properties
    return b"".join((fixed, body, *rest))


def encode_batch_of(
    alike: Alike,
    shared: bytes,
    body: bytes,
    check_sizes: Callable[[int, int], None] = lambda _body, _record: None,
) -> bytes:
    """Return the records of a batch, made one by one; raises RemotingRefusal.

    `shared` are the batch's properties, which each of its messages gets, too. `check_sizes` gets
    the sizes of each body and its record.
    """
    try:
        messages = decode_batch(body, BATCH_MAX)
    except ProtocolError as failure:
        raise _illegal(str(failure)) from failure
    if not messages:
        raise _illegal("a batch without messages")
    stored_bytes = len(body) + len(messages) * (len(shared) + _RECORD_BYTES)
    if stored_bytes > BATCH_BYTES_MAX:
        text = f"{len(messages):,} messages, each with the batch's {len(shared):,} bytes of"
        raise _illegal(f"{text} properties, are more than {BATCH_BYTES_MAX:,} bytes as stored")
    topic, queue_id, sys_flag, born_ms, born, reconsume_times = alike
    records = []
    for flag, content, own in messages:
        if MARK_BYTES in own or PID_MARK in own:  # of a message that the client has received
            own = without_properties(own, _OWN_NAMES)
        if DELAY_BYTES in own and _delay_of(read_properties(own.decode("utf-8", "replace"))):
            raise _illegal("a message of a batch cannot be delayed: send it by itself")
        if _LIGHT_BYTES in own:
            _refuse_light_queues(read_properties(own.decode("utf-8", "replace")))
        raw = own + b"\x02" + shared if own and own[-1] != 2 else own + shared
        _check_properties(raw)  # each one, so that a batch is not stored in part
        record = encode_message(
            topic, content, raw, queue_id, flag, sys_flag, born_ms, born, reconsume_times
        )
        check_sizes(len(content), len(record))
        records.append(record)
    return b"".join(records)


def _repeats_keys(common: Mapping[str, str], body: bytes) -> bool:
    """Whether all keys of a batch are those of its messages.

    Java's client makes such batches of messages that are sent one by one (`autoBatch`). As each
    message would get the keys of all, they are left out if they are too many for one.
    """
    try:
        messages = decode_batch(body, BATCH_MAX)
    except ProtocolError:
        return False  # the reason is found later
    own = {b"", *(key for one in messages for key in keys_of(one.properties))}
    return own.issuperset(common["KEYS"].encode("utf-8", "surrogatepass").split(b" "))


@lru_cache(4_096)
def born_host(address: tuple[str, int]) -> Host:
    """Return the host of a client's address."""
    return Host(ip_address(address[0].partition("%")[0]).packed, address[1])


def _refuse_light_queues(properties: Mapping[str, str]) -> None:
    """Refuse a message for light queues: stored like another, it would be in none of them."""
    if LIGHT_QUEUES in properties:
        raise _illegal(
            f"light queues (LMQ) are not supported: send the message without {LIGHT_QUEUES}"
        )


def _delay_of(properties: Mapping[str, str]) -> int:
    """Return the delay level of a message; 0 without one."""
    try:
        return level_of(properties)
    except MessageIllegalError as failure:
        raise _illegal(str(failure)) from failure


def _stored_as(
    topic: str, queue_id: int, properties: dict[str, str], levels: int
) -> tuple[str, int, bytes]:
    """Return topic, queue and properties of the record of a message, which may be delayed."""
    if "DELAY" not in properties or not _delay_of(properties):
        return topic, queue_id, encode(properties)
    try:
        waiting = schedule(topic, queue_id, properties, levels)
    except (MessageIllegalError, UnicodeEncodeError) as failure:
        raise _illegal(str(failure)) from failure
    assert waiting is not None, "it has a level"
    _check_properties(waiting.properties)
    return waiting


def _number(
    fields: Mapping[str, str], name: str, most: int = _INT_MAX, default: str | None = None,
    *, least: int = 0,
) -> int:  # fmt: skip
    text = fields.get(name, default)
    if text is None:
        raise _illegal(f"the field {name} is missing")
    try:
        number = int(text)
    except ValueError as failure:
        raise _illegal(f"{name}={text[:40]!r} is no whole number") from failure
    if not least <= number <= most:
        raise _illegal(f"{name}={text[:40]} is not from {least} to {most}")
    return number


def _illegal(remark: str) -> RemotingRefusal:
    return RemotingRefusal(Answer.MESSAGE_ILLEGAL, remark)
