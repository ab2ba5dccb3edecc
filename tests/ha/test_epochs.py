"""Epoch histories against the searched model's functions, written out the dumb way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.ha.epochs import (
    EpochEntry,
    common_point,
    due_entries,
    epoch_at,
    epoch_node,
    keep_until,
    last_epoch,
    next_epoch,
    next_start,
    start_of,
)


def entry(epoch, start, acks=1):
    return EpochEntry(epoch, start, acks, (1, 2, 3))


@st.composite
def histories(draw):
    """A history over few epochs and offsets, so that two of them share much."""
    epochs = sorted(draw(st.sets(st.integers(1, 6), max_size=5)))
    starts = sorted(draw(st.lists(st.integers(0, 8), min_size=len(epochs), max_size=len(epochs))))
    return tuple(entry(e, s) for e, s in zip(epochs, starts, strict=True))


def model_end_of(history, index, end):
    return min(history[index + 1].start, end) if index + 1 < len(history) else end


def model_common(mine, my_end, theirs, their_end):
    """The model's Node::common, loop for loop."""
    for i in reversed(range(len(mine))):
        for j in range(len(theirs)):
            if theirs[j].epoch == mine[i].epoch:
                ends = model_end_of(mine, i, my_end), model_end_of(theirs, j, their_end)
                return min(ends), i + 1
    return 0, 0


def model_take_entries(mine, my_end, theirs):
    """The model's take_entries: one entry after the other, each only at the log's very end."""
    mine = list(mine)
    while True:
        following = 0
        if mine:
            places = [j for j, other in enumerate(theirs) if other.epoch == mine[-1].epoch]
            if not places:
                return tuple(mine)
            following = places[0] + 1
        if following >= len(theirs) or theirs[following].start != my_end:
            return tuple(mine)
        mine.append(theirs[following])


@given(histories(), st.integers(0, 9), histories(), st.integers(0, 9))
def test_the_common_point_is_the_models(mine, my_end, theirs, their_end):
    assert common_point(mine, my_end, theirs, their_end) == model_common(
        mine, my_end, theirs, their_end
    )


@given(histories(), st.integers(0, 9), histories())
def test_entries_are_taken_over_as_in_the_model(mine, my_end, theirs):
    after = mine + due_entries(mine, my_end, theirs)
    assert after == model_take_entries(mine, my_end, theirs)
    bound = next_start(after, theirs)
    if bound is not None and any(e.epoch == after[-1].epoch for e in theirs if after):
        assert bound == next(e.start for e in theirs if e.epoch > after[-1].epoch)


def test_the_common_point_in_words():
    old, new, mine = entry(1, 0), entry(4, 50), entry(3, 40)
    assert common_point((old, mine), 70, (old, new), 90) == (40, 1)  # my epoch 3 is nobody's
    assert common_point((old, new), 70, (old, new), 90) == (70, 2)  # only behind
    assert common_point((old,), 45, (old, new), 90) == (45, 1)
    assert common_point((old,), 60, (old, new), 90) == (50, 1)  # my tail of epoch 1
    assert common_point((mine,), 60, (old, new), 90) == (0, 0)
    assert common_point((), 0, (old,), 90) == (0, 0)


@given(histories(), st.integers(0, 9))
def test_epoch_at_is_that_of_the_last_entry_at_or_below(history, offset):
    below = [e.epoch for e in history if e.start <= offset]
    assert epoch_at(history, offset) == (below[-1] if below else None)


@given(histories(), st.integers(0, 9))
def test_recovery_drops_what_starts_beyond_the_end(history, end):
    kept = keep_until(history, end)
    assert history[: len(kept)] == kept
    assert all(e.start <= end for e in kept) and all(e.start > end for e in history[len(kept) :])
    assert last_epoch(kept) == (kept[-1].epoch if kept else 0)


@pytest.mark.parametrize("node", [1, 2, 65535])
@given(seen=st.integers(0, 2**40))
def test_the_next_epoch_counts_one_up(node, seen):
    epoch = next_epoch(seen, node)
    assert epoch > seen and epoch_node(epoch) == node and epoch >> 16 == (seen >> 16) + 1


@given(st.integers(0, 2**40), st.integers(1, 65535), st.integers(1, 65535))
def test_no_two_nodes_share_an_epoch(seen, one, other):
    assert (next_epoch(seen, one) == next_epoch(seen, other)) == (one == other)


def test_start_of():
    history = (entry(1, 0), entry(4, 50))
    assert (start_of(history, 4), start_of(history, 1), start_of(history, 3)) == (50, 0, None)
