"""How records lie in a log: one after the other, or each in an entry of DLedger. Pure.

An *item* is what lies between two offsets at which a log may be cut: a record in a plain log, an
entry in a log of entries. The record of an item begins `lead` bytes after it; that is its physical
offset. A blank fills the rest of a file in both, with other bytes. A LogFormat says all this of a
log; the functions before it know the bytes of an entry, its blank and its index unit:

    off  field                    bytes
      0  magic                    4          1
      4  size                     4          of header and body
      8  index                    8          from 0, without gaps
     16  term                     8          never falls
     24  pos                      8          the entry's own offset in the log
     32  channel                  4          0
     36  chainCrc                 4          bodyCrc of the entry before; 0: none, or not known
     40  bodyCrc                  4          CRC-32 of all other bytes of the entry; 0: none
     44  bodySize                 4
     48  body                     n

    blank      magic 0xFFFFFFFF 4, size 4, then zeros to the end of the file
    index unit magic 4, pos 8, size 4, index 8, term 8; at `index * 32` of the index

DLedger writes 0 in chainCrc and bodyCrc, keeps what it finds there, and checks neither; nor did
earlier versions of hastore. So an entry without CRCs counts as not verified, not as damaged. If
damage made zeros of an entry's CRCs, chainCrc of the entry after it tells. bodyCrc is computed over
bytes 0 to 40, then from 44 on; a CRC that is 0 is written as 1.

All integers are big-endian. A body is one RocketMQ record, whose physicalOffset is `pos + 48`. The
entries of the group itself have records too, of a transaction that was rolled back (sysFlag 0xC)
and of the topic HASTORE_DLEDGER, so that RocketMQ's readers step over them. The body of such a
record is empty in the first entry of a term; in the entry of a member list it is

      0 magic "HSML" 4 | 4 version 2 | 6 number of members 2 | 8 node numbers 4 each | CRC-32 4

A list with learners has version 2, which the version of hastore before refuses. Between the node
numbers of the members and the CRC it has

        number of learners 2 | number of members that leave 2 | node numbers of both, 4 each

Another program may have written bodies that are no records. They are entries all the same:
`ENTRIES` refuses them, as a node does; `ANY_ENTRIES` takes them, for tools that read any DLedger
directory.
"""

import struct
import zlib
from collections.abc import Callable, Container, Sequence
from enum import Enum

import msgspec
from zlib_ng.zlib_ng import crc32

from hastore.errors import CorruptRecordError
from hastore.record.codec import (
    Buffer,
    Host,
    Record,
    check_blank,
    check_record,
    decode_record,
    encode_record,
    find_parts,
    may_begin_record,
    pack_blank,
)
from hastore.record.layout import (
    BLANK_SIZE,
    CRC_MASK,
    FLAG_IPV6,
    FLAG_ROLLBACK,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
)
from hastore.record.properties import encode_properties

OWN_TOPIC = "HASTORE_DLEDGER"  # of the group's own entries; no client may put to it
GROUP_ID = "HS_GROUP"  # the property of the group's own entries with the group's id
ENTRY_MAGIC = 1
ENTRY_BLANK_MAGIC = 0xFFFFFFFF
MAX_ENTRY_BYTES = 4 << 20  # header included

ENTRY_HEADER = struct.Struct(">IIqqqiIII")
ENTRY_HEADER_BYTES = ENTRY_HEADER.size
INDEX_UNIT = struct.Struct(">IqIqq")
INDEX_UNIT_BYTES = INDEX_UNIT.size
ENTRY_BLANK = struct.Struct(">II")
# What must fit the record: magic, size, pos and bodySize.
ENTRY_PLACE = struct.Struct(">II16xq12xI")
ENTRY_CRCS = struct.Struct(">II")  # chainCrc and bodyCrc
CHAIN_CRC_AT = 36
BODY_CRC_AT = 40
CRC_BYTES = 4
_AFTER_CRC = 44

_MEMBERS_HEAD = struct.Struct(">4sHH")
_MEMBERS_MAGIC = b"HSML"
_MEMBERS_VERSION = 1
_LEARNERS_VERSION = 2
_MORE = struct.Struct(">HH")
_CRC = struct.Struct(">I")


# The members, learners and leaving members of a member list.
Lists = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


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
    OTHER = "nothing, or bytes of another program"
    BAD = "a damaged record, or one in an entry with a wrong CRC"


def read_header(buffer: Buffer, at: int, end: int, place: int) -> EntryHeader | None:
    """Return the header of the whole entry at `at`, which lies at `place` of the log.

    Returns None unless the header is sound, and the entry ends at or before `end`. Of the entry
    only the header must be in `buffer`.
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


def follows(chain_crc: int, before: int | None) -> bool:
    """Whether an entry's chainCrc is right after one with bodyCrc `before`; None: not known."""
    return not chain_crc or before is None or chain_crc == before


