"""Remoting, the wire protocol of RocketMQ's clients, commands and brokers. Pure.

    size int32 | kind int8, header length uint24 | header | body       size: all after itself

    kind 0     the header is JSON: code, language, version, opaque, flag, remark, extFields
    kind 1     code int16 | language int8 | version int16 | opaque int32 | flag int32
               | remark: int32 n + text | fields: int32 n + (int16 n + name | int32 n + value) ...
    flag       0x1 an answer   0x2 one way: no answer is expected

All integers are big-endian. An answer repeats the `opaque` and the kind of its request. The values
of fields are strings; the numbers and booleans of some clients are read as their text. A field of
kind 1 may come twice with the same value: so Java's client writes the requests that it signs.

`RemotingWire` takes received bytes and returns frames. It has the members of `ZmtpConnection` that
the client API uses. A frame's size is checked before any byte of it is kept, and only received
bytes take memory. Frames and failure do not depend on how the received bytes are split.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec

from hastore.errors import ProtocolError
from hastore.protocol.api import MAX_MESSAGE_BYTES
from hastore.protocol.zmtp import PIECE_BYTES, keep_piece

# Each byte of a record's properties may take six in JSON ("\\u0001").
MAX_HEADER_BYTES = 256 * 1024
# Of an answer: that to a batch of 16,384 messages has a message id, up to 57 bytes, for each.
MAX_ANSWER_HEADER_BYTES = 1024 * 1024
# A body may be a batch: at most 127 KiB of sizes, flags and properties are added to its messages.
MAX_FRAME_BYTES = MAX_HEADER_BYTES + MAX_MESSAGE_BYTES + 128 * 1024
JSON, ROCKETMQ = 0, 1
ANSWER, ONE_WAY = 0x1, 0x2
VERSION = 479  # of RocketMQ 5.3.3; clients ask the version whether a broker can do something
LANGUAGE = "PYTHON"
LANGUAGES = (
    *("JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP"),
    *("OMS", "RUST", "NODE_JS"),
)
_OTHER = "OTHER"
_HEAD = struct.Struct(">II")
_HEAD_BYTES = _HEAD.size
_SIZE = struct.Struct(">I")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_FIXED = struct.Struct(">hbhiii")  # code, language, version, opaque, flag, length of the remark
_HEADER_MASK = 0xFFFFFF
_INT_MIN, _INT_MAX = -(2**31), 2**31 - 1


class Code(IntEnum):
    """The requests: their numbers."""

    SEND_MESSAGE = 10
    PULL_MESSAGE = 11
    QUERY_MESSAGE = 12
    QUERY_CONSUMER_OFFSET = 14
    UPDATE_CONSUMER_OFFSET = 15
    UPDATE_AND_CREATE_TOPIC = 17
    UPDATE_AND_CREATE_TOPIC_LIST = 18
    GET_ALL_TOPIC_CONFIG = 21
    UPDATE_BROKER_CONFIG = 25
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    SEARCH_OFFSET_BY_TIMESTAMP = 29
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_EARLIEST_MSG_STORETIME = 32
    VIEW_MESSAGE_BY_ID = 33
    HEART_BEAT = 34
    UNREGISTER_CLIENT = 35
    CONSUMER_SEND_MSG_BACK = 36
    END_TRANSACTION = 37
    GET_CONSUMER_LIST_BY_GROUP = 38
    CHECK_TRANSACTION_STATE = 39
    NOTIFY_CONSUMER_IDS_CHANGED = 40
    LOCK_BATCH_MQ = 41
    UNLOCK_BATCH_MQ = 42
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    CHECK_CLIENT_CONFIG = 46
    GET_TIMER_METRICS = 61
    PUT_KV_CONFIG = 100
    GET_KV_CONFIG = 101
    DELETE_KV_CONFIG = 102
    REGISTER_BROKER = 103
    UNREGISTER_BROKER = 104
    GET_ROUTEINFO_BY_TOPIC = 105
    GET_BROKER_CLUSTER_INFO = 106
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP = 200
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_TOPIC_STATS_INFO = 202
    GET_CONSUMER_CONNECTION_LIST = 203
    GET_PRODUCER_CONNECTION_LIST = 204
    WIPE_WRITE_PERM_OF_BROKER = 205
    GET_ALL_TOPIC_LIST_FROM_NAMESERVER = 206
    DELETE_SUBSCRIPTIONGROUP = 207
    GET_CONSUME_STATS = 208
    DELETE_TOPIC_IN_BROKER = 215
    DELETE_TOPIC_IN_NAMESRV = 216
    GET_KVLIST_BY_NAMESPACE = 219
    RESET_CONSUMER_CLIENT_OFFSET = 220
    GET_CONSUMER_STATUS_FROM_CLIENT = 221
    INVOKE_BROKER_TO_RESET_OFFSET = 222
    INVOKE_BROKER_TO_GET_CONSUMER_STATUS = 223
    GET_TOPICS_BY_CLUSTER = 224
    UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST = 225
    QUERY_TOPIC_CONSUME_BY_WHO = 300
    QUERY_CONSUME_TIME_SPAN = 303
    GET_SYSTEM_TOPIC_LIST_FROM_NS = 304
    GET_SYSTEM_TOPIC_LIST_FROM_BROKER = 305
    GET_CONSUMER_RUNNING_INFO = 307
    QUERY_CORRECTION_OFFSET = 308
    CONSUME_MESSAGE_DIRECTLY = 309
    SEND_MESSAGE_V2 = 310
    VIEW_BROKER_STATS_DATA = 315
    GET_BROKER_CONSUME_STATS = 317
    GET_NAMESRV_CONFIG = 319
    SEND_BATCH_MESSAGE = 320
    QUERY_CONSUME_QUEUE = 321
    SEND_REPLY_MESSAGE = 324
    SEND_REPLY_MESSAGE_V2 = 325
    PUSH_REPLY_MESSAGE_TO_CLIENT = 326
    QUERY_TOPICS_BY_CONSUMER = 343
    QUERY_SUBSCRIPTION_BY_CONSUMER = 345
    GET_TOPIC_CONFIG = 351
    GET_SUBSCRIPTIONGROUP_CONFIG = 352
    LITE_PULL_MESSAGE = 361
    RECALL_MESSAGE = 370
    QUERY_ASSIGNMENT = 400
    GET_ALL_MESSAGE_REQUEST_MODE = 402
    GET_BROKER_MEMBER_GROUP = 901
    GET_BROKER_HA_STATUS = 907
    POP_MESSAGE = 200050
    ACK_MESSAGE = 200051
    BATCH_ACK_MESSAGE = 200151


class Answer(IntEnum):
    """The answers: their numbers. 10, 11 and 12 mean: stored, but not confirmed."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    TRANSACTION_FAILED = 4
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    VERSION_NOT_SUPPORTED = 15
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    TOPIC_EXIST_ALREADY = 18
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_NOT_LATEST = 25
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    FILTER_DATA_NOT_EXIST = 27
    FILTER_DATA_NOT_LATEST = 28
    INVALID_PARAMETER = 29
    CONSUMER_NOT_ONLINE = 206
    CONSUME_MSG_TIMEOUT = 207
    NO_MESSAGE = 208
    FLOW_CONTROL = 215


