"""What hot paths count: buckets, bounds of names, round trips."""

from hastore.counters import BOUNDS_MS, OTHER, Histogram, RoundTrips, Tally, Traffic


def test_a_histogram_counts_into_the_bucket_whose_end_is_not_below() -> None:
    times = Histogram()
    for took_ms in (0.0, 0.1, 0.11, 10_000.0, 10_001.0):
        times.observe(took_ms)
    assert times.counts[:2] == [2, 1]
    assert times.counts[-2:] == [1, 1]
    assert sum(times.counts) == 5 and len(times.counts) == len(BOUNDS_MS) + 1
    assert abs(times.sum_ms - 20_001.21) < 1e-6


def test_names_beyond_the_bound_count_together() -> None:
    tally = Tally(most=2)
    for name in ("a", "b", "c", "a", "d"):
        tally.add(name)
    assert tally.items() == [("a", 2), ("b", 1), (OTHER, 2)]


def test_topics_beyond_the_bound_and_one_that_is_called_other_count_together() -> None:
    traffic = Traffic(most=2)
    traffic.add(b"a", 1, 10)
    traffic.add(b"other", 2, 20)
    traffic.add(b"b\xff", 3, 30)
    traffic.add(b"c", 4, 40)
    traffic.add(b"a", 5, 50)
    assert traffic.rows() == [("a", 6, 60), ("b\ufffd", 3, 30), ("other", 6, 60)]


def test_a_round_trip_ends_with_the_first_report_that_has_its_mark() -> None:
    trips = RoundTrips()
    trips.sent(2, 100, 1_000.0)
    trips.sent(2, 200, 1_005.0)  # one at a time
    trips.sent(3, 200, 1_005.0)
    trips.reported(2, 99, 1_010.0)
    assert sum(trips.times.counts) == 0
    trips.reported(2, 150, 1_020.0)
    trips.reported(2, 200, 1_030.0)
    assert (sum(trips.times.counts), trips.times.sum_ms) == (1, 20.0)
    trips.forget(3)
    trips.reported(3, 200, 2_000.0)
    assert sum(trips.times.counts) == 1 and not trips.waiting
