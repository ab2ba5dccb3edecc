"""HELLO and its answers, as two nodes open a connection."""

from __future__ import annotations

from hastore.errors import ProtocolError
from hastore.protocol.hello import (
    HELLO_BYTES_MAX,
    LENGTH_BYTES,
    CopyFrom,
    Forwarding,
    Hello,
    Linked,
    Promised,
    Purpose,
    RangeOf,
    Refused,
    Resync,
    RewindTo,
    StoreKnown,
    StreamFrom,
    Surveyed,
    WireEpoch,
    _check_hello,
    decode_answer,
    decode_hello,
    encode_answer,
    encode_hello,
    frame,
    frame_length,
)
from tests.fuzz import kit

REACHES = (decode_hello, decode_answer, frame_length, _check_hello)
LEAST = kit.Least(0.4, 6)
TOKENS = tuple(
    bytes((0xA0 | len(word),)) + word.encode()
    for word in ("type", "node", "nonce", "history", "promised", "refused", "range", "stores")
)

DEEP = b"\x91" * 1_500 + b"\xc0"  # lists in lists, which a reader that recurses cannot read


def hello(**changes: object) -> bytes:
    """Return a HELLO."""
    fields: dict[str, object] = {
        "purpose": Purpose.FOLLOW, "cluster": "c", "group": "g", "node": 2, "store_id": "a" * 32,
        "role": "SLAVE", "open_epoch": 0, "promised_epoch": 4,
        "history": (WireEpoch(1, 0, 2, (1, 2, 3)), WireEpoch(4, 900, 1, (1, 2))),
        "min_offset": 0, "max_offset": 1_000, "confirmed_offset": 900, "ack_point": "written",
        "unclean": False, "largest_frame": 1 << 20, "file_size": 1 << 30, "nonce": bytes(32),
    }  # fmt: skip
    return encode_hello(Hello(**{**fields, **changes}))  # type: ignore[arg-type]


def seeds() -> list[bytes]:
    """Return HELLOs and each answer, in frames."""
    hellos = [
        hello(),
        hello(purpose=Purpose.REPAIR, nodes=(1, 2), copy_from=5, copy_to=9, digest=b"d" * 32),
        hello(mode="dledger", stores={1: "s"}, replaced_stores={2: ("t", "u")}, group_id="g"),
        hello(node=0), hello(min_offset=5, max_offset=4), hello(nonce=b"x"),
        hello(history=(WireEpoch(4, 0, 1, ()), WireEpoch(3, 0, 1, ()))),
        hello(digest=b"x"), hello(confirmed_offset=2**40), hello(group_id="g" * 65),
        hello(open_epoch=1 << 62), hello(digest_to=2**40),
    ]  # fmt: skip
    answers = [
        Surveyed(), Promised((WireEpoch(1, 0, 1, (1,)),), 5, True, 1, 2, ((1, 2),)), StreamFrom(7),
        RewindTo(5, 1), Resync(9, (WireEpoch(1, 0, 1, ()),)), CopyFrom(1), Linked(),
        StoreKnown(True, (1,), ("a",)), Forwarding(5, 6, True), RangeOf(0, 9, b"raw", ((1, 0),)),
        Refused("no", 7, (1, 2, (3,))),
    ]  # fmt: skip
    return [
        *(b"h" + frame(one) for one in hellos),
        *(b"a" + frame(encode_answer(one)) for one in answers),
        b"h" + (HELLO_BYTES_MAX + 1).to_bytes(4),
        b"h" + frame(b"\x81\xa1x" + DEEP),
        b"a" + frame(b"\x82\xa4type\xa8surveyed\xa1x" + DEEP),
    ]


def repaired(data: bytes) -> bytes:
    """Return the input with the right length."""
    return data[:1] + max(0, len(data) - 1 - LENGTH_BYTES).to_bytes(4) + data[1 + LENGTH_BYTES :]


def one(data: bytes) -> None:
    """Read a frame; what is in it is written and read again."""
    kind, header, rest = data[:1], data[1 : 1 + LENGTH_BYTES], data[1 + LENGTH_BYTES :]
    kit.refuse(len(header) == LENGTH_BYTES, "no length")
    with kit.documented(ProtocolError):
        length = frame_length(header)
    assert 0 <= length <= HELLO_BYTES_MAX
    payload = rest[:length]
    kit.refuse(len(payload) == length, "a frame that is not complete")
    with kit.documented(ProtocolError):
        if kind == b"h":
            said = decode_hello(payload)
            again = encode_hello(said)
            assert decode_hello(again) == said
            assert encode_hello(decode_hello(again)) == again
        else:
            answer = decode_answer(payload)
            written = encode_answer(answer)
            assert decode_answer(written) == answer