def body_of(buffer: Buffer, at: int, size: int, place: int) -> Body:
    """Return what the body of the sound entry of `size` bytes at `at` is.

    Checks the CRCs of the entry, if it has one, and of the record.
    """
    start, end = at + ENTRY_HEADER_BYTES, at + size
    chain, crc = ENTRY_CRCS.unpack_from(buffer, at + CHAIN_CRC_AT)
    if crc != (entry_crc(buffer, at, size) if crc else chain):
        return Body.BAD  # without a CRC chainCrc is 0 too
    if end - start >= MIN_RECORD_SIZE:
        if check_record(buffer, start, end, place + ENTRY_HEADER_BYTES) == end - start:
            return Body.RECORD
        if SIZE_AND_MAGIC.unpack_from(buffer, start)[1] in (V1_MAGIC, V2_MAGIC):
            return Body.BAD
    return Body.OTHER


def entry_crc(buffer: Buffer, at: int, size: int) -> int:
    """Return the bodyCrc of the entry of `size` bytes at `at`, whose chainCrc is filled in."""
    view = memoryview(buffer)
    head = crc32(view[at : at + BODY_CRC_AT])
    return crc32(view[at + _AFTER_CRC : at + size], head) or 1


def fill_in_crcs(entries: bytearray, before: int) -> int:
    """Fill in the CRCs of whole entries that follow each other, once all else is in place.

    `before` is the bodyCrc of the entry before the first one; 0 if it has none, or is not known.
    Returns that of the last one.
    """
    at, end, put, size_at = 0, len(entries), _CRC.pack_into, ENTRY_BLANK.unpack_from
    with memoryview(entries) as view:
        while at < end:
            stop = at + size_at(entries, at)[1]
            put(entries, at + CHAIN_CRC_AT, before)
            before = crc32(view[at + _AFTER_CRC : stop], crc32(view[at : at + BODY_CRC_AT])) or 1
            put(entries, at + BODY_CRC_AT, before)
            at = stop
    return before


def pack_header(index: int, term: int, pos: int, body_size: int) -> bytes:
    """Return the header of an entry, without CRCs; `fill_in_crcs` adds them."""
    size = ENTRY_HEADER_BYTES + body_size
    return ENTRY_HEADER.pack(ENTRY_MAGIC, size, index, term, pos, 0, 0, 0, body_size)


def pack_unit(index: int, term: int, pos: int, size: int) -> bytes:
    """Return the index unit of an entry of `size` bytes."""
    return INDEX_UNIT.pack(ENTRY_MAGIC, pos, size, index, term)


def unpack_unit(raw: bytes, index: int) -> tuple[int, int, int] | None:
    """Return (pos, size, term) of an index unit; None if it is not whole, or not of `index`."""
    if len(raw) < INDEX_UNIT_BYTES:
        return None
    magic, pos, size, its_index, term = INDEX_UNIT.unpack(raw)
    return (pos, size, term) if (magic, its_index) == (ENTRY_MAGIC, index) else None


def pack_entry_blank(size: int) -> bytes:
    """Return the first 8 bytes of a blank of `size` bytes; zeros follow."""
    return ENTRY_BLANK.pack(ENTRY_BLANK_MAGIC, size)


def check_entry_blank(buffer: Buffer, at: int, end: int) -> int:
    """Return the size of the blank at `at` if it ends exactly at `end`, else 0."""
    left = end - at
    if left < ENTRY_BLANK.size or ENTRY_BLANK.unpack_from(buffer, at) != (ENTRY_BLANK_MAGIC, left):
        return 0
    return left


def build_own(
    lists: Lists | None, *, physical_offset: int, now_ms: int, host: Host, group_id: str = ""
) -> bytes:
    """Return the record of an entry of the group itself, with `lists` if it is a member list.

    `group_id` is the group's id, as a property.
    """
    body = b"" if lists is None else _pack_members(*lists)
    families = FLAG_IPV6 if host.is_ipv6 else 0
    return encode_record(
        Record(
            body, OWN_TOPIC,
            sys_flag=FLAG_ROLLBACK | families, physical_offset=physical_offset,
            body_crc=zlib.crc32(body) & CRC_MASK, born_timestamp_ms=now_ms, born_host=host,
            store_timestamp_ms=now_ms, store_host=host,
            properties=encode_properties([(GROUP_ID, group_id)]) if group_id else b"",
        )
    )  # fmt: skip


