"""Positions against histories: single cases, and comparison with a byte-wise model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hastore.ha.rules.epochs import FLOOR_EPOCH, Standing, check_position, epoch_of, epochs_of

HISTORY = [(5, 100), (7, 300)]


@pytest.mark.parametrize(
    ("epoch", "offset", "standing", "at"),
    [
        (0, 0, Standing.AGREED, 0),
        (0, 99, Standing.AGREED, 99),
        (0, 100, Standing.LOST, 100),  # epoch 0's tail was cut at 100
        (5, 100, Standing.AGREED, 100),
        (5, 299, Standing.AGREED, 299),
        (5, 300, Standing.LOST, 300),
        (5, 5000, Standing.LOST, 300),
        (7, 300, Standing.AGREED, 300),
        (7, 399, Standing.AGREED, 399),
        (7, 400, Standing.BEHIND, 400),  # the log ends at 400
        (6, 350, Standing.LOST, 0),  # an epoch that never joined this history
        (6, 250, Standing.LOST, 0),  # may have begun below the epoch before it
        (3, 90, Standing.LOST, 0),
        (9, 200, Standing.BEHIND, 400),  # newer than all epochs that this node knows
        (5, 50, Standing.LOST, 50),  # there never was such a record
    ],
)
def test_standing(epoch: int, offset: int, standing: Standing, at: int) -> None:
    assert check_position(HISTORY, 400, epoch, offset) == (standing, at)


def test_a_position_of_a_forgotten_epoch_is_lost() -> None:
    history = [(FLOOR_EPOCH, 40), (70_000, 100), (80_000, 300)]
    assert check_position(history, 400, 69_999, 90) == (Standing.LOST, 40)
    assert check_position(history, 400, 69_999, 350) == (Standing.LOST, 40)
    assert check_position(history, 400, 0, 90) == (Standing.LOST, 40)
    assert check_position(history, 400, 70_000, 299) == (Standing.AGREED, 299)
    assert check_position(history, 400, 75_000, 350) == (Standing.LOST, 0)
    assert check_position(history, 400, 90_000, 90) == (Standing.BEHIND, 400)
    # Read after its epoch was forgotten: only its offset counts, on any node.
    assert epoch_of(history, 90) == FLOOR_EPOCH
    assert check_position(history, 400, FLOOR_EPOCH, 90) == (Standing.AGREED, 90)
    assert check_position([(65_537, 0)], 400, FLOOR_EPOCH, 90) == (Standing.AGREED, 90)
    assert check_position([(65_537, 0)], 80, FLOOR_EPOCH, 90) == (Standing.BEHIND, 80)


def test_a_history_that_begins_where_the_log_does_knows_nothing_of_what_was_before() -> None:
    for epoch, offset in ((5, 99), (5, 0), (4, 99), (1, 0)):
        assert check_position(HISTORY, 400, epoch, offset, is_whole=False)[0] is Standing.AGREED
    for epoch, offset in ((4, 100), (5, 300), (6, 99), (7, 99), (7, 299)):
        assert check_position(HISTORY, 400, epoch, offset, is_whole=False)[0] is Standing.LOST
    assert check_position([], 400, 5, 99, is_whole=False) == (Standing.BEHIND, 400)


def test_the_common_point_with_a_rival_epoch_is_never_too_high() -> None:
    """Two masters in turn, each alone, with puts that wait for no slave: the second one's records
    are cut. Only the second knew where it began: below the epochs that the first opened since.
    """
    first, again, now = 1 << 16 | 1, 2 << 16 | 1, 3 << 16 | 1
    rival = 2 << 16 | 2
    theirs = [(first, 0), (rival, 100)]  # the history of the node that was cut
    history = [(first, 0), (again, 150), (now, 300)]
    for offset in (100, 130, 160, 299, 300, 320):
        assert epoch_of(theirs, offset) == rival
        standing, at = check_position(history, 400, rival, offset)
        assert standing is Standing.LOST
        assert at <= 100, f"from {offset} on to {at}: what lies in [100, {at}) was never read"


def test_without_history_all_is_epoch_0() -> None:
    assert check_position([], 10, 0, 9) == (Standing.AGREED, 9)
    assert check_position([], 10, 0, 10) == (Standing.BEHIND, 10)
    assert check_position([], 10, 65537, 3) == (Standing.BEHIND, 10)


def test_epochs_of_a_range() -> None:
    assert epoch_of(HISTORY, 99) == 0
    assert epoch_of(HISTORY, 100) == 5
    assert epoch_of(HISTORY, 10_000) == 7
    assert epochs_of(HISTORY, 50, 100) == [(0, 50)]
    assert epochs_of(HISTORY, 150, 301) == [(5, 150), (7, 300)]


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=4),
    st.integers(0, 10),
    st.integers(0, 14),
    st.integers(0, 30),
)
def test_agreed_exactly_where_the_node_gives_the_offset_to_the_epoch(
    steps: list[tuple[int, int]], tail: int, epoch: int, offset: int
) -> None:
    history, last, start = [], 0, 0
    for more, further in steps:
        last, start = last + more, start + further
        history.append((last, start))
    end = start + tail
    standing, at = check_position(history, end, epoch, offset)
    holds = offset < end and epoch_of(history, offset) == epoch
    assert (standing is Standing.AGREED) == holds
    if standing is Standing.LOST:
        assert at <= offset
