"""HELLO's codec and proofs: whole, cut, padded, with impossible values, reflected, replayed."""

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.errors import AuthenticationError, ProtocolError
from hastore.protocol.hello import (
    ANSWER_MAGIC,
    CALL_MAGIC,
    HELLO_BYTES_MAX,
    LENGTH_BYTES,
    NONCE_BYTES,
    CopyFrom,
    Hello,
    Promised,
    Purpose,
    Refused,
    Resync,
    RewindTo,
    StreamFrom,
    Surveyed,
    WireEpoch,
    answerer_proof,
    caller_proof,
    check_proof,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
    frame,
    frame_length,
)

SECRET = b"sixteen bytes or more"


def make_hello(**changes):
    fields = {
        "purpose": Purpose.FOLLOW, "cluster": "c", "group": "g", "node": 2, "store_id": "ab" * 16,
        "role": "SLAVE", "open_epoch": 0, "promised_epoch": 65537,
        "history": (WireEpoch(65537, 0, 1, (1, 2, 3)), WireEpoch(131074, 900, 2, (1, 2, 3))),
        "min_offset": 0, "max_offset": 1000, "confirmed_offset": 900, "ack_point": "written",
        "unclean": False, "largest_frame": 1 << 20, "file_size": 1 << 30, "nonce": bytes(32),
    }  # fmt: skip
    return Hello(**{**fields, **changes})


def raw(**changes):
    """A HELLO's bytes with fields of any type."""
    fields = msgspec.to_builtins(make_hello(), builtin_types=(bytes,))
    return msgspec.msgpack.encode({**fields, **changes})


epochs = st.lists(
    st.tuples(st.integers(0, 2**61), st.integers(0, 2**62), st.integers(0, 3)), max_size=8
).map(
    lambda raws: tuple(
        WireEpoch(epoch, start, acks, (1, 2))
        for (epoch, _, acks), start in zip(
            sorted({r[0]: r for r in raws}.values()), sorted(r[1] for r in raws), strict=False
        )
    )
)


@given(epochs, st.integers(1, 65535), st.integers(0, 2**62), st.sampled_from(Purpose))
def test_a_hello_comes_back_as_it_went(history, node, end, purpose):
    hello = make_hello(
        history=history, node=node, max_offset=end, confirmed_offset=end // 2, purpose=purpose
    )
    assert decode_hello(encode_hello(hello)) == hello


@pytest.mark.parametrize(
    "answer",
    [
        Surveyed(), Promised((WireEpoch(65537, 0, 1, (1, 2)),), 77, True), StreamFrom(12),
        RewindTo(5, 1), Resync(65536, (WireEpoch(65537, 0, 1, (1, 2)),)), CopyFrom(9),
        Refused("because", 131074),
    ],
)  # fmt: skip
def test_an_answer_comes_back_as_it_went(answer):
    data = encode_answer(answer)
    assert decode_answer(data) == answer
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_answer(data[:end])
    with pytest.raises(ProtocolError):
        decode_answer(data + b"\0")


def test_a_cut_or_padded_hello_is_refused():
    data = encode_hello(make_hello())
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            decode_hello(data[:end])
    with pytest.raises(ProtocolError):
        decode_hello(data + b"\xc0")


