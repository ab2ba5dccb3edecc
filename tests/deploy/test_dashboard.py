"""Each panel of the dashboard, and each metric of the rules, has data of real nodes."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import re
import threading
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import pytest

from hastore import Consumer
from hastore.errors import HastoreError
from tests.deploy.faults import puts
from tests.deploy.prometheus import Labels, Prometheus
from tests.deploy.secured import Secured
from tests.deploy.shortened import ROOT, shipped
from tests.process.dledger_group import DLedgerGroup
from tests.process.harness import Group, wait_until

DASHBOARD = ROOT / "deploy" / "grafana" / "hastore.json"
RATE_INTERVAL = "4s"  # Grafana's $__rate_interval is four times the interval of the scrapes
SETTLE_S = 120.0
# What a group has only in mode dledger, and what it has only after a fault.
ELECTED = {"hastore_elections_total"}
FAULTY = {"hastore_refusals_total", "hastore_puts_unconfirmed_total"}
SECURED = {
    *("hastore_identities_version", "hastore_logins_total"),
    "hastore_certificate_end_timestamp_seconds",
}
ALONE = {"master_role": "ASYNC_MASTER"}


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:hastore|process)_\w+", expression))


class Query(NamedTuple):
    """A query of a panel, with the legend of its lines; or a metric of the rules, without one."""

    expression: str
    legend: str = ""

    def lines(self, found: list[tuple[Labels, float]]) -> list[str]:
        """Return the legends of the samples that are numbers."""
        return [
            re.sub(r"\{\{(\w+)\}\}", lambda name, labels=labels: labels[name[1]], self.legend)
            for labels, number in found
            if not math.isnan(number)
        ]


def queries() -> list[Query]:
    """Return the queries of all panels, and each metric that a rule names."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [target for panel in panels for target in panel.get("targets", ())]
    assert len(targets) > 30
    of_rules = sorted(set().union(*(names(rule["expr"]) for rule in shipped())))
    return [*(Query(one["expr"], one["legendFormat"]) for one in targets), *map(Query, of_rules)]


def variables(prometheus: Prometheus) -> dict[str, str]:
    """Return the dashboard's variables with all their values, as Grafana fills them in."""
    found = {"__rate_interval": RATE_INTERVAL}
    for one in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if one["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", one["query"]).groups()
            matching = {"match[]": fill_in(series, found)}
            values = prometheus.ask(f"label/{label}/values", **matching)
            found[one["name"]] = f"({'|'.join(values)})"
    return found


def fill_in(expression: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression


def wait_data(prometheus: Prometheus, but: AbstractSet[str] = frozenset()) -> None:
    """Wait until each query has given a number, but those of some metrics; some do for a moment.

    The lines of a panel must have different legends.
    """
    lacking = dict.fromkeys(one for one in queries() if not names(one.expression) & but)

    def look() -> bool:
        values = variables(prometheus)
        for one in list(lacking):
            lines = one.lines(prometheus.query(fill_in(one.expression, values)))
            if lines:
                assert not one.legend or len(set(lines)) == len(lines), (one, lines)
                del lacking[one]
        return not lacking

    wait_until(look, SETTLE_S, lambda: f"no data: {list(lacking)}")


@contextlib.contextmanager
def consumer(bootstrap: list[str], **options: object) -> Iterator[None]:
    """Read the topic of `puts` and commit, until the end of the block."""
    stop = threading.Event()

    def run() -> None:
        with Consumer("T", bootstrap, group="shop", start="earliest", **options) as one:
            while not stop.is_set():
                with contextlib.suppress(HastoreError):
                    one.poll(timeout_s=0.5)
                    one.commit()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.full
@pytest.mark.long
@pytest.mark.slow("two groups under load, with a Prometheus each")
def test_each_panel_and_each_metric_of_the_rules_has_data(tmp_path: pathlib.Path) -> None:
    (tmp_path / "pair").mkdir()
    (tmp_path / "elected").mkdir()
    with Group(tmp_path / "pair") as group:
        secured = Secured(tmp_path / "pair", group)
        security = {"security": str(secured.client)}
        with (
            Prometheus(tmp_path / "pair", secured.start(), ca=secured.ca, key=secured.key) as one,
            puts(group.bootstrap, delivery_timeout_s=1.0, **security),
            consumer(group.bootstrap, **security),
        ):
            wait_data(one, but=ELECTED | FAULTY)
            group[2].pause()
            everything = set().union(*(names(query.expression) for query in queries()))
            wait_data(one, but=everything - FAULTY)
            group[2].resume()
    with DLedgerGroup(tmp_path / "elected") as elected, Group(tmp_path, 1, **ALONE) as other:
        for node in elected:
            node.write(group="g1")
        other[1].start("master")
        with (
            Prometheus(tmp_path, [*elected.start(), *other]) as one,
            puts(elected.bootstrap), puts(other.bootstrap),
            consumer(elected.bootstrap), consumer(other.bootstrap),
        ):  # fmt: skip
            wait_data(one, but=FAULTY | SECURED)
