"""Fixtures for groups of nodes, which are killed and reaped at the end of their test."""

from tests.process.conftest import make_group, pytest_runtest_makereport

__all__ = ["make_group", "pytest_runtest_makereport"]
