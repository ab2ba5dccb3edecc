"""Frames of RocketMQ's protocol, with both kinds of headers, and batches of messages."""

from __future__ import annotations

import msgspec

from hastore.errors import ProtocolError
from hastore.protocol import remoting
from hastore.protocol.remoting import (
    JSON,
    ROCKETMQ,
    BatchMessage,
    Frame,
    RemotingWire,
    decode_batch,
    decode_frame,
    encode_batch,
    encode_frame,
)
from tests.fuzz import kit

LIMITS = (4_096, 16_384)
REACHES = (
    RemotingWire.receive, decode_frame, remoting._decode_json_header, remoting._decode_any_header,
    remoting._decode_binary_header, remoting._refuse_duplicates, remoting._as_texts, decode_batch,
    RemotingWire._take_waiting,
)  # fmt: skip
LEAST = kit.Least(0.2, 12)
TOKENS = (
    *(b'"code":', b'"opaque":', b'"flag":', b'"extFields":{', b'"language":"JAVA"', b'"version":'),
    *(
        b'"remark":',
        b'"serializeTypeCurrentRPC":"JSON"',
        b'{"code":310,',
        b"\x01\x00\x00",
        b'"a":"b"',
    ),
)


def seeds() -> list[bytes]:
    """Return requests and answers as RocketMQ's clients and hastore write them."""
    fields = {"a": "group", "b": "T", "e": "3", "i": "UNIQ_KEY\x01A\x02WAIT\x01true\x02"}
    frames = [
        Frame(310, 7, 0, fields, b"body", None, "JAVA", 479, JSON),
        Frame(310, 7, 0, fields, b"body", None, "JAVA", 479, ROCKETMQ),
        Frame(11, 8, 0, {"topic": "T", "queueOffset": "9"}, b"", None, "GO", 317, JSON),
        Frame(0, 9, 1, {}, b"x" * 5_000, "why", "PYTHON", 479, ROCKETMQ),
        Frame(34, -1, 2, {}, b'{"clientID":"c"}', None, "OTHER", 0, JSON),
        Frame(361, 1, 0, {"x": ""}, b"", "", "CPP", 1, ROCKETMQ),
    ]
    wires = [encode_frame(one) for one in frames]
    headers = [
        b'{"code":310,"language":"JAVA","version":479,"opaque":1,"flag":0,"remark":null,'
        b'"extFields":{"a":1,"b":true,"c":null},"serializeTypeCurrentRPC":"JSON"}',
        b'{"code":1,"opaque":1,"flag":0,"version":0,"language":"GO","extFields":{"a":"1","a":"2"}}',
        b'{"code":1,"code":2}', b'{"code":1,"extFields":{"a":"1","a":"2"}}', b"[1]", b"{",
        b'{"code":"1"}', b'{"code":1,"extFields":[]}', b'{"code":1,"extFields":{"a":[]}}',
        b'{"code":1,"language":5}', b'{"code":1,"remark":5}', b'{"code":2147483648}',
        b'{"opaque":1,"code":1,"flag":0,"version":0,"language":"A:B","extFields":{}}',
    ]  # fmt: skip
    whole = [(4 + len(header)).to_bytes(4) + len(header).to_bytes(4) + header for header in headers]
    batch = encode_batch([BatchMessage(0, b"one", b"KEYS\x01a\x02"), BatchMessage(-5, b"", b"")])
    return [
        *(b"w" + one for one in (*wires, b"".join(wires), *whole)),
        b"w" + wires[0][:30],
        b"w\0\0\0\3",
        b"w\0\0\0\x08\x02\0\0\0\0\0\0\0",
        b"w\0\0\0\x08\0\0\0\x09abcd",
        b"b" + batch,
        b"b" + batch * 3,
        b"b" + batch[:-1],
        b"b" + batch[:20] + b"\xff\xff" + batch[22:],
    ]


def repaired(data: bytes) -> bytes:
    """Return a frame with the right size whose header ends within it."""
    if data[:1] != b"w" or len(data) < 9:
        return data
    length = min(int.from_bytes(data[6:9]), len(data) - 9) if len(data) % 3 else len(data) - 9
    return b"w" + (len(data) - 5).to_bytes(4) + data[5:6] + length.to_bytes(3) + data[9:]


def outcome(pieces: list[bytes]) -> tuple[list[Frame], str | None, int]:
    """Return the frames, why the connection failed, and what is kept of the next one."""
    wire, found, total = RemotingWire(LIMITS), list[Frame](), 0
    for piece in pieces:
        total += len(piece)
        found += wire.receive(piece)
        assert 0 <= wire.held_bytes <= total and wire.missing_bytes >= 0
    return found, wire.failure, wire.held_bytes


def one(data: bytes) -> None:
    """Receive in one piece and in several; both ways to read a JSON header agree; write again."""
    kind, data = data[:1], data[1:]
    if kind == b"b":
        with kit.documented(ProtocolError):
            messages = decode_batch(data, 20)
        again = encode_batch(messages)
        assert decode_batch(again, 20) == messages and len(again) == len(data)
        return
    found, failure, held = outcome([data])
    for pieces in kit.splits(data):
        assert outcome(pieces) == (found, failure, held)
    at = 0
    for frame in found:
        size, length = int.from_bytes(data[at : at + 4]), int.from_bytes(data[at + 5 : at + 8])
        assert decode_frame(data[at + 4 : at + 4 + size]) == frame
        header = data[at + 8 : at + 8 + length]
        if frame.kind == JSON:
            general = remoting._decode_any_header(header)
            general.body = frame.body
            assert general == frame
        at += 4 + size
        again = encode_frame(frame)
        expected = frame
        if frame.kind == ROCKETMQ and frame.remark == "":
            expected = msgspec.structs.replace(frame, remark=None)
        assert decode_frame(again, 4) == expected
    if failure is not None:
        with kit.documented(ProtocolError):
            _again(data[at:])
        raise AssertionError("what the wire refuses, the functions below it do not")
    kit.refuse(found, "no whole frame")


def _again(rest: bytes) -> None:
    """Raise what the wire has caught."""
    wire = RemotingWire(LIMITS)
    wire._read_frames(rest, 0, [])
