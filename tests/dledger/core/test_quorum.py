"""The quorum arithmetic against a dumb alternative, with random numbers (the seed is printed)."""

import random

import pytest

from hastore.dledger.core.events import HardState, LogState, Start
from hastore.dledger.core.member_state import MemberState
from hastore.dledger.core.quorum import QuorumAckChecker, quorum_index


def dumb_quorum_index(water_marks):
    """Count for each index how many members have it."""
    best = min(water_marks)
    for index in range(min(water_marks), max(water_marks) + 1):
        holders = sum(one >= index for one in water_marks)
        if 2 * holders > len(water_marks):
            best = index
    return best


def test_the_middle_is_what_a_majority_has():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    for _ in range(3_000):
        water_marks = [numbers.randint(-1, 12) for _ in range(numbers.randint(1, 7))]
        assert quorum_index(water_marks) == dumb_quorum_index(water_marks), water_marks


@pytest.mark.parametrize(
    ("water_marks", "index"),
    [
        ([5], 5),
        ([5, 3], 3),
        ([5, 3, -1], 3),
        ([5, 5, -1, -1], -1),
        ([9, 7, 5, 3, 1], 5),
        ([-1, -1, 8], -1),
    ],
)
def test_quorums_by_hand(water_marks, index):
    assert quorum_index(water_marks) == index


def make_checker(terms, members, term, persisted, committed):
    """Return the checker of node 0, which leads `term`; `terms` are those of its entries."""
    pairs = []
    for index, one in enumerate(terms):
        if not pairs or pairs[-1][0] != one:
            pairs.append((one, index))
    log = LogState(0, len(terms) - 1, tuple(pairs))
    state = MemberState(0, Start(0, HardState(term, 0), log, committed, members))
    state.persisted_index = persisted
    checker = QuorumAckChecker(state)
    checker.start_term()
    return checker


def dumb_committable(terms, members, term, persisted, committed, water_marks):
    """Return the greatest index of the term that a majority has, if it is new."""
    best = None
    for index in range(committed + 1, len(terms)):
        holders = (0 in members) * (persisted >= index)
        holders += sum(mark >= index for peer, mark in water_marks.items() if peer in members)
        if terms[index] == term and 2 * holders > len(members):
            best = index
    return best


def test_only_entries_of_the_current_term_are_committed_by_counting():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    numbers = random.Random(seed)
    found = 0
    for _ in range(3_000):
        count = numbers.randint(1, 10)
        terms = sorted(numbers.randint(1, 4) for _ in range(count))
        members = tuple(sorted(numbers.sample(range(6), numbers.randint(1, 6))))
        end = count - 1
        persisted, committed = numbers.randint(-1, end), numbers.randint(-1, end)
        arguments = (terms, members, terms[-1], persisted, committed)
        checker = make_checker(*arguments)
        marks = {}
        for peer in numbers.sample(range(1, 6), numbers.randint(0, 5)):
            marks[peer] = numbers.randint(-1, end)
            checker.report(peer, marks[peer])
            checker.report(peer, numbers.randint(-1, marks[peer]))  # an old answer
        expected = dumb_committable(*arguments, marks)
        assert checker.committable() == expected, (arguments, marks)
        found += expected is not None
    assert found > 100


def test_the_counts_of_an_earlier_term_are_dropped():
    checker = make_checker([1, 1], (0, 1, 2), 1, 1, -1)
    checker.report(1, 1)
    assert checker.committable() == 1
    checker.start_term()
    assert checker.committable() is None and checker.water_marks == {}
    checker.report(1, 1)
    checker.forget(1)
    assert checker.committable() is None
    checker.stop()
    assert checker.peer_water_marks_by_term == {}
