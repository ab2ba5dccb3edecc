"""How much a micro-batch takes."""

from hypothesis import given
from hypothesis import strategies as st

from hastore.spark.options.offsets import TopicPartition
from hastore.spark.stream_driver import Delay, count_new, share

A, B, C = (TopicPartition("t", n) for n in range(3))
RANGES = st.dictionaries(
    st.sampled_from([A, B, C]), st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=1
)


def test_the_limit_is_shared_in_proportion_to_the_backlogs():
    starts, ends = {A: 0, B: 10, C: 5}, {A: 600, B: 310, C: 105}
    assert share(100, starts, ends) == {A: 60, B: 40, C: 15}
    assert share(1_000, starts, ends) == ends


def test_a_small_backlog_does_not_starve():
    assert share(10, {A: 0, B: 0}, {A: 100_000, B: 1}) == {A: 9, B: 1}


@given(RANGES, st.integers(1, 300))
def test_batches_of_any_limit_reach_the_ends(ranges, limit):
    starts = {key: start for key, (start, _) in ranges.items()}
    ends = {key: start + size for key, (start, size) in ranges.items()}
    batches = 0
    while count_new(starts, ends):
        stops = share(limit, starts, ends)
        taken = count_new(starts, stops)
        assert 0 < taken <= limit + len(ranges)
        assert all(starts[key] <= stops[key] <= ends[key] for key in ends)
        starts, batches = stops, batches + 1
    assert batches <= 200 * len(ranges)


def test_a_batch_waits_for_enough_messages_or_for_the_delay():
    delay = Delay(10, 60.0)
    assert not delay.holds(0, 1_000.0)  # the first batch of a run does not wait
    assert delay.holds(9, 1_001.0)
    assert not delay.holds(10, 1_002.0)
    assert delay.holds(9, 1_061.9)
    assert not delay.holds(1, 1_062.0)
    assert delay.holds(1, 1_063.0)


def test_a_queue_that_lags_counts_as_empty():
    assert count_new({A: 5, B: 5}, {A: 3, B: 8}) == 3
    assert share(1, {A: 5, B: 5}, {A: 3, B: 8}) == {A: 3, B: 6}
