"""Digests of bytes that no epoch vouches for.

Epoch 0 of a history names no writer: two nodes may have followed two RocketMQ masters, and only the
bytes show whether they did. So before a node continues from such bytes, a digest of both nodes'
bytes is compared. It covers

    a range up to 64 MiB    all bytes
    a longer range          1024 windows of 64 KiB, evenly spread; the last ends with the range

A difference in the last 64 KiB of the range is always noticed. So is any differing stretch that is
at least as long as the distance between two windows (16 MiB in a range of 16 GiB). A shorter
stretch in the middle may remain unnoticed; `cmp` of the stopped nodes' files finds it.
"""

import hashlib
from typing import Any

from hastore.ha.node.member import Member
from hastore.ha.node.replica_log import ReplicaLog
from hastore.ha.rules.epochs import History, classic_range
from hastore.protocol.hello import Hello

WINDOWS = 1024
WINDOW_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024  # per view of the log


def windows(start: int, end: int) -> list[tuple[int, int]]:
    """Return the ranges of [start, end) that are read: at most 64 MiB in all."""
    length = end - start
    if length <= WINDOWS * WINDOW_BYTES:
        return [(start, end)] if length > 0 else []
    room = length - WINDOW_BYTES
    places = [start + room * number // (WINDOWS - 1) for number in range(WINDOWS)]
    return [(place, place + WINDOW_BYTES) for place in places]


def digest_of(store: ReplicaLog, start: int, end: int) -> bytes:
    """Return the digest of [start, end) of a log; b"" when the log does not have all of it."""
    if not store.min_offset <= start < end <= store.max_offset:
        return b""
    digest = hashlib.sha256()
    for place, stop in windows(start, end):
        while place < stop:
            with store.view(place, min(stop - place, READ_BYTES)) as view:
                if not view:
                    return b""  # retention has removed these bytes meanwhile
                digest.update(view)
                place += len(view)
    return digest.digest()


def digest_fields(
    member: Member, history: History, min_offset: int, max_offset: int
) -> dict[str, Any]:
    """Return the digest fields of a HELLO to another node; {} if no digest is due.

    The other node's log is [`min_offset`, `max_offset`) with `history`.
    """
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
    """Return this log's digest of the range that `hello` names; b"" if `hello` has no digest."""
    return digest_of(store, hello.digest_from, hello.digest_to) if hello.digest else b""
