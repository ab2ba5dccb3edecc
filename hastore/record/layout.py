"""The bytes of a record: each field, offset, size, flag and magic is defined here and only here.

    off  field                          bytes
      0  totalSize                      4          of the whole record
      4  magic                          4          V1 0xDAA320A7, V2 0xDAA320AB
      8  bodyCRC                        4          CRC-32(body) & 0x7FFFFFFF
     12  queueId, flag                  4 4
     20  queueOffset, physicalOffset    8 8
     36  sysFlag                        4
     40  bornTimestamp                  8
     48  bornHost                       8 / 20     address (IPv4 / IPv6), then the port
     56* storeTimestamp                 8
     64* storeHost                      8 / 20
     72* reconsumeTimes                 4
     76* preparedTransactionOffset      8
     84* bodyLength                     4
     88* body                           n
         topicLength, topic             1 / 2 n    V1 / V2
         propertiesLength, properties   2 n        name 0x01 value 0x02 ...

    * moves by 12 bytes for each IPv6 host before it

All integers are big-endian. The record header is everything before the body: 88 bytes between IPv4
hosts. A blank, [bytesLeft int32][0xCBD43194], fills the rest of a file.

The codec and the fast paths get their Structs and numpy dtypes from this module, by the names of
the fields. It does not import numpy, so a producer runs without numpy.
"""

import struct
from typing import Any

V1_MAGIC = 0xDAA320A7
V2_MAGIC = 0xDAA320AB
BLANK_MAGIC = 0xCBD43194

# Bits of sysFlag. Its two transaction bits are 0x4 for prepared, 0x8 for commit, 0xC for rollback.
# Bits 8 to 10 say how a body is compressed (record/compression.py).
FLAG_COMPRESSED = 0x1
FLAG_PREPARED = 0x4  # set in prepared and in rollback records: they take no place in a queue
FLAG_ROLLBACK = 0xC
FLAG_BORN_IPV6 = 0x10
FLAG_STORE_IPV6 = 0x20
FLAG_IPV6 = FLAG_BORN_IPV6 | FLAG_STORE_IPV6
FLAG_NEED_UNWRAP = 0x40  # RocketMQ's, for inner batches
FLAG_INNER_BATCH = 0x80  # one record that holds several messages

_FIELDS = (  # of a header between IPv4 hosts: name and struct code, in the order of the bytes
    ("size", "i"),
    ("magic", "I"),
    ("body_crc", "i"),
    ("queue_id", "i"),
    ("flag", "i"),
    ("queue_offset", "q"),
    ("physical_offset", "q"),
    ("sys_flag", "i"),
    ("born_timestamp_ms", "q"),
    ("born_address", "4s"),
    ("born_port", "i"),
    ("store_timestamp_ms", "q"),
    ("store_address", "4s"),
    ("store_port", "i"),
    ("reconsume_times", "i"),
    ("prepared_transaction_offset", "q"),
    ("body_length", "i"),
)
_IPV6_ADDRESSES = {"born_address": FLAG_BORN_IPV6, "store_address": FLAG_STORE_IPV6}
_PACKED_HOSTS = {"born_host": "born_address", "store_host": "store_address"}
_PORT_SIZE = 4
_NUMPY_FORMATS = {"i": ">i4", "I": ">u4", "q": ">i8"}


def _size(code: str) -> int:
    return struct.calcsize(">" + code)


def _places(ipv6_flags: int) -> dict[str, tuple[int, str]]:
    """Return offset and struct code of each field, for hosts of these address families."""
    found: dict[str, tuple[int, str]] = {}
    at = 0
    for name, code in _FIELDS:
        if ipv6_flags & _IPV6_ADDRESSES.get(name, 0):
            code = "16s"
        found[name] = at, code
        at += _size(code)
    found["body"] = at, ""
    # These are more names for the same bytes. `unsigned_size` is totalSize without a sign: then a
    # negative size counts as too large. `born_host` and `store_host` are address and port as one
    # value.
    found["unsigned_size"] = 0, "I"
    for host, address in _PACKED_HOSTS.items():
        start, code = found[address]
        found[host] = start, f"{_size(code) + _PORT_SIZE}s"
    return found