def group_id_in(record: Buffer) -> str:
    """Return the group's id in a valid record; nothing if it is of no entry of the group itself."""
    if not is_own(record):
        return ""
    return dict(decode_record(record).property_pairs).get(GROUP_ID, "")


def is_own(record: Buffer) -> bool:
    """Whether a valid record is of an entry of the group itself."""
    parts = find_parts(record, 0, len(record))
    return (
        parts is not None
        and parts[3] & FLAG_ROLLBACK == FLAG_ROLLBACK
        and bytes(record[parts[6] : parts[6] + parts[7]]) == OWN_TOPIC.encode()
    )


def members_in(record: Buffer) -> Lists | None:
    """Return the member list in a valid record; None if it holds none.

    Raises CorruptRecordError for a list in the form of a later version, or one that is damaged.
    """
    if not is_own(record):
        return None
    body = decode_record(record).body
    if not body:
        return None
    if (
        len(body) < _MEMBERS_HEAD.size + _CRC.size
        or not body.startswith(_MEMBERS_MAGIC)
        or _CRC.unpack(body[-_CRC.size :])[0] != zlib.crc32(body[: -_CRC.size])
    ):
        raise CorruptRecordError(
            f"a member list of {len(body)} bytes is damaged; see `hastore log verify`"
        )
    _, version, count = _MEMBERS_HEAD.unpack_from(body)
    at = _MEMBERS_HEAD.size + 4 * count
    learners = leaving = 0
    if version == _LEARNERS_VERSION and at + _MORE.size <= len(body):
        learners, leaving = _MORE.unpack_from(body, at)
        at += _MORE.size
    if (
        version not in (_MEMBERS_VERSION, _LEARNERS_VERSION)
        or len(body) != at + 4 * (learners + leaving) + _CRC.size
    ):
        raise CorruptRecordError(
            f"a member list of version {version}: a later version of hastore wrote this log"
        )
    return (
        struct.unpack_from(f">{count}I", body, _MEMBERS_HEAD.size),
        struct.unpack_from(f">{learners}I", body, at),
        struct.unpack_from(f">{leaving}I", body, at + 4 * learners),
    )


def _pack_members(
    members: Sequence[int], learners: Sequence[int] = (), leaving: Sequence[int] = ()
) -> bytes:
    more = (*learners, *leaving)
    version = _LEARNERS_VERSION if more else _MEMBERS_VERSION
    body = _MEMBERS_HEAD.pack(_MEMBERS_MAGIC, version, len(members))
    body += struct.pack(f">{len(members)}I", *members)
    if more:
        body += _MORE.pack(len(learners), len(leaving)) + struct.pack(f">{len(more)}I", *more)
    return body + _CRC.pack(zlib.crc32(body))


Check = Callable[[Buffer, int, int, int], int]

_MAGICS = (V1_MAGIC, V2_MAGIC)
_MAGIC_BYTES = tuple(magic.to_bytes(4) for magic in _MAGICS)


