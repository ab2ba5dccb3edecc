"""The text format of Prometheus, read back by its own parser."""

import math

from prometheus_client.parser import text_string_to_metric_families

from hastore.counters import BOUNDS_MS, Histogram
from hastore.server.metrics.catalog import METRICS
from hastore.server.metrics.page import Page, sample_names


def read(page: Page) -> dict[str, object]:
    return {
        family.name: family for family in text_string_to_metric_families(page.render().decode())
    }


def test_each_metric_has_help_and_type_and_every_sample_the_labels_of_the_node() -> None:
    page = Page("demo", "g0", "1")
    page.add("hastore_max_offset", 2**62 + 1)
    page.add("hastore_slave_lag_seconds", 0.25, "2")
    page.add("hastore_writable", True)
    page.add("hastore_epoch", None)
    page.add_all("hastore_refusals_total", [("BUSY", 3), ("FORBIDDEN", 1)])
    text = page.render().decode()
    assert f'hastore_max_offset{{cluster="demo",group="g0",node="1"}} {2**62 + 1}\n' in text
    assert "# TYPE hastore_refusals_total counter\n" in text
    assert "# HELP hastore_writable 1 while the node takes writes" in text
    families = read(page)
    assert "hastore_epoch" not in families
    refusals = families["hastore_refusals"]
    assert (refusals.type, [sample.value for sample in refusals.samples]) == ("counter", [3, 1])
    common = {"cluster": "demo", "group": "g0", "node": "1"}
    assert refusals.samples[0].labels == {**common, "reason": "BUSY"}
    assert families["hastore_slave_lag_seconds"].samples[0].labels == {**common, "slave": "2"}


def test_a_label_may_have_any_text() -> None:
    page = Page('a"b', "c\\d", "1")
    page.add("hastore_messages_in_total", 1, 'x\n"y\\z\u00e4')
    sample = read(page)["hastore_messages_in"].samples[0]
    assert sample.labels["topic"] == 'x\n"y\\z\u00e4'
    assert (sample.labels["cluster"], sample.labels["group"]) == ('a"b', "c\\d")


def test_a_histogram_is_cumulative_and_in_seconds() -> None:
    page, times = Page("demo", "g0", "1"), Histogram()
    for took_ms in (0.05, 2.0, 2.5, 99_000.0):
        times.observe(took_ms)
    page.add_times("hastore_put_duration_seconds", times, "SYNC_MEM")
    family = read(page)["hastore_put_duration_seconds"]
    found = {one.labels.get("le", one.name): one.value for one in family.samples}
    assert family.type == "histogram" and len(found) == len(BOUNDS_MS) + 3
    assert [found[le] for le in ("0.0001", "0.001", "0.0025", "10", "+Inf")] == [1, 1, 3, 3, 4]
    assert found["hastore_put_duration_seconds_count"] == 4
    assert math.isclose(found["hastore_put_duration_seconds_sum"], 99.00455)
    assert {one.labels["level"] for one in family.samples} == {"SYNC_MEM"}
    assert {one.name for one in family.samples} == set(sample_names(METRICS[family.name]))