@given(st.binary(max_size=300))
def test_any_bytes_are_no_hello(data):
    for decode in (decode_hello, decode_answer):
        with pytest.raises(ProtocolError):
            decode(data)


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_still_makes_sense(place, value):
    data = bytearray(encode_hello(make_hello()))
    data[place % len(data)] = value
    try:
        hello = decode_hello(bytes(data))
    except ProtocolError:
        return
    assert 1 <= hello.node <= 65535 and 0 <= hello.min_offset <= hello.max_offset


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 0}, {"node": 65536}, {"node": -1}, {"nonce": bytes(31)}, {"nonce": bytes(33)},
        {"nonce": b""}, {"min_offset": -1}, {"max_offset": 1 << 63}, {"max_offset": -1},
        {"min_offset": 1001}, {"confirmed_offset": 1001}, {"confirmed_offset": -1},
        {"promised_epoch": -1}, {"promised_epoch": 1 << 62}, {"open_epoch": -1},
        {"open_epoch": 1 << 62}, {"purpose": "rule"}, {"ack_point": "hoped"}, {"unclean": 1},
        {"history": [[5, 0, 1, [1]], [5, 9, 1, [1]]]}, {"history": [[6, 0, 1, []], [5, 9, 1, []]]},
        {"history": [[5, 9, 1, [1]], [6, 8, 1, [1]]]}, {"history": [[5, -1, 1, [1]]]},
        {"history": [[-1, 0, 1, [1]]]}, {"history": [[1 << 62, 0, 1, [1]]]},
        {"history": [[5, 0, 1]]}, {"history": "x"}, {"cluster": b"c"}, {"node": "2"},
        {"max_offset": 2.5},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_values_are_refused(changes):
    assert decode_hello(raw()) == make_hello()
    with pytest.raises(ProtocolError):
        decode_hello(raw(**changes))


@pytest.mark.parametrize("length", [HELLO_BYTES_MAX + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_length_beyond_the_limit_is_refused_before_anything_is_read(length):
    with pytest.raises(ProtocolError, match="at most"):
        frame_length(struct.pack(">I", length))


@pytest.mark.parametrize("length", [0, 1, HELLO_BYTES_MAX])
def test_a_length_up_to_the_limit_is_taken(length):
    assert frame_length(struct.pack(">I", length)) == length
    assert frame(bytes(length)) == struct.pack(">I", length) + bytes(length)


def test_a_payload_that_is_too_long_is_not_sent():
    with pytest.raises(ProtocolError, match="limit"):
        frame(bytes(HELLO_BYTES_MAX + 1))


def test_the_magics_are_no_classic_report():
    for magic in (CALL_MAGIC, ANSWER_MAGIC):
        assert len(magic) == 8 and struct.unpack(">q", magic)[0] < 0
    assert CALL_MAGIC != ANSWER_MAGIC and LENGTH_BYTES == 4


def test_proofs_bind_both_hellos_the_direction_and_the_answer():
    mine = encode_hello(make_hello(nonce=b"a" * NONCE_BYTES))
    theirs = encode_hello(make_hello(nonce=b"b" * NONCE_BYTES, node=1))
    fresh = encode_hello(make_hello(nonce=b"c" * NONCE_BYTES, node=1))
    answer = encode_answer(StreamFrom(5))
    proof = caller_proof(SECRET, mine, theirs)
    check_proof(caller_proof(SECRET, mine, theirs), proof)
    others = [
        caller_proof(b"another secret, as long", mine, theirs),
        caller_proof(SECRET, theirs, mine),  # swapped
        caller_proof(SECRET, mine, fresh),  # replayed on another connection
        answerer_proof(SECRET, mine, theirs, answer),  # reflected
        answerer_proof(SECRET, mine, theirs, b""),
        b"", proof[:-1], proof + b"\0", bytes(32),
    ]  # fmt: skip
    for other in others:
        with pytest.raises(AuthenticationError):
            check_proof(proof, other)
    forged = encode_answer(StreamFrom(6))
    with pytest.raises(AuthenticationError):
        check_proof(
            answerer_proof(SECRET, mine, theirs, answer),
            answerer_proof(SECRET, mine, theirs, forged),
        )


def test_parts_do_not_run_into_each_other():
    assert caller_proof(SECRET, b"ab", b"c") != caller_proof(SECRET, b"a", b"bc")


def test_without_a_secret_proofs_are_empty_and_a_secret_is_refused():
    assert caller_proof(None, b"a", b"b") == answerer_proof(None, b"a", b"b", b"c") == b""
    check_proof(b"", b"")
    with pytest.raises(AuthenticationError):
        check_proof(b"", caller_proof(SECRET, b"a", b"b"))
    with pytest.raises(AuthenticationError):
        check_proof(caller_proof(SECRET, b"a", b"b"), b"")
