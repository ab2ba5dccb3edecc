"""Digests of what only a RocketMQ master vouches for.

Epoch 0 of a history names no writer: two nodes may have followed two RocketMQ masters, and nothing
but the bytes tells. So before a node goes on from such bytes both ends compare a digest of them:

    up to 64 MiB     all bytes
    beyond           1024 windows of 64 KiB, evenly spread; the last one ends where the range does

So logs that differ up to the end of the range are always told apart, and any stretch that differs
and is at least as long as the space between two windows (16 MiB of 16 GiB) is found. A shorter one
in the middle may pass; `cmp` of the stopped nodes' files tells.
"""

import hashlib
from typing import Any

from hastore.ha.node.member import Member
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import History, classic_range
from hastore.protocol.hello import Hello

WINDOWS = 1024
WINDOW_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024  # at once


def windows(start: int, end: int) -> list[tuple[int, int]]:
    """Return what of [start, end) is read, as ranges: at most 64 MiB in all."""
    length = end - start
    if length <= WINDOWS * WINDOW_BYTES:
        return [(start, end)] if length > 0 else []
    room = length - WINDOW_BYTES
    places = [start + room * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return [(place, place + WINDOW_BYTES) for place in places]


def digest_of(store: ReplicaLog, start: int, end: int) -> bytes:
    """Return the digest of [start, end) of a log, b"" when the log does not hold all of it."""
    if not store.min_offset <= start < end <= store.max_offset:
        return b""
    digest = hashlib.sha256()
    for place, stop in windows(start, end):
        while place < stop:
            with store.view(place, min(stop - place, READ_BYTES)) as view:
                if not view:
                    return b""  # retention took it meanwhile
                digest.update(view)
                place += len(view)
    return digest.digest()


def digest_fields(
    member: Member, history: History, min_offset: int, max_offset: int
) -> dict[str, Any]:
    """Return the fields of a HELLO to a node with this history and log; none when none are due."""
    mine = member.state.history
    due = classic_range(
        mine, member.store.min_offset, member.store.max_offset, history, min_offset, max_offset
    )
    if due is None:
        return {}
    return {
        "digest_from": due[0],
        "digest_to": due[1],
        "digest": digest_of(member.store, *due),
    }


def own_digest(store: ReplicaLog, hello: Hello) -> bytes:
    """Return the digest of this log's bytes in the range that a caller named; b"" for none."""
    return digest_of(store, hello.digest_from, hello.digest_to) if hello.digest else b""
