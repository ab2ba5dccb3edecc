"""Cutting reads into tasks."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.record.layout import MIN_RECORD_SIZE
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.partitions import (
    LOG_RANGE_BYTES,
    LogRange,
    QueueRange,
    split_log,
    split_queues,
)


def spans(*sizes):
    return [(TopicPartition("t", n), OffsetRange(100, 100 + s)) for n, s in enumerate(sizes)]


def split(*sizes, min_partitions=None, max_records=None):
    return split_queues(spans(*sizes), min_partitions=min_partitions, max_records=max_records)


def test_one_task_for_each_partition_that_has_messages():
    assert split(5, 0, 7) == [QueueRange("t", 0, 100, 105), QueueRange("t", 2, 100, 107)]


def test_no_task_has_more_than_max_records():
    pieces = split(10, 3, max_records=4)
    assert [p.end - p.start for p in pieces] == [3, 3, 4, 3]


def test_min_partitions_cuts_large_ranges_in_proportion():
    pieces = split(1000, 10, 10, min_partitions=6)
    assert [p.partition for p in pieces] == [0, 0, 0, 0, 1, 2]


@given(
    st.lists(st.integers(0, 1000), max_size=6),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 300),
)
def test_a_split_covers_each_range_once(sizes, min_partitions, max_records):
    pieces = split(*sizes, min_partitions=min_partitions, max_records=max_records)
    for number, size in enumerate(sizes):
        own = [p for p in pieces if p.partition == number]
        covered = [n for p in own for n in range(p.start, p.end)]
        assert covered == list(range(100, 100 + size))
        assert all(p.start < p.end for p in own)
    if max_records is not None:
        assert all(p.end - p.start <= max_records for p in pieces)


@given(st.integers(0, 10**12), st.integers(0, 10**9), st.none() | st.integers(1, 9))
def test_a_split_of_the_log_covers_it_once(start, size, min_partitions):
    pieces = split_log(start, start + size, min_partitions=min_partitions)
    assert sum(p.end - p.start for p in pieces) == size
    assert all(p.end - p.start <= LOG_RANGE_BYTES for p in pieces)
    ends = [start, *(p.end for p in pieces)]
    assert [p.start for p in pieces] == ends[:-1]


@pytest.mark.parametrize("size", [1, MIN_RECORD_SIZE, 10 * MIN_RECORD_SIZE + 5])
def test_a_small_log_has_no_more_tasks_than_records(size):
    pieces = split_log(0, size, min_partitions=10**18)
    assert len(pieces) == max(1, size // MIN_RECORD_SIZE)
    assert len(split_log(0, size, min_partitions=2)) == min(2, len(pieces))


def test_tasks_survive_pickle():
    for piece in (QueueRange("t", 1, 2, 3), LogRange(4, 5, 6)):
        assert pickle.loads(pickle.dumps(piece)) == piece  # noqa: S301 - as Spark does


@pytest.mark.parametrize(("queues", "size"), [(800, 125_000_000), (100_000, 1_000_000)])
def test_a_hundred_thousand_tasks_are_planned_and_stay_small(queues, size):
    """100 TB: each task is a few words, and together they cover every message once."""
    spans = [(TopicPartition("t", queue), OffsetRange(0, size)) for queue in range(queues)]
    tasks = split_queues(spans, min_partitions=None, max_records=1_000_000)
    assert len(tasks) == 100_000
    assert max(task.end - task.start for task in tasks) == 1_000_000
    ends = {}
    for task in tasks:
        assert task.start == ends.get(task.partition, 0)
        ends[task.partition] = task.end
    assert ends == dict.fromkeys(range(queues), size)
    assert len(pickle.dumps(tasks[-1])) < 400
