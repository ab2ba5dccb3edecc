"""The HA link after HELLO or a classic opening (docs/ha-link.md). Pure: bytes in, events out.

    slave to master   report          | maxOffset: int64 |
                      readers wait    | -1: int64 |, and none waits any more | -2: int64 |
    master to slave   data frame      | physOffset: int64 | bodySize: int32 | body |
                      heartbeat       a data frame whose bodySize is 0
                      control frame   | 1: 1 bit | type: 63 bits | length: int32 | payload |

Integers are big-endian. An offset is never negative, so the first bit tells control frames from
data frames. A control frame's payload has at most 4096 bytes. Only hastore nodes send control
frames, and say whether readers wait.
"""

import struct
from collections.abc import Iterator

import msgspec

from hastore.errors import ProtocolError

HEADER = struct.Struct(">qi")
HEADER_BYTES = HEADER.size  # 12
REPORT = struct.Struct(">q")
REPORT_BYTES = REPORT.size
READERS_WAIT, NO_READERS = -1, -2  # instead of a report, between nodes whose HELLO has `readers`
BODY_BYTES_MAX = 4 * 1024 * 1024 - HEADER_BYTES  # what fits in a RocketMQ slave's buffer
CLASSIC_BODY_BYTES = 32 * 1024
CONTROL_BYTES_MAX = 4096
RECEIVE_BYTES = 256 * 1024  # of a link's buffer: it holds every message, and most bodies
CONFIRMED_TYPE = 1
_CONFIRMED = struct.Struct(">qq")
_CONFIRMED_AND_HEADER = struct.Struct(">qiqqqi")
_SIGN = 1 << 63


class Data(msgspec.Struct, frozen=True, gc=False):
    """A piece of a body, to be written at `offset`; the view is valid until the next receive."""

    offset: int
    data: memoryview


class FrameStart(msgspec.Struct, frozen=True, gc=False):
    """A data frame's header: its offset, and the size of its body (0: a heartbeat)."""

    offset: int
    size: int


class Confirmed(msgspec.Struct, frozen=True, gc=False):
    """The master's confirmed and readable offset."""

    confirmed_offset: int
    readable_offset: int


LinkEvent = Data | FrameStart | Confirmed


def data_header(offset: int, size: int) -> bytes:
    """Return the header of a body of `size` bytes; with size 0 it is a heartbeat."""
    return HEADER.pack(offset, size)


def limits_and_header(confirmed_offset: int, readable_offset: int, offset: int, size: int) -> bytes:
    """Return `confirmed_frame` followed by `data_header`; most puts send both."""
    return _CONFIRMED_AND_HEADER.pack(
        CONFIRMED_TYPE - _SIGN, _CONFIRMED.size, confirmed_offset, readable_offset, offset, size
    )


def confirmed_frame(confirmed_offset: int, readable_offset: int) -> bytes:
    """Return the control frame that tells a slave the confirmed and the readable offset."""
    payload = _CONFIRMED.pack(confirmed_offset, readable_offset)
    return HEADER.pack(CONFIRMED_TYPE - _SIGN, len(payload)) + payload


class LinkBuffer:
    """The received bytes of a link of the ha port: a buffer of RECEIVE_BYTES, and one longer body.

    The caller reads into `room()`. A subclass decodes what lies between `_start` and `_end`.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._start = 0
        self._end = 0
        self._long: memoryview | None = None  # the payload that the buffer cannot hold
        self._long_end = 0

    def room(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._long is not None:
            return self._long[self._long_end :]
        if self._start:
            left = self._end - self._start
            if left:
                self._buffer[:left] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left
        return self._buffer[self._end :]

    def _begin_long(self, at: int, size: int) -> None:
        """Let a payload that begins at `at` of the buffer have room of its own."""
        there = self._end - at
        self._long = memoryview(bytearray(size))
        self._long[:there] = self._buffer[at : self._end]
        self._long_end = there
        self._start = self._end = 0


class ReportDecoder:
    """Decode a slave's reports; an incomplete report is kept until its rest arrives."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[int]:
        """Return the complete reports, oldest first. The caller checks their values."""
        if len(data) == REPORT_BYTES and not self._rest:  # the usual case
            return list(REPORT.unpack(data))
        data = self._rest + data
        whole = len(data) - len(data) % REPORT_BYTES
        self._rest = data[whole:]
        return [value for (value,) in REPORT.iter_unpack(data[:whole])]


class StreamDecoder:
    """Decode a master's bytes into events; a body is passed on in pieces, without buffering.

    States: in a header (fewer than 12 bytes of it seen), in a control payload, in a body
    (`body_left` > 0; the next byte belongs at `offset`). A caller that moves body bytes itself by
    splice calls `skip()` afterwards.
    """

    def __init__(self, *, control_frames: bool) -> None:
        self._control_frames = control_frames
        self._head = bytearray()
        self._control_left = 0
        self._control_type = 0
        self.body_left = 0
        self.offset = 0

    def skip(self, size: int) -> None:
        """Count `size` bytes of the body that the caller has moved itself."""
        if not 0 < size <= self.body_left:
            raise ValueError(f"cannot skip {size} of {self.body_left} bytes")
        self.body_left -= size
        self.offset += size

    def feed(self, data: memoryview) -> Iterator[LinkEvent]:
        """Yield the events in `data`; ProtocolError at the first invalid header."""
        at, end = 0, len(data)
        while at < end:
            if self.body_left:
                take = min(self.body_left, end - at)
                event = Data(self.offset, data[at : at + take])
                self.body_left -= take
                self.offset += take
                at += take
                yield event
                continue
            due = self._control_left or HEADER_BYTES
            take = min(due - len(self._head), end - at)
            piece = data[at : at + take]
            at += take
            if take < due:  # incomplete: join it with the bytes that follow
                self._head += piece
                if len(self._head) < due:
                    return
                piece = memoryview(bytes(self._head))
                self._head.clear()
            if self._control_left:
                self._control_left = 0
                yield self._control(piece)
                continue
            first, size = HEADER.unpack(piece)
            if first < 0:
                self._begin_control(first, size)
                continue
            if not 0 <= size <= BODY_BYTES_MAX:
                raise ProtocolError(f"a body of {size} bytes; at most {BODY_BYTES_MAX} are allowed")
            self.offset, self.body_left = first, size
            yield FrameStart(first, size)

    def _begin_control(self, first: int, size: int) -> None:
        if not self._control_frames:
            raise ProtocolError(f"a frame at the negative offset {first}")
        if not 0 < size <= CONTROL_BYTES_MAX:
            raise ProtocolError(f"a control frame of {size} bytes")
        self._control_type, self._control_left = first + _SIGN, size

    def _control(self, payload: memoryview) -> Confirmed:
        if self._control_type != CONFIRMED_TYPE or len(payload) != _CONFIRMED.size:
            raise ProtocolError(
                f"unknown control frame {self._control_type} of {len(payload)} bytes"
            )
        confirmed, readable = _CONFIRMED.unpack(payload)
        if confirmed < 0 or readable < 0:
            raise ProtocolError(f"negative limits ({confirmed}, {readable})")
        return Confirmed(confirmed, readable)
