"""The link on which a node forwards requests of RocketMQ's clients to the master."""

from __future__ import annotations

from hastore.errors import ProtocolError
from hastore.protocol import forward_link
from hastore.protocol.forward_link import (
    FRAME_BYTES_MAX,
    KEEP_ALIVE,
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
from tests.fuzz import kit

REACHES = (LinkReceiver.received, LinkReceiver._checked, client_request, forward_link.reason_of)
LEAST = kit.Least(0.4, 3)
MEMORY_BYTES = 80 * 1024 * 1024  # a frame of 16 MiB, for each way to cut the input
REQUESTS = frozenset({Kind.REQUEST, Kind.AGED})
ANSWERS = frozenset(Kind) - REQUESTS


def seeds() -> list[bytes]:
    """Return both directions: the first byte says which."""
    one = ClientRequest(b"\x7f\0\0\x01", 4_242, b"the frame of a client", 250)
    other = ClientRequest(bytes(16), 1, b"")
    requests = [request_frame(1, one), request_frame(2**64 - 1, one, aged=True)]
    requests += [request_frame(3, other, aged=True), KEEP_ALIVE]
    answers = [
        answer_frame(1, b"answer"), answer_frame(2, b""), refused_frame(3, "no"),
        unknown_frame(4, "perhaps"), unknown_frame(5, "late", is_late=True), KEEP_ALIVE,
    ]  # fmt: skip
    return [
        *(b"\0" + each for each in requests), b"\0" + b"".join(requests),
        *(b"\1" + each for each in answers), b"\1" + b"".join(answers),
        b"\1" + requests[0], b"\0" + (FRAME_BYTES_MAX + 1).to_bytes(4) + bytes(9),
        b"\0" + request_frame(1, one._replace(host=b"abc")), b"\0" + requests[1][:13 + 2],
    ]  # fmt: skip


def repaired(data: bytes) -> bytes:
    """Return the input as one frame with the right length."""
    return data[:1] + max(0, len(data) - 5).to_bytes(4) + data[5:]


def received(kinds: frozenset[Kind], pieces: list[bytes]) -> tuple[list[LinkFrame], str | None]:
    """Return the frames, and why the link refused what follows."""
    found: list[LinkFrame] = []
    try:
        for frame in kit.fed(LinkReceiver(kinds), pieces, FRAME_BYTES_MAX):
            found.append(frame)  # those before the wrong one are kept
    except ProtocolError as refused:
        return found, str(refused)
    return found, None


def one(data: bytes) -> None:
    """Receive frames in one piece and in several; write each again."""
    kinds, data = (ANSWERS if data[:1] == b"\1" else REQUESTS), data[1:]
    found, why = received(kinds, [data])
    for pieces in kit.splits(data):
        again, later = received(kinds, pieces)
        assert later == why and again[: len(found)] == found
    if why is not None:
        with kit.documented(ProtocolError):
            list(kit.fed(LinkReceiver(kinds), [data], FRAME_BYTES_MAX))
    for kind, number, payload in found:
        if kind in REQUESTS:
            with kit.documented(ProtocolError):
                asked = client_request(kind, payload)
            made = request_frame(number, asked, aged=kind is Kind.AGED)
            assert made[13:] == payload
        elif kind is Kind.ANSWER:
            assert answer_frame(number, payload)[13:] == payload
        else:
            reason_of(LinkFrame(kind, number, payload))
