"""Units of consume queues, whatever they hold: few and many are selected alike."""

from __future__ import annotations

from unittest import mock

from hastore.store.derived import consume_queue
from hastore.store.derived.consume_queue import TaggedSelection, UnitSelection, few_units
from tests.fuzz import kit

REACHES = (
    few_units, UnitSelection.select_raw, UnitSelection.select_units, UnitSelection.runs,
    TaggedSelection._few, TaggedSelection._many, TaggedSelection._take,
)  # fmt: skip
LEAST = kit.Least(0.5, 0)
UNIT = consume_queue.UNIT
HEAD = 3  # of an input: how many messages, the limits of bytes and of the log
CODES = frozenset({97, 98, 2**31})
TOKENS = (UNIT.pack(0, 2**31 - 1, 0), UNIT.pack(2**63 - 1, 91, 97), UNIT.pack(0, 0, 0))


def units(*rows: tuple[int, int, int]) -> bytes:
    """Return units: offset, size, tags code."""
    return b"".join(UNIT.pack(*row) for row in rows)


def seeds() -> list[bytes]:
    """Return queues as brokers write them, with blanks, gaps and damage."""
    usual = units(*((number * 100, 100, 97 + number % 3) for number in range(12)))
    blank = units((0, 2**31 - 1, 0), (50, 100, 97))
    wild = units((2**63 - 1, 91, 97), (-5, 91, 98), (5, -1, 97), (2**63 - 50, 100, -1))
    real = kit.golden("three-files/consumequeue/TopicA/0/00000000000000000000", 400)
    return [
        b"\x20\xff\xff" + usual,
        b"\x03\x02\x05" + usual,
        b"\x20\xff\xff" + blank + usual,
        b"\x20\xff\xff" + wild + usual,
        b"\x01\x00\xff" + usual[:100],
        b"\x20\xff\xff" + real,
        b"\x20\xff\x00" + usual,
        b"\x00\x00\x00" + wild,
    ]


def one(data: bytes) -> None:
    """Select the same units as a few, one by one, and as many, by columns."""
    kit.refuse(len(data) >= HEAD, "no limits")
    messages, most, limit = 1 + data[0], data[1] * 40, data[2] * 60
    raw = data[HEAD:]
    raw = raw[: len(raw) - len(raw) % UNIT.size]
    outcomes = []
    for least in (1, 1 << 30):
        with mock.patch.object(consume_queue, "ARRAYS_FROM_UNITS", least):
            plain = UnitSelection(messages, most, limit)
            tagged = TaggedSelection(messages, most, limit, CODES, 7)
            half = len(raw) // UNIT.size // 2 * UNIT.size
            told = []
            for selection in (plain, tagged):
                goes_on = selection.select_raw(raw[:half], 7) if half else True
                if goes_on and raw[half:]:
                    goes_on = selection.select_raw(raw[half:], 7 + half // UNIT.size)
                columns = (selection.queue_offsets, selection.offsets, selection.sizes)
                kept = [[int(one) for one in column] for column in columns]
                told.append((goes_on, kept, selection.count, selection.first, selection.beyond))
            outcomes.append((told, tagged.following))
    assert outcomes[0] == outcomes[1], outcomes
    for _, (places, offsets, sizes), count, _, _ in outcomes[0][0]:
        assert len(places) == len(offsets) == len(sizes) == count <= messages
        assert all(offset + size <= limit for offset, size in zip(offsets, sizes, strict=True))
    begins, ends = plain.runs() if plain.count else ((), ())
    assert len(begins) == len(ends)
    few_units(raw)
