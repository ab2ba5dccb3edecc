"""The plot of the lag: its axes."""

from hastore.pipeline.stats.lag import LagMinute
from hastore.pipeline.stats.plots import _lag


def test_the_lag_is_drawn_over_the_time_of_the_samples_and_none_as_a_line_at_zero():
    """A pair that is in sync has a lag of 0 throughout; the axis then still has a range."""
    figure = _lag([LagMinute(minute, "node 2", 1, 9, 0.0, 0) for minute in (0, 60_000)])
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time of the sample, UTC"
    assert axes.get_ylim() == (0, 1_000)
