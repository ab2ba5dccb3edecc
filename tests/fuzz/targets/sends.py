"""Sends of RocketMQ's producers: the fast path makes the bytes that the slow path makes."""

from __future__ import annotations

import random
import secrets
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import ProtocolError, Status
from hastore.protocol.api import Put, PutDone
from hastore.protocol.remoting import (
    BatchMessage,
    Code,
    Frame,
    decode_frame,
    encode_batch,
    encode_frame,
)
from hastore.record.codec import Host, find_parts
from hastore.server.remoting import sends as module
from hastore.server.remoting.door import RemotingRefusal, RemotingRequest
from hastore.server.remoting.routes import Shape, TopicView
from hastore.server.remoting.send_records import SendLayouts, build_batch, build_message
from hastore.server.remoting.sends import Sends
from hastore.store.append.results import BuiltBatch
from tests.api_fakes import FakeBackend, records_of
from tests.fuzz import kit

REACHES = (
    Sends._send, Sends._send_usual, Sends._send_batch, SendLayouts.read, build_batch, build_message,
    module.encode_batch_of, module._stored_as,
)  # fmt: skip
LEAST = kit.Least(0.15, 10)
TOKENS = (
    *(b"UNIQ_KEY\\u0001A\\u0002", b"WAIT\\u0001false\\u0002", b"DELAY\\u00013\\u0002", b'"b":"T"'),
    *(b"TRAN_MSG\\u0001true\\u0002", b"HS_PID\\u0001p\\u0002HS_SEQ\\u00011\\u0002", b'"j":"1"'),
    *(b"KEYS\\u0001a b\\u0002", b"TIMER_DELAY_MS\\u00015\\u0002", b"%RETRY%g", b'"m":"true"'),
    b"INNER_MULTI_DISPATCH\\u0001%LMQ%a\\u0002",
)
SHAPES = {"T": Shape(4, 4, 6), "R": Shape(2, 2, 4), "E": Shape(0, 0, 6), "%RETRY%g": Shape(1, 1, 6)}
BORN = ("127.0.0.1", 50_123)


class Door:
    """Keeps what is put, and says that it is stored."""

    def __init__(self) -> None:
        self.puts: list[tuple[Put, bytes]] = []
        self.is_master = True
        self.backend = BACKEND
        self.parts: Any = SimpleNamespace(backend=BACKEND, puts=self, clock=SYSTEM_CLOCK)

    def admit_own_record(self, put: Put, payload: Any, respond: Any, *_: Any, **more: Any) -> None:
        """Keep a put."""
        self.puts.append((put, records_of(payload)))
        self.built = isinstance(payload, BuiltBatch)
        host = Host(bytes((127, 0, 0, 1)), 10_911).packed
        respond(PutDone(0, Status.PUT_OK, 65_537, "X", [5], [1], [9], None, host))


BACKEND = FakeBackend()


def _handlers(*, fast: bool) -> tuple[Door, Sends]:
    door = Door()
    view = TopicView(BACKEND, auto_create=True)
    view.find = SHAPES.get  # type: ignore[method-assign]
    sends = Sends(door, view, "c%s")  # type: ignore[arg-type]
    if not fast:
        sends._send_usual = lambda *_: False  # type: ignore[method-assign]
    return door, sends


FAST, SLOW = _handlers(fast=True), _handlers(fast=False)


