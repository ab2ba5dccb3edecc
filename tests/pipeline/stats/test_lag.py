"""What the nodes' statuses say of lag, and what they do not say."""

from hastore.pipeline.lag import POINTS_MAX, LagMinute, LagSample, LagSeries, by_minute, lag_of


def status(node, role, end, **more):
    fields = {"node": node, "role": role, "max_offset": end, "confirmed_offset": 0, "epoch": 7}
    return {**fields, "writable": role != "SLAVE", "slaves": [], **more}


def test_slaves_are_behind_the_master():
    master = status(1, "SYNC_MASTER", 1_000, confirmed_offset=900)
    found = lag_of([master, status(2, "SLAVE", 950), status(3, "SLAVE", 1_020)], 5)
    assert [(one.node, one.behind_bytes) for one in found] == [
        ("unconfirmed", 100),
        ("node 2", 50),
        ("node 3", 0),  # it answered later, and had more by then
    ]


def test_without_a_master_the_lag_is_unknown():
    """The master may be a RocketMQ broker, which tells a slave its end but not these clients."""
    (found,) = lag_of([status(2, "SLAVE", 950)], 5)
    assert (found.end_offset, found.behind_bytes) == (950, None)
    assert by_minute([found]) == [LagMinute(0, "node 2", 1, 950, None, None)]


def test_classic_slaves_appear_as_the_master_sees_them():
    slaves = [
        {"classic": True, "ack_offset": 400, "address": "10.0.0.9:3"},
        {"classic": False, "ack_offset": 600, "address": "10.0.0.8:3"},
    ]
    found = lag_of([status(1, "ASYNC_MASTER", 1_000, slaves=slaves)], 5)
    assert [(one.node, one.behind_bytes) for one in found][1:] == [("slave 10.0.0.9:3", 600)]


def test_samples_are_merged_by_minute():
    samples = [
        one
        for at_ms, end in ((59_000, 10), (60_000, 20), (61_000, 90))
        for one in lag_of([status(1, "ASYNC_MASTER", 100), status(2, "SLAVE", end)], at_ms)
        if one.node == "node 2"
    ]
    assert by_minute(samples) == [
        LagMinute(0, "node 2", 1, 10, 90.0, 90),
        LagMinute(60_000, "node 2", 2, 90, 45.0, 80),
    ]


def series_of(seconds, behind=lambda second: second):
    series = LagSeries()
    for second in range(seconds):
        series.add([LagSample(second * 1_000, "node 2", 9, behind(second))])
    return series


def test_a_short_run_keeps_each_sample_for_the_plot():
    lines = series_of(5).lines
    assert lines.width_ms == 1_000
    assert lines.nodes == {"node 2": {second * 1_000: second for second in range(5)}}


def test_a_long_run_keeps_the_greatest_sample_of_longer_intervals_and_all_minutes():
    seconds = 86_400
    series = series_of(seconds)
    lines = series.lines
    (line,) = lines.nodes.values()
    assert len(line) <= POINTS_MAX and list(line) == list(range(0, 86_400_000, lines.width_ms))
    assert [value * 1_000 + 1_000 for value in line.values()] == [
        start + lines.width_ms for start in line
    ]
    assert len(series.minutes) == seconds // 60
    assert series.minutes[-1] == LagMinute(86_340_000, "node 2", 60, 9, 86_369.5, 86_399)


def test_what_no_sample_knew_stays_unknown():
    lines = series_of(1_000, lambda second: None if second < 700 else 3).lines
    (line,) = lines.nodes.values()
    assert lines.known and set(line.values()) == {None, 3}
    assert not series_of(3, lambda second: None).lines.known
