"""Run the scenarios and compare their whole output with the files (scenario.py explains them)."""

import pathlib

import pytest

from tests.dledger.core.scenario import run

FILES = sorted((pathlib.Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_scenario_gives_exactly_its_output(path):
    assert run(path) == path.read_text()


def test_there_are_scenarios():
    assert len(FILES) >= 15
