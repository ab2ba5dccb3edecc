"""Remoting: frames of both kinds, whole, byte by byte and joined; limits; every kind of damage."""

from __future__ import annotations

import contextlib
import json
import random
import struct
import time

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hastore.errors import ProtocolError
from hastore.protocol import remoting
from hastore.protocol.remoting import (
    ANSWER,
    JSON,
    ONE_WAY,
    PIECE_BYTES,
    ROCKETMQ,
    BatchMessage,
    Frame,
    Pairs,
    RemotingWire,
    answer_to,
    decode_batch,
    decode_frame,
    encode_batch,
    encode_body,
    encode_frame,
    encode_front,
    size_of,
)

JAVA_ROUTE = (  # as the Java client 5.3.3 writes it
    b'{"code":105,"extFields":{"topic":"TBW102","acceptStandardJsonOnly":"true"},"flag":0,'
    b'"language":"JAVA","opaque":3,"serializeTypeCurrentRPC":"JSON","version":479}'
)
JAVA_ROUTE = struct.pack(">II", len(JAVA_ROUTE) + 4, len(JAVA_ROUTE)) + JAVA_ROUTE


def framed(header: bytes, body: bytes = b"", kind: int = JSON) -> bytes:
    return struct.pack(">II", 4 + len(header) + len(body), kind << 24 | len(header)) + header + body


def binary(
    fields: bytes = b"", remark: bytes = b"", code: int = 310, language: int = 0, flag: int = 0
) -> bytes:
    fixed = struct.pack(">hbhiii", code, language, 479, 7, flag, len(remark))
    return fixed + remark + struct.pack(">i", len(fields)) + fields


def pair(name: bytes, value: bytes) -> bytes:
    return struct.pack(">h", len(name)) + name + struct.pack(">i", len(value)) + value


def received(data: bytes, step: int = 0) -> tuple[list[Frame], RemotingWire]:
    wire = RemotingWire()
    frames: list[Frame] = []
    step = step or len(data) or 1
    for at in range(0, len(data), step):
        frames += wire.receive(data[at : at + step])
        assert wire.held_bytes <= len(data)
    return frames, wire


def failure_of(data: bytes) -> str:
    """Return how a wire fails, which is the same for whole and for single bytes."""
    whole = received(data)[1].failure
    assert whole is not None
    assert received(data, 1)[1].failure == whole
    assert received(data, 3)[1].failure == whole
    return whole


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
INTS = st.integers(-(2**31), 2**31 - 1)
FRAMES = st.builds(
    Frame,
    st.integers(-(2**15), 2**15 - 1),
    INTS,
    INTS,
    st.dictionaries(TEXTS, TEXTS, max_size=5),
    st.binary(max_size=3 * PIECE_BYTES),
    st.none() | TEXTS.filter(bool),
    st.sampled_from(remoting.LANGUAGES),
    st.integers(0, 2**15 - 1),
    st.sampled_from((JSON, ROCKETMQ)),
)


@given(st.lists(FRAMES, max_size=4), st.integers(1, 3 * PIECE_BYTES))
@example([Frame(310, 1, body=bytes(100_000), kind=ROCKETMQ), Frame(34, 2)], 1_000)
def test_what_is_encoded_is_decoded_however_it_is_split(frames: list[Frame], step: int) -> None:
    data = b"".join(encode_frame(frame) for frame in frames)
    for found, wire in (received(data), received(data, step)):
        assert found == frames
        assert (wire.failure, wire.held_bytes, wire.missing_bytes) == (None, 0, 0)
    for frame in frames:
        assert (
            decode_frame(encode_frame(frame)[4:]) == decode_frame(encode_frame(frame), 4) == frame
        )
        assert encode_front(frame, len(frame.body)) + frame.body == encode_frame(frame)
        in_binary = encode_frame(msgspec.structs.replace(frame, kind=ROCKETMQ))
        assert size_of(frame) == len(in_binary)


