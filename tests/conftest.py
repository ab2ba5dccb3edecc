"""Settings of all tests: the order in the workers, hypothesis, and traces of an interpreter crash.

Hypothesis prints how to repeat a failure, and has no deadline, so that a busy machine fails no
test. CONTRIBUTING.md says where to find the traces of a crash.
"""

import functools
import os
import pathlib
import re
import resource

import pytest
from hypothesis import settings

# The folders with the longest tests (processes, JVMs, kills). The workers begin with these and end
# with the many short tests, so that neither waits long for the other's last test.
LONG = ("torture", "process", "registry", "interop", "spark", "cli", "demo", "pipeline")
# Tests that share an expensive fixture, a JVM or a group of nodes, stay in one worker.
TOGETHER = (
    "tests/spark/cluster/",
    "tests/cli/test_commands.py",
    "tests/demo/",
    "tests/registry/test_bad_objects.py",
    "tests/process/test_dledger.py",
    "tests/interop/test_dledger_faults.py",
    "tests/cli/test_positions.py",
    "tests/cli/test_screens.py",
)
TESTS = pathlib.Path(__file__).parent
# The fixture `spark` is a session that all its tests share.
USES_SPARK = re.compile(r"def \w+\([^)]*\bspark\b")

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")

# pytest prints the stacks of its own process at a crash; make the child processes do the same.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
_, _hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (_hard, _hard))


@functools.cache
def uses_spark(module):
    """Return whether tests of a module use the shared Spark session."""
    path = TESTS.parent / module
    return module.startswith("tests/spark/") and bool(USES_SPARK.search(path.read_text()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute the tests one by one, except those that share something expensive."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            if uses_spark(nodeid.partition("::")[0]):
                return "tests/spark/"
            return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid)

    return Scheduler(config, log)


def pytest_collection_modifyitems(config, items):
    """In a worker, run the long tests first."""
    if not hasattr(config, "workerinput"):
        return
    place = {name: number for number, name in enumerate(LONG)}

    def rank(item):
        path = item.path
        folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
        return place.get(folder, len(LONG))

    items.sort(key=rank)
