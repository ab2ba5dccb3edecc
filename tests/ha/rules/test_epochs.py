"""Epoch histories, compared with a naive model of the rules."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.ha.rules import epochs
from hastore.ha.rules.epochs import (
    FLOOR_EPOCH,
    HISTORY_BYTES_MAX,
    EpochEntry,
    agreed,
    classic_range,
    common_point,
    due_entries,
    epoch_at,
    epoch_node,
    forgotten_end,
    keep_until,
    last_epoch,
    next_epoch,
    next_start,
    parted,
    prune,
    resumed_entry,
    same_resumptions,
    start_of,
)


def entry(epoch, start, acks=1):
    return EpochEntry(epoch, start, acks, (1, 2, 3))


@st.composite
def histories(draw):
    """A history of few epochs and offsets, so that two of them have much in common."""
    epochs = sorted(draw(st.sets(st.integers(1, 6), max_size=5)))
    starts = sorted(draw(st.lists(st.integers(0, 8), min_size=len(epochs), max_size=len(epochs))))
    return tuple(entry(e, s) for e, s in zip(epochs, starts, strict=True))


def model_end_of(history, index, end):
    return min(history[index + 1].start, end) if index + 1 < len(history) else end


def model_common(mine, my_end, theirs, their_end):
    """The last common point, by nested loops."""
    for i in reversed(range(len(mine))):
        for j in range(len(theirs)):
            if theirs[j].epoch == mine[i].epoch:
                ends = model_end_of(mine, i, my_end), model_end_of(theirs, j, their_end)
                return min(ends), i + 1
    return 0, 0


def model_take_entries(mine, my_end, theirs):
    """Take over one entry after the other, each only exactly at the log's end."""
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


def test_common_points_by_example():
    old, new, mine = entry(1, 0), entry(4, 50), entry(3, 40)
    assert common_point((old, mine), 70, (old, new), 90) == (40, 1)  # only I have epoch 3
    assert common_point((old, new), 70, (old, new), 90) == (70, 2)  # only shorter
    assert common_point((old,), 45, (old, new), 90) == (45, 1)
    assert common_point((old,), 60, (old, new), 90) == (50, 1)  # my tail of epoch 1
    assert common_point((mine,), 60, (old, new), 90) == (0, 0)
    assert common_point((), 0, (old,), 90) == (0, 0)


@given(histories(), st.integers(0, 9))
def test_epoch_at_is_that_of_the_last_entry_at_or_below(history, offset):
    below = [e.epoch for e in history if e.start <= offset]
    assert epoch_at(history, offset) == (below[-1] if below else None)


@given(histories(), st.integers(0, 9))
def test_recovery_drops_entries_that_start_beyond_the_end(history, end):
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


def written(count, nodes=(1, 2, 3), step=10):
    """A history of so many epochs, each of which wrote `step` bytes."""
    return tuple(EpochEntry(n << 16 | 1, n * step - step, 1, nodes) for n in range(1, count + 1))


def test_a_history_within_its_bounds_is_left_alone():
    history = written(epochs.ENTRIES_MAX, step=0)
    assert prune(history) is history and prune(()) == ()


def test_epochs_that_wrote_nothing_go_first():
    history = (*written(100), *(entry(n << 16 | 2, 2000) for n in range(200, 900)))
    recent = history[-epochs.RECENT_ENTRIES :]
    assert prune(history) == written(100) + recent


