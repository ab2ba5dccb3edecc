"""From a call's arguments to a record: what a producer, blocking or asyncio, does before it sends.

`Preparer` checks the arguments and chooses the queue, in the caller's thread. Its `RecordEncoder`
makes the record, with the bytes that `build_record` makes; parts that are the same in every message
of a producer are computed only once.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from hastore.client.arguments import (
    MAX_INT32,
    SendOptions,
    integer,
    key_text,
    queue_of_key,
    refusal,
    value_text,
)
from hastore.client.connections.bootstrap import Targets, host_and_port, look_up, numeric_targets
from hastore.client.producer.send_core import MAX_FRAME_RECORDS
from hastore.errors import MessageIllegalError, UsageError
from hastore.protocol.api import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    PRODUCER_ID,
    SEQUENCE,
    own_prefix,
)
from hastore.record.codec import NO_HOST, Host, build_record
from hastore.record.compression import compress
from hastore.record.delays import MARK, MAX_LEVELS, TIMERS
from hastore.record.layout import (
    CRC_MASK,
    HEADER_SIZE,
    MAX_PROPERTIES_BYTES,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    header_struct,
)
from hastore.record.properties import PROPERTIES_CRC, check_topic, encode_properties

MAX_DELAY_LEVEL = MAX_LEVELS
_TOPICS_KEPT = 1_024
_OTHER_BYTES = 400  # of a record, at most, beside its body and its caller's properties
_LENGTH = struct.Struct(">H")
# The header between IPv4 hosts. Seven values are packed instead of seventeen; the others are zero.
_FRONT = header_struct(
    *("unsigned_size", "magic", "body_crc", "queue_id", "born_timestamp_ms", "born_host"),
    "body_length",
)
_NO_LAST = None, 0, b"", b""


class RecordEncoder:
    """Encode one producer's messages; thread-safe.

    With `producer_id` None, records have no HS_PID and HS_SEQ: a node cannot recognise a retry.
    """

    def __init__(self, producer_id: str | None, born_host: Host) -> None:
        self._producer_id = producer_id
        self._numbered = b""
        if producer_id is not None:
            self._numbered = f"{PRODUCER_ID}\x01{producer_id}\x02{SEQUENCE}\x01".encode()
        self._topics: dict[str, bytes] = {}
        # About the last message without properties: its topic, the length of its sequence number,
        # the bytes between its body and that number, and its bornHost. Other threads encode too, so
        # this, and what is known of the host, is one tuple that is replaced in one step.
        self._last: tuple[str | None, int, bytes, bytes] = _NO_LAST
        self.learn_host(born_host)

    def learn_host(self, born_host: Host) -> None:
        """Set the bornHost of later messages; any thread may call this."""
        self._born = born_host, born_host.packed, born_host.is_ipv6
        self._last = _NO_LAST

    def encode(
        self,
        topic: str,
        body: bytes,
        queue_id: int,
        pairs: list[tuple[str, str]],
        sequence: int,
        born_timestamp_ms: int,
        sys_flag: int = 0,
    ) -> bytes:
        """Return the record; raises MessageIllegalError if no record can hold the message."""
        number = b"%d\x02" % sequence if self._numbered else b""
        if not pairs and not sys_flag:
            known, digits, tail, born = self._last
            if known == topic and digits == len(number):
                length = len(body)
                front = _FRONT.pack(
                    HEADER_SIZE + length + len(tail) + digits, V1_MAGIC, crc32(body) & CRC_MASK,
                    queue_id, born_timestamp_ms, born, length,
                )  # fmt: skip
                return b"".join((front, body, tail, number))
        name = self._topics.get(topic)
        if name is None:
            name = self._learn(topic)
        properties = b"".join((encode_properties(pairs), self._numbered, number))
        known_host = self._born
        host, born, is_ipv6 = known_host
        if sys_flag or not name or is_ipv6 or len(properties) > MAX_PROPERTIES_BYTES:
            if self._producer_id is not None:
                pairs = [*pairs, (PRODUCER_ID, self._producer_id), (SEQUENCE, str(sequence))]
            return build_record(
                topic, body, queue_id=queue_id, properties=pairs, sys_flag=sys_flag,
                born_timestamp_ms=born_timestamp_ms, born_host=host,
            )  # fmt: skip
        length = len(body)
        size = HEADER_SIZE + length + len(name) + _LENGTH.size + len(properties)
        crc = crc32(body) & CRC_MASK
        front = _FRONT.pack(size, V1_MAGIC, crc, queue_id, born_timestamp_ms, born, length)
        if not pairs:
            tail = b"".join((name, _LENGTH.pack(len(properties)), self._numbered))
            self._last = topic, len(number), tail, born
            if self._born is not known_host:  # another one was learnt meanwhile
                self._last = _NO_LAST
        return b"".join((front, body, name, _LENGTH.pack(len(properties)), properties))

    def check_properties(self, pairs: list[tuple[str, str]]) -> None:
        """Raise the MessageIllegalError with which `encode` would refuse these properties."""
        if self._producer_id is not None:
            pairs = [*pairs, (PRODUCER_ID, self._producer_id), (SEQUENCE, "0")]
        encode_properties(pairs)

    def _learn(self, topic: str) -> bytes:
        """Return the length byte and the topic; b"" if it is empty or too long for that byte."""
        raw = topic.encode("utf-8")
        name = bytes((len(raw),)) + raw if 0 < len(raw) <= V1_MAX_TOPIC_BYTES else b""
        if len(self._topics) < _TOPICS_KEPT:
            self._topics[topic] = name
        return name


Body = bytes | bytearray | memoryview  # of a message; what is sent is a copy
Properties = Mapping[str, str] | Iterable[tuple[str, str]] | None
_RESERVED = (PRODUCER_ID, SEQUENCE, MARK)
# What a node would carry out, or could not: name -> the remedy.
_REFUSED = {
    "DELAY": "give the argument delay_level",
    **dict.fromkeys(TIMERS, "timer messages are not supported: give the argument delay_level"),
    "TRAN_MSG": "begin a transaction by Producer.transaction",
}
NO_PROPERTIES: tuple[tuple[str, str], ...] = ()
_PAIRS = "a mapping of str to str, or pairs of them"
_BODY = "bytes, a bytearray or a memoryview"


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message for `send_batch`, with the arguments of `send`; a wrong one raises UsageError."""

    body: Body
    key: str | bytes | None = None
    tags: str | None = None
    properties: Properties = NO_PROPERTIES
    queue: int | None = None
    delay_level: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments at once; `properties` may be an iterator, which is read here."""
        if type(self.body) is not bytes:
            body_of("body", self.body)
        key, tags, queue = self.key, self.tags, self.queue
        if key is not None and not (type(key) is str and key.isascii()):
            key_text("key", key)
        if tags is not None and not (type(tags) is str and tags.isascii()):
            value_text("tags", tags)
        if self.properties is not NO_PROPERTIES and self.properties is not None:
            pairs = _pairs_in("properties", self.properties)
            if not isinstance(self.properties, Mapping | tuple | list):
                object.__setattr__(self, "properties", tuple(pairs))
        if queue is not None and not (type(queue) is int and 0 <= queue <= MAX_INT32):
            queue_of("queue", queue)
        if self.delay_level is not None:
            delay_of(self.delay_level)


class Draft(NamedTuple):
    """A checked message, not yet numbered; `queue` is None if the caller named none."""

    body: bytes
    key: str | None
    pairs: list[tuple[str, str]]
    queue: int | None
    sys_flag: int = 0  # says how `body` is compressed


class Preparer:
    """Check and encode one producer's messages; may be shared between threads."""

    def __init__(self, address: str, options: SendOptions, identity: str | None = None) -> None:
        """Make the encoder. Its bornHost is the local address of a connection to `address`.

        With `identity` the id belongs to that identity: nodes take it from no other client.

        If `address` has a host name, the name is looked up in the background, and bornHost is zeros
        until its address is known.
        """
        own = own_prefix(identity) if identity is not None else ""
        self.producer_id = own + secrets.token_hex(8)
        encoder = RecordEncoder(self.producer_id if options.idempotent else None, NO_HOST)
        host, port = host_and_port(address)
        targets = numeric_targets(host, port)
        if targets:
            encoder.learn_host(own_host(targets))
        else:
            look_up(host, port, lambda found: encoder.learn_host(own_host(found)))
        self.encoder = encoder
        self._batch_bytes = options.batch_bytes
        self._part_records = min(MAX_FRAME_RECORDS, options.max_in_flight)
        self._compression = options.compression
        # Bodies of fewer bytes stay as they are.
        self.packs_from = options.compression_threshold if options.compression else MAX_INT32
        self._topics: set[str] = set()
        self._next_queue: dict[str, int] = {}

    def checked_body(self, topic: str, body: Body) -> bytes:
        """Return the body as bytes.

        Raises MessageIllegalError for a topic or a body that no master would take, and UsageError
        for a wrong type.
        """
        try:
            is_known = topic in self._topics
        except TypeError:  # the topic is not hashable, such as a list; refused below
            is_known = False
        if not is_known:
            if not isinstance(topic, str):
                raise refusal("topic", topic, "a str")
            check_topic(topic)
            if len(self._topics) < _TOPICS_KEPT:
                self._topics.add(topic)
        if type(body) is not bytes:
            body = body_of("body", body)
        if len(body) > MAX_MESSAGE_BYTES:
            raise too_large(body)
        return body

    def pack(self, body: bytes) -> tuple[bytes, int]:
        """Return a body as it is stored, and its bits of sysFlag: compressed if that is shorter.

        Only for messages that are sent one by one: RocketMQ does not compress those of a batch. A
        message is packed once, so that each attempt sends the same bytes.
        """
        if len(body) < self.packs_from or self._compression is None:
            return body, 0
        return compress(body, self._compression)

    def packed(self, draft: Draft) -> Draft:
        """Return a message with its body as it is stored; see `pack`."""
        if len(draft.body) < self.packs_from:
            return draft
        body, sys_flag = self.pack(draft.body)
        return draft._replace(body=body, sys_flag=sys_flag)

    def choose_queue(self, topic: str, key: str | None, queues: int) -> int:
        """Return the key's queue; without a key, the queues take turns."""
        if key is not None:
            return queue_of_key(key, queues)
        count = self._next_queue.get(topic, 0)
        self._next_queue[topic] = count + 1
        return count % queues

    def draft(
        self,
        topic: str,
        body: Body,
        key: str | bytes | None,
        tags: str | None,
        properties: Properties,
        queue: int | None,
        delay_level: int | None = None,
    ) -> Draft:
        """Return the checked message; raises UsageError or MessageIllegalError."""
        body = self.checked_body(topic, body)
        pairs = pairs_of(key, tags, properties, delay_level)
        queue_id = None if queue is None else queue_of("queue", queue)
        return Draft(body, None if key is None else pairs[0][1], pairs, queue_id)

    def batches(
        self, topic: str, messages: Iterable[OutgoingMessage | Body], queue: int | None
    ) -> list[list[Draft]]:
        """Return the checked messages in their order, split into parts of one frame each.

        `queue` is for messages that name no queue. Raises as `draft`, and MessageIllegalError for
        properties that only a later part's encoder would refuse: by then others would be sent.
        """
        if isinstance(messages, _ONE_BODY) or not isinstance(messages, Iterable):
            raise refusal("messages", messages, "a list of bytes or of OutgoingMessages")
        if queue is not None:
            queue = queue_of("queue", queue)
        self.checked_body(topic, b"")
        parts: list[list[Draft]] = []
        size = frame = 0
        for place, message in enumerate(messages):
            if type(message) is bytes:
                draft = Draft(self.checked_body(topic, message), None, [], queue)
            elif isinstance(message, OutgoingMessage):
                draft = self.draft(
                    topic, message.body, message.key, message.tags, message.properties,
                    queue if message.queue is None else message.queue, message.delay_level,
                )  # fmt: skip
            else:
                body = self.checked_body(topic, body_of(f"messages[{place}]", message))
                draft = Draft(body, None, [], queue)
            own = len(draft.body) + _OTHER_BYTES
            if draft.pairs:
                own += _most_bytes(draft.pairs)
            size += len(draft.body)
            frame += own
            if (
                not parts or len(parts[-1]) >= self._part_records or size > self._batch_bytes
                or frame > MAX_FRAME_BYTES
            ):  # fmt: skip
                parts.append([])
                size, frame = len(draft.body), own
            parts[-1].append(draft)
        if len(parts) > 1:
            for draft in itertools.chain.from_iterable(parts):
                if draft.pairs:
                    self.encoder.check_properties(draft.pairs)
        return parts


