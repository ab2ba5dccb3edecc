"""Limits resolved to offsets of the available ranges."""

import pytest

from hastore.errors import PositionLostError, UsageError
from hastore.spark.options.offsets import (
    Bound,
    GlobalTimestamp,
    Limits,
    NoMatch,
    OffsetRange,
    OffsetsByPartition,
    TimestampsByPartition,
    TopicPartition,
    format_offsets,
    parse_offsets,
)

A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)
THERE = {A0: OffsetRange(10, 20), A1: OffsetRange(0, 5)}


def by_time(key, timestamp_ms):
    """Pretend that offset n was stored at n * 100 ms."""
    offset = max(-(-timestamp_ms // 100), THERE[key].start)
    return offset if offset < THERE[key].end else None


def resolve(start=Bound.EARLIEST, end=Bound.LATEST, **more):
    return Limits(start, end, **more).resolve(THERE, by_time)


def test_bounds_resolve_to_the_available_range():
    assert resolve() == THERE
    assert resolve(end=Bound.EARLIEST)[A0] == (10, 10)


def test_offsets_by_partition_may_hold_bounds():
    start = OffsetsByPartition({A0: 12, A1: Bound.EARLIEST})
    end = OffsetsByPartition({A0: 15, A1: Bound.LATEST})
    assert resolve(start, end) == {A0: (12, 15), A1: (0, 5)}


def test_offsets_must_name_every_partition():
    with pytest.raises(UsageError, match="you must specify all TopicPartitions.*a-0.*a-0, a-1"):
        resolve(OffsetsByPartition({A0: 12}))
    with pytest.raises(UsageError, match="endingOffsetsByTimestamp contains specific offsets"):
        resolve(end=TimestampsByPartition({A0: 12}))


@pytest.mark.parametrize("offset", [9, 21])
def test_an_unavailable_offset_is_a_lost_position(offset):
    start = OffsetsByPartition({A0: offset, A1: 0})
    text = r"a-0 is not available \(the partition has \[10, 20\)\)"
    with pytest.raises(PositionLostError, match=text):
        resolve(start)
    resolved = resolve(start, fail_on_data_loss=False)
    assert resolved[A0] == (max(10, min(20, offset)), 20)


def test_a_start_beyond_the_resolved_end_is_refused():
    with pytest.raises(UsageError, match="beyond its ending offset"):
        resolve(OffsetsByPartition({A0: 15, A1: 0}), GlobalTimestamp(1200))


@pytest.mark.parametrize(
    ("start", "end", "at"),
    [
        (Bound.EARLIEST, OffsetsByPartition({A0: 0, A1: 0}), (10, 10)),  # retention removed more
        (OffsetsByPartition({A0: 3, A1: 0}), OffsetsByPartition({A0: 3, A1: 0}), (10, 10)),
        (OffsetsByPartition({A0: 99, A1: 5}), OffsetsByPartition({A0: 99, A1: 5}), (20, 20)),
        (OffsetsByPartition({A0: 12, A1: 5}), GlobalTimestamp(1150), (12, 12)),
        (GlobalTimestamp(1500), OffsetsByPartition({A0: 4, A1: 0}), (15, 15)),
    ],
)
def test_offsets_that_ask_for_nothing_give_nothing(start, end, at):
    assert resolve(start, end, no_match=NoMatch.LATEST)[A0] == at


def test_timestamps_find_the_first_message_then_or_later():
    assert resolve(GlobalTimestamp(150), GlobalTimestamp(1501), no_match=NoMatch.LATEST) == {
        A0: (10, 16),
        A1: (2, 5),
    }


def test_a_starting_timestamp_after_all_messages():
    with pytest.raises(UsageError, match="No offset matched from request of topic-partition a-1"):
        resolve(GlobalTimestamp(1200))
    assert resolve(GlobalTimestamp(1200), no_match=NoMatch.LATEST)[A1] == (5, 5)


@pytest.mark.parametrize("limit", [GlobalTimestamp(1), TimestampsByPartition({A0: 1, A1: 1})])
@pytest.mark.parametrize("no_match", NoMatch)
def test_a_queue_without_a_message_is_not_searched_and_matches_any_time(limit, no_match):
    def find(key, timestamp_ms):
        assert key == A0
        return by_time(key, timestamp_ms)

    there = {A0: THERE[A0], A1: OffsetRange(0, 0)}
    assert Limits(limit, Bound.LATEST, no_match).resolve(there, find) == there
    assert Limits(Bound.EARLIEST, limit, no_match).resolve(there, find)[A1] == (0, 0)
    there[A1] = OffsetRange(7, 7)  # retention has removed its messages
    assert Limits(limit, Bound.LATEST, no_match).resolve(there, find) == there


def test_an_ending_timestamp_after_all_messages_is_the_end():
    assert resolve(end=GlobalTimestamp(10**9)) == THERE


def test_offsets_are_written_as_they_are_read():
    text = format_offsets({A1: 7, A0: 3, TopicPartition("Ä", 2): 1})
    assert text == '{"a":{"0":3,"1":7},"Ä":{"2":1}}'
    assert parse_offsets(text).offsets[A0] == 3
