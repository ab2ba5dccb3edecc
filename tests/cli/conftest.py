"""Groups of nodes for the commands, killed and reaped with their test."""

from tests.process.conftest import make_group, pytest_runtest_makereport

__all__ = ["make_group", "pytest_runtest_makereport"]