def test_single_bytes_give_the_same_frames() -> None:
    data = JAVA_ROUTE + framed(binary(pair(b"b", b"T")), b"body", ROCKETMQ)
    frames, wire = received(data, 1)
    assert wire.failure is None
    route, send = frames
    assert (route.code, route.opaque, route.language, route.version) == (105, 3, "JAVA", 479)
    assert route.fields == {"topic": "TBW102", "acceptStandardJsonOnly": "true"}
    assert (send.code, send.fields, send.body) == (310, {"b": "T"}, b"body")


def test_an_answer_repeats_the_opaque_and_the_kind() -> None:
    for kind in (JSON, ROCKETMQ):
        request = Frame(310, 99, ONE_WAY, kind=kind)
        assert request.is_one_way and not request.is_answer
        answer = answer_to(request, 17, {"a": "é\x01"}, b"x", "no topic\n")
        assert answer.is_answer and not answer.is_one_way
        assert decode_frame(encode_frame(answer)[4:]) == answer
        assert (answer.opaque, answer.kind, answer.flag) == (99, kind, ANSWER)
        assert decode_frame(encode_frame(answer_to(request, 0))[4:]) == answer_to(request, 0)


def test_the_header_of_an_answer_is_json() -> None:
    answer = answer_to(Frame(105, 5), 0, {"msgId": 'a"\\\x02é'}, remark='"\n')
    wire = encode_frame(answer)
    assert json.loads(wire[8:]) == {
        "code": 0, "extFields": {"msgId": 'a"\\\x02é'}, "flag": 1, "language": "PYTHON",
        "opaque": 5, "remark": '"\n', "version": 479,
    }  # fmt: skip


def test_numbers_and_booleans_are_read_as_text_and_null_is_left_out() -> None:
    header = b'{"code":11,"extFields":{"e":3,"k":false,"m":true,"n":null,"t":"x"},"language":"CPP"}'
    frames, wire = received(framed(header))
    assert wire.failure is None
    assert frames[0].fields == {"e": "3", "k": "false", "m": "true", "t": "x"}
    assert (frames[0].opaque, frames[0].flag, frames[0].language) == (0, 0, "CPP")


def test_values_may_hold_colons_and_what_looks_like_fields() -> None:
    frames, wire = received(
        framed(b'{"code":1,"extFields":{"a":"b\\":1,\\"a\\":2:"},"remark":":"}')
    )
    assert wire.failure is None
    assert frames[0].fields == {"a": 'b":1,"a":2:'}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "a header that is no JSON"),
        (b"[]", "a header that is no JSON object"),
        (b"{", "a header that is no JSON"),
        (b'{"code":1}x', "a header that is no JSON"),
        (b"{}", "a header whose code is no 32-bit number"),
        (b'{"code":"310"}', "a header whose code is no 32-bit number"),
        (b'{"code":true}', "a header whose code is no 32-bit number"),
        (b'{"code":1.5}', "a header whose code is no 32-bit number"),
        (b'{"code":1,"opaque":2147483648}', "a header whose opaque is no 32-bit number"),
        (b'{"code":1,"flag":null}', "a header whose flag is no 32-bit number"),
        (b'{"code":1,"version":[]}', "a header whose version is no 32-bit number"),
        (b'{"code":1,"language":1}', "a header whose language is no string"),
        (b'{"code":1,"remark":{}}', "a header whose remark is no string"),
        (b'{"code":1,"extFields":[]}', "a header whose extFields is no JSON object"),
        (b'{"code":1,"extFields":{"a":{}}}', "the field 'a' is neither a text nor a whole number"),
        (b'{"code":1,"extFields":{"a":[1]}}', "the field 'a' is neither a text nor a whole number"),
        (b'{"code":1,"extFields":{"a":1.5}}', "the field 'a' is neither a text nor a whole number"),
        (b'{"code":1,"code":1}', "a header with the field 'code' twice"),
        (b'{"code":1,"extFields":{"a":"1","a":"1"}}', "a header with the field 'a' twice"),
        (b'{"code":1,"extFields":{"a" :"1","a":"1"}}', "a header with the field 'a' twice"),
        (b'{"code":1,"remark":"\xff"}', "a header that is no JSON"),
        (b'{"code":1,"x":' + b"[" * 100_000 + b"}", "a header that is no JSON"),
        (b'{"code":1,"x":' + b'{"a":' * 30_000 + b"1" + b"}" * 30_001, "a header that is no JSON"),
    ],
)  # fmt: skip
def test_a_wrong_json_header_fails_with_its_reason(header: bytes, why: str) -> None:
    assert failure_of(framed(header)).startswith(why)
    with pytest.raises(ProtocolError, match="header|field"):
        decode_frame(framed(header)[4:])