class Frame(msgspec.Struct):
    """A request or an answer. `language`: of whoever sent it, as RocketMQ names it."""

    code: int
    opaque: int
    flag: int = 0
    fields: dict[str, str] = {}
    body: bytes = b""
    remark: str | None = None
    language: str = LANGUAGE
    version: int = VERSION
    kind: int = JSON

    @property
    def is_answer(self) -> bool:
        """Whether this answers a request."""
        return bool(self.flag & ANSWER)

    @property
    def is_one_way(self) -> bool:
        """Whether the sender expects no answer."""
        return bool(self.flag & ONE_WAY)


def answer_to(
    frame: Frame,
    code: int,
    fields: dict[str, str] | None = None,
    body: bytes = b"",
    remark: str | None = None,
) -> Frame:
    """Return the answer to a request: with its `opaque`, and of its kind."""
    return Frame(
        code, frame.opaque, ANSWER, {} if fields is None else fields, body, remark, LANGUAGE,
        VERSION, frame.kind,
    )  # fmt: skip


# -- encoding

_encode_json = msgspec.json.Encoder().encode


def encode_frame(frame: Frame) -> bytes:
    """Return the wire bytes of a frame."""
    body = frame.body
    front = encode_front(frame, len(body))
    return front + body if body else front


def encode_front(frame: Frame, body_bytes: int) -> bytes:
    """Return the wire bytes of a frame up to its body, which the caller sends next.

    Raises ProtocolError if the header is too long, or a number or name does not fit in its field.
    """
    header = _json_header(frame) if frame.kind == JSON else _binary_header(frame)
    length = len(header)
    if length > MAX_ANSWER_HEADER_BYTES:
        raise ProtocolError(f"a header of {length} bytes; at most {MAX_ANSWER_HEADER_BYTES}")
    return _HEAD.pack(4 + length + body_bytes, frame.kind << 24 | length) + header


