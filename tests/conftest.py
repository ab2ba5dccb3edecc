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
LONG = ("torture", "process", "interop", "spark", "cli", "demo")
# What shares an expensive fixture, a JVM or a group of nodes, stays in one worker.
TOGETHER = (
    "tests/spark/",
    "tests/cli/test_commands.py",
    "tests/demo/",
    "tests/cli/test_positions.py",
    "tests/cli/test_screens.py",
)
TESTS = pathlib.Path(__file__).parent

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")

# pytest prints the stacks of its own process; what it starts is told to do so too.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
_, _hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (_hard, _hard))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Deal the tests out one by one, but for those that belong together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid)

    return Scheduler(config, log)


def pytest_collection_modifyitems(config, items):
    """Where there are workers, what takes long goes first."""
    if not hasattr(config, "workerinput"):
        return
    place = {name: number for number, name in enumerate(LONG)}

    def rank(item):
        path = item.path
        folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
        return place.get(folder, len(LONG))

    items.sort(key=rank)