def any_header(chance: random.Random) -> bytes:
    """Return a JSON header like those of clients: usual, with other fields or values, damaged."""
    numbers = ["0", "310", "-1", "1.0", "1e2", "-0", "2147483647", "2147483648", "1" * 30, '"5"']
    odd = [
        "null",
        "true",
        '"x"',
        "[]",
        "{}",
        '{"a":1}',
        '"a:b"',
        '"\\ud800"',
        '"\\u00e9"',
        *numbers,
    ]
    extra = {"a": '"b"', "i": '"K\\u0001v\\u0002"', "": '""', "t": '"a:b"', "n": "5", "z": "null"}
    fields = [f'"{name}":{extra[name]}' for name in chance.sample("ai", 2)]
    while chance.random() < 0.1:
        name = chance.choice(list(extra))
        fields.append(f'"{name}":{chance.choice([extra[name], *odd])}')
    members = {
        "code": chance.choice(["310", "0"]), "flag": "0",
        "extFields": "{" + ",".join(fields) + "}",
        "language": '"JAVA"', "opaque": str(chance.randrange(99)), "version": "479",
        "serializeTypeCurrentRPC": '"JSON"', "remark": '""',
    }  # fmt: skip
    pairs = [
        (name, chance.choice(odd) if chance.random() < 0.02 else value)
        for name, value in members.items()
        if chance.random() > (0.02 if name not in ("remark", "serializeTypeCurrentRPC") else 0.4)
    ]
    while chance.random() < 0.1:
        pairs.append((chance.choice([*members, "x", "fields", "body", "kind"]), chance.choice(odd)))
    chance.shuffle(pairs)
    space = chance.choice(["", "", "", " "])
    text = (
        "{" + ",".join(f'"{name}"{space}:{space}{value}' for name, value in pairs) + "}"
    ).encode()
    if chance.random() < 0.2:
        raw = bytearray(text)
        for _ in range(chance.choice([1, 1, 3])):
            raw[chance.randrange(len(raw))] = chance.choice(b'"{}:,\\ \xff\x000')
        text = bytes(raw)
    return text