def encode_answer(code: int, opaque: int, fields: bytes) -> bytes:
    """Return the wire bytes of a JSON answer with these fields, JSON already, and nothing else.

    Raises ProtocolError if they are too long.
    """
    header = b'{"code":%d,"extFields":%b,"flag":1,"language":"PYTHON","opaque":%d,"version":%d}' % (
        code, fields, opaque, VERSION,
    )  # fmt: skip
    length = len(header)
    if length > MAX_ANSWER_HEADER_BYTES:
        raise ProtocolError(f"a header of {length} bytes; at most {MAX_ANSWER_HEADER_BYTES}")
    return _HEAD.pack(4 + length, length) + header


def _json_header(frame: Frame) -> bytes:
    fields = frame.fields
    return b'{"code":%d,%b"flag":%d,"language":%b,"opaque":%d,%b"version":%d}' % (
        frame.code,
        b'"extFields":%b,' % _encode_json(fields) if fields else b"",
        frame.flag,
        b'"PYTHON"' if frame.language == LANGUAGE else _encode_json(frame.language),
        frame.opaque,
        b'"remark":%b,' % _encode_json(frame.remark) if frame.remark is not None else b"",
        frame.version,
    )


def _binary_header(frame: Frame) -> bytes:
    pieces: list[bytes] = []
    size = 0
    try:
        for name, value in frame.fields.items():
            key, text = name.encode(), value.encode()
            pieces += (_SHORT.pack(len(key)), key, _INT.pack(len(text)), text)
            size += 6 + len(key) + len(text)
        remark = frame.remark.encode() if frame.remark else b""
        language = LANGUAGES.index(frame.language) if frame.language in LANGUAGES else 7
        fixed = _FIXED.pack(
            frame.code, language, frame.version, frame.opaque, frame.flag, len(remark)
        )
    except struct.error as failure:
        raise ProtocolError(f"a header that remoting cannot carry: {failure}") from failure
    return b"".join((fixed, remark, _INT.pack(size), *pieces))


def size_of(frame: Frame) -> int:
    """Return the bytes of a frame in its binary form, whatever form it came in."""
    size = _HEAD_BYTES + _FIXED.size + _INT.size + len(frame.body)
    if frame.remark:
        size += _utf8_size(frame.remark)
    for name, value in frame.fields.items():
        size += _SHORT.size + _utf8_size(name) + _INT.size + _utf8_size(value)
    return size


def _utf8_size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# -- decoding


def decode_frame(data: bytes, at: int = 0) -> Frame:
    """Read a frame without its size, from `at` to the end: kind, header length, header and body.

    Raises ProtocolError if that is no frame.
    """
    size = max(0, len(data) - at)
    if size < 4:
        raise ProtocolError(f"a frame of {size} bytes")
    kind, length = _split(_SIZE.unpack_from(data, at)[0], size)
    body_at = at + 4 + length
    frame = _decode_header(kind, data[at + 4 : body_at])
    frame.body = data[body_at:]
    return frame


def _split(mixed: int, size: int, limit: int = MAX_HEADER_BYTES) -> tuple[int, int]:
    """Return kind and length of a header; raises ProtocolError if they cannot be."""
    kind, length = mixed >> 24, mixed & _HEADER_MASK
    if kind > ROCKETMQ:
        raise ProtocolError(f"a header of the unknown kind {kind}")
    if length > size - 4:
        raise ProtocolError(f"a header of {length} bytes in a frame of {size}")
    if length > limit:
        raise ProtocolError(f"a header of {length} bytes; at most {limit}")
    return kind, length


def _decode_header(kind: int, header: bytes) -> Frame:
    """Return a frame whose body is missing yet."""
    return _decode_json_header(header) if kind == JSON else _decode_binary_header(header)


_decode_json = msgspec.json.Decoder().decode
_STRINGS = {str}
_Number = Annotated[int, msgspec.Meta(ge=_INT_MIN, le=_INT_MAX)]


class _UsualHeader(
    msgspec.Struct, rename={"fields": "extFields", "serialized": "serializeTypeCurrentRPC"}
):
    """A header as most clients write it: all of these fields, and the last two perhaps."""

    code: _Number
    opaque: _Number
    flag: _Number
    fields: dict[str, str]
    language: str
    version: _Number
    remark: str | None | msgspec.UnsetType = msgspec.UNSET
    serialized: str | msgspec.UnsetType = msgspec.UNSET