_ONE_BODY = (str, bytes, bytearray, memoryview)


def _most_bytes(pairs: list[tuple[str, str]]) -> int:
    """Return a number of bytes that these properties do not exceed in a record."""
    return sum(4 * (len(name) + len(value)) + 2 for name, value in pairs)


def body_of(name: str, body: object) -> bytes:
    """Return a body as bytes; raises UsageError for other types."""
    if isinstance(body, bytes | bytearray | memoryview):
        try:
            return bytes(body)
        except ValueError as failure:  # a memoryview that was released
            raise refusal(name, body, _BODY) from failure
    raise refusal(name, body, _BODY)


def too_large(body: bytes) -> MessageIllegalError:
    """Return the error for a body that no master takes."""
    return MessageIllegalError(
        f"a body of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} fit in a message"
    )


def queue_of(name: str, queue: object) -> int:
    """Return a queue id; raises UsageError for anything else."""
    return integer(name, queue, 0, MAX_INT32)


def delay_of(delay_level: object) -> str:
    """Return the value of DELAY for a level; raises UsageError."""
    return str(integer("delay_level", delay_level, 1, MAX_DELAY_LEVEL))


def pairs_of(
    key: str | bytes | None,
    tags: str | None,
    properties: Properties,
    delay_level: int | None = None,
) -> list[tuple[str, str]]:
    """Return a message's properties, the key first; raises UsageError.

    A key may be bytes of UTF-8. `key` and `tags` replace KEYS and TAGS of `properties`. HS_PID,
    HS_SEQ and HS_DELAYED are refused: hastore sets them. So are DELAY and the like, which nodes
    carry out.
    """
    pairs: list[tuple[str, str]] = []
    if key is not None:
        if type(key) is not str or not key.isascii():
            key = key_text("key", key)
        pairs.append(("KEYS", key))
    if tags is not None:
        if type(tags) is not str or not tags.isascii():
            tags = value_text("tags", tags)
        pairs.append(("TAGS", tags))
    if properties is not NO_PROPERTIES and properties is not None:
        more = _pairs_in("properties", properties)
        if pairs:  # the index takes the last key of a record, and a consumer the first
            own = {name for name, _ in pairs}
            more = [pair for pair in more if pair[0] not in own]
        pairs += more
    if delay_level is not None:
        pairs.append(("DELAY", delay_of(delay_level)))
    return pairs


