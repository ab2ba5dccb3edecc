"""Find the first record that differs, and describe it: both versions, their fields, what is wrong.

All bytes before the first difference are equal on both sides, so one side's bytes are enough to
find where the record, the blank or the header of an entry begins that contains it. A record is
recognized by its magic and by its own physicalOffset; from there on the sizes lead to the next
ones. In a log of DLedger's entries the header of an entry comes before each record.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zlib_ng.zlib_ng import crc32

from hastore.record.codec import Host, check_record, check_unreadable
from hastore.record.layout import (
    BLANK_MAGIC,
    BLANK_SIZE,
    CRC_MASK,
    FLAG_IPV6,
    HEADER_SIZE,
    HEADER_SIZES,
    HEADERS,
    MIN_RECORD_SIZE,
    SIZE_AND_MAGIC,
    V1_MAGIC,
    V2_MAGIC,
    header_struct,
    offset_of,
)
from hastore.record.log_format import (
    ENTRY_BLANK,
    ENTRY_BLANK_MAGIC,
    ENTRY_HEADER,
    ENTRY_HEADER_BYTES,
    ENTRY_MAGIC,
    EntryHeader,
    entry_crc,
    read_header,
)
from hastore.record.properties import decode_properties

Read = Callable[[int, int], bytes | None]  # the bytes [start, end) of a log; None: not there
STEPS_BYTES = (64 * 1024, 1024 * 1024, 6 * 1024 * 1024)  # how far back to search; then: 64 MiB
FAR_BYTES = 64 * 1024 * 1024
_FRONT = header_struct("size", "magic", "physical_offset")
_MAGICS = (V1_MAGIC, V2_MAGIC)
_ENTRY_SIZE_MAX = (1 << 32) - 1  # what its field can hold

# -- where it begins


def record_start(read: Read, low: int, at: int) -> int | None:
    """Return where the item that contains byte `at` begins; None if it is unknown.

    An item is a record, a blank, or the header of an entry. The bytes [`low`, `at`) are searched
    backwards. An item is taken to begin at `low`, unless one is found after it.
    """
    for step in (*STEPS_BYTES, FAR_BYTES):
        base = max(low, at - step)
        data = read(base, at)
        if data is None:
            return None
        found = _last_record(data, base)
        if found is not None:
            return _follow(data, base, found, at)
        if base == low:
            return _follow(data, base, low, at)
    return None


def _last_record(data: bytes, base: int) -> int | None:
    """Return the last offset at which a record's magic and its own offset stand."""
    best = None
    if len(data) < _FRONT.size:
        return None
    for magic in _MAGICS:
        mark = magic.to_bytes(4)
        found = data.rfind(mark, 4, len(data) - _FRONT.size + 8)
        while found >= 4:
            at = found - 4
            if _FRONT.unpack_from(data, at)[2] == base + at:
                best = at if best is None else max(best, at)
                break
            found = data.rfind(mark, 4, found + 3)
    return None if best is None else base + best


def _follow(data: bytes, base: int, start: int, at: int) -> int:
    """Follow the sizes from an item's start to the item that contains `at`."""
    while start + BLANK_SIZE <= at:
        size = _size_of(data, start - base, start)
        if not size or start + size > at:
            break
        start += size
    return start


def _size_of(data: bytes, place: int, offset: int) -> int:
    """Return the size of the item at `place`, which lies at `offset` of its log; 0: unknown."""
    size, magic = SIZE_AND_MAGIC.unpack_from(data, place)
    if magic in (*_MAGICS, BLANK_MAGIC) and size >= BLANK_SIZE:
        return int(size)
    magic, size = ENTRY_BLANK.unpack_from(data, place)
    if magic == ENTRY_BLANK_MAGIC and size >= ENTRY_BLANK.size:
        return int(size)
    return ENTRY_HEADER_BYTES if entry_header(data, place, offset) is not None else 0


def entry_header(data: bytes, place: int, offset: int) -> EntryHeader | None:
    """Return the sound header of an entry at `place`, which lies at `offset` of its log."""
    if len(data) - place < ENTRY_HEADER_BYTES:
        return None
    return read_header(data, place, place + _ENTRY_SIZE_MAX, offset)


# -- what it is

