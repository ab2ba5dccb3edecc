"""What all tests share: random ones print how to repeat a failure, a busy machine fails none, and a
crash of the interpreter leaves its traces (CONTRIBUTING.md).
"""

import os
import pathlib
import resource

import pytest
from hypothesis import settings

# Whole processes, JVMs and kills take the longest: two workers begin with them and end with the
# many short ones, so that neither waits for the other's last test.
LONG = ("torture", "process", "interop", "spark", "cli")
TESTS = pathlib.Path(__file__).parent

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")

# pytest prints the stacks of its own process; what it starts is told to do so too.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
_, _hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (_hard, _hard))


def pytest_collection_modifyitems(config, items):
    """Keep Spark's tests in one worker, for their one JVM; where there are workers, long first."""

    def folder(item):
        path = item.path
        return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""

    for item in items:
        if folder(item) == "spark":
            item.add_marker(pytest.mark.xdist_group("spark"))
    if hasattr(config, "workerinput"):
        place = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: place.get(folder(item), len(LONG)))
