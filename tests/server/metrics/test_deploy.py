"""Alert rules and dashboard name only metrics that exist, and each alert has its text."""

import json
import pathlib
import re

import yaml

from hastore.server.metrics.catalog import COMMON_LABELS, METRICS
from hastore.server.metrics.page import sample_names

ROOT = pathlib.Path(__file__).resolve().parents[3]
RULES = ROOT / "deploy" / "prometheus" / "hastore.rules.yml"
TESTS = RULES.with_name("hastore.test.yml")
DASHBOARD = ROOT / "deploy" / "grafana" / "hastore.json"
SAMPLES = {sample for metric in METRICS.values() for sample in sample_names(metric)}
LABELS = {
    *COMMON_LABELS,
    *(label for metric in METRICS.values() for label in metric.labels),
    *("le", "job", "instance", "version"),
}


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def named(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hastore|process)_\w+", expression))


def labels(expression: str) -> set[str]:
    """Return the labels that a query groups by, joins by, or selects by."""
    listed = re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", expression)
    selected = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", expression)
    return {one.strip() for text in listed for one in text.split(",")} | set(selected)


def test_every_metric_and_label_of_the_rules_exists() -> None:
    for rule in alerts():
        expression = str(rule["expr"])
        assert named(expression) <= SAMPLES, rule["alert"]
        assert labels(expression) <= LABELS, rule["alert"]
        text = str(rule["annotations"])
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= LABELS, rule["alert"]
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})


def test_every_alert_has_a_heading_that_says_what_to_do_and_a_test() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    headings = re.findall(r"^### (Hastore\w+)$", text, re.M)
    names = [str(rule["alert"]) for rule in alerts()]
    assert sorted(headings) == sorted(names) and len(set(names)) == len(names)
    for rule in alerts():
        runbook = f"docs/operations.md#{str(rule['alert']).lower()}"
        assert rule["annotations"]["runbook"] == runbook  # type: ignore[index]
    tests = [test["name"] for test in yaml.safe_load(TESTS.read_text())["tests"]]
    assert [name for name in tests if name.startswith("Hastore")] == names


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    used: set[str] = set()
    for panel in panels:
        assert panel["title"] and panel["targets"], panel["id"]
        for target in panel["targets"]:
            expression = target["expr"]
            assert 'cluster=~"$cluster",group=~"$group"' in expression
            assert named(expression) <= SAMPLES, panel["title"]
            assert labels(expression) <= LABELS, panel["title"]
            used |= named(expression)
    chapters = {name.partition("_duration")[0] for name in used}
    assert {"hastore_put", "hastore_flush", "hastore_replication", "hastore_pull"} <= chapters
    queries = [one["query"] for one in dashboard["templating"]["list"] if "query" in one]
    for query in map(str, queries):
        assert named(query) <= SAMPLES