SHOWN_BYTES = 64 * 1024  # of a body, in JSON
RECORD_BYTES_MAX = 64 * 1024 * 1024  # a size beyond it counts as damaged
UNKNOWN_BYTES = 256  # shown around a difference without a record
# The fields of a header, with the names that `hastore log dump --json` gives them.
_NAMES = {
    "size": "size",
    "magic": "magic",
    "body_crc": "body_crc",
    "queue_id": "queue_id",
    "flag": "flag",
    "queue_offset": "queue_offset",
    "physical_offset": "offset",
    "sys_flag": "sys_flag",
    "born_timestamp_ms": "born_ms",
    "born_address": "born_host",
    "born_port": "born_host",
    "store_timestamp_ms": "store_ms",
    "store_address": "store_host",
    "store_port": "store_host",
    "reconsume_times": "reconsume_times",
    "prepared_transaction_offset": "prepared_offset",
    "body_length": "body_size",
}
# The fields of an entry's header, and where each begins.
_ENTRY_FIELDS = dict(
    zip(EntryHeader.__struct_fields__, (0, 4, 8, 16, 24, 32, 36, 40, 44), strict=True)
)
_SYS_FLAG = header_struct("sys_flag")


@dataclass(frozen=True)
class Version:
    """What one side has in the place of the difference; all values are JSON's."""

    where: str
    what: str  # "record", "entry", "blank", "damaged record", "damaged entry", "no record"
    problem: str | None  # what is wrong with it; None: it is a valid record or blank
    size: int  # bytes
    sha256: str  # of these bytes
    fields: dict[str, Any] = field(default_factory=dict)
    body_base64: str = ""  # the first SHOWN_BYTES
    body_bytes: int = 0


@dataclass(frozen=True)
class Difference:
    """The first difference, and the record, or the header of an entry, that contains it."""

    offset: int  # where that begins; the byte itself if no record is known there
    byte: int  # the first byte that differs
    part: str  # the field that contains this byte
    values: tuple[str, str]  # the bytes from `byte` on, as hex: on side A, on side B
    differing: tuple[str, ...]  # the names of all fields that differ
    verdict: str
    a: Version
    b: Version
    item: str = "record"  # or "entry": then the difference is in its header


def describe_difference(
    where: tuple[str, str],
    raws: tuple[bytes, bytes],
    start: int,
    byte: int,
    files_differ: bool,
    epochs: tuple[int, int] | None,
    head: bytes = b"",
) -> Difference:
    """Describe a difference; `raws` are each side's bytes from the record's start on.

    `epochs` are those that wrote it, as two nodes state. `head` is what lies before the record on
    both sides: in a log of entries, the header of its entry.
    """
    if any(entry_header(raw, 0, start) is not None for raw in raws):
        return _describe_entry(where, raws, start, byte, epochs)
    a, b = (_version(name, raw, start, head) for name, raw in zip(where, raws, strict=True))
    at = byte - start
    part = next((_part_at(raw, at) for raw in raws if _is_valid(raw, start)), _part_at(raws[0], at))
    names = [*a.fields, *(name for name in b.fields if name not in a.fields)]
    differing = [name for name in names if a.fields.get(name) != b.fields.get(name)]
    if a.body_base64 != b.body_base64 or a.body_bytes != b.body_bytes:
        differing.append("body")
    return Difference(
        start,
        byte,
        part,
        (raws[0][at : at + 16].hex(" "), raws[1][at : at + 16].hex(" ")),
        tuple(differing),
        _verdict(a, b, files_differ, epochs),
        a,
        b,
    )


def _describe_entry(
    where: tuple[str, str],
    raws: tuple[bytes, bytes],
    start: int,
    byte: int,
    epochs: tuple[int, int] | None,
) -> Difference:
    """Describe a difference in the header of an entry, which is sound on one side at least."""
    a, b = (_entry_version(name, raw, start) for name, raw in zip(where, raws, strict=True))
    at = byte - start
    part = next(name for name, begin in reversed(_ENTRY_FIELDS.items()) if begin <= at)
    differing = tuple(name for name in _ENTRY_FIELDS if a.fields.get(name) != b.fields.get(name))
    values = raws[0][at : at + 16].hex(" "), raws[1][at : at + 16].hex(" ")
    verdict = _verdict(a, b, False, epochs, item="entry")
    return Difference(start, byte, part, values, differing, verdict, a, b, "entry")


def _entry_version(where: str, raw: bytes, start: int) -> Version:
    """Describe the header of the entry that should begin at `start`."""
    whole, raw = raw, raw[:ENTRY_HEADER_BYTES]
    if len(raw) < ENTRY_HEADER_BYTES:
        text = f"only {len(raw)} bytes of it can be compared"
        return Version(where, "damaged entry", text, len(raw), _sha256(raw))
    fields = dict(zip(_ENTRY_FIELDS, ENTRY_HEADER.unpack(raw), strict=True))
    what, problem = "entry", None
    if fields["magic"] != ENTRY_MAGIC:
        problem = f"no entry begins here: its magic is {fields['magic']:08x}"
    elif fields["pos"] != start:
        problem = f"its pos is {fields['pos']}, not its place {start}"
    elif fields["size"] != ENTRY_HEADER_BYTES + fields["body_size"]:
        problem = f"its size is {fields['size']}, with a body of {fields['body_size']} bytes"
    elif min(fields["index"], fields["term"]) < 0:
        problem = f"its index is {fields['index']}, its term {fields['term']}"
    else:
        problem = _crc_problem(whole, start)
    if problem is not None:
        what = "damaged entry"
    return Version(where, what, problem, len(raw), _sha256(raw), fields)