def test_the_older_half_becomes_one_entry_without_a_writer():
    history = written(epochs.ENTRIES_MAX + 1)
    kept = history[-epochs.ENTRIES_MAX // 2 :]
    floor = EpochEntry(FLOOR_EPOCH, 0, 1, (1, 2, 3))
    assert prune(history) == (floor, *kept)
    again = (*prune(history), *written(2 * epochs.ENTRIES_MAX)[epochs.ENTRIES_MAX + 1 :])
    assert prune(again)[0] == floor and len(prune(again)) == 1 + epochs.ENTRIES_MAX // 2
    assert epoch_node(FLOOR_EPOCH) == 0 and next_epoch(0, 1) > FLOOR_EPOCH


@given(
    st.integers(1, 1200), st.integers(1, 300), st.sampled_from([0, 1, 1 << 50]), st.integers(0, 300)
)
def test_a_history_of_any_group_is_bounded(count, nodes, step, resumptions):
    history = written(count, tuple(range(60_000, 60_000 + nodes)), step)
    resumed = tuple((n << 32, n << 50) for n in range(1, min(resumptions, nodes + 1) + 1))
    history = tuple(msgspec.structs.replace(one, resumed=resumed) for one in history)
    kept = prune(history)
    assert len(msgspec.msgpack.encode(kept)) <= HISTORY_BYTES_MAX
    assert kept[-1] == history[-1] and len(kept) <= epochs.ENTRIES_MAX
    assert prune(kept) == kept


def marked(*resumed, start=0):
    return EpochEntry(1 << 16 | 1, start, 1, (1, 2, 3), resumed)


def test_two_logs_of_one_epoch_part_at_the_lowest_end_that_one_has_missed():
    never, once, twice = marked(), marked((5, 70)), marked((5, 70), (6, 90))
    assert (parted(never, once), parted(once, never)) == (70, 70)
    assert (parted(never, twice), parted(once, twice), parted(twice, twice)) == (70, 90, None)
    assert parted(marked((5, 70)), marked((6, 60))) == 60  # it lost its end again, below
    unknown = entry(1 << 16 | 1, 0)
    assert parted(unknown, twice) is parted(twice, unknown) is None
    assert common_point((never,), 200, (twice,), 150) == (70, 1)
    assert common_point((once,), 80, (twice,), 150) == (80, 1)  # a part of the other log
    late = (twice, entry(2 << 16 | 2, 150))
    assert common_point((never,), 200, late, 900) == common_point(late, 900, (never,), 200)
    assert common_point((never,), 200, late, 900) == (70, 1)
    assert same_resumptions((never,), late) == (twice,)
    assert same_resumptions((twice,), (unknown,)) == (unknown,)


def test_resumptions_are_kept_only_where_a_node_parts():
    one = resumed_entry(marked(), {70}, 70, now_s=5)
    assert one == marked((5, 70))
    two = resumed_entry(one, {70, 90}, 90, now_s=4)  # the clock has gone back
    assert two == marked((5, 70), (6, 90))
    assert resumed_entry(two, {95}, 95, now_s=9) == marked((9, 95))  # all have followed since
    assert resumed_entry(two, {70, 95}, 95, now_s=9) == marked((5, 70), (9, 95))
    assert resumed_entry(two, {60}, 60, now_s=9) == marked((9, 60))
    unknown = entry(1 << 16 | 1, 0)
    assert resumed_entry(unknown, {70}, 70, now_s=9) is unknown


def test_an_earlier_version_reads_entries_and_its_own_have_no_resumptions():
    class Earlier(msgspec.Struct, frozen=True, array_like=True):
        epoch: int
        start: int
        acks: int
        nodes: tuple[int, ...]

    old = Earlier(7, 5, 1, (1, 2))
    for coder in (msgspec.msgpack, msgspec.json):
        said = coder.encode(EpochEntry(7, 5, 1, (1, 2), ((8, 9),)))
        assert coder.decode(said, type=Earlier) == old
        assert coder.decode(coder.encode(old), type=EpochEntry) == EpochEntry(7, 5, 1, (1, 2))


@given(histories(), histories(), st.integers(0, 9), st.integers(0, 9))
def test_without_its_empty_epochs_a_history_has_the_same_common_point(mine, more, my_end, end):
    """Two histories with the same start, as the logs of one group have."""
    start = mine[-1].start if mine else 0
    theirs = mine + tuple(
        entry(100 + e.epoch, start + e.start) for e in more if start + e.start <= end
    )
    mine = tuple(e for e in mine if e.start <= my_end)
    full, _ = common_point(mine, my_end, theirs, end)
    shorter = tuple(
        e
        for e, after in zip(theirs, (*theirs[1:], None), strict=False)
        if e is theirs[0] or after is None or after.start > e.start
    )
    if mine and end >= start:
        assert common_point(mine, my_end, shorter, end)[0] == full


def test_a_range_that_both_have_forgotten_is_not_shared():
    floor, new, mine = entry(FLOOR_EPOCH, 0), entry(4 << 16, 50), entry(3 << 16, 40)
    assert common_point((floor, mine), 70, (floor, new), 90) == (0, 0)
    assert forgotten_end((floor, mine), 70, (floor, new), 90) == 50
    assert forgotten_end((floor, mine), 45, (floor, new), 90) == 45
    assert forgotten_end((entry(1 << 16, 0),), 70, (new,), 90) == 0
    # An interrupted copy: all of it is in the forgotten range, and its bytes are compared.
    assert common_point((floor,), 30, (floor, new), 90) == (30, 1)
    assert classic_range((floor,), 0, 30, (floor, new), 10, 90) == (10, 30)
    assert common_point((floor,), 60, (floor, new), 90) == (0, 0)


def test_entries_at_the_logs_end_are_replaced_together():
    first, gone, new = entry(1, 0), entry(2, 50), entry(4, 50)
    assert agreed((first, gone), 50, (first, new)) == (first,)
    assert agreed((first, gone), 60, (first, new)) == (first, gone)  # it has bytes
    assert agreed((first, new), 50, (first, new, entry(5, 70))) == (first, new)
    assert agreed((gone,), 50, ()) == (gone,)
