"""The note of a group's master for the rest of its cluster: its brokers and topics. Pure.

With `registry` it lies in ZooKeeper (registry/cluster_notes.py), as zlib of JSON with the fields of
`GroupRoutes`. Other groups answer for these routes, and clients of a cluster spread by them.
"""

from __future__ import annotations

import zlib
from typing import Annotated

import msgspec

from hastore.errors import ProtocolError

MAX_BYTES = 64 * 1024 * 1024  # of a note that is decompressed
MAX_TOPICS = 300_000
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class OtherBroker(msgspec.Struct, array_like=True, frozen=True):
    """A broker of another group: its addresses by id."""

    name: _Text
    addresses: dict[int, _Text]
    is_twin: bool = False


class OtherTopic(msgspec.Struct, array_like=True, frozen=True):
    """A topic of another group."""

    name: _Text
    read: _Number
    write: _Number
    perm: _Number = 6
    order: bool = False
    sys_flag: _Number = 0


class GroupRoutes(msgspec.Struct, frozen=True):
    """What a master states of its group. Of two that say they are, the greater epoch counts."""

    group: _Text
    epoch: int
    brokers: list[OtherBroker]
    topics: list[OtherTopic]


_decode = msgspec.json.Decoder(GroupRoutes).decode


def encode_note(routes: GroupRoutes) -> bytes:
    """Return a note."""
    return zlib.compress(msgspec.json.encode(routes))


def decode_note(note: bytes) -> GroupRoutes:
    """Return what a note says; raises ProtocolError if it says nothing."""
    try:
        unpacked = zlib.decompressobj()
        text = unpacked.decompress(note, MAX_BYTES)
        if not unpacked.eof:
            raise ProtocolError(f"a note that is cut, or has more than {MAX_BYTES} bytes")
        found = _decode(text)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise ProtocolError(f"a note that cannot be read: {failure}") from failure
    if len(found.topics) > MAX_TOPICS:
        raise ProtocolError(f"a note with {len(found.topics)} topics; at most {MAX_TOPICS}")
    return found