_FAMILIES = (0, FLAG_BORN_IPV6, FLAG_STORE_IPV6, FLAG_IPV6)
_PLACES = {flags: _places(flags) for flags in _FAMILIES}


def offset_of(name: str, *, ipv6_flags: int = 0) -> int:
    """Return the offset of a field, or of the body, in the record."""
    return _PLACES[ipv6_flags][name][0]


def numpy_format(name: str) -> str:
    """Return the numpy format of an integer field, for example ">i4"."""
    return _NUMPY_FORMATS[_PLACES[0][name][1]]


def header_struct(*names: str, ipv6_flags: int = 0, start: int = 0) -> struct.Struct:
    """Return a Struct of some fields, in the record's order, with padding between them.

    It begins at byte `start` of the record and ends after the last field named. If that field is
    "body_length", it ends where the header ends. `unpack` skips the padding, `pack` fills it with
    zeros.
    """
    form, end = ">", start
    for name in names:
        at, code = _PLACES[ipv6_flags][name]
        form += f"{at - end}x{code}" if at != end else code
        end = at + _size(code)
    return struct.Struct(form)


def header_dtype(*names: str) -> Any:
    """Return the argument of numpy.dtype for some integer fields of a header between IPv4 hosts."""
    return {
        "names": list(names),
        "formats": [numpy_format(name) for name in names],
        "offsets": [offset_of(name) for name in names],
        "itemsize": HEADER_SIZE,
    }


HEADER_SIZE = offset_of("body")  # between IPv4 hosts
HEADER_SIZES = {flags: offset_of("body", ipv6_flags=flags) for flags in _FAMILIES}
IPV6_EXTRA = HEADER_SIZES[FLAG_BORN_IPV6] - HEADER_SIZE  # each IPv6 host takes so much more
TAIL_MIN = 3  # bytes after the body: V1's topicLength, and propertiesLength
MIN_RECORD_SIZE = HEADER_SIZE + TAIL_MIN  # V1, IPv4, without body, topic and properties
MAX_RECORD_SIZE = 0x7FFFFFFF  # an int32
CRC_MASK = 0x7FFFFFFF  # bodyCRC is never negative as an int32
V1_MAX_TOPIC_BYTES = 127  # V1's topicLength is a signed byte
MAX_TOPIC_BYTES = 32767
MAX_PROPERTIES_BYTES = 32767

SIZE_AND_MAGIC = header_struct("size", "magic")  # of a record, or of a blank
BLANK_SIZE = SIZE_AND_MAGIC.size  # bytes that stay free after the last record of each file
# All fields of the header, by sysFlag & FLAG_IPV6.
HEADERS = {
    flags: header_struct("unsigned_size", *(name for name, _ in _FIELDS[1:]), ipv6_flags=flags)
    for flags in _FAMILIES
}
# The fields from the start to sysFlag, which says how far IPv6 hosts move the later fields.
PREFIX = header_struct(
    *("unsigned_size", "magic", "body_crc", "queue_id", "flag", "queue_offset"),
    *("physical_offset", "sys_flag"),
)

# The fields that the master fills in at an append, with their offsets.
OFFSETS_AT = offset_of("queue_offset")
OFFSETS = header_struct("queue_offset", "physical_offset", start=OFFSETS_AT)
STORE_AT = offset_of("store_timestamp_ms")  # IPV6_EXTRA later if bornHost is IPv6
_STORE = ("store_timestamp_ms", "store_address", "store_port")
STORE_IPV4 = header_struct(*_STORE, start=STORE_AT)
STORE_IPV6 = header_struct(*_STORE, start=STORE_AT, ipv6_flags=FLAG_STORE_IPV6)


def store_at(sys_flag: int) -> int:
    """Return the offset of storeTimestamp in a record with this sysFlag."""
    return STORE_AT + IPV6_EXTRA if sys_flag & FLAG_BORN_IPV6 else STORE_AT
