"""Records of sends, made in one go where a send is like most: the fast path of sends.py.

    build_batch      the messages of a batch
    SendLayouts      the properties of a message, in the order in which RocketMQ stores them
    build_message    a message
    stored_answer    the answer to a send that is stored

Each returns None for whatever is not usual. Then sends.py makes the record, or those of a batch one
by one, and says what is wrong. What is made here is byte for byte what sends.py would have made. It
has passed each check that the store would make; tests compare both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
from zlib_ng.zlib_ng import crc32

from hastore.protocol.api import PutDone
from hastore.protocol.remoting import (
    BATCH_FRONT,
    JSON,
    MAX_ANSWER_HEADER_BYTES,
    Frame,
    encode_answer,
)
from hastore.record.codec import Host
from hastore.record.delays import DELAY_BYTES, LIGHT_QUEUES, MARK, MARK_BYTES, TIMERS
from hastore.record.layout import (
    CRC_MASK,
    FLAG_IPV6,
    FLAG_ROLLBACK,
    HEADER_SIZE,
    HEADERS,
    MAX_PROPERTIES_BYTES,
    TAIL_MIN,
    V1_MAGIC,
    V1_MAX_TOPIC_BYTES,
    header_struct,
)
from hastore.record.properties import MAX_KEYS, PID_MARK, in_java_order
from hastore.store.append.results import FLAGS_REFUSED, BuiltBatch

UNUSUAL_FLAGS = FLAG_IPV6 | FLAG_ROLLBACK | FLAGS_REFUSED  # both transaction bits
_FRONT = header_struct("unsigned_size", "magic", "body_crc", "queue_id", "flag")
_LENGTH_BYTES = 4  # of a body: written before it in a batch as in a record
_SHORT = struct.Struct(">h")
_LEAST = BATCH_FRONT.size + _SHORT.size
REGION = "DefaultRegion"  # RocketMQ's, which its broker adds to each message
# The pop of a message that a client has received; RocketMQ's broker takes it off what is sent.
RESERVED = "POP_CK"
_LAYOUTS_MAX = 512
_NAMES_MAX = 32  # of a layout that is remembered
_NAMES_CHARS = 512  # the same: all of them take some 2 MiB at most
# What a message means that has one of these, or how the node must change it, sends.py says.
_SPECIAL = TIMERS | {
    *("DELAY", LIGHT_QUEUES, "TRAN_MSG", "MSG_REGION", "TRACE_ON", "CLUSTER", RESERVED, ""),
}
_LIGHT_BYTES = LIGHT_QUEUES.encode()
_encode_json = msgspec.json.Encoder().encode
_ADDED = _encode_json({"MSG_REGION": REGION, "TRACE_ON": "true"})[1:-1]


class Alike(NamedTuple):
    """What the records of one send have in common."""

    topic: str
    queue_id: int
    sys_flag: int
    born_ms: int
    born: Host
    reconsume_times: int

    @property
    def is_usual(self) -> bool:
        """Whether its records can be a uniform batch."""
        return not self.sys_flag & UNUSUAL_FLAGS and len(self.born.address) == 4


def build_batch(alike: Alike, shared: bytes, body: bytes, most: int) -> BuiltBatch | None:
    """Return the records of a batch of at most `most` messages; None leaves it to the slow way.

    `shared` are the batch's properties as they are stored: checked, and with a final 0x02.
    """
    name, queue_id = alike.topic.encode(), alike.queue_id
    if not alike.is_usual or len(name) > V1_MAX_TOPIC_BYTES or _is_unusual(shared):
        return None
    middle, named = _middle(alike), bytes((len(name),)) + name
    added = HEADER_SIZE + TAIL_MIN + len(name)
    unpack, unpack_short = BATCH_FRONT.unpack_from, _SHORT.unpack_from
    pack, pack_short = _FRONT.pack, _SHORT.pack
    pieces: list[bytes] = []
    starts: list[int] = []
    owns: list[bytes] = []
    start = longest_body = longest = 0
    at, end = 0, len(body)
    while at < end:
        if end - at < _LEAST or len(starts) >= most:
            return None
        size, _, _, flag, length = unpack(body, at)
        body_at, stop = at + BATCH_FRONT.size, at + size
        own_at = body_at + length + _SHORT.size
        if length < 0 or own_at > stop or stop > end:
            return None
        content, own = body[body_at : own_at - _SHORT.size], body[own_at:stop]
        joint = shared if not own or own[-1] == 2 else b"\x02" + shared
        rest = len(own) + len(joint)
        if (
            unpack_short(body, own_at - _SHORT.size)[0] != len(own)
            or rest > MAX_PROPERTIES_BYTES
            or own.count(b"\x01") - own.count(b"\x02") != len(joint) - len(shared)
        ):
            return None
        total = added + length + rest
        front = pack(total, V1_MAGIC, crc32(content) & CRC_MASK, queue_id, flag)
        size_of_body = body[body_at - _LENGTH_BYTES : body_at]
        pieces += (front, middle, size_of_body, content, named, pack_short(rest), own, joint)
        starts.append(start)
        owns.append(own)
        start += total
        if total > longest:
            longest = total
        if length > longest_body:
            longest_body = length
        at = stop
    if not starts or _has_unusual(owns, shared):
        return None
    queues = [queue_id] * len(starts)
    return BuiltBatch(b"".join(pieces), name, starts, queues, None, [], longest_body, longest)


def _middle(alike: Alike) -> bytes:
    """Return the bytes of a header that are the same in all records of a send."""
    whole = HEADERS[0].pack(
        0, 0, 0, 0, 0, 0, 0, alike.sys_flag, alike.born_ms, alike.born.address, alike.born.port,
        0, b"", 0, alike.reconsume_times, 0, 0,
    )  # fmt: skip
    return whole[_FRONT.size : -_LENGTH_BYTES]


def _is_unusual(properties: bytes) -> bool:
    """Whether properties may have what the store reads, or what is refused: sends.py decides."""
    return (
        PID_MARK in properties
        or MARK_BYTES in properties
        or DELAY_BYTES in properties
        or _LIGHT_BYTES in properties
    )


def _has_unusual(owns: Sequence[bytes], shared: bytes) -> bool:
    """Whether one of the messages may have a producer, a mark, or too many keys."""
    block = b"\x02".join(owns)
    if _is_unusual(block):
        return True
    if block.count(b" ") + shared.count(b" ") < MAX_KEYS:
        return False
    left = MAX_KEYS - shared.count(b" ")
    return any(own.count(b" ") >= left for own in owns)


class UsualProperties(NamedTuple):
    """The properties of a message as they are stored, and those that say what to do with it."""

    raw: bytes
    unique: str
    wait: str | None


class _Layout(NamedTuple):
    """Names of properties in the order of a client: what they become as they are stored."""

    template: str  # of the stored text, with a place for each value
    ordered: Callable[[Sequence[str]], Any]  # the values in the order of these places
    unique: int  # the place of UNIQ_KEY
    wait: int | None


class SendLayouts:
    """Reads the properties of messages. Most messages of a client have the same names.

    The node adds MSG_REGION, TRACE_ON and CLUSTER.
    """

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, ...], _Layout | None] = {}

    def read(self, text: str) -> UsualProperties | None:
        """Return the properties as they are stored; None leaves them to the slow way."""
        if len(text) > MAX_PROPERTIES_BYTES or text.count(" ") >= MAX_KEYS:
            return None
        pieces = text.split("\x02")
        if not pieces[-1]:
            pieces.pop()
        if len(pieces) > _NAMES_MAX or text.count("\x01") != len(pieces):
            return None
        pairs = [piece.partition("\x01") for piece in pieces]
        names = tuple([pair[0] for pair in pairs])
        values = [pair[2] for pair in pairs]
        if "" in values:
            return None
        try:
            layout = self._known[names]
        except KeyError:
            layout = self._learn(names)
        if layout is None:
            return None
        try:
            raw = (layout.template % layout.ordered(values)).encode()
        except UnicodeEncodeError:
            return None
        if len(raw) > MAX_PROPERTIES_BYTES:
            return None
        wait = None if layout.wait is None else values[layout.wait]
        return UsualProperties(raw, values[layout.unique], wait)

    def _learn(self, names: tuple[str, ...]) -> _Layout | None:
        if sum(map(len, names)) > _NAMES_CHARS:
            return None
        if len(self._known) >= _LAYOUTS_MAX:
            self._known.clear()
        layout = self._known[names] = self._layout_of(names)
        return layout

    def _layout_of(self, names: tuple[str, ...]) -> _Layout | None:
        if len(set(names)) != len(names) or "UNIQ_KEY" not in names:
            return None
        if "\x01" in self._cluster or "\x02" in self._cluster:
            return None
        if any(name in _SPECIAL or name.endswith(("HS_PID", "HS_SEQ", MARK)) for name in names):
            return None
        added = {"MSG_REGION": REGION, "TRACE_ON": "true", "CLUSTER": self._cluster}
        template = ""
        places: list[int] = []
        for name, value in in_java_order(dict.fromkeys(names, "%s") | added):
            if name in added:
                value = value.replace("%", "%%")
            else:
                places.append(names.index(name))
            template += name.replace("%", "%%") + f"\x01{value}\x02"
        wait = names.index("WAIT") if "WAIT" in names else None
        return _Layout(template, itemgetter(*places), names.index("UNIQ_KEY"), wait)


def build_message(alike: Alike, flag: int, body: bytes, properties: bytes) -> BuiltBatch | None:
    """Return the record of a message with properties that `SendLayouts` has read."""
    name = alike.topic.encode()
    if not alike.is_usual or not body or len(name) > V1_MAX_TOPIC_BYTES:
        return None
    born, length = alike.born, len(body)
    size = HEADER_SIZE + length + TAIL_MIN + len(name) + len(properties)
    header = HEADERS[0].pack(
        size, V1_MAGIC, crc32(body) & CRC_MASK, alike.queue_id, flag, 0, 0, alike.sys_flag,
        alike.born_ms, born.address, born.port, 0, b"", 0, alike.reconsume_times, 0, length,
    )  # fmt: skip
    rest = bytes((len(name),)), name, _SHORT.pack(len(properties)), properties
    record = b"".join((header, body, *rest))
    return BuiltBatch(record, name, [0], [alike.queue_id], None, [], length, size)


def ids_of(done: PutDone) -> str:
    """Return the ids of the messages of a put, as RocketMQ's broker answers them."""
    host, offsets, hosts = done.host, done.offsets, done.hosts
    if len(offsets) == 1 and not hosts:
        return (host + offsets[0].to_bytes(8)).hex().upper()
    if hosts:
        return ",".join(
            (hosts.get(at, host) + offset.to_bytes(8)).hex().upper()
            for at, offset in enumerate(offsets)
        )
    prefix, digits = host.hex().upper(), struct.pack(f">{len(offsets)}q", *offsets).hex().upper()
    return ",".join([prefix + digits[at : at + 16] for at in range(0, len(digits), 16)])


def fields_of(queue_id: int, unique: str | None, done: PutDone) -> dict[str, str]:
    """Return the fields of the answer to a send whose messages are stored."""
    fields = {
        "msgId": ids_of(done),
        "queueId": str(queue_id),
        "queueOffset": str(done.queue_offsets[0]),
        "MSG_REGION": REGION,
        "TRACE_ON": "true",
    }
    if unique is not None:
        fields["transactionId"] = unique
    return fields


def stored_answer(
    frame: Frame, code: int, queue_id: int, unique: str | None, done: PutDone
) -> bytes | None:
    """Return the wire bytes of the answer with `fields_of`; None leaves it to the slow way."""
    if frame.kind != JSON:
        return None
    ids = ids_of(done)
    if len(ids) > MAX_ANSWER_HEADER_BYTES // 2:
        return None
    return encode_answer(
        code, frame.opaque,
        b'{"msgId":"%b","queueId":"%d","queueOffset":"%d",%b%b}' % (
            ids.encode(), queue_id, done.queue_offsets[0], _ADDED,
            b"" if unique is None else b',"transactionId":' + _encode_json(unique),
        ),
    )  # fmt: skip
