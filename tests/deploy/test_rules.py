"""The rules as promtool reads them, and which test sees which alert firing."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.deploy import test_alerts_of_machines, test_alerts_of_nodes
from tests.deploy.prometheus import documented_job, program
from tests.deploy.shortened import DURATIONS, ROOT, RULES, shipped, shortened, without_durations

NAMES = [rule["alert"] for rule in shipped()]


def promtool(*words: str) -> None:
    done = subprocess.run(
        [program("promtool"), *words], capture_output=True, text=True, check=False,
        cwd=RULES.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow("promtool runs a test of each rule")
def test_promtool_finds_no_mistake_and_its_tests_pass() -> None:
    promtool("check", "rules", RULES.name)
    promtool("test", "rules", "hastore.test.yml")


def test_the_shortened_rules_differ_in_their_durations_only() -> None:
    groups = yaml.safe_load(shortened())["groups"]
    shorter = [rule for group in groups for rule in group["rules"]]
    assert [*map(without_durations, shorter)] == [*map(without_durations, shipped())]
    found = set(re.findall(r"\[(\w+)\]", str(shipped())))
    found |= {rule["for"] for rule in shipped() if "for" in rule}
    assert found == set(DURATIONS)


def test_each_alert_is_seen_firing_by_a_test() -> None:
    tests = [*vars(test_alerts_of_nodes).values(), *vars(test_alerts_of_machines).values()]
    seen = [name for test in tests for name in getattr(test, "fires", ())]
    assert sorted(seen) == sorted(NAMES)


def test_the_documents_say_which_fault_each_alert_was_seen_by() -> None:
    text = (ROOT / "docs" / "operations.md").read_text().partition("\n## Alerts\n")[2]
    assert re.findall(r"^\| `(Hastore\w+)` \| \S", text, re.MULTILINE) == NAMES


def test_the_documented_scrape_job_has_the_name_that_the_rules_select() -> None:
    named = set(re.findall(r'job="(\w+)"', RULES.read_text()))
    assert {documented_job()["job_name"]} == named
