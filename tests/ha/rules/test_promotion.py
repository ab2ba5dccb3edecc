"""Which epoch may be promised, which answers suffice, whose log is the most advanced."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.ha.rules.epochs import EpochEntry, next_epoch
from hastore.ha.rules.promotion import (
    PeerAnswer,
    Requirements,
    has_more,
    judge,
    may_promise,
    may_resume,
    most_advanced,
    new_entry,
    opened_history,
)

E1, E2, E3 = 1 << 16 | 1, 2 << 16 | 2, 3 << 16 | 3
ONE, TWO = EpochEntry(E1, 0, 1, (1, 2, 3)), EpochEntry(E2, 500, 1, (1, 2, 3))


def test_only_a_higher_epoch_or_the_same_candidates_again_is_promised():
    assert may_promise(0, 1, E1) is None
    assert may_promise(E1, 2, E2) is None
    assert may_promise(E2, 2, E2) is None
    assert "promised already" in (may_promise(E2, 1, E1) or "")
    assert "does not belong" in (may_promise(0, 1, E2) or "")


def answer(node, unclean=False, last=E1, end=0):
    return PeerAnswer(node, last, end, unclean)


def required(nodes=3, acks=1, low=None, high=None, old=(), fresh=False):
    numbers = tuple(range(1, nodes + 1))
    low = acks if low is None else low
    high = max(acks, low) if high is None else high
    return Requirements(1, numbers, acks, min(low, acks), max(high, acks), old, fresh)


@pytest.mark.parametrize(("nodes", "acks"), [(n, a) for n in range(2, 6) for a in range(1, n)])
def test_the_answers_meet_every_possible_set_of_acknowledgers(nodes, acks):
    """By brute force: any set that holds a record shares a node with any set that suffices."""
    numbers = range(1, nodes + 1)
    for size in range(nodes + 1):
        for answering in itertools.combinations(numbers, size):
            verdict = judge(required(nodes, acks), [answer(n) for n in answering])
            holders = itertools.combinations(numbers, acks + 1)
            meets = all(set(answering) & set(held) for held in holders)
            assert verdict.enough == meets, (answering, verdict)


def test_unclean_nodes_do_not_count_and_are_named():
    verdict = judge(required(), [answer(1), answer(2, unclean=True)])
    assert not verdict.enough and verdict.unclean == (2,) and verdict.missing == (3,)
    assert "waiting for node 3" in verdict.reason and "unclean: node 2" in verdict.reason
    assert judge(required(), [answer(1), answer(2, unclean=True), answer(3)]).enough
    assert not judge(required(), [answer(1, unclean=True), answer(2)]).enough


@pytest.mark.parametrize(("low", "high", "acks"), [(1, 1, 2), (2, 2, 1), (1, 2, 1), (1, 2, 2)])
def test_a_change_of_acks_needs_every_answer(low, high, acks):
    changed = required(3, acks, low, high)
    assert not judge(changed, [answer(1), answer(2)]).enough
    assert judge(changed, [answer(1), answer(2), answer(3)]).enough
    # An unclean node's answer counts as an answer, but enough clean ones are needed too.
    assert judge(changed, [answer(1), answer(2), answer(3, unclean=True)]).enough
    assert not judge(changed, [answer(1), answer(2, unclean=True), answer(3, unclean=True)]).enough


def test_a_changed_list_needs_all_of_the_new_and_enough_of_the_old():
    grown = required(4, 1, old=((1, 2, 3),))
    assert not judge(grown, [answer(1), answer(2), answer(3)]).enough
    assert not judge(grown, [answer(1), answer(2), answer(4)]).enough
    assert judge(grown, [answer(n) for n in (1, 2, 3, 4)]).enough
    replaced = Requirements(1, (1, 2, 4), 1, 1, 1, ((1, 2, 3),))
    assert judge(replaced, [answer(1), answer(2), answer(4)]).enough
    assert not judge(replaced, [answer(1), answer(2, unclean=True), answer(4)]).enough


def test_a_fresh_node_does_not_trust_its_own_acks():
    assert judge(required(3, 2), [answer(1)]).enough
    assert not judge(required(3, 2, fresh=True), [answer(1)]).enough
    assert judge(required(3, 2, fresh=True), [answer(1), answer(2)]).enough
    assert judge(required(3, 1, fresh=True), [answer(1), answer(3)]).enough


def test_a_group_of_one_needs_itself():
    assert judge(required(1, 0), [answer(1)]).enough
    assert not judge(required(1, 0), [answer(1, unclean=True)]).enough


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=1, max_size=5)
)
def test_the_most_advanced_is_by_epoch_then_end_and_this_node_wins_ties(raws):
    answers = [PeerAnswer(n, e, end, dirty) for n, (e, end, dirty) in enumerate(raws, 1)]
    best = most_advanced(answers, 1)
    assert best.log_order == max((e, end) for e, end, _ in raws)
    if answers[0].log_order == best.log_order:
        assert best.node == 1


def test_epochs_of_candidates():
    assert next_epoch(0, 3) == 1 << 16 | 3 and next_epoch(E3, 2) == 4 << 16 | 2
    assert new_entry(E1, 5, 2, (3, 1)) == EpochEntry(E1, 5, 2, (1, 3), ())


def test_bytes_before_the_first_entry_are_of_epoch_0():
    entry = EpochEntry(E2, 500, 1, (1, 2))
    classic = EpochEntry(0, 100, 1, (1, 2))
    assert opened_history((), 100, entry) == (classic, entry)  # a broker wrote the log
    assert opened_history((EpochEntry(E1, 300, 0, (1,)),), 100, entry) == (
        classic, EpochEntry(E1, 300, 0, (1,)), entry,
    )  # fmt: skip
    assert opened_history((), 500, entry) == (entry,)
    for first in (EpochEntry(E1, 100, 0, (1,)), EpochEntry(0, 200, 0, (1,))):
        assert opened_history((first,), 100, entry) == (first, entry)


def test_a_master_resumes_only_its_own_last_epoch():
    assert may_resume((ONE, TWO), E2, 2, False) == E2
    assert may_resume((ONE, TWO), E2, 2, True) is None  # a power loss
    assert may_resume((ONE, TWO), E3, 2, False) is None  # it promised a higher one
    assert may_resume((ONE, TWO), E2, 1, False) is None  # another node's
    assert may_resume((), 0, 1, False) is None


def test_a_master_that_another_has_more_of_has_lost_its_end():
    same, short, longer, longest = (answer(2, end=end) for end in (500, 400, 501, 600))
    older = answer(3, last=E1 - 1, end=900)  # a tail of an older epoch says nothing of this one
    assert has_more(E1, 500, [], {}) is None
    assert has_more(E1, 500, [same, short, older], {}) is None
    assert has_more(E1, 500, [same, longest, longer], {}) is longest
    assert has_more(E1, 500, [answer(2, unclean=True, end=501)], {}) is not None
    for begin, found in ((499, None), (500, longest), (550, longest)):
        assert has_more(E1, 500, [longest], {2: begin}) is found  # written there since, or not