def _crc_problem(raw: bytes, start: int) -> str | None:
    """Say what is wrong with the CRC of the entry that begins at `start`, if it has one."""
    header = entry_header(raw, 0, start)
    if header is None or header.size > len(raw):
        return None
    computed = entry_crc(raw, 0, header.size) if header.body_crc else header.chain_crc
    if computed == header.body_crc:
        return None
    return f"its entry has the bodyCrc {header.body_crc}, computed: {computed}"


def describe_unknown(where: tuple[str, str], raws: tuple[bytes, bytes], byte: int) -> Difference:
    """Describe a difference in bytes in which no record was found."""
    a, b = (
        Version(
            name, "no record", "no record was found around it", len(raw), _sha256(raw),
            body_base64=_base64(raw), body_bytes=len(raw),
        )
        for name, raw in zip(where, raws, strict=True)
    )  # fmt: skip
    values = raws[0][:16].hex(" "), raws[1][:16].hex(" ")
    text = "neither side has a record here that can be recognized"
    return Difference(byte, byte, "unknown", values, (), text, a, b)


def size_of(raw: bytes) -> int:
    """Return how many bytes the item that begins here takes, if its front is right."""
    if len(raw) < SIZE_AND_MAGIC.size:
        return len(raw)
    size, magic = SIZE_AND_MAGIC.unpack_from(raw)
    if magic in _MAGICS and MIN_RECORD_SIZE <= size <= RECORD_BYTES_MAX:
        return int(size)
    first, entry_size = ENTRY_BLANK.unpack_from(raw)
    if first == ENTRY_MAGIC and ENTRY_HEADER_BYTES <= entry_size <= RECORD_BYTES_MAX:
        return int(entry_size)
    return BLANK_SIZE if magic == BLANK_MAGIC else HEADER_SIZES[FLAG_IPV6]


def blank_size(raw: bytes) -> int | None:
    """Return the size of the blank that begins here; None if none does."""
    if len(raw) < BLANK_SIZE:
        return None
    size, magic = SIZE_AND_MAGIC.unpack_from(raw)
    if magic != BLANK_MAGIC:
        magic, size = ENTRY_BLANK.unpack_from(raw)
        if magic != ENTRY_BLANK_MAGIC:
            return None
    return int(size) if size >= BLANK_SIZE else None


def _version(where: str, raw: bytes, start: int, head: bytes) -> Version:
    """Describe the bytes of one side, which begin at offset `start`, after `head`."""
    blank = blank_size(raw)
    if blank is not None:
        is_plain = SIZE_AND_MAGIC.unpack_from(raw)[1] == BLANK_MAGIC
        fields = {"size": blank, "magic": BLANK_MAGIC if is_plain else ENTRY_BLANK_MAGIC}
        return Version(where, "blank", None, BLANK_SIZE, _sha256(raw[:BLANK_SIZE]), fields)
    raw = raw[: size_of(raw)]
    fields, body = _fields(raw), _body(raw)
    what, problem = "record", None
    if not _is_valid(raw, start):
        what = "damaged record" if fields.get("magic") in _MAGICS else "no record"
        problem = _problem(raw, start)
    elif problem := _crc_problem(head + raw, start - len(head)):
        what = "damaged record"
    return Version(where, what, problem, len(raw), _sha256(raw), fields, _base64(body), len(body))


def _part_at(raw: bytes, at: int) -> str:
    """Return the name of the field that contains byte `at` of a record or blank."""
    if blank_size(raw) is not None:
        return "the header of a blank" if at < BLANK_SIZE else "a blank"
    flags = _flags(raw)
    found = "size"
    for name, shown in _NAMES.items():
        if offset_of(name, ipv6_flags=flags) > at:
            return found
        found = shown
    body_at = offset_of("body", ipv6_flags=flags)
    if at < body_at:
        return found
    if len(raw) < body_at:
        return "body"
    length = max(0, int.from_bytes(raw[body_at - 4 : body_at], signed=True))
    topic_at = body_at + length
    if at < topic_at:
        return "body"
    wide = 1 if raw[4:8] == V1_MAGIC.to_bytes(4) else 2
    if at < topic_at + wide:
        return "topic_length"
    properties_at = topic_at + wide + int.from_bytes(raw[topic_at : topic_at + wide])
    if at < properties_at:
        return "topic"
    return "properties_length" if at < properties_at + 2 else "properties"


