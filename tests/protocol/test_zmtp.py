"""ZMTP: every reader fed whole, byte by byte and with trailing data; sizes, limits, errors."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hastore.protocol.zmtp import (
    GREETING_BYTES,
    MAX_COMMAND_BYTES,
    PIECE_BYTES,
    LandingConnection,
    Message,
    SocketType,
    State,
    ZmtpConnection,
    encode_front,
    encode_ping,
)

LIMITS = (70_000, 300_000)
SIZES = (0, 1, 254, 255, 256, 65_535, 65_536)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(48)
ERROR_HEAD = b"\x05ERROR"


def property_of(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


def command(name: bytes, data: bytes = b"") -> bytes:
    body = bytes((len(name),)) + name + data
    size = bytes((4, len(body))) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))
    return size + body


def ready(kind: bytes = b"DEALER", more: bytes = b"") -> bytes:
    return command(b"READY", property_of(b"Socket-Type", kind) + more)


SHAKEN = GREETING + ready()


def frame(body: bytes, flags: int = 0, *, long: bool = False) -> bytes:
    if long or len(body) > 255:
        return struct.pack(">BQ", flags | 2, len(body)) + body
    return bytes((flags, len(body))) + body


def message(*bodies: bytes) -> bytes:
    return b"".join(
        frame(body, 1 if place < len(bodies) - 1 else 0) for place, body in enumerate(bodies)
    )


def server(limits: tuple[int, ...] = LIMITS) -> ZmtpConnection:
    return ZmtpConnection(SocketType.ROUTER, limits)


def opened(limits: tuple[int, ...] = LIMITS) -> ZmtpConnection:
    connection = server(limits)
    assert connection.receive(SHAKEN) == []
    assert connection.is_open
    connection.take_output()
    return connection


Outcome = tuple[list[Message], str | None, State, bytes]


def feed(pieces: Iterable[bytes], limits: tuple[int, ...] = LIMITS) -> Outcome:
    """Return all results of some bytes; what is kept meanwhile never exceeds what was received."""
    connection = server(limits)
    got: list[Message] = []
    came = 0
    for piece in pieces:
        came += len(piece)
        got += connection.receive(piece)
        assert connection.held_bytes <= came
        assert connection.held_bytes <= sum(limits) + 9 * len(limits) + len(piece)
        if connection.failure is not None:
            assert connection.state is State.FAILED
            assert (connection.held_bytes, connection.missing_bytes) == (0, 0)
    return got, connection.failure, connection.state, connection.take_output()


def bytewise(data: bytes) -> Iterator[bytes]:
    return (data[at : at + 1] for at in range(len(data)))


def check_every_cut(data: bytes, limits: tuple[int, ...] = LIMITS) -> Outcome:
    """Feed whole, byte by byte, and in halves split at each place: the results are the same."""
    whole = feed([data], limits)
    assert feed(bytewise(data), limits) == whole
    for at in range(1, min(len(data), 400)):
        assert feed([data[:at], data[at:]], limits) == whole, at
    return whole


# -- the handshake


def test_a_handshake_and_messages_however_they_are_cut() -> None:
    data = SHAKEN + message(b"a") + message(b"b", b"c" * 300) + message(b"", b"")
    got, failure, state, output = check_every_cut(data)
    assert got == [(b"a",), (b"b", b"c" * 300), (b"", b"")]
    assert (failure, state) == (None, State.OPEN)
    assert output == GREETING[:8] + b"\x01" + GREETING[9:] + ready(b"ROUTER")


def test_two_ends_open_each_other() -> None:
    for pieces in (1, 7, 10_000):
        ends = ZmtpConnection(SocketType.DEALER, LIMITS), server()
        outputs = [end.take_output() for end in ends]
        for end, output in zip(ends, reversed(outputs), strict=True):
            for at in range(0, len(output), pieces):
                end.receive(output[at : at + pieces])
            assert end.is_open and end.failure is None and not end.has_output
            assert end.peer_minor == 1


def test_the_states_on_the_way() -> None:
    connection = server()
    states = [connection.state]
    for byte in bytewise(SHAKEN):
        connection.receive(byte)
        states.append(connection.state)
    greeting, shaking = State.AWAITING_GREETING, State.AWAITING_READY
    counted = [states.count(state) for state in (greeting, shaking, State.OPEN, State.FAILED)]
    assert counted == [GREETING_BYTES, len(ready()), 1, 0]
    assert states == sorted(states, key=[greeting, shaking, State.OPEN].index)


@pytest.mark.parametrize("end", ["dealer", "Dealer", "DEALER"])
def test_the_socket_type_alone_decides(end: str) -> None:
    _, failure, state, _ = feed([GREETING + ready(end.encode())])
    assert (state is State.OPEN) == (end == "DEALER"), failure


def test_property_names_ignore_case_and_unknown_ones_are_skipped() -> None:
    more = property_of(b"Identity", b"me") + property_of(b"X-Other", b"\0" * 99)
    body = property_of(b"SOCKET-type", b"DEALER") + more
    assert check_every_cut(GREETING + command(b"READY", body))[2] is State.OPEN
    body = more + property_of(b"socket-TYPE", b"DEALER")
    assert check_every_cut(GREETING + command(b"READY", body))[2] is State.OPEN


@pytest.mark.parametrize(("minor", "major"), [(0, 3), (1, 3), (7, 3), (0, 4), (255, 255)])
def test_versions_from_3_on_are_spoken(minor: int, major: int) -> None:
    connection = server()
    connection.receive(GREETING[:10] + bytes((major, minor)) + GREETING[12:] + ready())
    assert connection.is_open
    assert connection.peer_minor == (minor if major == 3 else 1)


PLAIN = GREETING[:12] + b"PLAIN" + bytes(47)
WRONG = {
    "ZMTP 1.0, anonymous": (b"\x01\x00", "not a ZMTP 3 greeting"),
    "ZMTP 1.0, an identity": (b"\x06\x00hello", "not a ZMTP 3 greeting"),
    "ZMTP 1.0, a long identity": (b"\xff" + bytes(7) + b"\x06\x00hello", "not a ZMTP 3 greeting"),
    "ZMTP 2.0": (b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00", "ZMTP 1 is not supported"),
    "ZMTP 2.1": (b"\xff" + bytes(8) + b"\x7f\x02\x05\x00\x00", "ZMTP 2 is not supported"),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", "not a ZMTP 3 greeting"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01", "the client speaks TLS, and this port does not"),
    "PLAIN": (PLAIN, "the mechanism b'PLAIN' is not supported; NULL is"),
    "CURVE": (GREETING[:12] + b"CURVE" + bytes(47), "the mechanism b'CURVE'"),
    "NULL and more": (GREETING[:12] + b"NULLX" + bytes(47), "the mechanism b'NULLX'"),
    "no mechanism": (GREETING[:12] + bytes(52), "the mechanism b''"),
    "a message": (GREETING + message(b"early"), "a message came before READY"),
    "PING": (GREETING + command(b"PING", b"\0\0"), "the command b'PING' came before READY"),
    "HELLO": (GREETING + command(b"HELLO", b"\1u\1p"), "the command b'HELLO' came before"),
    "ERROR": (GREETING + command(b"ERROR", b"\x02no"), "the peer refused the connection: 'no'"),
    "a bare ERROR": (GREETING + command(b"ERROR"), "the peer refused the connection: ''"),
    "another socket": (
        GREETING + ready(b"REQ"),
        "a ROUTER socket needs a DEALER socket as its peer, not b'REQ'",
    ),
    "no socket": (GREETING + command(b"READY"), "as its peer, not None"),
    "an unnamed command": (GREETING + b"\x04\x01\x00", "a command without a name"),
    "an empty command": (GREETING + b"\x04\x00", "a command without a name"),
    "a name without end": (GREETING + b"\x04\x03\x09ab", "a command without a name"),
    "a large command": (GREETING + b"\x06" + struct.pack(">Q", 513), "of 513 bytes; at most 512"),
    "a huge command": (GREETING + b"\x06" + b"\xff" * 8, f"of {2**64 - 1} bytes; at most 512"),
    "a large message": (GREETING + b"\x02" + struct.pack(">Q", 2**63), f"of {2**63} bytes"),
    "flags": (GREETING + b"\x08\x00", "a frame with the flags 0x08"),
    "COMMAND and MORE": (GREETING + b"\x05\x00", "a frame with the flags 0x05"),
    "an unnamed property": (
        GREETING + command(b"READY", property_of(b"", b"DEALER")),
        "a READY whose properties do not fit in it",
    ),
    "a property's value is cut": (
        GREETING + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x07DEALER"),
        "a READY whose properties do not fit in it",
    ),
    "a property's value is huge": (
        GREETING + command(b"READY", b"\x0bSocket-Type\xff\xff\xff\xffDEALER"),
        "a READY whose properties do not fit in it",
    ),
    "a property's size is cut": (
        GREETING + command(b"READY", b"\x0bSocket-Type\x00\x00"),
        "a READY whose properties do not fit in it",
    ),
    "a property's name is cut": (
        GREETING + command(b"READY", b"\xffSocket-Type\x00\x00\x00\x06DEALER"),
        "a READY whose properties do not fit in it",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_handshake_is_refused_with_its_reason(what: str) -> None:
    data, text = WRONG[what]
    got, failure, state, output = check_every_cut(data + SHAKEN + message(b"unseen"))
    assert got == [] and state is State.FAILED
    assert failure is not None and text in failure
    told = output.partition(ERROR_HEAD)[2]  # the peer is told why
    assert told[1:].decode() == failure[:255] and told[0] == len(told) - 1
    assert feed([data])[1] == failure, "more was waited for"


@pytest.mark.parametrize("what", [name for name in WRONG if name.startswith("ZMTP")])
def test_an_old_peer_is_refused_at_its_first_bytes(what: str) -> None:
    data, _ = WRONG[what]
    connection = server()
    for byte in bytewise(data[:11]):
        connection.receive(byte)
    assert connection.failure is not None


def test_a_dealer_wants_a_router() -> None:
    connection = ZmtpConnection(SocketType.DEALER, LIMITS)
    connection.receive(SHAKEN)
    assert connection.failure == (
        "a DEALER socket needs a ROUTER socket as its peer, not b'DEALER'"
    )


# -- frames


@pytest.mark.parametrize("size", SIZES)
def test_sizes_go_and_come(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    sent = {
        encode_front(body): (body,),
        encode_front(b"h" * 300, size) + body: (b"h" * 300, body),
        encode_front(body, 3) + b"end": (body, b"end"),
        frame(body, long=True): (body,),
        frame(body, 1, long=True) + frame(b"x", long=True): (body, b"x"),
    }
    for data, expected in sent.items():
        for behind in (b"", b"\0", message(b"next"), message(b"n", b"m") + b"\1"):
            connection = opened()
            got = connection.receive(data + behind)
            assert got[0] == expected
            assert len(got) == 1 + (len(behind) > 1)
            assert connection.held_bytes == (1 if behind.endswith((b"\0", b"\1")) else 0)
    connection = opened()
    pieces = [connection.receive(byte) for byte in bytewise(encode_front(body))]
    assert pieces[-1] == [(body,)] and not any(pieces[:-1])


@pytest.mark.parametrize("limit", [0, 1, 100, 255, 256, 65_536])
@pytest.mark.parametrize("long", [False, True])
def test_a_limit_is_exact_and_checked_before_the_body_comes(limit: int, long: bool) -> None:
    limits = (limit, limit + 5)
    if limit < 256 or long:
        for first, second in ((limit, limit + 5), (0, 0)):
            data = frame(bytes(first), 1, long=long) + frame(bytes(second), long=long)
            assert opened(limits).receive(data) == [(bytes(first), bytes(second))]
    for before, size, most in ((b"", limit + 1, limit), (frame(b"", 1), limit + 6, limit + 5)):
        head = frame(bytes(size), long=long)[: -size or None]
        connection = opened(limits)
        assert connection.receive(before + head) == []
        assert connection.failure == f"a frame of {size} bytes; at most {most}"
        assert connection.held_bytes == 0


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("flags", [0x02, 0x03, 0x06])
def test_a_huge_size_is_refused_as_soon_as_it_is_read(size: int, flags: int) -> None:
    head = struct.pack(">BQ", flags, size)
    connection = opened()
    for byte in bytewise(head[:-1]):
        assert connection.receive(byte) == []
        assert connection.failure is None
    assert connection.receive(head[-1:] + b"x" * 100) == []
    limit = MAX_COMMAND_BYTES if flags & 4 else LIMITS[0]
    assert connection.failure == f"a frame of {size} bytes; at most {limit}"


@pytest.mark.parametrize("flags", range(256))
def test_every_byte_of_flags(flags: int) -> None:
    known = flags < 8 and flags not in (5, 7)
    size = struct.pack(">Q", 6) if flags & 2 else b"\6"
    data = SHAKEN + bytes((flags,)) + size + b"\4PONGx" + message(b"end")
    got, failure, state, _ = check_every_cut(data)
    if not known:
        assert failure == f"a frame with the flags {flags:#04x}" and state is State.FAILED
    else:
        body = [] if flags & 4 else [b"\4PONGx"]
        assert got == ([(*body, b"end")] if flags & 1 else [*zip(body), (b"end",)])


def test_more_frames_than_the_limits_name_are_refused() -> None:
    got, failure, _, _ = check_every_cut(SHAKEN + message(b"a", b"b") + message(b"1", b"2", b"3"))
    assert got == [(b"a", b"b")]
    assert failure == "a message of more than 2 frames"


def test_messages_before_an_error_are_returned() -> None:
    for wrong in (b"\xf0\0", command(b"READY"), command(b"ERROR", b"\3bye"), b"\4\0"):
        data = SHAKEN + message(b"1") + message(b"2", b"") + wrong + message(b"3")
        got, failure, _, _ = check_every_cut(data)
        assert got == [(b"1",), (b"2", b"")]
        assert failure is not None


def test_an_unfinished_message_is_held_and_counted_even_when_it_is_empty() -> None:
    connection = opened()
    connection.receive(frame(b"", 1))
    assert connection.held_bytes == 2
    connection.receive(frame(b"abc", 0)[:3])
    assert connection.held_bytes == 5
    assert connection.missing_bytes == 2
    assert connection.receive(b"bc") == [(b"", b"abc")]
    assert connection.held_bytes == 0


def test_missing_bytes_lead_to_the_end_of_the_frame() -> None:
    data = frame(bytes(100_000), 1) + frame(bytes(200_000))
    connection = opened((100_000, 200_000))
    at, reads = 0, 0
    while at < len(data):
        step = connection.missing_bytes or 2
        got = connection.receive(data[at : at + step])
        at += step
        reads += 1
    assert got == [(bytes(100_000), bytes(200_000))]
    assert reads == 6  # for each frame: two bytes, the rest of its head, its body


# -- commands


def test_a_ping_is_answered_with_its_context() -> None:
    for context in (b"", b"x", b"sixteen bytes ok"):
        data = SHAKEN + message(b"a") + command(b"PING", b"\0\x28" + context) + message(b"b")
        got, failure, _, output = check_every_cut(data)
        assert got == [(b"a",), (b"b",)] and failure is None
        assert output.endswith(ready(b"ROUTER") + command(b"PONG", context))


def test_own_pings_are_answered_and_pongs_ignored() -> None:
    connection = opened()
    assert encode_ping(6_000) == command(b"PING", b"\0\x3c")
    assert encode_ping(65_535 * 100)[-2:] == b"\xff\xff"
    assert connection.receive(encode_ping(6_000) * 3) == []
    assert connection.has_output
    pongs = connection.take_output()
    assert pongs == command(b"PONG") * 3
    assert not connection.has_output and connection.take_output() == b""
    assert connection.receive(pongs) == [] and not connection.has_output


WRONG_COMMANDS = {
    "a PING without a ttl": (command(b"PING", b"\0"), "a PING of 1 bytes"),
    "a bare PING": (command(b"PING"), "a PING of 0 bytes"),
    "a long context": (command(b"PING", bytes(19)), "a PING of 19 bytes"),
    "a second READY": (ready(), "a second READY"),
    "ERROR": (command(b"ERROR", b"\4why?"), "the peer gave up: 'why?'"),
    "ERROR without a reason": (command(b"ERROR"), "the peer gave up: ''"),
    "ERROR of many lines": (command(b"ERROR", b"\3a\nb\xff"), r"the peer gave up: 'a\nb�'"),
    "an unnamed command": (b"\4\1\0", "a command without a name"),
    "an empty command": (b"\4\0", "a command without a name"),
    "a large command": (command(b"X" * 9, bytes(503)), "a frame of 513 bytes; at most 512"),
}


@pytest.mark.parametrize("what", WRONG_COMMANDS)
def test_a_wrong_command_is_refused(what: str) -> None:
    data, text = WRONG_COMMANDS[what]
    assert check_every_cut(SHAKEN + data + message(b"unseen"))[:2] == ([], text)


@pytest.mark.parametrize("name", [b"PONG", b"SUBSCRIBE", b"CANCEL", b"X"])
def test_commands_of_later_versions_are_skipped(name: bytes) -> None:
    data = SHAKEN + command(name, bytes(200)) + command(name, bytes(MAX_COMMAND_BYTES - 20))
    assert check_every_cut(data + message(b"a"))[:2] == ([(b"a",)], None)


def test_commands_between_the_frames_of_a_message() -> None:
    ping = command(b"PING", b"\0\1ctx")
    data = SHAKEN + frame(b"a", 1) + ping + frame(b"b") + ping + message(b"c")
    got, failure, _, output = check_every_cut(data)
    assert got == [(b"a", b"b"), (b"c",)] and failure is None
    assert output.endswith(command(b"PONG", b"ctx") * 2)


# -- payloads in place


@given(
    st.lists(
        st.lists(st.sampled_from((0, 3, 255, PIECE_BYTES, PIECE_BYTES + 1, 60_000)), max_size=3),
        max_size=6,
    ),
    st.lists(st.integers(1, 9_000), min_size=1),
)
def test_payloads_in_place_are_those_that_are_joined(
    sizes: list[list[int]], reads: list[int]
) -> None:
    bodies = [
        [bytes((number + at) % 251 for at in range(size)) for size in of_one]
        for number, of_one in enumerate(sizes)
        if of_one
    ]
    data = SHAKEN + b"".join(message(*each) for each in bodies)
    joined = server()
    wanted = joined.receive(data)
    landing = LandingConnection(SocketType.ROUTER, LIMITS)
    got: list[Message] = []
    place = at = 0
    while at < len(data):
        size = reads[place % len(reads)]
        place += 1
        gap = landing.gap
        if gap:
            size = min(size, len(gap))
            gap[:size] = data[at : at + size]
            came = landing.fill(size)
        else:
            came = landing.receive(data[at : at + size])
        at += size
        landed, landing.landed = landing.landed, None
        if landed is not None:
            assert came[-1][-1] == b""
            came[-1] = (*came[-1][:-1], bytes(landed))
        got += came
        if landing.failure is not None:
            break
    assert got == wanted
    assert landing.failure == joined.failure
    assert landing.held_bytes == joined.held_bytes


# -- after a failure


def test_after_a_failure_nothing_is_kept_and_nothing_comes() -> None:
    for unfinished in (b"", b"\1", frame(b"a", 1), frame(bytes(60_000))[:-1]):
        connection = opened()
        connection.receive(unfinished)
        connection.fail("it takes too long")
        assert (connection.held_bytes, connection.missing_bytes) == (0, 0)
        assert connection.take_output() == command(b"ERROR", b"\x11it takes too long")
        connection.fail("another reason")
        for data in (b"x", message(b"a"), SHAKEN, bytes(100_000)):
            assert connection.receive(data) == []
        assert connection.failure == "it takes too long"
        assert (connection.held_bytes, connection.has_output) == (0, False)


def test_a_reason_is_cut_to_the_size_of_an_error() -> None:
    for reason in ("x" * 1_000, "ü" * 400, "\udc80" * 300):
        connection = opened()
        connection.fail(reason)
        output = connection.take_output()
        assert output[:2] == b"\x06\0" and len(output) == 9 + 6 + 1 + 255
        assert output[15] == 255


# -- anything

BODIES = st.binary(max_size=300) | st.sampled_from(SIZES).map(bytes)
MESSAGES = st.lists(st.one_of(st.tuples(BODIES), st.tuples(BODIES, BODIES)), max_size=5)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in zip(ends, ends[1:], strict=False)]


@given(MESSAGES, st.lists(st.integers(0, 2**20)), st.booleans())
def test_messages_come_as_they_went(messages: list[Message], places: list[int], long: bool) -> None:
    data = SHAKEN
    for each in messages:
        if long:
            data += b"".join(frame(b, 1, long=True) for b in each[:-1])
            data += frame(each[-1], long=True)
        elif len(each) == 1:
            data += encode_front(each[0])
        else:
            data += encode_front(each[0], len(each[1])) + each[1]
    assert feed(cut(data, places))[:2] == (messages, None)


PARTS = st.one_of(
    st.binary(max_size=20),
    st.binary(max_size=300).map(frame),
    st.binary(max_size=20).map(lambda body: frame(body, 1)),
    st.binary(max_size=20).map(lambda body: frame(body, long=True)),
    st.tuples(st.sampled_from([b"PING", b"PONG", b"READY", b"ERROR"]), st.binary(max_size=20)).map(
        lambda pair: command(*pair)
    ),
    st.tuples(st.integers(0, 255), st.integers(0, 2**64 - 1)).map(
        lambda pair: struct.pack(">BQ", *pair)
    ),
)


@given(
    st.sampled_from([b"", GREETING, SHAKEN, SHAKEN, SHAKEN]),
    st.lists(PARTS, max_size=8).map(b"".join),
    st.lists(st.integers(0, 2**12)),
)
@example(SHAKEN, b"\1\0\1\0", [70])
def test_any_bytes_give_the_same_however_they_are_cut(
    begin: bytes, data: bytes, places: list[int]
) -> None:
    whole = feed([begin + data])
    assert feed(cut(begin + data, places)) == whole
    assert feed(bytewise(begin + data)) == whole
