"""The frames on which requests are forwarded: whole, in pieces, hostile."""

import random
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import ProtocolError
from hastore.protocol.forward_link import (
    CLIENT_FRAME_BYTES_MAX,
    FRAME_BYTES_MAX,
    ID_MAX,
    KEEP_ALIVE,
    REASON_BYTES_MAX,
    RECEIVE_BYTES,
    ClientRequest,
    Kind,
    LinkFrame,
    LinkReceiver,
    answer_frame,
    client_request,
    reason_of,
    refused_frame,
    request_frame,
    unknown_frame,
)
from hastore.protocol.hello import (
    Forwarding,
    Purpose,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
)
from tests.protocol.test_hello import make_hello

ALL = frozenset(Kind)
numbers = st.integers(0, ID_MAX)
clients = st.builds(
    ClientRequest,
    st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16),
    st.integers(0, 65_535),
    st.binary(max_size=300) | st.binary(min_size=1).map(lambda one: one * (RECEIVE_BYTES + 1)),
    st.integers(0, 2**32 - 1),
)
frames = (
    st.builds(request_frame, numbers, clients)
    | st.builds(answer_frame, numbers, st.binary(max_size=300))
    | st.builds(refused_frame, numbers, st.text(max_size=40))
    | st.builds(unknown_frame, numbers, st.text(max_size=40))
    | st.just(KEEP_ALIVE)
)


def receive(data, pieces=None, kinds=ALL):
    """Return the frames in some bytes, which arrive in pieces."""
    receiver, out, at = LinkReceiver(kinds), [], 0
    while at < len(data):
        room = receiver.room()
        size = min(len(room), len(data) - at, pieces() if pieces else len(data))
        room[:size] = data[at : at + size]
        out += receiver.received(size)
        at += size
    return out


@given(numbers, clients)
def test_a_request_arrives_as_it_was(number, client):
    ((kind, got, payload),) = receive(request_frame(number, client, aged=True))
    assert (kind, got, client_request(kind, payload)) == (Kind.AGED, number, client)
    ((kind, got, payload),) = receive(request_frame(number, client))  # as the version before
    assert kind is Kind.REQUEST
    assert client_request(kind, payload) == client._replace(age_ms=0)


@pytest.mark.parametrize(("age_ms", "said"), [(-1, 0), (2**32 - 1, 2**32 - 1), (2**40, 2**32 - 1)])
def test_an_age_that_no_clock_shows_is_bounded(age_ms, said):
    client = ClientRequest(bytes(4), 1, b"", age_ms)
    ((kind, _, payload),) = receive(request_frame(1, client, aged=True))
    assert client_request(kind, payload).age_ms == said


@given(numbers, st.binary(max_size=300), st.text(max_size=40))
def test_answers_arrive_as_they_were(number, body, text):
    sent = answer_frame(number, body) + refused_frame(number, text) + unknown_frame(number, text)
    answer, refused, unknown = receive(sent)
    assert answer == LinkFrame(Kind.ANSWER, number, body)
    assert (refused.kind, refused.id, reason_of(refused)) == (Kind.REFUSED, number, text)
    assert (unknown.kind, unknown.id, reason_of(unknown)) == (Kind.UNKNOWN, number, text)
    (late,) = receive(unknown_frame(number, text, is_late=True))
    assert (late.kind, late.id, reason_of(late)) == (Kind.LATE, number, text)


@given(st.lists(frames, max_size=8), st.integers(0, 1 << 32))
def test_frames_do_not_depend_on_how_the_bytes_are_split(sent, seed):
    chance = random.Random(seed)
    data = b"".join(sent)
    pieces = receive(data, lambda: chance.choice([1, 7, 12, 13, 14, 1_000, 1 << 20]))
    assert pieces == receive(data)
    assert len(pieces) == len(sent)


def test_the_longest_request_is_taken_and_a_longer_one_is_not():
    longest = ClientRequest(bytes(16), 1, bytes(CLIENT_FRAME_BYTES_MAX))
    (frame,) = receive(request_frame(1, longest, aged=True))
    assert client_request(frame.kind, frame.payload) == longest
    with pytest.raises(ProtocolError, match="at most"):
        request_frame(1, ClientRequest(bytes(4), 1, bytes(CLIENT_FRAME_BYTES_MAX + 1)))
    with pytest.raises(ProtocolError, match="at most"):
        answer_frame(1, bytes(CLIENT_FRAME_BYTES_MAX + 1))


def test_a_long_reason_is_cut():
    (frame,) = receive(refused_frame(1, "é" * REASON_BYTES_MAX))
    assert len(frame.payload) == REASON_BYTES_MAX
    assert reason_of(frame).startswith("éé")


@pytest.mark.parametrize("length", [0, 8, FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_length_that_no_frame_has_is_refused_before_memory_is_taken(length):
    receiver = LinkReceiver(ALL)
    head = struct.pack(">IBQ", length, Kind.REQUEST, 1)
    receiver.room()[: len(head)] = head
    with pytest.raises(ProtocolError, match="bytes"):
        receiver.received(len(head))


@pytest.mark.parametrize("kind", [Kind.ANSWER, Kind.REFUSED, Kind.UNKNOWN, Kind.LATE, 7, 255])
def test_a_kind_that_the_other_end_may_not_send_is_refused(kind):
    with pytest.raises(ProtocolError, match="kind"):
        receive(struct.pack(">IBQ", 9, kind, 1), kinds=frozenset({Kind.REQUEST}))


@pytest.mark.parametrize(
    "payload", [b"", b"\4", b"\4abcd", b"\4abcd\0", b"\5abcde\0\0", b"\x10abcd\0\0"]
)
def test_a_request_without_an_address_is_refused(payload):
    with pytest.raises(ProtocolError, match="address"):
        client_request(Kind.REQUEST, payload)
    with pytest.raises(ProtocolError, match="address"):
        client_request(Kind.AGED, bytes(4) + payload)
    with pytest.raises(ProtocolError, match="age"):
        client_request(Kind.AGED, payload[:3])


@given(st.binary(max_size=2_000))
def test_hostile_bytes_are_refused_or_are_frames(data):
    try:
        got = receive(data)
    except ProtocolError:
        return
    assert sum(len(one.payload) + 13 for one in got) <= len(data)


def test_hello_and_its_answer_know_the_purpose():
    hello = make_hello(purpose=Purpose.FORWARD)
    assert decode_hello(encode_hello(hello)) == hello
    for answer in (Forwarding(10, 1_000), Forwarding(10, 1_000, aged=True)):
        assert decode_answer(encode_answer(answer)) == answer


def test_the_version_before_understands_the_answer_to_hello():
    class Before(msgspec.Struct, frozen=True, tag="forwarding"):
        requests: int
        size: int

    said = encode_answer(Forwarding(10, 1_000, aged=True))
    assert msgspec.msgpack.decode(said, type=Before) == Before(10, 1_000)
    assert decode_answer(msgspec.msgpack.encode(Before(10, 1_000))) == Forwarding(10, 1_000)
