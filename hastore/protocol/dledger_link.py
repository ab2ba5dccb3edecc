"""The link between two nodes of a DLedger group, after HELLO (docs/dledger.md, "Between the
nodes"). Pure: bytes in, messages out.

    message       | 2: 1 bit + type: 63 bits | length: int32 | msgpack |     at most 64 KiB
    entries       | pos: int64 | size: int32 | bytes of the log |            only after "append"
    keep-alive    | 0: int64 | 0: int32 |

The headers are those of the HA link (ha_link.py), so the first bit tells messages from bytes. Both
ends send the same frames. Every length and number is checked before anything is allocated.
"""

from typing import NamedTuple

import msgspec

from hastore.errors import UNREADABLE, ProtocolError
from hastore.protocol.dledger import INT64_MAX, AppendRequest, Message, check_message, check_range
from hastore.protocol.ha_link import (
    HEADER,
    HEADER_BYTES,
    RECEIVE_BYTES,
    LinkBuffer,
    data_header,
)

MESSAGE_TYPE = 2  # of the control frames of the HA link; CONFIRMED has 1
MESSAGE_BYTES_MAX = 64 * 1024
ENTRY_HEADER_BYTES = 48
ENTRY_BYTES_MAX = 4 << 20
DATA_BYTES_MAX = ENTRY_BYTES_MAX  # whole entries of one file, so at least one of any size
KEEP_ALIVE = data_header(0, 0)
_SIGN = 1 << 63

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class Received(NamedTuple):
    """A message and, for an AppendRequest, its bytes; both None for a keep-alive.

    The view is valid until the next call of `FrameReceiver.room`.
    """

    message: Message | None
    data: memoryview | None = None


def message_frame(message: Message) -> bytes:
    """Return the frame of a message; an AppendRequest's data frame comes after it."""
    payload = _encoder.encode(message)
    if len(payload) > MESSAGE_BYTES_MAX:
        raise ProtocolError(
            f"a message of {len(payload)} bytes exceeds the limit of {MESSAGE_BYTES_MAX}"
        )
    return HEADER.pack(MESSAGE_TYPE - _SIGN, len(payload)) + payload


def append_frames(request: AppendRequest) -> bytes:
    """Return the frame of an AppendRequest and the header of its bytes, which come next."""
    return message_frame(request) + HEADER.pack(request.pos, request.size)


def decode_message(payload: bytes | memoryview) -> Message:
    """Return the message in `payload`; ProtocolError names what is wrong."""
    try:
        message = _decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"not a message of a DLedger node: {error}") from error
    check_message(message)
    if isinstance(message, AppendRequest):
        _check_bytes(message)
    return message


class FrameReceiver(LinkBuffer):
    """Turn a link's bytes into messages; holds at most one append's bytes and RECEIVE_BYTES.

    The caller reads into `room()`, then calls `received` with the number of bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._append: AppendRequest | None = None  # its data frame is due

    def received(self, size: int) -> list[Received]:
        """Take `size` bytes that are in `room()`; return what they complete.

        Raises ProtocolError at the first frame that is wrong; the link must then be closed.
        """
        out: list[Received] = []
        if self._long is not None:
            self._long_end += size
            if self._long_end == len(self._long):
                out.append(Received(self._append, self._long))
                self._append = self._long = None
            return out
        self._end += size
        while self._end - self._start >= HEADER_BYTES:
            first, length = HEADER.unpack_from(self._buffer, self._start)
            if first < 0:
                if not self._take_message(first, length, out):
                    break
            elif not self._take_data(first, length, out):
                break
        return out

    def _take_message(self, first: int, length: int, out: list[Received]) -> bool:
        """Decode the message whose header is at `_start`; False if it is not complete yet."""
        if first + _SIGN != MESSAGE_TYPE:
            raise ProtocolError(f"unknown control frame {first + _SIGN}")
        if not 0 < length <= MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"a message of {length} bytes; at most {MESSAGE_BYTES_MAX} are allowed"
            )
        if self._append is not None:
            raise ProtocolError("an append without its bytes")
        at = self._start + HEADER_BYTES
        if self._end < at + length:
            return False
        message = decode_message(self._buffer[at : at + length])
        self._start = at + length
        if isinstance(message, AppendRequest):
            self._append = message
        else:
            out.append(Received(message))
        return True

    def _take_data(self, pos: int, size: int, out: list[Received]) -> bool:
        """Take the data frame whose header is at `_start`; False if it is not complete yet."""
        request = self._append
        at = self._start + HEADER_BYTES
        if request is None:
            if pos or size:
                raise ProtocolError(f"{size} bytes at {pos} without an append")
            self._start = at
            out.append(Received(None))
            return True
        if (pos, size) != (request.pos, request.size):
            raise ProtocolError(
                f"{size} bytes at {pos} after an append of {request.size} bytes at {request.pos}"
            )
        there = self._end - at
        if there >= size:
            out.append(Received(request, self._buffer[at : at + size]))
            self._append = None
            self._start = at + size
            return True
        if HEADER_BYTES + size <= RECEIVE_BYTES:
            return False  # it fits into the buffer
        self._begin_long(at, size)
        return False


def _check_bytes(request: AppendRequest) -> None:
    """Raise ProtocolError unless the entries of an append fit into the bytes that come after it."""
    check_range("pos", request.pos, 0, INT64_MAX - DATA_BYTES_MAX)
    check_range("size", request.size, ENTRY_HEADER_BYTES, DATA_BYTES_MAX)
    entries = sum(count for _, count in request.runs)
    if entries * ENTRY_HEADER_BYTES > request.size:
        raise ProtocolError(f"an append of {entries} entries in {request.size} bytes")
