"""Places of a pull: an array of queue units gives the same as each unit alone."""

import random

import pytest

from hastore.store.derived.queues.consume_queue import UNIT, UnitSelection
from hastore.store.derived.queues.unit_files import BLANK_UNIT_SIZE


@pytest.mark.parametrize("seed", range(12))
def test_many_units_are_taken_as_each_alone(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        units, offset = [], chance.randrange(1_000)
        for _ in range(chance.choice((70, 300))):
            size = chance.choice((91, 200, 1_150))
            units.append((offset, chance.choice((size, size, size, 0, BLANK_UNIT_SIZE)), 7))
            offset += size + chance.choice((0, 0, 3_000))
        limit = chance.choice((offset, chance.randrange(offset), 0))
        bounds = chance.choice((5, 1_000)), chance.choice((1, 10_000, 1 << 30)), limit
        many, each = UnitSelection(*bounds), UnitSelection(*bounds)
        for begin in range(0, len(units), 150):
            part = units[begin : begin + 150]
            raw = b"".join(UNIT.pack(*unit) for unit in part)
            more = each.take_each(enumerate(part, begin))
            assert many.take(raw, begin) == more, seed
            assert many.count == each.count == len(each.queue_offsets)
            for name in ("queue_offsets", "offsets", "sizes"):
                assert list(getattr(many, name)) == list(getattr(each, name)), seed
            assert many.first == each.first
            if not more:
                break