def seeds() -> list[bytes]:
    """Return sends: 10, 310 and 320, usual and unusual ones."""
    usual = {
        "a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1700000000123",
        "h": "0", "i": "UNIQ_KEY\x01A\x02WAIT\x01true\x02TAGS\x01t\x02", "j": "0", "k": "false",
        "m": "false",
    }  # fmt: skip
    long_names = {name: usual[letter] for letter, name in zip("bdefghijlm", (
        *("topic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp", "flag"),
        *("properties", "reconsumeTimes", "maxReconsumeTimes", "batch"),
    ), strict=True) if letter in usual}  # fmt: skip
    batch = encode_batch([
        BatchMessage(0, b"one", b"UNIQ_KEY\x01A\x02WAIT\x01true\x02"),
        BatchMessage(1, b"two", b"UNIQ_KEY\x01B\x02KEYS\x01a b\x02"),
    ])  # fmt: skip
    changes: list[dict[str, str]] = [
        {}, {"b": "R"}, {"b": "a.b"}, {"b": "%RETRY%g", "j": "3"}, {"e": "-1"}, {"e": "9"},
        {"i": "DELAY\x013\x02"}, {"i": "TRAN_MSG\x01true\x02PGROUP\x01g\x02"}, {"f": "4"},
        {"i": "HS_PID\x01p\x02HS_SEQ\x01x\x02"}, {"i": "TIMER_DELAY_MS\x015\x02"}, {"i": "a"},
        {"i": "KEYS\x01" + "k " * 70 + "\x02"}, {"g": "x"}, {"b": "SCHEDULE_TOPIC_XXXX"},
        {"i": "HS_DELAYED\x011-5\x02UNIQ_KEY\x01A\x02"}, {"i": "UNIQ_KEY\x01\x02é\x01ü\x02"},
    ]  # fmt: skip
    frames = [Frame(Code.SEND_MESSAGE_V2, 1, 0, {**usual, **one}, b"body") for one in changes]
    frames += [
        Frame(Code.SEND_MESSAGE, 1, 0, long_names, b"body", kind=1),
        Frame(Code.SEND_MESSAGE_V2, 1, 2, usual, b"body"), Frame(Code.SEND_MESSAGE_V2, 1, 0, usual),
        Frame(Code.SEND_BATCH_MESSAGE, 1, 0, {**usual, "m": "true"}, batch),
        Frame(Code.SEND_MESSAGE_V2, 1, 0, {**usual, "m": "true"}, batch[:-3]),
        Frame(Code.SEND_BATCH_MESSAGE, 1, 0, {**usual, "i": "DELAY\x011\x02"}, batch),
    ]  # fmt: skip
    return [encode_frame(frame)[4:] for frame in frames]


def _told(door: Door, sends: Sends, frame: Frame) -> tuple[list[object], Exception | None]:
    """Return what is put, and what the client is told."""
    told: list[object] = []

    def reply(_request: RemotingRequest, answer: Frame | bytes | None) -> None:
        told.append(encode_frame(answer) if isinstance(answer, Frame) else answer)

    def unknown(_request: RemotingRequest, reason: str, is_late: bool) -> None:
        told.append((reason, is_late))

    door.puts.clear()
    request = RemotingRequest(frame, 5.0, None, BORN, reply, unknown)
    refused = None
    try:
        sends.handlers()[frame.code](request)
    except RemotingRefusal as why:
        refused = why
        told.append((why.code, str(why)))
    assert refused is None or not door.puts, "what is refused is not stored"
    return [told, list(door.puts), request.is_answered], refused


def one(data: bytes) -> None:
    """Take a send by both paths; its records are whole."""
    with kit.documented(ProtocolError):
        frame = decode_frame(data)
    kit.refuse(frame.code in FAST[1].handlers(), "no send")
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(secrets, "token_hex", lambda _size: "ab" * 16))
        patches.enter_context(mock.patch.object(module, "random", random.Random(1)))
        fast, refused = _told(*FAST, frame)
        patches.enter_context(mock.patch.object(module, "random", random.Random(1)))
        no_bytes = mock.patch.object(module, "stored_answer", lambda *_: None)
        patches.enter_context(no_bytes)
        slow, _ = _told(*SLOW, frame)
    assert fast == slow, (fast, slow)
    for _, payload in FAST[0].puts:
        at = 0
        while at < len(payload):
            parts = find_parts(payload, at, len(payload))
            assert parts is not None, f"a record at {at} that nobody can read"
            at += parts[0]
        assert at == len(payload)
    if refused is not None:
        with kit.documented(RemotingRefusal):
            raise refused