class PlainRecords:
    """Records without anything between them, as RocketMQ's commit log has them.

    The checks of a LogFormat raise nothing, and return the size of what is at `at`, or 0.
    """

    lead = 0  # bytes of an item before its record
    size_at = 0  # where the 4 bytes of its size lie, in an item and in a blank
    pack_blank = staticmethod(pack_blank)  # the first bytes of a blank; the others are zeros
    check_blank = staticmethod(check_blank)  # one that ends exactly at `end`
    check_item = staticmethod(check_record)  # a valid one, which lies at an offset of the log

    def max_record(self, file_size: int) -> int:
        """Return the largest record that fits a file of this size, beside the blank."""
        return file_size - BLANK_SIZE

    def announced(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size that a record's first bytes state, whether it is whole or not."""
        if end - at < SIZE_AND_MAGIC.size:
            return 0
        size, magic = SIZE_AND_MAGIC.unpack_from(buffer, at)
        return int(size) if magic in _MAGICS and size >= MIN_RECORD_SIZE else 0

    def may_begin(self, buffer: Buffer, at: int, end: int, offset: int) -> bool:
        """Whether [at, end) may begin an item that ends beyond `end`, as its size announces."""
        return may_begin_record(buffer, at, end, offset)

    def chain(self, *, units: bool = False) -> Check:
        """Return `check_item`: a record says nothing of the one before it."""
        del units
        return self.check_item

    def holds_record(self, buffer: Buffer, at: int, size: int) -> bool:
        """Return True: the item is the record."""
        del buffer, at, size
        return True


class Entries:
    """Records in DLedger's entries; `other_bodies` accepts those of other programs too."""

    lead = ENTRY_HEADER_BYTES
    size_at = 4
    pack_blank = staticmethod(pack_entry_blank)
    check_blank = staticmethod(check_entry_blank)

    def __init__(self, *, other_bodies: bool) -> None:
        self.takes = {Body.RECORD, Body.OTHER} if other_bodies else {Body.RECORD}

    def max_record(self, file_size: int) -> int:
        """Return what a file, and an entry, hold beside the blank and the header."""
        return min(file_size - ENTRY_BLANK.size, MAX_ENTRY_BYTES) - ENTRY_HEADER_BYTES

    def announced(self, buffer: Buffer, at: int, end: int) -> int:
        """Return the size that an entry's first bytes state, whether it is whole or not."""
        if end - at < ENTRY_BLANK.size:
            return 0
        magic, size = ENTRY_BLANK.unpack_from(buffer, at)
        return int(size) if magic == ENTRY_MAGIC and size >= ENTRY_HEADER_BYTES else 0

    def may_begin(self, buffer: Buffer, at: int, end: int, offset: int) -> bool:
        """Whether [at, end) may begin an item that ends beyond `end`, as its size announces."""
        stop = at + self.announced(buffer, at, end)
        return end - at < ENTRY_HEADER_BYTES or read_header(buffer, at, stop, offset) is not None

    def check_item(self, buffer: Buffer, at: int, end: int, offset: int) -> int:
        """Return the size of the valid entry at `at`; its index and term may be any."""
        header = read_header(buffer, at, end, offset)
        if header is None or body_of(buffer, at, header.size, offset) not in self.takes:
            return 0
        return header.size

    def chain(self, *, units: bool = False) -> "EntryChain":
        """Return a check of entries that follow each other; with `units` it keeps their units."""
        return EntryChain(self.takes, units=units)

    def holds_record(self, buffer: Buffer, at: int, size: int) -> bool:
        """Whether the body is a record, by its magic."""
        at += ENTRY_HEADER_BYTES
        return (
            size >= ENTRY_HEADER_BYTES + MIN_RECORD_SIZE
            and SIZE_AND_MAGIC.unpack_from(buffer, at)[1] in _MAGICS
        )


class EntryChain:
    """Check entries that must follow each other; the first may be any."""

    def __init__(self, takes: Container[Body], *, units: bool) -> None:
        self._takes = takes
        self._keep_units = units
        self.first_index: int | None = None
        self.next_index: int | None = None
        self.term = 0
        self.crc: int | None = None  # bodyCrc of the last entry
        self.units = bytearray()  # of the entries, if they are kept

    def __call__(self, buffer: Buffer, at: int, end: int, offset: int) -> int:
        """Return the size of the entry at `at` if it continues the chain, else 0."""
        header = read_header(buffer, at, end, offset)
        if header is None or header.term < self.term:
            return 0
        index = header.index
        if self.next_index not in (None, index):
            return 0
        if not follows(header.chain_crc, self.crc):
            return 0
        if body_of(buffer, at, header.size, offset) not in self._takes:
            return 0
        self.crc = header.body_crc
        if self.next_index is None:
            self.first_index = index
        self.next_index, self.term = index + 1, header.term
        if self._keep_units:
            self.units += pack_unit(index, header.term, offset, header.size)
        return header.size

    def why_not(self, buffer: Buffer, at: int, end: int, offset: int) -> str:
        """Return, for a message, why the entry at `at` does not continue the chain."""
        header = read_header(buffer, at, end, offset)
        if header is None:
            return "no valid record"
        if header.term < self.term or self.next_index not in (None, header.index):
            return f"entry {header.index} of term {header.term} does not follow"
        if not follows(header.chain_crc, self.crc):
            return (
                f"entry {header.index} follows one with bodyCrc {header.chain_crc}, but the one"
                f" before it has {self.crc}"
            )
        found = entry_crc(buffer, at, header.size)
        if header.body_crc and found != header.body_crc:
            return f"entry {header.index} has the bodyCrc {header.body_crc}, computed: {found}"
        return "no valid record"


LogFormat = PlainRecords | Entries
PLAIN = PlainRecords()
ENTRIES = Entries(other_bodies=False)
ANY_ENTRIES = Entries(other_bodies=True)


def record_places(data: bytes | memoryview, lead: int, start: int = 0) -> list[int]:
    """Return where items with a record may begin in `data`, by the records' magic."""
    raw = bytes(data)
    found = []
    for magic in _MAGIC_BYTES:
        at = raw.find(magic, start + lead + 4)
        while at >= 0:
            found.append(at - 4 - lead)
            at = raw.find(magic, at + 1)
    return sorted(found)
