"""The HA link after HELLO: a master's frames, and a slave's reports."""

from __future__ import annotations

from hastore.errors import ProtocolError
from hastore.protocol.ha_link import (
    BODY_BYTES_MAX,
    CONTROL_BYTES_MAX,
    HEADER_BYTES,
    Confirmed,
    Data,
    FrameStart,
    LinkEvent,
    ReportDecoder,
    StreamDecoder,
    confirmed_frame,
    data_header,
    limits_and_header,
)
from tests.fuzz.kit import Least, documented, splits

REACHES = (StreamDecoder.feed, StreamDecoder._control, ReportDecoder.feed, data_header)
LEAST = Least(0.3, 4)
TOKENS = (confirmed_frame(0, 0)[:HEADER_BYTES], data_header(0, 0), data_header(1 << 62, 5))


def seeds() -> list[bytes]:
    """Return what masters send: with control frames, and a classic one without."""
    body = data_header(100, 20) + bytes(range(20))
    return [
        b"\x01" + confirmed_frame(5, 3) + body + data_header(120, 0),
        b"\x01" + limits_and_header(2**40, 0, 2**40, 3) + b"abc" + confirmed_frame(1, 1)[:7],
        b"\x00" + body * 3 + body[:15],
        b"\x01" + data_header(0, BODY_BYTES_MAX) + b"x" * 50,
        b"\x00" + confirmed_frame(5, 3),
        b"\x01" + confirmed_frame(-1, 3),
        b"\x01" + data_header(7, BODY_BYTES_MAX + 1),
    ]


def events(decoder: StreamDecoder, pieces: list[bytes]) -> list[LinkEvent]:
    """Return the events, with the pieces of each body joined."""
    found: list[LinkEvent] = []
    for piece in pieces:
        for event in decoder.feed(memoryview(piece)):
            before = found[-1] if found else None
            if isinstance(event, Data):
                assert event.data, "an empty piece"
                event = Data(event.offset, memoryview(bytes(event.data)))
                if isinstance(before, Data) and before.offset + len(before.data) == event.offset:
                    found[-1] = Data(before.offset, memoryview(bytes(before.data) + event.data))
                    continue
            found.append(event)
    return found


def written(found: list[LinkEvent]) -> bytes:
    """Return the bytes of events."""
    out = bytearray()
    for event in found:
        if isinstance(event, Data):
            out += event.data
        elif isinstance(event, FrameStart):
            out += data_header(event.offset, event.size)
        else:
            assert isinstance(event, Confirmed)
            out += confirmed_frame(event.confirmed_offset, event.readable_offset)
    return bytes(out)


def one(data: bytes) -> None:
    """Read frames in one piece and in several; write them again. Read them as reports, too."""
    control, data = bool(data[:1] != b"\0"), data[1:]
    whole = ReportDecoder().feed(data)
    for pieces in splits(data):
        reports = ReportDecoder()
        assert [one for piece in pieces for one in reports.feed(piece)] == whole
    outcomes: list[object] = []
    for pieces in ([data], *splits(data)):
        decoder = StreamDecoder(control_frames=control)
        try:
            found = events(decoder, pieces)
        except ProtocolError as refused:
            outcomes.append(str(refused))
            continue
        assert 0 <= decoder.body_left <= BODY_BYTES_MAX
        outcomes.append((found, decoder.offset, decoder.body_left))
        again = written(found)
        assert data.startswith(again) and len(data) - len(again) < HEADER_BYTES + CONTROL_BYTES_MAX
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    if isinstance(outcomes[0], str):
        with documented(ProtocolError):
            events(StreamDecoder(control_frames=control), [data])
