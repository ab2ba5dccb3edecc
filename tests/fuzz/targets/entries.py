"""Entries of a DLedger log: chains, CRCs, member lists; the check of many is that of each one."""

from __future__ import annotations

from unittest import mock

from hastore.dledger.store import entry_bulk_check, entry_check
from hastore.errors import CorruptRecordError, ProtocolError
from hastore.protocol.dledger import AppendRequest, MemberSet, wire_lists
from hastore.record import log_format
from hastore.record.log_format import (
    ANY_ENTRIES,
    ENTRIES,
    ENTRY_HEADER_BYTES,
    Body,
    body_of,
    build_own,
    fill_in_crcs,
    group_id_in,
    members_in,
    pack_entry_blank,
    pack_header,
    read_header,
    unpack_unit,
)
from tests.fuzz import kit
from tests.fuzz.targets.records import IPV4, record
from tests.fuzz.targets.records import repaired as repaired_record

REACHES = (
    read_header, body_of, members_in, group_id_in, log_format.EntryChain.__call__,
    log_format.EntryChain.why_not, entry_check.check_taken, entry_check._check_body,
    entry_bulk_check.units_of, entry_bulk_check._crcs_right,
)  # fmt: skip
LEAST = kit.Least(0.12, 4)
FILE = 1 << 20
PREV = 6


def entries_of(
    count: int, pos: int = 0, *, crcs: bool = True, members: MemberSet | None = None
) -> tuple[bytes, AppendRequest]:
    """Return entries from a position on, and the request that announces them."""
    out, lists, runs = bytearray(), [], [(3, count)]
    for number in range(count):
        at = pos + len(out) + ENTRY_HEADER_BYTES
        body = record(physical_offset=at, queue_offset=number, body=b"x" * (number % 4))
        if members is not None and number == count - 1:
            body = build_own(members, physical_offset=at, now_ms=5, host=IPV4, group_id="g")
            lists.append((PREV + count, members))
        out += pack_header(PREV + 1 + number, 3, pos + len(out), len(body)) + body
    if crcs:
        fill_in_crcs(out, 0)
    request = AppendRequest(4, PREV, 2, pos, len(out), tuple(runs), 5, *wire_lists(lists))
    return bytes(out), request


def seeds() -> list[bytes]:
    """Return entries of hastore's and of DLedger's own, and index units."""
    lists = MemberSet((1, 2, 3), (4,), (2,))
    real = [
        kit.golden(f"{name}/store/dledger-n0/data/00000000000000000000", 1_500)
        for name in ("dledger-rocketmq", "dledger-terms", "dledger-killed")
    ]
    blank = pack_entry_blank(300)
    return [
        *(bytes((0,)) + raw for raw in real),
        b"\x05" + entries_of(5)[0],
        b"\x05" + entries_of(5, crcs=False)[0],
        b"\x01" + entries_of(1)[0],
        b"\x02" + entries_of(2, members=lists)[0],
        b"\x02" + entries_of(2, members=MemberSet((1,)))[0],
        b"\x02" + entries_of(2)[0][:-1],
        b"\0" + blank,
        b"\x14" + entries_of(20)[0],
        b"\x03" + entries_of(3)[0][:70] + b"\xff" + entries_of(3)[0][71:],
        b"\0" + kit.golden("dledger-rocketmq/store/dledger-n0/index/00000000000000000000", 32),
    ]


def repaired(data: bytes) -> bytes:
    """Return the bytes as entries that follow each other, with right sizes and CRCs."""
    raw, out, number = data[1:], bytearray(), 0
    at = 0
    while at + ENTRY_HEADER_BYTES + 91 <= len(raw):
        size = int.from_bytes(raw[at + 4 : at + 8])
        if not ENTRY_HEADER_BYTES + 91 <= size <= len(raw) - at:
            size = len(raw) - at
        body = bytearray(repaired_record(raw[at + ENTRY_HEADER_BYTES : at + size]))
        body[28:36] = (len(out) + ENTRY_HEADER_BYTES).to_bytes(8)
        out += pack_header(PREV + 1 + number, 3, len(out), len(body)) + body
        at += size
        number += 1
    if out:
        fill_in_crcs(out, 0)
    return bytes((min(number, 255),)) + bytes(out) + raw[at:]


def one(data: bytes) -> None:
    """Check entries one after the other as a chain, and all of them as a leader's append."""
    count, raw = data[0] if data else 0, data[1:]
    unpack_unit(raw[:32], int.from_bytes(raw[16:24]))
    for form in (ENTRIES, ANY_ENTRIES):
        chain, at = form.chain(units=True), 0
        while size := chain(raw, at, len(raw), at):  # type: ignore[operator]
            assert (
                form.check_item(raw, at, len(raw), at) == size == form.announced(raw, at, len(raw))
            )
            at += size
        if at < len(raw):
            assert chain.why_not(raw, at, len(raw), at)  # type: ignore[union-attr]
            assert form.check_blank(raw, at, len(raw)) in (0, len(raw) - at)
        assert len(chain.units) % 32 == 0  # type: ignore[union-attr]
    header = read_header(raw, 0, len(raw), 0)
    if header is not None and body_of(raw, 0, header.size, 0) is Body.RECORD:
        body = raw[ENTRY_HEADER_BYTES : header.size]
        group_id_in(body)
        with kit.documented(CorruptRecordError):
            members_in(body)
    _append(count, raw)


def _append(count: int, raw: bytes) -> None:
    """Take the bytes as a leader's append: each check gives what the other gives."""
    request = AppendRequest(4, PREV, 2, 0, len(raw), ((3, count),), 5)
    try:
        body = raw[ENTRY_HEADER_BYTES:] if count == 1 else b""
        found = members_in(body) if body else None
    except CorruptRecordError:
        found = None
    if found is not None:
        request = AppendRequest(
            4, PREV, 2, 0, len(raw), ((3, count),), 5, *wire_lists([(PREV + 1, MemberSet(*found))])
        )
    outcomes = []
    for least in (1, 1 << 30):
        with mock.patch.object(entry_check, "_BULK_MIN", least):
            try:
                outcomes.append(entry_check.check_taken(request, memoryview(raw), 0, FILE))
            except ProtocolError as refused:
                outcomes.append(str(refused))
    assert outcomes[0] == outcomes[1], outcomes
    if isinstance(outcomes[0], str):
        with kit.documented(ProtocolError):
            entry_check.check_taken(request, memoryview(raw), 0, FILE)
