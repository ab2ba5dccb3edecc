"""The plots: their axes."""

from hastore.pipeline.stats import SHOWN_MS, LagMinute, _draw_lag, draw


def test_the_lag_is_drawn_over_the_time_of_the_samples_and_none_as_a_line_at_zero():
    """A pair that is in sync has a lag of 0 throughout; the axis then still has a range."""
    figure = _draw_lag([LagMinute(minute, "node 2", 1, 9, 0.0, 0) for minute in (0, 60_000)])
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time of the sample, UTC"
    assert axes.get_ylim() == (0, 1_000)


def test_the_axis_of_time_ends_where_dates_end(tmp_path):
    """Its margins would lead into years that matplotlib refuses; so may the first interval."""
    width_ms = 60_000 * 10_950_000
    row = {"topic": "t", "messages": 1, "bytes": 1, "negative_latencies": 0}
    row |= {"latency_p50_ms": 1.0, "latency_p99_ms": 1.0}
    starts = [at - at % width_ms for at in SHOWN_MS]
    rows = [{**row, "bin_ms": start} for start in starts]
    assert len(draw(str(tmp_path), rows, ["t"], width_ms, [])) == 2
