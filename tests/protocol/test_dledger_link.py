"""The frames between the nodes of a DLedger group: whole, in pieces, hostile."""

import re
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import ProtocolError
from hastore.protocol.dledger import (
    INDEX_MAX,
    TERM_MAX,
    AppendRequest,
    Code,
    CommitRequest,
    CompareRequest,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallRequest,
    PushResponse,
    PushType,
    TakeLeadership,
    TruncateRequest,
    VoteRequest,
    VoteResponse,
    VoteResult,
)
from hastore.protocol.dledger_link import (
    DATA_BYTES_MAX,
    ENTRY_HEADER_BYTES,
    KEEP_ALIVE,
    MESSAGE_BYTES_MAX,
    MESSAGE_TYPE,
    RECEIVE_BYTES,
    FrameReceiver,
    append_frames,
    decode_message,
    message_frame,
)
from hastore.protocol.ha_link import HEADER
from hastore.protocol.hello import (
    Linked,
    Purpose,
    StoreKnown,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
)
from tests.protocol.test_hello import make_hello

SIGN = 1 << 63
terms = st.integers(0, TERM_MAX)
indexes = st.integers(-1, INDEX_MAX)
nodes = st.lists(st.integers(1, 65_535), min_size=1, max_size=5, unique=True).map(tuple)
rounds = st.integers(1, SIGN - 1)
# A term of a message, and terms of entries that its sender can know.
terms_and_before = st.tuples(st.integers(1, TERM_MAX), indexes, indexes).map(
    lambda drawn: (drawn[0], *(min(one, drawn[0]) for one in drawn[1:]))
)
logs = st.tuples(st.integers(0, INDEX_MAX), st.integers(-1, INDEX_MAX - 1)).map(
    lambda drawn: (min(drawn[0], drawn[1] + 1), drawn[1])
)


