"""Crash points, in short: states of every workload, and planted mistakes that must be found."""

import random

import pytest

from tests.crash.disk import Disk
from tests.crash.effects import SECTOR, Names, Promise, Resize, Sync, SyncNames, Tree, Write
from tests.crash.hunt import Report, hunt
from tests.crash.planted import MISTAKES, hunt_planted
from tests.crash.points import Budget, points
from tests.crash.recording import RecordingFileSystem
from tests.crash.workloads import EFFECTS, KINDS, SHORT, WORKLOADS, missing

BUDGET = Budget(drawn=1, torn=1, all_of=2)


def test_no_promise_is_broken_at_crash_points() -> None:
    """Each seed is a random one; those of SHORT have states of every kind."""
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    report = Report()
    for name in WORKLOADS:
        report.add(hunt(WORKLOADS[name], seed, BUDGET, share=0.05, most=25))
    assert not report.findings, "\n".join(f"{one}\n{one.trace}" for one in report.findings[:3])


def test_states_of_every_kind_and_every_file_are_made() -> None:
    report = Report()
    for name, seeds in SHORT.items():
        for seed in seeds:
            report.add(hunt(WORKLOADS[name], seed, BUDGET, share=0.5, look=False))
    assert missing(report, WORKLOADS) == []
    assert set(report.kinds) == KINDS and set(report.effects) >= EFFECTS


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found(name: str) -> None:
    states, finding = hunt_planted(name, most=2000)
    assert finding is not None, states
    print(f"{states} states: {finding}")


# -- the model ------------------------------------------------------------------------------------


def contents(effects: list[object], path: str) -> set[bytes | None]:
    """Return what a file may have after a crash that follows these effects."""
    start = Tree({}, frozenset({0}), {})
    every = [Promise(note=True), *effects, Promise(note=True)]
    budget = Budget(drawn=400, torn=400, all_of=256)
    found = points(start, every, random.Random(1), budget)
    return {one.files.get(path) for one in found if one.point == len(every)}


def test_what_was_not_synced_is_there_or_not_by_sectors() -> None:
    made = Names((((0, "a"), 1),), "create")
    old, new = b"o" * 2 * SECTOR, b"n" * 2 * SECTOR
    synced = [made, Write(1, 0, old), Sync(1), SyncNames(0)]
    assert contents(synced, "/a") == {old}
    both = {x + y for x in (old[:SECTOR], new[:SECTOR]) for y in (old[:SECTOR], new[:SECTOR])}
    assert contents([*synced, Write(1, 0, new)], "/a") == both
    # The later of two writes to a sector has the earlier one, too.
    twice = contents([*synced, Write(1, 0, b"1"), Write(1, 1, b"2")], "/a")
    assert {one[:2] for one in twice if one} == {b"oo", b"1o", b"12"}
    assert contents([made, Write(1, 0, b"x"), SyncNames(0)], "/a") == {b"", b"x", b"\0"}
    assert contents([made, Write(1, 0, b"x"), Sync(1)], "/a") == {None, b"x"}
    shorter = contents([*synced, Resize(1, SECTOR, "truncate")], "/a")
    assert shorter == {old, old[:SECTOR]}


def test_names_are_there_or_not_unless_they_depend_on_each_other() -> None:
    disk = Disk(Tree({(0, "a"): 1, (0, "b"): 2}, frozenset({0}), {1: b"a", 2: b"b"}))
    disk.follow(Names((((0, "c"), 1), ((0, "a"), None)), "rename"))
    disk.follow(Names((((0, "b"), None),), "remove"))
    disk.follow(Names((((0, "c"), None),), "remove"))
    possible = [
        numbers
        for numbers in ({0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}, set())
        if disk.is_possible(numbers)
    ]
    assert possible == [{0}, {1}, {0, 1}, {0, 2}, {0, 1, 2}, set()]
    assert [numbers for numbers in possible if disk.is_in_order(numbers)] == [
        {0}, {0, 1}, {0, 1, 2}, set(),
    ]  # fmt: skip
    disk.follow(SyncNames(0))
    assert disk.names == {} and not disk.waiting


def test_what_goes_past_the_interface_is_recorded() -> None:
    fs = RecordingFileSystem()
    fs.make_dirs("/d")
    file = fs.open("/d/f", create=True)
    file.truncate(4 * SECTOR)
    mapped = file.map(writable=True)
    mapped[SECTOR : SECTOR + 1] = b"m"
    with open(f"/proc/self/fd/{file.fileno()}", "r+b", buffering=0) as past:
        past.seek(3 * SECTOR)
        past.write(b"p")
    file.sync()
    found = [(one.at, one.data[:1]) for one in fs.effects if isinstance(one, Write)]
    assert found == [(SECTOR, b"m"), (3 * SECTOR, b"p")]
    assert isinstance(fs.effects[-1], Sync)
