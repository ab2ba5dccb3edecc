"""The fixtures of tests/process, for the kills."""

from tests.process.conftest import make_group, pytest_runtest_makereport

__all__ = ["make_group", "pytest_runtest_makereport"]