@st.composite
def appends(draw):
    """An append and its bytes; sometimes longer than the receive buffer."""
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    length = len(counts)
    rising = sorted(draw(st.lists(terms, min_size=length, max_size=length, unique=True)))
    entries = sum(counts)
    least = entries * ENTRY_HEADER_BYTES
    size = draw(st.one_of(st.integers(least, least + 500), st.just(RECEIVE_BYTES + 1000)))
    prev = draw(st.integers(-1, 1 << 40))
    request = AppendRequest(
        term=draw(st.integers(rising[-1], TERM_MAX)),
        prev_index=prev,
        prev_term=draw(st.integers(-1, rising[0])),
        pos=draw(st.integers(0, 1 << 50)),
        size=size,
        runs=tuple(zip(rising, counts, strict=False)),
        committed_index=draw(indexes),
        members=tuple((prev + 1 + n, draw(nodes)) for n in range(draw(st.integers(0, entries)))),
    )
    fill = draw(st.binary(min_size=1, max_size=20))
    return request, (fill * (size // len(fill) + 1))[:size]


messages = st.one_of(
    st.builds(
        lambda known, *rest: VoteRequest(known[0], rest[0], rest[1], known[1], rest[2]),
        terms_and_before, st.booleans(), indexes, st.booleans(),
    ),
    st.builds(VoteResponse, terms, terms, st.booleans(), st.sampled_from(VoteResult)),
    st.builds(HeartBeatRequest, terms, rounds, indexes),
    st.builds(HeartBeatResponse, terms, rounds, st.sampled_from(Code), st.booleans()),
    st.builds(
        lambda known, index: CompareRequest(known[0], index, known[1]), terms_and_before, indexes
    ),
    st.builds(
        lambda known, index: TruncateRequest(known[0], index, known[1], known[2]),
        terms_and_before, st.integers(0, INDEX_MAX),
    ),
    st.builds(CommitRequest, terms, indexes, indexes),
    st.builds(
        lambda known, *rest: InstallRequest(known[0], *rest[:2], known[1], rest[2]),
        terms_and_before, st.integers(0, INDEX_MAX), st.integers(0, SIGN - 1), nodes,
    ),
    st.builds(  # with learners, one of which replaces the only member
        lambda known, *rest: InstallRequest(
            known[0], *rest[:2], known[1], rest[2][:1], rest[2][1:], rest[2][:1]
        ),
        terms_and_before, st.integers(0, INDEX_MAX), st.integers(0, SIGN - 1), nodes,
    ),
    st.builds(
        lambda log, term, push, code, index, *rest: PushResponse(
            term, push, code, index, *log, *rest
        ),
        logs, terms, st.sampled_from(PushType), st.sampled_from(Code), indexes,
        st.integers(-1, TERM_MAX), indexes, st.booleans(),
    ),
    st.builds(TakeLeadership, terms),
)  # fmt: skip
frames = st.one_of(messages.map(lambda one: (one, None)), appends(), st.just((None, None)))


def encode(frame):
    message, data = frame
    if message is None:
        return KEEP_ALIVE
    return message_frame(message) if data is None else append_frames(message) + data


def feed(data, sizes):
    """Return what a receiver makes of the bytes, in pieces of these sizes, in turn."""
    receiver = FrameReceiver()
    out, at, turn = [], 0, 0
    while at < len(data):
        room = receiver.room()
        size = min(sizes[turn % len(sizes)], len(room), len(data) - at)
        room[:size] = data[at : at + size]
        for message, body in receiver.received(size):
            out.append((message, None if body is None else bytes(body)))
        at, turn = at + size, turn + 1
    return out


@given(st.lists(frames, max_size=5), st.lists(st.integers(1, 400_000), min_size=1, max_size=3))
def test_any_pieces_give_the_same_messages(sent, sizes):
    assert feed(b"".join(map(encode, sent)), sizes) == sent


@given(st.lists(frames, min_size=1, max_size=2), st.integers(1, 7))
def test_byte_by_byte(sent, size):
    data = b"".join(map(encode, sent))[:3000]
    whole = feed(data, [len(data)])
    assert feed(data, [size]) == whole == sent[: len(whole)]


def test_a_cut_frame_is_not_passed_on():
    request = AppendRequest(3, 4, 2, 1000, 100, ((3, 2),), 4)
    data = append_frames(request) + bytes(100)
    for end in range(len(data)):
        assert feed(data[:end], [end or 1]) == []
    assert feed(data, [len(data)]) == [(request, bytes(100))]


def control(payload, kind=MESSAGE_TYPE, size=None):
    return HEADER.pack(kind - SIGN, len(payload) if size is None else size) + payload


def raw(message, **changes):
    return msgspec.msgpack.encode({**msgspec.to_builtins(message), **changes})


APPEND = AppendRequest(3, 4, 2, 1000, 100, ((3, 2),), 4)
HUGE = (-(2**63), -(2**31), -2, 2**63, 2**64 - 1)


@pytest.mark.parametrize("size", [-1, -(2**31), 0, MESSAGE_BYTES_MAX + 1, 2**31 - 1])
def test_impossible_lengths_of_a_message(size):
    with pytest.raises(ProtocolError, match="at most 65536"):
        feed(control(b"", size=size), [100])


@pytest.mark.parametrize("size", [-1, -(2**31), 99, 101, DATA_BYTES_MAX + 1, 2**31 - 1, 0])
def test_bytes_that_do_not_fit_their_append(size):
    with pytest.raises(ProtocolError, match="after an append of 100 bytes"):
        feed(message_frame(APPEND) + HEADER.pack(1000, size), [500])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (HEADER.pack(5, 10), "without an append"),
        (HEADER.pack(5, 0), "without an append"),
        (HEADER.pack(0, -5), "without an append"),
        (message_frame(APPEND) + KEEP_ALIVE, "after an append"),
        (message_frame(APPEND) + HEADER.pack(1001, 100), "after an append"),
        (message_frame(APPEND) + message_frame(TakeLeadership(1)), "without its bytes"),
        (control(b"x", kind=1), "unknown control frame 1"),
        (control(b"x", kind=SIGN - 1), "unknown control frame"),
        (control(b"\xc1"), "not a message"),
        (control(b""), "a message of 0 bytes"),
        (control(msgspec.msgpack.encode({"type": "nothing"})), "not a message"),
        (control(msgspec.msgpack.encode({"type": "beat", "term": "1"})), "not a message"),
        (control(msgspec.msgpack.encode([1, 2, 3])), "not a message"),
        (control(message_frame(TakeLeadership(1))[12:] + b"\x00"), "not a message"),
    ],
)
def test_frames_out_of_place(data, text):
    with pytest.raises(ProtocolError, match=text):
        feed(data, [len(data)])