def plain_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return a received message's properties without its key, its tags, and what `send` refuses."""
    left_out = {"KEYS", "TAGS", PROPERTIES_CRC, *_RESERVED, *_REFUSED}
    return {name: value for name, value in properties.items() if name not in left_out}


def _pairs_in(argument: str, properties: object) -> list[tuple[str, str]]:
    """Return the (name, value) pairs of an argument, all str; raises UsageError."""
    if isinstance(properties, Mapping):
        given = list(properties.items())
    elif isinstance(properties, Iterable) and not isinstance(properties, _ONE_BODY):
        given = list(properties)
    else:
        raise refusal(argument, properties, _PAIRS)
    pairs = []
    for pair in given:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise refusal(argument, pair, _PAIRS)
        name, value = pair
        if type(name) is not str or not name.isascii():
            name = value_text(f"{argument}, a name", name)
        if type(value) is not str or not value.isascii():
            value = value_text(f"{argument}[{name!r}]", value)
        if name in _RESERVED:
            raise UsageError(
                f"{argument}: {', '.join(_RESERVED)} are reserved for hastore: leave them out when"
                " you send a received message again"
            )
        if name in _REFUSED:
            raise UsageError(
                f"{argument}: {name} is no plain property: {_REFUSED[name]}, and leave it out when"
                " you send a received message again"
            )
        pairs.append((name, value))
    return pairs


def own_host(targets: Targets) -> Host:
    """Return the local address of a connection to a target; zeros if none can be reached."""
    for family, target in targets:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # no packet is sent
                probe.connect((target[0], target[1] or 1, *target[2:]))
                own = probe.getsockname()[0]
            return Host(socket.inet_pton(family, own.partition("%")[0]), 0)
        except OSError:
            continue
    return NO_HOST
