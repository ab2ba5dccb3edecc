"""The catalog follows Prometheus' conventions, and docs/metrics.md is complete and true."""

import re

from hastore.server.metrics.catalog import CHAPTERS, COMMON_LABELS, METRICS, Kind
from tests.metrics_table import DOCUMENT, written


def test_names_follow_the_conventions() -> None:
    assert len(METRICS) == sum(map(len, CHAPTERS.values())), "a name is there twice"
    for name, metric in METRICS.items():
        assert re.fullmatch(r"(hastore|process)_[a-z0-9_]+", name)
        assert name.endswith("_total") is (metric.kind is Kind.COUNTER), name
        if metric.kind is Kind.HISTOGRAM:
            assert name.endswith("_duration_seconds")
        assert not re.search(r"_(ms|millis\w*|kb|mb|percent|count|sum|bucket)$", name), name
        assert not set(metric.labels) & {*COMMON_LABELS, "le"}, name
        assert metric.help and "\n" not in metric.help and not metric.help.endswith(".")


def test_the_document_has_every_metric_with_its_meaning() -> None:
    text = DOCUMENT.read_text()
    assert written(text) == text, "run: python -m tests.metrics_table"
