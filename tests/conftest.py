"""Settings of all tests: who runs what and when, hypothesis, the report at the end of a run.

A case marked `full` runs only in `make test-all`; CONTRIBUTING.md says what belongs there.
Hypothesis prints how to repeat a failure, and has no deadline, so that a busy machine fails no
test. CONTRIBUTING.md says where to find the traces of a crash.
"""

import collections
import functools
import gc
import os
import pathlib
import re
import resource
import subprocess

import pytest
from hypothesis import settings

# The modules that take a minute or more; those that compute stand beside those that wait. The
# workers begin with these and with the modules of the shared Spark session, and end with the many
# short ones, so that none waits long for another's last module.
LONGEST = (
    *("test_readme_tour.py", "interop/test_hastore_slave.py", "interop/test_migration.py"),
    *("spark/cluster/test_cluster.py", "interop/test_rocketmq_clients.py"),
    *("torture/test_partitions.py", "demo/test_demo.py", "interop/test_mqadmin.py"),
    *("dledger/test_simulation.py", "dledger/driver/test_driver.py", "ha/test_simulation.py"),
    *("server/test_transactional_sends.py", "dledger/driver/test_identity.py"),
    *("registry/test_cluster_consumer.py", "registry/test_cluster_clients.py"),
    *("deploy/test_alerts_of_machines.py", "deploy/test_alerts_of_nodes.py"),
)
# The folders with the next longest (JVMs, processes, kills).
LONG = (
    *("spark", "torture", "process", "registry", "interop", "dledger", "ha"),
    *("cli", "demo", "pipeline"),
)
TESTS = pathlib.Path(__file__).parent
# The fixture `spark` is a session that all its tests share; `run` has it too.
USES_SPARK = re.compile(r"def \w+\([^)]*\b(?:spark|run)\b")
READS_SOURCES = re.compile(r"^from tests\.(?:sources|documents\.error_texts) import", re.M)
SLOW_S = 10.0  # a case above it says why, by @pytest.mark.slow("...")
BUSY = 3.0  # processes per core that want to run: then no case is asked for a reason
SMALL_DISK = 16 << 20
SHOWN_S = 1.0  # the list of slow cases begins here, so that a short run prints none
# The file for the counts of this run; a test that starts another pytest must not hand it on.
COUNTS = os.environ.pop("HASTORE_TEST_COUNTS", None)

# An assert of these kits that fails shows its values, like one of a test.
pytest.register_assert_rewrite("tests.process", "tests.torture")

settings.register_profile("hastore", deadline=None, print_blob=True)
settings.load_profile("hastore")

# pytest prints the stacks of its own process at a crash; make the child processes do the same.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
_, _hard = resource.getrlimit(resource.RLIMIT_CORE)
resource.setrlimit(resource.RLIMIT_CORE, (_hard, _hard))

_module = None  # the file of the case before
_seconds = collections.defaultdict(float)  # case -> its set-up, call and tear-down
_reasons = {}  # case -> why it takes long


@functools.cache
def uses_spark(module):
    """Return whether tests of a module use the shared Spark session."""
    path = TESTS.parent / module
    folder = module.startswith(("tests/spark/", "tests/interop/"))
    return folder and bool(USES_SPARK.search(path.read_text()))


@functools.cache
def reads_sources(module):
    """Return whether tests of a module read the parsed sources (tests/sources.py)."""
    return bool(READS_SOURCES.search(TESTS.parent.joinpath(module).read_text()))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give a worker a whole module, so that what the module shares is made once.

    The modules of the shared Spark session go to one worker together, and so do those that read
    the parsed sources. The workers take the modules in the order of collection.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            module = nodeid.partition("::")[0]
            if uses_spark(module):
                return "tests/spark/"
            return "tests/sources.py" if reads_sources(module) else module

    config.option.loadscopereorder = False
    return Scheduler(config, log)


def pytest_collection_modifyitems(config, items):
    """In a worker, run the longest modules first, then those with slow cases, then by folders."""
    if not hasattr(config, "workerinput"):
        return
    place = {name: number for number, name in enumerate(LONG)}
    longest = {name: number for number, name in enumerate(LONGEST, 1)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def rank(item):
        path = item.path
        name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
        shared = bool(name) and uses_spark(f"tests/{name}")
        first = 0 if shared else longest.get(name, len(LONGEST) + 1)
        return first, path not in slow, place.get(name.partition("/")[0], len(LONG))

    items.sort(key=rank)


def pytest_collection_finish():
    """Keep modules and cases out of later collections, of which some tests make hundreds."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Put the reason of a slow case into its report, which a worker sends."""
    leave_out_of_collections(item.path)
    marker = item.get_closest_marker("slow")
    if marker:
        (reason,) = marker.args
        item.user_properties.append(("slow", reason))


def leave_out_of_collections(module):
    """Free what the module before has left, and keep all else out of this one's collections.

    A worker imports pandas, Spark and much more. A look at all of it takes a second on a busy
    machine, and some tests collect a hundred times.
    """
    global _module
    if module != _module:
        _module = module
        gc.collect()
        gc.freeze()


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] += report.duration
    _reasons.update((report.nodeid, why) for name, why in report.user_properties if name == "slow")


def pytest_terminal_summary(terminalreporter):
    """Print what was left out and the slowest cases; note the counts for .ci/run."""
    if hasattr(terminalreporter.config, "workerinput"):
        return
    stats = terminalreporter.stats
    for line in left_out(stats.get("skipped", [])):
        terminalreporter.write_line(line)
    for line in slow_cases(_seconds, _reasons):
        terminalreporter.write_line(line)
    if COUNTS:
        failed = len(stats.get("failed", [])) + len(stats.get("error", []))
        passed, skipped = (len(stats.get(name, [])) for name in ("passed", "skipped"))
        with open(COUNTS, "a") as file:
            file.write(f"{passed} {failed} {skipped}\n")


def left_out(skipped):
    """Return a line for each folder and reason of skipped cases."""
    groups = collections.Counter()
    for report in skipped:
        folder = "/".join(report.nodeid.partition("::")[0].split("/")[:2])
        groups[folder, report.longrepr[2].removeprefix("Skipped: ")] += 1
    return [
        f"left out: {count} of {folder}: {reason}"
        for (folder, reason), count in sorted(groups.items())
    ]


def slow_cases(seconds, reasons):
    """Return lines with the ten slowest cases, and those that take long without a reason."""
    slowest = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(case, took) for case, took in slowest[:10] if took >= SHOWN_S]
    lines = ["the slowest cases, with what each set up:"] if shown else []
    for case, took in shown:
        reason = f"  ({reasons[case]})" if case in reasons else ""
        lines.append(f"{took:6.1f} s  {case}{reason}")
    unexplained = [case for case, took in slowest if took > SLOW_S and case not in reasons]
    if unexplained and os.getloadavg()[1] > BUSY * (os.cpu_count() or 1):
        return [*lines, f"{len(unexplained)} took more than {SLOW_S:g} s, on a busy machine"]
    why = 'without a reason: shorten it, or say why by @pytest.mark.slow("...")'
    return lines + [f"{case} took more than {SLOW_S:g} s {why}" for case in unexplained]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(place)],
        capture_output=True, check=False,
    )  # fmt: skip
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
