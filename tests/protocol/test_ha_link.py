"""The HA link's codecs: fed whole, byte by byte, with trailing data, and with every bad length."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import ProtocolError
from hastore.protocol.ha_link import (
    BODY_BYTES_MAX,
    CLASSIC_BODY_BYTES,
    CONFIRMED_TYPE,
    CONTROL_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    REPORT,
    Confirmed,
    Data,
    FrameStart,
    ReportDecoder,
    StreamDecoder,
    confirmed_frame,
    data_header,
)

SIGN = 1 << 63
offsets = st.integers(0, SIGN - 1)
frames = st.one_of(
    st.tuples(st.just("data"), st.integers(0, 1 << 40), st.binary(max_size=40)),
    st.tuples(st.just("limits"), offsets, offsets),
)


def encode(frame):
    if frame[0] == "data":
        return data_header(frame[1], len(frame[2])) + frame[2]
    return confirmed_frame(frame[1], frame[2])


def joined(events):
    """Join the pieces of each body."""
    out = []
    for event in events:
        if isinstance(event, Data):
            start, data = out[-1]
            assert event.offset == start.offset + len(data)
            out[-1] = (start, data + bytes(event.data))
        elif isinstance(event, FrameStart):
            out.append((event, b""))
        else:
            out.append(event)
    return out


def expected(frame):
    if frame[0] == "data":
        return FrameStart(frame[1], len(frame[2])), frame[2]
    return Confirmed(frame[1], frame[2])


def feed(decoder, data, size):
    events = []
    for at in range(0, len(data), size):
        for event in decoder.feed(memoryview(data)[at : at + size]):
            events.append(
                Data(event.offset, memoryview(bytes(event.data)))
                if isinstance(event, Data)
                else event
            )
    return events


@given(st.lists(frames, max_size=6), st.integers(1, 50))
def test_any_pieces_give_the_same_events(sent, size):
    data = b"".join(map(encode, sent))
    assert joined(feed(StreamDecoder(control_frames=True), data, size)) == [*map(expected, sent)]


def test_the_bytes_are_rocketmqs():
    assert data_header(0x0102030405060708, 0x0A0B0C0D) == bytes.fromhex("01020304050607080a0b0c0d")
    assert HEADER_BYTES == 12
    assert BODY_BYTES_MAX == 4 * 1024 * 1024 - 12
    assert CLASSIC_BODY_BYTES == 32 * 1024
    assert data_header(1000, 0) == struct.pack(">qi", 1000, 0)  # a heartbeat
    assert REPORT.pack(65536) == bytes.fromhex("0000000000010000")


def test_a_control_frame_has_a_negative_first_field():
    frame = confirmed_frame(5, 6)
    first, size = HEADER.unpack(frame[:HEADER_BYTES])
    assert first + SIGN == CONFIRMED_TYPE and size == 16
    assert frame[HEADER_BYTES:] == struct.pack(">qq", 5, 6)


def test_trailing_data_waits():
    decoder = StreamDecoder(control_frames=True)
    data = encode(("data", 7, b"abc")) + data_header(10, 2)[:5]
    assert joined(feed(decoder, data, 100)) == [expected(("data", 7, b"abc"))]
    rest = data_header(10, 2)[5:] + b"xy"
    assert joined(feed(decoder, rest, 3)) == [expected(("data", 10, b"xy"))]


@pytest.mark.parametrize("size", [-1, -(2**31), BODY_BYTES_MAX + 1, 2**31 - 1])
def test_a_body_of_an_impossible_size_is_refused_at_once(size):
    decoder = StreamDecoder(control_frames=True)
    with pytest.raises(ProtocolError, match="a body of"):
        feed(decoder, struct.pack(">qi", 0, size), 1)


@pytest.mark.parametrize("size", [0, 1, BODY_BYTES_MAX])
def test_a_body_up_to_the_limit_is_taken(size):
    decoder = StreamDecoder(control_frames=False)
    assert feed(decoder, struct.pack(">qi", 3, size), 1) == [FrameStart(3, size)]
    assert decoder.body_left == size


@pytest.mark.parametrize("size", [-1, -(2**31), 0, CONTROL_BYTES_MAX + 1, 2**31 - 1])
def test_a_control_frame_of_an_impossible_size_is_refused_at_once(size):
    with pytest.raises(ProtocolError, match="control frame"):
        feed(StreamDecoder(control_frames=True), HEADER.pack(1 - SIGN, size), 1)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [(2, bytes(16)), (1, bytes(15)), (1, bytes(17)), (0, b"x"), (1, bytes(CONTROL_BYTES_MAX))],
)
def test_an_unknown_control_frame_is_refused(kind, payload):
    data = HEADER.pack(kind - SIGN, len(payload)) + payload
    with pytest.raises(ProtocolError, match="unknown control frame"):
        feed(StreamDecoder(control_frames=True), data, 7)


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1), (-(2**63), 5)])
def test_negative_limits_are_refused(limits):
    with pytest.raises(ProtocolError, match="negative limits"):
        feed(StreamDecoder(control_frames=True), confirmed_frame(*limits), 4)


@pytest.mark.parametrize("first", [-1, -(2**63), 1 - SIGN])
def test_a_classic_stream_has_no_negative_offsets(first):
    with pytest.raises(ProtocolError, match="negative offset"):
        feed(StreamDecoder(control_frames=False), HEADER.pack(first, 16) + bytes(16), 5)


def test_spliced_bytes_are_skipped():
    decoder = StreamDecoder(control_frames=False)
    assert feed(decoder, data_header(100, 10), 12) == [FrameStart(100, 10)]
    decoder.skip(6)
    assert joined([FrameStart(106, 0), *feed(decoder, b"wxyz", 2)])[0][1] == b"wxyz"
    for size in (0, -1, 1):
        with pytest.raises(ValueError):
            decoder.skip(size)
    assert feed(decoder, data_header(110, 0), 12) == [FrameStart(110, 0)]


@given(st.binary(max_size=200), st.integers(1, 40), st.booleans())
def test_any_bytes_give_events_or_one_error(data, size, control):
    decoder = StreamDecoder(control_frames=control)
    try:
        events = feed(decoder, data, size)
    except ProtocolError:
        return
    assert sum(len(e.data) for e in events if isinstance(e, Data)) <= len(data)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(1, 30))
def test_reports_in_any_pieces(reports, size):
    data = b"".join(map(REPORT.pack, reports))
    decoder = ReportDecoder()
    seen = []
    for at in range(0, len(data), size):
        seen += decoder.feed(data[at : at + size])
    assert seen == reports
    assert decoder.feed(b"\0" * 7) == []
    assert decoder.feed(b"\1") == [1]