_USUAL_FIELDS = 6
_decode_usual = msgspec.json.Decoder(_UsualHeader).decode


def _decode_json_header(header: bytes) -> Frame:
    """Read a header, a usual one with fewer steps: its types are checked while it is read."""
    try:
        usual = _decode_usual(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode_any_header(header)
    fields, remark = usual.fields, usual.remark
    named = _USUAL_FIELDS + len(fields)
    if remark is msgspec.UNSET:
        remark = None
    else:
        named += 1
    if usual.serialized is not msgspec.UNSET:
        named += 1
    if header.count(b":") != named:  # else each colon has a field of its own, and none is twice
        return _decode_any_header(header)
    return Frame(
        usual.code, usual.opaque, usual.flag, fields, b"", remark, usual.language or _OTHER,
        usual.version, JSON,
    )  # fmt: skip


def _decode_any_header(header: bytes) -> Frame:
    try:
        found = _decode_json(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ProtocolError(f"a header that is no JSON: {failure}") from failure
    if type(found) is not dict:
        raise ProtocolError("a header that is no JSON object")
    get = found.get
    code: Any = get("code")
    opaque, flag, version = get("opaque", 0), get("flag", 0), get("version", 0)
    for name, number in (("code", code), ("opaque", opaque), ("flag", flag), ("version", version)):
        if type(number) is not int or not _INT_MIN <= number <= _INT_MAX:
            raise ProtocolError(f"a header whose {name} is no 32-bit number")
    language, remark, fields = get("language"), get("remark"), get("extFields")
    if fields is None:
        fields = {}
    elif type(fields) is not dict:
        raise ProtocolError("a header whose extFields is no JSON object")
    if language is not None and type(language) is not str:
        raise ProtocolError("a header whose language is no string")
    if remark is not None and type(remark) is not str:
        raise ProtocolError("a header whose remark is no string")
    if header.count(b":") != len(found) + len(fields):  # else each colon has a field of its own
        _refuse_duplicates(header)
    if fields and set(map(type, fields.values())) != _STRINGS:
        fields = _as_texts(fields)
    return Frame(code, opaque, flag, fields, b"", remark, language or _OTHER, version, JSON)


def _as_texts(fields: dict[str, Any]) -> dict[str, str]:
    """Return the fields with numbers and booleans as texts, as RocketMQ reads them; omit null."""
    texts = {}
    for name, value in fields.items():
        if type(value) is str:
            texts[name] = value
        elif type(value) is bool:
            texts[name] = "true" if value else "false"
        elif type(value) is int:
            texts[name] = str(value)
        elif value is not None:
            raise ProtocolError(f"the field {name!r} is neither a text nor a whole number")
    return texts


def _refuse_duplicates(header: bytes) -> None:
    def checked(pairs: list[tuple[str, Any]]) -> None:
        seen = set()  # a list would be searched anew for each of many names
        for name, _ in pairs:
            if name in seen:
                raise ProtocolError(f"a header with the field {name[:80]!r} twice")
            seen.add(name)

    try:
        json.loads(header, object_pairs_hook=checked)
    except (ValueError, RecursionError) as failure:
        raise ProtocolError(f"a header that is no JSON: {failure}") from failure


def _decode_binary_header(header: bytes) -> Frame:
    end = len(header)
    if end < _FIXED.size + 4:
        raise ProtocolError(f"a header of {end} bytes, which is too short")
    code, spoken, version, opaque, flag, length = _FIXED.unpack_from(header)
    at = _FIXED.size
    if length < 0 or length > end - at - 4:
        raise ProtocolError(f"a remark of {length} bytes in a header of {end}")
    fields: dict[str, str] = {}
    try:
        remark = header[at : at + length].decode() if length else None
        at += length
        (length,) = _INT.unpack_from(header, at)
        at += 4
        if length != end - at and (length or at != end):
            raise ProtocolError(f"{length} bytes of fields in a header of {end}")
        while at < end:
            key_at = at + 2
            (length,) = _SHORT.unpack_from(header, at)
            value_at = key_at + length + 4
            if length < 0 or value_at > end:
                raise ProtocolError("a header whose fields do not fit in it")
            name = header[key_at : value_at - 4].decode()
            (length,) = _INT.unpack_from(header, value_at - 4)
            at = value_at + length
            if length < 0 or at > end:
                raise ProtocolError("a header whose fields do not fit in it")
            value = header[value_at:at].decode()
            if fields.setdefault(name, value) != value:
                raise ProtocolError(f"a header with the field {name[:80]!r} twice")
    except UnicodeDecodeError as failure:
        raise ProtocolError("a header whose text is not UTF-8") from failure
    except struct.error as failure:
        raise ProtocolError("a header whose fields do not fit in it") from failure
    language = LANGUAGES[spoken] if 0 <= spoken < len(LANGUAGES) else _OTHER
    return Frame(code, opaque, flag, fields, b"", remark, language, version, ROCKETMQ)


class RemotingWire:
    """The receiving end of one connection.

    `limits`: the greatest size of a header, and of a frame.
    """

    is_open = True  # there is no handshake
    has_output = False
    refused = False

    def __init__(self, limits: tuple[int, int] = (MAX_HEADER_BYTES, MAX_FRAME_BYTES)) -> None:
        self._header_limit, self._limit = limits
        self._buffer = bytearray()  # received bytes of an incomplete frame
        self._needed = _HEAD_BYTES  # bytes that the buffer must hold before it is parsed again
        self._waiting: Frame | None = None  # the frame whose long body is incomplete
        self._pieces: list[bytes | bytearray] = []  # of that body
        self._pieces_bytes = 0  # received of that frame
        self._missing = 0
        self.failure: str | None = None  # why the connection failed

    def allow(self, limits: tuple[int, ...]) -> None:
        """Set other limits, for the frames of the next `receive`."""
        self._header_limit, self._limit = limits

    @property
    def held_bytes(self) -> int:
        """The bytes kept of an incomplete frame."""
        return len(self._buffer) + self._pieces_bytes

    @property
    def missing_bytes(self) -> int:
        """A lower bound of the bytes that the incomplete frame lacks; 0 between frames."""
        if self._missing:
            return self._missing
        return max(0, self._needed - len(self._buffer)) if self._buffer else 0

    def take_output(self) -> bytes:
        """Return b"": the protocol itself has nothing to send."""
        return b""

    def receive(self, data: bytes) -> list[Frame]:
        """Take received bytes; return the frames that they complete.

        If the peer violates the protocol, `failure` says how. The frames before the violation are
        still returned. Bytes received later are dropped.
        """
        frames: list[Frame] = []
        if self.failure is not None:
            return frames
        at = 0
        if self._missing:
            at = min(self._missing, len(data))
            self._add_piece(data if at == len(data) else data[:at])
            if self._missing:
                return frames
            frames.append(self._take_waiting())
        elif self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return frames
            data = bytes(self._buffer)
            self._buffer.clear()
        try:
            self._read_frames(data, at, frames)
        except ProtocolError as failure:
            self.fail(str(failure))
        return frames

    def fail(self, reason: str) -> None:
        """Fail this connection, and forget the incomplete frame."""
        if self.failure is None:
            self.failure = reason
            self._buffer.clear()
            self._pieces.clear()
            self._waiting = None
            self._pieces_bytes = self._missing = 0

    def _read_frames(self, data: bytes, at: int, frames: list[Frame]) -> None:
        end, limit, header_limit = len(data), self._limit, self._header_limit
        while end - at >= _HEAD_BYTES:
            size, mixed = _HEAD.unpack_from(data, at)
            if size > limit or size < 4:
                raise _wrong_size(size, limit)
            kind, length = _split(mixed, size, header_limit)
            body_at = at + _HEAD_BYTES + length
            stop = at + 4 + size
            if stop <= end:
                frame = _decode_header(kind, data[at + _HEAD_BYTES : body_at])
                if stop > body_at:
                    frame.body = data[body_at:stop]
                frames.append(frame)
                at = stop
            elif stop - body_at <= PIECE_BYTES:
                self._keep(data, at, 4 + size)
                return
            elif body_at > end:
                self._keep(data, at, body_at - at)
                return
            else:
                self._waiting = _decode_header(kind, data[at + _HEAD_BYTES : body_at])
                self._pieces_bytes, self._missing = body_at - at, stop - body_at
                self._add_piece(data[body_at:])
                return
        if end - at >= _SIZE.size:
            (size,) = _SIZE.unpack_from(data, at)
            if size > limit or size < 4:
                raise _wrong_size(size, limit)
            self._keep(data, at, _HEAD_BYTES)
        elif at < end:
            self._keep(data, at, _SIZE.size)

    def _add_piece(self, data: bytes) -> None:
        self._pieces_bytes += len(data)
        self._missing -= len(data)
        keep_piece(self._pieces, data)

    def _take_waiting(self) -> Frame:
        """Return the frame whose body is complete now; the body's bytes are copied once."""
        frame = self._waiting
        assert frame is not None
        frame.body = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting, self._pieces_bytes = None, 0
        return frame

    def _keep(self, data: bytes, at: int, needed: int) -> None:
        self._buffer += data[at:] if at else data
        self._needed = needed


def _wrong_size(size: int, limit: int) -> ProtocolError:
    signed = size - 2**32 if size > _INT_MAX else size
    return ProtocolError(f"a frame of {signed} bytes; 4 to {limit} are allowed")


# -- the body of SEND_BATCH_MESSAGE

BATCH_MAX = 16_384  # messages that a node takes in one
BATCH_FRONT = struct.Struct(">iiiii")  # of a message: size, magic, CRC, flag, length of the body


class BatchMessage(NamedTuple):
    """One message of a batch. `properties`: as they are stored."""

    flag: int
    body: bytes
    properties: bytes


def decode_batch(body: bytes, most: int) -> list[BatchMessage]:
    """Read the messages of a batch; raises ProtocolError if its lengths do not add up.

    Also if there are more than `most`.

    Magic and CRC are not read: clients send 0.
    """
    found: list[BatchMessage] = []
    at, end = 0, len(body)
    while at < end:
        if end - at < BATCH_FRONT.size + 2:
            raise ProtocolError(f"{end - at} bytes after the last message of a batch")
        size, _, _, flag, length = BATCH_FRONT.unpack_from(body, at)
        stop = at + size
        body_at = at + BATCH_FRONT.size
        properties_at = body_at + length + 2
        if length < 0 or size < BATCH_FRONT.size + 2 or stop > end or properties_at > stop:
            raise ProtocolError(f"message {len(found)} of a batch does not fit in it")
        if len(found) == most:
            raise ProtocolError(f"more than {most:,} messages in a batch: send several batches")
        (properties,) = _SHORT.unpack_from(body, properties_at - 2)
        if properties != stop - properties_at:
            raise ProtocolError(f"the lengths of message {len(found)} of a batch do not add up")
        found.append(BatchMessage(flag, body[body_at : body_at + length], body[properties_at:stop]))
        at = stop
    return found


def encode_batch(messages: list[BatchMessage]) -> bytes:
    """Return the body of a batch; raises ProtocolError for properties of more than 32767 bytes."""
    pieces: list[bytes] = []
    for flag, body, properties in messages:
        size = BATCH_FRONT.size + len(body) + 2 + len(properties)
        try:
            length = _SHORT.pack(len(properties))
        except struct.error as failure:
            raise ProtocolError(f"{len(properties)} bytes of properties") from failure
        pieces += (BATCH_FRONT.pack(size, 0, 0, flag, len(body)), body, length, properties)
    return b"".join(pieces)


# -- bodies


class Pairs(list[tuple[Any, Any]]):
    """A map whose keys are objects, as pairs: fastjson writes them, though JSON has none."""


def encode_body(value: Any, *, standard: bool = False) -> bytes:
    """Return a body as fastjson writes it: maps keyed by numbers do not quote them.

    With `standard` such keys are quoted, as JSON asks; maps keyed by objects stay as they are.
    Only the Go and C++ clients need the first form, and Java reads both.
    """
    if standard and not _has_pairs(value):
        return _encode_json(value)
    return b"".join(_written(value, standard))


def _has_pairs(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_pairs(each) for each in value.values())
    if isinstance(value, list | tuple):
        return isinstance(value, Pairs) or any(_has_pairs(each) for each in value)
    return False


def _written(value: Any, standard: bool) -> list[bytes]:
    if isinstance(value, dict | Pairs):
        pieces = [b"{"]
        for key, each in value.items() if isinstance(value, dict) else value:
            if len(pieces) > 1:
                pieces.append(b",")
            if standard and isinstance(key, int):
                key = str(key)
            pieces += (*_written(key, standard), b":", *_written(each, standard))
        pieces.append(b"}")
        return pieces
    if isinstance(value, list | tuple):
        pieces = [b"["]
        for each in value:
            if len(pieces) > 1:
                pieces.append(b",")
            pieces += _written(each, standard)
        pieces.append(b"]")
        return pieces
    return [_encode_json(value)]