@pytest.mark.parametrize(
    "changes",
    [
        *({"term": n} for n in HUGE), {"term": -1}, {"term": 1}, {"prev_index": -2},
        {"prev_term": -2}, {"prev_term": 4}, {"committed_index": -2}, {"pos": -1},
        {"pos": 2**63 - 1}, {"size": 0}, {"size": -1}, {"size": 95}, {"size": DATA_BYTES_MAX + 1},
        {"runs": ()}, {"runs": ((3, 0),)}, {"runs": ((3, -1),)}, {"runs": ((3, 3),)},
        {"runs": ((2, 1), (1, 1))}, {"runs": ((1, 1),)}, {"runs": ((4, 1),)},
        {"runs": ((3, 2**40),)}, {"runs": ((3, 1, 1),)},
        {"members": ((4, (1,)),)}, {"members": ((7, (1,)),)}, {"members": ((5, (0,)),)},
        {"members": ((5, (65_536,)),)}, {"members": ((5, tuple(range(1, 1026))),)},
        {"members": ((5, ()),)}, {"members": ((5, (1, 2, 1)),)},
        {"term": TERM_MAX + 1}, {"runs": ((3, 1), (3, 1))}, {"runs": ((2, 1), (3, 0))},
        {"prev_index": INDEX_MAX - 1}, {"committed_index": INDEX_MAX + 1},
    ],
    ids=str,
)  # fmt: skip
def test_an_append_with_an_impossible_number(changes):
    with pytest.raises(ProtocolError):
        decode_message(raw(APPEND, **changes))


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (VoteRequest(1, False, 2, 1), ("ledger_end_index", "ledger_end_term")),
        (VoteResponse(1, 1, False, VoteResult.ACCEPT), ("term", "request_term")),
        (HeartBeatRequest(1, 1, 1), ("term", "round", "committed_index")),
        (HeartBeatResponse(1, 1, Code.SUCCESS), ("term", "round")),
        (CompareRequest(1, 1, 1), ("term", "index", "index_term")),
        (TruncateRequest(1, 1, 1), ("term", "index", "prev_term", "index_term")),
        (CommitRequest(1, 1), ("term", "committed_index", "recall_index")),
        (InstallRequest(1, 1, 1, 1, (1,)), ("term", "index", "pos", "prev_term")),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 0, 1),
         ("term", "index", "begin_index", "end_index", "hint_term", "hint_index")),
        (TakeLeadership(1), ("term",)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_numbers_outside_their_range_are_refused(message, fields):
    assert decode_message(raw(message)) == message
    for field in fields:
        for value in HUGE:
            with pytest.raises(ProtocolError):
                decode_message(raw(message, **{field: value}))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (TakeLeadership(TERM_MAX + 1), "term 4611686018427387904 is outside 0.."),
        (VoteRequest(0, False, 0, 0), "term 0 is outside 1.."),
        (VoteRequest(2, False, INDEX_MAX + 1, 1), "ledger_end_index 288230376151711744 is out"),
        (VoteRequest(2, False, 0, 3), "ledger_end_term 3 is outside -1..2"),
        (VoteResponse(1, TERM_MAX + 1, False, VoteResult.ACCEPT), "request_term"),
        (HeartBeatRequest(1, 0, 1), "round 0 is outside 1.."),
        (HeartBeatRequest(1, 1, INDEX_MAX + 1), "committed_index"),
        (HeartBeatResponse(1, 0, Code.SUCCESS), "round 0 is outside 1.."),
        (CompareRequest(1, INDEX_MAX + 1, 1), "index 288230376151711744"),
        (CompareRequest(1, 1, 2), "index_term 2 is outside -1..1"),
        (TruncateRequest(1, INDEX_MAX + 1, 1, 1), "index 288230376151711744"),
        (TruncateRequest(1, 1, 2, 1), "prev_term 2 is outside -1..1"),
        (TruncateRequest(1, 1, 1, 2), "index_term 2 is outside -1..1"),
        (CommitRequest(1, INDEX_MAX + 1), "committed_index"),
        (CommitRequest(1, 1, INDEX_MAX + 1), "recall_index"),
        (InstallRequest(1, INDEX_MAX + 1, 1, 1, (1,)), "index 288230376151711744"),
        (InstallRequest(1, 1, 1, 2, (1,)), "prev_term 2 is outside -1..1"),
        (InstallRequest(1, 1, 1, 1, ()), "number of members 0"),
        (InstallRequest(1, 1, 1, 1, (1, 2, 1)), "names a node twice"),
        (InstallRequest(1, 1, 1, 1, (0,)), "member 0 is outside 1..65535"),
        (InstallRequest(1, 1, 1, 1, (1,), (2, 65_536)), "member 65536 is outside 1..65535"),
        (InstallRequest(1, 1, 1, 1, (1, 2), (2,)), "names a node twice"),
        (InstallRequest(1, 1, 1, 1, (1, 2), (3,), (2, 2)), "names a node twice"),
        (InstallRequest(1, 1, 1, 1, (1, 2), (3,), (3,)), "as leaving that is no member"),
        (InstallRequest(1, 1, 1, 1, (1,), tuple(range(2, 1_027))), "number of learners 1025"),
        (msgspec.structs.replace(APPEND, members=(), learners=((APPEND.prev_index + 1, (9,), ()),)),
         "learners of an entry that is no member list"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, INDEX_MAX + 1, 0, 1), "index"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, -1, 1), "begin_index -1"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 3, 1), "begin_index 3 is outside 0..2"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 0, INDEX_MAX), "end_index"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 0, 1, TERM_MAX + 1), "hint_term"),
        (PushResponse(1, PushType.APPEND, Code.SUCCESS, 1, 0, 1, 1, INDEX_MAX + 1), "hint_index"),
    ],
    ids=str,
)  # fmt: skip
def test_a_message_that_cannot_be_true_ends_its_link_with_an_error(message, text):
    """A core ignores it; it must not be lost on the way without a word."""
    with pytest.raises(ProtocolError, match=re.escape(text)):
        decode_message(msgspec.msgpack.encode(message))