def _is_valid(raw: bytes, start: int) -> bool:
    size = len(raw[: size_of(raw)])
    return bool(check_record(raw, 0, size, start) or check_unreadable(raw, 0, size, start))


def _flags(raw: bytes) -> int:
    if len(raw) < HEADER_SIZE:
        return 0
    return int(_SYS_FLAG.unpack_from(raw)[0] & FLAG_IPV6)


def _header(raw: bytes) -> dict[str, Any]:
    """Return the fields of the header by their names in layout.py; {} if it is not whole."""
    form = HEADERS[_flags(raw)]
    if len(raw) < form.size:
        return {}
    return dict(zip(_NAMES, form.unpack_from(raw), strict=True))


def _fields(raw: bytes) -> dict[str, Any]:
    """Return a record's fields, right or wrong, by the names of `hastore log dump`."""
    header = _header(raw)
    shown = {
        _NAMES[name]: value
        for name, value in header.items()
        if not name.endswith(("_address", "_port"))
    }
    if not header:
        return shown
    for name in ("born", "store"):
        host = Host(header[f"{name}_address"], header[f"{name}_port"] & 0xFFFFFFFF)
        shown[f"{name}_host"] = host.text
    at = HEADER_SIZES[_flags(raw)] + max(0, header["body_length"])
    wide = 1 if header["magic"] == V1_MAGIC else 2
    end = at + wide + int.from_bytes(raw[at : at + wide])
    if header["magic"] in _MAGICS and at + wide <= len(raw):
        shown["topic"] = raw[at + wide : end].decode("utf-8", "backslashreplace")
        properties = raw[end + 2 : end + 2 + int.from_bytes(raw[end : end + 2])]
        shown["properties"] = [
            [part.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
             for part in pair]
            for pair in decode_properties(properties)
        ]  # fmt: skip
    return shown


def _body(raw: bytes) -> bytes:
    at = HEADER_SIZES[_flags(raw)]
    if len(raw) < at:
        return raw
    length = int.from_bytes(raw[at - 4 : at], signed=True)
    return raw[at : at + length] if 0 <= length <= len(raw) - at else raw[at:]


def _problem(raw: bytes, start: int) -> str:
    """Say why these bytes are no valid record."""
    shown = _header(raw)
    if not shown:
        return f"only {len(raw)} bytes of it can be compared"
    if shown["magic"] not in _MAGICS:
        return f"no record begins here: its magic is {shown['magic']:08x}"
    if shown["physical_offset"] != start:
        return f"its physicalOffset is {shown['physical_offset']}, not its place {start}"
    if not MIN_RECORD_SIZE <= shown["size"] <= RECORD_BYTES_MAX:
        return f"its size is {shown['size']}"
    if len(raw) < shown["size"]:
        return f"it ends at {start + shown['size']}, beyond the compared range"
    at = HEADER_SIZES[_flags(raw)]
    length = shown["body_length"]
    if not 0 <= length <= len(raw) - at:
        return f"its body's length is {length} in a record of {len(raw)} bytes"
    computed = crc32(raw[at : at + length]) & CRC_MASK
    if computed != shown["body_crc"]:
        return f"its body has a wrong CRC: {computed}, and bodyCRC is {shown['body_crc']}"
    return "the lengths of its topic and properties do not fit its size"


def _verdict(
    a: Version,
    b: Version,
    files_differ: bool,
    epochs: tuple[int, int] | None,
    item: str = "record",
) -> str:
    if a.problem and b.problem:
        return f"the {item} is damaged on both sides"
    for bad, good in ((a, b), (b, a)):
        if bad.problem:
            return f"the {item} is damaged at {bad.where}: {bad.problem}; {good.where} has it whole"
    if epochs is not None and epochs[0] != epochs[1]:
        return (
            f"both sides are valid, but other masters wrote them: epoch {epochs[0]} at {a.where}, "
            f"epoch {epochs[1]} at {b.where}: the nodes' histories differ; see `hastore status`"
        )
    if files_differ:
        return (
            "both sides are valid, and their log files have different sizes: the same records then "
            "lie at different offsets after the first file, and these logs cannot be compared"
        )
    if a.what == "blank" or b.what == "blank":
        return "both sides are valid: one file ends here, the other goes on: two different logs"
    return (
        "both sides are valid records with a right CRC: the logs were written differently, or a "
        "field that the CRC does not cover was changed"
    )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw[:SHOWN_BYTES]).decode()
