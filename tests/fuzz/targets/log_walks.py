"""Bytes of a log: both walks of replay take the same records, and the scrub steps over damage."""

from __future__ import annotations

import zlib
from unittest import mock

from hastore.record import log_walk
from hastore.record.codec import Host, check_record, pack_blank
from hastore.record.log_format import ANY_ENTRIES, PLAIN
from hastore.record.log_walk import LogWalk
from hastore.store.derived.scalar_walk import ScalarWalker, Stop
from hastore.store.derived.vector_walk import VectorWalker
from tests.fuzz import kit
from tests.fuzz.targets.entries import entries_of
from tests.fuzz.targets.records import record

REACHES = (
    ScalarWalker.walk, ScalarWalker._ended_entries, VectorWalker.walk, VectorWalker._read_batch,
    LogWalk.next_damage, LogWalk._damage, LogWalk._next_good, VectorWalker._add_tails,
)  # fmt: skip
LEAST = kit.Least(0.12, 2)
FILE = 1 << 14
BASE = 3 * FILE
WINDOW = 300  # bytes


def records(count: int, start: int = 0, **fields: object) -> bytes:
    """Return records that follow each other from an offset of the log on."""
    out = bytearray()
    for number in range(count):
        more = {"queue_offset": number, "body": b"x" * (number % 3), **fields}
        out += record(physical_offset=start + len(out), store_timestamp_ms=number, **more)
    return bytes(out)


def seeds() -> list[bytes]:
    """Return whole logs, damaged ones, and logs of entries; the first byte says which."""
    real = kit.golden("three-files/commitlog/00000000000000000000", 3_000)
    alike = records(6, BASE, body=b"same")
    mixed = alike + records(3, BASE + len(alike), sys_flag=0x30, born_host=SIX, store_host=SIX)
    odd = records(1, BASE, topic="SCHEDULE_TOPIC_XXXX", properties=b"DELAY\x013\x02")
    left = FILE - len(alike)
    return [
        b"p" + alike, b"p" + mixed, b"p" + odd, b"p" + alike[:-9], b"p" + alike[:200] + alike[250:],
        b"p" + alike + pack_blank(left) + bytes(left - 8), b"p" + alike + bytes(300), b"g" + real,
        b"p" + alike[:130] + b"\xff" + alike[131:], b"e" + entries_of(5, BASE)[0],
        b"e" + entries_of(5, BASE, crcs=False)[0] + bytes(60), b"e" + entries_of(2, BASE)[0][:-5],
        b"p" + records(2, BASE, topic="é" * 80, magic=0xDAA320AB),
    ]  # fmt: skip


SIX = Host(bytes(range(16)), 7)


def repaired(data: bytes) -> bytes:
    """Return the log with each record's offset where it lies, as far as sizes lead."""
    if data[:1] != b"p":
        return data
    raw, at = bytearray(data[1:]), 0
    while at + 91 <= len(raw):
        size = int.from_bytes(raw[at : at + 4])
        if not 91 <= size <= len(raw) - at:
            break
        raw[at + 28 : at + 36] = (BASE + at).to_bytes(8)
        body = int.from_bytes(raw[at + 84 : at + 88])
        raw[at + 8 : at + 12] = (zlib.crc32(raw[at + 88 : at + 88 + body]) & 0x7FFFFFFF).to_bytes(4)
        at += size
    return data[:1] + bytes(raw)


def one(data: bytes) -> None:
    """Walk in both ways, then look for damage: its ranges and what is valid make up the log."""
    kind, raw = data[:1], data[1 : FILE + 1]
    form, base = (ANY_ENTRIES if kind == b"e" else PLAIN), (0 if kind == b"g" else BASE)
    scalar = ScalarWalker(form)
    expected = scalar.walk(raw, base, FILE)
    # Each batch is read by columns; what differs is left to the scalar walk.
    vector = VectorWalker(ScalarWalker(form), batch_min=1).walk(memoryview(raw), base, FILE)
    assert list(vector.batch) == list(expected.batch)
    assert vector[1:] == expected[1:]
    assert 0 <= expected.consumed <= len(raw)
    read = _read(raw, base)
    walk = LogWalk(form, read, FILE, base, base + len(raw), ends_whole=False)
    # In small windows too, so that items are cut by their ends.
    window = WINDOW if len(raw) % 2 else log_walk.WINDOW_BYTES
    with mock.patch.object(log_walk, "WINDOW_BYTES", window):
        ranges = _damages(walk, form is PLAIN, raw, base)
    kit.refuse(expected.stop is not Stop.BAD and not ranges, f"{expected.stop.name} {ranges > 0}")


def _damages(walk: LogWalk, is_plain: bool, raw: bytes, base: int) -> int:
    """Walk to the end; return how many damaged ranges there are."""
    at, ranges = base, 0
    while (damage := walk.next_damage()) is not None:
        assert at <= damage.start < damage.end <= base + len(raw), (at, damage)
        if is_plain:
            _sound(raw, base, at, damage.start)
        at = damage.end
        walk.skip(damage)
        ranges += 1
        assert ranges <= len(raw), "the walk ends"
    assert at <= walk.offset <= base + FILE
    return ranges


def _read(raw: bytes, base: int):  # type: ignore[no-untyped-def]
    return lambda offset, size: raw[offset - base : offset - base + size]


def _sound(raw: bytes, base: int, start: int, end: int) -> None:
    """What lies between damaged ranges is valid."""
    at = start - base
    while at < end - base:
        size = check_record(raw, at, len(raw), base + at)
        if not size:
            left = FILE - at % FILE
            assert PLAIN.check_blank(raw.ljust(at + left, b"\0"), at, at + left), "unsound, unsaid"
            size = left
        at += size
