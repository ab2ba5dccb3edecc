"""The link on which a node forwards requests of RocketMQ's clients, after HELLO. Pure.

    | length: uint32 | kind: uint8 | id: uint64 | payload |        length counts what comes after it

    0 keep-alive   nothing                                                       both ways
    1 request      host: 4 or 16 bytes after their number (uint8) |              forwarder -> master
                   port: uint16 | the client's frame, as it came
    2 answer       the frame for the client; empty if the request has none       master -> forwarder
    3 refused      text: nothing of the request was done                         master -> forwarder
    4 unknown      text: what was done is not known                              master -> forwarder
    5 late         text: the same, and its client does not wait any more         master -> forwarder
    6 aged         ms since the request came to the forwarder: uint32 | as 1     forwarder -> master

The forwarder numbers its requests. Each gets exactly one of 2 to 5, in any order. A request is aged
if the master's answer to HELLO says that it knows that: what waited there does not wait for the
same time again here.
docs/ha-link.md ("Forwarding") describes the link. Every length is checked before anything is
allocated.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from hastore.errors import ProtocolError
from hastore.protocol.ha_link import RECEIVE_BYTES, LinkBuffer

_HEAD = struct.Struct(">IBQ")
_LENGTH_BYTES = 4
HEAD_BYTES = _HEAD.size
_FIXED_BYTES = HEAD_BYTES - _LENGTH_BYTES  # kind and id, which the length counts
_AGE = struct.Struct(">I")
_AGE_MAX = (1 << 32) - 1
_CLIENT_BYTES_MAX = _AGE.size + 1 + 16 + 2
CLIENT_FRAME_BYTES_MAX = 16 << 20  # RocketMQ's own limit
FRAME_BYTES_MAX = _FIXED_BYTES + _CLIENT_BYTES_MAX + CLIENT_FRAME_BYTES_MAX
REASON_BYTES_MAX = 1_024
ID_MAX = (1 << 64) - 1


class Kind(IntEnum):
    """What a frame of the link is."""

    KEEP_ALIVE = 0
    REQUEST = 1
    ANSWER = 2
    REFUSED = 3
    UNKNOWN = 4
    LATE = 5
    AGED = 6


_KINDS = tuple(Kind)  # by number: faster than Kind(number)


class LinkFrame(NamedTuple):
    """A frame as it was received."""

    kind: Kind
    id: int
    payload: bytes


class ClientRequest(NamedTuple):
    """A request's payload: the packed address and the port of the client, and its frame.

    `age_ms` is for how long the forwarder has it.
    """

    host: bytes
    port: int
    frame: bytes
    age_ms: int = 0


KEEP_ALIVE = _HEAD.pack(_FIXED_BYTES, Kind.KEEP_ALIVE, 0)


def request_frame(number: int, client: ClientRequest, *, aged: bool = False) -> bytes:
    """Return the frame of a request. ProtocolError if the client's frame is too long.

    `aged`: the master knows requests that say their age.
    """
    host, port, frame, age_ms = client
    if len(frame) > CLIENT_FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a request of {len(frame)} bytes; at most {CLIENT_FRAME_BYTES_MAX} are forwarded"
        )
    age = _AGE.pack(min(max(age_ms, 0), _AGE_MAX)) if aged else b""
    size = _FIXED_BYTES + len(age) + 3 + len(host) + len(frame)
    head = _HEAD.pack(size, Kind.AGED if aged else Kind.REQUEST, number)
    return b"".join((head, age, bytes((len(host),)), host, port.to_bytes(2, "big"), frame))


def answer_frame(number: int, frame: bytes) -> bytes:
    """Return the frame of an answer. ProtocolError if the frame for the client is too long."""
    if len(frame) > CLIENT_FRAME_BYTES_MAX:
        raise ProtocolError(
            f"an answer of {len(frame)} bytes; at most {CLIENT_FRAME_BYTES_MAX} are forwarded"
        )
    return _HEAD.pack(_FIXED_BYTES + len(frame), Kind.ANSWER, number) + frame


def refused_frame(number: int, reason: str) -> bytes:
    """Return the frame that says that nothing of a request was done."""
    return _with_reason(Kind.REFUSED, number, reason)


def unknown_frame(number: int, reason: str, *, is_late: bool = False) -> bytes:
    """Return the frame that says that what was done of a request is not known.

    `is_late`: its client does not wait any more.
    """
    return _with_reason(Kind.LATE if is_late else Kind.UNKNOWN, number, reason)


def _with_reason(kind: Kind, number: int, reason: str) -> bytes:
    text = reason.encode(errors="replace")[:REASON_BYTES_MAX]
    return _HEAD.pack(_FIXED_BYTES + len(text), kind, number) + text


def reason_of(frame: LinkFrame) -> str:
    """Return the text of a frame that refuses a request, or leaves it open."""
    return frame.payload.decode(errors="replace")


def client_request(kind: Kind, payload: bytes) -> ClientRequest:
    """Return what the payload of a request of this kind has; ProtocolError names what is wrong."""
    age_ms, at = 0, 0
    if kind is Kind.AGED:
        if len(payload) < _AGE.size:
            raise ProtocolError("a forwarded request without its age")
        (age_ms,), at = _AGE.unpack_from(payload), _AGE.size
    size = payload[at] if len(payload) > at else 0
    port_at = at + 1 + size
    if size not in (4, 16) or len(payload) < port_at + 2:
        raise ProtocolError("a forwarded request without the address of its client")
    port = int.from_bytes(payload[port_at : port_at + 2], "big")
    return ClientRequest(payload[at + 1 : port_at], port, payload[port_at + 2 :], age_ms)


class LinkReceiver(LinkBuffer):
    """Turn a link's bytes into frames; holds at most RECEIVE_BYTES and one long frame.

    The caller reads into `room()`, then calls `received` with the number of bytes. `kinds` are
    those that the other end may send.
    """

    def __init__(self, kinds: frozenset[Kind]) -> None:
        super().__init__()
        self._kinds = kinds | {Kind.KEEP_ALIVE}
        self._long_head = (Kind.KEEP_ALIVE, 0)

    def received(self, size: int) -> list[LinkFrame]:
        """Take `size` bytes that are in `room()`; return the frames that they complete.

        Raises ProtocolError at the first frame that is wrong; the link must then be closed.
        """
        out: list[LinkFrame] = []
        if self._long is not None:
            self._long_end += size
            if self._long_end == len(self._long):
                out.append(LinkFrame(*self._long_head, bytes(self._long)))
                self._long = None
            return out
        self._end += size
        while self._end - self._start >= HEAD_BYTES:
            length, number, identity = _HEAD.unpack_from(self._buffer, self._start)
            kind = self._checked(length, number)
            at = self._start + HEAD_BYTES
            payload_size = length - _FIXED_BYTES
            if self._end >= at + payload_size:
                payload = bytes(self._buffer[at : at + payload_size])
                out.append(LinkFrame(kind, identity, payload))
                self._start = at + payload_size
                continue
            if HEAD_BYTES + payload_size > RECEIVE_BYTES:
                self._begin_long(at, payload_size)
                self._long_head = (kind, identity)
            break
        return out

    def _checked(self, length: int, number: int) -> Kind:
        if not _FIXED_BYTES <= length <= FRAME_BYTES_MAX:
            raise ProtocolError(
                f"a frame of {length} bytes on a link that forwards; {_FIXED_BYTES} to "
                f"{FRAME_BYTES_MAX} are allowed"
            )
        if number not in self._kinds:
            raise ProtocolError(f"a frame of kind {number} on a link that forwards")
        return _KINDS[number]
