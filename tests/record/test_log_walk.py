"""A walk over a log finds each damaged range, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from hastore.record import log_walk
from hastore.record.log_walk import LogWalk
from tests.repair.kit import FILE_SIZE, Log, blank_of, damages, entries, plain, rot, with_forged

# Where a part of a record between IPv4 hosts begins; `fill` makes bodies of 4 bytes.
SEEN = {
    "size": 0, "magic": 4, "crc": 8, "physical offset": 28, "body length": 84, "body": 88,
    "topic length": 92,
}  # fmt: skip


@pytest.fixture(scope="module")
def of_entries(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return entries(tmp_path_factory.mktemp("entries"))


@pytest.fixture(params=["plain", "entries"])
def log(request: pytest.FixtureRequest, of_entries: Log) -> Log:
    return plain() if request.param == "plain" else of_entries.copy()


def test_a_sound_log_has_no_damage(log: Log) -> None:
    assert damages(log.own()) == []
    assert len(log.data) > 2 * FILE_SIZE, "it has several files"


@pytest.mark.parametrize("part", SEEN)
@pytest.mark.parametrize("number", [0, 50, -1])
def test_each_part_of_a_record_that_has_a_check(part: str, number: int) -> None:
    log = plain()
    start, end = log.items[number]
    log.flip(start + SEEN[part], 0x11)
    assert damages(log.own()) == [(start, end)]


def test_every_byte_of_an_entry_has_a_check(of_entries: Log) -> None:
    for number in (0, 60, 149):
        start, end = of_entries.items[number]
        first = of_entries.items[max(number - 2, 0)][0]
        last = of_entries.items[min(number + 2, 149)][1]
        log = of_entries.copy()
        for at in range(start, end):
            log.flip(at, 0x11)
            assert damages(log.own(), first, last) == [(start, end)], at - start
            log.flip(at, 0x11)


def test_an_entry_that_lost_both_crcs_is_known_by_the_one_after_it(of_entries: Log) -> None:
    log = of_entries.copy()
    start, end = log.items[20]
    log.data[start + 36 : start + 44] = bytes(8)
    log.flip(end - 1, 1)
    assert damages(log.own()) == [(start, end)]


def test_a_blank(log: Log) -> None:
    start, after = blank_of(log)
    log.flip(start + 2, 1)
    assert damages(log.own()) == [(start, after)]
    log.flip(start + 2, 1)
    log.flip(start + 9, 1)  # its other bytes mean nothing
    assert damages(log.own()) == []


def test_a_range_over_the_end_of_a_file_and_one_at_the_end_of_the_log(log: Log) -> None:
    first = next(n for n, (start, _) in enumerate(log.items) if start % FILE_SIZE == 0 and n)
    for number in (first - 1, first, len(log.items) - 2, len(log.items) - 1):
        log.flip(log.items[number][0] + 1)
    ranges = [(log.items[first - 1][0], log.items[first + 1][0]), (log.items[-2][0], log.end)]
    assert damages(log.own()) == ranges


def test_without_a_known_end_the_log_ends_at_what_nothing_follows(log: Log) -> None:
    log.flip(log.items[-1][0])
    log.flip(log.items[30][0])
    own = log.own()
    walk = LogWalk(log.form, own.read, FILE_SIZE, 0, len(log.data), ends_whole=False)
    damage = walk.next_damage()
    assert damage is not None and (damage.start, damage.end) == log.items[30]
    walk.skip(damage)
    assert walk.next_damage() is None and walk.offset == log.items[-1][0]


def test_what_the_disk_cannot_read_is_damaged_with_all_items_of_its_pages(log: Log) -> None:
    log.unreadable = {1, 5}
    expected = []
    for page in (1, 5):
        met = [one for one in log.items if one[0] < (page + 1) * 4096 and one[1] > page * 4096]
        assert met
        expected.append((met[0][0], met[-1][1]))
    after = {end: next((b for b, _ in log.items if b >= end), end) for _, end in expected}
    assert damages(log.own()) == [(start, after[end]) for start, end in expected]


def test_a_record_in_a_body_does_not_end_a_walk() -> None:
    log, forged, after = with_forged()
    start, end = log.items[1]
    log.flip(start + 8)
    assert damages(log.own()) == [(start, forged), (after, end)]


def test_windows_end_anywhere(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (300, 777, 5000):
        monkeypatch.setattr(log_walk, "WINDOW_BYTES", window)
        hurt = log.copy()
        hurt.flip(hurt.items[77][0] + 4)
        assert damages(hurt.own()) == [hurt.items[77]]


@pytest.mark.parametrize("make", [lambda log: plain(), lambda log: log.copy()])
def test_random_rot_is_found_and_nothing_sound_is_called_damaged(
    of_entries: Log, make: Callable[[Log], Log]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(12):
        log = make(of_entries)
        sound = log.copy()
        for _ in range(chance.randrange(1, 4)):
            rot(log, chance, 0, log.end)
        changed = {
            one for one in log.items if log.data[slice(*one)] != sound.data[slice(*one)]
        }  # fmt: skip
        found = damages(log.own())
        for start, end in log.items:
            inside = any(a <= start and end <= b for a, b in found)
            if not inside:
                assert log.epochs is not None or (start, end) not in changed, (start, end)
        for a, b in found:
            assert log.data[a:b] != sound.data[a:b], (a, b)
