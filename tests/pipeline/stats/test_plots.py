"""The plots: their axes."""

import pytest

from hastore.pipeline.lag import LagLines
from hastore.pipeline.plots import OTHERS, SHOWN_MS, _draw_lag, _latency, _throughput, draw

NONE = LagLines(1_000, {})
AT_MS = 1_795_000_000_000 // 60_000 * 60_000
DAY_MS = 86_400_000


def rows_of(topics, count, width_ms):
    row = {"messages": 600, "bytes": 60_000, "negative_latencies": 0}
    row |= {"latency_p50_ms": 3.0, "latency_p99_ms": 20.0}
    return [
        {**row, "topic": topic, "bin_ms": AT_MS + number * width_ms}
        for number in range(count)
        for topic in topics
    ]


def shown_ms(figure):
    """Return the limits of a figure's axis of time, relative to AT_MS."""
    low, high = figure.axes[-1].get_xlim()
    return round(low * DAY_MS) - AT_MS, round(high * DAY_MS) - AT_MS


def test_the_lag_is_drawn_over_the_time_of_the_samples_and_none_as_a_line_at_zero():
    """A pair that is in sync has a lag of 0 throughout; the axis then still has a range."""
    figure = _draw_lag(LagLines(60_000, {"node 2": {0: 0, 60_000: 0}}))
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time of the sample, UTC"
    assert axes.get_ylabel() == "bytes, greatest sample of each minute"
    assert axes.get_ylim() == (0, 1_000)


def test_a_node_whose_lag_is_unknown_for_a_while_has_a_gap():
    figure = _draw_lag(LagLines(1_000, {"node 2": {0: 5, 1_000: None, 2_000: 7}}))
    (line,) = figure.axes[0].lines
    assert [value == value for value in line.get_ydata()] == [True, False, True]


@pytest.mark.parametrize(("count", "width_ms"), [(1, 1_000), (5, 1_000), (300, 1_000)])
def test_the_axis_of_a_short_sample_is_as_short(count, width_ms):
    times = {AT_MS + number * width_ms: number for number in range(count)}
    low, high = shown_ms(_draw_lag(LagLines(width_ms, {"node 2": times})))
    span = (count - 1) * width_ms
    assert -low == high - span == max(width_ms, span // 40, (6 * width_ms - span) // 2)


@pytest.mark.parametrize(("count", "width_ms"), [(1, 60_000), (5, 60_000), (480, 900_000)])
@pytest.mark.parametrize("plot", [_throughput, _latency])
def test_the_axis_of_few_messages_is_as_short(plot, count, width_ms):
    low, high = shown_ms(plot(rows_of(["t"], count, width_ms), ["t"], width_ms))
    span = (count - 1) * width_ms
    assert -low == high - span == max(width_ms, span // 40, (6 * width_ms - span) // 2)


def test_long_names_of_topics_stay_within_the_figure(tmp_path):
    names = [f"{number}-{'x' * 50}" for number in range(6)]
    figure = _throughput(rows_of([*names, OTHERS], 2, 60_000), [*names, OTHERS], 60_000)
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and len(legend.texts) == 7


@pytest.mark.parametrize("names", [["_orders"], ["_orders", "t", "__"], ["a$b$c", "%RETRY%g"]])
@pytest.mark.parametrize("plot", [_throughput, _latency])
def test_each_name_that_a_topic_may_have_is_in_the_legend(plot, names):
    rows = [{**row, "latency_p50_ms": -1.0} for row in rows_of(names, 2, 60_000)]  # a line at 0
    figure = plot(rows, names, 60_000)
    (legend,) = figure.legends
    assert [text.get_text().replace("\\$", "$") for text in legend.texts] == names


def test_the_ticks_of_a_great_lag_do_not_overlap():
    (axes,) = _draw_lag(LagLines(1_000, {"node 2": {0: 0, 1_000: 250_000}})).axes
    assert list(axes.get_yticks()) == [0, 1_000, 10_000, 100_000]


def test_without_messages_there_is_the_plot_of_the_lag_alone(tmp_path):
    assert draw(str(tmp_path / "none"), [], [], 60_000, NONE) == []
    lag = LagLines(1_000, {"node 2": {0: 5}})
    assert draw(str(tmp_path), [], [], 60_000, lag) == [f"{tmp_path}/lag.png"]


def test_the_axis_of_time_ends_where_dates_end(tmp_path):
    """Its margins would lead into years that matplotlib refuses; so may the first interval."""
    width_ms = 60_000 * 10_950_000
    (row,) = rows_of(["t"], 1, width_ms)
    starts = [at - at % width_ms for at in SHOWN_MS]
    rows = [{**row, "bin_ms": start} for start in starts]
    assert len(draw(str(tmp_path), rows, ["t"], width_ms, NONE)) == 2