def test_unknown_fields_of_a_later_version_are_left_out():
    assert decode_message(raw(APPEND, later=[1, {"a": None}])) == APPEND


@given(st.binary(max_size=200), st.integers(1, 50))
def test_random_bytes_end_in_messages_or_a_protocol_error(data, size):
    for start in (b"", struct.pack(">Q", MESSAGE_TYPE + SIGN), message_frame(APPEND)):
        try:
            feed(start + data, [size])
        except ProtocolError:
            pass


@given(messages, st.data())
def test_changed_bytes_end_in_messages_or_a_protocol_error(message, data):
    frame = bytearray(message_frame(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        feed(bytes(frame), [len(frame)])
    except ProtocolError:
        pass


def test_the_answers_of_a_link_go_through_hello():
    for answer in (Linked(), StoreKnown(True), StoreKnown(False)):
        assert decode_answer(encode_answer(answer)) == answer


def test_a_hello_names_its_mode_and_a_later_version_may_say_more():
    hello = make_hello(purpose=Purpose.DLEDGER, mode="dledger", new_store=True, lost_disk=True)
    assert decode_hello(encode_hello(hello)) == hello
    fields = msgspec.to_builtins(hello, builtin_types=(bytes,))
    later = msgspec.msgpack.encode({**fields, "mode": "quorum of witnesses", "later": 1})
    assert decode_hello(later).mode == "quorum of witnesses"
    for wrong in ({"purpose": "witness"}, {"mode": 5}, {"lost_disk": 1}, {"node": 0}):
        with pytest.raises(ProtocolError):
            decode_hello(msgspec.msgpack.encode({**fields, **wrong}))
