"""The shipped rules with shorter durations, for tests that wait until an alert really fires.

Only durations differ: each `for`, each range `[5m]`, and how far `predict_linear` looks ahead. What
an alert compares, its thresholds, labels and texts are those of the file.
"""

from __future__ import annotations

import pathlib
import re
from typing import Any

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "hastore.rules.yml"
Rule = dict[str, Any]

# Of each duration in the file the one in the tests, which scrape and evaluate once a second. A
# duration that is not here is a KeyError: then choose one.
DURATIONS = {
    "10s": "1s",
    "30s": "2s",
    "1m": "4s",
    "2m": "5s",
    "5m": "10s",
    "10m": "15s",
    "15m": "30s",
    "1h": "10s",
    "2h": "60s",
    "6h": "30s",
}
AHEAD = {"86400": "120"}  # of predict_linear, in seconds
_RANGE = re.compile(r"\[(\w+)\]")
_AHEAD = re.compile(r"(predict_linear\([^()]*, )(\d+)(\))")


def shipped() -> list[Rule]:
    """Return the rules of the file."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def shortened() -> str:
    """Return the file with shorter durations."""
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        group["rules"] = [_shorter(rule) for rule in group["rules"]]
    return yaml.safe_dump(content, sort_keys=False, width=1_000)


def without_durations(rule: Rule) -> Rule:
    """Return a rule whose durations are masked: equal for a shipped rule and its shortened one."""
    expression = _AHEAD.sub(r"\g<1>AHEAD\g<3>", _RANGE.sub("[RANGE]", rule["expr"]))
    return {**rule, "expr": expression, "for": "for" in rule}


def _shorter(rule: Rule) -> Rule:
    expression = _RANGE.sub(lambda found: f"[{DURATIONS[found[1]]}]", rule["expr"])
    expression = _AHEAD.sub(lambda found: found[1] + AHEAD[found[2]] + found[3], expression)
    changed = {"expr": expression}
    if "for" in rule:
        changed["for"] = DURATIONS[rule["for"]]
    return {**rule, **changed}