def test_a_usual_header_is_read_as_any_other() -> None:
    seed = time.time_ns() % 2**32
    print("seed", seed)
    chance = random.Random(seed)
    usual = wrong = 0
    for _ in range(20_000):
        header = any_header(chance)
        told: list[Frame | str] = []
        for decode in (remoting._decode_json_header, remoting._decode_any_header):
            try:
                told.append(decode(header))
            except ProtocolError as failure:
                told.append(str(failure))
        assert told[0] == told[1], header
        wrong += isinstance(told[0], str)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            remoting._decode_usual(header)
            usual += 1
    assert usual > 5_000 and wrong > 2_000, (usual, wrong)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"", "a header of 0 bytes, which is too short"),
        (binary()[:-1], "a header of 20 bytes, which is too short"),
        (binary() + b"x", "0 bytes of fields in a header of 22"),
        (binary()[:-4] + struct.pack(">i", -1), "-1 bytes of fields in a header of 21"),
        (binary()[:-8] + struct.pack(">ii", -5, 0), "a remark of -5 bytes in a header of 21"),
        (binary()[:-8] + struct.pack(">ii", 5, 0), "a remark of 5 bytes in a header of 21"),
        (binary(b"\0"), "a header whose fields do not fit in it"),
        (binary(b"\0\x05a"), "a header whose fields do not fit in it"),
        (binary(struct.pack(">h", -2) + bytes(9)), "a header whose fields do not fit in it"),
        (binary(b"\0\x01a" + struct.pack(">i", 9)), "a header whose fields do not fit in it"),
        (binary(b"\0\x01a" + struct.pack(">i", -9)), "a header whose fields do not fit in it"),
        (binary(pair(b"a", b"1") + pair(b"a", b"2")), "a header with the field 'a' twice"),
        (binary(pair(b"\xff", b"1")), "a header whose text is not UTF-8"),
        (binary(pair(b"a", b"\xff")), "a header whose text is not UTF-8"),
        (binary(remark=b"\xff"), "a header whose text is not UTF-8"),
    ],
)
def test_a_wrong_binary_header_fails_with_its_reason(header: bytes, why: str) -> None:
    assert failure_of(framed(header, kind=ROCKETMQ)) == why


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\0\0\0\x03", "a frame of 3 bytes; 4 to "),
        (bytes(4), "a frame of 0 bytes; 4 to "),
        (b"\xff\xff\xff\xff", "a frame of -1 bytes; 4 to "),
        (b"\x7f\xff\xff\xff", "a frame of 2147483647 bytes; 4 to "),
        (b"\0\0\0\x08\x02\0\0\x02", "a header of the unknown kind 2"),
        (b"\0\0\0\x08\0\0\0\x05", "a header of 5 bytes in a frame of 8"),
        (b"\0\x10\0\0\0\x0f\0\0", "a header of 983040 bytes; at most 262144"),
        (b"GET / HTTP/1.1\r\n", "a frame of 1195725856 bytes; 4 to "),
    ],
)
def test_a_lying_size_fails_before_anything_is_kept(data: bytes, why: str) -> None:
    assert failure_of(data).startswith(why)
    frames, wire = received(JAVA_ROUTE + data)
    assert len(frames) == 1  # what came before is still given
    assert wire.held_bytes == 0
    assert wire.receive(JAVA_ROUTE) == []


def test_only_received_bytes_take_memory_and_missing_ones_are_known() -> None:
    frame = encode_frame(Frame(310, 1, body=bytes(1_000_000)))
    wire = RemotingWire()
    assert wire.receive(frame[:500]) == []
    assert wire.held_bytes == 500
    assert wire.missing_bytes == len(frame) - 500
    assert wire.receive(frame[500:700_000]) == []
    assert wire.held_bytes == 700_000
    assert wire.missing_bytes == len(frame) - 700_000
    (found,) = wire.receive(frame[700_000:])
    assert found.body == bytes(1_000_000)
    assert (wire.held_bytes, wire.missing_bytes) == (0, 0)


def test_limits_can_be_changed() -> None:
    wire = RemotingWire((100, 200))
    assert wire.receive(encode_frame(Frame(34, 1)))
    wire.allow((100, 300))
    assert wire.receive(encode_frame(Frame(34, 1, body=bytes(200))))
    assert wire.failure is None
    wire.allow((100, 200))
    assert wire.receive(encode_frame(Frame(34, 1, body=bytes(200)))) == []
    assert wire.failure is not None
    wire.fail("another reason")
    assert wire.failure.startswith("a frame of")


def test_a_wire_that_was_failed_drops_what_it_held() -> None:
    wire = RemotingWire()
    wire.receive(encode_frame(Frame(310, 1, body=bytes(9_000)))[:8_000])
    assert wire.held_bytes == 8_000
    wire.fail("ended")
    assert (wire.failure, wire.held_bytes, wire.missing_bytes) == ("ended", 0, 0)
    assert (wire.is_open, wire.has_output, wire.take_output()) == (True, False, b"")


