"""The link between two nodes of a DLedger group: messages, and the bytes of entries."""

from __future__ import annotations

from hastore.errors import ProtocolError
from hastore.protocol import dledger
from hastore.protocol.dledger_link import (
    KEEP_ALIVE,
    FrameReceiver,
    append_frames,
    decode_message,
    message_frame,
)
from hastore.protocol.ha_link import RECEIVE_BYTES
from tests.fuzz import kit

REACHES = (
    FrameReceiver.received, FrameReceiver._take_data, decode_message, dledger.check_message,
    dledger._check_append, dledger._check_answer, dledger._check_members,
)  # fmt: skip
LEAST = kit.Least(0.3, 8)
ROOM_BYTES_MAX = RECEIVE_BYTES + (4 << 20)
MEMORY_BYTES = 32 * 1024 * 1024  # the bytes of an append: 4 MiB, for each way to cut the input


def messages() -> list[dledger.Message]:
    """Return one message of each kind."""
    return [
        dledger.VoteRequest(4, True, 7, 3, True),
        dledger.VoteResponse(4, 4, False, dledger.VoteResult.ACCEPT, (5, 3, (1, 2))),
        dledger.HeartBeatRequest(4, 9, 7, ((1, 2), (2, 2))),
        dledger.HeartBeatResponse(4, 9, dledger.Code.SUCCESS, False, True, 3),
        dledger.CompareRequest(4, 7, 3, 77),
        dledger.TruncateRequest(4, 7, 3, 2),
        dledger.CommitRequest(4, 7, 8),
        dledger.InstallRequest(4, 7, 5_000, 3, (1, 2, 3), (4,), (3,)),
        dledger.PushResponse(4, dledger.PushType.COMPARE, dledger.Code.DISK_FULL, 7, 0, 9, 2, 5),
        dledger.TakeLeadership(4),
    ]


def seeds() -> list[bytes]:
    """Return frames of each message, and appends."""
    append = dledger.AppendRequest(
        4, 6, 2, 5_000, 150, ((3, 1), (4, 2)), 5, ((8, (1, 2, 3)),), ((8, (4,), (1,)),)
    )
    entries = append_frames(append) + bytes(range(150))
    everything = b"".join(message_frame(one) for one in messages())
    wrong = [
        dledger.VoteRequest(0, True, 7, 3),
        dledger.HeartBeatRequest(4, 0, 0),
        dledger.InstallRequest(4, 7, 0, 3, (1, 1)),
        dledger.InstallRequest(4, 7, 0, 3, (1,), (), (2,)),
        dledger.PushResponse(4, dledger.PushType.APPEND, dledger.Code.SUCCESS, 7, 11, 9),
        dledger.AppendRequest(4, 6, 2, 0, 150, (), 5),
        dledger.CommitRequest(-1, 7),
        dledger.AppendRequest(4, 6, 2, 0, 150, ((3, 9),), 5),
    ]
    return [
        *(message_frame(one) for one in messages()), everything, entries, KEEP_ALIVE + entries,
        entries[:-100], entries[:120] + KEEP_ALIVE, *(message_frame(one) for one in wrong),
        repaired(bytes(12) + b"\x83\xa4type\xa4take\xa4term\x01\xa1x" + b"\x91" * 1_500 + b"\xc0"),
    ]  # fmt: skip


def repaired(data: bytes) -> bytes:
    """Return the input as one message with the right length, and all of the rest behind it."""
    frame = message_frame(dledger.TakeLeadership(1))[:8]
    return frame + max(0, len(data) - 12).to_bytes(4) + data[12:]


def received(pieces: list[bytes]) -> tuple[list[tuple[object, bytes | None]], str | None]:
    """Return the messages with their bytes, and why the link refused what follows."""
    found: list[tuple[object, bytes | None]] = []
    try:
        for each in kit.fed(FrameReceiver(), pieces, ROOM_BYTES_MAX):
            raw = None if each.data is None else bytes(each.data)
            found.append((each.message, raw))
    except ProtocolError as refused:
        return found, str(refused)
    return found, None


def one(data: bytes) -> None:
    """Receive frames in one piece and in several; write each message again, and read that."""
    found, why = received([data])
    for pieces in kit.splits(data):
        again, later = received(pieces)
        # What came before the wrong frame, in the same piece, is not handed on.
        assert later == why and again[: len(found)] == found, (again, found)
    if why is not None:
        with kit.documented(ProtocolError):
            list(kit.fed(FrameReceiver(), [data], ROOM_BYTES_MAX))
    out = bytearray()
    for message, raw in found:
        if message is None:
            out += KEEP_ALIVE
            continue
        if isinstance(message, dledger.AppendRequest):
            assert raw is not None and len(raw) == message.size
            out += append_frames(message) + raw
            message.member_sets()
        else:
            assert raw is None
            out += message_frame(message)  # type: ignore[arg-type]
    assert received([bytes(out)]) == (found, None)
