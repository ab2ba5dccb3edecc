"""The bytes of an entry, of the blank and of an index unit in a data log of DLedger. Pure.

    off  field                    bytes
      0  magic                    4          1
      4  size                     4          of header and body
      8  index                    8          from 0, without gaps
     16  term                     8          never falls
     24  pos                      8          the entry's own offset in the log
     32  channel, chainCrc,       4 4
     40  bodyCrc                  4          all three are 0, and never checked
     44  bodySize                 4
     48  body                     n

    blank      magic 0xFFFFFFFF 4, size 4, then zeros to the end of the file
    index unit magic 4, pos 8, size 4, index 8, term 8; at `index * 32` of the index

All integers are big-endian. A body is one RocketMQ record, whose physicalOffset is `pos + 48`. The
entries of the group itself have none: the first entry of a term has an empty body, and a member
list this one:

      0 magic "HSML" 4 | 4 version 2 | 6 number of members 2 | 8 node numbers 4 each | CRC-32 4

A program other than hastore may have written bodies of any kind. They are entries, but not records.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import Enum

import msgspec

from hastore.errors import CorruptRecordError
from hastore.record.codec import Buffer, check_record
from hastore.record.layout import MIN_RECORD_SIZE, SIZE_AND_MAGIC, V1_MAGIC, V2_MAGIC

ENTRY_MAGIC = 1
ENTRY_BLANK_MAGIC = 0xFFFFFFFF
MAX_ENTRY_BYTES = 4 << 20  # header included

ENTRY_HEADER = struct.Struct(">IIqqqiiiI")
ENTRY_HEADER_BYTES = ENTRY_HEADER.size
INDEX_UNIT = struct.Struct(">IqIqq")
INDEX_UNIT_BYTES = INDEX_UNIT.size
ENTRY_BLANK = struct.Struct(">II")
# What must fit the record: magic, size, pos and bodySize.
ENTRY_PLACE = struct.Struct(">II16xq12xI")

_MEMBERS_HEAD = struct.Struct(">4sHH")
_MEMBERS_MAGIC = b"HSML"
_MEMBERS_VERSION = 1
_CRC = struct.Struct(">I")


class EntryHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of an entry."""

    magic: int
    size: int
    index: int
    term: int
    pos: int
    channel: int
    chain_crc: int
    body_crc: int
    body_size: int


class Body(Enum):
    """What an entry's body is."""

    RECORD = "a RocketMQ record that is whole and knows its offset"
    EMPTY = "nothing: the first entry of a term"
    MEMBERS = "a member list"
    OTHER = "bytes of another program"
    BAD = "a damaged record or member list"


def read_header(buffer: Buffer, at: int, end: int, place: int) -> EntryHeader | None:
    """Return the header of the whole entry at `at`, which lies at `place` of the log.

    Returns None unless the header is sound, and the entry ends at or before `end`.
    """
    if end - at < ENTRY_HEADER_BYTES:
        return None
    header = EntryHeader(*ENTRY_HEADER.unpack_from(buffer, at))
    if (
        header.magic != ENTRY_MAGIC
        or header.pos != place
        or header.size != ENTRY_HEADER_BYTES + header.body_size
        or header.size > end - at
        or header.index < 0
        or header.term < 0
    ):
        return None
    return header


def body_of(buffer: Buffer, at: int, size: int, place: int) -> Body:
    """Return what the body of the sound entry of `size` bytes at `at` is; checks CRCs."""
    if size == ENTRY_HEADER_BYTES:
        return Body.EMPTY
    start, end = at + ENTRY_HEADER_BYTES, at + size
    if size - ENTRY_HEADER_BYTES >= MIN_RECORD_SIZE:
        if check_record(buffer, start, end, place + ENTRY_HEADER_BYTES) == end - start:
            return Body.RECORD
        if SIZE_AND_MAGIC.unpack_from(buffer, start)[1] in (V1_MAGIC, V2_MAGIC):
            return Body.BAD
    if bytes(buffer[start : start + len(_MEMBERS_MAGIC)]) == _MEMBERS_MAGIC:
        return Body.MEMBERS if _is_members(bytes(buffer[start:end])) else Body.BAD
    return Body.OTHER


def pack_header(index: int, term: int, pos: int, body_size: int) -> bytes:
    """Return the header of an entry."""
    size = ENTRY_HEADER_BYTES + body_size
    return ENTRY_HEADER.pack(ENTRY_MAGIC, size, index, term, pos, 0, 0, 0, body_size)


def pack_unit(index: int, term: int, pos: int, size: int) -> bytes:
    """Return the index unit of an entry of `size` bytes."""
    return INDEX_UNIT.pack(ENTRY_MAGIC, pos, size, index, term)


def pack_entry_blank(size: int) -> bytes:
    """Return the first 8 bytes of a blank of `size` bytes; zeros follow."""
    return ENTRY_BLANK.pack(ENTRY_BLANK_MAGIC, size)


def check_entry_blank(buffer: Buffer, at: int, end: int) -> int:
    """Return the size of the blank at `at` if it ends exactly at `end`, else 0."""
    left = end - at
    if left < ENTRY_BLANK.size or ENTRY_BLANK.unpack_from(buffer, at) != (ENTRY_BLANK_MAGIC, left):
        return 0
    return left


def pack_members(members: Sequence[int]) -> bytes:
    """Return the body of an entry that holds a member list."""
    head = _MEMBERS_HEAD.pack(_MEMBERS_MAGIC, _MEMBERS_VERSION, len(members))
    body = head + struct.pack(f">{len(members)}I", *members)
    return body + _CRC.pack(zlib.crc32(body))


def unpack_members(body: bytes) -> tuple[int, ...] | None:
    """Return the member list in a body; None if it holds none, or a damaged one.

    Raises CorruptRecordError for a list in the form of a later version.
    """
    if not _is_members(body):
        return None
    _, version, count = _MEMBERS_HEAD.unpack_from(body)
    if version != _MEMBERS_VERSION:
        raise CorruptRecordError(
            f"a member list of version {version}: a later version of hastore wrote this log"
        )
    if len(body) != _MEMBERS_HEAD.size + 4 * count + _CRC.size:
        return None
    return struct.unpack_from(f">{count}I", body, _MEMBERS_HEAD.size)


def _is_members(body: bytes) -> bool:
    return (
        len(body) >= _MEMBERS_HEAD.size + _CRC.size
        and body.startswith(_MEMBERS_MAGIC)
        and _CRC.unpack(body[-_CRC.size :])[0] == zlib.crc32(body[: -_CRC.size])
    )
