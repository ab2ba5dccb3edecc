"""The client API's messages: round trips, bounds, invalid bytes."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hastore.errors import ProtocolError
from hastore.protocol import api

PLACES = api.NodePlaces("tcp://h:1", "h:2", "h:3")
ONCE = api.OnceOptions("promote", 65537, True, True, True, 3)
REQUESTS = [
    api.Put(1, -1, True, 3000, 4, 5),
    api.Put(2),
    api.Pull(3, "t", 0, api.Position(5, 65537, 100), 10, 1000, 50),
    api.FindKey(4, "t", "k"),
    api.FindOffset(5, 77),
    api.FindTime(6, "t", 1, 1_700_000_000_000),
    api.AskMap(7),
    api.AskStatus(8),
    api.AskTopics(9, "t"),
    api.Commit(10, "g", "t", {0: api.Position(1), 3: api.Position(2, 0, 9)}),
    api.Fetch(11, "g", "t"),
    api.AskDigest(12, 0, 4096, "sha256"),
    api.AskDigest(13, 5, 5),
    api.AskBytes(14, 100, 200),
    api.AskProducer(12, "p"),
    api.Administer(15, "c", "g", 2, api.NodesChange(3, 4, PLACES), "f" * 64),
    api.Administer(15, "c", "g", 2, api.RoleChange("12345678", "SLAVE"), "f" * 64),
    api.Administer(15, "c", "g", 2, api.RoleChange("12345678", "SYNC_MASTER", ONCE)),
    api.Administer(16, "c", "g", 2, api.NodesChange(3)),
    api.Administer(17, "c", "g", 1, api.MembersChange("12345678", "replace", 3, 7, [1, 2, 3], 4)),
]
REPLIES = [
    api.PutDone(1, api.Status.PUT_OK, 65537, "SYNC_MEM(1)", [0, 100], [1, 1], [5, 6]),
    api.PutDone(2, api.Status.BUSY, 0, reason="full", master="tcp://h:1"),
    api.Pulled(3, api.PullStatus.FOUND, 7, 0, 9, 2, [(65537, 0)]),
    api.Pulled(3, api.PullStatus.HISTORY_DIFFERS, common=api.Position(4, 1, 2)),
    api.Found(4, 1),
    api.TimeFound(6, 12),
    api.Map(7, api.MapInfo(1, "SLAVE", 5, False, nodes={1: "tcp://h:1"}, reason="a slave")),
    api.NodeStatus(8, {"node": 1, "slaves": [{"lag_bytes": 0}]}),
    api.Topics(9, {"t": {0: (0, 5)}}),
    api.Topics(9, {"t": {0: (3, 5), 1: (2, 2)}}, 4, {"t": {0: 3, 1: 2}}),
    api.Positions(11, {0: api.Position(3)}),
    api.ProducerKnown(12, 65537, 99, 3),
    api.Failed(12, "BUSY", "later"),
    api.RangeDigest(13, bytes(16), 0, 4096, [(65537, 0)]),
    api.RangeDigest(13, None, 50, 60),
    api.RangeBytes(14, True, 0, 4096, [(0, 100)]),
    api.Administered(15, True, "/etc/n.yaml", "f" * 64, {1: PLACES, 4: PLACES}, "SLAVE"),
    api.Administered(17, False),
]


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_requests_come_back_equal(message: api.Request) -> None:
    assert api.decode_request(api.encode(message)) == message


@pytest.mark.parametrize("message", REPLIES, ids=lambda m: type(m).__name__)
def test_replies_come_back_equal(message: api.Reply) -> None:
    assert api.decode_reply(api.encode(message)) == message


@pytest.mark.parametrize("message", REQUESTS, ids=lambda m: type(m).__name__)
def test_every_shorter_form_is_refused_or_has_defaults(message: api.Request) -> None:
    whole = api.encode(message)
    for size in range(len(whole)):
        with pytest.raises(ProtocolError):
            api.decode_request(whole[:size])
    with pytest.raises(ProtocolError):
        api.decode_request(whole + b"\0")


def test_a_newer_client_may_say_more() -> None:
    raw = msgspec.msgpack.decode(api.encode(api.AskMap(7)))
    assert api.decode_request(msgspec.msgpack.encode([*raw, "news"])) == api.AskMap(7)


@pytest.mark.parametrize("value", [-1, -(2**31), 2**63, 2**64 - 1])
@pytest.mark.parametrize("field", ["rid", "queue_id", "queue_offset", "max_bytes", "wait_ms"])
def test_numbers_out_of_range_are_refused(field: str, value: int) -> None:
    fields = {"rid": 1, "queue_id": 0, "queue_offset": 0, "max_bytes": 1, "wait_ms": 0}
    fields[field] = value
    raw = [
        "pull", fields["rid"], "t", fields["queue_id"], [fields["queue_offset"]], 10,
        fields["max_bytes"], fields["wait_ms"],
    ]  # fmt: skip
    with pytest.raises(ProtocolError):
        api.decode_request(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("acks", [-2, 2, 2**31 - 1, "all", 1.5, True])
def test_acks_are_minus_one_to_one(acks: object) -> None:
    with pytest.raises(ProtocolError):
        api.decode_request(msgspec.msgpack.encode(["put", 1, acks]))


@pytest.mark.parametrize("topic", ["", "x" * 32768, b"bytes", None, 7])
def test_names_are_bounded_text(topic: object) -> None:
    with pytest.raises(ProtocolError):
        api.decode_request(msgspec.msgpack.encode(["fetch", 1, "g", topic]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x91" * 60_000,  # nested arrays
        b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
        b"\xc6\xff\xff\xff\xffx",  # bytes of 2^32 - 1
        b"\x92\xa3map\xd9\xff",
        b"\x92\xa3map\xcf" + b"\xff" * 8,
        b"\x92\xa3\xff\xfe\xfd\x01",  # a tag that is no UTF-8
        b"\x00" * 65_537,  # beyond the header's bound
        api.encode(REPLIES[0]),
    ],
)
def test_bytes_that_are_no_request(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        api.decode_request(raw)


@settings(max_examples=500, deadline=None, print_blob=True)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_protocol_error(raw: bytes) -> None:
    for decode in (api.decode_request, api.decode_reply):
        try:
            decode(raw)
        except ProtocolError:
            continue


@settings(max_examples=500, deadline=None, print_blob=True)
@given(st.sampled_from(REQUESTS), st.data())
def test_a_changed_byte_gives_a_message_or_a_protocol_error(
    message: api.Request, data: st.DataObject
) -> None:
    raw = bytearray(api.encode(message))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        assert api.decode_request(bytes(raw)).rid >= 0
    except ProtocolError:
        return


@pytest.mark.parametrize(
    "change",
    [
        ["nodes", 0], ["nodes", 65_536], ["nodes", "3"], ["nodes", None, 4, ["tcp://h:1", "h:2"]],
        ["nodes", None, 4, ["", "h:2", "h:3"]], ["nodes", None, 4, ["x" * 513, "h:2", "h:3"]],
        ["members", "1234567", "add", 4, 1, [1]], ["members", "x" * 65, "add", 4, 1, [1]],
        ["members", "12345678", "x" * 33, 4, 1, [1]], ["members", "12345678", "add", 4, -1, [1]],
        ["members", "12345678", "add", 4, 1, []], ["members", "12345678", "add", 4, 1, [0]],
        ["members", "12345678", "add", 4, 1, [1] * (api.MAX_MEMBERS + 1)],
        ["role", "12345678", ""], ["role", "1234567", "SLAVE"], ["role", "12345678", "x" * 33],
        ["role", "12345678", "SLAVE", ["promote", -1]], ["role", "12345678", "SLAVE", ["promote"]],
        ["role", "12345678", "SLAVE", ["promote", 1, False, False, False, 0]],
        ["other", 3], [], None,
    ],
)  # fmt: skip
def test_what_an_administrator_asks_for_is_bounded(change: object) -> None:
    with pytest.raises(ProtocolError):
        api.decode_request(msgspec.msgpack.encode(["administer", 1, "c", "g", 2, change]))