def test_a_header_that_does_not_fit_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match="a header of .* bytes; at most"):
        encode_frame(Frame(0, 1, fields={"a": "x" * remoting.MAX_ANSWER_HEADER_BYTES}))
    for frame in (Frame(200_050, 1, kind=ROCKETMQ), Frame(1, 2**31, kind=ROCKETMQ)):
        with pytest.raises(ProtocolError, match="cannot carry"):
            encode_frame(frame)


def damaged(draw: st.DrawFn) -> bytes:
    frames = draw(st.lists(FRAMES, min_size=1, max_size=3))
    data = bytearray(b"".join(encode_frame(frame) for frame in frames))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        gone = draw(st.integers(0, 9))
        if len(data) > 12:
            data[at : at + gone] = draw(st.binary(max_size=9))
    return bytes(data)


@given(st.composite(damaged)(), st.integers(1, 50))
def test_damage_gives_frames_or_one_failure_however_it_is_split(data: bytes, step: int) -> None:
    whole, wire = received(data)
    frames, pieces = received(data, step)
    assert frames == whole
    assert pieces.failure == wire.failure
    assert pieces.held_bytes == wire.held_bytes <= len(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_an_error(data: bytes) -> None:
    for head in (b"", b"\0\0\0", b"\x01\0\0"):
        try:
            assert isinstance(decode_frame(head + data), Frame)
        except ProtocolError:
            pass


BATCHES = st.lists(st.builds(BatchMessage, INTS, st.binary(), st.binary()), max_size=5)


@given(BATCHES, st.data())
def test_batches(batch: list[BatchMessage], data: st.DataObject) -> None:
    body = encode_batch(batch)
    assert decode_batch(body, 5) == batch
    cut = data.draw(st.integers(0, len(body)))
    try:
        assert decode_batch(body[:cut], 5) == batch[: len(decode_batch(body[:cut], 5))]
    except ProtocolError:
        assert 0 < cut < len(body)


@pytest.mark.parametrize(
    ("at", "value"), [(0, -1), (0, 0), (0, 26), (0, 28), (16, -1), (16, 4), (16, 2**31 - 1)]
)
def test_lying_batches_are_refused(at: int, value: int) -> None:
    body = bytearray(encode_batch([BatchMessage(0, b"abc", b"xy")]))
    assert len(body) == 27
    struct.pack_into(">i", body, at, value)
    with pytest.raises(ProtocolError, match="batch"):
        decode_batch(bytes(body), 5)


def test_a_batch_of_too_many_messages_is_refused_before_all_are_read() -> None:
    body = encode_batch([BatchMessage(0, b"", b"")] * 3)
    assert len(decode_batch(body, 3)) == 3
    with pytest.raises(ProtocolError, match="more than 2 messages in a batch: send several"):
        decode_batch(body + b"no message", 2)


def test_too_long_properties_of_a_batch() -> None:
    with pytest.raises(ProtocolError, match="32768 bytes of properties"):
        encode_batch([BatchMessage(0, b"", bytes(32_768))])


def test_bodies_of_fastjson() -> None:
    route = {"brokerDatas": [{"brokerAddrs": {0: "a:1", 2: "b:2"}, "brokerName": 'g"'}], "n": None}
    assert encode_body(route) == (
        b'{"brokerDatas":[{"brokerAddrs":{0:"a:1",2:"b:2"},"brokerName":"g\\""}],"n":null}'
    )
    assert json.loads(encode_body(route, standard=True)) == {
        "brokerDatas": [{"brokerAddrs": {"0": "a:1", "2": "b:2"}, "brokerName": 'g"'}], "n": None
    }  # fmt: skip
    offsets = {"offsetTable": Pairs([({"topic": "T", "queueId": 1}, 5), ({"topic": "U"}, 6)])}
    for standard in (False, True):
        assert encode_body(offsets, standard=standard) == (
            b'{"offsetTable":{{"topic":"T","queueId":1}:5,{"topic":"U"}:6}}'
        )
